"""`fit_table`: predict one column of a pandas table from the others, and compare with other models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pathlens.errors import DTypeError, EmptyDataError, NotFiniteError, OptionError, unknown_name
from pathlens.estimators.dlgn import DLGNClassifier, DLGNRegressor
from pathlens.estimators.tables import is_numeric

_KINDS = ("auto", "classification", "regression")
_CATEGORIES = 50  # a text column with more distinct values is treated as names, dates or free text
_FEW = 10  # an integer column with at most this many distinct values is treated as classes


@dataclass(frozen=True)
class FittedTable:
    """A model of one column of a table, and the held-out rows.

    Attributes
    ----------
    model : DLGNClassifier or DLGNRegressor
    train, test : DataFrame
        Encoded columns of the training rows and of the held-out rows.
    truth : Series
        The target of the held-out rows.
    others : list of dict
        Other models with default settings on the same rows: ``what`` and ``score``.
    notes : list of str
        Rows and columns that were left out, and values that were filled in.
    """

    model: Any
    train: Any
    test: Any
    truth: Any
    others: list[dict[str, Any]]
    notes: list[str]


def fit_table(frame: Any, target: str, kind: str = "auto", held_out: float = 0.25, **options: Any) -> FittedTable:
    """Fit a DLGN to a column of a pandas table, which may have text columns and missing values.

    Parameters
    ----------
    frame : DataFrame
    target : str
        The column to predict; rows without a value in it are left out.
    kind : {"auto", "classification", "regression"}
        "auto" is classification for text, booleans, and integers with at most ten values.
    held_out : float
        Share of the rows that are held out.
    **options
        Parameters of the estimator.

    Notes
    -----
    Missing numbers are replaced by the median of the training rows. Text and pandas categories, even those of numbers,
    become one-hot columns. Columns of dates, of one value, or of text with more than 50 values are left out. An
    infinite number is an error.
    """
    if target not in frame.columns:
        raise unknown_name("column", target, list(map(str, frame.columns)))
    if kind not in _KINDS:
        raise unknown_name("kind", kind, _KINDS)
    if not 0 < held_out < 1:
        raise OptionError(f"held_out must be a share of the rows between 0 and 1, got {held_out!r}.")
    refuse_infinite(frame)
    notes: list[str] = []
    there = frame[target].notna()
    if not there.all():
        notes.append(f"{int((~there).sum()):,} rows without {target} left out")
        frame = frame[there]
    classes = _classes(frame[target]) if kind == "auto" else kind == "classification"
    if classes:
        counts = frame[target].value_counts()
        if len(rare := counts[counts == 1]):  # a pandas category may have values without rows
            notes.append(f"classes with one row left out: {', '.join(map(str, rare.index[:5]))}")
            frame = frame[~frame[target].isin(rare.index)]
    elif not is_numeric(frame[target]):
        raise DTypeError(f"The column {target!r} is not numeric, which a regression needs. Use kind='classification'.")
    X, y = frame.drop(columns=target).apply(_plain), frame[target]
    seed = options.get("random_state", 0)
    if len(frame) < 8 or (classes and y.nunique() < 2):
        raise EmptyDataError(
            f"{len(frame)} rows with {y.nunique()} values of {target!r} are too few to fit and to "
            "evaluate a model. At least 8 rows and two classes are needed."
        )
    size = max(round(held_out * len(y)), y.nunique() if classes else 1)
    if size > len(y) - (y.nunique() if classes else 1):
        raise EmptyDataError(
            f"{len(y)} rows cannot be split: a share of {held_out:g} is held out, and both parts need "
            "rows of every class. Give more rows, or another share."
        )
    shares = y if classes else None
    train, test, y_train, y_test = train_test_split(X, y, test_size=size, random_state=seed, stratify=shares)
    encode, encoded = _encoder(train)
    train, test = encode.fit_transform(train), encode.transform(test)
    model = (DLGNClassifier if classes else DLGNRegressor)(**options).fit(train, y_train)
    others = [
        {"what": what, "score": float(peer.fit(train, y_train).score(test, y_test))}
        for what, peer in _peers(classes, seed)
    ]
    return FittedTable(model, train, test, y_test, others, notes + encoded)


def refuse_infinite(frame: Any) -> None:
    """Raise an error that names row and column if a table holds an infinite number."""
    for name, column in frame.items():
        if not is_numeric(column):
            continue
        found = np.flatnonzero(np.isinf(np.asarray(column, dtype=np.float64)))
        if len(found):
            raise NotFiniteError(
                f"Column {str(name)!r} holds {column.iloc[found[0]]} in row {found[0] + 1} (counted "
                f"from 1, without the header), {len(found)} infinite in all; expected finite numbers. "
                "Correct the value, leave the cell empty, or drop the column."
            )


def _classes(y: Any) -> bool:
    """Whether a target column looks like classes."""
    if not is_numeric(y) or y.dtype.kind == "b":
        return True
    values = np.unique(np.asarray(y, dtype=float))
    return len(values) <= _FEW and bool((values == np.floor(values)).all())


def _plain(column: Any) -> Any:
    """Numbers as float64, text and categories as text with "missing" for gaps; dates unchanged."""
    if is_numeric(column):
        return column.astype(np.float64)
    if column.dtype.kind in "mM":
        return column
    return column.astype(object).map(str).astype(object).where(column.notna(), "missing")


def _encoder(frame: Any) -> tuple[Any, list[str]]:
    """A transformer that makes all columns numeric, and notes on columns it leaves out and cells it fills in."""
    numeric, text, left_out = [], [], []
    for name, column in frame.items():
        values = column.nunique()
        if values < 2 or column.dtype.kind in "mM":
            left_out.append(str(name))
        elif is_numeric(column):
            numeric.append(name)
        elif values <= _CATEGORIES:
            text.append(name)
        else:
            left_out.append(str(name))
    if not numeric and not text:
        raise DTypeError(
            f"No column of the table can be used: {', '.join(left_out[:5])} hold one value, dates, or "
            f"text with more than {_CATEGORIES} values."
        )
    notes = []
    if left_out:
        notes.append(
            f"columns of one value, dates, or text with more than {_CATEGORIES} values left out: {', '.join(left_out)}"
        )
    missing = [str(name) for name in numeric if frame[name].isna().any()]
    if missing:
        notes.append(f"missing numbers replaced by the median: {', '.join(missing)}")
    one_hot = OneHotEncoder(
        sparse_output=False,
        handle_unknown="ignore",
        dtype=np.float64,
        feature_name_combiner=lambda name, value: f"{name}={value}",
    )
    encode = make_column_transformer(
        (SimpleImputer(strategy="median"), numeric),
        (one_hot, text),
        verbose_feature_names_out=False,
    )
    return encode.set_output(transform="pandas"), notes


def _peers(classes: bool, seed: int) -> list[tuple[str, Any]]:
    linear = LogisticRegression(max_iter=1000) if classes else Ridge()
    boosted = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    return [("gradient boosting", boosted(random_state=seed)), ("linear", make_pipeline(StandardScaler(), linear))]
