"""The first root of many polynomials on [0, 1], without missing one.

By the variation-diminishing property a polynomial has no more roots in (0, 1) than its Bernstein coefficients change
sign, so equal signs prove that there is none, and one change isolates a single root.
"""

from __future__ import annotations

from functools import cache
from math import comb

import numpy as np

_DEEPEST = 50  # halvings of [0, 1]: a cell of 1e-15 that is still undecided is a root touched without crossing
_GRID = 16


@cache
def bernstein_table(p: int) -> np.ndarray:
    """T (p+1, p+1) with ``c @ T`` the Bernstein coefficients of Σ_j c_j s^j: T_ji = C(i, j)/C(p, j).

    Examples
    --------
    >>> np.array([0.0, 1.0, 0.0]) @ bernstein_table(2)
    array([0. , 0.5, 1. ])
    """
    return np.array([[comb(i, j) / comb(p, j) for i in range(p + 1)] for j in range(p + 1)])


def first_violation(coefficients: np.ndarray) -> tuple[float, int]:
    """The smallest s in [0, 1] at which any of m polynomials turns negative, and its index; (1, −1) if none does.

    Parameters
    ----------
    coefficients : array (m, p+1)
        Of Σ_j c_j s^j, each non-negative at 0; s = 0 for one that is negative there.

    Notes
    -----
    Exact up to rounding of the root: no crossing is missed, however short the stretch below zero, down to cells of
    2^−50. O(m p²) for the test that settles nearly all of them.

    Examples
    --------
    >>> first_violation(np.array([[1.0, -2.0, 0.0], [1.0, 0.0, 0.0]]))
    (0.5..., 0)
    >>> dip = np.polynomial.polynomial.polyfromroots([0.7, 0.701])[None]   # negative on a thousandth of the interval
    >>> round(first_violation(dip)[0], 12)
    0.7
    """
    b = coefficients @ bernstein_table(coefficients.shape[1] - 1)
    some = np.flatnonzero((b < 0).any(1))
    if len(some) == 0:
        return 1.0, -1
    leading = (coefficients[some] != 0).argmax(1)  # the first coefficient that is not zero has the sign just after 0
    at_zero = some[coefficients[some, leading] < 0]
    if len(at_zero):
        return 0.0, int(at_zero[0])
    single = (_changes(b[some]) == 1) & (b[some, -1] < 0)
    best, which = 1.0, -1
    once = some[single]
    if len(once):
        # only those that are below zero at the earliest grid point can be first
        grid = np.arange(1, _GRID + 1) / _GRID
        values = coefficients[once] @ (grid ** np.arange(coefficients.shape[1])[:, None])
        values[:, -1] = -1.0
        cell = (values < 0).argmax(1)
        low = int(cell.min())
        for i in once[cell == low]:
            s = _bracketed(coefficients[i].tolist(), low / _GRID, (low + 1) / _GRID)
            if s < best or which < 0:
                best, which = s, int(i)
    for i in some[~single]:
        found = _isolate(b[i], 0.0, 1.0, best, coefficients[i].tolist())
        if found is not None and (found < best or which < 0):
            best, which = found, int(i)
    return best, which


def _changes(b: np.ndarray) -> np.ndarray:
    """Sign changes along each row, zeros skipped."""
    signs = np.sign(b)
    for i in range(1, signs.shape[1]):
        signs[:, i] = np.where(signs[:, i] == 0, signs[:, i - 1], signs[:, i])
    return (signs[:, 1:] * signs[:, :-1] < 0).sum(1)


def _value(c: list[float], s: float) -> float:
    total = 0.0
    for a in reversed(c):
        total = total * s + a
    return total


def _bracketed(c: list[float], low: float, high: float) -> float:
    """The single root between low (where c ≥ 0) and high (where c < 0): Newton inside a shrinking bracket."""
    slope = [j * a for j, a in enumerate(c)][1:]
    s = (low + high) / 2
    for _ in range(100):
        value = _value(c, s)
        if value < 0:
            high = s
        else:
            low = s
        steep = _value(slope, s)
        new = s - value / steep if steep < 0 else low
        if not low < new < high:
            new = (low + high) / 2
        if abs(new - s) <= 1e-16 * (1 + s) or high - low <= 1e-16:
            return new
        s = new
    return s


def _isolate(b: np.ndarray, low: float, high: float, limit: float, c: list[float]) -> float | None:
    """First crossing in [low, high) before `limit`, by halving (de Casteljau) until one sign change is left."""
    if low >= limit or not (b < 0).any():
        return None
    if _changes(b[None])[0] == 1 and b[0] >= 0 > b[-1]:
        return _bracketed(c, low, high)
    if b[0] < 0:
        return low
    if high - low < 2.0**-_DEEPEST:
        return None
    left, right, row = [b[0]], [b[-1]], b
    while len(row) > 1:
        row = (row[1:] + row[:-1]) / 2
        left.append(row[0])
        right.append(row[-1])
    middle = (low + high) / 2
    found = _isolate(np.array(left), low, middle, limit, c)
    return found if found is not None else _isolate(np.array(right[::-1]), middle, high, limit, c)
