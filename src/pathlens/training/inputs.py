"""Losses, and data that is checked against a network and moved to the training device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.data import DataSet
from pathlens.data.inputs import as_numbers, as_pair
from pathlens.errors import DTypeError, LabelError, NotFiniteError, OptionError, ShapeError
from pathlens.recording import as_rows
from pathlens.recording.inputs import computes_in, output_width
from pathlens.training.fingerprints import digest
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
        """Changes with any training row, target or weight."""
        return digest(t for t in (self.x, self.y, self.weights) if t is not None)


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


class DataReader:
    """Checks data against a network and a loss, and moves it to a device."""

    def __init__(self, net: nn.Module, loss: str | Loss, device: torch.device) -> None:
        self.net, self.loss, self.device = net, loss, device
        self._outputs: dict[tuple[int, ...], int] = {}  # the network's outputs, for each shape of a row

    def read(self, data: Any) -> Data:
        """Rows in memory: a DataSet, (X, y) or (X, y, weights)."""
        if isinstance(data, DataSet):
            tested = data.x_test is not None and data.y_test is not None
            return Data(*self.pair(data.x, data.y), *(self.pair(data.x_test, data.y_test) if tested else ()))
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            got = f"{len(data)} items" if isinstance(data, (tuple, list)) else type(data).__name__
            raise ShapeError(
                "train: data must be a DataSet, (X, y), (X, y, weights), a Dataset, a DataLoader or a sampler, got "
                f"{got}."
            )
        x, y = self.pair(data[0], data[1])
        return Data(x, y, weights=None if len(data) == 2 or data[2] is None else self._weights(data[2], x))

    def read_validation(self, validation: Any) -> Data:
        """Held-out rows in any form of data; all of a Dataset or a DataLoader is read into memory."""
        if isinstance(validation, (tuple, list)) and len(validation) == 3:
            return self.read(validation)
        return self.read(as_pair(validation, where="train: validation"))

    def pair(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets that the network and the loss accept, on the device."""
        x = as_rows(x, like=self.net).to(self.device)
        y = _numbers(y, "targets").to(self.device)
        if y.shape[:1] != x.shape[:1]:
            raise ShapeError(
                f"train: {x.shape[0]} inputs and {y.shape[0] if y.ndim else 'no'} targets. They must match row by row."
            )
        c = self.outputs(x)
        if self.loss == "cross_entropy":
            return x, _labels(y, c)
        return x, _real_targets(y, c, self.loss).to(computes_in(self.net, x)) if isinstance(self.loss, str) else y

    def outputs(self, x: Tensor) -> int:
        """The number of outputs of the network for these rows."""
        shape = tuple(x.shape[1:])
        if shape not in self._outputs:
            self._outputs[shape] = output_width(self.net, x, "train")
        return self._outputs[shape]

    def _weights(self, weights: Any, x: Tensor) -> Tensor:
        """Weights of the rows of x, divided by their mean."""
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
        return (w.double() / w.double().mean()).to(x.device, computes_in(self.net, x))


def _numbers(value: Any, what: str) -> Tensor:
    try:
        return as_numbers(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(
            f"train: {what} must be numbers, got {type(value).__name__} ({error}). Classes are numbered 0, 1, …"
        ) from error


def _labels(y: Tensor, c: int) -> Tensor:
    """Class labels below c."""
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
    return y


def _real_targets(y: Tensor, c: int, loss: str) -> Tensor:
    """Finite targets of shape (n, c)."""
    if not y.dtype.is_floating_point:
        raise LabelError(
            f"train: loss {loss!r} needs real targets, got {y.dtype}. Use loss='cross_entropy' for class labels, "
            "or y.float()."
        )
    y = y[:, None] if y.ndim == 1 else y
    if y.shape != (len(y), c):
        raise ShapeError(f"train: targets have shape {tuple(y.shape)}, the network's outputs ({len(y)}, {c}).")
    if not torch.isfinite(y).all():
        raise NotFiniteError(
            f"train: targets contain NaN or infinity, first in row {int((~torch.isfinite(y)).any(1).nonzero()[0])}."
        )
    return y
