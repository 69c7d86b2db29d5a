"""Experiment 6: on CIFAR-10 only the gates are trained, and the values stay as they were drawn."""

from __future__ import annotations

from typing import Any

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.binary_mnist import BETA, EPSILON
from pathlens.papers.deep_gated.vconv import DLN, LENGTH, SELECTION, START, VCONV, Row, best, conv_flops, fit, metrics
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

LITERAL = Deviation(
    paper="N(Θᵍ, ∞; Θʷ): hard gates, of which only the weights Θᵍ are trained; the introduction says 'soft-gates'",
    authors_code="not public for this experiment",
    ours=f"soft gates, β = {BETA:g} and ε = {EPSILON:g}, as in Experiment 3; and hard gates with the gradient of soft "
    "ones (straight-through)",
    why="the gradient to the gates is zero at β = ∞",
)
_ALONE = Claim(
    "training the gates alone gives about 56 % on CIFAR-10",
    at_least=50.0,
    null=39.4,
    null_text="what the paper's deep linear network reaches with all its weights (Table 4)",
    paper="56 %",
    unit="% test accuracy",
)
_CHANCE = Claim(
    "gates alone learn: far above chance",
    at_least=25.0,
    null=10.0,
    null_text="chance",
    paper="56 %",
    unit="% test accuracy, last epoch",
)
_LINEAR = Claim(
    "gates alone beat a deep linear network, all of whose weights are trained",
    at_least=5.0,
    null=0.0,
    null_text="no better",
    paper="56 against 39.4 %",
    unit="points of test accuracy, best epochs",
)


def gates_only(name: str) -> Row:
    """The network with soft or straight-through gates, of which the gates alone are trained."""
    gate: dict[str, Any] = {"beta": BETA, "gate": name, "gate_activation": "soft", "init": "preserve"}
    if name == "soft":
        return Row("gates only, soft", "gates_only", gate | {"epsilon": EPSILON})
    return Row("gates only, hard (straight-through)", "gates_only", gate)


@experiment(
    "dgn.exp6",
    title="The lottery is in the gates",
    what="Experiment 6: CIFAR-10 with random values that stay, gates that learn; soft and straight-through gates",
    claims=[_ALONE, _CHANCE, _LINEAR],
    deviations=[LITERAL, LENGTH, START, SELECTION],
    sizes={"gates": ["soft", "straight_through"], **VCONV},
    data=("cifar10",),
    minutes=(2, 45),
    flops=lambda size: conv_flops(size, 5 * len(size["gates"]) + 3),  # two networks, but no gradients by the values
)
def exp6(run: Run) -> Artifact:
    """Four convolutions and three dense layers."""
    rows = [*(gates_only(name) for name in run.sizes["gates"]), DLN]
    found = {row.name: fit(run, row) for row in rows}
    names, claims = list(found), []
    for name in names[:-1]:
        last, highest = found[name]["test"][:, -1], best(found[name])
        claims += [
            _ALONE.measure(highest, row=f"{name}; best epoch"),
            _ALONE.measure(last, row=f"{name}; last epoch"),
            _CHANCE.measure(last, row=name),
            _LINEAR.measure(highest - best(found[DLN.name]), row=name),
        ]
    ends = [Series(f"test[{i}, :, -1]", name) for i, name in enumerate(names)]
    ends += [Series(f"hard[{i}]", f"{name}, switched to hard") for i, name in enumerate(names) if name.endswith("soft")]
    axis, marks = "test accuracy, %", [(56.0, "paper"), (10.0, "chance")]
    return run.artifact(
        claims=claims,
        metrics={name: metrics(one) for name, one in found.items()},
        paper_numbers={"gates only": "56 % test", "deep linear network": "50.42 % train, 39.39 % test"},
        gates={
            "gates only, soft": f"soft β={BETA:g}, ε={EPSILON:g}",
            "gates only, straight-through": "hard",
            DLN.name: "hard (all open)",
        },
        arrays=float32({key: [one[key] for one in found.values()] for key in ("test", "hard")}),
        panels=[
            Panel(
                "lines",
                "Random values, learned gates",
                [Series(f"test[{i}]", name) for i, name in enumerate(names)],
                x_label="epoch",
                y_label=axis,
                marks=marks,
            ),
            Panel("strips", "After the last epoch", ends, x_label=axis, marks=marks),
        ],
    )
