"""Path kernels of networks that split tensors into tuples, or change their input before the first layer reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import settle
from torch import Tensor, nn

from pathlens.errors import NoGateError, PathlensError, RecordError
from pathlens.kernels import npk, overlap
from pathlens.models import GatedNetwork, gated_twin
from pathlens.paths import count
from pathlens.recording import Record, record
from pathlens.testing.jacobians import count_shared_paths, weight_set_features
from pathlens.testing.tolerance import assert_kernel_close

KINDS = (
    "relu",
    "soft_relu",
    "galu",
    "flnpf",
    "soft_galu",
    "gates_only",
    "dln",
    "dlgn",
    "dlgn_pwc",
    "dlgn_frozen",
)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def check(net: GatedNetwork, X: Tensor, counts: bool = True) -> None:
    """Both kernels against the enumeration of weights and of paths."""
    phi = weight_set_features(net, X)
    want = phi @ phi.T
    assert float(want.abs().max()) > 0, "no active path tests nothing"
    assert_kernel_close(npk(net, X).dense(), want, want.diagonal())
    if counts:
        assert torch.equal(overlap(net, X).dense().long(), count_shared_paths(net, X))


def alive(template: nn.Module, kind: str, X: Tensor) -> GatedNetwork:
    """A twin in which most gates of some row are open."""
    for seed in range(20):
        net = gated_twin(template, kind, X[:2], seed=seed)
        if all(float(g.double().mean()) > 0.3 for g in net.gates(X, hard=True).values()):
            return net
    raise AssertionError("no seed leaves gates open")


# --- tuples ------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two dense layers and what is done between them."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 4, bias=False), nn.Linear(width, 2), nn.Linear(2, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(self.change(F.relu(self.a(x))))))


def swapped(parts: Any, h: Tensor) -> Tensor:
    u, v = parts
    return h + torch.cat([v, u], 1)


TUPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda h: swapped(h.chunk(2, 1), h),
    "torch.chunk": lambda h: swapped(torch.chunk(h, 2, dim=1), h),
    "split by size": lambda h: swapped(h.split(2, 1), h),
    "split by sizes": lambda h: swapped(h.split([3, 1], dim=1), h),
    "torch.split": lambda h: swapped(torch.split(h, [1, 3], 1), h),
    "split_with_sizes": lambda h: swapped(h.split_with_sizes([1, 3], 1), h),
    "tensor_split": lambda h: swapped(h.tensor_split(2, 1), h),
    "tensor_split at indices": lambda h: swapped(torch.tensor_split(h, [1], dim=1), h),
    "one of them": lambda h: F.pad(h.chunk(2, 1)[1], (1, 1)),
    "none but a chunk": lambda h: torch.cat([h.chunk(4, 1)[-1], h.chunk(4, 1)[0], h[:, 1:3]], 1),
    "a tuple joined": lambda h: torch.cat(h.chunk(2, 1), 1) + h.flip(1),
    "a slice of a tuple": lambda h: torch.cat(h.chunk(4, 1)[::-1], 1) + h,
    "a tuple and a tensor": lambda h: torch.cat([h.split([1, 3], 1)[1], h[:, :1]], 1),
    "hstack": lambda h: torch.hstack([h.chunk(2, 1)[1], h.chunk(2, 1)[0]]) + h,
    "scaled": lambda h: swapped((2 * h).chunk(2, 1), h),
}


@pytest.mark.parametrize("how", TUPLES)
def test_what_passes_through_a_tuple_is_not_lost(how: str) -> None:
    X = rows(4, 2)
    net = alive(Between(TUPLES[how]).double(), "galu", X)
    check(net, X, counts=how != "scaled")  # the enumeration takes a scale for a number of routes


def test_the_diagonal_of_a_network_that_adds_swapped_halves() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(swapped(F.relu(h := self.a(x)).chunk(2, 1), F.relu(h)))

    template = Swapped().double()
    X = rows(5, 2)
    net = gated_twin(template, "relu", X[:2])
    gates = [g.sum(1) for g in net.gates(X).values()]
    assert torch.equal(overlap(net, X).diagonal(), gates[0] + gates[1])


@pytest.mark.parametrize("kind", KINDS)
def test_tuples_in_networks_of_every_kind(kind: str) -> None:
    X = rows(4, 2)
    check(alive(Between(TUPLES["chunk"]).double(), kind, X), X)


class Scales(nn.Module):
    """A block of a Res2Net: each part of the channels reads the part before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(1, 3, 1), nn.Conv1d(1, 1, 3, padding=1), nn.Conv1d(1, 1, 1)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v, w = F.relu(self.a(x)).chunk(3, 1)
        v = F.relu(self.b(u + v))
        return self.out(torch.cat([u, v, F.relu(self.c(v + w))], 1).mean(2))


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_a_res2net_block(kind: str) -> None:
    X = rows(3, 1, 3)
    check(alive(Scales().double(), kind, X), X)


