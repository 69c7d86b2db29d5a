"""Data, deviations, measures and panels that the localisation experiments share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet

INPUTS, UNITS, GAIN = 40, 10, 3.0
CONFIG = {"inputs": INPUTS, "gain": GAIN}
LONG_FIRST, SHORT_FIRST = (3.0, 1.0), (1.0, 3.0)  # correlation lengths (ξ₁, ξ₂)
NOISE = 3 / (INPUTS + 2)  # inverse participation ratio of Gaussian noise
TIME = "time (steps × step size)"

DATA = Deviation(
    paper="two translation-invariant classes of correlation lengths ξ₁ and ξ₂; lengths, gain and sizes are not stated",
    authors_code="40 inputs, 10 to 100 units, (ξ₁, ξ₂) of (3, 1), (5, 1) or (2, 1), gain 3, fresh batches of 1000",
    ours="40 inputs, 10 units, ξ of 3 and 1, gain 3, the erf(g z) convention",
    why="these are the settings of the public code in which the effect is clear",
)
RATES = Deviation(
    paper="optimiser and rates are not stated",
    authors_code="SGD on (ŷ − y)² without ½; ReLU 0.05 K to 0.15 K, sigmoid 10 to 100 with trainable biases",
    ours="SGD: ReLU 0.15 K, sigmoid 100, erf 10; weights N(0, 2/(d + K))",
    why="largest rates that are stable, so that a minute is enough",
)
EQUATIONS = Deviation(
    paper="Kτ ẇ = b − A w (eq. 5, 8 to 11, 19 to 32)",
    authors_code="later drafts keep the same form",
    ours="τ ẇ = b/K − A w/K², from the loss ½⟨(y − ŷ)²⟩ and ŷ = (1/K) x̃·w",
    why="the gradient of that loss has a second factor 1/K; the printed form is right only where ŷ is a sum",
)


def draw(rows: int, d: int, seed: int, *, n_test: int = 0) -> DataSet:
    """NLGP rows in float64 with the common lengths and gain."""
    import torch

    from pathlens.data import nlgp

    return nlgp(rows, d=d, xi=LONG_FIRST, gain=GAIN, n_test=n_test, seed=seed, dtype=torch.float64)


def descend(
    x: np.ndarray, y: np.ndarray, w0: np.ndarray, step: float, steps: int, *, gates: np.ndarray | None = None
) -> np.ndarray:
    """Plain gradient descent on ½⟨(y − ŷ)²⟩ with fixed gates (n, K), or with those of a ReLU network by default."""
    w, columns, scale = w0.copy(), np.ascontiguousarray(x.T), step / (len(w0) * len(x))
    for _ in range(steps):
        h = w @ columns
        on = h > 0 if gates is None else gates.T
        w -= scale * ((on * ((on * h).sum(0) / len(w) - y)) @ x)
    return w


def relative_distance(w: np.ndarray, other: np.ndarray) -> np.ndarray:
    """‖w − w'‖ / ‖w'‖ over units and inputs, the last two axes."""
    return np.linalg.norm(w - other, axis=(-2, -1)) / np.linalg.norm(other, axis=(-2, -1))


def cosine(w: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Cosine of the angle between weights along the last axis."""
    scale = np.linalg.norm(w, axis=-1) * np.linalg.norm(other, axis=-1)
    return (w * other).sum(-1) / np.maximum(scale, 1e-300)


def over_time(title: str, series: Sequence[Series], y_label: str, **more: Any) -> Panel:
    """Lines over the array ``times`` on a logarithmic axis."""
    return Panel("lines", title, series, x="times", x_label=TIME, y_label=y_label, x_scale="log", **more)


def rows(stem: str, labels: Sequence[str]) -> list[Series]:
    """One series for each entry of an array along its first axis."""
    return [Series(f"{stem}[{i}]", label) for i, label in enumerate(labels)]
