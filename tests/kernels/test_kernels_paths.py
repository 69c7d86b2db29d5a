"""Overlap and path kernels against the enumeration of paths and of weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import ConvNet, settle
from torch import Tensor, nn

from pathlens import models
from pathlens.errors import BudgetError, OptionError, PathlensError, RecordError
from pathlens.kernels import npk, overlap
from pathlens.kernels.wiring import Wiring
from pathlens.models import GatedNetwork
from pathlens.paths import count
from pathlens.recording import record
from pathlens.testing.jacobians import count_shared_paths, weight_set_features
from pathlens.testing.tolerance import assert_kernel_close


def check_paths(net: GatedNetwork, X: Tensor, *, soft: bool = False) -> None:
    phi = weight_set_features(net, X, hard=not soft)
    want = phi @ phi.T
    K = npk(net, X, soft=soft)
    assert float(want.abs().max()) > 0, "no active path tests nothing"
    assert_kernel_close(K.dense(), want, want.diagonal())
    assert torch.allclose(K.diagonal(), want.diagonal(), rtol=1e-12, atol=0)
    half = len(X) // 2
    cross = npk(net, X[:half], Y=X[half:], soft=soft)
    assert cross.shape == (half, len(X) - half) and not cross.symmetric
    assert_kernel_close(cross.dense(), want[:half, half:], want.diagonal()[:half], want.diagonal()[half:])
    if not soft:
        counts = count_shared_paths(net, X)
        assert torch.equal(overlap(net, X).dense().long(), counts)
        assert torch.equal(overlap(net, X[:half], Y=X[half:]).dense().long(), counts[:half, half:])


def open_twin(template: nn.Module, kind: str, X: Tensor) -> GatedNetwork:
    """A twin whose gates leave paths open: tiny networks are often dead."""
    for seed in range(20):
        net = models.gated_twin(template, kind, X[:2], seed=seed)
        if (
            sum(float(g.flatten(1).any(1).double().mean()) for g in net.gates(X, hard=True).values())
            > len(net.sites) - 0.5
        ):
            return net
    raise AssertionError("no seed leaves gates open")


# --- fully connected -------------------------------------------------------------------------------------------

KINDS = ("relu", "soft_relu", "galu", "soft_galu", "dlgn", "dlgn_pwc", "dln")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_dense_networks(kind: str, bias: bool) -> None:
    X = torch.randn(6, 3).double()
    net = open_twin(models.mlp(3, (3, 2), 1, bias=bias).double(), kind, X)
    check_paths(net, X)
    check_paths(net, X, soft=True)


@pytest.mark.parametrize("kind", ["relu", "galu", "soft_galu", "dlgn", "dlgn_pwc"])
@pytest.mark.parametrize("place", ["before a gate", "behind a gate", "of the input"])
def test_dense_networks_with_batch_norm(kind: str, place: str) -> None:
    """Its statistics move what layers read, and no path: the kernels are those of dense layers and gates in turn."""
    X = torch.randn(6, 3).double()
    first, second = [nn.Linear(3, 3), nn.ReLU()], [nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 1)]
    where = {"before a gate": 1, "behind a gate": 2, "of the input": 0}[place]
    first.insert(where, nn.BatchNorm1d(3))
    template = settle(nn.Sequential(*first, *second))
    nets = (settle(models.gated_twin(template, kind, X[:2], seed=seed)) for seed in range(50))
    net = next(net for net in nets if all(g.any(1).all() for g in net.gates(X, hard=True).values()))
    check_paths(net, X)
    if kind == "relu" and place != "of the input":
        gates = [g @ g.T for g in net.gates(X).values()]
        assert torch.equal(overlap(net, X).dense(), gates[0] * gates[1])
        assert overlap(net, X, max_bytes=4096).exact_counts().tolist() == (gates[0] * gates[1]).long().tolist()
        assert torch.allclose(npk(net, X).dense(), (X @ X.T) * gates[0] * gates[1], rtol=1e-12)
        assert list(count(net, X)) == (gates[0] * gates[1]).diagonal().long().tolist()
        with pytest.raises(RecordError, match=r"Call overlap\(net, X\)"):  # which is what was done above
            overlap(record(net, X))


def test_one_hidden_layer_and_inputs_counted() -> None:
    net, X = models.galu(3, hidden=(7,), seed=0).double(), torch.randn(5, 3).double()
    counts = overlap(net, X).exact_counts()
    assert np.array_equal(overlap(net, X, include_inputs=True).exact_counts(), 3 * counts)
    gates = net.gates(X)["relu1@0"]
    assert np.array_equal(counts, (gates @ gates.T).long().numpy())


def test_counts_are_integers_whatever_the_size() -> None:
    net, X = models.dln(2, hidden=(500,) * 20, seed=0), torch.randn(3, 2)
    assert overlap(net, X).exact_counts()[0, 1] == 500**20


def test_a_record_and_a_stream_give_the_same() -> None:
    net, X = models.dlgn(3, hidden=(8, 5), seed=0).double(), torch.randn(11, 3).double()
    K = overlap(net, X)
    rec, stream = record(net, X), record(net, X, stream=True)
    assert torch.equal(overlap(rec).dense(), K.dense())
    assert torch.equal(overlap(stream).dense(), K.dense())
    assert torch.equal(overlap(net, rec).dense(), K.dense())
    assert torch.equal(npk(stream).dense(), npk(net, X).dense())
    assert torch.allclose(overlap(stream, soft=True).dense(), overlap(net, X, soft=True).dense(), rtol=1e-12)


def test_soft_means_the_network_s_own_gates() -> None:
    net, X = models.dlgn(3, hidden=(8, 5), beta=2.0, seed=0).double(), torch.randn(4, 3).double()
    want = torch.ones(4, 4).double()
    for g in net.gates(X).values():
        want = want * (g @ g.T)
    assert torch.allclose(overlap(net, X, soft=True).dense(), want, rtol=1e-12)
    assert not torch.allclose(overlap(net, X).dense(), want, rtol=1e-2)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 10**6))
def test_overlap_is_what_it_counts(n: int, hidden: list[int], seed: int) -> None:
    net = models.dlgn(2, hidden=tuple(hidden), seed=seed)
    X = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    counts = overlap(net, X).exact_counts()
    assert np.array_equal(counts, counts.T)
    assert (np.diag(counts)[:, None] >= counts).all()  # shared paths are among each input's own
    product = np.ones((n, n), dtype=np.int64)
    for bits in record(net, X).bits.values():  # type: ignore[union-attr]
        product *= (bits.double() @ bits.double().T).long().numpy()
    assert np.array_equal(counts, product)


def test_twenty_layers_of_width_500_neither_overflow_nor_underflow() -> None:
    net, X = models.dlgn(4, hidden=(500,) * 20, seed=0), torch.randn(6, 4)
    K = npk(net, X).normalised().dense()
    exact = overlap(net, X).exact_counts().astype(object)
    sigma = (X.double() @ X.double().T).numpy()
    want = exact.astype(np.float64) * sigma
    want = torch.from_numpy(want / np.trace(want))
    assert torch.isfinite(K).all() and float(K.trace()) == pytest.approx(1.0, rel=1e-5)
    assert_kernel_close(K, want, want.diagonal())


# --- convolutions and shortcuts ----------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "zero padding": {},
    "flatten": {"pool": "flatten"},
    "stride": {"stride": 2},
    "stride, flatten": {"stride": 2, "pool": "flatten"},
    "several channels": {"channels": (2, 2, 2), "kernel": 2, "padding": 0},
    "circular": {"mode": "circular"},
    "reflection": {"mode": "reflect"},
    "dilation": {"dilation": 2, "padding": 2},
    "dense after": {"channels": (1, 1, 2), "kernel": 2, "dense": 2},
    "average pooling between": {"between": 2},
    "batch-norm": {"norm": True},
    "shortcut": {"channels": (1, 2, 2), "kernel": 1, "padding": 0, "shortcut": True},
    "shortcut, kernel 3": {"channels": (1, 1, 1), "shortcut": True},
    "shortcut, batch-norm": {"channels": (1, 2, 2), "kernel": 1, "padding": 0, "shortcut": True, "norm": True},
    "pooled shortcut": {"channels": (1, 1, 1), "shortcut": True, "between": 2},
    "pooled shortcut, flatten": {"channels": (1, 1, 1), "shortcut": True, "between": 2, "pool": "flatten"},
    "two dimensions": {"dims": 2, "channels": (1, 1, 1), "kernel": 2, "padding": 1, "size": 3},
    "two dimensions, stride": {"dims": 2, "channels": (1, 1, 1), "kernel": 2, "padding": 1, "stride": 2, "size": 4},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("kind", ["galu", "dlgn"])
def test_convolutional_networks(name: str, kind: str) -> None:
    options = CONVOLUTIONS[name]
    channels, size = options.get("channels", (1, 2, 1))[0], options.get("size", 6)
    X = torch.randn(4, channels, *(size,) * options.get("dims", 1)).double()
    net = open_twin(settle(ConvNet(**options)), kind, X)
    check_paths(net, X)
    if kind == "dlgn":
        check_paths(net, X, soft=True)


def test_a_convolution_s_kernel_has_a_name_and_says_where_integers_are() -> None:
    template = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1))
    net = models.gated_twin(template, "relu", torch.randn(2, 1, 5))
    K = overlap(net, torch.randn(4, 1, 5))
    assert K.name == "overlap"
    with pytest.raises(OptionError, match=r"paths\.count"):
        K.exact_counts()


def test_piecewise_constant_convolution() -> None:
    X = torch.randn(4, 1, 6).double()
    for norm in (False, True):  # with batch-norm the ones enter after the first layer
        net = models.gated_twin(settle(_Normed(norm)), "dlgn_pwc", X[:2], seed=3)
        check_paths(net, X)


class _Normed(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 2)
        self.norm = nn.BatchNorm1d(2) if norm else nn.Identity()
        self.output = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv1(x)))
        return self.output(F.relu(self.conv2(h)).mean(2))


class _Branches(nn.Module):
    """Channels joined, sliced, zero-padded, subtracted and scaled: what shortcuts of real networks do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 2, 1), nn.Conv1d(2, 2, 1)
        self.norm = nn.BatchNorm1d(2) if how == "scaled" else nn.Identity()
        self.how = how
        self.output = nn.Linear({"join": 4, "pad": 3, "slices, flatten": 4}.get(how, 2), 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv1(x))
        if self.how == "join":
            y = F.relu(torch.cat([self.conv2(h), h], dim=1))
        elif self.how == "pad":
            y = F.relu(F.pad(self.conv2(h), (0, 0, 0, 1)) + F.pad(h, (0, 0, 1, 0)))
        elif self.how == "twice":
            y = F.relu(self.conv2(h) + h + h)
        elif self.how == "difference":
            y = F.relu(0.5 * self.conv2(h) - h / 4 + h.roll(1, 2))
        elif self.how == "channels":
            y = F.relu(self.conv2(h) + h + h.flip(1))
        elif self.how == "scaled":
            y = self.conv2(h)
            y = F.relu(self.norm(y) + y)
        else:
            y = F.relu(self.conv2(h)[:, :, ::2] + h[:, :, 1::2] + h[:, :, ::2])
        return self.output(y.flatten(1) if "flatten" in self.how else y.mean(-1))


