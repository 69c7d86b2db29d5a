"""Kernels of infinitely wide ReLU networks: NTK, NNGP, the limit for random gates, and the convolutional NTK.

Closed recursions over pairs of inputs, computed in float64 and handed out as lazy operators. Kernels of finite networks
live in the other modules of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from pathlens.budgets import resolve_budget
from pathlens.data.inputs import as_numbers
from pathlens.errors import EmptyDataError, NotFiniteError, OptionError, ShapeError, unknown_name
from pathlens.kernels.sources import tile_diagonal
from pathlens.linops import CustomKernel
from pathlens.models.tensors import require_dense
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

LastLayer = Literal["he", "lecun"]
Pool = Literal["gap", "flatten"]

_LAST_LAYERS = ("he", "lecun")
_POOLS = ("gap", "flatten")
_STRIP = 1 << 17  # entries of a tile worked on together: their temporaries stay in the cache
_SMALL = 0.25  # below this angle, the next one is taken from a series
_NEARLY_PARALLEL = 0.99  # beyond this cosine, arccos would lose more than a digit of the angle
_FIELDS = 8  # arrays of one value per pair and position that the convolutional recursion holds at once
_SNAP = 32 * torch.finfo(torch.float64).eps  # cosines that rounding keeps from 1


# --- inputs --------------------------------------------------------------------------------------------------------


def _inputs(X: Any, name: str, ndim: int, what: str) -> Tensor:
    x = require_dense(as_numbers(X), f"{what}: the rows of {name}")
    shape = "(n, d)" if ndim == 2 else "(n, channels, height, width)"
    if x.ndim != ndim:
        raise ShapeError(
            f"{what}: {name} has shape {tuple(x.shape)}, expected {shape}. "
            + ("Flatten images with X.flatten(1)." if ndim == 2 else "Give images with their channels.")
        )
    if x.numel() == 0:
        raise EmptyDataError(f"{what}: {name} has shape {tuple(x.shape)}, which holds no numbers.")
    x = x.to(torch.float64)
    if not bool(torch.isfinite(x).all()):
        raise NotFiniteError(f"{what}: {name} of shape {tuple(x.shape)} contains NaN or infinity.")
    return x


def _pair(X: Any, Y: Any, ndim: int, what: str) -> tuple[Tensor, Tensor]:
    """Both sides in float64; the same object where there is one side."""
    x = _inputs(X, "X", ndim, what)
    if Y is None or Y is X:
        return x, x
    y = _inputs(Y, "Y", ndim, what)
    if y.shape[1:] != x.shape[1:]:
        raise ShapeError(
            f"{what}: rows of Y have shape {tuple(y.shape[1:])}, expected {tuple(x.shape[1:])} as in X. "
            "Prepare both in the same way."
        )
    return x, y.to(x.device)


def _count(value: Any, name: str, least: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{what}: {name} must be an integer ≥ {least}, got {value!r}.")
    return int(value)


def _choice(value: str, allowed: Sequence[str], name: str) -> str:
    if value not in allowed:
        raise unknown_name(name, value, allowed)
    return value


# --- fully connected -----------------------------------------------------------------------------------------------


def _angles(x: Tensor, y: Tensor) -> Tensor:
    """Angles between unit rows (a, d), (b, d): (a, b), accurate to a few units in the last place of the angle.

    arccos loses half of the digits near ±1, so nearly parallel rows are compared by their difference instead.
    """
    cosine = (x @ y.T).clamp_(-1.0, 1.0)
    theta = cosine.acos()
    near = (cosine.abs() > _NEARLY_PARALLEL).nonzero()
    for some in near.split(max(4 * _STRIP // x.shape[1], 1)):
        i, j = some[:, 0], some[:, 1]
        side = cosine[i, j].sign()
        half = 0.5 * torch.linalg.vector_norm(x[i] - side[:, None] * y[j], dim=1)
        small = 2.0 * half.clamp_(max=1.0).asin()
        theta[i, j] = torch.where(side > 0, small, math.pi - small)
    return theta


def _next_angle(theta: Tensor) -> Tensor:
    """Angle θ′ between the outputs of a ReLU layer, cos θ′ = κ₁(cos θ) = (sin θ + (π − θ) cos θ)/π, for small θ.

    Written for sin²(θ′/2) = sin²(θ/2) − (sin θ − θ cos θ)/2π, which keeps all digits where cos θ′ is nearly 1.
    """
    square = theta * theta
    series = torch.zeros_like(theta)
    for k in range(6, 0, -1):  # sin θ − θ cos θ = θ³/3 − θ⁵/30 + …
        series = 2 * k / math.factorial(2 * k + 1) - square * series
    gap = theta * square * series
    return 2.0 * (torch.sin(0.5 * theta).square() - gap / (2 * math.pi)).clamp_(min=0.0).sqrt().asin()


def _layers(theta: Tensor, layers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(Σ̂⁽ˡ⁺¹⁾, Σ⁽ˡ⁺¹⁾/|x||y|) of each hidden layer in turn, from the angles between the inputs."""
    cosine = torch.cos(theta)
    for _ in range(layers):
        gates = 1.0 - theta / math.pi
        cosine = torch.sin(theta).div_(math.pi).addcmul_(cosine, gates).clamp_(max=1.0)
        angle = cosine.acos()
        small = (theta < _SMALL).nonzero(as_tuple=True)
        if len(small[0]):
            angle[small] = _next_angle(theta[small])
            cosine[small] = torch.cos(angle[small])
        theta = angle
        yield gates, cosine


