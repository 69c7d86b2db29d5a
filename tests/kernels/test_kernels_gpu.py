"""Network kernels on a CUDA device equal those on the CPU; run with ``pytest -m gpu``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_networks import ConvNet, settle
from torch import nn

from pathlens import models
from pathlens.kernels import LinearisedModel, gate_information, npk, ntk, overlap
from pathlens.precision import exact_precision
from pathlens.recording import record
from pathlens.testing.tolerance import assert_kernel_close, scaled_error

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
    cross = kernel(net, X[:3], Y=X[3:]).dense()
    net, X = net.cuda(), X.cuda()
    K = kernel(net, X)
    assert K.device.type == "cuda"
    assert_kernel_close(K.dense().cpu(), want, want.diagonal())
    assert torch.allclose(kernel(net, X[:3], Y=X[3:]).dense().cpu(), cross, rtol=1e-10, atol=1e-12)
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


@pytest.fixture
def tf32() -> Iterator[None]:
    """A process that allows TF32 in convolutions (cuDNN's default) and in matrix products."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that these names are deprecated
        before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "high"
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def _warmed(net: nn.Module, X: torch.Tensor) -> nn.Module:
    """In eval mode, with batch statistics of these rows, so that every layer's numbers are of moderate size."""
    net.cuda().train()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = None  # the plain mean
    with torch.no_grad():
        net(X)
    return net.eval()


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    X = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    return _warmed(models.ResNet((2, 2, 2, 2), (64, 128, 256, 512), outputs=2), X), X


def _gconv() -> tuple[nn.Module, torch.Tensor]:
    X = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    return models.gconv(outputs=2, bias=True).cuda().eval(), X


@pytest.mark.parametrize("make", [_resnet, _gconv])
def test_float32_kernels_are_exact_where_the_process_allows_tf32(make: Any, tf32: None) -> None:
    net, X = make()
    want = ntk(copy.deepcopy(net).double(), X.double()).dense()
    error = scaled_error(ntk(net, X).dense(), want, want.diagonal())
    assert error <= 1e-5
    stream = record(net, X, stream=True)  # rows are recomputed when a tile is asked for
    assert scaled_error(ntk(net, stream).dense(), want, want.diagonal()) <= 1e-5
    if torch.cuda.get_device_capability() >= (8, 0) and torch.version.cuda is not None:
        with exact_precision(False):  # asked for otherwise: the test can fail
            reduced = scaled_error(ntk(net, X).dense(), want, want.diagonal())
        assert reduced > 2 * error


def test_float32_path_kernels_are_exact_where_the_process_allows_tf32(tf32: None) -> None:
    X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
    net = models.gated_twin(
        models.gconv(10, channels=(3, 16, 16), dense=(32,), bias=True), "relu", X[:2].cpu(), seed=0
    ).cuda()
    want = npk(copy.deepcopy(net).double(), X.double()).dense()
    assert scaled_error(npk(net, X).dense(), want, want.diagonal()) <= 1e-5
