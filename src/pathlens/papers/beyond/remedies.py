"""Remedies for the 'innate weakness' of gradient descent, which allocates more paths to the simple part (section 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.half_space import fashion_training as fashion
from pathlens.papers.half_space.parts import BETA, MORE_PATHS, PARTS, measure_at, part_means, path_ratios, ratio_panel
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

REMEDIES = {
    "plain": "plain",
    "gates": "gates weighed by loss",
    "paths": "balanced paths",
    "everything": "all weighed by loss",
}
PLAIN = "plain"  # the key of training without any remedy
EPOCHS = (0, 1, 3, 5, 10, 20, 30, 50, 70, 100, 150, 200)  # at which errors on the circle are measured

BEYOND = Deviation(
    paper="'an innate weakness of gradient descent that allocates more resources for an easier job'; work-arounds are "
    "'future work'",
    ours="three: gradients of the gates weighted by each example's own loss; a penalty on the variance of log path "
    "counts over a few training inputs; and, to compare, all gradients weighted by the loss",
    why="none of them uses which part is complex, so that they can be applied to other data; each starts from the same "
    "weights and sees the same batches as plain training",
)
_WEAKNESS = replace(MORE_PATHS, text="plain training allocates more paths to the simple part")
_BALANCES = Claim(
    "the remedy moves paths to the complex part",
    below=0.8,
    null=1.0,
    null_text="no change",
    paper="–",
    unit="× (active paths, simple / complex; with the remedy / without)",
)
_HELPS = Claim(
    "the remedy lowers the error on the complex part by a tenth or more, after as many epochs",
    at_most=0.9,
    null=1.0,
    null_text="no change",
    paper="–",
    unit="× (error on the complex part, with the remedy / without)",
)
_HARMLESS = Claim(
    "the remedy costs the simple part less than one point of error",
    at_most=1.0,
    null=5.0,
    null_text="the simple part pays",
    paper="–",
    unit="points (% of the variance on the circle, % wrong on images)",
)


def train_with(run: Run, remedy: str, nets: list[GatedNetwork], data: DataSet, options: dict[str, Any]) -> Runs:
    """Train networks in one of the ways; ``options`` are those of `train` for plain training."""
    from pathlens.papers.beyond._allocation import BalancedPaths, GatesApart, Reweighted
    from pathlens.training import train

    more: dict[str, Any] = {"seeds": None, "seed": run.seeds[0]}
    if remedy in ("gates", "everything"):
        more["loss"] = Reweighted(data.c, labels=data.task == "classification")
    elif remedy == "paths":
        probe = run.sizes["probe"]
        inputs = data.x[:: max(len(data) // probe, 1)][:probe].to(run.device)
        more["penalty"] = BalancedPaths(inputs, run.sizes["strength"])
    members: list[Any] = [GatesApart(net) for net in nets] if remedy == "gates" else list(nets)
    runs: Any = train(members, data, **{**options, **more})
    return runs


def _circle(run: Run, remedy: str, epochs: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Errors on each half in % of the target's variance there, ½, (seeds, epochs, 2); and path ratios at the end."""
    import torch

    from pathlens.data import circle as circle_data

    data = circle_data(run.sizes["points"])
    x, y, simple = data.x.to(run.device), data.y.to(run.device), data.marks["top"].numpy()
    nets = [circle.circle_network("dlgn_pwc", seed=seed) for seed in run.seeds]
    words = ("remedies", str(len(data)), remedy, f"{epochs[-1]}epochs")
    options = circle.circle_options(run, f"circle, {REMEDIES[remedy]}", *words, epochs=epochs[-1], keep=epochs)
    runs = train_with(run, remedy, nets, data, options)

    def errors(net: Any) -> list[float]:
        with torch.no_grad():
            return part_means(200 * (net(x) - y).square()[:, 0].cpu().numpy(), simple)

    return measure_at(run, runs, epochs, errors, "errors"), path_ratios(run, runs, epochs[-1:], x, simple)[:, 0]


