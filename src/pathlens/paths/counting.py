"""How many paths are active: exact integers, for fully connected and for convolutional networks.

The kernel of path counts between inputs is `pathlens.kernels.overlap`; this is its diagonal, in integers of any size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pathlens.errors import RecordError
from pathlens.models import GatedNetwork
from pathlens.models.tensors import tensors_in
from pathlens.models.tracing import apply_site, unwrapped
from pathlens.paths.trellis import take_record, take_trellis
from pathlens.progress import ProgressBar
from pathlens.recording import Record

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_POOLS = {nn.AvgPool1d: F.conv1d, nn.AvgPool2d: F.conv2d, nn.AvgPool3d: F.conv3d}  # sums instead of means
_GLOBAL_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_POOL_CALLS = {getattr(F, f"avg_pool{d}d"): pool for d, pool in enumerate(_POOLS, start=1)}
_POOL_CALLS |= {getattr(F, f"adaptive_avg_pool{d}d"): pool for d, pool in enumerate(_GLOBAL_POOLS, start=1)}
_UNCHANGED = (nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.modules.dropout._DropoutNd)
# functions and methods that rearrange, split and join tensors, or read their shape
_MOVES = {"flatten", "view", "reshape", "flip", "roll", "narrow", "select", "index_select", "unsqueeze", "contiguous"}
_MOVES |= {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "cat", "concat", "concatenate", "hstack"}
_MOVES |= {"getitem", "pad", "size"}
_SUMS, _FACTORS = {"add", "sub"}, {"mul", "truediv", "div"}
_LARGEST_PRIME = 2**31 - 1  # residues below it, times up to 2^22 connections into a unit, are exact in float64
_BLOCK = 64  # rows at a time


def count(net: nn.Module, X: Any, *, include_inputs: bool = False, include_biases: bool = False) -> list[int]:
    """Number of active paths per row, as exact integers.

    A path is a sequence of connected hidden units, one per layer; it is active where all their hard gates (q > 0) are
    on, also in a network whose own gates are soft. Fully connected: Π_l Σ_i 1(q_{l,i} > 0).

    Parameters
    ----------
    net : GatedNetwork or nn.Module
        Fully connected, or a gated network of convolutions, average pooling, dense layers, batch-norm, shortcuts,
        splits and joins. There a unit is a channel at a position, and paths through different positions differ even
        where they use the same weights.
    X : (n, ...), (d,) or Record
    include_inputs : bool
        Count the input node as part of a path, as the NPF papers do. An input that is read twice counts twice.
    include_biases : bool
        Also count paths that start at the bias of a later layer, those that `top` lists with −1, and the output's bias
        itself. The overlap kernel does not. Fully connected networks only.

    Returns
    -------
    list of n Python integers, of any size

    Notes
    -----
    Convolutions: a forward pass with all weights 1, modulo as many primes below 2³¹ as the largest possible count
    needs, combined by the Chinese remainder theorem; each prime costs one forward pass in float64.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> count(models.dlgn(2, hidden=(8, 8), seed=0), X)
    [6, 30]
    >>> count(models.dln(2, hidden=(100,) * 12), X)[0]  # far beyond 64 bits
    1000000000000000000000000
    """
    net = unwrapped(net) if isinstance(net, nn.Module) else net
    if isinstance(net, GatedNetwork):
        rec = take_record(net, X)
        if not rec.chain:
            return _convolutional(net, rec, include_inputs, include_biases)
        X = rec
    trellis = take_trellis("paths.count", net, X, include_inputs)
    if not trellis.direct and isinstance(net, GatedNetwork):
        return _convolutional(net, X, include_inputs, include_biases)
    if not trellis.direct:
        raise RecordError(
            "paths.count: the first layer does not read the inputs directly, and for a plain module it is not known "
            'which of them reach it. Take gated = gated_twin(net, "relu", example=X[:2]).'
        )
    counts = [trellis.sizes[0] - trellis.biased if include_inputs else 1] * trellis.n
    # a bias of the first layer starts a path of its own only where the others name their input
    biases = trellis.biases if include_inputs else (False, *trellis.biases)
    for bias, bits in zip(biases, trellis.bits):
        counts = [(c + (include_biases and bias)) * on for c, on in zip(counts, bits.sum(1).tolist())]
    return [c + (include_biases and biases[-1]) for c in counts]


def _convolutional(net: GatedNetwork, rec: Record, include_inputs: bool, include_biases: bool) -> list[int]:
    if include_biases:
        raise RecordError("paths.count: paths that start at biases are counted in fully connected networks alone.")
    if not rec.sites:
        raise RecordError("paths.count: the network has no gate sites, so it has no hidden units to pass.")
    all_open = {k: torch.ones_like(b[:1]) for k, b in rec.bits.items()}
    # float64 is accurate to rounding, and infinite where the count is too large
    most = float(_Counter(net, all_open, include_inputs, None).counts(rec.x[:1]))
    if not math.isfinite(most):
        raise RecordError("paths.count: more than 10^308 paths. Count the paths of a part of the network.")
    primes = _primes(int(most) * 2)
    counts: list[int] = []
    with ProgressBar("counting paths", len(primes) * -(-rec.n // _BLOCK)) as meter:
        for lo in range(0, rec.n, _BLOCK):
            rows = slice(lo, min(lo + _BLOCK, rec.n))
            bits = {k: b[rows] for k, b in rec.bits.items()}
            found, modulus = [0] * (rows.stop - rows.start), 1
            for p in primes:
                residues = _Counter(net, bits, include_inputs, p).counts(rec.x[rows]).long().tolist()
                inverse = pow(modulus, -1, p)
                found = [c + modulus * ((residue - c) * inverse % p) for c, residue in zip(found, residues)]
                modulus *= p
                meter.advance()
            counts += found
    return counts


def _primes(bound: int) -> list[int]:
    """Primes from 2³¹ − 1 down whose product exceeds `bound`."""
    found: list[int] = []
    candidate = _LARGEST_PRIME
    while math.prod(found) <= bound:
        if all(candidate % q for q in range(3, math.isqrt(candidate) + 1, 2)):
            found.append(candidate)
        candidate -= 2
    return found


class _Counter(fx.Interpreter):
    """Runs the value network with every weight 1, no biases and hard gates, modulo a prime.

    Tensors have one row per input with counts, and a last row that is 1 where the input arrives without having passed
    a gate: a path of hidden units starts, once, at each gate that it arrives at.
    """

    def __init__(self, net: GatedNetwork, bits: dict[str, Tensor], include_inputs: bool, prime: int | None) -> None:
        super().__init__(net.values)
        self.extra_traceback = False  # a refusal names the node itself
        self._bits, self._prime, self._inputs = bits, prime, include_inputs
        self._net = net
        self._data = {next(iter(net.values.graph.nodes))}  # nodes that are computed from the input

    def counts(self, x: Tensor) -> Tensor:
        """Counts (n,) as float64."""
        with torch.no_grad():
            # on the CPU, where convolutions of float64 add products up and nothing else, so that integers stay exact
            gates = [self._bits[site].cpu().double() for site in self._net.site_names]
            n, *shape = self._net.value_reads(x).shape
            start = torch.full((n + 1, *shape), float(self._inputs), dtype=torch.float64)
            start[-1] = not self._inputs
            counts = self.run(start, *gates)[:-1]
        flat = counts.reshape(len(counts), -1)  # of one output for each row, (n,)
        if not bool((flat == flat[:, :1]).all()):
            raise RecordError(
                "paths.count: outputs are reached by different paths (the last layer is a convolution, or in groups), "
                "so that a row has several counts. Count a network that ends in a dense layer."
            )
        return flat[:, 0]

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output" or not any(each in self._data for each in n.all_input_nodes):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_module":
            out = self._module(self.fetch_attr(str(n.target)), n.target, args, kwargs)
        else:
            out = self._call(n, args, kwargs)
        if any(True for _ in tensors_in(out)):
            self._data.add(n)
        return out

    def _reduced(self, sums: Tensor) -> Tensor:
        if self._prime is not None:
            sums[:-1].remainder_(self._prime)
        sums[-1].clamp_(max=1)
        return sums

    def _module(self, module: Any, target: Any, args: Any, kwargs: Any) -> Tensor:
        kind = type(module)
        t, *others = args
        if others or kwargs:
            raise self._refuse(target, kind.__name__)
        if kind is nn.Linear:
            return self._reduced(t.sum(-1, keepdim=True)).repeat_interleave(module.out_features, -1)
        if kind in _CONVOLUTIONS and module.padding_mode == "zeros":
            # weights are 1, so all channels of a group are one sum: of channels first, then over the window
            weight = torch.ones(module.groups, 1, *module.kernel_size, dtype=torch.float64)
            summed = t.unflatten(1, (module.groups, -1)).sum(2)
            geometry = module.stride, module.padding, module.dilation, module.groups
            made = self._reduced(_CONVOLUTIONS[kind](summed, weight, None, *geometry))
            return made.repeat_interleave(module.out_channels // module.groups, 1)
        if kind in _POOLS and not module.ceil_mode:
            channels, dims = t.shape[1], t.ndim - 2
            window = module.kernel_size if isinstance(module.kernel_size, tuple) else (module.kernel_size,) * dims
            ones = torch.ones(channels, 1, *(window if len(window) == dims else window * dims), dtype=torch.float64)
            return self._reduced(_POOLS[kind](t, ones, None, module.stride, module.padding, 1, channels))
        if kind in _GLOBAL_POOLS:
            wanted = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
            if any(size != 1 for size in wanted):
                raise self._refuse(target, f"{kind.__name__} to more than one position")
            return self._reduced(t.sum(dim=tuple(range(2, t.ndim)), keepdim=True))
        if kind is nn.Flatten:
            return module(t)
        if isinstance(module, _UNCHANGED):
            return t
        raise self._refuse(target, kind.__name__)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A function or a method."""
        name, function = getattr(node.target, "__name__", str(node.target)), node.target
        if node.op == "call_method":
            function = getattr(Tensor, name)
        assert callable(function)
        if function is apply_site:
            t, gate, _ = args
            return torch.cat([(t[:-1] + t[-1:]) * gate, torch.zeros_like(t[-1:])])
        if not args:
            raise self._refuse(name, "with named arguments alone")
        if function is getattr and args[1] == "shape":
            return args[0].shape
        if function is F.pad and (args[3] if len(args) > 3 else kwargs.get("value")):  # it would count as paths
            raise self._refuse(name, "with other values than zero")
        # squeeze without a dimension may remove that of the rows
        if name in _MOVES or (name == "squeeze" and (kwargs or len(args) > 1)):
            return function(*args, **kwargs)
        if function in _POOL_CALLS:
            return self._module(_POOL_CALLS[function](*args[1:], **kwargs), name, args[:1], {})
        if name in ("mean", "sum"):
            return self._over_positions(*args, **kwargs)
        if name in _SUMS | _FACTORS and not kwargs and len(args) == 2:
            data = [a for a, each in zip(args, node.args) if each in self._data]
            if len(data) == 2:
                return self._reduced(data[0] + data[1])
            constant = torch.as_tensor(next(a for a, each in zip(args, node.args) if each not in self._data)).cpu()
            # a bias starts no path; a factor of zero would end some
            if (data[0] + constant).shape == data[0].shape and (name in _SUMS or bool(constant.ne(0).all())):
                return data[0]
        raise self._refuse(name, node.op.removeprefix("call_"))

    def _over_positions(self, t: Tensor, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
        """A mean or sum over positions: paths through all of them continue."""
        dim = others.pop("axis", dim)
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        if others or any(d is None or d % t.ndim < 2 for d in dims):
            raise self._refuse("mean or sum", "over rows or channels")
        return self._reduced(t.sum(dim=dims, keepdim=keepdim))

    def _refuse(self, name: Any, what: str) -> RecordError:
        if "maxpool" in f"{name} {what}".lower().replace("_", ""):
            remedy = "It selects paths by their values: use average-pooling, gated_twin(…, max_pool='average')."
        else:
            remedy = "kernels.overlap(net, X) may support it, in floating point."
        return RecordError(
            f"paths.count: '{name}' ({what}) is not supported: only dense layers, zero-padded convolutions, average "
            f"pooling, batch-norm, flattening, splits, joins, gates and additions are. {remedy}"
        )
