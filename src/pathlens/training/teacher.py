"""A trained network that gives the targets of another one's training."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.training.stack import Loss


class Teacher:
    """What `train` asks instead of the data's targets: a frozen network in eval mode, on the training device.

    With cross-entropy its targets are probabilities, and both networks' outputs are divided by the temperature first;
    any other loss gets its outputs.
    """

    def __init__(
        self, net: nn.Module, loss: str | Loss, temperature: float, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        if not isinstance(net, nn.Module):
            raise OptionError(f"train: teacher must be a trained network, got {type(net).__name__}.")
        if getattr(net, "needs_rows", False):
            raise OptionError("train: a table of gates knows its own examples only, so that it cannot teach.")
        if not temperature > 0 or (temperature != 1 and loss != "cross_entropy"):
            raise OptionError(
                f"train: temperature must be positive, and 1 unless the loss is cross-entropy, got {temperature:g} "
                f"with loss {loss!r}."
            )
        self.net = copy.deepcopy(net).to(device).eval().requires_grad_(False)
        self.probabilities, self.temperature, self.autocast = loss == "cross_entropy", temperature, autocast

    def fingerprint(self) -> str:
        """Changes when any weight or the temperature does: a checkpoint belongs to one teacher."""
        digest = hashlib.sha256(f"{self.temperature}".encode())
        for name, t in self.net.state_dict().items():
            digest.update(f"{name} {tuple(t.shape)}".encode())
            digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, x: Tensor, outputs: int) -> None:
        """Refuse a teacher that does not take these inputs or has other outputs than the network."""
        try:
            shape = tuple(self.targets(x[:1], 1).shape)
        except RuntimeError as error:
            raise ShapeError(
                f"train: the teacher does not accept inputs of shape {tuple(x.shape)}: {error}"
            ) from error
        if shape != (1, outputs):
            raise ShapeError(f"train: the teacher gives {shape} for one row, the network (1, {outputs}).")

    def targets(self, x: Tensor, leading: int) -> Tensor:
        """Targets for a batch whose first `leading` dimensions are members and rows."""
        rows = x.flatten(0, leading - 1)
        if rows.is_cuda and rows.ndim == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            out = self.net(rows)
        out = out.to(x.dtype).unflatten(0, x.shape[:leading])
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
