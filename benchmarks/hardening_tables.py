"""What hard gates cost on tables: the estimators against the same networks with soft gates, on every set.

``python -m benchmarks.hardening_tables --jobs N`` takes random splits of the sets that `benchmarks.estimators`
compares, fits the estimator, trains soft networks (β = 4, soft gates at test too) for as many epochs as the estimator's
first phase and for as many as all its phases, and writes
``benchmarks/results/hardening-tables.json`` after every split; a run that was cut off goes on from there.
``docs/comparison.md`` is made from that file, too (``python -m benchmarks.estimators --page``).
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from benchmarks.estimators import BUNDLED, load, prepared
from sklearn.model_selection import train_test_split

import pathlens as pl
from pathlens.estimators.recipes import Recipe, resolve_recipe
from pathlens.papers.artifact import environment
from pathlens.training import Keep, train

RESULT = Path(__file__).parent / "results" / "hardening-tables.json"
FEW = 1000  # rows: under it a test row is half a point or more, so that it takes more splits to tell a point
SPLITS = {True: 10, False: 3}


def measure(name: str, split: int, rows: int, seeds: int) -> dict[str, Any]:
    """Test scores of each seed on one split: soft networks, and the estimator, whose gates are hard."""
    torch.set_num_threads(1)
    X, y, task, _ = load(name, rows)
    labels = task == "classification"
    a, b = train_test_split(np.arange(len(y)), test_size=0.25, random_state=split, stratify=y if labels else None)
    pre = prepared("passthrough").fit(X.iloc[a])
    A, B = pre.transform(X.iloc[a]), pre.transform(X.iloc[b])
    kind = pl.DLGNClassifier if labels else pl.DLGNRegressor
    fitted = [kind(weight_decay=_recipe(len(A)).weight_decay, random_state=s).fit(A, y[a]) for s in range(seeds)]
    spent = fitted[0].n_iter_
    out: dict[str, Any] = {
        "set": name,
        "task": task,
        "split": split,
        "rows": len(y),
        "chosen": [m.hardening_ for m in fitted],
        "scores": {"hard": [float(m.score(B, y[b])) for m in fitted]},
        "training": {"hard": [float(m.score(A, y[a])) for m in fitted]},
    }
    for label, epochs in (("soft", None), ("soft, all epochs", spent)):
        out["scores"][label], out["training"][label] = _soft((A, y[a]), (B, y[b]), labels, epochs, seeds)
    out["epochs"] = spent
    return out


def _recipe(n: int) -> Recipe:
    """The default fit of n rows, without a choice of the weight decay."""
    return resolve_recipe(pl.DLGNRegressor(), n, n, 0)


def _soft(rows: Any, test: Any, labels: bool, epochs: int | None, seeds: int) -> tuple[list[float], list[float]]:
    """Scores on the test and the training rows of networks like the estimator's whose gates stay soft."""
    (A, y), (B, z) = rows, test
    names = np.unique(y) if labels else None
    centre, spread = (0.0, 1.0) if labels else (y.mean(), y.std())

    def targets(t: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(names, t) if labels else ((t - centre) / spread)[:, None])

    recipe = _recipe(len(A))
    outputs = len(names) if names is not None else 1
    net = pl.models.dlgn(A.shape[1], recipe.hidden, outputs, beta=recipe.beta[0], bias=True, seed=0).double()
    runs = train(
        net,
        (torch.from_numpy(A), targets(y)),
        epochs=epochs or recipe.epochs,
        progress=False,
        loss="cross_entropy" if labels else "mse",
        optimizer="adamw",
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        batch_size=recipe.batch_size,
        seeds=range(seeds),
        scheduler="cosine",
        keep=Keep(evaluate="running"),
    )

    def score(member: torch.nn.Module, x: np.ndarray, truth: torch.Tensor) -> float:
        with torch.no_grad():
            f = member(torch.from_numpy(x))
        if labels:
            return float((f.argmax(1) == truth).double().mean())
        return float(1 - (f - truth).square().mean() / truth.var(unbiased=False))

    members = runs.networks  # type: ignore[union-attr]
    return [score(m, B, targets(z)) for m in members], [score(m, A, targets(y)) for m in members]


