"""The trainings on image sets that Table 2 and Figure 3 share: one for each row and model of the table.

A row is an architecture and an optimiser, such as ``"gconv-adam"``. Torch is imported inside functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import unknown_name
from pathlens.papers import image_runs
from pathlens.papers.claim import Deviation
from pathlens.papers.experiment import Run, checkpoints_in

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

ARCHITECTURES = {"fc": "FC", "vconv": "VCONV", "gconv": "GCONV"}
OPTIMISERS = {"sgd": "SGD", "adam": "Adam"}
MODELS = {"frnpf_ii": "FRNPF (II)", "frnpf_di": "FRNPF (DI)", "dnpfl": "DNPFL", "flnpf": "FLNPF", "relu": "ReLU"}
ROWS = {f"{a}-{o}": f"{ARCHITECTURES[a]}, {OPTIMISERS[o]}" for a in ARCHITECTURES for o in OPTIMISERS}
BETA, EPSILON = 4.0, 0.1  # DNPFL's gate is (1 + ε)·σ(βq)
GATES = {"FRNPF, FLNPF, ReLU": "hard", "DNPFL": f"soft β={BETA:g}, ε={EPSILON:g}"}
# kind of each model and its options in `gated_twin`
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "frnpf_ii": ("frnpf", {"gates_from": "independent"}),
    "frnpf_di": ("frnpf", {"gates_from": "dependent"}),
    "dnpfl": ("dnpfl", {"beta": BETA, "epsilon": EPSILON}),
    "flnpf": ("flnpf", {}),
    "relu": ("relu", {}),
}
# sizes, rates and epochs of the authors' code
SIZES = {
    "hidden": ([64] * 5, [128] * 5),
    "channels": ([8, 8, 16, 16], [64, 64, 128, 128]),
    "dense": ([32, 32], [256, 256]),
    "flat_data": "mnist",
    "flat_rows": (1500, None),
    "flat_rows_test": (2000, None),
    "image_data": ("digits", "cifar10"),
    "image_rows": (600, None),
    "image_rows_test": (360, None),
    "batch_size": 32,
    "rates": (
        dict(zip(ROWS, (0.05, 1e-3, 0.05, 2e-3, 0.1, 5e-3))),
        dict(zip(ROWS, (0.01, 1e-4, 0.01, 3e-4, 0.01, 3e-4))),
    ),
    "epochs": (dict(zip(ROWS, (10, 10, 6, 6, 20, 20))), dict(zip(ROWS, (300, 100, 80, 80, 100, 200)))),
}

SCORE = Deviation(
    paper="test accuracy, 'averaged over 5 runs'",
    authors_code="the largest test accuracy over all epochs",
    ours="claims are measured after the last epoch; the accuracy of the best epoch is reported beside it",
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
_QUICK = Deviation(
    paper="all of MNIST and CIFAR-10",
    authors_code="the same",
    ours="quick: part of MNIST for FC, scikit-learn's digits (8 × 8) for the convolutions, narrow networks, larger "
    "rates, Adam alone",
    why="on two CPU cores one epoch of the five GCONV networks is 4e14 operations, about an hour",
)


def quick_deviations(run: Run) -> list[Deviation]:
    """Deviations of the quick scale alone."""
    return [_QUICK] if run.scale == "quick" else []


def selected(size: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(row, model) of the entries of Table 2 that the sizes choose; each of the three may be a list or one word."""
    chosen = []
    for name, known in (("architectures", ARCHITECTURES), ("optimisers", OPTIMISERS), ("models", MODELS)):
        chosen.append([size[name]] if isinstance(size[name], str) else size[name])
        for word in chosen[-1]:
            if word not in known:
                raise unknown_name(f"word among {name}", word, known)
    return [(f"{a}-{o}", model) for a, o, model in itertools.product(*chosen)]


