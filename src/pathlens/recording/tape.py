"""The tape: records every linear, convolutional and ReLU call while a network runs."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pathlens.errors import RecordError
from pathlens.models.tensors import tensors_in
from pathlens.records import Convolution

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.leaky_relu, F.leaky_relu_}
# fmt: off
# nonlinear functions without a gate that is 0 or 1 by the sign of their input
_UNGATED = {
    "abs", "absolute", "acos", "acosh", "amax", "amin", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "celu",
    "clamp", "clamp_max", "clamp_min", "clip", "cos", "cosh", "cumprod", "elu", "erf", "erfc", "exp", "exp2",
    "expm1", "floor", "fmax", "fmin", "frac", "gelu", "glu", "group_norm", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "heaviside", "hypot", "instance_norm", "layer_norm", "local_response_norm", "log",
    "log10", "log1p", "log2", "log_sigmoid", "log_softmax", "logsigmoid", "logsumexp", "max", "maximum", "median",
    "min", "minimum", "mish", "multi_head_attention_forward", "norm", "normalize", "pow", "prelu", "prod",
    "reciprocal", "relu6", "rms_norm", "round", "rpow", "rrelu", "rsqrt", "scaled_dot_product_attention", "selu",
    "sgn", "sigmoid", "sign", "silu", "sin", "sinh", "softmax", "softmin", "softplus", "softshrink", "softsign",
    "sort", "sqrt", "square", "std", "tan", "tanh", "tanhshrink", "threshold", "topk", "trunc", "var", "where",
}
# linear in one argument while the others are constants; `where` is, while its condition is one
_PRODUCTS = {
    "baddbmm", "bilinear", "bmm", "cdist", "div", "divide", "dot", "einsum", "matmul", "mm", "mul", "multiply",
    "outer", "rdiv", "tensordot", "true_divide", "truediv",
}
# fmt: on
_BEHIND_AUTOGRAD = {Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}  # type: ignore[attr-defined]
_RANDOM = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    values = (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
    return values * length if len(values) == 1 else values


def geometry(
    weight: Tensor, dims: int, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Convolution:
    """The geometry of a convolution from its arguments, as ``F.conv2d`` takes them."""
    kernel, dilation = tuple(weight.shape[2:]), _tuple(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
        pads = tuple((t // 2, t - t // 2) for t in totals)
    elif padding == "valid":
        pads = ((0, 0),) * dims
    else:
        pads = tuple((p, p) for p in _tuple(padding, dims))
    return Convolution(kernel, _tuple(stride, dims), pads, dilation, groups)


@dataclass
class Call:
    """One linear or convolutional call: names of its weight and bias, its input and its output."""

    weight: str
    bias: str | None
    x: Tensor
    out: Tensor
    shape: tuple[int, ...]
    convolution: Convolution | None
    versions: tuple[int, int]
    before: int  # how many entries of the tape's `acting` came before it

    def rewritten(self) -> bool:
        """Whether its input or output has been changed in place since."""
        return (self.x._version, self.out._version) != self.versions


class Tape(TorchFunctionMode):
    """Records linear and convolutional calls, and ReLU calls of plain modules, while a network runs.

    `names` maps the id of a parameter's detached copy to its name, `statistics` that of a batch-norm's running mean.
    With `clone` it holds copies, which a network that works in place cannot change. `other` collects parameters that
    are also used in other ways, so that the calls do not give their whole gradient; `acting` lists these uses and those
    of batch-norms in order, and `ungated` nonlinear functions of the data between layers other than ReLUs. `relus`
    holds the ReLUs of the data: name, slope, gates, and the node in autograd's graph.
    """

    def __init__(
        self,
        names: dict[int, str],
        clone: bool,
        stack: list[tuple[str, nn.Module]],
        x: Tensor,
        statistics: dict[int, str],
    ) -> None:
        super().__init__()
        self.names, self.clone, self.stack, self.statistics = names, clone, stack, statistics
        self.calls: list[Call] = []
        self.relu_after: dict[str, int] = {}  # ReLU → how many layers had been called before it
        self._last = WeakIdKeyDictionary()  # computed from the last layer's result and no other data
        self.relus: list[tuple[str, float, Tensor, Any]] = []
        self.detached = False  # some of what the output depends on is not in autograd's graph
        self._rows = len(x)
        self._data = WeakIdKeyDictionary({x: True})  # computed from the inputs
        self.counts: Counter[str] = Counter()
        self.other: set[str] = set()
        self.acting: list[str] = []
        self.ungated: list[str] = []
        self._waiting: list[str] = []  # activations since the last layer: those after all layers are outputs
        self.unseen = False  # a tensor was passed on in a way that allows changes without a trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((*args, *kwargs.values())))
        data = [t for t in given if t in self._data]
        if func is F.linear or func in _CONVOLUTIONS:
            count = len(self.calls)
            out = self._mark(self._layer(func, args, kwargs), data)
            if len(self.calls) > count:
                self._last = WeakIdKeyDictionary({out: True})
            return out
        name = getattr(func, "__name__", "").strip("_")
        if func in _RANDOM or func is F.batch_norm:
            self._refuse_training(func, args, kwargs)
            self.acting += [self.statistics[id(t)] for t in given if id(t) in self.statistics]
        elif func in _BEHIND_AUTOGRAD:
            self.unseen = True
        gated = func in _RELUS and bool(self.stack)  # gated networks compute their gates themselves
        gate = self._gate(func, args, kwargs) if gated else None
        out = func(*args, **kwargs)
        if self.stack and data and self._is_ungated(name, args, data, out):
            path, module = self.stack[-1]
            kind = type(module).__name__ if type(module).__module__ == nn.GELU.__module__ else name
            self._waiting.append(f"{kind} in module '{path}'" if path else kind)
        if gate is not None and data:
            if torch.is_grad_enabled() and not out.requires_grad:
                # before any layer: from here on autograd's graph contains it
                if not any(out is t for t in data):
                    out = out.requires_grad_().clone()
                else:
                    with contextlib.suppress(RuntimeError):  # autograd refuses to follow one of a tuple of views
                        out.add_(out.new_zeros((), requires_grad=True))
            # a view that is changed in place changes what it is a view of
            self.relus.append((*gate, (out if out._base is None else out._base).grad_fn))
            self.relu_after[gate[0]] = len(self.calls)
        self.detached |= name in ("detach", "data") or (bool(data) and not torch.is_grad_enabled())
        used = [self.names[id(t)] for t in given if id(t) in self.names]
        if used and any(True for _ in tensors_in((out,))):  # reading the shape of a weight does not use it
            self.other.update(used)
            self.acting += used
        if name == "setitem":
            self._mark(args[0], data)
        return out if name.endswith("_like") or name.startswith("new_") else self._mark(out, data)

    def ends_in(self, f: Any) -> bool:
        """Whether f was computed from the last layer's output alone, without further parameters."""
        return bool(self.calls) and f in self._last and len(self.acting) == self.calls[-1].before

    def _mark(self, out: Any, data: list[Tensor]) -> Any:
        """Note that `out`, and the tensor that it is a view of, was computed from `data`."""
        if data:
            last = all(t in self._last for t in data)
            for t in tensors_in((out,)):
                self._data[t] = True
                if t._base is not None:
                    self._data[t._base] = True
                if last:
                    self._last[t] = True
                else:
                    self._last.pop(t, None)
        return out

    def _is_ungated(self, name: str, args: Any, data: list[Tensor], out: Any) -> bool:
        """Whether a nonlinear function was applied to rows of the data; a single number for all does not count."""
        if not any(t.is_floating_point() and t.shape[:1] == (self._rows,) for t in tensors_in((out,))):
            return False
        if name == "where":
            return bool(args) and isinstance(args[0], Tensor) and args[0] in self._data
        if name in _PRODUCTS:
            divisor = name in ("div", "divide", "true_divide", "truediv") and len(args) > 1
            return len(data) > 1 or (divisor and any(args[1] is t for t in data)) or name == "rdiv"
        return name in _UNGATED

    def _gate(self, func: Any, args: Any, kwargs: Any) -> tuple[str, float, Tensor]:
        q = args[0] if args else kwargs["input"]
        slope = 0.0
        if "leaky" in func.__name__:
            slope = float(args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
        path, module = self.stack[-1]
        key = path if isinstance(module, (nn.ReLU, nn.LeakyReLU)) else f"{path}.relu" if path else "relu"
        call = self.counts[key]
        self.counts[key] += 1
        # q > 0 (and NaN), which torch computes at a third of the speed of these two
        return f"{key}@{call}", slope, q.detach().relu().bool()

    def _refuse_training(self, func: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["training"] and bound.arguments.get("p", 1) > 0:
            where = f"in module '{self.stack[-1][0]}' " if self.stack and self.stack[-1][0] else ""
            what = "it mixes the rows of a batch" if func is F.batch_norm else "it is random"
            raise RecordError(
                f"record: a call of {func.__name__} {where}works as in training, where {what}. Call net.eval() first, "
                "and pass training=self.training to functional calls."
            )

    def _layer(self, func: Any, args: Any, kwargs: Any) -> Any:
        bound = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args)) | kwargs
        x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
        name, bias_name = self.names.get(id(weight)), self.names.get(id(bias))
        before = len(self.acting)
        if id(x) in self.names:
            self.other.add(self.names[id(x)])
        out = func(*args, **kwargs)
        if name is None:  # a computed weight is not a layer
            self.acting.append("a weight")
            if bias_name is not None:
                self.other.add(bias_name)
            return out
        dims = _CONVOLUTIONS.get(func)
        if x.ndim < 2 or (dims is not None and x.ndim != dims + 2):
            raise RecordError(
                f"record: layer '{name}' reads a tensor of shape {tuple(x.shape)}, which has no batch dimension. "
                "Rows must stay the first dimension inside the network."
            )
        convolution = None
        if dims is not None:
            options = {k: bound[k] for k in ("stride", "padding", "dilation", "groups") if k in bound}
            convolution = geometry(weight, dims, **options)
        if not out.requires_grad:
            out.requires_grad_()
        x = x.detach().clone() if self.clone else x.detach()
        versions = x._version, out._version
        self.ungated += [name for name in dict.fromkeys(self._waiting) if name not in self.ungated]
        self._waiting.clear()
        self.calls.append(Call(name, bias_name, x, out, tuple(weight.shape), convolution, versions, before))
        # an in-place operation would otherwise change the tensor on the tape
        return out.clone() if self.clone else out


@contextmanager
def module_paths(net: nn.Module, stack: list[tuple[str, nn.Module]]) -> Iterator[None]:
    """Keep on `stack` the path and the module that is running."""
    handles = []
    for path, module in net.named_modules():

        def enter(m: nn.Module, inputs: Any, path: str = path) -> None:
            stack.append((path, m))

        def leave(m: nn.Module, inputs: Any, output: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
