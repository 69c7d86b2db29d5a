"""Files that are there whole or not at all, documents that carry a checksum of themselves, and decoders with bounds.

The decoders read files that somebody else may have made. They raise ValueError for whatever is wrong with one, and
compare what a file declares with what it holds before they allocate memory for it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# --- writing ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: Any, confirm: Callable[[], None] = lambda: None) -> None:
    """Write bytes under a temporary name, fsync, rename, fsync the folder: a crash leaves the old file or the new one.

    ``confirm`` is asked just before the file takes its place, and may raise.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        confirm()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and a rename needs no such help
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Keep other processes that lock the folder out; False where the system or the file system has no such locks.

    The lock is on the folder itself, so no file is left behind, and it ends with the process, however that ends.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:  # some network file systems
            held = False
        yield held
    finally:
        os.close(handle)


# --- documents -------------------------------------------------------------------------------------------------


def parse_json(text: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; a ValueError for what is not JSON, whatever its depth.

    ``constant`` is called with NaN, Infinity and -Infinity, which are numbers without it.

    >>> parse_json("[1, 2.5]")
    [1, 2.5]
    """
    try:
        return json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a checksum of itself.

    >>> unsealed(sealed({"a": 1}))
    {'a': 1}
    """
    plain = json.loads(json.dumps(content))
    return {**plain, "seal": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def unsealed(document: Any) -> dict[str, Any]:
    """What was sealed; a ValueError where its checksum is not that of the content."""
    content = {k: v for k, v in document.items() if k != "seal"} if isinstance(document, dict) else {}
    try:
        agrees = bool(content) and document.get("seal") == sealed(content)["seal"]
    except RecursionError:
        agrees = False
    if not agrees:
        raise ValueError("its content does not have the checksum it carries")
    return content


# --- decoders --------------------------------------------------------------------------------------------------


def gunzip(data: bytes, most: int) -> bytes:
    """What gzipped data holds, at most ``most`` bytes.

    >>> gunzip(gzip.compress(b"abc"), most=3)
    b'abc'
    >>> gunzip(gzip.compress(bytes(10**6)), most=100)
    Traceback (most recent call last):
        ...
    ValueError: it unpacks to more than 100 bytes
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            found = stream.read(most + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(found) > most:
        raise ValueError(f"it unpacks to more than {most} bytes")
    return found


def read_npy(stream: BinaryIO, size: int) -> np.ndarray:
    """The array of an NPY file of ``size`` bytes, which must be what its header declares; never one of objects."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise ValueError(f"NPY version {version} is not known")
        shape, _, dtype = readers[version](stream)
        if dtype.hasobject or dtype.itemsize == 0 or any(k < 0 for k in shape):
            raise ValueError(f"an array of shape {shape} and dtype {dtype} is not read")
        declared = stream.tell() + math.prod(shape) * dtype.itemsize
        if declared != size:
            raise ValueError(f"its header declares {declared} bytes, it has {size}")
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)
    except ValueError:
        raise
    except Exception as error:  # numpy's parser of headers raises many kinds
        raise ValueError(f"not an NPY file ({type(error).__name__}: {error})") from error


def read_npz(data: bytes, most: int, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an NPZ file by name, all or those of ``names``, at most ``most`` bytes together.

    >>> buffer = io.BytesIO()
    >>> np.savez_compressed(buffer, a=np.arange(3))
    >>> read_npz(buffer.getvalue(), most=1000)
    {'a': array([0, 1, 2])}
    >>> read_npz(buffer.getvalue(), most=100)
    Traceback (most recent call last):
        ...
    ValueError: it unpacks to more than 100 bytes
    """
    arrays, left = {}, most
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if names is not None and name not in names:
                    continue
                left -= entry.file_size
                if left < 0:
                    raise ValueError(f"it unpacks to more than {most} bytes")
                # of these two methods alone zipfile unpacks no more than it is asked for
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{entry.filename!r} is packed in a way that NPZ files are not")
                with archive.open(entry) as stream:
                    content = stream.read(entry.file_size)
                arrays[name] = read_npy(io.BytesIO(content), len(content))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, KeyError, zlib.error) as error:
        raise ValueError(f"not an NPZ file ({error})") from error
    return arrays
