"""From a user's module to a graph with named gate sites.

`trace` copies a template, follows it with `torch.fx` in train and in eval mode, makes in-place operations functional,
turns every ReLU into a site, and refuses operations between sites that are not known to be affine. The networks are
built from this graph in `twin.py`.
"""

from __future__ import annotations

import copy
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pathlens.errors import ConversionError, NoGateError
from pathlens.models.graphs import NetworkGraph

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# --- what is affine --------------------------------------------------------------------------------------------


def _modules(names: str) -> tuple[type[nn.Module], ...]:
    """Classes of torch.nn by name; ``Conv?d`` means Conv1d, Conv2d and Conv3d."""
    return tuple(getattr(nn, name.replace("?", d)) for name in names.split() for d in ("123" if "?" in name else "1"))


_CONVOLUTIONS = _modules("Conv?d ConvTranspose?d")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = {"dropout": nn.Dropout, "dropout1d": nn.Dropout1d, "dropout2d": nn.Dropout2d, "dropout3d": nn.Dropout3d}
_PADDINGS = _modules("ZeroPad?d ConstantPad?d CircularPad?d ReflectionPad?d ReplicationPad?d")
_RESHAPES = _modules("Flatten Unflatten Identity PixelShuffle PixelUnshuffle Upsample Fold Unfold ChannelShuffle")
_AVERAGE_POOLS = _modules("AvgPool?d AdaptiveAvgPool?d")
_DENSE = _modules("Linear Dropout Dropout?d")
_AFFINE_MODULES = (*_DENSE, *_CONVOLUTIONS, *_BATCH_NORMS, *_AVERAGE_POOLS, *_PADDINGS, *_RESHAPES)
_MAX_POOLS = dict(zip(_modules("MaxPool?d AdaptiveMaxPool?d"), _AVERAGE_POOLS))
_MAX_POOL_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    f"{kind}max_pool{d}d": getattr(F, f"{kind}avg_pool{d}d") for kind in ("", "adaptive_") for d in (1, 2, 3)
}
_ALIASING_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, *_DROPOUTS.values())
# fmt: off
# may return their input's own memory, so that an in-place change of one is seen through the other
_ALIASING = {
    "chunk", "contiguous", "double", "expand", "expand_as", "flatten", "float", "getitem", "movedim", "narrow",
    "permute", "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "t",
    "tensor_split", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}
# linear in their first argument; every further argument must not depend on the input
_LINEAR_IN_FIRST = _ALIASING | {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pad", "interpolate",
    "unfold", "fold", "pixel_shuffle", "mean", "sum", "roll", "flip", "clone", "repeat", "neg", "cumsum", "tile",
    "index_select", "truediv", "div", "identity",
}
# fmt: on
# linear in any number of data arguments together
_LINEAR_JOINT = {"add", "sub", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "rsub"}
_BILINEAR = {"mul", "matmul", "bmm", "mm", "einsum", "tensordot", "multiply"}  # linear if at most one argument is data
_SHAPE_METHODS = {"size", "dim", "numel", "ndimension", "__len__"}
_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device"}
_INPLACE_OPERATORS = {
    getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}

_REMEDIES = {
    "batch_norm": "Use the module nn.BatchNorm1d, 2d or 3d instead of the function",
    "norm": "Use batch-norm, which is affine in eval mode",
    "relu6": "Write relu(x) - relu(x - 6), which is the same",
    "softmax": "Drop it and train on logits",
    "clamp": "If it means a ReLU, write torch.relu",
    "max": "If it means a ReLU, write torch.relu; if a pooling, nn.MaxPool2d",
    "hardtanh": "If it means a ReLU, write torch.relu",
    "threshold": "If it means a ReLU, write torch.relu",
    "item": "A number read from the data is not affine; keep it a tensor or drop it",
}


class Site(NamedTuple):
    """One ReLU call of the template: its name `module.path@call` and the slope α of a leaky one."""

    name: str
    slope: float


