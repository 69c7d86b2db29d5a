"""The saved result of an experiment: its measurements and the paper's claims, as one JSON and one NPZ file.

Verdicts and the REDUCED mark are computed from the numbers. Torch is not imported, so pages can be made on a machine
that cannot train.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from pathlens.errors import ArtifactError, OptionError
from pathlens.files import locked, parse_json, read_npz, verify_checksum, with_checksum, write_atomically
from pathlens.papers.claim import Claim, Deviation, Verdict, check_texts, combine_verdicts
from pathlens.papers.panels import Panel

SCHEMA = 2
_FORMAT = "pathlens-artifact"
_MOST_BYTES = 1 << 28  # bytes of all arrays of an artifact: a small file of unknown origin must not fill the memory

_NAME = re.compile(r"[a-z][a-z0-9]*(\.[a-z0-9_]+)+")
_GATES = re.compile(r"(soft|hard)\b.*")
SCALES = ("quick", "paper")


@dataclass(frozen=True, eq=False)
class Artifact:
    """The complete result of one experiment, which can be saved, loaded and drawn.

    Parameters
    ----------
    name : str
        The experiment, as typed after ``pathlens run``: ``"hs.fig2"``.
    title, paper : str
        What the page shows as heading and source.
    scale : {"quick", "paper"}
    config : dict
        The sizes and settings of this run, plain values.
    seeds : sequence of int
    claims : sequence of Claim
    metrics : dict
        Nested dicts and lists of plain numbers. NaN becomes None, numpy scalars become Python numbers.
    paper_config : dict
        The paper's own sizes. If ``config`` (or the number of seeds, under ``"seeds"``) differs from them, the artifact
        is REDUCED.
    paper_numbers : dict
        The paper's results, to print beside ours.
    deviations : sequence of Deviation
    gates : dict
        Part of the figure → ``"hard"`` or ``"soft β=4"``: which gates the numbers come from.
    arrays : dict of ndarray
        Never of dtype object.
    figures : sequence of Panel
        The panels that a page draws from the arrays; a panel that refers to a missing array raises an error.
    duration_seconds, created, environment, source
        Filled by :func:`pathlens.papers.experiment.perform`; ``created`` is ISO 8601 in UTC, ``source`` the SHA-256 of
        the file that registered an experiment outside the package, and empty for experiments of the package.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> claim = Claim("half", below=0.4, null=0.5, measured=(0.1, 0.2, 0.1))
    >>> a = Artifact("hs.fig2", "Circle", "half-space", "quick", config={"width": 16}, seeds=(0, 1, 2),
    ...              claims=(claim,), arrays={"y": np.zeros(3, np.float32)}, paper_config={"width": 16, "seeds": 1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     b = load(a.save(folder))
    >>> b.verdict, b.reductions, b.arrays["y"].shape
    ('reproduced', {'seeds': (3, 1)}, (3,))
    """

    name: str
    title: str
    paper: str
    scale: str
    config: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    claims: tuple[Claim, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    paper_config: dict[str, Any] = field(default_factory=dict)
    paper_numbers: dict[str, Any] = field(default_factory=dict)
    deviations: tuple[Deviation, ...] = ()
    gates: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    duration_seconds: float = 0.0
    created: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    figures: Sequence[Panel] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"Artifact {self.name!r}"
        check_name(self.name, where)
        check_texts(self, ("title", "paper", "created", "source"), where)
        if self.scale not in SCALES:
            raise OptionError(f"{where}: scale must be 'quick' or 'paper', got {self.scale!r}.")
        for name in ("config", "metrics", "paper_config", "paper_numbers", "environment", "gates"):
            value = _plain(getattr(self, name), f"{where}.{name}")
            if not isinstance(value, dict):
                raise OptionError(f"{where}.{name} must be a dict, got {type(value).__name__}.")
            object.__setattr__(self, name, value)
        for part, gates in self.gates.items():
            if not isinstance(gates, str) or not _GATES.fullmatch(gates):
                raise OptionError(f"{where}.gates[{part!r}] must be 'hard', 'soft' or 'soft β=4', got {gates!r}.")
        for name, kind in (("claims", Claim), ("deviations", Deviation), ("figures", Panel)):
            values = tuple(getattr(self, name))
            for value in values:
                if not isinstance(value, kind):
                    raise OptionError(f"{where}.{name} must contain {kind.__name__}, got {type(value).__name__}.")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in self.seeds))
        object.__setattr__(self, "duration_seconds", float(self.duration_seconds))
        if self.created:
            _check_time(self.created, where)
        arrays = {key: np.asarray(value) for key, value in self.arrays.items()}
        for key, array in arrays.items():
            # the last two are parameter names of numpy's writer
            if not key.isidentifier() or array.dtype.hasobject or key in ("file", "allow_pickle"):
                raise OptionError(
                    f"{where}.arrays: {key!r} of dtype {array.dtype} cannot be stored. Use an identifier "
                    "as name and a dtype without objects."
                )
        total = sum(array.nbytes + 1024 for array in arrays.values())  # each has a header in the file
        if total > _MOST_BYTES:
            raise OptionError(
                f"{where}.arrays have {total} bytes, at most {_MOST_BYTES} can be stored. Store fewer "
                "numbers, or narrower ones: float32 in place of float64."
            )
        object.__setattr__(self, "arrays", arrays)
        for panel in self.figures:
            panel.check(arrays, where)

    @property
    def reductions(self) -> dict[str, tuple[Any, Any]]:
        """The sizes that differ from the paper's: name → (ours, the paper's)."""
        ours = {**self.config, "seeds": len(self.seeds)}
        return {key: (ours.get(key), value) for key, value in self.paper_config.items() if ours.get(key) != value}

    @property
    def reduced(self) -> bool:
        """Whether any size differs from the paper's."""
        return bool(self.reductions)

    def reduced_row(self, claim: Claim) -> bool:
        """Whether the row of this claim is REDUCED, alone or because the whole artifact is."""
        return self.reduced or claim.reduced

    def verdict_of(self, claim: Claim) -> Verdict:
        """The claim's verdict, except that a REDUCED row cannot reproduce anything at paper scale."""
        if self.scale == "paper" and self.reduced_row(claim) and claim.verdict == "reproduced":
            return "cannot tell"
        return claim.verdict

    @property
    def verdict(self) -> Verdict:
        """One verdict over all claims."""
        return combine_verdicts(self.verdict_of(claim) for claim in self.claims)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``<name>.<scale>.json`` and its arrays into ``folder`` and return the path of the JSON.

        The arrays go first, under a name that contains their SHA-256; the JSON that names them is renamed into place
        last. A crash at any moment leaves the previous artifact complete. If several processes save the same artifact,
        the last one wins.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Artifact("hs.fig2", "Circle", "half-space", "quick").save(folder).name
        'hs.fig2.quick.json'
        """
        target = Path(folder)
        path = target / f"{self.name}.{self.scale}.json"
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **self.arrays)  # type: ignore[arg-type]
        data = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        arrays_path = target / f"{self.name}.{self.scale}.{digest[:12]}.npz"
        document = self._document(arrays_path.name, digest)
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            target.mkdir(parents=True, exist_ok=True)
            with locked(target) as alone:
                before = set(target.glob(f"{self.name}.{self.scale}.*.npz"))
                write_atomically(arrays_path, data)
                write_atomically(path, text.encode())
                # no JSON file refers to them any more; without a lock they may belong to another process that has not
                # written its JSON
                for stale in before - {arrays_path} if alone else ():
                    stale.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(
                f"Artifact {self.name!r} cannot be written to {target}: {error.strerror or error}. "
                "Choose a folder that can be written."
            ) from error
        return path

    def _document(self, file: str, digest: str) -> dict[str, Any]:
        claims = [
            {**dataclasses.asdict(claim), "reduced": self.reduced_row(claim), "verdict": claim.verdict}
            for claim in self.claims
        ]
        values = {
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(self)},
            "format": _FORMAT,
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reduced": self.reduced,
            "claims": claims,
            "arrays": _ArraysEntry(file, digest, _list_arrays(self.arrays)),
        }
        document = {name: msgspec.to_builtins(values[name]) for name in _Document.__struct_fields__}
        return with_checksum(_tag_infinities(document))


def check_name(name: Any, where: str) -> None:
    """Raise an error unless a name can be that of an experiment."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(f"{where}: a name is lower-case words joined by dots, such as 'hs.fig2'.")


# --- the JSON file ---------------------------------------------------------------------------------------------


class _ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: tuple[int, ...]
    dtype: str


class _ArraysEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    sha256: str
    contents: dict[str, _ArrayEntry]


def _entry(name: str, fields: Mapping[str, Any]) -> Any:
    """A part of the file that has all of these fields and no other."""
    return msgspec.defstruct(name, list(fields.items()), frozen=True, forbid_unknown_fields=True)


_CLAIM_FIELDS = {name: kind for name, kind in get_type_hints(Claim).items() if not isinstance(kind, InitVar)}
_ClaimEntry = _entry("_ClaimEntry", _CLAIM_FIELDS | {"verdict": str})
_Document = _entry(
    "_Document",
    {
        "format": str,
        "schema": int,
        "verdict": str,
        "reduced": bool,
        **get_type_hints(Artifact),
        "claims": tuple[_ClaimEntry, ...],  # type: ignore[valid-type]
        "arrays": _ArraysEntry,
    },
)


def _list_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, _ArrayEntry]:
    return {key: _ArrayEntry(array.shape, str(array.dtype)) for key, array in arrays.items()}


