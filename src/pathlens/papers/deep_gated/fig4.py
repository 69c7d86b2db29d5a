"""Figure 4 (Experiment 2): GaLU against ReLU on random points of the square with random targets."""

from __future__ import annotations

import math

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated.depths import DEPTHS, LENGTH, STEP, depth_panel, descend, final_error
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

_ERROR = Claim(
    "GaLU optimises better than ReLU",
    below=0.98,
    null=1.0,
    null_text="both alike",
    paper="Figure 4",
    unit="× (error after the last step, GaLU / ReLU)",
)
_SPECTRUM = Claim(
    "GaLU's spectrum is better conditioned than ReLU's",
    above=1.05,
    null=1.0,
    null_text="both alike",
    paper="Figure 4",
    unit="× (tr K₀/ρ_max, GaLU / ReLU)",
)
_DEPTH = Claim(
    "depth helps GaLU",
    below=0.95,
    null=1.0,
    null_text="depth does not matter",
    paper="'both e.c.d.f as well as convergence get better with increasing depth'",
    unit="× (error after the last step, largest depth / d = 2)",
)


@experiment(
    "dgn.fig4",
    title="GaLU against ReLU on random targets",
    what="Experiment 2: e.c.d.f. and convergence of GaLU with frozen gates and of ReLU, w = 100, several depths",
    claims=[_ERROR, _SPECTRUM, _DEPTH],
    deviations=[STEP, LENGTH],
    sizes={"galu_n": 100, "galu_width": 100, "galu_depths": ([2, 4, 8, 12], DEPTHS), "galu_epochs": (60, 200)},
    minutes=(0.6, 2),
    flops=lambda size: (
        14.0
        * sum((d - 2) * size["galu_width"] ** 2 + 3 * size["galu_width"] for d in size["galu_depths"])
        * size["galu_n"]
        * size["galu_epochs"]
        * size["seeds"]
    ),
)
def fig4(run: Run) -> Artifact:
    """Convergence and e.c.d.f. of both networks."""
    from pathlens.data import random_targets
    from pathlens.models import Init, galu, relu

    size = run.sizes
    depths, w = size["galu_depths"], size["galu_width"]
    data, init = random_targets(size["galu_n"]), Init("bernoulli", math.sqrt(2 / w))
    found = {}
    for name, build in (("GaLU", galu), ("ReLU", relu)):
        networks = [build(2, (w,) * (d - 1), init=init) for d in depths]
        found[name] = descend(run, networks, data, size["galu_epochs"], name)
    final = {name: one.final for name, one in found.items()}
    rank = {name: one.eigenvalues.sum(-1) / one.eigenvalues[..., -1] for name, one in found.items()}
    claims = [
        claim.measure(values["GaLU"][i] / values["ReLU"][i], row=f"d = {d}")
        for claim, values in ((_ERROR, final), (_SPECTRUM, rank))
        for i, d in enumerate(depths)
        if i
    ]
    arrays = {f"error_{name.lower()}": one.error for name, one in found.items()}
    arrays |= {f"ecdf_{name.lower()}": one.ecdf for name, one in found.items()}
    return run.artifact(
        claims=[*claims, _DEPTH.measure(final["GaLU"][-1] / final["GaLU"][0])],
        metrics={
            "error after the last step": {name: values.tolist() for name, values in final.items()},
            "tr K₀/ρ_max": {name: values.tolist() for name, values in rank.items()},
        },
        gates={"GaLU": "hard", "ReLU": "hard"},
        arrays=float32({"depths": depths, **arrays}),
        panels=[
            *(
                depth_panel(f"{name}: {what}", f"{array}_{name.lower()}[{{}}]", depths, y_label, x_label=x_label)
                for array, what, x_label, y_label in (
                    ("error", "convergence", "step", "‖e(t)‖ / ‖e(0)‖"),
                    ("ecdf", "spectrum", "eigenvalues, ascending", "sum so far / largest"),
                )
                for name in found
            ),
            final_error([Series(f"error_{name.lower()}[:, :, -1].T", name) for name in found]),
        ],
    )
