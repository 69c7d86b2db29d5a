"""`train`: one loop for one network or many at once, from data to trajectories.

Every member of a stack has its own generators for initialisation, shuffling and dropout, so that a network in a stack
and the same network trained alone read the same batches and end with the same weights.
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
        w_i ℓ_i / w̄, with ℓ_i the loss of row i alone and w̄ the mean weight of all rows, so that on average a step is
        one of the weighted loss Σ w_i ℓ_i / Σ w_i of all rows. The loss and accuracy of an epoch are weighted alike. A
        row of weight 3 counts as three equal rows.

        The test rows of a DataSet are evaluated after every epoch, into `history["test_loss"]` and for labels
        `history["test_accuracy"]`; if they are many, `data.subsample(n, n_test=500)` saves time, and the pair
        (data.x, data.y) has none. All rows of a Dataset are read into memory in every epoch, so that random
        augmentation is drawn again; `batch_size` and `seed` make its batches. Its items are (x, y) or (x, y, weight). A
        DataLoader makes its own batches (x, y) in every epoch, and all networks share them; an IterableDataset is read
        in batches of `batch_size`, in its own order. An epoch is one pass over them. A sampler has
        ``sample(n, generator) -> (x, y)``: every step gets a fresh batch (`batch_size` rows), and an epoch is one step.
    epochs : int
    loss : {"mse", "half_mse", "cross_entropy"} or function of (output, target)
        Each network's loss is its mean over the batch; networks do not influence each other.
        A function gets outputs (batch, c) and the targets as they were given: for one output give y of shape (n, 1),
        else output − target broadcasts to (batch, batch).
    optimizer : {"sgd", "adam", "adamw", "rmsprop"} or a factory of params
        A factory is a class such as ``torch.optim.Adagrad``, or ``functools.partial(torch.optim.SGD, momentum=0.9)``.
        `lr` and `weight_decay` are options of its parameter groups, and one weight may not influence the update of
        another: LBFGS, Adafactor and Muon are refused.
    lr, weight_decay : float
        As in PyTorch, but `weight_decay` is 0 by default for every optimizer.
    batch_size : int or None
        None is the full batch. A DataLoader has its own, so that both together are refused.
    scheduler : {"constant", "cosine", "one_cycle"}, function of progress, or a factory of the optimizer
        A function returns the factor on the learning rate in each step; progress is the share of steps done, and with
        an IterableDataset of epochs. A factory is a class of ``torch.optim.lr_scheduler``, a `functools.partial` of
        one, or a function whose parameter is called `optimizer`; its scheduler is stepped once after every epoch.
    beta : function of progress, optional
        Schedule of the gates' β, e.g. ``Geometric(4, 1000, until=0.9)``.
    clip : float, optional
        Largest gradient norm of each network.
    penalty : function of the network, optional
        Its value, a tensor of shape (), is added to the loss that is minimised, with the weights of each network in
        turn: ``lambda net: 1e-3 * net.values.get_parameter("fc1.weight").abs().sum()``. The history does not have it.
    augment : {"crop_flip"}, optional
        Every image of a batch is shifted by up to 4 pixels and flipped or not, drawn for each network and epoch.
    trained : {"values", "gates", "both"}, optional
        Train this part of a gated network, whatever it was built to train. Default: as it was built.
    seed : int
        Seed of shuffling and dropout (single network or list: network i uses seed + i). A DataLoader shuffles by
        itself.
    seeds : sequence of int, optional
        One network per seed, initialised from it.
    settings : sequence of dict, optional
        One network per setting (times seeds): lr, weight_decay, beta, or another number among the options of the
        optimizer, such as momentum.
    validation : optional
        Held-out data in the forms of `data`; their loss is `history["validation"]`, and for labels there is
        `history["validation_accuracy"]`.
    stopping : Stopping, optional
        When training ends before the last epoch: ``Stopping(patience=…, loss_below=…)``. A number is the patience.
    teacher : Teacher or nn.Module, optional
        Learn from this trained network: its outputs for each batch, augmented like the batch, replace the targets of
        the data. With cross-entropy these are its probabilities; the outputs of both networks are divided by the
        temperature, and the loss is multiplied by it, so that gradients keep their scale. Other losses get its
        outputs. Networks are still evaluated on the targets of the data: with ``Keep(evaluate="running")`` that is the
        first loss of a history, and the others are means over batches, against the teacher.
    keep : Keep or sequence of int, optional
        What the trajectory stores beside the history: ``Keep(epochs=…, losses=…, X=…)``. Epochs alone keep the weights.
    checkpoints : Checkpoints or path, optional
        Save there, every 10 epochs and at the end; an interrupted training resumes from there, on the CPU to the same
        bits. A finished one continues with a larger `epochs`, unless `scheduler` or `beta` depend on it, and `keep` may
        then name some of the new epochs. Another network is refused by its layers, frozen weights and gates; one that
        only began with other weights gets those of the checkpoint, with a ResumeWarning. With a Dataset or DataLoader
        the checkpoint has the state of torch's CPU generator and of the generators in it, its samplers and data sets,
        and sets them on resuming: the next batches are those of an uninterrupted training. Random numbers of NumPy,
        `random` and persistent workers are not restored.
    device : optional
        Default: the device of the network.
    execution : Execution, optional
        How the training is computed: ``Execution(compile=…, autocast=…, threads=…)``.
    callbacks : sequence of functions
        Each is called with a `TrainingState` before the first step and after every epoch, before a checkpoint is
        saved. A training that resumes calls them first with the epoch of its checkpoint. If one returns True, training
        ends after this epoch.
    progress : bool, str or function
        Show a progress bar with the median loss; a text is its label; a function is called with (epochs done, epochs)
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
        raise OptionError("train: a schedule moves the β of every network, and settings give β too. Drop one of them.")
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
            f"{reason.rstrip('.')}. Train it in a loop of your own, and keep moments with Trajectory().append(net, X)."
        ) from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
