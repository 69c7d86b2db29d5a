"""Checks of tensors (dense, real, on a device that holds numbers), and tensors inside nested tuples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import DTypeError


def require_dense(x: Tensor, what: str) -> Tensor:
    """The same tensor; refused where it is sparse, nested, quantised, complex, or on the meta device.

    Parameters
    ----------
    x : Tensor
    what : str
        What the message calls it, in the plural: "Inputs".

    Examples
    --------
    >>> require_dense(torch.eye(2).to_sparse(), "Inputs")
    Traceback (most recent call last):
    pathlens.errors.DTypeError: Inputs are a tensor of layout torch.sparse_coo, expected a dense one. ...
    """
    if x.is_nested:
        remedy = "Give rows of one shape, e.g. X.to_padded_tensor(0.0)."
        raise DTypeError(f"{what} are a nested tensor, expected a dense one. {remedy}")
    if x.layout is not torch.strided:
        raise DTypeError(f"{what} are a tensor of layout {x.layout}, expected a dense one. Convert it: X.to_dense().")
    if x.is_quantized:
        raise DTypeError(f"{what} are {x.dtype}, expected real numbers. Convert them: X.dequantize().")
    if x.device.type == "meta":
        remedy = "Give a tensor on the CPU or another device."
        raise DTypeError(f"{what} are on the device 'meta', which holds shapes and no numbers. {remedy}")
    if x.is_complex():
        remedy = "Give real and imaginary parts as columns of their own, e.g. torch.view_as_real(X).flatten(1)."
        raise DTypeError(f"{what} are {x.dtype}, expected real numbers. {remedy}")
    return x


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, or in nested tuples and lists.

    >>> [t.item() for t in tensors_in((torch.tensor(1), [torch.tensor(2), "text"]))]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
