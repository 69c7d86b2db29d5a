"""Trainings on the circle with other targets, gates or losses than those of the figures.

Shared by hs.early, hs.controls and hs.remedies. Torch is imported inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pathlens.papers.experiment import Run
from pathlens.papers.half_space.circle_training import BATCH, HIDDEN, RATE
from pathlens.papers.half_space.parts import NAMES, network

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.models import GatedNetwork
    from pathlens.training import Runs


def circle_network(model: str, *, gates: GatedNetwork | None = None, seed: int | None = None) -> GatedNetwork:
    """A network of the sizes of the circle figures."""
    return network(model, 2, HIDDEN, gates=gates, seed=seed)


def circle_options(run: Run, epochs: int, label: str, *words: str) -> dict[str, Any]:
    """Options of `train` on the circle; the words name the folder of checkpoints."""
    return {
        "epochs": epochs,
        "lr": RATE,
        "batch_size": BATCH,
        "device": run.device,
        "checkpoint_every": 50,
        "checkpoint": run.checkpoint("circle", f"{epochs}epochs", *words),
        "progress": run.progress,
        "label": label,
    }


def train_on_circle(run: Run, model: str, data: DataSet, epochs: int, keep: list[int]) -> Runs:
    """Train all seeds of one architecture at once; the weights are kept at the epochs of `keep`."""

    def compute() -> Any:
        from pathlens.training import train

        words = (data.name.replace(" ", "_"), str(len(data)), model, *map(str, keep))
        options = circle_options(run, epochs, f"{data.name}, {NAMES[model]}", *words)
        return train(circle_network(model), data, seeds=run.seeds, keep_at=keep, **options)

    return run.once(("circle", data.name, len(data), model, epochs, *keep), compute)
