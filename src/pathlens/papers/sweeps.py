"""Sweeps: one function, or one experiment, over settings and seeds, in parallel, saved one by one and resumable.

Where the runs happen is decided by ``client=``, as for kernels on disk (`pathlens.linops.cluster`). What a run measures
is the function's own business. May import everything that experiments may.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.errors import FileFormatError, OptionError, StoreError, unknown_name
from pathlens.linops.cluster import TIMEOUT, crew
from pathlens.papers.artifact import Artifact
from pathlens.papers.registry import Run, find, perform
from pathlens.progress import ProgressBar
from pathlens.records import read_header, write_header

__all__ = ["Sweep", "SweepRun", "sweep"]

Function = Callable[[dict[str, Any], int], Mapping[str, Any]]


@dataclass(frozen=True)
class SweepRun:
    """One run: its setting and seed, what came out, how long it took, and the file that says so."""

    setting: dict[str, Any]
    seed: int
    result: dict[str, Any]
    seconds: float
    file: Path


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep, settings outside, seeds inside.

    Attributes
    ----------
    settings, seeds
        As given.
    runs
        One per setting and seed.
    computed
        How many were run now; the others were found finished.
    """

    settings: tuple[dict[str, Any], ...]
    seeds: tuple[int, ...]
    runs: tuple[SweepRun, ...]
    computed: int

    def values(self, key: str) -> np.ndarray:
        """One result of every run, (settings, seeds); NaN where a run did not report it, an error where none did."""
        keys = {key for run in self.runs for key in run.result}
        if key not in keys:
            raise unknown_name("result", key, keys)
        found = [run.result.get(key) for run in self.runs]
        numbers = [float("nan") if value is None else float(value) for value in found]
        return np.array(numbers).reshape(len(self.settings), len(self.seeds))

    def __repr__(self) -> str:
        keys = sorted({key for run in self.runs for key in run.result})
        return (
            f"Sweep({len(self.settings)} settings × {len(self.seeds)} seeds, {self.computed} of "
            f"{len(self.runs)} run now; results: {', '.join(keys)})"
        )


