"""Records of plain modules that nobody converted: the tape hears functional, in-place, reused and tied layers."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gradient_oracle import check_record
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pathlens import Trajectory, gated_twin, kernels, models, paths, record, regions, train
from pathlens.errors import NotFiniteError, RecordError, UngatedWarning
from pathlens.records import Convolution, Record, unfold


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Base(nn.Module):
    """Three layers of equal width, for forwards of many styles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.relu = nn.ReLU(inplace=True)


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        h = self.relu(self.a(x))
        z = self.b(h)
        z += h
        return self.c(self.relu(z))


class Functional(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.a.weight, self.a.bias), inplace=True)
        h = torch.relu(F.linear(input=h, weight=self.b.weight))
        return F.linear(h.relu(), self.c.weight, bias=self.c.bias)


class Asks(Functional):
    """Asking a weight for its shape or type is no use of it."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.a.weight.shape[1] and self.a.weight.size(0) == 4
        return super().forward(x.to(self.a.weight.dtype))


class ReusedLinear(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        h = self.relu(self.b(h))
        return self.c(self.relu(self.a(self.b(h))))


class TwoNames(Base):
    """One layer registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.relu(self.again(self.relu(self.a(x)))))


class TiedWeights(Base):
    """Two layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.relu(self.b(self.relu(self.a(x)))))


class SharedBias(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        return self.c(F.linear(h, self.b.weight, self.a.bias))


class AlsoByMatmul(Base):
    """b's weight is used by a linear call and by a matrix product: its calls do not give the whole gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.b(self.relu(self.a(x))))
        return self.c(h @ self.b.weight.T)


class OnlyByMatmul(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.relu(self.a(x) @ self.b.weight))


class OwnParameters(nn.Module):
    """F.linear on parameters that are in no layer, one at the root named `weight`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.deep = nn.ParameterList([nn.Parameter(torch.randn(2, 3))])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, self.weight, self.bias)), self.deep[0])


class Computed(Base):
    """A weight that is computed from a parameter is no layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.linear(self.relu(self.a(x)), self.b.weight * 2))


class NormedTail(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.c(self.norm(self.relu(self.a(x))))


class OneOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.relu(self.a(x)))[:, 0]


class Squeezed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.a(x)).sum(1, keepdim=True).squeeze()


class Cut(Base):
    """Nothing flows back through a detached layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.relu(self.a(x).detach()))


class Leaky(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.leaky_relu(F.leaky_relu(self.a(x), 0.3), negative_slope=0.1))


NETS = [
    InPlace,
    Functional,
    Asks,
    ReusedLinear,
    TwoNames,
    TiedWeights,
    SharedBias,
    AlsoByMatmul,
    OnlyByMatmul,
    OwnParameters,
    Computed,
    NormedTail,
    OneOutput,
    Squeezed,
    Cut,
    Leaky,
]


@pytest.mark.filterwarnings("ignore::pathlens.errors.UngatedWarning")  # NormedTail
@pytest.mark.parametrize("cls", NETS, ids=lambda c: c.__name__)
def test_gradients_of_modules_of_every_style(cls: type[nn.Module]) -> None:
    net, x = cls().double(), rows(5, 4)
    before, own = x.clone(), list(net.parameters())
    rec = record(net, x)
    assert torch.equal(x, before) and torch.equal(rec.x, before)
    assert all(a is b for a, b in zip(own, net.parameters(), strict=True))
    check_record(net, x, rec)


class Overwrites(Base):
    """Writes into a tensor after a layer has read it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = self.b(h)
        h.mul_(3)
        return self.c(z + h)


