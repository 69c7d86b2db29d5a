"""Section 2.2: where on the ring a unit localises, predicted from its initial weights."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.settings import CONFIG, DATA, GAIN, INPUTS, LONG_FIRST, RATES, cosine
from pathlens.papers.panels import Panel, Series

_PREDICTED = Claim(
    "where a unit localises can be told from its initial weights",
    at_least=0.2,
    null=0.0,
    null_text="predictions shuffled over units; 95 % of shuffles of 50 units lie below 0.17",
    paper="'Predicting Loca(liza)tion' (2.2), empty in the note",
    unit="mean cos of the angle between predicted and final peak",
)
_SHAPE = Claim(
    "the shape of a unit's field can be told from its initial weights",
    at_least=0.7,
    null=0.3,
    null_text="about what the initial weights themselves give",
    paper="section 2.2, empty in the note",
    unit="cos between Σ₁w(0) and the final field, both turned to their peaks, mean of units",
)


def _at_peak(w: np.ndarray) -> np.ndarray:
    """Fields (seeds, units, d) turned around the ring so that each has its peak at position 0."""
    turn = (np.arange(w.shape[2]) + w.argmax(2)[..., None]) % w.shape[2]
    return np.take_along_axis(w, turn, axis=2)


@experiment(
    "loc.location",
    title="Where a unit localises",
    what="peak and shape of Σ₁w(0), the first pull on a unit, against those of its final field",
    claims=[_PREDICTED, _SHAPE],
    deviations=[DATA, RATES],
    sizes={"steps": (800, 5000), "batch": (500, 1000), "units": 50},
    minutes=(0.5, 1),
    flops=lambda size: 6.0 * INPUTS * size["units"] * size["steps"] * size["batch"] * size["seeds"],
)
def location(run: Run) -> Artifact:
    """For nearly Gaussian inputs ⟨g y x⟩ ∝ Σ₁w: the first pull smooths the initial weights."""
    from pathlens.data import NLGP
    from pathlens.papers.localisation._networks import OneLayer, fields, train_networks
    from pathlens.theory import arc90, centre_of_mass, circular_correlation

    steps, units, sampler = run.sizes["steps"], run.sizes["units"], NLGP(INPUTS, LONG_FIRST, GAIN)
    runs = train_networks(
        run,
        OneLayer(units=units),
        sampler,
        f"ReLU, {units} units",
        steps=steps,
        batch_size=run.sizes["batch"],
        lr=0.15 * units,
        keep=[0, steps],
    )
    start, end = fields(runs, 0), fields(runs, steps)
    pull = start @ sampler.covariance(1).numpy()
    predicted, final = pull.argmax(2), end.argmax(2)
    centres = centre_of_mass(np.maximum(pull, 0)), centre_of_mass(end)
    rng = np.random.default_rng(0)
    arrays = {
        "predicted": predicted,
        "final": final,
        "shuffled": [
            [circular_correlation(rng.permutation(a), b, INPUTS) for _ in range(200)] for a, b in zip(predicted, final)
        ],
        "score": [circular_correlation(a, b, INPUTS) for a, b in zip(predicted, final)],
        "shape": cosine(_at_peak(pull), _at_peak(end)).mean(1),
        "unsmoothed": cosine(_at_peak(start), _at_peak(end)).mean(1),
    }
    return run.artifact(
        claims=[_PREDICTED.measure(arrays["score"]), _SHAPE.measure(arrays["shape"])],
        metrics={
            "score": arrays["score"],
            "shape": arrays["shape"].tolist(),
            "shape, initial weights": arrays["unsmoothed"].tolist(),
            "by centres of mass": [circular_correlation(a, b, INPUTS) for a, b in zip(*centres)],
            "shuffled, 95 % of draws below": np.quantile(arrays["shuffled"], 0.95, axis=1).tolist(),
            "units": units,
            "arc90 at the end": arc90(end).mean(1).tolist(),
        },
        gates={"ReLU": "hard"},
        arrays=float32(arrays),
        config=CONFIG,
        panels=[
            Panel(
                "points",
                "Each unit: where it was pulled, and where it went",
                [Series("final", x="predicted")],
                x_label="peak of Σ₁w(0), position on the ring",
                y_label="peak of the final field",
                diagonal=True,
                note="The ring closes: 0 and 40 are one place, so upper left and lower right are near the line too.",
            ),
            Panel(
                "strips",
                "Agreement of prediction and outcome",
                [Series("score", "predicted"), Series("shuffled", "shuffled")],
                x_label="mean cos of the angle between both",
                marks=[(0.0, "chance")],
            ),
            Panel(
                "strips",
                "Agreement of shapes, turned to their peaks",
                [Series("shape", "Σ₁w(0)"), Series("unsmoothed", "w(0)")],
                x_label="cos with the final field",
            ),
        ],
    )
