"""Partitions of planes and segments against the network itself, point by point."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pathlens as pl
from pathlens.errors import BudgetError, OptionError, RecordError, RegionError, RowIndexError, ShapeError
from pathlens.models import GatedNetwork
from pathlens.regions import Plane, Slice2D, segment1d, slice2d, tracking
from pathlens.regions.cells import Polygons


def hardened(net: nn.Module) -> nn.Module:
    """The same network in float64 with hard gates."""
    if isinstance(net, GatedNetwork) and not net.gate.hard:
        net = net.with_gate("hard")
    return copy.deepcopy(net).double()


def random_points(cells: Slice2D, generator: np.random.Generator, n: int = 200) -> np.ndarray:
    return generator.uniform(*cells.box.numpy().T, size=(n, 2))


def check(net: nn.Module, cells: Slice2D, seed: int = 0) -> None:
    """Tiling, affine maps and patterns, at centres and at random points."""
    area = float((cells.box[:, 1] - cells.box[:, 0]).prod())
    assert abs(cells.areas.numpy().sum() - area) <= 1e-9 * area
    assert (cells.areas.numpy() > 0).all()
    reference = hardened(net)
    z = np.concatenate([cells.centres.numpy(), random_points(cells, np.random.default_rng(seed))])
    k = cells.locate(z).numpy()
    assert (k >= 0).all()
    x = cells.plane.points(z)
    with torch.no_grad():
        f = reference(x).reshape(len(z), -1).numpy()
    mine = cells.maps.numpy()[k, :, 0] + np.einsum("ncd,nd->nc", cells.maps.numpy()[k, :, 1:], z)
    np.testing.assert_allclose(mine, f, rtol=0, atol=1e-9 * max(np.abs(f).max(), 1e-30))
    rec = pl.record(reference, x)
    for site, bits in cells.patterns.items():
        assert torch.equal(bits[k], rec.bits[site].flatten(1)), site
    # each pattern is one convex cell
    together = np.packbits(torch.cat(list(cells.patterns.values()), dim=1).numpy(), axis=1)
    assert len(np.unique(together, axis=0)) == len(cells)


BUILDERS = {
    "relu": lambda h, b, s: pl.models.relu(2, h, 2, bias=b, seed=s),
    "dlgn": lambda h, b, s: pl.models.dlgn(2, h, 2, bias=b, seed=s),
    "hard dlgn": lambda h, b, s: pl.models.dlgn(2, h, 1, bias=b, seed=s, gate="straight_through", frozen=True),
    "pwc": lambda h, b, s: pl.models.dlgn(2, h, 1, bias=b, seed=s, piecewise_constant=True),
    "shallow": lambda h, b, s: pl.models.dlgn_shallow(2, h, 1, bias=b, seed=s),
    "galu": lambda h, b, s: pl.models.galu(2, h, 1, bias=b, seed=s),
    "soft galu": lambda h, b, s: pl.models.soft_galu(2, h, 1, bias=b, seed=s),
}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(BUILDERS)),
    hidden=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
    box=st.sampled_from([0.1, 1.0, 7.0, 1000.0]),
)
def test_random_networks(kind: str, hidden: list[int], bias: bool, seed: int, box: float) -> None:
    net = BUILDERS[kind](hidden, bias, seed)
    cells = slice2d(net, box=box)
    check(net, cells, seed)
    rec = pl.record(hardened(net), cells.inputs())
    brute = [
        sum(all(rec.bits[s][k, u] for s, u in zip(rec.sites, path)) for path in itertools.product(*map(range, hidden)))
        for k in range(0, len(cells), max(1, len(cells) // 5))
    ]
    assert cells.counts[:: max(1, len(cells) // 5)] == brute


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), bias=st.booleans(), kind=st.sampled_from(["relu", "dlgn"]))
def test_path_regions_are_where_all_gates_are_on(seed: int, bias: bool, kind: str) -> None:
    net = BUILDERS[kind]((3, 3), bias, seed)
    cells = slice2d(net, box=2.0)
    z = random_points(cells, np.random.default_rng(seed))
    gates = list(hardened(net).gates(cells.plane.points(z)).values())
    for path in itertools.product(range(3), repeat=2):
        region = cells.path_region(path)
        inside = torch.stack([g[:, u] > 0 for g, u in zip(gates, path)]).all(0).numpy()
        assert np.array_equal(region.contains(z).numpy(), inside)
        if kind == "dlgn":
            assert region.n_components <= 1  # convex
            exact = pl.regions.path_region(net, path)
            assert region.area == pytest.approx(exact.volume(2.0), abs=1e-9)


def test_bias_free_dlgn_has_at_most_two_cells_per_unit() -> None:
    for seed, (width, layers) in enumerate([(4, 3), (16, 5), (5, 1)]):
        cells = slice2d(pl.models.dlgn(2, (width,) * layers, seed=seed))
        assert len(cells) == 2 * width * layers  # generic lines through the origin


# --- architectures -----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Functional and reused ReLUs, a shortcut around a gate, a size read before it and used after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(12, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.size(0)
        a = torch.relu(self.first(x.view(rows, -1)))
        b = self.act(self.second(a) + a)
        c = self.act(self.second(b) - 0.5 * a)
        left, right = c.chunk(2, dim=1)
        return self.last(torch.cat([left, right, a], dim=1).view(rows, -1))


def images(seed: int, *shape: int) -> Plane:
    g = torch.Generator().manual_seed(seed)
    return Plane(*(torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(3)))


def small_resnet() -> nn.Module:
    torch.manual_seed(3)
    net = pl.models.ResNet((1, 1), (2, 3), outputs=2, channels=1)
    with torch.no_grad():
        net.train()(torch.randn(64, 1, 6, 6))  # running statistics that are not 0 and 1
    return net.eval()


def test_convolutions() -> None:
    torch.manual_seed(0)
    net = pl.models.gconv(2, channels=(1, 2, 3), dense=(4,), bias=True)
    check(net, slice2d(net, plane=images(0, 1, 5, 5), box=0.7))
    strided = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8, 2)).eval()
    check(strided, slice2d(strided, plane=images(1, 1, 5, 5)))


def test_residual_networks_with_batch_norm_plain_and_as_twins() -> None:
    template = small_resnet()
    plane = images(1, 1, 6, 6)
    for net in (template, *(pl.gated_twin(template, kind, torch.randn(2, 1, 6, 6)) for kind in ("dlgn", "dlgn_pwc"))):
        cells = slice2d(net, plane=plane, box=0.2)
        assert len(cells) > 20
        check(net, cells)


def test_shortcuts_reused_units_and_sizes() -> None:
    torch.manual_seed(0)
    net = Residual()
    plane = images(4, 3, 4)
    cells = slice2d(net, plane=plane, box=2.0)
    assert len(cells) > 20
    check(net, cells)
    for kind in ("dlgn", "galu"):
        twin = pl.gated_twin(net, kind, torch.randn(2, 3, 4), seed=0)
        check(twin, slice2d(twin, plane=plane, box=2.0))


def test_counts_of_networks_that_are_no_chain() -> None:
    net = pl.gated_twin(small_resnet(), "dlgn", torch.randn(2, 1, 6, 6), seed=0).double()
    cells = slice2d(net, plane=images(0, 1, 6, 6), box=0.05)
    K = pl.kernels.overlap(net, cells.inputs())
    assert cells.counts == K.diagonal().round().long().tolist()
    channel, row, column = cells.patterns["relu@0"].any(0).reshape(2, 6, 6).nonzero()[0].tolist()
    region = cells.path_region([(channel, row, column), None, None, None, None])
    assert region.n_components == 1
    assert region.area == cells.areas[cells.patterns["relu@0"][:, 36 * channel + 6 * row + column]].sum()


def test_layers_that_act_place_by_place_are_no_chain() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)).double()
    cells = slice2d(net, plane=Plane(*torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))), box=2.0)
    check(net, cells)
    first, second = (bits.reshape(len(cells), 3, -1).sum(2) for bits in cells.patterns.values())
    assert cells.counts == (first * second).sum(1).tolist()  # no path leads from one place to another
    assert cells.summary().total_paths is None


class PlacesFirst(nn.Module):
    """Rows come second for a while, as in many sequence models: at the gates, or between them."""

    def __init__(self, places: int, at_gates: bool) -> None:
        super().__init__()
        self.at_gates = at_gates
        self.a, self.b, self.c = nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2 * places, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x.permute(1, 0, 2))
        h = torch.relu(h) if self.at_gates else torch.relu(h.permute(1, 0, 2)).permute(1, 0, 2)
        return self.c(torch.relu(self.b(h).permute(1, 0, 2)).flatten(1))


@pytest.mark.parametrize("at_gates", [True, False])
@pytest.mark.parametrize("places", [1, 2, 3, 5])  # a slice is followed at three points, a segment at two
def test_rows_that_are_not_first_are_refused(places: int, at_gates: bool) -> None:
    x = torch.randn(3, places, 2, generator=torch.Generator().manual_seed(0)).double()
    for kind in ("relu", "dlgn"):
        net = pl.gated_twin(PlacesFirst(places, at_gates).double(), kind, x[:2])
        with pytest.raises((RegionError, ShapeError), match="Rows must stay the first dimension"):
            slice2d(net, plane=Plane(*x))
        with pytest.raises((RegionError, ShapeError), match="Rows must stay the first dimension"):
            segment1d(net, x[0], x[1])
    if at_gates:
        with pytest.raises(ShapeError, match="Rows must stay the first dimension"):
            pl.regions.halfspaces(net, input_shape=(places, 2))


def test_counts_beyond_64_bits() -> None:
    cells = slice2d(pl.models.dln(2, hidden=(100,) * 12))
    assert len(cells) == 1 and cells.counts == [10**24]


def test_flat_inputs_of_many_dimensions() -> None:
    net = pl.models.relu(50, (20, 20), 3, bias=True, seed=0)
    check(net, slice2d(net, plane=Plane.through(*torch.randn(3, 50)), box=((-0.5, 1.5), (0.0, 1.0))))


def test_dead_layers_are_off_and_have_no_lines() -> None:
    net = pl.models.relu(2, (3, 3), bias=False, seed=0)
    with torch.no_grad():
        net.values.linear1.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
    cells = slice2d(net)
    check(net, cells)
    corner = cells.locate([[-0.5, -0.5]]).numpy()[0]  # all units of the first layer are off, q = 0 in the second
    assert not any(bits[corner].any() for bits in cells.patterns.values()) and cells.counts[corner] == 0


def test_equal_parallel_and_concurrent_lines() -> None:
    net = pl.models.dlgn_shallow(2, (6,), bias=True, seed=0)
    with torch.no_grad():
        net.source.layers[0].weight.copy_(torch.tensor([[1.0, 0], [2, 0], [-1, 0], [1, 0], [0, 1], [1, 1]]))
        net.source.layers[0].bias.copy_(torch.tensor([0.0, 0, 0, 0.5, 0, 0]))
    cells = slice2d(net)
    # x = 0 three times, x = −1/2, y = 0 and x + y = 0 meet in the origin: 6 cells there, 3 more left of x = −1/2
    assert len(cells) == 9
    check(net, cells)


def test_a_line_through_a_corner_of_the_box() -> None:
    net = pl.models.dlgn_shallow(2, (2,), bias=True, seed=0)
    with torch.no_grad():
        net.source.layers[0].weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        net.source.layers[0].bias.copy_(torch.tensor([-2.0, 0.0]))  # touches (1, 1); the diagonal
    cells = slice2d(net)
    assert len(cells) == 2 and cells.sizes.tolist() == [3, 3]


# --- what the cells are -------------------------------------------------------------------------------------------


def test_neighbours_share_an_edge() -> None:
    net = pl.models.relu(2, (12, 12), bias=True, seed=1)
    cells = slice2d(net, box=2.0)
    together = torch.cat(list(cells.patterns.values()), dim=1).numpy()
    differ = (together[cells.neighbours.numpy()[:, 0]] != together[cells.neighbours.numpy()[:, 1]]).sum(1)
    assert (differ == 1).all()  # generic: across an edge exactly one gate switches
    pairs = {frozenset(p) for p in cells.neighbours.tolist()}
    z = random_points(cells, np.random.default_rng(0), 4000)
    steps = np.random.default_rng(1).normal(size=z.shape) * 3e-3
    k, moved = cells.locate(z).numpy(), cells.locate(np.clip(z + steps, -2, 2)).numpy()
    seen = {frozenset((a, b)) for a, b in zip(k.tolist(), moved.tolist()) if a != b}
    assert len(seen) > 10 and sum(s in pairs for s in seen) >= 0.95 * len(seen)  # the rest steps over a corner


def test_summary() -> None:
    net = pl.models.dlgn(2, (4, 4), bias=True, seed=0)
    summary = slice2d(net, box=2.0).summary()
    assert summary.complete and summary.examined == summary.total_paths == 16
    assert summary.connected_paths == summary.active_paths and summary.most_components == 1
    assert "connected" in str(summary)
    drawn = slice2d(pl.models.relu(2, (16,) * 3, bias=True, seed=0), box=3.0).summary(paths=300)
    assert not drawn.complete and drawn.active_paths == drawn.examined and drawn.most_components > 1


def test_soft_networks_say_so() -> None:
    assert "hard gates of a network with soft β=4" in repr(slice2d(pl.models.dlgn(2, (3,), seed=0)))
    assert "soft" not in repr(slice2d(pl.models.relu(2, (3,), seed=0)))


class Shortcut(nn.Module):
    """Its layers have the names and shapes of `models.relu`, and more between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2, self.output = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.linear1(x))
        return self.output(torch.relu(self.linear2(h) + h))


