"""The estimators on tables of 300 to 5,000 rows, with the present choice of weight decay and with the former one.

``python -m benchmarks.weight_decay_sizes`` fits the default estimators to random rows of some tables, in one thread,
and writes ``benchmarks/results/weight-decay-sizes.json`` after every fit; fits that the file
contains are skipped. Fits of the former choice were made by the commit that the file names, and are kept. The file is
also used for ``docs/comparison.md``.

Test rows are the same as in `benchmarks.weight_decay`: none of them was used to design the choice.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from benchmarks.estimators import load, prepared
from benchmarks.weight_decay import MOST, parts

import pathlens as pl
from pathlens.estimators.recipes import DECAY_FACTORS, FOLDS, HELD_OUT_ROWS
from pathlens.papers.artifact import environment

RESULT = Path(__file__).parent / "results" / "weight-decay-sizes.json"
SETS = ("covertype", "electricity", "pendigits", "telco_churn", "california_housing", "diamonds")
SIZES = (300, 1000, 2400, 2600, 5000)
DESIGNED_ON = ("covertype", "electricity", "telco_churn", "california_housing")


def measure(name: str, rows: int) -> dict[str, Any]:
    """Test score and processor seconds of the default estimator on so many rows of a table."""
    torch.set_num_threads(1)
    X, y, task, _ = load(name, MOST)
    labels = task == "classification"
    a, b = parts(y, labels, 0, rows)
    pre = prepared("passthrough").fit(X.iloc[a])
    A, B = pre.transform(X.iloc[a]), pre.transform(X.iloc[b])
    start = time.process_time()  # of the processor: what else runs on the machine does not count
    model = (pl.DLGNClassifier if labels else pl.DLGNRegressor)(random_state=0).fit(A, y[a])
    seconds = time.process_time() - start
    return {
        "set": name,
        "task": task,
        "rows": len(a),
        "test rows": len(b),
        "choice": "present",
        "weight decay": model.weight_decay_,
        "score": float(model.score(B, y[b])),
        "seconds": seconds,
    }


def table(found: dict[str, Any]) -> list[str]:
    """The part of docs/comparison.md on sizes, as lines of Markdown."""
    tried = ", ".join(f"{share:g}" if share >= 1 else f"1/{1 / share:.0f}" for share in DECAY_FACTORS)
    lines = [
        "## Weight decay at all sizes",
        "",
        f'`weight_decay="auto"` tries {tried} times the value of the rule and compares squared errors on held-out '
        f"folds (of {FOLDS}) with {HELD_OUT_ROWS} rows together. The former choice compared losses; it tried 1 and 3 "
        "times the value from 200 to 2,500 rows, for classification only, and 1, 1/3, 1/10 and 1/30 times from 2,500 "
        "rows on. Accuracy in percent, or R² × 100, on the same test rows, with one random draw of training rows each: "
        "differences of less than a point mean little. Processor seconds of a fit, one thread of a busy "
        "machine. Sets with * were used to design the "
        f"choice, on other rows than the test rows. Former: {found['former']}. Made by "
        "`python -m benchmarks.weight_decay_sizes`.",
        "",
        "| set | training rows | former | present | present − former | weight decay, former | present | "
        "seconds, former | present |",
        "|" + "---|" * 9,
    ]
    gains, slower = [], []
    of = {(f["set"], f["rows"], f["choice"]): f for f in found["fits"]}
    for name, rows in ((name, rows) for name in SETS for rows in SIZES):
        if not {(name, rows, "former"), (name, rows, "present")} <= set(of):
            continue
        old, new = of[name, rows, "former"], of[name, rows, "present"]
        gains.append(100 * (new["score"] - old["score"]))
        slower.append(new["seconds"] / old["seconds"])
        lines.append(
            f"| {name}{'*' if name in DESIGNED_ON else ''} | {rows} | {100 * old['score']:.1f} | "
            f"{100 * new['score']:.1f} | {gains[-1]:+.1f} | {old['weight decay']:.2g} | "
            f"{new['weight decay']:.2g} | {old['seconds']:.1f} | {new['seconds']:.1f} |"
        )
    if not gains:
        return []
    return [
        *lines,
        "",
        f"Present − former: mean {np.mean(gains):+.2f}, median {np.median(gains):+.2f}, worst "
        f"{np.min(gains):+.2f}, best {np.max(gains):+.2f} points over {len(gains)} fits. A fit takes "
        f"{np.median(slower):.1f} times as long (median; {np.max(slower):.1f} at most).",
    ]


def main() -> None:
    """Parse the command line, measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {"former": "not measured", "fits": []}
    if options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    found["environment"] = environment(sklearn=sklearn.__version__)
    done = {(f["set"], f["rows"]) for f in found["fits"] if f["choice"] == "present"}
    for name, rows in ((name, rows) for rows in SIZES for name in SETS if (name, rows) not in done):
        found["fits"].append(one := measure(name, rows))
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name:20} {rows:5} rows: {100 * one['score']:.1f}, {one['seconds']:.0f} s", flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
