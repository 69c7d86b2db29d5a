"""Checks of 'Deep gated networks': error dynamics, path features, signal and wire, deep linear networks.

What holds at initialisation lives in `initialisation`, gates that adapt in `adaptation`, convolutions in
`convolution`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths
from pathlens.models import GatedNetwork
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import build, first_output, gate_layers, set_table, soft_galu, soft_gates, values
from pathlens.theory.deep_gated.gradients import signal_wire

X = ref.draw(4, 2, seed=2)
Y = ref.draw(4, seed=3)


def _relu_output(net: GatedNetwork) -> Callable[[Tensor], Tensor]:
    """ŷ of the ReLU network as a function of all its weights."""
    shapes = ref.shapes_of(values(net))

    def output(theta: Tensor) -> Tensor:
        z = X
        U = ref.unflat(theta, shapes)
        for W in U[:-1]:
            z = torch.relu(z @ W.T)
        return (z @ U[-1].T)[:, 0]

    return output


# --- error dynamics ----------------------------------------------------------------------------------------------


@check(
    "dgn.eq1",
    "equation 1",
    "one step of size α on Σ(ŷ − y)² moves the error by −2αK e, to first order in α",
    tolerance=1e-12,
    formula=lambda net, e: -2 * (kernels.ntk(net, X).dense() @ e),
    printed=lambda net, e: -(kernels.ntk(net, X).dense() @ e),
    erratum="e − αKe belongs to the loss ½Σ(ŷ − y)²; the stated loss has no ½ and gives 2α",
)
def equation1(formula: Callable[..., Tensor]) -> float:
    net = build("relu", 2, (4, 4))
    theta, output = ref.flat(values(net)), _relu_output(net)
    step = ref.gradient_step(output, lambda f: (f - Y).square().sum(), theta)
    return ref.distance(formula(net, output(theta) - Y), step)


@check(
    "dgn.experiment8",
    "Experiment 8",
    "with the stated loss and α = 0.1/d the squared error of a wide deep linear "
    "network first falls by (1 − 0.2)² = 0.64",
    tolerance=0.05,
    formula=lambda: 0.64,
    printed=lambda: 0.81,
    erratum="0.81 = (1 − 0.1)² is the rate for ½(ŷ − y)²",
)
def experiment8(formula: Callable[[], float]) -> Measured:
    found = [_first_ratio(depth) for depth in (2, 4, 6)]
    return Measured(
        max(abs(formula() / f - 1) for f in found),
        "first ratio at d = 2, 4, 6: " + ", ".join(f"{f:.3f}" for f in found),
    )


@functools.cache
def _first_ratio(depth: int, w: int = 400, runs: int = 30) -> float:
    """e₁²/e₀² of one gradient step on (ŷ − 1)², x = 1, median over random signs."""
    shapes = [(w, 1), *[(w, w)] * (depth - 2), (1, w)]
    ratios = []
    for run in range(runs):
        theta = torch.sign(ref.draw(sum(a * b for a, b in shapes), seed=run)) / math.sqrt(w)

        def error(t: Tensor) -> Tensor:
            z = torch.ones(1, 1, dtype=torch.float64)
            for W in ref.unflat(t, shapes):
                z = W @ z
            return z[0, 0] - 1

        after = theta - 0.1 / depth * torch.func.grad(lambda t: error(t).square())(theta)
        ratios.append(float((error(after) / error(theta)) ** 2))
    return float(np.median(ratios))


# --- path features -----------------------------------------------------------------------------------------------


def _gated_networks() -> list[tuple[GatedNetwork, list[Tensor]]]:
    """A network with a table of gates, one with frozen ReLU gates, one with soft gates; and their gates on X."""
    table = [ref.open_where_positive(ref.draw(4, w, seed=5 + w)) for w in (3, 4)]
    frg = set_table(build("frg", 2, (3, 4), examples=4), table)
    galu, soft = build("galu", 2, (3, 4)), soft_galu((3, 4))
    return [(frg, table), (galu, ref.hard_gates(gate_layers(galu), X)), (soft, soft_gates(gate_layers(soft), X))]


@check(
    "dgn.eq2",
    "equation 2",
    "ŷ(x) = φ_xᵀ w: features x(p₀)·A(x, p) of paths times their strengths",
    tolerance=1e-12,
    formula=first_output,
    mutants={"halved": lambda net, X: first_output(net, X) / 2},
)
def equation2(formula: Callable[..., Tensor]) -> float:
    return max(
        ref.distance(formula(net, X), ref.path_features(values(net), g, X) @ ref.path_values(values(net)))
        for net, g in _gated_networks()
    )


@check(
    "dgn.features",
    "section 1",
    "M = ΦᵀΦ = (xᵀx) ∘ λ",
    tolerance=1e-12,
    formula=lambda net, X: kernels.npk(net, X, soft=True).dense(),
    mutants={"λ counts the input nodes too": lambda net, X: 2 * kernels.npk(net, X, soft=True).dense()},
)
def features(formula: Callable[..., Tensor]) -> float:
    worst = 0.0
    for net, g in _gated_networks():
        phi = ref.path_features(values(net), g, X)
        worst = max(worst, ref.distance(formula(net, X), phi @ phi.T))
    return worst


@check(
    "dgn.lemma2.1",
    "Lemma 2.1, equations 4 and 9",
    "K(s, s′) = Σ_ij x_s(i) x_s′(j) κ(s, s′, i, j), over pairs of paths from inputs i and j",
    tolerance=1e-12,
    formula=lambda net: [signal_wire(net, X).gram, kernels.ntk(net, X, part="value").dense()],
    printed=lambda net: [signal_wire(net, X).printed],
    erratum="only i = j is printed; paths from different inputs share later weights and interact, too (in the mean "
    "over symmetric weights they do not)",
)
def lemma2_1(formula: Callable[..., list[Tensor]]) -> float:
    worst = 0.0
    for net, g in _gated_networks():
        K = ref.gated_kernel(values(net), g, X)
        worst = max(worst, *(ref.distance(found, K) for found in formula(net)))
    return worst


# --- deep linear networks ------------------------------------------------------------------------------------------


def _linear(net: GatedNetwork, X: Tensor) -> list[Tensor]:
    """ŷ, a row of Λ, and the number of active paths."""
    return [
        first_output(net, X),
        kernels.overlap(net, X).dense()[0],
        torch.from_numpy(paths.count(net, X).astype(float)),
    ]


@check(
    "dgn.eq13",
    "equations 13 to 15",
    "a deep linear network is ŷ = xᵀη, η(i) = Σ_{p: p(0)=i} w(p), and λ = w^(d−1)",
    tolerance=1e-12,
    formula=_linear,
    mutants={
        "with gates": lambda net, X: _linear(net.with_gate("hard"), X),
        "w^d paths": lambda net, X: [_linear(net, X)[0], *(3 * n for n in _linear(net, X)[1:])],
    },
)
def equation13(formula: Callable[..., list[Tensor]]) -> float:
    net = build("dln", 2, (3, 3, 3))
    U = values(net)
    v, p = ref.path_values(U), ref.chain_paths(U)
    eta = torch.stack([v[p[:, 0] == i].sum() for i in range(2)])
    number = torch.full((len(X),), float((p[:, 0] == 0).sum()), dtype=torch.float64)
    return max(ref.distance(a, b) for a, b in zip(formula(net, X), [X @ eta, number, number]))


@check(
    "dgn.corollary8.1",
    "Corollary 8.1",
    "deep linear, d_in = n = 1: E[K₀] = x² d (wσ²)^(d−1)",
    tolerance=1e-12,
    formula=lambda x, w, d, sigma: x**2 * d * (w * sigma**2) ** (d - 1),
    printed=lambda x, w, d, sigma: d * (w * sigma**2) ** (d - 1),
    erratum="printed without x²: it holds for x = 1, which is not stated (and needs Assumption 1, not 2)",
)
def corollary8_1(formula: Callable[..., float]) -> float:
    x, w = 1.5, 2
    worst = 0.0
    for d in (2, 3, 4):
        shapes = [(w, 1), *[(w, w)] * (d - 2), (1, w)]
        ones = [torch.ones(1, w, dtype=torch.float64)] * (d - 1)
        K = ref.kernels_over_signs(ones, torch.full((1, 1), x, dtype=torch.float64), shapes, 0.7)
        worst = max(worst, abs(formula(x, w, d, 0.7) / float(K.mean()) - 1))
    return worst
