"""Figure 1: a path region of a ReLU network in two pieces, and one that jumps when a parameter changes sign."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space.region_shapes import picture, pixels
from pathlens.papers.panels import Panel, Series

KINDS = {"relu": "ReLU", "dlgn": "linear gates"}
SIGNS = {"above": "+", "below": "−"}
INTERVALS = np.array([[0.5, 1.5], [2.5, 3.5]])

NETWORKS = Deviation(
    paper="two drawn networks; their weights are in the picture alone",
    ours="left: units x, x − 1, x − 2, x − 3 read by one unit with weights 1, −2, 2, −2 and bias −½; "
    "right: units x₁ and x₂ read by one unit with weights 0, 1 and bias ε",
    why="they have the regions that the caption states",
)
CLOSED = Deviation(
    paper="a gate is on where its pre-activation is ≥ 0 (equation 2), > 0 in the overlap kernel",
    ours="> 0 everywhere; regions are open, and at ε = 0 the region is the first quadrant",
    why="behind a ReLU a pre-activation is exactly 0 on whole regions, where ≥ would count gates that pass nothing",
)
_PIECES = Claim(
    "the path through the first units is active on two separate pieces",
    at_least=2,
    null=1,
    null_text="connected, as every DLGN path region",
    paper="[0.5, 1.5] ∪ [2.5, 3.5]",
    unit="pieces",
    needs=1,
)
_ENDS = Claim(
    "they are [0.5, 1.5] and [2.5, 3.5]",
    at_most=1e-9,
    null=0.5,
    null_text="other intervals",
    paper="[0.5, 1.5] ∪ [2.5, 3.5]",
    unit="largest |difference| of an end",
    needs=1,
)
_JUMP = Claim(
    "the region jumps from the right half to the first quadrant when ε changes sign",
    above=1.9,
    null=1.0,
    null_text="it moves with ε",
    paper="'abruptly changes'",
    unit="× (area at ε = 10⁻⁹ / at −10⁻⁹)",
    needs=1,
)
_SMOOTH = Claim(
    "with linear gates of the same weights it does not jump, and is in one piece",
    below=1.1,
    null=2.0,
    null_text="it jumps as the ReLU network's",
    paper="'an intersection of L − 1 half-spaces'",
    unit="× (area at ε = 10⁻⁹ / at −10⁻⁹), times pieces of the first region",
    needs=1,
)


def two_bumps(kind: str, inputs: int = 1) -> Any:
    """The network of Figure 1, left, reading the first of its inputs; ``kind`` is "relu" or "dlgn"."""
    weights = [[[1.0] + [0.0] * (inputs - 1)] * 4, [[1.0, -2.0, 2.0, -2.0]]]
    return _network(kind, weights, [[0.0, -1.0, -2.0, -3.0], [-0.5]])


def jumping(kind: str, epsilon: float) -> Any:
    """The network of Figure 1, right."""
    return _network(kind, [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0]]], [[0.0, 0.0], [epsilon]])


def _network(kind: str, weights: Any, biases: Any) -> Any:
    """A network with two hidden layers, whose gates read these weights and biases."""
    import torch

    from pathlens import models

    make = {"relu": models.relu, "dlgn": models.dlgn}[kind]
    net = make(len(weights[0][0]), [len(bias) for bias in biases], bias=True, seed=0).double()
    gates: Any = net.values if kind == "relu" else net.source
    layers = [layer for layer in gates.modules() if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, weight, bias in zip(layers, weights, biases):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    return net


@experiment(
    "hs.fig1",
    title="Path regions of ReLU networks come in pieces and jump",
    what="two ReLU networks of a few units: a path region of two intervals, and one that jumps with a parameter",
    claims=[_PIECES, _ENDS, _JUMP, _SMOOTH],
    deviations=[NETWORKS, CLOSED],
    seeds=None,
    minutes=0.1,
    flops=1e6,
)
def fig1(run: Run) -> Artifact:
    """Figure 1: exact regions on a segment and in a plane, and those of a DLGN with the same gate weights."""
    from pathlens.regions import segment1d, slice2d

    path = (0, 0)
    lines = {kind: segment1d(two_bumps(kind), [0.0], [4.0]).path_region(path) for kind in KINDS}
    plane = slice2d(two_bumps("relu", 2), box=((0.0, 4.0), (-1.0, 1.0))).path_region(path)
    ends = lines["relu"].ends[..., 0].numpy()
    wrong = float(np.abs(ends - INTERVALS).max()) if ends.shape == INTERVALS.shape else np.inf
    epsilons = 10.0 ** -np.arange(1, 10)
    x = np.linspace(0.0, 4.0, 401)
    hidden = np.maximum(x[:, None] - np.arange(4.0), 0.0)

    def region(kind: str, epsilon: float) -> Any:
        return slice2d(jumping(kind, epsilon), box=1.0).path_region(path)

    areas = {kind: np.array([[region(kind, sign * e).area for e in epsilons] for sign in (1, -1)]) for kind in KINDS}
    jumps = {kind: float(area[0, -1] / area[1, -1]) for kind, area in areas.items()}
    return run.artifact(
        claims=[
            _PIECES.measure([lines["relu"].n_components], row="segment"),
            _PIECES.measure([plane.n_components], row="plane"),
            _ENDS.measure([wrong]),
            _JUMP.measure([jumps["relu"]]),
            _SMOOTH.measure([jumps["dlgn"] * lines["dlgn"].n_components]),
        ],
        metrics={
            "intervals": {kind: found.ends[..., 0].tolist() for kind, found in lines.items()},
            "area in the plane": plane.area,
            "area in [−1, 1]² at ε = 0": {kind: region(kind, 0.0).area for kind in areas},
            "area at ε and at −ε": {kind: area.tolist() for kind, area in areas.items()},
        },
        paper_numbers={"left": "[0.5, 1.5] ∪ [2.5, 3.5]", "right": "the right half, then the first quadrant"},
        gates={"regions": "hard"},
        arrays={
            "x": x,
            "preactivation": hidden @ [1.0, -2.0, 2.0, -2.0] - 0.5,
            "linear": 3.5 - x,
            "epsilons": epsilons,
            **{f"areas_{kind}": area for kind, area in areas.items()},
            **{
                f"region_{kind}_{word}": picture(region(kind, epsilon).contains(pixels(1.0)))
                for kind in KINDS
                for word, epsilon in (("above", 0.1), ("below", -0.1))
            },
        },
        config={"epsilons": epsilons.tolist(), "path": list(path)},
        seeds=(),
        panels=_panels(),
    )


def _panels() -> list[Panel]:
    areas = [
        Series(f"areas_{kind}[{k}]", f"{name}, {sign}ε", style="line" if kind == "relu" else "dashed")
        for kind, name in KINDS.items()
        for k, sign in enumerate(SIGNS.values())
    ]
    pictures = [
        Series(f"region_{kind}_{word}", f"{name}, ε = {sign}0.1")
        for kind, name in KINDS.items()
        for word, sign in SIGNS.items()
    ]
    return [
        Panel(
            "lines",
            "Left: what the second unit reads, on x > 0",
            [
                Series("preactivation", "ReLU network"),
                Series("linear", "linear gates, the same weights", style="dashed"),
            ],
            "x",
            "x",
            "pre-activation",
            marks=[(0.0, "active above")],
            note="Active where the line is above zero: two intervals for ReLU, one for linear gates.",
        ),
        Panel("lines", "Right: area of the path region", areas, "epsilons", "|ε|", "area in [−1, 1]²", "log"),
        Panel("matrices", "Right: where the path is active", pictures, x_label="x₁", y_label="x₂"),
    ]
