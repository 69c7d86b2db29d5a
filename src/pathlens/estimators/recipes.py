"""The choices of a fit: every parameter checked, "auto" resolved. Nothing is trained here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pathlens.errors import OptionError

_STEPS = 1200  # optimiser steps with epochs="auto"
_BATCH = 64  # rows per step with batch_size="auto"; small batches generalised better than large ones
_FEWEST_EPOCHS = 20


@dataclass(frozen=True)
class Recipe:
    """Every choice of a fit, resolved."""

    hidden: tuple[int, ...]
    piecewise_constant: bool
    epochs: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float
    beta: tuple[float, float]
    restarts: int
    patience: int | None
    seed: int
    verbose: bool


def resolve(
    who: str,
    n: int,
    seed: int,
    *,
    hidden: Any,
    epochs: Any,
    learning_rate: Any,
    weight_decay: Any,
    verbose: Any,
    batch_size: Any = "auto",
    beta: Any = (4.0, 1000.0),
    piecewise_constant: Any = False,
    n_restarts: Any = 1,
    early_stopping: Any = False,
    patience: Any = 1,
) -> Recipe:
    """The recipe for n rows, or an error that names the parameter.

    Examples
    --------
    >>> resolve("me", 640, 0, hidden=(8,), epochs="auto", learning_rate=0.01, weight_decay=0, verbose=False).epochs
    120
    """

    def refuse(name: str, value: Any, wanted: str) -> OptionError:
        return OptionError(f"{who}: {name} must be {wanted}, got {value!r}.")

    if not isinstance(hidden, (tuple, list)) or not hidden or not all(_count(w) for w in hidden):
        raise refuse("hidden", hidden, "a tuple of positive widths such as (32, 32)")
    if not (epochs == "auto" or _count(epochs)):
        raise refuse("epochs", epochs, "'auto' or a positive integer")
    if not (batch_size is None or batch_size == "auto" or _count(batch_size)):
        raise refuse("batch_size", batch_size, "'auto', None (all rows) or a positive integer")
    if not (_number(learning_rate) and learning_rate > 0):
        raise refuse("learning_rate", learning_rate, "a positive number")
    if not (_number(weight_decay) and weight_decay >= 0):
        raise refuse("weight_decay", weight_decay, "a number that is not negative")
    if not (isinstance(beta, (tuple, list)) and len(beta) == 2 and all(map(_number, beta)) and 0 < beta[0] <= beta[1]):
        raise refuse("beta", beta, "(start, end) with 0 < start ≤ end, such as (4, 1000)")
    for name, value in (("n_restarts", n_restarts), ("patience", patience)):
        if not _count(value):
            raise refuse(name, value, "a positive integer")
    batch = _BATCH if batch_size == "auto" else batch_size
    batch = None if batch is None or batch >= n else int(batch)
    steps = 1 if batch is None else -(-n // batch)
    return Recipe(
        hidden=tuple(int(w) for w in hidden), piecewise_constant=bool(piecewise_constant), batch_size=batch,
        epochs=max(_FEWEST_EPOCHS, round(_STEPS / steps)) if epochs == "auto" else int(epochs),
        learning_rate=float(learning_rate), weight_decay=float(weight_decay), beta=(float(beta[0]), float(beta[1])),
        restarts=int(n_restarts), patience=int(patience) if early_stopping else None, seed=seed, verbose=bool(verbose),
    )  # fmt: skip


def _count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
