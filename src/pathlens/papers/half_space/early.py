"""When gates become useful: what can be learned behind the gates of each epoch, on the circle and Fashion-MNIST."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.half_space import fashion_training as fashion
from pathlens.papers.half_space.parts import BETA, measure_at, network_at
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.kernels import GateInformation
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

NEW_VALUES = 1000  # added to the seeds of new values, which are not those that the gates were trained with
RIDGE = 1e-4  # of kernel regression, in units of the mean diagonal

STAGES = Deviation(
    paper="features are learned 'in the early stages of SGD training while the loss is still high'; no experiment "
    "freezes gates later than at initialisation",
    authors_code="not public",
    ours="gates of several epochs are frozen (soft, as they were trained), and new random values are trained behind "
    "them; and the overlap kernel of the same gates, hard and soft, in ridge regression",
    why="gates are as good as what can be learned behind them. 'While the loss is still high' is, on the circle, "
    "the last of these epochs whose loss is at least half of the initial one, .25; on Fashion-MNIST, where the loss "
    "may halve within the first epoch, it is epoch 1",
)
_EARLY = Claim(
    "gates taken while the loss is still high have most of what gates will ever gain",
    at_least=0.5,
    null=0.0,
    null_text="no better than random gates",
    paper="'learn … features in the early stages … while the loss is still high'",
    unit="share of the gain from random to final gates",
)
_LATER_CIRCLE = Claim(
    "behind the final gates, values alone reach the loss of the network that learned them",
    at_most=2.0,
    null=10.0,
    null_text="gates and values had to be learned together",
    paper="'combine these features linearly'",
    unit="× (loss, values retrained / trained with the gates)",
)
_LATER_IMAGES = replace(
    _LATER_CIRCLE,
    text="behind the final gates, values alone are as accurate as the network that learned them",
    unit="points of test accuracy lost",
)


def early_stage(loss: np.ndarray) -> np.ndarray:
    """Per seed the last stage before the loss (seeds, stages) falls under half of its initial value."""
    return (loss >= loss[:, :1] / 2).cumprod(axis=1).sum(1) - 1


def share_gained(score: np.ndarray, stage: np.ndarray | int) -> np.ndarray:
    """Per seed, the share of the gain from the first to the last stage that the gates of a stage have.

    Parameters
    ----------
    score : (seeds, stages)
        What was reached behind the gates of each stage; larger is better.
    stage : (seeds,) or int
        The share is NaN at the first and the last stage, where it is 0 or 1 by definition, and where nothing was
        gained.
    """
    stage = np.broadcast_to(stage, len(score))
    gain = score[:, -1] - score[:, 0]
    known = (gain > 0) & (stage > 0) & (stage < score.shape[1] - 1)
    return (score[np.arange(len(score)), stage] - score[:, 0]) / np.where(known, gain, np.nan)


def retrain_values(
    run: Run,
    runs: Runs,
    stages: Sequence[int],
    make: Callable[..., GatedNetwork],
    data: DataSet,
    options: dict[str, Any],
) -> Runs:
    """Train new values behind the fixed gates of each stage: all stages of the first seed, then of the next.

    ``make(gates=…, seed=…)`` returns a network with the gates of another one and values drawn from a seed.
    """
    from pathlens.training import train

    pairs = zip(runs, run.seeds)
    nets = [make(gates=network_at(t, e), seed=NEW_VALUES + seed) for t, seed in pairs for e in stages]
    found: Any = train(nets, data, **{**options, "seeds": None})
    return found


def regress(net: GatedNetwork, data: DataSet, rows: int, device: str, *, soft: bool) -> GateInformation:
    """Regression with the overlap kernel of a network's gates, in float64: on the circle it is nearly singular."""
    from pathlens.kernels import gate_information

    assert data.x_test is not None and data.y_test is not None
    train = data.x[:rows].to(device).double(), data.y[:rows]
    test = data.x_test[:rows].to(device).double(), data.y_test[:rows]
    exact = copy.deepcopy(net).to(device).double()
    return gate_information(exact, train, test, kernel="overlap", soft=soft, ridge=RIDGE)


def _circle_stages(run: Run) -> dict[str, np.ndarray]:
    """Per seed and stage: loss of the network, loss behind its frozen gates, errors of regression."""
    from pathlens.data import circle as circle_data

    points, epochs, stages = (run.sizes[key] for key in ("points", "circle_epochs", "circle_stages"))
    data = circle_data(points, test_points=points)
    runs = circle.train_target(run, "dlgn_pwc", data, epochs, stages)
    options = circle.circle_options(run, "values, circle", "stages", str(points), f"{epochs}epochs", epochs=epochs)
    retrained = retrain_values(run, runs, stages, partial(circle.circle_network, "dlgn_pwc"), data, options)
    curve = retrained.history().reshape(len(run.seeds), len(stages), -1)

    def error(net: GatedNetwork, soft: bool) -> float:
        return regress(net, data, points, "cpu", soft=soft).mse

    return {
        "circle_loss": runs.history()[:, stages],
        "circle_retrained": curve[..., -1],
        "circle_curve": curve,
        "circle_hard": measure_at(run, runs, stages, partial(error, soft=False), "overlap kernels, circle, hard"),
        "circle_soft": measure_at(run, runs, stages, partial(error, soft=True), "overlap kernels, circle, soft"),
    }


