"""What training takes: losses, and data checked and moved to where training happens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.data import DataSet
from pathlens.data.inputs import as_numbers
from pathlens.errors import DTypeError, LabelError, NotFiniteError, OptionError, ShapeError
from pathlens.recording import as_rows
from pathlens.recording.inputs import computes_in, output_width
from pathlens.training.stack import Loss


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean over rows and outputs of (f − y)²."""
    return (output - target).square().mean()


def half_mse(output: Tensor, target: Tensor) -> Tensor:
    """½ of `mse`."""
    return 0.5 * (output - target).square().mean()


LOSSES: dict[str, Loss] = {"mse": mse, "half_mse": half_mse, "cross_entropy": F.cross_entropy}


@dataclass
class Data:
    """Checked training data on the training device."""

    x: Tensor
    y: Tensor
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    weights: Tensor | None = None

    def fingerprint(self) -> str:
        """Changes when any training row, target or weight does: a checkpoint belongs to one data set."""
        digest = hashlib.sha256()
        for t in (self.x, self.y, *(() if self.weights is None else (self.weights,))):
            digest.update(str(tuple(t.shape)).encode())
            digest.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def prepare(data: Any, net: nn.Module, loss: str | Loss, device: torch.device, weights: Any = None) -> Data:
    """Rows and targets of a DataSet or a pair, and weights, checked and on the training device."""
    x_test = y_test = None
    if isinstance(data, DataSet):
        x, y, x_test, y_test = data.x, data.y, data.x_test, data.y_test
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
    else:
        raise ShapeError(
            "train: data must be a DataSet, an (X, y) pair, a Dataset, a DataLoader or a sampler, got "
            f"{type(data).__name__}."
        )
    x, y = checked(x, y, net, loss, device)
    if x_test is not None and y_test is not None:
        x_test, y_test = checked(x_test, y_test, net, loss, device)
    return Data(x, y, x_test, y_test, None if weights is None else _checked_weights(weights, x, net))


def prepare_validation(validation: Any, net: nn.Module, loss: str | Loss, device: torch.device) -> Data:
    """Held-out rows as (X, y) or (X, y, weights)."""
    if not isinstance(validation, (tuple, list)) or len(validation) not in (2, 3):
        raise ShapeError(
            f"train: validation must be (X, y) or (X, y, weights), got {type(validation).__name__}"
            + (f" of length {len(validation)}." if isinstance(validation, (tuple, list)) else ".")
        )
    x, y = checked(validation[0], validation[1], net, loss, device)
    return Data(x, y, weights=None if len(validation) == 2 else _checked_weights(validation[2], x, net))


def as_device(device: Any, where: str) -> torch.device:
    """The device of that name, if this machine has it."""
    usable = "cpu or cuda" if torch.cuda.is_available() else "cpu; there is no CUDA device here"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise OptionError(f"{where} {str(device)!r} cannot be used: {reason}. Use {usable}.") from error
    if found.type == "meta":
        raise OptionError(f"{where} 'meta' holds no numbers. Use {usable}.")
    return found


def _numbers(value: Any, what: str) -> Tensor:
    try:
        return as_numbers(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(
            f"train: {what} must be numbers, got {type(value).__name__} ({error}). Classes are numbered 0, 1, …"
        ) from error


def _checked_weights(weights: Any, x: Tensor, net: nn.Module) -> Tensor:
    """Weights of the rows of x in units of their mean."""
    w = _numbers(weights, "weights")
    if w.shape != x.shape[:1]:
        raise ShapeError(
            f"train: weights have shape {tuple(w.shape)}, expected ({x.shape[0]},): one number for each row."
        )
    bad = ~torch.isfinite(w) | (w < 0)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise NotFiniteError(f"train: weights must be finite and at least 0, weight {i} is {float(w[i]):g}.")
    if not bool((w > 0).any()):
        raise OptionError("train: every weight is zero. At least one row must count.")
    return (w.double() / w.double().mean()).to(x.device, computes_in(net, x))


def checked(
    x: Any,
    y: Any,
    net: nn.Module,
    loss: str | Loss,
    device: torch.device,
    outputs: dict[tuple[int, ...], int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows and targets that the network and the loss take, on the device.

    `outputs` remembers the network's number of outputs for each shape of a row, so that it is asked once.
    """
    x = as_rows(x, like=net).to(device)
    y = _numbers(y, "targets").to(device)
    if y.shape[:1] != x.shape[:1]:
        raise ShapeError(
            f"train: {x.shape[0]} inputs and {y.shape[0] if y.ndim else 'no'} targets. They must match row by row."
        )
    outputs = {} if outputs is None else outputs
    shape = tuple(x.shape[1:])
    if shape not in outputs:
        outputs[shape] = output_width(net, x, "train")
    c = outputs[shape]
    if loss == "cross_entropy":
        if y.dtype.is_floating_point or y.dtype == torch.bool or y.ndim != 1:
            raise LabelError(
                f"train: cross-entropy needs integer labels of shape (n,), got {y.dtype} of shape {tuple(y.shape)}. "
                "Use loss='mse' for real targets."
            )
        y = y.long()
        if int(y.min()) < 0 or int(y.max()) >= c:
            raise LabelError(
                f"train: labels run from {int(y.min())} to {int(y.max())}, the network has {c} outputs. "
                f"Labels must be 0…{c - 1}."
            )
        return x, y
    if isinstance(loss, str):
        if not y.dtype.is_floating_point:
            raise LabelError(
                f"train: loss {loss!r} needs real targets, got {y.dtype}. Use loss='cross_entropy' for class labels, "
                "or y.float()."
            )
        if y.ndim == 1:
            y = y[:, None]
        if y.shape != (x.shape[0], c):
            raise ShapeError(f"train: targets have shape {tuple(y.shape)}, the network's outputs ({x.shape[0]}, {c}).")
        if not torch.isfinite(y).all():
            raise NotFiniteError(
                f"train: targets contain NaN or infinity, first in row {int((~torch.isfinite(y)).any(1).nonzero()[0])}."
            )
        y = y.to(computes_in(net, x))
    return x, y
