"""Where many independent pieces of work run: in this process, on a local Dask cluster, or on one that is there already.

`crew` turns what users pass as ``client=`` into one object with one method, `Crew.map`. What the pieces are is not
known here. Dask itself is loaded only when asked for (``backends/dask.py``). May import only the errors and linops.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from pathlens.errors import OptionError, need_extra

Client: TypeAlias = Any  # "local", an address, a distributed.Client, or False


class Crew(ABC):
    """Workers that compute pieces. Final classes: `Here`, and ``DaskCrew`` of ``backends/dask.py``.

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

        ``shared`` goes to every worker once, not with every piece. A piece whose worker dies is computed elsewhere.
        When one fails, those under way are finished and yielded before its error is raised.
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


@contextmanager
def crew(client: Client = "local", workers: int | None = None) -> Iterator[Crew]:
    """The workers that ``client=`` stands for, for as long as the block lasts.

    Parameters
    ----------
    client
        ``"local"``: a cluster of processes on this machine, started here and stopped at the end. An address such as
        ``"tcp://host:8786"``: the Dask scheduler that listens there. A ``distributed.Client``: used as it is, left
        open. False: no cluster, this process.
    workers
        Processes of a local cluster; default: one per processor.

    Examples
    --------
    >>> with crew(False) as c:
    ...     [result for _, result in c.map(pow, 2, [(3,), (4,)])]
    [8, 16]
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise OptionError(f"workers must be a number of processes, at least 1, got {workers!r}.")
    if workers is not None and client != "local":
        raise OptionError(f"workers={workers} was given with client={client!r}; it sizes a local cluster alone. "
                          f"Leave it out, or use client='local'.")
    if client is False:
        yield Here()
        return
    if client is None or client is True:
        raise OptionError(f"client must be 'local', an address such as 'tcp://host:8786', a distributed.Client, or "
                          f"False for this process; got {client!r}.")
    try:
        from pathlens.linops.backends import dask
    except ImportError as error:
        raise need_extra("scale", "dask.distributed", "computing on a cluster (client=False needs none)") from error
    with dask.dask_crew(client, workers or default_workers()) as found:
        yield found