def test_snapshots() -> None:
    for net in (
        pl.models.dlgn(2, (3, 3), 2, bias=True, seed=0, piecewise_constant=True),
        pl.models.dlgn_shallow(2, (3, 3), seed=0),
        pl.models.relu(2, (3, 3), seed=0).double(),
        pl.models.galu(2, (3, 3), seed=0),
    ):
        a, b = slice2d(net), slice2d(pl.snapshot(net))
        assert np.array_equal(a.maps.numpy(), b.maps.numpy()) and np.array_equal(a.corners.numpy(), b.corners.numpy())
    twin = pl.gated_twin(Shortcut(), "relu", example=torch.randn(2, 2))
    with pytest.raises(RecordError, match="not how to build it"):  # its shapes alone would fit a network without
        slice2d(pl.snapshot(twin))


def test_training_state_of_the_network_is_untouched() -> None:
    net = pl.models.relu(2, (3,), seed=0)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    slice2d(net)
    assert net.training and all(p.requires_grad and p.dtype == torch.float32 for p in net.parameters())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("color", ["pattern", "count", "output"])
def test_pictures(color: str) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    cells = slice2d(pl.models.relu(2, (5, 5), bias=True, seed=0))
    ax = cells.plot(color)
    assert any(len(c.get_paths()) == len(cells) for c in ax.collections if hasattr(c, "get_paths"))
    ax.figure.canvas.draw()
    segment1d(pl.models.relu(2, (5, 5), bias=True, seed=0), [-1.0, 0], [1.0, 0]).plot()
    plt.close("all")


