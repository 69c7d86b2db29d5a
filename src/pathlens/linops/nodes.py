"""The expression tree of a kernel: Gram, Sum, Hadamard, Scaled, Select and OperatorNode nodes, and their sides.

A *side* is a node restricted to some rows (or columns), with its scale split off as powers of two. A backend computes
tiles from two sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pathlens.errors import ShapeError
from pathlens.indexing import Index, as_tensor, compose, same_index
from pathlens.linops.factors import FactorRows, require_alike

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator

_MINUS_INF = float("-inf")
_MODERATE = 16.0  # |log₂| of norms that need no scaling: copying a factor row costs as much as multiplying by it
_DRIFT = 16.0  # |log₂| of the norm of a running product above which the next factor compensates


def exp2_scale(block: Tensor, exponent: Tensor) -> Tensor:
    """block · 2^exponent, exact even if the power of two itself does not fit the dtype.

    ``exponent`` must broadcast against ``block``. Overflow and underflow of the result follow IEEE 754.

    >>> exp2_scale(torch.tensor([1e-40]), torch.tensor([140.0], dtype=torch.float64))
    tensor([139.3789])
    """
    if bool((exponent == 0).all()):
        return block
    first, *rest = _powers(exponent, block.dtype)
    out = block * first
    for power in rest:
        out *= power
    return out


def exp2_scale_(block: Tensor, exponent: Tensor) -> None:
    """`exp2_scale` in place.

    >>> block = torch.ones(2)
    >>> exp2_scale_(block, torch.tensor([0.0, 3.0]))
    >>> block
    tensor([1., 8.])
    """
    if not bool((exponent == 0).all()):
        for power in _powers(exponent, block.dtype):
            block *= power


def _powers(exponent: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Powers of two that fit the dtype and multiply to 2^exponent."""
    limit = 120.0 if dtype == torch.float32 else 1000.0
    rest = exponent.clamp(-6 * limit, 6 * limit)  # enough to scale the largest number to 0, the smallest to infinity
    powers: list[Tensor] = []
    while not powers or bool((rest != 0).any()):
        step = rest.clamp(-limit, limit)
        powers.append(torch.exp2(step).to(dtype))
        rest = rest - step
    return powers


def _row_exponents(log_norm: Tensor) -> Tensor:
    """Exponents to split off: 0 for moderate and for zero rows; for others, the remaining norm is in [½, 1)."""
    return torch.where(torch.isfinite(log_norm) & (log_norm.abs() > _MODERATE), torch.floor(log_norm) + 1.0, 0.0)


@dataclass(slots=True, eq=False)
class Side:
    """One side of a node, restricted to b rows (or columns).

    K_ij = 2^eᵢ · K̂_ij · 2^eⱼ with |K̂_ij| ≤ νᵢνⱼ and moderate ν, whatever the sizes of the factors. Factor rows with a
    norm in 2^±16 are used as they are, without a copy; others are scaled to a norm in [½, 1). Powers of two make this
    exact, so that integer counts stay integers.

    Attributes
    ----------
    exponent
        (b,) float64 integers e: the true rows are 2^e times the unit rows.
    log_norm
        (b,) float64, log₂ of ν; −inf marks a zero row.
    parts
        Sides of the children.
    spread
        A bound on |log_norm|; infinite if none is known without computing it.
    """

    node: Node
    index: Index
    right: bool
    _exponent: Tensor | None
    _log_norm: Tensor | None
    parts: Sequence[Side] = ()
    _shift: Tensor | None = None
    spread: float = math.inf
    _level: bool | None = None
    _unshifted: bool | None = None
    _block: Tensor | None = None
    _whole: Side | None = None  # the side that this one is a slice of; its tensors are sliced on first use
    _cut: slice | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def exponent(self) -> Tensor:
        if self._exponent is None:
            assert self._whole is not None
            self._exponent = self._whole.exponent[self._cut]
        return self._exponent

    @property
    def log_norm(self) -> Tensor:
        if self._log_norm is None:
            assert self._whole is not None
            self._log_norm = self._whole.log_norm[self._cut]
        return self._log_norm

    @property
    def shift(self) -> Tensor | None:
        """log₂ of the ratio between unit rows and stored rows; leaves of the tree only."""
        if self._shift is None and self._whole is not None and self._whole.shift is not None:
            self._shift = self._whole.shift[self._cut]
        return self._shift

    @property
    def rows(self) -> FactorRows:
        """The factor of a Gram node on this side."""
        assert isinstance(self.node, Gram)
        return self.node.right if self.right else self.node.left

    @property
    def level(self) -> bool:
        """Whether all exponents are zero, so that the unit rows are the true rows."""
        if self._level is None:
            self._level = not bool(self.exponent.any())
        return self._level

    @property
    def unshifted(self) -> bool:
        """Whether the stored rows of a leaf are its unit rows."""
        if self._unshifted is None:
            self._unshifted = self.shift is not None and not bool(self.shift.any())
        return self._unshifted

    def lift(self, by: Tensor) -> None:
        """Multiply the unit rows by 2^by, which is finite, and lower the exponents to match."""
        assert self._block is None, "a side must be lifted before its rows are gathered"
        self._level = self._unshifted = None
        self.spread = math.inf
        self._exponent = self.exponent - by
        self._log_norm = self.log_norm + by
        if self.shift is not None:
            self._shift = self.shift + by
        elif isinstance(self.node, Sum):
            for part in self.parts:
                part.lift(by)
        else:
            self.parts[0].lift(by)

    def narrow(self, lo: int, hi: int) -> Side:
        """Rows lo … hi−1 of this side, which must not be lifted afterwards."""
        index = compose(self.index, range(lo, hi))
        cut = Side(self.node, index, self.right, None, None, [part.narrow(lo, hi) for part in self.parts])
        cut._whole, cut._cut = self, slice(lo, hi)
        cut._level, cut._unshifted = self.level or None, self.unshifted or None  # computed once for all slices
        return cut

    def unit_rows(self, dtype: torch.dtype) -> Tensor:
        """The unit rows of a Gram node, (b, r); gathered on first use and kept while the side lives."""
        if self._block is None:
            raw = self.rows.take(self.index).to(dtype)
            shift = None if self.unshifted else self.shift
            self._block = raw if shift is None else exp2_scale(raw, shift[:, None])
        return self._block


