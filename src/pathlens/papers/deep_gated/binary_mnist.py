"""Experiments 3, 4 and 5 on binary MNIST: gates that adapt, gates that stay and learned gates.

One set of trainings serves Figures 6, 7 and 8. Torch is imported inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.image_runs import options
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

BETA, EPSILON = 4.0, 0.1
ADAPTABLE = ("soft-GaLU", "soft-ReLU", "ReLU")
FROZEN = "GaLU, random gates"
COPIED = "GaLU, gates of ReLU at the start"
LEARNED = "GaLU, learned gates"
NETWORKS = (*ADAPTABLE, FROZEN, COPIED, LEARNED)
# the first is expected to be better than the second: Experiments 3, 4 and 5
PAIRS = (*((name, FROZEN) for name in ADAPTABLE), ("ReLU", COPIED), (LEARNED, FROZEN))
GATES = {"soft-GaLU and soft-ReLU": f"soft β={BETA:g}, ε={EPSILON:g}", "ReLU and GaLU": "hard"}
# settings of the authors' code where the paper states none; 100 epochs are those of Experiment 5
SIZES = {
    "width": (50, 100),
    "hidden_layers": 5,
    "rows": (1500, None),
    "rows_test": (2000, None),
    "epochs": (30, 100),
    "lr": (3e-4, 1e-4),
    "batch_size": 64,
    "examples": (100, 200),
}

DEPTH = Deviation(
    paper="d = 5 (Figure 6), d = 6 (Experiments 3 to 5), both w = 100",
    authors_code="depth 6, w = 100, no biases, ±√(2/w), RMSprop 1e-4, batches of 64, 50 epochs",
    ours="d = 6 (five hidden layers) everywhere, the code's other settings, 100 epochs (quick: narrower, fewer rows, a "
    "larger rate)",
    why="one set of trainings serves all figures, and Experiment 5 trains for T = 100 epochs",
)
COPY = Deviation(
    paper="Experiment 4: Θᵍ = Θʷ at the start, 'weights chosen according to Assumption 2'",
    ours="±σ weights (Assumption 1), gates from a copy of the first values",
    why="Assumption 2 is independence, which a copy contradicts",
)
MATRIX = Deviation(
    paper="M = (xᵀx)∘λ is shown for ReLU",
    authors_code="20 examples per class",
    ours="also for the other networks, with soft gates unchanged; n′ examples in equal shares, kernels in float64",
    why="K and M of the same networks can then be compared",
)


@dataclass
class Trained:
    """Every network of Experiments 3 to 5, all seeds, with its weights at the kept epochs."""

    data: DataSet
    runs: dict[str, Runs]
    epochs: list[int]

    def networks(self, name: str) -> list[list[Any]]:
        """Copies in float64 on the CPU, per seed and kept epoch."""
        from pathlens.recording import rebuild

        return [
            [rebuild(trajectory.at_epoch(epoch).snapshot, like=net).cpu().double() for epoch in self.epochs]  # type: ignore[arg-type]
            for net, trajectory in zip(self.runs[name].networks, self.runs[name])
        ]


def train_all(run: Run) -> Trained:
    """Train ReLU, soft-ReLU and soft-GaLU, and GaLU with three kinds of gates.

    They are random, those of the first weights of ReLU, and those that ReLU learned.
    """
    return run.once("binary-mnist", lambda: _train_all(run))


def _train_all(run: Run) -> Trained:
    from pathlens import models
    from pathlens.data import binary_mnist
    from pathlens.training import train

    size = run.sizes
    data = binary_mnist(flatten=True)
    if size["rows"] is not None:
        data = data.subsample(size["rows"], n_test=size["rows_test"])
    shape: Any = (data.d, (size["width"],) * size["hidden_layers"])
    init: dict[str, Any] = {"init": models.Init("bernoulli", math.sqrt(2 / size["width"]))}
    soft: dict[str, Any] = {"beta": BETA, "epsilon": EPSILON, **init}
    epochs = [epoch for epoch in (0, 1, 2, 5, 10, 20, 50, 100) if epoch < size["epochs"]] + [size["epochs"]]
    runs: dict[str, Any] = {}

    def fit(name: str, net: Any, **more: Any) -> None:
        words = ("binary-mnist", str(NETWORKS.index(name)))
        given = options(run, name, *words, keep=epochs, evaluate="full", every=10, reduced_precision=False)
        given |= {"loss": "mse", **more}
        runs[name] = train(
            net,
            data,
            epochs=size["epochs"],
            optimizer="rmsprop",
            lr=size["lr"],
            batch_size=size["batch_size"],
            **given,
        )

    fit("soft-GaLU", models.soft_galu(*shape, gate_activation="soft", **soft))
    fit("soft-ReLU", models.soft_relu(*shape, **soft))
    fit("ReLU", models.relu(*shape, **init))
    fit(FROZEN, models.galu(*shape, **init))
    fit(COPIED, models.galu(*shape, dependent=True, **init))
    # other seeds: the values must be independent of the initial values of ReLU
    learned = [
        models.flnpf(*shape, checkpoint=net, seed=1000 + seed, **init)
        for net, seed in zip(runs["ReLU"].networks, run.seeds)
    ]
    fit(LEARNED, learned, seeds=None, seed=run.seeds[0])
    return Trained(data, runs, epochs)


def training_flops(size: Mapping[str, Any]) -> float:
    """Operations of the trainings: 3 forward passes' worth for networks with their own gates, 6 for soft-GaLU, 4 for
    gates that stay."""
    w, passes = size["width"], 2 * 3 + 6 + 3 * 4
    weights = 784 * w + (size["hidden_layers"] - 1) * w * w + w
    return 2.0 * weights * passes * (size["rows"] or 12_107) * size["epochs"] * size["seeds"]


def nu_pair(kernel: Any, y: Any) -> tuple[float, float]:
    """ν of a kernel, raw and trace-normalised; NaN if the kernel is singular in float64."""
    from pathlens.errors import SolverError
    from pathlens.kernels import nu

    try:
        found = nu(kernel, y)
    except SolverError:
        return math.nan, math.nan
    return found.raw, found.normalised


def nu_over_time(
    run: Run, trained: Trained, label: str, kernel: Callable[..., Any], names: Sequence[str] = NETWORKS
) -> dict[str, np.ndarray]:
    """ν of ``kernel(net, x)`` by network, (raw or normalised, seeds, epochs).

    x are the first training rows of both digits in equal shares.
    """
    import torch

    data, count = trained.data, run.sizes["examples"]
    rows = torch.cat([(data.y[:, 0] == sign).nonzero()[: count // 2, 0] for sign in (-1, 1)])
    x, y = data.x[rows].double(), data.y[rows, 0].double()
    found = {}
    for i, name in enumerate(names):
        pairs = [[nu_pair(kernel(net, x), y) for net in nets] for nets in trained.networks(name)]
        found[name] = np.moveaxis(np.array(pairs), -1, 0)
        run.progress(label, i + 1, len(names))
    return found


def fall(nus: np.ndarray) -> np.ndarray:
    """Normalised ν after the last epoch over that at the start, per seed."""
    return nus[1, :, -1] / nus[1, :, 0]


def nu_metrics(trained: Trained, nus: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """ν of every network, for the artifact."""
    values = {name: {"raw": one[0].tolist(), "normalised": one[1].tolist()} for name, one in nus.items()}
    return {**values, "epochs": trained.epochs}


def nu_panel(title: str, kernel: str, normalised: int, series: Sequence[Series] = ()) -> Panel:
    """ν of every network over epochs, or other series."""
    series = series or [Series(f"nu[{i}, {normalised}]", name) for i, name in enumerate(NETWORKS)]
    what = f"yᵀ({kernel}/tr {kernel})⁻¹y" if normalised else f"yᵀ{kernel}⁻¹y"
    return Panel("lines", title, series, "epochs", "epoch", what, "log", "log")
