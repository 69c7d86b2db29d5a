"""Run several experiments, one after another or in parallel: skips finished ones and continues after failures.

Each artifact is saved as soon as its experiment ends. This module prints and draws nothing and does not import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from pathlens import __version__
from pathlens.errors import ArtifactError, OptionError, PathlensError, unknown_name
from pathlens.papers.artifact import Artifact, load
from pathlens.papers.experiment import Experiment, Progress, Run, find, load_file, perform


@dataclass(frozen=True)
class Outcome:
    """The result of one experiment: an artifact, possibly ``kept`` from an earlier run, or an error."""

    name: str
    artifact: Artifact | None = None
    kept: bool = False
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """Settings that all experiments of a run share.

    Parameters
    ----------
    scale : {"quick", "paper"}
    out : path
        Folder for ``artifacts/``, ``checkpoints/`` and, if an experiment fails, ``errors/``.
    seeds : int, optional
        Number of seeds; by default as each experiment declares.
    device : str
    changes : mapping
        Sizes that replace those of the experiments; each must be a size of at least one experiment.
    again : bool
        Start over: ignore existing artifacts and checkpoints.
    """

    scale: str
    out: Path
    seeds: int | None = None
    device: str = "cpu"
    changes: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False

    def run(self, entry: Experiment, progress: Progress | None = None) -> Run:
        """A run of this experiment, which other experiments may share."""
        seeds = tuple(range(self.seeds or entry.seed_count(self.scale)))
        run = Run(self.scale, seeds, self.device, self.out, changes=self.changes, again=self.again)
        return run if progress is None else replace(run, progress=progress)

    def path(self, entry: Experiment) -> Path:
        """Path of the experiment's artifact."""
        return self.out / "artifacts" / f"{entry.name}.{self.scale}.json"

    def check(self, chosen: Sequence[Experiment]) -> None:
        """Raise an error if a changed size is unknown, or if its new value is of another kind."""
        tables = [entry.sizes_at(self.scale) for entry in chosen]
        known = {key for sizes in tables for key in sizes} - {"seeds"}
        for key, value in self.changes.items():
            if key not in known:
                raise OptionError(
                    f"No experiment of this run has a size {key!r}. Sizes: {', '.join(sorted(known)) or 'none'}."
                )
            sizes_here = [sizes[key] for sizes in tables if key in sizes]
            sizes_anywhere = [
                entry.sizes_at(scale)[key] for entry in chosen if key in entry.sizes for scale in ("quick", "paper")
            ]
            # None means all rows: it is accepted if the size is None at one of the scales
            fits = None in sizes_anywhere if value is None else any(_fits(value, size) for size in sizes_here)
            if not fits:
                raise OptionError(
                    f"The size {key!r} cannot be {value!r}: here it is {sizes_here[0]!r}. "
                    "Give a value of that kind; lists are written as in --set 'depths=[2, 4]'."
                )
            words = {word for entry in chosen for word in entry.choices.get(key, ())}
            words |= {
                word for size in sizes_anywhere if isinstance(size, list) for word in size if isinstance(word, str)
            }
            for word in value if isinstance(value, list) and not any(entry.file for entry in chosen) else ():
                if isinstance(word, str) and word not in words:
                    raise unknown_name(f"word for the size {key!r}:", word, words)


def _fits(value: Any, size: Any) -> bool:
    """Whether a value is of the same kind as a size; a size of None accepts any value."""
    if isinstance(size, Mapping):
        given = value if isinstance(value, Mapping) else dict.fromkeys(size, value)
        return all(key in size and _fits(one, size[key]) for key, one in given.items())
    if isinstance(size, (int, float)):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(size, list):
        return isinstance(value, list) and (not size or all(_fits(one, size[0]) for one in value))
    return not isinstance(size, str) or isinstance(value, str)


def finished(entry: Experiment, plan: Plan) -> Artifact | None:
    """An existing artifact of the same version, claims, sizes, seeds, device and source file content, or None."""
    path = plan.path(entry)
    if not path.exists():
        return None
    try:
        there = load(path)
    except ArtifactError:  # a run replaces it
        return None
    run = plan.run(entry)
    sizes = run.sizes_of(entry)
    config = Artifact(entry.name, "", "", plan.scale, {key: v for key, v in sizes.items() if key != "seeds"}).config
    claims = {claim.statement for claim in there.claims}
    same = (
        there.environment.get("pathlens") == __version__
        and there.environment.get("device") == plan.device
        and there.seeds in (run.seeds, ())  # an experiment without randomness has no seeds
        and all(there.config.get(key) == value for key, value in config.items())
        and all(claim.statement in claims for claim in entry.claims)
        and there.source == entry.source
    )
    return there if same else None


