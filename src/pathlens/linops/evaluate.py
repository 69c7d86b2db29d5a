"""Evaluation of an expression: sides, tiles, diagonals and dense matrices within a memory budget.

Products with vectors are in ``matmul``, solvers in ``solvers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pathlens.budgets import (
    DEVICE_EDGE,
    STRIP_EDGES,
    TILE_EDGE,
    TRIANGLE_EDGE,
    TilePlan,
    blocks,
    plan_tiles,
    require_budget,
)
from pathlens.errors import NotFiniteError, ScaleError
from pathlens.indexing import Index, as_tensor
from pathlens.linops.backends import Backend, Pool, new_tile
from pathlens.linops.backends.torch_backend import plain_terms, product_of_grams
from pathlens.linops.nodes import Gram, Node, OperatorNode, Scaled, Side, Sum, exp2_scale, exp2_scale_, strip
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator

_STRIP = 1 << 16  # entries that are rescaled at once if exponents have both signs


def overflow_error(what: str, dtype: torch.dtype, largest_log2: float) -> ScaleError:
    """The error for numbers that do not fit the dtype."""
    return ScaleError(
        f"{what} would reach about 2^{largest_log2:.0f}, beyond {dtype} (2^{_top_exponent(dtype)}). "
        f"Use K.normalised(), float64 factors, or K.exact_counts() for 0/1 factors."
    )


def _top_exponent(dtype: torch.dtype) -> int:
    return 128 if dtype == torch.float32 else 1024


def true_number(value: float, exponent: int, what: str) -> float:
    """value · 2^exponent; raises a `ScaleError` on overflow."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        raise overflow_error(what, torch.float64, exponent) from None


def paired_entries(operator: KernelOperator, rows: Tensor, cols: Tensor) -> Tensor:
    """K[rows[k], cols[k]] for every k, (b,), one entry at a time."""
    return torch.cat([operator.tile(rows[k : k + 1], cols[k : k + 1])[0] for k in range(len(rows))])


