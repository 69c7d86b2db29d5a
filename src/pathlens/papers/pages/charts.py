"""The figure of an artifact: its panels, drawn by one function per kind of :class:`~pathlens.papers.panels.Panel`.

Titles, legends and notes are HTML around the SVG (in templates), so they wrap and never overlap the data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from pathlens.pages import render
from pathlens.papers.artifact import Artifact
from pathlens.papers.pages.axes import (
    DASHES,
    NEAR_TOP,
    annotate,
    clip_to_scale,
    draw_band,
    draw_marks,
    half_spaces,
    set_scale,
    summary,
)
from pathlens.papers.pages.palette import (
    COLOURS,
    HALF,
    SERIES,
    THIRD,
    drawing,
    heat_map,
    heat_png,
    inline_svg,
    order_map,
    panel,
    wave_map,
)
from pathlens.papers.pages.words import number
from pathlens.papers.panels import Panel, array_at

_Items = tuple[tuple[str, str, str], ...]  # items of a legend: label, CSS colour, style
_MANY = 60  # values of one row of a strip chart that are drawn as single dots
_UNITS = 4  # receptive fields shown per column
_CLOUD = 2000  # points of one cloud
_FEW = 10  # points that are drawn large
_LONG = 400  # points of one line


@dataclass(frozen=True)
class Drawn:
    """A drawn figure: panels as HTML, in rows that wrap, and a caption."""

    rows: tuple[tuple[Markup, ...], ...]
    caption: str


# --- the figure of an artifact ---------------------------------------------------------------------------------


def draw(artifact: Artifact) -> Drawn | None:
    """The figure of an artifact, two panels in a row, three if one would remain alone; None if it has no panels."""
    if not artifact.figures:
        return None
    rows, names = list(_rows(artifact.figures)), _names(artifact.figures)
    made: list[_Body] = []
    with drawing():
        for row in rows:
            width = {1: 620, 2: HALF}.get(len(row), THIRD)
            for one in row:
                key = f"{artifact.name}-{artifact.scale}-{len(made)}"
                made.append(RENDERERS[one.kind](_Source(artifact, one, key, width, names[len(made)])))
    # one legend above all panels if the longest contains all others
    legends = [body.legend for body in made if any(label for label, _, _ in body.legend)]
    longest: _Items = max(legends, key=len, default=())
    shared = longest if len(legends) > 1 and all(set(legend) <= set(longest) for legend in legends) else ()
    drawn = iter(zip(artifact.figures, made, strict=True))
    texts = [tuple(_wrap(*next(drawn), bool(shared), len(row) == 1) for _ in row) for row in rows]
    if shared:
        texts.insert(0, (_fill("legend", items=shared),))
    return Drawn(tuple(texts), _caption(made))


def _fill(template: str, **values: Any) -> Markup:
    return Markup(render(f"papers/pages/{template}.html", **values))


def _names(panels: Sequence[Panel]) -> list[tuple[str, ...]]:
    """For each panel, the names that determine its colours: a name has one colour in all panels that share names."""
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
        narrow = len(rest) == 3 and all(
            one.kind == "stacks" or (one.kind == "lines" and len(one.series) <= 4) for one in rest
        )
        size = 3 if narrow else 2
        yield rest[:size]
        rest = rest[size:]


@dataclass(frozen=True)
class _Source:
    """Input of a renderer: the panel and its artifact, an id, the width, and the names that have a colour."""

    artifact: Artifact
    panel: Panel
    key: str
    width: float
    names: tuple[str, ...]

    def values(self, reference: str) -> np.ndarray:
        return np.asarray(array_at(self.artifact.arrays, reference, self.key), dtype=np.float64)

    def svg(self, figure: Any) -> Markup:
        return inline_svg(figure, self.key, self.panel.title)


@dataclass(frozen=True)
class _Body:
    """A drawn panel without its title; and whether it shows spreads, bars or zeros, for the caption."""

    text: Markup
    legend: _Items = ()
    shows: frozenset[str] = frozenset()


def _wrap(described: Panel, body: _Body, explained: bool, alone: bool) -> Markup:
    colours = {one.colour for one in described.series} if described.kind in ("matrices", "stacks") else {""}
    return _fill(
        "panel",
        panel=described,
        body=body.text,
        colour=colours.pop() if len(colours) == 1 else "",
        items=() if explained else body.legend,
        alone=alone,
    )


def _caption(made: Sequence[_Body]) -> str:
    shows = frozenset[str]().union(*(body.shows for body in made))
    words = {
        "spread": "Lines are medians, shaded areas the whole range over seeds.",
        "dots": "In each row dots are single values and the tick is their median.",
        "bars": "A bar spans 5 to 95 % of many values.",
        "cloud": f"At most {_CLOUD} points of a cloud are drawn.",
        "zeros": "Values that are not above zero are drawn at the edge of a logarithmic axis.",
        "discs": (
            "Each disc is one unit, which is on in the shaded half of the plane. Rows are layers; within a row units "
            f"are sorted by their angle to the top, and those within {NEAR_TOP:g}° of it are amber."
        ),
    }
    return " ".join(text for key, text in words.items() if key in shows)


def _colours(source: _Source) -> list[str]:
    """The colour of each series: by its name, or without a name by its position among the series of its style, so
    theory and measurement share colours."""
    described = source.panel
    places: dict[str, int] = {}
    counts = {one.style: sum(other.style == one.style for other in described.series) for one in described.series}
    chosen = []
    for one in described.series:
        place = places[one.style] = places.get(one.style, -1) + 1
        if one.colour:
            chosen.append(COLOURS[one.colour])
        elif described.ordered:
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
    every, moved = clip_to_scale([values for _, values in loaded], described.y_scale)
    shows, items = {"zeros"} if moved else set(), []
    for one, colour, (x, _), values in zip(described.series, _colours(source), loaded, every, strict=True):
        if one.style == "points":
            axes.plot(np.tile(x, len(values)), values.ravel(), color=colour, marker="o", ms=4.5, ls="none", zorder=3)
        elif one.style == "dashed":
            axes.plot(x, summary(values)[1], color=colour, lw=1.4, ls=DASHES)
        else:
            draw_band(axes, x, values, colour)
            shows |= {"spread"} if len(values) > 1 else set()
        items.append((one.label, _css(colour), one.style))
    all_x = np.concatenate([np.tile(x, len(values)) for x, values in loaded])
    all_y = np.concatenate([values.ravel() for values in every])
    if described.slope is not None:
        there = np.isfinite(all_y) & (all_x > 0) & (all_y > 0)
        if there.any():  # just below all measured values
            ends = np.array([all_x[there].min(), all_x[there].max()])
            guide = ends**described.slope * (all_y[there] / all_x[there] ** described.slope).min() / 1.6
            axes.plot(ends, guide, color=COLOURS["muted"], lw=1.2, ls=DASHES)
            all_y = np.append(all_y, guide)
            items.append((f"slope {number(described.slope)}", "var(--muted)", "dashed"))
    all_y = np.append(all_y, [value for value, _ in described.marks])
    places = np.unique(all_x)
    apart = np.diff(places).min(initial=np.inf) >= 0.04 * np.ptp(places)  # otherwise their labels would touch
    if described.x_ticks:
        _word_axis(axes, described)
    elif described.x_scale != "log" and len(places) <= 8 and apart and (places == np.round(places)).all():
        axes.set_xticks(places, [number(place) for place in places])
    else:
        set_scale(axes, "x", described.x_scale, all_x, zero=True)
    set_scale(axes, "y", described.y_scale, all_y)
    axes.set(xlabel=described.x_label, ylabel=described.y_label)
    axes.grid(axis="y", color=COLOURS["rule"], lw=0.6)
    draw_marks(axes, described.marks)
    return _Body(source.svg(figure), tuple(items), frozenset(shows))


def _word_axis(axes: Any, described: Panel) -> None:
    """Draw the panel's own ticks on the x-axis, and its shaded range."""
    places, words = zip(*described.x_ticks)
    axes.set_xticks(places, words)
    if described.shade is not None:
        axes.axvspan(*described.shade, color=COLOURS["tint"], lw=0, zorder=-5)
        axes.set_xlim(min(places), max(places))