# --- segments ----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(BUILDERS)),
    hidden=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_segments_of_random_networks(kind: str, hidden: list[int], bias: bool, seed: int) -> None:
    net = BUILDERS[kind](hidden, bias, seed)
    rng = np.random.default_rng(seed)
    line = segment1d(net, *rng.normal(size=(2, 2)) * 3)
    assert line.breaks.numpy()[0] == 0 and line.breaks.numpy()[-1] == 1 and (line.lengths.numpy() > 0).all()
    t = np.concatenate([(line.breaks.numpy()[1:] + line.breaks.numpy()[:-1]) / 2, rng.random(50)])
    reference = hardened(net)
    x = line.points(t)
    with torch.no_grad():
        f = reference(x).numpy()
    np.testing.assert_allclose(line.evaluate(t).numpy(), f, rtol=0, atol=1e-9 * max(np.abs(f).max(), 1e-30))
    rec = pl.record(reference, x)
    for site, bits in line.patterns.items():
        assert np.array_equal(bits[line.locate(t).numpy()], rec.bits[site].numpy())
    assert np.isnan(line.evaluate([-0.1, 1.1]).numpy()).all()


def two_bumps() -> GatedNetwork:
    """q(x) = x⁺ − 2(x−1)⁺ + 2(x−2)⁺ − 2(x−3)⁺ − ½, which is positive around 1 and around 3."""
    net = pl.models.relu(1, hidden=(4, 1), bias=True)
    with torch.no_grad():
        net.values.linear1.weight.fill_(1.0)
        net.values.linear1.bias.copy_(-torch.arange(4.0))
        net.values.linear2.weight.copy_(torch.tensor([[1.0, -2, 2, -2]]))
        net.values.linear2.bias.fill_(-0.5)
    return net