@dataclass
class Evaluator:
    """An expression together with the backend and the budget of its evaluation.

    Attributes
    ----------
    node
        The expression.
    dtype, device
        Of every tile.
    backend
        Loaded backend.
    budget
        Bytes that may be allocated in addition to the factors.
    """

    node: Node
    dtype: torch.dtype
    device: torch.device
    backend: Backend
    budget: int

    def __post_init__(self) -> None:
        self.pool = Pool(self.dtype, self.device)
        leaves = list(self.node.leaves())
        grams = [leaf for leaf in leaves if isinstance(leaf, Gram)]
        self.streamed = any(g.left.streamed or g.right.streamed for g in grams)
        self.has_operator = any(isinstance(leaf, OperatorNode) for leaf in leaves)
        size = self.dtype.itemsize
        self.row_bytes = sum(g.left.row_bytes(size) for g in grams) + 64 * len(leaves)
        self.col_bytes = sum(g.right.row_bytes(size) for g in grams) + 64 * len(leaves)

    # --- plans -------------------------------------------------------------------------------------------------

    def plan(
        self,
        *,
        reserve: int = 0,
        square: bool | None = None,
        extra_buffers: int = 0,
        edge: tuple[int, int] | None = None,
        gathered: bool = True,
    ) -> TilePlan:
        """Tile edges for the budget, at most ``edge``; ``square`` tiles cover an upper triangle.

        Factor rows count against the budget if they are ``gathered``, that is, copied for each tile.
        """
        square = self.node.symmetric if square is None else square
        # smaller tiles waste less on the diagonal and stay in the cache, unless an operator computes its own
        most = edge or (TRIANGLE_EDGE if square and not self.has_operator else TILE_EDGE)
        if self.device.type == "cuda" and not self.has_operator:
            most = DEVICE_EDGE
        return plan_tiles(
            self.node.n,
            self.node.m,
            entry_bytes=(self.node.buffers() + extra_buffers) * self.dtype.itemsize,
            row_bytes=self.row_bytes if gathered else 0,
            col_bytes=self.col_bytes if gathered else 0,
            budget=self.budget,
            reserve=reserve,
            edge=None if self.streamed else most,
            square=square,
            what="a tile of the kernel",
        )

    def row_plan(self, what: str, *, reserve: int = 0, row_bytes: int = 0) -> int:
        """Number of rows of both sides that fit the budget together, for work without tiles."""
        each = self.row_bytes + self.col_bytes + row_bytes
        require_budget(f"{what}: one row needs", each + reserve, self.budget)
        return max(min((self.budget - reserve) // each, max(self.node.n, self.node.m), 8192), 1)

    # --- sides and tiles ---------------------------------------------------------------------------------------

    @exact_precision()
    def side(self, index: Index, right: bool, fold: bool) -> Side:
        """A side; ``fold`` multiplies moderate exponents into the factor rows, so that tiles have their true size."""
        side = self.node.side(index, right)
        # Running products stay within 2^±32 on each side (see nodes); these additional exponents still fit the dtype.
        if fold and bool((side.exponent.abs() <= (24 if self.dtype == torch.float32 else 400)).all()):
            side.lift(side.exponent)
        return side

    @exact_precision()
    def unit_tile(self, left: Side, right: Side, out: Tensor | None = None) -> Tensor:
        """K̂ between two sides, written to ``out`` or to a buffer that the next tile reuses."""
        if out is None:
            out = self.pool.take(0, len(left), len(right))
        self.backend.unit_tile(self.node, left, right, out, self.pool)
        if self.has_operator and not bool(torch.isfinite(out).all()):
            names = ", ".join(repr(leaf.name) for leaf in self.node.leaves() if isinstance(leaf, OperatorNode))
            raise NotFiniteError(
                f"a tile of shape {tuple(out.shape)} contains NaN or infinity: check `tile` of the operator {names}."
            )
        return out

    def tile(self, left: Side, right: Side, out: Tensor | None = None) -> Tensor:
        """K between two sides in true size; raises if entries overflow."""
        tile = self.unit_tile(left, right, out)
        if left.level and right.level:
            return tile
        low = min(float(left.exponent.min()), float(right.exponent.min()))
        high = max(float(left.exponent.max()), float(right.exponent.max()))
        if low >= 0 or high <= 0:  # exponents of one sign: scaling by rows first overflows only where the product does
            exp2_scale_(tile, left.exponent[:, None])
            exp2_scale_(tile, right.exponent[None, :])
        else:
            step = max(_STRIP // len(right), 1)
            for lo in range(0, len(left), step):
                exp2_scale_(tile[lo : lo + step], left.exponent[lo : lo + step, None] + right.exponent[None, :])
        top = float((left.exponent + left.log_norm).max() + (right.exponent + right.log_norm).max())
        if top > _top_exponent(self.dtype) - 1 and not bool(torch.isfinite(tile).all()):
            raise overflow_error("entries of the kernel", self.dtype, top)
        return tile

    def _whole_side(self, right: bool, fold: bool) -> Side | None:
        """The side of all rows, or None if its exponents take too much of the budget.

        Building a side takes dozens of small operations, which would be slow for each tile of a small kernel.
        """
        count = self.node.m if right else self.node.n
        if self.streamed or 64 * count * sum(1 for _ in self.node.leaves()) > self.budget // 16:
            return None
        return self.side(range(count), right, fold)

    def sides(self, right: bool, fold: bool) -> Callable[[range], Side]:
        """A function from a block of rows to its side, sliced from the side of all rows if that fits the budget."""
        whole = self._whole_side(right, fold)
        if whole is None:
            return lambda block: self.side(block, right, fold)
        return lambda block: whole.narrow(block.start, block.stop)

    def pairs(self, plan: TilePlan, *, upper: bool, fold: bool) -> Iterator[tuple[range, range, Side, Side]]:
        """Blocks of rows and columns with their sides; with ``upper`` only those that cover the upper triangle."""
        m = self.node.m
        lefts = self.sides(False, fold)
        rights = lefts if upper else self.sides(True, fold)
        for rows in blocks(self.node.n, plan.rows):
            left = lefts(rows)
            for lo in range(rows.start if upper else 0, m, plan.cols):
                cols = range(lo, min(lo + plan.cols, m))
                yield rows, cols, left, rights(cols)

    def _plain_terms(self) -> list[list[Tensor]] | None:
        """The factors, if tiles of a symmetric kernel are products of slices of them; else None."""
        whole = self._whole_side(False, True) if self.backend.name == "torch" else None
        return None if whole is None or not whole.level else plain_terms(self.node, whole, self.dtype)

    def _tiles_below(self, plan: TilePlan, terms: list[list[Tensor]] | None) -> Iterator[tuple[range, range, Tensor]]:
        """Blocks (rows, columns) of the upper triangle of a symmetric kernel, each with the tile of its transpose.

        The transposed tile is tall and narrow, which is faster to multiply. It is contiguous, because reading columns
        of the whole matrix would leave the cache, and valid until the next tile.
        """
        n = self.node.n
        if terms is None:
            for rows, cols, left, right in self.pairs(plan, upper=True, fold=True):
                yield rows, cols, self.tile(right, left)
            return
        for rows in blocks(n, plan.rows):
            for lo in range(rows.start, n, plan.cols):
                cols = range(lo, min(lo + plan.cols, n))
                tile, *spare = (self.pool.take(at, len(cols), len(rows)) for at in range(self.node.buffers()))
                for t, term in enumerate(terms):
                    pairs = [(factor[lo : cols.stop], factor[rows.start : rows.stop]) for factor in term]
                    product_of_grams(pairs, tile, spare.__getitem__, t > 0)
                yield rows, cols, tile

    @exact_precision()
    def dense(self, label: str = "kernel entries") -> Tensor:
        """The whole matrix, (n, m); exactly symmetric where the kernel is."""
        n, m, size = self.node.n, self.node.m, self.dtype.itemsize
        whole = n * m * size
        remedy = "Raise max_bytes, take K[rows, cols], or use K.tiles()."
        require_budget(f"dense: a {n} × {m} matrix of {self.dtype} takes", whole, self.budget, remedy)
        gathered = n * self.row_bytes + m * self.col_bytes
        if self.backend.writes_whole(self.node) and not self.streamed and whole + gathered <= self.budget:
            left = self.side(range(n), False, True)
            right = left if self.node.symmetric else self.side(range(m), True, True)
            return self.tile(left, right, new_tile(n, m, self.dtype, self.device))
        # Transposing a tile costs about as much as counting bits again, so exact backends compute both triangles.
        mirror = self.node.symmetric and not self.backend.exactly_symmetric(self.node)
        strips = mirror and not self.streamed and not self.has_operator and self.device.type == "cpu"
        terms = self._plain_terms() if strips else None
        plan = self.plan(
            reserve=whole,
            square=mirror and not strips,
            extra_buffers=1 if mirror else 0,
            edge=STRIP_EDGES if strips else None,
            gathered=terms is None,
        )
        out = new_tile(n, m, self.dtype, self.device)
        with ProgressBar(label, n * m) as bar:
            if not mirror:
                for rows, cols, left, right in self.pairs(plan, upper=False, fold=True):
                    spot = out[rows.start : rows.stop, cols.start : cols.stop]
                    self.tile(left, right, spot)
                    bar.advance(spot.numel())
                return out
            for rows, cols, tile in self._tiles_below(plan, terms):
                spot, beside = out[rows.start : rows.stop, cols.start : cols.stop], 0
                if cols.start == rows.start:
                    # both halves of a square on the diagonal were computed, and may differ by rounding: use one of them
                    beside = len(rows)
                    spot[:, :beside] = torch.maximum(tile[:beside], tile[:beside].T)
                spot[:, beside:] = tile[beside:].T
                out[cols.start + beside : cols.stop, rows.start : rows.stop] = tile[beside:]
                bar.advance(2 * spot.numel() - beside**2)
        return out

    # --- diagonal ----------------------------------------------------------------------------------------------

    @exact_precision()
    def log_diagonal(self) -> tuple[Tensor, Tensor]:
        """(u, e) in float64 with K_ii = u_i · 2^e_i and u moderate or zero. Square kernels only."""
        units, exponents = [], []
        for rows in blocks(self.node.n, self.row_plan("the diagonal")):
            left, right = self.side(rows, False, False), self.side(rows, True, False)
            units.append(self._unit_diagonal(self.node, left, right).double())
            exponents.append(left.exponent + right.exponent)
        return torch.cat(units), torch.cat(exponents)

    def _unit_diagonal(self, node: Node, left: Side, right: Side) -> Tensor:
        node, left = strip(node, left)
        right = strip(right.node, right)[1]
        if isinstance(node, Gram):
            # einsum sums without a (b, r) product of its own
            return torch.einsum("ir,ir->i", left.unit_rows(self.dtype), right.unit_rows(self.dtype))
        if isinstance(node, Scaled):
            return self._unit_diagonal(node.child, left.parts[0], right.parts[0]) * node.mantissa
        if isinstance(node, OperatorNode):
            assert left.shift is not None and right.shift is not None
            i, j = as_tensor(left.index, self.device), as_tensor(right.index, self.device)
            if node.n == node.m and torch.equal(i, j):
                entries = node.operator.diagonal()[i]
            else:  # the diagonal of a selection is not the operator's own
                entries = paired_entries(node.operator, i, j)
            return exp2_scale(entries, left.shift + right.shift)
        parts = [self._unit_diagonal(c, x, y) for c, x, y in zip(node.children, left.parts, right.parts)]
        return reduce(torch.add if isinstance(node, Sum) else torch.mul, parts)
