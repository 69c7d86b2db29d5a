"""`PathKernelClassifier` and `PathKernelRegressor`: kernel ridge regression with the kernels of a gated network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from pathlens.errors import OptionError, unknown_name
from pathlens.estimators.fitting import Standardizer, fit
from pathlens.estimators.recipes import resolve_recipe
from pathlens.estimators.tables import check_range, validate_table
from pathlens.estimators.weights import TargetsMixin, read_classes
from pathlens.kernels import kernel_regression, npk, ntk, one_hot, overlap
from pathlens.linops import GramSum

_KERNELS: dict[str, Any] = {"overlap": overlap, "npk": npk, "ntk": ntk}


@dataclass(eq=False, repr=False)
class _BasePathKernel(BaseEstimator):
    kernel: str = "overlap"
    _: KW_ONLY
    network: nn.Module | None = None
    ridge: float | str = 1e-2
    hidden: tuple[int, ...] = (32, 32)
    epochs: int | str = "auto"
    learning_rate: float = 5e-3
    weight_decay: float | str = "auto"
    random_state: Any = None
    verbose: bool = False

    def _fit(self, X: np.ndarray, Y: np.ndarray, targets: np.ndarray, weights: np.ndarray, classes: int | None) -> Self:
        """Fit targets (n, c) on rows of positive weight; a network that is trained here is fitted to Y."""
        if self.kernel not in _KERNELS:
            raise unknown_name("kernel", self.kernel, _KERNELS)
        if self.ridge != "auto" and not (isinstance(self.ridge, Real) and 0 <= float(self.ridge) < np.inf):
            raise OptionError(
                f"{type(self).__name__}: ridge must be 'auto' or a number that is not negative, got {self.ridge!r}."
            )
        share = weights / weights.sum()
        self._scale = (
            Standardizer.of(X, share)
            if self.network is None
            else Standardizer(np.zeros(X.shape[1]), np.ones(X.shape[1]))
        )
        self._x = self._scale(X)
        # a copy: the network may be trained further, and parameters may be set anew
        self._given, self._kind = copy.deepcopy(self.network), self.kernel
        if self._given is None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            recipe = resolve_recipe(self, len(X), weights.sum(), seed)
            self.model_ = fit(self._x, Y, weights, classes, recipe).model
        self._mean = share @ targets
        K, each = self._kernel(self._x), float(weights.mean())
        root = np.sqrt(weights / each)[:, None]
        if np.ptp(weights) > 0:  # weighted least squares: K and targets times √w
            K = K * GramSum.from_factors([[("√w", torch.from_numpy(root).to(K.dtype))]])
        self._coefficients = np.zeros_like(targets)
        if float(K.trace()) > 0:  # else no path is active on any row, and the prediction is the mean
            # k copies of all rows have k times the weight against the same ridge
            ridge = self.ridge if self.ridge == "auto" else float(self.ridge) / each
            found = kernel_regression(K, torch.from_numpy(root * (targets - self._mean)), K, ridge=ridge)
            self.ridge_ = found.ridge * each
            self._coefficients = root * found.coefficients.double().numpy() * (len(X) / float(K.trace()))
        return self

    def _network(self) -> nn.Module:
        return self.model_.network() if self._given is None else self._given

    def _kernel(self, Z: np.ndarray, columns: np.ndarray | None = None) -> Any:
        """K(Z, columns); without columns the symmetric K(Z, Z)."""
        net = self._network()
        dtype = next(net.parameters()).dtype
        rows = torch.from_numpy(Z).to(dtype)
        build = _KERNELS[self._kind]
        return build(net, rows) if columns is None else build(net, rows, Y=torch.from_numpy(columns).to(dtype))

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows = check_range(self, validate_table(self, X, reset=False), self._scale.centre, self._scale.spread)
        K = self._kernel(self._scale(rows), self._x)
        return (K @ torch.from_numpy(self._coefficients).to(K.dtype)).double().numpy() + self._mean

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_coefficients")


@dataclass(eq=False, repr=False, kw_only=True)
class PathKernelClassifier(ClassifierMixin, _BasePathKernel):
    """Classify by kernel ridge regression on one-hot targets, with the kernel of a gated network.

    Parameters
    ----------
    kernel : {"overlap", "npk", "ntk"}
        Shared active paths; paths times inputs, which has no constant feature; the tangent kernel (trace over outputs).
    network : nn.Module, optional
        The network whose kernel is used, on X as given. Without one, a DLGN is trained on standardised inputs, and the
        kernel is that of its hard gates.
    ridge : float or "auto"
        In units of the kernel's mean diagonal. "auto" minimises the leave-one-out squared error, given the network;
        `ridge_` is the value used.
    class_weight : dict, "balanced" or None
        As in `DLGNClassifier`: of the network that is trained and of the regression, whose squared errors are weighted.
    hidden, epochs, learning_rate, weight_decay, random_state, verbose
        Of the network that is trained, as in `DLGNClassifier`.

    Notes
    -----
    n³/3 operations by Cholesky where n² numbers fit the memory budget, else conjugate gradients.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> flowers = PathKernelClassifier(epochs=150, random_state=0).fit(X[::2], y[::2])
    >>> flowers.score(X[1::2], y[1::2]) > 0.9
    True
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PathKernelClassifier:
        """Fit to rows X (n, d) and class labels y (n,); rows of weight zero count as absent."""
        X, labels, weights, self.classes_ = read_classes(self, X, y, sample_weight)
        c = len(self.classes_)
        targets = one_hot(torch.from_numpy(labels), classes=c, dtype=torch.float64).numpy()
        return self._fit(X, labels, targets, weights, c)

    def decision_function(self, X: Any) -> np.ndarray:
        """Regression scores (n, c); for two classes the score of the second minus that of the first (n,)."""
        f = self._outputs(X)
        return f[:, 1] - f[:, 0] if f.shape[1] == 2 else f

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest score."""
        f = self.decision_function(X)
        return self.classes_[(f > 0).astype(int) if f.ndim == 1 else f.argmax(axis=1)]


class PathKernelRegressor(TargetsMixin, _BasePathKernel):
    """Kernel ridge regression with the kernel of a gated network.

    Parameters are those of `PathKernelClassifier`, without `class_weight`.

    Examples
    --------
    >>> X = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    >>> y = np.abs(X[:, 0])
    >>> hat = PathKernelRegressor("ntk", epochs=60, random_state=0).fit(X[::2], y[::2])
    >>> hat.score(X[1::2], y[1::2]) > 0.9
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PathKernelRegressor:
        """Fit to rows X (n, d) and targets y (n,) or (n, c); rows of weight zero count as absent."""
        X, targets, weights = self._read_targets(X, y, sample_weight)
        return self._fit(X, targets, targets, weights, None)

    def predict(self, X: Any) -> np.ndarray:
        """Predicted targets, (n,) or (n, c) as in `fit`."""
        return self.decode_predictions(self._outputs(X))
