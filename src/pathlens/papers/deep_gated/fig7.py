"""Figure 7: training and test loss of adaptable, frozen and learned gates on binary MNIST."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated import binary_mnist
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.image_runs import spread
from pathlens.papers.panels import Panel, Series

SCORE = Deviation(
    paper="'generalisation' of Figure 7 is not defined",
    ours="squared loss on the test set, and the share of right signs; both after the last epoch",
    why="squared loss is what is trained",
)
_LOWER = Claim(
    "adaptable and learned gates generalise better",
    below=0.9,
    null=1.0,
    null_text="both alike",
    paper="Figure 7",
    unit="× (squared test loss after the last epoch, adaptable or learned / frozen)",
)
_FEWER = Claim(
    "and put fewer test images on the wrong side",
    above=0.0,
    null=0.0,
    null_text="as many",
    paper="Figure 7",
    unit="points of test accuracy after the last epoch",
)


def _accuracy(net: Any, data: Any) -> float:
    """Share of test rows, in %, whose output has the sign of the target."""
    import torch

    with torch.no_grad():
        return 100 * float((net.cpu()(data.x_test) * data.y_test > 0).double().mean())


@experiment(
    "dgn.fig7",
    title="Gates that adapt, gates that were learned",
    what="binary MNIST, Experiments 3, 4, 5: adaptable against frozen gates, learned against random ones",
    claims=[_LOWER, _FEWER],
    deviations=[binary_mnist.DEPTH, binary_mnist.COPY, SCORE],
    sizes=binary_mnist.SIZES,
    data=("mnist",),
    minutes=(1, 8),
    flops=binary_mnist.training_flops,
    shares="binary-mnist",
)
def fig7(run: Run) -> Artifact:
    """Losses and test accuracy of six networks."""
    trained = binary_mnist.train_all(run)
    loss = {name: runs.history() for name, runs in trained.runs.items()}
    test = {name: runs.history("test_loss") for name, runs in trained.runs.items()}
    right = {
        name: np.array([_accuracy(net, trained.data) for net in runs.networks]) for name, runs in trained.runs.items()
    }
    metrics = {
        name: {
            "test accuracy, last epoch, %": spread(right[name]),
            "test loss, last epoch": spread(test[name][:, -1]),
            "test loss, best epoch": spread(test[name][:, 1:].min(1)),
            "training loss, last epoch": spread(loss[name][:, -1]),
        }
        for name in loss
    }
    measured = {"loss": loss, "test": test, "right": right}
    series = {key: [Series(f"{key}[{i}]", name) for i, name in enumerate(loss)] for key in measured}
    return run.artifact(
        claims=[
            *(_LOWER.measure(test[a][:, -1] / test[b][:, -1], row=f"{a} / {b}") for a, b in binary_mnist.PAIRS),
            *(_FEWER.measure(right[a] - right[b], row=f"{a} / {b}") for a, b in binary_mnist.PAIRS),
        ],
        metrics=metrics,
        gates=binary_mnist.GATES,
        arrays=float32({key: list(values.values()) for key, values in measured.items()}),
        panels=[
            Panel("lines", "Training loss", series["loss"], x_label="epoch", y_label="squared loss", y_scale="log"),
            Panel("lines", "Test loss", series["test"], x_label="epoch", y_label="squared loss", y_scale="log"),
            Panel("strips", "After the last epoch", series["right"], x_label="test accuracy, %"),
        ],
    )
