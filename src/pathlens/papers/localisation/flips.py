"""Section 2.1: how many gates flip while a ReLU network learns, and how its weights grow."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.descent import SHARED, descend_relu
from pathlens.papers.localisation.settings import CONFIG, DATA, RATES, cosine, over_time
from pathlens.papers.panels import Series

_CONSTANT = Claim(
    "the gates of the ReLU network are roughly constant",
    at_most=0.05,
    null=0.5,
    null_text="gates unrelated to those of the start",
    paper="'g(x) may be relatively constant' (2.1)",
    unit="share of gates that differ from the start, at the end",
)
_UNIFORM = Claim(
    "weights grow in size and keep their direction",
    at_least=0.9,
    null=0.0,
    null_text="unrelated directions",
    paper="'w₁ appears to grow uniformly in size during much of its training' (2.1)",
    unit="cosine between w(t) and w(0) at the end, mean over units",
)


@experiment(
    "loc.flips",
    title="Gates flip while a ReLU network learns",
    what="share of gates that differ from the start, over time; size and direction of the weights",
    claims=[_CONSTANT, _UNIFORM],
    deviations=[DATA, RATES],
    minutes=(0.5, 1.5),
    **SHARED,
)
def flips(run: Run) -> Artifact:
    """Share of changed gates, direction and size of the weights over time."""
    d = descend_relu(run)
    share = (d.gates != d.gates[:, :1]).mean((2, 3))
    direction = cosine(d.weights, d.weights[:, :1]).mean(2)
    norm = np.linalg.norm(d.weights, axis=3).mean(2)
    return run.artifact(
        claims=[_CONSTANT.measure(share[:, -1]), _UNIFORM.measure(direction[:, -1])],
        metrics={"times": d.times.tolist(), "share flipped": share.tolist(), "cosine": direction.tolist()},
        gates={"ReLU": "hard"},
        arrays=float32({"times": d.times, "share": share, "cosine": direction, "norm": norm}),
        config=CONFIG,
        panels=[
            over_time(
                "Gates that differ from the start",
                [Series("share")],
                "share of gates",
                marks=[(0.05, "roughly constant"), (0.5, "unrelated")],
            ),
            over_time(
                "Direction of the weights",
                [Series("cosine")],
                "cos(w(t), w(0)), mean of units",
                marks=[(0.9, "keeps its direction")],
            ),
            over_time("Size of the weights", [Series("norm")], "‖w(t)‖, mean of units"),
        ],
    )
