"""Fitted estimators on disk: safetensors and JSON, as `pathlens.records` writes them; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from pathlens.errors import FileFormatError, OptionError
from pathlens.records import TensorHeader, load_tensors, save_tensors
from pathlens.regions.halfspace_model import HalfSpaceModel

E = TypeVar("E")
_SCALARS = ("loss_", "soft_loss_", "hardening_", "weight_decay_", "n_iter_", "n_features_in_", "_one_target")


class ClassLabels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The class labels of a classifier, and their numpy dtype."""

    values: list[Any]
    dtype: str


class EstimatorHeader(TensorHeader, tag="pathlens.estimator", frozen=True, kw_only=True):
    """The JSON file of a fitted estimator."""

    estimator: str
    parameters: dict[str, Any]
    fitted: dict[str, Any]
    feature_names: list[str] | None
    classes: ClassLabels | None


def save_estimator(estimator: Any, path: str | Path) -> None:
    """Write a fitted DLGN estimator."""
    name = type(estimator).__name__
    parameters = estimator.get_params()
    if not (parameters["random_state"] is None or isinstance(parameters["random_state"], Integral)):
        raise OptionError(
            f"{name}.save: random_state is a {type(parameters['random_state']).__name__}, which a file "
            "cannot hold. Use an int: estimator.set_params(random_state=0)."
        )
    names = estimator.feature_names_in_.tolist() if hasattr(estimator, "feature_names_in_") else None
    classes = None
    if hasattr(estimator, "classes_"):
        labels = estimator.classes_
        listed = labels.tolist()
        if not all(isinstance(v, (str, bool, int, float)) for v in listed):
            raise OptionError(f"{name}.save: class labels must be strings or numbers to be written to a file.")
        # the dtype keeps numpy strings and Python strings apart
        classes = ClassLabels(listed, "object" if labels.dtype == object else labels.dtype.str)
    tensors = {k: torch.tensor(a) for k, a in estimator.model_.arrays().items()}
    header = EstimatorHeader(
        estimator=name,
        parameters={k: _plain(v) for k, v in parameters.items()},
        fitted={k: _plain(getattr(estimator, k)) for k in _SCALARS if hasattr(estimator, k)},
        feature_names=names,
        classes=classes,
    )
    save_tensors(path, tensors, header)


def load_estimator(cls: type[E], path: str | Path) -> E:
    """Read an estimator of this class that `save_estimator` wrote."""
    tensors, header = load_tensors(path, EstimatorHeader)
    if header.estimator != cls.__name__:
        raise FileFormatError(f"{path}: holds a {header.estimator}, not a {cls.__name__}. Load it with that class.")
    try:
        parameters = {k: _from_plain(v) for k, v in header.parameters.items()}
        estimator: Any = cls(**parameters)
        estimator.model_ = HalfSpaceModel.from_arrays({k: t.numpy() for k, t in tensors.items()})
        for name, value in header.fitted.items():
            if name not in _SCALARS:
                raise KeyError(name)
            setattr(estimator, name, value)
        if header.feature_names is not None:
            estimator.feature_names_in_ = np.asarray(header.feature_names, dtype=object)
        if header.classes is not None:
            estimator.classes_ = _labels(header.classes.values, header.classes.dtype)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileFormatError(f"{path}: the file lacks or misstates {error}. Save the estimator again.") from error
    found: E = estimator
    return found


def _labels(values: list[Any], dtype: str) -> np.ndarray:
    """Class labels in their saved dtype, of limited size."""
    kind = np.dtype(dtype)
    if len(values) * kind.itemsize > 1 << 26:
        raise ValueError(f"{len(values)} class labels of dtype {dtype!r}, more than a model has")
    return np.asarray(values, dtype=kind)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):  # keys of JSON are strings, but labels may be numbers
        return {"keys": _plain(list(value)), "values": _plain(list(value.values()))}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _from_plain(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, dict):
        return dict(zip(value["keys"], value["values"], strict=True))
    return tuple(value) if isinstance(value, list) else value
