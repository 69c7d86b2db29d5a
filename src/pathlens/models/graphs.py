"""Running traced graphs: a graph module that can be pickled, and an interpreter that keeps every value.

The graphs are made in `tracing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class _Reference:
    """Stands for a node in pickled arguments: its place in the list of nodes."""

    place: int


class NetworkGraph(fx.GraphModule):
    """A `torch.fx.GraphModule` whose pickle holds the graph itself.

    Torch pickles the generated code and traces it again when it is loaded. That would trace into the gate sites, which
    behave differently for tensors and functions, and get them wrong. Functions in the graph are pickled by name.
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


class ValueInterpreter(fx.Interpreter):
    """Runs a graph and keeps every value, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def call_node(module: nn.Module, node: fx.Node, load: Callable[[fx.Node], Any]) -> Any:
    """Evaluate one node of a module's graph; `load` gives the values of the nodes that it reads."""
    args, kwargs = fx.map_arg(node.args, load), fx.map_arg(node.kwargs, load)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