def _image_stages(run: Run) -> dict[str, np.ndarray]:
    """The same on modified Fashion-MNIST, with test accuracies in % in place of losses."""
    stages, rows, data = run.sizes["stages"], run.sizes["kernel_rows"], fashion.load_data(run)
    runs = fashion.train_fashion(run, "dlgn_pwc")
    options = fashion.train_options(run, data, "values, Fashion-MNIST", "stages")
    retrained = retrain_values(run, runs, stages, partial(fashion.network, run, "dlgn_pwc", data), data, options)
    curve = 100 * retrained.history("test_accuracy").reshape(len(run.seeds), len(stages), -1)

    def accuracy(net: GatedNetwork) -> float | None:
        return regress(net, data, rows, run.device, soft=False).accuracy

    return {
        "images_loss": runs.history()[:, stages],
        "images_accuracy": 100 * runs.history("test_accuracy"),
        "images_retrained": curve[..., -1],
        "images_hard": 100 * measure_at(run, runs, stages, accuracy, "overlap kernels, Fashion-MNIST"),
        "images_curve": curve,
    }


@experiment(
    "hs.early",
    title="Features are learned early",
    what="gates frozen at several epochs, values drawn anew: circle and modified Fashion-MNIST; and kernel regression",
    claims=[_EARLY, _LATER_CIRCLE, _LATER_IMAGES],
    deviations=[STAGES, circle.CIRCLE, circle.SETTINGS, fashion.CLUSTERS, fashion.TRAINING],
    sizes={
        **fashion.SIZES,
        "epochs": (10, 100),
        "stages": ([0, 1, 3, 10], [0, 1, 3, 10, 50, 100]),
        "kernel_rows": (1000, 5000),
        "points": 1024,
        "circle_epochs": (200, 1000),
        "circle_stages": ([0, 1, 3, 10, 50, 200], [0, 1, 3, 10, 50, 1000]),
    },
    data=("fashion_mnist",),
    minutes=(2, 10),
    # behind frozen gates, gates cost a forward pass alone
    flops=lambda sizes: fashion.training_flops(sizes, 2 + 4 / 3 * len(sizes["stages"])),
)
def early(run: Run) -> Artifact:
    """How good the gates of each epoch are."""
    stages, circle_stages = run.sizes["stages"], run.sizes["circle_stages"]
    arrays = _circle_stages(run) | _image_stages(run)
    stage = early_stage(arrays["circle_loss"])
    rows = {
        "circle, values retrained": share_gained(-arrays["circle_retrained"], stage),
        "circle, overlap kernel, hard": share_gained(-arrays["circle_hard"], stage),
        "circle, overlap kernel, soft": share_gained(-arrays["circle_soft"], stage),
        f"Fashion-MNIST, epoch {stages[1]}, values retrained": share_gained(arrays["images_retrained"], 1),
        f"Fashion-MNIST, epoch {stages[1]}, overlap kernel, hard": share_gained(arrays["images_hard"], 1),
    }
    claims = [_EARLY.measure(share, row=row) for row, share in rows.items()]
    claims += [
        _LATER_CIRCLE.measure(arrays["circle_retrained"][:, -1] / arrays["circle_loss"][:, -1]),
        _LATER_IMAGES.measure(arrays["images_accuracy"][:, -1] - arrays["images_retrained"][:, -1]),
    ]
    metrics = {
        key: {"mean": values.mean(0).tolist(), "sd": values.std(0, ddof=1).tolist()}
        for key, values in arrays.items()
        if values.ndim == 2 and key != "images_accuracy"
    }
    return run.artifact(
        claims=claims,
        metrics=metrics,
        paper_numbers={"loss on the circle when the features are there": "≥ .25"},
        gates={
            "networks": f"soft β={BETA:g}",
            "overlap kernel, hard": "hard",
            "overlap kernel, soft": f"soft β={BETA:g}",
        },
        arrays=float32({**arrays, "circle_stages": circle_stages, "stages": stages}),
        panels=_panels(circle_stages, stages),
    )


def _panels(circle_stages: Sequence[int], stages: Sequence[int]) -> list[Panel]:
    def curves(key: str, title: str, chosen: Sequence[int], y_label: str, scale: str) -> Panel:
        series = [Series(f"{key}_curve[:, {j}]", f"gates of epoch {e}") for j, e in enumerate(chosen)]
        title = f"{title}: values behind frozen gates"
        return Panel("lines", title, series, x_label="epoch", y_label=y_label, y_scale=scale, ordered=True)

    retrained, kernel = "new values, trained", "overlap kernel, hard gates"
    taken = "epoch at which the gates were taken"
    return [
        Panel(
            "lines",
            "Circle: how good the gates are",
            [
                Series("circle_loss", "the network at that epoch"),
                Series("circle_retrained", retrained),
                Series("circle_hard", kernel),
                Series("circle_soft", "overlap kernel, soft gates"),
            ],
            "circle_stages",
            taken,
            "mean squared error",
            "log",
            "log",
            marks=[(0.25, "half of the initial loss")],
        ),
        Panel(
            "lines",
            "Fashion-MNIST: how good the gates are",
            [Series("images_retrained", retrained), Series("images_hard", kernel)],
            "stages",
            taken,
            "test accuracy, %",
            "log",
        ),
        curves("circle", "Circle", circle_stages, "training loss", "log"),
        curves("images", "Fashion-MNIST", stages, "test accuracy, %", "linear"),
    ]
