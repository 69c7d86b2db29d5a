"""Speed and accuracy of the fused kernel on one GPU, against torch's matrix products and the time to write the matrix.

Run with ``python -m benchmarks.gpu [--n 50000] [--tune] [--json FILE]``. ``--tune`` tries other sizes for the kernel
first and prints them; the ones that won are in `pathlens.linops.backends.triton_backend`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.measure import machine

from pathlens.linops import Factor, GramSum
from pathlens.linops.backends import triton_backend

LAYERS, WIDTH, INPUTS = 5, 128, 784


def milliseconds(task: Callable[[], Any], repeats: int = 5) -> float:
    """Shortest time of several runs, by CUDA events."""
    task()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        task()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return best


def gates(n: int) -> list[torch.Tensor]:
    """0/1 gates of five layers, half of them on."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.rand(n, WIDTH, device="cuda", generator=generator) > 0.5 for _ in range(LAYERS)]


def overlap_kernel(n: int) -> GramSum:
    """Λ of five layers of 128 gates."""
    return GramSum.from_factors([[Factor(f"gate{i}", g) for i, g in enumerate(gates(n))]], dtype=torch.float32)


def tangent_kernel(n: int) -> GramSum:
    """The factors of the NTK of 784 → 5 × 128 → 1, with numbers of a trained net's size."""
    generator = torch.Generator("cuda").manual_seed(1)

    def rows(r: int, size: float) -> torch.Tensor:
        return size * torch.randn(n, r, device="cuda", generator=generator)

    switches = [gate.float() for gate in gates(n)]
    reads = [rows(INPUTS, 1.0), *(rows(WIDTH, 0.5) * switch for switch in switches)]
    terms = [[Factor(f"h{i}", reads[i]), Factor(f"d{i}", rows(WIDTH, 0.1) * switches[i])] for i in range(LAYERS)]
    return GramSum.from_factors([*terms, [Factor("h5", reads[LAYERS])]])


def scaled_error(kernel: GramSum, got: torch.Tensor, rows: int = 2000) -> float:
    """max |got − exact| / √(k_ii k_jj) on some rows and columns, exact in float64."""
    terms = []
    for term in kernel.root.summands():
        exact = None
        for leaf in term.leaves():
            f = leaf.left.tensor[:rows].double()  # type: ignore[union-attr]
            exact = f @ f.T if exact is None else exact * (f @ f.T)
        terms.append(exact)
    want = sum(terms)
    assert isinstance(want, torch.Tensor)
    size = want.diagonal().sqrt()
    return float(((got[:rows, :rows].double() - want).abs() / (size[:, None] * size)).max())


def timed_dense(kernel: GramSum, backend: str) -> float:
    """Milliseconds of the whole matrix; the memory of one is reused by the next."""
    chosen = kernel.with_options(backend=backend, max_bytes=2**37)
    return milliseconds(lambda: chosen.dense())


def tune(n: int, seconds: float) -> None:
    """Try sizes for every precision, the likeliest first, within a time limit."""
    tried: list[tuple[float, str, str]] = []
    plain, fused = overlap_kernel(n), tangent_kernel(n)
    size = triton_backend.Config
    jobs = [
        ("bits", plain, [size(128, 128, 128, 8, s, g) for s in (4, 3) for g in (16, 32)]),
        ("triton", fused, [size(128, 64, 128, 8, 2, 16), size(64, 64, 64, 4, 3, 16), size(64, 64, 128, 4, 3, 16),
                           size(128, 64, 64, 8, 2, 32), size(128, 64, 64, 8, 3, 32), size(64, 128, 64, 8, 3, 16),
                           size(128, 64, 32, 8, 5, 16), size(256, 64, 64, 16, 3, 16)]),
        ("triton-3xtf32", fused, [size(128, 64, 64, 8, 2, 16), size(128, 64, 32, 8, 2, 32), size(64, 64, 32, 4, 4, 16),
                                  size(256, 64, 32, 16, 3, 16)]),
        ("triton-bf16", fused, [size(128, 128, 64, 8, 4, 32), size(128, 256, 64, 16, 3, 16)]),
    ]  # fmt: skip
    out = torch.empty(n, n, device="cuda")
    launch = triton_backend.BACKENDS["triton"].launch
    for name, kernel, configs in jobs:
        base = triton_backend.BITS if name == "bits" else triton_backend.PRECISIONS[name]
        end = time.time() + seconds
        side = kernel._evaluator(2**37).side(range(n), False, True)
        terms = triton_backend.flatten(kernel.root, side, side)
        for config in configs:
            if time.time() > end:
                break
            precision = replace(base, config=config)
            try:
                took = milliseconds(partial(launch, terms, precision, out, True, name == "bits"), 3)
            except Exception as error:  # out of registers or shared memory: not a candidate
                print(name, config, str(error).splitlines()[0][:80], flush=True)
                continue
            tried.append((took, name, str(config)))
            print(f"{name:14} {took:8.2f} ms  {config}", flush=True)
    for name in dict.fromkeys(t[1] for t in tried):
        print("best", min(t for t in tried if t[1] == name))


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for each precision")
    parser.add_argument("--json", default=None)
    chosen = parser.parse_args()
    n = chosen.n
    if chosen.tune:
        tune(n, chosen.tune)
    found: dict[str, Any] = {"machine": machine(), "n": n, "rows": []}
    found["write, ms"] = milliseconds(partial(torch.empty(n, n, device="cuda").fill_, 1.0))
    print(f"writing {n}² float32 takes {found['write, ms']:.2f} ms", flush=True)
    for title, kernel, backends in (
        ("overlap, 5 × 128", overlap_kernel(n), ("triton", "torch")),
        ("NTK, 784→5×128→1", tangent_kernel(n), ("triton", "triton-3xtf32", "triton-tf32", "triton-bf16", "torch")),
    ):
        for backend in backends:
            took = timed_dense(kernel, backend)
            dense = kernel.with_options(backend=backend, max_bytes=2**37).dense()
            error = scaled_error(kernel, dense)
            del dense
            row = {"kernel": title, "backend": backend, "ms": took, "scaled error": error}
            found["rows"].append(row)
            print(f"{title}: {backend:14} {took:8.2f} ms, {took / found['write, ms']:.1f}× the write, "
                  f"scaled error {error:.1e}", flush=True)  # fmt: skip
        del kernel
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
