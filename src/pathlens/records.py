"""Snapshot, Record and Moment: what was measured on a network, as tensors, with files of their own.

Nothing here holds a live model. How they are taken from a network is `recording.py`; this module knows tensors,
shapes and files only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from pathlens.errors import FileFormatError, RecordError, ShapeError

FORMAT_VERSION = 1


# --- files -----------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name, fsync, rename, fsync the folder: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], kind: str) -> None:
    """Write `path`.safetensors, then `path`.json with its checksum; the JSON file makes the pair valid."""
    from safetensors.torch import save

    path = Path(path)
    data = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    header = {"format": f"pathlens.{kind}", "version": FORMAT_VERSION, "sha256": hashlib.sha256(data).hexdigest(), **meta}
    write_atomically(path.with_suffix(".safetensors"), data)
    write_atomically(path.with_suffix(".json"), json.dumps(header, indent=1).encode())


def load_tensors(path: str | Path, kind: str, error: type[FileFormatError] = FileFormatError) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; refuse anything truncated, corrupt, of another kind or a newer version."""
    from safetensors.torch import load

    path = Path(path)
    json_path, tensor_path = path.with_suffix(".json"), path.with_suffix(".safetensors")
    for p in (json_path, tensor_path):
        if not p.exists():
            raise error(f"{p}: no such file. A saved {kind} is a pair of .json and .safetensors files.")
    try:
        meta = json.loads(json_path.read_bytes())
    except ValueError as e:
        raise error(f"{json_path}: not valid JSON ({e}); the file was left untouched. Restore it from a copy.") from e
    if not isinstance(meta, dict) or meta.get("format") != f"pathlens.{kind}":
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise error(f"{json_path}: expected a pathlens.{kind} file, found {found!r}.")
    if meta.get("version") != FORMAT_VERSION:
        raise error(f"{json_path}: format version {meta.get('version')!r}, this Pathlens reads version {FORMAT_VERSION}. "
                    "Use the Pathlens version that wrote it.")
    data = tensor_path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != meta.get("sha256"):
        raise error(f"{tensor_path}: checksum {found[:12]}… instead of {str(meta.get('sha256'))[:12]}…: the file is truncated "
                    f"or corrupt ({len(data)} bytes). It was left untouched; restore it from a copy.")
    return load(data), meta


# --- snapshot --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """The weights of a network at one moment, by name, with its description."""

    state: dict[str, Tensor]
    description: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json."""
        save_tensors(path, self.state, {"description": self.description}, "snapshot")

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read a saved snapshot."""
        tensors, meta = load_tensors(path, "snapshot")
        return cls(tensors, meta["description"])

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
    """One linear or convolutional layer of a record.

    Attributes
    ----------
    name : str
        Of its weight, without ``.weight``.
    part : {"value", "gate", "shared"}
        Which network it belongs to; "shared" where one weight makes both values and gates.
    bias : bool
        Whether it has a trainable bias.
    inputs, outputs : int
        I and m: entries of one patch, and pre-activations per position.
    calls : tuple of Convolution or None
        One entry per call in a forward pass; None is a fully connected call.
    identity : bool
        The layer's pre-activation is the network's output, so its sensitivity is the identity and is not stored.
    trainable : bool
        Whether training changes its weight (frozen gates: False).
    """

    name: str
    part: str
    bias: bool
    inputs: int
    outputs: int
    calls: tuple[Convolution | None, ...]
    identity: bool = False
    trainable: bool = True


@runtime_checkable
class RowSource(Protocol):
    """Anything that can be asked for the record of any rows again."""

    n: int
    outputs: int
    sites: tuple[str, ...]
    layers: tuple[Layer, ...]
    bytes_per_row: int
    flops_per_row: int

    def rows(self, lo: int, hi: int, output: int | None = None) -> Record: ...


