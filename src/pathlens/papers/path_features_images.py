"""Neural Path Features on image sets: Table 2, and Figure 3 with the gates of each stage of training.

What is claimed of the trainings in path_features_training; rows that are finished lie in the run's folder, so that the
table can be filled in pieces. Torch is imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathlens.errors import OptionError
from pathlens.papers import image_runs
from pathlens.papers import path_features_image_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.path_features_training import (
    ARCHITECTURES,
    BETA,
    EPSILON,
    MODELS,
    OPTIMISERS,
    ROWS,
    entry,
    flops,
    images,
    kept,
    of_row,
    selected,
    stage,
    state_at,
    trained,
)
from pathlens.papers.sizes import SIZES

PAPER = "Neural Path Features"
CNTK = 77.43
# mean and spread of five runs, in %
TABLE: dict[str, dict[str, tuple[float, float]]] = {
    "fc-sgd": {
        "frnpf_ii": (95.85, 0.10),
        "frnpf_di": (95.85, 0.17),
        "dnpfl": (97.86, 0.11),
        "flnpf": (97.10, 0.09),
        "relu": (97.85, 0.09),
    },
    "fc-adam": {
        "frnpf_ii": (96.02, 0.13),
        "frnpf_di": (96.09, 0.12),
        "dnpfl": (98.22, 0.05),
        "flnpf": (97.82, 0.02),
        "relu": (98.14, 0.07),
    },
    "vconv-sgd": {
        "frnpf_ii": (58.92, 0.62),
        "frnpf_di": (58.83, 0.27),
        "dnpfl": (63.21, 0.07),
        "flnpf": (63.06, 0.73),
        "relu": (67.02, 0.43),
    },
    "vconv-adam": {
        "frnpf_ii": (64.86, 1.18),
        "frnpf_di": (64.68, 0.84),
        "dnpfl": (69.45, 0.76),
        "flnpf": (71.4, 0.47),
        "relu": (72.43, 0.54),
    },
    "gconv-sgd": {
        "frnpf_ii": (67.36, 0.56),
        "frnpf_di": (66.86, 0.44),
        "dnpfl": (74.57, 0.43),
        "flnpf": (78.52, 0.39),
        "relu": (78.90, 0.37),
    },
    "gconv-adam": {
        "frnpf_ii": (67.09, 0.58),
        "frnpf_di": (67.08, 0.27),
        "dnpfl": (77.12, 0.19),
        "flnpf": (79.68, 0.32),
        "relu": (80.43, 0.35),
    },
}
GATES = {"FRNPF, FLNPF, ReLU": "hard", "DNPFL": f"soft β={BETA:g}, ε={EPSILON:g}"}

SCORE = Deviation(
    paper="test accuracy, 'averaged over 5 runs'",
    authors_code="the largest test accuracy over all epochs",
    ours="claims are measured after the last epoch; the best epoch's accuracy stands beside it",
    why="the best epoch is chosen on the test data",
)
NETWORKS = Deviation(
    paper="FC has w = 100, d = 5 (Table 2) or w = 128, d = 6 (appendix B); convolutions with 'a stride of (3, 3)'",
    authors_code="w = 128, six layers with the output; 3 × 3 kernels, stride 1, biases",
    ours="as the code; images standardised, He initialisation, biases that start at zero",
    why="a stride of 3 leaves no image after three layers; initialisation and scaling are not stated",
)
SETTINGS = Deviation(
    paper="Adam 3e-4; SGD, the best of 0.1, 0.01 and 0.001; batches of 32; epochs not stated; DNPFL's gate with β = 8",
    authors_code="Adam 3e-4 (MNIST 1e-4); SGD 0.01 (GCONV 0.1); 80 to 300 epochs; gate (1 + 0.1)·σ(4q)",
    ours="as the code, but SGD 0.01 for GCONV too; on a GPU the forward pass in bfloat16",
    why="the table comes from the code; with 0.1 the loss of GCONV's DNPFL is infinite within the first epoch, in each "
    "of five seeds (one was tried in float32, too), and of the paper's rates 0.01 is the next",
)
QUICK = Deviation(
    paper="all of MNIST and CIFAR-10",
    authors_code="the same",
    ours="quick: part of MNIST for FC, scikit-learn's digits (8 × 8) for the convolutions, narrow networks, larger "
    "rates, Adam alone",
    why="on two CPU cores one epoch of the five GCONV networks is 4e14 operations, about an hour",
)


# --- table 2 -------------------------------------------------------------------------------------------------------

_LOWEST = Claim(
    "networks with fixed random gates are worse than all whose gates are learned",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="random gates as good",
    paper="Table 2: by 1.3 to 10 points",
    unit="points (worst of DNPFL, FLNPF and ReLU − better of FRNPF II and DI, last epoch)",
)
_NEAR = Claim(
    "values trained behind the gates of a trained ReLU network come near to it",
    threshold=0.5,
    comparison=">",
    null=0.0,
    null_text="learned gates no better than random ones",
    paper="Table 2: .51 (VCONV, SGD) to .97",
    unit="share of the way from FRNPF to ReLU that FLNPF makes, last epoch",
)
_ALIKE = Claim(
    "independent and dependent initialisation are close",
    threshold=1 / 3,
    comparison="<",
    null=1.0,
    null_text="as far apart as random and learned gates",
    paper="Table 2: at most .04",
    unit="× (|II − DI| / (ReLU − FRNPF), last epoch)",
)
_DECOUPLED = Claim(
    "on MNIST, gates learned in a network of their own are at least as good as ReLU",
    threshold=-0.1,
    comparison=">=",
    null=-2.0,
    null_text="as far behind as random gates",
    paper="97.86 against 97.85 (SGD), 98.22 against 98.14 (Adam)",
    unit="points (DNPFL − ReLU, last epoch; −0.1 is the paper's own spread)",
)


def _measured(last: dict[str, dict[str, np.ndarray]]) -> list[Claim]:
    claims = []
    for row, name in ROWS.items():
        a = last[row]
        random, gap = (a["frnpf_ii"] + a["frnpf_di"]) / 2, a["relu"] - (a["frnpf_ii"] + a["frnpf_di"]) / 2
        gap = np.where(gap > 0, gap, np.nan)  # no way to go, no share of it
        learned = np.minimum(np.minimum(a["dnpfl"], a["flnpf"]), a["relu"])
        claims += [
            _LOWEST.measure(learned - np.maximum(a["frnpf_ii"], a["frnpf_di"]), row=name),
            _NEAR.measure((a["flnpf"] - random) / gap, row=name),
            _ALIKE.measure(abs(a["frnpf_ii"] - a["frnpf_di"]) / gap, row=name),
        ]
        if row.startswith("fc"):
            claims.append(_DECOUPLED.measure(a["dnpfl"] - a["relu"], row=name))
    return claims


def _told(values: np.ndarray) -> str:
    """Mean ± standard deviation over seeds."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.2f} ± {spread:.2f}"