def test_a_layer_input_is_what_the_layer_read() -> None:
    net, x = Overwrites().double(), rows(3, 4)
    rec = record(net, x)
    assert torch.allclose(rec.inputs("b")[:, 0], net.a(x), rtol=0, atol=1e-14)
    back = rec.sensitivities("c", 0)[:, 0] @ net.c.weight
    assert torch.allclose(rec.sensitivities("a", 0)[:, 0], back @ net.b.weight + 3 * back, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore::pathlens.errors.UngatedWarning")  # NormedTail
def test_untracked_is_what_the_layers_do_not_tell() -> None:
    tracked = {
        cls: (tuple(layer.name for layer in rec.layers), rec.untracked)
        for cls in NETS
        if (rec := record(cls().double(), rows(3, 4)))
    }
    assert tracked[AlsoByMatmul] == (("a", "c"), ("b.weight",))
    assert tracked[OnlyByMatmul] == (("a", "c"), ("b.weight",))
    assert tracked[Asks] == (("a", "b", "c"), ())
    assert tracked[Computed] == (("a", "c"), ("b.weight",))
    assert tracked[TiedWeights] == (("a", "c"), ("a.bias", "b.bias"))
    assert tracked[SharedBias] == (("a", "b", "c"), ("a.bias",))
    assert tracked[TwoNames] == (("a", "c"), ("b.weight",))
    assert tracked[OwnParameters] == (("weight", "deep.0"), ())
    assert tracked[NormedTail] == (("a", "c"), ("b.weight", "norm.weight", "norm.bias"))


def test_frozen_weight_with_trained_bias() -> None:
    net, x = Functional().double(), rows(3, 4)
    net.a.weight.requires_grad_(False)
    net.c.bias.requires_grad_(False)
    rec = record(net, x)
    assert [(layer.name, layer.trainable, layer.bias) for layer in rec.layers] == [
        ("a", False, False),
        ("b", True, False),
        ("c", True, False),
    ]
    assert rec.untracked == ("a.bias",)


@pytest.mark.filterwarnings("ignore::pathlens.errors.UngatedWarning")  # NormedTail
def test_identity_is_found_only_where_the_output_is_the_layer() -> None:
    def last(net: nn.Module) -> list[str]:
        return [layer.name for layer in record(net.double(), rows(3, 4)).layers if layer.identity]

    assert last(Functional()) == ["c"] and last(InPlace()) == ["c"]
    assert last(NormedTail()) == [] and last(OneOutput()) == []
    assert last(nn.Sequential(nn.Linear(4, 2))) == ["0"]
    doubled = nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Dropout(0.0))
    check_record(doubled.double(), rows(3, 4), record(doubled, rows(3, 4)))


@pytest.mark.parametrize("tokens", [(3,), (2, 3)], ids=["(n, T, I)", "(n, S, T, I)"])
def test_token_inputs(tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), nn.Flatten(), nn.Linear(2 * torch.tensor(tokens).prod(), 3)
    )
    x = rows(3, *tokens, 4)
    rec = record(net.double(), x)
    assert rec.inputs("0").shape == (3, x[0].numel() // 4, 4)
    check_record(net, x, rec)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect"])
def test_padding_modes_and_3d(padding_mode: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), padding_mode=padding_mode)
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    x = rows(2, 1, 2, 4, 4)
    net(x.float())
    rec = record(net.double(), x)
    check_record(net, x, rec)


