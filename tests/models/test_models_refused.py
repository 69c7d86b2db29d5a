"""What `gated_twin` cannot convert it refuses, with the node and a remedy; nothing comes out silently wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from twin_architectures import FLAT, IMAGE, Mlp

from pathlens.errors import ConversionError, NoGateError, OptionError, UnknownNameError
from pathlens.models import gated_twin, mlp


class Between(Mlp):
    """An MLP with one operation between two ReLUs; the operation is what a test is about."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(self.operation(torch.relu(self.first(x))))))


def by_data(h: Tensor) -> Tensor:
    if h.sum() > 0:
        return h
    return -h


def through_view(h: Tensor) -> Tensor:
    h.view(-1).mul_(2)
    return h


def through_slice(h: Tensor) -> Tensor:
    h[:, :2].add_(1)
    return h


def seen_by_earlier_view(h: Tensor) -> Tensor:
    flat = h.flatten(1)
    h += 1
    return flat + h


def by_type(h: Tensor) -> Tensor:
    return h if isinstance(h, Tensor) else 2 * h


def assigned(h: Tensor) -> Tensor:
    h[:, 0] = 0
    return h


PLACE = torch.zeros(3, 6)
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gelu": (F.gelu, r"'gelu' \(node gelu.*Replace it"),
    "gelu-module": (nn.GELU(), r"module 'operation'.*GELU.*Replace it"),
    "clamp": (lambda h: h.clamp(-1, 1), r"'clamp' \(node clamp.*torch\.relu"),
    "clamp-never-reached": (lambda h: torch.clamp(h, -1e6, 1e6), r"'clamp'.*torch\.relu"),
    "clamp-min": (lambda h: h.clamp_(min=0), r"'clamp'.*torch\.relu"),
    "maximum": (lambda h: torch.maximum(h, torch.zeros(6)), r"'maximum'.*torch\.relu"),
    "amax": (lambda h: h - h.amax(1, keepdim=True), r"'amax'"),
    "hardtanh": (F.hardtanh, r"'hardtanh'.*torch\.relu"),
    "relu6": (nn.ReLU6(), r"module 'operation'.*ReLU6.*Write relu\(x\) - relu\(x - 6\)"),
    "functional-relu6": (F.relu6, r"'relu6'"),
    "prelu": (nn.PReLU(), r"module 'operation'.*PReLU"),
    "threshold": (lambda h: F.threshold(h, 0.0, 0.0), r"'threshold'.*torch\.relu"),
    "softmax": (lambda h: h.softmax(-1), r"'softmax'.*logits"),
    "log-softmax": (nn.LogSoftmax(1), r"module 'operation'.*logits"),
    "sigmoid": (torch.sigmoid, r"'sigmoid'"),
    "tanh-inplace": (torch.tanh_, r"'tanh'"),
    "abs": (abs, r"'abs'"),
    "where": (lambda h: torch.where(h > 0, h, 0.0), r"'gt'"),
    "square": (lambda h: h * h, r"'mul'.*both depend on the input.*remove the product"),
    "square-inplace": (lambda h: h.mul_(h), r"'mul'.*both depend"),
    "power": (lambda h: h**2, r"'pow'"),
    "excitation": (lambda h: h * torch.sigmoid(h.mean(1, keepdim=True)), r"'sigmoid'"),
    "product-of-branches": (lambda h: h * h.mean(1, keepdim=True), r"'mul'.*both depend"),
    "attention": (lambda h: torch.matmul(h, h.t()) @ h, r"'matmul'.*both depend"),
    "quadratic-linear": (lambda h: F.linear(h, h[:6]), r"'linear'.*other than the first"),
    "itself-as-weight": (lambda h: F.linear(h, h), r"'linear'.*other than the first"),
    "division": (lambda h: h / (1 + h.sum(1, keepdim=True)), r"'truediv'.*divides"),
    "division-by-itself": (lambda h: h / h, r"'truediv'.*divides"),
    "one-over": (lambda h: 1 / h, r"'truediv'.*divides"),
    "torch-div-by-data": (lambda h: torch.div(2.0, h), r"'div'.*divides"),
    "division-that-rounds": (lambda h: torch.div(h, 2, rounding_mode="floor"), r"'div'.*rounds"),
    "floor-division": (lambda h: h // 2, r"'floordiv'"),
    "layer-norm": (nn.LayerNorm(6), r"module 'operation'.*LayerNorm.*batch-norm"),
    "functional-layer-norm": (lambda h: F.layer_norm(h, (6,)), r"'layer_norm'.*batch-norm"),
    "normalize": (lambda h: F.normalize(h), r"'normalize'"),
    "functional-batch-norm": (
        lambda h: F.batch_norm(h, torch.zeros(6), torch.ones(6)),
        r"'batch_norm'.*the module nn\.BatchNorm",
    ),
    "norm-without-statistics": (nn.BatchNorm1d(6, track_running_stats=False), r"'operation'.*track_running_stats"),
    "mask-index": (lambda h: h[h > 0], r"'gt'"),
    "index-by-data": (lambda h: h[:, h.argmax(1)], r"'argmax'"),
    "item": (lambda h: h * h.mean().item(), r"'item'.*keep it a tensor"),
    "control-flow": (by_data, r"Between.*followed symbolically.*move them out"),
    "item-assignment": (assigned, r"Between.*followed symbolically.*item assignment"),
    "view-changed-in-place": (through_view, r"'mul'.*in place.*without the in-place"),
    "slice-changed-in-place": (through_slice, r"'add'.*in place.*without the in-place"),
    "view-of-what-changed": (seen_by_earlier_view, r"'add'.*in place.*'flatten'.*without the in-place"),
    "type-of-the-input": (by_type, r"Between.*mode the converted network differs"),
    "detached": (lambda h: h.detach(), r"'detach'"),
    "batch-mean": (lambda h: h - h.mean(0), r"Between.*other inputs of the batch.*mean over the batch"),
    "rows-rolled": (lambda h: h.roll(1, 0), r"Between.*other inputs of the batch"),
    "truncation": (lambda h: (1000 * h).to(torch.int64).to(torch.float64), r"'to'.*not affine"),
    "dropout-always-on": (lambda h: F.dropout(h, 0.5, True), r"'dropout'.*on in eval mode.*training=self\.training"),
    "dropout-by-default": (F.dropout, r"'dropout'.*on in eval mode"),
    "torch-randomness": (lambda h: h * torch.rand(6), r"Between.*random numbers.*nn\.Dropout"),
    "python-randomness": (lambda h: h * (random.random() < 0.9), r"Between.*random numbers"),
    "random-like-data": (lambda h: h + torch.rand_like(h), r"'rand_like'"),
    "copy-in-place": (lambda h: h.copy_(h), r"'copy'.*no functional form"),
    "out-argument": (lambda h: torch.add(h, 1, out=PLACE), r"'add'.*out="),
    "other-dtype": (lambda h: h.to(torch.float32), r"does not run.*float64.*\.double\(\)"),
    "rows-baked-in": (lambda h: h.view(2, -1), r"Between.*does not run on .*any number of rows"),
}


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_not_affine_is_refused_by_name(name: str, kind: str) -> None:
    operation, message = OPERATIONS[name]
    with pytest.raises(ConversionError, match=f"(?s)^gated_twin: .*{message}"):
        gated_twin(Between(operation), kind, example=torch.randn(2, 5))


def test_an_operation_that_is_affine_is_not_refused() -> None:
    assert len(gated_twin(Between(lambda h: 2 * h - 1), "relu", example=torch.randn(2, 5)).sites) == 2


class InplaceBehindDropout(Mlp):
    """Dropout returns its own input in eval mode, so that the ReLU changes h there and does not in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.relu = nn.Dropout(0.5), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.relu(self.drop(h)) + h)


class Counter(Mlp):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.relu(self.first(x)) * self.calls)


class StochasticDepth(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if self.training and torch.rand(()) < 0.1:
            return self.last(h)
        return self.last(torch.relu(self.second(h)))


class TrainingBranch(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h if self.training else self.second(h))


class TrainingConstant(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * (torch.ones(6) if self.training else 2 * torch.ones(6)))


class TwoInputs(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x + y)))


class AnyInputs(Mlp):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs[0])))


class TupleOutput(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        return self.last(h), h


class DictOutput(Mlp):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(torch.relu(self.first(x)))}


class ChunkOutput(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(self.first(x)).chunk(2, 1)


class ScalarOutput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).mean()


class ConcatenatedBatch(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.relu(self.first(x)))
        return torch.cat([h, h])


class Softmax(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.last(torch.relu(self.first(x))), dim=1)


class FrozenNorm(nn.Module):
    """Keeps its batch-norm in eval mode whatever mode is set; a copy would not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


class Uncopyable(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.rows = (i for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(x))
        return self.head((h * torch.relu(self.fc(F.adaptive_avg_pool2d(h, 1)))).mean((2, 3)))


def weight_normed() -> nn.Module:
    template = mlp(5, (6,), 3)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(template.linear1)
    template(torch.randn(2, 5))  # the weight is now a tensor with a history, which cannot be copied
    return template


def parametrised() -> nn.Module:
    template = mlp(5, (6,), 3)
    nn.utils.parametrizations.weight_norm(template.linear1)
    return template


def spectral() -> nn.Module:
    template = mlp(5, (6,), 3)
    nn.utils.spectral_norm(template.linear1)
    return template


def pruned() -> nn.Module:
    template = mlp(5, (6,), 3)
    prune.l1_unstructured(template.linear1, "weight", amount=0.5)
    return template


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3))


