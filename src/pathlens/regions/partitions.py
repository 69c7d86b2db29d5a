"""Partitions of a plane or a segment: polygons and intervals with their gates, path counts and affine outputs.

They are computed by `slices.py`. Results are float64 tensors on the CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.data.inputs import as_numbers
from pathlens.errors import RegionError, ShapeError
from pathlens.indexing import as_number
from pathlens.regions.cells import Floats, Ints, Polygons
from pathlens.regions.networks import HardNetwork
from pathlens.regions.summaries import SliceSummary, components, summarise


def as_point(value: Any, name: str, where: str) -> Tensor:
    """An input as a finite float64 tensor on the CPU."""
    try:
        array = as_numbers(value).cpu().double().numpy()
    except (TypeError, ValueError) as error:
        raise RegionError(f"{where}: {name} is not an array of numbers ({error}).") from error
    if not np.isfinite(array).all():
        raise RegionError(f"{where}: {name} contains NaN or infinity. Give finite numbers.")
    return torch.from_numpy(array.copy())


@dataclass(frozen=True, repr=False)
class Plane:
    """A plane in input space: x = origin + s·u + t·v, with coordinates (s, t).

    The directions need not be orthogonal or of length one; areas are in the coordinates (s, t).

    Examples
    --------
    >>> plane = Plane.through([0.0, 0, 0], [1.0, 0, 0], [0.0, 0, 1])
    >>> plane
    Plane(x = origin + s·u + t·v, x of shape (3,), |u| = 1, |v| = 1, 90° between them)
    >>> plane.points([[2.0, 3.0]])
    tensor([[2., 0., 3.]], dtype=torch.float64)
    """

    origin: Tensor
    u: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        for name in ("origin", "u", "v"):
            object.__setattr__(self, name, as_point(getattr(self, name), name, "Plane"))
        if not self.origin.shape == self.u.shape == self.v.shape or self.origin.ndim == 0:
            raise ShapeError(
                "Plane: origin and both directions must have the shape of one input, got "
                f"{tuple(self.origin.shape)}, {tuple(self.u.shape)} and {tuple(self.v.shape)}."
            )
        sizes = float(self.u.norm()), float(self.v.norm())
        singular = torch.linalg.svdvals(
            torch.stack([self.u.flatten() / (sizes[0] or 1), self.v.flatten() / (sizes[1] or 1)])
        )
        if min(sizes) == 0 or self.u.numel() < 2 or singular[-1] < 1e-10:
            raise RegionError(
                f"Plane: the directions are parallel or zero (lengths {sizes[0]:.3g} and {sizes[1]:.3g}). Choose two "
                "independent directions, or use segment1d."
            )

    @classmethod
    def through(cls, a: Any, b: Any, c: Any) -> Plane:
        """The plane through three inputs, at coordinates (0, 0), (1, 0) and (0, 1)."""
        a, b, c = (as_point(p, "a point", "Plane.through") for p in (a, b, c))
        if not a.shape == b.shape == c.shape:
            shapes = ", ".join(str(tuple(p.shape)) for p in (a, b, c))
            raise ShapeError(f"Plane.through: points must have one shape, got {shapes}.")
        return cls(a, b - a, c - a)

    def __repr__(self) -> str:
        u, v = float(self.u.norm()), float(self.v.norm())
        angle = math.degrees(math.acos(min(max(float((self.u * self.v).sum()) / (u * v), -1.0), 1.0)))
        return (
            f"Plane(x = origin + s·u + t·v, x of shape {tuple(self.origin.shape)}, |u| = {u:.3g}, |v| = {v:.3g}, "
            f"{angle:.0f}° between them)"
        )

    def points(self, coordinates: Any) -> Tensor:
        """Inputs at coordinates (n, 2)."""
        places = as_numbers(coordinates).to(torch.float64)
        return self.origin + torch.tensordot(places, torch.stack([self.u, self.v]), 1)


def _plane_coordinates(value: Any, where: str) -> Floats:
    """Coordinates in a plane as float64, (n, 2); one pair becomes a row. NaN is allowed, and lies in no cell."""
    try:
        array = np.atleast_2d(as_numbers(value).cpu().double().numpy())
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != 2 or array.shape[1] != 2:
        got = np.shape(value) if array.size else repr(value)
        raise ShapeError(f"{where}: expected plane coordinates of shape (n, 2), got {got}.")
    return array


def _squares(z: Floats, side: int) -> Ints:
    """Column and row of the square of points in [−1, 1]², of a grid of side × side; the nearest where outside."""
    return np.clip(np.floor((z + 1) * (side / 2)), 0, side - 1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Partition(ABC):
    """Base of `Slice2D` and `Segment1D`: gates, path counts and affine maps, cell by cell.

    Attributes
    ----------
    patterns : dict site → bool Tensor (K, units)
        Which gates are on in each cell; units of a convolution are flattened (channel, position…).
    maps : Tensor (K, c, 1 + dim)
        The outputs on each cell: maps[k, :, 0] + maps[k, :, 1:] @ coordinates.
    label : str
        Whose gates these are.
    """

    patterns: dict[str, Tensor]
    maps: Tensor
    label: str
    _hard: HardNetwork

    def __len__(self) -> int:
        return len(self.maps)

    @cached_property
    def counts(self) -> list[int]:
        """Number of active paths in each cell, as exact integers: Π_l (gates on in layer l).

        With convolutions or shortcuts, `pathlens.paths.count` at a point inside each cell.
        """
        if not self._hard.chain:
            from pathlens.paths import count

            return count(self._hard.net, self.inputs())
        totals = [1] * len(self)
        for bits in self.patterns.values():
            totals = [t * on for t, on in zip(totals, bits.sum(1).tolist())]
        return totals

    @abstractmethod
    def inputs(self) -> Tensor:
        """One input inside each cell: (K, ...)."""

    def active(self, path: Sequence[Any]) -> Tensor:
        """In which cells every gate along a path is on: (K,) bool."""
        mask = torch.ones(len(self), dtype=torch.bool)
        bits = list(self.patterns.values())
        for site, unit in self._hard.unit_numbers(path, "path_region"):
            mask &= bits[site][:, unit]
        return mask

    def _evaluate(self, cell: Tensor, z: Tensor) -> Tensor:
        """The affine maps of given cells at coordinates z (n, dim); NaN where the cell is −1."""
        values = self.maps[cell, :, 0] + torch.einsum("ncd,nd->nc", self.maps[cell, :, 1:], z)
        return torch.where(cell[:, None] < 0, torch.nan, values)


@dataclass(frozen=True, eq=False)
class Slice2D(Partition):
    """The partition of a rectangle in a plane into convex polygons.

    Attributes
    ----------
    plane : Plane
    box : Tensor (2, 2)
        Bounds of s and of t.
    patterns, maps, label
        As in `Partition`: gates and affine outputs of each polygon.

    Examples
    --------
    >>> from pathlens import models
    >>> from pathlens.regions import slice2d
    >>> cells = slice2d(models.relu(2, hidden=(4, 4), bias=True, seed=0), box=2.0)
    >>> len(cells), cells.polygon(0).shape[1], round(float(cells.areas.sum()), 9)
    (16, 2, 16.0)
    """

    plane: Plane
    box: Tensor
    _cells: Polygons

    @property
    def corners(self) -> Tensor:
        """Corners (K, V, 2) in plane coordinates, counter-clockwise, padded by repeating the last one."""
        return self._in_plane(self._cells.corners)

    @property
    def sizes(self) -> Tensor:
        """Number of corners of each polygon: (K,)."""
        return torch.from_numpy(self._cells.sizes)

    def polygon(self, k: int) -> Tensor:
        """Corners of one polygon: (V, 2)."""
        k = as_number(k, len(self), "polygons")
        return self._in_plane(self._cells.corners[k, : self._cells.sizes[k]])

    @property
    def centres(self) -> Tensor:
        """An interior point of each polygon, the mean of its corners: (K, 2) plane coordinates."""
        return self._in_plane(self._cells.centres())

    @property
    def areas(self) -> Tensor:
        """Areas in plane coordinates: (K,)."""
        return torch.from_numpy(self._cells.measures()) * self._half.prod()

    @property
    def _half(self) -> Tensor:
        return (self.box[:, 1] - self.box[:, 0]) / 2

    def inputs(self) -> Tensor:
        return self.plane.points(self.centres)

    def _in_plane(self, unit: Floats) -> Tensor:
        return self.box.mean(1) + torch.from_numpy(unit) * self._half

    @cached_property
    def neighbours(self) -> Tensor:
        """Pairs of polygons that share a piece of an edge: (E, 2)."""
        return torch.from_numpy(self._cells.neighbours())

    def locate(self, coordinates: Any) -> Tensor:
        """The polygon in which each point lies, −1 outside the box: (n, 2) → (n,).

        A point on an edge counts to the polygon with the smallest number.
        """
        z = (_plane_coordinates(coordinates, "locate") - self.box.mean(1).numpy()) / self._half.numpy()
        found = np.full(len(z), -1)
        inside = np.nonzero((np.abs(z) <= 1 + 1e-9).all(1))[0]
        # points are compared only with polygons that overlap their square of a grid; with more squares, finding these
        # polygons would cost more than the comparisons
        side = math.isqrt(math.isqrt(16 * len(inside))) + 1
        corners = self._cells.corners
        low, high = _squares(corners.min(1) - 1e-9, side), _squares(corners.max(1) + 1e-9, side)
        own = _squares(z[inside], side)
        order = np.lexsort(own.T)
        starts = np.nonzero(np.diff(own[order], axis=0).any(1))[0] + 1
        for part in np.split(order, starts) if len(order) else ():
            at, rows = own[part[0]], inside[part]
            found[rows] = self._deepest(z[rows], np.nonzero(((low <= at) & (at <= high)).all(1))[0])
        return torch.from_numpy(found)

    def _deepest(self, z: Floats, near: Ints) -> Ints:
        """Of the polygons `near`, the one in which each point lies deepest: its depth is negative in all others."""
        normals, offsets = (t[near] for t in self._sides)
        found = np.full(len(z), -1)
        step = max(1, (1 << 22) // offsets.size)
        for lo in range(0, len(z), step):
            depth = (z[lo : lo + step] @ normals.reshape(-1, 2).T).reshape(-1, *offsets.shape) + offsets
            depth = depth.min(2)
            found[lo : lo + step] = np.where(depth.max(1) >= -1e-12, near[depth.argmax(1)], -1)
        return found

    @cached_property
    def _sides(self) -> tuple[Floats, Floats]:
        """Inward unit normals (K, V, 2) and offsets (K, V) of all edges, in units of the box; padding is no bound."""
        start = self._cells.corners
        last = np.arange(start.shape[1]) == self._cells.sizes[:, None] - 1
        edge = np.where(last[:, :, None], start[:, :1], np.roll(start, -1, axis=1)) - start
        edge[np.arange(start.shape[1]) >= self._cells.sizes[:, None]] = 0.0
        length = np.linalg.norm(edge, axis=2)
        normals = np.stack([-edge[..., 1], edge[..., 0]], axis=2) / np.maximum(length, 1e-300)[:, :, None]
        return normals, np.where(length > 0, -(normals * start).sum(2), np.inf)

    def evaluate(self, coordinates: Any) -> Tensor:
        """Outputs at plane coordinates (n, 2) from the affine maps: (n, c); NaN outside the box."""
        z = torch.from_numpy(_plane_coordinates(coordinates, "evaluate"))
        return self._evaluate(self.locate(z), z)

    def path_region(self, path: Sequence[Any]) -> SliceRegion:
        """Where a path is active: the union of the polygons on which all its gates are on."""
        cells = self.active(path).nonzero()[:, 0]
        pieces = components(len(self), self.neighbours.numpy(), cells.numpy())
        return SliceRegion(self, tuple(path), cells, torch.from_numpy(pieces))

    def summary(self, paths: int = 1000, seed: int = 0) -> SliceSummary:
        """Counts, faces and connectedness; of at most `paths` path regions, a random choice where there are more."""
        return summarise(self, paths, seed)

    def plot(self, color: str = "pattern", ax: Any = None, output: int = 0, **style: Any) -> Any:
        """Draw the polygons, coloured by "pattern", path "count" (logarithmic) or "output"."""
        from pathlens.regions.pictures import plot_slice

        return plot_slice(self, color, ax, output, **style)

    def __repr__(self) -> str:
        (a, b), (c, d) = self.box.tolist()
        return (
            f"Slice2D({len(self)} convex polygons in [{a:g}, {b:g}] × [{c:g}, {d:g}] of a plane in "
            f"{'×'.join(map(str, self.plane.origin.shape))} inputs; {len(self.patterns)} gate sites, {self.label}; "
            f"{self.maps.shape[1]} outputs, affine on each)"
        )


@dataclass(frozen=True, eq=False)
class SliceRegion:
    """Where a path is active in a slice.

    Attributes
    ----------
    path : tuple
    cells : Tensor (M,)
        Numbers of its polygons.
    component : Tensor (M,)
        Which connected component each of them belongs to.
    """

    slice: Slice2D
    path: tuple[Any, ...]
    cells: Tensor
    component: Tensor

    @property
    def n_components(self) -> int:
        """Number of connected pieces; 0 where the path is nowhere active in the box."""
        return len(self.component.unique())

    @property
    def area(self) -> float:
        """Area in plane coordinates."""
        return float(self.slice.areas[self.cells].sum())

    def contains(self, coordinates: Any) -> Tensor:
        """Whether points (n, 2) of the plane lie in it: (n,) bool."""
        return torch.isin(self.slice.locate(coordinates), self.cells)

    def __repr__(self) -> str:
        return (
            f"SliceRegion(path {self.path}: {len(self.cells)} of {len(self.slice)} polygons, area {self.area:.6g}, "
            f"{self.n_components} connected component(s); {self.slice.label})"
        )


@dataclass(frozen=True, eq=False)
class Segment1D(Partition):
    """The partition of a segment from a to b into intervals; the coordinate runs from 0 at a to 1 at b.

    Attributes
    ----------
    start, end : Tensors of the input's shape
    breaks : Tensor (K + 1,)
        Ends of the intervals, from 0 to 1.
    patterns, maps, label
        As in `Partition`.

    Examples
    --------
    >>> from pathlens import models
    >>> from pathlens.regions import segment1d
    >>> line = segment1d(models.relu(2, hidden=(4, 4), bias=True, seed=0), [-2.0, 0.0], [2.0, 0.0])
    >>> len(line), line.breaks.shape, line.maps.shape
    (4, torch.Size([5]), torch.Size([4, 1, 2]))
    """

    start: Tensor
    end: Tensor
    breaks: Tensor

    def points(self, t: Any) -> Tensor:
        """Inputs at coordinates t (n,)."""
        return self.start + torch.tensordot(as_numbers(t).double(), self.end - self.start, 0)

    def inputs(self) -> Tensor:
        return self.points((self.breaks[1:] + self.breaks[:-1]) / 2)

    @property
    def lengths(self) -> Tensor:
        """Lengths of the intervals as shares of the segment: (K,)."""
        return self.breaks.diff()

    def locate(self, t: Any) -> Tensor:
        """The interval of each coordinate, −1 outside [0, 1] and for NaN; a break counts to the interval before it."""
        t = as_numbers(t).double()
        found = (torch.searchsorted(self.breaks, t.contiguous()) - 1).clamp(0, len(self) - 1)
        return torch.where((t >= 0) & (t <= 1), found, -1)

    def evaluate(self, t: Any) -> Tensor:
        """Outputs at coordinates t (n,) from the affine maps: (n, c); NaN outside [0, 1]."""
        t = torch.atleast_1d(as_numbers(t).double())
        return self._evaluate(self.locate(t), t[:, None])

    def path_region(self, path: Sequence[Any]) -> SegmentRegion:
        """Where a path is active: a union of intervals."""
        change = torch.nn.functional.pad(self.active(path).int(), (1, 1)).diff()
        return SegmentRegion(
            self, tuple(path), torch.stack([self.breaks[change == 1], self.breaks[change == -1]], dim=1)
        )

    def plot(self, ax: Any = None, output: int = 0, **style: Any) -> Any:
        """Draw one output along the segment, with the breaks."""
        from pathlens.regions.pictures import plot_segment

        return plot_segment(self, ax, output, **style)

    def __repr__(self) -> str:
        return (
            f"Segment1D({len(self)} intervals; {len(self.patterns)} gate sites, {self.label}; {self.maps.shape[1]} "
            "outputs, affine on each)"
        )


@dataclass(frozen=True, eq=False)
class SegmentRegion:
    """Where a path is active on a segment: `intervals` (M, 2) of coordinates, disjoint and in order."""

    segment: Segment1D
    path: tuple[Any, ...]
    intervals: Tensor

    @property
    def n_components(self) -> int:
        """Number of intervals."""
        return len(self.intervals)

    @property
    def ends(self) -> Tensor:
        """Both ends of each interval as inputs: (M, 2, ...)."""
        return self.segment.points(self.intervals)

    def __repr__(self) -> str:
        shown = " ∪ ".join(f"({a:.4g}, {b:.4g})" for a, b in self.intervals.tolist()) or "empty"
        return f"SegmentRegion(path {self.path}: {shown} of [0, 1]; {self.segment.label})"
