"""Table 2: random, learned and copied gates on MNIST and CIFAR-10.

Finished entries are read from the run's folder, so that the table can be filled by several runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series
from pathlens.papers.path_features.image_training import (
    ARCHITECTURES,
    GATES,
    MODELS,
    NETWORKS,
    OPTIMISERS,
    ROWS,
    SCORE,
    SETTINGS,
    SIZES,
    entry_accuracies,
    mean_and_sd,
    quick_deviations,
    selected,
    training_flops,
)

# mean and standard deviation of five runs in %, in the order of MODELS
TABLE_2 = {
    "fc-sgd": [(95.85, 0.10), (95.85, 0.17), (97.86, 0.11), (97.10, 0.09), (97.85, 0.09)],
    "fc-adam": [(96.02, 0.13), (96.09, 0.12), (98.22, 0.05), (97.82, 0.02), (98.14, 0.07)],
    "vconv-sgd": [(58.92, 0.62), (58.83, 0.27), (63.21, 0.07), (63.06, 0.73), (67.02, 0.43)],
    "vconv-adam": [(64.86, 1.18), (64.68, 0.84), (69.45, 0.76), (71.4, 0.47), (72.43, 0.54)],
    "gconv-sgd": [(67.36, 0.56), (66.86, 0.44), (74.57, 0.43), (78.52, 0.39), (78.90, 0.37)],
    "gconv-adam": [(67.09, 0.58), (67.08, 0.27), (77.12, 0.19), (79.68, 0.32), (80.43, 0.35)],
}

_LOWEST = Claim(
    "networks with fixed random gates are worse than all whose gates are learned",
    above=0.0,
    null=0.0,
    null_text="random gates as good",
    paper="Table 2: by 1.3 to 10 points",
    unit="points (worst of DNPFL, FLNPF and ReLU − better of FRNPF II and DI, last epoch)",
)
_NEAR = Claim(
    "values trained behind the gates of a trained ReLU network come near to it",
    above=0.5,
    null=0.0,
    null_text="learned gates no better than random ones",
    paper="Table 2: .51 (VCONV, SGD) to .97",
    unit="share of the way from FRNPF to ReLU that FLNPF makes, last epoch",
)
_ALIKE = Claim(
    "independent and dependent initialisation are close",
    below=1 / 3,
    null=1.0,
    null_text="as far apart as random and learned gates",
    paper="Table 2: at most .04",
    unit="× (|II − DI| / (ReLU − FRNPF), last epoch)",
)
_DECOUPLED = Claim(
    "on MNIST, gates learned in a network of their own are at least as good as ReLU",
    at_least=-0.1,
    null=-2.0,
    null_text="as far behind as random gates",
    paper="97.86 against 97.85 (SGD), 98.22 against 98.14 (Adam)",
    unit="points (DNPFL − ReLU, last epoch; −0.1 is the paper's own spread)",
)


def _claims(last: Mapping[str, Mapping[str, np.ndarray]]) -> list[Claim]:
    """Claims of every row, from the test accuracies after the last epoch."""
    claims = []
    for row, name in ROWS.items():
        independent, dependent, dnpfl, flnpf, relu = (last[row][m] for m in MODELS)
        random = (independent + dependent) / 2
        gap = np.where(relu > random, relu - random, np.nan)  # without a gap there is no share of it
        worst_learned = np.minimum(np.minimum(dnpfl, flnpf), relu)
        claims += [
            _LOWEST.measure(worst_learned - np.maximum(independent, dependent), row=name),
            _NEAR.measure((flnpf - random) / gap, row=name),
            _ALIKE.measure(abs(independent - dependent) / gap, row=name),
        ]
        if row.startswith("fc"):
            claims.append(_DECOUPLED.measure(dnpfl - relu, row=name))
    return claims


def _trained_sizes(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sizes of the entries in the table, whichever runs they came from."""
    rows = {
        row: {m: one["accuracy"].shape[1] for m, one in entries.items()} for row, entries in found.items() if entries
    }
    epochs: dict[str, Any] = {}
    for row, by_model in rows.items():
        same = len(by_model) == len(MODELS) and len(set(by_model.values())) == 1
        epochs[row] = by_model["relu"] if same else by_model
    return {
        "epochs": epochs,
        "architectures": [a for a in ARCHITECTURES if any(row.startswith(a) for row in rows)],
        "optimisers": [o for o in OPTIMISERS if any(row.endswith(o) for row in rows)],
        "models": [m for m in MODELS if any(m in entries for entries in rows.values())],
    }


