"""Decoders from bytes to uint8 arrays for the forms of the image sets: idx, CIFAR batches, packed WebP strips.

Pickles are read with an unpickler that builds plain containers and byte arrays only. It can still take any amount of
time and memory, so only published files are given to it. The other decoders are bounded for any input.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathlens.errors import FileFormatError, import_extra
from pathlens.files import gunzip, read_npz

Bytes = NDArray[np.uint8]
_MOST_BYTES = 1 << 26  # of an unpacked file; the largest, MNIST's training images, has 47,040,016
SIDE = 32  # CIFAR images are 32 x 32 x 3, planar: 1,024 bytes of red, then green, then blue


def read_idx(data: bytes, where: str, most: int = _MOST_BYTES) -> Bytes:
    """An idx file (unsigned bytes, big-endian header), gzipped or not, as an array; at most ``most`` bytes unpacked.

    Examples
    --------
    >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "labels")
    array([7, 8, 9], dtype=uint8)
    """
    if data[:2] == b"\x1f\x8b":
        try:
            data = gunzip(data, most)
        except ValueError as error:
            raise FileFormatError(f"{where}: the gzip stream is broken ({error}).") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise FileFormatError(f"{where}: starts with {data[:4].hex()!r}, expected the idx magic 000008 and a rank.")
    rank = data[3]
    if len(data) < 4 + 4 * rank:
        raise FileFormatError(f"{where}: {len(data)} bytes, too short for the header of a rank-{rank} idx file.")
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    size = math.prod(shape)  # exact, where NumPy's product of a hostile header may overflow
    body = memoryview(data)[4 + 4 * rank :]
    if len(body) != size:
        raise FileFormatError(f"{where}: the header promises {shape} = {size} bytes, there are {len(body)}.")
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_cifar_binary(data: bytes, where: str, label_bytes: int) -> tuple[Bytes, Bytes]:
    """A CIFAR binary batch: labels (n, label_bytes) and images (n, 32, 32, 3).

    One record is `label_bytes` labels (1 for CIFAR-10; 2 for CIFAR-100: coarse, fine), then 3,072 planar bytes.

    Examples
    --------
    >>> labels, images = read_cifar_binary(bytes([3]) + bytes(3072), "batch", 1)
    >>> labels, images.shape
    (array([[3]], dtype=uint8), (1, 32, 32, 3))
    """
    record = label_bytes + 3 * SIDE * SIDE
    if not data or len(data) % record:
        raise FileFormatError(f"{where}: {len(data)} bytes, expected a positive multiple of {record} (one record).")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, :label_bytes], _planar(rows[:, label_bytes:])


def read_cifar_python(data: bytes, where: str, label_keys: tuple[str, ...]) -> tuple[Bytes, Bytes]:
    """A CIFAR Python batch (a pickle): labels (n, len(label_keys)) and images (n, 32, 32, 3).

    The pickle may hold dictionaries, lists, strings, numbers and uint8 arrays; anything else is refused and not run.
    Compare the checksum of the data first: a pickle of a few bytes can take gigabytes, or forever.
    """
    batch = _restricted_load(data, where)
    if not isinstance(batch, dict):
        raise FileFormatError(f"{where}: holds a {type(batch).__name__}, expected a dictionary with 'data'.")
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    missing = [key for key in ("data", *label_keys) if key not in batch]
    if missing:
        raise FileFormatError(f"{where}: no {missing[0]!r} in the batch; it has {sorted(map(str, batch))}.")
    images = batch["data"]
    if not isinstance(images, _PickledArray):
        raise FileFormatError(f"{where}: 'data' is a {type(images).__name__}, expected a uint8 array.")
    pixels = images.to_array(where)
    if pixels.ndim != 2 or pixels.shape[1] != 3 * SIDE * SIDE:
        raise FileFormatError(f"{where}: 'data' has shape {pixels.shape}, expected (n, {3 * SIDE * SIDE}).")
    columns = [batch[key] for key in label_keys]
    for key, column in zip(label_keys, columns):
        plain = isinstance(column, list) and all(type(v) is int and 0 <= v < 256 for v in column)
        if not plain or len(column) != len(pixels):
            raise FileFormatError(f"{where}: {key!r} is not a list of {len(pixels)} integers from 0 to 255.")
    return np.array(columns, np.uint8).T, _planar(pixels)


def read_webp_strips(data: bytes, where: str, most: int = 50_000) -> Bytes:
    """A packed part, lossless WebP strips 32 pixels wide with images stacked, one file after another; (n, 32, 32, 3).

    A WebP file's length is its bytes 4 to 8 (little-endian) plus 8, so the part needs no index. It may hold ``most``
    images.
    """
    Image = import_extra("PIL.Image", f"reading the packed images in {where}")
    strips, at, left = [], 0, most
    while at < len(data):
        head = data[at : at + 12]
        if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WEBP":
            raise FileFormatError(f"{where}: no WebP file at byte {at} (found {head.hex()!r}).")
        end = at + 8 + int.from_bytes(head[4:8], "little")
        if end > len(data):
            raise FileFormatError(f"{where}: the WebP file at byte {at} ends at byte {end}, the part at {len(data)}.")
        try:
            with Image.open(io.BytesIO(data[at:end]), formats=("WEBP",)) as image:
                width, height = image.size  # of the header: no pixel is decoded yet
                fits = width == SIDE and height % SIDE == 0
                strip = np.asarray(image.convert("RGB")) if fits else None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise FileFormatError(f"{where}: the WebP file at byte {at} does not decode ({error}).") from error
        if strip is None:
            raise FileFormatError(
                f"{where}: the strip at byte {at} is {width} x {height} pixels, expected {SIDE} wide "
                f"and a multiple of {SIDE} high."
            )
        left -= height // SIDE
        if left < 0:
            raise FileFormatError(f"{where}: more than {most} images.")
        strips.append(strip.reshape(-1, SIDE, SIDE, 3))
        at = end
    if not strips:
        raise FileFormatError(f"{where}: empty, expected WebP files.")
    return np.concatenate(strips)


def read_labels_npz(data: bytes, where: str, key: str) -> Bytes:
    """One label array (uint8) of a packed set's ``labels.npz``; object arrays are refused."""
    try:
        labels = read_npz(data, 1 << 20, (key,))[key]
    except (ValueError, KeyError) as error:
        raise FileFormatError(f"{where}: no readable array {key!r} ({error}).") from error
    if labels.dtype != np.uint8 or labels.ndim != 1:
        raise FileFormatError(f"{where}: {key!r} is {labels.dtype} {labels.shape}, expected uint8 (n,).")
    return labels


