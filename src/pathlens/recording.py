"""From a network and a batch to a Record, a Snapshot or a Trajectory.

A function-mode tape sees every `F.linear`, convolution and ReLU call, so gated networks and plain modules are recorded
by the same code, reused layers and functional calls included. What takes a net elsewhere in the package goes through
here.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence
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
    ShapeError,
)
from pathlens.linops.budget import human_bytes, resolve_budget
from pathlens.models import GatedNetwork, Hard, Open, StraightThrough
from pathlens.models.gates import leak
from pathlens.records import Convolution, Layer, Record, RowSource, Snapshot, write_atomically

# --- inputs ----------------------------------------------------------------------------------------------------


def as_rows(X: Any, like: nn.Module | None = None) -> Tensor:
    """Inputs as one tensor: from a tensor, an array, a Dataset of (x, ...) items or a DataLoader of such batches.

    With `like`, arrays take that module's dtype and everything its device; a tensor of another dtype is refused.
    """
    reference = next(like.parameters(), None) if like is not None else None
    dtype = reference.dtype if reference is not None else None
    if isinstance(X, Tensor):
        x = X
        if dtype is not None and x.dtype != dtype:
            raise DTypeError(f"Inputs are {x.dtype}, the network is {dtype}. Convert one of them, e.g. X.to({dtype}).")
    elif isinstance(X, torch.utils.data.DataLoader):
        batches = [_first(batch) for batch in X]
        if not batches:
            raise EmptyDataError("Inputs: the DataLoader has no batches.")
        x = torch.cat(batches)
    elif isinstance(X, torch.utils.data.Dataset):
        items = [torch.as_tensor(_first(X[i])) for i in range(len(X))]  # type: ignore[arg-type]
        if not items:
            raise EmptyDataError("Inputs: the Dataset has no items.")
        x = torch.stack(items)
    else:
        array = np.asarray(X)
        if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise DTypeError(f"Inputs must be numbers, got an array of {array.dtype}.")
        x = torch.as_tensor(array, dtype=dtype or torch.float32)
    if dtype is not None:
        x = x.to(dtype)
    if x.ndim < 2:
        raise ShapeError(f"Inputs need a batch dimension: expected shape (n, ...), got {tuple(x.shape)}.")
    if x.shape[0] == 0:
        raise EmptyDataError(f"Inputs: no rows, shape {tuple(x.shape)}.")
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise NotFiniteError(f"Inputs contain NaN or infinity, first in row {bad}. Remove or impute such rows.")
    return x.detach() if reference is None else x.detach().to(reference.device)


def _first(item: Any) -> Any:
    return item[0] if isinstance(item, (tuple, list)) else item


# --- the tape --------------------------------------------------------------------------------------------------

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.leaky_relu, torch.nn.functional.leaky_relu_}


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    return (int(value),) * length if isinstance(value, int) else tuple(int(v) for v in value)


def _geometry(weight: Tensor, dims: int, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Convolution:
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
    weight: str
    bias: bool
    x: Tensor
    out: Tensor
    shape: tuple[int, ...]
    convolution: Convolution | None


class _Tape(TorchFunctionMode):
    """Hears linear and convolutional calls, and ReLU calls of plain modules, while a network runs."""

    def __init__(self, names: dict[int, str], clone: bool, stack: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names, self.clone, self.stack = names, clone, stack
        self.calls: list[_Call] = []
        self.relus: list[tuple[str, float, Tensor]] = []
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RELUS and self.stack:  # gated networks tell their gates themselves
            q = args[0] if args else kwargs["input"]
            slope = 0.0
            if "leaky" in func.__name__:
                slope = float(args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
            path, module = self.stack[-1]
            key = path if isinstance(module, (nn.ReLU, nn.LeakyReLU)) else f"{path}.relu" if path else "relu"
            self.relus.append((f"{key}@{self.counts[key]}", slope, (q > 0).detach()))
            self.counts[key] += 1
            return func(*args, **kwargs)
        if func is not F.linear and func not in _CONVOLUTIONS:
            return func(*args, **kwargs)
        bound = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args)) | kwargs
        name = self.names.get(id(bound["weight"]))
        out = func(*args, **kwargs)
        if name is None:  # a weight computed on the fly is no layer of its own
            return out
        if not out.requires_grad:
            out.requires_grad_()
        convolution = None
        if func in _CONVOLUTIONS:
            options = {k: bound[k] for k in ("stride", "padding", "dilation", "groups") if k in bound}
            convolution = _geometry(bound["weight"], _CONVOLUTIONS[func], **options)
        x = bound["input"].detach()
        self.calls.append(_Call(name, bound.get("bias") is not None, x.clone() if self.clone else x, out,
                                tuple(bound["weight"].shape), convolution))
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


def _check_mode(net: nn.Module) -> None:
    for name, m in net.named_modules():
        norm = isinstance(m, nn.modules.batchnorm._BatchNorm)
        drop = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
        if (norm or drop) and m.training:
            what = "batch-norm mixes the rows of a batch" if norm else "dropout is random"
            raise RecordError(f"record: module '{name}' is in train mode, where {what}. Call net.eval() first.")


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


def _take(net: nn.Module, x: Tensor, outputs: Sequence[int] | None, ids: Tensor | None, sensitivities: bool) -> Record:
    """The record of one batch; the caller has checked modes and inputs."""
    state = {k: v.detach() for k, v in net.state_dict(keep_vars=True).items()}
    names = {id(v): k for k, v in state.items() if k in dict(net.named_parameters())}
    gated = isinstance(net, GatedNetwork)
    stack: list[tuple[str, nn.Module]] = []
    tape = _Tape(names, clone=not gated, stack=stack)
    with torch.enable_grad():
        if gated:
            with tape:
                f = torch.func.functional_call(net, state, (x, ids) if ids is not None else (x,))
        else:
            with _module_paths(net, stack), tape:
                f = torch.func.functional_call(net, state, (x,))
        if not isinstance(f, Tensor) or f.shape[0] != x.shape[0] or f.ndim > 2:
            got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise RecordError(f"record: the network must return a tensor of shape (n, c), got {got} for {x.shape[0]} rows.")
        f2 = f if f.ndim == 2 else f[:, None]
        by_weight: dict[str, list[_Call]] = {}
        for call in tape.calls:
            if call.out.shape[0] != x.shape[0]:
                raise RecordError(f"record: layer '{call.weight}' sees {call.out.shape[0]} rows where the batch has "
                                  f"{x.shape[0]}. Rows must stay the first dimension inside the network.")
            by_weight.setdefault(call.weight, []).append(call)
        wanted = list(range(f2.shape[1])) if outputs is None else list(outputs)
        if any(not 0 <= k < f2.shape[1] for k in wanted):
            raise RecordError(f"record: outputs {wanted} asked for, the network has {f2.shape[1]}.")
        last = {k for k, calls in by_weight.items() if len(calls) == 1 and _is_output(calls[0], f)}
        grads = _gradients(f2, tape.calls, wanted) if sensitivities else {}
    layers, layer_inputs, sensitivity = [], {}, {}
    flops = 0
    for weight, calls in by_weight.items():
        name = weight.removesuffix(".weight")
        shape = calls[0].shape
        layer = Layer(name, _part(net, weight), calls[0].bias, int(np.prod(shape[1:])), shape[0],
                      tuple(c.convolution for c in calls), weight in last,
                      net.get_parameter(weight).requires_grad)
        layers.append(layer)
        layer_inputs[name] = [c.x for c in calls]
        flops += sum(2 * c.out[0].numel() * layer.inputs for c in calls)
        if weight not in last and sensitivities and any(id(c) in grads for c in calls):
            sensitivity[name] = torch.cat([_by_position(grads.get(id(c)), c, len(wanted)) for c in calls], dim=2)
    bits, soft, label = _gates_of(net, x, ids, tape)
    used = set(by_weight) | {w.removesuffix("weight") + "bias" for w in by_weight}
    untracked = tuple(k for k, p in net.named_parameters() if k not in used and p.requires_grad)
    kept = () if outputs is None else tuple(wanted)
    return Record(x, f2.detach()[:, wanted], bits, soft, tuple(layers), layer_inputs, sensitivity, label,
                  flops * (1 + len(wanted)), untracked, kept)


def _is_output(call: _Call, f: Tensor) -> bool:
    """Whether the network returns this call's result unchanged."""
    return call.out is f or (call.out.shape == f.shape and call.out.data_ptr() == f.data_ptr()) or (
        f.grad_fn is not None and type(f.grad_fn).__name__ == "CloneBackward0"
        and f.grad_fn.next_functions[0][0] is call.out.grad_fn and call.out.grad_fn is not None
    )


