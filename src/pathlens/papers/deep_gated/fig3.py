"""Figure 3: convergence of gradient descent on Experiment 1, over depth and width."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.depths import LENGTH, MEMORISE, STEP, depth_panel, final_error, memorise, memorise_flops
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

WIDTHS = Deviation(
    paper="the text fits with w = 100, Figure 3 shows w = 25 and 500",
    authors_code="not public",
    ours="25 and 100 (quick); 25, 100 and 500 (paper)",
    why="both are in the paper; 500 takes minutes on a CPU",
)
_HELPS = Claim(
    "depth helps: the best depth leaves much less error than d = 2",
    below=0.8,
    null=1.0,
    null_text="depth does not matter",
    paper="'the convergence rate gets better with depth'",
    unit="× (error after the last step, best depth / d = 2)",
)
_HURTS = Claim(
    "at w = 25, depth beyond a point hurts",
    above=1.05,
    null=1.0,
    null_text="deeper is never worse",
    paper="Figure 3, w = 25",
    unit="× (error after the last step, d = 20 / best depth)",
)
_EARLIER = Claim(
    "w = 25 turns worse at a smaller depth than d = 20",
    at_most=16,
    null=20,
    null_text="it never turns",
    paper="Figure 3",
    unit="best depth at w = 25",
)


@experiment(
    "dgn.fig3",
    title="Convergence over depth",
    what="Experiment 1: error of fixed random gates under gradient descent over depths 2 to 20, several widths",
    claims=[_HELPS, _HURTS, _EARLIER],
    deviations=[STEP, LENGTH, WIDTHS],
    sizes=MEMORISE,
    minutes=(1, 30),
    flops=memorise_flops,
    shares="memorise",
)
def fig3(run: Run) -> Artifact:
    """‖e_t‖/‖e_0‖, and the e.c.d.f. of K₀/ρ_max."""
    depths, widths = run.sizes["trained_depths"], run.sizes["trained_widths"]
    found = {w: memorise(run, w) for w in widths}
    best = {w: np.array(depths)[one.final.argmin(0)] for w, one in found.items()}
    narrow = found[widths[0]].final
    return run.artifact(
        claims=[
            *(_HELPS.measure(one.final.min(0) / one.final[0], row=f"w = {w}") for w, one in found.items()),
            _HURTS.measure(narrow[-1] / narrow.min(0)),
            _EARLIER.measure(best[widths[0]]),
        ],
        metrics={
            "error after the last step": {f"w={w}": one.final.tolist() for w, one in found.items()},
            "best depth": {f"w={w}": depth.tolist() for w, depth in best.items()},
        },
        gates={"fixed random gates": "hard"},
        arrays=float32(
            {
                "depths": depths,
                "widths": widths,
                "error": [one.error for one in found.values()],
                "linear": [one.linear for one in found.values()],
                "ecdf": [one.ecdf for one in found.values()],
            }
        ),
        panels=[
            *(
                depth_panel(
                    f"w = {w}: descent (lines) and a kernel that stays (dashes)",
                    f"error[{i}, {{}}]",
                    depths,
                    "‖e(t)‖ / ‖e(0)‖",
                    y_scale="log",
                    predicted=f"linear[{i}, {{}}]",
                )
                for i, w in enumerate(widths)
            ),
            final_error([Series(f"error[{i}, :, :, -1].T", f"w = {w}") for i, w in enumerate(widths)]),
        ],
    )
