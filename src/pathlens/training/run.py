"""The state of one training run: optimiser, generators, epochs, what is kept, checkpoints, CUDA graphs.

`loop.train` checks options and data, makes a `Run` and lets it go.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import DivergedError, OptionError, PathlensWarning, ResumeWarning, SignalWarning
from pathlens.recording import Moment, Trajectory
from pathlens.recording.inputs import computes_in
from pathlens.records import Record, Snapshot
from pathlens.training.augment import MOVES, crop_flip
from pathlens.training.batches import Rows, Sampled
from pathlens.training.checkpoints import load_checkpoint, save_checkpoint
from pathlens.training.inputs import Data
from pathlens.training.schedules import Schedule
from pathlens.training.stack import Loss, Penalty, Stack, capture, gated_parts
from pathlens.training.stopping import EarlyStopping
from pathlens.training.teacher import Teacher

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
_EVALUATED_AT_ONCE = 65536  # rows times members in one evaluation pass
_IMAGES_AT_ONCE = 8192  # the same for images, whose activations are larger
_WORTH_SHARING = 1e8  # floating-point operations in one step: about two milliseconds on one core
_NO_SIGNAL = 1e-7  # outputs that vary less than this, relative to the inputs, do not start to learn in float32


def derive_seed(seed: int, purpose: str) -> int:
    """An independent seed for each purpose of one run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7], "big")


def _digest(weights: Tensor) -> str:
    return hashlib.sha256(weights.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, purpose))


@dataclass
class Watch:
    """What is kept, and when."""

    epochs: frozenset[int]
    losses: tuple[float, ...]
    x: Tensor | None
    sensitivities: bool
    reached: list[set[float]] = field(default_factory=list)

    def reasons(self, member: int, epoch: int, loss: float) -> list[str]:
        """Why this epoch of this member is to be kept; empty if it is not."""
        found = [f"epoch {epoch}"] if epoch in self.epochs else []
        for level in self.losses:
            if loss < level and level not in self.reached[member]:
                self.reached[member].add(level)
                found.append(f"loss < {level:g}")
        return found


