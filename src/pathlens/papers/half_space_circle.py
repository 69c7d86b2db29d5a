"""Half-Space Feature Learning: the circle experiments of Figures 2, 3, 5 and 6.

One training (ReLU, DLGN-PWC, and DLGN-PWC with frozen gates; all seeds at once) serves all four. Torch is imported
inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import OptionError, RecordError
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.pages.words import number, read_spread
from pathlens.papers.panels import Panel, Series
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.records import Record
    from pathlens.training import Runs

PAPER = "Half-Space Feature Learning"
MODELS = ("relu", "dlgn_pwc", "frozen")
NAMES = {"relu": "ReLU", "dlgn_pwc": "DLGN-PWC", "frozen": "DLGN-PWC, gates frozen"}
COLOURS = {"relu": "relu", "dlgn_pwc": "dlgn", "frozen": "frozen"}
ANGLES = tuple((k * math.pi / 2, word) for k, word in enumerate(("0", "π/2", "π", "3π/2", "2π")))
BETA, FROZEN_BETA = 4.0, 10.0
# what other experiments on the circle take from these
HIDDEN = tuple(SIZES["hs.fig2"]["paper"]["hidden"])
RATE, BATCH = (SIZES["hs.fig2"]["paper"][key] for key in ("lr", "batch_size"))
KERNEL_EPOCHS = (0, 3, 200)
RATIO_EPOCHS = (0, 1, 3, 10, 30, 100, 200)
EARLY = 10  # an epoch by which the slow half is learned and the fast one is not
KERNEL_POINTS = 256
TOP_ANGLE = math.radians(30)
SOFT = {"relu": "hard", "dlgn_pwc": f"soft β={BETA:g}", "frozen": f"soft β={FROZEN_BETA:g}"}

CIRCLE = Deviation(
    paper="the target varies slowly on one half of the circle and fast on the other; no formula is printed",
    authors_code="not public",
    ours="y = sin θ on the top half, sin 12θ on the bottom, 1024 evenly spaced points",
    why="unit sinusoids of equal weight have the paper's initial loss .5, and .25 once the slow half is learned",
)
SETTINGS = Deviation(
    paper="optimiser, rate, batch size, gate slope and number of seeds are not stated",
    authors_code="other public DLGN code trains soft gates σ(βη) with β = 4, Adam, default initialisation, no bias",
    ours=f"Adam {RATE:g}, batches of {BATCH}, default initialisation, no bias, soft gates β = {BETA:g} "
    f"(frozen: β = {FROZEN_BETA:g})",
    why="hard gates have no gradient; these settings give the paper's curves",
)
FROZEN = Deviation(
    paper="one curve for the DLGN with a fixed random gating model",
    authors_code="not public",
    ours=f"soft gates with β = {FROZEN_BETA:g}, frozen at initialisation",
    why="frozen hard PWC gates hit a floor of capacity instead of being slow, and frozen soft gates with β = 4 "
    "never arrive",
)


@dataclass
class Circle:
    """The data and the trained networks that the four figures share."""

    data: DataSet
    runs: dict[str, Runs]

    @property
    def top(self) -> np.ndarray:
        return self.data.marks["top"].numpy()

    def record(self, model: str, member: int, epoch: int) -> Record:
        """Gates and outputs on all points at an epoch."""
        found = self.runs[model][member].at_epoch(epoch).record
        if found is None:
            raise RecordError(f"{NAMES[model]}: no record was kept at epoch {epoch}.")
        return found

    def shown(self, model: str) -> int:
        """The member that pictures show: the one with the median loss at the end."""
        final = [t.history["loss"][-1] for t in self.runs[model]]
        return int(np.argsort(final)[(len(final) - 1) // 2])


def _network(model: str, hidden: list[int]) -> Any:
    from pathlens import models

    if model == "relu":
        return models.relu(2, hidden)
    frozen = model == "frozen"
    return models.dlgn(2, hidden, piecewise_constant=True, frozen=frozen, beta=FROZEN_BETA if frozen else BETA)


def _sizes(run: Run) -> dict[str, Any]:
    """The sizes of the one training; all four figures have the same."""
    return run.sizes_of("hs.fig2")


def _kept(last: int) -> list[int]:
    return sorted({e for e in (*RATIO_EPOCHS, EARLY, 50, last) if e <= last})


def train_circle(run: Run) -> Circle:
    """Train the three models, all seeds of one model at once."""

    def compute() -> Circle:
        from pathlens.data import circle
        from pathlens.training import Keep, train

        size = _sizes(run)
        data = circle(size["points"])
        runs: dict[str, Any] = {}
        for model in MODELS:
            last = size["epochs"][model]
            runs[model] = train(
                _network(model, size["hidden"]),
                data,
                epochs=last,
                lr=size["lr"],
                batch_size=size["batch_size"],
                seeds=run.seeds,
                keep=Keep(_kept(last), X=data.x, sensitivities=False),
                device=run.device,
                checkpoints=checkpoints_in(run.checkpoint("circle", model), every=50),
                progress=functools.partial(run.progress, NAMES[model]),
            )
        return Circle(data, runs)

    return run.once("circle", compute)


def check_epochs(run: Run, name: str, models: Iterable[str]) -> None:
    """Refuse trainings that end before the last epoch that a figure looks at, before they begin."""
    last = KERNEL_EPOCHS[-1]
    short = [NAMES[model] for model in models if _sizes(run)["epochs"][model] < last]
    if short:
        raise OptionError(
            f"{name} looks at epoch {last}, and the training of {', '.join(short)} would end before it. "
            f"Set epochs to {last} or more."
        )


def _config(run: Run) -> dict[str, Any]:
    return {**_sizes(run), "beta": BETA, "frozen_beta": FROZEN_BETA}


def circle_operations(size: dict[str, Any]) -> float:
    """Floating-point operations of the three trainings: gates that learn are a second network, frozen ones one pass."""
    forward = 2 * sum(a * b for a, b in pairwise((2, *size["hidden"], 1)))
    epochs = size["epochs"]
    passes = 3 * epochs["relu"] + 6 * epochs["dlgn_pwc"] + 4 * epochs["frozen"]
    return float(forward * passes * size["points"] * size["seeds"])


def _gates(*models: str) -> dict[str, str]:
    return {NAMES[m]: SOFT[m] for m in models}


# --- figure 2 --------------------------------------------------------------------------------------------------

_REACHES = Claim(
    "learned gates bring the loss under .01 in about 200 epochs",
    threshold=400,
    comparison="<=",
    null=2000,
    null_text="what the paper reports for frozen gates",
    paper="about 200 epochs",
    unit="epochs",
)
_SLOW = Claim(
    "frozen gates need more than 2000 epochs to reach .01",
    threshold=2000,
    comparison=">",
    null=200,
    null_text="as fast as learned gates",
    paper="more than 2000 epochs",
    unit="epochs",
)
_BEHIND = Claim(
    "when the DLGN with learned gates is under .01, the one with frozen gates is still above .1",
    threshold=0.1,
    comparison=">",
    null=0.01,
    null_text="frozen gates as good as learned ones",
    paper="Figure 2",
)


def _never_or_unknown(epochs: list[int | None], trained: int, limit: float) -> list[float | None]:
    """Epochs as numbers; not arriving is 'never' only if the run was longer than the claim's limit."""
    return [float(e) if e is not None else (math.inf if trained > limit else None) for e in epochs]


