"""Table 4 (Experiment 7): a deep linear network, ReLU, and soft-ReLU over β and ε on CIFAR-10."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated.vconv import DLN, LENGTH, SELECTION, START, VCONV, Row, best, conv_flops, fit, metrics
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

BETAS = [1, 2, 4, 8, 12, 16, 20, 24]
# test accuracies of the paper, by ε, over β; all of these rows have a training accuracy of 99 %
TABLE_4 = {0.1: (59, 64, 68, 71, 71, 72, 72, 72), 0.4: (56, 63, 68, 71, 71, 71, 71, 71)}
PAPER_NUMBERS = {
    "deep linear network": {"train": 50.42, "test": 39.39},
    "ReLU": {"train": 99, "test": 71},
    **{
        f"β = {beta}, ε = {epsilon}": {"train": 99, "test": test}
        for epsilon, tests in TABLE_4.items()
        for beta, test in zip(BETAS, tests)
    },
}
_MATCHES = Claim(
    "soft-ReLU with β ≥ 8 generalises as well as ReLU",
    at_least=-2.0,
    null=-12.0,
    null_text="as far behind as the paper's β = 1",
    paper="0 to 1 points",
    unit="points of test accuracy, best epochs",
)
_BEHIND = Claim(
    "with β = 1 it falls behind",
    at_most=-5.0,
    null=0.0,
    null_text="β does not matter",
    paper="−12 points (ε = .1), −15 (ε = .4)",
    unit="points of test accuracy against ReLU, best epochs",
)
_FAR = Claim(
    "a deep linear network is far below ReLU",
    at_most=-10.0,
    null=0.0,
    null_text="gates do not matter",
    paper="−31.6 points",
    unit="points of test accuracy, best epochs",
)
_FITS = Claim(
    "every network with gates fits the training set",
    at_least=95.0,
    null=50.42,
    null_text="the paper's deep linear network",
    paper="99 %",
    unit="% training accuracy, last epoch",
)


def _rows(size: Mapping[str, Any]) -> list[Row]:
    init = {"init": size["init"]}
    soft = [
        Row(f"β = {beta:g}, ε = {epsilon:g}", "soft_relu", {"beta": beta, "epsilon": epsilon, **init})
        for epsilon in size["epsilons"]
        for beta in size["betas"]
    ]
    return [dataclasses.replace(DLN, options=init), Row("ReLU", "relu", init), *soft]


@experiment(
    "dgn.tab4",
    title="Soft-ReLU over β and ε",
    what="Experiment 7: CIFAR-10, a convolutional DLN, ReLU, and soft-ReLU with β 1 to 24 and ε .1, .4",
    claims=[_MATCHES, _BEHIND, _FAR, _FITS],
    deviations=[LENGTH, START, SELECTION],
    sizes={"betas": ([1, 8], BETAS), "epsilons": ([0.1], [0.1, 0.4]), "init": "default", **VCONV},
    data=("cifar10",),
    minutes=(1.5, 120),
    flops=lambda size: conv_flops(size, 3 * (2 + len(size["betas"]) * len(size["epsilons"]))),
)
def tab4(run: Run) -> Artifact:
    """All 18 rows."""
    size = run.sizes
    rows, found = _rows(size), {}
    for i, row in enumerate(rows):
        found[row.name] = fit(run, row)
        run.progress("rows of the table", i + 1, len(rows))
    highest = {name: best(one) for name, one in found.items()}
    claims = [_FAR.measure(highest[DLN.name] - highest["ReLU"])]
    for row in rows[2:]:
        if row.options["beta"] >= 8:
            claims.append(_MATCHES.measure(highest[row.name] - highest["ReLU"], row=row.name))
        elif row.options["beta"] == 1:
            claims.append(_BEHIND.measure(highest[row.name] - highest["ReLU"], row=row.name))
    claims += [_FITS.measure(found[row.name]["train"], row=row.name) for row in rows[1:]]
    names = list(found)
    shape = (len(size["epsilons"]), len(size["betas"]), len(run.seeds))
    return run.artifact(
        claims=claims,
        metrics={name: metrics(one) for name, one in found.items()},
        paper_numbers=PAPER_NUMBERS,
        gates={"deep linear network": "hard (all open)", "ReLU": "hard", "soft-ReLU": "soft, β and ε of the row"},
        arrays=float32(
            {
                "test": [one["test"] for one in found.values()],
                "best": list(highest.values()),
                "betas": size["betas"],
                "soft": np.reshape([highest[name] for name in names[2:]], shape),
                "hard": np.reshape([found[name]["hard"] for name in names[2:]], shape),
            }
        ),
        panels=[
            _beta_panel("Soft-ReLU over β, best epoch", "soft", highest, size["epsilons"]),
            Panel(
                "strips",
                "Table 4, best epoch",
                [Series(f"best[{i}]", name) for i, name in enumerate(names)],
                x_label="test accuracy, %",
            ),
            _beta_panel("The same networks with hard gates at test", "hard", highest, size["epsilons"], ", last epoch"),
        ],
    )


def _beta_panel(
    title: str, array: str, highest: Mapping[str, np.ndarray], epsilons: list[float], when: str = ""
) -> Panel:
    series = [Series(f"{array}[{i}].T", f"ε = {epsilon:g}") for i, epsilon in enumerate(epsilons)]
    marks = [(np.median(highest["ReLU"]), "ReLU"), (np.median(highest[DLN.name]), "deep linear")]
    return Panel("lines", title, series, "betas", "β", f"test accuracy, %{when}", "log", marks=marks)