class Run:
    """Members trained together, from the first epoch or from a checkpoint on."""

    def __init__(
        self,
        members: list[nn.Module],
        settings: list[dict[str, Any]],
        source: Rows,
        device: torch.device,
        *,
        loss: Loss,
        optimizer: str,
        rate: Schedule,
        beta: Schedule | None,
        clip: float | None,
        full: bool,
        compiled: bool,
        autocast: torch.dtype | None,
        watch: Watch,
        config: dict[str, Any],
        trained: str | None = None,
        penalty: Penalty | None = None,
        validation: Data | None = None,
        patience: int | None = None,
        augmented: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        self.members, self.settings, self.source = members, settings, source
        self.data = data = source.data  # the rows that the batches of a step are taken from
        self.stack = Stack(members, device, trained)
        self.validation = validation
        self.stopping = None if patience is None else EarlyStopping(self.stack, patience)
        self.loss, self.rate, self.beta, self.clip, self.full = loss, rate, beta, clip, full
        self.compiled, self.watch, self.config, self.teacher = compiled, watch, config, teacher
        self.batch = source.batch
        self.epoch = self.step_count = 0
        self.trajectories = [Trajectory(config=config | {"member": s}) for s in settings]
        self.shuffles = [_generator(s["seed"], "shuffle") for s in settings]
        self.dropouts = [_generator(s["seed"], "dropout") for s in settings]
        self.moves = [_generator(s["seed"], "augment") for s in settings] if augmented else []
        self.uneven = any(s[k] != settings[0][k] for s in settings for k in ("lr", "weight_decay", "momentum"))
        # members with settings of their own are rows of the stack, each in a group of its own
        self.leaves = [self.stack.flat[i] for i in range(self.stack.k)] if self.uneven else [self.stack.flat]
        self.optimiser = self._optimiser(optimizer)
        step_loss = loss if teacher is None else teacher.loss(loss)
        self._gradient = self.stack.gradient_step(step_loss, autocast, penalty)
        self._lone = self.stack.lone_step(step_loss, autocast, penalty)
        self._captured: dict[tuple[int, ...], Callable[..., tuple[Tensor, Tensor]]] = {}
        self._graph_buffers: Callable[[], tuple[Tensor, Tensor]] | None = None
        self._dropout_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        few = torch.arange(min(len(data.x), 2), device=data.x.device)[None]  # batch-norm needs two rows
        rows = few if self.stack.needs_rows else None
        self._has_dropout = bool(self.stack.dropout_shapes(data.x[few], rows))
        # convolutions of one network are faster than grouped ones, and vmap leaves batch-norm no lower precision
        images = data.x.ndim == 4 and not isinstance(source, Sampled)
        self._in_lanes = device.type == "cuda" and images and not self._has_dropout
        self._taught: Tensor | None = None  # what the teacher says of every row, where rows stay as they are
        if teacher is not None and source.fixed and not augmented:
            self._taught = torch.cat([teacher.targets(part, 1) for part in data.x.split(_IMAGES_AT_ONCE)])
        self._restored_optimiser: dict[str, Tensor] | None = None
        # weights that the networks have had from outside: at the start, and at moments, whose records are taken of them
        self._worn = [{_digest(row)} for row in self.stack.flat]
        self._on_disk: set[tuple[int, int]] = set()  # (member, moment) pairs that this run's checkpoint already has

    def good_threads(self) -> int:
        """One thread for small steps: sharing them out costs more than it gains, many times more on a busy machine.

        A teacher is large as a rule.
        """
        if self.teacher is not None:
            return torch.get_num_threads()
        small = self.stack.device.type == "cpu" and self.stack.flops(self.data.x[: self.batch]) < _WORTH_SHARING
        return 1 if small else torch.get_num_threads()

    # --- optimiser ---------------------------------------------------------------------------------------------

    def _optimiser(self, name: str) -> torch.optim.Optimizer:
        cuda = self.stack.device.type == "cuda"
        groups = []
        for leaf, s in zip(self.leaves, self.settings):
            rate = torch.tensor(float(s["lr"]), device=self.stack.device) if cuda else float(s["lr"])
            group: dict[str, Any] = {"params": [leaf], "lr": rate, "weight_decay": s["weight_decay"]}
            if name in ("sgd", "rmsprop"):
                group["momentum"] = s["momentum"]
            elif s["momentum"]:
                raise OptionError(f"train: momentum is an option of 'sgd' and 'rmsprop', not of {name!r}.")
            groups.append(group)
        common: dict[str, Any] = {} if name == "rmsprop" else {"fused": True}
        if cuda and name != "sgd":
            common["capturable"] = True
        return OPTIMISERS[name](groups, **common)

    def _set_rate(self, progress: float) -> None:
        factor = self.rate(progress)
        for group, s in zip(self.optimiser.param_groups, self.settings):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(s["lr"] * factor)
            else:
                group["lr"] = s["lr"] * factor

    def _apply(self, gradient: Tensor) -> None:
        if self.clip is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.clip / (norm + 1e-6)).clamp_max(1.0)  # as torch.nn.utils.clip_grad_norm_
        for i, leaf in enumerate(self.leaves):
            leaf.grad = gradient[i] if self.uneven else gradient
        self.optimiser.step()

    # --- one step ----------------------------------------------------------------------------------------------

    def _draws(self, x: Tensor, rows: Tensor | None) -> list[Tensor]:
        if not self._has_dropout:
            return []
        shape = tuple(x.shape)
        if shape not in self._dropout_shapes:
            self._dropout_shapes[shape] = self.stack.dropout_shapes(x, rows)
        dtype = computes_in(self.stack.pattern, x)
        return [
            torch.stack([torch.rand(size, generator=g, dtype=dtype) for g in self.dropouts]).to(x.device)
            for size in self._dropout_shapes[shape]
        ]

    def _step(self, index: Tensor) -> Tensor:
        """One gradient step of all members on the batches that `index` names; their losses."""
        with torch.no_grad():
            losses, gradient = self._side_by_side(index) if self._in_lanes else self._stacked(*self._fetch(index))
            self._apply(gradient)
        return losses

    def _stacked(self, x: Tensor, y: Tensor, w: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        arguments = (self.stack.flat, x, y, w, rows, self._draws(x, rows), *self.stack.rest())
        return self._replayed(self._gradient, (*x.shape, *y.shape), arguments)(*arguments)

    def _side_by_side(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """One member after the other, as in `_lanes`, for a batch that is not of the graph's size."""
        found = []
        for i in range(self.stack.k):
            arguments = self._lone_arguments(index, i)
            key = (*arguments[1].shape, *arguments[2].shape)
            found.append(self._replayed(self._lone, key, arguments)(*arguments))
        return torch.stack([loss for loss, _ in found]), torch.stack([gradient for _, gradient in found])

    def _replayed(
        self, function: Callable[..., tuple[Tensor, Tensor]], key: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function, or what it was captured as for these shapes."""
        if not self.compiled:
            return function
        if key not in self._captured:
            self._captured[key] = capture(function, arguments)
        return self._captured[key]

    def _lone_arguments(self, index: Tensor, i: int) -> tuple[Any, ...]:
        """What `lone_step` takes for member i, with the channels of its images last."""
        x, y, w, rows = self._fetch(index[..., i, :])
        x = x.contiguous(memory_format=torch.channels_last)
        return (self.stack.flat[i], x, y, w, rows, [], *(t[i] for t in self.stack.rest()))

    def _fetch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """A batch of each member; `index` is one tensor of row numbers, or those and the moves of the images."""
        index, moves = index if self.moves else (index, None)
        weights = self.data.weights
        rows = index if self.stack.needs_rows else None
        x = self.data.x[index] if moves is None else crop_flip(self.data.x, index, moves)
        if self.teacher is not None and self._taught is None:
            y = self.teacher.targets(x, index.ndim)
        else:
            y = (self.data.y if self._taught is None else self._taught)[index]
        return x, y, None if weights is None else weights[index], rows

    def _epoch_of_steps(self, epochs: int, graph: Callable[[Tensor], Tensor] | None) -> Tensor:
        """All steps of one epoch; the mean loss of each member over its batches."""
        running = torch.zeros(self.stack.k, dtype=torch.float64, device=self.stack.device)
        steps, seen, first = self.source.steps, 0, self.source.data
        for data, index in self.source.batches(self.shuffles):
            self.data, rows = data, index.shape[-1]
            # an epoch whose end is not known has one rate; a loader may give more batches than it has said
            self._set_rate(self.epoch / epochs if steps is None else min(self.step_count / (epochs * steps), 1.0))
            if self.moves:
                moves = torch.stack([torch.randint(MOVES, (rows,), generator=g) for g in self.moves])
                index = torch.stack([index, moves.to(index.device)])
            whole = rows == self.batch and (data.x.shape, data.y.shape) == (first.x.shape, first.y.shape)
            losses = graph(index) if graph is not None and whole else self._step(index)
            running += losses.double() * rows
            seen += rows
            self.step_count += 1
        return (running / seen).cpu()

    # --- epochs ------------------------------------------------------------------------------------------------

    def go(
        self,
        epochs: int,
        folder: Path | None,
        every: int,
        stop_below: float | None,
        tick: Callable[[int, Tensor], None],
    ) -> None:
        """Train until the last epoch, or until every member is below `stop_below` or out of patience."""
        self.stack.pattern.train()
        if self.epoch == 0:
            if self.beta is not None:
                self.stack.set_buffer("beta", self.beta(0.0))
            self._finish_epoch(None)
            self._check_signal()
            self._check_gates()
        losses = self._last_losses()
        on_cuda = self.stack.device.type == "cuda"
        useful = self.compiled and on_cuda and not self._has_dropout and self.epoch < epochs
        graph = self._cuda_graph() if useful else None

        def done() -> bool:
            below = stop_below is not None and bool((losses < stop_below).all())
            return self.epoch >= epochs or below or (self.stopping is not None and bool(self.stopping.stopped.all()))

        while not done():
            if self.beta is not None:
                self.stack.set_buffer("beta", self.beta((self.epoch + 1) / epochs))
            running = self._epoch_of_steps(epochs, graph)
            self.epoch += 1
            self._finish_epoch(running)
            losses = self._last_losses()
            if not torch.isfinite(losses).any():
                raise DivergedError(
                    f"train: the loss of every network is NaN or infinite at epoch {self.epoch}. Lower lr "
                    f"({self.settings[0]['lr']:g}), or clip gradients (clip=1.0)."
                )
            if folder is not None and (done() or self.epoch % every == 0):
                self.save(folder)
            tick(self.epoch, losses)
        if self.stopping is not None:
            self.stopping.put_back()
        if not torch.isfinite(losses).all():
            bad = [s["seed"] for s, v in zip(self.settings, losses) if not math.isfinite(float(v))]
            warnings.warn(
                f"train: {len(bad)} of {self.stack.k} networks diverged (seeds {bad}).", PathlensWarning, stacklevel=4
            )

    def _last_losses(self) -> Tensor:
        return torch.tensor([t.history["loss"][-1] for t in self.trajectories], dtype=torch.float64)

    def _finish_epoch(self, running: Tensor | None) -> None:
        """Write the epoch into the histories and keep what was asked for."""
        data = self.source.data
        batch = max(1, (_IMAGES_AT_ONCE if data.x.ndim == 4 else _EVALUATED_AT_ONCE) // self.stack.k)
        columns: dict[str, Tensor | None] = {}
        if self.full or running is None:
            losses, accuracy = self._evaluate(self.source.evaluated() if self.full else [data], batch)
            if self.full or self.source.at_hand:  # the accuracy on one batch would stand alone
                columns["accuracy"] = accuracy
        else:
            losses = running
        columns["loss"] = losses
        if data.x_test is not None and data.y_test is not None and not self.stack.needs_rows:
            columns["test_loss"], columns["test_accuracy"] = self.stack.evaluate(
                data.x_test, data.y_test, self.loss, None, batch
            )
        if (held := self.validation) is not None:
            columns["validation"], columns["validation_accuracy"] = self.stack.evaluate(
                held.x, held.y, self.loss, None, batch, held.weights
            )
        for i, (net, t) in enumerate(zip(self.members, self.trajectories)):
            if self.stopping is not None and self.stopping.stopped[i]:
                continue
            for name, values in columns.items():
                if values is not None:
                    t.history.setdefault(name, []).append(float(values[i]))
            reasons = self.watch.reasons(i, self.epoch, float(losses[i]))
            if reasons:
                self.stack.write(i, net)
                self._worn[i].add(_digest(self.stack.flat[i]))
                t.append(
                    net,
                    self.watch.x,
                    self.step_count,
                    epoch=self.epoch,
                    loss=float(losses[i]),
                    reason=", ".join(reasons),
                    sensitivities=self.watch.sensitivities,
                )
        if self.stopping is not None:
            assert columns["validation"] is not None
            self.stopping.see(self.epoch, columns["validation"])

    def _evaluate(self, parts: Iterable[Data], batch: int) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy of each member on the rows of all parts."""
        found = []
        for data in parts:
            ids = torch.arange(len(data.x), device=data.x.device) if self.stack.needs_rows else None
            means = self.stack.evaluate(data.x, data.y, self.loss, ids, batch, data.weights)
            found.append((len(data.x), *means))
        n = sum(rows for rows, _, _ in found)
        losses = torch.stack([loss * (rows / n) for rows, loss, _ in found]).sum(0)
        right = [accuracy * (rows / n) for rows, _, accuracy in found if accuracy is not None]
        return losses, torch.stack(right).sum(0) if right else None

    def _check_signal(self) -> None:
        """Warn if outputs do not depend on the input at the start: such a network does not begin to learn."""
        x = self.data.x[:256]
        if len(x) < 2 or self.stack.needs_rows or not x.is_floating_point() or not bool(x.std() > 0):
            return  # whole numbers are looked up: their size says nothing
        varies = float(self.stack.outputs_of(0, x).std(0).max())
        if varies < _NO_SIGNAL * float(x.std()):
            warnings.warn(
                f"train: the network's outputs vary by {varies:.0e} over the data at initialisation. Each soft gate "
                "halves the signal; initialise with init='preserve', or use batch-norm.",
                SignalWarning,
                stacklevel=5,
            )

    def _check_gates(self) -> None:
        """Warn if weights that make gates are to be trained, and the gates pass no gradient to them."""
        for start, part in gated_parts(self.stack.pattern):
            if not any(name.startswith(f"{start}source.") for name in self.stack.names):
                continue  # frozen gates, or a network that gates itself
            with torch.enable_grad():
                heard = part.gate(torch.zeros(1, device=self.stack.device, requires_grad=True)).requires_grad
            if not heard:
                warnings.warn(
                    f"train: the weights of the gates are to be trained, but {part.gate.label} gates have no gradient: "
                    "they stay as they are. Use net.with_gate('soft') or net.with_gate('straight_through'), or "
                    "trained='values' to freeze the gates.",
                    SignalWarning,
                    stacklevel=5,
                )
                return

    # --- CUDA --------------------------------------------------------------------------------------------------

    def _cuda_graph(self) -> Callable[[Tensor], Tensor] | None:
        """The whole step (fetching the batch, gradient, optimiser) as one CUDA graph; weights are as before it."""
        if isinstance(self.source, Sampled):
            return None
        torch._dynamo.reset()  # else the compiler gives up on the ninth training of a process, and only warns
        shape = (self.stack.k, self.batch)
        index = torch.zeros((2, *shape) if self.moves else shape, dtype=torch.long, device=self.stack.device)
        gradients = self._lanes(index) if self._in_lanes else self._together(index)
        # The graph writes to its buffers ever after; a step outside the graph takes the optimiser's hold on them away.
        self._graph_buffers = gradients

        def body() -> Tensor:
            losses, gradient = gradients()
            self._apply(gradient)
            return losses

        changed = [self.stack.flat, *self.stack.buffers.values()]
        saved = [t.clone() for t in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            losses = body()
        with torch.no_grad():  # the warm-up steps did not happen
            for t, s in zip(changed, saved):
                t.copy_(s)
            for state in self.optimiser.state.values():
                for v in state.values():
                    if isinstance(v, Tensor):
                        v.zero_()
        if self._restored_optimiser is not None:
            self._load_optimiser(self._restored_optimiser)

        held = self.data

        def replay(batch_index: Tensor) -> Tensor:
            if self.data is not held:
                held.x.copy_(self.data.x)
                held.y.copy_(self.data.y)
            index.copy_(batch_index)
            graph.replay()
            return losses

        return replay

    def _together(self, index: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Loss and gradient of all members in one compiled step."""
        fused = torch.compile(capture(self._gradient, (self.stack.flat, *self._fetch(index), [], *self.stack.rest())))
        return lambda: fused(self.stack.flat, *self._fetch(index), [], *self.stack.rest())

    def _lanes(self, index: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """The same for networks on images: a compiled step for one member, all members side by side on streams.

        Batched over members, convolutions become grouped ones, which are slower than those of one network with the
        channels last (`benchmarks/training.py`).
        """
        k = self.stack.k
        losses = torch.zeros(k, dtype=self.stack.flat.dtype, device=self.stack.device)
        gradient = torch.zeros_like(self.stack.flat)
        streams = [torch.cuda.Stream() for _ in range(k)]

        fused = torch.compile(capture(self._lone, self._lone_arguments(index, 0)))

        def gradients() -> tuple[Tensor, Tensor]:
            main = torch.cuda.current_stream()
            for i, stream in enumerate(streams):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    loss, one = fused(*self._lone_arguments(index, i))
                    losses[i].copy_(loss)
                    gradient[i].copy_(one)
            for stream in streams:
                main.wait_stream(stream)
            return losses, gradient

        return gradients

    # --- checkpoints -------------------------------------------------------------------------------------------

    @staticmethod
    def _moment_path(folder: Path, member: int, number: int, what: str) -> Path:
        return folder / "moments" / f"member{member:04d}-{number:04d}-{what}"

    def save(self, folder: Path) -> None:
        """Write a checkpoint of everything that decides what comes next."""
        tensors: dict[str, Tensor] = {"flat": self.stack.flat}
        tensors |= {f"fixed/{k}": v for k, v in self.stack.fixed.items()}
        tensors |= {f"buffer/{k}": v for k, v in self.stack.buffers.items()}
        for i, leaf in enumerate(self.leaves):
            for k, v in self.optimiser.state[leaf].items():
                if v is not None:  # SGD without momentum keeps an empty slot
                    tensors[f"optimiser/{i}/{k}"] = torch.as_tensor(v)
        for i, (a, b) in enumerate(zip(self.shuffles, self.dropouts)):
            tensors[f"shuffle/{i}"], tensors[f"dropout/{i}"] = a.get_state(), b.get_state()
        tensors |= {f"moves/{i}": g.get_state() for i, g in enumerate(self.moves)}
        tensors |= self.source.state()
        if self.stopping is not None:
            tensors |= self.stopping.tensors()
        moments = []
        for i, t in enumerate(self.trajectories):
            for j, m in enumerate(t.moments):
                if (i, j) in self._on_disk:
                    continue
                if m.snapshot is not None:
                    m.snapshot.save(self._moment_path(folder, i, j, "snapshot"))
                if m.record is not None:
                    m.record.save(self._moment_path(folder, i, j, "record"))
                self._on_disk.add((i, j))
            moments.append(
                [[m.step, m.epoch, m.reason, m.loss, m.snapshot is not None, m.record is not None] for m in t.moments]
            )
        meta = {
            "config": self.config,
            "step": self.step_count,
            "histories": [t.history for t in self.trajectories],
            "moments": moments,
            "reached": [sorted(r) for r in self.watch.reached],
            "worn": [sorted(w) for w in self._worn],
        }
        save_checkpoint(folder, self.epoch, tensors, meta)

    def restore(self, folder: Path) -> None:
        """Go back to the newest checkpoint of this run, if there is one."""
        found = load_checkpoint(folder, self.config)
        if found is None:
            return
        tensors, meta = found
        self._check_start(folder, tensors, meta)
        with torch.no_grad():
            self.stack.flat.copy_(tensors["flat"])
            for k, v in self.stack.fixed.items():
                v.copy_(tensors[f"fixed/{k}"])
            for k, v in self.stack.buffers.items():
                v.copy_(tensors.get(f"buffer/{k}", v))  # earlier versions kept those of the state dict alone
        if self.stopping is not None:
            self.stopping.load(tensors)
        self._restored_optimiser = {k: v for k, v in tensors.items() if k.startswith("optimiser/")}
        self._load_optimiser(self._restored_optimiser)
        for i, (a, b) in enumerate(zip(self.shuffles, self.dropouts)):
            a.set_state(tensors[f"shuffle/{i}"])
            b.set_state(tensors[f"dropout/{i}"])
        for i, g in enumerate(self.moves):
            g.set_state(tensors[f"moves/{i}"])
        self.source.load(tensors)
        self.epoch, self.step_count = int(meta["epoch"]), int(meta["step"])
        self.watch.reached = [set(r) for r in meta["reached"]]
        for i, (t, history, entries) in enumerate(zip(self.trajectories, meta["histories"], meta["moments"])):
            t.history = history
            for j, (step, epoch, reason, loss, has_snapshot, has_record) in enumerate(entries):
                snapshot = Snapshot.load(self._moment_path(folder, i, j, "snapshot")) if has_snapshot else None
                record = Record.load(self._moment_path(folder, i, j, "record")) if has_record else None
                t.moments.append(Moment(step, epoch, reason, loss, snapshot, record))
                self._on_disk.add((i, j))

    def _check_start(self, folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Warn of networks whose weights this training never gave them, so that they began as others."""
        if "worn" not in meta:  # checkpoints of earlier versions do not tell
            return
        worn = [set(w) for w in meta["worn"]]
        for name in ("flat", "kept/0"):  # what networks have after a training, with patience the best
            for known, row in zip(worn, tensors.get(name, ())):
                known.add(_digest(row))
        strange = [i for i, (known, own) in enumerate(zip(worn, self._worn)) if not own <= known]
        self._worn = worn
        if strange:
            which = "the network has" if self.stack.k == 1 else f"{len(strange)} of {self.stack.k} networks have"
            warnings.warn(
                f"train: {folder}: {which} other weights than the training that goes on here began with; they are "
                "replaced by its. Give every initialisation a folder of its own, or resume=False to start over.",
                ResumeWarning,
                stacklevel=5,
            )

    def _load_optimiser(self, tensors: dict[str, Tensor]) -> None:
        for i, leaf in enumerate(self.leaves):
            prefix = f"optimiser/{i}/"
            state = self.optimiser.state[leaf]
            for key, value in tensors.items():
                if key.startswith(prefix):
                    name = key.removeprefix(prefix)
                    if isinstance(state.get(name), Tensor):  # a CUDA graph holds on to this very tensor
                        state[name].copy_(value)
                    else:
                        state[name] = value.to(self.stack.device).clone()