def test_functional_convolution_with_short_options() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(2, 1, 2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(F.conv2d(x, self.w, None, [2], (1,), dilation=[1])).flatten(1)

    net, x = Net().double(), rows(2, 1, 4, 4)
    check_record(net, x, record(net, x))


def test_names_of_sites_agree_with_the_twin() -> None:
    for cls in (InPlace, Functional, ReusedLinear, TwoNames, Leaky):
        net, x = cls().double(), rows(3, 4)
        assert record(net, x).sites == record(gated_twin(net, "relu", x), x).sites


class UnusedInPlace(nn.Module):
    """A ReLU that changes its input in place, before any layer or a view, and that nobody reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        z = h - 1 if "layer" in self.how else x - 1
        z = z[:, 1:] if "view" in self.how else z
        z.relu_()
        return self.b(h)


@pytest.mark.parametrize("how", ["input", "view of the input", "layer", "view of a layer"])
def test_an_unused_relu_that_works_in_place_is_no_site(how: str) -> None:
    net, x = UnusedInPlace(how).double(), rows(3, 4)
    rec = record(net, x)
    assert rec.sites == record(gated_twin(net, "relu", x), x).sites == ("relu@0",)
    assert rec.chain
    used = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    assert record(used, x).sites == ("0@0", "2@0") and torch.equal(record(used, x).bits["0@0"], x > 0)


def test_a_site_that_nobody_named() -> None:
    assert record(Functional().double(), rows(3, 4)).sites == ("relu@0", "relu@1", "relu@2")
    assert record(InPlace().double(), rows(3, 4)).sites == ("relu@0", "relu@1")
    leaky = record(Leaky().double(), rows(3, 4))
    assert set(leaky.gates("relu@0").unique().tolist()) == {0.3, 1.0}


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda net: compiled(nn.DataParallel(net))])
def test_a_compiled_or_parallel_module_is_taken_for_what_it_wraps(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    x = rows(6, 4)
    rec = record(wrap(net), x)
    assert [layer.name for layer in rec.layers] == ["0", "3"] and rec.untracked == ("1.weight", "1.bias")
    twin = gated_twin(wrap(net), "soft_relu", x[:2])
    assert twin.site_names == ("2@0",)
    for one in (net, twin):  # batch-norm's parameters are in no layer; soft units have two parts
        for options in ({}, {"part": "value"}, {"layer": "values.0" if one is twin else "0"}):
            assert torch.equal(kernels.ntk(wrap(one), x, **options).dense(), kernels.ntk(one, x, **options).dense())
    hard = gated_twin(net, "relu", x[:2])
    assert torch.equal(kernels.npk(wrap(hard), x).dense(), kernels.npk(hard, x).dense())
    assert list(paths.count(wrap(hard), x)) == list(paths.count(hard, x))
    fits = [kernels.LinearisedModel(one).fit(x, rows(6, 2), ridge=1.0) for one in (net, wrap(net))]
    assert fits[0].residual == fits[1].residual
    ways = []
    for dress in (lambda n: n, wrap):
        mine, teacher = copy.deepcopy(net), copy.deepcopy(net)
        ways.append([train(dress(mine), (x, rows(6, 2)), epochs=2, teacher=dress(teacher), progress=False).history])
        ways[-1].append(mine.state_dict())  # trained in place
    assert ways[0][0] == ways[1][0] and all(torch.equal(v, ways[1][1][k]) for k, v in ways[0][1].items())


def test_localisation_networks_of_the_papers() -> None:
    for activation in ("relu", "erf", "sigmoid"):
        net = models.LocalisationNet(4, 3, activation, "trainable", bias=True).double()
        with contextlib.nullcontext() if activation == "relu" else pytest.warns(UngatedWarning, match=activation):
            rec = record(net, rows(3, 4))
        check_record(net, rows(3, 4), rec)


def test_recording_under_no_grad_inference_mode_and_autocast() -> None:
    net, x = Functional(), rows(3, 4).float()
    plain = record(net, x)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            rec = record(net, x.clone())
        for layer in plain.layers:
            assert torch.equal(rec.sensitivities(layer.name, 1), plain.sensitivities(layer.name, 1))
        assert torch.equal(rec.f, plain.f)


def test_the_live_network_is_left_as_it_is() -> None:
    class Busy(Functional):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return super().forward(x)

    net = Busy().double()
    net.b.weight.requires_grad_(False)
    net(rows(3, 4)).sum().backward()
    called: list[int] = []
    net.a.register_forward_hook(lambda *_: called.append(1))
    net.train()
    state = copy.deepcopy(net.state_dict())
    grads = {k: None if p.grad is None else p.grad.clone() for k, p in net.named_parameters()}
    flags = [p.requires_grad for p in net.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]
    random = torch.get_rng_state()
    for stream in (False, True):
        record(net, rows(3, 4), stream=stream).rows(0, 2)
        with pytest.raises(RecordError):
            record(net, rows(3, 4), outputs=9)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all((p.grad is None) == (grads[k] is None) for k, p in net.named_parameters())
    assert all(torch.equal(p.grad, grads[k]) for k, p in net.named_parameters() if p.grad is not None)
    assert [p.requires_grad for p in net.parameters()] == flags
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.training for m in net.modules())
    assert not any(p.grad_fn for p in net.parameters())


# --- what is refused -------------------------------------------------------------------------------------------


class Returns(Base):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> object:
        f = self.c(self.a(x))
        return {
            "tuple": lambda: (f, x),
            "3-D": lambda: f[:, None],
            "sum": lambda: f.sum(),
            "columns": lambda: f.T,
            "dict": lambda: {"logits": f},
        }[self.what]()


@pytest.mark.parametrize("what", ["tuple", "3-D", "sum", "columns", "dict"])
def test_outputs_of_other_shapes_are_refused(what: str) -> None:
    with pytest.raises(RecordError, match=r"must return a tensor of shape \(n, c\), got .* Wrap it"):
        record(Returns(what), torch.randn(3, 4), stream=False).rows(0, 3)


class RowsInside(Base):
    def forward(self, x: Tensor) -> Tensor:  # (n, T, 4)
        h = self.a(x.transpose(0, 1)).transpose(0, 1)
        return self.c(h).sum(1)


class RowsMerged(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x.reshape(-1, 4)).reshape(x.shape)).sum(1)


class RowByRow(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.c(self.a(row)) for row in x])


@pytest.mark.parametrize("cls", [RowsInside, RowsMerged], ids=lambda c: c.__name__)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_that_are_not_the_first_dimension_are_refused(cls: type[nn.Module], n: int) -> None:
    with pytest.raises(RecordError, match="Rows must stay"):
        record(cls(), torch.randn(n, 3, 4))


def test_layers_without_a_batch_dimension_are_refused() -> None:
    with pytest.raises(RecordError, match="no batch dimension"):
        record(RowByRow(), torch.randn(3, 4))
    with pytest.raises(RecordError, match="no batch dimension"):
        record(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(0)), torch.randn(1, 4))


class NotTrainable(Base):
    """Torch itself cannot differentiate this: the ReLU's result is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        h += 1
        return self.c(h)


def test_networks_that_torch_cannot_differentiate() -> None:
    with pytest.raises(RecordError, match=r"cannot be differentiated.*inplace operation"):
        record(NotTrainable(), torch.randn(3, 4))
    assert record(NotTrainable(), torch.randn(3, 4), sensitivities=False).sites == ("relu@0",)


class FunctionalDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.dropout(self.a(x), 0.5))


