"""The trainings behind Table 2 and Figure 3 of Neural Path Features: one for each row and model, found again on disk.

A row is an architecture and an optimiser, ``"gconv-adam"``. What is claimed of the results lives in
path_features_images. Torch is imported inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import unknown_name
from pathlens.papers import image_runs
from pathlens.papers.experiment import Run, checkpoints_in

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

__all__ = [
    "ARCHITECTURES",
    "BETA",
    "EPSILON",
    "MODELS",
    "OPTIMISERS",
    "ROWS",
    "entry",
    "flops",
    "images",
    "kept",
    "of_row",
    "selected",
    "stage",
    "state_at",
    "trained",
]

ARCHITECTURES = {"fc": "FC", "vconv": "VCONV", "gconv": "GCONV"}
OPTIMISERS = {"sgd": "SGD", "adam": "Adam"}
MODELS = {"frnpf_ii": "FRNPF (II)", "frnpf_di": "FRNPF (DI)", "dnpfl": "DNPFL", "flnpf": "FLNPF", "relu": "ReLU"}
ROWS = {f"{a}-{o}": f"{ARCHITECTURES[a]}, {OPTIMISERS[o]}" for a in ARCHITECTURES for o in OPTIMISERS}
BETA, EPSILON = 4.0, 0.1  # DNPFL's gate is (1 + ε)·σ(βq)


def selected(size: dict[str, Any], row: str, model: str) -> bool:
    """Whether the sizes ask for an entry; each of the three may be a list or one word."""
    architecture, optimiser = row.split("-")
    wanted = (
        ("architectures", architecture, ARCHITECTURES),
        ("optimisers", optimiser, OPTIMISERS),
        ("models", model, MODELS),
    )
    chosen = True
    for name, word, known in wanted:
        words = [size[name]] if isinstance(size[name], str) else size[name]
        for other in words:
            if other not in known:
                raise unknown_name(f"word among {name}", other, known)
        chosen = chosen and word in words
    return chosen


def of_row(value: Any, row: str) -> Any:
    """A size that may be one number for all rows or one for each."""
    return value[row] if isinstance(value, dict) else value


def images(run: Run, architecture: str) -> DataSet:
    """The data of an architecture: flat images for FC."""
    size = run.sizes_of("npk.tab2")
    kind = "flat" if architecture == "fc" else "image"

    def load() -> DataSet:
        return image_runs.images(
            size[f"{kind}_data"], size[f"{kind}_rows"], size[f"{kind}_rows_test"], flatten=kind == "flat"
        )

    return run.once(("npk", kind), load)


def flops(size: dict[str, Any], row: str, model: str, epochs: int) -> float:
    """Floating-point operations of training one entry at paper scale, all seeds: forward, and twice that backward."""
    if row.startswith("fc"):
        widths, examples = [784, *size["hidden"], 10], size["flat_rows"] or 60_000
        forward = 2 * sum(a * b for a, b in pairwise(widths))
    else:
        channels, examples, positions = [3, *size["channels"]], size["image_rows"] or 50_000, 32 * 32
        flat = channels[-1] * (positions if row.startswith("vconv") else 1)
        widths = [flat, *size["dense"], 10]
        forward = 2 * (
            9 * positions * sum(a * b for a, b in pairwise(channels)) + sum(a * b for a, b in pairwise(widths))
        )
    passes = {"relu": 3, "dnpfl": 6}.get(model, 4)  # frozen gates are computed, not differentiated
    return float(passes * forward * examples * epochs * size["seeds"])


def _settings(run: Run, row: str) -> dict[str, Any]:
    """Everything that the numbers of a row depend on, but for epochs and seeds."""
    size, kind = run.sizes_of("npk.tab2"), "flat" if row.startswith("fc") else "image"
    shape = ("hidden",) if kind == "flat" else ("channels", "dense")
    names = (*shape, "batch_size", *(f"{kind}_{what}" for what in ("data", "rows", "rows_test")))
    return {name: size[name] for name in names} | {"rate": of_row(size["rates"], row)}


# --- training ----------------------------------------------------------------------------------------------------


def _template(run: Run, architecture: str) -> Any:
    from pathlens import models

    size, x = run.sizes_of("npk.tab2"), images(run, architecture).x
    if architecture == "fc":
        return models.mlp(x.shape[1], size["hidden"], 10, bias=True)
    channels = [x.shape[1], *size["channels"]]
    if architecture == "gconv":
        return models.gconv(10, channels=channels, dense=size["dense"], bias=True)
    return models.vconv(10, channels=channels, dense=size["dense"], size=x.shape[-1], bias=True)


def _networks(run: Run, architecture: str, kind: str, given: Sequence[Any] = (), **more: Any) -> list[Any]:
    """A network of the kind for each seed; ``given`` are weights for the gates, one state for each seed."""
    from pathlens.models import gated_twin

    example, template = images(run, architecture).x[:2], _template(run, architecture)
    if not given:
        return [gated_twin(template, kind, example, init="he", seed=seed, **more) for seed in run.seeds]
    # the network that the gates come from began with the weights of `seed`: others for the values
    return [
        gated_twin(template, kind, example, init="he", seed=1000 + seed, gates_from=state, **more)
        for seed, state in zip(run.seeds, given)
    ]


def _train(
    run: Run,
    networks: list[Any],
    row: str,
    epochs: int,
    label: str,
    words: Sequence[str],
    keep: Sequence[int] = (),
) -> Runs:
    """Train all seeds: at once on a GPU or where steps are small, else one by one, each from its own checkpoint."""
    from pathlens.training import Keep, Runs, train

    size, (architecture, optimiser) = run.sizes_of("npk.tab2"), row.split("-")
    together = architecture == "fc" or run.scale == "quick" or run.device.startswith("cuda")
    count = len(networks) if together else 1
    settings = _settings(run, row) | {"epochs": epochs, "keep": list(keep)}
    parts: list[Any] = []
    for start in range(0, len(networks), count):
        chosen = run.seeds[start : start + count]
        options = image_runs.options(run, f"{label}, seed {chosen[0]}" if count == 1 else label)
        del options["seeds"]  # the networks are there already
        # on the CPU convolutions outweigh the dispatch that capturing a step saves
        compiled = count > 1 or run.device.startswith("cuda")
        options["execution"] = dataclasses.replace(options["execution"], compile=compiled)
        options["keep"] = Keep(keep, evaluate="running")
        folder = image_runs.own_folder(run, *words, **settings | {"seeds": list(chosen)})
        # with VCONV's 34 million weights, a checkpoint takes about as long as an epoch
        options["checkpoints"] = checkpoints_in(folder, every=5)
        parts.append(
            train(
                networks[start : start + count],
                images(run, architecture),
                epochs=epochs,
                seed=chosen[0],
                optimizer=optimiser,
                lr=of_row(size["rates"], row),
                batch_size=size["batch_size"],
                **options,
            )
        )
    return Runs(
        [t for part in parts for t in part],
        [n for part in parts for n in part.networks],
        [s for part in parts for s in part.settings],
    )


def kept(run: Run, row: str, model: str) -> list[int]:
    """Epochs of an entry of Table 2 whose weights Figure 3 looks at."""
    size, epochs = run.sizes_of("npk.fig3"), of_row(run.sizes_of("npk.tab2")["epochs"], row)
    wanted = {("gconv-adam", "relu"): [0, *size["stages"]], ("fc-adam", "dnpfl"): [0, *size["kernel_epochs"]]}
    return sorted({epoch for epoch in wanted.get((row, model), []) if epoch <= epochs})


def state_at(runs: Runs, member: int, epoch: int) -> dict[str, Any]:
    """Weights of one network at an epoch that was kept."""
    snapshot = runs[member].at_epoch(epoch).snapshot
    assert snapshot is not None
    return {key: value.cpu() for key, value in snapshot.state.items()}


def trained(run: Run, row: str, model: str) -> Runs:
    """The networks of one entry of Table 2, all seeds; FLNPF has the gates of the row's ReLU networks."""
    architecture = row.split("-")[0]

    def compute() -> Runs:
        if model == "flnpf":
            states = [net.state_dict() for net in trained(run, row, "relu").networks]
            networks = _networks(run, architecture, "flnpf", states)
        elif model == "dnpfl":
            networks = _networks(run, architecture, "dnpfl", beta=BETA, epsilon=EPSILON)
        elif model == "relu":
            networks = _networks(run, architecture, "relu")
        else:
            origin = {"frnpf_ii": "independent", "frnpf_di": "dependent"}[model]
            networks = _networks(run, architecture, "frnpf", gates_from=origin)
        epochs = of_row(run.sizes_of("npk.tab2")["epochs"], row)
        return _train(
            run, networks, row, epochs, f"{ROWS[row]}: {MODELS[model]}", ("npk", row, model), kept(run, row, model)
        )

    return run.once(("npk", row, model), compute)


