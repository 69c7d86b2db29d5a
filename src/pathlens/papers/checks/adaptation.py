"""Checks of 'Deep gated networks' where gates adapt: their gradients, its Gram matrices, active and sensitive gates.

Expectations are exact, over all signs of the values; d is the number of weight layers.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from pathlens.models import GatedNetwork
from pathlens.papers.checks.initialisation import SHAPES, SIGMA, WIDTHS, D, X, path_kernel
from pathlens.papers.checks.networks import BETA, EPSILON, build, gate_layers, soft_galu, soft_gates, values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.deep_gated import (
    Adaptation,
    adaptation,
    gate_gradient_overlap,
    gate_slopes,
    printed_threshold,
    sensitive_threshold,
)
from pathlens.theory.deep_gated.gradients import GateOutputs

ORDER = 3


def _activity_slopes(net: GatedNetwork, p: Tensor, others: bool = True) -> Tensor:
    """∂A(x, p)/∂θ^g as the sum over layers of one gate's slope times the other gates, (n, P, parameters)."""
    state = {f"net.{k}": v.detach() for k, v in net.state_dict().items()}
    trained = {f"net.{k}": v.detach() for k, v in net.named_parameters() if k.startswith("source.")}

    def gates(weights: list[Tensor]) -> Tensor:
        named = {**state, **dict(zip(trained, weights))}
        return torch.stack(torch.func.functional_call(GateOutputs(net), named, (X,)))

    g, slopes = gates(list(trained.values())), ref.jacobian(gates, list(trained.values()))
    total = torch.zeros(len(X), len(p), slopes.shape[-1], dtype=torch.float64)
    for own, slope in enumerate(slopes):
        rest_of_path = torch.ones(len(X), len(p), dtype=torch.float64)
        for k, other in enumerate(g):
            if k != own and others:
                rest_of_path = rest_of_path * other[:, p[:, k + 1]]
        total += slope[:, p[:, own + 1]] * rest_of_path[:, :, None]
    return total.detach()


def _activity_jacobian(layers: list[Tensor], p: Tensor) -> Tensor:
    """∂A(x, p)/∂θ^g by autograd of the product itself, (n, P, parameters)."""
    return ref.jacobian(lambda W: ref.path_activity(soft_gates(W, X), p), layers)


@check(
    "dgn.eq6",
    formula=_activity_slopes,
    mutants={"without the other gates": lambda net, p: _activity_slopes(net, p, others=False)},
)
def equation6(formula: Formula) -> Comparisons:
    """equation 6: ∂A(x, p)/∂θ = Σ_l ∂G_l/∂θ · Π_{l′≠l} G_l′ for the gates of a path"""
    net = soft_galu((3, 3))
    p = ref.chain_paths(values(net))
    yield formula(net, p), _activity_jacobian(gate_layers(net), p)


@functools.cache
def _feature_kernels() -> tuple[Tensor, Tensor, Tensor]:
    """Over all signs of the values: E[K^w], E[K^a], E[K] of a soft-GaLU network."""
    W = gate_layers(soft_galu(WIDTHS))
    count = len(SHAPES)

    def of_gates(U: list[Tensor]) -> Tensor:
        return ref.tangent_kernel(lambda V: ref.gated_output(U, soft_gates(V, X), X), W)

    def of_both(U: list[Tensor]) -> Tensor:
        return ref.tangent_kernel(lambda V: ref.gated_output(V[:count], soft_gates(V[count:], X), X), [*U, *W])

    strengths = ref.kernels_over_signs(soft_gates(W, X), X, SHAPES, SIGMA).mean(0)
    return strengths, ref.over_signs(of_gates, SHAPES, SIGMA).mean(0), ref.over_signs(of_both, SHAPES, SIGMA).mean(0)


@check("dgn.lemma3.1i", formula=lambda Kw, Ka: Kw + Ka, mutants={"without K^a": lambda Kw, Ka: Kw})
def lemma3_1_i(formula: Formula) -> Comparisons:
    """Lemma 3.1 (i): soft-GaLU: E[K₀] = E[K^w] + E[K^a]"""
    Kw, Ka, K = _feature_kernels()
    yield formula(Kw, Ka), K


