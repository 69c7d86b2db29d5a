"""Section 3.3, equations 13 to 18: which gates allow the least loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.settings import DATA, GAIN, draw, rows
from pathlens.papers.panels import Panel, Series

_DIAGONAL = Claim(
    "gatings with a more diagonal precision matrix have lower loss",
    at_least=0.3,
    null=0.0,
    null_text="no relation",
    paper="'the best precision matrix would be maximally diagonal' (3.3, a guess)",
    unit="rank correlation of off-diagonal mass of A⁺ and loss, over random gatings",
)
_TILING = Claim(
    "gates that tile the space beat overlapping ones",
    at_most=0.98,
    null=1.0,
    null_text="no difference",
    paper="'Gates that tile the space without overlap' (3.3, a guess)",
    unit="× (median test loss, slabs / random half-spaces, equal K)",
)
_SEARCHED = Claim(
    "gates found by gradient beat the best of the random ones",
    at_most=0.98,
    null=1.0,
    null_text="no better",
    paper="'how do we choose the gates?' (3.3)",
    unit="× (test loss, soft search / best random)",
)
MOMENTS = Deviation(
    paper="equation 18 has products of class means",
    authors_code="corrected in the next draft",
    ours="second moments of the classes, as in equation 16",
    why="with means the score is 1 for every gating whose class means are independent",
)
METHODS = ("random", "tiling", "greedy", "soft", "network")


@experiment(
    "loc.gates",
    title="Which gates are best",
    what="least loss of random, tiling, greedy, gradient-found and learned gates; the note's two conjectures",
    claims=[_DIAGONAL, _TILING, _SEARCHED],
    deviations=[DATA, MOMENTS],
    sizes={"inputs": 20, "gates": 4, "draws": (30, 100), "gate_rows": (2000, 4000)},
    minutes=(1, 1.5),
    # five ways to choose gates, each about as many least-squares problems as there are draws
    flops=lambda size: (
        5 * 2.0 * size["draws"] * size["gate_rows"] * (size["gates"] * size["inputs"]) ** 2 * size["seeds"]
    ),
)
def gates(run: Run) -> Artifact:
    """Losses of searched gates on held-out rows."""
    from scipy.stats import spearmanr

    from pathlens import models, theory
    from pathlens.training import train

    size = run.sizes
    K, d = size["gates"], size["inputs"]
    masses, losses, medians, least = [], [], [], []
    for done, seed in enumerate(run.seeds):
        data, test = (draw(size["gate_rows"], d, s) for s in (seed, 1000 + seed))
        net: Any = models.relu(d, hidden=(K,), seed=seed).double()
        train(net, data, epochs=30, lr=0.01, batch_size=100, seed=seed, progress=False)
        table = theory.search_gatings(
            data,
            K,
            test=test,
            methods=METHODS,
            trials=size["draws"],
            networks=[net],
            steps=80,
            seed=seed,
            progress=False,
        )
        found: dict[str, Any] = {method: [g.test_loss for g in table.by_method(method)] for method in METHODS}
        masses.append([theory.off_diagonal_mass(g.gates, data) for g in table.by_method("random")])
        losses.append(found["random"])
        medians.append(np.median(found["tiling"]) / np.median(found["random"]))
        least.append([found[method][0] for method in METHODS])
        run.progress("gatings", done + 1, len(run.seeds))
    best = dict(zip(METHODS, np.array(least).T))
    return run.artifact(
        claims=[
            _DIAGONAL.measure([spearmanr(mass, loss).statistic for mass, loss in zip(masses, losses)]),
            _TILING.measure(medians),
            _SEARCHED.measure(best["soft"] / best["random"]),
        ],
        metrics={"least test loss": {method: values.tolist() for method, values in best.items()}},
        gates={"all": "hard"},
        arrays=float32({"mass": masses, "loss": losses, "least": list(best.values())}),
        config={"gain": GAIN},
        panels=[
            Panel(
                "strips",
                "Least test loss of each search",
                rows("least", METHODS),
                x_label="⟨(y − ŷ)²⟩ on held-out rows",
            ),
            Panel(
                "points",
                "Random gatings: is a diagonal precision better?",
                [Series("loss", x="mass")],
                x_label="off-diagonal mass of A⁺",
                y_label="⟨(y − ŷ)²⟩ on held-out rows",
                note="The guess in the note would be a cloud that rises to the right.",
            ),
        ],
    )
