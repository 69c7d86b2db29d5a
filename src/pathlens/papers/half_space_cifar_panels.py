"""What pages draw of the CIFAR-10 and residual network experiments on half-spaces: one function per experiment.

Each takes what the labels need and refers to arrays by the names under which its experiment stores them. May import
panels only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["kernels", "table"]

_ACCURACY = "test accuracy, %"


def table(
    names: Mapping[str, str],
    arrays: Collection[str],
    widths: Sequence[int],
    flat: Mapping[str, str],
    printed: Mapping[str, float],
) -> list[Panel]:
    """hs.tab1; rows that were not trained have no array."""
    panels = []
    for w in widths:
        rows = [
            Series(f"{what}_{m}_{w}", f"{name}{more}")
            for m, name in names.items()
            for what, more in (("last", ""), ("hard", ", hard gates at test"))
            if f"{what}_{m}_{w}" in arrays
        ]
        curves = [Series(f"history_{m}_{w}", name) for m, name in names.items() if f"history_{m}_{w}" in arrays]
        if rows:
            panels.append(
                Panel(
                    "strips",
                    f"{w} filters, after the last epoch",
                    rows,
                    x_label=_ACCURACY,
                    marks=[(value, f"{name}, paper") for name, value in printed.items() if name in ("ReLU", "DLN")],
                )
            )
        if curves:
            panels.append(Panel("lines", f"{w} filters", curves, x_label="epoch", y_label=_ACCURACY))
    dense = [
        Series(f"last_{m}_{name}", f"{names[m]}, {title}")
        for name, title in flat.items()
        for m in ("dlgn", "dlgn_pwc")
        if f"last_{m}_{name}" in arrays
    ]
    return (
        [*panels, Panel("strips", "Fully connected: piecewise linear and constant", dense, x_label=_ACCURACY)]
        if dense
        else panels
    )


def kernels(models: Mapping[str, str], kinds: Mapping[str, str], shown: Sequence[int]) -> list[Panel]:
    """hs.cifar."""
    pairs = [(kind, m, f"{name}, {what}") for kind, what in kinds.items() for m, name in models.items()]
    moved = [Series(f"drift_{kind}_{m}", label) for kind, m, label in pairs]
    ratio = [Series(f"ratio_{kind}_{m}", label) for kind, m, label in pairs]
    blocks = [
        Panel(
            "matrices",
            f"{name}: {what}, class by class",
            [Series(f"blocks_{kind}_{m}[{j}]", f"epoch {epoch}") for j, epoch in enumerate(shown)],
            x_label="class",
            y_label="class",
            note="Mean over the seeds, scaled to trace 100.",
        )
        for kind, what in kinds.items()
        for m, name in models.items()
    ]
    return [
        Panel(
            "lines",
            "How far the kernels moved",
            moved,
            "epochs",
            "epoch",
            "‖K − K₀‖ / ‖K₀‖, kernels of trace 1",
            note="With the default initialisation the NTK begins nearly constant: biases outweigh other weights.",
        ),
        Panel("lines", "Class structure", ratio, "epochs", "epoch", "mean within classes / between classes"),
        *blocks,
    ]
