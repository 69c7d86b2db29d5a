"""Speed of the kernel operators: factors against tiles, bit counts against matrix products, tiles against mm.

Every line is a ratio of two timings of the same run, so a busy machine affects both. Run with
``python -m benchmarks.linops``; it asserts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathlens.linops import GramSum
from pathlens.linops.evaluate import Evaluator
from pathlens.linops.matmul import MatmulPlan


def best_of(repeats: int, *tasks: Callable[[], Any]) -> list[float]:
    """Shortest time of each task; the tasks take turns, so that load on the machine hits all of them."""
    best = [float("inf")] * len(tasks)
    for _ in range(repeats):
        for at, task in enumerate(tasks):
            start = time.perf_counter()
            task()
            best[at] = min(best[at], time.perf_counter() - start)
    return best


def matvec(n: int = 20_000, terms: int = 5, r: int = 128) -> tuple[float, float]:
    """Seconds of K @ v by factors and by tiles, for a sum of products of two Grams in float32."""
    from pathlens.linops import matmul as module

    generator = torch.Generator().manual_seed(0)

    def factor() -> Tensor:
        return torch.randn(n, r, generator=generator)

    kernel = GramSum.from_factors([[(f"h{t}", factor()), (f"d{t}", factor())] for t in range(terms)], backend="torch")
    v = torch.randn(n, generator=generator)
    fast = best_of(3, lambda: kernel @ v)[0]
    chosen = module.plan_matmul

    def tiles_only(evaluator: Evaluator, k: int) -> MatmulPlan:
        plan = chosen(evaluator, k)
        return MatmulPlan((), plan.factored + plan.tiled, plan.factored_flops, plan.tiled_flops)

    module.plan_matmul = tiles_only
    try:
        slow = best_of(1, lambda: kernel @ v)[0]
    finally:
        module.plan_matmul = chosen
    return fast, slow


def overlap(n: int = 4096, layers: int = 5, w: int = 128) -> tuple[float, float, float]:
    """Seconds of Λ = ∘_l G_l G_lᵀ: packed bits with packing, the torch backend, and bare float32 products."""
    generator = torch.Generator().manual_seed(0)
    gates = [torch.rand(n, w, generator=generator) > 0.5 for _ in range(layers)]
    floats = [gate.float() for gate in gates]

    def bits(backend: str) -> Tensor:
        # the operator is built anew: packing and checking belong to the price
        terms = [[(f"layer.{at}", gate) for at, gate in enumerate(gates)]]
        return GramSum.from_factors(terms, backend=backend).dense()

    def products() -> Tensor:
        out = floats[0] @ floats[0].T
        for gate in floats[1:]:
            out *= gate @ gate.T
        return out

    assert torch.equal(bits("popcount"), products())
    popcount, walk, bare = best_of(9, lambda: bits("popcount"), lambda: bits("torch"), products)
    return popcount, walk, bare


def tile_rate(n: int = 4096, r: int = 512) -> tuple[float, float]:
    """Operations per second of a dense cross kernel of one factor in tiles, and of the bare matrix product."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, r, generator=generator) for _ in range(2))
    kernel = GramSum.from_factors([[("x", left, right)]], backend="torch")
    tiles, bare = best_of(7, kernel.dense, lambda: left @ right.T)
    work = 2.0 * n * n * r
    return work / tiles, work / bare


def main() -> None:
    """Print the table."""
    print(f"{'':44}{'pathlens':>12}{'against':>12}{'ratio':>8}   torch threads: {torch.get_num_threads()}")
    fast, slow = matvec()
    print(f"{'K @ v, n 20000, 5 × (128 ∘ 128): factors, tiles':44}{fast:10.3f} s{slow:10.2f} s{slow / fast:7.0f}×")
    popcount, walk, bare = overlap()
    print(f"{'overlap, n 4096, 5 × 128 bits: popcount, mm':44}{popcount:10.3f} s{bare:10.3f} s{bare / popcount:7.1f}×")
    print(f"{'overlap, same: torch backend, mm':44}{walk:10.3f} s{bare:10.3f} s{bare / walk:7.1f}×")
    tiles, floor = tile_rate()
    rates = f"{tiles / 1e9:7.0f} GF/s{floor / 1e9:7.0f} GF/s"
    print(f"{'tiles of one Gram, n 4096, r 512; mm':44}{rates}{tiles / floor:7.2f}×")


if __name__ == "__main__":
    main()
