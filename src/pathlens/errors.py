"""Every exception and warning of the package, and errors for unknown names and missing optional packages.

A message has what failed and where, what was expected, what was given, and one remedy.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class PathlensError(Exception):
    """Base of every error that Pathlens raises on purpose."""


class PathlensWarning(UserWarning):
    """Base of every warning that Pathlens issues."""


# --- input -----------------------------------------------------------------------------------------------------


class ShapeError(PathlensError, ValueError):
    """An array or tensor has a shape that does not fit."""


class DTypeError(PathlensError, TypeError):
    """A dtype or device differs from what the operation needs."""


class NotFiniteError(PathlensError, ValueError):
    """NaN or infinity where finite numbers are needed."""


class LabelError(PathlensError, ValueError):
    """Class labels out of range, of the wrong type, or missing."""


class EmptyDataError(PathlensError, ValueError):
    """No rows where at least one is needed."""


class UnknownNameError(PathlensError, KeyError):
    """A name (kind, data set, optimiser, experiment) that is not on the list."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0])


class OptionError(PathlensError, ValueError):
    """An option has a value that is not allowed, or two options contradict each other."""


class MissingExtraError(PathlensError, ImportError):
    """An optional dependency is not installed."""


# --- models ----------------------------------------------------------------------------------------------------


class ConversionError(PathlensError, ValueError):
    """A module cannot be turned into a gated network; the message names the node and the remedy."""


class NoGateError(ConversionError):
    """A template has no ReLU, so there is nothing to gate."""


class SignalWarning(PathlensWarning):
    """A network may not start to learn: its output barely depends on its input, or its gates have no gradient."""


# --- records ---------------------------------------------------------------------------------------------------


class RecordError(PathlensError, ValueError):
    """A record cannot be taken or used: batch-norm in train mode, a missing site, mismatched rows."""


class UngatedWarning(PathlensWarning):
    """A recorded network has activations between its layers that are not gates; the record has no gates there."""


class BudgetError(PathlensError, MemoryError):
    """A memory budget is too small for even one row or tile."""


# --- kernel operators --------------------------------------------------------------------------------------------


class ScaleError(PathlensError, OverflowError):
    """Numbers of a kernel or of a table do not fit their dtype, or cannot be scaled."""


class SolverError(PathlensError, ArithmeticError):
    """A linear system or eigenproblem has no solution: not symmetric, not definite, not converged."""


class PrecisionWarning(PathlensWarning):
    """A linear system was solved, but rounding left a residual that affects results."""


class RowIndexError(PathlensError, IndexError):
    """A row or column index is outside a kernel or an explanation, or is not of a type that can index."""


# --- regions ---------------------------------------------------------------------------------------------------


class RegionError(PathlensError, ValueError):
    """A region is not available: gates that are no half-spaces, an empty or unbounded set, a bad path."""


# --- files -----------------------------------------------------------------------------------------------------


class FileFormatError(PathlensError, ValueError):
    """A file is truncated, corrupt, or not of the kind that its name suggests; it is left untouched."""


class CheckpointError(FileFormatError):
    """A checkpoint is truncated, corrupt, or belongs to another training run."""


class ArtifactError(FileFormatError):
    """An artifact has an unknown schema version, or is incomplete."""


class DataMissingError(PathlensError, FileNotFoundError):
    """A data set is not on this machine; the message describes how to get it."""

    def __str__(self) -> str:
        return str(self.args[0])


class DataCorruptError(FileFormatError):
    """A data file does not have the checksum of the published one."""


class StoreError(PathlensError, OSError):
    """A kernel or data set cannot be written: disk full, read-only, or in use. Finished parts stay."""


class StoreWarning(PathlensWarning):
    """Part of a kernel on disk was damaged and is computed again."""


class ResumeWarning(PathlensWarning):
    """Training resumes under another thread count, torch version or device: the bits may differ."""


# --- clusters --------------------------------------------------------------------------------------------------


class ClusterError(PathlensError, RuntimeError):
    """A Dask cluster cannot be reached or has no workers, or workers keep dying. Finished tasks are kept."""


# --- training --------------------------------------------------------------------------------------------------


class DivergedError(PathlensError, RuntimeError):
    """The loss became NaN or infinite."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not on a list, with the closest match.

    >>> print(unknown_name("kind", "dlng", ["dlgn", "relu"]))
    Unknown kind 'dlng'. Did you mean 'dlgn'? Known: dlgn, relu.
    >>> print(unknown_name("kind", "DLGN", ["dlgn", "relu"]))
    Unknown kind 'DLGN'. Did you mean 'dlgn'? Known: dlgn, relu.
    """
    names = sorted(known)
    lower = {known.lower(): known for known in names}  # so that 'DLGN' is close to 'dlgn'
    close = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    hint = f" Did you mean {lower[close[0]]!r}?" if close else ""
    return UnknownNameError(f"Unknown {what} {name!r}.{hint} Known: {', '.join(names)}.")


#: optional package → extra that installs it, and its purpose
EXTRAS = {
    "matplotlib": ("plot", "figures and pages"),
    "pandas": ("table", "tables"),
    "pillow": ("images", "packed image sets"),
    "numba": ("fast", "bit-counting kernels"),
    "zarr": ("scale", "kernels on disk"),
    "distributed": ("scale", "clusters"),
}


def need_extra(extra: str, package: str, purpose: str) -> MissingExtraError:
    """The error for an optional package that is absent.

    >>> print(need_extra("plot", "matplotlib", "drawing figures"))
    drawing figures needs matplotlib, which is not installed. Run: pip install 'pathlens[plot]'
    """
    return MissingExtraError(f"{purpose} needs {package}, which is not installed. Run: pip install 'pathlens[{extra}]'")


def import_extra(module: str, purpose: str) -> Any:
    """Import an optional module; without it, raise the error of `need_extra`."""
    top = module.partition(".")[0]
    try:
        importlib.import_module(top)
        return importlib.import_module(module)
    except ImportError as error:
        package = "pillow" if top == "PIL" else top
        raise need_extra(EXTRAS[package][0], package, purpose) from error
