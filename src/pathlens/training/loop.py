"""`train`: one loop for one network or many at once, from data to trajectories.

Every member of a stack has its own generators for initialisation, shuffling and dropout, so that a member of a stack
and the same network trained alone see the same batches and end with the same weights.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.data import DataSet
from pathlens.errors import (
    DivergedError,
    DTypeError,
    EmptyDataError,
    LabelError,
    NotFiniteError,
    OptionError,
    PathlensWarning,
    ShapeError,
    SignalWarning,
    unknown_name,
)
from pathlens.models import GatedNetwork
from pathlens.recording import Moment, Trajectory, as_rows
from pathlens.records import Record, Snapshot
from pathlens.training.checkpoints import load_checkpoint, save_checkpoint
from pathlens.training.schedules import Schedule, rate_schedule
from pathlens.training.stack import Loss, Stack, capture

# --- options ---------------------------------------------------------------------------------------------------


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean over rows and outputs of (f − y)²."""
    return (output - target).square().mean()


def half_mse(output: Tensor, target: Tensor) -> Tensor:
    """½ of `mse`."""
    return 0.5 * (output - target).square().mean()


LOSSES: dict[str, Loss] = {"mse": mse, "half_mse": half_mse, "cross_entropy": F.cross_entropy}
_OPTIMISERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
_SETTINGS = ("lr", "beta", "weight_decay", "momentum")


def derive_seed(seed: int, purpose: str) -> int:
    """An independent seed for each purpose of one run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7], "big")


def _generator(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, purpose))


@dataclass
class Data:
    """Checked training data on the training device."""

    x: Tensor
    y: Tensor
    x_test: Tensor | None = None
    y_test: Tensor | None = None


def _prepare(data: Any, net: nn.Module, loss: str | Loss, device: torch.device) -> Data:
    x_test = y_test = None
    if isinstance(data, DataSet):
        x, y, x_test, y_test = data.x, data.y, data.x_test, data.y_test
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
    elif isinstance(data, (torch.utils.data.Dataset, torch.utils.data.DataLoader)):
        pairs = list(data) if isinstance(data, torch.utils.data.DataLoader) else [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        if not pairs:
            raise EmptyDataError("train: the data has no items.")
        if not all(isinstance(p, (tuple, list)) and len(p) >= 2 for p in pairs):
            raise ShapeError("train: a Dataset or DataLoader must give (input, target) pairs.")
        join = torch.cat if isinstance(data, torch.utils.data.DataLoader) else torch.stack
        x, y = (join([torch.as_tensor(p[i]) for p in pairs]) for i in (0, 1))
    else:
        raise ShapeError(
            f"train: data must be a DataSet, an (X, y) pair, a Dataset or a DataLoader, got {type(data).__name__}."
        )
    x, y = _checked(x, y, net, loss, device)
    if x_test is not None and y_test is not None:
        x_test, y_test = _checked(x_test, y_test, net, loss, device)
    return Data(x, y, x_test, y_test)


def _checked(x: Any, y: Any, net: nn.Module, loss: str | Loss, device: torch.device) -> tuple[Tensor, Tensor]:
    x = as_rows(x, net).to(device)
    y = torch.as_tensor(y).to(device)
    if y.shape[:1] != x.shape[:1]:
        raise ShapeError(
            f"train: {x.shape[0]} inputs and {y.shape[0] if y.ndim else 'no'} targets. They must match row by row."
        )
    c = _output_width(net, x)
    if loss == "cross_entropy":
        if y.dtype.is_floating_point or y.dtype == torch.bool or y.ndim != 1:
            raise LabelError(
                f"train: cross-entropy needs integer labels of shape (n,), got {y.dtype} of shape {tuple(y.shape)}. "
                "Use loss='mse' for real targets."
            )
        y = y.long()
        if int(y.min()) < 0 or int(y.max()) >= c:
            raise LabelError(
                f"train: labels run from {int(y.min())} to {int(y.max())}, the network has {c} outputs. "
                f"Labels must be 0…{c - 1}."
            )
        return x, y
    if isinstance(loss, str):
        if not y.dtype.is_floating_point:
            raise LabelError(
                f"train: loss {loss!r} needs real targets, got {y.dtype}. Use loss='cross_entropy' for class labels, "
                "or y.float()."
            )
        if y.ndim == 1:
            y = y[:, None]
        if y.shape != (x.shape[0], c):
            raise ShapeError(f"train: targets have shape {tuple(y.shape)}, the network's outputs ({x.shape[0]}, {c}).")
        if not torch.isfinite(y).all():
            raise NotFiniteError(
                f"train: targets contain NaN or infinity, first in row {int((~torch.isfinite(y)).any(1).nonzero()[0])}."
            )
        y = y.to(x.dtype)
    return x, y


def _output_width(net: nn.Module, x: Tensor) -> int:
    probe = copy.deepcopy(net).to(x.device).eval()
    rows = torch.zeros(1, dtype=torch.long, device=x.device)
    with torch.no_grad():
        try:
            out = probe(x[:1], rows) if getattr(net, "needs_rows", False) else probe(x[:1])
        except RuntimeError as e:
            raise ShapeError(f"train: the network does not accept inputs of shape {tuple(x.shape)}: {e}") from e
    if out.ndim != 2:
        raise ShapeError(f"train: the network must return (n, c), got {tuple(out.shape)} for one row.")
    return int(out.shape[1])


# --- results ---------------------------------------------------------------------------------------------------


class Runs(list[Trajectory]):
    """The trajectories of networks that were trained together, with the networks themselves.

    `runs[i]` is a Trajectory, `runs.networks[i]` the trained network, `runs.settings[i]` its seed and settings.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], networks: Sequence[nn.Module], settings: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(trajectories)
        self.networks = list(networks)
        self.settings = list(settings)

    def history(self, name: str = "loss") -> np.ndarray:
        """One row per run, one column per epoch, the first at initialisation; runs that stopped early end in NaN."""
        length = max(len(t.history[name]) for t in self)
        out = np.full((len(self), length), np.nan)
        for row, t in zip(out, self):
            row[: len(t.history[name])] = t.history[name]
        return out

    def epochs_to(self, loss: float) -> list[int | None]:
        """Per run, the first epoch whose training loss is below a value."""
        return [t.epoch_reached(loss) for t in self]

    def __repr__(self) -> str:
        final = [t.history["loss"][-1] for t in self if t.history.get("loss")]
        middle = f", median loss {float(np.median(final)):.3g}" if final else ""
        return f"Runs({len(self)} networks{middle})"


