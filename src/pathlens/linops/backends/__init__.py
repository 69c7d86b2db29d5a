"""Backends turn two sides of a kernel expression into a tile; each is loaded when first used.

The `Backend` protocol says what a backend offers; a new one adds a module and a line to the table here. May import only
the errors and the rest of linops.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pathlens.errors import OptionError, need_extra, unknown_name
from pathlens.linops.nodes import Gram, Node, Side

_MODULES = {
    "torch": "torch_backend",
    "popcount": "popcount",
    "triton": "triton_backend",
    "triton-tf32": "triton_backend",
    "triton-bf16": "triton_backend",
    "triton-3xtf32": "triton_backend",
}
# Loading and compiling the popcount kernel takes a second or two; below this much work torch is done sooner.
_WORTH_COMPILING = 2e10
_WORTH_FUSING = 64 << 20  # entries on CUDA; below, packing the factors takes longer than torch's products
_WORTH_COUNTING = 1 << 20  # the same for 0/1 factors, which need no scales
_SPARE_BYTES = 16 << 20
_SPARE: list[Tensor] = []  # buffers of pools that are gone
_LOCK = threading.RLock()  # re-entrant: a pool may be collected while another looks for a buffer


def new_tile(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix. On the CPU numpy allocates it: its huge pages halve the cost of fresh memory.

    >>> new_tile(2, 3, torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    if device.type == "cpu":
        return torch.from_numpy(np.empty((rows, cols), np.float32 if dtype == torch.float32 else np.float64))
    return torch.empty(rows, cols, dtype=dtype, device=device)


class Pool:
    """Scratch tiles by depth of the expression, reused from tile to tile: fresh pages cost more than the product.

    Small buffers outlive their pool and serve the next one, up to `_SPARE_BYTES` in all.

    >>> Pool(torch.float32, torch.device("cpu")).take(1, 2, 3).shape
    torch.Size([2, 3])
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._flat: dict[int, Tensor] = {}

    def take(self, depth: int, rows: int, cols: int) -> Tensor:
        """An uninitialised (rows, cols) tensor; valid until the next call with the same depth."""
        flat = self._flat.get(depth)
        if flat is None or flat.numel() < rows * cols:
            flat = self._flat[depth] = self._find(rows * cols)
        return flat[: rows * cols].view(rows, cols)

    def _find(self, count: int) -> Tensor:
        with _LOCK:
            for at, spare in enumerate(_SPARE):
                if (spare.dtype, spare.device) == (self.dtype, self.device) and count <= spare.numel() <= 4 * count:
                    return _SPARE.pop(at)
        return new_tile(1, count, self.dtype, self.device)[0]

    def __del__(self) -> None:
        with _LOCK:
            for flat in self._flat.values():
                if flat.nbytes + sum(spare.nbytes for spare in _SPARE) <= _SPARE_BYTES:
                    _SPARE.append(flat)


class Backend(Protocol):
    """What every backend offers."""

    name: str

    def exactly_symmetric(self, node: Node) -> bool:
        """Whether tile (I, J) of a symmetric node is bit for bit the transpose of tile (J, I)."""

    def writes_whole(self, node: Node) -> bool:
        """Whether `unit_tile` takes no scratch: a whole matrix goes in one call, exactly symmetric for equal sides."""

    def gram_flops(self, gram: Gram) -> float:
        """Cost of one entry of a Gram node, in operations at the rate of a matrix product."""

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        """Write K̂ of shape (len(left), len(right)) to ``out``, whose rows are contiguous."""


def known() -> tuple[str, ...]:
    """Names that may be given as ``backend=``.

    >>> known()
    ('auto', 'popcount', 'torch', 'triton', 'triton-3xtf32', 'triton-bf16', 'triton-tf32')
    """
    return ("auto", *sorted(_MODULES))


def check_name(name: str) -> str:
    """The name itself, or the error that lists those known."""
    if name not in known():
        raise unknown_name("backend", name, known())
    return name


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose(name: str, node: Node, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The backend that will run.

    ``auto`` takes popcount for large kernels of 0/1 factors on a CPU with numba, and the fused kernel for large float32
    ones on CUDA with Triton. Asking by name for one that this machine or these factors do not allow is an error.
    """
    if name == "popcount":
        if not _has("numba"):
            raise need_extra("fast", "numba", "the popcount backend")
        if device.type != "cpu":
            raise OptionError(
                f"the popcount backend works on CPU tensors, the factors are on {device}. "
                f"Use backend='torch', or move the factors with `.cpu()`."
            )
    if name.startswith("triton"):
        if not _has("triton"):
            raise OptionError(
                f"the {name} backend needs Triton, which comes with torch on CUDA machines. Use backend='torch'."
            )
        if dtype != torch.float32:
            raise OptionError(
                f"the {name} backend works in float32, the kernel is {dtype}. "
                f"Use backend='torch', or convert the factors with `.float()`."
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise OptionError(
                f"the {name} backend works on CUDA tensors, the factors are on {device}. "
                f"Move them with `.cuda()`, or use backend='torch'."
            )
    if name != "auto":
        return name
    leaves = list(node.leaves())
    if device.type == "cuda":
        grams = [leaf for leaf in leaves if isinstance(leaf, Gram)]
        least = _WORTH_COUNTING if all(gram.binary for gram in grams) else _WORTH_FUSING
        suited = dtype == torch.float32 and len(grams) == len(leaves) and node.n * node.m >= least
        return "triton" if suited and _has("triton") else "torch"
    binary = sum(leaf.r for leaf in leaves if isinstance(leaf, Gram) and leaf.binary)
    worth = 2.0 * node.n * node.m * binary > _WORTH_COMPILING
    return "popcount" if worth and device.type == "cpu" and _has("numba") else "torch"


def load(name: str) -> Backend:
    """The backend of that name; its module is imported here and nowhere else.

    >>> load("torch").name
    'torch'
    """
    backend: Backend = importlib.import_module(f"pathlens.linops.backends.{_MODULES[name]}").BACKENDS[name]
    return backend
