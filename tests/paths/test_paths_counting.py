"""Exact path counts, against tables of paths, the overlap kernel, and walks through convolutions one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from path_tables import KINDS, network, table
from torch import Tensor, nn

import pathlens as pl
from pathlens import paths
from pathlens.errors import RecordError
from pathlens.testing.jacobians import count_shared_paths


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    hidden=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    bias=st.booleans(),
    include_inputs=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_counts_are_those_of_a_table(kind: str, hidden: list[int], bias: bool, include_inputs: bool, seed: int) -> None:
    net = network(kind, 3, tuple(hidden), 1, bias, seed)
    X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    hard = net if kind == "dln" else net.with_gate("hard")
    with torch.no_grad():
        gates = [g > 0 for g in (net.gates(X) if kind == "dln" else net.gates(X, hard=True)).values()]
    every = table(hard, X, 0, include_inputs)
    for include_biases in (False, True):
        got = paths.count(net, X, include_inputs=include_inputs, include_biases=include_biases)
        want = []
        for row in range(4):
            active = 0
            for path in every:
                units = path[1:] if include_inputs else path
                if not include_biases and min(path) < 0:
                    continue
                active += all(unit < 0 or bool(gates[layer][row, unit]) for layer, unit in enumerate(units))
            want.append(active)
        assert got == want and all(type(n) is int for n in got)


def test_counts_are_the_diagonal_of_the_overlap_kernel() -> None:
    net, X = network("soft", bias=True), torch.randn(9, 2, dtype=torch.float64)
    assert paths.count(net, X) == np.diag(pl.kernels.overlap(net, X).exact_counts()).tolist()


def test_counts_beyond_64_bits() -> None:
    net = pl.models.dln(3, hidden=(37,) * 20)
    assert paths.count(net, torch.zeros(2, 3)) == [37**20] * 2
    assert paths.count(net, torch.zeros(2, 3), include_inputs=True) == [3 * 37**20] * 2


def convolutional(name: str) -> nn.Module:
    conv1 = nn.Conv1d(2, 3, 3, padding=1)
    if name == "flat":
        return nn.Sequential(conv1, nn.ReLU(), nn.Conv1d(3, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    if name == "pooled":
        return nn.Sequential(
            conv1,
            nn.ReLU(),
            nn.AvgPool1d(2),
            nn.Conv1d(3, 2, 3, padding=1, groups=1),
            nn.BatchNorm1d(2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(2, 3),
            nn.ReLU(),
            nn.Linear(3, 1),
        )

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = conv1, nn.Conv1d(3, 3, 3, padding=1), nn.Linear(18, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.first(x))
            h = torch.relu(self.second(h) + h)
            return self.head(torch.flatten(h, 1))

    return Residual()


@pytest.mark.parametrize("kind", ["dlgn", "relu"])
@pytest.mark.parametrize("name", ["flat", "pooled", "residual"])
def test_convolutions_are_counted_position_by_position(name: str, kind: str) -> None:
    X = torch.randn(70, 2, 6)  # more than one block of rows
    net = pl.gated_twin(convolutional(name).eval(), kind, example=X[:2]).eval()
    for include_inputs in (False, True):
        want = pl.kernels.overlap(net, X, include_inputs=include_inputs).diagonal().double()
        got = paths.count(net, X, include_inputs=include_inputs)
        assert len(set(got)) > 1
        assert got == [round(v) for v in want.tolist()]


class Starts(nn.Module):
    """Units that read the input in several ways, or through layers without gates."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1, padding=1)
        self.head = nn.Linear(12 if how == "padding" else 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "ungated":
            h = torch.relu(self.b(self.a(x)))
        elif self.how == "projection":
            h = torch.relu(self.a(x)) + self.b(x)
        elif self.how == "around":
            h = torch.relu(self.a(x) + x)
        elif self.how == "later":
            h = torch.relu(self.b(torch.relu(self.a(x))) + x)
        elif self.how == "padding":  # its outer units read zeros alone
            h = torch.relu(self.c(x))
        else:
            h = torch.relu(self.a(x)) + x
        return self.head(torch.flatten(h, 1))


@pytest.mark.parametrize("kind", ["dlgn", "relu"])
@pytest.mark.parametrize("how", ["ungated", "projection", "around", "later", "padding", "last"])
def test_a_path_starts_once_at_a_gate_that_the_input_reaches(how: str, kind: str) -> None:
    X = torch.randn(5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = pl.gated_twin(Starts(how).double(), kind, example=X[:2], seed=0)
    shared = count_shared_paths(net, X)
    assert int(shared.max()) > 0 and paths.count(net, X) == shared.diagonal().tolist()
    assert torch.equal(pl.kernels.overlap(net, X).dense().long(), shared)
    inputs = pl.kernels.overlap(net, X, include_inputs=True).diagonal().round().long().tolist()
    assert paths.count(net, X, include_inputs=True) == inputs


def test_templates_with_circular_convolutions_and_padded_shortcuts() -> None:
    for template, X in (
        (pl.models.CircularConvNet(5, (1, 2, 2)), torch.randn(4, 1, 5)),
        (pl.models.ResNet((1, 1), (2, 4), 2, shortcut="pad").eval(), torch.randn(4, 3, 6, 6)),
        (pl.models.ResNet((1, 1), (2, 4), 2, shortcut="projection").eval(), torch.randn(4, 3, 6, 6)),
        # ones enter after a batch-norm of the input, in its shape and not in that of the first gates
        (
            nn.Sequential(nn.BatchNorm2d(3), *pl.models.gconv(2, channels=(3, 4, 4), dense=(), bias=True)).eval(),
            torch.randn(4, 3, 6, 6),
        ),
    ):
        net = pl.gated_twin(template, "dlgn", example=X, piecewise_constant=True).eval().double()
        want = pl.kernels.overlap(net, X.double()).diagonal()
        assert paths.count(net, X.double()) == [round(v) for v in want.tolist()]
        assert float(want.max()) > 1


class _Head(nn.Module):
    def __init__(self, pool: Callable[[torch.Tensor], torch.Tensor], width: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.output = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1), nn.Linear(width, 2)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.pool(torch.relu(self.second(torch.relu(self.first(x))))))


POOLS = {
    "mean": lambda h: h.mean((2, 3)),
    "mean of means": lambda h: torch.mean(h, -1).mean(axis=-1),
    "sum": lambda h: h.sum(dim=(2, 3), keepdim=True).flatten(1),
    "avg_pool2d": lambda h: F.avg_pool2d(h, 4).view(h.size(0), -1),
    "adaptive": lambda h: F.adaptive_avg_pool2d(h, 1).squeeze(-1).squeeze(-1),
    "shape": lambda h: F.avg_pool2d(h, kernel_size=2, stride=2).reshape(h.shape[0], -1),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_counted_however_it_is_written(name: str) -> None:
    X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    net = pl.gated_twin(_Head(POOLS[name], 12 if name == "shape" else 3), "dlgn", example=X[:2], seed=0)
    for include_inputs in (False, True):
        want = pl.kernels.overlap(net, X, include_inputs=include_inputs).diagonal().double()
        got = paths.count(net, X, include_inputs=include_inputs)
        assert got == [round(v) for v in want.tolist()] and len(set(got)) > 1


def test_a_mean_over_channels_is_refused() -> None:
    X = torch.randn(2, 2, 6, 6)
    for pool in (lambda h: h.mean(1).flatten(1), lambda h: h.mean((1, 2, 3), keepdim=True).flatten(1)):
        width = pool(torch.ones(1, 3, 4, 4)).shape[1]
        net = pl.gated_twin(_Head(pool, width), "dlgn", example=X, seed=0)
        with pytest.raises(RecordError, match="channels"):
            paths.count(net, X)


def test_outputs_without_a_dimension_of_their_own_are_counted() -> None:
    """A convolutional network that returns (n,) has one output."""
    template = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1), nn.Flatten(0))
    x = torch.randn(3, 1, 4)
    flat, deep = (pl.gated_twin(net, "relu", example=x) for net in (template, template[:-1]))
    assert paths.count(flat, x) == paths.count(deep, x)


