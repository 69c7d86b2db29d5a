"""A trained network that gives the targets of another one's training."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.models.tracing import unwrapped
from pathlens.recording.inputs import accepting, computes_in
from pathlens.training.stack import Loss


class Teacher:
    """What `train` asks instead of the data's targets: a frozen copy of a network in eval mode, checked on the data.

    With cross-entropy its targets are probabilities, and both networks' outputs are divided by the temperature first;
    any other loss gets its outputs.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: str | Loss,
        temperature: float,
        x: Tensor,
        outputs: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise OptionError(f"train: teacher must be a trained network, got {type(net).__name__}.")
        if getattr(net, "needs_rows", False):
            raise OptionError("train: a table of gates knows its own examples only, so that it cannot teach.")
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
            raise OptionError(f"train: temperature must be a positive number, got {temperature!r}.")
        if temperature != 1 and loss != "cross_entropy":
            raise OptionError(
                f"train: a temperature belongs to probabilities, so that it must be 1 with this loss, got "
                f"{temperature:g}. Use loss='cross_entropy'."
            )
        self.dtype = computes_in(net, x)
        self.net: nn.Module = copy.deepcopy(unwrapped(net)).to(x.device, self.dtype).eval().requires_grad_(False)
        self.probabilities = loss == "cross_entropy"
        self.temperature = float(temperature)
        self.autocast = autocast
        with accepting(x, self.net, "train", "the teacher"):
            said = self.net(x[:1].clone())
        if not isinstance(said, Tensor) or said.shape != (1, outputs):
            got = tuple(said.shape) if isinstance(said, Tensor) else type(said).__name__
            raise ShapeError(f"train: the teacher gives {got} for one row, the network (1, {outputs}).")

    def config(self) -> dict[str, Any]:
        """What a checkpoint remembers: the temperature, and a number that changes when a layer or a weight does."""
        digest = hashlib.sha256(repr(self.net).encode())
        for name, t in self.net.state_dict().items():
            digest.update(f"{name} {tuple(t.shape)}".encode())
            digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"temperature": self.temperature, "network": digest.hexdigest()[:16]}

    def targets(self, x: Tensor, leading: int) -> Tensor:
        """Targets for a batch whose first `leading` dimensions are members and rows."""
        rows = x.flatten(0, leading - 1).clone()  # a teacher may change what it reads, and the student reads it too
        if rows.is_cuda and rows.ndim == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            out = self.net(rows)
        out = out.to(self.dtype).unflatten(0, x.shape[:leading])
        return (out / self.temperature).softmax(-1) if self.probabilities else out

    def loss(self, own: Loss) -> Loss:
        """The loss of a step against `targets`; `own` is the one against the data's targets.

        Cross-entropy is multiplied by the temperature: its gradient by the outputs is then the difference of the two
        sets of probabilities, whatever the temperature.
        """
        if not self.probabilities:
            return own
        return self._cross_entropy

    def _cross_entropy(self, output: Tensor, target: Tensor) -> Tensor:
        log = (output / self.temperature).log_softmax(-1)
        return -self.temperature * (target * log).sum(-1).mean()