# --- the loop --------------------------------------------------------------------------------------------------


@dataclass
class _Watch:
    """What is kept, and when."""

    epochs: frozenset[int]
    losses: tuple[float, ...]
    x: Tensor | None
    sensitivities: bool
    reached: list[set[float]] = field(default_factory=list)

    def reasons(self, member: int, epoch: int, loss: float) -> list[str]:
        found = [f"epoch {epoch}"] if epoch in self.epochs else []
        for level in self.losses:
            if loss < level and level not in self.reached[member]:
                self.reached[member].add(level)
                found.append(f"loss < {level:g}")
        return found


def train(
    net: nn.Module | Sequence[nn.Module],
    data: Any,
    *,
    epochs: int,
    loss: str | Loss = "mse",
    optimizer: str = "adam",
    lr: float = 1e-3,
    batch_size: int | None = 32,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    settings: Sequence[Mapping[str, float]] | None = None,
    schedule: str | Schedule = "constant",
    beta: Schedule | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    keep_at: Sequence[int] = (),
    keep_when: Sequence[float] = (),
    watch: Any = None,
    sensitivities: bool = True,
    evaluate: str = "full",
    stop_below: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = True,
    device: str | torch.device | None = None,
    compile: bool | None = None,
    autocast: torch.dtype | None = None,
    progress: bool = True,
    label: str = "training",
) -> Trajectory | Runs:
    """Train one network, or many of one architecture at once in the same loop.

    Parameters
    ----------
    net : nn.Module or list of them
        One network is trained in place and gives a Trajectory. A list is trained together and gives Runs. With `seeds`
        or `settings`, `net` is the pattern: copies of it are initialised from each seed and trained together.
    data : DataSet, (X, y), Dataset, DataLoader, or a sampler
        A sampler has ``sample(n, generator) -> (x, y)``: every step gets a fresh batch (`batch_size` rows), and an epoch
        is one step.
    epochs : int
    loss : {"mse", "half_mse", "cross_entropy"} or function of (output, target)
        Each member's loss is its mean over the batch; members do not influence each other.
    optimizer : {"sgd", "adam", "adamw", "rmsprop"}
    batch_size : int or None
        None is the full batch.
    seed : int
        Of shuffling and dropout (single network or list: member i uses seed + i).
    seeds : sequence of int, optional
        One network per seed, initialised from it.
    settings : sequence of dict, optional
        One network per setting (times seeds): any of lr, beta, weight_decay, momentum.
    schedule : {"constant", "cosine", "one_cycle"} or function of progress
        Factor on the learning rate.
    beta : function of progress, optional
        Schedule of the gates' β, e.g. ``Geometric(4, 1000, until=0.9)``.
    clip : float, optional
        Largest gradient norm, per member.
    keep_at, keep_when : sequences
        Epochs (0 is initialisation) and losses (when first undercut) at which a Moment is kept: the weights, and the
        record on `watch` where that is given.
    watch : inputs, optional
        What records are taken on; `sensitivities=False` keeps the gates without the backward pass.
    evaluate : {"full", "running"}
        Where the loss of an epoch comes from: a pass over all data at its end, or the mean over its batches.
    stop_below : float, optional
        Stop when every member's loss is below.
    checkpoint : folder, optional
        Save there every `checkpoint_every` epochs and at the end; a run that was cut off goes on from there, on the CPU
        to the same bits. `resume=False` starts over.
    device : optional
        Default: where the network is.
    compile : bool, optional
        Capture the step once and replay it; on CUDA also fuse it and run it as a CUDA graph. Default: on.
    autocast : torch.dtype, optional
        Lower precision of the forward pass (weights stay as they are).
    progress : bool
        Show a progress bar.

    Returns
    -------
    Trajectory or Runs

    Examples
    --------
    >>> import pathlens as pl
    >>> runs = pl.train(pl.models.relu(2, hidden=(8,)), pl.data.circle(64), epochs=2, seeds=range(3), progress=False)
    >>> len(runs), runs.history().shape
    (3, (3, 3))
    """
    single = isinstance(net, nn.Module) and seeds is None and settings is None
    members, member_settings = _members(net, seed, seeds, settings, lr, weight_decay, momentum)
    if epochs < 1 or (batch_size is not None and batch_size < 1):
        raise OptionError(
            f"train: epochs and batch_size must be at least 1, got epochs={epochs}, batch_size={batch_size}."
        )
    if evaluate not in ("full", "running"):
        raise OptionError(f"train: evaluate must be 'full' or 'running', got {evaluate!r}.")
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    if optimizer not in _OPTIMISERS:
        raise unknown_name("optimizer", optimizer, _OPTIMISERS)
    if not lr > 0:
        raise OptionError(f"train: the learning rate must be positive, got {lr}.")
    place = torch.device(device) if device is not None else next(members[0].parameters()).device
    sampler = data if hasattr(data, "sample") and not isinstance(data, Tensor) else None
    if sampler is not None:
        batch_size = batch_size or 1000
        x, y = sampler.sample(batch_size, torch.Generator().manual_seed(derive_seed(seed, "evaluation")))
        prepared = _prepare((x, y), members[0], loss, place)
    else:
        prepared = _prepare(data, members[0], loss, place)
    run = _Run(
        Stack(members, place), prepared, sampler, LOSSES[loss] if isinstance(loss, str) else loss, optimizer,
        member_settings, batch_size, rate_schedule(schedule), beta, clip, evaluate == "full", compile, autocast,
    )  # fmt: skip
    run.watch = _Watch(
        frozenset(keep_at),
        tuple(keep_when),
        None if watch is None else as_rows(watch, members[0]),
        sensitivities,
        [set() for _ in members],
    )
    run.patterns = members
    config = {
        "epochs": epochs, "loss": loss if isinstance(loss, str) else getattr(loss, "__name__", "function"),
        "optimizer": optimizer, "batch_size": batch_size, "clip": clip, "evaluate": evaluate, "rows": len(prepared.x),
        "members": member_settings, "parameters": int(run.stack.flat.shape[1]), "dtype": str(run.stack.flat.dtype),
        "keep_at": sorted(keep_at), "keep_when": list(keep_when), "stop_below": stop_below,
        "schedule": schedule if isinstance(schedule, str) else _name(schedule), "beta": None if beta is None else _name(beta),
        "kind": getattr(members[0], "kind", type(members[0]).__name__),
    }  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint)
    run.trajectories = [Trajectory(config=config | {"member": s}) for s in member_settings]
    if folder is not None and resume:
        run.restore(folder, config)
    with _bar(label, epochs, run.epoch, len(members), progress) as tick:
        run.go(epochs, folder, checkpoint_every, config, stop_below, tick)
    for i, m in enumerate(members):
        run.stack.write(i, m)
    if single:
        assert isinstance(net, nn.Module)
        return run.trajectories[0]
    return Runs(run.trajectories, members, member_settings)