def fig2_panels(arrays: Mapping[str, np.ndarray], metrics: Mapping[str, Any]) -> list[Panel]:
    """Target over the angle, the circle coloured by the target, and the training losses."""
    trained = {m: arrays[f"loss_{m}"].shape[1] - 1 for m in MODELS}
    reached = "; ".join(
        f"{NAMES[m]} {read_spread(epochs['0.01'], f'>{trained[m]}')}" for m, epochs in metrics["epochs_to"].items()
    )
    return [
        Panel(
            "lines",
            "target y",
            [Series("y", colour="ink")],
            "theta",
            "angle θ",
            x_ticks=ANGLES,
            shade=(0, math.pi),
            note="The target is slow on the top half of the circle (shaded) and fast on the bottom half.",
        ),
        Panel(
            "points",
            "the data, coloured by the target",
            [Series("x[:, 1]", x="x[:, 0]", colour_by="y")],
            marks=[(0.0, "top half above, bottom half below")],
        ),
        Panel(
            "lines",
            "training loss",
            [Series(f"loss_{m}", NAMES[m], colour=COLOURS[m]) for m in MODELS],
            x_label="epoch",
            x_scale="log",
            y_scale="log",
            marks=[(0.25, "0.25: one half learned"), (0.01, "0.01: both halves learned")],
            note="A loss of 0.25 is left when one half is learned: look at how quickly each network gets there, and "
            f"how long it then stays. Epochs until the loss is below 0.01, median (range): {reached}.",
        ),
    ]