@pytest.mark.parametrize(
    "how", ["join", "pad", "twice", "difference", "channels", "scaled", "slices", "slices, flatten"]
)
def test_branches(how: str) -> None:
    X = torch.randn(4, 1, 4).double()
    net = open_twin(settle(_Branches(how)), "galu", X)
    phi = weight_set_features(net, X)
    want = phi @ phi.T
    assert_kernel_close(npk(net, X).dense(), want, want.diagonal())
    counts = count_shared_paths(net, X)
    if how != "difference":  # the enumeration takes a scale for a number of routes
        assert torch.equal(overlap(net, X).dense().long(), counts)


class _Starts(nn.Module):
    """Units that read the input in several ways, or through a layer that has no gate."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.input = nn.Conv1d(2, 2, 3, padding=1)  # named as the placeholder of many networks is
        self.conv2, self.conv3 = nn.Conv1d(4 if how == "join" else 2, 2, 3, padding=1), nn.Conv1d(2, 2, 1)
        self.output = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "around":
            h = F.relu(self.input(x) + x)
        elif self.how == "ungated":
            h = F.relu(self.conv3(self.input(x)))
        elif self.how == "both":
            h = F.relu(self.input(x) + self.conv3(x) + x.flip(1))
        elif self.how == "pad":
            h = F.relu(self.input(x)) + F.relu(F.pad(x[:, :, 1:], (1, 0)))
        elif self.how == "join":
            h = torch.cat([F.relu(self.input(x)), x], 1)
        else:
            h = F.relu(self.input(x))
        y = self.conv2(h)
        return self.output((F.relu(y + x) if self.how == "later" else F.relu(y)).flatten(1))


@pytest.mark.parametrize("how", ["around", "ungated", "both", "pad", "join", "later"])
def test_a_path_starts_once_at_a_unit_that_reads_the_input(how: str) -> None:
    X = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    net = open_twin(settle(_Starts(how)), "galu", X)
    counts = count_shared_paths(net, X)
    assert counts.max() > 0 and torch.equal(overlap(net, X).dense().long(), counts)
    phi = weight_set_features(net, X)
    assert_kernel_close(npk(net, X).dense(), phi @ phi.T, (phi @ phi.T).diagonal())


class _Joined(nn.Module):
    """The input beside a part of itself, with a pool between two gates: fields that share no channel."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.avg_pool1d(F.relu(torch.cat([x.flip(2)[:, :1], x], 1)), 2)
        return self.output(F.relu(h).mean(2))


