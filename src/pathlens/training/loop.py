"""`train`: one loop for one network or many at once, from data to trajectories.

Every member of a stack has its own generators for initialisation, shuffling and dropout, so a network in a stack reads
the same batches and ends with the same weights as the same network trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pathlens.errors import OptionError
from pathlens.progress import progress_reporter
from pathlens.recording import Trajectory
from pathlens.training.batches import DEFAULT_BATCH_SIZE, RowBatches
from pathlens.training.members import make_members
from pathlens.training.optimizers import OptimizerFactory, SchedulerFactory
from pathlens.training.options import (
    Callback,
    Checkpoints,
    Execution,
    Keep,
    Stopping,
    Teacher,
    TrainingOptions,
    as_option,
)
from pathlens.training.run import TrainingRun
from pathlens.training.runs import Runs
from pathlens.training.schedules import Schedule
from pathlens.training.stack import Loss, Penalty


@torch.inference_mode(False)  # one more frame between a warning and the caller
def train(
    net: nn.Module | Sequence[nn.Module],
    data: Any,
    *,
    epochs: int,
    loss: str | Loss = "mse",
    optimizer: str | OptimizerFactory = "adam",
    lr: float = 1e-3,
    batch_size: int | None = DEFAULT_BATCH_SIZE,
    weight_decay: float = 0.0,
    scheduler: str | Schedule | SchedulerFactory = "constant",
    beta: Schedule | None = None,
    clip: float | None = None,
    penalty: Penalty | None = None,
    augment: str | None = None,
    trained: str | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    settings: Sequence[Mapping[str, float]] | None = None,
    validation: Any = None,
    stopping: Stopping | int | None = None,
    teacher: Teacher | nn.Module | None = None,
    keep: Keep | Sequence[int] | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    device: str | torch.device | None = None,
    execution: Execution | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | str | Callable[[int, int], object] = True,
) -> Trajectory | Runs:
    """Train one network, or many of one architecture at once in the same loop.

    Parameters
    ----------
    net : nn.Module or list of them
        One network is trained in place and gives a Trajectory. A list is trained together and gives Runs. With
        `seeds` or `settings`, copies of `net` are initialised from each seed and trained together.
    data : DataSet, (X, y), (X, y, weights), Dataset, DataLoader, or a sampler
        Weights are numbers of at least 0, one for each row: the loss of a batch is the mean over its rows of
        w_i ℓ_i / w̄, with ℓ_i the loss of row i alone and w̄ the mean weight of all rows. On average this is the
        weighted loss Σ w_i ℓ_i / Σ w_i of all rows. The loss and accuracy of an epoch are weighted in the same way. A
        row of weight 3 counts as three equal rows.

        The test rows of a DataSet are evaluated after every epoch, into `history["test_loss"]` and for labels
        `history["test_accuracy"]`; to save time, keep fewer with `data.subsample(n, n_test=500)`, or none with the pair
        (data.x, data.y). All rows of a Dataset are read into memory in every epoch, so random augmentation differs
        between epochs; `batch_size` and `seed` determine its batches. Its items are (x, y) or (x, y, weight). A
        DataLoader makes its own batches (x, y) in every epoch, and all networks share them; an IterableDataset is read
        in batches of `batch_size`, in its own order. An epoch is one pass over them. A sampler has
        ``sample(n, generator) -> (x, y)``: every step gets a fresh batch (`batch_size` rows), and an epoch is one step.
    epochs : int
    loss : {"mse", "half_mse", "cross_entropy"} or function of (output, target)
        Each network's loss is its mean over the batch; networks do not influence each other. A function gets outputs
        (batch, c) and unchanged targets: for one output pass y of shape (n, 1), otherwise output − target broadcasts to
        (batch, batch).
    optimizer : {"sgd", "adam", "adamw", "rmsprop"} or a factory of params
        A factory is a class such as ``torch.optim.Adagrad``, or ``functools.partial(torch.optim.SGD, momentum=0.9)``.
        `lr` and `weight_decay` are options of its parameter groups. One weight must not influence the update of
        another: LBFGS, Adafactor and Muon raise an error.
    lr, weight_decay : float
        As in PyTorch, but `weight_decay` is 0 by default for every optimizer.
    batch_size : int or None
        None is the full batch. Leave it out with a DataLoader, which has its own batch size.
    scheduler : {"constant", "cosine", "one_cycle"}, function of progress, or a factory of the optimizer
        A function returns the factor on the learning rate in each step; progress is the share of finished steps (with
        an IterableDataset, of finished epochs). A factory is a class of ``torch.optim.lr_scheduler``, a
        `functools.partial` of one, or a function whose parameter is called `optimizer`; its scheduler is stepped once
        after every epoch.
    beta : function of progress, optional
        Schedule of the gates' β, e.g. ``Geometric(4, 1000, until=0.9)``.
    clip : float, optional
        Clip the gradient norm of each network to this value.
    penalty : function of the network, optional
        Its value, a tensor of shape (), is added to the loss that is minimised, but not to the history. It is
        computed for each network: ``lambda net: 1e-3 * net.values.get_parameter("fc1.weight").abs().sum()``.
    augment : {"crop_flip"}, optional
        Shift every image of a batch by up to 4 pixels and flip it at random, independently for each network and epoch.
    trained : {"values", "gates", "both"}, optional
        The part of a gated network to train. Default: the part that it was built to train.
    seed : int
        Seed of shuffling and dropout (single network or list: network i uses seed + i). A DataLoader shuffles by
        itself.
    seeds : sequence of int, optional
        One network per seed, initialised from it.
    settings : sequence of dict, optional
        One network per setting (times seeds): lr, weight_decay, beta, or another number among the options of the
        optimizer, such as momentum.
    validation : optional
        Held-out data in any form of `data`; their loss is `history["validation"]`, and for labels their accuracy is
        `history["validation_accuracy"]`.
    stopping : Stopping, optional
        When training ends before the last epoch: ``Stopping(patience=…, loss_below=…)``. A number is the patience.
    teacher : Teacher or nn.Module, optional
        Learn from this trained network: its outputs for each batch, augmented like the batch, replace the targets of
        the data. With cross-entropy these are its probabilities; the outputs of both networks are divided by the
        temperature, and the loss is multiplied by it, so gradients keep their scale. Other losses use its outputs.
        The history is computed on the targets of the data. With ``Keep(evaluate="running")`` this holds for its first
        loss only: the others are means over batches against the teacher.
    keep : Keep or sequence of int, optional
        What the trajectory stores besides the history: ``Keep(epochs=…, losses=…, X=…)``. A sequence of epochs keeps
        the weights at these epochs.
    checkpoints : Checkpoints or path, optional
        Folder for checkpoints, saved every 10 epochs and at the end. An interrupted training resumes from the last one,
        on the CPU bit for bit. A finished training continues with a larger `epochs`, unless `scheduler` or `beta`
        depend on it; `keep` may then contain new epochs. A network with other layers, frozen weights or gates raises an
        error; a network that differs only in its initial weights gets the weights of the checkpoint, with a
        ResumeWarning. With a Dataset or DataLoader, the checkpoint contains the state of torch's CPU generator and of
        the generators in the data, its samplers and data sets. Resuming restores them, so the next batches are the same
        as without the interruption. Random states of NumPy, `random` and persistent workers are not restored.
    device : optional
        Default: the device of the network.
    execution : Execution, optional
        How the training is computed: ``Execution(compile=…, autocast=…, threads=…)``.
    callbacks : sequence of functions
        Each is called with a `TrainingState` before the first step and after every epoch, before a checkpoint is saved.
        When training resumes, the first call has the epoch of the checkpoint. If one returns True, training ends after
        this epoch.
    progress : bool, str or function
        Show a progress bar with the median loss. A string is its label; a function is called with (epochs done, epochs)
        after every epoch.

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
    options = TrainingOptions(
        epochs=epochs,
        loss=loss,
        optimizer=optimizer,
        batch_size=batch_size,
        scheduler=scheduler,
        beta=beta,
        clip=clip,
        penalty=penalty,
        augment=augment,
        trained=trained,
        seed=seed,
        validation=validation,
        stopping=as_option(Stopping, stopping) or Stopping(),
        teacher=as_option(Teacher, teacher),
        keep=as_option(Keep, keep) or Keep(),
        checkpoints=as_option(Checkpoints, checkpoints),
        device=device,
        execution=as_option(Execution, execution) or Execution(),
        callbacks=callbacks,
    )
    members, member_settings = make_members(net, seed, seeds, settings, {"lr": lr, "weight_decay": weight_decay})
    if beta is not None and any("beta" in s for s in member_settings):
        raise OptionError("train: beta is a schedule, but settings also set beta. Leave out one of them.")
    run = TrainingRun(members, member_settings, data, options)
    many = f" ({len(members)} networks at once)" if len(members) > 1 else ""
    shown = progress + many if isinstance(progress, str) else progress
    with _threads(options.execution.threads or run.steps.good_threads()), _explained_errors(members[0], run.source):
        if options.checkpoints is not None:
            run.restore()
        with progress_reporter(shown, f"training{many}", epochs, start=run.epoch) as report:
            run.execute(lambda losses: report(1, f"loss {float(losses.median()):.4f}"))
    for i, member in enumerate(members):
        run.stack.write(i, member)
    single = isinstance(net, nn.Module) and seeds is None and settings is None
    return run.trajectories[0] if single else Runs(run.trajectories, members, member_settings)


@contextmanager
def _explained_errors(net: nn.Module, source: RowBatches) -> Iterator[None]:
    """Explain errors of torch for networks that cannot be batched over members."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise OptionError(
            f"train: batch-norm cannot normalise a batch of one row, and {source.explain_single_row()}"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not ("vmap" in reason or "atching rule" in reason):
            raise
        raise OptionError(
            f"train: networks are trained as a stack, and torch.vmap cannot batch something in {type(net).__name__}: "
            f"{reason.rstrip('.')}. Train it in your own loop, and keep moments with Trajectory().append(net, X)."
        ) from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
