"""What pages draw of the half-space experiments on modified Fashion-MNIST and on the allocation of paths.

Each function takes what the labels need and refers to arrays by the names under which its experiment stores them. May
import panels only.
"""

from __future__ import annotations

from collections.abc import Mapping

from pathlens.panels import Panel, Series

__all__ = ["allocation", "kernels"]

PARTS = ("simple", "complex")


def allocation(models: Mapping[str, str]) -> list[Panel]:
    """hs.fig7."""

    def by_part(stem: str, title: str, y_label: str, x: str = "epochs", scale: str = "log") -> list[Panel]:
        return [
            Panel("lines", f"{name}: {title}", [Series(f"{stem}_{model}[:, :, {k}]", part)
                                                for k, part in enumerate(PARTS)],
                  x, "epoch", y_label, y_scale=scale)
            for model, name in models.items()
        ]  # fmt: skip

    return [
        *by_part("paths", "active paths", "mean active paths, hard gates"),
        *by_part("ntk", "diagonal of the NTK", "mean diagonal entry"),
        *by_part("accuracy", "test accuracy", "% right", x="", scale="linear"),
    ]


def kernels(models: Mapping[str, str]) -> list[Panel]:
    """hs.fig13; of the first seed."""
    moments = ("initialisation", "middle", "end")
    made = [
        Panel("matrices", f"{name}: {title}", [Series(f"{kernel}_{model}[0, {j}]", when)
                                               for j, when in enumerate(moments)],
              x_label="class", y_label="class",
              note="Classes 1 to 5 are simple, 6 to 10 complex. First seed, scaled to trace 100.")
        for model, name in models.items()
        for kernel, title in (("overlap", "overlap kernel"), ("ntk", "NTK"))
    ]  # fmt: skip
    beside = [Panel("matrices", f"Figure {figure}, classes 2 to 10",
                    [Series(f"printed_{figure}", "printed"), Series(f"ours_{figure}", "ours, mean over seeds")],
                    x_label="class", y_label="class") for figure in ("16a", "16b")]  # fmt: skip
    return [*made, *beside]
