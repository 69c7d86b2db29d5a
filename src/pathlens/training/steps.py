"""The gradient steps of a training: batches, gradients, optimizer, learning rates, CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import OptionError
from pathlens.recording.inputs import computes_in
from pathlens.training.augment import MOVES, crop_flip
from pathlens.training.batches import RowBatches, SamplerBatches
from pathlens.training.members import derive_seed
from pathlens.training.optimizers import (
    in_cuda_graph,
    is_scheduler_factory,
    learning_rate,
    make_optimizer,
    make_scheduler,
)
from pathlens.training.options import TrainingOptions
from pathlens.training.schedules import SCHEDULES
from pathlens.training.stack import Stack, capture
from pathlens.training.teacher import TeacherTargets

IMAGES_AT_ONCE = 8192  # images times members in one forward pass
_WORTH_SHARING = 1e8  # floating-point operations in one step: about two milliseconds on one core

Gradients = tuple[Tensor, Tensor]  # losses (k,) and gradients (k, p) of the members


class StepRunner:
    """Takes the gradient steps of all members of a stack."""

    def __init__(
        self,
        stack: Stack,
        source: RowBatches,
        settings: Sequence[dict[str, Any]],
        options: TrainingOptions,
        teacher: TeacherTargets | None,
    ) -> None:
        self.stack, self.source, self.settings, self.options, self.teacher = stack, source, settings, options, teacher
        self.data = data = source.data  # the rows that the indices of a batch refer to
        self.count = 0  # steps taken
        augmented = options.augment is not None
        self.shuffles = self._generators("shuffle")
        self.dropouts = self._generators("dropout")
        self.moves = self._generators("augment") if augmented else []

        # Members with their own settings are groups of their own; so are those of an optimizer that is not known to
        # treat every weight alone.
        own = [{k: v for k, v in s.items() if k not in ("seed", "beta")} for s in settings]
        self.separate = not isinstance(options.optimizer, str) or any(s != own[0] for s in own)
        self.leaves = [stack.flat[i] for i in range(stack.k)] if self.separate else [stack.flat]
        self.optimizer = make_optimizer(options.optimizer, self.leaves, own)
        self._schedule = self._scheduler = None
        if isinstance(options.scheduler, str):
            self._schedule = SCHEDULES[options.scheduler]
        elif is_scheduler_factory(options.scheduler):
            self._scheduler = make_scheduler(options.scheduler, self.optimizer)  # type: ignore[arg-type]
        else:
            self._schedule = options.scheduler  # type: ignore[assignment]

        loss = options.loss_function if teacher is None else teacher.loss(options.loss_function)
        self._gradient = stack.gradient_function(loss, options.execution.autocast, options.penalty)
        self._captured: dict[tuple[int, ...], Callable[..., Gradients]] = {}
        self._dropout_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        few = torch.arange(min(len(data.x), 2), device=data.x.device)[None]  # batch-norm needs two rows
        self._has_dropout = bool(stack.dropout_shapes(data.x[few], few if stack.needs_rows else None))
        # convolutions of one network are faster than grouped ones, and vmap gives batch-norm no lower precision
        images = data.x.ndim == 4 and not isinstance(source, SamplerBatches)
        self._one_by_one = stack.device.type == "cuda" and images and not self._has_dropout
        self._teacher_targets: Tensor | None = None  # of every row, if rows do not change
        if teacher is not None and source.fixed and not augmented:
            self._teacher_targets = torch.cat([teacher.targets(part, 1) for part in data.x.split(IMAGES_AT_ONCE)])
        self._graph: Callable[[Tensor], Tensor] | None = None
        self._graph_buffers: Callable[[], Gradients] | None = None
        self._graph_options: list[dict[str, Any]] = []
        self._restored: dict[str, Tensor] = {}

    def _generators(self, purpose: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(derive_seed(s["seed"], purpose)) for s in self.settings]

    def good_threads(self) -> int:
        """One thread for small steps: to share them costs more than it gains, many times more on a busy machine.

        A teacher is usually large.
        """
        device, x = self.stack.device, self.data.x[: self.source.batch]
        small = self.teacher is None and device.type == "cpu" and self.stack.flops(x) < _WORTH_SHARING
        return 1 if small else torch.get_num_threads()

    def run_epoch(self, epoch: int) -> Tensor:
        """Take all steps of the epoch after `epoch` finished ones; returns the mean loss of each member."""
        running = torch.zeros(self.stack.k, dtype=torch.float64, device=self.stack.device)
        epochs, steps, seen, first = self.options.epochs, self.source.steps, 0, self.source.data
        for data, index in self.source.batches(self.shuffles):
            self.data, rows = data, index.shape[-1]
            # without a known number of steps the rate is constant in an epoch; a loader may give more than it announced
            self._set_rate(epoch / epochs if steps is None else min(self.count / (epochs * steps), 1.0))
            if self.moves:
                moves = torch.stack([torch.randint(MOVES, (rows,), generator=g) for g in self.moves])
                index = torch.stack([index, moves.to(index.device)])
            whole = rows == self.source.batch and (data.x.shape, data.y.shape) == (first.x.shape, first.y.shape)
            losses = self._graph(index) if self._graph is not None and whole else self._step(index)
            running += losses.double() * rows
            seen += rows
            self.count += 1
        if self._scheduler is not None:
            self._scheduler.step()
            if self._graph is not None and self._group_options() != self._graph_options:
                raise OptionError(
                    "train: the scheduler changes an option of the optimizer other than lr, which is a constant of "
                    "the CUDA graph. Give execution=Execution(compile=False)."
                )
        return (running / seen).cpu()

    def _set_rate(self, progress: float) -> None:
        if self._schedule is None:
            return
        factor = learning_rate(self._schedule, progress)
        for group, s in zip(self.optimizer.param_groups, self.settings):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(s["lr"] * factor)
            else:
                group["lr"] = s["lr"] * factor

    # --- one step ----------------------------------------------------------------------------------------------

    def _step(self, index: Tensor) -> Tensor:
        """One gradient step of all members on the batches of `index`; returns their losses."""
        with torch.no_grad():
            if self._one_by_one:
                each = [self._call_gradient(self._member_arguments(index, i)) for i in range(self.stack.k)]
                losses, gradient = (torch.stack(values) for values in zip(*each))
            else:
                losses, gradient = self._call_gradient(self._arguments(index))
            self._apply(gradient)
        return losses

    def _call_gradient(self, arguments: tuple[Any, ...]) -> Gradients:
        """Losses and gradients, computed by the captured function for these shapes if steps are captured."""
        if not self.options.execution.compile:
            return self._gradient(*arguments)
        key = (*arguments[1].shape, *arguments[2].shape)
        if key not in self._captured:
            self._captured[key] = capture(self._gradient, arguments)
        return self._captured[key](*arguments)

    def _arguments(self, index: Tensor) -> tuple[Any, ...]:
        """The arguments of the gradient function for all members."""
        x, y, w, rows = self._fetch(index)
        return self.stack.flat, x, y, w, rows, self._draws(x, rows), *self.stack.rest.values()

    def _member_arguments(self, index: Tensor, i: int) -> tuple[Any, ...]:
        """The same for member i, with the channels of its images last."""
        x, y, w, rows = self._fetch(index[..., i, :])
        x = x.contiguous(memory_format=torch.channels_last)
        return self.stack.flat[i], x, y, w, rows, [], *self.stack.rest_of(i)

    def _fetch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Inputs, targets, weights and row numbers of a batch; `index` holds row numbers, and the moves of images."""
        index, moves = index if self.moves else (index, None)
        x = self.data.x[index] if moves is None else crop_flip(self.data.x, index, moves)
        if self.teacher is not None and self._teacher_targets is None:
            y = self.teacher.targets(x, index.ndim)
        else:
            y = (self.data.y if self._teacher_targets is None else self._teacher_targets)[index]
        weights = None if self.data.weights is None else self.data.weights[index]
        return x, y, weights, index if self.stack.needs_rows else None

    def _draws(self, x: Tensor, rows: Tensor | None) -> list[Tensor]:
        """Uniform random numbers for every dropout of the network."""
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

    def _apply(self, gradient: Tensor) -> None:
        if (clip := self.options.clip) is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (clip / (norm + 1e-6)).clamp_max(1.0)  # as torch.nn.utils.clip_grad_norm_
        for i, leaf in enumerate(self.leaves):
            leaf.grad = gradient[i] if self.separate else gradient
        self.optimizer.step()

    # --- CUDA --------------------------------------------------------------------------------------------------

    def prepare_graph(self) -> None:
        """On CUDA, capture the whole step (fetching the batch, gradient, optimizer) as one graph."""
        possible = self.options.execution.compile and not self._has_dropout and in_cuda_graph(self.optimizer)
        if self.stack.device.type != "cuda" or not possible or isinstance(self.source, SamplerBatches):
            return
        torch._dynamo.reset()  # else the compiler gives up on the ninth training of a process, and only warns
        shape = (self.stack.k, self.source.batch)
        index = torch.zeros((2, *shape) if self.moves else shape, dtype=torch.long, device=self.stack.device)
        gradients = self._compiled_one_by_one(index) if self._one_by_one else self._compiled(index)
        self._graph_buffers = gradients  # the graph writes to its buffers as long as it lives

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
        with torch.no_grad():  # undo the warm-up steps
            for t, s in zip(changed, saved):
                t.copy_(s)
            for state in self.optimizer.state.values():
                for v in state.values():
                    if isinstance(v, Tensor):
                        v.zero_()
        self._load_optimizer()
        held = self.data

        def replay(batch_index: Tensor) -> Tensor:
            if self.data is not held:
                held.x.copy_(self.data.x)
                held.y.copy_(self.data.y)
            index.copy_(batch_index)
            graph.replay()
            return losses

        self._graph, self._graph_options = replay, self._group_options()

    def _group_options(self) -> list[dict[str, Any]]:
        """The options of the optimizer that are constants of a CUDA graph."""
        groups = self.optimizer.param_groups
        return [{k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")} for group in groups]

    def _compiled(self, index: Tensor) -> Callable[[], Gradients]:
        """Losses and gradients of all members in one compiled step."""
        fused = torch.compile(capture(self._gradient, self._arguments(index)))
        return lambda: fused(*self._arguments(index))

    def _compiled_one_by_one(self, index: Tensor) -> Callable[[], Gradients]:
        """The same for networks on images: a compiled step for one member, all members in parallel on streams.

        Batched over members, convolutions become grouped ones, which are slower than those of one network with the
        channels last (`benchmarks/training.py`).
        """
        k = self.stack.k
        losses = torch.zeros(k, dtype=self.stack.flat.dtype, device=self.stack.device)
        gradient = torch.zeros_like(self.stack.flat)
        streams = [torch.cuda.Stream() for _ in range(k)]
        fused = torch.compile(capture(self._gradient, self._member_arguments(index, 0)))

        def gradients() -> Gradients:
            main = torch.cuda.current_stream()
            for i, stream in enumerate(streams):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    loss, one = fused(*self._member_arguments(index, i))
                    losses[i].copy_(loss)
                    gradient[i].copy_(one)
            for stream in streams:
                main.wait_stream(stream)
            return losses, gradient

        return gradients

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _all_generators(self) -> dict[str, torch.Generator]:
        named = {"shuffle": self.shuffles, "dropout": self.dropouts, "moves": self.moves}
        return {f"{name}/{i}": g for name, generators in named.items() for i, g in enumerate(generators)}

    def state(self) -> dict[str, Tensor]:
        """The state of the optimizer and of all generators, for a checkpoint."""
        tensors = {name: g.get_state() for name, g in self._all_generators().items()} | self.source.state()
        for i, leaf in enumerate(self.leaves):
            for k, v in self.optimizer.state[leaf].items():
                if v is not None:  # SGD without momentum has an empty entry
                    tensors[f"optimizer/{i}/{k}"] = torch.as_tensor(v)
        return tensors

    def load(self, tensors: dict[str, Tensor], epoch: int, steps: int) -> None:
        """Restore the state of a checkpoint after some epochs and steps."""
        self.count = steps
        self._restored = {k: v for k, v in tensors.items() if k.startswith("optimizer/")}
        self._load_optimizer()
        for name, g in self._all_generators().items():
            g.set_state(tensors[name])
        self.source.load(tensors)
        if self._scheduler is not None:
            with warnings.catch_warnings(action="ignore"):  # torch expects a step of the optimizer first
                for _ in range(epoch):
                    self._scheduler.step()

    def _load_optimizer(self) -> None:
        for key, value in self._restored.items():
            _, i, name = key.split("/")
            state = self.optimizer.state[self.leaves[int(i)]]
            if isinstance(state.get(name), Tensor):  # in place: a CUDA graph reads this tensor
                state[name].copy_(value)
            else:
                state[name] = value.to(self.stack.device).clone()
