"""Write a matrix to disk block by block; an interrupted call is resumed by calling it again.

A worker computes a block, writes it under a temporary name, syncs it to disk and renames it; then this process records
its checksum.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from pathlens.budgets import human_bytes
from pathlens.errors import FileFormatError, PathlensError, StoreError, StoreWarning
from pathlens.files import write_atomically
from pathlens.progress import ProgressBar
from pathlens.stores.executors import TIMEOUT, Client, open_executor
from pathlens.stores.layout import MatrixDescription, Store, create_store, open_store


@dataclass(frozen=True)
class StoreReport:
    """The report of `write_store`.

    Attributes
    ----------
    path
        Folder of the store.
    blocks, computed, kept
        Number of all blocks, of blocks computed by this call, and of blocks that were finished before.
    repaired
        Blocks that were finished but damaged, and were computed again.
    block
        Rows and columns of a block.
    bytes
        Size on disk.
    seconds
        Duration of this call.
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


class BlockSource(Protocol):
    """A matrix that can compute any block; it is pickled for workers."""

    def block(self, rows: range, cols: range) -> np.ndarray:
        """The entries on consecutive rows and columns, shape (len(rows), len(cols))."""

    def in_files(self, folder: Path) -> BlockSource:
        """The same source with its large arrays in files under a folder that all workers can read."""


# --- one block, in a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The data that a worker needs to compute any block."""

    store: Store
    run: str
    source: BlockSource

    def check_run(self) -> None:
        """Raise an error if another call of `write_store` has started in the meantime."""
        try:
            current = self.store.own("run").read_text()
        except FileNotFoundError:
            raise StoreError(
                f"{self.store.path} is not visible to the worker on {socket.gethostname()}. Write to a "
                f"folder that this machine and all workers share, or use client='local'."
            ) from None
        if current != self.run:
            raise StoreError(f"{self.store.path}: another call is writing to this store now. This worker stops.")


def write_block(job: Job, i: int, j: int) -> tuple[str, ...]:
    """Compute and write a block, and its mirror image if the matrix is symmetric; returns their checksums."""
    job.check_run()
    rows, cols = job.store.description.ranges()
    values = job.source.block(rows[i], cols[j])
    checksums = []
    for file, content in zip(job.store.files(i, j), (values, values.T)):
        data = _to_chunk(content, job.store)
        with _disk_errors(file):
            write_atomically(file, data, job.check_run)
        checksums.append(hashlib.sha256(data).hexdigest())
    return tuple(checksums)


def _to_chunk(values: np.ndarray, store: Store) -> memoryview:
    """A block as Zarr stores it: row by row, little-endian, padded with NaN at the edge."""
    if values.shape != store.description.block:
        padded = np.full(store.description.block, math.nan, store.numpy_dtype)
        padded[: values.shape[0], : values.shape[1]] = values
        values = padded
    return np.ascontiguousarray(values, store.numpy_dtype).data.cast("B")


