"""Checks of limits of infinite width: Theorem 5.1 and appendix A of 'Neural path features'.

Limits are compared with wide networks and their autograd gradients; the tolerance is what the width allows, about 3/√w.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels
from pathlens.papers.checks.networks import assign, build, set_values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref

ORDER = 2
LAYERS, WIDE, RUNS = 3, 600, 5
X = torch.nn.functional.normalize(ref.draw(5, 4, seed=11), dim=1)
D = LAYERS + 1
Last = Literal["he", "lecun"]


def _chain(w: int, seed: int, last: float, signs: bool) -> list[Tensor]:
    """Weights N(0, 2/w) (or ±√(2/w)) in every layer but the last, which has variance last/w."""
    shapes = [(w, X.shape[1]), *[(w, w)] * (LAYERS - 1), (1, w)]
    drawn = [ref.draw(*s, seed=100 * seed + k) for k, s in enumerate(shapes)]
    drawn = [W.sign() for W in drawn] if signs else drawn
    # the first layer too, whatever the number of inputs: the convention of the appendix
    return [W * math.sqrt((last if k == LAYERS else 2.0) / w) for k, W in enumerate(drawn)]


@functools.cache
def _wide_relu(last: float, runs: int = 4) -> Tensor:
    """Mean NTK of wide ReLU networks."""
    found = [ref.tangent_kernel(lambda U: ref.relu_output(U, X), _chain(WIDE, s, last, False)) for s in range(runs)]
    return torch.stack(found).mean(0)


@functools.cache
def _wide_frozen(w: int, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gate layers, value weights ±√(2/w) and K^V of a network with independent, frozen ReLU gates."""
    layers = _chain(w, 50 + seed, 2.0, False)[:-1]
    U = _chain(w, seed, 2.0, True)
    return layers, U, ref.gated_kernel(U, ref.hard_gates(layers, X), X)


def _path_limit(w: int, layers: list[Tensor], U: list[Tensor]) -> Tensor:
    """d σ^(2(d−1)) H of the package."""
    net = set_values(build("galu", X.shape[1], (w,) * LAYERS), U)
    assert net.source is not None
    assign(net.source.parameters(), layers)
    return D * (2 / w) ** (D - 1) * kernels.npk(net, X).dense()


@check(
    "npf.theorem5.1",
    tolerance=4.0,
    formula=_path_limit,
    mutants={
        "without d": 1 / D,
        "σ^(2d)": lambda w, layers, U: 2 / w * _path_limit(w, layers, U),
    },
)
def theorem5_1(formula: Formula) -> Comparisons:
    """Theorem 5.1: K^V → d σ^(2(d−1)) H as w → ∞, for values ±σ independent of the gates; the distance times √w
    stays
    """
    errors = {}
    for w in (40, 160, 640):
        runs = [_wide_frozen(w, s) for s in range(RUNS)]
        errors[w] = float(np.mean([ref.distance(formula(w, *run[:2]), run[2]) for run in runs]))
        yield errors[w] * math.sqrt(w)
    falls = ", ".join(f"{e:.3f} at w = {w}" for w, e in errors.items())
    yield f"relative distance {falls}; the error is √w times that"


@check(
    "npf.limit",
    tolerance=0.1,
    formula=lambda: kernels.random_gate_limit(X, hidden_layers=LAYERS).dense(),
    printed=lambda: kernels.relu_ntk(X, hidden_layers=LAYERS).dense(),
)
def random_gates(formula: Formula) -> Comparisons:
    """section 5, second remark: with random ReLU gates that limit is d Σ ∘ Π_l Σ̂^(l)

    Erratum: 'K^(d) essentially becomes K_FNPF': they agree on the diagonal alone
    """
    K = torch.stack([_wide_frozen(640, s)[2] for s in range(RUNS)]).mean(0)
    found = formula()
    yield found, K
    yield f"diagonals differ by {ref.distance(found.diagonal(), K.diagonal()):.3f}"


# --- appendix A ----------------------------------------------------------------------------------------------------


def _relu_moments(theta: float) -> tuple[float, float]:
    """2E[χ(q)χ(q′)] and 2E[χ′(q)χ′(q′)] for unit Gaussians at angle θ, by quadrature over the plane's directions."""
    node, weight = np.polynomial.legendre.leggauss(60)
    low, high = theta - math.pi / 2, math.pi / 2  # both are positive between these directions
    phi = (high + low) / 2 + (high - low) / 2 * node
    weight = weight * (high - low) / 2
    return float(2 / math.pi * weight @ (np.cos(phi) * np.cos(phi - theta))), float(weight.sum() / math.pi)


def _recursion(rows: Tensor, last: Last) -> Tensor:
    """K^(d) of the appendix, with its expectations done by quadrature."""
    size = rows.norm(dim=1)
    scale = torch.outer(size, size)
    S = rows @ rows.T
    K = S.clone()
    for _ in range(LAYERS):
        angles = torch.arccos((S / scale).clamp(-1, 1)).fill_diagonal_(0.0)  # where arccos would lose half its digits
        pairs = np.vectorize(_relu_moments)(angles.numpy())
        S = scale * torch.from_numpy(pairs[0])
        K = K * torch.from_numpy(pairs[1]) + S
    return K if last == "he" else (K + S) / 2


def _limit(last: Last, rows: Tensor = X, layers: int = LAYERS) -> Tensor:
    return kernels.relu_ntk(rows, hidden_layers=layers, last_layer=last).dense()


@check(
    "npf.appendixA",
    tolerance=1e-11,
    formula=_limit,
    mutants={"one layer more": lambda last, rows: _limit(last, rows, LAYERS + 1)},
)
def appendix_a(formula: Formula) -> Comparisons:
    """appendix A, equation 2: Σ^(l+1), Σ̂^(l+1) and K̃^(l+1) in closed form are the Gaussian expectations of the
    recursion
    """
    rows = ref.draw(5, 4, seed=12)
    yield formula("he", rows), _recursion(rows, "he")
    yield formula("lecun", rows), _recursion(rows, "lecun")


@check("npf.appendixA_he", tolerance=0.1, formula=lambda: _limit("he"), printed=lambda: _limit("lecun"))
def he(formula: Formula) -> Comparisons:
    """appendix A, K^(d): all layers N(0, 2/w): the NTK tends to K̃^(d)

    Erratum: K^(d) = (K̃^(d) + Σ^(d))/2 is the limit for a last layer of variance 1/w, not for equal layers
    """
    yield formula(), _wide_relu(2.0)


@check("npf.appendixA_lecun", tolerance=0.1, formula=lambda: _limit("lecun"), mutants={"K̃^(d)": lambda: _limit("he")})
def lecun(formula: Formula) -> Comparisons:
    """appendix A, K^(d): last layer N(0, 1/w): the NTK tends to (K̃^(d) + Σ^(d))/2"""
    yield formula(), _wide_relu(1.0)
