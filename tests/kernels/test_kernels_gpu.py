"""Network kernels on a CUDA device equal those on the CPU; run with ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_networks import ConvNet, settle
from torch import nn

from pathlens import models
from pathlens.kernels import LinearisedModel, gate_information, npk, ntk, overlap
from pathlens.recording import record
from pathlens.testing.tolerance import assert_kernel_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kernel", [overlap, npk, ntk])
@pytest.mark.parametrize("shape", ["dense", "convolutional", "grouped"])
def test_cuda_equals_cpu(kernel: Any, shape: str) -> None:
    if shape == "convolutional":
        X = torch.randn(7, 1, 6).double()
        net: Any = settle(
            models.gated_twin(settle(ConvNet(channels=(1, 3, 3), norm=True, shortcut=True)), "dlgn", X[:2], seed=0)
        )
    elif shape == "grouped":
        X = torch.randn(7, 4, 6).double()
        layers = (nn.Conv1d(4, 8, 2, groups=2), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=8), nn.ReLU())
        template = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2)).double()
        net = models.gated_twin(template, "relu", X[:2], seed=0)
    else:
        X = torch.randn(7, 3).double()
        net = models.dlgn(3, hidden=(8, 6), outputs=2, seed=0).double()
    want = kernel(net, X).dense()
    cross = kernel(net, X[:3], columns=X[3:]).dense()
    net, X = net.cuda(), X.cuda()
    K = kernel(net, X)
    assert K.device.type == "cuda"
    assert_kernel_close(K.dense().cpu(), want, want.diagonal())
    assert torch.allclose(kernel(net, X[:3], columns=X[3:]).dense().cpu(), cross, rtol=1e-10, atol=1e-12)
    if kernel is ntk:
        stream = record(net, X, stream=True)
        assert_kernel_close(ntk(net, stream).dense().cpu(), want, want.diagonal())
        full = ntk(net.cpu(), X.cpu(), outputs="full").dense()
        assert_kernel_close(ntk(net.cuda(), stream, outputs="full").dense().cpu(), full, full.diagonal())


def test_predicting_on_cuda() -> None:
    net, X = models.relu(3, hidden=(32, 32), seed=0).cuda(), torch.randn(40, 3).cuda()
    y = (X[:, 0] > 0).long()
    found = gate_information(net, (X[:30], y[:30]), (X[30:], y[30:]))
    assert found.accuracy is not None and found.accuracy > 0.5
    assert LinearisedModel(net).fit(X, X[:, :1], tol=1e-3).residual < 0.5
