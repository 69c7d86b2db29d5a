"""Infinite-width kernels of fully connected networks: closed forms, angles near 0 and π, wide finite networks."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathlens.errors import EmptyDataError, NotFiniteError, OptionError, ShapeError, UnknownNameError
from pathlens.kernels.infinite import _angles, _layers, _next_angle, random_gate_limit, relu_cntk, relu_nngp, relu_ntk
from pathlens.testing import reference as ref

ORACLE = Path(__file__).with_name("neural_tangents.json")


def textbook(x: Tensor, y: Tensor, layers: int) -> tuple[Tensor, Tensor, Tensor]:
    """(K̃, Σ, d·Σ∘∏Σ̂) entry by entry, from expectations over the 2 × 2 covariance as the papers write them."""
    out = torch.zeros(3, len(x), len(y), dtype=torch.float64)
    for i, a in enumerate(x.tolist()):
        for j, b in enumerate(y.tolist()):
            ss, tt, s = (sum(p * q for p, q in zip(u, v)) for u, v in ((a, a), (b, b), (a, b)))
            ntk, gates = s, (layers + 1) * s
            for _ in range(layers):
                c = max(-1.0, min(1.0, s / math.sqrt(ss * tt)))
                k0 = (math.pi - math.acos(c)) / math.pi
                s = math.sqrt(ss * tt) * (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi
                ntk, gates = ntk * k0 + s, gates * k0
            out[:, i, j] = torch.tensor([ntk, s, gates], dtype=torch.float64)
    return out[0], out[1], out[2]


def rows(seed: int, n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("layers", [0, 1, 2, 7])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (5, 3, 4), (7, 2, 1)])
def test_recursion_equals_the_textbook(layers: int, n: int, m: int, d: int) -> None:
    x, y = rows(0, n, d), rows(1, m, d)
    if d == 1:  # all cosines are ±1, where the textbook's arccos is right only because they are exactly ±1
        x, y = x.sign() * 2.0, y.sign() * 3.0
    ntk, nngp, gates = textbook(x, y, layers)
    for got, want in (
        (relu_ntk(x, y, hidden_layers=layers), ntk),
        (relu_ntk(x, y, hidden_layers=layers, last_layer="lecun"), (ntk + nngp) / 2),
        (relu_nngp(x, y, hidden_layers=layers), nngp),
        (random_gate_limit(x, y, hidden_layers=layers), gates),
    ):
        assert got.shape == (n, m) and got.dtype == torch.float64
        torch.testing.assert_close(got.dense(), want, rtol=1e-13, atol=1e-13)


def test_operator_contract_across_tiles() -> None:
    x = rows(2, 53, 3)
    for limit in (relu_ntk, relu_nngp, random_gate_limit):
        kernel = limit(x, hidden_layers=3, max_bytes=20_000)
        want = limit(x, x.clone(), hidden_layers=3).dense()
        assert kernel.symmetric and not limit(x, x.clone()).symmetric
        got = torch.zeros(53, 53, dtype=torch.float64)
        for at, cols, tile in kernel.tiles():
            assert tile.shape[0] < 53
            got[at, cols] = tile
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
        dense = limit(x, hidden_layers=3).dense()
        assert torch.equal(dense, dense.T)
        torch.testing.assert_close(kernel.diagonal(), want.diagonal(), rtol=1e-14, atol=0)
        v = rows(3, 53, 2)
        torch.testing.assert_close(kernel @ v, want @ v, rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(kernel[3:9, [1, 0, 5]].dense(), want[3:9][:, [1, 0, 5]], rtol=1e-13, atol=1e-13)


def test_a_symmetric_tile_of_several_strips() -> None:
    x, all_rows = rows(9, 400, 2), torch.arange(400)
    got = relu_ntk(x, hidden_layers=2).tile(all_rows, all_rows)
    torch.testing.assert_close(got, relu_ntk(x, x.clone(), hidden_layers=2).dense(), rtol=1e-12, atol=1e-13)


def test_diagonal_of_a_square_cross_kernel() -> None:
    x, y = rows(4, 6, 3), rows(5, 6, 3)
    kernel = relu_ntk(x, y, hidden_layers=2)
    torch.testing.assert_close(kernel.diagonal(), kernel.dense().diagonal(), rtol=1e-14, atol=0)


def test_known_diagonals() -> None:
    x = rows(6, 5, 4)
    power = x.square().sum(1)
    torch.testing.assert_close(relu_ntk(x, hidden_layers=5).diagonal(), 6 * power)
    torch.testing.assert_close(random_gate_limit(x, hidden_layers=5).diagonal(), 6 * power)
    torch.testing.assert_close(relu_nngp(x, hidden_layers=5).diagonal(), power)
    torch.testing.assert_close(relu_ntk(x, hidden_layers=5, last_layer="lecun").diagonal(), 3.5 * power)
    # the limit for independent gates is not the NTK
    off = ~torch.eye(5, dtype=torch.bool)
    gap = relu_ntk(x, hidden_layers=5).dense() - random_gate_limit(x, hidden_layers=5).dense()
    assert float(gap[off].abs().min()) > 0.01


# --- angles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-9, 1e-12, 1e-15])
def test_small_angles_keep_their_digits(gap: float) -> None:
    unit = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    near = torch.tensor([[math.cos(gap), math.sin(gap)]], dtype=torch.float64)
    assert float(_angles(unit, near)) == pytest.approx(gap, rel=1e-12)
    assert math.pi - float(_angles(unit, -near)) == pytest.approx(gap, rel=1e-12, abs=5e-16)
    # κ₀ falls with the angle at the rate 1/π: arccos of the rounded cosine would give 0 or 2e-8 here
    drop = 2.0 - float(random_gate_limit(unit, near, hidden_layers=1)[0, 0])
    assert drop == pytest.approx(2 * gap / math.pi + (1 - gap / math.pi) * gap**2, rel=1e-9, abs=5e-16)


def exact_next_cosine(theta: float) -> Decimal:
    """κ₁(cos θ) in eighty digits."""
    getcontext().prec = 90
    t, pi = (
        Decimal(theta),
        Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899"),
    )

    def series(first: Decimal, index: int) -> Decimal:
        total, term, k = Decimal(0), first, index
        while abs(term) > Decimal(10) ** -85:
            total += term
            term = -term * t * t / ((k + 1) * (k + 2))
            k += 2
        return total

    return (series(t, 1) + (pi - t) * series(Decimal(1), 0)) / pi


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 0.25))
def test_small_next_angle_in_eighty_digits(theta: float) -> None:
    got = float(_next_angle(torch.tensor([theta], dtype=torch.float64)))
    # 1 − cos θ′ = 2 sin²(θ′/2), whose relative error is twice that of θ′
    want = float(1 - exact_next_cosine(theta))
    assert 2 * math.sin(got / 2) ** 2 == pytest.approx(want, rel=1e-14, abs=1e-70)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, math.pi))
def test_layers_in_eighty_digits(theta: float) -> None:
    gates, cosine = next(_layers(torch.tensor([theta], dtype=torch.float64), 1))
    assert float(gates) == pytest.approx(1 - theta / math.pi, rel=1e-15, abs=1e-15)
    assert float(cosine) == pytest.approx(float(exact_next_cosine(theta)), rel=1e-15, abs=1e-15)
    (_, _), (second, _) = _layers(torch.tensor([theta], dtype=torch.float64), 2)
    # the angle after the layer, through the next layer's gates: no digit is lost near 0, nor where 0.25 divides
    half = ((1 - exact_next_cosine(theta)) / 2).sqrt()
    assert (1 - float(second)) * math.pi == pytest.approx(2 * math.asin(float(half)), rel=1e-13, abs=1e-15)


def test_equal_and_parallel_rows_are_exact() -> None:
    x = rows(7, 1, 300)
    both = torch.cat([x, x, 3 * x, -x])
    dense = random_gate_limit(both, hidden_layers=4).dense()
    power = float(x.square().sum())
    assert float(dense[0, 1]) == pytest.approx(5 * power, rel=1e-14)
    assert float(dense[0, 2]) == pytest.approx(15 * power, rel=1e-14)
    assert abs(float(dense[0, 3])) < 1e-14 * power


def test_huge_tiny_and_zero_rows() -> None:
    x = torch.tensor([[1e200, 0.0], [1e-200, 1e-200], [0.0, 0.0]], dtype=torch.float64)
    dense = relu_ntk(x[1:], hidden_layers=2).dense()
    assert torch.equal(dense, torch.zeros(2, 2, dtype=torch.float64))  # 1e-400 is zero; a zero row gives zeros
    cross = float(relu_ntk(x[:1], x[1:2], hidden_layers=2)[0, 0])
    want = float(relu_ntk(x[:1] * 1e-200, x[1:2] * 1e200, hidden_layers=2)[0, 0])
    assert cross == pytest.approx(want, rel=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4), st.integers(0, 6))
def test_invariances(seed: int, n: int, d: int, layers: int) -> None:
    x = rows(seed, n, d)
    kernel = relu_ntk(x, hidden_layers=layers).dense()
    turn = torch.linalg.qr(rows(seed + 1, d, d))[0]
    torch.testing.assert_close(relu_ntk(x @ turn, hidden_layers=layers).dense(), kernel, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(relu_ntk(3 * x, hidden_layers=layers).dense(), 9 * kernel, rtol=1e-11, atol=1e-11)
    assert float(torch.linalg.eigvalsh(kernel)[0]) >= -1e-11 * float(kernel.trace())
    size = kernel.diagonal().sqrt()
    assert bool((kernel.abs() <= size[:, None] * size * (1 + 1e-12)).all())


# --- finite networks -----------------------------------------------------------------------------------------------


def finite(x: Tensor, layers: int, w: int, seed: int, last: float, gate_seed: int | None = None) -> Tensor:
    """NTK of one network by autograd: weights N(0, 2/w), the output's N(0, last/w); gates of another one if asked."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(w, x.shape[1])] + [(w, w)] * (layers - 1) + [(1, w)]
    scale = [2.0] * layers + [last]
    weights = [torch.randn(s, generator=draw, dtype=x.dtype) * math.sqrt(v / w) for s, v in zip(shapes, scale)]
    if gate_seed is None:
        return ref.tangent_kernel(lambda U: ref.relu_output(U, x), weights)
    draw = torch.Generator().manual_seed(gate_seed)
    layers_of_gates = [torch.randn(s, generator=draw, dtype=x.dtype) for s in shapes[:-1]]
    gates = ref.hard_gates(layers_of_gates, x, unit=lambda q: q.relu() / w)
    return ref.gated_kernel(weights, gates, x)


