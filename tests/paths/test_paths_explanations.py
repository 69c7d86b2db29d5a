"""Groups, trees, refits, the path norm and pruning: exact where they claim it, and as good as they say."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from path_tables import check_ratios, layers, network, table
from torch import Tensor, nn

import pathlens as pl
from pathlens import paths
from pathlens.errors import RowIndexError
from pathlens.explanations import r_squared
from pathlens.models import GatedNetwork

matplotlib.use("Agg")


def ring(n: int) -> Tensor:
    angles = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


# --- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "soft", "pwc", "quadratic"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_groups_are_sums_of_paths(kind: str, bias: bool, layer: int) -> None:
    net, X = network(kind, bias=bias), torch.randn(5, 2, dtype=torch.float64)
    every = table(net, X, 1)
    got = paths.groups(net, X, by=layer, output=1)
    for unit in range(got.contributions.shape[1]):
        want = sum(v for path, v in every.items() if path[layer] == unit)
        assert torch.allclose(got.contributions[:, unit], want, rtol=0, atol=1e-14)
    f = net(X)[:, 1].detach()
    assert torch.allclose(got.contributions.sum(1) + got.rest, f, rtol=1e-12, atol=1e-15)
    assert got.r2 == pytest.approx(1, abs=1e-12) and got.curve[-1] == pytest.approx(1, abs=1e-12)
    late = sum(v for path, v in every.items() if path[layer] < 0) if bias else torch.zeros(5)
    assert torch.allclose(got.rest, late.double(), rtol=1e-12, atol=1e-15)
    size = got.contributions.abs().sum(1) + got.rest.abs()
    check_ratios(got.cancellations, size, f)


def test_groups_of_a_unit_and_of_clusters() -> None:
    net, X = network("hard"), torch.randn(20, 2, dtype=torch.float64)
    units = paths.groups(net, X)
    one = paths.groups(net, X, by=(-1, 3))
    assert one.names == ("other units of relu3@0", "relu3@0[3]")
    assert torch.equal(one.contributions[:, 1], units.contributions[:, 3])
    assert torch.allclose(one.contributions.sum(1), units.contributions.sum(1))
    labels = np.array([4, 7, 4, 4, 7])
    merged = paths.groups(net, X, by="relu3@0", labels=labels)
    assert merged.names == ("4", "7")
    for column, label in enumerate((4, 7)):
        want = units.contributions[:, torch.from_numpy(labels == label)].sum(1)
        assert torch.allclose(merged.contributions[:, column], want)
    assert merged.cancellation <= units.cancellation
    assert units.merge(torch.tensor(labels)).names == merged.names


def test_the_curve_is_what_the_largest_groups_tell() -> None:
    net, X = network("pwc", hidden=(6, 6, 6), outputs=1), ring(60)
    got = paths.groups(net, X)
    order = got.contributions.abs().mean(0).argsort(descending=True)
    for j in (0, 2, 5):
        predicted = got.contributions[:, order[: j + 1]].sum(1)
        want = 1 - float((got.f - predicted).square().sum() / (got.f - got.f.mean()).square().sum())
        assert got.curve[j] == pytest.approx(want, abs=1e-12)
    few = got.needed(0.5)
    assert got.curve[few - 1] >= 0.5 and all(r2 < 0.5 for r2 in got.curve[: few - 1])
    assert got.needed(2.0) == 6


def test_half_spaces_that_coincide_are_merged_by_their_labels() -> None:
    net, X = network("pwc", hidden=(6, 6)), ring(40)
    with torch.no_grad():
        weight = net.source.network.linear1.weight
        weight[3] = 2 * weight[0]  # the same half-space
    labels = pl.regions.halfspaces(net).groups(angle=1e-3).labels("relu1@0", 6)
    assert labels[0] == labels[3]
    units, merged = paths.groups(net, X, by=0), paths.groups(net, X, by=0, labels=labels)
    assert merged.contributions.shape[1] == len(set(labels.tolist())) < 6
    together = units.contributions[:, 0] + units.contributions[:, 3]
    assert torch.allclose(merged.contributions[:, merged.names.index(str(int(labels[0])))], together)


# --- tree ------------------------------------------------------------------------------------------------------


def test_exactly_one_rule_holds_and_its_value_is_the_mean() -> None:
    net, X = network("pwc", hidden=(6, 6, 6), outputs=1, bias=True), ring(300)
    got = paths.tree(net, X, leaves=12, validation=X)
    bits = list(net.gates(X, hard=True).values())
    f = net(X)[:, 0].detach()
    times = torch.zeros(len(X))
    for rule in got.rules:
        holds = torch.ones(len(X), dtype=torch.bool)
        for layer, unit, on in rule.conditions:
            holds &= (bits[layer][:, unit] > 0) == on
        times += holds
        assert rule.value == pytest.approx(float(f[holds].mean()), abs=1e-12)
        assert rule.share == pytest.approx(float(holds.double().mean()))
    assert (times == 1).all() and len(got.rules) <= 12
    predicted = got.predict(net, X)
    want = 1 - float((f - predicted).square().sum() / (f - f.mean()).square().sum())
    assert got.r2 == pytest.approx(want, abs=1e-12) and got.r2_held_out == pytest.approx(want, abs=1e-12)
    assert paths.tree(net, X, leaves=1).rules[0].conditions == ()


def test_enough_leaves_tell_a_piecewise_constant_network_in_full() -> None:
    net, X = network("pwc", hidden=(6, 6, 6), outputs=1), ring(500)
    got = paths.tree(net, X, leaves=100)
    assert got.r2 > 1 - 1e-12 and got.r2_held_out is not None and got.r2_held_out > 0.9


# --- refit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "l1"])
@pytest.mark.parametrize("kind", ["pwc", "hard"])
def test_a_refit_is_what_it_says(method: str, kind: str) -> None:
    net, X = network(kind, hidden=(6, 6, 6), outputs=2), ring(200)
    got = paths.refit(net, X, paths=8, method=method, output=1, validation=X)
    assert len(got.paths) <= 8 and got.paths.shape[1] == 3 and (got.slopes is None) == (kind == "pwc")
    bits = list(net.gates(X, hard=True).values())
    predicted = torch.full((200,), got.intercept, dtype=torch.float64)
    size = predicted.abs()
    for p, path in enumerate(got.paths.tolist()):
        inside = bits[0][:, path[0]] * bits[1][:, path[1]] * bits[2][:, path[2]]
        height = got.constants[p] + (X @ got.slopes[p] if got.slopes is not None else 0)
        predicted, size = predicted + inside * height, size + (inside * height).abs()
    f = net(X)[:, 1].detach()
    want = 1 - float((f - predicted).square().sum() / (f - f.mean()).square().sum())
    assert got.r2 == pytest.approx(want, abs=1e-9) and got.r2_held_out == pytest.approx(want, abs=1e-9)
    assert got.cancellation == pytest.approx(float((size / predicted.abs()).median()), rel=1e-6)
    assert torch.allclose(got.predict(net, X), predicted)
    assert want > 0.5


def test_a_refit_finds_a_region_that_is_there() -> None:
    net, X = network("pwc", hidden=(5, 5), outputs=1), ring(200)
    bits = list(net.gates(X, hard=True).values())
    shares = (bits[0].T @ bits[1]) / len(X)
    a, b = divmod(int((shares - 0.2).abs().argmin()), 5)  # some region of about a fifth of the rows
    y = 3 * bits[0][:, a] * bits[1][:, b] - 1
    got = paths.refit(net, X, y, paths=1)
    assert got.r2 == pytest.approx(1, abs=1e-9) and got.target == "y"
    assert got.intercept == pytest.approx(-1) and got.constants.tolist() == pytest.approx([3])
    assert torch.equal(bits[0][:, got.paths[0, 0]] * bits[1][:, got.paths[0, 1]], bits[0][:, a] * bits[1][:, b])
    assert len(paths.refit(net, X, torch.ones(200, 1), paths=3).paths) == 0  # no variance is left to explain


# --- path norm and pruning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_the_path_norm_is_a_sum_over_paths_with_its_gradient(bias: bool) -> None:
    net = network("soft", bias=bias)
    ones = torch.ones(1, 2, dtype=torch.float64)
    opened = net.with_gate("open")
    want = sum(abs(float(v)) for k in (0, 1) for v in table(opened, ones, k, include_inputs=True).values())
    got = paths.path_norm(net)
    assert float(got.detach()) == pytest.approx(want, rel=1e-12)
    got.backward()
    weight = net.values.linear2.weight
    for i, j in ((0, 0), (2, 3)):
        moved = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                moved.append(paths.path_norm(net).item())
                weight[i, j] -= step
        assert weight.grad is not None
        assert float(weight.grad[i, j]) == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("kind", ["pwc", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_pruning_cuts_the_edges_through_which_least_goes(kind: str, bias: bool) -> None:
    net, X = network(kind, bias=bias), torch.randn(10, 2, dtype=torch.float64)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    got = paths.prune(net, X, keep=0.4, validation=X)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())  # the network itself is left alone
    every = [table(net, X, k, include_inputs=True) for k in (0, 1)]
    sizes: dict[tuple[int, int, int], float] = {}  # (layer of weights, to, from): Σ|v| through the edge
    for output, listed in enumerate(every):
        for path, values in listed.items():
            walk = (*path, output)
            for layer in range(4):
                if walk[layer + 1] >= 0:
                    edge = (layer, walk[layer + 1], walk[layer])
                    sizes[edge] = sizes.get(edge, 0.0) + float(values.abs().mean())
    keep = sorted(sizes, key=lambda e: -sizes[e])[: round(0.4 * len(sizes))]
    for layer, (old, new) in enumerate(zip(layers(net), layers(got.net))):
        assert old.weight.shape == new.weight.shape
        for i in range(old.out_features):
            for j in range(old.in_features):
                assert new.weight[i, j].item() == (old.weight[i, j].item() if (layer, i, j) in keep else 0.0)
            if bias:
                assert new.bias[i].item() == (old.bias[i].item() if (layer, i, -1) in keep else 0.0)
    assert got.edges == (len(keep), len(sizes))
    old_f, new_f = net(X).detach().flatten(), got.net(X).detach().flatten()
    want = 1 - float((old_f - new_f).square().sum() / (old_f - old_f.mean()).square().sum())
    assert got.r2 == pytest.approx(want, abs=1e-9) and got.r2_held_out == pytest.approx(want, abs=1e-9)
    opened = got.net.with_gate("open") if kind == "pwc" else None
    if opened is not None:  # with ones, open gates and random weights a path counts where its value is not zero
        left = [table(opened, X[:1], k) for k in (0, 1)]
        want_paths = {path for listed in left for path, v in listed.items() if float(v) != 0}
        assert got.paths == len(want_paths) and got.total == len(left[0])


def test_keeping_every_edge_changes_nothing() -> None:
    net, X = network("pwc"), torch.randn(10, 2, dtype=torch.float64)
    got = paths.prune(net, X, keep=1.0)
    assert torch.equal(got.net(X), net(X)) and got.paths == got.total == 4 * 3 * 5
    assert got.cancellation == got.before


class LastFirst(nn.Module):
    """Square layers, registered in the order opposite to that in which they act."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.view(x.size(0), -1))))


