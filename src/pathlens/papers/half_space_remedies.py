"""Half-Space Feature Learning, section 5: the 'innate weakness' of gradient descent, and remedies for it (hs.remedies).

The paper names the weakness and leaves remedies to the future; the ones tried here are in half_space_allocation. Torch
is imported inside functions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_fashion_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space_circle import BETA, CIRCLE, SETTINGS
from pathlens.papers.half_space_early import circle_network, circle_options
from pathlens.papers.half_space_fashion import (
    CLUSTERS,
    PAPER,
    TRAINING,
    Setting,
    fashion,
    mean_paths,
    network,
    part_accuracies,
    restored,
    train_options,
    training_flops,
)
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

REMEDIES = panels.REMEDIES
PLAIN = "plain"  # the key of training without any remedy

BEYOND = Deviation(
    paper="'an innate weakness of gradient descent that allocates more resources for an easier job'; work-arounds are "
    "'future work'",
    authors_code="–",
    ours="three: gradients of the gates weighed by each example's own loss; a penalty on the variance of log path "
    "counts over a few training inputs; and, to compare, all gradients weighed by the loss",
    why="none of them is told which part is complex, so that they could be used elsewhere; each starts from the same "
    "weights and sees the same batches as plain training",
)
_WEAKNESS = Claim(
    "plain training allocates more paths to the simple part",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as many on either part",
    paper="section 5",
    unit="× (mean active paths at the end, simple / complex)",
)
_BALANCES = Claim(
    "the remedy moves paths to the complex part",
    threshold=0.8,
    comparison="<",
    null=1.0,
    null_text="no change",
    paper="–",
    unit="× (active paths, simple / complex; with the remedy / without)",
)
_HELPS = Claim(
    "the remedy lowers the error on the complex part by a tenth or more, after as many epochs",
    threshold=0.9,
    comparison="<=",
    null=1.0,
    null_text="no change",
    paper="–",
    unit="× (error on the complex part, with the remedy / without)",
)
_HARMLESS = Claim(
    "the remedy costs the simple part less than one point of error",
    threshold=1.0,
    comparison="<=",
    null=5.0,
    null_text="the simple part pays",
    paper="–",
    unit="points (% of the variance on the circle, % wrong on images)",
)


@dataclass
class Outcome:
    """What one way of training gives: per seed and epoch, errors in % and mean active paths on (simple, complex)."""

    errors: np.ndarray  # (seeds, epochs, 2)
    paths: np.ndarray  # (seeds, 2), at the end


def train_with(
    remedy: str, nets: list[GatedNetwork], data: DataSet, strength: float, probe: int, chosen: dict[str, Any]
) -> Runs:
    """Train copies of networks in one of the ways; ``chosen`` are the options of `train` for plain training."""
    from pathlens.papers.half_space_allocation import BalancedPaths, GatesApart, Reweighted
    from pathlens.training import train

    labels, members = data.task == "classification", [copy.deepcopy(net) for net in nets]
    loss = Reweighted(data.c, labels)
    inputs = data.x[:: max(len(data) // probe, 1)][:probe].to(chosen["device"])
    ways: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "gates": {"loss": loss},
        "everything": {"loss": loss},
        "paths": {"penalty": BalancedPaths(inputs, strength)},
    }
    wrapped: list[Any] = [GatesApart(net) for net in members] if remedy == "gates" else list(members)
    found: Any = train(wrapped, data, **{**chosen, **ways[remedy]})
    return found


def _circle(run: Run, sizes: dict[str, Any], epochs: list[int]) -> dict[str, Outcome]:
    """Mean squared error on each half in % of the target's variance there, ½."""
    import torch

    from pathlens.data import circle

    data = circle(sizes["points"])
    simple = data.marks["top"].numpy()
    nets = [circle_network("dlgn_pwc").reinitialise(seed) for seed in run.seeds]

    def outcome(remedy: str) -> Outcome:
        chosen = circle_options(run, epochs[-1], f"circle, {REMEDIES[remedy]}", "remedies", str(len(data)), remedy)
        chosen |= {"keep": epochs, "seed": run.seeds[0]}
        runs = train_with(remedy, nets, data, sizes["strength"], sizes["probe"], chosen)
        errors, pattern = np.empty((len(nets), len(epochs), 2)), circle_network("dlgn_pwc")
        with torch.no_grad():
            for i in range(len(nets)):
                for j, epoch in enumerate(epochs):
                    wrong = (restored(runs, pattern, i, epoch, "net.")(data.x) - data.y).square()[:, 0].numpy()
                    errors[i, j] = 200 * wrong[simple].mean(), 200 * wrong[~simple].mean()
        paths = [mean_paths(restored(runs, pattern, i, epochs[-1], "net."), data.x, simple) for i in range(len(nets))]
        return Outcome(errors, np.array(paths))

    return {remedy: outcome(remedy) for remedy in REMEDIES}


