"""Checks of 'Neural path features and neural path kernel': features, values, their kernels and their dynamics.

Limits of infinite width live in `infinite`. The loss is ½Σ(ŷ − y)², as in that paper.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths
from pathlens.models import GatedNetwork
from pathlens.papers.checks.networks import build, first_output, gate_layers, set_values, values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.deep_gated import path_table, rho_bound

ORDER = 1
X = ref.draw(4, 2, seed=7)
Y = ref.draw(4, seed=8)
HIDDEN = (3, 3)


def _half_square(f: Tensor) -> Tensor:
    return 0.5 * (f - Y).square().sum()


def _relu(U: list[Tensor]) -> Tensor:
    """Outputs of a ReLU network on X."""
    return ref.relu_output(U, X)


def _features(U: list[Tensor]) -> Tensor:
    """Φᵀ of a ReLU network, (n, P)."""
    return ref.path_features(U, ref.hard_gates(U[:-1], X), X)


def _value_kernel(U: list[Tensor]) -> Tensor:
    """V_Θ: inner products of the gradients of the path values, (P, P)."""
    return ref.tangent_kernel(ref.path_values, U)


def _ntk(net: GatedNetwork) -> Tensor:
    return kernels.ntk(net, X).dense()


# --- outputs and kernels -------------------------------------------------------------------------------------------


@check("npf.prop1.1", formula=lambda net, e: -(_ntk(net) @ e), mutants={"−2K e": 2})
def proposition1_1(formula: Formula) -> Comparisons:
    """Proposition 1.1: gradient flow on ½Σ(ŷ − y)² moves the error by ė = −K e"""
    net = build("relu", 2, HIDDEN)
    U = values(net)
    yield formula(net, _relu(U) - Y), ref.gradient_step(_relu, _half_square, U)


def _listed(net: GatedNetwork, X: Tensor) -> list[Any]:
    table = path_table(net, X)
    return [*_contributions(net, X), table.features, table.outputs]


def _contributions(net: GatedNetwork, X: Tensor, include_inputs: bool = True) -> list[Tensor]:
    """ŷ, and the contribution of every active path, in ascending order."""
    count = 2 * 3 * 3 if include_inputs else 3 * 3
    found = paths.top(net, X, k=count, include_inputs=include_inputs).contributions
    return [first_output(net, X), torch.nn.functional.pad(found, (0, 18 - count)).sort(1).values]


@check(
    "npf.prop2.1",
    formula=_listed,
    mutants={
        "paths without their input node": lambda net, X: _contributions(net, X, include_inputs=False),
        "doubled": 2,
    },
)
def proposition2_1(formula: Formula) -> Comparisons:
    """Proposition 2.1, equation 1: ŷ(x) = ⟨φ_x, v⟩ = Σ_p x(I_0(p)) A(x, p) v(p), path by path"""
    net = build("relu", 2, HIDDEN, seed=3)
    U = values(net)
    each = _features(U) * ref.path_values(U)
    yield from zip(formula(net, X), [each.sum(1), each.sort(1).values, _features(U), each.sum(1)])


def _counted(net: GatedNetwork, X: Tensor, divide: float = 2.0) -> list[Tensor]:
    """H, and Λ as the number of paths with their input node, divided by d_in."""
    return [kernels.npk(net, X).dense(), kernels.overlap(net, X, include_inputs=True).dense() / divide]


@check("npf.lemma2.1", formula=_counted, mutants={"Λ not divided by d_in": lambda net, X: _counted(net, X, 1.0)})
def lemma2_1(formula: Formula) -> Comparisons:
    """Lemma 2.1, Definition 2.2: H = ΦᵀΦ = Σ ∘ Λ, Λ the number of shared active paths over d_in"""
    net = build("relu", 2, HIDDEN, seed=3)
    phi = _features(values(net))
    active = (phi != 0).double()
    yield from zip(formula(net, X), [phi @ phi.T, active @ active.T / 2])


@check(
    "npf.prop3.1",
    formula=lambda net: [_ntk(net), path_table(net, X).gram],
    mutants={"V = identity": lambda net: [kernels.npk(net, X).dense()]},
)
def proposition3_1(formula: Formula) -> Comparisons:
    """Proposition 3.1: K = Φᵀ V Φ with the value tangent kernel V"""
    net = build("relu", 2, HIDDEN)
    phi = _features(values(net))
    K = phi @ _value_kernel(values(net)) @ phi.T
    yield from ((found, K) for found in formula(net))


def _two_kernels(relu: GatedNetwork, dln: GatedNetwork) -> list[Any]:
    """Both tangent kernels, and both value tangent kernels."""
    return [_ntk(relu), _ntk(dln), *(path_table(net, X).value_tangent_kernel for net in (relu, dln))]


@check(
    "npf.vtk",
    formula=_two_kernels,
    mutants={"other weights in the linear one": lambda relu, dln: _two_kernels(relu, build("dln", 2, HIDDEN, seed=99))},
)
def same_value_kernel(formula: Formula) -> Comparisons:
    """section 3.1, remark: V depends on the weights alone: one V gives the NTK of the ReLU network and of the deep
    linear one
    """
    relu = build("relu", 2, HIDDEN)
    U = values(relu)
    dln = set_values(build("dln", 2, HIDDEN), U)
    ones = [torch.ones(len(X), w, dtype=torch.float64) for w in HIDDEN]
    V = _value_kernel(U)
    expected = [phi @ V @ phi.T for phi in (_features(U), ref.path_features(U, ones, X))]
    yield from zip(formula(relu, dln), [*expected, V, V])


# --- dynamics ----------------------------------------------------------------------------------------------------


@functools.cache
def _descent() -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights of a ReLU network during training, its features at the last switching instant, and those before it."""
    U = values(build("relu", 2, HIDDEN))
    seen = [_features(U)]
    for step in range(1000):
        direction = ref.descent_direction(lambda W: _half_square(_relu(W)), U)
        U = [W + 0.01 * s for W, s in zip(U, direction)]
        now = _features(U)
        if not torch.equal(now, seen[-1]):
            seen.append(now)
        elif len(seen) > 2 and step > 100:
            break
    return U, seen[-1], seen[-2]


