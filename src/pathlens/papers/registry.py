"""What an experiment is, how it is registered, found and run.

The experiments themselves live in modules that are imported only when one of their names is asked for. Running several
of them, in turn or at once, lives in runner; pages and the command line live elsewhere. May import artifacts and
errors; torch is not imported here.
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
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pathlens import papers
from pathlens.errors import OptionError, unknown_name
from pathlens.papers.artifact import Artifact, environment
from pathlens.papers.claim import Claim
from pathlens.papers.sizes import SIZES
from pathlens.papers.timesheet import Timesheet

__all__ = ["Experiment", "Progress", "Run", "experiment", "find", "load_file", "names", "perform", "register", "select"]

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
        Folder of this run, for checkpoints; artifacts are saved by the caller. What was begun there with the same
        scale, seeds and changes goes on where it stopped.
    progress : callable
        ``progress(what, done, total)``.
    changes : mapping
        Sizes to use in place of those in :mod:`pathlens.papers.sizes`: ``{"epochs": 30}``. At paper scale the
        artifact is then marked REDUCED. Where an experiment has a size for each of its networks, one value is for all,
        and a mapping for those that it names.
    again : bool
        Trainings start over where checkpoints of an earlier run are there.

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
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _times: Timesheet = field(init=False, repr=False)
    _asked: set[Path] = field(default_factory=set, repr=False)
    _parts: dict[tuple[int, ...], Run] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.scale not in ("quick", "paper"):
            raise OptionError(f"Run: scale must be 'quick' or 'paper', got {self.scale!r}.")
        self.seeds = tuple(int(seed) for seed in self.seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise OptionError(f"Run: seeds must be distinct and at least one, got {list(self.seeds)}.")
        self._times = Timesheet(self._folder("times"), again=self.again)
        watched = self.progress

        def progress(what: str, done: float, total: float) -> None:
            self._times.tick()
            watched(what, done, total)

        self.progress = progress

    def sizes(self, name: str) -> dict[str, Any]:
        """The sizes of an experiment at this run's scale, with this run's changes and its number of seeds."""
        sizes = SIZES[name][self.scale]
        changed = {key: _changed(sizes[key], value) for key, value in self.changes.items() if key in sizes}
        return {**sizes, **changed, **({"seeds": len(self.seeds)} if "seeds" in sizes else {})}

    def of(self, seeds: Iterable[int]) -> Run:
        """This run with some of its seeds alone, the same object every time; its time counts for this run."""
        chosen = tuple(seeds)
        if chosen == self.seeds:
            return self
        if chosen not in self._parts:
            part = self._parts[chosen] = copy.copy(self)
            part.seeds, part._results, part._parts = chosen, {}, {}
        return self._parts[chosen]

    def checkpoint(self, *words: str) -> Path | None:
        """Folder for the checkpoints of one training, or None if the run has no folder.

        Runs with other seeds or changes have other folders, since `train` refuses the checkpoint of another training.
        """
        folder = self._folder(*words)
        return None if folder is None else self.begun(folder)

    def begun(self, folder: Path) -> Path:
        """The same folder, emptied if this run starts over and has not asked for it before; files whose names begin
        with the folder's go too."""
        if self.again and folder not in self._asked:
            self._asked.add(folder)
            for path in folder.parent.glob(f"{glob.escape(folder.name)}*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return folder

    def _folder(self, *words: str) -> Path | None:
        if self.out is None:
            return None
        settings = json.dumps([self.seeds, dict(self.changes)], sort_keys=True, default=str)
        return self.out / "checkpoints" / "-".join([self.scale, *words, _digest(settings)])

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """``compute()`` the first time a key is asked for, the same object ever after.

        Experiments that look at one training from several sides share it this way. The key must name everything
        that the result depends on beyond this run's scale, seeds and device.
        """
        name = repr(key)
        if key not in self._results:
            with self._alone(name), self._times.shared(name):
                self._results[key] = compute()
        self._times.use(name)
        return self._results[key]

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Wait while another process computes the same: then its checkpoints are there to be read."""
        if self.out is None or os.name != "posix":
            yield
            return
        import fcntl

        folder = self.out / "checkpoints" / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _digest(self.scale + name), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given up when the process ends, however it ends
            yield


def _changed(size: Any, value: Any) -> Any:
    """What stands in place of a size: where there is one for each network, those that are given, or one for all."""
    if not isinstance(size, dict):
        return value
    return {**size, **value} if isinstance(value, Mapping) else dict.fromkeys(size, value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Experiment:
    """One table, figure or claim: what it is, what it needs, what would refute it, and the function that runs it.

    Parameters
    ----------
    name : str
        What ``pathlens run`` takes; the word before the first dot is a key of :data:`pathlens.papers.MODULES`.
    paper, title, what : str
        Source, heading, and one line for ``pathlens list``.
    claims : sequence of Claim
        At least one, each with a threshold and a null. The run measures them with :meth:`Claim.measure`.
    function : callable
        Takes a :class:`Run`, returns an :class:`Artifact` that measures every claim.
    data : sequence of str
        Data sets that must be on the machine at paper scale, for some at quick scale too; empty for synthetic data.
    minutes : mapping
        Expected minutes for ``"quick"`` and ``"paper"``.
    flops : float or callable, optional
        Floating-point operations at paper scale, to one digit: a number, or a function of the sizes (with the number of
        seeds under ``"seeds"``) that also tells what changed sizes cost.
    shares : str
        A word that experiments have in common if they share trainings through :meth:`Run.once`: they then run in one
        process. Those of one module do so anyway.
    file, source : str
        The file of yours that registered it, and the SHA-256 of what it held, filled by `load_file`; empty for
        experiments of the package.
    """

    name: str
    paper: str
    title: str
    what: str
    claims: tuple[Claim, ...]
    function: Callable[[Run], Artifact]
    data: tuple[str, ...] = ()
    minutes: Mapping[str, float] = field(default_factory=lambda: {"quick": 1.0, "paper": 1.0})
    flops: float | Callable[[dict[str, Any]], float] | None = None
    shares: str = ""
    file: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claims", tuple(self.claims))
        object.__setattr__(self, "data", tuple(self.data))
        if not self.claims:
            raise OptionError(
                f"Experiment {self.name!r} states no claim. Give at least one Claim with a threshold and a null."
            )
        if set(self.minutes) != {"quick", "paper"}:
            raise OptionError(
                f"Experiment {self.name!r}: minutes needs 'quick' and 'paper', got {sorted(self.minutes)}."
            )

    def seeds(self, scale: str) -> int:
        """How many seeds a run takes unless told otherwise."""
        rows = SIZES.get(self.name, {})
        return int(rows.get(scale, {}).get("seeds", rows.get("paper", {}).get("seeds", 5)))

    def estimate(self, run: Run) -> tuple[float | None, float]:
        """Floating-point operations (None where nobody counted) and minutes of a run.

        Where sizes are changed, time is taken to go with the operations.
        """
        minutes = self.minutes[run.scale]
        if run.scale == "quick":
            return None, minutes
        if not callable(self.flops):
            return self.flops, minutes
        full, ours = (float(self.flops(sizes)) for sizes in (SIZES[self.name]["paper"], run.sizes(self.name)))
        return ours, minutes * ours / full


_REGISTERED: dict[str, Experiment] = {}


def register(entry: Experiment) -> Experiment:
    """Put an experiment on the list; a second one of the same name is refused."""
    if entry.name in _REGISTERED:
        raise OptionError(f"Experiment {entry.name!r} is registered twice. Give one of them another name.")
    _REGISTERED[entry.name] = entry
    return entry


def experiment(
    name: str,
    *,
    paper: str,
    title: str,
    what: str,
    claims: Iterable[Claim],
    data: Iterable[str] = (),
    quick_minutes: float = 1.0,
    paper_minutes: float = 1.0,
    flops: float | Callable[[dict[str, Any]], float] | None = None,
    shares: str = "",
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Callable[[Run], Artifact]], Callable[[Run], Artifact]]:
    """Decorator that registers a function as an experiment and returns it unchanged.

    The arguments are the attributes of `Experiment`. In a file of yours `sizes` takes the place of the package's table:
    ``{"quick": {"epochs": 5}, "paper": {"epochs": 100}}`` is what `Run.sizes` gives and ``--set`` changes, and a run at
    paper scale with less is REDUCED. ``pathlens run FILE.py`` runs what such a file registers.

    Examples
    --------
    >>> claim = Claim("two is more than one", threshold=1.5, comparison=">", null=1.0, needs=1)
    >>> @experiment("doc.two", paper="none", title="Two", what="an example", claims=[claim])
    ... def two(run):
    ...     return Artifact("doc.two", "Two", "none", run.scale, seeds=run.seeds, claims=[claim.measure([2.0])])
    >>> perform(_REGISTERED.pop("doc.two"), Run("quick", seeds=(0,))).verdict
    'reproduced'
    """

    if sizes is not None and set(sizes) != {"quick", "paper"}:
        raise OptionError(f"Experiment {name!r}: sizes needs 'quick' and 'paper', got {sorted(sizes)}.")

    def add(function: Callable[[Run], Artifact]) -> Callable[[Run], Artifact]:
        register(
            Experiment(
                name,
                paper,
                title,
                what,
                tuple(claims),
                function,
                tuple(data),
                {"quick": quick_minutes, "paper": paper_minutes},
                flops,
                shares,
            )
        )
        if sizes is not None:
            SIZES[name] = {scale: dict(sizes[scale]) for scale in ("quick", "paper")}
        return function

    return add


def _load(prefixes: Iterable[str]) -> None:
    for prefix in prefixes:
        for module in papers.MODULES[prefix]:
            importlib.import_module(f"pathlens.papers.{module}")


def names() -> list[str]:
    """Every experiment there is, paper by paper, numbers in numeric order; imports all of them."""
    _load(papers.MODULES)
    places = {
        prefix: i
        for i, prefix in enumerate(dict.fromkeys(name.partition(".")[0] for name in (*papers.MODULES, *_REGISTERED)))
    }

    def place(name: str) -> tuple[Any, ...]:
        prefix, _, rest = name.partition(".")
        return places[prefix], [
            (part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", rest) if part
        ]

    return sorted(_REGISTERED, key=place)


def load_file(path: str | Path) -> list[Experiment]:
    """The experiments that a Python file registers; it is run once, and may import what lies beside it.

    Raises
    ------
    OptionError
        If it is not there, fails, or registers nothing.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise OptionError(f"{path}: no such file. Give a Python file that registers experiments, or a name.")
    there = [entry for entry in _REGISTERED.values() if entry.file == str(file)]
    if there:
        return there
    before, name = set(_REGISTERED), f"_pathlens_{file.stem}_{_digest(str(file))}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # there is a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        text = file.read_bytes()
        # not exec_module: it would take cached bytecode for the file wherever date and length are the same
        exec(loader.source_to_code(text, str(file)), module.__dict__)
    except Exception as error:
        for added in set(_REGISTERED) - before:
            del _REGISTERED[added]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        at = f", line {lines[-1]}" if lines else ""
        raise OptionError(f"{path}{at}: {type(error).__name__}: {error}. Correct the file; nothing was run.") from error
    new = [name for name in _REGISTERED if name not in before]
    if not new:
        raise OptionError(
            f"{path} registers no experiment. Decorate a function with pathlens.papers.registry.experiment."
        )
    source = hashlib.sha256(text).hexdigest()
    for name in new:
        _REGISTERED[name] = dataclasses.replace(_REGISTERED[name], file=str(file), source=source)
    return [_REGISTERED[name] for name in new]


def find(name: str) -> Experiment:
    """The experiment of that name; imports only the modules that may hold it.

    Raises
    ------
    UnknownNameError
        With the closest name that exists.
    """
    prefix = name.partition(".")[0]
    if name not in _REGISTERED and prefix in papers.MODULES:
        _load([prefix])
    if name not in _REGISTERED:
        raise unknown_name("experiment", name, names())
    return _REGISTERED[name]


def select(patterns: Iterable[str]) -> list[Experiment]:
    """The experiments that names, patterns such as ``hs.*``, Python files, or ``all`` stand for, each once."""
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


def _gpu(device: str) -> dict[str, str]:
    """The name of the graphics card, for the record."""
    if not device.startswith("cuda"):
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(device)}


