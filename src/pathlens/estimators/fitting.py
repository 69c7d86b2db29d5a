"""From validated arrays to a `HalfSpaceModel`: standardise, choose the weight decay, train until gates are hard.

The training itself is `pathlens.hardening.train_hard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.model_selection import train_test_split
from torch import nn

from pathlens.estimators.recipes import FOLDS, Recipe
from pathlens.hardening.training import (
    execution_for,
    mean_prediction,
    sharpening,
    starts_sharp,
    train_hard,
    train_phase,
)
from pathlens.models import GatedNetwork, dlgn
from pathlens.regions import halfspaces
from pathlens.regions.halfspace_model import ONE_AT_A_TIME, HalfSpaceModel


@dataclass(frozen=True)
class Standardizer:
    """x ↦ (x − centre) · factor, with factor 0 for a constant column, which then has no influence."""

    centre: np.ndarray
    factor: np.ndarray

    @classmethod
    def of(cls, A: np.ndarray, share: np.ndarray) -> Standardizer:
        """Mean and 1/standard deviation of the columns of A (n, d) under weights that sum to one."""
        centre = share @ A
        largest = np.abs(A).max(axis=0, initial=0.0)
        unit = np.ldexp(1.0, np.frexp(largest)[1] - 1)  # squares of numbers beyond 1e±154 overflow
        spread = np.sqrt(share @ np.square((A - centre) / unit)) * unit
        constant = spread <= np.maximum(1e-10 * largest, np.finfo(np.float64).tiny)  # below it, 1/spread is infinite
        return cls(centre, np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, spread)))

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation; 0 for a constant column."""
        return np.where(self.factor == 0, 0.0, 1.0 / np.where(self.factor == 0, 1.0, self.factor))

    def __call__(self, A: np.ndarray) -> np.ndarray:
        return (A - self.centre) * self.factor


@dataclass(frozen=True)
class Fitted:
    """A fitted model, with the losses of the first phase and of the final network on the training rows."""

    model: HalfSpaceModel
    soft_loss: float
    hard_loss: float
    epochs: int
    hardening: str
    weight_decay: float


