"""Pathlens opens up gated neural networks: active paths, half-spaces, and the kernels built from them.

>>> import pathlens as pl
>>> net = pl.models.dlgn(2, hidden=(16,) * 5, outputs=1, piecewise_constant=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it; loaded when first used, so that `import pathlens` costs little more than torch
_LAZY = {
    "DLGNClassifier": "pathlens.estimators",
    "DLGNRegressor": "pathlens.estimators",
    "PathKernelClassifier": "pathlens.estimators",
    "PathKernelRegressor": "pathlens.estimators",
    "exact_precision": "pathlens.precision",
    "gated_twin": "pathlens.models",
    "harden": "pathlens.hardening",
    "rebuild": "pathlens.recording",
    "record": "pathlens.recording",
    "snapshot": "pathlens.recording",
    "Record": "pathlens.records",
    "Snapshot": "pathlens.records",
    "Trajectory": "pathlens.recording",
    "train": "pathlens.training",
}
_MODULES = (
    "data",
    "errors",
    "estimators",
    "hardening",
    "kernels",
    "linops",
    "models",
    "papers",
    "paths",
    "recording",
    "records",
    "regions",
    "theory",
    "training",
)

if TYPE_CHECKING:  # "as" marks a name as public for type checkers
    from pathlens import (  # noqa: F401
        data,
        errors,
        estimators,
        hardening,
        kernels,
        linops,
        models,
        papers,
        paths,
        recording,
        records,
        regions,
        theory,
        training,
    )
    from pathlens.estimators import DLGNClassifier as DLGNClassifier
    from pathlens.estimators import DLGNRegressor as DLGNRegressor
    from pathlens.estimators import PathKernelClassifier as PathKernelClassifier
    from pathlens.estimators import PathKernelRegressor as PathKernelRegressor
    from pathlens.hardening import harden as harden
    from pathlens.models import gated_twin as gated_twin
    from pathlens.precision import exact_precision as exact_precision
    from pathlens.recording import Trajectory as Trajectory
    from pathlens.recording import rebuild as rebuild
    from pathlens.recording import record as record
    from pathlens.recording import snapshot as snapshot
    from pathlens.records import Record as Record
    from pathlens.records import Snapshot as Snapshot
    from pathlens.training import train as train

__all__ = ["__version__", *_LAZY, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # found at once the next time
        return value
    if name in _MODULES:
        return importlib.import_module(f"pathlens.{name}")
    raise AttributeError(f"module 'pathlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
