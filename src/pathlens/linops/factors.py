"""Factor matrices of Gram kernels: resident tensors, or rows that are recomputed block by block.

A factor F is n × r. The norms of its rows are kept as log₂ in float64, so that products of many factors neither
overflow nor underflow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pathlens.errors import DTypeError, EmptyDataError, NotFiniteError, RecordError, ShapeError, unknown_name
from pathlens.indexing import Index, as_numpy, as_tensor, runs, take_rows

FLOATS = (torch.float32, torch.float64)
_CHUNK = 1 << 20  # entries that are checked at once: small compared with any budget


@runtime_checkable
class FactorSource(Protocol):
    """An object that recomputes any consecutive rows of one factor, or of several factors together.

    ``n`` is the number of rows; ``rows(lo, hi)`` returns the tensor of shape (hi − lo, r), or a mapping from names to
    such tensors. It must return the same numbers every time, and must not modify the returned tensors afterwards.
    """

    n: int

    def rows(self, lo: int, hi: int) -> Tensor | Mapping[str, Tensor]:
        """Rows lo … hi−1."""


class Factor(NamedTuple):
    """One factor of a term: the Gram matrix left · rightᵀ, entry (i, j) = Σ_a left_ia right_ja.

    Attributes
    ----------
    name
        Name in messages and in ``repr``.
    left
        (n, r) float32, float64 or bool tensor, a `FactorSource`, or one key of a `RowStream`.
    right
        (m, r) likewise. None, or the same object as ``left``, makes the kernel symmetric; an equal copy does not.

    Examples
    --------
    >>> Factor("gate", torch.eye(2)).right is None
    True
    >>> Factor.ones(3).left.shape
    torch.Size([3, 1])
    """

    name: str
    left: Any
    right: Any = None

    @classmethod
    def ones(cls, n: int, m: int | None = None, *, device: torch.device | str = "cpu") -> Factor:
        """The Gram matrix of ones, which a bias adds; n × n and symmetric, or n × m with ``m``."""
        left = torch.ones(n, 1, dtype=torch.bool, device=device)
        return cls("1", left, None if m is None else torch.ones(m, 1, dtype=torch.bool, device=device))


def require_alike(what: str, names: tuple[str, str], left: Any, right: Any, remedy: str) -> None:
    """Raise a `DTypeError` unless two tensors, factors or kernels have the same dtype and device."""
    if left.dtype != right.dtype or left.device != right.device:
        sides = (f"{name} is {side.dtype} on {side.device}" for name, side in zip(names, (left, right)))
        raise DTypeError(f"{what}: {', '.join(sides)}. {remedy}")


def log2_norms(block: Tensor, name: str, first_row: int = 0) -> Tensor:
    """log₂ of each row's Euclidean norm, as float64; −inf for a zero row.

    Accurate to the rounding of the dtype for any finite input.

    Parameters
    ----------
    block
        (b, r) tensor.
    name, first_row
        Used in the error message for a row with NaN or infinity.

    Examples
    --------
    >>> log2_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]]), "F")
    tensor([  2.3219,     -inf, -99.6578], dtype=torch.float64)
    """
    if block.dtype == torch.bool:
        return block.view(torch.uint8).sum(1, dtype=torch.int32).double().log2_().mul_(0.5)
    norms = torch.linalg.vector_norm(block, dim=1).double()
    out = norms.log2()
    if not float(out.abs().max()) < 49.0:  # squares may have overflowed or underflowed, or the input has NaN
        which = (~((norms > 1e-15) & (norms < 1e15))).nonzero()[:, 0]
        for part in which.split(max(_CHUNK // block.shape[1], 1)):
            out[part] = _careful_log2_norms(block[part], name, part + first_row)
    return out


def _careful_log2_norms(block: Tensor, name: str, row_numbers: Tensor) -> Tensor:
    """`log2_norms` of rows whose squares leave the range of the dtype: scales them first, and checks for NaN."""
    peak = block.abs().amax(1)
    bad = ~torch.isfinite(peak)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        column = int((~torch.isfinite(block[row])).nonzero()[0, 0])
        raise NotFiniteError(
            f"GramSum: factor {name!r} has {float(block[row, column])} at row {int(row_numbers[row])}, column {column}."
            " Clean the data, or check that training did not diverge."
        )
    exponent = torch.frexp(peak.double()).exponent.double().clamp(min=-1000.0)
    scaled = block.double() * torch.exp2(-exponent)[:, None]
    return torch.linalg.vector_norm(scaled, dim=1).log2().add_(exponent)


class FactorRows(ABC):
    """The rows of a factor, one side of a Gram matrix. Subclasses: `ResidentRows`, `StreamedRows`.

    Attributes
    ----------
    streamed
        Whether rows are recomputed for every tile.
    binary
        Whether every entry is known to be 0 or 1.
    """

    name: str
    n: int
    r: int
    dtype: torch.dtype
    device: torch.device
    streamed: bool
    binary: bool

    @abstractmethod
    def take(self, index: Index) -> Tensor:
        """Rows of the factor, (b, r), in its own dtype; must not be modified."""

    @abstractmethod
    def log2_norms(self, index: Index) -> Tensor:
        """log₂ of their norms, (b,) float64."""

    @property
    def spread(self) -> float:
        """The largest |log₂ norm|; infinite if a row is zero or if the rows are streamed."""
        return math.inf

    @abstractmethod
    def bits(self, index: Index) -> np.ndarray:
        """The rows as packed bits, (b, ⌈r/32⌉) uint32; only for binary factors on the CPU."""

    @abstractmethod
    def row_bytes(self, itemsize: int) -> int:
        """Bytes that one gathered and scaled row needs in addition to the factor."""


def pack_bits(block: Tensor) -> np.ndarray:
    """Pack a 0/1 matrix, 32 columns to a word, padded with zeros.

    Examples
    --------
    >>> pack_bits(torch.ones(1, 40, dtype=torch.bool)).shape
    (1, 2)
    """
    flags = block.numpy() if block.dtype == torch.bool else (block != 0).numpy()
    packed = np.packbits(flags, axis=1)
    short = -packed.shape[1] % 4
    if short:
        packed = np.pad(packed, ((0, 0), (0, short)))
    return np.ascontiguousarray(packed).view(np.uint32)


def _is_binary(block: Tensor) -> bool:
    """Whether all entries are 0 or 1; checks a few entries first, which rejects most other blocks."""
    if block.dtype == torch.bool:
        return True
    return all(v in (0.0, 1.0) for v in block[0, :16].tolist()) and bool(((block == 0) | (block == 1)).all())


class ResidentRows(FactorRows):
    """A factor in memory; the tensor is detached and kept by reference, never copied or modified."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor.detach()
        self.n, self.r = tensor.shape
        self.dtype, self.device = tensor.dtype, tensor.device
        norms, binary = [], True
        step = max(_CHUNK // self.r, 1)
        for lo in range(0, self.n, step):
            block = self.tensor[lo : lo + step]
            norms.append(log2_norms(block, name, lo))
            binary = binary and _is_binary(block)
        self._log2_norms = torch.cat(norms) if len(norms) > 1 else norms[0]
        self.streamed, self.binary = False, binary
        self._spread: float | None = None
        self._bits: np.ndarray | None = None

    def take(self, index: Index) -> Tensor:
        return take_rows(self.tensor, index)

    def log2_norms(self, index: Index) -> Tensor:
        return take_rows(self._log2_norms, index)

    @property
    def spread(self) -> float:
        if self._spread is None:
            self._spread = float(self._log2_norms.abs().max())
        return self._spread

    def bits(self, index: Index) -> np.ndarray:
        if self._bits is None:
            step = max(_CHUNK // self.r, 1)
            self._bits = np.concatenate([pack_bits(self.tensor[lo : lo + step]) for lo in range(0, self.n, step)])
        return self._bits[as_numpy(index)]

    def row_bytes(self, itemsize: int) -> int:
        return 2 * self.r * itemsize + 32  # a gathered copy, a scaled copy, and exponents


class RowStream:
    """Factors that are recomputed in row blocks, each block once for all of its factors.

    Parameters
    ----------
    source
        A `FactorSource` whose ``rows`` returns a mapping from names to tensors.

    Notes
    -----
    The last two blocks are cached, because a tile needs one block of rows and one of columns.

    Examples
    --------
    >>> class Net:
    ...     n = 4
    ...     def rows(self, lo, hi):
    ...         x = torch.arange(lo, hi).float()[:, None]
    ...         return {"x": x, "gate": x > 1}
    >>> stream = RowStream(Net())
    >>> stream["gate"].r, sorted(stream.names)
    (1, ['gate', 'x'])
    """

    def __init__(self, source: FactorSource) -> None:
        if not isinstance(source, FactorSource):
            raise RecordError(
                f"RowStream: {type(source).__name__} lacks `n` or `rows(lo, hi)`. Give an object with both."
            )
        if source.n < 1:
            raise EmptyDataError(f"RowStream: {type(source).__name__} has {source.n} rows, expected at least one.")
        self.source = source
        self.n = int(source.n)
        self._kept: OrderedDict[tuple[int, int] | bytes, dict[str, tuple[Tensor, Tensor]]] = OrderedDict()
        self._probe = self._ask(0, 1)
        self._rows: dict[str, StreamedRows] = {}

    def _ask(self, lo: int, hi: int) -> dict[str, Tensor]:
        with torch.no_grad():
            got = self.source.rows(lo, hi)
        table = {"": got} if isinstance(got, Tensor) else dict(got)
        return {key: value.detach() for key, value in table.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the factors; one empty name if the source returns a tensor."""
        return tuple(self._probe)

    def __getitem__(self, key: str) -> StreamedRows:
        if key not in self._probe:
            raise unknown_name("streamed factor", key, self._probe)
        if key not in self._rows:  # one object per key: a Gram is symmetric if both sides are the same object
            name = key or type(self.source).__name__
            self._rows[key] = StreamedRows(name, self, key, check_matrix(self._probe[key], name))
            self.forget()  # cached blocks lack this factor
        return self._rows[key]

    def block(self, index: Index) -> dict[str, tuple[Tensor, Tensor]]:
        """Factor name → (rows of the index, log₂ of their norms), checked."""
        if isinstance(index, range) and index.step == 1:
            key: tuple[int, int] | bytes = (index.start, index.stop)
        else:
            index = as_tensor(index, torch.device("cpu"))
            key = index.numpy().tobytes()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) > 1:  # first, so that a third block is never in memory
            self._kept.popitem(last=False)
        if isinstance(index, range):
            got = self._checked(index.start, index.stop)
        else:
            ordered, back = torch.unique(index, return_inverse=True)
            # Consecutive rows are computed together; no run is longer than the index, so the budget holds.
            parts = [self._checked(lo, hi) for lo, hi in runs(ordered)]
            got = {}
            for name in self._rows:
                rows = torch.cat([part[name][0] for part in parts])
                norms = torch.cat([part[name][1] for part in parts])
                for part in parts:
                    del part[name]
                at = back.to(rows.device)
                got[name] = (rows.index_select(0, at), norms.index_select(0, at))
        self._kept[key] = got
        return got

    def _checked(self, lo: int, hi: int) -> dict[str, tuple[Tensor, Tensor]]:
        checked = {}
        table = self._ask(lo, hi)
        for key in self._rows:  # factors that are not used are dropped
            probe, name = self._probe[key], key or type(self.source).__name__
            if key not in table:
                raise RecordError(
                    f"RowStream: rows({lo}, {hi}) lack factor {name!r}, which rows(0, 1) had. "
                    f"A source must return the same factors for every block."
                )
            value = table.pop(key)
            if value.shape != (hi - lo, *probe.shape[1:]) or value.dtype != probe.dtype:
                raise ShapeError(
                    f"RowStream: rows({lo}, {hi}) of factor {name!r} have shape {tuple(value.shape)} and "
                    f"{value.dtype}, expected {(hi - lo, *probe.shape[1:])} and {probe.dtype}. "
                    f"A source must return the same columns for every block."
                )
            checked[key] = (value, log2_norms(value, name, lo))
        return checked

    def forget(self) -> None:
        """Clear the cache of blocks."""
        self._kept.clear()


class StreamedRows(FactorRows):
    """One factor of a `RowStream`."""

    def __init__(self, name: str, stream: RowStream, key: str, probe: Tensor) -> None:
        self.name, self.stream, self.key = name, stream, key
        self.n, self.r = stream.n, probe.shape[1]
        self.dtype, self.device = probe.dtype, probe.device
        self.streamed = True
        self.binary = self.dtype == torch.bool  # floats are not checked, since that takes all rows

    def take(self, index: Index) -> Tensor:
        return self.stream.block(index)[self.key][0]

    def log2_norms(self, index: Index) -> Tensor:
        return self.stream.block(index)[self.key][1]

    def bits(self, index: Index) -> np.ndarray:
        return pack_bits(self.take(index))

    def row_bytes(self, itemsize: int) -> int:
        return self.r * (self.dtype.itemsize + 2 * itemsize) + 48  # the cached block, a gathered copy, a scaled copy


def check_matrix(value: Any, name: str) -> Tensor:
    """A factor as a tensor; raises if it is no matrix of floats or bools."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise DTypeError(
            f"GramSum: factor {name!r} is a {type(value).__name__}, expected a torch tensor, or an object "
            f"with `n` and `rows(lo, hi)`."
        )
    if value.ndim != 2 or value.shape[1] == 0:
        raise ShapeError(
            f"GramSum: factor {name!r} has shape {tuple(value.shape)}, expected (rows, columns) with at "
            f"least one column. Flatten the rest with `.flatten(1)`."
        )
    if value.shape[0] == 0:
        raise EmptyDataError(f"GramSum: factor {name!r} has no rows, shape {tuple(value.shape)}.")
    if value.dtype not in (*FLOATS, torch.bool):
        raise DTypeError(
            f"GramSum: factor {name!r} has dtype {value.dtype}, expected float32, float64 or bool. "
            f"Convert it with `.float()` or `.double()`."
        )
    return value


class RowTable:
    """Converts factors to `FactorRows`, once per object: shared factors are checked and streamed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, FactorRows]] = {}  # keeps the object alive: ids are unique only until then

    def rows(self, value: Any, name: str) -> FactorRows:
        """The rows of a tensor, an array, a `FactorSource`, or a key of a `RowStream`."""
        if isinstance(value, FactorRows):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = (value, self._build(value, name))
        return self._known[id(value)][1]

    @staticmethod
    def _build(value: Any, name: str) -> FactorRows:
        if not isinstance(value, (Tensor, np.ndarray)) and isinstance(value, (RowStream, FactorSource)):
            stream = value if isinstance(value, RowStream) else RowStream(value)
            if stream.names != ("",):
                raise RecordError(
                    f"GramSum: factor {name!r} is a bundle of {', '.join(stream.names)}; choose one, for example "
                    f"RowStream(source)[{stream.names[0]!r}]."
                )
            return stream[""]
        return ResidentRows(name, check_matrix(value, name))