def test_layers_are_taken_in_the_order_in_which_they_act() -> None:
    torch.manual_seed(0)
    net, X = LastFirst().double(), torch.randn(20, 3, dtype=torch.float64)
    same = nn.Sequential(net.first, nn.ReLU(), net.last)
    want = net.last.weight.abs() @ (net.first.weight.abs().sum(1) + net.first.bias.abs()) + net.last.bias.abs()
    twin = pl.gated_twin(net, "relu", example=X[:2])
    for each in (net, same, twin):
        assert paths.path_norm(each).item() == pytest.approx(want.sum().item(), rel=1e-12)
        pruned = paths.prune(each, X, keep=0.5)
        assert torch.equal(pruned.net(X), paths.prune(same, X, keep=0.5).net(X))


# --- the circle ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[GatedNetwork, GatedNetwork, Tensor]:
    """A piecewise-constant DLGN that has learnt the circle, one that learnt it under a path-norm penalty, inputs."""
    data = pl.data.circle(256, bottom=4.0)
    made = []
    for strength in (0.0, 3e-3):
        net = pl.models.dlgn(2, hidden=(16,) * 5, piecewise_constant=True, beta=10.0, seed=0)
        options: dict[str, Any] = {"penalty": lambda n, s=strength: s * paths.path_norm(n)} if strength else {}
        pl.train(net, data, epochs=100, lr=3e-3, batch_size=64, progress=False, **options)
        made.append(net.with_gate("hard"))
    return made[0], made[1], data.x