def sweep(
    what: Function | str,
    settings: Iterable[Mapping[str, Any]],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    *,
    out: str | os.PathLike[str],
    client: Any = "local",
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Sweep:
    """Run something for every setting and seed; results are saved as they come, and a second call does the rest.

    Parameters
    ----------
    what
        ``what(setting, seed)`` returning a mapping of plain numbers, strings and lists; or the name of an experiment,
        whose settings are arguments of `Run` (``scale``, ``device``), and whose artifacts are saved too.
    settings
        Mappings of plain values.
    seeds
        Distinct integers.
    out
        Folder: one JSON file per run, named by a checksum of name, setting and seed.
    client, workers, timeout
        Where to run, as in `KernelOperator.to_zarr`: ``"local"``, an address, a ``distributed.Client``, or False; and
        how long silent workers are waited for. A run itself may take any time.

    Returns
    -------
    Sweep

    Notes
    -----
    A function is known by its name alone: after a change of its body, sweep into another folder. An error in one run
    is raised after those under way are saved.

    Examples
    --------
    >>> import tempfile
    >>> def power(setting, seed):
    ...     return {"power": seed ** setting["p"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = sweep(power, [{"p": 1}, {"p": 2}], seeds=(2, 3), out=folder, client=False)
    ...     again = sweep(power, [{"p": 1}, {"p": 2}, {"p": 3}], seeds=(2, 3), out=folder, client=False)
    >>> again.values("power"), again.computed
    (array([[ 2.,  3.],
           [ 4.,  9.],
           [ 8., 27.]]), 2)
    """
    name, function = _resolve(what)
    settings = list(settings)
    if not all(isinstance(setting, Mapping) for setting in settings):
        raise OptionError("sweep: settings are a list of mappings, one for each setting: [{'width': 4}, {'width': 8}].")
    chosen = tuple(_plain(dict(setting), f"sweep: setting {k}") for k, setting in enumerate(settings))
    numbers = tuple(int(seed) for seed in seeds)
    if not chosen or not numbers or len(set(numbers)) < len(numbers):
        raise OptionError(
            f"sweep: needs at least one setting and distinct seeds, got {len(chosen)} settings and seeds "
            f"{list(numbers)}."
        )
    folder = Path(out)
    files = {
        (k, seed): folder / f"{_key(name, setting, seed)}.json" for k, setting in enumerate(chosen) for seed in numbers
    }
    if len(set(files.values())) < len(files):
        raise OptionError("sweep: two settings are equal. Give each once.")
    runs = {pair: _load(file, name, chosen[pair[0]], pair[1]) for pair, file in files.items() if file.exists()}
    missing = [pair for pair in files if pair not in runs]
    if missing:
        task = functools.partial(_run, function)
        with crew(client, workers, timeout) as team, ProgressBar(f"sweep of {name}", len(missing)) as meter:
            for (k, seed), (result, seconds) in team.map(task, chosen, missing):
                runs[k, seed] = _save(files[k, seed], name, chosen[k], seed, result, seconds)
                meter.advance()
    return Sweep(chosen, numbers, tuple(runs[pair] for pair in files), len(missing))


def _resolve(what: Function | str) -> tuple[str, Function]:
    if isinstance(what, str):
        find(what)  # an unknown name is told here, not by a worker
        return what, functools.partial(_experiment, what)
    name = getattr(what, "__qualname__", None)
    if not callable(what) or name is None:
        raise OptionError(f"sweep: expected a function or the name of an experiment, got {type(what).__name__}.")
    return f"{getattr(what, '__module__', '')}.{name}", what


def _experiment(name: str, setting: dict[str, Any], seed: int) -> Any:
    allowed = {"scale", "device"}
    if set(setting) - allowed:
        raise OptionError(
            f"sweep: an experiment takes {' and '.join(sorted(allowed))}, the setting has "
            f"{', '.join(sorted(set(setting) - allowed))}. Sweep over a function of your own."
        )
    return perform(find(name), Run(seeds=(seed,), **setting))


def _run(function: Function, settings: tuple[dict[str, Any], ...], k: int, seed: int) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(dict(settings[k]), seed)
    return result, time.perf_counter() - start


def _key(name: str, setting: dict[str, Any], seed: int) -> str:
    text = json.dumps([name, setting, seed], sort_keys=True)
    return f"{name.rpartition('.')[2].strip('<>')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _plain(value: Any, where: str) -> dict[str, Any]:
    """The value as JSON keeps it, or the error that says what it cannot keep."""

    def convert(item: Any) -> Any:
        if isinstance(item, (np.generic, np.ndarray)) or type(item).__module__.startswith("torch"):
            return item.tolist()
        raise TypeError(f"a {type(item).__name__}")

    try:
        return json.loads(json.dumps(value, default=convert))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where} must be made of plain numbers, strings, lists and dicts ({error}).") from error


def _save(file: Path, name: str, setting: dict[str, Any], seed: int, result: Any, seconds: float) -> SweepRun:
    try:
        if isinstance(result, Artifact):
            saved = result.save(file.with_suffix(""))
            result = {"verdict": result.verdict, "artifact": f"{file.stem}/{saved.name}", **result.metrics}
        if not isinstance(result, Mapping):
            raise OptionError(f"sweep: {name} returned a {type(result).__name__}, expected a mapping of results.")
        plain = _plain(dict(result), f"sweep: what {name} returned")
        write_header(
            file, "sweep-run", {"name": name, "setting": setting, "seed": seed, "result": plain, "seconds": seconds}
        )
    except OSError as error:
        raise StoreError(
            f"{file} cannot be written: {error.strerror or error}. Runs saved before stay; free some "
            f"space or choose another folder, and call again."
        ) from error
    return SweepRun(setting, seed, plain, seconds, file)


def _load(file: Path, name: str, setting: dict[str, Any], seed: int) -> SweepRun:
    meta = read_header(file, "sweep-run")
    if (meta.get("name"), meta.get("setting"), meta.get("seed")) != (name, setting, seed):
        raise FileFormatError(
            f"{file}: belongs to another run of {meta.get('name')!r}. Remove it, or sweep into another folder."
        )
    return SweepRun(setting, seed, meta["result"], float(meta["seconds"]), file)
