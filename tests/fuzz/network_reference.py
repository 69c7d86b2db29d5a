"""What a gated network computes, by running the user's own module and replacing single calls while it runs.

Nothing is traced and no graph is built: views, in-place changes and modules that are called twice behave as torch makes
them. Shares no code with Pathlens.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RELUS = ("relu", "relu_", "leaky_relu", "leaky_relu_")
Unit = Callable[[int, Tensor, float], Tensor]


class Undefined(Exception):
    """The quantity has no definition for this network: Pathlens must refuse it."""


class Unknown(Exception):
    """It may have one, but this reference does not compute it."""


class Data(Tensor):
    """A tensor that depends on the input: everything computed from one is one."""


class Moved(Data):
    """One that has passed a gate or a weight, or was computed from such a one."""


class Calls(TorchFunctionMode):
    """Hands every ReLU call to `unit(number of the call, q, slope)`; with `average`, max-pools are average-pools."""

    def __init__(self, unit: Unit | None = None, average: bool = False) -> None:
        super().__init__()
        self.unit, self.average, self.calls = unit, average, 0
        self.why: Exception | None = None  # the first reason why some tensor has no answer

    def without(self, why: Exception, made: Tensor) -> Tensor:
        """NaN in place of a tensor that has no answer; it matters only where the output depends on it."""
        self.why = self.why or why
        return made * torch.nan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _RELUS and self.unit is not None:
            q = args[0] if args else kwargs["input"]
            slope = 0.0
            if "leaky" in name:
                slope = float(args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
            rest = args[1:] if "leaky" not in name else args[2:]
            in_place = name.endswith("_") or bool(kwargs.get("inplace", rest[0] if rest else False))
            number, self.calls = self.calls, self.calls + 1
            made = self.unit(number, q.clone() if in_place else q, slope)
            if in_place and isinstance(made, Data):
                q.__class__ = type(made)
            return q.copy_(made) if in_place else made
        if self.average and "max_pool" in name:
            return self._average(name, args, kwargs)
        return self.other(name, func, args, kwargs)

    def _average(self, name: str, args: Any, kwargs: Any) -> Any:
        pool = getattr(F, name.replace("max", "avg"))
        kept = ("kernel_size", "stride", "padding", "ceil_mode", "output_size")
        return self.other(pool.__name__, pool, args, {k: v for k, v in kwargs.items() if k in kept})

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def rows_of(f: Tensor) -> Tensor:
    """Outputs as (n, c)."""
    return f if f.ndim == 2 else f[:, None]


def run(net: nn.Module, x: Tensor, mode: Calls) -> Tensor:
    """The network on a copy of x."""
    with mode:
        f = rows_of(net(x.clone()))
    if mode.why is not None and bool(f.isnan().any()):
        raise mode.why
    return f


def leaky(q: Tensor, slope: float) -> Tensor:
    return torch.where(q > 0, q, slope * q)


# --- a gated network ---------------------------------------------------------------------------------------------


class Reference:
    """A network that is known by the user's module and by what stands at its ReLUs.

    Parameters
    ----------
    template : nn.Module
        In eval mode.
    values, gates : mapping of weights by the template's names
        Of the value network and, where gates have one of their own, of the gate network.
    source : {"self", "none", "linear", "relu", "soft"}
        What the gates read: the unit itself, nothing, or a network with these hidden units.
    soft : (β, ε) or None
        None for hard gates.
    """

    def __init__(
        self,
        template: nn.Module,
        values: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
        source: str = "self",
        soft: tuple[float, float] | None = None,
        ones: bool = False,
        average: bool = False,
    ) -> None:
        self.values = _loaded(template, values or {})
        self.gates = _loaded(template, gates) if gates is not None else None
        self.source, self.soft, self.ones, self.average = source, soft, ones, average

    def gate(self, q: Tensor, slope: float) -> Tensor:
        """The network's own gate value."""
        if self.source == "none":
            g = torch.ones_like(q)
        elif self.soft is None:
            g = (q > 0).to(q.dtype)
        else:
            g = (1 + self.soft[1]) * torch.sigmoid(self.soft[0] * q)
        return slope + (1 - slope) * g

    def used(self, x: Tensor) -> list[int]:
        """The ReLU calls that the output depends on, by their number."""
        marks: list[Tensor] = []

        def unit(i: int, q: Tensor, slope: float) -> Tensor:
            marks.append(torch.zeros((), dtype=q.dtype, requires_grad=True))
            return leaky(q, slope) + marks[-1]

        f = run(self.values, x[:1], Calls(unit, self.average))
        found = torch.autograd.grad(f.sum(), marks, allow_unused=True) if f.requires_grad and marks else []
        return [i for i, g in enumerate(found) if g is not None]

    def scores(self, x: Tensor) -> tuple[list[Tensor], list[float]]:
        """What every gate reads, for all ReLU calls in order, and their slopes."""
        heard: list[Tensor] = []
        slopes: list[float] = []

        def unit(i: int, q: Tensor, slope: float) -> Tensor:
            heard.append(q.clone())
            slopes.append(slope)
            if self.source == "linear":
                return q.clone()
            if self.source == "relu":
                return leaky(q, slope)
            return q * self.gate(q, slope)

        run(self.values if self.gates is None else self.gates, x, Calls(unit, self.average))
        return heard, slopes

    def read(self, x: Tensor) -> Tensor:
        return torch.ones_like(x) if self.ones else x

    def output(self, x: Tensor) -> Tensor:
        """f(x), (n, c)."""
        heard, slopes = self.scores(x)
        return self.at_gates(self.read(x), [self.gate(q, s) for q, s in zip(heard, slopes)])

    def at_gates(self, x: Tensor, gates: list[Tensor]) -> Tensor:
        """The value network with given gates."""
        return run(self.values, x, Calls(lambda i, q, slope: q * gates[i], self.average))

    def bits(self, x: Tensor) -> list[Tensor]:
        """Hard gates of all ReLU calls."""
        heard, _ = self.scores(x)
        return [torch.ones_like(q, dtype=torch.bool) if self.source == "none" else q > 0 for q in heard]

    def margin(self, x: Tensor) -> float:
        """The smallest |q| that is not zero: below rounding, gates are a matter of the order of additions."""
        with torch.no_grad():
            sizes = [q.abs()[q != 0] for q in self.scores(x)[0]]
        return min((float(s.min()) for s in sizes if s.numel()), default=1.0)


