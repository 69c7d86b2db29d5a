"""The document of ``pathlens verify``, and its page: every statement of the papers, with the measured error.

The page is made from the document that ``pathlens verify --json`` writes, so neither the checks nor torch are needed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from pathlens.errors import ArtifactError
from pathlens.pages import render, save_page
from pathlens.papers.pages.words import environment_text, number

FORMAT: Literal["pathlens-verification"] = "pathlens-verification"
Verdict = Literal["holds", "printed form wrong, corrected holds", "fails"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_LEAD = (
    "Each statement of the papers was run on small networks in float64 and compared with brute force: autograd, sums "
    "over all paths, all signs of all weights. ‘Erratum’ means that the printed form is wrong and the corrected one, "
    "which is shown, holds. Every check also rejects a formula that is wrong on purpose."
)
_LOW, _HIGH = -17.0, 3.0  # decades that the strip shows


class CheckResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of one check; an error is None if it is not a finite number."""

    name: str
    paper: str
    where: str
    claim: str
    erratum: str = ""
    error: float | None
    tolerance: float
    printed_error: float | None
    detail: str = ""
    verdict: Verdict
    seconds: float = 0.0


class Verification(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The results of ``pathlens verify``, and the machine on which it ran."""

    format: Literal["pathlens-verification"]
    version: Literal[1] = 1
    environment: dict[str, Any] | None = None
    seconds: float | None = None
    checks: Annotated[list[CheckResult], msgspec.Meta(min_length=1)]


def write_verification(
    document: Verification | Mapping[str, Any] | str | os.PathLike[str], out: str | os.PathLike[str]
) -> Path:
    """Write the page of a verification and return its path.

    Parameters
    ----------
    document : Verification, mapping or path
        The results, or the file that ``pathlens verify --json FILE`` wrote.
    out : path
        A file that ends in ``.html``, or a folder, where ``index.html`` is written.

    Raises
    ------
    ArtifactError
        If the document is not a verification, is incomplete, or the page cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> one = {"name": "dgn.eq2", "paper": "Deep gated networks", "where": "equation 2", "claim": "ŷ = φᵀw",
    ...        "error": 1e-16, "tolerance": 1e-12, "printed_error": None, "verdict": "holds"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_verification({"format": FORMAT, "checks": [one]}, folder).name
    'index.html'
    """
    read = _read(document)
    papers: dict[str, list[CheckResult]] = {}
    for check in read.checks:
        papers.setdefault(check.paper, []).append(check)
    text = render(
        "papers/pages/verification.html",
        heading="Theorems as checks",
        lead=_LEAD,
        document=read,
        environment=environment_text(read.environment or {}),
        papers=papers,
        tally=_tally,
        anchor=_anchor,
        number=number,
        place=_place,
    )
    return save_page(text, out)


def _read(document: Verification | Mapping[str, Any] | str | os.PathLike[str]) -> Verification:
    try:
        if isinstance(document, (str, os.PathLike)):
            return msgspec.json.decode(Path(document).read_bytes(), type=Verification)
        return msgspec.convert(document, Verification)
    except (OSError, ValueError, RecursionError) as error:
        what = document if isinstance(document, (str, os.PathLike)) else "The verification"
        raise ArtifactError(f"{what} cannot be read: {error}. Write it with `pathlens verify --json FILE`.") from error


def _anchor(name: str) -> str:
    """A name as an anchor within the page: letters, digits, dots and hyphens only."""
    return re.sub(r"[^\w.-]+", "-", name)


def _tally(checks: Sequence[CheckResult]) -> str:
    counts = [sum(check.verdict == verdict for check in checks) for verdict in VERDICTS]
    return ", ".join(f"{count} {word}" for count, word in zip(counts, ("hold", "errata", "fail")) if count)


def _place(error: float | None) -> str:
    """Horizontal position of an error on the logarithmic strip: zero at the left end, None at the right."""
    decade = _LOW if error is not None and error <= 0 else math.log10(1e300 if error is None else min(error, 1e300))
    return f"{6 + 238 * (min(max(decade, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW):.1f}"