def apply_site(q: Tensor, gate: Any, slope: float) -> Tensor:
    """A gate site in a traced graph: q·gate if the gate is a tensor, gate(q, α) if it is a function of q."""
    return q * gate if isinstance(gate, Tensor) else gate(q, slope)


def linear_unit(q: Tensor, slope: float) -> Tensor:
    """The unit at the sites of a linear gate source: q itself."""
    return q


@dataclass
class Traced:
    """The graph of a template and its ReLUs.

    `root` is a copy of the template without its hooks, which holds the modules; `sites` are in the order of execution.
    `entry` is the last batch-norm before any site or branch: a constant value input has to enter after it.
    """

    root: nn.Module
    graph: fx.Graph
    sites: tuple[Site, ...]
    site_nodes: tuple[str, ...]
    entry: str | None

    @property
    def max_pools(self) -> list[fx.Node]:
        """Max-pooling nodes of the graph."""
        return [node for node in self.graph.nodes if is_max_pool(self.root, node)]


class _Proxy(fx.Proxy):
    """Records `a += b` as an in-place operation: fx would record `a + b`, and `a` itself would not change."""


def _record_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in _INPLACE_OPERATORS:
    setattr(_Proxy, f"__{_function.__name__}__", _record_in_place(_function))


class _Tracer(fx.Tracer):
    """Follows the user's own modules, keeps torch's and the declared ones as leaves, and sees in-place operators."""

    def __init__(self, leaves: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self.leaves) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _fail(where: str | nn.Module | fx.Node, problem: str) -> ConversionError:
    """The error for a module or a node; `problem` ends with the remedy."""
    name = describe(where) if isinstance(where, fx.Node) else where if isinstance(where, str) else type(where).__name__
    return ConversionError(f"gated_twin: {name}: {problem}")


#: the attributes in which a module keeps its hooks
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """A deep copy whose hooks are empty; the hooks themselves are not copied, since they may not be copyable."""
    memo: dict[int, Any] = {}
    for m in module.modules():
        memo.update((id(vars(m)[name]), type(vars(m)[name])()) for name in HOOKS if vars(m).get(name))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # a user's attribute may raise anything
        problem = f"it cannot be copied ({type(error).__name__}: {error})"
        raise _fail(module, f"{problem}. Remove the attribute that copy.deepcopy cannot copy.") from error


def _refuse_computed_weights(template: nn.Module) -> None:
    """A weight that a hook or a parametrisation computes is not a parameter: the copies would freeze or lose it."""
    for name, m in template.named_modules():
        where = f"module '{name}'"
        if any(nn.parameter.is_lazy(p) for p in m.parameters(recurse=False)):
            raise _fail(where, "its weights have no shape yet. Call the template once on data first.")
        if hasattr(m, "parametrizations"):
            remedy = "Call torch.nn.utils.parametrize.remove_parametrizations on it first."
            raise _fail(where, f"its weight is parametrised. {remedy}")
        known = isinstance(m, (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS))
        if known and any(isinstance(vars(m).get(key), Tensor) for key in ("weight", "bias")):
            raise _fail(
                where,
                "its weight is computed by a hook (weight norm, spectral norm or pruning). Remove it first, with "
                "torch.nn.utils.remove_weight_norm, remove_spectral_norm or prune.remove.",
            )


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward made this node ('' for the template itself)."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).split("@")[0]


def describe(node: fx.Node) -> str:
    """How messages name a node: its operation, its name in the graph, and the module it came from."""
    if node.op == "call_module":
        return f"module '{node.target}'"
    owner = owner_of(node)
    return f"'{_operation(node)}' (node {node.name}" + (f" in module '{owner}')" if owner else ")")


