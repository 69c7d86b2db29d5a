"""Switching instants: when the gates of a network change while it trains (Definition 3.3 of the NPF paper).

Exact from the events of a ReLU flow; sampled from the records of a training run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from pathlens.errors import RecordError
from pathlens.recording import Trajectory
from pathlens.theory.evolving import ON, ReluFlow


@dataclass(frozen=True, eq=False)
class Switching:
    """T_0 = 0 < T_1 < …: on [T_i, T_{i+1}) no gate of any row changes.

    Attributes
    ----------
    instants : array (m,)
        T_i. Where sampled, T_i is the first recorded time after the change, so the true instant lies before it.
    changed : int array (m,)
        Number of gates that differ from just before; 0 at T_0.
    gates : int
        Number of gates: rows times units.
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
    """Switching instants of an exact flow, or those visible in the records of a training run.

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
        e = run.events[(run.events["before"] == ON) != (run.events["after"] == ON)]
        switches, times = np.unique(e[["time", "row", "unit"]], return_counts=True)
        # a gate that switches on and off at one instant has not changed
        instants, changed = np.unique(switches["time"][times % 2 == 1], return_counts=True)
        return Switching(np.append(0.0, instants), np.append(0, changed), run.state.size, exact=True)
    kept = [m for m in run.moments if m.record is not None]
    if len(kept) < 2:
        raise RecordError(
            f"switching_instants: the trajectory holds {len(kept)} records, expected at least 2. Train with "
            "keep=Keep(range(…), X=X)."
        )
    bits = [np.concatenate([b.cpu().numpy().ravel() for b in m.record.bits.values()]) for m in kept]  # type: ignore[union-attr]
    if len({b.shape for b in bits}) > 1:
        raise RecordError("switching_instants: the records are of different rows. Record one batch throughout.")
    changed = np.array([0, *((a != b).sum() for a, b in itertools.pairwise(bits))])
    instants = np.array([0.0, *(m.step if m.epoch is None else m.epoch for m in kept[1:])])
    shown = (changed > 0) | (np.arange(len(kept)) == 0)
    return Switching(instants[shown], changed[shown], bits[0].size, exact=False)
