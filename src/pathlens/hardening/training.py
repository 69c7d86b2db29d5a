"""`train_hard`: from untrained soft gates to trained hard ones, for one network or several seeds at once.

`harden` starts from a network that is trained already.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.errors import SignalWarning
from pathlens.hardening.report import outputs_of
from pathlens.models import GatedNetwork
from pathlens.training import Execution, Geometric, Keep, Runs, Stopping, train

NOISY_LABELS = 0.05 + 1e-9  # labels count as noisy where a soft network is wrong on a larger share of the rows
NOISY_TARGETS = 0.25  # targets count as noisy where an annealed network leaves a larger share of their variance
_WORTH_COMPILING = 200  # steps: compiling a step costs about as much as running a hundred
_ROWS = 4096  # rows in one forward pass


@dataclass(frozen=True)
class HardRuns:
    """Networks with hard gates, one per seed, and the history of their training.

    Attributes
    ----------
    networks : list of GatedNetwork
    best : int
        The one with the lowest loss on the validation rows, or without these on the training rows.
    losses, soft_losses : list of float
        Losses on the training rows: final, and after the first phase.
    epochs : int
        Epochs of all phases, of the best network.
    method : {"anneal", "follow"}
        The method used.
    """

    networks: list[GatedNetwork]
    best: int
    losses: list[float]
    soft_losses: list[float]
    epochs: int
    method: str


def sharpening(beta: tuple[float, float]) -> Geometric:
    """β grows geometrically over the first 90 % of the epochs."""
    return Geometric(*beta, until=0.9)


def starts_sharp(method: str, labels: bool) -> bool:
    """Whether β grows in the first phase already; "auto" tries annealing first for real targets."""
    return method == "anneal" or (method == "auto" and not labels)


def train_phase(
    networks: Any,
    data: tuple[Tensor, Tensor],
    label: str,
    *,
    epochs: int,
    weights: np.ndarray | None = None,
    progress: bool = True,
    **options: Any,
) -> Runs:
    """Train several networks on pairs (x, y), with a learning rate that falls along a cosine.

    Weights that are all equal are left out. The label is that of the progress bar.
    """
    w = None if weights is None or np.ptp(weights) == 0 else torch.tensor(weights)
    options = {"execution": execution_for(epochs, len(data[0]), options.get("batch_size")), **options}
    runs = train(
        networks,
        (*data, w),
        epochs=epochs,
        scheduler="cosine",
        keep=Keep(evaluate="running"),
        progress=label if progress else False,
        **options,
    )
    assert isinstance(runs, Runs)
    return runs


def execution_for(epochs: int, n: int, batch_size: int | None) -> Execution:
    """Compiles a step if a phase on n rows has enough steps to pay for it."""
    return Execution(compile=epochs * -(-n // (batch_size or n)) >= _WORTH_COMPILING)


def mean_prediction(networks: Sequence[nn.Module], x: Tensor, labels: bool) -> Tensor:
    """Mean over the networks of their predictions: probabilities for labels, else targets."""
    outputs = torch.stack([outputs_of(net.eval(), x, _ROWS) for net in networks])
    return (outputs.softmax(-1) if labels else outputs).mean(0)


def train_hard(
    net: GatedNetwork,
    data: tuple[Tensor, Tensor],
    *,
    method: str = "auto",
    beta: tuple[float, float] = (4.0, 1000.0),
    epochs: int = 100,
    lr: float = 5e-3,
    seeds: Sequence[int] = (0,),
    weights: np.ndarray | None = None,
    validation: Any = None,
    patience: int | None = None,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    batch_size: int | None = 32,
    progress: bool = True,
) -> HardRuns:
    """Train a network with soft gates, make its gates hard, and train its values alone on them.

    Parameters
    ----------
    net : GatedNetwork
        With soft gates; copies are initialised from each seed and trained together.
    data : (x, y)
        Tensors (n, d), and labels (n,) or standardised targets (n, c).
    method : {"auto", "anneal", "follow"}
        * "anneal": β grows while the data are learned.
        * "follow": soft gates learn the data; then, for half as many epochs, β grows while the networks learn the mean
          prediction of the soft ones. Sharp gates can memorise noise, and here they never see it.
        * "auto": "follow" where the data are noisy: a soft network is wrong on more than a twentieth of the labels, or
          an annealed one leaves more than a quarter of the variance of real targets; else "anneal".
    beta : (float, float)
        First and last β.
    epochs, lr, seeds, optimizer, weight_decay, batch_size, progress
        As in `train`; the values alone train for a tenth of the epochs.
    weights : (n,), optional
        Weights of the rows.
    validation, patience
        As in `train`: the phases that are not on the way from soft to hard gates stop early.

    Returns
    -------
    HardRuns
    """
    x, y = data
    labels = not y.dtype.is_floating_point
    loss = F.cross_entropy if labels else F.mse_loss
    share = np.full(len(x), 1 / len(x)) if weights is None else weights / weights.sum()
    stopping = {} if validation is None else {"validation": validation, "stopping": Stopping(patience)}
    start = {"epochs": epochs, "lr": lr, "seeds": seeds, **stopping}
    every_phase: dict[str, Any] = {
        "weights": weights,
        "loss": loss,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "progress": progress,
    }
    phases: list[Runs] = []

    def phase(label: str, networks: Any, targets: Tensor, **how: Any) -> Runs:
        with warnings.catch_warnings():
            if phases:  # on pure noise, the best network is a constant: its outputs do not vary, and that is no error
                warnings.simplefilter("ignore", SignalWarning)
            phases.append(train_phase(networks, (x, targets), label, **every_phase, **how))
        return phases[-1]

    def first_phase(sharp: bool) -> Runs:
        label = "gates and values" if sharp else "soft gates and values"
        return phase(label, net, y, beta=sharpening(beta) if sharp else None, **start)

    def loss_of(network: nn.Module) -> float:
        rows = loss(outputs_of(network.eval(), x, _ROWS), y, reduction="none")
        return float(torch.from_numpy(share) @ rows.reshape(len(share), -1).mean(1))

    first = first_phase(starts_sharp(method, labels))
    if method == "auto" and labels:
        wrong = mean_prediction(first.networks, x, labels).argmax(1) != y
        method = "follow" if share @ wrong.numpy() > NOISY_LABELS else "anneal"
        if method == "anneal":
            first_phase(sharp=True)
    elif method == "auto":
        unexplained = np.mean([loss_of(network) for network in first.networks])  # of a variance of one
        method = "follow" if unexplained > NOISY_TARGETS else "anneal"
        if method == "follow":
            first = first_phase(sharp=False)
    soft_losses = [loss_of(network) for network in first.networks]
    targets = y
    if method == "follow":  # without early stopping: on the way from soft to hard gates the last epoch counts
        targets = mean_prediction(first.networks, x, labels)
        half = {"epochs": max(1, epochs // 2), "lr": lr / 2, "seed": seeds[0]}
        phase("hardening", first.networks, targets, beta=sharpening(beta), **half)
    hard = [n.with_gate("hard") for n in phases[-1].networks if isinstance(n, GatedNetwork)]
    tenth = {"epochs": max(1, epochs // 10), "lr": lr / 2, "seed": seeds[0], **stopping}
    final = phase("values on hard gates", hard, targets, trained="values", **tenth)
    losses = [loss_of(network) for network in final.networks]
    best = int(np.argmin(losses if validation is None else [min(t.history["validation"]) for t in final]))
    networks = [n for n in final.networks if isinstance(n, GatedNetwork)]
    spent = sum(len(runs[best].history["loss"]) - 1 for runs in phases)
    return HardRuns(networks, best, losses, soft_losses, spent, method)
