"""Every fully connected kind equals its sum over paths; gates come from formulas written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pathlens import models
from pathlens.models import GatedNetwork
from pathlens.testing.reference import linear, path_sum, preactivations

TOLERANCE = 1e-12
N = 4  # rows of a batch


class Sizes(NamedTuple):
    inputs: int
    hidden: tuple[int, ...]
    outputs: int
    bias: bool
    seed: int

    @property
    def arguments(self) -> tuple[int, tuple[int, ...], int]:
        return self.inputs, self.hidden, self.outputs

    @property
    def options(self) -> dict[str, object]:
        return {"bias": self.bias, "seed": self.seed}


class Case(NamedTuple):
    """A network, and the gates that its row of the table of models says it has."""

    net: GatedNetwork
    gates: Callable[[Tensor], Sequence[Tensor]]
    ones: bool = False
    rows: Tensor | None = None


def hard(q: Tensor) -> Tensor:
    return (q > 0).double()


def soft(beta: float, epsilon: float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda q: (1 + epsilon) / (1 + torch.exp(-beta * q))


def relu(q: Tensor) -> Tensor:
    return q.clamp(min=0)


def layers(module: nn.Module, count: int, prefix: str = "") -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of the first `count` layers by their names in a state dict."""
    state = module.state_dict()
    names = [f"{prefix}linear{i}" for i in range(1, count + 1)]
    return [state[f"{n}.weight"] for n in names], [state.get(f"{n}.bias") for n in names]


def from_layers(
    module: nn.Module, prefix: str, sizes: Sizes, gate: Callable[[Tensor], Tensor], unit: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], list[Tensor]]:
    weights, biases = layers(module, len(sizes.hidden), prefix)
    weights = [w.clone() for w in weights]
    return lambda x: [gate(q) for q in preactivations(weights, x, unit, biases)]


SOURCE = "source.network."


def relu_case(s: Sizes) -> Case:
    net = models.relu(*s.arguments, **s.options).double()
    return Case(net, from_layers(net, "values.", s, hard, relu))


def soft_relu_case(s: Sizes) -> Case:
    net = models.soft_relu(*s.arguments, beta=3.0, epsilon=0.25, **s.options).double()
    g = soft(3.0, 0.25)
    return Case(net, from_layers(net, "values.", s, g, lambda q: q * g(q)))


def dln_case(s: Sizes) -> Case:
    net = models.dln(*s.arguments, **s.options).double()
    return Case(net, lambda x: [torch.ones(len(x), w, dtype=torch.float64) for w in s.hidden])


def galu_case(s: Sizes) -> Case:
    net = models.galu(*s.arguments, **s.options).double()
    return Case(net, from_layers(net, SOURCE, s, hard, relu))


def galu_dependent_case(s: Sizes) -> Case:
    net = models.galu(*s.arguments, dependent=True, **s.options).double()
    return Case(net, from_layers(net, "values.", s, hard, relu))


def flnpf_case(s: Sizes) -> Case:
    trained = models.relu(*s.arguments, bias=s.bias, seed=s.seed + 1).double()
    net = models.flnpf(*s.arguments, checkpoint=trained, **s.options).double()
    return Case(net, from_layers(trained, "values.", s, lambda q: hard(q), relu))


def soft_galu_case(s: Sizes) -> Case:
    net = models.soft_galu(*s.arguments, beta=2.0, epsilon=0.125, **s.options).double()
    return Case(net, from_layers(net, SOURCE, s, soft(2.0, 0.125), relu))


def soft_galu_soft_case(s: Sizes) -> Case:
    net = models.soft_galu(*s.arguments, beta=2.0, epsilon=0.125, gate_activation="soft", **s.options).double()
    g = soft(2.0, 0.125)
    return Case(net, from_layers(net, SOURCE, s, g, lambda q: q * g(q)))


def gates_only_case(s: Sizes) -> Case:
    net = models.gates_only(*s.arguments, beta=5.0, **s.options).double()
    return Case(net, from_layers(net, SOURCE, s, soft(5.0), relu))


def frg_case(s: Sizes) -> Case:
    net = models.frg(*s.arguments, examples=9, probability=0.5, **s.options).double()
    rows = torch.tensor([7, 0, 3, 3])
    tables = [net.state_dict()[f"source.tables.{i}.bits"] for i in range(len(s.hidden))]
    return Case(net, lambda x: [t[rows] for t in tables], rows=rows)


def dlgn_case(gate: str, ones: bool = False, frozen: bool = False) -> Callable[[Sizes], Case]:
    def case(s: Sizes) -> Case:
        net = models.dlgn(
            *s.arguments, gate=gate, beta=3.0, piecewise_constant=ones, frozen=frozen, **s.options
        ).double()
        g = soft(3.0) if gate == "soft" else hard
        return Case(net, from_layers(net, SOURCE, s, g, lambda q: q), ones)

    return case


def shallow_case(ones: bool) -> Callable[[Sizes], Case]:
    def case(s: Sizes) -> Case:
        net = models.dlgn_shallow(*s.arguments, beta=3.0, piecewise_constant=ones, **s.options).double()
        state = net.state_dict()

        def gates(x: Tensor) -> list[Tensor]:
            out = []
            for i in range(len(s.hidden)):
                weight, bias = state[f"source.layers.{i}.weight"], state.get(f"source.layers.{i}.bias")
                out.append(soft(3.0)(preactivations([weight], x, linear, [bias])[0]))
            return out

        return Case(net, gates, ones)

    return case


