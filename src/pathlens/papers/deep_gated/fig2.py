"""Figure 2, and the variance of Theorem 2.3: entries of the Gram matrix of Experiment 1 over depth."""

from __future__ import annotations

import math

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated.depths import DEPTHS, MU, OVERLAP, VARIANCE, fixed_random_gates, over_depth
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

_FOLLOW = Claim(
    "diagonal and off-diagonal entries follow 1 and μ^(d−1) within chance",
    at_most=4.0,
    null=29.0,
    null_text="μ^d in place of μ^(d−1), at d = 2",
    paper="Figure 2",
    unit="standard errors (exact ones), the worst of all depths and both entries",
)
_RATE = Claim(
    "each hidden layer shrinks the overlap by μ = ½",
    at_most=0.05,
    null=0.5,
    null_text="depth does not whiten",
    paper="μ^(d−1)",
    unit="|fitted μ − ½|",
)
_SPREAD = Claim(
    "the spread of K₀(s, s) grows like d³/w, not like max{d²/w, d³/w²}",
    above=2.0,
    null=0.5,
    null_text="the printed bound",
    paper="Theorem 2.3 prints d²/w for d < w",
    unit="measured variance / printed order, at the largest depth",
)


@experiment(
    "dgn.fig2",
    title="The entries of the Gram matrix",
    what="one diagonal and one off-diagonal entry of K₀ over depth, 20 runs, w = 500, against their exact moments",
    claims=[_FOLLOW, _RATE, _SPREAD],
    deviations=[VARIANCE, OVERLAP],
    sizes={"depths": DEPTHS, "runs": 20, "width": 500},
    minutes=0.7,
    flops=lambda size: sum(12.0 * d * size["width"] ** 2 * size["runs"] * size["seeds"] for d in size["depths"]),
)
def fig2(run: Run) -> Artifact:
    """K₀/d of two of the inputs of Experiment 1."""
    from pathlens import kernels
    from pathlens.data import identical_inputs
    from pathlens.theory import deep_gated

    size = run.sizes
    depths, runs, w = size["depths"], size["runs"], size["width"]
    x = identical_inputs(2).x  # entries of two inputs do not depend on how many others there are
    found = np.empty((len(depths), len(run.seeds), runs, 2))
    mean, deviation = np.empty((2, len(depths), 2))
    for i, d in enumerate(depths):
        net = fixed_random_gates(w, d, 2)
        for j, seed in enumerate(run.seeds):
            for k in range(runs):
                found[i, j, k] = kernels.ntk(net.reinitialise(10_000 * seed + k), x).dense()[0].numpy() / d
        exact = deep_gated.frg_moments(x, (w,) * (d - 1), probability=MU)
        mean[i], deviation[i] = exact.mean[0] / d, np.sqrt(exact.variance[0]) / d
        run.progress("entries", i + 1, len(depths))
    average, variance = found.mean(2), found[..., 0].var(2, ddof=1)
    law = [deep_gated.variance_law(MU * w, d - 1) / d**2 for d in depths]
    printed = [deep_gated.printed_variance_bound(MU * w, d - 1) / d**2 for d in depths]
    score = abs(average - mean[:, None]) / (deviation[:, None] / math.sqrt(runs))
    shallow = [i for i, d in enumerate(depths) if d <= 8]  # beyond, the mean is below its standard error
    fitted = np.exp(np.polyfit([depths[i] for i in shallow], np.log(abs(average[shallow, :, 1])), 1)[0])
    last = depths[-1] ** 2
    return run.artifact(
        claims=[
            _FOLLOW.measure(score.max((0, 2))),
            _RATE.measure(abs(fitted - MU)),
            _SPREAD.measure(variance[-1] / printed[-1]),
        ],
        metrics={
            "fitted μ": fitted.tolist(),
            "variance of K₀(s, s) at the largest depth": {
                "measured": (variance[-1] * last).tolist(),
                "exact": float(deviation[-1, 0]) ** 2 * last,
                "leading order": law[-1] * last,
                "printed order": printed[-1] * last,
            },
        },
        paper_numbers={"diagonal of K₀/d": 1, "off-diagonal": "μ^(d−1)"},
        gates={"fixed random gates": "hard"},
        arrays=float32(
            {
                "depths": depths,
                "average": average,
                "spread": found.std(2),
                "mean": mean,
                "deviation": deviation,
                "variance": variance,
                "law": law,
                "printed": printed,
            }
        ),
        panels=[
            _entry_panel(0, "A diagonal entry"),
            _entry_panel(1, "An off-diagonal entry"),
            over_depth(
                "Variance of the diagonal entry",
                [
                    Series("variance.T", "measured"),
                    Series("law", "leading order, d³/w", style="dashed"),
                    Series("printed", "as printed", style="dashed"),
                ],
                "variance of K₀(s, s)/d",
                y_scale="log",
            ),
        ],
    )


def _entry_panel(k: int, title: str) -> Panel:
    series = [Series(f"average[:, :, {k}].T", "measured"), Series(f"mean[:, {k}]", "exact mean", style="dashed")]
    return over_depth(title, series, "entry of K₀/d")
