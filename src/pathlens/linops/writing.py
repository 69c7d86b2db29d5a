"""Writing a kernel to disk block by block, here or on a cluster, so that nothing finished is ever computed twice.

A block is computed, written under a temporary name, forced to disk and renamed by a worker; then this process records
it with its checksum. Whatever dies, calling again does the rest. The layout is in ``store``, workers in ``cluster``.
May import the errors, files and linops.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import FileFormatError, OptionError, PathlensError, StoreError, StoreWarning
from pathlens.files import write_atomically
from pathlens.linops import backends
from pathlens.linops.cluster import TIMEOUT, Client, crew, default_workers
from pathlens.linops.operator import GramSum, KernelOperator, expression
from pathlens.linops.parts import Parts, take_apart
from pathlens.linops.store import Description, Layout, create, import_zarr, open_layout
from pathlens.progress import ProgressBar

BLOCK_SECONDS = 3.0  # work in a block: much more than a task costs Dask, little enough to lose
LEAST_SECONDS = 0.25  # below this a block is not made smaller for the sake of balance
BLOCKS_PER_WORKER = 6  # so that the last blocks do not leave workers idle
MOST_EDGE = 8192
_COPIES = 4  # blocks in memory at once: the result, its padded form, its mirror image, and tiles
_SAMPLE = 24  # rows and columns of the sample that stands for what cannot be hashed


@dataclass(frozen=True)
class StoreReport:
    """What `to_zarr` did.

    Attributes
    ----------
    path
        Folder of the store.
    blocks, computed, kept
        Blocks of the kernel, those computed now, and those found finished.
    repaired
        Blocks that were recorded but damaged, and were computed again.
    block
        Rows and columns of a block.
    bytes
        On disk.
    seconds
        Of this call.
    place
        Where blocks were computed.
    """

    path: Path
    blocks: int
    computed: int
    kept: int
    repaired: tuple[tuple[int, int], ...]
    block: tuple[int, int]
    bytes: int
    seconds: float
    place: str

    def __repr__(self) -> str:
        repaired = f", {len(self.repaired)} of them repaired" if self.repaired else ""
        return (
            f"StoreReport({self.path}: {self.blocks} blocks of {self.block[0]} × {self.block[1]}, "
            f"{human_bytes(self.bytes)}; {self.computed} computed{repaired}, {self.kept} found finished; "
            f"{self.seconds:.1f} s in {self.place})"
        )


# --- one block, in a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker needs to compute any block."""

    layout: Layout
    run: str
    parts: Parts
    dtype: torch.dtype
    device: torch.device
    backend: str
    max_bytes: int

    def check_run(self) -> None:
        """Refuse to write for a run that was given up: another may be under way."""
        try:
            current = self.layout.own("run").read_text()
        except FileNotFoundError:
            raise StoreError(
                f"{self.layout.path} is not there for the worker on {socket.gethostname()}. Write to a "
                f"folder that this machine and all workers share, or use client='local'."
            ) from None
        if current != self.run:
            raise StoreError(f"{self.layout.path}: another run has taken over. This worker gives up.")


def write_block(job: Job, i: int, j: int) -> tuple[str, ...]:
    """Compute a block and put it on disk, with its mirror image where the kernel is symmetric; returns checksums."""
    job.check_run()
    description = job.layout.description
    rows, cols = description.ranges()
    node = job.parts.block(rows[i], cols[j])
    values = GramSum(node, job.dtype, job.device, max_bytes=job.max_bytes, backend=job.backend).dense().cpu()
    checksums = []
    for file, content in zip(job.layout.files(i, j), (values, values.T)):
        data = _chunk(content, description.block)
        try:
            write_atomically(file, data, job.check_run)
        except OSError as error:
            raise error if isinstance(error, PathlensError) else disk_error(file, error) from error
        checksums.append(hashlib.sha256(data).hexdigest())
    return tuple(checksums)


def _chunk(values: torch.Tensor, shape: tuple[int, int]) -> memoryview:
    """A block as Zarr stores it: row by row, least byte first, blocks at the edge padded with NaN."""
    if values.shape != shape:
        padded = values.new_full(shape, math.nan)
        padded[: values.shape[0], : values.shape[1]] = values
        values = padded
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).data.cast("B")


def disk_error(path: Path, error: OSError) -> StoreError:
    """What went wrong on disk, with a remedy."""
    remedies = {
        errno.ENOSPC: "The disk is full: free some space, or write to another disk.",
        errno.EDQUOT: "The quota is used up: free some space, or write to another disk.",
        errno.EROFS: "The file system is read-only: choose another folder.",
        errno.EACCES: "The folder may not be written by this user: choose another, or change its permissions.",
        errno.EPERM: "The folder may not be written by this user: choose another, or change its permissions.",
    }
    remedy = remedies.get(error.errno or 0, "Check the disk and the path.")
    return StoreError(f"{path} cannot be written: {error.strerror or error}. {remedy}")


