"""Closed-form flows against numerical integration and gradient descent, for every kind of gates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from pathlens import models, theory
from pathlens.data import NLGP, SinglePulse, nlgp
from pathlens.errors import DivergedError, LabelError, NotFiniteError, OptionError, PathlensError, ShapeError


def sample(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.standard_normal(n)


def gradient(w: np.ndarray, g: np.ndarray, x: np.ndarray, y: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Of ½ Σ p (y − ŷ)², written out row by row."""
    K = g.shape[1]
    total = np.zeros_like(w)
    for gs, xs, ys, ps in zip(g, x, y, p):
        error = (gs @ (w @ xs)) / K - ys
        total += ps * error * np.outer(gs, xs) / K
    return total


def moments_gradient(m: theory.Moments) -> object:
    """The same gradient as a function of the flat weights, from A and b by finite sums."""
    return lambda t, w: m.b / m.K - m.A @ w / m.K**2


def gates_of(kind: str, d: int) -> theory.Gates:
    rng = np.random.default_rng(7)
    if kind == "general":
        return theory.random_half_spaces(4, d, seed=1)
    if kind == "single":
        return theory.single(rng.standard_normal(d))
    if kind == "exclusive":
        return theory.exclusive(rng.standard_normal((3, d)))
    return theory.redundant(theory.random_half_spaces(2, d, seed=2), copies=3)


KINDS = ("general", "single", "exclusive", "redundant")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_the_flow_is_the_solution_of_the_gradient_equation(kind: str, form: str) -> None:
    x, y = sample(30, 5)
    gates = gates_of(kind, 5)
    g = gates(x)
    w0 = np.random.default_rng(3).standard_normal((g.shape[1], 5))
    tau = 0.7
    net = theory.GDLN.from_data(gates, (x, y), w0=w0, tau=tau, form=form)
    p = np.full(30, 1 / 30)
    for t in (0.1, 3.0, 100.0):
        found = solve_ivp(
            lambda _, w: -gradient(w.reshape(w0.shape), g, x, y, p).reshape(-1) / tau,
            (0, t),
            w0.reshape(-1),
            method="DOP853",
            rtol=1e-12,
            atol=1e-13,
        ).y[:, -1]
        assert np.abs(net.w(t).reshape(-1) - found).max() <= 1e-10
        error = (g * (x @ net.w(t).T)).sum(1) / g.shape[1] - y
        assert net.loss(t) == pytest.approx(0.5 * np.mean(error**2), rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_descent_iterates_are_exact_and_approach_the_flow(kind: str) -> None:
    x, y = sample(40, 4)
    gates = gates_of(kind, 4)
    g, p = gates(x), np.full(40, 1 / 40)
    net = theory.GDLN.from_data(gates, (x, y), w0=np.ones((g.shape[1], 4)))
    errors = []
    for step in (0.1, 0.01):
        w = net.w0.copy()
        for _ in range(round(1 / step)):
            w -= step * gradient(w, g, x, y, p)
        assert np.abs(net.iterate(round(1 / step), step) - w).max() <= 1e-12
        errors.append(np.abs(w - net.w(1.0)).max())
    assert errors[1] < 1e-2 and 5 < errors[0] / errors[1] < 20  # proportional to the step


def test_iterates_beyond_the_monotone_step() -> None:
    x, y = sample(40, 3)
    gates = theory.random_half_spaces(2, 3)
    net = theory.GDLN.from_data(gates, (x, y))
    step = 0.9 * net.largest_step
    w = net.w0.copy()
    for _ in range(25):
        w -= step * gradient(w, gates(x), x, y, np.full(40, 1 / 40))
    assert np.abs(net.iterate(25, step) - w).max() <= 1e-12
    with pytest.raises(DivergedError, match="Take a step below"):
        net.iterate(3, 1.01 * net.largest_step)


def test_singular_moments_keep_what_the_data_do_not_see() -> None:
    """Fewer rows than weights, a coordinate that is always zero, redundant gates."""
    x, y = sample(12, 6)
    x[:, 2] = 0
    gates = theory.redundant(theory.random_half_spaces(2, 6, seed=0), copies=2)
    w0 = np.random.default_rng(0).standard_normal((4, 6))
    primal, dual = (theory.GDLN.from_data(gates, (x, y), w0=w0, form=f) for f in ("primal", "dual"))
    assert len(primal.eigenvalues) < 24
    m = theory.Moments.from_data(gates, (x, y))
    plus = np.linalg.pinv(m.A, rcond=1e-11, hermitian=True)
    limit = 4 * plus @ m.b + (np.eye(24) - plus @ m.A) @ w0.reshape(-1)
    for net in (primal, dual):
        assert np.abs(net.limit().reshape(-1) - limit).max() < 1e-9
        assert np.abs(net.w(1e12) - net.limit()).max() < 1e-9  # rounding does not grow with t
        assert np.allclose(net.w(50.0)[:, 2], w0[:, 2], atol=1e-12)
    assert np.abs(primal.w(1e6) - dual.w(1e6)).max() < 1e-9


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 25), st.integers(1, 4), st.integers(1, 3), st.floats(0, 1e4))
def test_dual_and_primal_agree(n: int, d: int, K: int, t: float) -> None:
    x, y = sample(n, d, seed=n)
    p = np.random.default_rng(n).random(n) + 0.1
    g = np.random.default_rng(d).random((n, K))  # gates between 0 and 1 are allowed in a table
    w0 = np.random.default_rng(K).standard_normal((K, d))
    a, b = (theory.GDLN.from_data(g, (x, y, p / p.sum()), w0=w0, form=f) for f in ("primal", "dual"))
    scale = 1 + np.abs(a.w(t)).max()
    assert np.abs(a.w(t) - b.w(t)).max() < 1e-6 * scale
    assert a.loss(t) == pytest.approx(b.loss(t), abs=1e-8)
    size = min(len(a.eigenvalues), len(b.eigenvalues))
    assert np.allclose(a.eigenvalues[-size:], b.eigenvalues[-size:], rtol=1e-9, atol=1e-12 * a.eigenvalues[-1])


