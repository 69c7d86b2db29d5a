"""Row sources of kernels: from a record, a stream, or a network with inputs, to the factors of rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pathlens.errors import DTypeError, OptionError, RecordError, ShapeError
from pathlens.indexing import runs
from pathlens.linops import RowStream
from pathlens.linops.factors import FLOATS, require_alike
from pathlens.models.tracing import unwrapped
from pathlens.recording import RecordStream
from pathlens.recording.streams import recorded
from pathlens.records import Record

Source: TypeAlias = Record | RecordStream
Matrices: TypeAlias = Callable[[Record], Mapping[str, Tensor]]


@dataclass
class Sides:
    """Rows and columns of a kernel.

    Attributes
    ----------
    rows : Record or RecordStream
    cols : Record, RecordStream or None
        None if the kernel is symmetric.
    net : nn.Module or None
        The network, if it was given.
    """

    rows: Source
    cols: Source | None
    net: nn.Module | None

    @property
    def symmetric(self) -> bool:
        """Whether rows and columns are the same object."""
        return self.cols is None

    def both(self) -> tuple[Source, ...]:
        """The one or two sources."""
        return (self.rows,) if self.cols is None else (self.rows, self.cols)


def resolve(what: str, source: Any, X: Any, Y: Any, *, sensitivities: bool, max_bytes: int | None = None) -> Sides:
    """Record the inputs unless they are records, and check that X and Y come from the same network."""

    def take(inputs: Any) -> Source:
        if isinstance(inputs, Source):
            return inputs
        assert net is not None
        return recorded(net, inputs, sensitivities=sensitivities, max_bytes=max_bytes)

    net: nn.Module | None = None
    if isinstance(source, Source):
        if X is not None:
            raise OptionError(f"{what}: a record was given together with X. Give {what}(rec) or {what}(net, X).")
        rows = source
    elif isinstance(source, nn.Module):
        net = unwrapped(source)
        if X is None:
            raise OptionError(f"{what}: a network was given without inputs. Call {what}(net, X).")
        rows = take(X)
    else:
        raise OptionError(f"{what}: expected a Record or a network with inputs, got {type(source).__name__}.")
    dtype = probe(rows).f.dtype
    if dtype not in FLOATS:
        raise DTypeError(
            f"{what}: the network computes in {dtype}, expected float32 or float64: kernels are exact, and {dtype} has "
            "too few digits. Convert a copy: copy.deepcopy(net).float(), and X.float()."
        )
    if Y is None or Y is source or Y is rows:
        return Sides(rows, None, net)
    if net is None and not isinstance(Y, Source):
        raise OptionError(
            f"{what}: Y is {type(Y).__name__}, and a record was given in place of the network. Record Y too, or call "
            f"{what}(net, X, Y)."
        )
    cols = take(Y)
    _check_pair(what, rows, cols)
    return Sides(rows, cols, net)


def _check_pair(what: str, rows: Source, cols: Source) -> None:
    if rows.sites != cols.sites:
        raise RecordError(
            f"{what}: X has the gate sites {', '.join(rows.sites) or 'none'}, Y "
            f"{', '.join(cols.sites) or 'none'}. Record both with the same network."
        )
    mine, theirs = ([(a.name, a.inputs, a.outputs) for a in side.layers] for side in (rows, cols))
    if mine != theirs or rows.outputs != cols.outputs:
        raise RecordError(
            f"{what}: X comes from a network with {len(mine)} layers and {rows.outputs} outputs, Y from one "
            f"with {len(theirs)} and {cols.outputs}, or their sizes differ. Record both with the same network."
        )
    a, b = probe(rows), probe(cols)
    require_alike(what, ("X", "Y"), a.f, b.f, "Record both with the same dtype and device.")
    if a.x.shape[1:] != b.x.shape[1:]:
        raise ShapeError(
            f"{what}: rows of X have shape {tuple(a.x.shape[1:])}, rows of Y {tuple(b.x.shape[1:])}. "
            "Record both with the same network."
        )


def probe(source: Source) -> Record:
    """The record of the first row."""
    return source.rows(0, 1)


class _StreamedFactors:
    """Factor matrices of a stream, recomputed on demand, from at most `most` rows at a time; see `factors`."""

    def __init__(self, stream: RecordStream, matrices: Matrices, times: int, most: int | None) -> None:
        self.n = stream.n * times
        self._stream, self._matrices, self._times, self._most = stream, matrices, times, most or stream.n

    def rows(self, lo: int, hi: int) -> Mapping[str, Tensor]:
        """Factor name → (hi − lo, r)."""
        start, stop = lo // self._times, -(-hi // self._times)
        steps = range(start, stop, self._most)
        parts = [self._matrices(self._stream.rows(at, min(at + self._most, stop))) for at in steps]
        cut = slice(lo - start * self._times, hi - start * self._times)
        return {name: torch.cat([part[name] for part in parts])[cut] for name in parts[0]}


def factors(sides: Sides, matrices: Matrices, times: int = 1, budget: int | None = None) -> dict[str, tuple[Any, Any]]:
    """Factor name → matrices of rows and of columns (None if symmetric); those of a stream are lazy.

    Parameters
    ----------
    matrices : function
        From a record to its factor matrices; must be picklable.
    times : int
        Rows of a matrix for each row of the record.
    budget : int, optional
        Bytes; records that are recomputed take at most an eighth of it.
    """

    def side(source: Source) -> dict[str, Any]:
        if isinstance(source, Record):
            return dict(matrices(source))
        most = None if budget is None else max(budget // 8 // max(4 * source.bytes_per_row, 1), 1)
        stream = RowStream(_StreamedFactors(source, matrices, times, most))
        return {name: stream[name] for name in stream.names}

    left = side(sides.rows)
    right = dict.fromkeys(left) if sides.cols is None else side(sides.cols)
    return {name: (left[name], right[name]) for name in left}


def fill_blocks(
    out: Tensor,
    edge: int,
    mirror: bool,
    left: Callable[[int], Any],
    right: Callable[[int], Any],
    product: Callable[[Any, Any, bool], Tensor],
) -> None:
    """Write product(left(i), right(j), i == j) to the block of `out`, (…, n, m), that starts at row i and column j.

    With `mirror` both sides are the same: only the upper triangle is computed, and the flag marks diagonal blocks.
    """
    for i in range(0, out.shape[-2], edge):
        rows = left(i)
        for j in range(i if mirror else 0, out.shape[-1], edge):
            same = mirror and i == j
            found = product(rows, rows if same else right(j), same)
            out[..., i : i + edge, j : j + edge] = found
            if mirror and not same:
                out[..., j : j + edge, i : i + edge] = found.mT


def pieces(source: Source, index: Tensor, most: int, output: int | None = None) -> Iterator[Record]:
    """Records of the rows in `index`, in order, with at most `most` rows each."""
    for lo, hi in runs(index):
        for start in range(lo, hi, most):
            yield source.rows(start, min(start + most, hi), output)
