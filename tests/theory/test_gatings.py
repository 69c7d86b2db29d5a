"""The least loss of a gating in closed form, searches for the best one, and measures of localisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pathlens import models, theory
from pathlens.data import SinglePulse, nlgp
from pathlens.errors import LabelError, NotFiniteError, OptionError, ShapeError, UnknownNameError


def planted(n: int = 150, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """y is linear on either side of a line: two half-spaces fit it exactly, others do not."""
    x = np.random.default_rng(seed).standard_normal((n, 2))
    v = np.array([0.6, -0.8])
    return x, np.where(x @ v > 0, x @ [1.0, 2.0], x @ [-1.0, 0.5])


def test_the_least_loss_is_that_of_a_regression_and_the_limit_of_the_flow() -> None:
    data = nlgp(n=300, d=8, seed=0)
    x, y = data.x.double().numpy(), data.y[:, 0].double().numpy()
    gates = theory.random_half_spaces(3, 8)
    features = (gates(x)[:, :, None] * x[:, None, :]).reshape(300, -1)
    fit = np.linalg.lstsq(features, y)[0]
    assert theory.gating_loss(gates, data) == pytest.approx(np.mean((features @ fit - y) ** 2), rel=1e-12)
    assert theory.gating_loss(gates, data) == pytest.approx(
        2 * theory.GDLN.from_data(gates, data).loss(np.inf), rel=1e-9
    )
    x2, y2 = np.random.default_rng(1).standard_normal((20, 8)), np.ones(20)
    test = theory.gating_loss(gates, data, test=(x2, y2))[1]
    other = (gates(x2)[:, :, None] * x2[:, None, :]).reshape(20, -1)
    assert test == pytest.approx(np.mean((other @ fit - y2) ** 2), rel=1e-9)


def test_three_ways_to_the_loss_of_balanced_labels() -> None:
    """Equations 13, 15 and 16 agree; products of class means (eq. 18 as printed) do not."""
    data = nlgp(n=400, d=6, seed=1)
    gates = theory.random_half_spaces(3, 6, seed=4)
    loss = theory.gating_loss(gates, data)
    m = theory.Moments.from_data(gates, data)
    assert m.square - m.b @ np.linalg.pinv(m.A) @ m.b == pytest.approx(loss, rel=1e-9)
    assert 0.5 - 0.5 * theory.class_separation(gates, data) == pytest.approx(loss, rel=1e-9)


def test_redundant_and_dead_gates_do_not_help() -> None:
    data = planted()
    gates = theory.random_half_spaces(2, 2, seed=3)
    loss = theory.gating_loss(gates, data)
    assert theory.gating_loss(theory.redundant(gates, copies=2), data) == pytest.approx(loss, rel=1e-10)
    dead = np.column_stack([gates(data[0]), np.zeros(len(data[0]))])
    assert theory.gating_loss(dead, data) == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("method", ["greedy", "soft"])
def test_the_search_comes_near_a_planted_gating(method: str) -> None:
    data = planted()
    v = np.array([0.6, -0.8])
    assert theory.gating_loss(theory.half_spaces([v, -v]), data) < 1e-20
    table = theory.search_gatings(data, 2, methods=[method, "random"], trials=60, steps=150, progress=False)
    best = table.by_method(method)[0].loss
    typical = float(np.median([g.loss for g in table.by_method("random")]))
    assert best < 0.2 * typical
    assert table.best.loss == min(g.loss for g in table.rows)


def test_every_way_to_search_is_in_the_table() -> None:
    data, test = nlgp(n=200, d=6, seed=0), nlgp(n=100, d=6, seed=1)
    nets = [models.relu(6, hidden=(3,), seed=s) for s in range(2)]
    table = theory.search_gatings(
        data, 3, test=test, methods=("random", "tiling", "greedy", "soft", "network"), trials=3, networks=nets, steps=10
    )
    assert [len(table.by_method(m)) for m in ("random", "tiling", "greedy", "soft", "network")] == [3, 3, 1, 1, 2]
    losses = [g.test_loss for g in table.rows]
    assert losses == sorted(losses) and table[0] is table.best
    assert "greedy" in repr(table)
    tiles = table.by_method("tiling")[0].gates(data.x)
    assert (tiles.sum(1) == 1).all() and (np.abs(tiles.mean(0) - 1 / 3) < 0.02).all()
    assert theory.off_diagonal_mass(table.by_method("tiling")[0].gates, data) < 1e-12
    assert theory.off_diagonal_mass(theory.random_half_spaces(3, 6), data) > 0.01


def test_a_discrete_distribution_is_scored_exactly() -> None:
    sampler = SinglePulse(d=10, xi1=(0.3, 0.5), xi2=(0.0, 0.2))
    assert 0 < theory.gating_loss(theory.random_half_spaces(2, 10), sampler) < 0.5


def test_tensors_that_numpy_has_no_type_for_are_read() -> None:
    x, y = (torch.tensor(part).bfloat16() for part in planted())
    gates = theory.random_half_spaces(3, 2)
    assert theory.gating_loss(gates, (x, y)) == theory.gating_loss(gates, (x.double(), y.double()))
    net = models.dlgn(2, (4, 4), seed=0).bfloat16()
    strengths = theory.deep_gated.path_table(net, x[:5]).strengths
    np.testing.assert_array_equal(strengths, theory.deep_gated.path_table(net.double(), x[:5].double()).strengths)


def test_bad_input() -> None:
    x, y = planted()
    with pytest.raises(LabelError, match="both labels"):
        theory.class_separation(theory.single(), (x, np.ones(len(x))))
    with pytest.raises(LabelError):
        theory.class_separation(theory.single(), (x, y))
    with pytest.raises(UnknownNameError, match="greedy"):
        theory.search_gatings((x, y), 2, methods=["gredy"])
    with pytest.raises(OptionError):
        theory.search_gatings((x, y), 0)
    with pytest.raises(OptionError, match="networks"):
        theory.search_gatings((x, y), 2, methods=["network"])
    with pytest.raises(ShapeError, match="hidden units"):
        theory.search_gatings((x, y), 2, methods=["network"], networks=[models.relu(2, hidden=(3,))])
    for measure in (theory.ipr, theory.arc90, theory.sign_alternation, theory.centre_of_mass, theory.kurtosis):
        with pytest.raises(ShapeError):
            measure(3.0)
        with pytest.raises(NotFiniteError):
            measure([1.0, np.nan])
    with pytest.raises(OptionError):
        theory.ipr([1.0, 2.0], centre="mean")
    with pytest.raises(OptionError):
        theory.arc90([1.0, 2.0], share=0.0)
    with pytest.raises(ShapeError):
        theory.circular_correlation([], [], 4)


# --- measures of localisation ----------------------------------------------------------------------------------


def ring(d: int = 40) -> np.ndarray:
    return np.arange(d)


def test_measures_on_known_fields() -> None:
    d = 40
    i = ring(d)
    bump = np.exp(-(((i - 12) / 2.0) ** 2))
    wave = np.cos(2 * np.pi * 3 * i / d)
    packet = bump * (-1.0) ** i
    delta = np.eye(d)[7]
    refs = theory.ipr_references(d)
    assert theory.ipr(wave) == pytest.approx(refs["sinusoid"]) and theory.ipr(delta) == refs["one coordinate"]
    noise = np.random.default_rng(0).standard_normal((20_000, d))
    assert theory.ipr(noise).mean() == pytest.approx(refs["gaussian noise"], abs=1e-3)
    assert theory.arc90(noise).mean() == pytest.approx(0.76, abs=0.02)
    assert theory.sign_alternation(noise).mean() == pytest.approx(0.5, abs=0.01)
    # the participation ratio cannot tell a bump from an oscillation in its envelope; the sign can
    assert theory.ipr(bump) == pytest.approx(theory.ipr(packet)) and theory.arc90(bump) == theory.arc90(packet)
    assert theory.sign_alternation(bump) < 1e-6 and theory.sign_alternation(packet) > 0.999
    assert theory.centre_of_mass(bump) == pytest.approx(12, abs=1e-9)
    assert theory.kurtosis(delta) > theory.kurtosis(bump) > 0 > theory.kurtosis(wave)


def test_measures_move_with_the_field_around_the_ring() -> None:
    bump = np.exp(-(((ring() - 20) / 3.0) ** 2)) * np.sign(np.sin(ring()))
    for shift in (0, 7, 33):
        moved = np.roll(bump, shift)
        for measure in (theory.ipr, theory.arc90, theory.sign_alternation, theory.kurtosis):
            assert measure(moved) == pytest.approx(measure(bump), rel=1e-12)
        away = (theory.centre_of_mass(moved) - theory.centre_of_mass(bump) - shift) % 40
        assert min(away, 40 - away) < 1e-9
    assert theory.arc90(np.roll(np.eye(10)[0] + np.eye(10)[1], -1)) == 0.2  # across the seam


def test_a_peak_on_an_offset_needs_the_median() -> None:
    field = np.full(40, 0.5)
    field[10:13] = 3.0
    assert theory.arc90(field) > 0.3 > theory.arc90(field, centre="median") == 3 / 40
    assert theory.ipr(field, centre="median") == pytest.approx(1 / 3)
    assert np.isnan(theory.ipr(np.zeros(4))) and np.isnan(theory.arc90(np.zeros(4)))


def test_circular_correlation() -> None:
    a = np.random.default_rng(0).random(4000) * 40
    assert theory.circular_correlation(a, a + 40, 40) == pytest.approx(1)
    assert abs(theory.circular_correlation(a, np.random.default_rng(1).permutation(a), 40)) < 0.05
    assert theory.circular_correlation(a, a + 20, 40) == pytest.approx(-1)


@pytest.mark.parametrize("scale", [1e-300, 1e-90, 1e90, 1e300])
def test_measures_of_very_large_and_very_small_fields_are_those_of_the_field(scale: float) -> None:
    field = np.array([0.0, 1.0, 2.0, 1.0, 0.0, 0.0, -1.0, 0.0])
    measures = (theory.ipr, theory.arc90, theory.sign_alternation, theory.centre_of_mass, theory.kurtosis)
    for measure in measures:
        assert measure(scale * field) == pytest.approx(measure(field), rel=1e-12)


@pytest.mark.parametrize("d", [3, 7, 10, 40, 41])
def test_a_constant_field_has_neither_kurtosis_nor_centre(d: int) -> None:
    for value in (0.0, 0.1, 1 / 3, 100000.1):
        field = np.full((2, d), value)
        assert np.isnan(theory.kurtosis(field)).all() and np.isnan(theory.centre_of_mass(field)).all()


def test_a_centre_of_mass_lies_in_the_ring() -> None:
    for d in (7, 40):
        k = np.arange(d)
        bump = np.exp(-0.5 * (np.minimum(k, d - k) / 2) ** 2)  # around 0, where the angle rounds to just below zero
        assert 0 <= theory.centre_of_mass(bump) < d
        assert min(theory.centre_of_mass(bump), d - theory.centre_of_mass(bump)) < 1e-9
