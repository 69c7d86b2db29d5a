"""Path regions as polyhedra: membership, proofs of emptiness, faces, volumes and samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pathlens as pl
from pathlens.errors import OptionError, RegionError, ShapeError
from pathlens.regions import Farkas, Interior, PathRegion, path_region

CUBE = np.concatenate([np.eye(3), -np.eye(3)])


def prove(region: PathRegion) -> None:
    """Check the certificate from its definition, with nothing of the module's own."""
    proof = region.certificate
    A, b = region.normals.numpy(), region.offsets.numpy()
    if isinstance(proof, Interior):
        values = A @ proof.point.numpy() + b
        assert proof.margin > 0 and (values[np.abs(A).any(1)] >= proof.margin * (1 - 1e-9)).all() and (values > 0).all()
    else:
        y = proof.multipliers.numpy()
        assert (y >= 0).all() and y.sum() == pytest.approx(1)
        assert np.linalg.norm(y @ A) * region.reach * math.sqrt(region.dim) + max(y @ b, 0) <= proof.slack + 1e-12
        assert proof.slack <= 1e-6 * region.reach


@settings(max_examples=25, deadline=None)
@given(
    d=st.integers(1, 5),
    hidden=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_membership_equals_brute_force(d: int, hidden: list[int], bias: bool, seed: int) -> None:
    net = pl.models.dlgn(d, hidden, bias=bias, seed=seed).double()
    x = 3 * torch.randn(100, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gates = list(net.gates(x, hard=True).values())
    for path in itertools.islice(itertools.product(*map(range, hidden)), 6):
        region = path_region(net, path)
        inside = torch.stack([g[:, u] > 0 for g, u in zip(gates, path)]).all(0).numpy()
        assert np.array_equal(region.contains(x).numpy(), inside)
        prove(region)
        if inside.any():
            assert not region.is_empty
        if not region.is_empty:
            less = region.reduced()
            assert np.array_equal(less.contains(x).numpy(), inside) and len(less.offsets.numpy()) <= len(
                region.offsets.numpy()
            )


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 4), rows=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_random_polyhedra(d: int, rows: int, seed: int) -> None:
    """Emptiness against a second opinion: the largest t with A x + b ≥ t within the box."""
    rng = np.random.default_rng(seed)
    region = PathRegion(rng.normal(size=(rows, d)), rng.normal(size=rows) - 0.5)
    prove(region)
    from scipy.optimize import linprog

    cost = np.append(np.zeros(d), -1.0)
    ub = np.column_stack([-region.normals.numpy(), np.ones(rows)])
    best = linprog(cost, A_ub=ub, b_ub=region.offsets.numpy(), bounds=[(-1e6, 1e6)] * d + [(None, 1)]).fun
    assert region.is_empty == (best >= -1e-9)
    if region.is_empty:
        assert region.volume() == 0 if d <= 3 else True
        return
    x = rng.normal(size=(500, d)) * 2
    assert np.array_equal(region.reduced().contains(x).numpy(), region.contains(x).numpy())
    for i in region.facets:  # each facet matters: without it the region grows
        rest = [j for j in region.facets if j != i]
        if rest:
            beyond = PathRegion(
                np.vstack([region.normals.numpy()[rest], -region.normals.numpy()[i]]),
                np.append(region.offsets.numpy()[rest], -region.offsets.numpy()[i]),
            )
            assert not beyond.is_empty
    inside = region.sample(50, box=region.reach, seed=1, steps=20).numpy()
    assert region.contains(inside).numpy().mean() > 0.99 and (np.abs(inside) <= region.reach).all()


def test_opposite_gates_exclude_each_other() -> None:
    net = pl.models.dlgn_shallow(3, (2, 2), seed=0).double()
    with torch.no_grad():
        net.source.layers[1].weight[0] = -3 * net.source.layers[0].weight[0]
    region = path_region(net, [0, 0])
    assert region.is_empty and isinstance(region.certificate, Farkas)
    np.testing.assert_allclose(region.certificate.multipliers.numpy(), [0.5, 0.5], atol=1e-9)
    prove(region)
    assert "empty, proved by multipliers" in repr(region)
    for what in ("chebyshev_centre", "inradius", "facets"):
        with pytest.raises(RegionError, match="is empty"):
            getattr(region, what)
    with pytest.raises(RegionError, match="is empty"):
        region.sample(3, box=1.0).numpy()
    assert region.volume(1.0) == 0.0 and region.is_bounded


def test_a_path_that_starts_at_a_bias_has_the_later_gates_alone() -> None:
    net = pl.models.dlgn(3, (4, 4, 4), bias=True, seed=0).with_gate("hard")
    X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    gates = pl.record(net, X)
    region = path_region(net, torch.tensor([-1, 2, 3]))  # as paths.top gives it
    on = (gates.gates("relu2@0")[:, 2] * gates.gates("relu3@0")[:, 3]).bool().numpy()
    assert region.labels == ("relu2@0[2]", "relu3@0[3]") and (region.contains(X).numpy() == on).all()
    with pytest.raises(RegionError, match="active everywhere"):
        path_region(net, [-1, -1, -1])
    with pytest.raises(RegionError, match="numbered from 0; got -1"):
        path_region(net, [0, -1, 1])


def test_gates_that_do_not_depend_on_the_input() -> None:
    net = pl.models.dlgn_shallow(2, (1, 2), bias=True, seed=0).double()
    with torch.no_grad():
        net.source.layers[1].weight.zero_()
        net.source.layers[1].bias.copy_(torch.tensor([0.5, 0.0]))
    on, off = path_region(net, [0, 0]), path_region(net, [0, 1])
    assert not on.is_empty and on.facets == (0,)
    prove(on)
    assert off.is_empty  # q = 0 is not positive
    prove(off)
    always = PathRegion([[0.0, 0.0]], [1.0])
    assert not always.is_empty and not always.is_bounded and always.facets == ()
    assert always.volume(2.0) == pytest.approx(16.0)


def test_a_region_far_out() -> None:
    """Two half-spaces that look away from each other, but for a ten-thousandth of a degree."""
    tilt = 2e-6
    region = PathRegion([[1.0, tilt], [-1.0, tilt]], [-5.0, -5.0])
    assert not region.is_empty and region.chebyshev_centre.numpy()[1] > 5 / tilt
    prove(region)


def test_the_boundary_is_outside() -> None:
    region = PathRegion([[1.0, 0.0]], [0.0])
    assert region.contains([[0.0, 1.0], [1e-300, 0.0]]).tolist() == [False, True]


# --- shapes that are known ---------------------------------------------------------------------------------------


def test_triangle_cube_and_interval() -> None:
    triangle = PathRegion([[2.0, 0], [0, 3], [-1, -1]], [0.0, 0, 1])
    assert triangle.volume() == pytest.approx(0.5, rel=1e-12) and triangle.is_bounded
    r = 1 / (2 + math.sqrt(2))
    assert triangle.inradius == pytest.approx(r)
    np.testing.assert_allclose(triangle.chebyshev_centre.numpy(), [r, r], atol=1e-9)
    cube = PathRegion(CUBE, np.ones(6))
    assert cube.volume() == pytest.approx(8, rel=1e-12) and cube.volume((0, 0.5)) == pytest.approx(0.125, rel=1e-12)
    assert cube.volume(((0, 9), (-9, 0), (0.5, 9))) == pytest.approx(0.5, rel=1e-12)
    assert cube.volume((3, 4)) == 0
    corner = PathRegion([[-1.0, -1, -1], *np.eye(3)], [1.0, 0, 0, 0])
    assert corner.volume() == pytest.approx(1 / 6, rel=1e-12)
    line = PathRegion([[2.0], [-1]], [1.0, 3])
    assert line.volume() == pytest.approx(3.5) and line.volume(1.0) == pytest.approx(1.5)


@settings(max_examples=10, deadline=None)
@given(d=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_volumes_by_counting(d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    region = PathRegion(rng.normal(size=(3, d)), rng.normal(size=3))
    x = rng.uniform(-1, 1, size=(40_000, d))
    share = region.contains(x).numpy().mean()
    assert region.volume(1.0) / 2**d == pytest.approx(share, abs=5 * math.sqrt(0.25 / 40_000))


def test_redundant_and_equal_rows() -> None:
    square = PathRegion([[1.0, 0], [-1, 0], [0, 1], [0, -1], [1, 1], [2, 0], [1, 0]], [1, 1, 1, 1, 5, 2, 3.0])
    assert square.facets == (0, 1, 2, 3)
    assert square.reduced().labels == ("row 0", "row 1", "row 2", "row 3")
    touching = PathRegion([[1.0, 0], [0, 1], [1, 1]], [0.0, 0, 0])  # implied by the other two, touches the corner
    assert touching.facets == (0, 1)


def test_unbounded_regions() -> None:
    wedge = path_region(pl.models.dlgn(2, (4, 4), seed=0), [0, 2])
    assert not wedge.is_bounded and "unbounded" in repr(wedge)
    with pytest.raises(RegionError, match=r"unbounded\. Give a box"):
        wedge.volume()
    with pytest.raises(RegionError, match=r"unbounded\. Give a box"):
        wedge.sample(3).numpy()
    strip = PathRegion([[1.0, 0], [-1, 0]], [1.0, 1])
    assert not strip.is_bounded
    half = PathRegion([[1.0, 0], [-1, 0], [0, 1]], [1.0, 1, 1])
    assert not half.is_bounded
    assert PathRegion([[1.0, 0], [-1, 0], [0, 1], [0, -1]], [1.0, 1, 1, 1]).is_bounded


def test_samples_are_uniform_on_a_triangle() -> None:
    triangle = PathRegion([[1.0, 0], [0, 1], [-1, -1]], [0.0, 0, 1])
    x = triangle.sample(4000, seed=3).numpy()
    assert triangle.contains(x).numpy().all() and x.shape == (4000, 2)
    np.testing.assert_allclose(x.mean(0), 1 / 3, atol=5 * math.sqrt(1 / 18 / 4000))
    np.testing.assert_allclose(np.cov(x.T), [[1 / 18, -1 / 36], [-1 / 36, 1 / 18]], atol=0.004)
    assert np.array_equal(x[:5], triangle.sample(4000, seed=3).numpy()[:5])
    boxed = PathRegion([[1.0] + [0.0] * 9], [0.0]).sample(2000, box=1.0, steps=300).numpy()
    np.testing.assert_allclose(boxed.mean(0), [0.5] + [0.0] * 9, atol=0.08)


# --- networks ----------------------------------------------------------------------------------------------------


def test_batch_norm_convolution_and_images() -> None:
    torch.manual_seed(0)
    template = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)
    )
    net = pl.gated_twin(template, "dlgn", torch.randn(2, 1, 6, 6), seed=0)
    with torch.no_grad():
        net(torch.randn(32, 1, 6, 6))
    net = net.double().eval()
    x = torch.randn(400, 1, 6, 6, dtype=torch.float64)
    gates = list(net.gates(x, hard=True).values())
    region = path_region(net, [(1, 2, 3), 5], input_shape=(1, 6, 6))
    inside = (gates[0][:, 1, 2, 3] > 0) & (gates[1].flatten(1)[:, 5] > 0)
    assert np.array_equal(region.contains(x).numpy(), inside.numpy())
    assert region.labels == ("2@0[27]", "4@0[5]")
    assert region.contains(region.sample(20, box=1.0, steps=30).numpy()).numpy().all()


def test_refusals() -> None:
    with pytest.raises(RegionError, match="one hidden unit for each of the 2 gate sites"):
        path_region(pl.models.dlgn(2, (3, 3)), [0])
    with pytest.raises(RegionError, match="numbered from 0; got 3"):
        path_region(pl.models.dlgn(2, (3, 3)), [0, 3])
    with pytest.raises(RegionError, match="exact for d ≤ 3"):
        path_region(pl.models.dlgn(4, (3, 3), seed=0), [0, 0]).volume(1.0)
    region = PathRegion([[1.0, 0]], [0.0])
    with pytest.raises(OptionError, match="box must be"):
        region.volume(((0, 1), (1, 0)))
    with pytest.raises(OptionError, match="positive number of points"):
        region.sample(0, box=1.0).numpy()
    for wrong in ({"steps": 0}, {"seed": -1}):
        with pytest.raises(OptionError, match="steps must be at least 1 and seed at least 0"):
            region.sample(5, box=1.0, **wrong).numpy()
    with pytest.raises(RegionError, match="no interior point in common"):
        region.sample(5, box=((-2, -1), (0, 1))).numpy()
    with pytest.raises(ShapeError, match=r"points of shape \(n, 2\)"):
        region.contains([[1.0, 2.0, 3.0]]).numpy()
    with pytest.raises(ShapeError, match="expected normals"):
        PathRegion([1.0, 2.0], [0.0])
    with pytest.raises(RegionError, match="NaN"):
        PathRegion([[np.nan, 1.0]], [0.0])


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4, 1e8])
def test_what_is_said_does_not_depend_on_the_unit_of_the_inputs(scale: float) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        d, rows = 1 + seed % 3, 3 + seed % 6
        A, b = rng.standard_normal((rows, d)), rng.standard_normal(rows)
        one, other = PathRegion(A, b), PathRegion(A / scale, b)
        assert one.is_empty == other.is_empty
        if one.is_empty:
            continue
        prove(other)
        assert one.facets == other.facets and one.is_bounded == other.is_bounded
        assert other.inradius == pytest.approx(scale * one.inradius, rel=1e-9)
        assert other.volume(box=2 * scale) == pytest.approx(scale**d * one.volume(box=2.0), rel=1e-9)
        assert other.contains(other.sample(20, box=2 * scale).numpy()).numpy().all() if one.volume(box=2.0) else True


