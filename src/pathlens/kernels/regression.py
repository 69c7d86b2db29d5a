"""Predicting with a kernel: ridge regression, classification by one-hot targets, and the information in gates.

Kernels are operators or matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.data.inputs import as_numbers, as_pair
from pathlens.errors import LabelError, OptionError, ShapeError, SolverError, unknown_name
from pathlens.kernels.measures import as_operator, as_targets
from pathlens.kernels.overlap import npk, overlap
from pathlens.kernels.tangent import ntk
from pathlens.linops import Eigenpairs, KernelOperator
from pathlens.linops.factors import require_alike


@dataclass(frozen=True)
class KernelFit:
    """Result of kernel regression.

    Attributes
    ----------
    predictions : (m, c)
        On the test rows; after `kernel_classification` one column per class.
    coefficients : (n, c)
        α with predictions = (K_test / s) α, where s is the mean of K_train's diagonal.
    residual : float
        ‖(K/s + ridge·I)α − y‖ / ‖y‖ of the linear system.
    iterations : int
        Of conjugate gradients; 0 for Cholesky.
    method : str
    ridge : float
        As given, or as chosen by ``ridge="auto"``.
    """

    predictions: Tensor
    coefficients: Tensor
    residual: float
    iterations: int
    method: str
    ridge: float

    @property
    def labels(self) -> Tensor:
        """The class with the largest prediction, (m,)."""
        return self.predictions.argmax(1)

    def __repr__(self) -> str:
        (m, c), n = self.predictions.shape, len(self.coefficients)
        steps = f", {self.iterations} iterations" if self.iterations else ""
        return (
            f"KernelFit({m} × {c} predictions from {n} rows; {self.method}{steps}, residual {self.residual:.1e}, "
            f"ridge {self.ridge:.3g})"
        )


def _operator(kernel: Any, name: str) -> KernelOperator:
    return as_operator(kernel, "kernel regression", name, dtype=None)


def one_hot(labels: Any, *, classes: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Class labels as targets, (n, c): 1 − 1/c in the column of the class and −1/c elsewhere.

    The mean over classes is subtracted, because a kernel without a constant feature cannot fit it.

    Examples
    --------
    >>> one_hot(torch.tensor([0, 1]))
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]])
    """
    y = as_numbers(labels)
    if y.ndim != 1 or y.dtype.is_floating_point or y.dtype == torch.bool:
        raise LabelError(f"Labels must be integers of shape (n,), got {y.dtype} of shape {tuple(y.shape)}.")
    found = int(y.max()) + 1 if y.numel() else 0
    c = found if classes is None else classes
    if int(y.min()) < 0 or found > c:
        raise LabelError(f"Labels run from {int(y.min())} to {int(y.max())}, expected 0 to {c - 1}. Set classes.")
    return torch.nn.functional.one_hot(y.long(), c).to(dtype) - 1 / c


def _targets(y: Any, train: KernelOperator) -> Tensor:
    return as_targets(y, train.shape[0], "kernel regression", train.device, train.dtype)


def _left_out(pairs: Eigenpairs, y: Tensor, ridge: float) -> Tensor:
    """Error of the prediction for each row from all other rows, (n, c): −α_i / (G⁻¹)_ii, float64."""
    vectors, gains = pairs.vectors.double(), 1 / (pairs.values.double() + ridge)
    return -(vectors @ (gains[:, None] * (vectors.T @ y.double()))) / (vectors.square() @ gains)[:, None]


def _chosen_ridge(train: KernelOperator, y: Tensor) -> float:
    """The ridge with the least squared leave-one-out error, among eight per decade."""
    pairs = train.normalised("n").eigsh(train.shape[0])
    largest, smallest = float(pairs.values[0]), float(pairs.values[-1])
    # smaller ridges are dominated by rounding; with larger ones all predictions are near zero
    low = max(1e-10, 10 * torch.finfo(train.dtype).eps * largest, -2 * smallest)
    ridges = np.geomspace(low, 10 * largest, 2 + int(8 * math.log10(10 * largest / low))).tolist()
    return min(ridges, key=lambda ridge: float(_left_out(pairs, y, ridge).square().mean()))


