"""The definition of a check, the list of all checks, and their verdicts.

A check measures a *formula* against a reference. It is run with the formula that should hold, with the one that the
paper prints where that differs, and, by the tests, with formulas that are wrong on purpose: a check that accepts those
is useless.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pathlens.errors import OptionError, unknown_name
from pathlens.papers.pages.verification import CheckResult, Verdict
from pathlens.progress import ProgressBar
from pathlens.testing.reference import distance

#: the first part of a check's name → the paper it belongs to
PAPERS = {
    "hs": "Half-space feature learning",
    "dgn": "Deep gated networks",
    "npf": "Neural path features",
    "gdln": "Gated deep linear networks",
}

Formula = Callable[..., Any]
#: results of a check: pairs (found, expected), or errors that are numbers already, or remarks
Comparisons = Iterator[tuple[Any, Any] | float | str]
AS_PRINTED = "as printed"

_CHECKS: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """One statement of a paper, executable.

    Attributes
    ----------
    name : str
        Paper and statement, such as ``dgn.lemma3.1ii``.
    where : str
        Its place in the paper: 'Lemma 3.1 (ii)'.
    claim : str
        The statement that should hold, corrected where the printed one does not.
    tolerance : float
        Largest error that counts as 'holds': rounding for identities, larger for limits.
    compare : function
        Formula → comparisons with the reference. The error of the check is the largest of them: for a pair
        (found, expected) the relative distance, for a number the number itself.
    formula : function
        The tested side, through the package's public code wherever it implements the statement.
    printed : function or None
        The printed formula, where it is wrong.
    erratum : str
        What is wrong with it, in a few words; empty where nothing is.
    mutants : dict description → function
        Formulas that are wrong on purpose; the printed one is among them.
    order : float
        Place of the module among those of its paper.
    """

    name: str
    where: str
    claim: str
    tolerance: float
    compare: Callable[[Formula], Comparisons]
    formula: Formula
    printed: Formula | None = None
    erratum: str = ""
    mutants: Mapping[str, Formula] = field(default_factory=dict)
    order: float = math.inf

    @property
    def paper(self) -> str:
        """Title of the paper."""
        return PAPERS[self.name.partition(".")[0]]

    def measure(self, formula: Formula) -> tuple[float, str]:
        """Error of a formula (NaN if any comparison is NaN), and remarks."""
        errors, remarks = [], []
        for found in self.compare(formula):
            if isinstance(found, str):
                remarks.append(found)
            else:
                errors.append(distance(*found) if isinstance(found, tuple) else float(found))
        return float(np.max(errors)), "; ".join(remarks)

    def __repr__(self) -> str:
        return f"Check({self.name}: {self.paper}, {self.where}; {self.claim}; tolerance {self.tolerance:g})"


@dataclass(frozen=True)
class Result:
    """The measured errors of one check.

    Attributes
    ----------
    error : float
    printed_error : float or None
        The error of the printed formula; None where the paper's own form was tested.
    detail : str
        Remarks of the check, or the exception that it raised.
    seconds : float
    """

    check: Check
    error: float
    printed_error: float | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Whether the check holds; 'fails' also where a printed form that should be wrong passes."""
        if not within(self.error, self.check.tolerance):
            return "fails"
        if self.printed_error is None:
            return "holds"
        return "fails" if within(self.printed_error, self.check.tolerance) else "printed form wrong, corrected holds"

    def __str__(self) -> str:
        """One line: verdict, name, paper, claim, errors, and what is wrong with the printed form."""
        printed = "" if self.printed_error is None else f"; as printed {self.printed_error:.2g}: {self.check.erratum}"
        return (
            f"{self.verdict}: {self.check.name} ({self.check.paper}, {self.check.where}): {self.check.claim}. "
            f"Error {self.error:.2g}, allowed {self.check.tolerance:g}{printed}."
        )

    def document(self) -> CheckResult:
        """The result for the JSON file and the page; an error that is not finite is None."""
        return CheckResult(
            name=self.check.name,
            paper=self.check.paper,
            where=self.check.where,
            claim=self.check.claim,
            erratum=self.check.erratum,
            error=_finite(self.error),
            tolerance=self.check.tolerance,
            printed_error=_finite(self.printed_error),
            detail=self.detail,
            verdict=self.verdict,
            seconds=round(self.seconds, 3),
        )


