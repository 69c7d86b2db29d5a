"""Kernels written by a local cluster: equality, and what happens when workers or the client are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pathlens as pl
from pathlens.errors import ClusterError, OptionError, ScaleError, StoreError
from pathlens.linops import CustomKernel, GramSum, from_zarr, store
from pathlens.linops.cluster import crew

pytest.importorskip("zarr")
distributed = pytest.importorskip("distributed")
from pathlens.linops.backends import dask  # noqa: E402


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Two worker processes for all tests of this module: starting them takes seconds."""
    with dask._local(2) as team:
        yield team._client


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
    layout = store.open_layout(path)
    files = [file for pair in pairs for file in layout.files(*pair)]
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def checksums(path: Path) -> dict[tuple[int, int], tuple[str, ...]]:
    found = store.open_layout(path)
    assert found.unsound(verify=True) == []
    return found.finished


def wait_for(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_cluster_writes_what_dense_returns(client: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 6, generator=generator) for n in (41, 29))
    gates = [torch.rand(n, 9, generator=generator) > 0.5 for n in (41, 29)]
    symmetric = GramSum.from_factors([[("x", x), ("gate", gates[0])]])
    cross = GramSum.from_factors([[("x", x, y), ("gate", *gates)]])[torch.arange(41).flip(0), :20]
    for name, K in (("symmetric", symmetric), ("cross", cross)):
        report = K.to_zarr(tmp_path / name, client=client, block=10)
        assert report.computed == report.blocks and "cluster at tcp://" in report.place
        assert torch.allclose(from_zarr(tmp_path / name, verify=True).dense(), K.dense(), atol=1e-5)
        K.to_zarr(tmp_path / f"{name} here", client=False, block=10)
        assert checksums(tmp_path / name) == checksums(tmp_path / f"{name} here")  # bit for bit
        assert not list(tmp_path.rglob("factors-*"))


@pytest.mark.parametrize("make", [pl.models.dlgn, pl.models.relu])
def test_streams_go_to_workers_as_frozen_weights_and_data(make: Any, client: Any, tmp_path: Path) -> None:
    net, X = make(3, hidden=(5, 5), seed=0), torch.randn(26, 3, generator=torch.Generator().manual_seed(0))
    X.add_(1.0).mul_(2.0)  # changed before it was given: its count of changes is not that of a tensor that was sent
    K = pl.kernels.ntk(pl.record(net, X, stream=True))
    assert "streamed" in repr(K)
    K.to_zarr(tmp_path / "k", client=client, block=9)
    assert torch.allclose(from_zarr(tmp_path / "k").dense(), pl.kernels.ntk(net, X).dense(), atol=1e-5)


def test_errors_of_a_block_arrive_and_finished_blocks_stay(client: Any, tmp_path: Path) -> None:
    x = torch.ones(30, 1)
    x[25:] = 1e30
    with pytest.raises(ScaleError, match=r"beyond torch.float32.*of 6 blocks are finished and stay"):
        GramSum.from_factors([[("x", x)]]).to_zarr(tmp_path / "k", client=client, block=10)
    assert (0, 0) in recorded(tmp_path / "k") and (2, 2) not in recorded(tmp_path / "k")


def test_a_killed_worker_costs_its_own_block_at_most(client: Any, tmp_path: Path) -> None:
    path, go_on = tmp_path / "k", tmp_path / "go on"
    seen: dict[str, Any] = {}

    def kill() -> None:
        try:
            wait_for(lambda: len(recorded(path)) >= 4)
            seen["before"] = recorded(path)
            seen["stamps"] = stamps(path, seen["before"])
            victim = next(iter(client.run(os.getpid).values()))
            os.kill(victim, signal.SIGKILL)
        finally:
            go_on.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    K = held(48, go_on)
    report = K.to_zarr(path, client=client, block=6)
    killer.join()
    assert report.blocks == 36 and 4 <= len(seen["before"]) < 36
    assert stamps(path, seen["before"]) == seen["stamps"]  # what was recorded was not written again
    K.to_zarr(tmp_path / "quiet", client=False, block=6)
    assert checksums(path) == checksums(tmp_path / "quiet")


