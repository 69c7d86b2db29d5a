"""Measures of kernels against dense numpy in float64, on matrices and on operators in tiles, and their invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathlens.errors import (
    BudgetError,
    LabelError,
    NotFiniteError,
    OptionError,
    ScaleError,
    ShapeError,
    SolverError,
    UnknownNameError,
)
from pathlens.kernels.measures import (
    class_blocks,
    cumulative_spectrum,
    drift,
    effective_rank,
    frobenius_norm,
    kernel_alignment,
    nu,
    part_norms,
    spectral_ecdf,
    spectrum,
    target_alignment,
)
from pathlens.linops import GramSum, KernelOperator


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operator(seed: int, n: int = 23, *, small: bool = True, scale: float = 1.0) -> GramSum:
    """A positive definite kernel; with ``small`` its budget holds tiles of a few rows only."""
    h, delta = draw(seed, n, n), draw(seed + 1, n, 4) * math.sqrt(scale)
    return GramSum.from_factors([[("h", h), ("delta", delta)]], max_bytes=40_000 if small else None)


def numpy_of(kernel: KernelOperator) -> np.ndarray:
    return kernel.with_options(max_bytes=2**30).dense().numpy()


def centre(a: np.ndarray) -> np.ndarray:
    h = np.eye(len(a)) - 1.0 / len(a)
    return h @ a @ h


# --- ν -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [None, 3])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_nu_equals_the_inverse(c: int | None, ridge: float) -> None:
    kernel = operator(0, small=False)
    y = draw(9, 23) if c is None else draw(9, 23, c)
    dense = kernel.dense().numpy()
    added = ridge * np.trace(dense) / 23
    columns = y.numpy().reshape(23, -1)
    want = np.trace(columns.T @ np.linalg.inv(dense + added * np.eye(23)) @ columns)
    for form in (kernel, kernel.dense(), dense):
        got = nu(form, y, ridge=ridge)
        assert got.raw == pytest.approx(want, rel=1e-9)
        assert got.normalised == pytest.approx(want * np.trace(dense), rel=1e-9)
        assert got.ridge == pytest.approx(added, rel=1e-12) and got.residual < 1e-9
    values, vectors = np.linalg.eigh(dense / np.trace(dense) + ridge / 23 * np.eye(23))
    spectral = float((((vectors.T @ columns) ** 2).sum(1) / values).sum())
    assert nu(kernel, y, ridge=ridge).normalised == pytest.approx(spectral, rel=1e-9)


def test_nu_of_the_identity_is_n_squared_and_the_least_is_n() -> None:
    y = draw(1, 200).sign()
    assert nu(3.0 * torch.eye(200), y).normalised == pytest.approx(200.0**2)
    nearly = torch.outer(y, y) + 1e-9 * torch.eye(200, dtype=torch.float64)
    assert nu(nearly, y).normalised == pytest.approx(200.0, rel=1e-6)


def test_nu_by_conjugate_gradients_beyond_the_budget() -> None:
    kernel = operator(2, n=60)
    y = draw(3, 60)
    assert (kernel.max_bytes or 0) < 3 * 60 * 60 * 8
    got, want = nu(kernel, y, ridge=1.0), nu(numpy_of(kernel), y, ridge=1.0)
    assert got.normalised == pytest.approx(want.normalised, rel=1e-8)
    assert 0 < got.residual < 1e-9


def test_nu_of_path_counts_beyond_the_range_of_float32() -> None:
    x = draw(4, 6, 6).to(torch.float32)
    big = GramSum.from_factors([[("x", x)] + [("ones", 1e10 * torch.ones(6, 1))] * 4])
    want = nu(GramSum.from_factors([[("x", x)]]), torch.ones(6))
    got = nu(big, torch.ones(6))
    assert got.normalised == pytest.approx(want.normalised, rel=1e-4)
    assert got.raw == pytest.approx(want.raw * 1e-80, rel=1e-4)


@pytest.mark.parametrize(
    "kernel",
    [
        torch.ones(4, 4),
        torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0])),
        torch.zeros(4, 4),
        draw(5, 4, 3) @ draw(5, 4, 3).T,  # rank 3: Cholesky may run through on rounding
        GramSum.from_factors([[("x", draw(6, 4, 3).to(torch.float32))]]),
    ],
)
def test_nu_refuses_what_is_not_positive_definite(kernel: KernelOperator | Tensor) -> None:
    with pytest.raises(SolverError, match="not positive definite"):
        nu(kernel, torch.ones(4))


def test_nu_with_a_ridge_takes_a_singular_kernel() -> None:
    # K = 11ᵀ, y = 1: yᵀ(K + ρI)⁻¹y = n/(n + ρ)
    assert nu(torch.ones(4, 4), torch.ones(4), ridge=0.5).raw == pytest.approx(4 / 4.5)


# --- spectra -------------------------------------------------------------------------------------------------------


def test_spectra_equal_numpy() -> None:
    kernel = operator(7, small=False)
    values = np.linalg.eigvalsh(kernel.dense().numpy())
    np.testing.assert_allclose(spectrum(kernel).numpy(), values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(cumulative_spectrum(kernel).numpy(), np.cumsum(values), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        cumulative_spectrum(kernel, scale="largest").numpy(), np.cumsum(values / values[-1]), rtol=1e-9, atol=1e-12
    )
    assert float(cumulative_spectrum(kernel, scale="trace")[-1]) == pytest.approx(1.0)
    points, share = spectral_ecdf(kernel)
    np.testing.assert_allclose(points.numpy(), values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(share.numpy(), np.arange(1, 24) / 23)
    at = np.linspace(-1, values[-1] + 1, 17)
    np.testing.assert_allclose(spectral_ecdf(kernel, at=at)[1].numpy(), [(values <= a).mean() for a in at])


def test_cumulative_spectrum_of_the_papers_ideal_kernel() -> None:
    """(1 − μ^(d−1))I + μ^(d−1)11ᵀ: linear, then a last step of 1 + (n − 1)μ^(d−1) (DGN, section 2)."""
    n, low = 10, 0.5**3
    sums = cumulative_spectrum((1 - low) * torch.eye(n, dtype=torch.float64) + low)
    np.testing.assert_allclose(sums[:-1].numpy(), (1 - low) * np.arange(1, n), rtol=1e-12)
    assert float(sums[-1] - sums[-2]) == pytest.approx(1 + (n - 1) * low)


def test_effective_ranks_equal_numpy_and_are_ordered() -> None:
    kernel = operator(8, small=False)
    values = np.linalg.eigvalsh(kernel.dense().numpy())
    share = values / values.sum()
    want = {
        "entropy": math.exp(-(share * np.log(share)).sum()),
        "trace": 1 / share[-1],
        "participation": 1 / (share**2).sum(),
    }
    got = {kind: effective_rank(kernel, kind=kind) for kind in want}  # type: ignore[arg-type]
    assert got == pytest.approx(want, rel=1e-9)
    assert 1 < got["trace"] < got["participation"] < got["entropy"] < 23
    assert effective_rank(operator(8), kind="participation") == pytest.approx(want["participation"], rel=1e-9)


def test_effective_rank_of_low_rank_and_indefinite_kernels() -> None:
    x = torch.linalg.qr(draw(9, 12, 3))[0]
    for kind in ("entropy", "trace", "participation"):
        assert effective_rank(x @ x.T, kind=kind) == pytest.approx(3.0, rel=1e-9)  # type: ignore[arg-type]
    with pytest.raises(SolverError, match="positive semi-definite"):
        effective_rank(torch.diag(torch.tensor([3.0, -1.0])))


# --- norms, alignment, drift, blocks -------------------------------------------------------------------------------


def test_norms_equal_numpy() -> None:
    kernel, other = operator(10), operator(12)
    a, b = numpy_of(kernel), numpy_of(other)
    assert len(list(kernel.tiles())) >= 4
    assert frobenius_norm(kernel) == pytest.approx(np.linalg.norm(a), rel=1e-12)
    assert frobenius_norm(kernel[:5, 3:]) == pytest.approx(np.linalg.norm(a[:5, 3:]), rel=1e-12)
    norms = part_norms({"value": kernel, "feature": b})
    assert norms["value"].trace == pytest.approx(np.trace(a)) and norms["feature"].trace == pytest.approx(np.trace(b))
    assert norms["feature"].frobenius == pytest.approx(np.linalg.norm(b))
    assert norms["value"].trace_share == pytest.approx(np.trace(a) / np.trace(a + b))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("c", [None, 3])
def test_target_alignment_equals_numpy(centred: bool, c: int | None) -> None:
    kernel = operator(14)
    y = draw(15, 23) + 1 if c is None else draw(15, 23, c) + 1
    a, target = numpy_of(kernel), (y.reshape(23, -1) @ y.reshape(23, -1).T).numpy()
    if centred:
        a, target = centre(a), centre(target)
    want = (a * target).sum() / np.linalg.norm(a) / np.linalg.norm(target)
    assert target_alignment(kernel, y, centred=centred) == pytest.approx(want, rel=1e-11)
    assert target_alignment(numpy_of(kernel), y, centred=centred) == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize("centred", [True, False])
def test_kernel_alignment_and_drift_equal_numpy(centred: bool) -> None:
    first, second = operator(16), operator(18)
    a, b = numpy_of(first), numpy_of(second)
    moved = np.linalg.norm(a - b) / np.linalg.norm(b)
    shape = np.linalg.norm(a / np.trace(a) - b / np.trace(b)) / np.linalg.norm(b / np.trace(b))
    ca, cb = (centre(a), centre(b)) if centred else (a, b)
    want = (ca * cb).sum() / np.linalg.norm(ca) / np.linalg.norm(cb)
    for left, right in ((first, second), (first, b), (a, second), (a, b)):
        assert kernel_alignment(left, right, centred=centred) == pytest.approx(want, rel=1e-10)
        assert drift(left, right) == pytest.approx(moved, rel=1e-12)
        assert drift(left, right, normalise=True) == pytest.approx(shape, rel=1e-11)
    assert drift(first[:4, 7:], b[:4, 7:]) == pytest.approx(np.linalg.norm((a - b)[:4, 7:]) / np.linalg.norm(b[:4, 7:]))


def test_alignment_of_kernels_of_different_dtype_and_huge_scale() -> None:
    x = draw(20, 30, 8)
    fine = GramSum.from_factors([[("x", x)]])
    coarse = GramSum.from_factors([[("x", x.to(torch.float32))] + [("ones", 1e10 * torch.ones(30, 1))] * 4])
    assert kernel_alignment(coarse, fine) == pytest.approx(1.0, abs=1e-6)
    assert target_alignment(coarse, x) == pytest.approx(1.0, abs=1e-6)


def test_class_blocks_equal_numpy() -> None:
    kernel = operator(22)
    a = numpy_of(kernel)
    labels = np.array([i % 4 for i in range(23)])
    want = np.array([[a[labels == p][:, labels == q].mean() for q in range(4)] for p in range(4)])
    for form in (kernel, a):
        np.testing.assert_allclose(class_blocks(form, labels, trace=None).numpy(), want, rtol=1e-11, atol=1e-11)
        scaled = class_blocks(form, labels).numpy()
        np.testing.assert_allclose(scaled, want * 100 / np.trace(want), rtol=1e-11, atol=1e-11)
    columns = labels[3:10]
    cross = class_blocks(kernel[:, 3:10], torch.tensor(labels), column_labels=columns, trace=None).numpy()
    want = np.array([[a[labels == p][:, 3:10][:, columns == q].mean() for q in range(4)] for p in range(4)])
    np.testing.assert_allclose(cross, want, rtol=1e-11, atol=1e-11)


# --- invariances ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.floats(1e-3, 1e3))
def test_scale_and_order_do_not_matter(seed: int, n: int, scale: float) -> None:
    x, y = draw(seed, n, n + 2), draw(seed + 1, n)
    kernel = x @ x.T
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    moved, labels = scale * kernel[order][:, order], y[order]
    assert nu(moved, labels).normalised == pytest.approx(nu(kernel, y).normalised, rel=1e-5)
    assert nu(moved, labels).raw == pytest.approx(nu(kernel, y).raw / scale, rel=1e-5)
    for kind in ("entropy", "trace", "participation"):
        rank = effective_rank(kernel, kind=kind)  # type: ignore[arg-type]
        assert effective_rank(moved, kind=kind) == pytest.approx(rank, rel=1e-7)  # type: ignore[arg-type]
        assert 1 - 1e-9 <= rank <= n + 1e-9
    for centred in (True, False):
        aligned = target_alignment(kernel, y, centred=centred)
        assert target_alignment(moved, labels, centred=centred) == pytest.approx(aligned, rel=1e-7)
        assert -1e-9 <= aligned <= 1 + 1e-9
        assert kernel_alignment(kernel, scale * kernel, centred=centred) == pytest.approx(1.0, rel=1e-9)
    assert drift(scale * kernel, kernel) == pytest.approx(abs(scale - 1), rel=1e-9, abs=1e-12)
    assert drift(scale * kernel, kernel, normalise=True) == pytest.approx(0.0, abs=1e-12)
    assert nu(kernel / kernel.trace(), y).raw >= float(y.square().sum()) * (1 - 1e-9)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_squares_that_leave_float64_do_not_show(scale: float) -> None:
    matrix, y = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).double(), torch.tensor([1.0, 2.0]).double()
    assert frobenius_norm(scale * matrix) == pytest.approx(scale * math.sqrt(15), rel=1e-12)
    assert part_norms({"one": scale * matrix})["one"].frobenius == pytest.approx(scale * math.sqrt(15), rel=1e-12)
    assert drift(3 * scale * matrix, scale * matrix) == pytest.approx(2.0, rel=1e-12)
    for centred in (True, False):
        aligned = target_alignment(matrix, y, centred=centred)
        assert target_alignment(matrix, scale * y, centred=centred) == pytest.approx(aligned, rel=1e-12)


def test_a_matrix_is_known_to_the_precision_it_came_in() -> None:
    near = torch.tensor([[1.0, 1.0 - 2.0**-24], [1.0 - 2.0**-24, 1.0]], dtype=torch.float64)
    assert nu(near, torch.ones(2)).raw == pytest.approx(1.0)
    with pytest.raises(SolverError, match="float32"):  # 1 − 2⁻²⁴ may be a 1 that was rounded
        nu(near.float(), torch.ones(2))
    x = draw(0, 60, 5).float()
    exact = effective_rank(x.double() @ x.double().T)
    assert effective_rank(x @ x.T) == pytest.approx(exact, rel=1e-4)
    assert effective_rank((x @ x.T).numpy()) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e9])
def test_targets_far_from_zero_that_vary_little_have_an_alignment(offset: float) -> None:
    y = torch.tensor([1.0, -1.0, 0.5, 2.0]).double()
    kernel = torch.eye(4).double() + torch.outer(y, y)
    assert target_alignment(kernel, y + offset) == pytest.approx(target_alignment(kernel, y), rel=1e-15 * offset)
    with pytest.raises(ScaleError, match="norm zero"):
        target_alignment(kernel, torch.full((4,), offset + 0.1))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 9), st.floats(-50, 50))  # two rows may be equal but for rounding
def test_centred_alignment_ignores_constants(seed: int, n: int, shift: float) -> None:
    x, y = draw(seed, n, 3), draw(seed + 1, n)
    kernel = x @ x.T
    want = target_alignment(kernel, y)
    assert target_alignment(kernel + abs(shift), y + shift) == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert kernel_alignment(kernel + abs(shift), kernel) == pytest.approx(1.0, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_equal_classes_have_the_mean_as_the_mean_of_blocks(seed: int, c: int, each: int) -> None:
    x = draw(seed, c * each, 3)
    kernel = x @ x.T
    blocks = class_blocks(kernel, torch.arange(c).repeat(each), trace=None)
    assert blocks.shape == (c, c) and torch.allclose(blocks, blocks.T)
    assert float(blocks.mean()) == pytest.approx(float(kernel.mean()), rel=1e-9, abs=1e-12)
    assert float(class_blocks(kernel, torch.arange(c).repeat(each)).trace()) == pytest.approx(100.0)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_refusals_name_what_came() -> None:
    eye = torch.eye(3)
    with pytest.raises(ShapeError, match=r"y has shape \(4,\), expected \(3,\)"):
        nu(eye, torch.ones(4))
    with pytest.raises(OptionError, match="ridge must be a finite number"):
        nu(eye, torch.ones(3), ridge=-1.0)
    with pytest.raises(NotFiniteError):
        nu(eye, torch.tensor([1.0, float("nan"), 0.0]))
    for measure in (nu, target_alignment):  # labels are no numbers, but two classes are
        with pytest.raises(LabelError, match=r"3 different integers .*one_hot"):
            measure(eye, torch.tensor([0, 1, 2]))
        assert measure(eye, torch.tensor([0, 1, 1])) == measure(eye, torch.tensor([0.0, 1.0, 1.0]))
    with pytest.raises(NotFiniteError):
        spectrum(eye * float("nan"))
    with pytest.raises(SolverError, match="3 × 2 and not symmetric"):
        spectrum(torch.ones(3, 2))
    with pytest.raises(SolverError, match="not symmetric"):
        target_alignment(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.ones(2))
    with pytest.raises(ShapeError, match="expected \\(n, m\\)"):
        frobenius_norm(torch.ones(3))
    with pytest.raises(BudgetError, match="raise max_bytes"):
        spectrum(operator(0, n=80))
    with pytest.raises(UnknownNameError, match="entropy"):
        effective_rank(eye, kind="entropie")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="largest"):
        cumulative_spectrum(eye, scale="max")  # type: ignore[arg-type]
    with pytest.raises(ScaleError, match="trace is -3"):
        cumulative_spectrum(-eye, scale="trace")
    with pytest.raises(ScaleError, match="norm zero"):
        target_alignment(eye, torch.ones(3))
    with pytest.raises(ScaleError, match="norm zero"):
        kernel_alignment(eye, torch.full((3, 3), 0.1))
    with pytest.raises(ShapeError, match="3 × 3 and 2 × 2"):
        drift(eye, torch.eye(2))
    with pytest.raises(ScaleError, match="start kernel is zero"):
        drift(eye, torch.zeros(3, 3))
    with pytest.raises(OptionError, match="no parts"):
        part_norms({})


def test_class_labels_are_checked() -> None:
    eye = torch.eye(3)
    with pytest.raises(LabelError, match="class 1"):
        class_blocks(eye, [0, 2, 2])
    with pytest.raises(LabelError, match="contain -1"):
        class_blocks(eye, [0, -1, 1])
    with pytest.raises(LabelError, match="expected integers"):
        class_blocks(eye, torch.tensor([0.0, 1.0, 1.0]))
    with pytest.raises(ShapeError, match="expected \\(3,\\)"):
        class_blocks(eye, [0, 1])
    with pytest.raises(ShapeError, match="give column_labels"):
        class_blocks(torch.ones(3, 2), [0, 1, 1])
    with pytest.raises(ShapeError, match="pass trace=None"):
        class_blocks(torch.ones(3, 2), [0, 1, 1], column_labels=[0, 0])
    with pytest.raises(ScaleError, match="cannot be scaled"):
        class_blocks(-eye, [0, 1, 1])


def test_centring_keeps_its_digits_beside_a_large_mean() -> None:
    """‖HKH‖² as a difference of sums over K lost as many digits as the square of the mean has before the point."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((30, 3))
    b = a + rng.standard_normal((30, 3))
    y = np.sign(a[:, 0])
    K, L = a @ a.T, b @ b.T
    assert abs(kernel_alignment(K + 1e6, L + 1e6) - kernel_alignment(K, L)) < 1e-11
    assert abs(target_alignment(K + 1e6, y) - target_alignment(K, y)) < 1e-11
    one = np.ones((30, 1))
    wide = [GramSum.from_factors([[("x", torch.from_numpy(np.hstack([1e3 * one, x])))]]) for x in (a, b)]
    assert abs(kernel_alignment(*wide) - kernel_alignment(K, L)) < 1e-11
