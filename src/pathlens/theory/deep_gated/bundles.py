"""Circular convolutions as bundles of paths that share all their weights (DGN, section 4 and Lemma 4.1).

Bundles are listed one by one, so networks must be tiny; the path kernel of any convolutional network is
:func:`pathlens.kernels.npk`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pathlens.errors import OptionError, ShapeError
from pathlens.models import GatedNetwork
from pathlens.recording import as_rows
from pathlens.theory.deep_gated.gradients import check_gated
from pathlens.theory.inputs import float_array

__all__ = ["Bundles", "path_bundles"]

MOST_BUNDLES = 20_000  #: largest number of bundles that `path_bundles` lists


@dataclass(frozen=True)
class Bundles:
    """Paths of a circular convolutional network with global average pooling, grouped by the weights that they use.

    A bundle holds one path per end position; f(x) = Σ_b w(b) φ_x(b) with the bundle's feature φ_x(b), the mean over
    end positions of x(start)·(gates along the path).

    Attributes
    ----------
    offsets : (B, L)
        Kernel position that the paths use in each convolution.
    channels : (B, L + 1)
        Channel in the input and behind each convolution.
    strengths : (B,)
        Product of the weights, output weight included.
    terms : (n, B, P)
        x(start)·gates of the path that ends at each position.
    """

    offsets: np.ndarray
    channels: np.ndarray
    strengths: np.ndarray
    terms: np.ndarray

    @property
    def features(self) -> np.ndarray:
        """φ_x(b), (n, B)."""
        return self.terms.mean(2)

    @property
    def outputs(self) -> np.ndarray:
        """f(x), (n,)."""
        return self.features @ self.strengths

    @property
    def kernel(self) -> np.ndarray:
        """H(s, t) = P⁻² Σ_b Σ_{p, q in b} of the products of their terms: Lemma 4.1 without σ^{2(d−1)}, (n, n)."""
        return self.features @ self.features.T

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
    convolutions = [m for m in net.values.modules() if isinstance(m, nn.Conv1d)]
    dense = [m for m in net.values.modules() if isinstance(m, nn.Linear)]
    pooled = any(isinstance(m, nn.AdaptiveAvgPool1d) for m in net.values.modules())
    biased = any(m.bias is not None for m in (*convolutions, *dense))
    if not convolutions or len(convolutions) != len(net.sites) or len(dense) != 1 or not pooled or biased:
        raise OptionError(
            "path_bundles: expected a CircularConvNet with pool='average', dense=() and bias=False. "
            "For other networks take pathlens.kernels.npk."
        )
    if not 0 <= output < dense[0].out_features:
        count = dense[0].out_features
        raise OptionError(f"path_bundles: output={output}, but the network has {count} outputs, numbered from 0.")
    x = as_rows(X, like=net)
    with torch.no_grad():
        own = [float_array(g) for g in net.gates(x).values()]
    used = own if gates is None else [np.asarray(g, dtype=np.float64) for g in gates]
    if [g.shape for g in used] != [g.shape for g in own]:
        raise ShapeError(
            f"path_bundles: gates have shapes {[g.shape for g in used]}, expected {[g.shape for g in own]}."
        )
    start = float_array(torch.ones_like(x) if net.value_input == "ones" else x)
    weights = [float_array(m.weight) for m in convolutions]
    last = float_array(dense[0].weight)[output]
    total = start.shape[1] * int(np.prod([w.shape[0] * w.shape[2] for w in weights]))
    if total > MOST_BUNDLES:
        raise OptionError(
            f"path_bundles: the network has {total} bundles, at most {MOST_BUNDLES} are listed. Take "
            "fewer channels, or pathlens.kernels.npk, which lists nothing."
        )
    found: list[Any] = [((), (c,), 1.0, start[:, c]) for c in range(start.shape[1])]
    for w, g in zip(weights, used):
        # h(p) = Σ_k W_k x(p + k): the path that ends at p came from p + k
        found = [
            ((*offsets, k), (*channels, c), strength * w[c, channels[-1], k], g[:, c] * np.roll(terms, -k, axis=1))
            for offsets, channels, strength, terms in found
            for c, k in itertools.product(range(w.shape[0]), range(w.shape[2]))
        ]
    offsets, channels, strengths, terms = zip(*found)
    ends = np.array(channels)
    return Bundles(np.array(offsets), ends, np.array(strengths) * last[ends[:, -1]], np.stack(terms, axis=1))
