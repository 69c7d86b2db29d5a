"""The circle, the networks trained on it, and their tangent kernels, which the experiments on the circle share.

One training of all seeds serves every figure. Torch is imported inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import OptionError
from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.half_space import parts
from pathlens.papers.half_space.parts import BETA
from pathlens.papers.half_space.parts import NAMES as LEARNED
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.recording import Record, Trajectory
    from pathlens.training import Runs

NAMES = {**LEARNED, "frozen": "DLGN-PWC, gates frozen"}
COLOURS = {"relu": "relu", "dlgn_pwc": "dlgn", "frozen": "frozen"}
ANGLES = tuple((k * math.pi / 2, word) for k, word in enumerate(("0", "π/2", "π", "3π/2", "2π")))
FROZEN_BETA = 10.0
BETAS = {"beta": BETA, "frozen_beta": FROZEN_BETA}
SOFT = {"relu": "hard", "dlgn_pwc": f"soft β={BETA:g}", "frozen": f"soft β={FROZEN_BETA:g}"}
SIZES: dict[str, Any] = {
    "points": 1024,
    "hidden": [16] * 5,
    "batch_size": 32,
    "lr": 5e-4,
    # the paper shows the frozen network up to epoch 8000
    "epochs": (dict.fromkeys(NAMES, 400), {"relu": 1000, "dlgn_pwc": 1000, "frozen": 8000}),
}
HIDDEN, RATE, BATCH = tuple(SIZES["hidden"]), SIZES["lr"], SIZES["batch_size"]
TANGENT_GATES = {"tangent kernel of ReLU": "hard", "tangent kernel of DLGN-PWC": SOFT["dlgn_pwc"]}
KEPT_EPOCHS = (0, 1, 3, 10, 30, 50, 100, 200)  # and the last one
KERNEL_EPOCHS = (0, 3, 200)  # of the paper's pictures

CIRCLE = Deviation(
    paper="the target varies slowly on one half of the circle and fast on the other; no formula is printed",
    authors_code="not public",
    ours="y = sin θ on the top half, sin 12θ on the bottom, 1024 evenly spaced points",
    why="unit sinusoids of equal weight have the paper's initial loss .5, and .25 once the slow half is learned",
)
SETTINGS = Deviation(
    paper="optimiser, rate, batch size, gate slope and number of seeds are not stated",
    authors_code="other public DLGN code trains soft gates σ(βη) with β = 4, Adam, default initialisation, no bias",
    ours=f"Adam {RATE:g}, batches of {BATCH}, default initialisation, no bias, soft gates β = {BETA:g} "
    f"(frozen: β = {FROZEN_BETA:g})",
    why="hard gates have no gradient; these settings give the paper's curves",
)
FROZEN = Deviation(
    paper="one curve for the DLGN with a fixed random gating model",
    authors_code="not public",
    ours=f"soft gates with β = {FROZEN_BETA:g}, frozen at initialisation",
    why="the loss with frozen hard PWC gates stops falling early for lack of capacity, and with frozen soft gates of "
    "β = 4 it never reaches .01",
)


@dataclass
class Circle:
    """The data and the trained networks, model → runs."""

    data: DataSet
    runs: dict[str, Runs]

    @property
    def theta(self) -> np.ndarray:
        """Angle of every point."""
        return self.data.marks["theta"].numpy()

    @property
    def top(self) -> np.ndarray:
        """Whether a point lies on the top half, where the target is slow."""
        return self.data.marks["top"].numpy()

    @property
    def y(self) -> np.ndarray:
        return self.data.y[:, 0].numpy()

    @property
    def kept_epochs(self) -> list[int]:
        """The epochs at which both networks with learned gates were kept."""
        return sorted(set.intersection(*({int(k.epoch or 0) for k in self.runs[m][0].moments} for m in LEARNED)))

    def record(self, model: str, member: int, epoch: int) -> Record:
        """Gates and outputs on all points at an epoch."""
        found = self.runs[model][member].at_epoch(epoch).record
        assert found is not None  # records are made wherever weights are kept
        return found

    def shown(self, model: str) -> int:
        """The member that pictures show: the one with the median loss at the end."""
        final = self.runs[model].history()[:, -1]
        return int(np.argsort(final)[(len(final) - 1) // 2])


def circle_options(run: Run, label: str, *checkpoint: str, **more: Any) -> dict[str, Any]:
    """Options of `train` on the circle; `more` are further ones, or replace those of the figures."""
    return {
        "lr": RATE,
        "batch_size": BATCH,
        "device": run.device,
        "checkpoints": checkpoints_in(run.checkpoint("circle", *checkpoint), every=50),
        "progress": partial(run.progress, label),
        **more,
    }


def train_on_circle(run: Run, net: Any, data: DataSet, label: str, *checkpoint: str, **more: Any) -> Runs:
    """Train all seeds of a network at once; `more` are further options of `train`."""
    from pathlens.training import train

    runs: Any = train(net, data, seeds=run.seeds, **circle_options(run, label, *checkpoint, **more))
    return runs


def circle_network(model: str, *, gates: GatedNetwork | None = None, seed: int | None = None) -> GatedNetwork:
    """A network of the figures' sizes; `gates` are those of another DLGN, and stay fixed."""
    return parts.network(model, 2, HIDDEN, gates=gates, seed=seed)


