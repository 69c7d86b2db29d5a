"""Layers that act at many positions, and the tangent kernel in blocks of rows within a memory budget.

A layer used at P positions has ∂f/∂W = Σ_p D_p A_pᵀ with patches A (P, I) and sensitivities D (P, m). Either that
gradient is formed for each example (*explicit*), or the kernel is summed over pairs of positions (*pairwise*),
whichever costs less. Which layers enter a kernel is `tangent`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathlens.budgets import human_bytes
from pathlens.errors import BudgetError
from pathlens.kernels.sources import Sides, Source, pieces, probe, tile_diagonal
from pathlens.linops import CustomKernel
from pathlens.progress import ProgressBar
from pathlens.records import Layer, Record

_WORTH_ALL_THREADS = 1e7  # multiplications in one product
#: ∂f_output/∂(other parameters) of the examples x, (rows of x, Q)
OtherGradients = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class LayerPlan:
    """How one layer enters the kernel.

    Attributes
    ----------
    layer : Layer
    bias : bool
        Whether its bias is differentiated too.
    positions : int
        P, over all calls.
    explicit : bool
        Form per-example gradients (n, m·I); else sum over pairs of positions.
    """

    layer: Layer
    bias: bool
    positions: int
    explicit: bool

    @property
    def flat(self) -> bool:
        """One position: the kernel is the product of two Grams."""
        return self.positions == 1

    @property
    def gradient_sizes(self) -> list[int]:
        """Numbers in one example's gradient by the weight, and by the bias if there is one."""
        return [self.layer.outputs * self.layer.inputs, *([self.layer.outputs] if self.bias else [])]

    @property
    def gradient_size(self) -> int:
        """Both together."""
        return sum(self.gradient_sizes)

    def row_values(self) -> int:
        """Numbers that one row of a block holds."""
        return self.gradient_size if self.explicit else self.patch_values

    @property
    def patch_values(self) -> int:
        """Numbers in one example's patches and sensitivities."""
        return self.positions * (self.layer.inputs + self.layer.outputs)


def plan_layer(layer: Layer, bias: bool, first: Record, n: int) -> LayerPlan:
    """Choose by operations: explicit iff P > √(I·m(1 + P/n) / (I + m)).

    Pairwise costs 2n²P²(I + m), explicit 2nPIm + 2n²Im. One position is always a product of two Grams.
    """
    positions = int(first.sensitivities(layer.name, 0).shape[1])
    i, m = layer.inputs, layer.outputs
    explicit = positions > 1 and positions > math.sqrt(i * m * (1 + positions / n) / (i + m))
    return LayerPlan(layer, bias, positions, explicit)


def write_gradients(rec: Record, plan: LayerPlan, outputs: Sequence[int], out: Sequence[Tensor]) -> None:
    """Write ∂f_k/∂W, (n, c, m·I), and ∂f_k/∂b, (n, c, m), of every example and each of c outputs to ``out``."""
    name = plan.layer.name
    a, d = rec.inputs(name), _sensitivities(rec, plan.layer, outputs)
    n, c, positions, m = d.shape
    across = d.transpose(2, 3).reshape(n, c * m, positions)  # no copy where a convolution was recorded
    _multiply(across, a, out[0].view(n, c * m, -1))
    if plan.bias:
        torch.sum(across, 2, out=out[1].view(n, c * m))


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """A batch of matrix products; large ones one by one on a CPU, where `bmm` gives each a single thread."""
    if out.is_cuda or out[0].numel() * left.shape[2] < _WORTH_ALL_THREADS:
        torch.bmm(left, right, out=out)
        return
    for x, y, spot in zip(left, right, out):
        torch.mm(x, y, out=spot)


def _sensitivities(rec: Record, layer: Layer, outputs: Sequence[int]) -> Tensor:
    """(n, c, P, m), as they lie in the record if nothing has to be chosen or cut into groups of channels."""
    grouped = any(call is not None and call.groups > 1 for call in layer.calls)
    if layer.name in rec.sensitivity and not grouped and list(outputs) == list(range(rec.outputs)):
        return rec.sensitivity[layer.name]
    return torch.stack([rec.sensitivities(layer.name, k) for k in outputs], dim=1)


# --- blocks ----------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """Everything about some rows and one output: a matrix per explicit layer, (patches, sensitivities) per other."""

    explicit: list[Tensor]
    pairs: list[tuple[Tensor, Tensor, bool]]


