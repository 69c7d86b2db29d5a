"""Workers on a Dask cluster that is there already: of a client, or at an address.

Only `pathlens.linops.cluster` imports this module, when a cluster is asked for. What every worker needs is sent as a
worker plugin, because Dask gives it to workers that start later too: scattered data is lost with the worker that holds
it. Every wait for the cluster is bounded, because a cluster without workers does not answer. May import only the errors
and linops.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import distributed
from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker

from pathlens.errors import ClusterError, OptionError
from pathlens.linops.cluster import Crew, cannot_be_sent, keeps_dying

CONNECT_SECONDS = 15.0  # until an address counts as unreachable
START_SECONDS = 120.0  # until workers that are being prepared count as dead; they may have to import torch
_LOOK = 2.0  # between looks at whether anybody is still alive
_LOST = 3  # times that Dask may lose a piece without saying why

_shared: dict[str, Any] = {}  # in a worker: what was sent to it, by key
_turn = threading.Lock()  # pieces use torch's own threads, and row streams are not made for two at once


class _Share(distributed.WorkerPlugin):
    """Holds what all pieces share in every worker, also in those that replace a dead one."""

    def __init__(self, key: str, value: Any) -> None:
        self.key, self.value = key, value

    def setup(self, worker: Any) -> None:
        _shared[self.key] = self.value

    def teardown(self, worker: Any) -> None:
        _shared.pop(self.key, None)


def _piece(key: str, function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
    with _turn:
        return function(_shared[key], *item)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Make a call that waits for a scheduler or for workers, but no longer than so many seconds."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def make() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=make, daemon=True).start()  # one that never ends must not keep Python from ending
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result


def _address(client: distributed.Client) -> str:
    return str(getattr(client.scheduler, "address", "an unknown address"))


class DaskCrew(Crew):
    """The workers of one Dask client."""

    def __init__(self, client: distributed.Client, place: str, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self.place = place
        self._check_connection()
        try:
            _within(timeout + CONNECT_SECONDS, lambda: client.wait_for_workers(1, timeout=timeout))
            self.workers = len(_within(CONNECT_SECONDS, client.nthreads))
        except TimeoutError:
            raise ClusterError(
                f"{place}: no worker came within {timeout:.0f} s. Start some with `dask worker "
                f"{_address(client)}`, or use client='local'."
            ) from None

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        key = f"pathlens-{uuid.uuid4().hex}"
        plugin = _Share(key, shared)
        try:
            dumps((plugin, function))
        except Exception as error:  # pickle raises whatever the object's own methods raise
            raise cannot_be_sent(error) from error
        try:
            _within(START_SECONDS, lambda: self._client.register_plugin(plugin, name=key))
        except Exception as error:  # raised in a worker, so of any kind
            raise ClusterError(
                f"{self.place}: the workers could not be prepared ({type(error).__name__}: {error}). "
                f"They need the same versions of pathlens and torch as this process."
            ) from error
        running: dict[distributed.Future, tuple[Any, ...]] = {}
        try:
            yield from self._run(key, function, iter(items), running)
        finally:
            if self._client.status == "running":
                limit = min(self._timeout, CONNECT_SECONDS)  # where workers are gone, nobody answers
                with contextlib.suppress(Exception):  # the work is done; what stays behind does no harm
                    _within(limit, lambda: self._client.cancel(list(running)))
                    _within(limit, lambda: self._client.unregister_worker_plugin(key))

    def _run(
        self,
        key: str,
        function: Callable[..., Any],
        items: Iterator[tuple[Any, ...]],
        running: dict[distributed.Future, tuple[Any, ...]],
    ) -> Iterator[Any]:
        error: BaseException | None = None
        lost: dict[tuple[Any, ...], int] = {}
        seen = time.monotonic()  # when somebody was last seen alive

        def submit(item: tuple[Any, ...]) -> None:
            self._check_connection()
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
            for future in self._done(list(running)):
                item = running.pop(future)
                try:
                    if future.status == "finished":
                        result = future.result(timeout=_LOOK)
                    elif future.status == "error":
                        error = error or self._explain(future.exception(timeout=_LOOK), item)
                        continue
                    else:
                        raise distributed.CancelledError
                except TimeoutError:  # its worker has died with the result, which Dask computes again
                    running[future] = item
                    break
                except distributed.CancelledError:
                    lost[item] = lost.get(item, 0) + 1
                    if lost[item] > _LOST:
                        error = error or keeps_dying(self.place, item, f"lost {lost[item]} times")
                    elif error is None:
                        submit(item)
                else:
                    seen = time.monotonic()
                    yield item, result
            seen = self._look(seen)
        if error is not None:
            raise error

    def _done(self, futures: list[distributed.Future]) -> list[distributed.Future]:
        """Those that are not pending; waits a moment for the first."""
        with contextlib.suppress(TimeoutError, distributed.CancelledError), self._client.as_current():
            distributed.wait(futures, timeout=_LOOK, return_when="FIRST_COMPLETED")
        return [future for future in futures if future.status != "pending"]

    def _explain(self, error: BaseException, item: tuple[Any, ...]) -> BaseException:
        return keeps_dying(self.place, item, "lost by Dask") if isinstance(error, KilledWorker) else error

    def _check_connection(self) -> None:
        """Raise if the scheduler is lost; Dask's own attempts to connect again are waited for."""
        end = time.monotonic() + min(self._timeout, CONNECT_SECONDS)
        while self._client.status == "connecting" and time.monotonic() < end:
            time.sleep(0.05)
        if self._client.status != "running":
            raise ClusterError(
                f"{self.place}: the connection to the scheduler is lost. Call again when it is back, or "
                f"with client='local', to resume: finished pieces are kept."
            )

    def _look(self, seen: float) -> float:
        """Raise if nobody can be working any more; else when somebody was last seen."""
        if time.monotonic() - seen < _LOOK:
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
                f"resume: finished pieces are kept."
            )
        return seen


@contextmanager
def dask_crew(client: Any, timeout: float) -> Iterator[DaskCrew]:
    """The crew of a client, or of an address."""
    if isinstance(client, distributed.Client):
        yield DaskCrew(client, f"the cluster at {_address(client)}", timeout)
    elif isinstance(client, str):
        with _connect(client) as connected:
            yield DaskCrew(connected, f"the cluster at {client}", timeout)
    else:
        raise OptionError(
            f"client must be 'local', an address such as 'tcp://host:8786', a distributed.Client, or "
            f"False for this process; got {type(client).__name__}."
        )


@contextmanager
def _connect(address: Any) -> Iterator[distributed.Client]:
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at {address!r} ({type(error).__name__}: {error}). Check the "
            f"address and that `dask scheduler` runs there, or use client='local'."
        ) from error
    try:
        yield client
    finally:
        with contextlib.suppress(TimeoutError):  # a scheduler that does not answer must not hide what was raised
            client.close()
