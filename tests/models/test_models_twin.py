"""`gated_twin` gives the network it says, on architectures that people write and on traps."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twin_architectures import AFFINE, ALL, MAX_POOLED, Example, Mlp

import pathlens as pl
from pathlens.errors import ConversionError
from pathlens.models import GatedNetwork, gated_twin, mlp, relu, resnet34, resnet110


def random_statistics(module: nn.Module, seed: int = 0) -> None:
    """Batch-norm statistics and weights as after training, so that eval mode is not the identity."""
    g = torch.Generator().manual_seed(seed)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            assert m.running_mean is not None and m.running_var is not None
            m.running_mean.copy_(0.3 * torch.randn(m.running_mean.shape, generator=g))
            m.running_var.copy_(0.5 + torch.rand(m.running_var.shape, generator=g))
            with torch.no_grad():
                m.weight.copy_(0.5 + torch.rand(m.weight.shape, generator=g))
                m.bias.copy_(0.2 * torch.randn(m.bias.shape, generator=g))


def make(example: Example, seed: int = 0) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        template = example.make().double()
        random_statistics(template)
        return template, torch.randn(4, *example.shape, dtype=torch.float64)


def on_a_line(function: Any, x: Tensor) -> float:
    """Largest relative distance from affine of a dict-valued function, on a line through a batch."""
    generator = torch.Generator().manual_seed(5)
    far = 10 * torch.randn(x.shape, dtype=x.dtype, generator=generator)
    at = [function(x + t * (far - x)) for t in (0.0, 1.0, -0.7)]
    error = 0.0
    for name in at[0]:
        a, b, c = (values[name] for values in at)
        error = max(error, float((c - (a - 0.7 * (b - a))).abs().max() / (a.abs().max() + b.abs().max())))
    return error


# --- the ReLU twin is the template -------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ALL)
def test_the_relu_twin_equals_the_template(name: str, training: bool) -> None:
    template, x = make(ALL[name])
    template.train(training)
    twin = gated_twin(template, "relu", example=x[:2])
    results = []
    for module in (template, twin):
        torch.manual_seed(7)
        results.append(module(x.clone()))
    assert twin.training == training
    assert len(twin.sites) == ALL[name].sites
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ALL)
def test_value_weights_keep_the_names_of_the_template(name: str) -> None:
    template, x = make(ALL[name])
    twin = gated_twin(template, "galu", example=x[:2], seed=0)
    called: set[str] = set()
    for path, m in template.named_modules():
        m.register_forward_hook(lambda *_, path=path: called.add(path))
    template(x.clone())
    used = {key for key in template.state_dict() if key.rpartition(".")[0] in called}
    assert set(twin.values.state_dict()) == used


@pytest.mark.parametrize("name", AFFINE)
def test_the_gates_of_a_dlgn_twin_are_affine(name: str) -> None:
    template, x = make(AFFINE[name])
    twin = gated_twin(template, "dlgn", example=x[:2]).eval()
    with torch.no_grad():
        assert on_a_line(twin.preactivations, x) < 1e-12
    assert twin.linear_gates


@pytest.mark.parametrize("name", AFFINE)
def test_the_values_are_affine_for_fixed_gates(name: str) -> None:
    template, x = make(AFFINE[name])
    twin = gated_twin(template, "galu", example=x[:2]).eval()
    with torch.no_grad():
        gates = twin.gates(x).values()
        assert on_a_line(lambda z: {"f": twin.values(z, *gates)}, x) < 1e-12


@pytest.mark.parametrize("name", ALL)
def test_a_galu_twin_with_the_gates_of_its_values_is_the_template(name: str) -> None:
    template, x = make(ALL[name])
    template.eval()
    twin = gated_twin(template, "galu", example=x[:2], gates_from="dependent").eval()
    torch.testing.assert_close(twin(x), template(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        "relu",
        "soft_relu",
        "dln",
        "galu",
        "flnpf",
        "soft_galu",
        "gates_only",
        "dlgn",
        "dlgn_pwc",
        "dlgn_frozen",
        "frnpf",
        "dnpfl",
        "dlgn-pwc",
    ],
)
def test_every_kind_converts_and_trains_what_it_says(kind: str) -> None:
    template, x = make(AFFINE["resnet-projection"])
    twin = gated_twin(template, kind, example=x[:2], seed=1)
    twin(x).square().sum().backward()
    moved = {name.split(".")[0] for name, p in twin.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    expected = {"values": {"values"}, "gates": {"source"}, "both": {"values", "source"}}[twin.trained]
    assert moved == (expected if twin.source is not None else {"values"})


def test_sites_are_named_by_module_and_call() -> None:
    template, x = make(AFFINE["shared-relu"])
    assert gated_twin(template, "relu", example=x).site_names == ("act@0", "act@1")
    template, x = make(AFFINE["module-list"])
    assert gated_twin(template, "relu", example=x).site_names == ("relu@0", "relu@1", "relu@2", "relu@3")
    template, x = make(AFFINE["resnet-projection"])
    assert gated_twin(template, "relu", example=x).site_names[1:3] == ("stages.0.0.relu@0", "stages.0.0.relu@1")


def test_a_leaky_gate_is_the_slope_or_one() -> None:
    template = nn.Sequential(nn.Linear(3, 20), nn.LeakyReLU(0.25), nn.Linear(20, 1)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    twin = gated_twin(template, "galu", example=x, gates_from="dependent")
    assert set(twin.gates(x)["1@0"].flatten().tolist()) == {0.25, 1.0}
    torch.testing.assert_close(twin(x), template(x))


def test_the_twin_takes_the_dtype_of_the_template() -> None:
    for dtype in (torch.float32, torch.float64):
        twin = gated_twin(mlp(3, (4,)).to(dtype), "dlgn", example=torch.randn(2, 3))
        assert {p.dtype for p in twin.parameters()} == {dtype}
        assert twin.gate.beta.dtype == dtype


def test_a_layer_frozen_in_eval_mode_stays_frozen() -> None:
    template, x = make(AFFINE["batch-norm"])
    template.train()
    template[1].eval()
    twin = gated_twin(template, "relu", example=x)
    assert twin.training and not twin.values.get_submodule("1").training
    assert twin.values.get_submodule("5").training


# --- the example may be poor -------------------------------------------------------------------------------------


def test_an_example_of_zeros_does_not_blind_the_checks() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    template = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), Shift(), nn.Linear(4, 2, bias=False))
    template[2].register_forward_hook(lambda module, inputs, output: 1.5 * output)
    with pytest.raises(ConversionError, match="hook"):
        gated_twin(template, "relu", example=torch.zeros(2, 3))


def test_a_branch_that_starts_at_zero_is_checked_too() -> None:
    class Residual(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            nn.init.zeros_(self.second.weight)
            nn.init.zeros_(self.second.bias)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            return self.last(h + self.second(self.inner(h)))

    template = Residual()
    template.inner.register_forward_hook(lambda module, inputs, output: output * output)
    with pytest.raises(ConversionError, match="hook"):
        gated_twin(template, "relu", example=torch.randn(2, 5))


def test_a_layer_whose_units_are_all_off_hides_nothing() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    template = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Square(), nn.Linear(4, 2))
    nn.init.constant_(template[0].bias, -50.0)
    with pytest.raises(ConversionError, match=r"module '2'.*not affine"):
        gated_twin(template, "relu", example=torch.randn(2, 3), affine=(Square,))


def test_one_example_is_enough() -> None:
    template, x = make(AFFINE["batch-norm"])
    assert len(gated_twin(template, "dlgn", example=x[:1]).sites) == 2


# --- max-pooling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAX_POOLED)
@pytest.mark.parametrize("kind", ["dlgn", "dlgn_pwc", "dlgn_frozen", "dln"])
def test_linear_gates_refuse_max_pooling(name: str, kind: str) -> None:
    template, x = make(MAX_POOLED[name])
    with pytest.raises(ConversionError, match="max_pool='average'"):
        gated_twin(template, kind, example=x)


@pytest.mark.parametrize("name", MAX_POOLED)
def test_max_pooling_is_averaged_on_request(name: str) -> None:
    template, x = make(MAX_POOLED[name])
    twin = gated_twin(template, "dlgn", example=x, max_pool="average").eval()
    with torch.no_grad():
        assert on_a_line(twin.preactivations, x) < 1e-12
        gates = twin.gates(x).values()
        assert on_a_line(lambda z: {"f": twin.values(z, *gates)}, x) < 1e-12


def test_averaging_keeps_the_windows() -> None:
    template, x = make(MAX_POOLED["max-pool"])
    twin = gated_twin(template, "relu", example=x, max_pool="average")
    averaged = copy.deepcopy(template)
    averaged[2] = averaged[5] = nn.AvgPool2d(2)
    assert torch.equal(twin(x), averaged(x))


def test_averaging_does_not_hide_a_hook_that_rewrites() -> None:
    template, x = make(MAX_POOLED["max-pool"])
    template[1].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(ConversionError, match="hook"):
        gated_twin(template, "dlgn", example=x, max_pool="average")


# --- piecewise-constant twins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch-norm", "resnet-projection", "resnet-pad"])
def test_ones_enter_after_the_first_batch_norm(name: str) -> None:
    template, x = make(AFFINE[name])
    twin = gated_twin(template, "dlgn_pwc", example=x, seed=0).train()
    out = twin(x)
    assert out.detach().std(0).min() > 1e-3  # rows differ: the signal did not vanish
    first = {"batch-norm": "0.weight"}.get(name, "conv1.weight")
    assert first in twin.source.network.state_dict() and first not in twin.values.state_dict()


@pytest.mark.parametrize("name", ["mlp", "batch-norm", "resnet-pad", "gconv"])
def test_a_piecewise_constant_twin_is_constant_where_its_gates_are(name: str) -> None:
    template, x = make(AFFINE[name])
    twin = gated_twin(template, "dlgn_pwc", gate="hard", trained="values", example=x, seed=0).eval()
    near = x + 1e-9 * torch.randn_like(x)
    assert all(torch.equal(a, b) for a, b in zip(twin.gates(x).values(), twin.gates(near).values()))
    assert torch.equal(twin(x), twin(near))
    assert not torch.equal(twin(x), twin(-x))


def test_a_batch_norm_at_the_input_is_passed_too() -> None:
    template = nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    )
    twin = gated_twin(template, "dlgn_pwc", example=torch.randn(2, 3), seed=0).train()
    assert twin(torch.randn(16, 3)).detach().std() > 1e-3


def test_ones_before_a_batch_norm_that_a_branch_reads_are_refused() -> None:
    template, x = make(AFFINE["pre-activation"])
    with pytest.raises(ConversionError, match=r"'norm'.*before any gate"):
        gated_twin(template, "dlgn_pwc", example=x)


# --- the template is left alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_the_template_is_untouched(kind: str, training: bool) -> None:
    template, x = make(AFFINE["functional-dropout" if kind == "relu" else "batch-norm"])
    template.train(training)
    calls: list[str] = []
    handle = template.register_forward_hook(lambda *a: calls.append("template"))
    before = copy.deepcopy(template.state_dict())
    children = [name for name, _ in template.named_modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    twin = gated_twin(template, kind, example=x, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert template.training == training
    assert [name for name, _ in template.named_modules()] == children
    assert all(torch.equal(before[k], v) for k, v in template.state_dict().items())
    assert handle.id in template._forward_hooks
    fired = len(calls)
    twin(x)
    assert len(calls) == fired
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())


def test_the_twin_shares_no_memory_with_the_template() -> None:
    template, x = make(AFFINE["batch-norm"])
    twin = gated_twin(template, "dlgn", example=x)
    owned = {t.data_ptr() for t in (*template.parameters(), *template.buffers())}
    assert not owned & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers())}


class Monitor:
    """A hook object that cannot be copied, as one with an open file is."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> None:
        self.seen += 1

    def __deepcopy__(self, memo: Any) -> Monitor:
        raise TypeError("cannot be copied")


