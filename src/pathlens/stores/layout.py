"""The files of a matrix store: a Zarr array whose chunks are blocks, a description, and checksums of finished blocks.

Chunks are not compressed, so that parts of them are read by mapping the file. Nothing is unpickled. Zarr is imported
when a store is created or opened.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.budgets import blocks
from pathlens.errors import FileFormatError, import_extra
from pathlens.files import Document, file_checksum, from_json, read_document, sync_folder, to_json, write_document
from pathlens.progress import track

RESUME = "Call K.to_zarr(path) again with the same kernel: finished blocks are kept, missing and damaged ones computed."


def import_zarr() -> Any:
    """The zarr module."""
    return import_extra("zarr", "a matrix on disk")


class MatrixDescription(Document, tag="pathlens.matrix", frozen=True, kw_only=True):
    """The description of a stored matrix, kept as attributes of the Zarr array.

    Attributes
    ----------
    name, formula
        Shown to people.
    shape, dtype, symmetric
        Of the matrix; the dtype is ``"float32"`` or ``"float64"``.
    block
        Rows and columns of a block, which is one chunk.
    fingerprint
        SHA-256 of the data that the matrix is computed from.
    sample
        Some entries, for matrices whose data cannot be hashed.
    seconds_per_block
        The estimate from which the block size was chosen; 0 if the user chose it.
    """

    name: str
    formula: str
    shape: tuple[int, int]
    dtype: str
    symmetric: bool
    block: tuple[int, int] = (1, 1)
    fingerprint: str
    sample: tuple[float, ...] = ()
    seconds_per_block: float = 0.0

    def __post_init__(self) -> None:
        if min(*self.shape, *self.block) < 1:
            raise ValueError("a matrix and its blocks have rows and columns")
        if self.symmetric and (self.shape[0] != self.shape[1] or self.block[0] != self.block[1]):
            raise ValueError("a symmetric matrix is square, and its blocks are")

    def difference(self, other: MatrixDescription) -> str | None:
        """How this stored matrix differs from another one, in words; None if it is the same."""
        for what in ("shape", "dtype", "symmetric"):
            if getattr(self, what) != getattr(other, what):
                return f"its {what} is {getattr(self, what)}, this one's {getattr(other, what)}"
        if self.fingerprint != other.fingerprint:
            return f"its fingerprint is {self.fingerprint[:12]}…, this one's {other.fingerprint[:12]}…"
        a, b = np.array(self.sample), np.array(other.sample)
        limit = (1e-4 if self.dtype == "float32" else 1e-9) * np.abs(b).max(initial=0.0)
        if a.shape != b.shape or np.abs(a - b).max(initial=0.0) > limit:
            return "sampled entries differ"
        return None

    def ranges(self) -> tuple[list[range], list[range]]:
        """Rows and columns of the blocks."""
        return blocks(self.shape[0], self.block[0]), blocks(self.shape[1], self.block[1])

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns of blocks."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The blocks that are computed: all, or those on and above the diagonal of a symmetric matrix."""
        rows, cols = self.grid
        for i in range(rows):
            for j in range(i if self.symmetric else 0, cols):
                yield i, j

    @property
    def blocks(self) -> int:
        """Number of blocks that are computed."""
        rows, cols = self.grid
        return rows * (rows + 1) // 2 if self.symmetric else rows * cols

    def has(self, i: int, j: int) -> bool:
        """Whether a block is one of those."""
        rows, cols = self.grid
        return (i if self.symmetric else 0) <= j < cols and 0 <= i < rows


class FinishedRow(Document, tag="pathlens.matrix-row", frozen=True, kw_only=True):
    """Checksums of the finished blocks in one row of blocks: column → one checksum per file."""

    row: int
    blocks: dict[int, tuple[str, ...]]


