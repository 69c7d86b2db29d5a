"""`Runs`: the result of training several networks, and its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import nn

from pathlens.errors import FileFormatError, OptionError, unknown_name
from pathlens.files import Document, read_document, write_document
from pathlens.plotting import get_axes, use_integer_ticks
from pathlens.recording import Trajectory, rebuild, snapshot
from pathlens.records import Snapshot, checksum_of_tensors


class RunDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run in `runs.json`, with the checksums of its network and trajectory."""

    settings: dict[str, Any]
    network: str
    trajectory: str


class RunsDocument(Document, tag="pathlens.runs", frozen=True, kw_only=True):
    """The JSON file of several runs."""

    runs: list[RunDocument]


class Runs(list[Trajectory]):
    """The trajectories of networks that were trained together, with the networks themselves.

    `runs[i]` is a Trajectory, `runs.networks[i]` the trained network, `runs.settings[i]` its seed and settings. `save`
    and `load` include all of these.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], networks: Sequence[nn.Module], settings: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(trajectories)
        self.networks = list(networks)
        self.settings = list(settings)

    def history(self, name: str = "loss") -> np.ndarray:
        """One row per run, one column per epoch, the first at initialisation; runs that stopped early end in NaN."""
        if name not in self[0].history:
            raise unknown_name("history", name, self[0].history)
        length = max(len(t.history[name]) for t in self)
        out = np.full((len(self), length), np.nan)
        for row, t in zip(out, self):
            row[: len(t.history[name])] = t.history[name]
        return out

    def plot(self, name: str = "loss", ax: Any = None) -> Any:
        """One history over the epochs: a thin line per run, a thick one for the median over the seeds of a setting.

        Returns matplotlib axes.
        """
        curves = self.history(name)
        named = dict.fromkeys(k for s in self.settings for k in s if k != "seed")  # β may be set for some runs only
        keys = [k for k in named if len({s.get(k) for s in self.settings}) > 1]
        groups: dict[str, list[int]] = {}
        for i, s in enumerate(self.settings):
            groups.setdefault(", ".join(f"{k} {s[k]:g}" for k in keys if k in s), []).append(i)
        ax = get_axes(ax, "drawing a training", (6, 3.5))
        for number, (label, rows) in enumerate(groups.items()):
            ax.plot(curves[rows].T, color=f"C{number}", linewidth=0.8, alpha=0.4)
            seen = np.flatnonzero(~np.isnan(curves[rows]).all(0))  # all runs of a setting may have stopped early
            ax.plot(seen, np.nanmedian(curves[rows][:, seen], 0), color=f"C{number}", label=label or "median")
        ax.set(xlabel="epoch", ylabel=name.replace("_", " "))
        use_integer_ticks(ax)
        ax.legend(fontsize="small")
        return ax

    def epochs_to(self, loss: float) -> list[int | None]:
        """The first epoch of each run whose training loss is below a value."""
        return [t.epoch_reached(loss) for t in self]

    def save(self, folder: str | Path) -> None:
        """Write `runs.json` and a folder for each run: its trajectory, and the weights of its network.

        The folder may contain earlier saved runs; `runs.json` is replaced last. No pickle is used.
        """
        if not len(self) == len(self.networks) == len(self.settings):
            raise OptionError(
                f"Runs.save: {len(self)} trajectories, {len(self.networks)} networks, {len(self.settings)} settings. "
                "Save Runs that have one of each per run."
            )
        folder = Path(folder)
        entries = []
        for i, (trajectory, net, settings) in enumerate(zip(self, self.networks, self.settings)):
            place = _place(folder, i)
            trajectory.save(place)
            # if saving is interrupted, the checksums show which files belong together
            entries.append(
                RunDocument(settings, network=snapshot(net).save(place / "network"), trajectory=_checksum(place))
            )
        write_document(folder / "runs.json", RunsDocument(runs=entries))

    @classmethod
    def load(cls, folder: str | Path, like: nn.Module | None = None) -> Runs:
        """Read saved runs: trajectories, settings and networks, bit for bit. Networks are made by `pathlens.rebuild`.

        Parameters
        ----------
        folder : path
        like : nn.Module, optional
            A network with the architecture of the saved ones and any weights. Networks from the named constructors of
            `pathlens.models` do not need it.
        """
        folder = Path(folder)
        path = folder / "runs.json"
        trajectories, networks, settings = [], [], []
        for i, entry in enumerate(read_document(path, RunsDocument).runs):
            place = _place(folder, i)
            trajectories.append(Trajectory.load(place))
            taken = Snapshot.load(place / "network")
            found = checksum_of_tensors(place / "network"), _checksum(place)
            if found != (entry.network, entry.trajectory):
                raise FileFormatError(
                    f"{place}: belongs to another save than {path}, which was probably interrupted. Both were left "
                    "untouched; Trajectory.load still reads this folder on its own."
                )
            networks.append(rebuild(taken, like=like))
            settings.append(entry.settings)
        return cls(trajectories, networks, settings)

    def __repr__(self) -> str:
        final = [t.history["loss"][-1] for t in self if t.history.get("loss")]
        middle = f", median loss {float(np.median(final)):.3g}" if final else ""
        return f"Runs({len(self)} networks{middle})"


def _place(folder: Path, number: int) -> Path:
    return folder / f"run-{number:04d}"


def _checksum(place: Path) -> str:
    return hashlib.sha256((place / "trajectory.json").read_bytes()).hexdigest()
