"""Kernels written by a Dask cluster: equality, and what happens when workers, nannies or the scheduler are gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scale_processes import (
    check_that_a_kill_costs_one_block,
    checksums,
    held,
    kill_family,
    recorded,
    wait_for,
)

import pathlens as pl
from pathlens.errors import ClusterError, OptionError, ScaleError, StoreError
from pathlens.linops import GramSum, from_zarr
from pathlens.stores import open_executor

pytest.importorskip("zarr")
distributed = pytest.importorskip("distributed")
from pathlens.stores import dask_cluster  # noqa: E402


def start(**options: Any) -> Any:
    """A scheduler in this process, which nothing but this machine can reach."""
    return distributed.LocalCluster(host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50, **options)


@contextmanager
def cluster(workers: int, scratch: Path) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A client, and the process whose children are its workers: their nannies live there."""
    with start(n_workers=0) as scheduler, distributed.Client(scheduler, set_as_default=False) as found:
        command = [
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            scheduler.scheduler_address,
            "--nworkers",
            str(workers),
            "--nthreads",
            "1",
            "--memory-limit",
            "0",
            "--no-dashboard",
            "--host",
            "127.0.0.1",
            "--local-directory",
            str(scratch),
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with open(scratch / "log", "wb") as log:
            nannies = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            found.wait_for_workers(workers, timeout=300)
            yield found, nannies
        finally:
            kill_family(nannies.pid)
            nannies.wait()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two worker processes for most tests of this module: starting them takes seconds."""
    with cluster(2, tmp_path_factory.mktemp("dask")) as (found, _):
        yield found


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
        assert not list(tmp_path.rglob("arrays-*"))


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
    check_that_a_kill_costs_one_block(tmp_path, lambda: next(iter(client.run(os.getpid).values())), client=client)


def test_a_folder_that_workers_do_not_see(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.absolute
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/nowhere") if self == tmp_path / "k" else real(self))
    with pytest.raises(StoreError, match=r"/nowhere is not visible to the worker on .*share"):
        GramSum.from_factors([[("x", torch.ones(5, 1))]]).to_zarr(tmp_path / "k", client=client, block=2)


def test_an_unreachable_scheduler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.3)
    K = GramSum.from_factors([[("x", torch.ones(5, 1))]])
    for address in ("tcp://127.0.0.1:1", "no such scheme"):
        with pytest.raises(ClusterError, match=r"no Dask scheduler answers.*client='local'"):
            K.to_zarr(tmp_path / "k", client=address)
    with pytest.raises(OptionError, match="got float"), open_executor(3.5):
        pass


def test_workers_that_do_not_answer_are_told(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = dask_cluster.DaskExecutor(client, "the cluster", timeout=60)
    answered = threading.Event()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dask_cluster, "START_SECONDS", 0.2)
            patch.setattr(client, "register_plugin", lambda plugin, name: answered.wait())
            with pytest.raises(ClusterError, match=r"could not be prepared \(TimeoutError: no answer within 0 s\)"):
                list(executor.map(pow, 2, [(3,)]))
        monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.2)
        monkeypatch.setattr(client, "unregister_worker_plugin", lambda name: answered.wait())
        assert list(executor.map(pow, 2, [(3,)])) == [((3,), 8)]
    finally:
        answered.set()


def test_a_cluster_without_workers_is_told() -> None:
    refused = pytest.raises(ClusterError, match=r"no worker connected within 0 s.*client='local'")
    with start(n_workers=0) as scheduler, refused, open_executor(scheduler.scheduler_address, timeout=0.3):
        pass


def deadly(shared: Any, k: int) -> int:
    if k == shared:
        os._exit(1)
    return k


def test_workers_that_keep_dying_are_told(client: Any) -> None:
    """One task alone: Dask blames all that wait for the worker that dies."""
    executor = dask_cluster.DaskExecutor(client, "the cluster", timeout=60)
    allowed = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures)
    try:
        client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 0))
        with pytest.raises(ClusterError, match=r"died repeatedly while they computed task \(1,\).*max_bytes"):
            list(executor.map(by_value(deadly), 1, [(1,)]))
    finally:
        client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", allowed))


def by_value(function: Any) -> Any:
    """The workers cannot import this file: send the function itself."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return function


def test_workers_killed_with_their_nannies_end_the_call_and_unlock_the_store(tmp_path: Path) -> None:
    """Nobody is left who could replace them: the call must not wait for results that are lost."""
    path, go_on = tmp_path / "k", tmp_path / "go on"
    killed: list[float] = []
    K = held(48, go_on)
    with cluster(2, tmp_path) as (found, nannies):

        def kill() -> None:
            wait_for(lambda: len(recorded(path)) >= 4)
            kill_family(nannies.pid)
            killed.append(time.monotonic())

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(ClusterError, match=r"no worker has been seen for 3 s.*of 36 blocks are finished"):
            K.to_zarr(path, client=found, block=6, timeout=3)
        assert time.monotonic() - killed[0] < 30  # a few looks, two seconds apart
        killer.join()
    before = recorded(path)
    go_on.touch()
    report = K.to_zarr(path, client=False)
    assert report.kept == len(before) >= 4 and report.computed == 36 - len(before)
    assert torch.equal(from_zarr(path, verify=True).dense(), held(48).dense())


def slow(folder: Path, k: int) -> int:
    (folder / "begun").touch()
    wait_for((folder / "go on").exists)
    return k


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_lost_connection_is_taken_up_again_or_told(
    comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(timeout: float) -> None:
        raise OSError("no route to host")

    def cut() -> None:
        wait_for((tmp_path / "begun").exists)
        if not comes_back:
            monkeypatch.setattr(found, "_ensure_connected", refuse)
        before = set(found.futures)
        found.loop.add_callback(found.scheduler_comm.comm.abort)
        wait_for(lambda: set(found.futures) != before)
        (tmp_path / "go on").touch()

    scheduler = start(n_workers=1, processes=False, protocol="tcp://")
    with scheduler, distributed.Client(scheduler.scheduler_address, set_as_default=False, timeout=1) as found:
        executor = dask_cluster.DaskExecutor(found, "the cluster", timeout=30)
        threading.Thread(target=cut, daemon=True).start()
        if comes_back:
            assert list(executor.map(slow, tmp_path, [(1,)])) == [((1,), 1)]
        else:
            with pytest.raises(ClusterError, match=r"connection to the scheduler is lost.*client='local'"):
                list(executor.map(slow, tmp_path, [(1,)]))
