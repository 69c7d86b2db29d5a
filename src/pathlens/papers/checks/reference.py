"""The other side of every check: networks written out, sums over all paths, all signs of all weights, autograd.

Slow and exact, float64, for networks of a few units. It imports nothing of the package, so that an error there cannot
hide here. A chain of weights is a list U_1, …, U_D of shapes (w_l, w_{l−1}); gates are a list of (n, w_l).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = Sequence[Tensor]


def distance(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖ over all entries; the plain norm where nothing is expected.

    >>> distance([1.0, 2.0], [1.0, 1.0])
    0.7071067811865475
    """
    a, b = (np.asarray(v.detach() if isinstance(v, Tensor) else v, dtype=np.float64) for v in (found, expected))
    if a.shape != b.shape:
        return math.inf
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, float64, from a seed."""
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- networks written out ----------------------------------------------------------------------------------------


def open_where_positive(q: Tensor) -> Tensor:
    """1[q > 0]."""
    return (q > 0).to(q.dtype)


def scores(layers: Weights, X: Tensor, unit: Callable[[Tensor], Tensor] = torch.relu) -> list[Tensor]:
    """Pre-activations of hidden layers: q_l = W_l a(q_{l−1}); the identity as unit makes the network linear."""
    found, z = [], X
    for W in layers:
        found.append(z @ W.T)
        z = unit(found[-1])
    return found


def hard_gates(layers: Weights, X: Tensor, unit: Callable[[Tensor], Tensor] = torch.relu) -> list[Tensor]:
    """1[q > 0] of hidden layers."""
    return [open_where_positive(q) for q in scores(layers, X, unit)]


def soft_gate(q: Tensor, beta: float, epsilon: float) -> Tensor:
    """χ_ε(−βq) = (1 + ε)/(1 + e^{−βq})."""
    return (1 + epsilon) / (1 + torch.exp(-beta * q))


def gated_output(weights: Weights, gates: Weights, X: Tensor) -> Tensor:
    """ŷ (n,): the first output of the network with these gates, layer by layer; differentiable in everything."""
    z = X
    for W, g in zip(weights[:-1], gates):
        z = (z @ W.T) * g
    return (z @ weights[-1].T)[:, 0]


# --- paths -----------------------------------------------------------------------------------------------------


def all_paths(widths: Sequence[int]) -> Tensor:
    """Every choice of one node per layer, (P, layers); the last layer runs fastest.

    >>> all_paths((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    return torch.tensor(list(itertools.product(*(range(w) for w in widths)))).reshape(-1, len(widths))


def chain_paths(weights: Weights) -> Tensor:
    """Paths of a chain: input node, then one unit per hidden layer, (P, D)."""
    return all_paths([W.shape[1] for W in weights])


def path_values(weights: Weights) -> Tensor:
    """v(p) = Π_l U_l[p_l, p_{l−1}] to the first output, (P,); differentiable."""
    p = chain_paths(weights)
    v = weights[-1][0, p[:, -1]]
    for k in range(len(weights) - 1):
        v = v * weights[k][p[:, k + 1], p[:, k]]
    return v


def path_activity(gates: Weights, p: Tensor) -> Tensor:
    """A(x, p) = Π_l g_l(x)[p_l], (n, P); `p` starts with the input node."""
    A = torch.ones(len(gates[0]), len(p), dtype=torch.float64)
    for k, g in enumerate(gates):
        A = A * g[:, p[:, k + 1]]
    return A


def path_features(weights: Weights, gates: Weights, X: Tensor) -> Tensor:
    """φ_x(p) = x[p_0] A(x, p), (n, P)."""
    p = chain_paths(weights)
    return X[:, p[:, 0]] * path_activity(gates, p)


# --- derivatives -------------------------------------------------------------------------------------------------


def flat(parts: Weights) -> Tensor:
    """All weights as one vector."""
    return torch.cat([p.reshape(-1) for p in parts])


def unflat(theta: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """A vector as weights of these shapes."""
    sizes = [math.prod(s) for s in shapes]
    return [part.reshape(tuple(s)) for part, s in zip(theta.split(sizes), shapes)]


def shapes_of(weights: Weights) -> list[tuple[int, ...]]:
    return [tuple(W.shape) for W in weights]


def jacobian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∂f/∂θ by reverse-mode autograd, (outputs, parameters)."""
    return torch.func.jacrev(f)(theta).detach()


def tangent_kernel(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """⟨∂f_s/∂θ, ∂f_t/∂θ⟩, (n, n)."""
    J = jacobian(f, theta)
    return J @ J.T


def gated_kernel(weights: Weights, gates: Weights, X: Tensor) -> Tensor:
    """The tangent kernel of the values behind fixed gates, (n, n)."""
    shapes = shapes_of(weights)
    J = torch.func.jacrev(lambda theta: gated_output(unflat(theta, shapes), gates, X))(flat(weights))
    return J @ J.T


def gradient_step(f: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """d f(θ − α ∇loss)/dα at α = 0, exactly, by a forward-mode product: what gradient descent does to the outputs."""
    gradient = torch.func.grad(lambda t: loss(f(t)))(theta)
    return torch.func.jvp(f, (theta,), (-gradient,))[1].detach()


# --- all signs -------------------------------------------------------------------------------------------------


def all_signs(count: int) -> Tensor:
    """Every vector of ±1, (2^count, count)."""
    bits = torch.arange(2**count)[:, None] >> torch.arange(count)
    return 1.0 - 2.0 * (bits & 1).double()


def over_signs(f: Callable[[list[Tensor]], Tensor], shapes: Sequence[Sequence[int]], sigma: float) -> Tensor:
    """f of every assignment of ±σ to all weights of these shapes, stacked: (2^count, …).

    Its mean is the exact expectation under the papers' symmetric Bernoulli initialisation.
    """
    theta = sigma * all_signs(sum(math.prod(s) for s in shapes))
    return torch.func.vmap(lambda t: f(unflat(t, shapes)), chunk_size=4096)(theta).detach()


def kernels_over_signs(gates: Weights, X: Tensor, shapes: Sequence[Sequence[int]], sigma: float) -> Tensor:
    """The tangent kernel of the values behind fixed gates at every assignment of signs, (2^count, n, n)."""
    return over_signs(lambda weights: gated_kernel(weights, gates, X), shapes, sigma)


# --- the plane, cut by angle -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sector:
    """Angles (start, end) of the plane on which all gates stand still, and those gates, layer by layer."""

    start: float
    end: float
    bits: tuple[tuple[bool, ...], ...]

    def area(self) -> float:
        """Of its part of the box [−1, 1]²; the distance to the border is 1/max(|cos|, |sin|)."""
        edges = [self.start, self.end]
        edges += [a for k in range(-8, 17) if self.start < (a := (2 * k + 1) * math.pi / 4) < self.end]
        edges.sort()
        total = 0.0
        for a, b in itertools.pairwise(edges):
            middle = round((a + b) / math.pi) * math.pi / 2  # the nearest axis
            total += (math.tan(b - middle) - math.tan(a - middle)) / 2
        return total


def sectors(layers: Weights, relu: bool) -> list[Sector]:
    """All cells of bias-free hidden layers on two inputs: cones, found by solving for the angles where a unit is zero.

    With `relu` a layer reads the units that are on, else all of them (the linear gate network of a DLGN).
    """
    done: list[Sector] = []

    def split(start: float, end: float, A: np.ndarray, layer: int, bits: tuple[tuple[bool, ...], ...]) -> None:
        if layer == len(layers):
            done.append(Sector(start, end, bits))
            return
        rows = layers[layer].detach().numpy() @ A  # pre-activation = row · (cos, sin)
        zeros = [math.atan2(-r[0], r[1]) + k * math.pi for r in rows for k in range(-3, 4)]
        cuts = [start, *sorted(z for z in zeros if start + 1e-13 < z < end - 1e-13), end]
        for a, b in itertools.pairwise(cuts):
            on = rows @ np.array([math.cos((a + b) / 2), math.sin((a + b) / 2)]) > 0
            split(a, b, rows * on[:, None] if relu else rows, layer + 1, (*bits, tuple(on.tolist())))

    split(0.0, 2 * math.pi, np.eye(2), 0, ())
    if len(done) > 1 and done[0].bits == done[-1].bits:  # the angle 0 is no boundary
        first, last = done[0], done.pop()
        done[0] = Sector(last.start - 2 * math.pi, first.end, first.bits)
    return done


# --- linear flows ------------------------------------------------------------------------------------------------


def affine_flow(loss: Callable[[Tensor], Tensor], w0: Tensor, rate: float = 1.0) -> Callable[[float], np.ndarray]:
    """w(t) of ẇ = −rate·∇loss for a quadratic loss, by the matrix exponential of its autograd gradient and Hessian."""
    from scipy.linalg import expm

    zero = torch.zeros_like(w0)
    size = len(w0)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = -rate * torch.func.hessian(loss)(zero).numpy()
    system[:size, size] = -rate * torch.func.grad(loss)(zero).numpy()
    start = np.append(w0.numpy(), 1.0)
    return lambda t: (expm(system * t) @ start)[:size]