@check("dgn.lemma3.1ii", formula=lambda net: D * SIGMA ** (2 * (D - 1)) * path_kernel(net), printed=1 / D)
def lemma3_1_ii(formula: Formula) -> Comparisons:
    """Lemma 3.1 (ii), Lemma 7.5 (ii): soft-GaLU: E[K^w] = d σ^(2(d−1)) (xᵀx) ∘ λ

    Erratum: the factor d of Lemma 2.2 and Theorem 2.3 is missing
    """
    yield formula(soft_galu(WIDTHS)), _feature_kernels()[0]


@check(
    "dgn.lemma3.1iii",
    formula=lambda net: SIGMA ** (2 * D) * (X @ X.T).numpy() * gate_gradient_overlap(net, X),
    mutants={"σ^(2(d−1))": SIGMA**-2, "a factor d": D},
)
def lemma3_1_iii(formula: Formula) -> Comparisons:
    """Lemma 3.1 (iii), Definition 3.1: soft-GaLU: E[K^a] = σ^(2d) (xᵀx) ∘ δ"""
    net = soft_galu(WIDTHS)
    J = _activity_jacobian(gate_layers(net), ref.all_paths([1, *WIDTHS]))
    by_paths = SIGMA ** (2 * D) * (X @ X.T) * torch.einsum("spm,tpm->st", J, J)
    yield from ((formula(net), K) for K in (_feature_kernels()[1], by_paths))


def _uncrossed(net: GatedNetwork, X: Tensor) -> Adaptation:
    found = adaptation(net, X)
    return Adaptation(found.strength + found.gate, found.strength, found.gate)


@check("dgn.soft_relu", tolerance=1e-11, formula=adaptation, mutants={"without cross terms": _uncrossed})
def soft_relu(formula: Formula) -> Comparisons:
    """section 3: soft-ReLU, one Θ for both: K = K^w + K^a + Ψ^wᵀΨ^a + Ψ^aᵀΨ^w"""
    net = build("soft_relu", 2, (3, 4), beta=BETA, epsilon=EPSILON)
    U = values(net)
    strengths = ref.jacobian(lambda V: ref.gated_output(V, soft_gates(U[:-1], X), X), U)
    gating = ref.jacobian(lambda V: ref.gated_output(U, soft_gates(V[:-1], X), X), U)
    both = ref.jacobian(lambda V: ref.gated_output(V, soft_gates(V[:-1], X), X), U)
    cross = strengths @ gating.T + gating @ strengths.T
    found = formula(net, X)
    yield found.total, both @ both.T
    yield found.strength, strengths @ strengths.T
    yield found.gate, gating @ gating.T
    yield found.cross, cross
    yield f"cross terms are {float(cross.norm() / (both @ both.T).norm()):.2f} of K in norm"


TAU = 0.9


@check(
    "dgn.sensitive",
    formula=lambda slope: sensitive_threshold(TAU, BETA, epsilon=EPSILON, slope=slope),
    printed=lambda slope: printed_threshold(TAU, epsilon=EPSILON),
)
def sensitive(formula: Formula) -> Comparisons:
    """section 3.1: no gate is above τ_A ≥ (1+ε)/2 and has |∂G/∂θ| above β·|χ′|(χ⁻¹(τ_A))·max|∂q/∂θ|

    Erratum: β and |∂q/∂θ| are missing (and a modulus: χ′ < 0), so that active and sensitive gates overlap
    """
    net, rows = soft_galu((4, 4)), ref.draw(100, 2, seed=5)
    layers = gate_layers(net)
    g = torch.cat(soft_gates(layers, rows), dim=1)
    slopes = ref.jacobian(lambda W: torch.cat(soft_gates(W, rows), dim=1), layers).abs().amax(2)
    package = gate_slopes(net, rows)
    yield np.concatenate(package.slopes, axis=1), slopes
    largest = float(slopes[g > TAU].max())
    yield largest / formula(package.steepest) - 1
    yield (
        f"{int((g > TAU).sum())} active gates; largest |∂G/∂θ| {largest:.2f}, corrected bound "
        f"{sensitive_threshold(TAU, BETA, epsilon=EPSILON, slope=package.steepest):.2f}, printed "
        f"{printed_threshold(TAU, epsilon=EPSILON):.2f}"
    )