def _images(run: Run, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """Test errors in % on each part of modified Fashion-MNIST, (seeds, epochs + 1, 2); and path ratios at the end."""
    data, last = fashion.load_data(run), run.sizes["epochs"]
    nets = [fashion.network(run, "dlgn_pwc", data, seed=seed) for seed in run.seeds]
    options = fashion.train_options(run, data, f"Fashion-MNIST, {REMEDIES[remedy]}", "remedies", remedy, keep=[last])
    runs = train_with(run, remedy, nets, data, options)
    ratio = path_ratios(run, runs, [last], *fashion.measured_rows(run, data))
    return 100 - fashion.part_accuracies(runs, data), ratio[:, 0]


@experiment(
    "hs.remedies",
    title="Sharing paths out more evenly",
    what="the 'innate weakness' of section 5: allocation of paths, and three remedies; circle and Fashion-MNIST",
    claims=[_WEAKNESS, _BALANCES, _HELPS, _HARMLESS],
    deviations=[BEYOND, circle.CIRCLE, circle.SETTINGS, fashion.CLUSTERS, fashion.TRAINING],
    sizes={
        **fashion.SIZES,
        "epochs": (8, 32),
        "measured": (1000, 10000),
        "points": 1024,
        "circle_epochs": (150, 200),
        "probe": (64, 256),
        "strength": 0.1,
    },
    data=("fashion_mnist",),
    minutes=(2, 12),
    flops=lambda sizes: fashion.training_flops(sizes, 9),  # one of the four ways runs the values twice
)
def remedies(run: Run) -> Artifact:
    """Plain training and three remedies, from equal starts."""
    last = run.sizes["circle_epochs"]
    epochs = sorted({e for e in EPOCHS if e < last} | {last})
    arrays: dict[str, Any] = {"circle_epochs": epochs}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for key, name in (("circle", "circle"), ("images", "Fashion-MNIST")):
        metrics[name] = {}
        for remedy, label in REMEDIES.items():
            errors, ratio = _circle(run, remedy, epochs) if key == "circle" else _images(run, remedy)
            arrays |= {f"{key}_errors_{remedy}": errors, f"{key}_ratio_{remedy}": ratio}
            end = errors[:, -1]
            metrics[name][label] = {
                "error in % at the end, mean": dict(zip(PARTS, end.mean(0).tolist())),
                "sd": dict(zip(PARTS, end.std(0, ddof=1).tolist())),
                "paths, simple / complex": ratio.tolist(),
            }
            if remedy == PLAIN:
                plain_end, plain_ratio = end, ratio
                claims.append(_WEAKNESS.measure(ratio, row=name))
                continue
            row = f"{name}, {label}"
            claims += [
                _BALANCES.measure(ratio / plain_ratio, row=row),
                _HELPS.measure(end[:, 1] / plain_end[:, 1], row=row),
                _HARMLESS.measure(end[:, 0] - plain_end[:, 0], row=row),
            ]
    return run.artifact(
        claims=claims,
        metrics=metrics,
        gates={"active paths": "hard", "errors": f"soft β={BETA:g}"},
        arrays=float32(arrays),
        panels=[
            *(
                Panel(
                    "lines",
                    f"{title}, {PARTS[part]} part",
                    [Series(f"{key}_errors_{remedy}[:, :, {part}]", label) for remedy, label in REMEDIES.items()],
                    x,
                    "epoch",
                    y_label,
                    y_scale=scale,
                )
                for key, title, x, y_label, scale in (
                    ("circle", "Circle", "circle_epochs", "error, % of the variance", "log"),
                    ("images", "Fashion-MNIST", "", "test error, %", "linear"),
                )
                for part in (1, 0)
            ),
            *(
                ratio_panel(
                    f"{title}: allocation",
                    [Series(f"{key}_ratio_{remedy}", label) for remedy, label in REMEDIES.items()],
                    x_label="active paths at the end, simple / complex",
                )
                for key, title in (("circle", "Circle"), ("images", "Fashion-MNIST"))
            ),
        ],
    )
