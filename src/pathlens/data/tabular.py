"""Real tables with a target: a folder ``tabular`` of ``.csv.gz`` files that its ``manifest.json`` describes.

Columns are numbers or strings, with missing cells; they are neither encoded nor imputed. `read_csv` reads CSV files of
users.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from pathlens.data.store import data_folders
from pathlens.errors import DataCorruptError, DataMissingError, FileFormatError, OptionError, import_extra, unknown_name
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
        return import_extra("pandas", "Table.frame").DataFrame(dict(self.columns))

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
    """Read one table of the ``tabular`` folder, after comparing its file with the manifest's checksum.

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
    entry, info = entries[name]
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataMissingError(f"Table {name!r}: {path} cannot be read ({error.strerror or error}).") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise DataCorruptError(
            f"Table {name!r}: {path} ({len(data)} bytes) has SHA-256 {digest[:12]}…, its manifest has "
            f"{entry.sha256[:12]}…. The file was left as it is; get it again."
        )
    return _parse(path, data, entry, info)


class _Entry(msgspec.Struct, frozen=True):
    """A table in the manifest, which may have other fields as well."""

    name: str
    file: str
    sha256: str
    task: Literal["classification", "regression"]
    rows: int
    columns: int
    categorical_columns: frozenset[str] = frozenset()
    integer_coded_categoricals: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise ValueError(f"{self.file!r} is not a plain file name")


def _manifest() -> tuple[Path, dict[str, tuple[_Entry, dict[str, Any]]]] | None:
    """The first ``tabular`` folder with a manifest, and its entries by name, checked and as they are."""
    for root in data_folders():
        path = root / "tabular" / "manifest.json"
        if not path.is_file():
            continue
        try:
            found = parse_json(path.read_bytes())["datasets"]
            entries = msgspec.convert(found, list[_Entry])
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(f"{path}: not a manifest of tables ({error!r}). Get the folder again.") from error
        return path.parent, {entry.name: (entry, info) for entry, info in zip(entries, found)}
    return None


def _parse(path: Path, data: bytes, entry: _Entry, info: dict[str, Any]) -> Table:
    name, n, m = entry.name, entry.rows, entry.columns
    try:
        rows = list(csv.reader(io.StringIO(gunzip(data, _MOST_BYTES).decode("utf-8"), newline="")))
    except (ValueError, csv.Error) as error:
        raise FileFormatError(f"Table {name!r}: {path} is not a gzipped CSV file ({error}).") from error
    header, body = (rows[0], rows[1:]) if rows else ([], [])
    if header[-1:] != [TARGET] or len(header) != m + 1 or len(body) != n or any(len(r) != m + 1 for r in body):
        raise FileFormatError(
            f"Table {name!r}: {path} has {len(body)} rows of {len(header)} columns ending in "
            f"{header[-1:]}, expected {n} rows of {m} columns and '{TARGET}'."
        )
    strings = entry.categorical_columns
    cells = dict(zip(header, zip(*body)))
    columns = {k: _strings(cells[k]) if k in strings else _numbers(name, k, cells[k]) for k in header[:-1]}
    if entry.task == "regression":
        target = _numbers(name, TARGET, cells[TARGET])
    else:
        try:
            target = np.array([int(v) for v in cells[TARGET]])
        except ValueError:
            target = np.array(cells[TARGET])
    categorical = tuple(k for k in header[:-1] if k in strings | entry.integer_coded_categoricals)
    return Table(name, entry.task, columns, target, categorical, info)


def _strings(cells: tuple[str, ...]) -> np.ndarray:
    return np.array([c or None for c in cells], dtype=object)


def _numbers(name: str, column: str, cells: tuple[str, ...]) -> np.ndarray:
    try:
        return np.array([float(c) if c else np.nan for c in cells])
    except ValueError as error:
        raise FileFormatError(f"Table {name!r}: column {column!r} is listed as numeric, but {error}.") from error


# --- CSV files of users ------------------------------------------------------------------------------------------

