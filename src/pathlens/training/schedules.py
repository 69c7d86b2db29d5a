"""Schedules of the learning rate and of β, as functions of the share of training that is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pathlens.errors import OptionError

Schedule = Callable[[float], float]  #: progress in [0, 1] → value


@dataclass(frozen=True)
class Geometric:
    """From `start` to `end` in equal ratios over the first `until` of training, then constant.

    >>> beta = Geometric(4, 1000, until=0.9)
    >>> beta(0.0), round(beta(0.45), 1), beta(1.0)
    (4.0, 63.2, 1000.0)
    """

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and 0 < self.until <= 1):
            raise OptionError(f"Geometric: start and end must be positive and until in (0, 1], got {self}.")

    def __call__(self, progress: float) -> float:
        share = min(progress / self.until, 1.0)
        return float(self.start * (self.end / self.start) ** share)


def constant(progress: float) -> float:
    """Factor 1 throughout."""
    return 1.0


def cosine(progress: float) -> float:
    """Factor (1 + cos πt)/2, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def one_cycle(progress: float) -> float:
    """Linear warm-up over the first fifth, then linear to zero."""
    return progress / 0.2 if progress < 0.2 else max(0.0, (1 - progress) / 0.8)


SCHEDULES: dict[str, Schedule] = {"constant": constant, "cosine": cosine, "one_cycle": one_cycle}
