"""Half-Space Feature Learning: when gates become useful (hs.early), and what paths follow (hs.controls).

Both look at the circle and at modified Fashion-MNIST, whose trainings are in half_space_fashion; the circle's figures
are in half_space. Torch is imported inside functions.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_fashion_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.half_space_circle import BATCH, BETA, CIRCLE, HIDDEN, RATE, SETTINGS
from pathlens.papers.half_space_fashion import (
    CLUSTERS,
    NAMES,
    PAPER,
    TRAINING,
    Setting,
    Trained,
    fashion,
    mean_paths,
    network,
    restored,
    train_fashion,
    train_options,
    training_flops,
)
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

NEW_VALUES = 1000  # seeds of values that are drawn anew: not those that made the gates
RIDGE = 1e-4  # of kernel regression, in units of the mean diagonal


def circle_network(model: str, **more: Any) -> GatedNetwork:
    """The networks of the circle figures."""
    from pathlens import models

    if model == "relu":
        return models.relu(2, HIDDEN)
    return models.dlgn(2, HIDDEN, piecewise_constant=True, beta=BETA, **more)


def circle_options(run: Run, epochs: int, label: str, *words: str) -> dict[str, Any]:
    """Options of `train` on the circle."""
    return {
        "epochs": epochs,
        "lr": RATE,
        "batch_size": BATCH,
        "device": run.device,
        "checkpoints": checkpoints_in(run.checkpoint("circle", f"{epochs}epochs", *words), every=50),
        "progress": functools.partial(run.progress, label),
    }


def train_on_circle(run: Run, model: str, data: DataSet, epochs: int, keep: list[int]) -> Runs:
    """Train one architecture on a circle, all seeds at once."""
    from pathlens.training import train

    def compute() -> Any:
        words = (data.name.replace(" ", "_"), str(len(data)), model, *map(str, keep))
        return train(
            circle_network(model),
            data,
            seeds=run.seeds,
            keep=keep,
            **circle_options(run, epochs, f"{data.name}, {NAMES[model]}", *words),
        )

    return run.once(("circle", data.name, len(data), model, epochs, tuple(keep)), compute)


# --- features are learned early --------------------------------------------------------------------------------

STAGES = Deviation(
    paper="features are learned 'in the early stages of SGD training while the loss is still high'; no experiment "
    "freezes gates later than at initialisation",
    authors_code="not public",
    ours="gates of several epochs are frozen (soft, as they were trained), values drawn anew and trained; and the "
    "overlap kernel of the same gates, hard and soft, in ridge regression",
    why="what gates are worth is what can be learned behind them. 'While the loss is still high' is, on the circle, "
    "the last of these epochs whose loss is at least half of the initial one, .25; on Fashion-MNIST the loss may halve "
    "within the first epoch, and the gates of epoch 1 stand for it",
)
_EARLY = Claim(
    "gates taken while the loss is still high have most of what gates will ever gain",
    threshold=0.5,
    comparison=">=",
    null=0.0,
    null_text="no better than random gates",
    paper="'learn … features in the early stages … while the loss is still high'",
    unit="share of the gain from random to final gates",
)
_LATER_CIRCLE = Claim(
    "behind the final gates, values alone reach the loss of the network that learned them",
    threshold=2.0,
    comparison="<=",
    null=10.0,
    null_text="gates and values had to be learned together",
    paper="'combine these features linearly'",
    unit="× (loss, values retrained / trained with the gates)",
)
_LATER_IMAGES = Claim(
    "behind the final gates, values alone are as accurate as the network that learned them",
    threshold=2.0,
    comparison="<=",
    null=10.0,
    null_text="gates and values had to be learned together",
    paper="'combine these features linearly'",
    unit="points of test accuracy lost",
)


def early_stage(loss: np.ndarray) -> np.ndarray:
    """Per seed the last stage before the loss (seeds, stages) falls under half of its initial value."""
    return (loss >= loss[:, :1] / 2).cumprod(axis=1).sum(1) - 1


def share_gained(worth: np.ndarray, stage: np.ndarray | int) -> np.ndarray:
    """Share of the gain from the first to the last stage that the gates of a stage have, per seed.

    Parameters
    ----------
    worth : (seeds, stages)
        What was reached behind the gates of each stage; larger is better.
    stage : (seeds,) or int
        Where it is the first or the last stage, which have no or all of the gain by definition, the share is NaN; and
        so it is where nothing was gained.
    """
    stage = np.broadcast_to(stage, len(worth))
    gain = worth[:, -1] - worth[:, 0]
    known = (gain > 0) & (stage > 0) & (stage < worth.shape[1] - 1)
    return (worth[np.arange(len(worth)), stage] - worth[:, 0]) / np.where(known, gain, np.nan)


def _frozen(pattern: GatedNetwork, gates: GatedNetwork, seed: int) -> GatedNetwork:
    """Values drawn from a seed behind the gates of another network, which stay."""
    import copy

    net = copy.deepcopy(pattern).reinitialise(NEW_VALUES + seed)
    assert net.source is not None and gates.source is not None
    net.source.load_state_dict(gates.source.state_dict())
    return net


def _regression(net: GatedNetwork, data: DataSet, rows: int, device: str, soft: bool) -> tuple[float, float | None]:
    """Test error and accuracy of regression with the overlap kernel of a network's gates, in float64: on the circle the
    kernel is nearly singular."""
    from pathlens.kernels import gate_information

    assert data.x_test is not None and data.y_test is not None
    train = data.x[:rows].to(device).double(), data.y[:rows]
    test = data.x_test[:rows].to(device).double(), data.y_test[:rows]
    exact = copy.deepcopy(net).to(device).double()
    told = gate_information(exact, train, test, kernel="overlap", soft=soft, ridge=RIDGE)
    return told.mse, told.accuracy


def _circle_stages(run: Run, sizes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Per seed and stage: loss of the network, loss behind its frozen gates, errors of regression."""
    from pathlens.data import circle
    from pathlens.training import train

    data = circle(sizes["points"], test_points=sizes["points"])
    stages, epochs = sizes["circle_stages"], sizes["circle_epochs"]
    learned = train_on_circle(run, "dlgn_pwc", data, epochs, stages)
    members, shape = range(len(run.seeds)), (len(run.seeds), len(stages))
    gates = [[restored(learned, circle_network("dlgn_pwc"), i, e) for e in stages] for i in members]
    pattern = circle_network("dlgn_pwc", frozen=True)
    nets = [_frozen(pattern, gates[i][j], run.seeds[i]) for i in members for j in range(len(stages))]
    behind: Any = train(nets, data, **circle_options(run, epochs, "values, circle", "stages", str(len(data))))
    found = {
        "circle_loss": learned.history()[:, stages],
        "circle_retrained": behind.history()[:, -1].reshape(shape),
        "circle_curve": behind.history().reshape(*shape, -1),
    }
    for kind in ("hard", "soft"):
        found[f"circle_{kind}"] = np.array(
            [[_regression(net, data, len(data), "cpu", kind == "soft")[0] for net in row] for row in gates]
        )
    return found


