"""Translation-invariant inputs on a ring of d coordinates: the nonlinear Gaussian process (NLGP) and the single pulse.

Both are two-class tasks whose classes differ in correlation length only; their second moments are known in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from pathlens.data.dataset import DataSet
from pathlens.errors import OptionError, unknown_name

Convention = Literal["lufkin", "ingrosso-goldt"]
Labels = Literal["01", "pm1"]
Interval = Literal["(]", "[)", "[]"]

# convention -> (s such that x = erf(g z √(s/2)) / Z, number added to the diagonal of the Gaussian covariance).
# With s the slope, erf(g z √(s/2)) has arcsine argument s g² C_ij / (1 + s g²): s = 2 for Lufkin, 1 for Ingrosso–Goldt.
_CONVENTIONS: dict[str, tuple[float, float]] = {"lufkin": (2.0, 0.0), "ingrosso-goldt": (1.0, 1e-3)}
_LABELS = {"01": (1.0, 0.0), "pm1": (1.0, -1.0)}


def ring_covariance(d: int, xi: float) -> Tensor:
    """The Gaussian covariance C_ij = exp(-δ_ij² / ξ²), δ_ij = min(|i-j|, d-|i-j|); note: no factor 2.

    Circulant, but not always positive: at d = 40 its smallest eigenvalue is -2e-3 for ξ = 8. Float64, shape (d, d).

    Examples
    --------
    >>> ring_covariance(4, 1.0)[0]
    tensor([1.0000, 0.3679, 0.0183, 0.3679], dtype=torch.float64)
    """
    _check_ring("ring_covariance", d)
    if not (math.isfinite(xi) and xi > 0):
        raise OptionError(
            f"NLGP: xi={xi}, expected a positive correlation length. For nearly independent inputs pass "
            "a small one, such as 0.1."
        )
    k = torch.arange(d, dtype=torch.float64)
    return _circulant(torch.exp(-((torch.minimum(k, d - k) / xi) ** 2)))


def nlgp_covariance(d: int, xi: float, gain: float, *, convention: Convention = "lufkin") -> Tensor:
    """The exact covariance ⟨x_i x_j⟩ of the NLGP inputs of one class.

    ``asin(s g² C_ij / (1 + s g² C_ii)) / asin(κ)``, ``κ = s g² / (1 + s g²)``, s = 2 (Lufkin) or 1 (Ingrosso–Goldt).
    C is the covariance of the samples: its negative eigenvalues clipped, and 1e-3 on its diagonal for
    Ingrosso–Goldt. Where neither applies, C_ii = 1, the variance is exactly 1, and this is asin(κ C_ij) / asin(κ).

    Parameters
    ----------
    d : int
        Coordinates on the ring.
    xi : float
        Correlation length.
    gain : float
        g > 0; small is Gaussian, large is ±1. The same data in both conventions needs g_IG = √2 g_L.
    convention : {"lufkin", "ingrosso-goldt"}

    Returns
    -------
    Tensor, shape (d, d), float64

    Notes
    -----
    Exact. O(d²), one FFT.

    Examples
    --------
    >>> K = nlgp_covariance(40, xi=2.0, gain=3.0)
    >>> round(float(K[0, 0]), 12), round(float(K[0, 1]), 4)
    (1.0, 0.6666)
    """
    s, _ = _check_nlgp(d, gain, convention)
    c = _clipped_spectrum(d, xi, convention)[1]
    a = s * gain**2
    # for large g the arcsine is that of a number near 1; the quotient of two such arcsines cancels the rounding
    return _circulant(torch.asin(a * c / (1 + a * c[0])) / math.asin(a / (1 + a)))


@dataclass(frozen=True)
class NLGP:
    """A sampler of nonlinear Gaussian process data: fresh batches, as the localisation experiments train on.

    ``z ~ N(0, C)`` on the ring, ``C_ij = exp(-δ_ij²/ξ²)``, and ``x = erf(g z)/Z`` with ``Z² = (2/π) asin(2g²/(1+2g²))``
    (Lufkin), or ``x = erf(g z/√2)/Z`` with ``Z² = (2/π) asin(g²/(1+g²))`` and 1e-3 added to the diagonal of C
    (Ingrosso–Goldt). Unit variance. Label 1 has ξ = xi[0], the other label ξ = xi[1].

    Parameters
    ----------
    d : int
        Coordinates on the ring.
    xi : (float, float)
        Correlation lengths (ξ₁ of label 1, ξ₂ of label 0 or -1).
    gain : float
        g > 0.
    convention : {"lufkin", "ingrosso-goldt"}
    labels : {"01", "pm1"}
        Targets 1 and 0, or +1 and -1.
    dtype : torch.dtype

    Notes
    -----
    The Gaussian root is the circulant one with negative eigenvalues clipped: a Cholesky factor does not exist for
    ξ ≳ 5 at d = 40. A batch of n rows costs O(n d²).

    Examples
    --------
    >>> import torch
    >>> sampler = NLGP(d=40, xi=(3.0, 1.0), gain=3.0)
    >>> x, y = sampler.sample(1000, torch.Generator().manual_seed(0))
    >>> tuple(x.shape), tuple(y.shape), float(y.mean())
    ((1000, 40), (1000, 1), 0.5)
    """

    d: int = 40
    xi: tuple[float, float] = (3.0, 1.0)
    gain: float = 3.0
    convention: Convention = "lufkin"
    labels: Labels = "01"
    dtype: torch.dtype = torch.float32
    _roots: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_nlgp(self.d, self.gain, self.convention)
        _check_labels("NLGP", self.labels)
        if len(self.xi) != 2:
            raise OptionError(f"NLGP: xi={self.xi}, expected two correlation lengths (ξ₁ of label 1, ξ₂ of the other).")
        roots = [
            _circulant(torch.fft.ifft(_clipped_spectrum(self.d, xi, self.convention)[0].sqrt()).real) for xi in self.xi
        ]
        object.__setattr__(self, "_roots", torch.stack(roots).to(self.dtype))

    def covariance(self, label: int) -> Tensor:
        """⟨x xᵀ⟩ of one class (1, or 0 for the other); (d, d), float64."""
        return nlgp_covariance(self.d, self.xi[0 if label == 1 else 1], self.gain, convention=self.convention)

    def second_moment(self) -> Tensor:
        """⟨x xᵀ⟩ over both classes; (d, d), float64."""
        return (self.covariance(1) + self.covariance(0)) / 2

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """n fresh rows: x (n, d) and y (n, 1), on the generator's device.

        Half of the rows, in random places, have label 1; an odd row out is a fair coin.
        """
        ones = _balanced("NLGP", n, generator)
        z = torch.randn(n, self.d, generator=generator, device=ones.device, dtype=self.dtype)
        roots = self._roots.to(ones.device)
        x = torch.empty_like(z)
        for mask, root in ((ones, roots[0]), (~ones, roots[1])):
            x[mask] = z[mask] @ root
        s, _ = _CONVENTIONS[self.convention]
        a = s * self.gain**2
        scale = math.sqrt(2 / math.pi * math.asin(a / (1 + a)))
        return torch.erf_(x.mul_(self.gain * math.sqrt(s / 2))).div_(scale), _targets(ones, self.labels, self.dtype)


def nlgp(
    n: int = 1000,
    *,
    d: int = 40,
    xi: tuple[float, float] = (3.0, 1.0),
    gain: float = 3.0,
    convention: Convention = "lufkin",
    labels: Labels = "01",
    n_test: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DataSet:
    """A fixed sample of `NLGP`, as a DataSet; experiments that train on fresh batches use `NLGP.sample`.

    Examples
    --------
    >>> nlgp(n=100, d=20, convention="ingrosso-goldt", labels="pm1").y.unique().tolist()
    [-1.0, 1.0]
    """
    sampler = NLGP(d, xi, gain, convention, labels, dtype)
    info = {"d": d, "xi1": xi[0], "xi2": xi[1], "gain": gain, "convention": convention, "labels": labels}
    return _fixed("nlgp", sampler, n, n_test, seed, info)


@dataclass(frozen=True)
class SinglePulse:
    """A sampler of single pulses: one run of ones on a ring of zeros, whose length depends on the class.

    Start ~ U{0..d-1}, length ~ U(lengths of the class), wrapping around; then, with `flip`, x → 1 - x with
    probability ½ for each row by itself; then 0 and 1 are mapped to `support`.

    Parameters
    ----------
    d : int
        Coordinates on the ring.
    xi1, xi2 : (float, float)
        Length intervals of label 1 and of the other label, as fractions of d. The products ξd are rounded to 9
        decimals before flooring: 0.29·100 is 28.999… in floating point, and must give 29.
    interval : {"(]", "[)", "[]"}
        The lengths in the interval (lo, hi) = (⌊ξ_lo d⌋, ⌊ξ_hi d⌋): lo+1..hi as in the localisation code, or
        lo..hi-1 as `randint(lo, hi)` draws, or lo..hi.
    support : (float, float)
        Values of off and on: (0, 1) or (-1, 1).
    flip : bool
    labels : {"01", "pm1"}
    dtype : torch.dtype

    Examples
    --------
    >>> sampler = SinglePulse(d=40)
    >>> sampler.lengths(1), sampler.lengths(0)
    ((11,), (3,))
    >>> x, y, p = sampler.enumerate()
    >>> tuple(x.shape), round(float(p.sum()), 12)  # 2 classes × 40 starts × 1 length × 2 flips
    ((160, 40), 1.0)
    """

    d: int = 40
    xi1: tuple[float, float] = (0.25, 0.275)
    xi2: tuple[float, float] = (0.05, 0.075)
    interval: Interval = "(]"
    support: tuple[float, float] = (0.0, 1.0)
    flip: bool = True
    labels: Labels = "01"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _check_ring("SinglePulse", self.d)
        _check_labels("SinglePulse", self.labels)
        if self.interval not in ("(]", "[)", "[]"):
            raise unknown_name("length interval", self.interval, ("(]", "[)", "[]"))
        if len(self.support) != 2 or not self.support[0] < self.support[1]:
            raise OptionError(f"SinglePulse: support={self.support}, expected (off, on), off < on, such as (-1, 1).")
        self.lengths(1)
        self.lengths(0)

    def lengths(self, label: int) -> tuple[int, ...]:
        """The pulse lengths of one class (1, or 0 for the other), each equally likely."""
        xi = self.xi1 if label == 1 else self.xi2
        if len(xi) != 2 or not 0 <= xi[0] <= xi[1] <= 1:
            raise OptionError(f"SinglePulse: length interval {xi}, expected 0 ≤ lo ≤ hi ≤ 1 as fractions of d.")
        lo, hi = (math.floor(round(edge * self.d, 9)) for edge in xi)
        found = tuple(range(lo + (self.interval[0] == "("), hi + (self.interval[1] == "]")))
        if not found or found[0] < 1:
            what = "holds length 0" if found else "holds no length"
            shown = f"{self.interval[0]}{xi[0]}, {xi[1]}{self.interval[1]}"
            raise OptionError(
                f"SinglePulse: interval {shown} of d={self.d} {what} (edges "
                f"{lo} and {hi}). Widen it, or take another interval= convention."
            )
        return found

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """n fresh rows: x (n, d) and y (n, 1), on the generator's device; half the rows, in random places, have
        label 1, and an odd row out is a fair coin. O(n d)."""
        ones = _balanced("SinglePulse", n, generator)
        device = ones.device
        start = torch.randint(self.d, (n,), generator=generator, device=device)
        length = torch.empty(n, dtype=torch.int64, device=device)
        for mask, label in ((ones, 1), (~ones, 0)):
            choices = torch.tensor(self.lengths(label), device=device)
            length[mask] = choices[torch.randint(len(choices), (int(mask.sum()),), generator=generator, device=device)]
        on = self._pulses(start, length)
        if self.flip:
            on ^= torch.randint(2, (n, 1), generator=generator, device=device).bool()
        return self._values(on), _targets(ones, self.labels, self.dtype)

    def enumerate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every possible row once per way to draw it: x (n, d), y (n, 1) and probabilities (n,), float64, summing to 1.

        n = d · (number of lengths of both classes) · (2 if flipping).
        """
        rows, labels, weights = [], [], []
        flips = (False, True) if self.flip else (False,)
        for label in (1, 0):
            lengths = self.lengths(label)
            start = torch.arange(self.d).repeat(len(lengths))
            on = self._pulses(start, torch.tensor(lengths).repeat_interleave(self.d))
            for flipped in flips:
                rows.append(~on if flipped else on)
                labels.append(torch.full((len(on),), label == 1))
                weights.append(torch.full((len(on),), 0.5 / (len(on) * len(flips)), dtype=torch.float64))
        return self._values(torch.cat(rows)), _targets(torch.cat(labels), self.labels, self.dtype), torch.cat(weights)

    def second_moment(self, label: int | None = None) -> Tensor:
        """The exact ⟨x_i x_j⟩ of one class (1, or 0 for the other), or of the mixture if None; (d, d), float64.

        A pulse of length ℓ covers both 0 and k for ``p_k = (max(ℓ-k, 0) + max(ℓ-d+k, 0)) / d`` of its starts
        (0 < k < d; p_0 = ℓ/d). For ℓ ≤ d/2 and k ≤ d/2 that is max(ℓ-k, 0)/d, which is ⟨x_0 x_k⟩ on {0, 1} without
        flip. With q = ℓ/d and support (a, b): ``a²(1-2q+p) + 2ab(q-p) + b²p``, averaged over lengths and flips; a
        flip sends (q, p) to (1-q, 1-2q+p). O(d²).
        """
        if label is None:
            return (self.second_moment(1) + self.second_moment(0)) / 2
        a, b = self.support
        k = torch.arange(self.d, dtype=torch.float64)
        lengths = self.lengths(label)
        row = torch.zeros(self.d, dtype=torch.float64)
        for length in lengths:
            q = length / self.d
            p = ((length - k).clamp(min=0) + (length - self.d + k).clamp(min=0)) / self.d
            p[0] = q
            cases = [(q, p), (1 - q, 1 - 2 * q + p)] if self.flip else [(q, p)]
            for on, both in cases:
                moment = a * a * (1 - 2 * on + both) + 2 * a * b * (on - both) + b * b * both
                row += moment / (len(cases) * len(lengths))
        return _circulant(row)

    def _pulses(self, start: Tensor, length: Tensor) -> Tensor:
        position = torch.arange(self.d, device=start.device)
        return (position - start[:, None]) % self.d < length[:, None]

    def _values(self, on: Tensor) -> Tensor:
        off_value, on_value = self.support
        return on.to(self.dtype) * (on_value - off_value) + off_value


