"""What pages draw of the experiments on deep gated networks and neural path features: one function per experiment.

Each takes what the labels need and refers to arrays by the names under which its experiment stores them. May import
panels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathlens.papers.panels import Panel, Series

__all__ = [
    "conv",
    "descent",
    "dln",
    "entries",
    "galu",
    "limits",
    "memorise",
    "spectra",
    "strengths",
    "subnetworks",
    "toy",
    "unfittable",
]

_DEPTH = "depth d (layers of weights)"


def _depths(stem: str, depths: Sequence[int], style: str = "line") -> list[Series]:
    """A line per depth of an array whose first axis is depth; ``stem`` may end in '[0' to fix axes before it."""
    start = f"{stem}, " if "[" in stem else f"{stem}["
    return [Series(f"{start}{j}]", f"d = {d}" if style == "line" else "", style=style) for j, d in enumerate(depths)]


def spectra(depths: Sequence[int], widths: Sequence[int]) -> list[Panel]:
    """dgn.fig1."""
    panels = [
        Panel(
            "lines",
            f"w = {w}: measured (lines) and ideal (dashes)",
            [*_depths(f"ecdf[{i}", depths), *_depths("ideal", depths, "dashed")],
            x_label="eigenvalues, ascending",
            y_label="sum so far, of K₀/d",
            ordered=True,
        )
        for i, w in enumerate(widths)
    ]
    far = [Series(f"distance[{i}].T", f"w = {w}") for i, w in enumerate(widths)]
    return [
        *panels,
        Panel("lines", "Distance from the ideal", far, "depths", _DEPTH, "largest difference / n", y_scale="log"),
    ]


def entries() -> list[Panel]:
    """dgn.fig2."""

    def entry(k: int, title: str) -> Panel:
        series = [Series(f"average[:, :, {k}].T", "measured"), Series(f"mean[:, {k}]", "exact mean", style="dashed")]
        return Panel("lines", title, series, "depths", _DEPTH, "entry of K₀/d")

    variance = [
        Series("variance.T", "measured"),
        Series("law", "leading order, d³/w", style="dashed"),
        Series("printed", "as printed", style="dashed"),
    ]
    return [
        entry(0, "A diagonal entry"),
        entry(1, "An off-diagonal entry"),
        Panel(
            "lines",
            "Variance of the diagonal entry",
            variance,
            "depths",
            _DEPTH,
            "variance of K₀(s, s)/d",
            y_scale="log",
        ),
    ]


def descent(depths: Sequence[int], widths: Sequence[int]) -> list[Panel]:
    """dgn.fig3."""
    panels = [
        Panel(
            "lines",
            f"w = {w}: descent (lines) and a kernel that stays (dashes)",
            [*_depths(f"error[{i}", depths), *_depths(f"linear[{i}", depths, "dashed")],
            x_label="step",
            y_label="‖e(t)‖ / ‖e(0)‖",
            y_scale="log",
            ordered=True,
        )
        for i, w in enumerate(widths)
    ]
    final = [Series(f"error[{i}, :, :, -1].T", f"w = {w}") for i, w in enumerate(widths)]
    return [*panels, Panel("lines", "Error after the last step", final, "depths", _DEPTH, "‖e‖ / ‖e(0)‖")]


def galu(depths: Sequence[int]) -> list[Panel]:
    """dgn.fig4."""
    panels = [
        Panel(
            "lines",
            f"{name}: convergence",
            _depths(f"error_{key}", depths),
            x_label="step",
            y_label="‖e(t)‖ / ‖e(0)‖",
            ordered=True,
        )
        for key, name in (("galu", "GaLU"), ("relu", "ReLU"))
    ] + [
        Panel(
            "lines",
            f"{name}: spectrum",
            _depths(f"ecdf_{key}", depths),
            x_label="eigenvalues, ascending",
            y_label="sum so far / largest",
            ordered=True,
        )
        for key, name in (("galu", "GaLU"), ("relu", "ReLU"))
    ]
    final = [Series("error_galu[:, :, -1].T", "GaLU"), Series("error_relu[:, :, -1].T", "ReLU")]
    return [*panels, Panel("lines", "Error after the last step", final, "depths", _DEPTH, "‖e‖ / ‖e(0)‖")]


def dln(depths: Sequence[int]) -> list[Panel]:
    """dgn.fig10."""

    def over_time(stem: str, title: str, y_label: str, y_scale: str = "linear") -> Panel:
        return Panel(
            "lines", title, _depths(stem, depths), x_label="step", y_label=y_label, y_scale=y_scale, ordered=True
        )

    start = [Series("kernel[:, :, 0].T", "measured"), Series("depths", "exact mean, d", style="dashed")]
    return [
        over_time("error", "Squared error", "e(t)² / e(0)²", "log"),
        over_time("kernel", "The kernel grows", "K(t)"),
        over_time("growth", "The weights grow", "‖Θ(t)‖² − ‖Θ(0)‖²"),
        Panel("lines", "The kernel at the start", start, "depths", _DEPTH, "K₀"),
    ]


def strengths() -> list[Panel]:
    """dgn.fig9."""
    rows = [Series(f"strengths[0, {k}]", f"bundle {k + 1}") for k in range(8)]
    note = "One seed. The three paths of a bundle are rotations of each other: their dots agree."
    return [Panel("strips", "24 paths, eight strengths", rows, x_label="product of the weights on a path", note=note)]


def conv(changes: Sequence[str]) -> list[Panel]:
    """dgn.conv."""
    return [
        Panel(
            "strips",
            "When one input rotates",
            [Series(f"change[{i}]", name) for i, name in enumerate(changes)],
            x_label="relative change of the path kernel",
            x_scale="log",
        ),
        Panel(
            "lines",
            "Pairs of paths, by the rotation between them",
            [Series("split")],
            x_label="rotation",
            y_label="share of the kernel's trace",
        ),
    ]


def subnetworks(taus: Sequence[float]) -> list[Panel]:
    """dgn.subnetworks."""

    def over_time(stem: str, title: str, y_label: str, **more: Any) -> Panel:
        series = [Series(f"{stem}[:, :, {k}]", f"τ_A = {tau:g}") for k, tau in enumerate(taus)]
        return Panel("lines", title, series, "epochs", "epoch", y_label, "log", ordered=True, **more)

    return [
        over_time("active_gates", "Active gates", "gates per input"),
        over_time("sensitive_gates", "Sensitive gates", "gates per input"),
        over_time("active_paths", "Active paths", "paths per input", y_scale="log"),
        over_time("printed_both", "Active and sensitive, printed threshold", "share of active gates"),
    ]


def unfittable(networks: Sequence[str], floor: float) -> list[Panel]:
    """dgn.unfittable."""
    series = [Series(f"loss[{i}]", name) for i, name in enumerate(networks)]
    return [
        Panel(
            "lines",
            "Error while training",
            series,
            x_label="step",
            y_label="Σ(ŷ − y)²",
            x_scale="log",
            y_scale="log",
            marks=[(floor, "9/5, the least without biases")],
        )
    ]


def toy() -> list[Panel]:
    """npk.fig1."""
    return [
        Panel("matrices", "Features of three inputs", [Series("features", "rows: inputs, columns: the 18 paths")]),
        Panel(
            "lines",
            "Strength of each path",
            [Series("strengths", style="points")],
            "path",
            "path",
            "product of its weights",
            marks=[(0.0, "")],
        ),
    ]


def limits(relu: float, convolutional: bool) -> list[Panel]:
    """npk.limits; ``relu`` is the median test accuracy of the ReLU networks."""
    near = [
        Series(f"{gates}[:, {k}]", f"{gates} gates, from {name}")
        for gates in ("independent", "dependent")
        for k, name in enumerate(("d·Σ∘∏Σ̂", "the ReLU NTK"))
    ]
    images = [
        Series(f"{stem}_{pool}", f"{name}, {pool.replace('_', ' ')}")
        for pool in ("pooling", "no_pooling")
        for stem, name in (("cntk", "CNTK"), ("random", "random gates"))
    ]
    return [
        Panel(
            "lines",
            "Distance from the limit of Theorem 5.1",
            [Series("errors.T", "measured"), Series("predicted.T", "predicted", style="dashed")],
            "widths",
            "width",
            "relative distance",
            "log",
            "log",
            slope=-0.5,
        ),
        Panel("strips", "Which limit, at the largest width", near, x_label="relative distance", x_scale="log"),
        Panel(
            "lines",
            "Gates of each stage",
            [Series("kernel.T", "regression with H"), Series("network.T", "network")],
            "stages",
            "epoch at which the gates were taken",
            "test accuracy",
            "log",
            marks=[(relu, "ReLU")],
        ),
        *([Panel("strips", "Convolutional gates", images, x_label="test accuracy")] if convolutional else []),
    ]


def memorise(widths: Sequence[int]) -> list[Panel]:
    """npk.memorise."""
    series = [Series(f"error[{i}].T", f"w = {w}") for i, w in enumerate(widths)]
    return [Panel("lines", "Error after the last step", series, "depths", _DEPTH, "‖e‖ / ‖e(0)‖")]