# --- the whole kernel ------------------------------------------------------------------------------------------


def to_zarr(
    kernel: KernelOperator,
    path: str | os.PathLike[str],
    *,
    client: Client = "local",
    workers: int | None = None,
    block: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    max_bytes: int | None = None,
    timeout: float = TIMEOUT,
) -> StoreReport:
    """See `KernelOperator.to_zarr`."""
    start = time.perf_counter()
    import_zarr()
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise OptionError(f"to_zarr: block must be a number of rows, at least 1, got {block!r}.")
    count = 1 if client is False else workers or default_workers()
    each = (
        resolve_budget(max_bytes, kernel.device)
        if max_bytes is not None
        else (max(resolve_budget(kernel.max_bytes, kernel.device) // count, 1))
    )
    place = Path(path)
    parts = take_apart(expression(kernel))
    identity = _identify(kernel, parts)
    try:
        layout = _open_or_create(place, kernel, identity, block, count, each, overwrite)
        with _alone(layout):
            report = _finish(kernel, layout, parts, client, workers, each, verify, timeout)
    except OSError as error:
        raise error if isinstance(error, PathlensError) else disk_error(place, error) from error
    return replace(report, seconds=time.perf_counter() - start)


def _identify(kernel: KernelOperator, parts: Parts) -> Description:
    """The description of a kernel but for its blocks."""
    sample: tuple[float, ...] = ()
    if parts.opaque:
        rows, cols = (_spread(size, _SAMPLE, kernel.device) for size in kernel.shape)
        sample = tuple(kernel.tile(rows, cols).double().flatten().tolist())
    return Description(
        kernel.name,
        expression(kernel).formula(),
        kernel.shape,
        str(kernel.dtype).split(".")[-1],
        kernel.symmetric,
        (1, 1),
        parts.digest(),
        sample,
    )


def _spread(size: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, count), device=device, dtype=torch.float64).round().long()


def _difference(stored: Description, mine: Description) -> str | None:
    """How the kernel in a store differs from one to be written; None where it is the same."""
    for what in ("shape", "dtype", "symmetric"):
        if getattr(stored, what) != getattr(mine, what):
            return f"its {what} is {getattr(stored, what)}, this one's {getattr(mine, what)}"
    if stored.fingerprint != mine.fingerprint:
        return f"its fingerprint is {stored.fingerprint[:12]}…, this one's {mine.fingerprint[:12]}…"
    a, b = np.array(stored.sample), np.array(mine.sample)
    limit = (1e-4 if mine.dtype == "float32" else 1e-9) * np.abs(b).max(initial=0.0)
    if a.shape != b.shape or np.abs(a - b).max(initial=0.0) > limit:
        return "sampled entries differ"
    return None


def _open_or_create(
    path: Path,
    kernel: KernelOperator,
    identity: Description,
    block: int | None,
    workers: int,
    max_bytes: int,
    overwrite: bool,
) -> Layout:
    if path.exists() and overwrite:
        _remove(path)
    if not path.exists():
        edge, seconds = (block, 0.0) if block is not None else _choose_edge(kernel, workers, max_bytes)
        n, m = kernel.shape
        shape = tuple(math.ceil(size / math.ceil(size / edge)) for size in (n, m))  # blocks of nearly equal size
        chosen = replace(identity, block=(shape[0], shape[1]), seconds_per_block=float(f"{seconds:.3g}"))
        return create(path, chosen)
    layout = open_layout(path)
    different = _difference(layout.description, identity)
    if different is not None:
        raise StoreError(
            f"{path} holds another kernel, {layout.description.name!r}: {different}. Nothing was changed. "
            f"Choose another path, or pass overwrite=True to lose it."
        )
    return layout


def _remove(path: Path) -> None:
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} exists and is not a Zarr array, so that it is not overwritten. Choose another path.")
    with contextlib.suppress(FileFormatError), _alone(open_layout(path)):
        pass  # somebody may be writing there
    away = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    os.replace(path, away)
    shutil.rmtree(away)


def _choose_edge(kernel: KernelOperator, workers: int, max_bytes: int) -> tuple[int, float]:
    """The edge of blocks that take some seconds, fit in memory and are enough for all workers; and their seconds."""
    n, m = kernel.shape
    cost = _seconds_per_entry(kernel)
    by_time = math.sqrt(BLOCK_SECONDS / cost)
    pieces = BLOCKS_PER_WORKER * workers * (2 if kernel.symmetric else 1)
    by_balance = max(math.sqrt(n * m / pieces), math.sqrt(LEAST_SECONDS / cost))
    by_memory = math.sqrt(max_bytes / (_COPIES * kernel.dtype.itemsize))
    edge = max(int(min(by_time, by_balance, by_memory, MOST_EDGE, max(n, m))), 1)
    return edge, cost * edge * edge


