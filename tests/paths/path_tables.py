"""All paths of a small network, one by one, from its weights and gates alone: what the tests compare with."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

import pathlens as pl
from pathlens.models import GatedNetwork

KINDS: dict[str, Any] = {
    "relu": pl.models.relu,
    "soft_relu": pl.models.soft_relu,
    "dln": pl.models.dln,
    "galu": pl.models.galu,
    "soft_galu": pl.models.soft_galu,
    "hard": lambda *a, **o: pl.models.dlgn(*a, gate="hard", **o),
    "soft": lambda *a, **o: pl.models.dlgn(*a, gate="soft", **o),
    "straight_through": lambda *a, **o: pl.models.dlgn(*a, gate="straight_through", **o),
    "pwc": lambda *a, **o: pl.models.dlgn(*a, gate="hard", piecewise_constant=True, **o),
    "soft_pwc": lambda *a, **o: pl.models.dlgn(*a, gate="soft", piecewise_constant=True, **o),
    "shallow": lambda *a, **o: pl.models.dlgn_shallow(*a, gate="hard", **o),
    "quadratic": lambda *a, **o: pl.models.quadratic(*a, gate="hard", **o),
}


def network(
    kind: str, inputs: int = 2, hidden: tuple[int, ...] = (4, 3, 5), outputs: int = 2, bias: bool = False, seed: int = 0
) -> GatedNetwork:
    """A float64 network of a kind."""
    return KINDS[kind](inputs, hidden, outputs, bias=bias, seed=seed).double()


def layers(net: GatedNetwork) -> list[Any]:
    """Value layers in order."""
    return [getattr(net.values, f"linear{i + 1}") for i in range(len(net.sites))] + [net.values.output]


def table(net: GatedNetwork, X: Tensor, output: int, include_inputs: bool = False) -> dict[tuple[int, ...], Tensor]:
    """Path → contributions (n,), every path by itself; −1 before the layer at whose bias it starts."""
    with torch.no_grad():
        gates = list(net.gates(X).values())
        x = torch.ones_like(X) if net.value_input == "ones" else X
        chain = layers(net)
        biased = chain[0].bias is not None
        widths = [g.shape[1] for g in gates]
        found: dict[tuple[int, ...], Tensor] = {}
        for start in range(len(widths) + 1):  # hidden layer at which the sequence of units starts
            if start and not biased:
                continue
            for units in itertools.product(*(range(w) for w in widths[start:])):
                tail = torch.ones(len(X), dtype=torch.float64)
                for layer, unit in enumerate(units, start=start):
                    tail = tail * gates[layer][:, unit]
                    below = chain[layer + 1].weight
                    tail = tail * below[units[layer - start + 1] if layer + 1 < len(widths) else output, unit]
                first = units[0] if units else output
                empty = (-1,) * start
                if start:
                    offset = () if not include_inputs else (-1,)
                    found[(*offset, *empty, *units)] = tail * chain[start].bias[first]
                elif include_inputs:
                    for i in range(X.shape[1]):
                        found[(i, *units)] = tail * x[:, i] * chain[0].weight[first, i]
                    if biased:
                        found[(-1, *units)] = tail * chain[0].bias[first]
                else:
                    found[units] = tail * chain[0](x)[:, first]
        return found


def check_ratios(got: Tensor, size: Tensor, f: Tensor) -> None:
    """Σ|v|/|f| row by row; 1 where nothing is active."""
    want = torch.where(size > 0, size / f.abs(), 1.0)
    assert torch.allclose(got, want, rtol=1e-9)


def large_table(net: GatedNetwork, X: Tensor, output: int) -> Tensor:
    """Contributions (n, Π w) of a network without biases, the last layer's unit running fastest."""
    with torch.no_grad():
        gates = list(net.gates(X).values())
        chain = layers(net)
        values = chain[0](torch.ones_like(X) if net.value_input == "ones" else X) * gates[0]
        last = values.shape[1]
        for layer, gate in zip(chain[1:-1], gates[1:]):
            values = values.view(len(X), -1, last)[..., None] * layer.weight.T * gate[:, None, None, :]
            last = gate.shape[1]
            values = values.reshape(len(X), -1)
        return (values.view(len(X), -1, last) * chain[-1].weight[output]).flatten(1)