def summary(splits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per set: medians over seeds, their means over splits, and "hard" less "soft" on every split."""
    out = []
    for name in dict.fromkeys(s["set"] for s in splits):
        of = sorted((s for s in splits if s["set"] == name), key=lambda s: s["split"])
        medians = {k: [float(np.median(s["scores"][k])) for s in of] for k in of[0]["scores"]}
        gaps = [hard - soft for hard, soft in zip(medians["hard"], medians["soft"])]
        follows = float(np.mean([kind == "follow" for s in of for kind in s["chosen"]]))
        out.append(
            {"set": name, "task": of[0]["task"], "rows": of[0]["rows"], "gaps": gaps, "follows": follows}
            | {k: float(np.mean(v)) for k, v in medians.items()}
        )
    return out


def table(found: dict[str, Any]) -> list[str]:
    """The part of docs/comparison.md on soft and hard gates, as lines of Markdown."""
    rows = sorted(summary(found["splits"]), key=lambda s: np.mean(s["gaps"]))
    lines = [
        "## Soft against hard",
        "",
        "The papers' network keeps soft gates (β = 4) at test; the estimators predict with hard ones. Same sizes, "
        f"rates and rows (at most {found['row limit']}); medians over {found['seeds']} seeds, their means over random "
        "splits, and mean and median over splits of the difference in points. *Soft* has the epochs of the estimator's "
        "first phase, *all epochs* those of all "
        'its phases; *hard* is the default with the same weight decay, which chooses between `hardening="anneal"` and '
        '`"follow"`. Made by `python -m benchmarks.hardening_tables`.',
        "",
        "| set | splits | soft | soft, all epochs | hard | follows | hard − soft | median of splits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in rows:
        cells = " | ".join(f"{100 * s[k]:.1f}" for k in ("soft", "soft, all epochs", "hard"))
        lines.append(
            f"| {s['set']} | {len(s['gaps'])} | {cells} | {100 * s['follows']:.0f} % | "
            f"{100 * np.mean(s['gaps']):+.2f} | {100 * np.median(s['gaps']):+.2f} |"
        )
    within = sum(np.median(s["gaps"]) >= -0.01 for s in rows)
    return [*lines, "", f"Within one point of soft, or better, by the median: {within} of {len(rows)} sets."]


def main() -> None:
    """Parse the command line, measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--sets", nargs="*", help="only these sets")
    parser.add_argument("--splits", type=int, help="so many splits of every set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000, help="at most so many rows of a set")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {"seeds": options.seeds, "row limit": options.rows, "splits": []}
    if options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
        if (found["seeds"], found["row limit"]) != (options.seeds, options.rows):
            raise SystemExit(f"{options.json} holds {found['seeds']} seeds of at most {found['row limit']} rows.")
    found["environment"] = environment(sklearn=sklearn.__version__)
    done = {(s["set"], s["split"]) for s in found["splits"]}
    wanted = []
    for name in options.sets or [*BUNDLED, *pl.data.table_names()]:
        few = len(load(name, FEW)[1]) < FEW
        wanted += [(name, split) for split in range(options.splits or SPLITS[few]) if (name, split) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that are started here
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for ready in as_completed([pool.submit(measure, *job, options.rows, options.seeds) for job in wanted]):
            found["splits"].append(result := ready.result())
            found["splits"].sort(key=lambda s: (s["set"], s["split"]))
            part = options.json.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(options.json)
            medians = {k: f"{100 * np.median(v):.1f}" for k, v in result["scores"].items()}
            print(f"{result['set']:20} split {result['split']}: {medians}", flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
