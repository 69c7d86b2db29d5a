"""Reference implementations from weights alone: networks written out, sums over all paths, all signs, autograd.

Slow and exact, for networks of a few units. The module imports nothing of the package, so that an error there cannot
hide here. Weights are a list U_1, …, U_D of shapes (w_l, w_{l−1}), w_0 = d; gates are a list of shapes (n, w_l).
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


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, float64, from a seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- networks written out ----------------------------------------------------------------------------------------


def preactivations(
    weights: Weights,
    X: Tensor,
    unit: Callable[[Tensor], Tensor] = torch.relu,
    biases: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """q_l = W_l a(q_{l−1}) + b_l of every layer, a(q_0) read as x; `unit` is a, the identity makes a linear network.

    >>> preactivations([torch.tensor([[1.0], [-1.0]])], torch.tensor([[3.0]]))
    [tensor([[ 3., -3.]])]
    """
    found, z = [], X
    for W, b in zip(weights, biases or [None] * len(weights)):
        found.append(torch.nn.functional.linear(z, W, b))
        z = unit(found[-1])
    return found


def linear(q: Tensor) -> Tensor:
    """The identity: `preactivations(weights, X, linear)` are those of a deep linear network."""
    return q


def hard_gate(q: Tensor) -> Tensor:
    """1[q > 0]."""
    return (q > 0).to(q.dtype)


def hard_gates(weights: Weights, X: Tensor, unit: Callable[[Tensor], Tensor] = torch.relu) -> list[Tensor]:
    """1[q > 0] of hidden layers."""
    return [hard_gate(q) for q in preactivations(weights, X, unit)]


def soft_gate(q: Tensor, beta: float, epsilon: float = 0.0) -> Tensor:
    """χ_ε(−βq) = (1 + ε)/(1 + e^{−βq})."""
    return (1 + epsilon) / (1 + torch.exp(-beta * q))


def relu_output(weights: Weights, X: Tensor) -> Tensor:
    """ŷ (n,): the first output of a ReLU network; differentiable."""
    return preactivations(weights, X)[-1][:, 0]


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


def shared_paths(gates: Weights) -> Tensor:
    """|A(x) ∩ A(x′)|: the number of paths of hidden units that are active for both inputs, by enumeration, (n, n)."""
    A = path_activity(gates, all_paths([1, *(g.shape[1] for g in gates)]))
    return A @ A.T


def path_features(weights: Weights, gates: Weights, X: Tensor) -> Tensor:
    """φ_x(p) = x[p_0] A(x, p), (n, P)."""
    p = chain_paths(weights)
    return X[:, p[:, 0]] * path_activity(gates, p)


def path_sum(weights: Weights, gates: Weights, X: Tensor, biases: Sequence[Tensor | None] | None = None) -> Tensor:
    """All outputs (n, c) of a gated network as sums over its paths, in float64.

    ŷ_c(x) = Σ_{i_0,…,i_L} x_{i_0} · Π_l g_l(x)_{i_l} U_l[i_l, i_{l−1}] · U_{L+1}[c, i_L]
           + Σ_{s=1}^{L+1} Σ_{i_s,…,i_L} b_s[i_s] · (the factors from layer s on).

    Without biases this is Theorem 1 (gates of the units' own pre-activations) and Theorem 2 (gates of a separate
    network) of the half-space paper; with `X` all ones it is the piecewise-constant network. A bias is the weight of
    a further unit whose value is always 1.

    Examples
    --------
    >>> u = [torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0, 10.0]])]
    >>> path_sum(u, [torch.tensor([[1.0, 0.0]])], torch.tensor([[5.0]]))
    tensor([[10.]], dtype=torch.float64)
    """
    U, g, x = [W.detach().double() for W in weights], [h.detach().double() for h in gates], X.detach().double()
    outputs = len(U[-1])
    if biases is not None:
        one = torch.ones(len(x), 1, dtype=torch.float64)
        x, g = torch.cat([x, one], 1), [torch.cat([h, one], 1) for h in g]
        U = [_with_bias(W, b) for W, b in zip(U, biases)]
    phi = path_features(U, g, x)
    return torch.stack([phi @ path_values([*U[:-1], U[-1][k:]]) for k in range(outputs)], 1)


def _with_bias(W: Tensor, bias: Tensor | None) -> Tensor:
    """[[W, b], [0, 1]]: a layer that reads and passes on a unit whose value is always 1."""
    extended = torch.nn.functional.pad(W, (0, 1, 0, 1))
    extended[-1, -1] = 1.0
    if bias is not None:
        extended[:-1, -1] = bias.detach()
    return extended


# --- derivatives -------------------------------------------------------------------------------------------------


def jacobian(f: Callable[[list[Tensor]], Tensor], weights: Weights) -> Tensor:
    """∂f/∂θ by reverse-mode autograd, (*shape of f, number of weights): `f` reads the list of all weights.

    >>> jacobian(lambda U: U[0] @ U[1], [torch.ones(3, 2), torch.ones(2)]).shape
    torch.Size([3, 8])
    """
    blocks = torch.func.jacrev(f)(list(weights))
    return torch.cat([b.reshape(*b.shape[: b.ndim - W.ndim], -1) for b, W in zip(blocks, weights)], -1).detach()


def tangent_kernel(f: Callable[[list[Tensor]], Tensor], weights: Weights) -> Tensor:
    """⟨∂f_s/∂θ, ∂f_t/∂θ⟩, (n, n)."""
    J = jacobian(f, weights)
    return J @ J.T


def gated_kernel(weights: Weights, gates: Weights, X: Tensor) -> Tensor:
    """The tangent kernel of the values behind fixed gates, (n, n)."""
    return tangent_kernel(lambda U: gated_output(U, gates, X), weights)


def descent_direction(loss: Callable[[list[Tensor]], Tensor], weights: Weights) -> list[Tensor]:
    """−∂loss/∂θ, one tensor per weight."""
    return [-g for g in torch.func.grad(loss)(list(weights))]


def derivative(f: Callable[[list[Tensor]], Tensor], weights: Weights, direction: Weights) -> Tensor:
    """d f(θ + α·direction)/dα at α = 0, exactly, by a forward-mode product."""
    return torch.func.jvp(f, (list(weights),), (list(direction),))[1].detach()


def gradient_step(f: Callable[[list[Tensor]], Tensor], loss: Callable[[Tensor], Tensor], weights: Weights) -> Tensor:
    """d f(θ − α ∇loss)/dα at α = 0: how gradient descent changes the outputs."""
    return derivative(f, weights, descent_direction(lambda U: loss(f(U)), weights))


# --- all signs -------------------------------------------------------------------------------------------------


def unflatten(theta: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """A vector as weights of these shapes."""
    sizes = [math.prod(s) for s in shapes]
    return [part.reshape(tuple(s)) for part, s in zip(theta.split(sizes), shapes)]


def all_signs(count: int) -> Tensor:
    """Every vector of ±1, (2^count, count)."""
    bits = torch.arange(2**count)[:, None] >> torch.arange(count)
    return 1.0 - 2.0 * (bits & 1).double()


def over_signs(f: Callable[[list[Tensor]], Tensor], shapes: Sequence[Sequence[int]], sigma: float) -> Tensor:
    """f of every assignment of ±σ to all weights of these shapes, stacked: (2^count, …).

    Its mean is the exact expectation under the papers' symmetric Bernoulli initialisation.
    """
    theta = sigma * all_signs(sum(math.prod(s) for s in shapes))
    return torch.func.vmap(lambda t: f(unflatten(t, shapes)), chunk_size=4096)(theta).detach()


def kernels_over_signs(gates: Weights, X: Tensor, shapes: Sequence[Sequence[int]], sigma: float) -> Tensor:
    """The tangent kernel of the values behind fixed gates at every assignment of signs, (2^count, n, n)."""
    return over_signs(lambda weights: gated_kernel(weights, gates, X), shapes, sigma)


# --- the plane, cut by angle -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sector:
    """Angles (start, end) of the plane on which all gates are constant, and those gates, layer by layer."""

    start: float
    end: float
    bits: tuple[tuple[bool, ...], ...]

    def area(self) -> float:
        """Area of the part inside the box [−1, 1]²; the distance to the border is 1/max(|cos|, |sin|)."""
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