def load_data(run: Run, row: str) -> DataSet:
    """The data of a row: flat images for FC."""
    size, kind = run.sizes, _data_kind(row)
    names = (f"{kind}_data", f"{kind}_rows", f"{kind}_rows_test")
    return run.once(("npk", kind), lambda: image_runs.images(*(size[name] for name in names), flatten=kind == "flat"))


def _data_kind(row: str) -> str:
    return "flat" if row.startswith("fc") else "image"


def training_flops(size: Mapping[str, Any], row: str, model: str, epochs: int) -> float:
    """Floating-point operations of training one entry at paper scale, all seeds: forward, and twice that backward."""
    if row.startswith("fc"):
        widths, examples = [784, *size["hidden"], 10], size["flat_rows"] or 60_000
        weights = 0
    else:
        channels, examples, positions = [3, *size["channels"]], size["image_rows"] or 50_000, 32 * 32
        widths = [channels[-1] * (positions if row.startswith("vconv") else 1), *size["dense"], 10]
        weights = 9 * positions * sum(a * b for a, b in pairwise(channels))
    forward = 2 * (weights + sum(a * b for a, b in pairwise(widths)))
    passes = {"relu": 3, "dnpfl": 6}.get(model, 4)  # frozen gates are computed, not differentiated
    return float(passes * forward * examples * epochs * size["seeds"])


def mean_and_sd(values: np.ndarray) -> str:
    """Mean ± standard deviation over seeds."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.2f} ± {sd:.2f}"


# --- training ----------------------------------------------------------------------------------------------------


def _settings(run: Run, row: str) -> dict[str, Any]:
    """Everything that the numbers of a row depend on, except epochs and seeds."""
    size, kind = run.sizes, _data_kind(row)
    shape = ("hidden",) if kind == "flat" else ("channels", "dense")
    names = (*shape, "batch_size", *(f"{kind}_{what}" for what in ("data", "rows", "rows_test")))
    return {name: size[name] for name in names} | {"rate": size["rates"][row]}


def _networks(run: Run, row: str, model: str, states: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
    """A network of the model for each seed; ``states`` are the weights that FLNPF's gates come from, one per seed."""
    from pathlens import models

    size, x, architecture = run.sizes, load_data(run, row).x, row.split("-")[0]
    channels = [x.shape[1], *size["channels"]]
    if architecture == "fc":
        template: Any = models.mlp(x.shape[1], size["hidden"], 10, bias=True)
    elif architecture == "gconv":
        template = models.gconv(10, channels=channels, dense=size["dense"], bias=True)
    else:
        template = models.vconv(10, channels=channels, dense=size["dense"], size=x.shape[-1], bias=True)
    kind, options = _KINDS[model]
    if states is None:
        return [models.gated_twin(template, kind, x[:2], init="he", seed=seed, **options) for seed in run.seeds]
    # the network that the gates come from began with the weights of `seed`: others for the values
    return [
        models.gated_twin(template, kind, x[:2], init="he", seed=1000 + seed, gates_from=state)
        for seed, state in zip(run.seeds, states)
    ]


def _train(
    run: Run, networks: list[Any], row: str, epochs: int, label: str, words: Sequence[str], keep: Sequence[int] = ()
) -> Runs:
    """Train all seeds: at once on a GPU or where steps are small, else one by one, each from its own checkpoint."""
    from pathlens.training import train

    size, (architecture, optimiser) = run.sizes, row.split("-")
    on_gpu = run.device.startswith("cuda")
    count = len(networks) if architecture == "fc" or run.scale == "quick" or on_gpu else 1
    settings = _settings(run, row) | {"epochs": epochs, "keep_at": list(keep)}
    parts: list[Any] = []
    for start in range(0, len(networks), count):
        seeds = run.seeds[start : start + count]
        folder = image_runs.own_folder(run, *words, **settings | {"seeds": list(seeds)})
        options = image_runs.options(run, f"{label}, seed {seeds[0]}" if count == 1 else label, keep=keep)
        del options["seeds"]  # the networks are initialised already
        options |= {
            # capturing a step gains nothing on the CPU, where convolutions dominate
            "execution": replace(options["execution"], compile=count > 1 or on_gpu),
            # with VCONV's 34 million weights, a checkpoint takes about as long as an epoch
            "checkpoints": checkpoints_in(folder, every=5),
        }
        parts.append(
            train(
                networks[start : start + count],
                load_data(run, row),
                epochs=epochs,
                seed=seeds[0],
                optimizer=optimiser,
                lr=size["rates"][row],
                batch_size=size["batch_size"],
                **options,
            )
        )
    return image_runs.concatenate_runs(parts)


