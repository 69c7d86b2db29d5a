"""Numbers far outside the dtype: nothing overflows or underflows on the way, and what cannot be shown raises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens.errors import NotFiniteError, OptionError, ScaleError
from pathlens.linops import CustomKernel, Factor, GramSum
from pathlens.testing.dense import dense_counts, dense_gram_sum, self_kernels
from pathlens.testing.tolerance import assert_kernel_close


def gates(n: int, w: int, layers: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, w, generator=generator) > 0.5 for _ in range(layers)]


def test_twenty_layers_of_500_neither_overflow_nor_underflow() -> None:
    layers = gates(11, 500, 20)
    kernel = GramSum.from_factors([[(f"layer.{i}", g) for i, g in enumerate(layers)]], dtype=torch.float32)
    with pytest.raises(ScaleError, match=r"normalised\(\)"):
        kernel.dense()
    with pytest.raises(ScaleError, match=r"normalised\(\)"):
        kernel.diagonal()
    exact = dense_counts([[(g, g) for g in layers]])
    ratio = np.array([[float(e / sum(exact.diagonal())) for e in row] for row in exact * 1.0])
    got = kernel.normalised().dense()
    assert got.dtype == torch.float32
    assert_kernel_close(got, torch.from_numpy(ratio), torch.from_numpy(ratio).diagonal())
    assert math.isclose(kernel.trace(), float(sum(exact.diagonal())), rel_tol=1e-5)
    assert math.isclose(kernel[0, 1], float(exact[0, 1]), rel_tol=1e-5)  # a Python float: wider than float32


def test_two_hundred_layers_survive_in_float32() -> None:
    layers = gates(5, 64, 200)
    kernel = GramSum.from_factors([[(f"layer.{i}", g) for i, g in enumerate(layers)]], dtype=torch.float32)
    exact = dense_counts([[(g, g) for g in layers]])
    diagonal = kernel.normalised("diagonal").dense()
    want = torch.tensor(
        [
            [float(exact[i, j] ** 2 / (exact[i, i] * exact[j, j])) ** 0.5 if exact[i, j] else 0.0 for j in range(5)]
            for i in range(5)
        ],
        dtype=torch.float64,
    )
    assert_kernel_close(diagonal, want, torch.ones(5))
    assert bool((diagonal.diagonal() > 0.999).all())


def test_tiny_and_huge_rows_side_by_side() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-38, 1e-20, 1.0, 1e20, 1e38])
    x = torch.randn(5, 3, generator=generator) * sizes[:, None]
    kernel = GramSum.from_factors([[("x", x), ("x", x)]]).normalised("diagonal")
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    assert_kernel_close(kernel.dense(), (unit @ unit.T) ** 2, torch.ones(5))


def test_huge_row_against_tiny_column_is_moderate() -> None:
    x = torch.tensor([[1e30], [1e-30]])
    kernel = GramSum.from_factors([[("x", x), ("x", x)]])  # 1e120 and 1e-120 on the diagonal, 1 beside it
    assert kernel.tile([0], [1]).item() == pytest.approx(1.0, rel=1e-5)
    assert kernel.tile([1], [0]).item() == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(ScaleError):
        kernel.tile([0], [0])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_cross_kernel_with_unequal_sides_keeps_both_terms(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(6, 2, generator=generator) for _ in range(4))
    # Term one is huge on one side and tiny on the other; term two is moderate on both. They are of equal size.
    lefts, rights = [a * scale, c], [b / scale, d]
    for power in (1, 3):
        factors = [[("a", lefts[0], rights[0])] * power, [("c", lefts[1], rights[1])]]
        want = dense_gram_sum([[(lefts[0], rights[0])] * power, [(lefts[1], rights[1])]])
        size = dense_gram_sum([[(a.abs(), b.abs())] * power, [(c.abs(), d.abs())]])
        assert bool(((GramSum.from_factors(factors).dense() - want).abs() <= 1e-5 * size).all())


def test_zero_rows_stay_zero_everywhere() -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, -1.0]])
    huge = torch.tensor([[1e30], [1e30], [1e30]])
    kernel = GramSum.from_factors([[("x", x), ("huge", huge)], [("x", x)]])
    with pytest.raises(ScaleError):
        kernel.dense()
    got = kernel.normalised("diagonal").dense()
    assert bool((got[1] == 0).all() and (got[:, 1] == 0).all() and torch.isfinite(got).all())
    assert float(got[0, 0]) == pytest.approx(1.0, abs=1e-6)


def test_all_zero_kernel() -> None:
    kernel = GramSum.from_factors([[("x", torch.zeros(3, 2))]])
    assert kernel.trace() == 0.0
    assert torch.equal(kernel.dense(), torch.zeros(3, 3))
    assert torch.equal(kernel @ torch.ones(3), torch.zeros(3))
    with pytest.raises(ScaleError, match="trace"):
        kernel.normalised()


def test_product_with_vector_may_fit_where_the_kernel_does_not() -> None:
    x = torch.full((4, 1), 1e25)
    kernel = GramSum.from_factors([[("x", x)]])
    got = kernel @ torch.full((4,), 1e-30)
    assert torch.allclose(got, torch.full((4,), 4e20))
    with pytest.raises(ScaleError, match="K @ V"):
        kernel @ torch.ones(4)


def test_normalised_targets() -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = GramSum.from_factors([[("x", x)]])
    assert kernel.normalised().trace() == pytest.approx(1.0, abs=1e-14)
    assert kernel.normalised("n").trace() == pytest.approx(7.0, abs=1e-13)
    assert torch.allclose(kernel.normalised("diagonal").diagonal(), torch.ones(7, dtype=torch.float64))
    with pytest.raises(OptionError, match="'trace', 'n' or 'diagonal'"):
        kernel.normalised("max")
    with pytest.raises(ScaleError):
        (-kernel).normalised()


def test_scaling_by_numbers() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel, want = GramSum.from_factors([[("x", x)]]), x @ x.T
    scale = self_kernels([[(x, x)]])[0]
    for got, factor in [
        (2 * kernel, 2),
        (kernel * np.float64(3), 3),
        (np.float32(0.5) * kernel, 0.5),
        (kernel / 7, 1 / 7),
        (-kernel, -1),
        (kernel - 3 * kernel, -2),
        (0 * kernel, 0),
        (sum([kernel, kernel]), 2),
        (kernel * torch.tensor(4.0), 4),
        (1e-200 * kernel * 1e200, 1),
    ]:
        assert_kernel_close(got.dense(), factor * want, scale * max(abs(factor), 1))
    with pytest.raises(NotFiniteError):
        kernel * float("nan")
    with pytest.raises(ScaleError):
        kernel / 0
    with pytest.raises(TypeError):
        kernel + 3.0
    assert (kernel * 1e300 * 1e300).normalised().trace() == pytest.approx(1.0, abs=1e-14)


def test_custom_operator_with_large_numbers_is_scaled_by_its_diagonal() -> None:
    whole = torch.tensor([[1e30, 1e29], [1e29, 1e30]])
    custom = CustomKernel((2, 2), lambda i, j: whole[i][:, j], whole.diagonal, symmetric=True)
    squared = custom * custom
    with pytest.raises(ScaleError):
        squared.dense()
    assert torch.allclose(squared.normalised("n").dense(), torch.tensor([[1.0, 0.01], [0.01, 1.0]]), atol=1e-6)


def test_custom_operator_that_returns_nan_is_named() -> None:
    bad = CustomKernel(
        (2, 2),
        lambda i, j: torch.full((len(i), len(j)), float("nan")),
        lambda: torch.ones(2),
        symmetric=True,
        name="recursion",
    )
    with pytest.raises(NotFiniteError, match="recursion"):
        bad.dense()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.floats(-30, 30), st.booleans()
)
def test_powers_of_two_change_no_bit(seed: int, n: int, factors: int, terms: int, log: float, cross: bool) -> None:
    """Scaling a factor by 2^k scales the kernel by 4^k (2^k for one side), bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    k = round(log)

    def build(power: float) -> torch.Tensor:
        generator.manual_seed(seed)
        rows = []
        for t in range(terms):
            row = []
            for f in range(factors):
                left = torch.randn(n, 3, generator=generator)
                right = torch.randn(n + 1, 3, generator=generator) if cross else None
                if f == 0:
                    left = left * power
                row.append(Factor(f"{t}.{f}", left, right))
            rows.append(row)
        return GramSum.from_factors(rows).dense()

    assert torch.equal(build(2.0**k), build(1.0) * 2.0 ** (k if cross else 2 * k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_row_in_one_term_leaves_the_other_terms_alone(dtype: torch.dtype) -> None:
    """A product that is zero for a row has an exponent all the same, and must not be raised to it beside a zero."""
    size = 1e9 if dtype == torch.float32 else 1e60
    tiny, huge = (torch.full((3, 2), number, dtype=dtype) for number in (1 / size, size))
    gate = torch.eye(3, 2, dtype=dtype)  # none is open in the last row
    K = GramSum.from_factors([[("tiny", tiny), ("same", tiny)], [*[("huge", huge)] * 5, ("gate", gate)]])[2:, 2:]
    want = 4 / size**4
    assert K.trace() == pytest.approx(want, rel=1e-5, abs=0.0)
    for number in (K.dense(), K.diagonal(), K @ torch.ones(1, dtype=dtype), next(K.tiles())[2]):
        assert number.item() == pytest.approx(want, rel=1e-5, abs=0.0)


def test_numpy_gets_the_matrix() -> None:
    kernel = GramSum.from_factors([[("x", torch.randn(5, 2))]])
    assert np.array_equal(np.asarray(kernel), kernel.dense().numpy())
    assert np.asarray(kernel, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="no array to share"):
        np.asarray(kernel, copy=False)
    with pytest.raises(TypeError):
        np.ones(5) @ kernel  # products stay with the operator: nothing is formed unasked
