"""Atomic writes, JSON documents with a schema and a checksum, and decoders for files of unknown origin.

The decoders raise ValueError for anything wrong with a file, and compare the sizes that it declares with the sizes that
it has before they allocate memory.
"""

from __future__ import annotations

import dataclasses
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
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from pathlens.errors import FileFormatError

FORMAT_VERSION = 1  # of every document

# --- writing ---------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, confirm: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A temporary path that replaces ``path`` on success: a crash leaves the old file or the new one.

    ``confirm`` is called just before the file is renamed, and may raise.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        confirm()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, data: Any, confirm: Callable[[], None] = lambda: None) -> None:
    """Write bytes to a file that is complete or not there; ``confirm`` as in `replacing`."""
    with replacing(path, confirm) as temporary, open(temporary, "xb") as stream:
        stream.write(data)


def file_checksum(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def sync_folder(folder: Path) -> None:
    """Write renames in a folder to disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and a rename needs no such help
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait for a lock on a folder and hold it; False where the system or the file system has no such locks.

    The lock is on the folder itself, so no file is left behind; the system releases it when the process ends.
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


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format"):
    """A JSON document with a format, a version and a checksum.

    A subclass lists the fields and their types, and names its format as ``tag="pathlens.…"``.

    >>> class Point(Document, tag="pathlens.point", frozen=True, kw_only=True):
    ...     x: float
    >>> document = to_json(Point(x=1.5))
    >>> sorted(document)
    ['checksum', 'format', 'version', 'x']
    >>> from_json(document, Point, "point.json")
    Point(version=1, x=1.5)
    >>> from_json({**document, "x": 2.5}, Point, "point.json")
    Traceback (most recent call last):
        ...
    pathlens.errors.FileFormatError: point.json: its content does not match its checksum: it was edited or damaged ...
    """

    version: int = FORMAT_VERSION


D = TypeVar("D", bound=Document)


def parse_json(text: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """Parse a JSON text; raises ValueError if it is not JSON or is nested too deeply.

    ``constant`` is called for NaN, Infinity and -Infinity, which are numbers without it.

    >>> parse_json("[1, 2.5]")
    [1, 2.5]
    """
    try:
        return json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with an entry for its own checksum.

    >>> verify_checksum(with_checksum({"a": 1}))
    {'a': 1}
    """
    plain = json.loads(json.dumps(content, default=_to_dict))
    return {**plain, "checksum": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def verify_checksum(document: Any) -> dict[str, Any]:
    """The content of a document without its checksum; raises ValueError if the two do not match."""
    content = {k: v for k, v in document.items() if k != "checksum"} if isinstance(document, dict) else {}
    try:
        matches = bool(content) and document.get("checksum") == with_checksum(content)["checksum"]
    except RecursionError:
        matches = False
    if not matches:
        raise ValueError("its content does not match its checksum")
    return content


def _to_dict(value: Any) -> dict[str, Any]:
    """The fields of a nested struct or dataclass; a TypeError for anything else."""
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else dataclasses.asdict(value)


def to_json(document: Document) -> dict[str, Any]:
    """A document as JSON values, with its format and checksum."""
    return with_checksum({"format": type(document).__struct_config__.tag, **msgspec.structs.asdict(document)})


def from_json(document: Any, kind: type[D], where: str | Path, error: type[FileFormatError] = FileFormatError) -> D:
    """Check format, version, checksum and fields of a parsed document, and return it with its types.

    Errors name ``where`` it was found.
    """
    tag = str(kind.__struct_config__.tag)
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != tag:
        raise error(f"{where}: expected a {tag} file, found {found!r}. Load it with the class that wrote it.")
    if document.get("version") != FORMAT_VERSION:
        raise error(
            f"{where}: format version {document.get('version')!r}, this Pathlens reads version {FORMAT_VERSION}. "
            "Use the Pathlens version that wrote it."
        )
    try:
        content = verify_checksum(document)
    except ValueError as e:
        raise error(
            f"{where}: {e}: it was edited or damaged after it was written. It was left untouched; restore it "
            "from a copy."
        ) from e
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as e:
        name = tag.removeprefix("pathlens.")
        raise error(f"{where}: the {name} lacks or misstates a field ({e}). Save it again.") from e


def write_document(path: Path, document: Document) -> None:
    """Write a document to a JSON file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_json(document), indent=1).encode())


def read_document(path: Path, kind: type[D], error: type[FileFormatError] = FileFormatError) -> D:
    """Read a document that `write_document` wrote; refuses any file that is damaged or of another kind or version."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as e:
        raise error(f"{path}: no such file. Is this the path it was saved to?") from e
    try:
        document = parse_json(data)
    except ValueError as e:
        raise error(f"{path}: not valid JSON ({e}); it was left untouched. Restore it from a copy.") from e
    return from_json(document, kind, path, error)


# --- decoders --------------------------------------------------------------------------------------------------


def gunzip(data: bytes, most: int) -> bytes:
    """Decompress gzipped data, to at most ``most`` bytes.

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
                # with these two methods zipfile unpacks no more than it is asked to read
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{entry.filename!r} is compressed by a method that NPZ files do not use")
                with archive.open(entry) as stream:
                    content = stream.read(entry.file_size)
                arrays[name] = read_npy(io.BytesIO(content), len(content))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, KeyError, zlib.error) as error:
        raise ValueError(f"not an NPZ file ({error})") from error
    return arrays
