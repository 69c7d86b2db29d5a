"""`Snapshot` and `Record`: weights and measurements of a network as tensors, never the network, and their files.

The package `recording` takes them from a network.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from pathlens.errors import FileFormatError, RecordError, ShapeError
from pathlens.files import Document, parse_json, read_document, sync_folder, write_atomically, write_document

# --- files -----------------------------------------------------------------------------------------------------


class TensorHeader(Document, tag="pathlens.tensors", frozen=True, kw_only=True):
    """The JSON file beside a safetensors file; subclasses add the fields of their kind.

    Attributes
    ----------
    sha256
        Checksum of the safetensors file.
    tensors
        Names of its tensors, in order.
    """

    sha256: str = ""
    tensors: tuple[str, ...] = ()


H = TypeVar("H", bound=TensorHeader)


class _Pair(NamedTuple):
    """The files of one saved object. `pending` exists only during a save, or after an interrupted one."""

    header: Path
    tensors: Path
    pending: Path

    @classmethod
    def at(cls, path: str | Path) -> _Pair:
        path = Path(path)
        stem = path.stem if path.suffix in (".json", ".safetensors") else path.name
        return cls(*(path.with_name(stem + suffix) for suffix in (".json", ".safetensors", ".new.safetensors")))


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], header: TensorHeader) -> str:
    """Write `path`.safetensors and `path`.json, replacing an older pair safely; returns the tensors' checksum.

    The new tensors are written beside the old ones, then the JSON file is replaced, which makes the new pair valid,
    then the new tensors replace the old ones. After a crash at any point `load_tensors` reads a complete pair.
    """
    from safetensors.torch import save

    pair = _Pair.at(path)
    # clones: safetensors refuses tensors that share memory (tied weights; two layers that read the same x)
    data = save({k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()})
    checksum = hashlib.sha256(data).hexdigest()
    if pair.pending.exists() and pair.header.exists():  # finish an interrupted save before its tensors are replaced
        try:
            claimed = parse_json(pair.header.read_bytes()).get("sha256")
        except (ValueError, AttributeError):
            claimed = None
        if claimed == hashlib.sha256(pair.pending.read_bytes()).hexdigest():
            os.replace(pair.pending, pair.tensors)
    pair.pending.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(pair.pending, data)
    write_document(pair.header, msgspec.structs.replace(header, sha256=checksum, tensors=tuple(tensors)))
    os.replace(pair.pending, pair.tensors)
    sync_folder(pair.tensors.parent)
    return checksum


def load_tensors(
    path: str | Path, kind: type[H], error: type[FileFormatError] = FileFormatError
) -> tuple[dict[str, Tensor], H]:
    """Read the tensors and the header that `save_tensors` wrote; refuses damaged files and other kinds."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    pair = _Pair.at(path)
    header = read_document(pair.header, kind, error)
    found = []
    for file in (pair.tensors, pair.pending):
        if not file.is_file():
            continue
        data = file.read_bytes()
        checksum = hashlib.sha256(data).hexdigest()
        if checksum == header.sha256:
            try:
                loaded = load(data)
            except SafetensorError as e:
                raise error(f"{file}: not a safetensors file ({e}). Save it again.") from e
            if set(header.tensors) != set(loaded):
                raise error(f"{file}: its tensors are not those that {pair.header.name} lists. Save it again.")
            return {k: loaded[k] for k in header.tensors}, header  # safetensors sorts them; the order of layers matters
        found.append(f"{checksum[:12]}… ({len(data)} bytes)")
    if not found:
        raise error(f"{pair.tensors}: no such file. A .json and a .safetensors file belong together.")
    raise error(
        f"{pair.tensors}: checksum {found[0]} instead of {header.sha256[:12]}…: the file is truncated or "
        "corrupt, or belongs to another .json file. It was left untouched; restore it from a copy."
    )


def checksum_of_tensors(path: str | Path) -> str:
    """The checksum of the tensors that a header file lists; reads the header alone."""
    return str(parse_json(_Pair.at(path).header.read_bytes())["sha256"])


# --- snapshot --------------------------------------------------------------------------------------------------