def _ntk(theta: Tensor, hidden_layers: int, last_layer: str) -> Tensor:
    ntk = nngp = torch.cos(theta)
    for gates, nngp in _layers(theta, hidden_layers):
        ntk = torch.addcmul(nngp, ntk, gates)
    return ntk if last_layer == "he" else 0.5 * (ntk + nngp)


def _nngp(theta: Tensor, hidden_layers: int) -> Tensor:
    out = torch.cos(theta)
    for _, cosine in _layers(theta, hidden_layers):
        out = cosine
    return out


def _random_gates(theta: Tensor, hidden_layers: int) -> Tensor:
    out = (hidden_layers + 1) * torch.cos(theta)
    for gates, _ in _layers(theta, hidden_layers):
        out *= gates
    return out


def _dot_product_kernel(
    X: Any, Y: Any, of_angle: Callable[[Tensor], Tensor], name: str, max_bytes: int | None
) -> CustomKernel:
    """The kernel |x||y|·k(θ) of the rows of X and Y as an operator."""
    x, y = _pair(X, Y, 2, name)

    def split(rows: Tensor) -> tuple[Tensor, Tensor]:
        # through the largest entry, so that squares of huge or tiny inputs stay within range
        top = rows.abs().amax(1, keepdim=True)
        top = torch.where(top > 0, top, 1.0)
        norm = torch.linalg.vector_norm(rows / top, dim=1, keepdim=True)
        return top[:, 0] * norm[:, 0], rows / top / torch.where(norm > 0, norm, 1.0)

    norm_x, unit_x = split(x)
    norm_y, unit_y = (norm_x, unit_x) if y is x else split(y)

    def tile(rows: Tensor, cols: Tensor) -> Tensor:
        out = torch.empty(len(rows), len(cols), dtype=torch.float64, device=x.device)
        right, scale = unit_y[cols], norm_y[cols]
        mirror = y is x and torch.equal(rows, cols)
        for lo in range(0, len(rows), step := max(_STRIP // len(cols), 1)):
            some, start = rows[lo : lo + step], lo if mirror else 0
            values = of_angle(_angles(unit_x[some], right[start:]))
            out[lo : lo + step, start:] = values.mul_(norm_x[some, None]).mul_(scale[start:])
            if mirror:
                out[lo:, lo : lo + step] = values.T
        return out

    def diagonal() -> Tensor:
        if y is x:
            return of_angle(torch.zeros_like(norm_x)) * norm_x * norm_x
        return tile_diagonal(tile, len(x), x.device)

    square = len(x) == len(y)
    return CustomKernel(
        (len(x), len(y)),
        tile,
        diagonal if square else None,
        dtype=torch.float64,
        device=x.device,
        symmetric=y is x,
        name=name,
        tile_buffers=2,
        max_bytes=max_bytes,
    )


def relu_ntk(
    X: Any,
    Y: Any = None,
    *,
    hidden_layers: int = 5,
    last_layer: LastLayer = "he",
    max_bytes: int | None = None,
) -> CustomKernel:
    """NTK of an infinitely wide fully connected ReLU network without biases.

    With θ the angle between x and y, Σ⁽¹⁾ = K̃⁽¹⁾ = x·y and d = L + 1 weight layers:
    Σ̂⁽ˡ⁺¹⁾ = κ₀ = 1 − θ/π, Σ⁽ˡ⁺¹⁾ = |x||y|·κ₁, κ₁ = cos θ′ = (sin θ + (π − θ)·cos θ)/π, K̃⁽ˡ⁺¹⁾ = K̃⁽ˡ⁾·Σ̂⁽ˡ⁺¹⁾ + Σ⁽ˡ⁺¹⁾,
    and θ′ takes the place of θ in the next layer.

    Parameters
    ----------
    X : (n, d)
        Inputs; any real dtype, taken to float64.
    Y : (m, d), optional
        A second set of inputs: the result is the n × m kernel between both.
    hidden_layers : int
        L ≥ 0; zero gives the linear kernel.
    last_layer : {"he", "lecun"}
        Variance of the output weights at width w. ``"he"``: 2/w as in every other layer, the first one included; the
        kernel is K̃⁽ᵈ⁾. ``"lecun"``: 1/w; the kernel is (K̃⁽ᵈ⁾ + Σ⁽ᵈ⁾)/2, as the NPK paper prints it.
    max_bytes : int, optional
        Memory that tiles may take.

    Returns
    -------
    CustomKernel (n, n) or (n, m), float64, on the device of ``X``.

    Notes
    -----
    Exact to rounding, also for nearly parallel inputs, where arccos would lose eight digits. Costs n·m·(2d + 40L)
    operations in strips that stay in the cache. NPK paper, appendix A, equation 2.

    Examples
    --------
    >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    >>> K = relu_ntk(X, hidden_layers=1)
    >>> K.dense()
    tensor([[ 2.0000,  0.3183,  6.0000],
            [ 0.3183,  2.0000,  0.9549],
            [ 6.0000,  0.9549, 18.0000]], dtype=torch.float64)
    """
    layers = _count(hidden_layers, "hidden_layers", 0, "relu_ntk")
    last = _choice(last_layer, _LAST_LAYERS, "last_layer")
    return _dot_product_kernel(X, Y, lambda theta: _ntk(theta, layers, last), "relu_ntk", max_bytes)


def relu_nngp(X: Any, Y: Any = None, *, hidden_layers: int = 5, max_bytes: int | None = None) -> CustomKernel:
    """Covariance Σ⁽ᵈ⁾ of an infinitely wide ReLU network: ⟨h, h′⟩ of its last hidden layer, d = L + 1.

    Σ⁽¹⁾ = x·y, Σ⁽ˡ⁺¹⁾ = |x||y|·κ₁(θ⁽ˡ⁾), for weights of variance 2/w in every layer. It is the covariance of the
    network's outputs for output weights of variance 1 (times 2/w for ``"he"``, 1/w for ``"lecun"``).

    Parameters
    ----------
    X, Y, hidden_layers, max_bytes
        As in `relu_ntk`.

    Returns
    -------
    CustomKernel (n, n) or (n, m), float64. Exact; costs n·m·(2d + 40L).

    Examples
    --------
    >>> round(relu_nngp(torch.eye(2), hidden_layers=1)[0, 1], 12)  # 1/π
    0.318309886184
    """
    layers = _count(hidden_layers, "hidden_layers", 0, "relu_nngp")
    return _dot_product_kernel(X, Y, lambda theta: _nngp(theta, layers), "relu_nngp", max_bytes)


def random_gate_limit(X: Any, Y: Any = None, *, hidden_layers: int = 5, max_bytes: int | None = None) -> CustomKernel:
    """NTK of an infinitely wide network whose gates come from an independent random ReLU network (frozen gates, FRNPF).

    d·Σ ∘ ∏_l Σ̂⁽ˡ⁾ with d = L + 1, Σ = x·y and Σ̂⁽ˡ⁺¹⁾ = 1 − θ⁽ˡ⁾/π the share of gates that both inputs open, times two:
    Theorem 5.1 of the NPK paper, d·σ^(2(d−1))·Σ∘Λ with σ² = 2/w, in the limit of infinite width. It has the diagonal of
    `relu_ntk` and differs from it elsewhere; with the gates of its own values (FRNPF-DI) the limit is `relu_ntk`.

    Parameters
    ----------
    X, Y, hidden_layers, max_bytes
        As in `relu_ntk`.

    Returns
    -------
    CustomKernel (n, n) or (n, m), float64. Exact; costs n·m·(2d + 40L).

    Examples
    --------
    >>> X = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> random_gate_limit(X, hidden_layers=1).dense()
    tensor([[2.0000, 1.5000],
            [1.5000, 4.0000]], dtype=torch.float64)
    """
    layers = _count(hidden_layers, "hidden_layers", 0, "random_gate_limit")
    return _dot_product_kernel(X, Y, lambda theta: _random_gates(theta, layers), "random_gate_limit", max_bytes)


# --- convolutional -------------------------------------------------------------------------------------------------


def _window_sum(t: Tensor, k: int, axes: Sequence[tuple[int, ...]]) -> Tensor:
    """Σ over offsets −k//2 … k//2 along each group of axes, whose axes move together; zeros outside."""
    for group in axes:
        out = t.clone()
        for by in range(1, min(k // 2, t.shape[group[0]] - 1) + 1):
            low, high = t, t
            into_low, into_high = out, out
            for axis in group:
                size = t.shape[axis] - by
                low, high = low.narrow(axis, 0, size), high.narrow(axis, by, size)
                into_low, into_high = into_low.narrow(axis, 0, size), into_high.narrow(axis, by, size)
            into_low.add_(high)
            into_high.add_(low)
        t = out
    return t


def _powers(images: Tensor, layers: int, k: int) -> Tensor:
    """√A_l(p, p)·k^l of every image and layer, (L, n, H, W): ReLU keeps the power, a convolution averages it."""
    power, out = images.square().sum(1), []
    for _ in range(layers):
        power = _window_sum(power, k, ((-2,), (-1,)))
        out.append(power.sqrt())
    return torch.stack(out)


class _ConvolutionalLimit:
    """Recursion over pairs of images and pairs of positions (p, q).

    Convolutions take (p, q) to (p + κ, q + κ), so that q − p never changes: every offset of rows is a recursion of its
    own, on the rows where both p and q lie inside the image. Flattening needs p = q alone. Window sums stand for means
    throughout: the powers of k are taken out at the end.
    """

    def __init__(self, layers: int, k: int, pool: str, dense_layers: int, last_layer: str) -> None:
        self.layers, self.k, self.pool, self.dense_layers, self.last_layer = layers, k, pool, dense_layers, last_layer

    def offsets(self, height: int, half: bool) -> range:
        """Offsets of rows between p and q; with ``half`` one of each pair ±r."""
        if self.pool == "flatten":
            return range(1)
        return range(height) if half else range(1 - height, height)

    def positions(self, height: int, width: int) -> int:
        """Numbers per pair of images that a field holds."""
        return height * width * (width if self.pool == "gap" else 1)

    def _fields(self, nngp: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Σ over positions of (T_L, T_L + Σ̂_L∘Θ_L), from T_0 and ρ_l(p), ρ_l(q), each with L in front."""
        gap = self.pool == "gap"
        axes: tuple[tuple[int, ...], ...] = ((-3,), (-2, -1)) if gap else ((-2,), (-1,))
        # Equal patches at different places differ from cosine 1 by rounding, of which arccos takes the root.
        inverse_u, inverse_v = (torch.where(t > 0, 1.0 / t, 0.0) for t in (u, v))
        inverse_u *= 1.0 + _SNAP
        one = nngp.new_ones(())
        tangent = nngp
        for at in range(self.layers):
            covariance = _window_sum(nngp, self.k, axes)
            theta = covariance if tangent is nngp else _window_sum(tangent, self.k, axes)
            cosine = (covariance * inverse_u[at]).mul_(inverse_v[at]).clamp_(-1.0, 1.0)
            gates = torch.sub(one, cosine.acos(), alpha=1 / math.pi)
            nngp = torch.addcmul(one, cosine, cosine, value=-1.0).sqrt_().div_(math.pi).addcmul_(cosine, gates)
            nngp.mul_(u[at]).mul_(v[at])
            tangent = torch.addcmul(nngp, theta, gates)
        over = (-3, -2, -1) if gap else (-2, -1)
        return torch.stack([nngp.sum(over), tangent.sum(over)])

    def block(
        self, x: Tensor, y: Tensor, px: Tensor, py: Tensor, *, same: bool, paired: bool, done: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        """Pooled (T_L, T_L + Σ̂_L∘Θ_L) of images x (a, C, H, W) and y (b, C, H, W): (a, b), or (a,) where paired."""
        height, width = x.shape[-2:]
        total = x.new_zeros(2, len(x)) if paired else x.new_zeros(2, len(x), len(y))
        gap = self.pool == "gap"
        columns = ("u", "v") if gap else ("u", "u")
        pairs = ("a", "a", "a") if paired else ("a", "b", "ab")
        sums = f"{pairs[0]}ch{columns[0]},{pairs[1]}ch{columns[1]}->{pairs[2]}h{'uv' if gap else 'u'}"
        for by in self.offsets(height, same or paired):
            # p and p + r both inside: some rows of the left image and some of the right image
            left, right = slice(max(-by, 0), height - max(by, 0)), slice(max(by, 0), height - max(-by, 0))
            u, v = px[..., left, :], py[..., right, :]
            if gap:
                u, v = u[..., None], v[..., None, :]
            if not paired:
                u, v = u[:, :, None], v[:, None]
            part = self._fields(torch.einsum(sums, x[..., left, :], y[..., right, :]), u, v)
            total += part
            if by and (same or paired):  # F_{−r}(s, t) = F_r(t, s)
                total += part if paired else part.mT
            done()
        positions = height * width
        total /= float(self.k) ** (2 * self.layers) * (positions**2 if gap else positions)
        return total[0], total[1]

    def head(self, nngp: Tensor, ntk: Tensor, scale: Tensor) -> Tensor:
        """Dense layers after pooling and the output layer; ``scale`` is √(Σ_ss Σ_tt) of the pooled features."""
        if self.dense_layers:
            cosine = nngp / scale.clamp(min=1e-300)
            theta = cosine.mul_(1.0 + _SNAP).clamp_(-1.0, 1.0).acos()
            for gates, cosine in _layers(theta, self.dense_layers):
                nngp = scale * cosine
                ntk = torch.addcmul(nngp, ntk, gates)
        return ntk if self.last_layer == "he" else 0.5 * (ntk + nngp)


def _chunks(index: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for lo in range(0, len(index), size):
        yield lo, index[lo : lo + size]


@exact_precision()
def relu_cntk(
    X: Any,
    Y: Any = None,
    *,
    hidden_layers: int = 4,
    pool: Pool = "gap",
    dense_layers: int = 0,
    kernel_size: int = 3,
    last_layer: LastLayer = "he",
    max_bytes: int | None = None,
) -> CustomKernel:
    """NTK of an infinitely wide convolutional ReLU network (CNTK): stride 1, 'same' zero padding, no biases.

    T₀(p, q) = Σ_c x_c(p)·y_c(q); for l = 1 … L, with k² = ``kernel_size``² and the sum over window offsets κ,

    A_l(p, q) = k⁻² Σ_κ T_{l−1}(p+κ, q+κ), Θ_l(p, q) = k⁻² Σ_κ U_{l−1}(p+κ, q+κ), U₀ = T₀,
    T_l = √(A_l(p, p)·A_l(q, q))·κ₁(cos), U_l = T_l + κ₀(cos)·Θ_l, cos = A_l(p, q)/√(A_l(p, p)·A_l(q, q)).

    The kernel is the mean of U_L over all (p, q) for ``pool="gap"``, and over p = q for ``pool="flatten"``.

    Parameters
    ----------
    X : (n, channels, H, W)
        Images; any real dtype, taken to float64.
    Y : (m, channels, H, W), optional
        A second set of images.
    hidden_layers : int
        L ≥ 1 convolutions, each followed by a ReLU.
    pool : {"gap", "flatten"}
        Global average pooling, or a dense layer that reads every position.
    dense_layers : int
        Dense hidden layers with ReLU between the pooling and the output.
    kernel_size : int
        Odd edge k of the windows.
    last_layer : {"he", "lecun"}
        As in `relu_ntk`: output weights of variance 2/w, as all others, or 1/w.
    max_bytes : int, optional
        Memory that tiles and the recursion's fields may take.

    Returns
    -------
    CustomKernel (n, n) or (n, m), float64, on the device of ``X``.

    Notes
    -----
    It is the limit of q = conv(W, h)/k with W ~ N(0, 2/w), and of f = a·mean_p h(p) or f = a·h/√P for the output: the
    factors 1/k and 1/√P multiply the layer, not the weights' variance, as in Arora et al. (2019).
    Exact, except that patches are called parallel where their cosine is 1 to 14 digits (an error of at most 5e-8 of an
    entry, and none where they are equal). With P = H·W, costs about 40·n·m·L·P operations for ``"flatten"`` and
    40·n·m·L·P² for ``"gap"``, half of it where symmetric; memory is P, or P·W, per pair of a block, never P². A
    progress bar shows after two seconds.

    Examples
    --------
    >>> X = torch.ones(2, 1, 2, 2)
    >>> X[1, 0, 0] = 0
    >>> relu_cntk(X, hidden_layers=1, pool="flatten").dense()
    tensor([[0.8889, 0.4041],
            [0.4041, 0.4444]], dtype=torch.float64)
    """
    what = "relu_cntk"
    layers = _count(hidden_layers, "hidden_layers", 1, what)
    dense_layers = _count(dense_layers, "dense_layers", 0, what)
    k = _count(kernel_size, "kernel_size", 1, what)
    if k % 2 == 0:
        raise OptionError(f"{what}: kernel_size must be odd, got {k}: 'same' padding has no centre otherwise.")
    last, pool_name = _choice(last_layer, _LAST_LAYERS, "last_layer"), _choice(pool, _POOLS, "pool")
    x, y = _pair(X, Y, 4, what)
    limit = _ConvolutionalLimit(layers, k, pool_name, dense_layers, last)
    px = _powers(x, layers, k)
    py = px if y is x else _powers(y, layers, k)
    # a block's fields: in the cache on a CPU, large enough to fill a GPU, and within half of the budget
    budget = resolve_budget(max_bytes, x.device) // 2
    entries = min(1 << (24 if x.is_cuda else 18), budget // (8 * _FIELDS))
    edge = max(math.isqrt(max(entries // limit.positions(x.shape[-2], x.shape[-1]), 1)), 1)
    found: dict[str, Tensor] = {}

    def self_pairs(images: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
        index, parts = torch.arange(len(images), device=x.device), []
        count = len(limit.offsets(x.shape[-2], True)) * -(-len(images) // edge**2)
        with ProgressBar(f"{what}: diagonal", count) as meter:
            for _, some in _chunks(index, edge**2):
                one, its = images[some], powers[:, some]
                parts.append(limit.block(one, one, its, its, same=False, paired=True, done=meter.advance))
        nngp, ntk = (torch.cat(column) for column in zip(*parts))
        return nngp, ntk

    def spread(side: str) -> Tensor:
        """√Σ_ss of the pooled features; only dense layers ask for it."""
        if side not in found:
            found[side] = (self_pairs(x, px) if side == "x" else self_pairs(y, py))[0].sqrt()
        return found[side]

    def tile(rows: Tensor, cols: Tensor) -> Tensor:
        out = torch.empty(2, len(rows), len(cols), dtype=torch.float64, device=x.device)
        mirror = y is x and torch.equal(rows, cols)
        strips = -(-len(rows) // edge)
        blocks = strips * (strips + 1) // 2 if mirror else strips * -(-len(cols) // edge)
        with ProgressBar(what, blocks * len(limit.offsets(x.shape[-2], False))) as meter:
            for i, some in _chunks(rows, edge):
                for j, other in _chunks(cols, edge):
                    if mirror and j < i:
                        continue
                    same = mirror and i == j
                    done = partial(meter.advance, 2 if same else 1)
                    images, powers = (x[some], y[other]), (px[:, some], py[:, other])
                    pair = torch.stack(limit.block(*images, *powers, same=same, paired=False, done=done))
                    out[:, i : i + edge, j : j + edge] = pair
                    if mirror and not same:
                        out[:, j : j + edge, i : i + edge] = pair.mT
        scale = spread("x")[rows, None] * spread("x" if y is x else "y")[cols] if dense_layers else out[0]
        return limit.head(out[0], out[1], scale)

    def diagonal() -> Tensor:
        if "diagonal" not in found:
            if y is x:
                nngp, ntk = self_pairs(x, px)
                found["diagonal"] = limit.head(nngp, ntk, nngp)
            else:
                found["diagonal"] = tile_diagonal(tile, len(x), x.device)
        return found["diagonal"]

    return CustomKernel(
        (len(x), len(y)),
        tile,
        diagonal if len(x) == len(y) else None,
        dtype=torch.float64,
        device=x.device,
        symmetric=y is x,
        name=what,
        tile_buffers=4,
        max_bytes=max_bytes,
    )