def _follow(root: nn.Module, training: bool, leaves: tuple[type[nn.Module], ...]) -> fx.Graph:
    root.train(training)
    before = _random_state()
    try:
        graph = _Tracer(leaves).trace(root)
    except (
        Exception
    ) as error:  # fx raises TraceError or TypeError, and the user's forward may raise anything on a proxy
        raise _fail(
            root,
            f"its forward cannot be followed symbolically ({type(error).__name__}: {error}). Control flow that depends "
            "on the data, item assignment and non-torch code cannot be converted; move them out of the module.",
        ) from error
    finally:
        after = _random_state()
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002  # a user's forward may draw from it
    if not (torch.equal(before[0], after[0]) and before[1] == after[1] and str(before[2]) == str(after[2])):
        raise _fail(
            root,
            "its forward draws random numbers of its own, which would be frozen in the copy. Use nn.Dropout, or draw "
            "them outside the module.",
        )
    _put_input_first(graph)
    return graph


def _random_state() -> tuple[Tensor, Any, dict[str, Any]]:
    """State of the global generators of torch (CPU), Python and numpy."""
    state = dict(np.random.get_state(legacy=False))  # noqa: NPY002
    state["state"] = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state["state"].items()}
    return torch.get_rng_state(), random.getstate(), state


def _put_input_first(graph: fx.Graph) -> None:
    """`F.relu(input=x)` becomes `F.relu(x)`, so that the data is always the first argument."""
    for node in graph.nodes:
        if not node.args and isinstance(node.kwargs.get("input"), fx.Node):
            node.args = (node.kwargs["input"],)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "input"}


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _functional_dropouts(graph: fx.Graph) -> list[tuple[fx.Node, bool]]:
    """Every functional dropout with its `training` flag, which is taken out of the graph."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or _operation(node) not in _DROPOUTS or not _from_torch(node.target):
            continue
        active = bool(_argument(node, 2, "training", node.kwargs.get("train", True)))
        node.kwargs = {"p": _argument(node, 1, "p", 0.5), "inplace": bool(_argument(node, 3, "inplace", False))}
        node.args = node.args[:1]
        found.append((node, active))
    return found


def _dropouts_to_modules(root: nn.Module, graph: fx.Graph, flags: list[tuple[fx.Node, bool, bool]]) -> None:
    """Replace functional dropout, whose `training` is fixed in the graph, by modules, which follow the mode."""
    for node, in_train, in_eval in flags:
        source, p = node.args[0], node.kwargs["p"]
        assert isinstance(source, fx.Node) and isinstance(p, int | float)
        if p == 0 or not (in_train or in_eval):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        if in_eval:
            raise _fail(node, "this dropout is on in eval mode. Pass training=self.training, or use nn.Dropout.")
        name = f"functional_{node.name}"
        while hasattr(root, name):
            name += "_"
        root.add_module(name, _DROPOUTS[_operation(node)](p, inplace=bool(node.kwargs["inplace"])))
        with graph.inserting_before(node):
            new = graph.call_module(name, (source,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _same_graph(root: nn.Module, train: fx.Graph, evaluate: fx.Graph) -> str | None:
    """None if both modes compute the same, else the first line that differs."""
    texts, constants = [], []
    for graph in (train, evaluate):
        # a tensor made inside forward is a new constant in each trace: compared by value below, not by name
        texts.append([re.sub(r"_tensor_constant\d+(_\d+)?", "constant", n.format_node() or "") for n in graph.nodes])
        constants.append([getattr(root, n.target) for n in graph.nodes if str(n.target).startswith("_tensor_constant")])
    if len(texts[0]) != len(texts[1]):
        shorter, longer = sorted(texts, key=len)
        return next((b for a, b in zip(shorter, longer) if a != b), longer[len(shorter)])
    different = next((a for a, b in zip(*texts) if a != b), None)
    if different is None and not all(map(torch.equal, *constants)):
        return "a constant tensor"
    return different


def reads_shape(node: fx.Node) -> bool:
    """Whether a node reads the shape or type of a tensor, not its values."""
    return (node.op == "call_method" and node.target in _SHAPE_METHODS) or (
        node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES
    )


def _redirect_later_uses(graph: fx.Graph, node: fx.Node, storage: dict[fx.Node, fx.Node]) -> None:
    """After an in-place operation every later reader of its input sees the result.

    `storage` maps each earlier node to the one whose memory it may share. Later readers of another view of that memory
    are refused, since the view may or may not change.
    """
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    for other, owner in storage.items():
        if owner is not storage[source] or other is source:
            continue
        if any(order[u] > order[node] and not reads_shape(u) for u in other.users):
            problem = f"it changes memory in place that {describe(other)} may share and that is read again later"
            raise _fail(node, f"{problem}. Write it without the in-place operation.")
    for user in list(source.users):
        if user is not node and order[user] > order[node]:
            user.replace_input_with(source, node)


def _make_functional(root: nn.Module, graph: fx.Graph) -> None:
    """Replace in-place operations by functional ones, keeping what the template computes.

    In-place modules keep their flag, since `root` is also run as the template; `graph_module` clears it in copies.
    """
    storage: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        inplace = False
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is not None:
            inplace = bool(getattr(module, "inplace", False))
        elif node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"):
            inplace = True
            node.target = node.target[:-1]
            if not hasattr(Tensor, node.target):
                problem = f"the in-place method {node.target}_ has no functional form"
                raise _fail(node, f"{problem}. Write it without the in-place method.")
        elif node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            if node.target in _INPLACE_OPERATORS:
                inplace, node.target = True, _INPLACE_OPERATORS[node.target]
            elif name.endswith("_") and _from_torch(node.target):
                functional = getattr(F, name[:-1], None) or getattr(torch, name[:-1], None)
                if functional is None:
                    raise _fail(node, f"{name} has no functional form. Write it without it.")
                inplace, node.target = True, functional
            elif node.kwargs.get("inplace"):
                inplace = True
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
            elif node.target in (F.relu, F.leaky_relu) and len(node.args) == (2 if node.target is F.relu else 3):
                inplace = bool(node.args[-1])
                node.args = node.args[:-1]
            if node.kwargs.get("out") is not None:
                raise _fail(node, "it writes into out=. Use what the function returns.")
        first = node.args[0] if node.args else None
        shares = inplace or isinstance(module, _ALIASING_MODULES) or (module is None and _operation(node) in _ALIASING)
        if inplace:
            _redirect_later_uses(graph, node, storage)
        storage[node] = storage[first] if shares and isinstance(first, fx.Node) else node


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
    """Name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target)).lstrip("_")


