"""Checks of 'Neural path features and neural path kernel': features, values, their kernels and their dynamics.

Limits of infinite width live in `infinite`. The loss is ½Σ(ŷ − y)², as in that paper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths
from pathlens.models import GatedNetwork
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import build, first_output, gate_layers, set_values, values
from pathlens.theory.deep_gated.gradients import path_table, rho_bound

X = ref.draw(4, 2, seed=7)
Y = ref.draw(4, seed=8)
HIDDEN = (3, 3)


def _half_square(f: Tensor) -> Tensor:
    return 0.5 * (f - Y).square().sum()


def _relu(shapes: list[tuple[int, ...]], rows: Tensor = X) -> Callable[[Tensor], Tensor]:
    def output(theta: Tensor) -> Tensor:
        U, z = ref.unflat(theta, shapes), rows
        for W in U[:-1]:
            z = torch.relu(z @ W.T)
        return (z @ U[-1].T)[:, 0]

    return output


def _features(U: list[Tensor]) -> Tensor:
    """Φᵀ of a ReLU network, (n, P)."""
    return ref.path_features(U, ref.hard_gates(U[:-1], X), X)


def _value_kernel(U: list[Tensor]) -> Tensor:
    """V_Θ: inner products of the gradients of the path values, (P, P)."""
    J = ref.jacobian(lambda t: ref.path_values(ref.unflat(t, ref.shapes_of(U))), ref.flat(U))
    return J @ J.T


# --- outputs and kernels -------------------------------------------------------------------------------------------


@check(
    "npf.prop1.1",
    "Proposition 1.1",
    "gradient flow on ½Σ(ŷ − y)² moves the error by ė = −K e",
    tolerance=1e-12,
    formula=lambda net, e: -(kernels.ntk(net, X).dense() @ e),
    mutants={"−2K e": lambda net, e: -2 * (kernels.ntk(net, X).dense() @ e)},
)
def proposition1_1(formula: Callable[..., Tensor]) -> float:
    net = build("relu", 2, HIDDEN)
    theta, output = ref.flat(values(net)), _relu(ref.shapes_of(values(net)))
    return ref.distance(formula(net, output(theta) - Y), ref.gradient_step(output, _half_square, theta))


def _listed(net: GatedNetwork, X: Tensor) -> list[Any]:
    table = path_table(net, X)
    return [*_contributions(net, X), table.features, table.outputs]


def _contributions(net: GatedNetwork, X: Tensor, include_inputs: bool = True) -> list[Tensor]:
    """ŷ, and the contribution of every active path, in ascending order."""
    count = 2 * 3 * 3 if include_inputs else 3 * 3
    found = paths.top(net, X, k=count, include_inputs=include_inputs).contributions
    whole = first_output(net, X)
    return [whole, torch.nn.functional.pad(found, (0, 18 - count)).sort(1).values]


@check(
    "npf.prop2.1",
    "Proposition 2.1, equation 1",
    "ŷ(x) = ⟨φ_x, v⟩ = Σ_p x(I_0(p)) A(x, p) v(p), path by path",
    tolerance=1e-12,
    formula=_listed,
    mutants={
        "paths without their input node": lambda net, X: _contributions(net, X, include_inputs=False),
        "doubled": lambda net, X: [2 * c for c in _contributions(net, X)],
    },
)
def proposition2_1(formula: Callable[..., list[Any]]) -> float:
    net = build("relu", 2, HIDDEN, seed=3)
    U = values(net)
    each = _features(U) * ref.path_values(U)
    expected = [each.sum(1), each.sort(1).values, _features(U), each.sum(1)]
    return max(ref.distance(a, b) for a, b in zip(formula(net, X), expected))


def _counted(net: GatedNetwork, X: Tensor, divide: float = 2.0) -> list[Tensor]:
    """H, and Λ as the number of paths with their input node, divided by d_in."""
    return [kernels.npk(net, X).dense(), kernels.overlap(net, X, include_inputs=True).dense() / divide]


@check(
    "npf.lemma2.1",
    "Lemma 2.1, Definition 2.2",
    "H = ΦᵀΦ = Σ ∘ Λ, Λ the number of shared active paths over d_in",
    tolerance=1e-12,
    formula=_counted,
    mutants={"Λ not divided by d_in": lambda net, X: _counted(net, X, 1.0)},
)
def lemma2_1(formula: Callable[..., list[Tensor]]) -> float:
    net = build("relu", 2, HIDDEN, seed=3)
    phi = _features(values(net))
    active = (phi != 0).double()
    return max(ref.distance(a, b) for a, b in zip(formula(net, X), [phi @ phi.T, active @ active.T / 2]))


@check(
    "npf.prop3.1",
    "Proposition 3.1",
    "K = Φᵀ V Φ with the value tangent kernel V",
    tolerance=1e-12,
    formula=lambda net: [kernels.ntk(net, X).dense(), path_table(net, X).gram],
    mutants={"V = identity": lambda net: [kernels.npk(net, X).dense()]},
)
def proposition3_1(formula: Callable[..., list[Any]]) -> float:
    net = build("relu", 2, HIDDEN)
    phi = _features(values(net))
    K = phi @ _value_kernel(values(net)) @ phi.T
    return max(ref.distance(found, K) for found in formula(net))


def _two_kernels(relu: GatedNetwork, dln: GatedNetwork) -> list[Any]:
    """Both tangent kernels, and both value tangent kernels."""
    tables = [path_table(net, X).value_tangent_kernel for net in (relu, dln)]
    return [kernels.ntk(relu, X).dense(), kernels.ntk(dln, X).dense(), *tables]


def _other_values(relu: GatedNetwork, dln: GatedNetwork) -> list[Any]:
    return _two_kernels(relu, build("dln", 2, HIDDEN, seed=99))


@check(
    "npf.vtk",
    "section 3.1, remark",
    "V depends on the weights alone: one V gives the NTK of the ReLU network and of the deep linear one",
    tolerance=1e-12,
    formula=_two_kernels,
    mutants={"other weights in the linear one": _other_values},
)
def same_value_kernel(formula: Callable[..., list[Any]]) -> float:
    relu = build("relu", 2, HIDDEN)
    U = values(relu)
    dln = set_values(build("dln", 2, HIDDEN), U)
    ones = [torch.ones(len(X), w, dtype=torch.float64) for w in HIDDEN]
    V = _value_kernel(U)
    expected = [phi @ V @ phi.T for phi in (_features(U), ref.path_features(U, ones, X))]
    return max(ref.distance(a, b) for a, b in zip(formula(relu, dln), [*expected, V, V]))


# --- dynamics ----------------------------------------------------------------------------------------------------


@functools.cache
def _descent() -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights of a ReLU network on its way, and its features at the last switching instant and at the one before."""
    U = values(build("relu", 2, HIDDEN))
    shapes = ref.shapes_of(U)
    theta, output = ref.flat(U), _relu(shapes)
    seen = [_features(U)]
    for step in range(1000):
        theta = theta - 0.01 * torch.func.grad(lambda t: _half_square(output(t)))(theta)
        now = _features(ref.unflat(theta, shapes))
        if not torch.equal(now, seen[-1]):
            seen.append(now)
        elif len(seen) > 2 and step > 100:
            break
    return ref.unflat(theta, shapes), seen[-1], seen[-2]


