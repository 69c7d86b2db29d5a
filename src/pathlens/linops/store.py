"""Kernels on disk: a Zarr array whose chunks are blocks, a sealed description, and a checksum for every finished block.

Reading and the layout live here, writing in ``writing``. A chunk is uncompressed, so that tiles are read by mapping the
file instead of loading whole chunks. Nothing is ever unpickled. May import the errors, files and linops; zarr is loaded
when first used.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import blocks, human_bytes
from pathlens.errors import FileFormatError, need_extra
from pathlens.files import parse_json, sealed, sync_folder, unsealed, write_atomically
from pathlens.indexing import Index, as_index, as_tensor, same_index
from pathlens.linops.operator import KernelOperator
from pathlens.progress import ProgressBar

FORMAT, VERSION = "pathlens.kernel", 1
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<f4"), torch.float64: np.dtype("<f8")}
_AGAIN = "Call K.to_zarr(path) with the same kernel: it finishes and repairs, and keeps what is sound."


def import_zarr() -> Any:
    """The zarr module, or the error that names the extra."""
    try:
        import zarr
    except ImportError as error:
        raise need_extra("scale", "zarr", "a kernel on disk") from error
    return zarr


# --- layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """What a store says of its kernel; kept as attributes of the Zarr array.

    Attributes
    ----------
    name, formula
        For people.
    shape, dtype, symmetric
        Of the kernel.
    block
        Rows and columns of a block, which is one chunk.
    fingerprint
        SHA-256 of the expression and its factors.
    sample
        For kernels that are known only by what they return: the entries on `sample_index`, which stand in for a
        checksum.
    seconds_per_block
        As estimated when the size of the blocks was chosen; 0 where the user chose it.
    """

    name: str
    formula: str
    shape: tuple[int, int]
    dtype: str
    symmetric: bool
    block: tuple[int, int]
    fingerprint: str
    sample: tuple[float, ...] = ()
    seconds_per_block: float = 0.0

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch names it."""
        return torch.float32 if self.dtype == "float32" else torch.float64

    def ranges(self) -> tuple[list[range], list[range]]:
        """Rows and columns of the blocks."""
        return blocks(self.shape[0], self.block[0]), blocks(self.shape[1], self.block[1])

    @property
    def grid(self) -> tuple[int, int]:
        """How many rows and columns of blocks there are."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The blocks that are computed: all, or those on and above the diagonal of a symmetric kernel."""
        rows, cols = self.grid
        for i in range(rows):
            for j in range(i if self.symmetric else 0, cols):
                yield i, j

    @property
    def blocks(self) -> int:
        """How many blocks are computed, without going through them."""
        rows, cols = self.grid
        return rows * (rows + 1) // 2 if self.symmetric else rows * cols

    def has(self, i: int, j: int) -> bool:
        """Whether a block is one of those."""
        rows, cols = self.grid
        return (i if self.symmetric else 0) <= j < cols and 0 <= i < rows


