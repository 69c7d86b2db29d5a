"""`ModelReport`: quality, rules and explained rows of a fitted estimator, as a typed document that is saved as JSON.

Numbers come from the public methods `rules`, `explain` and `counterfactual`. The page is made in `page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from sklearn.metrics import r2_score

from pathlens.errors import EmptyDataError, RegionError, ShapeError
from pathlens.explanations import to_plain
from pathlens.progress import track
from pathlens.regions.counterfactuals import Counterfactual

_MOST_CLASSES = 12  # a confusion matrix is shown for at most so many classes
_MOST_TERMS = 8  # features listed for one row
Value = str | bool | int | float


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a report."""


class ModelScore(_Document, frozen=True):
    """A model and its score; None where the score is undefined."""

    what: str
    score: float | None


class FeatureInfluence(_Document, frozen=True):
    """Mean |contribution| of a feature."""

    feature: str
    mean: float


class RuleSummary(_Document, frozen=True):
    """A half-space: inequality, shares of the total importance and of the training rows inside, "layer.unit"."""

    text: str
    share: float
    open: float
    gate: str


class FeatureTerm(_Document, frozen=True):
    """A feature's contribution to a prediction, with its value and its mean in training."""

    feature: str
    at: float
    mean: float
    contribution: float


class HalfSpaceTerm(_Document, frozen=True):
    """A half-space's contribution to a prediction."""

    text: str
    contribution: float


class FeatureChange(_Document, frozen=True):
    """The change of a feature in a counterfactual: values, and the texts that a page prints."""

    feature: str
    before: float
    after: float
    texts: tuple[str, str]


