"""Half-spaces against the pre-activations they describe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pathlens as pl
from pathlens.errors import BudgetError, NotFiniteError, OptionError, RegionError, ShapeError, UnknownNameError
from pathlens.models import GatedNetwork
from pathlens.regions import HalfSpaces, halfspaces


def check(net: GatedNetwork, spaces: HalfSpaces) -> None:
    """normal·x + offset is the pre-activation, at random points."""
    net = net.double().eval()
    x = torch.randn(20, *spaces.input_shape, dtype=torch.float64)
    with torch.no_grad():
        scores = net.preactivations(x)
    for site, q in scores.items():
        mine = x.flatten(1).numpy() @ spaces.normals(site).numpy().T + spaces.offsets(site).numpy()
        q = q.flatten(1).numpy()
        np.testing.assert_allclose(mine, q, rtol=0, atol=1e-12 * np.abs(q).max())
        assert np.array_equal(spaces.contains(site, x).numpy(), q > 0)


@settings(max_examples=25, deadline=None)
@given(
    d=st.integers(1, 8),
    hidden=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    bias=st.booleans(),
    shallow=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_fully_connected(d: int, hidden: list[int], bias: bool, shallow: bool, seed: int) -> None:
    build = pl.models.dlgn_shallow if shallow else pl.models.dlgn
    net = build(d, hidden, bias=bias, piecewise_constant=seed % 2 == 0, frozen=seed % 3 == 0, seed=seed)
    check(net, halfspaces(net))


def test_products_of_weights() -> None:
    net = pl.models.dlgn(5, (4, 3), seed=0).double()
    w1, w2 = (getattr(net.source.network, f"linear{i}").weight.detach() for i in (1, 2))
    np.testing.assert_allclose(halfspaces(net).normals(1).numpy(), (w2 @ w1).numpy(), atol=1e-15)


def conv_twin() -> GatedNetwork:
    torch.manual_seed(0)
    template = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    net = pl.gated_twin(template, "dlgn", torch.randn(2, 2, 6, 6), seed=0)
    with torch.no_grad():
        net(torch.randn(64, 2, 6, 6))  # batch-norm with statistics of its own
    return net.eval()


def test_convolutions_and_batch_norm_against_autograd() -> None:
    net = conv_twin()
    spaces = halfspaces(net, input_shape=(2, 6, 6))
    check(net, spaces)
    net = net.double()
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    q = net.preactivations(x)["2@0"]
    (gradient,) = torch.autograd.grad(q[0, 1, 2, 3], x)
    np.testing.assert_allclose(spaces.normal("2@0", (1, 2, 3)).numpy(), gradient[0].numpy(), atol=1e-14)
    assert spaces.images("2@0", [0, 5]).shape == (2, 2, 6, 6)
    assert spaces.shapes == {"2@0": (3, 6, 6), "4@0": (2, 2, 2), "7@0": (4,)}


def test_residual_networks() -> None:
    torch.manual_seed(0)
    template = pl.models.ResNet((1, 1), (2, 4), outputs=2, channels=1).eval()
    for shortcut in ("projection", "pad"):
        template = pl.models.ResNet((1, 1), (2, 4), outputs=2, channels=1, shortcut=shortcut).eval()
        net = pl.gated_twin(template, "dlgn", torch.randn(2, 1, 6, 6), seed=0)
        check(net, halfspaces(net, input_shape=(1, 6, 6)))


def test_points_of_other_shapes() -> None:
    spaces = halfspaces(conv_twin(), input_shape=(2, 6, 6))
    x = torch.randn(5, 2, 6, 6)
    on = spaces.contains(0, x).numpy()
    for same in (x.flatten(1), x.double(), x.numpy(), x.tolist()):
        assert np.array_equal(spaces.contains(0, same).numpy(), on)
    assert spaces.contains(0, torch.ones(5, 72, dtype=torch.uint8)).shape == on.shape
    for wrong in (x[0], torch.randn(36, 4), np.ones((5, 71))):
        with pytest.raises(ShapeError, match=r"expected points of shape \(n, 72\).*For one point use X\[None\]"):
            spaces.contains(0, wrong)
    with pytest.raises(ShapeError, match="need a batch dimension"):
        spaces.contains(0, x[0].flatten())
    with pytest.raises(NotFiniteError, match="first in row 0"):
        spaces.contains(0, x.flatten(1) * torch.nan)


def test_both_ways_of_computing_agree() -> None:
    net = conv_twin()
    spaces = halfspaces(net, input_shape=(2, 6, 6))
    assert spaces.units("2@0") > spaces.dim > 4
    some = [3, 0, 107]
    np.testing.assert_allclose(spaces.normals("2@0").numpy()[some], spaces.normals("2@0", some).numpy(), atol=1e-14)
    tight = halfspaces(net, input_shape=(2, 6, 6), max_bytes=100_000)  # few rows at a time
    np.testing.assert_allclose(tight.normals("2@0").numpy(), spaces.normals("2@0").numpy(), atol=1e-14)


def test_budget() -> None:
    spaces = halfspaces(conv_twin(), input_shape=(2, 6, 6), max_bytes=10_000)
    with pytest.raises(BudgetError, match=r"108 normals of site '2@0' take 60.8 KiB"):
        spaces.normals("2@0")
    assert spaces.normals("2@0", [1, 2]).shape == (2, 72)
    with pytest.raises(BudgetError, match="groups"):
        spaces.groups()


def test_groups() -> None:
    net = pl.models.dlgn_shallow(3, (5, 4), bias=True, seed=0).double()
    one, two = net.source.layers
    with torch.no_grad():
        u = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
        v = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
        tilted = u + 0.02 * v
        cosine = (u @ tilted) / (u.norm() * tilted.norm())
        one.weight.copy_(torch.stack([u, v, 2 * u, -u, u]))
        one.bias.copy_(torch.tensor([1.0, 0, 2, -1, 5]))  # the last is parallel, elsewhere
        two.weight.copy_(torch.stack([tilted, torch.zeros(3), torch.zeros(3), -v]))
        two.bias.copy_(torch.tensor([1.0, 1, -1, 0]))
    spaces = halfspaces(net)
    exact = spaces.groups(angle=0)
    names = [[(m.site, m.unit, m.flipped) for m in g.members] for g in exact.groups]
    a, b = spaces.sites
    assert names[0] == [(a, 0, False), (a, 2, False), (a, 3, True)]
    assert names[1] == [(a, 1, False), (b, 3, True)]
    assert sorted(names[2:]) == [[(a, 4, False)], [(b, 0, False)]]
    assert exact.always_on == ((b, 1),) and exact.always_off == ((b, 2),)
    assert "2 flipped; 1 always on, 1 always off" in repr(exact)
    assert spaces.constant(b).tolist() == [0, 1, -1, 0]
    near = spaces.groups(angle=1.0, offset=0.1)
    assert [(m.site, m.unit) for m in near.groups[0].members] == [(a, 0), (a, 2), (a, 3), (b, 0)]
    assert near.groups[0].members[-1].degrees == pytest.approx(float(torch.rad2deg(cosine.arccos())))
    assert near.labels(b, 4).tolist() == [0, -1, -1, 1]
    with pytest.raises(UnknownNameError, match="Unknown gate site 'relu9@0'"):
        near.labels("relu9@0", 4)
    assert near.groups[0].representative.unit == 0 and len(near) == 3
    assert spaces.groups(angle=1.0, offset=0.1, sites=[1]).groups[0].members[0].site == b
    many = halfspaces(pl.models.dlgn(6, (50, 50), seed=0)).groups(angle=0)
    assert len(many) == 100


def test_pictures() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    ax = halfspaces(pl.models.dlgn(2, (5, 5), seed=0)).plot(1)
    assert len(ax.lines) == 5
    ax = halfspaces(pl.models.dlgn(16, (5, 5), seed=0)).plot(0, image_shape=(4, 4))
    assert ax.images[0].get_array().shape == (9, 14)
    seen = halfspaces(conv_twin(), input_shape=(2, 6, 6))
    channels, high, wide = seen.shapes["4@0"]
    assert f"normals of {channels} of {channels * high * wide} gates" in seen.plot("4@0").get_title()
    drawn = seen.plot("2@0").images[0].get_array()[:6, :6]  # the first channel's, at the middle position
    middle = seen.normal("2@0", (0, *(size // 2 for size in seen.shapes["2@0"][1:]))).numpy().reshape(2, 6, 6)
    np.testing.assert_allclose(drawn, (middle / np.abs(middle).max()).mean(0))
    with pytest.raises(RegionError, match="neither points of a plane nor images"):
        halfspaces(pl.models.dlgn(16, (5, 5), seed=0)).plot(0)
    plt.close("all")


def test_repr_and_soft_gates() -> None:
    text = repr(halfspaces(pl.models.dlgn(2, (3, 4), seed=0)))
    assert "7 gates" in text and "hard gates of a network with soft β=4" in text
    assert "soft" not in repr(halfspaces(pl.models.dlgn(2, (3, 4), gate="hard", seed=0)))


def test_networks_without_half_spaces() -> None:
    for net, why in (
        (pl.models.relu(2, (3,)), "piecewise affine"),
        (pl.models.galu(2, (3,)), "come from a ReLU network"),
        (pl.models.dln(2, (3,)), "All its gates are open"),
        (pl.models.quadratic(2, (3,)), "quadratic function"),
        (pl.models.gdln(2, (1,), gates=lambda x: x[:, :1]), "given by the user"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "plain module"),
        ("net", "got str"),
    ):
        with pytest.raises(RegionError, match=why):
            halfspaces(net)
    with pytest.raises(ShapeError, match="Give input_shape"):
        halfspaces(conv_twin())
    with pytest.raises(pl.errors.RecordError, match="train mode"):
        halfspaces(conv_twin().train(), input_shape=(2, 6, 6))


def test_wrong_sites_units_and_angles() -> None:
    spaces = halfspaces(pl.models.dlgn(2, (3, 4), seed=0))
    with pytest.raises(UnknownNameError, match="Did you mean 'relu1@0'"):
        spaces.normals("relu1")
    with pytest.raises(RegionError, match="has 3 units"):
        spaces.normals(0, [3])
    with pytest.raises(RegionError, match=r"units of shape \(3,\)"):
        spaces.normal(0, (1, 1))
    with pytest.raises(OptionError, match="angle must be"):
        spaces.groups(angle=-1)


def test_normals_much_shorter_than_their_offsets() -> None:
    net = pl.models.dlgn(2, (5, 3), gate="hard", bias=True, seed=0).double()
    layers = [m for m in net.source.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        layers[0].weight.mul_(1e-8), layers[0].bias.add_(1e8)
    want = layers[0].weight.detach().numpy()
    np.testing.assert_allclose(halfspaces(net).normals(0).numpy(), want, rtol=1e-12)  # q(e_j) − q(0) would be zero
    np.testing.assert_allclose(halfspaces(net).normals(0, [3]).numpy(), want[[3]], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode_and_low_precision_change_nothing(dtype: torch.dtype) -> None:
    net = pl.gated_twin(
        nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1)),
        "dlgn",
        torch.randn(2, 1, 3),
        seed=0,
    ).to(dtype)
    x = torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(0)).to(dtype)

    def computed() -> list[np.ndarray]:
        spaces = halfspaces(net, input_shape=(1, 3))
        cells = pl.regions.slice2d(net, plane=tuple(x))
        region = pl.regions.path_region(net, [0], input_shape=(1, 3))
        return [
            spaces.normals(0).numpy(),
            spaces.normals(0, [1]).numpy(),
            cells.maps.numpy(),
            np.array(cells.counts),
            region.normals.numpy(),
        ]

    want = computed()
    with torch.inference_mode():
        assert all(np.array_equal(a, b) for a, b in zip(want, computed()))