def test_hooks_that_monitor_are_not_carried_over() -> None:
    template, x = make(AFFINE["resnet-projection"])
    monitor = Monitor()
    template.conv1.register_forward_hook(monitor)
    template.bn1.register_forward_pre_hook(monitor)
    template.output.register_full_backward_hook(lambda *a: monitor(*a[:2]))
    twin = gated_twin(template, "dlgn", example=x)
    seen = monitor.seen
    twin(x).sum().backward()
    copy.deepcopy(twin)(x)
    assert monitor.seen == seen


@pytest.mark.parametrize("where", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_rewrite_are_refused(where: str) -> None:
    template, x = make(AFFINE["mlp"])
    if where == "register_forward_hook":
        template.linear2.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        template.linear2.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    with pytest.raises(ConversionError, match="hook that rewrites"):
        gated_twin(template, "relu", example=x)


# --- weights of the copies ---------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_weights_again() -> None:
    template, x = make(AFFINE["resnet-pad"])
    a, b, c = (gated_twin(template, "dlgn", example=x, seed=s).state_dict() for s in (4, 4, 5))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["values.conv1.weight"], c["values.conv1.weight"])
    assert not torch.equal(a["values.conv1.weight"], a["source.network.conv1.weight"])


def test_weights_of_followed_layers_are_drawn_anew() -> None:
    """A layer of the user's own class is followed by fx; its gate copy must not keep the template's weights."""
    template, x = make(AFFINE["subclasses"])
    twin = gated_twin(template, "dlgn", example=x)
    assert torch.equal(twin.values.state_dict()["conv.weight"], template.state_dict()["conv.weight"])
    assert not torch.equal(twin.source.network.state_dict()["conv.weight"], template.state_dict()["conv.weight"])


