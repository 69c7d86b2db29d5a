"""What pages draw of the half-space experiments on the circle and on regions: one function per experiment.

Each takes what the labels need and refers to arrays by the names under which its experiment stores them. May import
panels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["failures", "fig1", "fig4", "fig8", "regions", "spectral"]


def fig1() -> list[Panel]:
    """hs.fig1."""
    areas = [
        Series("areas_relu[0]", "ReLU, +ε"),
        Series("areas_relu[1]", "ReLU, −ε"),
        Series("areas_dlgn[0]", "linear gates, +ε", style="dashed"),
        Series("areas_dlgn[1]", "linear gates, −ε", style="dashed"),
    ]
    pictures = [
        Series(f"region_{kind}_{word}", f"{name}, ε = {sign}0.1")
        for kind, name in (("relu", "ReLU"), ("dlgn", "linear gates"))
        for word, sign in (("above", "+"), ("below", "−"))
    ]
    return [
        Panel(
            "lines",
            "Left: what the second unit reads, on x > 0",
            [
                Series("preactivation", "ReLU network"),
                Series("linear", "linear gates, the same weights", style="dashed"),
            ],
            "x",
            "x",
            "pre-activation",
            marks=[(0.0, "active above")],
            note="Active where the line is above zero: two intervals for ReLU, one for linear gates.",
        ),
        Panel("lines", "Right: area of the path region", areas, "epsilons", "|ε|", "area in [−1, 1]²", "log"),
        Panel("matrices", "Right: where the path is active", pictures, x_label="x₁", y_label="x₂"),
    ]


def fig8(paths: Sequence[tuple[int, ...]]) -> list[Panel]:
    """hs.fig8."""

    def each(stem: str) -> list[Series]:
        return [Series(f"{stem}[{k}]", "path " + ", ".join(str(i + 1) for i in path)) for k, path in enumerate(paths)]

    return [
        Panel("matrices", "Where each path is active", each("region"), x_label="x₁", y_label="x₂"),
        *(
            Panel(
                "matrices",
                f"{name}: each path's value there, and their sum",
                [*each(f"path_{stem}"), Series(f"sum_{stem}", "the network")],
                x_label="x₁",
                y_label="x₂",
            )
            for stem, name in (("dlgn", "DLGN"), ("pwc", "DLGN-PWC"))
        ),
    ]


def regions(kinds: Sequence[str]) -> list[Panel]:
    """hs.regions."""

    def rows(*arrays: tuple[str, str]) -> list[Series]:
        return [
            Series(f"{key}[{i}, {j}]", f"{kind}, {when}{word}")
            for i, kind in enumerate(kinds)
            for j, when in enumerate(("init", "end"))
            for key, word in arrays
        ]

    return [
        Panel(
            "strips",
            "How many regions are not empty",
            rows(("activation_regions", ": activation"), ("path_regions", ": path, different")),
            x_label="regions in the box",
            x_scale="log",
        ),
        Panel(
            "strips",
            "Faces",
            rows(("activation_faces", ": activation"), ("path_faces", ": path")),
            x_label="mean number of faces of a region",
        ),
        Panel("strips", "Convex path regions", rows(("convex", "")), x_label="share of path regions"),
        *(
            Panel(
                "matrices",
                f"Active paths: {kind}",
                [Series(f"paths_{i}_{when}", when) for when in ("init", "end")],
                x_label="x₁",
                y_label="x₂",
                y_scale="log",
            )
            for i, kind in enumerate(kinds)
        ),
    ]


def fig4(models: Mapping[str, str], epochs: Sequence[int]) -> list[Panel]:
    """hs.fig4."""
    angle = "angle, from 0 to 2π"
    kernels = [
        Panel(
            "matrices",
            f"Tangent kernel: {name}",
            [Series(f"kernel_{m}[{k}]", f"epoch {e}") for k, e in enumerate(epochs)],
            x_label=angle,
            y_label=angle,
        )
        for m, name in models.items()
    ]
    alike = [
        Series(f"alignment_{kernel}_{pair}", f"{name}: {label}", style=style)
        for kernel, name in (("ntk", "tangent"), ("overlap", "overlap"))
        for pair, label, style in (("between", "ReLU, DLGN", "line"), ("relu", "two ReLU", "dashed"))
    ]
    return [
        *kernels,
        Panel(
            "lines",
            "How far the tangent kernel has moved",
            [Series(f"drift_{m}", n) for m, n in models.items()],
            "epochs",
            "epoch",
            "‖K̂(t) − K̂(0)‖ / ‖K̂(0)‖",
            "log",
        ),
        Panel("lines", "Are the kernels alike?", alike, "epochs", "epoch", "centred alignment", "log"),
        Panel(
            "lines",
            "Diagonal, top over bottom",
            [Series(f"diagonal_{m}", n) for m, n in models.items()],
            "epochs",
            "epoch",
            "mean K(x, x), top / bottom",
            "log",
            "log",
            marks=[(1.0, "equal")],
        ),
    ]


def spectral(models: Mapping[str, str]) -> list[Panel]:
    """hs.spectral."""
    flows = [Series("flow_infinite", "flow with K⁽ᵈ⁾", style="dashed")]
    flows += [Series(f"flow_{m}", f"flow with K₀ of {n}", style="dashed") for m, n in models.items()]
    real = [Series(f"loss_{m}", n, x=f"time_{m}") for m, n in models.items()]
    curves = [Series(f"loss_{m}", n) for m, n in models.items()]
    curves += [Series(f"lazy_{m}", f"{n}, linearised", style="dashed") for m, n in models.items()]
    return [
        Panel(
            "lines",
            "Infinite width: eigenvalue of each frequency",
            [Series("eigenvalues", "K⁽ᵈ⁾")],
            "frequencies",
            "waves around the circle",
            "eigenvalue / n",
            "linear",
            "log",
        ),
        Panel(
            "lines",
            "The same optimiser, with and without moving kernels",
            curves,
            "epochs",
            "epoch",
            "loss",
            "log",
            "log",
            marks=[(0.01, "")],
        ),
        Panel(
            "lines",
            "Time in units of the first (loss .25)",
            [*real, *flows],
            "times",
            "t / t(.25)",
            "loss",
            "log",
            "log",
            marks=[(0.01, ""), (0.25, "")],
        ),
        Panel(
            "lines",
            "How far the kernel has moved",
            [Series(f"drift_{m}", n) for m, n in models.items()],
            "drift_epochs",
            "epoch",
            "‖K(t) − K(0)‖ / ‖K(0)‖",
            "log",
            "log",
            note="Growth counts; hs.fig4 shows the drift of the trace-normalised kernel.",
        ),
    ]


def failures(tests: Mapping[str, str], models: Mapping[str, str]) -> list[Panel]:
    """hs.failures."""
    return [
        Panel(
            "lines",
            title,
            [
                *(Series(f"{test}_{m}", n) for m, n in models.items()),
                Series(f"{test}_hard", "DLGN-PWC, hard gates", style="dashed"),
            ],
            f"{test}_levels",
            axis,
            "skill",
            "linear" if test == "parity" else "log",
            marks=[(0.5, "breaks below")],
        )
        for test, (title, axis) in ((t, text.split(" | ")) for t, text in tests.items())
    ]
