"""Figure 10, small, against the recursion of two layers."""

import math

import numpy as np
import pytest

import pathlens as pl
from pathlens.training import initialise


def test_one_example_follows_the_scalar_recursion(on_synthetic):
    arrays = on_synthetic("dgn.fig10").arrays
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
    first = np.array(on_synthetic("dgn.fig10").metrics["first ratio of squared errors"]["Σ, as printed"])
    assert first.mean() == pytest.approx(0.64, abs=0.15)
