"""Paths that name their input, in networks that change the input before the first layer reads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pathlens as pl
from pathlens import paths
from pathlens.errors import RecordError

INPUTS, HIDDEN = 3, (3, 2)


class Entry(nn.Module):
    """Dense layers behind a change of the input."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], width: int, bias: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(1.0, 4.0))
        self.register_buffer("std", torch.tensor([0.5, 2.0, 3.0]))
        self.norm = nn.BatchNorm1d(INPUTS)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2.0)
            self.norm.bias.normal_()
            assert self.norm.running_mean is not None
            self.norm.running_mean.normal_()
        self.a, self.b = nn.Linear(width, HIDDEN[0], bias=bias), nn.Linear(HIDDEN[0], HIDDEN[1], bias=bias)
        self.c = nn.Linear(HIDDEN[1], 2, bias=bias)
        self.change = change

    def first(self, x: Tensor) -> Tensor:
        return self.a(self.change(self, x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.first(x)))))


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "none": (lambda net, x: x, 3),
    "minus one": (lambda net, x: x - 1, 3),
    "three minus": (lambda net, x: 3 - x, 3),
    "buffers": (lambda net, x: (x - net.mean) / net.std, 3),
    "flip": (lambda net, x: x.flip(1), 3),
    "permutation": (lambda net, x: x[:, [2, 0, 1]], 3),
    "zeros beside": (lambda net, x: F.pad(x, (2, 1)), 6),
    "ones beside": (lambda net, x: F.pad(x, (1, 0), value=1.0), 4),
    "a part": (lambda net, x: x[:, 1:], 2),
    "twice": (lambda net, x: torch.cat([x, 2 - x], 1), 6),
    "chunks": (lambda net, x: torch.cat(x.split([1, 2], 1)[::-1], 1), 3),
    "pooled": (lambda net, x: F.avg_pool1d(x[:, None], 2, 1)[:, 0], 2),
    "batch-norm": (lambda net, x: net.norm(x), 3),
}


def rows(n: int = 5) -> Tensor:
    return torch.randn(n, INPUTS, generator=torch.Generator().manual_seed(1)).double()


def listed(net: nn.Module, template: Entry, x: Tensor, gates: list[Tensor]) -> dict[tuple[int, ...], float]:
    """Every path of one row with its contribution to output 1, from the network's layers alone; −1 is a bias."""
    values = net.values if isinstance(net, pl.models.GatedNetwork) else net
    template = Entry(template.change, values.a.in_features, values.a.bias is not None).double().eval()
    missing = template.load_state_dict(values.state_dict(), strict=False).missing_keys
    assert not any(name.startswith(("a.", "b.", "c.")) for name in missing)
    nothing = template.first(torch.zeros_like(x)[None])[0]
    starts = {(i,): template.first((torch.eye(INPUTS).double()[i] * x[i])[None])[0] - nothing for i in range(INPUTS)}
    starts[(-1,)] = nothing
    found: dict[tuple[int, ...], float] = {}
    u2, u3 = template.b.weight, template.c.weight
    for start, units in itertools.product(starts, itertools.product(*(range(w) for w in HIDDEN))):
        value = starts[start][units[0]] * gates[0][units[0]] * u2[units[1], units[0]] * gates[1][units[1]]
        found[start + units] = float(value * u3[1, units[1]])
    if template.b.bias is not None:
        for i in range(HIDDEN[1]):
            found[(-1, -1, i)] = float(template.b.bias[i] * gates[1][i] * u3[1, i])
        found[(-1, -1, -1)] = float(template.c.bias[1])
    return found


