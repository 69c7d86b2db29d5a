"""Gate functions and initialisations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pathlens.errors import OptionError, UnknownNameError
from pathlens.models import (
    Gate,
    GatedNetwork,
    Hard,
    Init,
    Open,
    Soft,
    StraightThrough,
    dlgn,
    gated_twin,
    gates,
    relu,
    soft_galu,
    soft_relu,
)
from pathlens.models.gates import leak, make_gate

finite = st.floats(-50, 50)
numbers = st.lists(finite, min_size=1, max_size=8).map(lambda v: torch.tensor(v, dtype=torch.float64))


@settings(deadline=None)
@given(numbers)
def test_a_hard_gate_is_open_where_q_is_positive(q: Tensor) -> None:
    assert Hard()(q).tolist() == [1.0 if v > 0 else 0.0 for v in q.tolist()]


def test_a_hard_gate_is_closed_at_zero() -> None:
    q = torch.tensor([0.0, -0.0])
    for gate in (Hard(), StraightThrough()):
        assert gate(q).tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(numbers, st.floats(0.1, 20), st.floats(0, 2))
def test_a_soft_gate_is_its_formula_within_its_range(q: Tensor, beta: float, epsilon: float) -> None:
    g = Soft(beta, epsilon).double()(q)
    beta, epsilon = (float(torch.tensor(v)) for v in (beta, epsilon))  # as the buffers hold them
    want = [(1 + epsilon) / (1 + math.exp(min(-beta * v, 700.0))) for v in q.tolist()]
    torch.testing.assert_close(g, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-300)
    assert bool((g >= 0).all()) and bool((g <= 1 + epsilon).all())


@settings(deadline=None)
@given(numbers, st.floats(0.1, 20))
def test_straight_through_is_hard_forward_and_soft_backward(q: Tensor, beta: float) -> None:
    gate = StraightThrough(beta).double()
    q = q.clone().requires_grad_()
    g = gate(q)
    assert torch.equal(g, Hard()(q.detach()))
    (through,) = torch.autograd.grad(g.sum(), q)
    (soft,) = torch.autograd.grad(torch.sigmoid(gate.beta * q).sum(), q)
    assert torch.equal(through, soft)


def test_open_gates_are_ones() -> None:
    q = torch.tensor([-1.0, 0.0, 2.0])
    assert torch.equal(Open()(q), torch.ones(3)) and torch.equal(Open().gated(q), q)


@pytest.mark.parametrize("gate", [Hard(), Soft(3.0, 0.1), StraightThrough(2.0)])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_a_self_gated_unit_is_q_times_its_gate(gate: nn.Module, slope: float) -> None:
    q = torch.linspace(-2, 2, 9)
    torch.testing.assert_close(gate.gated(q, slope), q * (slope + (1 - slope) * gate(q)))
    assert torch.equal(leak(gate(q), 0.0), gate(q))


def test_beta_is_a_buffer_that_a_stack_can_hold_one_each_of() -> None:
    gate = Soft(4.0)
    q = torch.randn(3, 5)
    betas = torch.tensor([1.0, 4.0, 9.0])
    buffers = {"beta": betas, "epsilon": torch.zeros(3)}
    out = torch.func.vmap(lambda b, x: torch.func.functional_call(gate, b, (x,)))(buffers, q)
    torch.testing.assert_close(out, torch.sigmoid(betas[:, None] * q))
    assert set(dict(dlgn(2, (3,)).named_buffers())) == {"gate.beta", "gate.epsilon"}


def test_a_given_gate_is_copied() -> None:
    gate = Soft(4.0)
    a, b = dlgn(2, (3,), gate=gate), dlgn(2, (3,), gate=gate)
    a.gate.beta.fill_(9.0)
    assert b.gate.beta == 4.0 and gate.beta == 4.0


@pytest.mark.parametrize("beta", [0, -1.0, math.nan, math.inf, "four", None])
@pytest.mark.parametrize("cls", [Soft, StraightThrough])
def test_a_beta_that_is_not_positive_is_refused(cls: type[nn.Module], beta: object) -> None:
    with pytest.raises(OptionError, match="beta must be positive"):
        cls(beta)


@pytest.mark.parametrize("epsilons", [(0.1, 0.0), (0.0, 0.1)])
def test_a_loaded_epsilon_counts(epsilons: tuple[float, float]) -> None:
    saved, other = (Soft(epsilon=epsilon) for epsilon in epsilons)
    other.load_state_dict(saved.state_dict())
    q = torch.linspace(-1, 1, 5)
    assert torch.equal(other(q), saved(q)) and other.label == saved.label


@pytest.mark.parametrize("epsilon", [-0.1, math.nan, math.inf])
def test_a_negative_epsilon_is_refused(epsilon: float) -> None:
    with pytest.raises(OptionError, match="epsilon must be at least 0"):
        soft_relu(2, (3,), epsilon=epsilon)


def test_an_unknown_gate_is_met_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'straight_through'"):
        make_gate("straight-through")


@pytest.mark.parametrize(
    ("gate", "label"),
    [
        (Hard(), "hard"),
        (Soft(4.0), "soft β=4"),
        (Soft(4.0, 0.1), "soft β=4, ε=0.1"),
        (StraightThrough(10.0), "hard (straight-through β=10)"),
        (Open(), "all open"),
    ],
)
def test_labels_say_which_gate_it_was(gate: nn.Module, label: str) -> None:
    assert gate.label == label


# --- initialisation ------------------------------------------------------------------------------------------------


def layer_of(scheme: str | Init) -> Tensor:
    return relu(400, (300,), init=scheme, seed=0).values.state_dict()["linear1.weight"]


def test_default_is_torchs_own() -> None:
    w = layer_of("default")
    assert float(w.abs().max()) <= 1 / 20 and float(w.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)


@pytest.mark.parametrize(("scheme", "variance"), [("he", 2 / 400), ("preserve", 1 / 400)])
def test_the_variance_of_normal_schemes(scheme: str, variance: float) -> None:
    assert float(layer_of(scheme).var()) == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize(("sigma", "value"), [(None, math.sqrt(2 / 400)), (0.25, 0.25)])
def test_bernoulli_is_plus_or_minus_sigma(sigma: float | None, value: float) -> None:
    w = layer_of(Init("bernoulli", sigma))
    torch.testing.assert_close(w.abs(), torch.full_like(w, value))
    assert float((w > 0).float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("scheme", ["he", "preserve", "bernoulli"])
def test_schemes_other_than_the_default_start_without_bias(scheme: str) -> None:
    net = relu(3, (4,), bias=True, init=scheme, seed=0)
    assert all(not bool(p.any()) for name, p in net.named_parameters() if name.endswith("bias"))


def test_preserve_counts_the_gates_that_a_layer_reads() -> None:
    """A layer behind the gates draws 1/E[g²] of the variance; the first one and the linear gate network do not."""
    q = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    behind = 1 / float(torch.sigmoid(4 * q).square().mean())
    state = dlgn(400, (400, 400), init="preserve", beta=4.0, seed=0).state_dict()
    for key, times in [("values.linear1", 1), ("values.linear2", behind), ("source.network.linear2", 1)]:
        assert float(state[f"{key}.weight"].var()) == pytest.approx(times / 400, rel=0.03), key


@pytest.mark.parametrize("gate", ["hard", "soft"])
def test_preserve_counts_what_leaky_units_let_through(gate: str) -> None:
    layers = [nn.Linear(400, 400), nn.LeakyReLU(0.5), nn.Linear(400, 400), nn.LeakyReLU(0.5), nn.Linear(400, 1)]
    template, X = nn.Sequential(*layers), torch.randn(500, 400, generator=torch.Generator().manual_seed(0))
    net = gated_twin(template, "dlgn", X[:2], gate=gate, init="preserve", seed=0)
    own = gated_twin(template, "relu", X[:2], init="preserve", seed=0)
    with torch.no_grad():
        square = float(net.gates(X)["1@0"].square().mean())
        values, gates, self_gated = (
            400 * float(part.get_parameter("2.weight").var()) for part in (net.values, net.source.network, own.values)
        )
    assert values * square == pytest.approx(1, abs=0.03) and gates == pytest.approx(1, abs=0.03)
    assert self_gated == pytest.approx(2 / (1 + 0.5**2), abs=0.03)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 64, 3, groups=2), nn.Conv1d(64, 64, 5), nn.ConvTranspose2d(64, 32, 4, stride=2)],
    ids=["grouped", "1d", "transposed"],
)
def test_preserve_keeps_the_size_through_convolutions(layer: nn.Module) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Init("preserve").apply(layer)
        shape = (4, layer.in_channels, *((24,) * (layer.weight.ndim - 2)))
        out = layer(torch.randn(shape)).detach()
    inner = out[(slice(None), slice(None), *((slice(4, -4),) * (out.ndim - 2)))]
    assert float(inner.std()) == pytest.approx(1.0, rel=0.1)


def spread(net: GatedNetwork) -> float:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(net(x).std() / x.std())


DEEP = {
    "dlgn": lambda init: dlgn(64, (128,) * 20, init=init, gate="soft", beta=4.0, seed=0),
    "dlgn-beta-30": lambda init: dlgn(64, (128,) * 20, init=init, gate="soft", beta=30.0, seed=0),
    "dlgn-hard": lambda init: dlgn(64, (128,) * 20, init=init, gate="hard", seed=0),
    "soft_relu": lambda init: soft_relu(64, (128,) * 20, init=init, seed=0),
    "soft_galu": lambda init: soft_galu(64, (128,) * 20, init=init, seed=0),
    "relu": lambda init: relu(64, (128,) * 20, init=init, seed=0),
}


@pytest.mark.parametrize("kind", DEEP)
def test_preserve_keeps_the_signal_of_a_deep_network(kind: str) -> None:
    assert 1 / 30 < spread(DEEP[kind]("preserve")) < 30


def test_the_default_loses_it() -> None:
    assert spread(DEEP["dlgn"]("default")) < 1e-6


def test_an_unknown_scheme_is_met_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'preserve'"):
        Init("perserve")


@pytest.mark.parametrize(("scheme", "sigma"), [("he", 0.1), ("bernoulli", 0.0), ("bernoulli", -1.0)])
def test_sigma_belongs_to_bernoulli_and_is_positive(scheme: str, sigma: float) -> None:
    with pytest.raises(OptionError, match="sigma"):
        Init(scheme, sigma)


# --- gates that users write ----------------------------------------------------------------------------------------


class Band(Gate):
    """Open near the boundary; it is hard only if it says so."""

    def __init__(self, hard: bool = False) -> None:
        super().__init__()
        self.hard = hard

    def forward(self, q: Tensor) -> Tensor:
        return (q.abs() < 0.5).to(q.dtype)


def test_a_gate_that_calls_itself_hard_must_be_open_where_q_is_positive() -> None:
    """Regions and paths are computed for q > 0: those of another gate would be wrong."""
    with pytest.raises(OptionError, match=r"Band: hard = True.*Set hard = False"):
        dlgn(2, (4,), gate=Band(hard=True))
    assert dlgn(2, (4,), gate=Band(), seed=0).gate.label == "band"


def test_a_class_in_place_of_a_gate_is_refused() -> None:
    with pytest.raises(OptionError, match=r"Give an instance: Band\(\)"):
        dlgn(2, (4,), gate=Band)  # type: ignore[arg-type]


def test_a_named_gate_gets_the_options_that_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clipped(Soft):
        def __init__(self, beta: float = 4.0) -> None:
            super().__init__(beta)

    monkeypatch.setitem(gates._BY_NAME, "clipped", Clipped)
    net = dlgn(2, (4,), gate="clipped", beta=9.0)
    assert net.gate.beta == 9 and net.with_gate("clipped", beta=2.0).gate.beta == 2
