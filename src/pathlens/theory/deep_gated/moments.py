"""Deep gated networks at initialisation: the exact mean and variance of the Gram matrix K₀, and its ideal spectrum.

Values are drawn independently of the gates (DGN, Assumptions 1 and 2), so that both moments are finite sums over paths,
which a recursion over layers computes without listing the paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pathlens.errors import OptionError, ShapeError
from pathlens.theory.inputs import check_finite, float_array

Sigma = float | Sequence[float]


# --- the mean over fixed random gates --------------------------------------------------------------


def ideal_gram(X: Any, hidden_layers: int, *, probability: float = 0.5) -> np.ndarray:
    """E[K₀]/d of fixed random gates with σ² = 1/(μw): x_s·x_s′ on the diagonal, μ^L x_s·x_s′ elsewhere; (n, n).

    Examples
    --------
    >>> ideal_gram([[1.0], [1.0]], hidden_layers=2)
    array([[1.  , 0.25],
           [0.25, 1.  ]])
    """
    x = _matrix("X", X)
    gram = (x @ x.T) * _probability(probability) ** _count("hidden_layers", hidden_layers)
    gram[np.diag_indices(len(x))] = np.square(x).sum(1)
    return gram


def ideal_spectrum(n: int, hidden_layers: int, *, probability: float = 0.5) -> np.ndarray:
    """Eigenvalues, ascending, of `ideal_gram` for n equal inputs of norm one (DGN, equation 5).

    1 − μ^L, n − 1 times, and 1 + (n − 1)μ^L: deeper is whiter, and the condition number tends to 1.

    Examples
    --------
    >>> ideal_spectrum(3, hidden_layers=1)
    array([0.5, 0.5, 2. ])
    """
    share = _probability(probability) ** _count("hidden_layers", hidden_layers)
    return np.append(np.full(_count("n", n) - 1, 1 - share), 1 + (n - 1) * share)


# --- mean and variance of K₀ --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GramMoments:
    """Mean and variance of every entry of the Gram matrix K₀ over random values.

    Attributes
    ----------
    mean, variance : (n, n)
    """

    mean: np.ndarray
    variance: np.ndarray

    @property
    def relative_error(self) -> float:
        """√(E‖K₀ − E K₀‖²_F)/‖E K₀‖_F: the relative error of one draw of the values."""
        return float(np.sqrt(self.variance.sum()) / np.linalg.norm(self.mean))

    def __repr__(self) -> str:
        n = len(self.mean)
        return f"GramMoments(E[K₀] and Var[K₀], {n} × {n}; relative error of one draw {self.relative_error:.2g})"


def gram_moments(X: Any, gates: Sequence[Any], sigma: Sigma, *, excess: float = -2.0) -> GramMoments:
    """Exact mean and variance of K₀(s, t) = ⟨∂f(s)/∂Θ, ∂f(t)/∂Θ⟩ over independent values, for given gates.

    E[K₀] = d σ^{2(d−1)} (XXᵀ ∘ λ) (DGN, Theorem 2.3). For E[K₀²], write K₀² as a sum over four paths, two for s and two
    for t. Between two layers only four sums over them matter: A, where the units of each pair agree; B and C, where
    units of different pairs agree; Q, where all four do. A layer of gates g, h of the two inputs, with p = (Σgh)²,
    r = Σg² Σh² and t = Σg²h², maps them to

    A′ = σ⁴[pA + t(B + C + κQ)],  B′ = σ⁴[rB + t(A + C + κQ)],  C′ = σ⁴[pC + t(A + B + κQ)],  Q′ = σ⁴t(A + B + C + κQ),

    κ = E[θ⁴]/σ⁴ − 3. A layer whose weight one pair is differentiated by maps A to σ²A(p, t, t, t), and one where both
    are to A(p, t, t, t).

    Parameters
    ----------
    X : (n, d)
        Inputs of the value network.
    gates : L arrays (n, w_l)
        Hard or soft, of any origin that is independent of the values.
    sigma : float or L + 1 floats
        Standard deviation of the weights, in all layers or per layer.
    excess : float
        κ of the weights: −2 for ±σ (DGN, Assumption 1), 0 for normal, −1.2 for uniform ones.

    Returns
    -------
    GramMoments. Exact to rounding, n²·(d + Σ 6w_l) operations.

    Examples
    --------
    >>> moments = gram_moments([[1.0]], [np.ones((1, 4)), np.ones((1, 4))], sigma=0.5)
    >>> moments
    GramMoments(E[K₀] and Var[K₀], 1 × 1; relative error of one draw 0.29)
    >>> moments.mean, moments.variance
    (array([[3.]]), array([[0.75]]))
    """
    x, layers = _matrix("X", X), [_matrix(f"gates[{layer}]", g) for layer, g in enumerate(gates)]
    if not layers:
        raise OptionError("gram_moments: gates is empty. Give the gates of at least one hidden layer.")
    rows = {len(g) for g in layers}
    if rows != {len(x)}:
        raise ShapeError(f"gram_moments: X has {len(x)} rows, the gates {max(rows)}. Use the same inputs.")
    return _moments(x, [_pair_sums(g) for g in layers], sigma, excess)


def frg_moments(
    X: Any, hidden: Sequence[int], *, probability: float = 0.5, sigma: Sigma | None = None, excess: float = -2.0
) -> GramMoments:
    """Exact mean and variance of K₀ over random values *and* fixed random gates, Bernoulli(μ) bits per input and unit.

    As `gram_moments`, with the means of p, r and t over the gates, which layers draw independently. With ``hidden`` of
    equal widths, one input x = 1 and μ = 1 it is the variance of a deep linear network (DGN, Theorem 2.3).

    Parameters
    ----------
    X : (n, d)
    hidden : sequence of int
        Widths of the hidden layers.
    probability : float
        μ, that a gate is on.
    sigma : float or L + 1 floats, optional
        Default √(1/(μw)) with the width of the first hidden layer.

    Examples
    --------
    >>> frg_moments([[1.0]], hidden=(100,) * 3, probability=1.0).variance.round(3)  # leading order: 0.2
    array([[0.198]])
    """
    x, mu = _matrix("X", X), _probability(probability)
    widths = [_count("width", w) for w in hidden]
    if not widths:
        raise OptionError("frg_moments: hidden is empty. Give the width of each hidden layer.")
    same = np.eye(len(x), dtype=bool)
    sums = []
    for w in widths:
        on = np.where(same, mu, mu * mu)  # that a gate is on for both
        square = w * on * (1 - on) + (w * on) ** 2
        sums.append((w * on, square, np.where(same, square, (w * mu) ** 2), w * on))
    return _moments(x, sums, math.sqrt(1 / (mu * widths[0])) if sigma is None else sigma, excess)


_Sums = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # Σgh, p, r, t of one layer, each (n, n)


def _pair_sums(g: np.ndarray) -> _Sums:
    both, squares = g @ g.T, np.square(g)
    own = squares.sum(1)
    return both, both * both, np.outer(own, own), squares @ squares.T


def _moments(x: np.ndarray, layers: list[_Sums], sigma: Sigma, excess: float) -> GramMoments:
    mean, p, r, t = _pair_sums(x)
    last = (np.ones_like(mean),) * 4  # the output layer has no gates
    # sums[i] = (A, B, C, Q) where i of the two pairs have been differentiated
    sums = np.zeros((3, 4, *mean.shape))
    sums[0] = p, r, p, t
    share = 0.0
    for v, (overlap, p, r, t) in zip(_sigmas(sigma, len(layers) + 1) ** 2, [*layers, last]):
        mixed = t * (sums[:, :3].sum(1) + excess * sums[:, 3])
        moved = v * v * ((np.stack([p, r, p, t]) - t) * sums + mixed[:, None])
        injected = np.stack([p, t, t, t])
        moved[1] += 2 * v * injected * sums[0, 0]
        moved[2] += injected * (v * sums[1, 0] + sums[0, 0])
        sums = moved
        mean, share = mean * overlap * v, share + 1 / v
    mean = mean * share
    return GramMoments(mean, np.maximum(sums[2, 0] - mean * mean, 0.0))


def variance_law(width: float, hidden_layers: int) -> float:
    """Var[K₀] ≈ (2/(3w))(d − 1)(d − 2)(2d − 3) = Θ(d³/w): leading order in d/w, d = L + 1 weight layers.

    For a deep linear network with one input x = 1 and σ² = 1/w; fixed random gates have μw in place of w. Two paths can
    be spliced wherever they share a unit, which the paper's proof counts for shared weights only: it prints
    `printed_variance_bound`. The exact value is `frg_moments`.

    Examples
    --------
    >>> variance_law(100, hidden_layers=3), printed_variance_bound(100, hidden_layers=3)
    (0.2, 0.16)
    """
    d = _count("hidden_layers", hidden_layers) + 1
    return 2 / (3 * width) * (d - 1) * (d - 2) * (2 * d - 3)


def printed_variance_bound(width: float, hidden_layers: int) -> float:
    """max{d²/w, d³/w²}, the order that Theorem 2.3 of the DGN paper prints; too small by a factor that grows like d."""
    d = _count("hidden_layers", hidden_layers) + 1
    return max(d**2 / width, d**3 / width**2)


# --- arguments -----------------------------------------------------------------------------------------------------


def _matrix(what: str, value: Any) -> np.ndarray:
    matrix = float_array(value)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ShapeError(f"{what} has shape {matrix.shape}, expected two axes, one row per input.")
    check_finite(f"{what} of shape {matrix.shape}", matrix)
    return matrix


def _sigmas(sigma: Sigma, layers: int) -> np.ndarray:
    values = np.asarray(sigma, dtype=np.float64)
    if values.ndim == 0:
        values = np.full(layers, values)
    if values.shape != (layers,) or not (np.isfinite(values) & (values > 0)).all():
        raise OptionError(f"sigma: expected one positive number or {layers}, one per weight layer, got {sigma!r}.")
    return values


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise OptionError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def _probability(value: float) -> float:
    if not 0 < value <= 1:
        raise OptionError(f"probability must be in (0, 1], got {value!r}.")
    return float(value)