def test_convolutional_counts_do_not_round() -> None:
    template = nn.Sequential(
        *[m for i in range(9) for m in (nn.Conv1d(33 if i else 1, 33, 3, padding=1), nn.ReLU())],
        nn.Flatten(),
        nn.Linear(33 * 5, 1),
    )
    X = torch.randn(2, 1, 5)
    net = pl.gated_twin(template, "dln", example=X)
    walks = np.abs(np.subtract.outer(range(5), range(5))) <= 1  # a kernel of three positions, padded with zeros
    walks = walks.astype(int).astype(object)
    positions = np.ones(5, dtype=object)
    for _ in range(8):
        positions = walks @ positions
    want = int(positions.sum()) * 33**9
    assert want > 2**53 and want != int(float(want))
    assert paths.count(net, X) == [want] * 2


def test_what_is_not_counted_is_named() -> None:
    X = torch.randn(2, 2, 6)
    pooled = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(6, 1))
    with pytest.raises(RecordError, match=r"MaxPool1d.*max_pool='average'"):  # which overlap does not follow either
        paths.count(pl.gated_twin(pooled, "relu", example=X), X)
    flat = pl.gated_twin(convolutional("flat"), "relu", example=X)
    with pytest.raises(RecordError, match="biases"):
        paths.count(flat, X, include_biases=True)
    with pytest.raises(RecordError, match=r"chain of dense.*Take gated = gated_twin.*paths\.count\(gated, X\) also"):
        paths.count(convolutional("flat"), X)  # a plain module: its architecture is not known
    assert math.prod(paths.count(flat, X)) > 0


class Padded(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.a, self.b, self.value = nn.Conv1d(2, 3, 3), nn.Conv1d(3, 1, 6), value

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.pad(torch.relu(self.a(x)), (1, 1), value=self.value)).flatten(1)


