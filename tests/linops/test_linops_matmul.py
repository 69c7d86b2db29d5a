"""K @ V: which way is taken, that both ways agree, and that streams are read no more often than promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pathlens.errors import BudgetError, DTypeError, NotFiniteError, RecordError, ShapeError
from pathlens.linops import CustomKernel, Factor, GramSum, RowStream, evaluate
from pathlens.linops.matmul import plan_matmul


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def two_by_two(n: int, r: int, terms: int, dtype: torch.dtype = torch.float64) -> GramSum:
    return GramSum.from_factors(
        [
            [(f"h{t}", randn(n, r, seed=2 * t, dtype=dtype)), (f"d{t}", randn(n, r, seed=2 * t + 1, dtype=dtype))]
            for t in range(terms)
        ]
    )


def test_the_cheaper_way_is_taken_and_repr_says_which() -> None:
    many_rows = two_by_two(500, 4, 3)
    plan = plan_matmul(many_rows._evaluator(), 1)
    assert len(plan.factored) == 3 and not plan.tiled and plan.factored_flops < plan.tiled_flops
    assert "K @ v : factored" in repr(many_rows)
    few_rows = two_by_two(5, 40, 3)
    plan = plan_matmul(few_rows._evaluator(), 1)
    assert len(plan.tiled) == 3 and plan.factored_flops > plan.tiled_flops
    assert "K @ v : tiles" in repr(few_rows)


def test_each_term_goes_its_own_way() -> None:
    n = 300
    thin, wide = randn(n, 2), randn(n, 60, seed=1)
    kernel = GramSum.from_factors([[("thin", thin), ("thin", thin)], [("wide", wide)] * 4])
    plan = plan_matmul(kernel._evaluator(), 1)
    assert len(plan.factored) == 1 and len(plan.tiled) == 1
    v = randn(n, 2, seed=3)
    want = ((thin @ thin.T) ** 2 + (wide @ wide.T) ** 4) @ v
    assert torch.allclose(kernel @ v, want, rtol=1e-11)
    assert "factored for 1 terms, tiles for 1" in repr(kernel)


@pytest.mark.parametrize("k", [None, 1, 7])
@pytest.mark.parametrize("cross", [False, True])
def test_both_ways_agree(k: int | None, cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, m = 91, 67 if cross else 91

    def factor(name: str, r: int, seed: int) -> Factor:
        return Factor(name, randn(n, r, seed=seed), randn(m, r, seed=seed + 100) if cross else None)

    a, b, c = factor("a", 3, 0), factor("b", 2, 1), factor("c", 1, 2)
    base = GramSum.from_factors([[a, b, c], [b]])
    kernel = -2.5 * base * (GramSum.from_factors([[a]]) + GramSum.from_factors([[c]])) + base[:, :]
    v = randn(m, *([] if k is None else [k]), seed=5)
    assert not plan_matmul(kernel._evaluator(), k or 1).tiled
    by_factors = kernel @ v
    dense = kernel.dense() @ v
    monkeypatch.setattr("pathlens.linops.nodes.Hadamard.rank", property(lambda self: None))
    monkeypatch.setattr("pathlens.linops.nodes.Gram.rank", property(lambda self: None))
    monkeypatch.setattr(evaluate, "TILE_EDGE", 20)
    assert not plan_matmul(kernel._evaluator(), k or 1).factored
    assert torch.allclose(by_factors, dense, rtol=1e-11)
    assert torch.allclose(kernel @ v, dense, rtol=1e-11)


def test_zero_blocks_and_zero_vectors_cost_no_digits() -> None:
    x = randn(40, 2, dtype=torch.float32) * 1e-30
    x[:20] = 0
    kernel = GramSum.from_factors([[("x", x), ("x", x)]]).with_options(max_bytes=4000)
    v = torch.zeros(40)
    assert torch.equal(kernel @ v, torch.zeros(40))
    v[35] = 1e30
    want = (x.double() @ x.double().T) ** 2 @ v.double()
    got = kernel @ (v * 1e8)
    assert torch.allclose(got.double(), want * 1e8, rtol=1e-5)


def test_large_middle_matrix_falls_back_to_tiles() -> None:
    kernel = two_by_two(600, 20, 1)
    assert plan_matmul(kernel._evaluator(), 1).factored
    assert plan_matmul(kernel._evaluator(5_000), 1).tiled


def test_columns_are_grouped_to_fit_the_budget() -> None:
    kernel = two_by_two(400, 6, 2)
    v = randn(400, 9, seed=4)
    want = kernel.dense() @ v
    assert torch.allclose(kernel.matmul(v, max_bytes=122_000), want, rtol=1e-11)  # five columns, then four
    with pytest.raises(BudgetError, match="max_bytes"):
        kernel.matmul(v, max_bytes=1_000)


def test_errors_say_what_came() -> None:
    kernel = two_by_two(6, 2, 1)
    with pytest.raises(ShapeError, match=r"V has shape \(5,\), expected \(6,\) or \(6, k\)"):
        kernel @ torch.ones(5, dtype=torch.float64)
    with pytest.raises(DTypeError, match="float32"):
        kernel @ torch.ones(6)
    with pytest.raises(DTypeError, match="list"):
        kernel @ [1.0] * 6
    with pytest.raises(NotFiniteError):
        kernel @ torch.full((6,), float("nan"), dtype=torch.float64)


def test_symmetric_tiles_are_computed_once() -> None:
    calls = []
    whole = randn(50, 50)
    whole = whole + whole.T

    def tile(i: Tensor, j: Tensor) -> Tensor:
        calls.append((int(i[0]), int(j[0])))
        return whole[i][:, j]

    kernel = CustomKernel((50, 50), tile, whole.diagonal, dtype=torch.float64, symmetric=True)
    evaluate_edge = evaluate.TILE_EDGE
    try:
        evaluate.TILE_EDGE = 10
        got = kernel @ torch.ones(50, dtype=torch.float64)
    finally:
        evaluate.TILE_EDGE = evaluate_edge
    assert torch.allclose(got, whole.sum(1))
    assert len(calls) == 15 and all(i <= j for i, j in calls)


# --- streams ---------------------------------------------------------------------------------------------------


class Source:
    """Rows of two stored factors; counts what it is asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.h, self.g = randn(n, 3), randn(n, 4, seed=1) > 0
        self.asked: list[tuple[int, int]] = []

    def rows(self, lo: int, hi: int) -> dict[str, Tensor]:
        self.asked.append((lo, hi))
        return {"h": self.h[lo:hi].clone(), "g": self.g[lo:hi].clone()}


