"""Figure 5: what the networks compute over the angle, at several epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.pages.words import number
from pathlens.papers.panels import Panel, Series

EARLY = 10  # an epoch by which the slow half is learned and the fast one is not

_FIRST = Claim(
    f"the slow half is learned first: at epoch {EARLY} the error on the fast half is several times larger",
    above=4.0,
    null=1.0,
    null_text="both halves equally well",
    paper="Figure 5",
    unit="× (mean squared error, bottom / top)",
)
_ARTEFACTS = Claim(
    "frozen gates leave artefacts on the slow half at the end of training",
    above=2.0,
    null=1.0,
    null_text="as smooth as with learned gates",
    paper="'high frequency artifacts … even after 8000 epochs'",
    unit="× (root mean squared error on top, frozen / learned)",
)


@circle.circle_experiment(
    "hs.fig5",
    title="What the networks compute over time",
    what="model outputs over epochs: ReLU, DLGN-PWC, DLGN-PWC with frozen gates",
    claims=[_FIRST, _ARTEFACTS],
    deviations=[circle.CIRCLE, circle.SETTINGS, circle.FROZEN],
)
def fig5(run: Run) -> Artifact:
    """Figure 5: outputs over the angle at several epochs."""
    circle.check_epochs(run, circle.NAMES)
    c = circle.train_circle(run)
    last = run.sizes["epochs"]
    arrays = {"theta": c.theta, "y": c.y}

    def outputs(model: str, epoch: int) -> np.ndarray:
        """Outputs of every seed: (seeds, points)."""
        return np.stack([c.record(model, i, epoch).f[:, 0].numpy() for i in range(len(run.seeds))])

    def errors(model: str, epoch: int, half: np.ndarray) -> np.ndarray:
        """Mean squared error of every seed on one half."""
        return np.mean((outputs(model, epoch) - c.y)[:, half] ** 2, axis=1)

    for m in circle.NAMES:
        epochs = (3, 200, last[m]) if m == "frozen" else (3, 50, 200)
        arrays[f"epochs_{m}"] = np.array(epochs)
        arrays[f"outputs_{m}"] = np.stack([outputs(m, e)[c.shown(m)] for e in epochs])
    frozen, learned = (errors(m, last[m], c.top) for m in ("frozen", "dlgn_pwc"))
    return run.artifact(
        claims=[
            *(
                _FIRST.measure(errors(m, EARLY, ~c.top) / errors(m, EARLY, c.top), row=name)
                for m, name in circle.LEARNED.items()
            ),
            _ARTEFACTS.measure(np.sqrt(frozen / learned)),
        ],
        gates={circle.NAMES[m]: circle.SOFT[m] for m in circle.NAMES},
        arrays=float32(arrays),
        config=circle.BETAS,
        panels=fig5_panels(arrays),
    )


def fig5_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Outputs over the angle at several epochs, one panel per model, the target behind."""
    top, panels = arrays["theta"] < math.pi, []
    for m, name in circle.NAMES.items():
        square = (arrays[f"outputs_{m}"][-1] - arrays["y"]) ** 2
        above, below = (number(float(square[half].mean()), 2) for half in (top, ~top))
        labels = [circle.epoch_label(epoch) for epoch in arrays[f"epochs_{m}"]]
        panels.append(
            Panel(
                "stacks",
                name,
                [Series(f"outputs_{m}[{k}]", label, colour=circle.COLOURS[m]) for k, label in enumerate(labels)],
                "theta",
                "angle θ",
                x_ticks=circle.ANGLES,
                shade=(0, math.pi),
                y_limits=(-1.6, 1.6),
                background="y",
                note=f"Output (colour) and target (grey) of one seed. Mean squared error at {labels[-1]}: {above} on "
                f"the top half, {below} on the bottom half.",
            )
        )
    return panels
