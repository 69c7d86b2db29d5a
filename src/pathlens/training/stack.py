"""Many networks of one architecture as one: stacked weights, one gradient step for all.

A single network is a stack of one. The forward pass is `torch.func.vmap` over `functional_call`; the whole gradient
step is captured once as a flat list of tensor operations and replayed, which removes most of the dispatch cost that
dominates small networks. Convolutions on a GPU are faster one member at a time, in parallel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Number
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from pathlens.errors import OptionError, ShapeError, unknown_name
from pathlens.models import Gate, GatedNetwork

Loss = Callable[[Tensor, Tensor], Tensor]
Penalty = Callable[[nn.Module], Tensor]

_DROPOUTS = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


def tensor_bytes(t: Tensor) -> bytes:
    """The numbers of a tensor as bytes."""
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class _DropoutFromDraws(TorchFunctionMode):
    """Dropout whose uniform numbers are given, so that each network of a stack has its own generator.

    Without draws it drops nothing and records the shapes of the numbers that it would have needed.
    """

    def __init__(self, draws: Sequence[Tensor] | None) -> None:
        super().__init__()
        self.draws = None if draws is None else list(draws)
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            if getattr(func, "__name__", "") in ("alpha_dropout", "feature_alpha_dropout"):
                raise OptionError(f"train: {func.__name__} is not supported. Use nn.Dropout.")
            return func(*args, **kwargs)
        x, p, training, _ = (list(args) + [0.5, True, False][len(args) - 1 :])[:4]
        p, training = kwargs.get("p", p), kwargs.get("training", training)
        if not training or p == 0:
            return x
        kept_dims = x.ndim if func is F.dropout else 2
        shape = tuple(x.shape[:kept_dims]) + (1,) * (x.ndim - kept_dims)
        if self.draws is None:
            self.shapes.append(shape)
            return x
        draw = self.draws[len(self.shapes)]
        self.shapes.append(shape)
        return x * (draw >= p).to(x.dtype) / ((1 - p) or 1.0)  # with p = 1 nothing is left to enlarge


def weighted_mean(loss: Loss, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Mean over rows of w_i ℓ_i, with ℓ_i the loss of row i alone.

    Weights have mean one over all of the data. Dividing by their sum in each batch would raise the weights of batches
    with few of the heavy rows: if one row in a hundred has half of all weight, most steps would ignore it.
    """
    rows = vmap(lambda o, t: loss(o[None], t[None]))(output, target)
    return (weights * rows).mean()


class _Penalised(nn.Module):
    """Lets `functional_call` put a member's weights into the network while its penalty is taken."""

    def __init__(self, net: nn.Module, penalty: Penalty) -> None:
        super().__init__()
        self.net, self.penalty = net, penalty

    def forward(self) -> Tensor:
        return self.penalty(self.net)


