"""Quadratic gates and the cost of gates, small and on made-up images, against definitions written out here."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from pathlens import training
from pathlens.data import DataSet
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space import cost, quadratic
from pathlens.papers.half_space.quadratic import KINDS

SMALL = {
    "points": 24,
    "circle_width": 3,
    "circle_epochs": 4,
    "images": ["cifar10"],
    "width": 4,
    "rows": 40,
    "rows_test": 30,
    "epochs": 2,
    "batch_size": 20,
    "dense_width": 6,
    "filters": [3],
    "residual": [],
    "batch": 2,
    "steps": 1,
}


def made_up(name, rows=None, rows_test=None, *, flatten=False):
    generator = torch.Generator().manual_seed(0)
    x, x_test = (torch.randn(n, 12, generator=generator) for n in (40, 30))
    return DataSet(x, torch.arange(40) % 10, x_test, torch.arange(30) % 10, task="classification", classes=10)


def train_uncompiled(train, *given, **options):
    return train(*given, **options | {"execution": training.Execution(compile=False)})


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quadratic, "images", made_up)
        patch.setattr(training, "train", functools.partial(train_uncompiled, training.train))
        run = Run("paper", seeds=(0, 1), changes=SMALL)
        yield {name: perform(find(name), run) for name in ("hs.quadratic", "hs.cost")}


@pytest.mark.parametrize("kind", KINDS)
def test_widths_match_parameters(kind):
    """Counted by hand: values, then gates of x, their squares and coefficients."""

    def by_hand(kind, d, w, c):
        values = d * w + 4 * w * w + w * c
        gates = {"linear": d * w + 4 * w * w, "shallow": 5 * d * w, "quadratic": 5 * (2 * d * w + w)}
        return values + gates[kind]

    w = quadratic.matched_width(kind, 20, 16, 10, rank=1)
    built = sum(p.numel() for p in quadratic.build(kind, 20, w, 10, rank=1).parameters())
    assert built == by_hand(kind, 20, w, 10)
    wanted = by_hand("linear", 20, 16, 10)
    best = min(range(1, 40), key=lambda v: abs(by_hand(kind, 20, v, 10) - wanted))
    assert w == best


def test_quadratic_claims_compare_losses_and_accuracies(found):
    artifact = found["hs.quadratic"]
    a = artifact.arrays
    fits = [c for c in artifact.claims if c.text == quadratic._FITS.text]
    assert np.allclose(fits[0].measured, a["loss_quadratic"][:, -1] / a["loss_linear"][:, -1], rtol=1e-5)
    accurate = [c for c in artifact.claims if c.text == quadratic._ACCURATE.text]
    assert np.allclose(accurate[1].measured, a["last_cifar10_quadratic"] - a["last_cifar10_shallow"], atol=1e-4)
    assert list(a["circle_epochs"]) == [0, 1, 3, 4] and a["paths_quadratic"].shape == (2, 4)
    assert artifact.metrics["widths"]["circle"]["linear"] == 3


def test_path_ratio_counts_active_paths():
    import pathlens as pl

    net = pl.models.quadratic(2, (3, 3), seed=0)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    top = np.array([True, True, False, False, True, False])
    with torch.no_grad():
        counts = np.prod([g.sum(1).numpy() for g in net.gates(x, hard=True).values()], axis=0)
    expected = counts[top].mean() / counts[~top].mean()
    assert quadratic._path_ratio(pl.record(net, x, sensitivities=False), top) == pytest.approx(expected)


def test_kept_memory_is_what_the_backward_pass_reads():
    """One ReLU layer keeps its result alone; input and weights are there anyway."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert cost.kept_bytes(net, torch.randn(5, 3)) == 5 * 4 * 4


def test_a_clock_that_stands_still_meanwhile_is_waited_for(monkeypatch):
    """Four calls between two moves of a coarse clock: no call took nothing, and ratios are numbers."""
    calls = []
    monkeypatch.setattr(cost.time, "process_time", lambda: 0.01 * (len(calls) // 4))
    assert cost._seconds(lambda: calls.append(1), 3, "cpu") == pytest.approx(0.0025)
    assert len(calls) == 12


def test_costs_are_ratios_to_relu(found):
    artifact = found["hs.cost"]
    ratio = artifact.arrays["ratio"]
    assert ratio.shape == (2, 5, 2) and (ratio > 0).all()
    w, d = 6, 784
    values = d * w + w + 4 * (w * w + w) + w * 10 + 10
    gates = d * w + w + 4 * (w * w + w)
    names = list(cost.COSTS)
    assert ratio[0, names.index("parameters"), 0] == pytest.approx((values + gates) / values, rel=1e-6)
    operations = 2 * (d * w + 4 * w * w + w * 10)
    assert ratio[0, names.index("flops"), 0] == pytest.approx((2 * operations - 2 * w * 10) / operations, rel=1e-6)
    claim = artifact.claims[names.index("parameters")]
    assert claim.measured[0] == pytest.approx(abs((values + gates) / values - 2), rel=1e-5)
