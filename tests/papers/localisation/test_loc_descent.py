"""The descent of ReLU networks and the experiments that analyse it, against definitions written out here."""

import numpy as np
import pytest

from pathlens.data import NLGP


@pytest.fixture
def descent(artifact, small_run):
    artifact("loc.gdln")
    return small_run.once(("descent", 150, 40), lambda: None)


def test_one_descent_serves_three(artifact, small_run):
    for name in ("loc.gdln", "loc.flips", "loc.dft"):
        artifact(name)
    assert list(small_run._results) == [("descent", 150, 40)]


def test_the_descent_is_plain_gradient_descent(descent):
    x, w = descent.x, descent.weights[1, 0]
    for _ in range(descent.marks[-1]):
        h = x @ w.T
        w = w - descent.step / (10 * len(x)) * ((h > 0) * (np.maximum(h, 0).mean(1) - descent.y)[:, None]).T @ x
    assert np.allclose(descent.weights[1, -1], w, atol=1e-10)


def test_the_gdln_is_gradient_descent_with_gates_that_stay(artifact, descent):
    x, w = descent.x, descent.weights[0, 0]
    gates = x @ w.T > 0
    for _ in range(descent.marks[-1]):
        error = (gates * (x @ w.T)).mean(1) - descent.y
        w = w - descent.step / (10 * len(x)) * (gates * error[:, None]).T @ x
    assert np.allclose(artifact("loc.gdln").arrays["fields_1"], w, atol=1e-5)
    assert artifact("loc.gdln").arrays["distance_0"].max() == 0  # ReLU against itself


def test_flips_are_counted_against_the_start(artifact, descent):
    share = np.mean((descent.x @ descent.weights[1, -1].T > 0) != (descent.x @ descent.weights[1, 0].T > 0))
    found = artifact("loc.flips").arrays["share"]
    assert found[1, -1] == pytest.approx(share, abs=1e-7)
    assert not found[:, 0].any()


def test_circulant_moments_are_diagonal_in_the_fourier_basis_and_others_are_not(artifact):
    waves = np.fft.fft(np.eye(40), norm="ortho")
    circulant = np.abs(waves.conj() @ NLGP().second_moment().numpy() @ waves.T) ** 2
    assert 1 - np.trace(circulant) / circulant.sum() < 1e-12
    same = artifact("loc.dft").arrays["same"]
    assert ((same > 0) & (same < 0.975)).all()
