"""Training: `train` for one network or many at once, schedules, checkpoints."""

from pathlens.training.loop import LOSSES, initialise, train
from pathlens.training.runs import Runs
from pathlens.training.schedules import Geometric, cosine, one_cycle

__all__ = ["LOSSES", "Geometric", "Runs", "cosine", "initialise", "one_cycle", "train"]