_MARKS = (  # byte-order marks; that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SEPARATORS = ",;\t|"
_SAMPLE = 100  # rows that the separator is found by
_WITH_COMMA = re.compile(r"[+-]?(?=,?\d)(\d+|\d{1,3}(\.\d{3})+)?(,\d+)?([eE][+-]?\d+)?")  # 1,5 or 1.234,5 or 12
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")  # 1,234: may also be a number with three decimals
_WITH_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")


def read_csv(path: str | Path) -> tuple[Any, list[str]]:
    """A CSV file with a line of column names as a pandas table, and notes on what had to be guessed.

    Encodings are UTF-8, UTF-16 and UTF-32 by their byte-order marks, and Windows-1252 where a file is not UTF-8.
    Columns are separated by commas, semicolons, tabs or bars. Where commas do not separate columns, numbers may have
    decimal commas. Files that end in .gz, .bz2, .xz or .zip are decompressed.

    Raises
    ------
    FileFormatError
        The file cannot be read, or could be read in two ways; the message names the line or the column.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "t.csv"
    >>> _ = file.write_text("size;kind\\n1,5;a\\n20,25;b\\n", encoding="utf-16")
    >>> frame, notes = read_csv(file)
    >>> frame["size"].tolist(), notes
    ([1.5, 20.25], ['numbers read with decimal commas: size'])
    """
    pandas = import_extra("pandas", "Reading tables")
    path, notes = Path(path), list[str]()
    try:
        text = _decoded(_decompressed(path), notes)
        separator = _separator(text)
        _refuse_uneven(text, separator)
        frame = pandas.read_csv(io.StringIO(text), sep=separator, engine="python")
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(".")
        raise FileFormatError(
            f"{path} cannot be read as a table: {reason}. Give a CSV file with column names."
        ) from error
    return (frame, notes) if separator == "," else (_with_decimal_commas(path, frame, notes), notes)


def _decompressed(path: Path) -> bytes:
    kind = path.suffix.lower()
    if kind == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) != 1:
                raise ValueError(f"it holds {len(names)} files, expected one; unpack it")
            return archive.read(names[0])
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(kind, open)
    with opened(path, "rb") as file:
        content: bytes = file.read()
    return content


def _decoded(data: bytes, notes: list[str]) -> str:
    """The text of a file, by its byte-order mark, as UTF-8, or else as Windows-1252; ValueError if it is none."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    try:
        try:
            text = data.decode(encoding or "utf-8")
        except UnicodeDecodeError:
            if encoding is not None:
                raise
            text = data.decode("cp1252")
            notes.append("the file is not UTF-8 and was read as Windows-1252")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not text in {error.encoding} ({error.reason}); save the file as UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(
            f"line {line} has a zero byte, as in UTF-16 without a byte-order mark or in a file that is no text; save "
            "the file as UTF-8"
        )
    return text


def _separator(text: str) -> str:
    """The character by which most of the first rows fall into as many cells as the header, and into the most."""
    head = text.splitlines()[: _SAMPLE + 1]

    def fits(separator: str) -> tuple[int, int]:
        rows = [len(row) for row in csv.reader(head, delimiter=separator) if row]
        return (sum(cells == rows[0] for cells in rows) if rows and rows[0] > 1 else 0, rows[0] if rows else 0)

    best = max(_SEPARATORS, key=fits)
    if head and fits(best)[0] == 0:  # spaces or something else
        try:
            return csv.Sniffer().sniff(head[0], " :").delimiter
        except csv.Error:
            return ","
    return best


def _refuse_uneven(text: str, separator: str) -> None:
    """ValueError if a row has more cells than the header: pandas would use its first cells as names of rows."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    header = next(filter(None, reader), [])
    for row in reader:
        if len(row) > len(header):
            raise ValueError(
                f"line {reader.line_num} has {len(row)} cells separated by {separator!r}, the header has "
                f"{len(header)}; name every column, and quote numbers with decimal commas or use semicolons between "
                "columns"
            )


def _with_decimal_commas(path: Path, frame: Any, notes: list[str]) -> Any:
    """A table whose columns of text such as 1,5 are numbers, unless they may be thousands."""
    words = {name: column for name, column in frame.items() if column.dtype.kind == "O"}
    cells = {name: column.dropna().astype(str).str.strip() for name, column in words.items()}
    with_comma = {name: values[values.str.contains(",", regex=False)] for name, values in cells.items()}
    with_comma = {
        name: values
        for name, values in with_comma.items()
        if len(values) and all(map(_WITH_COMMA.fullmatch, cells[name]))
    }
    if not with_comma:
        return frame
    names = ", ".join(map(str, with_comma))
    clear = any(not _THOUSANDS.fullmatch(v) for values in with_comma.values() for v in values)
    points = [name for name, column in frame.items() if column.dtype.kind == "f" and (column % 1 != 0).any()]
    points += [name for name, values in cells.items() if any(map(_WITH_POINT.fullmatch, values))]
    if points:
        notes.append(f"columns with commas read as text, because {points[0]} has decimal points: {names}")
        return frame
    if not clear:
        name, values = next(iter(with_comma.items()))
        raise FileFormatError(
            f"{path}: column {str(name)!r} holds {values.iloc[0]!r} in row {values.index[0] + 1} (counted from 1, "
            "without the header): a decimal comma, or one between thousands? Write decimals with a point and no "
            "separator of thousands."
        )
    frame = frame.copy()
    for name in with_comma:
        plain = cells[name].str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
        frame[name] = plain.astype(float).reindex(frame.index)
    notes.append(f"numbers read with decimal commas: {names}")
    return frame
