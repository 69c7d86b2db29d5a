"""Networks that edit their input in place: results are those of a copy, and the user's own inputs stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_networks import check_ntk, settle
from torch import Tensor, nn

from pathlens import gated_twin, harden, models
from pathlens.kernels import LinearisedModel, gate_information, npk, ntk, overlap
from pathlens.paths import inputs as path_inputs
from pathlens.recording import Trajectory, record
from pathlens.testing.jacobians import network_jacobian


class _Shifted(nn.Module):
    """Subtracts from its input in place, then runs something whose parameters are in no linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("calls", torch.zeros(()))
        if kind == "batch-norm":
            self.part: nn.Module = nn.BatchNorm1d(3)
        elif kind == "transposed":
            self.part = nn.ConvTranspose1d(1, 1, 1)
        else:
            self.weight = nn.Parameter(torch.randn(3, 3))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        self.calls += 1  # a buffer that counts is harmless
        if self.kind == "batch-norm":
            h = self.part(x)
        elif self.kind == "transposed":
            h = self.part(x[:, None])[:, 0]
        else:
            h = x @ self.weight if self.kind == "matmul" else torch.einsum("ni,io->no", x, self.weight)
        return self.last(torch.relu(h))


KINDS = ["batch-norm", "matmul", "einsum", "transposed"]


@pytest.mark.parametrize("outputs", [0, "trace", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_tangent_kernels(kind: str, outputs: Any) -> None:
    net, X = settle(_Shifted(kind)), torch.randn(5, 3).double()
    own = X.clone()
    check_ntk(ntk(net, X, outputs=outputs), net, X, outputs=outputs)
    check_ntk(ntk(net, X, outputs=outputs, Y=X[:2]), net, X, X[:2].clone(), outputs=outputs)
    stream: Any = record(net, X, stream=True)
    check_ntk(ntk(net, stream, outputs=outputs), net, X, outputs=outputs)
    assert torch.equal(X, own)
    assert float(net.calls) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_linearised_models(kind: str) -> None:
    net, X = settle(_Shifted(kind)), torch.randn(5, 3).double()
    own, J = X.clone(), network_jacobian(net, X)
    model = LinearisedModel(net)
    f = net(X.clone()).detach()
    for _ in range(2):  # every product reads the same rows
        assert torch.allclose(model(X), f, rtol=0, atol=1e-12)
    cotangent = torch.randn(5, 3).double()
    pulled = torch.cat([g.flatten() for g in model.vjp(X, cotangent).values()])
    assert torch.allclose(pulled, torch.einsum("nkq,nk->q", J, cotangent), atol=1e-12)
    assert model.fit(X, cotangent, steps=3).residual < 1
    assert torch.equal(X, own)


def test_gate_functions_of_a_user() -> None:
    """The gates of a GDLN are a user's function, which may edit what it reads: the values read x itself."""
    plane = torch.randn(3, 4).double()

    def gates(x: Tensor) -> Tensor:
        return x.sub_(0.5) @ plane

    net = models.gdln(3, (4,), gates=gates, outputs=2, seed=0).double()
    plain = models.gdln(3, (4,), gates=lambda x: (x - 0.5) @ plane, outputs=2, seed=0).double()
    X = torch.randn(5, 3).double()
    own = X.clone()
    assert torch.equal(net(X), plain(X)) and torch.equal(X, own)
    for kernel in (overlap, npk, ntk):
        assert torch.equal(kernel(net, X).dense(), kernel(plain, X).dense())
    assert torch.equal(X, own)


def test_nothing_changes_the_inputs_of_a_user() -> None:
    X, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    own = X.clone()
    net = settle(_Shifted("batch-norm"))
    for stream in (False, True):
        record(net, X, stream=stream).rows(0, 3)
    Trajectory().append(net, X)
    twin = gated_twin(net, "relu", example=X[:2])
    path_inputs(twin, X)
    gate_information(twin, (X, X[:, :1]), (X, X[:, :1]))
    soft = models.dlgn(3, (4,), outputs=1, seed=0).double()
    harden(soft, (X, y), epochs=1, progress=False)
    assert torch.equal(X, own)
