"""Kernels written by processes of this machine: equality, no open ports, and what happens when processes are killed."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pathlens.errors import ClusterError, OptionError
from pathlens.linops import CustomKernel, GramSum, from_zarr
from pathlens.stores import Store, open_executor, open_store, processes

pytest.importorskip("zarr")
psutil = pytest.importorskip("psutil")

PATIENCE = 300  # seconds; a busy machine may take its time to start a cluster


def held(n: int, until: str | Path | None = None) -> CustomKernel:
    """min(i, j) + 1; rows from the sixth on wait until a file is there, so that nobody is finished before a kill."""

    def tile(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        end = time.monotonic() + PATIENCE
        while until is not None and int(i[0]) >= 6 and not Path(until).exists() and time.monotonic() < end:
            time.sleep(0.02)
        return torch.minimum(i[:, None], j[None, :]).double() + 1

    return CustomKernel((n, n), tile, lambda: torch.arange(n).double() + 1, dtype=torch.float64, symmetric=True)


def recorded(path: Path) -> set[tuple[int, int]]:
    """Blocks on record now, read while somebody writes."""
    rows = {int(file.stem): json.loads(file.read_bytes()) for file in path.glob("pathlens/finished/[0-9]*.json")}
    return {(i, int(j)) for i, row in rows.items() for j in row["blocks"]}


def stamps(path: Path, pairs: set[tuple[int, int]]) -> dict[Path, tuple[int, int]]:
    """Inode and time of the chunks of some blocks: both change when a block is written anew."""
    store = open_store(path)
    files = [file for pair in pairs for file in store.files(*pair)]
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def checksums(path: Path) -> dict[tuple[int, int], tuple[str, ...]]:
    found = open_store(path)
    assert found.find_damaged(verify=True) == []
    return found.finished


def wait_for(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def kill_family(pid: int) -> None:
    """SIGKILL to a process and all that descend from it, the eldest first, so that none is replaced."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def live_workers() -> list[psutil.Process]:
    """Worker processes of this one that run; other tests may have left processes of their own."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "popen_loky" in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_workers() -> set[int]:
    """SIGKILL to all worker processes of this one; returns their numbers."""
    found = {child.pid for child in live_workers()}
    for pid in found:
        kill_family(pid)
    return found


def listening() -> list[Any]:
    """Sockets of this process and all that descend from it that somebody can connect to."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    return [
        each
        for member in family
        for each in member.net_connections("all")
        if each.status == psutil.CONN_LISTEN or (each.family == socket.AF_UNIX and each.laddr)
    ]


def test_processes_write_what_dense_returns_and_listen_nowhere(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gates = torch.randn(41, 6, generator=generator), torch.rand(41, 9, generator=generator) > 0.5
    K = GramSum.from_factors([[("x", x), ("gate", gates)]])
    before, seen = listening(), []
    real = Store.record

    def record(self: Store, *arguments: Any) -> None:
        seen.append((len(live_workers()), listening()))
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "record", record)
        report = K.to_zarr(tmp_path / "k", workers=2, block=10)
    assert report.computed == 15 and report.place == "2 processes on this machine"
    assert len(seen) == 15 and all(count >= 1 and found == before for count, found in seen)
    K.to_zarr(tmp_path / "here", client=False, block=10)
    assert checksums(tmp_path / "k") == checksums(tmp_path / "here")  # bit for bit
    assert not list(tmp_path.rglob("arrays-*"))


def check_that_a_kill_costs_one_block(folder: Path, victim: Callable[[], int], **options: Any) -> None:
    """Write a kernel, kill the process that `victim` names meanwhile: all is written, nothing finished twice."""
    path, go_on = folder / "k", folder / "go on"
    seen: dict[str, Any] = {}

    def kill() -> None:
        try:
            wait_for(lambda: len(recorded(path)) >= 4)
            seen["before"] = recorded(path)
            seen["stamps"] = stamps(path, seen["before"])
            os.kill(victim(), signal.SIGKILL)
        finally:
            go_on.touch()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    K = held(48, go_on)
    report = K.to_zarr(path, block=6, **options)
    killer.join()
    assert report.blocks == 36 and 4 <= len(seen["before"]) < 36
    assert stamps(path, seen["before"]) == seen["stamps"]  # what was recorded was not written again
    assert torch.equal(from_zarr(path, verify=True).dense(), held(48).dense())
    K.to_zarr(folder / "quiet", client=False, block=6)
    assert checksums(path) == checksums(folder / "quiet")


def test_one_of_two_processes_killed_costs_its_own_block_at_most(tmp_path: Path) -> None:
    check_that_a_kill_costs_one_block(tmp_path, lambda: live_workers()[0].pid, workers=2)