@experiment(
    "hs.fig2",
    title="Loss on the circle: learned against frozen gates",
    what="circle data; training loss of ReLU, DLGN-PWC and DLGN-PWC with frozen gates",
    claims=[_REACHES, _SLOW, _BEHIND],
    minutes=(1, 12),
    flops=circle_operations,
    shares="circle",
)
def fig2(run: Run) -> Artifact:
    """Figure 2: target, data, and loss curves."""
    c = train_circle(run)
    epochs = _sizes(run)["epochs"]
    reached = {m: {level: c.runs[m].epochs_to(float(level)) for level in ("0.25", "0.01")} for m in MODELS}
    learned = [e for e in reached["dlgn_pwc"]["0.01"] if e is not None]
    meeting = int(np.median(learned)) if learned else None
    behind = [
        t.history["loss"][meeting] if meeting is not None and meeting <= epochs["frozen"] else None
        for t in c.runs["frozen"]
    ]
    claims = [
        _REACHES.measure([math.inf if e is None else e for e in reached[m]["0.01"]], row=NAMES[m])
        for m in ("relu", "dlgn_pwc")
    ]
    claims.append(_SLOW.measure(_never_or_unknown(reached["frozen"]["0.01"], epochs["frozen"], 2000)))
    claims.append(_BEHIND.measure(behind))
    arrays = {"theta": c.data.marks["theta"].numpy(), "x": c.data.x.numpy(), "y": c.data.y[:, 0].numpy()}
    arrays |= {f"loss_{m}": c.runs[m].history() for m in MODELS}
    return Artifact(
        "hs.fig2",
        "Loss on the circle: learned against frozen gates",
        PAPER,
        run.scale,
        _config(run),
        run.seeds,
        tuple(claims),
        {"epochs_to": reached},
        {},
        {"epochs to .01": {"ReLU and DLGN": "about 200", "frozen": "more than 2000"}},
        (CIRCLE, SETTINGS, FROZEN),
        _gates(*MODELS),
        {k: v.astype(np.float32) for k, v in arrays.items()},
        figures=fig2_panels(arrays, {"epochs_to": reached}),
    )


# --- figure 3 --------------------------------------------------------------------------------------------------

_EARLY = Claim(
    "at epoch 3, far more paths of the DLGN are active on the slow half",
    threshold=2.0,
    comparison=">",
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3",
    unit="× (mean diagonal, top / bottom)",
)
_LATE = Claim(
    "at epoch 200, more paths of the DLGN are still active on the slow half",
    threshold=2.0,
    comparison=">",
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3",
    unit="× (mean diagonal, top / bottom)",
)
_STAYS = Claim(
    "the DLGN's ratio stays more or less the same from epoch 3 to 200",
    threshold=0.5,
    comparison=">",
    null=0.25,
    null_text="it falls fourfold",
    paper="'stays more or less the same till the end'",
    unit="× (ratio at 200 / ratio at 3)",
)
_RELU_DIAGONAL = Claim(
    "at epoch 200, more paths of the ReLU network are active on the slow half",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3",
    unit="× (mean diagonal, top / bottom)",
)
_RELU_BLOCK = Claim(
    "at epoch 200, inputs of the slow half share more paths of the ReLU network with each other",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as many shared paths on either half",
    paper="Figure 3",
    unit="× (mean top-top block / bottom-bottom block)",
)


def _ratios(record: Any, top: np.ndarray) -> tuple[float, float]:
    """Mean diagonal of the overlap kernel on top over below, and the same for the two diagonal blocks."""
    from pathlens.kernels import overlap

    K = overlap(record)
    diagonal = K.diagonal().double().numpy()
    dense = K.dense().double().numpy()
    blocks = dense[np.ix_(top, top)].mean() / dense[np.ix_(~top, ~top)].mean()
    return float(diagonal[top].mean() / diagonal[~top].mean()), float(blocks)


