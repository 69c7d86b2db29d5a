"""Figures 13 to 16: the overlap kernel and the NTK between the classes, at initialisation, middle and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space import fashion_training as fashion
from pathlens.papers.half_space.parts import NAMES, network_at
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

KERNELS = {"overlap": "overlap kernel", "ntk": "NTK"}
MOMENTS = ("init", "middle", "end")

# rows and columns of classes 2 to 10 as printed; the row of class 1 is incomplete
FIGURE_16A = np.array(
    [
        [10.02, 9.98, 10.01, 9.99, 9.95, 9.96, 9.95, 9.96, 9.95],
        [9.98, 10.04, 10.00, 10.04, 9.95, 9.98, 9.96, 9.99, 9.98],
        [10.01, 10.00, 10.04, 10.01, 9.95, 9.98, 9.96, 9.98, 9.97],
        [9.99, 10.04, 10.01, 10.05, 9.95, 9.99, 9.96, 9.99, 9.98],
        [9.95, 9.95, 9.95, 9.95, 9.93, 9.95, 9.94, 9.95, 9.94],
        [9.96, 9.98, 9.98, 9.99, 9.95, 9.98, 9.96, 9.97, 9.96],
        [9.95, 9.96, 9.96, 9.96, 9.94, 9.96, 9.95, 9.95, 9.95],
        [9.96, 9.99, 9.98, 9.99, 9.95, 9.97, 9.95, 9.97, 9.96],
        [9.95, 9.98, 9.97, 9.98, 9.94, 9.96, 9.95, 9.96, 9.96],
    ]
)
FIGURE_16B = np.array(
    [
        [23.58, -1.50, 5.21, -0.83, 0.14, -0.62, -0.45, -0.46, -0.60],
        [-1.50, 11.79, -0.45, 10.34, -0.26, 1.06, -0.27, 1.77, 1.83],
        [5.21, -0.45, 11.03, 0.31, 0.62, -0.36, -0.41, -0.03, -0.27],
        [-0.83, 10.34, 0.31, 10.86, -0.11, 1.53, -0.00, 2.15, 2.30],
        [0.14, -0.26, 0.62, -0.11, 4.84, 5.24, 5.62, 4.24, 3.00],
        [-0.62, 1.06, -0.36, 1.53, 5.24, 6.72, 6.64, 5.49, 4.50],
        [-0.45, -0.27, -0.41, -0.00, 5.62, 6.64, 7.00, 5.32, 4.09],
        [-0.46, 1.77, -0.03, 2.15, 4.24, 5.49, 5.32, 4.70, 3.96],
        [-0.60, 1.83, -0.27, 2.30, 3.00, 4.50, 4.09, 3.96, 3.82],
    ]
)
SELECTION = Deviation(
    paper="50 images of each class; whether of the training or the test set, of the old or the new classes, and how "
    "the ten outputs enter the NTK is not stated; the caption of Figure 16 says DLGN; 'the loss on easy part is "
    "≈ 72%'",
    authors_code="not public",
    ours="the first test images of each new class; the NTK is summed over the outputs; Figure 16 is ReLU, and 72 % is "
    "accuracy on the easy test images, at the first epoch that ends with it",
    why="Figure 14 to 16 read so; the complex classes of 16b are alike, as mixtures of clusters are",
)
_BLOCKS = Claim(
    "training makes classes share more with classes of their own part than with those of the other",
    above=0.1,
    null=0.0,
    null_text="no more than at initialisation",
    paper="Figures 13 to 16",
    unit="gain of (mean within a part − mean across) / mean diagonal",
)
_AS_16A = Claim(
    "the ReLU network's NTK starts flat, as printed in Figure 16a",
    at_most=0.15,
    null=1.0,
    null_text="classes differ by a tenth",
    paper="Figure 16a: 9.93 to 10.05",
    unit="largest |ours − printed|",
)
_AS_16B = Claim(
    "the ReLU network's NTK at middle has the pattern of Figure 16b",
    at_least=0.8,
    null=0.0,
    null_text="no likeness",
    paper="Figure 16b",
    unit="correlation with the printed entries",
)
_SHARE_16B = Claim(
    "at middle, most of the trace of the ReLU network's NTK is on the simple classes",
    above=1.5,
    null=1.0,
    null_text="as much on either part, as in Figure 16a",
    paper="Figure 16b: 72.9 / 27.1 = 2.7",
    unit="× (diagonal blocks, simple / complex)",
)


def block_contrast(blocks: np.ndarray) -> float:
    """Mean entry within the two parts minus mean entry across them, over the mean diagonal; five classes a part."""
    simple = np.arange(10) < 5
    within = simple[:, None] == simple
    return float((blocks[within].mean() - blocks[~within].mean()) / np.diag(blocks).mean())


def _blocks(run: Run, runs: Runs, data: DataSet, middle: list[int | None], label: str) -> dict[str, np.ndarray]:
    """Class-averaged overlap kernel and NTK of trace 100 at the three moments, each (seeds, 3, 10, 10); NaN where the
    middle was not reached."""
    import torch

    from pathlens import kernels
    from pathlens.recording import record

    assert data.x_test is not None and data.y_test is not None
    y, last = data.y_test, run.sizes["epochs"]
    chosen = torch.cat([(y == c).nonzero()[: run.sizes["per_class"], 0] for c in range(10)])
    x, labels = data.x_test[chosen].to(run.device), y[chosen]
    found = {kernel: np.full((len(runs), 3, 10, 10), np.nan) for kernel in KERNELS}
    for i, middle_epoch in enumerate(middle):
        for j, epoch in enumerate((0, middle_epoch, last)):
            if epoch not in fashion.kept_epochs(last):
                continue
            taken = record(network_at(runs[i], epoch).to(run.device), x)
            for kernel, K in zip(KERNELS, (kernels.overlap(taken), kernels.ntk(taken))):
                found[kernel][i, j] = kernels.class_blocks(K, labels).cpu().numpy()
        run.progress(f"kernels, {label}", i + 1, len(runs))
    return found


@experiment(
    "hs.fig13",
    title="Kernels between the classes",
    what="modified Fashion-MNIST: class-averaged overlap kernel and NTK at initialisation, middle and end",
    claims=[_BLOCKS, _AS_16A, _AS_16B, _SHARE_16B],
    deviations=[fashion.CLUSTERS, fashion.TRAINING, fashion.COUNTS, SELECTION],
    sizes={**fashion.FIGURES, "per_class": 50},
    seeds=3,
    data=("fashion_mnist",),
    minutes=(1.5, 4),
    flops=lambda sizes: fashion.training_flops(sizes, 3),
    shares="fashion",
)
def fig13(run: Run) -> Artifact:
    """Figures 13 to 16, from the trainings of Figure 7."""
    data = fashion.load_data(run)
    arrays: dict[str, Any] = {}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for model, name in NAMES.items():
        runs = fashion.train_fashion(run, model)
        middle = fashion.middle_epochs(fashion.part_accuracies(runs, data))
        for kernel, found in _blocks(run, runs, data, middle, name).items():
            arrays[f"{kernel}_{model}"] = found
            label = f"{name}, {KERNELS[kernel]}"
            contrast = np.array([[block_contrast(b) for b in member] for member in found])
            # images of one part are alike to begin with, so that only the gain is the network's doing
            claims += [_BLOCKS.measure(contrast[:, j] - contrast[:, 0], row=f"{label}, {MOMENTS[j]}") for j in (1, 2)]
            metrics[f"block contrast, {label}"] = dict(zip(MOMENTS, contrast.T.tolist()))
        metrics[f"epoch of the middle, {name}"] = middle
    start, middle_ntk = arrays["ntk_relu"][:, 0, 1:, 1:], arrays["ntk_relu"][:, 1, 1:, 1:]
    diagonal = np.diagonal(arrays["ntk_relu"][:, 1], axis1=1, axis2=2)
    claims += [
        _AS_16A.measure(abs(start - FIGURE_16A).max((1, 2))),
        _AS_16B.measure([np.corrcoef(m.ravel(), FIGURE_16B.ravel())[0, 1] for m in middle_ntk]),
        _SHARE_16B.measure(diagonal[:, :5].sum(1) / diagonal[:, 5:].sum(1)),
    ]
    reached = middle_ntk[~np.isnan(middle_ntk).any((1, 2))]
    ours = {"16a": start.mean(0), "16b": reached.mean(0) if len(reached) else np.full((9, 9), np.nan)}
    metrics |= {
        f"Figure {figure}, classes 2 to 10, mean over seeds": np.round(values, 2).tolist()
        for figure, values in ours.items()
    }
    arrays |= {
        "printed_16a": FIGURE_16A - 10,
        "ours_16a": ours["16a"] - 10,
        "printed_16b": FIGURE_16B,
        "ours_16b": ours["16b"],
    }
    return run.artifact(
        claims=claims,
        metrics=metrics,
        paper_numbers={
            "Figure 16a, classes 2 to 10": FIGURE_16A.tolist(),
            "Figure 16b, classes 2 to 10": FIGURE_16B.tolist(),
        },
        gates={"overlap kernels": "hard", "DLGN-PWC, NTK": f"soft β={run.sizes['beta']:g}", "ReLU": "hard"},
        arrays=float32(arrays),
        panels=[
            *(
                _matrices(
                    f"{name}: {title}",
                    [(f"{kernel}_{model}[0, {j}]", when) for j, when in enumerate(("initialisation", *MOMENTS[1:]))],
                    "Classes 1 to 5 are simple, 6 to 10 complex. First seed, scaled to trace 100.",
                )
                for model, name in NAMES.items()
                for kernel, title in KERNELS.items()
            ),
            *(
                _matrices(
                    f"Figure {figure}, ReLU, classes 2 to 10{less}",
                    [(f"printed_{figure}", "printed"), (f"ours_{figure}", "ours, mean over seeds")],
                )
                for figure, less in (("16a", ", less 10"), ("16b", ""))
            ),
        ],
    )


def _matrices(title: str, series: list[tuple[str, str]], note: str = "") -> Panel:
    return Panel("matrices", title, [Series(*one) for one in series], x_label="class", y_label="class", note=note)
