"""Large kernels on disk: time and cost per entry on one and two worker processes, and the cost of a killed worker.

Overlap kernel and NTK of a 784 → 5×128 → 1 ReLU network on random data. Every matrix takes 4n² bytes on disk until it
is deleted. Run with ``python -m benchmarks.scale_cpu --n 20000``; it prints, and writes a JSON file to
benchmarks/results. It stops with an error if the store with a killed worker differs from the one without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import describe, machine

import pathlens as pl
from pathlens.linops import GramSum, from_zarr
from pathlens.stores import open_store


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """A client of so many processes with one thread each, started outside of all timings."""
    import distributed

    made = distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    with made, distributed.Client(made, set_as_default=False) as client:
        client.run(_warm_up)
        yield client


def _warm_up() -> None:
    """Load what a worker needs, and compile the bit counts where numba is there."""
    torch.set_num_threads(1)
    backend = "popcount" if importlib.util.find_spec("numba") else "torch"
    GramSum.from_factors([[("g", torch.ones(40, 40, dtype=torch.bool))]], backend=backend).dense()


def kernels(n: int) -> dict[str, GramSum]:
    """The two kernels, from one record."""
    net = pl.models.relu(784, hidden=(128,) * 5, outputs=1, seed=0)
    X = torch.randn(n, 784, generator=torch.Generator().manual_seed(0))
    record = pl.record(net, X, stream=False)
    return {"overlap": pl.kernels.overlap(record), "ntk": pl.kernels.ntk(record)}


def recorded(path: Path) -> int:
    """Blocks on record while somebody writes."""
    files = path.glob("pathlens/finished/[0-9]*.json")
    return sum(len(json.loads(file.read_bytes())["blocks"]) for file in files)


def kill_one(client: Any, path: Path, after: int, told: list[float]) -> None:
    """Kill a worker once some blocks are on record."""
    while recorded(path) < after:
        time.sleep(0.05)
    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
    told.append(time.time())


def measure(name: str, kernel: GramSum, folder: Path) -> dict[str, Any]:
    """Times of one kernel; stores are removed as soon as they have been compared."""
    entries = kernel.shape[0] * kernel.shape[1]
    found: dict[str, Any] = {"entries": entries}
    checksums: dict[str, Any] = {}

    def note(label: str, report: Any, path: Path) -> None:
        found[label] = {
            "seconds": round(report.seconds, 2),
            "ns per entry": round(1e9 * report.seconds / entries, 2),
            "blocks": report.blocks,
            "block": report.block,
            "computed": report.computed,
        }
        checksums[label] = open_store(path).finished
        print(
            f"{name:8} {label:24} {report.seconds:8.1f} s  {1e9 * report.seconds / entries:7.2f} ns/entry  "
            f"{report.blocks} blocks of {report.block[0]}",
            flush=True,
        )

    edge = None
    for workers in (1, 2):
        with cluster(workers) as client:
            label, path = f"{workers} workers", folder / f"{name}-{workers}"
            report = kernel.to_zarr(path, client=client, block=edge)
            edge = edge or report.block[0]  # the same blocks for all, so that they can be compared bit for bit
            note(label, report, path)
            if workers == 1:
                shutil.rmtree(path)
                continue
            stored = from_zarr(path)
            v = torch.ones(kernel.shape[1])
            start = time.perf_counter()
            stored @ v
            found["K @ v from disk, seconds"] = round(time.perf_counter() - start, 2)
            start = time.perf_counter()
            stored.verify()
            found["verify, seconds"] = round(time.perf_counter() - start, 2)
            shutil.rmtree(path)
            told: list[float] = []
            killer = threading.Thread(target=kill_one, args=(client, path, report.blocks // 3, told), daemon=True)
            killer.start()
            note("2 workers, one killed", kernel.to_zarr(path, client=client, block=edge), path)
            killer.join()
            shutil.rmtree(path)
    if len({json.dumps(sorted(map(str, sums.items()))) for sums in checksums.values()}) > 1:
        raise SystemExit(f"{name}: the stores differ")
    found["identical"] = True
    return found


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="where the matrices lie while they are measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    results: dict[str, Any] = {
        "machine": where,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "n": chosen.n,
        "kernels": {},
    }
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for name, kernel in kernels(chosen.n).items():
            results["kernels"][name] = measure(name, kernel, Path(folder))
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / f"scale_cpu_{chosen.n}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
