"""Counterfactuals of the estimators: their distance, how often they are proved nearest, and their time.

``python -m benchmarks.counterfactuals`` fits a `DLGNClassifier` of default size to three quarters of each set with
labels, searches the nearest row of another class for held-out rows, and compares it with the nearest training row of
another class. It writes ``benchmarks/results/counterfactuals.json``, which is also used for ``docs/comparison.md``
(``python -m benchmarks.estimators --page``).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from benchmarks.estimators import load
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder

import pathlens as pl
from pathlens.errors import RegionError
from pathlens.papers.artifact import environment

RESULT = Path(__file__).parent / "results" / "counterfactuals.json"
SETS = (
    "breast_cancer",
    "iris",
    "wine",
    "adult",
    "bank_marketing",
    "diabetes_pima",
    "german_credit",
    "heart_statlog",
    "magic",
    "pendigits",
    "spambase",
    "telco_churn",
)


def measure(name: str, rows: int, asked: int, seconds: float) -> dict[str, Any]:
    """Ask for the nearest other class of some rows; numbers stay in their units, so that whole ones are known."""
    X, y, _, _ = load(name, rows)
    encode = OneHotEncoder(min_frequency=10, handle_unknown="infrequent_if_exist", sparse_output=False)
    columns = make_column_transformer(
        (encode, make_column_selector(dtype_exclude="number")),
        (SimpleImputer(strategy="median"), make_column_selector(dtype_include="number")),
    ).set_output(transform="pandas")
    a, b = train_test_split(np.arange(len(y)), test_size=0.25, random_state=0, stratify=y)
    A, B = columns.fit_transform(X.iloc[a]), columns.transform(X.iloc[b])
    model = pl.DLGNClassifier(random_state=0).fit(A, y[a])
    told, spread = [], model.model_.spread
    scale = np.where(spread > 0, spread, np.inf)
    for i in range(min(asked, len(B))):
        begun = time.perf_counter()
        row: pd.DataFrame = B.iloc[[i]]
        others = A.to_numpy()[model.predict(A) != model.predict(row)[0]]
        unlike = float((np.abs(others - row.to_numpy()) / scale).sum(1).min())
        try:
            found = model.counterfactual(row, within=A, seconds=seconds)
        except RegionError:
            told.append({"distance": None, "seconds": time.perf_counter() - begun, "unlike row": unlike})
            continue
        told.append(
            {
                "distance": found.distance,
                "at least": found.at_least,
                "proved": found.nearest,
                "changes": len(found.changes),
                "seconds": time.perf_counter() - begun,
                "unlike row": unlike,
            }
        )
    return {"set": name, "features": A.shape[1], "accuracy": float(model.score(B, y[b])), "rows": told}


def table(found: dict[str, Any]) -> list[str]:
    """The part of docs/comparison.md on counterfactuals, as lines of Markdown."""
    lines = [
        "## Counterfactuals",
        "",
        f"`counterfactual` of {found['asked']} held-out rows, with the training rows as `within` (at most "
        f"{found['row limit']} of a set) and a time limit of {found['seconds']:g} seconds. *Proved nearest* counts "
        "the rows for which it is proved that no row with another class is nearer. For the other rows, *bound / "
        "distance* shows how much nearer one could be at most. Medians over rows. Made by "
        "`python -m benchmarks.counterfactuals`.",
        "",
        "| set | columns | proved nearest | seconds | features changed | distance, in standard deviations | "
        "bound / distance | nearest training row of another class, × farther |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in found["sets"]:
        rows = [r for r in s["rows"] if r["distance"] is not None]
        middle = {k: np.median([r[k] for r in rows]) for k in ("distance", "changes")}
        bound = np.median([r["at least"] / r["distance"] for r in rows])
        farther = np.median([r["unlike row"] / r["distance"] for r in rows])
        lines.append(
            f"| {s['set']} | {s['features']} | {sum(r['proved'] for r in rows)} of {len(s['rows'])} | "
            f"{np.median([r['seconds'] for r in s['rows']]):.1f} | {middle['changes']:g} | "
            f"{middle['distance']:.2f} | {bound:.2f} | {farther:.1f} |"
        )
    return lines


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--rows", type=int, default=2000, help="maximal number of rows of a set")
    parser.add_argument("--asked", type=int, default=10, help="number of held-out rows")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(2)
    found: dict[str, Any] = {
        "asked": options.asked,
        "row limit": options.rows,
        "seconds": options.seconds,
        "environment": environment(),
        "sets": [],
    }
    for name in options.sets:
        found["sets"].append(measure(name, options.rows, options.asked, options.seconds))
        print(table(found)[-1], flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