def test_a_killed_client_is_resumed(tmp_path: Path) -> None:
    """SIGKILL to the process that records, its workers orphaned; then the rest, by other means."""
    path, go_on = tmp_path / "k", tmp_path / "go on"
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_scale_cluster import held
        held(48, {str(go_on)!r}).to_zarr({str(path)!r}, workers=1, block=6)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(recorded(path)) >= 5 or process.poll() is not None)
    finally:
        process.kill()
        go_on.touch()
    errors = process.communicate()[1].decode()
    before = recorded(path)
    assert 5 <= len(before) < 36, errors
    kept = stamps(path, before)
    K = held(48)
    report = K.to_zarr(path, client=False)
    assert report.kept == len(before) and report.computed == 36 - len(before) and report.repaired == ()
    assert stamps(path, before) == kept
    K.to_zarr(tmp_path / "quiet", client=False, block=6)
    assert checksums(path) == checksums(tmp_path / "quiet")


def test_what_cannot_be_sent_is_told(client: Any, tmp_path: Path) -> None:
    lock = threading.Lock()

    def tile(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        with lock:
            return torch.ones(len(i), len(j))

    K = CustomKernel((5, 5), tile, lambda: torch.ones(5), symmetric=True)
    with pytest.raises(ClusterError, match=r"cannot be sent to them.*client=False"):
        K.to_zarr(tmp_path / "k", client=client, block=2)


def test_a_folder_that_workers_do_not_see(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.absolute
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/nowhere") if self == tmp_path / "k" else real(self))
    with pytest.raises(StoreError, match=r"/nowhere is not there for the worker on .*share"):
        GramSum.from_factors([[("x", torch.ones(5, 1))]]).to_zarr(tmp_path / "k", client=client, block=2)


def test_an_unreachable_scheduler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "CONNECT_SECONDS", 0.3)
    K = GramSum.from_factors([[("x", torch.ones(5, 1))]])
    for address in ("tcp://127.0.0.1:1", "no such scheme"):
        with pytest.raises(ClusterError, match=r"no Dask scheduler answers.*client='local'"):
            K.to_zarr(tmp_path / "k", client=address)
    with pytest.raises(OptionError, match="got float"), crew(3.5):
        pass


def test_workers_that_do_not_answer_are_told(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    team = dask.DaskCrew(client, "the cluster")
    answered = threading.Event()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dask, "START_SECONDS", 0.2)
            patch.setattr(client, "register_plugin", lambda plugin, name: answered.wait())
            with pytest.raises(ClusterError, match=r"could not be prepared \(TimeoutError: no answer within 0 s\)"):
                list(team.map(pow, 2, [(3,)]))
        monkeypatch.setattr(dask, "CONNECT_SECONDS", 0.2)
        monkeypatch.setattr(client, "unregister_worker_plugin", lambda name: answered.wait())
        assert list(team.map(pow, 2, [(3,)])) == [((3,), 8)]
    finally:
        answered.set()


def test_a_cluster_without_workers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "START_SECONDS", 0.3)
    told = pytest.raises(ClusterError, match="no worker came")
    with dask.scheduler() as cluster, told, crew(cluster.scheduler_address):
        pass


@pytest.mark.parametrize("failures", [1, 2])
def test_a_scheduler_that_does_not_start_is_started_again_once(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [failures], distributed.LocalCluster

    def stalled(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        assert left[0] < 0
        return real(*args, **options)

    monkeypatch.setattr(distributed, "LocalCluster", stalled)
    if failures == 1:
        with dask.scheduler() as cluster:
            assert cluster.scheduler_address
    else:
        with pytest.raises(ClusterError, match="did not start"):
            dask.scheduler()


def deadly(shared: Any, k: int) -> int:
    if k == shared:
        os._exit(1)
    return k


def test_workers_that_keep_dying_are_told(client: Any) -> None:
    """One piece alone: Dask blames all that wait for the worker that dies."""
    team = dask.DaskCrew(client, "the cluster")
    allowed = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures)
    try:
        client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 0))
        with pytest.raises(ClusterError, match=r"died repeatedly while they computed piece \(1,\).*max_bytes"):
            list(team.map(by_value(deadly), 1, [(1,)]))
    finally:
        client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", allowed))


def by_value(function: Any) -> Any:
    """The workers cannot import this file: send the function itself."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return function
