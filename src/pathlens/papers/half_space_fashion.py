"""Half-Space Feature Learning on modified Fashion-MNIST: allocation of paths (Figures 7, 11, 12), kernels (13 to 16).

One training of a ReLU network and of a DLGN-PWC serves both; what else is done with such trainings is in
half_space_early and half_space_remedies. Torch is imported inside functions, so that listing stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_fashion_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.image_runs import accuracies, hard_accuracies, options
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

PAPER = "Half-Space Feature Learning"
NAMES = {"relu": "ReLU", "dlgn_pwc": "DLGN-PWC"}
PARTS = panels.PARTS
SCRAMBLED = (5, 6, 7, 8, 9)
MIDDLE = 72.0  # per cent on the easy part, where the paper takes its kernels 'at middle'
EVERY_EPOCH_UNTIL = 32  # weights are kept after every epoch until this one, then after every tenth and the last
CURVE = (0, 1, 2, 3, 5, 7, 10, 15, 20, 25, 32, 50, 70, 100)  # epochs at which paths are counted

CLUSTERS = Deviation(
    paper="the images of each of five classes are cut into five groups 'based on a type of clustering', and the 25 "
    "groups get labels 6 to 10 at random",
    authors_code="not public",
    ours="k-means on the training pixels of each class, test images to the nearest centre, each label five times",
    why="the clustering is not named; centres from the training rows alone keep the test rows out of the labels",
)
TRAINING = Deviation(
    paper="Adam 2e-4, five hidden layers of 128; epochs, batch size, gate slope and biases are not stated",
    authors_code="public DLGN image code: batches of 128, 32 epochs, soft gates β = 4, default initialisation, biases",
    ours="paper scale: the paper's numbers, the code's where it is silent, pixels in [0, 1]; quick scale: a subsample, "
    "narrower layers and a larger rate, as the configuration says",
    why="'the images are used as-is'; and with biases and default initialisation the ReLU network's NTK starts flat, "
    "as in Figure 16a",
)
COUNTS = Deviation(
    paper="the number of active paths; the DLGN is defined with hard gates",
    authors_code="hard gates in analysis only",
    ours="exact integers from the hard gates of the network that was trained with soft ones; its NTK with soft gates",
    why="soft gates have no path that is off, and hard ones no gradient",
)


@dataclass(frozen=True)
class Setting:
    """What decides a training on modified Fashion-MNIST, beyond the run's seeds and device."""

    rows: int
    rows_test: int
    width: int
    hidden_layers: int
    epochs: int
    batch_size: int
    lr: float
    beta: float
    scrambled: tuple[int, ...] = SCRAMBLED

    @classmethod
    def of(cls, sizes: Mapping[str, Any], scrambled: Sequence[int] = SCRAMBLED) -> Setting:
        """From the sizes of an experiment, which may hold more."""
        names = [name for name in cls.__dataclass_fields__ if name != "scrambled"]
        return cls(**{name: sizes[name] for name in names}, scrambled=tuple(scrambled))

    @property
    def kept(self) -> list[int]:
        """Epochs after which the weights are kept."""
        dense = range(min(self.epochs, EVERY_EPOCH_UNTIL) + 1)
        return sorted({*dense, *range(10, self.epochs, 10), self.epochs})

    @property
    def words(self) -> list[str]:
        """Names a folder for checkpoints."""
        classes = "".join(map(str, self.scrambled))
        return ["fashion", classes, f"{self.rows}rows", f"{self.width}x{self.hidden_layers}", f"{self.epochs}epochs"]


def training_flops(sizes: Mapping[str, Any], networks: float) -> float:
    """Operations of training on modified Fashion-MNIST; a DLGN counts as two networks, its gates and its values."""
    w, layers = sizes["width"], sizes["hidden_layers"]
    weights = 784 * w + (layers - 1) * w**2 + 10 * w
    return 6.0 * networks * weights * sizes["rows"] * sizes["epochs"] * sizes["seeds"]


def fashion(run: Run, setting: Setting) -> DataSet:
    """Modified Fashion-MNIST as flat pixels in [0, 1], subsampled; clusters are those of the whole training set."""

    def compute() -> DataSet:
        from pathlens.data import modified_fashion_mnist

        full = modified_fashion_mnist(setting.scrambled, flatten=True)
        return full.subsample(setting.rows, n_test=setting.rows_test, seed=0)

    return run.once(("modified Fashion-MNIST", setting.scrambled, setting.rows, setting.rows_test), compute)


def network(model: str, setting: Setting, inputs: int, **more: Any) -> GatedNetwork:
    """The ReLU network or the DLGN-PWC of the appendix, with biases."""
    from pathlens import models

    hidden = (setting.width,) * setting.hidden_layers
    if model == "relu":
        return models.relu(inputs, hidden, 10, bias=True)
    return models.dlgn(inputs, hidden, 10, piecewise_constant=True, beta=setting.beta, bias=True, **more)


