"""A network is rebuilt from its snapshot alone, bit for bit, or with a network of the same architecture."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pathlens as pl
from pathlens import Snapshot, models
from pathlens.errors import RecordError
from pathlens.models import Gate, GatedNetwork, Init


def learned(inputs: int, hidden: Any, outputs: int, **options: Any) -> GatedNetwork:
    first = models.relu(inputs, hidden, outputs, bias=options["bias"], seed=7)
    return models.flnpf(inputs, hidden, outputs, checkpoint=first, **options)


def moved(inputs: int, hidden: Any, outputs: int, **options: Any) -> GatedNetwork:
    first = models.dlgn(inputs, hidden, outputs, bias=options["bias"], seed=7)
    return models.dlgn(inputs, hidden, outputs, gates_from=first, frozen=True, **options)


def altered(inputs: int, hidden: Any, outputs: int, **options: Any) -> GatedNetwork:
    """Hard gates where only the gates were to be trained, a layer that the user froze."""
    net = models.gates_only(inputs, hidden, outputs, **options).with_gate("hard")
    net.values.requires_grad_(True).get_submodule("output").requires_grad_(False)
    return net


MAKERS = {
    "relu": models.relu,
    "soft_relu": models.soft_relu,
    "dln": models.dln,
    "galu": models.galu,
    "galu, dependent": lambda *a, **k: models.galu(*a, dependent=True, **k),
    "flnpf": learned,
    "soft_galu": lambda *a, **k: models.soft_galu(*a, gate_activation="soft", beta=7.0, epsilon=0.3, **k),
    "gates_only": models.gates_only,
    "frg": lambda *a, **k: models.frg(*a, examples=5, probability=0.25, **k),
    "dlgn": models.dlgn,
    "dlgn, hard": lambda *a, **k: models.dlgn(*a, **k).with_gate("hard"),
    "dlgn, through": lambda *a, **k: models.dlgn(*a, gate="straight_through", piecewise_constant=True, **k),
    "dlgn, given": moved,
    "dlgn_shallow": lambda *a, **k: models.dlgn_shallow(*a, frozen=True, **k),
    "quadratic": lambda *a, **k: models.quadratic(*a, rank=2, **k),
    "altered": altered,
}
INITS = ["default", "he", "preserve", Init("bernoulli", 0.5)]


def assert_same(net: nn.Module, back: nn.Module, x: Tensor) -> None:
    assert type(back) is type(net) and back is not net and repr(back) == repr(net)
    own, other = net.state_dict(), back.state_dict()
    assert list(own) == list(other)
    assert all(torch.equal(own[k], other[k]) and own[k].dtype == other[k].dtype for k in own)
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in back.parameters()]
    assert torch.equal(net(x), back(x))


@settings(max_examples=60, deadline=None)
@given(
    maker=st.sampled_from(sorted(MAKERS)),
    inputs=st.integers(1, 3),
    hidden=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    outputs=st.integers(1, 2),
    bias=st.booleans(),
    init=st.sampled_from(INITS),
    double=st.booleans(),
)
def test_a_network_of_a_constructor_comes_back_from_its_files_alone(
    maker: str, inputs: int, hidden: list[int], outputs: int, bias: bool, init: Any, double: bool
) -> None:
    net = MAKERS[maker](inputs, hidden, outputs, bias=bias, init=init, seed=3)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0))
    if double:
        net, x = net.double(), x.double()
    before = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder:
        pl.snapshot(net).save(Path(folder) / "net")
        back = pl.rebuild(Snapshot.load(Path(folder) / "net"))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(back, GatedNetwork)
    assert_same(net, back, x)
    assert back.describe() == net.describe() and back.init == net.init
    for one in (net, back):  # drawn anew by the same rules
        one.reinitialise(11)
    assert_same(net, back, x)
    assert_same(net, pl.rebuild(pl.snapshot(back)), x)


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_a_module_of_ones_own_comes_back_in_a_copy_of_one_that_is_built_alike() -> None:
    torch.manual_seed(0)
    net, x = Small(), torch.randn(4, 1, 5, 5)
    net(x)
    net.eval()
    taken = pl.snapshot(net)
    with pytest.raises(RecordError, match=r"kind 'Small'.*like=net"):
        pl.rebuild(taken)
    pattern = Small().eval()
    untouched = {k: v.clone() for k, v in pattern.state_dict().items()}
    assert_same(net, pl.rebuild(taken, like=pattern), x)
    assert all(torch.equal(v, untouched[k]) for k, v in pattern.state_dict().items())
    assert_same(net, pl.rebuild(taken, like=torch.compile(Small().eval())), x)


def test_tied_weights_stay_tied() -> None:
    def tied() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        net[2].weight = net[0].weight
        return net

    net = tied()
    back = pl.rebuild(pl.snapshot(net), like=tied())
    assert_same(net, back, torch.randn(2, 3))
    assert back[2].weight is back[0].weight


def test_a_twin_needs_one_that_is_built_alike() -> None:
    def twin(**options: Any) -> GatedNetwork:
        template = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        return pl.gated_twin(template, "soft_galu", example=torch.randn(2, 2), **options)

    net = twin()
    taken = pl.snapshot(net)
    with pytest.raises(RecordError, match="not how to build it"):
        pl.rebuild(taken)
    assert_same(net, pl.rebuild(taken, like=twin()), torch.randn(3, 2))
    with pytest.raises(RecordError, match=r"value_input 'x'.*'ones'"):
        pl.rebuild(taken, like=twin(piecewise_constant=True))
    assert_same(net, pl.rebuild(taken, like=twin(epsilon=0.0)), torch.randn(3, 2))  # ε is in the state


@pytest.mark.parametrize(
    "like, message",
    [
        (lambda: Small(5), r"float32 of shape \(4, 1, 3, 3\) as 'conv.weight', and the Small .* \(5, 1, 3, 3\)"),
        (lambda: Small().double(), "float64 of shape"),
        (lambda: nn.Linear(2, 2), "as 'conv.weight', and the Linear that was given has nothing"),
        (lambda: "Small", "got str"),
    ],
    ids=["shape", "dtype", "layers", "no module"],
)
def test_one_that_is_built_otherwise_is_refused(like: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        pl.rebuild(pl.snapshot(Small()), like=like())


def test_gates_that_only_code_can_tell_need_a_network() -> None:
    class Cube(Gate):
        hard = False

        def forward(self, q: Tensor) -> Tensor:
            return q**3

    def own() -> GatedNetwork:
        return models.gdln(2, (2,), gates=lambda x: x)

    for make in (own, lambda: models.dlgn(2, (2,), gate=Cube())):
        net = make()
        with pytest.raises(RecordError, match="like=net"):
            pl.rebuild(pl.snapshot(net))
        assert_same(net, pl.rebuild(pl.snapshot(net), like=make()), torch.randn(3, 2))


def test_a_snapshot_that_misstates_its_network_is_refused() -> None:
    taken = pl.snapshot(models.relu(2, (3,)))
    with pytest.raises(RecordError, match="expected a Snapshot, got dict"):
        pl.rebuild(taken.state)  # type: ignore[arg-type]
    taken.description["recipe"]["sizes"]["hidden"] = [4]
    with pytest.raises(RecordError, match=r"does not contain how to build its network of kind 'relu'"):
        pl.rebuild(taken)
    del taken.description["recipe"]["sizes"]
    with pytest.raises(RecordError, match="sizes"):
        pl.rebuild(taken)
