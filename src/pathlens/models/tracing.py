"""From a user's module to a graph with named gate sites.

`trace` copies a template, follows it with `torch.fx` in train and in eval mode, makes in-place operations functional,
turns every ReLU into a site, and refuses whatever it cannot prove to be affine between sites. Nothing here knows which
kind of gated network the graph becomes; that is `twin.py`.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pathlens.errors import ConversionError, NoGateError

# --- what is affine --------------------------------------------------------------------------------------------

_AFFINE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d,
    nn.Dropout2d, nn.Dropout3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d,
    nn.ConstantPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample, nn.Fold, nn.Unfold,
    nn.ChannelShuffle,
)  # fmt: skip
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAX_POOLS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MaxPool1d: nn.AvgPool1d, nn.MaxPool2d: nn.AvgPool2d, nn.MaxPool3d: nn.AvgPool3d,
    nn.AdaptiveMaxPool1d: nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool2d: nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool3d: nn.AdaptiveAvgPool3d,
}  # fmt: skip
_MAX_POOL_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "max_pool1d": F.avg_pool1d, "max_pool2d": F.avg_pool2d, "max_pool3d": F.avg_pool3d,
    "adaptive_max_pool1d": F.adaptive_avg_pool1d, "adaptive_max_pool2d": F.adaptive_avg_pool2d,
    "adaptive_max_pool3d": F.adaptive_avg_pool3d,
}  # fmt: skip
# linear in their first argument; every further argument must not depend on the input
_LINEAR_IN_FIRST = {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pad", "interpolate", "unfold",
    "fold", "pixel_shuffle", "flatten", "reshape", "view", "view_as", "reshape_as", "mean", "sum", "permute",
    "transpose", "squeeze", "unsqueeze", "chunk", "split", "getitem", "roll", "flip", "narrow", "select", "contiguous",
    "clone", "float", "double", "to", "expand", "expand_as", "repeat", "neg", "cumsum", "movedim", "swapaxes",
    "unflatten", "tile", "index_select", "t", "truediv", "div", "identity",
}  # fmt: skip
_LINEAR_JOINT = {
    "add",
    "sub",
    "cat",
    "concat",
    "concatenate",
    "stack",
    "hstack",
    "vstack",
    "rsub",
}  # any number of data arguments
_BILINEAR = {"mul", "matmul", "bmm", "mm", "einsum", "tensordot", "multiply"}  # linear if at most one argument is data
_SHAPE_METHODS = {"size", "dim", "numel", "ndimension", "__len__"}
_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device"}

_REMEDIES = {
    "norm": "Use batch-norm, which is affine in eval mode",
    "softmax": "Drop it and train on logits",
    "clamp": "If it means a ReLU, write torch.relu",
    "maximum": "If it means a ReLU, write torch.relu",
    "item": "A number read from the data is not affine; keep it a tensor or drop it",
}


class Site(NamedTuple):
    """One ReLU call of the template: its name `module.path@call` and the slope α of a leaky one."""

    name: str
    slope: float


def apply_site(q: Tensor, gate: Any, slope: float) -> Tensor:
    """What stands in a traced graph for a ReLU: q·gate for a tensor, gate(q, α) for a function of q itself."""
    return q * gate if isinstance(gate, Tensor) else gate(q, slope)


@dataclass
class Traced:
    """A template's graph, with its ReLUs marked.

    `root` holds the modules; `sites` are in the order of execution. `entry` is the batch-norm node after the first
    linear layer, where there is one: a constant value input has to enter after it.
    """

    root: nn.Module
    graph: fx.Graph
    sites: tuple[Site, ...]
    site_nodes: tuple[str, ...]
    entry: str | None
    max_pools: tuple[str, ...] = ()
    batch_norm: bool = field(default=False)


class _Proxy(fx.Proxy):
    """Records `a += b` as what it is: fx would fall back to `a + b` and lose that `a` itself changes."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _Tracer(fx.Tracer):
    """Follows the user's own modules, keeps torch's as leaves, and sees in-place operators."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _fail(where: str, what: str, remedy: str, cls: type[ConversionError] = ConversionError) -> ConversionError:
    return cls(f"gated_twin: {where}: {what}. {remedy}.")


def _strip_hooks(module: nn.Module) -> None:
    for m in module.modules():
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
            "_state_dict_hooks",
            "_load_state_dict_pre_hooks",
        ):
            getattr(m, name, {}).clear()


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward made this node ('' for the template itself)."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).split("@")[0]


def describe(node: fx.Node) -> str:
    """How messages name a node: its operation, its name in the graph, and the module it came from."""
    if node.op == "call_module":
        return f"module '{node.target}'"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    owner = owner_of(node)
    return f"'{target}' (node {node.name}" + (f" in module '{owner}')" if owner else ")")


def _follow(root: nn.Module, training: bool) -> fx.Graph:
    root.train(training)
    try:
        return _Tracer().trace(root)
    except ConversionError:
        raise
    except Exception as error:  # fx raises TraceError, TypeError, or whatever the user's forward raises on a proxy
        raise _fail(
            type(root).__name__,
            f"its forward cannot be followed symbolically ({type(error).__name__}: {error})",
            "Control flow that depends on the data, item assignment and non-torch code cannot be converted; "
            "move them out of the module",
        ) from error


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _dropout_to_module(root: nn.Module, graph: fx.Graph, training: bool) -> None:
    """Functional dropout bakes `training` into the graph; as a module it follows the mode."""
    names = {"dropout": nn.Dropout, "dropout1d": nn.Dropout1d, "dropout2d": nn.Dropout2d, "dropout3d": nn.Dropout3d}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in names:
            continue
        active = _argument(node, 2, "training", True)
        if active != training:
            if active:
                raise _fail(
                    describe(node),
                    "this dropout is on in eval mode too",
                    "Pass training=self.training, or use nn.Dropout",
                )
            continue  # off in both modes: an identity, found again below
        name = f"functional_dropout_{count}"
        count += 1
        if not hasattr(root, name):
            root.add_module(name, names[node.target.__name__](float(_argument(node, 1, "p", 0.5))))
        if _argument(node, 3, "inplace", False):
            _redirect_later_uses(graph, node, node.args[0])
        with graph.inserting_before(node):
            new = graph.call_module(name, (node.args[0],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _redirect_later_uses(graph: fx.Graph, node: fx.Node, source: Any) -> None:
    """After an in-place operation every later reader of its input sees the result."""
    if not isinstance(source, fx.Node):
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    for user in list(source.users):
        if user is not node and order[user] > order[node]:
            user.replace_input_with(source, node)


_INPLACE_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _make_functional(root: nn.Module, graph: fx.Graph) -> None:
    """Replace in-place operations by functional ones, keeping what the template computes."""
    for node in list(graph.nodes):
        inplace = False
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            inplace = bool(getattr(module, "inplace", False))
        elif node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"):
            inplace = True
            node.target = node.target[:-1]
            if not hasattr(Tensor, node.target):
                raise _fail(
                    describe(node),
                    f"the in-place method {node.target}_ has no functional form",
                    "Write it without the in-place method",
                )
        elif node.op == "call_function":
            if node.target in _INPLACE_OPERATORS:
                inplace, node.target = True, _INPLACE_OPERATORS[node.target]
            elif getattr(node.target, "__name__", "").endswith("_") and hasattr(torch, node.target.__name__[:-1]):
                inplace, node.target = True, getattr(torch, node.target.__name__[:-1])
            elif node.kwargs.get("inplace"):
                inplace = True
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
            elif node.target in (F.relu, F.leaky_relu) and _argument(
                node, 1 if node.target is F.relu else 2, "inplace", False
            ):
                inplace = True
                node.args = node.args[:-1]
        if inplace and node.args:
            _redirect_later_uses(graph, node, node.args[0])
    for module in root.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]


def _relu_slope(root: nn.Module, node: fx.Node) -> float | None:
    """The slope if this node is a ReLU or LeakyReLU, else None."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if isinstance(module, nn.ReLU):
            return 0.0
        if isinstance(module, nn.LeakyReLU):
            return float(module.negative_slope)
    elif node.op == "call_function":
        if node.target in (F.relu, torch.relu):
            return 0.0
        if node.target is F.leaky_relu:
            return float(_argument(node, 1, "negative_slope", 0.01))
    elif node.op == "call_method" and node.target == "relu":
        return 0.0
    return None


