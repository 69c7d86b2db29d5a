"""From soft gates to hard ones: `harden`, and the report of what it cost.

Gates of a half-space network are exact half-spaces only when they are hard, but hard gates have no gradient. What
trains networks in general lives in `training`; here is what turns one that was trained soft into a hard one.
"""

from pathlens.hardening.methods import METHODS, Hardened, harden
from pathlens.hardening.report import CellBound, HardeningReport, Score, cell_bound

__all__ = ["METHODS", "CellBound", "Hardened", "HardeningReport", "Score", "cell_bound", "harden"]
