"""The table of results as Markdown: every experiment with its result, or the reason why it was not run.

It is made from artifacts alone, so a test can check that it is up to date. The page with figures is made in page.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathlens.errors import ArtifactError
from pathlens.pages import render
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.pages import words

NOT_RUN, REMARKS = "not-run.toml", "remarks.toml"
_NOT_YET = "no run at paper scale yet"


@dataclass(frozen=True)
class Entry:
    """An experiment in the table: its name, paper, description, and expected cost."""

    name: str
    paper: str
    what: str
    cost: str = ""


def not_run(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name → reason why it was not run, from ``not-run.toml`` in a folder of artifacts; empty without such a file."""
    return _sentences(Path(folder) / NOT_RUN)


def remarks(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name → remark on how an artifact was made, from ``remarks.toml`` in a folder of artifacts; empty without it."""
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
        Name → reason why it was not run.
    remarked : mapping, optional
        Name → a remark on how its artifact was made.

    Raises
    ------
    ArtifactError
        If an experiment has both an artifact and a reason, if one of them belongs to no experiment, or if a remark
        belongs to an experiment without an artifact.

    Examples
    --------
    >>> claim = Claim("half", below=0.4, null=0.5, measured=(0.1, 0.2, 0.3))
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
    reasons = {entry.name: _NOT_YET for entry in entries if entry.name not in found} | dict(reasons)
    _check({entry.name for entry in entries}, set(found), set(reasons), set(remarked))
    papers: dict[str, list[Entry]] = {}
    for entry in entries:
        papers.setdefault(entry.paper, []).append(entry)
    done = [artifact for those in found.values() for artifact in those]
    text = render(
        "papers/pages/results.md",
        entries=entries,
        papers=papers,
        found=found,
        count=len(done),
        full=[artifact for artifact in done if artifact.scale == "paper" and not artifact.reduced],
        left=len(entries) - len(found),
        reasons=reasons,
        remarks=remarked,
        agree=f"{Claim.agree:.0%}",
        words=words,
        facts=_facts,
        heading=lambda one: one.name if one.scale == "paper" else f"{one.name} {one.scale}",
        text=_text,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _check(known: set[str], run: set[str], excused: set[str], remarked: set[str]) -> None:
    for names, what, remedy in (
        (run & excused, f"an artifact and a reason in {NOT_RUN}", "Remove the reason."),
        ((run | excused) - known, "no experiment of that name", "Remove its artifact or its reason."),
        (remarked - run, "a remark and no artifact", f"Remove it from {REMARKS}."),
    ):
        if names:
            raise ArtifactError(f"Results of {', '.join(sorted(names))}: there is {what}. {remedy}")


def _facts(artifact: Artifact) -> str:
    """Scale, seeds, date, device, duration and gates."""
    seeds = f"{len(artifact.seeds)} seeds" if artifact.seeds else ""
    facts = [f"{artifact.scale} scale", seeds, artifact.created[:10], words.where_it_ran(artifact)]
    facts += [
        words.duration(artifact.duration_seconds),
        *(f"{part}: {gates}" for part, gates in artifact.gates.items()),
    ]
    return " · ".join(filter(None, facts))


def _text(text: str) -> str:
    """The text with Markdown characters escaped."""
    for mark in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