def _present(run: Run, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sizes of what is in the table, whichever calls it came from."""
    rows = {
        row: {model: one["accuracy"].shape[1] for model, one in entries.items()}
        for row, entries in found.items()
        if entries
    }
    epochs: dict[str, Any] = {}
    for row, by_model in rows.items():
        alike = set(by_model) == set(MODELS) and len(set(by_model.values())) == 1
        epochs[row] = next(iter(by_model.values())) if alike else by_model
    return {
        **run.sizes_of("npk.tab2"),
        "epochs": epochs,
        "architectures": [a for a in ARCHITECTURES if any(row.startswith(a) for row in rows)],
        "optimisers": [o for o in OPTIMISERS if any(row.endswith(o) for row in rows)],
        "models": [m for m in MODELS if any(m in entries for entries in rows.values())],
    }


@experiment(
    "npk.tab2",
    title="Random, learned and copied gates on MNIST and CIFAR-10",
    what="Table 2: FRNPF (II, DI), DNPFL, FLNPF and ReLU × FC, VCONV, GCONV × SGD, Adam",
    claims=[_LOWEST, _NEAR, _ALIKE, _DECOUPLED],
    data=("mnist", "cifar10"),
    minutes=(2, 450),
    flops=lambda size: sum(
        flops(size, row, m, of_row(size["epochs"], row)) for row in ROWS for m in MODELS if selected(size, row, m)
    ),
)
def tab2(run: Run) -> Artifact:
    """Table 2; sizes ``architectures``, ``optimisers`` and ``models`` choose what is trained now."""
    size = run.sizes_of("npk.tab2")
    found: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, np.ndarray]] = {}
    for row in ROWS:
        entries = {m: entry(run, row, m, selected(size, row, m)) for m in MODELS}
        found[row] = {m: one for m, one in entries.items() if one is not None}
        missing = np.full(len(run.seeds), np.nan)
        last[row] = {m: found[row][m]["accuracy"][:, -1] if m in found[row] else missing for m in MODELS}
    metrics: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for row, there in found.items():
        for m, one in there.items():
            accuracy = one["accuracy"]
            scores = {"last epoch": accuracy[:, -1], "best epoch": accuracy.max(1)}
            if "hard" in one:
                scores["last epoch, hard gates at test"] = one["hard"]
            metrics.setdefault(ROWS[row], {})[MODELS[m]] = {
                what: {"mean ± sd": _told(values), "each": values.round(3).tolist()} for what, values in scores.items()
            }
            arrays[f"{row.replace('-', '_')}_{m}"] = accuracy.astype(np.float32)
            arrays[f"{row.replace('-', '_')}_{m}_epochs"] = 1 + np.arange(accuracy.shape[1])
    for m in MODELS:
        rows = [row for row, there in found.items() if m in there]
        arrays[f"ours_{m}"] = np.array([last[row][m] for row in rows], dtype=np.float32)
        arrays[f"paper_{m}"] = np.array([[TABLE[row][m][0]] * len(run.seeds) for row in rows], dtype=np.float32)
    return Artifact(
        "npk.tab2",
        "Random, learned and copied gates on MNIST and CIFAR-10",
        PAPER,
        run.scale,
        _present(run, found),
        run.seeds,
        tuple(_measured(last)),
        {"test accuracy in %": metrics},
        SIZES["npk.tab2"]["paper"],
        {ROWS[row]: {MODELS[m]: f"{mean} ± {sd}" for m, (mean, sd) in paper.items()} for row, paper in TABLE.items()},
        (SCORE, NETWORKS, SETTINGS, *([QUICK] if run.scale == "quick" else [])),
        GATES,
        arrays,
        figures=panels.table({row: list(there) for row, there in found.items()}, ROWS, MODELS, run.scale == "paper"),
    )


# --- figure 3 ------------------------------------------------------------------------------------------------------

STAGES = Deviation(
    paper="weights of a GCONV network at epochs 10, …, 60; how long the values behind its gates train is not stated",
    authors_code="–",
    ours="Table 2's GCONV network (Adam) at those epochs; values trained for 60 epochs",
    why="its rate is constant, so that it passes through the same weights; 60 epochs are those of the network itself",
)
BINARY = Deviation(
    paper="w = 100, d = 5, squared loss",
    authors_code="depth 6, no bias, weights ±√(2/w), RMSprop 1e-4, batches of 64, 50 epochs",
    ours="d = 5 with the code's settings; 100 training images of each class",
    why="the printed depth; the rest is not printed",
)
LOGITS = Deviation(
    paper="10 images per class",
    authors_code="20 per class, and the gradient of the sum of the softmax outputs",
    ours="both numbers of images; the sum over outputs of the kernels of the logits",
    why="softmax outputs sum to one: the gradient of their sum is zero but for rounding",
)
_MONOTONE = Claim(
    "the later the stage that the gates come from, the better the network behind them",
    threshold=0.9,
    comparison=">=",
    null=0.0,
    null_text="the stage does not matter",
    paper="'increases monotonically'",
    unit="rank correlation of stage and test accuracy (best epoch)",
)
_EARLY = Claim(
    "gates of the first stage are better than random ones",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="no better",
    paper="72 against 67.08 %",
    unit="points (first stage − random gates, best epoch)",
)
_BELOW = Claim(
    "gates of the first stage are worse than the CNTK",
    threshold=CNTK,
    comparison="<",
    null=79.68,
    null_text="as good as the last stage",
    paper="72 against 77.43 %",
    unit="% (CIFAR-10, best epoch)",
)
_ABOVE = Claim(
    "gates of the last stage are better than the CNTK",
    threshold=CNTK,
    comparison=">",
    null=72.0,
    null_text="as good as the first stage",
    paper="79.68 against 77.43 %",
    unit="% (CIFAR-10, best epoch)",
)
_FALLS = Claim(
    "ν_t falls while a network learns 4 against 7",
    threshold=0.9,
    comparison="<",
    null=1.0,
    null_text="ν stays",
    paper="Figure 3, middle",
    unit="× (ν after the last epoch / ν at the start)",
)
_SCALE = Claim(
    "K^V and K^F are of the same scale",
    threshold=10.0,
    comparison="<=",
    null=100.0,
    null_text="one is negligible",
    paper="'in the same scale'",
    unit="× (larger / smaller of the two, worst epoch kept)",
)


def _binary(run: Run) -> tuple[list[int], np.ndarray]:
    """Epochs, and ν of the path kernel on the watched images, (seeds, epochs), while 4 against 7 is learned."""
    import torch

    from pathlens.data import binary_mnist
    from pathlens.kernels import npk, nu
    from pathlens.models import Init, relu
    from pathlens.training import Keep, train

    size = run.sizes_of("npk.fig3")
    full = binary_mnist(flatten=True)
    data = full if size["binary_rows"] is None else full.subsample(size["binary_rows"])
    half = size["watched"] // 2
    watched = torch.cat([(data.y[:, 0] == label).nonzero()[:half, 0] for label in (-1, 1)])
    X, y = data.x[watched].double(), data.y[watched, 0]
    epochs = [e for e in size["nu_epochs"] if e <= size["binary_epochs"]]
    init = Init("bernoulli", math.sqrt(2 / size["binary_hidden"][0]))
    pattern = relu(data.x.shape[1], size["binary_hidden"], 1, init=init)
    options = image_runs.options(run, "4 against 7", "npk", "binary", str(size["binary_epochs"]))
    runs: Any = train(
        pattern,
        data,
        epochs=size["binary_epochs"],
        optimizer="rmsprop",
        lr=size["binary_rate"],
        batch_size=size["binary_batch_size"],
        **options | {"loss": "mse", "keep": Keep(epochs, evaluate="running")},
    )
    found = np.empty((len(run.seeds), len(epochs)))
    net = copy.deepcopy(runs.networks[0]).cpu().double()
    for i in range(len(run.seeds)):
        for j, epoch in enumerate(epochs):
            net.load_state_dict(state_at(runs, i, epoch))
            found[i, j] = nu(npk(net, X), y).normalised
    return epochs, found


def _norms(run: Run) -> tuple[list[int], np.ndarray]:
    """Epochs, and trace and Frobenius norm of K^V and K^F: (images per class, part, norm, seeds, epochs)."""
    from pathlens.kernels import frobenius_norm, ntk

    row = "fc-adam"
    runs, epochs, sizes = trained(run, row, "dnpfl"), kept(run, row, "dnpfl"), run.sizes_of("npk.fig3")["per_class"]
    found = np.empty((len(sizes), 2, 2, len(run.seeds), len(epochs)))
    net: Any = copy.deepcopy(runs.networks[0]).cpu()
    for a, per_class in enumerate(sizes):
        X = images(run, "fc").subsample(per_class=per_class).x
        for i in range(len(run.seeds)):
            for j, epoch in enumerate(epochs):
                net.load_state_dict(state_at(runs, i, epoch))
                for b, part in enumerate(("value", "feature")):
                    K = ntk(net, X, part=part)
                    found[a, b, :, i, j] = float(K.trace()), frobenius_norm(K)
    return epochs, found


def _rank_correlation(stages: Sequence[int], accuracy: np.ndarray) -> float:
    """Spearman's, or NaN where there is nothing to rank."""
    from scipy.stats import spearmanr

    if len(stages) < 2 or np.ptp(accuracy) == 0:
        return math.nan
    return float(spearmanr(stages, accuracy).statistic)


@experiment(
    "npk.fig3",
    title="Gates of every stage of training",
    what="Figure 3: FLNPF with the gates of six stages against CNTK's 77.43 %; ν_t; norms of K^V and K^F",
    claims=[_MONOTONE, _EARLY, _BELOW, _ABOVE, _FALLS, _SCALE],
    data=("mnist", "cifar10"),
    minutes=(1.5, 110),
    flops=lambda size: (
        flops(size, "gconv-adam", "relu", of_row(size["epochs"], "gconv-adam"))
        + (1 + len(size["stages"])) * flops(size, "gconv-adam", "flnpf", size["value_epochs"])
        + flops(size, "fc-adam", "dnpfl", of_row(size["epochs"], "fc-adam"))
    ),
)
def fig3(run: Run) -> Artifact:
    """Figure 3; the ReLU and DNPFL networks are those of Table 2."""
    size, stages = run.sizes_of("npk.fig3"), kept(run, "gconv-adam", "relu")
    if len(stages) < 2:
        raise OptionError(
            f"npk.fig3: none of the stages {size['stages']} is within the epochs of GCONV. Set stages "
            "too, as in --set 'stages=[1, 2]'."
        )
    whole = entry(run, "gconv-adam", "relu")
    assert whole is not None
    relu = whole["accuracy"]
    accuracy = np.stack([stage(run, epoch) for epoch in stages])  # (stages, seeds, epochs), the first of random gates
    nu_epochs, nu = _binary(run)
    kernel_epochs, norms = _norms(run)
    best = accuracy.max(2)
    ranks = [_rank_correlation(stages[1:], of_seed[1:]) for of_seed in best.T]
    on_cifar = size["image_data"] == "cifar10" and size["image_rows"] is None
    absolute = best if on_cifar else np.full_like(best, np.nan)  # the CNTK's number is for all of CIFAR-10
    ratio = norms[0, 0] / norms[0, 1]  # (norm, seeds, epochs), with the paper's number of images
    apart = np.maximum(ratio, 1 / ratio).max(-1)
    claims = (
        _MONOTONE.measure(ranks),
        _EARLY.measure(best[1] - best[0]),
        _BELOW.measure(absolute[1]),
        _ABOVE.measure(absolute[-1]),
        _FALLS.measure(nu[:, -1] / nu[:, 0]),
        *(_SCALE.measure(apart[k], row=name) for k, name in enumerate(("trace", "Frobenius norm"))),
    )
    scores = {f"gates of epoch {epoch}" if epoch else "random gates": accuracy[k] for k, epoch in enumerate(stages)}
    metrics = {
        "test accuracy in %": {
            name: {"last epoch": _told(a[:, -1]), "best epoch": _told(a.max(1))}
            for name, a in {**scores, "ReLU": relu}.items()
        },
        "ν": {f"epoch {e}": _told(nu[:, k]) for k, e in enumerate(nu_epochs)},
        "K^V and K^F after the last epoch kept": {
            f"{count} images per class": {
                f"{norm} of {part}": _told(norms[a, b, c, :, -1])
                for b, part in enumerate(("K^V", "K^F"))
                for c, norm in enumerate(("trace", "Frobenius norm"))
            }
            for a, count in enumerate(size["per_class"])
        },
    }
    arrays = {
        "stages": np.array(stages),
        "best": best,
        "last": accuracy[:, :, -1],
        "relu": relu.max(1),
        "nu": nu,
        "nu_epochs": np.array(nu_epochs),
        "norms": norms,
        "kernel_epochs": np.array(kernel_epochs),
    }
    config = {**size, "stages": stages[1:], "nu_epochs": nu_epochs, "kernel_epochs": kernel_epochs[1:]}
    numbers = {"FRNPF": "67.08 %", "FLNPF-1": "72 %", "FLNPF-6": "79.68 %", "ReLU": "80.43 %", "CNTK": f"{CNTK} %"}
    return Artifact(
        "npk.fig3",
        "Gates of every stage of training",
        PAPER,
        run.scale,
        config,
        run.seeds,
        claims,
        metrics,
        SIZES["npk.fig3"]["paper"],
        numbers,
        (STAGES, SCORE, BINARY, LOGITS, NETWORKS, SETTINGS, *([QUICK] if run.scale == "quick" else [])),
        GATES,
        {key: value.astype(np.float32) for key, value in arrays.items()},
        figures=panels.stages(float(np.median(relu.max(1))), CNTK if on_cifar else None, size["per_class"]),
    )
