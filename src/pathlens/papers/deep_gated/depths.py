"""Networks of several depths: fixed random gates, gradient descent, and panels with one line per depth.

Figures 1 to 4 and 10 share this module, and so does the grid of depths and widths of the paper on path features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.panels import Panel, Series

MU = 0.5  # probability that a fixed random gate is open
DEPTHS = [
    2,
    4,
    6,
    8,
    12,
    16,
    20,
]  # layers of weights, as the paper counts: a network of depth d has d − 1 hidden layers
MEMORISE = {
    "n": 200,
    "trained_depths": ([2, 4, 8, 12, 20], DEPTHS),
    "trained_widths": ([25, 100], [25, 100, 500]),
    "epochs": (60, 200),
}

STEP = Deviation(
    paper="α = 0.1/ρ_max, and ρ_i are the eigenvalues of E[K₀]/d; loss Σ(ŷ − y)²",
    authors_code="not public",
    ours="α = 0.1/ρ_max(K₀) of the network itself, loss ½Σ(ŷ − y)²",
    why="equation 1, e′ = e − αKe, is gradient descent on ½Σ, and 'after this rescaling the maximum eigenvalue is 1' "
    "holds for K₀ alone",
)
LENGTH = Deviation(
    paper="the number of steps is not stated",
    authors_code="not public",
    ours="60 steps (quick), 200 (paper)",
    why="the error of the best depth has then fallen tenfold or more",
)
VARIANCE = Deviation(
    paper="Var[K₀] ≤ O(max{d²/w, d³/w²}) (Theorem 2.3)",
    ours="the exact variance, which is Θ(d³/w): (2/(3w))(d − 1)(d − 2)(2d − 3) to leading order",
    why="two paths can be spliced at every unit that they share, not only at shared weights",
)
OVERLAP = Deviation(
    paper="the introduction has λ(s, s′)/λ(s, s) ≤ μ^d",
    ours="μ^(d−1)",
    why="d − 1 layers have gates, as in Lemma 2.4",
)


def fixed_random_gates(width: int, depth: int, examples: int) -> Any:
    """The network of Experiment 1: each example has its own random gates, the weights are ±√(1/(μw))."""
    from pathlens.models import Init, frg

    init = Init("bernoulli", math.sqrt(1 / (MU * width)))
    return frg(1, (width,) * (depth - 1), examples=examples, probability=MU, init=init)


@dataclass
class Descent:
    """Gradient descent of networks of several depths, from several seeds."""

    error: np.ndarray  # (depths, seeds, steps + 1), ‖e_t‖/‖e_0‖
    eigenvalues: np.ndarray  # (depths, seeds, n) of K₀, ascending

    @property
    def final(self) -> np.ndarray:
        """Error after the last step, (depths, seeds)."""
        return self.error[:, :, -1]

    @property
    def ecdf(self) -> np.ndarray:
        """Cumulative eigenvalues over the largest one, mean over the seeds, (depths, n)."""
        return np.cumsum(self.eigenvalues / self.eigenvalues[..., -1:], axis=-1).mean(1)

    @property
    def linear(self) -> np.ndarray:
        """Error that equation 1 predicts for a kernel that stays K₀ and targets in no particular direction."""
        rate = 1 - 0.1 * self.eigenvalues / self.eigenvalues[..., -1:]
        steps = np.arange(self.error.shape[-1])
        return np.sqrt(np.mean(rate[..., None] ** (2 * steps), axis=-2))


def descend(run: Run, networks: list[Any], data: Any, steps: int, label: str) -> Descent:
    """Full-batch descent on ½Σ(ŷ − y)² with α = 0.1/ρ_max(K₀), each network with its own ρ_max."""
    from pathlens import kernels
    from pathlens.training import Execution, train

    n = len(data)
    error = np.empty((len(networks), len(run.seeds), steps + 1))
    eigenvalues = np.empty((len(networks), len(run.seeds), n))
    for i, net in enumerate(networks):
        for j, seed in enumerate(run.seeds):
            net.reinitialise(seed)
            eigenvalues[i, j] = kernels.spectrum(kernels.ntk(net, data.x)).numpy()
            # the loss of `train` is a mean over rows; a hundred steps do not repay compiling one
            found: Any = train(
                net,
                data,
                epochs=steps,
                loss="half_mse",
                optimizer="sgd",
                batch_size=None,
                execution=Execution(compile=False),
                lr=n * 0.1 / eigenvalues[i, j, -1],
                device=run.device,
                progress=False,
            )
            loss = np.array(found.history["loss"])
            error[i, j] = np.sqrt(loss / loss[0])
            run.progress(label, i * len(run.seeds) + j + 1, len(networks) * len(run.seeds))
    return Descent(error, eigenvalues)


def memorise(run: Run, width: int) -> Descent:
    """Networks with fixed random gates of one width fit Experiment 1 at every depth; the sizes are `MEMORISE`."""
    from pathlens.data import identical_inputs

    size = run.sizes

    def compute() -> Descent:
        networks = [fixed_random_gates(width, d, size["n"]) for d in size["trained_depths"]]
        return descend(run, networks, identical_inputs(size["n"]), size["epochs"], f"descent, w = {width}")

    return run.once(("memorise", width), compute)


def memorise_flops(size: dict[str, Any]) -> float:
    """Floating-point operations of all descents: forward, and twice that backward."""
    weights = sum((d - 2) * w**2 + 2 * w for d in size["trained_depths"] for w in size["trained_widths"])
    return 6.0 * weights * size["n"] * size["epochs"] * size["seeds"]


def depth_panel(
    title: str,
    values: str,
    depths: Sequence[int],
    y_label: str,
    *,
    x_label: str = "step",
    y_scale: str = "linear",
    predicted: str = "",
) -> Panel:
    """One line per depth, and a dashed one of ``predicted``; ``{}`` in a name of an array is the index of the depth."""
    series = [Series(values.format(j), f"d = {d}") for j, d in enumerate(depths)]
    if predicted:
        series += [Series(predicted.format(j), style="dashed") for j in range(len(depths))]
    return Panel("lines", title, series, x_label=x_label, y_label=y_label, y_scale=y_scale, ordered=True)


def over_depth(title: str, series: Sequence[Series], y_label: str, *, y_scale: str = "linear") -> Panel:
    """Lines against the array ``depths``."""
    return Panel("lines", title, series, "depths", "depth d (layers of weights)", y_label, y_scale=y_scale)


def final_error(series: Sequence[Series]) -> Panel:
    """Error after the last step, over depth."""
    return over_depth("Error after the last step", series, "‖e‖ / ‖e(0)‖")
