"""Checkpoints of a training run: safetensors + JSON, written atomically, the previous one kept.

A checkpoint holds every number that decides what comes next: weights, buffers, optimiser, generators, history, and the
thread count and torch version under which the bits are the same.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import CheckpointError, ResumeWarning
from pathlens.records import TensorHeader, load_tensors, save_tensors

_NAME = re.compile(r"checkpoint-(\d{8})\.json")


def environment() -> dict[str, Any]:
    """What has to be equal for equal bits."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads()}


class CheckpointHeader(TensorHeader, tag="pathlens.checkpoint", frozen=True, kw_only=True):
    """The JSON file of a checkpoint: everything but the tensors, as the training loop gave it."""

    state: dict[str, Any]


def saved_epochs(folder: Path) -> list[int]:
    """Epochs with a complete checkpoint in the folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def _stem(folder: Path, epoch: int) -> Path:
    return folder / f"checkpoint-{epoch:08d}"


def _remove(folder: Path, epochs: list[int]) -> None:
    for epoch in epochs:
        # in order, so that the JSON file goes first: a checkpoint counts by it, and what a kill leaves is none
        for path in sorted(folder.glob(_stem(folder, epoch).name + ".*")):
            path.unlink(missing_ok=True)


def save_checkpoint(folder: Path, epoch: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write the checkpoint of an epoch, then remove all but it and the one before."""
    header = CheckpointHeader(state=meta | {"epoch": epoch, "environment": environment()})
    save_tensors(_stem(folder, epoch), tensors, header)
    _remove(folder, saved_epochs(folder)[:-2])


def load_checkpoint(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint of this run, or None where there is none.

    Where nothing is scheduled by the number of epochs, a run may go on for more of them than it was begun with. Which
    of the epochs to come are kept may change.

    Raises
    ------
    CheckpointError
        If it is truncated or corrupt (the one before it is named), or belongs to a run with other settings.
    """
    epochs = saved_epochs(folder)
    if not epochs:
        return None
    try:
        tensors, header = load_tensors(_stem(folder, epochs[-1]), CheckpointHeader, CheckpointError)
    except CheckpointError as e:
        instead = f"go on from epoch {epochs[-2]} instead" if len(epochs) > 1 else "start again"
        raise CheckpointError(f"{e} To {instead}, delete {_stem(folder, epochs[-1]).name}.*") from e
    meta = header.state
    saved = meta["config"]
    scheduled = config["schedule"] != "constant" or config["beta"] is not None
    longer = not scheduled and saved["epochs"] <= config["epochs"]
    free = {"epochs"} if longer else set()
    if "network" not in saved:  # checkpoints of earlier versions do not tell
        free.add("network")
    past = [{e for e in c["keep_at"] if e <= meta["epoch"]} for c in (saved, config)]
    free |= {"keep_at"} if past[0] == past[1] else set()  # those to come are still open
    different = [k for k in sorted({*saved, *config} - free) if saved.get(k) != config.get(k)]
    if different:
        k = different[0]
        owner = f"a run with {k}={saved.get(k)!r}, this one has {k}={config.get(k)!r}"
        if k == "network":
            owner = "a network with other layers, other frozen weights or other gates than this one"
        raise CheckpointError(
            f"{folder}: the checkpoint belongs to {owner}. Use another folder, or resume=False to start over."
        )
    if meta["environment"] != environment():
        warnings.warn(
            f"Resuming under {environment()} a run that was saved under {meta['environment']}: the result may "
            "differ in the last bits.",
            ResumeWarning,
            stacklevel=5,
        )
    return tensors, meta


def forget_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of an earlier run, and nothing else: training in this folder starts over."""
    _remove(folder, saved_epochs(folder))