def within(error: float, tolerance: float) -> bool:
    """Whether an error is a finite number and small enough.

    >>> within(1e-15, 1e-12), within(float("nan"), 1.0)
    (True, False)
    """
    return math.isfinite(error) and error <= tolerance


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def check(
    name: str,
    *,
    formula: Formula,
    printed: Formula | float | None = None,
    mutants: Mapping[str, Formula | float] | None = None,
    tolerance: float = 1e-12,
) -> Callable[[Callable[[Formula], Comparisons]], Check]:
    """Register a generator function as a check; see `Check` for the parameters.

    The docstring of the function is the statement: 'Where: claim', and after an empty line 'Erratum: …' where the
    printed formula is wrong. The function takes a formula and yields comparisons with the reference. A wrong formula
    may be given as a number, the factor by which it differs from the right one.

    Raises
    ------
    OptionError
        If the name is taken, the paper is unknown, the docstring is no statement, an erratum comes without its printed
        formula or the reverse, or there is no wrong formula that the check has to reject.
    """

    def register(compare: Callable[[Formula], Comparisons]) -> Check:
        statement, _, erratum = " ".join((compare.__doc__ or "").split()).partition(" Erratum: ")
        where, _, claim = statement.partition(": ")
        given = {**(mutants or {}), **({} if printed is None else {AS_PRINTED: printed})}
        wrong = {what: one if callable(one) else _multiplied(formula, one) for what, one in given.items()}
        if not claim:
            raise OptionError(f"check {name!r}: expected a docstring 'Where: claim', got {statement!r}.")
        if not wrong:
            raise OptionError(f"check {name!r} has no mutant: give mutants={{'what is wrong': formula}} or printed=….")
        if (printed is None) != (not erratum):
            raise OptionError(f"check {name!r}: printed=… and 'Erratum: …' in the docstring go together.")
        if name in _CHECKS or name.partition(".")[0] not in PAPERS:
            raise OptionError(f"check {name!r}: the name is taken, or does not start with one of {', '.join(PAPERS)}.")
        order = getattr(compare, "__globals__", {}).get("ORDER", math.inf)
        _CHECKS[name] = Check(
            name, where, claim, tolerance, compare, formula, wrong.get(AS_PRINTED), erratum, wrong, order
        )
        return _CHECKS[name]

    return register


def _multiplied(formula: Formula, factor: float) -> Formula:
    def wrong(*arguments: Any) -> Any:
        found = formula(*arguments)
        return [factor * one for one in found] if isinstance(found, list | tuple) else factor * found

    return wrong


def names() -> list[str]:
    """Every check, in the order of the papers."""
    papers = list(PAPERS)
    return sorted(_CHECKS, key=lambda name: (papers.index(name.partition(".")[0]), _CHECKS[name].order))


def select(patterns: Iterable[str] = ()) -> list[Check]:
    """The checks that match names or patterns such as ``dgn.*``, each once; all of them for no pattern."""
    chosen: dict[str, Check] = {}
    for pattern in list(patterns) or ["*"]:
        matches = fnmatch.filter(names(), pattern)
        if not matches:
            raise unknown_name("check", pattern, names())
        chosen.update({name: _CHECKS[name] for name in matches})
    return list(chosen.values())


def perform(one: Check, mutant: str | None = None) -> Result:
    """Run one check, or measure one of its mutants."""
    start = time.perf_counter()
    error, detail = one.measure(one.formula if mutant is None else one.mutants[mutant])
    printed = None if one.printed is None or mutant is not None else one.measure(one.printed)[0]
    return Result(one, error, printed, detail, time.perf_counter() - start)


def attempt(one: Check) -> Result:
    """Run one check; an exception counts as a failure of this check."""
    try:
        return perform(one)
    except Exception as error:
        return Result(one, math.nan, None, f"{type(error).__name__}: {error}")


def verify(patterns: Iterable[str] = ()) -> Iterator[Result]:
    """Run checks one after the other, with a progress bar; a check that raises an exception has failed.

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
    with ProgressBar("checks", len(chosen)) as progress:
        for one in chosen:
            yield attempt(one)
            progress.advance()


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