@pytest.mark.parametrize(
    "template",
    [
        nn.Sequential(nn.AvgPool1d(2), nn.BatchNorm1d(2), nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1)),
        nn.Sequential(nn.Upsample(5), nn.BatchNorm1d(2), nn.Conv1d(2, 1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3, 1)),
        _Joined(),
    ],
    ids=["a smaller input", "a larger input", "joined"],
)
def test_what_is_made_of_the_input_before_the_first_layer(template: nn.Module) -> None:
    X = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    check_paths(open_twin(settle(template), "relu", X), X)


def test_a_map_that_selects_and_scales() -> None:
    """Averaging one position with two of padding: after flattening only p = q is carried, with squared weights."""
    template = nn.Sequential(
        nn.Conv1d(1, 3, 1), nn.ReLU(), nn.AvgPool1d(3, padding=1), nn.Flatten(), nn.Linear(3, 1)
    ).double()
    X = torch.randn(4, 1, 1).double()
    check_paths(open_twin(template, "galu", X), X)


def test_a_first_row_that_opens_nothing_tells_the_wiring_too() -> None:
    """Of zeros, pooling that keeps the shape makes zeros: it must not be taken for nothing at all."""
    template = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(2, 2, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 1, bias=False),
    ).double()
    X = torch.randn(5, 1, 3, 3).double()
    net = open_twin(template, "relu", X)
    X[0] = 0.0
    check_paths(net, X)


