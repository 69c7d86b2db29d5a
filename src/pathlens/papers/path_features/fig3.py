"""Figure 3: values trained behind the gates of each stage, ν while a network learns, and norms of kernels."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathlens.errors import OptionError
from pathlens.papers import image_runs
from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series
from pathlens.papers.path_features.image_training import (
    GATES,
    NETWORKS,
    SCORE,
    SETTINGS,
    SIZES,
    entry_accuracies,
    kept_epochs,
    load_data,
    mean_and_sd,
    quick_deviations,
    stage_accuracies,
    state_at,
    train_entry,
    training_flops,
)

CNTK = 77.43
PARTS = {"value": "K^V", "feature": "K^F"}
NORMS = ("trace", "Frobenius norm")

STAGES = Deviation(
    paper="weights of a GCONV network at epochs 10, …, 60; how long the values behind its gates train is not stated",
    ours="Table 2's GCONV network (Adam) at those epochs; values trained for 60 epochs",
    why="its rate is constant, so that it passes through the same weights; 60 epochs are those of the network itself",
)
BINARY = Deviation(
    paper="w = 100, d = 5, squared loss",
    authors_code="depth 6, no bias, weights ±√(2/w), RMSprop 1e-4, batches of 64, 50 epochs",
    ours="d = 5 with the code's settings; 100 training images of each class",
    why="the printed depth; the rest is not printed",
)
LOGITS = Deviation(
    paper="10 images per class",
    authors_code="20 per class, and the gradient of the sum of the softmax outputs",
    ours="both numbers of images; the sum over outputs of the kernels of the logits",
    why="softmax outputs sum to one: the gradient of their sum is zero except for rounding",
)
_MONOTONE = Claim(
    "the later the stage that the gates come from, the better the network behind them",
    at_least=0.9,
    null=0.0,
    null_text="the stage does not matter",
    paper="'increases monotonically'",
    unit="rank correlation of stage and test accuracy (best epoch)",
)
_EARLY = Claim(
    "gates of the first stage are better than random ones",
    above=0.0,
    null=0.0,
    null_text="no better",
    paper="72 against 67.08 %",
    unit="points (first stage − random gates, best epoch)",
)
_BELOW = Claim(
    "gates of the first stage are worse than the CNTK",
    below=CNTK,
    null=79.68,
    null_text="as good as the last stage",
    paper="72 against 77.43 %",
    unit="% (CIFAR-10, best epoch)",
)
_ABOVE = Claim(
    "gates of the last stage are better than the CNTK",
    above=CNTK,
    null=72.0,
    null_text="as good as the first stage",
    paper="79.68 against 77.43 %",
    unit="% (CIFAR-10, best epoch)",
)
_FALLS = Claim(
    "ν_t falls while a network learns 4 against 7",
    below=0.9,
    null=1.0,
    null_text="ν stays",
    paper="Figure 3, middle",
    unit="× (ν after the last epoch / ν at the start)",
)
_SCALE = Claim(
    "K^V and K^F are of the same scale",
    at_most=10.0,
    null=100.0,
    null_text="one is negligible",
    paper="'in the same scale'",
    unit="× (larger / smaller of the two, worst epoch kept)",
)


def _nu(run: Run) -> tuple[list[int], np.ndarray]:
    """Epochs, and ν of the path kernel on the watched images, (seeds, epochs), while 4 against 7 is learned."""
    import torch

    from pathlens.data import binary_mnist
    from pathlens.kernels import npk, nu
    from pathlens.models import Init, relu
    from pathlens.training import train

    size = run.sizes
    data = binary_mnist(flatten=True)
    if size["binary_rows"] is not None:
        data = data.subsample(size["binary_rows"])
    half = size["watched"] // 2
    watched = torch.cat([(data.y[:, 0] == label).nonzero()[:half, 0] for label in (-1, 1)])
    X, y = data.x[watched].double(), data.y[watched, 0]
    epochs = [epoch for epoch in size["nu_epochs"] if epoch <= size["binary_epochs"]]
    init = Init("bernoulli", math.sqrt(2 / size["binary_hidden"][0]))
    options = image_runs.options(run, "4 against 7", "npk", "binary", str(size["binary_epochs"]), keep=epochs)
    runs: Any = train(
        relu(data.x.shape[1], size["binary_hidden"], 1, init=init),
        data,
        epochs=size["binary_epochs"],
        optimizer="rmsprop",
        lr=size["binary_rate"],
        batch_size=size["binary_batch_size"],
        **options | {"loss": "mse"},
    )
    found = np.empty((len(run.seeds), len(epochs)))
    net = copy.deepcopy(runs.networks[0]).cpu().double()
    for i, j in np.ndindex(found.shape):
        net.load_state_dict(state_at(runs, i, epochs[j]))
        found[i, j] = nu(npk(net, X), y).normalised
    return epochs, found


def _norms(run: Run) -> tuple[list[int], np.ndarray]:
    """Epochs, and trace and Frobenius norm of K^V and K^F: (images per class, part, norm, seeds, epochs)."""
    from pathlens.kernels import frobenius_norm, ntk

    row, model, sizes = "fc-adam", "dnpfl", run.sizes["per_class"]
    runs, epochs = train_entry(run, row, model), kept_epochs(run, row, model)
    found = np.empty((len(sizes), len(PARTS), len(NORMS), len(run.seeds), len(epochs)))
    net: Any = copy.deepcopy(runs.networks[0]).cpu()
    for a, per_class in enumerate(sizes):
        X = load_data(run, row).subsample(per_class=per_class).x
        for i, j in np.ndindex(found.shape[-2:]):
            net.load_state_dict(state_at(runs, i, epochs[j]))
            for b, part in enumerate(PARTS):
                K = ntk(net, X, part=part)
                found[a, b, :, i, j] = float(K.trace()), frobenius_norm(K)
    return epochs, found


def _rank_correlation(stages: Sequence[int], accuracy: np.ndarray) -> float:
    """Spearman's, or NaN where there is nothing to rank."""
    from scipy.stats import spearmanr

    if len(stages) < 2 or np.ptp(accuracy) == 0:
        return math.nan
    return float(spearmanr(stages, accuracy).statistic)