def _planar(rows: Bytes) -> Bytes:
    return np.ascontiguousarray(rows.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


class _PickledArray:
    """Replaces a NumPy array in a pickle: keeps its state as data, so that no NumPy unpickling code runs."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_array(self, where: str) -> Bytes:
        try:
            _, shape, dtype, fortran, raw = self.state
            if isinstance(raw, str):  # a Python 2 pickle may store the bytes as text
                raw = raw.encode("latin1")
            valid = (
                dtype.code in ("u1", b"u1")
                and isinstance(raw, bytes)
                and isinstance(shape, tuple)
                and all(type(k) is int and k >= 0 for k in shape)
                and math.prod(shape) == len(raw)
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"{where}: an array in the pickle has an unknown layout ({error}).") from error
        if not valid:
            raise FileFormatError(f"{where}: an array in the pickle is not uint8, or its size does not fit its shape.")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _PickledDtype:
    """Replaces a NumPy dtype in a pickle: keeps its code."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags: meaningless for one-byte integers."""


def _encode_latin1(text: str, encoding: str) -> bytes:
    # Python 3 writes byte strings like this in old protocols
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"codec {encoding!r} refused")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
    ("_codecs", "encode"): _encode_latin1,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} refused: only arrays and plain containers") from None


def _restricted_load(data: bytes, where: str) -> Any:
    try:
        return _RestrictedUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a hostile or broken pickle can raise anything
        raise FileFormatError(f"{where}: not a readable batch ({type(error).__name__}: {error}).") from error