def _line_of(source: _Source, reference: str, x_reference: str) -> tuple[np.ndarray, np.ndarray]:
    """x (m,) and values (samples, m), thinned to the resolution of a screen."""
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
    if any(one.colour_by for one in described.series):
        return _map(source)
    figure, axes = panel(source.width, 390 if described.diagonal else 300)
    shows, items, clouds = set(), [], []
    for one in described.series:
        cloud = np.stack([source.values(one.x or described.x).ravel(), source.values(one.values).ravel()])
        if cloud.shape[1] > _CLOUD:
            cloud = cloud[:, np.linspace(0, cloud.shape[1] - 1, _CLOUD).round().astype(int)]
            shows.add("cloud")
        clouds.append(cloud[:, np.isfinite(cloud).all(0)])
    seen_x, moved_x = clip_to_scale([cloud[0] for cloud in clouds], described.x_scale)
    seen_y, moved_y = clip_to_scale([cloud[1] for cloud in clouds], described.y_scale)
    shows |= {"zeros"} if moved_x or moved_y else set()
    for one, colour, x, y in zip(described.series, _colours(source), seen_x, seen_y, strict=True):
        few = len(x) <= _FEW  # few points are opaque, many are transparent
        axes.scatter(x, y, s=50 if few else 20, color=colour, alpha=0.9 if few else 0.55, lw=0)
        items.append((one.label, _css(colour), "points"))
    seen_y.append(np.array([value for value, _ in described.marks]))
    set_scale(axes, "x", described.x_scale, np.concatenate(seen_x))
    set_scale(axes, "y", described.y_scale, np.concatenate(seen_y))
    if described.diagonal:
        low, high = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([low, high], [low, high], color=COLOURS["muted"], lw=1, ls=DASHES, zorder=1)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel=described.x_label, ylabel=described.y_label)
    draw_marks(axes, described.marks)
    return _Body(source.svg(figure), tuple(items), frozenset(shows))