def train_target(run: Run, model: str, data: DataSet, epochs: int, keep: list[int]) -> Runs:
    """Train a network of the figures' sizes on any circle, and keep the weights at the epochs of `keep`."""
    words = (f"{epochs}epochs", data.name.replace(" ", "_"), str(len(data)), model, *map(str, keep))

    def compute() -> Runs:
        label = f"{data.name}, {LEARNED[model]}"
        return train_on_circle(run, circle_network(model), data, label, *words, epochs=epochs, keep=keep)

    return run.once(("circle", *words), compute)


def train_circle(run: Run) -> Circle:
    """Train the three models, all seeds of one model at once."""

    def compute() -> Circle:
        from pathlens.data import circle
        from pathlens.training import Keep

        size = run.sizes
        data, hidden = circle(size["points"]), size["hidden"]
        networks = {
            "relu": parts.network("relu", 2, hidden),
            "dlgn_pwc": parts.network("dlgn_pwc", 2, hidden),
            "frozen": parts.network("dlgn_pwc", 2, hidden, beta=FROZEN_BETA, frozen=True),
        }
        runs = {}
        for m, net in networks.items():
            epochs = size["epochs"][m]
            kept = [e for e in KEPT_EPOCHS if e < epochs] + [epochs]
            keep = Keep(kept, X=data.x, sensitivities=False)
            options = {"epochs": epochs, "lr": size["lr"], "batch_size": size["batch_size"], "keep": keep}
            runs[m] = train_on_circle(run, net, data, NAMES[m], m, **options)
        return Circle(data, runs)

    return run.once("circle", compute)


def check_epochs(run: Run, models: Iterable[str] = LEARNED) -> None:
    """Raise an error, before any training, if one would end before the last epoch that a figure shows."""
    last = KERNEL_EPOCHS[-1]
    short = [NAMES[m] for m in models if run.sizes["epochs"][m] < last]
    if short:
        raise OptionError(
            f"The figure looks at epoch {last}, and the training of {', '.join(short)} would end before it. "
            f"Set epochs to {last} or more."
        )


def circle_operations(size: dict[str, Any]) -> float:
    """Floating-point operations of the three trainings: gates that learn are a second network, frozen ones one pass."""
    forward = 2 * sum(a * b for a, b in pairwise((2, *size["hidden"], 1)))
    epochs = size["epochs"]
    passes = 3 * epochs["relu"] + 6 * epochs["dlgn_pwc"] + 4 * epochs["frozen"]
    return float(forward * passes * size["points"] * size["seeds"])


# the decorator of every experiment that is based on the training of the circle
circle_experiment = partial(experiment, sizes=SIZES, minutes=(1, 12), flops=circle_operations, shares="circle")


def network_at(trajectory: Trajectory, epoch: int) -> Any:
    """The network with the weights that it had at a kept epoch, in float64 on the CPU."""
    return parts.network_at(trajectory, epoch).double()


def kernel_step(run: Run) -> int:
    """The distance between the points of the circle that kernels are computed on."""
    points, chosen = run.sizes["points"], run.sizes["kernel_points"]
    if points % chosen:
        raise OptionError(f"kernel_points must divide points, got {chosen} and {points}. Set both.")
    return int(points // chosen)


def tangent_kernels(run: Run) -> dict[str, np.ndarray]:
    """Empirical tangent kernels on evenly spaced points at all kept epochs: model → (seeds, epochs, n, n), float64."""

    def compute() -> dict[str, np.ndarray]:
        from pathlens.kernels import ntk

        c = train_circle(run)
        x = c.data.x[:: kernel_step(run)].double()
        found = {}
        for i, m in enumerate(LEARNED):
            found[m] = np.array([[ntk(network_at(t, e), x).dense() for e in c.kept_epochs] for t in c.runs[m]])
            run.progress("tangent kernels", i + 1, len(LEARNED))
        return found

    return run.once("tangent kernels of the circle", compute)


def diagonal_ratio(K: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Mean diagonal of kernels on the top half over that on the bottom half: (…, n, n) → (…)."""
    diagonal = K.diagonal(axis1=-2, axis2=-1)
    return diagonal[..., top].mean(-1) / diagonal[..., ~top].mean(-1)


def model_series(stem: str, models: Iterable[str] = LEARNED) -> list[Series]:
    """One series for the array ``stem_model`` of each model."""
    return [Series(f"{stem}_{m}", NAMES[m]) for m in models]


def epoch_panel(title: str, series: list[Series], y_label: str = "", x: str = "epochs", **options: Any) -> Panel:
    """Lines over a logarithmic axis of epochs; `options` are further arguments of Panel."""
    return Panel("lines", title, series, x, "epoch", y_label, "log", **options)


def epoch_label(epoch: float) -> str:
    return "at initialisation" if epoch == 0 else f"epoch {epoch:g}"
