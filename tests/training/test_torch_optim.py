"""Optimizers and schedulers that factories of PyTorch make, against loops of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import pathlens as pl
from pathlens.errors import CheckpointError, OptionError, UnknownNameError
from pathlens.testing.plain_loop import train_plainly
from pathlens.training import Checkpoints, Execution, optimizers
from pathlens.training.inputs import mse
from pathlens.training.members import derive_seed


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.sin(3 * x[:, :1])


def worst(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters()))


# --- optimizers ------------------------------------------------------------------------------------------------

SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
FACTORIES: list[Any] = [
    SGD,
    partial(torch.optim.Adam, betas=(0.8, 0.99), amsgrad=True),
    partial(torch.optim.SGD, momentum=0.5, foreach=True),
    torch.optim.Adagrad,
    torch.optim.NAdam,
    lambda params: torch.optim.RMSprop(params, centered=True),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_optimizer_of_a_factory_is_that_of_a_plain_loop(factory: Any) -> None:
    (x, y), pattern = rows(), pl.models.relu(2, (6, 5)).double()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.02}
    runs = pl.train(
        pattern, (x, y), epochs=20, batch_size=16, seeds=[0, 1], optimizer=factory, clip=0.5, progress=False, **options
    )
    for seed, trained in zip([0, 1], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        own = factory if factory is not FACTORIES[-1] else partial(torch.optim.RMSprop, centered=True)
        train_plainly(alone, x, y, steps=60, loss=mse, optimizer=own, batch_size=16, seed=seed, clip=0.5, **options)
        assert worst(trained, alone) <= 1e-12


def test_a_name_and_its_class_give_the_same_bits() -> None:
    runs = [
        pl.train(pl.models.relu(2, (6,)).double(), rows(), epochs=5, seeds=[0, 1], optimizer=given, progress=False)
        for given in ("adam", torch.optim.Adam)
    ]
    assert (runs[0].history() == runs[1].history()).all()


def test_members_have_their_own_options_of_the_optimizer() -> None:
    (x, y), pattern = rows(), pl.models.relu(2, (6, 5)).double()
    settings = [{"momentum": 0.9}, {}, {"momentum": 0.5, "lr": 0.02}]
    options: dict[str, Any] = {"epochs": 20, "batch_size": 16, "optimizer": "sgd", "lr": 0.01, "progress": False}
    runs = pl.train(pattern, (x, y), seeds=[3], settings=settings, **options)
    for setting, trained in zip(settings, runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(3)
        given = {"lr": 0.01, **setting}
        train_plainly(alone, x, y, steps=60, loss=mse, optimizer=torch.optim.SGD, batch_size=16, seed=3, **given)
        assert worst(trained, alone) <= 1e-12


class Scaled(torch.optim.SGD):
    """One weight influences the update of another: members must not share a tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        super().step(closure)


def test_members_of_an_optimizer_of_ones_own_do_not_influence_each_other() -> None:
    given: dict[str, Any] = {"epochs": 5, "optimizer": Scaled, "lr": 0.01, "progress": False}
    pattern = pl.models.relu(2, (6,)).double()
    together, alone = (pl.train(pattern, rows(), seeds=seeds, **given) for seeds in ([0, 1], [1]))
    assert worst(together.networks[1], alone.networks[0]) <= 1e-12


def test_a_checkpoint_belongs_to_one_optimizer(tmp_path: Path) -> None:
    net = pl.models.relu(2, (6,)).double()
    options: dict[str, Any] = {"epochs": 2, "checkpoints": tmp_path, "seeds": [0], "progress": False}
    pl.train(net, rows(), optimizer=SGD, **options)
    pl.train(net, rows(), optimizer=partial(torch.optim.SGD, momentum=0.9, nesterov=True), **options)
    with pytest.raises(CheckpointError, match="optimizer="):
        pl.train(net, rows(), optimizer=partial(torch.optim.SGD, momentum=0.8, nesterov=True), **options)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": torch.optim.LBFGS}, OptionError, "LBFGS is not supported"),
    ({"optimizer": torch.optim.Adafactor}, OptionError, "Adafactor is not supported"),
    (
        {"optimizer": partial(torch.optim.SGD, lr=0.1)},
        OptionError,
        r"lr is an argument of train.*\(…, lr=…\)",
    ),
    ({"optimizer": partial(torch.optim.SGD, weight_decay=0.1)}, OptionError, "weight_decay is an argument of train"),
    ({"optimizer": lambda params: 3}, OptionError, "must make a torch.optim.Optimizer, got int"),
    ({"optimizer": partial(torch.optim.SGD, nesterov=True)}, OptionError, "cannot be made .* Nesterov"),
    ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, UnknownNameError, "setting of Rprop 'weight_decay'"),
    ({"optimizer": 3}, UnknownNameError, "optimizer 3"),
    ({"scheduler": lr_scheduler.ReduceLROnPlateau}, OptionError, "ReduceLROnPlateau needs one loss"),
    ({"scheduler": lambda optimizer: 3}, OptionError, "must make .*LRScheduler, got int"),
    ({"scheduler": lambda o: lr_scheduler.StepLR(o, 2)}, OptionError, "Name its parameter `optimizer`"),
    ({"scheduler": 0.1}, UnknownNameError, "learning-rate scheduler 0.1"),
]


