"""Controls for Figures 3 and 7: path ratios for targets that separate 'simple' from 'learnable early'."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.half_space import fashion_training as fashion
from pathlens.papers.half_space.parts import MORE_PATHS, NAMES, PARTS, part_means, path_ratios, ratio_panel
from pathlens.papers.panels import Series

TARGETS = {
    "circle": "sin θ | sin 12θ",
    "swapped": "sin 12θ | sin θ",
    "trivial": "0 | sin 12θ",
    "offset": "sin 12θ + 1 | sin 12θ",
}
SCRAMBLED = {"5 to 9": (5, 6, 7, 8, 9), "0 to 4": (0, 1, 2, 3, 4)}

CONTROLS = Deviation(
    paper="'paths move preferentially to cover low-frequency/simpler regions of the target'",
    authors_code="not public",
    ours="targets in which the simple half has no energy to learn (0), or in which both halves are equally fast and "
    "one has an offset that is learned at once; halves swapped; Fashion-MNIST with classes 0 to 4 scrambled",
    why="on the paper's own data simplicity, direction, norm and energy that is learnable early go together",
)
_EQUAL = Claim(
    "where both halves are equally fast, an offset on one draws no paths to it",
    below=1.5,
    null=4.0,
    null_text="paths follow energy that is learnable early",
    paper="section 5",
    unit="× (mean active paths at the end, half with offset / other)",
)


def _circle_ratios(run: Run, target: str) -> np.ndarray:
    """Path ratios of the slow (or constant, or shifted) half over the other, (models, seeds, epochs)."""
    from pathlens import data as sets

    points, epochs = run.sizes["points"], [0, 3, run.sizes["circle_epochs"]]
    data = sets.circle(points) if target == "circle" else sets.circle_control(target, points=points)
    x, simple = data.x.to(run.device), data.marks["top"].numpy() != (target == "swapped")
    runs = [circle.train_target(run, model, data, epochs[-1], epochs) for model in NAMES]
    return np.array([path_ratios(run, one, epochs, x, simple) for one in runs])


@experiment(
    "hs.controls",
    title="What paths follow",
    what="path ratios for circle targets that separate 'simple' from 'learnable early'; Fashion-MNIST swapped",
    claims=[MORE_PATHS, _EQUAL],
    deviations=[CONTROLS, circle.CIRCLE, circle.SETTINGS, fashion.CLUSTERS, fashion.TRAINING],
    sizes={**fashion.SIZES, "points": 1024, "circle_epochs": (100, 200), "measured": (1000, 10000)},
    data=("fashion_mnist",),
    minutes=(2, 4),
    flops=lambda sizes: 2 * fashion.training_flops(sizes, 3),
    shares="fashion",
)
def controls(run: Run) -> Artifact:
    """Controls for Figures 3 and 7."""
    arrays, claims, norms = {}, [], {}
    for target, formula in TARGETS.items():
        arrays[f"ratio_{target}"] = ratio = _circle_ratios(run, target)
        for m, name in enumerate(NAMES.values()):
            claim, row = (_EQUAL, name) if target == "offset" else (MORE_PATHS, f"{formula}, {name}")
            claims.append(claim.measure(ratio[m, :, -1], row=row))
    for which, scrambled in SCRAMBLED.items():
        data = fashion.load_data(run, scrambled)
        length = data.x.norm(dim=1).numpy()
        norms[f"classes {which} complex"] = dict(zip(PARTS, part_means(length, data.marks["simple"].numpy())))
        for model, name in NAMES.items():
            runs = fashion.train_fashion(run, model, scrambled)
            ratio = path_ratios(run, runs, [0, run.sizes["epochs"]], *fashion.measured_rows(run, data))
            claims.append(MORE_PATHS.measure(ratio[:, -1], row=f"Fashion-MNIST, classes {which} complex, {name}"))
            arrays[f"images_{model}_{scrambled[0]}"] = ratio
    return run.artifact(
        claims=claims,
        metrics={
            "paths, simple / complex, at each epoch": {key: values.tolist() for key, values in arrays.items()},
            "mean norm of an image": norms,
        },
        gates={"active paths": "hard"},
        arrays=float32(arrays),
        panels=[
            *(
                ratio_panel(
                    f"{name}: circle",
                    [Series(f"ratio_{target}[{m}, :, -1]", formula) for target, formula in TARGETS.items()],
                    x_label="active paths at the end, simple / complex",
                    note="Targets are those of the top | bottom half. For the last one, the ratio is the half with the "
                    "offset / the other.",
                )
                for m, name in enumerate(NAMES.values())
            ),
            ratio_panel(
                "Fashion-MNIST",
                [
                    Series(f"images_{model}_{scrambled[0]}[:, {j}]", f"{name}, {which} complex, {when}")
                    for model, name in NAMES.items()
                    for which, scrambled in SCRAMBLED.items()
                    for j, when in enumerate(("init", "end"))
                ],
                x_label="active paths, simple / complex",
            ),
        ],
    )
