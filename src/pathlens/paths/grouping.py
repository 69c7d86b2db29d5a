"""Exact decompositions of every prediction into sums of paths: by the units of a layer, or by clusters of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.explanations import Explanation, r_squared, ratio
from pathlens.paths.trellis import take_trellis
from pathlens.plotting import get_axes

_SHOWN = 8


@dataclass(frozen=True, repr=False)
class PathGroups(Explanation):
    """f = rest + Σ_g contribution of group g, for every row, exactly.

    Attributes
    ----------
    contributions : Tensor (n, G), float64
        Sum of the paths of each group.
    rest : Tensor (n,), float64
        Paths that pass no unit of the layer: those that start at a later bias. Zero without biases.
    names : tuple of G str
    f : Tensor (n,), float64
    cancellations : Tensor (n,)
        (|rest| + Σ_g |contribution|) / |f|.
    curve : tuple of G floats
        R² of the rest and the j + 1 groups of largest mean |contribution|, in the order of ``order``.
    order : tuple of G int
        Groups by mean |contribution|, largest first.
    """

    contributions: Tensor
    rest: Tensor
    names: tuple[str, ...]
    f: Tensor
    cancellations: Tensor
    curve: tuple[float, ...]
    order: tuple[int, ...]

    def needed(self, share: float = 0.9) -> int:
        """How many groups, largest first, reach at least this R² to f; all of them if fewer never do."""
        return next((j + 1 for j, r2 in enumerate(self.curve) if r2 >= share), len(self.curve))

    def merge(self, labels: Sequence[Any] | np.ndarray | Tensor) -> PathGroups:
        """Add up the groups that have the same label, such as units whose half-spaces are the same.

        Parameters
        ----------
        labels : sequence of G
            One label per group, of any kind that can be compared; new groups come in order of first appearance.

        Notes
        -----
        The sums stay exact whatever the labels are. Members of a merged group act on one half-space only if the labels
        were chosen so.

        Examples
        --------
        >>> from pathlens import models
        >>> X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
        >>> units = groups(models.dlgn(2, hidden=(4, 3), gate="hard", seed=0), X)
        >>> units.merge(["a", "b", "a"]).names
        ('a', 'b')
        """
        labels = labels.tolist() if isinstance(labels, (np.ndarray, Tensor)) else list(labels)
        if len(labels) != len(self.names):
            raise ShapeError(
                f"PathGroups.merge: {len(labels)} labels for {len(self.names)} groups. Give one per group."
            )
        found = dict.fromkeys(labels)
        sums = [self.contributions[:, [i for i, own in enumerate(labels) if own == label]].sum(1) for label in found]
        return _groups(torch.stack(sums, dim=1), self.rest, tuple(str(label) for label in found), self.f, self.gates)

    def table(self) -> dict[str, list[Any]]:
        """One row per group, largest first: mean |contribution|, and the R² of it and all larger groups."""
        size = self.contributions.abs().mean(0)[list(self.order)]
        names = [self.names[g] for g in self.order]
        return {"group": names, "mean |contribution|": size.tolist(), "cumulative r2": list(self.curve)}

    def _lines(self) -> list[str]:
        n, count = self.contributions.shape
        few, most = self.needed(0.9), self.needed(0.99)
        lines = [f"{count} groups on {n} rows; the largest {few} give R² 0.9, the largest {most} give 0.99"]
        names, sizes, _ = self.table().values()
        lines += [f"{name}: mean |contribution| {size:.3g}" for name, size in zip(names[:_SHOWN], sizes)]
        if count > _SHOWN:
            lines.append(f"… and {count - _SHOWN} smaller ones")
        return lines

    def plot(self, ax: Any = None) -> Any:
        """Mean |contribution| of each group, and the R² of the largest ones together; needs matplotlib."""
        ax = get_axes(ax, "drawing groups of paths")
        names, sizes, _ = self.table().values()
        where = range(len(self.order))
        ax.bar(where, sizes, color="tab:blue")
        ax.set(xlabel="group, largest first", ylabel="mean |contribution|")
        ax.set_xticks(list(where), names, rotation=90, fontsize="small")
        right = ax.twinx()
        right.plot(where, self.curve, color="tab:orange", marker=".")
        right.set_ylabel("R² of the largest groups", color="tab:orange")
        right.set_ylim(min(0.0, *self.curve), 1.02)
        ax.set_title(f"cancellation {self.cancellation:.3g}")
        return ax


def _groups(contributions: Tensor, rest: Tensor, names: tuple[str, ...], f: Tensor, gates: str) -> PathGroups:
    order = contributions.abs().mean(0).sort(descending=True, stable=True).indices
    sums = rest[:, None] + contributions[:, order].cumsum(1)
    ratios = ratio(contributions.abs().sum(1) + rest.abs(), f)
    return PathGroups(
        r_squared(rest + contributions.sum(1), f),
        None,
        float(ratios.median()),
        gates,
        contributions,
        rest,
        names,
        f,
        ratios,
        tuple(r_squared(partial, f) for partial in sums.T),
        tuple(order.tolist()),
    )


def groups(
    net: nn.Module,
    X: Any,
    *,
    by: str | int | tuple[str | int, int] = "last",
    labels: Sequence[Any] | np.ndarray | Tensor | None = None,
    output: int = 0,
) -> PathGroups:
    """Each prediction as a sum over the units of one layer, each with the sum of all paths through it.

    The paths through unit i of layer l add up to h_{l,i}(x) · ∂f/∂h_{l,i} at fixed gates, a forward and a backward
    pass. For the last layer that is h_{L,i}·U_{L+1}[c, i], which is zero outside the half-space of unit i.

    Parameters
    ----------
    net, X, output
        As for `pathlens.paths.top`.
    by : "last", int, str or (layer, unit)
        A hidden layer, numbered from 0 or by the name of its gate site, or one of its units: then the two groups are
        the paths through that unit, and those through the others of its layer.
    labels : sequence of w_l, optional
        Clusters of the layer's units, such as ``regions.halfspaces(net).groups(angle=1).labels(site, w)``; the units of
        a cluster are added up, as by `PathGroups.merge`.

    Returns
    -------
    PathGroups
        Exact: r2 1, up to rounding, for all groups together; `PathGroups.curve` is the R² of the largest.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> parts = groups(models.dlgn(2, hidden=(8, 8), gate="hard", seed=0), X)
    >>> parts.contributions.shape, torch.allclose(parts.contributions.sum(1) + parts.rest, parts.f)
    (torch.Size([50, 8]), True)
    """
    trellis = take_trellis("paths.groups", net, X, output=output)
    unit = None
    if isinstance(by, tuple):
        if len(by) != 2:
            raise OptionError(f"paths.groups: by={by!r}, expected a layer or a pair (layer, unit).")
        by, unit = by
    layer = trellis.layer("paths.groups", by)
    through = trellis.prefixes()[layer] * trellis.suffixes(output)[layer]
    rest = through[:, 0] if trellis.biased else through.new_zeros(trellis.n)
    names = tuple(f"{trellis.sites[layer]}[{i}]" for i in range(trellis.widths[layer]))
    made = _groups(through[:, int(trellis.biased) :], rest, names, trellis.f[:, output], trellis.label)
    if unit is not None:
        if isinstance(unit, bool) or not isinstance(unit, Integral) or not 0 <= unit < trellis.widths[layer]:
            raise OptionError(
                f"paths.groups: no unit {unit!r}; layer {layer} has {trellis.widths[layer]}, numbered from 0."
            )
        if labels is not None:
            raise OptionError("paths.groups: labels and a single unit contradict each other. Give by=layer.")
        name = made.names[unit]
        labels = [name if i == unit else f"other units of {trellis.sites[layer]}" for i in range(len(made.names))]
        return made.merge(labels)
    return made if labels is None else made.merge(labels)