class BlockTangent:
    """Tangent kernel of chosen layers and parameters, computed block by block, outputs outermost.

    Parameters
    ----------
    sides : Sides
        Row sources with sensitivities.
    plans : sequence of LayerPlan
    others : function or None
        Gradients of parameters that are in no layer.
    other_size : int
        How many numbers these are.
    outputs : "trace", "full" or int
    budget : int
        Bytes that may be allocated.
    """

    def __init__(
        self,
        sides: Sides,
        plans: Sequence[LayerPlan],
        others: OtherGradients | None,
        other_size: int,
        outputs: str | int,
        budget: int,
    ) -> None:
        self.sides, self.plans, self.others, self.outputs = sides, tuple(plans), others, outputs
        self.other_size = other_size
        first = probe(sides.rows)
        self.c = first.outputs
        self.dtype, self.device = first.f.dtype, first.f.device
        size = self.dtype.itemsize
        row = size * (sum(p.row_values() for p in self.plans) + other_size)
        one = sides.rows.rows(0, 1, 0).nbytes
        most_patches = max((p.patch_values for p in self.plans), default=0)
        # a row that is recorded takes its record, as much again for the backward pass, and one layer's patches
        work = 4 * one + size * (2 * most_patches + 3 * other_size)
        pair = max((size * p.positions**2 * 2 for p in self.plans if not p.explicit), default=size)
        least = 2 * row + work + pair
        if least > budget:
            raise BudgetError(
                f"ntk: one row and one column need {human_bytes(least)}, the budget is {human_bytes(budget)}. "
                "Raise max_bytes, or ask for one output or one layer."
            )
        self.pair_room = max(budget // 8, pair)
        self.most = max(int(budget // 4 // work), 1)
        spare = budget - self.pair_room - self.most * work
        # a block of rows and one of columns, and their product
        self.edge = max(int((math.sqrt(row * row + size * max(spare, 0)) - row) / size), 1)
        self._diagonal: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m), times c each for the full kernel."""
        n, m = self.sides.rows.n, (self.sides.cols or self.sides.rows).n
        return (n * self.c, m * self.c) if self.outputs == "full" else (n, m)

    def operator(self, name: str, max_bytes: int | None) -> CustomKernel:
        """As a kernel operator."""
        return CustomKernel(
            self.shape,
            self.tile,
            self.diagonal,
            dtype=self.dtype,
            device=self.device,
            symmetric=self.sides.symmetric,
            name=name,
            max_bytes=max_bytes,
            scaled=False,
        )

    # --- tiles -------------------------------------------------------------------------------------------------

    def tile(self, rows: Tensor, cols: Tensor) -> Tensor:
        """K on rows and columns, (a, b)."""
        out = torch.zeros(len(rows), len(cols), dtype=self.dtype, device=self.device)
        jobs = list(self._jobs(rows, cols))
        total = sum(-(-len(i) // self.edge) * -(-len(j) // self.edge) for _, _, _, i, _, j in jobs)
        with ProgressBar("ntk in blocks", total) as meter:
            for k, k2, at_i, i, at_j, j in jobs:
                self._add(out, k, k2, at_i, i, at_j, j, meter)
        return out

    def _jobs(self, rows: Tensor, cols: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
        """(output of rows, output of columns, places in the tile, examples) for both sides."""
        if self.outputs == "full":
            for k in (rows % self.c).unique().tolist():
                at_i = (rows % self.c == k).nonzero()[:, 0]
                for k2 in (cols % self.c).unique().tolist():
                    at_j = (cols % self.c == k2).nonzero()[:, 0]
                    yield k, k2, at_i, rows[at_i] // self.c, at_j, cols[at_j] // self.c
            return
        all_i, all_j = torch.arange(len(rows), device=self.device), torch.arange(len(cols), device=self.device)
        for k in range(self.c) if self.outputs == "trace" else [int(self.outputs)]:
            yield k, k, all_i, rows, all_j, cols

    def _add(
        self, out: Tensor, k: int, k2: int, at_i: Tensor, i: Tensor, at_j: Tensor, j: Tensor, meter: ProgressBar
    ) -> None:
        mirror = self.sides.symmetric and k == k2 and torch.equal(i, j)
        other = self.sides.cols or self.sides.rows
        for a in range(0, len(i), self.edge):
            left = self._block(self.sides.rows, i[a : a + self.edge], k)
            for b in range(a if mirror else 0, len(j), self.edge):
                same = mirror and a == b
                right = left if same else self._block(other, j[b : b + self.edge], k2)
                part = self._product(left, right)
                p, q = at_i[a : a + self.edge], at_j[b : b + self.edge]
                out[p[:, None], q[None, :]] += part
                if mirror and not same:
                    out[at_i[b : b + self.edge][:, None], at_j[a : a + self.edge][None, :]] += part.T
                meter.advance()

    def _block(self, source: Source, index: Tensor, output: int) -> _Block:
        b = len(index)

        def empty(*shape: int) -> Tensor:
            return torch.empty(b, *shape, dtype=self.dtype, device=self.device)

        # filled piece by piece: joining pieces would take the block twice
        explicit = [(p, [empty(1, size) for size in p.gradient_sizes]) for p in self.plans if p.explicit]
        pairs = [
            (p, empty(p.positions, p.layer.inputs), empty(p.positions, p.layer.outputs))
            for p in self.plans
            if not p.explicit
        ]
        rest = empty(self.other_size) if self.others is not None else None
        at = 0
        for rec in pieces(source, index, self.most, output):
            here = slice(at, at + rec.n)
            for p, out in explicit:
                write_gradients(rec, p, [0], [matrix[here] for matrix in out])
            for p, a, d in pairs:
                a[here] = rec.inputs(p.layer.name)
                d[here] = rec.sensitivities(p.layer.name, 0)
            if rest is not None and self.others is not None:
                rest[here] = self.others(rec.x, rec.kept[0] if rec.kept else output)
            at += rec.n
        matrices = [matrix[:, 0] for _, out in explicit for matrix in out] + ([rest] if rest is not None else [])
        return _Block(matrices, [(a, d, p.bias) for p, a, d in pairs])

    def _product(self, left: _Block, right: _Block) -> Tensor:
        total: Tensor | None = None
        for x, y in zip(left.explicit, right.explicit):
            part = x @ y.T
            total = part if total is None else total.add_(part)
        for (a, d, bias), (a2, d2, _) in zip(left.pairs, right.pairs):
            part = self._pairwise(a, d, a2, d2, bias)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _pairwise(self, a: Tensor, d: Tensor, a2: Tensor, d2: Tensor, bias: bool) -> Tensor:
        """Σ_pq (A_p·A′_q + 1_bias)(D_p·D′_q), rows a few at a time."""
        n, positions, m = len(a), a.shape[1], len(a2)
        step = max(int(self.pair_room // (2 * self.dtype.itemsize * m * positions**2)), 1)
        out = torch.empty(n, m, dtype=self.dtype, device=self.device)
        for lo in range(0, n, step):
            inner = a[lo : lo + step].flatten(0, 1) @ a2.flatten(0, 1).T
            if bias:
                inner += 1
            inner *= d[lo : lo + step].flatten(0, 1) @ d2.flatten(0, 1).T
            out[lo : lo + step] = inner.reshape(-1, positions, m, positions).sum((1, 3))
        return out

    # --- diagonal ----------------------------------------------------------------------------------------------

    def diagonal(self) -> Tensor:
        """K_ii; kept after the first call."""
        if self._diagonal is None:
            if not self.sides.symmetric:
                self._diagonal = tile_diagonal(self.tile, self.shape[0], self.device)
                return self._diagonal
            examples = self.sides.rows.n
            by_output = []
            wanted = range(self.c) if self.outputs in ("trace", "full") else [int(self.outputs)]
            with ProgressBar("diagonal of the ntk", len(wanted) * -(-examples // self.edge)) as meter:
                for k in wanted:
                    parts = []
                    for lo in range(0, examples, self.edge):
                        index = torch.arange(lo, min(lo + self.edge, examples), device=self.device)
                        parts.append(self._squares(self._block(self.sides.rows, index, k)))
                        meter.advance()
                    by_output.append(torch.cat(parts))
            stacked = torch.stack(by_output, dim=1)  # (n, outputs)
            self._diagonal = stacked.flatten() if self.outputs == "full" else stacked.sum(1)
        return self._diagonal

    def _squares(self, block: _Block) -> Tensor:
        total: Tensor | None = None
        for x in block.explicit:
            part = x.square().sum(1)
            total = part if total is None else total + part
        for a, d, bias in block.pairs:
            part = ((a @ a.transpose(1, 2) + float(bias)) * (d @ d.transpose(1, 2))).sum((1, 2))
            total = part if total is None else total + part
        assert total is not None
        return total