class _DenseResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.c(F.relu(self.b(h) + h))


def test_dense_shortcut() -> None:
    X = torch.randn(5, 3).double()
    net = models.gated_twin(_DenseResidual(2).double(), "galu", X[:2], seed=0)
    check_paths(net, X)


def test_a_record_shows_a_shortcut_around_a_gate() -> None:
    class Around(_DenseResidual):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return self.c(F.relu(self.b(h)) + h)

    X = torch.randn(5, 3).double()
    net = open_twin(Around(2).double(), "galu", X)
    check_paths(net, X)
    with pytest.raises(RecordError, match="have not switched"):
        overlap(record(net, X))


def test_resnet_template() -> None:
    """The recursion on a real residual network equals the mean over random values within its Monte-Carlo error."""
    X = torch.randn(3, 3, 8, 8).double()
    template = settle(models.ResNet((1, 1), (2, 3), outputs=1, shortcut="pad"))
    net = models.gated_twin(template, "galu", X[:2], seed=0)
    K = npk(net, X).dense()
    gates = list(net.gates(X).values())
    plain = {k: torch.zeros_like(v) for k, v in net.values.state_dict().items()}
    plain |= {k: torch.ones_like(v) for k, v in plain.items() if k.endswith("running_var")}
    weights = [k for k in plain if k.endswith("weight")]

    def output(signs: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net.values, plain | signs, (X, *gates))[:, 0]

    draws = 4000
    signs = {k: torch.randint(0, 2, (draws, *plain[k].shape)).double() * 2 - 1 for k in weights}
    f = torch.func.vmap(output, chunk_size=500)(signs)
    estimate = f.T @ f / draws
    scale = K.diagonal().sqrt()
    assert float(((estimate - K) / (scale[:, None] * scale)).abs().max()) < 0.25
    assert torch.isfinite(overlap(net, X).dense()).all()


