"""Path kernels of convolutional and residual networks, by a recursion over the steps of the value network.

Fields of different weight layers share no path, so it is enough to carry one kernel between positions per field (per
group of channels, of a grouped convolution), and the masks. Fully connected chains, which are products of Grams, live
in `overlap`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import BudgetError, ScaleError
from pathlens.kernels.fields import Mask, SpatialMap, Sums, Term, sum_windows
from pathlens.kernels.sources import Sides, Source, pieces, probe, tile_diagonal
from pathlens.kernels.wiring import Step, Wiring
from pathlens.linops import CustomKernel, GramSum
from pathlens.progress import ProgressBar

_SAMPLED = 8  # examples whose own entries estimate the size of a kernel
_INPUT, _START = "the input", "a start"  # keys of fields that no weight layer made: no node has such a name
_TOGETHER = 1 << 18  # numbers of one field on a CPU: temporaries stay in the cache, calls still cost little


class PathRecursion:
    """Runs the steps of a value network on blocks of pairs of examples.

    Parameters
    ----------
    wiring : Wiring
    """

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.steps, self.device = wiring.steps, wiring.device

    # --- running -----------------------------------------------------------------------------------------------

    def run(self, left: Block, right: Block, mode: str) -> Tensor:
        """The kernel on one block of pairs, (a, b), float64.

        Parameters
        ----------
        mode : {"npk", "paths", "walks"}
            Products of path features; numbers of paths of hidden units; the same with the input node counted.
        """
        count = mode != "npk"
        sums = Sums(left.rows, right.rows, self.wiring.diagonal or count, count)
        live: dict[fx.Node, list[Term]] = {}
        last = {n: i for i, s in enumerate(self.steps) for n in s.reads}
        result: Tensor | None = None
        for i, s in enumerate(self.steps):
            if s.fixed and not count:  # numbers that enter, whatever they are made of
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
            else:  # pass, or a constant added: a bias starts no path of its own
                live[s.node] = terms
            for n in s.reads:
                if last[n] == i:
                    live.pop(n, None)
        assert result is not None
        return result

    def _input(self, s: Step) -> Term:
        """The input where paths are counted."""
        channels = torch.zeros(s.channels, dtype=torch.long, device=self.device)  # the input is no random field
        return Term((_INPUT,), channels, math.prod(s.spatial), (), _ones)

    def _entered(self, s: Step, left: Block, right: Block) -> Term:
        """The input, behind fixed operations on it, where path features are multiplied."""
        return self._input(s).masked(Mask(left.x[s.name], right.x[s.name]))

    def _sum_pairs(self, terms: list[Term], sums: Sums, among: Tensor | None = None) -> Tensor | None:
        """Σ over pairs of terms that share paths; a path that is counted meets itself alone."""
        total: Tensor | None = None
        for i, first in enumerate(terms):
            for j, second in enumerate(terms):
                if first.key != second.key or (sums.count and i != j):
                    continue
                part = sums.pair(first, second, among)
                if part is None:
                    continue
                if not sums.count:
                    part = part * (first.factor * second.factor)
                total = part if total is None else total + part
        return total

    def _weight(self, s: Step, terms: list[Term], sums: Sums, mode: str) -> list[Term]:
        if not terms:  # no path leads here
            return []
        # what the input brings starts no path of hidden units before it meets a gate
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
            shape = (positions,) * (1 if sums.diagonal else 2)  # a group that reads channels of zeros alone
            return torch.zeros(sums.a, sums.b, *shape, dtype=torch.float64, device=self.device)

        found = []
        arrived = self._arrived(inputs)
        for g in range(s.groups if inputs else 0):
            at = self._windows(s, arrived[read == g].any(0).double()[None, None], sums)[0, 0] > 0
            present = torch.where(channels * s.groups // s.channels == g, 0, -1)
            # windows that lie in the padding read nothing
            where = () if bool(at.all()) else (SpatialMap(at.double().diag()),)
            found.append(Term((_INPUT, s.name), present, positions, where, _ones))
        if rest and s.name in self.wiring.passing:
            found.append(Term((s.name,), channels, positions, (), make, group))
        elif rest:
            made = [make(g) for g in range(s.groups)]
            found.append(Term((s.name,), channels, positions, (), lambda g: made[g], group))
        return found

    def _started(self, s: Step, terms: list[Term], mask: Mask) -> list[Term]:
        """Gated fields, where paths of hidden units are counted: one starts at each unit that reads an input, and does
        so once, however many inputs it reads and in however many ways."""
        found = [t.masked(mask) for t in terms if not _is_input(t)]
        reached = self._arrived([t for t in terms if _is_input(t)])
        if bool(reached.any()):
            everywhere = torch.zeros(s.channels, dtype=torch.long, device=self.device)
            start = Mask(mask.left * reached, mask.right)
            found.append(Term((_START, s.name), everywhere, math.prod(s.spatial), (), _ones).masked(start))
        return found

    def _arrived(self, inputs: list[Term]) -> Tensor:
        """Channels and positions at which the input arrives, (C, P) bool."""
        reached = torch.zeros((), dtype=torch.bool, device=self.device)
        for t in inputs:
            at = torch.ones(t.positions, dtype=torch.float64, device=self.device)
            for stage in t.stages:
                assert isinstance(stage, SpatialMap), "no mask comes before the first gate"
                at = stage.along_diagonal(at, True)
            reached = reached | ((t.channels >= 0)[:, None] & (at > 0))
        return reached

    def _windows(self, s: Step, total: Tensor, sums: Sums) -> Tensor:
        if s.detail is None:  # dense: over all positions, the same one for both examples
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
        if total is None:  # no hidden unit leads to them
            return torch.zeros(sums.a, sums.b, dtype=torch.float64, device=self.device)
        summed = total.sum(-1) if sums.diagonal else torch.diagonal(total, dim1=-2, dim2=-1).sum(-1)
        read = next(t for t in self.steps if t.node is s.reads[0])
        return summed / (read.channels * math.prod(read.spatial))


def _ones(group: int) -> None:
    """The kernel of the input."""


def _is_input(term: Term) -> bool:
    """Whether a field is the input, or made of it by layers without a gate between."""
    return term.key[0] == _INPUT


# --- the kernel ------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """Gates, and what enters by step, of some rows, float64."""

    rows: int
    x: dict[str, Tensor]
    gates: dict[str, Tensor]

    def part(self, start: int, most: int) -> Block:
        """The same for at most so many rows from one on."""
        cut = slice(start, min(start + most, self.rows))
        x = {name: t[cut] for name, t in self.x.items()}
        return Block(cut.stop - start, x, {site: g[cut] for site, g in self.gates.items()})


def _block(wiring: Wiring, source: Source, index: Tensor, soft: bool, most: int) -> Block:
    found = list(pieces(source, index, most))
    x = wiring.entered(torch.cat([r.x for r in found]))
    gates = {}
    for site in source.sites:
        parts = [r.gates(site) if soft else r.bits[site] for r in found]
        gates[site] = torch.cat(parts).double()
    return Block(len(index), x, gates)


def path_kernel(wiring: Wiring, sides: Sides, mode: str, soft: bool, name: str, max_bytes: int | None) -> GramSum:
    """A path kernel as an operator; tiles are cut into blocks of pairs that fit the budget."""
    recursion = PathRecursion(wiring)
    first = probe(sides.rows)
    dtype, device = first.f.dtype, first.f.device
    budget = resolve_budget(max_bytes, device)
    diagonal = wiring.diagonal or mode != "npk"
    values = wiring.count_values if diagonal else wiring.pair_values
    pair_bytes, row_bytes = 8 * (5 * values + wiring.held_values(diagonal)), 3 * 8 * wiring.row_values
    room = budget // 2
    if pair_bytes + 2 * row_bytes > room:
        raise BudgetError(
            f"{name}: one pair of examples needs {human_bytes(2 * (pair_bytes + 2 * row_bytes))}, the budget is "
            f"{human_bytes(budget)}. Raise max_bytes."
        )
    edge = 1
    while 4 * edge * edge * pair_bytes + 4 * edge * row_bytes <= room and edge < 512:
        edge *= 2
    step = edge  # pairs that the recursion sees at once; rows are gathered, or recorded again, for more of them
    while device.type == "cpu" and step > 1 and step * step * values > _TOGETHER:
        step //= 2
    scale = 0

    def run(left: Block, right: Block) -> Tensor:
        return (recursion.run(left, right, mode) * 2.0**-scale).to(dtype)

    def fill(left: Block, right: Block, out: Tensor, same: bool) -> None:
        for i in range(0, left.rows, step):
            some = left.part(i, step)
            for j in range(i if same else 0, right.rows, step):
                out[i : i + step, j : j + step] = found = run(some, right.part(j, step))
                if same and j > i:
                    out[j : j + step, i : i + step] = found.T

    def compute(rows: Tensor, cols: Tensor, out: Tensor, meter: ProgressBar) -> None:
        other = sides.rows if sides.cols is None else sides.cols
        mirror = sides.symmetric and torch.equal(rows, cols)
        for i in range(0, len(rows), edge):
            left = _block(wiring, sides.rows, rows[i : i + edge], soft, edge)
            for j in range(i if mirror else 0, len(cols), edge):
                same = mirror and i == j
                right = left if same else _block(wiring, other, cols[j : j + edge], soft, edge)
                spot = out[i : i + edge, j : j + edge]
                fill(left, right, spot, same)
                if mirror and not same:
                    out[j : j + edge, i : i + edge] = spot.T
                meter.advance()

    def tile(rows: Tensor, cols: Tensor) -> Tensor:
        out = torch.empty(len(rows), len(cols), dtype=dtype, device=device)
        with ProgressBar(f"{name} by recursion", -(-len(rows) // edge) * -(-len(cols) // edge)) as meter:
            compute(rows, cols, out, meter)
        if not bool(torch.isfinite(out).all()):
            raise ScaleError(
                f"{name}: entries leave the range of {dtype}. Record the network in float64: net.double()."
            )
        return out

    kept: list[Tensor] = []

    def diagonal_entries() -> Tensor:
        if not kept:
            few = max(min(step, 32) // 2, 1)  # of so few pairs, those off the diagonal cost less than calls for each
            parts = torch.arange(sides.rows.n).split(few)
            blocks = (_block(wiring, sides.rows, part, soft, few) for part in parts)
            kept.append(torch.cat([run(block, block).diagonal() for block in blocks]))
        return kept[0]

    # one power of two for all entries keeps counts of deep networks within float32, and exact
    own = 0.0
    for i in range(0, sides.rows.n, max(sides.rows.n // _SAMPLED, 1)):
        block = _block(wiring, sides.rows, torch.tensor([i]), soft, 1)
        own = max(own, float(recursion.run(block, block, mode)))
    scale = math.frexp(own)[1] if math.isfinite(own) else 0
    shape = (sides.rows.n, (sides.rows if sides.cols is None else sides.cols).n)
    operator = CustomKernel(
        shape,
        tile,
        diagonal_entries if sides.symmetric else partial(tile_diagonal, tile, shape[0]),
        dtype=dtype,
        device=device,
        symmetric=sides.symmetric,
        name=name,
        tile_buffers=1,
        max_bytes=room,
    )
    scaled = operator * 2.0**scale
    return GramSum(scaled.root, dtype, device, name=name, max_bytes=scaled.max_bytes)
