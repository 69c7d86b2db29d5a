"""Exact integer kernels of 0/1 factors: path counts as int64 where they fit, else as Python integers.

Floats round above 2^53 (float32: 2^24); these never do. May import only the errors and the rest of linops.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import blocks, human_bytes
from pathlens.errors import BudgetError, OptionError
from pathlens.indexing import Index, compose
from pathlens.linops.evaluate import Evaluator
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Select, Sum
from pathlens.progress import ProgressBar

_INT64 = 2**63 - 1
_EDGE = 1024


def _coefficient(node: Scaled) -> int:
    numerator, denominator = node.mantissa.as_integer_ratio()
    scaled = numerator * 4**node.half if node.half >= 0 else numerator
    below = denominator if node.half >= 0 else denominator * 4**-node.half
    if scaled % below:
        raise OptionError(
            f"exact_counts: the kernel is scaled by {node.mantissa * 4.0**node.half:g}, which is not an "
            f"integer. Take exact counts before scaling or normalising."
        )
    return scaled // below


def _bound(node: Node) -> int:
    """An upper bound on the absolute value of every entry, as a Python integer; refuses what is not integral."""
    if isinstance(node, Gram):
        if not node.binary:
            raise OptionError(
                f"exact_counts: factor {node.name!r} ({node.left.dtype}) is not known to be 0/1. Exact "
                f"counts need 0/1 factors; a streamed one must be bool."
            )
        return node.r
    if isinstance(node, OperatorNode):
        raise OptionError(
            f"exact_counts: operator {node.name!r} has no 0/1 factors to count. Of a network with "
            f"convolutions or shortcuts, paths.count(net, X) has the diagonal in exact integers."
        )
    inner = [_bound(child) for child in node.children()]
    if isinstance(node, Sum):
        return sum(inner)
    if isinstance(node, Hadamard):
        return math.prod(inner)
    return inner[0] * (abs(_coefficient(node)) if isinstance(node, Scaled) else 1)


def _gram_counts(gram: Gram, rows: Index, cols: Index) -> np.ndarray:
    # Partial sums of a 0/1 product are integers up to r: exact in float32 below 2^24.
    dtype = torch.float32 if gram.r < 2**24 else torch.float64
    left: Tensor = gram.left.take(rows).to(dtype)
    right: Tensor = gram.right.take(cols).to(dtype)
    return (left @ right.T).to(torch.int64).cpu().numpy()


def _exact(node: Node, rows: Index, cols: Index) -> np.ndarray:
    """A tile: int64 while the node's bound fits, else an object array."""
    if isinstance(node, Gram):
        return _gram_counts(node, rows, cols)
    if isinstance(node, Select):
        return _exact(node.child, compose(node.rows, rows), compose(node.cols, cols))
    if isinstance(node, Scaled):
        factor = _coefficient(node)
        inner = _exact(node.child, rows, cols)
        return inner * factor if _bound(node) <= _INT64 else inner.astype(object) * factor
    total, top = None, 0
    for child in node.children():
        tile, bound = _exact(child, rows, cols), _bound(child)
        if total is None:
            total, top = tile, bound
            continue
        grown = top + bound if isinstance(node, Sum) else top * bound
        if grown > _INT64:
            total, tile = total.astype(object), tile.astype(object)
        total = total + tile if isinstance(node, Sum) else total * tile
        top = grown
    assert total is not None
    return total


def exact_counts(evaluator: Evaluator) -> np.ndarray:
    """The whole kernel in integers, (n, m): int64 if every entry must fit, else Python integers in an object array."""
    node = evaluator.node
    bound = _bound(node)
    dtype: type = np.int64 if bound <= _INT64 else object
    entry = 8 if dtype is np.int64 else 8 + 28 + 4 * math.ceil(bound.bit_length() / 30)
    whole = node.n * node.m * entry
    scratch = min(node.n, _EDGE) * min(node.m, _EDGE) * 3 * entry
    if whole + scratch > evaluator.budget:
        raise BudgetError(
            f"exact_counts: a {node.n} × {node.m} matrix of exact integers takes "
            f"{human_bytes(whole + scratch)}, the budget is {human_bytes(evaluator.budget)}. "
            f"Raise max_bytes, or take K[rows, cols].exact_counts()."
        )
    out: np.ndarray = np.empty((node.n, node.m), dtype=dtype)
    with ProgressBar("exact counts", -(-node.n // _EDGE) * -(-node.m // _EDGE)) as bar:
        for rows in blocks(node.n, _EDGE):
            for cols in blocks(node.m, _EDGE):
                out[rows.start : rows.stop, cols.start : cols.stop] = _exact(node, rows, cols)
                bar.advance()
    return out