class Node(ABC):
    """An n × m kernel as an expression. Final classes: Gram, Sum, Hadamard, Scaled, Select, OperatorNode."""

    n: int
    m: int
    symmetric: bool
    children: tuple[Node, ...] = ()

    @abstractmethod
    def side(self, index: Index, right: bool) -> Side:
        """Rows (with ``right``, columns) of the node, with exponents split off."""

    @property
    def rank(self) -> int | None:
        """Number of columns of explicit features Φ with K = Φ Ψᵀ; None if there are none."""
        ranks = [child.rank for child in self.children if child.rank is not None]
        return self.combined_rank(ranks) if ranks and len(ranks) == len(self.children) else None

    def combined_rank(self, ranks: list[int]) -> int:
        """The rank that follows from those of the children."""
        return sum(ranks)

    def entry_flops(self, gram: Callable[[Gram], float]) -> float:
        """Operations per entry of a tile, given those of a Gram node."""
        return sum(child.entry_flops(gram) + 1 for child in self.children) - 1

    def buffers(self) -> int:
        """Tile-sized buffers in use at once while a tile is computed, including the result."""
        return max([self.children[0].buffers(), *(1 + child.buffers() for child in self.children[1:])])

    @abstractmethod
    def formula(self) -> str:
        """The expression in index-free notation."""

    def leaves(self) -> Iterator[Gram | OperatorNode]:
        """Gram and OperatorNode nodes, left to right."""
        if isinstance(self, (Gram, OperatorNode)):
            yield self
        for child in self.children:
            yield from child.leaves()

    def summands(self) -> list[Node]:
        """Nodes that add up to this one; a lone node is its own summand."""
        return [self]


class Gram(Node):
    """left · rightᵀ; symmetric if and only if both are the same object."""

    def __init__(self, name: str, left: FactorRows, right: FactorRows | None = None) -> None:
        self.name = name
        self.left = left
        self.right = left if right is None else right
        self.symmetric = self.right is self.left
        if self.left.r != self.right.r:
            raise ShapeError(
                f"GramSum: factor {name!r} has {self.left.r} columns on the left and {self.right.r} on the right. "
                "Record both with the same network."
            )
        require_alike(f"GramSum: factor {name!r}", ("left", "right"), self.left, self.right, "Convert one of them.")
        self.n, self.m, self.r = self.left.n, self.right.n, self.left.r
        self.binary = self.left.binary and self.right.binary
        self._balance = self._imbalance()

    def _imbalance(self) -> float:
        """Exponent to move from the left to the right side of a cross kernel.

        A sum aligns the exponents of its terms on each side separately. Without this balance, a term with huge left and
        tiny right rows would make a term of equal size but moderate rows underflow.
        """
        if self.symmetric or self.left.streamed or self.right.streamed:
            return 0.0
        peaks = [float(rows.log2_norms(range(rows.n)).max()) for rows in (self.left, self.right)]
        return math.floor((peaks[0] - peaks[1]) / 2) if all(map(math.isfinite, peaks)) else 0.0

    def side(self, index: Index, right: bool) -> Side:
        rows = self.right if right else self.left
        log_norm = rows.log2_norms(index)
        if rows.spread <= _MODERATE and not self._balance:
            zero = torch.zeros_like(log_norm)
            return Side(self, index, right, zero, log_norm, (), zero, rows.spread, True, True)
        exponent = _row_exponents(log_norm)
        balance = self._balance if right else -self._balance
        return Side(self, index, right, exponent + balance, log_norm - exponent, (), -exponent)

    @property
    def rank(self) -> int | None:
        return self.r

    def entry_flops(self, gram: Callable[[Gram], float]) -> float:
        return gram(self)

    def buffers(self) -> int:
        return 1

    def formula(self) -> str:
        return f"{self.name}·{self.name}ᵀ" if self.symmetric else f"{self.name}·{self.name}′ᵀ"


