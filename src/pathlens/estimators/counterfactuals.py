"""The smallest change of a row that changes its prediction, found and proved with the half-spaces of a model.

Inside a cell of the half-spaces f is affine, so that the nearest point of a cell with the prediction asked for is a
linear program. Which cell it lies in is a mixed integer one: a gate is a variable only where its boundary can be
reached within the distance looked at. What is found lies on the boundary, and is rounded to the other side of it:
users get values that they can type in. May import the half-spaces, errors, pictures and the progress bar; solvers are
scipy's.
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
from pathlens.estimators.halfspaces import HalfSpaceModel
from pathlens.explanations import TabularResult
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar

FAR = 100.0  # standard deviations: where a feature has no range, what is farther is not looked at
_FIRST, _GROWTH = 0.25, 1.5  # distances looked at
_STARTS, _STEPS, _IMPROVED = 16, 64, 4  # rows to come from, points on the way from each, and those made nearer
_LONGEST = 0.95  # share of the time left that a program over all cells may take: the cell it finds needs some, too
_GAP = 1e-4  # relative difference between distance and bound that counts as none
_TOLERANCE = 1e-6  # of the solvers, in standard deviations
_MANY = 1e9  # whole numbers are looked for up to here
_INSIDE = (1e-7, 1e-6, 1e-5)  # how far inside a cell to stay, likewise: more where rounding puts the point outside
_ROUNDING = 1e-3  # share of the distance that rounding values to few decimals may add
_POLISHING = 0.5  # seconds for it, beside those of the search
_DECIMALS = 12  # most decimals tried, counted from the leading digit of the standard deviation


@dataclass(frozen=True, repr=False)
class Counterfactual(TabularResult):
    """A row nearby with another prediction.

    Attributes
    ----------
    row, point : (d,)
        The row asked about, and what it would have to be. The values of `point` are rounded, and are what is printed:
        typed in, they have the prediction `after`.
    before, after : object
        What the model predicts for them.
    distance : float
        Σ_j |change of feature j| / (its standard deviation in training), from `row` to `point`.
    at_least : float
        Proved: no row with the prediction asked for is nearer than this, up to the solver's tolerance of 1e-6. Points
        that are less than 1e-7 from a boundary do not count: rounding could put them on either side.
    unrounded : float
        The distance before values were rounded, which adds a thousandth to it at most.
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
        """Whether it is proved that no other is nearer than this was before rounding, to a relative 1e-4."""
        return self.unrounded <= self.at_least * (1 + _GAP) + _TOLERANCE

    @property
    def changes(self) -> dict[str, tuple[float, float]]:
        """Features that change, those that change most first: from, to."""
        share = np.abs(self.point - self.row) / np.where(self.spread > 0, self.spread, 1)
        order = [j for j in np.argsort(-share, kind="stable") if share[j] > 0]
        return {self.names[j]: (float(self.row[j]), float(self.point[j])) for j in order}

    @property
    def printed(self) -> dict[str, tuple[str, str]]:
        """`changes` as text: the new values in full, so that ``float(text)`` is the value in `point`."""
        return {name: (_as_text(old, new), _in_full(new)) for name, (old, new) in self.changes.items()}

    def table(self) -> dict[str, list[Any]]:
        """One row per feature that changes, those that change most first."""
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
    """Six digits of a value, or as many as it takes to print it on the side of the other that it is on.

    >>> _as_text(1 / 3, 0.5), _as_text(2020.3712, 2020.37)
    ('0.333333', '2020.371')
    """
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    return next(
        (text for text in texts if (float(text) < other) == (value < other) and float(text) != other), _in_full(value)
    )


@dataclass(frozen=True)
class Goal:
    """Outputs f with ``signs @ f > low``, in every row of `signs` or, with `any_of`, in one at least.

    Attributes
    ----------
    signs : (k, c), low : (k,)
    any_of : bool
    """

    signs: np.ndarray
    low: np.ndarray
    any_of: bool = False

    def margin(self, f: np.ndarray) -> np.ndarray:
        """How far above outputs (n, c) are: (n,), positive where they are among them."""
        above = f @ self.signs.T - self.low
        return above.max(1) if self.any_of else above.min(1)

    def part(self, f: np.ndarray) -> np.ndarray:
        """Indices of the rows of `signs` to be met together: all, or the one that outputs (c,) meet best."""
        margin = self.signs @ f - self.low
        return np.array([margin.argmax()]) if self.any_of else np.arange(len(margin))


