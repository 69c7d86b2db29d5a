"""Four stress tests for the failures that a summary of the paper lists: where a DLGN breaks before a ReLU network."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.half_space.parts import BETA, NAMES, network
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

# test -> title and axis of its panel
TESTS = {
    "parity": ("Parity of k bits", "k"),
    "frequency": ("The fast half", "waves around the circle"),
    "samples": ("Few examples", "training examples"),
    "drift": ("A target that turns", "steps between turns"),
}
TEST_POINTS = 1024
BROKEN = 0.5  # a skill below this is a failure
SUMMARY = Deviation(
    paper="a summary of the paper lists failure signatures without experiments: strongly non-linear interactions, high "
    "frequencies, small data sets; and asks for non-stationary distributions",
    ours="parity of k of ten bits; circles with faster and faster bottom halves; circles with few noisy points; a "
    "circle that turns by a sixth several times, with fewer and fewer training steps after each turn",
    why="one axis of difficulty each, on which both models can be followed until they fail",
)
SKILL = Deviation(
    paper="–",
    ours="skill on unseen points: 1 − mean squared error / variance of the target (the fast half's where frequency "
    "grows); for parity 2 × accuracy − 1; at least 0; a model has failed below ½",
    why="one scale for all tests: 1 is perfect, 0 is no better than a constant",
)
SAME = Deviation(
    paper="–",
    authors_code="other public DLGN code: soft gates, β = 4",
    ours="the same widths, steps, rate and batches for both models; DLGN-PWC with soft gates, and the same "
    "network with hard gates",
    why="a DLGN has twice the parameters of a ReLU network of the same widths, so that a lack of parameters does not "
    "explain its failures",
)
_BEHIND = Claim(
    "the DLGN breaks before the ReLU network",
    above=0.1,
    null=0.0,
    null_text="both alike",
    paper="failure signatures of the summary",
    unit="skill of ReLU − skill of DLGN-PWC, mean over levels",
)
_FAILS = Claim(
    "the DLGN fails at the hardest level",
    below=BROKEN,
    null=1.0,
    null_text="it is learned",
    paper="failure signatures of the summary",
    unit="skill of DLGN-PWC at the last level",
)


def parity(inputs: int, bits: int) -> DataSet:
    """All vectors of ±1 with the product of the first ``bits`` as target, half of them held out for test."""
    import torch

    from pathlens.data import DataSet

    x = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * inputs)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    y = x[:, :bits].prod(1, keepdim=True)
    half = len(x) // 2
    return DataSet(x[:half], y[:half], x[half:], y[half:], name=f"parity of {bits} of {inputs} bits")


def turned(data: DataSet, angle: float) -> DataSet:
    """The same circle, inputs turned by an angle."""
    import torch

    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], dtype=data.x.dtype)
    assert data.x_test is not None
    return replace(data, x=data.x @ turn, x_test=data.x_test @ turn)


def skills(runs: Runs, data: DataSet, test: str, hard: bool = False) -> np.ndarray:
    """Skill of every network on the test points, at least 0."""
    import torch

    assert data.x_test is not None and data.y_test is not None
    y = data.y_test[:, 0].double()
    seen = ~data.marks_test["top"] if test == "frequency" else torch.ones(len(y), dtype=torch.bool)
    found = []
    for net in runs.networks:
        net = net.with_gate("hard") if hard else net  # type: ignore[operator]
        with torch.no_grad():
            f = net.cpu()(data.x_test)[:, 0].double()
        if test == "parity":
            found.append(2 * float((f.sign() == y).double().mean()) - 1)
        else:
            error = (f - y)[seen].square().mean() / y[seen].var(correction=0)
            found.append(1 - float(error))
    return np.maximum(found, 0.0)


def _tests(sizes: dict[str, Any]) -> dict[str, tuple[list[float], list[DataSet]]]:
    """Levels and data of each test, from easy to hard; for 'drift', the data before the first turn."""
    from pathlens.data import circle

    points, easy, turns = sizes["points"], sizes["easy_frequency"], sizes["turn_steps"]
    make = partial(circle, test_points=TEST_POINTS)
    return {
        "parity": (sizes["bits"], [parity(sizes["inputs"], k) for k in sizes["bits"]]),
        "frequency": (sizes["frequencies"], [make(points, bottom=f) for f in sizes["frequencies"]]),
        "samples": (sizes["samples"], [make(n, bottom=easy, noise=sizes["noise"]) for n in sizes["samples"]]),
        "drift": (turns, [make(points, bottom=easy)] * len(turns)),
    }


def _train(run: Run, nets: Any, data: DataSet, steps: int, *words: str) -> Runs:
    """Train one network from all seeds, or a list of networks, for about a number of steps."""
    from pathlens.training import Keep, train

    batch = run.sizes["batch_size"]
    found: Any = train(
        nets,
        data,
        epochs=max(1, steps // math.ceil(len(data.x) / batch)),
        lr=run.sizes["lr"],
        batch_size=batch,
        seeds=None if isinstance(nets, list) else run.seeds,
        keep=Keep(evaluate="running"),
        device=run.device,
        checkpoints=checkpoints_in(run.checkpoint("failures", *words), every=200),
        progress=partial(run.progress, ", ".join(words)),
    )
    return found


def _measure(run: Run, test: str, model: str, levels: list[float], data: list[DataSet]) -> dict[str, np.ndarray]:
    """Skills (seeds, levels) of one model, and of a DLGN those with hard gates too."""
    sizes = run.sizes
    found: dict[str, list[np.ndarray]] = {model: []} if model == "relu" else {model: [], "hard": []}
    net = network(model, data[0].x.shape[1], sizes["hidden"], bias=test == "parity")
    if test == "drift":
        start = _train(run, net, data[0], sizes["steps"], model, "before the turns")
    for level, one in zip(levels, data):
        words = (model, f"{test} {level:g}")
        if test == "drift":
            runs = start
            for turn in range(1, sizes["turns"] + 1):
                one = turned(data[0], turn * math.pi / 3)
                runs = _train(run, copy.deepcopy(runs.networks), one, int(level), *words, str(turn))
        else:
            runs = _train(run, net, one, sizes["steps"], *words)
        for key, rows in found.items():
            rows.append(skills(runs, one, test, hard=key == "hard"))
    return {f"{test}_{key}": np.stack(rows, axis=1) for key, rows in found.items()}


def _flops(size: dict[str, Any]) -> float:
    """A ReLU network and a DLGN, which is two, at every level."""
    weights = sum(a * b for a, b in pairwise((size["inputs"], *size["hidden"], 1)))
    levels = sum(len(size[key]) for key in ("bits", "frequencies", "samples", "turn_steps"))
    return 18.0 * weights * size["steps"] * size["batch_size"] * size["seeds"] * levels


@experiment(
    "hs.failures",
    title="Where a DLGN breaks first",
    what="parity, frequency sweep, sample-size sweep and drifting distribution: DLGN-PWC against ReLU",
    claims=[_BEHIND, _FAILS],
    deviations=[SUMMARY, SKILL, SAME],
    sizes={
        "hidden": [16] * 5,
        "lr": (2e-3, 1e-3),
        "batch_size": 32,
        "steps": (1200, 8000),
        "points": (512, 1024),
        "inputs": 10,
        "bits": ([4, 8, 10], [2, 4, 6, 8, 9, 10]),
        "frequencies": ([4, 12, 24], [4, 8, 12, 16, 24, 32, 48]),
        "samples": ([64, 16, 8], [512, 128, 64, 32, 16, 8]),
        "noise": 0.2,
        "easy_frequency": 4,
        "turns": (2, 3),
        "turn_steps": ([320, 80, 16], [1920, 640, 320, 160, 64, 32]),
    },
    seeds=(3, 5),
    minutes=(1.5, 12),
    flops=_flops,
)
def failures(run: Run) -> Artifact:
    """Failure signatures and the first check of the summary."""
    arrays: dict[str, np.ndarray] = {}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for test, (levels, data) in _tests(run.sizes).items():
        arrays[f"{test}_levels"] = np.array(levels)
        for model in NAMES:
            arrays |= _measure(run, test, model, levels, data)
        relu, dlgn = arrays[f"{test}_relu"], arrays[f"{test}_dlgn_pwc"]
        claims += [
            _BEHIND.measure(relu.mean(1) - dlgn.mean(1), row=test),
            _FAILS.measure(dlgn[:, -1], row=test),
        ]
        shown = {"ReLU": relu, "DLGN-PWC": dlgn, "DLGN-PWC, hard gates": arrays[f"{test}_hard"]}
        metrics[test] = {
            "levels": list(levels),
            "skill, mean": {name: shown[name].mean(0).tolist() for name in NAMES.values()},
            "skill, standard deviation": {name: shown[name].std(0).tolist() for name in NAMES.values()},
            "first level that breaks": {
                name: next((level for level, s in zip(levels, np.median(skill, axis=0)) if s < BROKEN), None)
                for name, skill in shown.items()
            },
        }
    return run.artifact(
        claims=claims,
        metrics=metrics,
        gates={"ReLU": "hard", "DLGN-PWC": f"soft β={BETA:g}", "DLGN-PWC, hard gates": "hard"},
        arrays=float32(arrays),
        config={"beta": BETA},
        panels=[
            Panel(
                "lines",
                title,
                [
                    *(Series(f"{test}_{model}", name) for model, name in NAMES.items()),
                    Series(f"{test}_hard", "DLGN-PWC, hard gates", style="dashed"),
                ],
                f"{test}_levels",
                axis,
                "skill",
                "linear" if test == "parity" else "log",
                marks=[(BROKEN, "breaks below")],
            )
            for test, (title, axis) in TESTS.items()
        ],
    )