def _check_shapes(children: Sequence[Node]) -> None:
    first = children[0]
    for child in children[1:]:
        for axis, found, expected in (("rows", child.n, first.n), ("columns", child.m, first.m)):
            if found != expected:
                raise ShapeError(
                    f"GramSum: {first_name(child)} has {found} {axis}, expected {expected} as in {first_name(first)}. "
                    "Record both on the same batch."
                )


def first_name(node: Node) -> str:
    """The name of a node in messages: that of its first factor or operator."""
    leaf = next(node.leaves())
    return f"factor {leaf.name!r}" if isinstance(leaf, Gram) else f"operator {leaf.name!r}"


class _Combination(Node):
    """Base class of sums and products: children of one shape; nested nodes of the same class are joined."""

    def __init__(self, children: Sequence[Node]) -> None:
        flat: list[Node] = []
        for child in children:
            flat.extend(child.children if type(child) is type(self) else [child])
        _check_shapes(flat)
        self.children = tuple(flat)
        self.n, self.m = flat[0].n, flat[0].m
        self.symmetric = all(child.symmetric for child in flat)


class Sum(_Combination):
    """Σ_t child_t. Nested sums are joined; nothing is multiplied out."""

    def side(self, index: Index, right: bool) -> Side:
        parts = [child.side(index, right) for child in self.children]
        exponent = parts[0].exponent
        if not all(part.level for part in parts):
            finite = [torch.where(torch.isfinite(part.log_norm), part.exponent, _MINUS_INF) for part in parts]
            tops = torch.stack(finite).amax(0)
            exponent = torch.where(torch.isfinite(tops), tops, 0.0)
            for part, own in zip(parts, finite):
                # The largest term keeps its unit rows; smaller ones shrink and may underflow. Zero rows are not lifted:
                # their exponent is unbounded, and a factor could become infinite next to the zero.
                part.lift(torch.where(torch.isfinite(own), own - exponent, 0.0))
                part._exponent = exponent
        square = torch.stack([torch.exp2(2 * part.log_norm) for part in parts]).sum(0)
        return Side(self, index, right, exponent, 0.5 * torch.log2(square), parts)

    def formula(self) -> str:
        shown = [child.formula() for child in self.children[:3]]
        more = len(self.children) - len(shown)
        return " + ".join(shown) + (f" + … ({more} more terms)" if more else "")

    def summands(self) -> list[Node]:
        return [part for child in self.children for part in child.summands()]


