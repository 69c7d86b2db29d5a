"""The convolutional NTK against loops over positions, wide finite networks, and its own symmetries."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathlens.errors import OptionError, ShapeError, UnknownNameError
from pathlens.kernels.infinite import relu_cntk, relu_ntk
from pathlens.testing import reference as ref


def images(seed: int, n: int, channels: int, height: int, width: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, channels, height, width, generator=draw, dtype=torch.float64)


def by_loops(x: Tensor, y: Tensor, layers: int, pool: str, k: int = 3) -> tuple[float, float]:
    """(Σ, K̃) of two images by the recursion over all pairs of positions, written with dictionaries."""
    _, height, width = x.shape
    places = [(i, j) for i in range(height) for j in range(width)]
    window = [(i, j) for i in range(-(k // 2), k // 2 + 1) for j in range(-(k // 2), k // 2 + 1)]

    def start(a: Tensor, b: Tensor) -> dict:
        return {(p, q): float((a[:, p[0], p[1]] * b[:, q[0], q[1]]).sum()) for p in places for q in places}

    def box(t: dict) -> dict:
        return {
            (p, q): sum(t.get(((p[0] + i, p[1] + j), (q[0] + i, q[1] + j)), 0.0) for i, j in window) / k**2
            for p in places
            for q in places
        }

    cross, left, right = start(x, y), start(x, x), start(y, y)
    tangent = dict(cross)
    for _ in range(layers):
        cross, left, right, theta = box(cross), box(left), box(right), box(tangent)
        power = {side: {p: t[p, p] for p in places} for side, t in (("x", left), ("y", right))}

        def relu(t: dict, a: dict, b: dict) -> tuple[dict, dict]:
            values, gates = {}, {}
            for (p, q), v in t.items():
                size = math.sqrt(a[p] * b[q])
                c = max(-1.0, min(1.0, v / size))
                gates[p, q] = 1 - math.acos(c) / math.pi
                values[p, q] = size * (math.sqrt(1 - c * c) / math.pi + c * gates[p, q])
            return values, gates

        cross, gates = relu(cross, power["x"], power["y"])
        left, right = relu(left, power["x"], power["x"])[0], relu(right, power["y"], power["y"])[0]
        tangent = {at: cross[at] + gates[at] * theta[at] for at in cross}
    chosen = [(p, q) for p in places for q in places if pool == "gap" or p == q]
    return tuple(sum(t[at] for at in chosen) / len(chosen) for t in (cross, tangent))  # type: ignore[return-value]


@pytest.mark.parametrize("pool", ["gap", "flatten"])
@pytest.mark.parametrize(("layers", "size", "k"), [(1, (3, 4), 3), (3, (3, 4), 3), (2, (2, 5), 5), (2, (1, 3), 3)])
def test_equals_loops_over_positions(pool: str, layers: int, size: tuple[int, int], k: int) -> None:
    x, y = images(0, 2, 2, *size), images(1, 1, 2, *size)
    options = {"hidden_layers": layers, "pool": pool, "kernel_size": k}
    he = relu_cntk(x, y, **options).dense()
    lecun = relu_cntk(x, y, **options, last_layer="lecun").dense()
    for i in range(2):
        nngp, ntk = by_loops(x[i], y[0], layers, pool, k)
        assert float(he[i, 0]) == pytest.approx(ntk, rel=1e-12)
        assert float(lecun[i, 0]) == pytest.approx((ntk + nngp) / 2, rel=1e-12)


@pytest.mark.parametrize("pool", ["gap", "flatten"])
@pytest.mark.parametrize("dense_layers", [0, 2])
def test_symmetric_kernel_tiles_and_diagonal(pool: str, dense_layers: int) -> None:
    x = images(2, 7, 2, 4, 3)
    options = {"hidden_layers": 2, "pool": pool, "dense_layers": dense_layers}
    want = relu_cntk(x, x.clone(), **options).dense()
    kernel = relu_cntk(x, **options)
    assert kernel.symmetric and torch.equal(kernel.dense(), kernel.dense().T)
    torch.testing.assert_close(kernel.dense(), want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(kernel.diagonal(), want.diagonal(), rtol=1e-12, atol=0)
    # a budget of a few pairs: many blocks, ragged ones, the same numbers
    small = relu_cntk(x, **options, max_bytes=2 * 64 * 12 * 5)
    rows = torch.arange(7)
    torch.testing.assert_close(small.tile(rows, rows), want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(small.tile(rows[1:5], rows[2:]), want[1:5, 2:], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        relu_cntk(x, x.flip(0), **options).diagonal(), want.flip(1).diagonal(), rtol=1e-12, atol=1e-13
    )


def test_one_position_is_a_dense_network() -> None:
    x = images(3, 4, 5, 1, 1)
    for pool in ("gap", "flatten"):
        got = relu_cntk(x, hidden_layers=3, pool=pool, kernel_size=1).dense()  # type: ignore[arg-type]
        torch.testing.assert_close(got, relu_ntk(x.flatten(1), hidden_layers=3).dense(), rtol=1e-12, atol=1e-13)
    # dense layers after pooling count on: two convolutions and one dense layer of 1 × 1 images are three layers
    mixed = relu_cntk(x, hidden_layers=2, dense_layers=1, kernel_size=1).dense()
    torch.testing.assert_close(mixed, relu_ntk(x.flatten(1), hidden_layers=3).dense(), rtol=1e-12, atol=1e-13)


def test_equal_patches_are_exact() -> None:
    """Constant images: every patch away from the border is parallel to every other, at any offset."""
    x = torch.full((2, 1, 6, 6), 0.1, dtype=torch.float64)
    x[1] *= 3
    dense = relu_cntk(x, hidden_layers=3).dense()
    torch.testing.assert_close(dense[0, 1] * 3, dense[1, 1], rtol=1e-14, atol=0)
    nngp, _ = by_loops(x[0], x[1], 1, "gap")
    lecun = 2 * relu_cntk(x, hidden_layers=1, last_layer="lecun")[0, 1] - relu_cntk(x, hidden_layers=1)[0, 1]
    assert lecun == pytest.approx(nngp, rel=1e-14)


def test_zero_images_give_zero() -> None:
    x = torch.cat([images(4, 1, 2, 4, 4), torch.zeros(1, 2, 4, 4, dtype=torch.float64)])
    x[0, :, :2] = 0  # and zero patches beside others
    dense = relu_cntk(x, hidden_layers=2, dense_layers=1).dense()
    assert bool(torch.isfinite(dense).all()) and float(dense[0, 0]) > 0
    assert float(dense[1].abs().max()) == 0.0


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["gap", "flatten"])
)
def test_invariances(seed: int, layers: int, height: int, width: int, pool: str) -> None:
    x = images(seed, 3, 2, height, width)

    def kernel(t: Tensor) -> Tensor:
        return relu_cntk(t, hidden_layers=layers, pool=pool).dense()  # type: ignore[arg-type]

    want = kernel(x)
    torch.testing.assert_close(kernel(2 * x), 4 * want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(kernel(x.flip(-1)), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kernel(x.mT), want, rtol=1e-10, atol=1e-12)
    turn = torch.linalg.qr(images(seed + 1, 1, 1, 2, 2)[0, 0])[0]
    torch.testing.assert_close(kernel(torch.einsum("ab,nbhw->nahw", turn, x)), want, rtol=1e-9, atol=1e-10)
    assert float(torch.linalg.eigvalsh(want)[0]) >= -1e-8 * float(want.trace())


def finite(x: Tensor, layers: int, w: int, seed: int, pool: str, last: float) -> Tensor:
    """NTK of one convolutional network by autograd, in the parametrisation that `relu_cntk` states."""
    draw = torch.Generator().manual_seed(seed)
    channels = [x.shape[1]] + [w] * layers
    weights = [torch.randn(b, a, 3, 3, generator=draw, dtype=x.dtype) * math.sqrt(2 / w) for a, b in pairwise(channels)]
    places = x.shape[2] * x.shape[3]
    outputs = w if pool == "gap" else w * places
    weights.append(torch.randn(outputs, generator=draw, dtype=x.dtype) * math.sqrt(last / w))

    def output(weights: list[Tensor]) -> Tensor:
        h = x
        for weight in weights[:-1]:
            h = F.conv2d(h, weight, padding=1).div(3).relu()
        h = h.mean((2, 3)) if pool == "gap" else h.flatten(1) / math.sqrt(places)
        return h @ weights[-1]

    return ref.tangent_kernel(output, weights)


@pytest.mark.parametrize(("pool", "last"), [("gap", "he"), ("flatten", "he"), ("gap", "lecun")])
def test_wide_networks_converge_at_one_over_root_width(pool: str, last: str) -> None:
    x, layers, widths, seeds = images(5, 3, 2, 3, 3), 2, [12, 36, 108], 16
    want = relu_cntk(x, hidden_layers=layers, pool=pool, last_layer=last).dense()  # type: ignore[arg-type]
    errors = []
    for w in widths:
        got = [finite(x, layers, w, s, pool, 2.0 if last == "he" else 1.0) for s in range(seeds)]
        errors.append(math.sqrt(np.mean([float((k - want).norm() / want.norm()) ** 2 for k in got])))
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert -0.7 < slope < -0.3, errors
    gap = float((torch.stack(got).mean(0) - want).norm() / want.norm())
    other = relu_cntk(x, hidden_layers=layers, pool="flatten" if pool == "gap" else "gap", last_layer=last)  # type: ignore[arg-type]
    wrong = float((torch.stack(got).mean(0) - other.dense()).norm() / want.norm())
    assert gap < 0.1 < 0.2 < wrong, (gap, wrong)


def test_refusals_name_what_came() -> None:
    x = torch.ones(2, 1, 3, 3)
    with pytest.raises(ShapeError, match=r"\(2, 9\), expected \(n, channels, height, width\)"):
        relu_cntk(x.flatten(1))
    with pytest.raises(ShapeError, match=r"\(1, 4, 3\), expected \(1, 3, 3\)"):
        relu_cntk(x, torch.ones(2, 1, 4, 3))
    with pytest.raises(OptionError, match="odd, got 2"):
        relu_cntk(x, kernel_size=2)
    with pytest.raises(OptionError, match="hidden_layers must be an integer ≥ 1"):
        relu_cntk(x, hidden_layers=0)
    with pytest.raises(UnknownNameError, match="pool 'mean'"):
        relu_cntk(x, pool="mean")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_same_on_cuda() -> None:
    x = images(6, 4, 3, 8, 8)
    for pool in ("gap", "flatten"):
        want = relu_cntk(x, hidden_layers=3, pool=pool, dense_layers=1).dense()  # type: ignore[arg-type]
        got = relu_cntk(x.cuda(), hidden_layers=3, pool=pool, dense_layers=1).dense()  # type: ignore[arg-type]
        torch.testing.assert_close(got.cpu(), want, rtol=1e-11, atol=1e-12)
    flat = x.flatten(1)
    torch.testing.assert_close(relu_ntk(flat.cuda()).dense().cpu(), relu_ntk(flat).dense(), rtol=1e-11, atol=1e-11)
