"""Figures 1, 2 and 3, small, against definitions written out here."""

import math

import numpy as np
import torch

import pathlens as pl
from pathlens.papers.deep_gated import depths


def jacobian(net, x):
    """∂f(s)/∂Θ, one row per input, by one backward pass each."""
    weights = list(net.values.parameters())
    rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in net(x)[:, 0]]
    return np.stack([np.concatenate([g.numpy().ravel() for g in row]) for row in rows])


def test_spectra_are_those_of_the_jacobian(on_synthetic):
    ecdf = on_synthetic("dgn.fig1").arrays["ecdf"]
    sums = []
    for seed in (0, 1, 2):
        net = depths.fixed_random_gates(8, 4, 12).reinitialise(seed)
        J = jacobian(net.double(), torch.ones(12, 1, dtype=torch.float64))
        sums.append(np.cumsum(np.linalg.eigvalsh(J @ J.T)) / 4)
    assert np.allclose(ecdf[0, 1], np.mean(sums, 0), atol=1e-4)


def test_errors_are_those_of_plain_gradient_descent(on_synthetic):
    error = on_synthetic("dgn.fig3").arrays["error"]
    net = depths.fixed_random_gates(20, 4, 12).reinitialise(1)
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
    descent = depths.Descent(np.zeros((1, 1, 4)), np.array([[[1.0, 2.0]]]))
    slow, fast = 0.95, 0.9
    want = [math.sqrt((slow ** (2 * t) + fast ** (2 * t)) / 2) for t in range(4)]
    assert np.allclose(descent.linear[0, 0], want)


def test_entries_are_compared_with_their_exact_moments(on_synthetic):
    arrays = on_synthetic("dgn.fig2").arrays
    assert np.allclose(arrays["mean"][:, 0], 1) and np.allclose(arrays["mean"][:, 1], [0.5, 0.125, 0.5**5])
    assert arrays["average"].shape == (3, 3, 2) and all(on_synthetic("dgn.fig2").claims[0].met)
