"""Section 2: how far a GDLN, whose gates stay fixed, explains a ReLU network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.descent import SHARED, descend_relu
from pathlens.papers.localisation.settings import (
    CONFIG,
    DATA,
    EQUATIONS,
    INPUTS,
    LONG_FIRST,
    NOISE,
    RATES,
    UNITS,
    cosine,
    over_time,
    relative_distance,
)
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.theory import Gates

_FOLLOWS = Claim(
    "the weights of the GDLN stay near those of the ReLU network",
    at_most=0.2,
    null=1.0,
    null_text="unrelated weights",
    paper="section 2: 'how well a gated deep linear network (GDLN) could do'",
    unit="relative distance at the end",
)
_AS_LOCAL = Claim(
    "the GDLN localises like the ReLU network",
    at_least=0.8,
    null=0.47,
    null_text="noise against ReLU at gain 3",
    paper="section 2",
    unit="× (inverse participation ratio, GDLN / ReLU)",
)
_AS_GOOD = Claim(
    "the GDLN learns as well as the ReLU network",
    at_most=1.1,
    null=2.0,
    null_text="twice the loss, about that of a constant",
    paper="section 2",
    unit="× (loss on held-out rows at the end, GDLN / ReLU)",
)
NAMES = ("ReLU", "gates at the start", "gates of the end", "bumps chosen upfront")


def _bump_gates() -> Gates:
    """Half-spaces whose normals are bumps of width ξ₁, evenly spaced on the ring: known before any training."""
    from pathlens import theory
    from pathlens.data import ring_covariance

    places = np.linspace(0, INPUTS, UNITS, endpoint=False).astype(int)
    return theory.half_spaces(ring_covariance(INPUTS, LONG_FIRST[0]).numpy()[places])


def _loss(w: np.ndarray, gates: Gates, x: np.ndarray, y: np.ndarray) -> float:
    return float(0.5 * np.mean(((gates(x) * (x @ w.T)).mean(1) - y) ** 2))


@experiment(
    "loc.gdln",
    title="How far a GDLN explains a ReLU network",
    what="GDLN with gates of the start, of the end, and chosen upfront, against one ReLU run, step by step",
    claims=[_FOLLOWS, _AS_LOCAL, _AS_GOOD],
    deviations=[DATA, RATES, EQUATIONS],
    minutes=(1, 1.5),
    **SHARED,
)
def gdln(run: Run) -> Artifact:
    """The same descent with fixed gates, by the exact iterates of gradient descent."""
    from pathlens import theory

    d = descend_relu(run)
    relu = d.weights
    found = {name: np.empty_like(relu) for name in NAMES}
    losses = {name: np.empty(relu.shape[:2]) for name in NAMES}
    for s, own in enumerate(relu):
        gatings = (theory.half_spaces(own[0]), theory.half_spaces(own[-1]), _bump_gates())
        found["ReLU"][s] = own
        losses["ReLU"][s] = [_loss(w, theory.half_spaces(w), d.x_test, d.y_test) for w in own]
        for name, gates in zip(NAMES[1:], gatings):
            net = theory.GDLN.from_data(gates, (d.x, d.y), w0=own[0], allow_dead=True)
            found[name][s] = [net.iterate(k, d.step) for k in d.marks]
            losses[name][s] = [_loss(w, gates, d.x_test, d.y_test) for w in found[name][s]]
        run.progress("closed forms", s + 1, len(relu))
    arrays: dict[str, Any] = {"times": d.times}
    metrics: dict[str, Any] = {"times": d.times.tolist()}
    claims = []
    for i, (name, w) in enumerate(found.items()):
        arrays |= {
            f"loss_{i}": losses[name],
            f"ipr_{i}": theory.ipr(w).mean(2),
            f"arc90_{i}": theory.arc90(w).mean(2),
            f"alternation_{i}": theory.sign_alternation(w).mean(2),
            f"centre_{i}": theory.centre_of_mass(w),
            f"norm_{i}": np.linalg.norm(w, axis=3),
            f"cosine_{i}": cosine(w, w[:, :1]),
            f"distance_{i}": relative_distance(w, relu),
            f"fields_{i}": w[0, -1],
        }
        last = {k: arrays[f"{k}_{i}"][:, -1] for k in ("loss", "ipr", "arc90", "alternation", "distance")}
        metrics[name] = {k: np.median(values).item() for k, values in last.items()}
        if name != "ReLU":
            claims += [
                _FOLLOWS.measure(last["distance"], row=name),
                _AS_LOCAL.measure(last["ipr"] / arrays["ipr_0"][:, -1], row=name),
                _AS_GOOD.measure(last["loss"] / arrays["loss_0"][:, -1], row=name),
            ]
    return run.artifact(
        claims=claims,
        metrics=metrics,
        gates={"ReLU and GDLN": "hard"},
        arrays=float32(arrays),
        config=CONFIG,
        panels=_panels(),
    )


def _panels() -> list[Panel]:
    def series(stem: str) -> list[Series]:
        return [Series(f"{stem}_{i}", name) for i, name in enumerate(NAMES)]

    return [
        over_time("Loss on held-out rows", series("loss"), "½⟨(y − ŷ)²⟩", y_scale="log"),
        over_time(
            "Distance from the ReLU network",
            series("distance")[1:],
            "‖w − w_ReLU‖ / ‖w_ReLU‖",
            marks=[(1.0, "as far as zero")],
        ),
        over_time("How local the fields are", series("ipr"), "inverse participation ratio", marks=[(NOISE, "noise")]),
        Panel(
            "fields",
            "Four units at the end",
            series("fields"),
            x_label="position on the ring",
            y_label="unit",
            note="All start from the same weights.",
        ),
    ]
