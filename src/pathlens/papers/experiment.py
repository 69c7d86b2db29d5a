"""The definition of an experiment, and functions that declare, find and run experiments.

The module runner runs several experiments, one after another or in parallel. Torch is not imported here.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import glob
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pathlens import papers
from pathlens.errors import OptionError, unknown_name
from pathlens.papers.artifact import SCALES, Artifact, check_name, environment, natural_order
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.panels import Panel

if TYPE_CHECKING:
    from pathlens.training import Checkpoints


T = TypeVar("T")

Progress = Callable[[str, float, float], None]
"""``progress(what, done, total)``: called while something runs; the command line turns it into a bar."""

_NOT_EXPERIMENTS = ("checks", "pages")  # the other packages of pathlens.papers


def _silent(what: str, done: float, total: float) -> None:
    """Progress without a display."""


# --- one experiment --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """One table, figure or claim of a paper: its sizes, its claims and the function that runs it.

    Experiments are declared with the decorator :func:`experiment`, which describes the parameters.
    """

    name: str
    title: str
    what: str
    claims: tuple[Claim, ...]
    function: Callable[[Run], Artifact]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, int] | None = None
    minutes: tuple[float, float] = (1.0, 1.0)
    flops: float | Callable[[dict[str, Any]], float] | None = None
    deviations: tuple[Deviation, ...] = ()
    data: tuple[str, ...] = ()
    paper: str = ""
    shares: str = ""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    file: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, f"Experiment {self.name!r}")
        if not self.claims:
            raise OptionError(
                f"Experiment {self.name!r} has no claim. Give at least one Claim with a threshold and a null."
            )

    def sizes_at(self, scale: str) -> dict[str, Any]:
        """Sizes at a scale, and the number of seeds under ``"seeds"`` unless the experiment has no randomness."""
        at = SCALES.index(scale)
        found = {key: size[at] if isinstance(size, tuple) else size for key, size in self.sizes.items()}
        return found if self.seeds is None else {**found, "seeds": self.seeds[at]}

    def seed_count(self, scale: str) -> int:
        """Default number of seeds of a run."""
        return 5 if self.seeds is None else self.seeds[SCALES.index(scale)]

    def estimate(self, run: Run) -> tuple[float | None, float]:
        """Floating-point operations (None if not counted) and minutes of a run.

        If sizes are changed, minutes are scaled by the operations.
        """
        minutes = self.minutes[SCALES.index(run.scale)]
        if run.scale == "quick":
            return None, minutes
        if not callable(self.flops):
            return self.flops, minutes
        full, ours = (float(self.flops(sizes)) for sizes in (self.sizes_at("paper"), run.sizes_of(self)))
        return ours, minutes * ours / full


_REGISTERED: dict[str, Experiment] = {}


def register(entry: Experiment) -> Experiment:
    """Register an experiment; raises an error if its name is already registered."""
    if entry.name in _REGISTERED:
        raise OptionError(f"Experiment {entry.name!r} is registered twice. Give one of them another name.")
    _REGISTERED[entry.name] = entry
    return entry


def experiment(
    name: str,
    *,
    title: str,
    what: str,
    claims: Iterable[Claim],
    sizes: Mapping[str, Any] | None = None,
    seeds: int | tuple[int, int] | None = 5,
    minutes: float | tuple[float, float] = 1.0,
    flops: float | Callable[[dict[str, Any]], float] | None = None,
    deviations: Iterable[Deviation] = (),
    data: Iterable[str] = (),
    paper: str = "",
    shares: str = "",
    choices: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[[Run], Artifact]], Callable[[Run], Artifact]]:
    """Decorator that registers a function as an experiment and returns it unchanged.

    The function takes a :class:`Run` and returns ``run.artifact(claims=…, arrays=…, panels=…)`` with every claim
    measured. ``pathlens run FILE.py`` runs the experiments of a file outside the package.

    Parameters
    ----------
    name : str
        The argument of ``pathlens run``, such as ``"hs.fig4"``; the word before the dot identifies the paper.
    title, what : str
        Heading, and one line for ``pathlens list``.
    claims : iterable of Claim
        At least one, each with a threshold and a null; the function measures them with :meth:`Claim.measure`.
    sizes : mapping
        Size → a pair (quick, paper), or one value for both scales: ``{"epochs": (5, 100), "width": 16}``. Lists and
        dicts are values; a tuple is always a pair. `Run.sizes` returns them and ``--set`` changes them; a run at
        paper scale with other sizes is REDUCED.
    seeds : int or pair or None
        Default number of seeds, at both scales or as (quick, paper); None for an experiment without randomness.
    minutes : float or pair
        Expected duration, at both scales or as (quick, paper).
    flops : float or callable, optional
        Floating-point operations at paper scale, to one digit: a number, or a function of the sizes.
    deviations : iterable of Deviation
        Where the experiment differs from the paper.
    data : iterable of str
        Image sets needed at paper scale (some are needed at quick scale too).
    paper : str
        Title of the paper; by default the entry of the name's first word in :data:`pathlens.papers.PAPERS`.
    shares : str
        Experiments with the same value share trainings (:meth:`Run.once`) and run in one process.
    choices : mapping
        Size → further words that its list may contain, besides those in ``sizes``.

    Examples
    --------
    >>> claim = Claim("two is more than one", above=1.5, null=1.0, needs=1)
    >>> @experiment("doc.two", title="Two", what="an example", claims=[claim], sizes={"width": (2, 16)})
    ... def two(run):
    ...     return run.artifact(claims=[claim.measure([run.sizes["width"]])])
    >>> perform(_REGISTERED.pop("doc.two"), Run("quick", seeds=(0,))).verdict
    'reproduced'
    """

    def add(function: Callable[[Run], Artifact]) -> Callable[[Run], Artifact]:
        register(
            Experiment(
                name,
                title,
                what,
                tuple(claims),
                function,
                sizes=_checked_sizes(name, sizes or {}),
                seeds=(seeds, seeds) if isinstance(seeds, int) else seeds,
                minutes=minutes if isinstance(minutes, tuple) else (minutes, minutes),
                flops=flops,
                deviations=tuple(deviations),
                data=tuple(data),
                paper=paper or papers.PAPERS.get(name.partition(".")[0], "own experiment"),
                shares=shares,
                choices=choices or {},
                source=_file_digest(function.__code__.co_filename),
            )
        )
        return function

    return add


def _file_digest(path: str) -> str:
    """Checksum of a source file; empty for a function that was typed into an interpreter."""
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _checked_sizes(name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    for key, size in sizes.items():
        if key == "seeds" or (isinstance(size, tuple) and len(size) != 2):
            raise OptionError(
                f"Experiment {name!r}: the size {key!r} must be a pair (quick, paper) or one value for both, got "
                f"{size!r}. Give the number of seeds as seeds=…."
            )
    return dict(sizes)


# --- one run ---------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path | None, every: int) -> Checkpoints | None:
    """The option `checkpoints` of `train` for a folder, or None if there is no folder."""
    from pathlens.training import Checkpoints

    return None if folder is None else Checkpoints(folder, every=every)


@dataclass
class Run:
    """One run of one or several experiments: scale, seeds, device, folder, progress and shared results.

    Parameters
    ----------
    scale : {"quick", "paper"}
    seeds : sequence of int
    device : str
        A torch device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
    out : path, optional
        Folder for checkpoints; the caller saves artifacts. A run with the same scale, seeds and changes resumes from
        the checkpoints there.
    progress : callable
        ``progress(what, done, total)``.
    changes : mapping
        Sizes that replace those of the experiment: ``{"epochs": 30}``. At paper scale the artifact is then marked
        REDUCED. If an experiment has a separate size for each of its networks, a single value changes all of them, and
        a mapping changes the networks that it names.
    again : bool
        Start over: ignore the checkpoints of an earlier run.

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
    again: bool = False
    current: Experiment | None = field(default=None, repr=False)
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _seconds: dict[Hashable, float] = field(default_factory=dict, repr=False)
    _used: set[Hashable] = field(default_factory=set, repr=False)
    _prepared: set[Path] = field(default_factory=set, repr=False)
    _parts: dict[tuple[int, ...], Run] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise OptionError(f"Run: scale must be 'quick' or 'paper', got {self.scale!r}.")
        self.seeds = tuple(int(seed) for seed in self.seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise OptionError(f"Run: seeds must be distinct and at least one, got {list(self.seeds)}.")

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the current experiment at this run's scale, with this run's changes and number of seeds."""
        return self.sizes_of(self._experiment)

    def sizes_of(self, other: Experiment | str) -> dict[str, Any]:
        """Sizes of any experiment at this run's scale, with this run's changes and number of seeds."""
        sizes = (find(other) if isinstance(other, str) else other).sizes_at(self.scale)
        changed = {key: _change(sizes[key], value) for key, value in self.changes.items() if key in sizes}
        return {**sizes, **changed, **({"seeds": len(self.seeds)} if "seeds" in sizes else {})}

    def artifact(
        self,
        *,
        claims: Iterable[Claim],
        arrays: Mapping[str, np.ndarray] | None = None,
        metrics: Mapping[str, Any] | None = None,
        panels: Iterable[Panel] = (),
        gates: Mapping[str, str] | None = None,
        paper_numbers: Mapping[str, Any] | None = None,
        deviations: Iterable[Deviation] = (),
        seeds: Sequence[int] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """The artifact of the current experiment: its name, title, paper, scale, sizes and seeds are filled in.

        Parameters
        ----------
        claims, arrays, metrics, gates, paper_numbers
            As in :class:`~pathlens.papers.artifact.Artifact`.
        panels : iterable of Panel
            What a page draws.
        deviations : iterable of Deviation
            Deviations in addition to those of the experiment.
        seeds : sequence of int, optional
            Seeds, if they differ from those of the run; empty for results without randomness.
        config : mapping, optional
            Settings in addition to the sizes.
        """
        entry = self._experiment
        return Artifact(
            entry.name,
            entry.title,
            entry.paper,
            self.scale,
            config=dict(config or {}),
            seeds=self.seeds if seeds is None else tuple(seeds),
            claims=tuple(claims),
            metrics=dict(metrics or {}),
            paper_numbers=dict(paper_numbers or {}),
            deviations=(*entry.deviations, *deviations),
            gates=dict(gates or {}),
            arrays=dict(arrays or {}),
            figures=tuple(panels),
        )

    @property
    def _experiment(self) -> Experiment:
        if self.current is None:
            raise OptionError("Run: no experiment is running. Call perform(experiment, run), or set run.current.")
        return self.current

    def with_seeds(self, seeds: Iterable[int]) -> Run:
        """This run with other seeds; repeated calls return the same object."""
        chosen = tuple(seeds)
        if chosen == self.seeds:
            return self
        if chosen not in self._parts:
            part = self._parts[chosen] = copy.copy(self)
            part.seeds, part._results, part._parts = chosen, {}, {}
        self._parts[chosen].current = self.current
        return self._parts[chosen]

    def checkpoint(self, *words: str) -> Path | None:
        """Folder for the checkpoints of one training, or None if the run has no folder.

        Runs with other seeds or changes have other folders, because `train` does not accept the checkpoint of another
        training. The same holds for a user's experiment whose file was edited: `train` cannot detect changes of its
        functions.
        """
        own_source = self.current.source if self.current is not None and self.current.file else ""
        settings = json.dumps([self.seeds, dict(self.changes), own_source], sort_keys=True, default=str)
        return self.checkpoint_folder(*words, _digest(settings))

    def checkpoint_folder(self, *words: str) -> Path | None:
        """Folder whose name depends only on these words, or None if the run has no folder.

        If this run starts over, the folder, and files whose names begin with its name, are removed the first time.
        """
        if self.out is None:
            return None
        folder = self.out / "checkpoints" / "-".join([self.scale, *words])
        if self.again and folder not in self._prepared:
            self._prepared.add(folder)
            for path in folder.parent.glob(f"{glob.escape(folder.name)}*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return folder

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return ``compute()`` the first time a key is requested, and the same object every later time.

        Experiments that analyse one training in several ways share it through this method. The key must contain
        everything that the result depends on, except this run's scale, seeds and device.
        """
        if key not in self._results:
            start, used = time.perf_counter(), set(self._used)
            with self._exclusive(repr(key)):
                self._results[key] = compute()
            self._seconds[key] = time.perf_counter() - start
            self._used = used  # the time includes the results that this one needs
        self._used.add(key)
        return self._results[key]

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Wait while another process computes the same result; its checkpoints can be read afterwards."""
        if self.out is None or os.name != "posix":
            yield
            return
        import fcntl

        folder = self.out / "checkpoints" / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _digest(self.scale + name), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
            yield


def _change(size: Any, value: Any) -> Any:
    """The new value of a size; if networks have separate sizes, a mapping changes some and a value changes all."""
    if not isinstance(size, dict):
        return value
    return {**size, **value} if isinstance(value, Mapping) else dict.fromkeys(size, value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def perform(entry: Experiment, run: Run) -> Artifact:
    """Run one experiment, check that it measured every claim as declared, and add sizes, duration and environment.

    The duration includes shared results that an earlier experiment of the same run computed.
    """
    start, computed = time.perf_counter(), set(run._results)
    run.current, run._used = entry, set()
    artifact = entry.function(run)
    seconds = time.perf_counter() - start + sum(run._seconds.get(key, 0.0) for key in run._used & computed)
    where = f"Experiment {entry.name!r}"
    if artifact.name != entry.name or artifact.scale != run.scale:
        raise OptionError(
            f"{where} returned the artifact {artifact.name!r} at scale {artifact.scale!r}, expected its own name at "
            f"scale {run.scale!r}. Return run.artifact(…)."
        )
    measured = {claim.statement for claim in artifact.claims}
    for claim in entry.claims:
        if claim.statement not in measured:
            raise OptionError(
                f"{where} did not measure its claim {claim.text!r} as registered. Return `claim.measure(values)` for "
                "each of its claims; a missing value is NaN."
            )
    sizes = {key: value for key, value in run.sizes.items() if key != "seeds"}
    gpu = {}
    if run.device.startswith("cuda"):
        import torch

        gpu["gpu"] = torch.cuda.get_device_name(run.device)
    return dataclasses.replace(
        artifact,
        config={**sizes, **artifact.config},
        paper_config=entry.sizes_at("paper"),
        duration_seconds=seconds,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(device=run.device, **gpu),
        source=entry.source,
    )


# --- finding experiments ---------------------------------------------------------------------------------------


def _discover() -> None:
    """Import every module of the papers' folders; each file that declares an experiment registers it.

    Modules whose names start with an underscore are left out: they may load torch.
    """
    for folder in pkgutil.iter_modules(papers.__path__, "pathlens.papers."):
        if folder.ispkg and folder.name.rpartition(".")[2] not in _NOT_EXPERIMENTS:
            package = importlib.import_module(folder.name)
            for module in pkgutil.iter_modules(package.__path__):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{folder.name}.{module.name}")


def names() -> list[str]:
    """Names of all experiments, paper by paper, numbers in numeric order."""
    _discover()
    order = {prefix: i for i, prefix in enumerate(papers.PAPERS)}

    return sorted(_REGISTERED, key=lambda name: (order.get(name.partition(".")[0], len(order)), natural_order(name)))


def find(name: str) -> Experiment:
    """The experiment with this name.

    Raises
    ------
    UnknownNameError
        With the closest name that exists.
    """
    if name not in _REGISTERED:
        _discover()
    if name not in _REGISTERED:
        raise unknown_name("experiment", name, names())
    return _REGISTERED[name]


def select(patterns: Iterable[str]) -> list[Experiment]:
    """The experiments given by names, patterns such as ``hs.*``, Python files, or ``all``, without duplicates."""
    chosen: dict[str, Experiment] = {}
    for pattern in patterns:
        if pattern.endswith(".py"):
            chosen |= {entry.name: entry for entry in load_file(pattern)}
            continue
        pattern = "*" if pattern == "all" else pattern
        matches = fnmatch.filter(names(), pattern) if set("*?[") & set(pattern) else [pattern]
        if not matches:
            raise unknown_name("experiment", pattern, names())
        for name in matches:
            chosen[name] = find(name)
    return list(chosen.values())


def load_file(path: str | Path) -> list[Experiment]:
    """The experiments that a Python file declares; the file is executed once and may import modules beside it.

    Raises
    ------
    OptionError
        If the file does not exist, fails, or declares no experiment.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise OptionError(f"{path}: no such file. Give a Python file that declares experiments, or a name.")
    loaded = [entry for entry in _REGISTERED.values() if entry.file == str(file)]
    if loaded:
        return loaded
    before, name = set(_REGISTERED), f"_pathlens_{file.stem}_{_digest(str(file))}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # the loader exists
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        text = file.read_bytes()
        # exec_module would use cached bytecode if only the date and the length of the file are unchanged
        exec(loader.source_to_code(text, str(file)), module.__dict__)
    except Exception as error:
        for added in set(_REGISTERED) - before:
            del _REGISTERED[added]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        at = f", line {lines[-1]}" if lines else ""
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise OptionError(f"{path}{at}: {reason}. Correct the file; nothing was run.") from error
    new = [name for name in _REGISTERED if name not in before]
    if not new:
        raise OptionError(
            f"{path} declares no experiment. Decorate a function with pathlens.papers.experiment.experiment."
        )
    for name in new:
        _REGISTERED[name] = dataclasses.replace(_REGISTERED[name], file=str(file))
    return [_REGISTERED[name] for name in new]
