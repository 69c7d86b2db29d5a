"""Convex cells of a box and how lines cut them: polygons in a plane, intervals on a segment.

Cells are arrays, and all are cut at once. Coordinates are those of the unit box [−1, 1]² (or [−1, 1]); an affine
function c_0 + c_1 z_1 + … is given by its coefficients (c_0, c_1, …).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pathlens.errors import BudgetError, OptionError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]

#: a line that passes a corner within this distance, in units of the box, passes through it
TOLERANCE = 1e-12


def too_many(limit: int) -> BudgetError:
    """The error for a partition with too many cells."""
    return BudgetError(
        f"regions: the partition has more than {limit:,} cells. Choose a smaller box, or raise max_cells if they fit "
        "in memory."
    )


def box_bounds(box: Any, d: int) -> Floats:
    """Bounds (d, 2) of a box from a number r (−r to r), one pair (lo, hi), or d pairs."""
    try:
        array = np.array(box, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.full(3, np.nan)
    if array.ndim == 0:
        array = np.array([-array, array])
    if array.shape == (2,):
        array = np.tile(array, (d, 1))
    if array.shape != (d, 2) or not np.isfinite(array).all() or (array[:, 0] >= array[:, 1]).any():
        raise OptionError(
            f"box must be a positive number, (lo, hi) or {d} pairs (lo, hi) with lo < hi, all finite, got {box!r}."
        )
    return array


def _signs(coefficients: Floats, parent: Ints, middle: Floats) -> Bits:
    """Which functions are positive at the cells' middles: (K, U) bits from (K or 1, U, 1 + dim) coefficients."""
    scale = np.abs(coefficients).sum(-1) * TOLERANCE
    if len(coefficients) == 1:
        values = coefficients[0, :, 0] + middle @ coefficients[0, :, 1:].T
        return values > scale[0]
    found = np.empty((len(middle), coefficients.shape[1]), dtype=bool)
    for lo in range(0, len(middle), 1024):  # the gathered coefficients would be several times the answer
        rows = slice(lo, lo + 1024)
        c = coefficients[parent[rows]]
        values = c[:, :, 0] + np.einsum("kud,kd->ku", c[:, :, 1:], middle[rows])
        found[rows] = values > scale[parent[rows]]
    return found


