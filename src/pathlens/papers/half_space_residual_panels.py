"""What pages draw of the residual networks on half-spaces: test accuracies at the end and over the epochs.

The experiments are in `half_space_residual`. May import panels only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pathlens.papers.panels import Panel, Series

__all__ = ["accuracies"]


def accuracies(labels: Mapping[str, str], soft: Collection[str]) -> list[Panel]:
    """hs.tab2 and hs.best: one row per network, two for those trained with soft gates."""
    if not labels:
        return []
    rows = []
    for key, label in labels.items():
        rows.append(Series(f"last_{key}", label))
        if key in soft:
            rows.append(Series(f"hard_{key}", f"{label}, hard gates at test"))
    curves = [Series(f"history_{key}", label) for key, label in labels.items()]
    return [
        Panel("strips", "After the last epoch", rows, x_label="test accuracy, %"),
        Panel(
            "lines",
            "While training",
            curves,
            x_label="epoch",
            y_label="test accuracy, %",
            note="With the gates that each network is trained with.",
        ),
        Panel(
            "points",
            "Training and test set",
            [Series(f"last_{key}", label, x=f"train_{key}") for key, label in labels.items()],
            x_label="training accuracy, %",
            y_label="test accuracy, %",
            diagonal=True,
        ),
    ]
