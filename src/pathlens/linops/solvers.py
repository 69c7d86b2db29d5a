"""Linear systems and eigenpairs of symmetric kernels: dense if that fits the budget, else by products K @ V.

Nothing is regularised unless asked for, and a solver that does not converge raises. The public functions are methods of
`KernelOperator`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import require_budget
from pathlens.errors import OptionError, PrecisionWarning, SolverError
from pathlens.linops.evaluate import Evaluator
from pathlens.linops.matmul import check_vectors, matmul, plan_matmul
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator

_LARGEST_RESIDUAL = 1e-2  # of Cholesky without a warning
_DENSE_EIGH_FLOPS = 1e12  # half a minute on two cores: up to here, dense is preferred even if Lanczos is faster


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
    preconditioner
        Rank of the preconditioner of conjugate gradients; 0 if there was none.
    """

    solution: Tensor
    residual: float
    iterations: int
    method: str
    preconditioner: int = 0

    def __repr__(self) -> str:
        shape = " × ".join(str(s) for s in self.solution.shape)
        steps = f", {self.iterations} iterations, preconditioner of rank {self.preconditioner}" * (self.method == "cg")
        return f"Solution({shape}, {self.method}{steps}, residual {self.residual:.1e})"


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

    def __repr__(self) -> str:
        ends = " … ".join(f"{float(v):.4g}" for v in self.values[:: max(len(self.values) - 1, 1)])
        return f"Eigenpairs({len(self.values)} of {self.vectors.shape[0]}: {ends}; {self.method})"


def _need_symmetric(evaluator: Evaluator, what: str) -> int:
    node = evaluator.node
    if not node.symmetric:
        raise SolverError(
            f"{what} needs a symmetric kernel; this {node.n} × {node.m} kernel has different factors on its two sides. "
            "Give the same object (or None) as the right side of every factor."
        )
    return node.n


def _option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


# --- linear systems --------------------------------------------------------------------------------------------


@exact_precision()
def solve(
    kernel: KernelOperator,
    y: Tensor,
    *,
    ridge: float = 0.0,
    method: str = "auto",
    tol: float | None = None,
    max_iter: int | None = None,
    preconditioner: int | None = None,
    max_bytes: int | None = None,
) -> Solution:
    """Solve (K + ridge·I) x = y for a symmetric kernel.

    Parameters
    ----------
    y
        (n,) or (n, c), of the kernel's dtype.
    ridge
        Added to the diagonal; nothing is added by default.
    method
        ``"cholesky"``, ``"cg"``, or ``"auto"``: Cholesky if 2n² numbers fit the budget, else conjugate gradients.
    tol, max_iter
        Of conjugate gradients: relative residual (default 1e-10, float32 1e-5) and number of products.
    preconditioner
        Rank of a Nyström sketch that speeds up conjugate gradients and does not change their answer; 0 for none,
        None for a rank chosen from n and the budget.

    Returns
    -------
    `Solution` with ``solution``, ``residual``, ``iterations``, ``method``, ``preconditioner``.

    Notes
    -----
    Cholesky costs n³/3 + 2n²c. Raises a `SolverError` if the matrix is not positive definite, or if conjugate gradients
    do not converge.

    Examples
    --------
    >>> from pathlens.linops import GramSum
    >>> K = GramSum.from_factors([[("x", torch.eye(2))]])
    >>> K.solve(torch.tensor([2.0, 4.0]), ridge=1.0).solution
    tensor([1., 2.])
    """
    evaluator = kernel._evaluator(max_bytes)
    n = _need_symmetric(evaluator, "solve")
    _option("method", method, ("auto", "cholesky", "cg"))
    if not math.isfinite(ridge) or ridge < 0:
        raise OptionError(f"solve: ridge must be a finite number ≥ 0, got {ridge!r}.")
    rhs = check_vectors(evaluator, y, "solve", "y")
    if preconditioner is not None and (isinstance(preconditioner, bool) or not 0 <= preconditioner <= n):
        raise OptionError(f"solve: preconditioner must be a rank from 0 to n = {n}, or None, got {preconditioner!r}.")
    # columns are scaled to size about 1, so that their squares stay in range; powers of two are exact
    most = 120 if evaluator.dtype == torch.float32 else 1000
    unit = torch.exp2(torch.frexp(rhs.abs().amax(0)).exponent.clamp(-most, most).to(evaluator.dtype))
    rhs = rhs / unit
    need = n * n * evaluator.dtype.itemsize * 2 + 4 * rhs.numel() * 8
    if method == "cholesky":
        remedy = "Raise max_bytes, or use method='cg'."
        require_budget(f"solve: Cholesky with n = {n} needs", need, evaluator.budget, remedy)
    if method == "cholesky" or (method == "auto" and need <= evaluator.budget):
        x, iterations, way, rank = _cholesky(evaluator, rhs, ridge), 0, "cholesky", 0
    else:
        way, rank = "cg", _default_rank(evaluator) if preconditioner is None else preconditioner
        precondition = _preconditioner(evaluator, rank, ridge) if rank else None
        rank = 0 if precondition is None else rank
        x, iterations = _conjugate_gradients(evaluator, rhs, ridge, tol, max_iter, precondition)
    error, share = matmul(evaluator, x) + ridge * x - rhs, unit.double() / unit.double().max()
    size = float(torch.linalg.vector_norm(rhs * share))
    residual = float(torch.linalg.vector_norm(error * share)) / size if size else 0.0
    if way == "cholesky" and residual > _LARGEST_RESIDUAL:  # conjugate gradients raise in this case
        warnings.warn(
            f"solve: the solution by Cholesky has a relative residual of {residual:.1e} (n = {n}, ridge = {ridge:g}): "
            f"the system is too close to singular for {evaluator.dtype}. Take the kernel in float64 "
            "(net.double(), X.double()), or a larger ridge.",
            PrecisionWarning,
            stacklevel=3,
        )
    return Solution((x * unit).reshape(y.shape), residual, iterations, way, rank)


