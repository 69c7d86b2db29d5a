"""How many paths are active: exact integers, for fully connected and for convolutional networks.

The kernel of path counts between inputs is `pathlens.kernels.overlap`; this is its diagonal, in integers of any size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pathlens.errors import RecordError
from pathlens.models import GatedNetwork
from pathlens.models.tracing import apply_site, unwrapped
from pathlens.paths.trellis import take_record, take_trellis
from pathlens.progress import ProgressBar
from pathlens.recording import Record

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_POOLS = {nn.AvgPool1d: F.conv1d, nn.AvgPool2d: F.conv2d, nn.AvgPool3d: F.conv3d}  # sums instead of means
_GLOBAL_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
# the same as calls, made into modules so that they are counted in one way
_POOL_CALLS: dict[Any, type[nn.Module]] = {
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
}
_PASS = (nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.modules.dropout._DropoutNd)
# they move counts about, as functions or methods; what comes of some is a tuple
_MOVES = {"flatten", "view", "reshape", "flip", "roll", "narrow", "select", "index_select", "unsqueeze", "contiguous"}
_SPLITS = {"chunk", "split", "split_with_sizes", "tensor_split", "unbind"}
_JOINS = {"cat", "concat", "concatenate", "hstack"}
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
    needs, put together by the Chinese remainder theorem; each prime costs one forward pass in float64.

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
            "paths.count: the first layer does not read the inputs as they are, and for a plain module it is not "
            'known which of them lead to it. Take gated = gated_twin(net, "relu", example=X[:2]).'
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
    # float64 is right to rounding here, and infinite where it is too large
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

    Values are pairs (counts, reached); a tuple of tensors is a list of pairs. The second is 1 where the input arrives
    without having passed a gate, and None where it arrives nowhere: a path of hidden units starts, once, at each gate
    that it arrives at.
    """

    def __init__(self, net: GatedNetwork, bits: dict[str, Tensor], include_inputs: bool, prime: int | None) -> None:
        super().__init__(net.values)
        self.extra_traceback = False  # a refusal names the node itself
        self._bits, self._prime, self._inputs = bits, prime, include_inputs
        self._net = net

    def counts(self, x: Tensor) -> Tensor:
        """Counts (n,) as float64."""
        with torch.no_grad():
            # on the CPU, where convolutions of float64 add products up and nothing else, so that integers stay exact
            gates = [self._bits[site].cpu().double() for site in self._net.site_names]
            ones = torch.ones(self._net.value_reads(x).shape, dtype=torch.float64)
            counts, _ = self.run((ones, None) if self._inputs else (torch.zeros_like(ones), ones), *gates)
        flat = counts.reshape(len(counts), -1)  # of one output for each row, (n,)
        if not bool((flat == flat[:, :1]).all()):
            raise RecordError(
                "paths.count: outputs are reached by different paths (the last layer is a convolution, or in groups), "
                "so that a row has no one count. Count a network that ends in a dense layer."
            )
        return flat[:, 0]

    def _reduced(self, counts: Tensor) -> Tensor:
        return counts if self._prime is None else counts.remainder_(self._prime)

    def _sums(self, read: Any, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        """What comes of both under an operation that adds up, or moves about."""
        counts, reached = read
        return self._reduced(add_up(counts)), None if reached is None else add_up(reached).clamp(max=1)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._module(self.fetch_attr(target), target, args, kwargs)

    def _module(self, module: Any, target: Any, args: Any, kwargs: Any) -> Any:
        kind = type(module)
        read, *others = args
        if others or kwargs:
            raise self._refuse(target, kind.__name__)
        if kind is nn.Linear:
            return self._sums(read, lambda t: t.sum(-1, keepdim=True).repeat_interleave(module.out_features, -1))
        if kind in _CONVOLUTIONS and module.padding_mode == "zeros":
            # weights are 1, so all channels of a group are one sum: of channels first, then over the window
            groups, each = module.groups, module.out_channels // module.groups
            weight = torch.ones(groups, 1, *module.kernel_size, dtype=torch.float64)
            geometry = module.stride, module.padding, module.dilation, groups

            def windows(t: Tensor) -> Tensor:
                summed = t.unflatten(1, (groups, -1)).sum(2)
                return _CONVOLUTIONS[kind](summed, weight, None, *geometry).repeat_interleave(each, 1)

            return self._sums(read, windows)
        if kind in _POOLS and not module.ceil_mode:
            channels, dims = read[0].shape[1], read[0].ndim - 2
            window = module.kernel_size if isinstance(module.kernel_size, tuple) else (module.kernel_size,) * dims
            ones = torch.ones(channels, 1, *(window if len(window) == dims else window * dims), dtype=torch.float64)
            return self._sums(read, lambda t: _POOLS[kind](t, ones, None, module.stride, module.padding, 1, channels))
        if kind in _GLOBAL_POOLS:
            wanted = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
            if any(size != 1 for size in wanted):
                raise self._refuse(target, f"{kind.__name__} to more than one position")
            return self._sums(read, lambda t: t.sum(dim=tuple(range(2, t.ndim)), keepdim=True))
        if kind is nn.Flatten:
            return self._sums(read, module)
        if isinstance(module, _PASS):
            return read
        raise self._refuse(target, kind.__name__)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", str(target))
        if target is apply_site:
            (counts, reached), gate = args[0], args[1]
            return (counts if reached is None else counts + reached) * gate, None
        if not args:
            raise self._refuse(name, "with named arguments alone")
        if isinstance(args[0], torch.Size) or (isinstance(args[0], list) and target is operator.getitem):
            return target(*args, **kwargs)  # an entry of a shape, or of a tuple of tensors
        if (found := self._known(name, args, kwargs, target)) is not None:
            return found
        if target is getattr and args[1] == "shape":
            return args[0][0].shape
        if target is F.pad and (args[3] if len(args) > 3 else kwargs.get("value")):  # it would count as paths
            raise self._refuse(name, "with other values than zero")
        moves = target in (F.pad, operator.getitem)  # they move counts about, or add zeros
        # without a dimension it may take that of the rows
        if moves or (target is torch.squeeze and (kwargs or len(args) > 1)):
            return self._sums(args[0], lambda t: target(t, *args[1:], **kwargs))
        if target in _POOL_CALLS:
            return self._module(_POOL_CALLS[target](*args[1:], **kwargs), name, args[:1], {})
        if target in (torch.mean, torch.sum):
            return self._over_positions(*args, **kwargs)
        raise self._refuse(name, "function")

    def _known(self, name: str, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """What comes of operations that are functions and methods alike; None for others."""
        read = args[0]
        if name in _SPLITS and isinstance(read, tuple):
            parts, reached = call(read[0], *args[1:], **kwargs), read[1]
            arrived = [None] * len(parts) if reached is None else call(reached, *args[1:], **kwargs)
            return list(zip(parts, arrived))
        if name in _MOVES and isinstance(read, tuple):
            return self._sums(read, lambda t: call(t, *args[1:], **kwargs))
        if name in _JOINS and not isinstance(read, tuple | Tensor) and all(isinstance(part, tuple) for part in read):
            none = all(reached is None for _, reached in read)
            filled = [torch.zeros_like(counts) if reached is None else reached for counts, reached in read]
            joined = call([counts for counts, _ in read], *args[1:], **kwargs)
            return joined, None if none else call(filled, *args[1:], **kwargs)
        if name not in _SUMS | _FACTORS or kwargs or len(args) != 2:
            return None
        pairs = [a for a in args if isinstance(a, tuple)]
        if name in _SUMS and len(pairs) == 2:
            (a, here), (b, there) = pairs
            reached = here if there is None else there if here is None else (here + there).clamp(max=1)
            return self._reduced(a + b), reached
        constant = torch.as_tensor(next(a for a in args if not isinstance(a, tuple)))
        # a bias starts no path; a factor of zero would end some
        same = (pairs[0][0] + constant.cpu()).shape == pairs[0][0].shape
        return pairs[0] if same and (name in _SUMS or bool(constant.ne(0).all())) else None

    def _over_positions(self, read: Any, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
        """A mean or sum over positions: every one of them leads on."""
        dim = others.pop("axis", dim)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if others or any(d is None or d % read[0].ndim < 2 for d in dims):
            raise self._refuse("mean or sum", "over rows or channels")
        return self._sums(read, lambda t: t.sum(dim=tuple(dims), keepdim=keepdim))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "size":
            return args[0][0].size(*args[1:], **kwargs)
        method = getattr(torch.Tensor, target)
        if (found := self._known(target, args, kwargs, method)) is not None:
            return found
        if target == "squeeze" and (kwargs or len(args) > 1):
            return self._sums(args[0], lambda t: getattr(t, target)(*args[1:], **kwargs))
        if target in ("mean", "sum"):
            return self._over_positions(*args, **kwargs)
        raise self._refuse(target, "method")

    def _refuse(self, name: Any, what: str) -> RecordError:
        if "maxpool" in f"{name} {what}".lower().replace("_", ""):
            remedy = "It switches paths by their values: take average-pooling, gated_twin(…, max_pool='average')."
        else:
            remedy = "kernels.overlap(net, X) may follow it, in floats."
        return RecordError(
            f"paths.count: '{name}' ({what}) is not among what is counted: dense layers, zero-padded convolutions, "
            f"average pooling, batch-norm, flattening, splits, joins, gates and additions. {remedy}"
        )