def _operation(node: fx.Node) -> str:
    return (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target)).lstrip("_")
    )


def _inputs(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


_CONSTANT, _SHAPE, _DATA = range(3)


def _classify(
    root: nn.Module, graph: fx.Graph, affine: tuple[Any, ...]
) -> tuple[dict[fx.Node, int], list[fx.Node], list[str]]:
    """Walk the graph: what depends on the data, which nodes are ReLUs, which are max-pools; refuse the rest."""
    role: dict[fx.Node, int] = {}
    relus: list[fx.Node] = []
    pools: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            role[node] = _DATA if node.op == "placeholder" else _CONSTANT
            continue
        data = [n for n in _inputs(node) if role[n] == _DATA]
        name = _operation(node)
        if not data:
            role[node] = max((role[n] for n in _inputs(node)), default=_CONSTANT)
            continue
        role[node] = _DATA
        if _relu_slope(root, node) is not None:
            relus.append(node)
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            if type(module) in _MAX_POOLS:
                pools.append(node.name)
            elif not isinstance(module, _AFFINE_MODULES + tuple(a for a in affine if isinstance(a, type))):
                raise _refused(node, type(module).__name__)
            elif isinstance(module, _BATCH_NORMS) and not module.track_running_stats:
                raise _fail(
                    describe(node),
                    "batch-norm without running statistics is not affine in eval mode",
                    "Set track_running_stats=True",
                )
            elif hasattr(module, "parametrizations"):
                raise _fail(
                    describe(node),
                    "its weight is parametrised",
                    "Call torch.nn.utils.parametrize.remove_parametrizations on it first",
                )
        elif (node.op == "call_method" and name in _SHAPE_METHODS) or (
            node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES
        ):
            role[node] = _SHAPE
        elif (
            name in _MAX_POOL_FUNCTIONS
            or name.replace("_with_indices", "") in _MAX_POOL_FUNCTIONS
            or name.startswith("boolean_dispatch")
        ):
            pools.append(node.name)
        elif name in _LINEAR_JOINT or node.target in affine:
            pass
        elif name in _BILINEAR:
            if len(data) > 1 or _data_count(node, role) > 1:
                raise _fail(
                    describe(node),
                    "it multiplies two quantities that both depend on the input",
                    "A gated network is linear between its gates; remove the product",
                )
        elif name in _LINEAR_IN_FIRST:
            if any(n is not node.args[0] and n in data for n in data):
                raise _fail(
                    describe(node),
                    "an argument other than the first depends on the input",
                    "Only the first argument may",
                )
            if name == "truediv" and (not node.args or node.args[0] not in data):
                raise _refused(node, "division by the data")
        else:
            raise _refused(node, name)
    return role, relus, pools


def _data_count(node: fx.Node, role: dict[fx.Node, int]) -> int:
    """How often data occurs among the arguments (x·x counts twice)."""
    count = 0

    def visit(n: fx.Node) -> fx.Node:
        nonlocal count
        count += role.get(n) == _DATA
        return n

    fx.map_arg(node.args, visit)
    fx.map_arg(node.kwargs, visit)
    return count


def _refused(node: fx.Node, what: str) -> ConversionError:
    remedy = next((r for key, r in _REMEDIES.items() if key in what.lower()), None)
    return _fail(
        describe(node),
        f"{what} is neither a ReLU nor known to be affine",
        (remedy or "Replace it by a ReLU or an affine layer") + "; if it is affine, pass it in affine=(...)",
    )


def average_max_pools(root: nn.Module, graph: fx.Graph, names: tuple[str, ...]) -> None:
    """Replace max-pooling by average-pooling of the same windows, in place."""
    for node in list(graph.nodes):
        if node.name not in names:
            continue
        if node.op == "call_module":
            module: Any = root.get_submodule(str(node.target))
            if getattr(module, "return_indices", False) or getattr(module, "dilation", 1) not in (1, (1, 1), (1, 1, 1)):
                raise _fail(
                    describe(node),
                    "max-pooling with indices or dilation has no average counterpart",
                    "Use plain max-pooling or average-pooling",
                )
            average = _MAX_POOLS[type(module)]
            if hasattr(module, "output_size"):
                new = average(module.output_size)
            else:
                new = average(module.kernel_size, module.stride, module.padding, module.ceil_mode)
            parent, _, child = str(node.target).rpartition(".")
            setattr(root.get_submodule(parent), child, new)
        else:
            name = _operation(node).replace("_with_indices", "")
            if name not in _MAX_POOL_FUNCTIONS or node.kwargs.get("dilation", 1) != 1 or len(node.args) > 4:
                raise _fail(
                    describe(node),
                    "this max-pooling call has no average counterpart",
                    "Use nn.MaxPool2d or average-pooling",
                )
            node.target = _MAX_POOL_FUNCTIONS[name]
            node.kwargs = {
                k: v
                for k, v in node.kwargs.items()
                if k in ("kernel_size", "stride", "padding", "ceil_mode", "output_size")
            }


def _name_sites(graph: fx.Graph, relus: list[fx.Node], root: nn.Module) -> tuple[Site, ...]:
    calls: Counter[str] = Counter()
    sites = []
    for node in relus:
        if node.op == "call_module":
            path = str(node.target)
        else:
            owner = owner_of(node)
            path = f"{owner}.relu" if owner else "relu"
        slope = _relu_slope(root, node)
        assert slope is not None
        sites.append(Site(f"{path}@{calls[path]}", slope))
        calls[path] += 1
    return tuple(sites)


def _find_entry(root: nn.Module, graph: fx.Graph, first_relu: fx.Node) -> str | None:
    """The batch-norm that directly follows the first linear layer, if any."""
    for node in graph.nodes:
        if node is first_relu:
            return None
        if node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), _LINEAR_LAYERS):
            users = [u for u in node.users if u.op == "call_module"]
            norm = next((u for u in users if isinstance(root.get_submodule(str(u.target)), _BATCH_NORMS)), None)
            return None if norm is None else norm.name
    return None


