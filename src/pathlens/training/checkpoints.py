"""Checkpoints of a training: safetensors + JSON, written atomically, the previous one kept.

A checkpoint holds every number that decides the next epochs: weights, buffers, optimizer, generators, history, and the
thread count and torch version for which the bits are the same.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import CheckpointError, ResumeWarning
from pathlens.recording import Moment
from pathlens.records import Record, Snapshot, TensorHeader, load_tensors, save_tensors

_NAME = re.compile(r"checkpoint-(\d{8})\.json")


def environment() -> dict[str, Any]:
    """The versions and settings that must be equal for equal bits."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads()}


class CheckpointHeader(TensorHeader, tag="pathlens.checkpoint", frozen=True, kw_only=True):
    """The JSON file of a checkpoint: everything but the tensors."""

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
        # sorted, so that the JSON file is removed first: without it the rest does not count as a checkpoint
        for path in sorted(folder.glob(_stem(folder, epoch).name + ".*")):
            path.unlink(missing_ok=True)


def save_checkpoint(folder: Path, epoch: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write the checkpoint of an epoch, then remove all but it and the one before."""
    header = CheckpointHeader(state=meta | {"epoch": epoch, "environment": environment()})
    save_tensors(_stem(folder, epoch), tensors, header)
    _remove(folder, saved_epochs(folder)[:-2])


def load_checkpoint(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint of this training, or None if there is none.

    If nothing is scheduled by the number of epochs, a training may have more of them than the saved one. Which of the
    next epochs are kept may change.

    Raises
    ------
    CheckpointError
        If it is truncated or corrupt (the message names the one before), or belongs to a training with other settings.
    """
    epochs = saved_epochs(folder)
    if not epochs:
        return None
    try:
        tensors, header = load_tensors(_stem(folder, epochs[-1]), CheckpointHeader, CheckpointError)
    except CheckpointError as e:
        instead = f"resume from epoch {epochs[-2]} instead" if len(epochs) > 1 else "start again"
        raise CheckpointError(f"{e} To {instead}, delete {_stem(folder, epochs[-1]).name}.*") from e
    meta = header.state
    _check_config(folder, meta["config"], config, meta["epoch"])
    if meta["environment"] != environment():
        warnings.warn(
            f"Resuming under {environment()} a training that was saved under {meta['environment']}: the result may "
            "differ in the last bits.",
            ResumeWarning,
            stacklevel=5,
        )
    return tensors, meta


def _check_config(folder: Path, saved: dict[str, Any], config: dict[str, Any], epoch: int) -> None:
    """Refuse the checkpoint of a training with other settings."""
    may_differ = set()
    if config["scheduler"] == "constant" and config["beta"] is None and saved.get("epochs", 0) <= config["epochs"]:
        may_differ.add("epochs")
    past = [[e for e in c.get("keep_epochs", ()) if e <= epoch] for c in (saved, config)]
    if past[0] == past[1]:
        may_differ.add("keep_epochs")
    different = [k for k in sorted({*saved, *config} - may_differ) if saved.get(k) != config.get(k)]
    if different:
        k = different[0]
        owner = f"a training with {k}={saved.get(k)!r}, this one has {k}={config.get(k)!r}"
        if k == "network":
            owner = "a network with other layers, other frozen weights or other gates than this one"
        raise CheckpointError(
            f"{folder}: the checkpoint belongs to {owner}. Use another folder, or "
            "checkpoints=Checkpoints(folder, resume=False) to start over."
        )


def forget_checkpoints(folder: Path) -> None:
    """Remove all checkpoints in a folder, and nothing else."""
    _remove(folder, saved_epochs(folder))


class MomentFiles:
    """The kept moments of a training in the folder of its checkpoints, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[tuple[int, int]] = set()

    def _path(self, member: int, number: int, what: str) -> Path:
        return self.folder / "moments" / f"member{member:04d}-{number:04d}-{what}"

    def save(self, member: int, moments: Sequence[Moment]) -> list[list[Any]]:
        """Write the moments that are not there yet; returns the numbers of all of them, for JSON."""
        for j, m in enumerate(moments):
            if (member, j) in self._written:
                continue
            if m.snapshot is not None:
                m.snapshot.save(self._path(member, j, "snapshot"))
            if m.record is not None:
                m.record.save(self._path(member, j, "record"))
            self._written.add((member, j))
        return [[m.step, m.epoch, m.reason, m.loss, m.snapshot is not None, m.record is not None] for m in moments]

    def load(self, member: int, entries: Sequence[Sequence[Any]]) -> list[Moment]:
        """Read the moments that `save` described."""
        found = []
        for j, (step, epoch, reason, loss, has_snapshot, has_record) in enumerate(entries):
            taken = Snapshot.load(self._path(member, j, "snapshot")) if has_snapshot else None
            record = Record.load(self._path(member, j, "record")) if has_record else None
            found.append(Moment(step, epoch, reason, loss, taken, record))
            self._written.add((member, j))
        return found
