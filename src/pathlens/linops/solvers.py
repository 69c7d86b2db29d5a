"""Linear systems and eigenpairs of symmetric kernels: dense where it fits the budget, else by products K @ V.

Nothing is regularised unasked, and what does not converge raises. May import only the errors and the rest of linops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pathlens.errors import BudgetError, DTypeError, NotFiniteError, OptionError, ShapeError, SolverError
from pathlens.linops.budget import human_bytes
from pathlens.linops.evaluate import Evaluator
from pathlens.linops.matmul import matmul, plan_matmul
from pathlens.linops.progress import Meter

_DENSE_EIGH_FLOPS = 1e12  # half a minute on two cores: up to here a dense answer is worth more than a fast one


@dataclass(frozen=True)
class Solution:
    """x with (K + ridge·I) x = y.

    Attributes
    ----------
    solution
        (n,) or (n, c), as y.
    residual
        ‖(K + ridge·I) x − y‖ / ‖y‖, computed from the returned x; over all columns.
    iterations
        Of conjugate gradients; 0 for Cholesky.
    method
        ``"cholesky"`` or ``"cg"``.
    """

    solution: Tensor
    residual: float
    iterations: int
    method: str


@dataclass(frozen=True)
class Eigenpairs:
    """The k algebraically largest eigenpairs of a symmetric kernel.

    Attributes
    ----------
    values
        (k,), descending.
    vectors
        (n, k), orthonormal columns; the largest entry of each, in absolute value, is positive.
    method
        ``"dense"`` or ``"lanczos"``.
    """

    values: Tensor
    vectors: Tensor
    method: str


def _need_symmetric(evaluator: Evaluator, what: str) -> int:
    node = evaluator.node
    if not node.symmetric:
        raise SolverError(f"{what} needs a symmetric kernel; this {node.n} × {node.m} kernel has different factors on "
                          f"its two sides. Give the same object (or None) as the right side of every factor.")
    return node.n


def _option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


# --- linear systems --------------------------------------------------------------------------------------------


def solve(evaluator: Evaluator, y: Tensor, *, ridge: float, method: str, tol: float | None,
          max_iter: int | None) -> Solution:
    """Solve (K + ridge·I) x = y; see `KernelOperator.solve`."""
    n = _need_symmetric(evaluator, "solve")
    _option("method", method, ("auto", "cholesky", "cg"))
    if not math.isfinite(ridge) or ridge < 0:
        raise OptionError(f"solve: ridge must be a finite number ≥ 0, got {ridge!r}.")
    if not isinstance(y, Tensor) or y.dtype != evaluator.dtype or y.device != evaluator.device:
        came = f"{y.dtype} on {y.device}" if isinstance(y, Tensor) else type(y).__name__
        raise DTypeError(f"solve: y is {came}, expected a tensor of {evaluator.dtype} on {evaluator.device}. "
                         f"Convert it with `.to(K.device, K.dtype)`.")
    if y.ndim not in (1, 2) or y.shape[0] != n:
        raise ShapeError(f"solve: y has shape {tuple(y.shape)}, expected ({n},) or ({n}, c).")
    if not bool(torch.isfinite(y).all()):
        raise NotFiniteError(f"solve: y of shape {tuple(y.shape)} contains NaN or infinity.")
    rhs = y.detach().reshape(n, -1)
    need = n * n * evaluator.dtype.itemsize * 2 + 4 * rhs.numel() * 8
    if method == "cholesky" and need > evaluator.budget:
        raise BudgetError(f"solve: Cholesky needs {human_bytes(need)} for n = {n}, the budget is "
                          f"{human_bytes(evaluator.budget)}. Raise max_bytes, or use method='cg'.")
    if method == "cholesky" or (method == "auto" and need <= evaluator.budget):
        x, iterations, way = _cholesky(evaluator, rhs, ridge), 0, "cholesky"
    else:
        x, iterations = _conjugate_gradients(evaluator, rhs, ridge, tol, max_iter)
        way = "cg"
    error = matmul(evaluator, x) + ridge * x - rhs
    size = float(torch.linalg.vector_norm(rhs, dtype=torch.float64))
    residual = float(torch.linalg.vector_norm(error, dtype=torch.float64)) / size if size else 0.0
    return Solution(x.reshape(y.shape), residual, iterations, way)


def _not_definite(n: int, ridge: float, where: str) -> SolverError:
    return SolverError(f"solve: K + ridge·I with n = {n} and ridge = {ridge:g} is not positive definite ({where}). "
                       f"Duplicate or dependent rows make K singular: pass a larger ridge.")


def _cholesky(evaluator: Evaluator, rhs: Tensor, ridge: float) -> Tensor:
    n = evaluator.node.n
    matrix = evaluator.dense("kernel tiles for Cholesky")
    matrix.diagonal().add_(ridge)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        raise _not_definite(n, ridge, f"Cholesky stopped at row {int(info)} of {n}")
    del matrix
    x = torch.cholesky_solve(rhs, factor)
    if not bool(torch.isfinite(x).all()):
        raise _not_definite(n, ridge, "the solution is not finite")
    return x


def _conjugate_gradients(evaluator: Evaluator, rhs: Tensor, ridge: float, tol: float | None,
                         max_iter: int | None) -> tuple[Tensor, int]:
    n = evaluator.node.n
    goal = (1e-5 if evaluator.dtype == torch.float32 else 1e-10) if tol is None else tol
    limit = 10 * n + 100 if max_iter is None else max_iter

    def apply(p: Tensor) -> Tensor:
        return matmul(evaluator, p) + ridge * p

    def dots(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() * b.double()).sum(0)

    x = torch.zeros_like(rhs)
    target = goal * dots(rhs, rhs).sqrt()
    done = 0
    best = math.inf
    with Meter("conjugate gradients", None) as meter:
        while True:
            # Rounding makes the recursive residual drift from the true one: start again until the two agree.
            r = rhs - apply(x) if done else rhs.clone()
            rr = dots(r, r)
            gap = float((rr.sqrt() / target.clamp(min=1e-300)).max())
            if gap <= 1.0:
                return x, done
            if gap >= 0.5 * best or done >= limit:
                raise SolverError(f"solve: conjugate gradients reached a relative residual of {gap * goal:.1e} after "
                                  f"{done} iterations, asked for {goal:.1e} (n = {n}, ridge = {ridge:g}). "
                                  f"Pass a larger ridge or tol, more max_iter, or float64 factors.")
            best = gap
            p = r.clone()
            while done < limit and bool((rr.sqrt() > target).any()):
                ap = apply(p)
                curve = dots(p, ap)
                live = rr.sqrt() > target  # finished columns stand still
                if bool((curve[live] <= 0).any()):
                    raise _not_definite(n, ridge, f"negative curvature in iteration {done + 1} of conjugate gradients")
                step = torch.where(live, rr / torch.where(live, curve, 1.0), 0.0)
                x = x + p * step.to(x.dtype)
                r = r - ap * step.to(x.dtype)
                new = dots(r, r)
                p = r + p * torch.where(live, new / rr.clamp(min=1e-300), 0.0).to(x.dtype)
                rr = new
                done += 1
                meter.advance()


# --- eigenpairs ------------------------------------------------------------------------------------------------


def eigsh(evaluator: Evaluator, k: int, *, method: str, tol: float | None, max_iter: int | None) -> Eigenpairs:
    """The k largest eigenpairs; see `KernelOperator.eigsh`."""
    n = _need_symmetric(evaluator, "eigsh")
    _option("method", method, ("auto", "dense", "lanczos"))
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
        raise OptionError(f"eigsh: k must be an integer from 1 to n = {n}, got {k!r}.")
    # The matrix, its eigenvectors, and the workspace of divide and conquer.
    need = 4 * n * n * evaluator.dtype.itemsize
    fits = need <= evaluator.budget
    steps = 10 * max(2 * k + 1, 20)
    plan = plan_matmul(evaluator, 1)
    lanczos = steps * min(plan.factored_flops, plan.tiled_flops)
    if method == "auto":
        dense = k >= n - 1 or (fits and 9.0 * n**3 <= max(lanczos, _DENSE_EIGH_FLOPS))
    else:
        dense = method == "dense"
    if dense and not fits:
        raise BudgetError(f"eigsh: all eigenpairs of n = {n} need {human_bytes(need)}, the budget is "
                          f"{human_bytes(evaluator.budget)}. Raise max_bytes, or ask for fewer than n − 1 with "
                          f"method='lanczos'.")
    if dense:
        all_values, all_vectors = torch.linalg.eigh(evaluator.dense("kernel tiles for eigsh"))
        values, vectors = all_values[-k:].flip(0), all_vectors[:, -k:].flip(1)
    else:
        if k >= n:
            raise OptionError(f"eigsh: Lanczos finds at most n − 1 = {n - 1} pairs, got k = {k}. Use method='dense'.")
        values, vectors = _lanczos(evaluator, k, tol, max_iter)
    peak = vectors.abs().argmax(0, keepdim=True)
    return Eigenpairs(values.clone(), vectors * vectors.gather(0, peak).sign(), "dense" if dense else "lanczos")


def _lanczos(evaluator: Evaluator, k: int, tol: float | None, max_iter: int | None) -> tuple[Tensor, Tensor]:
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator
    from scipy.sparse.linalg import eigsh as arpack

    n, dtype, device = evaluator.node.n, evaluator.dtype, evaluator.device
    basis = min(n, max(2 * k + 1, 20))
    inner = Evaluator(evaluator.node, dtype, device, evaluator.backend, evaluator.budget - n * 8 * (basis + 2 * k + 6))
    if inner.budget <= 0:
        raise BudgetError(f"eigsh: {basis} Lanczos vectors of length {n} do not fit {human_bytes(evaluator.budget)}. "
                          f"Raise max_bytes.")
    with Meter("Lanczos products", None) as meter:

        def product(v: np.ndarray) -> np.ndarray:
            meter.advance()
            return matmul(inner, torch.from_numpy(v.reshape(n)).to(device, dtype)).double().cpu().numpy()

        # Vectors in float64 for any dtype: only the products carry the rounding of the kernel.
        start = np.random.default_rng(0).standard_normal(n)
        goal = (1e-5 if dtype == torch.float32 else 1e-12) if tol is None else tol
        operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
        try:
            values, vectors = arpack(operator, k=k, which="LA", v0=start, ncv=basis, tol=goal, maxiter=max_iter)
        except ArpackNoConvergence as error:
            raise SolverError(f"eigsh: {len(error.eigenvalues)} of {k} eigenpairs converged to {goal:.0e} (n = {n}). "
                              f"Pass a larger tol, more max_iter, fewer pairs, or method='dense'.") from error
        except ArpackError as error:
            raise SolverError(f"eigsh: ARPACK failed on n = {n}, k = {k}: {error}. Use method='dense'.") from error
    order = np.argsort(values)[::-1]
    return (torch.from_numpy(values[order].copy()).to(device, dtype),
            torch.from_numpy(vectors[:, order].copy()).to(device, dtype))
