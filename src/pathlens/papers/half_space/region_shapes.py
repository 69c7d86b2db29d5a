"""Regions of a plane: how many path regions differ, their faces, pieces and convexity, and pictures of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlens.regions import Slice2D


GRID = 80  # pixels along each side of a picture


def pixels(box: float) -> np.ndarray:
    """Centres of the pixels of [−box, box]², rows from top to bottom: (GRID², 2)."""
    at = (2 * (np.arange(GRID) + 0.5) / GRID - 1) * box
    x, y = np.meshgrid(at, at[::-1])
    return np.stack([x.ravel(), y.ravel()], axis=1)


def picture(values: Any) -> np.ndarray:
    """Values at the pixels as a picture, float32: (…, GRID²) → (…, GRID, GRID)."""
    flat = np.asarray(values, dtype=np.float32)
    return flat.reshape(*flat.shape[:-1], GRID, GRID)


@dataclass(frozen=True)
class Shapes:
    """Counts and shapes of the regions of one network; equal path regions are counted once.

    Attributes
    ----------
    activation_regions, path_regions, active_paths : int
        Polygons; different path regions; paths that are active somewhere in the box.
    activation_faces, path_faces : float
        Mean number of lines that bound a region inside the box; for path regions that are not convex, a lower bound.
    most_path_faces : int
    connected, convex : float
        Shares of the examined path regions.
    path_polygons : float
        Mean number of activation regions of a path region.
    looked_at : int
    """

    activation_regions: int
    path_regions: int
    active_paths: int
    activation_faces: float
    path_faces: float
    most_path_faces: int
    connected: float
    convex: float
    path_polygons: float
    looked_at: int


def path_masks(patterns: Mapping[str, np.ndarray]) -> dict[int, int]:
    """Every different, non-empty path region as a bit set of cells → the number of paths that have it.

    Layer by layer, the region of a path's first units is intersected with the cells of each unit, and equal regions are
    merged, so the cost grows with the number of different regions, not with the number of paths.
    """
    found = {-1: 1}  # all bits set: every cell
    for bits in patterns.values():
        units = [int.from_bytes(np.packbits(column).tobytes(), "big") for column in bits.T]
        cut: dict[int, int] = {}
        for mask, paths in found.items():
            for unit in units:
                if inside := mask & unit:
                    cut[inside] = cut.get(inside, 0) + paths
        found = cut
    return found


def borders(cells: Slice2D) -> tuple[np.ndarray, np.ndarray]:
    """The lines between all pairs of neighbours: rows (n, o), n·z + o > 0 on the first of the pair, and line numbers.

    The shared edge is the only edge of a polygon that has the whole neighbour on its other side.
    """
    corners, sizes = cells.corners.numpy(), cells.sizes.numpy()
    slot = np.arange(corners.shape[1])
    following = np.where(slot + 1 < sizes[:, None], slot + 1, 0)
    edge = corners[np.arange(len(cells))[:, None], following] - corners
    normals = np.stack([-edge[..., 1], edge[..., 0]], axis=2) / np.linalg.norm(edge, axis=2, keepdims=True)
    offsets = -(normals * corners).sum(2)
    first, second = cells.neighbours.numpy().T
    depth = np.einsum("evd,ewd->evw", normals[first], corners[second]).max(2) + offsets[first]
    shared = depth.argmin(1)
    lines = np.concatenate([normals[first, shared], offsets[first, shared, None]], axis=1)
    # the same number for both orientations of a line
    turned = np.where((lines[:, :1] < -1e-6) | ((np.abs(lines[:, :1]) <= 1e-6) & (lines[:, 1:2] < 0)), -lines, lines)
    _, numbers = np.unique(turned.round(6) + 0.0, axis=0, return_inverse=True)
    return lines, numbers.ravel()


def shapes(cells: Slice2D, most: int, seed: int = 0) -> Shapes:
    """Count all regions of a slice, and examine the shapes of at most ``most`` path regions, chosen at random."""
    from pathlens.regions.summaries import components

    masks = path_masks({site: bits.numpy() for site, bits in cells.patterns.items()})
    if not masks:  # a dead layer: no path is active anywhere
        return Shapes(len(cells), 0, 0, math.nan, math.nan, 0, math.nan, math.nan, math.nan, 0)
    pairs, (lines, numbers) = cells.neighbours.numpy(), borders(cells)
    keys = sorted(masks)
    if len(keys) > most:
        keys = [keys[i] for i in np.random.default_rng(seed).choice(len(keys), most, replace=False)]
    width = (len(cells) + 7) // 8
    faces, pieces, convex, sizes = [], [], [], []
    for key in keys:
        inside = np.unpackbits(np.frombuffer(key.to_bytes(width, "big"), np.uint8))[: len(cells)].astype(bool)
        border = inside[pairs[:, 0]] != inside[pairs[:, 1]]
        faces.append(len(np.unique(numbers[border])))
        pieces.append(int(components(len(cells), pairs, np.nonzero(inside)[0]).max()) + 1)
        inward = lines[border] * np.where(inside[pairs[border, 0]], 1.0, -1.0)[:, None]
        corners = cells.corners.numpy()[inside].reshape(-1, 2)
        # convex: the whole region lies on the inner side of every line of its border
        convex.append(bool((inward[:, :2] @ corners.T + inward[:, 2:] > -1e-7).all()))
        sizes.append(int(inside.sum()))
    own = {(int(cell), int(number)) for pair, number in zip(pairs, numbers) for cell in pair}
    return Shapes(
        len(cells),
        len(masks),
        sum(masks.values()),
        len(own) / len(cells),
        float(np.mean(faces)),
        max(faces),
        float(np.mean(np.array(pieces) == 1)),
        float(np.mean(convex)),
        float(np.mean(sizes)),
        len(keys),
    )
