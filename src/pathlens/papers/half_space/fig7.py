"""Figures 7, 11 and 12: active paths and the diagonal of the NTK on the simple and the complex part of the classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space import fashion_training as fashion
from pathlens.papers.half_space.parts import NAMES, PARTS, mean_paths, measure_at, part_means
from pathlens.papers.image_runs import accuracies, hard_accuracies
from pathlens.papers.panels import Panel, Series

CURVE = (0, 1, 2, 3, 5, 7, 10, 15, 20, 25, 32, 50, 70, 100)  # epochs at which paths are counted

_MORE = Claim(
    "after training, more paths are active on the simple part",
    above=1.25,
    null=1.0,
    null_text="as many on either part",
    paper="Figures 7, 11, 12",
    unit="× (mean active paths, simple / complex)",
)
_ALWAYS = Claim(
    "the simple part has more paths consistently, from the first epoch on",
    at_least=0.9,
    null=0.5,
    null_text="either part may lead",
    paper="'consistently higher than the complex part'",
    unit="share of the measured epochs",
)
_DIAGONAL = Claim(
    "after training, the diagonal of the NTK is larger on the simple part",
    above=1.25,
    null=1.0,
    null_text="as large on either part",
    paper="Figures 7, 11, 12; in 16b, 73 / 27 of the trace",
    unit="× (mean diagonal of the NTK, simple / complex)",
)
_FIRST = Claim(
    f"the simple part is learned first: when it is at {fashion.MIDDLE:g} %, the complex part is mostly not learned",
    below=50.0,
    null=72.0,
    null_text="both parts alike",
    paper="'72 out of 85 … but the hard mode is still mostly not learned yet'",
    unit="% right on the complex part",
)


@experiment(
    "hs.fig7",
    title="Paths go to the simple classes",
    what="modified Fashion-MNIST: active paths and NTK diagonal on simple and complex classes, ReLU and DLGN-PWC",
    claims=[_MORE, _ALWAYS, _DIAGONAL, _FIRST],
    deviations=[fashion.CLUSTERS, fashion.TRAINING, fashion.COUNTS],
    sizes={**fashion.FIGURES, "measured": (300, 2000)},
    seeds=3,
    data=("fashion_mnist",),
    minutes=(2, 5),
    flops=lambda sizes: fashion.training_flops(sizes, 3),
    shares="fashion",
)
def fig7(run: Run) -> Artifact:
    """Figures 7, 11 and 12."""
    from pathlens.kernels import ntk
    from pathlens.recording import record

    last, data = run.sizes["epochs"], fashion.load_data(run)
    epochs = sorted({e for e in CURVE if e < last} | {last})
    x, simple = fashion.measured_rows(run, data)

    def measure(net: Any) -> Any:
        taken = record(net, x)
        diagonal = ntk(taken).diagonal().double().cpu().numpy()
        return mean_paths(net, taken, simple), part_means(diagonal, simple)

    arrays: dict[str, Any] = {"epochs": epochs}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for model, name in NAMES.items():
        runs = fashion.train_fashion(run, model)
        paths, diagonal = np.moveaxis(measure_at(run, runs, epochs, measure, f"paths, {name}"), 2, 0)
        accuracy = fashion.part_accuracies(runs, data)
        middle, ratio = fashion.middle_epochs(accuracy), paths[..., 0] / paths[..., 1]
        claims += [
            _MORE.measure(ratio[:, -1], row=name),
            _ALWAYS.measure((ratio[:, 1:] > 1).mean(1), row=name),
            _DIAGONAL.measure(diagonal[:, -1, 0] / diagonal[:, -1, 1], row=name),
            _FIRST.measure([None if e is None else accuracy[i, e, 1] for i, e in enumerate(middle)], row=name),
        ]
        metrics[name] = {
            "paths, simple / complex": {
                "at initialisation": ratio[:, 0].tolist(),
                "at the end": ratio[:, -1].tolist(),
                "mean ± sd at the end": _mean_sd(ratio[:, -1]),
            },
            "active paths at the end": {part: _mean_sd(paths[:, -1, k]) for k, part in enumerate(PARTS)},
            "first epoch with 72 % on the simple part": middle,
            "test accuracy, last epoch, mean ± sd": {
                **{part: _mean_sd(accuracy[:, -1, k]) for k, part in enumerate(PARTS)},
                **{f"all, {when}": _mean_sd(values) for when, values in accuracies(runs).items()},
                "all, hard gates": _mean_sd(hard_accuracies(runs, data, run.device)),
            },
        }
        arrays |= {
            f"paths_{model}": paths,
            f"ntk_{model}": diagonal,
            f"accuracy_{model}": accuracy,
            f"ratio_{model}": ratio,
        }
    return run.artifact(
        claims=claims,
        metrics=metrics,
        paper_numbers={"numbers": "in pictures alone"},
        gates={
            "active paths": "hard",
            "DLGN-PWC, NTK and accuracy": f"soft β={run.sizes['beta']:g}",
            "ReLU": "hard",
        },
        arrays=float32(arrays),
        panels=[
            Panel(
                "lines",
                f"{name}: {title}",
                [Series(f"{key}_{model}[:, :, {k}]", part) for k, part in enumerate(PARTS)],
                x,
                "epoch",
                y_label,
                y_scale=scale,
            )
            for key, title, y_label, x, scale in (
                ("paths", "active paths", "mean active paths, hard gates", "epochs", "log"),
                ("ntk", "diagonal of the NTK", "mean diagonal entry", "epochs", "log"),
                ("accuracy", "test accuracy", "% right", "", "linear"),
            )
            for model, name in NAMES.items()
        ],
    )


def _mean_sd(values: np.ndarray) -> str:
    """Mean ± standard deviation over seeds, as text for the page."""
    return f"{values.mean():.4g} ± {values.std(ddof=1) if len(values) > 1 else 0.0:.2g}"
