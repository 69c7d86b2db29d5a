"""Made-up artifacts in the shape of real ones: test data for the page, not results of any training."""

from __future__ import annotations

import numpy as np
import pytest

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.half_space.fig2 import fig2_panels
from pathlens.papers.half_space.fig3 import fig3_panels
from pathlens.papers.half_space.fig5 import fig5_panels
from pathlens.papers.half_space.fig6 import fig6_panels

MODELS = ("relu", "dlgn_pwc", "frozen")
DURATIONS = {"relu": 300, "dlgn_pwc": 300, "frozen": 2000}
LEDGER = (
    Deviation(
        "the target is drawn, its formula is not given",
        "not public",
        "sin θ on the top half, sin 12θ below",
        "fits the initial loss .5 and the plateau at .25",
    ),
    Deviation("gates are hard", "soft gates σ(4η), also at test", "soft gates σ(4η)", "hard gates have no gradient"),
)
COMMON = {
    "paper": "half-space",
    "scale": "quick",
    "seeds": (0, 1, 2, 3, 4),
    "deviations": LEDGER,
    "config": {"width": 16, "hidden": [16] * 5, "points": 1024, "epochs_frozen": 2000, "beta": 4},
    "paper_config": {"width": 16, "epochs_frozen": 8000},
    "duration_seconds": 41.5,
    "created": "2026-01-31T12:00:00+00:00",
    "environment": {"python": "3.11.4", "torch": "2.13.0", "numpy": "2.4.6", "device": "cpu", "threads": 2},
}


def target(theta: np.ndarray) -> np.ndarray:
    return np.where(theta < np.pi, np.sin(theta), np.sin(12 * theta)).astype(np.float32)


def fig2(rng: np.random.Generator) -> Artifact:
    theta = (np.arange(1024) * 2 * np.pi / 1024).astype(np.float32)
    arrays = {"theta": theta, "x": np.stack([np.cos(theta), np.sin(theta)], 1), "y": target(theta)}
    reached: dict[str, dict[str, list[int | None]]] = {}
    for model, fast, slow in (("relu", 3, 26), ("dlgn_pwc", 2, 55), ("frozen", 6, 900)):
        epochs = np.arange(DURATIONS[model] + 1)
        rate = rng.uniform(0.7, 1.5, (5, 1))
        loss = 0.25 * np.exp(-epochs / (fast * rate)) + 0.25 * np.exp(-epochs / (slow * rate)) + 1e-3
        loss *= np.exp(0.12 * rng.standard_normal(loss.shape))
        arrays[f"loss_{model}"] = loss.astype(np.float32)
        reached[model] = {
            str(level): [int(np.argmax(row < level)) if (row < level).any() else None for row in loss]
            for level in (0.25, 0.01)
        }
    quick = Claim(
        "Learned gates reach a loss of .01 early",
        below=400,
        null=2000,
        unit="epochs",
        null_text="what frozen gates need",
        paper="about 200 epochs",
        row="DLGN-PWC",
    )
    slow_claim = Claim(
        "Frozen gates need more than 2000 epochs",
        above=1999,
        null=240,
        unit="epochs",
        null_text="as learned gates",
        paper="more than 2000 epochs",
    )
    never = [float("inf") if epoch is None else epoch for epoch in reached["frozen"]["0.01"]]
    return Artifact(
        name="hs.fig2",
        title="A curve on the circle, and how three networks learn it",
        claims=(quick.measure(reached["dlgn_pwc"]["0.01"]), slow_claim.measure(never)),
        metrics={"epochs_to": reached},
        paper_numbers={"epochs to .01, DLGN": 200},
        gates={"loss": "soft β=4"},
        arrays=arrays,
        figures=fig2_panels(arrays, reached),
        **COMMON,
    )


