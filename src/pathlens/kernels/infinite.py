"""Kernels of infinitely wide ReLU networks: NTK, NNGP, the limit for random gates, and the convolutional NTK.

Recursions over pairs of inputs, computed in float64, as lazy operators.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pathlens.budgets import resolve_budget
from pathlens.data.inputs import as_numbers
from pathlens.errors import EmptyDataError, NotFiniteError, OptionError, ShapeError, unknown_name
from pathlens.kernels.sources import fill_blocks
from pathlens.linops import KernelOperator
from pathlens.linops.evaluate import paired_entries
from pathlens.models.tensors import require_dense
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

LastLayer = Literal["he", "lecun"]
Pooling = Literal["gap", "flatten"]
_OfAngle: TypeAlias = Callable[[Tensor, int], Tensor]  # (angles, hidden layers) → entries between unit rows
_Images: TypeAlias = tuple[Tensor, Tensor]  # images (n, C, H, W) and their powers (L, n, H, W)
_STRIP = 1 << 17  # entries of a tile that are computed at once: their temporaries stay in the cache
_SMALL = 0.25  # for angles below this, the next angle is computed by a series
_NEARLY_PARALLEL = 0.99  # for cosines above this, arccos loses more than a digit of the angle
_FIELDS = 8  # arrays of one value per pair and position that the convolutional recursion holds at once
_SNAP = 32 * torch.finfo(torch.float64).eps  # rounding error of cosines that should be 1


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
    """X and Y in float64; the same object twice if there is no Y."""
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


def _choice(value: str, allowed: Any, name: str) -> str:
    """The value, if it is one of a `Literal`."""
    if value not in get_args(allowed):
        raise unknown_name(name, value, get_args(allowed))
    return value


# --- fully connected -----------------------------------------------------------------------------------------------


def _angles(x: Tensor, y: Tensor) -> Tensor:
    """Angles between unit rows (a, d), (b, d): (a, b), accurate to a few units in the last place.

    arccos loses half of the digits near ±1, so angles of nearly parallel rows are computed from their difference.
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

    Computed from sin²(θ′/2) = sin²(θ/2) − (sin θ − θ cos θ)/2π, which is accurate also for cos θ′ near 1.
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


class _InfiniteKernel(KernelOperator):
    """A kernel between the rows of X and of Y, in float64."""

    dtype = torch.float64

    def __init__(self, X: Any, Y: Any, ndim: int, name: str, max_bytes: int | None) -> None:
        self.x, self.y = _pair(X, Y, ndim, name)
        self.shape, self.device, self.symmetric = (len(self.x), len(self.y)), self.x.device, self.y is self.x
        self._name, self.max_bytes = name, max_bytes

    @cached_property
    def _diagonal(self) -> Tensor:
        index = torch.arange(self._square("diagonal"), device=self.device)
        return self._own_entries() if self.symmetric else paired_entries(self, index, index)

    @abstractmethod
    def _own_entries(self) -> Tensor:
        """K_ii of a symmetric kernel."""

    @exact_precision()
    def diagonal(self) -> Tensor:
        """K_ii, (n,); computed once."""
        return self._diagonal


