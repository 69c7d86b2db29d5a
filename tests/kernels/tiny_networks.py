"""Tiny templates, and the comparison of tangent kernels with brute force that the tests of kernels share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.testing.jacobians import kernel_of_jacobians, network_jacobian
from pathlens.testing.tolerance import assert_kernel_close


class ConvNet(nn.Module):
    """Two convolutions with ReLUs, then pooling or flattening, then a dense layer; every option off by default."""

    def __init__(
        self,
        dims: int = 1,
        channels: tuple[int, int, int] = (1, 2, 1),
        kernel: int = 3,
        padding: int = 1,
        stride: int = 1,
        mode: str = "zeros",
        dilation: int = 1,
        pool: str = "average",
        between: int = 0,
        norm: bool = False,
        shortcut: bool = False,
        reuse: bool = False,
        groups: int = 1,
        dense: int = 0,
        outputs: int = 1,
        size: int = 6,
        bias: bool = True,
    ) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d)[dims - 1]
        a, b, c = channels
        self.conv1 = conv(a, b, kernel, stride, padding, dilation, padding_mode=mode, bias=bias)
        self.conv2 = conv(b, c, kernel, 1, padding, dilation, groups, padding_mode=mode, bias=bias)
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d)[dims - 1](c) if norm else nn.Identity()
        self.average = (F.avg_pool1d, F.avg_pool2d)[dims - 1]
        self.between, self.shortcut, self.reuse, self.pool = between, shortcut, reuse, pool
        shape = self._features(torch.zeros(1, a, *(size,) * dims)).shape[1]
        self.hidden = nn.Linear(shape, dense, bias=bias) if dense else nn.Identity()
        self.dense = bool(dense)
        self.output = nn.Linear(dense or shape, outputs, bias=bias)

    def _features(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv1(x))
        if self.between:
            h = self.average(h, self.between)
        y = self.norm(self.conv2(h))
        y = F.relu(y + h if self.shortcut else y)
        if self.reuse:
            y = F.relu(self.conv2(y))
        return y.flatten(2).mean(2) if self.pool == "average" else torch.flatten(y, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self._features(x)
        return self.output(F.relu(self.hidden(y)) if self.dense else y)


def settle(net: nn.Module) -> nn.Module:
    """Double precision, eval mode, and batch statistics that are not those of initialisation."""
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                m.weight.uniform_(0.5, 2.0)
                m.bias.normal_()
                assert m.running_mean is not None and m.running_var is not None
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2.0)
    return net.double().eval()


def check_ntk(
    kernel: Any,
    net: nn.Module,
    X: Tensor,
    Y: Tensor | None = None,
    *,
    names: list[str] | None = None,
    outputs: str | int = "trace",
    zero: bool = False,
) -> Tensor:
    """Compare a kernel with the one of brute-force Jacobians, entries and diagonal; returns the latter."""
    left = network_jacobian(net, X, names)
    right = None if Y is None else network_jacobian(net, Y, names)
    want = kernel_of_jacobians(left, right, outputs)
    rows = kernel_of_jacobians(left, None, outputs).diagonal()
    cols = rows if right is None else kernel_of_jacobians(right, None, outputs).diagonal()
    assert zero or float(want.abs().max()) > 1e-6, "a kernel of zeros tests nothing"
    assert tuple(kernel.shape) == tuple(want.shape)
    assert kernel.symmetric == (Y is None)
    assert_kernel_close(kernel.dense(), want, rows, cols)
    if Y is None:
        gap = (kernel.diagonal() - rows).abs().max()
        assert float(gap) <= 1e-12 * max(float(rows.max()), 1e-300)
    return want
