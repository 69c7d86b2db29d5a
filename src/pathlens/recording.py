"""From a network and a batch to a Record, a Snapshot or a Trajectory.

A function-mode tape hears every `F.linear`, convolution and ReLU call, so gated networks and plain modules are recorded
by the same code, reused layers and functional calls included. What takes a net elsewhere in the package goes through
here. May import models, records, linops (memory budget, progress) and the errors.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pathlens.errors import (
    BudgetError,
    DTypeError,
    EmptyDataError,
    FileFormatError,
    NotFiniteError,
    RecordError,
    RowIndexError,
    ShapeError,
)
from pathlens.linops.budget import human_bytes, resolve_budget
from pathlens.linops.progress import Meter
from pathlens.models import GatedNetwork, Hard, Open, StraightThrough
from pathlens.models.gates import leak
from pathlens.models.sources import TableSource
from pathlens.records import Convolution, Layer, Record, RowSource, Snapshot, read_header, write_header

# --- inputs ----------------------------------------------------------------------------------------------------


def as_rows(X: Any, like: nn.Module | None = None) -> Tensor:
    """Inputs as one tensor: from a tensor, an array, a Dataset of (x, ...) items or a DataLoader of such batches.

    Parameters
    ----------
    X : Tensor, array, nested list, Dataset or DataLoader
        n rows; a Dataset or DataLoader is read to its end, in its own order.
    like : nn.Module, optional
        Arrays and data sets take this module's dtype and everything its device; a tensor of another dtype is refused.

    Returns
    -------
    Tensor, shape (n, ...)
        Detached, finite, at least one row. A tensor is not copied where it need not be; an array is.

    Examples
    --------
    >>> as_rows([[1, 2], [3, 4]])
    tensor([[1., 2.],
            [3., 4.]])
    """
    reference = next(like.parameters(), None) if like is not None else None
    dtype = reference.dtype if reference is not None else None
    if isinstance(X, Tensor):
        x = X.detach()
        if dtype is not None and x.dtype != dtype:
            raise DTypeError(f"Inputs are {x.dtype}, the network is {dtype}. Convert one of them, e.g. X.to({dtype}).")
    elif isinstance(X, (torch.utils.data.DataLoader, torch.utils.data.Dataset)):
        x = _from_items(X)
    else:
        x = _from_array(X, dtype)
    if dtype is not None:
        x = x.to(dtype)
    if x.ndim < 2:
        raise ShapeError(
            f"Inputs need a batch dimension: expected shape (n, ...), got {tuple(x.shape)}. For one row use X[None]."
        )
    if x.numel() == 0:
        raise EmptyDataError(f"Inputs are empty: shape {tuple(x.shape)}. Give at least one row.")
    finite = torch.isfinite(x)
    if not finite.all():
        bad = int((~finite).flatten(1).any(1).nonzero()[0])
        raise NotFiniteError(f"Inputs contain NaN or infinity, first in row {bad}. Remove or impute such rows.")
    if x.is_inference():  # autograd refuses tensors made in inference mode
        x = x.clone()
    return x if reference is None else x.to(reference.device)


def _from_items(X: Any) -> Tensor:
    loader = isinstance(X, torch.utils.data.DataLoader)
    kind = "DataLoader" if loader else "Dataset"
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed for its workers
        if loader or isinstance(X, torch.utils.data.IterableDataset):
            items = [_first(item) for item in X]
        else:
            items = [_first(X[i]) for i in range(len(X))]
    if not items:
        raise EmptyDataError(f"Inputs: the {kind} has no items.")
    try:
        tensors = [torch.as_tensor(item).detach() for item in items]
    except (TypeError, ValueError, RuntimeError) as e:
        raise DTypeError(
            f"Inputs: an item of the {kind} is a {type(items[0]).__name__}, expected a tensor or a tuple that starts "
            "with one."
        ) from e
    shapes = {tuple(t.shape[1:] if loader else t.shape) for t in tensors}
    if len(shapes) > 1:
        raise ShapeError(f"Inputs: rows of the {kind} have different shapes: {sorted(shapes)[:3]}. Make them equal.")
    return torch.cat(tensors) if loader else torch.stack(tensors)


def _from_array(X: Any, dtype: torch.dtype | None) -> Tensor:
    try:
        array = np.asarray(X)
    except ValueError as e:
        raise ShapeError(f"Inputs: the rows of this {type(X).__name__} do not have one shape ({e}).") from e
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        hint = " Give its rows: data.x." if isinstance(getattr(X, "x", None), Tensor) else ""
        raise DTypeError(f"Inputs must be real numbers, got an array of {array.dtype} ({type(X).__name__}).{hint}")
    if not array.dtype.isnative or array.dtype.itemsize > 8:  # torch knows neither other byte orders nor long doubles
        array = array.astype(np.float64)
    # a copy: the array may be read-only, or change later without torch knowing; torch takes no negative strides
    return torch.from_numpy(np.array(array, order="C")).to(dtype or torch.float32)


def _first(item: Any) -> Any:
    return item[0] if isinstance(item, (tuple, list)) and len(item) else item


def _row_numbers(net: nn.Module, rows: Any, x: Tensor) -> Tensor | None:
    """Which examples of a table of gates the rows of x are; None where no table asks."""
    source = net.source if isinstance(net, GatedNetwork) else None
    if not isinstance(source, TableSource):
        return None
    n = x.shape[0]
    ids = torch.arange(n, device=x.device) if rows is None else torch.as_tensor(rows, device=x.device)
    if ids.shape != (n,):
        raise ShapeError(f"record: rows has shape {tuple(ids.shape)}, expected ({n},): one number per row of X.")
    if ids.dtype == torch.bool or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise DTypeError(f"record: rows are {ids.dtype}, expected integers: the numbers of the examples.")
    size = int(next(source.buffers()).shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise RowIndexError(
            f"record: rows {int(ids.min())}…{int(ids.max())} asked for, the table of gates has {size} examples. "
            "Say which examples these are: record(net, X, rows=…)."
        )
    return ids.long()


# --- the tape --------------------------------------------------------------------------------------------------

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.leaky_relu, F.leaky_relu_}
_RANDOM = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    values = (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
    return values * length if len(values) == 1 else values


def _geometry(
    weight: Tensor, dims: int, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Convolution:
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
class _Call:
    """One linear or convolutional call: whose weight and bias, what it read, what came out."""

    weight: str
    bias: str | None
    x: Tensor
    out: Tensor
    shape: tuple[int, ...]
    convolution: Convolution | None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, (tuple, list)):
            yield from _tensors(v)


class _Tape(TorchFunctionMode):
    """Hears linear and convolutional calls, and ReLU calls of plain modules, while a network runs.

    `names` maps the id of a parameter's stand-in to its name. `other` collects parameters that also enter a
    computation in some other way, so that the calls do not tell their whole gradient.
    """

    def __init__(self, names: dict[int, str], clone: bool, stack: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names, self.clone, self.stack = names, clone, stack
        self.calls: list[_Call] = []
        self.relus: list[tuple[str, float, Tensor]] = []
        self.counts: Counter[str] = Counter()
        self.other: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _CONVOLUTIONS:
            return self._layer(func, args, kwargs)
        if func in _RELUS and self.stack:  # gated networks tell their gates themselves
            self._gate(func, args, kwargs)
        elif func in _RANDOM or func is F.batch_norm:
            self._refuse_training(func, args, kwargs)
        out = func(*args, **kwargs)
        used = [self.names[id(t)] for t in _tensors((*args, *kwargs.values())) if id(t) in self.names]
        if used and any(True for _ in _tensors((out,))):  # asking a weight for its shape is no use of it
            self.other.update(used)
        return out

    def _gate(self, func: Any, args: Any, kwargs: Any) -> None:
        q = args[0] if args else kwargs["input"]
        slope = 0.0
        if "leaky" in func.__name__:
            slope = float(args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
        path, module = self.stack[-1]
        key = path if isinstance(module, (nn.ReLU, nn.LeakyReLU)) else f"{path}.relu" if path else "relu"
        self.relus.append((f"{key}@{self.counts[key]}", slope, (q > 0).detach()))
        self.counts[key] += 1

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
        if id(x) in self.names:
            self.other.add(self.names[id(x)])
        out = func(*args, **kwargs)
        if name is None:  # a weight computed on the fly is no layer of its own
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
            convolution = _geometry(weight, dims, **options)
        if not out.requires_grad:
            out.requires_grad_()
        x = x.detach()
        self.calls.append(_Call(name, bias_name, x.clone() if self.clone else x, out, tuple(weight.shape), convolution))
        # an in-place ReLU of a plain module would otherwise rewrite what the tape holds
        return out.clone() if self.clone else out


@contextmanager
def _module_paths(net: nn.Module, stack: list[tuple[str, nn.Module]]) -> Iterator[None]:
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


def _check_net(net: nn.Module) -> None:
    """Refuse what cannot be recorded before anything runs."""
    if not isinstance(net, nn.Module):
        raise RecordError(f"record: expected an nn.Module, got {type(net).__name__}. Give the network first, then X.")
    for name, m in net.named_modules():
        if m is not net and isinstance(m, GatedNetwork):
            raise RecordError(
                f"record: module '{name}' is a GatedNetwork inside another module, which hides its gates. Record it "
                "itself, on the inputs that reach it."
            )
        if isinstance(m, torch.jit.ScriptModule):
            raise RecordError(f"record: module '{name}' is compiled by torch.jit, and no call in it can be heard.")
        norm = isinstance(m, nn.modules.batchnorm._BatchNorm)
        drop = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
        if (norm or drop) and m.training:
            what = "batch-norm mixes the rows of a batch" if norm else "dropout is random"
            raise RecordError(f"record: module '{name}' is in train mode, where {what}. Call net.eval() first.")
        if norm and m.running_mean is None:
            raise RecordError(
                f"record: module '{name}' has no running statistics, so that it mixes the rows of a batch in eval "
                "mode too. Set track_running_stats=True."
            )


def _plain(net: nn.Module) -> nn.Module:
    """The module behind torch.compile; its code is what the tape hears, its names are what users know."""
    inner = getattr(net, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else net


def _exact(net: nn.Module) -> nn.Module:
    """Straight-through gates compute hard gates; their made-up gradient must not enter a record."""
    if isinstance(net, GatedNetwork) and isinstance(net.gate, StraightThrough):
        clone = copy.copy(net)
        clone._modules = dict(net._modules)
        clone.gate = Hard()
        return clone
    return net


def _part(net: nn.Module, name: str) -> str:
    if not isinstance(net, GatedNetwork) or net.source is None:
        return "shared"
    return "gate" if name.startswith("source.") else "value"


def _listen(net: nn.Module, x: Tensor, ids: Tensor | None) -> tuple[Tensor, _Tape]:
    """Run the network on stand-ins for its parameters, so that the live ones see no graph and no gradient."""
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    names = {id(p): k for k, p in parameters.items()}
    stack: list[tuple[str, nn.Module]] = []
    if isinstance(net, GatedNetwork):
        tape = _Tape(names, clone=False, stack=stack)
        with tape:
            return torch.func.functional_call(net, parameters, (x, ids)), tape
    # a user's forward may write into its input or its buffers
    buffers = {k: b.detach().clone() for k, b in net.named_buffers()}
    tape = _Tape(names, clone=True, stack=stack)
    with _module_paths(net, stack), tape:
        return torch.func.functional_call(net, parameters | buffers, (x.clone(),)), tape


def _take(net: nn.Module, x: Tensor, outputs: Sequence[int] | None, ids: Tensor | None, sensitivities: bool) -> Record:
    """The record of one batch; the caller has checked modes and inputs."""
    n = x.shape[0]
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        f, tape = _listen(net, x, ids)
        if isinstance(f, Tensor) and f.ndim == 0 and n == 1:  # a network that ends in squeeze()
            f = f.reshape(1)
        if not isinstance(f, Tensor) or f.ndim not in (1, 2) or f.shape[0] != n:
            got = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
            raise RecordError(
                f"record: the network must return a tensor of shape (n, c), got {got} for {n} rows. Wrap it so that "
                "it returns its outputs alone, rows first."
            )
        f2 = f if f.ndim == 2 else f[:, None]
        wanted = list(range(f2.shape[1])) if outputs is None else list(outputs)
        if not wanted or any(not 0 <= k < f2.shape[1] for k in wanted):
            raise RecordError(f"record: outputs {wanted} asked for, the network has {f2.shape[1]}, numbered from 0.")
        by_weight = _by_weight(tape, n)
        last = {k for k, calls in by_weight.items() if len(calls) == 1 and _is_output(calls[0], f)}
        heard = [c for k, calls in by_weight.items() if k not in last for c in calls]
        grads = _gradients(f2, heard, wanted) if sensitivities else {}
    trainable = {k: p.requires_grad for k, p in net.named_parameters()}
    biases = _biases(by_weight, tape.other, trainable)
    layers, layer_inputs, sensitivity = [], {}, {}
    flops = 0
    for weight, calls in by_weight.items():
        name, shape = weight.removesuffix(".weight"), calls[0].shape
        size = math.prod(shape[1:])
        geometry, part = tuple(c.convolution for c in calls), _part(net, weight)
        layer = Layer(name, part, weight in biases, size, shape[0], geometry, weight in last, trainable[weight])
        layers.append(layer)
        layer_inputs[name] = [c.x for c in calls]
        flops += sum(2 * c.out[0].numel() * size for c in calls)
        if any(id(c) in grads for c in calls):
            sensitivity[name] = torch.cat([_by_position(grads.get(id(c)), c, len(wanted)) for c in calls], dim=2)
    bits, soft, label = _gates_of(net, x, ids, tape)
    told = set(by_weight) | set(biases.values())
    return Record(
        x, f2.detach()[:, wanted], bits, soft, tuple(layers), layer_inputs, sensitivity, label,
        flops * (1 + (len(wanted) if sensitivities else 0)),
        tuple(k for k, train in trainable.items() if train and k not in told),
        () if outputs is None else tuple(wanted), sensitivities,
    )  # fmt: skip


def _by_weight(tape: _Tape, n: int) -> dict[str, list[_Call]]:
    """Calls by weight, without weights that are also used in other ways."""
    found: dict[str, list[_Call]] = {}
    for call in tape.calls:
        if call.out.shape[0] != n:
            raise RecordError(
                f"record: layer '{call.weight}' sees {call.out.shape[0]} rows where the batch has {n}. Rows must stay "
                "the first dimension inside the network."
            )
        if call.weight not in tape.other:
            found.setdefault(call.weight, []).append(call)
    return found


def _biases(by_weight: dict[str, list[_Call]], other: set[str], trainable: dict[str, bool]) -> dict[str, str]:
    """Weight → bias, where Σ_p D_p of that layer is the whole gradient of that bias.

    Not so for a bias that some calls go without, that other layers share, or whose weight alone is frozen.
    """
    owners: dict[str, set[str]] = {}
    for weight, calls in by_weight.items():
        for call in calls:
            if call.bias is not None:
                owners.setdefault(call.bias, set()).add(weight)
    found = {}
    for bias, weights in owners.items():
        weight = next(iter(weights))
        whole = len(weights) == 1 and bias not in other and all(c.bias == bias for c in by_weight[weight])
        if whole and trainable[bias] == trainable[weight]:
            found[weight] = bias
    return found


def _is_output(call: _Call, f: Tensor) -> bool:
    """Whether the network returns this call's result unchanged: itself, or the clone that the tape handed on."""
    if call.out is f:
        return True
    node = f.grad_fn
    if call.out.shape != f.shape or node is None or type(node).__name__ != "CloneBackward0":
        return False
    before = node.next_functions[0][0]
    if call.out.grad_fn is None:  # a leaf: the first layer
        return getattr(before, "variable", None) is call.out
    return before is call.out.grad_fn


