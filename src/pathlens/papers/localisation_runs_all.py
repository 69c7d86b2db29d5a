"""Localisation and gated linear networks: what trained networks do with receptive fields and gates.

Closed forms, exact flows and the search for gates are in localisation_theory, trainings that several experiments share
in localisation_runs. Torch is imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import localisation_theory
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation_settings import (
    DATA,
    EQUATIONS,
    NOISE,
    PAPER,
    RATES,
    SUPPORT,
    config,
    float32,
    relative_distance,
)
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.papers.localisation_runs import Descent

__all__ = ["activations", "dft", "flips", "gdln", "localisation_theory", "location"]  # the import registers the rest

# --- when receptive fields localise ----------------------------------------------------------------------------

_BUMPS = Claim(
    "ReLU units become bumps where ξ₁ > ξ₂: neighbouring weights have one sign",
    threshold=0.1,
    comparison="<=",
    null=0.5,
    null_text="noise",
    paper="'we get localization if ξ₁ > ξ₂'",
    unit="share of neighbour products that is negative",
)
_OSCILLATE = Claim(
    "ReLU units oscillate where ξ₁ < ξ₂: neighbouring weights have opposite signs",
    threshold=0.8,
    comparison=">=",
    null=0.5,
    null_text="noise",
    paper="'short-range oscillations otherwise'",
    unit="share of neighbour products that is negative",
)
_LOCALISED = Claim(
    "receptive fields localise",
    threshold=1.5 * NOISE,
    comparison=">=",
    null=NOISE,
    null_text="Gaussian noise",
    paper="section 1",
    unit="inverse participation ratio, mean over units",
)
_DIFFUSE = Claim(
    "ReLU fields do not localise at low gain",
    threshold=0.09,
    comparison="<=",
    null=0.15,
    null_text="as at gain 3",
    paper="'a gain parameter that controls the degree of localization'",
    unit="inverse participation ratio",
)
_NEEDS_BIAS = Claim(
    "without biases, sigmoid and erf networks do not learn",
    threshold=0.95,
    comparison=">=",
    null=0.75,
    null_text="as with biases",
    paper="'one can further remove the bias terms (though not for sigmoid)'",
    unit="× (loss at the end / loss of the best constant)",
)
_LOCALISING = (
    "ReLU, ξ₁ > ξ₂",
    "ReLU, ξ₁ > ξ₂, gain 100",
    "ReLU, second layer trained",
    "ReLU, cross-entropy",
    "sigmoid, ξ₁ > ξ₂",
    "sigmoid, ξ₁ < ξ₂",
    "erf, ξ₁ > ξ₂",
    "erf, ξ₁ < ξ₂",
    "ReLU, single pulse ±1",
    "ReLU, single pulse 0/1",
    "erf, single pulse ±1",
)


@experiment(
    "loc.activations",
    title="When receptive fields localise",
    what="eq. 1 with ReLU, sigmoid, erf; with and without biases and a trained second layer; NLGP and single pulse",
    claims=[_BUMPS, _OSCILLATE, _LOCALISED, _DIFFUSE, _NEEDS_BIAS],
    minutes=(1.5, 25),
    flops=lambda size: 15 * 6.0 * 40 * 10 * size["steps"] * size["batch"] * size["seeds"],  # 15 settings
)
def activations(run: Run) -> Artifact:
    """Section 1: receptive fields of one-layer networks at the end of training."""
    from pathlens import theory
    from pathlens.papers.localisation_runs import SETTINGS, fields, moments, train_setting

    size = run.sizes_of("loc.activations")
    measures: dict[str, dict[str, list[float]]] = {}
    arrays: dict[str, Any] = {}
    for i, (name, setting) in enumerate(SETTINGS.items()):
        runs = train_setting(run, name, size["steps"], size["batch"])
        w, start = fields(runs, size["steps"]), fields(runs, 0)
        arrays[f"fields_{i}"] = np.stack([fields(runs, k)[0] for k in moments(size["steps"])])  # (times, K, d)
        measures[name] = {
            "ipr": theory.ipr(w, centre=setting.centre).mean(1).tolist(),
            "ipr at first": theory.ipr(start, centre=setting.centre).mean(1).tolist(),
            "arc90": theory.arc90(w, centre=setting.centre).mean(1).tolist(),
            "sign alternation": theory.sign_alternation(w, centre=setting.centre).mean(1).tolist(),
            "kurtosis": theory.kurtosis(w).mean(1).tolist(),
            "loss": runs.history()[:, -50:].mean(1).tolist(),
        }
    for key, stem in (("ipr", "ipr"), ("sign alternation", "alternation")):
        arrays[stem] = [measures[name][key] for name in SETTINGS]
    claims = [
        _BUMPS.measure(measures["ReLU, ξ₁ > ξ₂"]["sign alternation"]),
        _OSCILLATE.measure(measures["ReLU, ξ₁ < ξ₂"]["sign alternation"]),
        _DIFFUSE.measure(measures["ReLU, ξ₁ > ξ₂, gain 0.01"]["ipr"]),
        *(_LOCALISED.measure(measures[name]["ipr"], row=name) for name in _LOCALISING),
        # the best constant has loss ¼ for labels 0 and 1, and 1 for ±1
        _NEEDS_BIAS.measure([v / 0.25 for v in measures["sigmoid, no bias"]["loss"]], row="sigmoid, no bias"),
        _NEEDS_BIAS.measure(measures["erf, no bias"]["loss"], row="erf, no bias"),
    ]
    return Artifact(
        "loc.activations",
        "When receptive fields localise",
        PAPER,
        run.scale,
        config(run, "loc.activations"),
        run.seeds,
        tuple(claims),
        {"settings": list(SETTINGS), **measures},
        {},
        {},
        (DATA, RATES, SUPPORT),
        {"ReLU": "hard"},
        float32(arrays),
        figures=_activation_panels(list(SETTINGS), moments(size["steps"])),
    )


def _activation_panels(settings: list[str], steps: list[int]) -> list[Panel]:
    def over_time(name: str, note: str) -> Panel:
        i = settings.index(name)
        columns = [Series(f"fields_{i}[{t}]", "start" if k == 0 else f"step {k}") for t, k in enumerate(steps)]
        return Panel(
            "fields",
            f"{name}: weights of four units",
            columns,
            x_label="position on the ring",
            y_label="unit",
            note=note,
        )

    def strips(stem: str, **words: Any) -> Panel:
        return Panel("strips", series=[Series(f"{stem}[{i}]", name) for i, name in enumerate(settings)], **words)

    return [
        over_time("ReLU, ξ₁ > ξ₂", "Over training each unit becomes one bump."),
        over_time("ReLU, ξ₁ < ξ₂", "The same network on swapped labels: neighbouring weights alternate in sign."),
        strips(
            "ipr",
            title="How local the fields are",
            x_label="inverse participation ratio at the end",
            marks=[(NOISE, "noise")],
            note="One coordinate alone would give 1, a constant field 1/40.",
        ),
        strips(
            "alternation",
            title="How often neighbouring weights differ in sign",
            x_label="share of neighbours",
            marks=[(0.5, "noise")],
            note="Bumps lie on the left, oscillations on the right.",
        ),
    ]


# --- how far a GDLN explains a ReLU network --------------------------------------------------------------------

_FOLLOWS = Claim(
    "the weights of the GDLN stay near those of the ReLU network",
    threshold=0.2,
    comparison="<=",
    null=1.0,
    null_text="unrelated weights",
    paper="section 2: 'how well a gated deep linear network (GDLN) could do'",
    unit="relative distance at the end",
)
_AS_LOCAL = Claim(
    "the GDLN localises like the ReLU network",
    threshold=0.8,
    comparison=">=",
    null=0.47,
    null_text="noise against ReLU at gain 3",
    paper="section 2",
    unit="× (inverse participation ratio, GDLN / ReLU)",
)
_AS_GOOD = Claim(
    "the GDLN learns as well as the ReLU network",
    threshold=1.1,
    comparison="<=",
    null=2.0,
    null_text="twice the loss, about that of a constant",
    paper="section 2",
    unit="× (loss on held-out rows at the end, GDLN / ReLU)",
)
_TIME = "time (steps × step size)"
_GATINGS = ("gates at the start", "gates of the end", "bumps chosen upfront")


def _bump_gates(units: int) -> Any:
    """Half-spaces whose normals are bumps of width ξ₁, evenly spaced on the ring: known before any training."""
    from pathlens import theory
    from pathlens.data import ring_covariance

    rows = np.linspace(0, 40, units, endpoint=False).astype(int)
    return theory.half_spaces(ring_covariance(40, 3.0).numpy()[rows])


def _descent_operations(size: dict[str, Any]) -> float:
    """Floating-point operations of the descent that several experiments share: 10 units on 40 inputs."""
    return 6.0 * 40 * 10 * size["rows"] * size["descent"] * size["seeds"]


def _descent(run: Run) -> Descent:
    from pathlens.papers.localisation_runs import descend

    size = run.sizes_of("loc.gdln")  # those of loc.flips and loc.dft are the same
    return descend(run, size["rows"], size["descent"])


@experiment(
    "loc.gdln",
    title="How far a GDLN explains a ReLU network",
    what="GDLN with gates of the start, of the end, and chosen upfront, against one ReLU run, step by step",
    claims=[_FOLLOWS, _AS_LOCAL, _AS_GOOD],
    minutes=(1, 1.5),
    flops=_descent_operations,
)
def gdln(run: Run) -> Artifact:
    """Section 2: the same descent with gates that stay, by the exact iterates of gradient descent."""
    from pathlens import theory

    d = _descent(run)
    weights = d.weights
    x, y = d.data.x.numpy(), d.data.y[:, 0].numpy()
    x_test, y_test = d.data.x_test.numpy(), d.data.y_test[:, 0].numpy()  # type: ignore[union-attr, index]
    found = {"ReLU": weights}
    losses = {"ReLU": np.array([[_loss(w, theory.half_spaces(w), x_test, y_test) for w in one] for one in weights])}
    for name in _GATINGS:
        found[name], losses[name] = np.empty_like(weights), np.empty(weights.shape[:2])
        for s, own in enumerate(weights):
            gating = {
                "gates at the start": theory.half_spaces(own[0]),
                "gates of the end": theory.half_spaces(own[-1]),
                "bumps chosen upfront": _bump_gates(len(own[0])),
            }[name]
            net = theory.GDLN.from_data(gating, (x, y), w0=own[0], allow_dead=True)
            found[name][s] = [net.iterate(k, d.step) for k in d.marks]
            losses[name][s] = [_loss(w, gating, x_test, y_test) for w in found[name][s]]
        run.progress("closed forms", _GATINGS.index(name) + 1, len(_GATINGS))
    arrays: dict[str, Any] = {"times": d.times}
    metrics: dict[str, Any] = {"times": d.times.tolist()}
    claims = []
    for i, name in enumerate(("ReLU", *_GATINGS)):
        w = found[name]
        arrays |= {
            f"loss_{i}": losses[name],
            f"ipr_{i}": theory.ipr(w).mean(2),
            f"arc90_{i}": theory.arc90(w).mean(2),
            f"alternation_{i}": theory.sign_alternation(w).mean(2),
            f"centre_{i}": theory.centre_of_mass(w),
            f"norm_{i}": np.linalg.norm(w, axis=3),
            f"cosine_{i}": _cosine(w, w[:, :1]),
            f"distance_{i}": relative_distance(w, weights),
            f"fields_{i}": w[0, -1],
        }
        measured = ("loss", "ipr", "arc90", "alternation", "distance")
        metrics[name] = {k: np.median(arrays[f"{k}_{i}"][:, -1]).item() for k in measured}
        if name != "ReLU":
            claims += [
                _FOLLOWS.measure(arrays[f"distance_{i}"][:, -1], row=name),
                _AS_LOCAL.measure(arrays[f"ipr_{i}"][:, -1] / arrays["ipr_0"][:, -1], row=name),
                _AS_GOOD.measure(arrays[f"loss_{i}"][:, -1] / arrays["loss_0"][:, -1], row=name),
            ]
    return Artifact(
        "loc.gdln",
        "How far a GDLN explains a ReLU network",
        PAPER,
        run.scale,
        config(run, "loc.gdln"),
        run.seeds,
        tuple(claims),
        metrics,
        {},
        {},
        (DATA, RATES, EQUATIONS),
        {"ReLU and GDLN": "hard"},
        float32(arrays),
        figures=_gdln_panels(("ReLU", *_GATINGS)),
    )


def _gdln_panels(names: tuple[str, ...]) -> list[Panel]:
    def over_time(stem: str, y_label: str, title: str, y_scale: str = "linear", **words: Any) -> Panel:
        series = [Series(f"{stem}_{i}", name) for i, name in enumerate(names) if stem != "distance" or i]
        return Panel("lines", title, series, "times", _TIME, y_label, "log", y_scale, **words)

    return [
        over_time("loss", "½⟨(y − ŷ)²⟩", "Loss on held-out rows", "log"),
        over_time(
            "distance", "‖w − w_ReLU‖ / ‖w_ReLU‖", "Distance from the ReLU network", marks=[(1.0, "as far as zero")]
        ),
        over_time("ipr", "inverse participation ratio", "How local the fields are", marks=[(NOISE, "noise")]),
        Panel(
            "fields",
            "Four units at the end",
            [Series(f"fields_{i}", name) for i, name in enumerate(names)],
            x_label="position on the ring",
            y_label="unit",
            note="All start from the same weights.",
        ),
    ]


def _loss(w: np.ndarray, gates: Any, x: np.ndarray, y: np.ndarray) -> float:
    return float(0.5 * np.mean(((gates(x) * (x @ w.T)).mean(1) - y) ** 2))


def _cosine(w: np.ndarray, other: np.ndarray) -> np.ndarray:
    scale = np.linalg.norm(w, axis=-1) * np.linalg.norm(other, axis=-1)
    return (w * other).sum(-1) / np.maximum(scale, 1e-300)


# --- gates over time -------------------------------------------------------------------------------------------

_CONSTANT = Claim(
    "the gates of the ReLU network are roughly constant",
    threshold=0.05,
    comparison="<=",
    null=0.5,
    null_text="gates unrelated to those of the start",
    paper="'g(x) may be relatively constant' (2.1)",
    unit="share of gates that differ from the start, at the end",
)
_UNIFORM = Claim(
    "weights grow in size and keep their direction",
    threshold=0.9,
    comparison=">=",
    null=0.0,
    null_text="unrelated directions",
    paper="'w₁ appears to grow uniformly in size during much of its training' (2.1)",
    unit="cosine between w(t) and w(0) at the end, mean over units",
)


@experiment(
    "loc.flips",
    title="Gates flip while a ReLU network learns",
    what="share of gates that differ from the start, over time; size and direction of the weights",
    claims=[_CONSTANT, _UNIFORM],
    minutes=(0.5, 1.5),
    flops=_descent_operations,
)
def flips(run: Run) -> Artifact:
    """Section 2.1."""
    d = _descent(run)
    gates, weights = d.gates, d.weights
    share = (gates != gates[:, :1]).mean((2, 3))
    cosine = _cosine(weights, weights[:, :1])
    growth = np.linalg.norm(weights, axis=3)
    return Artifact(
        "loc.flips",
        "Gates flip while a ReLU network learns",
        PAPER,
        run.scale,
        config(run, "loc.flips"),
        run.seeds,
        (_CONSTANT.measure(share[:, -1]), _UNIFORM.measure(cosine[:, -1].mean(1))),
        {"times": d.times.tolist(), "share flipped": share.tolist(), "cosine": cosine.mean(2).tolist()},
        {},
        {},
        (DATA, RATES),
        {"ReLU": "hard"},
        float32({"times": d.times, "share": share, "cosine": cosine.mean(2), "norm": growth.mean(2)}),
        figures=[
            Panel(
                "lines",
                "Gates that differ from the start",
                [Series("share")],
                "times",
                _TIME,
                "share of gates",
                "log",
                marks=[(0.05, "roughly constant"), (0.5, "unrelated")],
            ),
            Panel(
                "lines",
                "Direction of the weights",
                [Series("cosine")],
                "times",
                _TIME,
                "cos(w(t), w(0)), mean of units",
                "log",
                marks=[(0.9, "keeps its direction")],
            ),
            Panel("lines", "Size of the weights", [Series("norm")], "times", _TIME, "‖w(t)‖, mean of units", "log"),
        ],
    )


# --- where a unit localises ------------------------------------------------------------------------------------

_PREDICTED = Claim(
    "where a unit localises can be told from its initial weights",
    threshold=0.2,
    comparison=">=",
    null=0.0,
    null_text="predictions shuffled over units; 95 % of shuffles of 50 units lie below 0.17",
    paper="'Predicting Loca(liza)tion' (2.2), empty in the note",
    unit="mean cos of the angle between predicted and final peak",
)

_SHAPE = Claim(
    "the shape of a unit's field can be told from its initial weights",
    threshold=0.7,
    comparison=">=",
    null=0.3,
    null_text="about what the initial weights themselves give",
    paper="section 2.2, empty in the note",
    unit="cos between Σ₁w(0) and the final field, both turned to their peaks, mean of units",
)


@experiment(
    "loc.location",
    title="Where a unit localises",
    what="peak and shape of Σ₁w(0), the first pull on a unit, against those of its final field",
    claims=[_PREDICTED, _SHAPE],
    minutes=(0.5, 1),
    flops=lambda size: 6.0 * 40 * size["units"] * size["steps"] * size["batch"] * size["seeds"],
)
def location(run: Run) -> Artifact:
    """Section 2.2. For nearly Gaussian inputs ⟨g y x⟩ ∝ Σ₁w: the first pull smooths the initial weights."""
    from pathlens import theory
    from pathlens.data import NLGP
    from pathlens.papers.localisation_runs import GAIN, LONG_FIRST, OneLayer, fields
    from pathlens.training import Keep, train

    size = run.sizes_of("loc.location")
    units, sampler = size["units"], NLGP(40, LONG_FIRST, GAIN)

    def compute() -> Any:
        return train(
            OneLayer(units=units),
            sampler,
            epochs=size["steps"],
            batch_size=size["batch"],
            optimizer="sgd",
            lr=0.15 * units,
            seeds=run.seeds,
            keep=Keep([0, size["steps"]], evaluate="running"),
            device=run.device,
            progress=functools.partial(run.progress, f"ReLU, {units} units"),
        )

    runs = run.once(("location", units, size["steps"], size["batch"]), compute)
    start, end = fields(runs, 0), fields(runs, size["steps"])
    pull = start @ sampler.covariance(1).numpy()
    predicted, final = pull.argmax(2).astype(float), end.argmax(2).astype(float)
    centres = theory.centre_of_mass(np.maximum(pull, 0)), theory.centre_of_mass(end)
    score = [theory.circular_correlation(a, b, 40) for a, b in zip(predicted, final)]
    rng = np.random.default_rng(0)
    shuffled = [
        [theory.circular_correlation(rng.permutation(a), b, 40) for _ in range(200)] for a, b in zip(predicted, final)
    ]
    shape = _cosine(_at_peak(pull), _at_peak(end)).mean(1)
    unsmoothed = _cosine(_at_peak(start), _at_peak(end)).mean(1)
    metrics = {
        "score": score,
        "shape": shape.tolist(),
        "shape, initial weights": unsmoothed.tolist(),
        "by centres of mass": [theory.circular_correlation(a, b, 40) for a, b in zip(*centres)],
        "shuffled, 95 % of draws below": np.quantile(shuffled, 0.95, axis=1).tolist(),
        "units": units,
        "arc90 at the end": theory.arc90(end).mean(1).tolist(),
    }
    return Artifact(
        "loc.location",
        "Where a unit localises",
        PAPER,
        run.scale,
        config(run, "loc.location"),
        run.seeds,
        (_PREDICTED.measure(score), _SHAPE.measure(shape)),
        metrics,
        {},
        {},
        (DATA, RATES),
        {"ReLU": "hard"},
        float32(
            {
                "predicted": predicted,
                "final": final,
                "shuffled": shuffled,
                "score": score,
                "shape": shape,
                "unsmoothed": unsmoothed,
            }
        ),
        figures=[
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


def _at_peak(w: np.ndarray) -> np.ndarray:
    """Fields (seeds, units, d) turned around the ring so that each has its peak at position 0."""
    turn = (np.arange(w.shape[2]) + w.argmax(2)[..., None]) % w.shape[2]
    return np.take_along_axis(w, turn, axis=2)


# --- one basis for all times? ----------------------------------------------------------------------------------

_ONE_BASIS = Claim(
    "the Fourier basis nearly diagonalises Σ^xx(p_i, p_i; t) at all times",
    threshold=0.05,
    comparison="<=",
    null=0.975,
    null_text="a random basis, 1 − 1/d",
    paper="'a single basis to diagonalize them across time … DFT?' (5)",
    unit="largest share of energy off the diagonal over time, mean over units",
)
_CROSS = Claim(
    "the Fourier basis nearly diagonalises Σ^xx(p_i, p_j; t), i ≠ j, at all times",
    threshold=0.05,
    comparison="<=",
    null=0.975,
    null_text="a random basis, 1 − 1/d",
    paper="section 5",
    unit="largest share of energy off the diagonal over time, mean over pairs",
)


@experiment(
    "loc.dft",
    title="One basis for all times?",
    what="energy of Σ^xx(p_i, p_j; t) off the diagonal in the Fourier basis, while a ReLU network learns",
    claims=[_ONE_BASIS, _CROSS],
    minutes=(0.5, 1.5),
    flops=_descent_operations,
)
def dft(run: Run) -> Artifact:
    """Section 5: gates that depend on x break the translation invariance that made Σ^xx circulant."""
    d = _descent(run)
    x, bits = d.data.x.numpy(), d.gates
    inputs = x.shape[1]
    waves = np.fft.fft(np.eye(inputs), norm="ortho")
    seeds, marks, _, K = bits.shape
    same, cross = np.empty((seeds, marks)), np.empty((seeds, marks))
    for s in range(seeds):
        for m in range(marks):
            share = np.empty((K, K))
            for i in range(K):
                for j in range(i, K):
                    both = x[bits[s, m, :, i] & bits[s, m, :, j]]
                    energy = _energy(waves, both)
                    total = energy.sum()
                    share[i, j] = 1 - np.trace(energy) / total if total > 0 else np.nan
            same[s, m] = np.nanmean(np.diag(share))
            cross[s, m] = np.nanmean(share[np.triu_indices(K, 1)])
        run.progress("Fourier basis", s + 1, seeds)
    ungated = _energy(waves, x)
    plain = float(1 - np.trace(ungated) / ungated.sum())
    seen = [x, x[bits[0, 0, :, 0]], x[bits[0, -1, :, 0]]]
    moments = np.stack([np.sqrt(_energy(waves, rows)) / len(rows) for rows in seen])
    metrics = {
        "times": d.times.tolist(),
        "no gates, same sample": plain,
        "own gate": same.tolist(),
        "two gates": cross.tolist(),
    }
    return Artifact(
        "loc.dft",
        "One basis for all times?",
        PAPER,
        run.scale,
        config(run, "loc.dft"),
        run.seeds,
        (_ONE_BASIS.measure(same.max(1)), _CROSS.measure(cross.max(1))),
        metrics,
        {},
        {},
        (DATA, RATES),
        {"ReLU": "hard"},
        float32({"times": d.times, "same": same, "cross": cross, "moments": moments}),
        figures=[
            Panel(
                "lines",
                "Energy off the diagonal, Fourier basis",
                [Series("same", "one gate"), Series("cross", "two gates")],
                "times",
                _TIME,
                "share of energy, mean of units",
                "log",
                "log",
                marks=[(plain, "no gates"), (0.975, "random basis")],
            ),
            Panel(
                "matrices",
                "|Σ^xx| in the Fourier basis, one unit",
                [
                    Series("moments[0]", "no gates"),
                    Series("moments[1]", "its gate at the start"),
                    Series("moments[2]", "its gate at the end"),
                ],
                x_label="frequency",
                y_label="frequency",
                y_scale="log",
            ),
        ],
    )


def _energy(waves: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """|entries|² of Σ x xᵀ over rows, in the Fourier basis."""
    return np.abs(waves.conj() @ (rows.T @ rows) @ waves.T) ** 2