def test_padding_with_ones_starts_no_paths() -> None:
    X = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    zeros, ones = (pl.gated_twin(Padded(value), "relu", example=X) for value in (0.0, 1.0))
    assert paths.count(zeros, X) == [int(g.sum()) for g in zeros.gates(X)["relu@0"]]
    with pytest.raises(RecordError, match=r"'pad' \(with other values than zero\)"):
        paths.count(ones, X)


@pytest.mark.parametrize("biases", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_layers_with_a_bias_start_paths(biases: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    sizes = [(2, 3), (3, 4), (4, 1)]
    first, second, last = (nn.Linear(*size, bias=bias) for size, bias in zip(sizes, biases))
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    X = torch.randn(6, 2)
    with torch.no_grad():
        h = first(X)
        one, two = (h > 0).sum(1), (second(h.relu()) > 0).sum(1)
    a, b, c = map(int, biases)
    for inputs, starts in ((False, 1), (True, 2 + a)):
        got = paths.count(net, X, include_inputs=inputs, include_biases=True)
        assert got == ((starts * one + b) * two + c).tolist()
        assert paths.top(net, X, k=1, include_inputs=inputs).total == (starts * 3 + b) * 4 + c
    assert paths.prune(net, X, keep=1.0).total == (3 + b) * 4 + c == paths.prune(net, X, keep=1.0).paths


def test_outputs_that_are_reached_by_different_paths_are_refused() -> None:
    torch.manual_seed(0)
    image, pooled = (nn.Conv2d(1, 2, 3, padding=1), nn.ReLU()), nn.AdaptiveAvgPool2d(1)
    X = torch.randn(4, 1, 4, 4)
    for last in ((nn.Conv2d(2, 2, 3, padding=1),), (pooled, nn.Conv2d(2, 2, 1, groups=2))):
        net = pl.gated_twin(nn.Sequential(*image, *last, nn.Flatten()), "dlgn", example=X[:2], seed=0)
        with pytest.raises(RecordError, match="different paths"):
            paths.count(net, X)
    net = pl.gated_twin(nn.Sequential(*image, pooled, nn.Conv2d(2, 2, 1), nn.Flatten()), "dlgn", example=X[:2], seed=0)
    on = net.gates(X, hard=True)["1@0"].flatten(1).sum(1)
    assert paths.count(net, X) == on.long().tolist()


class Split(nn.Module):
    """Channels taken apart and joined, and an input that is changed before the first layer reads it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("std", torch.tensor([0.5, 2.0, 4.0]))
        self.a, self.b, self.c = nn.Linear(2 if how == "part" else 3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "normalised":
            x = (x - 0.5) / self.std
        elif self.how == "flipped":
            x = 1 - x.flip(1)
        elif self.how == "part":
            x = x[:, 1:]
        h = torch.relu(self.a(x))
        if self.how == "chunk":
            u, v = h.chunk(2, 1)
            h = 2 * h + torch.cat([v, u], 1)
        elif self.how == "split":
            h = h + torch.hstack(torch.split(h, [1, 3], dim=1)[::-1]) - h.flip(1)
        elif self.how == "unbind":
            h = torch.cat(h.unsqueeze(2).tensor_split(2, dim=1)[1].unbind(2), 1).narrow(1, 0, 2).repeat(1, 2)
        return self.c(torch.relu(self.b(h) + 1 if self.how == "chunk" else self.b(h)))


@pytest.mark.parametrize("kind", ["relu", "galu", "dlgn", "dlgn_pwc"])
@pytest.mark.parametrize("how", ["chunk", "split", "normalised", "flipped", "part"])
def test_what_is_split_and_what_is_changed_before_the_first_layer(how: str, kind: str) -> None:
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    net = pl.gated_twin(Split(how).double(), kind, X[:2], seed=0)
    if how in ("chunk", "split"):
        gates = [g.bool() for g in net.gates(X, hard=True).values()]
        routes = {"chunk": 2, "split": 3}[how]
        want = [routes * int(a.sum()) * int(b.sum()) for a, b in zip(*gates)]
        assert list(paths.count(net, X)) == want == pl.kernels.overlap(net, X).diagonal().long().tolist()
    counts = list(paths.count(net, X, include_inputs=True))
    assert counts == pl.kernels.overlap(net, X, include_inputs=True).diagonal().long().tolist()
    assert counts == [(2 if how == "part" else 3) * n for n in paths.count(net, X)]


def test_what_a_repetition_counts_is_refused() -> None:
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(RecordError, match=r"'repeat'.*overlap"):
        paths.count(pl.gated_twin(Split("unbind").double(), "relu", X[:2]), X)


def test_a_plain_module_does_not_tell_which_inputs_it_reads() -> None:
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    template = Split("part").double()
    assert list(paths.count(template, X)) == list(paths.count(pl.gated_twin(template, "relu", X[:2]), X))
    with pytest.raises(RecordError, match="gated_twin"):
        paths.count(template, X, include_inputs=True)
