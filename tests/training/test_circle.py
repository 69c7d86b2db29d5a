"""The settings that reproduce the half-space paper's circle, against what was measured for them before."""

import numpy as np
import pytest

import pathlens as pl


def median_epochs(net, epochs, loss=0.01, **options):
    runs = pl.train(
        net, pl.data.circle(), epochs=epochs, lr=5e-4, batch_size=32, seeds=range(5), progress=False, **options
    )
    return float(np.median([np.inf if e is None else e for e in runs.epochs_to(loss)]))


def test_relu_is_under_a_hundredth_near_epoch_113():
    assert 113 / 2 <= median_epochs(pl.models.relu(2), 226) <= 113 * 2


def test_dlgn_pwc_is_under_a_hundredth_near_epoch_240():
    assert 240 / 2 <= median_epochs(pl.models.dlgn(2, piecewise_constant=True, beta=4.0), 480) <= 240 * 2


@pytest.mark.slow
def test_frozen_soft_gates_are_not_under_a_hundredth_before_epoch_2000():
    net = pl.models.dlgn(2, piecewise_constant=True, frozen=True, beta=10.0)
    assert median_epochs(net, 2000) > 2000
