"""What every explanation says first: how much of f it tells (R²), and how much its terms cancel.

May import only the errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import OptionError

#: Σ|terms|/|f| above which a list of some terms is printed with a warning: more is cancelled than is left
MISLEADING = 2.0


def r_squared(told: Tensor, f: Tensor) -> float:
    """1 − Σ(f − told)² / Σ(f − mean f)²; NaN where f varies by rounding alone, so that there is nothing to tell.

    >>> r_squared(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    spread = (f - f.mean()).square().sum()
    rounding = len(f) * (1e-12 * f.abs().max()).square()
    return math.nan if len(f) < 2 or bool(spread <= rounding) else float(1 - (f - told).square().sum() / spread)


def ratio(size: Tensor, f: Tensor) -> Tensor:
    """Σ|terms|/|f| per row: 1 where nothing cancels, infinite where everything does; 1 where there is nothing."""
    return torch.where(size > 0, size / f.abs(), torch.ones_like(size))


@dataclass(frozen=True, repr=False)
class Explanation:
    """Base of all explanations.

    Attributes
    ----------
    fidelity : float
        R² of what the explanation says to the network's output f, on the rows that it was made from. NaN where f does
        not vary over them.
    held_out : float or None
        The same on rows that it has not seen; None where it fits nothing and has seen none.
    cancellation : float
        Median over rows of Σ|terms|/|what they sum to|: 1 is none, 10 means that nine tenths of what is listed cancel.
    gates : str
        The network's gate function. Contributions use it as it is; paths, regions and counts are of hard gates.
    """

    fidelity: float
    held_out: float | None
    cancellation: float
    gates: str

    def _lines(self) -> list[str]:
        """What comes after the first line."""
        return []

    def __repr__(self) -> str:
        held = "" if self.held_out is None else f" (held out {self.held_out:.3f})"
        told = "R² undefined, f does not vary here" if math.isnan(self.fidelity) else f"R² {self.fidelity:.3f}{held}"
        head = f"{type(self).__name__}: {told}, cancellation {self.cancellation:.3g}, gates {self.gates}"
        return "\n".join([head, *("  " + line for line in self._lines())])


def positive(what: str, **numbers: Any) -> None:
    """Refuse what is not a whole number of at least 1; the keyword is what the message calls it."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise OptionError(f"{what}: {name} must be an integer of at least 1, got {value!r}.")


def shown(path: Sequence[int]) -> str:
    """A path as text: its units, those of a path that starts at a bias with dots before it.

    >>> shown([-1, 3, 0])
    '·→3→0'
    """
    return "→".join("·" if unit < 0 else str(unit) for unit in path)