# --- reading ---------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Artifact:
    """Read one artifact and check it: schema version, checksums of the file and its arrays, fields, verdicts.

    Parameters
    ----------
    path : path
        The JSON file; the file of its arrays must be in the same folder.

    Raises
    ------
    ArtifactError
        Unknown schema version, missing or truncated file, wrong checksum, edited verdict. Files are left untouched.
    """
    file = Path(path)
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"Artifact {file} cannot be read: {error.strerror or error}.") from error
    try:
        document = parse_json(text, _refuse_constant)
    except ValueError as error:
        raise ArtifactError(f"Artifact {file} is not complete JSON ({error}). {_AGAIN}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ArtifactError(f'{file} is not a Pathlens artifact: its "format" is not {_FORMAT!r}.')
    version = document.get("schema")
    if version != SCHEMA:
        newer = isinstance(version, int) and version > SCHEMA
        remedy = "Install a newer Pathlens." if newer else _AGAIN
        raise ArtifactError(f"Artifact {file} has schema version {version!r}, expected {SCHEMA}. {remedy}")
    try:
        content = _untag_infinities(verify_checksum(document))
    except (ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"Artifact {file}: {error}: it was edited or damaged after it was written. It was left "
            f"untouched. Restore it from a copy. {_AGAIN}"
        ) from error
    try:
        found: Any = msgspec.convert(content, _Document)
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Artifact)}
        stored = [msgspec.structs.asdict(claim) for claim in found.claims]
        verdicts = [claim.pop("verdict") for claim in stored]
        values |= {"claims": [Claim(**claim) for claim in stored], "arrays": _load_arrays(found.arrays, file)}
        artifact = Artifact(**values)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"Artifact {file} is malformed: {error}. {_AGAIN}") from error
    except OptionError as error:
        raise ArtifactError(f"Artifact {file} holds an invalid entry: {error}") from error
    if [claim.reduced for claim in artifact.claims] != list(map(artifact.reduced_row, artifact.claims)):
        raise ArtifactError(f"Artifact {file} is REDUCED, but not all of its rows are marked. {_AGAIN}")
    computed = [claim.verdict for claim in artifact.claims]
    if (verdicts, found.verdict, found.reduced) != (computed, artifact.verdict, artifact.reduced):
        raise ArtifactError(
            f"Artifact {file} states {found.verdict!r} {verdicts}, but its numbers give "
            f"{artifact.verdict!r} {computed}. Verdicts are computed, not edited. {_AGAIN}"
        )
    return artifact


