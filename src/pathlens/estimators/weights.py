"""Targets and weights of rows: those given to `fit`, checked, and times the class weights.

A weight of 3 equals three copies of a row; rows of weight zero count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight

from pathlens.errors import EmptyDataError, LabelError, OptionError
from pathlens.estimators.tables import validate_table


class TargetsMixin(RegressorMixin):
    """Regression of one target or several: reads targets, and returns predictions in their shape."""

    def _read_targets(self, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, targets (n, c) and weights, of the rows with positive weight."""
        X, y = validate_table(self, X, y, multi_output=True, y_numeric=True)
        weights = _row_weights(self, sample_weight, X)
        kept = weights > 0
        y = np.asarray(y, dtype=np.float64)
        self._one_target = y.ndim == 1
        return X[kept], y.reshape(len(y), -1)[kept], weights[kept]

    def decode_predictions(self, f: np.ndarray) -> np.ndarray:
        """Targets (n,) or (n, c), as in `fit`, from outputs f (n, c)."""
        return f[:, 0] if self._one_target else f

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def read_classes(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, ...]:
    """Rows, labels 0, 1, … and weights of the rows with positive weight, and the classes."""
    who = type(estimator).__name__
    X, y = validate_table(estimator, X, y)
    check_classification_targets(y)
    weights = with_class_weight(who, _row_weights(estimator, sample_weight, X), y, estimator.class_weight)
    kept = weights > 0
    classes, labels = np.unique(y[kept], return_inverse=True)
    if len(classes) < 2:
        where = "y holds" if kept.all() else "rows of positive weight hold"
        raise LabelError(
            f"{who}: {where} one class, {classes.tolist()[0]!r}; a classifier needs rows of at least two classes."
        )
    return X[kept], labels, weights[kept], classes


def _row_weights(estimator: Any, sample_weight: Any, X: np.ndarray) -> np.ndarray:
    """One float64 per row, ones if none are given; at least one is positive."""
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not (weights > 0).any():
        who = type(estimator).__name__
        raise EmptyDataError(f"{who}: every sample weight is zero. Give some row a positive weight.")
    return weights


def with_class_weight(who: str, weights: np.ndarray, y: np.ndarray, class_weight: Any) -> np.ndarray:
    """Sample weights times class weights, which are given as in scikit-learn.

    Parameters
    ----------
    weights : (n,)
    y : (n,)
        Labels of any type.
    class_weight : None, "balanced" or mapping of labels to numbers
        "balanced" gives every class the same sum of weights and keeps the sum of all.

    Examples
    --------
    >>> y = np.array(["no", "no", "no", "yes"])
    >>> with_class_weight("me", np.ones(4), y, {"yes": 2})
    array([1., 1., 1., 2.])
    >>> with_class_weight("me", np.ones(4), y, "balanced")
    array([0.66666667, 0.66666667, 0.66666667, 2.        ])
    """
    if class_weight is None:
        return weights
    classes, labels = np.unique(y, return_inverse=True)
    totals = np.bincount(labels, weights)
    there = totals > 0  # rows of weight zero, and classes with no others, count as absent
    if isinstance(class_weight, Mapping):
        factors = _weights_of_classes(who, class_weight, classes[there].tolist())
    elif isinstance(class_weight, str) and class_weight == "balanced":
        factors = totals.sum() / (there.sum() * totals[there])
    else:
        raise OptionError(
            f"{who}: class_weight must be None, 'balanced' or a dict of classes and weights, got {class_weight!r}."
        )
    of_class = np.ones(len(classes))
    of_class[there] = factors
    return weights * of_class[labels]


def _weights_of_classes(who: str, class_weight: Mapping[Any, Any], classes: list[Any]) -> np.ndarray:
    """The weight of each class, 1 for those that the mapping leaves out."""
    for label, weight in class_weight.items():
        if not (isinstance(weight, Real) and 0 <= float(weight) < np.inf):
            raise OptionError(
                f"{who}: class_weight of {label!r} must be a finite number of at least 0, got {weight!r}."
            )
    left_out = [label for label in classes if label not in class_weight]
    unknown = [label for label in class_weight if label not in classes]
    if left_out and unknown:  # an unknown class alone is allowed: a fold may lack one
        raise LabelError(
            f"{who}: class_weight has {', '.join(map(repr, unknown))}, which are not in y, and leaves "
            f"out {', '.join(map(repr, left_out))}. Use the labels of y as keys."
        )
    weights = np.array([float(class_weight.get(label, 1.0)) for label in classes])
    if (weights > 0).sum() < 2 <= len(classes):
        raise OptionError(
            f"{who}: class_weight leaves fewer than two classes of y a positive weight; rows of weight "
            "zero count as absent."
        )
    return weights