def perform(entry: Experiment, run: Run) -> Artifact:
    """Run one experiment, check that it measured every claim it registered, and add sizes, time and environment.

    The paper's sizes are those of :mod:`pathlens.papers.sizes`, whatever the experiment says, and its own sizes
    are added where its configuration leaves them out: nothing that is smaller escapes the mark REDUCED. The duration
    counts work that another experiment did and this one reused, and earlier attempts in the same folder, so that it
    depends neither on the order nor on interruptions.
    """
    run._times.begin(entry.name)
    artifact = entry.function(run)
    seconds = run._times.end()
    where = f"Experiment {entry.name!r}"
    if artifact.name != entry.name or artifact.scale != run.scale:
        raise OptionError(
            f"{where} returned the artifact {artifact.name!r} at scale {artifact.scale!r}, expected its "
            f"own name at scale {run.scale!r}."
        )
    stated = {(claim.text, claim.threshold, claim.comparison, claim.null) for claim in artifact.claims}
    for claim in entry.claims:
        if (claim.text, claim.threshold, claim.comparison, claim.null) not in stated:
            raise OptionError(
                f"{where} did not measure its claim {claim.text!r} as registered. Return "
                "`claim.measure(values)` for each of its claims; leave values out as NaN if missing."
            )
    config, paper = dict(artifact.config), artifact.paper_config
    if entry.name in SIZES:
        config = {**run.sizes(entry.name), **config}
        paper = SIZES[entry.name]["paper"]
    config.pop("seeds", None)  # the artifact's own seeds say how many
    done = dataclasses.replace(
        artifact,
        config=config,
        paper_config=paper,
        duration_seconds=seconds,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(**{"device": run.device, **_gpu(run.device), **artifact.environment}),
        source=entry.source,
    )
    for key, value in artifact.paper_config.items():
        if done.paper_config.get(key) != value:
            raise OptionError(
                f"{where} says that the paper has {key} = {value!r}, the table of sizes has "
                f"{done.paper_config.get(key)!r}. Correct experiments/sizes.py, or leave it out here."
            )
    return done
