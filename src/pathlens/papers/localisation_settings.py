"""Sizes, data and deviations that all localisation experiments share. No torch, so that listing them stays quick."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run

PAPER = "Gated Deep Linear Networks and Localisation"
NOISE = 3 / 42  # inverse participation ratio of Gaussian noise on 40 coordinates

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
SUPPORT = Deviation(
    paper="single pulses live on {0, 1}",
    authors_code="an affine map to ±1, and x → 1 − x with probability ½",
    ours="both supports, flips on, lengths 11 and 3 of 40; the median is subtracted before measuring",
    why="fields of single pulses sit on an offset",
)


def config(run: Run, name: str) -> dict[str, Any]:
    """An artifact's configuration: the experiment's sizes, and what all of them have in common."""
    return {"inputs": 40, "gain": 3.0, **run.sizes_of(name)}


def float32(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays as an artifact stores them."""
    return {k: np.asarray(v, dtype=np.float32) for k, v in arrays.items()}


def relative_distance(w: np.ndarray, other: np.ndarray) -> np.ndarray:
    """‖w − w'‖ / ‖w'‖ over units and inputs, the last two axes."""
    return np.linalg.norm(w - other, axis=(-2, -1)) / np.linalg.norm(other, axis=(-2, -1))
