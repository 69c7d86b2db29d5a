"""The parts of hs.early, against definitions written out here."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.papers.experiment import Run
from pathlens.papers.half_space.circle_training import circle_network
from pathlens.papers.half_space.early import NEW_VALUES, RIDGE, early_stage, regress, retrain_values, share_gained


def test_early_is_before_the_loss_halves():
    loss = np.array([[2.0, 1.5, 0.1], [2.0, 0.5, 1.1], [2.0, 1.9, 1.8]])
    assert early_stage(loss).tolist() == [1, 0, 2]


def test_shares_of_a_gain_are_defined_between_the_first_and_the_last_stage_alone():
    score = np.array([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0], [1.0, 2.0, 5.0], [5.0, 3.0, 1.0]])
    share = share_gained(score, np.array([1, 0, 2, 1]))
    assert share[0] == 0.25 and np.isnan(share[1:]).all()


def test_frozen_gates_are_those_of_the_stage_and_values_are_new():
    data = pl.data.circle(8)
    gates = circle_network("dlgn_pwc", seed=5)
    runs = pl.train([gates], data, epochs=1, keep=[1], progress=False)
    options = {"epochs": 1, "lr": 1e-20, "progress": False}  # so small that no value changes
    (net,) = retrain_values(Run(seeds=(5,)), runs, [1], partial(circle_network, "dlgn_pwc"), data, options).networks
    x = torch.randn(6, 2)
    assert all(torch.equal(a, b) for a, b in zip(net.gates(x).values(), gates.gates(x).values()))
    new, old = (circle_network("dlgn_pwc", seed=seed).values.state_dict() for seed in (NEW_VALUES + 5, 5))
    values = net.values.state_dict()
    assert all(torch.equal(values[k], new[k]) and not torch.equal(values[k], old[k]) for k in old)
    assert {k.split(".")[0] for k, p in net.named_parameters() if p.requires_grad} == {"values"}


def test_regression_with_counts_is_ridge_regression():
    data, net = pl.data.circle(24, test_points=24), pl.models.dlgn(2, (5, 5), seed=1)
    error = regress(net, data, 24, "cpu", soft=False).mse

    def bits(x):
        return [g.detach().double() for g in net.gates(x, hard=True).values()]

    train, test = bits(data.x), bits(data.x_test)
    K, K_test = (math.prod(g @ h.T for g, h in zip(side, train)) for side in (train, test))
    s = K.trace() / 24
    predicted = K_test / s @ torch.linalg.solve(K / s + RIDGE * torch.eye(24), data.y.double())
    assert error == pytest.approx(float((predicted - data.y_test).square().mean()), rel=1e-3)
