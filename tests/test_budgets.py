"""Budgets: free memory under control groups, tile plans, and the resident memory of real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathlens.budgets import free_bytes, plan_tiles
from pathlens.errors import BudgetError
from pathlens.progress import ProgressBar

GIB = 2**30


def fake_system(root: Path, available: int, files: dict[str, str], groups: str) -> Path:
    memory = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n"
    for name, text in {"proc/meminfo": memory, "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_no_group_is_the_systems_figure(tmp_path: Path) -> None:
    assert free_bytes(fake_system(tmp_path, 3 * GIB, {}, "0::/\n")) == 3 * GIB


def test_group_v2_with_a_limit_on_an_ancestor(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/memory.max": str(2 * GIB),
        "sys/fs/cgroup/a/memory.current": str(GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 3\ninactive_file {GIB // 2}\nslab 1\n",
    }
    assert free_bytes(fake_system(tmp_path, 8 * GIB, files, "0::/a/b\n")) == GIB + GIB // 2


def test_group_v2_inside_a_container_is_found_at_the_mount(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(GIB // 4)}
    assert free_bytes(fake_system(tmp_path, 8 * GIB, files, "0::/not/visible/here\n")) == 3 * GIB // 4


def test_group_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/job/"
    files = {
        base + "memory.limit_in_bytes": str(4 * GIB),
        base + "memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "7",
    }
    groups = "3:cpu,cpuacct:/x\n2:memory:/job\n"
    assert free_bytes(fake_system(tmp_path, 8 * GIB, files, groups)) == GIB
    files[base + "memory.usage_in_bytes"] = str(5 * GIB)  # over its limit for a moment
    assert free_bytes(fake_system(tmp_path, 8 * GIB, files, groups)) == 0


def test_nothing_to_read(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0


@given(
    st.integers(1, 10**5),
    st.integers(1, 10**5),
    st.integers(1, 64),
    st.integers(0, 10**5),
    st.integers(0, 10**5),
    st.integers(1, 10**9),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([None, 16, 2048]),
)
def test_plan_fits_or_raises(
    n: int, m: int, entry: int, row: int, col: int, budget: int, reserve: int, square: bool, edge: int | None
) -> None:
    try:
        plan = plan_tiles(
            n,
            m,
            entry_bytes=entry,
            row_bytes=row,
            col_bytes=col,
            budget=budget,
            reserve=reserve,
            edge=edge,
            square=square,
        )
    except BudgetError:
        assert entry + row + col + reserve > budget
        return
    assert 1 <= plan.rows <= n and 1 <= plan.cols <= m
    assert plan.bytes == entry * plan.rows * plan.cols + row * plan.rows + col * plan.cols
    assert plan.bytes + reserve <= budget
    assert edge is None or max(plan.rows, plan.cols) <= edge
    assert not square or plan.rows == plan.cols


def test_plan_uses_the_budget() -> None:
    plan = plan_tiles(10**4, 10**4, entry_bytes=4, row_bytes=0, col_bytes=0, budget=4 * 10**6, edge=None)
    assert plan.bytes > 0.9 * 4 * 10**6
    long = plan_tiles(10, 10**5, entry_bytes=4, row_bytes=0, col_bytes=0, budget=4 * 10**6, edge=None)
    assert long.rows == 10 and long.cols > 5 * 10**4


def test_meter_draws_only_on_a_terminal_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("pathlens.progress.time.monotonic", lambda: clock[0])
    with ProgressBar("work", 3) as quiet:
        clock[0] = 5.0
        quiet.advance()
        assert quiet._bar is None  # not a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with ProgressBar("outer", None) as outer:
        outer.advance()
        assert outer._bar is None  # too early
        clock[0] = 9.0
        outer.advance()
        assert outer._bar is not None
        with ProgressBar("inner", 1) as inner:
            clock[0] = 99.0
            inner.advance()
            assert inner._bar is None  # one bar at a time
        outer.advance()
    assert outer._bar is None and not ProgressBar._drawn


MEASURE = """
import json, resource, sys, threading, time
import torch
from pathlens.linops import GramSum, RowStream

torch.set_num_threads(1)
n, r, terms, budget, task = json.loads(sys.argv[1])
generator = torch.Generator().manual_seed(0)

class Recomputed:
    # wide factors that exist only block by block
    def __init__(self):
        self.n, self.seed = n, torch.randn(n, 8, generator=generator)
        self.mix = torch.randn(8, r, generator=generator)
    def rows(self, lo, hi):
        return (self.seed[lo:hi] @ self.mix).relu_()

if task == "stream":
    source = Recomputed()
    kernel = GramSum.from_factors([[("a", source), ("b", source)]], max_bytes=budget)
else:
    def factor():
        scales = torch.logspace(0, -2, r)  # a decaying spectrum, as kernels have: Lanczos is done in few products
        return torch.randn(n, r, generator=generator) * scales + scales
    kernel = GramSum.from_factors([[("h", factor()), ("d", factor())] for _ in range(terms)], max_bytes=budget)
v = torch.randn(n, generator=generator)
small = GramSum.from_factors([[("w", torch.randn(64, 8)), ("w", torch.randn(64, 8))]])
small.dense(), small @ torch.randn(64), small.normalised().dense()  # libraries load before the measurement starts
if task == "eigsh":
    import scipy.sparse.linalg
page = resource.getpagesize()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * page
before = peak = resident()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
if task == "eigsh":
    kernel.eigsh(5)
elif task == "tiles":
    for _ in kernel.tiles():
        pass
elif task == "dense":
    kernel.dense()
else:
    kernel @ v
running = False
thread.join()
print(json.dumps(peak - before))
"""


def growth(n: int, r: int, terms: int, budget: int, task: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps([n, r, terms, budget, task])],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )  # a busy machine may take minutes
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("n", "r", "terms", "budget", "task"),
    [
        (20_000, 64, 3, GIB, "matmul"),
        (20_000, 32, 2, GIB, "eigsh"),
        (6_000, 64, 2, 64 * 2**20, "tiles"),
        (8_000, 16, 2, 400 * 2**20, "dense"),  # the result alone is 244 MiB
        (1_000, 40_000, 1, 64 * 2**20, "stream"),  # the factor and its scaled copies would be 458 MiB
    ],
)
def test_resident_memory_grows_by_budget_at_most(n: int, r: int, terms: int, budget: int, task: str) -> None:
    assert growth(n, r, terms, budget, task) <= budget + 256 * 2**20
