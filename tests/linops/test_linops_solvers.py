"""solve and eigsh: agreement with dense linear algebra, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pathlens.errors import (
    BudgetError,
    DTypeError,
    NotFiniteError,
    OptionError,
    PrecisionWarning,
    ShapeError,
    SolverError,
)
from pathlens.linops import GramSum, nystrom


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kernel(n: int = 40, r: int = 50, dtype: torch.dtype = torch.float64) -> GramSum:
    return GramSum.from_factors([[("h", randn(n, r, dtype=dtype)), ("d", randn(n, 4, seed=1, dtype=dtype))]])


@pytest.mark.parametrize("method", ["cholesky", "cg"])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_solve_matches_dense(method: str, columns: int | None, dtype: torch.dtype) -> None:
    K = kernel(dtype=dtype)
    y = randn(40, *([] if columns is None else [columns]), seed=2, dtype=dtype)
    found = K.solve(y, ridge=3.0, method=method)
    A = K.dense().double() + 3.0 * torch.eye(40, dtype=torch.float64)
    want = torch.linalg.solve(A, y.double())
    tight = dtype == torch.float64
    assert found.solution.shape == y.shape and found.solution.dtype == dtype and found.method == method
    assert torch.allclose(found.solution.double(), want, rtol=1e-7 if tight else 2e-3, atol=1e-9 if tight else 1e-5)
    truth = float((A @ found.solution.double() - y.double()).norm() / y.double().norm())
    assert found.residual == pytest.approx(truth, rel=0.2, abs=1e-6 if not tight else 1e-12)
    assert found.residual <= (1e-9 if tight else 1.1e-5)
    assert (found.iterations == 0) == (method == "cholesky")


def test_auto_takes_cholesky_within_the_budget_else_cg() -> None:
    K, y = kernel(), randn(40, seed=2)
    assert K.solve(y, ridge=1.0).method == "cholesky"
    tight = K.solve(y, ridge=1.0, max_bytes=20_000)
    assert tight.method == "cg" and 0 < tight.iterations <= 400
    with pytest.raises(BudgetError, match="method='cg'"):
        K.solve(y, ridge=1.0, max_bytes=20_000, method="cholesky")


@pytest.mark.parametrize("method", ["cholesky", "cg"])
def test_not_positive_definite_names_ridge_and_nothing_is_added_unasked(method: str) -> None:
    x = randn(20, 3)
    singular = GramSum.from_factors([[("x", x)]])
    with pytest.raises(SolverError, match="ridge"):
        (-1.0 * singular).solve(randn(20, seed=1), method=method)
    if method == "cholesky":
        with pytest.raises(SolverError, match=r"ridge = 0 is not positive definite"):
            (singular - 1e-3 * GramSum.from_factors([[("x", x), ("x", x)]])).solve(randn(20, seed=1), method=method)
    exact = GramSum.from_factors([[("x", torch.eye(4, dtype=torch.float64))]])
    y = randn(4, seed=1)
    assert torch.equal(exact.solve(y, method=method).solution, y)


def test_cg_that_does_not_converge_raises() -> None:
    with pytest.raises(SolverError, match="after 2 iterations"):
        kernel().solve(randn(40, seed=2), ridge=1e-3, method="cg", max_iter=2)
    rank_three = GramSum.from_factors([[("x", randn(20, 3))]])
    with pytest.raises(SolverError, match="ridge"):
        rank_three.solve(randn(20, seed=1), method="cg")


def test_a_direct_solution_that_rounding_spoiled_is_told() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator) + 3  # one large eigenvalue, and 390 that only the ridge holds up
    y = torch.randn(400, generator=generator)
    K, exact = (GramSum.from_factors([[("x", t), ("x", t)]]) for t in (x, x.double()))
    ridge = 1e-6 * float(exact.eigsh(1).values)
    with pytest.warns(PrecisionWarning, match=r"relative residual of .*Take the kernel in float64"):
        rough = K.solve(y, ridge=ridge, method="cholesky")
    assert rough.residual > 1e-2
    assert exact.solve(y.double(), ridge=ridge, method="cholesky").residual < 1e-8  # and no warning


def test_zero_right_hand_side() -> None:
    for method in ("cholesky", "cg"):
        found = kernel().solve(torch.zeros(40, dtype=torch.float64), ridge=1.0, method=method)
        assert bool((found.solution == 0).all()) and found.residual == 0.0


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
@pytest.mark.parametrize("method", ["cholesky", "cg"])
def test_targets_of_any_size_are_solved_alike(method: str, size: float) -> None:
    """Their squares leave float64: tiny targets were answered by zeros, huge ones never."""
    K = GramSum.from_factors([[("x", randn(9, 20))]])
    y = torch.stack([randn(9), size * randn(9, seed=1)], 1)
    mixed, alone = K.solve(y, ridge=0.1, method=method), K.solve(y[:, 1], ridge=0.1, method=method)
    want = torch.linalg.solve(K.dense() + 0.1 * torch.eye(9, dtype=torch.float64), y)
    assert torch.allclose(alone.solution / size, want[:, 1] / size, rtol=1e-8, atol=1e-10)
    assert torch.allclose(mixed.solution / y.abs().amax(0), want / y.abs().amax(0), rtol=1e-8, atol=1e-10)
    assert 0 < mixed.residual < 1e-9 and 0 < alone.residual < 1e-9


@pytest.mark.parametrize("size", [1e-150, 1e150])
def test_nystrom_of_tiny_and_huge_numbers(size: float) -> None:
    x = randn(20, 3)
    got = nystrom(GramSum.from_factors([[("x", size * x)]]), 3).dense() / size / size
    assert torch.allclose(got, x @ x.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("method", ["dense", "lanczos"])
def test_eigsh_matches_dense(method: str, dtype: torch.dtype) -> None:
    K = kernel(dtype=dtype)
    found = K.eigsh(5, method=method)
    want = torch.linalg.eigvalsh(K.dense().double()).flip(0)[:5]
    limit = (1e-11 if dtype == torch.float64 else 1e-5) * float(want[0])
    assert found.method == method and found.values.dtype == dtype and found.vectors.shape == (40, 5)
    assert float((found.values.double() - want).abs().max()) <= limit
    assert bool((found.values.diff() <= 0).all())
    v = found.vectors.double()
    assert float((K.dense().double() @ v - v * found.values.double()).abs().max()) <= 10 * limit
    assert torch.allclose(v.T @ v, torch.eye(5, dtype=torch.float64), atol=1e-11 if dtype == torch.float64 else 1e-5)
    assert bool((v.gather(0, v.abs().argmax(0, keepdim=True)) > 0).all())


def test_eigsh_is_deterministic_and_falls_to_lanczos() -> None:
    K = kernel(60)
    one, two = (K.eigsh(3, max_bytes=60_000) for _ in range(2))
    assert one.method == "lanczos" and torch.equal(one.values, two.values) and torch.equal(one.vectors, two.vectors)
    assert K.eigsh(3).method == "dense" and K.eigsh(60).values.shape == (60,)
    with pytest.raises(BudgetError, match="eigsh"):
        K.eigsh(60, max_bytes=60_000)


def test_repeated_eigenvalues_are_all_found_by_auto() -> None:
    K = GramSum.from_factors([[("x", torch.eye(30, dtype=torch.float64))]])
    assert torch.allclose(K.eigsh(4).values, torch.ones(4, dtype=torch.float64))


def test_eigsh_that_does_not_converge_says_how_many_did() -> None:
    with pytest.raises(SolverError, match=r"of 5 eigenpairs converged"):
        kernel(200).eigsh(5, method="lanczos", max_iter=1)


def test_cross_kernels_are_refused() -> None:
    x = randn(6, 3)
    for cross in (GramSum.from_factors([[("x", x, x.clone())]]), GramSum.from_factors([[("x", x)]])[1:5, 2:6]):
        with pytest.raises(SolverError, match="symmetric"):
            cross.solve(torch.ones(cross.shape[0], dtype=torch.float64))
        with pytest.raises(SolverError, match="symmetric"):
            cross.eigsh(1)


def test_bad_options() -> None:
    K = kernel()
    y = randn(40, seed=2)
    with pytest.raises(OptionError, match="ridge"):
        K.solve(y, ridge=-1.0)
    with pytest.raises(OptionError, match="method"):
        K.solve(y, method="lu")
    with pytest.raises(DTypeError, match="float32"):
        K.solve(y.float())
    with pytest.raises(ShapeError, match=r"\(39,\)"):
        K.solve(y[1:])
    with pytest.raises(NotFiniteError):
        K.solve(y * float("inf"))
    for k in (0, 41, 2.0, True):
        with pytest.raises(OptionError, match="k must be"):
            K.eigsh(k)


# --- preconditioning and Nyström -----------------------------------------------------------------------------------


def decaying(n: int, dtype: torch.dtype = torch.float64) -> GramSum:
    """Eigenvalues 1, 1/4, 1/9, …: plain conjugate gradients are slow on it."""
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    return GramSum.from_factors([[("f", (basis / torch.arange(1, n + 1)).to(dtype))]])


def test_a_preconditioner_changes_the_work_and_not_the_answer() -> None:
    K, y = decaying(300), torch.randn(300, 3, dtype=torch.float64)
    plain = K.solve(y, ridge=1e-6, method="cg", preconditioner=0)
    better = K.solve(y, ridge=1e-6, method="cg", preconditioner=60)
    exact = K.solve(y, ridge=1e-6, method="cholesky")
    assert (plain.preconditioner, better.preconditioner, exact.preconditioner) == (0, 60, 0)
    assert better.iterations < plain.iterations / 3
    for found in (plain, better):
        assert found.residual < 1e-9
        torch.testing.assert_close(found.solution, exact.solution, rtol=1e-5, atol=1e-5 * float(exact.solution.max()))


def test_an_indefinite_kernel_is_still_told_when_preconditioned() -> None:
    K = decaying(100) - 0.5 * GramSum.from_factors([[("one", torch.ones(100, 1, dtype=torch.float64) / 10)]])
    with pytest.raises(SolverError, match="not positive definite"):
        K.solve(torch.ones(100, dtype=torch.float64), method="cg", preconditioner=20, max_iter=500)


def test_rank_of_the_preconditioner_is_checked() -> None:
    for rank in (-1, 301, True):
        with pytest.raises(OptionError, match="preconditioner"):
            decaying(30).solve(torch.ones(30, dtype=torch.float64), method="cg", preconditioner=rank)


def test_nystrom_is_below_the_kernel_and_as_good_as_the_spectrum_allows() -> None:
    K = decaying(120)
    for rank in (1, 10, 50):
        gap = K.dense() - nystrom(K, rank).dense()
        values = torch.linalg.eigvalsh(gap)
        assert float(values[0]) > -1e-10
        assert float(values[-1]) < 20.0 / (rank + 1) ** 2  # the best rank-r approximation leaves 1/(r + 1)²
    with pytest.raises(OptionError, match="rank"):
        nystrom(K, 121)
    with pytest.raises(SolverError, match="symmetric"):
        nystrom(GramSum.from_factors([[("x", torch.ones(3, 1), torch.ones(3, 1))]]), 1)
    with pytest.raises(SolverError, match="semi-definite"):
        nystrom(-1.0 * K, 5)


@pytest.mark.parametrize("size", [1e-14, 1e-9, 1.0, 1e9])
def test_lanczos_is_as_good_for_tiny_numbers(size: float) -> None:
    """ARPACK's own threshold is absolute: eigenvalues below it once came out with any vectors."""
    x = size * torch.randn(60, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    K = GramSum.from_factors([[("x", x)]])
    found = K.eigsh(3, method="lanczos")
    torch.testing.assert_close(found.values, K.eigsh(3, method="dense").values, rtol=1e-12, atol=0.0)
    off = K @ found.vectors - found.vectors * found.values
    assert float(off.abs().max()) < 1e-11 * float(found.values[0])


def test_lanczos_on_a_kernel_of_zeros() -> None:
    found = GramSum.from_factors([[("x", torch.zeros(30, 2))]]).eigsh(3, method="lanczos")
    assert not found.values.any()
    assert torch.equal(found.vectors.T @ found.vectors, torch.eye(3))