def _when(epoch: float) -> str:
    return "at initialisation" if epoch == 0 else f"epoch {epoch:g}"


def fig3_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Overlap kernels as matrices, and the ratio of top to bottom over training."""
    epochs, points, said = arrays["ratio_epochs"], len(arrays["theta_kernel"]), []
    for m in ("relu", "dlgn_pwc"):
        ratio = arrays[f"diag_ratio_{m}"]
        finite = [column[np.isfinite(column)] for column in ratio.T]
        peak = int(np.argmax([np.median(column) if len(column) else -np.inf for column in finite]))
        said.append(
            f"{NAMES[m]} {read_spread(ratio[:, 0], '∞')} at first, {read_spread(ratio[:, peak], '∞')} at its largest "
            f"(epoch {epochs[peak]:g}), {read_spread(ratio[:, -1], '∞')} at the end"
        )
    notes = {
        "relu": "Entry (s, t) counts the paths that are active for both points s and t. Points are ordered by angle, "
        "the top half first; each matrix is divided by its trace.",
        "dlgn_pwc": "A bright upper-left block means that paths gather on the half where the target is slow.",
        "diag_ratio": f"Median (range): {'; '.join(said)}.",
    }
    kernels = [
        Panel(
            "matrices",
            f"{NAMES[m]}: overlap kernel",
            [Series(f"kernel_{m}[{k}]", _when(epoch), colour=COLOURS[m]) for k, epoch in enumerate(arrays["epochs"])],
            "theta_kernel",
            y_scale="sqrt",
            marks=[(points / 2, "top half, bottom half")],
            note=notes[m],
        )
        for m in ("relu", "dlgn_pwc")
    ]
    ratios = [
        Panel(
            "lines",
            title,
            [Series(f"{stem}_{m}", NAMES[m], colour=COLOURS[m]) for m in ("relu", "dlgn_pwc")],
            "ratio_epochs",
            "epoch",
            x_scale="log",
            y_scale="log",
            marks=[(1.0, "as many on either half")],
            note=notes.get(stem, ""),
        )
        for stem, title in (("diag_ratio", "mean diagonal, top ÷ bottom"), ("block_ratio", "block mean, top ÷ bottom"))
    ]
    return kernels + ratios


@experiment(
    "hs.fig3",
    title="The overlap kernel moves early",
    what="overlap kernel of ReLU and DLGN-PWC at init, epoch 3 and epoch 200",
    claims=[_EARLY, _LATE, _STAYS, _RELU_DIAGONAL, _RELU_BLOCK],
    minutes=(1, 12),
    flops=circle_operations,
    shares="circle",
)
def fig3(run: Run) -> Artifact:
    """Figure 3: how many paths two inputs share, from hard gates, trace-normalised."""
    from pathlens.kernels import overlap

    check_epochs(run, "hs.fig3", ("relu", "dlgn_pwc"))
    c = train_circle(run)
    step = max(len(c.data) // KERNEL_POINTS, 1)
    arrays: dict[str, np.ndarray] = {
        "epochs": np.array(KERNEL_EPOCHS),
        "ratio_epochs": np.array(RATIO_EPOCHS),
        "theta_kernel": c.data.marks["theta"].numpy()[::step],
    }
    diagonal, block = {}, {}
    for m in ("relu", "dlgn_pwc"):
        members = range(len(run.seeds))
        found = np.array([[_ratios(c.record(m, i, e), c.top) for e in RATIO_EPOCHS] for i in members])
        diagonal[m], block[m] = found[:, :, 0], found[:, :, 1]
        arrays[f"diag_ratio_{m}"], arrays[f"block_ratio_{m}"] = diagonal[m], block[m]
        shown = [overlap(c.record(m, c.shown(m), e))[::step, ::step] for e in KERNEL_EPOCHS]
        arrays[f"kernel_{m}"] = np.stack([K.normalised().dense().numpy() for K in shown])
    at = {e: i for i, e in enumerate(RATIO_EPOCHS)}
    claims = (
        _EARLY.measure(diagonal["dlgn_pwc"][:, at[3]]),
        _LATE.measure(diagonal["dlgn_pwc"][:, at[200]]),
        _STAYS.measure(diagonal["dlgn_pwc"][:, at[200]] / diagonal["dlgn_pwc"][:, at[3]]),
        _RELU_DIAGONAL.measure(diagonal["relu"][:, at[200]]),
        _RELU_BLOCK.measure(block["relu"][:, at[200]]),
    )
    return Artifact(
        "hs.fig3",
        "The overlap kernel moves early",
        PAPER,
        run.scale,
        _config(run),
        run.seeds,
        claims,
        {m: {"diagonal": diagonal[m].tolist(), "block": block[m].tolist()} for m in diagonal},
        {},
        {},
        (CIRCLE, SETTINGS),
        {"overlap kernels": "hard"},
        {k: v.astype(np.float32) for k, v in arrays.items()},
        figures=fig3_panels(arrays),
    )


# --- figure 5 --------------------------------------------------------------------------------------------------

_FIRST = Claim(
    f"the slow half is learned first: at epoch {EARLY} the error on the fast half is several times larger",
    threshold=4.0,
    comparison=">",
    null=1.0,
    null_text="both halves equally well",
    paper="Figure 5",
    unit="× (mean squared error, bottom / top)",
)
_ARTEFACTS = Claim(
    "frozen gates leave artefacts on the slow half at the end of training",
    threshold=2.0,
    comparison=">",
    null=1.0,
    null_text="as smooth as with learned gates",
    paper="'high frequency artifacts … even after 8000 epochs'",
    unit="× (root mean squared error on top, frozen / learned)",
)


def fig5_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Outputs over the angle at several epochs, one panel per model, the target behind."""
    y, top = arrays["y"], arrays["theta"] < math.pi
    panels = []
    for m in MODELS:
        errors = [number(float(np.mean((arrays[f"outputs_{m}"][-1] - y)[half] ** 2)), 2) for half in (top, ~top)]
        epochs = arrays[f"epochs_{m}"]
        panels.append(
            Panel(
                "stacks",
                NAMES[m],
                [Series(f"outputs_{m}[{k}]", _when(epoch), colour=COLOURS[m]) for k, epoch in enumerate(epochs)],
                "theta",
                "angle θ",
                x_ticks=ANGLES,
                shade=(0, math.pi),
                y_limits=(-1.6, 1.6),
                background="y",
                note=f"Output (colour) and target (grey) of one seed. Mean squared error at {_when(epochs[-1])}: "
                f"{errors[0]} on the top half, {errors[1]} on the bottom half.",
            )
        )
    return panels


