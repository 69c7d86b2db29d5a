"""Exact ReLU flow against analytic solutions and gradient descent; roots; switching instants."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pathlens as pl
from pathlens import theory
from pathlens.errors import OptionError, PathlensWarning, RecordError, ShapeError
from pathlens.theory import evolving
from pathlens.theory.roots import first_violation


def descend(x: np.ndarray, y: np.ndarray, w0: np.ndarray, step: float, until: float) -> np.ndarray:
    w, K, n = w0.copy(), len(w0), len(x)
    for _ in range(round(until / step)):
        h = x @ w.T
        error = np.maximum(h, 0).sum(1) / K - y
        w -= step / (K * n) * ((h > 0) * error[:, None]).T @ x
    return w


def problem(n: int = 30, d: int = 6, K: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.standard_normal(n), rng.standard_normal((K, d))


# --- the flow --------------------------------------------------------------------------------------------------


def test_a_slide_that_can_be_worked_out_by_hand() -> None:
    """One unit, two rows: row 0 (target −1) holds w at w_1 = 0, while row 1 pulls along the boundary."""
    a, b = 0.6, 1.1
    x, y = np.array([[1.0, 0.0], [a, b]]), np.array([-1.0, 1.0])
    w0 = np.array([[-0.1, 0.3]])
    c, u0 = a * a + b * b, -0.1 * a + 0.3 * b
    s = 0.1 / a  # how far along (a, b) until w_1 = 0
    enters = -2 / c * math.log(1 - c * s / (1 - u0))
    times = np.array([0.0, enters / 2, enters + 1.0, enters + 50.0])
    flow = theory.relu_flow((x, y), w0, times)
    assert [e[1:] for e in flow.events.tolist()] == [(0, 0, theory.OFF, theory.SLIDING)]
    assert flow.events["time"][0] == pytest.approx(enters, abs=1e-13)
    before = w0[0] + (1 - u0) / c * (1 - math.exp(-c * enters / 4)) * np.array([a, b])
    assert np.allclose(flow.weights[1], before, atol=1e-14)
    start = 0.3 + s * b
    for w, t in zip(flow.weights[2:], times[2:]):
        along = 1 / b + (start - 1 / b) * math.exp(-b * b * (t - enters) / 2)
        assert np.allclose(w, [[0.0, along]], atol=1e-13)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_gradient_descent_converges_to_it_in_proportion_to_the_step(seed: int) -> None:
    x, y, w0 = problem(seed=seed)
    flow = theory.relu_flow((x, y), w0, [0.0, 10.0, 40.0], progress=False)
    assert len(flow.flips) > 5 and len(flow.slides) > 0 and flow.fallbacks == 0
    errors = [np.abs(descend(x, y, w0, step, 40.0) - flow.weights[-1]).max() for step in (0.1, 0.01)]
    assert errors[1] < 5e-3 and errors[0] / errors[1] > 3


def test_without_events_it_is_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    x, w0 = rng.random((20, 4)) + 0.1, rng.random((3, 4)) + 0.5
    y = x @ np.ones(4) * 0.7 + 0.1 * rng.standard_normal(20)
    times = np.array([0.0, 0.3, 2.0])
    flow = theory.relu_flow((x, y), w0, times, tau=2.0)
    assert len(flow.events) == 0
    closed = theory.GDLN.from_data(np.ones((20, 3)), (x, y), w0=w0, tau=2.0)
    assert np.allclose(flow.weights, closed.w(times), atol=1e-13)


def test_events_retrace_the_gates() -> None:
    x, y, w0 = problem()
    flow = theory.relu_flow((x, y), w0, np.linspace(0, 40, 9), progress=False)
    for t, w in zip(flow.times, flow.weights):
        state, h = flow.state_at(t), x @ w.T
        assert ((h > 1e-12) == (state == theory.ON))[state != theory.SLIDING].all()
        assert np.abs(h[state == theory.SLIDING]).max(initial=0) < 1e-13
    assert np.array_equal(flow.state_at(40.0), flow.state)
    state = flow.start.copy()
    for e in flow.events:  # each event starts from the state that the one before left
        assert state[e["row"], e["unit"]] == e["before"] != e["after"]
        state[e["row"], e["unit"]] = e["after"]
    loss = flow.loss()
    assert (np.diff(loss) < 0).all()
    assert flow.flipped_share()[0] == 0 < flow.flipped_share()[-1]


def test_weighted_and_repeated_rows_are_the_same_flow() -> None:
    x, y, w0 = problem(12)
    twice = (np.vstack([x, x]), np.concatenate([y - 0.5, y + 0.5]))
    one = theory.relu_flow((x, y, np.full(12, 1 / 12)), w0, 20.0)
    two = theory.relu_flow(twice, w0, 20.0)
    assert np.allclose(one.weights, two.weights, atol=1e-12)
    assert np.array_equal(two.state, np.vstack([one.state, one.state])) and len(two.events) == 2 * len(one.events)


@pytest.mark.parametrize("seed", range(4))
def test_rows_on_one_line_share_their_boundary(seed: int) -> None:
    """Rows that are multiples of each other, of both signs, and a row of zeros."""
    x, y, w0 = problem(10, 3, 2, seed)
    rng = np.random.default_rng(seed)
    x = np.vstack([x, -x, 0.5 * x[:4], -2 * x[2:5], np.zeros((1, 3))])
    y = rng.standard_normal(len(x))
    flow = theory.relu_flow((x, y), w0, 20.0, progress=False)
    assert flow.fallbacks == 0 and (flow.state[:10] == theory.SLIDING).any() | (len(flow.slides) > 0)
    errors = [np.abs(flow.weights[-1] - descend(x, y, w0, step, 20.0)).max() for step in (1e-2, 1e-3)]
    assert errors[1] < 2e-3 and errors[0] / errors[1] > 3


def test_a_flow_that_is_stuck_takes_plain_steps_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, w0 = problem()
    monkeypatch.setattr(evolving, "_AT_ONCE", -1)  # every event counts as stuck
    with pytest.warns(PathlensWarning, match="plain gradient steps"):
        flow = theory.relu_flow((x, y), w0, 5.0, fallback=1e-3)
    assert flow.fallbacks > 0
    assert np.abs(flow.weights[-1] - descend(x, y, w0, 1e-3, 5.0)).max() < 1e-2


def test_bad_calls() -> None:
    x, y, w0 = problem(6, 2, 2)
    for times in (-1.0, [1.0, 1.0], [2.0, 1.0], float("inf"), []):
        with pytest.raises(OptionError):
            theory.relu_flow((x, y), w0, times)
    with pytest.raises(ShapeError):
        theory.relu_flow((x, y), w0[:, :1], 1.0)
    with pytest.raises(OptionError):
        theory.relu_flow((x, y), w0, 1.0, tau=-1.0)
    with pytest.raises(OptionError):
        theory.relu_flow((x, y), w0, 1.0, fallback=0.0)


def test_it_reports_and_draws() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    x, y, w0 = problem(10)
    flow = theory.relu_flow((x, y), w0, np.linspace(0, 5, 5))
    assert "flips" in repr(flow)
    assert flow.plot().get_xlabel() == "time t"


# --- roots -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 199), min_size=1, max_size=5, unique=True), min_size=1, max_size=4))
def test_the_first_root_of_polynomials_with_known_roots(hundredths: list[list[int]]) -> None:
    """Simple roots at least a hundredth apart, on both sides of the end of the interval."""
    c = np.zeros((len(hundredths), 7))
    for row, roots in zip(c, hundredths):
        poly = np.polynomial.polynomial.polyfromroots(np.array(roots) / 100)
        row[: len(poly)] = poly * np.sign(poly[0])
    s, which = first_violation(c)
    first = min(min(roots) for roots in hundredths)
    if first < 100:
        assert s == pytest.approx(first / 100, abs=1e-9) and min(hundredths[which]) == first
    elif first > 100:
        assert which == -1


def test_a_polynomial_that_starts_downwards_violates_at_once() -> None:
    c = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 5.0], [0.0, 0.0, 1.0]])
    assert first_violation(c) == (0.0, 1)
    assert first_violation(c[::2]) == (1.0, -1)


# --- switching instants ----------------------------------------------------------------------------------------


def test_switching_instants_of_a_flow_are_where_bits_change() -> None:
    x, y, w0 = problem()
    flow = theory.relu_flow((x, y), w0, 30.0, progress=False)
    found = theory.switching_instants(flow)
    assert found.exact and found.instants[0] == 0 and (np.diff(found.instants) > 0).all()
    for T, changed in zip(found.instants[1:6], found.changed[1:6]):
        before, after = (flow.state_at(t) == theory.ON for t in (T - 1e-9, T + 1e-9))
        assert (before != after).sum() == changed > 0


def test_switching_instants_of_a_training_run_are_sampled() -> None:
    data = pl.data.nlgp(n=30, d=8, seed=0)
    net = pl.models.relu(8, hidden=(4,), seed=0)
    keep = pl.training.Keep([0, 6, 12], X=data.x)
    run = pl.train(net, data, epochs=12, lr=0.05, keep=keep, progress=False)
    found = theory.switching_instants(run)
    bits = [m.record.bits["relu1@0"].numpy() for m in run.moments]
    assert not found.exact and found.gates == 120
    assert found.changed[1:].tolist() == [int((a != b).sum()) for a, b in itertools.pairwise(bits)]
    with pytest.raises(RecordError, match="keep=Keep"):
        theory.switching_instants(pl.train(net, data, epochs=1, progress=False))