def _split_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(norms, unit rows); divides by the largest entry first, so that squares stay in range."""
    top = rows.abs().amax(1, keepdim=True)
    top = torch.where(top > 0, top, 1.0)
    norm = torch.linalg.vector_norm(rows / top, dim=1, keepdim=True)
    return top[:, 0] * norm[:, 0], rows / top / torch.where(norm > 0, norm, 1.0)


class AngleKernel(_InfiniteKernel):
    """The kernel |x||y|·k(θ) with the angle θ between x and y."""

    tile_buffers = 2

    def __init__(
        self, X: Any, Y: Any, name: str, of_angle: _OfAngle, hidden_layers: int, max_bytes: int | None
    ) -> None:
        super().__init__(X, Y, 2, name, max_bytes)
        self._layers, self._of_angle = _count(hidden_layers, "hidden_layers", 0, name), of_angle
        self._left = _split_norms(self.x)
        self._right = self._left if self.symmetric else _split_norms(self.y)

    @exact_precision()
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors."""
        out = torch.empty(len(rows), len(cols), dtype=torch.float64, device=self.device)
        (norms, units), (scale, right) = self._left, (part[cols] for part in self._right)
        mirror = self.symmetric and torch.equal(rows, cols)
        for lo in range(0, len(rows), step := max(_STRIP // len(cols), 1)):
            some, start = rows[lo : lo + step], lo if mirror else 0
            values = self._of_angle(_angles(units[some], right[start:]), self._layers)
            out[lo : lo + step, start:] = values.mul_(norms[some, None]).mul_(scale[start:])
            if mirror:
                out[lo:, lo : lo + step] = values.T
        return out

    def _own_entries(self) -> Tensor:
        norms = self._left[0]
        return self._of_angle(torch.zeros_like(norms), self._layers) * norms * norms


def relu_ntk(
    X: Any, Y: Any = None, *, hidden_layers: int = 5, last_layer: LastLayer = "he", max_bytes: int | None = None
) -> KernelOperator:
    """NTK of an infinitely wide fully connected ReLU network without biases.

    With θ the angle between x and y, Σ⁽¹⁾ = K̃⁽¹⁾ = x·y and d = L + 1 weight layers:
    Σ̂⁽ˡ⁺¹⁾ = κ₀ = 1 − θ/π, Σ⁽ˡ⁺¹⁾ = |x||y|·κ₁, κ₁ = cos θ′ = (sin θ + (π − θ)·cos θ)/π, K̃⁽ˡ⁺¹⁾ = K̃⁽ˡ⁾·Σ̂⁽ˡ⁺¹⁾ + Σ⁽ˡ⁺¹⁾,
    and θ′ is the θ of the next layer.

    Parameters
    ----------
    X : (n, d)
        Inputs of any real dtype; computed in float64.
    Y : (m, d), optional
        A second set of inputs: the result is the n × m kernel between both.
    hidden_layers : int
        L ≥ 0; zero gives the linear kernel.
    last_layer : {"he", "lecun"}
        Variance of the output weights at width w. ``"he"``: 2/w as in every other layer, the first one included; the
        kernel is K̃⁽ᵈ⁾. ``"lecun"``: 1/w; the kernel is (K̃⁽ᵈ⁾ + Σ⁽ᵈ⁾)/2, as the NPK paper prints it.
    max_bytes : int, optional
        Memory budget for tiles.

    Returns
    -------
    KernelOperator of shape (n, n) or (n, m), float64, on the device of ``X``.

    Notes
    -----
    Exact up to rounding, also for nearly parallel inputs, where arccos would lose eight digits. Costs n·m·(2d + 40L)
    operations. NPK paper, appendix A, equation 2.

    Examples
    --------
    >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    >>> K = relu_ntk(X, hidden_layers=1)
    >>> K.dense()
    tensor([[ 2.0000,  0.3183,  6.0000],
            [ 0.3183,  2.0000,  0.9549],
            [ 6.0000,  0.9549, 18.0000]], dtype=torch.float64)
    """
    last = _choice(last_layer, LastLayer, "last_layer")
    return AngleKernel(X, Y, "relu_ntk", partial(_ntk, last_layer=last), hidden_layers, max_bytes)


def relu_nngp(X: Any, Y: Any = None, *, hidden_layers: int = 5, max_bytes: int | None = None) -> KernelOperator:
    """Covariance Σ⁽ᵈ⁾ of an infinitely wide ReLU network: ⟨h, h′⟩ of its last hidden layer, d = L + 1.

    Σ⁽¹⁾ = x·y, Σ⁽ˡ⁺¹⁾ = |x||y|·κ₁(θ⁽ˡ⁾), for weights of variance 2/w in every layer. It is the covariance of the
    network's outputs for output weights of variance 1 (times 2/w for ``"he"``, 1/w for ``"lecun"``).

    Parameters
    ----------
    X, Y, hidden_layers, max_bytes
        As in `relu_ntk`.

    Returns
    -------
    KernelOperator of shape (n, n) or (n, m), float64. Exact; costs n·m·(2d + 40L).

    Examples
    --------
    >>> round(relu_nngp(torch.eye(2), hidden_layers=1)[0, 1], 12)  # 1/π
    0.318309886184
    """
    return AngleKernel(X, Y, "relu_nngp", _nngp, hidden_layers, max_bytes)


def random_gate_limit(X: Any, Y: Any = None, *, hidden_layers: int = 5, max_bytes: int | None = None) -> KernelOperator:
    """NTK of an infinitely wide network whose gates come from an independent random ReLU network (frozen gates, FRNPF).

    d·Σ ∘ ∏_l Σ̂⁽ˡ⁾ with d = L + 1, Σ = x·y and Σ̂⁽ˡ⁺¹⁾ = 1 − θ⁽ˡ⁾/π, twice the share of gates open for both inputs:
    Theorem 5.1 of the NPK paper, d·σ^(2(d−1))·Σ∘Λ with σ² = 2/w, in the limit of infinite width. It has the diagonal of
    `relu_ntk` and differs from it elsewhere; with the gates of its own values (FRNPF-DI) the limit is `relu_ntk`.

    Parameters
    ----------
    X, Y, hidden_layers, max_bytes
        As in `relu_ntk`.

    Returns
    -------
    KernelOperator of shape (n, n) or (n, m), float64. Exact; costs n·m·(2d + 40L).

    Examples
    --------
    >>> X = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> random_gate_limit(X, hidden_layers=1).dense()
    tensor([[2.0000, 1.5000],
            [1.5000, 4.0000]], dtype=torch.float64)
    """
    return AngleKernel(X, Y, "random_gate_limit", _random_gates, hidden_layers, max_bytes)


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


class ConvolutionalKernel(_InfiniteKernel):
    """The convolutional NTK, by a recursion over pairs of images and pairs of positions (p, q).

    Convolutions map (p, q) to (p + κ, q + κ), so that q − p never changes: every offset of rows has a recursion of its
    own, on the rows for which p and q are both inside the image. Flattening needs p = q only. Window sums are used
    instead of means; the powers of k are divided out at the end.
    """

    tile_buffers = 4

    def __init__(
        self, X: Any, Y: Any, layers: int, k: int, pool: str, dense_layers: int, last_layer: str, max_bytes: int | None
    ) -> None:
        super().__init__(X, Y, 4, "relu_cntk", max_bytes)
        self._layers, self._k, self._dense_layers, self._last_layer = layers, k, dense_layers, last_layer
        self._gap = pool == "gap"
        self._left = self.x, _powers(self.x, layers, k)
        self._right = self._left if self.symmetric else (self.y, _powers(self.y, layers, k))
        self._height, self._width = self.x.shape[-2:]
        # a block's fields: in the cache of a CPU, large enough to fill a GPU, and within half of the budget
        budget = resolve_budget(max_bytes, self.device) // 2
        entries = min(1 << (24 if self.x.is_cuda else 18), budget // (8 * _FIELDS))
        positions = self._height * self._width * (self._width if self._gap else 1)
        self._edge = max(math.isqrt(max(entries // positions, 1)), 1)

    def _offsets(self, half: bool) -> range:
        """Offsets of rows between p and q; with ``half`` one of each pair ±r."""
        if not self._gap:
            return range(1)
        return range(0 if half else 1 - self._height, self._height)

    def _fields(self, nngp: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Σ over positions of (T_L, T_L + Σ̂_L∘Θ_L), from T_0 and ρ_l(p), ρ_l(q), each with L in front."""
        axes: tuple[tuple[int, ...], ...] = ((-3,), (-2, -1)) if self._gap else ((-2,), (-1,))
        # Cosines of equal patches at different places differ from 1 by rounding, which arccos would amplify.
        inverse_u, inverse_v = (torch.where(t > 0, 1.0 / t, 0.0) for t in (u, v))
        inverse_u *= 1.0 + _SNAP
        one = nngp.new_ones(())
        tangent = nngp
        for at in range(self._layers):
            covariance = _window_sum(nngp, self._k, axes)
            theta = covariance if tangent is nngp else _window_sum(tangent, self._k, axes)
            cosine = (covariance * inverse_u[at]).mul_(inverse_v[at]).clamp_(-1.0, 1.0)
            gates = torch.sub(one, cosine.acos(), alpha=1 / math.pi)
            nngp = torch.addcmul(one, cosine, cosine, value=-1.0).sqrt_().div_(math.pi).addcmul_(cosine, gates)
            nngp.mul_(u[at]).mul_(v[at])
            tangent = torch.addcmul(nngp, theta, gates)
        over = (-3, -2, -1) if self._gap else (-2, -1)
        return torch.stack([nngp.sum(over), tangent.sum(over)])

    def _pooled(self, left: _Images, right: _Images, *, same: bool, paired: bool, done: Callable[[], None]) -> Tensor:
        """Pooled (T_L, T_L + Σ̂_L∘Θ_L) of images x (a, C, H, W) and y (b, C, H, W): (2, a, b), or (2, a) if paired."""
        (x, px), (y, py) = left, right
        total = x.new_zeros(2, len(x)) if paired else x.new_zeros(2, len(x), len(y))
        columns = ("u", "v") if self._gap else ("u", "u")
        pairs = ("a", "a", "a") if paired else ("a", "b", "ab")
        sums = f"{pairs[0]}ch{columns[0]},{pairs[1]}ch{columns[1]}->{pairs[2]}h{'uv' if self._gap else 'u'}"
        for by in self._offsets(same or paired):
            # rows of the left and of the right image for which p and p + r are both inside
            above, below = slice(max(-by, 0), self._height - max(by, 0)), slice(max(by, 0), self._height - max(-by, 0))
            u, v = px[..., above, :], py[..., below, :]
            if self._gap:
                u, v = u[..., None], v[..., None, :]
            if not paired:
                u, v = u[:, :, None], v[:, None]
            part = self._fields(torch.einsum(sums, x[..., above, :], y[..., below, :]), u, v)
            total += part
            if by and (same or paired):  # F_{−r}(s, t) = F_r(t, s)
                total += part if paired else part.mT
            done()
        positions = self._height * self._width
        total /= float(self._k) ** (2 * self._layers) * (positions**2 if self._gap else positions)
        return total

    def _head(self, pooled: Tensor, scale: Tensor) -> Tensor:
        """Dense layers after pooling and the output layer; ``scale`` is √(Σ_ss Σ_tt) of the pooled features."""
        nngp, ntk = pooled
        if self._dense_layers:
            cosine = nngp / scale.clamp(min=1e-300)
            theta = cosine.mul_(1.0 + _SNAP).clamp_(-1.0, 1.0).acos()
            for gates, cosine in _layers(theta, self._dense_layers):
                nngp = scale * cosine
                ntk = torch.addcmul(nngp, ntk, gates)
        return ntk if self._last_layer == "he" else 0.5 * (ntk + nngp)

    def _pooled_with_itself(self, side: _Images) -> Tensor:
        """Pooled kernels of every image with itself, (2, n)."""
        images, powers = side
        blocks = torch.arange(len(images), device=self.device).split(self._edge**2)
        parts = []
        with ProgressBar(f"{self.name}: diagonal", len(self._offsets(True)) * len(blocks)) as meter:
            for some in blocks:
                own = images[some], powers[:, some]
                parts.append(self._pooled(own, own, same=False, paired=True, done=meter.advance))
        return torch.cat(parts, dim=1)

    @cached_property
    def _scales(self) -> list[Tensor]:
        """√Σ_ss of the pooled features of both sides; only dense layers need it."""
        left = self._pooled_with_itself(self._left)[0].sqrt()
        return [left, left if self.symmetric else self._pooled_with_itself(self._right)[0].sqrt()]

    @exact_precision()
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors."""
        edge, out = self._edge, torch.empty(2, len(rows), len(cols), dtype=torch.float64, device=self.device)
        mirror = self.symmetric and torch.equal(rows, cols)
        strips = -(-len(rows) // edge)
        blocks = strips * (strips + 1) // 2 if mirror else strips * -(-len(cols) // edge)

        def images(side: _Images, index: Tensor, start: int) -> _Images:
            some = index[start : start + edge]
            return side[0][some], side[1][:, some]

        with ProgressBar(self.name, blocks * len(self._offsets(False))) as meter:

            def product(left: _Images, right: _Images, same: bool) -> Tensor:
                return self._pooled(left, right, same=same, paired=False, done=partial(meter.advance, 1 + same))

            left, right = partial(images, self._left, rows), partial(images, self._right, cols)
            fill_blocks(out, edge, mirror, left, right, product)
        scale = self._scales[0][rows, None] * self._scales[1][cols] if self._dense_layers else out[0]
        return self._head(out, scale)

    def _own_entries(self) -> Tensor:
        pooled = self._pooled_with_itself(self._left)
        return self._head(pooled, pooled[0])


def relu_cntk(
    X: Any,
    Y: Any = None,
    *,
    hidden_layers: int = 4,
    pool: Pooling = "gap",
    dense_layers: int = 0,
    kernel_size: int = 3,
    last_layer: LastLayer = "he",
    max_bytes: int | None = None,
) -> KernelOperator:
    """NTK of an infinitely wide convolutional ReLU network (CNTK): stride 1, 'same' zero padding, no biases.

    T₀(p, q) = Σ_c x_c(p)·y_c(q); for l = 1 … L, with k² = ``kernel_size``² and the sum over window offsets κ,

    A_l(p, q) = k⁻² Σ_κ T_{l−1}(p+κ, q+κ), Θ_l(p, q) = k⁻² Σ_κ U_{l−1}(p+κ, q+κ), U₀ = T₀,
    T_l = √(A_l(p, p)·A_l(q, q))·κ₁(cos), U_l = T_l + κ₀(cos)·Θ_l, cos = A_l(p, q)/√(A_l(p, p)·A_l(q, q)).

    The kernel is the mean of U_L over all (p, q) for ``pool="gap"``, and over p = q for ``pool="flatten"``.

    Parameters
    ----------
    X : (n, channels, H, W)
        Images of any real dtype; computed in float64.
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
        Memory budget for tiles and for the fields of the recursion.

    Returns
    -------
    KernelOperator of shape (n, n) or (n, m), float64, on the device of ``X``.

    Notes
    -----
    It is the limit of q = conv(W, h)/k with W ~ N(0, 2/w), and of f = a·mean_p h(p) or f = a·h/√P for the output: the
    factors 1/k and 1/√P multiply the layer, not the variance of the weights, as in Arora et al. (2019).
    Exact, except that patches count as parallel if their cosine is 1 to 14 digits (an error of at most 5e-8 of an
    entry, and none if they are equal). With P = H·W, costs about 40·n·m·L·P operations for ``"flatten"`` and
    40·n·m·L·P² for ``"gap"``, half of that if symmetric. Memory is P, or P·W, per pair of a block, never P².

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
    last, pooling = _choice(last_layer, LastLayer, "last_layer"), _choice(pool, Pooling, "pool")
    return ConvolutionalKernel(X, Y, layers, k, pooling, dense_layers, last, max_bytes)
