"""What pages draw of the half-space experiments on modified Fashion-MNIST and on the allocation of paths.

Each function takes what the labels need and refers to arrays by the names under which its experiment stores them. May
import panels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["PARTS", "REMEDIES", "TARGETS", "allocation", "controls", "early", "kernels", "remedies"]

PARTS = ("simple", "complex")
TARGETS = {
    "circle": "sin θ | sin 12θ",
    "swapped": "sin 12θ | sin θ",
    "trivial": "0 | sin 12θ",
    "offset": "sin 12θ + 1 | sin 12θ",
}
REMEDIES = {
    "plain": "plain",
    "gates": "gates weighed by loss",
    "paths": "balanced paths",
    "everything": "all weighed by loss",
}


def allocation(models: Mapping[str, str]) -> list[Panel]:
    """hs.fig7."""

    def by_part(stem: str, title: str, y_label: str, x: str = "epochs", scale: str = "log") -> list[Panel]:
        return [
            Panel(
                "lines",
                f"{name}: {title}",
                [Series(f"{stem}_{model}[:, :, {k}]", part) for k, part in enumerate(PARTS)],
                x,
                "epoch",
                y_label,
                y_scale=scale,
            )
            for model, name in models.items()
        ]

    return [
        *by_part("paths", "active paths", "mean active paths, hard gates"),
        *by_part("ntk", "diagonal of the NTK", "mean diagonal entry"),
        *by_part("accuracy", "test accuracy", "% right", x="", scale="linear"),
    ]


def kernels(models: Mapping[str, str]) -> list[Panel]:
    """hs.fig13; of the first seed."""
    moments = ("initialisation", "middle", "end")
    made = [
        Panel(
            "matrices",
            f"{name}: {title}",
            [Series(f"{kernel}_{model}[0, {j}]", when) for j, when in enumerate(moments)],
            x_label="class",
            y_label="class",
            note="Classes 1 to 5 are simple, 6 to 10 complex. First seed, scaled to trace 100.",
        )
        for model, name in models.items()
        for kernel, title in (("overlap", "overlap kernel"), ("ntk", "NTK"))
    ]
    beside = [
        Panel(
            "matrices",
            f"Figure {figure}, ReLU, classes 2 to 10{less}",
            [Series(f"printed_{figure}", "printed"), Series(f"ours_{figure}", "ours, mean over seeds")],
            x_label="class",
            y_label="class",
        )
        for figure, less in (("16a", ", less 10"), ("16b", ""))
    ]
    return [*made, *beside]


def early(circle_stages: Sequence[int], stages: Sequence[int]) -> list[Panel]:
    """hs.early."""

    def curves(stem: str, title: str, chosen: Sequence[int], y_label: str, scale: str) -> Panel:
        series = [Series(f"{stem}_curve[:, {j}]", f"gates of epoch {e}") for j, e in enumerate(chosen)]
        return Panel("lines", title, series, x_label="epoch", y_label=y_label, y_scale=scale, ordered=True)

    taken = "epoch at which the gates were taken"
    circle = [
        Series("circle_loss", "the network itself, then"),
        Series("circle_retrained", "values drawn anew"),
        Series("circle_hard", "overlap kernel, hard gates"),
        Series("circle_soft", "overlap kernel, soft gates"),
    ]
    images = [Series("images_retrained", "values drawn anew"), Series("images_hard", "overlap kernel, hard gates")]
    return [
        Panel(
            "lines",
            "Circle: what gates are worth",
            circle,
            "circle_stages",
            taken,
            "mean squared error",
            "log",
            "log",
            marks=[(0.25, "half of the initial loss")],
        ),
        Panel("lines", "Fashion-MNIST: what gates are worth", images, "stages", taken, "test accuracy, %", "log"),
        curves("circle", "Circle: values behind frozen gates", circle_stages, "training loss", "log"),
        curves("images", "Fashion-MNIST: values behind frozen gates", stages, "test accuracy, %", "linear"),
    ]


def controls(models: Sequence[str]) -> list[Panel]:
    """hs.controls."""
    what = "active paths at the end, simple / complex"
    made = [
        Panel(
            "strips",
            f"{name}: circle",
            [Series(f"ratio_{target}[{m}, :, -1]", text) for target, text in TARGETS.items()],
            x_label=what,
            x_scale="log",
            marks=[(1.0, "as many on either part")],
            note="Targets are those of the top | bottom half. Of the last one, the half with the offset / the other.",
        )
        for m, name in enumerate(models)
    ]
    images = [
        Series(f"images_{model}_{first}[:, {j}]", f"{name}, {which} complex, {when}")
        for model, name in (("relu", "ReLU"), ("dlgn_pwc", "DLGN-PWC"))
        for first, which in ((5, "5 to 9"), (0, "0 to 4"))
        for j, when in ((0, "init"), (1, "end"))
    ]
    return [
        *made,
        Panel(
            "strips",
            "Fashion-MNIST",
            images,
            x_label="active paths, simple / complex",
            x_scale="log",
            marks=[(1.0, "as many on either part")],
        ),
    ]


def remedies() -> list[Panel]:
    """hs.remedies."""

    def errors(key: str, title: str, part: int, x: str, y_label: str, scale: str) -> Panel:
        series = [Series(f"{key}_errors_{remedy}[:, :, {part}]", name) for remedy, name in REMEDIES.items()]
        return Panel("lines", f"{title}, {PARTS[part]} part", series, x, "epoch", y_label, y_scale=scale)

    made = [
        errors(key, title, part, x, y_label, scale)
        for key, title, x, y_label, scale in (
            ("circle", "Circle", "circle_epochs", "error, % of the variance", "log"),
            ("images", "Fashion-MNIST", "", "test error, %", "linear"),
        )
        for part in (1, 0)
    ]
    ratios = [
        Panel(
            "strips",
            f"{title}: allocation",
            [Series(f"{key}_ratio_{remedy}", name) for remedy, name in REMEDIES.items()],
            x_label="active paths at the end, simple / complex",
            x_scale="log",
            marks=[(1.0, "as many on either part")],
        )
        for key, title in (("circle", "Circle"), ("images", "Fashion-MNIST"))
    ]
    return [*made, *ratios]