@pytest.mark.parametrize("case", ["he", "lecun", "random gates"])
def test_wide_networks_converge_at_one_over_root_width(case: str) -> None:
    x, layers = rows(8, 4, 3), 2
    gates = case == "random gates"
    limit = random_gate_limit(x, hidden_layers=layers) if gates else relu_ntk(x, hidden_layers=layers, last_layer=case)  # type: ignore[arg-type]
    want = limit.dense()
    widths, seeds = [24, 72, 216], 16
    errors = []
    for w in widths:
        got = [
            finite(x, layers, w, s, 1.0 if case == "lecun" else 2.0, 1000 + s if gates else None) for s in range(seeds)
        ]
        errors.append(math.sqrt(np.mean([float((k - want).norm() / want.norm()) ** 2 for k in got])))
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert -0.65 < slope < -0.35, errors
    assert errors[-1] < 0.25
    # neither of the other two limits is what these networks approach
    others = {
        "he": relu_ntk(x, hidden_layers=layers),
        "lecun": relu_ntk(x, hidden_layers=layers, last_layer="lecun"),
        "random gates": random_gate_limit(x, hidden_layers=layers),
    }
    mean = torch.stack(got).mean(0)
    for name, kernel in others.items():
        gap = float((mean - kernel.dense()).norm() / want.norm())
        assert (gap < 0.08) == (name == case), (name, gap)


