"""From soft gates to hard gates: `harden` converts a trained network and reports the cost; `train_hard` trains one.

Gates of a half-space network are exact half-spaces only if they are hard, but hard gates have no gradient. The training
loop itself is in `training`.
"""

from pathlens.hardening.methods import METHODS, Hardened, harden
from pathlens.hardening.report import CellBound, HardeningReport, Score, cell_bound
from pathlens.hardening.training import HardRuns, train_hard

__all__ = [
    "METHODS",
    "CellBound",
    "HardRuns",
    "Hardened",
    "HardeningReport",
    "Score",
    "cell_bound",
    "harden",
    "train_hard",
]
