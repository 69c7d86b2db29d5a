"""`Trajectory` and its moments: a training run as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from pathlens.errors import FileFormatError, NotFiniteError, RecordError, unknown_name
from pathlens.files import Document, read_document, write_document
from pathlens.plotting import get_axes, use_integer_ticks
from pathlens.recording.inputs import as_rows
from pathlens.recording.streams import record, snapshot
from pathlens.records import Record, Snapshot, checksum_of_tensors

_PARTS: dict[str, type[Snapshot] | type[Record]] = {"snapshot": Snapshot, "record": Record}


@dataclass
class Moment:
    """One point of a training run: weights, and a record if inputs were given."""

    step: int
    epoch: float | None = None
    reason: str = ""
    loss: float | None = None
    snapshot: Snapshot | None = None
    record: Record | None = None

    def __repr__(self) -> str:
        kept = [k for k in _PARTS if getattr(self, k) is not None]
        loss = "" if self.loss is None else f", loss {self.loss:.3g}"
        return f"Moment(step {self.step}, epoch {self.epoch}{loss}, {self.reason or 'appended'}: {' + '.join(kept)})"


class MomentDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A moment in the JSON file of a trajectory, with the checksums of its snapshot and record."""

    step: int
    epoch: int | float | None
    reason: str
    loss: int | float | None
    snapshot: str | None
    record: str | None


class TrajectoryDocument(Document, tag="pathlens.trajectory", frozen=True, kw_only=True):
    """The JSON file of a trajectory."""

    history: dict[str, list[Any]]
    moments: list[MomentDocument]
    config: dict[str, Any]


@dataclass
class Trajectory:
    """A training run as data: what happened every epoch, and the moments that were kept.

    `history` maps a name ("loss", "test_loss", …) to one number per epoch, the first at initialisation. In your own
    loop call `append`:

    >>> import torch
    >>> from pathlens import models
    >>> net, trajectory = models.relu(2, hidden=(4,), seed=0), Trajectory()
    >>> trajectory.append(net, torch.randn(3, 2), step=0)
    Moment(step 0, epoch None, appended: snapshot + record)
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def append(
        self,
        net: nn.Module,
        X: Any = None,
        step: int = 0,
        *,
        epoch: float | None = None,
        loss: float | None = None,
        reason: str = "",
        sensitivities: bool = True,
        rows: Any = None,
    ) -> Moment:
        """Keep the network's weights, and its record on X where X is given.

        A network that has diverged to NaN has no record; its weights are kept all the same.

        Parameters
        ----------
        net : nn.Module
            In any mode; the record is taken in eval mode, and the mode of every module restored.
        X : inputs, optional
            As `record` takes them.
        step : int
        epoch, loss : float, optional
        reason : str
            Why this moment is kept; shown by ``repr``.
        sensitivities, rows
            As in `record`.
        """
        taken = None
        if X is not None:
            x = as_rows(X, like=net)
            mode = {m: m.training for m in net.modules()}
            net.eval()
            try:
                made = record(net, x, sensitivities=sensitivities, rows=rows, stream=False)
                assert isinstance(made, Record)
                taken = made
            except NotFiniteError:  # of the network: the inputs were checked above
                pass
            finally:
                for m, training in mode.items():
                    m.training = training
        moment = Moment(step, epoch, reason, loss, snapshot(net), taken)
        self.moments.append(moment)
        return moment

    def at_epoch(self, epoch: float) -> Moment:
        """The moment kept at that epoch."""
        for m in self.moments:
            if m.epoch == epoch:
                return m
        kept = [m.epoch for m in self.moments]
        last = max(map(len, self.history.values()), default=0) - 1
        remedy = f"The training ended at epoch {last}" if 0 <= last < epoch else f"Train with keep=[{epoch}]"
        raise RecordError(f"Trajectory: nothing was kept at epoch {epoch}; kept: {kept}. {remedy}.")

    def plot(self, name: str = "loss", ax: Any = None) -> Any:
        """One history ("loss", "accuracy", "test_loss", …) over the epochs; returns matplotlib axes."""
        if name not in self.history:
            raise unknown_name("history", name, self.history)
        ax = get_axes(ax, "drawing a training", (6, 3.5))
        ax.plot(self.history[name])
        ax.set(xlabel="epoch", ylabel=name.replace("_", " "))
        use_integer_ticks(ax)
        return ax

    def epoch_reached(self, loss: float, name: str = "loss") -> int | None:
        """The first epoch whose loss is below a value, or None."""
        if self.history and name not in self.history:
            raise unknown_name("history", name, self.history)
        return next((e for e, v in enumerate(self.history.get(name, [])) if v < loss), None)

    def save(self, folder: str | Path) -> None:
        """Write `trajectory.json` and one pair of files per kept snapshot and record.

        The folder may hold an earlier save of a growing trajectory; `trajectory.json` is replaced last.
        """
        folder = Path(folder)
        entries = []
        for i, m in enumerate(self.moments):
            kept = {part: getattr(m, part) for part in _PARTS}
            # the checksums identify the save that a file belongs to, in case one is interrupted
            sums = {part: None if k is None else k.save(folder / f"{part}-{i:04d}") for part, k in kept.items()}
            entries.append(MomentDocument(m.step, m.epoch, m.reason, m.loss, **sums))
        document = TrajectoryDocument(history=self.history, moments=entries, config=self.config)
        write_document(folder / "trajectory.json", document)
        current = {
            f"{part}-{i:04d}" for i, entry in enumerate(entries) for part in _PARTS if getattr(entry, part) is not None
        }
        for part in _PARTS:  # of a longer trajectory that was saved here before
            for old in folder.glob(f"{part}-[0-9][0-9][0-9][0-9].*"):
                if old.suffix in (".json", ".safetensors") and old.name.split(".")[0] not in current:
                    old.unlink()

    @classmethod
    def load(cls, folder: str | Path) -> Trajectory:
        """Read a saved trajectory."""
        folder = Path(folder)
        path = folder / "trajectory.json"
        document = read_document(path, TrajectoryDocument)
        moments = []
        for i, d in enumerate(document.moments):
            kept: dict[str, Any] = {}
            for part, kind in _PARTS.items():
                if getattr(d, part) is None:
                    continue
                file = folder / f"{part}-{i:04d}"
                kept[part] = kind.load(file)
                if checksum_of_tensors(file) != getattr(d, part):
                    raise FileFormatError(
                        f"{file}.json: belongs to another save than {path}, which was probably interrupted. Both were "
                        f"left untouched; {kind.__name__}.load still reads this file on its own."
                    )
            moments.append(Moment(d.step, d.epoch, d.reason, d.loss, **kept))
        return cls(document.history, moments, document.config)

    def __repr__(self) -> str:
        epochs = max((len(v) for v in self.history.values()), default=1) - 1
        loss = self.history.get("loss")
        return f"Trajectory({epochs} epochs, {len(self.moments)} moments" + (f", loss {loss[-1]:.3g})" if loss else ")")
