"""Localisation and gated linear networks: closed forms and exact flows against gradient descent, and the best gates.

Experiments on trained networks are in localisation, which imports this module. Torch is imported inside functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation_settings import (
    DATA,
    EQUATIONS,
    PAPER,
    config,
    float32,
    relative_distance,
)
from pathlens.papers.panels import Panel, Series

# --- flows in closed form --------------------------------------------------------------------------------------

_EXACT = Claim(
    "the closed form gives the iterates of gradient descent",
    threshold=1e-10,
    comparison="<=",
    null=0.5,
    null_text="the printed form, which is one factor 1/K short",
    paper="eq. 9 to 32",
    unit="relative error, 500 steps",
)
_ORDER = Claim(
    "gradient descent approaches the flow in proportion to its step",
    threshold=8.0,
    comparison=">=",
    null=1.0,
    null_text="an error that does not shrink",
    paper="eq. 9 to 32",
    unit="× (error at a step / at a tenth of it)",
)
_LIMIT = Claim(
    "w(∞) is the regression of y on x̃, plus what the data do not see",
    threshold=1e-8,
    comparison="<=",
    null=0.75,
    null_text="the printed w(∞) for K = 4",
    paper="eq. 11, 26",
    unit="relative error",
)


_FINER = (1, 3, 10, 30)  # steps are divided by these


def _flow_gates(seed: int) -> dict[str, Any]:
    from pathlens import theory

    rng = np.random.default_rng(seed)
    return {
        "general (4.1)": theory.random_half_spaces(4, 20, seed=seed),
        "single (4.2)": theory.single(rng.standard_normal(20)),
        "exclusive (3.4)": theory.exclusive(rng.standard_normal((4, 20))),
        "redundant (4.3)": theory.redundant(theory.random_half_spaces(2, 20, seed=seed), copies=2),
    }


@experiment(
    "loc.flow",
    title="Closed-form weights against gradient descent",
    what="w(t), w(∞) and gradient-descent iterates for general, single, exclusive and redundant gates",
    claims=[_EXACT, _ORDER, _LIMIT],
    minutes=(0.1, 0.1),
    # four gatings of up to four units, 500 steps and 20 coarse ones that are cut into up to 30
    flops=lambda size: 4 * 4.0 * 4 * size["inputs"] * size["rows"] * 1400 * size["seeds"],
)
def flow(run: Run) -> Artifact:
    """Sections 3.3 to 3.5 and 4: the corrected equations on NLGP data."""
    import torch

    from pathlens import theory
    from pathlens.data import nlgp

    errors: dict[str, dict[str, list[float]]] = {}
    far: dict[str, list[Any]] = {}
    for done, seed in enumerate(run.seeds):
        data = nlgp(500, d=20, xi=(3.0, 1.0), gain=3.0, seed=seed, dtype=torch.float64)
        x, y = data.x.numpy(), data.y[:, 0].numpy()
        for name, gates in _flow_gates(seed).items():
            g = gates(x)
            w0 = np.random.default_rng(seed).standard_normal((g.shape[1], 20)) * 0.2
            net = theory.GDLN.from_data(gates, data, w0=w0)
            step = 0.05 * net.largest_step
            kept = errors.setdefault(name, {"exact": [], "order": [], "limit": []})
            w = _descend_gated(g, x, y, w0, step, 500)
            kept["exact"].append(float(np.abs(net.iterate(500, step) - w).max() / np.abs(w).max()))
            near = [np.abs(net.w(20 * step) - _descend_gated(g, x, y, w0, step / r, 20 * r)).max() for r in _FINER]
            kept["order"].append(float(near[0] / near[_FINER.index(10)]))
            far.setdefault(name, []).append(near)
            features = (g[:, :, None] * x[:, None, :]).reshape(len(x), -1) / g.shape[1]
            least = np.linalg.lstsq(features, y - features @ w0.reshape(-1), rcond=1e-10)[0] + w0.reshape(-1)
            limit = net.limit().reshape(-1)
            kept["limit"].append(float(np.abs(limit - least).max() / np.abs(least).max()))
        run.progress("closed forms", done + 1, len(run.seeds))
    arrays: dict[str, Any] = {"steps": [1 / r for r in _FINER], "far": list(far.values()), **_example()}
    arrays |= {key: [values[key] for values in errors.values()] for key in ("exact", "limit")}
    claims = [
        claim.measure(values[key], row=name)
        for name, values in errors.items()
        for key, claim in (("exact", _EXACT), ("order", _ORDER), ("limit", _LIMIT))
    ]
    return Artifact(
        "loc.flow",
        "Closed-form weights against gradient descent",
        PAPER,
        run.scale,
        {"inputs": 20, "rows": 500, "gain": 3.0},
        run.seeds,
        tuple(claims),
        errors,
        {},
        {},
        (DATA, EQUATIONS),
        {"GDLN": "hard"},
        float32(arrays),
        figures=_flow_panels(list(errors)),
    )


def _example() -> dict[str, Any]:
    """Four weights of one network with general gates over time: closed form and gradient descent."""
    import torch

    from pathlens import theory
    from pathlens.data import nlgp

    data = nlgp(500, d=20, xi=(3.0, 1.0), gain=3.0, seed=0, dtype=torch.float64)
    x, y, gates = data.x.numpy(), data.y[:, 0].numpy(), theory.random_half_spaces(4, 20, seed=0)
    w0 = np.random.default_rng(0).standard_normal((4, 20)) * 0.2
    net = theory.GDLN.from_data(gates, data, w0=w0)
    step = 0.5 * net.largest_step
    marks = np.unique(np.geomspace(1, 300, 12).round().astype(int))
    times = np.geomspace(step / 2, 300 * step, 80)
    walked = [_descend_gated(gates(x), x, y, w0, step, k)[:, 0] for k in marks]
    flow = net.w(times)[:, :, 0].T
    return {"times": times, "flow": flow, "descent_times": marks * step, "descent": np.array(walked).T}


def _flow_panels(names: list[str]) -> list[Panel]:
    def rows(stem: str) -> list[Series]:
        return [Series(f"{stem}[{i}]", name) for i, name in enumerate(names)]

    curves = [Series(f"flow[{k}]", f"unit {k + 1}") for k in range(4)]
    dots = [Series(f"descent[{k}]", x="descent_times", style="points") for k in range(4)]
    return [
        Panel(
            "lines",
            "One weight of each unit: closed form (lines), descent (dots)",
            [*curves, *dots],
            "times",
            "time (steps × step size)",
            "weight",
            "log",
            note="General gates, one seed, half the largest stable step.",
        ),
        Panel(
            "lines",
            "Descent approaches the flow",
            rows("far"),
            "steps",
            "step (÷ the coarsest)",
            "largest error of a weight",
            "log",
            "log",
            slope=1.0,
        ),
        Panel(
            "strips",
            "Closed form of the iterates",
            rows("exact"),
            x_label="relative error after 500 steps",
            x_scale="log",
            marks=[(1e-10, "allowed")],
        ),
        Panel(
            "strips",
            "Closed form of w(∞)",
            rows("limit"),
            x_label="relative error",
            x_scale="log",
            marks=[(1e-8, "allowed")],
        ),
    ]


def _descend_gated(g: np.ndarray, x: np.ndarray, y: np.ndarray, w0: np.ndarray, step: float, steps: int) -> np.ndarray:
    """Plain gradient descent on ½⟨(y − ŷ)²⟩ with given gates."""
    w, K, n = w0.copy(), g.shape[1], len(x)
    for _ in range(steps):
        error = (g * (x @ w.T)).sum(1) / K - y
        w -= step / (K * n) * ((g * error[:, None]).T @ x)
    return w


# --- gates that evolve -----------------------------------------------------------------------------------------

_AGREES = Claim(
    "gradient descent with step 0.001 agrees with the event-exact flow",
    threshold=1e-4,
    comparison="<=",
    null=0.1,
    null_text="gates frozen at the start",
    paper="2.3 and 5: 'let the gates vary during training'",
    unit="relative distance of the weights at the end",
)
_LINEAR = Claim(
    "the error of gradient descent is proportional to its step",
    threshold=5.0,
    comparison=">=",
    null=1.0,
    null_text="an error that does not shrink",
    paper="2.3 and 5",
    unit="× (error at step 0.01 / at 0.001)",
)
STEPS = (0.1, 0.01, 0.001)


@experiment(
    "loc.evolving",
    title="Gates that evolve, event by event",
    what="exact ReLU flow with flips and sliding gates, against gradient descent with three steps and frozen gates",
    claims=[_AGREES, _LINEAR],
    minutes=(0.3, 0.5),
    flops=lambda size: 4.0 * size["inputs"] * size["units"] * size["flow_rows"] * size["time"] * 1.11e3 * size["seeds"],
)
def evolving(run: Run) -> Artifact:
    """Sections 2.3 and 5: 40 inputs, 10 units, 300 rows."""
    import time

    import torch

    from pathlens import theory
    from pathlens.data import nlgp

    size = run.sizes_of("loc.evolving")
    K, d, rows, end = size["units"], size["inputs"], size["flow_rows"], size["time"]
    times = np.linspace(0, end, 9)
    errors, counts, seconds, loss, share, frozen = [], [], [], [], [], []
    for done, seed in enumerate(run.seeds):
        data = nlgp(rows, d=d, xi=(3.0, 1.0), gain=3.0, seed=seed, dtype=torch.float64)
        x, y = data.x.numpy(), data.y[:, 0].numpy()
        w0 = np.random.default_rng(seed).standard_normal((K, d)) * np.sqrt(2 / (K + d))
        flow = theory.relu_flow(data, w0, times, progress=False)
        final, took, far = flow.weights[-1], [flow.seconds], []
        for step in STEPS:
            begin = time.perf_counter()
            far.append(np.linalg.norm(_descend_relu(x, y, w0, step, end) - final) / np.linalg.norm(final))
            took.append(time.perf_counter() - begin)
        errors.append(far)
        seconds.append(took)
        counts.append([len(flow.flips), len(flow.slides), int((flow.state == theory.SLIDING).sum()), flow.fallbacks])
        loss.append(flow.loss())
        share.append(flow.flipped_share())
        frozen.append(relative_distance(theory.GDLN.from_data(x @ w0.T > 0, data, w0=w0).w(times), flow.weights))
        run.progress("exact flows", done + 1, len(run.seeds))
    error = np.array(errors)
    metrics = {
        "step": list(STEPS),
        "error": error.tolist(),
        "frozen gates": np.array(frozen)[:, -1].tolist(),
        "flips, slides, sliding at the end, fallbacks": counts,
        "seconds, flow and descents": seconds,
    }
    return Artifact(
        "loc.evolving",
        "Gates that evolve, event by event",
        PAPER,
        run.scale,
        config(run, "loc.evolving"),
        run.seeds,
        (_AGREES.measure(error[:, 2]), _LINEAR.measure(error[:, 1] / error[:, 2])),
        metrics,
        {},
        {},
        (DATA, EQUATIONS),
        {"ReLU": "hard, and sliding ones between"},
        float32({"times": times, "steps": STEPS, "error": error, "loss": loss, "share": share, "frozen": frozen}),
        figures=[
            Panel(
                "lines",
                "Gradient descent against the exact flow",
                [Series("error", "gradient descent")],
                "steps",
                "step size",
                "relative distance of weights at the end",
                "log",
                "log",
                slope=1.0,
            ),
            Panel(
                "lines",
                "Gates frozen at the start",
                [Series("frozen")],
                "times",
                "time",
                "relative distance from the exact flow",
            ),
            Panel("lines", "Gates that differ from the start", [Series("share")], "times", "time", "share of gates"),
            Panel("lines", "Loss of the exact flow", [Series("loss")], "times", "time", "½⟨(y − ŷ)²⟩"),
        ],
    )


def _descend_relu(x: np.ndarray, y: np.ndarray, w0: np.ndarray, step: float, end: float) -> np.ndarray:
    """Plain gradient descent of the mean of ReLUs on ½⟨(y − ŷ)²⟩."""
    w, columns, scale = w0.copy(), np.ascontiguousarray(x.T), step / (len(w0) * len(x))
    for _ in range(round(end / step)):
        h = w @ columns
        w -= scale * (((h > 0) * (np.maximum(h, 0).sum(0) / len(w) - y)) @ x)
    return w


# --- which gates are best --------------------------------------------------------------------------------------

_DIAGONAL = Claim(
    "gatings with a more diagonal precision matrix have lower loss",
    threshold=0.3,
    comparison=">=",
    null=0.0,
    null_text="no relation",
    paper="'the best precision matrix would be maximally diagonal' (3.3, a guess)",
    unit="rank correlation of off-diagonal mass of A⁺ and loss, over random gatings",
)
_TILING = Claim(
    "gates that tile the space beat overlapping ones",
    threshold=0.98,
    comparison="<=",
    null=1.0,
    null_text="no difference",
    paper="'Gates that tile the space without overlap' (3.3, a guess)",
    unit="× (median test loss, slabs / random half-spaces, equal K)",
)
_SEARCHED = Claim(
    "gates found by gradient beat the best of the random ones",
    threshold=0.98,
    comparison="<=",
    null=1.0,
    null_text="no better",
    paper="'how do we choose the gates?' (3.3)",
    unit="× (test loss, soft search / best random)",
)


@experiment(
    "loc.gates",
    title="Which gates are best",
    what="least loss of random, tiling, greedy, gradient-found and learned gates; the note's two conjectures",
    claims=[_DIAGONAL, _TILING, _SEARCHED],
    minutes=(1, 1.5),
    # five ways to choose gates, each about as many least-squares problems as there are draws
    flops=lambda size: (
        5 * 2.0 * size["draws"] * size["gate_rows"] * (size["gates"] * size["inputs"]) ** 2 * size["seeds"]
    ),
)
def gates(run: Run) -> Artifact:
    """Section 3.3, equations 13 to 18: 20 inputs, 4 gates, losses on held-out rows."""
    import torch
    from scipy.stats import spearmanr

    from pathlens import models, theory
    from pathlens.data import nlgp
    from pathlens.training import train

    size = run.sizes_of("loc.gates")
    K, d, draws, rows = size["gates"], size["inputs"], size["draws"], size["gate_rows"]
    relation, tiles, found, best, masses, losses = [], [], [], [], [], []
    for done, seed in enumerate(run.seeds):
        data, test = (
            nlgp(rows, d=d, xi=(3.0, 1.0), gain=3.0, seed=s, dtype=torch.float64) for s in (seed, 1000 + seed)
        )
        net: Any = models.relu(d, hidden=(K,), seed=seed).double()
        train(net, data, epochs=30, lr=0.01, batch_size=100, seed=seed, progress=False)
        table = theory.search_gatings(
            data,
            K,
            test=test,
            methods=("random", "tiling", "greedy", "soft", "network"),
            trials=draws,
            networks=[net],
            steps=80,
            seed=seed,
            progress=False,
        )
        random = table.by_method("random")
        mass = [theory.off_diagonal_mass(g.gates, data) for g in random]
        loss = [g.test_loss or 0.0 for g in random]
        relation.append(float(spearmanr(mass, loss).statistic))
        middle = {m: float(np.median([g.test_loss or 0.0 for g in table.by_method(m)])) for m in ("random", "tiling")}
        least = {m: table.by_method(m)[0].test_loss for m in ("random", "tiling", "greedy", "soft", "network")}
        tiles.append(middle["tiling"] / middle["random"])
        found.append((least["soft"] or 0.0) / (least["random"] or 1.0))
        best.append(least)
        masses.append(mass)
        losses.append(loss)
        run.progress("gatings", done + 1, len(run.seeds))
    claims = (_DIAGONAL.measure(relation), _TILING.measure(tiles), _SEARCHED.measure(found))
    return Artifact(
        "loc.gates",
        "Which gates are best",
        PAPER,
        run.scale,
        config(run, "loc.gates"),
        run.seeds,
        claims,
        {"least test loss": {m: [b[m] for b in best] for m in best[0]}},
        {},
        {},
        (
            DATA,
            Deviation(
                "equation 18 has products of class means",
                "corrected in the next draft",
                "second moments of the classes, as in equation 16",
                "with means the score is 1 for every gating whose class means are independent",
            ),
        ),
        {"all": "hard"},
        float32({"mass": masses, "loss": losses, "least": [[b[m] for b in best] for m in best[0]]}),
        figures=[
            Panel(
                "strips",
                "Least test loss of each search",
                [Series(f"least[{i}]", m) for i, m in enumerate(best[0])],
                x_label="½⟨(y − ŷ)²⟩ on held-out rows",
            ),
            Panel(
                "points",
                "Random gatings: is a diagonal precision better?",
                [Series("loss", x="mass")],
                x_label="off-diagonal mass of A⁺",
                y_label="½⟨(y − ŷ)²⟩ on held-out rows",
                note="The guess in the note would be a cloud that rises to the right.",
            ),
        ],
    )