@dataclass
class Record:
    """Everything that one forward and one backward pass say about n rows.

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
    layer_inputs : dict layer → list of Tensor
        What the layer read, one tensor per call.
    sensitivity : dict layer → Tensor (n, c, P, m)
        ∂f_k/∂(pre-activation); absent for the layer whose output is f itself, and for layers f does not depend on
        (hard gates).
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
    untracked: tuple[str, ...] = ()  #: parameters that no linear or convolutional call used
    kept: tuple[int, ...] = ()  #: which outputs of the network the columns of f are; () means all

    def __post_init__(self) -> None:
        for name, t in {"f": self.f, **self.bits, **self.sensitivity}.items():
            if t.shape[0] != self.n:
                raise ShapeError(f"Record: '{name}' has {t.shape[0]} rows, expected {self.n} as in the input.")

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
        """Memory of the whole record."""
        tensors = [self.x, self.f, *self.bits.values(), *self.soft.values(), *self.sensitivity.values()]
        tensors += [t for calls in self.layer_inputs.values() for t in calls]
        return sum(t.numel() * t.element_size() for t in tensors)

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
        """What a layer reads, shape (n, P, I): one row per position and call; patches for convolutions."""
        layer = self.layer(name)
        if any(call is not None and call.groups > 1 for call in layer.calls):
            raise RecordError(f"Record: '{name}' is a grouped convolution, whose patches have no single weight matrix. "
                              "Use its per-example gradients.")
        parts = [unfold(t, call) for t, call in zip(self.layer_inputs[name], layer.calls)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def sensitivities(self, name: str, output: int) -> Tensor:
        """∂f_output/∂(pre-activation) of a layer, shape (n, P, m); zeros where f does not depend on it."""
        layer = self.layer(name)
        if not 0 <= output < self.outputs:
            raise RecordError(f"Record: output {output} asked for, the network has {self.outputs}.")
        if name in self.sensitivity:
            return self.sensitivity[name][:, output]
        if layer.identity:
            row = torch.zeros(layer.outputs, dtype=self.f.dtype, device=self.f.device)
            row[self.kept[output] if self.kept else output] = 1
            return row.expand(self.n, 1, layer.outputs)
        positions = sum(_positions(t, call) for t, call in zip(self.layer_inputs[name], layer.calls))
        return self.f.new_zeros(self.n, positions, layer.outputs)

    def rows(self, lo: int, hi: int, output: int | None = None) -> Record:
        """Rows lo…hi as a record of their own (views); `output` keeps the sensitivities of one output."""
        if not 0 <= lo < hi <= self.n:
            raise RecordError(f"Record: rows {lo}:{hi} asked for, it has {self.n}.")
        cut = slice(lo, hi)
        keep = slice(None) if output is None else slice(output, output + 1)
        kept = self.kept if output is None else ((self.kept[output],) if self.kept else (output,))
        return Record(
            self.x[cut], self.f[cut, keep], {k: v[cut] for k, v in self.bits.items()},
            {k: v[cut] for k, v in self.soft.items()}, self.layers,
            {k: [t[cut] for t in v] for k, v in self.layer_inputs.items()},
            {k: v[cut, keep] for k, v in self.sensitivity.items()}, self.gate_label, self.flops_per_row, self.untracked,
            kept,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json."""
        tensors = {"x": self.x, "f": self.f}
        tensors |= {f"bits/{k}": v for k, v in self.bits.items()} | {f"soft/{k}": v for k, v in self.soft.items()}
        tensors |= {f"sensitivity/{k}": v for k, v in self.sensitivity.items()}
        tensors |= {f"input/{i}/{k}": t for k, v in self.layer_inputs.items() for i, t in enumerate(v)}
        # a tensor may appear twice (a layer of the gate and of the value network read the same x): safetensors
        # refuses shared storage, so each is stored on its own
        meta = {"layers": [asdict(layer) for layer in self.layers], "sites": list(self.sites),
                "gate_label": self.gate_label, "flops_per_row": self.flops_per_row, "untracked": list(self.untracked), "kept": list(self.kept)}
        save_tensors(path, {k: v.detach().clone() for k, v in tensors.items()}, meta, "record")

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a saved record."""
        t, meta = load_tensors(path, "record")
        layers = tuple(_layer_from(d) for d in meta["layers"])
        inputs = {layer.name: [t[f"input/{i}/{layer.name}"] for i in range(len(layer.calls))] for layer in layers}
        return cls(
            t["x"], t["f"], {s: t[f"bits/{s}"] for s in meta["sites"]},
            {s: t[f"soft/{s}"] for s in meta["sites"] if f"soft/{s}" in t}, layers, inputs,
            {k.removeprefix("sensitivity/"): v for k, v in t.items() if k.startswith("sensitivity/")},
            meta["gate_label"], meta["flops_per_row"], tuple(meta["untracked"]), tuple(meta["kept"]),
        )  # fmt: skip

    def __repr__(self) -> str:
        return (f"Record({self.n} rows, {self.outputs} outputs, {len(self.sites)} gate sites ({self.gate_label}), "
                f"{len(self.layers)} layers, {self.f.dtype}, {self.nbytes / 2**20:.1f} MiB)")


def _layer_from(d: dict[str, Any]) -> Layer:
    calls = tuple(
        None if c is None else Convolution(tuple(c["kernel"]), tuple(c["stride"]), tuple(map(tuple, c["padding"])),
                                           tuple(c["dilation"]), c["groups"])
        for c in d["calls"]
    )  # fmt: skip
    return Layer(d["name"], d["part"], d["bias"], d["inputs"], d["outputs"], calls, d["identity"], d["trainable"])


def _positions(t: Tensor, call: Convolution | None) -> int:
    if call is None:
        return t[0].numel() // t.shape[-1]
    total = 1
    for size, k, s, (a, b), d in zip(t.shape[2:], call.kernel, call.stride, call.padding, call.dilation):
        total *= (size + a + b - d * (k - 1) - 1) // s + 1
    return total


def unfold(t: Tensor, call: Convolution | None) -> Tensor:
    """One call's input as rows: (n, ..., I) → (n, P, I), or an image (n, C, ...) → its patches (n, P, C·k)."""
    n = t.shape[0]
    if call is None:
        return t.reshape(n, -1, t.shape[-1])
    pads = [p for pair in reversed(call.padding) for p in pair]
    t = F.pad(t, pads)
    spatial = len(call.kernel)
    for axis, (k, s, d) in enumerate(zip(call.kernel, call.stride, call.dilation)):
        t = t.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    # now (n, C, out_1…, k_1…): positions first, then channel and kernel offsets in the weight's order
    order = [0, *range(2, 2 + spatial), 1, *range(2 + spatial, 2 + 2 * spatial)]
    t = t.permute(order)
    positions = 1
    for size in t.shape[1 : 1 + spatial]:
        positions *= size
    return t.reshape(n, positions, -1)