def _gradients(f: Tensor, calls: list[_Call], outputs: list[int]) -> dict[int, list[Tensor | None]]:
    """Per call, the gradient of every wanted output to the call's result; calls that f ignores are left out."""
    found: dict[int, list[Tensor | None]] = {id(c): [] for c in calls}
    outs = [c.out for c in calls]
    for i, k in enumerate(outputs):
        gs = torch.autograd.grad(f[:, k].sum(), outs, retain_graph=i + 1 < len(outputs), allow_unused=True)
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


def _gates_of(net: nn.Module, x: Tensor, ids: Tensor | None, tape: _Tape) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    if not isinstance(net, GatedNetwork):
        bits = {name: b for name, _, b in tape.relus}
        soft = {name: leak(b.to(x.dtype), slope) for name, slope, b in tape.relus if slope}
        return bits, soft, "hard"
    with torch.no_grad():
        scores = net.preactivations(x, ids)
        all_open = isinstance(net.gate, Open)
        bits = {k: torch.ones_like(q, dtype=torch.bool) if all_open else q > 0 for k, q in scores.items()}
        soft = {}
        for site in net.sites:
            if not net.gate.hard or site.slope:
                soft[site.name] = leak(net.gate(scores[site.name]), site.slope)
    return bits, soft, net.gate.label


