"""Figure 2: the target on the circle, and the training losses with learned and with frozen gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.pages.words import read_spread
from pathlens.papers.panels import Panel, Series

_REACHES = Claim(
    "learned gates bring the loss under .01 in about 200 epochs",
    at_most=400,
    null=2000,
    null_text="what the paper reports for frozen gates",
    paper="about 200 epochs",
    unit="epochs",
)
_SLOW = Claim(
    "frozen gates need more than 2000 epochs to reach .01",
    above=2000,
    null=200,
    null_text="as fast as learned gates",
    paper="more than 2000 epochs",
    unit="epochs",
)
_BEHIND = Claim(
    "when the DLGN with learned gates is under .01, the one with frozen gates is still above .1",
    above=0.1,
    null=0.01,
    null_text="frozen gates as good as learned ones",
    paper="Figure 2",
)


def _never_or_unknown(epochs: list[int | None], trained: int, limit: float) -> list[float | None]:
    """Epochs as numbers; a loss that was not reached is 'never' only if training was longer than the claim's limit."""
    return [float(e) if e is not None else (math.inf if trained > limit else None) for e in epochs]


@circle.circle_experiment(
    "hs.fig2",
    title="Loss on the circle: learned against frozen gates",
    what="circle data; training loss of ReLU, DLGN-PWC and DLGN-PWC with frozen gates",
    claims=[_REACHES, _SLOW, _BEHIND],
    deviations=[circle.CIRCLE, circle.SETTINGS, circle.FROZEN],
)
def fig2(run: Run) -> Artifact:
    """Figure 2: target, data, and loss curves."""
    c = circle.train_circle(run)
    reached = {m: {level: c.runs[m].epochs_to(float(level)) for level in ("0.25", "0.01")} for m in circle.NAMES}
    arrays = {"theta": c.theta, "x": c.data.x.numpy(), "y": c.y}
    arrays |= {f"loss_{m}": c.runs[m].history() for m in circle.NAMES}
    frozen = arrays["loss_frozen"]
    learned = [e for e in reached["dlgn_pwc"]["0.01"] if e is not None]
    meeting = int(np.median(learned)) if learned else None
    known = meeting is not None and meeting < frozen.shape[1]
    return run.artifact(
        claims=[
            *(
                _REACHES.measure([math.inf if e is None else e for e in reached[m]["0.01"]], row=name)
                for m, name in circle.LEARNED.items()
            ),
            _SLOW.measure(_never_or_unknown(reached["frozen"]["0.01"], frozen.shape[1] - 1, 2000)),
            _BEHIND.measure(frozen[:, meeting] if known else [None] * len(frozen)),
        ],
        metrics={"epochs_to": reached},
        paper_numbers={"epochs to .01": {"ReLU and DLGN": "about 200", "frozen": "more than 2000"}},
        gates={circle.NAMES[m]: circle.SOFT[m] for m in circle.NAMES},
        arrays=float32(arrays),
        config=circle.BETAS,
        panels=fig2_panels(arrays, reached),
    )


def fig2_panels(arrays: Mapping[str, np.ndarray], reached: Mapping[str, Any]) -> list[Panel]:
    """Target over the angle, the circle coloured by the target, and the training losses.

    `reached` has the epochs to a loss of .01 of every seed: model → "0.01" → epochs.
    """
    trained = {m: arrays[f"loss_{m}"].shape[1] - 1 for m in circle.NAMES}
    epochs = "; ".join(
        f"{circle.NAMES[m]} {read_spread(found['0.01'], f'>{trained[m]}')}" for m, found in reached.items()
    )
    return [
        Panel(
            "lines",
            "target y",
            [Series("y", colour="ink")],
            "theta",
            "angle θ",
            x_ticks=circle.ANGLES,
            shade=(0, math.pi),
            note="The target is slow on the top half of the circle (shaded) and fast on the bottom half.",
        ),
        Panel(
            "points",
            "the data, coloured by the target",
            [Series("x[:, 1]", x="x[:, 0]", colour_by="y")],
            marks=[(0.0, "top half above, bottom half below")],
        ),
        circle.epoch_panel(
            "training loss",
            circle.model_series("loss", circle.NAMES),
            x="",
            y_scale="log",
            marks=[(0.25, "0.25: one half learned"), (0.01, "0.01: both halves learned")],
            note="A loss of 0.25 is left when one half is learned: look at how quickly each network gets there, and "
            f"how long it then stays. Epochs until the loss is below 0.01, median (range): {epochs}.",
        ),
    ]
