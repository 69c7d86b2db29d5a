"""Figure 3: how many paths two inputs share, at the start, at epoch 3 and at epoch 200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.pages.words import read_spread
from pathlens.papers.panels import Panel, Series

RATIO_EPOCHS = (0, 1, 3, 10, 30, 100, 200)
KERNEL_POINTS = 256


_EARLY = Claim(
    "at epoch 3, far more paths of the DLGN are active on the slow half",
    above=2.0,
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3",
    unit="× (mean diagonal, top / bottom)",
)
_LATE = replace(_EARLY, text="at epoch 200, more paths of the DLGN are still active on the slow half")
_STAYS = Claim(
    "the DLGN's ratio stays more or less the same from epoch 3 to 200",
    above=0.5,
    null=0.25,
    null_text="it falls fourfold",
    paper="'stays more or less the same till the end'",
    unit="× (ratio at 200 / ratio at 3)",
)
_RELU_DIAGONAL = replace(
    _EARLY, text="at epoch 200, more paths of the ReLU network are active on the slow half", threshold=1.25
)
_RELU_BLOCK = replace(
    _RELU_DIAGONAL,
    text="at epoch 200, inputs of the slow half share more paths of the ReLU network with each other",
    null_text="as many shared paths on either half",
    unit="× (mean top-top block / bottom-bottom block)",
)


@circle.circle_experiment(
    "hs.fig3",
    title="The overlap kernel moves early",
    what="overlap kernel of ReLU and DLGN-PWC at init, epoch 3 and epoch 200",
    claims=[_EARLY, _LATE, _STAYS, _RELU_DIAGONAL, _RELU_BLOCK],
    deviations=[circle.CIRCLE, circle.SETTINGS],
)
def fig3(run: Run) -> Artifact:
    """Figure 3: overlap kernels from hard gates, trace-normalised, and their ratios of top to bottom."""
    from pathlens.kernels import overlap

    circle.check_epochs(run)
    c = circle.train_circle(run)
    top, step = c.top, max(len(c.data) // KERNEL_POINTS, 1)

    def ratios(model: str, member: int, epoch: int) -> tuple[float, float]:
        """Means on top over means below: of the diagonal, and of the two diagonal blocks."""
        K = overlap(c.record(model, member, epoch)).dense().double().numpy()
        return float(circle.diagonal_ratio(K, top)), K[np.ix_(top, top)].mean() / K[np.ix_(~top, ~top)].mean()

    arrays = {
        "epochs": np.array(circle.KERNEL_EPOCHS),
        "ratio_epochs": np.array(RATIO_EPOCHS),
        "theta_kernel": c.theta[::step],
    }
    for m in circle.LEARNED:
        found = np.array([[ratios(m, i, e) for e in RATIO_EPOCHS] for i in range(len(run.seeds))])
        arrays[f"diag_ratio_{m}"], arrays[f"block_ratio_{m}"] = found[:, :, 0], found[:, :, 1]
        shown = [overlap(c.record(m, c.shown(m), e))[::step, ::step] for e in circle.KERNEL_EPOCHS]
        arrays[f"kernel_{m}"] = np.stack([K.normalised().dense().numpy() for K in shown])
    early, late = (arrays["diag_ratio_dlgn_pwc"][:, RATIO_EPOCHS.index(e)] for e in (3, 200))
    return run.artifact(
        claims=[
            _EARLY.measure(early),
            _LATE.measure(late),
            _STAYS.measure(late / early),
            _RELU_DIAGONAL.measure(arrays["diag_ratio_relu"][:, -1]),
            _RELU_BLOCK.measure(arrays["block_ratio_relu"][:, -1]),
        ],
        metrics={
            m: {"diagonal": arrays[f"diag_ratio_{m}"].tolist(), "block": arrays[f"block_ratio_{m}"].tolist()}
            for m in circle.LEARNED
        },
        gates={"overlap kernels": "hard"},
        arrays=float32(arrays),
        config=circle.BETAS,
        panels=fig3_panels(arrays),
    )


def fig3_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Overlap kernels as matrices, and the ratio of top to bottom over training."""
    epochs, points, spreads = arrays["ratio_epochs"], len(arrays["theta_kernel"]), []
    for m, name in circle.LEARNED.items():
        ratio = arrays[f"diag_ratio_{m}"]
        finite = [column[np.isfinite(column)] for column in ratio.T]
        peak = int(np.argmax([np.median(column) if len(column) else -np.inf for column in finite]))
        spreads.append(
            f"{name} {read_spread(ratio[:, 0], '∞')} at first, {read_spread(ratio[:, peak], '∞')} at its largest "
            f"(epoch {epochs[peak]:g}), {read_spread(ratio[:, -1], '∞')} at the end"
        )
    notes = {
        "relu": "Entry (s, t) counts the paths that are active for both points s and t. Points are ordered by angle, "
        "the top half first; each matrix is divided by its trace.",
        "dlgn_pwc": "A bright upper-left block means that paths gather on the half where the target is slow.",
        "diag_ratio": f"Median (range): {'; '.join(spreads)}.",
    }
    kernels = [
        Panel(
            "matrices",
            f"{name}: overlap kernel",
            [
                Series(f"kernel_{m}[{k}]", circle.epoch_label(epoch), colour=circle.COLOURS[m])
                for k, epoch in enumerate(arrays["epochs"])
            ],
            "theta_kernel",
            y_scale="sqrt",
            marks=[(points / 2, "top half, bottom half")],
            note=notes[m],
        )
        for m, name in circle.LEARNED.items()
    ]
    ratios = [
        circle.epoch_panel(
            title,
            circle.model_series(stem),
            x="ratio_epochs",
            y_scale="log",
            marks=[(1.0, "as many on either half")],
            note=notes.get(stem, ""),
        )
        for stem, title in (("diag_ratio", "mean diagonal, top ÷ bottom"), ("block_ratio", "block mean, top ÷ bottom"))
    ]
    return kernels + ratios