def _from_torch(function: Any) -> bool:
    """Whether a function is torch's or Python's, and not a user's function of the same name."""
    module = getattr(function, "__module__", None) or "torch"
    return module.split(".")[0] in ("torch", "_operator", "builtins")


_CONSTANT, _SHAPE, _DATA = range(3)


def _classify(root: nn.Module, graph: fx.Graph, affine: tuple[Any, ...]) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """What depends on the data, and which nodes are ReLUs; other nodes must be max-pools or affine."""
    role: dict[fx.Node, int] = {}
    relus: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            role[node] = _DATA if node.op == "placeholder" else _CONSTANT
            continue
        inputs = node.all_input_nodes
        if not any(role[n] == _DATA for n in inputs):
            role[node] = max((role[n] for n in inputs), default=_CONSTANT)
            continue
        role[node] = _DATA
        if _relu_slope(root, node) is not None:
            relus.append(node)
        elif reads_shape(node):
            role[node] = _SHAPE
        elif is_max_pool(root, node):
            continue
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            if not isinstance(module, _AFFINE_MODULES + _types(affine)):
                raise _refused(node, type(module).__name__)
            if isinstance(module, _BATCH_NORMS) and not module.track_running_stats:
                problem = "batch-norm without running statistics is not affine in eval mode"
                raise _fail(node, f"{problem}. Set track_running_stats=True.")
        elif node.target not in affine:
            _check_call(node, role)
    return role, relus


