"""Figure 1: the spectrum of the Gram matrix of Experiment 1 at initialisation, over depth and width."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated.depths import DEPTHS, MU, OVERLAP, VARIANCE, depth_panel, fixed_random_gates, over_depth
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

_NEARER = Claim(
    "the e.c.d.f. of w = 500 is nearer to the ideal one than that of w = 25",
    above=2.0,
    null=1.0,
    null_text="width does not matter",
    paper="Figure 1",
    unit="× (largest distance, w = 25 / w = 500, mean over depths)",
)
_WHITER = Claim(
    "depth whitens: at w = 500 and d = 20 the largest eigenvalue has little of the trace",
    below=0.05,
    null=0.5,
    null_text="as at d = 2",
    paper="Figure 1, ideal (1 + (n − 1)μ^(d−1))/n = .005",
    unit="share of the trace",
)
_DEGRADES = Claim(
    "at w = 25, depth beyond a point degrades the spectrum",
    above=1.1,
    null=1.0,
    null_text="deeper is never worse",
    paper="'leading to smaller eigenvalues'",
    unit="× (distance to the ideal e.c.d.f., d = 20 / best depth)",
)


@experiment(
    "dgn.fig1",
    title="Depth whitens, until it does not",
    what="e.c.d.f. of K₀/d of fixed random gates over depths 2 to 20, widths 25 and 500, against the ideal",
    claims=[_NEARER, _WHITER, _DEGRADES],
    deviations=[VARIANCE, OVERLAP],
    sizes={"n": 200, "depths": DEPTHS, "widths": [25, 500]},
    minutes=0.3,
    flops=lambda size: sum(
        6.0 * d * w * size["n"] * (w + size["n"]) * size["seeds"] for d in size["depths"] for w in size["widths"]
    ),
)
def fig1(run: Run) -> Artifact:
    """Cumulative eigenvalues, ascending, of K₀/d."""
    from pathlens import kernels
    from pathlens.data import identical_inputs
    from pathlens.theory import deep_gated

    size = run.sizes
    n, depths, widths = size["n"], size["depths"], size["widths"]
    x = identical_inputs(n).x
    ideal = np.stack([np.cumsum(deep_gated.ideal_spectrum(n, d - 1, probability=MU)) for d in depths])
    found = np.empty((len(widths), len(depths), len(run.seeds), n))
    for i, w in enumerate(widths):
        for j, d in enumerate(depths):
            net = fixed_random_gates(w, d, n)
            for k, seed in enumerate(run.seeds):
                found[i, j, k] = kernels.cumulative_spectrum(kernels.ntk(net.reinitialise(seed), x)).numpy() / d
            run.progress(f"spectra, w = {w}", j + 1, len(depths))
    distance = abs(found - ideal[:, None]).max(-1) / n  # (widths, depths, seeds)
    top = (found[-1, -1, :, -1] - found[-1, -1, :, -2]) / found[-1, -1, :, -1]
    panels = [
        depth_panel(
            f"w = {w}: measured (lines) and ideal (dashes)",
            f"ecdf[{i}, {{}}]",
            depths,
            "sum so far, of K₀/d",
            x_label="eigenvalues, ascending",
            predicted="ideal[{}]",
        )
        for i, w in enumerate(widths)
    ]
    far = [Series(f"distance[{i}].T", f"w = {w}") for i, w in enumerate(widths)]
    panels.append(over_depth("Distance from the ideal", far, "largest difference / n", y_scale="log"))
    return run.artifact(
        claims=[
            _NEARER.measure((distance[0] / distance[-1]).mean(0)),
            _WHITER.measure(top),
            _DEGRADES.measure(distance[0, -1] / distance[0].min(0)),
        ],
        metrics={"distance to the ideal": {f"w={w}": distance[i].tolist() for i, w in enumerate(widths)}},
        gates={"fixed random gates": "hard"},
        arrays=float32(
            {"depths": depths, "widths": widths, "ideal": ideal, "ecdf": found.mean(2), "distance": distance}
        ),
        panels=panels,
    )
