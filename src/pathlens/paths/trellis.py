"""The paths of a fully connected gated network on a batch, as a trellis: layers of nodes, weights between, gates.

Functions of paths are sums, maxima or walks over this object, in float64; paths are never enumerated. Convolutional
networks have no trellis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import EmptyDataError, NotFiniteError, OptionError, RecordError
from pathlens.indexing import is_count
from pathlens.models.tracing import unwrapped
from pathlens.recording import GatedNetwork, Record, record
from pathlens.recording.taking import first_map


@dataclass(frozen=True)
class Trellis:
    """f_c = Σ over walks of start · Π_t (weight · gate) · readout, for each row.

    A bias is a path that starts where the bias is added. A network with biases gets one more node per layer, node 0,
    which is always on, has the value 1 and is connected to the next layer's node 0 and, by the biases, to its units.

    Attributes
    ----------
    start : Tensor (n, s_0)
        Values of the first nodes: the inputs (ones, of a piecewise constant network), the inputs of the first layer, or
        its gated units.
    weights : tuple of T Tensors (s_t, s_{t−1})
    gates : tuple of T Tensors (n, s_t)
        As the network computes them, soft where it is soft.
    readout : Tensor (c, s_T)
    bits : tuple of L bool Tensors (n, w_l)
        Hard gates q > 0 of the hidden units.
    f : Tensor (n, c)
        The sum over all paths in float64, checked against what the network returned.
    x : Tensor (n, d)
        Inputs.
    biases : tuple of T + 1 bool
        Which of the weights and of the readout have a bias of their own, at which paths start.
    include_inputs : bool
        Whether the first nodes are the inputs. Operations between an input and the first layer belong to the first
        weights, and a constant that is added there to its bias.
    inputs : int
        How many of the first nodes are connected to the next layer, without the bias node.
    direct : bool
        Whether the first layer reads the first nodes as they are.
    label : str
        The gate function.
    sites : tuple of str
        Names of the gate sites, one per hidden layer.
    """

    start: Tensor
    weights: tuple[Tensor, ...]
    gates: tuple[Tensor, ...]
    readout: Tensor
    bits: tuple[Tensor, ...]
    f: Tensor
    x: Tensor
    biases: tuple[bool, ...]
    include_inputs: bool
    inputs: int
    direct: bool
    label: str
    sites: tuple[str, ...]

    @property
    def biased(self) -> bool:
        """Whether node 0 of every layer is the bias node."""
        return any(self.biases)

    @property
    def n(self) -> int:
        """Number of rows."""
        return int(self.start.shape[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes per layer, the bias node included."""
        return (self.start.shape[1], *(w.shape[0] for w in self.weights))

    @property
    def widths(self) -> tuple[int, ...]:
        """Hidden units per layer."""
        return tuple(b.shape[1] for b in self.bits)

    @property
    def number_of_paths(self) -> int:
        """How many paths there are, active or not, those that start at a bias included."""
        total = self.inputs
        for size, bias in zip((s - self.biased for s in self.sizes[1:]), self.biases):
            total = (total + bias) * size
        return total + self.biases[-1]

    def rows(self, index: Any) -> Trellis:
        """The same for some of the rows."""
        gates, bits = (tuple(t[index] for t in each) for each in (self.gates, self.bits))
        return replace(self, start=self.start[index], gates=gates, bits=bits, f=self.f[index], x=self.x[index])

    def absolute(self) -> Trellis:
        """The trellis of absolute values: its sum over paths is Σ|v|."""
        weights, gates = (tuple(t.abs() for t in each) for each in (self.weights, self.gates))
        return replace(self, start=self.start.abs(), weights=weights, gates=gates, readout=self.readout.abs())

    def prefixes(self) -> list[Tensor]:
        """Σ over the beginnings of paths that end in a node, (n, s_t) per layer."""
        found = [self.start]
        for weight, gate in zip(self.weights, self.gates):
            found.append(found[-1] @ weight.T * gate)
        return found

    def suffixes(self, output: int) -> list[Tensor]:
        """Σ over the ends of paths from a node to the output, (n, s_t) per layer; the node's own gate is not in it."""
        found = [self.readout[output].expand(self.n, -1)]
        for weight, gate in zip(reversed(self.weights), reversed(self.gates)):
            found.append((found[-1] * gate) @ weight)
        return found[::-1]

    def total(self) -> Tensor:
        """Σ over all paths, (n, c)."""
        return self.prefixes()[-1] @ self.readout.T

    def layer(self, what: str, layer: Any) -> int:
        """A hidden layer's number from "last", the name of its gate site, or an integer, negative ones from the end."""
        count = len(self.bits)
        number = layer
        if isinstance(layer, str):
            number = count - 1 if layer == "last" else {site: i for i, site in enumerate(self.sites)}.get(layer)
        if isinstance(number, bool) or not isinstance(number, Integral) or not -count <= int(number) < count:
            raise OptionError(
                f"{what}: no layer {layer!r}; the network has {count} hidden layers, numbered from 0 or named by their "
                f'gate sites ({", ".join(self.sites)}); "last" is the last of them.'
            )
        return int(number) % count


