"""Plots of half-spaces, slices and segments. Needs matplotlib (extra ``plot``), which is imported when used."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pathlens.errors import OptionError, RegionError, unknown_name
from pathlens.plotting import get_axes
from pathlens.regions.cells import Floats

if TYPE_CHECKING:
    from pathlens.regions.halfspaces import HalfSpaces
    from pathlens.regions.partitions import Segment1D, Slice2D

_PURPOSE = "drawing regions"


def plot_slice(cells: Slice2D, color: str, ax: Any, output: int, **style: Any) -> Any:
    """Polygons filled by gate pattern, by log₁₀ of the path count, or by an output, shaded exactly."""
    if color not in ("pattern", "count", "output"):
        raise unknown_name("colour", color, ("pattern", "count", "output"))
    ax = get_axes(ax, _PURPOSE)
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    polygons = [cells.polygon(k).numpy() for k in range(len(cells))]
    style = {"edgecolors": "white", "linewidths": 0.3, **style}
    if color == "output":
        _check_output(output, cells.maps.shape[1])
        ax.figure.colorbar(_shade(ax, cells, polygons, output, style), ax=ax, label=f"output {output}")
        style = {**style, "facecolors": "none"}
        ax.add_collection(PolyCollection(polygons, **style))
    elif color == "count":
        # paths per cell span many orders of magnitude; cells without paths are black
        logs = np.array([math.log10(n) if n else -np.inf for n in cells.counts])
        cmap = colormaps[style.pop("cmap", "viridis")].with_extremes(bad="black")
        drawn = PolyCollection(polygons, array=np.ma.masked_invalid(logs), cmap=cmap, **style)
        ax.add_collection(drawn)
        ax.figure.colorbar(drawn, ax=ax, label="log₁₀ active paths (black: none)")
    else:
        ax.add_collection(PolyCollection(polygons, facecolors=_pattern_colours(cells), **style))
    ax.set(xlim=cells.box[0].tolist(), ylim=cells.box[1].tolist(), xlabel="s", ylabel="t", aspect="equal")
    ax.set_title(f"{len(cells)} cells, {cells.label}", fontsize="medium")
    return ax


def _check_output(output: int, outputs: int) -> None:
    if not 0 <= output < outputs:
        raise OptionError(f"plot: the network has {outputs} outputs, numbered from 0; got output={output}.")


def _shade(ax: Any, cells: Slice2D, polygons: list[Floats], output: int, style: dict[str, Any]) -> Any:
    """Each polygon as a fan of triangles with its own corner values, so that jumps between cells stay jumps."""
    corners = np.concatenate(polygons)
    sizes = cells.sizes.numpy()
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    fans = [
        np.stack([np.full(n - 2, f), f + np.arange(1, n - 1), f + np.arange(2, n)], 1) for f, n in zip(first, sizes)
    ]
    owner = np.repeat(np.arange(len(cells)), sizes)
    map_of = cells.maps.numpy()[owner, output]
    values = map_of[:, 0] + (map_of[:, 1:] * corners).sum(1)
    cmap = style.pop("cmap", "RdBu_r")
    limit = float(np.abs(values).max()) or 1.0
    return ax.tripcolor(
        corners[:, 0],
        corners[:, 1],
        values,
        triangles=np.concatenate(fans),
        shading="gouraud",
        cmap=cmap,
        vmin=-limit,
        vmax=limit,
    )


def _pattern_colours(cells: Slice2D) -> Floats:
    """Colours that depend on the gates alone, near for patterns that differ in few gates: a random projection."""
    bits = torch.cat(list(cells.patterns.values()), dim=1).numpy()
    moving = bits[:, bits.any(0) & ~bits.all(0)]
    if not moving.shape[1]:
        return np.full((len(cells), 3), 0.6)
    weights = np.random.default_rng(0).standard_normal((moving.shape[1], 3))
    raw = moving @ weights
    low, high = raw.min(0), raw.max(0)
    return 0.15 + 0.8 * (raw - low) / np.maximum(high - low, 1e-300)


def plot_segment(line: Segment1D, ax: Any, output: int, **style: Any) -> Any:
    """One output along the segment, interval by interval, with a thin line at every break."""
    _check_output(output, line.maps.shape[1])
    ax = get_axes(ax, _PURPOSE)
    breaks = line.breaks.numpy()
    for (constant, slope), t in zip(line.maps[:, output].tolist(), pairwise(breaks)):
        ax.plot(t, constant + slope * np.array(t), **{"color": "tab:blue", **style})
    for t in breaks[1:-1]:
        ax.axvline(t, color="0.8", linewidth=0.5, zorder=0)
    ax.set(xlim=(0, 1), xlabel="t, from a (0) to b (1)", ylabel=f"output {output}")
    ax.set_title(f"{len(line)} intervals, {line.label}", fontsize="medium")
    return ax


def plot_halfspaces(
    spaces: HalfSpaces,
    site: str,
    ax: Any,
    units: Any = None,
    image_shape: tuple[int, ...] | None = None,
    box: float = 1.0,
    **style: Any,
) -> Any:
    """Two inputs: boundary lines, each with a short arrow to the side where the gate is on. Else normals as pictures.

    Parameters
    ----------
    units : sequence of int, optional
        By default all lines, or 64 pictures: the first, of a convolution one per channel, in the middle.
    image_shape : (H, W) or (C, H, W), optional
        How to read a flat input; not needed for inputs of shape (C, H, W).
    """
    chosen = list(range(spaces.units(site))) if units is None else list(units)
    if spaces.dim == 2:
        return _lines(spaces, site, chosen, get_axes(ax, _PURPOSE), box, style)
    shape = image_shape or (spaces.input_shape if len(spaces.input_shape) > 1 else None)
    if shape is None or math.prod(shape) != spaces.dim or len(shape) not in (2, 3):
        raise RegionError(
            f"plot: inputs of shape {spaces.input_shape} are neither points of a plane nor images. Pass "
            f"image_shape=(H, W) or (C, H, W) with {spaces.dim} numbers."
        )
    of_site = spaces.shapes[site]
    if units is None and len(of_site) > 1:  # at other positions a channel has the same picture, moved
        middle = sum(size // 2 * math.prod(of_site[k + 1 :]) for k, size in enumerate(of_site) if k > 0)
        chosen = [channel * math.prod(of_site[1:]) + middle for channel in range(of_site[0])]
    return _tiles(spaces, site, chosen[:64] if units is None else chosen, shape, get_axes(ax, _PURPOSE), style)


def _lines(spaces: HalfSpaces, site: str, units: list[int], ax: Any, box: float, style: dict[str, Any]) -> Any:
    normals, offsets = spaces.normals(site, units).numpy(), spaces.offsets(site)[units].numpy()
    for n, b in zip(normals, offsets):
        size = float(np.linalg.norm(n))
        if size == 0:
            continue
        n, foot = n / size, -b / size * n / size
        line = foot + np.outer(np.linspace(-4 * box, 4 * box, 801), [-n[1], n[0]])
        line = line[np.abs(line).max(1) <= box]
        if not len(line):
            continue
        (drawn,) = ax.plot(line[:, 0], line[:, 1], **{"linewidth": 1, **style})
        middle = line.mean(0)
        arrow = {"arrowstyle": "->", "color": drawn.get_color()}
        ax.annotate("", xy=middle + 0.12 * box * n, xytext=middle, arrowprops=arrow)
    ax.set(xlim=(-box, box), ylim=(-box, box), xlabel="x₁", ylabel="x₂", aspect="equal")
    ax.set_title(f"{site}: {len(units)} half-spaces, {spaces.label}", fontsize="medium")
    return ax


def _tiles(
    spaces: HalfSpaces, site: str, units: list[int], shape: tuple[int, ...], ax: Any, style: dict[str, Any]
) -> Any:
    """Normals side by side, each scaled to its own largest weight; three channels are red, green and blue."""
    pictures = spaces.normals(site, units).numpy().reshape(len(units), *shape)
    pictures = pictures / np.maximum(np.abs(pictures).reshape(len(units), -1).max(1), 1e-300).reshape(
        -1, *(1,) * len(shape)
    )
    colour = len(shape) == 3 and shape[0] == 3
    if len(shape) == 3:
        pictures = np.moveaxis(pictures, 1, -1) if colour else pictures.mean(1)
    high, wide = pictures.shape[1:3]
    columns = math.ceil(math.sqrt(len(units)))
    rows = math.ceil(len(units) / columns)
    canvas = np.full((rows * (high + 1) - 1, columns * (wide + 1) - 1, *pictures.shape[3:]), np.nan)
    for k, picture in enumerate(pictures):
        i, j = (k // columns) * (high + 1), (k % columns) * (wide + 1)
        canvas[i : i + high, j : j + wide] = picture
    if colour:
        ax.imshow(np.nan_to_num((canvas + 1) / 2, nan=1.0), **style)
    else:
        ax.imshow(canvas, **{"cmap": "RdBu_r", "vmin": -1, "vmax": 1, **style})
    ax.set_axis_off()
    ax.set_title(f"{site}: normals of {len(units)} of {spaces.units(site)} gates", fontsize="medium")
    return ax