def _error_rate(net: GatedNetwork, e: Tensor, phi: Tensor, before: Tensor) -> list[Tensor]:
    """ė from the package, and from Φ at the last switching instant with the present V."""
    return [-(_ntk(net) @ e), -(phi @ _value_kernel(values(net)) @ phi.T @ e)]


@check(
    "npf.prop3.2",
    formula=_error_rate,
    mutants={"features of the interval before": lambda net, e, phi, before: _error_rate(net, e, before, before)},
)
def proposition3_2(formula: Formula) -> Comparisons:
    """Proposition 3.2: between switching instants ė = −Φ_{T_i}ᵀ V_t Φ_{T_i} e and v̇(p) = ⟨φ_p, Θ̇⟩"""
    U, phi, before = _descent()
    net = set_values(build("relu", 2, HIDDEN), U)
    rate = ref.gradient_step(_relu, _half_square, U)
    # the values move with the weights: ŷ̇ = Φᵀ v̇
    direction = ref.descent_direction(lambda W: _half_square(_relu(W)), U)
    yield phi @ ref.derivative(ref.path_values, U, direction), rate
    yield from ((found, rate) for found in formula(net, _relu(U) - Y, phi, before))
    yield "after gates have switched at least twice"


def _with_smallest_value(net: GatedNetwork, rows: Tensor) -> float:
    smallest = np.linalg.eigvalsh(path_table(net, rows).value_tangent_kernel)[0]
    return rho_bound(net, rows).npk_smallest * float(smallest)


@check(
    "npf.prop3.3",
    tolerance=1e-10,
    formula=lambda net, rows: rho_bound(net, rows).bound,
    mutants={"ρ_min(V)": _with_smallest_value},
)
def proposition3_3(formula: Formula) -> Comparisons:
    """Proposition 3.3: ρ_min(K) ≤ ρ_min(H)·ρ_max(V)"""
    tight = 0.0
    for seed in range(25):
        net = build("relu", 2, HIDDEN, seed=seed)
        rows = ref.draw(3, 2, seed=500 + seed)
        K = ref.tangent_kernel(lambda U, rows=rows: ref.relu_output(U, rows), values(net))  # type: ignore[misc]
        least, bound = float(torch.linalg.eigvalsh(K)[0]), formula(net, rows)
        yield max(0.0, (least - bound) / float(K.diagonal().max().clamp(min=1e-300)))
        tight = max(tight, least / bound if bound > 1e-12 else 0.0)
    yield f"25 random networks; ρ_min(K) reaches {tight:.2f} of the bound"


# --- deep gated networks -------------------------------------------------------------------------------------------

BETA = 4.0


def _soft_gates(layers: list[Tensor]) -> list[Tensor]:
    """Soft gates of a feature network with ReLU units on X."""
    return [ref.soft_gate(q, BETA) for q in ref.preactivations(layers, X)]


def _soft_output(W: list[Tensor], U: list[Tensor]) -> Tensor:
    """ŷ as a function of the feature network's and the value network's weights."""
    return ref.gated_output(U, _soft_gates(W), X)


