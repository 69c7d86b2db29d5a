"""Remedies that hs.remedies compares: gradients of the gates weighted by the loss, and a penalty on path counts.

This module loads torch and is imported inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pathlens.models import GatedNetwork


class GatesApart(nn.Module):
    """A gated network that, in train mode, returns its outputs twice: for the gradients of the values and of the gates.

    Both halves of the columns contain the same numbers. The gradient of the first half reaches only the value network,
    the gradient of the second half only the gate source, so a loss can weight examples differently for the two. In eval
    mode the outputs are returned once.

    Parameters
    ----------
    net : GatedNetwork
        Must have a separate gate source, whose gates have a gradient.

    Examples
    --------
    >>> from pathlens import models
    >>> apart = GatesApart(models.dlgn(2, hidden=(4, 4), seed=0))
    >>> apart(torch.ones(3, 2)).shape, apart.eval()(torch.ones(3, 2)).shape
    (torch.Size([3, 2]), torch.Size([3, 1]))
    """

    def __init__(self, net: GatedNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, 2c) in train mode, (n, c) in eval mode."""
        if not self.training:
            return self.net(x)
        gates = list(self.net.gates(x).values())
        inputs = torch.ones_like(x) if self.net.value_input == "ones" else x
        fixed = {name: p.detach() for name, p in self.net.values.named_parameters()}
        for_values = self.net.values(inputs, *(g.detach() for g in gates))
        for_gates = functional_call(self.net.values, fixed, (inputs, *gates))
        return torch.cat([for_values, for_gates], dim=1)


@dataclass(frozen=True)
class Reweighted:
    """A loss that weights each example by its own loss ℓ_i: mean_i s_i ℓ_i with s_i = ℓ_i / mean ℓ.

    The weights s have no gradient. For outputs of :class:`GatesApart` only the half of the gates is weighted; the first
    half uses the plain mean. The loss does not know which examples are in the complex part.

    Parameters
    ----------
    outputs : int
        Columns of the network itself.
    labels : bool
        Cross-entropy of class labels instead of squared error.
    """

    outputs: int
    labels: bool = False

    def _rows(self, output: Tensor, target: Tensor) -> Tensor:
        if self.labels:
            return F.cross_entropy(output, target, reduction="none")
        return (output - target).square().mean(1)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor of shape ()."""
        plain = self._rows(output[:, : self.outputs], target)
        hard = self._rows(output[:, -self.outputs :], target)
        weights = (hard / hard.mean().clamp_min(torch.finfo(hard.dtype).tiny)).detach()
        weighted = (weights * hard).mean()
        return weighted if output.shape[1] == self.outputs else plain.mean() + weighted


@dataclass(frozen=True)
class BalancedPaths:
    """Penalty s·Var_i[log n_i] on a few inputs x_i, with n_i = ∏_l Σ_j g_{l,j}(x_i) the soft count of active paths.

    It is zero if all inputs have equally many active paths.

    Parameters
    ----------
    inputs : (k, d)
        Inputs at which paths are counted, on the device of the training.
    strength : float
        s.
    """

    inputs: Tensor = field(repr=False)
    strength: float = 0.1

    def __call__(self, net: nn.Module) -> Tensor:
        """The penalty of a gated network with soft gates, a tensor of shape ()."""
        assert isinstance(net, GatedNetwork)
        logs = [g.sum(1).log() for g in net.gates(self.inputs).values()]
        return self.strength * torch.stack(logs).sum(0).var(correction=0)
