"""`Tracker`: cuts a box into the cells on which all gates of a network are constant.

On a cell every pre-activation is an affine function of dim coordinates, which is determined by its values at 1 + dim
points. So for each cell the network is run on the same 1 + dim points with the gates of the cell, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pathlens.errors import RegionError
from pathlens.models import Open
from pathlens.models.gates import leak
from pathlens.models.graphs import ValueInterpreter, call_node
from pathlens.models.sources import GraphSource, ShallowSource
from pathlens.models.tensors import tensors_in
from pathlens.models.tracing import apply_site, describe, linear_unit
from pathlens.progress import ProgressBar
from pathlens.regions.cells import Bits, Cells, Floats
from pathlens.regions.networks import HardNetwork

_BYTES = 64 << 20  # values of the cells that are processed together
_MOST = 4096  # more cells at once are not faster


@dataclass(frozen=True)
class FinishedCells:
    """Cells on which all gates are constant, with their gates and affine outputs.

    Attributes
    ----------
    cells : Cells
    bits : list of (K, units)
        One per gate site, flat.
    outputs : (K, c, 1 + dim)
        Coefficients of the outputs in the cells' coordinates.
    """

    cells: Cells
    bits: list[Bits]
    outputs: Floats


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors of a tensor, tuple or list."""
    return fx.node.map_aggregate(value, lambda v: function(v) if isinstance(v, Tensor) else v)


def _repeat(value: Any, count: int) -> Any:
    """Repeat the rows of every tensor."""
    return _map(value, lambda t: t.repeat(count, *(1,) * (t.ndim - 1)))