def _image_stages(run: Run, sizes: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same on modified Fashion-MNIST, with test accuracies in % in place of losses."""
    from pathlens.training import train

    setting, stages = Setting.of(sizes), sizes["stages"]
    t = train_fashion(run, "dlgn_pwc", setting)
    members, shape = range(len(run.seeds)), (len(run.seeds), len(stages))
    gates = [[t.network(i, e) for e in stages] for i in members]
    pattern = network("dlgn_pwc", setting, t.data.d, frozen=True)
    nets = [_frozen(pattern, gates[i][j], run.seeds[i]) for i in members for j in range(len(stages))]
    chosen = train_options(run, setting, t.data, "values, Fashion-MNIST", "stages")
    del chosen["seeds"]  # a list of networks is trained as it is
    behind: Any = train(nets, t.data, **chosen)
    curve = 100 * behind.history("test_accuracy").reshape(*shape, -1)
    kernel = [
        [_regression(net, t.data, sizes["kernel_rows"], run.device, soft=False)[1] for net in row] for row in gates
    ]
    return {
        "images_loss": t.runs.history()[:, stages],
        "images_accuracy": 100 * t.runs.history("test_accuracy"),
        "images_retrained": curve[..., -1],
        "images_hard": 100 * np.array(kernel, dtype=float),
        "images_curve": curve,
    }


@experiment(
    "hs.early",
    title="Features are learned early",
    what="gates frozen at several epochs, values drawn anew: circle and modified Fashion-MNIST; and kernel regression",
    claims=[_EARLY, _LATER_CIRCLE, _LATER_IMAGES],
    data=("fashion_mnist",),
    minutes=(2, 10),
    # behind frozen gates, gates cost a forward pass alone
    flops=lambda sizes: training_flops(sizes, 2 + 4 / 3 * len(sizes["stages"])),
)
def early(run: Run) -> Artifact:
    """What the gates of each epoch are worth."""
    sizes = run.sizes_of("hs.early")
    arrays = _circle_stages(run, sizes) | _image_stages(run, sizes)
    stage = early_stage(arrays["circle_loss"])
    rows = {
        "circle, values retrained": share_gained(-arrays["circle_retrained"], stage),
        "circle, overlap kernel, hard": share_gained(-arrays["circle_hard"], stage),
        "circle, overlap kernel, soft": share_gained(-arrays["circle_soft"], stage),
        f"Fashion-MNIST, epoch {sizes['stages'][1]}, values retrained": share_gained(arrays["images_retrained"], 1),
        f"Fashion-MNIST, epoch {sizes['stages'][1]}, overlap kernel, hard": share_gained(arrays["images_hard"], 1),
    }
    claims = [_EARLY.measure(share, row=row) for row, share in rows.items()]
    claims += [
        _LATER_CIRCLE.measure(arrays["circle_retrained"][:, -1] / arrays["circle_loss"][:, -1]),
        _LATER_IMAGES.measure(arrays["images_accuracy"][:, -1] - arrays["images_retrained"][:, -1]),
    ]
    metrics = {
        key: {"mean": values.mean(0).tolist(), "sd": values.std(0, ddof=1).tolist()}
        for key, values in arrays.items()
        if values.ndim == 2 and key != "images_accuracy"
    }
    arrays |= {"circle_stages": np.array(sizes["circle_stages"]), "stages": np.array(sizes["stages"])}
    return Artifact(
        "hs.early",
        "Features are learned early",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["hs.early"]["paper"],
        {"loss on the circle when the features are there": "≥ .25"},
        (STAGES, CIRCLE, SETTINGS, CLUSTERS, TRAINING),
        {"networks": f"soft β={BETA:g}", "overlap kernel, hard": "hard", "overlap kernel, soft": f"soft β={BETA:g}"},
        {key: value.astype(np.float32) for key, value in arrays.items()},
        figures=panels.early(sizes["circle_stages"], sizes["stages"]),
    )


# --- what paths follow -----------------------------------------------------------------------------------------

TARGETS = ("circle", "swapped", "trivial", "offset")
CONTROLS = Deviation(
    paper="'paths move preferentially to cover low-frequency/simpler regions of the target'",
    authors_code="not public",
    ours="targets in which the simple half has no energy to learn (0), or in which both halves are equally fast and "
    "one has an offset that is learned at once; halves swapped; Fashion-MNIST with classes 0 to 4 scrambled",
    why="on the paper's own data simplicity, direction, norm and energy that is learnable early go together",
)
_SIMPLE = Claim(
    "more paths are active on the simple part",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as many on either part",
    paper="section 5",
    unit="× (mean active paths at the end, simple / complex)",
)
_EQUAL = Claim(
    "where both halves are equally fast, an offset on one draws no paths to it",
    threshold=1.5,
    comparison="<",
    null=4.0,
    null_text="paths follow energy that is learnable early",
    paper="section 5",
    unit="× (mean active paths at the end, half with offset / other)",
)


def _circle_ratios(run: Run, sizes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Mean active paths on the slow (or flat, or shifted) half over the other, per target: (models, seeds, epochs)."""
    from pathlens.data import circle, circle_control

    epochs = [0, 3, sizes["circle_epochs"]]
    found = {}
    for target in TARGETS:
        data = circle(sizes["points"]) if target == "circle" else circle_control(target, sizes["points"])
        simple = data.marks["top"].numpy() != (target == "swapped")
        found[target] = np.empty((len(NAMES), len(run.seeds), len(epochs)))
        for m, model in enumerate(NAMES):
            runs = train_on_circle(run, model, data, epochs[-1], epochs)
            for i in range(len(run.seeds)):
                for j, epoch in enumerate(epochs):
                    paths = mean_paths(restored(runs, circle_network(model), i, epoch), data.x, simple)
                    found[target][m, i, j] = paths[0] / paths[1]
    return found


def _image_ratios(run: Run, t: Trained, measured: int) -> np.ndarray:
    """Mean active paths, simple over complex test rows, (seeds, 2): at initialisation and at the end."""
    assert t.data.x_test is not None
    x, simple = t.data.x_test[:measured].to(run.device), t.data.marks_test["simple"][:measured].numpy()
    found = np.empty((len(run.seeds), 2))
    for i in range(len(run.seeds)):
        for j, epoch in enumerate((0, t.setting.epochs)):
            paths = mean_paths(t.network(i, epoch).to(run.device), x, simple)
            found[i, j] = paths[0] / paths[1]
    return found


@experiment(
    "hs.controls",
    title="What paths follow",
    what="path ratios for circle targets that separate 'simple' from 'learnable early'; Fashion-MNIST swapped",
    claims=[_SIMPLE, _EQUAL],
    data=("fashion_mnist",),
    minutes=(2, 4),
    flops=lambda sizes: 2 * training_flops(sizes, 3),
    shares="fashion",
)
def controls(run: Run) -> Artifact:
    """Controls for Figures 3 and 7."""
    sizes = run.sizes_of("hs.controls")
    circles = _circle_ratios(run, sizes)
    claims = [
        _SIMPLE.measure(circles[target][m, :, -1], row=f"{panels.TARGETS[target]}, {name}")
        for target in TARGETS[:3]
        for m, name in enumerate(NAMES.values())
    ]
    claims += [_EQUAL.measure(circles["offset"][m, :, -1], row=name) for m, name in enumerate(NAMES.values())]
    arrays: dict[str, np.ndarray] = {f"ratio_{target}": values for target, values in circles.items()}
    norms = {}
    for which, scrambled in (("classes 5 to 9 complex", (5, 6, 7, 8, 9)), ("classes 0 to 4 complex", (0, 1, 2, 3, 4))):
        setting = Setting.of(sizes, scrambled)
        data = fashion(run, setting)
        length, simple = data.x.norm(dim=1), data.marks["simple"]
        norms[which] = {"simple": float(length[simple].mean()), "complex": float(length[~simple].mean())}
        for model, name in NAMES.items():
            ratio = _image_ratios(run, train_fashion(run, model, setting), sizes["measured"])
            claims.append(_SIMPLE.measure(ratio[:, -1], row=f"Fashion-MNIST, {which}, {name}"))
            arrays[f"images_{model}_{scrambled[0]}"] = ratio
    return Artifact(
        "hs.controls",
        "What paths follow",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        {
            "paths, simple / complex, at each epoch": {key: values.tolist() for key, values in arrays.items()},
            "mean norm of an image": norms,
        },
        SIZES["hs.controls"]["paper"],
        {},
        (CONTROLS, CIRCLE, SETTINGS, CLUSTERS, TRAINING),
        {"active paths": "hard"},
        {key: value.astype(np.float32) for key, value in arrays.items()},
        figures=panels.controls(list(NAMES.values())),
    )
