"""Gradients of parameters that belong to no recorded layer: batch-norm scales, embeddings, attention weights.

They are differentiated example by example. Linear and convolutional layers are cheaper, in `tangent` and `convolution`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pathlens.errors import RecordError
from pathlens.models.tracing import unwrapped
from pathlens.precision import exact_precision
from pathlens.recording import GatedNetwork
from pathlens.recording.inputs import call_on_copies


def differentiable(net: nn.Module) -> nn.Module:
    """The network to differentiate: straight-through gates are replaced by hard gates, which have no gradient."""
    net = unwrapped(net)
    if isinstance(net, GatedNetwork) and net.gate.hard and hasattr(net.gate, "beta"):
        return net.with_gate("hard")
    return net


class ParameterGradients:
    """∂f_k/∂θ of chosen parameters, one example at a time, by reverse-mode autograd.

    Parameters
    ----------
    net : nn.Module
        Copied, so that later training does not change the result.
    names : sequence of str
        Parameters.
    """

    def __init__(self, net: nn.Module, names: Sequence[str]) -> None:
        if getattr(net, "needs_rows", False):
            raise RecordError("ntk: parameters outside layers cannot be differentiated if gates come from a table.")
        self._net = copy.deepcopy(differentiable(net))
        state = {k: p.detach() for k, p in self._net.named_parameters()}
        self._chosen = {k: state[k] for k in names}
        self._rest = {k: v for k, v in state.items() if k not in self._chosen}
        self.size = sum(v.numel() for v in self._chosen.values())
        self._uses_vmap: bool | None = None  # whether the module runs under vmap; None before the first call

    def _output(self, parameters: dict[str, Tensor], x: Tensor, output: int) -> Tensor:
        return call_on_copies(self._net, x[None], parameters={**self._rest, **parameters}).reshape(-1)[output]

    @exact_precision()
    def __call__(self, x: Tensor, output: int) -> Tensor:
        """(rows of x, Q)."""
        if self._uses_vmap is not False:
            try:
                with warnings.catch_warnings():  # a slow batching rule is expected here
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    every = torch.func.vmap(torch.func.grad(self._output), in_dims=(None, 0, None))
                    rows = every(self._chosen, x, output)
                self._uses_vmap = True
                return torch.cat([rows[k].reshape(len(x), -1) for k in self._chosen], dim=1).detach()
            except RuntimeError:  # in-place operations or control flow that vmap does not support
                if self._uses_vmap:
                    raise
                self._uses_vmap = False
        return torch.stack([self._one(row, output) for row in x])

    def _one(self, x: Tensor, output: int) -> Tensor:
        with torch.enable_grad():
            leaves = {k: v.clone().requires_grad_() for k, v in self._chosen.items()}
            value = self._output(leaves, x, output)
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return torch.cat([(torch.zeros_like(v) if g is None else g).flatten() for g, v in zip(grads, leaves.values())])