@experiment(
    "npk.tab2",
    title="Random, learned and copied gates on MNIST and CIFAR-10",
    what="Table 2: FRNPF (II, DI), DNPFL, FLNPF and ReLU × FC, VCONV, GCONV × SGD, Adam",
    claims=[_LOWEST, _NEAR, _ALIKE, _DECOUPLED],
    deviations=[SCORE, NETWORKS, SETTINGS],
    sizes={
        **SIZES,
        # what a run trains; finished entries of earlier runs stay in the table
        "architectures": list(ARCHITECTURES),
        "optimisers": (["adam"], list(OPTIMISERS)),
        "models": list(MODELS),
    },
    data=("mnist", "cifar10"),
    minutes=(2, 450),
    flops=lambda size: sum(training_flops(size, row, m, size["epochs"][row]) for row, m in selected(size)),
    shares="path features",
)
def tab2(run: Run) -> Artifact:
    """Table 2: test accuracy of five models in six rows."""
    chosen = selected(run.sizes)
    missing = np.full(len(run.seeds), np.nan)
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    last: dict[str, dict[str, np.ndarray]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    for row, name in ROWS.items():
        entries = {m: entry_accuracies(run, row, m, train=(row, m) in chosen) for m in MODELS}
        found[row] = {m: one for m, one in entries.items() if one is not None}
        last[row] = dict.fromkeys(MODELS, missing)
        for m, one in found[row].items():
            accuracy = one["accuracy"]
            last[row][m] = accuracy[:, -1]
            scores = {"last epoch": accuracy[:, -1], "best epoch": accuracy.max(1)}
            if "hard" in one:
                scores["last epoch, hard gates at test"] = one["hard"]
            metrics.setdefault(name, {})[MODELS[m]] = {
                what: {"mean ± sd": mean_and_sd(values), "each": values.round(3).tolist()}
                for what, values in scores.items()
            }
            arrays[_array(row, m)] = accuracy
            arrays[f"{_array(row, m)}_epochs"] = 1 + np.arange(accuracy.shape[1])
    paper = {row: dict(zip(MODELS, numbers)) for row, numbers in TABLE_2.items()}
    for m in MODELS:
        rows = [row for row in ROWS if m in found[row]]
        arrays[f"ours_{m}"] = [last[row][m] for row in rows]
        arrays[f"paper_{m}"] = [[paper[row][m][0]] * len(run.seeds) for row in rows]
    return run.artifact(
        claims=_claims(last),
        metrics={"test accuracy in %": metrics},
        paper_numbers={
            ROWS[row]: {MODELS[m]: f"{mean} ± {sd}" for m, (mean, sd) in numbers.items()}
            for row, numbers in paper.items()
        },
        deviations=quick_deviations(run),
        gates=GATES,
        arrays=float32(arrays),
        config=_trained_sizes(found),
        panels=_panels({row: list(entries) for row, entries in found.items() if entries}, run.scale == "paper"),
    )


def _array(row: str, model: str) -> str:
    return f"{row.replace('-', '_')}_{model}"


def _panels(found: Mapping[str, list[str]], compared: bool) -> list[Panel]:
    """``found`` lists the models of each row; the paper's numbers are ``compared`` if the data are the paper's."""
    axis = "test accuracy, %"
    panels = []
    for row, models in found.items():
        series = [Series(f"{_array(row, m)}[:, -1]", MODELS[m]) for m in models]
        panels.append(Panel("strips", f"{ROWS[row]}: last epoch", series, x_label=axis))
    there = {m for models in found.values() for m in models}
    if compared and there:
        panels.append(
            Panel(
                "points",
                "All rows, ours against the paper's",
                [Series(f"ours_{m}", name, x=f"paper_{m}") for m, name in MODELS.items() if m in there],
                diagonal=True,
                x_label="the paper's (best epoch), %",
                y_label="ours (last epoch), %",
            )
        )
    if found:
        row = next(row for row in ("gconv-adam", "fc-adam", *found) if row in found)
        series = [Series(_array(row, m), MODELS[m], x=f"{_array(row, m)}_epochs") for m in found[row]]
        panels.append(Panel("lines", f"{ROWS[row]}: every epoch", series, x_label="epoch", y_label=axis))
    return panels
