"""Measures of a kernel: ν, spectra, effective ranks, alignments, drift, class blocks, norms.

Each takes an operator or a matrix and sums in float64, tile by tile unless the whole spectrum is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import require_budget, resolve_budget
from pathlens.data.inputs import as_numbers
from pathlens.errors import LabelError, NotFiniteError, OptionError, ScaleError, ShapeError, SolverError, unknown_name
from pathlens.linops import CustomKernel, KernelOperator

Kernel = KernelOperator | Tensor | np.ndarray
RankKind = Literal["entropy", "trace", "participation"]
SpectrumScale = Literal["none", "largest", "trace"]

_ROUNDING = 1e-13  # share of ‖K‖_F² that remains by rounding when a constant kernel is centred in float32


# --- operators and matrices ----------------------------------------------------------------------------------------


def as_operator(
    kernel: Kernel, what: str, name: str = "K", *, dtype: torch.dtype | None = torch.float64
) -> KernelOperator:
    """An operator unchanged, or a matrix as an operator, which is symmetric if it equals its transpose.

    A matrix is converted to `dtype`, or keeps its own with None.
    """
    if isinstance(kernel, KernelOperator):
        return kernel
    matrix = as_numbers(kernel).to(dtype)
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise ShapeError(f"{what}: {name} has shape {tuple(matrix.shape)}, expected (n, m). Give a matrix or a kernel.")
    if not bool(torch.isfinite(matrix).all()):
        raise NotFiniteError(f"{what}: {name} of shape {tuple(matrix.shape)} contains NaN or infinity.")
    n, m = matrix.shape
    symmetric = False
    if n == m:
        # computed matrices may be symmetric up to rounding only
        size = float(matrix.abs().max())
        symmetric = bool((matrix - matrix.T).abs().max() <= 1e-6 * size)
        if symmetric:
            matrix = 0.5 * (matrix + matrix.T)
    return CustomKernel(
        (n, m),
        lambda rows, cols: matrix[rows[:, None], cols],
        matrix.diagonal if n == m else None,
        dtype=matrix.dtype,
        device=matrix.device,
        symmetric=symmetric,
        name=name,
        tile_buffers=2,
    )


def _symmetric(kernel: Kernel, what: str, name: str = "K") -> KernelOperator:
    operator = as_operator(kernel, what, name)
    if not operator.symmetric:
        n, m = operator.shape
        raise SolverError(
            f"{what}: {name} is {n} × {m} and not symmetric. Give the kernel of one set of inputs with itself."
        )
    return operator


def _computed_in(kernel: Kernel) -> torch.dtype:
    """The dtype that the entries of a kernel were computed in; matrices are converted to float64 later."""
    dtype = kernel.dtype if isinstance(kernel, KernelOperator) else as_numbers(kernel).dtype
    return dtype if dtype.is_floating_point else torch.float64


def _dense(operator: KernelOperator, copies: int, what: str) -> Tensor:
    """The matrix in float64; raises unless ``copies`` of it fit the budget."""
    n, m = operator.shape
    budget = resolve_budget(operator.max_bytes, operator.device)
    remedy = "Take fewer rows with K[rows, rows], or raise max_bytes with K.with_options."
    require_budget(f"{what}: a {n} × {m} kernel needs", copies * n * m * 8, budget, remedy)
    return operator.dense().to(torch.float64)


def _unit_scale(operator: KernelOperator) -> KernelOperator:
    """A symmetric kernel scaled to mean diagonal 1, for measures that do not depend on scale; avoids overflow."""
    if not operator.symmetric:
        return operator
    try:
        return operator.normalised("n")
    except ScaleError:  # the trace is not positive
        return operator


def as_targets(y: Any, n: int, what: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Targets as an (n, c) tensor of the dtype on the device."""
    t = as_numbers(y).to(device, dtype)
    if t.ndim not in (1, 2) or t.shape[0] != n or t.numel() == 0:
        raise ShapeError(
            f"{what}: y has shape {tuple(t.shape)}, expected ({n},) or ({n}, c). "
            "For classes give one column per class: kernels.one_hot(labels)."
        )
    if not bool(torch.isfinite(t).all()):
        raise NotFiniteError(f"{what}: y of shape {tuple(t.shape)} contains NaN or infinity. Remove such rows.")
    return t.reshape(n, -1)


