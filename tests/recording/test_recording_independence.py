"""Networks that mix the rows of a batch in eval mode are refused, whatever is asked of them; no others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens import Trajectory, gated_twin, models, paths, record
from pathlens.errors import RecordError
from pathlens.kernels import LinearisedModel, npk, ntk, overlap
from pathlens.recording.independence import check_row_independence

MESSAGE = r"changes by .* when the other rows of the batch are left out.*mixes rows.*Remove operations across the batch"


class Mixes(nn.Module):
    """A fully connected network with something between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.first, self.between = first, between

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.between(torch.relu(self.a(self.first(x)))))))


def _same(h: Tensor) -> Tensor:
    return h


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Mixes(lambda h: h - h.mean(0)),
    "a little of the mean": lambda: Mixes(lambda h: h + 1e-3 * h.mean(0)),
    "softmax": lambda: Mixes(lambda h: h.softmax(0)),
    "norm": lambda: Mixes(_same, lambda x: x / x.norm()),
    "largest": lambda: Mixes(_same, lambda x: x / x.abs().max()),
    "largest of all but one": lambda: Mixes(lambda h: h / (1 + h.amax(0))),
    "spread": lambda: Mixes(lambda h: (h - h.mean(0)) / (1e-5 + h.var(0, unbiased=h.shape[0] > 1))),
    "standard deviation": lambda: Mixes(lambda h: h / (1e-5 + h.std(0))),  # of one row it is NaN
    "neighbour": lambda: Mixes(lambda h: h + h.roll(1, 0)),
    "rows before": lambda: Mixes(lambda h: h.cumsum(0)),
    "attention": lambda: Mixes(lambda h: F.scaled_dot_product_attention(h, h, h)),
    "number of rows": lambda: Mixes(lambda h: h / len(h)),
    "batch statistics": lambda: Mixes(lambda h: F.normalize(h, dim=0)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("n", [2, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MIXERS)
def test_networks_that_mix_rows_are_refused(name: str, dtype: torch.dtype, n: int) -> None:
    net, X = MIXERS[name]().to(dtype), torch.randn(n, 3, dtype=dtype)
    for stream in (None, True):
        with pytest.raises(RecordError, match=MESSAGE):
            record(net, X, stream=stream)


@pytest.mark.parametrize(
    "take",
    [
        overlap,
        npk,
        ntk,
        paths.count,
        paths.top,
        Trajectory().append,
        lambda net, X: record(net, X, sensitivities=False),
        lambda net, X: record(net, X, max_bytes=40_000),
        lambda net, X: LinearisedModel(net)(X),
        lambda net, X: ntk(net, X[:1], Y=X),
    ],
)
def test_whatever_takes_a_network_refuses(take: Any) -> None:
    with pytest.raises(RecordError, match=MESSAGE):
        take(MIXERS["mean"](), torch.randn(40, 3))


def test_gates_that_a_user_makes_of_the_whole_batch() -> None:
    net = models.gdln(3, (4,), gates=lambda x: (x - x.mean(0)) @ torch.ones(3, 4), seed=0)
    X = torch.randn(40, 3)
    for take in (record, overlap, ntk, paths.inputs):
        with pytest.raises(RecordError, match=MESSAGE):
            take(net, X)
    record(net, X[:1])  # a row alone is what it is


def test_a_hook_that_mixes_rows() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    record(net, torch.randn(6, 3))
    net[0].register_forward_hook(lambda m, i, out: out - out.mean(0))
    with pytest.raises(RecordError, match=MESSAGE):
        record(net, torch.randn(6, 3))


class Deep(nn.Module):
    """Many layers that amplify rounding: changes of 1e-7 become changes of the order of the outputs."""

    def __init__(self, layers: int, gain: float, unit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.unit = unit
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=gain / 4)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.unit(layer(x))
        return x[:, :2]


class Step(nn.Module):
    """A hard gate at its boundary: q is 0 but for rounding, which the size of the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, -6.0]))
        self.last = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        rounding = torch.finfo(x.dtype).eps * (1 if len(x) % 2 else -1)
        q = (x * self.weight).sum(1, keepdim=True) + rounding
        return self.last((q > 0).to(x.dtype))


class Float32Inside(nn.Module):
    """Computes in float32 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 2)
        self.mix = torch.randn(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(x @ self.mix))


@pytest.mark.filterwarnings("ignore:record. no gates")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_mixing(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    X = torch.randn(200, 16, dtype=dtype)
    for net in (Deep(60, 2.5, torch.tanh), Deep(30, 3.0, F.leaky_relu), Deep(30, 3.0, torch.sin)):
        net.to(dtype)
        assert not (dtype == torch.float32 and torch.equal(net(X)[:1], net(X[:1])))
        record(net, X, sensitivities=False, stream=False)
        check_row_independence(net, X)
    if dtype == torch.float32:
        record(Float32Inside(), X, stream=False)


def test_gates_at_their_boundary_are_no_mixing() -> None:
    X = torch.ones(8, 4)
    net = Step()
    assert not torch.equal(net(X)[:1], net(X[:1]))  # its rounding depends on the size of the batch
    record(net, X)


def test_networks_of_many_kinds_pass() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(11, 8), nn.Linear(8, 2)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.embedding(x)).mean(1))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cell(x[:, None])[0][:, -1])

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).squeeze()

    X = torch.randn(20, 3, 8, 8)
    ntk(Tokens().eval(), torch.randint(11, (20, 5)))
    record(Recurrent().eval(), torch.randn(20, 3))
    record(Squeezed(), torch.randn(20, 3))
    resnet = models.ResNet((1, 1), (4, 8)).eval()
    record(resnet, X)
    record(gated_twin(resnet, "dlgn", example=X[:2]).eval(), X)
    record(models.frg(3, (4,), examples=20, seed=0), torch.randn(20, 3))
    record(nn.Sequential(nn.Linear(3, 2)), torch.zeros(4, 3))