def kept_epochs(run: Run, row: str, model: str) -> list[int]:
    """Epochs of an entry of Table 2 whose weights Figure 3 reads."""
    size = run.sizes_of("npk.fig3")
    wanted = {("gconv-adam", "relu"): size["stages"], ("fc-adam", "dnpfl"): size["kernel_epochs"]}.get((row, model))
    return [] if wanted is None else sorted({0, *(epoch for epoch in wanted if epoch <= size["epochs"][row])})


def state_at(runs: Runs, member: int, epoch: int) -> dict[str, Any]:
    """Weights of one network at an epoch that was kept."""
    snapshot = runs[member].at_epoch(epoch).snapshot
    assert snapshot is not None
    return {key: value.cpu() for key, value in snapshot.state.items()}


def train_entry(run: Run, row: str, model: str) -> Runs:
    """The trained networks of one entry of Table 2, all seeds; FLNPF has the gates of the row's ReLU networks."""

    def compute() -> Runs:
        states = None
        if model == "flnpf":
            states = [net.state_dict() for net in train_entry(run, row, "relu").networks]
        networks, label = _networks(run, row, model, states), f"{ROWS[row]}: {MODELS[model]}"
        epochs, words = run.sizes["epochs"][row], ("npk", row, model)
        return _train(run, networks, row, epochs, label, words, kept_epochs(run, row, model))

    return run.once(("npk", row, model), compute)


def entry_accuracies(run: Run, row: str, model: str, *, train: bool = True) -> dict[str, np.ndarray] | None:
    """Test accuracies in %, (seeds, epochs), of one entry of Table 2; of DNPFL with hard gates too, (seeds,).

    If ``train`` is False, those of the longest training that earlier runs with the same sizes left in the run's folder
    for all seeds, or None.
    """
    epochs = run.sizes["epochs"][row]
    folder = image_runs.own_folder(run, "npk.tab2", row, model, **_settings(run, row))
    if not train:
        paths = [] if folder is None else folder.glob("[0-9]*")
        finished = [int(path.name) for path in paths if set(run.seeds) <= image_runs.read_seeds(path).keys()]
        if not finished:
            return None
        epochs = max(finished)

    def compute(part: Run) -> dict[str, np.ndarray]:
        runs = train_entry(part, row, model)
        found = {"accuracy": 100 * runs.history("test_accuracy")[:, 1:]}
        if model == "dnpfl":
            found["hard"] = image_runs.hard_accuracies(runs, load_data(run, row), run.device)
        return found

    return image_runs.each_seed(run, None if folder is None else folder / str(epochs), compute)


def stage_accuracies(run: Run, epoch: int) -> np.ndarray:
    """Test accuracies in %, (seeds, epochs), of values behind the gates that GCONV with Adam has at an epoch."""
    row, epochs = "gconv-adam", int(run.sizes["value_epochs"])

    def compute(part: Run) -> dict[str, np.ndarray]:
        source = train_entry(part, row, "relu")
        networks = _networks(part, row, "flnpf", [state_at(source, i, epoch) for i in range(len(part.seeds))])
        runs = _train(part, networks, row, epochs, f"gates of epoch {epoch}", ("npk", row, f"stage{epoch}"))
        return {"accuracy": 100 * runs.history("test_accuracy")[:, 1:]}

    folder = image_runs.own_folder(run, "npk.fig3", f"stage{epoch}", epochs=epochs, **_settings(run, row))
    return image_runs.each_seed(run, folder, compute)["accuracy"]
