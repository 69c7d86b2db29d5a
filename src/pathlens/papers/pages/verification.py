"""The page of ``pathlens verify``: every statement of the papers, with the error that was measured.

Made from the document that ``pathlens verify --json`` writes, so neither the checks nor torch are needed. May import
the errors and files.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pathlens.errors import ArtifactError
from pathlens.files import parse_json
from pathlens.pages import full_page, save_page
from pathlens.papers.pages.words import number

__all__ = ["FORMAT", "write_verification"]

FORMAT = "pathlens-verification"
_TEXTS, _NUMBERS = ("name", "paper", "where", "claim", "verdict"), ("error", "tolerance", "printed_error")
_NEEDED = (*_TEXTS, *_NUMBERS)
_CHIPS = {
    "holds": ("reproduced", "holds"),
    "fails": ("fails", "fails"),
    "printed form wrong, corrected holds": ("not-reproduced", "erratum"),
}
_LEAD = (
    "Each statement of the papers was run on small networks in float64 and compared with brute force: autograd, sums "
    "over all paths, all signs of all weights. ‘Erratum’ means that the printed form is wrong and the corrected one, "
    "which is shown, holds. Every check also rejects a formula that is wrong on purpose."
)
_STYLE = """
.verdict.fails { background: #b3261e; color: #fff; }
.claims li { grid-template-columns: 6.2em 1fr 250px; }
.claims .erratum { color: var(--no); font-size: 14px; }
.strip { height: 44px; }
@media (max-width: 720px) { .claims li { grid-template-columns: 1fr; } }
"""
_LOW, _HIGH = -17.0, 3.0  # decades that the strip shows


def write_verification(document: Mapping[str, Any] | str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the page of a verification and return its path.

    Parameters
    ----------
    document : mapping or path
        What ``pathlens verify --json FILE`` wrote, or that file.
    out : path
        A file that ends in ``.html``, or a folder, which gets ``index.html``.

    Raises
    ------
    ArtifactError
        If the document is not one of ours, is incomplete, or the page cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> one = {"name": "dgn.eq2", "paper": "Deep gated networks", "where": "equation 2", "claim": "ŷ = φᵀw",
    ...        "error": 1e-16, "tolerance": 1e-12, "printed_error": None, "verdict": "holds"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_verification({"format": FORMAT, "checks": [one]}, folder).name
    'index.html'
    """
    text = document if isinstance(document, Mapping) else _load(Path(document))
    checks = _checks(text)
    papers: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        papers.setdefault(check["paper"], []).append(check)
    sections = [
        f'<section id="{_anchor(paper.lower())}"><h2>{escape(paper)}</h2>'
        f'<ul class="claims">{"".join(map(_line, own))}</ul></section>'
        for paper, own in papers.items()
    ]
    return save_page(
        full_page("Theorems as checks", _LEAD, _contents(papers), sections, _footer(text, checks), _STYLE), out
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} cannot be read: {error}. Write it with `pathlens verify --json {path}`."
        ) from error
    return found if isinstance(found, dict) else {}