def streamed(source: Source) -> GramSum:
    stream = RowStream(source)
    return GramSum.from_factors([[("h", stream["h"]), ("g", stream["g"])], [("h", stream["h"])]])


def resident(source: Source) -> Tensor:
    gates = source.g.double()
    return (source.h @ source.h.T) * (gates @ gates.T) + source.h @ source.h.T


def test_factored_product_reads_a_stream_twice() -> None:
    source = Source(100)
    kernel = streamed(source)
    source.asked.clear()
    v = randn(100, seed=9)
    got = kernel.matmul(v, max_bytes=20_000)
    assert torch.allclose(got, resident(source) @ v, rtol=1e-11)
    assert sum(hi - lo for lo, hi in source.asked) == 200 and len(source.asked) > 2


def test_stream_within_a_budget_and_by_any_index() -> None:
    source = Source(60)
    kernel, want = streamed(source), resident(source)
    source.asked.clear()
    out = torch.zeros_like(want)
    for rows, cols, tile in kernel.tiles(max_bytes=12_000):
        out[rows, cols] = tile
    assert torch.allclose(out, want)
    block = max(hi - lo for lo, hi in source.asked)
    assert block < 60
    passes = -(-60 // block)
    assert sum(hi - lo for lo, hi in source.asked) <= 60 * (passes + 1)  # the rows of a tile once, the columns per tile
    picked = kernel[[5, 4, 50, 5], ::7]
    assert torch.allclose(picked.dense(), want[[5, 4, 50, 5]][:, ::7])
    assert torch.allclose(kernel.diagonal(), want.diagonal())
    assert "streamed, recomputed for every tile" in repr(kernel)
    assert kernel.symmetric and kernel.eigsh(2).values.shape == (2,)


def test_bare_source_is_a_factor() -> None:
    class Bare:
        n = 5

        def rows(self, lo: int, hi: int) -> Tensor:
            return torch.arange(lo, hi, dtype=torch.float64)[:, None]

    source = Bare()
    kernel = GramSum.from_factors([[("x", source), ("x", source)]])
    line = torch.arange(5, dtype=torch.float64)
    assert torch.equal(kernel.dense(), torch.outer(line, line) ** 2) and kernel.symmetric
    assert not GramSum.from_factors([[("x", source, Bare())]]).symmetric


def test_streams_are_checked_block_by_block() -> None:
    class Bad:
        n = 6

        def __init__(self, value: Tensor) -> None:
            self.value = value

        def rows(self, lo: int, hi: int) -> Tensor:
            return torch.ones(hi - lo, 2) if hi <= 1 else self.value

    with pytest.raises(ShapeError, match=r"expected \(6, 2\)"):
        GramSum.from_factors([[("x", Bad(torch.ones(6, 3)))]]).dense()
    with pytest.raises(RecordError, match="lack factor 'Bad'"):
        GramSum.from_factors([[("x", Bad({"other": torch.ones(6, 2)}))]]).dense()
    with pytest.raises(NotFiniteError, match="Bad"):
        GramSum.from_factors([[("x", Bad(torch.full((6, 2), float("inf"))))]]).dense()
