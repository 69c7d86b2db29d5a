"""What an experiment is, how it is registered, found and run.

The experiments themselves live in one module per paper, which is imported only when one of its names is asked for.
Pages and the command line live elsewhere. May import artifacts and errors; torch is not imported here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pathlens import experiments
from pathlens.artifacts import Artifact, Claim, environment
from pathlens.errors import OptionError, unknown_name
from pathlens.experiments.sizes import SIZES

__all__ = ["Experiment", "Progress", "Run", "experiment", "find", "names", "perform", "register", "select"]

T = TypeVar("T")

Progress = Callable[[str, float, float], None]
"""``progress(what, done, total)``: called while something runs; the command line turns it into a bar."""


def _silent(what: str, done: float, total: float) -> None:
    """Progress that nobody watches."""


@dataclass
class Run:
    """What a run of one or several experiments shares: its scale, seeds, device, folder, progress and results.

    Parameters
    ----------
    scale : {"quick", "paper"}
    seeds : sequence of int
    device : str
        As torch spells it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
    out : path, optional
        Folder of this run, for checkpoints; artifacts are saved by the caller.
    progress : callable
        ``progress(what, done, total)``.
    changes : mapping
        Sizes to use in place of those in :mod:`pathlens.experiments.sizes`: ``{"epochs": 30}``. At paper scale the
        artifact is then marked REDUCED.

    Examples
    --------
    >>> run = Run("quick", seeds=(0, 1))
    >>> run.once("training", lambda: "trained"), run.once("training", lambda: "never called")
    ('trained', 'trained')
    """

    scale: str = "quick"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    device: str = "cpu"
    out: Path | None = None
    progress: Progress = _silent
    changes: Mapping[str, Any] = field(default_factory=dict)
    _results: dict[Hashable, tuple[Any, float]] = field(default_factory=dict, repr=False)
    _used: set[Hashable] = field(default_factory=set, repr=False)
    _borrowed: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        if self.scale not in ("quick", "paper"):
            raise OptionError(f"Run: scale must be 'quick' or 'paper', got {self.scale!r}.")
        self.seeds = tuple(int(seed) for seed in self.seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise OptionError(f"Run: seeds must be distinct and at least one, got {list(self.seeds)}.")

    def sizes(self, name: str) -> dict[str, Any]:
        """The sizes of an experiment at this run's scale, with this run's changes."""
        sizes = SIZES[name][self.scale]
        return {**sizes, **{key: value for key, value in self.changes.items() if key in sizes}}

    def checkpoint(self, *words: str) -> Path | None:
        """Folder for the checkpoints of one training, or None if the run has no folder."""
        return None if self.out is None else self.out / "checkpoints" / "-".join([self.scale, *words])

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """``compute()`` the first time a key is asked for, the same object ever after.

        Experiments that look at one training from several sides share it this way. The key must name everything
        that the result depends on beyond this run's scale, seeds and device.
        """
        if key not in self._results:
            start = time.perf_counter()
            value = compute()
            self._results[key] = (value, time.perf_counter() - start)
        elif key not in self._used:
            self._borrowed += self._results[key][1]
        self._used.add(key)
        return self._results[key][0]


@dataclass(frozen=True)
class Experiment:
    """One table, figure or claim: what it is, what it needs, what would refute it, and the function that runs it.

    Parameters
    ----------
    name : str
        What ``pathlens run`` takes; the word before the first dot is a key of :data:`pathlens.experiments.MODULES`.
    paper, title, what : str
        Source, heading, and one line for ``pathlens list``.
    claims : sequence of Claim
        At least one, each with a threshold and a null. The run measures them with :meth:`Claim.measure`.
    function : callable
        Takes a :class:`Run`, returns an :class:`Artifact` that measures every claim.
    data : sequence of str
        Data sets that must be on the machine; empty for synthetic data.
    minutes : mapping
        Expected minutes for ``"quick"`` and ``"paper"``.
    """

    name: str
    paper: str
    title: str
    what: str
    claims: tuple[Claim, ...]
    function: Callable[[Run], Artifact]
    data: tuple[str, ...] = ()
    minutes: Mapping[str, float] = field(default_factory=lambda: {"quick": 1.0, "paper": 1.0})

    def __post_init__(self) -> None:
        object.__setattr__(self, "claims", tuple(self.claims))
        object.__setattr__(self, "data", tuple(self.data))
        if not self.claims:
            raise OptionError(f"Experiment {self.name!r} states no claim. Give at least one Claim with a threshold "
                              "and a null.")
        if set(self.minutes) != {"quick", "paper"}:
            raise OptionError(f"Experiment {self.name!r}: minutes needs 'quick' and 'paper', got "
                              f"{sorted(self.minutes)}.")


_REGISTERED: dict[str, Experiment] = {}


def register(entry: Experiment) -> Experiment:
    """Put an experiment on the list; a second one of the same name is refused."""
    if entry.name in _REGISTERED:
        raise OptionError(f"Experiment {entry.name!r} is registered twice. Give one of them another name.")
    _REGISTERED[entry.name] = entry
    return entry


def experiment(
    name: str, *, paper: str, title: str, what: str, claims: Iterable[Claim], data: Iterable[str] = (),
    quick_minutes: float = 1.0, paper_minutes: float = 1.0,
) -> Callable[[Callable[[Run], Artifact]], Callable[[Run], Artifact]]:
    """Decorator that registers a function as an experiment and returns it unchanged.

    Examples
    --------
    >>> claim = Claim("two is more than one", threshold=1.5, comparison=">", null=1.0, needs=1)
    >>> @experiment("doc.two", paper="none", title="Two", what="an example", claims=[claim])
    ... def two(run):
    ...     return Artifact("doc.two", "Two", "none", run.scale, seeds=run.seeds, claims=[claim.measure([2.0])])
    >>> perform(_REGISTERED.pop("doc.two"), Run("quick", seeds=(0,))).verdict
    'reproduced'
    """

    def add(function: Callable[[Run], Artifact]) -> Callable[[Run], Artifact]:
        register(Experiment(name, paper, title, what, tuple(claims), function, tuple(data),
                            {"quick": quick_minutes, "paper": paper_minutes}))
        return function

    return add


def _load(prefixes: Iterable[str]) -> None:
    for prefix in prefixes:
        for module in experiments.MODULES[prefix]:
            importlib.import_module(f"pathlens.experiments.{module}")


def names() -> list[str]:
    """Every experiment there is, in the order in which the modules register them; imports all of them."""
    _load(experiments.MODULES)
    return list(_REGISTERED)


def find(name: str) -> Experiment:
    """The experiment of that name; imports only the modules that may hold it.

    Raises
    ------
    UnknownNameError
        With the closest name that exists.
    """
    prefix = name.partition(".")[0]
    if name not in _REGISTERED and prefix in experiments.MODULES:
        _load([prefix])
    if name not in _REGISTERED:
        raise unknown_name("experiment", name, names())
    return _REGISTERED[name]


def select(patterns: Iterable[str]) -> list[Experiment]:
    """The experiments that names, patterns such as ``hs.*``, or ``all`` stand for, each once, in that order."""
    chosen: dict[str, Experiment] = {}
    for pattern in patterns:
        pattern = "*" if pattern == "all" else pattern
        matches = fnmatch.filter(names(), pattern) if set("*?[") & set(pattern) else [pattern]
        if not matches:
            raise unknown_name("experiment", pattern, names())
        for name in matches:
            chosen[name] = find(name)
    return list(chosen.values())


def perform(entry: Experiment, run: Run) -> Artifact:
    """Run one experiment, check that it measured every claim it registered, and stamp time and environment.

    The duration counts work that an earlier experiment of the same run did and this one reused, so that the number
    does not depend on the order.
    """
    start, run._borrowed = time.perf_counter(), 0.0
    run._used.clear()
    artifact = entry.function(run)
    seconds = time.perf_counter() - start + run._borrowed
    where = f"Experiment {entry.name!r}"
    if artifact.name != entry.name or artifact.scale != run.scale:
        raise OptionError(f"{where} returned the artifact {artifact.name!r} at scale {artifact.scale!r}, expected its "
                          f"own name at scale {run.scale!r}.")
    stated = {(claim.text, claim.threshold, claim.comparison, claim.null) for claim in artifact.claims}
    for claim in entry.claims:
        if (claim.text, claim.threshold, claim.comparison, claim.null) not in stated:
            raise OptionError(f"{where} did not measure its claim {claim.text!r} as registered. Return "
                              "`claim.measure(values)` for each of its claims; leave values out as NaN if missing.")
    return dataclasses.replace(
        artifact,
        duration_seconds=seconds,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(**{"device": run.device, **artifact.environment}),
    )
