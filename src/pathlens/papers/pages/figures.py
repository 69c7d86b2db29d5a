"""How an artifact becomes a figure: by the panels that it describes, or by a function of its own in :data:`FIGURES`.

A figure is a few panels, each its own SVG or image, so that they stack on a narrow screen, and a caption that says what
to see with the numbers that were measured. Described panels are drawn in charts; the functions here are for figures
that need more than those can say. The page around them lives in page. May import artifacts and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from pathlens.errors import ArtifactError
from pathlens.papers.artifact import Artifact
from pathlens.papers.pages.axes import band, number, summary
from pathlens.papers.pages.charts import Drawn, colour_bar, draw_panels
from pathlens.papers.pages.palette import (
    COLOURS,
    HALF,
    LABELS,
    THIRD,
    drawing,
    heat_map,
    heat_png,
    inline_svg,
    panel,
    wave_map,
)

__all__ = ["FIGURES", "Drawn", "array", "number", "read_spread"]


# --- numbers and arrays ----------------------------------------------------------------------------------------


def read_spread(values: Sequence[float | None] | np.ndarray, beyond: str = "not reached") -> str:
    """'median (lowest–highest)' over seeds; None and infinity, what was never reached, read as ``beyond``; no NaN.

    Examples
    --------
    >>> read_spread([240, 106, 255]), read_spread([None, 2385, None], ">4000"), read_spread([5]), read_spread([-1, 2])
    ('240 (106–255)', '>4000 (2385–>4000)', '5', '0.5 (−1 to 2)')
    """
    there = sorted(np.inf if value is None else float(value) for value in values if value is None or value == value)
    if not there:
        return "–"
    middle = there[(len(there) - 1) // 2], there[len(there) // 2]
    median = middle[0] if middle[0] == middle[1] else sum(middle) / 2
    middle_text, low, high = (beyond if value == np.inf else number(value) for value in (median, there[0], there[-1]))
    between = " to " if there[0] < 0 else "–"
    return middle_text if low == high else f"{middle_text} ({low}{between}{high})"


def array(artifact: Artifact, name: str, *shape: int | None) -> np.ndarray:
    """An array of the artifact with the shape that the drawing needs; None allows any length.

    Raises
    ------
    ArtifactError
        Naming the array, what was expected and what came.
    """
    where = f"Artifact {artifact.name!r} ({artifact.scale})"
    wanted = "×".join("·" if size is None else str(size) for size in shape)
    if name not in artifact.arrays:
        raise ArtifactError(
            f"{where} has no array {name!r} of shape {wanted}; it has {', '.join(artifact.arrays)}. "
            "Run the experiment again."
        )
    found = artifact.arrays[name]
    fits = found.ndim == len(shape) and all(s is None or s == f for s, f in zip(shape, found.shape, strict=True))
    if not fits or found.size == 0:
        came = "×".join(map(str, found.shape))
        raise ArtifactError(f"{where}: array {name!r} has shape {came}, expected {wanted}. Run the experiment again.")
    return found


def _models(artifact: Artifact, stem: str) -> tuple[str, ...]:
    there = tuple(model for model in LABELS if f"{stem}_{model}" in artifact.arrays)
    if not there:
        raise ArtifactError(
            f"Artifact {artifact.name!r} ({artifact.scale}) has no array {stem}_<model> for any of "
            f"{', '.join(LABELS)}; it has {', '.join(artifact.arrays)}. Run the experiment again."
        )
    return there


# --- axes ------------------------------------------------------------------------------------------------------


def _angle_axis(axes: Any, label: bool = True) -> None:
    axes.set_xlim(0, 2 * np.pi)
    axes.set_xticks(np.arange(5) * np.pi / 2, ["0", "π/2", "π", "3π/2", "2π"])
    axes.axvspan(0, np.pi, color=COLOURS["tint"], lw=0, zorder=-5)
    if label:
        axes.set_xlabel("angle θ")


def _epoch_axis(axes: Any, last: float) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xlim(0, last)
    ticks = [0, *(10**k for k in range(1 + int(np.log10(max(last, 1)))))]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("epoch")
    axes.grid(axis="y", color=COLOURS["rule"], lw=0.6)


def _few(count: int, most: int = 400) -> np.ndarray:
    """Indices 0 … count−1, thinned evenly on the epoch axis once there are more than a screen can show."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.concatenate([[0], np.geomspace(1, count - 1, most).round()]).astype(int))


