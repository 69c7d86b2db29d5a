"""Single paths: the largest ones, the contributions of given ones, and how far all of them cancel.

Sums over groups of paths live in `grouping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.budgets import blocks
from pathlens.errors import OptionError, ShapeError
from pathlens.explanations import MISLEADING, Explanation, r_squared, ratio
from pathlens.indexing import as_number
from pathlens.paths.trellis import Trellis, check_positive, path_text, reads_ones, take_trellis
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar

_CANDIDATES = 1 << 22  # numbers that one block of rows may compare at once


@dataclass(frozen=True, repr=False)
class TopPaths(Explanation):
    """The k largest paths of each row, and the remainder.

    Attributes
    ----------
    paths : Tensor (n, k, L), int64
        Units, one per hidden layer (before them the input node with ``include_inputs``), numbered from 0; −1 before
        the layer at whose bias a path starts. Rows beyond ``listed`` are −1 too.
    contributions : Tensor (n, k), float64
        Signed, largest |contribution| first; 0 beyond ``listed``.
    listed : Tensor (n,), int64
        How many paths are listed: fewer than k where fewer contribute at all.
    f : Tensor (n,), float64
        The output explained.
    remainder : Tensor (n,), float64
        f − Σ contributions: what all paths that are not listed add up to.
    cancellations : Tensor (n,)
        Σ|v|/|f| over all paths, per row.
    total : int
        Number of paths of the network, active or not.
    output : int
    """

    paths: Tensor
    contributions: Tensor
    listed: Tensor
    f: Tensor
    remainder: Tensor
    cancellations: Tensor
    total: int
    output: int

    def table(self) -> dict[str, list[Any]]:
        """One row per listed path of each row of X: its rank from 1, units and contribution."""
        places = [(row, i) for row, count in enumerate(self.listed.tolist()) for i in range(count)]
        return {
            "row": [row for row, _ in places],
            "rank": [i + 1 for _, i in places],
            "path": [path_text(self.paths[place].tolist()) for place in places],
            "contribution": [float(self.contributions[place]) for place in places],
        }

    def _lines(self) -> list[str]:
        n, k = self.contributions.shape
        lines = []
        if self.cancellation > MISLEADING:
            lines.append(
                "Warning: contributions of different paths cancel, so this list alone misleads. "
                "paths.groups, paths.tree and paths.refit explain more with fewer terms."
            )
        lines.append(f"the {k} largest of {self.total} paths to output {self.output}, {n} row{'s' if n > 1 else ''}")
        listed_sum = float(self.f[0] - self.remainder[0])
        lines.append(
            f"row 0: f = {float(self.f[0]):.4g} = listed {listed_sum:.4g} + remainder {float(self.remainder[0]):.4g}"
        )
        for i in range(min(int(self.listed[0]), 5)):
            lines.append(f"{float(self.contributions[0, i]):+.4g}  {path_text(self.paths[0, i].tolist())}")
        return lines

    def plot(self, row: int = 0, ax: Any = None) -> Any:
        """The running sum of the listed contributions of one row against f; needs matplotlib."""
        row = as_number(row, len(self.f), "rows")
        ax = get_axes(ax, "drawing the largest paths")
        sums = self.contributions[row, : int(self.listed[row])].cumsum(0)
        ax.plot(np.arange(1, len(sums) + 1), sums.cpu().numpy(), marker=".", label="sum of the largest paths")
        ax.axhline(float(self.f[row]), color="black", linestyle="--", label="f")
        ax.set(
            xlabel="paths summed, largest first",
            ylabel="output",
            title=f"row {row}: cancellation {float(self.cancellations[row]):.3g}",
        )
        ax.legend()
        return ax


def top(net: nn.Module, X: Any, *, k: int = 10, output: int = 0, include_inputs: bool = False) -> TopPaths:
    """The k paths of largest |contribution|, for each row, exactly and without enumeration.

    The contribution of a path π = (i_1, …, i_L) to output c is (U_1 x)_{i_1} · Π_l g_l(x)_{i_l} · Π_{l≥2} U_l[i_l,
    i_{l−1}] · U_{L+1}[c, i_L], and f_c(x) is the sum over all paths. A bias starts a path where it is added; that of
    the first layer belongs to where the path starts unless the input node is named.

    Parameters
    ----------
    net : GatedNetwork or nn.Module
        Fully connected. A piecewise-constant network reads ones in place of x. Gates are the network's own: hard, or
        soft where it is soft.
    X : (n, d), (d,) or Record
    k : int
        How many paths.
    output : int
    include_inputs : bool
        A path also names the network's input from which it starts. Operations on the inputs before the first layer (a
        flip, a normalisation, batch-norm) belong to the weights from inputs to units, and constants that they add to
        the first bias; they must be affine. Of a piecewise-constant network it names the position of a one.

    Returns
    -------
    TopPaths

    Notes
    -----
    Let m(node) be the largest |product| of weights and gates on any path from that node to the output, computed
    backwards. A partial path that ends in the node can be completed to a contribution of at most |its product|·m(node),
    and different partial paths are completed to different paths. So the partial paths of the k largest paths are among
    the k largest under this bound, and it is enough to keep k of them per layer. Equal contributions come in the order
    of their units; those that differ by rounding alone may change places. Cost n·Σ_l (w_l w_{l−1} + k w_l).

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(8, 8), gate="hard", seed=0)
    >>> largest = top(net, torch.tensor([1.0, 0.0]), k=3)
    >>> largest.paths[0].tolist(), bool(largest.listed[0] == 3)
    ([[1, 3], [1, 4], [2, 3]], True)
    >>> torch.allclose(largest.contributions.sum(1) + largest.remainder, largest.f)
    True
    """
    check_positive("paths.top", k=k)
    trellis = take_trellis("paths.top", net, X, include_inputs, output=output)
    paths, contributions = best(trellis, output, int(k))
    f = trellis.f[:, output]
    size = trellis.absolute().total()[:, output]
    listed_sum = contributions.sum(1)
    ratios = ratio(size, f)
    return TopPaths(
        r_squared(listed_sum, f),
        None,
        float(ratios.median()),
        trellis.label,
        paths,
        contributions,
        (contributions != 0).sum(1),
        f,
        f - listed_sum,
        ratios,
        trellis.number_of_paths,
        int(output),
    )


def _candidates(sizes: tuple[int, ...], k: int) -> int:
    """The most numbers that one row compares at once."""
    kept, most = min(k, sizes[0]), sizes[0]
    for before, here in pairwise(sizes):
        most = max(most, kept * here, before * here)
        kept = min(k, kept * here)
    return most


def best(trellis: Trellis, output: int, k: int) -> tuple[Tensor, Tensor]:
    """Paths (n, k, layers) and signed contributions (n, k) of the k largest; zeros and −1 beyond what contributes."""
    edge = max(1, _CANDIDATES // _candidates(trellis.sizes, k))
    paths, values = [], []
    with ProgressBar("largest paths", -(-trellis.n // edge)) as meter:
        for part in blocks(trellis.n, edge):
            found = _best(trellis.rows(slice(part.start, part.stop)), output, k)
            paths.append(found[0])
            values.append(found[1])
            meter.advance()
    return torch.cat(paths), torch.cat(values)


def _best(trellis: Trellis, output: int, k: int) -> tuple[Tensor, Tensor]:
    """The same for rows that are compared at once."""
    reach = [trellis.readout[output].abs().expand(trellis.n, -1)]
    for weight, gate in zip(reversed(trellis.weights), reversed(trellis.gates)):
        ends = reach[-1] * gate.abs()
        reach.append((ends[:, :, None] * weight.abs()).amax(1))
    reach.reverse()
    values, keep = _largest(trellis.start[:, None, :], reach[0], k)
    paths = keep[:, :, None]
    for weight, gate, ahead in zip(trellis.weights, trellis.gates, reach[1:]):
        grown = values[:, :, None] * weight.T[paths[:, :, -1]] * gate[:, None, :]
        values, keep = _largest(grown, ahead, k)
        before = (keep // grown.shape[2])[:, :, None].expand(-1, -1, paths.shape[2])
        paths = torch.cat([paths.gather(1, before), (keep % grown.shape[2])[:, :, None]], dim=2)
    values = values * trellis.readout[output][paths[:, :, -1]]
    order = values.abs().sort(dim=1, descending=True, stable=True).indices
    values, paths = values.gather(1, order), paths.gather(1, order[:, :, None].expand_as(paths))
    paths = torch.where(values[:, :, None] != 0, paths - int(trellis.biased), -1)
    short = k - values.shape[1]
    if short > 0:
        values = torch.nn.functional.pad(values, (0, short))
        paths = torch.nn.functional.pad(paths, (0, 0, 0, short), value=-1)
    return paths, values


def _largest(values: Tensor, ahead: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k partial paths of largest |value|·ahead, (n, k), and their flat indices, ascending: in the order of units.

    values (n, partial paths, nodes), ahead (n, nodes). Of those that equal the smallest kept, the first are taken.
    """
    bounds = (values.abs() * ahead[:, None, :]).flatten(1)
    k = min(k, bounds.shape[1])
    least = bounds.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = bounds > least, bounds == least
    missing = k - above.sum(1, keepdim=True)
    keep = (above | (equal & (equal.cumsum(1) <= missing))).nonzero()[:, 1].view(-1, k)
    return values.flatten(1).gather(1, keep), keep


