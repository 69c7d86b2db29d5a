"""Theorems as checks: every statement of the papers, executable, behind ``pathlens verify``.

Each module registers the checks of one paper, or of a part of it; `verify` runs them. References are autograd and
enumeration alone (`reference`), the tested side is the package's own code. May import everything that theory may.
"""

# fmt: off
# isort: off
# importing registers, and the order of the imports is the order of the checks
from pathlens.papers.checks import half_space
from pathlens.papers.checks import deep_gated, initialisation, adaptation, convolution
from pathlens.papers.checks import path_features, infinite
from pathlens.papers.checks import gated_linear, gate_patterns
# isort: on
# fmt: on
from pathlens.papers.checks.registry import (
    PAPERS,
    VERDICTS,
    Check,
    Measured,
    Result,
    attempt,
    check,
    errata_table,
    names,
    perform,
    select,
    verify,
)

__all__ = [
    "PAPERS",
    "VERDICTS",
    "Check",
    "Measured",
    "Result",
    "adaptation",
    "attempt",
    "check",
    "convolution",
    "deep_gated",
    "errata_table",
    "gate_patterns",
    "gated_linear",
    "half_space",
    "infinite",
    "initialisation",
    "names",
    "path_features",
    "perform",
    "select",
    "verify",
]
