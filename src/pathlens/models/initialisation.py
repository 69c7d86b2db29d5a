"""Initialisation of linear and convolutional weights, reproducible from a seed.

Weights only; which parts of a gated network are initialised, and from which seed, is decided in `network.py`.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import nn

from pathlens.errors import OptionError, unknown_name

_SCHEMES = ("default", "he", "preserve", "bernoulli")
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


@dataclass(frozen=True)
class Init:
    """How weights are drawn.

    Parameters
    ----------
    scheme : {"default", "he", "preserve", "bernoulli"}
        ``default`` is each module's own `reset_parameters` (for linear layers U(±1/√fan_in)); ``he`` is
        N(0, 2/fan_in); ``preserve`` is N(0, 1/(fan_in·E[g²])), which keeps the size of the signal through gates of
        mean square E[g²] (a deep network with soft gates, whose mean is one half, needs it to start);
        ``bernoulli`` is ±σ with equal probability (DGN, Assumption 1).
    sigma : float, optional
        σ of ``bernoulli``; without it √(2/fan_in).
    """

    scheme: str = "default"
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise unknown_name("initialisation", self.scheme, _SCHEMES)
        if self.sigma is not None and (self.scheme != "bernoulli" or not self.sigma > 0):
            raise OptionError(
                f"Init: sigma={self.sigma} needs scheme 'bernoulli' (here {self.scheme!r}) and sigma > 0."
            )

    def apply(self, module: nn.Module, gate_square: float = 1.0, ungated: Container[str] = ()) -> None:
        """Draw every weight of `module` from the global generator, children before parents.

        `gate_square` is E[g²] of the gates that its layers read; the layers named in `ungated` read none.
        """
        layers = [(name, m) for name, m in module.named_modules() if hasattr(m, "reset_parameters")]
        for name, p in module.named_parameters():
            if not any(not layer or name.startswith(f"{layer}.") for layer, _ in layers):
                raise OptionError(
                    f"Parameter '{name}' of shape {tuple(p.shape)} cannot be drawn anew: its module has no "
                    "reset_parameters. Move it into a module of its own that has one, or keep the weights "
                    "(no seed, and gates_from='dependent' or a checkpoint)."
                )
        for name, layer in reversed(layers):
            layer.reset_parameters()
            if self.scheme != "default" and isinstance(layer, _WEIGHTED):
                self._draw(layer, 1.0 if name in ungated else gate_square)

    def _draw(self, layer: nn.Module, gate_square: float) -> None:
        assert isinstance(layer, _WEIGHTED)
        fan_in: float = layer.weight[0].numel()  # terms in the sum of one output
        if isinstance(layer, _TRANSPOSED):  # the mean over outputs
            fan_in = layer.weight[:, 0].numel() / layer.groups / math.prod(layer.stride)
        with torch.no_grad():
            if self.scheme == "bernoulli":
                sigma = math.sqrt(2 / fan_in) if self.sigma is None else self.sigma
                layer.weight.bernoulli_(0.5).mul_(2 * sigma).sub_(sigma)
            else:
                variance = 2 / fan_in if self.scheme == "he" else 1 / (fan_in * gate_square)
                layer.weight.normal_(0.0, math.sqrt(variance))
            if layer.bias is not None:
                layer.bias.zero_()