class OwnScale(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) * self.scale))


def test_a_parameter_that_cannot_be_drawn_is_named() -> None:
    with pytest.raises(pl.errors.OptionError, match=r"'network\.scale'.*reset_parameters"):
        gated_twin(OwnScale(), "dlgn", example=torch.randn(2, 5))


def test_a_parameter_that_cannot_be_drawn_may_be_copied() -> None:
    template, x = OwnScale(), torch.randn(4, 5)
    twin = gated_twin(template, "galu", example=x, gates_from="dependent")
    torch.testing.assert_close(twin(x), template(x))


def test_flnpf_takes_the_gates_of_the_template() -> None:
    template, x = make(AFFINE["resnet-projection"])
    twin = gated_twin(template, "flnpf", example=x, seed=0).eval()
    trained = gated_twin(template, "relu", example=x).eval()
    for name, gate in trained.gates(x).items():
        assert torch.equal(gate, twin.gates(x)[name])
    assert not torch.equal(twin.values.state_dict()["conv1.weight"], template.state_dict()["conv1.weight"])


def test_frozen_gates_keep_their_batch_statistics() -> None:
    template, x = make(AFFINE["resnet-projection"])
    twin = gated_twin(template, "galu", example=x).train()
    before = copy.deepcopy(twin.source.state_dict())
    twin(x)
    assert all(torch.equal(before[k], v) for k, v in twin.source.state_dict().items())