def train_options(run: Run, setting: Setting, data: DataSet, label: str, *words: str) -> dict[str, Any]:
    """Options of `train`; the held-out rows that it follows are the simple part of the test rows.

    In full precision everywhere: soft gates start near one half, and what tells inputs apart would drown in bfloat16.
    """
    assert data.x_test is not None and data.y_test is not None
    simple = data.marks_test["simple"]
    return {
        **options(run, label, *setting.words, *words),
        "keep": None,
        "execution": None,
        "epochs": setting.epochs,
        "lr": setting.lr,
        "batch_size": setting.batch_size,
        "validation": (data.x_test[simple], data.y_test[simple]),
    }


@dataclass
class Trained:
    """One architecture trained on modified Fashion-MNIST, all seeds."""

    setting: Setting
    data: DataSet
    model: str
    runs: Runs

    def network(self, member: int, epoch: int) -> GatedNetwork:
        """A member as it was after an epoch."""
        return restored(self.runs, network(self.model, self.setting, self.data.d), member, epoch)

    def part_accuracies(self) -> np.ndarray:
        """Test accuracy in % on the simple and on the complex part, (seeds, epochs + 1, 2)."""
        return part_accuracies(self.runs, self.data)

    def middle(self) -> list[int | None]:
        """Per seed the first epoch with at least 72 % on the easy part."""
        return [next(iter(np.flatnonzero(row >= MIDDLE).tolist()), None) for row in self.part_accuracies()[..., 0]]


def restored(runs: Runs, pattern: GatedNetwork, member: int, epoch: int, prefix: str = "") -> GatedNetwork:
    """The pattern with the weights that a member had after an epoch; ``prefix`` is what a wrapper put before names."""
    kept = runs[member].at_epoch(epoch).snapshot
    assert kept is not None  # every moment holds the weights
    pattern.load_state_dict({name.removeprefix(prefix): values for name, values in kept.state.items()})
    return pattern.eval()


def part_accuracies(runs: Runs, data: DataSet) -> np.ndarray:
    """Test accuracy in % on the simple and on the complex part, (seeds, epochs + 1, 2), from the two that were kept."""
    simple = data.marks_test["simple"].numpy()
    every, easy = 100 * runs.history("test_accuracy"), 100 * runs.history("validation_accuracy")
    hard = (every * len(simple) - easy * simple.sum()) / (~simple).sum()
    return np.stack([easy, hard], axis=-1)


def train_fashion(run: Run, model: str, setting: Setting) -> Trained:
    """Train one architecture, all seeds at once."""

    def compute() -> Trained:
        from pathlens.training import train

        data = fashion(run, setting)
        chosen = train_options(run, setting, data, NAMES[model], model) | {"keep": setting.kept}
        runs: Any = train(network(model, setting, data.d), data, **chosen)
        return Trained(setting, data, model, runs)

    return run.once(("fashion", model, setting), compute)


def mean_paths(net: GatedNetwork, x: Any, simple: np.ndarray) -> np.ndarray:
    """Mean number of active paths on simple and on complex rows, from exact counts of hard gates."""
    from pathlens.paths import count

    counts = np.array(count(net, x), dtype=object)  # larger than 64 bits
    return np.array([float(sum(counts[part])) / part.sum() for part in (simple, ~simple)])


# --- figure 7 --------------------------------------------------------------------------------------------------

_MORE = Claim(
    "after training, more paths are active on the simple part",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as many on either part",
    paper="Figures 7, 11, 12",
    unit="× (mean active paths, simple / complex)",
)
_ALWAYS = Claim(
    "the simple part has more paths consistently, from the first epoch on",
    threshold=0.9,
    comparison=">=",
    null=0.5,
    null_text="either part may lead",
    paper="'consistently higher than the complex part'",
    unit="share of the measured epochs",
)
_DIAGONAL = Claim(
    "after training, the diagonal of the NTK is larger on the simple part",
    threshold=1.25,
    comparison=">",
    null=1.0,
    null_text="as large on either part",
    paper="Figures 7, 11, 12; in 16b, 73 / 27 of the trace",
    unit="× (mean diagonal of the NTK, simple / complex)",
)
_FIRST = Claim(
    f"the simple part is learned first: when it is at {MIDDLE:g} %, the complex part is mostly not learned",
    threshold=50.0,
    comparison="<",
    null=72.0,
    null_text="both parts alike",
    paper="'72 out of 85 … but the hard mode is still mostly not learned yet'",
    unit="% right on the complex part",
)


