"""Deep Gated Networks on image sets: Figure 5, Experiment 6 (gates alone are trained) and Table 4 (Experiment 7).

Binary MNIST with its kernels over time is in deep_gated_training. Torch is imported inside functions, so that listing
the experiments stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.papers import deep_gated_image_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.image_runs import (
    accuracy,
    hard_accuracies,
    images,
    options,
    own_folder,
    remembered,
    shrunk,
    spread,
)
from pathlens.papers.sizes import SIZES

__all__ = ["Row", "exp6", "fig5", "fit", "tab4"]

PAPER = "Deep Gated Networks"
# what the training of one row depends on, beside the row itself
_SHAPE = ("rows", "rows_test", "side", "channels", "dense", "epochs", "lr", "batch_size")
_JUDGED = 10_000  # training images on which the training accuracy is taken

LENGTH = Deviation(
    paper="Adam, 3e-4; epochs and batch size are not stated",
    authors_code="80 epochs for this network in the later paper by the same authors",
    ours="Adam, 3e-4, 80 epochs, batches of 128 (quick: few small images, a larger rate)",
    why="the paper is silent; batches of 128 keep a GPU busy",
)
START = Deviation(
    paper="initialisation and biases of the convolutional networks are not stated",
    authors_code="Keras's defaults: biases on, Glorot's initialisation",
    ours="PyTorch's defaults for the table; gates alone: variance 1/(fan-in·E[g²])",
    why="both defaults start with small pre-activations, where a soft-ReLU of small β is nearly linear; Experiment 6 "
    "cannot make up for values that are too small",
)
SELECTION = Deviation(
    paper="'mean of the best performance obtained in each run'",
    authors_code="largest test accuracy over epochs",
    ours="best epoch, as the paper, and last epoch, both told",
    why="the best epoch is chosen on the test data",
)


# --- one row of a table: a convolutional network on CIFAR-10 ---------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One network: its name in the table, its kind for `gated_twin`, and further options of that."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


DLN = Row("deep linear network", "dln", {"init": "default"})


def fit(run: Run, size: Mapping[str, Any], row: Row) -> dict[str, np.ndarray]:
    """Train one network from every seed; accuracies in %.

    Returns
    -------
    dict
        ``test`` (seeds, epochs + 1); ``train`` and ``hard`` (seeds,), both after the last epoch, the second on the test
        images with hard gates in place of soft ones (NaN where there are none).
    """
    setting = {name: size[name] for name in _SHAPE} | dataclasses.asdict(row)

    def compute() -> dict[str, np.ndarray]:
        found = [_fit_seed(run, size, row, setting, seed) for seed in run.seeds]
        return {name: np.stack([one[name] for one in found]) for name in ("test", "train", "hard")}

    return run.once(("cifar10", json.dumps(setting)), compute)


def _fit_seed(
    run: Run, size: Mapping[str, Any], row: Row, setting: Mapping[str, Any], seed: int
) -> dict[str, np.ndarray]:
    """One training. When it is done only its accuracies stay on disk: its checkpoints hold hundreds of megabytes."""
    from pathlens.training.checkpoints import forget_checkpoints

    folder = own_folder(run, "cifar10", row.kind, f"seed{seed}", **setting)
    file = None if folder is None else folder / "accuracies.json"
    found = remembered(file, lambda: _train_seed(run, size, row, seed, folder))
    if folder is not None:
        forget_checkpoints(folder)
    return {name: np.array(values) for name, values in found.items()}


def _train_seed(run: Run, size: Mapping[str, Any], row: Row, seed: int, folder: Path | None) -> dict[str, Any]:
    from pathlens.models import gated_twin, vconv
    from pathlens.training import train

    data = _pictures(run, size)
    template = vconv(10, channels=(3, *size["channels"]), dense=size["dense"], size=size["side"], bias=True)
    net = gated_twin(template, row.kind, example=data.x[:2], **row.options)
    given = options(run, f"{row.name}, seed {seed}")
    given |= {"seeds": [seed], "checkpoints": checkpoints_in(folder, every=10)}
    # capturing a step costs more than it gains on the CPU, where convolutions outweigh dispatch
    given["execution"] = dataclasses.replace(given["execution"], compile=run.device.startswith("cuda"))
    runs: Any = train(net, data, epochs=size["epochs"], lr=size["lr"], batch_size=size["batch_size"], **given)
    soft = net.gate.label.startswith("soft")
    return {
        "test": (100 * runs.history("test_accuracy")[0]).tolist(),
        "train": float(accuracy(runs.networks, data.x[:_JUDGED], data.y[:_JUDGED], run.device)[0]),
        "hard": float(hard_accuracies(runs, data, run.device)[0]) if soft else math.nan,
    }


def _pictures(run: Run, size: Mapping[str, Any]) -> Any:
    """CIFAR-10, or part of it with smaller sides."""
    rows, rows_test, side = size["rows"], size["rows_test"], size["side"]
    return run.once(("cifar10", rows, rows_test, side), lambda: shrunk(images("cifar10", rows, rows_test), side))


def _passes(size: Mapping[str, Any], passes: float) -> float:
    """Floating-point operations of so many forward passes per image, epoch and seed; a gradient costs two of them."""
    widths, last = (3, *size["channels"]), size["channels"][-1] * size["side"] ** 2
    convolutions = 9 * size["side"] ** 2 * sum(a * b for a, b in pairwise(widths))
    dense = sum(a * b for a, b in pairwise((last, *size["dense"], 10)))
    return 2 * (convolutions + dense) * passes * (size["rows"] or 50_000) * size["epochs"] * size["seeds"]


def _best(found: Mapping[str, np.ndarray]) -> np.ndarray:
    return found["test"][:, 1:].max(1)


def _metrics(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    told = {"test, best epoch": _best(found), "test, last epoch": found["test"][:, -1], "train": found["train"]}
    if not np.isnan(found["hard"]).any():
        told["test, last epoch, hard gates"] = found["hard"]
    return {name: spread(values) for name, values in told.items()}


# --- experiment 6: only the gates are trained ------------------------------------------------------------------

BETA, EPSILON = 4.0, 0.1
LITERAL = Deviation(
    paper="N(Θᵍ, ∞; Θʷ): hard gates, of which only the weights Θᵍ are trained; the introduction says 'soft-gates'",
    authors_code="not public for this experiment",
    ours=f"soft gates, β = {BETA:g} and ε = {EPSILON:g}, as in Experiment 3; and hard gates with the gradient of soft "
    "ones (straight-through)",
    why="the gradient to the gates is zero at β = ∞",
)
_ALONE = Claim(
    "training the gates alone gives about 56 % on CIFAR-10",
    threshold=50.0,
    comparison=">=",
    null=39.4,
    null_text="what the paper's deep linear network reaches with all its weights (Table 4)",
    paper="56 %",
    unit="% test accuracy",
)
_CHANCE = Claim(
    "gates alone learn: far above chance",
    threshold=25.0,
    comparison=">=",
    null=10.0,
    null_text="chance",
    paper="56 %",
    unit="% test accuracy, last epoch",
)
_LINEAR = Claim(
    "gates alone beat a deep linear network, all of whose weights are trained",
    threshold=5.0,
    comparison=">=",
    null=0.0,
    null_text="no better",
    paper="56 against 39.4 %",
    unit="points of test accuracy, best epochs",
)


def _gates_only(name: str) -> Row:
    gate: dict[str, Any] = {"beta": BETA, "gate": name, "gate_activation": "soft", "init": "preserve"}
    if name == "soft":
        return Row("gates only, soft", "gates_only", gate | {"epsilon": EPSILON})
    return Row("gates only, hard (straight-through)", "gates_only", gate)


@experiment(
    "dgn.exp6",
    title="The lottery is in the gates",
    what="Experiment 6: CIFAR-10 with random values that stay, gates that learn; soft and straight-through gates",
    claims=[_ALONE, _CHANCE, _LINEAR],
    data=("cifar10",),
    minutes=(2, 45),
    flops=lambda size: _passes(size, 5 * len(size["gates"]) + 3),  # two networks, but no gradients by the values
)
def exp6(run: Run) -> Artifact:
    """Experiment 6: four convolutions and three dense layers; Θʷ stays as drawn."""
    size = run.sizes_of("dgn.exp6")
    rows = [*(_gates_only(name) for name in size["gates"]), DLN]
    found = {row.name: fit(run, size, row) for row in rows}
    claims = []
    for row in rows[:-1]:
        mine = found[row.name]
        claims += [
            _ALONE.measure(_best(mine), row=f"{row.name}; best epoch"),
            _ALONE.measure(mine["test"][:, -1], row=f"{row.name}; last epoch"),
            _CHANCE.measure(mine["test"][:, -1], row=row.name),
            _LINEAR.measure(_best(mine) - _best(found[DLN.name]), row=row.name),
        ]
    names = [row.name for row in rows]
    return Artifact(
        "dgn.exp6",
        "The lottery is in the gates",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {name: _metrics(one) for name, one in found.items()},
        SIZES["dgn.exp6"]["paper"],
        {"gates only": "56 % test", "deep linear network": "50.42 % train, 39.39 % test"},
        (LITERAL, LENGTH, START, SELECTION),
        {
            "gates only, soft": f"soft β={BETA:g}, ε={EPSILON:g}",
            "gates only, straight-through": "hard",
            DLN.name: "hard (all open)",
        },
        {
            "test": np.stack([found[name]["test"] for name in names]).astype(np.float32),
            "hard": np.stack([found[name]["hard"] for name in names]).astype(np.float32),
        },
        figures=panels.gates_only(names),
    )


# --- table 4: soft-ReLU ----------------------------------------------------------------------------------------

# the paper's rows: training and test accuracy
_PRINTED = {
    "deep linear network": (50.42, 39.39),
    "ReLU": (99, 71),
    **{
        f"β = {beta}, ε = 0.1": (99, test)
        for beta, test in zip((1, 2, 4, 8, 12, 16, 20, 24), (59, 64, 68, 71, 71, 72, 72, 72))
    },
    **{
        f"β = {beta}, ε = 0.4": (99, test)
        for beta, test in zip((1, 2, 4, 8, 12, 16, 20, 24), (56, 63, 68, 71, 71, 71, 71, 71))
    },
}
_MATCHES = Claim(
    "soft-ReLU with β ≥ 8 generalises as well as ReLU",
    threshold=-2.0,
    comparison=">=",
    null=-12.0,
    null_text="as far behind as the paper's β = 1",
    paper="0 to 1 points",
    unit="points of test accuracy, best epochs",
)
_BEHIND = Claim(
    "with β = 1 it falls behind",
    threshold=-5.0,
    comparison="<=",
    null=0.0,
    null_text="β does not matter",
    paper="−12 points (ε = .1), −15 (ε = .4)",
    unit="points of test accuracy against ReLU, best epochs",
)
_FAR = Claim(
    "a deep linear network is far below ReLU",
    threshold=-10.0,
    comparison="<=",
    null=0.0,
    null_text="gates do not matter",
    paper="−31.6 points",
    unit="points of test accuracy, best epochs",
)
_FITS = Claim(
    "every network with gates fits the training set",
    threshold=95.0,
    comparison=">=",
    null=50.42,
    null_text="the paper's deep linear network",
    paper="99 %",
    unit="% training accuracy, last epoch",
)


def _table_rows(size: Mapping[str, Any]) -> list[Row]:
    init = {"init": size["init"]}
    soft = [
        Row(f"β = {beta:g}, ε = {epsilon:g}", "soft_relu", {"beta": beta, "epsilon": epsilon, **init})
        for epsilon in size["epsilons"]
        for beta in size["betas"]
    ]
    return [dataclasses.replace(DLN, options=init), Row("ReLU", "relu", init), *soft]


@experiment(
    "dgn.tab4",
    title="Soft-ReLU over β and ε",
    what="Experiment 7: CIFAR-10, a convolutional DLN, ReLU, and soft-ReLU with β 1 to 24 and ε .1, .4",
    claims=[_MATCHES, _BEHIND, _FAR, _FITS],
    data=("cifar10",),
    minutes=(1.5, 120),
    flops=lambda size: _passes(size, 3 * (2 + len(size["betas"]) * len(size["epsilons"]))),
)
def tab4(run: Run) -> Artifact:
    """Table 4, all 18 rows."""
    size = run.sizes_of("dgn.tab4")
    rows = _table_rows(size)
    found = {}
    for i, row in enumerate(rows):
        found[row.name] = fit(run, size, row)
        run.progress("rows of the table", i + 1, len(rows))
    best = {name: _best(one) for name, one in found.items()}
    claims = [_FAR.measure(best[DLN.name] - best["ReLU"])]
    for row in rows[2:]:
        if row.options["beta"] >= 8:
            claims.append(_MATCHES.measure(best[row.name] - best["ReLU"], row=row.name))
        elif row.options["beta"] == 1:
            claims.append(_BEHIND.measure(best[row.name] - best["ReLU"], row=row.name))
    claims += [_FITS.measure(found[row.name]["train"], row=row.name) for row in rows[1:]]
    names = [row.name for row in rows]
    shape = (len(size["epsilons"]), len(size["betas"]), len(run.seeds))
    return Artifact(
        "dgn.tab4",
        "Soft-ReLU over β and ε",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {name: _metrics(one) for name, one in found.items()},
        SIZES["dgn.tab4"]["paper"],
        {name: {"train": train, "test": test} for name, (train, test) in _PRINTED.items()},
        (LENGTH, START, SELECTION),
        {"deep linear network": "hard (all open)", "ReLU": "hard", "soft-ReLU": "soft, β and ε of the row"},
        {
            "test": np.stack([found[name]["test"] for name in names]).astype(np.float32),
            "best": np.stack([best[name] for name in names]),
            "betas": np.array(size["betas"], float),
            "soft": np.stack([best[name] for name in names[2:]]).reshape(shape),
            "hard": np.stack([found[name]["hard"] for name in names[2:]]).reshape(shape),
        },
        figures=panels.soft_relu(
            names, size["epsilons"], float(np.median(best["ReLU"])), float(np.median(best[DLN.name]))
        ),
    )


# --- figure 5: GaLU against ReLU on MNIST ----------------------------------------------------------------------

TASKS = {"mnist": "MNIST", "mnist_random_labels": "random labels", "mnist_random_pixels": "random pixels"}
MNIST = Deviation(
    paper="'to close to 100 % accuracy'; optimiser, rate, batch, epochs and initialisation are not stated",
    authors_code="Adam, 1e-4, 100 epochs for fully connected networks on MNIST in the later paper",
    ours="Adam, 1e-4, 100 epochs, batches of 64, no biases, variance 2/fan-in (quick: 1e-3, fewer rows, narrower)",
    why="the same authors' settings",
)
_FASTER = Claim(
    "GaLU trains a bit faster than ReLU",
    threshold=0.95,
    comparison="<",
    null=1.0,
    null_text="both alike",
    paper="'a bit faster', Figure 5",
    unit="× (training loss, mean over epochs, GaLU / ReLU)",
)
_BETTER = Claim(
    "ReLU generalises better than GaLU",
    threshold=1.0,
    comparison=">",
    null=0.0,
    null_text="both alike",
    paper="98.5 against 96.5 %",
    unit="points of test accuracy, last epoch",
)


@experiment(
    "dgn.fig5",
    title="GaLU trains faster, ReLU generalises better",
    what="MNIST, with random labels, with random pixels: training of ReLU and of GaLU with frozen gates; test accuracy",
    claims=[_FASTER, _BETTER],
    data=("mnist",),
    minutes=(1, 15),
    # three passes for ReLU, four for GaLU, whose gates go forward only
    flops=lambda size: (
        14
        * sum(a * b for a, b in pairwise((784, *size["hidden"], 10)))
        * len(size["tasks"])
        * (size["rows"] or 60_000)
        * size["epochs"]
        * size["seeds"]
    ),
)
def fig5(run: Run) -> Artifact:
    """Figure 5: seven layers of 512, 512, 256, 256, 128, 64 and 10 units."""
    from pathlens import models
    from pathlens.training import train

    size = run.sizes_of("dgn.fig5")
    hidden = tuple(size["hidden"])
    loss, fitted, test = {}, {}, {}
    tasks = size["tasks"]
    for task in tasks:
        data = images(task, size["rows"], size["rows_test"], flatten=True)
        for name, build in (("GaLU", models.galu), ("ReLU", models.relu)):
            label = f"{name}, {TASKS[task]}"
            given = options(run, label) | {"keep": None}
            given["checkpoints"] = checkpoints_in(run.checkpoint("fig5", task, name.lower()), every=10)
            runs: Any = train(
                build(data.d, hidden, 10, init="he"),
                data,
                epochs=size["epochs"],
                lr=size["lr"],
                batch_size=size["batch_size"],
                **given,
            )
            loss[task, name] = runs.history()
            fitted[task, name] = 100 * runs.history("accuracy")
            test[task, name] = 100 * runs.history("test_accuracy")
    claims = [
        _FASTER.measure(loss[task, "GaLU"][:, 1:].mean(1) / loss[task, "ReLU"][:, 1:].mean(1), row=TASKS[task])
        for task in tasks
    ]
    points = test["mnist", "ReLU"][:, -1] - test["mnist", "GaLU"][:, -1] if "mnist" in tasks else []
    claims.append(_BETTER.measure(points))
    pairs = [(task, name) for task in tasks for name in ("GaLU", "ReLU")]
    shape = (len(tasks), 2, len(run.seeds), -1)
    metrics = {
        f"{name}, {TASKS[task]}": {
            "train, last epoch": spread(fitted[task, name][:, -1]),
            "test, last epoch": spread(test[task, name][:, -1]),
            "test, best epoch": spread(test[task, name][:, 1:].max(1)),
        }
        for task, name in pairs
    }
    return Artifact(
        "dgn.fig5",
        "GaLU trains faster, ReLU generalises better",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["dgn.fig5"]["paper"],
        {"test accuracy": {"GaLU": "about 96.5 %", "ReLU": "about 98.5 %"}},
        (MNIST,),
        {"GaLU": "hard", "ReLU": "hard"},
        {
            "loss": np.stack([loss[p] for p in pairs]).reshape(shape).astype(np.float32),
            "train": np.stack([fitted[p] for p in pairs]).reshape(shape).astype(np.float32),
            "test": np.stack([test[p] for p in pairs]).reshape(shape).astype(np.float32),
        },
        figures=panels.galu_mnist([TASKS[task] for task in tasks]),
    )
