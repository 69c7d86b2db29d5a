"""The settings of a fit: parameters of an estimator, checked, and "auto" resolved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pathlens.errors import OptionError

_BATCH = 64  # rows per step with batch_size="auto"; small batches generalised better than large ones
_EPOCHS = (20, 60)  # epochs="auto": 60 epochs, but 300 to 1200 steps, and at least 20 epochs
_STEPS = (300, 1200)
_DECAY = (1.5, 2500.0, 10.0)  # weight_decay="auto": 2500 / n between 1.5 and 10, for layers of 64 units;
_WIDTH = 64  # AdamW lets weights grow to 1/decay; narrow layers sum fewer weights and need less decay
TUNED_FROM = 100  # rows; from here on weight_decay="auto" compares multiples of that value on held-out rows
DECAY_FACTORS = (1.0, 3.0, 1 / 3, 1 / 10, 1 / 30)
FOLDS, HELD_OUT_ROWS = 5, 500  # folds (of five) are held out in turn until they have 500 rows together


@dataclass(frozen=True)
class Recipe:
    """Settings of a fit, all resolved."""

    hidden: tuple[int, ...]
    piecewise_constant: bool
    epochs: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float
    decays: tuple[float, ...]  # candidates, `weight_decay` first; one alone if it is not tuned
    splits: int  # folds that are held out in turn to choose
    beta: tuple[float, float]
    hardening: str
    n_restarts: int
    patience: int | None
    seed: int
    verbose: bool


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))


def _is_beta(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value))
    return pair and 0 < value[0] <= value[1]


#: parameter → (whether a value is allowed, what is allowed)
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden": (
        lambda v: isinstance(v, (tuple, list)) and bool(v) and all(map(_is_count, v)),
        "a tuple of positive widths such as (32, 32)",
    ),
    "epochs": (lambda v: v == "auto" or _is_count(v), "'auto' or a positive integer"),
    "batch_size": (
        lambda v: v is None or v == "auto" or _is_count(v),
        "'auto', None (all rows) or a positive integer",
    ),
    "learning_rate": (lambda v: _is_number(v) and v > 0, "a positive number"),
    "weight_decay": (
        lambda v: v == "auto" or (_is_number(v) and v >= 0),
        "'auto' or a number of at least 0",
    ),
    "beta": (_is_beta, "(start, end) with 0 < start ≤ end, such as (4, 1000)"),
    "hardening": (
        lambda v: isinstance(v, str) and v in ("auto", "follow", "anneal"),
        "'auto', 'follow' or 'anneal'",
    ),
    "n_restarts": (_is_count, "a positive integer"),
    "patience": (_is_count, "a positive integer"),
}
_DEFAULTS: dict[str, Any] = {  # of estimators that have fewer parameters
    "batch_size": "auto",
    "beta": (4.0, 1000.0),
    "hardening": "auto",
    "piecewise_constant": False,
    "n_restarts": 1,
    "early_stopping": False,
    "patience": 1,
}


def resolve_recipe(estimator: Any, n: int, total: float, seed: int) -> Recipe:
    """The recipe of an estimator for n rows whose weights sum to `total`; raises an error for an invalid parameter.

    Examples
    --------
    >>> from pathlens import DLGNRegressor
    >>> recipe = resolve_recipe(DLGNRegressor(hidden=(8,)), 640, 640.0, seed=0)
    >>> recipe.epochs, recipe.weight_decay
    (60, 0.48828125)
    """
    given = _DEFAULTS | estimator.get_params(deep=False)
    for name, (allowed, wanted) in _ALLOWED.items():
        if not allowed(given[name]):
            raise OptionError(f"{type(estimator).__name__}: {name} must be {wanted}, got {given[name]!r}.")
    batch = _BATCH if given["batch_size"] == "auto" else given["batch_size"]
    batch = None if batch is None or batch >= n else int(batch)
    epochs, decay = given["epochs"], given["weight_decay"]
    if epochs == "auto":
        steps = 1 if batch is None else -(-n // batch)
        wanted_steps = min(max(_STEPS[0], _EPOCHS[1] * steps), _STEPS[1])
        epochs = max(_EPOCHS[0], -(-wanted_steps // steps))
    factors = DECAY_FACTORS if decay == "auto" and n >= TUNED_FROM else DECAY_FACTORS[:1]
    if decay == "auto":  # a function of the total weight, so a row of weight k is equivalent to k copies
        decay = min(max(_DECAY[0], _DECAY[1] / total), _DECAY[2]) * max(given["hidden"]) / _WIDTH
    return Recipe(
        hidden=tuple(int(w) for w in given["hidden"]),
        piecewise_constant=bool(given["piecewise_constant"]),
        batch_size=batch,
        epochs=int(epochs),
        learning_rate=float(given["learning_rate"]),
        weight_decay=float(decay),
        decays=tuple(float(decay) * factor for factor in factors),
        splits=min(FOLDS, -(-HELD_OUT_ROWS * FOLDS // n)),
        beta=(float(given["beta"][0]), float(given["beta"][1])),
        hardening=given["hardening"],
        n_restarts=int(given["n_restarts"]),
        patience=int(given["patience"]) if given["early_stopping"] else None,
        seed=seed,
        verbose=bool(given["verbose"]),
    )
