"""What the trainings on image sets share: data, options of `train`, accuracies, hard gates at test.

The experiments themselves live beside it, one module per paper and kind of data. Torch is imported inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.experiments.registry import Run

if TYPE_CHECKING:
    from pathlens.data import DataSet
    from pathlens.training import Runs

__all__ = ["accuracies", "hard_accuracies", "images", "options"]


def images(name: str, rows: int | None = None, rows_test: int | None = None, *, flatten: bool = False) -> DataSet:
    """An image set by name, standardised, or the same subsample of it every time (``None`` keeps all rows)."""
    from pathlens import data

    full: DataSet = getattr(data, name)(flatten=flatten, standardise=True)
    return full if rows is None else full.subsample(rows, n_test=rows_test, seed=0)


def options(run: Run, label: str, *checkpoint: str) -> dict[str, Any]:
    """Options of `train` that every image experiment uses: where it runs, its precision, checkpoints, progress.

    On a GPU the forward pass is in bfloat16, the weights and their updates in float32. The loss of an epoch is the mean
    over its batches; the test accuracy is taken at the end of every epoch.
    """
    import torch

    on_gpu = run.device.startswith("cuda")
    return {"loss": "cross_entropy", "seeds": run.seeds, "device": run.device, "evaluate": "running",
            "autocast": torch.bfloat16 if on_gpu else None, "checkpoint": run.checkpoint(*checkpoint),
            "checkpoint_every": 1, "progress": run.progress, "label": label}  # fmt: skip


def accuracies(runs: Runs) -> dict[str, np.ndarray]:
    """Test accuracy per seed in %, after the last epoch and in the best one (which is chosen on the test data)."""
    history = 100 * runs.history("test_accuracy")[:, 1:]
    return {"last": history[:, -1], "best": np.nanmax(history, axis=1)}


def hard_accuracies(runs: Runs, data: DataSet, device: str = "cpu", batch: int = 1000) -> np.ndarray:
    """Test accuracy per seed in % after the last epoch, with every soft gate switched to its hard one."""
    import torch

    assert data.x_test is not None and data.y_test is not None
    found = []
    for net in runs.networks:
        hard: Any = net.with_gate("hard").to(device).eval()  # type: ignore[operator]
        with torch.no_grad():
            right = [(hard(x.to(device)).argmax(1).cpu() == y).double()
                     for x, y in zip(data.x_test.split(batch), data.y_test.split(batch))]  # fmt: skip
        found.append(100 * float(torch.cat(right).mean()))
    return np.array(found)
