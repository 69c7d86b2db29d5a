"""All explanations have one vocabulary: R² as `r2`, a dict, a table, HTML, and a plot."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.explanations import Explanation, TabularResult

NAMES = ("top", "groups", "inputs", "tree", "refit", "prune", "half-spaces", "features")


@pytest.fixture(scope="module")
def explanations() -> dict[str, Explanation]:
    net = pl.models.dlgn(2, hidden=(6, 5), gate="hard", bias=True, seed=0).double()
    X = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made: list[Explanation] = [
        pl.paths.top(net, X, k=3),
        pl.paths.groups(net, X),
        pl.paths.inputs(net, X),
        pl.paths.tree(net, X, leaves=5),
        pl.paths.refit(net, X, paths=3),
        pl.paths.prune(net, X, keep=0.5),
    ]
    model = pl.DLGNRegressor(hidden=(4,), epochs=3, random_state=0).fit(X.numpy(), X[:, 0].abs().numpy())
    made += [model.explain(X.numpy()), model.explain(X.numpy(), layer=0)]
    return dict(zip(NAMES, made, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_explanation_is_data_first(explanations: dict[str, Explanation], name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    found = explanations[name]
    assert isinstance(found, Explanation) and found.r2 <= 1 and found.cancellation >= 1 - 1e-12
    plain = found.to_dict()
    assert json.loads(json.dumps(plain))["r2"] == found.r2 and "net" not in plain
    frame = found.to_frame()
    assert len(frame) and list(frame.columns) == list(found.table())
    page = found._repr_html_()
    assert page.count("<tr>") == min(len(frame), 20) + 1 and repr(found).splitlines()[0][:11] in page
    ax = found.plot()
    assert ax.get_title()
    matplotlib.pyplot.close(ax.figure)


def test_exact_decompositions_have_an_r2_of_one_and_their_tables_add_up(explanations: dict[str, Explanation]) -> None:
    for name in ("groups", "inputs", "half-spaces", "features"):
        assert explanations[name].r2 == pytest.approx(1, abs=1e-12)
    for name in ("half-spaces", "features"):
        found: Any = explanations[name]
        sums = found.to_frame().groupby("row").contribution.sum()
        np.testing.assert_allclose(sums, found.outputs[:, 0], rtol=0, atol=1e-12 * np.abs(found.outputs).max())


def test_text_of_a_table_is_not_markup() -> None:
    class Names(TabularResult):
        def table(self) -> dict[str, list[Any]]:
            return {"<b>": ["<script>alert(1)</script>"] * 30}

        def __repr__(self) -> str:
            return "a & b"

    page = Names()._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>" not in page and "a &amp; b" in page
    assert "… and 10 more rows" in page


def test_rules_and_counterfactuals_are_tables_too() -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (60, 2))
    model = pl.DLGNRegressor(hidden=(4,), epochs=20, weight_decay=0.1, random_state=0).fit(X, X[:, 0])
    rules, predicted = model.rules(), model.predict(X)
    assert rules.to_frame().importance.sum() == pytest.approx(1) and len(rules.to_dict()["rules"]) == len(rules)
    other = model.counterfactual(X[predicted.argmax()], at_most=float(np.median(predicted)), within=X)
    assert json.loads(json.dumps(other.to_dict()))["distance"] == other.distance
    assert list(other.to_frame().feature) == list(other.changes) and "<table>" in other._repr_html_()
