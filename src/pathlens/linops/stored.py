"""Kernels on disk: `prepare` describes a kernel for ``K.to_zarr``, `from_zarr` opens a stored kernel."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import OptionError
from pathlens.indexing import Index, as_index, as_tensor, same_index
from pathlens.linops import backends, parts
from pathlens.linops.nodes import Node
from pathlens.linops.operator import GramSum, KernelOperator, expression
from pathlens.stores import MatrixDescription, Store, open_store
from pathlens.stores.executors import default_workers
from pathlens.stores.layout import import_zarr

BLOCK_SECONDS = 3.0  # per block: much more than the overhead of a task, and little is lost if a worker dies
LEAST_SECONDS = 0.25  # blocks are not made smaller than this for load balance
BLOCKS_PER_WORKER = 6  # so that few workers are idle at the end
MOST_EDGE = 8192
_COPIES = 4  # blocks in memory at once: the result, its padded form, its transpose, and tiles
_SAMPLE = 24  # rows and columns of the sample that identifies a kernel that cannot be hashed


# --- writing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelBlocks:
    """A kernel as a `BlockSource`."""

    node: Node
    dtype: torch.dtype
    device: torch.device
    backend: str
    max_bytes: int

    def block(self, rows: range, cols: range) -> np.ndarray:
        """The entries on some rows and columns."""
        node = parts.restrict(self.node, rows, cols)
        kernel = GramSum(node, self.dtype, self.device, max_bytes=self.max_bytes, backend=self.backend)
        values: np.ndarray = kernel.dense().cpu().numpy()
        return values

    def in_files(self, folder: Path) -> KernelBlocks:
        """The same with resident factors in files."""
        return replace(self, node=parts.in_files(self.node, folder))


def prepare(
    kernel: KernelOperator, block: int | None, workers: int | None, max_bytes: int | None
) -> tuple[KernelBlocks, MatrixDescription, Callable[[], tuple[int, float]]]:
    """A kernel's blocks, its description, and a function for the edge of a block and its seconds, for `write_store`."""
    import_zarr()
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise OptionError(f"to_zarr: block must be a number of rows, at least 1, got {block!r}.")
    count = workers or default_workers()
    each = resolve_budget(kernel.max_bytes if max_bytes is None else max_bytes, kernel.device)
    if max_bytes is None:
        each = max(each // count, 1)
    root = expression(kernel)
    description = MatrixDescription(
        name=kernel.name,
        formula=root.formula(),
        shape=kernel.shape,
        dtype=str(kernel.dtype).removeprefix("torch."),
        symmetric=kernel.symmetric,
        fingerprint=parts.digest(root),
        sample=_sample(kernel) if parts.is_opaque(root) else (),
    )
    backend = backends.choose(kernel.backend, root, kernel.device, kernel.dtype)
    source = KernelBlocks(root, kernel.dtype, kernel.device, backend, each)
    return source, description, lambda: (block, 0.0) if block is not None else _choose_edge(kernel, count, each)


def _sample(kernel: KernelOperator) -> tuple[float, ...]:
    """Entries on evenly spaced rows and columns."""
    rows, cols = (
        torch.linspace(0, n - 1, min(n, _SAMPLE), device=kernel.device, dtype=torch.float64).round().long()
        for n in kernel.shape
    )
    return tuple(kernel.tile(rows, cols).double().flatten().tolist())


def _choose_edge(kernel: KernelOperator, workers: int, max_bytes: int) -> tuple[int, float]:
    """The edge of a block and its seconds: a few seconds, within the memory, and enough blocks for all workers."""
    n, m = kernel.shape
    cost = _seconds_per_entry(kernel)
    by_time = math.sqrt(BLOCK_SECONDS / cost)
    pieces = BLOCKS_PER_WORKER * workers * (2 if kernel.symmetric else 1)
    by_balance = max(math.sqrt(n * m / pieces), math.sqrt(LEAST_SECONDS / cost))
    by_memory = math.sqrt(max_bytes / (_COPIES * kernel.dtype.itemsize))
    edge = max(int(min(by_time, by_balance, by_memory, MOST_EDGE, max(n, m))), 1)
    return edge, cost * edge * edge


def _seconds_per_entry(kernel: KernelOperator) -> float:
    """Seconds per entry, measured on growing corners of the kernel off the diagonal."""
    n, m = kernel.shape
    rows, cols = (torch.arange(size, device=kernel.device) for size in (n, m))
    kernel.tile(rows[:1], cols[-1:])  # imports and compiles the backend
    edge = 64
    while True:
        a, b = min(edge, n), min(edge, m)
        start = time.perf_counter()
        kernel.tile(rows[:a], cols[m - b :])
        seconds = time.perf_counter() - start
        if seconds > 0.05 or edge >= min(max(n, m), 1024):
            return max(seconds, 1e-9) / (a * b)
        edge *= 2


# --- reading ---------------------------------------------------------------------------------------------------


class StoredKernel(KernelOperator):
    """A kernel on disk, as `from_zarr` returns it: an operator whose tiles are read from files.

    K @ V, solvers and slices read block by block within the memory budget; of a symmetric kernel only the upper half
    is read.

    Attributes
    ----------
    path
        Folder of the store.
    description
        Name, shape, dtype and blocks of the array.
    """

    def __init__(self, store: Store, max_bytes: int | None = None) -> None:
        self._store, self.max_bytes = store, max_bytes
        self.path, self.description = store.path, store.description
        self._name, self.shape = self.description.name, self.description.shape
        self.dtype = torch.float32 if self.description.dtype == "float32" else torch.float64
        self.device, self.symmetric = torch.device("cpu"), self.description.symmetric
        self._known_diagonal: Tensor | None = None

    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows and columns given as slices or arrays, (a, b), read from disk."""
        n, m = self.shape
        a, b = self.description.block
        index, columns = as_index(rows, n, "rows"), as_index(cols, m, "columns")
        out = np.empty((len(index), len(columns)), self._store.numpy_dtype)
        across = list(_by_block(columns, b))
        for i, place, inside in _by_block(index, a):
            strip = out[place] if isinstance(place, slice) else np.empty((len(place), len(columns)), out.dtype)
            for j, at, within in across:
                strip[:, at] = self._store.map_block(i, j)[inside][:, within]
            if not isinstance(place, slice):
                out[place] = strip
        return torch.from_numpy(out)

    def diagonal(self) -> Tensor:
        """K_ii, (n,), read once."""
        n = self._square("diagonal")
        if self._known_diagonal is None:  # blocks of a square kernel are square
            parts = [np.array(self._store.map_block(i, i).diagonal()) for i in range(self.description.grid[0])]
            self._known_diagonal = torch.from_numpy(np.concatenate(parts)[:n])
        return self._known_diagonal

    def verify(self) -> None:
        """Read every block and compare it with its checksum; raises a `FileFormatError` that names damaged blocks.

        Examples
        --------
        >>> import tempfile
        >>> from pathlens.linops import GramSum, from_zarr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = GramSum.from_factors([[("x", torch.eye(3))]]).to_zarr(f"{folder}/k", client=False)
        ...     from_zarr(f"{folder}/k").verify()
        """
        self._store.check_complete(verify=True)

    def __repr__(self) -> str:
        (rows, cols), (a, b) = self.description.grid, self.description.block
        return (
            f"{super().__repr__()}\n  disk  : {self.path}, {rows} × {cols} blocks of {a} × {b}, "
            f"{human_bytes(self._store.bytes)}; written as {self.description.formula}"
        )


def _by_block(index: Index, edge: int) -> Iterator[tuple[int, Any, Any]]:
    """(block, positions in the result, rows inside the block) for every block that an index needs."""
    if isinstance(index, Tensor):  # usually consecutive rows, which are read as slices
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
    """Open a kernel that `KernelOperator.to_zarr` wrote; its entries are read on demand.

    Parameters
    ----------
    path
        Folder of the store.
    verify
        Read every block and compare it with its checksum. By default only the sizes of the files are checked.
    max_bytes
        Memory budget, as for every operator.

    Raises
    ------
    FileFormatError
        The array does not exist, has another format or version, is damaged, or is incomplete.

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
    store = open_store(Path(path))
    store.check_complete(verify)
    return StoredKernel(store, max_bytes)
