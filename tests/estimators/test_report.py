"""Pages about fitted models, and fits of tables as they come."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes, load_iris

from pathlens import DLGNClassifier, DLGNRegressor
from pathlens.errors import (
    ArtifactError,
    DTypeError,
    EmptyDataError,
    NotFiniteError,
    OptionError,
    PathlensError,
    ShapeError,
)
from pathlens.estimators.frames import fit_table
from pathlens.estimators.page import load_model_report, write_model_page
from pathlens.estimators.report import build_model_report

EMPTY = {"meta", "br", "hr", "img", "link"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed twice, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def words(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]))


@pytest.fixture(scope="module")
def flowers() -> tuple[DLGNClassifier, pd.DataFrame, pd.Series]:
    data = load_iris(as_frame=True)
    names = data.target.map(dict(enumerate(data.target_names)))
    X = data.data.rename(columns={"petal width (cm)": "petal <width>"})
    return DLGNClassifier(hidden=(8,), epochs=100, random_state=0).fit(X[::2], names[::2]), X[1::2], names[1::2]


def test_a_classifier_is_taken_apart_exactly(flowers: Any, tmp_path: Path) -> None:
    model, X, y = flowers
    told = build_model_report(model, X, y, within=X, top=3, seconds=1.0).to_dict()
    assert told["score"] == model.score(X, y)
    assert np.array(told["confusion"]).sum() == len(X)
    assert np.trace(told["confusion"]) == round(told["score"] * len(X))
    by_feature = model.explain(X, layer=0)
    size = np.abs(by_feature.contributions[np.arange(len(X)), by_feature.chosen]).mean(0)
    assert told["influence"][0]["mean"] == pytest.approx(size.max()) and len(told["influence"]) == 3
    assert [rule["text"] for rule in told["rules"]] == [rule.text for rule in model.rules(top=3, terms=4)]
    for one in told["examples"]:
        total = one["base"] + one["rest"] + sum(term["contribution"] for term in one["terms"])
        assert total == pytest.approx(one["value"], rel=1e-9)
        assert one["predicted"] == model.predict(X.iloc[[one["row"]]])[0]
        other = one["change"]
        if other is not None:
            changed = X.iloc[[one["row"]]].copy()
            for change in other["changes"]:
                assert changed[change["feature"]].item() == change["before"]
                changed[change["feature"]] = change["after"]
            assert model.predict(changed)[0] == other["after"] != other["before"]
    text = words(model.report(X, y, tmp_path, within=X, seconds=1.0, title="Flowers & more", note="held out"))
    assert "Flowers &amp; more" in text and "petal &lt;width&gt;" in text and f"{len(X)} rows, held out" in text


def test_a_mistake_is_shown(flowers: Any, tmp_path: Path) -> None:
    model, X, y = flowers
    wrong = y.copy()
    wrong.iloc[0] = "virginica" if y.iloc[0] == "setosa" else "setosa"
    rows = {
        title: row
        for one in build_model_report(model, X, wrong, within=X, top=3, seconds=0.5).examples
        for title, row in [(one.title, one.row)]
    }
    assert any("surest mistake" in title for title in rows)


def test_a_regressor(tmp_path: Path) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = DLGNRegressor(hidden=(8,), epochs=50, random_state=0).fit(X[:300], y[:300])
    told = build_model_report(model, X[300:], y[300:], within=X[:300], top=4, seconds=1.0).to_dict()
    assert told["score"] == pytest.approx(model.score(X[300:], y[300:]))
    middle = np.median(model.predict(X[300:]))
    for one in told["examples"]:
        after, before = one["change"]["after"], one["change"]["before"]
        assert (after <= middle + 1e-9) == (before > middle)
    text = words(model.report(X[300:], y[300:], tmp_path / "page.html", within=X[:300], seconds=1.0))
    assert "The highest prediction" in text and "R² on 142 rows" in text and "x8" in text


def test_a_model_that_is_constant_on_cells(flowers: Any, tmp_path: Path) -> None:
    _, X, y = flowers
    model = DLGNClassifier(hidden=(8,), epochs=50, piecewise_constant=True, random_state=0).fit(X, y)
    text = words(model.report(X, y, tmp_path, within=X, seconds=0.5))
    largest = np.abs(model.explain(X, layer=0).contributions).max(axis=(0, 1)).argmax()
    looks = text.partition("Influence of each feature")[2].partition("<h2>Half-spaces")[0]
    assert "jumps" in looks and escape(X.columns[largest]) in looks


def test_a_model_that_predicts_the_same_everywhere_looks_at_nothing(flowers: Any, tmp_path: Path) -> None:
    model, X, y = flowers
    still = DLGNClassifier(hidden=(8,), epochs=1, random_state=0).fit(X, y)
    still.model_ = replace(model.model_, weights=(*model.model_.weights[:-1], 0 * model.model_.weights[-1]))
    assert "no feature changes its output" in words(still.report(X, y, tmp_path, seconds=0.1))


def test_the_page_is_made_from_the_saved_report_alone(flowers: Any, tmp_path: Path) -> None:
    model, X, y = flowers
    page = model.report(X, y, tmp_path / "model.html", within=X, seconds=0.5, others=[{"what": "a tree", "score": 0.9}])
    saved = load_model_report(tmp_path / "model.json")
    assert saved.score == model.score(X, y) and saved.others[0].what == "a tree"
    assert write_model_page(tmp_path / "model.json", tmp_path / "again").read_text() == page.read_text()


def test_the_score_of_one_row_is_undefined(tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((40, 2))
    model = DLGNRegressor(hidden=(3,), epochs=2, random_state=0).fit(X, X[:, 0])
    text = words(model.report(X[:1], X[:1, 0], tmp_path, within=X, seconds=0.1))
    assert load_model_report(tmp_path / "index.json").score is None and "undefined" in text


def test_what_does_not_fit_is_refused(flowers: Any, tmp_path: Path) -> None:
    model, X, y = flowers
    for wrong, message in (({"seconds": 0}, "seconds"), ({"top": 0}, "top")):
        with pytest.raises(OptionError, match=message):
            model.report(X, y, tmp_path, **wrong)
    with pytest.raises(ShapeError, match="one value for each row"):
        model.report(X, y[:-1], tmp_path)
    for text, message in (('{"format": "pathlens-model"}', "missing required field"), ("[" * 100_000, "model.report")):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ArtifactError, match=message):
            write_model_page(tmp_path / "report.json", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        model.report(X, y, tmp_path / "file" / "page.html", seconds=0.5)


# --- tables ------------------------------------------------------------------------------------------------------


def mixed(n: int = 200) -> pd.DataFrame:
    """Numbers with gaps, words with gaps, truth values, a constant, dates, names."""
    random = np.random.default_rng(0)
    size, colour = random.normal(size=n), random.choice(["red", "green", "blue"], n)
    frame = pd.DataFrame(
        {
            "size": np.where(np.arange(n) % 10 == 0, np.nan, size),
            "colour": colour,
            "large": random.random(n) > 0.5,
            "always": 1.0,
            "when": pd.date_range("2020-01-01", periods=n),
            "name": [f"row {i}" for i in range(n)],
            "kind": np.where((size > 0) ^ (colour == "red"), "yes", "no"),
        }
    )
    frame.loc[::7, "colour"] = None
    return frame


def test_a_table_as_it_comes() -> None:
    frame = mixed()
    frame.loc[3, "kind"] = None
    found = fit_table(frame, "kind", hidden=(8,), epochs=30, random_state=0)
    assert isinstance(found.model, DLGNClassifier) and len(found.train) + len(found.test) == 199
    assert {"size", "colour=red", "colour=missing", "large"} <= set(found.train.columns)
    assert not {"always", "when", "name"} & set(found.train.columns)
    assert not found.train.isna().any().any() and not found.test.isna().any().any()
    told = "; ".join(found.notes)
    assert "1 rows without kind" in told and "always, when, name" in told and "median: size" in told
    assert [one["what"] for one in found.others] == ["gradient boosting", "linear"]
    assert all(0 <= one["score"] <= 1 for one in found.others)


@pytest.mark.parametrize(
    "values",
    [
        [True, None, False],
        pd.array([1, None, 3], dtype="Int64"),
        pd.array([True, None, False], dtype="boolean"),
        pd.array(["u", None, "v"], dtype="string"),
        pd.Categorical(["u", None, "v"]),
        ["u", np.nan, "v"],
    ],
)
def test_gaps_of_every_kind(values: Any) -> None:
    column = pd.Series(values).repeat(40).reset_index(drop=True)
    frame = pd.DataFrame({"x": np.arange(120.0), "gaps": column, "y": ["a", "b"] * 60})
    found = fit_table(frame, "y", hidden=(4,), epochs=2, random_state=0)
    there = [name for name in found.train if name.startswith("gaps")]
    assert there == ["gaps"] or there == ["gaps=missing", "gaps=u", "gaps=v"]
    assert not found.train.isna().any().any() and found.train.dtypes.eq(np.float64).all()


@pytest.mark.parametrize("dtype", ["category", "string", object])
def test_codes_are_categories(dtype: Any) -> None:
    codes = pd.Series([1, 2, 3, None] * 30, dtype="Int64")
    codes = codes.astype("category") if dtype == "category" else codes.astype("string").astype(dtype)
    frame = pd.DataFrame({"x": np.arange(120.0), "code": codes, "y": pd.Categorical([1, 2] * 60, categories=[0, 1, 2])})
    found = fit_table(frame, "y", hidden=(4,), epochs=2, random_state=0)
    assert list(found.train) == ["x", "code=1", "code=2", "code=3", "code=missing"] and not found.notes
    assert isinstance(found.model, DLGNClassifier) and found.model.classes_.tolist() == [1, 2]


def test_rows_held_out_are_not_looked_at() -> None:
    """What fills gaps is the median of the rows that are fitted."""
    frame = mixed()
    found = fit_table(frame, "kind", hidden=(4,), epochs=2, random_state=0)
    own = frame.loc[found.train.index, "size"]
    filled = found.test.loc[frame.loc[found.test.index, "size"].isna(), "size"]
    assert len(filled) and (filled == own.median()).all() and own.median() != frame["size"].median()


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["a", "b"] * 20, True),
        ([True, False] * 20, True),
        ([0, 1, 2, 3] * 10, True),
        ([0.5, 1.5] * 20, False),
        (list(range(40)), False),
    ],
)
def test_classes_or_numbers(values: list[Any], classes: bool) -> None:
    frame = pd.DataFrame({"x": np.arange(40.0), "y": values})
    found = fit_table(frame, "y", hidden=(4,), epochs=2, random_state=0)
    assert isinstance(found.model, DLGNClassifier) == classes


@pytest.mark.parametrize(
    ("frame", "options", "error", "message"),
    [
        (mixed(), {"target": "kinds"}, PathlensError, "Did you mean 'kind'"),
        (mixed(), {"target": "kind", "kind": "regression"}, DTypeError, "not numeric"),
        (mixed(), {"target": "kind", "kind": "classes"}, PathlensError, "Unknown kind 'classes'"),
        (mixed(), {"target": "kind", "held_out": 1.5}, OptionError, "between 0 and 1"),
        (mixed(), {"target": "kind", "held_out": 0.999}, EmptyDataError, "cannot be split"),
        (mixed(6), {"target": "kind"}, EmptyDataError, "too few"),
        (mixed()[["always", "when", "name", "kind"]], {"target": "kind"}, DTypeError, "No column"),
        (mixed().assign(kind="no"), {"target": "kind"}, EmptyDataError, "1 values"),
        (mixed().assign(size=np.inf), {"target": "kind"}, NotFiniteError, "'size' holds inf in row 1 .* 200 infinite"),
    ],
)
def test_tables_that_cannot_be_fitted(frame: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit_table(frame, random_state=0, **options)
