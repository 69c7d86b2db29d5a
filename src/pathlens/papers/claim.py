"""Claims as inequalities with a verdict, and deviations from a paper.

A verdict is computed from measured numbers, never written by hand. Results on disk are in artifact.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import numpy as np

from pathlens.errors import OptionError

ORIGINS = ("paper", "summary", "question", "ours")
Verdict = Literal["reproduced", "not reproduced", "cannot tell"]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Spread:
    """Median and range of the values that are present, and the numbers of present and missing values."""

    median: float | None
    low: float | None
    high: float | None
    count: int
    missing: int


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper as an inequality, with the value to expect if it were false.

    The verdict follows from the measured values v_s, one per seed, and the threshold τ. With S values in total, some of
    which may be missing, it is

    * 'reproduced' if #{s : v_s ⋚ τ} ≥ ``agree``·S,
    * 'not reproduced' if #{s : v_s present and not v_s ⋚ τ} ≥ ``agree``·S,
    * 'cannot tell' otherwise, and whenever fewer than ``needs`` values are present.

    A missing seed therefore counts for neither side.

    Parameters
    ----------
    text : str
        The claim in words.
    above, below, at_least, at_most : float
        The finite threshold τ. Give exactly one of the four; its name determines how a value is compared with it. It is
        stored as ``threshold`` and ``comparison`` (">", "<", ">=", "<=").
    null : float
        The value to expect if the claim were false. It must fail the comparison; otherwise no value could refute the
        claim.
    null_text : str
        Where the null comes from.
    measured : sequence of float or None
        One value per seed; NaN and None mean missing, infinity is a value ("never reached").
    paper : str
        The numbers or words of the paper.
    unit : str
        Unit of the values, for display.
    row : str
        The row of a table that this claim is about; claims with the same text and different rows form the table.
    needs : int
        Smallest number of values that allows a verdict: 3, or 1 for results without randomness.
    agree : float
        Share of all seeds that must agree, in (½, 1].
    origin : {"paper", "summary", "question", "ours"} or None
        Origin of the claim: the paper itself, a summary of it, a question that it leaves open, or ourselves. None: not
        assigned yet.
    reduced : bool
        Whether this row was measured at other sizes than the paper's. If the whole artifact is REDUCED, all of its rows
        are, and a loaded artifact has True in each.

    Examples
    --------
    >>> ratio = Claim("more paths on top", above=2.0, null=1.0, null_text="as many as below")
    >>> ratio.measure([31.0, 11.0, 74.0]).verdict
    'reproduced'
    >>> ratio.measure([31.0, 1.2, float("nan")]).verdict
    'cannot tell'
    >>> ratio.measure([0.9, 1.2, 1.1]).spread
    Spread(median=1.1, low=0.9, high=1.2, count=3, missing=0)
    """

    text: str
    threshold: float = math.nan
    comparison: str = ""
    null: float = math.nan
    null_text: str = ""
    measured: tuple[float | None, ...] = ()
    paper: str = ""
    unit: str = ""
    row: str = ""
    needs: int = 3
    agree: float = 0.8
    origin: str | None = None
    reduced: bool = False
    above: InitVar[float | None] = None
    below: InitVar[float | None] = None
    at_least: InitVar[float | None] = None
    at_most: InitVar[float | None] = None

    def __post_init__(
        self, above: float | None, below: float | None, at_least: float | None, at_most: float | None
    ) -> None:
        where = f"Claim {self.text!r}"
        thresholds = zip(_COMPARISONS, (below, at_most, above, at_least))
        given = [(comparison, value) for comparison, value in thresholds if value is not None]
        if len(given) > 1:
            raise OptionError(f"{where} has {len(given)} thresholds. Give one of above, below, at_least and at_most.")
        for comparison, value in given:
            object.__setattr__(self, "comparison", comparison)
            object.__setattr__(self, "threshold", value)
        check_texts(self, ("text", "null_text", "paper", "unit", "row"), where)
        if self.origin is not None and self.origin not in ORIGINS:
            raise OptionError(f"{where}: origin must be one of {', '.join(ORIGINS)}, or None, got {self.origin!r}.")
        if not isinstance(self.reduced, bool):
            raise OptionError(f"{where}: reduced must be True or False, got {self.reduced!r}.")
        if self.comparison not in _COMPARISONS:
            raise OptionError(
                f"{where}: comparison must be one of {', '.join(_COMPARISONS)}, got {self.comparison!r}. "
                "Give the threshold as above, below, at_least or at_most."
            )
        for name in ("threshold", "null"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
                raise OptionError(
                    f"{where} needs a finite {name}, got {value!r}. Give the threshold, and the value "
                    "to expect if the claim were false."
                )
            object.__setattr__(self, name, float(value))
        if _COMPARISONS[self.comparison](self.null, self.threshold):
            raise OptionError(
                f"{where}: its null {self.null:g} already satisfies '{self.comparison} "
                f"{self.threshold:g}', so no value could refute it. Move the threshold past the null."
            )
        if not 0.5 < self.agree <= 1 or self.needs < 1:
            raise OptionError(
                f"{where}: agree must lie in (0.5, 1] and needs be at least 1, got {self.agree} and {self.needs}."
            )
        object.__setattr__(self, "measured", tuple(_number(value, where) for value in self.measured))

    def measure(self, values: Iterable[Any], row: str = "", *, reduced: bool = False) -> Claim:
        """The same claim with one measured value per seed, and optionally the table row that they belong to.

        ``reduced`` marks the row REDUCED if it was measured at other sizes than the rest of the artifact.
        """
        return dataclasses.replace(self, measured=tuple(values), row=row or self.row, reduced=reduced or self.reduced)

    @property
    def statement(self) -> tuple[str, float, str, float]:
        """Text, threshold, comparison and null: the claim without its measurements."""
        return self.text, self.threshold, self.comparison, self.null

    @property
    def met(self) -> tuple[bool | None, ...]:
        """For each seed, whether the value meets the threshold; None if it is missing."""
        compare = _COMPARISONS[self.comparison]
        return tuple(None if value is None else compare(value, self.threshold) for value in self.measured)

    @property
    def verdict(self) -> Verdict:
        """'reproduced', 'not reproduced' or 'cannot tell', computed from the values."""
        met = self.met
        if sum(value is not None for value in met) < self.needs:
            return "cannot tell"
        enough = self.agree * len(met) - 1e-9  # 0.8·5 must be 4 despite binary rounding
        if met.count(True) >= enough:
            return "reproduced"
        if met.count(False) >= enough:
            return "not reproduced"
        return "cannot tell"

    @property
    def spread(self) -> Spread:
        """Median and range over the seeds that are present."""
        there = sorted(value for value in self.measured if value is not None)
        missing = len(self.measured) - len(there)
        if not there:
            return Spread(None, None, None, 0, missing)
        low, high = there[(len(there) - 1) // 2], there[len(there) // 2]
        # low + (high − low)/2 would be inf − inf for two seeds that never reach the value
        median = low if low == high else (low + high) / 2
        return Spread(None if math.isnan(median) else median, there[0], there[-1], len(there), missing)


@dataclass(frozen=True)
class Deviation:
    """One deviation from a paper: what it states, what its code does (if known), what we do, and why."""

    paper: str
    ours: str
    why: str
    authors_code: str = "–"

    def __post_init__(self) -> None:
        check_texts(self, ("paper", "authors_code", "ours", "why"), "Deviation")


def check_texts(holder: Any, names: Iterable[str], where: str) -> None:
    """Raise an error unless the named attributes are strings."""
    for name in names:
        if not isinstance(getattr(holder, name), str):
            raise OptionError(f"{where}: {name} must be a string, got {getattr(holder, name)!r}.")


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several: 'not reproduced' if any is, 'reproduced' if all are, otherwise 'cannot tell'.

    Examples
    --------
    >>> combine_verdicts(["reproduced", "cannot tell"]), combine_verdicts(["reproduced", "not reproduced"])
    ('cannot tell', 'not reproduced')
    >>> combine_verdicts([])
    'cannot tell'
    """
    all_of_them = list(verdicts)
    if "not reproduced" in all_of_them:
        return "not reproduced"
    if all_of_them and all(verdict == "reproduced" for verdict in all_of_them):
        return "reproduced"
    return "cannot tell"


def _number(value: Any, where: str) -> float | None:
    """A float, or None for a missing value (None, NaN)."""
    if value is None:
        return None
    if not isinstance(value, (float, np.number)) and hasattr(value, "item"):
        value = value.item()  # a tensor of one number
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise OptionError(f"{where}: a measured value must be a number or None, got {value!r}.")
    return None if math.isnan(value) else float(value)
