"""Measures of localisation on a ring: how few neighbouring coordinates a receptive field uses, and where they lie.

Each takes weights of shape (…, d) and returns one number per receptive field. A peak that sits on an offset (single
pulses) needs ``centre="median"``. `sign_alternation` distinguishes a bump from a localised oscillation; the inverse
participation ratio does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.errors import OptionError, ShapeError
from pathlens.theory.inputs import check_finite, float_array


def _fields(w: Any, where: str, centre: str | None) -> np.ndarray:
    fields = float_array(w)
    if fields.ndim == 0 or fields.shape[-1] < 2:
        raise ShapeError(f"{where}: weights have shape {fields.shape}, expected (…, d) with d ≥ 2.")
    check_finite(f"{where}: the array of weights", fields)
    if centre == "median":
        fields = fields - np.median(fields, axis=-1, keepdims=True)
    elif centre is not None:
        raise OptionError(f"{where}: centre={centre!r}, expected None or 'median'.")
    # no measure depends on scale, but fourth powers of very large or small weights do not fit a float
    return np.ldexp(fields, -np.frexp(np.abs(fields).max(-1, keepdims=True))[1])


def ipr(w: Any, *, centre: str | None = None) -> np.ndarray:
    """Inverse participation ratio Σ_i w_i⁴ / (Σ_i w_i²)²: 1/d for a constant, 1 for a single coordinate.

    Parameters
    ----------
    w : array (…, d)
    centre : {None, "median"}
        Subtract the median first.

    Returns
    -------
    array (…,)
        NaN for a field of zeros. See `ipr_references` for the values of noise and waves.

    Examples
    --------
    >>> float(ipr([0.0, 0.0, 1.0, 0.0])), float(ipr(np.ones(8)))
    (1.0, 0.125)
    """
    square = _fields(w, "ipr", centre) ** 2
    total = square.sum(-1)
    return np.divide((square**2).sum(-1), total**2, out=np.full(total.shape, np.nan), where=total > 0)[()]


def ipr_references(d: int) -> dict[str, float]:
    """Values of `ipr` for fields that are not localised, and for the most localised one.

    Examples
    --------
    >>> {name: round(value, 4) for name, value in ipr_references(40).items()}
    {'constant': 0.025, 'sinusoid': 0.0375, 'gaussian noise': 0.0714, 'one coordinate': 1.0}
    """
    return {"constant": 1 / d, "sinusoid": 1.5 / d, "gaussian noise": 3 / (d + 2), "one coordinate": 1.0}


def arc90(w: Any, *, share: float = 0.9, centre: str | None = None) -> np.ndarray:
    """Length of the shortest arc of the ring with 90 % of Σ w_i², as a share of d; noise has about 0.76 at d = 40.

    Examples
    --------
    >>> float(arc90([0.0, 3.0, 4.0, 0.0, 0.0])), float(arc90(np.ones(10)))
    (0.4, 0.9)
    """
    if not 0 < share <= 1:
        raise OptionError(f"arc90: share={share}, expected a number in (0, 1].")
    square = _fields(w, "arc90", centre) ** 2
    d = square.shape[-1]
    total = square.sum(-1)
    # energy of every arc: windows on the ring laid out twice
    sums = np.concatenate([np.zeros((*total.shape, 1)), np.cumsum(np.concatenate([square, square], -1), -1)], -1)
    length = np.full(total.shape, np.nan)
    for arc in range(d, 0, -1):
        most = (sums[..., arc : arc + d] - sums[..., :d]).max(-1)
        length = np.where((most >= share * total * (1 - 1e-12)) & (total > 0), arc / d, length)
    return length[()]


def sign_alternation(w: Any, *, centre: str | None = None) -> np.ndarray:
    """Share of the neighbour products on the ring that is negative: Σ_i [−w_i w_{i+1}]₊ / Σ_i |w_i w_{i+1}|.

    0 for a bump, 1 for an oscillation that changes sign at every step, one half for noise. Small coordinates count
    little.

    Examples
    --------
    >>> float(sign_alternation([0.0, 1.0, 2.0, 1.0])), float(sign_alternation([1.0, -1.0, 1.0, -1.0]))
    (0.0, 1.0)
    """
    fields = _fields(w, "sign_alternation", centre)
    products = fields * np.roll(fields, -1, axis=-1)
    total = np.abs(products).sum(-1)
    return np.divide(np.maximum(-products, 0).sum(-1), total, out=np.full(total.shape, np.nan), where=total > 0)[()]


def centre_of_mass(w: Any, *, centre: str | None = None) -> np.ndarray:
    """Position of a field on the ring: (d/2π) arg Σ_i w_i² e^{2πi·i/d}, in [0, d).

    NaN for a field without a position: zeros, or equal weights all around the ring.

    Examples
    --------
    >>> float(centre_of_mass([1.0, 0.0, 0.0, 1.0]).round(6)), float(centre_of_mass([0.0, 0.0, 5.0, 0.0]).round(6))
    (3.5, 2.0)
    """
    square = _fields(w, "centre_of_mass", centre) ** 2
    d = square.shape[-1]
    mean = square @ np.exp(2j * np.pi * np.arange(d) / d)
    place = np.angle(mean) * d / (2 * np.pi) % d
    place = np.where(place < d, place, 0.0)  # an angle just below zero rounds to d
    return np.where(np.abs(mean) > 1e-13 * square.sum(-1), place, np.nan)[()]


def kurtosis(w: Any) -> np.ndarray:
    """Excess kurtosis of the d weights of a field about their mean: about 0 for Gaussian noise, large for a peak.

    NaN for a constant field.

    Examples
    --------
    >>> float(kurtosis([1.0, -1.0, 1.0, -1.0])), float(kurtosis(np.eye(40)[0]).round(2))
    (-2.0, 35.03)
    """
    fields = _fields(w, "kurtosis", None)
    away = fields - fields.mean(-1, keepdims=True)
    variance = (away**2).mean(-1)
    out = np.full(variance.shape, np.nan)
    # equal weights differ from their mean by rounding
    return (np.divide((away**4).mean(-1), variance**2, out=out, where=np.ptp(fields, axis=-1) > 0) - 3)[()]


def circular_correlation(a: Any, b: Any, d: float) -> float:
    """How well positions a predict positions b on a ring of length d: mean cos(2π(a − b)/d).

    1 where they are equal, 0 on average where one of them is uniform and unrelated; a common shift lowers the value.

    Examples
    --------
    >>> circular_correlation([0.0, 10.0], [40.0, 10.0], d=40)
    1.0
    """
    first, second = float_array(a), float_array(b)
    if first.shape != second.shape or first.size == 0 or not d > 0:
        raise ShapeError(f"circular_correlation: positions have shapes {first.shape} and {second.shape}, d={d}.")
    return float(np.cos(2 * np.pi * (first - second) / d).mean())