@dataclass(frozen=True)
class Polygons:
    """Convex polygons, corners counter-clockwise, padded by repeating the last corner.

    Attributes
    ----------
    corners : (K, V, 2)
    sizes : (K,)
        Number of corners of each.
    edges : (K, V)
        What the edge from corner j to the next one lies on: ±(number of a cut), with the side as its sign, or 0 for
        the box. Two polygons can only touch along edges with the same number and opposite signs.
    """

    corners: Floats
    sizes: Ints
    edges: Ints
    dim = 2

    @classmethod
    def box(cls) -> Polygons:
        """The unit box [−1, 1]²."""
        corners = np.array([[[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]])
        return cls(corners, np.array([4]), np.zeros((1, 4), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.corners)

    def part(self, rows: slice | Bits) -> Polygons:
        """Some of the polygons."""
        sizes = self.sizes[rows]
        width = int(sizes.max(initial=1))
        return Polygons(self.corners[rows, :width], sizes, self.edges[rows, :width])

    @staticmethod
    def joined(parts: list[Polygons]) -> Polygons:
        """All polygons of several sets, in order."""
        width = max(p.corners.shape[1] for p in parts)
        corners, edges = [], []
        for p in parts:
            index = np.minimum(np.arange(width), p.corners.shape[1] - 1)
            corners.append(p.corners[:, index])
            edges.append(p.edges[:, index])
        return Polygons(np.concatenate(corners), np.concatenate([p.sizes for p in parts]), np.concatenate(edges))

    def centres(self) -> Floats:
        """Mean of the corners, an interior point: (K, 2)."""
        real = np.arange(self.corners.shape[1]) < self.sizes[:, None]
        return (self.corners * real[:, :, None]).sum(1) / self.sizes[:, None]

    def measures(self) -> Floats:
        """Areas (K,), by the shoelace formula around each polygon's first corner."""
        d = self.corners - self.corners[:, :1]  # padding repeats the last corner and adds nothing
        return 0.5 * (d[:, :-1, 0] * d[:, 1:, 1] - d[:, :-1, 1] * d[:, 1:, 0]).sum(1)

    def cut(self, coefficients: Floats, first: int, limit: int, others: int = 0) -> tuple[Polygons, Ints, Bits]:
        """Cut every polygon by the zero lines of functions that are affine on it.

        In each round a polygon is cut by the line that is nearest to its middle, so that one crossed by m lines takes
        about log m rounds instead of m.

        Parameters
        ----------
        coefficients : (K or 1, U, 3)
            Of U functions per polygon, or the same for all.
        first : int
            The number of the first cut, for `edges`.
        limit : int
            Largest number of polygons.
        others : int
            Other polygons that count towards the limit.

        Returns
        -------
        polygons, parent (K',), bits (K', U)
            The pieces, which polygon each lies in, and which functions are positive on it.
        """
        owner, lines = self._crossing(coefficients)
        todo, origin = self, np.arange(len(self))
        done: list[Polygons] = []
        parents: list[Ints] = []
        finished = 0
        while True:
            busy = np.zeros(len(todo), dtype=bool)
            busy[owner] = True
            if not busy.all():
                done.append(todo.part(~busy))
                parents.append(origin[~busy])
                finished += len(done[-1])
            if not len(owner):
                break
            place = np.cumsum(busy) - 1  # of each busy polygon among the busy ones
            todo, origin, owner = todo.part(busy), origin[busy], place[owner]
            if others + finished + 2 * len(todo) > limit:
                raise too_many(limit)
            chosen = _nearest(todo.centres(), owner, lines)
            numbers = first + np.arange(len(todo))
            first += len(todo)
            above, below = todo._halve(lines[chosen], numbers)
            rest = np.ones(len(owner), dtype=bool)
            rest[chosen] = False
            owner, lines = owner[rest], lines[rest]
            owner = np.concatenate([owner, owner + len(todo)])
            lines = np.concatenate([lines, lines])
            todo, origin = Polygons.joined([above, below]), np.concatenate([origin, origin])
            keep = _crosses(todo.corners[owner], lines)
            owner, lines = owner[keep], lines[keep]
        pieces, parent = Polygons.joined(done), np.concatenate(parents)
        return pieces, parent, _signs(coefficients, parent, pieces.centres())

    def _crossing(self, coefficients: Floats) -> tuple[Ints, Floats]:
        """(polygon, line) for every line that has corners of its polygon on both sides."""
        owners, lines = [], []
        step = max(1, (1 << 22) // (coefficients.shape[1] * self.corners.shape[1] + 1))
        for lo in range(0, len(self), step):
            corners = self.corners[lo : lo + step]
            c = coefficients if len(coefficients) == 1 else coefficients[lo : lo + step]
            values = corners @ c[:, :, 1:].transpose(0, 2, 1) + c[:, None, :, 0]
            slack = np.abs(c).sum(-1) * TOLERANCE
            k, u = np.nonzero((values.max(1) > slack) & (values.min(1) < -slack))
            owners.append(k + lo)
            lines.append(c[0, u] if len(c) == 1 else c[k, u])
        return np.concatenate(owners), np.concatenate(lines)

    def _halve(self, lines: Floats, numbers: Ints) -> tuple[Polygons, Polygons]:
        """The parts above and below one line each: (K, 3) lines that really cross."""
        k, width = self.corners.shape[:2]
        rows = np.arange(k)[:, None]
        slot = np.arange(width)
        real = slot < self.sizes[:, None]
        following = np.where(slot + 1 < self.sizes[:, None], slot + 1, 0)
        values = self.corners @ lines[:, 1:, None]
        values = values[:, :, 0] + lines[:, :1]
        slack = np.abs(lines).sum(1, keepdims=True) * TOLERANCE
        sign = np.where(np.abs(values) <= slack, 0, np.sign(values)).astype(np.int8)
        after, sign_after = values[rows, following], sign[rows, following]
        between = real & (sign * sign_after < 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(between, values / (values - after), 0.0)[:, :, None]
        points = self.corners + t * (self.corners[rows, following] - self.corners)
        both = np.empty((k, 2 * width, 2))
        both[:, 0::2], both[:, 1::2] = self.corners, points
        parts = []
        for side in (1, -1):
            s, s_after = side * sign, side * sign_after
            keep = np.empty((k, 2 * width), dtype=bool)
            keep[:, 0::2], keep[:, 1::2] = real & (s >= 0), between
            label = np.empty((k, 2 * width), dtype=np.int64)
            cut = (side * numbers)[:, None]
            label[:, 0::2] = np.where((s == 0) & (s_after < 0), cut, self.edges)
            label[:, 1::2] = np.where(s > 0, cut, self.edges)
            sizes = keep.sum(1)
            order = np.argsort(~keep, axis=1, kind="stable")[:, : sizes.max()]
            order = order[rows, np.minimum(np.arange(order.shape[1]), sizes[:, None] - 1)]
            parts.append(Polygons(both[rows, order], sizes, label[rows, order]))
        return parts[0], parts[1]

    def neighbours(self) -> Ints:
        """Pairs of polygons that share a piece of an edge: (E, 2).

        Only edges of the same cut, from opposite sides, are compared.
        """
        real = (np.arange(self.corners.shape[1]) < self.sizes[:, None]) & (self.edges != 0)
        k, j = np.nonzero(real)
        if not len(k):
            return np.empty((0, 2), dtype=np.int64)
        start = self.corners[k, j]
        end = self.corners[k, np.where(j + 1 < self.sizes[k], j + 1, 0)]
        label = self.edges[k, j]
        _, cut = np.unique(np.abs(label), return_inverse=True)
        length = np.linalg.norm(end - start, axis=1)
        longest = np.lexsort((length, cut))[np.searchsorted(np.sort(cut), np.arange(cut.max() + 1), side="right") - 1]
        direction = (end - start)[longest] / np.maximum(length[longest], 1e-300)[:, None]
        base = start[longest]
        # positions on the line, shifted by the number of the cut, so that one sorted search serves all cuts
        place = np.stack([((p - base[cut]) * direction[cut]).sum(1) for p in (start, end)])
        lo, hi = place.min(0) + 8.0 * cut, place.max(0) + 8.0 * cut
        above, below = np.nonzero(label > 0)[0], np.nonzero(label < 0)[0]
        below = below[np.argsort(lo[below], kind="stable")]
        slack = max(1e-9, 1e-14 * float(hi.max()))  # the shift costs digits where there are millions of cuts
        a = np.searchsorted(hi[below], lo[above] + slack)
        b = np.searchsorted(lo[below], hi[above] - slack)
        many = np.maximum(b - a, 0)
        left = np.repeat(above, many)
        right = below[np.repeat(a - np.concatenate([[0], np.cumsum(many)[:-1]]), many) + np.arange(many.sum())]
        return np.stack([k[left], k[right]], axis=1)


def _crosses(corners: Floats, lines: Floats) -> Bits:
    """Whether each line has corners of its own polygon on both sides: (P, V, 2) and (P, 3)."""
    found = np.empty(len(lines), dtype=bool)
    for lo in range(0, len(lines), 1 << 17):
        c = lines[lo : lo + (1 << 17)]
        values = np.matmul(corners[lo : lo + (1 << 17)], c[:, 1:, None])[:, :, 0] + c[:, :1]
        slack = np.abs(c).sum(1) * TOLERANCE
        found[lo : lo + (1 << 17)] = (values.max(1) > slack) & (values.min(1) < -slack)
    return found


def _nearest(middle: Floats, owner: Ints, lines: Floats) -> Ints:
    """For each polygon, which of its lines passes nearest to its middle; every polygon has one."""
    distance = np.abs((middle[owner] * lines[:, 1:]).sum(1) + lines[:, 0]) / np.hypot(lines[:, 1], lines[:, 2])
    order = np.lexsort((distance, owner))
    return order[np.searchsorted(owner[order], np.arange(len(middle)))]


@dataclass(frozen=True)
class Intervals:
    """Intervals of [−1, 1], in order: `ends` (K, 2)."""

    ends: Floats
    dim = 1

    @classmethod
    def box(cls) -> Intervals:
        """The unit interval [−1, 1]."""
        return cls(np.array([[-1.0, 1.0]]))

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, rows: slice) -> Intervals:
        """Some of the intervals."""
        return replace(self, ends=self.ends[rows])

    def centres(self) -> Floats:
        """Middles (K, 1)."""
        return self.ends.mean(1, keepdims=True)

    def measures(self) -> Floats:
        """Lengths (K,)."""
        return self.ends[:, 1] - self.ends[:, 0]

    def cut(self, coefficients: Floats, first: int, limit: int, others: int = 0) -> tuple[Intervals, Ints, Bits]:
        """Cut every interval at the zeros of functions that are affine on it; as `Polygons.cut`."""
        c = np.broadcast_to(coefficients, (len(self), *coefficients.shape[1:]))
        with np.errstate(divide="ignore", invalid="ignore"):
            zeros = -c[:, :, 0] / c[:, :, 1]
            k, u = np.nonzero((zeros > self.ends[:, :1] + TOLERANCE) & (zeros < self.ends[:, 1:] - TOLERANCE))
        place = zeros[k, u]
        order = np.lexsort((place, k))
        k, place = k[order], place[order]
        new = np.ones(len(k), dtype=bool)
        new[1:] = (k[1:] != k[:-1]) | (place[1:] - place[:-1] > TOLERANCE)
        k, place = k[new], place[new]
        if others + len(self) + len(k) > limit:
            raise too_many(limit)
        parent = np.concatenate([np.arange(len(self)), k])
        starts, stops = np.concatenate([self.ends[:, 0], place]), np.concatenate([self.ends[:, 1], place])
        starts, stops = starts[np.lexsort((starts, parent))], stops[np.lexsort((stops, parent))]
        parent = np.sort(parent)
        pieces = Intervals(np.stack([starts, stops], axis=1))
        return pieces, parent, _signs(coefficients, parent, pieces.centres())


Cells: TypeAlias = Polygons | Intervals