def _decade_axis(axes: Any, low: float, high: float) -> None:
    """Logarithmic y-axis whose ticks are plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [10.0**k for k in range(int(np.ceil(np.log10(low))), 1 + int(np.floor(np.log10(high))))]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


# --- half-space paper ------------------------------------------------------------------------------------------


def half_space_fig2(artifact: Artifact) -> Drawn:
    """Target over θ, the circle coloured by the target, and the training losses."""
    theta = array(artifact, "theta", None)
    n = len(theta)
    x, y = array(artifact, "x", n, 2), array(artifact, "y", n)
    models = _models(artifact, "loss")
    losses = {model: array(artifact, f"loss_{model}", None, None) for model in models}

    figure, axes = panel(HALF, 190)
    axes.plot(theta, y, color=COLOURS["ink"], lw=1.4)
    _angle_axis(axes)
    axes.set_ylim(-1.15, 1.15)
    axes.set_yticks([-1, 0, 1])
    axes.set_title("target y")
    target = inline_svg(figure, "fig2a", "Target over the angle: slow on the top half, fast on the bottom half")

    figure, axes = panel(HALF, 240)
    shown = np.linspace(0, n - 1, min(n, 360)).round().astype(int)
    axes.scatter(x[shown, 0], x[shown, 1], c=y[shown], cmap=wave_map(), vmin=-1, vmax=1, s=30, lw=0)
    axes.text(0, 0.2, "top half", ha="center", color=COLOURS["muted"])
    axes.text(0, -0.32, "bottom half", ha="center", color=COLOURS["muted"])
    axes.plot([-0.8, 0.8], [0, 0], color=COLOURS["rule"], lw=1, ls=(0, (3, 3)))
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title("the data")
    circle = inline_svg(figure, "fig2b", "The data on the circle, coloured by the target")

    figure, axes = panel(HALF, 440)
    for model in models:
        loss = losses[model]
        few = _few(loss.shape[1])
        band(axes, few, np.maximum(loss[:, few], 1e-12), COLOURS[LABELS[model][1]])
    last = max(loss.shape[1] - 1 for loss in losses.values())
    _epoch_axis(axes, last)
    known = np.concatenate([loss[np.isfinite(loss)] for loss in losses.values()] + [np.array([0.01, 0.5])])
    _decade_axis(axes, min(max(float(known.min()), 1e-5) * 0.8, 5e-3), min(max(1.0, float(known.max()) * 1.1), 1e3))
    for level, text in ((0.25, "0.25\none half\nlearned"), (0.01, "0.01\nboth halves\nlearned")):
        axes.axhline(level, color=COLOURS["muted"], lw=1, ls=(0, (4, 3)))
        axes.annotate(
            text,
            (last, level),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS["muted"],
            fontsize=11.5,
        )
    axes.set_title("training loss (median, range over seeds)")
    curves = inline_svg(figure, "fig2c", "Training loss per epoch of each network")

    reached = artifact.metrics.get("epochs_to", {})
    said = [
        f"{LABELS[model][0]} {read_spread(reached[model]['0.01'], f'>{losses[model].shape[1] - 1}')}"
        for model in models
        if reached.get(model, {}).get("0.01")
    ]
    numbers = f" Epochs until the loss is below 0.01, median (range): {'; '.join(said)}." if said else ""
    caption = (
        "The target is slow on the top half of the circle and fast on the bottom half. A loss of 0.25 is what "
        "is left when one half is learned: look at how quickly each network gets there, and how long it then "
        "stays." + numbers
    )
    return Drawn(((f'<div class="group">{target}{circle}</div>', curves),), caption, models)


def half_space_fig3(artifact: Artifact) -> Drawn:
    """Overlap kernels as matrices, and the ratio of top to bottom over training."""
    epochs = array(artifact, "epochs", None)
    models = _models(artifact, "kernel")
    m = len(array(artifact, "theta_kernel", None))
    ratio_epochs = array(artifact, "ratio_epochs", None)
    rows = []
    for model in models:
        kernels = array(artifact, f"kernel_{model}", len(epochs), m, m).astype(np.float64) * m
        top = float(np.quantile(kernels, 0.998)) or 1.0
        name, colour = LABELS[model]
        bar = colour_bar(heat_map(), 0, top, "× mean diagonal, square-root scale")
        cells = "".join(
            f'<figure class="matrix"><div><img src="{heat_png(np.sqrt(np.maximum(kernel, 0) / top), heat_map())}" '
            f'width="{m}" height="{m}" alt="{escape(name)}: overlap kernel, {_when(epoch)}"></div>'
            f"<figcaption>{_when(epoch)}</figcaption></figure>"
            for kernel, epoch in zip(kernels, epochs, strict=True)
        )
        rows.append(
            f'<div class="group"><h4><i class="key" style="background:var(--{colour})"></i>{escape(name)}</h4>'
            f'<div class="matrices">{cells}</div>{bar}</div>'
        )

    panels = []
    for stem, title in (("diag_ratio", "diagonal, top ÷ bottom"), ("block_ratio", "block mean, top ÷ bottom")):
        figure, axes = panel(HALF, 270)
        values = {model: array(artifact, f"{stem}_{model}", None, len(ratio_epochs)) for model in models}
        for model in models:
            band(axes, ratio_epochs, values[model], COLOURS[LABELS[model][1]])
        _epoch_axis(axes, float(ratio_epochs[-1]))
        finite = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values.values()] + [np.ones(1)])
        _decade_axis(axes, min(0.5, finite.min() * 0.8), max(3.0, finite.max() * 1.3))
        axes.axhline(1, color=COLOURS["muted"], lw=1, ls=(0, (4, 3)))
        axes.set_title(title)
        panels.append(inline_svg(figure, f"fig3{stem}", f"Overlap kernel, {title}, over training"))
    said = []
    for model in models:
        ratio = array(artifact, f"diag_ratio_{model}", None, len(ratio_epochs))
        _, middle, _ = summary(ratio)
        peak = np.where(np.isnan(middle), -np.inf, middle).argmax()
        said.append(
            f"{LABELS[model][0]} {read_spread(ratio[:, 0], '∞')} at first, {read_spread(ratio[:, peak], '∞')} "
            f"at its largest (epoch {ratio_epochs[peak]:g}), {read_spread(ratio[:, -1], '∞')} at the end"
        )
    caption = (
        "Entry (s, t) counts the paths that are active for both points s and t; points are ordered by angle, "
        "the top half first, and each matrix is divided by its trace. A bright upper-left block means that "
        "paths gather on the half where the target is slow. Mean diagonal on top over bottom, median (range): "
        + "; ".join(said)
        + "."
    )
    return Drawn((tuple(rows), tuple(panels)), caption)


def _when(epoch: Any) -> str:
    return "at initialisation" if int(epoch) == 0 else f"epoch {int(epoch)}"


def half_space_fig5(artifact: Artifact) -> Drawn:
    """Outputs over θ at several epochs, one column per model, the target behind."""
    theta = array(artifact, "theta", None)
    n = len(theta)
    y = array(artifact, "y", n)
    models = _models(artifact, "outputs")
    columns, said = [], []
    for model in models:
        epochs = array(artifact, f"epochs_{model}", None)
        outputs = array(artifact, f"outputs_{model}", len(epochs), n)
        name, colour = LABELS[model]
        figure, stack = panel(THIRD, 40 + 105 * len(epochs), len(epochs), sharex=True, sharey=True, squeeze=False)
        for axes, epoch, output in zip(stack[:, 0], epochs, outputs, strict=True):
            axes.plot(theta, y, color=COLOURS["off"], lw=1.2)
            axes.plot(theta, np.clip(output, -1.6, 1.6), color=COLOURS[colour], lw=1.5)
            _angle_axis(axes, label=False)
            axes.set_ylim(-1.6, 1.6)
            axes.set_yticks([-1, 0, 1])
            axes.set_title(_when(epoch), fontsize=11.5, fontweight="normal", color=COLOURS["muted"], pad=3)
        stack[-1, 0].set_xlabel("angle θ")
        drawn = inline_svg(figure, f"fig5{model}", f"{name}: outputs over the angle at {len(epochs)} epochs")
        columns.append(
            f'<div class="group"><h4><i class="key" style="background:var(--{colour})"></i>{escape(name)}'
            f"</h4>{drawn}</div>"
        )
        half = theta < np.pi
        error = [float(np.mean((outputs[-1] - y)[mask] ** 2)) for mask in (half, ~half)]
        said.append(f"{name} {number(error[0], 2)} and {number(error[1], 2)} ({_when(epochs[-1])})")
    caption = (
        "What each network says (colour) against the target (grey), for one seed. Watch which half is fitted "
        "first, and what frozen gates leave behind on the top half. Mean squared error on the top and the "
        "bottom half in the last row: " + "; ".join(said) + "."
    )
    return Drawn((tuple(columns),), caption)


def half_space_fig6(artifact: Artifact) -> Drawn:
    """Every neuron's half-space before and after training, and the share that looks to the top."""
    start = array(artifact, "normals_init", None, None, None, 2)
    end = array(artifact, "normals_end", *start.shape)
    seeds, layers, _, _ = start.shape
    groups = []
    for when, normals in (("at initialisation", start[0]), ("after training", end[0])):
        groups.append(f"<h4>{when}</h4>{_half_discs(normals, when)}")

    figure, axes = panel(HALF, 370)
    place = np.arange(1, layers + 1)
    shares = {when: 100 * array(artifact, f"share_top_{when}", seeds, layers) for when in ("init", "end")}
    for when, text, colour, offset in (
        ("init", "at initialisation", "muted", -0.06),
        ("end", "after training", "top", 0.06),
    ):
        share = shares[when]
        axes.plot(place + offset, np.median(share, 0), color=COLOURS[colour], marker="o", ms=5, label=text)
        axes.vlines(place + offset, share.min(0), share.max(0), color=COLOURS[colour], alpha=0.45, lw=5)
    axes.axhline(100 / 6, color=COLOURS["muted"], lw=1, ls=(0, (4, 3)), label="random directions")
    axes.set_xticks(place, [str(k) for k in place])
    axes.set_xlabel("layer")
    axes.set_xlim(0.6, layers + 0.4)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
    axes.grid(axis="y", color=COLOURS["rule"], lw=0.6)
    axes.legend(frameon=False, loc="upper left", labelcolor=COLOURS["muted"], fontsize=11.5)
    axes.set_title("normals within 30° of the top (median, range over seeds)")
    chart = inline_svg(figure, "fig6share", "Share of normals within 30 degrees of the top direction, by layer")
    first, last = (read_spread(shares[when][:, -1].round(1)) for when in ("init", "end"))
    caption = (
        "Each disc is one neuron of the DLGN: it is on exactly in the shaded half of the input space. Rows are "
        "layers; within a row neurons are sorted by their angle to the top; those within 30° of it are amber. "
        f"In the last layer they are {first} % at initialisation and {last} % after training, median (range); "
        "random directions would give 16.7 %."
    )
    return Drawn(((f'<div class="group">{"".join(groups)}</div>', chart),), caption)