class BatchStatistics(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.batch_norm(self.a(x), None, None, training=True))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "module '1' is in train mode, where batch-norm mixes"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), "module '1' is in train mode, where dropout is random"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval(), "no running statistics"),
        (FunctionalDropout().eval(), "dropout works as in training"),
        (nn.Sequential(BatchStatistics()).eval(), "batch_norm in module '0' works as in training"),
        (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), "rrelu in module '1' works as in training"),
        (nn.Sequential(nn.Identity(), models.relu(4, (3,))), "module '1' is a GatedNetwork inside another"),
        (lambda x: x, "expected an nn.Module, got function"),
    ],
)
def test_networks_that_cannot_be_recorded(net: nn.Module, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        record(net, torch.randn(3, 4))


def test_modules_that_are_harmless_in_train_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU(), nn.GroupNorm(2, 4)).double()
    check_record(net, rows(3, 4), record(net, rows(3, 4)))


def test_scripted_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch deprecate it
        scripted = torch.jit.script(nn.Linear(4, 2))
    with pytest.raises(RecordError, match=r"torch\.jit"):
        record(nn.Sequential(nn.Linear(4, 4), scripted), torch.randn(3, 4))


# --- patches ---------------------------------------------------------------------------------------------------


@st.composite
def geometry(draw: st.DrawFn) -> tuple[int, Convolution, tuple[int, ...], int, int]:
    dims = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 2))

    def each(lo: int, hi: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(lo, hi), min_size=dims, max_size=dims)))

    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    size = tuple(
        max(d * (k - 1) + 1 - 2 * p, 1) + e for k, d, p, e in zip(kernel, dilation, padding, each(0, 3), strict=True)
    )
    call = Convolution(kernel, stride, tuple((p, p) for p in padding), dilation, groups)
    return dims, call, size, groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(geometry())
