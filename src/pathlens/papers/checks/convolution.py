"""Checks of section 4 of 'Deep gated networks': circular convolutions, pooling and bundles of paths."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pathlens import kernels
from pathlens.models import CircularConvNet, GatedNetwork, gated_twin
from pathlens.papers.checks.networks import gate_layers
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.testing import reference as ref
from pathlens.theory.deep_gated import path_bundles

ORDER = 4
LENGTH, KERNEL, LAYERS, SIGMA = 5, 2, 2, 0.8
SCALE = SIGMA ** (2 * LAYERS)
X = ref.draw(3, 1, LENGTH, seed=4)
SHAPES = [(KERNEL,)] * LAYERS


@functools.cache
def _network(pool: str) -> GatedNetwork:
    template = CircularConvNet(LENGTH, (1,) * (LAYERS + 1), KERNEL, pool=pool)
    net = gated_twin(template, "galu", example=X.float(), seed=3).double()
    if pool != "average":  # both networks have the same gate network
        assert net.source is not None
        net.source.load_state_dict(_network("average").source.state_dict())  # type: ignore[union-attr]
    return net


def _path_kernel(pool: str, X: Tensor, Y: Tensor | None = None) -> Tensor:
    return kernels.npk(_network(pool), X, Y).dense()


def _convolve(z: Tensor, kernel: Tensor) -> Tensor:
    """h(p) = Σ_k θ(k) z(p + k), indices modulo the length; z (n, length)."""
    return sum((kernel[k] * z.roll(-k, dims=1) for k in range(KERNEL)), torch.zeros_like(z))


def _gates(X: Tensor) -> list[Tensor]:
    z, found = X[:, 0], []
    for W in gate_layers(_network("average")):
        q = _convolve(z, W.reshape(-1))
        found.append(ref.hard_gate(q))
        z = torch.relu(q)
    return found


def _units(X: Tensor) -> Tensor:
    """x_s(L) for every assignment of ±σ to the kernels, (signs, n, length); the gates stay fixed."""
    gates = _gates(X)

    def run(weights: list[Tensor]) -> Tensor:
        z = X[:, 0]
        for W, g in zip(weights, gates):
            z = _convolve(z, W) * g
        return z

    return ref.over_signs(run, SHAPES, SIGMA)


def _pooled(X: Tensor, columns: Tensor) -> Tensor:
    """E of products of the pooled outputs."""
    left, right = _units(X).mean(2), _units(columns).mean(2)
    return left.T @ right / len(left)


def _of_bundles(X: Tensor) -> list[Any]:
    """The lemma's right-hand side, bundle by bundle and by the spatial recursion."""
    return [SCALE * K for K in (path_bundles(_network("average"), X).kernel, _path_kernel("average", X))]


@check(
    "dgn.lemma4.1",
    formula=_of_bundles,
    mutants={"paths pair with themselves alone": lambda X: [SCALE * path_bundles(_network("average"), X).rotations[0]]},
)
def lemma4_1(formula: Formula) -> Comparisons:
    """Lemma 4.1: pooled circular convolutions: E[x_s x_s′] = σ^(2L)/d_in² Σ over pairs of paths of one bundle, L
    convolutions
    """
    yield from ((found, _pooled(X, X)) for found in formula(X))


@check(
    "dgn.unpooled",
    formula=lambda X: SCALE * _path_kernel("flatten", X),
    printed=lambda X: LENGTH * SCALE * _path_kernel("average", X),
)
def unpooled(formula: Formula) -> Comparisons:
    """equation 7 and the text after it: without pooling E⟨x_s(L), x_s′(L)⟩ has pairs of paths that end at the same
    position alone

    Erratum: 'it is enough to consider global average pooling': a single position is not the pooled output
    """
    z = _units(X)
    yield formula(X), torch.einsum("ksp,ktp->st", z, z) / len(z)


@check(
    "dgn.translation",
    formula=lambda X, moved: SCALE * _path_kernel("average", X, moved),
    mutants={"without pooling": lambda X, moved: SCALE / LENGTH**2 * _path_kernel("flatten", X, moved)},
)
def translation(formula: Formula) -> Comparisons:
    """Lemma 4.1, remark: pooling makes the kernel blind to rotations of an input, if the gates rotate with it"""
    moved = X.roll(2, dims=2)
    yield from ((formula(X, moved), expected) for expected in (_pooled(X, X), _pooled(X, moved)))
