"""The page of one fitted estimator: how good it is, what it looks at, its half-spaces, and rows taken apart.

Made from the document that an estimator's `report` gathers, so neither the model nor torch is needed. May import the
errors and files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pathlens.errors import ArtifactError
from pathlens.pages import full_page, save_page

__all__ = ["MODEL_FORMAT", "write_model"]

MODEL_FORMAT = "pathlens-model"
_NEEDED = (
    "estimator",
    "rows",
    "features",
    "half_spaces",
    "in_use",
    "error",
    "output",
    "measure",
    "score",
    "simplest",
    "influence",
    "rules",
    "examples",
)
_STYLE = """
.bars { display: grid; grid-template-columns: minmax(8em, auto) minmax(120px, 1fr) auto; gap: 5px 14px;
  margin: 16px 0 0; font-size: 14.5px; align-items: center; }
.bars .track { position: relative; height: 14px; background: var(--raised); border-radius: 3px; }
.bars .track i { position: absolute; top: 0; height: 100%; border-radius: 3px; background: var(--relu); }
.bars .track i.favour { background: var(--dlgn); }
.bars .track i.plain { background: var(--off); }
.bars .name { overflow-wrap: anywhere; }
.bars .name small { color: var(--muted); font-size: 13px; }
.bars .value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.half-spaces { grid-template-columns: 1fr 110px auto; }
.half-spaces .name { font-size: 14px; }
article { border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px 18px; margin-top: 18px; }
article h3 { margin: 0 0 4px; font-size: 17px; }
article h4 { margin: 18px 0 0; }
.confusion { width: auto; }
.confusion th, .confusion td { min-width: 4.5em; text-align: right; }
.confusion td.right { font-weight: 600; }
.bars .line { display: contents; }
@media (max-width: 720px) {
  .bars { display: block; }
  .bars .line { display: grid; grid-template-columns: 1fr auto; gap: 2px 14px; margin-bottom: 8px; }
  .bars .track { grid-area: 2 / 1 / 3 / 3; }
}
"""


def write_model(document: Mapping[str, Any], out: str | os.PathLike[str], *, title: str = "", note: str = "") -> Path:
    """Write the page of a model and return its path.

    Parameters
    ----------
    document : mapping
        What the model says of itself, as its `report` gathers it.
    out : path
        A file that ends in ``.html``, or a folder, which gets ``index.html``.
    title : str
        What is predicted from what; the estimator's name by default.
    note : str
        Where the rows come from.

    Raises
    ------
    ArtifactError
        If the document is not one of ours, or the page cannot be written.
    """
    missing = [key for key in _NEEDED if key not in document]
    if document.get("format") != MODEL_FORMAT or missing:
        raise ArtifactError(
            f"write_model: the document is not that of a model: it lacks "
            f"{', '.join(missing) or 'format'}. Let the estimator write it: model.report(X, y, out)."
        )
    heading = title or str(document["estimator"])
    lead = (
        f"A network whose gates are {document['in_use']} half-spaces of {document['features']} features. What it "
        "predicts with is what is shown here, not an approximation of it."
    )
    sections = [_quality(document, note), _looks_at(document), _half_spaces(document), _examples(document)]
    footer = (
        f"<footer><p>Sums of contributions equal the outputs to a relative {document['error']:.0e}. "
        f"{escape(str(document['estimator']))}, {escape(str(document['half_spaces']))} half-spaces, of which "
        f"{escape(str(document['in_use']))} cut the training rows in two and matter.</p></footer>"
    )
    return save_page(full_page(heading, lead, "", sections, footer, _STYLE), out)


def _number(value: float) -> str:
    text = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text.replace("-", "−")


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + _number(value)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _bar(name: str, left: float, width: float, value: str, kind: str = "") -> str:
    """A line of bars: name is HTML, left and width shares of the track."""
    style = f'style="left:{100 * left:.2f}%;width:{max(100 * width, 0.4):.2f}%"'
    track = f'<span class="track"><i class="{kind}" {style}></i></span>'
    return f'<div class="line"><span class="name">{name}</span>{track}<span class="value">{value}</span></div>'


def _bars(lines: Iterable[str], kind: str = "") -> str:
    return f'<div class="bars {kind}">{"".join(lines)}</div>'


# --- sections --------------------------------------------------------------------------------------------------


def _quality(document: Mapping[str, Any], note: str) -> str:
    percent = document["measure"] == "accuracy"

    def told(score: float) -> str:
        return f"{100 * score:.1f} %" if percent else _number(score)

    simplest = document["simplest"]
    entries = [
        (str(document["estimator"]), document["score"], ""),
        *((one["what"], one["score"], "plain") for one in document.get("others", ())),
        (simplest["what"], simplest["score"], "plain"),
    ]
    lines = [_bar(escape(what), 0, min(max(score, 0), 1), told(score), kind) for what, score, kind in entries]
    what = f"{document['measure'].capitalize()} on {document['rows']:,} rows{f', {note}' if note else ''}."
    if not percent:
        what += (
            f" The mean error is {_number(document['mean_error'])}, where the standard deviation is "
            f"{_number(document['sd'])}."
        )
    return _section("How good it is", f'<p class="remark">{escape(what)}</p>', _bars(lines), _confusion(document))


def _confusion(document: Mapping[str, Any]) -> str:
    if "confusion" not in document:
        return ""
    labels = document["classes"]
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    rows = ""
    for k, (label, counts) in enumerate(zip(labels, document["confusion"])):
        cells = "".join(f"<td{' class=right' if j == k else ''}>{count:,}</td>" for j, count in enumerate(counts))
        rows += f"<tr><th>{escape(label)}</th>{cells}</tr>"
    return (
        '<p class="remark">Rows are the true classes, columns the predicted ones.</p><div class="scroll">'
        f'<table class="confusion"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _looks_at(document: Mapping[str, Any]) -> str:
    entries = document["influence"]
    if not entries:
        alone = "On these rows no feature changes its output."
        return _section("What it looks at", f'<p class="remark">{alone}</p>')
    largest = max(one["mean"] for one in entries)
    lead = (
        f"Mean size of what each feature contributes to the {document['output']} on the straight way from the "
        "means of the training rows to the row, with the jumps where half-spaces begin and end."
    )
    lines = [_bar(escape(one["feature"]), 0, one["mean"] / largest, _number(one["mean"])) for one in entries]
    return _section("What it looks at", f'<p class="remark">{escape(lead)}</p>', _bars(lines))


def _half_spaces(document: Mapping[str, Any]) -> str:
    entries = document["rules"]
    if not entries:
        alone = "None cuts the training rows in two: on them the model is linear."
        return _section("Its half-spaces", f'<p class="remark">{alone}</p>')
    largest = max(one["share"] for one in entries) or 1.0
    lead = (
        "A gate is open on one side of a plane. The most important ones, by how much the outputs would change on "
        "average if the gate were closed (share of all), and how many training rows lie inside. Coefficients are "
        "rounded."
    )
    lines = []
    for one in entries:
        where = f"<small>gate {escape(one['gate'])}, holds {100 * one['open']:.0f} %</small>"
        share = one["share"]
        lines.append(_bar(f"{escape(one['text'])} {where}", 0, share / largest, f"{100 * share:.1f} %"))
    return _section("Its half-spaces", f'<p class="remark">{escape(lead)}</p>', _bars(lines, "half-spaces"))


def _examples(document: Mapping[str, Any]) -> str:
    lead = (
        "Each prediction is a sum, exactly: what the model gives where all features are at their means, and what "
        "each feature adds by differing from its mean."
    )
    return _section(
        "Rows taken apart", f'<p class="remark">{escape(lead)}</p>', *(_example(one) for one in document["examples"])
    )


def _example(one: Mapping[str, Any]) -> str:
    def word(value: Any) -> str:
        return escape(_number(value) if isinstance(value, float) else str(value))

    sure = f", probability {100 * one['probability']:.1f} %" if "probability" in one else ""
    said, true = word(one["predicted"]), word(one["truth"])
    facts = f"Row {escape(one['name'])}: predicted <b>{said}</b>{sure}; in truth <b>{true}</b>."
    terms = [
        (f"{escape(t['feature'])} <small>{_number(t['at'])}, mean {_number(t['mean'])}</small>", t["contribution"])
        for t in one["terms"]
    ]
    parts = [("features at their means", one["base"]), *terms]
    if one["rest"]:
        parts.append(("all other features", one["rest"]))
    title = f"{escape(one['output'])} = {_number(one['value'])}"
    return (
        f"<article><h3>{escape(one['title'])}</h3><p>{facts}</p><h4>{title}</h4>{_sum(parts)}"
        f"{_half_spaces_of(one)}{_other(one['other'])}</article>"
    )


def _sum(parts: Sequence[tuple[str, float]]) -> str:
    """Bars to both sides of zero."""
    low, high = min(0.0, *(v for _, v in parts)), max(0.0, *(v for _, v in parts))
    span = (high - low) or 1.0
    return _bars(
        _bar(name, (min(value, 0.0) - low) / span, abs(value) / span, _signed(value), "favour" if value > 0 else "")
        for name, value in parts
    )


def _half_spaces_of(one: Mapping[str, Any]) -> str:
    if not one["half_spaces"]:
        return ""
    lines = "".join(
        f"<tr><td>{_signed(h['contribution'])}</td><td>{escape(h['text'])}</td></tr>" for h in one["half_spaces"]
    )
    return (
        "<details><summary>The same by half-spaces of the last layer, largest first</summary><div class=scroll>"
        f"<table><tbody>{lines}</tbody></table></div></details>"
    )


def _other(other: Mapping[str, Any]) -> str:
    title = "<h4>What would have to be different</h4>"
    if "none" in other:
        return f'{title}<p class="note">{escape(other["none"])}</p>'
    after = _number(other["after"]) if isinstance(other["after"], float) else str(other["after"])
    added = other["distance"] - other["unrounded"]
    but = f", apart from the {added:.1g} that rounding adds," if added > 1e-6 else ""
    proved = (
        f"It is proved that{but} no smaller change is enough."
        if other["nearest"]
        else f"It is proved that no change below {other['at_least']:.3g} is enough."
    )
    cells = ([c["feature"], *c["text"]] for c in other["changes"])  # texts that can be copied
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells)
    size = f"{other['distance']:.3g} standard deviations"
    note = (
        f"To be predicted {escape(after)}: changes of {size} in total. {proved} The values below work as "
        "they are printed."
    )
    head = "<thead><tr><th>feature</th><th>from</th><th>to</th></tr></thead>"
    return f'{title}<p class="note">{note}</p><div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'
