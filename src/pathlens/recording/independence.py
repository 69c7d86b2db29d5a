"""Checks that rows of a batch are computed independently: the output of one must not depend on the others."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from pathlens.errors import RecordError
from pathlens.models import GatedNetwork
from pathlens.models.sources import FunctionSource
from pathlens.models.tensors import tensors_in
from pathlens.precision import exact_precision
from pathlens.recording.inputs import call_on_copies, computes_in

_ROW_BY_ROW = (nn.Linear, nn.ReLU, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Flatten, nn.Identity)
_FEW = 5  # rows that are compared
_ROUNDING = 100.0  # machine epsilons by which the size of a batch may change an output without a second look
_TRIES = 4  # changed weights that show how much rounding may do


def is_row_independent(net: nn.Module) -> bool:
    """Whether the kind of a network shows that it computes every row independently.

    `gated_twin` refuses templates that mix rows, and the named constructors build none; only gates that are a function
    of the user may mix them.
    """
    if isinstance(net, GatedNetwork):
        return not isinstance(net.source, FunctionSource)
    plain = isinstance(net, nn.Sequential) and all(type(m) in _ROW_BY_ROW for m in net)
    return plain and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@exact_precision()
def check_row_independence(net: nn.Module, x: Tensor, f: Tensor | None = None, first: Tensor | None = None) -> None:
    """Refuse a network whose output for a row depends on the other rows of the batch.

    The first row is run alone, a few others without it, and the outputs are compared with those of the batch. If they
    differ by more than rounding, this is repeated in float64, with the network's weights and with weights that differ
    by 1e-10: a difference that such a change causes too (by many layers, or by gates at their boundary) is not mixing.

    Parameters
    ----------
    net : nn.Module
        In eval mode.
    x : Tensor, shape (n, ...)
    f : Tensor, shape (n, c), optional
        Outputs for x. Without them, a few rows are run together.
    first : Tensor, optional
        Outputs for the first row alone.

    Notes
    -----
    Costs a forward pass of five rows, and nothing for networks that cannot mix rows.
    """
    if len(x) < 2 or is_row_independent(net):
        return
    if isinstance(net, GatedNetwork):  # a small change of their scores does not change hard gates
        assert net.source is not None
        net, f, first = net.source, None, None
    index = sorted({round(i * (len(x) - 1) / (_FEW - 1)) for i in range(_FEW)})
    few = x[index]
    with torch.no_grad():
        together = _outputs(net, few) if f is None else f[index]
        scale = together if f is None else f
        if _gap(together, _apart(net, few, first), scale) <= _ROUNDING * torch.finfo(together.dtype).eps:
            return
        gap = _mixing(net, few)
    if gap > 0:
        raise RecordError(
            f"record: the network's output for a row changes by {min(gap, 1e9):.1e} (relative to the largest output) "
            "when the other rows of the batch are left out. It mixes rows, so that single rows have no gates and "
            "gradients. Remove operations across the batch, such as a mean, softmax or norm over dimension 0."
        )


def _outputs(net: nn.Module, x: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Outputs, or scores of gates, for rows x: (n, c)."""
    out = call_on_copies(net, x, parameters=parameters)
    return torch.cat([t.detach().reshape(len(x), -1) for t in tensors_in(out)], dim=1)


def _apart(net: nn.Module, x: Tensor, first: Tensor | None = None) -> list[Tensor]:
    """Outputs of the first row alone, and of the others without it."""
    return [_outputs(net, x[:1]) if first is None else first.detach().reshape(1, -1), _outputs(net, x[1:])]


def _gap(f: Tensor, parts: list[Tensor], scale: Tensor) -> float:
    """Largest difference, relative to the largest number of `scale`; infinite where one of two alone is finite."""
    if any(part.shape[1] != f.shape[1] for part in parts):
        return math.inf
    other = torch.cat(parts)
    found, largest = float((f - other).abs().max()), float(scale.abs().max())
    if not math.isfinite(found + largest):
        if not torch.equal(f.isfinite(), other.isfinite()):
            return math.inf
        found, largest = (float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in (f - other, scale))
    return found / largest if found else 0.0


def _mixing(net: nn.Module, x: Tensor) -> float:
    """How much a row's outputs depend on the others, relative; 0 where rounding may be the cause."""
    try:
        wide = copy.deepcopy(net).double()
        return _beyond_noise(wide, x.double() if x.is_floating_point() else x, change=1e-10, least=1e-9)
    except (RuntimeError, TypeError):  # it creates tensors of a fixed dtype, or cannot be copied
        eps = torch.finfo(computes_in(net, x)).eps
        return _beyond_noise(net, x, change=32 * eps, least=1000 * eps)


def _beyond_noise(net: nn.Module, x: Tensor, change: float, least: float) -> float:
    f = _outputs(net, x)
    gap = _gap(f, _apart(net, x), f)
    generator = torch.Generator().manual_seed(0)
    noise = 0.0
    for _ in range(_TRIES):
        changes = ((k, p, torch.randn(p.shape, generator=generator).to(p)) for k, p in net.named_parameters())
        moved = _outputs(net, x, {name: p * (1 + change * by) for name, p, by in changes})
        noise = max(noise, _gap(f, [moved], f))
    return gap if gap > max(10 * noise, least) else 0.0
