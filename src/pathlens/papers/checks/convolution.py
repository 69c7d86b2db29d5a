"""Checks of section 4 of 'Deep gated networks': circular convolutions, pooling and bundles of paths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathlens import kernels
from pathlens.models import CircularConvNet, GatedNetwork, gated_twin
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import check
from pathlens.theory.deep_gated.bundles import path_bundles

LENGTH, KERNEL, LAYERS, SIGMA = 5, 2, 2, 0.8
X = ref.draw(3, 1, LENGTH, seed=4)
SHAPES = [(KERNEL,)] * LAYERS


@functools.cache
def _network(pool: str) -> GatedNetwork:
    template = CircularConvNet(LENGTH, (1,) * (LAYERS + 1), KERNEL, pool=pool)
    net = gated_twin(template, "galu", example=X.float(), seed=3).double()
    if pool != "average":  # one gate network for both
        assert net.source is not None
        net.source.load_state_dict(_network("average").source.state_dict())  # type: ignore[union-attr]
    return net


def _convolve(z: Tensor, kernel: Tensor) -> Tensor:
    """h(p) = Σ_k θ(k) z(p + k), indices modulo the length; z (n, length)."""
    return sum((kernel[k] * z.roll(-k, dims=1) for k in range(KERNEL)), torch.zeros_like(z))


def _gates(X: Tensor) -> list[Tensor]:
    z, found = X[:, 0], []
    for W in [p.detach().reshape(-1) for p in _network("average").source.parameters()]:  # type: ignore[union-attr]
        q = _convolve(z, W)
        found.append(ref.open_where_positive(q))
        z = torch.relu(q)
    return found


def _units(X: Tensor) -> Tensor:
    """x_s(L) for every assignment of ±σ to the kernels, (signs, n, length); the gates stay."""
    gates = _gates(X)

    def run(weights: list[Tensor]) -> Tensor:
        z = X[:, 0]
        for W, g in zip(weights, gates):
            z = _convolve(z, W) * g
        return z

    return ref.over_signs(run, SHAPES, SIGMA)


def _pooled(X: Tensor, columns: Tensor | None = None) -> Tensor:
    """E of products of the pooled outputs."""
    left, right = _units(X).mean(2), _units(X if columns is None else columns).mean(2)
    return left.T @ right / len(left)


def _of_bundles(X: Tensor) -> list[Any]:
    """The lemma's right-hand side, bundle by bundle and by the spatial recursion."""
    net = _network("average")
    return [SIGMA ** (2 * LAYERS) * K for K in (path_bundles(net, X).kernel, kernels.npk(net, X).dense())]


@check(
    "dgn.lemma4.1",
    "Lemma 4.1",
    "pooled circular convolutions: E[x_s x_s′] = σ^(2L)/d_in² Σ over pairs of paths of one bundle, L convolutions",
    tolerance=1e-12,
    formula=_of_bundles,
    mutants={
        "paths pair with themselves alone": lambda X: [
            SIGMA ** (2 * LAYERS) * path_bundles(_network("average"), X).rotations[0]
        ]
    },
)
def lemma4_1(formula: Callable[..., list[Any]]) -> float:
    return max(ref.distance(found, _pooled(X)) for found in formula(X))


@check(
    "dgn.unpooled",
    "equation 7 and the text after it",
    "without pooling E⟨x_s(L), x_s′(L)⟩ has pairs of paths that end at the same position alone",
    tolerance=1e-12,
    formula=lambda X: SIGMA ** (2 * LAYERS) * kernels.npk(_network("flatten"), X).dense(),
    printed=lambda X: LENGTH * SIGMA ** (2 * LAYERS) * kernels.npk(_network("average"), X).dense(),
    erratum="'it is enough to consider global average pooling': a single position is not the pooled output",
)
def unpooled(formula: Callable[..., Tensor]) -> float:
    z = _units(X)
    return ref.distance(formula(X), torch.einsum("ksp,ktp->st", z, z) / len(z))


@check(
    "dgn.translation",
    "Lemma 4.1, remark",
    "pooling makes the kernel blind to rotations of an input, if the gates rotate with it",
    tolerance=1e-12,
    formula=lambda X, moved: SIGMA ** (2 * LAYERS) * kernels.npk(_network("average"), X, Y=moved).dense(),
    mutants={
        "without pooling": lambda X, moved: (
            SIGMA ** (2 * LAYERS) / LENGTH**2 * kernels.npk(_network("flatten"), X, Y=moved).dense()
        )
    },
)
def translation(formula: Callable[..., Tensor]) -> float:
    moved = X.roll(2, dims=2)
    return max(ref.distance(formula(X, moved), _pooled(X)), ref.distance(formula(X, moved), _pooled(X, moved)))
