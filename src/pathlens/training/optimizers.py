"""Optimizers and learning-rate schedulers of `train`, by name or made by a factory of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pathlens.errors import OptionError, unknown_name
from pathlens.training.schedules import Schedule

OptimizerFactory = Callable[..., Optimizer]  #: params → optimizer, for example torch.optim.SGD or a partial of it
SchedulerFactory = Callable[[Optimizer], LRScheduler]

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# they need the shape of each weight, or several evaluations in a step; `train` has the weights of a network as a vector
_UNSUPPORTED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def make_optimizer(
    optimizer: str | OptimizerFactory, leaves: Sequence[Tensor], settings: Sequence[Mapping[str, float]]
) -> Optimizer:
    """An optimizer with one group for each leaf, which has the settings of that leaf: lr, weight_decay, …"""
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    for name in ("lr", "weight_decay"):
        if name in getattr(factory, "keywords", {}):  # of a functools.partial
            raise OptionError(f"train: {name} is an argument of train, not of the optimizer. Give train(…, {name}=…).")
    try:
        made = factory([{"params": [leaf], **s} for leaf, s in zip(leaves, settings)])
    except (TypeError, ValueError) as error:
        raise OptionError(f"train: the optimizer cannot be made for the weights of a network: {error}") from error
    if not isinstance(made, Optimizer):
        raise OptionError(f"train: optimizer must make a torch.optim.Optimizer, got {type(made).__name__}.")
    if type(made).__name__ in _UNSUPPORTED:
        raise OptionError(
            f"train: {type(made).__name__} is not supported: the update of a weight may depend on its own gradients "
            "only. Use for example torch.optim.Adam."
        )
    for s in settings:
        for name in s.keys() - made.defaults.keys():
            if name != "weight_decay" or s[name]:
                raise unknown_name(f"setting of {type(made).__name__}", name, [*made.defaults, "beta"])
    on_cuda = leaves[0].is_cuda
    for group in made.param_groups:
        if type(made) in _FUSED and group["fused"] is None and not group["foreach"]:
            group["fused"] = True
        if on_cuda and "capturable" in group:
            group["capturable"] = True
    if on_cuda and in_cuda_graph(made):
        for group in made.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=leaves[0].device)  # a CUDA graph reads it from memory
    return made


def in_cuda_graph(optimizer: Optimizer) -> bool:
    """Whether a CUDA graph can hold the step of an optimizer."""
    return all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def is_scheduler_factory(scheduler: Any) -> bool:
    """Whether a scheduler of `train` is called with the optimizer: a class of PyTorch, or a parameter `optimizer`."""
    made = getattr(scheduler, "func", scheduler)  # of a functools.partial
    if isinstance(made, type):
        return issubclass(made, LRScheduler)
    try:
        return next(iter(inspect.signature(scheduler).parameters), None) == "optimizer"
    except (TypeError, ValueError):  # built-in functions may have no signature
        return False


def make_scheduler(factory: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """A scheduler of PyTorch for the optimizer."""
    made = factory(optimizer)
    if not isinstance(made, LRScheduler):
        raise OptionError(
            f"train: scheduler must make a torch.optim.lr_scheduler.LRScheduler, got {type(made).__name__}."
        )
    if isinstance(made, ReduceLROnPlateau):
        raise OptionError(
            "train: ReduceLROnPlateau needs one loss, and each network has its own. Use a scheduler of epochs, or "
            "stopping=Stopping(patience=…)."
        )
    return made


def learning_rate(schedule: Schedule, progress: float) -> float:
    """The factor on the learning rate."""
    try:
        return float(schedule(progress))
    except TypeError as error:
        if "is not an Optimizer" not in str(error):
            raise
        raise OptionError(
            "train: scheduler is a function of progress, but calls a scheduler of PyTorch. Name its parameter "
            "`optimizer`: lambda optimizer: StepLR(optimizer, 10)."
        ) from error