def _error_rate(net: GatedNetwork, e: Tensor, phi: Tensor, before: Tensor) -> list[Tensor]:
    """ė from the package, and from Φ at the last switching instant with V of now."""
    return [-(kernels.ntk(net, X).dense() @ e), -(phi @ _value_kernel(values(net)) @ phi.T @ e)]


@check(
    "npf.prop3.2",
    "Proposition 3.2",
    "between switching instants ė = −Φ_{T_i}ᵀ V_t Φ_{T_i} e and v̇(p) = ⟨φ_p, Θ̇⟩",
    tolerance=1e-12,
    formula=_error_rate,
    mutants={"features of the interval before": lambda net, e, phi, before: _error_rate(net, e, before, before)},
)
def proposition3_2(formula: Callable[..., list[Tensor]]) -> Measured:
    U, phi, before = _descent()
    net, shapes = set_values(build("relu", 2, HIDDEN), U), ref.shapes_of(U)
    theta, output = ref.flat(U), _relu(ref.shapes_of(U))
    rate = ref.gradient_step(output, _half_square, theta)
    # the values move with the weights: ŷ̇ = Φᵀ v̇
    moving = -torch.func.grad(lambda t: _half_square(output(t)))(theta)
    velocity = torch.func.jvp(lambda t: ref.path_values(ref.unflat(t, shapes)), (theta,), (moving,))[1]
    found = formula(net, output(theta) - Y, phi, before)
    return Measured(
        max(ref.distance(phi @ velocity, rate), *(ref.distance(f, rate) for f in found)),
        "after gates have switched at least twice",
    )


