"""Residual networks that Table 2 and the best DLGN share: shapes, the training recipe, scores and panels.

Each network, model and seed is a training of its own. Torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.image_runs import accuracies, accuracy, hard_accuracies, images, shrunk, spread, train_each
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS = {"resnet34": "ResNet-34", "resnet110": "ResNet-110", "tiny": "two blocks"}
# blocks and widths of each stage, shortcut: those of `models.resnet34`, `models.resnet110`, and a toy
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "resnet34": ((3, 4, 6, 3), (64, 128, 256, 512), "projection"),
    "resnet110": ((18, 18, 18), (16, 32, 64), "pad"),
    "tiny": ((1, 1), (8, 16), "projection"),
}
BETA = 4.0
# what all trainings share; options of `train`
RATES: dict[str, Any] = {
    "optimizer": "sgd",
    "settings": [{"momentum": 0.9}],
    "weight_decay": 5e-4,
    "scheduler": "one_cycle",
    "augment": "crop_flip",
}
LABELS = {
    "train": "train",
    "last": "test, last epoch",
    "best": "test, best epoch (chosen on the test set)",
    "hard": "test, hard gates",
}

RECIPE = Deviation(
    paper="neither optimiser, epochs, batch size nor augmentation are stated",
    authors_code="not public",
    ours="SGD with momentum .9, weight decay 5e-4, one cycle, random crops and flips",
    why="the usual recipe for these networks; the paper's 100 % on the training set suggests that it took longer, "
    "without augmentation",
)


def load_data(run: Run, name: str) -> DataSet:
    """CIFAR-10 or CIFAR-100, or a part of it with smaller images."""
    size = run.sizes
    return run.once(
        ("residual", name, size["rows"], size["rows_test"], size["side"]),
        lambda: shrunk(images(name, size["rows"], size["rows_test"]), size["side"]),
    )


def train_network(run: Run, net: Any, data: DataSet, label: str, *words: str, **more: Any) -> Runs:
    """Train all seeds by the common recipe, with the current experiment's epochs, rate and batch size."""
    size = run.sizes
    return train_each(
        run,
        net,
        data,
        label,
        *words,
        epochs=size["epochs"],
        lr=size["lr"],
        batch_size=size["batch_size"],
        **RATES,
        **more,
    )


def scores(runs: Runs, data: DataSet, device: str, gated: bool) -> dict[str, np.ndarray]:
    """Accuracies per seed; those with hard gates where there are gates to switch, else the same again."""
    found = {
        **accuracies(runs),
        "train": accuracy(runs.networks, data.x, data.y, device),
        "history": 100 * runs.history("test_accuracy"),
    }
    return {**found, "hard": hard_accuracies(runs, data, device) if gated else found["last"]}


def metrics(row: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {LABELS[key]: spread(row[key]) for key in LABELS}


def arrays(rows: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{what}_{key}": values.astype(np.float32) for key, row in rows.items() for what, values in row.items()}


def residual_flops(blocks: Sequence[int], widths: Sequence[int], side: int) -> float:
    """Operations of one forward pass of one image through a ResNet with 3 × 3 convolutions."""
    total, width = 9.0 * 3 * widths[0] * side**2, widths[0]
    for s, (count, w) in enumerate(zip(blocks, widths)):
        pixels = (side >> s) ** 2
        total += pixels * 9 * (width * w + (2 * count - 1) * w * w)
        width = w
    return 2 * total


def accuracy_panels(labels: Mapping[str, str], soft: Collection[str]) -> list[Panel]:
    """Test accuracies at the end and over the epochs: one row per network, two for those trained with soft gates."""
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