def leave_one_out(K_train: Any, y: Any, ridge: float) -> Tensor:
    """Predictions of kernel regression for every training row from all other rows, (n, c), in closed form.

    ŷ_i = y_i − α_i / (G⁻¹)_ii with G = K/s + ridge·I, α = G⁻¹y and s = tr K / n of all rows.

    Parameters
    ----------
    K_train, y, ridge
        As in `kernel_regression`; K/s + ridge·I must be positive definite.

    Notes
    -----
    Exact. One eigendecomposition, 9n³ operations and 4n² numbers.

    Examples
    --------
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> leave_one_out(x @ x.T, 2 * x[:, 0], ridge=1e-4).round(decimals=2)
    tensor([[2.],
            [4.],
            [6.]])
    """
    train = _operator(K_train, "K_train")
    targets = _targets(y, train)
    if not (isinstance(ridge, Real) and 0 <= ridge < math.inf):
        raise OptionError(f"leave_one_out: ridge must be a number that is finite and not negative, got {ridge!r}.")
    pairs = train.normalised("n").eigsh(train.shape[0])
    largest, smallest = float(pairs.values[0]), float(pairs.values[-1]) + ridge
    if not smallest > 4 * torch.finfo(train.dtype).eps * largest:  # rounding dominates
        raise SolverError(
            f"leave_one_out: K/s + ridge·I with ridge = {ridge:g} is not positive definite to the precision of "
            f"{train.dtype} (its eigenvalues run from {smallest:.1e} to {largest:.1e}). Pass a larger ridge."
        )
    return targets + _left_out(pairs, targets, float(ridge)).to(targets.dtype)


def kernel_regression(
    K_train: Any, y: Any, K_test: Any, *, ridge: float | str = 0.0, method: str = "auto", tol: float | None = None
) -> KernelFit:
    """Kernel ridge regression: predictions K_test (K_train + ridge·s·I)⁻¹ y with s = tr K_train / n.

    Parameters
    ----------
    K_train : KernelOperator or (n, n)
    y : (n,) or (n, c)
        Targets.
    K_test : KernelOperator or (m, n)
        Test rows against training columns, e.g. ``ntk(net, X_test, X_train)``.
    ridge : float or "auto"
        In units of the mean diagonal, so that a value means the same for kernels of any scale. 0 interpolates, unless
        K_train is singular. "auto" chooses the ridge with the least squared error in `leave_one_out`.
    method, tol
        Of the solver, as in ``K.solve``.

    Returns
    -------
    KernelFit

    Notes
    -----
    n³/3 operations by Cholesky if 2n² numbers fit the kernel's budget, else conjugate gradients. Choosing the ridge
    computes all eigenpairs: 9n³ operations and 4n² numbers, which must fit the budget.

    Examples
    --------
    >>> x, x_test = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])
    >>> kernel_regression(x @ x.T + 1, torch.tensor([1.0, 2.0]), x_test @ x.T + 1).predictions.round(decimals=4)
    tensor([[3.]])
    """
    train, test = _operator(K_train, "K_train"), _operator(K_test, "K_test")
    n, m = train.shape
    if n != m or test.shape[1] != n:
        raise ShapeError(
            f"kernel regression: K_train is {n} × {m} and K_test {test.shape[0]} × {test.shape[1]}; expected n × n and "
            "m × n. Build K_test with the training inputs as columns."
        )
    require_alike("kernel regression", ("K_train", "K_test"), train, test, "Convert one of them.")
    if ridge != "auto" and not (isinstance(ridge, Real) and ridge >= 0):
        raise OptionError(f"kernel regression: ridge must be a number that is not negative, or 'auto', got {ridge!r}.")
    targets = _targets(y, train)
    used = _chosen_ridge(train, targets) if ridge == "auto" else float(ridge)
    solved = train.normalised("n").solve(targets, ridge=used, method=method, tol=tol)
    predictions = (test * (n / train.trace())) @ solved.solution
    return KernelFit(predictions, solved.solution, solved.residual, solved.iterations, solved.method, used)


def kernel_classification(
    K_train: Any,
    labels: Any,
    K_test: Any,
    *,
    ridge: float | str = 0.0,
    classes: int | None = None,
    method: str = "auto",
    tol: float | None = None,
) -> KernelFit:
    """Classify by regression on one-hot targets; ``fit.labels`` are the classes with the largest prediction.

    Parameters
    ----------
    labels : (n,) integers in 0 … classes − 1
    classes : int, optional
        Default: the largest label plus one.
    K_train, K_test, ridge, method, tol
        As in `kernel_regression`.

    Examples
    --------
    >>> x, x_test = torch.tensor([[1.0, 0.1], [-1.0, 0.2]]), torch.tensor([[2.0, 0.0], [-0.5, 0.0]])
    >>> kernel_classification(x @ x.T, torch.tensor([1, 0]), x_test @ x.T, ridge=0.1).labels
    tensor([1, 0])
    """
    train = _operator(K_train, "K_train")
    y = one_hot(labels, classes=classes, dtype=train.dtype)
    return kernel_regression(train, y, K_test, ridge=ridge, method=method, tol=tol)


