"""Checks of tables: scikit-learn's validation, and errors that name the columns that are not numeric.

Text and categories are not numbers, even if their values look like numbers: "1" may be a quantity or a code, and only
the user can decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.utils.validation import validate_data

from pathlens.errors import DTypeError, ScaleError

_LARGEST = 1e200  # in training: means, differences and outputs of larger numbers may overflow
_FARTHEST = 1e100  # standard deviations between a row and the training rows, for the same reason


def validate_table(estimator: Any, X: Any, *y: Any, **how: Any) -> Any:
    """scikit-learn's `validate_data` to float64, with remedies for sparse matrices, text and categories."""
    who = type(estimator).__name__
    table = hasattr(X, "iloc") and hasattr(X, "columns")
    if table:
        _refuse_columns(who, X)
    elif _has_text(X):
        raise DTypeError(
            f"{who}: X holds text, expected numbers. Text is not read as numbers: encode it, for example "
            "with scikit-learn's OneHotEncoder, or convert it with X.astype(float)."
        )
    if how.get("y_numeric") and _has_text(*y):
        raise DTypeError(
            f"{who}: y holds text, expected numbers. Convert it with y.astype(float), or fit a classifier."
        )
    try:
        found = validate_data(estimator, X, *y, dtype=np.float64, **how)
    except (ValueError, TypeError) as error:
        if issparse(X):
            raise DTypeError(
                f"{who}: X is a sparse matrix, expected a dense one. Give X.toarray(), or in a pipeline "
                "OneHotEncoder(sparse_output=False) or make_column_transformer(…, sparse_threshold=0)."
            ) from error
        raise
    if y:
        names = getattr(estimator, "feature_names_in_", None)
        _refuse_large(who, names, found[0], found[0], _LARGEST, f"a magnitude above {_LARGEST:g}")
        if how.get("y_numeric"):
            targets = np.asarray(found[1], dtype=np.float64).reshape(len(found[1]), -1)
            _refuse_large(f"{who}: y", None, targets, targets, _LARGEST, f"a magnitude above {_LARGEST:g}")
    return found


def check_range(estimator: Any, X: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return X, or raise an error if a value is so far from the training rows that outputs would overflow.

    Parameters
    ----------
    X : (n, d)
    centre, spread : (d,)
        Mean and standard deviation in training; 0 for a constant column, which has no influence.
    """
    with np.errstate(over="ignore"):
        distance = np.where(spread == 0, 0.0, X - centre) / np.where(spread == 0, 1.0, spread)
    names = getattr(estimator, "feature_names_in_", None)
    _refuse_large(
        type(estimator).__name__,
        names,
        X,
        distance,
        _FARTHEST,
        f"more than {_FARTHEST:g} standard deviations from the mean in training",
    )
    return X


def _refuse_large(who: str, names: Any, values: np.ndarray, size: np.ndarray, limit: float, what: str) -> None:
    """Raise an error that names the first of the values (n, d) whose size (n, d) exceeds the limit."""
    found = np.argwhere(np.abs(size) > limit)
    if len(found):
        row, column = found[0]
        name = column if names is None else repr(str(names[column]))
        raise ScaleError(
            f"{who}: column {name} holds {values[row, column]:g} in row {row} (counted from 0), {what}; "
            "outputs would overflow. Correct the value, or leave out the row."
        )


def _refuse_columns(who: str, X: Any) -> None:
    """Raise an error that names the columns that are not numeric, with a remedy."""
    columns = [(name, column) for name, column in X.items() if not is_numeric(column)]
    if not columns:
        return
    names = [repr(name) for name, _ in columns]
    others = f" and {len(names) - 5} more" if len(names) > 5 else ""
    like = [repr(name) for name, column in columns if _is_convertible(column)]
    also = f" If {', '.join(like[:5])} hold quantities, not codes, convert with astype(float)." if like else ""
    raise DTypeError(
        f"{who}: columns that are not numeric: {', '.join(names[:5])}{others}. Encode them, "
        "for example with scikit-learn's OneHotEncoder in make_column_transformer, or leave them out."
        f"{also}"
    )


def is_numeric(column: Any) -> bool:
    """Whether a column holds numbers; text, categories and dates are not numbers."""
    if column.dtype.kind in "mM" or str(column.dtype) == "category":  # dates would become nanoseconds
        return False
    return not _has_text(column) and _is_convertible(column)


def _is_convertible(column: Any) -> bool:
    """Whether the values of a column can be converted to float64."""
    if column.dtype.kind in "mM":
        return False
    try:
        np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return True


def _has_text(values: Any) -> bool:
    """Whether an array, a list or a column contains text."""
    if issparse(values):
        return False
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # ragged lists: scikit-learn raises the error
        return False
    if array.dtype.kind != "O":
        return array.dtype.kind in "UST"
    return any(isinstance(value, str | bytes) for value in array.ravel())