TEMPLATES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "inplace-behind-dropout": (InplaceBehindDropout, FLAT, r"module 'relu'.*in place.*'first' may share"),
    "counter": (Counter, FLAT, r"Counter.*differs"),
    "stochastic-depth": (StochasticDepth, FLAT, r"StochasticDepth.*random numbers"),
    "training-branch": (TrainingBranch, FLAT, r"TrainingBranch.*train and eval.*self\.training"),
    "training-constant": (TrainingConstant, FLAT, r"TrainingConstant.*train and eval"),
    "two-inputs": (TwoInputs, FLAT, r"TwoInputs.*x, y.*one tensor input"),
    "star-inputs": (AnyInputs, FLAT, r"AnyInputs.*\*inputs.*one tensor input"),
    "tuple-output": (TupleOutput, FLAT, r"TupleOutput.*single tensor.*logits alone"),
    "dict-output": (DictOutput, FLAT, r"DictOutput.*single tensor"),
    "chunk-output": (ChunkOutput, FLAT, r"ChunkOutput.*returns tuple.*one row per input"),
    "scalar-output": (ScalarOutput, FLAT, r"ScalarOutput.*returns \(\).*one row per input"),
    "doubled-batch": (ConcatenatedBatch, FLAT, r"ConcatenatedBatch.*one row per input"),
    "softmax-at-the-end": (Softmax, FLAT, r"'softmax'.*train on logits"),
    "frozen-norm": (FrozenNorm, FLAT, r"FrozenNorm.*train mode.*differs"),
    "uncopyable": (Uncopyable, FLAT, r"Uncopyable.*cannot be copied.*Remove the attribute"),
    "squeeze-excitation": (SqueezeExcitation, IMAGE, r"'mul'.*both depend"),
    "weight-norm": (weight_normed, FLAT, r"module 'linear1'.*computed by a hook.*remove_weight_norm"),
    "weight-norm-parametrised": (parametrised, FLAT, r"module 'linear1'.*parametrised.*remove_parametrizations"),
    "spectral-norm": (spectral, FLAT, r"module 'linear1'.*computed by a hook"),
    "pruned": (pruned, FLAT, r"module 'linear1'.*computed by a hook.*prune\.remove"),
    "lazy": (lazy, FLAT, r"module '0'.*no shape yet.*once on data"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_cannot_be_followed_is_refused_by_name(name: str) -> None:
    make, shape, message = TEMPLATES[name]
    with pytest.raises(ConversionError, match=f"(?s)^gated_twin: .*{message}"):
        gated_twin(make(), "relu", example=torch.randn(2, *shape))


def test_weight_norm_converts_once_it_is_removed() -> None:
    template = weight_normed()
    nn.utils.remove_weight_norm(template.linear1)
    x = torch.randn(3, 5)
    assert torch.equal(gated_twin(template, "relu", example=x)(x), template(x))


@pytest.mark.parametrize("template", [nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 3))])
def test_a_template_without_a_relu_has_no_gates(template: nn.Module) -> None:
    with pytest.raises(NoGateError, match=r"no ReLU.*F\.relu"):
        gated_twin(template, "dlgn", example=torch.randn(2, 5))


