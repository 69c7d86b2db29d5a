"""Named constructors: what is drawn, given, frozen and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pathlens import models
from pathlens.errors import CheckpointError, DTypeError, NotFiniteError, OptionError, ShapeError, UnknownNameError
from pathlens.models import GatedNetwork, gated_twin, mlp

KINDS: dict[str, Callable[..., GatedNetwork]] = {
    "relu": models.relu,
    "soft_relu": models.soft_relu,
    "dln": models.dln,
    "galu": models.galu,
    "soft_galu": models.soft_galu,
    "gates_only": models.gates_only,
    "dlgn": models.dlgn,
    "dlgn_shallow": models.dlgn_shallow,
    "quadratic": models.quadratic,
    "frg": lambda *a, **k: models.frg(*a, examples=5, **k),
    "gdln": lambda *a, **k: models.gdln(*a, gates=lambda x: [x[:, :1].expand(-1, 4), x[:, 1:].expand(-1, 3)], **k),
}
SIZES = (2, (4, 3), 2)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- drawing weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["default", "he", "preserve", "bernoulli"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_network_whatever_the_global_state(kind: str, init: str) -> None:
    nets = []
    for other in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(other)
            nets.append(KINDS[kind](*SIZES, init=init, seed=7, bias=True).state_dict())
    assert equal(*nets)
    assert not equal(nets[0], KINDS[kind](*SIZES, init=init, seed=8, bias=True).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_reinitialising_gives_what_the_constructor_gives(kind: str) -> None:
    net = KINDS[kind](*SIZES, seed=1)
    parameters = list(net.parameters())
    assert equal(net.reinitialise(2).state_dict(), KINDS[kind](*SIZES, seed=2).state_dict())
    assert all(p is q for p, q in zip(net.parameters(), parameters))  # an optimiser keeps working


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_network_leaves_the_global_state_alone(kind: str) -> None:
    before = torch.get_rng_state()
    KINDS[kind](*SIZES, seed=1).reinitialise(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_state_decides() -> None:
    states = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            states.append(models.dlgn(*SIZES).state_dict())
    assert equal(states[0], states[1]) and not equal(states[0], states[2])


def test_dependent_gates_follow_the_values_when_drawn_anew() -> None:
    net = models.galu(*SIZES, dependent=True, seed=1).reinitialise(9)
    values = net.values.state_dict()
    assert all(torch.equal(w, values[k]) for k, w in net.source.network.state_dict().items())


def test_given_gates_stay_when_the_values_are_drawn_anew() -> None:
    net = models.flnpf(*SIZES, checkpoint=models.relu(*SIZES, seed=0), seed=1)
    before = copy.deepcopy(net.state_dict())
    after = net.reinitialise(2).state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("source."))
    assert not torch.equal(before["values.linear1.weight"], after["values.linear1.weight"])


def test_a_module_given_as_gates_stays_the_users() -> None:
    function = nn.Linear(2, 4)
    before = copy.deepcopy(function.state_dict())
    net = models.gdln(2, (4,), gates=function, seed=3).reinitialise(4)
    assert equal(function.state_dict(), before) and equal(net.source.function.state_dict(), before)
    assert function.training and function.weight.requires_grad


# --- gates from a checkpoint ---------------------------------------------------------------------------------------


def hard_gates(net: GatedNetwork, x: Tensor) -> list[Tensor]:
    return list(net.gates(x, hard=True).values())


ORIGINS: dict[str, Callable[[], tuple[Any, GatedNetwork]]] = {
    "our relu network": lambda: (net := models.relu(*SIZES, seed=5), net),
    "its state": lambda: ((net := models.relu(*SIZES, seed=5)).state_dict(), net),
    "a galu network": lambda: (net := models.galu(*SIZES, seed=5), net),
    "a soft galu network": lambda: (net := models.soft_galu(*SIZES, seed=5), net),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_flnpf_has_the_gates_of_its_checkpoint(origin: str) -> None:
    checkpoint, trained = ORIGINS[origin]()
    x = torch.randn(20, 2)
    net = models.flnpf(*SIZES, checkpoint=checkpoint, seed=6)
    assert all(map(torch.equal, hard_gates(net, x), hard_gates(trained, x)))


def test_flnpf_takes_the_state_of_a_template() -> None:
    template = mlp(2, (4, 3), 2)
    x = torch.randn(20, 2)
    net = models.flnpf(*SIZES, checkpoint=template.state_dict(), seed=6)
    trained = gated_twin(template, "relu", example=x)
    assert all(map(torch.equal, hard_gates(net, x), hard_gates(trained, x)))


def test_flnpf_from_a_dlgn_takes_its_gate_weights_not_its_values() -> None:
    trained = models.dlgn(*SIZES, seed=5)
    net = models.flnpf(*SIZES, checkpoint=trained, seed=6)
    assert equal(net.source.network.state_dict(), trained.source.network.state_dict())


def test_a_frozen_dlgn_takes_the_gates_of_any_epoch() -> None:
    trained = models.dlgn(*SIZES, seed=5)
    net = models.dlgn(*SIZES, gates_from=trained.state_dict(), frozen=True, seed=6)
    x = torch.randn(9, 2)
    assert all(map(torch.equal, net.gates(x).values(), trained.gates(x).values()))
    assert all(p.requires_grad == name.startswith("values.") for name, p in net.named_parameters())


@pytest.mark.parametrize(
    ("checkpoint", "error", "message"),
    [
        (models.relu(2, (5, 3), 2), ShapeError, r"'linear1.weight' has shape \(5, 2\), expected \(4, 2\)"),
        (models.relu(2, (4,), 2), CheckpointError, r"missing, first 'linear2.weight'"),
        (models.relu(2, (4, 3, 3), 2), CheckpointError, r"'linear3.weight', which the template does not have"),
        (models.dlgn_shallow(2, (4, 3), 2), CheckpointError, r"missing"),
        ({}, CheckpointError, r"missing"),
        ([1, 2], CheckpointError, r"expected a module or a state dict, got list"),
    ],
    ids=["other widths", "too shallow", "too deep", "other gate source", "empty", "no mapping"],
)
def test_a_checkpoint_of_another_network_is_refused(checkpoint: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        models.flnpf(*SIZES, checkpoint=checkpoint)


def test_a_template_with_a_part_called_values_keeps_its_names() -> None:
    class Template(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.source = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.source(torch.relu(self.values(x)))

    template = Template()
    net = gated_twin(template, "flnpf", example=torch.randn(2, 3), seed=0)
    assert torch.equal(net.source.network.state_dict()["values.weight"], template.values.weight)


# --- gate tables ---------------------------------------------------------------------------------------------------


def test_rows_choose_the_lines_of_the_table() -> None:
    net = models.frg(*SIZES, examples=6, seed=0)
    x = torch.randn(6, 2)
    order = torch.tensor([5, 1, 0, 3, 2, 4])
    torch.testing.assert_close(net(x[order], rows=order), net(x)[order])
    assert net.needs_rows and not models.relu(2).needs_rows


def test_the_table_holds_bits_of_the_given_frequency() -> None:
    net = models.frg(2, (50,), examples=400, probability=0.2, seed=0)
    bits = net.source.tables[0].bits
    assert set(bits.unique().tolist()) == {0.0, 1.0}
    assert float(bits.mean()) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    "rows",
    [torch.tensor([3]), torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0]), torch.tensor([True, False])],
    ids=["too few", "too many", "floats", "mask"],
)
def test_rows_that_do_not_fit_the_batch_are_refused(rows: Tensor) -> None:
    net = models.frg(*SIZES, examples=6, seed=0)
    with pytest.raises(ShapeError, match="one integer for each of the 2 inputs"):
        net(torch.randn(2, 2), rows=rows)


def test_a_batch_without_rows_must_be_the_table() -> None:
    with pytest.raises(ShapeError, match="rows=indices"):
        models.frg(*SIZES, examples=6)(torch.randn(5, 2))


# --- changing the gate ---------------------------------------------------------------------------------------------


def test_with_gate_keeps_the_weights_and_the_original() -> None:
    net = models.dlgn(*SIZES, seed=0).double()
    hard = net.with_gate("hard")
    x = torch.randn(5, 2, dtype=torch.float64)
    assert equal(net.values.state_dict(), hard.values.state_dict())
    assert net.gate.label == "soft β=4" and hard.gate.label == "hard"
    assert all(map(torch.equal, hard.gates(x).values(), net.gates(x, hard=True).values()))
    assert net.with_gate("soft", beta=0.1).gate.beta.dtype == torch.float64


def test_hard_gates_of_a_linear_network_stay_open() -> None:
    net = models.dln(*SIZES, seed=0)
    assert all(bool(g.all()) for g in net.gates(torch.randn(5, 2), hard=True).values())


def test_half_of_the_gates_of_a_point_and_its_mirror_are_open() -> None:
    """In a bias-free DLGN every hyperplane passes through the origin: n(x) + n(−x) = w."""
    net = models.dlgn(2, (16,) * 3, seed=0)
    x = torch.randn(50, 2)
    for a, b in zip(hard_gates(net, x), hard_gates(net, -x)):
        assert torch.equal(a.sum(1) + b.sum(1), torch.full((50,), 16.0))


@pytest.mark.parametrize("kind", KINDS)
def test_description_and_repr_name_the_kind(kind: str) -> None:
    net = KINDS[kind](*SIZES, seed=0)
    d = net.describe()
    assert d["kind"] == kind and kind in repr(net) and len(d["sites"]) == 2
    assert d["parameters"] == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("kind", "trained"),
    [
        ("relu", {"values"}),
        ("dln", {"values"}),
        ("galu", {"values"}),
        ("frg", {"values"}),
        ("gdln", {"values"}),
        ("gates_only", {"source"}),
        ("dlgn", {"values", "source"}),
        ("soft_galu", {"values", "source"}),
        ("dlgn_shallow", {"values", "source"}),
        ("quadratic", {"values", "source"}),
    ],
)
def test_each_kind_trains_its_part(kind: str, trained: set[str]) -> None:
    net = KINDS[kind](*SIZES, seed=0)
    assert {name.split(".")[0] for name, p in net.named_parameters() if p.requires_grad} == trained


# --- bad inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inputs", "hidden", "outputs"),
    [
        (0, (4, 3), 1),
        (-2, (4, 3), 1),
        (2.0, (4, 3), 1),
        (2, (4, 0), 1),
        (2, (4.0, 3), 1),
        (2, (4, True), 1),
        (2, (4, 3), 0),
        (2, (4, 3), "one"),
        (2, (), 1),
        (2, 16, 1),
    ],
    ids=str,
)
def test_sizes_that_are_not_positive_integers_are_refused(kind: str, inputs: Any, hidden: Any, outputs: Any) -> None:
    with pytest.raises(ShapeError, match=r"positive integers|hidden layer|sequence of widths"):
        KINDS[kind](inputs, hidden, outputs)


@pytest.mark.parametrize("kind", ["soft_relu", "soft_galu", "gates_only", "dlgn", "dlgn_shallow", "quadratic"])
@pytest.mark.parametrize("beta", [0, -4.0])
def test_beta_must_be_positive(kind: str, beta: float) -> None:
    with pytest.raises(OptionError, match="beta must be positive"):
        KINDS[kind](*SIZES, beta=beta)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: models.dlgn(2, gate="sof"), UnknownNameError, "Did you mean 'soft'"),
        (lambda: models.soft_galu(2, gate_activation="linar"), UnknownNameError, "Did you mean 'linear'"),
        (lambda: models.relu(2, init="hé"), UnknownNameError, "Known: bernoulli"),
        (lambda: models.soft_relu(2, epsilon=-1), OptionError, "epsilon must be at least 0"),
        (lambda: models.quadratic(2, rank=0), OptionError, "rank must be a positive integer"),
        (lambda: models.quadratic(2, rank=1.5), OptionError, "rank must be a positive integer"),
        (lambda: models.frg(2, examples=0), ShapeError, "examples must be a positive integer"),
        (lambda: models.frg(2, examples=2.5), ShapeError, "examples must be a positive integer"),
        (lambda: models.frg(2, examples=3, probability=0.0), OptionError, r"\(0, 1\]"),
        (lambda: models.frg(2, examples=3, probability=1.5), OptionError, r"\(0, 1\]"),
        (lambda: models.galu(2, dependent="II"), OptionError, r"False \(FRNPF-II\), got 'II'"),
        (lambda: models.gdln(2, (3,), gates=torch.ones(3)), OptionError, "a function of x .*got Tensor"),
        (lambda: models.gdln(2, (3,), gates=lambda x: x)(torch.zeros(4, 2)), ShapeError, r"\(4, 3\).*\(4, 2\)"),
    ],
)
def test_options_out_of_range_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), DTypeError, r"example\.float\(\)"),
        (torch.zeros(5), ShapeError, "batch dimension"),
        (torch.zeros(0, 5), ShapeError, "at least one row"),
        (torch.full((2, 5), torch.nan), NotFiniteError, "NaN or infinity"),
        ([[0.0] * 5], ShapeError, r"got list.*X\[:2\]"),
        (None, ShapeError, "got NoneType"),
    ],
    ids=["integers", "no batch", "no rows", "nan", "list", "none"],
)
def test_an_example_that_is_no_batch_of_inputs_is_refused(example: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gated_twin(mlp(5, (4,)), "dlgn", example=example)


def test_an_example_of_the_wrong_shape_is_refused_with_torchs_words() -> None:
    with pytest.raises(models.twin.ConversionError, match=r"(?s)does not run on.*shapes cannot be multiplied.*example"):
        gated_twin(mlp(5, (4,)), "dlgn", example=torch.zeros(2, 7))


@pytest.mark.parametrize(
    "call", [lambda: models.dlgn(2, gate="hard").with_gate("hardd"), lambda: models.dlgn(2).with_gate("sotf")]
)
def test_with_gate_refuses_an_unknown_gate(call: Callable[[], Any]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean"):
        call()


# --- gates of the user's own that are trained ----------------------------------------------------------------------


class Balls(nn.Module):
    """Open inside balls whose centres are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.empty(4, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.centres)

    def forward(self, x: Tensor) -> Tensor:
        return 1 - torch.cdist(x, self.centres) ** 2


