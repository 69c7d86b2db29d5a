"""Predicting with a kernel: ridge regression, classification by one-hot targets, and the information in gates.

Any kernel operator of the package will do, or a plain matrix. Training a network is not done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.data.inputs import as_numbers
from pathlens.errors import DTypeError, LabelError, NotFiniteError, OptionError, ShapeError, SolverError, unknown_name
from pathlens.kernels.measures import as_operator
from pathlens.kernels.overlap import npk, overlap
from pathlens.kernels.tangent import ntk
from pathlens.linops import Eigenpairs, KernelOperator


@dataclass(frozen=True)
class KernelFit:
    """What kernel regression found.

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
        As it was given, or chosen.
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

    The mean over classes is taken off, since a kernel without constant feature cannot fit it.

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
    """Targets as (n, c), of the kernel's dtype and on its device."""
    n, targets = train.shape[0], as_numbers(y).to(train.device, train.dtype)
    targets = targets[:, None] if targets.ndim == 1 else targets
    if targets.ndim != 2 or len(targets) != n:
        raise ShapeError(f"kernel regression: y has shape {tuple(targets.shape)}, expected ({n},) or ({n}, c).")
    if not bool(torch.isfinite(targets).all()):
        raise NotFiniteError("kernel regression: y contains NaN or infinity. Remove or impute such rows.")
    return targets


def _left_out(pairs: Eigenpairs, y: Tensor, ridge: float) -> Tensor:
    """What the other rows predict for each, minus its target, (n, c): −α_i / (G⁻¹)_ii, float64."""
    vectors, gains = pairs.vectors.double(), 1 / (pairs.values.double() + ridge)
    return -(vectors @ (gains[:, None] * (vectors.T @ y.double()))) / (vectors.square() @ gains)[:, None]


def _chosen_ridge(train: KernelOperator, y: Tensor) -> float:
    """The ridge of least squared error of rows that are left out, of eight a decade."""
    pairs = train.normalised("n").eigsh(train.shape[0])
    largest, smallest = float(pairs.values[0]), float(pairs.values[-1])
    # below, rounding decides; above, all predictions are near zero
    low = max(1e-10, 10 * torch.finfo(train.dtype).eps * largest, -2 * smallest)
    ridges = np.geomspace(low, 10 * largest, 2 + int(8 * math.log10(10 * largest / low))).tolist()
    return min(ridges, key=lambda ridge: float(_left_out(pairs, y, ridge).square().mean()))


def leave_one_out(K_train: Any, y: Any, ridge: float) -> Tensor:
    """Predictions of kernel regression for every training row from all other rows, (n, c), without n fits.

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
    if not smallest > 4 * torch.finfo(train.dtype).eps * largest:  # below, rounding decides
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
        In units of the mean diagonal, so that one value means the same for every kernel, however large its numbers.
        0 interpolates, where K_train is not singular. "auto" takes the one of least squared error in `leave_one_out`.
    method, tol
        Of the solver, as in ``K.solve``.

    Returns
    -------
    KernelFit

    Notes
    -----
    n³/3 operations by Cholesky where n² numbers fit the kernel's budget, else conjugate gradients. Choosing the ridge
    takes all eigenpairs, 9n³ operations and 4n² numbers within the budget.

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
    if train.dtype != test.dtype or train.device != test.device:
        raise DTypeError(
            f"kernel regression: K_train is {train.dtype} on {train.device}, K_test {test.dtype} on {test.device}. "
            "Build both alike."
        )
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
    """How well the gates of a network alone predict.

    Attributes
    ----------
    kernel : str
        Which kernel of the gates was used.
    mse : float
        Mean squared error on the test rows (of one-hot targets, for labels).
    accuracy : float or None
        On the test rows, for labels.
    train_residual : float
        ‖K α − y‖ / ‖y‖ on the training rows: 0 where the gates can fit the targets.
    fit : KernelFit
    """

    kernel: str
    mse: float
    accuracy: float | None
    train_residual: float
    fit: KernelFit


def gate_information(
    net: nn.Module,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    *,
    kernel: str = "npk",
    soft: bool = False,
    ridge: float | str = 1e-4,
    classes: int | None = None,
    max_bytes: int | None = None,
) -> GateInformation:
    """Information stored in the gates of a network: how well values trained on them generalise (NPF Definition 5.1).

    The definition trains the values from scratch with the gates held fixed. Here that is done in the limit of wide
    value networks, where training is kernel regression with the neural path kernel of the gates (Theorem 5.1), so that
    no training run, step size or seed enters. The network's own values are not used, except for ``kernel="value"``.

    Parameters
    ----------
    net : nn.Module
        A gated network, or a fully connected ReLU module.
    train, test : (X, y)
        Inputs and targets: integers are classes, floats (n,) or (n, c) are regressed.
    kernel : {"npk", "overlap", "value"}
        Path features; paths alone, as for a piecewise constant network; or the value part of the tangent kernel at the
        network's present values, which is what a finite network with these values would follow.
    soft : bool
        Use soft gate values in the path kernels.
    ridge : float or "auto"
        As in `kernel_regression`. Path kernels are often singular, so that some is needed.
    classes, max_bytes
        As elsewhere.

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
        raise OptionError("gate_information: soft is for path kernels; the value kernel has the network's own gates.")
    options: dict[str, Any] = {"part": "value"} if kernel == "value" else {"soft": soft}
    build: Any = builders[kernel]
    for name, pair in (("train", train), ("test", test)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ShapeError(
                f"gate_information: {name} must be a pair (X, y), got {type(pair).__name__}. Of a DataSet, give "
                "(data.x, data.y) and (data.x_test, data.y_test)."
            )
    (X, y), (X_test, y_test) = train, test
    K = build(net, X, max_bytes=max_bytes, **options)
    K_test = build(net, X_test, Y=X, max_bytes=max_bytes, **options)
    y, y_test = as_numbers(y).cpu(), as_numbers(y_test).cpu()
    labelled = not y.dtype.is_floating_point
    if labelled and classes is None:
        classes = int(max(y.max(), y_test.max())) + 1
    targets = one_hot(y, classes=classes, dtype=K.dtype) if labelled else y.to(K.dtype).reshape(len(y), -1)
    wanted = (
        one_hot(y_test, classes=classes, dtype=K.dtype) if labelled else y_test.to(K.dtype).reshape(len(y_test), -1)
    )
    if len(wanted) != K_test.shape[0]:
        raise ShapeError(f"gate_information: {K_test.shape[0]} test inputs and {len(wanted)} test targets.")
    if wanted.shape[1] != targets.shape[1]:
        raise ShapeError(
            f"gate_information: {targets.shape[1]} targets in each training row and {wanted.shape[1]} in each test row."
        )
    fit = kernel_regression(K, targets, K_test, ridge=ridge)
    # (K/s)α = y − ridge·α up to the solver's residual: no second product with K is needed
    left, size = fit.ridge * fit.coefficients, float(torch.linalg.vector_norm(targets))
    accuracy = float((fit.labels.cpu() == y_test).double().mean()) if labelled else None
    return GateInformation(
        kernel,
        float((fit.predictions.cpu() - wanted).square().mean()),
        accuracy,
        float(torch.linalg.vector_norm(left)) / size if size else 0.0,
        fit,
    )
