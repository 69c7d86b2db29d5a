"""Shared parts of the experiments on image sets: data, options of `train`, accuracies, results of finished seeds.

Torch is imported inside functions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import CheckpointError
from pathlens.files import parse_json, write_atomically
from pathlens.papers.experiment import Run, checkpoints_in

if TYPE_CHECKING:
    from torch import Tensor

    from pathlens.data import DataSet
    from pathlens.training import Runs


def images(name: str, rows: int | None = None, rows_test: int | None = None, *, flatten: bool = False) -> DataSet:
    """An image set by name, standardised, or a fixed subsample of it (``None`` keeps all rows)."""
    from pathlens import data

    full: DataSet = getattr(data, name)(flatten=flatten, standardise=True)
    return full if rows is None else full.subsample(rows, n_test=rows_test, seed=0)


def shrunk(data: DataSet, side: int) -> DataSet:
    """The same images averaged down to `side` × `side` pixels; data of that size is returned unchanged."""
    import torch

    if data.x.shape[-1] == side:
        return data

    def small(x: Any) -> Any:
        return None if x is None else torch.nn.functional.adaptive_avg_pool2d(x, side)

    return dataclasses.replace(data, x=small(data.x), x_test=small(data.x_test))


def options(
    run: Run,
    label: str,
    *checkpoint: str,
    keep: Sequence[int] = (),
    evaluate: str = "running",
    every: int = 1,
    reduced_precision: bool = True,
) -> dict[str, Any]:
    """Options of `train` that every image experiment uses: device, precision, checkpoints, progress.

    On a GPU the forward pass is in bfloat16 (unless `reduced_precision` is False), the weights and their updates in
    float32. The loss of an epoch is the mean over its batches; the test accuracy is measured at the end of every epoch.
    Weights are kept after the epochs of `keep`, and saved in a checkpoint after `every` epochs.
    """
    import torch

    from pathlens.training import Execution, Keep

    on_gpu = run.device.startswith("cuda")
    return {
        "loss": "cross_entropy",
        "seeds": run.seeds,
        "device": run.device,
        "keep": Keep(keep, evaluate=evaluate),
        "execution": Execution(autocast=torch.bfloat16 if on_gpu and reduced_precision else None),
        "checkpoints": checkpoints_in(run.checkpoint(*checkpoint), every=every),
        "progress": functools.partial(run.progress, label),
    }


def accuracies(runs: Runs) -> dict[str, np.ndarray]:
    """Test accuracy per seed in %, after the last epoch and in the best one (which is chosen on the test data)."""
    history = 100 * runs.history("test_accuracy")[:, 1:]
    return {"last": history[:, -1], "best": np.nanmax(history, axis=1)}


def train_each(
    run: Run, net: Any, data: DataSet, label: str, *checkpoint: str, seeds: Sequence[int] | None = None, **more: Any
) -> Runs:
    """Train a convolutional network from all of the run's seeds, or from those given; `more` are options of `train`.

    All seeds are trained at once on a GPU, and one after another on the CPU, where stacking k networks takes k times
    the memory and saves no time. The weights are the same in both cases. The name of the checkpoint depends only on the
    settings of this training, so other runs can use it too.
    """
    from pathlens.training import train

    on_gpu = run.device.startswith("cuda")
    parts: list[Any] = []
    seeds = run.seeds if seeds is None else seeds
    for at_once in [list(seeds)] if on_gpu else [[seed] for seed in seeds]:
        words = "-".join(str(seed) for seed in at_once)
        given = options(run, label if on_gpu else f"{label}, seed {words}")
        # on the CPU, capturing a step does not pay off, because convolutions dominate
        given |= {"seeds": at_once, "execution": dataclasses.replace(given["execution"], compile=on_gpu), **more}
        folder = own_folder(run, *checkpoint, f"seed{words}", data=tuple(data.x.shape), **more)
        given["checkpoints"] = checkpoints_in(folder, every=1)
        parts.append(train(net, data, **given))
    return concatenate_runs(parts)


def concatenate_runs(parts: Sequence[Runs]) -> Runs:
    """The runs of several trainings as one."""
    from pathlens.training import Runs

    return Runs(
        [trajectory for part in parts for trajectory in part],
        [net for part in parts for net in part.networks],
        [settings for part in parts for settings in part.settings],
    )


def own_folder(run: Run, *words: str, **settings: Any) -> Path | None:
    """Folder for results that depend only on these words and settings, not on the run's other changes and seeds."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()[:8]
    return run.checkpoint_folder(*words, digest)