def _half_discs(normals: np.ndarray, when: str) -> str:
    """A grid of half discs, layers L down, neurons w across, as SVG written by hand: 2·L·w marks and no axes."""
    layers, width, _ = normals.shape
    step, radius, margin = 24.0, 9.5, 30.0
    parts = []
    for layer in range(layers):
        y = step * (layer + 0.5) + 1
        parts.append(f'<text x="0" y="{y + 3.5:.1f}" class="small">{layer + 1}</text>')
        angle = np.arctan2(normals[layer, :, 1], normals[layer, :, 0])
        away = np.abs(np.angle(np.exp(1j * (angle - np.pi / 2))))
        for column, neuron in enumerate(np.argsort(away, kind="stable")):
            x = margin / 2 + step * (column + 0.5)
            colour = "top" if away[neuron] <= np.pi / 6 else "off"
            parts.append(_half_disc(x, y, radius, float(angle[neuron]), colour))
    box = f"0 0 {margin / 2 + step * width + 1:.0f} {step * layers + 2:.0f}"
    label = f"Half-spaces of {width} neurons in each of {layers} layers, {when}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _half_disc(x: float, y: float, radius: float, angle: float, colour: str) -> str:
    # the diameter is perpendicular to the normal; the y-axis of SVG points down
    across = angle + np.pi / 2
    x0, y0 = x + radius * np.cos(across), y - radius * np.sin(across)
    x1, y1 = x - radius * np.cos(across), y + radius * np.sin(across)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="none" stroke="var(--rule)"/>'
        f'<path d="M{x0:.2f} {y0:.2f}A{radius} {radius} 0 0 1 {x1:.2f} {y1:.2f}Z" fill="var(--{colour})"/>'
    )


FIGURES: dict[str, Callable[[Artifact], Drawn]] = {
    "hs.fig2": half_space_fig2,
    "hs.fig3": half_space_fig3,
    "hs.fig5": half_space_fig5,
    "hs.fig6": half_space_fig6,
}


def draw(artifact: Artifact) -> Drawn | None:
    """The figure of an artifact, or None where its experiment has numbers only."""
    make = FIGURES.get(artifact.name) or (draw_panels if artifact.figures else None)
    if make is None:
        return None
    with drawing():
        return make(artifact)
