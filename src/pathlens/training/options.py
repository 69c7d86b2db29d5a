"""Options of `train` that belong together, and the state that callbacks of `train` receive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from pathlens.errors import OptionError, unknown_name
from pathlens.recording import Trajectory
from pathlens.training.inputs import LOSSES
from pathlens.training.optimizers import OPTIMIZERS, OptimizerFactory, SchedulerFactory
from pathlens.training.schedules import SCHEDULES, Schedule
from pathlens.training.stack import Loss, Penalty

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Keep:
    """What the trajectory of a training stores.

    Parameters
    ----------
    epochs : sequence of int
        Epochs at which a Moment is kept: the weights, and the record on `X`. 0 is the initialisation, the last is the
        `epochs` of `train`.
    losses : sequence of float
        A Moment is also kept when the loss is below one of these for the first time.
    X : inputs, optional
        Inputs on which the record of each Moment is taken. Default: Moments have no record.
    sensitivities : bool
        False leaves the output sensitivities out of the records, and saves their backward pass.
    evaluate : {"full", "running"}, optional
        How the loss of an epoch is computed: in a pass over all data at its end, or as the mean over its batches.
        Default: "running" for a DataLoader or an IterableDataset, whose first loss in the history is then that of the
        first batch, and "full" for other data. A full pass reads a DataLoader once more after each epoch and before
        the first one, which also advances its generators.

    Examples
    --------
    >>> Keep([5, 0, 5]).epochs
    (0, 5)
    """

    epochs: Sequence[int] = ()
    losses: Sequence[float] = ()
    X: Any = None
    sensitivities: bool = True
    evaluate: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "losses"):
            given = getattr(self, name)
            if isinstance(given, Real | str):
                raise OptionError(f"Keep: {name} is a sequence, got {given}. Give [{given}].")
        object.__setattr__(self, "epochs", tuple(sorted(set(self.epochs))))
        object.__setattr__(self, "losses", tuple(self.losses))
        if self.evaluate not in (None, "full", "running"):
            raise OptionError(f"Keep: evaluate must be 'full' or 'running', got {self.evaluate!r}.")


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a training is saved, so that it resumes if interrupted.

    Parameters
    ----------
    folder : path
    every : int
        Epochs between two checkpoints. The last epoch is always saved.
    resume : bool
        False removes the checkpoints in the folder and starts over.
    """

    folder: str | Path
    every: int = 10
    resume: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path):
            raise OptionError(f"Checkpoints: folder must be a path, got {type(self.folder).__name__}.")
        _check_count("Checkpoints: every", self.every)
        object.__setattr__(self, "folder", Path(self.folder))


@dataclass(frozen=True)
class Execution:
    """How a training is computed. The options change its speed, and at most the last bits of its numbers.

    Parameters
    ----------
    compile : bool
        Capture the step once and replay it; on CUDA also fuse it and run it as a CUDA graph.
    autocast : torch.dtype, optional
        Lower precision of the forward pass, for example ``torch.bfloat16``. Weights and updates keep theirs.
    threads : int, optional
        CPU threads while training. Default: torch's setting, but one thread if a step is too small to share.
    """

    compile: bool = True
    autocast: torch.dtype | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compile, bool):
            raise OptionError(f"Execution: compile must be True or False, got {self.compile!r}.")
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            raise OptionError(f"Execution: autocast must be a dtype such as torch.bfloat16, got {self.autocast!r}.")
        if self.threads is not None:
            _check_count("Execution: threads", self.threads)


@dataclass(frozen=True)
class Stopping:
    """When a training ends before its last epoch.

    Parameters
    ----------
    patience : int, optional
        A network stops if its validation loss has not improved for this many epochs. Its history ends there, and it
        gets the weights of its best epoch. The training ends when every network has stopped; networks that have not
        stopped by the last epoch also get their best weights.
    loss_below : float, optional
        The training ends when the loss of every network is below.
    """

    patience: int | None = None
    loss_below: float | None = None

    def __post_init__(self) -> None:
        if self.patience is not None:
            _check_count("Stopping: patience", self.patience)
        if self.loss_below is not None and not isinstance(self.loss_below, Real):
            raise OptionError(f"Stopping: loss_below must be a number, got {self.loss_below!r}.")


