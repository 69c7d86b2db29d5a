"""Sections 3.3 to 3.5 and 4: weights in closed form, by the corrected equations, against gradient descent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.settings import DATA, EQUATIONS, GAIN, descend, draw, over_time, rows
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.theory import Gates

_EXACT = Claim(
    "the closed form gives the iterates of gradient descent",
    at_most=1e-10,
    null=0.5,
    null_text="the printed form, which is one factor 1/K short",
    paper="eq. 9 to 32",
    unit="relative error, 500 steps",
)
_ORDER = Claim(
    "gradient descent approaches the flow in proportion to its step",
    at_least=8.0,
    null=1.0,
    null_text="an error that does not shrink",
    paper="eq. 9 to 32",
    unit="× (error at a step / at a tenth of it)",
)
_LIMIT = Claim(
    "w(∞) is the regression of y on x̃, plus what the data do not see",
    at_most=1e-8,
    null=0.75,
    null_text="the printed w(∞) for K = 4",
    paper="eq. 11, 26",
    unit="relative error",
)
FINER = (1, 3, 10, 30)  # steps are divided by these


def _gatings(d: int, seed: int) -> dict[str, Gates]:
    from pathlens import theory

    rng = np.random.default_rng(seed)
    return {
        "general (4.1)": theory.random_half_spaces(4, d, seed=seed),
        "single (4.2)": theory.single(rng.standard_normal(d)),
        "exclusive (3.4)": theory.exclusive(rng.standard_normal((4, d))),
        "redundant (4.3)": theory.redundant(theory.random_half_spaces(2, d, seed=seed), copies=2),
    }


@experiment(
    "loc.flow",
    title="Closed-form weights against gradient descent",
    what="w(t), w(∞) and gradient-descent iterates for general, single, exclusive and redundant gates",
    claims=[_EXACT, _ORDER, _LIMIT],
    deviations=[DATA, EQUATIONS],
    sizes={"inputs": 20, "rows": 500},
    minutes=(0.1, 0.1),
    # four gatings of up to four units, 500 steps and 20 coarse ones that are cut into up to 30
    flops=lambda size: 4 * 4.0 * 4 * size["inputs"] * size["rows"] * 1400 * size["seeds"],
)
def flow(run: Run) -> Artifact:
    """Errors of the closed forms for four kinds of gates."""
    from pathlens import theory

    n, d = run.sizes["rows"], run.sizes["inputs"]
    errors: dict[str, dict[str, list[float]]] = {}
    far: dict[str, list[Any]] = {}
    for done, seed in enumerate(run.seeds):
        data = draw(n, d, seed)
        x, y = data.x.numpy(), data.y[:, 0].numpy()
        for name, gates in _gatings(d, seed).items():
            g = gates(x)
            K = g.shape[1]
            w0 = np.random.default_rng(seed).standard_normal((K, d)) * 0.2
            net = theory.GDLN.from_data(gates, data, w0=w0)
            step = 0.05 * net.largest_step
            found = errors.setdefault(name, {"exact": [], "order": [], "limit": []})
            w = descend(x, y, w0, step, 500, gates=g)
            found["exact"].append(float(np.abs(net.iterate(500, step) - w).max() / np.abs(w).max()))
            end = net.w(20 * step)
            near = [np.abs(end - descend(x, y, w0, step / r, 20 * r, gates=g)).max() for r in FINER]
            found["order"].append(float(near[0] / near[FINER.index(10)]))
            far.setdefault(name, []).append(near)
            features = (g[:, :, None] * x[:, None, :]).reshape(n, -1) / K
            least = np.linalg.lstsq(features, y - features @ w0.reshape(-1), rcond=1e-10)[0] + w0.reshape(-1)
            found["limit"].append(float(np.abs(net.limit().reshape(-1) - least).max() / np.abs(least).max()))
        run.progress("closed forms", done + 1, len(run.seeds))
    arrays: dict[str, Any] = {"steps": [1 / r for r in FINER], "far": list(far.values()), **_example(n, d)}
    arrays |= {key: [values[key] for values in errors.values()] for key in ("exact", "limit")}
    claims = [
        claim.measure(values[key], row=name)
        for name, values in errors.items()
        for key, claim in (("exact", _EXACT), ("order", _ORDER), ("limit", _LIMIT))
    ]
    return run.artifact(
        claims=claims,
        metrics=errors,
        gates={"GDLN": "hard"},
        arrays=float32(arrays),
        config={"gain": GAIN},
        panels=_panels(list(errors)),
    )


def _example(n: int, d: int) -> dict[str, Any]:
    """One weight of each of four units with general gates over time: closed form and gradient descent."""
    from pathlens import theory

    data, gates = draw(n, d, 0), theory.random_half_spaces(4, d, seed=0)
    x, y = data.x.numpy(), data.y[:, 0].numpy()
    w0 = np.random.default_rng(0).standard_normal((4, d)) * 0.2
    net = theory.GDLN.from_data(gates, data, w0=w0)
    step = 0.5 * net.largest_step
    marks = np.unique(np.geomspace(1, 300, 12).round().astype(int))
    times = np.geomspace(step / 2, 300 * step, 80)
    return {
        "times": times,
        "flow": net.w(times)[:, :, 0].T,
        "descent_times": marks * step,
        "descent": np.stack([descend(x, y, w0, step, k, gates=gates(x))[:, 0] for k in marks], axis=1),
    }


def _panels(names: list[str]) -> list[Panel]:
    curves = [Series(f"flow[{k}]", f"unit {k + 1}") for k in range(4)]
    dots = [Series(f"descent[{k}]", x="descent_times", style="points") for k in range(4)]
    return [
        over_time(
            "One weight of each unit: closed form (lines), descent (dots)",
            [*curves, *dots],
            "weight",
            note="General gates, one seed, half the largest stable step.",
        ),
        Panel(
            "lines",
            "Descent approaches the flow",
            rows("far", names),
            x="steps",
            x_label="step (÷ the coarsest)",
            y_label="largest error of a weight",
            x_scale="log",
            y_scale="log",
            slope=1.0,
        ),
        Panel(
            "strips",
            "Closed form of the iterates",
            rows("exact", names),
            x_label="relative error after 500 steps",
            x_scale="log",
            marks=[(1e-10, "allowed")],
        ),
        Panel(
            "strips",
            "Closed form of w(∞)",
            rows("limit", names),
            x_label="relative error",
            x_scale="log",
            marks=[(1e-8, "allowed")],
        ),
    ]