# --- information in gates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateInformation:
    """How well the gates of a network predict targets.

    Attributes
    ----------
    kernel : str
        The kernel of the gates.
    mse : float
        Mean squared error on the test rows (of one-hot targets, for labels).
    accuracy : float or None
        On the test rows; None if targets are not labels.
    train_residual : float
        ‖K α − y‖ / ‖y‖ on the training rows: 0 if the gates can fit the targets.
    fit : KernelFit
    """

    kernel: str
    mse: float
    accuracy: float | None
    train_residual: float
    fit: KernelFit


def gate_information(
    net: nn.Module,
    train: Any,
    test: Any,
    *,
    kernel: str = "npk",
    soft: bool = False,
    ridge: float | str = 1e-4,
    classes: int | None = None,
    max_bytes: int | None = None,
) -> GateInformation:
    """Information in the gates of a network: how well values trained on them generalise (NPF Definition 5.1).

    The definition trains the values from scratch with fixed gates. Here this is done in the limit of wide value
    networks, in which training is kernel regression with the neural path kernel of the gates (Theorem 5.1), so that the
    result does not depend on step size or seed. The network's own values are used for ``kernel="value"`` only.

    Parameters
    ----------
    net : nn.Module
        A gated network, or a fully connected ReLU module.
    train, test : data with targets
        A pair (X, y), or any form that `pathlens.data.as_pair` reads. Integer targets are classes, floats (n,) or
        (n, c) are regressed.
    kernel : {"npk", "overlap", "value"}
        Path features; paths only, as for a piecewise constant network; or the value part of the tangent kernel at the
        network's present values, which a finite network with these values would follow.
    soft : bool
        Use soft gate values in the path kernels.
    ridge : float or "auto"
        As in `kernel_regression`. Path kernels are often singular, so that a positive one is needed.
    classes : int, optional
        Number of classes. Default: the largest label plus one.
    max_bytes : int, optional
        Memory budget of the kernels.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (X[:, 0] * X[:, 1] > 0).long()
    >>> gate_information(models.relu(2, hidden=(64, 64), seed=0), (X[:40], y[:40]), (X[40:], y[40:])).accuracy > 0.8
    True
    """
    builders = {"npk": npk, "overlap": overlap, "value": ntk}
    if kernel not in builders:
        raise unknown_name("kernel of the gates", kernel, builders)
    if soft and kernel == "value":
        raise OptionError("gate_information: soft=True is for path kernels; kernel='value' uses the network's gates.")
    options: dict[str, Any] = {"part": "value"} if kernel == "value" else {"soft": soft}
    build: Any = builders[kernel]
    (X, y), (X_test, y_test) = (
        as_pair(train, where="gate_information(train)"),
        as_pair(test, where="gate_information(test)"),
    )
    K = build(net, X, max_bytes=max_bytes, **options)
    K_test = build(net, X_test, Y=X, max_bytes=max_bytes, **options)
    y, y_test = as_numbers(y).cpu(), as_numbers(y_test).cpu()
    labelled = not y.dtype.is_floating_point
    if labelled and classes is None:
        classes = int(max(y.max(), y_test.max())) + 1

    def as_columns(t: Tensor) -> Tensor:
        return one_hot(t, classes=classes, dtype=K.dtype) if labelled else t.to(K.dtype).reshape(len(t), -1)

    targets, wanted = as_columns(y), as_columns(y_test)
    if len(wanted) != K_test.shape[0]:
        raise ShapeError(f"gate_information: {K_test.shape[0]} test inputs and {len(wanted)} test targets.")
    if wanted.shape[1] != targets.shape[1]:
        raise ShapeError(
            f"gate_information: {targets.shape[1]} targets per training row and {wanted.shape[1]} per test row."
        )
    fit = kernel_regression(K, targets, K_test, ridge=ridge)
    # (K/s)α − y = −ridge·α up to the solver's residual, without a product with K
    left, size = fit.ridge * fit.coefficients, float(torch.linalg.vector_norm(targets))
    accuracy = float((fit.labels.cpu() == y_test).double().mean()) if labelled else None
    return GateInformation(
        kernel,
        float((fit.predictions.cpu() - wanted).square().mean()),
        accuracy,
        float(torch.linalg.vector_norm(left)) / size if size else 0.0,
        fit,
    )
