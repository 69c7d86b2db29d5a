"""Executors run many independent tasks in this process, in processes of this machine, or on a Dask cluster.

`open_executor` turns the ``client=`` argument of public functions into an `Executor`. Processes and Dask are imported
when they are used.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from pathlens.errors import ClusterError, OptionError, need_extra

Client: TypeAlias = Any  # "local", an address, a distributed.Client, or False
Item: TypeAlias = tuple[Any, ...]  # the arguments of one task
TIMEOUT = 300.0  # seconds; Dask also drops a worker after five minutes without a heartbeat


class Executor(ABC):
    """Runs tasks. Subclasses: `SerialExecutor`, ``ProcessExecutor`` and ``DaskExecutor``.

    Attributes
    ----------
    workers : int
        Number of tasks that run at the same time.
    place : str
        Where they run, for reports and error messages.
    """

    workers: int
    place: str

    @abstractmethod
    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[Item]) -> Iterator[Any]:
        """Yield (item, function(shared, *item)) as tasks finish, in any order.

        ``shared`` is sent to every worker once. A task whose worker dies is run again, a few times; then a
        `ClusterError` is raised. If a task fails, the running ones are finished and yielded before its error is raised.
        """


class SerialExecutor(Executor):
    """Runs one task after the other in this process.

    >>> list(SerialExecutor().map(lambda shared, k: shared * k, 10, [(1,), (2,)]))
    [((1,), 10), ((2,), 20)]
    """

    workers, place = 1, "this process"

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[Item]) -> Iterator[Any]:
        for item in items:
            yield item, function(shared, *item)


def default_workers() -> int:
    """Number of processors that this process may use.

    >>> default_workers() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def repeated_death_error(place: str, item: Item, cause: str) -> ClusterError:
    """The error for a task whose workers die again and again."""
    return ClusterError(
        f"{place}: workers died repeatedly while they computed task {item} ({cause}). If memory ran "
        f"out, lower max_bytes or the number of workers. Call again to resume: finished tasks are "
        f"kept."
    )


def pickle_error(error: Exception) -> ClusterError:
    """The error for a function or data that cannot be pickled."""
    return ClusterError(
        f"the function and its data cannot be sent to the workers ({type(error).__name__}: {error}). Use client=False."
    )


def client_error(client: Any) -> OptionError:
    """The error for a ``client=`` that is none."""
    return OptionError(
        f"client must be 'local', an address such as 'tcp://host:8786', a distributed.Client, or False for this "
        f"process; got {type(client).__name__} {client!r:.80}."
    )


def open_executor(
    client: Client = "local", workers: int | None = None, timeout: float = TIMEOUT
) -> AbstractContextManager[Executor]:
    """A context manager for the executor of a ``client``.

    Parameters
    ----------
    client
        ``"local"``: processes on this machine, started on entry and stopped on exit, connected by pipes. An address
        such as ``"tcp://host:8786"``: the Dask scheduler that listens there. A ``distributed.Client``: used as it is
        and left open. False: no other process, this one.
    workers
        Number of processes of ``"local"``; default: one per processor.
    timeout
        Seconds without a heartbeat after which a process is replaced, and seconds to wait for the first worker of a
        Dask cluster. A task itself may take any time.

    Examples
    --------
    >>> with open_executor(False) as executor:
    ...     [result for _, result in executor.map(pow, 2, [(3,), (4,)])]
    [8, 16]
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise OptionError(f"workers must be a number of processes, at least 1, got {workers!r}.")
    if workers is not None and client != "local":
        raise OptionError(
            f"workers={workers} was given with client={client!r}; it is the number of local processes. "
            f"Leave it out, or use client='local'."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise OptionError(f"timeout must be a number of seconds above 0, got {timeout!r}.")
    if client is False:
        return nullcontext(SerialExecutor())
    if client is None or client is True:
        raise client_error(client)
    if isinstance(client, str) and client == "local":
        from pathlens.stores.processes import ProcessExecutor

        return ProcessExecutor(workers or default_workers(), timeout)
    try:
        from pathlens.stores import dask_cluster
    except ImportError as error:
        raise need_extra("scale", "dask.distributed", "a Dask cluster (client='local' and False need none)") from error
    return dask_cluster.connect(client, timeout)
