"""Modules that run a traced graph and can be pickled, and a run that is watched.

`tracing.py` makes the graphs; here is only what runs them and how they are written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class _Reference:
    """Stands for a node in pickled arguments: its place in the list of nodes."""

    place: int


class NetworkGraph(fx.GraphModule):
    """A `torch.fx.GraphModule` whose pickle holds the graph itself.

    That of torch holds the generated code, and follows it anew when it is loaded: it would look into the gate sites,
    where what happens depends on whether a gate is a tensor or a function, and get them wrong. Functions in the graph
    are pickled by name, as pickle always does; the tensors and modules are as everywhere in torch.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        place = {node: _Reference(i) for i, node in enumerate(self.graph.nodes)}

        def refer(argument: Any) -> Any:
            return place[argument] if isinstance(argument, fx.Node) else argument

        nodes = [
            (node.op, node.target, *fx.node.map_aggregate((node.args, node.kwargs), refer), node.name)
            for node in self.graph.nodes
        ]
        graph = ("_graph", "_code", "_lineno_map", "_prologue_start")  # made anew
        state = {k: v for k, v in self.__dict__.items() if k not in graph}
        return _load, (nodes, state, type(self).__name__)


def _load(nodes: list[tuple[Any, ...]], state: dict[str, Any], name: str) -> NetworkGraph:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def resolve(argument: Any) -> Any:
        return made[argument.place] if isinstance(argument, _Reference) else argument

    for op, target, args, kwargs, label in nodes:
        args, kwargs = fx.node.map_aggregate((args, kwargs), resolve)
        made.append(graph.create_node(op, target, args, kwargs, label))
    root = nn.Module()
    root.__dict__.update(state)
    module = NetworkGraph(root, graph, class_name=name)
    module.__dict__.update(state)
    return module


class Watcher(fx.Interpreter):
    """Runs a graph and keeps every value, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n] = super().run_node(n)
        return self.seen[n]
