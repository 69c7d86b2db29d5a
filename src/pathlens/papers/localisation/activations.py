"""Section 1: receptive fields of one-layer networks at the end of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.settings import (
    CONFIG,
    DATA,
    GAIN,
    INPUTS,
    LONG_FIRST,
    NOISE,
    RATES,
    SHORT_FIRST,
    UNITS,
    rows,
)
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import NLGP, SinglePulse
    from pathlens.training import Runs

_BUMPS = Claim(
    "ReLU units become bumps where ξ₁ > ξ₂: neighbouring weights have one sign",
    at_most=0.1,
    null=0.5,
    null_text="noise",
    paper="'we get localization if ξ₁ > ξ₂'",
    unit="share of neighbour products that is negative",
)
_OSCILLATE = Claim(
    "ReLU units oscillate where ξ₁ < ξ₂: neighbouring weights have opposite signs",
    at_least=0.8,
    null=0.5,
    null_text="noise",
    paper="'short-range oscillations otherwise'",
    unit="share of neighbour products that is negative",
)
_LOCALISED = Claim(
    "receptive fields localise",
    at_least=1.5 * NOISE,
    null=NOISE,
    null_text="Gaussian noise",
    paper="section 1",
    unit="inverse participation ratio, mean over units",
)
_DIFFUSE = Claim(
    "ReLU fields do not localise at low gain",
    at_most=0.09,
    null=0.15,
    null_text="as at gain 3",
    paper="'a gain parameter that controls the degree of localization'",
    unit="inverse participation ratio",
)
_NEEDS_BIAS = Claim(
    "without biases, sigmoid and erf networks do not learn",
    at_least=0.95,
    null=0.75,
    null_text="as with biases",
    paper="'one can further remove the bias terms (though not for sigmoid)'",
    unit="× (loss at the end / loss of the best constant)",
)
SUPPORT = Deviation(
    paper="single pulses live on {0, 1}",
    authors_code="an affine map to ±1, and x → 1 − x with probability ½",
    ours="both supports, flips on, lengths 11 and 3 of 40; the median is subtracted before measuring",
    why="fields of single pulses sit on an offset",
)


@dataclass(frozen=True)
class Setting:
    """One network on one kind of data: a row of the table.

    Attributes
    ----------
    rate : float
        Of plain gradient descent on (ŷ − y)².
    pulse : (float, float), optional
        Values of a single pulse off and on; without it the data are NLGP of lengths xi and the given gain.
    trained : bool
        Whether the second layer is trained.
    localises : bool
        Whether the receptive fields are expected to localise.
    """

    activation: str
    rate: float
    xi: tuple[float, float] = LONG_FIRST
    gain: float = GAIN
    pulse: tuple[float, float] | None = None
    units: int = UNITS
    bias: bool = False
    trained: bool = False
    cross_entropy: bool = False
    localises: bool = True

    @property
    def data(self) -> NLGP | SinglePulse:
        """Sampler of the training batches."""
        from pathlens.data import NLGP, SinglePulse

        labels: Any = "pm1" if self.activation == "erf" else "01"  # ± labels for an odd activation
        if self.pulse is None:
            return NLGP(INPUTS, self.xi, self.gain, labels=labels)
        return SinglePulse(INPUTS, support=self.pulse, labels=labels)


SETTINGS = {
    "ReLU, ξ₁ > ξ₂": Setting("relu", 1.5),
    "ReLU, ξ₁ < ξ₂": Setting("relu", 1.5, SHORT_FIRST, localises=False),
    "ReLU, ξ₁ > ξ₂, gain 0.01": Setting("relu", 1.5, gain=0.01, localises=False),
    "ReLU, ξ₁ > ξ₂, gain 100": Setting("relu", 1.5, gain=100.0),
    "ReLU, second layer trained": Setting("relu", 0.1, trained=True),
    "ReLU, cross-entropy": Setting("relu", 0.2, bias=True, trained=True, cross_entropy=True),
    "sigmoid, ξ₁ > ξ₂": Setting("sigmoid", 100.0, bias=True),
    "sigmoid, ξ₁ < ξ₂": Setting("sigmoid", 100.0, SHORT_FIRST, bias=True),
    "sigmoid, no bias": Setting("sigmoid", 100.0, localises=False),
    "erf, ξ₁ > ξ₂": Setting("erf", 10.0, bias=True),
    "erf, ξ₁ < ξ₂": Setting("erf", 10.0, SHORT_FIRST, bias=True),
    "erf, no bias": Setting("erf", 10.0, localises=False),
    "ReLU, single pulse ±1": Setting("relu", 0.4, pulse=(-1.0, 1.0)),
    "ReLU, single pulse 0/1": Setting("relu", 0.5, pulse=(0.0, 1.0)),
    "erf, single pulse ±1": Setting("erf", 1.5, pulse=(-1.0, 1.0), units=40, bias=True),
}


def kept_steps(steps: int) -> list[int]:
    """Steps at which receptive fields are kept: the start, a twentieth, a fifth, and the end."""
    return [0, max(steps // 20, 1), max(steps // 5, 2), steps]


def train_setting(run: Run, name: str, steps: int, batch: int) -> Runs:
    """All seeds of one setting, on fresh batches."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    from pathlens.papers.localisation._networks import OneLayer, train_networks

    s = SETTINGS[name]
    return train_networks(
        run,
        OneLayer(s.activation, s.units, s.bias, s.trained),
        s.data,
        name,
        steps=steps,
        batch_size=batch,
        lr=s.rate,
        keep=kept_steps(steps),
        loss=binary_cross_entropy_with_logits if s.cross_entropy else "mse",
    )


