"""Kernel machines keep what they were fitted with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone

import pathlens as pl
from pathlens import PathKernelRegressor
from pathlens.errors import OptionError


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


def test_a_ridge_is_chosen_by_leaving_rows_out():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (120, 2))
    y, net = np.sin(3 * X[:, 0]), pl.models.relu(2, (32, 32), seed=0).double()
    scores = {}
    for ridge in (1e-8, "auto", 30.0):
        machine = PathKernelRegressor("ntk", network=net, ridge=ridge).fit(X[:60], y[:60] + 0.3 * rng.normal(size=60))
        scores[ridge] = machine.score(X[60:], y[60:])
        assert (machine.ridge_ == ridge) == (ridge != "auto")
    assert scores["auto"] > max(scores[1e-8], scores[30.0])


@pytest.mark.parametrize("ridge", ["some", -1, None, float("inf")])
def test_a_wrong_ridge_is_said_before_anything_is_trained(ridge):
    with pytest.raises(OptionError, match="PathKernelRegressor: ridge must be 'auto' or a finite number of at least 0"):
        PathKernelRegressor(ridge=ridge).fit([[0.0], [1.0]], [0.0, 1.0])
