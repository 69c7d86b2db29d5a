"""Circle, NLGP, single pulse and memorisation sets against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from pathlens.data import (
    CIRCLE_CONTROLS,
    NLGP,
    SinglePulse,
    circle,
    circle_control,
    identical_inputs,
    nlgp,
    nlgp_covariance,
    random_targets,
    ring_covariance,
    single_point,
    single_pulse,
    unfittable,
)
from pathlens.errors import NotFiniteError, OptionError, ShapeError, UnknownNameError

# --- circle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 2, 7, 1024])
def test_circle_is_its_formula(points):
    data = circle(points, dtype=torch.float64)
    for i in range(points):
        theta = 2 * math.pi * i / points
        top = i < points / 2
        assert bool(data.marks["top"][i]) is top
        assert data.x[i].tolist() == pytest.approx([math.cos(theta), math.sin(theta)], abs=1e-15)
        assert float(data.y[i, 0]) == pytest.approx(math.sin(theta if top else 12 * theta), abs=1e-12)


def test_circle_energy():
    """Mean squares that the loss curves start from: ½ in all, ¼ once the slow half is learned."""
    data = circle(1024, dtype=torch.float64)
    assert float((data.y**2).mean()) == pytest.approx(0.5, abs=1e-12)
    assert float((data.y[~data.marks["top"]] ** 2).sum()) / 1024 == pytest.approx(0.25, abs=1e-12)


def test_circle_options():
    data = circle(
        100,
        top=torch.cos,
        bottom=3,
        top_amplitude=2,
        bottom_amplitude=0.5,
        top_offset=-1,
        bottom_offset=4,
        dtype=torch.float64,
        test_points=10,
    )
    theta, top = data.marks["theta"], data.marks["top"]
    expected = torch.where(top, 2 * torch.cos(theta) - 1, 0.5 * torch.sin(3 * theta) + 4)
    torch.testing.assert_close(data.y[:, 0], expected, rtol=0, atol=1e-14)
    assert data.info["top"] == "cos" and len(data.x_test) == 10
    assert float(data.marks_test["theta"][0]) == pytest.approx(math.pi / 10)


def test_circle_noise_has_its_size_and_seed():
    clean, noisy = circle(4096), circle(4096, noise=0.3, seed=1, test_points=4096)
    noise = (noisy.y - clean.y).flatten()
    assert float(noise.std()) == pytest.approx(0.3, rel=5 / math.sqrt(2 * 4096))
    assert not torch.equal(noisy.y, circle(4096, noise=0.3, seed=2).y)
    assert torch.equal(noisy.y_test, circle(16, test_points=4096).y_test), "test targets are noiseless"


def test_circle_controls():
    made = {name: circle_control(name, points=64, dtype=torch.float64) for name in CIRCLE_CONTROLS}
    top, theta = made["trivial"].marks["top"], made["trivial"].marks["theta"]
    fast, slow = torch.sin(12 * theta), torch.sin(theta)
    expected = {
        "trivial": torch.where(top, 0.0, fast),
        "offset": torch.where(top, fast + 1, fast),
        "swapped": torch.where(top, fast, slow),
    }
    assert made.keys() == expected.keys()
    for name, data in made.items():
        torch.testing.assert_close(data.y[:, 0], expected[name], rtol=0, atol=1e-14)
    with pytest.raises(UnknownNameError, match="swapped"):
        circle_control("swap")


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (OptionError, {"points": 0}),
        (OptionError, {"noise": -1.0}),
        (OptionError, {"top": math.inf}),
        (OptionError, {"test_points": -1}),
        (ShapeError, {"top": lambda t: t[:1]}),
        (ShapeError, {"bottom": lambda t: 3.0}),
        (NotFiniteError, {"top": lambda t: 1 / t}),
    ],
)
def test_circle_refuses(error, options):
    with pytest.raises(error, match="circle"):
        circle(**options)


# --- NLGP -------------------------------------------------------------------------------------------------------

CONVENTIONS = ("lufkin", "ingrosso-goldt")


def test_ring_covariance():
    c = ring_covariance(5, 2.0)
    for i in range(5):
        for j in range(5):
            distance = min(abs(i - j), 5 - abs(i - j))
            assert float(c[i, j]) == pytest.approx(math.exp(-(distance**2) / 4), abs=1e-15)
    assert float(torch.linalg.eigvalsh(ring_covariance(40, 8.0)).min()) == pytest.approx(-2.17e-3, rel=1e-2)


def test_nlgp_covariance_is_the_printed_formula():
    """asin(κC)/asin κ where nothing is clipped; both conventions agree for g_IG = √2 g_L up to the 1e-3."""
    c, gain = ring_covariance(40, 2.0), 1.7
    kappa = 2 * gain**2 / (1 + 2 * gain**2)
    lufkin = nlgp_covariance(40, 2.0, gain)
    torch.testing.assert_close(lufkin, torch.asin(kappa * c) / math.asin(kappa), rtol=0, atol=1e-13)
    other = nlgp_covariance(40, 2.0, math.sqrt(2) * gain, convention="ingrosso-goldt")
    assert 1e-5 < float((other - lufkin).abs().max()) < 1e-3


@pytest.mark.parametrize(("convention", "slope", "jitter"), [("lufkin", 2, 0.0), ("ingrosso-goldt", 1, 1e-3)])
def test_nlgp_covariance_clips_negative_eigenvalues(convention, slope, jitter):
    """Against a dense eigendecomposition, where the ring covariance has eigenvalues down to -2e-3."""
    values, vectors = torch.linalg.eigh(ring_covariance(40, 8.0) + jitter * torch.eye(40, dtype=torch.float64))
    assert float(values.min()) < -1e-3
    c = vectors @ torch.diag(values.clamp(min=0)) @ vectors.T
    a = slope * 3.0**2
    expected = torch.asin(a * c / (1 + a * c[0, 0])) / math.asin(a / (1 + a))
    torch.testing.assert_close(nlgp_covariance(40, 8.0, 3.0, convention=convention), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("gain", [0.01, 1.0, 3.0, 100.0])
def test_nlgp_has_unit_variance(convention, gain):
    for xi in (1.0, 3.0, 8.0):
        assert float(nlgp_covariance(40, xi, gain, convention=convention)[0, 0]) == pytest.approx(1, abs=1.2e-3)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("gain", "xi"), [(0.5, (2.0, 1.0)), (3.0, (8.0, 1.0))])
def test_nlgp_samples_have_the_covariance(convention, gain, xi):
    """Sample second moments within their Monte Carlo error: chi-square per entry near 1, none beyond 5.5 sigma."""
    d, n = 40, 20000
    sampler = NLGP(d, xi, gain, convention, dtype=torch.float64)
    x, y = sampler.sample(n, torch.Generator().manual_seed(0))
    assert float(y.sum()) == n / 2
    for label in (1, 0):
        rows = x[y[:, 0] == label]
        products = rows[:, :1] * rows  # x_0 x_k
        score = (products.mean(0) - sampler.covariance(label)[0]) / (products.std(0) / math.sqrt(len(rows)))
        assert float(score.abs().max()) < 5.5
        assert float(rows.mean(0).abs().max()) < 5.5 / math.sqrt(len(rows))
    torch.testing.assert_close(sampler.second_moment(), (sampler.covariance(1) + sampler.covariance(0)) / 2)


def test_nlgp_labels_follow_the_lengths():
    """Label 1 has the first ξ: its neighbours are the more correlated ones."""
    x, y = NLGP(40, (5.0, 0.5), labels="pm1").sample(4001, torch.Generator().manual_seed(1))
    assert sorted(y.unique().tolist()) == [-1, 1] and abs(int((y == 1).sum()) - 2000) <= 1
    correlation = [float((x[y[:, 0] == label] * x[y[:, 0] == label].roll(1, 1)).mean()) for label in (1, -1)]
    assert correlation[0] > 0.8 and correlation[1] < 0.2


@pytest.mark.parametrize(("gain", "kurtosis"), [(0.01, 0.0), (1.0, -1.44), (3.0, -1.83), (100.0, -2.0)])
def test_nlgp_kurtosis(gain, kurtosis):
    """Excess kurtosis falls from 0 to -2; the reference is numerical integration over z ~ N(0, 1)."""
    z = np.linspace(-9, 9, 400_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    scale = math.sqrt(2 / math.pi * math.asin(2 * gain**2 / (1 + 2 * gain**2)))
    fourth = float((density * (erf(gain * z) / scale) ** 4).sum())
    assert fourth - 3 == pytest.approx(kurtosis, abs=6e-3)
    x, _ = NLGP(8, (0.3, 0.3), gain, dtype=torch.float64).sample(20000, torch.Generator().manual_seed(2))
    fourths = (x**4).mean(1)  # coordinates of a row are nearly independent at ξ = 0.3; rows are independent
    assert abs(float(fourths.mean()) - fourth) < 5 * float(fourths.std()) / math.sqrt(len(x)) + 1e-9


def test_nlgp_is_reproducible_and_fresh():
    sampler = NLGP()
    generator = torch.Generator().manual_seed(5)
    first, second = sampler.sample(10, generator), sampler.sample(10, generator)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], sampler.sample(10, torch.Generator().manual_seed(5))[0])
    data = nlgp(20, n_test=10, seed=5)
    assert data.x_test.shape == (10, 40) and data.y.shape == (20, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"xi": (-1.0, 1.0)},
        {"xi": (1.0, 0.0)},
        {"xi": (math.nan, 1.0)},
        {"gain": 0.0},
        {"gain": -3.0},
        {"d": 0},
        {"labels": "+-"},
        {"xi": (1.0, 2.0, 3.0)},
        {"n": 0},
    ],
)
def test_nlgp_refuses(options):
    with pytest.raises(OptionError, match="NLGP"):
        nlgp(**options)


def test_nlgp_unknown_convention():
    with pytest.raises(UnknownNameError, match="ingrosso-goldt"):
        NLGP(convention="ingrosso")  # type: ignore[arg-type]


# --- single pulse -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    d=st.integers(4, 20),
    edges=st.tuples(st.floats(0.0, 0.99), st.floats(0.05, 0.6)),
    flip=st.booleans(),
    support=st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (-0.5, 2.0)]),
    interval=st.sampled_from(["(]", "[]"]),
)
def test_pulse_second_moment_is_the_enumerated_one(d, edges, flip, support, interval):
    lo = edges[0]
    wide = (max(lo, 1.0 / d), min(1.0, max(lo, 1.0 / d) + 1.5 / d + edges[1]))
    sampler = SinglePulse(d, wide, (1.0 / d, 2.5 / d), interval, support, flip, dtype=torch.float64)
    x, y, p = sampler.enumerate()
    assert len(x) == d * (len(sampler.lengths(1)) + len(sampler.lengths(0))) * (2 if flip else 1)
    assert float(p.sum()) == pytest.approx(1)
    assert set(x.unique().tolist()) <= set(support)
    torch.testing.assert_close((x * p[:, None]).T @ x, sampler.second_moment(), rtol=0, atol=1e-12)
    for label in (1, 0):
        mask = y[:, 0] == label
        torch.testing.assert_close(
            2 * (x[mask] * p[mask, None]).T @ x[mask], sampler.second_moment(label), rtol=0, atol=1e-12
        )


def test_pulse_second_moment_is_the_printed_formula():
    sampler = SinglePulse(40, flip=False)
    for label, length in ((1, 11), (0, 3)):
        row = sampler.second_moment(label)[0]
        assert row[:21].tolist() == pytest.approx([max(length - k, 0) / 40 for k in range(21)], abs=1e-15)


def test_pulse_lengths_round_first():
    assert int(0.29 * 100) == 28, "the trap itself"
    assert SinglePulse(100, (0.28, 0.29), (0.05, 0.1)).lengths(1) == (29,)
    assert SinglePulse(100, (0.29, 0.29), (0.05, 0.1), "[]").lengths(1) == (29,)
    assert SinglePulse(40, (0.2, 0.25), (0.05, 0.1)).lengths(1) == (9, 10)
    assert SinglePulse(40, (0.2, 0.25), (0.05, 0.1), "[)").lengths(1) == (8, 9)
    assert SinglePulse(40, (0.2, 0.25), (0.05, 0.1), "[]").lengths(0) == (2, 3, 4)


def test_pulse_samples():
    sampler = SinglePulse(40, (0.2, 0.25), (0.05, 0.1), dtype=torch.float64)
    n = 40000
    x, y = sampler.sample(n, torch.Generator().manual_seed(0))
    weight = x.sum(1)
    assert set(weight[y[:, 0] == 1].tolist()) == {9, 10, 31, 30}
    assert set(weight[y[:, 0] == 0].tolist()) == {3, 4, 37, 36}
    assert bool(((x != x.roll(1, 1)).sum(1) == 2).all()), "one pulse, wrapping around"
    products = x[:, :1] * x
    score = (products.mean(0) - sampler.second_moment()[0]) / (products.std(0) / math.sqrt(n))
    assert float(score.abs().max()) < 5.5
    flipped = (weight > 20).double().mean()
    assert abs(float(flipped) - 0.5) < 5 * 0.5 / math.sqrt(n), "each row flips by itself"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"xi1": (0.25, 0.26)}, "holds no length"),
        ({"xi1": (0.3, 0.2)}, "lo ≤ hi"),
        ({"xi2": (-0.1, 0.2)}, "0 ≤ lo"),
        ({"xi1": (0.5, 1.5)}, "hi ≤ 1"),
        ({"xi2": (0.0, 0.1), "interval": "[]"}, "holds length 0"),
        ({"support": (1, 0)}, "off < on"),
        ({"labels": "1"}, "'pm1'"),
        ({"n": 0}, "at least 1"),
        ({"d": 0}, "at least 1"),
    ],
)
def test_pulse_refuses(options, part):
    with pytest.raises(OptionError, match=part):
        single_pulse(**options)
    with pytest.raises(UnknownNameError):
        SinglePulse(interval="()")  # type: ignore[arg-type]


# --- memorisation -----------------------------------------------------------------------------------------------


def test_memorisation_sets():
    same = identical_inputs(seed=1)
    assert same.x.shape == (200, 1) and bool((same.x == 1).all())
    assert float(same.y.abs().max()) <= 1 and abs(float(same.y.mean())) < 5 / math.sqrt(3 * 200)
    assert float(same.y.var()) == pytest.approx(1 / 3, rel=0.3)
    plane = random_targets()
    assert plane.x.shape == (100, 2) and float(plane.x.min()) < -0.9 and float(plane.x.max()) > 0.9
    assert not torch.equal(plane.y, plane.x[:, :1])
    assert single_point().x.tolist() == single_point().y.tolist() == [[1.0]]


def test_unfittable():
    data = unfittable([3.0, -1.0])
    assert data.x.tolist() == [[3, -1], [6, -2]] and data.y.tolist() == [[1], [-1]]
    f = torch.linspace(-2, 2, 40001, dtype=torch.float64)
    assert float(((f - 1) ** 2 + (2 * f + 1) ** 2).min()) == pytest.approx(9 / 5)
    with pytest.raises(OptionError, match="zero"):
        unfittable([0.0, 0.0])
    with pytest.raises(ShapeError, match="one vector"):
        unfittable(torch.ones(2, 2))
    for make in (identical_inputs, random_targets):
        with pytest.raises(OptionError, match="n=0"):
            make(0)
