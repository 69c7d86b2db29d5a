"""Checks of the note on gated deep linear networks: gradient flow, its closed form, and the best loss.

The network is ŷ = (1/K) Σ_k g_k(x) w_k·x with loss ½⟨(y − ŷ)²⟩, as the note states it (equation 3). References are the
autograd gradient and Hessian of that loss, and least squares. Exclusive, redundant and evolving gates live in
`gate_patterns`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pathlens.papers.checks.networks import build, first_output, set_values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.flow import GDLN, Moments
from pathlens.theory.gates import exclusive, gate_table, random_half_spaces
from pathlens.theory.gatings import class_separation, gating_loss

ORDER = 1
K, N, ROWS, TAU = 4, 5, 60, 1.0
X = ref.draw(ROWS, N, seed=21)
LABEL = (X[:, 0].abs() > 0.6).double()
TARGET = X[:, 0].abs() + 0.3 * ref.draw(ROWS, seed=22)
START = ref.draw(K * N, seed=25)
W0 = START.numpy()
TIMES = (0.1, 1.0, 10.0, 300.0)
# gates on the rows: in general position; exclusive; the first two equal, and no other overlaps them
GENERAL = gate_table(random_half_spaces(K, N, seed=3), X.numpy())
EXCLUSIVE = gate_table(exclusive(ref.draw(K, N, seed=23).numpy()), X.numpy())
REDUNDANT = gate_table(exclusive(ref.draw(K - 1, N, seed=24).numpy()), X.numpy())[:, [0, 0, 1, 2]]


def loss_of(G: np.ndarray, mean: bool = True) -> Callable[[Tensor], Tensor]:
    """½⟨(y − ŷ)²⟩ of stacked weights (Kn,); `mean` is the factor 1/K of equation 3."""
    gates = torch.from_numpy(G)

    def loss(w: Tensor) -> Tensor:
        each = gates * (X @ w.reshape(G.shape[1], -1).T)
        return 0.5 * (TARGET - each.sum(1) / (G.shape[1] if mean else 1)).square().mean()

    return loss


def _gated(G: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x̃ = g(x) ⊗ x of every row, (n, Kd)."""
    return np.stack([np.kron(g, row) for g, row in zip(G, x)])


def moments_of(G: np.ndarray) -> Moments:
    return Moments.from_data(G, (X, TARGET), allow_dead=True)


# --- gradient flow -----------------------------------------------------------------------------------------------


def _package_output(G: np.ndarray, w: np.ndarray) -> Tensor:
    """The package's gated linear network with output weights 1/K."""
    table = torch.from_numpy(G)
    net = build("gdln", N, (K,), gates=lambda x: table)
    last = torch.full((1, K), 1 / K, dtype=torch.float64)
    return first_output(set_values(net, [torch.from_numpy(w.reshape(K, N)), last]), X)


@check("gdln.eq3", formula=_package_output, mutants={"without 1/K": K})
def equation3(formula: Formula) -> Comparisons:
    """equations 3 and 4: ŷ(x) = (1/K) Σ_k g_k(x) w_k·x, w_k the rows of W_1"""
    w = W0.reshape(K, N)
    yield formula(GENERAL, W0), [sum(g[k] * float(w[k] @ x) for k in range(K)) / K for g, x in zip(GENERAL, X.numpy())]


def _field_of_first(m: Moments, w: np.ndarray, over: float = K) -> np.ndarray:
    """τ ẇ_1, block by block: (1/K)[Σ^yx(p_1) − (1/K) Σ_k w_k Σ^xx(p_1, p_k)]."""
    return (m.b[:N] - sum(m.block(0, k) @ w[k * N : (k + 1) * N] for k in range(K)) / over) / K


@check("gdln.eq5", formula=_field_of_first, printed=lambda m, w: _field_of_first(m, w, over=1.0))
def equation5(formula: Formula) -> Comparisons:
    """equation 5: τ ẇ_1 = (1/K)[Σ^yx(p_1) − (1/K) Σ_k w_k Σ^xx(p_1, p_k)]

    Erratum: a factor 1/K is missing before the sum: the model has it, so its gradient has it twice
    """
    yield formula(moments_of(GENERAL), W0), -torch.func.grad(loss_of(GENERAL))(START)[:N]