def test_rows_of_very_different_lengths_are_half_spaces_all_the_same() -> None:
    region = PathRegion([[1e8, 0], [0, 1e-8], [-1e-4, -1e-4]], [0, 0, 1e-4])  # the triangle below x + y = 1
    assert region.volume() == pytest.approx(0.5) and region.facets == (0, 1, 2) and region.is_bounded
    assert region.contains([[0.2, 0.2], [0.2, -0.2]]).tolist() == [True, False]
    assert not PathRegion([[1e200, 0], [0, 1e-200]], [0, 0]).contains([[1.0, -1.0]]).numpy()[0]
    net = pl.models.dlgn_shallow(2, (1, 1), gate="hard", bias=True, seed=0).double()
    with torch.no_grad():
        for layer, factor in zip(net.source.layers, (1e8, 1e-8)):
            layer.weight.mul_(factor), layer.bias.mul_(factor)
    x = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    on = [g[:, 0].bool().numpy() for g in net.gates(x).values()]
    assert np.array_equal(path_region(net, [0, 0]).contains(x).numpy(), on[0] & on[1]) and len(set(on[1])) == 2


def test_a_normal_that_is_zero_but_for_rounding_is_constant() -> None:
    net = pl.models.dlgn(3, (4, 2), gate="hard", bias=True, seed=0).double()
    first, second = (m for m in net.source.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        first.weight[3] = 0.1 * first.weight[0] + 0.7 * first.weight[1] + 0.3 * first.weight[2]
        first.weight[3] *= 1 + 2**-51  # whichever way this processor rounds
        second.weight[0] = torch.tensor([0.1, 0.7, 0.3, -1.0], dtype=torch.float64)
        second.bias[0] = -(second.weight[0] @ first.bias) - 1  # q = −1 whatever x is
    spaces = pl.regions.halfspaces(net)
    assert 0 < np.abs(spaces.normals(1).numpy()[0]).max() < 1e-15
    assert spaces.constant(1).numpy()[0] == -1 and path_region(net, [0, 0]).is_empty


def test_the_offset_of_a_constant_gate_says_nothing_of_rounding() -> None:
    region = PathRegion([[1.0, 0], [-1, 0], [0, 0]], [1e-8, 1e-8, 1e9])  # a strip, and a gate that is always on
    assert not region.is_empty and region.inradius == pytest.approx(1e-8)
