"""Tiles by torch matrix products, on any device; the walk over the expression that other backends share.

The walk hands consecutive Gram factors of a product to one function, so that a backend which multiplies several of them
in one pass only replaces that function. May import only linops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pathlens.linops.backends import Pool
from pathlens.linops.indexing import as_tensor
from pathlens.linops.nodes import Gram, Hadamard, Leaf, Node, Scale, Side, Sum, exp2_scale, strip

Pair: TypeAlias = tuple[Side, Side]
GramProduct: TypeAlias = Callable[[Sequence[Pair], Tensor, Callable[[], Tensor]], None]


def gram_product(pairs: Sequence[Pair], out: Tensor, scratch: Callable[[], Tensor], start: bool = True) -> None:
    """Write ∘_f X_f Y_fᵀ to ``out``, or with ``start=False`` multiply it into ``out``."""
    for left, right in pairs:
        x, y = left.unit_rows(out.dtype), right.unit_rows(out.dtype)
        if start:
            torch.mm(x, y.T, out=out)
            start = False
        elif x.shape[1] == 1:  # rank one is a scaling of rows and columns: no product, no second buffer
            out.mul_(x).mul_(y.T)
        else:
            product = scratch()
            torch.mm(x, y.T, out=product)
            out.mul_(product)


def walk(node: Node, left: Side, right: Side, out: Tensor, pool: Pool, depth: int, grams: GramProduct) -> None:
    """Write the unit tile of ``node`` to ``out``, using pool buffers deeper than ``depth``."""

    def scratch() -> Tensor:
        return pool.take(depth + 1, *out.shape)

    node, left = strip(node, left)
    right = strip(right.node, right)[1]
    if isinstance(node, Gram):
        grams([(left, right)], out, scratch)
    elif isinstance(node, Leaf):
        assert left.shift is not None and right.shift is not None
        device = node.operator.device
        tile = node.operator.tile(as_tensor(left.index, device), as_tensor(right.index, device))
        out.copy_(exp2_scale(exp2_scale(tile, left.shift[:, None]), right.shift[None, :]))
    elif isinstance(node, Scale):
        walk(node.child, left.parts[0], right.parts[0], out, pool, depth, grams)
        out.mul_(node.mantissa)
    elif isinstance(node, Hadamard):
        pairs, others = [], []
        for child, x, y in zip(node.children(), left.parts, right.parts):
            inner, below = strip(child, x)
            if isinstance(inner, Gram):
                pairs.append((below, strip(child, y)[1]))
            else:
                others.append((child, x, y))
        if pairs:
            grams(pairs, out, scratch)
        else:
            walk(*others.pop(0), out, pool, depth, grams)
        for child, x, y in others:
            part = scratch()
            walk(child, x, y, part, pool, depth + 1, grams)
            out.mul_(part)
    elif isinstance(node, Sum):
        for at, (child, x, y) in enumerate(zip(node.children(), left.parts, right.parts)):
            if at == 0:
                walk(child, x, y, out, pool, depth, grams)
            else:
                part = scratch()
                walk(child, x, y, part, pool, depth + 1, grams)
                out.add_(part)
    else:
        raise AssertionError(f"unknown node {type(node).__name__}")


class TorchBackend:
    """Matrix products on the device of the factors."""

    name = "torch"

    def exactly_symmetric(self, node: Node) -> bool:
        return False  # a matrix product may add up the edges of its blocks in another order

    def gram_flops(self, gram: Gram) -> float:
        return 2.0 * gram.r

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        walk(node, left, right, out, pool, 0, gram_product)


BACKEND = TorchBackend()
