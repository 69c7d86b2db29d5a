"""Kernel machines keep what they were fitted with."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.base import clone

import pathlens as pl
from pathlens import PathKernelRegressor


def test_predictions_stay_when_the_network_or_the_parameters_change():
    net = pl.models.relu(2, (4, 3), seed=0).double()
    X = np.random.default_rng(0).standard_normal((20, 2))
    machine = PathKernelRegressor("ntk", network=net).fit(X, X[:, 0])
    before = machine.predict(X)
    with torch.no_grad():
        net.values.linear1.weight.mul_(-1)
    machine.set_params(kernel="overlap")
    np.testing.assert_array_equal(machine.predict(X), before)
    assert machine.network is net and clone(machine).kernel == "overlap"
