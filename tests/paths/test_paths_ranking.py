"""The largest paths, values of given ones and cancellation, against tables of all paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from path_tables import KINDS, check_ratios, large_table, network, table
from torch import nn

import pathlens as pl
from pathlens import paths
from pathlens.testing.reference import path_sum


def check_top(net: nn.Module, X: torch.Tensor, k: int, output: int, include_inputs: bool) -> None:
    every = table(net, X, output, include_inputs)
    got = paths.top(net, X, k=k, output=output, include_inputs=include_inputs)
    values = torch.stack(list(every.values()), dim=1)
    scale = values.abs().sum(1).clamp(min=1e-300)
    want = values.abs().sort(dim=1, descending=True).values[:, :k]
    assert got.total == len(every)
    for row in range(len(X)):
        listed = int(got.listed[row])
        assert listed == min(k, int((values[row] != 0).sum()))
        assert torch.allclose(got.contributions[row, :listed].abs(), want[row, :listed], rtol=1e-12, atol=0)
        assert not got.contributions[row, listed:].any() and (got.paths[row, listed:] == -1).all()
        found = [tuple(p) for p in got.paths[row, :listed].tolist()]
        assert len(set(found)) == listed
        for path, value in zip(found, got.contributions[row]):
            assert float((every[path][row] - value).abs()) <= 1e-12 * float(scale[row])
    f = net(X)[:, output].detach()
    assert float(((f - got.f).abs() / scale).max()) < 1e-12
    assert float(((got.contributions.sum(1) + got.remainder - f).abs() / scale).max()) < 1e-12
    check_ratios(got.cancellations, values.abs().sum(1), values.sum(1))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    hidden=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    inputs=st.integers(1, 4),
    bias=st.booleans(),
    include_inputs=st.booleans(),
    k=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_top_is_what_a_table_of_all_paths_says(
    kind: str, hidden: list[int], inputs: int, bias: bool, include_inputs: bool, k: int, seed: int
) -> None:
    net = network(kind, inputs, tuple(hidden), 2, bias, seed)
    X = torch.randn(3, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    check_top(net, X, k, seed % 2, include_inputs)


@pytest.mark.parametrize("kind", ["relu", "soft", "pwc"])
def test_top_of_a_million_paths(kind: str) -> None:
    net = network(kind, 6, (10,) * 6, 1)
    X = torch.randn(2, 6, dtype=torch.float64)
    every = large_table(net, X, 0)
    got = paths.top(net, X, k=200)
    want = every.abs().topk(200, dim=1)
    assert torch.allclose(got.contributions.abs(), want.values, rtol=1e-12, atol=0)
    place = (got.paths * torch.tensor([10**5, 10**4, 1000, 100, 10, 1])).sum(2)
    listed = torch.arange(200) < got.listed[:, None]
    assert torch.allclose(every.gather(1, place.clamp(min=0))[listed], got.contributions[listed], rtol=1e-12, atol=0)
    size = paths.cancellation(net, X).size
    assert torch.allclose(size, every.abs().sum(1), rtol=1e-12)
    assert float(((got.remainder - (every.sum(1) - got.contributions.sum(1))).abs() / size).max()) < 1e-12


def test_equal_contributions_come_in_the_order_of_their_units() -> None:
    net = pl.models.dln(1, hidden=(3, 3, 3), seed=0).double()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
        net.values.linear2.weight[2] = -1.0  # the sign does not matter for the order, the size does
        net.values.linear3.weight[1] = 2.0
    got = paths.top(net, torch.ones(1, 1, dtype=torch.float64), k=12)
    large = [[a, b, 1] for a in range(3) for b in range(3)]
    assert got.paths[0].tolist() == [*large, [0, 0, 0], [0, 0, 2], [0, 1, 0]]
    assert got.contributions[0].tolist() == [2.0, 2.0, -2.0] * 3 + [1.0, 1.0, 1.0]


def test_rows_in_blocks_are_the_same_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, X = network("hard", bias=True), torch.randn(7, 2, dtype=torch.float64)
    whole = paths.top(net, X, k=9)
    monkeypatch.setattr("pathlens.paths.ranking._CANDIDATES", 100)
    parts = paths.top(net, X, k=9)
    assert torch.equal(whole.paths, parts.paths) and torch.equal(whole.contributions, parts.contributions)
    alone = paths.top(net, X[3], k=np.int64(9), output=np.int64(0))
    assert torch.equal(alone.paths[0], whole.paths[3])


def test_plain_modules_and_leaky_units() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3), nn.LeakyReLU(), nn.Linear(3, 1)).double()
    X = torch.randn(5, 3, dtype=torch.float64)
    got = paths.top(net, X, k=1000)
    assert torch.allclose(got.contributions.sum(1), net(X)[:, 0].detach(), rtol=1e-12)
    assert float(got.remainder.abs().max()) < 1e-14
    for each in (net, pl.gated_twin(net, "relu", example=X[:2])):
        assert "gates hard, leaky" in repr(paths.top(each, X))
    assert got.listed.tolist() == [4 * 3 + 3 + 1] * 5  # a leaky unit never closes; three biases and one start paths


class OwnParameters(nn.Module):
    """Weights and biases under names of their own; two layers share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.w = (nn.Parameter(torch.randn(*size).double()) for size in ((4, 2), (4, 4), (1, 4)))
        self.shift = nn.Parameter(torch.randn(4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(F.linear(x, self.u, self.shift))
        return F.linear(torch.relu(F.linear(h, self.v, bias=self.shift)), self.w)


def test_biases_of_any_name_start_paths() -> None:
    torch.manual_seed(0)
    net, X = OwnParameters(), torch.randn(6, 2).double()
    first = torch.relu(F.linear(X, net.u, net.shift))
    second = (F.linear(first, net.v, net.shift) > 0).double()
    for parts in (paths.groups(net, X, by=0), paths.groups(pl.gated_twin(net, "relu", example=X), X, by=0)):
        assert torch.allclose(parts.contributions, first * ((second * net.w) @ net.v))
        assert torch.allclose(parts.rest, (second * net.w) @ net.shift)
    assert paths.count(net, X, include_biases=True) == (((first > 0).sum(1) + 1) * second.sum(1)).tolist()


def test_a_float32_network_is_followed_in_float64() -> None:
    net, X = pl.models.dlgn(20, hidden=(64,) * 4, outputs=3, seed=0), torch.randn(6, 20)
    got = paths.top(net, X, k=5, output=2)
    assert got.f.dtype == torch.float64
    assert torch.allclose(got.f.float(), net(X)[:, 2].detach(), rtol=1e-3)


def test_gates_from_a_table_come_with_a_record() -> None:
    net = pl.models.frg(2, hidden=(4, 4), examples=30, seed=0).double()
    X, rows = torch.randn(3, 2, dtype=torch.float64), torch.tensor([20, 3, 3])
    rec = pl.record(net, X, rows=rows, sensitivities=False)
    got = paths.top(net, rec, k=50)
    assert torch.allclose(got.f, net(X, rows=rows)[:, 0].detach(), rtol=1e-12)
    assert paths.count(net, rec) == [int(np.prod([int(b[i].sum()) for b in rec.bits.values()])) for i in range(3)]


@pytest.mark.parametrize("kind", ["relu", "soft", "pwc"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("include_inputs", [False, True])
def test_values_strengths_and_cancellation(kind: str, bias: bool, include_inputs: bool) -> None:
    net, X = network(kind, bias=bias), torch.randn(4, 2, dtype=torch.float64)
    every = table(net, X, 1, include_inputs)
    units, want = torch.tensor(list(every)), torch.stack(list(every.values()), dim=1)
    assert torch.allclose(paths.values(net, X, units, output=1), want, rtol=1e-12, atol=1e-300)
    total = paths.cancellation(net, X, output=1, include_inputs=include_inputs)
    assert torch.allclose(total.size, want.abs().sum(1), rtol=1e-12)
    assert torch.allclose(total.f, want.sum(1), rtol=1e-10)
    check_ratios(total.ratios, want.abs().sum(1), want.sum(1))
    if kind == "pwc" or include_inputs:
        strength = paths.strengths(net, X, units, output=1)
        gates = [torch.cat([g, torch.ones(4, 1)], dim=1) for g in net.gates(X).values()]  # unit −1 is always on
        hidden = units[:, 1:] if include_inputs else units
        made = strength.expand(4, -1)
        for layer, gate in enumerate(gates):
            made = made * gate[:, hidden[:, layer]]
        if include_inputs:
            read = torch.ones_like(X) if kind == "pwc" else X
            made = made * torch.cat([read, torch.ones(4, 1)], dim=1)[:, units[:, 0]]
        assert torch.allclose(made, want, rtol=1e-12, atol=1e-300)


def test_all_paths_add_up_to_the_sum_written_out() -> None:
    net, X = network("soft", bias=True), torch.randn(4, 2, dtype=torch.float64)
    chain = [net.values.linear1, net.values.linear2, net.values.linear3, net.values.output]
    want = path_sum([m.weight for m in chain], list(net.gates(X).values()), X, [m.bias for m in chain])
    got = paths.top(net, X, k=1000, output=1, include_inputs=True)
    assert torch.allclose(got.contributions.sum(1), want[:, 1], rtol=1e-12)


def test_the_list_warns_where_it_misleads() -> None:
    net, X = network("pwc", hidden=(8,) * 4, outputs=1), torch.randn(20, 2, dtype=torch.float64)
    text = repr(paths.top(net, X, k=3))
    assert text.startswith("TopPaths: R² ") and "cancellation" in text.splitlines()[0] and "misleads" in text
    single = network("dln", hidden=(1,), outputs=1)
    assert "misleads" not in repr(paths.top(single, X, k=3))
    assert "undefined" in repr(paths.top(net, X[:1], k=3))
    assert "Σ|v|/|f|" in repr(paths.cancellation(net, X)) and "soft β=4" in repr(paths.top(network("soft"), X, k=3))


def test_rounding_within_the_first_layer_is_no_other_network() -> None:
    net = pl.models.relu(2, (1,))
    with torch.no_grad():
        net.values.linear1.weight.copy_(torch.tensor([[1.0, -1.0001]]))
    x = torch.tensor([[10001.013, 10000.0]])  # in float32 the two terms cancel but for a few digits
    assert paths.top(net, x, k=1).f.item() == pytest.approx(net(x).item(), rel=0.1)
