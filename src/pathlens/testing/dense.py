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
    products = []
    for term in terms:
        grams = [left.double() @ right.double().T for left, right in term]
        products.append(torch.stack(grams).prod(0))
    return torch.stack(products).sum(0)


def self_kernels(terms: Sequence[Sequence[Pair]]) -> Pair:
    """(k_ii of the rows, k_jj of the columns): the scales that errors are measured by, also for cross kernels.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> self_kernels([[(x, x)]])[0]
    tensor([25.], dtype=torch.float64)
    """
    rows = sum(torch.stack([left.double().square().sum(1) for left, _ in term]).prod(0) for term in terms)
    cols = sum(torch.stack([right.double().square().sum(1) for _, right in term]).prod(0) for term in terms)
    assert isinstance(rows, Tensor) and isinstance(cols, Tensor)
    return rows, cols


def dense_counts(terms: Sequence[Sequence[Pair]]) -> np.ndarray:
    """The same sum for 0/1 factors in Python integers, an object array (n, m).

    >>> ones = torch.ones(1, 500)
    >>> dense_counts([[(ones, ones)] * 20])[0, 0] == 500**20
    True
    """
    total: np.ndarray | int = 0
    for term in terms:
        product: np.ndarray | int = 1
        for left, right in term:
            x, y = (side.double().numpy().astype(int).astype(object) for side in (left, right))
            gram = x @ y.T
            product = product * gram
        total = total + product
    assert isinstance(total, np.ndarray)
    return total
