"""Switching instants: when the gates of a network change while it trains (Definition 3.3 of the NPF paper).

Exact from the events of a ReLU flow; sampled from the records of a training run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pathlens.errors import RecordError
from pathlens.recording import Trajectory
from pathlens.theory.evolving import ON, ReluFlow

__all__ = ["Switching", "switching_instants"]


@dataclass(frozen=True, eq=False)
class Switching:
    """T_0 = 0 < T_1 < …: on [T_i, T_{i+1}) no gate of any row changes.

    Attributes
    ----------
    instants : array (m,)
        T_i. Where sampled, T_i is the first recorded time after the change, so the true instant lies before it.
    changed : int array (m,)
        Gates that differ from just before; 0 at T_0.
    gates : int
        Gates in all: rows times units.
    exact : bool
    """

    instants: np.ndarray
    changed: np.ndarray
    gates: int
    exact: bool

    def __repr__(self) -> str:
        how = "exact" if self.exact else "sampled"
        many = f"{len(self.instants) - 1} instants after T_0, {self.changed.sum()} changes of {self.gates} gates"
        return f"Switching({many}, {how})"


def switching_instants(run: ReluFlow | Trajectory) -> Switching:
    """The switching instants of an exact flow, or those that the records of a training run show.

    Parameters
    ----------
    run : ReluFlow or Trajectory
        A trajectory needs records at two moments or more (``keep=Keep(…, X=X)``); time is its epoch, or its step
        where epochs are not known. A gate is its bit q > 0; a sliding gate of a flow counts as off.

    Examples
    --------
    >>> import pathlens as pl
    >>> data = pl.data.nlgp(n=30, d=8, seed=0)
    >>> net = pl.models.relu(8, hidden=(4,), seed=0)
    >>> keep = pl.training.Keep(range(0, 21, 5), X=data.x)
    >>> t = pl.train(net, data, epochs=20, lr=0.05, keep=keep, progress=False)
    >>> switching_instants(t)
    Switching(4 instants after T_0, ... changes of 120 gates, sampled)
    """
    if isinstance(run, ReluFlow):
        e = run.events
        e = e[(e["before"] == ON) != (e["after"] == ON)]
        # a gate that switches on and off at one instant has not changed
        net: dict[float, set[tuple[int, int]]] = {}
        for event in e:
            net.setdefault(float(event["time"]), set()).symmetric_difference_update(
                {(int(event["row"]), int(event["unit"]))}
            )
        counts = [(t, len(pairs)) for t, pairs in net.items() if pairs]
        return _built(counts, run.state.size, exact=True)
    kept = [m for m in run.moments if m.record is not None]
    if len(kept) < 2:
        raise RecordError(
            f"switching_instants: the trajectory holds {len(kept)} records, expected at least 2. Train with "
            "keep=Keep(range(…), X=X)."
        )
    counts, gates, before = [], 0, None
    for m in kept:
        assert m.record is not None
        bits = np.concatenate([b.cpu().numpy().reshape(-1) for b in m.record.bits.values()])
        if before is not None and bits.shape != before.shape:
            raise RecordError("switching_instants: the records are of different rows. Record one batch throughout.")
        if before is not None and (bits != before).any():
            counts.append((float(m.step if m.epoch is None else m.epoch), int((bits != before).sum())))
        before, gates = bits, bits.size
    return _built(counts, gates, exact=False)


def _built(counts: Iterable[tuple[float, int]], gates: int, exact: bool) -> Switching:
    pairs = [(0.0, 0), *counts]
    return Switching(np.array([t for t, _ in pairs]), np.array([c for _, c in pairs]), gates, exact)