# --- given paths -----------------------------------------------------------------------------------------------


def _units(what: str, paths: Any, sizes: tuple[int, ...], biased: bool) -> Tensor:
    """Paths as node numbers (p, layers), checked."""
    units = torch.as_tensor(paths).cpu()
    if units.ndim == 1:
        units = units[None]
    if units.ndim != 2 or units.shape[1] != len(sizes) or units.is_floating_point() or units.dtype == torch.bool:
        raise ShapeError(
            f"{what}: paths must be integers of shape (p, {len(sizes)}), one unit per layer, got "
            f"{tuple(units.shape)} of {units.dtype}."
        )
    widths = torch.tensor([s - biased for s in sizes])
    late = (units[:, 1:] < 0) & (units[:, :-1] >= 0)
    bad = (units < -int(biased)) | (units >= widths)
    if bool(bad.any()) or bool(late.any()):
        row = int((bad.any(1) | late.any(1)).nonzero()[0])
        hint = "−1 before the layer at whose bias a path starts" if biased else "there are no biases to start at"
        raise OptionError(
            f"{what}: path {row} is {units[row].tolist()}; layers have {widths.tolist()} units, from 0 ({hint})."
        )
    return units.long() + int(biased)


def _with_inputs(what: str, net: nn.Module, X: Any, paths: Any, output: int) -> tuple[Trellis, Tensor]:
    """The trellis of given paths: with the input node if they are one longer than the hidden layers."""
    trellis = take_trellis(what, net, X, output=output)
    shape = torch.as_tensor(paths).shape
    if shape and shape[-1] == len(trellis.bits) + 1:
        trellis = take_trellis(what, net, X, include_inputs=True)
    return trellis, _units(what, paths, trellis.sizes, trellis.biased).to(trellis.f.device)


