"""One forward and one backward pass of a batch, turned into a `Record`."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import NotFiniteError, RecordError
from pathlens.models import GatedNetwork, Hard, Open, StraightThrough
from pathlens.models.gates import leak
from pathlens.models.tracing import linear_unit
from pathlens.precision import exact_precision
from pathlens.recording.independence import check_row_independence
from pathlens.recording.inputs import accepting, call_with, check_weights, computes_in, first_reads
from pathlens.recording.tape import Call, Tape, module_paths
from pathlens.records import Layer, Record

_FEW = 32  # rows by which `_joined` compares layers


def check_net(net: nn.Module) -> None:
    """Refuse networks that cannot be recorded, before they run."""
    if not isinstance(net, nn.Module):
        raise RecordError(f"record: expected an nn.Module, got {type(net).__name__}. Give the network first, then X.")
    _check_forward(net)
    for p in net.parameters():
        check_weights(p)
    for name, m in net.named_modules():
        if m is not net and isinstance(m, GatedNetwork):
            raise RecordError(
                f"record: module '{name}' is a GatedNetwork inside another module, which hides its gates. Record that "
                "network, on the inputs that reach it."
            )
        if isinstance(m, torch.jit.ScriptModule):
            raise RecordError(f"record: module '{name}' is compiled by torch.jit, and its calls cannot be recorded.")
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
    check_finite(net)


def check_finite(net: nn.Module) -> None:
    """Refuse a network whose weights, or statistics of a batch-norm, contain NaN or infinity."""
    norms = {
        f"{name}.{key}"
        for name, m in net.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        for key in ("running_mean", "running_var")
    }
    for name, t in (*net.named_parameters(), *((k, b) for k, b in net.named_buffers() if k in norms)):
        # one sum detects NaN and infinity at a tenth of the cost; a sum of huge finite numbers is checked again
        if not t.sum().isfinite() and not t.isfinite().all():
            raise NotFiniteError(
                f"'{name}' of this {type(net).__name__} contains NaN or infinity. If training diverged, load earlier "
                "weights, or train again with a lower lr or clip=1.0."
            )


def _check_forward(net: nn.Module) -> None:
    """Refuse a forward that cannot be called with one tensor."""
    try:
        wanted = inspect.signature(net.forward).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in wanted if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1 or any(p.kind not in positional for p in needed):
        names = ", ".join(p.name for p in needed)
        raise RecordError(
            f"record: the forward of {type(net).__name__} takes {names}; expected one tensor of rows. Wrap it in a "
            "module whose forward takes one tensor and splits it into these."
        )


def exact_gates(net: nn.Module) -> nn.Module:
    """Replace straight-through gates by hard ones: their surrogate gradient must not enter a record."""
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


def _run_on_tape(
    net: nn.Module, x: Tensor, ids: Tensor | None, parameters: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tape]:
    """Run the network on detached copies of its parameters, so that its own get no graph and no gradient.

    Returns a copy of x, the output and the tape. Inputs and outputs of layers are copied only where the network works
    in place.
    """
    seen = x.clone()
    try:
        f, tape = _run(net, seen, ids, clone=False, parameters=parameters)
        if not (tape.unseen or seen._version or any(call.rewritten() for call in tape.calls)):
            return seen, f, tape
    except RecordError:
        raise
    except RuntimeError:  # autograd refuses in-place changes of tensors on the tape; other errors occur again below
        pass
    seen = x.clone()
    return seen, *_run(net, x.clone(), ids, clone=True, parameters=parameters)


def _run(
    net: nn.Module, x: Tensor, ids: Tensor | None, clone: bool, parameters: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tape]:
    parameters = parameters or {k: p.detach() for k, p in net.named_parameters()}
    names = {id(p): k for k, p in parameters.items()}
    stack: list[tuple[str, nn.Module]] = []
    own = {id(p): parameters[k] for k, p in net.named_parameters()}
    gated = isinstance(net, GatedNetwork)
    # a user's forward may write into its buffers
    buffers = {} if gated else {id(b): b.detach().clone() for b in net.buffers()}
    means = {k: b for k, b in net.named_buffers() if k.endswith("running_mean")}
    tape = Tape(names, clone, stack, x, {id(buffers.get(id(b), b)): k for k, b in means.items()})
    if gated:
        with tape:
            return call_with(net, own, (x, ids)), tape
    with module_paths(net, stack), tape:
        return call_with(net, own | buffers, (x,)), tape


def _keeps_rows(net: nn.Module) -> bool:
    """Whether rows are known to stay the first dimension of everything in the network."""
    plain = isinstance(net, nn.Sequential) and all(type(m) in (nn.Linear, nn.ReLU, nn.Conv2d, nn.Identity) for m in net)
    return plain or isinstance(net, GatedNetwork)


@dataclass(frozen=True)
class Recorder:
    """Takes the record of a batch; modes and inputs have been checked.

    Attributes
    ----------
    net : nn.Module
    x : Tensor (n, ...)
    ids : Tensor (n,) or None
        Example numbers, where gates come from a table.
    outputs : sequence of int or None
        Which outputs are recorded; None means all.
    sensitivities : bool
        Whether there is a backward pass.
    """

    net: nn.Module
    x: Tensor
    ids: Tensor | None
    outputs: Sequence[int] | None
    sensitivities: bool

    def rows(self, lo: int, hi: int) -> Recorder:
        """The recorder of some of the rows."""
        return replace(self, x=self.x[lo:hi], ids=None if self.ids is None else self.ids[lo:hi])

    def take(self) -> Record:
        """The record of all rows, with a copy of x."""
        whole = self.take_within(None)
        assert whole is not None
        return whole

    @exact_precision()
    def take_within(self, limit: int | None) -> Record | None:
        """The record, or None if the forward pass shows that it would need more bytes than the limit."""
        net, x, ids, n, one = self.net, self.x, self.ids, len(self.x), None
        if limit is not None and not _keeps_rows(net):
            # one row alone distinguishes rows from other dimensions of equal size, and shows the memory of all rows
            with torch.inference_mode(False), torch.no_grad(), accepting(x, net, "record"):
                one, tape = _run(net, x[:1].clone(), None, clone=False)
                _by_weight(tape, 1)
                count = len(self.outputs) if self.outputs else one.numel() if isinstance(one, Tensor) else 1
                if n * _held(tape, count) > limit:
                    return None
        with torch.inference_mode(False), torch.enable_grad():
            with accepting(x, net, "record"):
                x, f, tape = _run_on_tape(net, x, ids)
            ends = tape.ends_in(f)
            f, f2 = _checked_outputs(net, x, f)
            wanted = list(range(f2.shape[1])) if self.outputs is None else list(self.outputs)
            if not wanted or any(not 0 <= k < f2.shape[1] for k in wanted):
                raise RecordError(f"record: no outputs {wanted}; the network has {f2.shape[1]}, numbered from 0.")
            _drop_unused_relus(tape, f)
            by_weight = _by_weight(tape, n)
            if limit is not None:
                if _held(tape, len(wanted)) > limit:
                    return None
                check_row_independence(net, x, f2.detach(), one)
            last = {k for k, calls in by_weight.items() if len(calls) == 1 and _is_output(calls[0], f)}
            inner = [c for k, calls in by_weight.items() if k not in last for c in calls]
            grads = _gradients(f2, inner, wanted) if self.sensitivities else {}
        trainable = {k: p.requires_grad for k, p in net.named_parameters()}
        biases = _biases(by_weight, tape.other, trainable)
        layers, layer_inputs, sensitivity = [], {}, {}
        flops = 0
        for weight, calls in by_weight.items():
            name, shape = weight.removesuffix(".weight"), calls[0].shape
            size = math.prod(shape[1:])
            added = {c.bias for c in calls}
            layer = Layer(
                name,
                _part(net, weight),
                bias=weight in biases,
                inputs=size,
                outputs=shape[0],
                calls=tuple(c.convolution for c in calls),
                identity=weight in last,
                trainable=trainable[weight],
                parameters=(weight, *(b for b in added if b is not None and len(added) == 1)),
            )
            layers.append(layer)
            layer_inputs[name] = [c.x for c in calls]
            flops += sum(2 * c.out[0].numel() * size for c in calls)
            if any(id(c) in grads for c in calls):
                parts = [_by_position(grads.get(id(c)), c, len(wanted)) for c in calls]
                sensitivity[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        bits, soft, label = _gates_of(net, x, ids, tape)
        tracked = set(by_weight) | set(biases.values())
        return Record(
            x,
            f2.detach()[:, wanted],
            bits,
            soft,
            tuple(layers),
            layer_inputs,
            sensitivity,
            gate_label=label,
            flops_per_row=flops * (1 + (len(wanted) if self.sensitivities else 0)),
            untracked=tuple(k for k, train in trainable.items() if train and k not in tracked),
            kept=() if self.outputs is None else tuple(wanted),
            has_sensitivities=self.sensitivities,
            chain=ends and _is_chain(net, x, ids, f2, tape, bits, soft),
            ungated=tuple(tape.ungated),
            learned_entry=_learned_entry(net, by_weight, tape),
        )


def _checked_outputs(net: nn.Module, x: Tensor, f: Any) -> tuple[Tensor, Tensor]:
    """The outputs for rows x as (n,) or (n, c), and as (n, c); refuses other shapes and NaN."""
    if isinstance(f, Tensor) and f.ndim == 0 and len(x) == 1:  # a network that ends in squeeze()
        f = f.reshape(1)
    if not isinstance(f, Tensor) or f.ndim not in (1, 2) or len(f) != len(x):
        got = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        raise RecordError(
            f"record: the network must return a tensor of shape (n, c), got {got} for inputs of shape "
            f"{tuple(x.shape)}.{first_reads(net)} Wrap it so that it returns its outputs alone, rows first."
        )
    f2 = f if f.ndim == 2 else f[:, None]
    if bool(f2.isnan().any()):
        bad = int(f2.isnan().any(1).nonzero()[0])
        raise NotFiniteError(
            f"record: the network returns NaN for row {bad}: numbers inside it overflow. Scale the inputs, or "
            "compute in float64."
        )
    return f, f2


def _learned_entry(net: nn.Module, by_weight: dict[str, list[Call]], tape: Tape) -> bool:
    """Whether anything of the value network with parameters or running statistics came before its first layer."""
    calls = _value_calls(net, by_weight)
    return bool(calls) and any(_part(net, name) != "gate" for name in tape.acting[: calls[0].before])


def _drop_unused_relus(tape: Tape, f: Tensor) -> None:
    """Drop ReLUs whose result does not enter the output: a twin of the network has no gates there.

    Autograd's graph leads to all others, unless some part of the network runs without it.
    """
    if tape.detached or not any(node for *_, node in tape.relus):
        return
    seen: set[Any] = set()
    waiting = [f.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    tape.relus = [relu for relu in tape.relus if relu[3] is None or relu[3] in seen]


def _held(tape: Tape, outputs: int) -> int:
    """Bytes of a record made from the tape, with the sensitivities of a number of outputs."""
    layers = sum(call.x.nbytes + outputs * call.out.nbytes for call in tape.calls)
    return layers + sum(bits.nbytes for _, _, bits, _ in tape.relus)


def _is_chain(
    net: nn.Module,
    x: Tensor,
    ids: Tensor | None,
    f: Tensor,
    tape: Tape,
    bits: dict[str, Tensor],
    soft: dict[str, Tensor],
) -> bool:
    """Whether every value layer reads exactly gate × (pre-activation of the layer before it), the last for f itself."""
    calls = _value_calls(net, _by_weight(tape, len(x)))
    if not _joined(calls, bits, soft) or calls[-1].out.shape != f.shape:
        return False
    generator = torch.Generator().manual_seed(0)
    if isinstance(net, GatedNetwork):
        # gates that are all open, or all closed, do not show where they act: repeat with random ones
        gates = {site: _positive(bit[:2], generator, f.dtype) for site, bit in bits.items()}
        probe: nn.Module = _ValueNetwork(net.values, list(gates.values()))
        with torch.no_grad():
            x = _positive(net.value_reads(x[:2]), generator)
        ids, bits, soft = None, gates, gates
    else:
        places = [i for i, c in enumerate(tape.calls) if any(c is call for call in calls)]
        if not all(a < tape.relu_after[site] <= b for a, site, b in zip(places, bits, places[1:])):
            return False
        if all(bool(c.x[:_FEW].any(0).all()) for c in calls):
            return True
        # terms that are zero in these rows could be added anywhere: repeat with positive numbers
        probe, x = net, _positive(x[:2], generator) if x.is_floating_point() else x[:2]
    parameters = {k: _positive(p, generator) / max(1, p.shape[1:].numel()) for k, p in probe.named_parameters()}
    with torch.no_grad():
        _, _, tape = _run_on_tape(probe, x, ids, parameters)
        if probe is net:
            tape.relus = [relu for relu in tape.relus if relu[0] in bits]
            bits, soft, _ = _gates_of(net, x, ids, tape)
    return _joined(_value_calls(net, _by_weight(tape, len(x))), bits, soft)


def _positive(t: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Random numbers around one half, in the shape of a tensor."""
    return (0.25 + torch.rand(t.shape, generator=generator) / 2).to(t.device, dtype or t.dtype)


