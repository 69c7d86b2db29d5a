"""Gradient flow, eigenvalues and the linearised network on the circle, against definitions given here."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from pathlens.papers.experiment import Run, find
from pathlens.papers.half_space import spectral


def test_flow_is_the_matrix_exponential():
    rng = np.random.default_rng(0)
    A, e = rng.normal(size=(6, 6)), rng.normal(size=6)
    flow = spectral.Flow(A @ A.T, e)
    later = scipy.linalg.expm(-A @ A.T * 0.7 / 6) @ e
    assert np.allclose(flow.error(0.7), later, atol=1e-12)
    assert flow.loss([0.7])[0] == pytest.approx(np.mean(later**2))
    assert flow.loss([flow.time_to(0.1)])[0] == pytest.approx(0.1)
    assert spectral.Flow(np.ones((6, 6)), e).time_to(1e-3) == math.inf  # only the mean can be learned


def test_eigenvalues_by_frequency():
    values, purity, K = spectral.circle_spectrum(32, 5)
    both = np.sort(np.concatenate([values, values[1:-1]]))  # all but 0 and n/2 come twice
    assert np.allclose(both, np.linalg.eigvalsh(K) / 32, atol=1e-12)
    assert purity == pytest.approx(1.0)


def test_the_linearised_network_is_trained_by_plain_adam():
    generator = torch.Generator().manual_seed(3)
    J, f, y = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12, 5), (12,), (12,)))
    run = Run(seeds=(7, 8), changes={"lr": 0.1, "batch_size": 5}, current=find("hs.spectral"))
    found = spectral.train_linearised(run, [(f, J), (f, 2 * J)], y, 3, "")
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    adam, shuffle = torch.optim.Adam([w], lr=0.1), torch.Generator().manual_seed(7)
    losses = [(f - y).square().mean()]
    for _ in range(3):
        for rows in torch.randperm(12, generator=shuffle).split(5):
            adam.zero_grad()
            (f[rows] + J[rows] @ w - y[rows]).square().mean().backward()
            adam.step()
        losses.append((f + J @ w - y).square().mean())
    assert np.allclose(found[0], torch.stack(losses).detach().numpy(), rtol=1e-10)
