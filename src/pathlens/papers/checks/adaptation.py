"""Checks of 'Deep gated networks' where gates adapt: their gradients, its Gram matrices, active and sensitive gates.

Expectations are exact, over all signs of the values; d is the number of weight layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels
from pathlens.models import GatedNetwork
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import BETA, EPSILON, build, gate_layers, soft_galu, soft_gates, values
from pathlens.theory.deep_gated.gradients import Adaptation, adaptation, gate_gradient_overlap
from pathlens.theory.deep_gated.sensitive_gates import gate_slopes, printed_threshold, sensitive_threshold

X = ref.draw(4, 2, seed=2)
SIGMA, WIDTHS, D = 0.7, (2, 2), 3
SHAPES = [(2, 2), (2, 2), (1, 2)]


def _activity_slopes(net: GatedNetwork, p: Tensor, others: bool = True) -> Tensor:
    """∂A(x, p)/∂θ^g as the sum over layers of one gate's slope times the other gates, (n, P, parameters)."""
    names = [k for k, _ in net.named_parameters() if k.startswith("source.")]
    rest = {k: v.detach() for k, v in net.state_dict().items() if k not in names}
    theta = {k: v.detach() for k, v in net.named_parameters() if k in names}

    def gates(parameters: dict[str, Tensor]) -> list[Tensor]:
        return list(
            torch.func.functional_call(_Gates(net), {f"net.{k}": v for k, v in {**rest, **parameters}.items()}, (X,))
        )

    blocks = torch.func.jacrev(gates)(theta)
    slopes = [torch.cat([block[k].flatten(2) for k in names], dim=2) for block in blocks]
    g = gates(theta)
    total = torch.zeros(len(X), len(p), slopes[0].shape[2], dtype=torch.float64)
    for own, slope in enumerate(slopes):
        rest_of_path = torch.ones(len(X), len(p), dtype=torch.float64)
        for k, other in enumerate(g):
            if k != own and others:
                rest_of_path = rest_of_path * other[:, p[:, k + 1]]
        total += slope[:, p[:, own + 1]] * rest_of_path[:, :, None]
    return total.detach()


