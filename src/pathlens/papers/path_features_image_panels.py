"""What pages draw of the neural path features experiments on image sets.

Each function takes what the labels need and refers to arrays by the names under which its experiment stores them. May
import panels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["stages", "table"]


def table(
    found: Mapping[str, Sequence[str]], rows: Mapping[str, str], models: Mapping[str, str], compared: bool
) -> list[Panel]:
    """npk.tab2; ``found`` names the models that each row has, ``compared`` says that the data are the paper's."""

    def array(row: str, model: str) -> str:
        return f"{row.replace('-', '_')}_{model}"

    panels = []
    for row, entries in found.items():
        if entries:
            series = [Series(f"{array(row, m)}[:, -1]", models[m]) for m in entries]
            panels.append(Panel("strips", f"{rows[row]}: last epoch", series, x_label="test accuracy, %"))
    there = {m for entries in found.values() for m in entries}
    series = [Series(f"ours_{m}", name, x=f"paper_{m}") for m, name in models.items() if m in there]
    if compared and series:
        panels.append(
            Panel(
                "points",
                "All rows, ours against the paper's",
                series,
                diagonal=True,
                x_label="the paper's (best epoch), %",
                y_label="ours (last epoch), %",
            )
        )
    curves = [row for row in ("gconv-adam", "fc-adam", *found) if found.get(row)]
    if curves:
        row = curves[0]
        series = [Series(array(row, m), models[m], x=f"{array(row, m)}_epochs") for m in found[row]]
        panels.append(Panel("lines", f"{rows[row]}: every epoch", series, x_label="epoch", y_label="test accuracy, %"))
    return panels


def stages(relu: float, cntk: float | None, per_class: Sequence[int]) -> list[Panel]:
    """npk.fig3; ``relu`` is the median accuracy of the ReLU networks, ``cntk`` None where it is for other data."""
    marks = [(relu, "ReLU"), *([(cntk, "CNTK")] if cntk is not None else [])]
    norms = [
        Panel(
            "lines",
            f"{norm} of K^V and K^F, {per_class[0]} images per class",
            [Series(f"norms[0, 0, {c}]", "K^V (values)"), Series(f"norms[0, 1, {c}]", "K^F (gates)")],
            "kernel_epochs",
            "epoch",
            norm,
            y_scale="log",
        )
        for c, norm in enumerate(("Trace", "Frobenius norm"))
    ]
    return [
        Panel(
            "lines",
            "Values behind the gates of each stage",
            [Series("best.T", "best epoch"), Series("last.T", "last epoch", style="dashed")],
            "stages",
            "epoch at which the gates were taken (0: random)",
            "test accuracy, %",
            marks=marks,
        ),
        Panel(
            "lines",
            "ν while 4 against 7 is learned",
            [Series("nu")],
            "nu_epochs",
            "epoch",
            "ν of H / tr H",
            y_scale="log",
        ),
        *norms,
    ]