@dataclass
class Layout:
    """Where things lie in the folder of a store, and what is recorded there.

    Attributes
    ----------
    path
        The folder: ``zarr.json`` and the chunks ``c/i/j`` are the Zarr array, ``pathlens/`` is ours.
    description
        Of the kernel.
    finished
        (i, j) → checksums of the chunk and, where symmetric, of its mirror image.
    damaged_rows
        Rows of blocks whose record is damaged: nothing is known of them.
    """

    path: Path
    description: Description
    finished: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    damaged_rows: list[str] = field(default_factory=list)

    def chunk(self, i: int, j: int) -> Path:
        """The file of a chunk."""
        return self.path / "c" / str(i) / str(j)

    def own(self, *names: str) -> Path:
        """A file of ours inside the store."""
        return self.path.joinpath("pathlens", *names)

    @property
    def chunk_bytes(self) -> int:
        """Size of every chunk file; those at the edge are padded, as Zarr wants them."""
        a, b = self.description.block
        return a * b * _DTYPES[self.description.torch_dtype].itemsize

    def files(self, i: int, j: int) -> list[Path]:
        """The chunk of a block and, off the diagonal of a symmetric kernel, its mirror image."""
        mirrored = self.description.symmetric and i != j
        return [self.chunk(i, j), self.chunk(j, i)] if mirrored else [self.chunk(i, j)]

    def record(self, i: int, j: int, checksums: tuple[str, ...]) -> None:
        """Note that a block is on disk. One small file per row of blocks: its size does not grow with their number."""
        self.finished[i, j] = checksums
        self._write_row(i)

    def forget(self, i: int, j: int) -> None:
        """Take a damaged block off the record."""
        del self.finished[i, j]
        self._write_row(i)

    def _write_row(self, i: int) -> None:
        entries = {str(j): list(sums) for (row, j), sums in sorted(self.finished.items()) if row == i}
        document = sealed({"format": f"{FORMAT}-row", "version": VERSION, "row": i, "blocks": entries})
        write_atomically(self.own("finished", f"{i}.json"), json.dumps(document, indent=1).encode())

    def read_finished(self) -> None:
        """Read what is recorded."""
        self.finished, self.damaged_rows = {}, []
        # the files that are there, not the rows that there should be: a description may claim any number of them
        for file in sorted(self.own("finished").glob("*.json")):
            if not file.stem.isdecimal() or not int(file.stem) < self.description.grid[0]:
                continue
            i = int(file.stem)
            try:
                document = unsealed(parse_json(file.read_bytes()))
                if document["format"] != f"{FORMAT}-row" or document["row"] != i:
                    raise ValueError("it belongs elsewhere")
                entries = {(i, int(j)): tuple(map(str, sums)) for j, sums in document["blocks"].items()}
                if any(len(sums) != len(self.files(*key)) for key, sums in entries.items()):
                    raise ValueError("a block has a checksum for each of its files")
            except (ValueError, KeyError, AttributeError, TypeError):
                self.damaged_rows.append(file.name)
                continue
            self.finished |= {key: sums for key, sums in entries.items() if self.description.has(*key)}

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Blocks that are not recorded."""
        return [pair for pair in self.description.pairs() if pair not in self.finished]

    def unsound(self, verify: bool) -> list[tuple[int, int]]:
        """Recorded blocks whose files are not there in full; with ``verify`` also those with another checksum.

        Verifying reads everything, at the speed of the disk.
        """

        def sound(pair: tuple[int, int]) -> bool:
            for file, checksum in zip(self.files(*pair), self.finished[pair], strict=True):
                try:
                    if file.stat().st_size != self.chunk_bytes or (verify and checksum_of(file) != checksum):
                        return False
                except OSError:
                    return False
            return True

        pairs = sorted(self.finished)
        bad = []
        with ThreadPoolExecutor(4) as threads, ProgressBar("checking blocks", len(pairs)) as meter:
            for pair, good in zip(pairs, threads.map(sound, pairs)):
                meter.advance()
                if not good:
                    bad.append(pair)
        return bad


def checksum_of(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def create(path: Path, description: Description) -> Layout:
    """Make an empty store: built under a temporary name, then renamed, so that there is never half of one."""
    zarr = import_zarr()
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    content = {"format": FORMAT, "version": VERSION, **asdict(description)}
    zarr.create_array(
        str(building),
        shape=description.shape,
        chunks=description.block,
        dtype=description.dtype,
        zarr_format=3,
        compressors=None,
        filters=None,
        fill_value=float("nan"),
        attributes={"pathlens": sealed(content)},
    )
    layout = Layout(building, description)
    layout.own("finished").mkdir(parents=True)
    rows, _ = description.ranges()
    for i in range(len(rows)):
        (building / "c" / str(i)).mkdir(parents=True)
    sync_folder(building)
    os.replace(building, path)
    sync_folder(path.parent)
    return Layout(path, description)


def open_layout(path: Path) -> Layout:
    """The layout of the store at a path; a clear error where there is none, or one that cannot be trusted."""
    zarr = import_zarr()
    if not (path / "zarr.json").is_file():
        raise FileFormatError(f"{path}: no Zarr array lies there. Is this the path that K.to_zarr was given?")
    try:
        array = zarr.open_array(str(path), mode="r")
        kept = dict(array.attrs)
    except Exception as error:  # zarr raises many kinds for a damaged zarr.json
        raise FileFormatError(
            f"{path / 'zarr.json'}: not readable as a Zarr array ({type(error).__name__}: {error}). "
            f"It was left untouched; restore it from a copy."
        ) from error
    document = kept.get("pathlens")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f"{path}: a Zarr array, but not a kernel that Pathlens wrote. Open it with zarr.")
    if document.get("version") != VERSION:
        raise FileFormatError(
            f"{path}: format version {document.get('version')!r}, this Pathlens reads {VERSION}. Use "
            f"the Pathlens version that wrote it."
        )
    try:
        content = unsealed(document)
        del content["format"], content["version"]
        found = Description(**content | {key: tuple(content[key]) for key in ("shape", "block", "sample")})
        codecs = [type(codec).__name__ for codec in array.metadata.codecs]
        if (array.shape, array.chunks, str(array.dtype), codecs) != (
            found.shape,
            found.block,
            found.dtype,
            ["BytesCodec"],
        ):
            raise ValueError("the array is not the one described")
        if min(*found.shape, *found.block) < 1:
            raise ValueError("a kernel and its blocks have rows and columns")
        if found.symmetric and (found.shape[0] != found.shape[1] or found.block[0] != found.block[1]):
            raise ValueError("a symmetric kernel is square, and its blocks are")
    except (ValueError, TypeError, KeyError) as error:
        raise FileFormatError(
            f"{path / 'zarr.json'}: edited or damaged ({error}). It was left untouched; restore it from a copy."
        ) from error
    layout = Layout(path, found)
    layout.read_finished()
    return layout


# --- reading ---------------------------------------------------------------------------------------------------


class StoredKernel(KernelOperator):
    """A kernel on disk, as `from_zarr` returns it: everything an operator can do, tile by tile from the files.

    K @ V, solvers and slices stream through the blocks within the memory budget; a symmetric kernel is read by its
    upper half alone.
    """

    def __init__(self, layout: Layout, max_bytes: int | None = None) -> None:
        self._layout, self.max_bytes = layout, max_bytes
        self._name = layout.description.name
        self._known_diagonal: Tensor | None = None

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._layout.path

    @property
    def description(self) -> Description:
        """What the store says of itself."""
        return self._layout.description

    @property
    def shape(self) -> tuple[int, int]:
        return self.description.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.description.torch_dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def symmetric(self) -> bool:
        return self.description.symmetric

    def _mapped(self, i: int, j: int) -> np.ndarray:
        file = self._layout.chunk(i, j)
        try:
            return np.memmap(file, _DTYPES[self.dtype], "r", shape=self.description.block)
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{file}: block ({i}, {j}) is missing or truncated ({error}). {_AGAIN}") from error

    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows and columns given as slices or arrays, (a, b), read from disk."""
        n, m = self.shape
        a, b = self.description.block
        index, columns = as_index(rows, n, "rows"), as_index(cols, m, "columns")
        out = np.empty((len(index), len(columns)), _DTYPES[self.dtype])
        across = list(_by_block(columns, b))
        for i, place, inside in _by_block(index, a):
            strip = out[place] if isinstance(place, slice) else np.empty((len(place), len(columns)), out.dtype)
            for j, at, within in across:
                strip[:, at] = self._mapped(i, j)[inside][:, within]
            if not isinstance(place, slice):
                out[place] = strip
        return torch.from_numpy(out)

    def diagonal(self) -> Tensor:
        """K_ii, (n,), read once."""
        n = self._square("diagonal")
        if self._known_diagonal is None:
            edge = self.description.block[0]  # blocks of a square kernel are square
            parts = [np.array(self._mapped(i, i).diagonal()) for i in range(-(-n // edge))]
            self._known_diagonal = torch.from_numpy(np.concatenate(parts)[:n])
        return self._known_diagonal

    def verify(self) -> None:
        """Read every block and compare it with its checksum; a `FileFormatError` names those that are damaged.

        Examples
        --------
        >>> import tempfile
        >>> from pathlens.linops import GramSum, from_zarr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = GramSum.from_factors([[("x", torch.eye(3))]]).to_zarr(f"{folder}/k", client=False)
        ...     from_zarr(f"{folder}/k").verify()
        """
        bad = self._layout.unsound(verify=True)
        if bad:
            raise FileFormatError(
                f"{self.path}: {len(bad)} of {len(self._layout.finished)} blocks are damaged: "
                f"{', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''}. {_AGAIN}"
            )

    def __repr__(self) -> str:
        a, b = self.description.block
        rows, cols = self.description.ranges()
        size = human_bytes(len(rows) * len(cols) * self._layout.chunk_bytes)
        return (
            f"{super().__repr__()}\n  disk  : {self.path}, {len(rows)} × {len(cols)} blocks of {a} × {b}, {size}; "
            f"written as {self.description.formula}"
        )


def _by_block(index: Index, edge: int) -> Iterator[tuple[int, Any, Any]]:
    """(block, places in the result, rows inside the block) for every block that an index touches."""
    if isinstance(index, Tensor):  # most that come as tensors are runs, which are read as slices
        run = range(int(index[0]), int(index[0]) + len(index))
        index = run if same_index(index, run) else index
    if isinstance(index, range) and index.step == 1:
        for i in range(index.start // edge, (index.stop - 1) // edge + 1):
            lo, hi = max(index.start, i * edge), min(index.stop, (i + 1) * edge)
            yield i, slice(lo - index.start, hi - index.start), slice(lo - i * edge, hi - i * edge)
        return
    values = as_tensor(index, torch.device("cpu")).numpy()
    owner = values // edge
    for i in np.unique(owner).tolist():
        place = np.flatnonzero(owner == i)
        yield i, place, values[place] - i * edge


def from_zarr(path: str | os.PathLike[str], *, verify: bool = False, max_bytes: int | None = None) -> StoredKernel:
    """A kernel that `KernelOperator.to_zarr` wrote, as an operator; numbers are read when they are needed.

    Parameters
    ----------
    path
        Folder of the store.
    verify
        Read every block now and compare it with its checksum. Without it only the sizes of the files are checked.
    max_bytes
        Memory budget, as of every operator.

    Raises
    ------
    FileFormatError
        No store there, one of another format or version, damaged, or not finished.

    Examples
    --------
    >>> import tempfile
    >>> from pathlens.linops import GramSum
    >>> K = GramSum.from_factors([[("x", torch.tensor([[1.0], [2.0], [3.0]]))]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = K.to_zarr(f"{folder}/k.zarr", client=False)
    ...     from_zarr(f"{folder}/k.zarr") @ torch.ones(3)
    tensor([ 6., 12., 18.])
    """
    layout = open_layout(Path(path))
    if layout.damaged_rows:
        raise FileFormatError(
            f"{layout.own('finished', layout.damaged_rows[0])}: the record of finished blocks is damaged. {_AGAIN}"
        )
    finished, total = len(layout.finished), layout.description.blocks
    if finished < total:
        raise FileFormatError(f"{path}: {finished} of {total} blocks are finished. {_AGAIN}")
    kernel = StoredKernel(layout, max_bytes)
    if verify:
        kernel.verify()
    elif bad := layout.unsound(verify=False):
        raise FileFormatError(f"{path}: block {bad[0]} and {len(bad) - 1} others are missing or truncated. {_AGAIN}")
    return kernel
