"""The choices of a fit: every parameter checked, "auto" resolved. Nothing is trained here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pathlens.errors import OptionError

_BATCH = 64  # rows per step with batch_size="auto"; small batches generalised better than large ones
_EPOCHS = (20, 60)  # epochs="auto": at least 20 epochs, else as many as make 60 epochs or 300 to 1200 steps
_STEPS = (300, 1200)
_DECAY = (1.5, 2500.0, 10.0)  # weight_decay="auto": 2500 / n between 1.5 and 10, for layers of 64 units;
_WIDTH = 64  # AdamW lets weights grow to 1/decay, so that narrow layers, which add up fewer of them, need less
FEW = 100  # rows from which on weight_decay="auto" compares multiples of that value on held-out rows:
SHARES = (1.0, 3.0, 1 / 3, 1 / 10, 1 / 30)
FOLDS, JUDGED = 5, 500  # on as many fifths of the rows as hold 500 rows together, or on all five
_HARDENING = ("auto", "follow", "anneal")


@dataclass(frozen=True)
class Recipe:
    """Every choice of a fit, resolved."""

    hidden: tuple[int, ...]
    piecewise_constant: bool
    epochs: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float
    decays: tuple[float, ...]  # to choose from on held-out rows, `weight_decay` first; or that one alone
    splits: int  # how many of the folds are held out to choose
    beta: tuple[float, float]
    hardening: str
    restarts: int
    patience: int | None
    seed: int
    verbose: bool


def resolve(
    who: str,
    n: int,
    total: float,
    classes: int | None,
    seed: int,
    *,
    hidden: Any,
    epochs: Any,
    learning_rate: Any,
    weight_decay: Any,
    verbose: Any,
    batch_size: Any = "auto",
    beta: Any = (4.0, 1000.0),
    hardening: Any = "auto",
    piecewise_constant: Any = False,
    n_restarts: Any = 1,
    early_stopping: Any = False,
    patience: Any = 1,
) -> Recipe:
    """The recipe for n rows whose weights add up to `total`, of classes or numbers; or an error that names a parameter.

    Examples
    --------
    >>> choices = {"hidden": (8,), "epochs": "auto", "learning_rate": 0.01, "weight_decay": "auto", "verbose": False}
    >>> recipe = resolve("me", 640, 640.0, None, 0, **choices)
    >>> recipe.epochs, recipe.weight_decay
    (60, 0.48828125)
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
    if not (weight_decay == "auto" or (_number(weight_decay) and weight_decay >= 0)):
        raise refuse("weight_decay", weight_decay, "'auto' or a number that is not negative")
    if not (isinstance(beta, (tuple, list)) and len(beta) == 2 and all(map(_number, beta)) and 0 < beta[0] <= beta[1]):
        raise refuse("beta", beta, "(start, end) with 0 < start ≤ end, such as (4, 1000)")
    if not (isinstance(hardening, str) and hardening in _HARDENING):
        raise refuse("hardening", hardening, "'auto', 'follow' or 'anneal'")
    for name, value in (("n_restarts", n_restarts), ("patience", patience)):
        if not _count(value):
            raise refuse(name, value, "a positive integer")
    batch = _BATCH if batch_size == "auto" else batch_size
    batch = None if batch is None or batch >= n else int(batch)
    steps = 1 if batch is None else -(-n // batch)
    if epochs == "auto":
        wanted = min(max(_STEPS[0], _EPOCHS[1] * steps), _STEPS[1])
        epochs = max(_EPOCHS[0], -(-wanted // steps))
    shares = SHARES if weight_decay == "auto" and n >= FEW else SHARES[:1]
    if weight_decay == "auto":  # a function of the total weight, so that weights are repetitions
        weight_decay = min(max(_DECAY[0], _DECAY[1] / total), _DECAY[2]) * max(hidden) / _WIDTH
    return Recipe(
        hidden=tuple(int(w) for w in hidden),
        piecewise_constant=bool(piecewise_constant),
        batch_size=batch,
        epochs=int(epochs),
        learning_rate=float(learning_rate),
        weight_decay=float(weight_decay),
        decays=tuple(float(weight_decay) * share for share in shares),
        splits=min(FOLDS, -(-JUDGED * FOLDS // n)),
        beta=(float(beta[0]), float(beta[1])),
        hardening=hardening,
        restarts=int(n_restarts),
        patience=int(patience) if early_stopping else None,
        seed=seed,
        verbose=bool(verbose),
    )


def _count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
