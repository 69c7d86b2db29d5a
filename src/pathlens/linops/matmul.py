"""K @ V: each term by factors or by tiles, whichever takes fewer operations.

For a term A Aᵀ ∘ B Bᵀ and a vector v, (K v)_i = Σ_ab A_ia B_ib M_ab with M = Aᵀ Diag(v) B: 2(n + m)·r₁r₂ operations
instead of n·m·(2r₁ + 2r₂). Products of more factors are split into two groups, each multiplied out over its columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from pathlens.budgets import blocks
from pathlens.errors import DTypeError, NotFiniteError, ShapeError
from pathlens.linops.evaluate import Evaluator, overflow_error
from pathlens.linops.factors import require_alike
from pathlens.linops.nodes import Gram, Hadamard, Node, Scaled, Side, Sum, exp2_scale, strip
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar


@dataclass(frozen=True)
class MatmulPlan:
    """Which terms of K @ V are computed by factors and which by tiles.

    Attributes
    ----------
    factored, tiled
        The terms.
    factored_flops, tiled_flops
        Operations if all terms were computed this way; ``inf`` if one cannot be.
    """

    factored: tuple[Node, ...]
    tiled: tuple[Node, ...]
    factored_flops: float
    tiled_flops: float

    def __str__(self) -> str:
        way = f"factored for {len(self.factored)} terms, tiles for {len(self.tiled)}"
        if not self.tiled or not self.factored:
            way = "tiles" if self.tiled else "factored"
        against = "no factors to use" if math.isinf(self.factored_flops) else f"factored {self.factored_flops:.1e}"
        return f"{way} (operations per vector: {against}, tiles {self.tiled_flops:.1e})"


def _inner_pair(node: Node) -> tuple[int, int]:
    """Numbers of columns (R_P, R_Q) of the two feature matrices of a term."""
    while not isinstance(node, (Gram, Sum, Hadamard)):
        node = node.children[0]
    if not isinstance(node, Hadamard):
        return node.rank or 0, 1
    ranks = [child.rank or 0 for child in node.children]
    first, second = node.groups()
    return math.prod(ranks[f] for f in first), math.prod(ranks[f] for f in second)


def plan_matmul(evaluator: Evaluator, k: int) -> MatmulPlan:
    """Choose for each term by its operations; the middle matrices of factored terms must fit half of the budget."""
    n, m = evaluator.node.n, evaluator.node.m
    half = 0.5 if evaluator.node.symmetric else 1.0
    factored, tiled = [], []
    total_factored = total_tiled = 0.0
    free = evaluator.budget / 2
    for term in evaluator.node.summands():
        by_tiles = n * m * (half * term.entry_flops(evaluator.backend.gram_flops) + 2.0 * k)
        by_factors = math.inf
        if term.rank is not None:
            p, q = _inner_pair(term)
            middle = p * q * evaluator.dtype.itemsize
            by_factors = 2.0 * (n + m) * (p * q * k + (p + q) * (k if q > 1 else 1))
            if middle > free:
                by_factors = math.inf
        total_tiled += by_tiles
        total_factored += by_factors
        if by_factors < by_tiles:
            factored.append(term)
            free -= middle
        else:
            tiled.append(term)
    return MatmulPlan(tuple(factored), tuple(tiled), total_factored, total_tiled)


def check_vectors(evaluator: Evaluator, v: Tensor, what: str = "K @ V", name: str = "V") -> Tensor:
    """V as an (m, k) matrix; raises if the kernel cannot be multiplied by it."""
    m = evaluator.node.m
    if not isinstance(v, Tensor):
        raise DTypeError(
            f"{what}: {name} is a {type(v).__name__}, expected a torch tensor of {evaluator.dtype}. "
            "Convert it with torch.from_numpy."
        )
    if v.ndim not in (1, 2) or v.shape[0] != m:
        raise ShapeError(
            f"{what}: {name} has shape {tuple(v.shape)}, expected ({m},) or ({m}, k) for a kernel of shape "
            f"({evaluator.node.n}, {m})."
        )
    require_alike(what, (name, "the kernel"), v, evaluator, f"Convert {name} with `.to(K.device, K.dtype)`.")
    if not bool(torch.isfinite(v).all()):
        raise NotFiniteError(f"{what}: {name} of shape {tuple(v.shape)} contains NaN or infinity.")
    return v.detach().reshape(m, -1)


@exact_precision()
def matmul(evaluator: Evaluator, v: Tensor) -> Tensor:
    """K @ V for V of shape (m,) or (m, k), within the evaluator's budget."""
    matrix = check_vectors(evaluator, v)
    n, k = evaluator.node.n, matrix.shape[1]
    plan = plan_matmul(evaluator, k)
    # Terms are added in float64: their sizes may differ by more than the precision of the dtype.
    out = torch.zeros(n, k, dtype=torch.float64, device=evaluator.device)
    reserve = (n + evaluator.node.m) * k * 16
    if plan.factored:
        _factored(evaluator, plan.factored, matrix, out, reserve)
    if plan.tiled:
        rest = evaluator.node if not plan.factored else Sum(plan.tiled) if len(plan.tiled) > 1 else plan.tiled[0]
        _tiled(replace(evaluator, node=rest), matrix, out, reserve)
    result = out.to(evaluator.dtype)
    if not bool(torch.isfinite(result).all()):
        top = float(out.abs().max().log2()) if bool(torch.isfinite(out).all()) else 1024.0
        raise overflow_error("entries of K @ V", evaluator.dtype, top)
    return result.reshape(n, *v.shape[1:])


