"""Training: `train` for one network or many at once, its options, schedules, runs."""

from pathlens.training.inputs import LOSSES
from pathlens.training.loop import train
from pathlens.training.members import initialise
from pathlens.training.options import Checkpoints, Execution, Keep, Stopping, Teacher, TrainingState
from pathlens.training.runs import Runs
from pathlens.training.schedules import Geometric, cosine, one_cycle

__all__ = [
    "LOSSES",
    "Checkpoints",
    "Execution",
    "Geometric",
    "Keep",
    "Runs",
    "Stopping",
    "Teacher",
    "TrainingState",
    "cosine",
    "initialise",
    "one_cycle",
    "train",
]
