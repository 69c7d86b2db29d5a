"""Gradient flow of a gated linear network in closed form: weights at any time, the limit, and gradient descent.

The model is ŷ = (1/K) x̃·w with x̃ = g(x) ⊗ x and the loss ½⟨(y − ŷ)²⟩, so τ ẇ = b/K − A w/K² with A = ⟨x̃x̃ᵀ⟩ and
b = ⟨x̃y⟩. Gates that change during training are in evolving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pathlens.data import NLGP
from pathlens.errors import DivergedError, OptionError, ShapeError
from pathlens.theory.gates import gate_table, gated_inputs
from pathlens.theory.inputs import WeightedRows, as_times, check_finite, check_positive, float_array, initial_weights

CUTOFF = 1e-12  # eigenvalues below this share of the largest are zero; b has no part there but for rounding


@dataclass(frozen=True, eq=False)
class Moments:
    """A = ⟨x̃x̃ᵀ⟩ (Kd, Kd), b = ⟨x̃y⟩ (Kd,) and ⟨y²⟩, from data or exact.

    Block (i, j) of A is Σ^xx(p_i, p_j) = ⟨g_i g_j xxᵀ⟩, block i of b is Σ^yx(p_i)ᵀ = ⟨g_i y x⟩ (eq. 6, 7).

    Examples
    --------
    >>> Moments.from_data(np.ones((2, 1)), ([[1.0], [-1.0]], [1.0, 0.0]))
    Moments(K=1 gates, d=1 inputs, ⟨y²⟩=0.5)
    """

    A: np.ndarray
    b: np.ndarray
    square: float
    K: int

    def __post_init__(self) -> None:
        A, b = float_array(self.A), float_array(self.b)
        size = len(b) if b.ndim == 1 else -1
        if self.K < 1 or size < 1 or A.shape != (size, size) or size % self.K:
            raise ShapeError(f"Moments: expected A (Kd, Kd) and b (Kd,) for K={self.K}, got {A.shape} and {b.shape}.")
        check_finite("Moments: A or b", A, b)
        if np.abs(A - A.T).max() > 1e-10 * max(np.abs(A).max(), 1e-300):
            raise OptionError("Moments: A is not symmetric. Pass the second moments ⟨x̃x̃ᵀ⟩.")
        object.__setattr__(self, "A", (A + A.T) / 2)
        object.__setattr__(self, "b", b)

    @classmethod
    def from_data(cls, gates: Any, data: Any, *, allow_dead: bool = False) -> Moments:
        """From gates and data, both as in `GDLN.from_data`; O(n K² d²)."""
        rows = WeightedRows.from_data(data)
        g = gate_table(gates, rows.x, allow_dead=allow_dead)
        features = gated_inputs(g, rows.x)
        weighted = features * rows.p[:, None]
        return cls(features.T @ weighted, weighted.T @ rows.y, float(rows.p @ rows.y**2), g.shape[1])

    @property
    def d(self) -> int:
        """Input dimension."""
        return len(self.b) // self.K

    def block(self, i: int, j: int) -> np.ndarray:
        """Σ^xx(p_i, p_j), shape (d, d)."""
        d = self.d
        return self.A[i * d : (i + 1) * d, j * d : (j + 1) * d]

    def __repr__(self) -> str:
        return f"Moments(K={self.K} gates, d={self.d} inputs, ⟨y²⟩={self.square:.4g})"


def nlgp_moments(sampler: NLGP, units: Sequence[str], *, coordinate: int = 0) -> Moments:
    """Exact moments of NLGP inputs for gates that allow it: open ones, and the two sides of one coordinate.

    x and −x are equally likely, so ⟨1[x_c > 0] xxᵀ⟩ = ½Σ^xx exactly, and ⟨xy⟩ = 0. With a = s g² the arcsine law with
    infinite gain on one side gives ⟨sign(x_c) x_j⟩ = (2/π) asin(√a C_cj / √(C_cc (1 + a C_jj))) / Z for each class.
    Gates on two different coordinates would need orthant probabilities of four Gaussians, which have no closed form.

    Parameters
    ----------
    sampler : NLGP
    units : sequence of {"open", "+", "-"}
        The gate of each unit: 1, 1[x_c > 0] or 1[x_c < 0]. ``["+", "-"]`` are exclusive, ``["+", "+"]`` redundant.
    coordinate : int
        c.

    Examples
    --------
    >>> from pathlens.data import NLGP
    >>> moments = nlgp_moments(NLGP(d=20), ["+", "-"])
    >>> bool(np.allclose(moments.block(0, 0), NLGP(d=20).second_moment() / 2)), float(np.abs(moments.block(0, 1)).max())
    (True, 0.0)
    """
    signs = {"open": 0.0, "+": 1.0, "-": -1.0}
    if not units or set(units) - set(signs):
        raise OptionError(f"nlgp_moments: units={list(units)}, expected a list of {sorted(signs)}.")
    if not 0 <= coordinate < sampler.d:
        raise OptionError(f"nlgp_moments: coordinate={coordinate}, expected 0 to {sampler.d - 1}.")
    both = float_array(sampler.second_moment())
    table = np.array(
        [[0.0 if {u, v} == {"+", "-"} else 1.0 if u == v == "open" else 0.5 for v in units] for u in units]
    )
    targets = {1: 1.0, 0: 0.0 if sampler.labels == "01" else -1.0}
    side = sum(0.5 * target * 0.5 * _sign_moment(sampler, label, coordinate) for label, target in targets.items())
    b = np.concatenate([signs[u] * side for u in units])
    return Moments(np.kron(table, both), b, sum(0.5 * t**2 for t in targets.values()), len(units))


def _sign_moment(sampler: NLGP, label: int, c: int) -> np.ndarray:
    """⟨sign(x_c) x⟩ of one class, shape (d,)."""
    root = float_array(replace(sampler, dtype=torch.float64)._roots[0 if label == 1 else 1])
    C = root.T @ root
    a = (2.0 if sampler.convention == "lufkin" else 1.0) * sampler.gain**2
    scale = math.sqrt(2 / math.pi * math.asin(a / (1 + a)))
    inner = np.sqrt(a) * C[c] / np.sqrt(C[c, c] * (1 + a * np.diag(C)))
    return 2 / math.pi * np.arcsin(inner) / scale


@dataclass(frozen=True, eq=False)
class _Modes:
    """w = w0 + B (s(λ) ∘ r) for nonzero eigenvalues λ of A, drive r and directions B, a function of coefficients."""

    eigenvalues: np.ndarray
    drive: np.ndarray
    combine: Callable[[np.ndarray], np.ndarray]
    energy: np.ndarray  # loss(t) = rest + ½ Σ energy e^{−2z}
    rest: float


@dataclass(frozen=True, eq=False)
class GDLN:
    """A gated linear network under gradient flow: ŷ(x) = (1/K) Σ_k g_k(x) w_k·x, loss ½⟨(y − ŷ)²⟩.

    With A = PΛPᵀ, z_i = λ_i t/(K²τ) and φ(z) = (1 − e^{−z})/z, the weights are

        ``w(t) = w(0) + P [ (t/(Kτ)) φ(z) ∘ Pᵀ(b − A w(0)/K) ]``,   ``w(∞) = K A⁺b + (I − A⁺A) w(0)``,

    for any w(0), also where A is singular (eigenvalues under 1e-12 of the largest are zero, where b has no part).
    With fewer rows than weights the same flow is computed from the n × n matrix H = (GGᵀ) ∘ (XXᵀ).

    Parameters
    ----------
    moments : Moments, optional
        A, b, ⟨y²⟩: needed for the primal form.
    w0 : array (K, d), optional
        Initial weights; default zero.
    tau : float
        Time constant τ > 0.

    Notes
    -----
    One eigendecomposition, O((Kd)³) or O(n³), at the first call; then O((Kd)²) or O(n² + nKd) per time. Equations 5, 8
    to 11 and 19 to 32 of the note lack a factor 1/K; these are the corrected ones.

    Examples
    --------
    >>> from pathlens.data import nlgp
    >>> from pathlens.theory.gates import random_half_spaces
    >>> data = nlgp(n=200, d=10, seed=0)
    >>> net = GDLN.from_data(random_half_spaces(4, 10), data)
    >>> net
    GDLN(K=4 units, d=10 inputs, τ=1; primal form, 40 modes, slowest time ...)
    >>> net.w(3.0).shape, net.w([0.0, 1.0, 2.0]).shape
    ((4, 10), (3, 4, 10))
    >>> net.loss([0.0, 5.0, float("inf")]).round(2)
    array([...])
    """

    moments: Moments | None = None
    w0: Any = None
    tau: float = 1.0
    _rows: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # gates, √p x, √p y of the dual form

    def __post_init__(self) -> None:
        if (self.moments is None) == (self._rows is None):
            raise OptionError("GDLN: give moments, or build it from rows with GDLN.from_data(gates, data).")
        check_positive("GDLN", tau=self.tau)
        object.__setattr__(self, "w0", initial_weights(self.w0, self.K, self.d, "GDLN"))

    @classmethod
    def from_data(
        cls, gates: Any, data: Any, *, w0: Any = None, tau: float = 1.0, form: str = "auto", allow_dead: bool = False
    ) -> GDLN:
        """From gates and data.

        Parameters
        ----------
        gates : Gates, function, table (n, K) or network with one hidden layer
            As in `gate_table`.
        data : DataSet, (X, y), (X, y, p) or SinglePulse
            A single-pulse sampler is enumerated: exact.
        w0 : array (K, d), optional
        form : {"auto", "primal", "dual"}
            "auto" is dual where there are fewer rows than weights.
        allow_dead : bool
            Accept gates that are off on every row; their weights stay at their initial values.
        """
        rows = WeightedRows.from_data(data)
        table = gate_table(gates, rows.x, allow_dead=allow_dead)
        if form not in ("auto", "primal", "dual"):
            raise OptionError(f"GDLN: form={form!r}, expected 'auto', 'primal' or 'dual'.")
        if form == "primal" or (form == "auto" and rows.n >= table.shape[1] * rows.d):
            return cls(Moments.from_data(table, rows, allow_dead=True), w0, tau)
        root = np.sqrt(rows.p)
        return cls(None, w0, tau, (table, rows.x * root[:, None], rows.y * root))

    @property
    def K(self) -> int:
        """Number of units."""
        return self.moments.K if self.moments is not None else self._rows[0].shape[1]  # type: ignore[index]

    @property
    def d(self) -> int:
        """Input dimension."""
        return self.moments.d if self.moments is not None else self._rows[1].shape[1]  # type: ignore[index]

    @cached_property
    def _modes(self) -> _Modes:
        if self.moments is not None:
            A, b = self.moments.A, self.moments.b
            values, P = np.linalg.eigh(A)
            kept = values > CUTOFF * max(values[-1], 0.0)
            values, P = values[kept], P[:, kept]
            drive = P.T @ (b - A @ self.w0.reshape(-1) / self.K)
            rest = self.moments.square - float(((P.T @ b) ** 2 / values).sum())
            return _Modes(values, drive, lambda v: P @ v, drive**2 / values, max(rest, 0.0) / 2)
        g, x, y = self._rows  # type: ignore[misc]
        values, V = np.linalg.eigh((g @ g.T) * (x @ x.T))
        kept = values > CUTOFF * max(values[-1], 0.0)
        error = V.T @ (y - ((x @ self.w0.T) * g).sum(1) / self.K)

        def combine(v: np.ndarray) -> np.ndarray:
            return ((g * (V[:, kept] @ v)[:, None]).T @ x).reshape(-1)

        rest = float((error[~kept] ** 2).sum()) / 2
        return _Modes(values[kept], error[kept], combine, error[kept] ** 2, rest)

    @property
    def eigenvalues(self) -> np.ndarray:
        """The nonzero eigenvalues of A, ascending."""
        return self._modes.eigenvalues.copy()

    @property
    def _rates(self) -> np.ndarray:
        """λ/(K²τ): a mode decays like e^{−rate·t}."""
        return self._modes.eigenvalues / (self.K**2 * self.tau)

    def _at(self, done: np.ndarray) -> np.ndarray:
        """The weights where each mode has gone the given share of its way."""
        m = self._modes
        return self.w0 + m.combine(done * self.K / m.eigenvalues * m.drive).reshape(self.w0.shape)

    def w(self, t: Any) -> np.ndarray:
        """Weights at time t ≥ 0, shape (K, d), or (T, K, d) for T times; ``inf`` is the limit."""
        times = as_times(t, "GDLN.w")
        found = [self._at(-np.expm1(-self._rates * one)) for one in times.ravel()]
        return np.reshape(found, (*times.shape, self.K, self.d))

    def limit(self) -> np.ndarray:
        """w(∞) = K A⁺b + (I − A⁺A) w(0), shape (K, d)."""
        return self.w(math.inf)

    def loss(self, t: Any) -> Any:
        """½⟨(y − ŷ)²⟩ at time t: a float, or an array (T,) for T times; O(modes) each."""
        times = as_times(t, "GDLN.loss")
        losses = self._modes.rest + 0.5 * np.exp(-2 * np.multiply.outer(times, self._rates)) @ self._modes.energy
        return float(losses) if times.ndim == 0 else losses

    def iterate(self, k: int, step: float) -> np.ndarray:
        """The exact k-th iterate of gradient descent w ← w − step·∇loss/τ, without running it; (K, d).

        With a = step·λ/(K²τ) each mode has gone the share 1 − (1 − a)^k of its way.

        Raises
        ------
        DivergedError
            Where step ≥ 2K²τ/λ_max, which grows without bound.
        """
        if k < 0 or int(k) != k:
            raise OptionError(f"GDLN.iterate: k={k!r}, expected a count of steps ≥ 0.")
        check_positive("GDLN.iterate", step=step)
        a = step * self._rates
        if len(a) and a[-1] >= 2:
            raise DivergedError(
                f"GDLN.iterate: step={step:g} diverges; the largest eigenvalue of A is {self.eigenvalues[-1]:.4g}. "
                f"Take a step below {self.largest_step:.4g}."
            )
        # for a < 1 through logarithms, which keeps all digits where a is small; beyond, powers of a negative number
        small = np.minimum(a, 0.5)
        return self._at(np.where(a <= 0.5, -np.expm1(k * np.log1p(-small)), 1 - (1 - a) ** int(k)))

    @property
    def largest_step(self) -> float:
        """2K²τ/λ_max: gradient descent converges below it."""
        return 2 / self._rates[-1] if len(self._rates) else math.inf

    def __repr__(self) -> str:
        rates = self._rates
        slow = f", slowest time {1 / rates[0]:.3g}" if len(rates) else ""
        form = "primal" if self.moments is not None else "dual"
        return f"GDLN(K={self.K} units, d={self.d} inputs, τ={self.tau:g}; {form} form, {len(rates)} modes{slow})"