@dataclass(frozen=True)
class Room:
    """What a row may become.

    Attributes
    ----------
    lowest, highest : (d,)
        Of each feature; equal where it must not change.
    whole : (d,) of bool
        Features that stay whole numbers.
    groups : list of int arrays
        Of each, the features keep their sum: columns that encode one category.
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
    ) -> Room:
        """Ranges, whole numbers and groups as the rows `within` have them; `whole` are indices, or None to look."""
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
        if within is not None:  # as its rows have them: x itself may be of a category that none of them has
            groups = _groups(within, ((seen == 0) | (seen == 1)).all(0))
            integers[[j for group in groups for j in group]] = True
        moves = np.flatnonzero((spread > 0) & (highest > lowest))
        return cls(lowest, highest, integers, groups, moves)


def _groups(rows: np.ndarray, binary: np.ndarray) -> list[np.ndarray]:
    """Runs of neighbouring 0/1 columns of which every row has exactly one, as one-hot encoders write them.

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
    """Looks for the nearest row that has the outputs asked for.

    Parameters
    ----------
    model : HalfSpaceModel
    row : (d,)
    goal : Goal
        What is asked for.
    room : Room
        What each feature may become.
    """

    def __init__(self, model: HalfSpaceModel, row: np.ndarray, goal: Goal, room: Room) -> None:
        self.model, self.row, self.goal = model, row, goal
        self.moves = room.moves
        self.scale = model.spread[self.moves]
        self.lowest, self.highest = room.lowest[self.moves], room.highest[self.moves]
        self.whole = np.flatnonzero(room.whole[self.moves])
        # (groups, features that may change): 1 in the group
        self.sums = np.array([np.isin(self.moves, group) for group in room.groups]).reshape(-1, len(self.moves))
        self.down, self.up = (
            np.nan_to_num((bound - row[self.moves]) / self.scale, posinf=FAR, neginf=-FAR)
            for bound in (self.lowest, self.highest)
        )
        self.normals, self.offsets = [], []  # of changes in standard deviations; the largest coefficient is 1
        for normal, offset in zip(model.normals, model.offsets):
            slopes = normal[:, self.moves] * self.scale
            size = np.abs(slopes).max(1, initial=0)
            size = np.where(size > 0, size, 1)
            self.normals.append(slopes / size[:, None])
            self.offsets.append((normal @ row + offset) / size)
        self.farthest = FAR if np.isinf(self.highest).any() else float(np.maximum(self.up, -self.down).sum())
        self.found: np.ndarray | None = None  # change, in standard deviations
        self.distance = np.inf
        self.at_least = 0.0
        self.unsure = False  # whether a cell was left without an answer

    # --- points ------------------------------------------------------------------------------------------------

    def point(self, change: np.ndarray) -> np.ndarray:
        """The row after a change of the features that may; those that do not change keep their bits."""
        out = np.broadcast_to(self.row, (*change.shape[:-1], len(self.row))).copy()
        old = self.row[self.moves]
        moved = np.clip(old + change * self.scale, self.lowest, self.highest)
        moved[..., self.whole] = np.round(moved[..., self.whole])
        out[..., self.moves] = np.where(change == 0, old, moved)
        return out

    def works(self, change: np.ndarray) -> np.ndarray:
        """Whether changed rows are allowed and have what is asked for, by the model itself: (n,)."""
        kept = np.abs((change * self.scale) @ self.sums.T).max(1, initial=0) < 1e-9
        return kept & (self.goal.margin(self.model.outputs(self.point(change))) > 0)

    def snapped(self, change: np.ndarray) -> np.ndarray:
        """The change with features that are whole numbers at the nearest one."""
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

    def _walls(self, bits: Sequence[np.ndarray], part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A cell, and a part of the goal in it, as inequalities left · change ≥ right, the largest coefficient 1."""
        signs, low = self.goal.signs[part], self.goal.low[part]
        slope, value = self.model.weights[-1], self.model.biases[-1]
        for gate, weight, bias in zip(bits[::-1], self.model.weights[-2::-1], self.model.biases[-2::-1]):
            slope = slope * gate
            value = value + slope @ bias
            slope = slope @ weight
        rows = [signs @ (slope[:, self.moves] * self.scale)]
        least = [low - signs @ (value + slope @ self.row)]
        size = np.abs(rows[0]).max(1, initial=0)
        size = np.where(size > 0, size, 1)
        rows[0], least[0] = rows[0] / size[:, None], least[0] / size
        for gate, normal, offset in zip(bits, self.normals, self.offsets):
            side = np.where(gate, 1.0, -1.0)
            rows.append(side[:, None] * normal)
            least.append(-side * offset)
        return np.concatenate(rows), np.concatenate(least)

    def _cell(self, bits: Sequence[np.ndarray], part: np.ndarray, until: float) -> np.ndarray | None:
        """The nearest point of a cell that meets a part of the goal: a linear program over increases and decreases.

        Out of time it may be one that is not the nearest; `unsure` is set then.
        """
        left, right = self._walls(bits, part)
        moved = np.abs(left).max(1, initial=0) > 0  # the others do not depend on the change
        if (right[~moved] > 0).any():
            return None
        k, w = len(self.moves), len(self.whole)
        equal, values = self.equalities()
        A = np.concatenate([-left[moved], left[moved], np.zeros((int(moved.sum()), w))], axis=1)
        bounds = np.stack([*self.bounds()], axis=1)
        cost, integrality = np.repeat([1.0, 0.0], [2 * k, w]), np.repeat([0, 1], [2 * k, w])
        for inside in _INSIDE:
            solved = linprog(
                cost,
                A,
                -right[moved] - inside,
                equal,
                values,
                bounds,
                "highs",
                integrality=integrality,
                options={"time_limit": _left(until)},
            )
            self.unsure |= solved.status not in (0, 2)  # anything but solved, or proved empty
            if solved.x is None or solved.status not in (0, 1):
                return None
            change = self.snapped(solved.x[:k] - solved.x[k : 2 * k])
            change[np.abs(change) < _INSIDE[0] / 10] = 0  # what the solver left, not what is needed
            if self.works(change[None])[0]:
                return change
        self.unsure = True
        return None

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Of increases, decreases and the values of features that are whole numbers."""
        w = self.whole
        low = np.concatenate([np.zeros(2 * len(self.moves)), np.maximum(self.lowest[w], -_MANY)])
        return low, np.concatenate([self.up, -self.down, np.minimum(self.highest[w], _MANY)])

    def equalities(self) -> tuple[np.ndarray, np.ndarray]:
        """What holds between these: whole numbers are row + change, and groups keep their sum."""
        k, w = len(self.moves), len(self.whole)
        change = np.concatenate([np.diag(self.scale)[self.whole], self.sums * self.scale])
        integers = np.concatenate([-np.eye(w), np.zeros((len(self.sums), w))])
        rows = np.concatenate([change, -change, integers], axis=1).reshape(-1, 2 * k + w)
        return rows, np.concatenate([-self.row[self.moves][self.whole], np.zeros(len(self.sums))])

    def improve(self, change: np.ndarray, until: float) -> None:
        """From a point that works to the nearest one of its cell, then over the walls it lies at, while that helps."""
        self._keep(change)
        point = self.point(change)[None]
        bits, part = [b[0] for b in self.model.bits(point)], self.goal.part(self.model.outputs(point)[0])
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
        """The nearest of some points that work: on the way to rows that do, and with one feature changed alone."""
        way = np.linspace(0, 1, _STEPS + 1)[1:]
        ends = np.zeros((0, len(self.moves)))
        if rows is not None and len(rows):
            ends = self.snapped(np.clip((rows[:, self.moves] - self.row[self.moves]) / self.scale, self.down, self.up))
            ends = ends[self.works(ends)]
            ends = ends[np.argsort(np.abs(ends).sum(1), kind="stable")[:_STARTS]]
        alone = np.concatenate([np.diag(np.clip(sign * 5.0, self.down, self.up)) for sign in (-1, 1)])
        margin = self.goal.margin(self.model.outputs(self.point(alone)))
        found: list[np.ndarray] = []
        for end in np.concatenate([ends, alone[np.argsort(-margin, kind="stable")]]):  # what promises most comes first
            if time.monotonic() > until and (found or not len(ends)):
                break  # a row that works is one start, at least
            points = self.snapped(way[:, None] * end)
            good = np.flatnonzero(self.works(points))
            if len(good):
                found.append(points[good[0]])
        found.sort(key=lambda change: float(np.abs(change).sum()))
        return found[:_IMPROVED]

    # --- values that can be typed in ---------------------------------------------------------------------------

    def rounded(self, until: float) -> tuple[np.ndarray, float]:
        """The point found with values of few decimals, and its distance: in the same cell, a share farther at most.

        Values are rounded away from the row. Where that leaves the cell, since larger changes may cross its walls, a
        point deeper inside it is rounded. Where no decimals will do, values stay as they are, which is known to work.
        """
        assert self.found is not None
        exact = self.point(self.found)
        bits, part = [b[0] for b in self.model.bits(exact[None])], self.goal.part(self.model.outputs(exact[None])[0])
        left, right = self._walls(bits, part)
        some = np.setdiff1d(np.flatnonzero(self.found), self.whole)
        steps = 10.0 ** np.floor(np.log10(self.scale[some])) / self.scale[some]  # of one decimal, at most 1
        for decimals in range(1, _DECIMALS + 1):
            room = _INSIDE[0] + float(steps.sum()) * 10.0**-decimals
            for deeper in (False, True):
                change = self._deeper(some, left, right + room, until) if deeper else self.found
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
        """The changed row with some features rounded away from the row, no farther than to the end of their range."""
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
        """The nearest change of some features alone, each in the direction that it has, with left · change ≥ right."""
        assert self.found is not None
        fixed, sign = self.found.copy(), np.sign(self.found[some])
        fixed[some] = 0
        A = left[:, some] * sign
        there = np.abs(A).max(1, initial=0) > 0
        if not there.any() or time.monotonic() > until:
            return None
        most = np.where(sign > 0, self.up[some], -self.down[some])
        solved = linprog(
            np.ones(len(some)),
            -A[there],
            (left @ fixed - right)[there],
            None,
            None,
            np.stack([0 * most, most], axis=1),
            "highs",
            options={"time_limit": _left(until)},
        )
        if solved.status != 0:
            return None
        fixed[some] = sign * solved.x
        return fixed

    # --- all cells ---------------------------------------------------------------------------------------------

    def reach(self, slopes: np.ndarray, radius: float) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest value of slopes · change among changes of this length at most: (w,) each."""
        most = radius * np.abs(slopes).max(1, initial=0)
        ends = slopes * self.down, slopes * self.up
        return (np.maximum(-most, np.minimum(*ends).sum(1)), np.minimum(most, np.maximum(*ends).sum(1)))

    def ball(self, radius: float, until: float) -> bool:
        """Look at all changes of this length at most; whether there is nothing left to ask beyond them."""
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
            # at its walls the point takes some gates for open and some for closed: there is no such cell
            program.exclude(bits, part)


class _Program:
    """A mixed integer program: the shortest change within a radius, with one 0/1 variable per gate that it may switch.

    A gate on its boundary may be either, which makes the program a relaxation: its bound holds for all rows.
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
            """What is linear in the change is bounded by its length, the rest by its variables."""
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
        if len(self.parts):  # one of them at least: the others may be as low as they can be
            bottom = np.minimum(interval(units, shift)[0], 0)
            chosen = np.eye(count)[self.parts]
            self.integers[self.parts] = 1
            self._need(chosen.sum(0)[None], np.ones(1))
            self._need(units + bottom[:, None] * chosen, bottom - shift)
        else:
            self._need(units, -shift)

    def _need(self, rows: np.ndarray, least: np.ndarray, most: Any = np.inf) -> None:
        """most ≥ rows · variables ≥ least, with the largest coefficient of each row made 1."""
        size = np.abs(rows).max(1, initial=0)
        size = np.where(size > 0, size, 1)
        self.rows.append(rows / size[:, None])
        self.least.append(least / size)
        self.most.append(most / size)

    def solve(self, seconds: float) -> Any:
        """scipy's result; HiGHS does the work."""
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
        """The cell that a solution says it lies in."""
        out = [o.copy() for o in self.open]
        for bits, free, gates in zip(out, self.free, self.gates):
            bits[free] = x[gates] > 0.5
        return out

    def part(self, x: np.ndarray) -> np.ndarray:
        """The part of the goal that a solution meets."""
        return np.array([x[self.parts].argmax()]) if len(self.parts) else np.arange(self.goals)

    def exclude(self, bits: Sequence[np.ndarray], part: np.ndarray) -> None:
        """No solution in this cell that meets this part: at least one of its free gates, or the part, is another."""
        row, least = np.zeros(len(self.cost)), 1.0
        if len(self.parts):
            row[self.parts[part]] = -1.0
            least -= 1
        for b, free, gates in zip(bits, self.free, self.gates):
            row[gates] = np.where(b[free], -1.0, 1.0)
            least -= b[free].sum()
        self._need(row[None], np.array([least]))


def _left(until: float) -> float:
    """Seconds that a solver may take, never zero."""
    return max(until - time.monotonic(), 0.01)


def find_nearest(search: Search, rows: np.ndarray | None, seconds: float) -> None:
    """Run a search: good points first, for half the time at most, then proofs in growing distance."""
    begun = time.monotonic()
    for start in search.starts(rows, begun + seconds / 4):
        search.improve(start, begun + seconds / 2)
    radius = _FIRST
    with ProgressBar("counterfactual: distances looked at", None) as meter:
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
    """The nearest row with outputs as the goal has them; `what` describes what it would be predicted.

    Returns
    -------
    point, distance, at_least, unrounded
        The point has rounded values, and the distance is to it; `unrounded` is that of the point found first.
    """
    room = Room.of(row, model.spread, within, keep, whole)
    if not len(room.moves):
        raise OptionError("counterfactual: no feature may change. Keep fewer, or give `within` more rows.")
    search = Search(model, row, goal, room)
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
