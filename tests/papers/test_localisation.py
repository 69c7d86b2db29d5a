"""The localisation experiments, small: what they write and claim, against definitions written out here."""

import numpy as np
import pytest
import torch

from pathlens import theory
from pathlens.papers import localisation_runs
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform, select
from pathlens.papers.pages import write_page

NAMES = ("loc.gdln", "loc.flips", "loc.dft", "loc.location", "loc.flow", "loc.evolving", "loc.gates")


SMALL = {
    "steps": 30,
    "batch": 60,
    "rows": 150,
    "descent": 40,
    "flow_rows": 60,
    "time": 5.0,
    "units": 10,
    "draws": 4,
    "gate_rows": 200,
}


@pytest.fixture(scope="module")
def found():
    """Seconds, and the same code."""
    run = Run("quick", seeds=(0, 1), changes=SMALL)
    return {name: perform(find(name), run) for name in NAMES}, run


def test_all_are_listed_with_their_claims():
    names = [e.name for e in select(["loc.*"])]
    assert set(names) == {*NAMES, "loc.activations"}


def test_one_descent_serves_three(found):
    _, run = found
    assert [k for k in run._results if k[0] == "descent"] == [("descent", 150, 40)]


def test_the_gdln_is_gradient_descent_with_gates_that_stay(found):
    artifacts, run = found
    d = run.once(("descent", 150, 40), lambda: None)
    x, y = d.data.x.numpy(), d.data.y[:, 0].numpy()
    w = d.weights[0, 0]
    gates = x @ w.T > 0
    for _ in range(d.marks[-1]):
        error = (gates * (x @ w.T)).mean(1) - y
        w = w - d.step / (10 * len(x)) * (gates * error[:, None]).T @ x
    assert np.allclose(artifacts["loc.gdln"].arrays["fields_1"], w, atol=1e-5)
    assert artifacts["loc.gdln"].arrays["distance_0"].max() == 0  # ReLU against itself


def test_the_descent_is_plain_gradient_descent(found):
    _, run = found
    d = run.once(("descent", 150, 40), lambda: None)
    x, y = d.data.x.numpy(), d.data.y[:, 0].numpy()
    w = d.weights[1, 0]
    for _ in range(d.marks[-1]):
        h = x @ w.T
        w = w - d.step / (10 * len(x)) * ((h > 0) * (np.maximum(h, 0).mean(1) - y)[:, None]).T @ x
    assert np.allclose(d.weights[1, -1], w, atol=1e-10)


def test_flips_are_counted_against_the_start(found):
    artifacts, run = found
    d = run.once(("descent", 150, 40), lambda: None)
    x = d.data.x.numpy()
    share = np.mean((x @ d.weights[1, -1].T > 0) != (x @ d.weights[1, 0].T > 0))
    assert artifacts["loc.flips"].arrays["share"][1, -1] == pytest.approx(share, abs=1e-7)
    assert not artifacts["loc.flips"].arrays["share"][:, 0].any()


def test_circulant_moments_are_diagonal_in_the_fourier_basis_and_others_are_not(found):
    from pathlens.data import NLGP

    waves = np.fft.fft(np.eye(40), norm="ortho")
    circulant = np.abs(waves.conj() @ NLGP().second_moment().numpy() @ waves.T) ** 2
    assert 1 - np.trace(circulant) / circulant.sum() < 1e-12
    same = found[0]["loc.dft"].arrays["same"]
    assert ((same > 0) & (same < 0.975)).all()


def test_closed_forms_and_exact_flows_hold_at_any_size(found):
    artifacts, _ = found
    for claim in artifacts["loc.flow"].claims:
        assert all(claim.met), (claim.row, claim.text, claim.measured)
    assert all(artifacts["loc.evolving"].claims[0].met)


def test_gates_are_scored_on_held_out_rows(found):
    losses = found[0]["loc.gates"].metrics["least test loss"]
    assert set(losses) == {"random", "tiling", "greedy", "soft", "network"}
    assert all(0 < v < 0.6 for values in losses.values() for v in values)


def test_activations_measure_every_setting(monkeypatch):
    kept = ("ReLU, ξ₁ > ξ₂", "ReLU, single pulse ±1")
    for name in list(localisation_runs.SETTINGS):
        if name not in kept:  # the same network again, so that all rows are there in little time
            monkeypatch.setitem(localisation_runs.SETTINGS, name, localisation_runs.SETTINGS[kept[0]])
    done = {}
    real = localisation_runs.train_setting
    monkeypatch.setattr(
        localisation_runs,
        "train_setting",
        lambda run, name, *size: (
            done.setdefault(localisation_runs.SETTINGS[name], real(run, name, *size))
            if localisation_runs.SETTINGS[name] not in done
            else done[localisation_runs.SETTINGS[name]]
        ),
    )
    artifact = perform(find("loc.activations"), Run("quick", seeds=(0,), changes=SMALL))
    assert len(done) == 2 and artifact.arrays["fields_12"].shape == (4, 10, 40)
    assert len([c for c in artifact.claims if c.text == "receptive fields localise"]) == 11


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "erf"])
def test_the_network_is_equation_1(activation):
    net = localisation_runs.OneLayer(activation, units=3, bias=True, trained=True)
    net.hidden.bias.data.fill_(0.3)
    x = torch.randn(5, 40)
    h = x @ net.hidden.weight.T + 0.3
    act = {"relu": torch.relu, "sigmoid": torch.sigmoid, "erf": lambda t: torch.erf(t / 2**0.5)}[activation]
    assert torch.allclose(net(x), act(h) @ net.readout.weight.T + net.readout.bias, atol=1e-6)
    mean = localisation_runs.OneLayer(activation, units=3)
    assert torch.allclose(mean(x), act(x @ mean.hidden.weight.T).mean(1, keepdim=True), atol=1e-6)


@pytest.mark.slow
def test_relu_units_become_bumps_or_oscillate():
    """The note's claim at a reduced size: 600 steps, 3 seeds."""
    run = Run("quick", seeds=(0, 1, 2))
    signs = {}
    for name in ("ReLU, ξ₁ > ξ₂", "ReLU, ξ₁ < ξ₂"):
        runs = localisation_runs.train_setting(run, name, 600, 300)
        signs[name] = theory.sign_alternation(localisation_runs.fields(runs, 600)).mean(1)
    assert (signs["ReLU, ξ₁ > ξ₂"] < 0.1).all() and (signs["ReLU, ξ₁ < ξ₂"] > 0.8).all()


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for a in found[0].values():
        a.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(a.title in page for a in found[0].values())
