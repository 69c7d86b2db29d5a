"""Full-batch gradient descent of ReLU networks on one fixed sample, which several experiments share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pathlens.papers.experiment import Run
from pathlens.papers.localisation.settings import INPUTS, UNITS, draw

# options of the decorator that all experiments on this descent use
SHARED: dict[str, Any] = {
    "sizes": {"rows": (2000, 4000), "descent": (800, 3000)},
    "flops": lambda size: 6.0 * INPUTS * UNITS * size["rows"] * size["descent"] * size["seeds"],
    "shares": "localisation descent",
}


@dataclass(frozen=True)
class ReluDescent:
    """Weights of ReLU networks under gradient descent, in float64, to compare with closed forms step by step.

    Attributes
    ----------
    x, y, x_test, y_test : arrays
        The sample and held-out rows; targets (n,).
    weights : array (seeds, marks, K, d)
    step : float
        Length of a step for the loss ½⟨(y − ŷ)²⟩.
    marks : sequence of int
        Steps at which weights are kept.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    weights: np.ndarray
    step: float
    marks: tuple[int, ...]

    @cached_property
    def gates(self) -> np.ndarray:
        """Gates (seeds, marks, n, K) as bits."""
        return np.einsum("nd,smkd->smnk", self.x, self.weights) > 0

    @property
    def times(self) -> np.ndarray:
        """Time of the flow at the marks."""
        return np.array(self.marks) * self.step


def descend_relu(run: Run) -> ReluDescent:
    """The descent with the current experiment's rows and steps, computed once per run."""
    rows, steps = run.sizes["rows"], run.sizes["descent"]

    def compute() -> ReluDescent:
        from pathlens.papers.localisation._networks import OneLayer, fields, train_networks

        data: Any = draw(rows, INPUTS, 1, n_test=rows)
        marks = (0, *np.unique(np.geomspace(1, steps, 12).round().astype(int)).tolist())
        step = 0.3 * UNITS  # 0.15·K on (ŷ − y)², as in the public code
        runs = train_networks(
            run,
            OneLayer().double(),
            data,
            "ReLU descent",
            steps=steps,
            batch_size=None,
            lr=step,
            keep=marks,
            loss="half_mse",
        )
        x, y, x_test, y_test = (t.numpy() for t in (data.x, data.y[:, 0], data.x_test, data.y_test[:, 0]))
        weights = np.stack([fields(runs, k) for k in marks], axis=1)
        return ReluDescent(x, y, x_test, y_test, weights, step, marks)

    return run.once(("descent", rows, steps), compute)