def _flops(size: dict[str, Any]) -> float:
    row, epochs = "gconv-adam", size["epochs"]
    return (
        training_flops(size, row, "relu", epochs[row])
        + (1 + len(size["stages"])) * training_flops(size, row, "flnpf", size["value_epochs"])
        + training_flops(size, "fc-adam", "dnpfl", epochs["fc-adam"])
    )


@experiment(
    "npk.fig3",
    title="Gates of every stage of training",
    what="Figure 3: FLNPF with the gates of six stages against CNTK's 77.43 %; ν_t; norms of K^V and K^F",
    claims=[_MONOTONE, _EARLY, _BELOW, _ABOVE, _FALLS, _SCALE],
    deviations=[STAGES, SCORE, BINARY, LOGITS, NETWORKS, SETTINGS],
    sizes={
        **SIZES,
        "stages": ([2, 5, 10, 20], [10, 20, 30, 40, 50, 60]),
        "value_epochs": (8, 60),
        "kernel_epochs": ([1, 3, 10], [1, 2, 5, 10, 20, 50, 100]),
        "per_class": [10, 20],
        "binary_hidden": [100] * 4,
        "binary_rows": (2000, None),
        "binary_epochs": (20, 50),
        "binary_rate": (1e-3, 1e-4),
        "binary_batch_size": 64,
        "watched": 200,
        "nu_epochs": ([0, 1, 2, 5, 10, 20], [0, 1, 2, 5, 10, 20, 30, 40, 50]),
    },
    data=("mnist", "cifar10"),
    minutes=(1.5, 110),
    flops=_flops,
    shares="path features",
)
def fig3(run: Run) -> Artifact:
    """Figure 3; the ReLU and DNPFL networks are those of Table 2."""
    size, stages = run.sizes, kept_epochs(run, "gconv-adam", "relu")
    if len(stages) < 2:
        raise OptionError(
            f"npk.fig3: none of the stages {size['stages']} is within the epochs of GCONV. Set stages "
            "too, as in --set 'stages=[1, 2]'."
        )
    trained = entry_accuracies(run, "gconv-adam", "relu")
    assert trained is not None
    relu = trained["accuracy"]
    accuracy = np.stack([stage_accuracies(run, epoch) for epoch in stages])  # (stages, seeds, epochs), random first
    nu_epochs, nu = _nu(run)
    kernel_epochs, norms = _norms(run)
    best = accuracy.max(2)
    # the CNTK's number is for all of CIFAR-10
    on_cifar = size["image_data"] == "cifar10" and size["image_rows"] is None
    absolute = best if on_cifar else np.full_like(best, np.nan)
    ratio = norms[0, 0] / norms[0, 1]  # (norm, seeds, epochs), with the paper's number of images
    apart = np.maximum(ratio, 1 / ratio).max(-1)
    scores = {f"gates of epoch {epoch}" if epoch else "random gates": accuracy[k] for k, epoch in enumerate(stages)}
    return run.artifact(
        claims=[
            _MONOTONE.measure([_rank_correlation(stages[1:], of_seed[1:]) for of_seed in best.T]),
            _EARLY.measure(best[1] - best[0]),
            _BELOW.measure(absolute[1]),
            _ABOVE.measure(absolute[-1]),
            _FALLS.measure(nu[:, -1] / nu[:, 0]),
            *(_SCALE.measure(apart[k], row=name) for k, name in enumerate(NORMS)),
        ],
        metrics={
            "test accuracy in %": {
                name: {"last epoch": mean_and_sd(a[:, -1]), "best epoch": mean_and_sd(a.max(1))}
                for name, a in {**scores, "ReLU": relu}.items()
            },
            "ν": {f"epoch {epoch}": mean_and_sd(nu[:, k]) for k, epoch in enumerate(nu_epochs)},
            "K^V and K^F after the last epoch kept": {
                f"{count} images per class": {
                    f"{norm} of {part}": mean_and_sd(norms[a, b, c, :, -1])
                    for b, part in enumerate(PARTS.values())
                    for c, norm in enumerate(NORMS)
                }
                for a, count in enumerate(size["per_class"])
            },
        },
        paper_numbers={
            "FRNPF": "67.08 %",
            "FLNPF-1": "72 %",
            "FLNPF-6": "79.68 %",
            "ReLU": "80.43 %",
            "CNTK": f"{CNTK} %",
        },
        deviations=quick_deviations(run),
        gates=GATES,
        arrays=float32(
            {
                "stages": stages,
                "best": best,
                "last": accuracy[:, :, -1],
                "relu": relu.max(1),
                "nu": nu,
                "nu_epochs": nu_epochs,
                "norms": norms,
                "kernel_epochs": kernel_epochs,
            }
        ),
        config={"stages": stages[1:], "nu_epochs": nu_epochs, "kernel_epochs": kernel_epochs[1:]},
        panels=_panels(float(np.median(relu.max(1))), on_cifar, size["per_class"][0]),
    )


def _panels(relu: float, on_cifar: bool, per_class: int) -> list[Panel]:
    """``relu`` is the median accuracy of the ReLU networks."""
    return [
        Panel(
            "lines",
            "Values behind the gates of each stage",
            [Series("best.T", "best epoch"), Series("last.T", "last epoch", style="dashed")],
            "stages",
            "epoch at which the gates were taken (0: random)",
            "test accuracy, %",
            marks=[(relu, "ReLU"), (CNTK, "CNTK")] if on_cifar else [(relu, "ReLU")],
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
        *(
            Panel(
                "lines",
                f"{norm} of K^V and K^F, {per_class} images per class",
                [Series(f"norms[0, 0, {c}]", "K^V (values)"), Series(f"norms[0, 1, {c}]", "K^F (gates)")],
                "kernel_epochs",
                "epoch",
                norm,
                y_scale="log",
            )
            for c, norm in enumerate(("Trace", "Frobenius norm"))
        ),
    ]
