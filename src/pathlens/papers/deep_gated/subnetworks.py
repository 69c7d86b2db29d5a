"""Section 3.1: active and sensitive gates of soft-GaLU while it trains."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.binary_mnist import BETA, EPSILON
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

TAUS = (0.6, 0.8, 1.0)
THRESHOLD = Deviation(
    paper="active and sensitive gates are disjoint for τ_S > dχ_ε/dv at χ_ε⁻¹(τ_A), for any τ_A in (0, 1 + ε)",
    ours="τ_S = β·|dχ_ε/dv|·max|∂q/∂θ|, and τ_A ≥ (1 + ε)/2",
    why="∂G/∂θ has the factors β and ∂q/∂θ, and below (1 + ε)/2 an active gate can be steeper than at the threshold",
)
DATA = Deviation(
    paper="binary MNIST (4 against 7); section 3.1 itself shows no numbers",
    authors_code="not public",
    ours="soft-GaLU of Experiment 3 (β = 4, ε = .1); quick: digits of scikit-learn, narrower",
    why="always available, and seconds in place of minutes",
)
_DISJOINT = Claim(
    "no gate is active and sensitive at once, with the corrected threshold",
    at_most=0,
    null=1,
    null_text="some gate is both",
    paper="section 3.1",
    unit="gates, over all epochs, inputs and τ_A",
)
_PRINTED = Claim(
    "with the printed threshold some gates are both",
    above=0.01,
    null=0.0,
    null_text="the printed threshold suffices",
    paper="'∅ for all τ_S > dχ/dv'",
    unit="share of active gates",
)
_FLOOR = Claim(
    "on every sensitive path the sensitive gate's term of equation 6 exceeds τ_S τ_A^(d−2)",
    at_least=1.0,
    null=0.5,
    null_text="other gates pull it below",
    paper="section 3.1",
    unit="× (weakest term / τ_S τ_A^(d−2))",
)


def _load_data(run: Run) -> Any:
    """4 against 7 with targets ±1: MNIST at paper scale, scikit-learn's digits otherwise."""
    import torch

    from pathlens.data import DataSet, binary_mnist, digits

    if run.scale == "paper":
        return binary_mnist(flatten=True)
    full = digits(flatten=True)
    keep = (full.y == 4) | (full.y == 7)
    targets = torch.where(full.y[keep] == 7, 1.0, -1.0)[:, None]
    return DataSet(full.x[keep], targets, name="digits, 4 against 7")


def weakest_term(slopes: Any, active: float, sensitive: float) -> float:
    """Smallest (slope of the sensitive gate)·∏(other gates) over all sensitive paths of all inputs; ∞ if none."""
    layers = range(len(slopes.gates))
    # the smallest active gate and the smallest sensitive slope of each layer
    gates = [np.where(g > active, g, np.inf).min(1) for g in slopes.gates]
    steep = [np.where(s > sensitive, s, np.inf).min(1) for s in slopes.slopes]
    return float(np.min([steep[k] * np.prod([gates[j] for j in layers if j != k], axis=0) for k in layers]))


def _measure(slopes: Any, tau: float) -> dict[str, float]:
    """Gates and paths per input at one threshold of activity."""
    from pathlens.theory.deep_gated import printed_threshold, subnetworks

    found = subnetworks(slopes, active=tau)
    printed = subnetworks(slopes, active=tau, sensitive=printed_threshold(tau, epsilon=EPSILON))
    return {
        "active_gates": found.active_gates.sum(1).mean(),
        "sensitive_gates": found.sensitive_gates.sum(1).mean(),
        "printed_both": printed.both.sum() / max(printed.active_gates.sum(), 1),
        "active_paths": found.active_paths.mean(),
        "sensitive_paths": found.sensitive_paths.mean(),
        "both": found.both.sum(),
        "floor": weakest_term(slopes, tau, found.sensitive) / found.floor,
    }


@experiment(
    "dgn.subnetworks",
    title="Active and sensitive gates while training",
    what="soft-GaLU on 4 against 7: sizes of the active and the sensitive sub-networks over training",
    claims=[_DISJOINT, _PRINTED, _FLOOR],
    deviations=[THRESHOLD, DATA],
    sizes={
        "data": ("digits, 4 against 7", "MNIST, 4 against 7"),
        "width": (32, 100),
        "hidden_layers": 5,
        "epochs": (60, 100),
        "lr": (1e-3, 1e-4),
        "watched": (40, 200),
    },
    data=("mnist",),
    minutes=(0.6, 20),
    # 12,107 images of a 4 or a 7; gates and values are a network each
    flops=lambda size: (
        12.0
        * (784 * size["width"] + (size["hidden_layers"] - 1) * size["width"] ** 2)
        * 12_107
        * size["epochs"]
        * size["seeds"]
    ),
)
def subnetworks(run: Run) -> Artifact:
    """Measured on the network of Experiment 3."""
    from pathlens import models
    from pathlens.recording import rebuild
    from pathlens.theory import deep_gated
    from pathlens.training import train

    size = run.sizes
    data = _load_data(run)
    hidden = (size["width"],) * size["hidden_layers"]
    epochs = sorted({0, 1, 3, 10, 30, size["epochs"]} & set(range(size["epochs"] + 1)))
    runs: Any = train(
        models.soft_galu(data.d, hidden, beta=BETA, epsilon=EPSILON, init="preserve", gate_activation="soft"),
        data,
        epochs=size["epochs"],
        optimizer="rmsprop",
        lr=size["lr"],
        seeds=run.seeds,
        keep=epochs,
        device=run.device,
        progress=partial(run.progress, "soft-GaLU"),
    )
    measured = []  # by seed, epoch and τ_A
    for i, trajectory in enumerate(runs):
        for epoch in epochs:
            net: Any = rebuild(trajectory.at_epoch(epoch).snapshot, like=runs.networks[i]).cpu()
            slopes = deep_gated.gate_slopes(net, data.x[: size["watched"]])
            measured += [_measure(slopes, tau) for tau in TAUS]
        run.progress("gate slopes", i + 1, len(run.seeds))
    shape = (len(run.seeds), len(epochs), len(TAUS))
    arrays = {name: np.reshape([one[name] for one in measured], shape) for name in measured[0]}
    both, floor = arrays.pop("both"), arrays.pop("floor").min((1, 2))
    share = arrays["printed_both"].max((1, 2))
    return run.artifact(
        claims=[
            _DISJOINT.measure(both.sum((1, 2))),
            _PRINTED.measure(share),
            _FLOOR.measure([value if math.isfinite(value) else None for value in floor]),
        ],
        metrics={
            "τ_A": list(TAUS),
            "gates in all": sum(hidden),
            "loss": runs.history()[:, -1].tolist(),
            "share both with the printed threshold": share.tolist(),
        },
        gates={"soft-GaLU": f"soft β={BETA:g}, ε={EPSILON:g}"},
        arrays=float32({"epochs": epochs, "taus": TAUS, **arrays}),
        panels=[
            _panel("active_gates", "Active gates", "gates per input"),
            _panel("sensitive_gates", "Sensitive gates", "gates per input"),
            _panel("active_paths", "Active paths", "paths per input", y_scale="log"),
            _panel("printed_both", "Active and sensitive, printed threshold", "share of active gates"),
        ],
    )


def _panel(array: str, title: str, y_label: str, y_scale: str = "linear") -> Panel:
    series = [Series(f"{array}[:, :, {k}]", f"τ_A = {tau:g}") for k, tau in enumerate(TAUS)]
    return Panel("lines", title, series, "epochs", "epoch", y_label, "log", y_scale, ordered=True)
