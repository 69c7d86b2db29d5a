"""Inputs of the theory functions as checked float64 NumPy: arrays, times, initial weights, and weighted rows of data.

Every mean ⟨·⟩ of the theory is a weighted sum over rows, so a sample (equal weights) and a distribution with finitely
many inputs (its probabilities) have the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pathlens.data import NLGP, DataSet, SinglePulse, as_pair
from pathlens.errors import EmptyDataError, LabelError, NotFiniteError, OptionError, ShapeError


def float_array(value: Any) -> np.ndarray:
    """A tensor (on any device, with or without gradient) or anything like an array, as float64 NumPy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()  # NumPy has no bfloat16
    return np.asarray(value, dtype=np.float64)


def check_finite(what: str, *arrays: np.ndarray) -> None:
    """Raise NotFiniteError if an array contains NaN or infinity; `what` is the beginning of the message."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise NotFiniteError(f"{what} contains NaN or infinity. Remove such values.")


def check_positive(where: str, **values: float) -> None:
    """Raise OptionError unless every named value is a finite positive number."""
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise OptionError(f"{where}: {name}={value!r}, expected a positive number.")


@dataclass(frozen=True, eq=False)
class WeightedRows:
    """Inputs x (n, d), targets y (n,) and weights p (n,) that sum to 1, all float64.

    Examples
    --------
    >>> from pathlens.data import SinglePulse
    >>> WeightedRows.from_data(SinglePulse(d=12, xi1=(0.25, 0.34), xi2=(0.0, 0.17)))
    WeightedRows(72 rows of 12 inputs, weighted)
    >>> WeightedRows.from_data(([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])).p
    array([0.5, 0.5])
    """

    x: np.ndarray
    y: np.ndarray
    p: np.ndarray

    @classmethod
    def from_data(cls, data: Any) -> WeightedRows:
        """From data with targets in any form, ``(X, y, p)``, or a SinglePulse sampler, whose inputs are enumerated.

        Raises
        ------
        ShapeError, EmptyDataError, NotFiniteError, OptionError
            For rows and targets that do not match, no rows, NaN, or weights that are not probabilities.
        """
        if isinstance(data, WeightedRows):
            return data
        if isinstance(data, NLGP):
            raise OptionError(
                "theory: an NLGP sampler has infinitely many inputs. Draw rows with sampler.sample(n), "
                "or take nlgp_moments(sampler, …) for gates whose moments are known exactly."
            )
        if isinstance(data, DataSet) and data.task != "regression":
            raise LabelError(
                f"theory: {data.name!r} holds class labels; a flow needs real targets. Pass "
                "(data.x, data.y.double()) for two classes 0 and 1."
            )
        if isinstance(data, SinglePulse):
            data = data.enumerate()
        weights = None
        if isinstance(data, (tuple, list)) and len(data) == 3:
            *data, weights = data
        x, y = (float_array(part) for part in as_pair(data, where="theory"))
        n = len(x) if x.ndim else 0
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if x.ndim != 2 or y.shape != (n,):
            raise ShapeError(f"theory: expected X (n, d) and y (n,) or (n, 1), got {x.shape} and {y.shape}.")
        if x.size == 0:
            raise EmptyDataError(f"theory: no rows: X has shape {x.shape}. Give at least one.")
        p = np.full(n, 1 / n) if weights is None else float_array(weights)
        check_finite("theory: X or y", x, y)
        if p.shape != (n,) or not (p >= 0).all() or abs(p.sum() - 1) > 1e-9:
            raise OptionError(
                f"theory: weights p must be {n} numbers ≥ 0 that sum to 1, got shape {p.shape} and sum "
                f"{p.sum():g}. Divide them by their sum."
            )
        return cls(x, y, p)

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.x)

    @property
    def d(self) -> int:
        """Input dimension."""
        return self.x.shape[1]

    def __repr__(self) -> str:
        return f"WeightedRows({self.n} rows of {self.d} inputs{'' if np.ptp(self.p) == 0 else ', weighted'})"


def initial_weights(w0: Any, K: int, d: int, where: str) -> np.ndarray:
    """Initial weights (K, d) as a float64 copy; None is zeros."""
    if w0 is None:
        return np.zeros((K, d))
    w = float_array(w0).copy()
    if w.shape != (K, d):
        raise ShapeError(f"{where}: w0 has shape {w.shape}, expected ({K}, {d}): one row per unit.")
    check_finite(f"{where}: w0", w)
    return w


def as_times(t: Any, where: str) -> np.ndarray:
    """Times as a float64 array, infinity included; raises OptionError for negative times and NaN."""
    times = float_array(t)
    if not (times >= 0).all():
        raise OptionError(f"{where}: t={t!r}, expected times ≥ 0. The flow starts at t = 0.")
    return times