_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or write to another disk.",
    errno.EDQUOT: "The quota is used up: free some space, or write to another disk.",
    errno.EROFS: "The file system is read-only: choose another folder.",
    errno.EACCES: "This user may not write to the folder: choose another, or change its permissions.",
    errno.EPERM: "This user may not write to the folder: choose another, or change its permissions.",
}


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a `StoreError` with a remedy."""
    try:
        yield
    except PathlensError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Check the disk and the path.")
        raise StoreError(f"{path} cannot be written: {error.strerror or error}. {remedy}") from error


# --- the whole matrix ------------------------------------------------------------------------------------------


def write_store(
    path: Path,
    source: BlockSource,
    description: MatrixDescription,
    choose_block: Callable[[], tuple[int, float]],
    *,
    client: Client = "local",
    workers: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    timeout: float = TIMEOUT,
) -> StoreReport:
    """Write a matrix to a store, or resume an interrupted call.

    Parameters
    ----------
    path
        Folder of the store. An existing store of another matrix raises an error.
    source
        Computes the blocks.
    description
        Description of the matrix; the block size is filled in when the store is created.
    choose_block
        Called when the store is created; returns the edge of a block and the estimated seconds to compute one.
    client, workers, timeout
        See `open_executor`.
    verify
        Compare finished blocks with their checksums; damaged ones are computed again, with a `StoreWarning`.
    overwrite
        Delete an existing store first.
    """
    start = time.perf_counter()
    with _disk_errors(path):
        store = _open_or_create(path, description, choose_block, overwrite)
        with write_lock(store):
            repaired = _discard_damaged(store, verify)
            kept, missing = len(store.finished), store.missing
            place = _compute(store, source, missing, client, workers, timeout) if missing else "no worker"
    return StoreReport(
        path=store.path,
        blocks=kept + len(missing),
        computed=len(missing),
        kept=kept,
        repaired=repaired,
        block=store.description.block,
        bytes=store.bytes,
        seconds=time.perf_counter() - start,
        place=place,
    )


def _open_or_create(
    path: Path, description: MatrixDescription, choose_block: Callable[[], tuple[int, float]], overwrite: bool
) -> Store:
    if path.exists() and overwrite:
        _remove(path)
    if not path.exists():
        edge, seconds = choose_block()
        n, m = (math.ceil(size / math.ceil(size / edge)) for size in description.shape)  # blocks of nearly equal size
        return create_store(
            path, msgspec.structs.replace(description, block=(n, m), seconds_per_block=float(f"{seconds:.3g}"))
        )
    store = open_store(path)
    different = store.description.difference(description)
    if different is not None:
        raise StoreError(
            f"{path} holds another matrix, {store.description.name!r}: {different}. Nothing was changed. "
            f"Choose another path, or pass overwrite=True to lose it."
        )
    return store


def _remove(path: Path) -> None:
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} exists and is not a Zarr array, so it is not overwritten. Choose another path.")
    with contextlib.suppress(FileFormatError), write_lock(open_store(path)):
        pass  # raises if another process is writing there
    away = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    os.replace(path, away)
    shutil.rmtree(away)


@contextlib.contextmanager
def write_lock(store: Store) -> Iterator[None]:
    """Hold the store's lock, which the operating system releases when this process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(store.own("lock"), "a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace") or "unknown"
            raise StoreError(
                f"{store.path} is being written by another process ({holder}). Wait for it, or end it "
                f"and call again: its finished blocks are kept."
            ) from None
        with contextlib.suppress(OSError):  # the disk may be full; the file is used only for the message above
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _discard_damaged(store: Store, verify: bool) -> tuple[tuple[int, int], ...]:
    """Remove damaged blocks from the record, and the temporary files of interrupted calls; returns those blocks."""
    store.read_finished()
    for stale in (*store.path.glob("c/*/.*.part"), *store.own("finished").glob(".*.part")):
        stale.unlink(missing_ok=True)
    for old in store.own().glob("arrays-*"):
        shutil.rmtree(old, ignore_errors=True)
    if store.damaged_rows:
        _warn(store, f"the record {', '.join(store.damaged_rows)} is damaged; its blocks are computed again.")
    damaged = tuple(store.find_damaged(verify))
    for pair in damaged:
        store.forget(*pair)
    if damaged:
        _warn(
            store,
            f"{len(damaged)} finished blocks are missing, truncated or do not match their checksum, "
            f"such as {damaged[0]}; they are computed again.",
        )
    return damaged


def _warn(store: Store, message: str) -> None:
    warnings.warn(f"{store.path}: {message}", StoreWarning, stacklevel=6)


def _compute(
    store: Store,
    source: BlockSource,
    missing: list[tuple[int, int]],
    client: Client,
    workers: int | None,
    timeout: float,
) -> str:
    """Compute the missing blocks; returns where they were computed."""
    needed = sum(len(store.files(*pair)) for pair in missing) * store.chunk_bytes
    free = shutil.disk_usage(store.path).free
    if needed > free:
        raise StoreError(
            f"{store.path}: the {len(missing)} blocks still to be written take {human_bytes(needed)}, "
            f"the disk has {human_bytes(free)} left. Free some space, or write to another disk."
        )
    run = secrets.token_hex(8)
    write_atomically(store.own("run"), run.encode())
    with open_executor(client, workers, timeout) as executor:
        folder = store.own(f"arrays-{run}")
        try:
            shared = source if client is False else source.in_files(folder.absolute())
            job = Job(Store(store.path.absolute(), store.description), run, shared)
            _record_finished(store, executor.map(write_block, job, missing), missing)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return executor.place


def _record_finished(store: Store, results: Iterator[Any], missing: list[tuple[int, int]]) -> None:
    rows, cols = store.description.ranges()

    def entries(i: int, j: int) -> int:
        return len(rows[i]) * len(cols[j]) * len(store.files(i, j))

    with ProgressBar(f"writing {store.path.name}, entries", sum(entries(*pair) for pair in missing)) as bar:
        try:
            for (i, j), checksums in results:
                store.record(i, j, checksums)
                bar.advance(entries(i, j))
        except PathlensError as error:
            total, done = store.description.blocks, len(store.finished)
            error.args = (f"{error} {done} of {total} blocks are finished and kept.",)
            raise