class _Gates(torch.nn.Module):
    """The gates of a network as a module, so that autograd can vary its weights."""

    def __init__(self, net: GatedNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(self, X: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net.gates(X).values())


def _activity_jacobian(layers: list[Tensor], p: Tensor) -> Tensor:
    """∂A(x, p)/∂θ^g by autograd of the product itself, (n, P, parameters)."""
    shapes = ref.shapes_of(layers)
    return torch.func.jacrev(lambda t: ref.path_activity(soft_gates(ref.unflat(t, shapes), X), p))(ref.flat(layers))


@check(
    "dgn.eq6",
    "equation 6",
    "∂A(x, p)/∂θ = Σ_l ∂G_l/∂θ · Π_{l′≠l} G_l′ for the gates of a path",
    tolerance=1e-12,
    formula=_activity_slopes,
    mutants={"without the other gates": lambda net, p: _activity_slopes(net, p, others=False)},
)
def equation6(formula: Callable[..., Tensor]) -> float:
    net = soft_galu((3, 3))
    p = ref.chain_paths(values(net))
    return ref.distance(formula(net, p), _activity_jacobian(gate_layers(net), p))


@functools.cache
def _feature_kernels() -> tuple[Tensor, Tensor, Tensor]:
    """Over all signs of the values: E[K^w], E[K^a], E[K] of a soft-GaLU network."""
    W = gate_layers(soft_galu(WIDTHS))
    shapes = ref.shapes_of(W)

    def of_gates(U: list[Tensor]) -> Tensor:
        J = torch.func.jacrev(lambda t: ref.gated_output(U, soft_gates(ref.unflat(t, shapes), X), X))(ref.flat(W))
        return J @ J.T

    def of_both(U: list[Tensor]) -> Tensor:
        def output(t: Tensor) -> Tensor:
            parts = ref.unflat(t, [*SHAPES, *shapes])
            return ref.gated_output(parts[: len(SHAPES)], soft_gates(parts[len(SHAPES) :], X), X)

        J = torch.func.jacrev(output)(torch.cat([ref.flat(U), ref.flat(W)]))
        return J @ J.T

    strengths = ref.kernels_over_signs(soft_gates(W, X), X, SHAPES, SIGMA).mean(0)
    return strengths, ref.over_signs(of_gates, SHAPES, SIGMA).mean(0), ref.over_signs(of_both, SHAPES, SIGMA).mean(0)


@check(
    "dgn.lemma3.1i",
    "Lemma 3.1 (i)",
    "soft-GaLU: E[K₀] = E[K^w] + E[K^a]",
    tolerance=1e-12,
    formula=lambda Kw, Ka: Kw + Ka,
    mutants={"without K^a": lambda Kw, Ka: Kw},
)
def lemma3_1_i(formula: Callable[..., Tensor]) -> float:
    Kw, Ka, K = _feature_kernels()
    return ref.distance(formula(Kw, Ka), K)


def _strength_mean(net: GatedNetwork, d: int = D) -> Tensor:
    return d * SIGMA ** (2 * (D - 1)) * kernels.npk(net, X, soft=True).dense()


@check(
    "dgn.lemma3.1ii",
    "Lemma 3.1 (ii), Lemma 7.5 (ii)",
    "soft-GaLU: E[K^w] = d σ^(2(d−1)) (xᵀx) ∘ λ",
    tolerance=1e-12,
    formula=_strength_mean,
    printed=lambda net: _strength_mean(net, d=1),
    erratum="the factor d of Lemma 2.2 and Theorem 2.3 is missing",
)
def lemma3_1_ii(formula: Callable[..., Tensor]) -> float:
    return ref.distance(formula(soft_galu(WIDTHS)), _feature_kernels()[0])


def _gate_mean(net: GatedNetwork, power: int = 2 * D) -> np.ndarray:
    return SIGMA**power * (X @ X.T).numpy() * gate_gradient_overlap(net, X)


@check(
    "dgn.lemma3.1iii",
    "Lemma 3.1 (iii), Definition 3.1",
    "soft-GaLU: E[K^a] = σ^(2d) (xᵀx) ∘ δ",
    tolerance=1e-12,
    formula=_gate_mean,
    mutants={"σ^(2(d−1))": lambda net: _gate_mean(net, 2 * (D - 1)), "a factor d": lambda net: D * _gate_mean(net)},
)
def lemma3_1_iii(formula: Callable[..., np.ndarray]) -> float:
    net = soft_galu(WIDTHS)
    J = _activity_jacobian(gate_layers(net), ref.all_paths([1, *WIDTHS]))
    by_paths = SIGMA ** (2 * D) * (X @ X.T) * torch.einsum("spm,tpm->st", J, J)
    return max(ref.distance(formula(net), _feature_kernels()[1]), ref.distance(formula(net), by_paths))


def _split_jacobians(U: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ψ^w, Ψ^a and Ψ of a soft-ReLU network: values varied, gates varied, and both, since they share weights."""
    shapes = ref.shapes_of(U)

    def output(strengths: Tensor, gating: Tensor) -> Tensor:
        return ref.gated_output(ref.unflat(strengths, shapes), soft_gates(ref.unflat(gating, shapes)[:-1], X), X)

    theta = ref.flat(U)
    apart = [torch.func.jacrev(output, argnums=k)(theta, theta).detach() for k in (0, 1)]
    return apart[0], apart[1], ref.jacobian(lambda t: output(t, t), theta)


def _uncrossed(net: GatedNetwork, X: Tensor) -> Adaptation:
    found = adaptation(net, X)
    return Adaptation(found.strength + found.gate, found.strength, found.gate)


@check(
    "dgn.soft_relu",
    "section 3",
    "soft-ReLU, one Θ for both: K = K^w + K^a + Ψ^wᵀΨ^a + Ψ^aᵀΨ^w",
    tolerance=1e-11,
    formula=adaptation,
    mutants={"without cross terms": _uncrossed},
)
def soft_relu(formula: Callable[..., Adaptation]) -> Measured:
    net = build("soft_relu", 2, (3, 4), beta=BETA, epsilon=EPSILON)
    strengths, gating, both = _split_jacobians(values(net))
    across = strengths @ gating.T
    found = formula(net, X)
    expected = [both @ both.T, strengths @ strengths.T, gating @ gating.T, across + across.T]
    parts = [found.total, found.strength, found.gate, found.cross]
    share = float((across + across.T).norm() / (both @ both.T).norm())
    return Measured(
        max(ref.distance(a, b) for a, b in zip(parts, expected)), f"cross terms are {share:.2f} of K in norm"
    )


TAU = 0.9


@check(
    "dgn.sensitive",
    "section 3.1",
    "no gate is above τ_A ≥ (1+ε)/2 and has |∂G/∂θ| above β·|χ′|(χ⁻¹(τ_A))·max|∂q/∂θ|",
    tolerance=1e-12,
    formula=lambda slope: sensitive_threshold(TAU, BETA, EPSILON, slope),
    printed=lambda slope: printed_threshold(TAU, EPSILON),
    erratum="β and |∂q/∂θ| are missing (and a modulus: χ′ < 0), so that active and sensitive gates overlap",
)
def sensitive(formula: Callable[[float], float]) -> Measured:
    net, rows = soft_galu((4, 4)), ref.draw(100, 2, seed=5)
    layers = gate_layers(net)
    shapes, theta = ref.shapes_of(layers), ref.flat(layers)
    g = torch.cat(soft_gates(layers, rows), dim=1)
    jacobian = torch.func.jacrev(lambda t: torch.cat(soft_gates(ref.unflat(t, shapes), rows), dim=1))(theta)
    slopes = jacobian.abs().amax(2)
    package = gate_slopes(net, rows)
    apart = ref.distance(np.concatenate(package.slopes, axis=1), slopes)
    largest, bound = float(slopes[g > TAU].max()), formula(package.steepest)
    return Measured(
        max(largest / bound - 1, apart),
        f"{int((g > TAU).sum())} active gates; largest |∂G/∂θ| {largest:.2f}, corrected bound "
        f"{sensitive_threshold(TAU, BETA, EPSILON, package.steepest):.2f}, printed "
        f"{printed_threshold(TAU, EPSILON):.2f}",
    )
