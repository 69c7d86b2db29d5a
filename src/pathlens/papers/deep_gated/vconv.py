"""Convolutional networks on CIFAR-10 (Experiments 6 and 7): one training per network and seed, and its accuracies.

Torch is imported inside functions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.papers import image_runs
from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run, checkpoints_in

# the paper states neither epochs nor batch size: 80 epochs are those of the authors' code for this network
VCONV = {
    "channels": ([16, 16, 16, 16], [64, 64, 128, 128]),
    "dense": ([32, 32], [256, 256]),
    "side": (8, 32),
    "rows": (5000, None),
    "rows_test": (1000, None),
    "epochs": (4, 80),
    "lr": (3e-3, 3e-4),
    "batch_size": (50, 128),
}

LENGTH = Deviation(
    paper="Adam, 3e-4; epochs and batch size are not stated",
    authors_code="80 epochs for this network in the later paper by the same authors",
    ours="Adam, 3e-4, 80 epochs, batches of 128 (quick: few small images, a larger rate)",
    why="the paper is silent; batches of 128 keep a GPU busy",
)
START = Deviation(
    paper="initialisation and biases of the convolutional networks are not stated",
    authors_code="Keras's defaults: biases on, Glorot's initialisation",
    ours="PyTorch's defaults for the table; gates alone: variance 1/(fan-in·E[g²])",
    why="both defaults start with small pre-activations, where a soft-ReLU of small β is nearly linear; Experiment 6 "
    "cannot make up for values that are too small",
)
SELECTION = Deviation(
    paper="'mean of the best performance obtained in each run'",
    authors_code="largest test accuracy over epochs",
    ours="best epoch, as the paper, and last epoch, both reported",
    why="the best epoch is chosen on the test data",
)


@dataclass(frozen=True)
class Row:
    """One network: its name in the table, its kind and further options for `gated_twin`."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


DLN = Row("deep linear network", "dln", {"init": "default"})


def fit(run: Run, row: Row) -> dict[str, np.ndarray]:
    """Train one network from every seed. When a training is finished, only its accuracies stay on disk.

    Returns
    -------
    dict
        Accuracies in %: ``test`` (seeds, epochs + 1); ``train`` and ``hard`` (seeds,), both after the last epoch, the
        second on the test images with hard gates in place of soft ones (NaN if the gates are hard).
    """
    from pathlens.training.checkpoints import forget_checkpoints

    setting = {name: run.sizes[name] for name in VCONV} | dataclasses.asdict(row)

    def compute() -> dict[str, np.ndarray]:
        found = []
        for seed in run.seeds:
            folder = image_runs.own_folder(run, "cifar10", row.kind, f"seed{seed}", **setting)
            file = None if folder is None else folder / "accuracies.json"
            found.append(image_runs.remembered(file, partial(_train, run, row, seed, folder)))
            if folder is not None:
                forget_checkpoints(folder)  # hundreds of megabytes
        return {name: np.array([one[name] for one in found]) for name in found[0]}

    return run.once(("cifar10", json.dumps(setting)), compute)


def _train(run: Run, row: Row, seed: int, folder: Path | None) -> dict[str, Any]:
    from pathlens.models import gated_twin, vconv
    from pathlens.training import train

    size, data = run.sizes, _load_data(run)
    template = vconv(10, channels=(3, *size["channels"]), dense=size["dense"], size=size["side"], bias=True)
    net = gated_twin(template, row.kind, example=data.x[:2], **row.options)
    given = image_runs.options(run, f"{row.name}, seed {seed}")
    # compiling a step costs more than it gains on the CPU, where convolutions outweigh dispatch
    execution = dataclasses.replace(given["execution"], compile=run.device.startswith("cuda"))
    given |= {"seeds": [seed], "checkpoints": checkpoints_in(folder, every=10), "execution": execution}
    runs: Any = train(net, data, epochs=size["epochs"], lr=size["lr"], batch_size=size["batch_size"], **given)
    soft = net.gate.label.startswith("soft")
    return {
        "test": (100 * runs.history("test_accuracy")[0]).tolist(),
        "train": float(image_runs.accuracy(runs.networks, data.x[:10_000], data.y[:10_000], run.device)[0]),
        "hard": float(image_runs.hard_accuracies(runs, data, run.device)[0]) if soft else math.nan,
    }


def _load_data(run: Run) -> Any:
    """CIFAR-10, or a part of it with smaller images."""
    size = run.sizes
    return run.once(
        "cifar10 data",
        lambda: image_runs.shrunk(image_runs.images("cifar10", size["rows"], size["rows_test"]), size["side"]),
    )


def conv_flops(size: Mapping[str, Any], passes: float) -> float:
    """Operations of a number of forward passes per image, epoch and seed; a gradient costs two of them."""
    widths, last = (3, *size["channels"]), size["channels"][-1] * size["side"] ** 2
    convolutions = 9 * size["side"] ** 2 * sum(a * b for a, b in pairwise(widths))
    dense = sum(a * b for a, b in pairwise((last, *size["dense"], 10)))
    return 2 * (convolutions + dense) * passes * (size["rows"] or 50_000) * size["epochs"] * size["seeds"]


def best(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Test accuracy of the best epoch, per seed."""
    return found["test"][:, 1:].max(1)


def metrics(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Accuracies of one network, for the artifact."""
    values = {"test, best epoch": best(found), "test, last epoch": found["test"][:, -1], "train": found["train"]}
    if not np.isnan(found["hard"]).any():
        values["test, last epoch, hard gates"] = found["hard"]
    return {name: image_runs.spread(one) for name, one in values.items()}