def test_translation_invariance_of_pooled_circular_networks() -> None:
    net = models.gated_twin(
        models.CircularConvNet(6, channels=(1, 2, 2)).double(), "galu", torch.randn(2, 1, 6).double()
    )
    X = torch.randn(3, 1, 6).double()
    moved = torch.cat([X, X.roll(2, -1)])
    K = npk(net, moved).dense()
    assert_kernel_close(K[:3, 3:], K[:3, :3], K.diagonal()[:3], K.diagonal()[3:])


def test_blocks_do_not_change_the_result() -> None:
    X = torch.randn(7, 1, 6).double()
    net = models.gated_twin(ConvNet().double(), "galu", X[:2], seed=2)
    whole = npk(net, X)
    small = npk(net, X, max_bytes=45_000)
    dense = whole.dense()
    streamed = npk(net, record(net, X, stream=True)).dense()
    for got in (small.dense(), streamed, small[:, :].dense()):
        assert_kernel_close(got, dense, dense.diagonal())
    assert torch.allclose(whole[[4, 1, 1], 2:5].dense(), dense[[4, 1, 1], 2:5], rtol=1e-12)
    with pytest.raises(BudgetError, match="one pair of examples"):
        npk(net, record(net, X), max_bytes=1000)


def test_float32_counts_of_deep_convolutions_keep_their_ratios() -> None:
    template = nn.Sequential(nn.Conv1d(1, 40, 3, padding=1), nn.ReLU())
    for _ in range(24):
        template.extend([nn.Conv1d(40, 40, 3, padding=1), nn.ReLU()])
    template.extend([nn.Flatten(), nn.Linear(40 * 5, 1)])
    X = torch.randn(3, 1, 5)
    net = models.gated_twin(template, "dlgn", X[:2], seed=0)
    K, double = overlap(net, X).normalised(), overlap(net.double(), X.double()).normalised()
    assert K.dtype == torch.float32
    assert_kernel_close(K.dense(), double.dense(), double.diagonal())


# --- grouped and depthwise convolutions ------------------------------------------------------------------------------