def _targets(y: Any, n: int, operator: KernelOperator, what: str) -> Tensor:
    """`as_targets` in float64 on the kernel's device; refuses class labels."""
    targets, given = as_targets(y, n, what, operator.device, torch.float64), as_numbers(y)
    if given.ndim == 1 and not given.dtype.is_floating_point and (count := len(given.unique())) > 2:
        raise LabelError(
            f"{what}: y holds {count} different integers ({given.dtype}), which as numbers would put class 2 "
            "between 1 and 3. For classes give one column per class: kernels.one_hot(y); for numbers y.float()."
        )
    return targets


def _tiles(operator: KernelOperator) -> Iterator[tuple[slice, slice, Tensor, bool]]:
    """Tiles in float64; of a symmetric kernel only the upper triangle. The flag marks tiles to count twice."""
    upper = operator.symmetric
    # a quarter: float64 copies of a tile, and results computed from them, must fit the budget too
    budget = max(resolve_budget(operator.max_bytes, operator.device) // 4, 1)
    for rows, cols, tile in operator.tiles(upper=upper, max_bytes=budget):
        yield rows, cols, tile.to(torch.float64), upper and rows != cols


# --- ν -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nu:
    """ν of a kernel and a labelling.

    Attributes
    ----------
    raw
        yᵀ(K + ρI)⁻¹y, summed over the columns of y.
    normalised
        tr K times that: yᵀ((K + ρI)/tr K)⁻¹y, which does not depend on the scale of K.
    ridge
        ρ, the number that was added to the diagonal.
    residual
        ‖(K + ρI)a − y‖/‖y‖ of the solution a.
    """

    raw: float
    normalised: float
    ridge: float
    residual: float


def nu(K: Kernel, y: Any, *, ridge: float = 0.0) -> Nu:
    """ν = yᵀK⁻¹y: how badly a labelling fits the large eigendirections of a kernel.

    ν = Σ_i (u_i·y)²/ρ_i over eigenpairs (ρ_i, u_i); with several columns tr(YᵀK⁻¹Y). The papers plot it for the
    trace-normalised kernel K/tr K, where ν ≥ n for y = ±1, and ν = n² for K ∝ I.

    Parameters
    ----------
    K : (n, n)
        Symmetric positive definite kernel, operator or matrix.
    y : (n,) or (n, c)
        Targets; for more than two classes one column per class, ``one_hot(labels)``.
    ridge : float
        In units of the mean diagonal: ρ = ridge·tr K/n is added to the diagonal. Nothing is added by default.

    Returns
    -------
    Nu
        ``raw``, ``normalised``, the ``ridge`` added, and the ``residual``.

    Notes
    -----
    Exact: Cholesky in float64, n³/3 operations and 3n² numbers; conjugate gradients if these do not fit the budget.
    Raises a `SolverError` if the kernel is not positive definite to the precision it was computed in. NPK paper,
    section 6 (ν_t); DGN paper, Figures 6 and 8.

    Examples
    --------
    >>> y = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> nu(torch.eye(4), y)
    Nu(raw=4.0, normalised=16.0, ridge=0.0, residual=0.0)
    >>> nu(torch.eye(4) + torch.outer(y, y), y).normalised  # aligned with the labels
    6.4
    """
    operator = _symmetric(K, "nu")
    n = operator.shape[0]
    if not math.isfinite(ridge) or ridge < 0:
        raise OptionError(f"nu: ridge must be a finite number ≥ 0, got {ridge!r}.")
    targets = _targets(y, n, operator, "nu")
    try:
        unit = operator.normalised("n")
    except ScaleError as error:
        raise SolverError(f"nu: the kernel (n = {n}) has no positive trace, so it is not positive definite.") from error
    trace, exponent = operator._scaled_trace()
    budget = resolve_budget(operator.max_bytes, operator.device)
    if 3 * n * n * 8 <= budget:
        value, residual = _nu_cholesky(unit, _computed_in(K), targets, ridge)
    else:
        found = unit.solve(targets.to(unit.dtype), ridge=ridge, method="cg")
        value = float((targets * found.solution.to(torch.float64)).sum())
        residual = found.residual
    # value = yᵀ(n·K/tr K + ridge·I)⁻¹y; powers of two keep traces beyond float64 from overflowing
    return Nu(
        raw=_times_power(value * (n / trace), -exponent),
        normalised=value * n,
        ridge=_times_power(ridge * (trace / n), exponent),
        residual=residual,
    )


def _times_power(value: float, exponent: int) -> float:
    """value · 2^exponent for value ≥ 0; infinity on overflow."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def _nu_cholesky(unit: KernelOperator, computed_in: torch.dtype, y: Tensor, ridge: float) -> tuple[float, float]:
    n = len(y)
    matrix = unit.dense().to(torch.float64)
    matrix.diagonal().add_(ridge)
    factor, info = torch.linalg.cholesky_ex(matrix)
    # a pivot smaller than the rounding error of the entries may be zero or negative
    floor = math.sqrt(n) * torch.finfo(computed_in).eps * float(matrix.diagonal().max())
    pivot = float(factor.diagonal().square().min()) if int(info) == 0 else -math.inf
    if pivot <= floor:
        seen = f"row {int(info)} of {n}" if int(info) else f"the smallest pivot is {pivot:.1e} of the mean diagonal"
        raise SolverError(
            f"nu: the kernel (n = {n}, computed in {computed_in}, ridge {ridge:g}) is not positive definite: Cholesky, "
            f"{seen}. Remove duplicate rows, compute the kernel in float64, or pass a ridge."
        )
    solution = torch.cholesky_solve(y, factor)
    size = float(torch.linalg.vector_norm(y))
    residual = float(torch.linalg.vector_norm(matrix @ solution - y)) / size if size else 0.0
    return float((y * solution).sum()), residual


# --- spectra -------------------------------------------------------------------------------------------------------


def spectrum(K: Kernel) -> Tensor:
    """All eigenvalues of a symmetric kernel, ascending, (n,), float64.

    Exact; costs about 4n³/3 operations and 3n² numbers, which must fit the budget. For the largest eigenvalues of a
    large kernel use ``K.eigsh(k)``.

    Examples
    --------
    >>> spectrum(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    tensor([1., 3.], dtype=torch.float64)
    """
    return torch.linalg.eigvalsh(_dense(_symmetric(K, "spectrum"), 3, "spectrum"))


def cumulative_spectrum(K: Kernel, *, scale: SpectrumScale = "none") -> Tensor:
    """Running sum of the ascending eigenvalues, (n,): what the DGN paper calls 'e.c.d.f.'.

    Entry k − 1 is Σ_{i ≤ k} ρ_i with ρ_1 ≤ … ≤ ρ_n. For the ordinary distribution function see `spectral_ecdf`.

    Parameters
    ----------
    K : (n, n)
        Symmetric kernel, operator or matrix.
    scale : {"none", "largest", "trace"}
        Divide the eigenvalues by 1, by the largest (DGN, Figure 3) or by their sum.

    Notes
    -----
    Costs as `spectrum`. DGN paper, section 2; Figures 1 to 4.

    Examples
    --------
    >>> cumulative_spectrum(torch.diag(torch.tensor([4.0, 1.0, 3.0])), scale="largest")
    tensor([0.2500, 1.0000, 2.0000], dtype=torch.float64)
    """
    if scale not in ("none", "largest", "trace"):
        raise unknown_name("scale", scale, ("none", "largest", "trace"))
    values = spectrum(K)
    if scale != "none":
        size = float(values[-1] if scale == "largest" else values.sum())
        if size <= 0:
            what = "largest eigenvalue" if scale == "largest" else "trace"
            raise ScaleError(f"cumulative_spectrum: the {what} is {size:g}, expected a positive number.")
        values = values / size
    return values.cumsum(0)


def spectral_ecdf(K: Kernel, *, at: Any = None) -> tuple[Tensor, Tensor]:
    """Ordinary empirical distribution of the eigenvalues: F(ρ) = share of eigenvalues ≤ ρ.

    Parameters
    ----------
    K : (n, n)
        Symmetric kernel, operator or matrix.
    at : (k,), optional
        Points to evaluate F at; by default the eigenvalues themselves, ascending.

    Returns
    -------
    points (k,), F (k,), float64. Costs as `spectrum`.

    Examples
    --------
    >>> spectral_ecdf(torch.diag(torch.tensor([1.0, 1.0, 4.0, 2.0])), at=[0.5, 1.0, 3.0])[1]
    tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """
    values = spectrum(K)
    points = values if at is None else torch.as_tensor(at, dtype=torch.float64, device=values.device)
    return points, torch.searchsorted(values, points.contiguous(), right=True).to(torch.float64) / len(values)


def effective_rank(K: Kernel, *, kind: RankKind = "entropy") -> float:
    """Effective number of eigendirections of a positive semi-definite kernel, between 1 and n.

    Parameters
    ----------
    K : (n, n)
        Symmetric kernel, operator or matrix.
    kind : {"entropy", "trace", "participation"}
        ``"entropy"``: exp(−Σ p_i log p_i), p_i = ρ_i/Σρ (needs all eigenvalues).
        ``"trace"``: tr K/‖K‖₂ (needs the largest eigenvalue).
        ``"participation"``: (tr K)²/‖K‖_F² (needs one pass over the tiles).

    Notes
    -----
    Exact. trace ≤ participation ≤ entropy ≤ rank. Eigenvalues that are negative by rounding count as zero; one below
    −n·ε of the trace raises a `SolverError`.

    Examples
    --------
    >>> round(effective_rank(torch.eye(5)), 12), effective_rank(torch.ones(5, 5), kind="trace")
    (5.0, 1.0)
    """
    if kind not in ("entropy", "trace", "participation"):
        raise unknown_name("kind of effective rank", kind, ("entropy", "trace", "participation"))
    operator = _symmetric(K, "effective_rank").normalised("n")
    n = operator.shape[0]
    if kind == "participation":
        return (n / _norm(operator)) ** 2
    if kind == "trace":
        return n / float(operator.eigsh(1).values[0])
    values = spectrum(operator)
    if float(values[0]) < -n * torch.finfo(_computed_in(K)).eps * n:
        raise SolverError(
            f"effective_rank: the kernel has the eigenvalue {float(values[0]):.2e} times its mean diagonal; the "
            "entropy is defined for positive semi-definite kernels. Use kind='participation' for others."
        )
    share = values.clamp(min=0.0)
    share = share / share.sum()
    return math.exp(float(torch.special.entr(share).sum()))


# --- norms ---------------------------------------------------------------------------------------------------------


def _norm(operator: KernelOperator) -> float:
    return math.hypot(*(_tile_norm(tile, twice) for _, _, tile, twice in _tiles(operator)))


def _tile_norm(tile: Tensor, twice: bool) -> float:
    """‖tile‖_F, times √2 if it counts twice; divides by the largest entry first, so that squares stay in range."""
    top = float(tile.abs().max())
    return top * math.sqrt((2 if twice else 1) * float((tile / top).square().sum())) if top else 0.0


def frobenius_norm(K: Kernel) -> float:
    """‖K‖_F = √(Σ_ij K_ij²), tile by tile; rectangular kernels too.

    Examples
    --------
    >>> frobenius_norm(torch.tensor([[3.0, 4.0]]))
    5.0
    """
    return _norm(as_operator(K, "frobenius_norm"))


@dataclass(frozen=True)
class Norms:
    """Size of one part of a kernel.

    Attributes
    ----------
    trace
        Σ_i K_ii.
    frobenius
        ‖K‖_F.
    trace_share
        Its trace divided by the sum of the traces of all parts.
    """

    trace: float
    frobenius: float
    trace_share: float


def part_norms(parts: Mapping[str, Kernel]) -> dict[str, Norms]:
    """Trace and Frobenius norm of each part of a kernel, such as the value and the feature part of an NTK.

    Parameters
    ----------
    parts : mapping name → (n, n) kernel

    Returns
    -------
    dict name → `Norms`. One pass over the tiles of each part. NPK paper, Figure 3.

    Examples
    --------
    >>> part_norms({"value": 3 * torch.eye(2), "feature": torch.eye(2)})["value"].trace_share
    0.75
    """
    if not parts:
        raise OptionError("part_norms: no parts given. Pass for example {'value': K_v, 'feature': K_f}.")
    operators = {name: as_operator(part, "part_norms", name) for name, part in parts.items()}
    traces = {name: operator.trace() for name, operator in operators.items()}
    total = sum(traces.values())
    return {
        name: Norms(traces[name], frobenius_norm(operator), traces[name] / total if total else math.nan)
        for name, operator in operators.items()
    }


# --- alignment and drift -------------------------------------------------------------------------------------------


class _CentredSums:
    """Σ K_ij² and the row sums of a symmetric kernel, accumulated tile by tile, from which ‖HKH‖_F follows.

    HKH does not change if K_ij is replaced by K_ij − u_i − u_j. With u half the diagonal, a large common mean is
    removed before entries are squared; otherwise it would cancel only later, with a large rounding error.
    """

    def __init__(self, operator: KernelOperator, device: torch.device, centred: bool) -> None:
        self.size = 0.0  # Σ K_ij²
        self.squares = 0.0  # the same after the shift
        self.rows = torch.zeros(operator.shape[0], dtype=torch.float64, device=device)
        self.shift = operator.diagonal().to(device, torch.float64) / 2 if centred else None

    def add(self, rows: slice, cols: slice, tile: Tensor, twice: bool) -> Tensor:
        """Add a float64 tile, and its transpose if it counts twice; returns the shifted tile."""
        self.size += float(tile.square().sum()) * (2 if twice else 1)
        if self.shift is None:
            self.squares = self.size
            return tile
        tile = tile - self.shift[rows, None] - self.shift[cols]
        self.squares += float(tile.square().sum()) * (2 if twice else 1)
        self.rows[rows] += tile.sum(1)
        if twice:
            self.rows[cols] += tile.sum(0)
        return tile

    def norm_square(self) -> float:
        """‖K‖_F², or ‖HKH‖_F² if centred."""
        return self.squares if self.shift is None else _centred(self.squares, self.rows, self.rows)


def _centred(square: float, rows: Tensor, other: Tensor) -> float:
    """⟨HKH, HLH⟩ from ⟨K, L⟩ and the row sums of both, H = I − 11ᵀ/n."""
    n = len(rows)
    return square - 2.0 / n * float(rows @ other) + float(rows.sum()) * float(other.sum()) / n**2


def _cosine(inner: float, first: float, second: float, what: str, rounding: tuple[float, float]) -> float:
    # a constant kernel is zero up to rounding after centring
    for value, least in zip((first, second), rounding):
        if not value > least:
            raise ScaleError(
                f"{what}: a kernel or labelling has norm zero (after centring, if centred), so that its angle is not "
                "defined. For constant labels or a constant kernel pass centred=False."
            )
    return inner / math.sqrt(first * second)


def target_alignment(K: Kernel, y: Any, *, centred: bool = True) -> float:
    """Kernel–target alignment ⟨K, YYᵀ⟩_F/(‖K‖_F·‖YYᵀ‖_F), in [0, 1] for positive semi-definite kernels.

    Parameters
    ----------
    K : (n, n)
        Symmetric kernel, operator or matrix.
    y : (n,) or (n, c)
        Targets; for more than two classes one column per class, ``one_hot(labels)``.
    centred : bool
        Replace K by HKH and Y by HY with H = I − 11ᵀ/n, which removes the means.

    Notes
    -----
    Exact, one pass over the tiles, n²·(4 + 2c) operations in addition to those of the kernel.

    Examples
    --------
    >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> target_alignment(torch.outer(y, y), y)
    1.0
    >>> target_alignment(torch.eye(4), y, centred=False)
    0.5
    """
    operator = _unit_scale(_symmetric(K, "target_alignment"))
    n = operator.shape[0]
    t = _targets(y, n, operator, "target_alignment")
    top = float(t.abs().max())
    t = t / (top or 1.0)  # fourth powers follow
    raw = float((t.T @ t).square().sum())
    if centred:
        t = t - t.mean(0)
    inner, sums = 0.0, _CentredSums(operator, operator.device, centred)
    for rows, cols, tile, twice in _tiles(operator):
        shifted = sums.add(rows, cols, tile, twice)
        inner += float((t[rows] * (shifted @ t[cols])).sum()) * (2 if twice else 1)
    # centred targets are accurate to 16 digits of the targets, and ‖YYᵀ‖² has their fourth power
    rounding = _ROUNDING * sums.size, 1e-52 * raw
    return _cosine(inner, sums.norm_square(), float((t.T @ t).square().sum()), "target_alignment", rounding)


def kernel_alignment(K: Kernel, other: Kernel, *, centred: bool = True) -> float:
    """Cosine of the angle between two kernels, ⟨K, L⟩_F/(‖K‖_F·‖L‖_F); centred it is the CKA.

    Parameters
    ----------
    K, other : (n, n)
        Symmetric kernels of the same rows, operators or matrices; their dtypes may differ, their scales do not matter.
    centred : bool
        Compare HKH and HLH with H = I − 11ᵀ/n.

    Notes
    -----
    Exact, one pass over the tiles of both kernels.

    Examples
    --------
    >>> K = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> round(kernel_alignment(K, 5 * K), 12)
    1.0
    >>> kernel_alignment(torch.eye(2), torch.ones(2, 2), centred=False)  # 1/√2
    0.7071067811865475
    """
    left, right = (_unit_scale(_symmetric(k, "kernel_alignment", name)) for k, name in ((K, "K"), (other, "other")))
    _same_shape(left, right, "kernel_alignment")
    inner, first, second = 0.0, *(_CentredSums(operator, left.device, centred) for operator in (left, right))
    for rows, cols, a, b, twice in _together(left, right):
        both = first.add(rows, cols, a, twice) * second.add(rows, cols, b, twice)
        inner += float(both.sum()) * (2 if twice else 1)
    if centred:
        inner = _centred(inner, first.rows, second.rows)
    rounding = _ROUNDING * first.size, _ROUNDING * second.size
    return _cosine(inner, first.norm_square(), second.norm_square(), "kernel_alignment", rounding)


def _same_shape(left: KernelOperator, right: KernelOperator, what: str) -> None:
    if left.shape != right.shape:
        raise ShapeError(
            f"{what}: the kernels are {left.shape[0]} × {left.shape[1]} and {right.shape[0]} × {right.shape[1]}. "
            "Compute both on the same rows."
        )


def _together(left: KernelOperator, right: KernelOperator) -> Iterator[tuple[slice, slice, Tensor, Tensor, bool]]:
    """The same tiles of two kernels in float64, on the device of the left; the flag marks tiles to count twice."""
    fold = left.symmetric and right.symmetric
    budget = max(resolve_budget(left.max_bytes, left.device) // 8, 1)
    for rows, cols, tile in left.tiles(upper=fold, max_bytes=budget):
        i, j = (torch.arange(s.start, s.stop, device=right.device) for s in (rows, cols))
        beside = right.tile(i, j).to(tile.device, torch.float64)
        yield rows, cols, tile.to(torch.float64), beside, fold and rows != cols


def drift(K: Kernel, start: Kernel, *, normalise: bool = False) -> float:
    """Relative change of a kernel, ‖K − K₀‖_F/‖K₀‖_F.

    Parameters
    ----------
    K, start : (n, m)
        Kernels of the same rows and columns, operators or matrices; their dtypes may differ.
    normalise : bool
        Divide both by their traces first, so that a change of scale is no drift (square kernels only).

    Notes
    -----
    Exact, tile by tile, one evaluation of each kernel. `kernel_alignment` measures the angle only.

    Examples
    --------
    >>> drift(3 * torch.eye(2), torch.eye(2)), drift(3 * torch.eye(2), torch.eye(2), normalise=True)
    (2.0, 0.0)
    """
    left, right = as_operator(K, "drift"), as_operator(start, "drift", "start")
    _same_shape(left, right, "drift")
    if normalise:
        left, right = left.normalised("n"), right.normalised("n")
    moved, size = 0.0, 0.0
    for _, _, a, b, twice in _together(left, right):
        moved, size = math.hypot(moved, _tile_norm(a - b, twice)), math.hypot(size, _tile_norm(b, twice))
    if size == 0:
        raise ScaleError("drift: the kernel to start from is zero, so that the relative change is not defined.")
    return moved / size


# --- class blocks --------------------------------------------------------------------------------------------------


def _label_means(labels: Any, n: int, operator: KernelOperator, axis: str) -> Tensor:
    """(n, c) float64 columns that average over the rows of one class."""
    t = as_numbers(labels).to(operator.device)
    if t.shape != (n,):
        raise ShapeError(f"class_blocks: {axis} have shape {tuple(t.shape)}, expected ({n},) as the kernel.")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise LabelError(f"class_blocks: {axis} are {t.dtype}, expected integers 0 … c − 1. Convert with `.long()`.")
    if int(t.min()) < 0:
        raise LabelError(f"class_blocks: {axis} contain {int(t.min())}, expected integers 0 … c − 1.")
    counts = torch.bincount(t.long())
    if bool((counts == 0).any()):
        missing = ", ".join(str(int(c)) for c in (counts == 0).nonzero()[:5, 0])
        raise LabelError(
            f"class_blocks: no rows of class {missing} among {axis} of 0 … {len(counts) - 1}: its mean is not defined. "
            "Number the classes that are present from 0."
        )
    return torch.nn.functional.one_hot(t.long()).to(torch.float64) / counts


def class_blocks(K: Kernel, labels: Any, *, column_labels: Any = None, trace: float | None = 100.0) -> Tensor:
    """Kernel averaged over classes: B_ab = mean of K_ij over i in class a, j in class b; (c, c), float64.

    Parameters
    ----------
    K : (n, m)
        Kernel, operator or matrix.
    labels : (n,) of integers 0 … c − 1
        Class of every row; each class must occur. The diagonal of K is included, as in the paper.
    column_labels : (m,), optional
        Class of every column, if the columns are not the same inputs as the rows.
    trace : float or None
        Scale B to this trace; 100 as in Figures 13 to 16 of the half-space paper. None does not scale.

    Notes
    -----
    Exact, one pass over the tiles, 2c·n·m operations in addition to those of the kernel.

    Examples
    --------
    >>> class_blocks(torch.tensor([[4.0, 2.0, 1.0], [2.0, 4.0, 1.0], [1.0, 1.0, 9.0]]), [0, 0, 1])
    tensor([[25.0000,  8.3333],
            [ 8.3333, 75.0000]], dtype=torch.float64)
    """
    operator = as_operator(K, "class_blocks")
    n, m = operator.shape
    if column_labels is None and n != m:
        raise ShapeError(f"class_blocks: the kernel is {n} × {m}; give column_labels for its columns.")
    if trace is not None:
        operator = _unit_scale(operator)
    left = _label_means(labels, n, operator, "labels")
    right = left if column_labels is None else _label_means(column_labels, m, operator, "column_labels")
    blocks = left.new_zeros(left.shape[1], right.shape[1])
    for rows, cols, tile, twice in _tiles(operator):
        part = left[rows].T @ (tile @ right[cols])
        blocks += part
        if twice:
            blocks += left[cols].T @ (tile.T @ right[rows])
    if trace is None:
        return blocks
    if blocks.shape[0] != blocks.shape[1]:
        raise ShapeError(f"class_blocks: {tuple(blocks.shape)} blocks have no trace to scale; pass trace=None.")
    size = float(blocks.trace())
    if size <= 0:
        raise ScaleError(f"class_blocks: the blocks have trace {size:g}, which cannot be scaled to {trace:g}.")
    return blocks * (trace / size)