def test_a_template_must_be_a_module() -> None:
    with pytest.raises(ConversionError, match=r"must be an nn\.Module, got builtin_function"):
        gated_twin(torch.relu, "dlgn", example=torch.randn(2, 5))  # type: ignore[arg-type]


def test_a_traced_module_is_a_template() -> None:
    template = torch.fx.symbolic_trace(mlp(5, (6,)))
    assert len(gated_twin(template, "relu", example=torch.randn(2, 5)).sites) == 1


def test_a_wrapper_around_a_template_is_refused() -> None:
    """But for compiled and parallel ones, whose inner module is known to be what runs."""
    with pytest.raises(ConversionError, match="AveragedModel"):
        gated_twin(torch.optim.swa_utils.AveragedModel(mlp(5, (6,))), "relu", example=torch.randn(2, 5))
    assert len(gated_twin(nn.DataParallel(mlp(5, (6,))), "relu", example=torch.randn(2, 5)).sites) == 1


@pytest.mark.parametrize(("kind", "suggestion"), [("dlgnn", "dlgn"), ("rely", "relu"), ("galuu", "galu")])
def test_an_unknown_kind_is_met_with_a_suggestion(kind: str, suggestion: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{suggestion}'"):
        gated_twin(mlp(5, (6,)), kind, example=torch.randn(2, 5))


class Wrapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(flatten(torch.relu(self.first(x))))


def flatten(x: Tensor) -> Tensor:
    """Named like a function of torch that is affine, and not affine."""
    return x + 1e-3 * x.square()


torch.fx.wrap("flatten")


def test_a_users_function_is_not_taken_for_one_of_torch() -> None:
    with pytest.raises(ConversionError, match=r"'flatten'.*neither a ReLU nor known to be affine"):
        gated_twin(Wrapped(), "relu", example=torch.randn(2, 5))


def test_a_users_function_that_is_declared_affine_is_tested() -> None:
    with pytest.raises(ConversionError, match=r"'flatten'.*not affine"):
        gated_twin(Wrapped(), "galu", example=torch.randn(2, 5), affine=(flatten,))


# --- max-pools without an average counterpart ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2, dilation=2), lambda h: F.max_pool2d(h, 2, dilation=2), lambda h: torch.max_pool2d(h, 2, 2, 0, 2)],
    ids=["module", "function", "positional"],
)
def test_a_max_pool_without_an_average_is_refused(pool: Callable[[Tensor], Tensor]) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 4, 3), pool

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(torch.relu(self.conv(x))).mean((2, 3))

    with pytest.raises(ConversionError, match="no average counterpart"):
        gated_twin(Pooled(), "dlgn", example=torch.randn(2, *IMAGE), max_pool="average")


