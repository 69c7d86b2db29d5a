"""What pages draw of quadratic gates and of the cost of gates: one function per experiment.

The experiments are in `half_space_quadratic`. May import panels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["cost", "quadratic"]


def quadratic(kinds: Mapping[str, str], sets: Mapping[str, str]) -> list[Panel]:
    """hs.quadratic."""
    loss = [Series(f"loss_{kind}", label) for kind, label in kinds.items()]
    paths = [Series(f"paths_{kind}", label) for kind, label in kinds.items()]
    final = [
        Panel(
            "strips",
            f"{title}, after the last epoch",
            [
                Series(f"{what}_{name}_{kind}", f"{label}{more}")
                for kind, label in kinds.items()
                for what, more in (("last", ""), ("hard", ", hard at test"))
            ],
            x_label="test accuracy, %",
        )
        for name, title in sets.items()
    ]
    curves = [
        Panel(
            "lines",
            f"{title} over training",
            [Series(f"history_{name}_{kind}", label) for kind, label in kinds.items()],
            x_label="epoch",
            y_label="test accuracy, %",
        )
        for name, title in sets.items()
    ]
    return [
        Panel("lines", "Circle: training loss", loss, x_label="epoch", y_label="mean squared error", y_scale="log"),
        Panel(
            "lines",
            "Circle: active paths on the slow half",
            paths,
            "circle_epochs",
            "epoch",
            "top / bottom, mean diagonal",
            "log",
            "log",
            marks=[(1.0, "as many on either half")],
        ),
        *final,
        *curves,
    ]


def cost(architectures: Sequence[str], costs: Sequence[str]) -> list[Panel]:
    """hs.cost."""
    return [
        Panel(
            "strips",
            name[:1].upper() + name[1:],
            [Series(f"ratio[{i}, {c}]", what) for c, what in enumerate(costs)],
            x_label="DLGN / ReLU",
            marks=[(2.0, "twice")],
        )
        for i, name in enumerate(architectures)
    ]
