"""Records of gated networks: gradients, gates and layers against autograd, for every kind of the papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradient_oracle import check_gates, check_record, jacobians
from torch import Tensor, nn

from pathlens import gated_twin, models, record
from pathlens.models import GatedNetwork

# torch's own remark on even kernels with padding="same"
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
D, HIDDEN, N = 3, (5, 4), 6


def halves(x: Tensor) -> list[Tensor]:
    return [x @ torch.linspace(-1, 1, D * w, dtype=x.dtype).reshape(D, w) for w in HIDDEN]


Maker = Callable[..., GatedNetwork]
KINDS: dict[str, Maker] = {
    "relu": models.relu,
    "soft_relu": models.soft_relu,
    "dln": models.dln,
    "galu": models.galu,
    "galu dependent": lambda *a, **k: models.galu(*a, dependent=True, **k),
    "flnpf": lambda d, h, c, **k: models.flnpf(d, h, c, checkpoint=models.relu(d, h, c, bias=k["bias"], seed=5), **k),
    "soft_galu": models.soft_galu,
    "soft_galu soft units": lambda *a, **k: models.soft_galu(*a, gate_activation="soft", **k),
    "gates_only": models.gates_only,
    "frg": lambda *a, **k: models.frg(*a, examples=N, **k),
    "dlgn": models.dlgn,
    "dlgn hard": lambda *a, **k: models.dlgn(*a, gate="hard", **k),
    "dlgn straight-through": lambda *a, **k: models.dlgn(*a, gate="straight_through", **k),
    "dlgn pwc": lambda *a, **k: models.dlgn(*a, piecewise_constant=True, **k),
    "dlgn frozen": lambda *a, **k: models.dlgn(*a, frozen=True, **k),
    "dlgn shallow": models.dlgn_shallow,
    "quadratic": models.quadratic,
    "gdln": lambda *a, **k: models.gdln(*a, gates=halves, **k),
}


def make(kind: str, c: int = 3, bias: bool = True, seed: int = 0) -> GatedNetwork:
    return KINDS[kind](D, HIDDEN, c, bias=bias, seed=seed).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_fully_connected_kind(kind: str, bias: bool, c: int, x: Tensor) -> None:
    net = make(kind, c, bias)
    rec = record(net, x)
    # a straight-through gate computes a hard gate: that is what must be recorded
    truth = net.with_gate("hard") if "straight" in kind else net
    rows = torch.arange(N) if kind == "frg" else None
    check_record(truth, x, rec, rows)
    check_gates(truth, x, rec, rows)
    assert {layer.bias for layer in rec.layers} == {bias} if kind != "quadratic" else True


def template(name: str) -> tuple[nn.Module, Tensor]:
    """A convolutional or residual template and three inputs."""
    torch.manual_seed(0)
    if name == "1-D circular":
        return models.CircularConvNet(6, (2, 3, 4), kernel=3, pool="flatten", outputs=2), torch.randn(3, 2, 6)
    nets = {
        "padding same, even kernel": nn.Sequential(
            nn.Conv2d(2, 3, (2, 4), padding="same"),
            nn.ReLU(),
            nn.Conv2d(3, 2, 3, padding="same"),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
        "stride 2, numeric padding": nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 2, stride=(1, 2), padding=(1, 0)),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        "dilation": nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.Conv2d(3, 3, 2, dilation=(1, 3)),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(45, 1),
        ),
        "grouped": nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2, groups=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(100, 2),
        ),
        "dense after flatten": models.vconv(2, channels=(2, 3, 3), dense=(5,), size=6, bias=True),
        "global average": models.gconv(3, channels=(2, 3, 3), dense=(4,), bias=True),
        "residual with batch-norm": models.ResNet((1, 1), (3, 4), outputs=2, channels=2),
        "leaky": nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.LeakyReLU(0.2), nn.Linear(5, 2)),
        "reused convolution": Reused(),
        "scaled output": Scaled(),
    }
    return nets[name], torch.randn(3, 2, 6, 6)


class Scaled(nn.Module):
    """The last layer's result is not the output."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.relu, self.output = nn.Linear(72, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.output(self.relu(self.hidden(x.flatten(1))))