def _checks(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    checks = document.get("checks")
    if document.get("format") != FORMAT or not isinstance(checks, list) or not checks:
        raise ArtifactError(
            f"This is no verification: expected format {FORMAT!r} and a list of checks, got format "
            f"{document.get('format')!r}. Write one with `pathlens verify --json FILE`."
        )
    for check in checks:
        missing = [key for key in _NEEDED if key not in check] if isinstance(check, Mapping) else list(_NEEDED)
        missing = missing or _malformed(check)
        if missing or check["verdict"] not in _CHIPS:
            raise ArtifactError(
                f"A check of this verification lacks {', '.join(missing) or 'a known verdict'}. Write it again with "
                "`pathlens verify --json FILE`."
            )
    seconds, environment = document.get("seconds"), document.get("environment")
    if not (seconds is None or _is_number(seconds)) or not (environment is None or isinstance(environment, Mapping)):
        raise ArtifactError(
            "This verification has no readable seconds or environment. Write it again with `pathlens "
            "verify --json FILE`."
        )
    return checks


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 10**300  # a larger one is no float
    return isinstance(value, float)


def _malformed(check: Mapping[str, Any]) -> list[str]:
    """What is there but is no text, or no number, as it has to be."""
    wrong = [f"a text as {key}" for key in _TEXTS if not isinstance(check[key], str)]
    wrong += [f"a text as {key}" for key in ("erratum", "detail") if not isinstance(check.get(key) or "", str)]
    missing = ("error", "printed_error")  # None stands for no finite number
    return wrong + [
        f"a number as {key}"
        for key in _NUMBERS
        if not _is_number(check[key]) and not (check[key] is None and key in missing)
    ]


def _anchor(name: str) -> str:
    """A name as an address within the page: letters, digits, dots and hyphens only, which need no escaping."""
    return re.sub(r"[^\w.-]+", "-", name)


def _chip(verdict: str) -> str:
    kind, word = _CHIPS[verdict]
    return f'<span class="chip verdict {kind}">{word}</span>'


def _tally(checks: Sequence[Mapping[str, Any]]) -> str:
    words = {"holds": "hold", "printed form wrong, corrected holds": "errata", "fails": "fail"}
    found = [(sum(c["verdict"] == verdict for c in checks), word) for verdict, word in words.items()]
    return ", ".join(f"{count} {word}" for count, word in found if count)


def _contents(papers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    lines = (
        f'<a href="#{_anchor(paper.lower())}"><span class="title">{escape(paper)}</span>'
        f'<span class="chip">{_tally(own)}</span></a>'
        for paper, own in papers.items()
    )
    return f'<nav aria-label="Contents">{"".join(lines)}</nav>'


def _line(check: Mapping[str, Any]) -> str:
    facts = [f"error <b>{_read(check['error'])}</b>", f"allowed {number(check['tolerance'], 2)}"]
    if check.get("erratum"):
        facts.append(f"printed form <b>{_read(check['printed_error'])}</b>")
    if check.get("detail"):
        facts.append(escape(check["detail"]))
    erratum = f'<p class="erratum">{escape(check["erratum"])}</p>' if check.get("erratum") else ""
    source = f"{escape(check['where'])} · <code>{escape(check['name'])}</code>"
    return (
        f'<li id="{_anchor(check["name"])}">{_chip(check["verdict"])}<div><p class="source">{source}</p>'
        f'<p>{escape(check["claim"])}</p>{erratum}<p class="numbers">{" · ".join(facts)}</p></div>{_strip(check)}</li>'
    )


def _read(error: float | None) -> str:
    return "no finite number" if error is None else number(error, 2)


def _x(error: float) -> float:
    """Place of an error on the logarithmic strip; zero stands at its left end, what is not finite at its right."""
    decade = _LOW if error <= 0 else math.log10(min(error, 1e300))
    return 6 + 238 * (min(max(decade, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)


def _strip(check: Mapping[str, Any]) -> str:
    """The error as a dot and the printed form's as a ring, on decades; the allowed range is shaded."""
    edge = _x(check["tolerance"])
    error = math.inf if check["error"] is None else check["error"]
    dots = f'<circle cx="{_x(error):.1f}" cy="20" r="4.5" fill="var(--ink)"/>'
    if check["printed_error"] is not None:
        place = f"{_x(check['printed_error']):.1f}"
        dots += f'<circle cx="{place}" cy="20" r="4.5" fill="none" stroke="var(--no)" stroke-width="2"/>'
    marks = "".join(
        f'<text x="{_x(10.0**k):.0f}" y="42" text-anchor="middle">{word}</text>'
        for k, word in ((-15, "1e-15"), (-10, "1e-10"), (-5, "1e-5"), (0, "1"))
    )
    return (
        '<svg class="strip" viewBox="0 0 250 44" aria-hidden="true">'
        f'<rect x="0" y="10" width="{edge:.1f}" height="20" rx="3" fill="var(--yes-back)"/>'
        '<path d="M0 20H250" stroke="var(--rule)"/>'
        f'<path d="M{edge:.1f} 8V32" stroke="var(--yes)" stroke-width="1.5"/>{dots}{marks}</svg>'
    )


def _footer(document: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"<p>{len(checks)} checks: {_tally(checks)}. Errors are relative unless they count something; dots are "
        "what was measured, rings the printed form, green what is allowed.</p>"
    ]
    about = document.get("environment") or {}
    items = ", ".join(f"{key} {value}" for key, value in about.items() if value not in (None, ""))
    if items:
        lines.append(f"<p>Measured on: {escape(items)}.</p>")
    if document.get("seconds"):
        lines.append(f"<p>Duration {number(round(document['seconds'], 1))} s.</p>")
    return f"<footer>{''.join(lines)}</footer>"
