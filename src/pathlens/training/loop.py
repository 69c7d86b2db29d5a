"""`train`: one loop for one network or many at once, from data to trajectories.

Every member of a stack has its own generators for initialisation, shuffling and dropout, so that a member of a stack
and the same network trained alone see the same batches and end with the same weights.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import EmptyDataError, OptionError, unknown_name
from pathlens.models.sources import TableSource
from pathlens.models.tracing import unwrapped
from pathlens.recording import Trajectory, as_rows
from pathlens.recording.inputs import output_width
from pathlens.training.batches import Loaded, Rows, Sampled, source_of
from pathlens.training.checkpoints import forget_checkpoints
from pathlens.training.inputs import LOSSES, Data, as_device, prepare, prepare_validation
from pathlens.training.run import OPTIMISERS, Run, Watch, derive_seed
from pathlens.training.runs import Runs
from pathlens.training.schedules import Schedule, rate_schedule
from pathlens.training.stack import Loss, Penalty, gated_parts, trained_names
from pathlens.training.teacher import Teacher


class _Default(int):
    """A number that the caller did not give."""


_BATCH = _Default(32)
_SETTINGS = ("lr", "beta", "weight_decay", "momentum")  # what may differ between members of a stack


@torch.inference_mode(False)  # one more frame between what warns and who called
def train(
    net: nn.Module | Sequence[nn.Module],
    data: Any,
    *,
    epochs: int,
    loss: str | Loss = "mse",
    optimizer: str = "adam",
    lr: float = 1e-3,
    batch_size: int | None = _BATCH,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    settings: Sequence[Mapping[str, float]] | None = None,
    schedule: str | Schedule = "constant",
    beta: Schedule | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    weights: Any = None,
    penalty: Penalty | None = None,
    augment: str | None = None,
    teacher: nn.Module | None = None,
    temperature: float = 1.0,
    trained: str | None = None,
    validation: Any = None,
    patience: int | None = None,
    keep_at: Sequence[int] = (),
    keep_when: Sequence[float] = (),
    watch: Any = None,
    sensitivities: bool = True,
    evaluate: str | None = None,
    stop_below: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = True,
    device: str | torch.device | None = None,
    compile: bool = True,
    autocast: torch.dtype | None = None,
    threads: int | None = None,
    progress: bool | Callable[[str, float, float], None] = True,
    label: str = "training",
) -> Trajectory | Runs:
    """Train one network, or many of one architecture at once in the same loop.

    Parameters
    ----------
    net : nn.Module or list of them
        One network is trained in place and gives a Trajectory. A list is trained together and gives Runs. With
        `seeds` or `settings`, `net` is the pattern: copies of it are initialised from each seed and trained together.
    data : DataSet, (X, y), Dataset, DataLoader, or a sampler
        The test rows of a DataSet are evaluated after every epoch, into `history["test_loss"]` and for labels
        `history["test_accuracy"]`; where they are many, `data.subsample(n, n_test=500)` saves time, and the pair
        (data.x, data.y) has none. All rows of a Dataset are fetched into memory anew for every epoch, so that random
        augmentation is drawn anew; `batch_size` and `seed` make its batches. A DataLoader makes its own, in every epoch
        anew, and all members share them; an IterableDataset is read in batches of `batch_size`, in its own order. Both
        give pairs (x, y), and an epoch is one pass over them. A sampler has ``sample(n, generator) -> (x, y)``: every
        step gets a fresh batch (`batch_size` rows), and an epoch is one step.
    epochs : int
    loss : {"mse", "half_mse", "cross_entropy"} or function of (output, target)
        Each member's loss is its mean over the batch; members do not influence each other.
        A function gets outputs (batch, c) and the targets as they were given: for one output give y of shape (n, 1),
        else output − target spreads to (batch, batch).
    optimizer : {"sgd", "adam", "adamw", "rmsprop"}
    batch_size : int or None
        None is the full batch. A DataLoader has its own, so that both together are refused.
    seed : int
        Of shuffling and dropout (single network or list: member i uses seed + i). A DataLoader shuffles by itself.
    seeds : sequence of int, optional
        One network per seed, initialised from it.
    settings : sequence of dict, optional
        One network per setting (times seeds): any of lr, beta, weight_decay, momentum.
    schedule : {"constant", "cosine", "one_cycle"} or function of progress
        Factor on the learning rate. Progress is the share of steps done, with an IterableDataset that of epochs.
    beta : function of progress, optional
        Schedule of the gates' β, e.g. ``Geometric(4, 1000, until=0.9)``.
    clip : float, optional
        Largest gradient norm, per member.
    weights : (n,) numbers, optional
        At least 0, one for each row: the loss of a batch is the mean over its rows of w_i ℓ_i / w̄, with ℓ_i the loss
        of row i alone and w̄ the mean weight of all rows, so that on average a step is one of the weighted loss
        Σ w_i ℓ_i / Σ w_i of all rows. The loss and accuracy of an epoch are weighted alike. A row of weight 3 is a row
        that is there three times.
    penalty : function of the network, optional
        Its value, a tensor of shape (), is added to the loss that is minimised, with the weights of each member in
        turn: ``lambda net: 1e-3 * net.values.get_parameter("fc1.weight").abs().sum()``. The history stays without it.
    augment : {"crop_flip"}, optional
        Every image of a batch is shifted by up to 4 pixels and flipped or not, drawn anew for each member and epoch.
    teacher : nn.Module, optional
        Learn from this trained network: what it says of each batch, augmented as it is, takes the place of the data's
        targets. With cross-entropy these are its probabilities, and the outputs of both are divided by `temperature`
        first and the loss multiplied by it, so that gradients keep their scale; other losses get its outputs. What is
        evaluated stays as it is, against the data's targets: with `evaluate="running"` that is the first loss of a
        history, and the others are means over batches, against the teacher.
    temperature : float
        Above 1, a teacher also tells which wrong classes are nearly right; 4 is usual.
    trained : {"values", "gates", "both"}, optional
        Train this part of a gated network, whatever it was built to train. Default: as it was built.
    validation : (X, y) or (X, y, weights), optional
        Held-out rows; their loss is `history["validation"]`, and for labels there is `history["validation_accuracy"]`.
    patience : int, optional
        A member whose validation loss has not been undercut for this many epochs has stopped: its history ends there,
        and it gets back the weights of its best epoch. The run ends when every member has stopped; members that still
        run at the last epoch get their best weights too.
    keep_at, keep_when : sequences
        Epochs (0 is initialisation, `epochs` the last) and losses (when first undercut) at which a Moment is kept: the
        weights, and the record on `watch` where that is given.
    watch : inputs, optional
        What records are taken on; `sensitivities=False` keeps the gates without the backward pass.
    evaluate : {"full", "running"}, optional
        Where the loss of an epoch comes from: a pass over all data at its end, or the mean over its batches. Default:
        "running" with a DataLoader or an IterableDataset, whose first loss in the history is then that of the first
        batch, and "full" with other data. A full pass reads a DataLoader once more after each epoch and before the
        first, which advances its generators too.
    stop_below : float, optional
        Stop when every member's loss is below.
    checkpoint : folder, optional
        Save there every `checkpoint_every` epochs and at the end; a run that was cut off goes on from there, on the CPU
        to the same bits. One that is finished goes on with a larger `epochs`, unless `schedule` or `beta` depend on it,
        and `keep_at` may then name some of the epochs to come. `resume=False` starts over. Another network is refused
        by its layers, frozen weights and gates; one that only began with other weights gets those of the checkpoint,
        and a ResumeWarning says so. With a Dataset or DataLoader the checkpoint has the state of torch's CPU generator
        and of the generators in it, its samplers and data sets, and sets them on resuming: the batches to come are
        those of an uninterrupted run. Random numbers of NumPy, `random` and persistent workers are not restored.
    device : optional
        Default: where the network is.
    compile : bool
        Capture the step once and replay it; on CUDA also fuse it and run it as a CUDA graph.
    autocast : torch.dtype, optional
        Lower precision of the forward pass (weights stay as they are).
    threads : int, optional
        CPU threads while training. Default: torch's setting, but one thread where a step is too small to share out.
    progress : bool or function
        Show a progress bar, or call ``progress(label, epochs done, epochs)``.

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
    for name, given in (("keep_at", keep_at), ("keep_when", keep_when)):
        if isinstance(given, Real):
            raise OptionError(f"train: {name} is a sequence, got {given}. Give [{given}].")
    members, member_settings = _members(net, seed, seeds, settings, lr, weight_decay, momentum)
    whole = (epochs, 1 if batch_size is None else batch_size, checkpoint_every)
    if not all(isinstance(number, Integral) and number >= 1 for number in whole):
        raise OptionError(
            f"train: epochs, batch_size and checkpoint_every must be integers of at least 1, got epochs={epochs}, "
            f"batch_size={batch_size}, checkpoint_every={checkpoint_every}."
        )
    chosen = batch_size is not _BATCH
    epochs, batch_size = int(epochs), None if batch_size is None else int(batch_size)
    kept = sorted(set(keep_at))
    if missed := [epoch for epoch in kept if epoch not in range(epochs + 1)]:
        raise OptionError(
            f"train: keep_at names epoch {missed[0]}, and epochs={epochs} has 0 (initialisation) to {epochs}. Leave it "
            "out, or train for longer."
        )
    if evaluate not in (None, "full", "running"):
        raise OptionError(f"train: evaluate must be 'full' or 'running', got {evaluate!r}.")
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    if optimizer not in OPTIMISERS:
        raise unknown_name("optimizer", optimizer, OPTIMISERS)
    if not all(s["lr"] > 0 for s in member_settings):
        raise OptionError(f"train: the learning rate must be positive, got {lr}.")
    if not all(s["weight_decay"] >= 0 and s["momentum"] >= 0 for s in member_settings):
        raise OptionError(
            f"train: weight_decay and momentum must be at least 0, got {weight_decay} and {momentum}, or settings."
        )
    if clip is not None and not clip > 0:
        raise OptionError(f"train: clip must be positive, or None for no clipping, got {clip}.")
    if beta is not None and not callable(beta):
        raise OptionError(
            f"train: beta is a schedule, a function of progress from 0 to 1, got {beta!r}. For a fixed β build the "
            "network with it, or give settings=[{'beta': …}]."
        )
    if beta is not None and any("beta" in s for s in member_settings):
        raise OptionError("train: a schedule moves the β of every network, and settings give β too. Drop one of them.")
    place = next(members[0].parameters()).device if device is None else as_device(device, "train: device")
    source: Rows
    if hasattr(data, "sample"):
        if weights is not None:
            raise OptionError(
                "train: weights belong to the rows of a data set, and a sampler draws new rows every step."
            )
        batch_size = batch_size or 1000
        drawn = data.sample(batch_size, torch.Generator().manual_seed(derive_seed(seed, "evaluation")))
        source = Sampled(prepare(drawn, members[0], loss, place), data)
    else:
        source = source_of(data, batch_size, chosen, members[0], loss, place, weights)
    if isinstance(source, Loaded):
        batch_size = source.loader.batch_size
    evaluate = evaluate or ("full" if source.at_hand else "running")
    prepared = source.data
    _check_augment(augment, source)
    held_out = _held_out(validation, patience, members[0], loss, place)
    if teacher is None and temperature != 1:
        raise OptionError(f"train: temperature={temperature:g} belongs to a teacher. Give teacher=net.")
    if teacher is not None and not isinstance(loss, str) and not prepared.y.dtype.is_floating_point:
        raise OptionError(
            "train: with a teacher, a function as loss gets the teacher's outputs as targets, not labels. Use "
            "loss='cross_entropy', or give real targets."
        )
    tutor = None
    if teacher is not None:
        outputs = output_width(members[0], prepared.x, "train")
        tutor = Teacher(teacher, loss, temperature, prepared.x, outputs, autocast)
    config = {
        "kind": getattr(members[0], "kind", type(members[0]).__name__),
        "parameters": sum(p.numel() for p in members[0].parameters()),
        "network": _fingerprint(members, trained, beta is not None) if checkpoint is not None else None,
        "dtype": str(prepared.x.dtype),
        "data": source.fingerprint() if checkpoint is not None else None,
        "members": member_settings,
        "loss": loss if isinstance(loss, str) else _name(loss),
        "optimizer": optimizer,
        "batch_size": batch_size,
        "epochs": epochs,
        "schedule": schedule if isinstance(schedule, str) else _name(schedule),
        "beta": None if beta is None else _name(beta),
        "clip": clip,
        "evaluate": evaluate,
        "keep_at": [int(epoch) for epoch in kept],
        "keep_when": list(keep_when),
        "stop_below": stop_below,
        "penalty": None if penalty is None else _name(penalty),
        "augment": augment,
        "teacher": tutor.config() if tutor is not None and checkpoint is not None else None,
        "trained": trained,
        "validation": held_out.fingerprint() if held_out is not None and checkpoint is not None else None,
        "patience": patience,
    }
    run = Run(
        members,
        member_settings,
        source,
        place,
        loss=LOSSES[loss] if isinstance(loss, str) else loss,
        optimizer=optimizer,
        rate=rate_schedule(schedule),
        beta=beta,
        clip=clip,
        full=evaluate == "full",
        compiled=compile,
        autocast=autocast,
        watch=Watch(
            frozenset(kept),
            tuple(keep_when),
            None if watch is None else as_rows(watch, like=members[0]),
            sensitivities,
            [set() for _ in members],
        ),
        # as a checkpoint gives it back: lists instead of tuples, plain numbers instead of NumPy's
        config=json.loads(json.dumps(config, default=lambda number: number.item())),
        trained=trained,
        penalty=penalty,
        validation=held_out,
        patience=patience,
        augmented=augment is not None,
        teacher=tutor,
    )
    folder = None if checkpoint is None else Path(checkpoint)
    with _threads(threads if threads is not None else run.good_threads()):
        if folder is not None and resume:
            run.restore(folder)
        elif folder is not None:
            forget_checkpoints(folder)
        with _bar(label, epochs, run.epoch, len(members), progress) as tick, _trainable(members[0], run):
            run.go(epochs, folder, checkpoint_every, stop_below, tick)
    for i, member in enumerate(members):
        run.stack.write(i, member)
    return run.trajectories[0] if single else Runs(run.trajectories, members, member_settings)