def entry(run: Run, row: str, model: str, wanted: bool = True) -> dict[str, np.ndarray] | None:
    """Test accuracies in %, (seeds, epochs), of one entry of the table; of DNPFL with hard gates too, (seeds,).

    They are those of its training if it is ``wanted``; else those of the longest training that earlier calls with the
    same sizes left in the run's folder for all seeds, or None.
    """
    epochs = of_row(run.sizes_of("npk.tab2")["epochs"], row)
    folder = image_runs.own_folder(run, "npk.tab2", row, model, **_settings(run, row))

    def compute(part: Run) -> dict[str, np.ndarray]:
        runs = trained(part, row, model)
        made = {"accuracy": 100 * runs.history("test_accuracy")[:, 1:]}
        if model == "dnpfl":
            made["hard"] = image_runs.hard_accuracies(runs, images(run, row.split("-")[0]), run.device)
        return made

    if not wanted:
        there = (
            []
            if folder is None
            else [path for path in folder.glob("[0-9]*") if set(run.seeds) <= image_runs.read_seeds(path).keys()]
        )
        if not there:
            return None
        epochs = max(int(path.name) for path in there)
    return image_runs.each_seed(run, None if folder is None else folder / str(epochs), compute)


def stage(run: Run, epoch: int) -> np.ndarray:
    """Test accuracies in %, (seeds, epochs), of values behind the gates that GCONV with Adam has at an epoch."""
    row, epochs = "gconv-adam", int(run.sizes_of("npk.fig3")["value_epochs"])

    def compute(part: Run) -> dict[str, np.ndarray]:
        source = trained(part, row, "relu")
        networks = _networks(part, "gconv", "flnpf", [state_at(source, i, epoch) for i in range(len(part.seeds))])
        runs = _train(part, networks, row, epochs, f"gates of epoch {epoch}", ("npk", row, f"stage{epoch}"))
        return {"accuracy": 100 * runs.history("test_accuracy")[:, 1:]}

    folder = image_runs.own_folder(run, "npk.fig3", f"stage{epoch}", epochs=epochs, **_settings(run, row))
    return image_runs.each_seed(run, folder, compute)["accuracy"]
