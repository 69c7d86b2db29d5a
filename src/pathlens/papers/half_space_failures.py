"""Half-Space Feature Learning: where a DLGN breaks before a ReLU network does.

Four stress tests for the failure signatures that a summary of the paper lists: parity, high frequencies, few examples,
and a target that keeps turning. Torch is imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_circle_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.half_space_circle import BETA, NAMES, PAPER, SOFT

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

MODELS = {m: NAMES[m] for m in ("relu", "dlgn_pwc")}
# test -> title and axis of its panel
TESTS = {
    "parity": "Parity of k bits | k",
    "frequency": "The fast half | waves around the circle",
    "samples": "Few examples | training examples",
    "drift": "A target that turns | steps between turns",
}
TEST_POINTS = 1024
BROKEN = 0.5  # a skill below this is a failure
SUMMARY = Deviation(
    paper="a summary of the paper lists failure signatures without experiments: strongly non-linear interactions, high "
    "frequencies, small data sets; and asks for non-stationary distributions",
    authors_code="–",
    ours="parity of k of ten bits; circles with faster and faster bottom halves; circles with few noisy points; a "
    "circle that turns by a sixth, and again, with fewer and fewer steps to follow",
    why="one axis of difficulty each, on which both models can be followed until they fail",
)
SKILL = Deviation(
    paper="–",
    authors_code="–",
    ours="skill on unseen points: 1 − mean squared error / variance of the target (the fast half's where frequency "
    "grows); for parity 2 × accuracy − 1; at least 0; a model has failed below ½",
    why="one scale for all tests: 1 is perfect, 0 is no better than a constant",
)
SAME = Deviation(
    paper="–",
    authors_code="other public DLGN code: soft gates, β = 4",
    ours="the same widths, steps, rate and batches for both models; DLGN-PWC with soft gates, and what is left of it "
    "with hard gates",
    why="a DLGN has twice the parameters of a ReLU network of the same widths, so what it lacks is not parameters",
)
_BEHIND = Claim(
    "the DLGN breaks before the ReLU network",
    threshold=0.1,
    comparison=">",
    null=0.0,
    null_text="both alike",
    paper="failure signatures of the summary",
    unit="skill of ReLU − skill of DLGN-PWC, mean over levels",
)
_FAILS = Claim(
    "the DLGN fails at the hardest level",
    threshold=BROKEN,
    comparison="<",
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
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = x[order]
    y = x[:, :bits].prod(1, keepdim=True)
    half = len(x) // 2
    return DataSet(x[:half], y[:half], x[half:], y[half:], name=f"parity of {bits} of {inputs} bits")


def turned(data: DataSet, angle: float) -> DataSet:
    """The same circle, inputs turned by an angle."""
    import torch

    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], dtype=data.x.dtype)
    assert data.x_test is not None
    return replace(data, x=data.x @ turn, x_test=data.x_test @ turn)


def _network(model: str, inputs: int, hidden: tuple[int, ...], bias: bool) -> Any:
    from pathlens import models

    if model == "relu":
        return models.relu(inputs, hidden, bias=bias)
    return models.dlgn(inputs, hidden, piecewise_constant=True, beta=BETA, bias=bias)


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
    """Levels and data of each test, from easy to hard; of the turning circle, the data before it turns."""
    from pathlens.data import circle

    few = {"bottom": sizes["easy_frequency"], "test_points": TEST_POINTS}
    return {
        "parity": (sizes["bits"], [parity(sizes["inputs"], k) for k in sizes["bits"]]),
        "frequency": (
            sizes["frequencies"],
            [circle(sizes["points"], bottom=f, test_points=TEST_POINTS) for f in sizes["frequencies"]],
        ),
        "samples": (sizes["samples"], [circle(n, noise=sizes["noise"], **few) for n in sizes["samples"]]),
        "drift": (sizes["turn_steps"], [circle(sizes["points"], **few)] * len(sizes["turn_steps"])),
    }


@experiment(
    "hs.failures",
    title="Where a DLGN breaks first",
    what="parity, frequency sweep, sample-size sweep and drifting distribution: DLGN-PWC against ReLU",
    claims=[_BEHIND, _FAILS],
    minutes=(1.5, 12),
    # a ReLU network and a DLGN, which is two, at every level
    flops=lambda size: (
        18.0
        * sum(a * b for a, b in pairwise((size["inputs"], *size["hidden"], 1)))
        * size["steps"]
        * size["batch_size"]
        * size["seeds"]
        * sum(len(size[key]) for key in ("bits", "frequencies", "samples", "turn_steps"))
    ),
)
def failures(run: Run) -> Artifact:
    """Failure signatures and the first check of the summary."""
    from pathlens.training import Keep, train

    sizes = run.sizes_of("hs.failures")
    batch = sizes["batch_size"]

    def fit(nets: Any, one: DataSet, steps: int, seeds: Any, *words: str) -> Any:
        return train(
            nets,
            one,
            epochs=max(1, steps // math.ceil(len(one.x) / batch)),
            lr=sizes["lr"],
            batch_size=batch,
            seeds=seeds,
            keep=Keep(evaluate="running"),
            device=run.device,
            checkpoints=checkpoints_in(run.checkpoint("failures", *words), every=200),
            progress=functools.partial(run.progress, ", ".join(words)),
        )

    tests = _tests(sizes)
    arrays: dict[str, np.ndarray] = {f"{test}_levels": np.array(levels) for test, (levels, _) in tests.items()}
    for test, (levels, data) in tests.items():
        for m in MODELS:
            found: dict[str, list[np.ndarray]] = {m: []} if m == "relu" else {m: [], "hard": []}
            settled: Any = None
            for level, one in zip(levels, data):
                pattern = _network(m, one.x.shape[1], tuple(sizes["hidden"]), bias=test == "parity")
                if test == "drift":
                    settled = settled or fit(pattern, one, sizes["steps"], run.seeds, m, "before the turns")
                    runs, seen = settled, one
                    for turn in range(1, sizes["turns"] + 1):
                        seen = turned(one, turn * math.pi / 3)
                        nets = copy.deepcopy(runs.networks)
                        runs = fit(nets, seen, int(level), None, m, f"{test} {level:g}", str(turn))
                else:
                    runs, seen = fit(pattern, one, sizes["steps"], run.seeds, m, f"{test} {level:g}"), one
                for key, rows in found.items():
                    rows.append(skills(runs, seen, test, hard=key == "hard"))
            arrays |= {f"{test}_{key}": np.stack(rows, axis=1) for key, rows in found.items()}
    claims, told = [], {}
    for test, (levels, _) in tests.items():
        skill = {m: arrays[f"{test}_{m}"] for m in MODELS}
        claims.append(_BEHIND.measure(skill["relu"].mean(1) - skill["dlgn_pwc"].mean(1), row=test))
        claims.append(_FAILS.measure(skill["dlgn_pwc"][:, -1], row=test))
        middle = {NAMES[m]: np.median(v, axis=0) for m, v in skill.items()}
        middle["DLGN-PWC, hard gates"] = np.median(arrays[f"{test}_hard"], axis=0)
        told[test] = {
            "levels": list(levels),
            "skill, mean": {NAMES[m]: v.mean(0).tolist() for m, v in skill.items()},
            "skill, standard deviation": {NAMES[m]: v.std(0).tolist() for m, v in skill.items()},
            "first level that breaks": {
                name: next((level for level, s in zip(levels, v) if s < BROKEN), None) for name, v in middle.items()
            },
        }
    return Artifact(
        "hs.failures",
        "Where a DLGN breaks first",
        PAPER,
        run.scale,
        {**sizes, "beta": BETA},
        run.seeds,
        tuple(claims),
        told,
        {},
        {},
        (SUMMARY, SKILL, SAME),
        {"ReLU": "hard", "DLGN-PWC": SOFT["dlgn_pwc"], "DLGN-PWC, hard gates": "hard"},
        {k: v.astype(np.float32) for k, v in arrays.items()},
        figures=panels.failures(TESTS, MODELS),
    )
