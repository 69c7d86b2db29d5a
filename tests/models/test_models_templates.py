"""Templates against their formulas, written out as loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.models import (
    CircularConvNet,
    LocalisationNet,
    ResNet,
    conv5,
    gated_twin,
    gconv,
    mlp,
    resnet34,
    resnet110,
    vconv,
)

# --- localisation ------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "erf": lambda h: math.erf(h / math.sqrt(2)),
    "sigmoid": lambda h: 1 / (1 + math.exp(-h)),
    "relu": lambda h: max(h, 0.0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("second", ["mean", "trainable"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_localisation_is_its_formula(activation: str, second: str, bias: bool) -> None:
    net = LocalisationNet(4, 3, activation, second_layer=second, bias=bias, init_scale=2.0).double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    state = {k: v.tolist() for k, v in net.state_dict().items()}
    x = torch.randn(5, 4, dtype=torch.float64)
    got = net(x)
    assert got.shape == (5, 1)
    for row, y in zip(x.tolist(), got.flatten().tolist()):
        units = []
        for k in range(3):
            h = sum(w * v for w, v in zip(state["hidden.weight"][k], row)) + (state["hidden.bias"][k] if bias else 0)
            units.append(ACTIVATIONS[activation](h))
        if second == "mean":
            want = sum(units) / 3
        else:
            want = sum(a * w for a, w in zip(units, state["readout.weight"][0])) + (
                state["readout.bias"][0] if bias else 0
            )
        assert y == pytest.approx(want, abs=1e-13)


def test_localisation_starts_at_its_variance_and_at_the_mean() -> None:
    net = LocalisationNet(300, 200, second_layer="trainable", bias=True, init_scale=3.0)
    assert float(net.hidden.weight.detach().var()) == pytest.approx(3.0 * 2 / 500, rel=0.02)
    assert net.readout is not None and torch.equal(net.readout.weight, torch.full((1, 200), 1 / 200))
    assert not bool(net.hidden.bias.any())


# --- circular convolutions -----------------------------------------------------------------------------------------


def circular(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], kernel: int) -> list[Tensor]:
    """Pre-activations of each layer, (n, channels, length): h(p) = Σ_k W_k x(p + k), ReLU in between."""
    out = []
    for w, b in zip(weights, biases):
        q = torch.zeros(len(x), w.shape[0], x.shape[2], dtype=x.dtype)
        for o, i, p, k in itertools.product(range(w.shape[0]), range(w.shape[1]), range(x.shape[2]), range(kernel)):
            q[:, o, p] += w[o, i, k] * x[:, i, (p + k) % x.shape[2]]
        if b is not None:
            q = q + b[:, None]
        out.append(q)
        x = q.clamp(min=0)
    return out


@pytest.mark.parametrize("pool", ["average", "flatten"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("length", "channels", "kernel"), [(3, (1, 1, 1), 2), (5, (2, 3, 2), 3), (4, (1, 2), 4)])
def test_circular_convolutions_are_loops(
    length: int, channels: tuple[int, ...], kernel: int, bias: bool, pool: str
) -> None:
    net = CircularConvNet(length, channels, kernel, pool=pool, outputs=2, bias=bias).double()
    x = torch.randn(4, channels[0], length, dtype=torch.float64)
    state = net.state_dict()
    names = [f"stack.conv{i}.conv" for i in range(1, len(channels))]
    weights, biases = [state[f"{n}.weight"] for n in names], [state.get(f"{n}.bias") for n in names]
    scores = circular(x, weights, biases, kernel)
    h = scores[-1].clamp(min=0)
    h = h.mean(2) if pool == "average" else h.flatten(1)
    want = h @ state["stack.output.weight"].T
    if bias:
        want = want + state["stack.output.bias"]
    torch.testing.assert_close(net(x).detach(), want, rtol=1e-12, atol=1e-12)
    twin = gated_twin(net, "relu", example=x)
    for got, q in zip(twin.preactivations(x).values(), scores):
        torch.testing.assert_close(got.detach(), q, rtol=1e-12, atol=1e-12)


def test_figure_nine_has_eight_path_strengths_each_three_times() -> None:
    """DGN Figure 9: length 3, kernel 2, three linear layers, average pooling: 2³ strengths, each at 3 places."""
    net = CircularConvNet(3, (1, 1, 1, 1), 2).double()
    dln = gated_twin(net, "dln", example=torch.randn(2, 1, 3, dtype=torch.float64))
    state = net.state_dict()
    theta = [state[f"stack.conv{i}.conv.weight"].flatten().tolist() for i in (1, 2, 3)]
    head = state["stack.output.weight"].item()
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    total = 0.0
    for strength in itertools.product(range(2), repeat=3):
        value = math.prod(theta[layer][k] for layer, k in enumerate(strength)) * head / 3
        total += sum(value * x[0, 0, (p + sum(strength)) % 3].item() for p in range(3))
    assert dln(x).item() == pytest.approx(total, abs=1e-13)


def test_average_pooling_makes_it_blind_to_rotation() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    for pool, blind in (("average", True), ("flatten", False)):
        net = CircularConvNet(6, (2, 4, 4), 3, pool=pool).double()
        assert torch.allclose(net(x), net(x.roll(2, dims=2)), rtol=1e-12, atol=1e-12) == blind


# --- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "convolutions", "relus"), [(resnet34, 36, 33), (resnet110, 109, 109)])
def test_residual_networks_have_their_layers(make: Callable[[], ResNet], convolutions: int, relus: int) -> None:
    net = make()
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == convolutions
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for m in net.modules():
        if isinstance(m, nn.ReLU):
            m.register_forward_hook(count)
    with torch.no_grad():
        assert net.eval()(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    assert calls == relus


def test_convolutional_templates_have_the_papers_layers() -> None:
    assert [n for n, _ in vconv().named_children()] == [
        "conv1",
        "relu1",
        "conv2",
        "relu2",
        "conv3",
        "relu3",
        "conv4",
        "relu4",
        "flatten",
        "linear5",
        "relu5",
        "linear6",
        "relu6",
        "output",
    ]
    assert gconv().linear5.in_features == 128 and vconv().linear5.in_features == 128 * 32 * 32
    assert conv5().conv5.out_channels == 26 and conv5().linear6.out_features == 64
    assert conv5(dense=None).output.in_features == 26


def test_layers_of_an_mlp_are_numbered() -> None:
    net = mlp(2, (3, 4), 5, bias=True)
    assert [tuple(p.shape) for p in net.parameters()] == [(3, 2), (3,), (4, 3), (4,), (5, 4), (5,)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: mlp(2, ()),
        lambda: mlp(2, (3, 0)),
        lambda: vconv(channels=(3, 0)),
        lambda: vconv(outputs=0),
        lambda: gconv(dense=(-1,)),
        lambda: conv5(filters=2.5),  # type: ignore[arg-type]
        lambda: conv5(layers=0),
        lambda: ResNet((1, 1), (4,)),
        lambda: ResNet((1, 0), (4, 8)),
        lambda: ResNet((), ()),
        lambda: CircularConvNet(3, kernel=4),
        lambda: CircularConvNet(3, kernel=0),
        lambda: CircularConvNet(0),
        lambda: LocalisationNet(0, 3),
        lambda: LocalisationNet(4, -3),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call: Callable[[], nn.Module]) -> None:
    with pytest.raises(ShapeError):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: LocalisationNet(4, 3, "tanh"),
        lambda: LocalisationNet(4, 3, second_layer="sum"),
        lambda: LocalisationNet(4, 3, init_scale=0),
        lambda: CircularConvNet(3, pool="max"),
        lambda: ResNet((1,), (4,), shortcut="none"),
    ],
)
def test_choices_off_the_list_are_refused(call: Callable[[], nn.Module]) -> None:
    with pytest.raises(OptionError, match="must be"):
        call()