def test_declared_modules_are_leaves() -> None:
    class Mirror(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.ifft(torch.fft.fft(x).conj()).real

    template = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Mirror(), nn.Linear(6, 2)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    with pytest.raises(ConversionError, match="fft"):
        gated_twin(template, "dlgn", example=x)
    twin = gated_twin(template, "relu", example=x, affine=(Mirror,))
    assert torch.equal(twin(x), template(x))


def test_a_declaration_that_is_false_is_found() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.01 * x * x

    template = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Square(), nn.Linear(6, 2))
    with pytest.raises(ConversionError, match=r"module '2'.*not affine"):
        gated_twin(template, "galu", example=torch.randn(3, 5), affine=(Square,))


# --- what works on the result ------------------------------------------------------------------------------------


@pytest.fixture(params=["relu", "dlgn_pwc"])
def twin(request: pytest.FixtureRequest) -> GatedNetwork:
    template, x = make(AFFINE["resnet-projection"])
    return gated_twin(template, request.param, example=x, seed=0).eval()


def test_a_deep_copy_is_equal_and_apart(twin: GatedNetwork) -> None:
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    clone = copy.deepcopy(twin)
    before = twin(x)
    assert torch.equal(clone(x), before)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    assert torch.equal(twin(x), before)


def test_functional_calls_and_transforms_work(twin: GatedNetwork) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    parameters, buffers = dict(twin.named_parameters()), dict(twin.named_buffers())

    def one(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(twin, (p, buffers), (row[None],))[0]

    by_row = torch.func.vmap(one, in_dims=(None, 0))(parameters, x)
    torch.testing.assert_close(by_row, twin(x), rtol=1e-12, atol=1e-12)
    jacobian = torch.func.vmap(torch.func.jacrev(one), in_dims=(None, 0))(parameters, x)
    name = "values.output.weight"
    grad = torch.autograd.grad(twin(x)[1, 2], twin.get_parameter(name))[0]
    torch.testing.assert_close(jacobian[name][1, 2], grad, rtol=1e-12, atol=1e-12)


def test_a_stack_of_networks_runs_under_vmap_with_a_beta_each() -> None:
    nets = [gated_twin(mlp(3, (4, 4)), "dlgn", example=torch.randn(2, 3), beta=b, seed=b) for b in (1, 4, 20)]
    parameters, buffers = torch.func.stack_module_state(nets)
    assert buffers["gate.beta"].tolist() == [1, 4, 20]
    x = torch.randn(5, 3)

    def call(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(nets[0], (p, b), (x,))

    out = torch.func.vmap(call)(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([net(x) for net in nets]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relu", "dlgn_pwc"])
def test_the_twin_compiles_in_one_graph(kind: str) -> None:
    template, x = make(AFFINE["resnet-projection"])
    twin = gated_twin(template, kind, example=x, seed=0).eval()
    compiled = torch.compile(twin, fullgraph=True)
    torch.testing.assert_close(compiled(x), twin(x), rtol=1e-10, atol=1e-12)


def test_the_twin_becomes_one_graph_for_the_compiler() -> None:
    """The front end of the compiler alone: no code is generated."""
    template, x = make(AFFINE["batch-norm"])
    twin = gated_twin(template, "dlgn_pwc", example=x, seed=0).eval()
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), twin(x), rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


# --- the papers' residual networks -------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_net", "sites"), [(resnet34, 33), (resnet110, 109)], ids=["34", "110"])
def test_gates_of_a_residual_dlgn_are_affine_at_every_site(make_net: Any, sites: int) -> None:
    template = make_net().double()
    random_statistics(template)
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    twin = gated_twin(template, "dlgn", example=x).eval()
    random_statistics(twin, seed=1)
    assert len(twin.sites) == len(set(twin.site_names)) == sites
    with torch.no_grad():
        assert on_a_line(twin.preactivations, x) < 1e-10


def test_a_network_of_ours_is_a_template_too() -> None:
    net = relu(3, (4, 5), seed=0).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(gated_twin(net, "relu", example=x)(x), net(x))


def test_a_gated_network_is_no_template() -> None:
    X = torch.randn(2, 3)
    for made in (pl.models.dlgn(3, (4,)), pl.models.galu(3, (4,)), pl.models.soft_relu(3, (4,))):
        with pytest.raises(ConversionError, match=f"gated network already, of kind '{made.kind}'"):
            gated_twin(made, "dlgn", X)
    assert gated_twin(pl.models.relu(3, (4,)), "dlgn", X).kind == "dlgn"