def trace(template: nn.Module, affine: tuple[Any, ...] = ()) -> Traced:
    """Follow a template and mark its gate sites; the template itself is not touched.

    Raises
    ------
    ConversionError
        For data-dependent control flow, a train/eval difference other than dropout and batch-norm, or an operation
        that is neither a ReLU nor affine; the message names the node and a remedy.
    """
    if not isinstance(template, nn.Module):
        raise ConversionError(f"gated_twin: the template must be an nn.Module, got {type(template).__name__}.")
    mode = template.training
    root = copy.deepcopy(template)
    _strip_hooks(root)
    graphs = {}
    for training in (True, False):
        graphs[training] = _follow(root, training)
        _dropout_to_module(root, graphs[training], training)
    root.train(mode)
    train_nodes, eval_nodes = ([n.format_node() for n in graphs[t].nodes] for t in (True, False))
    if train_nodes != eval_nodes:
        differing = next(
            (a or b for a, b in zip(train_nodes, eval_nodes) if a != b),
            f"{len(train_nodes)} nodes against {len(eval_nodes)}",
        )
        raise _fail(
            type(template).__name__,
            f"it computes different things in train and eval mode, first at: {differing}",
            "Use nn.Dropout and nn.BatchNorm modules instead of branching on self.training",
        )
    graph = graphs[False]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if len(inputs) != 1:
        extra = [n for n in inputs[1:] if n.users]
        if not inputs or extra or any(not n.args for n in inputs[1:]):
            raise _fail(
                type(template).__name__,
                f"its forward takes {len(inputs)} inputs",
                "Wrap it in a module with one tensor input",
            )
        for n in inputs[1:]:
            graph.erase_node(n)
    _make_functional(root, graph)
    output = next(n for n in graph.nodes if n.op == "output")
    if not isinstance(output.args[0], fx.Node):
        raise _fail(
            type(template).__name__,
            "its forward does not return a single tensor",
            "Wrap it so that it returns the logits alone",
        )
    graph.owning_module = root  # type: ignore[assignment]  # fx asks it which calls are pure
    graph.eliminate_dead_code()
    role, relus, pools = _classify(root, graph, affine)
    if not relus:
        raise _fail(
            type(template).__name__,
            "it has no ReLU, so there is nothing to gate",
            "Use a template with nn.ReLU, F.relu or LeakyReLU",
            NoGateError,
        )
    sites = _name_sites(graph, relus, root)
    entry = _find_entry(root, graph, relus[0])
    batch_norm = any(isinstance(m, _BATCH_NORMS) for m in root.modules())
    return Traced(root, graph, sites, tuple(n.name for n in relus), entry, tuple(pools), batch_norm)