def positions(x: Tensor) -> Tensor:
    u, v = x.unbind(2)
    return u + v


class AtPositions(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 3, 1), nn.Linear(3, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.change(F.relu(self.a(x))))


def test_positions_taken_out_one_by_one() -> None:
    X = rows(4, 1, 2)
    check(alive(AtPositions(positions).double(), "galu", X), X)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: torch.stack([h[:, :, 0], h[:, :, 1]], 2).flatten(1)[:, ::2],
        lambda h: torch.stack([h, h.flip(2)], 3).mean(3).mean(2),
        lambda h: torch.stack(h.unbind(1), 1).mean(2),
    ],
    ids=["of positions", "of tensors", "of channels"],
)
def test_what_combines_several_tensors_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Each would be followed as if all of them were the same tensor."""
    X = rows(3, 1, 2)
    net = gated_twin(AtPositions(change).double(), "relu", X)
    for kernel in (overlap, npk):
        with pytest.raises(RecordError, match=r"stack|unbind|getitem"):
            kernel(net, X)


def test_a_constant_that_spreads_a_tensor_is_refused() -> None:
    X = rows(3, 1, 2)
    change = nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU(), Spread(), nn.Flatten(), nn.Linear(6, 1)).double()
    net = gated_twin(change, "relu", X)
    with pytest.raises(RecordError, match="spreads"):
        npk(net, X)


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(3, 2, dtype=torch.float64)


# --- batch-norm ----------------------------------------------------------------------------------------------------


class Weighed(nn.Module):
    """Channels that meet different weights of one batch-norm, and are added."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.norm = nn.BatchNorm1d(2 if of == "the input" else 4)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "the input":
            y = self.norm(x)
            return self.b(F.relu(y + y.flip(1)))
        h = F.relu(self.a(x))
        y = self.norm(torch.cat([h, h], 1))
        return self.b(F.relu(y[:, :2] + y[:, 2:]))


@pytest.mark.parametrize("of", ["the input", "a layer"])
def test_channels_that_met_different_weights_share_no_path(of: str) -> None:
    X = rows(4, 2)
    check(alive(settle(Weighed(of)), "galu", X), X)


# --- what enters -----------------------------------------------------------------------------------------------------