def _weigh(v: Tensor, exponent: Tensor) -> tuple[Tensor, float]:
    """(v · 2^(e − top), top) with top chosen so that nothing overflows; top is −inf if v is zero."""
    top = float((torch.log2(v.double().abs().amax(1)) + exponent).max())
    if math.isinf(top):
        return v, top
    top = math.ceil(top)
    return exp2_scale(v, (exponent - top)[:, None]), top


def _add(out: Tensor, rows: slice, values: Tensor, exponent: Tensor) -> None:
    """out[rows] += values · 2^exponent; an exponent of −inf means that the values are zero."""
    if not bool(torch.isinf(exponent).any()):
        out[rows] += exp2_scale(values.double(), exponent[:, None])


def _tiled(evaluator: Evaluator, v: Tensor, out: Tensor, reserve: int) -> None:
    symmetric = evaluator.node.symmetric
    plan = evaluator.plan(reserve=reserve)
    n, m = evaluator.node.n, evaluator.node.m
    with ProgressBar("K @ V in tiles", -(-n // plan.rows) * -(-m // plan.cols)) as bar:
        for rows, cols, left, right in evaluator.pairs(plan, upper=symmetric, fold=False):
            tile = evaluator.unit_tile(left, right)
            here, there = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
            weighed, top = _weigh(v[there], right.exponent)
            _add(out, here, tile @ weighed, left.exponent + top)
            bar.advance()
            if symmetric and rows != cols:
                weighed, top = _weigh(v[here], left.exponent)
                _add(out, there, tile.T @ weighed, right.exponent + top)
                bar.advance()


# --- factored --------------------------------------------------------------------------------------------------


def _khatri_rao(parts: list[Tensor]) -> Tensor:
    """Row-wise products of all columns: (b, r₁), (b, r₂), … → (b, r₁r₂…)."""
    return reduce(lambda x, y: (x[:, :, None] * y[:, None, :]).flatten(1), parts)


def features(node: Node, side: Side, dtype: torch.dtype) -> Tensor:
    """Explicit unit features (b, R) of one side; the right side includes the numbers that scale a node."""
    node, side = strip(node, side)
    if isinstance(node, Gram):
        return side.unit_rows(dtype)
    if isinstance(node, Scaled):
        inner = features(node.child, side.parts[0], dtype)
        return inner * node.mantissa if side.right else inner
    parts = [features(child, part, dtype) for child, part in zip(node.children, side.parts)]
    return torch.cat(parts, dim=1) if isinstance(node, Sum) else _khatri_rao(parts)


def _feature_pair(node: Node, side: Side, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(P, Q) such that the unit features are the row-wise products of P and Q; Q is None if P alone is enough."""
    node, side = strip(node, side)
    if isinstance(node, Scaled):
        p, q = _feature_pair(node.child, side.parts[0], dtype)
        return (p * node.mantissa if side.right else p), q
    if not isinstance(node, Hadamard):
        return features(node, side, dtype), None
    parts = [features(child, part, dtype) for child, part in zip(node.children, side.parts)]
    first, second = node.groups()
    return _khatri_rao([parts[f] for f in first]), _khatri_rao([parts[f] for f in second]) if second else None


def _factored(evaluator: Evaluator, terms: tuple[Node, ...], v: Tensor, out: Tensor, reserve: int) -> None:
    dtype, size, k = evaluator.dtype, evaluator.dtype.itemsize, v.shape[1]
    widths = [_inner_pair(term) for term in terms]
    middle = sum(p * q for p, q in widths) * size
    # As many columns at once as have middle matrices that fit half of the remaining budget.
    group = max(min(k, int((evaluator.budget - reserve) // (2 * middle)) if middle else k), 1)
    scratch = 3 * max(p + q for p, q in widths) * size
    if all(q == 1 for _, q in widths):
        scratch += 2 * group * size
    step = evaluator.row_plan("a block of factor rows", reserve=reserve + group * middle, row_bytes=scratch)
    column_blocks, row_blocks = blocks(evaluator.node.m, step), blocks(evaluator.node.n, step)
    with ProgressBar("K @ V by factors", (len(column_blocks) + len(row_blocks)) * -(-k // group)) as bar:
        for columns in blocks(k, group):
            part = slice(columns.start, columns.stop)
            middles: list[Tensor | None] = [None] * len(terms)
            tops = [0.0] * len(terms)
            for cols in column_blocks:  # blocks in the outer loop: streamed factors are recomputed once per block
                for t, term in enumerate(terms):
                    side = term.side(cols, True)
                    weighed, top = _weigh(v[cols.start : cols.stop, part], side.exponent)
                    new = _contract(*_feature_pair(term, side, dtype), weighed)
                    old = middles[t]
                    if old is None or math.isinf(tops[t]):
                        middles[t], tops[t] = new, top
                    elif not math.isinf(top):  # use the larger of both exponents
                        high = max(tops[t], top)
                        middles[t] = _shift(old, tops[t] - high) + _shift(new, top - high)
                        tops[t] = high
                bar.advance()
            for rows in row_blocks:
                for t, term in enumerate(terms):
                    side = term.side(rows, False)
                    p, q = _feature_pair(term, side, dtype)
                    m = middles[t]
                    assert m is not None
                    _add(out[:, part], slice(rows.start, rows.stop), _expand(p, q, m), side.exponent + tops[t])
                bar.advance()


def _shift(value: Tensor, by: float) -> Tensor:
    return exp2_scale(value, torch.tensor([by], dtype=torch.float64, device=value.device))


def _contract(p: Tensor, q: Tensor | None, v: Tensor) -> Tensor:
    """Pᵀ Diag(v) Q for every column of v, (k, R_P, R_Q); Pᵀ v, (R_P, k), if Q is None."""
    if q is None:
        return p.T @ v
    return torch.stack([p.T @ (q * v[:, c : c + 1]) for c in range(v.shape[1])])


def _expand(p: Tensor, q: Tensor | None, middle: Tensor) -> Tensor:
    """rowsum((P M) ∘ Q) for every column, (b, k); P M if Q is None."""
    if q is None:
        return p @ middle
    return torch.stack([torch.einsum("ij,ij->i", p @ middle[c], q) for c in range(len(middle))], dim=1)
