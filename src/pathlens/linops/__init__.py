"""Kernels as lazy operators: sums of Hadamard products of Gram matrices, evaluated in tiles within a memory budget.

`pathlens.kernels` builds such operators from networks.

>>> import torch
>>> from pathlens.linops import GramSum
>>> gates = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
>>> GramSum.from_factors([[("layer.1", gates), ("layer.2", gates)]]).dense()
tensor([[4., 4.],
        [4., 9.]])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pathlens.linops.custom import CustomKernel
from pathlens.linops.factors import Factor, FactorSource, RowStream
from pathlens.linops.operator import GramSum, KernelOperator, nystrom
from pathlens.linops.solvers import Eigenpairs, Solution

if TYPE_CHECKING:
    from pathlens.linops.stored import StoredKernel, from_zarr

__all__ = [
    "CustomKernel",
    "Eigenpairs",
    "Factor",
    "FactorSource",
    "GramSum",
    "KernelOperator",
    "RowStream",
    "Solution",
    "StoredKernel",
    "from_zarr",
    "nystrom",
]


def __getattr__(name: str) -> Any:
    if name in ("StoredKernel", "from_zarr"):  # these import pathlens.stores, which is loaded on first use
        from pathlens.linops import stored

        return getattr(stored, name)
    raise AttributeError(f"module 'pathlens.linops' has no attribute {name!r}")
