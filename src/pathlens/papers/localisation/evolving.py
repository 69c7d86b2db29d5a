"""Sections 2.3 and 5: the exact ReLU flow, whose gates evolve, against gradient descent and frozen gates."""

from __future__ import annotations

import time

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.settings import DATA, EQUATIONS, GAIN, descend, draw, relative_distance
from pathlens.papers.panels import Panel, Series

_AGREES = Claim(
    "gradient descent with step 0.001 agrees with the event-exact flow",
    at_most=1e-4,
    null=0.1,
    null_text="gates frozen at the start",
    paper="2.3 and 5: 'let the gates vary during training'",
    unit="relative distance of the weights at the end",
)
_LINEAR = Claim(
    "the error of gradient descent is proportional to its step",
    at_least=5.0,
    null=1.0,
    null_text="an error that does not shrink",
    paper="2.3 and 5",
    unit="× (error at step 0.01 / at 0.001)",
)
STEPS = (0.1, 0.01, 0.001)


@experiment(
    "loc.evolving",
    title="Gates that evolve, event by event",
    what="exact ReLU flow with flips and sliding gates, against gradient descent with three steps and frozen gates",
    claims=[_AGREES, _LINEAR],
    deviations=[DATA, EQUATIONS],
    sizes={"inputs": 40, "flow_rows": 300, "units": 10, "time": (40.0, 80.0)},
    minutes=(0.3, 0.5),
    flops=lambda size: 4.0 * size["inputs"] * size["units"] * size["flow_rows"] * size["time"] * 1.11e3 * size["seeds"],
)
def evolving(run: Run) -> Artifact:
    """Distance of gradient descent with three steps, and of frozen gates, from the exact flow."""
    from pathlens import theory

    size = run.sizes
    K, d, end = size["units"], size["inputs"], size["time"]
    times = np.linspace(0, end, 9)
    errors, counts, seconds, loss, share, frozen = [], [], [], [], [], []
    for done, seed in enumerate(run.seeds):
        data = draw(size["flow_rows"], d, seed)
        x, y = data.x.numpy(), data.y[:, 0].numpy()
        w0 = np.random.default_rng(seed).standard_normal((K, d)) * np.sqrt(2 / (K + d))
        flow = theory.relu_flow(data, w0, times, progress=False)
        took, far = [flow.seconds], []
        for step in STEPS:
            begin = time.perf_counter()
            far.append(relative_distance(descend(x, y, w0, step, round(end / step)), flow.weights[-1]))
            took.append(time.perf_counter() - begin)
        errors.append(far)
        seconds.append(took)
        counts.append([len(flow.flips), len(flow.slides), int((flow.state == theory.SLIDING).sum()), flow.fallbacks])
        loss.append(flow.loss())
        share.append(flow.flipped_share())
        frozen.append(relative_distance(theory.GDLN.from_data(x @ w0.T > 0, data, w0=w0).w(times), flow.weights))
        run.progress("exact flows", done + 1, len(run.seeds))
    error = np.array(errors)
    return run.artifact(
        claims=[_AGREES.measure(error[:, 2]), _LINEAR.measure(error[:, 1] / error[:, 2])],
        metrics={
            "step": list(STEPS),
            "error": error.tolist(),
            "frozen gates": np.array(frozen)[:, -1].tolist(),
            "flips, slides, sliding at the end, fallbacks": counts,
            "seconds, flow and descents": seconds,
        },
        gates={"ReLU": "hard, and sliding ones between"},
        arrays=float32(
            {"times": times, "steps": STEPS, "error": error, "loss": loss, "share": share, "frozen": frozen}
        ),
        config={"gain": GAIN},
        panels=[
            Panel(
                "lines",
                "Gradient descent against the exact flow",
                [Series("error", "gradient descent")],
                x="steps",
                x_label="step size",
                y_label="relative distance of weights at the end",
                x_scale="log",
                y_scale="log",
                slope=1.0,
            ),
            *(
                Panel("lines", title, [Series(name)], x="times", x_label="time", y_label=y_label)
                for title, name, y_label in (
                    ("Gates frozen at the start", "frozen", "relative distance from the exact flow"),
                    ("Gates that differ from the start", "share", "share of gates"),
                    ("Loss of the exact flow", "loss", "½⟨(y − ŷ)²⟩"),
                )
            ),
        ],
    )