def fit(
    X: np.ndarray,
    Y: np.ndarray,
    weights: np.ndarray,
    classes: int | None,
    recipe: Recipe,
    validation: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> Fitted:
    """Train a DLGN on standardised data and return it in the units of the data.

    Parameters
    ----------
    X : (n, d) float64
    Y : (n,) integer labels, or (n, c) float64 targets
    weights : (n,)
        Positive. A weight of 3 equals three copies of the row.
    classes : int or None
        Number of classes; None for regression.
    validation : (X, Y, weights), optional
        Held-out rows for early stopping.
    """
    share = weights / weights.sum()
    scale_x = Standardizer.of(X, share)
    scale_y = None if classes is not None else Standardizer.of(Y, share)

    def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(scale_x(x)), torch.from_numpy(y if scale_y is None else scale_y(y))

    data = tensors(X, Y)
    options: dict[str, Any] = {"optimizer": "adamw", "batch_size": recipe.batch_size, "progress": recipe.verbose}
    held_out = None
    if validation is not None:
        x, y, w = validation
        held_out = (*tensors(x, y), torch.from_numpy(w))
    with ONE_AT_A_TIME:
        net = dlgn(
            X.shape[1],
            recipe.hidden,
            classes if classes is not None else Y.shape[1],
            beta=recipe.beta[0],
            bias=True,
            piecewise_constant=recipe.piecewise_constant,
            seed=recipe.seed,
        ).double()
        decay = _choose_weight_decay(net, data, weights, classes, recipe, options)
        runs = train_hard(
            net,
            data,
            method=recipe.hardening,
            beta=recipe.beta,
            epochs=recipe.epochs,
            lr=recipe.learning_rate,
            seeds=[recipe.seed + i for i in range(recipe.n_restarts)],
            weights=weights,
            validation=held_out,
            patience=recipe.patience,
            weight_decay=decay,
            **options,
        )
        model = to_halfspace_model(runs.networks[runs.best], scale_x, scale_y, classes)
    return Fitted(
        model.measured(X, share), runs.soft_losses[runs.best], runs.losses[runs.best], runs.epochs, runs.method, decay
    )


def _choose_weight_decay(
    net: GatedNetwork,
    data: tuple[torch.Tensor, torch.Tensor],
    weights: np.ndarray,
    classes: int | None,
    recipe: Recipe,
    options: dict[str, Any],
) -> float:
    """The candidate with the lowest squared error on held-out folds, after a whole first phase.

    The squared error of probabilities (Brier score) is compared, not the cross-entropy: a few confident mistakes decide
    the latter, which prefers a decay so strong that all probabilities are timid.
    """
    if len(recipe.decays) == 1:
        return recipe.weight_decay
    x, y = data
    errors, fold = np.zeros(len(recipe.decays)), _folds(y.numpy(), classes, recipe.seed)
    sharp = starts_sharp(recipe.hardening, classes is not None)
    for split in range(recipe.splits):
        kept, held = np.flatnonzero(fold != split), np.flatnonzero(fold == split)
        runs = train_phase(
            net,
            (x[kept], y[kept]),
            "weight decays",
            weights=weights[kept],
            epochs=recipe.epochs,
            lr=recipe.learning_rate,
            seeds=[recipe.seed],
            settings=[{"weight_decay": decay} for decay in recipe.decays],
            beta=sharpening(recipe.beta) if sharp else None,
            loss=F.mse_loss if classes is None else F.cross_entropy,
            weight_decay=recipe.weight_decay,
            execution=execution_for(recipe.epochs, len(x), recipe.batch_size),
            **options,
        )
        for i, network in enumerate(runs.networks):
            predicted = mean_prediction([network], x[held], classes is not None)
            error = predicted - (y[held] if classes is None else F.one_hot(y[held], classes))
            rows = error.square().mean(1) if classes is None else error.square().sum(1)
            errors[i] += weights[held] @ rows.numpy()
    return recipe.decays[int(np.argmin(np.nan_to_num(errors, nan=np.inf)))]


def split_indices(Y: np.ndarray, classes: int | None, held: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows to train on and of `held` others, stratified by class where possible."""
    rows = len(Y)
    counts = np.bincount(Y) if classes is not None else np.array([0])
    stratify = Y if counts.min() >= 2 and classes is not None and held >= classes <= rows - held else None
    kept, others = train_test_split(np.arange(rows), test_size=held, random_state=seed, stratify=stratify)
    return kept, others


def _folds(Y: np.ndarray, classes: int | None, seed: int) -> np.ndarray:
    """The fold of each row, 0 … `FOLDS` − 1: equal sizes, and equal shares of each class."""
    order = np.random.default_rng(seed).permutation(len(Y))
    if classes is not None:
        order = order[np.argsort(Y[order], kind="stable")]
    fold = np.empty(len(Y), dtype=int)
    fold[order] = np.arange(len(Y)) % FOLDS
    return fold


def to_halfspace_model(
    net: GatedNetwork, scale_x: Standardizer, scale_y: Standardizer | None, classes: int | None
) -> HalfSpaceModel:
    """A DLGN on standardised inputs as half-spaces and values in the units of the data.

    Softmax does not change when a number is added to all outputs: outputs of classes are centred, and for two classes
    only their difference, the log-odds, is kept.
    """
    spaces = halfspaces(net)
    normals = [spaces.normals(site).numpy() * scale_x.factor for site in spaces.sites]
    offsets = [spaces.offsets(site).numpy() - a @ scale_x.centre for site, a in zip(spaces.sites, normals)]
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
        tuple(normals),
        tuple(offsets),
        tuple(weights),
        tuple(biases),
        empty,
        empty,
        groups,
        scale_x.spread,
        scale_x.centre,
    )
