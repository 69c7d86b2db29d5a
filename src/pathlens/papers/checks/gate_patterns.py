"""Checks of the note on gated deep linear networks, for special gates: exclusive, redundant, and evolving ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.gated_linear import (
    ROWS,
    TARGET,
    TAU,
    TIMES,
    K,
    N,
    X,
    gates_on_rows,
    loss_of,
    moments_of,
    package_flow,
    start_weights,
)
from pathlens.papers.checks.registry import Measured, check
from pathlens.theory.evolving import relu_flow
from pathlens.theory.flow import GDLN
from pathlens.theory.gates import gate_table, random_half_spaces, redundant

# --- exclusive gates -------------------------------------------------------------------------------------------------


def _first_block(G: np.ndarray, w0: np.ndarray, t: float, over: float = K) -> np.ndarray:
    """w_1(t) from A_11 and b_1 alone."""
    m = moments_of(G)
    values, P = np.linalg.eigh(m.block(0, 0))
    u0, c = P.T @ w0[:N], P.T @ m.b[:N]
    end = over * c / values
    return P @ (np.exp(-values * t / (K * over * TAU)) * (u0 - end) + end)


@check(
    "gdln.eq19",
    "equations 19 to 25",
    "exclusive gates decouple: w_1(t) = P[e^(−Λt/(K²τ))(u_1(0) − KΛ⁻¹c_1) + KΛ⁻¹c_1]",
    tolerance=1e-9,
    formula=_first_block,
    printed=lambda G, w0, t: _first_block(G, w0, t, over=1.0),
    erratum="rate and limit lack 1/K and K, as in equation 8",
    mutants={"overlapping gates": lambda G, w0, t: _first_block(gates_on_rows("general"), w0, t)},
)
def equation19(formula: Callable[..., np.ndarray]) -> float:
    G, w0 = gates_on_rows("exclusive"), start_weights()
    flow = ref.affine_flow(loss_of(G), w0)
    package = GDLN.from_data(G, (X, TARGET), w0.numpy().reshape(K, N))
    return max(
        max(ref.distance(formula(G, w0.numpy(), t), flow(t)[:N]), ref.distance(package.w(t)[0], flow(t)[:N]))
        for t in TIMES
    )


@check(
    "gdln.eq26",
    "equation 26",
    "exclusive gates: w_k(∞) = K times least squares on the rows of gate k",
    tolerance=1e-9,
    formula=lambda G, k: GDLN.from_data(G, (X, TARGET)).limit()[k],
    printed=lambda G, k: np.linalg.solve(moments_of(G).block(k, k), moments_of(G).b[k * N : (k + 1) * N]),
    erratum="printed without K, and with an exponential that is still there at t = ∞",
)
def equation26(formula: Callable[..., np.ndarray]) -> float:
    G = gates_on_rows("exclusive")
    own = [np.linalg.lstsq(X.numpy()[G[:, k] > 0], TARGET.numpy()[G[:, k] > 0], rcond=None)[0] for k in range(K)]
    return max(ref.distance(formula(G, k), K * own[k]) for k in range(K))


# --- redundant gates, in the convention of equation 8: ŷ = Σ_k g_k w_k·x, K absorbed into τ ---------------------------


def _note_flow(G: np.ndarray, w0: Tensor) -> Callable[[float], np.ndarray]:
    """K τ ẇ = b − A w, by the matrix exponential."""
    return ref.affine_flow(loss_of(G, mean=False), w0, rate=1 / (K * TAU))


def _pair(G: np.ndarray, w0: np.ndarray, t: float, rate: float = 2.0, apart: float = 1.0) -> np.ndarray:
    """(w_1, w_2) for g_1 = g_2: their mean s relaxes at `rate`, their difference 2Δ stays."""
    m = moments_of(G)
    values, P = np.linalg.eigh(m.block(0, 0))
    mean, half = (w0[:N] + w0[N : 2 * N]) / 2, apart * (w0[:N] - w0[N : 2 * N]) / 2
    end = P.T @ m.b[:N] / values / 2
    s = P @ (np.exp(-rate * values * t / (K * TAU)) * (P.T @ mean - end) + end)
    return np.concatenate([s + half, s - half])


def _pair_as_printed(G: np.ndarray, w0: np.ndarray, t: float) -> np.ndarray:
    """Equations 31 and 32: half the solution for one gate, its constant fitting w_1(0); w_2 at a fixed distance."""
    m = moments_of(G)
    values, P = np.linalg.eigh(m.block(0, 0))
    end = P.T @ m.b[:N] / values / 2
    one = P @ (np.exp(-values * t / (K * TAU)) * (P.T @ w0[:N] - end) + end)
    return np.concatenate([one, one - (w0[:N] - w0[N : 2 * N])])


def _package_pair(G: np.ndarray, w0: np.ndarray, t: float) -> np.ndarray:
    """The package's flow in the note's convention: K w and τ/K in place of w and τ."""
    net = GDLN.from_data(G, (X, TARGET), K * w0.reshape(K, N), tau=TAU / K, form="primal")
    return net.w(t)[:2].reshape(-1) / K


@check(
    "gdln.eq27",
    "equations 27 to 30",
    "g_1 = g_2, no other gate overlapping them: K τ ṡ = b_1 − 2 A_11 s for the mean s, and w_1 − w_2 stays",
    tolerance=1e-12,
    formula=lambda m, w: np.concatenate([(m.b[:N] - 2 * m.block(0, 0) @ (w[:N] + w[N : 2 * N]) / 2) / K, np.zeros(N)]),
    mutants={
        "rate of one gate": lambda m, w: np.concatenate(
            [(m.b[:N] - m.block(0, 0) @ (w[:N] + w[N : 2 * N]) / 2) / K, np.zeros(N)]
        )
    },
)
def equation27(formula: Callable[..., np.ndarray]) -> float:
    G, w = gates_on_rows("redundant"), start_weights()
    slope = -torch.func.grad(loss_of(G, mean=False))(w).numpy() / K
    one, two = slope[:N], slope[N : 2 * N]
    return ref.distance(formula(moments_of(G), w.numpy()), np.concatenate([(one + two) / 2, one - two]))


@check(
    "gdln.eq31",
    "equations 31 and 32",
    "w_1 = s + Δ, w_2 = s − Δ with s(t) relaxing at e^(−2Λt/(Kτ)) and Δ = (w_1(0) − w_2(0))/2",
    tolerance=1e-8,
    formula=_pair,
    printed=_pair_as_printed,
    erratum="the rate lacks the 2 of equation 30, and ±Δ is missing from the limit",
    mutants={"Δ dropped": lambda G, w0, t: _pair(G, w0, t, apart=0.0)},
)
def equation31(formula: Callable[..., np.ndarray]) -> Measured:
    G, w0 = gates_on_rows("redundant"), start_weights()
    flow = _note_flow(G, w0)
    errors = [
        max(
            ref.distance(formula(G, w0.numpy(), t), flow(t)[: 2 * N]),
            ref.distance(_package_pair(G, w0.numpy(), t), flow(t)[: 2 * N]),
        )
        for t in (0.5, 3.0, 30.0)
    ]
    printed = [ref.distance(_pair_as_printed(G, w0.numpy(), t), flow(t)[: 2 * N]) for t in (0.5, 3.0, 30.0)]
    return Measured(max(errors), "printed form at t = 0.5, 3, 30: " + ", ".join(f"{e:.2f}" for e in printed))


def _copies(G: np.ndarray, w0: np.ndarray, t: float, r: int, speed: float | None = None) -> np.ndarray:
    """r equal gates: the mean relaxes r times as fast, deviations from it stay."""
    w = w0.reshape(r, N)
    values, P = np.linalg.eigh(X.numpy().T @ (X.numpy() * G[:, :1]) / ROWS)
    c = P.T @ (X.numpy().T @ (G[:, 0] * TARGET.numpy())) / ROWS
    end = c / values  # of the mean, in the convention ŷ = (1/K) Σ_k
    s = P @ (np.exp(-(r if speed is None else speed) * values * t / (r**2 * TAU)) * (P.T @ w.mean(0) - end) + end)
    return (s + w - w.mean(0)).reshape(-1)


@check(
    "gdln.redundant",
    "section 3.5, r copies",
    "r equal gates: the mean moves r times as fast, the deviations from it stay",
    tolerance=1e-8,
    formula=_copies,
    mutants={"the speed of one gate": lambda G, w0, t, r: _copies(G, w0, t, r, 1.0)},
)
def copies(formula: Callable[..., np.ndarray]) -> float:
    worst = 0.0
    for r in (2, 3):
        G = gate_table(redundant(random_half_spaces(1, N, seed=3), r), X.numpy())
        w0 = ref.draw(r * N, seed=30 + r)
        flow = ref.affine_flow(loss_of(G), w0)
        package = GDLN.from_data(G, (X, TARGET), w0.numpy().reshape(r, N))
        worst = max(
            worst,
            *(
                max(
                    ref.distance(formula(G, w0.numpy(), t, r), flow(t)), ref.distance(package.w(t).reshape(-1), flow(t))
                )
                for t in TIMES[:3]
            ),
        )
    return worst


# --- gates that evolve ---------------------------------------------------------------------------------------------

_HORIZON = 20.0


@functools.cache
def _relu_descent(step: float) -> Tensor:
    """Gradient descent on ŷ = (1/K) Σ_k relu(w_k·x) to time `_HORIZON`, from `_start`."""
    w = start_weights()
    gradient = torch.func.grad(lambda w: 0.5 * (TARGET - torch.relu(X @ w.reshape(K, N).T).mean(1)).square().mean())
    for _ in range(round(_HORIZON / step)):
        w = w - step * gradient(w)
    return w


def _gates_stay(w0: np.ndarray) -> np.ndarray:
    G = (X.numpy() @ w0.reshape(K, N).T > 0).astype(float)
    return package_flow(G, w0, _HORIZON)


@check(
    "gdln.evolving",
    "sections 2.3 and 5",
    "with gates that evolve the flow is a gated linear one between flips, and "
    "gradient descent tends to it as its step shrinks",
    tolerance=2e-3,
    formula=lambda w0: relu_flow((X, TARGET), w0.reshape(K, N), [_HORIZON], progress=False).weights[0].reshape(-1),
    mutants={"gates as at the start": _gates_stay},
)
def evolving(formula: Callable[..., np.ndarray]) -> Measured:
    found = formula(start_weights().numpy())
    errors = {step: ref.distance(found, _relu_descent(step)) for step in (0.2, 0.05)}
    return Measured(errors[0.05], "; ".join(f"step {k}: {e:.1e}" for k, e in errors.items()))
