"""Checks of the note on gated deep linear networks: gradient flow, its closed form, and the best loss.

The network is ŷ = (1/K) Σ_k g_k(x) w_k·x with loss ½⟨(y − ŷ)²⟩, as the note states it (equation 3). References are the
autograd gradient and Hessian of that loss, and least squares. Exclusive, redundant and evolving gates live in
`gate_patterns`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import build, first_output, set_values
from pathlens.theory.flow import GDLN, Moments
from pathlens.theory.gates import exclusive, gate_table, random_half_spaces
from pathlens.theory.gatings import class_separation, gating_loss

K, N, ROWS, TAU = 4, 5, 60, 1.0
X = ref.draw(ROWS, N, seed=21)
LABEL = (X[:, 0].abs() > 0.6).double()
TARGET = X[:, 0].abs() + 0.3 * ref.draw(ROWS, seed=22)
TIMES = (0.1, 1.0, 10.0, 300.0)


def gates_on_rows(kind: str) -> np.ndarray:
    """Gates on the rows: in general position, exclusive, or the first two equal and no other overlapping them."""
    if kind == "general":
        return gate_table(random_half_spaces(K, N, seed=3), X.numpy())
    if kind == "exclusive":
        return gate_table(exclusive(ref.draw(K, N, seed=23).numpy()), X.numpy())
    pair = gate_table(exclusive(ref.draw(3, N, seed=24).numpy()), X.numpy())
    return np.concatenate([pair[:, :1], pair], axis=1)  # K = 4: g_1 = g_2, and two others that exclude them


def loss_of(G: np.ndarray, mean: bool = True) -> Callable[[Tensor], Tensor]:
    """½⟨(y − ŷ)²⟩ of stacked weights (Kn,); `mean` is the factor 1/K of equation 3."""
    gates = torch.from_numpy(G)

    def loss(w: Tensor) -> Tensor:
        each = gates * (X @ w.reshape(G.shape[1], -1).T)
        return 0.5 * (TARGET - each.sum(1) / (G.shape[1] if mean else 1)).square().mean()

    return loss


def start_weights(seed: int = 25) -> Tensor:
    return ref.draw(K * N, seed=seed)


def moments_of(G: np.ndarray) -> Moments:
    return Moments.from_data(G, (X, TARGET), allow_dead=True)


# --- gradient flow -----------------------------------------------------------------------------------------------


def _package_output(G: np.ndarray, w: np.ndarray, mean: bool = True) -> Tensor:
    """The package's gated linear network with output weights 1/K."""
    table = torch.from_numpy(G)
    net = build("gdln", N, (K,), gates=lambda x: table)
    set_values(
        net, [torch.from_numpy(w.reshape(K, N)), torch.full((1, K), 1 / K if mean else 1.0, dtype=torch.float64)]
    )
    return first_output(net, X)


@check(
    "gdln.eq3",
    "equations 3 and 4",
    "ŷ(x) = (1/K) Σ_k g_k(x) w_k·x, w_k the rows of W_1",
    tolerance=1e-12,
    formula=_package_output,
    mutants={"without 1/K": lambda G, w: _package_output(G, w, mean=False)},
)
def equation3(formula: Callable[..., Tensor]) -> float:
    G, w = gates_on_rows("general"), start_weights().numpy()
    rows = w.reshape(K, N)
    expected = [sum(G[s, k] * float(rows[k] @ X.numpy()[s]) for k in range(K)) / K for s in range(ROWS)]
    return ref.distance(formula(G, w), expected)


def _field_of_first(m: Moments, w: np.ndarray, over: float = K) -> np.ndarray:
    """τ ẇ_1, block by block: (1/K)[Σ^yx(p_1) − (1/K) Σ_k w_k Σ^xx(p_1, p_k)]."""
    return (m.b[:N] - sum(m.block(0, k) @ w[k * N : (k + 1) * N] for k in range(K)) / over) / K


