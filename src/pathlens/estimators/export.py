"""`predict_from_export`: predictions of an exported model with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def predict_from_export(export: Mapping[str, Any], X: Any) -> np.ndarray:
    """The result of ``estimator.predict(X)``, from ``estimator.export()`` and numpy alone.

    Copy this function to use an exported model without Pathlens.

    Examples
    --------
    >>> step = {"normals": [np.array([[1.0]])], "offsets": [np.array([0.0])], "weights": [np.zeros((1, 1)),
    ...         np.ones((1, 1))], "biases": [np.array([2.0]), np.array([1.0])], "feature_names": ["x0"],
    ...         "classes": None, "one_target": True}
    >>> predict_from_export(step, [[-3.0], [5.0]])
    array([1., 3.])
    """
    if hasattr(X, "columns") and set(export["feature_names"]) <= set(X.columns):
        X = X[export["feature_names"]]  # columns of a table by name, in any order
    x = np.asarray(X, dtype=np.float64)
    h = x
    for normal, offset, weight, bias in zip(export["normals"], export["offsets"], export["weights"], export["biases"]):
        h = (x @ normal.T + offset > 0) * (h @ weight.T + bias)
    f = h @ export["weights"][-1].T + export["biases"][-1]
    if export["classes"] is not None:
        return export["classes"][(f[:, 0] > 0).astype(int) if f.shape[1] == 1 else f.argmax(axis=1)]
    return f[:, 0] if export["one_target"] else f