@experiment(
    "hs.fig5",
    title="What the networks compute over time",
    what="model outputs over epochs: ReLU, DLGN-PWC, DLGN-PWC with frozen gates",
    claims=[_FIRST, _ARTEFACTS],
    minutes=(1, 12),
    flops=circle_operations,
    shares="circle",
)
def fig5(run: Run) -> Artifact:
    """Figure 5: outputs over the angle at several epochs."""
    check_epochs(run, "hs.fig5", MODELS)
    c = train_circle(run)
    y = c.data.y[:, 0].numpy()
    arrays: dict[str, np.ndarray] = {"theta": c.data.marks["theta"].numpy(), "y": y}

    def outputs(model: str, member: int, epoch: int) -> np.ndarray:
        return c.record(model, member, epoch).f[:, 0].numpy()

    def error(model: str, member: int, epoch: int, half: np.ndarray) -> float:
        return float(np.mean((outputs(model, member, epoch)[half] - y[half]) ** 2))

    for m in MODELS:
        last = _sizes(run)["epochs"][m]
        epochs = (3, 200, last) if m == "frozen" else (3, 50, 200)
        arrays[f"epochs_{m}"] = np.array(epochs)
        arrays[f"outputs_{m}"] = np.stack([outputs(m, c.shown(m), e) for e in epochs])
    members = range(len(run.seeds))
    claims = [
        _FIRST.measure([error(m, i, EARLY, ~c.top) / error(m, i, EARLY, c.top) for i in members], row=NAMES[m])
        for m in ("relu", "dlgn_pwc")
    ]
    end = _sizes(run)["epochs"]
    frozen, learned = (np.array([error(m, i, end[m], c.top) for i in members]) for m in ("frozen", "dlgn_pwc"))
    claims.append(_ARTEFACTS.measure(np.sqrt(frozen / learned)))
    return Artifact(
        "hs.fig5",
        "What the networks compute over time",
        PAPER,
        run.scale,
        _config(run),
        run.seeds,
        tuple(claims),
        {},
        {},
        {},
        (CIRCLE, SETTINGS, FROZEN),
        _gates(*MODELS),
        {k: v.astype(np.float32) for k, v in arrays.items()},
        figures=fig5_panels(arrays),
    )


