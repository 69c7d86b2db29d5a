"""The network of equation 1 and its training by gradient descent. This module imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from pathlens.models import LocalisationNet
from pathlens.papers.experiment import Run
from pathlens.papers.localisation.settings import INPUTS, UNITS
from pathlens.training import Keep, Runs, train


class OneLayer(LocalisationNet):
    """ŷ = W₂ σ(W₁x + b₁) + b₂; W₂ is the mean over units unless it is trained, then it starts with random weights."""

    def __init__(self, activation: str = "relu", units: int = UNITS, bias: bool = False, trained: bool = False) -> None:
        super().__init__(INPUTS, units, activation, "trainable" if trained else "mean", bias=bias)

    def reset_parameters(self) -> None:
        """Draw the first layer from N(0, 2/(d + K)) as in the public code; a trained second layer draws itself."""
        nn.init.normal_(self.hidden.weight, std=(2 / sum(self.hidden.weight.shape)) ** 0.5)
        if self.hidden.bias is not None:
            nn.init.zeros_(self.hidden.bias)


def train_networks(
    run: Run,
    net: OneLayer,
    data: Any,
    label: str,
    *,
    steps: int,
    batch_size: int | None,
    lr: float,
    keep: Sequence[int],
    loss: Any = "mse",
) -> Runs:
    """Train all seeds of the run at once by plain gradient descent and keep the weights at the given steps."""
    return train(  # type: ignore[return-value]  # seeds are given
        net,
        data,
        epochs=steps,
        batch_size=batch_size,
        optimizer="sgd",
        lr=lr,
        loss=loss,
        seeds=run.seeds,
        keep=Keep(keep, evaluate="running"),
        device=run.device,
        progress=partial(run.progress, label),
    )


def fields(runs: Runs, step: int) -> np.ndarray:
    """First-layer weights of every seed at a kept step, (seeds, K, d), float64."""
    kept = [t.at_epoch(step).snapshot for t in runs]
    return np.stack([s.state["hidden.weight"].double().numpy() for s in kept if s is not None])