@check(
    "gdln.eq5",
    "equation 5",
    "τ ẇ_1 = (1/K)[Σ^yx(p_1) − (1/K) Σ_k w_k Σ^xx(p_1, p_k)]",
    tolerance=1e-12,
    formula=_field_of_first,
    printed=lambda m, w: _field_of_first(m, w, over=1.0),
    erratum="a factor 1/K is missing before the sum: the model has it, so its gradient has it twice",
)
def equation5(formula: Callable[..., np.ndarray]) -> float:
    G, w = gates_on_rows("general"), start_weights()
    return ref.distance(formula(moments_of(G), w.numpy()), -torch.func.grad(loss_of(G))(w)[:N])


@check(
    "gdln.eq6",
    "equations 6, 7 and 12",
    "b_i = ⟨g_i y x⟩ and A_ij = ⟨g_i g_j x xᵀ⟩ are ⟨x̃y⟩ and ⟨x̃x̃ᵀ⟩, x̃ = g ⊗ x",
    tolerance=1e-12,
    formula=lambda G: (moments_of(G).A, moments_of(G).b),
    mutants={"gates not multiplied": lambda G: (moments_of(np.ones_like(G)).A, moments_of(G).b)},
)
def equation6(formula: Callable[..., tuple[Any, Any]]) -> float:
    G, x, y = gates_on_rows("general"), X.numpy(), TARGET.numpy()
    A = np.zeros((K, N, K, N))
    b = np.zeros((K, N))
    for s in range(ROWS):
        for i in range(K):
            b[i] += G[s, i] * y[s] * x[s] / ROWS
            for j in range(K):
                A[i, :, j] += G[s, i] * G[s, j] * np.outer(x[s], x[s]) / ROWS
    found = formula(G)
    return max(ref.distance(found[0], A.reshape(K * N, K * N)), ref.distance(found[1], b.reshape(-1)))


@check(
    "gdln.eq8",
    "equation 8",
    "K τ ẇ = b − A w / K, all weights stacked",
    tolerance=1e-12,
    formula=lambda m, w: (m.b - m.A @ w / K) / K,
    printed=lambda m, w: (m.b - m.A @ w) / K,
    erratum="printed K τ ẇ = b − A w",
)
def equation8(formula: Callable[..., np.ndarray]) -> float:
    G, w = gates_on_rows("general"), start_weights()
    return ref.distance(formula(moments_of(G), w.numpy()), -torch.func.grad(loss_of(G))(w))


def _printed_flow(A: np.ndarray, b: np.ndarray, w0: np.ndarray, t: float) -> np.ndarray:
    """P[e^{−tΛ/(Kτ)}(u(0) − Λ⁻¹c) + Λ⁻¹c]: the printed solution, with the constant that fits w(0)."""
    values, P = np.linalg.eigh(A)
    u0, c = P.T @ w0, P.T @ b
    return P @ (np.exp(-t * values / (K * TAU)) * (u0 - c / values) + c / values)


def package_flow(G: np.ndarray, w0: np.ndarray, t: float, form: str = "primal") -> np.ndarray:
    return GDLN.from_data(G, (X, TARGET), w0.reshape(K, N), form=form, allow_dead=True).w(t).reshape(-1)


def _worst_over_times(G: np.ndarray, formula: Callable[..., np.ndarray]) -> float:
    w0 = start_weights()
    flow = ref.affine_flow(loss_of(G), w0)
    return max(ref.distance(formula(G, w0.numpy(), t), flow(t)) for t in TIMES)


@check(
    "gdln.eq9",
    "equations 9 to 11",
    "w(t) in closed form: modes decay as e^(−λt/(K²τ)) towards K A⁻¹b",
    tolerance=1e-9,
    formula=package_flow,
    printed=lambda G, w0, t: _printed_flow(moments_of(G).A, moments_of(G).b, w0, t),
    erratum="printed with e^(−λt/(Kτ)) and A⁻¹b: the second 1/K is missing",
)
def equation9(formula: Callable[..., np.ndarray]) -> float:
    return _worst_over_times(gates_on_rows("general"), formula)


