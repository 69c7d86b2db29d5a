"""`path_region`: where a path of a DLGN is active, an intersection of half-spaces, and its exact geometry.

Linear programs are solved by HiGHS; their results are verified in plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from pathlens.data.inputs import as_numbers
from pathlens.errors import OptionError, RegionError, ShapeError
from pathlens.indexing import is_count
from pathlens.recording import Snapshot
from pathlens.regions.cells import Floats, Polygons, box_bounds
from pathlens.regions.halfspaces import FLAT, HalfSpaces, as_points
from pathlens.regions.networks import hard_network

_LP = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Interior:
    """Proof that a region is not empty: a point of it, and its distance to the nearest boundary.

    Attributes
    ----------
    point : Tensor (d,)
    margin : float
        Every unit normal n and offset b of the region has n·point + b ≥ margin > 0.
    """

    point: Tensor
    margin: float


@dataclass(frozen=True)
class Farkas:
    """Proof that a region is empty: multipliers y ≥ 0 that add up to one with Σ y_i n_i = 0 and Σ y_i b_i ≤ 0.

    If all n_i·x + b_i were positive, so would be their mean with weights y; but it is Σ y_i b_i ≤ 0. In floating point
    both sums hold up to rounding: no x in [−reach, reach]^d has all n_i·x + b_i above `slack`.

    Attributes
    ----------
    multipliers : Tensor (faces,)
        For half-spaces with normals of length one (constant gates as they are).
    slack : float
    """

    multipliers: Tensor
    slack: float


class PathRegion:
    """The polyhedron {x : A x + b > 0} on which every gate along a path is on.

    The set is open: a hard gate is q > 0, so the boundary, where some q = 0, does not belong to it. Made by
    `path_region`; may also be made from any A and b.

    Attributes
    ----------
    normals : Tensor (L, d)
        A, normals of length one; a gate that does not depend on the input keeps a zero row.
    offsets : Tensor (L,)
        b, divided by the lengths of the normals.
    labels : tuple of str
        Which gate each row is.
    reach : float
        The centre is sought in [−reach, reach]^d first: a thousand times the farthest boundary's distance from the
        origin, 1000 where all pass through it.

    Examples
    --------
    >>> region = PathRegion([[1.0, 0], [0, 1], [-1, -1]], [0.0, 0, 1])  # a triangle
    >>> region
    PathRegion(3 half-spaces in R^2; not empty: a ball of radius 0.293 fits; bounded; given)
    >>> region.volume(), region.facets, region.contains([[0.2, 0.2], [1, 1]])
    (0.5, (0, 1, 2), tensor([ True, False]))
    """

    def __init__(
        self,
        normals: Any,
        offsets: Any,
        labels: Sequence[str] | None = None,
        label: str = "given",
        path: tuple[Any, ...] = (),
        *,
        constant: Tensor | None = None,
    ) -> None:
        A, b = (as_numbers(given).cpu().double().numpy().copy() for given in (normals, offsets))
        if A.ndim != 2 or b.shape != A.shape[:1] or 0 in A.shape:
            raise ShapeError(f"PathRegion: expected normals (L, d) and offsets (L,), got {A.shape} and {b.shape}.")
        if not (np.isfinite(A).all() and np.isfinite(b).all()):
            raise RegionError("PathRegion: NaN or infinity among normals and offsets. Give finite numbers.")
        # rows may have very different lengths: `constant` marks those that are zero but for rounding
        largest = np.abs(A).max(1)
        size = largest * np.linalg.norm(A / np.where(largest == 0, 1.0, largest)[:, None], axis=1)
        self._constant = (size == 0) if constant is None else constant.numpy() | (size == 0)
        A[self._constant] = 0.0
        size[self._constant] = 1.0
        self._A, self._b = A / size[:, None], b / size
        self.normals, self.offsets = torch.from_numpy(self._A), torch.from_numpy(self._b)
        self.labels = tuple(labels) if labels is not None else tuple(f"row {i}" for i in range(len(A)))
        self.label, self.path = label, path
        # the solver's tolerances are absolute, so programs are solved in units of the farthest boundary's distance
        self._unit = float(np.abs(self._b[~self._constant]).max(initial=0.0)) or 1.0
        self.reach = 1e3 * self._unit

    @property
    def dim(self) -> int:
        return self.normals.shape[1]

    def contains(self, X: Any) -> Tensor:
        """Whether points lie in the open region: (n, d) or (n, *input shape) → (n,) bool."""
        return (as_points(X, self.dim) @ self.normals.T + self.offsets > 0).all(1)

    # --- emptiness -----------------------------------------------------------------------------------------------

    @cached_property
    def certificate(self) -> Interior | Farkas:
        """A proof that the region is not empty (a point inside) or that it is (multipliers), checked in arithmetic."""
        dead = np.nonzero(self._constant & (self._b <= 0))[0]
        if len(dead):
            y = torch.zeros_like(self.offsets)
            y[dead[0]] = 1.0
            return Farkas(y, max(float(self._b[dead[0]]), 0.0))
        return self._inside(self.reach) or self._inside(self._farther()) or self._farkas()

    def _inside(self, reach: float) -> Interior | None:
        """The centre of the largest ball within [−reach, reach]^d, if its margin is more than rounding."""
        found = _centre(self._rows(), (np.full(self.dim, -reach), np.full(self.dim, reach)))
        if found is None:
            return None
        margin = float((self._A @ found[0] + self._b)[~self._constant].min(initial=math.inf))
        rounding = _ROUNDING * (np.linalg.norm(found[0]) + np.abs(self._rows()[1]).max(initial=0.0))
        return Interior(torch.from_numpy(found[0]), margin) if margin > rounding else None

    def _farther(self) -> float:
        """Half the edge of a box that contains a point of the region, at any distance; 0 if none is found.

        By the cone over the region: the largest s with A v + b τ ≥ s, τ ≥ s, |v_j| ≤ 1.
        """
        A, b = self._in_units()
        left = np.concatenate([np.column_stack([-A, -b, np.ones(len(b))]), [[0.0] * self.dim + [-1.0, 1.0]]])
        cost = np.append(np.zeros(self.dim + 1), -1.0)
        bounds = [(-1, 1)] * self.dim + [(0, 1), (0, None)]
        result = _minimise(cost, A_ub=left, b_ub=np.zeros(len(left)), bounds=bounds)
        if result.status != 0 or result.x[-1] <= 1e-10:
            return 0.0
        return 4 * self._unit * float(np.abs(result.x[: self.dim]).max() / result.x[self.dim])

    def _farkas(self) -> Farkas:
        """Minimise Σ y_i b_i over y ≥ 0, Σ y_i = 1, Σ y_i n_i = 0."""
        A, b = self._in_units()
        equal = np.concatenate([A.T, np.ones((1, len(b)))])
        right = np.append(np.zeros(self.dim), 1.0)
        result = _minimise(b, A_eq=equal, b_eq=right, bounds=(0, None))
        y = np.zeros(len(self._b))
        if result.status == 0:
            y[~self._constant] = np.maximum(result.x, 0.0)
            y /= y.sum()
        far = self.reach * math.sqrt(self.dim)
        slack = float(np.linalg.norm(y @ self._A) * far + max(float(y @ self._b), 0.0))
        if result.status != 0 or slack > 1e-6 * self.reach:
            raise RegionError(
                f"PathRegion: neither a point of the region of path {self.path} nor a proof of its emptiness was "
                "found: its half-spaces are opposite up to rounding. See halfspaces(net).groups() for such gates."
            )
        return Farkas(torch.from_numpy(y), slack)

    def _rows(self) -> tuple[Floats, Floats]:
        return self._A[~self._constant], self._b[~self._constant]

    def _in_units(self) -> tuple[Floats, Floats]:
        A, b = self._rows()
        return A, b / self._unit

    @property
    def is_empty(self) -> bool:
        """Whether no point has all gates of the path on; see `certificate` for the proof."""
        return isinstance(self.certificate, Farkas)

    def _interior(self, what: str) -> Interior:
        if isinstance(self.certificate, Farkas):
            raise RegionError(f"{what}: the region of path {self.path} is empty; `certificate` proves it.")
        return self.certificate

    # --- shape ---------------------------------------------------------------------------------------------------

    @property
    def chebyshev_centre(self) -> Tensor:
        """The middle of the largest ball that fits, within a large box where the region is unbounded: (d,)."""
        return self._interior("chebyshev_centre").point

    @property
    def inradius(self) -> float:
        """Radius of that ball, or the centre's distance to the nearest half-space."""
        return self._interior("inradius").margin

    @cached_property
    def is_bounded(self) -> bool:
        """Whether the region lies in some ball; an empty one does."""
        if self.is_empty:
            return True
        A, _ = self._rows()
        if len(A) <= self.dim or np.linalg.matrix_rank(A) < self.dim:
            return False
        # a direction v with A v ≥ 0, A v ≠ 0 leads to infinity; A v = 0 is v = 0, as the rank is full
        result = _minimise(-A.sum(0), A_ub=-A, b_ub=np.zeros(len(A)), bounds=(-1, 1))
        return bool(-result.fun <= 1e-9)

    @cached_property
    def facets(self) -> tuple[int, ...]:
        """Rows that are faces: leaving one of them out would change the region.

        Row i is redundant if the others imply it: min n_i·x + b_i over the others is not negative. One linear program
        per row; of equal rows the first is kept.
        """
        self._interior("facets")
        keep = [int(i) for i in np.nonzero(~self._constant)[0]]
        for i in reversed(list(keep)):  # from the last on, so that of equal rows the first stays
            others = [j for j in keep if j != i]
            rows = [*others, i]
            lower = -self._b[rows] / self._unit
            lower[-1] -= 1.0  # keeps the program bounded: how far below zero does not matter
            result = _minimise(self._A[i], A_ub=-self._A[rows], b_ub=-lower, bounds=(None, None))
            if result.status == 0 and result.fun + self._b[i] / self._unit >= -1e-9:
                keep.remove(i)
        return tuple(keep)

    def reduced(self) -> PathRegion:
        """The same region without redundant rows; the whole space keeps one constant row."""
        rows = list(self.facets) or [0]
        return PathRegion(self.normals[rows], self.offsets[rows], [self.labels[i] for i in rows], self.label, self.path)

    def volume(self, box: Any = None) -> float:
        """Length, area or volume (d ≤ 3) of the region, or of its part within a box; exact up to rounding.

        Parameters
        ----------
        box : float, (lo, hi) or d pairs, optional
            A number r means [−r, r]^d. Needed where the region is unbounded.
        """
        if self.dim > 3:
            raise RegionError(f"volume: exact for d ≤ 3, this region has d = {self.dim}. Use sample() and count.")
        if self.is_empty:
            return 0.0
        lo, hi = self._bounds("volume", box)
        A, b = self._rows()
        if self.dim == 1:
            left = max([lo[0], *(-b[A[:, 0] > 0])])
            right = min([hi[0], *(b[A[:, 0] < 0])])
            return float(max(right - left, 0.0))
        if self.dim == 2:
            middle, half = (lo + hi) / 2, (hi - lo) / 2
            lines = np.concatenate([(b + A @ middle)[:, None], A * half], axis=1)
            pieces, _, on = Polygons.box().cut(lines[None], 1, 1 << 20)
            return float(pieces.measures()[on.all(1)].sum() * half.prod())
        from scipy.spatial import ConvexHull, HalfspaceIntersection

        found = _centre((A, b), (lo, hi))
        if found is None or found[1] <= _ROUNDING * float(np.abs([lo, hi]).max()):
            return 0.0
        centre, unit = found  # Qhull's tolerances are absolute too
        faces = np.concatenate([np.eye(3), -np.eye(3), -A])
        offsets = np.concatenate([centre - hi, lo - centre, -(A @ centre + b)]) / unit
        corners = HalfspaceIntersection(np.column_stack([faces, offsets]), np.zeros(3)).intersections
        return float(ConvexHull(corners).volume) * unit**3

    def _bounds(self, what: str, box: Any) -> tuple[Floats, Floats]:
        """Bounds (d,) of a box, or of a bounded region by 2d linear programs."""
        if box is not None:
            low, high = box_bounds(box, self.dim).T
            return low, high
        if not self.is_bounded:
            raise RegionError(f"{what}: the region is unbounded. Give a box, such as box=1.0.")
        A, b = self._in_units()

        def end(direction: Floats) -> float:
            return float(_minimise(direction, A_ub=-A, b_ub=b, bounds=(None, None)).fun) * self._unit

        axes = np.eye(self.dim)
        return np.array([end(axis) for axis in axes]), np.array([-end(-axis) for axis in axes])

    def sample(self, n: int, box: Any = None, *, seed: int = 0, steps: int | None = None) -> Tensor:
        """n points spread uniformly over the region within a box, by hit-and-run.

        n independent chains start at the centre of the largest ball and take `steps` steps each: a random direction,
        then a uniform point of the chord. The distribution converges to the uniform one, slowly for long thin regions.

        Parameters
        ----------
        n : int
        box : as for `volume`; needed where the region is unbounded
        seed : int
        steps : int, optional
            Per point; 20 + 10·d by default. Cost n·steps·L·d.
        """
        self._interior("sample")
        if not is_count(n):
            raise OptionError(f"sample: n must be a positive number of points, got {n!r}.")
        steps = 20 + 10 * self.dim if steps is None else steps
        if steps < 1 or seed < 0:
            raise OptionError(f"sample: steps must be at least 1 and seed at least 0, got {steps!r} and {seed!r}.")
        lo, hi = self._bounds("sample", box)
        A, b = self._rows()
        start = _centre((A, b), (lo, hi))
        if start is None or not (start[1] > 0 and (A @ start[0] + b > 0).all()):
            raise RegionError("sample: the region and the box have no interior point in common. Give a larger box.")
        generator = np.random.default_rng(seed)
        x = np.tile(start[0], (n, 1))
        for _ in range(steps):
            v = generator.standard_normal((n, self.dim))
            v /= np.linalg.norm(v, axis=1, keepdims=True)
            # distances to the faces and how fast they grow along v; faces of the box need no products of matrices
            distance = np.concatenate([x @ A.T + b, x - lo, hi - x], axis=1)
            speed = np.concatenate([v @ A.T, v, -v], axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                t = np.maximum(distance, 0.0) / -speed
            ahead = np.where(speed < 0, t, np.inf).min(1)
            behind = np.where(speed > 0, t, -np.inf).max(1)
            x = x + (behind + generator.random(n) * (ahead - behind))[:, None] * v
        return torch.from_numpy(x)

    def __repr__(self) -> str:
        name = f"path {self.path}: " if self.path else ""
        start = f"PathRegion({name}{len(self.offsets)} half-spaces in R^{self.dim}; "
        if self.is_empty:
            return f"{start}empty, proved by multipliers; {self.label})"
        return (
            f"{start}not empty: a ball of radius {self.inradius:.3g} fits; "
            f"{'bounded' if self.is_bounded else 'unbounded'}; {self.label})"
        )


def _minimise(cost: Floats, **program: Any) -> Any:
    """Solve a linear program by HiGHS, to the tightest tolerances that it takes."""
    return linprog(cost, method="highs", options=_LP, **program)


def _centre(rows: tuple[Floats, Floats], box: tuple[Floats, Floats]) -> tuple[Floats, float] | None:
    """Centre and radius of the largest ball in {A x + b ≥ 0} and the box, A with rows of length one; None if empty."""
    A, b = rows
    d = len(box[0])
    size = float(np.abs(box).max())
    unit = min(size, float(np.abs(b).max(initial=0.0)) or size) or 1.0  # the solver's tolerances are absolute
    # a_i·x + b_i ≥ r,  x_j + r ≤ hi_j,  lo_j ≤ x_j − r
    faces = np.concatenate([-A, np.eye(d), -np.eye(d)])
    left = np.column_stack([faces, np.ones(len(faces))])
    right = np.concatenate([b, box[1], -box[0]]) / unit
    cost = np.append(np.zeros(d), -1.0)
    bounds = [(None, None)] * d + [(0, None)]
    result = _minimise(cost, A_ub=left, b_ub=right, bounds=bounds)
    return (result.x[:d] * unit, float(result.x[d]) * unit) if result.status == 0 else None


def path_region(
    net: nn.Module | Snapshot, path: Sequence[Any], *, input_shape: Sequence[int] | None = None
) -> PathRegion:
    """Where a path of a DLGN is active: A_π = {x : n_l·x + b_l > 0 for every unit of the path}.

    Parameters
    ----------
    net : GatedNetwork or Snapshot
        With a linear gate source, as for `halfspaces`. For ReLU networks see ``slice2d(net).path_region(path)``.
    path : sequence
        One hidden unit per gate site, numbered from 0, as `paths.top` gives them; −1 before the first unit where the
        path starts at a bias. Of a convolution a number or (channel, position…). In networks with shortcuts None
        leaves a site out.
    input_shape : sequence of int, optional
        Where the network begins with a convolution.

    Returns
    -------
    PathRegion

    Notes
    -----
    L normals, one backward pass each; its properties are computed when read, by linear programs of d + 1 variables.
    Half-space paper, eq. 4 (there with ≥: regions differ by their boundary only).

    Examples
    --------
    >>> from pathlens import models
    >>> region = path_region(models.dlgn(2, hidden=(4, 4), seed=0), [0, 2])
    >>> region.is_empty, region.is_bounded
    (False, False)
    >>> bool(region.contains(region.sample(5, box=1.0)).all())
    True
    """
    hard = hard_network(net, "path_region", input_shape, linear_only=True)
    spaces = HalfSpaces(hard, None)
    rows = [(hard.sites[s], u) for s, u in hard.unit_numbers(path, "path_region")]
    normals = torch.cat([spaces.normals(site, [unit]) for site, unit in rows])
    offsets = torch.stack([spaces.offsets(site)[unit] for site, unit in rows])
    constant = normals.norm(dim=1) <= FLAT * torch.tensor([spaces.longest(site) for site, _ in rows])
    labels = [f"{site}[{unit}]" for site, unit in rows]
    return PathRegion(normals, offsets, labels, hard.label, tuple(path), constant=constant)
