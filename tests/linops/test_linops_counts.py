"""Exact integer counts, and indexing: what must be equal, not close."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens.errors import BudgetError, OptionError, RowIndexError
from pathlens.indexing import as_index, as_tensor, compose
from pathlens.linops import CustomKernel, Factor, GramSum
from pathlens.testing.dense import dense_counts

CPU = torch.device("cpu")


@pytest.mark.parametrize("layers", [1, 3, 20])
@pytest.mark.parametrize("cross", [False, True])
def test_exact_counts_equal_python_integers(layers: int, cross: bool) -> None:
    generator = torch.Generator().manual_seed(layers)

    def draw(n: int) -> torch.Tensor:
        return torch.rand(n, 300, generator=generator) > 0.2

    pairs = []
    for _ in range(layers):
        left = draw(5)
        pairs.append((left, draw(4) if cross else left))
    kernel = GramSum.from_factors([[Factor(f"g{i}", *pair) for i, pair in enumerate(pairs)], [Factor("g", *pairs[0])]])
    want = dense_counts([pairs, [pairs[0]]])
    got = kernel.exact_counts()
    assert (got == want).all() and got.shape == want.shape
    assert got.dtype == (np.int64 if layers < 7 else object)
    if got.dtype == object:
        assert all(type(value) is int for value in got.ravel())
    picked = (3 * kernel)[[2, 0], 1:].exact_counts()
    assert (picked == 3 * want[[2, 0], 1:]).all()


def test_exact_counts_do_not_round_where_floats_do() -> None:
    gates = torch.ones(1, 3, dtype=torch.bool)
    kernel = GramSum.from_factors([[("g", gates)] * 34, [Factor.ones(1)]], dtype=torch.float64)
    assert kernel.exact_counts()[0, 0] == 3**34 + 1
    assert kernel[0, 0] != 3**34 + 1  # beyond 2^53


def test_exact_counts_take_float_gates_and_refuse_other_numbers() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert (GramSum.from_factors([[("x", x)]]).exact_counts() == np.array([[1, 1], [1, 2]])).all()
    with pytest.raises(OptionError, match=r"factor 'y'.*0/1"):
        GramSum.from_factors([[("x", x), ("y", 0.5 * x)]]).exact_counts()
    with pytest.raises(OptionError, match="not an integer"):
        GramSum.from_factors([[("x", x)]]).normalised("n").exact_counts()
    eye = CustomKernel((2, 2), lambda i, j: (i[:, None] == j).float(), lambda: torch.ones(2), name="eye")
    with pytest.raises(OptionError, match="'eye'"):
        eye.exact_counts()
    with pytest.raises(BudgetError, match="exact integers"):
        GramSum.from_factors([[("x", x)]]).exact_counts(max_bytes=10)


# --- indexing --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def square() -> GramSum:
    return GramSum.from_factors([[("x", torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))]])


def test_two_integers_give_a_number_and_selections_stay_lazy(square: GramSum) -> None:
    dense = square.dense()
    assert isinstance(square[2, -1], float) and square[2, -1] == pytest.approx(float(dense[2, 8]), abs=1e-6)
    mask = np.arange(9) % 2 == 0
    for rows, cols in [
        (slice(1, 7, 2), slice(None)),
        ([3, 3, -1], [0]),
        (mask, torch.tensor([8, 1])),
        (4, slice(2, 5)),
        (np.int64(4), range(3)),
        (slice(None, None, -1), mask.tolist()),
    ]:
        picked = square[rows, cols]
        assert isinstance(picked, GramSum)
        r, c = as_tensor(as_index(rows, 9, "rows"), CPU), as_tensor(as_index(cols, 9, "columns"), CPU)
        assert torch.allclose(picked.dense(), dense[r][:, c], atol=1e-5)
    assert square[3:5].shape == (2, 9)
    assert torch.allclose(square[2:, 1:][1:3, [0, 2]].dense(), dense[3:5][:, [1, 3]], atol=1e-5)


def test_symmetry_of_selections(square: GramSum) -> None:
    assert square[2:5, 2:5].symmetric and square[[1, 2], torch.tensor([1, 2])].symmetric
    assert not square[2:5, 3:6].symmetric and not square[[1, 2], [2, 1]].symmetric
    assert square[2:5, 2:5].eigsh(2).values.shape == (2,)


@pytest.mark.parametrize(
    "key",
    [
        (9, 0),
        (0, -10),
        ([0, 9], 0),
        (slice(3, 3), 0),
        ([], 0),
        (1.5, 0),
        ("a", 0),
        ([[0]], 0),
        ([True, False], 0),
        (0, 0, 0),
        (None, 0),
        ([0.5], 0),
        Ellipsis,
    ],
)
def test_bad_indices_raise(square: GramSum, key: object) -> None:
    with pytest.raises(RowIndexError):
        square[key]


def test_iteration_is_refused(square: GramSum) -> None:
    with pytest.raises(TypeError):
        iter(square)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.data())
def test_compose_is_indexing_twice(n: int, data: st.DataObject) -> None:
    def draw(size: int) -> object:
        if data.draw(st.booleans()):
            return data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
        return data.draw(st.slices(size).filter(lambda s: len(range(size)[s]) > 0))

    outer = as_index(draw(n), n, "rows")
    inner = as_index(draw(len(outer)), len(outer), "rows")
    want = as_tensor(outer, CPU)[as_tensor(inner, CPU)]
    got = compose(outer, inner)
    assert torch.equal(as_tensor(got, CPU), want) and len(got) == len(want)