def _signed_constant(values: np.ndarray, u0: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """What is left at t = 0 when the constant is (u(0) − rest) itself."""
    return (u0 - rest) + rest


def _exponential_constant(values: np.ndarray, u0: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The same with Λ⁻¹e^C, the best real C: where a negative constant is needed, the nearest is zero."""
    return np.maximum(values * (u0 - rest), 0) / values + rest


@check(
    "gdln.constant",
    "equations 9 to 11 and 21 to 25",
    "the constant of the solution is u(0) − K Λ⁻¹c, of either sign",
    tolerance=1e-12,
    formula=_signed_constant,
    printed=_exponential_constant,
    erratum="printed as e^C 𝟙, which is positive: a component that starts below its limit has no such C",
)
def constant(formula: Callable[..., np.ndarray]) -> Measured:
    m, w0 = moments_of(gates_on_rows("general")), start_weights().numpy()
    values, P = np.linalg.eigh(m.A)
    u0, rest = P.T @ w0, K * (P.T @ m.b) / values
    return Measured(
        ref.distance(formula(values, u0, rest), u0),
        f"{int((u0 < rest).sum())} of {len(u0)} components need a negative constant",
    )


def _least_squares(G: np.ndarray, w0: np.ndarray) -> np.ndarray:
    """K times the least-squares weights on x̃ that are nearest to w(0)/K."""
    features = (G[:, :, None] * X.numpy()[:, None, :]).reshape(ROWS, -1)
    start = w0 / K
    return K * (start + np.linalg.lstsq(features, TARGET.numpy() - features @ start, rcond=1e-10)[0])


@check(
    "gdln.limit",
    "after equation 11",
    "w(∞) = K A⁻¹b: K times the least-squares weights",
    tolerance=1e-9,
    formula=lambda G, w0: GDLN.from_data(G, (X, TARGET), w0.reshape(K, N)).limit().reshape(-1),
    printed=lambda G, w0: np.linalg.solve(moments_of(G).A, moments_of(G).b),
    erratum="printed w(∞) = A⁻¹b, off by the factor K (error 1 − 1/K)",
)
def limit(formula: Callable[..., np.ndarray]) -> float:
    G, w0 = gates_on_rows("general"), start_weights().numpy()
    return ref.distance(formula(G, w0), _least_squares(G, w0))


@check(
    "gdln.singular",
    "equations 9 to 11, A singular",
    "w(∞) = K A⁺b + (I − A⁺A) w(0): the null space keeps w(0)",
    tolerance=1e-8,
    formula=lambda G, w0: GDLN.from_data(G, (X, TARGET), w0.reshape(K, N), form="primal").limit().reshape(-1),
    mutants={
        "the null space forgotten": lambda G, w0: K * np.linalg.pinv(moments_of(G).A, rcond=1e-12) @ moments_of(G).b
    },
)
def singular(formula: Callable[..., np.ndarray]) -> Measured:
    G, w0 = gates_on_rows("redundant"), start_weights().numpy()
    A = moments_of(G).A
    return Measured(
        ref.distance(formula(G, w0), _least_squares(G, w0)), f"A of rank {np.linalg.matrix_rank(A)} of {len(A)}"
    )


@check(
    "gdln.dual",
    "equations 9 to 11, dual form",
    "ŷ(t) = y + e^(−tH/(NK²τ))(ŷ(0) − y), H = (GGᵀ) ∘ (XXᵀ)",
    tolerance=1e-9,
    formula=lambda G, w0, t: package_flow(G, w0, t, form="dual"),
    mutants={"one 1/K": lambda G, w0, t: package_flow(G, w0, K * t, form="dual")},
)
def dual(formula: Callable[..., np.ndarray]) -> float:
    return _worst_over_times(gates_on_rows("general"), formula)


@check(
    "gdln.descent",
    "equations 9 to 11, gradient descent",
    "the k-th iterate in closed form: (1 − ηλ/(K²τ))^k in place of the exponential",
    tolerance=1e-10,
    formula=lambda net, k, step: net.iterate(k, step).reshape(-1),
    mutants={"the flow at time kη": lambda net, k, step: net.w(k * step).reshape(-1)},
)
def descent(formula: Callable[..., np.ndarray]) -> float:
    G, w = gates_on_rows("general"), start_weights()
    net = GDLN.from_data(G, (X, TARGET), w.numpy().reshape(K, N))
    gradient = torch.func.grad(loss_of(G))
    for _ in range(50):
        w = w - 0.5 * gradient(w)
    return ref.distance(formula(net, 50, 0.5), w)


# --- the best loss -------------------------------------------------------------------------------------------------


@functools.cache
def _balanced() -> tuple[Tensor, Tensor, np.ndarray]:
    """Rows with as many labels 1 as 0, and gates on them."""
    count = int(min(LABEL.sum(), (1 - LABEL).sum()))
    keep = torch.cat([torch.eq(LABEL, c).nonzero()[:count, 0] for c in (1.0, 0.0)])
    return X[keep], LABEL[keep], gate_table(random_half_spaces(3, N, seed=6), X[keep].numpy())


def _residual(rows: Tensor, y: Tensor, G: np.ndarray) -> float:
    """Least ⟨(y − x̃·v)²⟩, by QR."""
    features = (G[:, :, None] * rows.numpy()[:, None, :]).reshape(len(rows), -1)
    Q, _ = np.linalg.qr(features)
    return float(np.mean((y.numpy() - Q @ (Q.T @ y.numpy())) ** 2))


@check(
    "gdln.eq13",
    "equations 13 to 16",
    "least loss ½ − bᵀA⁻¹b = ½ − ½ m₁ᵀ(⟨x̃x̃ᵀ⟩₁ + ⟨x̃x̃ᵀ⟩₀)⁻¹m₁, balanced labels 0, 1",
    tolerance=1e-10,
    formula=lambda G, data: [gating_loss(G, data), 0.5 - 0.5 * class_separation(G, data)],
    mutants={"¼ in place of ½": lambda G, data: [gating_loss(G, data), 0.5 - 0.25 * class_separation(G, data)]},
)
def equation13(formula: Callable[..., list[float]]) -> Measured:
    rows, y, G = _balanced()
    expected = _residual(rows, y, G)
    return Measured(ref.distance(formula(G, (rows, y)), [expected] * 2), f"least loss {expected:.4f}")


def _products_of_means(G: np.ndarray, data: tuple[Tensor, Tensor]) -> float:
    """Equation 18 as printed, with a pseudo-inverse, since its matrix has rank 2."""
    rows, y = (v.numpy() for v in data)
    features = (G[:, :, None] * rows[:, None, :]).reshape(len(rows), -1)
    one, zero = features[y == 1].mean(0), features[y == 0].mean(0)
    return float(one @ np.linalg.pinv(np.outer(one, one) + np.outer(zero, zero), rcond=1e-10) @ one)


@check(
    "gdln.eq18",
    "equation 18",
    "L* = m₁ᵀ(⟨x̃x̃ᵀ⟩₁ + ⟨x̃x̃ᵀ⟩₀)⁺m₁, with second moments of the classes",
    tolerance=1e-9,
    formula=class_separation,
    printed=_products_of_means,
    erratum="printed with products of class means: it is 1, and the loss 0, wherever these are independent",
)
def equation18(formula: Callable[..., float]) -> Measured:
    rows, y, G = _balanced()
    expected = 1 - 2 * _residual(rows, y, G)
    printed = _products_of_means(G, (rows, y))
    return Measured(abs(formula(G, (rows, y)) / expected - 1), f"L* = {expected:.4f}; printed form {printed:.4f}")
