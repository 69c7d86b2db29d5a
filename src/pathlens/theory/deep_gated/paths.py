"""Paths of tiny networks, listed one by one, and bundles of paths that share all their weights.

The path kernel of a network of any size is :func:`pathlens.kernels.npk`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pathlens.errors import OptionError, RecordError, ShapeError
from pathlens.kernels import npk, ntk
from pathlens.models import GatedNetwork
from pathlens.paths.trellis import take_trellis
from pathlens.recording import as_rows
from pathlens.theory.deep_gated.gradients import check_gated, check_output, read_chain
from pathlens.theory.inputs import float_array

LONGEST_LIST = 20_000  #: largest number of paths or bundles that are listed; a P × P kernel of them takes 3 GB


def _check_length(what: str, total: int, kind: str) -> None:
    if total > LONGEST_LIST:
        raise OptionError(
            f"{what}: the network has {total} {kind}, at most {LONGEST_LIST} are listed. For larger networks use "
            "pathlens.kernels.npk and ntk, which need no list."
        )


@dataclass(frozen=True)
class _LinearModel:
    """f(x) = Σ_p φ_x(p) v(p) over paths or bundles p with strengths v (P,) and features φ (n, P)."""

    strengths: np.ndarray
    features: np.ndarray

    @property
    def outputs(self) -> np.ndarray:
        """f(x), (n,) (NPF, Proposition 2.1)."""
        return self.features @ self.strengths

    @property
    def kernel(self) -> np.ndarray:
        """Neural path kernel H = ΦᵀΦ, (n, n)."""
        return self.features @ self.features.T


# --- every path ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathTable(_LinearModel):
    """Every path of a tiny network: its units, its value, and its feature for each input.

    Attributes
    ----------
    strengths : (P,)
        v(p), the product of the d = L + 1 weights (neural path value).
    features : (n, P)
        φ_x(p) = x(p₀) A(x, p) (neural path feature), so that f = φ·v.
    units : (P, L + 1)
        Input node and one unit per hidden layer, counted from 0; the last layer's unit runs fastest.
    activity : (n, P)
        A(x, p), the product of the gates.
    weights : (d, P)
        The weights along each path.
    """

    units: np.ndarray
    activity: np.ndarray
    weights: np.ndarray

    @property
    def value_tangent_kernel(self) -> np.ndarray:
        """V(p, q) = ⟨∂v(p)/∂Θ, ∂v(q)/∂Θ⟩, (P, P): for each weight that both paths use, the products of the others.

        It depends on the weights alone, not on gates or inputs (NPF, Definition 3.2), and K = Φᵀ V Φ.
        """
        ends = np.concatenate([self.units, np.zeros((len(self.units), 1), dtype=int)], axis=1)
        V = np.zeros((len(self.units),) * 2)
        for k in range(len(self.weights)):
            others = np.prod(np.delete(self.weights, k, axis=0), axis=0)
            edge = ends[:, k] * (1 + ends.max()) + ends[:, k + 1]
            V += (edge[:, None] == edge) * np.outer(others, others)
        return V

    @property
    def gram(self) -> np.ndarray:
        """K = Φᵀ V Φ, the tangent kernel of the values from paths alone, (n, n) (NPF, Proposition 3.1)."""
        return self.features @ self.value_tangent_kernel @ self.features.T

    def __repr__(self) -> str:
        active = ", ".join(str(int(k)) for k in (self.activity > 0).sum(1)[:8])
        more = ", …" if len(self.activity) > 8 else ""
        return f"PathTable({len(self.units)} paths, {len(self.activity)} inputs; active: {active}{more})"


def path_table(net: GatedNetwork, X: Any, *, output: int = 0) -> PathTable:
    """List every path of a tiny fully connected network without biases, inputs counted as nodes (NPF, Definition 2.1).

    Examples
    --------
    >>> from pathlens import models
    >>> path_table(models.relu(2, hidden=(3, 3), seed=0), torch.ones(1, 2)).units.shape
    (18, 3)
    """
    x, weights, gates = read_chain("path_table", net, X, output)
    if not take_trellis("path_table", net, X, include_inputs=True).direct:
        raise RecordError(
            "path_table: the first layer reads transformed inputs, so its columns do not correspond to input nodes. "
            "Apply the transformation before the network: path_table(net, transform(X))."
        )
    sizes = [x.shape[1], *(g.shape[1] for g in gates)]
    total = math.prod(sizes)
    _check_length("path_table", total, "paths")
    units = np.stack([k.ravel() for k in np.meshgrid(*map(np.arange, sizes), indexing="ij")], axis=1)
    ends = [*units.T, np.full(total, output)]
    along = np.stack([w[ends[k + 1], ends[k]] for k, w in enumerate(weights)])
    activity = np.prod([g[:, units[:, k + 1]] for k, g in enumerate(gates)], axis=0)
    return PathTable(along.prod(0), x[:, units[:, 0]] * activity, units, activity, along)


@dataclass(frozen=True)
class RhoBound:
    """ρ_min(K) ≤ ρ_min(H) ρ_max(V): a tangent kernel is well conditioned only if the path kernel is (NPF, Prop. 3.3).

    Attributes
    ----------
    ntk_smallest, npk_smallest, vtk_largest
        ρ_min(K), ρ_min(H), ρ_max(V).
    """

    ntk_smallest: float
    npk_smallest: float
    vtk_largest: float

    @property
    def bound(self) -> float:
        """ρ_min(H) ρ_max(V)."""
        return self.npk_smallest * self.vtk_largest


def rho_bound(net: GatedNetwork, X: Any, *, output: int = 0) -> RhoBound:
    """Smallest eigenvalues of the tangent and the path kernel, and the largest of the value tangent kernel.

    For networks small enough for `path_table`; the two n × n kernels come from :mod:`pathlens.kernels`. K is that of
    one output and of the values alone; soft gates are held fixed, and are soft in H too.

    Examples
    --------
    >>> from pathlens import models
    >>> found = rho_bound(models.relu(3, hidden=(4, 4), seed=0).double(), torch.eye(3, dtype=torch.float64))
    >>> found.ntk_smallest <= found.bound + 1e-12
    True
    """
    table = path_table(net, X, output=output)
    kernels = ntk(net, X, part="value", outputs=output, frozen=True), npk(net, X, soft=True)
    K, H = (np.linalg.eigvalsh(float_array(kernel.dense())) for kernel in kernels)
    return RhoBound(float(K[0]), float(H[0]), float(np.linalg.eigvalsh(table.value_tangent_kernel)[-1]))


# --- circular convolutions (DGN, section 4 and Lemma 4.1) ----------------------------------------------------------


@dataclass(frozen=True)
class Bundles(_LinearModel):
    """Paths of a circular convolutional network with global average pooling, grouped by the weights that they use.

    A bundle holds one path per end position. Its ``kernel`` is P⁻² Σ_b Σ_{p, q in b} of the products of their terms:
    Lemma 4.1 without σ^{2(d−1)}.

    Attributes
    ----------
    strengths : (B,)
        Product of the weights, output weight included.
    features : (n, B)
        φ_x(b), the mean over end positions of x(start)·(gates along the path), so that f = φ·v.
    offsets : (B, L)
        Kernel position that the paths use in each convolution.
    channels : (B, L + 1)
        Channel in the input and behind each convolution.
    terms : (n, B, P)
        x(start)·gates of the path that ends at each position.
    """

    offsets: np.ndarray
    channels: np.ndarray
    terms: np.ndarray

    @property
    def rotations(self) -> np.ndarray:
        """H split by the distance r of the two paths' positions, (P, n, n): H = Σ_r H_r.

        H_0 is the kernel of a single position, without pooling; the other terms compare s with rotations of t.
        """
        P = self.terms.shape[2]
        turned = (np.roll(self.terms, -r, axis=2) for r in range(P))
        return np.stack([np.einsum("sbp,tbp->st", self.terms, other) for other in turned]) / P**2

    @property
    def paths(self) -> int:
        """Number of paths, P per bundle."""
        return self.terms.shape[1] * self.terms.shape[2]

    def __repr__(self) -> str:
        n, B, P = self.terms.shape
        return f"Bundles({self.paths} paths in {B} bundles of {P}, {n} inputs)"


def path_bundles(net: GatedNetwork, X: Any, *, gates: Sequence[Any] | None = None, output: int = 0) -> Bundles:
    """List the bundles of a gated `models.CircularConvNet` with average pooling and no hidden dense layer.

    Parameters
    ----------
    net : GatedNetwork
        ``gated_twin(CircularConvNet(length, channels, kernel), kind, example=X)``, without biases.
    X : (n, C, P)
        Inputs of P positions.
    gates : L arrays (n, C_l, P), optional
        Replace the network's own gates, for example by gates that do not rotate with the input.
    output : int

    Returns
    -------
    Bundles. Exact; n·P·B numbers, B = C ∏ kernel·C_l.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.randn(2, 1, 3)
    >>> path_bundles(models.gated_twin(models.CircularConvNet(3, (1, 1, 1, 1)), "galu", example=X), X)
    Bundles(24 paths in 8 bundles of 3, 2 inputs)
    """
    check_gated("path_bundles", net)
    modules = list(net.values.modules())
    convolutions = [m for m in modules if isinstance(m, nn.Conv1d)]
    dense = [m for m in modules if isinstance(m, nn.Linear)]
    pooled = any(isinstance(m, nn.AdaptiveAvgPool1d) for m in modules)
    biased = any(m.bias is not None for m in (*convolutions, *dense))
    if not convolutions or len(convolutions) != len(net.sites) or len(dense) != 1 or not pooled or biased:
        raise OptionError(
            "path_bundles: expected a CircularConvNet with pool='average', dense=() and bias=False. "
            "For other networks use pathlens.kernels.npk."
        )
    check_output("path_bundles", output, dense[0].out_features)
    x = as_rows(X, like=net)
    with torch.no_grad():
        own = [float_array(g) for g in net.gates(x).values()]
    used = own if gates is None else [float_array(g) for g in gates]
    if [g.shape for g in used] != [g.shape for g in own]:
        raise ShapeError(
            f"path_bundles: gates have shapes {[g.shape for g in used]}, expected {[g.shape for g in own]}."
        )
    start = float_array(torch.ones_like(x) if net.value_input == "ones" else x)
    weights = [float_array(m.weight) for m in convolutions]
    last = float_array(dense[0].weight)[output]
    _check_length("path_bundles", start.shape[1] * math.prod(w.shape[0] * w.shape[2] for w in weights), "bundles")
    found: list[Any] = [((), (c,), 1.0, start[:, c]) for c in range(start.shape[1])]
    for w, g in zip(weights, used):
        # h(p) = Σ_k W_k x(p + k): the path that ends at p came from p + k
        found = [
            ((*offsets, k), (*channels, c), strength * w[c, channels[-1], k], g[:, c] * np.roll(terms, -k, axis=1))
            for offsets, channels, strength, terms in found
            for c, k in itertools.product(range(w.shape[0]), range(w.shape[2]))
        ]
    offsets, channels, strengths, terms = (np.array(column) for column in zip(*found))
    terms = terms.swapaxes(0, 1)
    return Bundles(strengths * last[channels[:, -1]], terms.mean(2), offsets, channels, terms)