def _parts(net: GatedNetwork, e: Tensor) -> list[Tensor]:
    """K^V, K^F, and ė with both trained and with the values alone."""
    V, F = (kernels.ntk(net, X, part=part).dense() for part in ("value", "feature"))
    return [V, F, -((V + F) @ e), -(V @ e)]


def _without_features(net: GatedNetwork, e: Tensor) -> list[Tensor]:
    V, F, _, alone = _parts(net, e)
    return [V, F, alone, alone]


@check("npf.prop4.1", tolerance=1e-11, formula=_parts, mutants={"without K^F": _without_features})
def proposition4_1(formula: Formula) -> Comparisons:
    """Proposition 4.1: both trained: ė = −(K^V + K^F) e; fixed features: ė = −K^V e"""
    net = build("soft_galu", 2, HIDDEN, beta=BETA, epsilon=0.0)
    W, U = gate_layers(net), values(net)
    cut = len(W)

    def of_values(V: list[Tensor]) -> Tensor:
        return _soft_output(W, V)

    expected = [
        ref.tangent_kernel(of_values, U),
        ref.tangent_kernel(lambda V: _soft_output(V, U), W),
        ref.gradient_step(lambda V: _soft_output(V[:cut], V[cut:]), _half_square, [*W, *U]),
        ref.gradient_step(of_values, _half_square, U),
    ]
    yield from zip(formula(net, _soft_output(W, U) - Y), expected)


def _path_rates(net: GatedNetwork, direction: list[Tensor], with_inputs: bool = True) -> Tensor:
    """φ̇(p) = x(I_0(p)) Σ_θ ∂A(x, p)/∂θ · θ̇, (n, P)."""
    p = ref.chain_paths(values(net))
    slope = ref.jacobian(lambda W: ref.path_activity(_soft_gates(W), p), gate_layers(net))
    return (X[:, p[:, 0]] if with_inputs else 1.0) * (slope @ torch.cat([d.flatten() for d in direction]))


@check(
    "npf.prop4.1f",
    tolerance=1e-11,
    formula=_path_rates,
    mutants={"without the input": lambda net, direction: _path_rates(net, direction, with_inputs=False)},
)
def feature_rates(formula: Formula) -> Comparisons:
    """Proposition 4.1, the features: φ̇_x(p) = x(I_0(p)) Σ_θ ∂_θ A(x, p) θ̇, and ŷ̇ = ⟨φ̇, v⟩ + ⟨φ, v̇⟩"""
    net = build("soft_galu", 2, HIDDEN, beta=BETA, epsilon=0.0)
    W, U = gate_layers(net), values(net)
    feature = ref.descent_direction(lambda V: _half_square(_soft_output(V, U)), W)
    value = ref.descent_direction(lambda V: _half_square(_soft_output(W, V)), U)
    velocity = ref.derivative(ref.path_values, U, value)
    change = formula(net, feature) @ ref.path_values(U) + ref.path_features(U, _soft_gates(W), X) @ velocity
    yield change, torch.func.jvp(_soft_output, (W, U), (feature, value))[1]


def _independent(net: GatedNetwork) -> Tensor:
    return _ntk(set_values(build("galu", 2, HIDDEN, seed=9), values(net)))


@check("npf.dependent", formula=_ntk, mutants={"independent gates": _independent})
def dependent(formula: Formula) -> Comparisons:
    """section 6: FRNPF (DI), gates copied from the values, starts with the NTK of the ReLU network"""
    net = build("galu", 2, HIDDEN, dependent=True)
    yield formula(net), ref.tangent_kernel(_relu, values(net))


SIGMA = 0.7


@check(
    "npf.pwc",
    formula=lambda net: 3 * SIGMA**4 * 2 * kernels.overlap(net, X).dense(),
    mutants={
        "Σ ∘ Λ": lambda net: 3 * SIGMA**4 * (X @ X.T) * kernels.overlap(net, X).dense(),
        "without d": 1 / 3,
    },
)
def piecewise_constant(formula: Formula) -> Comparisons:
    """half-space section 3.2 with Theorem 5.1: a piecewise constant network: E[K^V] = d σ^(2(d−1)) d_in Λ, the overlap
    kernel
    """
    net = build("dlgn", 2, (2, 2), gate="hard", piecewise_constant=True, seed=5)
    gates = ref.hard_gates(gate_layers(net), X, ref.linear)
    K = ref.kernels_over_signs(gates, torch.ones_like(X), [(2, 2), (2, 2), (1, 2)], SIGMA)
    yield formula(net), K.mean(0)
