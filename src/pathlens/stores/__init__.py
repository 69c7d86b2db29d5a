"""Matrices on disk as Zarr arrays, and the executors that compute their blocks: processes or a Dask cluster.

A matrix is anything that can compute its blocks (`BlockSource`). Zarr and Dask are imported when they are used.
"""

from __future__ import annotations

from pathlens.stores.executors import Executor, open_executor
from pathlens.stores.layout import MatrixDescription, Store, open_store
from pathlens.stores.writing import BlockSource, StoreReport, write_store

__all__ = [
    "BlockSource",
    "Executor",
    "MatrixDescription",
    "Store",
    "StoreReport",
    "open_executor",
    "open_store",
    "write_store",
]
