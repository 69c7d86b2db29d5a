"""From checked arrays to a `HalfSpaceModel`: standardise, train soft gates that harden, then the values alone.

The training loop is `pathlens.training.train`; labels, feature names and everything else of scikit-learn stay outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pathlens.estimators.halfspaces import ONE_AT_A_TIME, HalfSpaceModel
from pathlens.estimators.recipes import Recipe
from pathlens.models import GatedNetwork, dlgn
from pathlens.regions import halfspaces
from pathlens.training import Geometric, Runs, train

_WORTH_CAPTURING = 200  # steps: capturing one costs about as much as running a hundred


@dataclass(frozen=True)
class Scale:
    """x ↦ (x − centre) · factor, with factor 0 for a column that is constant: it then has no say."""

    centre: np.ndarray
    factor: np.ndarray

    @classmethod
    def of(cls, A: np.ndarray, share: np.ndarray) -> Scale:
        """Mean and 1/standard deviation of the columns of A (n, d) under weights that sum to one."""
        centre = share @ A
        spread = np.sqrt(share @ np.square(A - centre))
        constant = spread <= 1e-10 * np.abs(A).max(axis=0, initial=0.0)
        return cls(centre, np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, spread)))

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation; 0 for a constant column."""
        return np.where(self.factor == 0, 0.0, 1.0 / np.where(self.factor == 0, 1.0, self.factor))

    def __call__(self, A: np.ndarray) -> np.ndarray:
        return (A - self.centre) * self.factor


@dataclass(frozen=True)
class Fitted:
    """A fitted model, and how training went: the soft network's and the hard one's loss on the training rows."""

    model: HalfSpaceModel
    soft_loss: float
    hard_loss: float
    epochs: int
    seed: int


def fit(
    X: np.ndarray,
    Y: np.ndarray,
    weights: np.ndarray,
    classes: int | None,
    recipe: Recipe,
    validation: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> Fitted:
    """Train a DLGN and write it down in the units of the data.

    Parameters
    ----------
    X : (n, d) float64
    Y : (n,) integer labels, or (n, c) float64 targets
    weights : (n,)
        Positive. A row of weight 3 is a row that is there three times.
    classes : int or None
        Number of classes; None for regression.
    validation : (X, Y, weights), optional
        Held-out rows for early stopping.
    """
    share = weights / weights.sum()
    scale_x = Scale.of(X, share)
    scale_y = None if classes is not None else Scale.of(Y, share)
    outputs = classes if classes is not None else Y.shape[1]

    def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(scale_x(x)), torch.from_numpy(y if scale_y is None else scale_y(y))

    data = tensors(X, Y)
    options: dict[str, Any] = {
        "loss": "mse" if classes is None else "cross_entropy", "optimizer": "adamw", "batch_size": recipe.batch_size,
        "weight_decay": recipe.weight_decay, "schedule": "cosine", "evaluate": "running", "progress": recipe.verbose,
        "weights": None if np.ptp(weights) == 0 else torch.tensor(weights),
    }  # fmt: skip
    steps = -(-len(X) // (recipe.batch_size or len(X)))
    if validation is not None:
        x, y, w = validation
        options |= {"validation": (*tensors(x, y), torch.from_numpy(w)), "patience": recipe.patience}
    column = "loss" if validation is None else "validation"
    seeds = [recipe.seed + i for i in range(recipe.restarts)]
    with ONE_AT_A_TIME:
        net = dlgn(X.shape[1], recipe.hidden, outputs, beta=recipe.beta[0], bias=True,
                   piecewise_constant=recipe.piecewise_constant, seed=recipe.seed).double()  # fmt: skip

        def phase(networks: Any, epochs: int, **how: Any) -> Runs:
            runs = train(networks, data, epochs=epochs, compile=epochs * steps >= _WORTH_CAPTURING, **options, **how)
            assert isinstance(runs, Runs)
            return runs

        soft = phase(net, recipe.epochs, lr=recipe.learning_rate, seeds=seeds, label="gates and values",
                     beta=Geometric(*recipe.beta, until=0.9))  # fmt: skip
        hardened = [n.with_gate("hard") for n in soft.networks if isinstance(n, GatedNetwork)]
        hard = phase(hardened, max(1, recipe.epochs // 10), lr=recipe.learning_rate / 2, seed=recipe.seed,
                     trained="values", label="values on hard gates")  # fmt: skip
        final = [min(t.history[column]) if validation is not None else t.history[column][-1] for t in hard]
        best = int(np.argmin(final))
        chosen = hard.networks[best]
        assert isinstance(chosen, GatedNetwork)
        model = written_down(chosen, scale_x, scale_y, classes)
    epochs = sum(len(t.history["loss"]) - 1 for t in (soft[best], hard[best]))
    return Fitted(
        model.measured(X, share), soft[best].history["loss"][-1], hard[best].history["loss"][-1], epochs, seeds[best]
    )


def written_down(net: GatedNetwork, scale_x: Scale, scale_y: Scale | None, classes: int | None) -> HalfSpaceModel:
    """A DLGN on standardised inputs as half-spaces and values in the units of the data.

    Softmax does not change when a number is added to all outputs: with classes, the outputs are centred, and of two
    only their difference, the log-odds, is kept.
    """
    spaces = halfspaces(net)
    normals = [spaces.normals(site) * scale_x.factor for site in spaces.sites]
    offsets = [spaces.offsets(site) - a @ scale_x.centre for site, a in zip(spaces.sites, normals)]
    layers = [m for m in net.values.modules() if isinstance(m, nn.Linear)]
    weights, biases = ([p.detach().numpy() for p in part] for part in zip(*((m.weight, m.bias) for m in layers)))
    if net.value_input == "ones":
        biases[0] = biases[0] + weights[0].sum(1)
        weights[0] = np.zeros_like(weights[0])
    else:
        weights[0] = weights[0] * scale_x.factor
        biases[0] = biases[0] - weights[0] @ scale_x.centre
    if scale_y is not None:
        weights[-1] = weights[-1] * scale_y.spread[:, None]
        biases[-1] = biases[-1] * scale_y.spread + scale_y.centre
    elif classes == 2:
        weights[-1], biases[-1] = weights[-1][1:] - weights[-1][:1], biases[-1][1:] - biases[-1][:1]
    else:
        weights[-1], biases[-1] = weights[-1] - weights[-1].mean(0), biases[-1] - biases[-1].mean()
    empty = tuple(np.zeros(len(o)) for o in offsets)
    groups = np.arange(len(offsets[-1]))
    return HalfSpaceModel(
        tuple(normals), tuple(offsets), tuple(weights), tuple(biases), empty, empty, groups, scale_x.spread
    )