# --- figure 6 --------------------------------------------------------------------------------------------------

_PREFER = Claim(
    "after training, many last-layer half-spaces point to the slow half (within 30°)",
    threshold=1 / 3,
    comparison=">",
    null=1 / 6,
    null_text="random directions: 60° of 360°",
    paper="3 of 4 shown",
    unit="share of layer 5",
)
_DEPTH = Claim(
    "the last layer prefers the slow half more than the first",
    threshold=0.1,
    comparison=">",
    null=0.0,
    null_text="no difference between layers",
    paper="'especially in the last layer'",
    unit="share, layer 5 − layer 1",
)


def gate_normals(state: dict[str, Any]) -> np.ndarray:
    """Unit normals W_l⋯W_1 of every gate of a bias-free fully connected DLGN, shape (L, w, d)."""
    weights = [v.double().numpy() for k, v in state.items() if k.startswith("source.") and k.endswith("weight")]
    product = np.eye(weights[0].shape[1])
    rows = []
    for w in weights:
        product = w @ product
        rows.append(product / np.linalg.norm(product, axis=1, keepdims=True))
    return np.stack(rows)


def fig6_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Every neuron's half-space before and after training, and the share that points to the top."""
    first, last = (read_spread((100 * arrays[f"share_top_{when}"][:, -1]).round(1)) for when in ("init", "end"))
    layers = arrays["share_top_end"].shape[1]
    return [
        Panel(
            "half_spaces",
            "the half-space of every neuron, one seed",
            [Series("normals_init[0]", "at initialisation"), Series("normals_end[0]", "after training")],
        ),
        Panel(
            "lines",
            "share of normals within 30° of the top",
            [
                Series("share_top_init", "at initialisation", colour="muted"),
                Series("share_top_end", "after training", colour="top"),
            ],
            x_label="layer",
            x_ticks=[(k, str(k + 1)) for k in range(layers)],
            marks=[(1 / 6, "random directions")],
            note=f"In the last layer {first} % at initialisation and {last} % after training, median (range); random "
            "directions would give 16.7 %.",
        ),
    ]


@experiment(
    "hs.fig6",
    title="The half-spaces of every neuron",
    what="half-spaces of a DLGN-PWC at initialisation and at the end, per layer",
    claims=[_PREFER, _DEPTH],
    minutes=(1, 12),
    flops=circle_operations,
    shares="circle",
)
def fig6(run: Run) -> Artifact:
    """Figure 6 (with 9 and 10): where each gate's half-space points."""
    if len(set(_sizes(run)["hidden"])) > 1:
        raise OptionError(f"hs.fig6 compares layers of one width, got hidden={_sizes(run)['hidden']}. Set equal ones.")
    c = train_circle(run)
    last = _sizes(run)["epochs"]["dlgn_pwc"]

    def normals(epoch: int) -> np.ndarray:
        return np.stack([gate_normals(t.at_epoch(epoch).snapshot.state) for t in c.runs["dlgn_pwc"]])  # type: ignore[union-attr]

    arrays = {"normals_init": normals(0), "normals_end": normals(last)}
    for when in ("init", "end"):
        towards_top = arrays[f"normals_{when}"][..., 1] > math.cos(TOP_ANGLE)
        arrays[f"share_top_{when}"] = towards_top.mean(axis=2)
    end = arrays["share_top_end"]
    return Artifact(
        "hs.fig6",
        "The half-spaces of every neuron",
        PAPER,
        run.scale,
        _config(run),
        run.seeds,
        (_PREFER.measure(end[:, -1]), _DEPTH.measure(end[:, -1] - end[:, 0])),
        {"share within 30° of the top": {w: arrays[f"share_top_{w}"].tolist() for w in ("init", "end")}},
        {},
        {"last layer at the end": "3 of the 4 neurons shown"},
        (CIRCLE, SETTINGS),
        {"half-spaces": "hard", "trained with": SOFT["dlgn_pwc"]},
        {k: v.astype(np.float32) for k, v in arrays.items()},
        figures=fig6_panels(arrays),
    )
