"""Quadratic gates against linear ones with as many parameters: an experiment that the summary proposes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.image_runs import accuracies, hard_accuracies, images, options, spread
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.records import Record
    from pathlens.training import Runs

KINDS = {"linear": "linear gates, layer by layer", "shallow": "linear gates of x", "quadratic": "quadratic gates of x"}
SETS = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
BETA = 4.0
EARLY = 3
CIRCLE_EPOCHS = (0, 1, EARLY, 10, 30, 100)

QUESTION = Deviation(
    paper="proposed as an experiment (summary, experiment 3), with neither sizes nor results",
    ours="piecewise constant networks of five hidden layers, soft gates β = 4; widths chosen so that all three have "
    "the parameters of the linearly gated network",
    why="a wider gate function should not win by its size",
)
RANK = Deviation(
    paper="'a quadratic function of the input'",
    ours="Σ_r s_r (v_r·x)² + u·x, one square per unit (rank 1)",
    why="a full quadratic form has d² numbers per gate: 9.4 million on CIFAR-10",
)
_FITS = Claim(
    "on the circle, quadratic gates fit better with as many parameters",
    below=0.5,
    null=1.0,
    null_text="no better",
    paper="proposed",
    unit="× (loss after the last epoch, quadratic / linear)",
)
_ACCURATE = Claim(
    "on images, quadratic gates are more accurate with as many parameters",
    above=0.0,
    null=0.0,
    null_text="no better",
    paper="proposed",
    unit="points of test accuracy, quadratic − linear",
)
_SLOW_HALF = Claim(
    f"on the circle, paths concentrate on the slow half by epoch {EARLY}",
    above=2.0,
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3, for linear gates",
    unit="× (mean diagonal of the overlap kernel, top / bottom)",
)


def build(kind: str, inputs: int, width: int, outputs: int, rank: int) -> Any:
    """A piecewise constant network of five hidden layers with the given kind of gates."""
    from pathlens import models

    given: dict[str, Any] = {"piecewise_constant": True, "beta": BETA}
    hidden = (width,) * 5
    if kind == "quadratic":
        return models.quadratic(inputs, hidden, outputs, rank=rank, **given)
    return (models.dlgn if kind == "linear" else models.dlgn_shallow)(inputs, hidden, outputs, **given)


def matched_width(kind: str, inputs: int, width: int, outputs: int, rank: int) -> int:
    """The width at which a kind of gates has nearest to the parameters of the linearly gated network of `width`."""

    def parameters(kind: str, w: int) -> int:
        return sum(p.numel() for p in build(kind, inputs, w, outputs, rank).parameters())

    wanted, w = parameters("linear", width), 1
    while parameters(kind, w) < wanted:
        w += 1
    return w if w == 1 or parameters(kind, w) - wanted <= wanted - parameters(kind, w - 1) else w - 1


def _path_ratio(record: Record, top: np.ndarray) -> float:
    """Active paths on the slow half of the circle over those on the fast half."""
    from pathlens.kernels import overlap

    diagonal = overlap(record).diagonal().double().numpy()
    return float(diagonal[top].mean() / diagonal[~top].mean())


def _circle(run: Run) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    from pathlens.data import circle
    from pathlens.training import Execution, Keep, train

    size = run.sizes
    data, epochs = circle(size["points"]), size["circle_epochs"]
    top = data.marks["top"].numpy()
    kept = sorted({e for e in CIRCLE_EPOCHS if e < epochs} | {epochs})
    arrays: dict[str, Any] = {"circle_epochs": np.array(kept)}
    widths = {}
    for kind in KINDS:
        widths[kind] = matched_width(kind, 2, size["circle_width"], 1, size["rank"])
        given = options(run, f"circle, {KINDS[kind]}")
        given |= {"loss": "mse", "execution": Execution(), "keep": Keep(kept, X=data.x, sensitivities=False)}
        given["checkpoints"] = checkpoints_in(run.checkpoint("quadratic", "circle", kind), every=50)
        runs: Any = train(
            build(kind, 2, widths[kind], 1, size["rank"]),
            data,
            epochs=epochs,
            lr=size["circle_lr"],
            batch_size=size["circle_batch"],
            **given,
        )
        arrays[f"loss_{kind}"] = runs.history()
        arrays[f"paths_{kind}"] = np.array([[_path_ratio(t.at_epoch(e).record, top) for e in kept] for t in runs])
    return arrays, widths


def _images(run: Run, name: str) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    from pathlens.training import train

    size = run.sizes
    data = images(name, size["rows"], size["rows_test"], flatten=True)
    arrays: dict[str, np.ndarray] = {}
    widths = {}
    for kind in KINDS:
        widths[kind] = matched_width(kind, data.d, size["width"], data.c, size["rank"])
        runs: Runs = train(  # type: ignore[assignment]  # seeds are given
            build(kind, data.d, widths[kind], data.c, size["rank"]),
            data,
            epochs=size["epochs"],
            lr=size["lr"],
            batch_size=size["batch_size"],
            **options(run, f"{SETS[name]}, {KINDS[kind]}", "quadratic", name, kind),
        )
        scores = {
            **accuracies(runs),
            "hard": hard_accuracies(runs, data, run.device),
            "history": 100 * runs.history("test_accuracy"),
        }
        arrays |= {f"{what}_{name}_{kind}": values for what, values in scores.items()}
    return arrays, widths


@experiment(
    "hs.quadratic",
    title="Quadratic gates against linear ones",
    what="circle, Fashion-MNIST, CIFAR-10: gates of rank 1 in place of half-spaces, equal parameters",
    claims=[_FITS, _ACCURATE, _SLOW_HALF],
    deviations=[QUESTION, RANK],
    # the summary states no size: the circle and the fully connected networks of the paper
    sizes={
        "points": (512, 1024),
        "circle_width": 16,
        "circle_epochs": (200, 1000),
        "circle_lr": (1e-3, 5e-4),
        "circle_batch": 32,
        "images": ["fashion_mnist", "cifar10"],
        "width": (32, 128),
        "rank": 1,
        "rows": (2000, None),
        "rows_test": (2000, None),
        "epochs": (10, 32),
        "lr": (1e-3, 2e-4),
        "batch_size": 128,
    },
    seeds=(3, 5),
    data=("fashion_mnist", "cifar10"),
    minutes=(1.5, 15),
    # gates and values of both kinds; flat images of up to 3072 numbers
    flops=lambda size: (
        24.0 * len(size["images"]) * 3072 * size["width"] * (size["rows"] or 60_000) * size["epochs"] * size["seeds"]
    ),
)
def quadratic(run: Run) -> Artifact:
    """Accuracy and dynamics of gates that are quadratic functions of the input."""
    size = run.sizes
    arrays, widths = _circle(run)
    all_widths = {"circle": widths}
    at = list(arrays["circle_epochs"]).index(EARLY) if EARLY in arrays["circle_epochs"] else -1
    final = {kind: arrays[f"loss_{kind}"][:, -1] for kind in KINDS}
    claims = [
        _FITS.measure(final["quadratic"] / final[kind], row=f"against {KINDS[kind]}") for kind in ("linear", "shallow")
    ]
    claims += [_SLOW_HALF.measure(arrays[f"paths_{kind}"][:, at], row=KINDS[kind]) for kind in KINDS]
    table = {}
    for name in size["images"]:
        found, all_widths[name] = _images(run, name)
        arrays |= found
        last = {kind: found[f"last_{name}_{kind}"] for kind in KINDS}
        claims += [
            _ACCURATE.measure(last["quadratic"] - last[kind], row=f"{SETS[name]}, against {KINDS[kind]}")
            for kind in ("linear", "shallow")
        ]
        table[SETS[name]] = {
            KINDS[kind]: {
                label: spread(found[f"{what}_{name}_{kind}"])
                for what, label in (
                    ("last", "test, last epoch"),
                    ("best", "test, best epoch (chosen on the test set)"),
                    ("hard", "test, hard gates"),
                )
            }
            for kind in KINDS
        }
    if not size["images"]:
        claims.append(_ACCURATE.measure([]))
    return run.artifact(
        claims=claims,
        metrics={
            "accuracy": table,
            "loss on the circle": {kind: spread(values) for kind, values in final.items()},
            "widths": all_widths,
        },
        gates={"training and test": f"soft β={BETA:g}", "active paths, 'hard gates'": "hard"},
        arrays=float32(arrays),
        config={"beta": BETA},
        panels=_panels(size["images"]),
    )


def _panels(names: list[str]) -> list[Panel]:
    circle = [
        Panel(
            "lines",
            "Circle: training loss",
            [Series(f"loss_{kind}", label) for kind, label in KINDS.items()],
            x_label="epoch",
            y_label="mean squared error",
            y_scale="log",
        ),
        Panel(
            "lines",
            "Circle: active paths on the slow half",
            [Series(f"paths_{kind}", label) for kind, label in KINDS.items()],
            x="circle_epochs",
            x_label="epoch",
            y_label="top / bottom, mean diagonal",
            x_scale="log",
            y_scale="log",
            marks=[(1.0, "as many on either half")],
        ),
    ]
    last = [
        Panel(
            "strips",
            f"{SETS[name]}, after the last epoch",
            [
                Series(f"{what}_{name}_{kind}", f"{label}{more}")
                for kind, label in KINDS.items()
                for what, more in (("last", ""), ("hard", ", hard at test"))
            ],
            x_label="test accuracy, %",
        )
        for name in names
    ]
    curves = [
        Panel(
            "lines",
            f"{SETS[name]} over training",
            [Series(f"history_{name}_{kind}", label) for kind, label in KINDS.items()],
            x_label="epoch",
            y_label="test accuracy, %",
        )
        for name in names
    ]
    return [*circle, *last, *curves]
