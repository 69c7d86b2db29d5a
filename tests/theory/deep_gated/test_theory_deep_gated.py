"""Deep gated networks in theory, against every sign of every weight, every path, and autograd."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens import kernels, models
from pathlens.errors import OptionError, RecordError, ShapeError
from pathlens.testing import reference as ref
from pathlens.testing.jacobians import network_jacobian
from pathlens.theory import deep_gated


def inputs(n, d, seed=0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(x, gates, weights):
    """K by autograd-free definition: one gradient vector per input, written out."""
    rows = []
    for s in range(len(x)):
        reads, h = [], x[s]
        for g, w in zip(gates, weights):
            reads.append(h)
            h = g[s] * (w @ h)
        reads.append(h)
        behind, parts = np.ones(1), []
        for k in reversed(range(len(weights))):
            parts.append(np.outer(behind, reads[k]).ravel())
            if k:
                behind = gates[k - 1][s] * (weights[k].T @ behind)
        rows.append(np.concatenate(parts))
    return np.stack(rows) @ np.stack(rows).T


def every_sign(x, gates, sigmas):
    """Mean and variance of K over every sign of every weight."""
    sizes = [x.shape[1], *(g.shape[1] for g in gates), 1]
    shapes = [(b, a) for a, b in itertools.pairwise(sizes)]
    x, gates = torch.from_numpy(x), [torch.from_numpy(g) for g in gates]

    def kernel(signs):
        return ref.gated_kernel([s * W for s, W in zip(sigmas, signs)], gates, x)

    found = ref.over_signs(kernel, shapes, 1.0).numpy()
    return found.mean(0), found.var(0)


# --- moments of K₀ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths, d, hard", [((2, 2), 2, False), ((3, 2), 1, True), ((2, 1, 2), 1, False)])
def test_moments_are_those_of_all_signs(widths, d, hard):
    generator = np.random.default_rng(sum(widths) + d)
    x = generator.normal(size=(2, d))
    gates = [generator.random((2, w)) for w in widths]
    gates = [(g > 0.3).astype(float) for g in gates] if hard else gates
    sigmas = list(0.5 + generator.random(len(widths) + 1))
    mean, variance = every_sign(x, gates, sigmas)
    found = deep_gated.gram_moments(x, gates, sigmas)
    assert np.allclose(found.mean, mean, rtol=1e-12, atol=1e-13)
    assert np.allclose(found.variance, variance, rtol=1e-10, atol=1e-13)


def test_moments_over_gates_are_those_of_all_gates():
    x, w, mu = np.array([[1.0], [-0.5]]), 2, 0.3
    mean, square = np.zeros((2, 2)), np.zeros((2, 2))
    for bits in itertools.product((0.0, 1.0), repeat=2 * 2 * w):
        gates = np.array(bits).reshape(2, 2, w)
        chance = np.prod(np.where(gates > 0, mu, 1 - mu))
        one = deep_gated.gram_moments(x, list(gates), 0.7)
        mean += chance * one.mean
        square += chance * (one.variance + one.mean**2)
    found = deep_gated.frg_moments(x, (w, w), probability=mu, sigma=0.7)
    assert np.allclose(found.mean, mean) and np.allclose(found.variance, square - mean**2)


def test_moments_of_normal_weights_have_no_excess():
    generator = np.random.default_rng(0)
    x, gates = generator.normal(size=(1, 2)), [generator.random((1, 3))]
    draws = [gram(x, gates, [generator.normal(size=(3, 2)), generator.normal(size=(1, 3))]) for _ in range(20000)]
    found = deep_gated.gram_moments(x, gates, 1.0, excess=0.0)
    assert np.var(draws) == pytest.approx(found.variance[0, 0], rel=0.1)
    assert deep_gated.gram_moments(x, gates, 1.0).variance[0, 0] < 0.8 * found.variance[0, 0]


def test_samples_have_the_moments():
    x, gates = inputs(3, 2).numpy(), [np.random.default_rng(k).random((3, 5)) for k in range(2)]
    generator, shapes = np.random.default_rng(0), [(5, 2), (5, 5), (1, 5)]
    signs = ([0.5 * (2.0 * generator.integers(0, 2, s) - 1) for s in shapes] for _ in range(4000))
    draws, found = np.stack([gram(x, gates, weights) for weights in signs]), deep_gated.gram_moments(x, gates, 0.5)
    error = np.sqrt(found.variance / len(draws))
    assert (abs(draws.mean(0) - found.mean) < 5 * error + 1e-12).all()
    assert np.allclose(draws.var(0), found.variance, rtol=0.25)


def test_the_variance_grows_like_the_cube_of_depth_over_width():
    exact = {
        (w, d): deep_gated.frg_moments([[1.0]], (w,) * (d - 1), probability=1.0).variance[0, 0]
        for w in (200, 400, 4000)
        for d in (4, 8, 16, 32)
    }
    assert exact[200, 8] / exact[400, 8] == pytest.approx(2, rel=0.02)
    for d in (4, 8, 16):
        assert exact[4000, d] == pytest.approx(deep_gated.variance_law(4000, d - 1), rel=0.02)
    assert exact[4000, 32] / exact[4000, 16] == pytest.approx(8, rel=0.2)
    bound = {d: deep_gated.printed_variance_bound(4000, d - 1) for d in (16, 32)}
    assert exact[4000, 32] / bound[32] > 1.9 * exact[4000, 16] / bound[16]  # no constant saves the printed order


def test_fixed_random_gates_whiten_by_one_power_per_hidden_layer():
    x, mu, w = np.ones((3, 1)), 0.4, 10
    found = deep_gated.frg_moments(x, (w,) * 3, probability=mu).mean / 4
    assert np.allclose(found, deep_gated.ideal_gram(x, 3, probability=mu))
    assert np.allclose(np.linalg.eigvalsh(found), deep_gated.ideal_spectrum(3, 3, probability=mu))


# --- signal and wire, strengths and gates --------------------------------------------------------------------------


@pytest.mark.parametrize("build", [models.relu, models.galu, models.dln])
def test_signal_times_wire_is_the_tangent_kernel(build):
    net, x = build(3, hidden=(4, 5), outputs=2, seed=1).double(), inputs(4, 3)
    for output in (0, 1):
        found = deep_gated.signal_wire(net, x, output=output)
        want = kernels.ntk(net, x, outputs=output).dense().numpy()
        assert np.allclose(found.gram, want, atol=1e-13)
        assert np.linalg.norm(found.printed - want) > 0.01 * np.linalg.norm(want)
    one = deep_gated.signal_wire(build(1, hidden=(4, 5), seed=1).double(), inputs(4, 1))
    assert np.allclose(one.printed, one.gram)  # with one input node nothing is missing


def with_signs(net, sigma):
    """The network once for every sign of its values, all ±σ."""
    weights = [p for k, p in net.named_parameters() if k.startswith("values.")]
    for signs in itertools.product((-sigma, sigma), repeat=sum(p.numel() for p in weights)):
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.tensor(signs, dtype=torch.float64), weights)
        yield net


def test_the_missing_terms_vanish_in_the_mean():
    net, x = models.galu(2, hidden=(2,), seed=4).double(), inputs(3, 2)
    found = [deep_gated.signal_wire(net, x) for net in with_signs(net, 0.7)]
    off = [wire.gram - wire.printed for wire in found]
    assert abs(np.mean(off, 0)).max() < 1e-14 and abs(off[0]).max() > 0.01


def test_soft_relu_has_cross_terms_and_soft_galu_has_none():
    x = inputs(4, 3)
    for build in (models.soft_relu, models.soft_galu):
        net = build(3, hidden=(4, 4), seed=0).double()
        found = deep_gated.adaptation(net, x)
        J = network_jacobian(net, x)[:, 0]
        assert np.allclose(found.total, (J @ J.T).numpy(), atol=1e-12)
        size = np.linalg.norm(found.cross) / np.linalg.norm(found.total)
        assert size < 1e-12 if build is models.soft_galu else size > 1e-3
    hard = deep_gated.adaptation(models.relu(3, hidden=(4, 4), seed=0).double(), x)
    assert not hard.gate.any() and hard.gate_share == 0


def test_the_mean_of_both_parts_over_every_sign():
    net, x = models.soft_galu(2, hidden=(2, 2), gate_activation="soft", seed=3).double(), inputs(2, 2)
    sigma, d = 0.8, 3
    own = {k: p.detach() for k, p in net.named_parameters()}
    states = [{k: p.detach().clone() for k, p in net.named_parameters()} for _ in with_signs(net, sigma)]
    values = {k: torch.stack([state[k] for state in states]) for k in own if k.startswith("values.")}
    gates = {k: p for k, p in own.items() if k.startswith("source.")}

    def output(gates, values, row):
        return torch.func.functional_call(net, {**gates, **values}, (row[None],))[0, 0]

    def mean_gram(argument):
        each = torch.func.vmap(torch.func.grad(output, argument), (None, None, 0))
        psi = torch.func.vmap(each, (None, 0, None))(gates, values, x)
        rows = torch.cat([p.flatten(2) for p in psi.values()], 2)
        return (rows @ rows.mT).mean(0).numpy()

    signal = (x @ x.T).numpy()
    delta = deep_gated.gate_gradient_overlap(net, x)
    assert np.allclose(mean_gram(0), sigma ** (2 * d) * signal * delta, atol=1e-13)
    overlap = math.prod(g @ g.T for g in net.gates(x).values()).detach().numpy()
    assert np.allclose(mean_gram(1), d * sigma ** (2 * (d - 1)) * signal * overlap)  # the paper lacks the factor d


# --- paths ---------------------------------------------------------------------------------------------------------


def test_paths_rebuild_the_output_and_both_kernels():
    net, x = models.relu(2, hidden=(3, 4), seed=2).double(), inputs(5, 2)
    table = deep_gated.path_table(net, x)
    assert np.allclose(table.outputs, net(x).detach().numpy()[:, 0])
    assert np.allclose(table.kernel, kernels.npk(net, x).dense().numpy())
    assert np.allclose(table.gram, kernels.ntk(net, x).dense().numpy())


def test_the_value_tangent_kernel_ignores_gates():
    relu, x = models.relu(2, hidden=(3, 3), seed=0).double(), inputs(3, 2)
    dln = models.dln(2, hidden=(3, 3), seed=1).double()
    dln.load_state_dict(relu.state_dict())
    tables = [deep_gated.path_table(net, x) for net in (relu, dln)]
    assert np.array_equal(tables[0].value_tangent_kernel, tables[1].value_tangent_kernel)
    assert not np.array_equal(tables[0].features, tables[1].features)


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_the_smallest_eigenvalue_is_bounded(seed):
    net, x = models.relu(3, hidden=(4, 4), seed=seed).double(), inputs(3, 3, seed)
    found = deep_gated.rho_bound(net, x)
    assert found.ntk_smallest <= found.bound + 1e-12


@pytest.mark.parametrize("build", [models.dln, models.galu, models.soft_galu, models.soft_relu, models.dlgn])
def test_the_bound_is_for_one_output_and_the_gates_as_they_are(build):
    for seed in range(10):
        net, x = build(3, hidden=(6, 6), outputs=40, seed=seed).double(), inputs(2, 3, seed)
        found, table = deep_gated.rho_bound(net, x, output=7), deep_gated.path_table(net, x, output=7)
        assert found.ntk_smallest <= found.bound * (1 + 1e-9) + 1e-14
        for value, kernel in ((found.ntk_smallest, table.gram), (found.npk_smallest, table.kernel)):
            assert value == pytest.approx(np.linalg.eigvalsh(kernel)[0], abs=1e-12 * np.trace(kernel))


# --- active and sensitive gates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, options",
    [
        (models.soft_galu, {}),
        (models.soft_galu, {"gate_activation": "soft", "bias": True}),
        (models.soft_relu, {}),
        (models.dlgn, {"beta": 7.0}),
    ],
)
def test_slopes_are_the_largest_entries_of_the_jacobian(build, options):
    net, x = build(2, hidden=(3, 4, 3), seed=0, **options).double(), inputs(3, 2)
    found = deep_gated.gate_slopes(net, x)
    names = [k for k, _ in net.named_parameters() if net.source is None or k.startswith("source.")]
    parameters = {k: p.detach() for k, p in net.named_parameters() if k in names}
    for kind, function in (("slopes", net.gates), ("scores", net.preactivations)):
        for row in range(3):

            def read(p, row=row, function=function):
                with torch.nn.utils.stateless._reparametrize_module(net, p):
                    return tuple(function(x[row : row + 1]).values())

            for layer, entries in zip(getattr(found, kind), torch.func.jacrev(read)(parameters)):
                largest = torch.stack([j[0].flatten(1).abs().amax(1) for j in entries.values()]).amax(0)
                assert np.allclose(layer[row], largest.numpy(), rtol=1e-10)
    assert np.allclose(found.gates[1], list(net.gates(x).values())[1].detach().numpy())


def test_no_gate_is_active_and_sensitive_above_the_threshold_and_some_are_above_the_printed_one():
    net, x = models.soft_galu(4, hidden=(16,) * 3, beta=8.0, seed=0).double(), 3 * inputs(20, 4)
    slopes = deep_gated.gate_slopes(net, x)
    for active in (0.55, 0.8, 1.0):
        found = deep_gated.subnetworks(slopes, active=active)
        assert found.both.sum() == 0 and found.active_gates.sum() > 0
        threshold = deep_gated.printed_threshold(active, epsilon=0.1)
        printed = deep_gated.subnetworks(slopes, active=active, sensitive=threshold)
        assert printed.both.sum() > 0
    with pytest.raises(OptionError, match="below it"):
        deep_gated.sensitive_threshold(0.5, 4.0, epsilon=0.1)


def test_sensitive_paths_are_counted_and_exceed_the_floor():
    net, x = models.soft_galu(2, hidden=(3, 3, 3), beta=8.0, epsilon=0.0, seed=1).double(), 2 * inputs(2, 2)
    slopes = deep_gated.gate_slopes(net, x)
    found = deep_gated.subnetworks(slopes, active=0.6, sensitive=0.5)
    for s in range(2):
        counted = 0
        for path in itertools.product(range(3), repeat=3):
            g = [slopes.gates[k][s, i] for k, i in enumerate(path)]
            m = [slopes.slopes[k][s, i] for k, i in enumerate(path)]
            for k in range(3):
                rest = [g[j] for j in range(3) if j != k]
                if m[k] > 0.5 and min(rest) > 0.6:
                    counted += 1
                    assert m[k] * math.prod(rest) > found.floor
        assert counted == found.sensitive_paths[s]
        assert found.active_paths[s] == math.prod((g[s] > 0.6).sum() for g in slopes.gates)
    assert found.sensitive_paths.sum() > 0


# --- convolutions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels, kind", [((1, 1, 1, 1), "galu"), ((2, 1, 2), "relu"), ((1, 2, 2), "dlgn")])
def test_bundles_rebuild_the_output_and_the_path_kernel(channels, kind):
    x = torch.randn(3, channels[0], 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = models.gated_twin(models.CircularConvNet(4, channels, 2).double(), kind, example=x)
    found = deep_gated.path_bundles(net, x)
    assert np.allclose(found.outputs, net(x).detach().numpy()[:, 0], atol=1e-13)
    soft = not net.gate.hard
    assert np.allclose(found.kernel, kernels.npk(net, x, soft=soft).dense().numpy(), atol=1e-13)
    assert np.allclose(found.rotations.sum(0), found.kernel)


def test_lemma_4_1_over_every_sign():
    x = torch.randn(2, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net = models.gated_twin(models.CircularConvNet(3, (1, 1, 1, 1), 2).double(), "galu", example=x)
    sigma, mean = 0.7, np.zeros((2, 2))
    weights = [p for k, p in net.named_parameters() if k.startswith("values.") and "conv" in k]
    with torch.no_grad():
        next(p for k, p in net.named_parameters() if k == "values.stack.output.weight").fill_(1.0)
        for signs in itertools.product((-sigma, sigma), repeat=6):
            torch.nn.utils.vector_to_parameters(torch.tensor(signs, dtype=torch.float64), weights)
            f = net(x)[:, 0].numpy()
            mean += np.outer(f, f) / 64
    assert np.allclose(mean, sigma**6 * deep_gated.path_bundles(net, x).kernel, atol=1e-14)


# --- width, and what is refused ------------------------------------------------------------------------------------


def test_the_kernel_converges_at_the_predicted_rate():
    sweep = deep_gated.width_sweep(inputs(6, 3), hidden_layers=3, widths=(32, 128, 512), seeds=range(4))
    assert np.median(sweep.rates) == pytest.approx(-0.5, abs=0.15)
    root = np.sqrt(np.square(sweep.errors).mean(1)) / np.sqrt(np.square(sweep.predicted).mean(1))
    assert ((root > 0.5) & (root < 2)).all()
    assert sweep.plot().get_xlabel() == "width" and "w^" in repr(sweep)


def test_what_does_not_fit_is_refused():
    x = inputs(3, 2)
    with pytest.raises(ShapeError, match="3 rows, the gates 2"):
        deep_gated.gram_moments(x, [np.ones((2, 4))], 1.0)
    with pytest.raises(OptionError, match="one per weight layer"):
        deep_gated.gram_moments(x, [np.ones((3, 4))], [1.0, 1.0, 1.0])
    with pytest.raises(OptionError, match="paths"):
        deep_gated.path_table(models.relu(2, hidden=(200, 200), seed=0), x.float())
    for call in (deep_gated.signal_wire, deep_gated.path_table):
        with pytest.raises(OptionError, match="output=1, but the network has 1"):
            call(models.relu(2, hidden=(4,), seed=0), x.float(), output=1)
    with pytest.raises(RecordError, match="biases"):
        deep_gated.signal_wire(models.relu(2, hidden=(4,), bias=True, seed=0), x.float())
    with pytest.raises(OptionError, match="soft gates"):
        deep_gated.gate_slopes(models.relu(2, hidden=(4,), seed=0), x.float())
    with pytest.raises(OptionError, match="CircularConvNet"):
        deep_gated.path_bundles(models.relu(2, hidden=(4,), seed=0), x.float())
    net = models.gated_twin(models.CircularConvNet(3, (1, 1)), "galu", example=torch.randn(2, 1, 3))
    with pytest.raises(OptionError, match="output=1, but the network has 1"):
        deep_gated.path_bundles(net, torch.randn(2, 1, 3), output=1)
    for call in (deep_gated.adaptation, deep_gated.gate_gradient_overlap, deep_gated.rho_bound):
        with pytest.raises(OptionError, match="expected a GatedNetwork, got Linear"):
            call(torch.nn.Linear(2, 1), x.float())


def test_a_table_of_paths_names_inputs_that_the_first_layer_reads_as_they_are() -> None:
    class Flipped(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flip(1))

    layers = torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False)
    X = torch.randn(4, 2)
    assert deep_gated.path_table(models.gated_twin(torch.nn.Sequential(*layers), "relu", X[:2]), X).units.shape == (
        6,
        2,
    )
    with pytest.raises(RecordError, match="path_table: the first layer"):
        deep_gated.path_table(models.gated_twin(Flipped(*layers), "relu", X[:2]), X)
