"""What the localisation experiments share: the network of eq. 1, the settings of each run, and the trained networks.

Claims and artifacts live in localisation. May import everything but report and the command line; loads torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.data import NLGP, DataSet, SinglePulse, nlgp
from pathlens.errors import UnknownNameError
from pathlens.papers.experiment import Run
from pathlens.training import Keep, Runs, train

INPUTS, UNITS, GAIN = 40, 10, 3.0
LONG_FIRST, SHORT_FIRST = (3.0, 1.0), (1.0, 3.0)


class Erf(nn.Module):
    """erf(h/√2)."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.erf(h / math.sqrt(2))


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "erf": Erf}


class OneLayer(nn.Module):
    """ŷ = W₂ σ(W₁x + b₁) + b₂ (eq. 1); W₂ is the mean over units unless it is trained.

    Weights start as N(0, 2/(d + K)), as in the public code; biases start at zero.
    """

    def __init__(self, activation: str = "relu", units: int = UNITS, bias: bool = False, trained: bool = False) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise UnknownNameError(f"Unknown activation {activation!r}. Known: {', '.join(_ACTIVATIONS)}.")
        self.hidden = nn.Linear(INPUTS, units, bias=bias)
        self.activation = _ACTIVATIONS[activation]()
        self.readout = nn.Linear(units, 1, bias=bias) if trained else None
        self.deviation = math.sqrt(2 / (INPUTS + units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first layer; a trained second layer draws itself."""
        nn.init.normal_(self.hidden.weight, std=self.deviation)
        if self.hidden.bias is not None:
            nn.init.zeros_(self.hidden.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.hidden(x))
        return h.mean(1, keepdim=True) if self.readout is None else self.readout(h)


def logistic(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of one output as a logit; targets 0 and 1."""
    return F.binary_cross_entropy_with_logits(output, target)


@dataclass(frozen=True)
class Setting:
    """One row of loc.activations."""

    activation: str
    data: NLGP | SinglePulse
    rate: float
    units: int = UNITS
    bias: bool = False
    trained: bool = False
    cross_entropy: bool = False

    @property
    def centre(self) -> str | None:
        """Single pulses leave a peak on an offset."""
        return "median" if isinstance(self.data, SinglePulse) else None


def _nlgp(xi: tuple[float, float], gain: float = GAIN, labels: Any = "01") -> NLGP:
    return NLGP(INPUTS, xi, gain, labels=labels)


def _pulse(support: tuple[float, float], labels: Any = "01") -> SinglePulse:
    return SinglePulse(INPUTS, support=support, labels=labels)


# rates are those of plain gradient descent on (ŷ − y)²; ± labels where the activation is odd
SETTINGS: dict[str, Setting] = {
    "ReLU, ξ₁ > ξ₂": Setting("relu", _nlgp(LONG_FIRST), 1.5),
    "ReLU, ξ₁ < ξ₂": Setting("relu", _nlgp(SHORT_FIRST), 1.5),
    "ReLU, ξ₁ > ξ₂, gain 0.01": Setting("relu", _nlgp(LONG_FIRST, 0.01), 1.5),
    "ReLU, ξ₁ > ξ₂, gain 100": Setting("relu", _nlgp(LONG_FIRST, 100.0), 1.5),
    "ReLU, second layer trained": Setting("relu", _nlgp(LONG_FIRST), 0.1, trained=True),
    "ReLU, cross-entropy": Setting("relu", _nlgp(LONG_FIRST), 0.2, bias=True, trained=True, cross_entropy=True),
    "sigmoid, ξ₁ > ξ₂": Setting("sigmoid", _nlgp(LONG_FIRST), 100.0, bias=True),
    "sigmoid, ξ₁ < ξ₂": Setting("sigmoid", _nlgp(SHORT_FIRST), 100.0, bias=True),
    "sigmoid, no bias": Setting("sigmoid", _nlgp(LONG_FIRST), 100.0),
    "erf, ξ₁ > ξ₂": Setting("erf", _nlgp(LONG_FIRST, labels="pm1"), 10.0, bias=True),
    "erf, ξ₁ < ξ₂": Setting("erf", _nlgp(SHORT_FIRST, labels="pm1"), 10.0, bias=True),
    "erf, no bias": Setting("erf", _nlgp(LONG_FIRST, labels="pm1"), 10.0),
    "ReLU, single pulse ±1": Setting("relu", _pulse((-1.0, 1.0)), 0.4),
    "ReLU, single pulse 0/1": Setting("relu", _pulse((0.0, 1.0)), 0.5),
    "erf, single pulse ±1": Setting("erf", _pulse((-1.0, 1.0), "pm1"), 1.5, units=40, bias=True),
}


def moments(steps: int) -> list[int]:
    """Steps at which receptive fields are looked at: the start, a twentieth, a fifth, and the end."""
    return [0, max(steps // 20, 1), max(steps // 5, 2), steps]


def train_setting(run: Run, name: str, steps: int, batch: int) -> Runs:
    """All seeds of one row at once, on fresh batches; what is kept: :func:`moments`."""

    def compute() -> Any:
        s = SETTINGS[name]
        net = OneLayer(s.activation, s.units, s.bias, s.trained)
        return train(
            net,
            s.data,
            epochs=steps,
            batch_size=batch,
            optimizer="sgd",
            lr=s.rate,
            seeds=run.seeds,
            loss=logistic if s.cross_entropy else "mse",
            keep=Keep(moments(steps), evaluate="running"),
            device=run.device,
            progress=functools.partial(run.progress, name),
        )

    return run.once(("setting", name, steps, batch), compute)


def fields(runs: Runs, epoch: int) -> np.ndarray:
    """First-layer weights of every seed at a kept epoch, (seeds, K, d), float64."""
    kept = [t.at_epoch(epoch).snapshot for t in runs]
    return np.stack([s.state["hidden.weight"].double().numpy() for s in kept if s is not None])


# --- full-batch descent on a fixed sample ----------------------------------------------------------------------


@dataclass
class Descent:
    """ReLU networks under full-batch gradient descent on one sample: what a GDLN can be compared with step by step."""

    data: DataSet
    runs: Runs
    step: float
    marks: tuple[int, ...]

    @property
    def weights(self) -> np.ndarray:
        """(seeds, marks, K, d)."""
        return np.stack([fields(self.runs, k) for k in self.marks], axis=1)

    @property
    def gates(self) -> np.ndarray:
        """(seeds, marks, n, K) bits, recomputed from the weights in float64."""
        return np.einsum("nd,smkd->smnk", self.data.x.double().numpy(), self.weights) > 0

    @property
    def times(self) -> np.ndarray:
        """Time of the flow at the marks: steps times their length, for the loss ½⟨(y − ŷ)²⟩."""
        return np.array(self.marks) * self.step


def descend(run: Run, rows: int, steps: int) -> Descent:
    """One descent shared by several experiments; float64, so that it can be held against closed forms."""

    def compute() -> Descent:
        data = nlgp(rows, INPUTS, LONG_FIRST, GAIN, n_test=rows, seed=1, dtype=torch.float64)
        marks = tuple(sorted({0, *np.unique(np.geomspace(1, steps, 12).round().astype(int)).tolist()}))
        step = 0.3 * UNITS  # 0.15·K on (ŷ − y)², as in the public code
        runs: Any = train(
            OneLayer().double(),
            data,
            epochs=steps,
            batch_size=None,
            optimizer="sgd",
            lr=step,
            loss="half_mse",
            seeds=run.seeds,
            keep=Keep(marks, evaluate="running"),
            device=run.device,
            progress=functools.partial(run.progress, "ReLU descent"),
        )
        return Descent(data, runs, step, marks)

    return run.once(("descent", rows, steps), compute)
