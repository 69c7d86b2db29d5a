"""From checked arrays to a `HalfSpaceModel`: standardise, train soft gates, harden them, then the values alone.

The training loop is `pathlens.training.train`; labels, feature names and everything else of scikit-learn stay outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.model_selection import train_test_split
from torch import nn

from pathlens.estimators.halfspaces import ONE_AT_A_TIME, HalfSpaceModel
from pathlens.estimators.recipes import FOLDS, Recipe
from pathlens.models import GatedNetwork, dlgn
from pathlens.regions import halfspaces
from pathlens.training import Geometric, Runs, train

_WORTH_CAPTURING = 200  # steps: capturing one costs about as much as running a hundred
_NOISY = 0.05 + 1e-9  # share of training rows that a soft network gets wrong where labels are taken to be noisy
_UNEXPLAINED = 0.25  # share of the variance that even sharp gates leave where targets are taken to be noisy
_ROWS = 4096  # rows in one forward pass


@dataclass(frozen=True)
class Standardizer:
    """x ↦ (x − centre) · factor, with factor 0 for a column that is constant: it then has no say."""

    centre: np.ndarray
    factor: np.ndarray

    @classmethod
    def of(cls, A: np.ndarray, share: np.ndarray) -> Standardizer:
        """Mean and 1/standard deviation of the columns of A (n, d) under weights that sum to one."""
        centre = share @ A
        largest = np.abs(A).max(axis=0, initial=0.0)
        unit = np.ldexp(1.0, np.frexp(largest)[1] - 1)  # squares of numbers beyond 1e±154 do not fit a float
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
    """A fitted model, and how training went: the first phase's and the final loss on the training rows."""

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
    scale_x = Standardizer.of(X, share)
    scale_y = None if classes is not None else Standardizer.of(Y, share)
    outputs = classes if classes is not None else Y.shape[1]

    def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(scale_x(x)), torch.from_numpy(y if scale_y is None else scale_y(y))

    data = tensors(X, Y)
    options: dict[str, Any] = {
        "optimizer": "adamw",
        "batch_size": recipe.batch_size,
        "weight_decay": recipe.weight_decay,
        "schedule": "cosine",
        "evaluate": "running",
        "progress": recipe.verbose,
    }
    loss = F.mse_loss if classes is None else F.cross_entropy  # of labels, and of probabilities
    steps = -(-len(X) // (recipe.batch_size or len(X)))
    watch: dict[str, Any] = {}
    if validation is not None:
        x, y, w = validation
        watch = {"validation": (*tensors(x, y), torch.from_numpy(w)), "patience": recipe.patience}
    seeds = [recipe.seed + i for i in range(recipe.n_restarts)]
    with ONE_AT_A_TIME:
        net = dlgn(
            X.shape[1],
            recipe.hidden,
            outputs,
            beta=recipe.beta[0],
            bias=True,
            piecewise_constant=recipe.piecewise_constant,
            seed=recipe.seed,
        ).double()

        def phase(networks: Any, epochs: int, targets: torch.Tensor, rows: Any = slice(None), **how: Any) -> Runs:
            w = None if np.ptp(weights[rows]) == 0 else torch.tensor(weights[rows])
            how |= {"weights": w, "compile": epochs * steps >= _WORTH_CAPTURING}
            runs = train(networks, (data[0][rows], targets[rows]), epochs=epochs, loss=loss, **options, **how)
            assert isinstance(runs, Runs)
            return runs

        sharpen = Geometric(*recipe.beta, until=0.9)
        kind, phases = recipe.hardening, list[Runs]()
        if len(recipe.decays) > 1:  # compared after a whole first phase: what is best half-way is not in the end
            sharp = kind == "anneal" or (kind == "auto" and classes is None)  # as the first phase is
            missed, fold = np.zeros(len(recipe.decays)), _folds(Y, classes, recipe.seed)
            for split in range(recipe.splits):
                kept, held = np.flatnonzero(fold != split), np.flatnonzero(fold == split)
                tried = phase(
                    net,
                    recipe.epochs,
                    data[1],
                    kept,
                    lr=recipe.learning_rate,
                    seeds=seeds[:1],
                    settings=[{"weight_decay": decay} for decay in recipe.decays],
                    label="weight decays",
                    beta=sharpen if sharp else None,
                )
                for i, one in enumerate(tried.networks):
                    missed[i] += weights[held] @ _squared_errors(one, data[0][held], data[1][held], classes)
            options["weight_decay"] = recipe.decays[int(np.argmin(np.nan_to_num(missed, nan=np.inf)))]

        start: dict[str, Any] = {"lr": recipe.learning_rate, "seeds": seeds, **watch}

        def soft() -> Runs:
            phases.append(phase(net, recipe.epochs, data[1], label="soft gates and values", **start))
            return phases[-1]

        def annealed() -> Runs:
            phases.append(phase(net, recipe.epochs, data[1], beta=sharpen, label="gates and values", **start))
            return phases[-1]

        # where targets are noisy, sharp gates learn the noise; how well either fits its own rows tells that they are
        if kind == "auto" and classes is None:
            first = annealed()
            left = np.mean([_weighted_loss(n, data, share, loss) for n in first.networks])  # of variance one
            kind = "follow" if left > _UNEXPLAINED else "anneal"
            if kind == "follow":
                first = soft()
        else:
            first = annealed() if kind == "anneal" else soft()
            if kind == "auto":
                predicted = _mean_prediction(first.networks, data[0], classes)
                kind = "follow" if share @ (predicted.argmax(1) != data[1]).numpy() > _NOISY else "anneal"
                if kind == "anneal":
                    annealed()
        soft_losses = [_weighted_loss(n, data, share, loss) for n in first.networks]
        targets = data[1] if kind == "anneal" else _mean_prediction(first.networks, data[0], classes)
        if kind == "follow":  # nothing is watched: on the way from soft to hard gates it is the last epoch that counts
            phases.append(
                phase(
                    first.networks,
                    max(1, recipe.epochs // 2),
                    targets,
                    lr=recipe.learning_rate / 2,
                    seed=recipe.seed,
                    beta=sharpen,
                    label="hardening",
                )
            )
        hardened = [n.with_gate("hard") for n in phases[-1].networks if isinstance(n, GatedNetwork)]
        phases.append(
            phase(
                hardened,
                max(1, recipe.epochs // 10),
                targets,
                lr=recipe.learning_rate / 2,
                seed=recipe.seed,
                trained="values",
                label="values on hard gates",
                **watch,
            )
        )
        final = phases[-1]
        losses = [_weighted_loss(n, data, share, loss) for n in final.networks]
        best = int(np.argmin(losses if validation is None else [min(t.history["validation"]) for t in final]))
        chosen = final.networks[best]
        assert isinstance(chosen, GatedNetwork)
        model = to_halfspace_model(chosen, scale_x, scale_y, classes)
    epochs = sum(len(runs[best].history["loss"]) - 1 for runs in phases)
    return Fitted(model.measured(X, share), soft_losses[best], losses[best], epochs, kind, options["weight_decay"])


def split_indices(Y: np.ndarray, classes: int | None, held: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows to train on and of `held` others, with the same shares of classes where that can be."""
    rows = len(Y)
    counts = np.bincount(Y) if classes is not None else np.array([0])
    stratify = Y if counts.min() >= 2 and classes is not None and held >= classes <= rows - held else None
    kept, others = train_test_split(np.arange(rows), test_size=held, random_state=seed, stratify=stratify)
    return kept, others


def _folds(Y: np.ndarray, classes: int | None, seed: int) -> np.ndarray:
    """Number 0 … `FOLDS` − 1 of the fold that each row is in: equal sizes, and equal shares of each class."""
    order = np.random.default_rng(seed).permutation(len(Y))
    if classes is not None:
        order = order[np.argsort(Y[order], kind="stable")]
    fold = np.empty(len(Y), dtype=int)
    fold[order] = np.arange(len(Y)) % FOLDS
    return fold


def _outputs(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([net.eval()(part) for part in x.split(_ROWS)])


def _mean_prediction(networks: Sequence[nn.Module], x: torch.Tensor, classes: int | None) -> torch.Tensor:
    """What the networks predict for the rows on average: probabilities, or targets."""
    outputs = torch.stack([_outputs(net, x) for net in networks])
    return (outputs if classes is None else outputs.softmax(-1)).mean(0)


def _squared_errors(net: nn.Module, x: torch.Tensor, y: torch.Tensor, classes: int | None) -> np.ndarray:
    """Squared error of each row: of the probabilities (Brier score), or the mean over targets.

    Of labels it is compared instead of the cross-entropy, which a few sure mistakes decide: too strong a decay, which
    makes all probabilities timid, looks good by it.
    """
    predicted = _mean_prediction([net], x, classes)
    error = predicted - y if classes is None else predicted - F.one_hot(y, classes)
    return (error.square().mean(1) if classes is None else error.square().sum(1)).numpy()


def _weighted_loss(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor], share: np.ndarray, loss: Any) -> float:
    """Loss of a network on rows of these weights, which sum to one."""
    rows = loss(_outputs(net, data[0]), data[1], reduction="none")
    return float(torch.from_numpy(share) @ rows.reshape(len(share), -1).mean(1))


def to_halfspace_model(
    net: GatedNetwork, scale_x: Standardizer, scale_y: Standardizer | None, classes: int | None
) -> HalfSpaceModel:
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
