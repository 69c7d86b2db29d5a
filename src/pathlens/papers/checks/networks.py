"""Small float64 networks with fixed seeds for the checks, and their weights for the reference implementations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathlens import models
from pathlens.models import GatedNetwork
from pathlens.testing import reference as ref
from pathlens.testing.reference import Weights

BETA, EPSILON = 4.0, 0.125  # exact also in single precision, in which a network stores them


def build(kind: str, d: int, hidden: Sequence[int], seed: int = 0, **options: Any) -> GatedNetwork:
    """A named network in float64; weights are doubled so that no output is tiny.

    >>> build("relu", 2, (3,)).kind
    'relu'
    """
    net = getattr(models, kind)(d, hidden=tuple(hidden), seed=seed, **options).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2.0)
    return net


def values(net: GatedNetwork) -> list[Tensor]:
    """U_1, …, U_D of the value network."""
    return [p.detach().clone() for p in net.values.parameters()]


def gate_layers(net: GatedNetwork) -> list[Tensor]:
    """W_1, …, W_L of a separate gate network."""
    assert net.source is not None
    return [p.detach().clone() for p in net.source.parameters()]


def assign(tensors: Iterable[Tensor], new: Weights) -> None:
    """Overwrite parameters or buffers in place."""
    with torch.no_grad():
        for old, value in zip(tensors, new):
            old.copy_(value)


def set_values(net: GatedNetwork, weights: Weights) -> GatedNetwork:
    """Give the value network these weights, in place."""
    assign(net.values.parameters(), weights)
    return net


def frg(hidden: Sequence[int], gates: Weights) -> GatedNetwork:
    """A network on two inputs with fixed random gates (FRG), whose table is `gates`."""
    net = build("frg", 2, hidden, examples=len(gates[0]))
    assert net.source is not None
    assign(net.source.buffers(), gates)
    return net


def soft_galu(hidden: Sequence[int]) -> GatedNetwork:
    """Soft-GaLU as in the DGN paper, with two inputs: hidden units of the gate network are q·χ_ε(−βq)."""
    return build("soft_galu", 2, hidden, gate_activation="soft", beta=BETA, epsilon=EPSILON)


def soft_gates(layers: Weights, X: Tensor) -> list[Tensor]:
    """The gates of `soft_galu`, computed explicitly."""

    def gate(q: Tensor) -> Tensor:
        return ref.soft_gate(q, BETA, EPSILON)

    return [gate(q) for q in ref.preactivations(layers, X, unit=lambda q: q * gate(q))]


def first_output(net: GatedNetwork, X: Tensor) -> Tensor:
    """f(x) of the package, (n,)."""
    with torch.no_grad():
        return net(X)[:, 0]