@pytest.mark.parametrize("kind", ["plain", "relu", "dlgn", "dlgn_pwc"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_the_input_that_is_named_is_the_network_s(how: str, bias: bool, kind: str) -> None:
    if how == "batch-norm" and kind == "dlgn_pwc":
        pytest.skip("ones enter behind the batch-norm")
    X = rows()
    for seed in range(30):  # few units are often dead
        torch.manual_seed(seed)
        template = Entry(*CHANGES[how], bias).double().eval()
        twin = pl.gated_twin(template, "relu" if kind in ("plain", "relu") else kind, X[:2], gate="hard")
        if all(bool(g.any(1).all()) for g in twin.gates(X).values()):
            break
    net = template if kind == "plain" else twin
    top = paths.top(net, X, k=100, output=1, include_inputs=True)
    read = torch.ones_like(X) if kind == "dlgn_pwc" else X
    with torch.no_grad():
        f = net(X)[:, 1]
        gates = [g.double() for g in twin.gates(X).values()]
        for r in range(len(X)):
            want = listed(net, template, read[r], [g[r] for g in gates])
            every = zip(map(tuple, top.paths[r].tolist()), top.contributions[r].tolist())
            got = {path: v for path, v in every if v != 0}
            assert set(got) == {path for path, v in want.items() if abs(v) > 1e-14}
            assert all(v == pytest.approx(want[path], rel=1e-9) for path, v in got.items())
            given = sorted(got) or [(0, 0, 0)]
            values = paths.values(net, X[r : r + 1], given, output=1)[0]
            assert torch.allclose(values, torch.tensor([want[p] for p in given], dtype=torch.float64), rtol=1e-9)
            size = sum(abs(v) for v in want.values())
            assert float(paths.cancellation(net, X, output=1, include_inputs=True).size[r]) == pytest.approx(size)
    assert torch.allclose(top.f, f)
    assert torch.allclose(top.contributions.sum(1), f)
    if kind != "plain":  # the sums over paths that start at each input, found by autograd
        parts = paths.inputs(net, X, output=1)
        for j in range(INPUTS):
            through = torch.where(top.paths[:, :, 0] == j, top.contributions, 0.0).sum(1)
            assert torch.allclose(through, parts.contributions[:, j], atol=1e-12)
        others = torch.where(top.paths[:, :, 0] == -1, top.contributions, 0.0).sum(1)
        assert torch.allclose(others, parts.rest, atol=1e-12)


@pytest.mark.parametrize("how", CHANGES)
def test_the_number_of_paths_is_that_of_inputs_that_lead_anywhere(how: str) -> None:
    X = rows()
    net = pl.gated_twin(Entry(*CHANGES[how], False).double().eval(), "relu", X[:2])
    constant = how in ("minus one", "three minus", "buffers", "ones beside", "twice", "batch-norm")
    inputs = 2 if how == "a part" else 3
    assert paths.top(net, X, include_inputs=True).total == (inputs + constant) * HIDDEN[0] * HIDDEN[1]
    assert paths.top(net, X).total == HIDDEN[0] * HIDDEN[1]


def test_strengths_are_contributions_without_inputs_and_gates() -> None:
    X = rows()
    net = pl.gated_twin(Entry(*CHANGES["buffers"], True).double().eval(), "dlgn", X[:2], gate="hard")
    path = [[0, 1, 0], [2, 2, 1], [1, 0, 0]]
    gates = list(net.gates(X).values())
    want = paths.values(net, X, path)
    made = [X[:, i] * gates[0][:, a] * gates[1][:, b] for i, a, b in path]
    assert torch.allclose(torch.stack(made, 1) * paths.strengths(net, X, path), want)


def test_float32_networks_that_normalise_their_input() -> None:
    X = rows().float()
    template = Entry(*CHANGES["buffers"], True).eval()
    exact = paths.top(pl.gated_twin(template, "relu", X[:2]).double(), X.double(), include_inputs=True)
    for net in (template, pl.gated_twin(template, "relu", X[:2])):
        assert torch.allclose(paths.top(net, X, include_inputs=True).contributions, exact.contributions, atol=1e-6)


def test_rows_that_a_change_leaves_as_they_are_do_not_hide_it() -> None:
    X = torch.ones(1, INPUTS).double()
    template = Entry(*CHANGES["flip"], False).double().eval()
    got = paths.strengths(template, X, [[0, 0, 0]])
    assert torch.allclose(got, (template.a.weight[0, 2] * template.b.weight[0, 0] * template.c.weight[0, 0])[None])


class Curved(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, 4), nn.Linear(4, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.change(x))))


@pytest.mark.filterwarnings("ignore::pathlens.errors.UngatedWarning")
@pytest.mark.parametrize("change", [torch.abs, torch.square, lambda x: x / x.norm(dim=1, keepdim=True)])
def test_a_change_that_is_not_affine_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    X = rows()
    net = Curved(change).double()
    assert paths.top(net, X).f.shape == (5,)
    with pytest.raises(RecordError, match="affine"):
        paths.top(net, X, include_inputs=True)


def test_inputs_that_are_looked_up_start_no_path() -> None:
    net = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    X = torch.tensor([[0, 1, 2], [2, 3, 4]])
    assert paths.top(net, X).f.shape == (2,)
    with pytest.raises(RecordError, match="the inputs are indices"):
        paths.top(net, X, include_inputs=True)


def test_pruning_cuts_weights_of_the_first_layer_itself() -> None:
    torch.manual_seed(0)
    X = rows(20)
    template = Entry(*CHANGES["zeros beside"], True).double().eval()
    template.norm = nn.Identity()
    pruned = paths.prune(pl.gated_twin(template, "relu", X[:2]), X, keep=0.3)
    cut = pruned.net.values.a.weight == 0
    assert bool(cut[:, [0, 1, 5]].all()) and not bool(cut.all())
