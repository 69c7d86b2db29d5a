"""`inputs`: predictions as exact sums over the inputs at which paths start; for images, maps of evidence.

It works for any architecture, with convolutions and shortcuts, since single paths are not needed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import NotFiniteError, OptionError, RecordError, ShapeError
from pathlens.explanations import Explanation, r_squared, ratio
from pathlens.indexing import as_number
from pathlens.models import GatedNetwork
from pathlens.models.tracing import max_pools, unwrapped
from pathlens.plotting import get_axes, plot_sum
from pathlens.precision import exact_precision
from pathlens.recording import as_rows
from pathlens.recording.independence import check_row_independence
from pathlens.recording.inputs import output_width
from pathlens.recording.taking import check_net

_AT_ONCE = 64  # rows whose float64 activations are held at the same time


@dataclass(frozen=True, repr=False)
class Inputs(Explanation):
    """f = rest + Σ_j contribution of input j, for every row, exactly.

    Attributes
    ----------
    contributions : Tensor (n, …), float64
        Sum of all paths that start at each input; the shape of the inputs.
    rest : Tensor (n,), float64
        Paths that start at a bias (batch-norm has biases too, and so has a constant that is added to the input).
    f : Tensor (n,), float64
    cancellations : Tensor (n,)
        (|rest| + Σ_j |contribution|) / |f|.
    """

    contributions: Tensor
    rest: Tensor
    f: Tensor
    cancellations: Tensor

    def maps(self) -> Tensor:
        """Of images, the contributions of each pixel: (n, channels, height, width) → (n, height, width)."""
        if self.contributions.ndim != 4:
            raise ShapeError(
                f"Inputs.maps: the inputs have shape {tuple(self.contributions.shape[1:])}, and only images "
                "(channels, height, width) have maps. Use .contributions."
            )
        return self.contributions.sum(1)

    def table(self) -> dict[str, list[Any]]:
        """One row per row of X and input: its index, of images (channel, row, column), and its contribution."""
        row, *place = torch.cartesian_prod(*(torch.arange(s) for s in self.contributions.shape)).T.tolist()
        index = place[0] if len(place) == 1 else list(zip(*place))
        return {"row": row, "input": index, "contribution": self.contributions.flatten().tolist()}

    def _lines(self) -> list[str]:
        shape = " × ".join(str(s) for s in self.contributions.shape[1:])
        sizes = self.rest.abs() + self.contributions.abs().flatten(1).sum(1)
        share = float((self.rest.abs() / sizes).nan_to_num().mean())  # a row to which nothing contributes has no share
        return [f"{shape} inputs on {len(self.f)} rows; paths from biases are {share:.0%} of all |contributions|"]

    def plot(self, row: int = 0, ax: Any = None, *, names: Sequence[str] | None = None, k: int = 12) -> Any:
        """The map of one image, red for and blue against, white at zero; needs matplotlib.

        Of inputs (n, d) the k largest contributions as bars, with the `names` of the inputs.
        """
        row = as_number(row, len(self.f), "rows")
        if self.contributions.ndim == 2:
            return self._bars(row, ax, names, k)
        found = self.maps()[row].cpu()
        ax = get_axes(ax, "drawing a map of contributions")
        top = float(found.abs().max())
        drawn = ax.imshow(found.numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        ax.figure.colorbar(drawn, ax=ax, label="contribution to f")
        ax.set(xticks=[], yticks=[], title=f"f = {float(self.f[row]):.3g}, biases {float(self.rest[row]):.3g}")
        return ax

    def _bars(self, row: int, ax: Any, names: Sequence[str] | None, k: int) -> Any:
        values = self.contributions[row].cpu()
        if names is not None and len(names) != len(values):
            raise ShapeError(f"Inputs.plot: {len(names)} names for {len(values)} inputs. Give one for each.")
        order = values.abs().argsort(descending=True, stable=True).tolist()
        bars = [(float(values[j]), f"input {j}" if names is None else str(names[j])) for j in order[:k]]
        if order[k:]:
            bars.append((float(values[order[k:]].sum()), f"{len(order) - k} others"))
        bars.append((float(self.rest[row]), "biases"))
        return plot_sum(bars, ax, of="f", title=f"f = {float(self.f[row]):.3g}")


@torch.inference_mode(False)
@exact_precision()
def inputs(net: nn.Module, X: Any, *, output: int | Sequence[int] | Tensor = 0) -> Inputs:
    """Each prediction as a sum over the inputs at which paths start: pixels of an image, columns of a table.

    At fixed gates the value network is affine in its input, so that f = rest + Σ_j x_j ∂f/∂x_j exactly. The units that
    max-pooling selects are held fixed, as the gates are. A piecewise-constant network reads ones: its contributions are
    those of positions. For gates that read an encoded image (`models.PatchParts`), X is the code, and the map of a
    pixel is that of the patch around it.

    Parameters
    ----------
    net : GatedNetwork
        Of any architecture, in eval mode. For a plain module: ``gated_twin(net, "relu", example=X[:2])``.
    X : (n, …)
    output : int, or (n,) integers
        Which output f is, for all rows or for each: ``net(X).argmax(1)`` explains the predicted class.

    Returns
    -------
    Inputs
        Exact: r2 1, up to rounding.

    Examples
    --------
    >>> from pathlens import gated_twin, models
    >>> X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> net = gated_twin(models.ResNet((1,), (4,)), "dlgn", example=X[:2], gate="hard", seed=0).eval()
    >>> parts = inputs(net, X)
    >>> parts.maps().shape, torch.allclose(parts.maps().sum((1, 2)) + parts.rest, net(X)[:, 0].double(), atol=1e-5)
    (torch.Size([5, 8, 8]), True)
    """
    net = unwrapped(net)
    if not isinstance(net, GatedNetwork):
        raise RecordError(
            f"paths.inputs: expected a GatedNetwork, got {type(net).__name__}. Of a plain module with ReLUs, take "
            'gated_twin(net, "relu", example=X[:2]); of an encoding followed by a gated network, that network, on '
            "encoded inputs."
        )
    check_net(net)
    if net.needs_rows:
        raise RecordError("paths.inputs: gates from a table belong to numbered examples, not to inputs.")
    rows = as_rows(X, like=net)
    values = copy.deepcopy(net.values).double()
    pooled = bool(max_pools(values))
    chosen = torch.as_tensor(output).detach().to(rows.device)
    if chosen.dtype.is_floating_point or chosen.dtype == torch.bool or chosen.shape not in ((), rows.shape[:1]):
        raise OptionError(
            f"paths.inputs: output must be an integer, or one for each of the {len(rows)} rows, got {chosen.dtype} of "
            f"shape {tuple(chosen.shape)}."
        )
    output_width(net, rows, "paths.inputs")
    check_row_independence(net, rows)
    parts = zip(rows.split(_AT_ONCE), chosen.long().expand(len(rows)).split(_AT_ONCE))
    found = [_contributions(net, values, pooled, part, which) for part, which in parts]
    contributions, rest, f = (torch.cat(tensors) for tensors in zip(*found))
    ratios = ratio(contributions.abs().flatten(1).sum(1) + rest.abs(), f)
    total = contributions.flatten(1).sum(1) + rest
    return Inputs(r_squared(total, f), None, float(ratios.median()), net.gate_label, contributions, rest, f, ratios)


def _contributions(
    net: GatedNetwork, values: nn.Module, pooled: bool, x: Tensor, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one batch: x_j ∂f/∂x_j at the network's own gates, the output for x = 0 at these gates, and the output."""
    with torch.no_grad():
        gates = [g.double() for g in net.gates(x).values()]
        read = net.value_reads(x).double()
        rest = values(torch.zeros_like(read), *gates)
    if not bool(((output >= 0) & (output < rest.shape[1])).all()):
        bad = int(output[(output < 0) | (output >= rest.shape[1])][0])
        raise OptionError(f"paths.inputs: no output {bad}; the network has {rest.shape[1]}, numbered from 0.")
    each = torch.arange(len(x), device=x.device)
    with torch.enable_grad():
        read = read.requires_grad_()
        f = values(read, *gates)[each, output]
        (slope,) = torch.autograd.grad(f.sum(), read)
    if not bool(torch.isfinite(f).all()):
        raise NotFiniteError("paths.inputs: the network's output is NaN or infinite. Check its weights.")
    contributions, f = read.detach() * slope, f.detach()
    if pooled:  # at x = 0 other units are selected, and f does not contain their biases
        return contributions, f - contributions.flatten(1).sum(1), f
    return contributions, rest[each, output], f