class Entry(nn.Module):
    """A network that changes its input before the first layer reads it."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], width: int = 3, shape: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(1.0, 4.0))
        self.register_buffer("std", torch.tensor([0.5, 2.0, 3.0]), persistent=False)
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.a, self.b, self.c = nn.Linear(width, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(self.change(self, x))))))


ENTRIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "numbers": (lambda net, x: (x - 0.5) / 0.25, 3),
    "three minus": (lambda net, x: 3 - x, 3),
    "buffers": (lambda net, x: (x - net.mean) / net.std, 3),
    "flip": (lambda net, x: x.flip(1), 3),
    "permutation": (lambda net, x: x[:, [2, 0, 1]], 3),
    "permutation by a buffer": (lambda net, x: torch.index_select(x, 1, net.order), 3),
    "zeros beside": (lambda net, x: F.pad(x, (1, 1)), 5),
    "ones beside": (lambda net, x: F.pad(x, (1, 0), value=1.0), 4),
    "a part": (lambda net, x: x[:, 1:], 2),
    "twice": (lambda net, x: torch.cat([x, 1 - x], 1), 6),
    "halves": (lambda net, x: torch.cat(x.split([1, 2], 1)[::-1], 1), 3),
    "a sum": (lambda net, x: x + 2 * x.flip(1), 3),
}


@pytest.mark.parametrize("kind", ["relu", "dlgn", "dlgn_pwc"])
@pytest.mark.parametrize("how", ENTRIES)
def test_fixed_operations_on_the_input_are_part_of_what_enters(how: str, kind: str) -> None:
    """A network and its twin give one kernel: x is what the first layer reads."""
    change, width = ENTRIES[how]
    X = rows(4, 3)
    template = Entry(change, width).double()
    net = alive(template, kind, X)
    check(net, X, counts=False)
    rec = record(net, X)
    K = npk(net, X)
    assert_kernel_close(npk(rec).dense(), K.dense(), K.diagonal())
    assert_kernel_close(npk(net, rec).dense(), K.dense(), K.diagonal())
    assert torch.equal(overlap(net, X).dense(), overlap(rec).dense())
    if kind == "relu":
        plain = npk(template, X)
        twin = npk(gated_twin(template, "relu", X[:2]), X)
        read = change(template, X)
        gates = list(gated_twin(template, "relu", X[:2]).gates(X).values())
        want = (read @ read.T) * (gates[0] @ gates[0].T) * (gates[1] @ gates[1].T)
        assert_kernel_close(plain.dense(), want, want.diagonal().clamp(min=1))
        assert_kernel_close(twin.dense(), want, want.diagonal().clamp(min=1))


class Images(nn.Module):
    """The same for images, with a part of the input that enters later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.tensor([0.3, 0.6])[:, None])
        self.a, self.b, self.c = nn.Conv1d(2, 2, 2), nn.Conv1d(2, 1, 1), nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "shortcut":
            y = (x - self.mean) / (self.mean + 1)
            return self.c((F.relu(self.a(y)) + (1 - y)[:, :, 1:]).mean(1))
        if self.how == "two ways":
            return self.c((F.relu(self.a(x.flip(2))) + F.relu(self.b(x - 1)[:, :, 1:])).flip(2).mean(1))
        if self.how == "batch-norm behind":
            return self.c(F.relu(self.b(F.relu(self.a(self.norm((x - 0.5) / 2)))))[:, 0])
        return self.c(F.relu(self.b(F.relu(self.a(F.avg_pool1d(F.pad(x - 2, (1, 1)), 3, 1)))))[:, 0])


@pytest.mark.parametrize("kind", ["galu", "dlgn_pwc"])
@pytest.mark.parametrize("how", ["batch-norm behind", "pooled"])
def test_images_are_changed_before_the_first_layer(how: str, kind: str) -> None:
    if how == "batch-norm behind" and kind == "dlgn_pwc":
        pytest.skip("ones enter behind the batch-norm")
    X = rows(3, 2, 4)
    check(alive(settle(Images(how)), kind, X), X, counts=False)


class Late(nn.Module):
    """The changed input is added to a hidden layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 2, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = (x - 0.5) / 2
        return self.b(F.relu(F.relu(self.a(y.flip(2))) + y).flatten(1))


def test_a_changed_input_that_enters_twice() -> None:
    X = rows(3, 2, 3)
    check(alive(Late().double(), "galu", X), X, counts=False)


class Learned(nn.Module):
    """Parameters act on the input before the first layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm1d(3, affine=how != "statistics")
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "shift":
            x = x + self.shift
        elif self.how == "scale":
            x = x * self.scale.exp()
        else:
            x = self.norm(x)
        return self.b(F.relu(self.a(x)))


@pytest.mark.parametrize("how", ["shift", "batch-norm", "statistics"])
@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_paths_start_before_what_is_learned(how: str, kind: str, tmp_path: Path) -> None:
    """A bias starts no path, and batch-norm is a weight: a record knows neither, and is refused."""
    X = rows(4, 3)
    template = settle(Learned(how)) if how == "batch-norm" else Learned(how).double().eval()
    net = gated_twin(template, kind, X[:2], gates_from=None if kind == "relu" else "dependent")
    gates = net.gates(X, hard=True)["relu@0"]
    assert torch.allclose(npk(net, X).dense(), (X @ X.T) * (gates @ gates.T), rtol=1e-12)
    assert torch.equal(overlap(net, X).dense(), gates @ gates.T)
    assert torch.equal(overlap(net, X).dense(), overlap(record(net, X)).dense())
    rec = record(net, X)
    rec.save(tmp_path / "rec")
    for given in (record(template, X), rec, rec.rows(1, 3), Record.load(tmp_path / "rec"), record(net, X, stream=True)):
        with pytest.raises(RecordError, match=r"before the first layer.*gated_twin"):
            npk(given)