@check(
    "npf.prop3.3",
    "Proposition 3.3",
    "ρ_min(K) ≤ ρ_min(H)·ρ_max(V)",
    tolerance=1e-10,
    formula=lambda net, rows: rho_bound(net, rows).bound,
    mutants={
        "ρ_min(V)": lambda net, rows: (
            rho_bound(net, rows).npk_smallest * float(np.linalg.eigvalsh(path_table(net, rows).value_tangent_kernel)[0])
        )
    },
)
def proposition3_3(formula: Callable[..., float]) -> Measured:
    worst, tight = 0.0, 0.0
    for seed in range(25):
        net = build("relu", 2, HIDDEN, seed=seed)
        rows = ref.draw(3, 2, seed=500 + seed)
        U = values(net)
        K = ref.tangent_kernel(_relu(ref.shapes_of(U), rows), ref.flat(U))
        least, bound = float(torch.linalg.eigvalsh(K)[0]), formula(net, rows)
        worst = max(worst, (least - bound) / float(K.diagonal().max().clamp(min=1e-300)))
        tight = max(tight, least / bound if bound > 1e-12 else 0.0)
    return Measured(worst, f"25 random networks; ρ_min(K) reaches {tight:.2f} of the bound")


# --- deep gated networks -------------------------------------------------------------------------------------------

BETA = 4.0


def _dgn_output(net: GatedNetwork) -> Callable[[Tensor, Tensor], Tensor]:
    """ŷ as a function of the feature network's and the value network's weights; ReLU units, soft gates."""
    of_gates, of_values = ref.shapes_of(gate_layers(net)), ref.shapes_of(values(net))

    def output(feature: Tensor, value: Tensor) -> Tensor:
        gates = [ref.soft_gate(q, BETA, 0.0) for q in ref.scores(ref.unflat(feature, of_gates), X)]
        return ref.gated_output(ref.unflat(value, of_values), gates, X)

    return output


def _parts(net: GatedNetwork, e: Tensor) -> list[Tensor]:
    """K^V, K^F, and ė with both trained and with the values alone."""
    V, F = (kernels.ntk(net, X, part=part).dense() for part in ("value", "feature"))
    return [V, F, -((V + F) @ e), -(V @ e)]


def _without_features(net: GatedNetwork, e: Tensor) -> list[Tensor]:
    V, F, _, alone = _parts(net, e)
    return [V, F, alone, alone]


@check(
    "npf.prop4.1",
    "Proposition 4.1",
    "both trained: ė = −(K^V + K^F) e; fixed features: ė = −K^V e",
    tolerance=1e-11,
    formula=_parts,
    mutants={"without K^F": _without_features},
)
def proposition4_1(formula: Callable[..., list[Tensor]]) -> float:
    net = build("soft_galu", 2, HIDDEN, beta=BETA, epsilon=0.0)
    feature, value = ref.flat(gate_layers(net)), ref.flat(values(net))
    output, cut = _dgn_output(net), len(ref.flat(gate_layers(net)))
    K = [
        ref.tangent_kernel(lambda t: output(feature, t), value),
        ref.tangent_kernel(lambda t: output(t, value), feature),
    ]
    rates = [
        ref.gradient_step(lambda t: output(t[:cut], t[cut:]), _half_square, torch.cat([feature, value])),
        ref.gradient_step(lambda t: output(feature, t), _half_square, value),
    ]
    found = formula(net, output(feature, value) - Y)
    return max(ref.distance(a, b) for a, b in zip(found, [*K, *rates]))