class NearestChange(_Document, frozen=True):
    """A `Counterfactual` as plain values."""

    before: Value
    after: Value
    distance: float
    at_least: float
    unrounded: float
    nearest: bool
    changes: list[FeatureChange]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Feature, old and new value as texts."""
        return [(change.feature, *change.texts) for change in self.changes]

    @classmethod
    def of(cls, other: Counterfactual) -> NearestChange:
        """From a counterfactual."""
        texts = other.printed
        return cls(
            before=to_plain(other.before),
            after=to_plain(other.after),
            distance=other.distance,
            at_least=other.at_least,
            unrounded=other.unrounded,
            nearest=bool(other.nearest),
            changes=[FeatureChange(name, a, b, texts[name]) for name, (a, b) in other.changes.items()],
        )


class ExplainedRow(_Document, frozen=True):
    """One prediction as a sum: value = base + Σ terms + rest; and the smallest change that gives another one."""

    title: str
    row: int
    name: str
    truth: Value
    predicted: Value
    probability: float | None
    output: str
    value: float
    base: float
    terms: list[FeatureTerm]
    rest: float
    half_spaces: list[HalfSpaceTerm]
    change: NearestChange | None
    no_change: str


class ModelReport(_Document, frozen=True):
    """Quality, influences, rules and explained rows of a fitted model, on rows that were held out."""

    title: str
    note: str
    estimator: str
    rows: int
    features: int
    half_spaces: int
    in_use: int
    relative_error: float
    output: str
    measure: str
    score: float | None
    simplest: ModelScore
    others: list[ModelScore]
    influence: list[FeatureInfluence]
    rules: list[RuleSummary]
    examples: list[ExplainedRow]
    classes: list[str] = []
    confusion: list[list[int]] | None = None
    mean_error: float | None = None
    standard_deviation: float | None = None
    format: Literal["pathlens-model"] = "pathlens-model"
    version: Literal[1] = 1

    @property
    def own_score(self) -> ModelScore:
        """The score of the model itself."""
        return ModelScore(self.estimator, self.score)

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists and numbers."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def build_model_report(
    model: Any,
    X: Any,
    y: Any,
    *,
    within: Any = None,
    top: int = 12,
    seconds: float = 5.0,
    title: str = "",
    note: str = "",
    others: Sequence[Mapping[str, Any]] = (),
) -> ModelReport:
    """The report of a fitted `DLGNClassifier` or one-target `DLGNRegressor` on rows X, y; see its `report`."""
    rows, truth = model._check_rows(X), np.asarray(y)
    X = X if hasattr(X, "iloc") else rows
    if truth.shape != (len(rows),):
        raise ShapeError(f"report: y has shape {truth.shape}, expected ({len(rows)},): one value for each row of X.")
    if not len(rows):
        raise EmptyDataError("report: X has no rows. Give held-out rows.")
    rules, names = model.rules(top=top, terms=4), model._feature_names()
    predicted, by_feature = model.predict(X), model.explain(X, layer=0)
    if hasattr(model, "classes_"):
        quality, chosen = _classification(model, truth, predicted), _classification_rows(model, X, truth, predicted)
    else:
        truth = truth.astype(float)
        quality, chosen = _regression(truth, predicted), _regression_rows(truth, predicted)
    influence = np.abs(by_feature.contributions[np.arange(len(rows)), by_feature.chosen]).mean(0)
    order = [int(j) for j in np.argsort(-influence, kind="stable")[:top] if influence[j] > 0]
    examples = [
        _explain_row(model, X, truth, predicted, title_of_row, row, within, seconds)
        for title_of_row, row in track(chosen, "counterfactuals")
    ]
    return ModelReport(
        title=title,
        note=note,
        estimator=type(model).__name__,
        rows=len(rows),
        features=model.n_features_in_,
        half_spaces=sum(model.model_.hidden),
        in_use=model.model_.in_use,
        relative_error=max(by_feature.relative_error, model.explain(X).relative_error),
        output=by_feature.labels[0] if len(by_feature.labels) == 1 else "logit of the predicted class",
        others=[ModelScore(**one) for one in others],
        influence=[FeatureInfluence(names[j], float(influence[j])) for j in order],
        rules=[
            RuleSummary(rule.text, rule.importance / rules.total, rule.open_share, f"{rule.layer}.{rule.unit}")
            for rule in rules
        ],
        examples=examples,
        **quality,
    )


# --- quality ---------------------------------------------------------------------------------------------------


def _classification(model: Any, truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    values, counts = np.unique(truth, return_counts=True)
    most = counts.argmax()
    few = len(model.classes_) <= _MOST_CLASSES
    return {
        "classes": [str(label) for label in model.classes_],
        "measure": "accuracy",
        "score": float((predicted == truth).mean()),
        "simplest": ModelScore(f"always {values[most]}", float(counts[most] / len(truth))),
        "confusion": [[int(((truth == a) & (predicted == b)).sum()) for b in model.classes_] for a in model.classes_]
        if few
        else None,
    }


def _regression(truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    return {
        "measure": "R²",
        "score": float(r2_score(truth, predicted)) if len(truth) > 1 else None,
        "simplest": ModelScore("always the mean", 0.0),
        "mean_error": float(np.abs(truth - predicted).mean()),
        "standard_deviation": float(truth.std()),
    }


# --- rows to explain -------------------------------------------------------------------------------------------


def _classification_rows(model: Any, X: Any, truth: np.ndarray, predicted: np.ndarray) -> list[tuple[str, int]]:
    """The surest right prediction (of each of two classes), the closest call, and the surest mistake."""
    sorted_p = np.sort(model.predict_proba(X), axis=1)
    sure, margin, right = sorted_p[:, -1], sorted_p[:, -1] - sorted_p[:, -2], predicted == truth
    found = []
    two = len(model.classes_) == 2
    for label in model.classes_ if two else [None]:
        there = np.flatnonzero(right & (predicted == label) if two else right)
        if len(there):
            found.append((f"The surest {label}" if two else "The surest answer", int(there[sure[there].argmax()])))
    found.append(("The closest call", int(margin.argmin())))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        found.append(("The surest mistake", int(wrong[sure[wrong].argmax()])))
    return _merge_titles(found)


def _regression_rows(truth: np.ndarray, predicted: np.ndarray) -> list[tuple[str, int]]:
    """The highest and the lowest prediction, and the one with the largest error."""
    return _merge_titles(
        [
            ("The highest prediction", int(predicted.argmax())),
            ("The lowest prediction", int(predicted.argmin())),
            ("The prediction with the largest error", int(np.abs(truth - predicted).argmax())),
        ]
    )


def _merge_titles(found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """One entry for each row, with all of its titles."""
    titles: dict[int, str] = {}
    for title, row in found:
        titles[row] = f"{titles[row]}, and {title[0].lower()}{title[1:]}" if row in titles else title
    return [(title, row) for row, title in titles.items()]


def _explain_row(
    model: Any, X: Any, truth: np.ndarray, predicted: np.ndarray, title: str, row: int, within: Any, seconds: float
) -> ExplainedRow:
    x = X.iloc[row : row + 1] if hasattr(X, "iloc") else X[row : row + 1]
    by_feature, at, names = model.explain(x, layer=0), model._check_rows(x)[0], model._feature_names()
    out = int(by_feature.chosen[0])
    values = by_feature.contributions[0, out]
    order = [int(j) for j in np.argsort(-np.abs(values), kind="stable")[:_MOST_TERMS] if values[j] != 0]
    means = model.model_.centre
    change, no_change = _nearest_change(model, x, predicted, row, within, seconds)
    return ExplainedRow(
        title=title,
        row=row,
        name=str(X.index[row] if hasattr(X, "iloc") else row),
        truth=to_plain(truth[row]),
        predicted=to_plain(predicted[row]),
        probability=float(model.predict_proba(x)[0].max()) if hasattr(model, "classes_") else None,
        output=by_feature.labels[out],
        value=float(by_feature.outputs[0, out]),
        base=float(by_feature.rest[0, out]),
        terms=[FeatureTerm(names[j], float(at[j]), float(means[j]), float(values[j])) for j in order],
        rest=float(np.delete(values, order).sum()),
        half_spaces=[HalfSpaceTerm(text, value) for value, text in model.explain(x).top(0, 4)],
        change=change,
        no_change=no_change,
    )


def _nearest_change(
    model: Any, x: Any, predicted: np.ndarray, row: int, within: Any, seconds: float
) -> tuple[NearestChange | None, str]:
    """The nearest row with another class, or with the median of all predictions; else the reason why there is none."""
    options: dict[str, Any] = {"within": within, "seconds": seconds}
    if not hasattr(model, "classes_"):
        middle = float(np.median(predicted))
        if predicted[row] == middle:
            return None, "The prediction is the median of all predictions already."
        options["at_most" if predicted[row] > middle else "at_least"] = middle
    try:
        return NearestChange.of(model.counterfactual(x, **options)), ""
    except RegionError as error:  # there is none in reach
        return None, str(error)
