"""The data set of the introduction that no ReLU network without biases fits: (x, 1) and (2x, −1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

DECOUPLED = Deviation(
    paper="standard ReLU networks cannot memorise (x, 1), (2x, −1); GaLU is not mentioned",
    ours="GaLU with frozen hard gates from a bias-free ReLU network is tried too, and table and soft gates",
    why="hard gates of any bias-free network are the same for x and 2x: decoupling alone is no help",
)
FLOOR = 9 / 5  # min over f of (f − 1)² + (2f + 1)²
_STUCK = Claim(
    "networks with hard gates and no biases do not get below Σ(ŷ − y)² = 9/5",
    at_least=FLOOR - 1e-3,
    null=0.0,
    null_text="it is fitted",
    paper="'cannot be memorised'",
    unit="Σ(ŷ − y)² at the end",
)
_FITS = Claim(
    "gates that tell x from 2x fit it",
    below=1e-2,
    null=FLOOR,
    null_text="as ReLU",
    paper="–",
    unit="Σ(ŷ − y)² at the end",
)


@experiment(
    "dgn.unfittable",
    title="Two points that no ReLU network fits",
    what="(x, 1) and (2x, −1) without biases: ReLU, GaLU, fixed random gates, soft gates, ReLU with biases",
    claims=[_STUCK, _FITS],
    deviations=[DECOUPLED],
    sizes={"fit_width": (32, 100), "fit_hidden_layers": 3, "fit_steps": (1500, 5000)},
    minutes=(0.5, 2),
    flops=lambda size: (
        6 * 12.0 * (size["fit_hidden_layers"] - 1) * size["fit_width"] ** 2 * size["fit_steps"] * size["seeds"]
    ),
)
def unfittable(run: Run) -> Artifact:
    """Six networks on two points."""
    from pathlens import data, models
    from pathlens.training import Execution, train

    size = run.sizes
    hidden = (size["fit_width"],) * size["fit_hidden_layers"]
    networks = {
        "ReLU": models.relu(2, hidden),
        "GaLU, frozen gates": models.galu(2, hidden),
        "fixed random gates": models.frg(2, hidden, examples=2),
        "soft-ReLU": models.soft_relu(2, hidden),
        "soft-GaLU": models.soft_galu(2, hidden, gate_activation="soft", init="preserve"),
        "ReLU with biases": models.relu(2, hidden, bias=True),
    }
    losses = {}
    for name, net in networks.items():
        runs: Any = train(
            net,
            data.unfittable(),
            epochs=size["fit_steps"],
            batch_size=None,
            lr=3e-3,
            seeds=run.seeds,
            device=run.device,
            execution=Execution(compile=not net.needs_rows),
            progress=partial(run.progress, name),
        )
        losses[name] = 2 * runs.history()
    # rounding may bring the error below the minimum for a step or two: use the last step
    claims = [
        (_STUCK if name in ("ReLU", "GaLU, frozen gates") else _FITS).measure(loss[:, -1], row=name)
        for name, loss in losses.items()
    ]
    return run.artifact(
        claims=claims,
        metrics={"Σ(ŷ − y)² at the end": {name: loss[:, -1].tolist() for name, loss in losses.items()}},
        paper_numbers={"least Σ(ŷ − y)² of a ReLU network": FLOOR},
        gates={
            "ReLU": "hard",
            "GaLU": "hard",
            "fixed random gates": "hard",
            "soft-ReLU and soft-GaLU": "soft β=4, ε=0.1",
        },
        arrays={"names": np.array(list(losses)), **float32({"loss": list(losses.values())})},
        panels=[
            Panel(
                "lines",
                "Error while training",
                [Series(f"loss[{i}]", name) for i, name in enumerate(losses)],
                x_label="step",
                y_label="Σ(ŷ − y)²",
                x_scale="log",
                y_scale="log",
                marks=[(FLOOR, "9/5, the least without biases")],
            )
        ],
    )
