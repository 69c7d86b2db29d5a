"""What cannot be followed is refused by name, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from path_tables import network
from torch import nn

import pathlens as pl
from pathlens import paths
from pathlens.errors import EmptyDataError, NotFiniteError, OptionError, RecordError, ShapeError, UnknownNameError

X = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda net: paths.top(net, X, k=0), OptionError, "k must be an integer"),
        (lambda net: paths.top(net, X, k=True), OptionError, "k must be an integer"),
        (lambda net: paths.top(net, X, k=3, output=2), OptionError, "output 2"),
        (lambda net: paths.top(net, X, k=3, output=-1), OptionError, "output -1"),
        (lambda net: paths.top(X, net, k=3), OptionError, "expected a network first"),
        (lambda net: paths.top(net, X * torch.nan, k=3), NotFiniteError, "NaN"),
        (lambda net: paths.top(net, X[:0], k=3), EmptyDataError, "empty"),
        (lambda net: paths.values(net, X, [0, 0]), ShapeError, r"\(p, 3\)"),
        (lambda net: paths.values(net, X, [[0.0, 0.0, 0.0]]), ShapeError, "integers"),
        (lambda net: paths.values(net, X, [[0, 3, 0]]), OptionError, r"\[4, 3, 5\] units"),
        (lambda net: paths.values(net, X, [[-1, 0, 0]]), OptionError, "no biases"),
        (lambda net: paths.values(network("hard", bias=True), X, [[0, -1, 0]]), OptionError, "path 0"),
        (lambda net: paths.strengths(net, X, [[0, 0, 0]]), OptionError, "one strength per input"),
        (lambda net: paths.groups(net, X, by=3), OptionError, "3 hidden layers"),
        (lambda net: paths.groups(net, X, by="first"), OptionError, "relu1@0"),
        (lambda net: paths.groups(net, X, by=(0, 4)), OptionError, "layer 0 has 4"),
        (lambda net: paths.groups(net, X, by=(0, 1, 2)), OptionError, "a pair"),
        (lambda net: paths.groups(net, X, labels=[0, 1]), ShapeError, "2 labels for 5"),
        (lambda net: paths.groups(net, X, by=(0, 1), labels=[0] * 4), OptionError, "contradict"),
        (lambda net: paths.tree(net, X, leaves=0), OptionError, "leaves"),
        (lambda net: paths.tree(net, X, validation=1.5), OptionError, "validation=1.5"),
        (lambda net: paths.tree(net, X[:1]), EmptyDataError, "cannot be split"),
        (lambda net: paths.refit(net, X, paths=0), OptionError, "paths must be"),
        (lambda net: paths.refit(net, X, method="omp"), UnknownNameError, "greedy"),
        (lambda net: paths.refit(net, X, torch.zeros(5)), ShapeError, r"expected \(6,\)"),
        (lambda net: paths.refit(net, X, torch.full((6,), torch.nan)), NotFiniteError, "y contains"),
        (lambda net: paths.refit(net, X, torch.zeros(6), validation=X), OptionError, "no targets"),
        (lambda net: paths.prune(net, X, keep=0), OptionError, "keep=0"),
        (lambda net: paths.path_norm(nn.Sequential(nn.Conv1d(1, 1, 1))), RecordError, "no dense layer"),
        (lambda net: paths.path_norm(nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1))), RecordError, "follow each"),
    ],
)
def test_refusals_name_what_is_wrong(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(network("hard"))


class Shortcut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h) + h))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.b(torch.relu(self.a(x)))


def test_networks_that_are_no_chain_are_refused() -> None:
    images = torch.randn(2, 1, 6)
    conv = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    for net, rows in ((conv, images), (pl.gated_twin(conv, "dlgn", example=images), images), (Shortcut().double(), X)):
        with pytest.raises(RecordError, match="not a chain of dense layers"):
            paths.top(net, rows, k=3)
    with pytest.raises(RecordError, match="differs from the network's output"):
        paths.top(Scaled().double(), X, k=3)


@pytest.mark.parametrize("between", [lambda h: torch.mul(h, 3), lambda h: h.mul(3), lambda h: torch.add(h, h)])
def test_the_path_norm_of_rescaled_layers_is_refused(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Rescaled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](torch.relu(between(self[0](x))))

    net = Rescaled(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    for each in (net, pl.gated_twin(net, "dlgn", example=X[:2])):
        with pytest.raises(RecordError, match="joins or rescales"):
            paths.path_norm(each)


def test_the_path_norm_of_a_network_with_other_paths_is_refused() -> None:
    layer, shortcut = nn.Linear(2, 2), Shortcut().double()
    with pytest.raises(RecordError, match="'0' is called twice"):
        paths.path_norm(nn.Sequential(layer, nn.ReLU(), layer))
    for net in (shortcut, pl.gated_twin(shortcut, "dlgn", example=X[:2])):
        with pytest.raises(RecordError, match="'add' joins"):
            paths.path_norm(net)
    with pytest.raises(RecordError, match="'mul' joins or rescales"):
        paths.path_norm(Scaled())


def test_a_record_of_other_weights_is_noticed() -> None:
    net = network("hard")
    rec = pl.record(net, X, sensitivities=False)
    assert torch.equal(paths.top(net, rec, k=3).paths, paths.top(net, X, k=3).paths)
    with pytest.raises(RecordError, match="other weights"):
        paths.top(network("hard", seed=1), rec, k=3)
    with pytest.raises(RecordError, match=r"a layer 'values\.linear1', which the network lacks"):
        paths.top(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), rec, k=3)
    part = pl.record(net, X, outputs=[1], sensitivities=False)
    with pytest.raises(RecordError, match="alone"):
        paths.top(net, part, k=3)


def test_weights_that_are_not_finite_are_refused() -> None:
    net = network("hard")
    with torch.no_grad():
        net.values.linear2.weight[0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match="weights"):
        paths.top(net, X, k=3)