def fig3(rng: np.random.Generator) -> Artifact:
    n = 192
    theta = np.arange(n) * 2 * np.pi / n
    arrays: dict[str, np.ndarray] = {
        "epochs": np.array([0, 3, 200]),
        "theta_kernel": theta.astype(np.float32),
        "ratio_epochs": np.array([0, 1, 3, 10, 30, 100, 200]),
    }
    for model, tops in (("relu", (1.0, 1.3, 1.6)), ("dlgn_pwc", (1.1, 9.0, 4.0))):
        kernels = []
        for top, layers in zip(tops, (5, 5, 5), strict=True):
            # Λ = ∏_l G_l G_lᵀ of random half-spaces, leaning towards the top where it should
            kernel = np.ones((n, n))
            for _ in range(layers):
                angle = np.pi / 2 + rng.vonmises(0, 0.25 * np.log(top) ** 1.5 if top > 1 else 0, 48)
                gates = (np.cos(theta[:, None] - angle) > 0).astype(float)
                kernel *= gates @ gates.T
            kernels.append(kernel / np.trace(kernel))
        arrays[f"kernel_{model}"] = np.stack(kernels).astype(np.float32)
        level = np.interp(np.arange(7), [0, 2, 6], [tops[0], 3 * tops[1], 2 * tops[2]])
        arrays[f"diag_ratio_{model}"] = level * np.exp(0.3 * rng.standard_normal((5, 7)))
        arrays[f"block_ratio_{model}"] = 1.5 * level * np.exp(0.3 * rng.standard_normal((5, 7)))
    claim = Claim(
        "More paths are active on the top half at epoch 3",
        above=2,
        null=1,
        null_text="as many as below",
    )
    claims = [
        claim.measure(arrays[f"diag_ratio_{model}"][:, 2], row=label)
        for model, label in (("relu", "ReLU"), ("dlgn_pwc", "DLGN-PWC"))
    ]
    return Artifact(
        name="hs.fig3",
        title="Where the paths are",
        claims=claims,
        gates={"kernel": "hard"},
        arrays=arrays,
        figures=fig3_panels(arrays),
        **COMMON,
    )


def fig5(rng: np.random.Generator) -> Artifact:
    theta = np.arange(512) * 2 * np.pi / 512
    y = target(theta)
    arrays = {"theta": theta.astype(np.float32), "y": y}
    for model, epochs in (("relu", (3, 30, 300)), ("dlgn_pwc", (3, 30, 300)), ("frozen", (3, 300, 2000))):
        mix = np.array([0.0, 0.35, 0.97])[:, None] * (0.6 if model == "frozen" else 1)
        artefact = 0.2 * (model == "frozen") * np.sign(np.sin(7 * theta + 1))
        outputs = np.where(theta < np.pi, y * np.array([0.8, 1, 1])[:, None], mix * y) + artefact
        arrays[f"epochs_{model}"] = np.array(epochs)
        arrays[f"outputs_{model}"] = outputs + 0.02 * rng.standard_normal(outputs.shape)
    claim = Claim("The top half is learned before the bottom half", below=0.5, null=1.0)
    return Artifact(
        name="hs.fig5",
        title="What each network says while it learns",
        claims=[claim.measure([0.1, 0.6, None, 0.2, 0.9])],
        gates={"outputs": "soft β=4"},
        arrays=arrays,
        figures=fig5_panels(arrays),
        **COMMON,
    )


def fig6(rng: np.random.Generator) -> Artifact:
    start = rng.uniform(0, 2 * np.pi, (5, 5, 16))
    lean = np.array([0.1, 0.4, 0.8, 1.5, 4.0])[None, :, None]
    end = np.pi / 2 + rng.vonmises(0, np.broadcast_to(lean, start.shape))
    arrays: dict[str, np.ndarray] = {}
    for when, angle in (("init", start), ("end", end)):
        normals = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
        arrays[f"normals_{when}"] = normals
        arrays[f"share_top_{when}"] = (normals[..., 1] > np.cos(np.pi / 6)).mean(-1).astype(np.float32)
    claim = Claim(
        "Last-layer half-spaces prefer the top",
        above=0.4,
        null=1 / 6,
        null_text="random directions",
    )
    return Artifact(
        name="hs.fig6",
        title="Every neuron is a half-space",
        claims=[claim.measure(arrays["share_top_end"][:, -1])],
        gates={"half-spaces": "hard"},
        arrays=arrays,
        figures=fig6_panels(arrays),
        **COMMON,
    )


def made_up() -> list[Artifact]:
    return [make(np.random.default_rng(0)) for make in (fig2, fig3, fig5, fig6)]


@pytest.fixture(scope="session")
def artifacts() -> list[Artifact]:
    return made_up()
