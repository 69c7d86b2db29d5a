"""The deep gated networks experiments, small: what they write and claim, against definitions written out here."""

import itertools
import math

import numpy as np
import pytest
import torch
from small_sizes import shrink

import pathlens as pl
from pathlens.papers import deep_gated_gates
from pathlens.papers import deep_gated_synthetic as deep_gated
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform, select
from pathlens.papers.pages import write_page
from pathlens.training import initialise

NAMES = (
    "dgn.fig1",
    "dgn.fig2",
    "dgn.fig3",
    "dgn.fig4",
    "dgn.fig9",
    "dgn.fig10",
    "dgn.conv",
    "dgn.subnetworks",
    "dgn.unfittable",
)
SMALL = {
    "dgn.fig1": {"n": 12, "depths": [2, 4, 6], "widths": [8, 40]},
    "dgn.fig2": {"depths": [2, 4, 6], "runs": 4, "width": 40},
    "dgn.fig3": {"n": 12, "trained_depths": [2, 4, 6], "trained_widths": [8, 20], "epochs": 12},
    "dgn.fig4": {"galu_n": 10, "galu_width": 12, "galu_depths": [2, 4], "galu_epochs": 10},
    "dgn.fig10": {"width": 20, "depths": [2, 4], "steps": 12},
    "dgn.conv": {"inputs": 3},
    "dgn.subnetworks": {"width": 8, "hidden_layers": 3, "epochs": 3, "watched": 6},
    "dgn.unfittable": {"fit_width": 8, "fit_hidden_layers": 2, "fit_steps": 30},
}


@pytest.fixture(scope="module")
def small():
    """Seconds, and the same code."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in SMALL.items():
            shrink(patch, name, sizes)
        yield


@pytest.fixture(scope="module")
def found(small):
    run = Run("quick", seeds=(0, 1, 2))
    return {name: perform(find(name), run) for name in NAMES}, run


def test_all_are_listed_with_their_claims():
    assert {e.name for e in select(["dgn.*"])} >= set(NAMES)


def jacobian(net, x):
    """∂f(s)/∂Θ, one row per input, by one backward pass each."""
    weights = list(net.values.parameters())
    rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in net(x)[:, 0]]
    return np.stack([np.concatenate([g.numpy().ravel() for g in row]) for row in rows])


def test_spectra_are_those_of_the_jacobian(found):
    ecdf = found[0]["dgn.fig1"].arrays["ecdf"]
    sums = []
    for seed in (0, 1, 2):
        net = deep_gated._frg(8, 4, 12).reinitialise(seed)
        J = jacobian(net.double(), torch.ones(12, 1, dtype=torch.float64))
        sums.append(np.cumsum(np.linalg.eigvalsh(J @ J.T)) / 4)
    assert np.allclose(ecdf[0, 1], np.mean(sums, 0), atol=1e-4)


def test_errors_are_those_of_plain_gradient_descent(found):
    error = found[0]["dgn.fig3"].arrays["error"]
    net = deep_gated._frg(20, 4, 12).reinitialise(1)
    data = pl.data.identical_inputs(12)
    rate = 0.1 / float(torch.linalg.eigvalsh(pl.kernels.ntk(net, data.x).dense())[-1])
    trace = []
    for _ in range(13):
        e = net(data.x) - data.y
        trace.append(float(e.detach().norm()))
        gradients = torch.autograd.grad(0.5 * e.square().sum(), list(net.values.parameters()))
        with torch.no_grad():
            for p, g in zip(net.values.parameters(), gradients):
                p -= rate * g
    assert np.allclose(error[1, 1, 1], np.array(trace) / trace[0], rtol=1e-4)


def test_the_linear_prediction_is_equation_1():
    descent = deep_gated.Descent(np.zeros((1, 1, 4)), np.array([[[1.0, 2.0]]]))
    slow, fast = 0.95, 0.9
    want = [math.sqrt((slow ** (2 * t) + fast ** (2 * t)) / 2) for t in range(4)]
    assert np.allclose(descent.linear[0, 0], want)


def test_entries_are_compared_with_their_exact_moments(found):
    arrays = found[0]["dgn.fig2"].arrays
    assert np.allclose(arrays["mean"][:, 0], 1) and np.allclose(arrays["mean"][:, 1], [0.5, 0.125, 0.5**5])
    assert arrays["average"].shape == (3, 3, 2) and all(found[0]["dgn.fig2"].claims[0].met)


def test_one_example_follows_the_scalar_recursion(found):
    arrays = found[0]["dgn.fig10"].arrays
    # two layers of width 20, ±1/√20: f = u·v, both stepped by hand
    net = pl.models.dln(1, (20,), init=pl.models.Init("bernoulli", math.sqrt(1 / 20))).double()
    initialise(net, 2)
    v, u = (p.detach().numpy().ravel().copy() for p in net.values.parameters())
    start = float(u @ v) - 1
    for t in range(13):
        e = float(u @ v) - 1
        assert arrays["kernel"][0, 2, t] == pytest.approx(u @ u + v @ v, rel=1e-5)
        assert arrays["error"][0, 2, t] == pytest.approx((e / start) ** 2, abs=1e-6)
        u, v = u - 0.05 * e * v, v - 0.05 * e * u
    first = np.array(found[0]["dgn.fig10"].metrics["first ratio of squared errors"]["Σ, as printed"])
    assert first.mean() == pytest.approx(0.64, abs=0.15)


def test_exact_claims_hold_at_any_size(found):
    for name in ("dgn.fig9", "dgn.conv"):
        assert found[0][name].verdict == "reproduced"
    disjoint, _, floor = found[0]["dgn.subnetworks"].claims
    assert all(disjoint.met) and all(value is not False for value in floor.met)
    assert all(found[0]["dgn.unfittable"].claims[0].met)


def test_the_weakest_sensitive_path_is_the_weakest_of_all():
    net = pl.models.soft_galu(2, hidden=(3, 3), beta=8.0, epsilon=0.0, seed=1).double()
    slopes = pl.theory.deep_gated.gate_slopes(
        net, 2 * torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
    )
    terms = []
    for s, (i, j) in itertools.product(range(4), itertools.product(range(3), repeat=2)):
        for a, b, g, h in ((0, 1, i, j), (1, 0, j, i)):
            if slopes.slopes[a][s, g] > 0.3 and slopes.gates[b][s, h] > 0.6:
                terms.append(slopes.slopes[a][s, g] * slopes.gates[b][s, h])
    assert terms and deep_gated_gates._weakest(slopes, 0.6, 0.3) == pytest.approx(min(terms))
    assert deep_gated_gates._weakest(slopes, 0.6, 1e9) == math.inf


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())
