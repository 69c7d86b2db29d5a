"""Path kernels of convolutional and residual networks, by a recursion over the steps of the value network.

Fields of different weight layers share no path, so that one kernel between positions per field (for a grouped
convolution, per group) and the masks are enough. Fully connected chains are in `overlap`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pathlens.budgets import require_budget, resolve_budget
from pathlens.errors import ScaleError
from pathlens.kernels.fields import Mask, SpatialMap, Sums, Term, sum_windows
from pathlens.kernels.sources import Sides, Source, fill_blocks, pieces, probe
from pathlens.kernels.wiring import Step, Wiring
from pathlens.linops import GramSum, KernelOperator
from pathlens.linops.evaluate import paired_entries
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

_SAMPLED = 8  # examples whose diagonal entries estimate the size of a kernel
_INPUT, _START = "the input", "a start"  # keys of fields without a weight layer: no node has such a name
_TOGETHER = 1 << 18  # numbers of one field on a CPU: small enough for the cache, large enough to amortise calls


class PathRecursion:
    """Runs the steps of a value network on blocks of pairs of examples."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.steps, self.device = wiring.steps, wiring.device

    def run(self, left: Block, right: Block, mode: str) -> Tensor:
        """The kernel on one block of pairs, (a, b), float64.

        Parameters
        ----------
        mode : {"npk", "paths", "walks"}
            Inner products of path features; numbers of paths of hidden units; the same including the input node.
        """
        count = mode != "npk"
        sums = Sums(left.rows, right.rows, self.wiring.diagonal or count, count)
        live: dict[fx.Node, list[Term]] = {}
        last = {n: i for i, s in enumerate(self.steps) for n in s.reads}
        result: Tensor | None = None
        for i, s in enumerate(self.steps):
            if s.fixed and not count:  # a fixed function of the input
                live[s.node] = [self._entered(s, left, right)] if s.name in left.x else []
                continue
            terms = [t for n in s.reads for t in live[n]]
            if s.kind == "input":
                live[s.node] = [self._input(s)]
            elif s.kind == "gate":
                mask = Mask(
                    left.gates[s.detail].reshape(left.rows, s.channels, -1),
                    right.gates[s.detail].reshape(right.rows, s.channels, -1),
                )
                live[s.node] = self._started(s, terms, mask) if mode == "paths" else [t.masked(mask) for t in terms]
            elif s.kind == "weight":
                live[s.node] = self._weight(s, terms, sums, mode)
            elif s.kind == "norm":
                live[s.node] = [t if count else t.weighed(s.name) for t in terms]
            elif s.kind == "add":
                live[s.node] = [replace(t, factor=t.factor * sign) for n, sign in s.detail for t in live[n]]
            elif s.kind == "cat":
                live[s.node] = self._join(s, live)
            elif s.kind == "map":
                live[s.node] = [t.mapped(*s.detail) for t in terms]
            elif s.kind == "scale":
                live[s.node] = [replace(t, factor=t.factor * s.detail) for t in terms]
            elif s.kind == "output":
                result = self._result(s, [t for t in terms if mode != "paths" or not _is_input(t)], sums)
            else:  # pass, or an added constant: a bias starts no path
                live[s.node] = terms
            for n in s.reads:
                if last[n] == i:
                    live.pop(n, None)
        assert result is not None
        return result

    def _input(self, s: Step) -> Term:
        """The field of the input if paths are counted."""
        channels = torch.zeros(s.channels, dtype=torch.long, device=self.device)  # all input channels share paths
        return Term((_INPUT,), channels, math.prod(s.spatial), (), _ones)

    def _entered(self, s: Step, left: Block, right: Block) -> Term:
        """The field of the input after fixed operations, if path features are multiplied."""
        return self._input(s).masked(Mask(left.x[s.name], right.x[s.name]))

    def _sum_pairs(self, terms: list[Term], sums: Sums, among: Tensor | None = None) -> Tensor | None:
        """Σ over pairs of terms that share paths; if paths are counted, each term pairs only with itself."""
        total: Tensor | None = None
        for i, first in enumerate(terms):
            for j, second in enumerate(terms):
                if first.key != second.key or (sums.count and i != j):
                    continue
                part = sums.pair(first, second, among)
                if part is not None:
                    part = part if sums.count else part * (first.factor * second.factor)
                    total = part if total is None else total + part
        return total

    def _weight(self, s: Step, terms: list[Term], sums: Sums, mode: str) -> list[Term]:
        if not terms:  # no path leads here
            return []
        # fields of the input start no path of hidden units before a gate
        if s.detail is not None and s.detail[0] is not None:
            terms = [t.mapped(s.detail[0], None) for t in terms]
        inputs = [t for t in terms if mode == "paths" and _is_input(t)]
        rest = [t for t in terms if mode != "paths" or not _is_input(t)]
        positions = math.prod(s.spatial)
        channels = torch.arange(s.channels, device=self.device)
        group = channels * s.groups // s.channels if s.groups > 1 else None
        read = torch.arange(len(terms[0].channels), device=self.device) * s.groups // len(terms[0].channels)

        def make(g: int) -> Tensor:
            total = self._sum_pairs(rest, sums, None if group is None else read == g)
            if total is not None:
                return self._windows(s, total, sums)
            shape = (positions,) * (1 if sums.diagonal else 2)  # the group reads only channels of zeros
            return torch.zeros(sums.a, sums.b, *shape, dtype=torch.float64, device=self.device)

        found = []
        arrived = self._arrived(inputs)
        for g in range(s.groups if inputs else 0):
            at = self._windows(s, arrived[read == g].any(0).double()[None, None], sums)[0, 0] > 0
            present = torch.where(channels * s.groups // s.channels == g, 0, -1)
            # windows inside the padding read nothing
            where = () if bool(at.all()) else (SpatialMap(at.double().diag()),)
            found.append(Term((_INPUT, s.name), present, positions, where, _ones))
        if rest and s.name in self.wiring.passing:
            found.append(Term((s.name,), channels, positions, (), make, group))
        elif rest:
            made = [make(g) for g in range(s.groups)]
            found.append(Term((s.name,), channels, positions, (), lambda g: made[g], group))
        return found

    def _started(self, s: Step, terms: list[Term], mask: Mask) -> list[Term]:
        """Gated fields if paths of hidden units are counted: one path starts at each unit that reads any input."""
        found = [t.masked(mask) for t in terms if not _is_input(t)]
        reached = self._arrived([t for t in terms if _is_input(t)])
        if bool(reached.any()):
            everywhere = torch.zeros(s.channels, dtype=torch.long, device=self.device)
            start = Mask(mask.left * reached, mask.right)
            found.append(Term((_START, s.name), everywhere, math.prod(s.spatial), (), _ones).masked(start))
        return found

    def _arrived(self, inputs: list[Term]) -> Tensor:
        """Channels and positions that depend on the input, (C, P) bool."""
        reached = torch.zeros((), dtype=torch.bool, device=self.device)
        for t in inputs:
            at = torch.ones(t.positions, dtype=torch.float64, device=self.device)
            for stage in t.stages:
                assert isinstance(stage, SpatialMap), "there is no mask before the first gate"
                at = stage.along_diagonal(at, True)
            reached = reached | ((t.channels >= 0)[:, None] & (at > 0))
        return reached

    def _windows(self, s: Step, total: Tensor, sums: Sums) -> Tensor:
        if s.detail is None:  # dense: sum over positions, the same position in both examples
            if sums.diagonal:
                return total.sum(-1, keepdim=True)
            return torch.diagonal(total, dim1=-2, dim2=-1).sum(-1)[..., None, None]
        copies = 1 if sums.diagonal else 2
        t = sum_windows(s.detail[1], total.reshape(*total.shape[:2], *s.detail[2] * copies), copies)
        return t.reshape(*total.shape[:2], *(math.prod(s.spatial),) * copies)

    def _join(self, s: Step, live: dict[fx.Node, list[Term]]) -> list[Term]:
        at = 0
        joined: list[Term] = []
        for n in s.detail:
            width = next(t.channels for t in self.steps if t.node is n)
            moved = torch.full((s.channels,), -1, dtype=torch.long, device=self.device)
            moved[at : at + width] = torch.arange(width, device=self.device)
            joined.extend(t.mapped(None, moved) for t in live[n])
            at += width
        return joined

    def _result(self, s: Step, terms: list[Term], sums: Sums) -> Tensor:
        """Mean over outputs; after a dense layer all outputs have the same kernel."""
        total = self._sum_pairs(terms, sums)
        if total is None:  # no path leads to the outputs
            return torch.zeros(sums.a, sums.b, dtype=torch.float64, device=self.device)
        summed = total.sum(-1) if sums.diagonal else torch.diagonal(total, dim1=-2, dim2=-1).sum(-1)
        read = next(t for t in self.steps if t.node is s.reads[0])
        return summed / (read.channels * math.prod(read.spatial))


def _ones(group: int) -> None:
    """The kernel of the input is one everywhere."""


def _is_input(term: Term) -> bool:
    """Whether a field is the input, or the input after layers without a gate."""
    return term.key[0] == _INPUT


# --- the kernel ------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """Inputs by step and gates by site of some rows, float64."""

    rows: int
    x: dict[str, Tensor]
    gates: dict[str, Tensor]

    def part(self, start: int, most: int) -> Block:
        """At most `most` rows from `start` on."""
        cut = slice(start, min(start + most, self.rows))
        x, gates = ({name: t[cut] for name, t in table.items()} for table in (self.x, self.gates))
        return Block(cut.stop - start, x, gates)


class PathKernel(KernelOperator):
    """A path kernel divided by 2^scale; tiles are computed in blocks of pairs that fit the budget."""

    def __init__(self, wiring: Wiring, sides: Sides, mode: str, soft: bool, name: str, max_bytes: int | None) -> None:
        self._recursion, self._sides, self._mode, self._soft, self._name = (
            PathRecursion(wiring),
            sides,
            mode,
            soft,
            name,
        )
        first = probe(sides.rows)
        self.dtype, self.device, self.symmetric = first.f.dtype, first.f.device, sides.symmetric
        self._columns = sides.rows if sides.cols is None else sides.cols
        self.shape = sides.rows.n, self._columns.n
        budget = resolve_budget(max_bytes, self.device)
        self.max_bytes = budget // 2
        diagonal = wiring.diagonal or mode != "npk"
        values = wiring.count_values if diagonal else wiring.pair_values
        pair_bytes, row_bytes = 8 * (5 * values + wiring.held_values(diagonal)), 3 * 8 * wiring.row_values
        require_budget(f"{name}: one pair of examples needs", 2 * (pair_bytes + 2 * row_bytes), budget)
        self._edge = 1  # rows of a block, which are gathered or recorded at once
        while 4 * self._edge**2 * pair_bytes + 4 * self._edge * row_bytes <= self.max_bytes and self._edge < 512:
            self._edge *= 2
        self._step = self._edge  # rows of one recursion
        while self.device.type == "cpu" and self._step > 1 and self._step**2 * values > _TOGETHER:
            self._step //= 2
        self._diagonal: Tensor | None = None
        # one power of two for all entries keeps the counts of deep networks in the range of float32, and exact
        samples = range(0, sides.rows.n, max(sides.rows.n // _SAMPLED, 1))
        blocks = (self._load(sides.rows, torch.tensor([i])) for i in samples)
        size = max(float(self._recursion.run(block, block, mode)) for block in blocks)
        self.scale = math.frexp(size)[1] if math.isfinite(size) else 0

    def _load(self, source: Source, index: Tensor, start: int = 0) -> Block:
        """One block of the rows in `index`."""
        index = index[start : start + self._edge]
        found = list(pieces(source, index, self._edge))
        x = self._recursion.wiring.entered(torch.cat([r.x for r in found]))
        gates = {site: [r.gates(site) if self._soft else r.bits[site] for r in found] for site in source.sites}
        return Block(len(index), x, {site: torch.cat(parts).double() for site, parts in gates.items()})

    def _run(self, left: Block, right: Block, same: bool = False) -> Tensor:
        return (self._recursion.run(left, right, self._mode) * 2.0**-self.scale).to(self.dtype)

    @exact_precision()
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors."""
        edge, step = self._edge, self._step
        out = torch.empty(len(rows), len(cols), dtype=self.dtype, device=self.device)
        mirror = self.symmetric and torch.equal(rows, cols)
        with ProgressBar(f"{self.name} by recursion", -(-len(rows) // edge) * -(-len(cols) // edge)) as meter:

            def product(left: Block, right: Block, same: bool) -> Tensor:
                found = torch.empty(left.rows, right.rows, dtype=self.dtype, device=self.device)
                fill_blocks(found, step, same, partial(left.part, most=step), partial(right.part, most=step), self._run)
                meter.advance()
                return found

            left, right = partial(self._load, self._sides.rows, rows), partial(self._load, self._columns, cols)
            fill_blocks(out, edge, mirror, left, right, product)
        if not bool(torch.isfinite(out).all()):
            raise ScaleError(
                f"{self.name}: entries overflow {self.dtype}. Record the network in float64: net.double()."
            )
        return out

    @exact_precision()
    def diagonal(self) -> Tensor:
        """K_ii, (n,); computed once."""
        if self._diagonal is None:
            index = torch.arange(self._square("diagonal"), device=self.device)
            if self.symmetric:
                few = max(min(self._step, 32) // 2, 1)  # entries off the diagonal cost less than a call for each row
                blocks = (self._load(self._sides.rows, part) for part in index.split(few))
                self._diagonal = torch.cat([self._run(block, block).diagonal() for block in blocks])
            else:
                self._diagonal = paired_entries(self, index, index)
        return self._diagonal


def path_kernel(wiring: Wiring, sides: Sides, mode: str, soft: bool, name: str, max_bytes: int | None) -> GramSum:
    """The path kernel of a network, by recursion; see `PathRecursion.run` for the modes."""
    kernel = PathKernel(wiring, sides, mode, soft, name, max_bytes)
    return GramSum(
        (kernel * 2.0**kernel.scale).root, kernel.dtype, kernel.device, name=name, max_bytes=kernel.max_bytes
    )
