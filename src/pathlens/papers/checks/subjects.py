"""The networks that checks are run on, and how their weights are read for the reference side.

Small, float64, from fixed seeds. May import models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathlens import models
from pathlens.models import GatedNetwork
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.reference import Weights

BETA, EPSILON = 4.0, 0.125  # exact in single precision too, which is how a network keeps them


def build(kind: str, d: int, hidden: Sequence[int], seed: int = 0, **options: Any) -> GatedNetwork:
    """A named network in float64; weights are scaled up so that nothing is tiny.

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


def set_values(net: GatedNetwork, weights: Weights) -> GatedNetwork:
    """Give the value network these weights, in place."""
    with torch.no_grad():
        for p, W in zip(net.values.parameters(), weights):
            p.copy_(W)
    return net


def set_table(net: GatedNetwork, gates: Weights) -> GatedNetwork:
    """Give a network with fixed random gates (FRG) this table, in place."""
    assert net.source is not None
    for bits, g in zip(net.source.buffers(), gates):
        bits.copy_(g)
    return net


def soft_galu(widths: Sequence[int]) -> GatedNetwork:
    """Soft-GaLU as the DGN paper has it: hidden units of the gate network are q·χ_ε(−βq), two inputs."""
    return build("soft_galu", 2, widths, gate_activation="soft", beta=BETA, epsilon=EPSILON)


def soft_gates(layers: Weights, X: Tensor) -> list[Tensor]:
    """The gates of `soft_galu`, written out."""

    def gate(q: Tensor) -> Tensor:
        return ref.soft_gate(q, BETA, EPSILON)

    return [gate(q) for q in ref.scores(layers, X, unit=lambda q: q * gate(q))]


def first_output(net: GatedNetwork, X: Tensor) -> Tensor:
    """f(x) of the package, (n,)."""
    with torch.no_grad():
        return net(X)[:, 0]