def _map(source: _Source) -> _Body:
    """Points of the plane, coloured by value, without axes."""
    described = source.panel
    figure, axes = panel(source.width, 285)
    found = [
        [source.values(name).ravel() for name in (one.x or described.x, one.values, one.colour_by)]
        for one in described.series
        if one.colour_by
    ]
    x, y, values = (np.concatenate(parts) for parts in zip(*found))
    few = np.linspace(0, len(x) - 1, min(len(x), _CLOUD)).round().astype(int)
    colours, low, high = _colour_range(values)
    axes.scatter(x[few], y[few], c=values[few], cmap=colours, vmin=low, vmax=high, s=30, lw=0)
    for value, text in described.marks:
        axes.axhline(value, color=COLOURS["rule"], lw=1, ls=DASHES, zorder=0)
        annotate(axes, text, (0.5, value), ("axes fraction", "data"), (0, 4), ha="center")
    axes.set_aspect("equal")
    axes.set_axis_off()
    return _Body(source.svg(figure) + _fill("colour_bar", **_bar(colours, low, high, "")))


def _strips(source: _Source) -> _Body:
    described = source.panel
    rows, moved = clip_to_scale([source.values(one.values).ravel() for one in described.series], described.x_scale)
    figure, axes = panel(source.width, 66 + 24 * len(rows) + 14 * bool(described.marks))
    everything = np.concatenate([*rows, np.array([value for value, _ in described.marks])])
    shows = {"zeros"} if moved else set()
    if described.x_scale == "linear":
        finite = everything[np.isfinite(everything)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        pad = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        axes.set_xlim(low - pad, high + pad)
    set_scale(axes, "x", described.x_scale, everything)
    colour = COLOURS["relu"]
    for place, values in enumerate(rows):
        axes.axhline(place, color=COLOURS["rule"], lw=0.7, zorder=0)
        there = values[np.isfinite(values)]
        if not there.size:
            what = "not reached" if (values == np.inf).any() else "not measured"
            annotate(axes, what, (0, place), ("axes fraction", "data"), (4, 0), va="center")
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
        annotate(axes, text, (value, 1), ("data", "axes fraction"), (0, 2), ha=side, va="bottom")
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
    colours, low, high = _colour_range(finite if described.y_scale == "linear" else np.maximum(finite, 0))
    if described.y_scale == "sqrt" and finite.size:
        high = float(np.quantile(finite, 0.998)) or high
    elif described.y_scale == "log":
        low = max(float(finite[finite > 0].min(initial=np.inf)), 1e-4 * high)
        low = low if low < high else 0.1 * high
    cells = []
    for one, matrix in zip(described.series, found, strict=True):
        if described.y_scale == "log":
            level = np.log(np.maximum(matrix, low) / low) / np.log(high / low)
        else:
            level = (matrix - low) / (high - low)
            level = np.sqrt(np.maximum(level, 0)) if described.y_scale == "sqrt" else level
        n, m = matrix.shape
        cells.append(
            {
                "image": heat_png(level, colours),
                "width": m,
                "height": n,
                "label": one.label,
                "across": [100 * value / m for value, _ in described.marks],
                "down": [100 * value / n for value, _ in described.marks],
            }
        )
    words = [
        f"{side}: {label}" for side, label in (("columns", described.x_label), ("rows", described.y_label)) if label
    ]
    words += {"log": ["logarithmic scale"], "sqrt": ["square-root scale"]}.get(described.y_scale, [])
    bar = _bar(colours, low, high, "; ".join(words))
    return _Body(_fill("matrices", title=described.title, cells=cells, **bar))


def _colour_range(values: np.ndarray) -> tuple[Any, float, float]:
    """A colour map with its limits: from zero, or symmetric about zero if there are negative values."""
    finite = values[np.isfinite(values)]
    high = float(np.abs(finite).max(initial=0)) or 1.0
    return (wave_map(), -high, high) if (finite < 0).any() else (heat_map(), 0.0, high)


def _bar(colours: Any, low: float, high: float, words: str) -> dict[str, Any]:
    """The values for the template of a colour bar."""
    from matplotlib.colors import to_hex

    stops = [to_hex(colours(level)) for level in np.linspace(0, 1, 9)]
    return {"low": number(low, 2), "high": number(high, 2), "stops": stops, "words": words}


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


def _stacks(source: _Source) -> _Body:
    described = source.panel
    rows = len(described.series)
    figure, stack = panel(source.width, 40 + 105 * rows, rows, sharex=True, sharey=True, squeeze=False)
    colours = [COLOURS[one.colour or "relu"] for one in described.series]
    limits = described.y_limits or (-np.inf, np.inf)
    for axes, one, colour in zip(stack[:, 0], described.series, colours):
        for name, shade, width in ((described.background, COLOURS["off"], 1.2), (one.values, colour, 1.5)):
            if name:
                x, values = _line_of(source, name, one.x or described.x)
                axes.plot(x, np.clip(values[0], *limits), color=shade, lw=width)
        if described.x_ticks:
            _word_axis(axes, described)
        axes.set_ylim(described.y_limits)
        axes.locator_params(axis="y", nbins=3)
        axes.set_ylabel(described.y_label)
        axes.set_title(one.label, fontsize=11.5, fontweight="normal", color=COLOURS["muted"], pad=3)
    stack[-1, 0].set_xlabel(described.x_label)
    return _Body(source.svg(figure))


def _half_spaces(source: _Source) -> _Body:
    described = source.panel
    found = [(one.label, source.values(one.values)) for one in described.series]
    grids = [{"label": label, "discs": _half_discs(values), "shape": values.shape} for label, values in found]
    text = _fill("half_spaces", title=described.title, grids=grids, step=_DISC_STEP, radius=_DISC_RADIUS)
    return _Body(text, (), frozenset({"discs"}))


_DISC_STEP, _DISC_RADIUS = 24.0, 9.5


def _half_discs(normals: np.ndarray) -> list[dict[str, Any]]:
    """Centre, colour and outline of a half disc per normal, in units of the picture."""
    discs = []
    for layer, column, angle, colour in half_spaces(normals):
        x, y = 15 + _DISC_STEP * (column + 0.5), 1 + _DISC_STEP * (layer + 0.5)
        discs.append({"x": x, "y": y, "colour": colour, "path": _half_disc(x, y, _DISC_RADIUS, angle)})
    return discs


def _half_disc(x: float, y: float, radius: float, angle: float) -> str:
    """The outline of the half of a disc to which a normal points, as the path of an SVG."""
    # the diameter is perpendicular to the normal; the y-axis of SVG points down
    across = angle + np.pi / 2
    x0, y0 = x + radius * np.cos(across), y - radius * np.sin(across)
    x1, y1 = x - radius * np.cos(across), y + radius * np.sin(across)
    return f"M{x0:.2f} {y0:.2f}A{radius} {radius} 0 0 1 {x1:.2f} {y1:.2f}Z"


RENDERERS: dict[str, Callable[[_Source], _Body]] = {
    "lines": _lines,
    "points": _points,
    "strips": _strips,
    "matrices": _matrices,
    "fields": _fields,
    "stacks": _stacks,
    "half_spaces": _half_spaces,
}