def _allocation(run: Run, t: Trained, measured: int, epochs: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean active paths and mean NTK diagonal on the simple and the complex part, each (seeds, epochs, 2)."""
    from pathlens import kernels
    from pathlens.recording import record

    assert t.data.x_test is not None
    x, simple = t.data.x_test[:measured].to(run.device), t.data.marks_test["simple"][:measured].numpy()
    paths, diagonal = np.empty((2, len(t.runs), len(epochs), 2))
    for i in range(len(t.runs)):
        for j, epoch in enumerate(epochs):
            net = t.network(i, epoch).to(run.device)
            taken = record(net, x)
            paths[i, j] = mean_paths(net, taken, simple)
            entries = kernels.ntk(taken).diagonal().double().cpu().numpy()
            diagonal[i, j] = entries[simple].mean(), entries[~simple].mean()
            run.progress(f"paths, {NAMES[t.model]}", i * len(epochs) + j + 1, len(t.runs) * len(epochs))
    return paths, diagonal


@experiment(
    "hs.fig7",
    title="Paths go to the simple classes",
    what="modified Fashion-MNIST: active paths and NTK diagonal on simple and complex classes, ReLU and DLGN-PWC",
    claims=[_MORE, _ALWAYS, _DIAGONAL, _FIRST],
    data=("fashion_mnist",),
    minutes=(2, 5),
    flops=lambda sizes: training_flops(sizes, 1) + training_flops(sizes, 2),
    shares="fashion",
)
def fig7(run: Run) -> Artifact:
    """Figures 7, 11 and 12."""
    sizes = run.sizes_of("hs.fig7")
    setting = Setting.of(sizes)
    epochs = sorted({e for e in (*CURVE, setting.epochs) if e <= setting.epochs and e in setting.kept})
    arrays: dict[str, Any] = {"epochs": epochs}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for model, name in NAMES.items():
        t = train_fashion(run, model, setting)
        paths, diagonal = _allocation(run, t, sizes["measured"], epochs)
        accuracy, middle = t.part_accuracies(), t.middle()
        ratio = paths[..., 0] / paths[..., 1]
        claims += [
            _MORE.measure(ratio[:, -1], row=name),
            _ALWAYS.measure((ratio[:, 1:] > 1).mean(1), row=name),
            _DIAGONAL.measure(diagonal[:, -1, 0] / diagonal[:, -1, 1], row=name),
            _FIRST.measure([None if e is None else accuracy[i, e, 1] for i, e in enumerate(middle)], row=name),
        ]
        metrics[name] = {
            "paths, simple / complex": {
                "at initialisation": ratio[:, 0].tolist(),
                "at the end": ratio[:, -1].tolist(),
                "mean ± sd at the end": _mean_sd(ratio[:, -1]),
            },
            "active paths at the end": {part: _mean_sd(paths[:, -1, k]) for k, part in enumerate(PARTS)},
            "first epoch with 72 % on the simple part": middle,
            "test accuracy, last epoch, mean ± sd": {
                **{part: _mean_sd(accuracy[:, -1, k]) for k, part in enumerate(PARTS)},
                **{f"all, {when}": _mean_sd(values) for when, values in accuracies(t.runs).items()},
                "all, hard gates": _mean_sd(hard_accuracies(t.runs, t.data, run.device)),
            },
        }
        arrays |= {
            f"paths_{model}": paths,
            f"ntk_{model}": diagonal,
            f"accuracy_{model}": accuracy,
            f"ratio_{model}": ratio,
        }
    return Artifact(
        "hs.fig7",
        "Paths go to the simple classes",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["hs.fig7"]["paper"],
        {"numbers": "in pictures alone"},
        (CLUSTERS, TRAINING, COUNTS),
        {"active paths": "hard", "DLGN-PWC, NTK and accuracy": f"soft β={setting.beta:g}", "ReLU": "hard"},
        {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()},
        figures=panels.allocation(NAMES),
    )


def _mean_sd(values: Any) -> str:
    """Mean ± standard deviation over seeds, as text for the page."""
    values = np.asarray(values, dtype=float)
    return f"{values.mean():.4g} ± {values.std(ddof=1) if len(values) > 1 else 0.0:.2g}"


# --- figures 13 to 16 ------------------------------------------------------------------------------------------

# rows and columns of classes 2 to 10 as printed; what is left of class 1's row is not complete
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
MOMENTS = ("init", "middle", "end")

KERNELS = Deviation(
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
    threshold=0.1,
    comparison=">",
    null=0.0,
    null_text="no more than at initialisation",
    paper="Figures 13 to 16",
    unit="gain of (mean within a part − mean across) / mean diagonal",
)
_AS_16A = Claim(
    "the ReLU network's NTK starts flat, as printed in Figure 16a",
    threshold=0.15,
    comparison="<=",
    null=1.0,
    null_text="classes differ by a tenth",
    paper="Figure 16a: 9.93 to 10.05",
    unit="largest |ours − printed|",
)
_AS_16B = Claim(
    "the ReLU network's NTK at middle has the pattern of Figure 16b",
    threshold=0.8,
    comparison=">=",
    null=0.0,
    null_text="no likeness",
    paper="Figure 16b",
    unit="correlation with the printed entries",
)
_SHARE_16B = Claim(
    "at middle, most of the trace of the ReLU network's NTK is on the simple classes",
    threshold=1.5,
    comparison=">",
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


def _blocks(run: Run, t: Trained, per_class: int) -> dict[str, np.ndarray]:
    """Class-averaged overlap kernel and NTK of trace 100 at the three moments, each (seeds, 3, 10, 10); NaN where the
    middle was not reached."""
    import torch

    from pathlens import kernels
    from pathlens.recording import record

    assert t.data.x_test is not None and t.data.y_test is not None
    y = t.data.y_test
    chosen = torch.cat([(y == label).nonzero()[:per_class, 0] for label in range(10)])
    x, labels = t.data.x_test[chosen].to(run.device), y[chosen]
    found = {kernel: np.full((len(t.runs), 3, 10, 10), np.nan) for kernel in ("overlap", "ntk")}
    for i, middle in enumerate(t.middle()):
        for j, epoch in enumerate((0, middle, t.setting.epochs)):
            if epoch is None or epoch not in t.setting.kept:
                continue
            taken = record(t.network(i, epoch).to(run.device), x)
            for kernel, K in (("overlap", kernels.overlap(taken)), ("ntk", kernels.ntk(taken))):
                found[kernel][i, j] = kernels.class_blocks(K, labels).cpu().numpy()
        run.progress(f"kernels, {NAMES[t.model]}", i + 1, len(t.runs))
    return found


@experiment(
    "hs.fig13",
    title="Kernels between the classes",
    what="modified Fashion-MNIST: class-averaged overlap kernel and NTK at initialisation, middle and end",
    claims=[_BLOCKS, _AS_16A, _AS_16B, _SHARE_16B],
    data=("fashion_mnist",),
    minutes=(1.5, 4),
    flops=lambda sizes: training_flops(sizes, 1) + training_flops(sizes, 2),
    shares="fashion",
)
def fig13(run: Run) -> Artifact:
    """Figures 13 to 16, from the trainings of Figure 7."""
    sizes = run.sizes_of("hs.fig13")
    setting = Setting.of(sizes)
    arrays: dict[str, Any] = {}
    claims: list[Claim] = []
    metrics: dict[str, Any] = {}
    for model, name in NAMES.items():
        t = train_fashion(run, model, setting)
        for kernel, found in _blocks(run, t, sizes["per_class"]).items():
            arrays[f"{kernel}_{model}"] = found
            label = f"{name}, {'overlap kernel' if kernel == 'overlap' else 'NTK'}"
            contrast = np.array([[block_contrast(b) for b in member] for member in found])
            # images of one part are alike to begin with, so that only the gain is the network's doing
            claims += [_BLOCKS.measure(contrast[:, j] - contrast[:, 0], row=f"{label}, {MOMENTS[j]}") for j in (1, 2)]
            metrics[f"block contrast, {label}"] = dict(zip(MOMENTS, contrast.T.tolist()))
        metrics[f"epoch of the middle, {name}"] = t.middle()
    start, middle = arrays["ntk_relu"][:, 0, 1:, 1:], arrays["ntk_relu"][:, 1, 1:, 1:]
    diagonal = np.diagonal(arrays["ntk_relu"][:, 1], axis1=1, axis2=2)
    likeness = [np.corrcoef(m.ravel(), FIGURE_16B.ravel())[0, 1] for m in middle]
    claims += [
        _AS_16A.measure(abs(start - FIGURE_16A).max((1, 2))),
        _AS_16B.measure(likeness),
        _SHARE_16B.measure(diagonal[:, :5].sum(1) / diagonal[:, 5:].sum(1)),
    ]
    reached = middle[~np.isnan(middle).any((1, 2))]
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
    return Artifact(
        "hs.fig13",
        "Kernels between the classes",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["hs.fig13"]["paper"],
        {"Figure 16a, classes 2 to 10": FIGURE_16A.tolist(), "Figure 16b, classes 2 to 10": FIGURE_16B.tolist()},
        (CLUSTERS, TRAINING, COUNTS, KERNELS),
        {"overlap kernels": "hard", "DLGN-PWC, NTK": f"soft β={setting.beta:g}", "ReLU": "hard"},
        {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()},
        figures=panels.kernels(NAMES),
    )
