"""Theorems as checks: every statement of the papers, executable, behind ``pathlens verify``.

Every module of this folder is imported, so adding a file adds its checks. They are listed paper by paper; within a
paper, modules are sorted by their number ``ORDER``. The tested side is the package's own code, the other side is
:mod:`pathlens.testing.reference`.
"""

import importlib
import pkgutil

from pathlens.papers.checks.registry import Check, Result, attempt, check, errata_table, names, perform, select, verify

__all__ = ["Check", "Result", "attempt", "check", "errata_table", "names", "perform", "select", "verify"]


def load() -> None:
    """Import every module of this folder, which registers its checks."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


load()
