"""Workers on a Dask cluster: a local one started here, or one that is there already.

Only `pathlens.linops.cluster` imports this module, when a cluster is asked for. What every worker needs is sent as a
worker plugin, because Dask gives it to workers that start later too: scattered data is lost with the worker that holds
it. May import only the errors and linops.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import distributed
import psutil
from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker

from pathlens.errors import ClusterError, OptionError
from pathlens.linops.cluster import Crew

CONNECT_SECONDS = 15.0  # until an address counts as unreachable
START_SECONDS = 120.0  # until workers count as missing; importing torch on a busy machine takes long
_LOOK = 2.0  # between looks at whether anybody is still alive
_LOST = 3  # times that Dask may lose a piece without saying why

_shared: dict[str, Any] = {}  # in a worker: what was sent to it, by key
_turn = threading.Lock()  # pieces use torch's own threads, and row streams are not made for two at once


class _Share(distributed.WorkerPlugin):
    """Holds what all pieces share in every worker, also in those that replace a dead one."""

    def __init__(self, key: str, value: Any, threads: int | None) -> None:
        self.key, self.value, self.threads = key, value, threads

    def setup(self, worker: Any) -> None:
        _shared[self.key] = self.value
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)

    def teardown(self, worker: Any) -> None:
        _shared.pop(self.key, None)


def _piece(key: str, function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
    with _turn:
        return function(_shared[key], *item)


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Make a call that Dask answers when every worker has, but do not wait for ever for one that is just dying."""
    thread = ThreadPoolExecutor(1)
    try:
        thread.submit(call).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    finally:
        thread.shutdown(wait=False)


def _address(client: distributed.Client) -> str:
    return str(getattr(client.scheduler, "address", "an unknown address"))


class DaskCrew(Crew):
    """The workers of one Dask client."""

    def __init__(self, client: distributed.Client, place: str, least: int = 1, threads: int | None = None,
                 process: subprocess.Popen[bytes] | None = None) -> None:
        self._client, self._threads, self._process = client, threads, process
        self.place = place
        try:
            client.wait_for_workers(least, timeout=START_SECONDS)
        except TimeoutError:
            raise ClusterError(f"{place}: no worker came within {START_SECONDS:.0f} s. Start some with `dask worker "
                               f"{_address(client)}`, or use client=False.") from None
        self.workers = len(client.nthreads())

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        key = f"pathlens-{uuid.uuid4().hex}"
        plugin = _Share(key, shared, self._threads)
        try:
            dumps((plugin, function))
        except Exception as error:  # pickle raises whatever the object's own methods raise
            raise ClusterError(f"what the workers need cannot be sent to them ({type(error).__name__}: {error}). "
                               f"Use client=False.") from error
        try:
            _within(START_SECONDS, lambda: self._client.register_plugin(plugin, name=key))
        except Exception as error:  # raised in a worker, so of any kind
            raise ClusterError(f"{self.place}: the workers could not be prepared ({type(error).__name__}: {error}). "
                               f"They need the same versions of pathlens and torch as this process.") from error
        running: dict[distributed.Future, tuple[Any, ...]] = {}
        try:
            yield from self._run(key, function, iter(items), running)
        finally:
            self._client.cancel(list(running))
            if self._client.status == "running":
                with contextlib.suppress(Exception):  # the work is done; what stays behind does no harm
                    _within(CONNECT_SECONDS, lambda: self._client.unregister_worker_plugin(key))

    def _run(self, key: str, function: Callable[..., Any], items: Iterator[tuple[Any, ...]],
             running: dict[distributed.Future, tuple[Any, ...]]) -> Iterator[Any]:
        error: BaseException | None = None
        lost: dict[tuple[Any, ...], int] = {}
        seen = time.monotonic()  # when somebody was last seen alive

        def submit(item: tuple[Any, ...]) -> None:
            running[self._client.submit(_piece, key, function, item, pure=False)] = item

        while True:
            # Two pieces per worker keep it busy; more would be lost work if the disk fills up.
            while error is None and len(running) < 2 * max(self.workers, 1):
                item = next(items, None)
                if item is None:
                    break
                submit(item)
            if not running:
                break
            try:
                with self._client.as_current():
                    done = distributed.wait(list(running), timeout=_LOOK, return_when="FIRST_COMPLETED").done
            except TimeoutError:
                seen = self._look(seen)
                continue
            seen = time.monotonic()
            for future in done:
                item = running.pop(future)
                if future.status == "finished":
                    try:
                        result = future.result()
                    except distributed.CancelledError:  # its worker died before the result was fetched
                        submit(item)
                        continue
                    yield item, result
                elif future.status == "error":
                    error = error or self._explain(future.exception(), item)
                else:
                    self._look(seen)
                    lost[item] = lost.get(item, 0) + 1
                    if lost[item] > _LOST:
                        error = error or ClusterError(f"{self.place}: piece {item} was lost {_LOST} times. Look at the "
                                                      f"scheduler's log; call again to go on.")
                    elif error is None:
                        submit(item)
        if error is not None:
            raise error

    def _explain(self, error: BaseException, item: tuple[Any, ...]) -> BaseException:
        if isinstance(error, KilledWorker):
            return ClusterError(f"{self.place}: workers died repeatedly while they computed piece {item}, most likely "
                                f"for want of memory. Lower max_bytes or the number of workers, and call again: what "
                                f"was finished stays.")
        return error

    def _look(self, seen: float) -> float:
        """Raise if nobody can be working any more; else when somebody was last seen."""
        if self._client.status != "running":
            raise ClusterError(f"{self.place}: the connection to the scheduler is lost. Call again to go on: what was "
                               f"finished stays.")
        if self._client.nthreads():
            return time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            raise ClusterError(f"{self.place}: all workers have exited (status {self._process.returncode}). Call again "
                               f"to go on: what was finished stays.")
        if time.monotonic() - seen > START_SECONDS:
            raise ClusterError(f"{self.place}: no worker has been seen for {START_SECONDS:.0f} s. Start some, and call "
                               f"again to go on: what was finished stays.")
        return seen


