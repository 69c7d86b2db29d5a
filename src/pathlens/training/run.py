"""`TrainingRun`: the epochs of a training with histories, kept moments, early stopping, callbacks and checkpoints."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import DivergedError, OptionError, PathlensWarning, ResumeWarning, SignalWarning
from pathlens.recording import Trajectory, as_rows
from pathlens.training.batches import SamplerBatches, make_source
from pathlens.training.checkpoints import MomentFiles, forget_checkpoints, load_checkpoint, save_checkpoint
from pathlens.training.fingerprints import describe, digest, network_digest
from pathlens.training.inputs import Data, DataReader, as_device
from pathlens.training.members import derive_seed
from pathlens.training.options import TrainingOptions, TrainingState
from pathlens.training.stack import Stack, gated_parts
from pathlens.training.steps import IMAGES_AT_ONCE, StepRunner
from pathlens.training.stopping import EarlyStopping
from pathlens.training.teacher import TeacherTargets

_ROWS_AT_ONCE = 65536  # rows times members in one evaluation pass
_NO_SIGNAL = 1e-7  # a network whose outputs vary less than this, relative to the inputs, does not learn in float32


class TrainingRun:
    """The training of several networks together, from the first epoch or from a checkpoint.

    Parameters
    ----------
    members, settings
        The networks, and the seed and settings of each.
    data
        The data of `train`.
    options
        Options that apply to all networks.
    """

    def __init__(
        self, members: list[nn.Module], settings: list[dict[str, Any]], data: Any, options: TrainingOptions
    ) -> None:
        self.members, self.settings, self.options = members, settings, options
        device = options.device
        place = next(members[0].parameters()).device if device is None else as_device(device, "train: device")
        reader = DataReader(members[0], options.loss, place)
        self.source = make_source(data, options.batch_size, reader, derive_seed(options.seed, "evaluation"))
        self._check_augment()
        self.validation = self._read_validation(reader)
        teacher = (
            None if options.teacher is None else TeacherTargets(options.teacher, options, self.source.data, reader)
        )
        self.config = self._make_config(teacher)
        self.stack = Stack(members, place, options.trained)
        self.steps = StepRunner(self.stack, self.source, settings, options, teacher)
        patience = options.stopping.patience
        self.stopping = None if patience is None else EarlyStopping(self.stack, patience)
        self.epoch = 0
        self.trajectories = [Trajectory(config=self.config | {"member": s}) for s in settings]
        self._recorded = None if options.keep.X is None else as_rows(options.keep.X, like=members[0])
        self._reached: list[set[float]] = [set() for _ in members]  # losses of `keep` that were already reached
        # digests of all weights that the caller's networks have had: at the start, and after each update
        self._seen_weight_digests = [{digest([row])} for row in self.stack.flat]
        self._moments = None if options.checkpoints is None else MomentFiles(Path(options.checkpoints.folder))

    def _check_augment(self) -> None:
        augment, x, sampled = self.options.augment, self.source.data.x, isinstance(self.source, SamplerBatches)
        if augment is not None and (sampled or x.ndim != 4):
            got = "a sampler" if sampled else f"inputs of shape {tuple(x.shape)}"
            raise OptionError(
                f"train: augment={augment!r} needs images of shape (n, channels, height, width), got {got}."
            )

    def _read_validation(self, reader: DataReader) -> Data | None:
        if self.options.validation is None:
            if self.options.stopping.patience is not None:
                raise OptionError("train: patience needs held-out rows. Give validation=(X, y).")
            return None
        if getattr(reader.net, "needs_rows", False):
            raise OptionError("train: a table of gates has gates for its own examples only and cannot be validated.")
        return reader.read_validation(self.options.validation)

    def _make_config(self, teacher: TeacherTargets | None) -> dict[str, Any]:
        """The options and data as JSON; with checkpoints, which need them, also digests of data and networks."""
        options, source, first = self.options, self.source, self.members[0]
        config = {
            "kind": getattr(first, "kind", type(first).__name__),
            "parameters": sum(p.numel() for p in first.parameters()),
            "dtype": str(source.data.x.dtype),
            "members": self.settings,
            "batch_size": source.batch_size,
            "evaluate": options.keep.evaluate or ("full" if source.complete else "running"),
            "keep_epochs": options.keep.epochs,
            "keep_losses": options.keep.losses,
            **asdict(options.stopping),
        }
        for name in ("epochs", "loss", "optimizer", "scheduler", "beta", "clip", "penalty", "augment", "trained"):
            config[name] = describe(getattr(options, name))
        if options.checkpoints is not None:
            config |= {
                "network": network_digest(self.members, options.trained, options.beta is None),
                "data": source.fingerprint(),
                "validation": None if self.validation is None else self.validation.fingerprint(),
                "teacher": None if teacher is None else teacher.config(),
            }
        # as a checkpoint returns it: lists instead of tuples, Python numbers instead of NumPy's
        return json.loads(json.dumps(config, default=lambda number: number.item()))

    # --- epochs ------------------------------------------------------------------------------------------------

    def execute(self, report: Callable[[Tensor], None]) -> None:
        """Train until the last epoch, or until training stops early; calls `report` with the losses of each epoch."""
        options = self.options
        self.stack.pattern.train()
        if self.epoch == 0:
            if options.beta is not None:
                self.stack.set_buffer("beta", options.beta(0.0))
            self._finish_epoch(None)
            self._check_signal()
            self._check_gates()
        done = self._call_callbacks() or self._is_finished()
        if not done:
            self.steps.prepare_graph()
        while not done:
            if options.beta is not None:
                self.stack.set_buffer("beta", options.beta((self.epoch + 1) / options.epochs))
            running = self.steps.run_epoch(self.epoch)
            self.epoch += 1
            self._finish_epoch(running)
            losses = self._last_losses()
            if not torch.isfinite(losses).any():
                raise DivergedError(
                    f"train: the loss of every network is NaN or infinite at epoch {self.epoch}. Lower lr "
                    f"({self.settings[0]['lr']:g}), or clip gradients (clip=1.0)."
                )
            done = self._call_callbacks() or self._is_finished()
            if options.checkpoints is not None and (done or self.epoch % options.checkpoints.every == 0):
                self._save(Path(options.checkpoints.folder))
            report(losses)
        if self.stopping is not None:
            self.stopping.restore_best(torch.ones(self.stack.k, dtype=torch.bool))
        bad = [s["seed"] for s, v in zip(self.settings, self._last_losses().tolist()) if not math.isfinite(v)]
        if bad:
            warnings.warn(
                f"train: {len(bad)} of {self.stack.k} networks diverged (seeds {bad}).", PathlensWarning, stacklevel=4
            )

    def _last_losses(self) -> Tensor:
        return torch.tensor([t.history["loss"][-1] for t in self.trajectories], dtype=torch.float64)

    def _is_finished(self) -> bool:
        below = self.options.stopping.loss_below
        if self.stopping is not None and bool(self.stopping.stopped.all()):
            return True
        return self.epoch >= self.options.epochs or (below is not None and bool((self._last_losses() < below).all()))

    def _call_callbacks(self) -> bool:
        """Call all callbacks; returns whether one of them stops the training."""
        losses = tuple(self._last_losses().tolist())
        state = TrainingState(self.epoch, self.options.epochs, losses, tuple(self.trajectories), self._updated_networks)
        answers = [bool(callback(state)) for callback in self.options.callbacks]  # all are called, also if one stops
        return any(answers)

    def _updated_networks(self) -> list[nn.Module]:
        return [self._update_network(i) for i in range(len(self.members))]

    def _update_network(self, i: int) -> nn.Module:
        """Member i with its current weights."""
        self.stack.write(i, self.members[i])
        self._seen_weight_digests[i].add(digest([self.stack.flat[i]]))
        return self.members[i]

    def _finish_epoch(self, running: Tensor | None) -> None:
        """Evaluate all networks, append to their histories and keep moments; `running` are the mean losses."""
        columns = self._evaluate_all(running)
        for i, t in enumerate(self.trajectories):
            if self.stopping is not None and self.stopping.stopped[i]:
                continue
            for name, values in columns.items():
                t.history.setdefault(name, []).append(float(values[i]))
            self._keep_moment(i, t)
        if self.stopping is not None:
            self.stopping.update(self.epoch, columns["validation"])

    def _keep_moment(self, i: int, trajectory: Trajectory) -> None:
        """Append a moment of member i if `keep` requests it."""
        keep, loss = self.options.keep, trajectory.history["loss"][-1]
        reached = [level for level in keep.losses if loss < level and level not in self._reached[i]]
        self._reached[i].update(reached)
        reasons = [f"epoch {self.epoch}"] if self.epoch in keep.epochs else []
        reasons += [f"loss < {level:g}" for level in reached]
        if reasons:
            trajectory.append(
                self._update_network(i),
                self._recorded,
                self.steps.count,
                epoch=self.epoch,
                loss=loss,
                reason=", ".join(reasons),
                sensitivities=keep.sensitivities,
            )

    # --- evaluation --------------------------------------------------------------------------------------------

    def _evaluate_all(self, running: Tensor | None) -> dict[str, Tensor]:
        """New entries of the histories, one number for each member."""
        data, held = self.source.data, self.validation
        evaluates_all = self.config["evaluate"] == "full"
        columns: dict[str, Tensor | None] = {}
        if evaluates_all or running is None:
            parts = self.source.evaluated() if evaluates_all else [data]
            columns["loss"], columns["accuracy"] = self._evaluate(parts)
            if not (evaluates_all or self.source.complete):
                columns["accuracy"] = None  # the loss on the first batch only
        else:
            columns["loss"] = running
        if data.x_test is not None and data.y_test is not None and not self.stack.needs_rows:
            columns["test_loss"], columns["test_accuracy"] = self._evaluate([Data(data.x_test, data.y_test)])
        if held is not None:
            columns["validation"], columns["validation_accuracy"] = self._evaluate([held])
        return {name: values for name, values in columns.items() if values is not None}

    def _evaluate(self, parts: Iterable[Data]) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy of each member on the rows of all parts."""
        found, loss = [], self.options.loss_function
        for data in parts:
            batch = max(1, (IMAGES_AT_ONCE if data.x.ndim == 4 else _ROWS_AT_ONCE) // self.stack.k)
            rows = torch.arange(len(data.x), device=data.x.device) if self.stack.needs_rows else None
            found.append((len(data.x), *self.stack.evaluate(data.x, data.y, loss, rows, batch, data.weights)))
        n = sum(count for count, _, _ in found)
        losses = torch.stack([loss * (count / n) for count, loss, _ in found]).sum(0)
        right = [accuracy * (count / n) for count, _, accuracy in found if accuracy is not None]
        return losses, torch.stack(right).sum(0) if right else None

    def _check_signal(self) -> None:
        """Warn if outputs do not depend on the input at the start: such a network does not begin to learn."""
        x = self.source.data.x[:256]
        if len(x) < 2 or self.stack.needs_rows or not x.is_floating_point() or not bool(x.std() > 0):
            return  # integers are indices of an embedding
        varies = float(self.stack.first_outputs(x.clone()).std(0).max())
        if varies < _NO_SIGNAL * float(x.std()):
            warnings.warn(
                f"train: the network's outputs vary by {varies:.0e} over the data at initialisation. Each soft gate "
                "halves the signal; initialise with init='preserve', or use batch-norm.",
                SignalWarning,
                stacklevel=5,
            )

    def _check_gates(self) -> None:
        """Warn if the weights of the gates are trained but get no gradient."""
        for start, part in gated_parts(self.stack.pattern):
            if not any(name.startswith(f"{start}source.") for name in self.stack.names):
                continue  # frozen gates, or a network that gates itself
            with torch.enable_grad():
                passes = part.gate(torch.zeros(1, device=self.stack.device, requires_grad=True)).requires_grad
            if not passes:
                warnings.warn(
                    f"train: the weights of the gates are trained, but {part.gate.label} gates have no gradient: "
                    "they do not change. Use net.with_gate('soft') or net.with_gate('straight_through'), or "
                    "trained='values' to freeze the gates.",
                    SignalWarning,
                    stacklevel=5,
                )
                return

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _save(self, folder: Path) -> None:
        """Write a checkpoint of everything that determines the next epochs."""
        assert self._moments is not None
        tensors = {f"stack/{name}": t for name, t in self.stack.tensors().items()} | self.steps.state()
        if self.stopping is not None:
            tensors |= self.stopping.state()
        meta = {
            "config": self.config,
            "step": self.steps.count,
            "histories": [t.history for t in self.trajectories],
            "moments": [self._moments.save(i, t.moments) for i, t in enumerate(self.trajectories)],
            "reached": [sorted(levels) for levels in self._reached],
            "seen_weight_digests": [sorted(digests) for digests in self._seen_weight_digests],
        }
        save_checkpoint(folder, self.epoch, tensors, meta)

    def restore(self) -> None:
        """Continue from the newest checkpoint of this training, if there is one."""
        assert self.options.checkpoints is not None and self._moments is not None
        folder = Path(self.options.checkpoints.folder)
        if not self.options.checkpoints.resume:
            forget_checkpoints(folder)
        found = load_checkpoint(folder, self.config)
        if found is None:
            return
        tensors, meta = found
        self._check_start(folder, tensors, meta["seen_weight_digests"])
        with torch.no_grad():
            for name, own in self.stack.tensors().items():
                own.copy_(tensors[f"stack/{name}"])
        if self.stopping is not None:
            self.stopping.load(tensors)
        self.epoch = int(meta["epoch"])
        self.steps.load(tensors, self.epoch, int(meta["step"]))
        self._reached = [set(levels) for levels in meta["reached"]]
        for i, (t, history, entries) in enumerate(zip(self.trajectories, meta["histories"], meta["moments"])):
            t.history, t.moments = history, self._moments.load(i, entries)

    def _check_start(self, folder: Path, tensors: dict[str, Tensor], saved: list[list[str]]) -> None:
        """Warn if a network has weights that it never had in the saved training: it was initialised differently."""
        seen = [set(digests) for digests in saved]
        for name in ("stack/flat", "kept/0"):  # after training; with patience, the best weights
            for known, row in zip(seen, tensors.get(name, ())):
                known.add(digest([row]))
        strange = [i for i, (known, own) in enumerate(zip(seen, self._seen_weight_digests)) if not own <= known]
        self._seen_weight_digests = seen
        if strange:
            which = "the network has" if self.stack.k == 1 else f"{len(strange)} of {self.stack.k} networks have"
            warnings.warn(
                f"train: {folder}: {which} other initial weights than the saved training; the weights of the "
                "checkpoint are used. Use a separate folder for every initialisation, or "
                "checkpoints=Checkpoints(folder, resume=False) to start over.",
                ResumeWarning,
                stacklevel=5,
            )