def test_on_the_circle_groups_trees_and_refits_explain_what_the_largest_paths_do_not(trained: Any) -> None:
    net, _, X = trained
    largest = paths.top(net, X, k=100)
    assert largest.cancellation > 3 and largest.r2 < 0.3 and "misleads" in repr(largest)
    parts = paths.groups(net, X)
    assert parts.cancellation < 2 and parts.needed(0.9) < 16
    assert paths.tree(net, X, leaves=30).r2 > 0.95
    few = paths.refit(net, X, paths=20)
    assert few.r2 > 0.95 and few.r2_held_out > 0.9 and few.cancellation < 3


def test_on_the_circle_the_path_norm_leaves_little_to_cancel_and_few_paths(trained: Any) -> None:
    plain, penalised, X = trained
    before, after = paths.cancellation(plain, X).median, paths.cancellation(penalised, X).median
    assert after < before / 2
    pruned = paths.prune(penalised, X, keep=0.25)
    assert pruned.r2 > 0.8 and pruned.paths < pruned.total / 50
    assert pruned.r2 > paths.prune(plain, X, keep=0.25).r2 + 0.3


def test_explanations_say_fidelity_and_cancellation_first_and_can_be_drawn(trained: Any) -> None:
    net, _, X = trained
    made = [
        paths.top(net, X, k=5),
        paths.groups(net, X),
        paths.tree(net, X),
        paths.refit(net, X, paths=5),
        paths.prune(net, X, keep=0.5),
    ]
    for explanation in made:
        first = repr(explanation).splitlines()[0]
        assert f"R² {explanation.r2:.3f}" in first and f"cancellation {explanation.cancellation:.3g}" in first
        assert isinstance(explanation, paths.Explanation)
    for explanation in made[:4]:
        ax = explanation.plot()  # type: ignore[attr-defined]
        assert ax.get_title() or ax.get_ylabel()
        matplotlib.pyplot.close(ax.figure)
    with pytest.raises(RowIndexError, match=f"Use 0 to {len(X) - 1}"):
        made[0].plot(len(X))
    ax = paths.refit(network("hard"), torch.randn(30, 2, dtype=torch.float64), paths=2).plot()
    assert "without b·x" in ax.get_ylabel()  # of an affine refit the bars are not all
    matplotlib.pyplot.close(ax.figure)


