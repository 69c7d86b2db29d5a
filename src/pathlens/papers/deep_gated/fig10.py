"""Figure 10 (Experiment 8): a deep linear network on one example, (x, y) = (1, 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.depths import depth_panel, over_depth
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

HALF_LOSS = Deviation(
    paper="loss Σ(ŷ − y)², e′ = e − αKe and a first ratio of .81",
    authors_code="not public",
    ours="loss ½Σ(ŷ − y)²",
    why="without the ½ the first ratio is (1 − 0.2)² = .64, which is measured too",
)
ASSUMPTION = Deviation(
    paper="Corollary 8.1 'under Assumption 2'",
    ours="Assumption 1: weights ±σ, σ² = 1/w",
    why="Assumption 2 is about gates, of which a linear network has none",
)
_IDEAL = Claim(
    "the first step shrinks the squared error by .81",
    at_most=0.05,
    null=0.17,
    null_text="the printed loss, which gives .64",
    paper=".81",
    unit="|ratio − .81|, mean over depths",
)
_FASTER = Claim(
    "convergence is faster than .81 a step, since K_t grows",
    below=0.805,
    null=0.81,
    null_text="K_t stays K₀",
    paper="'we observe faster … convergence'",
    unit="mean ratio per step, over depths",
)
_GROWS = Claim(
    "K_t grows",
    above=1.05,
    null=1.0,
    null_text="K_t stays K₀",
    paper="Figure 10",
    unit="× (K at the last step / K₀, geometric mean over depths)",
)
_WEIGHTS = Claim(
    "the weights grow",
    above=0.05,
    null=0.0,
    null_text="their norm stays",
    paper="Figure 10",
    unit="‖Θ_T‖² − ‖Θ_0‖², mean over depths",
)


@experiment(
    "dgn.fig10",
    title="One example, a deep linear network",
    what="Experiment 8: K₀ over depth, convergence, growth of K_t and of the weights; d_in = n = 1",
    claims=[_IDEAL, _FASTER, _GROWS, _WEIGHTS],
    deviations=[HALF_LOSS, ASSUMPTION],
    sizes={"width": 100, "depths": [2, 4, 6, 8, 10], "steps": (30, 50)},
    minutes=0.3,
    flops=lambda size: sum(12.0 * d * size["width"] ** 2 * size["steps"] * size["seeds"] for d in size["depths"]),
)
def fig10(run: Run) -> Artifact:
    """w = 100, σ² = 1/w, α = 0.1/d."""
    import torch

    from pathlens import kernels
    from pathlens.data import single_point
    from pathlens.models import Init, dln
    from pathlens.theory import deep_gated
    from pathlens.training import Execution, Keep, train

    size = run.sizes
    depths, w, steps = size["depths"], size["width"], size["steps"]
    data = single_point(torch.float64)
    error, kernel, norm = np.empty((3, len(depths), len(run.seeds), steps + 1))
    printed, deviation = [], []
    for i, d in enumerate(depths):
        hidden = (w,) * (d - 1)
        net = dln(1, hidden, init=Init("bernoulli", math.sqrt(1 / w))).double()
        options: dict[str, Any] = {
            "optimizer": "sgd",
            "batch_size": None,
            "lr": 0.1 / d,
            "seeds": run.seeds,
            "execution": Execution(compile=False),
            "device": run.device,
            "progress": False,
        }
        keep = Keep(range(steps + 1), X=data.x)
        runs: Any = train(net, data, epochs=steps, loss="half_mse", keep=keep, **options)
        error[i] = runs.history()
        for j, trajectory in enumerate(runs):
            for t in range(steps + 1):
                moment = trajectory.at_epoch(t)
                kernel[i, j, t] = float(kernels.ntk(moment.record).dense())
                norm[i, j, t] = sum(float(p.square().sum()) for p in moment.snapshot.state.values())
        once: Any = train(net, data, epochs=1, loss="mse", **options)
        printed.append((once.history()[:, 1] / once.history()[:, 0]).tolist())
        deviation.append(float(np.sqrt(deep_gated.frg_moments([[1.0]], hidden, probability=1.0).variance[0, 0])))
        run.progress("deep linear networks", i + 1, len(depths))
    first = error[:, :, 1] / error[:, :, 0]
    pace = np.exp(np.log(np.maximum(error[:, :, 10], 1e-300) / error[:, :, 0]) / 10)
    return run.artifact(
        claims=[
            _IDEAL.measure(abs(first.mean(0) - 0.81)),
            _FASTER.measure(pace.mean(0)),
            _GROWS.measure(np.exp(np.log(kernel[:, :, -1] / kernel[:, :, 0]).mean(0))),
            _WEIGHTS.measure((norm[:, :, -1] - norm[:, :, 0]).mean(0)),
        ],
        metrics={
            "first ratio of squared errors": {"½Σ": first.tolist(), "Σ, as printed": printed},
            "mean ratio over ten steps": pace.tolist(),
            "K₀": kernel[:, :, 0].tolist(),
            "K₀, exact": {"mean": depths, "standard deviation": deviation},
        },
        paper_numbers={"ratio of squared errors": 0.81},
        gates={"deep linear network": "hard (all open)"},
        arrays=float32(
            {
                "depths": depths,
                "error": error / error[:, :, :1],
                "kernel": kernel,
                "growth": norm - norm[:, :, :1],
                "deviation": deviation,
            }
        ),
        panels=[
            depth_panel("Squared error", "error[{}]", depths, "e(t)² / e(0)²", y_scale="log"),
            depth_panel("The kernel grows", "kernel[{}]", depths, "K(t)"),
            depth_panel("The weights grow", "growth[{}]", depths, "‖Θ(t)‖² − ‖Θ(0)‖²"),
            over_depth(
                "The kernel at the start",
                [Series("kernel[:, :, 0].T", "measured"), Series("depths", "exact mean, d", style="dashed")],
                "K₀",
            ),
        ],
    )