class Reused(nn.Module):
    """One convolution used twice, one ReLU module used twice, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(inplace=True)
        self.output = nn.Linear(72, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.conv(x))
        h = self.relu(self.conv(h)) + h
        return self.output(torch.flatten(h, 1))


TEMPLATES = [
    "padding same, even kernel",
    "stride 2, numeric padding",
    "dilation",
    "grouped",
    "dense after flatten",
    "global average",
    "residual with batch-norm",
    "leaky",
    "reused convolution",
    "scaled output",
    "1-D circular",
]


def settled(net: nn.Module, example: Tensor) -> nn.Module:
    """Batch-norm with statistics and affine parameters that are not the trivial ones."""
    generator = torch.Generator().manual_seed(2)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.running_var, m.weight, m.bias):
                with torch.no_grad():
                    t.copy_(torch.rand(t.shape, generator=generator) + 0.5)
    return net.eval().double()


@pytest.mark.parametrize("kind", ["relu", "galu", "dlgn", "dlgn_pwc", "soft_galu"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_convolutional_twins(name: str, kind: str) -> None:
    net, example = template(name)
    twin = settled(gated_twin(net, kind, example, seed=0), example)
    assert isinstance(twin, GatedNetwork)
    x = example.double()
    rec = record(twin, x)
    check_record(twin, x, rec)
    check_gates(twin, x, rec)


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_module_has_the_sites_and_bits_of_its_relu_twin(name: str) -> None:
    net, example = template(name)
    settled(net, example)
    x = example.double()
    twin = gated_twin(net, "relu", x).eval()
    plain, gated = record(net, x), record(twin, x)
    assert plain.sites == gated.sites
    for site in plain.sites:
        assert torch.equal(plain.bits[site], gated.bits[site])
        assert torch.equal(plain.gates(site), gated.gates(site))
    check_record(net, x, plain)


def test_parts_and_frozen_layers(x: Tensor) -> None:
    galu, dlgn, relu = (record(make(k), x) for k in ("galu", "dlgn", "relu"))
    assert {(layer.part, layer.trainable) for layer in galu.layers} == {("gate", False), ("value", True)}
    assert {(layer.part, layer.trainable) for layer in dlgn.layers} == {("gate", True), ("value", True)}
    assert {(layer.part, layer.trainable) for layer in relu.layers} == {("shared", True)}
    only = record(make("gates_only"), x)
    assert {(layer.part, layer.trainable) for layer in only.layers} == {("gate", True), ("value", False)}
    assert galu.untracked == ()  # frozen parameters are nobody's business


def test_the_last_layer_is_not_stored_and_hard_gates_have_no_influence(x: Tensor) -> None:
    rec = record(make("galu"), x)
    assert [layer.name for layer in rec.layers if layer.identity] == ["values.output"]
    assert set(rec.sensitivity) == {"values.linear1", "values.linear2"}
    assert torch.equal(rec.sensitivities("values.output", 1)[4], torch.tensor([[0.0, 1.0, 0.0]]).double())
    zeros = rec.sensitivities("source.network.linear1", 0)
    assert zeros.shape == (N, 1, HIDDEN[0]) and not zeros.any()


def test_straight_through_gates_leave_no_made_up_gradient(x: Tensor) -> None:
    net = make("dlgn straight-through")
    surrogate = jacobians(net, x)["source.network.linear1.weight"]
    assert surrogate.abs().max() > 1e-3  # autograd itself does see one
    rec = record(net, x)
    assert not rec.sensitivities("source.network.linear1", 0).any()
    assert rec.soft == {} and rec.gate_label == "hard"
    assert net.gate.label.startswith("hard (straight-through")  # the live network keeps its gate


def test_batch_norm_parameters_are_untracked_by_name() -> None:
    net, example = template("residual with batch-norm")
    rec = record(settled(net, example), example.double())
    assert set(rec.untracked) == {k for k, _ in net.named_parameters() if "bn" in k or "shortcut.1" in k}


def test_soft_gates_are_kept_beside_their_bits(x: Tensor) -> None:
    rec = record(make("dlgn"), x)
    assert rec.gate_label == "soft β=4" and set(rec.soft) == set(rec.sites)
    for site in rec.sites:
        assert torch.equal(rec.soft[site] > 0.5, rec.bits[site])
    assert all(bits.all() for bits in record(make("dln"), x).bits.values())


@pytest.mark.parametrize("kind", ["relu", "galu", "dlgn"])
def test_chosen_outputs(kind: str, x: Tensor) -> None:
    net = make(kind)
    every, some, one = record(net, x), record(net, x, outputs=[2, 0]), record(net, x, outputs=1)
    assert some.outputs == 2 and some.kept == (2, 0) and torch.equal(some.f, every.f[:, [2, 0]])
    for layer in every.layers:
        assert torch.equal(some.sensitivities(layer.name, 0), every.sensitivities(layer.name, 2))
        assert torch.equal(
            some.rows(1, 3, output=1).sensitivities(layer.name, 0), every.sensitivities(layer.name, 0)[1:3]
        )
        assert torch.equal(one.sensitivities(layer.name, 0), every.sensitivities(layer.name, 1))
