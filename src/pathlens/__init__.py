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

if TYPE_CHECKING:
    from pathlens import (
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
    from pathlens.estimators import DLGNClassifier, DLGNRegressor, PathKernelClassifier, PathKernelRegressor
    from pathlens.hardening import harden
    from pathlens.models import gated_twin
    from pathlens.precision import exact_precision
    from pathlens.recording import Trajectory, rebuild, record, snapshot
    from pathlens.records import Record, Snapshot
    from pathlens.training import train

__all__ = [
    "DLGNClassifier",
    "DLGNRegressor",
    "PathKernelClassifier",
    "PathKernelRegressor",
    "Record",
    "Snapshot",
    "Trajectory",
    "__version__",
    "data",
    "errors",
    "estimators",
    "exact_precision",
    "gated_twin",
    "harden",
    "hardening",
    "kernels",
    "linops",
    "models",
    "papers",
    "paths",
    "rebuild",
    "record",
    "recording",
    "records",
    "regions",
    "snapshot",
    "theory",
    "train",
    "training",
]


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