def test_figure_1_left_a_path_region_of_two_intervals() -> None:
    region = segment1d(two_bumps(), [0.0], [4.0]).path_region([0, 0])
    np.testing.assert_allclose(region.ends.numpy()[..., 0], [[0.5, 1.5], [2.5, 3.5]], atol=1e-12)
    assert region.n_components == 2 and "∪" in repr(region)
    with pytest.raises(RegionError, match="slice2d or segment1d"):
        pl.regions.path_region(two_bumps(), [0, 0])


def jumping(epsilon: float) -> GatedNetwork:
    """Units x₁⁺ and x₂⁺, then one that reads x₂⁺ + ε."""
    net = pl.models.relu(2, hidden=(2, 1), bias=True)
    with torch.no_grad():
        net.values.linear1.weight.copy_(torch.eye(2))
        net.values.linear1.bias.zero_()
        net.values.linear2.weight.copy_(torch.tensor([[0.0, 1.0]]))
        net.values.linear2.bias.fill_(epsilon)
    return net


def test_figure_1_right_a_path_region_that_jumps() -> None:
    areas = [slice2d(jumping(e)).path_region([0, 0]).area for e in (1e-3, 1e-9, 0.0, -1e-9, -1e-3)]
    np.testing.assert_allclose(areas, [2.0, 2.0, 1.0, 1.0 - 1e-9, 1.0 - 1e-3], rtol=1e-6)
    right = slice2d(jumping(1e-9)).path_region([0, 0])
    assert right.contains([[0.5, -0.9], [0.5, 0.9], [-0.5, 0.9]]).tolist() == [True, True, False]
    quadrant = slice2d(jumping(0.0)).path_region([0, 0])
    assert quadrant.contains([[0.5, -0.9], [0.5, 0.9], [-0.5, 0.9]]).tolist() == [False, True, False]