def _types(affine: tuple[Any, ...]) -> tuple[type[nn.Module], ...]:
    return tuple(a for a in affine if isinstance(a, type) and issubclass(a, nn.Module))


def _check_call(node: fx.Node, role: dict[fx.Node, int]) -> None:
    """Refuse a function or method of the data that is not affine."""
    name = _operation(node)
    if node.op == "call_function" and not _from_torch(node.target):
        raise _refused(node, name)
    if name in _BILINEAR:
        if _data_count(node, role) > 1:
            problem = "it multiplies two quantities that both depend on the input"
            raise _fail(node, f"{problem}. A gated network is linear between its gates; remove the product.")
    elif name in _LINEAR_IN_FIRST:
        first = node.args[0] if node.args else None
        if _data_count(node, role) > 1 or not isinstance(first, fx.Node) or role[first] != _DATA:
            problem = "an argument other than the first depends on the input"
            raise _fail(node, f"{problem}. Only the first argument may; nothing affine divides or indexes by the data.")
        if node.kwargs.get("rounding_mode") is not None:
            raise _refused(node, "a division that rounds")
    elif name not in _LINEAR_JOINT:
        raise _refused(node, name)


def _data_count(node: fx.Node, role: dict[fx.Node, int]) -> int:
    """How often data occurs among the arguments (x·x counts twice)."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return sum(role.get(n) == _DATA for n in found)


def _refused(node: fx.Node, what: str) -> ConversionError:
    known = (remedy for key, remedy in _REMEDIES.items() if key in what.lower())
    remedy = next(known, "Replace it by a ReLU or an affine layer") + "; if it is affine, pass it in affine=(...)"
    return _fail(node, f"{what} is neither a ReLU nor known to be affine. {remedy}.")


def is_max_pool(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node is a max-pooling, which is not affine even with fixed gates."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in _MAX_POOLS
    if node.op not in ("call_function", "call_method") or not _from_torch(node.target):
        return False
    return _operation(node).removesuffix("_with_indices") in _MAX_POOL_FUNCTIONS


def max_pools(network: fx.GraphModule) -> list[fx.Node]:
    """Max-pooling nodes of a gated network's graph."""
    return [node for node in network.graph.nodes if is_max_pool(network, node)]


def average_max_pools(traced: Traced) -> None:
    """Replace max-pooling by average-pooling of the same windows, in place."""
    for node in traced.graph.nodes:
        if not is_max_pool(traced.root, node):  # also a second call of a module that was replaced at its first
            continue
        options = dict(node.kwargs)
        if node.op == "call_module":
            module: Any = traced.root.get_submodule(str(node.target))
            options = vars(module)
        if options.get("return_indices") or options.get("dilation", 1) not in (1, (1,), (1, 1), (1, 1, 1)):
            problem = "max-pooling with indices or dilation has no average counterpart"
            raise _fail(node, f"{problem}. Use plain max-pooling or average-pooling.")
        if node.op == "call_module":
            average = _MAX_POOLS[type(module)]
            if hasattr(module, "output_size"):
                new = average(module.output_size)
            else:
                new = average(module.kernel_size, module.stride, module.padding, module.ceil_mode)
            traced.root.set_submodule(str(node.target), new)
        else:
            name = _operation(node)
            if name not in _MAX_POOL_FUNCTIONS or len(node.args) > 4:
                problem = "this max-pooling call has no average counterpart"
                raise _fail(node, f"{problem}. Use nn.MaxPool2d or average-pooling.")
            node.target = _MAX_POOL_FUNCTIONS[name]
            kept = ("kernel_size", "stride", "padding", "ceil_mode", "output_size")
            node.kwargs = {k: v for k, v in options.items() if k in kept}


