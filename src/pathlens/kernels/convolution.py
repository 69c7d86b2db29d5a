"""Layers that act at many positions, and the tangent kernel in blocks of rows within a memory budget.

A layer used at P positions has ∂f/∂W = Σ_p D_p A_pᵀ with patches A (P, I) and sensitivities D (P, m). Either this
gradient is computed for each example (*explicit*), or the kernel is summed over pairs of positions (*pairwise*),
whichever costs less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pathlens.budgets import require_budget
from pathlens.kernels.parameters import ParameterGradients
from pathlens.kernels.sources import Sides, Source, pieces, probe
from pathlens.linops import KernelOperator
from pathlens.linops.evaluate import paired_entries
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar
from pathlens.records import Layer, Record

_WORTH_ALL_THREADS = 1e7  # multiplications in one product


@dataclass(frozen=True)
class LayerPlan:
    """How the kernel of one layer is computed.

    Attributes
    ----------
    layer : Layer
    positions : int
        P, over all calls.
    explicit : bool
        By per-example gradients (n, m·I); else by sums over pairs of positions.
    """

    layer: Layer
    positions: int
    explicit: bool

    @property
    def flat(self) -> bool:
        """One position: the kernel is the product of two Grams."""
        return self.positions == 1

    @property
    def gradient_sizes(self) -> list[int]:
        """Numbers in one example's gradient by the weight, and by the bias if there is one."""
        return [self.layer.outputs * self.layer.inputs, *([self.layer.outputs] if self.layer.bias else [])]

    def row_values(self) -> int:
        """Numbers per row of a block."""
        return sum(self.gradient_sizes) if self.explicit else self.patch_values

    @property
    def patch_values(self) -> int:
        """Numbers in one example's patches and sensitivities."""
        return self.positions * (self.layer.inputs + self.layer.outputs)


def plan_layer(layer: Layer, first: Record, n: int) -> LayerPlan:
    """Choose the form with fewer operations: explicit iff P > √(I·m(1 + P/n) / (I + m)).

    Pairwise costs 2n²P²(I + m), explicit 2nPIm + 2n²Im. The kernel of one position is always a product of two Grams.
    """
    positions = int(first.sensitivities(layer.name, 0).shape[1])
    i, m = layer.inputs, layer.outputs
    explicit = positions > 1 and positions > math.sqrt(i * m * (1 + positions / n) / (i + m))
    return LayerPlan(layer, positions, explicit)


def chosen_outputs(outputs: str | int, c: int) -> list[int]:
    """The outputs whose gradients a kernel needs: all c, or one.

    >>> chosen_outputs("trace", 3), chosen_outputs(1, 3)
    ([0, 1, 2], [1])
    """
    return [outputs] if isinstance(outputs, int) else list(range(c))


def write_gradients(rec: Record, plan: LayerPlan, outputs: Sequence[int], out: Sequence[Tensor]) -> None:
    """Write ∂f_k/∂W, (n, c, m·I), and ∂f_k/∂b, (n, c, m), of every example and each of c outputs to ``out``."""
    name = plan.layer.name
    a, d = rec.inputs(name), _sensitivities(rec, plan.layer, outputs)
    n, c, positions, m = d.shape
    across = d.transpose(2, 3).reshape(n, c * m, positions)  # no copy if a convolution was recorded
    _multiply(across, a, out[0].view(n, c * m, -1))
    if plan.layer.bias:
        torch.sum(across, 2, out=out[1].view(n, c * m))


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """A batch of matrix products; large ones one by one on a CPU, because `bmm` uses one thread for each."""
    if out.is_cuda or out[0].numel() * left.shape[2] < _WORTH_ALL_THREADS:
        torch.bmm(left, right, out=out)
        return
    for x, y, spot in zip(left, right, out):
        torch.mm(x, y, out=spot)


