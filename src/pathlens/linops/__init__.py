"""Kernels as lazy operators: sums of Hadamard products of Gram matrices, evaluated in tiles within a memory budget.

Here live the operator, its solvers and its backends; nothing here knows of networks, and nothing of the package but the
errors is imported.

>>> import torch
>>> from pathlens.linops import GramSum
>>> gates = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
>>> GramSum.from_factors([[("layer.1", gates), ("layer.2", gates)]]).dense()
tensor([[4., 4.],
        [4., 9.]])
"""

from __future__ import annotations

from pathlens.linops.approximation import nystrom
from pathlens.linops.custom import CustomKernel
from pathlens.linops.factors import Factor, RowSource, RowStream
from pathlens.linops.operator import GramSum, KernelOperator
from pathlens.linops.solvers import Eigenpairs, Solution
from pathlens.linops.store import StoredKernel, from_zarr
from pathlens.linops.writing import StoreReport

__all__ = [
    "CustomKernel",
    "Eigenpairs",
    "Factor",
    "GramSum",
    "KernelOperator",
    "RowSource",
    "RowStream",
    "Solution",
    "StoreReport",
    "StoredKernel",
    "from_zarr",
    "nystrom",
]