# --- other implementations -----------------------------------------------------------------------------------------


def test_agrees_with_neural_tangents() -> None:
    """Against numbers that neural-tangents 0.6.5 computed in float64 (analytic kernels, W_std = √2, output 1)."""
    cases = json.loads(ORACLE.read_text())
    assert {len(np.shape(case["X"])) for case in cases} == {2, 4}
    for case in cases:
        x, y = (torch.tensor(case[side], dtype=torch.float64) for side in ("X", "Y"))
        options = {k: v for k, v in case.items() if k not in ("X", "Y", "ntk", "nngp")}
        limit = relu_ntk if x.ndim == 2 else relu_cntk
        ntk, nngp = (torch.tensor(case[k], dtype=torch.float64) for k in ("ntk", "nngp"))
        torch.testing.assert_close(limit(x, y, **options).dense(), ntk, rtol=1e-12, atol=1e-13)
        lecun = limit(x, y, **options, last_layer="lecun").dense()
        torch.testing.assert_close(lecun, (ntk + nngp) / 2, rtol=1e-12, atol=1e-13)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_refusals_name_what_came() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ShapeError, match=r"\(3, 2, 1\).*flatten"):
        relu_ntk(x[:, :, None])
    with pytest.raises(ShapeError, match=r"\(3,\), expected \(2,\)"):
        relu_nngp(x, torch.ones(3, 3))
    with pytest.raises(NotFiniteError, match="NaN"):
        random_gate_limit(x * float("nan"))
    with pytest.raises(EmptyDataError):
        relu_ntk(torch.ones(0, 2))
    with pytest.raises(OptionError, match="hidden_layers must be an integer ≥ 0, got -1"):
        relu_ntk(x, hidden_layers=-1)
    with pytest.raises(UnknownNameError, match="Did you mean 'he'"):
        relu_ntk(x, last_layer="hee")  # type: ignore[arg-type]