class Stack:
    """k networks of one architecture, their weights stacked.

    Attributes
    ----------
    flat : Tensor (k, p)
        The trained weights of every member, one row each; the optimizer changes it.
    rest : dict name → Tensor (k, ...)
        Frozen parameters and buffers.
    buffers : dict name → Tensor (k, ...)
        The buffers alone.
    """

    def __init__(self, members: Sequence[nn.Module], device: torch.device, trained: str | None = None) -> None:
        first = members[0]
        self.k = len(members)
        self.device = device
        common = _structure(first, trained is None)
        for i, m in enumerate(members):
            if _structure(m, trained is None) != common:
                raise ShapeError(
                    f"train: network {i} differs from network 0 in its architecture, its gate function or its trained "
                    "parts. Only networks that differ in nothing but their parameters and buffers can be trained "
                    "together; train the others one by one."
                )
        self.pattern = copy.deepcopy(first).to(device)
        names = trained_names(trained, first)
        if trained is not None:
            for _, part in gated_parts(self.pattern):
                part.trained = trained  # frozen gates keep their batch statistics
        if not names:
            raise OptionError("train: the network has no trainable parameters.")
        for p in self.pattern.parameters():
            p.requires_grad_(False)
        parameters = [dict(m.named_parameters()) for m in members]
        buffers = [dict(m.named_buffers()) for m in members]  # also those that are not in the state of a module
        self.names, self.shapes = names, [parameters[0][n].shape for n in names]
        self.sizes = [s.numel() for s in self.shapes]
        self.flat = torch.stack([torch.cat([p[n].detach().reshape(-1) for n in names]) for p in parameters]).to(device)
        fixed = [n for n in parameters[0] if n not in set(names)]
        self.rest = {n: torch.stack([p[n].detach() for p in parameters]).to(device) for n in fixed}
        self.buffers = {n: torch.stack([b[n] for b in buffers]).to(device) for n in buffers[0]}
        self.rest |= self.buffers
        self.needs_rows = bool(getattr(first, "needs_rows", False))
        self._edits_rows: bool | None = None  # not known yet

    # --- weights in and out ------------------------------------------------------------------------------------

    def rest_of(self, i: int) -> list[Tensor]:
        """Frozen parameters and buffers of member i (views)."""
        return [t[i] for t in self.rest.values()]

    def write(self, i: int, net: nn.Module) -> None:
        """Copy member i's weights into a network."""
        state = {n: t.detach().clone() for n, t in self._named(self.flat[i], self.rest_of(i)).items()}
        net.load_state_dict(
            state, strict=False
        )  # a tied weight is in the state under each of its names, here under one
        for name, buffer in net.named_buffers():  # also those that are not in the state of a module
            buffer.copy_(state[name])

    def tensors(self) -> dict[str, Tensor]:
        """All weights and buffers of the stack by name (not copied)."""
        return {"flat": self.flat} | {f"rest/{n}": t for n, t in self.rest.items()}

    def set_buffer(self, suffix: str, value: float) -> None:
        """Set a scalar buffer (β) of every member; the buffer keeps its place in memory."""
        found = [n for n in self.buffers if n.split(".")[-1] == suffix]
        if not found:
            raise OptionError(
                f"train: a schedule for {suffix} was given, but the network has no {suffix}: its gates are not soft."
            )
        for n in found:
            self.buffers[n].fill_(value)

    # --- computing ---------------------------------------------------------------------------------------------

    def _named(self, vec: Tensor, rest: Sequence[Tensor]) -> dict[str, Tensor]:
        params = {n: p.view(s) for n, p, s in zip(self.names, vec.split(self.sizes), self.shapes)}
        return params | dict(zip(self.rest, rest))

    def _forward(self, vec: Tensor, x: Tensor, rows: Tensor | None, rest: Sequence[Tensor]) -> Tensor:
        return functional_call(self.pattern, self._named(vec, rest), (x,) if rows is None else (x, rows))

    def _penalty(self, penalty: Penalty, vec: Tensor, rest: Sequence[Tensor]) -> Tensor:
        state = {f"net.{n}": t for n, t in self._named(vec, rest).items()}
        value = functional_call(_Penalised(self.pattern, penalty), state, ())
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"train: penalty must return one number as a tensor of shape (), got {got}.")
        return value

    def first_outputs(self, x: Tensor, rows: Tensor | None = None, *, training: bool = False) -> Tensor:
        """The outputs of the first member, without gradient; no buffer changes."""
        self.pattern.train(training)
        with torch.no_grad():
            out = self._forward(self.flat[0], x, rows, [t.clone() for t in self.rest_of(0)])
        self.pattern.train()
        return out

    def flops(self, x: Tensor) -> int:
        """About the floating-point operations of one gradient step of all members on a batch of this shape."""
        from torch.utils.flop_counter import FlopCounterMode  # loads Triton if it is installed

        rows = torch.zeros(1, dtype=torch.long, device=self.device) if self.needs_rows else None
        with FlopCounterMode(display=False) as counter:
            self.first_outputs(x[:1].clone(), rows)
        return 3 * self.k * len(x) * counter.get_total_flops()

    def dropout_shapes(self, x: Tensor, rows: Tensor | None) -> list[tuple[int, ...]]:
        """Shapes of the random numbers that one forward pass of one member needs."""
        with _DropoutFromDraws(None) as mode:
            self.first_outputs(x[0].clone(), None if rows is None else rows[0], training=True)
        return mode.shapes

    def gradient_function(
        self, loss: Loss, autocast: torch.dtype | None, penalty: Penalty | None = None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """step(weights, x, y, w, rows, draws, *rest) → (losses, gradients), in train mode.

        With the weights (k, p) of all members: losses (k,) and gradients (k, p). With the weights (p,), rows and
        buffers of one member: its loss and its gradient (p,). The gradient is that of loss + penalty, the loss is
        without the penalty. `w` are weights of the rows, or None.
        """

        def member(vec: Tensor, x: Tensor, y: Tensor, w: Any, rows: Any, draws: Any, *rest: Tensor) -> list[Tensor]:
            dropout = _DropoutFromDraws(draws) if draws else nullcontext()
            with torch.autocast(self.device.type, autocast, enabled=autocast is not None), dropout:
                out = self._forward(vec, x, rows, rest)
            out = out.float() if autocast is not None else out
            value = loss(out, y) if w is None else weighted_mean(loss, out, y, w)
            return [value, value if penalty is None else value + self._penalty(penalty, vec, rest)]

        def step(weights: Tensor, *batch: Any) -> tuple[Tensor, Tensor]:
            # there may be no w, rows or draws
            dims = (0, *(0 if isinstance(t, Tensor) or t else None for t in batch))
            with torch.enable_grad():
                leaf = weights.detach().requires_grad_()
                value, total = (vmap(member, in_dims=dims) if leaf.ndim == 2 else member)(leaf, *batch)
                (gradient,) = torch.autograd.grad(total.sum(), leaf)
            return value.detach(), gradient

        return step

    def _edits(self, x: Tensor, rows: Tensor | None) -> bool:
        """Whether a forward pass in eval mode changes its input in place, as `x /= 255` does.

        Tested on a copy of one row: to copy all rows costs up to twice the evaluation of a small network.
        """
        if self._edits_rows is None:
            first = x[:1].clone()
            version = first._version
            self.first_outputs(first, None if rows is None else rows[:1])
            self._edits_rows = first._version != version
        return self._edits_rows

    def evaluate(
        self, x: Tensor, y: Tensor, loss: Loss, ids: Tensor | None, batch: int, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(Weighted) mean loss of each member on all rows in eval mode, and accuracy if y holds labels.

        Labels are integers, one for each row, and there is an output for each class: one output has no largest.
        """
        labels = not y.dtype.is_floating_point and y.ndim == 1
        total = torch.zeros(self.k, dtype=torch.float64)
        correct = torch.zeros(self.k, dtype=torch.float64)
        edits = self._edits(x, ids)
        self.pattern.eval()
        with torch.no_grad():
            for lo in range(0, len(x), batch):
                xb, yb = x[lo : lo + batch], y[lo : lo + batch].clone()  # a loss may change its targets
                rows = None if ids is None else ids[lo : lo + batch]
                if x.is_cuda and x.ndim == 4:  # convolutions of one network are faster than grouped ones
                    xb = xb.contiguous(memory_format=torch.channels_last)
                    out = torch.stack(
                        [
                            self._forward(self.flat[i], xb.clone() if edits else xb, rows, self.rest_of(i))
                            for i in range(self.k)
                        ]
                    )
                else:
                    if edits:
                        xb = xb.expand(self.k, *xb.shape).clone()
                    dims = (0, 0 if edits else None, None, 0)
                    out = vmap(self._forward, in_dims=dims)(self.flat, xb, rows, list(self.rest.values()))
                w = None if weights is None else weights[lo : lo + batch]
                mean = loss if w is None else partial(weighted_mean, loss, weights=w)
                total += vmap(mean, in_dims=(0, None))(out, yb).double().cpu() * len(yb)
                labels = labels and out.shape[-1] > 1
                if labels:
                    right = (out.argmax(-1) == y[lo : lo + batch]).double()
                    correct += (right if w is None else right * w).sum(-1).cpu()
        self.pattern.train()
        return total / len(x), correct / len(x) if labels else None


def _structure(net: nn.Module, flags: bool) -> list[Any]:
    """Everything but the numbers (and β) of a network: the members of a stack must have it in common."""
    found: list[Any] = [(n, p.shape, flags and p.requires_grad) for n, p in net.named_parameters()]
    found += [(n, b.shape) for n, b in net.named_buffers()]
    for name, m in net.named_modules():
        code = m.code if isinstance(m, fx.GraphModule) else "" if isinstance(m, Gate) else m.extra_repr()
        own: Any = [_plain(getattr(m, key, None)) for key in ("value_input", "activation_name", "_scaled", "function")]
        if type(m).__module__.partition(".")[0] != "pathlens":  # attributes that other modules compute with
            seen = {k: v for k, v in vars(m).items() if not k.startswith("_") or isinstance(v, Tensor)}
            own = {k: _plain(v) for k, v in seen.items() if k != "training"}
        found.append((name, type(m).__name__, code, getattr(m, "sites", None), own))
    return found


def _plain(value: Any) -> Any:
    """An attribute of a module as a value that is equal for copies, and different if they compute differently."""
    if isinstance(value, (Tensor, np.ndarray)):
        array = torch.as_tensor(value)
        return array.shape, array.dtype, tensor_bytes(array)
    if isinstance(value, FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        known = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *inside]
        return value.__code__, [type(v) if isinstance(v, FunctionType) else _plain(v) for v in known]
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (str, bytes, Number, torch.dtype, type(None))):
        return value
    return type(value)


def gated_parts(net: nn.Module) -> list[tuple[str, GatedNetwork]]:
    """The gated networks in a module, itself included, with the prefix of their parameters' names."""
    return [(f"{name}." if name else "", m) for name, m in net.named_modules() if isinstance(m, GatedNetwork)]


def trained_names(part: str | None, net: nn.Module) -> list[str]:
    """Names of the parameters that are trained: of the values, the gates or both, or those it was built to train."""
    if part is None:
        return [n for n, p in net.named_parameters() if p.requires_grad]
    found = gated_parts(net)
    if not found:
        raise OptionError(f"train: trained={part!r} needs a GatedNetwork, got {type(net).__name__}.")
    prefixes = {"values": ("values.",), "gates": ("source.",), "both": ("values.", "source.")}
    if part not in prefixes:
        raise unknown_name("choice of what is trained", part, prefixes)
    for _, gated in found:
        if part == "gates" and (gated.source is None or not hasattr(gated.gate, "beta")):
            raise OptionError(
                "train: trained='gates' needs a separate gate network whose gates have a gradient, this network is "
                f"{gated!r}. Use net.with_gate('soft') or net.with_gate('straight_through')."
            )
    wanted = tuple(start + prefix for start, _ in found for prefix in prefixes[part])
    return [n for n, _ in net.named_parameters() if n.startswith(wanted)]


_SAME_IF_SAME_SHAPE = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.detach.default,
}


# they change running statistics, which their schemas do not say: a batch-norm that nobody reads would be dropped
_KEEP_STATISTICS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}


def capture(step: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The step as a flat list of tensor operations for these shapes: the same numbers, without their dispatch.

    Views that change nothing are dropped. Nothing is executed but one trace; buffers that the step changes in place
    are restored.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # loads Triton if it is installed

    saved = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    with torch.no_grad():
        traced = make_fx(step)(*arguments)
        for a, s in zip(arguments, saved):
            if isinstance(a, Tensor):
                a.copy_(s)
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target in _SAME_IF_SAME_SHAPE:
            source = node.args[0]
            before, after = source.meta.get("val"), node.meta.get("val")
            if before is not None and after is not None and before.shape == after.shape:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in _KEEP_STATISTICS)
    graph.set_codegen(torch.fx.graph.CodeGen())  # plain arguments instead of nested ones: less work per call
    traced.recompile()
    forward = traced.forward

    def replay(*arguments: Any) -> Any:
        return forward(*arguments[:5], *arguments[5], *arguments[6:])  # the sixth are the draws, a list

    return replay