# --- refusals ----------------------------------------------------------------------------------------------------


def test_planes() -> None:
    with pytest.raises(RegionError, match="parallel or zero"):
        Plane(np.zeros(3), np.ones(3), 2 * np.ones(3))
    with pytest.raises(RegionError, match="parallel or zero"):
        Plane(np.zeros(3), np.ones(3), np.zeros(3))
    with pytest.raises(ShapeError, match="shape of one input"):
        Plane(np.zeros(3), np.ones(3), np.ones(2))
    with pytest.raises(RegionError, match="NaN"):
        Plane(np.zeros(2), np.ones(2), np.array([np.nan, 1]))
    net = pl.models.relu(3, (4,), seed=0)
    with pytest.raises(ShapeError, match="a plane is needed"):
        slice2d(net)
    with pytest.raises(ShapeError, match="does not run on an input of shape"):
        slice2d(net, plane=Plane(np.zeros(4), np.eye(4)[0], np.eye(4)[1]))
    with pytest.raises(OptionError, match="box must be"):
        slice2d(net, plane=Plane(np.zeros(3), np.eye(3)[0], np.eye(3)[1]), box=((1, 0), (0, 1)))
    with pytest.raises(RegionError, match="same point"):
        segment1d(net, np.ones(3), np.ones(3))