def load_folder(folder: str | os.PathLike[str]) -> list[Artifact]:
    """Every artifact directly in ``folder``, ordered by name with numbers in numeric order.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("hs.fig10", "hs.fig2"):
    ...         _ = Artifact(name, "t", "p", "quick").save(folder)
    ...     [artifact.name for artifact in load_folder(folder)]
    ['hs.fig2', 'hs.fig10']
    """
    path = Path(folder)
    if not path.is_dir():
        raise ArtifactError(f"No folder of artifacts at {path}. Run `pathlens run NAME --out …` first.")
    found = [load(file) for file in path.glob("*.json")]
    return sorted(found, key=lambda artifact: (natural_order(artifact.name), artifact.scale))


_AGAIN = "Run the experiment again to replace it."


def natural_order(name: str) -> list[tuple[int, Any]]:
    """The sort key of a name, with numbers in numeric order."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part]


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _load_arrays(entry: _ArraysEntry, file: Path) -> dict[str, np.ndarray]:
    # a plain name only: an artifact of unknown origin must not open files outside its folder
    if Path(entry.file).name != entry.file or "\\" in entry.file:
        raise ArtifactError(f'Artifact {file}: "arrays" does not name a file beside it. {_AGAIN}')
    path = file.parent / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"Artifact {file} needs its arrays in {path}, which cannot be read: "
            f"{error.strerror or error}. Copy both files together."
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise ArtifactError(
            f"Arrays {path} ({len(data)} bytes) have SHA-256 {digest[:12]}…, but {file.name} expects "
            f"{entry.sha256[:12]}…: the file is truncated or was replaced. {_AGAIN}"
        )
    try:
        arrays = read_npz(data, _MOST_BYTES)
    except ValueError as error:
        raise ArtifactError(f"Arrays {path} are not a readable NPZ file ({error}). {_AGAIN}") from error
    if _list_arrays(arrays) != entry.contents:
        raise ArtifactError(f"Arrays {path} hold {sorted(arrays)}, which is not what {file.name} lists. {_AGAIN}")
    return arrays


# --- writing ---------------------------------------------------------------------------------------------------


def _plain(value: Any, where: str) -> Any:
    """Convert a value to dict, list, str, bool, int, float and None; NaN becomes None."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _TAG:
                raise OptionError(f"{where}: keys must be strings other than {_TAG!r}, got {key!r}.")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise OptionError(
        f"{where} must be made of plain numbers, strings, lists and dicts, got {type(value).__name__}. "
        "Put arrays into `arrays`."
    )


