"""Tangent kernels of fully connected networks and of any module, against Jacobians by autograd."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import check_ntk, settle
from torch import Tensor, nn

from pathlens import models
from pathlens.errors import DTypeError, NotFiniteError, OptionError, PathlensError, RecordError, UnknownNameError
from pathlens.kernels import npk, ntk, overlap
from pathlens.models import GatedNetwork
from pathlens.recording import record
from pathlens.testing.jacobians import kernel_of_jacobians, network_jacobian
from pathlens.testing.tolerance import assert_kernel_close

NETWORKS: dict[str, Any] = {
    "relu": models.relu,
    "soft_relu": models.soft_relu,
    "dln": models.dln,
    "galu": models.galu,
    "soft_galu": models.soft_galu,
    "gates_only": models.gates_only,
    "dlgn": models.dlgn,
    "dlgn_pwc": lambda *a, **k: models.dlgn(*a, piecewise_constant=True, **k),
    "dlgn_frozen": lambda *a, **k: models.dlgn(*a, frozen=True, **k),
    "dlgn_hard": lambda *a, **k: models.dlgn(*a, gate="hard", **k),
    "dlgn_shallow": models.dlgn_shallow,
    "quadratic": lambda *a, **k: models.quadratic(*a, rank=2, **k),
}


def make(name: str, outputs: int = 3, bias: bool = True) -> GatedNetwork:
    net: GatedNetwork = NETWORKS[name](3, (5, 4), outputs, bias=bias, seed=1)
    return net.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind(name: str, outputs: int, bias: bool) -> None:
    net = make(name, outputs, bias)
    X, Y = torch.randn(6, 3).double(), torch.randn(4, 3).double()
    for which in ("trace", "full", outputs - 1):
        check_ntk(ntk(net, X, outputs=which), net, X, outputs=which)
        check_ntk(ntk(net, X, Y=Y, outputs=which), net, X, Y, outputs=which)


@pytest.mark.parametrize("name", [k for k in NETWORKS if k not in ("relu", "soft_relu", "dln")])
def test_value_and_feature_parts(name: str) -> None:
    net, X = make(name), torch.randn(6, 3).double()
    names = [k for k, _ in net.named_parameters()]
    values, gates = ([k for k in names if k.startswith(p)] for p in ("values.", "source."))
    hard = net.gate.hard
    for which in ("trace", "full", 2):
        check_ntk(ntk(net, X, part="value", frozen=True, outputs=which), net, X, names=values, outputs=which)
        K = ntk(net, X, part="feature", frozen=True, outputs=which)
        if gates:
            check_ntk(K, net, X, names=gates, outputs=which, zero=hard)
    assert bool((ntk(net, X, part="feature", frozen=True).dense() == 0).all()) == hard


def test_parts_of_a_record_add_up() -> None:
    net, X = make("soft_galu"), torch.randn(5, 3).double()
    rec = record(net, X)
    both = ntk(rec, part="value").dense() + ntk(rec, part="feature").dense()
    K = ntk(rec).dense()
    assert_kernel_close(both, K, K.diagonal())


def test_shared_soft_weights_have_cross_terms() -> None:
    """f(θ, θ) of a soft-ReLU network: value and feature parts are those of f(θ_v, θ_g) at θ_v = θ_g = θ."""
    net, X = make("soft_relu"), torch.randn(5, 3).double()
    apart = models.soft_galu(3, (5, 4), 3, gate_activation="soft", bias=True, seed=0).double()
    apart.values.load_state_dict(net.values.state_dict())
    inner = apart.source.network  # type: ignore[union-attr]
    inner.load_state_dict({k: net.values.state_dict()[k] for k in inner.state_dict()})
    assert torch.allclose(apart(X), net(X), rtol=1e-12)
    for part in ("value", "feature"):
        want = ntk(apart, X, part=part).dense()
        assert_kernel_close(ntk(net, X, part=part).dense(), want, want.diagonal())
    K, V, G = (ntk(net, X, part=part).dense() for part in ("all", "value", "feature"))
    assert float((K - V - G).abs().max()) > 1e-3 * float(K.max())  # the cross terms
    with pytest.raises(RecordError, match="sensitivities are sums of both parts"):
        ntk(record(net, X), part="value")


def test_shared_hard_weights_have_no_feature_part() -> None:
    net, X = make("relu"), torch.randn(5, 3).double()
    assert torch.equal(ntk(net, X, part="value").dense(), ntk(net, X).dense())
    with pytest.raises(RecordError, match="hard gates have no gradient"):
        ntk(net, X, part="feature")


def test_layers() -> None:
    net, X = make("dlgn"), torch.randn(5, 3).double()
    names = [k for k, _ in net.named_parameters()]
    for layer in ("values.linear1", "values.output", "source.network.linear2"):
        chosen = [k for k in names if k.startswith(layer + ".")]
        check_ntk(ntk(net, X, layer=layer), net, X, names=chosen)
        check_ntk(ntk(record(net, X), layer=layer, outputs="full"), net, X, names=chosen, outputs="full")
    pair = ["values.linear1", "source.network.linear1"]
    check_ntk(ntk(net, X, layer=pair), net, X, names=[k for k in names if ".linear1." in k])
    total = sum(ntk(net, X, layer=a.name).dense() for a in record(net, X).layers)
    K = ntk(net, X).dense()
    assert_kernel_close(total, K, K.diagonal())
    with pytest.raises(UnknownNameError, match=r"Did you mean 'values\.linear1'"):
        ntk(net, X, layer="value.linear1")


def test_frozen_parameters_are_left_out_unless_asked_for() -> None:
    net, X = make("dlgn_frozen"), torch.randn(5, 3).double()
    values = [k for k, _ in net.named_parameters() if k.startswith("values.")]
    check_ntk(ntk(net, X), net, X, names=values)
    check_ntk(ntk(net, X, frozen=True), net, X, names=[k for k, _ in net.named_parameters()])
    with pytest.raises(RecordError, match="frozen=True"):
        ntk(net, X, part="feature")
    gate = "source.network.linear1"
    check_ntk(ntk(net, X, layer=gate), net, X, names=[f"{gate}.weight", f"{gate}.bias"])
    half = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    half[0].bias.requires_grad_(False)
    half[2].weight.requires_grad_(False)
    check_ntk(ntk(half, X), half, X, names=["0.weight", "2.bias"])
    check_ntk(ntk(half, X, frozen=True), half, X, names=[k for k, _ in half.named_parameters()])
    assert not half[0].bias.requires_grad  # the user's module is not touched


def test_straight_through_gates_are_hard() -> None:
    net = models.dlgn(3, (5, 4), 2, gate="straight_through", seed=0).double()
    X = torch.randn(4, 3).double()
    hard = net.with_gate("hard")
    check_ntk(ntk(net, X), hard, X, names=[k for k, _ in hard.named_parameters()])


def test_streams_equal_records() -> None:
    net, X, Y = make("dlgn"), torch.randn(13, 3).double(), torch.randn(7, 3).double()
    stream, other = record(net, X, stream=True), record(net, Y, stream=True)
    for which in ("trace", "full", 1):
        K = ntk(stream, outputs=which)
        check_ntk(K, net, X, outputs=which)
        check_ntk(K.with_options(max_bytes=60_000), net, X, outputs=which)
        check_ntk(ntk(stream, Y=other, outputs=which), net, X, Y, outputs=which)
        check_ntk(ntk(stream, Y=record(net, Y), outputs=which), net, X, Y, outputs=which)
    v = torch.randn(13, 2).double()
    assert torch.allclose(ntk(stream) @ v, ntk(net, X).dense() @ v, rtol=1e-11)


def test_a_lazy_kernel_does_not_follow_later_training() -> None:
    net, X = settle(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))), torch.randn(5, 3)
    X = X.double()
    kernels = [ntk(net, X), ntk(net, record(net, X, stream=True))]
    before = [K.dense() for K in kernels]
    for p in net.parameters():
        p.data.mul_(2)
    for K, want in zip(kernels, before):
        assert torch.equal(K.dense(), want)


def test_one_recorded_output() -> None:
    net, X = make("dlgn", 4), torch.randn(5, 3).double()
    rec = record(net, X, outputs=[3, 1])
    J = network_jacobian(net, X)[:, [3, 1]]
    for which in ("trace", "full", 1):
        want = kernel_of_jacobians(J, None, which)
        assert_kernel_close(ntk(rec, outputs=which).dense(), want, want.diagonal())


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(NETWORKS)),
    st.integers(1, 7),
    st.integers(1, 3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_any_sizes(name: str, n: int, outputs: int, hidden: list[int], seed: int) -> None:
    net = NETWORKS[name](2, tuple(hidden), outputs, seed=seed).double()
    X = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double()
    check_ntk(ntk(net, X, outputs="full"), net, X, outputs="full", zero=True)


def test_twenty_layers_of_width_500() -> None:
    """Signals shrink by many orders of magnitude; the ratios of the kernel stay right in float32."""
    net, X = models.dlgn(4, hidden=(500,) * 20, seed=0), torch.randn(5, 4)
    K = ntk(net, X, part="value").normalised().dense()
    want = ntk(net.double(), X.double(), part="value").normalised().dense()
    assert torch.isfinite(K).all() and float(K.diagonal().min()) > 0
    assert float(((K - want).abs() / (want.diagonal()[:, None] * want.diagonal()).sqrt()).max()) < 1e-4
    sizes = [float(h[0].norm()) for h in record(net, X.double()).layer_inputs["values.output"]]  # type: ignore[union-attr]
    assert sizes[0] < 1e-6  # they do shrink: the test tests something
    J = network_jacobian(net, X[:2].double(), ["values.linear10.weight"])
    brute = kernel_of_jacobians(J)
    got = ntk(net, X[:2].double(), layer="values.linear10").dense()
    assert_kernel_close(got, brute, brute.diagonal())


# --- any module ----------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(self.enter(x) + self.place).mean(1))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x).tanh() @ self.a.weight)[:, :2]


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.out = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.w, self.b).sigmoid()).squeeze(1)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(6, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.step(torch.cat([x, h], 1)).tanh()
        return self.out(h)


class _Inplace(nn.Module):
    """vmap does not take it, so that gradients come one example at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.rand(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().sum()) > 1e9:  # control flow that depends on the data
            return self.a(x)
        return self.a(x * self.scale)


