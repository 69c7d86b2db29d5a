"""A decision tree on the hard gates of a network: disjoint cells that approximate its output.

scikit-learn is loaded when a tree is grown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.explanations import Explanation, r_squared
from pathlens.paths.trellis import Trellis, check_positive, split, take_trellis
from pathlens.plotting import get_axes

_SHOWN = 8


@dataclass(frozen=True)
class GateRule:
    """One leaf: the cell where these gates are on or off, and the mean of f there.

    Attributes
    ----------
    conditions : tuple of (layer, unit, on)
        Layers and units numbered from 0; for a network with linear gates each is a half-space.
    value : float
        Mean of f over the rows of the cell.
    share : float
        Of the rows.
    """

    conditions: tuple[tuple[int, int, bool], ...]
    value: float
    share: float

    @property
    def text(self) -> str:
        """The conditions as text."""
        texts = (f"({layer}, {unit}) {'on' if on else 'off'}" for layer, unit, on in self.conditions)
        return " and ".join(texts) or "anything"

    def __str__(self) -> str:
        return f"f ≈ {self.value:.4g} where {self.text} ({100 * self.share:.1f} % of rows)"


@dataclass(frozen=True, repr=False)
class Tree(Explanation):
    """A decision tree on the hard gates: disjoint cells, each an intersection of gates on or off.

    Attributes
    ----------
    rules : tuple of GateRule
        One per leaf, largest share first. Exactly one holds for any input, so nothing cancels.
    """

    rules: tuple[GateRule, ...]

    def predict(self, net: nn.Module, X: Any) -> Tensor:
        """Predictions of the rules for other inputs of the same network, (n,), float64."""
        return self._predict(take_trellis("Tree.predict", net, X))

    def _predict(self, trellis: Trellis) -> Tensor:
        values = trellis.f.new_zeros(trellis.n)
        for rule in self.rules:
            holds = torch.ones(trellis.n, dtype=torch.bool, device=values.device)
            for layer, unit, on in rule.conditions:
                holds &= trellis.bits[layer][:, unit] == on
            values[holds] = rule.value
        return values

    def table(self) -> dict[str, list[Any]]:
        """One row per rule: its conditions, value and share of rows."""
        rules = self.rules
        values, shares = [rule.value for rule in rules], [rule.share for rule in rules]
        return {"conditions": [rule.text for rule in rules], "value": values, "share": shares}

    def _lines(self) -> list[str]:
        lines = [f"{len(self.rules)} disjoint cells, gates as (layer, unit), hard"]
        lines += [str(rule) for rule in self.rules[:_SHOWN]]
        return lines if len(self.rules) <= _SHOWN else [*lines, f"… and {len(self.rules) - _SHOWN} more rules"]

    def plot(self, ax: Any = None) -> Any:
        """Values of the cells, as wide as the share of rows in them; needs matplotlib."""
        ax = get_axes(ax, "drawing a tree of gates")
        rules = sorted(self.rules, key=lambda rule: rule.value)
        edges = np.cumsum([0.0, *(rule.share for rule in rules)])
        ax.stairs([rule.value for rule in rules], edges, fill=True)
        ax.set(xlabel="share of rows", ylabel="value of the cell", title=f"{len(rules)} cells, {self._score}")
        return ax


def tree(net: nn.Module, X: Any, *, leaves: int = 30, output: int = 0, validation: Any = 0.2, seed: int = 0) -> Tree:
    """A decision tree on the gate bits that approximates the network's output.

    Each leaf is the cell where some gates are on and others off: for a network with linear gates a polyhedron, and the
    cells do not overlap. Enough leaves reproduce a piecewise-constant network. For one that reads x, a leaf gives the
    mean over its cell; see the R².

    Parameters
    ----------
    net, X, output
        As for `pathlens.paths.top`.
    leaves : int
        Largest number of leaves.
    validation : float or inputs
        A share of the rows, drawn with `seed`, that is held out, or other inputs, on which `r2_held_out` is computed.
    seed : int

    Returns
    -------
    Tree

    Notes
    -----
    Greedy splits by variance (scikit-learn's regression tree, best first). Cost n·Σ_l w_l·leaves.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(8, 8), gate="hard", piecewise_constant=True, seed=0)
    >>> angles = torch.linspace(0, 6.28, 200)
    >>> small = tree(net, torch.stack([angles.cos(), angles.sin()], dim=1), leaves=20)
    >>> small.r2 > 0.99, small.cancellation, len(small.rules) <= 20
    (True, 1.0, True)
    """
    check_positive("paths.tree", leaves=leaves)
    whole = take_trellis("paths.tree", net, X, output=output)
    seen, unseen = split("paths.tree", net, whole, validation, seed)
    from sklearn.tree import DecisionTreeRegressor  # takes seconds to load, so arguments are checked first

    bits, f = torch.cat(seen.bits, dim=1).cpu().numpy(), seen.f[:, output]
    if leaves == 1:  # scikit-learn needs two
        rules: list[GateRule] = [GateRule((), float(f.mean()), 1.0)]
    else:
        fitted = DecisionTreeRegressor(max_leaf_nodes=leaves, random_state=seed).fit(bits, f.cpu().numpy())
        units = [(layer, unit) for layer, width in enumerate(seen.widths) for unit in range(width)]
        rules = _rules(fitted.tree_, units)
    made = Tree(0.0, None, 1.0, seen.label, tuple(sorted(rules, key=lambda rule: -rule.share)))
    judged = r_squared(made._predict(unseen), unseen.f[:, output])
    return replace(made, r2=r_squared(made._predict(seen), f), r2_held_out=judged)


def _rules(fitted: Any, units: list[tuple[int, int]]) -> list[GateRule]:
    """Leaves of a scikit-learn tree as rules."""
    found: list[GateRule] = []
    open_nodes: list[tuple[int, tuple[tuple[int, int, bool], ...]]] = [(0, ())]
    while open_nodes:
        node, conditions = open_nodes.pop()
        left, right = int(fitted.children_left[node]), int(fitted.children_right[node])
        if left < 0:
            share = float(fitted.n_node_samples[node] / fitted.n_node_samples[0])
            found.append(GateRule(tuple(sorted(conditions)), float(fitted.value[node, 0, 0]), share))
            continue
        layer, unit = units[int(fitted.feature[node])]
        open_nodes.append((right, (*conditions, (layer, unit, True))))
        open_nodes.append((left, (*conditions, (layer, unit, False))))
    return found
