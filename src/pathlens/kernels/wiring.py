"""The wiring of the value network of a gated network: its graph as steps for path kernels.

Layers, gates, additions and concatenations are recognised by their type or name. Any other operation is probed: it must
be a fixed map of positions and channels, else a `RecordError` names it.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pathlens.errors import RecordError
from pathlens.kernels.fields import SpatialMap
from pathlens.models.graphs import ValueInterpreter, call_node
from pathlens.models.tracing import linear_unit
from pathlens.recording import GatedNetwork
from pathlens.recording.tape import geometry
from pathlens.records import Convolution

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PASS = (nn.Identity, nn.modules.dropout._DropoutNd)
_MAX_POOLS = ("max_pool", "maxpool", "boolean_dispatch")
_MAX_POOLING = (
    "max-pooling switches paths by their values, which a record of gates does not contain",
    "Use average-pooling: gated_twin(…, max_pool='average')",
)


@dataclass(frozen=True)
class Step:
    """One node of the graph: its kind, the nodes it reads, and the shape of its result."""

    kind: str  # input, gate, weight, pass, norm, add, cat, map, scale, output
    name: str
    reads: tuple[fx.Node, ...]
    node: fx.Node
    channels: int
    spatial: tuple[int, ...]
    detail: Any = None
    groups: int = 1  # of a convolution
    fixed: bool = False  # a function of the input without weights, at which paths start


def _target(node: fx.Node) -> str:
    """The name of the function, method or module that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _refuse(node: fx.Node, why: str, remedy: str) -> RecordError:
    return RecordError(f"path kernel: node '{node.name}' ({_target(node)}): {why}. {remedy}.")


def _value_arguments(net: GatedNetwork, x: Tensor, ids: Tensor | None) -> tuple[Any, ...]:
    """The arguments with which the network calls its value network."""
    caught: list[tuple[Any, ...]] = []
    handle = net.values.register_forward_pre_hook(lambda module, inputs: caught.append(inputs))
    try:
        with torch.no_grad():
            net(x, ids) if ids is not None else net(x)
    finally:
        handle.remove()
    return caught[0]


def _generic(argument: Any) -> Any:
    """Positive random numbers of the same shape for a tensor, a linear unit for a function.

    Closed gates and zero pixels of the row itself would hide what a map does to positions.
    """
    if not isinstance(argument, Tensor):
        return linear_unit
    generator = torch.Generator().manual_seed(0)  # does not change torch's global random state
    return (0.5 + torch.rand(argument.shape, dtype=torch.float64, generator=generator)).to(argument.device)


def _separate(graph: fx.Graph, seen: dict[fx.Node, Any]) -> bool:
    """Give every tensor of a tuple (chunk, split, unbind) a node of its own; returns whether there were any."""
    found = False
    for node in list(graph.nodes):
        value = seen.get(node)
        if node.op == "output" or not isinstance(value, (tuple, list)) or not any(isinstance(v, Tensor) for v in value):
            continue
        found = True
        users = list(node.users)
        with graph.inserting_after(node):
            members = [graph.call_function(operator.getitem, (node, i)) for i in range(len(value))]
        for user in users:
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(members[user.args[1]])
                graph.erase_node(user)
            elif user.target is not operator.getitem:  # a slice of a tuple is a tuple, and is visited later
                user.args, user.kwargs = (
                    fx.map_arg(given, lambda n: tuple(members) if n is node else n)  # noqa: B023
                    for given in (user.args, user.kwargs)
                )
    return found


