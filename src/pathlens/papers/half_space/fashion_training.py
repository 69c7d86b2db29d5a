"""Trainings on modified Fashion-MNIST, in which five classes are simple and five are complex.

One training of a ReLU network and of a DLGN-PWC serves several experiments. Torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import parts
from pathlens.papers.image_runs import options

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs

SCRAMBLED = (5, 6, 7, 8, 9)
MIDDLE = 72.0  # % right on the simple part, at which the paper takes its kernels 'at middle'
# rate, width and layers are the paper's; epochs, batch and β those of the public image code
SIZES = {
    "rows": (3000, 60000),
    "rows_test": (1000, 10000),
    "width": (64, 128),
    "hidden_layers": 5,
    "epochs": (10, 32),
    "batch_size": (32, 128),
    "lr": (1e-3, 2e-4),
    "beta": parts.BETA,
}
FIGURES = {**SIZES, "rows": (6000, 60000), "rows_test": (2000, 10000), "epochs": (15, 32)}  # Figures 7 and 11 to 16

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
    "narrower layers and a larger rate, as in the configuration",
    why="'the images are used as-is'; and with biases and default initialisation the ReLU network's NTK starts flat, "
    "as in Figure 16a",
)
COUNTS = Deviation(
    paper="the number of active paths; the DLGN is defined with hard gates",
    authors_code="hard gates in analysis only",
    ours="exact integers from the hard gates of the network that was trained with soft ones; its NTK with soft gates",
    why="soft gates have no path that is off, and hard ones no gradient",
)


def training_flops(sizes: Mapping[str, Any], networks: float) -> float:
    """Operations of training on modified Fashion-MNIST; a DLGN counts as two networks, its gates and its values."""
    w, layers = sizes["width"], sizes["hidden_layers"]
    weights = 784 * w + (layers - 1) * w**2 + 10 * w
    return 6.0 * networks * weights * sizes["rows"] * sizes["epochs"] * sizes["seeds"]


def load_data(run: Run, scrambled: Sequence[int] = SCRAMBLED) -> DataSet:
    """Modified Fashion-MNIST as flat pixels in [0, 1], subsampled; clusters are those of the whole training set."""
    rows, rows_test = run.sizes["rows"], run.sizes["rows_test"]

    def compute() -> DataSet:
        from pathlens.data import modified_fashion_mnist

        return modified_fashion_mnist(scrambled, flatten=True).subsample(rows, n_test=rows_test, seed=0)

    return run.once(("modified Fashion-MNIST", *scrambled, rows, rows_test), compute)


def measured_rows(run: Run, data: DataSet) -> tuple[Any, np.ndarray]:
    """The first test rows, on the run's device, and which of them are simple."""
    assert data.x_test is not None
    count = run.sizes["measured"]
    return data.x_test[:count].to(run.device), data.marks_test["simple"][:count].numpy()


def network(
    run: Run, model: str, data: DataSet, *, gates: GatedNetwork | None = None, seed: int | None = None
) -> GatedNetwork:
    """The ReLU network or the DLGN-PWC of the appendix, with biases."""
    size = run.sizes
    hidden = (size["width"],) * size["hidden_layers"]
    return parts.network(model, data.d, hidden, 10, bias=True, beta=size["beta"], gates=gates, seed=seed)


def train_options(run: Run, data: DataSet, label: str, *words: str, keep: Sequence[int] = ()) -> dict[str, Any]:
    """Options of `train`; the validation rows are the simple part of the test rows.

    The words name a folder, and the weights are kept after the epochs of `keep`.
    In full precision everywhere: soft gates start near one half, and bfloat16 would lose the differences between
    inputs.
    """
    assert data.x_test is not None and data.y_test is not None
    size, simple = run.sizes, data.marks_test["simple"]
    folder = ("fashion", f"{size['rows']}rows", f"{size['width']}x{size['hidden_layers']}", f"{size['epochs']}epochs")
    return {
        **options(run, label, *folder, *words, keep=keep, evaluate="full", reduced_precision=False),
        "epochs": size["epochs"],
        "lr": size["lr"],
        "batch_size": size["batch_size"],
        "validation": (data.x_test[simple], data.y_test[simple]),
    }


def kept_epochs(epochs: int) -> list[int]:
    """Epochs after which the weights are kept: every one until 32, then every tenth, and the last."""
    return sorted({*range(min(epochs, 32) + 1), *range(10, epochs, 10), epochs})


def train_fashion(run: Run, model: str, scrambled: Sequence[int] = SCRAMBLED) -> Runs:
    """Train one architecture, all seeds at once."""
    size, data = run.sizes, load_data(run, scrambled)

    def compute() -> Any:
        from pathlens.training import train

        words, keep = ("".join(map(str, scrambled)), model), kept_epochs(size["epochs"])
        chosen = train_options(run, data, parts.NAMES[model], *words, keep=keep)
        return train(network(run, model, data), data, **chosen)

    return run.once(("fashion", model, *scrambled, *(size[key] for key in SIZES)), compute)


def part_accuracies(runs: Runs, data: DataSet) -> np.ndarray:
    """Test accuracy in % on the simple and on the complex part, (seeds, epochs + 1, 2)."""
    simple = data.marks_test["simple"].numpy()
    every, easy = 100 * runs.history("test_accuracy"), 100 * runs.history("validation_accuracy")
    hard = (every * len(simple) - easy * simple.sum()) / (~simple).sum()
    return np.stack([easy, hard], axis=-1)


def middle_epochs(accuracy: np.ndarray) -> list[int | None]:
    """Per seed the first epoch with at least 72 % on the simple part; accuracies are those of `part_accuracies`."""
    return [next(iter(np.flatnonzero(row >= MIDDLE).tolist()), None) for row in accuracy[..., 0]]
