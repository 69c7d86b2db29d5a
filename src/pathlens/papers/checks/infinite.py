"""Checks of limits of infinite width: Theorem 5.1 and appendix A of 'Neural path features'.

A limit is met by wide networks and their autograd gradients; tolerances are what the width allows, about 3/√w.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import build, gate_layers, set_values, values

LAYERS, WIDE, RUNS = 3, 600, 5
X = torch.nn.functional.normalize(ref.draw(5, 4, seed=11), dim=1)
D = LAYERS + 1


def _chain(w: int, seed: int, last: float, signs: bool) -> list[Tensor]:
    """Weights N(0, 2/w) (or ±√(2/w)) in every layer but the last, which has variance last/w."""
    shapes = [(w, X.shape[1]), *[(w, w)] * (LAYERS - 1), (1, w)]
    drawn = [ref.draw(*s, seed=100 * seed + k) for k, s in enumerate(shapes)]
    drawn = [W.sign() for W in drawn] if signs else drawn
    # the first layer too, whatever the number of inputs: the convention of the appendix
    return [W * math.sqrt((last if k == LAYERS else 2.0) / w) for k, W in enumerate(drawn)]


def _gram(weights: list[Tensor], gates: list[Tensor] | None = None) -> Tensor:
    """NTK by autograd; of the ReLU network, or with gates that stay."""
    U = [W.clone().requires_grad_() for W in weights]
    z = X
    for k, W in enumerate(U[:-1]):
        q = z @ W.T
        z = torch.relu(q) if gates is None else q * gates[k]
    rows = [torch.cat([g.reshape(-1) for g in torch.autograd.grad(f, U, retain_graph=True)]) for f in z @ U[-1][0]]
    J = torch.stack(rows)
    return J @ J.T


@functools.cache
def _wide_relu(last: float, runs: int = 4) -> Tensor:
    """Mean NTK of wide ReLU networks."""
    return torch.stack([_gram(_chain(WIDE, s, last, False)) for s in range(runs)]).mean(0)


@functools.cache
def _wide_frozen(w: int, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gate layers, value weights ±√(2/w) and K^V of a network with independent, frozen ReLU gates."""
    layers = _chain(w, 50 + seed, 2.0, False)[:-1]
    U = _chain(w, seed, 2.0, True)
    return layers, U, _gram(U, ref.hard_gates(layers, X))


def _path_limit(w: int, layers: list[Tensor], U: list[Tensor]) -> Tensor:
    """d σ^(2(d−1)) H of the package."""
    net = set_values(build("galu", X.shape[1], (w,) * LAYERS), U)
    with torch.no_grad():
        for p, W in zip(net.source.parameters(), layers):  # type: ignore[union-attr]
            p.copy_(W)
    assert len(gate_layers(net)) == LAYERS and len(values(net)) == D
    return D * (2 / w) ** (D - 1) * kernels.npk(net, X).dense()


@check(
    "npf.theorem5.1",
    "Theorem 5.1",
    "K^V → d σ^(2(d−1)) H as w → ∞, for values ±σ independent of the gates; the distance times √w stays",
    tolerance=4.0,
    formula=_path_limit,
    mutants={
        "without d": lambda w, layers, U: _path_limit(w, layers, U) / D,
        "σ^(2d)": lambda w, layers, U: 2 / w * _path_limit(w, layers, U),
    },
)
def theorem5_1(formula: Callable[..., Tensor]) -> Measured:
    widths = (40, 160, 640)
    errors = []
    for w in widths:
        runs = [_wide_frozen(w, s) for s in range(RUNS)]
        errors.append(float(np.mean([ref.distance(formula(w, *run[:2]), run[2]) for run in runs])))
    falls = ", ".join(f"{e:.3f} at w = {w}" for w, e in zip(widths, errors))
    return Measured(
        max(e * math.sqrt(w) for w, e in zip(widths, errors)), f"relative distance {falls}; the error is √w times that"
    )


@check(
    "npf.limit",
    "section 5, second remark",
    "with random ReLU gates that limit is d Σ ∘ Π_l Σ̂^(l)",
    tolerance=0.1,
    formula=lambda: kernels.random_gate_limit(X, hidden_layers=LAYERS).dense(),
    printed=lambda: kernels.relu_ntk(X, hidden_layers=LAYERS).dense(),
    erratum="'K^(d) essentially becomes K_FNPF': they agree on the diagonal alone",
)
def random_gates(formula: Callable[[], Tensor]) -> Measured:
    K = torch.stack([_wide_frozen(640, s)[2] for s in range(RUNS)]).mean(0)
    found = formula()
    return Measured(ref.distance(found, K), f"diagonals differ by {ref.distance(found.diagonal(), K.diagonal()):.3f}")


# --- appendix A ----------------------------------------------------------------------------------------------------


def _relu_moments(theta: float) -> tuple[float, float]:
    """2E[χ(q)χ(q′)] and 2E[χ′(q)χ′(q′)] for unit Gaussians at angle θ, by quadrature over the plane's directions."""
    node, weight = np.polynomial.legendre.leggauss(60)
    low, high = theta - math.pi / 2, math.pi / 2  # both are positive between these directions
    phi = (high + low) / 2 + (high - low) / 2 * node
    weight = weight * (high - low) / 2
    return float(2 / math.pi * weight @ (np.cos(phi) * np.cos(phi - theta))), float(weight.sum() / math.pi)


def _recursion(rows: Tensor, last: str) -> Tensor:
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


@check(
    "npf.appendixA",
    "appendix A, equation 2",
    "Σ^(l+1), Σ̂^(l+1) and K̃^(l+1) in closed form are the Gaussian expectations of the recursion",
    tolerance=1e-11,
    formula=lambda rows, last: kernels.relu_ntk(rows, hidden_layers=LAYERS, last_layer=last).dense(),
    mutants={
        "one layer more": lambda rows, last: kernels.relu_ntk(rows, hidden_layers=LAYERS + 1, last_layer=last).dense()
    },
)
def appendix_a(formula: Callable[..., Tensor]) -> float:
    rows = ref.draw(5, 4, seed=12)
    return max(ref.distance(formula(rows, last), _recursion(rows, last)) for last in ("he", "lecun"))


def _limit(last: str) -> Tensor:
    return kernels.relu_ntk(X, hidden_layers=LAYERS, last_layer=last).dense()  # type: ignore[arg-type]


@check(
    "npf.appendixA_he",
    "appendix A, K^(d)",
    "all layers N(0, 2/w): the NTK tends to K̃^(d)",
    tolerance=0.1,
    formula=lambda: _limit("he"),
    printed=lambda: _limit("lecun"),
    erratum="K^(d) = (K̃^(d) + Σ^(d))/2 is the limit for a last layer of variance 1/w, not for equal layers",
)
def he(formula: Callable[[], Tensor]) -> float:
    return ref.distance(formula(), _wide_relu(2.0))


@check(
    "npf.appendixA_lecun",
    "appendix A, K^(d)",
    "last layer N(0, 1/w): the NTK tends to (K̃^(d) + Σ^(d))/2",
    tolerance=0.1,
    formula=lambda: _limit("lecun"),
    mutants={"K̃^(d)": lambda: _limit("he")},
)
def lecun(formula: Callable[[], Tensor]) -> float:
    return ref.distance(formula(), _wide_relu(1.0))