def test_exclusive_gates_decouple_into_regressions() -> None:
    x, y = sample(90, 3)
    gates = gates_of("exclusive", 3)
    g = gates(x)
    assert (g.sum(1) == 1).all()
    limit = theory.GDLN.from_data(gates, (x, y)).limit()
    for k in range(3):
        rows = g[:, k] == 1
        assert np.allclose(limit[k], 3 * np.linalg.lstsq(x[rows], y[rows])[0], atol=1e-12)
    m = theory.Moments.from_data(gates, (x, y))
    assert not m.block(0, 1).any() and not m.block(2, 0).any()


def test_redundant_gates_move_together_r_times_as_fast() -> None:
    """Copies keep their differences; their mean follows the flow of r A_11 (the corrected eq. 31 and 32)."""
    x, y = sample(50, 3)
    one = theory.single([1.0, 0.5, 0.0])
    copies = 3
    w0 = np.random.default_rng(1).standard_normal((copies, 3))
    net = theory.GDLN.from_data(theory.redundant(one, copies=copies), (x, y), w0=w0)
    A, b = theory.Moments.from_data(one, (x, y)).A, theory.Moments.from_data(one, (x, y)).b
    values, P = np.linalg.eigh(A)
    for t in (0.5, 3.0, 30.0):
        w = net.w(t)
        assert np.allclose(w - w.mean(0), w0 - w0.mean(0), atol=1e-12)
        target = P.T @ b * (copies / copies) / values  # s(∞) = (K/r) A⁺b with K = r copies
        decay = np.exp(-copies * values * t / copies**2)
        mean = P @ (decay * (P.T @ w0.mean(0)) + (1 - decay) * target)
        assert np.allclose(w.mean(0), mean, atol=1e-12)


def test_exact_moments_of_the_single_pulse_are_its_enumeration() -> None:
    sampler = SinglePulse(d=12, xi1=(0.25, 0.5), xi2=(0.0, 0.25), support=(-1.0, 1.0))
    m = theory.Moments.from_data(theory.single(), sampler)
    assert np.allclose(m.A, sampler.second_moment().numpy(), atol=1e-12)
    x, y, p = sampler.enumerate()
    assert m.square == pytest.approx(float((p * y[:, 0].double() ** 2).sum()))
    net = theory.GDLN.from_data(theory.random_half_spaces(3, 12), sampler)
    again = theory.GDLN.from_data(theory.random_half_spaces(3, 12), (x, y, p))
    assert np.array_equal(net.w(2.0), again.w(2.0))


@pytest.mark.parametrize("convention", ["lufkin", "ingrosso-goldt"])
@pytest.mark.parametrize("labels", ["01", "pm1"])
def test_exact_moments_of_the_nlgp_are_those_of_a_large_sample(convention: str, labels: str) -> None:
    import torch

    sampler = NLGP(d=6, xi=(2.0, 0.8), gain=1.3, convention=convention, labels=labels, dtype=torch.float64)  # type: ignore[arg-type]
    exact = theory.nlgp_moments(sampler, ["open", "+", "-", "+"], coordinate=2)
    n = 200_000
    x, y = (t.numpy() for t in sampler.sample(n, torch.Generator().manual_seed(0)))
    g = np.stack([np.ones(n), x[:, 2] > 0, x[:, 2] < 0, x[:, 2] > 0], 1)
    drawn = theory.Moments.from_data(g, (x, y))
    assert np.abs(exact.A - drawn.A).max() < 6 / math.sqrt(n) and np.abs(exact.b - drawn.b).max() < 5 / math.sqrt(n)
    assert np.abs(exact.b).max() > 0.05 and exact.square == pytest.approx(drawn.square)
    assert np.isfinite(theory.GDLN(exact).limit()).all()