def test_takes_numpy_and_integers() -> None:
    x = np.array([[1, 2], [3, 1]])
    torch.testing.assert_close(relu_ntk(x).dense(), relu_ntk(torch.tensor(x).float()).dense())


@pytest.mark.slow
def test_agrees_with_neural_tangents_where_it_is_installed() -> None:
    """Live, through the environment that the benchmarks make; the numbers on disk above cover machines without it."""
    path = Path(__file__).parents[2] / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("benchmark_peers", path)
    assert spec is not None and spec.loader is not None
    peers = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = peers  # dataclasses look their module up
    spec.loader.exec_module(peers)
    peer = peers.neural_tangents(install=False)
    if peer.python is None:
        pytest.skip(f"{peer.note}; `make bench` installs it")
    x, images = rows(10, 6, 5), rows(11, 3, 2 * 4 * 5).reshape(3, 2, 4, 5)
    found = peer.call({"kind": "infinite dense", "hidden_layers": 3, "repeats": 1}, {"x": x.numpy()})
    # its arccos costs it eight digits on the diagonal, where the cosine is 1
    torch.testing.assert_close(
        relu_ntk(x, hidden_layers=3).dense(), torch.tensor(found["kernel"]), rtol=1e-7, atol=1e-7
    )
    for pool in ("gap", "flatten"):
        job = {"kind": "infinite conv", "hidden_layers": 3, "pool": pool, "repeats": 1}
        want = torch.tensor(peer.call(job, {"x": images.numpy()})["kernel"])
        got = relu_cntk(images, hidden_layers=3, pool=pool).dense()  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


def test_lists_are_read_in_float64_and_counts_may_be_numpy_integers() -> None:
    assert float(relu_ntk([[0.1]], hidden_layers=0).dense()) == pytest.approx(0.01, rel=1e-15)
    assert float(relu_ntk([[0.1]], hidden_layers=np.int64(0)).dense()) == pytest.approx(0.01, rel=1e-15)
