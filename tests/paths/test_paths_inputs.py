"""Predictions by the input at which paths start: against paths one by one, Jacobians, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pathlens as pl
from pathlens import paths
from pathlens.errors import OptionError, RecordError, RowIndexError, ShapeError


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_it_is_the_sum_over_all_paths_that_start_there(first, second, seed):
    net = pl.models.dlgn(3, hidden=(first, second), outputs=2, gate="hard", seed=seed).double()
    x = rows(4, 3, seed=seed).double()
    weights = [p for name, p in net.values.named_parameters() if name.endswith("weight")]
    g1, g2 = net.gates(x).values()
    want = torch.zeros(4, 3, dtype=torch.float64)
    for j, a, b in itertools.product(range(3), range(first), range(second)):
        want[:, j] += x[:, j] * weights[0][a, j] * g1[:, a] * weights[1][b, a] * g2[:, b] * weights[2][1, b]
    found = paths.inputs(net, x, output=1)
    assert torch.allclose(found.contributions, want.detach(), atol=1e-12)
    assert bool((found.rest == 0).all())


@pytest.mark.parametrize("kind", ["relu", "dlgn", "dlgn_pwc", "galu", "soft_relu", "dln"])
@pytest.mark.parametrize("template", ["residual", "convolutions", "norm first", "dense"])
def test_the_sum_is_the_output_for_every_kind_and_wiring(kind, template):
    built = {
        "residual": pl.models.ResNet((1, 1), (4, 6), outputs=3),
        "convolutions": pl.models.gconv(3, channels=(3, 4, 4), dense=(5,), bias=True),
        "norm first": nn.Sequential(nn.BatchNorm2d(3), *pl.models.gconv(3, channels=(3, 4, 4), dense=(5,), bias=True)),
        "dense": nn.Sequential(nn.Flatten(), *pl.models.mlp(48, (6, 5), 3, bias=True)),
    }[template]
    x = rows(7, 3, 4, 4)
    net = pl.gated_twin(built, kind, example=x[:2], seed=1)
    net(x)  # batch statistics other than those of the start
    net.eval()
    found = paths.inputs(net, x, output=2)
    with torch.no_grad():
        f = net(x)[:, 2].double()
    assert torch.allclose(found.contributions.flatten(1).sum(1) + found.rest, f, atol=1e-5)
    assert torch.allclose(found.f, f, atol=1e-5)
    assert found.r2 == pytest.approx(1.0, abs=1e-9)
    assert len(found.contributions) == 7


@pytest.mark.parametrize("kind", ["relu", "galu", "soft_galu"])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), lambda h: nn.functional.max_pool2d(h, 2), nn.AdaptiveMaxPool2d(1)])
def test_max_pooling_keeps_the_units_that_won(kind, pool):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.LazyLinear(2)
            self.pool = pool

        def forward(self, x):
            return self.head(self.second(self.pool(torch.relu(self.first(x)))).flatten(1))

    x = rows(9, 2, 4, 4).double()
    template = Pooled().double()
    template(x)
    net = pl.gated_twin(template, kind, example=x[:2], seed=0).double()
    found = paths.inputs(net, x, output=1)
    gates = [g.detach() for g in net.gates(x).values()]

    def values(read):
        return net.values(read, *gates)[:, 1].sum()

    # affine between x and points near it, where the same units win: f(x + h) - f(x) is the slope along h
    slope = torch.autograd.functional.jacobian(values, x)
    near = x + 1e-6 * x
    total = (found.contributions.flatten(1).sum(1) + found.rest).sum()
    assert total.item() == pytest.approx(values(x).item(), abs=1e-10)
    assert torch.allclose(found.contributions, x * slope, atol=1e-12)
    moved = found.rest.sum() + (near * slope).sum()  # the rest does not move with x
    assert moved.item() == pytest.approx(values(near).item(), abs=1e-10)
    assert torch.allclose(found.f, net(x)[:, 1], atol=1e-10)
    assert found.r2 == pytest.approx(1.0, abs=1e-9)


def test_at_hard_gates_a_relu_networks_slope_is_its_gradient():
    net = (
        pl.gated_twin(
            pl.models.gconv(3, channels=(3, 4, 4), dense=(5,), bias=True), "relu", example=rows(2, 3, 4, 4), seed=0
        )
        .double()
        .eval()
    )
    x = rows(5, 3, 4, 4).double().requires_grad_()
    (slope,) = torch.autograd.grad(net(x)[:, 0].sum(), x)
    assert torch.allclose(paths.inputs(net, x.detach()).contributions, (x * slope).detach(), atol=1e-12)


def test_soft_gates_do_not_add_their_own_slope():
    net = pl.models.dlgn(3, hidden=(4,), seed=0).double()
    x = rows(5, 3).double()
    fixed = net.gates(x)["relu1@0"].detach()
    by_hand = x * ((fixed * net.values.output.weight[0]) @ net.values.linear1.weight)
    assert torch.allclose(paths.inputs(net, x).contributions, by_hand.detach(), atol=1e-12)


def test_each_row_may_have_its_own_output():
    net, x = pl.models.dlgn(3, hidden=(4, 4), outputs=5, seed=0), rows(70, 3)
    said = net(x).argmax(1)
    own = paths.inputs(net, x, output=said)
    assert torch.allclose(own.f, net(x).max(1).values.double(), atol=1e-6)
    for k in said.unique().tolist():
        alone = paths.inputs(net, x[said == k], output=k).contributions
        assert torch.allclose(own.contributions[said == k], alone, atol=1e-12)


def test_many_rows_are_taken_in_parts_and_keep_their_order():
    net = pl.models.dlgn(3, hidden=(4, 4), seed=0)
    x = rows(150, 3)
    whole = paths.inputs(net, x).contributions
    assert torch.allclose(whole[130:], paths.inputs(net, x[130:]).contributions, atol=1e-12)


def test_of_encoded_images_the_map_is_that_of_pixels():
    x = rows(20, 3, 6, 6)
    parts = pl.models.PatchParts.fit(x)
    net = pl.gated_twin(pl.models.ResNet((1,), (4,), channels=54), "dlgn", example=parts(x[:2]), gate="hard", seed=0)
    found = paths.inputs(net.eval(), parts(x[:3]))
    assert found.maps().shape == (3, 6, 6)
    assert torch.allclose(found.maps().flatten(1).sum(1) + found.rest, found.f, atol=1e-10)
    assert "54 × 6 × 6 inputs on 3 rows" in repr(found)
    for row in (99, -4):
        with pytest.raises(RowIndexError, match=f"index {row} is out of range for 3 rows. Use 0 to 2"):
            found.plot(row)
    ax = found.plot(1)
    assert ax.images[0].get_array().shape == (6, 6)
    import matplotlib.pyplot as plt

    plt.close(ax.figure)


def test_of_tables_the_largest_contributions_are_bars():
    import matplotlib.pyplot as plt

    found = paths.inputs(pl.models.dlgn(5, hidden=(4,), bias=True, seed=0), rows(3, 5))
    ax = found.plot(1, names="abcde", k=3)
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels[3:] == ["2 others", "biases"] and set(labels[:3]) < set("abcde")
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(float(found.f[1]))
    with pytest.raises(ShapeError, match="2 names for 5 inputs"):
        found.plot(names="ab")
    plt.close("all")


def test_where_nothing_contributes_biases_have_no_share():
    net = pl.models.dlgn(3, hidden=(4,), gate="hard", seed=0)
    assert "biases are 0%" in repr(paths.inputs(net, torch.zeros(2, 3)))


def test_what_has_no_such_sum_is_refused():
    net, x = pl.models.dlgn(3, hidden=(4,)), rows(5, 3)
    with pytest.raises(RecordError, match="gated_twin"):
        paths.inputs(nn.Linear(3, 1), x)
    with pytest.raises(OptionError, match="no output 1; the network has 1"):
        paths.inputs(net, x, output=1)
    with pytest.raises(OptionError, match="one for each of the 5 rows"):
        paths.inputs(net, x, output=[0, 0])
    with pytest.raises(OptionError, match=r"rows, got torch\.float32"):
        paths.inputs(net, x, output=0.5)
    with pytest.raises(ShapeError, match="only images"):
        paths.inputs(net, x).maps()
    residual = pl.gated_twin(pl.models.ResNet((1,), (4,)), "dlgn", example=rows(2, 3, 8, 8))
    with pytest.raises(RecordError, match="train mode"):
        paths.inputs(residual, rows(3, 3, 8, 8))
    dropping = pl.gated_twin(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 1)), "dlgn", x[:2])
    with pytest.raises(RecordError, match="dropout is random"):
        paths.inputs(dropping, x)
    assert torch.equal(paths.inputs(torch.compile(net), x).f, paths.inputs(net, x).f)  # the network behind it
    with pytest.raises(ShapeError, match=r"must return \(n, c\), got \(1, 1, 1\) .* first layer reads \(n, 3\)"):
        paths.inputs(net, x[:, None])
    with pytest.raises(ShapeError, match="encoded inputs"):
        paths.inputs(residual.eval(), rows(3, 1, 8, 8))


def test_inference_mode_changes_nothing():
    net, x = pl.models.relu(3, hidden=(4, 4), bias=True, seed=0), rows(5, 3)
    want, pruned = paths.inputs(net, x), paths.prune(net, x, keep=0.5)
    with torch.inference_mode():
        again, cut = paths.inputs(net, x), paths.prune(net, x, keep=0.5)
        stream = pl.record(net, x, stream=True).rows(1, 4)
    assert torch.equal(again.contributions, want.contributions) and torch.equal(stream.f, net(x)[1:4])
    cut.net(x).sum().backward()  # what was made there can be trained on
    assert torch.equal(cut.net(x), pruned.net(x))
