"""Section 5: whether the Fourier basis diagonalises gated second moments at all times of training."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.localisation.descent import SHARED, descend_relu
from pathlens.papers.localisation.settings import CONFIG, DATA, INPUTS, RATES, over_time, rows
from pathlens.papers.panels import Panel, Series

_ONE_BASIS = Claim(
    "the Fourier basis nearly diagonalises Σ^xx(p_i, p_i; t) at all times",
    at_most=0.05,
    null=0.975,
    null_text="a random basis, 1 − 1/d",
    paper="'a single basis to diagonalize them across time … DFT?' (5)",
    unit="largest share of energy off the diagonal over time, mean over units",
)
_CROSS = Claim(
    "the Fourier basis nearly diagonalises Σ^xx(p_i, p_j; t), i ≠ j, at all times",
    at_most=0.05,
    null=0.975,
    null_text="a random basis, 1 − 1/d",
    paper="section 5",
    unit="largest share of energy off the diagonal over time, mean over pairs",
)


def _energy(x: np.ndarray) -> np.ndarray:
    """|entries|² of Σ x xᵀ over rows, in the Fourier basis."""
    waves = np.fft.fft(np.eye(INPUTS), norm="ortho")
    return np.abs(waves.conj() @ (x.T @ x) @ waves.T) ** 2


def _off_diagonal(x: np.ndarray) -> float:
    """Share of the energy outside the diagonal; NaN without rows."""
    energy = _energy(x)
    total = energy.sum()
    return float(1 - np.trace(energy) / total) if total > 0 else np.nan


@experiment(
    "loc.dft",
    title="One basis for all times?",
    what="energy of Σ^xx(p_i, p_j; t) off the diagonal in the Fourier basis, while a ReLU network learns",
    claims=[_ONE_BASIS, _CROSS],
    deviations=[DATA, RATES],
    minutes=(0.5, 1.5),
    **SHARED,
)
def dft(run: Run) -> Artifact:
    """Gates that depend on x break the translation invariance that makes Σ^xx circulant."""
    d = descend_relu(run)
    x, bits = d.x, d.gates
    seeds, marks, _, K = bits.shape
    same, cross = np.empty((seeds, marks)), np.empty((seeds, marks))
    for s in range(seeds):
        for m, on in enumerate(bits[s]):
            same[s, m] = np.nanmean([_off_diagonal(x[on[:, i]]) for i in range(K)])
            pairs = [_off_diagonal(x[on[:, i] & on[:, j]]) for i in range(K) for j in range(i + 1, K)]
            cross[s, m] = np.nanmean(pairs)
        run.progress("Fourier basis", s + 1, seeds)
    ungated = _off_diagonal(x)
    examples = (x, x[bits[0, 0, :, 0]], x[bits[0, -1, :, 0]])
    moments = np.stack([np.sqrt(_energy(part)) / len(part) for part in examples])
    return run.artifact(
        claims=[_ONE_BASIS.measure(same.max(1)), _CROSS.measure(cross.max(1))],
        metrics={
            "times": d.times.tolist(),
            "no gates, same sample": ungated,
            "own gate": same.tolist(),
            "two gates": cross.tolist(),
        },
        gates={"ReLU": "hard"},
        arrays=float32({"times": d.times, "same": same, "cross": cross, "moments": moments}),
        config=CONFIG,
        panels=[
            over_time(
                "Energy off the diagonal, Fourier basis",
                [Series("same", "one gate"), Series("cross", "two gates")],
                "share of energy, mean of units",
                y_scale="log",
                marks=[(ungated, "no gates"), (0.975, "random basis")],
            ),
            Panel(
                "matrices",
                "|Σ^xx| in the Fourier basis, one unit",
                rows("moments", ("no gates", "its gate at the start", "its gate at the end")),
                x_label="frequency",
                y_label="frequency",
                y_scale="log",
            ),
        ],
    )
