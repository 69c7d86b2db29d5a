"""The targets and the loss of a network that learns from another one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.models.tracing import unwrapped
from pathlens.recording.inputs import accepting, computes_in
from pathlens.training.fingerprints import digest
from pathlens.training.inputs import Data, DataReader
from pathlens.training.options import Teacher, TrainingOptions
from pathlens.training.stack import Loss


class TeacherTargets:
    """Targets from a frozen copy of a teacher in eval mode, which is checked on the data.

    With cross-entropy the targets are probabilities, and the outputs of both networks are divided by the temperature
    first; any other loss gets the teacher's outputs.
    """

    def __init__(self, teacher: Teacher, options: TrainingOptions, data: Data, reader: DataReader) -> None:
        if not isinstance(options.loss, str) and not data.y.dtype.is_floating_point:
            raise OptionError(
                "train: with a teacher, a function as loss gets the teacher's outputs as targets, not labels. Use "
                "loss='cross_entropy', or give real targets."
            )
        x, outputs = data.x, reader.outputs(data.x)
        self.probabilities = options.loss == "cross_entropy"
        self.temperature = float(teacher.temperature)
        if self.temperature != 1 and not self.probabilities:
            raise OptionError(
                f"train: a temperature belongs to probabilities, so that it must be 1 with this loss, got "
                f"{self.temperature:g}. Use loss='cross_entropy'."
            )
        self.dtype = computes_in(teacher.network, x)
        copied = copy.deepcopy(unwrapped(teacher.network)).to(x.device, self.dtype)
        self.net: nn.Module = copied.eval().requires_grad_(False)
        self.autocast = options.execution.autocast
        with accepting(x, self.net, "train", "the teacher"):
            output = self.net(x[:1].clone())
        if not isinstance(output, Tensor) or output.shape != (1, outputs):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ShapeError(f"train: the teacher gives {got} for one row, the network (1, {outputs}).")

    def config(self) -> dict[str, Any]:
        """The temperature, and a text that changes with any layer or weight of the teacher."""
        state = [part for name, t in self.net.state_dict().items() for part in (name, t)]
        return {"temperature": self.temperature, "network": digest([repr(self.net), *state])}

    def targets(self, x: Tensor, leading: int) -> Tensor:
        """Targets for a batch whose first `leading` dimensions are members and rows."""
        rows = x.flatten(0, leading - 1).clone()  # a teacher may change its input, which the student also reads
        if rows.is_cuda and rows.ndim == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            out = self.net(rows)
        out = out.to(self.dtype).unflatten(0, x.shape[:leading])
        return (out / self.temperature).softmax(-1) if self.probabilities else out

    def loss(self, own: Loss) -> Loss:
        """The loss of a step against `targets`; `own` is the one against the data's targets."""
        return self._cross_entropy if self.probabilities else own

    def _cross_entropy(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy times the temperature.

        Its gradient with respect to the outputs is the difference of both probabilities, whatever the temperature.
        """
        log = (output / self.temperature).log_softmax(-1)
        return -self.temperature * (target * log).sum(-1).mean()