def values(net: nn.Module, X: Any, paths: Any, *, output: int = 0) -> Tensor:
    """Contributions of given paths, (n, p), float64.

    Parameters
    ----------
    net, X, output
        As for `top`.
    paths : integers (p, L) or (p, L + 1) or one path
        Units, one per hidden layer; with the input node before them where one more is given. −1 before the layer at
        whose bias a path starts.

    Examples
    --------
    >>> from pathlens import models
    >>> net, x = models.dlgn(2, hidden=(8, 8), gate="hard", seed=0), torch.tensor([[1.0, 0.0]])
    >>> bool(values(net, x, [1, 3])[0, 0] == top(net, x, k=1).contributions[0, 0])
    True
    """
    trellis, units = _with_inputs("paths.values", net, X, paths, output)
    made = trellis.start[:, units[:, 0]]
    for t, (weight, gate) in enumerate(zip(trellis.weights, trellis.gates)):
        made = made * weight[units[:, t + 1], units[:, t]] * gate[:, units[:, t + 1]]
    return made * trellis.readout[output, units[:, -1]]


def strengths(net: nn.Module, X: Any, paths: Any, *, output: int = 0) -> Tensor:
    """Products of the value weights along given paths, (p,), float64: contributions without inputs and gates.

    Parameters
    ----------
    net, paths, output
        As for `values`. Without the input node a path has one strength only if the network reads ones (piecewise
        constant); otherwise name the input.
    X : (n, d)
        Any inputs of the network, from which the order of its layers is found.

    Notes
    -----
    The value v(p) of a path in the half-space paper, its strength in the DGN paper.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(4,), seed=0)
    >>> u1, u2 = net.values.linear1.weight, net.values.output.weight
    >>> bool(strengths(net, torch.zeros(1, 2), [[1, 3]])[0] == u1.double()[3, 1] * u2.double()[0, 3])
    True
    """
    trellis, units = _with_inputs("paths.strengths", net, X, paths, output)
    if trellis.include_inputs:
        made = torch.ones(len(units), dtype=torch.float64, device=units.device)
    elif reads_ones(net):
        whole = take_trellis("paths.strengths", net, X, include_inputs=True)
        opened = whole.weights[0].sum(1)  # ones enter at every input, and at the bias node
        made = opened[units[:, 0] + int(whole.biased) - int(trellis.biased)]
    else:
        raise OptionError(
            "paths.strengths: the network reads x, so a path has one strength per input node. Name it: (i_0, i_1, …)."
        )
    for t, weight in enumerate(trellis.weights):
        made = made * weight[units[:, t + 1], units[:, t]]
    return made * trellis.readout[output, units[:, -1]]