class Tracker:
    """Cuts a box into the cells of one network.

    Parameters
    ----------
    hard : HardNetwork
    points : (1 + dim, ...)
        The inputs at the box's middle and at the ends of its half axes.
    where : str
        The public function, for messages.
    """

    def __init__(self, hard: HardNetwork, points: Tensor, where: str) -> None:
        self.hard, self.points, self.where = hard, points, where
        self.net = hard.net
        self.count = len(points)
        self.slopes = [site.slope for site in self.net.sites]
        self._owner: dict[fx.Node, fx.GraphModule] = {}
        self._constants: dict[fx.Node, Any] = {}
        self._shape_nodes: set[fx.Node] = set()
        self._data: set[fx.Node] = set()
        self._site_of: dict[fx.Node, int] = {}  # placeholder of a gate → its site
        self._shared: dict[fx.Node, Any] = {}  # values that do not depend on gates are the same for all cells
        self._program: list[fx.Node | int] = []
        self._reads: dict[int, fx.Node | Tensor] = {}
        with torch.no_grad():
            self._prepare()
        self._last = self._last_uses()
        width = max(int(np.prod(s)) for s in hard.shapes.values())
        self.together = int(min(_MOST, max(1, _BYTES // (8 * 16 * width))))

    # --- the program ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Order both graphs into steps; compute values that do not depend on gates."""
        net, source = self.net, self.net.source
        gates = list(net.gates(self.points).values())
        nodes: list[fx.Node] = []
        entry: Tensor | None = None
        if isinstance(source, GraphSource):
            out = self._learn(source.network, self.points, None if source.linear else gates)
            nodes += [n for n in source.network.graph.nodes if n.op != "output"]
            reads = _output_of(source.network)
            self._reads.update(enumerate(reads[: source.count]))
            entry = out[-1] if len(out) > source.count else None
        elif isinstance(source, ShallowSource):
            self._reads.update(enumerate(source(self.points)))
        x = self.points
        if net.value_input == "ones":
            x = torch.ones_like(x if entry is None else entry)
        self._learn(net.values, x, gates)
        nodes += [n for n in net.values.graph.nodes if n.op != "output"]
        if source is None and not isinstance(net.gate, Open):
            for n in nodes:
                if n.target is apply_site:
                    self._reads[self._site_of[n.args[1]]] = n.args[0]  # type: ignore[index, assignment]
        # a site cuts as soon as its pre-activation is known: at the start, or after the step that computes it
        self._program += [i for i, r in self._reads.items() if isinstance(r, Tensor) or r in self._shared]
        for n in nodes:
            if n in self._data and n not in self._shared:
                self._program += [n, *(i for i, r in self._reads.items() if r is n)]
        self._result = _output_of(net.values)[0]

    def _learn(self, module: fx.GraphModule, x: Tensor, gates: list[Tensor] | None) -> Any:
        """Run a graph on the points; sort its nodes into constants, sizes, shared values and values of cells.

        Parameters
        ----------
        gates : list of Tensor or None
            At the points; None where the units are linear.
        """
        runs = (
            ValueInterpreter(module),
            ValueInterpreter(module),
        )  # a run on one point shows which dimension is that of the points
        for run, n in zip(runs, (1, self.count)):
            units = [linear_unit] * len(self.net.sites) if gates is None else [_given(g[:n]) for g in gates]
            out = run.run(x[:n], *units)
        holders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._site_of.update({n: i for i, n in enumerate(holders[1:])})
        moving: set[fx.Node] = set()  # depends on gates
        for n in module.graph.nodes:
            self._owner[n] = module
            value = runs[1].values.get(n)
            if n in holders[1:] or n.op == "output":
                continue
            inputs = [i for i in n.all_input_nodes if i not in holders[1:]]
            depends = n is holders[0] or any(i in self._data or i in self._shape_nodes for i in inputs)
            if not depends:
                self._constants[n] = value
                continue
            tensors = list(tensors_in(value))
            if not tensors:
                self._shape_nodes.add(n)
                continue
            both = [*((t, self.count) for t in tensors), *((t, 1) for t in tensors_in(runs[0].values[n]))]
            if any(t.ndim == 0 or t.shape[0] != rows for t, rows in both):
                raise RegionError(
                    f"{self.where}: {describe(n)}: for {self.count} inputs it has shape {tuple(tensors[0].shape)}. "
                    "Rows must stay the first dimension inside the network."
                )
            self._data.add(n)
            if (n.target is apply_site and gates is not None) or any(i in moving for i in inputs):
                moving.add(n)
            else:
                self._shared[n] = value
        return out

    def _needs(self, node: fx.Node) -> set[fx.Node]:
        """Values of cells that this node reads, also through shapes."""
        found: set[fx.Node] = set()
        for n in node.all_input_nodes:
            if n in self._shape_nodes:
                found |= self._needs(n)
            elif n in self._data:
                found.add(n)
        return found

    def _last_uses(self) -> dict[int, list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for at, step in enumerate(self._program):
            reads = {self._reads[step]} if isinstance(step, int) else self._needs(step)
            last.update({n: at for n in reads if isinstance(n, fx.Node)})
        last[self._result] = len(self._program)
        by_step: dict[int, list[fx.Node]] = {}
        for n, at in last.items():
            by_step.setdefault(at, []).append(n)
        return by_step

    # --- running -------------------------------------------------------------------------------------------------

    def run(self, box: Cells, limit: int) -> list[FinishedCells]:
        """Cut a box (one cell) into all its cells; more than `limit` are refused."""
        self._limit, self._cuts, self._finished = limit, 1, list[FinishedCells]()
        self._others = 0  # other cells, finished or waiting
        whole = float(box.measures().sum())
        with torch.no_grad(), ProgressBar(f"{self.where} (‰ of the box)", 1000) as meter:
            self._meter, self._whole, self._done, self._shown = meter, whole, 0.0, 0
            self._advance(0, box, {}, {})
        return self._finished

    def _advance(self, at: int, cells: Cells, env: dict[fx.Node, Any], bits: dict[int, Tensor]) -> None:
        for now in range(at, len(self._program)):
            step = self._program[now]
            if isinstance(step, int):
                self._split(now, step, cells, env, bits)
                return
            env[step] = self._evaluate(step, len(cells), env, bits)
            self._forget(now, env)
        self._finish(cells, env, bits)

    def _forget(self, now: int, env: dict[fx.Node, Any]) -> None:
        for n in self._last.get(now, ()):
            env.pop(n, None)

    def _split(self, now: int, site: int, cells: Cells, env: dict[fx.Node, Any], bits: dict[int, Tensor]) -> None:
        """Cut by the lines of one site and continue with the pieces, some at a time."""
        read = self._reads[site]
        q = read if isinstance(read, Tensor) else self._shared.get(read)
        values = (env[read] if q is None else q).reshape(-1, self.count, int(np.prod(self._shape(site))))  # type: ignore[index]
        self._forget(now, env)
        pieces, parent, on = cells.cut(_coefficients(values), self._cuts, self._limit, self._others)
        self._cuts += len(pieces)
        self._others += len(pieces)
        gates = torch.from_numpy(on)
        for lo in range(0, len(pieces), self.together):
            rows = slice(lo, lo + self.together)
            index = torch.from_numpy(parent[rows])
            own = {n: _map(v, partial(self._of_cells, index)) for n, v in env.items()}
            switched = {j: b[index] for j, b in bits.items()} | {site: gates[rows]}
            part = pieces.part(rows)
            self._others -= len(part)
            self._advance(now + 1, part, own, switched)

    def _shape(self, site: int) -> tuple[int, ...]:
        return self.hard.shapes[self.hard.sites[site]]

    def _of_cells(self, index: Tensor, t: Tensor) -> Tensor:
        return t.reshape(-1, self.count, *t.shape[1:])[index].flatten(0, 1)

    def _gate(self, site: int, cells: int, bits: dict[int, Tensor]) -> Tensor:
        """The gate values of each cell, once for each of its points."""
        shape = self._shape(site)
        if site not in bits:  # a deep linear network
            return torch.ones(cells * self.count, *shape, dtype=torch.float64)
        gate = leak(bits[site].double(), self.slopes[site]).repeat_interleave(self.count, dim=0)
        return gate.reshape(-1, *shape)

    def _evaluate(self, node: fx.Node, cells: int, env: dict[fx.Node, Any], bits: dict[int, Tensor]) -> Any:
        def load(n: fx.Node) -> Any:
            if n in self._constants:
                return self._constants[n]
            if n in self._shape_nodes:
                return self._evaluate(n, cells, env, bits)
            if n in self._site_of:
                return self._gate(self._site_of[n], cells, bits)
            if n in self._shared:
                return _repeat(self._shared[n], cells)
            return env[n]

        return call_node(self._owner[node], node, load)

    def _finish(self, cells: Cells, env: dict[fx.Node, Any], bits: dict[int, Tensor]) -> None:
        f = env.get(self._result)
        if f is None:
            f = _repeat(self._shared[self._result], len(cells))
        outputs = _coefficients(f.reshape(len(cells), self.count, -1))
        ones = [np.ones((len(cells), int(np.prod(s))), dtype=bool) for s in self.hard.shapes.values()]
        found = [bits[i].numpy() if i in bits else ones[i] for i in range(len(ones))]
        self._finished.append(FinishedCells(cells, found, outputs))
        self._others += len(cells)
        self._done += float(cells.measures().sum()) / self._whole
        steps = int(1000 * self._done) - self._shown
        self._shown += steps
        self._meter.advance(steps)


def _coefficients(values: Tensor) -> Floats:
    """(K, U, 1 + dim) coefficients from values at the points, (K, 1 + dim, U)."""
    slopes = values[:, 1:] - values[:, :1]
    return torch.cat([values[:, :1], slopes], dim=1).transpose(1, 2).numpy()


def _output_of(module: fx.GraphModule) -> list[fx.Node]:
    result: Any = next(n for n in module.graph.nodes if n.op == "output").args[0]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _given(gate: Tensor) -> Any:
    """A unit with a fixed gate; a function, so that it fits both kinds of graph."""
    return lambda q, slope: q * gate