def test_gates_of_a_trained_network() -> None:
    data = nlgp(n=40, d=8)
    net = models.relu(8, hidden=(5,), seed=0)
    x = data.x.double().numpy()
    bits = (x @ net.state_dict()["values.linear1.weight"].double().numpy().T > 0).astype(float)
    assert np.array_equal(theory.gate_table(net, x), bits)
    assert theory.GDLN.from_data(net, data).K == 5
    with pytest.raises(OptionError, match="one hidden layer"):
        theory.gate_table(models.relu(8, hidden=(5, 5)), x)


def bad_calls() -> dict[str, tuple[type[Exception], object]]:
    x, y = sample(6, 2)
    open_gate = theory.single()
    net = theory.GDLN.from_data(open_gate, (x, y))
    never = theory.half_spaces([[1.0, 0.0]], offsets=[1e9])
    return {
        "gate that never fires": (OptionError, lambda: theory.GDLN.from_data(never, (x, y))),
        "negative time": (OptionError, lambda: net.w(-1.0)),
        "NaN time": (OptionError, lambda: net.loss(float("nan"))),
        "tau": (OptionError, lambda: theory.GDLN.from_data(open_gate, (x, y), tau=0.0)),
        "rows": (ShapeError, lambda: theory.GDLN.from_data(open_gate, (x, y[:5]))),
        "gates for other rows": (ShapeError, lambda: theory.GDLN.from_data(np.ones((5, 1)), (x, y))),
        "w0": (ShapeError, lambda: theory.GDLN.from_data(open_gate, (x, y), w0=np.zeros((2, 2)))),
        "NaN rows": (NotFiniteError, lambda: theory.GDLN.from_data(open_gate, (x * np.nan, y))),
        "weights": (OptionError, lambda: theory.GDLN.from_data(open_gate, (x, y, np.ones(6)))),
        "NLGP sampler": (OptionError, lambda: theory.GDLN.from_data(open_gate, NLGP())),
        "negative xi": (OptionError, lambda: theory.nlgp_moments(NLGP(xi=(-1.0, 1.0)), ["+"])),
        "gain 0": (OptionError, lambda: theory.nlgp_moments(NLGP(gain=0.0), ["+"])),
        "units": (OptionError, lambda: theory.nlgp_moments(NLGP(), ["up"])),
        "coordinate": (OptionError, lambda: theory.nlgp_moments(NLGP(), ["+"], coordinate=40)),
        "form": (OptionError, lambda: theory.GDLN.from_data(open_gate, (x, y), form="both")),
        "A": (OptionError, lambda: theory.Moments(np.array([[1.0, 2.0], [0.0, 1.0]]), np.zeros(2), 1.0, 1)),
        "b": (ShapeError, lambda: theory.Moments(np.eye(3), np.zeros(3), 1.0, 2)),
        "nothing": (OptionError, lambda: theory.GDLN()),
        "steps": (OptionError, lambda: net.iterate(-1, 0.1)),
        "step": (OptionError, lambda: net.iterate(1, 0.0)),
        "edges": (OptionError, lambda: theory.tiling([1.0], [1.0, 0.0])),
        "no half-spaces": (OptionError, lambda: theory.random_half_spaces(0, 2)),
        "other inputs": (
            ShapeError,
            lambda: theory.GDLN.from_data(theory.random_half_spaces(2, x.shape[1] + 1), (x, y)),
        ),
        "copies": (OptionError, lambda: theory.redundant(open_gate, copies=0)),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input(name: str) -> None:
    kind, call = bad_calls()[name]
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    assert isinstance(caught.value, PathlensError)


def test_a_torch_dataset_is_read_like_its_arrays() -> None:
    import torch

    x, y = sample(6, 2)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    found, want = (theory.GDLN.from_data(theory.single(), data).limit() for data in (dataset, (x, y)))
    assert np.array_equal(found, want)


def test_class_labels_are_refused() -> None:
    import torch

    from pathlens.data import DataSet

    data = DataSet(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), task="classification", classes=2)
    with pytest.raises(LabelError):
        theory.GDLN.from_data(theory.single(), data)


def test_dead_gates_may_be_kept() -> None:
    x, y = sample(6, 2)
    g = np.column_stack([np.ones(6), np.zeros(6)])
    net = theory.GDLN.from_data(g, (x, y), w0=np.ones((2, 2)), allow_dead=True)
    assert np.array_equal(net.limit()[1], np.ones(2))
