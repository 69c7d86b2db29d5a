"""Axes, ticks, bands and reference lines that all charts share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pathlens.papers.pages.palette import COLOURS

DASHES = (0, (4, 3))
NEAR_TOP = 30.0  # degrees to the top within which a half disc is highlighted


def summary(values: np.ndarray) -> np.ndarray:
    """Lowest, median and highest finite value of each column (3, T); NaN where a column has none."""
    there = np.isfinite(values)
    some = there.any(0)
    kept = np.where(there, values, np.nan)[:, some]
    found = np.full((3, values.shape[1]), np.nan)
    found[:, some] = np.nanmin(kept, 0), np.nanmedian(kept, 0), np.nanmax(kept, 0)
    return found


def draw_band(axes: Any, x: np.ndarray, values: np.ndarray, colour: str) -> None:
    """Median line and the whole range over seeds (rows); a point that has no neighbour is drawn as a dot."""
    low, middle, high = summary(values)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    axes.plot(x, middle, color=colour)
    there = np.pad(np.isfinite(middle), 1)
    alone = there[1:-1] & ~there[:-2] & ~there[2:]
    if alone.any():
        axes.plot(x[alone], middle[alone], color=colour, marker="o", ms=5, ls="none")
        axes.vlines(x[alone], low[alone], high[alone], color=colour, alpha=0.4, lw=4)


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, thinned to about five; where there are fewer than two, finer ones, and at last even steps."""
    first, last = int(np.ceil(np.log10(low) - 1e-9)), int(np.floor(np.log10(high) + 1e-9))
    if last - first >= 1:
        return [10.0**k for k in range(first, last + 1, -(-(last - first) // 5))]
    for digits in ((1, 2, 5), range(1, 10)):
        inside = [
            digit * 10.0**k for k in range(first - 1, last + 2) for digit in digits if low <= digit * 10.0**k <= high
        ]
        if len(inside) > 1:
            return inside
    from matplotlib.ticker import MaxNLocator

    return [
        float(tick) for tick in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high
    ] or [low]


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """Plain numbers, or powers of ten as soon as one of them needs it."""
    plain = all(tick == 0 or 1e-3 <= tick < 1e5 for tick in ticks)
    return [f"{tick:g}" if plain or tick in (0, 1) else _power(tick) for tick in ticks]


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1" else f"{mantissa}·{power}"


def set_scale(axes: Any, which: str, scale: str, values: np.ndarray, zero: bool = False) -> None:
    """Scale and ticks of an axis for these values.

    A logarithmic axis covers the positive values; with ``zero`` it begins at zero if zeros are among the values.
    """
    if scale != "log":
        axes.ticklabel_format(axis=which, useOffset=False)
        axes.locator_params(axis=which, nbins=6)
        return
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.1, 1.0)
    pad = max((high / low) ** 0.04, 1.1)
    at_zero = zero and bool((values == 0).any())
    if at_zero:
        getattr(axes, f"set_{which}scale")("symlog", linthresh=low, linscale=0.35)
    else:
        getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(0 if at_zero else low / pad, high * pad)
    ticks = [0.0] * at_zero + _log_ticks(low if at_zero else low / pad, high * pad)
    getattr(axes, f"set_{which}ticks")(ticks, _tick_texts(ticks))
    axes.minorticks_off()


def clip_to_scale(every: Sequence[np.ndarray], scale: str) -> tuple[list[np.ndarray], bool]:
    """The arrays as an axis of that scale shows them, and whether any value was changed.

    On a logarithmic axis, values that are not positive become two thirds of the smallest positive value of all arrays.
    """
    low = [bool((values <= 0).any()) for values in every]
    if scale != "log" or not any(low):
        return list(every), False
    floor = min((float(v[v > 0].min()) for v in every if (v > 0).any()), default=1.5) / 1.5
    return [np.where(values <= 0, floor, values) for values in every], True


def half_spaces(normals: np.ndarray) -> Iterator[tuple[int, int, float, str]]:
    """Layer, column, angle and colour of each normal (layers, units, 2), sorted by the angle to the top in a layer."""
    for layer, rows in enumerate(normals):
        angle = np.arctan2(rows[:, 1], rows[:, 0])
        away = np.abs(np.angle(np.exp(1j * (angle - np.pi / 2))))
        for column, unit in enumerate(np.argsort(away, kind="stable")):
            yield layer, column, float(angle[unit]), "top" if away[unit] <= np.radians(NEAR_TOP) else "off"


def draw_marks(axes: Any, marks: Sequence[tuple[float, str]]) -> None:
    """Horizontal reference lines; each label is at the end, above or below the line, where the data leave most room."""
    taken = [line.get_path().vertices for line in axes.get_lines()]
    taken += [path.vertices for area in axes.collections for path in area.get_paths()]
    to_axes = axes.transData + axes.transAxes.inverted()
    clouds = [to_axes.transform(points) for points in taken if len(points)]
    grid = np.linspace(0.02, 0.98, 49)
    heights = []
    for cloud in clouds:
        cloud = cloud[np.isfinite(cloud).all(1)]
        if len(cloud):
            across, up = cloud[np.argsort(cloud[:, 0], kind="stable")].T
            heights.append(np.interp(grid, across, up, left=np.nan, right=np.nan))
    levels = [to_axes.transform((axes.get_xlim()[1], value))[1] for value, _ in marks]
    for i, (value, text) in enumerate(marks):
        axes.axhline(value, color=COLOURS["muted"], lw=1, ls=DASHES, zorder=1)
        others = [np.full(len(grid), level) for j, level in enumerate(levels) if j != i]
        room = {}
        for side, part in (("right", grid > 0.6), ("left", grid < 0.4)):
            for step in (0.05, -0.05):
                near = [np.abs(h[part] - levels[i] - step) for h in (*heights, *others)]
                free = min([float(np.nanmin(gap)) for gap in near if np.isfinite(gap).any()], default=1.0)
                inside = 0.03 <= levels[i] + step <= 0.97
                room[side, step] = min(free, 0.08) if inside else -1.0
        (side, step) = max(room, key=lambda place: room[place])
        at, gap = (1.0, -4) if side == "right" else (0.0, 5)
        va, rise = ("bottom", 3) if step > 0 else ("top", -3)
        annotate(axes, text, (at, value), ("axes fraction", "data"), (gap, rise), ha=side, va=va)


def annotate(
    axes: Any, text: str, at: tuple[float, float], units: Any, offset: tuple[float, float], **options: Any
) -> None:
    """A few muted words at a place given in ``units``, moved by ``offset`` points."""
    options |= {"textcoords": "offset points", "color": COLOURS["muted"], "fontsize": 11}
    axes.annotate(text, at, xycoords=units, xytext=offset, **options)
