"""Speed and accuracy of the fused kernel on one GPU, against torch's matrix products and the time to write the matrix.

Run with ``python -m benchmarks.gpu [--n 50000] [--tune] [--json FILE]``. ``--tune`` tries other sizes for the kernel
first and prints them; the ones that won are in `pathlens.linops.backends.triton_backend`.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.measure import machine

import pathlens as pl
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
        (
            "triton",
            fused,
            [
                size(64, 64, 64, 4, 3, 16),
                size(64, 64, 64, 4, 3, 16, 168),
                size(64, 64, 64, 4, 2, 16, 168),
                size(64, 64, 64, 4, 4, 16, 168),
                size(128, 64, 64, 8, 3, 16),
                size(64, 64, 128, 4, 2, 16),
                size(64, 128, 64, 4, 3, 16),
                size(128, 128, 64, 8, 3, 16),
            ],
        ),
        (
            "triton-3xtf32",
            fused,
            [
                size(64, 64, 32, 4, 3, 16, 168),
                size(64, 64, 32, 4, 3, 16, 176),
                size(64, 64, 32, 4, 3, 16, 160),
                size(64, 64, 32, 4, 3, 16),
                size(128, 64, 32, 8, 3, 16),
                size(64, 128, 32, 4, 3, 16),
            ],
        ),
        ("triton-bf16", fused, [size(128, 128, 64, 8, 4, 32), size(128, 256, 64, 16, 3, 16)]),
    ]
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
                took = milliseconds(partial(launch, terms, precision, out, True), 3)
            except Exception as error:  # out of registers or shared memory: not a candidate
                print(name, config, str(error).splitlines()[0][:80], flush=True)
                continue
            tried.append((took, name, str(config)))
            print(f"{name:14} {took:8.2f} ms  {config}", flush=True)
    for name in dict.fromkeys(t[1] for t in tried):
        print("best", min(t for t in tried if t[1] == name))


def seconds(task: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of one run, and its result."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = task()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def solving_rows(n: int) -> list[dict[str, Any]]:
    """Eigenpairs and ridge solves without the matrix."""
    rows = []
    y = torch.randn(n, 10, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    for title, kernel in (("NTK", tangent_kernel(n)), ("overlap", overlap_kernel(n))):
        normal = kernel.normalised().with_options(max_bytes=2**33)
        once, _ = seconds(lambda k=normal: k @ y[:, 0])
        once, _ = seconds(lambda k=normal: k @ y[:, 0])
        eigen, pairs = seconds(lambda k=normal: k.eigsh(5, method="lanczos"))
        ridge = 1e-3 / n  # a thousandth of the mean eigenvalue of a kernel of trace 1
        plain, bare = seconds(lambda k=normal, r=ridge: k.solve(y, ridge=r, method="cg", preconditioner=0, tol=1e-4))
        better, found = seconds(lambda k=normal, r=ridge: k.solve(y, ridge=r, method="cg", tol=1e-4))
        row = {
            "kernel": title,
            "n": n,
            "K @ v, s": once,
            "eigsh(5), s": eigen,
            "largest eigenvalue": float(pairs.values[0]),
            "solve 10 columns, s": better,
            "iterations": found.iterations,
            "residual": found.residual,
            "rank of the preconditioner": found.preconditioner,
            "without preconditioner, s": plain,
            "iterations without": bare.iterations,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def convolutional_row(rows: int, total: int) -> dict[str, Any]:
    """A block of the GCONV NTK with ten outputs, gradients streamed within four gibibytes."""
    torch.manual_seed(0)
    net = pl.models.templates.gconv(bias=True).cuda()
    x = torch.randn(total, 3, 32, 32, device="cuda")
    kernel = pl.kernels.ntk(net, x, max_bytes=2**32)
    took, block = seconds(lambda: kernel[:rows, :rows].dense())
    took, block = seconds(lambda: kernel[:rows, :rows].dense())
    small = copy.deepcopy(net).double().cpu()
    exact = pl.kernels.ntk(small, x[:4].double().cpu()).dense()
    size = exact.diagonal().sqrt()
    error = float(((block[:4, :4].double().cpu() - exact).abs() / (size[:, None] * size)).max())
    row = {"kernel": "NTK of GCONV, ten outputs", "rows": rows, "n": total, "s": took, "scaled error": error}
    print(row, flush=True)
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for each precision")
    parser.add_argument("--json", default=None)
    chosen = parser.parse_args()
    if chosen.tune:
        tune(chosen.n, chosen.tune)
    found: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": []}
    sizes = [n for n in (1000, 2000, 5000, 10_000, 20_000) if n < chosen.n] + [chosen.n]
    for n in sizes:
        write = milliseconds(partial(torch.empty(n, n, device="cuda").fill_, 1.0))
        print(f"writing {n}² float32 takes {write:.2f} ms", flush=True)
        precisions = ("triton", "triton-3xtf32", "triton-tf32", "triton-bf16", "torch")
        for title, kernel, backends in (
            ("overlap, 5 × 128", overlap_kernel(n), ("triton", "torch")),
            ("NTK, 784→5×128→1", tangent_kernel(n), precisions if n == chosen.n else ("triton", "torch")),
        ):
            for backend in backends:
                took = timed_dense(kernel, backend)
                error = scaled_error(kernel, kernel.with_options(backend=backend, max_bytes=2**37).dense())
                row = {
                    "kernel": title,
                    "n": n,
                    "backend": backend,
                    "ms": took,
                    "write, ms": write,
                    "ns per entry": 1e6 * took / n**2,
                    "scaled error": error,
                }
                found["rows"].append(row)
                print(
                    f"{title}, n = {n}: {backend:14} {took:8.2f} ms, {took / write:.1f}× the write, "
                    f"scaled error {error:.1e}",
                    flush=True,
                )
    found["solving"] = solving_rows(chosen.n)
    found["convolutional"] = convolutional_row(500, 20_000)
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