def _gradients(f: Tensor, calls: list[_Call], outputs: list[int]) -> dict[int, list[Tensor | None]]:
    """Per call, the gradient of every wanted output to the call's result; calls that f ignores are left out."""
    if not calls or not f.requires_grad:
        return {}
    found: dict[int, list[Tensor | None]] = {id(c): [] for c in calls}
    outs = [c.out for c in calls]
    for i, k in enumerate(outputs):
        try:
            gs = torch.autograd.grad(f[:, k].sum(), outs, retain_graph=i + 1 < len(outputs), allow_unused=True)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise RecordError(
                f"record: the network cannot be differentiated ({e}). It could not be trained either; if the gates "
                "are enough, pass sensitivities=False."
            ) from e
        for c, g in zip(calls, gs):
            found[id(c)].append(g)
    return {k: v for k, v in found.items() if any(g is not None for g in v)}


def _by_position(grads: list[Tensor | None] | None, call: _Call, count: int) -> Tensor:
    """Stack gradients to (n, c, P, m)."""
    full = [torch.zeros_like(call.out) if g is None else g for g in (grads or [None] * count)]
    n = call.out.shape[0]
    if call.convolution is None:
        return torch.stack([g.detach().reshape(n, -1, g.shape[-1]) for g in full], dim=1)
    return torch.stack([g.detach().flatten(2).transpose(1, 2) for g in full], dim=1)