class Wiring:
    """The value network as steps, built from its graph and the shape of one input x (1, ...)."""

    def __init__(self, net: GatedNetwork, x: Tensor) -> None:
        ids = torch.zeros(1, dtype=torch.long, device=x.device) if net.needs_rows else None
        arguments = [_generic(a) for a in _value_arguments(net, x[:1], ids)]
        self.ones = net.value_input == "ones"
        self.input_shape = tuple(arguments[0].shape[1:])
        self.device = x.device
        # float64, so that probes are accurate; a copy, so that the network is not changed
        module = copy.deepcopy(net.values).double().eval()
        with torch.no_grad():
            (run := ValueInterpreter(module)).run(*arguments)
            if _separate(module.graph, run.values):
                (run := ValueInterpreter(module)).run(*arguments)
        self._values, self._module = run.values, module
        holders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._data = {holders[0]}
        self._tuples: dict[fx.Node, tuple[fx.Node, ...]] = {}  # tuples of tensors, and the tensors they depend on
        self._learned: set[fx.Node] = set()  # constants that depend on parameters
        self._fixed: set[fx.Node] = set()
        self.reused: RecordError | None = None  # raised by `npk`: a batch-norm is called twice
        self._gates = dict(zip(holders[1:], net.site_names))
        self._shape: dict[
            fx.Node, tuple[int, tuple[int, ...]]
        ] = {}  # channels and positions, also of flattened tensors
        used: dict[str, str] = {}
        self.steps: list[Step] = []
        for node in module.graph.nodes:
            if self._relevant(node):
                self.steps.append(self._step(node, used))
                self._shape[node] = self.steps[-1].channels, self.steps[-1].spatial
                if self.steps[-1].fixed:
                    self._fixed.add(node)
        self._find_entries()
        del self._values, self._module
        maps = [s.detail for s in self.steps if s.kind == "map" and not s.fixed]
        joins = any(s.kind == "add" and len(s.detail) > 1 and not s.fixed for s in self.steps)
        self.diagonal = all(m[0] is None or m[0].selects for m in maps) and not (maps and joins)
        self.pair_values = max(math.prod(s.spatial) ** (1 if self.diagonal else 2) for s in self.steps)
        self.count_values = max(math.prod(s.spatial) for s in self.steps)
        self.row_values = sum(s.channels * math.prod(s.spatial) for s in self.steps)
        self._readers = self._find_readers()
        # grouped layers whose kernels are used once each: their groups need not be in memory at the same time
        once = [i for i, found in self._readers.items() if len(found) == 1 and self.steps[found[0]].groups == 1]
        self.passing = {self.steps[i].name for i in once if self.steps[i].groups > 1}

    # --- building ----------------------------------------------------------------------------------------------

    def _relevant(self, node: fx.Node) -> bool:
        if node in self._data:
            return True
        value = self._values.get(node)
        reads = self._reads(node)
        if node.op == "output" or (reads and isinstance(value, Tensor) and value.dtype.is_floating_point):
            self._data.add(node)
            return True
        if reads and isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
            self._tuples[node] = reads
        elif isinstance(value, nn.Parameter) or any(n in self._learned for n in node.all_input_nodes):
            self._learned.add(node)
        return False

    def _reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Tensors of the network that a node depends on, including those in tuples."""
        found: dict[fx.Node, None] = {}
        for n in node.all_input_nodes:
            found.update(dict.fromkeys(self._tuples.get(n, (n,) if n in self._data else ())))
        return tuple(found)

    def _maker(self, node: fx.Node) -> fx.Node:
        """The operation that computes a tensor; for a member of a tuple, the one that computes the tuple."""
        inner = node.all_input_nodes
        return self._maker(inner[0]) if node.target is operator.getitem and inner[0] in self._tuples else node

    def _is_fixed(self, node: fx.Node, reads: tuple[fx.Node, ...]) -> bool:
        """Whether a node depends on the input only, without parameters."""
        if node.op == "placeholder":
            return True
        maker = self._maker(node)
        constant = {n for each in {node, maker} for n in each.all_input_nodes} - set(reads) - set(self._tuples)
        if node.op == "output" or any(n in self._learned or n in self._gates for n in constant):
            return False
        if maker.op == "call_module":
            module = self._module.get_submodule(str(maker.target))
            if isinstance(module, _NORMS) or any(True for _ in module.parameters()):
                return False
        return all(n in self._fixed for n in reads)

    def _find_entries(self) -> None:
        """Extract the fixed operations on the input as a module that returns the tensors at which paths start."""
        entries = dict.fromkeys(n for s in self.steps if not s.fixed for n in s.reads if n in self._fixed)
        names = {s.node: s.name for s in self.steps}
        self.entries = tuple(names[n] for n in entries)
        needed = set(entries)
        for node in reversed(self._module.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in self._module.graph.nodes:
            if node in needed or (node.op == "placeholder" and not made):
                made[node] = graph.node_copy(node, lambda n: made[n])
        graph.output(tuple(made[n] for n in entries))
        self._enter = fx.GraphModule(self._module, graph)

    def entered(self, x: Tensor) -> dict[str, Tensor]:
        """The inputs x (n, ...) after fixed operations, at which paths start: (n, C, P) float64 by step.

        A piecewise constant network reads ones instead of x.
        """
        read = torch.ones(len(x), *self.input_shape, dtype=torch.float64, device=x.device) if self.ones else x.double()
        with torch.no_grad():
            found = self._enter(read)
        sizes = {s.name: (s.channels, math.prod(s.spatial)) for s in self.steps}
        return {name: t.reshape(len(x), *sizes[name]) for name, t in zip(self.entries, found)}

    def _step(self, node: fx.Node, used: dict[str, str]) -> Step:
        reads = self._reads(node)
        fixed = self._is_fixed(node, reads)
        value = self._values[reads[0]] if node.op == "output" else self._values[node]
        made = (value.shape[1], tuple(value.shape[2:])) if value.ndim > 1 else (1, ())

        def step(kind: str, detail: Any = None, groups: int = 1) -> Step:
            keeps = kind in ("gate", "norm", "pass", "add", "scale", "output") and reads
            channels, spatial = self._shape[reads[0]] if keeps else made
            return Step(kind, node.name, reads, node, channels, spatial, detail, groups, fixed)

        if node.op in ("placeholder", "output"):
            return step("input" if node.op == "placeholder" else "output")
        gates = [n for n in node.all_input_nodes if n in self._gates]
        if gates:
            return step("gate", self._gates[gates[0]])
        source = self._values[reads[0]]
        maker = self._maker(node)
        if maker.op == "call_module":
            return self._module_step(node, step, source, used)
        name = _target(maker).strip("_")
        if any(name.startswith(p) for p in _MAX_POOLS):
            raise _refuse(node, *_MAX_POOLING)
        if name in ("add", "sub", "rsub", "mul", "multiply", "truediv", "div") and value.shape != source.shape:
            why = f"it spreads a tensor of shape {tuple(source.shape)} to {tuple(value.shape)}"
            raise _refuse(node, why, "Do not broadcast channels or positions")
        if name in ("add", "sub", "rsub"):
            return step("add", self._operands(node, name))
        if name in ("cat", "concat", "concatenate", "hstack"):
            return step("cat", self._parts(node, reads, name))
        if name in ("mul", "multiply", "truediv", "div", "neg"):
            return step("scale", self._number(node, name, fixed))
        if name in ("linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "einsum", "bmm", "tensordot"):
            raise _refuse(node, "it uses weights outside a layer", "Use nn.Linear or nn.Conv modules")
        return self._flatten_or_map(node, step, source)

    def _module_step(self, node: fx.Node, step: Any, source: Tensor, used: dict[str, str]) -> Step:
        name = str(self._maker(node).target)
        module = self._module.get_submodule(name)
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
            if name in used:
                raise self._used_twice(node, name, used, "a layer of its own")
            used[name] = node.name
            if isinstance(module, nn.Linear):
                if source.ndim != 2:
                    raise _refuse(node, f"it reads shape {tuple(source.shape)}", "Flatten or pool before it")
                return step("weight", None)
            return step("weight", self._geometry(module, source), module.groups)
        if isinstance(module, _NORMS):
            if name in used:
                self.reused = self._used_twice(node, name, used, "one of its own")
            used[name] = node.name
            return step("norm")
        if isinstance(module, _PASS):
            return step("pass")
        if "MaxPool" in type(module).__name__:
            raise _refuse(node, *_MAX_POOLING)
        if any(True for _ in module.parameters()):
            raise _refuse(node, f"the paths of {type(module).__name__} are not known", "Use nn.Linear or nn.Conv")
        return self._flatten_or_map(node, step, source)

    @staticmethod
    def _used_twice(node: fx.Node, name: str, used: dict[str, str], remedy: str) -> RecordError:
        why = f"the weights of '{name}' are used twice (also in node '{used[name]}'), so that paths share weights"
        return _refuse(node, why, f"Give each call {remedy}")

    def _geometry(self, module: Any, source: Tensor) -> tuple[SpatialMap | None, Convolution, tuple[int, ...]]:
        call = geometry(module.weight, source.ndim - 2, module.stride, module.padding, module.dilation)
        spatial: SpatialMap | None = None
        read = tuple(source.shape[2:])
        if module.padding_mode != "zeros":
            widths = [v for pair in reversed(call.padding) for v in pair]
            spatial, _ = self._probe(lambda t: F.pad(t, widths, mode=module.padding_mode), source[:, :1])
            read = tuple(n + a + b for n, (a, b) in zip(read, call.padding))
            call = replace(call, padding=((0, 0),) * len(read))
        return spatial, call, read

    def _parts(self, node: fx.Node, reads: tuple[fx.Node, ...], name: str) -> tuple[fx.Node, ...]:
        """The tensors that are concatenated."""
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        dim = 1 if name == "hstack" else dim
        given: Any = node.args[0] if node.args else node.kwargs.get("tensors", ())
        parts = tuple(given)
        if any(self._flattened(n) for n in reads):
            raise _refuse(node, "it concatenates flattened tensors", "Concatenate channels before flattening")
        if dim not in (1, 1 - self._values[reads[0]].ndim):
            raise _refuse(node, f"it concatenates along dimension {dim}", "Concatenate channels (dimension 1)")
        if any(n not in self._data for n in parts):
            raise _refuse(node, "it concatenates the data with a constant", "Concatenate tensors of the network only")
        return parts

    def _operands(self, node: fx.Node, name: str) -> tuple[tuple[fx.Node, float], ...]:
        """(tensor, sign) of an addition; constants are biases, which start no path."""
        if "alpha" in node.kwargs or len(node.args) != 2:
            raise _refuse(node, "it is an addition with options", "Write a + b")
        signs = {"add": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}[name]
        found = tuple((a, sign) for a, sign in zip(node.args, signs) if isinstance(a, fx.Node) and a in self._data)
        if len({self._shape[a] for a, _ in found}) > 1:
            shapes = " and ".join(str(tuple(self._values[a].shape)) for a, _ in found)
            raise _refuse(node, f"it adds tensors of different shapes, {shapes}", "Add tensors of the same shape")
        return found

    def _number(self, node: fx.Node, name: str, fixed: bool) -> float:
        """The number that a tensor is multiplied by; 1 for a fixed tensor times the input, which `entered` includes."""
        if name == "neg":
            return -1.0
        others = [a for a in (*node.args, *node.kwargs.values()) if not (isinstance(a, fx.Node) and a in self._data)]
        value = self._values[others[0]] if others and isinstance(others[0], fx.Node) else others[0] if others else None
        if isinstance(value, Tensor) and value.numel() == 1 and not any(n in self._learned for n in others):
            value = value.item()
        if fixed and isinstance(value, Tensor):
            return 1.0
        if not isinstance(value, (int, float)):
            raise _refuse(node, "it does not multiply by a fixed number", "Use batch-norm or a weight layer")
        return 1.0 / float(value) if name in ("truediv", "div") else float(value)

    def _flattened(self, node: fx.Node) -> bool:
        return self._values[node].ndim == 2 and math.prod(self._shape[node][1]) > 1

    def _flatten_or_map(self, node: fx.Node, step: Any, source: Tensor) -> Step:
        value = self._values[node]
        # channels and positions of a flattened tensor stay separate until a dense layer sums over both
        if (value.shape == source.shape or value.ndim == 2) and torch.equal(value.flatten(), source.flatten()):
            return step("pass")
        reads = self._reads(node)
        if len(reads) > 1:
            raise _refuse(node, f"it combines {len(reads)} tensors", "Add them, or concatenate their channels")
        if self._flattened(reads[0]):
            raise _refuse(node, "it rearranges a flattened tensor", "Pool or slice before flattening")
        with torch.no_grad():
            # constants that are added to the input are part of it; they start no path
            offset = self._again(node, torch.zeros_like(source)) if self._is_fixed(node, reads) else 0.0
        try:
            return step("map", self._probe(lambda t: self._again(node, t) - offset, source))
        except (ValueError, RuntimeError, IndexError) as error:
            known = "Path kernels support pooling, padding, slicing, flattening, addition and concatenation of channels"
            raise _refuse(node, f"it is not a map of positions alone ({error})", known) from error

    def _again(self, node: fx.Node, t: Tensor) -> Any:
        """The result of a node for t in place of the tensor that it reads."""

        def given(n: fx.Node) -> Any:
            return self._again(n, t) if n in self._tuples else t if n in self._data else self._values[n]

        return call_node(self._module, node, given)

    def _probe(self, run: Any, source: Tensor) -> tuple[SpatialMap | None, Tensor | None]:
        """Find T and π with run(t)(c, p) = Σ_q T(p, q) t(π(c), q), and verify them; None for identities."""
        shape, (channels, size) = source.shape, (source.shape[1], math.prod(tuple(source.shape[2:])))
        generator = torch.Generator().manual_seed(0)  # does not change torch's global random state
        with torch.no_grad():
            scale = 1 + torch.rand(channels, dtype=torch.float64, generator=generator).to(source.device)
            field = 1 + torch.rand(size, dtype=torch.float64, generator=generator).to(source.device)
            out = run((scale[:, None] * field).reshape(shape))
            if out.ndim < 2 or out.shape[0] != 1:
                raise ValueError("it changes the batch")
            peak = out.flatten(2).abs().amax(2)[0] if out.ndim > 2 else out[0].abs()
            if not bool((peak > 0).any()):
                raise ValueError("its result is zero")
            probe_channel = int(peak.argmax())
            unit = torch.zeros(size, dtype=torch.float64, device=source.device)
            columns = []
            for q in range(size):
                unit[q] = 1.0
                result = run(unit.expand(channels, size).reshape(shape))
                columns.append(result[0, probe_channel].flatten().clone())  # it may be a view of `unit`
                unit[q] = 0.0
            matrix = torch.stack(columns, 1)  # (P′, P)
            pattern = matrix @ field
            at = int(pattern.abs().argmax())
            ratio = out[0].flatten(1)[:, at] / pattern[at] if out.ndim > 2 else out[0] / pattern[at]
            distance, nearest = (ratio[:, None] - scale).abs().min(1)
            moved = torch.where(distance < 1e-9, nearest, -1)
            check = torch.randn(shape, dtype=torch.float64, generator=generator).to(source.device)
            want = torch.einsum("pq,cq->cp", matrix, check.reshape(channels, size)[moved.clamp(min=0)])
            want = want * (moved >= 0)[:, None]
            if not torch.allclose(run(check)[0].reshape(want.shape), want, rtol=1e-9, atol=1e-9):
                raise ValueError("it mixes channels, or is not linear")
        same_channels = len(moved) == channels and bool((moved == torch.arange(channels, device=moved.device)).all())
        identity = torch.equal(matrix, torch.eye(size, dtype=torch.float64, device=matrix.device))
        return (None if identity else SpatialMap(matrix)), (None if same_channels else moved)

    # --- memory of grouped convolutions -------------------------------------------------------------------------

    def _find_readers(self) -> dict[int, list[int]]:
        """Weight layer → the weight layers, or the output, that read its field, as indices of steps."""
        fields: dict[fx.Node, set[int]] = {}
        readers: dict[int, list[int]] = {}
        for i, s in enumerate(self.steps):
            read = {j for n in s.reads for j in fields[n]}
            if s.kind in ("weight", "output"):
                for j in read:
                    readers[j].append(i)
            if s.kind == "weight":
                read, readers[i] = {i}, []
            fields[s.node] = read
        return readers

    def held_values(self, diagonal: bool) -> int:
        """Largest number of values per pair of examples in kernels of groups that are in memory at the same time."""
        sizes = [math.prod(s.spatial) ** (1 if diagonal else 2) for s in self.steps]
        until: dict[int, int] = {}
        held = [0] * len(self.steps)
        for i, readers in reversed(self._readers.items()):
            s = self.steps[i]
            # a kernel that is computed on demand reads its inputs later
            until[i] = max((until[j] if self.steps[j].name in self.passing else j for j in readers), default=i)
            if s.groups > 1 and s.name not in self.passing:
                for j in range(i, until[i] + 1):
                    held[j] += s.groups * sizes[i]
        # a kernel that is computed on demand is in memory together with that of the layer that reads it
        return max(held) + 2 * max((size for s, size in zip(self.steps, sizes) if s.name in self.passing), default=0)

    # --- fully connected chains ---------------------------------------------------------------------------------

    @property
    def chain(self) -> bool:
        """Whether it is a chain of dense layers and gates, so that the kernel is a product of Grams."""
        kinds: list[str] = []
        reads: list[fx.Node] = []
        for s in self.steps:
            # a batch-norm of the input counts: paths start before it
            if s.kind == "input" or not (s.fixed or s.kind == "pass" or (s.kind == "norm" and "dense" in kinds)):
                kinds.append("dense" if s.kind == "weight" and s.detail is None else s.kind)
            reads.extend(s.reads)
        expected = ["input", *(["dense", "gate"] * len(self._gates)), "dense", "output"]
        return kinds == expected and len(set(reads)) == len(reads)

    @property
    def reads_input(self) -> bool:
        """Whether the first layer reads the input itself, flattened or not."""
        return all(s.kind in ("input", "pass") for s in self.steps if s.fixed)