def test_gates_that_are_a_module_are_drawn_and_trained_where_asked() -> None:
    def network(trained: str, gate: str) -> GatedNetwork:
        return models.gdln(2, (4,), gates=given, gate=gate, trained=trained, seed=0)

    given, x = Balls(), torch.randn(6, 2)
    fixed, learned = network("values", "hard"), network("both", "soft")
    assert torch.equal(fixed.source.function.centres, given.centres) and not fixed.source.function.centres.requires_grad
    again, other = network("both", "soft"), copy.deepcopy(learned).reinitialise(1)
    assert torch.equal(learned.source.function.centres, again.source.function.centres)
    assert not torch.equal(learned.source.function.centres, other.source.function.centres)
    learned(x).sum().backward()
    assert learned.source.function.centres.grad.abs().sum() > 0
    expected = learned.values(x, torch.sigmoid(4 * learned.source.function(x)))
    assert torch.allclose(learned(x), expected)


def test_trained_gates_that_cannot_be_drawn_are_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.zeros(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.centres.T

    with pytest.raises(OptionError, match="reset_parameters"):
        models.gdln(2, (4,), gates=Fixed(), gate="soft", trained="both", seed=0)
    assert models.gdln(2, (4,), gates=Fixed(), gate="soft", trained="both")(torch.zeros(3, 2)).shape == (3, 1)
