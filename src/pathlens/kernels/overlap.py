"""The overlap kernel Λ and the neural path kernel Σ∘Λ of fully connected networks: products of gate Grams.

Convolutional and residual networks, whose paths share weights between positions or skip layers, go through `paths`.
May import linops, records, recording and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import RecordError
from pathlens.linops import Factor, GramSum, RowStream
from pathlens.recording import RecordStream, record
from pathlens.records import Record

Source = Record | RecordStream


class GateRows:
    """Gate bits (or soft values) of a record stream, by site, as a row source of factors."""

    def __init__(self, stream: RecordStream, soft: bool) -> None:
        self.n, self._stream, self._soft = stream.n, stream, soft

    def rows(self, lo: int, hi: int) -> Mapping[str, Tensor]:
        """Factor name → (hi − lo, w)."""
        return gate_matrices(self._stream.rows(lo, hi), self._soft)


def gate_matrices(rec: Record, soft: bool) -> dict[str, Tensor]:
    """Site → (n, w): hard bits, or the network's own gate values where ``soft``."""
    found = {}
    for site in rec.sites:
        gate = rec.gates(site) if soft and site in rec.soft else rec.bits[site]
        if gate.ndim != 2:
            raise RecordError(
                f"overlap: the gates at site '{site}' have shape {tuple(gate.shape)}, expected (n, width): the record is "
                "of a convolutional network, whose paths the record alone does not tell. Call overlap(net, X)."
            )
        found[site] = gate
    if not found:
        raise RecordError("overlap: the record has no gate sites, so there are no paths to compare.")
    return found


def _sides(source: Source, soft: bool) -> dict[str, Any]:
    if isinstance(source, Record):
        return gate_matrices(source, soft)
    stream = RowStream(GateRows(source, soft))
    return {name: stream[name] for name in stream.names}


def overlap(
    source: Source | nn.Module,
    X: Any = None,
    *,
    columns: Any = None,
    soft: bool = False,
    max_bytes: int | None = None,
) -> GramSum:
    """Overlap kernel Λ: how many paths are active for both of two inputs.

    Λ(s, t) = ∏_l Σ_i g_{l,i}(s) g_{l,i}(t), one factor per gate site; a path is a sequence of hidden units.

    Parameters
    ----------
    source : Record, RecordStream or nn.Module
        A record of the rows, or the network itself together with ``X``.
    X : (n, ...), optional
        Inputs, where ``source`` is a network; it is recorded without a backward pass.
    columns : Record, RecordStream or inputs, optional
        A second set of inputs: the result is the n × m kernel between both.
    soft : bool
        Use the network's own (soft) gate values instead of the hard bits q > 0.
    max_bytes : int, optional
        Memory that may be allocated beyond the factors.

    Returns
    -------
    GramSum of shape (n, n) or (n, m); ``exact_counts()`` gives integers where the gates are hard.

    Notes
    -----
    Exact. Costs n·m·Σ_l 2w_l operations; bits are counted 32 at a time where numba is installed. NPK paper, Λ; the
    half-space paper's overlap kernel.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.tensor([[1.0, 0.0], [0.8, 0.1], [-1.0, 0.0]])
    >>> int(overlap(models.dlgn(2, hidden=(8, 8), seed=0), X).exact_counts()[0, 2])  # gates of −x are the opposite
    0
    """
    rows = _recorded(source, X)
    cols = None if columns is None else _recorded(columns if isinstance(columns, Source) else source, columns)
    left = _sides(rows, soft)
    right = {name: None for name in left} if cols is None else _sides(cols, soft)
    if set(left) != set(right):
        raise RecordError(
            f"overlap: rows have the gate sites {', '.join(left)}, columns {', '.join(right)}. "
            "Record both with the same network."
        )
    dtype = rows.f.dtype if isinstance(rows, Record) else rows.rows(0, 1).f.dtype
    factors = [Factor(name, left[name], right[name]) for name in left]
    hard = all(not isinstance(f.left, Tensor) or f.left.dtype == torch.bool for f in factors)
    return GramSum.from_factors([factors], dtype=dtype if hard else None, name="overlap", max_bytes=max_bytes)


def _recorded(source: Any, X: Any) -> Source:
    if isinstance(source, Source):
        return source
    made = record(source, X, sensitivities=False)
    assert isinstance(made, Source)
    return made
