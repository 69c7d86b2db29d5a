"""The table of results as Markdown: every experiment there is, how it came out, or why it was not run.

It is made from artifacts alone, never typed, so that a test can say whether it is up to date. The page with figures is
made in page. May import artifacts and errors only.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathlens.errors import ArtifactError
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.pages.words import (
    SIGNS,
    duration,
    mean_sd,
    number,
    paper_tables,
    read_spread,
    reductions,
    summaries,
    tally,
    where_it_ran,
)

__all__ = ["NOT_RUN", "REMARKS", "Entry", "not_run", "remarks", "results_page"]

NOT_RUN, REMARKS = "not-run.toml", "remarks.toml"


@dataclass(frozen=True)
class Entry:
    """An experiment as the table names it: its name, paper, what it is, and what it is expected to cost."""

    name: str
    paper: str
    what: str
    cost: str = ""


def not_run(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name → why it was not run, from ``not-run.toml`` in a folder of artifacts; empty if there is no such file."""
    return _sentences(Path(folder) / NOT_RUN)


def remarks(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name → what a reader must know of how an artifact came about, from ``remarks.toml``; empty without one."""
    return _sentences(Path(folder) / REMARKS)


def _sentences(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f'{path} is not readable TOML ({error}). Write one line per experiment: "hs.tab2" = "reason".'
        ) from error
    for name, reason in found.items():
        if not isinstance(reason, str) or not reason:
            raise ArtifactError(
                f"{path}: {name!r} needs a reason in quotes, got {reason!r}. Names contain a dot and "
                'must be quoted, too: "hs.tab2" = "reason".'
            )
    return found


def results_page(
    entries: Sequence[Entry],
    artifacts: Iterable[Artifact],
    reasons: Mapping[str, str],
    remarked: Mapping[str, str] | None = None,
) -> str:
    """The Markdown text: an overview, one table per paper, then each experiment with its claims and departures.

    Parameters
    ----------
    entries : sequence of Entry
        Every experiment, in the order of the page.
    artifacts : iterable of Artifact
    reasons : mapping
        Name → why it was not run.
    remarked : mapping, optional
        Name → a remark on how its artifact came about.

    Raises
    ------
    ArtifactError
        If an experiment has neither an artifact nor a reason, or both, or if one of them belongs to no experiment; if a
        remark is on one that has no artifact.

    Examples
    --------
    >>> claim = Claim("half", threshold=0.4, comparison="<", null=0.5, measured=(0.1, 0.2, 0.3))
    >>> done = Artifact("hs.fig2", "Circle", "half-space", "paper", seeds=(0, 1, 2), claims=(claim,))
    >>> entries = [Entry("hs.fig2", "half-space", "a circle"), Entry("hs.tab2", "half-space", "a table", "4 h")]
    >>> text = results_page(entries, [done], {"hs.tab2": "needs a GPU"})
    >>> "| half | **reproduced** | 0.2 ± 0.1 | 0.2 (0.1–0.3) | below 0.4 | 0.5 |" in text
    True
    >>> "not run: needs a GPU" in text
    True
    """
    found: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        found.setdefault(artifact.name, []).append(artifact)
    remarked = remarked or {}
    _check({entry.name for entry in entries}, set(found), set(reasons))
    if lost := sorted(set(remarked) - set(found)):
        raise ArtifactError(
            f"Results of {', '.join(lost)}: there is a remark and no artifact. Remove it from {REMARKS}."
        )
    papers: dict[str, list[Entry]] = {}
    for entry in entries:
        papers.setdefault(entry.paper, []).append(entry)
    parts = ["# Results", _opening(entries, found)]
    for paper, those in papers.items():
        head = ("experiment", "what", "result", "claims", "seeds", "date", "device", "time")
        rows = [row for entry in those for row in _overview(entry, found.get(entry.name, ()), reasons)]
        parts += [f"## {paper}", _table(head, rows)]
    for paper, those in papers.items():
        shown = [artifact for entry in those for artifact in found.get(entry.name, ())]
        if shown:
            parts += [f"## {paper}: each experiment", *(_section(one, remarked.get(one.name, "")) for one in shown)]
    return "\n\n".join(parts) + "\n"


def _check(known: set[str], run: set[str], excused: set[str]) -> None:
    for names, what, remedy in (
        (known - run - excused, "neither an artifact nor a reason why it was not run", f"Add it to {NOT_RUN}."),
        (run & excused, f"an artifact and a reason in {NOT_RUN}", "Remove the reason."),
        ((run | excused) - known, "no experiment of that name", "Remove its artifact or its reason."),
    ):
        if names:
            raise ArtifactError(f"Results of {', '.join(sorted(names))}: there is {what}. {remedy}")


def _opening(entries: Sequence[Entry], found: Mapping[str, Sequence[Artifact]]) -> str:
    done = [artifact for those in found.values() for artifact in those]
    full = [artifact for artifact in done if artifact.scale == "paper" and not artifact.reduced]
    tally = {
        verdict: sum(artifact.verdict == verdict for artifact in full)
        for verdict in ("reproduced", "not reproduced", "cannot tell")
    }
    left = len(entries) - len(found)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.items())
    rest = f"; {left} {'was' if left == 1 else 'were'} not run" if left else ""
    return (
        f"Of {len(entries)} experiments, {len(full)} were run at the paper's sizes ({counts}) and "
        f"{len(done) - len(full)} at smaller ones{rest}.\n\n"
        "This page is made from the artifacts in `results/` by `pathlens results`; no number on it is "
        "typed, only reasons and remarks are. A verdict "
        f"follows from the measured values, one per seed: a claim is reproduced if at least {Claim.agree:.0%} of the "
        f"seeds meet what is needed, not reproduced if at least {Claim.agree:.0%} miss it, and otherwise it cannot be "
        "told; an experiment is reproduced if all of its claims are. What would be seen if a claim were false stands "
        "beside it. REDUCED marks runs of other sizes than the paper's, which cannot be called reproduced: there the "
        "table counts the claims that are met. "
        "`pathlens report results` makes a page with the figures."
    )


def _overview(entry: Entry, artifacts: Sequence[Artifact], reasons: Mapping[str, str]) -> list[list[str]]:
    if not artifacts:
        cost = f" (expected: {entry.cost})" if entry.cost else ""
        return [[_Markdown(f"`{entry.name}`"), entry.what, f"not run: {reasons[entry.name]}{cost}", *[""] * 5]]
    rows = []
    for artifact in artifacts:
        scale = "" if artifact.scale == "paper" else f" ({artifact.scale})"
        rows.append(
            [
                _Markdown(f"[`{entry.name}`](#{_anchor(artifact)})"),
                entry.what,
                _Markdown(f"{_verdict(artifact.verdict)}{scale}{', REDUCED' if artifact.reduced else ''}"),
                tally(artifact),
                str(len(artifact.seeds) or "–"),
                artifact.created[:10] or "–",
                where_it_ran(artifact),
                duration(artifact.duration_seconds),
            ]
        )
    return rows


def _section(artifact: Artifact, remark: str) -> str:
    facts = [f"{artifact.scale} scale"]
    if artifact.seeds:
        facts.append(f"{len(artifact.seeds)} seeds")
    facts += [artifact.created[:10], where_it_ran(artifact), duration(artifact.duration_seconds)]
    facts += [f"{part}: {gates}" for part, gates in artifact.gates.items()]
    title = artifact.title if artifact.title.endswith("?") else f"{artifact.title}."
    parts = [
        f"### {_heading(artifact)}",
        f"{_text(title)} {_verdict(artifact.verdict)}. {_text(' · '.join(fact for fact in facts if fact))}",
    ]
    if artifact.reduced:
        parts.append(f"REDUCED: {_text(reductions(artifact))}.")
    if remark:
        parts.append(f"**Remark:** {_text(remark)}")
    head = ("claim", "verdict", "mean ± sd", "median (range)", "needed", "if false", "the paper")
    parts.append(_table(head, [_claim(artifact, claim) for claim in artifact.claims]))
    for said, tables in (("Measured:", summaries(artifact.metrics)), ("The paper's numbers:", paper_tables(artifact))):
        parts += [said] * bool(tables)
        parts += [_table(head, rows) for head, rows in tables]
    if artifact.deviations:
        ledger = [(d.paper, d.authors_code or "–", d.ours, d.why) for d in artifact.deviations]
        parts.append(_table(("the paper says", "the authors' code does", "we do", "why"), ledger))
    return "\n\n".join(parts)


def _claim(artifact: Artifact, claim: Claim) -> list[str]:
    there = [value for value in claim.measured if value is not None]
    missing = f", {len(claim.measured) - len(there)} missing" if len(there) < len(claim.measured) else ""
    text = f"{claim.row}: {claim.text}" if claim.row else claim.text
    unit = f" [{claim.unit}]" if claim.unit else ""
    remark = "" if there else " (not measured)"
    if claim.reduced and not artifact.reduced:
        remark += " (REDUCED)"
    if artifact.verdict_of(claim) != claim.verdict:
        remark = " (met, but REDUCED)"
    return [
        text + unit,
        _Markdown(_verdict(artifact.verdict_of(claim)) + remark),
        mean_sd(there),
        read_spread(there) + missing,
        f"{SIGNS[claim.comparison]} {number(claim.threshold)}",
        number(claim.null) + (f" ({claim.null_text})" if claim.null_text else ""),
        claim.paper or "–",
    ]


def _heading(artifact: Artifact) -> str:
    return artifact.name if artifact.scale == "paper" else f"{artifact.name} {artifact.scale}"


def _anchor(artifact: Artifact) -> str:
    return _heading(artifact).replace(".", "").replace(" ", "-")


def _verdict(verdict: str) -> str:
    return f"**{verdict}**"


class _Markdown(str):
    """A cell that is Markdown already: everything else in a table is plain text, whatever it begins with."""


def _text(text: str) -> str:
    """Words that Markdown must not take for marks."""
    for mark in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")

    body = [line(cell if isinstance(cell, _Markdown) else _text(cell) for cell in row) for row in rows]
    return "\n".join([line(map(_text, head)), line("---" for _ in head), *body])
