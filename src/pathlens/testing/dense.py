"""Dense float64 references of the kernel operators: the formula written out, without tiles, scales or backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]


def dense_gram_sum(terms: Sequence[Sequence[Pair]]) -> Tensor:
    """Σ_t ∘_f F_{t,f} G_{t,f}ᵀ in float64, (n, m).

    >>> x = torch.tensor([[1.0], [2.0]])
    >>> dense_gram_sum([[(x, x), (x, x)]])
    tensor([[ 1.,  4.],
            [ 4., 16.]], dtype=torch.float64)
    """
    return _sum_of_products([[left.double() @ right.double().T for left, right in term] for term in terms])


def _sum_of_products(terms: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(list(factors)).prod(0) for factors in terms]).sum(0)


def self_kernels(terms: Sequence[Sequence[Pair]]) -> Pair:
    """(k_ii of the rows, k_jj of the columns): the scales of errors, also for cross kernels.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> self_kernels([[(x, x)]])[0]
    tensor([25.], dtype=torch.float64)
    """
    rows, cols = ([[pair[side].double().square().sum(1) for pair in term] for term in terms] for side in (0, 1))
    return _sum_of_products(rows), _sum_of_products(cols)


def dense_counts(terms: Sequence[Sequence[Pair]]) -> np.ndarray:
    """The same sum for 0/1 factors in Python integers, an object array (n, m).

    >>> ones = torch.ones(1, 500)
    >>> dense_counts([[(ones, ones)] * 20])[0, 0] == 500**20
    True
    """

    def integers(bits: Tensor) -> np.ndarray:
        return bits.double().numpy().astype(int).astype(object)

    grams = [[integers(left) @ integers(right).T for left, right in term] for term in terms]
    return np.sum([np.prod(factors, axis=0) for factors in grams], axis=0)
