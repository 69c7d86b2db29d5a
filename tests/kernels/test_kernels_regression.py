"""Kernel regression, classification and the information in gates, against dense formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens import models
from pathlens.errors import DTypeError, LabelError, NotFiniteError, OptionError, PathlensError, ShapeError, SolverError
from pathlens.kernels import (
    LinearisedModel,
    gate_information,
    kernel_classification,
    kernel_regression,
    leave_one_out,
    npk,
    ntk,
    nu,
    one_hot,
    overlap,
)


def data(n: int, m: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g).double(), torch.randn(m, 3, generator=g).double()


@pytest.mark.parametrize("kernel", [overlap, npk, ntk])
def test_ridge_regression_is_the_dense_formula(kernel: Any) -> None:
    X, Y = data(12, 5)
    net = models.dlgn(3, hidden=(32, 32), seed=0).double()
    y = torch.randn(12, 2).double()
    K, K_test = kernel(net, X), kernel(net, Y, Y=X)
    fit = kernel_regression(K, y, K_test, ridge=0.1)
    dense = K.dense()
    scale = float(dense.trace()) / 12
    want = K_test.dense() @ torch.linalg.solve(dense + 0.1 * scale * torch.eye(12).double(), y)
    assert torch.allclose(fit.predictions, want, rtol=1e-9, atol=1e-9)
    assert fit.residual < 1e-10
    by_matrices = kernel_regression(dense, y, K_test.dense(), ridge=0.1)
    assert torch.allclose(by_matrices.predictions, want, rtol=1e-9, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-30, 1e30), st.floats(1e-3, 1.0))
def test_the_ridge_means_the_same_for_every_size_of_kernel(size: float, ridge: float) -> None:
    X, Y = data(8, 4)
    K, K_test, y = X @ X.T + 1, Y @ X.T + 1, X[:, :1]
    one = kernel_regression(K, y, K_test, ridge=ridge).predictions
    assert torch.allclose(
        kernel_regression(K * size, y, K_test * size, ridge=ridge).predictions, one, rtol=1e-8, atol=1e-10
    )


def test_without_ridge_it_interpolates() -> None:
    X, _ = data(10, 1)
    net = models.relu(3, hidden=(64,), seed=0).double()
    K = ntk(net, X)
    y = torch.randn(10).double()
    assert torch.allclose(kernel_regression(K, y, K).predictions[:, 0], y, atol=1e-7)


def test_classification() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(150, 2, generator=g)
    labels = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long()
    net = models.relu(2, hidden=(64, 64), seed=0)
    K, K_test = ntk(net, X[:100]), ntk(net, X[100:], Y=X[:100])
    fit = kernel_classification(K, labels[:100], K_test, ridge=1e-3)
    assert fit.predictions.shape == (50, 4)
    assert float((fit.labels == labels[100:]).double().mean()) > 0.8
    assert torch.equal(fit.labels, fit.predictions.argmax(1))


def test_one_hot() -> None:
    y = one_hot(torch.tensor([2, 0]), classes=4, dtype=torch.float64)
    assert y.shape == (2, 4) and torch.allclose(y.sum(1), torch.zeros(2).double())
    assert torch.equal(y.argmax(1), torch.tensor([2, 0]))
    for bad in (torch.tensor([0.5]), torch.tensor([-1]), torch.tensor([[0]])):
        with pytest.raises(LabelError):
            one_hot(bad)
    with pytest.raises(LabelError, match="expected 0 to 1"):
        one_hot(torch.tensor([2]), classes=2)


def test_gates_that_know_more_predict_better() -> None:
    """Gates along the two axes hold the exclusive or; gates along the diagonal do not."""
    g = torch.Generator().manual_seed(1)
    X = torch.randn(240, 2, generator=g).double()  # in float32 rounding is on the verge of a warning, by threads
    y = (X[:, 0] * X[:, 1] > 0).long()

    def gates(normals: list[list[float]]) -> models.GatedNetwork:
        w = torch.tensor(normals).double()
        return models.gdln(2, hidden=(4, 4), gates=lambda x: (x @ w.T, x @ w.T), seed=0).double()

    good = gates([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    poor = gates([[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    train, test = (X[:160], y[:160]), (X[160:], y[160:])
    with pytest.raises(LabelError, match="shape"):
        gate_information(good, train, (X, y[:, None]))
    with pytest.raises(ShapeError, match=r"gate_information\(train\): .* pair"):
        gate_information(good, X, test)
    for kernel in ("overlap", "npk", "value"):
        best = gate_information(good, train, test, kernel=kernel)
        assert best.accuracy is not None and best.kernel == kernel
        if kernel == "overlap":
            assert best.accuracy > 0.95
            other = gate_information(poor, train, test, kernel=kernel)
            assert other.accuracy is not None and other.accuracy < 0.7
            assert best.mse < other.mse and best.train_residual < other.train_residual


def test_gate_information_of_a_regression_and_a_convolution() -> None:
    X = torch.randn(20, 1, 5).double()
    template = torch.nn.Sequential(
        torch.nn.Conv1d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 1)
    ).double()
    net = models.gated_twin(template, "galu", X[:2], seed=0)
    y = X[:, 0, :1]
    found = gate_information(net, (X[:14], y[:14]), (X[14:], y[14:]), soft=True)
    assert found.accuracy is None
    K, K_test = npk(net, X[:14], soft=True), npk(net, X[14:], Y=X[:14], soft=True)
    want = kernel_regression(K, y[:14], K_test, ridge=1e-4).predictions
    assert found.mse == pytest.approx(float((want - y[14:]).square().mean()), rel=1e-9)
    s = K.trace() / 14
    left = K.dense() / s @ found.fit.coefficients - y[:14]
    assert found.train_residual == pytest.approx(float(left.norm() / y[:14].norm()), rel=1e-6)


def test_bad_input() -> None:
    X, Y = data(6, 3)
    K, K_test, y = X @ X.T, Y @ X.T, X[:, 0]
    cases: list[tuple[type[PathlensError], Any]] = [
        (ShapeError, lambda: kernel_regression(K_test, y, K_test, ridge=0.1)),
        (ShapeError, lambda: kernel_regression(K, y, K_test.T, ridge=0.1)),
        (ShapeError, lambda: kernel_regression(K, y[:3], K_test, ridge=0.1)),
        (ShapeError, lambda: kernel_regression(y, y, K_test, ridge=0.1)),
        (DTypeError, lambda: kernel_regression(K, y, K_test.float(), ridge=0.1)),
        (OptionError, lambda: kernel_regression(K, y, K_test, ridge=-1.0)),
        (NotFiniteError, lambda: kernel_regression(K, y / 0, K_test, ridge=0.1)),
        (NotFiniteError, lambda: kernel_regression(K / 0, y, K_test, ridge=0.1)),
        (LabelError, lambda: kernel_classification(K, y, K_test, ridge=0.1)),
        (PathlensError, lambda: gate_information(models.relu(3), (X, y), (Y, y), kernel="ntk")),
        (ShapeError, lambda: gate_information(models.relu(3).double(), (X, y), (Y, y))),
        (ShapeError, lambda: gate_information(models.relu(3).double(), (X, X[:, :2]), (Y, Y[:, 0]))),
        (OptionError, lambda: gate_information(models.relu(3).double(), (X, y), (Y, y), kernel="value", soft=True)),
    ]
    for error, call in cases:
        with pytest.raises(error):
            call()


# --- leaving one row out -------------------------------------------------------------------------------------------


def noisy(n: int = 30, m: int = 200) -> tuple[torch.Tensor, ...]:
    X, Y = data(n, m)
    noise = torch.randn(n, generator=torch.Generator().manual_seed(5)).double()
    return X, torch.sin(X[:, 0]) + 0.5 * noise, Y, torch.sin(Y[:, 0])


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 3.0])
@pytest.mark.parametrize("n", [2, 13])
def test_leaving_one_row_out_is_fitting_without_it(n: int, ridge: float) -> None:
    X, _ = data(n, 1)
    K = ntk(models.dlgn(3, hidden=(16, 16), seed=0).double(), X)
    y, dense = torch.randn(n, 2, generator=torch.Generator().manual_seed(1)).double(), K.dense()
    added = ridge * float(dense.trace()) / n  # the same number, whichever row is left out
    want = torch.empty(n, 2).double()
    for i in range(n):
        rest = [j for j in range(n) if j != i]
        G = dense[rest][:, rest] + added * torch.eye(n - 1).double()
        want[i] = dense[i, rest] @ torch.linalg.solve(G, y[rest])
    assert torch.allclose(leave_one_out(K, y, ridge), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chosen_ridge_predicts_rows_that_are_left_out_best(dtype: torch.dtype) -> None:
    X, y, X_test, y_test = (t.to(dtype) for t in noisy())
    net = models.relu(3, hidden=(64, 64), seed=0).to(dtype)
    K, K_test = ntk(net, X), ntk(net, X_test, Y=X)
    fit = kernel_regression(K, y, K_test, ridge="auto")
    error = {r: float((leave_one_out(K, y, r)[:, 0] - y).square().mean()) for r in (fit.ridge, 1e-4, 1e-2, 1, 10)}
    assert min(error.values()) == pytest.approx(error[fit.ridge], rel=0.02)
    assert torch.equal(fit.predictions, kernel_regression(K, y, K_test, ridge=fit.ridge).predictions)
    little = kernel_regression(K, y, K_test, ridge=1e-4).predictions
    assert (fit.predictions[:, 0] - y_test).square().mean() < (little[:, 0] - y_test).square().mean()
    assert f"ridge {fit.ridge:.3g}" in repr(fit)


def test_a_ridge_is_chosen_for_labels_and_singular_kernels_too() -> None:
    X, y, X_test, _ = noisy()
    X = torch.cat([X, X])  # every row twice: what is left out is still there, so that the least ridge is best
    net, labels = models.relu(3, hidden=(128,), seed=0).double(), (torch.cat([y, y]) > 0).long()
    K, K_test = ntk(net, X), ntk(net, X_test, Y=X)
    assert kernel_classification(K, labels, K_test, ridge="auto").ridge < 1e-6
    found = gate_information(net, (X, labels), (X_test, (X_test[:, 0] > 0).long()), ridge="auto")
    assert found.fit.ridge > 0 and found.train_residual < 0.1
    with pytest.raises(SolverError, match="Pass a larger ridge"):
        leave_one_out(K, labels.double(), 0.0)
    for ridge in (-1, "best", float("inf"), float("nan")):
        with pytest.raises(OptionError, match="ridge must be a finite number"):
            leave_one_out(K, labels.double(), ridge)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_not_left_out_where_rounding_alone_makes_the_kernel_definite(seed: int) -> None:
    X = torch.randn(12, 20, generator=torch.Generator().manual_seed(seed)).double()
    X[1] = X[0]  # the least eigenvalue is zero, and comes out as 1e-17 of either sign
    with pytest.raises(SolverError, match="not positive definite to the precision"):
        leave_one_out(X @ X.T, X[:, 0], 0.0)


def test_results_say_what_they_are_and_not_all_their_numbers() -> None:
    x, t = torch.randn(5, 2).double(), torch.randn(3, 2).double()
    K, y = x @ x.T + torch.eye(5).double(), torch.randn(5).double()
    fit = kernel_regression(K, y, t @ x.T, ridge=0.1)
    assert repr(fit).startswith("KernelFit(3 × 1 predictions from 5 rows; cholesky, residual ")
    net = models.relu(2, (4,), seed=0).double()
    kernel = ntk(net, x)
    assert repr(kernel.solve(y, ridge=1.0)).startswith("Solution(5, cholesky, residual ")
    solved = repr(kernel.solve(y[:, None], ridge=1.0, method="cg", preconditioner=0))
    assert solved.startswith("Solution(5 × 1, cg, ") and "iterations, preconditioner of rank 0, residual" in solved
    found = kernel.eigsh(3)
    assert repr(found) == f"Eigenpairs(3 of 5: {float(found.values[0]):.4g} … {float(found.values[2]):.4g}; dense)"
    assert repr(kernel.eigsh(1)) == f"Eigenpairs(1 of 5: {float(found.values[0]):.4g}; dense)"
    model = LinearisedModel(net)
    assert repr(model) == "LinearisedModel(GatedNetwork, 12 parameters, not fitted)"
    model.fit(x, y[:, None])
    assert repr(model) == "LinearisedModel(GatedNetwork, 12 parameters, fitted)"


def test_targets_of_zero_are_fitted_by_any_gates() -> None:
    X, Y = data(8, 3)
    found = gate_information(models.relu(3, seed=0).double(), (X, torch.zeros(8)), (Y, torch.zeros(3)))
    assert found.mse == 0 and found.train_residual == 0


def test_targets_may_be_pandas_columns_with_labels_of_their_own() -> None:
    pandas = pytest.importorskip("pandas")
    X, Y = data(8, 3)
    net, y = models.relu(3, seed=0).double(), torch.randn(8).double()
    column, test = pandas.Series(y.numpy(), index=range(20, 28)), pandas.Series([0.1, 0.2, 0.3], index=[9, 5, 2])
    found = gate_information(net, (X, column), (Y, test))
    assert found.mse == gate_information(net, (X, y), (Y, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))).mse
    assert nu(ntk(net, X), column, ridge=0.1) == nu(ntk(net, X), y, ridge=0.1)
    assert nu([[0.1, 0.0], [0.0, 0.1]], [0.1, 0.2]).raw == pytest.approx(0.5, rel=1e-14)  # lists are not float32
