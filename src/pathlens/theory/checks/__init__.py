"""Theorems as checks: every statement of the papers, executable, behind ``pathlens verify``.

Each module registers the checks of one paper; `verify` runs them. References are autograd and enumeration alone
(`reference`), the tested side is the package's own code. May import everything that theory may.
"""

from pathlens.theory.checks import half_space, deep_gated, convolution, variance, path_features, infinite, gated_linear  # noqa: F401, I001
from pathlens.theory.checks.registry import (
    PAPERS,
    VERDICTS,
    Check,
    Measured,
    Result,
    check,
    names,
    perform,
    select,
    verify,
)

__all__ = ["PAPERS", "VERDICTS", "Check", "Measured", "Result", "check", "names", "perform", "select", "verify"]
