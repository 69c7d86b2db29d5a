"""Gated networks of circular convolutions on random signals, for Figure 9 and section 4.

Torch is imported inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-10  # largest error of an identity in float64


def circular_network(length: int, channels: tuple[int, ...], kernel: int, kind: str, seed: int, **options: Any) -> Any:
    """A gated circular convolutional network in float64; if it has one output channel, its last weight is one."""
    import torch

    from pathlens.models import CircularConvNet, gated_twin

    template = CircularConvNet(length, channels, kernel, **options).double()
    net = gated_twin(template, kind, example=torch.zeros(2, channels[0], length, dtype=torch.float64), seed=seed)
    if channels[-1] == 1:
        with torch.no_grad():
            net.values.get_parameter("stack.output.weight").fill_(1.0)
    return net


def signals(n: int, length: int, seed: int) -> Tensor:
    """Random signals of one channel, (n, 1, length)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, length, dtype=torch.float64, generator=generator)
