"""Exact integer kernels of 0/1 factors: path counts as int64 where they fit, else as Python integers.

Floats round above 2^53 (float32: 2^24); these integers are always exact.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from pathlens.budgets import blocks, require_budget
from pathlens.errors import OptionError
from pathlens.indexing import Index, compose
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Select, Sum
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator

_INT64 = 2**63 - 1
_EDGE = 1024


def _coefficient(node: Scaled) -> int:
    factor = Fraction(node.mantissa) * Fraction(4) ** node.half
    if factor.denominator != 1:
        raise OptionError(
            f"exact_counts: the kernel is scaled by {node.mantissa * 4.0**node.half:g}, which is not an integer. "
            "Take exact counts before scaling or normalising."
        )
    return factor.numerator


def _bound(node: Node) -> int:
    """An upper bound on the absolute value of every entry; raises if entries need not be integers."""
    if isinstance(node, Gram):
        if not node.binary:
            raise OptionError(
                f"exact_counts: factor {node.name!r} ({node.left.dtype}) is not known to be 0/1. Exact counts need 0/1 "
                "factors; a streamed factor must be bool."
            )
        return node.r
    if isinstance(node, OperatorNode):
        raise OptionError(
            f"exact_counts: operator {node.name!r} has no 0/1 factors to count. For a network with convolutions or "
            "shortcuts, paths.count(net, X) returns the diagonal in exact integers."
        )
    inner = [_bound(child) for child in node.children]
    if isinstance(node, Sum):
        return sum(inner)
    if isinstance(node, Hadamard):
        return math.prod(inner)
    return inner[0] * (abs(_coefficient(node)) if isinstance(node, Scaled) else 1)


def _exact(node: Node, rows: Index, cols: Index) -> np.ndarray:
    """A tile: int64 if the bound of the node fits, else an array of Python integers."""
    if isinstance(node, Gram):
        dtype = torch.float32 if node.r < 2**24 else torch.float64  # in which integers up to r are exact
        product = node.left.take(rows).to(dtype) @ node.right.take(cols).to(dtype).T
        return product.to(torch.int64).cpu().numpy()
    if isinstance(node, Select):
        return _exact(node.child, compose(node.rows, rows), compose(node.cols, cols))
    if isinstance(node, Scaled):
        factor = _coefficient(node)
        inner = _exact(node.child, rows, cols)
        return inner * factor if _bound(node) <= _INT64 else inner.astype(object) * factor
    first, *others = node.children
    total, bound = _exact(first, rows, cols), _bound(first)
    for child in others:
        tile = _exact(child, rows, cols)
        bound = bound + _bound(child) if isinstance(node, Sum) else bound * _bound(child)
        if bound > _INT64:
            total, tile = total.astype(object), tile.astype(object)
        total = total + tile if isinstance(node, Sum) else total * tile
    return total


@exact_precision()
def exact_counts(kernel: KernelOperator, *, max_bytes: int | None = None) -> np.ndarray:
    """The kernel of 0/1 factors in exact integers, (n, m): int64 if every entry fits, else Python integers.

    Examples
    --------
    >>> from pathlens.linops import GramSum
    >>> gates = torch.ones(2, 500, dtype=torch.bool)
    >>> K = GramSum.from_factors([[("gate", gates)] * 20])
    >>> K.exact_counts()[0, 1] == 500**20
    True
    """
    evaluator = kernel._evaluator(max_bytes)
    node = evaluator.node
    bound = _bound(node)
    dtype: type = np.int64 if bound <= _INT64 else object
    entry = 8 if dtype is np.int64 else 8 + 28 + 4 * math.ceil(bound.bit_length() / 30)
    whole = node.n * node.m * entry
    scratch = min(node.n, _EDGE) * min(node.m, _EDGE) * 3 * entry
    what = f"exact_counts: a {node.n} × {node.m} matrix of exact integers takes"
    remedy = "Raise max_bytes, or take K[rows, cols].exact_counts()."
    require_budget(what, whole + scratch, evaluator.budget, remedy)
    out: np.ndarray = np.empty((node.n, node.m), dtype=dtype)
    with ProgressBar("exact counts", -(-node.n // _EDGE) * -(-node.m // _EDGE)) as bar:
        for rows in blocks(node.n, _EDGE):
            for cols in blocks(node.m, _EDGE):
                out[rows.start : rows.stop, cols.start : cols.stop] = _exact(node, rows, cols)
                bar.advance()
    return out