def _path_rates(net: GatedNetwork, moving: Tensor, with_inputs: bool = True) -> Tensor:
    """φ̇(p) = x(I_0(p)) Σ_θ ∂A(x, p)/∂θ · θ̇, (n, P)."""
    layers, p = gate_layers(net), ref.chain_paths(values(net))
    shapes = ref.shapes_of(layers)

    def activity(t: Tensor) -> Tensor:
        return ref.path_activity([ref.soft_gate(q, BETA, 0.0) for q in ref.scores(ref.unflat(t, shapes), X)], p)

    slope = torch.func.jacrev(activity)(ref.flat(layers)) @ moving
    return (X[:, p[:, 0]] if with_inputs else 1.0) * slope


@check(
    "npf.prop4.1f",
    "Proposition 4.1, the features",
    "φ̇_x(p) = x(I_0(p)) Σ_θ ∂_θ A(x, p) θ̇, and ŷ̇ = ⟨φ̇, v⟩ + ⟨φ, v̇⟩",
    tolerance=1e-11,
    formula=_path_rates,
    mutants={"without the input": lambda net, moving: _path_rates(net, moving, with_inputs=False)},
)
def feature_rates(formula: Callable[..., Tensor]) -> float:
    net = build("soft_galu", 2, HIDDEN, beta=BETA, epsilon=0.0)
    feature, value = ref.flat(gate_layers(net)), ref.flat(values(net))
    output = _dgn_output(net)
    moving = [
        -torch.func.grad(lambda t: _half_square(output(t, value)))(feature),
        -torch.func.grad(lambda t: _half_square(output(feature, t)))(value),
    ]
    U = values(net)
    velocity = torch.func.jvp(lambda t: ref.path_values(ref.unflat(t, ref.shapes_of(U))), (value,), (moving[1],))[1]
    gates = [ref.soft_gate(q, BETA, 0.0) for q in ref.scores(gate_layers(net), X)]
    change = formula(net, moving[0]) @ ref.path_values(U) + ref.path_features(U, gates, X) @ velocity
    whole = torch.func.jvp(output, (feature, value), tuple(moving))[1]
    return ref.distance(change, whole)


@check(
    "npf.dependent",
    "section 6",
    "FRNPF (DI), gates copied from the values, starts with the NTK of the ReLU network",
    tolerance=1e-12,
    formula=lambda net: kernels.ntk(net, X).dense(),
    mutants={
        "independent gates": lambda net: kernels.ntk(
            set_values(build("galu", 2, HIDDEN, seed=9), values(net)), X
        ).dense()
    },
)
def dependent(formula: Callable[..., Tensor]) -> float:
    net = build("galu", 2, HIDDEN, dependent=True)
    U = values(net)
    return ref.distance(formula(net), ref.tangent_kernel(_relu(ref.shapes_of(U)), ref.flat(U)))


SIGMA = 0.7


@check(
    "npf.pwc",
    "half-space section 3.2 with Theorem 5.1",
    "a piecewise constant network: E[K^V] = d σ^(2(d−1)) d_in Λ, the overlap kernel",
    tolerance=1e-12,
    formula=lambda net: 3 * SIGMA**4 * 2 * kernels.overlap(net, X).dense(),
    mutants={
        "Σ ∘ Λ": lambda net: 3 * SIGMA**4 * (X @ X.T) * kernels.overlap(net, X).dense(),
        "without d": lambda net: SIGMA**4 * 2 * kernels.overlap(net, X).dense(),
    },
)
def piecewise_constant(formula: Callable[..., Any]) -> float:
    net = build("dlgn", 2, (2, 2), gate="hard", piecewise_constant=True, seed=5)
    gates = ref.hard_gates(gate_layers(net), X, unit=lambda q: q)
    K = ref.kernels_over_signs(gates, torch.ones_like(X), [(2, 2), (2, 2), (1, 2)], SIGMA)
    return ref.distance(formula(net), K.mean(0))