class _Grouped(nn.Module):
    """Convolutions one after the other, each with its groups, and what real networks put between them."""

    def __init__(self, convolutions: tuple[nn.Module, ...], between: str = "", end: str = "average") -> None:
        super().__init__()
        self.convolutions, self.between, self.end = nn.ModuleList(convolutions), between, end
        first: Any = convolutions[0]
        dims = len(first.kernel_size)
        self.shape = (first.in_channels, *((6, 3, 2)[dims - 1],) * dims)
        last: Any = convolutions[-1]
        self.norm = nn.BatchNorm1d(last.out_channels) if between == "norm" else nn.Identity()
        self.output: nn.Module = nn.Identity()
        shape = self(torch.zeros(1, *self.shape)).shape
        self.output = nn.Identity() if end == "outputs" else nn.Linear(shape[1], 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, layer in enumerate(self.convolutions):
            y = layer(h)
            if i == len(self.convolutions) - 1:
                y = self.norm(y)
                if self.between in ("shortcut", "join"):
                    y = y + h if self.between == "shortcut" else torch.cat([y, h], 1)
            if i and self.between == "flip":
                y = y + y.flip(1)
            y = F.relu(y)
            if i == 0 and self.between == "shuffle":
                y = y[:, [j // 2 + j % 2 * 2 for j in range(4)]]
            if i == 0 and self.between == "pool":
                y = F.avg_pool1d(y, 2, 1)
            if i == 0 and self.between == "pad":
                y = F.pad(y, (0, 0, 1, 1))
            if i == 0 and self.between == "input":
                y = torch.cat([y, x], 1)
            h = y
        if self.end == "flatten":
            return self.output(h.flatten(1))
        return self.output(h.flatten(2).mean(2))


def _conv(a: int, b: int, kernel: int, groups: int = 1, dims: int = 1, **options: Any) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](a, b, kernel, groups=groups, **options)


GROUPED: dict[str, Any] = {
    "depthwise": lambda: _Grouped((_conv(1, 3, 1), _conv(3, 3, 2, 3), _conv(3, 1, 1))),
    "first, flatten": lambda: _Grouped((_conv(2, 2, 3, 2, stride=2, padding=1), _conv(2, 2, 1)), "", "flatten"),
    "two groups, then two": lambda: _Grouped((_conv(4, 4, 1, 2), _conv(4, 2, 2, 2, dilation=2))),
    "two groups, then four": lambda: _Grouped((_conv(2, 4, 2, 2), _conv(4, 4, 2, 4, padding=1))),
    "four groups, then two": lambda: _Grouped((_conv(4, 4, 2, 4), _conv(4, 4, 1, 2)), "", "flatten"),
    "multiplied": lambda: _Grouped((_conv(2, 4, 2, 2), _conv(4, 2, 1))),
    "shuffled": lambda: _Grouped((_conv(2, 4, 1, 2), _conv(4, 4, 2, 4), _conv(4, 1, 1)), "shuffle"),
    "shortcut": lambda: _Grouped((_conv(1, 2, 2), _conv(2, 2, 3, 2, padding=1)), "shortcut"),
    "shortcut twice": lambda: _Grouped((_conv(2, 2, 2, 2), _conv(2, 2, 1, 2), _conv(2, 2, 1, 2)), "shortcut"),
    "channels meet": lambda: _Grouped((_conv(1, 2, 1), _conv(2, 2, 2, 2), _conv(2, 1, 1)), "flip"),
    "join": lambda: _Grouped((_conv(1, 2, 2), _conv(2, 2, 1, 2)), "join"),
    "groups of the input and of units": lambda: _Grouped((_conv(2, 2, 1), _conv(4, 4, 2, 2)), "input"),
    "groups of zeros": lambda: _Grouped((_conv(1, 2, 2), _conv(4, 4, 1, 4), _conv(4, 1, 1)), "pad"),
    "batch-norm": lambda: _Grouped((_conv(1, 2, 2), _conv(2, 2, 2, 2)), "norm"),
    "average pooling between": lambda: _Grouped((_conv(2, 2, 2, 2), _conv(2, 2, 2, 2), _conv(2, 1, 1)), "pool"),
    "circular": lambda: _Grouped((_conv(1, 2, 2), _conv(2, 2, 3, 2, padding=1, padding_mode="circular"))),
    "two dimensions": lambda: _Grouped((_conv(1, 2, 1, 1, 2), _conv(2, 2, 2, 2, 2, padding=1), _conv(2, 1, 1, 1, 2))),
    "three dimensions": lambda: _Grouped((_conv(2, 2, 1, 2, 3), _conv(2, 2, 1, 2, 3)), "", "flatten"),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_convolutions(name: str) -> None:
    template = GROUPED[name]()
    X = torch.randn(4, *template.shape).double()
    settle(template)
    twins = (models.gated_twin(template, "galu", X[:2], seed=seed) for seed in range(20))
    # channels that never meet leave few paths: take gates that open some for most rows
    net = next(net for net in twins if int((weight_set_features(net, X) != 0).any(1).sum()) > 2)
    check_paths(net, X)
    check_paths(models.gated_twin(template, "dlgn", X[:2], seed=0), X, soft=True)


def test_outputs_of_groups_count_each_with_its_own() -> None:
    template = settle(_Grouped((_conv(1, 2, 2), _conv(2, 2, 2, 2)), "", "outputs"))
    X = torch.randn(4, *template.shape).double()  # type: ignore[misc]
    net = models.gated_twin(template, "dlgn", X[:2], seed=0)
    one, other = (phi @ phi.T for phi in (weight_set_features(net, X, hard=False, output=k) for k in range(2)))
    want = (one + other) / 2
    assert not torch.allclose(one, other, rtol=0.1)
    assert_kernel_close(npk(net, X, soft=True).dense(), want, want.diagonal())


class _Slices(nn.Module):
    """A grouped convolution as slices of channels, ungrouped convolutions and a join."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.groups, self.width = layer.groups, layer.in_channels // layer.groups
        out = layer.out_channels // layer.groups
        self.parts = nn.ModuleList()
        for g in range(layer.groups):
            part = nn.Conv2d(self.width, out, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            state = {k: v[g * out : (g + 1) * out] for k, v in layer.state_dict().items()}
            part.load_state_dict(state)
            self.parts.append(part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x[:, g * self.width : (g + 1) * self.width]) for g, part in enumerate(self.parts)], 1)


class _Mobile(nn.Module):
    """Blocks of 1×1, depthwise 3×3 and 1×1 with shortcuts."""

    def __init__(self, groups: int, end: str) -> None:
        super().__init__()
        self.stem, self.end = nn.Conv2d(3, 4, 3, padding=1), end
        self.widen = nn.ModuleList(nn.Conv2d(4, 6, 1) for _ in range(2))
        self.middle = nn.ModuleList(
            [nn.Conv2d(6, 6, 3, padding=1, groups=groups), nn.Conv2d(6, 12, 3, 2, 1, groups=groups)]
        )
        self.narrow = nn.ModuleList([nn.Conv2d(6, 4, 1, groups=2), nn.Conv2d(12, 4, 1)])
        self.output = nn.Linear(4 if end == "average" else 4 * 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        h = h + self.narrow[0](F.relu(self.middle[0](F.relu(self.widen[0](h)))))
        h = self.narrow[1](F.relu(self.middle[1](F.relu(self.widen[1](h)))))
        return self.output(h.mean((2, 3)) if self.end == "average" else h.flatten(1))

    def sliced(self) -> nn.Module:
        twin = copy.deepcopy(self)
        twin.middle = nn.ModuleList(_Slices(layer) for layer in self.middle)
        twin.narrow[0] = _Slices(self.narrow[0])
        return twin.double()


@pytest.mark.parametrize("end", ["average", "flatten"])
@pytest.mark.parametrize("groups", [6, 3])
def test_groups_are_slices_of_channels(groups: int, end: str) -> None:
    X = torch.randn(7, 3, 5, 5).double()
    template = _Mobile(groups, end).double()
    net, other = (models.gated_twin(t, "relu", X[:2]) for t in (template, template.sliced()))
    for soft in (False, True):
        want = npk(other, X, soft=soft).dense()
        assert float(want.abs().max()) > 0
        for budget in (None, 2_000_000):
            K = npk(net, X, soft=soft, max_bytes=budget)
            assert_kernel_close(K.dense(), want, want.diagonal())
        cross = npk(net, X[:3], Y=X, soft=soft)
        assert_kernel_close(cross.dense(), want[:3], want.diagonal()[:3], want.diagonal())
    for inputs in (False, True):
        assert torch.equal(
            overlap(net, X, include_inputs=inputs).dense(), overlap(other, X, include_inputs=inputs).dense()
        )


def test_kernels_of_groups_are_held_only_where_they_are_read_again() -> None:
    """A depthwise layer before an ungrouped one takes the memory of no more than a few kernels."""
    X = torch.randn(2, 3, 8, 8)
    stem, depthwise = nn.Conv2d(3, 32, 3, padding=1), [nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(2)]
    end = [nn.ReLU(), nn.Conv2d(32, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    once = models.gated_twin(nn.Sequential(stem, nn.ReLU(), depthwise[0], *end), "relu", X)
    twice = models.gated_twin(nn.Sequential(stem, nn.ReLU(), depthwise[0], nn.ReLU(), depthwise[1], *end), "relu", X)
    plain = models.gated_twin(nn.Sequential(stem, *end), "relu", X)
    few, many, none = (Wiring(net, X).held_values(diagonal=False) for net in (once, twice, plain))
    assert none == 0 and few == 2 * 64**2 and many == few + 32 * 64**2
    budget = 2_000_000
    assert torch.isfinite(npk(once, X, max_bytes=budget).dense()).all()
    with pytest.raises(BudgetError, match="one pair of examples"):
        npk(twice, X, max_bytes=budget)


# --- what is refused -----------------------------------------------------------------------------------------------


class _MaxPooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.output = nn.Conv1d(1, 2, 1), nn.MaxPool1d(2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.pool(F.relu(self.conv(x))).mean(-1))


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "max-pooling": (_MaxPooled(), "max-pooling"),
    "used twice": (ConvNet(channels=(2, 2, 2), reuse=True), "used twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_node(name: str) -> None:
    template, message = REFUSED[name]
    X = torch.randn(2, 1 if name == "max-pooling" else 2, 6).double()
    net = models.gated_twin(template.double(), "galu", X)
    for kernel in (npk, overlap):
        with pytest.raises(RecordError, match=message):
            kernel(net, X)


def test_a_batch_norm_that_is_called_twice_has_no_path_features() -> None:
    """Both calls multiply by the same weights, so that their paths are not apart; paths are counted all the same."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.norm, self.output = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.hidden(x))
            return self.output(self.norm(h) + self.norm(h.flip(1)))

    X = torch.randn(3, 3).double()
    net = models.gated_twin(Twice().double().eval(), "galu", X)
    with pytest.raises(RecordError, match=r"'norm' are used twice"):
        npk(net, X)
    assert torch.equal(overlap(net, X).dense(), count_shared_paths(net, X).double())


def test_mean_over_channels_is_refused() -> None:
    class Committee(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.hidden(x)).mean(1, keepdim=True)

    X = torch.randn(2, 3).double()
    with pytest.raises(RecordError, match="mixes channels"):
        npk(models.gated_twin(Committee().double(), "galu", X), X)


def test_records_that_do_not_tell_the_wiring() -> None:
    X = torch.randn(3, 1, 6)
    net = models.gated_twin(ConvNet(), "galu", X)
    with pytest.raises(RecordError, match="convolutional"):
        overlap(record(net, X))
    with pytest.raises(RecordError, match="gated_twin"):
        overlap(ConvNet(), X)
    with pytest.raises(RecordError, match="not a chain"):
        overlap(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(3, 2))
    with pytest.raises(RecordError, match=r"no gate sites \(no ReLU.*kernels.ntk"):
        overlap(nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1)), torch.randn(3, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda net, X: overlap(net),
        lambda net, X: overlap(X),
        lambda net, X: overlap(record(net, X), X),
        lambda net, X: overlap(record(net, X), Y=X),
        lambda net, X: npk(record(net, X), Y=record(models.relu(2, hidden=(3,)), X)),
        lambda net, X: npk(record(net, X), Y=record(net.double(), X.double())),
        lambda net, X: overlap(net, X * float("nan")),
        lambda net, X: overlap(net, X.double()),
        lambda net, X: overlap(net, X[:0]),
    ],
)
def test_bad_input(call: Any) -> None:
    with pytest.raises(PathlensError):
        call(models.relu(2, hidden=(3, 3), seed=0), torch.randn(4, 2))


def test_a_plain_fully_connected_module_needs_no_twin() -> None:
    module = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    X = torch.randn(6, 2)
    twin = models.gated_twin(module, "relu", X)
    assert np.array_equal(overlap(module, X).exact_counts(), overlap(twin, X).exact_counts())
    assert not issubclass(OptionError, RecordError)
