"""Gradient flow of a one-layer ReLU network, exact from event to event: gates flip, and may slide on their boundary.

Between two events the network is a gated linear one, so its weights are a power series in t whose terms follow from
each other. The closed form for fixed gates is in flow.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pathlens.errors import NotFiniteError, OptionError, PathlensWarning
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar
from pathlens.theory.inputs import WeightedRows, as_times, check_positive, float_array, initial_weights
from pathlens.theory.roots import first_violation

OFF, ON, SLIDING = 0, 1, 2
_EVENT = np.dtype([("time", "f8"), ("row", "i4"), ("unit", "i4"), ("before", "i1"), ("after", "i1")])
_REACH, _TERMS = 0.35, 12  # longest step times the largest rate, for which 0.35^13/13! < 2e-16
_AT_ONCE = 200  # after this many events at one instant a plain gradient step is taken
_TOUCH = 1e-14  # a pre-activation below this share of |x| |w| is zero: rounding


@dataclass(frozen=True, eq=False)
class ReluFlow:
    """A run of the exact flow.

    Attributes
    ----------
    times, weights : arrays (T,) and (T, K, d)
        The weights at the given times.
    events : structured array (time, row, unit, before, after)
        Every change of a gate, in order; before and after are OFF = 0, ON = 1 or SLIDING = 2.
    state, start : int8 arrays (n, K)
        The gates at the end and at t = 0.
    steps, fallbacks : int
        Number of power series summed, and of plain gradient steps taken where too many events shared one instant.
    seconds : float

    A sliding gate belongs to a pre-activation that the flow holds at zero (both sides push towards it): it acts as a
    gate between 0 and 1, and counts as off in gate bits, since a hard gate is q > 0.
    """

    times: np.ndarray
    weights: np.ndarray
    events: np.ndarray
    state: np.ndarray
    start: np.ndarray
    data: WeightedRows = field(repr=False)
    steps: int = 0
    fallbacks: int = 0
    seconds: float = 0.0

    @property
    def flips(self) -> np.ndarray:
        """Events at which a gate went from on to off or back without sliding."""
        e = self.events
        return e[(e["before"] != SLIDING) & (e["after"] != SLIDING)]

    @property
    def slides(self) -> np.ndarray:
        """Events at which a gate began to slide."""
        return self.events[self.events["after"] == SLIDING]

    def state_at(self, t: float) -> np.ndarray:
        """Gates (n, K) just after time t: OFF, ON or SLIDING."""
        as_times(t, "ReluFlow.state_at")
        state = self.start.copy()
        for e in self.events[: np.searchsorted(self.events["time"], t, side="right")]:
            state[e["row"], e["unit"]] = e["after"]
        return state

    def loss(self) -> np.ndarray:
        """½⟨(y − ŷ)²⟩ at the times, shape (T,)."""
        x, y, p = self.data.x, self.data.y, self.data.p
        outputs = [np.maximum(x @ w.T, 0).mean(1) for w in self.weights]
        return np.array([0.5 * p @ (f - y) ** 2 for f in outputs])

    def flipped_share(self) -> np.ndarray:
        """Share of the n·K gate bits that differ from those at t = 0, at the times, shape (T,)."""
        first = self.start == ON
        return np.array([((self.state_at(t) == ON) != first).mean() for t in self.times])

    def plot(self, ax: Any = None) -> Any:
        """Loss over time, with a mark for every event."""
        ax = get_axes(ax, "drawing a flow")
        ax.plot(self.times, self.loss(), color="#0072b2", label="loss")
        low = ax.get_ylim()[0]
        for which, colour, text in ((self.flips, "#b4becb", "flips"), (self.slides, "#d55e00", "slides")):
            at = which["time"]
            ax.plot(at, np.full(len(at), low), "|", color=colour, ms=12, label=f"{len(at)} {text}")
        ax.set(xlabel="time t", ylabel="½⟨(y − ŷ)²⟩", title=f"exact ReLU flow, {self.weights.shape[1]} units")
        ax.legend(frameon=False)
        return ax

    def __repr__(self) -> str:
        n, K = self.state.shape
        active = int((self.state == SLIDING).sum())
        return (
            f"ReluFlow({K} units on {n} rows to t={self.times[-1]:g}: {len(self.flips)} flips, {len(self.slides)} "
            f"slides ({active} sliding at the end), {self.steps} series, {self.fallbacks} fallback steps)"
        )


def relu_flow(
    data: Any, w0: Any, times: Any, *, tau: float = 1.0, fallback: float | None = None, progress: bool = True
) -> ReluFlow:
    """Gradient flow of ŷ = (1/K) Σ_k relu(w_k·x) on ½⟨(y − ŷ)²⟩, with gates that evolve; exact up to rounding.

    On a stretch without events W(t) = Σ_j W_j t^j with ``W_{j+1} = P(F_j)/(j+1)``, F the gradient's series and P the
    projection that keeps sliding rows at w_k·x_s = 0. All w_k·x_s are polynomials; the earliest sign change is isolated
    by their Bernstein coefficients, which cannot miss one. At a crossing with ẇ_k·x_s > 0 when off and < 0 when on,
    both sides push back: the pair slides, with a gate α ∈ [0, 1] that holds it there, until α leaves [0, 1]. Several
    events may share an instant: one crossing can release other rows of its unit, which are then handled one by one.

    Parameters
    ----------
    data : DataSet, (X, y), (X, y, p) or SinglePulse
        Rows on one ray from the origin have equal gates and are computed as one; opposite rows have opposite gates.
    w0 : array (K, d)
    times : float or increasing array (T,)
        Times at which the weights are returned; the flow ends at the last.
    tau : float
    fallback : float, optional
        Length of the plain gradient step that is taken where too many events share one instant; default 1e-4 of the
        longest step. Such steps are counted, with a warning.
    progress : bool

    Returns
    -------
    ReluFlow

    Notes
    -----
    About 10 products of (n, d) by (d, K) matrices per event or step, O(nKd) each.

    Examples
    --------
    >>> from pathlens.data import nlgp
    >>> w0 = 0.1 * np.random.default_rng(0).standard_normal((3, 10))
    >>> flow = relu_flow(nlgp(n=40, d=10, seed=0), w0, [0.0, 5.0, 20.0])
    >>> flow
    ReluFlow(3 units on 40 rows to t=20: ... flips, ... slides (... sliding at the end), ... series, 0 fallback steps)
    >>> flow.loss().round(3)
    array([...])
    """
    rows = WeightedRows.from_data(data)
    report_times = np.atleast_1d(as_times(times, "relu_flow"))
    if len(report_times) == 0 or not np.isfinite(report_times).all() or not (np.diff(report_times) > 0).all():
        raise OptionError(f"relu_flow: times={times!r}, expected finite increasing times.")
    check_positive("relu_flow", tau=tau, fallback=1.0 if fallback is None else fallback)
    shape = float_array(w0).shape
    start = initial_weights(w0, shape[0] if shape else 0, rows.d, "relu_flow")
    began = time.perf_counter()
    run = _FlowState(rows, start, tau, fallback)
    first = run.gates()
    found = np.empty((len(report_times), *start.shape))
    with ProgressBar("exact ReLU flow", 100) as meter:
        percent = 0
        for i, t in enumerate(report_times):
            while run.t < t:
                run.advance(float(t))
                reached = int(100 * run.t / report_times[-1])
                if progress and reached > percent:
                    meter.advance(reached - percent)
                    percent = reached
            found[i] = run.W
    if run.fallbacks:
        warnings.warn(
            f"relu_flow: events piled up at one instant, so {run.fallbacks} plain gradient steps of {run.fallback:.1e} "
            "were taken there; the result is accurate to about that step.",
            PathlensWarning,
            stacklevel=2,
        )
    events = np.array(run.events, dtype=_EVENT)
    return ReluFlow(
        report_times, found, events, run.gates(), first, rows, run.steps, run.fallbacks, time.perf_counter() - began
    )


def _rays(rows: WeightedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[list[int]], np.ndarray]:
    """Rows on one ray c·x, c > 0, as one row x of weight Σ p c² and target Σ p c y / Σ p c²: the same gradients.

    Returns x (m, d), y (m,), weights (m,), the row numbers on each ray, and the number of the opposite ray or −1.
    """
    norms = np.sqrt((rows.x**2).sum(1))
    directions = np.round(rows.x / np.maximum(norms, 1e-300)[:, None], 12) + 0.0  # no negative zeros
    groups: dict[bytes, list[int]] = {}
    for i, direction in enumerate(directions):
        groups.setdefault(direction.tobytes(), []).append(i)
    number = {key: ray for ray, key in enumerate(groups)}
    members = list(groups.values())
    first = np.array([rows_of[0] for rows_of in members])
    opposite = np.array([number.get((-directions[i] + 0.0).tobytes(), -1) for i in first])
    opposite[norms[first] == 0] = -1
    y, weight = rows.y[first].copy(), rows.p[first].copy()
    for ray, those in enumerate(members):
        if len(those) > 1:
            c = norms[those] / max(norms[those[0]], 1e-300)
            weight[ray] = rows.p[those] @ c**2
            y[ray] = rows.p[those] @ (c * rows.y[those]) / weight[ray] if weight[ray] > 0 else 0.0
    return rows.x[first], y, weight, members, opposite


class _FlowState:
    """State of the flow: time, weights W (K, d), gates, the sliding rows of each unit and their constraint forces.

    Gates and pre-activations have shape (K, n): products of (K, d) with (d, n) are twice as fast as their transposes.
    """

    def __init__(self, rows: WeightedRows, w0: np.ndarray, tau: float, fallback: float | None) -> None:
        self.x, self.y, weight, self.members, self.opposite = _rays(rows)
        self.scale = weight / (len(w0) * tau)
        self.columns = np.ascontiguousarray(self.x.T)
        # of two opposite rays only one is watched: the other has the opposite gate
        self.watched = (self.opposite < 0) | (np.arange(len(self.y)) < self.opposite)
        self.W, self.K, self.t = w0, len(w0), 0.0
        self.norms = np.sqrt((self.x**2).sum(1))
        self.state = (self.W @ self.columns > 0).astype(np.int8)
        self.on = (self.state == ON).astype(np.float64)
        self.sliding: dict[int, list[int]] = {}
        self.hold: dict[int, np.ndarray] = {}  # unit -> −(X_S X_Sᵀ)⁻¹ X_S: the force's series to that of β
        self.projector: dict[int, np.ndarray] = {}
        self.just_left: set[tuple[int, int]] = set()
        # the rate of any mode is at most λ_max⟨xxᵀ⟩/(Kτ), whatever the gates
        second = (self.x * self.scale[:, None]).T @ self.x
        self.longest = self.gap = _REACH / max(float(np.linalg.eigvalsh(second)[-1]), 1e-300)
        self.fallback = fallback if fallback is not None else 1e-4 * self.longest
        self.events: list[tuple[float, int, int, int, int]] = []
        self.at_once = self.steps = self.fallbacks = 0

    # --- one stretch -------------------------------------------------------------------------------------------

    def series(self, D: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Coefficients in s = t/D of W (p+1, K, d), h = w·x (p+1, K, n), errors y − ŷ (p+1, n), and the force on
        sliding units; p is where the terms fall below rounding."""
        columns, K, size = self.columns, self.K, np.abs(self.W).max()
        W = np.empty((_TERMS + 1, *self.W.shape))
        h = np.empty((_TERMS + 1, K, len(self.y)))
        error = np.empty((_TERMS + 1, len(self.y)))
        force = {k: np.empty((_TERMS, len(columns))) for k in self.sliding}
        W[0] = self.W
        p = _TERMS
        for j in range(_TERMS + 1):
            np.dot(W[j], columns, out=h[j])
            np.einsum("kn,kn->n", self.on, h[j], out=error[j])
            error[j] *= -1 / K
            if j == 0:
                error[0] += self.y
            if j == p:
                break
            F = np.dot(self.on * (self.scale * error[j]), self.x)
            for k, P in self.projector.items():
                force[k][j] = F[k]
                F[k] = P @ F[k]
            np.multiply(F, D / (j + 1), out=W[j + 1])
            # each term is at most _REACH/(j+1) of the one before, so what follows a term this small is smaller still
            if np.abs(W[j + 1]).max() <= 1e-16 * size:
                p = j + 1
        return W[: p + 1], h[: p + 1], error[: p + 1], {k: f[:p] for k, f in force.items()}

    def advance(self, end: float) -> None:
        """Advance to the next event, or as far as the series reaches, and at most to `end`."""
        D = min(self.longest, 2 * self.gap, end - self.t)
        W, h, error, force = self.series(D)
        if not np.isfinite(W).all():
            raise NotFiniteError(f"relu_flow: the weights overflow at t={self.t:g}. Scale X, y or w0 down.")
        self.steps += 1
        s, event = self.earliest(h, error, force)
        powers = s ** np.arange(len(W))
        self.W = np.tensordot(powers, W, 1)
        self.at_once = self.at_once + 1 if D * s <= 1e-14 * max(self.t, D) else 0
        if s > 0:
            self.just_left.clear()
        # the next series reaches twice as far as events have lately lain apart
        gap = 0.7 * self.gap + 0.3 * D * s if event is not None else max(self.gap, 1.5 * D)
        self.gap = min(self.longest, max(gap, 1e-6 * self.longest))
        self.t = end if event is None and end - self.t == D else self.t + D * s
        if event is not None:
            self.handle(event, powers @ error)
            if self.at_once > _AT_ONCE:
                self.plain_step()

    # --- events ------------------------------------------------------------------------------------------------

    def earliest(
        self, h: np.ndarray, error: np.ndarray, force: dict[int, np.ndarray]
    ) -> tuple[float, tuple[str, int, int] | None]:
        """The first s ∈ [0, 1] at which an event happens, and the event (kind, row, unit); None if there is none."""
        # a polynomial whose constant outweighs all its other coefficients has no root on [0, 1]
        reach = np.abs(h[1:]).sum(0)
        pairs = np.flatnonzero((np.abs(h[0]) <= reach) & (self.state != SLIDING) & self.watched)
        unit, row = np.divmod(pairs, len(self.y))
        found = h.reshape(len(h), -1)[:, pairs].T * (2.0 * self.on.reshape(-1)[pairs] - 1)[:, None]
        size = self.norms[row] * np.sqrt((self.W**2).sum(1))[unit]
        found[np.abs(found[:, 0]) <= _TOUCH * size, 0] = 0.0
        for r, k in self.just_left:  # its pre-activation and its slope are zero at this instant
            for i in np.flatnonzero(pairs == k * len(self.y) + r):
                found[i, 0] = 0.0
                if abs(found[i, 1]) <= 1e-10 * np.abs(h[1, k]).max():
                    found[i, 1] = 0.0
        held = [(r, k) for k, members in self.sliding.items() for r in members]
        if held:  # q ≤ β ≤ 0, of one degree less; where x has an opposite x', its pull −q' takes the place of 0
            beta = np.concatenate([self.hold[k] @ force[k].T for k in self.sliding])
            at = np.array([r for r, _ in held])
            pull = (error[:-1] * self.scale).T
            bounds = np.zeros((2, len(held), len(h)))
            bounds[0, :, :-1] = np.where(self.opposite[at, None] < 0, 0.0, -pull[self.opposite[at]]) - beta
            bounds[1, :, :-1] = beta - pull[at]
            found = np.concatenate([found, bounds.reshape(-1, len(h))])
        s, first = first_violation(found)
        if first < 0:
            return 1.0, None
        if first < len(pairs):
            return s, ("cross", int(row[first]), int(unit[first]))
        side, which = divmod(first - len(pairs), len(held))
        return s, ("release on" if side else "release off", *held[which])

    def handle(self, event: tuple[str, int, int], error: np.ndarray) -> None:
        """Flip, begin to slide, or stop sliding; `error` is y − ŷ now."""
        kind, row, unit = event
        before, opposite = int(self.state[unit, row]), int(self.opposite[row])
        if kind != "cross":
            after = ON if kind == "release on" else OFF
            self.sliding[unit].remove(row)
            self.just_left.add((row, unit))
        else:
            pull = self.scale * error  # q: the row adds q·x to ẇ when its gate is on
            others = self.on[unit] * pull
            others[row] = 0.0
            if opposite >= 0:
                others[opposite] = 0.0
            x = self.x[row] if unit not in self.projector else self.projector[unit] @ self.x[row]
            square, speed = float(x @ x), float(x @ (others @ self.x))
            below = speed - (pull[opposite] * square if opposite >= 0 else 0.0)  # the speed of w·x where w·x < 0
            above = speed + pull[row] * square
            if square > 1e-20 * self.norms[row] ** 2 and below > 0 > above:
                after = SLIDING
                self.sliding.setdefault(unit, []).append(row)
            else:
                after = OFF if before == ON else ON
        self.change(unit, row, after)
        if opposite >= 0:
            self.change(unit, opposite, {ON: OFF, OFF: ON, SLIDING: SLIDING}[after])
        if SLIDING in (before, after):
            self.constrain(unit)

    def change(self, unit: int, row: int, after: int) -> None:
        """Set a gate, and add an event for every row of the ray."""
        before = int(self.state[unit, row])
        self.state[unit, row], self.on[unit, row] = after, float(after == ON)
        self.events += [(self.t, member, unit, before, after) for member in self.members[row]]

    def gates(self) -> np.ndarray:
        """The state of every given row, shape (n, K)."""
        out = np.empty((sum(map(len, self.members)), self.K), dtype=np.int8)
        for ray, members in enumerate(self.members):
            out[members] = self.state[:, ray]
        return out

    def constrain(self, unit: int) -> None:
        """The projection that keeps the sliding rows of a unit at zero, and the map from force to β."""
        members = self.sliding[unit]
        if not members:
            del self.sliding[unit], self.hold[unit], self.projector[unit]
            return
        X = self.x[members]
        self.hold[unit] = -np.linalg.pinv(X.T)
        Q = np.linalg.qr(X.T)[0]
        self.projector[unit] = np.eye(X.shape[1]) - Q @ Q.T
        self.W[unit] = self.projector[unit] @ self.W[unit]

    def plain_step(self) -> None:
        """One small gradient step with the present gates; sliding rows are determined anew afterwards."""
        h = self.W @ self.columns
        error = self.y - np.maximum(h, 0).sum(0) / self.K
        self.W = self.W + self.fallback * (((h > 0) * (self.scale * error)) @ self.x)
        self.t += self.fallback
        state = (self.W @ self.columns > 0).astype(np.int8)
        for unit, row in zip(*np.nonzero(state != self.state)):
            self.change(int(unit), int(row), int(state[unit, row]))
        self.sliding, self.hold, self.projector = {}, {}, {}
        self.just_left.clear()
        self.fallbacks += 1
        self.at_once = 0
