"""`slice2d` and `segment1d`: the exact partition of a plane or a segment into the cells of a network's gates.

On each cell all gates are constant and the network is affine. `tracking.py` finds the cells; the results are classes of
`partitions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.budgets import resolve_budget
from pathlens.errors import OptionError, RegionError, ShapeError
from pathlens.indexing import is_count
from pathlens.recording import Snapshot
from pathlens.regions.cells import Floats, Intervals, Polygons, box_bounds
from pathlens.regions.networks import HardNetwork, hard_network
from pathlens.regions.partitions import Plane, Segment1D, Slice2D, as_point
from pathlens.regions.tracking import FinishedCells, Tracker

MOST_CELLS = 2_000_000


def slice2d(
    net: nn.Module | Snapshot,
    *,
    plane: Plane | Sequence[Any] | None = None,
    box: Any = 1.0,
    max_cells: int | None = None,
) -> Slice2D:
    """The exact partition of a rectangle in input space into the convex cells of a network's gates.

    Layer by layer: on a polygon on which all earlier gates are constant, the pre-activations of the next layer are
    affine in the plane's coordinates, q(s, t) = c_0 + c_1 s + c_2 t, and the polygon is cut along q = 0. Exact up to
    rounding, in float64: the polygons tile the box, and on each the outputs are affine. A gate is on where q > 0;
    edges, where some q = 0, have no area. A line within 1e-12 of the box's size from a corner is taken to pass through
    it. Soft networks are sliced with hard gates (`with_gate("hard")`).

    Parameters
    ----------
    net : nn.Module or Snapshot
        Any DLGN, a ReLU network, a network gated by a ReLU network, or a plain module with ReLUs or
        LeakyReLUs: fully connected, convolutional, residual; batch-norm in eval mode. No max-pooling.
    plane : Plane or (origin, u, v), optional
        Arrays of the input's shape. For two inputs the default is the input space itself.
    box : float or ((s_min, s_max), (t_min, t_max))
        Bounds of the coordinates; a number r means [−r, r]².
    max_cells : int, optional
        More cells than this raise a BudgetError: two million unless given, fewer where they would take more than half
        of the free memory.

    Returns
    -------
    Slice2D

    Notes
    -----
    K cells cost O(K·log K) polygon cuts and, per layer, one forward pass of 3K rows. Half-space paper, section 2.

    Examples
    --------
    >>> from pathlens import models
    >>> cells = slice2d(models.dlgn(2, hidden=(8, 8), seed=0), box=1.0)
    >>> cells  # without biases every line passes through the origin: 2 cells for each of the 16 units
    Slice2D(32 convex polygons in [-1, 1] × [-1, 1] of a plane in 2 inputs; 2 gate sites,
    hard gates of a network with soft β=4; 1 outputs, affine on each)
    >>> cells.counts[:3], cells.path_region([0, 3]).n_components
    ([..., ..., ...], 1)
    """
    where = "slice2d"
    if plane is None:
        hard = hard_network(net, where)
        if hard.input_shape != (2,):
            raise ShapeError(
                f"slice2d: inputs have shape {hard.input_shape}, so a plane is needed. Give plane=Plane(origin, u, v) "
                "or Plane.through(x0, x1, x2)."
            )
        plane = Plane(*torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    else:
        if not isinstance(plane, Plane):
            if not isinstance(plane, (tuple, list)) or len(plane) != 3:
                raise ShapeError("slice2d: plane must be a Plane or (origin, u, v), three arrays of the input's shape.")
            plane = Plane(*plane)
        hard = hard_network(net, where, plane.origin.shape)
    bounds = box_bounds(box, 2)
    middle, half = bounds.mean(1), (bounds[:, 1] - bounds[:, 0]) / 2
    points = plane.points(middle + np.array([[0, 0], [half[0], 0], [0, half[1]]]))
    found = Tracker(hard, points, where).run(Polygons.box(), _limit(max_cells, hard, where))
    patterns, maps = _collect(hard, found, middle, half)
    cells = Polygons.joined([part.cells for part in found if isinstance(part.cells, Polygons)])
    return Slice2D(patterns, maps, hard.label, hard, plane, torch.from_numpy(bounds), cells)


def segment1d(net: nn.Module | Snapshot, a: Any, b: Any, *, max_cells: int | None = None) -> Segment1D:
    """The exact partition of the segment from a to b into intervals on which all gates are constant.

    Parameters
    ----------
    net : nn.Module or Snapshot
        As for `slice2d`.
    a, b : tensors or arrays of the input's shape
        The coordinate is 0 at a and 1 at b.
    max_cells : int, optional
        More intervals than this raise a BudgetError; the default is that of `slice2d`.

    Examples
    --------
    A bump at 1 and one at 3, from four ReLUs (half-space paper, Figure 1, left): the path through the first unit of
    each layer is active on two intervals.

    >>> import torch
    >>> from pathlens import models
    >>> net = models.relu(1, hidden=(4, 1), bias=True)
    >>> with torch.no_grad():
    ...     _ = net.values.linear1.weight.fill_(1.0), net.values.linear1.bias.copy_(-torch.arange(4.0))
    ...     _ = net.values.linear2.weight.copy_(torch.tensor([[1.0, -2, 2, -2]])), net.values.linear2.bias.fill_(-0.5)
    >>> segment1d(net, [0.0], [4.0]).path_region([0, 0]).ends[..., 0]
    tensor([[0.5000, 1.5000],
            [2.5000, 3.5000]], dtype=torch.float64)
    """
    where = "segment1d"
    start, end = as_point(a, "a", where), as_point(b, "b", where)
    if start.shape != end.shape or start.ndim == 0:
        shapes = f"{tuple(start.shape)}, {tuple(end.shape)}"
        raise ShapeError(f"segment1d: a and b must both have the shape of one input, got {shapes}.")
    if torch.equal(start, end):
        raise RegionError("segment1d: a and b are the same point. Give two different ones.")
    hard = hard_network(net, where, start.shape)
    points = torch.stack([(start + end) / 2, end])
    found = Tracker(hard, points, where).run(Intervals.box(), _limit(max_cells, hard, where))
    half = np.array([0.5])
    patterns, maps = _collect(hard, found, half, half)
    ends = [part.cells.ends for part in found if isinstance(part.cells, Intervals)]
    starts = torch.from_numpy(np.concatenate(ends)[:, 0])
    starts, order = starts.sort(stable=True)
    breaks = torch.nn.functional.pad((1 + starts) / 2, (0, 1), value=1.0)
    patterns = {name: bits[order] for name, bits in patterns.items()}
    return Segment1D(patterns, maps[order], hard.label, hard, start, end, breaks)


def _limit(max_cells: int | None, hard: HardNetwork, where: str) -> int:
    """Largest number of cells, by default what fits in memory: gates, and affine maps of about two layers while cut."""
    if max_cells is not None:
        if not is_count(max_cells):
            raise OptionError(f"{where}: max_cells must be a positive integer or None, got {max_cells!r}.")
        return max_cells
    units = [math.prod(shape) for shape in hard.shapes.values()]
    bytes_per_cell = 48 * max(units, default=0) + 4 * sum(units) + 1000
    return min(MOST_CELLS, max(1, resolve_budget(None, torch.device("cpu")) // bytes_per_cell))


def _collect(
    hard: HardNetwork, found: list[FinishedCells], middle: Floats, half: Floats
) -> tuple[dict[str, Tensor], Tensor]:
    """Gates of all cells, and their maps in the user's coordinates: z = (coordinate − middle) / half."""
    patterns = {
        name: torch.from_numpy(np.concatenate([part.bits[i] for part in found])) for i, name in enumerate(hard.sites)
    }
    unit = np.concatenate([part.outputs for part in found])
    slopes = unit[:, :, 1:] / half
    maps = np.concatenate([unit[:, :, :1] - (slopes @ middle)[:, :, None], slopes], axis=2)
    return patterns, torch.from_numpy(maps)