def test_patches_times_weight_is_the_convolution(case: tuple[int, Convolution, tuple[int, ...], int, int]) -> None:
    dims, call, size, channels, m = case
    image, weight = rows(2, channels, *size), rows(m, channels // call.groups, *call.kernel, seed=1)
    function = {1: F.conv1d, 2: F.conv2d}[dims]
    padding = tuple(p for p, _ in call.padding)
    expected = function(image, weight, None, call.stride, padding, call.dilation, call.groups)
    patches = unfold(image, call)
    per_group = patches.unflatten(1, (call.groups, -1))  # (n, G, P, I)
    got = torch.einsum("ngpi,gmi->ngmp", per_group, weight.flatten(1).unflatten(0, (call.groups, -1)))
    assert torch.allclose(got.reshape(expected.shape), expected, rtol=0, atol=1e-12)
    if dims == 2 and call.groups == 1:
        torch_patches = F.unfold(image, call.kernel, call.dilation, padding, call.stride).transpose(1, 2)
        assert torch.equal(patches, torch_patches)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@settings(max_examples=30, deadline=None)
@given(geometry(), st.booleans())
def test_gradients_of_any_convolution(case: tuple[int, Convolution, tuple[int, ...], int, int], same: bool) -> None:
    dims, call, size, channels, m = case
    options = {"dilation": call.dilation, "groups": call.groups, "stride": call.stride}
    options["padding"] = tuple(p for p, _ in call.padding)
    if same:
        options |= {"padding": "same", "stride": 1}
    torch.manual_seed(0)
    net = nn.Sequential({1: nn.Conv1d, 2: nn.Conv2d}[dims](channels, m, call.kernel, **options), nn.Flatten())
    x = rows(2, channels, *size)
    check_record(net.double(), x, record(net, x))


# --- activations that are no gates -----------------------------------------------------------------------------


class Handwritten(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        z = self.b(h)
        return torch.sigmoid(self.c(z * z.sigmoid() + F.tanh(z)))


UNGATED = {
    "gelu": (nn.GELU(), "GELU in module '1'"),
    "relu6": (nn.ReLU6(), "ReLU6 in module '1'"),
    "silu": (nn.SiLU(inplace=True), "SiLU in module '1'"),
    "prelu": (nn.PReLU(), "PReLU in module '1'"),
    "threshold": (nn.Threshold(0.0, 0.0), "Threshold in module '1'"),
}


@pytest.mark.parametrize("unit, name", UNGATED.values(), ids=UNGATED)
def test_activations_that_are_no_gates_are_told(unit, name, tmp_path):
    net = nn.Sequential(nn.Linear(4, 5), unit, nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2), nn.Sigmoid()).double()
    with pytest.warns(UngatedWarning, match=name) as caught:
        rec = record(net, rows(6, 4))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert rec.sites == ("3@0",) and rec.ungated == (name,) == rec.rows(1, 3).ungated  # the output's is none of them
    check_record(net, rows(6, 4), rec)
    with pytest.warns(UngatedWarning, match=name):
        assert record(net, rows(6, 4), stream=True).ungated == (name,)
    rec.save(tmp_path / "rec")
    assert Record.load(tmp_path / "rec").ungated == (name,)


def test_functional_activations_are_told_by_the_module_that_calls_them():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Handwritten().double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    inner = "sigmoid in module 'inner', mul in module 'inner', tanh in module 'inner'"
    with pytest.warns(UngatedWarning, match=f"no gates at {inner}: only ReLU"):
        record(Outer(), rows(6, 4))
    with pytest.warns(UngatedWarning, match="no gates at sigmoid, mul, tanh: only ReLU"):
        record(Handwritten().double(), rows(6, 4))


NONLINEAR = {
    "clamp": lambda h: h.clamp(min=0),
    "abs": torch.abs,
    "maximum": lambda h: torch.maximum(h, torch.zeros(())),
    "where": lambda h: torch.where(h > 0, h, 0.0),
    "softmax": lambda h: F.softmax(h, 1),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[1:]),
    "square": torch.square,
    "pow": lambda h: h**2,
    "mul": lambda h: h * h,
    "div": lambda h: h / (h + 9),
    "min": lambda h: h.min(1, True)[0] + h,
    "matmul": lambda h: (h[:, :, None] @ h[:, None, :]).sum(2),
    "normalize": F.normalize,
    "logsumexp": lambda h: h.logsumexp(1, True) + h,
}
AFFINE = {
    "fixed mask": lambda h: torch.where(torch.arange(5) > 2, h, 0.0),
    "fixed factor": lambda h: h * torch.arange(5.0),
    "clamped constant": lambda h: h * torch.arange(5.0).clamp(max=3),
    "ones": lambda h: h * torch.ones_like(h),
    "control flow": lambda h: h if h.max() > 0 else -h,
    "softmax of weights": lambda h: h @ torch.eye(5, dtype=h.dtype).softmax(1),
}


class Between(nn.Module):
    """Two layers with a function between them, and a ReLU."""

    def __init__(self, function) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 5), nn.Linear(5, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(torch.relu(self.a(x))))


@pytest.mark.parametrize("name", NONLINEAR)
def test_every_nonlinear_function_of_the_data_is_named(name):
    with pytest.warns(UngatedWarning, match=f"no gates at {name}: only"):
        assert record(Between(NONLINEAR[name]).double(), rows(6, 4)).ungated == (name,)