class SnapshotHeader(TensorHeader, tag="pathlens.snapshot", frozen=True, kw_only=True):
    """The JSON file of a snapshot."""

    description: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The weights of a network at one moment, by name, with its description.

    Attributes
    ----------
    state : dict name → Tensor
        As in ``net.state_dict()``, copies.
    description : dict
        What the network was, as plain values.

    Examples
    --------
    >>> Snapshot({"output.weight": torch.ones(1, 3)}, {"kind": "toy"})
    Snapshot(toy: 1 tensors, 3 numbers)
    """

    state: dict[str, Tensor]
    description: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> str:
        """Write `path`.safetensors and `path`.json; returns the checksum of the tensors."""
        return save_tensors(path, self.state, SnapshotHeader(description=self.description))

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read a saved snapshot."""
        tensors, header = load_tensors(path, SnapshotHeader)
        return cls(tensors, header.description)

    def __repr__(self) -> str:
        kind = self.description.get("kind", "module")
        return f"Snapshot({kind}: {len(self.state)} tensors, {sum(v.numel() for v in self.state.values())} numbers)"


# --- record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """Geometry of one convolution call, enough to unfold its input into patches."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  #: (before, after) per spatial dimension
    dilation: tuple[int, ...]
    groups: int = 1


@dataclass(frozen=True)
class Layer:
    """One linear or convolutional layer of a record: a weight all of whose uses are linear or convolutional calls.

    Attributes
    ----------
    name : str
        Of its weight, without ``.weight``.
    part : {"value", "gate", "shared"}
        Which network it belongs to; "shared" where one weight makes both values and gates.
    bias : bool
        Whether it has a bias that is trained with its weight; of a frozen layer, whether it has one.
    inputs, outputs : int
        I and m: entries of one patch (of one group of channels), and pre-activations per position.
    calls : tuple of Convolution or None
        One entry per call in a forward pass; None is a fully connected call.
    identity : bool
        The layer's pre-activation is the network's output, so its sensitivity is the identity and is not stored.
    trainable : bool
        Whether training changes its weight (frozen gates: False).
    parameters : tuple of str
        Names of its weight and, where all its calls add one and the same, of that bias.
    """

    name: str
    part: str
    bias: bool
    inputs: int
    outputs: int
    calls: tuple[Convolution | None, ...]
    identity: bool = False
    trainable: bool = True
    parameters: tuple[str, ...] = ()


class RecordHeader(TensorHeader, tag="pathlens.record", frozen=True, kw_only=True):
    """The JSON file of a record."""

    layers: tuple[Layer, ...]
    sites: tuple[str, ...]
    gate_label: str
    flops_per_row: int
    untracked: tuple[str, ...]
    kept: tuple[int, ...]
    has_sensitivities: bool
    chain: bool
    ungated: tuple[str, ...]
    learned_entry: bool


