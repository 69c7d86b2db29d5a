"""The linearised model against dense Jacobians and against kernel regression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_networks import ConvNet, settle
from torch import nn

from pathlens import models
from pathlens.errors import (
    DTypeError,
    LabelError,
    NotFiniteError,
    OptionError,
    PathlensError,
    RecordError,
    ShapeError,
    SolverError,
)
from pathlens.kernels import LinearisedModel, ntk
from pathlens.testing.jacobians import network_jacobian


def problem(outputs: int = 2) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    return net, torch.randn(7, 3).double(), torch.randn(7, outputs).double(), torch.randn(4, 3).double()


def dense_solution(
    net: nn.Module, X: torch.Tensor, y: torch.Tensor, Z: torch.Tensor, ridge: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Δ, predictions on Z) by the normal equations of the dense Jacobian; least norm without ridge."""
    J, JZ = network_jacobian(net, X).flatten(0, 1), network_jacobian(net, Z)
    r = (y - net(X).detach()).flatten()
    K = J @ J.T + ridge * torch.eye(len(J)).double()
    delta = J.T @ torch.linalg.solve(K, r)
    return delta, net(Z).detach() + JZ @ delta


@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_products(batch_size: int) -> None:
    net, X, y, _ = problem()
    model = LinearisedModel(net, batch_size=batch_size)
    J = network_jacobian(net, X)
    direction = {k: torch.randn_like(p) for k, p in net.named_parameters()}
    value, pushed = model.jvp(X, direction)
    flat = torch.cat([direction[k].flatten() for k, _ in net.named_parameters()])
    assert torch.allclose(value, net(X).detach(), rtol=1e-12)
    assert torch.allclose(pushed, J @ flat, rtol=1e-11)
    pulled = torch.cat([g.flatten() for g in model.vjp(X, y).values()])
    assert torch.allclose(pulled, torch.einsum("nkq,nk->q", J, y), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_conjugate_gradients_find_the_least_squares_solution(ridge: float) -> None:
    net, X, y, Z = problem()
    model = LinearisedModel(net, batch_size=3)
    fit = model.fit(X, y, ridge=ridge, tol=1e-12)
    delta, want = dense_solution(net, X, y, Z, ridge)
    found = torch.cat([v.flatten() for v in model.delta.values()])
    assert torch.allclose(found, delta, rtol=1e-6, atol=1e-9)
    assert torch.allclose(model(Z), want, rtol=1e-6, atol=1e-8)
    assert fit.converged and fit.iterations <= 60 and len(fit.history) == fit.iterations + 1
    left = float((model(X) - y).norm() / (net(X).detach() - y).norm())
    assert fit.residual == pytest.approx(left, rel=1e-6, abs=1e-8)
    assert (fit.residual < 1e-8) == (ridge == 0)


def test_the_kernel_gives_the_same_predictions() -> None:
    net, X, y, Z = problem()
    model = LinearisedModel(net)
    model.fit(X, y, tol=1e-13)
    K, K_test = ntk(net, X, outputs="full"), ntk(net, Z, Y=X, outputs="full")
    alpha = K.solve((y - net(X).detach()).flatten()).solution
    want = net(Z).detach() + (K_test @ alpha).reshape(4, 2)
    assert torch.allclose(model(Z), want, rtol=1e-6, atol=1e-7)


def test_gradient_descent_follows_the_kernel() -> None:
    net, X, y, _ = problem(1)
    model = LinearisedModel(net)
    top = float(ntk(net, X).eigsh(1).values[0])
    assert model.largest_eigenvalue(X) == pytest.approx(top, rel=1e-3)
    size, steps = 0.5 / top, 25
    fit = model.fit(X, y, method="gd", steps=steps, step_size=size, tol=0.0)
    error = net(X).detach() - y
    K = ntk(net, X).dense()
    want = torch.linalg.matrix_power(torch.eye(7).double() - size * K, steps) @ error
    assert torch.allclose(model(X) - y, want, rtol=1e-8, atol=1e-10)
    assert fit.iterations == steps and not fit.converged
    assert all(b <= a + 1e-12 for a, b in zip(fit.history, fit.history[1:]))
    assert model.fit(X, y, method="gd", steps=30).residual < 1
    with pytest.raises(SolverError, match="diverges"):
        model.fit(X, y, method="gd", step_size=100 / top, steps=200)


def test_convolutions_gates_and_labels() -> None:
    X = torch.randn(9, 1, 6).double()
    template = settle(ConvNet(channels=(1, 4, 4), norm=True, outputs=3))
    net = settle(models.gated_twin(template, "dlgn", X[:2], seed=0))
    labels = torch.arange(9) % 3
    model = LinearisedModel(net, batch_size=4)
    fit = model.fit(X, labels, steps=300)
    assert fit.residual < 1e-2
    assert torch.equal(model(X).argmax(1), labels)


def test_it_does_not_follow_the_network_and_frozen_parameters_stay() -> None:
    net, X, _, _ = problem()
    net[2].requires_grad_(False)  # type: ignore[index]
    model = LinearisedModel(net)
    assert set(model.delta) == {"0.weight", "0.bias"}
    assert set(LinearisedModel(net, frozen=True).delta) == {k for k, _ in net.named_parameters()}
    before = model(X)
    for p in net.parameters():
        p.data.zero_()
    assert torch.equal(model(X), before)


def test_straight_through_gates_are_hard() -> None:
    net = models.dlgn(3, hidden=(4,), gate="straight_through", seed=0).double()
    X = torch.randn(5, 3).double()
    pulled = LinearisedModel(net).vjp(X, torch.ones(5, 1).double())
    assert all(float(g.abs().max()) == 0 for k, g in pulled.items() if k.startswith("source."))


def test_bad_input() -> None:
    net, X, y, _ = problem()
    model = LinearisedModel(net)
    frozen = nn.Linear(3, 1).double().requires_grad_(False)
    normed = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    cases: list[tuple[type[PathlensError], Any]] = [
        (OptionError, lambda: LinearisedModel(net, batch_size=0)),
        (RecordError, lambda: LinearisedModel(frozen)),
        (RecordError, lambda: LinearisedModel(models.frg(3, examples=7))),
        (RecordError, lambda: LinearisedModel(normed)(X)),
        (OptionError, lambda: model.fit(X, y, method="adam")),
        (OptionError, lambda: model.fit(X, y, ridge=-1.0)),
        (OptionError, lambda: model.fit(X, y, ridge=float("inf"))),
        (NotFiniteError, lambda: model.fit(X, y * float("nan"))),
        (OptionError, lambda: model.fit(X, y, step_size=0.1)),
        (ShapeError, lambda: model.fit(X, y[:, :1])),
        (LabelError, lambda: model.fit(X, torch.arange(7))),
        (DTypeError, lambda: model(X.float())),
    ]
    for error, call in cases:
        with pytest.raises(error):
            call()
