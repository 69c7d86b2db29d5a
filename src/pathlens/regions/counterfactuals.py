"""Counterfactuals: the smallest change of a row that changes a model's prediction, with a proved lower bound.

Inside a cell of the half-spaces f is affine, so that the nearest point of a cell is found by a linear program. The
search over cells is a mixed integer program with a variable for each gate whose boundary is within the search distance.
The solution lies on a boundary and is rounded to the other side of it, to values with few decimals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from pathlens.errors import OptionError, RegionError
from pathlens.explanations import TabularResult
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar
from pathlens.regions.halfspace_model import HalfSpaceModel

FAR = 100.0  # standard deviations; the search distance for features without a range
_FIRST, _GROWTH = 0.25, 1.5  # first search distance, and its growth
_STARTS, _STEPS, _IMPROVED = 16, 64, 4  # start rows, points on the segment to each, and starts to improve
_LONGEST = 0.95  # share of the remaining time for a mixed integer program; its cell needs the rest
_GAP = 1e-4  # relative difference between distance and bound that counts as zero
_TOLERANCE = 1e-6  # of the solvers, in standard deviations
_MANY = 1e9  # integer features are bounded by this
_INSIDE = (1e-7, 1e-6, 1e-5)  # distance to stay inside a cell, likewise; larger if rounding puts the point outside
_ROUNDING = 1e-3  # largest relative increase of the distance by rounding values
_POLISHING = 0.5  # seconds for rounding, beyond those of the search
_DECIMALS = 12  # most decimals tried, counted from the leading digit of the standard deviation


@dataclass(frozen=True, repr=False)
class Counterfactual(TabularResult):
    """A nearby row with another prediction.

    Attributes
    ----------
    row, point : (d,)
        The given row, and the changed one. The values of `point` are rounded as printed, and have the prediction
        `after`.
    before, after : object
        Predictions for the two.
    distance : float
        Σ_j |change of feature j| / (its standard deviation in training), from `row` to `point`.
    at_least : float
        Proved lower bound of the distance, up to the solver's tolerance of 1e-6. Points less than 1e-7 from a boundary
        do not count: rounding could put them on either side.
    unrounded : float
        The distance before values were rounded, which adds at most a thousandth.
    """

    row: np.ndarray
    point: np.ndarray
    before: Any
    after: Any
    distance: float
    at_least: float
    unrounded: float
    names: tuple[str, ...]
    spread: np.ndarray

    @property
    def nearest(self) -> bool:
        """Whether it is proved that no other row is nearer, before rounding and to a relative 1e-4."""
        return self.unrounded <= self.at_least * (1 + _GAP) + _TOLERANCE

    @property
    def changes(self) -> dict[str, tuple[float, float]]:
        """Old and new value of each feature that changes, largest change first."""
        share = np.abs(self.point - self.row) / np.where(self.spread > 0, self.spread, 1)
        order = [j for j in np.argsort(-share, kind="stable") if share[j] > 0]
        return {self.names[j]: (float(self.row[j]), float(self.point[j])) for j in order}

    @property
    def printed(self) -> dict[str, tuple[str, str]]:
        """`changes` as text: the new values in full, so that ``float(text)`` is the value in `point`."""
        return {name: (_as_text(old, new), _in_full(new)) for name, (old, new) in self.changes.items()}

    def table(self) -> dict[str, list[Any]]:
        """One row per feature that changes, largest change first."""
        old, new = ([pair[i] for pair in self.changes.values()] for i in range(2))
        return {"feature": list(self.changes), "from": old, "to": new}

    @property
    def _what(self) -> str:
        before, after = (f"{v:.6g}" if isinstance(v, float) else v for v in (self.before, self.after))
        return f"{before} becomes {after}"

    def plot(self, ax: Any = None) -> Any:
        """Each change as a bar in standard deviations, with its values from and to; returns matplotlib axes."""
        changes, texts, scale = self.changes, self.printed, dict(zip(self.names, self.spread))
        ax = get_axes(ax, "drawing a counterfactual", (8.0, 0.45 * len(changes) + 1.5))
        ax.barh(
            [f"{name}: {' → '.join(texts[name])}" for name in reversed(changes)],
            [(new - old) / scale[name] for name, (old, new) in reversed(changes.items())],
            color="0.45",
        )
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(xlabel="change in standard deviations", title=self._what)
        return ax

    def __repr__(self) -> str:
        proved = "none is nearer" if self.nearest else f"none is nearer than {self.at_least:.3g}"
        added = self.distance - self.unrounded
        rounding = f" ({added:.1g} by rounding)" if added > _TOLERANCE else ""
        lines = [
            f"{self._what} with {len(self.changes)} of {len(self.names)} features changed; "
            f"distance {self.distance:.3g}{rounding} standard deviations, {proved}"
        ]
        width = max((len(name) for name in self.changes), default=0)
        lines += [f"  {name:<{width}}  {old} → {new}" for name, (old, new) in self.printed.items()]
        return "\n".join(lines)


def _in_full(value: float) -> str:
    """The shortest text that reads back as the value.

    >>> _in_full(0.1), _in_full(3.0), _in_full(-20250.75)
    ('0.1', '3', '-20250.75')
    """
    return repr(float(value)).removesuffix(".0")


def _as_text(value: float, other: float) -> str:
    """A value with six digits, or as many as it takes to print it on its own side of the other.

    >>> _as_text(1 / 3, 0.5), _as_text(2020.3712, 2020.37)
    ('0.333333', '2020.371')
    """
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    return next(
        (text for text in texts if (float(text) < other) == (value < other) and float(text) != other), _in_full(value)
    )


@dataclass(frozen=True)
class Goal:
    """Outputs f with ``signs @ f > low``: in every row of `signs`, or with `any_of` in at least one.

    Attributes
    ----------
    signs : (k, c), low : (k,)
    any_of : bool
    """

    signs: np.ndarray
    low: np.ndarray
    any_of: bool = False

    def margin(self, f: np.ndarray) -> np.ndarray:
        """Margin of outputs (n, c): (n,), positive where the goal is met."""
        above = f @ self.signs.T - self.low
        return above.max(1) if self.any_of else above.min(1)

    def part(self, f: np.ndarray) -> np.ndarray:
        """Indices of the rows of `signs` to be met: all, or the one that outputs (c,) meet best."""
        margin = self.signs @ f - self.low
        return np.array([margin.argmax()]) if self.any_of else np.arange(len(margin))


@dataclass(frozen=True)
class FeasibleSet:
    """Ranges and constraints of the changed row.

    Attributes
    ----------
    lowest, highest : (d,)
        Bounds of each feature; equal where it must not change.
    whole : (d,) of bool
        Features that stay integers.
    groups : list of int arrays
        Features that keep their sum: one-hot columns of one category.
    moves : int array
        Features that may change.
    """

    lowest: np.ndarray
    highest: np.ndarray
    whole: np.ndarray
    groups: list[np.ndarray]
    moves: np.ndarray

    @classmethod
    def of(
        cls,
        row: np.ndarray,
        spread: np.ndarray,
        within: np.ndarray | None,
        keep: Sequence[int],
        whole: Sequence[int] | None,
    ) -> FeasibleSet:
        """Ranges, integer features and groups from the rows `within`; `whole` are indices, or None to detect them."""
        if within is None:
            lowest, highest = np.full(len(row), -np.inf), np.full(len(row), np.inf)
            seen = row[None]
        else:
            seen = np.concatenate([row[None], within])
            lowest, highest = seen.min(0), seen.max(0)
        lowest[list(keep)] = highest[list(keep)] = row[list(keep)]
        integers = np.zeros(len(row), dtype=bool)
        if whole is not None:
            integers[list(whole)] = True
            lowest[integers], highest[integers] = np.ceil(lowest[integers]), np.floor(highest[integers])
        elif within is not None:
            integers = (seen == np.floor(seen)).all(0)
        groups = []
        if within is not None:  # from `within` alone: x may have a category that does not occur there
            groups = _groups(within, ((seen == 0) | (seen == 1)).all(0))
            integers[[j for group in groups for j in group]] = True
        moves = np.flatnonzero((spread > 0) & (highest > lowest))
        return cls(lowest, highest, integers, groups, moves)


def _groups(rows: np.ndarray, binary: np.ndarray) -> list[np.ndarray]:
    """Runs of adjacent 0/1 columns with exactly one 1 in every row, as one-hot encoders write them.

    >>> _groups(np.array([[1, 0, 0, 1, 7], [0, 1, 0, 1, 8], [0, 0, 1, 1, 7]]), np.array([True] * 4 + [False]))
    [array([0, 1, 2])]
    """
    found, begin = [], 0
    while begin < len(binary):
        end, total = begin, np.zeros(len(rows))
        while end < len(binary) and binary[end] and total.max() <= 1 and total.min() < 1:
            total = total + rows[:, end]
            end += 1
        if end - begin > 1 and (total == 1).all():
            found.append(np.arange(begin, end))
            begin = end
        else:
            begin += 1
    return found


class Search:
    """The search for the nearest row whose outputs meet a goal.

    Parameters
    ----------
    model : HalfSpaceModel
    row : (d,)
    goal : Goal
    feasible : FeasibleSet
    """

    def __init__(self, model: HalfSpaceModel, row: np.ndarray, goal: Goal, feasible: FeasibleSet) -> None:
        self.model, self.row, self.goal = model, row, goal
        self.moves = feasible.moves
        self.scale = model.spread[self.moves]
        self.lowest, self.highest = feasible.lowest[self.moves], feasible.highest[self.moves]
        self.whole = np.flatnonzero(feasible.whole[self.moves])
        # (groups, features that may change): 1 in the group
        self.sums = np.array([np.isin(self.moves, group) for group in feasible.groups]).reshape(-1, len(self.moves))
        self.down, self.up = (
            np.nan_to_num((bound - row[self.moves]) / self.scale, posinf=FAR, neginf=-FAR)
            for bound in (self.lowest, self.highest)
        )
        self.normals, self.offsets = [], []  # of changes in standard deviations; the largest coefficient is 1
        for normal, offset in zip(model.normals, model.offsets):
            slopes, value = _scaled(normal[:, self.moves] * self.scale, normal @ row + offset)
            self.normals.append(slopes)
            self.offsets.append(value)
        self.farthest = FAR if np.isinf(self.highest).any() else float(np.maximum(self.up, -self.down).sum())
        self.found: np.ndarray | None = None  # the best change so far, in standard deviations
        self.distance = np.inf
        self.at_least = 0.0
        self.unsure = False  # whether the program of a cell was not solved

    # --- points ------------------------------------------------------------------------------------------------

    def point(self, change: np.ndarray) -> np.ndarray:
        """The row after a change of its movable features; those that do not change keep their exact values."""
        out = np.broadcast_to(self.row, (*change.shape[:-1], len(self.row))).copy()
        old = self.row[self.moves]
        moved = np.clip(old + change * self.scale, self.lowest, self.highest)
        moved[..., self.whole] = np.round(moved[..., self.whole])
        out[..., self.moves] = np.where(change == 0, old, moved)
        return out

    def works(self, change: np.ndarray) -> np.ndarray:
        """Whether changed rows are feasible and the model's outputs meet the goal: (n,)."""
        kept = np.abs((change * self.scale) @ self.sums.T).max(1, initial=0) < 1e-9
        return kept & (self.goal.margin(self.model.outputs(self.point(change))) > 0)

    def snapped(self, change: np.ndarray) -> np.ndarray:
        """The change with integer features rounded to the nearest integer."""
        out, w = change.copy(), self.whole
        row, scale = self.row[self.moves][w], self.scale[w]
        out[..., w] = (np.clip(np.round(row + change[..., w] * scale), self.lowest[w], self.highest[w]) - row) / scale
        return out

    def _keep(self, change: np.ndarray) -> bool:
        distance = float(np.abs(change).sum())
        if distance >= self.distance or not self.works(change[None])[0]:
            return False
        self.found, self.distance = change, distance
        return True

    # --- one cell ----------------------------------------------------------------------------------------------

    def _cell_of(self, point: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Gates of the cell of a point, and the part of the goal that the point meets."""
        rows = point[None]
        return [b[0] for b in self.model.bits(rows)], self.goal.part(self.model.outputs(rows)[0])

    def _walls(self, bits: Sequence[np.ndarray], part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A cell and a part of the goal as inequalities left · change ≥ right, scaled to a largest coefficient of 1."""
        signs, low = self.goal.signs[part], self.goal.low[part]
        slope, value = self.model.weights[-1], self.model.biases[-1]
        for gate, weight, bias in zip(bits[::-1], self.model.weights[-2::-1], self.model.biases[-2::-1]):
            slope = slope * gate
            value = value + slope @ bias
            slope = slope @ weight
        met = _scaled(signs @ (slope[:, self.moves] * self.scale), low - signs @ (value + slope @ self.row))
        sides = [np.where(gate, 1.0, -1.0) for gate in bits]
        normals = [side[:, None] * normal for side, normal in zip(sides, self.normals)]
        offsets = [-side * offset for side, offset in zip(sides, self.offsets)]
        return np.concatenate([met[0], *normals]), np.concatenate([met[1], *offsets])

    def _cell(self, bits: Sequence[np.ndarray], part: np.ndarray, until: float) -> np.ndarray | None:
        """The nearest point of a cell that meets a part of the goal: a linear program over increases and decreases.

        If time runs out it may not be the nearest; `unsure` is set then.
        """
        left, right = self._walls(bits, part)
        moved = np.abs(left).max(1, initial=0) > 0  # the others do not depend on the change
        if (right[~moved] > 0).any():
            return None
        k, w = len(self.moves), len(self.whole)
        equal, values = self.equalities()
        A = np.concatenate([-left[moved], left[moved], np.zeros((int(moved.sum()), w))], axis=1)
        bounds = np.stack([*self.bounds()], axis=1)
        cost, integers = np.repeat([1.0, 0.0], [2 * k, w]), np.repeat([0, 1], [2 * k, w])
        program = {"A_eq": equal, "b_eq": values, "integrality": integers}
        for inside in _INSIDE:
            solved = _linear_program(cost, A, -right[moved] - inside, bounds, until, **program)
            self.unsure |= solved.status not in (0, 2)  # anything but solved, or proved empty
            if solved.x is None or solved.status not in (0, 1):
                return None
            change = self.snapped(solved.x[:k] - solved.x[k : 2 * k])
            change[np.abs(change) < _INSIDE[0] / 10] = 0  # residues of the solver
            if self.works(change[None])[0]:
                return change
        self.unsure = True
        return None

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of increases, decreases and the values of integer features."""
        w = self.whole
        low = np.concatenate([np.zeros(2 * len(self.moves)), np.maximum(self.lowest[w], -_MANY)])
        return low, np.concatenate([self.up, -self.down, np.minimum(self.highest[w], _MANY)])

    def equalities(self) -> tuple[np.ndarray, np.ndarray]:
        """Equations between these: integer features are row + change, and groups keep their sum."""
        k, w = len(self.moves), len(self.whole)
        change = np.concatenate([np.diag(self.scale)[self.whole], self.sums * self.scale])
        integers = np.concatenate([-np.eye(w), np.zeros((len(self.sums), w))])
        rows = np.concatenate([change, -change, integers], axis=1).reshape(-1, 2 * k + w)
        return rows, np.concatenate([-self.row[self.moves][self.whole], np.zeros(len(self.sums))])

    def improve(self, change: np.ndarray, until: float) -> None:
        """From a valid point to the nearest of its cell, then across the walls it touches while the distance falls."""
        self._keep(change)
        bits, part = self._cell_of(self.point(change))
        while time.monotonic() < until:
            best = self._cell(bits, part, until)
            if best is None or not self._keep(best):
                return
            far = [np.abs(normal @ best + offset) for normal, offset in zip(self.normals, self.offsets)]
            for layer, unit in ((i, j) for i, f in enumerate(far) for j in np.flatnonzero(f < 10 * _INSIDE[-1])):
                if time.monotonic() > until:
                    return
                other = [b.copy() for b in bits]
                other[layer][unit] ^= True
                beyond = self._cell(other, part, until)
                if beyond is not None and np.abs(beyond).sum() < self.distance - _TOLERANCE:
                    bits = other
                    break
            else:
                return

    def starts(self, rows: np.ndarray | None, until: float) -> list[np.ndarray]:
        """The nearest of some valid points: on segments to valid rows, and with one feature changed."""
        way = np.linspace(0, 1, _STEPS + 1)[1:]
        ends = np.zeros((0, len(self.moves)))
        if rows is not None and len(rows):
            ends = self.snapped(np.clip((rows[:, self.moves] - self.row[self.moves]) / self.scale, self.down, self.up))
            ends = ends[self.works(ends)]
            ends = ends[np.argsort(np.abs(ends).sum(1), kind="stable")[:_STARTS]]
        alone = np.concatenate([np.diag(np.clip(sign * 5.0, self.down, self.up)) for sign in (-1, 1)])
        margin = self.goal.margin(self.model.outputs(self.point(alone)))
        found: list[np.ndarray] = []
        for end in np.concatenate([ends, alone[np.argsort(-margin, kind="stable")]]):  # most promising first
            if time.monotonic() > until and (found or not len(ends)):
                break  # if there is a valid row, at least one start is returned
            points = self.snapped(way[:, None] * end)
            good = np.flatnonzero(self.works(points))
            if len(good):
                found.append(points[good[0]])
        found.sort(key=lambda change: float(np.abs(change).sum()))
        return found[:_IMPROVED]

    # --- rounded values ---------------------------------------------------------------------------------------

    def rounded(self, until: float) -> tuple[np.ndarray, float]:
        """The best point with values of few decimals, in the same cell, and its distance, which is little larger.

        Values are rounded away from the row. If the result leaves the cell, a point deeper inside the cell is rounded.
        If no number of decimals works, the values are not rounded.
        """
        assert self.found is not None
        exact = self.point(self.found)
        left, right = self._walls(*self._cell_of(exact))
        some = np.setdiff1d(np.flatnonzero(self.found), self.whole)
        steps = 10.0 ** np.floor(np.log10(self.scale[some])) / self.scale[some]  # of one decimal, at most 1
        for decimals in range(1, _DECIMALS + 1):
            inset = _INSIDE[0] + float(steps.sum()) * 10.0**-decimals
            for deeper in (False, True):
                change = self._deeper(some, left, right + inset, until) if deeper else self.found
                if change is None:
                    continue
                point = self._outward(some, change, decimals)
                moved = (point - self.row)[self.moves] / self.scale
                inside = (left @ moved - right)[np.abs(left).max(1, initial=0) > 0] >= _INSIDE[0] / 2
                distance = float(np.abs(moved).sum())
                near = distance <= self.distance * (1 + _ROUNDING)
                if near and inside.all() and self.goal.margin(self.model.outputs(point[None]))[0] > 0:
                    return point, distance
        return exact, self.distance

    def _outward(self, some: np.ndarray, change: np.ndarray, decimals: int) -> np.ndarray:
        """The changed row with some features rounded away from the row, within their ranges."""
        point = self.point(change)
        for j in some:
            at, old = self.moves[j], self.row[self.moves[j]]
            places = decimals - int(np.floor(np.log10(self.scale[j])))
            value = round(float(point[at]), places)
            if abs(value - old) < abs(point[at] - old):
                value = round(value + float(np.copysign(10.0**-places, point[at] - old)), places)
            point[at] = np.clip(value, self.lowest[j], self.highest[j])
        return point

    def _deeper(self, some: np.ndarray, left: np.ndarray, right: np.ndarray, until: float) -> np.ndarray | None:
        """The nearest change of some features, each in its present direction, with left · change ≥ right."""
        assert self.found is not None
        fixed, sign = self.found.copy(), np.sign(self.found[some])
        fixed[some] = 0
        A = left[:, some] * sign
        there = np.abs(A).max(1, initial=0) > 0
        if not there.any() or time.monotonic() > until:
            return None
        most = np.where(sign > 0, self.up[some], -self.down[some])
        bounds = np.stack([0 * most, most], axis=1)
        solved = _linear_program(np.ones(len(some)), -A[there], (left @ fixed - right)[there], bounds, until)
        if solved.status != 0:
            return None
        fixed[some] = sign * solved.x
        return fixed

    # --- all cells ---------------------------------------------------------------------------------------------

    def reach(self, slopes: np.ndarray, radius: float) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest value of slopes · change over changes of at most this length: (w,) each."""
        most = radius * np.abs(slopes).max(1, initial=0)
        ends = slopes * self.down, slopes * self.up
        return (np.maximum(-most, np.minimum(*ends).sum(1)), np.minimum(most, np.maximum(*ends).sum(1)))

    def ball(self, radius: float, until: float) -> bool:
        """Search all changes of at most this length; return whether the search is finished."""
        program = _Program(self, radius)
        while True:
            solved = program.solve(_LONGEST * _left(until))
            if solved.status == 2:  # none
                self.at_least = min(max(self.at_least, radius), self.distance)
                return self.distance <= radius
            bound = solved.mip_dual_bound
            if bound is not None and np.isfinite(bound):
                self.at_least = min(max(self.at_least, float(bound)), self.distance, radius)
            if solved.x is None:
                return True  # out of time
            bits, part = program.bits(solved.x), program.part(solved.x)
            self.unsure = False
            best = self._cell(bits, part, until)
            if best is not None:
                self._keep(best)
            if self.unsure:
                return True  # without this cell a bound would not hold
            if solved.status != 0 or self.distance <= self.at_least * (1 + _GAP) + _TOLERANCE:
                return True
            # a point on the walls may combine open and closed gates of different cells: no such cell exists
            program.exclude(bits, part)


class _Program:
    """A mixed integer program: the shortest change within a radius, with a 0/1 variable for each gate that may switch.

    A gate on its boundary may be open or closed, so that the program is a relaxation and its bound holds for all rows.
    """

    def __init__(self, search: Search, radius: float) -> None:
        k, model = len(search.moves), search.model
        reach = [search.reach(normal, radius) for normal in search.normals]
        self.open = [low + o > 0 for o, (low, _) in zip(search.offsets, reach)]
        self.free = [(low + o <= 0) & (high + o > 0) for o, (low, high) in zip(search.offsets, reach)]
        at = 2 * k + len(search.whole)  # increases, decreases, whole numbers; then per free gate: it, and its value
        count = at + 2 * sum(int(f.sum()) for f in self.free)
        self.parts = count + np.arange(len(search.goal.low) if search.goal.any_of else 0)  # then parts of the goal
        count += len(self.parts)
        self.cost = np.repeat([1.0, 0.0], [2 * k, count - 2 * k])
        self.integers = np.repeat([0, 1, 0], [2 * k, at - 2 * k, count - at])
        self.lower, self.upper = np.zeros(count), np.ones(count)
        self.lower[:at], self.upper[:at] = search.bounds()
        self.upper[: 2 * k] = np.minimum(self.upper[: 2 * k], radius)
        self.rows: list[np.ndarray] = []
        self.least: list[np.ndarray] = []
        self.most: list[np.ndarray] = []
        self.gates: list[np.ndarray] = []
        self.goals = len(search.goal.low)
        equal, values = search.equalities()
        self._need(np.concatenate([equal, np.zeros((len(equal), count - at))], axis=1), values, values)
        self._need(self.cost[None], np.zeros(1), np.array([radius]))

        def of_change(slopes: np.ndarray) -> np.ndarray:
            return np.concatenate([slopes, -slopes, np.zeros((len(slopes), count - 2 * k))], axis=1)

        def interval(units: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Bounds: the linear part by the length of the change, the rest by its variables."""
            rest = units[:, 2 * k :] * self.lower[2 * k :], units[:, 2 * k :] * self.upper[2 * k :]
            bottom, top = search.reach(units[:, :k], radius)
            return bottom + shift + np.minimum(*rest).sum(1), top + shift + np.maximum(*rest).sum(1)

        units, shift = np.zeros((model.d, count)), search.row  # h_0 = x, as a function of the variables
        units[search.moves] = of_change(np.diag(search.scale))
        for i, (weight, bias) in enumerate(zip(model.weights[:-1], model.biases[:-1])):
            units, shift = weight @ units, weight @ shift + bias
            some, offset, (low, high) = self.free[i], search.offsets[i], reach[i]
            bottom, top = (b[some, None] for b in interval(units, shift))
            m = int(some.sum())
            eye = np.eye(count)
            gate, value = eye[at : at + m], eye[at + m : at + 2 * m]
            self.gates.append(at + np.arange(m))
            self.integers[at : at + m] = 1
            self.lower[at + m : at + 2 * m] = np.minimum(bottom[:, 0], 0)
            self.upper[at + m : at + 2 * m] = np.maximum(top[:, 0], 0)
            at += 2 * m
            z, c, q, side = units[some], shift[some], offset[some], of_change(search.normals[i][some])
            self._need(side + (low + offset)[some, None] * gate, low[some])  # an open gate: q ≥ 0
            self._need((high + offset)[some, None] * gate - side, q)  # a closed one: q ≤ 0
            self._need(top * gate - value, 0 * c)  # value = gate · z, by four inequalities
            self._need(value - bottom * gate, 0 * c)
            self._need(z - value + bottom * gate, bottom[:, 0] - c)
            self._need(value - z - top * gate, c - top[:, 0])
            units, shift = units * self.open[i][:, None], shift * self.open[i]
            units[some], shift[some] = value, 0
        last = search.goal.signs @ model.weights[-1]
        units, shift = last @ units, last @ shift + search.goal.signs @ model.biases[-1] - search.goal.low
        if len(self.parts):  # at least one of them; the others are free
            bottom = np.minimum(interval(units, shift)[0], 0)
            chosen = np.eye(count)[self.parts]
            self.integers[self.parts] = 1
            self._need(chosen.sum(0)[None], np.ones(1))
            self._need(units + bottom[:, None] * chosen, bottom - shift)
        else:
            self._need(units, -shift)

    def _need(self, rows: np.ndarray, least: np.ndarray, most: Any = np.inf) -> None:
        """Add most ≥ rows · variables ≥ least, each row scaled to a largest coefficient of 1."""
        scaled = _scaled(rows, least, most)
        for own, part in zip((self.rows, self.least, self.most), scaled):
            own.append(part)

    def solve(self, seconds: float) -> Any:
        """Solve with HiGHS; returns the result of scipy."""
        sides = np.concatenate(self.least), np.concatenate(self.most)
        constraint = LinearConstraint(csr_array(np.concatenate(self.rows)), *sides)
        return milp(
            self.cost,
            integrality=self.integers,
            bounds=Bounds(self.lower, self.upper),
            constraints=constraint,
            options={"time_limit": seconds, "mip_rel_gap": _GAP / 2},
        )

    def bits(self, x: np.ndarray) -> list[np.ndarray]:
        """The cell of a solution."""
        out = [o.copy() for o in self.open]
        for bits, free, gates in zip(out, self.free, self.gates):
            bits[free] = x[gates] > 0.5
        return out

    def part(self, x: np.ndarray) -> np.ndarray:
        """The part of the goal that a solution meets."""
        return np.array([x[self.parts].argmax()]) if len(self.parts) else np.arange(self.goals)

    def exclude(self, bits: Sequence[np.ndarray], part: np.ndarray) -> None:
        """Exclude this cell and part: at least one of its free gates, or the part, must differ."""
        row, least = np.zeros(len(self.cost)), 1.0
        if len(self.parts):
            row[self.parts[part]] = -1.0
            least -= 1
        for b, free, gates in zip(bits, self.free, self.gates):
            row[gates] = np.where(b[free], -1.0, 1.0)
            least -= b[free].sum()
        self._need(row[None], np.array([least]))


def _scaled(rows: np.ndarray, *sides: Any) -> tuple[np.ndarray, ...]:
    """Rows scaled to a largest coefficient of 1, and their right-hand sides."""
    size = np.abs(rows).max(1, initial=0)
    size = np.where(size > 0, size, 1)
    return rows / size[:, None], *(side / size for side in sides)


def _left(until: float) -> float:
    """Remaining seconds for a solver, at least 0.01."""
    return max(until - time.monotonic(), 0.01)


def _linear_program(
    cost: np.ndarray, A: np.ndarray, b: np.ndarray, bounds: np.ndarray, until: float, **more: Any
) -> Any:
    """Minimise cost · z over A z ≤ b and the bounds with HiGHS; returns the result of scipy."""
    return linprog(cost, A, b, bounds=bounds, method="highs", options={"time_limit": _left(until)}, **more)


def find_nearest(search: Search, rows: np.ndarray | None, seconds: float) -> None:
    """Run a search: good points first, for at most half the time, then lower bounds at growing distances."""
    begun = time.monotonic()
    for start in search.starts(rows, begun + seconds / 4):
        search.improve(start, begun + seconds / 2)
    radius = _FIRST
    with ProgressBar("counterfactual: distances", None) as meter:
        while time.monotonic() < begun + seconds:
            radius = min(radius, search.farthest, search.distance)
            if search.ball(radius, begun + seconds) or radius == search.farthest:
                return
            meter.advance()
            radius *= _GROWTH


def counterfactual(
    model: HalfSpaceModel,
    row: np.ndarray,
    goal: Goal,
    what: str,
    within: np.ndarray | None,
    keep: Sequence[int],
    whole: Sequence[int] | None,
    seconds: float,
) -> tuple[np.ndarray, float, float, float]:
    """The nearest row whose outputs meet the goal; `what` describes the wanted prediction in messages.

    Returns
    -------
    point, distance, at_least, unrounded
        The rounded point, its distance, the lower bound, and the distance before rounding.
    """
    feasible = FeasibleSet.of(row, model.spread, within, keep, whole)
    if not len(feasible.moves):
        raise OptionError("counterfactual: no feature may change. Keep fewer, or give `within` more rows.")
    search = Search(model, row, goal, feasible)
    find_nearest(search, within, seconds)
    if search.found is None:
        where = "the ranges of `within`" if within is not None else f"{FAR:g} standard deviations"
        if search.at_least >= search.farthest:
            raise RegionError(
                f"counterfactual: within {where}{' and with what is kept' if keep else ''} no row is predicted {what}."
            )
        raise RegionError(
            f"counterfactual: found no row that is predicted {what} in {seconds:g} s (none is nearer "
            f"than {search.at_least:.3g} standard deviations). Give more `seconds`, or training rows as "
            "`within` to start from."
        )
    point, distance = search.rounded(time.monotonic() + _POLISHING)
    return point, distance, search.at_least, min(search.distance, distance)
