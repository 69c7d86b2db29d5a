"""Tables as users have them: scikit-learn's checks, and columns that hold other things than numbers by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.utils.validation import validate_data

from pathlens.errors import DTypeError


def checked(estimator: Any, X: Any, *y: Any, **how: Any) -> Any:
    """`validate_data` of scikit-learn, to float64, with remedies for what encoders and pandas tables bring."""
    try:
        return validate_data(estimator, X, *y, dtype=np.float64, **how)
    except (ValueError, TypeError) as error:
        who = type(estimator).__name__
        if issparse(X):
            raise DTypeError(f"{who}: X is a sparse matrix, expected a dense one. Give X.toarray(), or in a pipeline "
                             "OneHotEncoder(sparse_output=False) or make_column_transformer(…, sparse_threshold=0)."
                             ) from error  # fmt: skip
        table = hasattr(X, "iloc") and hasattr(X, "columns")
        names = [repr(name) for name, column in X.items() if not numbers(column)] if table else []
        if not names:
            raise
        others = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise DTypeError(f"{who}: columns with values that are no numbers: {', '.join(names[:5])}"
                         f"{others}. Encode them, for example with scikit-learn's OneHotEncoder in "
                         "make_column_transformer, or leave them out.") from error  # fmt: skip


def numbers(column: Any) -> bool:
    """Whether a column of a table can be read as numbers."""
    if column.dtype.kind in "mM":  # dates would be counted in nanoseconds
        return False
    try:
        np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return True