def take_trellis(
    what: str, net: nn.Module, X: Any, include_inputs: bool = False, *, output: int = 0, as_read: bool = False
) -> Trellis:
    """The trellis of a network on a batch.

    Parameters
    ----------
    what : str
        The public function, for messages.
    net : GatedNetwork or nn.Module
        Dense layers and gates in turn.
    X : (n, d), (d,) or Record
        Inputs, one input, or their record by this network.
    include_inputs : bool
        Whether a path also names its input node.
    output : int
        The output of interest; refused outside 0…c−1.
    as_read : bool
        With ``include_inputs``: start at the input of the first layer instead of the network's, so that the first
        weights are those of that layer.
    """
    if not isinstance(net, nn.Module):
        raise OptionError(f"{what}: expected a network first, got {type(net).__name__}. Call {what}(net, X, …).")
    net = unwrapped(net)
    rec = take_record(net, X)
    if not bool(torch.isfinite(rec.f).all()):
        raise NotFiniteError(f"{what}: the network's output is NaN or infinite. Check its weights.")
    layers = [layer for layer in rec.layers if layer.part != "gate"]
    if not rec.chain or any(layer.calls != (None,) for layer in layers):
        gated = isinstance(net, GatedNetwork)
        name, first = ("net", "") if gated else ("gated", 'Take gated = gated_twin(net, "relu", example=X[:2]): ')
        raise RecordError(
            f"{what}: the network is not a chain of dense layers and gates (it has convolutions, shortcuts, batch-norm "
            f"or reused layers), which single paths need. {first}paths.count({name}, X) also takes convolutions, and "
            f"paths.inputs({name}, X) and kernels.overlap({name}, X) any architecture."
        )
    if rec.kept:
        raise RecordError(f"{what}: the record holds outputs {rec.kept} alone. Record all outputs.")
    if isinstance(output, bool) or not isinstance(output, Integral) or not 0 <= int(output) < rec.outputs:
        raise OptionError(f"{what}: no output {output!r}; the network has {rec.outputs}, numbered from 0.")
    named = {name: p.detach().double() for name, p in net.named_parameters()}
    foreign = next((layer.name for layer in layers if layer.parameters[0] not in named), None)
    if foreign is not None:
        raise RecordError(f"{what}: the record has a layer '{foreign}', which the network lacks. Record it again.")
    values = [named[layer.parameters[0]] for layer in layers]
    biases = [next((named.get(name) for name in layer.parameters[1:]), None) for layer in layers]
    inputs = rec.layer_inputs[layers[0].name][0].double()
    trellis = whole = _build(rec, values, biases, inputs, True)
    if not include_inputs:
        trellis = _build(rec, values, biases, inputs, False)
    elif not as_read:
        trellis = _from_inputs(what, net, rec, values, biases, inputs)
    # rounding is of the size of all terms, those included that cancel within a first unit's U_1 x
    size = torch.maximum(whole.absolute().total(), trellis.absolute().total())
    gap = ((trellis.f - rec.f.double()).abs() / size.clamp(min=torch.finfo(torch.float32).tiny)).max()
    if not float(gap) <= 1e3 * torch.finfo(rec.f.dtype).eps:
        raise RecordError(
            f"{what}: the sum over paths differs from the network's output by {float(gap):.1e} of Σ|v|: some operation "
            "between its layers is not part of a path, or the record is of other weights. Record it again."
        )
    return trellis


def reads_ones(net: nn.Module) -> bool:
    """Whether a network is piecewise constant: its value network reads ones in place of x."""
    net = unwrapped(net)
    return isinstance(net, GatedNetwork) and net.value_input == "ones"


def take_record(net: nn.Module, X: Any) -> Record:
    """X itself if it is a record, else the record of it; one input becomes a batch of one."""
    if isinstance(X, Record):
        return X
    rows = X[None] if getattr(X, "ndim", None) == 1 else X
    rec = record(net, rows, sensitivities=False, stream=False)
    assert isinstance(rec, Record)
    return rec


