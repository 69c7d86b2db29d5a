"""Backends compute a tile from two sides of a kernel expression; each is imported on first use.

A new backend is a subclass of `Backend` in a module of its own, which `_MODULES` lists.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from abc import ABC, abstractmethod

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
_WORTH_COMPILING = 2e10  # operations; with fewer, compiling the popcount kernel takes longer than torch's products
_WORTH_FUSING = 64 << 20  # entries on CUDA; with fewer, packing the factors takes longer than torch's products
_WORTH_COUNTING = 1 << 20  # the same for 0/1 factors, which need no scales
_SPARE_BYTES = 16 << 20
_SPARE: list[Tensor] = []  # buffers of deleted pools
_LOCK = threading.RLock()  # re-entrant: a pool may be garbage-collected while another one searches for a buffer


def new_tile(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix. On the CPU it is allocated by NumPy, whose huge pages halve the cost of new memory.

    >>> new_tile(2, 3, torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    if device.type == "cpu":
        return torch.from_numpy(np.empty((rows, cols), np.float32 if dtype == torch.float32 else np.float64))
    return torch.empty(rows, cols, dtype=dtype, device=device)


class Pool:
    """Scratch tiles by depth of the expression, reused for every tile: new memory costs more than the product.

    Small buffers are kept for later pools, up to `_SPARE_BYTES` in total.

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


class Backend(ABC):
    """Base class of backends."""

    name: str

    def exactly_symmetric(self, node: Node) -> bool:
        """Whether tile (I, J) of a symmetric node is bitwise equal to the transpose of tile (J, I)."""
        return False  # a matrix product may sum in another order at the edges of its blocks

    def writes_whole(self, node: Node) -> bool:
        """Whether `unit_tile` computes a whole matrix without scratch space, exactly symmetric for equal sides."""
        return False

    @abstractmethod
    def gram_flops(self, gram: Gram) -> float:
        """Cost of one entry of a Gram node, in operations at the rate of a matrix product."""

    @abstractmethod
    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        """Write K̂ of shape (len(left), len(right)) to ``out``, whose rows are contiguous."""


def known() -> tuple[str, ...]:
    """Names that may be given as ``backend=``.

    >>> known()
    ('auto', 'popcount', 'torch', 'triton', 'triton-3xtf32', 'triton-bf16', 'triton-tf32')
    """
    return ("auto", *sorted(_MODULES))


def check_name(name: str) -> str:
    """The name itself; raises if it is unknown."""
    if name not in known():
        raise unknown_name("backend", name, known())
    return name


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose(name: str, node: Node, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that evaluates an expression; raises if the machine or the factors do not allow it.

    ``auto`` chooses popcount for large kernels of 0/1 factors on a CPU with numba, and Triton for large float32 kernels
    on CUDA with Triton.
    """
    if name == "popcount":
        if not _has("numba"):
            raise need_extra("fast", "numba", "the popcount backend")
        if device.type != "cpu":
            raise OptionError(
                f"the popcount backend works on CPU tensors, the factors are on {device}. Use backend='torch', or move "
                "the factors with `.cpu()`."
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
    """Import the backend of that name.

    >>> load("torch").name
    'torch'
    """
    backend: Backend = importlib.import_module(f"pathlens.linops.backends.{_MODULES[name]}").BACKENDS[name]
    return backend