@dataclass
class Record:
    """What one forward and one backward pass compute for n rows.

    The gradient of f_k to a layer's weight is Σ_p A_p ⊗ D_p for each row, with A = ``inputs(name)`` (n, P, I) and
    D = ``sensitivities(name, k)`` (n, P, m); to its bias it is Σ_p D_p. P counts positions and calls: 1 where the
    layer is fully connected and used once.

    Attributes
    ----------
    x : Tensor (n, ...)
        The inputs.
    f : Tensor (n, c)
        The outputs.
    bits : dict site → bool Tensor (n, ...)
        q > 0, the hard gate, whatever the network's own gate function is.
    soft : dict site → Tensor (n, ...)
        The gate values where they are not the bits (soft or leaky gates).
    layers : tuple of Layer
        In order of their first call.
    layer_inputs : dict layer → list of Tensor
        What the layer read, one tensor per call.
    sensitivity : dict layer → Tensor (n, c, P, m)
        ∂f_k/∂(pre-activation); absent for the layer whose output is f itself, and for layers f does not depend on
        (hard gates).
    gate_label : str
        The gate function, as figures print it.
    flops_per_row : int
        What it costs to compute a row again.
    untracked : tuple of str
        Trainable parameters whose gradient does not follow from the layers: batch-norm's, embeddings, weights that are
        also used in other ways.
    kept : tuple of int
        Which outputs of the network the columns of f are; () means all.
    has_sensitivities : bool
        False where the backward pass was skipped; `sensitivities` then refuses.
    chain : bool
        Dense layers and gates alternate: each layer reads exactly the gated outputs of the layer before, and the last
        one computes the output. False if there are shortcuts, batch-norm, convolutions or other parameters.
    learned_entry : bool
        Whether parameters or batch-norm act on the input before the first value layer reads it, so that what it reads
        is not what paths start from.
    ungated : tuple of str
        Activations of a plain module between its layers that are no gates (GELU, ReLU6, …), by function and module.

    Examples
    --------
    >>> from pathlens import models, record
    >>> rec = record(models.relu(2, hidden=(4, 3), outputs=2, seed=0), torch.randn(10, 2))
    >>> rec.sites, [layer.name for layer in rec.layers]
    (('relu1@0', 'relu2@0'), ['values.linear1', 'values.linear2', 'values.output'])
    >>> rec.inputs("values.linear2").shape, rec.sensitivities("values.linear2", output=1).shape
    (torch.Size([10, 1, 4]), torch.Size([10, 1, 3]))
    """

    x: Tensor
    f: Tensor
    bits: dict[str, Tensor]
    soft: dict[str, Tensor]
    layers: tuple[Layer, ...]
    layer_inputs: dict[str, list[Tensor]]
    sensitivity: dict[str, Tensor]
    gate_label: str = "hard"
    flops_per_row: int = 0
    untracked: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    has_sensitivities: bool = True
    chain: bool = False
    ungated: tuple[str, ...] = ()
    learned_entry: bool = False

    def __post_init__(self) -> None:
        for name, t in self.tensors().items():
            if t.shape[0] != self.n:
                raise ShapeError(
                    f"Record: '{name}' has {t.shape[0]} rows, expected {self.n} as in the input. "
                    "Record all of it on the same batch."
                )

    @property
    def n(self) -> int:
        """Number of rows."""
        return int(self.x.shape[0])

    @property
    def outputs(self) -> int:
        """Number of outputs c."""
        return int(self.f.shape[1])

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the gate sites, in order of execution."""
        return tuple(self.bits)

    @property
    def bytes_per_row(self) -> int:
        """Memory of one row."""
        return self.nbytes // max(self.n, 1)

    @property
    def nbytes(self) -> int:
        """Memory of the whole record; a tensor that two layers read counts once."""
        distinct = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in self.tensors().values()}
        return sum(t.numel() * t.element_size() for t in distinct.values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by its name in a saved file."""
        found = {"x": self.x, "f": self.f}
        for kind in ("bits", "soft", "sensitivity"):
            found |= {f"{kind}/{k}": t for k, t in getattr(self, kind).items()}
        return found | {f"input/{i}/{k}": t for k, calls in self.layer_inputs.items() for i, t in enumerate(calls)}

    def map(self, function: Callable[[Tensor], Tensor]) -> Record:
        """A record with the function applied to every tensor."""
        return replace(
            self,
            x=function(self.x),
            f=function(self.f),
            bits={k: function(t) for k, t in self.bits.items()},
            soft={k: function(t) for k, t in self.soft.items()},
            layer_inputs={k: [function(t) for t in calls] for k, calls in self.layer_inputs.items()},
            sensitivity={k: function(t) for k, t in self.sensitivity.items()},
        )

    def layer(self, name: str) -> Layer:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise RecordError(f"Record: no layer '{name}'. It has: {', '.join(layer.name for layer in self.layers)}.")

    def gates(self, site: str) -> Tensor:
        """Gate values at a site, shape (n, ...): the network's own, hard or soft."""
        if site not in self.bits:
            raise RecordError(f"Record: no gate site '{site}'. It has: {', '.join(self.sites)}.")
        return self.soft[site] if site in self.soft else self.bits[site].to(self.f.dtype)

    def inputs(self, name: str) -> Tensor:
        """What a layer reads, shape (n, P, I): one row per position and call; patches for convolutions.

        A convolution with G groups of channels has G rows per position, one per group.
        """
        layer = self.layer(name)
        parts = [unfold(t, call) for t, call in zip(self.layer_inputs[name], layer.calls)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def sensitivities(self, name: str, output: int) -> Tensor:
        """∂f_output/∂(pre-activation) of a layer, shape (n, P, m); zeros where f does not depend on it.

        Rows belong to those of `inputs`: a convolution with G groups has G rows per position, each zero outside the m/G
        channels of its group.
        """
        layer = self.layer(name)
        self._check_output(output)
        if not self.has_sensitivities:
            raise RecordError(
                f"Record: it has no sensitivities of '{name}', since it was taken without a backward pass. Record with "
                "sensitivities=True."
            )
        if layer.identity:
            row = torch.zeros(layer.outputs, dtype=self.f.dtype, device=self.f.device)
            row[self.kept[output] if self.kept else output] = 1
            return row.expand(self.n, 1, layer.outputs)
        sizes = [_positions(t, call) for t, call in zip(self.layer_inputs[name], layer.calls)]
        groups = [1 if call is None else call.groups for call in layer.calls]
        if name not in self.sensitivity:
            total = sum(p * g for p, g in zip(sizes, groups))
            return self.f.new_zeros(()).expand(self.n, total, layer.outputs)
        found = self.sensitivity[name][:, output]
        if all(g == 1 for g in groups):
            return found
        return torch.cat([_by_group(part, g) for part, g in zip(found.split(sizes, dim=1), groups)], dim=1)

    def _check_output(self, output: int) -> None:
        if not 0 <= output < self.outputs:
            raise RecordError(f"Record: no output {output}; it has {self.outputs}, numbered from 0.")

    def rows(self, lo: int, hi: int, output: int | None = None) -> Record:
        """Rows lo…hi as a record of their own (views); `output` keeps the sensitivities of one output."""
        if not 0 <= lo < hi <= self.n:
            raise RecordError(f"Record: no rows {lo}:{hi}; it has {self.n}.")
        part = self.map(lambda t: t[lo:hi])
        if output is None:
            return part
        self._check_output(output)
        one = slice(output, output + 1)
        sensitivity = {k: t[:, one] for k, t in part.sensitivity.items()}
        kept = self.kept[output] if self.kept else output
        return replace(part, f=part.f[:, one], sensitivity=sensitivity, kept=(kept,))

    def save(self, path: str | Path) -> str:
        """Write `path`.safetensors and `path`.json; returns the checksum of the tensors."""
        header = RecordHeader(sites=self.sites, **{k: getattr(self, k) for k in _FACTS})
        return save_tensors(path, self.tensors(), header)

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a saved record."""
        t, header = load_tensors(path, RecordHeader)
        try:
            return cls(
                t["x"],
                t["f"],
                {s: t[f"bits/{s}"] for s in header.sites},
                {s: t[f"soft/{s}"] for s in header.sites if f"soft/{s}" in t},
                layer_inputs={
                    layer.name: [t[f"input/{i}/{layer.name}"] for i in range(len(layer.calls))]
                    for layer in header.layers
                },
                sensitivity={k.removeprefix("sensitivity/"): v for k, v in t.items() if k.startswith("sensitivity/")},
                **{k: getattr(header, k) for k in _FACTS},
            )
        except (KeyError, ShapeError) as e:
            file = _Pair.at(path).header
            raise FileFormatError(f"{file}: the record lacks or misstates {e}. Save it again.") from e

    def __repr__(self) -> str:
        return (
            f"Record({self.n} rows, {self.outputs} outputs, {len(self.sites)} gate sites ({self.gate_label}), "
            f"{len(self.layers)} layers, {self.f.dtype}, {self.nbytes / 2**20:.1f} MiB)"
        )


# the fields that a record and its header share
_FACTS = tuple(name for name in RecordHeader.__struct_fields__ if name in Record.__dataclass_fields__)


def _positions(t: Tensor, call: Convolution | None) -> int:
    if call is None:
        return t[0].numel() // t.shape[-1]
    geometry = zip(t.shape[2:], call.kernel, call.stride, call.padding, call.dilation)
    return math.prod((size + a + b - d * (k - 1) - 1) // s + 1 for size, k, s, (a, b), d in geometry)


def _by_group(d: Tensor, groups: int) -> Tensor:
    """(n, P, m) → (n, G·P, m), group by group, zero outside each group's channels."""
    if groups == 1:
        return d
    n, positions, m = d.shape
    out = d.new_zeros(n, groups, positions, m)
    width = m // groups
    for g in range(groups):
        cut = slice(g * width, (g + 1) * width)
        out[:, g, :, cut] = d[:, :, cut]
    return out.flatten(1, 2)


def unfold(t: Tensor, call: Convolution | None) -> Tensor:
    """One call's input as rows: (n, ..., I) → (n, P, I), or an image (n, C, ...) → its patches (n, P, C·k).

    A patch has the order of the flattened weight: channel, then kernel offsets. With G groups the patches of the first
    group come first, then those of the second: (n, G·P, C/G·k).

    >>> image = torch.arange(9.0).reshape(1, 1, 3, 3)
    >>> unfold(image, Convolution((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1)))[0, 0]
    tensor([0., 1., 3., 4.])
    """
    n = t.shape[0]
    if call is None:
        return t.reshape(n, -1, t.shape[-1])
    pads = [p for pair in reversed(call.padding) for p in pair]
    t = F.pad(t, pads)
    spatial = len(call.kernel)
    for axis, (k, s, d) in enumerate(zip(call.kernel, call.stride, call.dilation)):
        t = t.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    # now (n, C, out_1…, k_1…), and with the groups split off (n, G, C/G, out_1…, k_1…)
    t = t.unflatten(1, (call.groups, -1))
    order = [0, 1, *range(3, 3 + spatial), 2, *range(3 + spatial, 3 + 2 * spatial)]
    t = t.permute(order)
    return t.reshape(n, call.groups * math.prod(t.shape[2 : 2 + spatial]), -1)