@contextmanager
def dask_crew(client: Any, workers: int) -> Iterator[DaskCrew]:
    """The crew of a client, of an address, or of a new local cluster of so many processes."""
    if isinstance(client, distributed.Client):
        yield DaskCrew(client, f"the cluster at {_address(client)}")
    elif client == "local":
        with _local(workers) as found:
            yield found
    elif isinstance(client, str):
        with _connect(client) as connected:
            yield DaskCrew(connected, f"the cluster at {client}")
    else:
        raise OptionError(f"client must be 'local', an address such as 'tcp://host:8786', a distributed.Client, or "
                          f"False for this process; got {type(client).__name__}.")


@contextmanager
def _connect(address: Any) -> Iterator[distributed.Client]:
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(f"no Dask scheduler answers at {address!r} ({type(error).__name__}: {error}). Check the "
                           f"address and that `dask scheduler` runs there, or use client='local'.") from error
    try:
        yield client
    finally:
        client.close()


def scheduler() -> distributed.LocalCluster:
    """A scheduler in this process that has no workers yet, with a second try on a machine that is very busy."""
    for _ in range(2):
        try:
            return distributed.LocalCluster(n_workers=0, dashboard_address=":0", host="127.0.0.1", silence_logs=50)
        except AssertionError as error:  # Dask asserts that its event loop has started within ten seconds
            with warnings.catch_warnings():  # what is left of it warns that nobody closed it
                warnings.simplefilter("ignore", ResourceWarning)
                error.__traceback__ = None
                gc.collect()
    raise ClusterError("The local Dask scheduler did not start within ten seconds, twice. Try again when the machine "
                       "is less busy, or give the address of a scheduler that runs.")


@contextmanager
def _local(workers: int) -> Iterator[DaskCrew]:
    """A scheduler in this process, and workers as processes of their own.

    They are started by command line: Dask's own way imports the user's script anew in every worker, which fails for
    scripts that do not guard their main part.
    """
    threads = max((os.cpu_count() or 1) // workers, 1)
    scratch_folder = tempfile.TemporaryDirectory(prefix="pathlens-dask-")
    with scheduler() as cluster, _connect(cluster) as client, scratch_folder as scratch:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address,
                   "--nworkers", str(workers), "--nthreads", "1", "--memory-limit", "0", "--no-dashboard",
                   "--death-timeout", "30", "--local-directory", scratch]
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        with open(os.path.join(scratch, "log"), "wb") as log:
            process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=log)
            try:
                yield DaskCrew(client, f"a local cluster of {workers} processes", workers, threads, process)
            finally:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the workers that we started, at once: they hold nothing, and their farewells take seconds."""
    family = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += psutil.Process(process.pid).children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
