"""Kernels over training on CIFAR-10: drift and class blocks of the overlap kernel and the NTK of five convolutions.

The summary asks for them (experiment 2); the trainings are those of Table 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space.conv5 import (
    BETA,
    CONV5,
    FILTERS,
    GATING,
    NAMES,
    SCHEDULE,
    SEEDS,
    conv_flops,
    kept_epochs,
    load_data,
    network,
    train_conv,
)
from pathlens.papers.image_runs import each_seed, own_folder
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from torch import Tensor

KERNELS = {"overlap": "overlap kernel", "ntk": "NTK"}

_MOVES = Claim(
    "the kernel moves while the network trains",
    above=0.2,
    null=0.0,
    null_text="a fixed kernel",
    paper="'change during training … is well established'",
    unit="‖K − K₀‖/‖K₀‖ at the end, kernels of trace 1",
)
_EARLY = Claim(
    "most of that happens early, within three epochs",
    above=0.5,
    null=0.375,
    null_text="at most in proportion to time",
    paper="'in the early stages of SGD training'",
    unit="share of the final drift reached at epoch 3",
)
_BLOCKS = Claim(
    "images of one class come to share more of it",
    above=1.1,
    null=1.0,
    null_text="no more than at the start",
    paper="block structure, Figures 13–16",
    unit="× (within-class mean / between-class mean, end / start)",
)


def class_ratio(K: np.ndarray, labels: np.ndarray) -> float:
    """Mean of K over pairs of different images of one class, over its mean between classes (NaN where that is 0)."""
    same = labels[:, None] == labels[None, :]
    other = ~same
    np.fill_diagonal(same, False)  # an image shares everything with itself
    between = float(K[other].mean())
    return float(K[same].mean()) / between if between else float("nan")


def _kernels(run: Run, model: str, width: int, x: Any, labels: Any) -> dict[str, np.ndarray]:
    """Of both kernels of trace 1, from the kept weights: drift and class ratio, (seeds, epochs), and their means over
    pairs of classes at the start and at the end, (seeds, 2, 10, 10)."""
    from pathlens.kernels import class_blocks, drift, ntk, overlap

    runs, epochs = train_conv(run, model, width), kept_epochs(run)
    net, rows = network(model, width, x).to(run.device).eval(), x.to(run.device)
    measured: dict[str, list[Any]] = {f"{what}_{kind}": [] for kind in KERNELS for what in ("drift", "ratio", "blocks")}
    for i, trajectory in enumerate(runs):
        found: dict[str, list[Tensor]] = {kind: [] for kind in KERNELS}
        for epoch in epochs:
            snapshot = trajectory.at_epoch(epoch).snapshot
            assert snapshot is not None
            net.load_state_dict(snapshot.state)
            for kind, K in zip(KERNELS, (overlap(net, rows), ntk(net, rows))):
                found[kind].append(K.normalised().dense().float().cpu())
        for kind, Ks in found.items():
            measured[f"drift_{kind}"].append([drift(K, Ks[0]) for K in Ks])
            measured[f"ratio_{kind}"].append([class_ratio(K.numpy(), labels.numpy()) for K in Ks])
            measured[f"blocks_{kind}"].append([class_blocks(K, labels).tolist() for K in (Ks[0], Ks[-1])])
        run.progress(f"kernels, {NAMES[model]}", i + 1, len(run.seeds))
    return {name: np.array(values) for name, values in measured.items()}


def _flops(size: dict[str, Any]) -> float:
    images_seen = size["seeds"] * size["epochs"] * (size["rows"] or 50_000)
    return 9.0 * images_seen * conv_flops(size, size["kernel_width"])


@experiment(
    "hs.cifar",
    title="Kernels over training on CIFAR-10",
    what="overlap kernel and NTK of ReLU and DLGN, five convolutions: drift and class blocks (summary, experiment 2)",
    claims=[_MOVES, _EARLY, _BLOCKS],
    deviations=[FILTERS, SCHEDULE, GATING],
    sizes={**CONV5, "kernel_width": (12, 26), "per_class": (10, 50)},
    seeds=SEEDS,
    data=("cifar10",),
    minutes=(1.5, 20),
    flops=_flops,
    shares="conv5",
)
def cifar(run: Run) -> Artifact:
    """Drift of both kernels and their class blocks, from the trainings of hs.tab1."""
    import torch

    size = run.sizes
    data, epochs, width = load_data(run), kept_epochs(run), size["kernel_width"]
    count = size["per_class"]
    chosen = torch.cat([(data.y == c).nonzero()[:count, 0] for c in range(10)])
    x, labels = data.x[chosen], data.y[chosen]
    models, claims = ("relu", "dlgn"), []
    arrays: dict[str, Any] = {"epochs": epochs}
    early = next((j for j, epoch in enumerate(epochs) if epoch == 3), None)
    shape = ("side", "rows", "rows_test", "epochs", "lr", "batch_size", "kernel_epochs", "per_class")
    for m in models:
        folder = own_folder(run, "cifar", m, str(width), **{key: size[key] for key in shape})
        found = each_seed(run, folder, lambda part, m=m: _kernels(part, m, width, x, labels))  # type: ignore[misc]
        for kind in KERNELS:
            row = f"{NAMES[m]}, {KERNELS[kind]}"
            moved, ratio = found[f"drift_{kind}"], found[f"ratio_{kind}"]
            arrays |= {
                f"drift_{kind}_{m}": moved,
                f"ratio_{kind}_{m}": ratio,
                f"blocks_{kind}_{m}": found[f"blocks_{kind}"].mean(0),
            }
            part = moved[:, early] / moved[:, -1] if early is not None else np.full(len(run.seeds), np.nan)
            claims += [
                _MOVES.measure(moved[:, -1], row=row),
                _EARLY.measure(part, row=row),
                _BLOCKS.measure(ratio[:, -1] / ratio[:, 0], row=row),
            ]
    pairs = [(f"{kind}_{m}", f"{NAMES[m]}, {KERNELS[kind]}") for kind in KERNELS for m in models]
    blocks = [
        Panel(
            "matrices",
            f"{NAMES[m]}: {what}, class by class",
            [Series(f"blocks_{kind}_{m}[{j}]", f"epoch {epoch}") for j, epoch in enumerate((epochs[0], epochs[-1]))],
            x_label="class",
            y_label="class",
            note="Mean over the seeds, scaled to trace 100.",
        )
        for kind, what in KERNELS.items()
        for m in models
    ]
    return run.artifact(
        claims=claims,
        metrics={key: value.tolist() for key, value in arrays.items() if key.startswith(("drift", "ratio"))},
        gates={"overlap kernels": "hard", "NTK of the DLGN": f"soft β={BETA:g}"},
        arrays=float32(arrays),
        config={"beta": BETA},
        panels=[
            Panel(
                "lines",
                "How far the kernels moved",
                [Series(f"drift_{key}", label) for key, label in pairs],
                x="epochs",
                x_label="epoch",
                y_label="‖K − K₀‖ / ‖K₀‖, kernels of trace 1",
                note="With the default initialisation the NTK begins nearly constant: biases outweigh other weights.",
            ),
            Panel(
                "lines",
                "Class structure",
                [Series(f"ratio_{key}", label) for key, label in pairs],
                x="epochs",
                x_label="epoch",
                y_label="mean within classes / between classes",
            ),
            *blocks,
        ],
    )