_TAG = "$float"  # JSON has no infinity; it is stored as {"$float": "inf"}


def _tag_infinities(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return {_TAG: str(value)}
    if isinstance(value, dict):
        return {key: _tag_infinities(item) for key, item in value.items()}
    return [_tag_infinities(item) for item in value] if isinstance(value, (list, tuple)) else value


def _untag_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value[_TAG]) if set(value) == {_TAG} else {k: _untag_infinities(v) for k, v in value.items()}
    return [_untag_infinities(item) for item in value] if isinstance(value, list) else value


def _check_time(text: str, where: str) -> None:
    try:
        utc = datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        utc = False
    if not utc:
        raise OptionError(f"{where}.created must be ISO 8601 in UTC ('2026-01-31T12:00:00+00:00'), got {text!r}.")


def environment(**more: Any) -> dict[str, Any]:
    """Versions and hardware of this process; keyword arguments are added (``device="cpu"``).

    Threads are reported only if torch is already loaded: this function does not load it.

    Examples
    --------
    >>> environment(device="cpu")["device"]
    'cpu'
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count() or 0,
    }
    for package in ("pathlens", "torch", "numpy", "scipy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # the package is not installed but run from src
            found[package] = getattr(sys.modules.get(package), "__version__", None)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = int(torch.get_num_threads())
    return {**found, **more}


def float32(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays, or nested lists of numbers, as float32: half the size of float64, and enough for a figure.

    Examples
    --------
    >>> float32({"depths": [2, 4]})
    {'depths': array([2., 4.], dtype=float32)}
    """
    return {name: np.asarray(values, dtype=np.float32) for name, values in arrays.items()}