@contextmanager
def _trainable(net: nn.Module, run: Run) -> Iterator[None]:
    """While networks run as one stack: what `torch.vmap` cannot batch becomes an error that a user can read."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise OptionError(
            f"train: batch-norm cannot normalise a batch of one row, and {run.source.one_row_left()}"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not ("vmap" in reason or "atching rule" in reason):
            raise
        raise OptionError(
            f"train: networks are trained as a stack, and torch.vmap cannot batch something in {type(net).__name__}: "
            f"{reason.rstrip('.')}. Train it in a loop of your own, and keep moments with Trajectory().append(net, X)."
        ) from error


def _fingerprint(members: Sequence[nn.Module], trained: str | None, moving_beta: bool) -> str:
    """Changes with all of the networks that training leaves as it is: layers, frozen weights, gates."""
    digest = hashlib.sha256()
    learned = set(trained_names(trained, members[0]))
    for net in members:
        fixed: list[Tensor] = []
        for name, p in net.named_parameters():
            digest.update(f"{name} {tuple(p.shape)}".encode())
            fixed += [] if name in learned else [p]
        for _, part in gated_parts(net):
            digest.update(f"{type(part.gate).__name__} {part.value_input}".encode())
            fixed += [] if moving_beta else [*part.gate.buffers()]
            fixed += [*part.source.buffers()] if isinstance(part.source, TableSource) else []
        for t in fixed:
            digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _name(function: Any) -> str:
    """A function as text that is equal for equal ones in another process too: dataclasses print their fields."""
    if isinstance(function, functools.partial):
        return f"{_name(function.func)}, {function.args}, {function.keywords}"
    return repr(function) if not inspect.isfunction(function) else function.__qualname__


def _check_augment(augment: str | None, source: Rows) -> None:
    if augment is None:
        return
    if augment != "crop_flip":
        raise unknown_name("augmentation", augment, ["crop_flip"])
    if isinstance(source, Sampled) or source.data.x.ndim != 4:
        got = "a sampler" if isinstance(source, Sampled) else f"inputs of shape {tuple(source.data.x.shape)}"
        raise OptionError(f"train: augment={augment!r} needs images of shape (n, channels, height, width), got {got}.")


def _held_out(
    validation: Any, patience: int | None, net: nn.Module, loss: str | Loss, device: torch.device
) -> Data | None:
    if patience is not None and patience < 1:
        raise OptionError(f"train: patience must be at least 1 epoch, got {patience}.")
    if validation is None:
        if patience is not None:
            raise OptionError("train: patience needs held-out rows to watch. Give validation=(X, y).")
        return None
    if getattr(net, "needs_rows", False):
        raise OptionError("train: a table of gates knows its own examples only, so there is nothing to validate on.")
    return prepare_validation(validation, net, loss, device)


def _members(
    net: nn.Module | Sequence[nn.Module],
    seed: int,
    seeds: Sequence[int] | None,
    settings: Sequence[Mapping[str, float]] | None,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    base = {"lr": float(lr), "weight_decay": float(weight_decay), "momentum": float(momentum)}
    seed = int(seed)
    nets = [unwrapped(one) for one in (net if isinstance(net, Sequence) else [net])]
    for one in nets:
        if not isinstance(one, nn.Module):
            raise OptionError(f"train: expected a network or a list of them first, got {type(one).__name__}.")
        if next(one.parameters(), None) is None:
            raise OptionError(f"train: {type(one).__name__} has no parameters to train.")
    if isinstance(seeds, Integral):
        raise OptionError(f"train: seeds are a sequence, one network each, got {seeds}. Give range({seeds}).")
    if not isinstance(net, nn.Module):
        if seeds is not None or settings is not None:
            raise OptionError("train: give either a list of networks, or one network with seeds or settings.")
        if not nets:
            raise EmptyDataError("train: the list of networks is empty.")
        if len({id(one) for one in nets}) < len(nets):
            raise OptionError(
                "train: a network is in the list twice, and it can hold the weights of one training alone. Give copies "
                "of it, copy.deepcopy(net), or the network itself with seeds=…."
            )
        return nets, [base | {"seed": seed + i} for i in range(len(nets))]
    if seeds is None and settings is None:
        return nets, [base | {"seed": seed}]
    for setting in settings or ():
        unknown = [k for k in setting if k not in _SETTINGS]
        if unknown:
            raise unknown_name("setting", unknown[0], _SETTINGS)
    members, chosen = [], []
    for setting in settings if settings is not None else ({},):
        for s in seeds if seeds is not None else (seed,):
            clone = copy.deepcopy(nets[0])
            initialise(clone, int(s))
            if "beta" in setting:
                soft = [part.gate for _, part in gated_parts(clone) if hasattr(part.gate, "beta")]
                if not soft:
                    raise OptionError("train: a setting gives beta, but the network's gates are not soft.")
                for gate in soft:
                    gate.beta.fill_(float(setting["beta"]))  # type: ignore[operator]
            members.append(clone)
            chosen.append(base | {k: float(v) for k, v in setting.items()} | {"seed": int(s)})
    if not members:
        raise EmptyDataError("train: seeds and settings give no networks.")
    return members, chosen


def initialise(net: nn.Module, seed: int) -> None:
    """Draw a network's weights from a seed, in place: gated parts by their own rule, others by `reset_parameters`."""
    gated = [part for _, part in gated_parts(net)]
    inside = {m for part in gated for m in part.modules()}
    plain = [m for m in net.modules() if m not in inside and callable(_reset(m))]
    drawn = {p for m in (*plain, *gated) for p in m.parameters()}
    for name, p in net.named_parameters():
        if p.requires_grad and p not in drawn:
            raise OptionError(
                f"train: parameter '{name}' of shape {tuple(p.shape)} cannot be drawn from a seed: its module has no "
                "reset_parameters. Give it one, or give networks that you made: train([make(s) for s in seeds], …)."
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for m in reversed(plain):  # children first: a parent's own rule wins
            _reset(m)()
    for i, part in enumerate(gated):  # one seed would make parts of one shape equal, and keep them so
        part.reinitialise(seed if i == 0 else derive_seed(seed, f"part {i}"))


def _reset(module: nn.Module) -> Any:
    """What draws a module's own weights; attention and transformers of torch have it with an underscore."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _bar(
    label: str, epochs: int, start: int, members: int, show: bool | Callable[[str, float, float], None]
) -> Iterator[Callable[[int, Tensor], None]]:
    """A progress bar with the median loss, the caller's own, or none."""
    if callable(show):
        yield lambda epoch, losses: show(label, epoch, epochs)
        return
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
        yield lambda epoch, losses: bar.update(task, completed=epoch, loss=f"{float(losses.median()):.4f}")
