"""One self-contained HTML page from a list of artifacts: figures, claims with their verdicts, ledgers, environment.

Drawing lives in figures. The page loads nothing from anywhere: style, vector graphics and images are inside it. May
import artifacts and errors only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from pathlens.errors import ArtifactError
from pathlens.pages import full_page, save_page
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.pages.figures import draw, number, read_spread
from pathlens.papers.pages.palette import LABELS
from pathlens.papers.pages.words import (
    SIGNS,
    Table,
    duration,
    flat,
    mean_sd,
    paper_tables,
    reduced_sizes,
    reductions,
    summaries,
    tally,
    where_it_ran,
)

__all__ = ["headline", "write_page"]

_CIRCLE_TITLE = "What a gated network learns first"
_CIRCLE_LEAD = (
    "Small networks learn a curve on a circle that is slow on the top half and fast on the bottom half. The figures "
    "show which paths of each network are active where, how that changes while it trains, and what happens when its "
    "gates may not learn."
)
_REDUCED = '<span class="chip">REDUCED</span>'
_LEAD = (
    "Each section is one experiment: what was measured, next to what the paper claims. Verdicts are computed from the "
    "numbers, and what would have refuted a claim is printed beside it."
)


def write_page(
    artifacts: Iterable[Artifact],
    out: str | os.PathLike[str],
    *,
    title: str = "",
    lead: str = "",
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
        Heading and opening sentences; there are good ones for the circle experiments and plain ones for the rest.
    not_run : mapping, optional
        Name → why there is no artifact; these are listed at the end of the contents.
    remarks : mapping, optional
        Name → what a reader must know of how an artifact at paper scale came about.

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
    circle = all(artifact.name in ("hs.fig2", "hs.fig3", "hs.fig5", "hs.fig6") for artifact in shown)
    heading = title or (_CIRCLE_TITLE if circle else "Pathlens results")
    opening = lead or (_CIRCLE_LEAD if circle else _LEAD)
    told = remarks or {}
    sections = (
        _section(artifact, told.get(artifact.name, "") if artifact.scale == "paper" else "") for artifact in shown
    )
    return save_page(full_page(heading, opening, _contents(shown, not_run or {}), sections, _footer(shown)), out)


def headline(artifact: Artifact) -> str:
    """One line about an artifact: how many of its claims are reproduced, and the numbers of the first that decides.

    Examples
    --------
    >>> claim = Claim("more paths on top", threshold=2, comparison=">", null=1, measured=(31.0, 11.0, 74.0))
    >>> headline(Artifact("hs.fig3", "Paths", "half-space", "quick", claims=(claim,)))
    'Figure 3 (1 of 1 claims reproduced): more paths on top: 31 (11–74), needed above 2'
    """
    if not artifact.claims:
        return f"{_short(artifact.name)}: {artifact.title}"
    start = f"{_short(artifact.name)} ({tally(artifact, 'claims ')}): "
    claim = next((c for c in artifact.claims if artifact.verdict_of(c) == artifact.verdict), artifact.claims[0])
    numbers = read_spread([value for value in claim.measured if value is not None])
    unit = f" {claim.unit}" if claim.unit else ""
    row = f"{claim.row}: " if claim.row else ""
    return f"{start}{row}{claim.text}: {numbers}{unit}, needed {SIGNS[claim.comparison]} {number(claim.threshold)}"


# --- parts of the page -----------------------------------------------------------------------------------------


def _anchor(artifact: Artifact) -> str:
    return f"{artifact.name}-{artifact.scale}".replace(".", "-")


def _contents(artifacts: Sequence[Artifact], not_run: Mapping[str, str]) -> str:
    """Links to the sections, and what has none; a page of several papers lists them paper by paper."""
    papers: dict[str, str] = {artifact.name.partition(".")[0]: artifact.paper for artifact in artifacts}
    papers |= {name.partition(".")[0]: "" for name in not_run if name.partition(".")[0] not in papers}
    full = len(papers) > 1 or bool(not_run)  # 'Figure 1' alone would not say of which paper
    lines = []
    for prefix, paper in papers.items():
        if full and paper:
            lines.append(f"<h3>{escape(paper)}</h3>")
        lines += [
            f'<a href="#{_anchor(artifact)}"><b>{escape(artifact.name if full else _short(artifact.name))}</b>'
            f'<span class="title">{escape(artifact.title)}</span>'
            f"{_REDUCED if artifact.reduced and artifact.scale == 'paper' else ''}{_verdict_chip(artifact.verdict)}</a>"
            for artifact in artifacts
            if artifact.name.startswith(f"{prefix}.")
        ]
        lines += [
            f'<div><b>{escape(name)}</b><span class="title">{escape(reason)}</span>'
            '<span class="chip">not run</span></div>'
            for name, reason in not_run.items()
            if name.startswith(f"{prefix}.")
        ]
    return f'<nav aria-label="Contents"{" class=names" if full else ""}>{"".join(lines)}</nav>'


def _short(name: str) -> str:
    """'Figure 2' for 'hs.fig2', 'Table 1' for 'hs.tab1', the name's own last word otherwise."""
    last = name.rpartition(".")[2]
    for start, word in (("fig", "Figure"), ("tab", "Table")):
        if last.startswith(start) and last[3:].isdigit():
            return f"{word} {last[3:]}"
    return last