def _build(
    rec: Record, values: list[Tensor], biases: list[Tensor | None], inputs: Tensor, include_inputs: bool
) -> Trellis:
    n = rec.n
    gates = [rec.gates(site).double() for site in rec.sites]
    # without the input node a path starts in a unit of the first layer, so that its bias is part of where it starts
    start = inputs if include_inputs else _layer_outputs(inputs, values[0], biases[0]) * gates[0]
    weights, rest, passing = (values, biases, gates) if include_inputs else (values[1:], biases[1:], gates[1:])
    own = tuple(b is not None for b in rest)
    if any(own):
        one = start.new_ones(n, 1)
        start = torch.cat([one, start], dim=1)
        passing = [torch.cat([one, g], dim=1) for g in passing]
        weights = [_with_bias(w, b, last=t == len(weights) - 1) for t, (w, b) in enumerate(zip(weights, rest))]
    made = Trellis(
        start,
        tuple(weights[:-1]),
        tuple(passing),
        weights[-1],
        tuple(rec.bits[s] for s in rec.sites),
        rec.f,
        rec.x,
        own,
        include_inputs,
        start.shape[1] - any(own),
        True,
        rec.gate_label,
        rec.sites,
    )
    return replace(made, f=made.total())


def _from_inputs(
    what: str, net: nn.Module, rec: Record, values: list[Tensor], biases: list[Tensor | None], inputs: Tensor
) -> Trellis:
    """The trellis that starts at the network's inputs, including affine operations before the first layer."""
    layer = next(layer for layer in rec.layers if layer.part != "gate")
    remedy = "Without include_inputs=True, paths start at the units of the first layer."
    if not rec.x.is_floating_point():
        raise RecordError(f"{what}: the inputs are indices ({rec.x.dtype}), so that no path starts at one. {remedy}")
    with torch.no_grad():
        x = net.value_reads(rec.x) if isinstance(net, GatedNetwork) else rec.x
    matrix, constant, connected = first_map(net, x[:1], layer)
    x = x.flatten(1).double()
    made, size = x @ matrix.T + constant, x.abs() @ matrix.abs().T + constant.abs()
    want = _layer_outputs(inputs, values[0], biases[0])
    if not bool(((made - want).abs() <= 1e3 * torch.finfo(rec.f.dtype).eps * size).all()):
        raise RecordError(
            f"{what}: the input of layer '{layer.name}' is not an affine function of the network's input, so that no "
            f"path starts at an input. {remedy}"
        )
    bias = constant if biases[0] is not None or bool(constant.any()) else None
    trellis = _build(rec, [matrix, *values[1:]], [bias, *biases[1:]], x, True)
    direct = matrix.shape == values[0].shape and torch.equal(matrix, values[0]) and bool(connected.all())
    return replace(trellis, inputs=int(connected.sum()), direct=direct)


def _layer_outputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _with_bias(weight: Tensor, bias: Tensor | None, last: bool) -> Tensor:
    """[b, U], and above it the row from bias node to bias node, unless this is the output."""
    b = weight.new_zeros(weight.shape[0]) if bias is None else bias
    wide = torch.cat([b[:, None], weight], dim=1)
    if last:
        return wide
    carry = wide.new_zeros(1, wide.shape[1])
    carry[0, 0] = 1
    return torch.cat([carry, wide])


def split(what: str, net: nn.Module, whole: Trellis, validation: Any, seed: int) -> tuple[Trellis, Trellis]:
    """Rows to fit on, and held-out rows: a share of them, or other inputs."""
    if not isinstance(validation, (int, float)):
        return whole, take_trellis(what, net, validation)
    if isinstance(validation, bool) or not 0 < validation < 1:
        raise OptionError(
            f"{what}: validation={validation!r}, expected inputs, or a share of the rows between 0 and 1."
        )
    away = max(1, round(whole.n * validation))
    if away >= whole.n:
        raise EmptyDataError(f"{what}: {whole.n} rows cannot be split. Give more, or validation=other inputs.")
    order = torch.randperm(whole.n, generator=torch.Generator().manual_seed(seed)).to(whole.f.device)
    return whole.rows(order[away:].sort().values), whole.rows(order[:away].sort().values)


def check_positive(what: str, **numbers: Any) -> None:
    """Refuse values that are not integers of at least 1; the keyword is their name in the message."""
    for name, value in numbers.items():
        if not is_count(value):
            raise OptionError(f"{what}: {name} must be an integer of at least 1, got {value!r}.")


def path_text(path: Sequence[int]) -> str:
    """A path as text: its units; dots stand before the layer at whose bias a path starts.

    >>> path_text([-1, 3, 0])
    '·→3→0'
    """
    return "→".join("·" if unit < 0 else str(unit) for unit in path)
