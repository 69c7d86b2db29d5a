"""Tangent kernels of layers with many positions: convolutions, tokens, reused layers; blocks and budgets."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from tiny_networks import ConvNet, check_ntk, settle
from torch import nn

from pathlens import models
from pathlens.errors import BudgetError
from pathlens.kernels import ntk, tangent
from pathlens.kernels.convolution import BlockTangent, plan_layer
from pathlens.kernels.sources import Sides
from pathlens.recording import record
from pathlens.records import Layer

OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "flatten, no bias": {"pool": "flatten", "bias": False},
    "stride": {"stride": 2},
    "circular": {"mode": "circular"},
    "dilation": {"dilation": 2, "padding": 2},
    "shortcut": {"shortcut": True, "channels": (2, 3, 3)},
    "batch-norm": {"norm": True, "shortcut": True, "channels": (2, 3, 3)},
    "groups": {"groups": 3, "channels": (2, 3, 3)},
    "reused": {"reuse": True, "channels": (2, 3, 3)},
}


def build(name: str, kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    options = {"channels": (2, 3, 2), "dims": 2, "size": 5, "dense": 4, "outputs": 2} | OPTIONS[name]
    template = settle(ConvNet(**options))
    X, Y = torch.randn(4, 2, 5, 5).double(), torch.randn(3, 2, 5, 5).double()
    net = template if kind == "plain" else settle(models.gated_twin(template, kind, X[:2], seed=3))
    return net, X, Y


@pytest.mark.parametrize("kind", ["plain", "relu", "soft_galu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_convolutional_networks(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, X, Y = build(name, kind)
    stream, other = record(net, X, stream=True), record(net, Y, stream=True)
    for which in ("trace", "full", 1):
        check_ntk(ntk(net, X, outputs=which), net, X, outputs=which)
        check_ntk(ntk(net, X, Y=Y, outputs=which), net, X, Y, outputs=which)
        # the same with gradients made piece by piece from a stream
        check_ntk(ntk(net, stream, outputs=which, max_bytes=400_000), net, X, outputs=which)
        # and in blocks, with sensitivities recomputed for one output at a time
        with monkeypatch.context() as patch:
            patch.setattr(tangent, "HELD_SHARE", 0.0)
            blocks = ntk(net, stream, outputs=which, max_bytes=300_000)
        assert "ntk blocks" in repr(blocks)
        check_ntk(blocks, net, X, outputs=which)
    check_ntk(ntk(net, stream, Y=other, outputs="full"), net, X, Y, outputs="full")


@pytest.mark.parametrize("part,prefix", [("value", "values."), ("feature", "source.")])
def test_parts(part: str, prefix: str) -> None:
    net, X, _ = build("batch-norm", "soft_galu")
    names = [k for k, _ in net.named_parameters() if k.startswith(prefix)]
    check_ntk(ntk(net, X, part=part), net, X, names=names)
    check_ntk(ntk(net, record(net, X, stream=True), part=part), net, X, names=names)
    layer = f"{names[0].removesuffix('.weight')}"
    check_ntk(ntk(record(net, X), layer=layer), net, X, names=[f"{layer}.weight", f"{layer}.bias"])


def test_tokens() -> None:
    """A linear layer on (n, T, d) is a layer with T positions: pairwise where T is small."""
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 15), nn.Flatten(), nn.Linear(30, 2)).double()
    X = torch.randn(6, 2, 2).double()
    rec = record(net, X)
    assert [plan_layer(a, rec.rows(0, 1), 6).explicit for a in rec.layers] == [True, False, False]
    for which in ("trace", "full", 0):
        check_ntk(ntk(rec, outputs=which), net, X, outputs=which)
        check_ntk(ntk(record(net, X, stream=True), outputs=which), net, X, outputs=which)


def test_the_cheaper_form_is_chosen_by_operations() -> None:
    def explicit(positions: int, inputs: int, outputs: int, n: int) -> bool:
        layer = Layer("w", "value", True, inputs, outputs, (None,))

        class Stub:
            def sensitivities(self, name: str, output: int) -> torch.Tensor:
                return torch.empty(1, positions, outputs)

        stub: Any = Stub()
        pairwise = 2 * n**2 * positions**2 * (inputs + outputs)
        gradients = 2 * n * positions * inputs * outputs + 2 * n**2 * inputs * outputs
        chosen = plan_layer(layer, stub, n).explicit
        assert positions == 1 or chosen == (gradients < pairwise)
        return chosen

    assert explicit(256, 576, 64, 64)
    assert explicit(16, 1152, 128, 64)  # the measured crossover for 128 → 128 channels is near 16 positions
    assert not explicit(4, 1152, 128, 64)
    assert not explicit(16, 4608, 512, 64)
    assert not explicit(1, 3, 1, 10)
    for positions in (2, 3, 5, 17, 100):
        for inputs in (1, 9, 300):
            explicit(positions, inputs, 7, 12)


def test_selections_and_products_of_blocks() -> None:
    net, X, _ = build("average", "relu")
    K = ntk(net, record(net, X, stream=True), outputs="full")
    dense = ntk(net, X, outputs="full").dense()
    assert torch.allclose(K[[5, 0, 0], 2:7].dense(), dense[[5, 0, 0], 2:7], rtol=1e-10, atol=1e-14)
    v = torch.randn(8).double()
    assert torch.allclose(K @ v, dense @ v, rtol=1e-10, atol=1e-14)
    assert K[3, 6] == pytest.approx(float(dense[3, 6]), rel=1e-10)


@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_many_blocks(outputs: str) -> None:
    net, _, _ = build("average", "relu")
    X, Y = torch.randn(7, 2, 5, 5).double(), torch.randn(5, 2, 5, 5).double()
    rec, other = record(net, X), record(net, Y)
    plans = [plan_layer(a, rec.rows(0, 1), 7) for a in rec.layers]
    edges = set()
    for budget in (24_000, 40_000, 10**9):
        for cols in (None, other):
            blocks = BlockTangent(Sides(rec, cols, net), plans, None, outputs, budget)
            edges.add(blocks.edge)
            check_ntk(blocks, net, X, None if cols is None else Y, outputs=outputs)
    assert min(edges) < 5 and max(edges) > 7, edges  # two blocks and one


def test_a_budget_for_less_than_one_row_is_refused() -> None:
    net, X, _ = build("average", "relu")
    with pytest.raises(BudgetError, match="budget is"):
        ntk(net, X, max_bytes=20_000)
    with pytest.raises(BudgetError, match="one row and one column"):
        ntk(record(net, X, stream=True), max_bytes=20_000)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux to read the peak of memory")
def test_the_budget_is_kept() -> None:
    """The record would take 100 MiB, patches and gradients twice that; the kernel is computed in 32 MiB."""
    script = """
        import torch
        from pathlens import models
        from pathlens.kernels import ntk

        def peak():
            line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
            return int(line.split()[1]) / 1024

        torch.set_num_threads(1)
        torch.manual_seed(0)
        template = models.gconv(10, channels=(3, 32, 32), dense=(16,), bias=True)
        net = models.gated_twin(template, "relu", torch.randn(2, 3, 16, 16))
        X = torch.randn(128, 3, 16, 16)
        ntk(net, X[:4], max_bytes=32 * 2**20).dense()  # libraries warm up
        before = peak()
        K = ntk(net, X, Y=X[:40], max_bytes=32 * 2**20).dense()
        print(peak() - before)
        want = ntk(net, X[:9]).dense()
        assert torch.allclose(K[:9, :9], want, rtol=1e-3, atol=1e-4 * float(want.max())), (K[:9, :9] - want).abs().max()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32 + 32, done.stdout


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 3}, {"padding": (1, 0), "stride": 4}])
@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_a_convolution_at_one_position_that_does_not_read_the_whole_image(options: Any, outputs: Any) -> None:
    torch.manual_seed(0)
    k = 2 if "dilation" in options else 3
    net = nn.Sequential(nn.Conv2d(2, 3, k, **options), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2)).double()
    assert net[0](torch.zeros(1, 2, 4, 4).double()).shape[2:] == (1, 1)
    X = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    check_ntk(ntk(net, X, outputs=outputs), net, X, outputs=outputs)