def test_a_learned_number_is_no_fixed_one() -> None:
    X = rows(4, 3)
    template = Learned("scale").double()
    net = gated_twin(template, "relu", X[:2])
    for given in (lambda: npk(net, X), lambda: npk(template, X)):
        with pytest.raises(RecordError):
            given()


def test_inputs_are_counted_where_they_are() -> None:
    """Padding is no input; one that is read twice is counted twice, as any other connection."""
    X = rows(4, 3)
    for how, number in {
        "zeros beside": 3,
        "ones beside": 3,
        "a part": 2,
        "numbers": 3,
        "buffers": 3,
        "twice": 6,
    }.items():
        change, width = ENTRIES[how]
        template = Entry(change, width).double()
        net = alive(template, "galu", X)
        want = number * overlap(net, X).dense()
        assert torch.equal(overlap(net, X, include_inputs=True).dense(), want)
        for given in (template, record(net, X)):
            args = (X,) if given is template else ()
            with pytest.raises(RecordError, match="gated_twin"):
                overlap(given, *args, include_inputs=True)


# --- what has no paths ---------------------------------------------------------------------------------------------


class Missed(nn.Module):
    """A convolution whose only window lies in the padding."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 2, 1, stride=3, padding=1), nn.Conv1d(2, 2, 1)
        self.c, self.d = nn.Linear(2, 1), nn.Linear(1, 1)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(F.relu(self.b(F.relu(self.a(x)))).flatten(1))
        return y + self.d(x.flatten(1)) if self.shortcut else y


@pytest.mark.parametrize("kind", ["relu", "galu", "dlgn"])
@pytest.mark.parametrize("shortcut", [False, True])
def test_an_input_that_reaches_no_gate_starts_no_path_of_hidden_units(kind: str, shortcut: bool) -> None:
    X = rows(4, 1, 1)
    net = gated_twin(Missed(shortcut).double(), kind, X[:2])
    assert torch.equal(overlap(net, X).dense(), torch.zeros(4, 4).double())
    assert torch.equal(overlap(net, X, include_inputs=True).dense(), torch.full((4, 4), float(shortcut)).double())
    assert torch.allclose(npk(net, X).dense(), X.flatten(1) @ X.flatten(1).T * shortcut)
    assert list(count(net, X)) == [0] * 4


class OfParameters(nn.Module):
    """Beside the gates, or alone, a ReLU that reads no input."""

    def __init__(self, alone: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.p, self.a, self.b = nn.Parameter(torch.randn(shape)), nn.Linear(3, 4), nn.Linear(4, 1)
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h if self.alone else F.relu(h)) + F.relu(self.p))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_relu_of_parameters_is_no_gate(alone: bool, shape: tuple[int, ...]) -> None:
    X = rows(4, 3)
    template = OfParameters(alone, shape).double()
    assert len(record(template, X).sites) == 1 - alone
    for call in (overlap, npk):
        with pytest.raises(RecordError, match="no gate sites" if alone else "such as a shortcut"):
            call(template, X)
    if alone:
        with pytest.raises(NoGateError):
            gated_twin(template, "relu", X[:2])
        return
    net = gated_twin(template, "relu", X[:2])
    gates = net.gates(X)["relu@0"]
    assert torch.equal(overlap(net, X).dense(), gates @ gates.T)
    assert torch.allclose(npk(net, X).dense(), (X @ X.T) * (gates @ gates.T))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.b(F.relu(self.a(a) + self.a(b)))


@pytest.mark.parametrize("given", ["one", "two", "a list"])
@pytest.mark.parametrize("call", [overlap, npk, record, lambda net, X: gated_twin(net, "relu", X)])
def test_several_inputs_are_refused(call: Callable[..., Any], given: str) -> None:
    X = rows(4, 3).float()
    inputs = {"one": X, "two": (X, X), "a list": [X, X]}[given]
    with pytest.raises(PathlensError, match=r"one tensor|must be a tensor"):
        call(TwoInputs(), inputs)