def _loaded(template: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the template with some of its weights and buffers replaced."""
    net = copy.deepcopy(template).eval()
    for p in net.parameters():
        p.requires_grad_(True)
    own = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in weights.items():
            if name not in own and "tensor_constant" in name:
                continue  # a tensor that forward makes
            own[name].copy_(value)
    return net


# --- numbers of paths ----------------------------------------------------------------------------------------------

_SUMS = {"add": 1, "sub": 1, "rsub": 1, "subtract": 1}
_SCALES = {"mul", "div", "true_divide", "neg", "multiply", "truediv", "rdiv", "rtruediv"}


def _plain(name: str) -> tuple[str, bool]:
    """Name of an operation without underscores, and whether it works in place."""
    return name.strip("_"), name.endswith("_") and not name.endswith("__")


class Counting(Calls):
    """Every connection counts one: weights and scales are 1, biases 0, means and differences sums."""

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        base, in_place = _plain(name)
        data = [a for a in args if isinstance(a, Data)]
        if "max_pool" in base:
            return self.without(Undefined("max-pooling"), func(*args, **kwargs))
        if not any(isinstance(t, Data) for t in _flat((args, kwargs))):
            return func(*args, **kwargs)
        if base in _SUMS:
            if len(data) == 1:
                return data[0] if in_place else data[0].clone()
            return args[0].add_(args[1]) if in_place else args[0] + args[1]
        if base in _SCALES:
            if len(data) > 1:
                return self.without(Undefined("a product of two tensors that depend on the input"), data[0])
            return data[0] if in_place else data[0].clone()
        if base == "batch_norm":
            return args[0].clone(memory_format=torch.contiguous_format)  # as batch-norm makes it
        if base == "linear" or base.startswith("conv"):
            given = {"bias": None, **dict(zip(("input", "weight", "bias"), args)), **kwargs}
            given = given | {"weight": torch.ones_like(given["weight"]), "bias": None}
            return func(given.pop("input"), given.pop("weight"), given.pop("bias"), *args[3:], **given)
        if base in ("matmul", "einsum", "mm", "bmm"):
            return func(*(torch.ones_like(a) if isinstance(a, Tensor) and not isinstance(a, Data) else a for a in args))
        if base == "mean":
            return args[0].sum(*args[1:], **kwargs)
        if base.startswith("avg_pool"):
            size = args[1] if len(args) > 1 else kwargs["kernel_size"]
            sizes = (size,) if isinstance(size, int) else tuple(size)
            dims = int(base[-2])
            return func(*args, **kwargs) * float(math.prod(sizes * dims if len(sizes) == 1 else sizes))
        if base.startswith("adaptive_avg_pool"):
            made = func(*args, **kwargs)
            for axis in range(2, made.ndim):
                read, out = args[0].shape[axis], made.shape[axis]
                width = [math.ceil((i + 1) * read / out) - i * read // out for i in range(out)]
                made = made * torch.tensor(width, dtype=made.dtype).reshape(-1, *[1] * (made.ndim - axis - 1))
            return made
        if base == "pad" and kwargs.get("value"):
            kwargs["value"] = 0.0
        return func(*args, **kwargs)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flat(v)]
    return [value]


def _run_counts(ref: Reference, x: Tensor, unit: Unit) -> Tensor:
    with torch.no_grad():
        f = run(ref.values, x.as_subclass(Data), Counting(unit, ref.average))  # type: ignore[type-var]
    return f.as_subclass(Tensor).round()


def count_paths(ref: Reference, x: Tensor, bits: list[Tensor], include_inputs: bool) -> Tensor:
    """Active paths to every output, (n, c): walks that begin at an input, or at a unit that an input reaches."""
    gates = [b.double() for b in bits]
    if include_inputs:
        return _run_counts(ref, torch.ones_like(x), lambda i, q, slope: q * gates[i])
    reached: list[Tensor] = []

    def closed(i: int, q: Tensor, slope: float) -> Tensor:
        reached.append((q > 0).double().as_subclass(Tensor).clone())
        return q * 0

    _run_counts(ref, torch.ones_like(x), closed)
    return _run_counts(ref, torch.zeros_like(x), lambda i, q, slope: (q + reached[i]) * gates[i])


def shared_paths(ref: Reference, left: Tensor, right: Tensor, include_inputs: bool) -> Tensor:
    """Paths that are active for both of two rows, the mean over outputs: (n, m)."""
    n, m = len(left), len(right)
    first, second = torch.arange(n).repeat_interleave(m), torch.arange(m).repeat(n)
    both = [a[first] & b[second] for a, b in zip(ref.bits(left), ref.bits(right))]
    return count_paths(ref, left[first], both, include_inputs).mean(1).reshape(n, m)


# --- the neural path kernel ------------------------------------------------------------------------------------------


def _inner(x: Tensor, weight: Tensor) -> Tensor:
    """A product that is part of a call that was counted."""
    return F.linear(x, weight)


def _weighs(name: str) -> bool:
    return name in ("linear", "batch_norm", "matmul", "einsum") or bool(re.fullmatch(r"conv\dd", name))


class _Weights(Calls):
    """Adds a mark to what every layer with weights makes."""

    def __init__(self, average: bool) -> None:
        super().__init__(lambda i, q, slope: q.clone(), average)
        self.marks: list[Tensor] = []

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if not _weighs(_plain(name)[0]):
            return func(*args, **kwargs)
        self.marks.append(torch.zeros((), dtype=torch.float64, requires_grad=True))
        return func(*args, **kwargs) + self.marks[-1]


def _weight_calls(ref: Reference, x: Tensor) -> set[int]:
    """Layer calls that the output depends on, by their number."""
    mode = _Weights(ref.average)
    f = run(ref.values, x[:1], mode)
    found = torch.autograd.grad(f.sum(), mode.marks, allow_unused=True) if mode.marks and f.requires_grad else ()
    return {i for i, g in enumerate(found) if g is not None}


class _Fields(Calls):
    """Tensors as sums Σ_b φ(b)·w_b over products of weights, known by the inner products of their φ.

    Rows are (feature, example). A layer makes features that no other tensor has: of each, the square root of its
    Gram matrix. A first pass with `features` None finds how many there are. The input is feature 0, and so is what
    fixed operations make of it, constants included; behind a weight or a gate, constants are biases and start no path.
    """

    def __init__(self, unit: Unit, average: bool, n: int, features: int | None, layers: set[int]) -> None:
        super().__init__(unit, average)
        self.n, self.features, self.next = n, features, 1
        self.layers, self.layer, self.weights = layers, -1, set()

    def _block(self, weight: Tensor, made: Tensor, gram: Callable[[], Tensor]) -> Tensor:
        """New features for each channel: `gram()` is (channels, n·positions, n·positions)."""
        if self._used(weight):
            return self.without(Undefined("a weight that is used twice"), made)
        channels, positions = made.shape[1], math.prod(made.shape[2:])
        size = channels * self.n * positions
        at, self.next = self.next, self.next + size
        if self.features is None:
            return torch.zeros_like(made)
        product = gram()
        if bool(product.isnan().any()):
            return made * torch.nan
        values, vectors = torch.linalg.eigh(product)
        roots = vectors * values.clamp(min=0).sqrt()[:, None, :]  # (C, n·P, rank)
        out = torch.zeros(self.features, self.n, channels, positions, dtype=made.dtype)
        for c in range(channels):
            rows = slice(at + c * self.n * positions, at + (c + 1) * self.n * positions)
            out[rows, :, c] = roots[c].T.reshape(-1, self.n, positions)
        return out.reshape(made.shape)

    def _gram(self, read: Tensor) -> Tensor:
        """Inner products over features and `read`'s second axis: (rows, k, P) → (n·P, n·P)."""
        t = read.unflatten(0, (-1, self.n)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)  # (F·k, n·P)
        return t.T @ t

    def _fixed(self, made: Tensor) -> Tensor:
        """A constant belongs to feature 0 alone."""
        made[self.n :] = 0
        return made

    def _used(self, weight: Tensor) -> bool:
        """Whether a weight was used before, by calls that matter."""
        if self.layer not in self.layers:
            return False
        used = weight.data_ptr() in self.weights
        self.weights.add(weight.data_ptr())
        return used

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        base, in_place = _plain(name)
        if "max_pool" in base:
            return self.without(Undefined("max-pooling"), func(*args, **kwargs))
        given = [t for t in _flat((args, kwargs)) if isinstance(t, Tensor)]
        if not any(isinstance(t, Data) for t in given):
            return func(*args, **kwargs)
        self.layer += _weighs(base) and func is not _inner
        data = [a for a in args if isinstance(a, Data)]
        learned = any(isinstance(t, (Moved, nn.Parameter)) for t in given)
        if in_place and learned:
            args[0].__class__ = Moved
        if base in _SUMS and len(data) == 1:
            if not learned:
                return self._fixed(func(*args, **kwargs))
            sign = -1.0 if base == "rsub" else 1.0
            return data[0].mul_(sign) if in_place else (data[0] * sign).as_subclass(Moved)
        if base == "pad" and kwargs.get("value"):
            if not learned:
                return self._fixed(func(*args, **kwargs))
            kwargs["value"] = 0.0
        if base in _SCALES:
            if len(data) > 1 or any(isinstance(a, nn.Parameter) for a in args):
                return self.without(Unknown("a product with something that is not fixed"), data[0])
            return func(*args, **kwargs)
        if base in ("matmul", "einsum"):  # x @ Wᵀ, or the same as einsum("ni,oi->no", x, W)
            weight = args[-1] if base == "einsum" else args[-1].T
            return self.other("linear", _inner, (data[0], weight), {})
        if base == "batch_norm":
            weight = kwargs.get("weight") if kwargs.get("weight") is not None else args[1]
            h = args[0].as_subclass(Tensor)
            flat = h.flatten(2) if h.ndim > 2 else h[:, :, None]
            grams = lambda: torch.stack([self._gram(flat[:, c : c + 1]) for c in range(h.shape[1])])  # noqa: E731
            return self._block(weight, h, grams).as_subclass(Moved)
        if base == "linear":
            given = dict(zip(("input", "weight", "bias"), args)) | kwargs
            h, weight = given["input"].as_subclass(Tensor), given["weight"]
            if h.ndim != 2:
                return self.without(Unknown("a dense layer place by place"), func(h, weight)).as_subclass(Moved)
            made = h.new_zeros(len(h), len(weight))
            gram = self._gram(h[:, :, None]).expand(len(weight), -1, -1)
            return self._block(weight, made, lambda: gram).as_subclass(Moved)
        if base.startswith("conv"):
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args)) | kwargs
            h, weight, groups = given["input"].as_subclass(Tensor), given["weight"], given.get("groups", 1)
            out, (each, *kernel) = weight.shape[0], weight.shape[1:]
            size = each * math.prod(kernel)
            unit = torch.eye(size, dtype=h.dtype).reshape(size, each, *kernel)
            unit = unit.repeat(groups, *[1] * (unit.ndim - 1))
            options = {k: given[k] for k in names[3:] if k in given}
            patches = func(h, unit, None, **options)  # (rows, groups·size, …)
            positions = patches.shape[2:]
            made = h.new_zeros(len(h), out, *positions)
            parts = patches.flatten(2).unflatten(1, (groups, size))

            def grams() -> Tensor:
                found = torch.stack([self._gram(parts[:, g]) for g in range(groups)])
                return found.repeat_interleave(out // groups, 0)

            return self._block(weight, made, grams).as_subclass(Moved)
        if base not in _LINEAR and base not in _SUMS:
            raise Unknown(f"the function {base}")
        return func(*args, **kwargs)


_LINEAR = {
    "flatten",
    "reshape",
    "view",
    "transpose",
    "permute",
    "roll",
    "flip",
    "getitem",
    "narrow",
    "chunk",
    "split",
    "cat",
    "concat",
    "stack",
    "pad",
    "mean",
    "sum",
    "avg_pool1d",
    "avg_pool2d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "clone",
    "contiguous",
    "squeeze",
    "unsqueeze",
    "unflatten",
    "dropout",
    "get",
    "size",
    "dim",
    "len",
    "copy",
    "alias",
}


def path_kernel(ref: Reference, x: Tensor) -> Tensor:
    """H(s, t) = Σ_b φ_s(b)·φ_t(b), the mean over outputs: (n, n)."""
    n = len(x)
    gates = [b.double() for b in ref.bits(x)]
    layers = _weight_calls(ref, x)

    def one(features: int | None) -> tuple[Tensor, int]:
        count = features or 1
        rows = torch.zeros(count, *x.shape, dtype=x.dtype)
        rows[0] = ref.read(x)
        wide = [g.repeat(count, *[1] * (g.ndim - 1)) for g in gates]

        def unit(i: int, q: Tensor, slope: float) -> Tensor:
            return (q * wide[i]).as_subclass(Moved)

        mode = _Fields(unit, ref.average, n, features, layers)
        with torch.no_grad():
            f = run(ref.values, rows.flatten(0, 1).as_subclass(Data), mode)  # type: ignore[arg-type]
        return f.as_subclass(Tensor).reshape(count, n, -1), mode.next

    _, total = one(None)
    if total > 3000:
        raise Unknown("so many features")
    f, _ = one(total)
    return torch.einsum("fsk,ftk->st", f, f) / f.shape[2]


# --- derivatives -----------------------------------------------------------------------------------------------------


def jacobian(f: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """∂f_k(s)/∂θ by one backward pass for each row and output: name → (n, c, …)."""
    if not f.requires_grad:
        return {name: torch.zeros(*f.shape, *p.shape, dtype=f.dtype) for name, p in parameters.items()}
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for value in f.flatten():
        try:
            grads = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # the template trains, because a layer whose input it changes is frozen
            raise Unknown("in-place changes of what a frozen layer reads") from error
        for (name, p), g in zip(parameters.items(), grads):
            found[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(each).reshape(*f.shape, *parameters[name].shape) for name, each in found.items()}
