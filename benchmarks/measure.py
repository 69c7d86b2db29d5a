"""Common functions of the benchmarks: timings that take turns, peak memory, the machine's name, and its floors.

Floors are rates measured in the same run (matrix products, bit counts, memory), so a time can be compared with
the speed of the machine at that moment.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_TURN = 0.2  # seconds that a turn lasts at least


def best_of(repeats: int, tasks: Mapping[str, Callable[[], Any]], patience: float = 60.0) -> dict[str, float]:
    """Shortest time of each task. Tasks take turns, so that load on the machine hits all of them alike.

    A short task runs several times in its turn: the task before it may have left the memory cold. One that has used up
    ``patience`` seconds is not run again.
    """
    best = dict.fromkeys(tasks, float("inf"))
    spent = dict.fromkeys(tasks, 0.0)
    for _ in range(repeats):
        for name, task in tasks.items():
            turn = 0.0
            while turn < _TURN and spent[name] <= patience:
                start = time.perf_counter()
                task()
                took = time.perf_counter() - start
                turn += took
                spent[name] += took
                best[name] = min(best[name], took)
    return best


# --- memory --------------------------------------------------------------------------------------------------------


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass
class Peak:
    """Growth of resident memory at its highest, in bytes; None where the system does not tell."""

    bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """How far resident memory rose above its start inside the block (Linux)."""
    peak = Peak()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to now
        before = _status("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    peak.bytes = max(_status("VmHWM") - before, 0)


# --- the machine ---------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions and load: what a reader needs to judge the numbers."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = found[0] if found else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory GiB": round(memory / 2**30),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load average at the start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def describe(found: Mapping[str, Any]) -> str:
    """One line about a machine.

    >>> describe({"processor": "X", "cores": 2, "threads": 2, "memory GiB": 8, "gpu": None, "torch": "2.0"})
    'X, 2 cores, 2 torch threads, 8 GiB, torch 2.0'
    """
    gpu = f", {found['gpu']}" if found.get("gpu") else ""
    return (
        f"{found['processor']}, {found['cores']} cores, {found['threads']} torch threads, {found['memory GiB']} GiB"
        f"{gpu}, torch {found['torch']}"
    )


def floors(repeats: int = 5) -> dict[str, float]:
    """Rates of this machine now: float32 and float64 products, bit counts, and memory copies."""
    n = 2048
    single, double = torch.randn(n, n), torch.randn(n, n, dtype=torch.float64)
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**63, size=1 << 15, dtype=np.uint64)  # in the cache: the rate of the counting itself
    source = torch.randn(1 << 26)
    target = torch.empty_like(source)
    times = best_of(
        repeats,
        {
            "single": lambda: single @ single,
            "double": lambda: double @ double,
            "bits": lambda: [np.bitwise_count(words) for _ in range(200)],
            "copy": lambda: target.copy_(source),
        },
    )
    return {
        "float32 products, GF/s": 2 * n**3 / times["single"] / 1e9,
        "float64 products, GF/s": 2 * n**3 / times["double"] / 1e9,
        "bit counts of one numpy thread, Gbit/s": 200 * words.size * 64 / times["bits"] / 1e9,
        "memory copy, GB/s (read and written)": 2 * source.numel() * 4 / times["copy"] / 1e9,
    }
