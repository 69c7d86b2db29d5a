"""Tiles by torch matrix products, on any device; the walk over the expression that other backends share.

The walk passes all Gram factors of a product to one function, which a backend may replace by a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pathlens.indexing import as_tensor
from pathlens.linops.backends import Backend, Pool
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Side, Sum, exp2_scale, strip

Pair: TypeAlias = tuple[Side, Side]
Scratch: TypeAlias = Callable[[int], Tensor]  # tile-sized buffers by number
GramProduct: TypeAlias = Callable[[Sequence[Pair], Tensor, Scratch, bool], None]


def multiply_gram(pair: Pair, out: Tensor, spare: Callable[[], Tensor]) -> None:
    """out ∘= X Yᵀ."""
    _multiply(pair[0].unit_rows(out.dtype), pair[1].unit_rows(out.dtype), out, spare)


def gram_product(pairs: Sequence[Pair], out: Tensor, scratch: Scratch, add: bool) -> None:
    """Write ∘_f X_f Y_fᵀ to ``out``, or add it to ``out`` with ``add``."""
    product_of_grams([(x.unit_rows(out.dtype), y.unit_rows(out.dtype)) for x, y in pairs], out, scratch, add)


def _multiply(x: Tensor, y: Tensor, out: Tensor, spare: Callable[[], Tensor]) -> None:
    if x.shape[1] == 1:  # rank one: scale rows and columns, without a product or a second buffer
        out.mul_(x).mul_(y.T)
    else:
        out.mul_(torch.mm(x, y.T, out=spare()))


def product_of_grams(factors: Sequence[tuple[Tensor, Tensor]], out: Tensor, scratch: Scratch, add: bool) -> None:
    """`gram_product` of pairs of tensors, in as few passes as possible."""
    x, y = factors[0]
    if not add:
        torch.mm(x, y.T, out=out)
        for x, y in factors[1:]:
            _multiply(x, y, out, lambda: scratch(0))
    elif len(factors) == 1:
        out.addmm_(x, y.T)
    else:
        product = torch.mm(x, y.T, out=scratch(0))
        for x, y in factors[1:-1]:
            _multiply(x, y, product, lambda: scratch(1))
        x, y = factors[-1]
        out.addcmul_(product, torch.mm(x, y.T, out=scratch(1)))


def plain_terms(node: Node, side: Side, dtype: torch.dtype) -> list[list[Tensor]] | None:
    """The factors of Σ_t ∘_f F_tf F_tfᵀ if all are resident, unscaled and of the dtype; None for other nodes.

    Tiles of such a kernel need no sides, which cost as much as small products.
    """
    sums = zip(node.children, side.parts) if isinstance(node, Sum) else [(node, side)]
    terms: list[list[Tensor]] = []
    for child, part in sums:
        grams = list(zip(child.children, part.parts)) if isinstance(child, Hadamard) else [(child, part)]
        if not all(
            isinstance(g, Gram) and at.unshifted and not g.left.streamed and g.left.dtype == dtype for g, at in grams
        ):
            return None
        terms.append([at.unit_rows(dtype) for _, at in grams])
    return terms


def walk(
    node: Node, left: Side, right: Side, out: Tensor, pool: Pool, depth: int, grams: GramProduct, add: bool = False
) -> None:
    """Write the unit tile of ``node`` to ``out``, or add it with ``add``; uses pool buffers deeper than ``depth``."""

    def scratch(at: int) -> Tensor:
        return pool.take(depth + 1 + at, *out.shape)

    node, left = strip(node, left)
    right = strip(right.node, right)[1]
    if isinstance(node, Sum):
        for child, x, y in zip(node.children, left.parts, right.parts):
            walk(child, x, y, out, pool, depth, grams, add)
            add = True
    elif isinstance(node, Gram):
        grams([(left, right)], out, scratch, add)
    elif isinstance(node, Hadamard):
        pairs, others = [], []
        for child, x, y in zip(node.children, left.parts, right.parts):
            inner, below = strip(child, x)
            if isinstance(inner, Gram):
                pairs.append((below, strip(child, y)[1]))
            else:
                others.append((child, x, y))
        if not others:
            grams(pairs, out, scratch, add)
            return
        product, depth = (scratch(0), depth + 1) if add else (out, depth)
        if pairs:
            grams(pairs, product, scratch, False)
        else:
            walk(*others.pop(0), product, pool, depth, grams)
        for at, (child, x, y) in enumerate(others, 1):
            walk(child, x, y, scratch(0), pool, depth + 1, grams)
            if add and at == len(others):
                out.addcmul_(product, scratch(0))
            else:
                product.mul_(scratch(0))
        if add and not others:
            out.add_(product)
    elif add:
        walk(node, left, right, scratch(0), pool, depth + 1, grams)
        out.add_(scratch(0))
    elif isinstance(node, Scaled):
        walk(node.child, left.parts[0], right.parts[0], out, pool, depth, grams)
        out.mul_(node.mantissa)
    elif isinstance(node, OperatorNode):
        assert left.shift is not None and right.shift is not None
        device = node.operator.device
        tile = node.operator.tile(as_tensor(left.index, device), as_tensor(right.index, device))
        out.copy_(exp2_scale(exp2_scale(tile, left.shift[:, None]), right.shift[None, :]))
    else:
        raise AssertionError(f"unknown node {type(node).__name__}")


class TorchBackend(Backend):
    """Matrix products on the device of the factors."""

    name = "torch"

    def gram_flops(self, gram: Gram) -> float:
        return 2.0 * gram.r

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        walk(node, left, right, out, pool, 0, gram_product)


BACKENDS = {"torch": TorchBackend()}