def _seconds_per_entry(kernel: KernelOperator) -> float:
    """Measured on growing corners of the kernel, off the diagonal."""
    n, m = kernel.shape
    rows, cols = (torch.arange(size, device=kernel.device) for size in (n, m))
    kernel.tile(rows[:1], cols[-1:])  # loads and compiles what is needed
    edge = 64
    while True:
        a, b = min(edge, n), min(edge, m)
        start = time.perf_counter()
        kernel.tile(rows[:a], cols[m - b :])
        seconds = time.perf_counter() - start
        if seconds > 0.05 or edge >= min(max(n, m), 1024):
            return max(seconds, 1e-9) / (a * b)
        edge *= 2


@contextlib.contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """Hold the store's lock, which the system releases however this process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(layout.own("lock"), "a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace") or "unknown"
            raise StoreError(
                f"{layout.path} is being written by another process ({holder}). Wait for it, or end it "
                f"and call again: what it finished stays."
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the name is only for people
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _finish(
    kernel: KernelOperator,
    layout: Layout,
    parts: Parts,
    client: Client,
    workers: int | None,
    max_bytes: int,
    verify: bool,
    timeout: float,
) -> StoreReport:
    """Compute what is missing."""
    layout.read_finished()
    for stale in (*layout.path.glob("c/*/.*.part"), *layout.own("finished").glob(".*.part")):
        stale.unlink(missing_ok=True)
    for old in layout.own().glob("factors-*"):
        shutil.rmtree(old, ignore_errors=True)
    if layout.damaged_rows:
        warnings.warn(
            f"{layout.path}: the record {', '.join(layout.damaged_rows)} is damaged; its blocks are computed again.",
            StoreWarning,
            stacklevel=4,
        )
    repaired = tuple(layout.unsound(verify))
    for pair in repaired:
        layout.forget(*pair)
    if repaired:
        warnings.warn(
            f"{layout.path}: {len(repaired)} finished blocks are missing, truncated or do not have their "
            f"checksum, such as {repaired[0]}; they are computed again.",
            StoreWarning,
            stacklevel=4,
        )
    kept, missing = len(layout.finished), layout.missing
    rows, cols = layout.description.ranges()
    report = StoreReport(
        layout.path,
        kept + len(missing),
        0,
        kept,
        repaired,
        layout.description.block,
        len(rows) * len(cols) * layout.chunk_bytes,
        0.0,
        "nothing",
    )
    if not missing:
        return report
    _check_space(layout, missing)
    run = secrets.token_hex(8)
    write_atomically(layout.own("run"), run.encode())
    backend = backends.choose(kernel.backend, expression(kernel), kernel.device, kernel.dtype)
    with crew(client, workers, timeout) as team:
        folder = layout.own(f"factors-{run}")
        try:
            shared = parts if client is False else parts.shipped(folder.absolute())
            absolute = Layout(layout.path.absolute(), layout.description)
            job = Job(absolute, run, shared, kernel.dtype, kernel.device, backend, max_bytes)
            _compute(layout, team.map(write_block, job, missing), missing)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return replace(report, computed=len(missing), place=team.place)


def _check_space(layout: Layout, missing: list[tuple[int, int]]) -> None:
    needed = sum(len(layout.files(*pair)) for pair in missing) * layout.chunk_bytes
    free = shutil.disk_usage(layout.path).free
    if needed > free:
        raise StoreError(
            f"{layout.path}: the {len(missing)} blocks still to be written take {human_bytes(needed)}, "
            f"the disk has {human_bytes(free)} left. Free some space, or write to another disk."
        )


def _compute(layout: Layout, results: Iterator[Any], missing: list[tuple[int, int]]) -> None:
    rows, cols = layout.description.ranges()

    def entries(i: int, j: int) -> int:
        return len(rows[i]) * len(cols[j]) * len(layout.files(i, j))

    with ProgressBar(f"writing {layout.path.name}, entries", sum(entries(*pair) for pair in missing)) as meter:
        try:
            for (i, j), checksums in results:
                layout.record(i, j, checksums)
                meter.advance(entries(i, j))
        except PathlensError as error:
            total = len(list(layout.description.pairs()))
            have = len(layout.finished)
            error.args = (f"{error} {have} of {total} blocks are finished and stay.",)
            raise
