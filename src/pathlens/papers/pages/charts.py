"""Drawings of described panels, one function per kind: lines, points, strips, matrices and fields.

What is drawn comes from the artifact's :class:`~pathlens.papers.panels.Panel`; drawings made for one experiment alone
live in figures. Titles, legends and notes are HTML around the SVG, so that they wrap and never lie on the data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.pages.axes import DASHES, band, lift, log_axis, mark, number, plain_axis, summary
from pathlens.papers.pages.palette import (
    COLOURS,
    HALF,
    SERIES,
    THIRD,
    heat_map,
    heat_png,
    inline_svg,
    order_map,
    panel,
    wave_map,
)
from pathlens.papers.panels import Panel, array_at

__all__ = ["RENDERERS", "Drawn", "colour_bar", "draw_panels"]

_Items = tuple[tuple[str, str, str], ...]  # of a legend: label, CSS colour, style
_MANY = 60  # values of one row of a strip chart that can still be told apart
_UNITS = 4  # receptive fields shown per column
_CLOUD = 2000  # points of one cloud
_FEW = 10  # points that are drawn large
_LONG = 400  # points of one line


@dataclass(frozen=True)
class Drawn:
    """A drawn figure: panels as HTML, in rows that wrap; a caption; and the models to explain in a legend."""

    rows: tuple[tuple[str, ...], ...]
    caption: str
    models: tuple[str, ...] = ()


# --- the figure of an artifact ---------------------------------------------------------------------------------


def draw_panels(artifact: Artifact) -> Drawn:
    """All panels that an artifact describes: two in a row, three where one would be left over."""
    where = f"Artifact {artifact.name!r} ({artifact.scale})"
    rows, names = list(_rows(artifact.figures)), _names(artifact.figures)
    made: list[_Body] = []
    for row in rows:
        width = {1: 620, 2: HALF}.get(len(row), THIRD)
        for one in row:
            key = f"{artifact.name}-{artifact.scale}-{len(made)}"
            source = _Source(artifact, one, f"{where}, panel {one.title!r}", key, width, names[len(made)])
            made.append(RENDERERS[one.kind](source))
    # one legend above all panels, if the longest explains every other
    legends = [body.legend for body in made if any(label for label, _, _ in body.legend)]
    longest: _Items = max(legends, key=len, default=())
    shared = longest if len(legends) > 1 and all(set(legend) <= set(longest) for legend in legends) else ()
    drawn = iter(zip(artifact.figures, made, strict=True))
    texts = tuple(tuple(_wrapped(*next(drawn), bool(shared), len(row) == 1) for _ in row) for row in rows)
    return Drawn((((_legend(shared),),) if shared else ()) + texts, _caption(made))


def _names(panels: Sequence[Panel]) -> list[tuple[str, ...]]:
    """Per panel, the names that its colours are counted by: a name has one colour in all panels that share names."""
    own = [
        dict.fromkeys(one.label for one in panel.series if one.label) if panel.kind in ("lines", "points") else {}
        for panel in panels
    ]
    groups: list[dict[str, None]] = []
    for labels in own:
        touching = [group for group in groups if group.keys() & labels.keys()]
        groups = [group for group in groups if group not in touching]
        groups.append({label: None for group in (*touching, labels) for label in group})
    return [next((tuple(group) for group in groups if group.keys() & labels.keys()), ()) for labels in own]


def _rows(panels: Sequence[Panel]) -> Iterator[Sequence[Panel]]:
    rest = panels
    while rest:
        # a third of the page is enough for a few lines
        narrow = len(rest) == 3 and all(one.kind == "lines" and len(one.series) <= 4 for one in rest)
        size = 3 if narrow else 2
        yield rest[:size]
        rest = rest[size:]


@dataclass(frozen=True)
class _Source:
    """What a renderer gets: the panel, the arrays it refers to, how wide to draw, and the names that have a colour."""

    artifact: Artifact
    panel: Panel
    where: str
    key: str
    width: float
    names: tuple[str, ...]

    def values(self, reference: str) -> np.ndarray:
        return np.asarray(array_at(self.artifact.arrays, reference, self.where), dtype=np.float64)

    def svg(self, figure: Any) -> str:
        return inline_svg(figure, self.key, self.panel.title)


@dataclass(frozen=True)
class _Body:
    """A drawn panel without its title; and whether it shows spreads, bars or zeros, for the caption."""

    text: str
    legend: _Items = ()
    shows: frozenset[str] = frozenset()


def _wrapped(described: Panel, body: _Body, explained: bool, alone: bool) -> str:
    legend = "" if explained else _legend(body.legend)
    note = f'<p class="note">{escape(described.note)}</p>' if described.note else ""
    return f'<div class="group{" alone" * alone}"><h4>{escape(described.title)}</h4>{legend}{body.text}{note}</div>'


def _caption(made: Sequence[_Body]) -> str:
    shows = frozenset[str]().union(*(body.shows for body in made))
    words = {
        "spread": "Lines are medians, shaded areas the whole range over seeds.",
        "dots": "In each row dots are single values and the tick is their median.",
        "bars": "A bar spans 5 to 95 % of many values.",
        "cloud": f"At most {_CLOUD} points of a cloud are drawn.",
        "zeros": "What is not above zero stands at the edge of a logarithmic axis.",
    }
    return " ".join(text for key, text in words.items() if key in shows)


def _legend(items: _Items) -> str:
    """One line of keys; what has no label needs none."""
    keys = {
        "line": '<i class="key" style="background:{0}"></i>',
        "dashed": '<i class="key dashed" style="border-color:{0}"></i>',
        "points": '<i class="key dot" style="background:{0}"></i>',
    }
    shown = [f"<span>{keys[style].format(colour)}{escape(label)}</span>" for label, colour, style in items if label]
    return f'<div class="legend">{"".join(shown)}</div>' if shown else ""


def _colours(source: _Source) -> list[str]:
    """A colour per series: its name's; without a name, that of its place among series of its style, so that theory and
    measurement share colours."""
    described = source.panel
    places: dict[str, int] = {}
    counts = {one.style: sum(other.style == one.style for other in described.series) for one in described.series}
    chosen = []
    for one in described.series:
        place = places[one.style] = places.get(one.style, -1) + 1
        if described.ordered:
            level = order_map()(place / max(counts[one.style] - 1, 1))[:3]
            chosen.append("#" + "".join(f"{round(255 * part):02x}" for part in level))
        else:
            place = source.names.index(one.label) if one.label else place
            chosen.append(COLOURS[SERIES[place % len(SERIES)]])
    return chosen


def _css(colour: str) -> str:
    return next((f"var(--{name})" for name, value in COLOURS.items() if value == colour), colour)


# --- one function per kind -------------------------------------------------------------------------------------


def _lines(source: _Source) -> _Body:
    described = source.panel
    figure, axes = panel(source.width, 285 if source.width > THIRD else 240)
    loaded = [_line_of(source, one.values, one.x or described.x) for one in described.series]
    every, moved = lift([values for _, values in loaded], described.y_scale)
    shows, items = {"zeros"} if moved else set(), []
    for one, colour, (x, _), values in zip(described.series, _colours(source), loaded, every, strict=True):
        if one.style == "points":
            axes.plot(np.tile(x, len(values)), values.ravel(), color=colour, marker="o", ms=4.5, ls="none", zorder=3)
        elif one.style == "dashed":
            axes.plot(x, summary(values)[1], color=colour, lw=1.4, ls=DASHES)
        else:
            band(axes, x, values, colour)
            shows |= {"spread"} if len(values) > 1 else set()
        items.append((one.label, _css(colour), one.style))
    all_x = np.concatenate([np.tile(x, len(values)) for x, values in loaded])
    all_y = np.concatenate([values.ravel() for values in every])
    if described.slope is not None:
        there = np.isfinite(all_y) & (all_x > 0) & (all_y > 0)
        if there.any():  # just below everything that was measured
            ends = np.array([all_x[there].min(), all_x[there].max()])
            guide = ends**described.slope * (all_y[there] / all_x[there] ** described.slope).min() / 1.6
            axes.plot(ends, guide, color=COLOURS["muted"], lw=1.2, ls=DASHES)
            all_y = np.append(all_y, guide)
            items.append((f"slope {number(described.slope)}", "var(--muted)", "dashed"))
    all_y = np.append(all_y, [value for value, _ in described.marks])
    places = np.unique(all_x)
    apart = np.diff(places).min(initial=np.inf) >= 0.04 * np.ptp(places)  # else their labels would touch
    if described.x_scale == "log":
        log_axis(axes, "x", all_x, zero=True)
    elif len(places) <= 8 and apart and (places == np.round(places)).all():
        axes.set_xticks(places, [number(place) for place in places])
    else:
        plain_axis(axes, "x")
    if described.y_scale == "log":
        log_axis(axes, "y", all_y, zero=False)
    else:
        plain_axis(axes, "y")
    axes.set_xlabel(described.x_label)
    axes.set_ylabel(described.y_label)
    axes.grid(axis="y", color=COLOURS["rule"], lw=0.6)
    mark(axes, described.marks)
    return _Body(source.svg(figure), tuple(items), frozenset(shows))


def _line_of(source: _Source, reference: str, x_reference: str) -> tuple[np.ndarray, np.ndarray]:
    """x (m,) and values (samples, m), thinned to what a screen can show."""
    values = source.values(reference)
    values = values.reshape(-1, values.shape[-1])
    x = source.values(x_reference) if x_reference else np.arange(float(values.shape[1]))
    if len(x) > _LONG:
        spaced = np.geomspace if source.panel.x_scale == "log" else np.linspace
        few = np.unique(spaced(1, len(x), _LONG).round().astype(int)) - 1
        x, values = x[few], values[:, few]
    return x, values


def _points(source: _Source) -> _Body:
    described = source.panel
    figure, axes = panel(source.width, 390 if described.diagonal else 300)
    shows, items, clouds = set(), [], []
    for one in described.series:
        cloud = np.stack([source.values(one.x or described.x).ravel(), source.values(one.values).ravel()])
        if cloud.shape[1] > _CLOUD:
            cloud = cloud[:, np.linspace(0, cloud.shape[1] - 1, _CLOUD).round().astype(int)]
            shows.add("cloud")
        clouds.append(cloud[:, np.isfinite(cloud).all(0)])
    seen_x, moved_x = lift([cloud[0] for cloud in clouds], described.x_scale)
    seen_y, moved_y = lift([cloud[1] for cloud in clouds], described.y_scale)
    shows |= {"zeros"} if moved_x or moved_y else set()
    for one, colour, x, y in zip(described.series, _colours(source), seen_x, seen_y, strict=True):
        few = len(x) <= _FEW  # a handful must be seen, a crowd be seen through
        axes.scatter(x, y, s=50 if few else 20, color=colour, alpha=0.9 if few else 0.55, lw=0)
        items.append((one.label, _css(colour), "points"))
    seen_y.append(np.array([value for value, _ in described.marks]))
    for which, scale, seen in (("x", described.x_scale, seen_x), ("y", described.y_scale, seen_y)):
        log_axis(axes, which, np.concatenate(seen), zero=False) if scale == "log" else plain_axis(axes, which)
    if described.diagonal:
        low, high = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([low, high], [low, high], color=COLOURS["muted"], lw=1, ls=DASHES, zorder=1)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set_xlabel(described.x_label)
    axes.set_ylabel(described.y_label)
    mark(axes, described.marks)
    return _Body(source.svg(figure), tuple(items), frozenset(shows))


def _strips(source: _Source) -> _Body:
    described = source.panel
    rows, moved = lift([source.values(one.values).ravel() for one in described.series], described.x_scale)
    figure, axes = panel(source.width, 66 + 24 * len(rows) + 14 * bool(described.marks))
    everything = np.concatenate([*rows, np.array([value for value, _ in described.marks])])
    shows = {"zeros"} if moved else set()
    if described.x_scale == "log":
        log_axis(axes, "x", everything, zero=False)
    else:
        finite = everything[np.isfinite(everything)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        pad = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        axes.set_xlim(low - pad, high + pad)
        plain_axis(axes, "x")
    colour = COLOURS["relu"]
    for place, values in enumerate(rows):
        axes.axhline(place, color=COLOURS["rule"], lw=0.7, zorder=0)
        there = values[np.isfinite(values)]
        if not there.size:
            what = "not reached" if (values == np.inf).any() else "not measured"
            axes.annotate(
                what,
                (0, place),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                fontsize=11,
                textcoords="offset points",
                va="center",
                color=COLOURS["muted"],
            )
            continue
        if there.size > _MANY:
            axes.hlines(place, *np.quantile(there, [0.05, 0.95]), color=colour, alpha=0.4, lw=8)
            shows.add("bars")
        else:
            axes.plot(there, np.full(there.size, place), "o", ms=6.5, mew=0, color=colour, alpha=0.5)
            shows.add("dots")
        axes.plot([np.median(there)] * 2, [place - 0.32, place + 0.32], color=COLOURS["ink"], lw=1.6)
    for value, text in described.marks:
        axes.axvline(value, color=COLOURS["muted"], lw=1, ls=DASHES, zorder=1)
        at = (axes.transData + axes.transAxes.inverted()).transform((value, 0))[0]
        side = "left" if at < 0.15 else "right" if at > 0.85 else "center"
        axes.annotate(
            text,
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha=side,
            va="bottom",
            color=COLOURS["muted"],
            fontsize=11,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [one.label for one in described.series])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(described.x_label)
    return _Body(source.svg(figure), (), frozenset(shows))


def _matrices(source: _Source) -> _Body:
    described = source.panel
    found = [source.values(one.values) for one in described.series]
    finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in found] + [np.zeros(0)])
    high = float(np.abs(finite).max()) if finite.size else 1.0
    signed = described.y_scale == "linear" and bool((finite < 0).any())
    high = high or 1.0
    low = 0.0
    if described.y_scale == "log":
        positive = finite[finite > 0]
        low = max(float(positive.min()), 1e-4 * high) if positive.size else 0.1 * high
        low = low if low < high else 0.1 * high
    colours = wave_map() if signed else heat_map()
    cells = []
    for one, matrix in zip(described.series, found, strict=True):
        if signed:
            level = (matrix / high + 1) / 2
        elif described.y_scale == "log":
            level = np.log(np.maximum(matrix, low) / low) / np.log(high / low)
        else:
            level = matrix / high
        said = f"{described.title}: {one.label}" if one.label else described.title
        n, m = matrix.shape
        cells.append(
            f'<figure class="matrix plain"><div><img src="{heat_png(level, colours)}" '
            f'width="{m}" height="{n}" alt="{escape(said)}"></div><figcaption>{escape(one.label)}</figcaption>'
            "</figure>"
        )
    words = [
        f"{side}: {label}" for side, label in (("columns", described.x_label), ("rows", described.y_label)) if label
    ]
    words += ["logarithmic scale"] * (described.y_scale == "log")
    bar = colour_bar(colours, -high if signed else low, high, "; ".join(words))
    return _Body(f'<div class="matrices">{"".join(cells)}</div>{bar}')


def colour_bar(colours: Any, low: float, high: float, words: str) -> str:
    """A scale of colours from low to high, with words after it."""
    stops = ", ".join(
        "#" + "".join(f"{round(255 * c):02x}" for c in colours(level)[:3]) for level in np.linspace(0, 1, 9)
    )
    return (
        f'<div class="heat"><span>{number(low, 2)}</span><i style="background:linear-gradient(90deg, {stops})"></i>'
        f"<span>{number(high, 2)}</span><em>{escape(words)}</em></div>"
    )


def _fields(source: _Source) -> _Body:
    described = source.panel
    found = [source.values(one.values) for one in described.series]
    units = min(_UNITS, max(len(matrix) for matrix in found))
    finite = np.concatenate([m[:units][np.isfinite(m[:units])] for m in found])
    top = float(np.abs(finite).max()) if finite.size else 1.0
    figure, grid = panel(source.width, 62 + 62 * units, units, len(found), sharex="col", sharey=True, squeeze=False)
    for column, (one, matrix) in enumerate(zip(described.series, found, strict=True)):
        grid[0, column].set_title(
            textwrap.fill(one.label, 14), fontsize=11.5, fontweight="normal", pad=4, color=COLOURS["muted"]
        )
        for unit in range(units):
            axes = grid[unit, column]
            axes.axhline(0, color=COLOURS["rule"], lw=0.8, zorder=0)
            axes.set_ylim(-1.08 * (top or 1.0), 1.08 * (top or 1.0))
            axes.spines["bottom"].set_visible(unit == units - 1)
            axes.tick_params(axis="x", length=3 * (unit == units - 1))
            if unit >= len(matrix):
                continue
            w = matrix[unit]
            x = np.arange(len(w))
            axes.fill_between(x, 0, np.maximum(w, 0), color=COLOURS["relu"], alpha=0.35, lw=0)
            axes.fill_between(x, 0, np.minimum(w, 0), color=COLOURS["dlgn"], alpha=0.35, lw=0)
            axes.plot(x, w, color=COLOURS["ink"], lw=1, marker="o" if len(w) == 1 else None)
            axes.set_xlim(0, max(len(w) - 1, 1))
            axes.set_xticks([len(w) // 4, 3 * len(w) // 4] if len(w) > 3 else range(len(w)))
    for unit in range(units):
        grid[unit, 0].set_ylabel(f"{described.y_label} {unit + 1}".strip(), fontsize=11)
        grid[unit, 0].locator_params(axis="y", nbins=3)
    figure.supxlabel(described.x_label, fontsize=12, color=COLOURS["muted"])
    return _Body(source.svg(figure))


RENDERERS: dict[str, Callable[[_Source], _Body]] = {
    "lines": _lines,
    "points": _points,
    "strips": _strips,
    "matrices": _matrices,
    "fields": _fields,
}