# --- records ---------------------------------------------------------------------------------------------------


class RecordStream:
    """A row source that computes records when asked: frozen weights and the inputs, nothing else."""

    def __init__(self, net: nn.Module, x: Tensor, probe: Record, ids: Tensor | None, sensitivities: bool) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False)
        self._x, self._ids, self._sensitivities = x, ids, sensitivities
        self.n, self.outputs = int(x.shape[0]), probe.outputs
        self.sites, self.layers = probe.sites, probe.layers
        self.bytes_per_row, self.flops_per_row = probe.bytes_per_row, probe.flops_per_row
        self.gate_label, self.untracked = probe.gate_label, probe.untracked
        for p, original in zip(self._net.parameters(), net.parameters()):
            p.requires_grad_(original.requires_grad)

    def rows(self, lo: int, hi: int, output: int | None = None) -> Record:
        """Compute rows lo…hi; `output` keeps the sensitivities of one output only, which costs less."""
        if not 0 <= lo < hi <= self.n:
            raise RecordError(f"RecordStream: rows {lo}:{hi} asked for, it has {self.n}.")
        ids = None if self._ids is None else self._ids[lo:hi]
        wanted = None if output is None else [output]
        return _take(self._net, self._x[lo:hi], wanted, ids, self._sensitivities)

    def __repr__(self) -> str:
        return (f"RecordStream({self.n} rows × {human_bytes(self.bytes_per_row)}, recomputed when asked: "
                f"{self.flops_per_row:.2e} flops a row, {self.outputs} outputs, {len(self.sites)} gate sites)")