def remembered(file: Path | None, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``compute()``, plain numbers and lists; it is written to the file and later read from it."""
    if file is None:
        return compute()
    if not file.exists():
        result = compute()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(result).encode())
    return _read_results(file)


def _read_results(file: Path) -> dict[str, Any]:
    """The contents of a file of results; a damaged file raises an error."""
    try:
        found: Any = parse_json(file.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: finished results cannot be read; the file was not changed. Restore it from a copy, or delete it "
            "to compute them again."
        )
    return found


def each_seed(
    run: Run, folder: Path | None, compute: Callable[[Run], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Arrays by name, whose first axis is the run's seeds.

    Results of seeds that an earlier run finished are read from the folder. ``compute(part)`` is called once, with the
    run of the other seeds, and its results are written there.
    """
    found = read_seeds(folder)
    missing = [seed for seed in run.seeds if seed not in found]
    if missing:
        made = {name: np.asarray(values) for name, values in compute(run.with_seeds(missing)).items()}
        found |= {seed: {name: values[i] for name, values in made.items()} for i, seed in enumerate(missing)}
        if folder is not None:
            rows = {str(seed): {name: value.tolist() for name, value in found[seed].items()} for seed in missing}
            folder.mkdir(parents=True, exist_ok=True)
            words = "-".join(str(seed) for seed in missing)
            write_atomically(folder / f"seeds-{words}.json", json.dumps(rows).encode())
    return {name: np.stack([np.asarray(found[seed][name]) for seed in run.seeds]) for name in found[run.seeds[0]]}


def read_seeds(folder: Path | None) -> dict[int, dict[str, Any]]:
    """The results that `each_seed` wrote to a folder, by seed."""
    found: dict[int, dict[str, Any]] = {}
    for path in [] if folder is None else sorted(folder.glob("seeds-*.json")):
        found |= {int(seed): results for seed, results in _read_results(path).items()}
    return found


def spread(values: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation over the seeds (None for one seed), and the values themselves."""
    values = np.asarray(values, dtype=float)
    sd = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(values.mean()), "sd": sd, "seeds": values.tolist()}


def accuracy(networks: Iterable[Any], x: Tensor, y: Tensor, device: str = "cpu", batch: int = 1000) -> np.ndarray:
    """Accuracy in % of each network in eval mode on the given rows."""
    import torch

    found = []
    for net in networks:
        judge: Any = copy.deepcopy(net).to(device).eval()
        with torch.no_grad():
            right = [
                (judge(part.to(device)).argmax(1).cpu() == labels).double()
                for part, labels in zip(x.split(batch), y.split(batch))
            ]
        found.append(100 * float(torch.cat(right).mean()))
    return np.array(found)


def hard_accuracies(runs: Runs, data: DataSet, device: str = "cpu") -> np.ndarray:
    """Test accuracy per seed in % after the last epoch, with every soft gate switched to its hard one."""
    assert data.x_test is not None and data.y_test is not None
    return accuracy((hardened(net) for net in runs.networks), data.x_test, data.y_test, device)


def hardened(net: Any) -> Any:
    """A copy of a gated network, or of an encoding followed by a gated network, with hard gates."""
    from torch import nn

    if isinstance(net, nn.Sequential):
        encoding, gated = net
        return nn.Sequential(encoding, hardened(gated))
    return net.with_gate("hard")