def _not_definite(n: int, ridge: float, where: str) -> SolverError:
    return SolverError(
        f"solve: K + ridge·I with n = {n} and ridge = {ridge:g} is not positive definite ({where}). "
        f"Duplicate or dependent rows make K singular: pass a larger ridge."
    )


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


@exact_precision()
def sketch(evaluator: Evaluator, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """(U, λ) of the Nyström approximation K ≈ U Diag(λ) Uᵀ from products with `rank` random vectors, in float64.

    With Ω of orthonormal columns and Y = KΩ it is Y (ΩᵀY)⁻¹ Yᵀ. Raises `torch.linalg.LinAlgError` if K is not positive
    semi-definite up to rounding.
    """
    n, device = evaluator.node.n, evaluator.device
    draws = torch.randn(n, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device)
    omega = torch.linalg.qr(draws).Q
    y = matmul(evaluator, omega.to(evaluator.dtype)).double()
    # a shift of the size of rounding keeps the middle matrix definite; it is subtracted from the eigenvalues below
    top = float(y.abs().max()) or 1.0
    shift = top * float(torch.linalg.matrix_norm(y / top)) * torch.finfo(evaluator.dtype).eps
    y += shift * omega
    middle = omega.T @ y
    factor = torch.linalg.cholesky(0.5 * (middle + middle.T))
    half = torch.linalg.solve_triangular(factor, y.T, upper=False).T
    vectors, values, _ = torch.linalg.svd(half, full_matrices=False)
    return vectors, (values.square() - shift).clamp(min=0.0)


def _preconditioner(evaluator: Evaluator, rank: int, ridge: float) -> Callable[[Tensor], Tensor] | None:
    """P⁻¹ for P ≈ K + ridge·I: exact on the leading eigenspace of a sketch, a multiple of the identity elsewhere.

    None if the kernel is too far from positive semi-definite for a sketch.
    """
    try:
        vectors, values = sketch(evaluator, rank, seed=0)
    except torch.linalg.LinAlgError:
        return None
    base = max(ridge, float(values[0]) * torch.finfo(evaluator.dtype).eps)
    gains = (values[-1] + base) / (values + base) - 1.0
    return lambda r: (r.double() + vectors @ (gains[:, None] * (vectors.T @ r.double()))).to(r.dtype)


def _default_rank(evaluator: Evaluator) -> int:
    """Default rank of the preconditioner; larger for products by tiles, where more vectors cost little."""
    n = evaluator.node.n
    if n < 2000:
        return 0
    most = 64 if not plan_matmul(evaluator, 1).tiled else 256
    return max(min(most, n // 20, int(evaluator.budget // 8 // (n * 8 * 4))), 0)


def _conjugate_gradients(
    evaluator: Evaluator,
    rhs: Tensor,
    ridge: float,
    tol: float | None,
    max_iter: int | None,
    precondition: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, int]:
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
    with ProgressBar("conjugate gradients", None) as bar:
        while True:
            # Rounding makes the recursive residual differ from the true one: restart until they agree.
            r = rhs - apply(x) if done else rhs.clone()
            rr = dots(r, r)
            gap = float((rr.sqrt() / target.clamp(min=1e-300)).max())
            if gap <= 1.0:
                return x, done
            if not gap < 0.5 * best or done >= limit:  # also if gap is NaN
                raise SolverError(
                    f"solve: conjugate gradients reached a relative residual of {gap * goal:.1e} after "
                    f"{done} iterations, asked for {goal:.1e} (n = {n}, ridge = {ridge:g}). "
                    f"Pass a larger ridge or tol, more max_iter, or float64 factors."
                )
            best = gap
            z = r.clone() if precondition is None else precondition(r)
            p, rz = z, dots(r, z)
            while done < limit and bool((rr.sqrt() > target).any()):
                ap = apply(p)
                curve = dots(p, ap)
                live = rr.sqrt() > target  # converged columns do not change
                if bool((curve[live] <= 0).any()):
                    raise _not_definite(n, ridge, f"negative curvature in iteration {done + 1} of conjugate gradients")
                step = torch.where(live, rz / torch.where(live, curve, 1.0), 0.0)
                x = x + p * step.to(x.dtype)
                r = r - ap * step.to(x.dtype)
                rr = dots(r, r)
                z = r if precondition is None else precondition(r)
                new = dots(r, z)
                p = z + p * torch.where(live, new / rz.clamp(min=1e-300), 0.0).to(x.dtype)
                rz = new
                done += 1
                gap = float((rr.sqrt() / target.clamp(min=1e-300)).max())
                bar.advance(note=f"residual {gap * goal:.1e}, goal {goal:.0e}")


# --- eigenpairs ------------------------------------------------------------------------------------------------


@exact_precision()
def eigsh(
    kernel: KernelOperator,
    k: int = 6,
    *,
    method: str = "auto",
    tol: float | None = None,
    max_iter: int | None = None,
    max_bytes: int | None = None,
) -> Eigenpairs:
    """The k largest eigenvalues of a symmetric kernel, descending, with orthonormal eigenvectors.

    Parameters
    ----------
    k
        1 … n.
    method
        ``"dense"`` (all eigenpairs, 9n³ operations, 4n² numbers), ``"lanczos"`` (only products K @ v, ARPACK from a
        fixed start vector), or ``"auto"``: dense if it fits the budget and costs less than Lanczos or about half a
        minute. Lanczos may miss copies of a repeated eigenvalue; dense never does.
    tol, max_iter
        Of Lanczos: relative accuracy of the eigenvalues (default 1e-12, float32 1e-5) and restarts.

    Examples
    --------
    >>> from pathlens.linops import GramSum
    >>> K = GramSum.from_factors([[("x", torch.diag(torch.tensor([1.0, 3.0, 2.0])))]])
    >>> K.eigsh(2).values
    tensor([9., 4.])
    """
    evaluator = kernel._evaluator(max_bytes)
    n = _need_symmetric(evaluator, "eigsh")
    _option("method", method, ("auto", "dense", "lanczos"))
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= n:
        raise OptionError(f"eigsh: k must be an integer from 1 to n = {n}, got {k!r}.")
    # the matrix, its eigenvectors, and the workspace of divide and conquer
    need = 4 * n * n * evaluator.dtype.itemsize
    fits = need <= evaluator.budget
    steps = 10 * max(2 * k + 1, 20)
    plan = plan_matmul(evaluator, 1)
    lanczos = steps * min(plan.factored_flops, plan.tiled_flops)
    if method == "auto":
        dense = k >= n - 1 or (fits and 9.0 * n**3 <= max(lanczos, _DENSE_EIGH_FLOPS))
    else:
        dense = method == "dense"
    if dense:
        remedy = "Raise max_bytes, or ask for fewer than n − 1 with method='lanczos'."
        require_budget(f"eigsh: all eigenpairs of n = {n} need", need, evaluator.budget, remedy)
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
    held = n * 8 * (basis + 2 * k + 6)
    require_budget(f"eigsh: {basis} Lanczos vectors of length {n} take", held + 1, evaluator.budget)
    inner = replace(evaluator, budget=evaluator.budget - held)
    with ProgressBar("Lanczos products", None) as bar:

        def product(v: np.ndarray) -> np.ndarray:
            bar.advance()
            return matmul(inner, torch.from_numpy(v.reshape(n)).to(device, dtype)).double().cpu().numpy()

        # The vectors are float64 for any dtype: only the products have the rounding of the kernel.
        start = np.random.default_rng(0).standard_normal(n)
        # ARPACK treats numbers below ε^⅔ as zero, so the kernel is scaled to size about 1.
        largest = float(np.abs(product(start)).max())
        if largest == 0:  # a symmetric kernel that maps a random vector to zero is zero
            return torch.zeros(k, device=device, dtype=dtype), torch.eye(n, k, device=device, dtype=dtype)
        size = math.frexp(largest)[1]
        goal = (1e-5 if dtype == torch.float32 else 1e-12) if tol is None else tol
        operator = LinearOperator((n, n), matvec=lambda v: np.ldexp(product(v), -size), dtype=np.float64)
        try:
            values, vectors = arpack(operator, k=k, which="LA", v0=start, ncv=basis, tol=goal, maxiter=max_iter)
        except ArpackNoConvergence as error:
            raise SolverError(
                f"eigsh: {len(error.eigenvalues)} of {k} eigenpairs converged to {goal:.0e} (n = {n}). "
                f"Pass a larger tol, more max_iter, fewer pairs, or method='dense'."
            ) from error
        except ArpackError as error:
            raise SolverError(f"eigsh: ARPACK failed on n = {n}, k = {k}: {error}. Use method='dense'.") from error
    order = np.argsort(values)[::-1]
    return (
        torch.from_numpy(np.ldexp(values[order], size)).to(device, dtype),
        torch.from_numpy(vectors[:, order].copy()).to(device, dtype),
    )