def record(
    net: nn.Module,
    X: Any,
    *,
    rows: Any = None,
    outputs: Sequence[int] | None = None,
    sensitivities: bool = True,
    max_bytes: int | None = None,
    stream: bool | None = None,
) -> Record | RecordStream:
    """Gates, layer inputs and output sensitivities of a network on a batch.

    Parameters
    ----------
    net : GatedNetwork or any nn.Module
        In eval mode if it has batch-norm or dropout.
    X : Tensor, array, Dataset or DataLoader; (n, ...)
    rows : integer tensor, optional
        Example numbers, where gates come from a table.
    outputs : sequence of int, optional
        Sensitivities of these outputs alone.
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

    Examples
    --------
    >>> from pathlens import models
    >>> record(models.dlgn(2, hidden=(4, 4), seed=0), torch.randn(10, 2)).gates("relu1@0").shape
    torch.Size([10, 4])
    """
    x = as_rows(X, net)
    _check_mode(net)
    net = _exact(net)
    ids = None if rows is None else torch.as_tensor(rows, device=x.device)
    if ids is not None and ids.shape != (x.shape[0],):
        raise ShapeError(f"record: rows has shape {tuple(ids.shape)}, expected ({x.shape[0]},).")
    if ids is None and getattr(net, "needs_rows", False):
        ids = torch.arange(x.shape[0], device=x.device)
    probe = _take(net, x[:1], outputs, None if ids is None else ids[:1], sensitivities)
    budget = resolve_budget(max_bytes, x.device)
    total = probe.nbytes * x.shape[0]
    # the backward pass keeps about as much again while it runs
    batch = max(1, min(x.shape[0], budget // max(4 * probe.nbytes, 1)))
    if 4 * probe.nbytes > budget:
        raise BudgetError(f"record: one row needs about {human_bytes(4 * probe.nbytes)}, the budget is {human_bytes(budget)}. "
                          "Raise max_bytes, or ask for fewer outputs.")
    if stream is None:
        stream = total > budget // 2
    if stream:
        return RecordStream(net, x, probe, ids, sensitivities)
    parts = [
        _take(net, x[lo : lo + batch], outputs, None if ids is None else ids[lo : lo + batch], sensitivities)
        for lo in range(0, x.shape[0], batch)
    ]
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _concatenate(parts: list[Record]) -> Record:
    first = parts[0]

    def join(get: Any) -> Any:
        return {k: torch.cat([get(p)[k] for p in parts]) for k in get(first)}

    return Record(
        torch.cat([p.x for p in parts]), torch.cat([p.f for p in parts]), join(lambda p: p.bits), join(lambda p: p.soft),
        first.layers,
        {k: [torch.cat([p.layer_inputs[k][i] for p in parts]) for i in range(len(v))] for k, v in first.layer_inputs.items()},
        join(lambda p: p.sensitivity), first.gate_label, first.flops_per_row, first.untracked, first.kept,
    )  # fmt: skip


def snapshot(net: nn.Module) -> Snapshot:
    """The weights of a network now, as copies.

    >>> from pathlens import models
    >>> snapshot(models.relu(2, hidden=(4,), seed=0))
    Snapshot(relu: 2 tensors, 12 numbers)
    """
    description = net.describe() if isinstance(net, GatedNetwork) else {"kind": type(net).__name__}
    return Snapshot({k: v.detach().clone() for k, v in net.state_dict().items()}, description)


# --- trajectory ------------------------------------------------------------------------------------------------


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

    def append(self, net: nn.Module, X: Any = None, step: int = 0, *, epoch: float | None = None, loss: float | None = None,
               reason: str = "", sensitivities: bool = True) -> Moment:
        """Keep the network's weights, and its record on X where X is given. Batch-norm is recorded in eval mode."""
        taken = None
        if X is not None:
            mode = {m: m.training for m in net.modules()}
            net.eval()
            try:
                made = record(net, X, sensitivities=sensitivities, stream=False)
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
        """Write `trajectory.json` and one pair of files per kept snapshot and record."""
        folder = Path(folder)
        entries = []
        for i, m in enumerate(self.moments):
            if m.snapshot is not None:
                m.snapshot.save(folder / f"snapshot-{i:04d}")
            if m.record is not None:
                m.record.save(folder / f"record-{i:04d}")
            entries.append({"step": m.step, "epoch": m.epoch, "reason": m.reason, "loss": m.loss,
                            "snapshot": m.snapshot is not None, "record": m.record is not None})
        meta = {"format": "pathlens.trajectory", "version": 1, "history": self.history, "moments": entries, "config": self.config}
        write_atomically(folder / "trajectory.json", json.dumps(meta, indent=1).encode())

    @classmethod
    def load(cls, folder: str | Path) -> Trajectory:
        """Read a saved trajectory."""
        folder = Path(folder)
        path = folder / "trajectory.json"
        if not path.exists():
            raise FileFormatError(f"{path}: no such file; it is not a saved trajectory.")
        try:
            meta = json.loads(path.read_bytes())
        except ValueError as e:
            raise FileFormatError(f"{path}: not valid JSON ({e}); it was left untouched.") from e
        if meta.get("format") != "pathlens.trajectory" or meta.get("version") != 1:
            raise FileFormatError(f"{path}: expected pathlens.trajectory version 1, found {meta.get('format')!r} "
                                  f"version {meta.get('version')!r}.")
        moments = [
            Moment(d["step"], d["epoch"], d["reason"], d["loss"],
                   Snapshot.load(folder / f"snapshot-{i:04d}") if d["snapshot"] else None,
                   Record.load(folder / f"record-{i:04d}") if d["record"] else None)
            for i, d in enumerate(meta["moments"])
        ]  # fmt: skip
        return cls(meta["history"], moments, meta["config"])

    def __repr__(self) -> str:
        epochs = max((len(v) for v in self.history.values()), default=1) - 1
        loss = self.history.get("loss")
        return f"Trajectory({epochs} epochs, {len(self.moments)} moments" + (f", loss {loss[-1]:.3g})" if loss else ")")


__all__ = ["Moment", "Record", "RecordStream", "RowSource", "Snapshot", "Trajectory", "as_rows", "record", "snapshot"]
