"""The page of measured scaling, made from the JSON files of `benchmarks.gpu` and `benchmarks.scale_cpu`.

``python -m benchmarks.scaling_page`` writes docs/scaling-measured.md without measuring anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import describe

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "scaling-measured.md"
MANY = 1_300_000


def duration(seconds: float) -> str:
    """A duration as text.

    >>> duration(0.0042), duration(42), duration(7200), duration(500_000)
    ('4.2 ms', '42 s', '2 h', '5.8 days')
    """
    for size, unit in ((86400.0 * 2, "days"), (7200.0, "h"), (120.0, "min"), (1.0, "s")):
        if seconds >= size:
            scale = {"days": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}[unit]
            return f"{seconds / scale:.2g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def gpu_section(found: dict[str, Any]) -> list[str]:
    """Whole matrices, precisions, solving and a convolutional block on one GPU."""
    lines = [
        "",
        f"## {describe(found['machine'])}",
        "",
        f"{found['date']}. *Write* is the time to fill the matrix once.",
        "",
        "| kernel | n | backend | ms | of the write | ns per entry | scaled error |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        lines.append(
            f"| {r['kernel']} | {r['n']:,} | `{r['backend']}` | {r['ms']:.2f} | {r['ms'] / r['write, ms']:.1f}× | "
            f"{r['ns per entry']:.4f} | {r['scaled error']:.1e} |"
        )
    lines += [
        "",
        "`triton` splits float32 numbers into two float16 parts and adds three products; 0/1 gates are "
        "counted in fp8, exactly. Errors are max |K̂ − K| / √(k_ii k_jj) against float64.",
        "",
        "Without storing the matrix:",
        "",
        "| kernel | n | K @ v | eigsh(5) | ridge solve, 10 columns | iterations | without preconditioner |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["solving"]:
        lines.append(
            f"| {r['kernel']} | {r['n']:,} | {duration(r['K @ v, s'])} | {duration(r['eigsh(5), s'])} | "
            f"{duration(r['solve 10 columns, s'])} | {r['iterations']} (rank {r['rank of the preconditioner']}) | "
            f"{duration(r['without preconditioner, s'])}, {r['iterations without']} |"
        )
    c = found["convolutional"]
    lines += [
        "",
        "These inputs are random, and their spectrum is so flat that a preconditioner does not help; on images it "
        "does (see Kernels).",
        "",
        f"{c['kernel']}: a block of {c['rows']} × {c['rows']} of {c['n']:,} rows takes {duration(c['s'])} within "
        f"four gibibytes, scaled error {c['scaled error']:.1e} (float32).",
    ]
    return lines


def cpu_section(found: dict[str, Any]) -> list[str]:
    """Stores written by one and two worker processes, and with a worker killed."""
    lines = [
        "",
        f"## {describe(found['machine'])}",
        "",
        f"{found['created'][:10]}, n = {found['n']:,}, written to disk as Zarr blocks; all stores of a kernel are "
        "equal bit for bit, including the one with a killed worker.",
        "",
        "| kernel | how | seconds | ns per entry | blocks |",
        "|---|---|---|---|---|",
    ]
    for kernel, runs in found["kernels"].items():
        for how, r in runs.items():
            if isinstance(r, dict):
                lines.append(f"| {kernel} | {how} | {r['seconds']:.1f} | {r['ns per entry']:.1f} | {r['blocks']} |")
        lines.append(f"| {kernel} | K @ v from disk | {runs['K @ v from disk, seconds']:.1f} | | |")
    return lines


def rates(gpus: list[dict[str, Any]], cpus: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """(machine, kernel, ns per entry) of the fastest accurate way at the largest n of every machine."""
    out = []
    for found in gpus:
        largest = max(r["n"] for r in found["rows"])
        rows = [r for r in found["rows"] if r["n"] == largest and r["scaled error"] < 1e-5]
        for kernel in dict.fromkeys(r["kernel"] for r in rows):
            best = min(r["ns per entry"] for r in rows if r["kernel"] == kernel)
            out.append((found["machine"]["gpu"], kernel, best))
    for found in cpus:
        for kernel, runs in found["kernels"].items():
            best = min(r["ns per entry"] for r in runs.values() if isinstance(r, dict))
            out.append((f"{found['machine']['cores']} cores, to disk", kernel, best))
    return out


def main() -> None:
    """Write the page."""
    gpus = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu-*.json"))]
    cpus = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("scale_cpu_*.json"))]
    lines = [
        "# Scaling, measured",
        "",
        "Made by `python -m benchmarks.scaling_page` from the JSON files in "
        "`benchmarks/results`; not written by hand. Networks: 784 → 5×128 → 1.",
    ]
    for found in gpus:
        lines += gpu_section(found)
    for found in cpus:
        lines += cpu_section(found)
    entries = MANY**2
    lines += [
        "",
        f"## What {MANY:,} examples would need",
        "",
        f"All {entries:.2e} entries in float32 take {4 * entries / 1e12:.1f} TB; products, eigenpairs and solves do "
        "not need to store them. At the rates above, computing every entry once takes:",
        "",
        "| machine | kernel | ns per entry | all entries |",
        "|---|---|---|---|",
    ]
    for name, kernel, rate in rates(gpus, cpus):
        lines.append(f"| {name} | {kernel} | {rate:.3g} | {duration(1e-9 * rate * entries)} |")
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