@dataclass
class Store:
    """A matrix on disk: where its files are, and which blocks are finished.

    Attributes
    ----------
    path
        The folder: ``zarr.json`` and the chunks ``c/i/j`` are the Zarr array; ``pathlens/`` holds the other files.
    description
        Of the matrix.
    finished
        (i, j) → checksums of the chunk and, if symmetric, of its mirror image.
    damaged_rows
        Names of damaged files of finished rows; the state of their blocks is unknown.
    """

    path: Path
    description: MatrixDescription
    finished: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    damaged_rows: list[str] = field(default_factory=list)

    def chunk(self, i: int, j: int) -> Path:
        """The file of a chunk."""
        return self.path / "c" / str(i) / str(j)

    def own(self, *names: str) -> Path:
        """A file that is not part of the Zarr array."""
        return self.path.joinpath("pathlens", *names)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the chunk files, little-endian."""
        return np.dtype(self.description.dtype).newbyteorder("<")

    @property
    def chunk_bytes(self) -> int:
        """Size of every chunk file; those at the edge are padded, as Zarr requires."""
        a, b = self.description.block
        return a * b * self.numpy_dtype.itemsize

    @property
    def bytes(self) -> int:
        """Size of all chunk files."""
        rows, cols = self.description.grid
        return rows * cols * self.chunk_bytes

    def files(self, i: int, j: int) -> list[Path]:
        """The chunk of a block and, off the diagonal of a symmetric matrix, its mirror image."""
        mirrored = self.description.symmetric and i != j
        return [self.chunk(i, j), self.chunk(j, i)] if mirrored else [self.chunk(i, j)]

    def map_block(self, i: int, j: int) -> np.ndarray:
        """A block as a read-only array that maps its chunk file; at the edge it is padded."""
        file = self.chunk(i, j)
        try:
            return np.memmap(file, self.numpy_dtype, "r", shape=self.description.block)
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{file}: block ({i}, {j}) is missing or truncated ({error}). {RESUME}") from error

    def record(self, i: int, j: int, checksums: tuple[str, ...]) -> None:
        """Record that a block is finished. Each row of blocks has its own small file."""
        self.finished[i, j] = checksums
        self._write_row(i)

    def forget(self, i: int, j: int) -> None:
        """Remove a damaged block from the record."""
        del self.finished[i, j]
        self._write_row(i)

    def _write_row(self, i: int) -> None:
        entries = {j: sums for (row, j), sums in sorted(self.finished.items()) if row == i}
        write_document(self.own("finished", f"{i}.json"), FinishedRow(row=i, blocks=entries))

    def read_finished(self) -> None:
        """Read the record of finished blocks."""
        self.finished, self.damaged_rows = {}, []
        # the files that exist, not the rows that there should be: a description may claim any number of them
        for file in sorted(self.own("finished").glob("*.json")):
            if not file.stem.isdecimal() or not int(file.stem) < self.description.grid[0]:
                continue
            i = int(file.stem)
            try:
                found = read_document(file, FinishedRow)
            except FileFormatError:
                self.damaged_rows.append(file.name)
                continue
            entries = {(i, j): sums for j, sums in found.blocks.items() if self.description.has(i, j)}
            if found.row != i or any(len(sums) != len(self.files(*key)) for key, sums in entries.items()):
                self.damaged_rows.append(file.name)
            else:
                self.finished |= entries

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Blocks that are not finished."""
        return [pair for pair in self.description.pairs() if pair not in self.finished]

    def find_damaged(self, verify: bool) -> list[tuple[int, int]]:
        """Finished blocks whose files are missing or truncated, or with ``verify`` do not match their checksums.

        Verifying reads all blocks.
        """

        def is_damaged(pair: tuple[int, int]) -> bool:
            for file, checksum in zip(self.files(*pair), self.finished[pair], strict=True):
                try:
                    if file.stat().st_size != self.chunk_bytes or (verify and file_checksum(file) != checksum):
                        return True
                except OSError:
                    return True
            return False

        pairs = sorted(self.finished)
        with ThreadPoolExecutor(4) as threads:
            return [pair for pair, bad in zip(track(pairs, "checking blocks"), threads.map(is_damaged, pairs)) if bad]

    def check_complete(self, verify: bool) -> None:
        """Raise a `FileFormatError` if blocks are missing or damaged; with ``verify``, read and check all blocks."""
        if self.damaged_rows:
            raise FileFormatError(
                f"{self.own('finished', self.damaged_rows[0])}: the record of finished blocks is damaged. {RESUME}"
            )
        finished, total = len(self.finished), self.description.blocks
        if finished < total:
            raise FileFormatError(f"{self.path}: {finished} of {total} blocks are finished. {RESUME}")
        damaged = self.find_damaged(verify)
        if damaged and verify:
            raise FileFormatError(
                f"{self.path}: {len(damaged)} of {len(self.finished)} blocks are damaged: "
                f"{', '.join(map(str, damaged[:8]))}{' …' if len(damaged) > 8 else ''}. {RESUME}"
            )
        if damaged:
            raise FileFormatError(
                f"{self.path}: block {damaged[0]} and {len(damaged) - 1} others are missing or truncated. {RESUME}"
            )


def create_store(path: Path, description: MatrixDescription) -> Store:
    """Create an empty store under a temporary name, then rename it, so that there is never half of one."""
    zarr = import_zarr()
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    zarr.create_array(
        str(building),
        shape=description.shape,
        chunks=description.block,
        dtype=description.dtype,
        zarr_format=3,
        compressors=None,
        filters=None,
        fill_value=float("nan"),
        attributes={"pathlens": to_json(description)},
    )
    (building / "pathlens" / "finished").mkdir(parents=True)
    for i in range(description.grid[0]):
        (building / "c" / str(i)).mkdir(parents=True)
    sync_folder(building)
    os.replace(building, path)
    sync_folder(path.parent)
    return Store(path, description)


def open_store(path: Path) -> Store:
    """Open the store at a path; raises a `FileFormatError` if there is none, or if it was edited or damaged."""
    zarr = import_zarr()
    header = path / "zarr.json"
    if not header.is_file():
        raise FileFormatError(f"{path}: there is no Zarr array at this path. Was it written there with K.to_zarr?")
    try:
        array = zarr.open_array(str(path), mode="r")
        attributes = dict(array.attrs)
    except Exception as error:  # zarr raises many kinds for a damaged zarr.json
        raise FileFormatError(
            f"{header}: not readable as a Zarr array ({type(error).__name__}: {error}). "
            f"It was left untouched; restore it from a copy."
        ) from error
    if "pathlens" not in attributes:
        raise FileFormatError(f"{path}: a Zarr array that Pathlens did not write. Open it with zarr.")
    found = from_json(attributes["pathlens"], MatrixDescription, header)
    codecs = [type(codec).__name__ for codec in array.metadata.codecs]
    expected = (found.shape, found.block, found.dtype, ["BytesCodec"])
    if (array.shape, array.chunks, str(array.dtype), codecs) != expected:
        raise FileFormatError(
            f"{header}: edited or damaged (the array does not match its description). It was left untouched; restore "
            "it from a copy."
        )
    store = Store(path, found)
    store.read_finished()
    return store