def _gates_of(
    net: nn.Module, x: Tensor, ids: Tensor | None, tape: _Tape
) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    if not isinstance(net, GatedNetwork):
        bits = {name: b for name, _, b in tape.relus}
        soft = {name: leak(b.to(x.dtype), slope) for name, slope, b in tape.relus if slope}
        return bits, soft, "hard"
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        scores = net.preactivations(x, ids)
        all_open = isinstance(net.gate, Open)
        bits = {k: torch.ones_like(q, dtype=torch.bool) if all_open else q > 0 for k, q in scores.items()}
        soft = {}
        for site in net.sites:
            if not net.gate.hard or site.slope:
                soft[site.name] = leak(net.gate(scores[site.name]), site.slope)
    return bits, soft, net.gate.label


# --- records ---------------------------------------------------------------------------------------------------

#: bytes that a batch needs while it is computed, per byte of its record: activations, their gradients, copies;
#: measured at 2.3 (fully connected, one output) to 3.0 (convolutions, four outputs)
WORKING_FACTOR = 4


class RecordStream:
    """A row source that computes records when asked: frozen weights and the inputs, nothing else.

    The inputs are not copied; a change of them in place is noticed and refused.

    Attributes
    ----------
    n, outputs, sites, layers, gate_label, untracked, has_sensitivities
        As in `Record`.
    kept : tuple of int
        Which outputs of the network are recorded; () means all.
    bytes_per_row, flops_per_row : int
        What a row takes, and what it costs to compute it again.

    Examples
    --------
    >>> from pathlens import models
    >>> stream = record(models.relu(2, hidden=(4,), seed=0), torch.randn(10, 2), stream=True)
    >>> stream.rows(3, 7)
    Record(4 rows, 1 outputs, 1 gate sites (hard), 2 layers, torch.float32, 0.0 MiB)
    """

    def __init__(
        self, net: nn.Module, x: Tensor, probe: Record, ids: Tensor | None, sensitivities: bool = True
    ) -> None:
        try:
            self._net = copy.deepcopy(net)
        except RuntimeError as e:
            raise RecordError(f"record: the network cannot be copied, as a stream needs ({e}).") from e
        for p in self._net.parameters():
            p.grad = None
        self._x, self._ids, self._version = x, ids, x._version
        self.n, self.outputs, self.kept = int(x.shape[0]), probe.outputs, probe.kept
        self.sites, self.layers = probe.sites, probe.layers
        self.bytes_per_row, self.flops_per_row = probe.bytes_per_row, probe.flops_per_row
        self.gate_label, self.untracked = probe.gate_label, probe.untracked
        self.has_sensitivities = sensitivities

    def rows(self, lo: int, hi: int, output: int | None = None) -> Record:
        """Compute rows lo…hi; `output` keeps the sensitivities of one output only, which costs less."""
        if not 0 <= lo < hi <= self.n:
            raise RecordError(f"RecordStream: rows {lo}:{hi} asked for, it has {self.n}.")
        if output is not None and not 0 <= output < self.outputs:
            raise RecordError(f"RecordStream: output {output} asked for, it has {self.outputs}, numbered from 0.")
        if self._x._version != self._version:
            raise RecordError(
                "RecordStream: the inputs were changed in place after they were given. Record a copy: "
                "record(net, X.clone())."
            )
        ids = None if self._ids is None else self._ids[lo:hi]
        every = self.kept or range(self.outputs)
        wanted = (self.kept or None) if output is None else [every[output]]
        return _take(self._net, self._x[lo:hi], wanted, ids, self.has_sensitivities)

    def __repr__(self) -> str:
        return (
            f"RecordStream({self.n} rows × {human_bytes(self.bytes_per_row)}, recomputed when asked: "
            f"{self.flops_per_row:.2e} flops a row, {self.outputs} outputs, {len(self.sites)} gate sites)"
        )