@check(
    "gdln.eq6",
    formula=lambda G: (moments_of(G).A, moments_of(G).b),
    mutants={"gates not multiplied": lambda G: (moments_of(np.ones_like(G)).A, moments_of(G).b)},
)
def equation6(formula: Formula) -> Comparisons:
    """equations 6, 7 and 12: b_i = ⟨g_i y x⟩ and A_ij = ⟨g_i g_j x xᵀ⟩ are ⟨x̃y⟩ and ⟨x̃x̃ᵀ⟩, x̃ = g ⊗ x"""
    gated = _gated(GENERAL, X.numpy())
    yield from zip(formula(GENERAL), (gated.T @ gated / ROWS, gated.T @ TARGET.numpy() / ROWS))


@check(
    "gdln.eq8",
    formula=lambda m, w: (m.b - m.A @ w / K) / K,
    printed=lambda m, w: (m.b - m.A @ w) / K,
)
def equation8(formula: Formula) -> Comparisons:
    """equation 8: K τ ẇ = b − A w / K, all weights stacked

    Erratum: printed K τ ẇ = b − A w
    """
    yield formula(moments_of(GENERAL), W0), -torch.func.grad(loss_of(GENERAL))(START)


def relax(A: np.ndarray, end: np.ndarray, w0: np.ndarray, rate: float) -> np.ndarray:
    """P[e^{−rate·Λ}(Pᵀw(0) − u_∞) + u_∞] with A = PΛPᵀ and u_∞ = Λ⁻¹Pᵀ·end: relaxation of w(0) to A⁻¹·end."""
    values, P = np.linalg.eigh(A)
    limit = P.T @ end / values
    return P @ (np.exp(-rate * values) * (P.T @ w0 - limit) + limit)


def package_flow(G: np.ndarray, w0: np.ndarray, t: float, form: str = "primal") -> np.ndarray:
    net = GDLN.from_data(G, (X, TARGET), w0=w0.reshape(-1, N), form=form, allow_dead=True)
    return net.w(t).reshape(-1)


def _over_time(formula: Formula) -> Comparisons:
    flow = ref.affine_flow(loss_of(GENERAL), START)
    yield from ((formula(GENERAL, W0, t), flow(t)) for t in TIMES)


@check(
    "gdln.eq9",
    tolerance=1e-9,
    formula=package_flow,
    printed=lambda G, w0, t: relax(moments_of(G).A, moments_of(G).b, w0, t / (K * TAU)),
)
def equation9(formula: Formula) -> Comparisons:
    """equations 9 to 11: w(t) in closed form: modes decay as e^(−λt/(K²τ)) towards K A⁻¹b

    Erratum: printed with e^(−λt/(Kτ)) and A⁻¹b: the second 1/K is missing
    """
    yield from _over_time(formula)