def _name_relus(root: nn.Module, graph: fx.Graph) -> dict[fx.Node, Site]:
    """Every ReLU call with its name; unused ones are numbered too, as in `record`."""
    calls: Counter[str] = Counter()
    found = {}
    for node in graph.nodes:
        slope = _relu_slope(root, node)
        if slope is None:
            continue
        if node.op == "call_module":
            path = str(node.target)
        else:
            owner = owner_of(node)
            path = f"{owner}.relu" if owner else "relu"
        found[node] = Site(f"{path}@{calls[path]}", slope)
        calls[path] += 1
    return found


def _find_entry(root: nn.Module, graph: fx.Graph, role: dict[fx.Node, int], relus: list[fx.Node]) -> str | None:
    """The last batch-norm before the first branch or ReLU, if any."""
    node = next(n for n in graph.nodes if n.op == "placeholder")
    entry = None
    while True:
        users = [u for u in node.users if role[u] == _DATA]
        if len(users) != 1 or users[0] in relus:
            return entry
        node = users[0]
        if node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), _BATCH_NORMS):
            entry = node.name


def _single_input(template: nn.Module, graph: fx.Graph) -> None:
    """Refuse a forward with several inputs; an unused one with a default is dropped."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    used = [n for n in inputs[1:] if n.users or not n.args]
    if not inputs or used or any(str(n.target).startswith("*") for n in inputs):
        names = ", ".join(str(n.target) for n in inputs) or "no input"
        raise _fail(
            template, f"its forward takes {names}; expected one tensor. Wrap it in a module with one tensor input."
        )
    for n in inputs[1:]:
        graph.erase_node(n)


def unwrapped(net: nn.Module) -> nn.Module:
    """The module inside a torch.compile or data-parallel wrapper, which has the names that the user gave."""
    inner = net.module if isinstance(net, _PARALLEL) else getattr(net, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else net


def chain_of(graph: fx.Graph) -> tuple[list[fx.Node], str | None]:
    """The nodes between input and output of a graph without branches; else also the name of the node that joins them.

    Nodes that read shapes alone are left out.
    """
    node: fx.Node = next(iter(graph.nodes))
    steps: list[fx.Node] = []
    while True:
        users = [user for user in node.users if not reads_shape(user)]
        if len(users) != 1:
            return steps, (users or [node])[-1].name
        if users[0].op == "output":
            return steps, None
        node = users[0]
        steps.append(node)


def trace(template: nn.Module, affine: tuple[Any, ...] = ()) -> Traced:
    """Trace a template and find its gate sites; the template itself is not changed.

    Raises
    ------
    ConversionError
        For data-dependent control flow, a train/eval difference other than dropout and batch-norm, or an operation
        that is neither a ReLU nor affine; the message names the node and a remedy.
    """
    if not isinstance(template, nn.Module):
        raise ConversionError(
            f"gated_twin: the template must be an nn.Module, got {type(template).__name__}. Pass the module itself."
        )
    _refuse_computed_weights(template)
    mode = template.training
    root = copy_without_hooks(template)
    graphs = {training: _follow(root, training, _types(affine)) for training in (True, False)}
    root.train(mode)
    dropouts = [_functional_dropouts(graphs[training]) for training in (True, False)]
    different = _same_graph(root, graphs[True], graphs[False])
    if different is not None:
        raise _fail(
            template,
            f"it computes different things in train and eval mode, first at: {different}. Use nn.Dropout and "
            "nn.BatchNorm modules instead of branching on self.training.",
        )
    graph = graphs[False]
    graph.owning_module = root  # type: ignore[assignment]  # fx finds pure calls by it
    _dropouts_to_modules(root, graph, [(node, on, off) for (_, on), (node, off) in zip(*dropouts)])
    _single_input(template, graph)
    _make_functional(root, graph)
    output = next(n for n in graph.nodes if n.op == "output")
    if not isinstance(output.args[0], fx.Node):
        problem = "its forward does not return a single tensor"
        raise _fail(template, f"{problem}. Wrap it so that it returns the logits alone.")
    sites = _name_relus(root, graph)
    graph.eliminate_dead_code()
    role, relus = _classify(root, graph, affine)
    if not relus:
        raise NoGateError(
            f"gated_twin: {type(template).__name__}: it has no ReLU, so there is nothing to gate. Use a template with "
            "nn.ReLU, F.relu or LeakyReLU."
        )
    entry = _find_entry(root, graph, role, relus)
    return Traced(root, graph, tuple(sites[n] for n in relus), tuple(n.name for n in relus), entry)


# --- graphs of the two networks ----------------------------------------------------------------------------------


def site_graph(traced: Traced) -> tuple[fx.Graph, list[fx.Node], fx.Node | None]:
    """A copy of the traced graph with one extra input per site; returns each site's node, and the entry node."""
    graph = fx.Graph()
    graph.owning_module = traced.root  # type: ignore[assignment]
    mapped: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(traced.graph, mapped)
    graph.output(result)
    by_name = {old.name: new for old, new in mapped.items()}
    last = next(n for n in graph.nodes if n.op == "placeholder")
    marked = []
    for i, (site, name) in enumerate(zip(traced.sites, traced.site_nodes)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"gate_{i}")
        node = by_name[name]
        with graph.inserting_after(node):
            new = graph.call_function(apply_site, (node.args[0], last, site.slope))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        marked.append(new)
    return graph, marked, by_name[traced.entry] if traced.entry else None