class Hadamard(_Combination):
    """∘_f child_f, the entrywise product. Nested products are joined."""

    def combined_rank(self, ranks: list[int]) -> int:
        return math.prod(ranks)

    def side(self, index: Index, right: bool) -> Side:
        parts = [child.side(index, right) for child in self.children]
        running, exponent, spread = parts[0].log_norm, parts[0].exponent, parts[0].spread
        for part in parts[1:]:
            # Norms of many factors multiply: without compensation hundreds of factors leave the range of the dtype.
            if spread > _DRIFT:
                far = (running.abs() > _DRIFT) & torch.isfinite(running)
                part.lift(torch.where(far, -torch.ceil(running), 0.0))
            running = running + part.log_norm
            spread += part.spread
            if part._level is not True:
                exponent = exponent + part.exponent
        level = True if all(part._level for part in parts) else None
        return Side(self, index, right, exponent, running, parts, None, spread, level)

    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Children split into two groups of nearly equal total rank, for products AᵀDiag(v)B."""
        order = sorted(range(len(self.children)), key=lambda f: -(self.children[f].rank or 0))
        first: list[int] = []
        second: list[int] = []
        sizes = [1, 1]
        for f in order:
            at = 0 if sizes[0] <= sizes[1] else 1
            (first, second)[at].append(f)
            sizes[at] *= self.children[f].rank or 1
        return tuple(first), tuple(second)

    def formula(self) -> str:
        parts = [f"({c.formula()})" if isinstance(c, Sum) else c.formula() for c in self.children]
        if len(parts) > 6:
            parts = [*parts[:4], f"… ({len(parts) - 5} more factors)", parts[-1]]
        return " ∘ ".join(parts)


class _Wrapper(Node):
    """Base class of nodes with one child."""

    def __init__(self, child: Node) -> None:
        self.child, self.children = child, (child,)

    @abstractmethod
    def around(self, child: Node) -> Node:
        """The same operation on another child."""

    def summands(self) -> list[Node]:
        inner = self.child.summands()
        return [self] if len(inner) == 1 else [self.around(part) for part in inner]


class Scaled(_Wrapper):
    """A number times a node, stored as mantissa · 4^half so that no number overflows."""

    def __init__(self, mantissa: float, exponent: int, child: Node) -> None:
        fraction, power = math.frexp(mantissa)
        power += exponent
        if power % 2:
            fraction, power = fraction / 2, power + 1
        super().__init__(child)
        self.mantissa, self.half = fraction, power // 2 if fraction else 0
        self.n, self.m, self.symmetric = child.n, child.m, child.symmetric

    def around(self, child: Node) -> Node:
        return Scaled(self.mantissa, 2 * self.half, child)

    def side(self, index: Index, right: bool) -> Side:
        part = self.child.side(index, right)
        size = 0.5 * math.log2(abs(self.mantissa)) if self.mantissa else _MINUS_INF
        return Side(self, index, right, part.exponent + self.half, part.log_norm + size, [part])

    def entry_flops(self, gram: Callable[[Gram], float]) -> float:
        return self.child.entry_flops(gram) + 1

    def formula(self) -> str:
        inner = self.child.formula()
        text = f"{self.mantissa * 4.0**self.half:.4g}" if abs(self.half) < 150 else f"{self.mantissa:.4g}·4^{self.half}"
        return f"{text}·({inner})"


class Select(_Wrapper):
    """child[rows, cols]; symmetric if the child is and both selections are equal."""

    def __init__(self, child: Node, rows: Index, cols: Index) -> None:
        if isinstance(child, Select):
            rows, cols, child = compose(child.rows, rows), compose(child.cols, cols), child.child
        super().__init__(child)
        self.rows: Index = rows
        self.cols: Index = cols
        self.n, self.m = len(rows), len(cols)
        self.symmetric = child.symmetric and (rows is cols or same_index(rows, cols))

    def around(self, child: Node) -> Node:
        return Select(child, self.rows, self.cols)

    def side(self, index: Index, right: bool) -> Side:
        part = self.child.side(compose(self.cols if right else self.rows, index), right)
        return Side(self, index, right, part.exponent, part.log_norm, [part])

    def formula(self) -> str:
        return f"({self.child.formula()})[rows, cols]"


class OperatorNode(Node):
    """The tiles of another operator, unchanged; a symmetric operator is scaled by its diagonal."""

    def __init__(self, operator: KernelOperator) -> None:
        self.operator = operator
        self.n, self.m = operator.shape
        self.symmetric = operator.symmetric
        self._log_norms: Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.operator.name

    def side(self, index: Index, right: bool) -> Side:
        if self._log_norms is None:
            if self.symmetric and self.operator.scaled:
                norms = 0.5 * torch.log2(self.operator.diagonal().double().abs())
                # The operator may be indefinite: a zero on its diagonal does not imply a zero row.
                self._log_norms = torch.where(torch.isfinite(norms), norms, 0.0)
            else:
                self._log_norms = torch.zeros(max(self.n, self.m), dtype=torch.float64, device=self.operator.device)
        log_norm = self._log_norms[as_tensor(index, self._log_norms.device)]
        exponent = _row_exponents(log_norm)
        return Side(self, index, right, exponent, log_norm - exponent, (), -exponent)

    def entry_flops(self, gram: Callable[[Gram], float]) -> float:
        return 1.0  # unknown; an operator without a rank has no factored form to compare with

    def buffers(self) -> int:
        return 1 + self.operator.tile_buffers  # the operator's own, and the copy of its result

    def formula(self) -> str:
        return self.operator.name


def strip(node: Node, side: Side) -> tuple[Node, Side]:
    """Skip selections: the first node below that is no selection, and its side."""
    while isinstance(node, Select):
        node, side = node.child, side.parts[0]
    return node, side
