"""The linear model on tangent features: f_lin(θ) = f(θ₀) + J(θ − θ₀), trained by Jacobian products.

Neither the kernel nor the Jacobian is formed, so that data sets may be larger than kernel regression allows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.data.inputs import as_numbers
from pathlens.errors import OptionError, RecordError, ShapeError, SolverError
from pathlens.kernels.measures import as_targets
from pathlens.kernels.parameters import differentiable
from pathlens.kernels.regression import one_hot
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar
from pathlens.recording import as_rows
from pathlens.recording.inputs import call_on_copies
from pathlens.recording.streams import recorded

_POWER_STEPS = 20


@dataclass(frozen=True)
class LinearFit:
    """Result of the least-squares problem.

    Attributes
    ----------
    residual : float
        ‖f_lin − y‖ / ‖f(θ₀) − y‖ on the training rows.
    gradient : float
        Norm of the gradient of the loss, relative to the start: 0 at the least-squares solution.
    iterations : int
    converged : bool
        Whether the gradient fell below the tolerance.
    history : tuple of float
        The residual before the first and after every iteration.
    """

    residual: float
    gradient: float
    iterations: int
    converged: bool
    history: tuple[float, ...] = field(repr=False)


class LinearisedModel:
    """A network linearised in its parameters around their present values.

    Parameters
    ----------
    net : nn.Module
        Any module in eval mode; copied, so that training it later has no effect.
    batch_size : int
        Rows of one Jacobian product.
    frozen : bool
        Linearise also in parameters with ``requires_grad=False``.

    Attributes
    ----------
    delta : dict of Tensor
        θ − θ₀, by parameter name; zero before `fit`.

    Notes
    -----
    A product with J is a forward pass with tangents, a product with Jᵀ a forward and a backward pass; each costs about
    three forward passes. Memory is the activations of one batch and a few copies of the parameters.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    >>> X = torch.randn(20, 2).double()
    >>> model = LinearisedModel(net)
    >>> torch.equal(model(X), net(X).detach())
    True
    >>> model.fit(X, X[:, :1] * X[:, 1:]).residual < 1e-2
    True
    """

    def __init__(self, net: nn.Module, *, batch_size: int = 256, frozen: bool = False) -> None:
        if batch_size < 1:
            raise OptionError(f"LinearisedModel: batch_size must be positive, got {batch_size}.")
        if getattr(net, "needs_rows", False):
            raise RecordError(
                "LinearisedModel: gates from a table belong to examples, not inputs; use ntk on a record."
            )
        self._net = copy.deepcopy(differentiable(net))
        self.batch_size = batch_size
        start = {k: p.detach() for k, p in self._net.named_parameters() if frozen or p.requires_grad}
        if not start:
            raise RecordError("LinearisedModel: no parameter is trainable. Pass frozen=True to include frozen ones.")
        self._start = start
        self._rest = {k: p.detach() for k, p in self._net.named_parameters() if k not in start}
        self.delta = {k: torch.zeros_like(v) for k, v in start.items()}

    def __repr__(self) -> str:
        size, fitted = sum(v.numel() for v in self.delta.values()), any(bool(v.any()) for v in self.delta.values())
        return f"LinearisedModel({type(self._net).__name__}, {size} parameters, {'fitted' if fitted else 'not fitted'})"

    # --- products ----------------------------------------------------------------------------------------------

    def _rows(self, X: Any) -> Tensor:
        x = as_rows(X, like=self._net)
        few = x if len(x) < 3 else x[[0, len(x) // 2, -1]]
        recorded(self._net, few, sensitivities=False)  # raises in train mode and for networks that mix rows
        return x

    def _batches(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for lo in range(0, len(x), self.batch_size):
            cut = slice(lo, min(lo + self.batch_size, len(x)))
            yield cut, x[cut]

    def _f(self, x: Tensor) -> Any:
        def f(parameters: dict[str, Tensor]) -> Tensor:
            out = call_on_copies(self._net, x, parameters={**self._rest, **parameters})
            return out if out.ndim == 2 else out[:, None]

        return f

    def jvp(self, X: Any, direction: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(f(θ₀), J·direction) on the rows of X, each (n, c)."""
        return self._push(self._rows(X), direction)

    @exact_precision()
    def _push(self, x: Tensor, direction: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        values, tangents = [], []
        for _, part in self._batches(x):
            both: Any = torch.func.jvp(self._f(part), (self._start,), (direction,))
            values.append(both[0].detach())
            tangents.append(both[1].detach())
        return torch.cat(values), torch.cat(tangents)

    def vjp(self, X: Any, cotangent: Tensor) -> dict[str, Tensor]:
        """Jᵀ·cotangent, by parameter name; cotangent is (n, c)."""
        return self._pull(self._rows(X), cotangent)

    @exact_precision()
    def _pull(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        total = {k: torch.zeros_like(v) for k, v in self._start.items()}
        for cut, part in self._batches(x):
            both: Any = torch.func.vjp(self._f(part), self._start)
            for k, g in both[1](cotangent[cut])[0].items():
                total[k] += g.detach()
        return total

    def __call__(self, X: Any) -> Tensor:
        """f_lin on the rows of X, (n, c)."""
        value, tangent = self.jvp(X, self.delta)
        return value + tangent

    # --- fitting -----------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        ridge: float = 0.0,
        method: str = "cg",
        steps: int = 500,
        tol: float = 1e-6,
        step_size: float | None = None,
    ) -> LinearFit:
        """Minimise ½‖f_lin(X) − y‖² + ½ridge‖θ − θ₀‖², starting from θ₀.

        Parameters
        ----------
        X : (n, ...)
        y : (n,), (n, c) or integer labels (n,)
            Labels become one-hot targets.
        ridge : float
            Absolute. It equals the ridge added to the full tangent kernel.
        method : {"cg", "gd"}
            Conjugate gradients on the normal equations, which find the solution nearest to θ₀ in few products; or
            gradient descent, whose iterates are those of training the linearised network.
        steps : int
            Maximal number of iterations.
        tol : float
            Stop when the gradient has fallen by this factor.
        step_size : float, optional
            Of gradient descent; default 1/λ_max of JᵀJ, by power iteration.

        Returns
        -------
        LinearFit
        """
        if method not in ("cg", "gd"):
            raise OptionError(f"LinearisedModel.fit: method must be 'cg' or 'gd', got {method!r}.")
        if step_size is not None and method == "cg":
            raise OptionError(f"LinearisedModel.fit: step_size is for method='gd', got method={method!r}.")
        if not 0 <= ridge < math.inf or steps < 1:
            raise OptionError(
                f"LinearisedModel.fit: ridge={ridge}, steps={steps}: expected a finite ridge ≥ 0 and steps ≥ 1."
            )
        x = self._rows(X)
        self.delta = {k: torch.zeros_like(v) for k, v in self._start.items()}
        start, _ = self._push(x, self.delta)
        residual = self._targets(y, start) - start
        if method == "gd" and step_size is None:
            # a tenth more than the estimate, which is a lower bound; descent is stable up to 2/λ_max
            step_size = 1 / (self.largest_eigenvalue(x) * 1.1 + float(ridge))
        return self._minimise(x, residual, float(ridge), steps, tol, step_size)

    def _targets(self, y: Any, f: Tensor) -> Tensor:
        y = as_numbers(y)
        if not y.dtype.is_floating_point:
            y = one_hot(y, classes=f.shape[1], dtype=f.dtype)
        y = as_targets(y, len(f), "LinearisedModel.fit", f.device, f.dtype)
        if y.shape != f.shape:
            raise ShapeError(
                f"LinearisedModel.fit: y has shape {tuple(y.shape)}, the network's outputs {tuple(f.shape)}. "
                "Give one column per output, or integer labels."
            )
        return y

    def _gradient(self, x: Tensor, residual: Tensor, ridge: float) -> dict[str, Tensor]:
        """Minus the gradient of the loss: Jᵀr − ridge·Δ."""
        pulled = self._pull(x, residual)
        return {k: g - ridge * self.delta[k] for k, g in pulled.items()} if ridge else pulled

    def _minimise(
        self, x: Tensor, residual: Tensor, ridge: float, steps: int, tol: float, step_size: float | None
    ) -> LinearFit:
        """Gradient descent with a step size, conjugate gradients without."""
        scale = float(residual.norm()) or 1.0
        history = [1.0 if float(residual.norm()) else 0.0]
        gradient = direction = self._gradient(x, residual, ridge)
        first = square = _dot(gradient, gradient)
        done = 0
        with ProgressBar("linear model on tangent features", steps) as meter:
            while done < steps and square > tol**2 * first:
                _, pushed = self._push(x, direction)
                length = step_size
                if length is None:
                    curvature = float(pushed.double().square().sum()) + ridge * _dot(direction, direction)
                    if not curvature > 0:
                        break
                    length = square / curvature
                self.delta = {k: v + length * direction[k] for k, v in self.delta.items()}
                residual = residual - length * pushed
                gradient = self._gradient(x, residual, ridge)
                before, square = square, _dot(gradient, gradient)
                done += 1
                history.append(float(residual.norm()) / scale)
                if step_size is None:
                    direction = {k: g + (square / before) * direction[k] for k, g in gradient.items()}
                elif square < 1e12 * max(first, 1e-300):
                    direction = gradient
                else:
                    raise SolverError(
                        f"LinearisedModel.fit: gradient descent diverges with step_size={step_size:.3g} (the gradient "
                        f"grew by {(square / first) ** 0.5:.1e} in {done} steps). Use a smaller one, or the default."
                    )
                meter.advance()
        relative = (square / first) ** 0.5 if first else 0.0
        return LinearFit(history[-1], relative, done, relative <= tol, tuple(history))

    def largest_eigenvalue(self, X: Any) -> float:
        """A lower bound of λ_max of JᵀJ on the rows of X, that of the full tangent kernel, by 20 power iterations."""
        x = self._rows(X)
        generator = torch.Generator().manual_seed(0)
        v = {k: torch.randn(p.shape, generator=generator).to(p) for k, p in self._start.items()}
        value = 0.0
        for _ in range(_POWER_STEPS):
            norm = _dot(v, v) ** 0.5
            if norm == 0:
                return 0.0
            _, pushed = self._push(x, {k: t / norm for k, t in v.items()})
            value = float(pushed.double().square().sum())
            v = self._pull(x, pushed)
        return value


def _dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[k].double() * b[k].double()).sum()) for k in a)
