"""Figure 4: tangent kernels of ReLU and DLGN-PWC while training, and how alike the kernels of the two become."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.panels import Panel, Series

LATE = circle.KERNEL_EPOCHS[-1]

_MOVES = Claim(
    f"the tangent kernel is far from stationary: by epoch {LATE} it has moved by more than half of its size",
    above=0.5,
    null=0.1,
    null_text="a kernel that hardly moves, as of very wide networks",
    paper="'far from being stationary'",
    unit="‖K̂ − K̂₀‖/‖K̂₀‖, trace-normalised",
)
_SOON = Claim(
    f"most of that happens early: by epoch 3 it has moved more than half as far as by epoch {LATE}",
    above=0.5,
    null=3 / LATE,
    null_text="it moves at an even pace",
    paper="Figure 4, epoch 3",
    unit=f"× (drift at 3 / at {LATE})",
)
_NEARER = Claim(
    "training brings the DLGN's kernel nearer to the ReLU network's",
    above=0.1,
    null=0.0,
    null_text="no nearer than before training",
    paper="'similarity of overlap/NTK … dynamics (Figures 3–5)'",
    unit=f"alignment with ReLU at {LATE}: DLGN at {LATE} − DLGN at 0",
)
_ALIKE = Claim(
    f"at epoch {LATE} a DLGN's kernel is nearly as like a ReLU network's as that of another ReLU network",
    at_least=0.8,
    null=0.5,
    null_text="half as like",
    paper="'a faithful surrogate for ReLU nets'",
    unit="× (alignment ReLU–DLGN / ReLU–ReLU of other seeds)",
)
PAIRS = Deviation(
    paper="Figures 3 and 4 are compared by eye",
    authors_code="not public",
    ours="centred alignment of every ReLU network with every DLGN, and with the ReLU networks of other seeds",
    why="the alignment of two ReLU networks shows how similar kernels of the same task can be expected to be",
)


def _alignments(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Centred alignment of all pairs of kernels: (a, n, n) and (b, n, n) → (a, b)."""
    from pathlens.kernels import kernel_alignment

    return np.array([[kernel_alignment(K, other) for other in right] for K in left])


def _mean_of_others(matrix: np.ndarray) -> np.ndarray:
    """Mean of each row without its diagonal entry; NaN for a single seed."""
    count = len(matrix) - 1
    return (matrix.sum(1) - matrix.diagonal()) / count if count else np.full(1, np.nan)


@circle.circle_experiment(
    "hs.fig4",
    title="Tangent kernels of ReLU and DLGN while training",
    what="empirical NTK of ReLU and DLGN-PWC at init, epoch 3 and 200; alignment of their kernels while training",
    claims=[_MOVES, _SOON, _NEARER, _ALIKE],
    deviations=[PAIRS, circle.CIRCLE, circle.SETTINGS],
    sizes={**circle.SIZES, "kernel_points": (128, 256)},
    minutes=(1.5, 13),
)
def fig4(run: Run) -> Artifact:
    """Figure 4, and the surrogate claim made from it, for the tangent and the overlap kernel."""
    from pathlens.kernels import drift, overlap

    step = circle.kernel_step(run)
    circle.check_epochs(run)
    c = circle.train_circle(run)
    epochs = c.kept_epochs
    late = epochs.index(LATE)
    tangent = circle.tangent_kernels(run)
    members = range(len(run.seeds))
    shared = {
        m: np.array([[overlap(c.record(m, i, e))[::step, ::step].dense().double() for e in epochs] for i in members])
        for m in circle.LEARNED
    }
    arrays = {"epochs": np.array(epochs), "theta": c.theta[::step]}
    moves, soon, alike = [], [], []
    for m, name in circle.LEARNED.items():
        K = tangent[m]
        moved = arrays[f"drift_{m}"] = np.array([[drift(k, ks[0], normalise=True) for k in ks] for ks in K])
        shown = K[c.shown(m), [epochs.index(e) for e in circle.KERNEL_EPOCHS]]
        arrays[f"kernel_{m}"] = shown / shown.trace(axis1=1, axis2=2)[:, None, None]
        arrays[f"diagonal_{m}"] = circle.diagonal_ratio(K, c.top[::step])
        moves.append(_MOVES.measure(moved[:, late], row=name))
        soon.append(_SOON.measure(moved[:, epochs.index(3)] / moved[:, late], row=name))
    for stem, name, kernels in (("ntk", "tangent kernel", tangent), ("overlap", "overlap kernel", shared)):
        relu, dlgn = (kernels[m].swapaxes(0, 1) for m in circle.LEARNED)  # epoch by epoch
        between = np.stack([_alignments(a, b).mean(1) for a, b in zip(relu, dlgn)], axis=1)
        own = np.stack([_mean_of_others(_alignments(a, a)) for a in relu], axis=1)
        start = _alignments(relu[late], dlgn[0]).mean(1)
        found = {"between": between, "relu": own, "start": start}
        arrays |= {f"alignment_{stem}_{pair}": values for pair, values in found.items()}
        alike.append(_NEARER.measure(between[:, late] - start, row=name))
        alike.append(_ALIKE.measure(between[:, late] / own[:, late], row=name))
    per_seed = {k: v for k, v in arrays.items() if k.startswith(("drift", "alignment", "diagonal"))}
    return run.artifact(
        claims=[*moves, *soon, *alike],
        metrics={
            "epochs": epochs,
            "mean over seeds": {k: v.mean(0).tolist() for k, v in per_seed.items()},
            "standard deviation": {k: v.std(0).tolist() for k, v in per_seed.items()},
        },
        gates={**circle.TANGENT_GATES, "overlap kernels": "hard"},
        arrays=float32(arrays),
        panels=_panels(),
    )


def _panels() -> list[Panel]:
    angle = "angle, from 0 to 2π"
    alike = [
        Series(f"alignment_{kernel}_{pair}", f"{name}: {label}", style=style)
        for kernel, name in (("ntk", "tangent"), ("overlap", "overlap"))
        for pair, label, style in (("between", "ReLU, DLGN", "line"), ("relu", "two ReLU", "dashed"))
    ]
    return [
        *(
            Panel(
                "matrices",
                f"Tangent kernel: {name}",
                [Series(f"kernel_{m}[{k}]", f"epoch {e}") for k, e in enumerate(circle.KERNEL_EPOCHS)],
                x_label=angle,
                y_label=angle,
            )
            for m, name in circle.LEARNED.items()
        ),
        circle.epoch_panel(
            "How far the tangent kernel has moved", circle.model_series("drift"), "‖K̂(t) − K̂(0)‖ / ‖K̂(0)‖"
        ),
        circle.epoch_panel("Are the kernels alike?", alike, "centred alignment"),
        circle.epoch_panel(
            "Diagonal, top over bottom",
            circle.model_series("diagonal"),
            "mean K(x, x), top / bottom",
            y_scale="log",
            marks=[(1.0, "equal")],
        ),
    ]
