"""Summary of a slice: polygons, edges, path counts, and whether path regions are connected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pathlens.errors import OptionError
from pathlens.indexing import is_count
from pathlens.progress import ProgressBar
from pathlens.regions.cells import Bits, Ints

if TYPE_CHECKING:
    from pathlens.regions.partitions import Slice2D


@dataclass(frozen=True)
class SliceSummary:
    """Numbers that describe a slice.

    Attributes
    ----------
    polygons : int
    mean_faces : float
        Edges per polygon.
    least_paths, most_paths : int or None
        Active paths of a polygon; None where paths are not sequences of hidden units.
    total_paths : int or None
        All paths of the network, active or not.
    examined : int
        Path regions examined; all that there are if `complete`, else a random choice of paths that are active
        somewhere in the box.
    complete : bool
    active_paths, connected_paths : int
        Of those examined: active somewhere in the box, and in one piece.
    most_components : int
        Pieces of the most scattered path region.
    mean_path_cells : float
        Polygons of an active path region, on average.
    label : str
    """

    polygons: int
    mean_faces: float
    least_paths: int | None
    most_paths: int | None
    total_paths: int | None
    examined: int
    complete: bool
    active_paths: int
    connected_paths: int
    most_components: int
    mean_path_cells: float
    label: str

    def __str__(self) -> str:
        lines = [f"{self.polygons} convex polygons with {self.mean_faces:.2f} edges on average ({self.label})"]
        if self.total_paths is not None:
            which = "all" if self.complete else "a random choice of"
            lines += [
                f"active paths per polygon: {self.least_paths} to {self.most_paths} of {self.total_paths}",
                f"path regions ({which} {self.examined} examined): {self.active_paths} not empty in the box, "
                f"{self.connected_paths} connected, at most {self.most_components} pieces, "
                f"{self.mean_path_cells:.1f} polygons each",
            ]
        return "\n".join(lines)


def components(total: int, pairs: Ints, cells: Ints) -> Ints:
    """The connected component of each chosen cell, numbered from 0: neighbours (E, 2), cells (M,) → (M,)."""
    if not len(cells):
        return np.empty(0, dtype=np.int64)
    place = np.full(total, -1)
    place[cells] = np.arange(len(cells))
    inside = place[pairs]
    inside = inside[(inside >= 0).all(1)]
    graph = coo_array((np.ones(len(inside)), (inside[:, 0], inside[:, 1])), shape=(len(cells), len(cells)))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def summarise(cells: Slice2D, paths: int, seed: int) -> SliceSummary:
    """See `Slice2D.summary`."""
    if not is_count(paths):
        raise OptionError(
            f"summary: paths must be a positive integer, the number of path regions to examine, got {paths!r}."
        )
    edges = float(cells._cells.sizes.mean())
    if not cells._hard.chain:
        return SliceSummary(len(cells), edges, None, None, None, 0, False, 0, 0, 0, math.nan, cells.label)
    bits = [pattern.numpy() for pattern in cells.patterns.values()]
    total = math.prod(b.shape[1] for b in bits)
    if total <= paths:
        chosen = np.stack([i.ravel() for i in np.indices([b.shape[1] for b in bits])], axis=1)
    else:
        chosen = _active_paths(bits, cells.areas.numpy(), paths, np.random.default_rng(seed))
    pieces, sizes = [], []
    with ProgressBar("path regions", len(chosen)) as meter:
        for path in chosen:
            on = np.nonzero(np.all([b[:, unit] for b, unit in zip(bits, path)], axis=0))[0]
            if len(on):
                pieces.append(int(components(len(cells), cells.neighbours.numpy(), on).max()) + 1)
                sizes.append(len(on))
            meter.advance()
    return SliceSummary(
        len(cells),
        edges,
        min(cells.counts),
        max(cells.counts),
        total,
        len(chosen),
        total <= paths,
        len(pieces),
        pieces.count(1),
        max(pieces, default=0),
        float(np.mean(sizes)) if sizes else 0.0,
        cells.label,
    )


def _active_paths(bits: list[Bits], areas: np.ndarray, count: int, generator: np.random.Generator) -> Ints:
    """Different paths, each active somewhere: a cell drawn by its area, then one of its active units per layer."""
    alive = np.all([b.any(1) for b in bits], axis=0)
    if not alive.any():
        return np.empty((0, len(bits)), dtype=np.int64)
    weight = np.where(alive, areas, 0.0)
    drawn = generator.choice(len(areas), size=count, p=weight / weight.sum())
    units = []
    for b in bits:
        rank = generator.random((count, b.shape[1])) * b[drawn]
        units.append(rank.argmax(1))
    return np.unique(np.stack(units, axis=1), axis=0)
