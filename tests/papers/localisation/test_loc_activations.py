"""The network of equation 1 and the settings of loc.activations."""

import dataclasses
import functools

import pytest
import torch

from pathlens import theory
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.localisation import activations
from pathlens.papers.localisation._networks import OneLayer, fields


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "erf"])
def test_the_network_is_equation_1(activation):
    net = OneLayer(activation, units=3, bias=True, trained=True)
    net.hidden.bias.data.fill_(0.3)
    x = torch.randn(5, 40)
    h = x @ net.hidden.weight.T + 0.3
    act = {"relu": torch.relu, "sigmoid": torch.sigmoid, "erf": lambda t: torch.erf(t / 2**0.5)}[activation]
    assert torch.allclose(net(x), act(h) @ net.readout.weight.T + net.readout.bias, atol=1e-6)
    mean = OneLayer(activation, units=3)
    assert torch.allclose(mean(x), act(x @ mean.hidden.weight.T).mean(1, keepdim=True), atol=1e-6)


def test_activations_measure_every_setting(monkeypatch, small_run):
    settings = activations.SETTINGS
    kept = {name: settings[name] for name in ("ReLU, ξ₁ > ξ₂", "ReLU, single pulse ±1")}
    real, done = activations.train_setting, []

    @functools.cache
    def train(name):
        done.append(name)
        return real(small_run.with_seeds([0]), name, 30, 60)

    # the same network again, so that all rows are there in little time
    first = next(iter(kept.values()))
    for name, setting in settings.items():
        monkeypatch.setitem(settings, name, kept.get(name) or dataclasses.replace(first, localises=setting.localises))
    monkeypatch.setattr(
        activations, "train_setting", lambda run, name, *size: train(name if name in kept else next(iter(kept)))
    )
    artifact = perform(find("loc.activations"), Run("quick", seeds=(0,), changes=small_run.changes))
    assert done == list(kept) and artifact.arrays["fields_12"].shape == (4, 10, 40)
    assert len([c for c in artifact.claims if c.text == "receptive fields localise"]) == 11


@pytest.mark.slow
def test_relu_units_become_bumps_or_oscillate():
    """The note's claim at a reduced size: 600 steps, 3 seeds."""
    run = Run("quick", seeds=(0, 1, 2))
    signs = {}
    for name in ("ReLU, ξ₁ > ξ₂", "ReLU, ξ₁ < ξ₂"):
        runs = activations.train_setting(run, name, 600, 300)
        signs[name] = theory.sign_alternation(fields(runs, 600)).mean(1)
    assert (signs["ReLU, ξ₁ > ξ₂"] < 0.1).all() and (signs["ReLU, ξ₁ < ξ₂"] > 0.8).all()