def _signed_constant(values: np.ndarray, u0: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The solution at t = 0 when the constant is (u(0) − rest) itself."""
    return (u0 - rest) + rest


def _exponential_constant(values: np.ndarray, u0: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The same with Λ⁻¹e^C, the best real C: where a negative constant is needed, the nearest is zero."""
    return np.maximum(values * (u0 - rest), 0) / values + rest


@check("gdln.constant", formula=_signed_constant, printed=_exponential_constant)
def constant(formula: Formula) -> Comparisons:
    """equations 9 to 11 and 21 to 25: the constant of the solution is u(0) − K Λ⁻¹c, of either sign

    Erratum: printed as e^C 𝟙, which is positive: a component that starts below its limit has no such C
    """
    m = moments_of(GENERAL)
    values, P = np.linalg.eigh(m.A)
    u0, rest = P.T @ W0, K * (P.T @ m.b) / values
    yield formula(values, u0, rest), u0
    yield f"{int((u0 < rest).sum())} of {len(u0)} components need a negative constant"


def _least_squares(G: np.ndarray, w0: np.ndarray) -> np.ndarray:
    """K times the least-squares weights on x̃ that are nearest to w(0)/K."""
    features, start = _gated(G, X.numpy()), w0 / K
    return K * (start + np.linalg.lstsq(features, TARGET.numpy() - features @ start, rcond=1e-10)[0])


@check(
    "gdln.limit",
    tolerance=1e-9,
    formula=lambda G, w0: GDLN.from_data(G, (X, TARGET), w0=w0.reshape(K, N)).limit().reshape(-1),
    printed=1 / K,
)
def limit(formula: Formula) -> Comparisons:
    """after equation 11: w(∞) = K A⁻¹b: K times the least-squares weights

    Erratum: printed w(∞) = A⁻¹b, off by the factor K (error 1 − 1/K)
    """
    yield formula(GENERAL, W0), _least_squares(GENERAL, W0)


@check(
    "gdln.singular",
    tolerance=1e-8,
    formula=lambda G, w0: package_flow(G, w0, np.inf),
    mutants={
        "the null space forgotten": lambda G, w0: K * np.linalg.pinv(moments_of(G).A, rcond=1e-12) @ moments_of(G).b
    },
)
def singular(formula: Formula) -> Comparisons:
    """equations 9 to 11, A singular: w(∞) = K A⁺b + (I − A⁺A) w(0): the null space keeps w(0)"""
    A = moments_of(REDUNDANT).A
    yield formula(REDUNDANT, W0), _least_squares(REDUNDANT, W0)
    yield f"A of rank {np.linalg.matrix_rank(A)} of {len(A)}"


@check(
    "gdln.dual",
    tolerance=1e-9,
    formula=lambda G, w0, t: package_flow(G, w0, t, form="dual"),
    mutants={"one 1/K": lambda G, w0, t: package_flow(G, w0, K * t, form="dual")},
)
def dual(formula: Formula) -> Comparisons:
    """equations 9 to 11, dual form: ŷ(t) = y + e^(−tH/(NK²τ))(ŷ(0) − y), H = (GGᵀ) ∘ (XXᵀ)"""
    yield from _over_time(formula)


@check(
    "gdln.descent",
    tolerance=1e-10,
    formula=lambda net, k, step: net.iterate(k, step).reshape(-1),
    mutants={"the flow at time kη": lambda net, k, step: net.w(k * step).reshape(-1)},
)
def descent(formula: Formula) -> Comparisons:
    """equations 9 to 11, gradient descent: the k-th iterate in closed form: (1 − ηλ/(K²τ))^k in place of the
    exponential
    """
    net = GDLN.from_data(GENERAL, (X, TARGET), w0=W0.reshape(K, N))
    gradient, w = torch.func.grad(loss_of(GENERAL)), START
    for _ in range(50):
        w = w - 0.5 * gradient(w)
    yield formula(net, 50, 0.5), w


# --- the best loss -------------------------------------------------------------------------------------------------


@functools.cache
def _balanced() -> tuple[np.ndarray, tuple[Tensor, Tensor], float]:
    """Gates on rows with as many labels 1 as 0, those rows and labels, and the least ⟨(y − x̃·v)²⟩, by QR."""
    count = int(min(LABEL.sum(), (1 - LABEL).sum()))
    keep = torch.cat([torch.eq(LABEL, c).nonzero()[:count, 0] for c in (1.0, 0.0)])
    rows, y = X[keep], LABEL[keep]
    G = gate_table(random_half_spaces(3, N, seed=6), rows.numpy())
    Q, _ = np.linalg.qr(_gated(G, rows.numpy()))
    return G, (rows, y), float(np.mean((y.numpy() - Q @ (Q.T @ y.numpy())) ** 2))


@check(
    "gdln.eq13",
    tolerance=1e-10,
    formula=lambda G, data: [gating_loss(G, data), 0.5 - 0.5 * class_separation(G, data)],
    mutants={"¼ in place of ½": lambda G, data: [gating_loss(G, data), 0.5 - 0.25 * class_separation(G, data)]},
)
def equation13(formula: Formula) -> Comparisons:
    """equations 13 to 16: least loss ½ − bᵀA⁻¹b = ½ − ½ m₁ᵀ(⟨x̃x̃ᵀ⟩₁ + ⟨x̃x̃ᵀ⟩₀)⁻¹m₁, balanced labels 0, 1"""
    G, data, least = _balanced()
    yield formula(G, data), [least] * 2
    yield f"least loss {least:.4f}"


def _products_of_means(G: np.ndarray, data: tuple[Tensor, Tensor]) -> float:
    """Equation 18 as printed, with a pseudo-inverse, since its matrix has rank 2."""
    rows, y = (v.numpy() for v in data)
    features = _gated(G, rows)
    one, zero = features[y == 1].mean(0), features[y == 0].mean(0)
    return float(one @ np.linalg.pinv(np.outer(one, one) + np.outer(zero, zero), rcond=1e-10) @ one)


@check("gdln.eq18", tolerance=1e-9, formula=class_separation, printed=_products_of_means)
def equation18(formula: Formula) -> Comparisons:
    """equation 18: L* = m₁ᵀ(⟨x̃x̃ᵀ⟩₁ + ⟨x̃x̃ᵀ⟩₀)⁺m₁, with second moments of the classes

    Erratum: printed with products of class means: it is 1, and the loss 0, wherever these are independent
    """
    G, data, least = _balanced()
    expected = 1 - 2 * least
    yield formula(G, data), expected
    yield f"L* = {expected:.4f}; printed form {_products_of_means(G, data):.4f}"