def _name(function: Any) -> str:
    """A schedule as text that is equal for equal schedules: dataclasses print their fields."""
    return repr(function) if not inspect.isfunction(function) else function.__qualname__


def _members(
    net: nn.Module | Sequence[nn.Module],
    seed: int,
    seeds: Sequence[int] | None,
    settings: Sequence[Mapping[str, float]] | None,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    base = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    if not isinstance(net, nn.Module):
        nets = list(net)
        if seeds is not None or settings is not None:
            raise OptionError("train: give either a list of networks, or one network with seeds or settings.")
        if not nets:
            raise EmptyDataError("train: the list of networks is empty.")
        return nets, [base | {"seed": seed + i} for i in range(len(nets))]
    if seeds is None and settings is None:
        return [net], [base | {"seed": seed}]
    for s in settings or ():
        unknown = [k for k in s if k not in _SETTINGS]
        if unknown:
            raise unknown_name("setting", unknown[0], _SETTINGS)
    members, chosen = [], []
    for setting in settings if settings is not None else ({},):
        for s in seeds if seeds is not None else (seed,):
            clone = copy.deepcopy(net)
            initialise(clone, int(s))
            if "beta" in setting:
                if not (isinstance(clone, GatedNetwork) and hasattr(clone.gate, "beta")):
                    raise OptionError("train: a setting gives beta, but the network's gates are not soft.")
                clone.gate.beta.fill_(float(setting["beta"]))  # type: ignore[operator]
            members.append(clone)
            chosen.append(base | {k: float(v) for k, v in setting.items()} | {"seed": int(s)})
    if not members:
        raise EmptyDataError("train: seeds and settings give no networks.")
    return members, chosen


def initialise(net: nn.Module, seed: int) -> None:
    """Draw a network's weights from a seed, in place: ours by their own rule, others by `reset_parameters`."""
    if isinstance(net, GatedNetwork):
        net.reinitialise(seed)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for m in reversed(list(net.modules())):  # children first: a parent's own rule wins
            reset = getattr(m, "reset_parameters", None)
            if callable(reset):
                reset()


class _Run:
    """The state of one training run."""

    def __init__(
        self,
        stack: Stack,
        data: Data,
        sampler: Any,
        loss: Loss,
        optimizer: str,
        settings: list[dict[str, Any]],
        batch_size: int | None,
        rate: Schedule,
        beta: Schedule | None,
        clip: float | None,
        full: bool,
        compile: bool | None,
        autocast: torch.dtype | None,
    ) -> None:
        self.stack, self.data, self.sampler, self.loss, self.settings = stack, data, sampler, loss, settings
        self.n = len(data.x)
        self.batch = min(batch_size or self.n, self.n)
        self.rate, self.beta, self.clip, self.full = rate, beta, clip, full
        self.compile = True if compile is None else compile
        self.epoch = self.step_count = 0
        self.trajectories: list[Trajectory] = []
        self.patterns: list[nn.Module] = []
        self.watch = _Watch(frozenset(), (), None, False)
        self.shuffles = [_generator(s["seed"], "shuffle") for s in settings]
        self.dropouts = [_generator(s["seed"], "dropout") for s in settings]
        self.uneven = any(s[k] != settings[0][k] for s in settings for k in ("lr", "weight_decay", "momentum"))
        self.optimiser = self._optimiser(optimizer)
        self._gradient = stack.gradient_step(loss, autocast)
        self._captured: dict[tuple[int, ...], Callable[..., tuple[Tensor, Tensor]]] = {}
        self._dropout_shapes: dict[int, list[tuple[int, ...]]] = {}
        self._has_dropout = any(
            isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in stack.pattern.modules()
        )
        self._replay: Callable[[Tensor], Tensor] | None = None

    # --- optimiser ---------------------------------------------------------------------------------------------

    def _optimiser(self, name: str) -> torch.optim.Optimizer:
        """One optimiser on the stack; members with settings of their own are rows of it in groups of their own."""
        cuda = self.stack.device.type == "cuda"

        def options(s: dict[str, Any]) -> dict[str, Any]:
            rate = torch.tensor(float(s["lr"]), device=self.stack.device) if cuda else float(s["lr"])
            given: dict[str, Any] = {"lr": rate, "weight_decay": s["weight_decay"]}
            if name in ("sgd", "rmsprop"):
                given["momentum"] = s["momentum"]
            elif s["momentum"]:
                raise OptionError(f"train: momentum is an option of 'sgd' and 'rmsprop', not of {name!r}.")
            return given

        common: dict[str, Any] = {}
        if name != "rmsprop":
            common["fused"] = True
        if cuda and name in ("adam", "adamw", "rmsprop"):
            common["capturable"] = True
        if self.uneven:
            self.rows = [self.stack.flat[i] for i in range(self.stack.k)]
            groups = [{"params": [r]} | options(s) for r, s in zip(self.rows, self.settings)]
        else:
            self.rows = [self.stack.flat]
            groups = [{"params": self.rows} | options(self.settings[0])]
        return _OPTIMISERS[name](groups, **common)

    def _set_rate(self, progress: float) -> None:
        factor = self.rate(progress)
        members = self.settings if self.uneven else self.settings[:1]
        for group, s in zip(self.optimiser.param_groups, members):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(s["lr"] * factor)
            else:
                group["lr"] = s["lr"] * factor

    def _apply(self, gradient: Tensor) -> None:
        if self.clip is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.clip / norm.clamp_min(1e-30)).clamp_max(1.0)
        for i, row in enumerate(self.rows):
            row.grad = gradient[i] if self.uneven else gradient
        self.optimiser.step()

    # --- one step ----------------------------------------------------------------------------------------------

    def _draws(self, x: Tensor, rows: Tensor | None) -> list[Tensor]:
        if not self._has_dropout:
            return []
        size = x.shape[1]
        if size not in self._dropout_shapes:
            self._dropout_shapes[size] = self.stack.dropout_shapes(x, rows)
        return [
            torch.stack([torch.rand(shape, generator=g, dtype=x.dtype) for g in self.dropouts]).to(x.device)
            for shape in self._dropout_shapes[size]
        ]

    def _step(self, x: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
        draws = self._draws(x, rows)
        arguments = (self.stack.flat, x, y, rows, draws, *self.stack._rest())
        function: Callable[..., tuple[Tensor, Tensor]] = self._gradient
        if self.compile:
            key = tuple(x.shape)
            if key not in self._captured:
                self._captured[key] = capture(self._gradient, arguments)
            function = self._captured[key]
        with torch.no_grad():
            losses, gradient = function(*arguments)
            self._apply(gradient)
        return losses

    def _fetch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = index if self.stack.needs_rows else None
        return self.data.x[index], self.data.y[index], rows

    def _batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The batches of one epoch, for all members at once: shapes (k, B, ...)."""
        if self.sampler is not None:
            drawn = [self.sampler.sample(self.batch, g) for g in self.shuffles]
            x = torch.stack([d[0] for d in drawn]).to(self.data.x)
            y = torch.stack([d[1] for d in drawn])
            if self.data.y.dtype.is_floating_point:
                y = y.reshape(len(drawn), self.batch, -1)
            yield x, y.to(self.data.y), None
            return
        order = self._order()
        for lo in range(0, self.n, self.batch):
            yield self._fetch(order[:, lo : lo + self.batch])

    def _order(self) -> Tensor:
        if self.batch == self.n:
            order = torch.arange(self.n).expand(self.stack.k, -1)
        else:
            order = torch.stack([torch.randperm(self.n, generator=g) for g in self.shuffles])
        return order.to(self.data.x.device)

    # --- epochs ------------------------------------------------------------------------------------------------

    def go(
        self,
        epochs: int,
        folder: Path | None,
        every: int,
        config: dict[str, Any],
        stop_below: float | None,
        tick: Callable[[int, Tensor], None],
    ) -> None:
        self.stack.pattern.train()
        per_epoch = 1 if self.sampler is not None else math.ceil(self.n / self.batch)
        total = epochs * per_epoch
        if self.epoch == 0:
            if self.beta is not None:
                self.stack.set_buffer("beta", [self.beta(0.0)] * self.stack.k)
            losses = self._finish_epoch(None)
            self._check_signal()
        losses = torch.tensor([t.history["loss"][-1] for t in self.trajectories], dtype=torch.float64)
        graph = (
            self._cuda_graph() if self.compile and self.stack.device.type == "cuda" and not self._has_dropout else None
        )
        while self.epoch < epochs and not (stop_below is not None and bool((losses < stop_below).all())):
            if self.beta is not None:
                self.stack.set_buffer("beta", [self.beta((self.epoch + 1) / epochs)] * self.stack.k)
            running = torch.zeros(self.stack.k, dtype=torch.float64, device=self.stack.device)
            if graph is not None:
                order = self._order()
                for lo in range(0, self.n, self.batch):
                    self._set_rate(self.step_count / total)
                    index = order[:, lo : lo + self.batch]
                    found = graph(index) if index.shape[1] == self.batch else self._step(*self._fetch(index))
                    running += found.double() * index.shape[1]
                    self.step_count += 1
            else:
                for x, y, rows in self._batches():
                    self._set_rate(self.step_count / total)
                    running += self._step(x, y, rows).double() * x.shape[1]
                    self.step_count += 1
            self.epoch += 1
            losses = self._finish_epoch((running / (self.batch if self.sampler is not None else self.n)).cpu())
            done = self.epoch == epochs or (stop_below is not None and bool((losses < stop_below).all()))
            if folder is not None and (done or self.epoch % every == 0):
                self.save(folder, config)
            tick(self.epoch, losses)
            if not torch.isfinite(losses).any():
                raise DivergedError(
                    f"train: the loss of every network is NaN or infinite at epoch {self.epoch}. Lower lr "
                    f"({self.settings[0]['lr']:g}), or clip gradients (clip=1.0)."
                )
        if not torch.isfinite(losses).all():
            bad = [s["seed"] for s, v in zip(self.settings, losses) if not math.isfinite(float(v))]
            warnings.warn(
                f"train: {len(bad)} of {self.stack.k} networks diverged (seeds {bad}).", PathlensWarning, stacklevel=3
            )

    def _finish_epoch(self, running: Tensor | None) -> Tensor:
        ids = torch.arange(self.n, device=self.data.x.device) if self.stack.needs_rows else None
        batch = max(1, 65536 // self.stack.k)
        accuracy = None
        if self.full or running is None:
            losses, accuracy = self.stack.evaluate(self.data.x, self.data.y, self.loss, ids, batch)
        else:
            losses = running
        columns: dict[str, Tensor] = {"loss": losses}
        if accuracy is not None:
            columns["accuracy"] = accuracy
        if self.data.x_test is not None and self.data.y_test is not None and not self.stack.needs_rows:
            test, test_accuracy = self.stack.evaluate(self.data.x_test, self.data.y_test, self.loss, None, batch)
            columns["test_loss"] = test
            if test_accuracy is not None:
                columns["test_accuracy"] = test_accuracy
        for i, t in enumerate(self.trajectories):
            for name, values in columns.items():
                t.history.setdefault(name, []).append(float(values[i]))
            reasons = self.watch.reasons(i, self.epoch, float(losses[i]))
            if reasons:
                self.stack.write(i, self.patterns[i])
                t.append(
                    self.patterns[i],
                    self.watch.x,
                    self.step_count,
                    epoch=self.epoch,
                    loss=float(losses[i]),
                    reason=", ".join(reasons),
                    sensitivities=self.watch.sensitivities,
                )
        return losses

    def _check_signal(self) -> None:
        """Warn if outputs do not depend on the input at the start: such a network does not begin to learn."""
        x = self.data.x[: min(self.n, 256)]
        if len(x) < 2 or self.stack.needs_rows:
            return
        net = self.patterns[0]
        self.stack.write(0, net)
        with torch.no_grad():
            self.stack.pattern.eval()
            out = self.stack._forward(self.stack.flat[0], x, None, [t[0] for t in self.stack._rest()])
            self.stack.pattern.train()
        if float(out.std(0).max()) < 1e-7 * float(x.std().clamp_min(1e-30)) and bool(x.std() > 0):
            warnings.warn(
                f"train: the network's outputs vary by {float(out.std(0).max()):.0e} over the data at initialisation. Each soft "
                "gate halves the signal; initialise with init='preserve', or use batch-norm.",
                SignalWarning,
                stacklevel=4,
            )

    # --- CUDA --------------------------------------------------------------------------------------------------

    def _cuda_graph(self) -> Callable[[Tensor], Tensor] | None:
        """The whole step (fetching the batch, gradient, optimiser) as one CUDA graph; weights are as before it."""
        if self.sampler is not None:
            return None
        index = torch.zeros(self.stack.k, self.batch, dtype=torch.long, device=self.stack.device)
        x, y, rows = self._fetch(index)
        fused = torch.compile(
            capture(self._gradient, (self.stack.flat, x, y, rows, [], *self.stack._rest())), dynamic=False
        )

        def body() -> Tensor:
            x, y, rows = self._fetch(index)
            losses, gradient = fused(self.stack.flat, x, y, rows, [], *self.stack._rest())
            self._apply(gradient)
            return losses

        kept = [self.stack.flat, *self.stack.buffers.values()]
        saved = [t.clone() for t in kept]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            losses = body()
        with torch.no_grad():
            for t, s in zip(kept, saved):
                t.copy_(s)
            if not self._resumed_optimiser():
                for state in self.optimiser.state.values():
                    for v in state.values():
                        if isinstance(v, Tensor):
                            v.zero_()

        def replay(batch_index: Tensor) -> Tensor:
            index.copy_(batch_index)
            graph.replay()
            return losses

        return replay

    def _resumed_optimiser(self) -> bool:
        """Put a resumed optimiser's state back after the warm-up steps of a CUDA graph."""
        saved = getattr(self, "_optimiser_tensors", None)
        if saved is None:
            return False
        self._load_optimiser(saved)
        return True

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: Path, config: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {"flat": self.stack.flat}
        tensors |= {f"fixed/{k}": v for k, v in self.stack.fixed.items()}
        tensors |= {f"buffer/{k}": v for k, v in self.stack.buffers.items()}
        for i, row in enumerate(self.rows):
            for k, v in self.optimiser.state[row].items():
                tensors[f"optimiser/{i}/{k}"] = v if isinstance(v, Tensor) else torch.tensor(v)
        for i, (a, b) in enumerate(zip(self.shuffles, self.dropouts)):
            tensors[f"shuffle/{i}"], tensors[f"dropout/{i}"] = a.get_state(), b.get_state()
        moments = []
        for i, t in enumerate(self.trajectories):
            entries = []
            for j, m in enumerate(t.moments):
                stem = folder / "moments" / f"{i:04d}-{m.epoch:08d}"
                if not stem.with_suffix(".saved").exists():
                    assert m.snapshot is not None
                    m.snapshot.save(stem.with_name(stem.name + "-snapshot"))
                    if m.record is not None:
                        m.record.save(stem.with_name(stem.name + "-record"))
                    stem.with_suffix(".saved").touch()
                entries.append(
                    {
                        "step": m.step,
                        "epoch": m.epoch,
                        "reason": m.reason,
                        "loss": m.loss,
                        "record": m.record is not None,
                        "index": j,
                    }
                )
            moments.append(entries)
        meta = {
            "config": _plain(config),
            "step": self.step_count,
            "histories": [t.history for t in self.trajectories],
            "moments": moments,
            "reached": [sorted(r) for r in self.watch.reached],
        }
        save_checkpoint(folder, self.epoch, tensors, meta)

    def restore(self, folder: Path, config: dict[str, Any]) -> None:
        """Go back to the newest checkpoint of this run, if there is one."""
        found = load_checkpoint(folder, _plain(config))
        if found is None:
            return
        tensors, meta = found
        with torch.no_grad():
            self.stack.flat.copy_(tensors["flat"])
            for k, v in self.stack.fixed.items():
                v.copy_(tensors[f"fixed/{k}"])
            for k, v in self.stack.buffers.items():
                v.copy_(tensors[f"buffer/{k}"])
        self._optimiser_tensors = {k: v for k, v in tensors.items() if k.startswith("optimiser/")}
        self._load_optimiser(self._optimiser_tensors)
        for i, (a, b) in enumerate(zip(self.shuffles, self.dropouts)):
            a.set_state(tensors[f"shuffle/{i}"])
            b.set_state(tensors[f"dropout/{i}"])
        self.epoch, self.step_count = int(meta["epoch"]), int(meta["step"])
        self.watch.reached = [set(r) for r in meta["reached"]]
        for i, (t, history, entries) in enumerate(zip(self.trajectories, meta["histories"], meta["moments"])):
            t.history = history
            for e in entries:
                stem = folder / "moments" / f"{i:04d}-{e['epoch']:08d}"
                t.moments.append(
                    Moment(
                        e["step"],
                        e["epoch"],
                        e["reason"],
                        e["loss"],
                        Snapshot.load(stem.with_name(stem.name + "-snapshot")),
                        Record.load(stem.with_name(stem.name + "-record")) if e["record"] else None,
                    )
                )

    def _load_optimiser(self, tensors: dict[str, Tensor]) -> None:
        for i, row in enumerate(self.rows):
            prefix = f"optimiser/{i}/"
            state = self.optimiser.state[row]
            for key, v in tensors.items():
                if not key.startswith(prefix):
                    continue
                name = key.removeprefix(prefix)
                if isinstance(state.get(name), Tensor):
                    state[name].copy_(v)
                else:
                    state[name] = (
                        v.clone()
                        if name == "step" and self.stack.device.type == "cpu"
                        else v.to(self.stack.device).clone()
                    )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    import json

    return json.loads(json.dumps(config))


@contextmanager
def _bar(label: str, epochs: int, start: int, members: int, show: bool) -> Iterator[Callable[[int, Tensor], None]]:
    """A progress bar with the median loss; silent where it is not wanted."""
    if not show:
        yield lambda epoch, losses: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    many = f" ({members} networks at once)" if members > 1 else ""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs · loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(label + many, total=epochs, completed=start, loss="–")

        def tick(epoch: int, losses: Tensor) -> None:
            bar.update(task, completed=epoch, loss=f"{float(losses.median()):.4f}")

        yield tick