def run_all(
    chosen: Sequence[Experiment],
    plan: Plan,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run experiments and return the outcome of each, in the order given.

    Parameters
    ----------
    chosen : sequence of Experiment
    plan : Plan
    jobs : int
        Number of processes. Experiments that share trainings run in the same process; each process gets its share of
        the cores.
    progress : callable
        ``progress(what, done, total)``.
    ended : callable
        Called with each :class:`Outcome` as soon as it is known.

    Notes
    -----
    If interrupted, a second call skips finished experiments and resumes trainings from their checkpoints; on the CPU
    its artifacts are the same except for times.
    """
    plan.check(chosen)
    if plan.again:  # remove them now: a run that is interrupted and resumed without `again` must not find them
        for entry in chosen:
            plan.path(entry).unlink(missing_ok=True)
    outcomes: dict[str, Outcome] = {}

    def note(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        ended(outcome)

    left = []
    for entry in chosen:
        there = finished(entry, plan)
        if there is None:
            left.append(entry)
        else:
            note(Outcome(entry.name, there, kept=True))
    groups = _groups(left, plan)
    if jobs > 1 and len(groups) > 1:
        _at_once(groups, plan, jobs, progress, note)
    else:
        for group in groups:
            shared = plan.run(group[0], progress)
            for entry in group:
                note(_attempt(entry, shared, plan))
    return [outcomes[entry.name] for entry in chosen]


def _groups(chosen: Sequence[Experiment], plan: Plan) -> list[list[Experiment]]:
    """Experiments grouped by the trainings that they share; members of a group have the same number of seeds."""
    groups: dict[Any, list[Experiment]] = {}
    for entry in chosen:
        key = (entry.shares or entry.function.__module__, plan.seeds or entry.seed_count(plan.scale))
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _attempt(entry: Experiment, run: Run, plan: Plan) -> Outcome:
    """Run and save one experiment; an unexpected error is returned, and its traceback written to a file."""
    try:
        artifact = perform(entry, run)
        artifact.save(plan.out / "artifacts")
    except Exception as error:
        if os.environ.get("PATHLENS_DEBUG") == "1":
            raise
        if isinstance(error, PathlensError):
            return Outcome(entry.name, error=str(error))
        path = plan.out / "errors" / f"{entry.name}.{plan.scale}.txt"
        where = f"traceback in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(traceback.format_exc(), encoding="utf-8")
        except OSError:  # most likely the disk is full, as the error itself reports
            where = f"its traceback could not be written to {path}"
        return Outcome(entry.name, error=f"{type(error).__name__}: {error} ({where})")
    return Outcome(entry.name, artifact)


# --- several processes -----------------------------------------------------------------------------------------


@dataclass
class _Worker:
    """A process and the names of its unfinished experiments; the first of them is running."""

    process: Any
    names: list[str]


def _at_once(
    groups: list[list[Experiment]], plan: Plan, jobs: int, progress: Progress | None, note: Callable[[Outcome], None]
) -> None:
    """Run each group in a separate process, at most ``jobs`` at a time, the longest first."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    waiting = sorted(groups, key=lambda group: sum(entry.minutes[plan.scale == "paper"] for entry in group))
    queue = [[entry.name for entry in group] for group in waiting]
    files = {entry.file for group in groups for entry in group if entry.file}
    workers: dict[Connection, _Worker] = {}
    try:
        while queue or workers:
            while queue and len(workers) < jobs:
                names = queue.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(names, files, plan, theirs), daemon=True)
                with _threads(jobs):
                    process.start()
                theirs.close()
                workers[ours] = _Worker(process, list(names))
            for ready in cast("list[Connection]", wait(list(workers))):
                try:
                    kind, *rest = ready.recv()
                except EOFError:  # the process has ended
                    worker = workers.pop(ready)
                    worker.process.join()
                    if worker.names:  # the experiment that was running ended the process; the others run again
                        died = worker.names.pop(0)
                        note(Outcome(died, error=f"its process ended with code {worker.process.exitcode}"))
                        if worker.names:
                            queue.append(worker.names)
                    continue
                if kind == "progress":
                    if progress is not None:
                        progress(*rest)
                    continue
                name, path, error = rest
                workers[ready].names.remove(name)
                note(Outcome(name, None if path is None else load(path), error=error))
    finally:
        for worker in workers.values():
            worker.process.terminate()


def _work(names: list[str], files: set[str], plan: Plan, connection: Connection) -> None:
    """Body of a process: run one group and send progress and outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for file in files:
        load_file(file)
    entries = [find(name) for name in names]
    running = ""

    def progress(what: str, done: float, total: float) -> None:
        connection.send(("progress", f"{running}: {what}", done, total))

    shared = plan.run(entries[0], progress)
    for entry in entries:
        running = entry.name
        outcome = _attempt(entry, shared, plan)
        path = None if outcome.artifact is None else plan.path(entry)
        connection.send(("ended", entry.name, path, outcome.error))
    connection.close()


def _end_with_parent() -> None:
    """Exit if the parent is killed, so no process writes to files that the next run reads."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _threads(jobs: int) -> Iterator[None]:
    """Divide the cores among the processes started inside, unless the environment sets the number of threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = str(max(cores // jobs, 1))
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ]
    os.environ.update(dict.fromkeys(names, share))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
