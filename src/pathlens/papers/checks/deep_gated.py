"""Checks of 'Deep gated networks': error dynamics, path features, signal and wire, deep linear networks.

Statements about initialisation live in `initialisation`, about gates that adapt in `adaptation`, about convolutions in
`convolution`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths
from pathlens.models import GatedNetwork
from pathlens.papers.checks.networks import build, first_output, frg, gate_layers, soft_galu, soft_gates, values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.deep_gated import signal_wire

ORDER = 1
X = ref.draw(4, 2, seed=2)
Y = ref.draw(4, seed=3)


# --- error dynamics ----------------------------------------------------------------------------------------------


@check("dgn.eq1", formula=lambda net, e: -2 * (kernels.ntk(net, X).dense() @ e), printed=1 / 2)
def equation1(formula: Formula) -> Comparisons:
    """equation 1: one step of size α on Σ(ŷ − y)² moves the error by −2αK e, to first order in α

    Erratum: e − αKe belongs to the loss ½Σ(ŷ − y)²; the stated loss has no ½ and gives 2α
    """
    net = build("relu", 2, (4, 4))
    step = ref.gradient_step(lambda U: ref.relu_output(U, X), lambda f: (f - Y).square().sum(), values(net))
    yield formula(net, ref.relu_output(values(net), X) - Y), step


@check("dgn.experiment8", tolerance=0.05, formula=lambda: 0.64, printed=lambda: 0.81)
def experiment8(formula: Formula) -> Comparisons:
    """Experiment 8: with the stated loss and α = 0.1/d the squared error of a wide deep linear network first falls by
    (1 − 0.2)² = 0.64

    Erratum: 0.81 = (1 − 0.1)² is the rate for ½(ŷ − y)²
    """
    found = [_first_ratio(depth) for depth in (2, 4, 6)]
    yield from ((formula(), f) for f in found)
    yield "first ratio at d = 2, 4, 6: " + ", ".join(f"{f:.3f}" for f in found)


@functools.cache
def _first_ratio(depth: int, w: int = 400, runs: int = 30) -> float:
    """e₁²/e₀² of one gradient step on (ŷ − 1)², x = 1, median over random signs."""
    shapes = [(w, 1), *[(w, w)] * (depth - 2), (1, w)]
    one = torch.ones(1, 1, dtype=torch.float64)

    def error(weights: list[Tensor]) -> Tensor:
        return ref.preactivations(weights, one, ref.linear)[-1][0, 0] - 1

    ratios = []
    for run in range(runs):
        theta = torch.sign(ref.draw(sum(a * b for a, b in shapes), seed=run)) / math.sqrt(w)
        U = ref.unflatten(theta, shapes)
        step = ref.descent_direction(lambda W: error(W).square(), U)
        after = [W + 0.1 / depth * s for W, s in zip(U, step)]
        ratios.append(float((error(after) / error(U)) ** 2))
    return float(np.median(ratios))


# --- path features -----------------------------------------------------------------------------------------------


def _gated_networks() -> list[tuple[GatedNetwork, list[Tensor]]]:
    """A network with a table of gates, one with frozen ReLU gates, one with soft gates; and their gates on X."""
    table = [ref.hard_gate(ref.draw(4, w, seed=5 + w)) for w in (3, 4)]
    galu, soft = build("galu", 2, (3, 4)), soft_galu((3, 4))
    return [
        (frg((3, 4), table), table),
        (galu, ref.hard_gates(gate_layers(galu), X)),
        (soft, soft_gates(gate_layers(soft), X)),
    ]


@check("dgn.eq2", formula=first_output, mutants={"halved": 1 / 2})
def equation2(formula: Formula) -> Comparisons:
    """equation 2: ŷ(x) = φ_xᵀ w: features x(p₀)·A(x, p) of paths times their strengths"""
    for net, g in _gated_networks():
        yield formula(net, X), ref.path_features(values(net), g, X) @ ref.path_values(values(net))


@check(
    "dgn.features",
    formula=lambda net, X: kernels.npk(net, X, soft=True).dense(),
    mutants={"λ counts the input nodes too": 2},
)
def features(formula: Formula) -> Comparisons:
    """section 1: M = ΦᵀΦ = (xᵀx) ∘ λ"""
    for net, g in _gated_networks():
        phi = ref.path_features(values(net), g, X)
        yield formula(net, X), phi @ phi.T


@check(
    "dgn.lemma2.1",
    formula=lambda net: [signal_wire(net, X).gram, kernels.ntk(net, X, part="value").dense()],
    printed=lambda net: [signal_wire(net, X).printed],
)
def lemma2_1(formula: Formula) -> Comparisons:
    """Lemma 2.1, equations 4 and 9: K(s, s′) = Σ_ij x_s(i) x_s′(j) κ(s, s′, i, j), over pairs of paths from inputs i
    and j

    Erratum: only i = j is printed; paths from different inputs share later weights and interact, too (in the mean over
    symmetric weights they do not)
    """
    for net, g in _gated_networks():
        K = ref.gated_kernel(values(net), g, X)
        yield from ((found, K) for found in formula(net))


# --- deep linear networks ------------------------------------------------------------------------------------------


def _linear(net: GatedNetwork, X: Tensor) -> list[Tensor]:
    """ŷ, a row of Λ, and the number of active paths."""
    counts = torch.tensor(paths.count(net, X), dtype=torch.float64)
    return [first_output(net, X), kernels.overlap(net, X).dense()[0], counts]


@check(
    "dgn.eq13",
    formula=_linear,
    mutants={
        "with gates": lambda net, X: _linear(net.with_gate("hard"), X),
        "w^d paths": lambda net, X: [_linear(net, X)[0], *(3 * n for n in _linear(net, X)[1:])],
    },
)
def equation13(formula: Formula) -> Comparisons:
    """equations 13 to 15: a deep linear network is ŷ = xᵀη, η(i) = Σ_{p: p(0)=i} w(p), and λ = w^(d−1)"""
    net = build("dln", 2, (3, 3, 3))
    U = values(net)
    v, p = ref.path_values(U), ref.chain_paths(U)
    eta = torch.stack([v[p[:, 0] == i].sum() for i in range(2)])
    number = torch.full((len(X),), float((p[:, 0] == 0).sum()), dtype=torch.float64)
    yield from zip(formula(net, X), [X @ eta, number, number])


@check(
    "dgn.corollary8.1",
    formula=lambda x, w, d, sigma: x**2 * d * (w * sigma**2) ** (d - 1),
    printed=lambda x, w, d, sigma: d * (w * sigma**2) ** (d - 1),
)
def corollary8_1(formula: Formula) -> Comparisons:
    """Corollary 8.1: deep linear, d_in = n = 1: E[K₀] = x² d (wσ²)^(d−1)

    Erratum: printed without x²: it holds for x = 1, which is not stated (and needs Assumption 1, not 2)
    """
    x, w = 1.5, 2
    for d in (2, 3, 4):
        shapes = [(w, 1), *[(w, w)] * (d - 2), (1, w)]
        ones = [torch.ones(1, w, dtype=torch.float64)] * (d - 1)
        K = ref.kernels_over_signs(ones, torch.full((1, 1), x, dtype=torch.float64), shapes, 0.7)
        yield formula(x, w, d, 0.7), K.mean()
