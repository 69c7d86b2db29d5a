"""One self-contained HTML page from a list of artifacts: figures, claims with verdicts, deviations, environment.

Here the values are prepared; ``templates/results.html`` has the words around them, and charts draws the figures.
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
from pathlens.papers.pages.charts import draw
from pathlens.papers.pages.words import (
    SIGNS,
    duration,
    flat,
    mean_sd,
    number,
    paper_tables,
    read_spread,
    reduced_sizes,
    reductions,
    summaries,
    tally,
    where_it_ran,
)

__all__ = ["headline", "write_page"]

_LEAD = (
    "Each section is one experiment: what was measured, next to what the paper claims. Verdicts are computed from the "
    "numbers, and what would have refuted a claim is printed beside it."
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
        A file that ends in ``.html``, or a folder, which gets ``index.html``.
    title, lead : str
        Heading and opening sentences.
    not_run : mapping, optional
        Name → why there is no artifact; these are listed at the end of the contents.
    remarks : mapping, optional
        Name → what a reader must know about how an artifact at paper scale was made.

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
        full_names=len(contents) > 1 or bool(not_run),  # 'Figure 1' alone would not say of which paper
        sections=[
            _section(artifact, (remarks or {}).get(artifact.name, "") if artifact.scale == "paper" else "")
            for artifact in shown
        ],
        environments=dict.fromkeys(filter(None, map(_environment, shown))),
        finished=max(artifact.created for artifact in shown).replace("T", " ").replace("+00:00", " UTC"),
        durations=", ".join(f"{a.name} {duration(a.duration_seconds)}" for a in shown if a.duration_seconds),
        needs=Claim.needs,
        agree=Claim.agree,
        signs=SIGNS,
        anchor=_anchor,
        is_finite=lambda value: value is not None and math.isfinite(value),
        mean_sd=mean_sd,
        number=number,
        percent="{:.0%}".format,
        reductions=reductions,
        short_name=_short_name,
        strip=_strip,
    )
    return save_page(text, out)


def headline(artifact: Artifact) -> str:
    """One line about an artifact: how many of its claims are reproduced, and the numbers of the first that decides.

    Examples
    --------
    >>> claim = Claim("more paths on top", threshold=2, comparison=">", null=1, measured=(31.0, 11.0, 74.0))
    >>> headline(Artifact("hs.fig3", "Paths", "half-space", "quick", claims=(claim,)))
    'Figure 3 (1 of 1 claims reproduced): more paths on top: 31 (11–74), needed above 2'
    """
    if not artifact.claims:
        return f"{_short_name(artifact.name)}: {artifact.title}"
    start = f"{_short_name(artifact.name)} ({tally(artifact, 'claims ')}): "
    claim = next((c for c in artifact.claims if artifact.verdict_of(c) == artifact.verdict), artifact.claims[0])
    numbers = read_spread([value for value in claim.measured if value is not None])
    unit = f" {claim.unit}" if claim.unit else ""
    row = f"{claim.row}: " if claim.row else ""
    return f"{start}{row}{claim.text}: {numbers}{unit}, needed {SIGNS[claim.comparison]} {number(claim.threshold)}"


# --- what the template shows -----------------------------------------------------------------------------------


def _anchor(artifact: Artifact) -> str:
    return f"{artifact.name}-{artifact.scale}".replace(".", "-")


def _short_name(name: str) -> str:
    """'Figure 2' for 'hs.fig2', 'Table 1' for 'hs.tab1', the last part of the name otherwise."""
    last = name.rpartition(".")[2]
    for start, word in (("fig", "Figure"), ("tab", "Table")):
        if last.startswith(start) and last[3:].isdigit():
            return f"{word} {last[3:]}"
    return last


def _contents(artifacts: Sequence[Artifact], not_run: Mapping[str, str]) -> list[dict[str, Any]]:
    """Artifacts and what was not run, paper by paper."""
    papers: dict[str, dict[str, Any]] = {}
    for artifact in artifacts:
        group = papers.setdefault(artifact.name.partition(".")[0], {"artifacts": [], "not_run": []})
        group["paper"] = artifact.paper
        group["artifacts"].append(artifact)
    for name, reason in not_run.items():
        group = papers.setdefault(name.partition(".")[0], {"paper": "", "artifacts": [], "not_run": []})
        group["not_run"].append((name, reason))
    return list(papers.values())


def _section(artifact: Artifact, remark: str) -> dict[str, Any]:
    part = _short_name(artifact.name)
    facts = [
        artifact.created[:10],
        where_it_ran(artifact) if artifact.environment else "",
        duration(artifact.duration_seconds) if artifact.duration_seconds else "",
    ]
    # gates are 'soft' or 'hard', followed by details
    labels = [f"{name}: {gates[:4]} gates{gates[4:]}" for name, gates in artifact.gates.items()]
    labels.append(f"{artifact.scale} scale")
    if artifact.seeds:
        labels.append(f"{len(artifact.seeds)} seed{'s' * (len(artifact.seeds) > 1)}")
    if artifact.reduced:
        labels.append("REDUCED: not the paper’s sizes")
    deviations = [[d.paper, d.authors_code or "–", d.ours, d.why] for d in artifact.deviations]
    sizes = [list(row) for row in reduced_sizes(artifact)]
    settings = flat(artifact.config)
    if artifact.seeds:
        settings.append(("seeds", ", ".join(map(str, artifact.seeds))))
    return {
        "artifact": artifact,
        "source": f"{part} of the {artifact.paper} paper" if " " in part else f"{artifact.paper} paper",
        "facts": filter(None, facts),
        "labels": labels,
        "remark": remark,
        "figure": draw(artifact),
        "tables": (
            ("Measured, mean ± sd over seeds", summaries(artifact.metrics)),
            ("The paper’s numbers", paper_tables(artifact)),
            (
                f"Where this run departs from the paper ({len(deviations) + len(sizes)})",
                _filled(
                    (["the paper says", "the authors’ code does", "we do", "why"], deviations),
                    (["size", "here", "paper"], sizes),
                ),
            ),
            (
                "Settings and measured numbers",
                _filled((["setting", "value"], settings), (["measured", "value"], flat(artifact.metrics))),
            ),
        ),
    }


def _filled(*tables: tuple[list[str], Sequence[Sequence[str]]]) -> list[tuple[list[str], Sequence[Sequence[str]]]]:
    return [table for table in tables if table[1]]


def _strip(claim: Claim) -> dict[str, Any] | None:
    """Where the measured values, the threshold, the side that meets it and the null are on a line 250 wide."""
    values = [value for value in claim.measured if value is not None]
    if not values:
        return None
    marks = [*filter(math.isfinite, values), claim.threshold, claim.null]
    positive = min(marks) > 0 and max(marks) / min(marks) > 20  # a logarithmic line where a linear one would squash
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


def _environment(artifact: Artifact) -> str:
    return ", ".join(f"{key} {value}" for key, value in artifact.environment.items() if value not in (None, ""))