class _ValueNetwork(nn.Module):
    """A value network with given units: gates, or functions of pre-activations."""

    def __init__(self, values: nn.Module, units: Sequence[Any]) -> None:
        super().__init__()
        self.values, self._units = values, units

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x, *self._units)


@torch.inference_mode(False)
def first_map(net: nn.Module, read: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The affine map from the input of the value network to the output of its first layer, in float64.

    Parameters
    ----------
    net : nn.Module
        Its first value layer is dense and called once.
    read : (1, ...)
        One row like those that the value network reads.
    layer : Layer
        That layer.

    Returns
    -------
    matrix : (w, d)
        Derivatives at zero; those of the map everywhere, if it is affine.
    constant : (w,)
    connected : (d,) bool
        Which entries reach the layer for general weights.
    """
    probe, dtype = net, read.dtype
    if isinstance(net, GatedNetwork):
        units = [linear_unit] * len(net.sites)  # the first layer reads nothing that has passed a gate
        probe, dtype = _ValueNetwork(copy.deepcopy(net.values).double(), units), torch.float64
    zeros = torch.zeros(layer.outputs, *read.shape[1:], dtype=dtype, device=read.device)
    name = layer.parameters[0]
    parameters = {k: p.detach() for k, p in probe.named_parameters()}
    positive = parameters | {name: _positive(parameters[name], torch.Generator().manual_seed(0))}
    with torch.enable_grad(), torch.autocast(read.device.type, enabled=False):

        def made(weights: dict[str, Tensor], rows: int) -> tuple[Tensor, Tensor]:
            leaf = zeros[:rows].clone().requires_grad_()
            out = _run(probe, leaf.clone(), None, clone=True, parameters=weights)[1].calls[0].out
            # rows do not mix: the derivative of the k-th entry of the k-th row
            (slopes,) = torch.autograd.grad(out.diagonal().sum(), leaf, allow_unused=True)
            slopes = torch.zeros_like(leaf) if slopes is None else slopes
            return slopes.flatten(1).double(), out[0].detach().double()

        matrix, constant = made(parameters, layer.outputs)
        connected = made(positive, 1)[0][0] != 0
    return matrix, constant, connected


def _value_calls(net: nn.Module, by_weight: dict[str, list[Call]]) -> list[Call]:
    return [c for weight, calls in by_weight.items() if _part(net, weight) != "gate" for c in calls]


def _joined(calls: list[Call], bits: dict[str, Tensor], soft: dict[str, Tensor]) -> bool:
    """Whether calls and gate sites alternate, judged by the first rows."""
    if len(calls) != len(bits) + 1 or not calls or any(c.convolution is not None or c.x.ndim != 2 for c in calls):
        return False
    for before, after, (site, bit) in zip(calls, calls[1:], bits.items()):
        if not bit.shape == before.out.shape == after.x.shape:
            return False
        passed, read = before.out.detach()[:_FEW] * soft.get(site, bit)[:_FEW], after.x[:_FEW]
        # the network may have rounded the product differently (leaky units), by a few units in the last place
        rtol = 16 * torch.finfo(read.dtype).eps
        if not torch.equal(passed, read) and not torch.allclose(passed, read, rtol=rtol, atol=0.0):
            return False
    return True


def _by_weight(tape: Tape, n: int) -> dict[str, list[Call]]:
    """Calls by weight, without weights that are also used in other ways."""
    found: dict[str, list[Call]] = {}
    for call in tape.calls:
        if call.out.shape[0] != n:
            raise RecordError(
                f"record: layer '{call.weight}' sees {call.out.shape[0]} rows where the batch has {n}. Rows must stay "
                "the first dimension inside the network."
            )
        if call.weight not in tape.other:
            found.setdefault(call.weight, []).append(call)
    return found


def _biases(by_weight: dict[str, list[Call]], other: set[str], trainable: dict[str, bool]) -> dict[str, str]:
    """Weight → bias, where Σ_p D_p of that layer is the whole gradient of that bias.

    Excluded are biases that some calls do not use, that other layers share, or whose weight alone is frozen.
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


def _is_output(call: Call, f: Tensor) -> bool:
    """Whether the network returns this call's result unchanged: itself, or the clone that the tape returned."""
    if call.out is f:
        return True
    node = f.grad_fn
    if call.out.shape != f.shape or node is None or type(node).__name__ != "CloneBackward0":
        return False
    before = node.next_functions[0][0]
    if call.out.grad_fn is None:  # a leaf: the first layer
        return getattr(before, "variable", None) is call.out
    return before is call.out.grad_fn


def _gradients(f: Tensor, calls: list[Call], outputs: list[int]) -> dict[int, list[Tensor | None]]:
    """Per call, the gradient of every wanted output to the call's result, for calls that f depends on."""
    if not calls or not f.requires_grad:
        return {}
    found: dict[int, list[Tensor | None]] = {id(c): [] for c in calls}
    outs = [c.out for c in calls]
    for i, k in enumerate(outputs):
        try:
            one = torch.zeros_like(f)
            one[:, k] = 1.0
            gs = torch.autograd.grad(f, outs, one, retain_graph=i + 1 < len(outputs), allow_unused=True)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise RecordError(
                f"record: the network cannot be differentiated ({e}). If the gates are enough, pass "
                "sensitivities=False."
            ) from e
        for c, g in zip(calls, gs):
            found[id(c)].append(g)
    return {k: v for k, v in found.items() if any(g is not None for g in v)}


def _by_position(grads: list[Tensor | None] | None, call: Call, count: int) -> Tensor:
    """Stack gradients to (n, c, P, m); those of a convolution keep their memory layout, positions last."""
    full = [torch.zeros_like(call.out) if g is None else g.detach() for g in (grads or [None] * count)]
    if call.convolution is None:
        full = [g.reshape(len(g), -1, g.shape[-1]) for g in full]
    else:
        full = [g.flatten(2) for g in full]
    stacked = full[0].unsqueeze(1).contiguous() if count == 1 else torch.stack(full, dim=1)
    return stacked if call.convolution is None else stacked.transpose(2, 3)


def _gates_of(
    net: nn.Module, x: Tensor, ids: Tensor | None, tape: Tape
) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    if not isinstance(net, GatedNetwork):
        bits = {name: b for name, _, b, _ in tape.relus}
        soft = {name: leak(b.to(computes_in(net, x)), slope) for name, slope, b, _ in tape.relus if slope}
        return bits, soft, "hard, leaky" if soft else "hard"
    with torch.no_grad():
        scores = net.preactivations(x, ids)
        all_open = isinstance(net.gate, Open)
        bits = {k: torch.ones_like(q, dtype=torch.bool) if all_open else q > 0 for k, q in scores.items()}
        soft = {}
        for site in net.sites:
            if not net.gate.hard or site.slope:
                soft[site.name] = leak(net.gate(scores[site.name]), site.slope)
    return bits, soft, net.gate_label