def test_fidelity_is_undefined_where_the_output_varies_by_rounding_alone() -> None:
    f = torch.full((7,), 0.08, dtype=torch.float64)
    f[3:] += 1e-16
    assert f.std() > 0 and math.isnan(r_squared(f - 0.01, f))
    assert math.isnan(r_squared(f * 0, f * 0))
    assert r_squared(1e-9 * torch.arange(3), 1e-9 * torch.arange(3)) == 1.0


def test_gates_of_a_soft_network_are_soft_in_contributions_and_hard_in_regions() -> None:
    net, X = network("soft_pwc", outputs=1), ring(50)
    assert paths.groups(net, X).gates == "soft β=4"
    assert torch.allclose(paths.groups(net, X).contributions.sum(1), net(X)[:, 0].detach())
    assert paths.count(net, X) == paths.count(net.with_gate("hard"), X)
    assert isinstance(net, nn.Module)


def test_a_refit_does_not_depend_on_the_units_of_the_inputs() -> None:
    net = pl.models.relu(2, hidden=(1,), bias=True).double()
    with torch.no_grad():
        net.values.linear1.weight.copy_(torch.tensor([[1e-8, 1e9]])), net.values.linear1.bias.fill_(0.5)
        net.values.output.weight.fill_(1.0), net.values.output.bias.fill_(0.0)
    x = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    predicted = paths.refit(net, x * torch.tensor([1e8, 1e-9], dtype=torch.float64), paths=1)
    assert predicted.slopes is not None
    assert predicted.r2 > 1 - 1e-9
    torch.testing.assert_close(predicted.slopes[0], net.values.linear1.weight[0].detach(), rtol=1e-6, atol=0.0)