def test_paths() -> None:
    cells = slice2d(pl.models.relu(2, (3, 4), seed=0))
    for bad in ([0], [0, 1, 2], 3, "01"):
        with pytest.raises(RegionError, match="one hidden unit for each"):
            cells.path_region(bad)  # type: ignore[arg-type]
    for unit in (4, -1, 1.0, True, None, (0, 1)):
        with pytest.raises(RegionError, match=r"'relu2@0' has units of shape \(4,\)"):
            cells.path_region([0, unit])
    assert cells.path_region(np.array([0, 3])).area == cells.path_region([0, 3]).area


def test_networks_without_polygons() -> None:
    with pytest.raises(RegionError, match="quadric"):
        slice2d(pl.models.quadratic(2, (3,)))
    with pytest.raises(RegionError, match="given by the user"):
        slice2d(pl.models.gdln(2, (1,), gates=lambda x: x[:, :1]))
    with pytest.raises(RegionError, match="table"):
        slice2d(pl.models.frg(2, (3,), examples=4))
    with pytest.raises(RegionError, match="soft units"):
        slice2d(pl.models.soft_relu(2, (3,)))
    curved = pl.models.soft_galu(2, (3, 3), gate_activation="soft", seed=0)
    with pytest.raises(RegionError, match="soft units"):
        slice2d(curved)
    check(curved.with_gate("hard"), slice2d(curved.with_gate("hard")))  # the remedy that the message names
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 1)).eval()
    with pytest.raises(RegionError, match="max_pool='average'"):
        slice2d(pooled, plane=images(0, 1, 4, 4))
    with pytest.raises(pl.errors.RecordError, match="train mode"):
        slice2d(small_resnet().train(), plane=images(0, 1, 6, 6))
    with pytest.raises(pl.errors.ConversionError, match="GELU"):
        slice2d(nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1)))


