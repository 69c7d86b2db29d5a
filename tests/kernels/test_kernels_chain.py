"""A record says whether its network is a chain; where it is not, kernels that need the wiring refuse the record."""

import pytest
import torch
from torch import nn

import pathlens as pl
from pathlens.errors import RecordError


class EarlyShortcut(nn.Module):
    """The shortcut is added before the gate: widths and zeros look just like a chain's."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.out(torch.relu(self.b(h) + h))


def chain():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.Linear(4, 2))


X = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["plain", "relu", "soft_relu", "galu", "dln", "dlgn", "dlgn_pwc"])
def test_chains_are_told_from_networks_with_a_shortcut(kind, tmp_path):
    straight, bent = chain().double(), EarlyShortcut().double()
    if kind != "plain":
        straight, bent = (pl.gated_twin(net, kind, X[:2], seed=1) for net in (straight, bent))
    rec = pl.record(straight, X)
    assert rec.chain and rec.rows(2, 5).chain
    assert not pl.record(bent, X).chain
    rec.save(tmp_path / "rec")
    assert pl.Record.load(tmp_path / "rec").chain


def test_a_record_with_a_shortcut_is_refused_and_the_network_is_not():
    net = pl.gated_twin(EarlyShortcut().double(), "relu", X[:2])
    for kernel in (pl.kernels.overlap, pl.kernels.npk):
        with pytest.raises(RecordError, match=r"shortcut.*net, X"):
            kernel(pl.record(net, X))
        with pytest.raises(RecordError, match=r'shortcut.*net, X.*gated_twin\(net, "relu", example='):
            kernel(pl.record(EarlyShortcut().double(), X))
    # paths through the shortcut are counted: those of the chain and those that pass the second layer by
    first, second = (g.double() for g in pl.record(net, X).bits.values())
    counts = (first @ first.T) * (second @ second.T) + (first * second) @ (first * second).T
    assert torch.equal(pl.kernels.overlap(net, X).dense(), counts)


class Ending(nn.Module):
    """A chain whose last layer does not make the output alone."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        f = self.b(torch.relu(self.a(x)))
        if self.how == "joined":
            return torch.cat([f, x], 1)
        if self.how == "repeated":
            return torch.cat([f, f], 1)
        if self.how == "shortcut":
            f += x
            return f
        if self.how == "weights":
            return f @ self.w.T
        return {"scaled": 2 * f, "softmax": f.softmax(1), "nothing": f}[self.how]


@pytest.mark.parametrize("kind", ["plain", "relu", "dlgn"])
@pytest.mark.parametrize("how", ["joined", "repeated", "shortcut", "weights", "scaled", "softmax", "nothing"])
def test_a_chain_ends_in_its_last_layer(how, kind):
    """What is added to the output, or joined with it, comes by other paths than those of the last layer."""
    net = Ending("scaled" if how == "softmax" and kind != "plain" else how).double()  # a twin has no softmax
    if kind != "plain":
        net = pl.gated_twin(net, kind, X[:2], gates_from="dependent" if kind == "dlgn" else None)
    rec = pl.record(net, X)
    if how in ("scaled", "softmax", "nothing"):
        assert rec.chain and pl.kernels.overlap(rec).shape == (9, 9)
        return
    for ask in (pl.kernels.overlap, pl.kernels.npk):
        with pytest.raises(RecordError, match="wired"):
            ask(rec)
    with pytest.raises(RecordError, match="not a chain"):
        pl.paths.top(net, X)


class GateBehindTwoLayers(nn.Module):
    """One gate and two layers, as a chain has them, but not between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
        nn.init.constant_(self.b.bias, 100.0)  # all gates are open, and do not show where they stand

    def forward(self, x):
        return torch.relu(self.b(self.a(x)))


@pytest.mark.parametrize("kind", ["plain", "relu", "dln"])
def test_open_gates_are_told_from_gates_between_layers(kind):
    net = GateBehindTwoLayers().double()
    rec = pl.record(net if kind == "plain" else pl.gated_twin(net, kind, X[:2]), X)
    assert bool(rec.bits["relu@0"].all()) and not rec.chain


class LateShortcut(EarlyShortcut):
    """Added behind the gate: nothing of it is seen where the first layer lets nothing through."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.out(torch.relu(self.b(h)) + h)


def unbiased(net):
    for p in net.parameters():
        if p.ndim == 1:
            nn.init.zeros_(p)
    return net


@pytest.mark.parametrize("kind", ["plain", "relu", "dlgn", "dln"])
def test_rows_of_zeros_do_not_hide_a_shortcut(kind):
    zeros = torch.zeros(3, 3)
    for net, straight in ((unbiased(chain()), True), (unbiased(LateShortcut()), False)):
        net = net if kind == "plain" else pl.gated_twin(net, kind, example=zeros + 1)
        assert pl.record(net, zeros).chain is straight
        assert pl.record(net, torch.randn(40, 3)).chain is straight


def test_all_gates_open_at_zero_count_the_shortcut_too():
    net = pl.gated_twin(unbiased(LateShortcut()), "dln", example=torch.ones(2, 3))
    at_zero, elsewhere = pl.paths.count(net, torch.zeros(1, 3)), pl.paths.count(net, torch.ones(1, 3))
    assert at_zero == elsewhere == [4 * 4 + 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_norm_that_has_seen_nothing_is_no_chain_either(dtype):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    assert not pl.record(net.eval().to(dtype), torch.randn(5, 2, dtype=dtype)).chain  # it divides by √(1 + ε)