@pytest.mark.parametrize("name", AFFINE)
def test_what_is_affine_in_the_data_is_not_named(name):
    assert record(Between(AFFINE[name]).double(), rows(6, 4)).ungated == ()  # warnings are errors


class Unread(Base):
    """ReLUs that nobody reads, and one of a weight, are counted in the names and are no gate sites."""

    def __init__(self, module: bool, before: bool) -> None:
        super().__init__()
        self.module, self.before, self.scale, self.relu = module, before, nn.Parameter(torch.ones(1)), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        unit = self.relu if self.module else F.relu
        unit(x if self.before else self.a(x))
        scale = unit(self.scale)
        return self.c(unit(self.b(x)) * scale)


@pytest.mark.parametrize("before", [False, True], ids=["after a layer", "of the input"])
@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_unread_relus_do_not_shift_the_names_of_others(module, before):
    net, x = Unread(module, before).double(), rows(6, 4)
    rec, twin = record(net, x), gated_twin(net, "relu", example=x)
    assert rec.sites == twin.site_names == ("relu@2",)
    assert torch.equal(rec.gates("relu@2"), net.b(x) > 0)
    assert torch.equal(rec.gates("relu@2"), record(twin, x).gates("relu@2"))


def test_detached_and_ungraded_relus_keep_their_gates():
    class Halves(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.relu(self.a(x)).detach()
            with torch.no_grad():
                z = self.relu(self.b(x))
            return self.c(h + z)

    assert record(Halves().double(), rows(6, 4)).sites == ("relu@0", "relu@1")


class Views(Base):
    """Rectifies one half of a tensor in place: autograd's graph has no node for the view."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, :2].relu_()
        return self.c(h)


def test_a_view_rectified_in_place_keeps_its_gates():
    assert record(Views().double(), rows(6, 4)).gates("relu@0").shape == (6, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value):
    gates = models.dlgn(4, hidden=(3, 3), seed=0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).eval()
    with torch.no_grad():
        next(gates.source.parameters())[0, 0] = value  # closes all gates: the output alone does not show it
        plain[1].running_mean[0] = value
    x = rows(6, 4).float()
    asked = [
        record,
        kernels.overlap,
        kernels.npk,
        kernels.ntk,
        paths.count,
        lambda net, x: regions.slice2d(net, plane=tuple(x[:3])),
        lambda net, x: regions.segment1d(net, x[0], x[1]),
    ]
    for ask in asked:
        with pytest.raises(NotFiniteError, match=r"'source\..*' of this GatedNetwork contains NaN or infinity"):
            ask(gates, x)
        with pytest.raises(NotFiniteError, match=r"'1\.running_mean' of this Sequential contains NaN or infinity"):
            ask(plain, x)


def test_overflow_inside_a_network_is_refused():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1e30], [1e30], [-1e30]]).expand(3, 4))
        net[2].weight.copy_(torch.tensor([[1e30, -1e30, 1.0]]))
    with pytest.raises(NotFiniteError, match="returns NaN for row 1"):
        record(net, torch.tensor([[-1.0] * 4, [1.0] * 4]))


def test_a_diverged_network_keeps_its_moment():
    net, trajectory = models.relu(4, hidden=(3,), seed=0), Trajectory()
    with torch.no_grad():
        next(net.parameters())[0, 0] = torch.nan
    assert trajectory.append(net, rows(6, 4).float()).record is None
    with pytest.raises(NotFiniteError, match="first in row 2"):
        trajectory.append(net, torch.full((6, 4), torch.nan).index_fill(0, torch.arange(2), 0.0))


def test_many_of_them_are_counted_and_kernels_of_any_units_are_silent():
    layers = [part for _ in range(5) for part in (nn.Linear(4, 4), nn.GELU())]
    net = nn.Sequential(*layers, nn.Linear(4, 1)).double()
    with pytest.warns(UngatedWarning, match=r"'1', GELU in module '3', GELU in module '5' and 2 more: only"):
        record(net, rows(6, 4))
    assert kernels.ntk(net, rows(6, 4)).shape == (6, 6)  # warnings are errors here


@pytest.mark.parametrize("last", [nn.Tanh(), nn.Softmax(1), nn.LeakyReLU()])
def test_relus_and_what_stands_after_all_layers_are_not_told(last):
    record(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), last).double(), rows(6, 4))
    record(models.dlgn(4, hidden=(3,), seed=0).double(), rows(6, 4))
