"""Networks that change the rows they are given: the user's rows stay, and training is that of copied batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pathlens as pl
from pathlens.hardening import report, values
from pathlens.testing.plain_loop import train_plainly
from pathlens.training import Execution, Keep
from pathlens.training.stack import Stack
from pathlens.training.steps import StepRunner


class Editing(nn.Module):
    """A network whose forward pass changes its input first."""

    def __init__(self, how: str, seed: int = 0, *, image: bool = False, outputs: int = 1) -> None:
        super().__init__()
        self.how = how
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.rand(()) + 0.5)
            first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()) if image else nn.Linear(3, 32)
            self.net = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.4 if how == "dropout" else 0.0))
            self.net.append(nn.Linear(32, outputs))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "view":
            x[:, 0] *= 0.5
        elif self.how == "trained":
            x.mul_(self.scale.detach())
        else:
            x /= 25.0
        return self.net(x)


def rows(n: int = 20) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return 50 * torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randn(n, 1, generator=g, dtype=torch.float64)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def full_loss(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(mse(copy.deepcopy(net).eval()(x.clone()), y))


def worst(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("how", ["whole", "view", "trained"])
def test_training_is_that_of_a_loop_that_copies_each_batch(how: str, batch_size: int | None, compile: bool) -> None:
    (x, y), (held, held_y) = rows(), rows(7)
    kept = x.clone(), held.clone()
    nets = [Editing(how, seed) for seed in range(3)]
    plain = copy.deepcopy(nets)
    runs = pl.train(
        nets,
        (x, y),
        epochs=3,
        batch_size=batch_size,
        validation=(held, held_y),
        execution=Execution(compile=compile),
        progress=False,
    )
    assert torch.equal(x, kept[0]) and torch.equal(held, kept[1])
    for seed, (net, own) in enumerate(zip(nets, plain)):
        histories: dict[str, list[float]] = {"loss": [full_loss(own, x, y)], "validation": [full_loss(own, *rows(7))]}
        for epochs in range(1, 4):  # from the start, since an optimiser remembers
            own.load_state_dict(Editing(how, seed).state_dict())
            steps = epochs * (3 if batch_size else 1)
            train_plainly(
                own, x, y, steps=steps, loss=mse, optimizer=torch.optim.Adam, batch_size=batch_size, seed=seed, lr=1e-3
            )
            histories["loss"].append(full_loss(own, x, y))
            histories["validation"].append(full_loss(own, held, held_y))
        assert worst(net, own) <= 1e-12
        for name, expected in histories.items():
            assert runs[seed].history[name] == pytest.approx(expected, rel=1e-12)


class Copying(Editing):
    """The same network on a copy of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


@pytest.mark.parametrize("option", ["dropout", "teacher", "augment", "augment and teacher", "one by one", "weights"])
def test_every_way_to_train_leaves_rows_as_they_were(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = option.startswith(("augment", "one by one"))
    g = torch.Generator().manual_seed(1)
    x = 50 * torch.randn(21, *((1, 6, 6) if image else (3,)), generator=g, dtype=torch.float64)
    y = torch.randint(3, (21,), generator=g)
    kept, found = x.clone(), []
    for kind in (Editing, Copying):
        nets = [kind("dropout" if option == "dropout" else "whole", s, image=image, outputs=3) for s in (0, 1)]
        options: dict[str, Any] = {"epochs": 2, "batch_size": 5, "loss": "cross_entropy", "progress": False}
        options |= {"augment": "crop_flip"} if option.startswith("augment") else {}
        options |= {"teacher": kind("whole", 9, image=image, outputs=3)} if "teacher" in option else {}
        weights = torch.rand(21, generator=torch.Generator().manual_seed(2)) if option == "weights" else None
        if option == "one by one":
            step = StepRunner._step

            def alone(self: StepRunner, index: Tensor, step: Any = step) -> Tensor:
                self._one_by_one = True
                return step(self, index)

            monkeypatch.setattr(StepRunner, "_step", alone)
        runs = pl.train(nets, (x, y, weights), **options)
        assert torch.equal(x, kept)
        found.append((nets, [t.history for t in runs]))
    (a, first), (b, second) = found
    assert all(worst(p, q) <= 1e-12 for p, q in zip(a, b))
    for one, other in zip(first, second):
        assert one.keys() == other.keys()
        assert all(one[name] == pytest.approx(other[name], rel=1e-12) for name in one)


def test_the_test_rows_of_a_data_set_and_the_watched_ones_stay() -> None:
    x, y = rows()
    data = pl.data.DataSet(x.clone(), y, x.clone(), y)
    watched = x.clone()
    t = pl.train(Editing("whole"), data, epochs=2, keep=Keep([0, 2], X=watched), progress=False)
    assert torch.equal(data.x, x) and torch.equal(data.x_test, x) and torch.equal(watched, x)
    assert t.history["test_loss"] == t.history["loss"]


def test_a_loss_that_changes_targets_leaves_them() -> None:
    (x, y), kept = rows(), rows()[1]

    def doubled(output: Tensor, target: Tensor) -> Tensor:
        target *= 2
        return (output - target).square().mean()

    t = pl.train(pl.models.relu(3, (4,), seed=0).double(), (x, y), loss=doubled, epochs=2, progress=False)
    other = pl.train(pl.models.relu(3, (4,), seed=0).double(), (x, 2 * y), epochs=2, progress=False)
    assert torch.equal(y, kept) and t.history["loss"] == other.history["loss"]


def test_rows_of_a_network_that_changes_none_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(5000)
    seen = []
    forward = Stack._forward

    def watching(self: Stack, vec: Tensor, given: Tensor, *rest: Any) -> Tensor:
        seen.append((len(given), given.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()))
        return forward(self, vec, given, *rest)

    monkeypatch.setattr(Stack, "_forward", watching)
    stack = Stack([pl.models.relu(3, (4,)).double()], torch.device("cpu"))
    stack.evaluate(x, y, F.mse_loss, None, 2048)
    assert [own for n, own in seen if n > 1] == [True, True, True]


class Scale(nn.Module):
    """A declared affine module: `gated_twin` does not look into it."""

    def forward(self, x: Tensor) -> Tensor:
        x /= 50.0
        return x


def test_hardening_runs_networks_on_copies() -> None:
    (x, y), kept = rows(), rows()[0]
    template = nn.Sequential(Scale(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    net = pl.gated_twin(template, "dlgn", x[:2].clone(), affine=(Scale,))
    calls = [
        lambda: values.recalibrate(net, x, 8),
        lambda: values._loss(net, x, y),
        lambda: report.outputs_of(net, x),
        lambda: report.near_boundary(net, x, 0.1),
        lambda: report.cells_of(net, x),
    ]
    for call in calls:
        call()
        assert torch.equal(x, kept)