def record(
    net: nn.Module,
    X: Any,
    *,
    rows: Any = None,
    outputs: int | Sequence[int] | None = None,
    sensitivities: bool = True,
    max_bytes: int | None = None,
    stream: bool | None = None,
) -> Record | RecordStream:
    """Gates, layer inputs and output sensitivities of a network on a batch.

    The network is left as it is: its weights, gradients, mode and hooks are not touched, nor is the random state.

    Parameters
    ----------
    net : GatedNetwork or any nn.Module
        In eval mode if it has batch-norm or dropout. It returns (n, c) or (n,), and keeps rows the first dimension of
        everything that its linear and convolutional layers read.
    X : Tensor, array, Dataset or DataLoader; (n, ...)
    rows : integer tensor, optional
        Example numbers, where gates come from a table; 0…n−1 otherwise.
    outputs : int or sequence of int, optional
        Record these outputs alone.
    sensitivities : bool
        False skips the backward pass: enough for gates and overlap kernels.
    max_bytes : int, optional
        Memory budget. A record that fits is materialised, otherwise a `RecordStream` is returned that recomputes rows.
        Default: half of the free memory.
    stream : bool, optional
        Ask for a stream (True) or a materialised record (False) whatever the size.

    Returns
    -------
    Record or RecordStream
        Both are row sources: `n`, `sites`, `layers`, `rows(lo, hi, output=k)`.

    Raises
    ------
    RecordError
        Batch-norm or dropout in train mode; an output of another shape; rows that are not the first dimension.
    BudgetError
        The budget does not hold one row.

    Notes
    -----
    Exact. One forward and c backward passes. What a straight-through gate passes back in training is not a derivative
    of the network, and is not recorded.

    Examples
    --------
    >>> from pathlens import models
    >>> record(models.dlgn(2, hidden=(4, 4), seed=0), torch.randn(10, 2)).gates("relu1@0").shape
    torch.Size([10, 4])
    """
    net = _plain(net)
    _check_net(net)
    with torch.inference_mode(False):
        x = as_rows(X, net)
        net = _exact(net)
        ids = _row_numbers(net, rows, x)
        chosen = [outputs] if isinstance(outputs, int) else outputs
        n = x.shape[0]
        probe = _take(net, x[:1], chosen, None if ids is None else ids[:1], sensitivities)
        row = probe.nbytes
        budget = resolve_budget(max_bytes, x.device)
        if WORKING_FACTOR * row > budget:
            raise BudgetError(
                f"record: one row needs about {human_bytes(WORKING_FACTOR * row)}, the budget is "
                f"{human_bytes(budget)}. Raise max_bytes, or ask for fewer outputs."
            )
        if stream is None:
            stream = n * row > budget // 2
        if stream:
            return RecordStream(net, x, probe, ids, sensitivities)
        if WORKING_FACTOR * row * n <= budget:
            # the record is to stay as it is when the caller's tensor changes
            return _take(net, x.clone() if x is X or _same_memory(x, X) else x, chosen, ids, sensitivities)
        spare = max(budget - n * row, budget // 2)
        batch = max(1, min(n, spare // (WORKING_FACTOR * row)))
        whole: _Assembly | None = None
        with Meter("recording", n) as meter:
            for lo in range(0, n, batch):
                cut = slice(lo, lo + batch)
                part = _take(net, x[cut], chosen, None if ids is None else ids[cut], sensitivities)
                whole = whole or _Assembly(part, n)
                whole.put(part, lo)
                meter.advance(part.n)
        assert whole is not None
        return whole.record


def _same_memory(x: Tensor, X: Any) -> bool:
    return isinstance(X, Tensor) and x.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


class _Assembly:
    """A record of n rows that is filled batch by batch, so that nothing is held twice."""

    def __init__(self, part: Record, n: int) -> None:
        made: dict[tuple[Any, ...], Tensor] = {}

        def room(t: Tensor) -> Tensor:  # tensors that are one in the part (x, read by two layers) stay one
            key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
            if key not in made:
                made[key] = t.new_empty((n, *t.shape[1:]))
            return made[key]

        self.record = Record(
            room(part.x), room(part.f), {k: room(t) for k, t in part.bits.items()},
            {k: room(t) for k, t in part.soft.items()}, part.layers,
            {k: [room(t) for t in calls] for k, calls in part.layer_inputs.items()},
            {k: room(t) for k, t in part.sensitivity.items()}, part.gate_label, part.flops_per_row, part.untracked,
            part.kept, part.has_sensitivities,
        )  # fmt: skip

    @staticmethod
    def _list(r: Record) -> list[Tensor]:
        tensors = [r.x, r.f, *r.bits.values(), *r.soft.values(), *r.sensitivity.values()]
        return tensors + [t for calls in r.layer_inputs.values() for t in calls]

    def put(self, part: Record, lo: int) -> None:
        """Copy a batch to its place."""
        whole = self.record
        same = (part.layers, part.sites, part.sensitivity.keys()) == (
            whole.layers, whole.sites, whole.sensitivity.keys(),
        )  # fmt: skip
        if not same:
            raise RecordError(
                f"record: the network runs other layers on rows {lo}…{lo + part.n - 1} than on the rows before. "
                "Control flow that depends on the data cannot be recorded batch by batch: raise max_bytes, or record "
                "such rows apart."
            )
        for target, t in zip(self._list(whole), self._list(part)):
            target[lo : lo + part.n] = t


def snapshot(net: nn.Module) -> Snapshot:
    """The weights of a network now, as copies.

    >>> from pathlens import models
    >>> snapshot(models.relu(2, hidden=(4,), seed=0))
    Snapshot(relu: 2 tensors, 12 numbers)
    """
    net = _plain(net)
    description = net.describe() if isinstance(net, GatedNetwork) else {"kind": type(net).__name__}
    return Snapshot({k: v.detach().clone() for k, v in net.state_dict().items()}, description)


# --- trajectory ------------------------------------------------------------------------------------------------

_PARTS: dict[str, type[Snapshot] | type[Record]] = {"snapshot": Snapshot, "record": Record}


@dataclass
class Moment:
    """One point of a training run: weights, and a record or outputs if they were asked for."""

    step: int
    epoch: float | None = None
    reason: str = ""
    loss: float | None = None
    snapshot: Snapshot | None = None
    record: Record | None = None

    def __repr__(self) -> str:
        kept = [k for k in ("snapshot", "record") if getattr(self, k) is not None]
        loss = "" if self.loss is None else f", loss {self.loss:.3g}"
        return f"Moment(step {self.step}, epoch {self.epoch}{loss}, {self.reason or 'asked for'}: {' + '.join(kept)})"


@dataclass
class Trajectory:
    """A training run as data: what happened every epoch, and the moments that were kept.

    `history` maps a name ("loss", "test_loss", …) to one number per epoch, the first at initialisation. In your own
    loop call `append`:

    >>> from pathlens import models
    >>> net, trajectory = models.relu(2, hidden=(4,), seed=0), Trajectory()
    >>> trajectory.append(net, torch.randn(3, 2), step=0)
    Moment(step 0, epoch None, asked for: snapshot + record)
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def append(
        self,
        net: nn.Module,
        X: Any = None,
        step: int = 0,
        *,
        epoch: float | None = None,
        loss: float | None = None,
        reason: str = "",
        sensitivities: bool = True,
        rows: Any = None,
    ) -> Moment:
        """Keep the network's weights, and its record on X where X is given.

        Parameters
        ----------
        net : nn.Module
            In any mode; the record is taken in eval mode, and the mode of every module restored.
        X : inputs, optional
            As `record` takes them.
        step : int
        epoch, loss : float, optional
        reason : str
            Why this moment is kept; shown by ``repr``.
        sensitivities, rows
            As in `record`.
        """
        taken = None
        if X is not None:
            mode = {m: m.training for m in net.modules()}
            net.eval()
            try:
                made = record(net, X, sensitivities=sensitivities, rows=rows, stream=False)
                assert isinstance(made, Record)
                taken = made
            finally:
                for m, training in mode.items():
                    m.training = training
        moment = Moment(step, epoch, reason, loss, snapshot(net), taken)
        self.moments.append(moment)
        return moment

    def at_epoch(self, epoch: float) -> Moment:
        """The moment kept at that epoch."""
        for m in self.moments:
            if m.epoch == epoch:
                return m
        raise RecordError(f"Trajectory: nothing was kept at epoch {epoch}; kept: {[m.epoch for m in self.moments]}.")

    def epoch_reached(self, loss: float, name: str = "loss") -> int | None:
        """The first epoch whose loss is below a value, or None."""
        return next((e for e, v in enumerate(self.history.get(name, [])) if v < loss), None)

    def save(self, folder: str | Path) -> None:
        """Write `trajectory.json` and one pair of files per kept snapshot and record.

        The folder may hold an earlier save of a growing trajectory; `trajectory.json` is replaced last.
        """
        folder = Path(folder)
        entries = []
        for i, m in enumerate(self.moments):
            entry: dict[str, Any] = {"step": m.step, "epoch": m.epoch, "reason": m.reason, "loss": m.loss}
            for part in _PARTS:
                kept = getattr(m, part)
                # the checksum says which save a file belongs to, should one be interrupted
                entry[part] = None if kept is None else kept.save(folder / f"{part}-{i:04d}")
            entries.append(entry)
        meta = {"history": self.history, "moments": entries, "config": self.config}
        write_header(folder / "trajectory.json", "trajectory", meta)
        current = {f"{part}-{i:04d}" for i, entry in enumerate(entries) for part in _PARTS if entry[part] is not None}
        for part in _PARTS:  # of a longer trajectory that was saved here before
            for old in folder.glob(f"{part}-[0-9][0-9][0-9][0-9].*"):
                if old.suffix in (".json", ".safetensors") and old.name.split(".")[0] not in current:
                    old.unlink()

    @classmethod
    def load(cls, folder: str | Path) -> Trajectory:
        """Read a saved trajectory."""
        folder = Path(folder)
        path = folder / "trajectory.json"
        meta = read_header(path, "trajectory")
        moments = []
        for i, d in enumerate(meta["moments"]):
            kept: dict[str, Any] = {}
            for part, kind in _PARTS.items():
                if d[part] is None:
                    continue
                file = folder / f"{part}-{i:04d}"
                kept[part] = kind.load(file)
                if read_header(file.with_name(file.name + ".json"), part)["sha256"] != d[part]:
                    raise FileFormatError(
                        f"{file}.json: belongs to another save than {path}, which was probably interrupted. Both were "
                        f"left untouched; {kind.__name__}.load still reads this file on its own."
                    )
            moments.append(Moment(d["step"], d["epoch"], d["reason"], d["loss"], **kept))
        return cls(meta["history"], moments, meta["config"])

    def __repr__(self) -> str:
        epochs = max((len(v) for v in self.history.values()), default=1) - 1
        loss = self.history.get("loss")
        return f"Trajectory({epochs} epochs, {len(self.moments)} moments" + (f", loss {loss[-1]:.3g})" if loss else ")")


__all__ = ["Moment", "Record", "RecordStream", "RowSource", "Snapshot", "Trajectory", "as_rows", "record", "snapshot"]
