"""A pickled network comes back whole: the same bits, state, modes, and everything that can be done with it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from twin_architectures import ALL

import pathlens as pl
from pathlens import models
from pathlens.models import GatedNetwork, ResNet, gated_twin
from pathlens.models.tracing import apply_site


def gates_of_two(x: Tensor) -> list[Tensor]:
    return [x[:, :1].expand(-1, 4), x[:, 1:2].expand(-1, 3)]


DENSE = {
    "relu": models.relu,
    "soft_relu": models.soft_relu,
    "dln": models.dln,
    "galu": models.galu,
    "soft_galu": models.soft_galu,
    "gates_only": models.gates_only,
    "dlgn": models.dlgn,
    "dlgn_pwc": lambda *a, **k: models.dlgn(*a, piecewise_constant=True, **k),
    "dlgn_shallow": models.dlgn_shallow,
    "quadratic": models.quadratic,
    "frg": lambda *a, **k: models.frg(*a, examples=7, **k),
    "gdln": lambda *a, **k: models.gdln(*a, gates=gates_of_two, **k),
}


def pickled(net: GatedNetwork) -> GatedNetwork:
    return pickle.loads(pickle.dumps(net))


def saved(net: GatedNetwork) -> GatedNetwork:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_same(net: GatedNetwork, back: GatedNetwork, x: Tensor) -> None:
    """Equal bits going forward and back, in both modes, and equal state afterwards."""
    assert repr(back) == repr(net) and back.site_names == net.site_names
    assert [m.training for m in back.modules()] == [m.training for m in net.modules()]
    assert list(back.state_dict()) == list(net.state_dict())
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in net.parameters()]
    for mode in (False, True):
        results = []
        for n in (net.train(mode), back.train(mode)):
            n.zero_grad()
            with torch.random.fork_rng():
                torch.manual_seed(1)
                f = n(x)
            if f.requires_grad:
                f.square().sum().backward()
            results.append([f, *(p.grad for p in n.parameters()), *n.state_dict().values()])
        for a, b in zip(*results, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    for a, b in zip(net.eval().preactivations(x).values(), back.eval().preactivations(x).values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("send", [pickled, saved])
@pytest.mark.parametrize("kind", DENSE)
def test_dense_networks(kind, send):
    net = DENSE[kind](3, (4, 3), 2, seed=0)
    assert_same(net, send(net), torch.randn(7, 3))


@pytest.mark.parametrize("name", ALL)
def test_twins_of_templates(name):
    example = ALL[name]
    x = torch.randn(6, *example.shape)
    net = gated_twin(example.make(), "dlgn", x[:2], max_pool="average")
    assert_same(net, pickled(net), x)


@pytest.mark.parametrize("kind", ["relu", "soft_galu", "dlgn_pwc"])
@pytest.mark.parametrize("send", [pickled, saved])
def test_a_residual_twin_with_batch_norm(kind, send):
    x = torch.randn(6, 3, 8, 8)
    net = gated_twin(ResNet((1, 1), (4, 8), 3), kind, x[:2], seed=0).train()
    net(x)  # batch statistics of its own
    net.eval()
    assert_same(net, send(net), x)


def test_what_comes_back_is_a_network_like_any_other():
    x = torch.randn(8, 3)
    net = models.dlgn(3, (4, 4), 1, seed=0)
    back = pickled(net)
    first, second = net.with_gate("hard"), back.with_gate("hard")
    assert torch.equal(first(x), second(x))
    assert torch.equal(pickled(copy.deepcopy(back))(x), net(x))
    assert torch.equal(pickled(second)(x), first(x))
    assert torch.equal(pl.kernels.npk(pl.record(second, x)).dense(), pl.kernels.npk(pl.record(first, x)).dense())
    assert torch.equal(back.reinitialise(5)(x), net.reinitialise(5)(x))
    for n in (net, back):
        pl.train(n, (x, x[:, :1]), epochs=2, progress=False)
    assert torch.equal(net(x), back(x))


def test_the_graph_is_the_same_graph():
    net = models.dlgn(3, (4, 3), seed=0)
    ours, theirs = net.values.graph, pickled(net).values.graph
    assert [(n.op, n.name, str(n.args)) for n in ours.nodes] == [(n.op, n.name, str(n.args)) for n in theirs.nodes]
    assert sum(n.target is apply_site for n in theirs.nodes) == 2
    assert type(net.values).__name__ == type(pickled(net).values).__name__ == "ValueNetwork"


def test_tied_weights_stay_tied():
    net = gated_twin(ALL["tied-weights"].make(), "dlgn", torch.randn(2, 5))
    assert len(list(pickled(net).parameters())) == len(list(net.parameters()))


def test_another_process_can_read_it(tmp_path):
    x = torch.randn(5, 3)
    net = models.dlgn(3, (4, 3), seed=0)
    (tmp_path / "net").write_bytes(pickle.dumps((net, x)))
    code = (
        "import pickle, sys, torch; net, x = pickle.load(open(sys.argv[1] + '/net', 'rb')); "
        "torch.save(net(x).detach(), sys.argv[1] + '/f')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert torch.equal(torch.load(tmp_path / "f"), net(x))
