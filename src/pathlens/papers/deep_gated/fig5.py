"""Figure 5: GaLU with frozen gates against ReLU on MNIST, also with random labels and with random pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.image_runs import images, options, spread
from pathlens.papers.panels import Panel, Series

TASKS = {"mnist": "MNIST", "mnist_random_labels": "random labels", "mnist_random_pixels": "random pixels"}
NAMES = ("GaLU", "ReLU")
MNIST = Deviation(
    paper="'to close to 100 % accuracy'; optimiser, rate, batch, epochs and initialisation are not stated",
    authors_code="Adam, 1e-4, 100 epochs for fully connected networks on MNIST in the later paper",
    ours="Adam, 1e-4, 100 epochs, batches of 64, no biases, variance 2/fan-in (quick: 1e-3, fewer rows, narrower)",
    why="the same authors' settings",
)
_FASTER = Claim(
    "GaLU trains a bit faster than ReLU",
    below=0.95,
    null=1.0,
    null_text="both alike",
    paper="'a bit faster', Figure 5",
    unit="× (training loss, mean over epochs, GaLU / ReLU)",
)
_BETTER = Claim(
    "ReLU generalises better than GaLU",
    above=1.0,
    null=0.0,
    null_text="both alike",
    paper="98.5 against 96.5 %",
    unit="points of test accuracy, last epoch",
)


@experiment(
    "dgn.fig5",
    title="GaLU trains faster, ReLU generalises better",
    what="MNIST, with random labels, with random pixels: training of ReLU and of GaLU with frozen gates; test accuracy",
    claims=[_FASTER, _BETTER],
    deviations=[MNIST],
    sizes={
        "tasks": list(TASKS),
        "hidden": ([128, 128, 64, 64, 32, 16], [512, 512, 256, 256, 128, 64]),
        "rows": (1000, None),
        "rows_test": (2000, None),
        "epochs": (30, 100),
        "lr": (1e-3, 1e-4),
        "batch_size": (50, 64),
    },
    data=("mnist",),
    minutes=(1, 15),
    # three passes for ReLU, four for GaLU, whose gates only need a forward pass
    flops=lambda size: (
        14
        * sum(a * b for a, b in pairwise((784, *size["hidden"], 10)))
        * len(size["tasks"])
        * (size["rows"] or 60_000)
        * size["epochs"]
        * size["seeds"]
    ),
)
def fig5(run: Run) -> Artifact:
    """Seven layers of 512, 512, 256, 256, 128, 64 and 10 units."""
    from pathlens import models
    from pathlens.training import train

    size = run.sizes
    tasks = size["tasks"]
    measured: dict[str, list[Any]] = {"loss": [], "train": [], "test": []}
    for task in tasks:
        data = images(task, size["rows"], size["rows_test"], flatten=True)
        for name, build in zip(NAMES, (models.galu, models.relu)):
            label = f"{name}, {TASKS[task]}"
            given = options(run, label, "fig5", task, name.lower(), evaluate="full", every=10)
            runs: Any = train(
                build(data.d, tuple(size["hidden"]), 10, init="he"),
                data,
                epochs=size["epochs"],
                lr=size["lr"],
                batch_size=size["batch_size"],
                **given,
            )
            measured["loss"].append(runs.history())
            measured["train"].append(100 * runs.history("accuracy"))
            measured["test"].append(100 * runs.history("test_accuracy"))
    # (tasks, networks, seeds, epochs + 1)
    arrays = {key: np.reshape(values, (len(tasks), 2, len(run.seeds), -1)) for key, values in measured.items()}
    loss, fitted, test = arrays.values()
    mean = loss[..., 1:].mean(-1)
    claims = [_FASTER.measure(mean[k, 0] / mean[k, 1], row=TASKS[task]) for k, task in enumerate(tasks)]
    last = test[tasks.index("mnist"), :, :, -1] if "mnist" in tasks else np.empty((2, 0))
    metrics = {
        f"{name}, {TASKS[task]}": {
            "train, last epoch": spread(fitted[k, i, :, -1]),
            "test, last epoch": spread(test[k, i, :, -1]),
            "test, best epoch": spread(test[k, i, :, 1:].max(1)),
        }
        for k, task in enumerate(tasks)
        for i, name in enumerate(NAMES)
    }
    return run.artifact(
        claims=[*claims, _BETTER.measure(last[1] - last[0])],
        metrics=metrics,
        paper_numbers={"test accuracy": {"GaLU": "about 96.5 %", "ReLU": "about 98.5 %"}},
        gates={"GaLU": "hard", "ReLU": "hard"},
        arrays=float32(arrays),
        panels=_panels(tasks),
    )


def _panels(tasks: list[str]) -> list[Panel]:
    def both(array: str, k: int) -> list[Series]:
        return [Series(f"{array}[{k}, {i}]", name) for i, name in enumerate(NAMES)]

    panels = [
        Panel(
            "lines",
            f"Training loss, {TASKS[task]}",
            both("loss", k),
            x_label="epoch",
            y_label="cross-entropy",
            y_scale="log",
        )
        for k, task in enumerate(tasks)
    ]
    if "mnist" in tasks:
        panels.append(
            Panel(
                "lines",
                "Test accuracy, MNIST",
                both("test", tasks.index("mnist")),
                x_label="epoch",
                y_label="test accuracy, %",
                marks=[(98.5, ""), (96.5, "paper: GaLU 96.5, ReLU 98.5")],
            )
        )
    return panels
