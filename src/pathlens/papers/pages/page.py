"""One self-contained HTML page from a list of artifacts: figures, claims with verdicts, deviations, environment.

The text of the page is in ``templates/results.html``; figures are drawn in charts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pathlens.errors import ArtifactError
from pathlens.pages import render, save_page
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.pages import words
from pathlens.papers.pages.charts import draw

_LEAD = (
    "Each section is one experiment: what was measured, next to what the paper claims. Verdicts are computed from the "
    "numbers. The value to expect if a claim were false is printed beside it."
)


def write_page(
    artifacts: Iterable[Artifact],
    out: str | os.PathLike[str],
    *,
    title: str = "Pathlens results",
    lead: str = _LEAD,
    not_run: Mapping[str, str] | None = None,
    remarks: Mapping[str, str] | None = None,
) -> Path:
    """Write the page and return its path.

    Parameters
    ----------
    artifacts : iterable of Artifact
        In the order of the sections; at least one.
    out : path
        A file that ends in ``.html``, or a folder, where ``index.html`` is written.
    title, lead : str
        Heading and opening sentences.
    not_run : mapping, optional
        Name → reason why there is no artifact; listed at the end of the contents.
    remarks : mapping, optional
        Name → remark on how an artifact at paper scale was made.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page([Artifact("dgn.fig9", "Eight paths", "deep gated networks", "quick")], folder).name
    'index.html'
    """
    shown = list(artifacts)
    if not shown:
        raise ArtifactError("There is no artifact to put on the page. Run `pathlens run NAME --out …` first.")
    contents = _contents(shown, not_run or {})
    text = render(
        "papers/pages/results.html",
        heading=title,
        lead=lead,
        contents=contents,
        full_names=len(contents) > 1 or bool(not_run),  # 'Figure 1' alone does not identify the paper
        artifacts=shown,
        remarks=remarks or {},
        environments=dict.fromkeys(filter(None, (words.environment_text(artifact.environment) for artifact in shown))),
        durations=", ".join(f"{a.name} {words.duration(a.duration_seconds)}" for a in shown if a.duration_seconds),
        needs=Claim.needs,
        agree=Claim.agree,
        words=words,
        draw=draw,
        is_finite=lambda value: value is not None and math.isfinite(value),
        percent="{:.0%}".format,
        short_name=_short_name,
        strip=_strip,
    )
    return save_page(text, out)


def headline(artifact: Artifact) -> str:
    """One line about an artifact: how many of its claims are reproduced, and the numbers of the decisive claim.

    Examples
    --------
    >>> claim = Claim("more paths on top", above=2, null=1, measured=(31.0, 11.0, 74.0))
    >>> headline(Artifact("hs.fig3", "Paths", "half-space", "quick", claims=(claim,)))
    'Figure 3 (1 of 1 claims reproduced): more paths on top: 31 (11–74), needed above 2'
    """
    if not artifact.claims:
        return f"{_short_name(artifact.name)}: {artifact.title}"
    start = f"{_short_name(artifact.name)} ({words.tally(artifact, 'claims ')}): "
    claim = next((c for c in artifact.claims if artifact.verdict_of(c) == artifact.verdict), artifact.claims[0])
    numbers = words.read_spread([value for value in claim.measured if value is not None])
    unit = f" {claim.unit}" if claim.unit else ""
    row = f"{claim.row}: " if claim.row else ""
    needed = f"{words.SIGNS[claim.comparison]} {words.number(claim.threshold)}"
    return f"{start}{row}{claim.text}: {numbers}{unit}, needed {needed}"


# --- what the template shows -----------------------------------------------------------------------------------


def _short_name(name: str) -> str:
    """'Figure 2' for 'hs.fig2', 'Table 1' for 'hs.tab1', the last part of the name otherwise."""
    last = name.rpartition(".")[2]
    for start, word in (("fig", "Figure"), ("tab", "Table")):
        if last.startswith(start) and last[3:].isdigit():
            return f"{word} {last[3:]}"
    return last


def _contents(artifacts: Sequence[Artifact], not_run: Mapping[str, str]) -> list[dict[str, Any]]:
    """Artifacts and experiments that were not run, paper by paper."""
    papers: dict[str, dict[str, Any]] = {}

    def group(name: str) -> dict[str, Any]:
        return papers.setdefault(name.partition(".")[0], {"paper": "", "artifacts": [], "not_run": []})

    for artifact in artifacts:
        group(artifact.name)["paper"] = artifact.paper
        group(artifact.name)["artifacts"].append(artifact)
    for name, reason in not_run.items():
        group(name)["not_run"].append((name, reason))
    return list(papers.values())


def _strip(claim: Claim) -> dict[str, Any] | None:
    """Positions of the measured values, the threshold, the side that meets it and the null on a line 250 wide."""
    values = [value for value in claim.measured if value is not None]
    if not values:
        return None
    marks = [*filter(math.isfinite, values), claim.threshold, claim.null]
    positive = min(marks) > 0 and max(marks) / min(marks) > 20  # then use a logarithmic scale
    place = math.log10 if positive else float
    low, high = min(map(place, marks)), max(map(place, marks))
    pad = 0.08 * (high - low) or 1.0
    low, high = low - pad, high + pad
    width = 228 if math.inf in values else 240

    def x(value: float) -> float:
        if math.isinf(value):
            return 244.0 if value > 0 else 2.0
        return 4 + width * (place(value) - low) / (high - low)

    threshold = x(claim.threshold)
    start, end = (threshold, 250.0) if claim.comparison.startswith(">") else (0.0, threshold)
    return {
        "places": [x(value) for value in values],
        "threshold": threshold,
        "null": x(claim.null),
        "start": start,
        "end": end,
    }
