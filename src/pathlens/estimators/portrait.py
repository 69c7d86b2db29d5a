"""What a fitted estimator says of itself on rows it has not seen, as plain values: the document behind its page.

Numbers come from the same `rules`, `explain` and `counterfactual` that users call; the page itself is made by report.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.errors import EmptyDataError, RegionError, ShapeError
from pathlens.estimators.counterfactuals import Counterfactual
from pathlens.estimators.page import MODEL_FORMAT
from pathlens.progress import ProgressBar

_CELLS = 12  # classes that a table of mistakes is drawn for


def portrait(model: Any, X: Any, y: Any, within: Any, top: int, seconds: float) -> dict[str, Any]:
    """The document of a fitted `DLGNClassifier` or `DLGNRegressor` of one target, judged and explained on rows X, y."""
    rows, truth = model._rows(X), np.asarray(y)
    X = X if hasattr(X, "iloc") else rows
    if truth.shape != (len(rows),):
        raise ShapeError(f"report: y has shape {truth.shape}, expected ({len(rows)},): one value for each row of X.")
    if not len(rows):
        raise EmptyDataError("report: X holds no rows to judge the model by.")
    classes, rules = getattr(model, "classes_", None), model.rules(top=top, terms=4)
    predicted, told = model.predict(X), model.explain(X, layer=0)
    at = np.arange(len(rows))
    by_feature = told.contributions[at, told.chosen]  # (n, d)
    document: dict[str, Any] = {
        "format": MODEL_FORMAT,
        "version": 1,
        "estimator": type(model).__name__,
        "rows": len(rows),
        "features": model.n_features_in_,
        "output": told.labels[0] if len(told.labels) == 1 else "logit of the predicted class",
        "half_spaces": sum(model.model_.hidden),
        "in_use": model.model_.in_use,
        "error": max(told.relative_error, model.explain(X).relative_error),
    }
    if classes is None:
        document |= _regression(truth.astype(float), predicted)
        chosen = _regression_rows(truth.astype(float), predicted)
    else:
        document |= _classification(model, X, truth, predicted)
        chosen = _classification_rows(model, X, truth, predicted)
    influence = np.abs(by_feature).mean(0)
    order = [int(j) for j in np.argsort(-influence, kind="stable")[:top] if influence[j] > 0]
    names = model._names()
    document["influence"] = [{"feature": names[j], "mean": float(influence[j])} for j in order]
    document["rules"] = [
        {
            "text": rule.text,
            "share": rule.importance / rules.total,
            "open": rule.open_share,
            "gate": f"{rule.layer}.{rule.unit}",
        }
        for rule in rules
    ]
    document["examples"] = []
    with ProgressBar("counterfactuals", len(chosen)) as meter:
        for title, row in chosen:
            document["examples"].append(_example(model, X, truth, predicted, title, row, within, seconds))
            meter.advance()
    return document


# --- how good it is --------------------------------------------------------------------------------------------


def _classification(model: Any, X: Any, truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    labels = [str(label) for label in model.classes_]
    values, counts = np.unique(truth, return_counts=True)
    commonest = counts.argmax()
    found: dict[str, Any] = {
        "classes": labels,
        "measure": "accuracy",
        "score": float((predicted == truth).mean()),
        "simplest": {"what": f"always {values[commonest]}", "score": float(counts[commonest] / len(truth))},
    }
    if len(labels) <= _CELLS:
        found["confusion"] = [
            [int(((truth == a) & (predicted == b)).sum()) for b in model.classes_] for a in model.classes_
        ]
    return found


def _regression(truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    from sklearn.metrics import r2_score

    return {
        "measure": "R²",
        "score": float(r2_score(truth, predicted)) if len(truth) > 1 else float("nan"),
        "simplest": {"what": "always the mean", "score": 0.0},
        "mean_error": float(np.abs(truth - predicted).mean()),
        "sd": float(truth.std()),
    }


# --- rows to look at -------------------------------------------------------------------------------------------


def _classification_rows(model: Any, X: Any, truth: np.ndarray, predicted: np.ndarray) -> list[tuple[str, int]]:
    """The surest right answer, of each of two classes, the closest call, and the surest mistake."""
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
    return _once(found)


def _regression_rows(truth: np.ndarray, predicted: np.ndarray) -> list[tuple[str, int]]:
    """The highest and the lowest prediction, and the one that is farthest off."""
    return _once(
        [
            ("The highest prediction", int(predicted.argmax())),
            ("The lowest prediction", int(predicted.argmin())),
            ("The prediction that is farthest off", int(np.abs(truth - predicted).argmax())),
        ]
    )


def _once(found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """One entry for each row, with all that it is."""
    titles: dict[int, str] = {}
    for title, row in found:
        titles[row] = f"{titles[row]}, and {title[0].lower()}{title[1:]}" if row in titles else title
    return [(title, row) for row, title in titles.items()]


def _example(
    model: Any, X: Any, truth: np.ndarray, predicted: np.ndarray, title: str, row: int, within: Any, seconds: float
) -> dict[str, Any]:
    x, names = X.iloc[row : row + 1] if hasattr(X, "iloc") else X[row : row + 1], model._names()
    by_feature, by_rule, at = model.explain(x, layer=0), model.explain(x), model._rows(x)[0]
    out = int(by_feature.chosen[0])
    values = by_feature.contributions[0, out]
    order = [int(j) for j in np.argsort(-np.abs(values), kind="stable")[:8] if values[j] != 0]
    found: dict[str, Any] = {
        "title": title,
        "row": row,
        "name": str(X.index[row] if hasattr(X, "iloc") else row),
        "truth": _plain(truth[row]),
        "predicted": _plain(predicted[row]),
        "output": by_feature.labels[out],
        "value": float(by_feature.outputs[0, out]),
        "terms": [
            {
                "feature": names[j],
                "at": float(at[j]),
                "mean": float(model.model_.centre[j]),
                "contribution": float(values[j]),
            }
            for j in order
        ],
        "rest": float(np.delete(values, order).sum()),
        "base": float(by_feature.rest[0, out]),
        "half_spaces": [{"text": text, "contribution": value} for value, text in by_rule.top(0, 4)],
    }
    if hasattr(model, "classes_"):
        found["probability"] = float(model.predict_proba(x)[0].max())
    found["other"] = _other(model, x, predicted, row, within, seconds)
    return found


def _other(model: Any, x: Any, predicted: np.ndarray, row: int, within: Any, seconds: float) -> dict[str, Any]:
    """The nearest row with another class, or with the median of all predictions."""
    options: dict[str, Any] = {"within": within, "seconds": seconds}
    if not hasattr(model, "classes_"):
        middle = float(np.median(predicted))
        if predicted[row] == middle:
            return {"none": "It is the median of all predictions already."}
        options["at_most" if predicted[row] > middle else "at_least"] = middle
    try:
        other = model.counterfactual(x, **options)
    except RegionError as error:  # there is none in reach
        return {"none": str(error)}
    return document_of(other)


def document_of(other: Counterfactual) -> dict[str, Any]:
    """A counterfactual as plain values, with the texts that a page prints."""
    texts = other.printed
    return {
        "before": _plain(other.before),
        "after": _plain(other.after),
        "distance": other.distance,
        "at_least": other.at_least,
        "unrounded": other.unrounded,
        "nearest": bool(other.nearest),
        "changes": [
            {"feature": name, "from": a, "to": b, "text": texts[name]} for name, (a, b) in other.changes.items()
        ],
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