class _Scaled(nn.Module):
    """A residual branch that begins at nothing, and a temperature: parameters that are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.branch, self.temperature = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.branch * torch.relu(self.a(x))) / self.temperature


MODULES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "attention": (_Attention, (5, 3)),
    "tied weights": (_Tied, (3,)),
    "functional": (_Functional, (3,)),
    "recurrent": (_Recurrent, (3,)),
    "data-dependent": (_Inplace, (3,)),
    "single numbers": (_Scaled, (3,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_any_module(name: str) -> None:
    cls, shape = MODULES[name]
    net, X, Y = cls().double().eval(), torch.randn(4, *shape).double(), torch.randn(3, *shape).double()
    for which in ("trace", "full", 0):
        check_ntk(ntk(net, X, outputs=which), net, X, outputs=which)
        check_ntk(ntk(net, X, Y=Y, outputs=which), net, X, Y, outputs=which)


def test_layer_norm_and_leaky_units() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    X = torch.randn(5, 3).double()
    check_ntk(ntk(net, X), net, X)
    check_ntk(ntk(net, X, layer="2.weight"), net, X, names=["2.weight"])


def test_batch_norm_of_gated_networks() -> None:
    template = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    X = torch.randn(5, 3).double()
    net = settle(models.gated_twin(settle(template), "dlgn", X[:2], seed=0))
    assert isinstance(net, GatedNetwork)
    names = [k for k, _ in net.named_parameters()]
    check_ntk(ntk(net, X), net, X)
    for part, prefix in (("value", "values."), ("feature", "source.")):
        check_ntk(ntk(net, X, part=part), net, X, names=[k for k in names if k.startswith(prefix)])
    with pytest.raises(RecordError, match="a record does not contain"):
        ntk(record(net, X))
    check_ntk(ntk(record(net, X), layer="values.0"), net, X, names=["values.0.weight", "values.0.bias"])


# --- what is refused -----------------------------------------------------------------------------------------------


def test_bad_input() -> None:
    net, X = models.relu(2, hidden=(3,), outputs=2, seed=0), torch.randn(4, 2)
    rec = record(net, X)
    cases: list[tuple[type[PathlensError], str, Any]] = [
        (UnknownNameError, "part of the tangent kernel", lambda: ntk(net, X, part="values")),
        (OptionError, "'trace', 'full'", lambda: ntk(net, X, outputs="sum")),
        (OptionError, "outputs=2, but the network has outputs 0 to 1", lambda: ntk(rec, outputs=2)),
        (OptionError, "without inputs", lambda: ntk(net)),
        (OptionError, "together with X", lambda: ntk(rec, X)),
        (OptionError, "expected a Record", lambda: ntk(X)),
        (RecordError, "without a backward pass", lambda: ntk(record(net, X, sensitivities=False))),
        (RecordError, "same network", lambda: ntk(rec, Y=record(models.relu(2, hidden=(5,), outputs=2), X))),
        (DTypeError, "Y is torch.float64", lambda: ntk(rec, Y=record(net.double(), X.double()))),
        (NotFiniteError, "NaN", lambda: ntk(net.float(), X / 0)),
        (DTypeError, "float64", lambda: ntk(net.float(), X.double())),
        (RecordError, "eval", lambda: ntk(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), X)),
        (RecordError, "no gates", lambda: ntk(nn.Linear(2, 1), X, part="value")),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.output = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.leaky_relu(self.hidden(self.words(x).mean(1)), 0.3))


@pytest.mark.parametrize("outputs", ["trace", "full", 1])
def test_whole_numbers_stay_whole_for_an_embedding(outputs: str | int) -> None:
    torch.manual_seed(0)
    net, X = _Words().double(), torch.randint(0, 7, (9, 3))
    check_ntk(ntk(net, X, outputs=outputs), net, X, outputs=outputs)
    check_ntk(ntk(net, X, outputs=outputs, Y=X[:4]), net, X, X[:4], outputs=outputs)
    check_ntk(ntk(net, X.numpy(), outputs=outputs, max_bytes=200_000), net, X, outputs=outputs)


def test_outputs_and_numbers_of_eigenvalues_may_be_numpy_s() -> None:
    net, X = models.relu(2, hidden=(4,), outputs=2, seed=0), torch.randn(5, 2)
    one = np.int64(1)
    assert torch.equal(ntk(net, X, outputs=one).dense(), ntk(net, X, outputs=1).dense())
    assert torch.equal(record(net, X, outputs=one).f, record(net, X, outputs=1).f)
    assert ntk(net, X).eigsh(one).values.shape == (1,)


@pytest.mark.parametrize("kernel", [overlap, npk, ntk])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_with_a_remedy(kernel: Any, dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    X = torch.randn(5, 3)
    for net in (plain, models.dlgn(3, (4,), 2, seed=0).to(dtype)):
        rec = record(net, X.to(dtype), stream=False)
        assert rec.f.dtype == dtype  # a record has the network's own numbers
        for taken in ((net, X.to(dtype)), (rec,), (record(net, X.to(dtype), stream=True),)):
            with pytest.raises(DTypeError, match=rf"computes in {dtype}, expected float32 or .*net\)\.float\(\)"):
                kernel(*taken)
        assert kernel(copy.deepcopy(net).float(), X).dtype == torch.float32
