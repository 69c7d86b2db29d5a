"""Fitting the values alone, on fixed gates: exact least squares, and batch statistics.

With fixed gates a network is linear in each of its value layers, so that for squared losses the best weights of one
layer, the others given, come from one linear system.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pathlens.models import GatedNetwork
from pathlens.progress import ProgressBar
from pathlens.recording import record
from pathlens.training.inputs import mse

_BLOCK = 1024  # rows whose features are held at once
_LARGEST = 4096  # unknowns of one linear system: 134 MB, and a minute on two cores
_ENOUGH = 1e-4  # the smallest relative decrease of the loss for another pass


def can_solve(net: GatedNetwork, x: Tensor) -> bool:
    """Whether `least_squares` can fit every value layer: none is too large, and there is no batch-norm among them."""
    probe = record(_exact(net), x[:1].double())
    sizes = [layer.outputs * (layer.inputs + 1) for layer in probe.layers if layer.part == "value"]
    return max(sizes, default=0) <= _LARGEST and not any(name.startswith("values.") for name in probe.untracked)


def _exact(net: GatedNetwork) -> GatedNetwork:
    """A copy in float64 and eval mode all of whose values count as trainable."""
    clone = copy.deepcopy(net).double().eval()
    for p in clone.values.parameters():
        p.requires_grad_()
    return clone


def least_squares(
    net: GatedNetwork,
    x: Tensor,
    y: Tensor,
    *,
    sweeps: int = 10,
    damping: float = 1e-6,
    validation: tuple[Tensor, Tensor] | None = None,
    progress: bool = True,
) -> list[float]:
    """Fit the values of a network with fixed gates to real targets, layer by layer, in place.

    For layer l with weights U, f(x) = Σ_ij U_ij D_i(x) A_j(x), with A the input of the layer and D the sensitivity of f
    to its output. Each step solves min_δ Σ_n (y − f − Σ_ij δ_ij D_i A_j)² + λ Σ_ij δ_ij² exactly in float64, from
    the last layer to the first, so that the loss never rises.

    Parameters
    ----------
    net : GatedNetwork
        With hard or soft gates; they are not changed.
    x, y : Tensor (n, ...), (n, c)
    sweeps : int
        Largest number of passes over the layers; fewer if a pass does not lower the loss.
    damping : float
        λ as a share of Σ_n Σ_ij (D_i A_j)². It hardly changes the loss on the rows, but keeps the values small in cells
        without rows: on the circle, without it, the loss between the rows was up to 15 times that on them.
    validation : (Tensor, Tensor), optional
        Held-out rows: of the weights before and after every pass, the best there are kept.

    Returns
    -------
    list of float
        Mean squared error on the rows before, and after every pass.

    Notes
    -----
    A layer of p weights costs O(n c p²) time and O(p²) memory.
    """
    exact = _exact(net)
    x64, y64 = x.double(), y.double()
    held = None if validation is None else (validation[0].double(), validation[1].double())
    losses = [_loss(exact, x64, y64)]
    best = (_loss(exact, *held) if held is not None else losses[0], copy.deepcopy(exact.state_dict()))
    names = [layer.name for layer in record(exact, x64[:1]).layers if layer.part == "value"]
    with ProgressBar("fitting values", sweeps * len(names)) as meter:
        for _ in range(sweeps):
            for name in reversed(names):
                _solve_layer(exact, name, x64, y64, damping)
                if progress:
                    meter.advance()
            losses.append(_loss(exact, x64, y64))
            score = _loss(exact, *held) if held is not None else losses[-1]
            if score < best[0]:
                best = (score, copy.deepcopy(exact.state_dict()))
            if losses[-1] > losses[-2] * (1 - _ENOUGH):
                break
    net.load_state_dict(best[1])  # rounds to the network's own dtype
    return losses


def _loss(net: GatedNetwork, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(mse(torch.cat([net(part.clone()) for part in x.split(_BLOCK)]), y))


def _solve_layer(net: GatedNetwork, name: str, x: Tensor, y: Tensor, damping: float) -> None:
    """Damped least squares over one layer's weights and bias; not changed if rounding would increase the loss."""
    source = record(net, x)
    layer = source.layers[[item.name for item in source.layers].index(name)]
    weight = net.get_parameter(layer.parameters[0])
    bias = net.get_parameter(layer.parameters[1]) if layer.bias else None
    size = weight.numel() + (0 if bias is None else bias.numel())
    gram = torch.zeros(size, size, dtype=torch.float64, device=x.device)
    right = torch.zeros(size, dtype=torch.float64, device=x.device)
    for lo in range(0, len(x), _BLOCK):
        part = source.rows(lo, min(lo + _BLOCK, len(x)))
        a = part.inputs(name)
        for k in range(source.outputs):
            d = part.sensitivities(name, k)
            features = torch.einsum("npm,npi->nmi", d, a).flatten(1)
            if bias is not None:
                features = torch.cat([features, d.sum(1)], dim=1)
            gram += features.T @ features
            right += features.T @ (y[lo : lo + len(a), k] - part.f[:, k])
    weightless = float(gram.trace()) == 0  # f does not depend on this layer: a later one is zero
    gram.diagonal().add_(1.0 if weightless else damping * gram.trace())
    step = torch.cholesky_solve(right[:, None], torch.linalg.cholesky(gram))[:, 0]
    before, saved = _loss(net, x, y), [p.detach().clone() for p in (weight, bias) if p is not None]
    with torch.no_grad():
        weight.add_(step[: weight.numel()].view_as(weight))
        if bias is not None:
            bias.add_(step[weight.numel() :])
        if not _loss(net, x, y) <= before:
            for p, old in zip((weight, bias), saved):
                if p is not None:
                    p.copy_(old)


# --- batch-norm ------------------------------------------------------------------------------------------------


def _batch_norms(net: GatedNetwork) -> list[nn.modules.batchnorm._BatchNorm]:
    found = (m for m in net.values.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [m for m in found if m.track_running_stats]


def has_batch_norm(net: GatedNetwork) -> bool:
    """Whether the value network has batch-norm with running statistics."""
    return bool(_batch_norms(net))


def recalibrate(net: GatedNetwork, x: Tensor, batch: int) -> None:
    """Recompute the batch statistics of the values as means over the batches of x; those of gates do not change."""
    norms = _batch_norms(net)
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    modes = {m: m.training for m in net.modules()}
    net.eval()
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # the plain mean over batches
        m.train()
    with torch.no_grad():
        for part in x.split(max(batch, 2)):
            if len(part) > 1:
                net(part.clone())
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    for module, training in modes.items():
        module.training = training