def test_a_fractional_max_pool_is_refused() -> None:
    template = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.FractionalMaxPool2d(2, output_size=2))
    with pytest.raises(ConversionError, match="FractionalMaxPool2d"):
        gated_twin(template, "relu", example=torch.randn(2, *IMAGE))


# --- options that contradict each other ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("relu", {"beta": 3.0}, "beta=3.0 has no effect"),
        ("galu", {"epsilon": 0.1}, "epsilon=0.1 has no effect"),
        ("dlgn", {"gate": "straight_through", "epsilon": 0.1}, "epsilon=0.1 has no effect"),
        ("relu", {"piecewise_constant": True}, "would not depend on the input"),
        ("dln", {"gate_activation": "linear"}, "no gate network"),
        ("relu", {"gates_from": mlp(5, (6,))}, "Drop gates_from"),
        ("dln", {"gates_from": "dependent"}, "Drop gates_from"),
        ("galu", {"trained": "gates"}, "hard gates have no gradient"),
        ("relu", {"trained": "gates"}, "hard gates have no gradient"),
        ("dlgn", {"max_pool": "avg"}, "'refuse' or 'average'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        gated_twin(mlp(5, (6,)), kind, example=torch.randn(2, 5), **options)  # type: ignore[arg-type]


def test_constant_values_after_a_batch_norm_cannot_lend_their_weights() -> None:
    template = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(OptionError, match="lack the first layer"):
        gated_twin(template, "dlgn_pwc", example=torch.randn(2, 5), gates_from="dependent")


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "sotf"},
        {"gate_activation": "rleu"},
        {"gates_from": "independant"},
        {"gates_from": "given"},
        {"init": "hee"},
        {"trained": "bothh"},
    ],
)
def test_an_unknown_option_is_met_with_what_is_known(options: dict[str, str]) -> None:
    with pytest.raises(UnknownNameError, match="Known: "):
        gated_twin(mlp(5, (6,)), "soft_galu", example=torch.randn(2, 5), **options)  # type: ignore[arg-type]


def test_a_template_that_gives_no_numbers_is_refused() -> None:
    template = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        template[0].weight[0] = torch.nan
    with pytest.raises(ConversionError, match="NaN or infinite"):
        gated_twin(template, "dlgn", torch.randn(2, 2))