@dataclass(frozen=True)
class Teacher:
    """A trained network whose outputs replace the targets of the data.

    Parameters
    ----------
    network : nn.Module
    temperature : float
        With cross-entropy the outputs of both networks are divided by it. Above 1 the targets also show which wrong
        classes are nearly right; 4 is usual.
    """

    network: nn.Module
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            raise OptionError(f"Teacher: expected a trained network, got {type(self.network).__name__}.")
        if getattr(self.network, "needs_rows", False):
            raise OptionError("Teacher: a table of gates has gates for its own examples only and cannot be a teacher.")
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, Real) or not 0 < t < math.inf:
            raise OptionError(f"Teacher: temperature must be a positive number, got {t!r}.")


@dataclass(frozen=True)
class TrainingState:
    """The state of a training, which every callback of `train` receives.

    Attributes
    ----------
    epoch : int
        Number of finished epochs; 0 before the first step.
    epochs : int
        Number of epochs in all.
    losses : tuple of float
        Loss of each network at this epoch; of a network that has stopped early, its last one.
    trajectories : tuple of Trajectory
        The trajectory of each network so far, with `history` and `moments`.
    """

    epoch: int
    epochs: int
    losses: tuple[float, ...]
    trajectories: tuple[Trajectory, ...]
    _networks: Callable[[], list[nn.Module]] = field(repr=False)

    @property
    def networks(self) -> list[nn.Module]:
        """The networks that are trained, with their current weights.

        The weights are copied into them when this is read, on the device of each network. Changes to them do not
        change the training.
        """
        return self._networks()


Callback = Callable[[TrainingState], Any]


@dataclass(frozen=True, eq=False)
class TrainingOptions:
    """The options of `train` that apply to all of its networks, checked."""

    epochs: int
    loss: str | Loss
    optimizer: str | OptimizerFactory
    batch_size: int | None
    scheduler: str | Schedule | SchedulerFactory
    beta: Schedule | None
    clip: float | None
    penalty: Penalty | None
    augment: str | None
    trained: str | None
    seed: int
    validation: Any
    stopping: Stopping
    teacher: Teacher | None
    keep: Keep
    checkpoints: Checkpoints | None
    device: Any
    execution: Execution
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        _check_count("train: epochs", self.epochs)
        if self.batch_size is not None:
            _check_count("train: batch_size", self.batch_size)
        for epoch in self.keep.epochs:
            if epoch not in range(self.epochs + 1):
                raise OptionError(
                    f"train: keep names epoch {epoch}, and epochs={self.epochs} has 0 (initialisation) to "
                    f"{self.epochs}. Leave it out, or train for longer."
                )
        for what, value, known in (
            ("loss", self.loss, LOSSES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("learning-rate scheduler", self.scheduler, SCHEDULES),
            ("augmentation", self.augment or "crop_flip", ["crop_flip"]),
        ):
            if not callable(value) and value not in known:
                raise unknown_name(what, value, known)
        if self.clip is not None and not self.clip > 0:
            raise OptionError(f"train: clip must be positive, or None for no clipping, got {self.clip}.")
        if self.beta is not None and not callable(self.beta):
            raise OptionError(
                f"train: beta is a schedule, a function of progress from 0 to 1, got {self.beta!r}. For a fixed β "
                "build the network with it, or give settings=[{'beta': …}]."
            )
        if callable(self.callbacks) or not all(callable(callback) for callback in self.callbacks):
            raise OptionError("train: callbacks is a sequence of functions. Give callbacks=[function].")

    @property
    def loss_function(self) -> Loss:
        """The loss as a function of (output, target)."""
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss


def as_option(kind: type[T], value: Any) -> T | None:
    """An option as its dataclass; a value of another type becomes its first field."""
    return value if value is None or isinstance(value, kind) else kind(value)  # type: ignore[call-arg]


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise OptionError(f"{name} must be an integer of at least 1, got {value!r}.")