def gate_graph(traced: Traced, with_entry: bool) -> fx.Graph:
    """The graph that returns what every site reads; what follows the last site is dropped."""
    graph, sites, entry = site_graph(traced)
    reads = [site.args[0] for site in sites]
    if with_entry:
        reads.append(entry)
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (tuple(reads),)
    return graph


def value_graph(traced: Traced, enters_late: bool = False, constant: bool = False) -> fx.Graph:
    """The graph of the values; a constant input that would meet a batch-norm before any gate is refused."""
    graph, _, entry = site_graph(traced)
    first = next(n for n in graph.nodes if n.op == "placeholder")
    if enters_late:
        assert entry is not None
        entry.replace_all_uses_with(first)
        graph.eliminate_dead_code()
        for node in first.users:
            if (
                reads_shape(node)
                and node.args[1:] != (0,)
                and not all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
            ):
                raise _fail(
                    node,
                    "a piecewise-constant network's ones enter after the first batch-norm, where the input has another "
                    "shape than the one read here. Read the shape of a later tensor.",
                )
    if constant:
        gated: set[fx.Node] = set()
        for node in graph.nodes:
            if node.target is apply_site or any(n in gated for n in node.all_input_nodes):
                gated.add(node)
            elif node.op == "call_module" and isinstance(traced.root.get_submodule(str(node.target)), _BATCH_NORMS):
                raise _fail(
                    node,
                    "a piecewise-constant network's ones do not survive a batch-norm that comes before any gate. Begin "
                    "the template with one linear layer and its batch-norm, before it branches.",
                )
    return graph


def graph_module(root: nn.Module, graph: fx.Graph, name: str) -> NetworkGraph:
    """A module that runs `graph` with the modules of `root`, none of them in place; unused ones are dropped."""
    graph.eliminate_dead_code()
    module = NetworkGraph(root, graph, class_name=name)
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = root.get_submodule(path)
        # fx puts the weights of a traced module into a blank one; with its class they can be redrawn
        if path and hasattr(owner, "reset_parameters"):
            module.set_submodule(path, owner)
        # fx makes buffers of all tensors; those outside the template's state are left out of this one's too
        elif name not in owner._parameters and (
            name not in owner._buffers or name in owner._non_persistent_buffers_set
        ):
            module.get_submodule(path)._non_persistent_buffers_set.add(name)
    module.delete_all_unused_submodules()
    for m in module.modules():
        if getattr(m, "inplace", False):
            m.inplace = False  # type: ignore[assignment]
    return module