def quadratic_case(ones: bool) -> Callable[[Sizes], Case]:
    def case(s: Sizes) -> Case:
        net = models.quadratic(*s.arguments, rank=2, gate="hard", piecewise_constant=ones, **s.options).double()
        state = net.state_dict()

        def gates(x: Tensor) -> list[Tensor]:
            out = []
            for i, width in enumerate(s.hidden):
                u, v = state[f"source.linear_part.{i}.weight"], state[f"source.squares.{i}.weight"]
                q = torch.zeros(len(x), width, dtype=torch.float64)
                for k in range(width):
                    q[:, k] = x @ u[k]
                    for r in range(2):
                        q[:, k] += state[f"source.signs.{i}.weight"][k, r] * (x @ v[2 * k + r]) ** 2
                bias = state.get(f"source.linear_part.{i}.bias")
                out.append(hard(q if bias is None else q + bias))
            return out

        return Case(net, gates, ones)

    return case


def gdln_case(s: Sizes) -> Case:
    def scores(x: Tensor) -> list[Tensor]:
        return [torch.sin(7 * x.sum(1, keepdim=True) + torch.arange(w)) for w in s.hidden]

    net = models.gdln(*s.arguments, gates=scores, **s.options).double()
    return Case(net, lambda x: [hard(q) for q in scores(x)])


CASES: dict[str, Callable[[Sizes], Case]] = {
    "relu": relu_case,
    "soft_relu": soft_relu_case,
    "dln": dln_case,
    "galu": galu_case,
    "galu-dependent": galu_dependent_case,
    "flnpf": flnpf_case,
    "soft_galu": soft_galu_case,
    "soft_galu-soft-units": soft_galu_soft_case,
    "gates_only": gates_only_case,
    "frg": frg_case,
    "dlgn-soft": dlgn_case("soft"),
    "dlgn-hard": dlgn_case("hard"),
    "dlgn-straight-through": dlgn_case("straight_through"),
    "dlgn-constant-soft": dlgn_case("soft", ones=True),
    "dlgn-constant-hard": dlgn_case("hard", ones=True),
    "dlgn-frozen": dlgn_case("hard", frozen=True),
    "dlgn-frozen-constant": dlgn_case("soft", ones=True, frozen=True),
    "shallow": shallow_case(False),
    "shallow-constant": shallow_case(True),
    "quadratic": quadratic_case(False),
    "quadratic-constant": quadratic_case(True),
    "gdln": gdln_case,
}

sizes = st.builds(
    Sizes,
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**20),
)


def check(case: Case, size: Sizes) -> None:
    generator = torch.Generator().manual_seed(size.seed)
    x = torch.randn(N, size.inputs, dtype=torch.float64, generator=generator)
    gates = case.gates(x)
    weights, biases = layers(case.net, len(size.hidden), "values.")
    state = case.net.state_dict()
    weights, biases = [*weights, state["values.output.weight"]], [*biases, state.get("values.output.bias")]
    want = path_sum(weights, gates, torch.ones_like(x) if case.ones else x, biases)
    with torch.no_grad():
        got = case.net(x, rows=case.rows)
        own = case.net.gates(x, rows=case.rows)
    assert got.shape == (N, size.outputs)
    assert (got - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max()))
    for g, w in zip(own.values(), gates):
        assert (g - w).abs().max() <= TOLERANCE


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", CASES)
def test_the_output_is_the_sum_over_paths(name: str, bias: bool) -> None:
    size = Sizes(2, (3, 4, 2), 3, bias, 11)
    check(CASES[name](size), size)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None)
@given(size=sizes)
def test_the_output_is_the_sum_over_paths_for_any_sizes(name: str, size: Sizes) -> None:
    check(CASES[name](size), size)


@pytest.mark.parametrize("name", ["relu", "dlgn-hard", "dlgn-constant-hard"])
def test_a_wrong_gate_shows_in_the_sum(name: str) -> None:
    size = Sizes(2, (3, 3), 1, False, 3)
    case = CASES[name](size)
    with pytest.raises(AssertionError):
        check(case._replace(gates=lambda x: [1 - g for g in case.gates(x)]), size)


def test_a_bias_is_counted_once_per_layer() -> None:
    """By hand: w = 1, U = 2, 3, 5, biases 7, 11, 13, gates .5 and .25, x = 1."""
    u = [torch.tensor([[v]]) for v in (2.0, 3.0, 5.0)]
    b = [torch.tensor([v]) for v in (7.0, 11.0, 13.0)]
    gates = [torch.tensor([[0.5]]), torch.tensor([[0.25]])]
    first = (2.0 * 1 + 7) * 0.5
    second = (3 * first + 11) * 0.25
    assert path_sum(u, gates, torch.ones(1, 1), b).item() == pytest.approx(5 * second + 13, abs=1e-15)


def test_the_dependent_gates_are_a_copy_of_the_values() -> None:
    net = models.galu(3, (4, 5), dependent=True, seed=2)
    values = net.values.state_dict()
    for name, weight in net.source.network.state_dict().items():
        assert torch.equal(weight, values[name])


def test_the_independent_gates_are_not() -> None:
    net = models.galu(3, (4, 5), seed=2)
    values = net.values.state_dict()
    for name, weight in net.source.network.state_dict().items():
        assert not torch.equal(weight, values[name])
