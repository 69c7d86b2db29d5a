"""Checks of the note on gated deep linear networks, for special gates: exclusive, redundant, and evolving ones."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from pathlens.papers.checks.gated_linear import (
    EXCLUSIVE,
    GENERAL,
    REDUNDANT,
    START,
    TARGET,
    TAU,
    TIMES,
    W0,
    K,
    N,
    X,
    loss_of,
    moments_of,
    package_flow,
    relax,
)
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.evolving import relu_flow
from pathlens.theory.flow import GDLN, Moments
from pathlens.theory.gates import gate_table, random_half_spaces, redundant

ORDER = 2

# --- exclusive gates -------------------------------------------------------------------------------------------------


def _first_block(G: np.ndarray, w0: np.ndarray, t: float, over: float = K) -> np.ndarray:
    """w_1(t) from A_11 and b_1 alone."""
    m = moments_of(G)
    return relax(m.block(0, 0), over * m.b[:N], w0[:N], t / (K * over * TAU))


@check(
    "gdln.eq19",
    tolerance=1e-9,
    formula=_first_block,
    printed=lambda G, w0, t: _first_block(G, w0, t, over=1.0),
    mutants={"overlapping gates": lambda G, w0, t: _first_block(GENERAL, w0, t)},
)
def equation19(formula: Formula) -> Comparisons:
    """equations 19 to 25: exclusive gates decouple: w_1(t) = P[e^(−Λt/(K²τ))(u_1(0) − KΛ⁻¹c_1) + KΛ⁻¹c_1]

    Erratum: rate and limit lack 1/K and K, as in equation 8
    """
    flow = ref.affine_flow(loss_of(EXCLUSIVE), START)
    for t in TIMES:
        yield formula(EXCLUSIVE, W0, t), flow(t)[:N]
        yield package_flow(EXCLUSIVE, W0, t, form="auto")[:N], flow(t)[:N]


@check(
    "gdln.eq26",
    tolerance=1e-9,
    formula=lambda G, k: GDLN.from_data(G, (X, TARGET)).limit()[k],
    printed=1 / K,
)
def equation26(formula: Formula) -> Comparisons:
    """equation 26: exclusive gates: w_k(∞) = K times least squares on the rows of gate k

    Erratum: printed without K, and with an exponential that is still there at t = ∞
    """
    for k in range(K):
        own = EXCLUSIVE[:, k] > 0
        yield formula(EXCLUSIVE, k), K * np.linalg.lstsq(X.numpy()[own], TARGET.numpy()[own], rcond=None)[0]


# --- redundant gates, in the convention of equation 8: ŷ = Σ_k g_k w_k·x, K absorbed into τ ---------------------------


def _pair(G: np.ndarray, w0: np.ndarray, t: float, apart: float = 1.0) -> np.ndarray:
    """(w_1, w_2) for g_1 = g_2: their mean relaxes at twice the rate of one gate, their difference 2Δ stays."""
    m = moments_of(G)
    mean, half = (w0[:N] + w0[N : 2 * N]) / 2, apart * (w0[:N] - w0[N : 2 * N]) / 2
    s = relax(m.block(0, 0), m.b[:N] / 2, mean, 2 * t / (K * TAU))
    return np.concatenate([s + half, s - half])


def _pair_as_printed(G: np.ndarray, w0: np.ndarray, t: float) -> np.ndarray:
    """Equations 31 and 32: half the solution for one gate, its constant fitting w_1(0); w_2 at a fixed distance."""
    m = moments_of(G)
    one = relax(m.block(0, 0), m.b[:N] / 2, w0[:N], t / (K * TAU))
    return np.concatenate([one, one - (w0[:N] - w0[N : 2 * N])])


def _package_pair(G: np.ndarray, w0: np.ndarray, t: float) -> np.ndarray:
    """The package's flow in the note's convention: K w and τ/K in place of w and τ."""
    net = GDLN.from_data(G, (X, TARGET), w0=K * w0.reshape(K, N), tau=TAU / K, form="primal")
    return net.w(t)[:2].reshape(-1) / K


def _mean_slope(m: Moments, w: np.ndarray, rate: float = 2.0) -> np.ndarray:
    """The slopes of the mean of w_1 and w_2 and of their difference."""
    return np.concatenate([(m.b[:N] - rate * m.block(0, 0) @ (w[:N] + w[N : 2 * N]) / 2) / K, np.zeros(N)])


@check("gdln.eq27", formula=_mean_slope, mutants={"rate of one gate": lambda m, w: _mean_slope(m, w, 1.0)})
def equation27(formula: Formula) -> Comparisons:
    """equations 27 to 30: g_1 = g_2, no other gate overlapping them: K τ ṡ = b_1 − 2 A_11 s for the mean s, and
    w_1 − w_2 stays
    """
    slope = -torch.func.grad(loss_of(REDUNDANT, mean=False))(START).numpy() / K
    one, two = slope[:N], slope[N : 2 * N]
    yield formula(moments_of(REDUNDANT), W0), np.concatenate([(one + two) / 2, one - two])


@check(
    "gdln.eq31",
    tolerance=1e-8,
    formula=_pair,
    printed=_pair_as_printed,
    mutants={"Δ dropped": lambda G, w0, t: _pair(G, w0, t, apart=0.0)},
)
def equation31(formula: Formula) -> Comparisons:
    """equations 31 and 32: w_1 = s + Δ, w_2 = s − Δ with s(t) relaxing at e^(−2Λt/(Kτ)) and Δ = (w_1(0) − w_2(0))/2

    Erratum: the rate lacks the 2 of equation 30, and ±Δ is missing from the limit
    """
    flow = ref.affine_flow(loss_of(REDUNDANT, mean=False), START, rate=1 / (K * TAU))  # K τ ẇ = b − A w
    printed = []
    for t in (0.5, 3.0, 30.0):
        expected = flow(t)[: 2 * N]
        yield formula(REDUNDANT, W0, t), expected
        yield _package_pair(REDUNDANT, W0, t), expected
        printed.append(ref.distance(_pair_as_printed(REDUNDANT, W0, t), expected))
    yield "printed form at t = 0.5, 3, 30: " + ", ".join(f"{e:.2f}" for e in printed)


def _copies(G: np.ndarray, w0: np.ndarray, t: float, r: int, speed: float | None = None) -> np.ndarray:
    """r equal gates: the mean relaxes r times as fast, deviations from it stay."""
    w, m = w0.reshape(r, N), moments_of(G)
    s = relax(m.block(0, 0), m.b[:N], w.mean(0), (r if speed is None else speed) * t / (r**2 * TAU))
    return (s + w - w.mean(0)).reshape(-1)


@check(
    "gdln.redundant",
    tolerance=1e-8,
    formula=_copies,
    mutants={"the speed of one gate": lambda G, w0, t, r: _copies(G, w0, t, r, 1.0)},
)
def copies(formula: Formula) -> Comparisons:
    """section 3.5, r copies: r equal gates: the mean moves r times as fast, the deviations from it stay"""
    for r in (2, 3):
        G = gate_table(redundant(random_half_spaces(1, N, seed=3), copies=r), X.numpy())
        w0 = ref.draw(r * N, seed=30 + r)
        flow = ref.affine_flow(loss_of(G), w0)
        for t in TIMES[:3]:
            yield formula(G, w0.numpy(), t, r), flow(t)
            yield package_flow(G, w0.numpy(), t, form="auto"), flow(t)


# --- gates that evolve ---------------------------------------------------------------------------------------------

_HORIZON = 20.0


@functools.cache
def _relu_descent(step: float) -> Tensor:
    """Gradient descent on ŷ = (1/K) Σ_k relu(w_k·x) to time `_HORIZON`, from `START`."""
    w = START
    gradient = torch.func.grad(lambda w: 0.5 * (TARGET - torch.relu(X @ w.reshape(K, N).T).mean(1)).square().mean())
    for _ in range(round(_HORIZON / step)):
        w = w - step * gradient(w)
    return w


@check(
    "gdln.evolving",
    tolerance=2e-3,
    formula=lambda w0: relu_flow((X, TARGET), w0, [_HORIZON], progress=False).weights[0],
    mutants={"gates as at the start": lambda w0: GDLN.from_data(X.numpy() @ w0.T > 0, (X, TARGET), w0=w0).w(_HORIZON)},
)
def evolving(formula: Formula) -> Comparisons:
    """sections 2.3 and 5: with gates that evolve the flow is a gated linear one between flips, and gradient descent
    tends to it as its step shrinks
    """
    found = formula(W0.reshape(K, N)).reshape(-1)
    yield found, _relu_descent(0.05)
    yield "; ".join(f"step {step}: {ref.distance(found, _relu_descent(step)):.1e}" for step in (0.2, 0.05))