def single_pulse(
    n: int = 1000,
    *,
    d: int = 40,
    xi1: tuple[float, float] = (0.25, 0.275),
    xi2: tuple[float, float] = (0.05, 0.075),
    interval: Interval = "(]",
    support: tuple[float, float] = (0.0, 1.0),
    flip: bool = True,
    labels: Labels = "01",
    n_test: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DataSet:
    """A fixed sample of `SinglePulse`, as a DataSet.

    Examples
    --------
    >>> data = single_pulse(n=10, support=(-1, 1), flip=False)
    >>> sorted(set(((data.x + 1) / 2).sum(1).tolist()))
    [3.0, 11.0]
    """
    sampler = SinglePulse(d, xi1, xi2, interval, support, flip, labels, dtype)
    info = {
        "d": d,
        "lengths1": str(sampler.lengths(1)),
        "lengths2": str(sampler.lengths(0)),
        "interval": interval,
        "support": str(tuple(support)),
        "flip": flip,
        "labels": labels,
    }
    return _fixed("single_pulse", sampler, n, n_test, seed, info)


def _fixed(name: str, sampler: NLGP | SinglePulse, n: int, n_test: int, seed: int, info: dict[str, Any]) -> DataSet:
    generator = torch.Generator().manual_seed(seed)
    x, y = sampler.sample(n, generator)
    x_test, y_test = sampler.sample(n_test, generator) if n_test else (None, None)
    return DataSet(x, y, x_test, y_test, name=name, info=info | {"seed": seed})


def _balanced(where: str, n: int, generator: torch.Generator | None) -> Tensor:
    """Which rows have label 1: ⌊n/2⌋ of them, plus a coin for an odd row out, in random places."""
    if n < 1:
        raise OptionError(f"{where}: n={n} rows, expected at least 1.")
    device = generator.device if generator is not None else torch.device("cpu")
    count = n // 2
    if n % 2:
        count += int(torch.randint(2, (1,), generator=generator, device=device))
    return torch.randperm(n, generator=generator, device=device) < count


def _targets(ones: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    one, other = _LABELS[labels]
    return (ones.to(dtype) * (one - other) + other)[:, None]


def _check_ring(where: str, d: int) -> None:
    if d < 1:
        raise OptionError(f"{where}: d={d}, expected at least 1 coordinate.")


def _check_labels(where: str, labels: str) -> None:
    if labels not in _LABELS:
        raise OptionError(f"{where}: labels={labels!r}, expected '01' (1 and 0) or 'pm1' (+1 and -1).")


def _check_nlgp(d: int, gain: float, convention: str) -> tuple[float, float]:
    _check_ring("NLGP", d)
    if convention not in _CONVENTIONS:
        raise unknown_name("NLGP convention", convention, _CONVENTIONS)
    if not (math.isfinite(gain) and gain > 0):
        raise OptionError(
            f"NLGP: gain={gain}, expected a positive number. For Gaussian inputs pass a small one, such as 0.01."
        )
    return _CONVENTIONS[convention]


def _clipped_spectrum(d: int, xi: float, convention: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clipped at zero) and first row of the Gaussian covariance of the samples."""
    row = ring_covariance(d, xi)[0].clone()
    row[0] += _CONVENTIONS[convention][1]
    # eigenvalues of the size of rounding would be noise of size √1e-16 in the root: they are clipped as well
    spectrum = torch.fft.fft(row).real
    spectrum = torch.where(spectrum > 1e-14 * spectrum.max(), spectrum, torch.zeros_like(spectrum))
    return spectrum, torch.fft.ifft(spectrum).real


def _circulant(row: Tensor) -> Tensor:
    k = torch.arange(len(row))
    return row[(k[None, :] - k[:, None]) % len(row)]
