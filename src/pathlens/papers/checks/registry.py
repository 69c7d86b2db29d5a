"""What a check is, the list of all checks, and how one becomes a verdict.

A check measures a *formula* against a reference. It is run with the formula that should hold, with the one that the
paper prints where that differs, and, by the tests, with formulas that are wrong on purpose: a check that cannot tell
them apart does not check anything. The checks themselves live beside this module. May import linops and the errors.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pathlens.errors import OptionError, unknown_name
from pathlens.progress import ProgressBar

__all__ = [
    "PAPERS",
    "VERDICTS",
    "Check",
    "Measured",
    "Result",
    "attempt",
    "check",
    "errata_table",
    "names",
    "perform",
    "select",
    "verify",
]

Verdict = Literal["holds", "printed form wrong, corrected holds", "fails"]
VERDICTS: tuple[Verdict, ...] = ("holds", "printed form wrong, corrected holds", "fails")

#: the first part of a check's name → the paper it belongs to
PAPERS = {
    "hs": "Half-space feature learning",
    "dgn": "Deep gated networks",
    "npf": "Neural path features",
    "gdln": "Gated deep linear networks",
}

Formula = Callable[..., Any]
AS_PRINTED = "as printed"

_CHECKS: dict[str, Check] = {}


@dataclass(frozen=True)
class Measured:
    """How far a formula is from its reference, and what else is worth a line.

    Attributes
    ----------
    error : float
        Relative unless the check says otherwise; anything but a finite number counts as a failure.
    detail : str
    """

    error: float
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """One statement of a paper, executable.

    Attributes
    ----------
    name : str
        Paper and statement, such as ``dgn.lemma3.1ii``.
    where : str
        How the paper calls it: 'Lemma 3.1 (ii)'.
    claim : str
        The statement that should hold, corrected where the printed one does not.
    tolerance : float
        Largest error that counts as 'holds'. Rounding for identities, stated for limits.
    measure : function
        Formula → `Measured`.
    formula : function
        The tested side, through the package's public code wherever it implements the thing.
    printed : function or None
        The printed formula, where it is wrong.
    erratum : str
        What is wrong with it, in a few words; empty where nothing is.
    mutants : dict description → function
        Formulas that are wrong on purpose; the printed one is among them.
    """

    name: str
    where: str
    claim: str
    tolerance: float
    measure: Callable[[Formula], Measured]
    formula: Formula
    printed: Formula | None = None
    erratum: str = ""
    mutants: Mapping[str, Formula] = field(default_factory=dict)

    @property
    def paper(self) -> str:
        """Title of the paper."""
        return PAPERS[self.name.partition(".")[0]]

    def __repr__(self) -> str:
        return f"Check({self.name}: {self.paper}, {self.where}; {self.claim}; tolerance {self.tolerance:g})"


@dataclass(frozen=True)
class Result:
    """What one check measured.

    Attributes
    ----------
    error, tolerance : float
    printed_error : float or None
        The same measure of the printed formula; None where the paper's own form is the one that was tested.
    detail : str
    seconds : float
    """

    check: Check
    error: float
    printed_error: float | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def tolerance(self) -> float:
        return self.check.tolerance

    @property
    def verdict(self) -> Verdict:
        """'fails' also where an erratum is claimed and the printed form passes: then the check cannot tell."""
        if not within(self.error, self.tolerance):
            return "fails"
        if self.printed_error is None:
            return "holds"
        return "fails" if within(self.printed_error, self.tolerance) else "printed form wrong, corrected holds"

    def __str__(self) -> str:
        """One line: verdict, name, paper, claim, errors, and what is wrong with the printed form."""
        printed = "" if self.printed_error is None else f"; as printed {self.printed_error:.2g}: {self.check.erratum}"
        return (
            f"{self.verdict}: {self.check.name} ({self.check.paper}, {self.check.where}): {self.check.claim}. "
            f"Error {self.error:.2g}, allowed {self.tolerance:g}{printed}."
        )

    def plain(self) -> dict[str, Any]:
        """The result as values that JSON can hold; an error that is no finite number is null."""
        return {
            "name": self.check.name,
            "paper": self.check.paper,
            "where": self.check.where,
            "claim": self.check.claim,
            "erratum": self.check.erratum,
            "error": _finite(self.error),
            "tolerance": self.tolerance,
            "printed_error": _finite(self.printed_error),
            "detail": self.detail,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
        }


def within(error: float, tolerance: float) -> bool:
    """Whether an error is a number and small enough.

    >>> within(1e-15, 1e-12), within(float("nan"), 1.0)
    (True, False)
    """
    return math.isfinite(error) and error <= tolerance


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def check(
    name: str,
    where: str,
    claim: str,
    *,
    tolerance: float,
    formula: Formula,
    printed: Formula | None = None,
    erratum: str = "",
    mutants: Mapping[str, Formula] | None = None,
) -> Callable[[Callable[[Formula], Measured | float]], Check]:
    """Register a measuring function as a check; see `Check` for the parameters.

    Refuses a name that is taken, a paper that is not on the list, an erratum without its printed formula, and a check
    without a single formula that it has to reject.
    """
    wrong = dict(mutants or {})
    if printed is not None:
        wrong[AS_PRINTED] = printed
    if not wrong:
        raise OptionError(f"check {name!r} has no mutant: give mutants={{'what is wrong': formula}} or printed=….")
    if (printed is None) != (not erratum):
        raise OptionError(f"check {name!r}: printed=… and erratum='…' go together.")
    if name in _CHECKS or name.partition(".")[0] not in PAPERS:
        raise OptionError(f"check {name!r}: the name is taken, or does not start with one of {', '.join(PAPERS)}.")

    def register(measure: Callable[[Formula], Measured | float]) -> Check:
        def measured(tested: Formula) -> Measured:
            found = measure(tested)
            return found if isinstance(found, Measured) else Measured(float(found))

        made = Check(name, where, claim, tolerance, measured, formula, printed, erratum, wrong)
        _CHECKS[name] = made
        return made

    return register


def names() -> list[str]:
    """Every check, in the order of the papers."""
    return list(_CHECKS)


def select(patterns: Iterable[str] = ()) -> list[Check]:
    """The checks that names or patterns such as ``dgn.*`` stand for, each once; all of them for no pattern."""
    wanted = list(patterns)
    if not wanted:
        return list(_CHECKS.values())
    chosen: dict[str, Check] = {}
    for pattern in wanted:
        matches = fnmatch.filter(names(), pattern)
        if not matches:
            raise unknown_name("check", pattern, names())
        chosen.update({name: _CHECKS[name] for name in matches})
    return list(chosen.values())


def perform(one: Check, mutant: str | None = None) -> Result:
    """Run one check, or what it says of one of its mutants."""
    start = time.perf_counter()
    if mutant is not None:
        found = one.measure(one.mutants[mutant])
        return Result(one, found.error, None, found.detail, time.perf_counter() - start)
    found = one.measure(one.formula)
    printed = None if one.printed is None else one.measure(one.printed).error
    return Result(one, found.error, printed, found.detail, time.perf_counter() - start)


def attempt(one: Check) -> Result:
    """Run one check; an error that it raises is a failure of this check, and the others can go on."""
    try:
        return perform(one)
    except Exception as error:
        return Result(one, math.nan, None, f"{type(error).__name__}: {error}")


def verify(patterns: Iterable[str] = ()) -> Iterator[Result]:
    """Run checks one after the other, with a progress bar where somebody watches.

    A check that raises an error has failed; the others go on.

    Parameters
    ----------
    patterns : strings
        Names, or patterns such as ``gdln.*``; all checks for none.

    Yields
    ------
    Result

    Examples
    --------
    >>> from pathlens.papers.checks import verify
    >>> for result in verify(["dgn.lemma3.1ii"]):
    ...     print(result.check.where, "–", result.verdict)
    Lemma 3.1 (ii), Lemma 7.5 (ii) – printed form wrong, corrected holds
    """
    chosen = select(patterns)
    with ProgressBar("checks", len(chosen)) as meter:
        for one in chosen:
            yield attempt(one)
            meter.advance()


def errata_table(results: Iterable[Result]) -> str:
    """The results whose printed form is wrong, as a Markdown table; docs/errata.md holds the one of all checks.

    Examples
    --------
    >>> print(errata_table(verify(["dgn.lemma3.1ii", "dgn.eq2"])))
    | check | where | error | as printed | what is wrong |
    |---|---|---|---|---|
    | `dgn.lemma3.1ii` | Lemma 3.1 (ii), Lemma 7.5 (ii) | ...e-16 | 0.67 | the factor d of Lemma 2.2 ... is missing |
    """
    rows = ["| check | where | error | as printed | what is wrong |", "|---|---|---|---|---|"]
    for r in results:
        if r.printed_error is not None:
            text = r.check.erratum.replace("|", "\\|")
            rows.append(f"| `{r.check.name}` | {r.check.where} | {r.error:.0e} | {r.printed_error:.2g} | {text} |")
    return "\n".join(rows)