@pytest.mark.parametrize("options, error, message", REFUSED)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pl.train(pl.models.relu(2, (4,)).double(), rows(), epochs=1, progress=False, **options)


# --- schedulers ------------------------------------------------------------------------------------------------


def chain(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.7)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "ConstantLR": lr_scheduler.ConstantLR,
    "SequentialLR": chain,
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=9),  # it changes the momentum too
}


def torch_loop(net: nn.Module, make: Callable[..., LRScheduler], lr: float, epochs: int, seed: int) -> list[float]:
    """What a user of PyTorch would write; returns the rate of each epoch."""
    x, y = rows()
    shuffle = torch.Generator().manual_seed(derive_seed(seed, "shuffle"))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        rates.append(scheduler.get_last_lr()[0])
        for index in torch.randperm(40, generator=shuffle).split(16):
            optimizer.zero_grad()
            mse(net(x[index]), y[index]).backward()
            optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_pytorch_gives_the_rates_of_its_own_loop(name: str) -> None:
    pattern, made = pl.models.relu(2, (6, 5)).double(), []

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        made.append(SCHEDULERS[name](optimizer))
        return made[-1]

    rates: list[list[float]] = []
    settings = [{"lr": 0.01}, {"lr": 0.02}]
    runs = pl.train(
        pattern,
        rows(),
        epochs=8,
        batch_size=16,
        seeds=[4],
        settings=settings,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        scheduler=make,
        callbacks=[lambda state: rates.append(made[0].get_last_lr())],
        progress=False,
    )
    for i, trained in enumerate(runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(4)
        expected = torch_loop(alone, SCHEDULERS[name], settings[i]["lr"], 8, 4)
        assert [group[i] for group in rates[:-1]] == expected
        assert worst(trained, alone) <= 1e-12


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    net = pl.models.relu(2, (6,)).double()
    options: dict[str, Any] = {"epochs": 8, "seeds": [0, 1], "optimizer": SGD, "scheduler": SCHEDULERS[name]}
    whole = pl.train(net, rows(), progress=False, **options)
    options["checkpoints"] = Checkpoints(tmp_path, every=2)
    with pytest.raises(KeyboardInterrupt):
        pl.train(net, rows(), progress=stop, **options)
    resumed = pl.train(net, rows(), progress=False, **options)
    assert (resumed.history() == whole.history()).all()
    assert all(worst(a, b) == 0 for a, b in zip(resumed.networks, whole.networks))
    with pytest.raises(CheckpointError, match="scheduler="):
        pl.train(net, rows(), progress=False, **options | {"scheduler": "constant"})


def test_a_function_of_progress_is_no_factory() -> None:
    assert all(optimizers.is_scheduler_factory(make) for make in SCHEDULERS.values())
    for function in (pl.training.cosine, pl.training.Geometric(1, 2), lambda progress: 1.0, dict, print, min):
        assert not optimizers.is_scheduler_factory(function)


def test_a_cuda_graph_refuses_options_that_it_holds_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlens.training.steps import StepRunner

    def with_graph(self: StepRunner) -> None:
        self._graph, self._graph_options = self._step, self._group_options()

    monkeypatch.setattr(StepRunner, "prepare_graph", with_graph)
    options: dict[str, Any] = {"epochs": 3, "optimizer": SGD, "batch_size": None, "progress": False}
    net = pl.models.relu(2, (6,)).double()
    pl.train(net, rows(), scheduler=SCHEDULERS["StepLR"], execution=Execution(), **options)
    with pytest.raises(OptionError, match=r"other than lr.*Execution\(compile=False\)"):
        pl.train(net, rows(), scheduler=SCHEDULERS["OneCycleLR"], **options)
