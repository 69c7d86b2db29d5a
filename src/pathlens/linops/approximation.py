"""Approximations of kernels, each a call made by name. May import only the errors and the rest of linops."""

from __future__ import annotations

import torch

from pathlens.errors import OptionError, SolverError
from pathlens.linops import solvers
from pathlens.linops.operator import GramSum, KernelOperator


def nystrom(kernel: KernelOperator, rank: int, *, seed: int = 0) -> GramSum:
    """An approximation of a positive semi-definite kernel by one Gram matrix of that rank; an approximation by name.

    K ≈ KΩ (ΩᵀKΩ)⁻¹ ΩᵀK for `rank` random directions Ω; never above K, and exact where K has that rank.

    Parameters
    ----------
    kernel
        Symmetric.
    rank
        1 … n; one product K @ V with so many columns.

    Examples
    --------
    >>> K = GramSum.from_factors([[("x", torch.randn(50, 3, dtype=torch.float64))]])
    >>> torch.allclose(nystrom(K, 3).dense(), K.dense())
    True
    """
    n = kernel._square("nystrom")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= n:
        raise OptionError(f"nystrom: rank must be an integer from 1 to n = {n}, got {rank!r}.")
    if not kernel.symmetric:
        raise SolverError("nystrom needs a symmetric kernel; this one has different factors on its two sides.")
    try:
        vectors, values = solvers.sketch(kernel._evaluator(), rank, seed)
    except torch.linalg.LinAlgError:
        raise SolverError(f"nystrom: the {n} × {n} kernel is not positive semi-definite. Add a ridge to it.") from None
    return GramSum.from_factors(
        [[(f"nystrom[{rank}]", (vectors * values.sqrt()).to(kernel.dtype))]], max_bytes=kernel.max_bytes
    )