# --- cancellation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Cancellation:
    """How far the contributions of all paths cancel.

    Attributes
    ----------
    size : Tensor (n,)
        Σ|v| over all paths, exact.
    f : Tensor (n,)
        Σ v, the output.
    ratios : Tensor (n,)
        Σ|v|/|f|.
    gates : str
    """

    size: Tensor
    f: Tensor
    ratios: Tensor
    gates: str

    @property
    def median(self) -> float:
        """Median ratio over the rows."""
        return float(self.ratios.median())

    def __repr__(self) -> str:
        return (
            f"Cancellation: Σ|v|/|f| {self.median:.3g} (median of {len(self.f)} rows), largest "
            f"{float(self.ratios.max()):.3g}, gates {self.gates}"
        )


def cancellation(net: nn.Module, X: Any, *, output: int = 0, include_inputs: bool = False) -> Cancellation:
    """Σ|v| over all paths against |f|, per row, exactly and without enumeration.

    Σ|v| = |U_{L+1}| G_L |U_L| … G_1 |U_1 x|, a forward pass with absolute values (|U_1||x| where paths name inputs).

    Parameters
    ----------
    net, X, output, include_inputs
        As for `top`.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(8,) * 4, gate="hard", seed=0)
    >>> cancellation(net, torch.randn(20, 2, generator=torch.Generator().manual_seed(0))).median > 1
    True
    """
    trellis = take_trellis("paths.cancellation", net, X, include_inputs, output=output)
    size, f = trellis.absolute().total()[:, output], trellis.f[:, output]
    return Cancellation(size, f, ratio(size, f), trellis.label)