@experiment(
    "loc.activations",
    title="When receptive fields localise",
    what="eq. 1 with ReLU, sigmoid, erf; with and without biases and a trained second layer; NLGP and single pulse",
    claims=[_BUMPS, _OSCILLATE, _LOCALISED, _DIFFUSE, _NEEDS_BIAS],
    deviations=[DATA, RATES, SUPPORT],
    sizes={"steps": (800, 5000), "batch": (500, 1000)},
    minutes=(1.5, 25),
    flops=lambda size: len(SETTINGS) * 6.0 * INPUTS * UNITS * size["steps"] * size["batch"] * size["seeds"],
)
def activations(run: Run) -> Artifact:
    """Localisation of the trained networks of every setting."""
    from pathlens import theory
    from pathlens.papers.localisation._networks import fields

    steps, batch = run.sizes["steps"], run.sizes["batch"]
    measures: dict[str, dict[str, list[float]]] = {}
    arrays: dict[str, Any] = {}
    for i, (name, setting) in enumerate(SETTINGS.items()):
        runs = train_setting(run, name, steps, batch)
        w, start = fields(runs, steps), fields(runs, 0)
        arrays[f"fields_{i}"] = np.stack([fields(runs, k)[0] for k in kept_steps(steps)])  # (times, K, d)
        centre = None if setting.pulse is None else "median"  # single pulses leave a peak on an offset
        measures[name] = {
            "ipr": theory.ipr(w, centre=centre).mean(1).tolist(),
            "ipr at first": theory.ipr(start, centre=centre).mean(1).tolist(),
            "arc90": theory.arc90(w, centre=centre).mean(1).tolist(),
            "sign alternation": theory.sign_alternation(w, centre=centre).mean(1).tolist(),
            "kurtosis": theory.kurtosis(w).mean(1).tolist(),
            "loss": runs.history()[:, -50:].mean(1).tolist(),
        }
    for key, stem in (("ipr", "ipr"), ("sign alternation", "alternation")):
        arrays[stem] = [measures[name][key] for name in SETTINGS]
    claims = [
        _BUMPS.measure(measures["ReLU, ξ₁ > ξ₂"]["sign alternation"]),
        _OSCILLATE.measure(measures["ReLU, ξ₁ < ξ₂"]["sign alternation"]),
        _DIFFUSE.measure(measures["ReLU, ξ₁ > ξ₂, gain 0.01"]["ipr"]),
        *(_LOCALISED.measure(measures[name]["ipr"], row=name) for name, s in SETTINGS.items() if s.localises),
        # the best constant has loss ¼ for labels 0 and 1, and 1 for ±1
        _NEEDS_BIAS.measure([v / 0.25 for v in measures["sigmoid, no bias"]["loss"]], row="sigmoid, no bias"),
        _NEEDS_BIAS.measure(measures["erf, no bias"]["loss"], row="erf, no bias"),
    ]
    return run.artifact(
        claims=claims,
        metrics={"settings": list(SETTINGS), **measures},
        gates={"ReLU": "hard"},
        arrays=float32(arrays),
        config=CONFIG,
        panels=_panels(kept_steps(steps)),
    )


def _panels(steps: list[int]) -> list[Panel]:
    names = list(SETTINGS)

    def over_training(name: str, note: str) -> Panel:
        i = names.index(name)
        return Panel(
            "fields",
            f"{name}: weights of four units",
            [Series(f"fields_{i}[{t}]", "start" if k == 0 else f"step {k}") for t, k in enumerate(steps)],
            x_label="position on the ring",
            y_label="unit",
            note=note,
        )

    return [
        over_training("ReLU, ξ₁ > ξ₂", "Over training each unit becomes one bump."),
        over_training("ReLU, ξ₁ < ξ₂", "The same network on swapped labels: neighbouring weights alternate in sign."),
        Panel(
            "strips",
            "How local the fields are",
            rows("ipr", names),
            x_label="inverse participation ratio at the end",
            marks=[(NOISE, "noise")],
            note="One coordinate alone would give 1, a constant field 1/40.",
        ),
        Panel(
            "strips",
            "How often neighbouring weights differ in sign",
            rows("alternation", names),
            x_label="share of neighbours",
            marks=[(0.5, "noise")],
            note="Bumps lie on the left, oscillations on the right.",
        ),
    ]