def test_processes_killed_again_and_again_end_the_call_and_unlock_the_store(tmp_path: Path) -> None:
    path, go_on = tmp_path / "k", tmp_path / "go on"
    ended = threading.Event()
    killed: set[int] = set()
    begun: list[float] = []

    def kill() -> None:
        wait_for(lambda: len(recorded(path)) >= 4)
        begun.append(time.monotonic())
        while not ended.wait(0.02):
            killed.update(kill_workers())

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        with pytest.raises(ClusterError, match=r"died repeatedly .*SIGKILL\(-9\).*of 36 blocks are finished"):
            held(48, go_on).to_zarr(path, workers=2, block=6)
    finally:
        ended.set()
    killer.join()
    assert 4 <= len(killed) <= 2 * (processes.RETRIES + 1) and time.monotonic() - begun[0] < 120
    assert live_workers() == []
    before = recorded(path)
    go_on.touch()
    report = held(48).to_zarr(path, client=False)
    assert report.kept == len(before) >= 4 and report.computed == 36 - len(before)
    assert torch.equal(from_zarr(path, verify=True).dense(), held(48).dense())


def test_a_process_without_a_heartbeat_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(shared: Any, k: int) -> int:
        print("on standard output, which must not reach the results")
        if k == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return k

    monkeypatch.setattr(processes, "RETRIES", 0)
    with open_executor("local", 1) as executor:
        results = executor.map(freeze, None, [(0,), (1,)])
        assert next(results) == ((0,), 0)  # what takes long to load is loaded now
        executor._timeout = 1.0  # type: ignore[attr-defined]
        with pytest.raises(ClusterError, match=r"task \(1,\) \(no heartbeat for 1 s\).*Call again"):
            next(results)


def test_what_cannot_come_back_is_told() -> None:
    """What a worker makes of an item, and what is read from that here, without a process in between."""

    class Difficult(Exception):  # cannot be rebuilt from what `Exception` keeps
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")

    def piece(shared: Any, k: int) -> Any:
        if k == 1:
            raise Difficult(3, 4)
        if k == 2:
            raise KeyError("plain")
        return threading.Lock() if k == 0 else k

    task, executor = processes._Task(piece, None, 1), processes.ProcessExecutor(2, timeout=300)
    assert executor._read(task(pickle.dumps((5,))), (5,)) == ("done", 5)
    for k, error, match in (
        (0, ClusterError, r"task \(0,\): its result cannot be sent.*client=False"),
        (1, ClusterError, r"Difficult: 3 and 4 cannot be sent"),
        (2, KeyError, "plain"),
    ):
        kind, value = executor._read(task(pickle.dumps((k,))), (k,))
        assert kind != "done" and isinstance(value, error) and re.search(match, str(value))
    assert "cannot be read here" in str(executor._read(b"no pickle", (0,))[1])


def test_what_workers_cannot_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = types.ModuleType("pathlens_ghost")
    exec("def piece(shared, k): return k", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "pathlens_ghost", ghost)
    with (
        open_executor("local", 1) as executor,
        pytest.raises(ClusterError, match=r"not be prepared .*No module.*pathlens_ghost"),
    ):
        list(executor.map(ghost.piece, None, [(1,)]))


def test_a_killed_client_is_resumed(tmp_path: Path) -> None:
    """SIGKILL to the process that records, whose workers end by themselves; then the rest, by other means."""
    path, go_on = tmp_path / "k", tmp_path / "go on"
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_scale_processes import held
        held(48, {str(go_on)!r}).to_zarr({str(path)!r}, workers=1, block=6)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(recorded(path)) >= 5 or process.poll() is not None)
        orphans = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
    wait_for(lambda: not any(orphan.is_running() and orphan.status() != "zombie" for orphan in orphans))
    go_on.touch()
    errors = process.communicate()[1].decode()
    before = recorded(path)
    assert orphans
    assert 5 <= len(before) < 36, errors
    kept = stamps(path, before)
    K = held(48)
    report = K.to_zarr(path, client=False)
    assert report.kept == len(before) and report.computed == 36 - len(before) and report.repaired == ()
    assert stamps(path, before) == kept
    K.to_zarr(tmp_path / "quiet", client=False, block=6)
    assert checksums(path) == checksums(tmp_path / "quiet")


def test_a_script_needs_no_main_guard_and_workers_print_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            from pathlens.stores import open_executor
            print("begin")
            def task(shared, k):
                print("from a worker")
                return shared + k
            with open_executor("local", 2) as executor:
                print(sorted(result for _, result in executor.map(task, 10, [(1,), (2,), (3,)])))
        """)
    )
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begin\n[11, 12, 13]\n", "")


def test_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    lock = threading.Lock()

    def tile(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        with lock:
            return torch.ones(len(i), len(j))

    K = CustomKernel((5, 5), tile, lambda: torch.ones(5), symmetric=True)
    with pytest.raises(ClusterError, match=r"cannot be sent to the workers.*client=False"):
        K.to_zarr(tmp_path / "k", block=2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with (
        pytest.raises(OptionError, match="timeout must be a number of seconds"),
        open_executor("local", timeout=timeout),
    ):
        pass
