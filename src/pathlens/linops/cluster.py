"""Where many independent pieces of work run: in this process, in processes of this machine, or on a Dask cluster.

`crew` turns what users pass as ``client=`` into one object with one method, `Crew.map`. What the pieces are is not
known here. Processes are in ``processes.py``; Dask is loaded only when asked for (``backends/dask.py``). May import
only the errors and linops.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from pathlens.errors import ClusterError, OptionError, need_extra

Client: TypeAlias = Any  # "local", an address, a distributed.Client, or False
TIMEOUT = 300.0  # seconds; Dask, too, gives up a worker that has been silent for five minutes


class Crew(ABC):
    """Workers that compute pieces. Final classes: `Here`, ``Processes``, and ``DaskCrew`` of ``backends/dask.py``.

    Attributes
    ----------
    workers : int
        How many pieces run at once.
    place : str
        Where, for people.
    """

    workers: int
    place: str

    @abstractmethod
    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield (item, function(shared, *item)) as pieces finish, in any order.

        ``shared`` goes to every worker once, not with every piece. A piece whose worker dies is computed elsewhere,
        a few times; then a `ClusterError` is raised. When one fails, those under way are finished and yielded before
        its error is raised.
        """


class Here(Crew):
    """This process, one piece after the other.

    >>> list(Here().map(lambda shared, k: shared * k, 10, [(1,), (2,)]))
    [((1,), 10), ((2,), 20)]
    """

    workers, place = 1, "this process"

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        for item in items:
            yield item, function(shared, *item)


def default_workers() -> int:
    """Processors that this process may use.

    >>> default_workers() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keeps_dying(place: str, item: tuple[Any, ...], cause: str) -> ClusterError:
    """The error for a piece whose workers die again and again."""
    return ClusterError(
        f"{place}: workers died repeatedly while they computed piece {item} ({cause}). If memory ran "
        f"out, lower max_bytes or the number of workers. Call again to resume: finished pieces are "
        f"kept."
    )


def cannot_be_sent(error: Exception) -> ClusterError:
    """The error for work that cannot be pickled."""
    return ClusterError(
        f"what the workers need cannot be sent to them ({type(error).__name__}: {error}). Use client=False."
    )


@contextmanager
def crew(client: Client = "local", workers: int | None = None, timeout: float = TIMEOUT) -> Iterator[Crew]:
    """The workers that ``client=`` stands for, for as long as the block lasts.

    Parameters
    ----------
    client
        ``"local"``: processes on this machine, started here and stopped at the end, connected by pipes. An address such
        as ``"tcp://host:8786"``: the Dask scheduler that listens there. A ``distributed.Client``: used as it is, left
        open. False: no other process, this one.
    workers
        Processes of ``"local"``; default: one per processor.
    timeout
        Seconds without a sign of life after which a process is replaced, and seconds that a Dask cluster without
        workers is given to get some. A piece itself may take any time.

    Examples
    --------
    >>> with crew(False) as c:
    ...     [result for _, result in c.map(pow, 2, [(3,), (4,)])]
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
        yield Here()
        return
    if client is None or client is True:
        raise OptionError(
            f"client must be 'local', an address such as 'tcp://host:8786', a distributed.Client, or "
            f"False for this process; got {client!r}."
        )
    if isinstance(client, str) and client == "local":
        try:
            from pathlens.linops.processes import processes
        except ImportError as error:
            raise need_extra("scale", "cloudpickle", "work in other processes (client=False needs none)") from error
        with processes(workers or default_workers(), timeout) as local:
            yield local
        return
    try:
        from pathlens.linops.backends import dask
    except ImportError as error:
        raise need_extra("scale", "dask.distributed", "a Dask cluster (client='local' and False need none)") from error
    with dask.dask_crew(client, timeout) as found:
        yield found
