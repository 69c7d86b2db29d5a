"""Short texts that identify tensors, networks and functions, so that a checkpoint belongs to one training."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from pathlens.models.sources import TableSource
from pathlens.training.stack import gated_parts, tensor_bytes, trained_names


def digest(parts: Iterable[str | Tensor]) -> str:
    """16 hexadecimal digits that change with any text, and any number or shape of a tensor."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else f"{tuple(part.shape)}".encode() + tensor_bytes(part))
    return found.hexdigest()[:16]


def network_digest(members: Sequence[nn.Module], trained: str | None, fixed_beta: bool) -> str:
    """Changes with everything that training does not change: layers, frozen weights, gates."""
    parts: list[str | Tensor] = []
    learned = set(trained_names(trained, members[0]))
    for net in members:
        for name, p in net.named_parameters():
            parts += [f"{name} {tuple(p.shape)}"] + ([] if name in learned else [p])
        for _, part in gated_parts(net):
            parts.append(f"{type(part.gate).__name__} {part.value_input}")
            parts += part.gate.buffers() if fixed_beta else ()
            parts += part.source.buffers() if isinstance(part.source, TableSource) else ()
    return digest(parts)


def describe(function: Any) -> Any:
    """A function as text that is the same in another process; texts, numbers and None are returned unchanged."""
    if isinstance(function, functools.partial):
        return f"{describe(function.func)}, {function.args}, {function.keywords}"
    if inspect.isfunction(function):
        return function.__qualname__
    return repr(function) if callable(function) else function