def _verdict_chip(verdict: str) -> str:
    return f'<span class="chip verdict {verdict.replace(" ", "-")}">{verdict}</span>'


def _section(artifact: Artifact, remark: str) -> str:
    drawn = draw(artifact)
    parts = [
        f'<section id="{_anchor(artifact)}">',
        f'<p class="source">{_source(artifact)}</p>',
        f"<h2>{escape(artifact.title)}</h2>",
        _chips(artifact),
        f'<p class="remark">{escape(remark)}</p>' if remark else "",
    ]
    if drawn is not None:
        if drawn.models:
            keys = (
                f'<span><i class="key" style="background:var(--{LABELS[model][1]})"></i>{escape(LABELS[model][0])}'
                "</span>"
                for model in drawn.models
            )
            parts.append(f'<div class="legend">{"".join(keys)}</div>')
        parts += [f'<div class="row">{"".join(row)}</div>' for row in drawn.rows]
        if drawn.caption:
            parts.append(f'<p class="caption">{escape(drawn.caption)}</p>')
    if artifact.claims:
        parts.append(f'<ul class="claims">{"".join(_claim(artifact, claim) for claim in artifact.claims)}</ul>')
    parts += [
        _numbers("Measured, mean ± sd over seeds", summaries(artifact.metrics)),
        _numbers("The paper’s numbers", paper_tables(artifact)),
        _ledger(artifact),
        _settings(artifact),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _source(artifact: Artifact) -> str:
    """Which part of which paper, its name, and when, where and how long it ran."""
    part = _short(artifact.name)
    facts = [f"{part} of the {artifact.paper} paper" if " " in part else f"{artifact.paper} paper"]
    facts += [
        artifact.created[:10],
        where_it_ran(artifact) if artifact.environment else "",
        duration(artifact.duration_seconds) if artifact.duration_seconds else "",
    ]
    texts = [escape(fact) for fact in facts if fact]
    return " · ".join([texts[0], f"<code>{escape(artifact.name)}</code>", *texts[1:]])


def _chips(artifact: Artifact) -> str:
    labels = []
    for part, gates in artifact.gates.items():
        kind, rest = gates[:4], gates[4:]  # 'soft' or 'hard', and what is said of them
        labels.append(f"{part}: {kind} gates{rest}")
    labels.append(f"{artifact.scale} scale")
    if artifact.seeds:
        labels.append(f"{len(artifact.seeds)} seed{'s' * (len(artifact.seeds) > 1)}")
    if artifact.reduced:
        labels.append("REDUCED: not the paper’s sizes")
    chips = f'<ul class="chips">{"".join(f"<li class=chip>{escape(label)}</li>" for label in labels)}</ul>'
    if artifact.reduced and artifact.scale == "paper":  # at quick scale everything is smaller
        chips += f'<p class="note">REDUCED: {escape(reductions(artifact))}.</p>'
    return chips


def _claim(artifact: Artifact, claim: Claim) -> str:
    spread, unit = claim.spread, f" {claim.unit}" if claim.unit else ""
    if spread.count == 0:
        measured = "not measured"
    else:
        reached = spread.median is not None and math.isfinite(spread.median)
        where = f"median <b>{number(spread.median)}</b>{escape(unit) if reached else ''}"
        if spread.low != spread.high:
            where += f", range {number(spread.low)} to {number(spread.high)}"
            if (mean := mean_sd([value for value in claim.measured if value is not None])) != "–":
                where += f", mean {mean}"
        met = sum(value is True for value in claim.met)
        measured = f"{where}; {met} of {len(claim.measured)} meet it"
        if spread.missing:
            measured += f", {spread.missing} missing"
    null = f"if it were false: {number(claim.null)}" + (f" ({escape(claim.null_text)})" if claim.null_text else "")
    facts = [measured, f"needed: {SIGNS[claim.comparison]} {number(claim.threshold)}", null]
    if claim.paper:
        facts.append(f"paper: {escape(claim.paper)}")
    if (claim.needs, claim.agree) != (Claim.needs, Claim.agree):
        facts.append(f"decided by at least {claim.needs} value{'s' * (claim.needs > 1)} and {claim.agree:.0%} of all")
    row = f"{escape(claim.row)}: " if claim.row else ""
    alone = f" {_REDUCED}" if claim.reduced and not artifact.reduced else ""  # else the section says it of all rows
    return (
        f"<li>{_verdict_chip(artifact.verdict_of(claim))}<div><p>{row}{escape(claim.text)}{alone}</p>"
        f'<p class="numbers">{" · ".join(facts)}</p></div>{_strip(claim)}</li>'
    )


def _strip(claim: Claim) -> str:
    """The measured values as dots on a line, with the threshold, the side that meets it, and the null."""
    values = [value for value in claim.measured if value is not None]
    finite = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    marks = [*finite, claim.threshold, claim.null]
    positive = min(marks) > 0 and max(marks) / min(marks) > 20  # a logarithmic line where linear would squash
    place = math.log10 if positive else float
    low, high = min(map(place, marks)), max(map(place, marks))
    pad = 0.08 * (high - low) or 1.0
    never = any(value == math.inf for value in values)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        if math.isinf(value):
            return 244.0 if value > 0 else 2.0
        return 4 + (228 if never else 240) * (place(value) - low) / (high - low)

    edge = x(claim.threshold)
    start, end = (edge, 250.0) if claim.comparison.startswith(">") else (0.0, edge)
    dots = "".join(
        f'<circle cx="{x(value):.1f}" cy="28" r="4" fill="var(--ink)" fill-opacity=".55"/>' for value in values
    )
    needed, null = (f"{min(max(x(value), 22), 228):.1f}" for value in (claim.threshold, claim.null))
    return (
        '<svg class="strip" viewBox="0 0 250 58" aria-hidden="true">'
        f'<rect x="{start:.1f}" y="18" width="{max(end - start, 0):.1f}" height="20" rx="3" fill="var(--yes-back)"/>'
        '<path d="M0 28H250" stroke="var(--rule)"/>'
        f'<path d="M{edge:.1f} 16V40" stroke="var(--yes)" stroke-width="1.5"/>'
        f'<path d="M{x(claim.null):.1f} 16V40" stroke="var(--no)" stroke-width="1.5" stroke-dasharray="3 2"/>{dots}'
        f'<text x="{null}" y="11" text-anchor="middle">if false</text>'
        f'<text x="{needed}" y="53" text-anchor="middle">needed</text></svg>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _numbers(title: str, tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    return f"<details><summary>{title}</summary>{''.join(_table(head, rows) for head, rows in tables)}</details>"


def _ledger(artifact: Artifact) -> str:
    if not artifact.deviations and not artifact.reductions:
        return ""
    rows = [(d.paper, d.authors_code or "–", d.ours, d.why) for d in artifact.deviations]
    text = _table(("the paper says", "the authors’ code does", "we do", "why"), rows) if rows else ""
    sizes = reduced_sizes(artifact)
    if sizes:
        text += _table(("size", "here", "paper"), sizes)
    count = len(artifact.deviations) + len(sizes)
    return f"<details><summary>Where this run departs from the paper ({count})</summary>{text}</details>"


def _settings(artifact: Artifact) -> str:
    rows = flat(artifact.config)
    if artifact.seeds:
        rows.append(("seeds", ", ".join(map(str, artifact.seeds))))
    if not rows and not artifact.metrics:
        return ""
    text = _table(("setting", "value"), rows) if rows else ""
    if artifact.metrics:
        text += _table(("measured", "value"), flat(artifact.metrics))
    return f"<details><summary>Settings and measured numbers</summary>{text}</details>"


def _footer(artifacts: Sequence[Artifact]) -> str:
    seen: dict[str, None] = {}
    for artifact in artifacts:
        items = [f"{key} {value}" for key, value in artifact.environment.items() if value not in (None, "")]
        if items:
            seen[", ".join(items)] = None
    times = sorted(artifact.created for artifact in artifacts if artifact.created)
    lines = [f"<p>Measured on: {escape(text)}.</p>" for text in seen]
    if times:
        lines.append(f"<p>Finished {escape(times[-1].replace('T', ' ').replace('+00:00', ' UTC'))}.</p>")
    took = ", ".join(
        f"{artifact.name} {duration(artifact.duration_seconds)}" for artifact in artifacts if artifact.duration_seconds
    )
    if took:
        lines.append(f"<p>Duration, each with the training it needs: {escape(took)}.</p>")
    share = f"{Claim.agree:.0%}"
    lines.append(
        f"<p>Unless it says otherwise, a claim is reproduced when at least {share} of all seeds meet its "
        f"threshold and not reproduced when at least {share} miss it; anything between, or fewer than "
        f"{Claim.needs} seeds, cannot be told. Missing seeds count for neither side.</p>"
    )
    return f"<footer>{''.join(lines)}</footer>"
