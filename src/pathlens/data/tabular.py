"""Real tables with a target: a folder ``tabular`` of ``.csv.gz`` files that its ``manifest.json`` describes.

Here they are found (where `store` looks for image sets), checked and read as they are: numbers, strings, missing
cells. Encoding and imputing are left to the caller. May import `pathlens.errors`, `pathlens.files` and this folder's
`store`.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pathlens.data.store import data_folders
from pathlens.errors import DataCorruptError, DataMissingError, FileFormatError, OptionError, need_extra, unknown_name
from pathlens.files import gunzip, parse_json

TARGET = "target"  # the last column of every file
_MOST_BYTES = 1 << 26  # of an unpacked file


@dataclass(frozen=True)
class Table:
    """A table as published: one array per column, and a target.

    Attributes
    ----------
    name : str
    task : {"classification", "regression"}
    columns : dict name → array (n,)
        Numbers as float64 with NaN for a missing cell, strings as objects with None for one.
    target : array (n,)
        Numbers for regression; labels are int64 where all of them are whole numbers, else strings.
    categorical : tuple of str
        Columns whose values have no order; those that are coded by whole numbers hold numbers.
    info : dict
        The manifest's entry: source, licence, notes.

    Examples
    --------
    >>> table = Table("toy", "classification", {"age": np.array([20.0, 40.0]), "sex": np.array(["f", "m"], object)},
    ...               np.array([0, 1]), ("sex",))
    >>> table
    Table 'toy': classification, 2 rows, 2 columns (1 categorical), 0 missing cells
    """

    name: str
    task: Literal["classification", "regression"]
    columns: Mapping[str, np.ndarray]
    target: np.ndarray
    categorical: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.target)

    @property
    def missing(self) -> int:
        """Number of empty cells."""
        return sum(
            int(sum(v is None for v in a) if a.dtype == object else np.isnan(a).sum()) for a in self.columns.values()
        )

    def subsample(self, n: int, seed: int = 0) -> Table:
        """At most n rows, drawn without replacement and kept in order; the same seed gives the same rows."""
        if n < 1:
            raise OptionError(f"Table {self.name!r}: subsample needs at least 1 row, got n={n!r}.")
        if n >= len(self):
            return self
        keep = np.sort(np.random.default_rng(seed).choice(len(self), n, replace=False))
        return replace(
            self,
            columns={k: a[keep] for k, a in self.columns.items()},
            target=self.target[keep],
            info={**self.info, "subsample_of": len(self), "subsample_seed": seed},
        )

    def frame(self) -> Any:
        """The columns as a pandas DataFrame, without the target."""
        try:
            import pandas as pd
        except ImportError as error:
            raise need_extra("table", "pandas", "Table.frame") from error
        return pd.DataFrame(dict(self.columns))

    def __repr__(self) -> str:
        return (
            f"Table {self.name!r}: {self.task}, {len(self)} rows, {len(self.columns)} columns "
            f"({len(self.categorical)} categorical), {self.missing} missing cells"
        )


def table_names() -> tuple[str, ...]:
    """The tables found on this machine, sorted; empty where there is no ``tabular`` folder."""
    found = _manifest()
    return () if found is None else tuple(sorted(found[1]))


def table(name: str) -> Table:
    """Reads one table of the ``tabular`` folder, after comparing its file with the manifest's checksum.

    Raises
    ------
    DataMissingError
        No ``tabular`` folder, or the file is not in it.
    DataCorruptError
        The file does not have its checksum.

    Examples
    --------
    >>> table("airfoil")  # doctest: +SKIP
    Table 'airfoil': regression, 1503 rows, 5 columns (0 categorical), 0 missing cells
    """
    found = _manifest()
    if found is None:
        searched = "\n".join(f"  {root / 'tabular'}" for root in data_folders())
        raise DataMissingError(
            f"No tables on this machine: no tabular/manifest.json. Searched:\n{searched}\nSet PATHLENS_DATA to the "
            "folder that holds 'tabular'."
        )
    folder, entries = found
    if name not in entries:
        raise unknown_name("table", name, entries)
    entry = entries[name]
    path = folder / str(entry["file"])
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataMissingError(f"Table {name!r}: {path} cannot be read ({error.strerror or error}).") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry["sha256"]:
        raise DataCorruptError(
            f"Table {name!r}: {path} ({len(data)} bytes) has SHA-256 {digest[:12]}…, its manifest says "
            f"{str(entry['sha256'])[:12]}…. The file was left as it is; get it again."
        )
    return _parse(name, path, data, entry)


def _manifest() -> tuple[Path, dict[str, dict[str, Any]]] | None:
    """The first ``tabular`` folder with a manifest, and its entries by name."""
    for root in data_folders():
        path = root / "tabular" / "manifest.json"
        if not path.is_file():
            continue
        try:
            entries = {e["name"]: e for e in parse_json(path.read_bytes())["datasets"]}
            for e in entries.values():
                _ = e["file"], e["sha256"], e["task"], e["rows"], e["columns"]
                if Path(e["file"]).name != e["file"]:
                    raise ValueError(f"'{e['file']}' is not a plain file name")
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(f"{path}: not a manifest of tables ({error!r}). Get the folder again.") from error
        return path.parent, entries
    return None


def _parse(name: str, path: Path, data: bytes, entry: Mapping[str, Any]) -> Table:
    try:
        rows = list(csv.reader(io.StringIO(gunzip(data, _MOST_BYTES).decode("utf-8"), newline="")))
    except (ValueError, csv.Error) as error:
        raise FileFormatError(f"Table {name!r}: {path} is not a gzipped CSV file ({error}).") from error
    header, body = (rows[0], rows[1:]) if rows else ([], [])
    n, m = int(entry["rows"]), int(entry["columns"])
    if header[-1:] != [TARGET] or len(header) != m + 1 or len(body) != n or any(len(r) != m + 1 for r in body):
        raise FileFormatError(
            f"Table {name!r}: {path} has {len(body)} rows of {len(header)} columns ending in "
            f"{header[-1:]}, expected {n} rows of {m} columns and '{TARGET}'."
        )
    strings = set(entry.get("categorical_columns", ()))
    cells = dict(zip(header, zip(*body)))
    columns = {k: _strings(cells[k]) if k in strings else _numbers(name, k, cells[k]) for k in header[:-1]}
    if entry["task"] == "regression":
        target = _numbers(name, TARGET, cells[TARGET])
    else:
        try:
            target = np.array([int(v) for v in cells[TARGET]])
        except ValueError:
            target = np.array(cells[TARGET])
    categorical = tuple(k for k in header[:-1] if k in strings or k in entry.get("integer_coded_categoricals", ()))
    return Table(name, entry["task"], columns, target, categorical, dict(entry))


def _strings(cells: tuple[str, ...]) -> np.ndarray:
    return np.array([c or None for c in cells], dtype=object)


def _numbers(name: str, column: str, cells: tuple[str, ...]) -> np.ndarray:
    try:
        return np.array([float(c) if c else np.nan for c in cells])
    except ValueError as error:
        raise FileFormatError(f"Table {name!r}: column {column!r} is listed as numeric, but {error}.") from error