def _sensitivities(rec: Record, layer: Layer, outputs: Sequence[int]) -> Tensor:
    """(n, c, P, m); no copy if all outputs are chosen and the layer has no groups of channels."""
    grouped = any(call is not None and call.groups > 1 for call in layer.calls)
    if layer.name in rec.sensitivity and not grouped and list(outputs) == list(range(rec.outputs)):
        return rec.sensitivity[layer.name]
    return torch.stack([rec.sensitivities(layer.name, k) for k in outputs], dim=1)


# --- blocks ----------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """Some rows and one output: a matrix per explicit layer; patches, sensitivities and bias for each other layer."""

    explicit: list[Tensor]
    pairs: list[tuple[Tensor, Tensor, bool]]


class BlockTangent(KernelOperator):
    """Tangent kernel of chosen layers and parameters, computed block by block, with outputs in the outer loop.

    Parameters
    ----------
    sides : Sides
        Row sources with sensitivities.
    plans : sequence of LayerPlan
    others : ParameterGradients or None
        Gradients of parameters outside layers.
    outputs : "trace", "full" or int
    budget : int
        Bytes that may be allocated for blocks.
    max_bytes : int, optional
        Memory budget of the operator.
    """

    scaled = False
    _name = "ntk blocks"

    def __init__(
        self,
        sides: Sides,
        plans: Sequence[LayerPlan],
        others: ParameterGradients | None,
        outputs: str | int,
        budget: int,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self.sides, self.plans, self.others, self.outputs = sides, tuple(plans), others, outputs
        first = probe(sides.rows)
        self.c = first.outputs
        self.dtype, self.device, self.symmetric, self.max_bytes = (
            first.f.dtype,
            first.f.device,
            sides.symmetric,
            max_bytes,
        )
        times = self.c if outputs == "full" else 1
        self.shape = sides.rows.n * times, (sides.cols or sides.rows).n * times
        size, other_size = self.dtype.itemsize, 0 if others is None else others.size
        row = size * (sum(p.row_values() for p in self.plans) + other_size)
        one = sides.rows.rows(0, 1, 0).nbytes
        most_patches = max((p.patch_values for p in self.plans), default=0)
        # recording a row takes its record, as much again for the backward pass, and the patches of one layer
        work = 4 * one + size * (2 * most_patches + 3 * other_size)
        pair = max((size * p.positions**2 * 2 for p in self.plans if not p.explicit), default=size)
        remedy = "Raise max_bytes, or ask for one output or one layer."
        require_budget("ntk: one row and one column need", 2 * row + work + pair, budget, remedy)
        self.pair_bytes = max(budget // 8, pair)
        self.most = max(int(budget // 4 // work), 1)
        spare = budget - self.pair_bytes - self.most * work
        # a block of rows and one of columns, and their product
        self.edge = max(int((math.sqrt(row * row + size * max(spare, 0)) - row) / size), 1)
        self._diagonal: Tensor | None = None

    # --- tiles -------------------------------------------------------------------------------------------------

    @exact_precision()
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors."""
        out = torch.zeros(len(rows), len(cols), dtype=self.dtype, device=self.device)
        lefts, rights = self._by_output(rows), self._by_output(cols)
        jobs = [(left, right) for left in lefts for right in rights if self.outputs == "full" or left[0] == right[0]]
        total = sum(-(-len(i) // self.edge) * -(-len(j) // self.edge) for (_, _, i), (_, _, j) in jobs)
        with ProgressBar("ntk in blocks", total) as meter:
            for left, right in jobs:
                self._add(out, *left, *right, meter)
        return out

    def _by_output(self, index: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(output, positions in the index, examples) for every output that an index needs."""
        everywhere = torch.arange(len(index), device=self.device)
        if self.outputs != "full":
            return [(k, everywhere, index) for k in chosen_outputs(self.outputs, self.c)]
        places = [(k, everywhere[index % self.c == k]) for k in (index % self.c).unique().tolist()]
        return [(k, at, index[at] // self.c) for k, at in places]

    def _add(
        self, out: Tensor, k: int, at_i: Tensor, i: Tensor, k2: int, at_j: Tensor, j: Tensor, meter: ProgressBar
    ) -> None:
        """Add the kernel between output k of examples i and output k2 of examples j to `out[at_i, at_j]`."""
        mirror = self.symmetric and k == k2 and torch.equal(i, j)
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

        # filled piece by piece: concatenating pieces would need twice the memory
        explicit = [(p, [empty(1, size) for size in p.gradient_sizes]) for p in self.plans if p.explicit]
        pairwise = [p for p in self.plans if not p.explicit]
        pairs = [(p, empty(p.positions, p.layer.inputs), empty(p.positions, p.layer.outputs)) for p in pairwise]
        rest = [] if self.others is None else [empty(self.others.size)]
        at = 0
        for rec in pieces(source, index, self.most, output):
            here = slice(at, at + rec.n)
            for p, out in explicit:
                write_gradients(rec, p, [0], [matrix[here] for matrix in out])
            for p, a, d in pairs:
                a[here] = rec.inputs(p.layer.name)
                d[here] = rec.sensitivities(p.layer.name, 0)
            if self.others is not None:
                rest[0][here] = self.others(rec.x, rec.kept[0] if rec.kept else output)
            at += rec.n
        matrices = [matrix[:, 0] for _, out in explicit for matrix in out]
        return _Block(matrices + rest, [(a, d, p.layer.bias) for p, a, d in pairs])

    def _product(self, left: _Block, right: _Block) -> Tensor:
        explicit = (x @ y.T for x, y in zip(left.explicit, right.explicit))
        pairwise = (self._pairwise(a, d, *other[:2], bias) for (a, d, bias), other in zip(left.pairs, right.pairs))
        return reduce(Tensor.add_, chain(explicit, pairwise))

    def _pairwise(self, a: Tensor, d: Tensor, a2: Tensor, d2: Tensor, bias: bool) -> Tensor:
        """Σ_pq (A_p·A′_q + 1_bias)(D_p·D′_q), a few rows at a time."""
        n, positions, m = len(a), a.shape[1], len(a2)
        step = max(int(self.pair_bytes // (2 * self.dtype.itemsize * m * positions**2)), 1)
        out = torch.empty(n, m, dtype=self.dtype, device=self.device)
        for lo in range(0, n, step):
            inner = a[lo : lo + step].flatten(0, 1) @ a2.flatten(0, 1).T
            if bias:
                inner += 1
            inner *= d[lo : lo + step].flatten(0, 1) @ d2.flatten(0, 1).T
            out[lo : lo + step] = inner.reshape(-1, positions, m, positions).sum((1, 3))
        return out

    # --- diagonal ----------------------------------------------------------------------------------------------

    @exact_precision()
    def diagonal(self) -> Tensor:
        """K_ii, (n,); computed once."""
        if self._diagonal is None:
            index = torch.arange(self._square("diagonal"), device=self.device)
            self._diagonal = self._squares() if self.symmetric else paired_entries(self, index, index)
        return self._diagonal

    def _squares(self) -> Tensor:
        """The diagonal of a symmetric kernel: squared norms of gradients."""
        outputs, blocks = chosen_outputs(self.outputs, self.c), range(0, self.sides.rows.n, self.edge)
        squares = torch.empty(self.sides.rows.n, len(outputs), dtype=self.dtype, device=self.device)
        with ProgressBar("diagonal of the ntk", len(outputs) * len(blocks)) as meter:
            for at, k in enumerate(outputs):
                for lo in blocks:
                    rows = slice(lo, min(lo + self.edge, self.sides.rows.n))
                    block = self._block(self.sides.rows, torch.arange(rows.start, rows.stop, device=self.device), k)
                    explicit = (x.square().sum(1) for x in block.explicit)
                    pairwise = (
                        ((a @ a.transpose(1, 2) + float(bias)) * (d @ d.transpose(1, 2))).sum((1, 2))
                        for a, d, bias in block.pairs
                    )
                    squares[rows, at] = reduce(Tensor.add_, chain(explicit, pairwise))
                    meter.advance()
        return squares.flatten() if self.outputs == "full" else squares.sum(1)
