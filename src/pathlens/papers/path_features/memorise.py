"""Memorising with fixed path features, on the trainings of Figure 3 of the Deep Gated Networks paper."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated import depths as training
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

GRID = Deviation(
    paper="'the role of width and depth on a pure memorisation task' is in an appendix that the text lacks",
    authors_code="not public",
    ours="Experiment 1 of the DGN paper on a grid of depths and widths",
    why="the same authors' task; fixed random gates are fixed neural path features",
)
_WIDTH = Claim(
    "width helps at every depth above 2",
    below=0.95,
    null=1.0,
    null_text="width does not matter",
    paper="'the role of width and depth'",
    unit="× (error after the last step, largest / smallest width)",
)
_TO_A_POINT = Claim(
    "depth helps to a point: some depth in between is better than both ends",
    below=0.97,
    null=1.0,
    null_text="an end is best",
    paper="'the role of width and depth'",
    unit="× (least error / that of the better end)",
)


@experiment(
    "npk.memorise",
    title="Memorising with fixed path features",
    what="identical inputs, random targets, fixed random gates: error on a grid of depths and widths",
    claims=[_WIDTH, _TO_A_POINT],
    deviations=[GRID, training.STEP],
    sizes=training.MEMORISE,
    minutes=(1, 30),
    flops=training.memorise_flops,
    shares="memorise",
)
def memorise(run: Run) -> Artifact:
    """The appendix on memorisation: error after the last step, by depth and width."""
    depths, widths = run.sizes["trained_depths"], run.sizes["trained_widths"]
    final = np.stack([training.memorise(run, w).final for w in widths])  # (widths, depths, seeds)
    ratio = final[-1] / final[0]
    claims = [_WIDTH.measure(ratio[i], row=f"d = {d}") for i, d in enumerate(depths) if d > 2]
    for w, error in zip(widths, final):
        claims.append(_TO_A_POINT.measure(error.min(0) / np.minimum(error[0], error[-1]), row=f"w = {w}"))
    return run.artifact(
        claims=claims,
        metrics={"error after the last step": {f"w={w}": error for w, error in zip(widths, final)}},
        gates={"fixed random gates": "hard"},
        arrays=float32({"depths": depths, "widths": widths, "error": final}),
        panels=[training.final_error([Series(f"error[{i}].T", f"w = {w}") for i, w in enumerate(widths)])],
    )
