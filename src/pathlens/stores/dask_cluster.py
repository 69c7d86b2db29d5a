"""An executor for an existing Dask cluster, given by a client or an address.

Shared data is sent as a worker plugin, because Dask also gives it to workers that start later: scattered data is lost
with the worker that holds it. Every wait for the cluster is bounded, because a cluster without workers does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import distributed
from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker

from pathlens.errors import ClusterError
from pathlens.stores.executors import Executor, Item, client_error, pickle_error, repeated_death_error

T = TypeVar("T")

CONNECT_SECONDS = 15.0  # after which an address counts as unreachable
START_SECONDS = 120.0  # after which workers that are being prepared count as dead; they may have to import torch
RETRIES = 3  # how often a task that Dask has lost is submitted again
_CHECK_SECONDS = 2.0  # between checks for living workers

_shared: dict[str, Any] = {}  # in a worker: the shared data that was sent to it, by key
_one_task = threading.Lock()  # tasks use torch's own threads, and row streams are not thread-safe


class _Share(distributed.WorkerPlugin):
    """Holds the shared data in every worker, also in those that replace a dead one."""

    def __init__(self, key: str, value: Any) -> None:
        self.key, self.value = key, value

    def setup(self, worker: Any) -> None:
        _shared[self.key] = self.value

    def teardown(self, worker: Any) -> None:
        _shared.pop(self.key, None)


def _run_task(key: str, function: Callable[..., Any], item: Item) -> Any:
    with _one_task:
        return function(_shared[key], *item)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call that waits for a scheduler or for workers, with a time limit."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # not a pool: a call that never ends would keep Python alive
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return answer.result()


def _address(client: distributed.Client) -> str:
    return str(getattr(client.scheduler, "address", "an unknown address"))


class DaskExecutor(Executor):
    """Runs tasks on the workers of one Dask client."""

    def __init__(self, client: distributed.Client, place: str, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self.place = place
        self._check_connection()
        try:
            _within(timeout + CONNECT_SECONDS, lambda: client.wait_for_workers(1, timeout=timeout))
            self.workers = len(_within(CONNECT_SECONDS, client.nthreads))
        except TimeoutError:
            raise ClusterError(
                f"{place}: no worker connected within {timeout:.0f} s. Start some with `dask worker "
                f"{_address(client)}`, or use client='local'."
            ) from None

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[Item]) -> Iterator[Any]:
        key = f"pathlens-{uuid.uuid4().hex}"
        plugin = _Share(key, shared)
        try:
            dumps((plugin, function))
        except Exception as error:  # pickle raises whatever the object's own methods raise
            raise pickle_error(error) from error
        try:
            _within(START_SECONDS, lambda: self._client.register_plugin(plugin, name=key))
        except Exception as error:  # raised in a worker, so of any kind
            raise ClusterError(
                f"{self.place}: the workers could not be prepared ({type(error).__name__}: {error}). "
                f"They need the same versions of pathlens and torch as this process."
            ) from error
        running: dict[distributed.Future, Item] = {}
        try:
            yield from self._run(key, function, iter(items), running)
        finally:
            if self._client.status == "running":
                limit = min(self._timeout, CONNECT_SECONDS)  # without workers, nothing answers
                with contextlib.suppress(Exception):  # the work is done; data left on the cluster does no harm
                    _within(limit, lambda: self._client.cancel(list(running)))
                    _within(limit, lambda: self._client.unregister_worker_plugin(key))

    def _run(
        self,
        key: str,
        function: Callable[..., Any],
        items: Iterator[Item],
        running: dict[distributed.Future, Item],
    ) -> Iterator[Any]:
        error: BaseException | None = None
        lost: dict[Item, int] = {}
        seen = time.monotonic()  # when a worker was last seen

        def submit(item: Item) -> None:
            self._check_connection()
            running[self._client.submit(_run_task, key, function, item, pure=False)] = item

        while True:
            # Two tasks per worker keep it busy; more would be lost work if the disk fills up.
            while error is None and len(running) < 2 * max(self.workers, 1):
                item = next(items, None)
                if item is None:
                    break
                submit(item)
            if not running:
                break
            for future in self._done(list(running)):
                item = running.pop(future)
                try:
                    if future.status == "finished":
                        result = future.result(timeout=_CHECK_SECONDS)
                    elif future.status == "error":
                        raised = future.exception(timeout=_CHECK_SECONDS)
                        if isinstance(raised, KilledWorker):
                            raised = repeated_death_error(self.place, item, "lost by Dask")
                        error = error or raised
                        continue
                    else:
                        raise distributed.CancelledError
                except TimeoutError:  # its worker has died with the result, which Dask computes again
                    running[future] = item
                    break
                except distributed.CancelledError:
                    lost[item] = lost.get(item, 0) + 1
                    if lost[item] > RETRIES:
                        error = error or repeated_death_error(self.place, item, f"lost {lost[item]} times")
                    elif error is None:
                        submit(item)
                else:
                    seen = time.monotonic()
                    yield item, result
            seen = self._check_workers(seen)
        if error is not None:
            raise error

    def _done(self, futures: list[distributed.Future]) -> list[distributed.Future]:
        """The futures that are not pending; waits a moment for the first."""
        with contextlib.suppress(TimeoutError, distributed.CancelledError), self._client.as_current():
            distributed.wait(futures, timeout=_CHECK_SECONDS, return_when="FIRST_COMPLETED")
        return [future for future in futures if future.status != "pending"]

    def _check_connection(self) -> None:
        """Raise if the connection to the scheduler is lost and Dask does not restore it in time."""
        end = time.monotonic() + min(self._timeout, CONNECT_SECONDS)
        while self._client.status == "connecting" and time.monotonic() < end:
            time.sleep(0.05)
        if self._client.status != "running":
            raise ClusterError(
                f"{self.place}: the connection to the scheduler is lost. Call again when it is back, or "
                f"with client='local', to resume: finished tasks are kept."
            )

    def _check_workers(self, seen: float) -> float:
        """Raise if no worker was seen within the timeout; else return the time at which one was last seen."""
        if time.monotonic() - seen < _CHECK_SECONDS:
            return seen
        self._check_connection()
        what = "no worker has been seen"
        try:
            if _within(min(self._timeout, CONNECT_SECONDS), self._client.nthreads):
                return time.monotonic()
        except OSError:  # a TimeoutError is one, too
            what = "the scheduler has not answered"
        if time.monotonic() - seen > self._timeout:
            raise ClusterError(
                f"{self.place}: {what} for {self._timeout:g} s. Check the scheduler at "
                f"{_address(self._client)} and its workers, or use client='local', and call again to "
                f"resume: finished tasks are kept."
            )
        return seen


@contextmanager
def connect(client: Any, timeout: float) -> Iterator[DaskExecutor]:
    """The executor for a client, which is left open, or for an address."""
    if isinstance(client, distributed.Client):
        yield DaskExecutor(client, f"the cluster at {_address(client)}", timeout)
        return
    if not isinstance(client, str):
        raise client_error(client)
    try:
        connected = distributed.Client(client, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at {client!r} ({type(error).__name__}: {error}). Check the "
            f"address and that `dask scheduler` runs there, or use client='local'."
        ) from error
    try:
        yield DaskExecutor(connected, f"the cluster at {client}", timeout)
    finally:
        with contextlib.suppress(TimeoutError):  # a scheduler that does not answer must not hide the first error
            connected.close()