def _images(run: Run, sizes: dict[str, Any]) -> dict[str, Outcome]:
    """Test error in % on each part of modified Fashion-MNIST."""
    setting = Setting.of(sizes)
    data = fashion(run, setting)
    assert data.x_test is not None
    nets = [network("dlgn_pwc", setting, data.d).reinitialise(seed) for seed in run.seeds]
    x, simple = data.x_test[: sizes["measured"]], data.marks_test["simple"][: sizes["measured"]].numpy()

    def outcome(remedy: str) -> Outcome:
        chosen = train_options(run, setting, data, f"Fashion-MNIST, {REMEDIES[remedy]}", "remedies", remedy)
        del chosen["seeds"]  # networks that start alike are given instead
        chosen |= {"keep": [setting.epochs], "seed": run.seeds[0]}
        runs = train_with(remedy, nets, data, sizes["strength"], sizes["probe"], chosen)
        pattern = network("dlgn_pwc", setting, data.d)
        paths = [mean_paths(restored(runs, pattern, i, setting.epochs, "net."), x, simple) for i in range(len(nets))]
        return Outcome(100 - part_accuracies(runs, data), np.array(paths))

    return {remedy: outcome(remedy) for remedy in REMEDIES}


@experiment(
    "hs.remedies",
    title="Sharing paths out more evenly",
    what="the 'innate weakness' of section 5: allocation of paths, and three remedies; circle and Fashion-MNIST",
    claims=[_WEAKNESS, _BALANCES, _HELPS, _HARMLESS],
    data=("fashion_mnist",),
    minutes=(2, 12),
    flops=lambda sizes: training_flops(sizes, 9),  # one of the four ways runs the values twice
)
def remedies(run: Run) -> Artifact:
    """Plain training and three remedies, from equal starts."""
    sizes = run.sizes_of("hs.remedies")
    last = sizes["circle_epochs"]
    epochs = sorted({e for e in (0, 1, 3, 5, 10, 20, 30, 50, 70, 100, 150, 200, last) if e <= last})
    found = {"circle": _circle(run, sizes, epochs), "images": _images(run, sizes)}
    claims, arrays, metrics = [], {"circle_epochs": np.array(epochs)}, {}
    for key, name in (("circle", "circle"), ("images", "Fashion-MNIST")):
        plain = found[key][PLAIN]
        with np.errstate(divide="ignore", invalid="ignore"):  # a remedy may leave no path active at all
            ratio = {remedy: o.paths[:, 0] / o.paths[:, 1] for remedy, o in found[key].items()}
        claims.append(_WEAKNESS.measure(ratio[PLAIN], row=name))
        for remedy, o in found[key].items():
            arrays |= {f"{key}_errors_{remedy}": o.errors, f"{key}_ratio_{remedy}": ratio[remedy]}
            if remedy == PLAIN:
                continue
            row = f"{name}, {REMEDIES[remedy]}"
            claims += [
                _BALANCES.measure(ratio[remedy] / ratio[PLAIN], row=row),
                _HELPS.measure(o.errors[:, -1, 1] / plain.errors[:, -1, 1], row=row),
                _HARMLESS.measure(o.errors[:, -1, 0] - plain.errors[:, -1, 0], row=row),
            ]
        metrics[name] = {
            REMEDIES[remedy]: {
                "error in % at the end, mean": dict(zip(panels.PARTS, o.errors[:, -1].mean(0).tolist())),
                "sd": dict(zip(panels.PARTS, o.errors[:, -1].std(0, ddof=1).tolist())),
                "paths, simple / complex": ratio[remedy].tolist(),
            }
            for remedy, o in found[key].items()
        }
    return Artifact(
        "hs.remedies",
        "Sharing paths out more evenly",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["hs.remedies"]["paper"],
        {},
        (BEYOND, CIRCLE, SETTINGS, CLUSTERS, TRAINING),
        {"active paths": "hard", "errors": f"soft β={BETA:g}"},
        {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()},
        figures=panels.remedies(),
    )