def test_too_many_cells() -> None:
    net = pl.models.relu(2, (16, 16), bias=True, seed=0)
    with pytest.raises(BudgetError, match="more than 30 cells"):
        slice2d(net, max_cells=30)
    with pytest.raises(BudgetError, match="more than 5 cells"):
        segment1d(net, [-3.0, 0], [3.0, 0], max_cells=5)
    with pytest.raises(OptionError, match=r"max_cells must be a positive integer or None, got 0\."):
        slice2d(net, max_cells=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of resident memory")
def test_a_slice_stops_before_memory_runs_out() -> None:
    """In a process of its own, whose highest memory is that of the slices."""
    code = """
import torch
import pathlens as pl
from pathlens.regions import Plane, slice2d, slices
def most():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
torch.set_num_threads(1)  # every thread of a machine with many cores would keep buffers of its own
net = pl.models.relu(64, (512,) * 3, bias=True, seed=0)
plane = Plane(*torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).numpy())
slice2d(net, plane=plane, box=0.02)  # what the first call loads
budget, before = 800 * 2**20, most()
slices.resolve_budget = lambda given, device: budget
cells = len(slice2d(net, plane=plane, box=0.19))
print(cells * (48 * 512 + 4 * 3 * 512 + 1000) / budget, (most() - before) / budget)
try:
    slice2d(net, plane=plane, box=0.25)
except pl.errors.BudgetError as error:
    print(error, (most() - before) / budget)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, expected, taken = done.stdout.splitlines()[0].split()
    assert 0.5 < float(taken) / float(expected) < 1.5
    assert "more than 26,445 cells" in done.stdout
    assert float(done.stdout.split()[-1]) < 1.5


def test_places_and_polygons_that_a_slice_does_not_have() -> None:
    cells = slice2d(pl.models.relu(2, (4, 4), bias=True, seed=0))
    assert cells.locate([0.5, 0.5]).shape == (1,) and np.isnan(cells.evaluate([[np.nan, 0.0]]).numpy()).all()
    for look in (cells.locate, cells.evaluate):
        for wrong in ([0.1, 0.2, 0.3], [[0.1, 0.2, 0.3]], np.zeros((4, 4, 2)), "ab"):
            with pytest.raises(ShapeError, match=r"expected plane coordinates of shape \(n, 2\), got"):
                look(wrong)
    with pytest.raises(RowIndexError, match=f"polygons index {len(cells)} is out of range"):
        cells.polygon(len(cells)).numpy()
    with pytest.raises(ShapeError, match="points must have one shape"):
        Plane.through([0.0, 0], [1.0, 0, 0], [0.0, 1])
    with pytest.raises(RegionError, match="a is not an array of numbers"):
        segment1d(pl.models.relu(2, (4, 4)), ["a", "b"], [0.0, 1.0])


def test_cells_that_wait_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    net = pl.models.relu(2, (8, 8, 8), bias=True, seed=0)
    cells = len(slice2d(net, box=2.0))
    assert len(slice2d(net, box=2.0, max_cells=cells)) == cells
    monkeypatch.setattr(tracking, "_MOST", 3)
    finished = []
    finish = tracking.Tracker._finish
    monkeypatch.setattr(tracking.Tracker, "_finish", lambda *a: (finished.append(len(a[1])), finish(*a))[1])
    assert len(slice2d(net, box=2.0, max_cells=cells)) == cells
    finished.clear()
    with pytest.raises(BudgetError, match=f"more than {cells // 2} cells"):
        slice2d(net, box=2.0, max_cells=cells // 2)
    assert sum(finished) < cells // 4  # the others had not been followed to their end


def test_cells_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    net = pl.models.relu(2, (8, 8, 8), bias=True, seed=0)
    whole = slice2d(net, box=2.0)
    monkeypatch.setattr("pathlens.regions.tracking._MOST", 3)
    parts = slice2d(net, box=2.0)
    check(net, parts)
    assert sorted(whole.areas.numpy()) == pytest.approx(sorted(parts.areas.numpy()))
    assert len(parts.neighbours.numpy()) == len(whole.neighbours.numpy())
    path = [0, 1, 2]
    assert parts.path_region(path).n_components == whole.path_region(path).n_components


def test_slivers_are_neither_lost_nor_doubled() -> None:
    """Lines that nearly coincide, and meet in nearly one point, still tile the box."""
    rng = np.random.default_rng(0)
    angle = np.concatenate([rng.uniform(0, np.pi, 5), rng.uniform(0, 1e-9, 20)])
    lines = np.column_stack([rng.uniform(-1e-12, 1e-12, 25), np.cos(angle), np.sin(angle)])
    cells, parent, bits = Polygons.box().cut(lines[None], 1, 10**6)
    assert abs(cells.measures().sum() - 4) < 1e-12 and (cells.measures() >= 0).all()
    assert bits.shape == (len(cells), 25) and not parent.any()


def test_nan_lies_in_no_interval() -> None:
    line = segment1d(pl.models.relu(2, hidden=(4,), bias=True, seed=0), [-2.0, 0.0], [2.0, 0.0])
    assert line.locate([np.nan, -0.1, 0.0, 1.0, 1.1]).tolist() == [-1, -1, 0, len(line) - 1, -1]
