"""Pages of documents that somebody else made: whatever stands in them, it is shown as text and never run."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathlens.errors import ArtifactError, OptionError
from pathlens.estimators.page import write_model_page
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.pages import Entry, results_page, write_page, write_verification
from pathlens.papers.panels import Panel, Series

PAYLOADS = (
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' onmouseover='alert(1)",
    "x onmouseover=alert(1)",
    "javascript:alert(1)",
    "</title></style></script><script>alert(1)</script>",
    "--><script>alert(1)</script><!--",
    "]]><script>alert(1)</script>",
    "\\g<0>\\1 'DejaVu Sans' #1c2431 $x$",
    "&quot;&gt;&lt;script&gt;",
    "**<script>alert(1)</script>",
    "`<script>alert(1)</script>",
)


class Reader(HTMLParser):
    """Every element and attribute of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def assert_harmless(path: Path, payload: str) -> None:
    page = Reader(path.read_text(encoding="utf-8"))
    assert not page.elements & {"script", "iframe", "object", "embed", "form", "base", "link"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href", "action"):
            assert value.startswith(("#", "data:image/png;base64,")), (name, value)
        if name == "style":
            assert "alert" not in value
        if name == "id":
            assert not set(value) & set(" <>\"'")
    assert payload in "".join(page.text), "it is shown as it is"


def poisoned(value: Any, payload: str, kept: tuple[str, ...] = ()) -> Any:
    """The same document with the payload behind every text, keys included but for those of ``kept``."""
    if isinstance(value, str):
        return value + payload
    if isinstance(value, dict):
        return {key: one if key in kept else poisoned(one, payload, kept) for key, one in value.items()}
    return [poisoned(one, payload, kept) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_page_of_artifacts(tmp_path: Path, payload: str) -> None:
    claim = Claim(
        payload,
        above=1,
        null=0,
        null_text=payload,
        measured=(2, 3, 4),
        paper=payload,
        unit=payload,
        row=payload,
        reduced=True,
    )
    nested = {payload: {payload: payload, "seeds": {"mean": 1.0, "seeds": [1.0, 2.0]}}, "list": [payload], "b": payload}
    made = Artifact(
        "hs.a",
        payload,
        payload,
        "paper",
        config=nested,
        seeds=(0, 1, 2),
        claims=[claim, dataclasses.replace(claim)],
        metrics=nested,
        paper_config=nested | {"b": payload + "2"},
        paper_numbers={payload: {"a": payload, "b": 1}},
        deviations=[Deviation(payload, payload, payload, payload)],
        gates={payload: "hard"},
        duration_seconds=1.0,
        created="2026-01-31T12:00:00+00:00",
        environment={payload: payload, "gpu": payload},
    )
    whole = dataclasses.replace(made, paper_config={})
    page = write_page(
        [made, whole],
        tmp_path / "index.html",
        title=payload,
        lead=payload,
        not_run={f"hs.{payload}": payload},
        remarks={"hs.a": payload},
    )
    assert_harmless(page, payload)
    text = results_page([Entry("hs.a", "p", "w")], [made], {}, {"hs.a": payload})
    assert "<script" not in text.replace("\\<", "")


@pytest.mark.parametrize("payload", [PAYLOADS[0], PAYLOADS[2], PAYLOADS[9]])  # few: drawing takes time
def test_the_panels_of_artifacts(tmp_path: Path, payload: str) -> None:
    words = {"x_label": payload, "y_label": payload, "note": payload}
    two, marks = [Series("a", payload), Series("b", payload + "2")], [(0.5, payload)]
    panels = [
        Panel("lines", payload, two, marks=marks, **words),
        Panel("strips", payload, two, marks=marks, **words),
        Panel("points", payload, [Series("a", payload, x="b")], **words),
        Panel("matrices", payload, two, **words),
        Panel("points", payload, [Series("a", payload, x="b", colour_by="a")], marks=marks, **words),
        Panel("fields", payload, two[:1], **words),
        Panel("stacks", payload, [Series("a[0]", payload)], x_ticks=marks, **words),
        Panel("half_spaces", payload, [Series("c", payload)], **words),
    ]
    arrays = {name: np.random.default_rng(0).random((2, 3)) for name in "ab"} | {"c": np.ones((2, 3, 2))}
    made = Artifact("hs.a", payload, payload, "paper", arrays=arrays, figures=panels)
    assert_harmless(write_page([made], tmp_path / "index.html"), payload)


CHECK = {
    "name": "n",
    "paper": "p",
    "where": "w",
    "claim": "c",
    "error": 1e-16,
    "tolerance": 1e-12,
    "printed_error": 0.5,
    "verdict": "holds",
    "erratum": "e",
    "detail": "d",
}
VERIFICATION = {
    "format": "pathlens-verification",
    "checks": [CHECK, {**CHECK, "paper": "p2"}],
    "seconds": 3.0,
    "environment": {"python": "3"},
}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_page_of_a_verification(tmp_path: Path, payload: str) -> None:
    document = poisoned(VERIFICATION, payload, ("format", "verdict"))
    document["environment"][payload] = payload
    (tmp_path / "v.json").write_text(json.dumps(document), encoding="utf-8")
    assert_harmless(write_verification(tmp_path / "v.json", tmp_path / "index.html"), payload)


@pytest.mark.parametrize(
    "changes",
    [
        *({key: wrong} for key in CHECK for wrong in ([1], {"a": 1}, True)),
        {"paper": 3},
        {"name": None},
        {"error": "1"},
        {"tolerance": None},
        {"tolerance": "<b>"},
        {"error": 10**400},
        {"verdict": "maybe"},
    ],
)
def test_a_verification_of_the_wrong_kind_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"at `\$\.checks\[0\].*verify --json"):
        write_verification({**VERIFICATION, "checks": [{**CHECK, **changes}]}, tmp_path)
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"format": "pathlens-verification"}', "\udcff"])
def test_other_files_are_no_verification(tmp_path: Path, text: str) -> None:
    (tmp_path / "v.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match="verify --json"):
        write_verification(tmp_path / "v.json", tmp_path)
    for wrong in ({"seconds": "<b>"}, {"environment": [1]}):
        with pytest.raises(ArtifactError, match="verify --json"):
            write_verification({**VERIFICATION, **wrong}, tmp_path)


MODEL = {
    "format": "pathlens-model",
    "estimator": "E",
    "rows": 9,
    "title": "t",
    "note": "n",
    "features": 3,
    "half_spaces": 4,
    "in_use": 2,
    "relative_error": 1e-15,
    "output": "o",
    "measure": "accuracy",
    "score": 0.9,
    "simplest": {"what": "s", "score": 0.5},
    "others": [{"what": "t", "score": 0.6}],
    "classes": ["a", "b"],
    "confusion": [[3, 1], [0, 5]],
    "influence": [{"feature": "f", "mean": 1.0}],
    "rules": [{"gate": "1", "open": 0.5, "text": "x > 0", "share": 0.3}],
    "examples": [
        {
            "row": 7,
            "name": "7",
            "title": "t",
            "predicted": "a",
            "truth": "b",
            "probability": 0.7,
            "output": "o",
            "value": 1.0,
            "base": 0.1,
            "rest": 0.2,
            "terms": [{"feature": "f", "at": 1.0, "mean": 0.5, "contribution": 0.7}],
            "half_spaces": [{"contribution": 0.4, "text": "x > 0"}],
            "no_change": "",
            "change": {
                "before": "a",
                "after": "b",
                "nearest": False,
                "at_least": 0.1,
                "distance": 0.3,
                "unrounded": 0.2,
                "changes": [{"feature": "f", "before": 1.0, "after": 0.2, "texts": ["1", "0.2"]}],
            },
        },
        {
            "row": 8,
            "name": "8",
            "title": "t",
            "predicted": "a",
            "truth": "b",
            "output": "o",
            "value": 1.0,
            "base": 0.1,
            "rest": 0,
            "terms": [],
            "half_spaces": [],
            "probability": None,
            "change": None,
            "no_change": "because",
        },
    ],
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("measure", ["accuracy", "R²"])
def test_the_page_of_a_model(tmp_path: Path, payload: str, measure: str) -> None:
    document = poisoned(MODEL, payload, ("format",))
    document |= {"measure": measure if measure == "accuracy" else measure + payload, "mean_error": 0.1}
    document |= {"standard_deviation": 0.2}
    for title in (payload, ""):
        saved = tmp_path / "model.json"
        saved.write_text(json.dumps(document | {"title": title}), encoding="utf-8")
        assert_harmless(write_model_page(saved, tmp_path / "index.html"), payload)


@pytest.mark.parametrize("name", ["title", "x_label", "y_label", "note"])
def test_texts_of_panels_are_texts(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a string"):
        Panel(**{"kind": "lines", "title": "t", "series": [Series("a")], name: {"a": 1}})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="label must be a string"):
        Series("a", 3)  # type: ignore[arg-type]
