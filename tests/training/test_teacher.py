"""Learning from another network: against steps by hand, in stacks, with augmentation, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathlens as pl
from pathlens.errors import CheckpointError, OptionError, ShapeError
from pathlens.training import Checkpoints, Keep, Teacher


def flat(n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def network(seed: int, hidden: int = 6) -> nn.Module:
    return pl.models.relu(4, hidden=(hidden,), outputs=3, seed=seed).double()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_step_is_that_towards_the_teachers_probabilities(temperature: float) -> None:
    (x, y), net, teacher = flat(), network(1), network(2)
    want = network(1)
    pl.train(
        net,
        (x, y),
        loss="cross_entropy",
        teacher=Teacher(teacher, temperature),
        optimizer="sgd",
        lr=0.1,
        epochs=3,
        batch_size=None,
        progress=False,
    )
    for _ in range(3):
        target = F.softmax(teacher(x) / temperature, 1).detach()
        loss = temperature * F.cross_entropy(want(x) / temperature, target)
        for p, g in zip(want.parameters(), torch.autograd.grad(loss, list(want.parameters()))):
            p.data -= 0.1 * g
    for a, b in zip(net.parameters(), want.parameters()):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_labels_that_say_nothing_do_not_matter() -> None:
    (x, _), teacher = flat(200), network(2)
    truth = teacher(x).argmax(1)
    run = pl.train(
        network(1, 24),
        (x, torch.zeros(200, dtype=torch.long)),
        loss="cross_entropy",
        teacher=teacher,
        epochs=150,
        lr=1e-2,
        progress=False,
        keep=Keep(evaluate="running"),
    )
    learned = pl.train(
        net := network(1, 24), (x, truth), loss="cross_entropy", teacher=teacher, epochs=150, lr=1e-2, progress=False
    )
    assert (net(x).argmax(1) == truth).double().mean() > 0.95
    assert learned.history["accuracy"][-1] > 0.95
    assert run.history["loss"][-1] < run.history["loss"][1]


def test_squared_error_is_to_the_teachers_outputs() -> None:
    (x, _), net, teacher = flat(), network(1, 32), network(2)
    pl.train(net, (x, torch.zeros(40, 3, dtype=torch.float64)), teacher=teacher, epochs=300, lr=1e-2, progress=False)
    with torch.no_grad():
        assert F.mse_loss(net(x), teacher(x)) < 0.02 * teacher(x).square().mean()


def test_members_of_a_stack_hear_of_their_own_augmented_images() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    template, example = pl.models.gconv(3, channels=(1, 2, 2), dense=(3,), bias=True), torch.zeros(1, 1, 6, 6)
    net, teacher = (pl.gated_twin(template, "relu", example=example, seed=s).double() for s in (0, 5))
    given = {
        "loss": "cross_entropy",
        "epochs": 4,
        "batch_size": 5,
        "progress": False,
        "augment": "crop_flip",
        "teacher": Teacher(teacher, temperature=2.0),
    }
    runs = pl.train(net, (x, y), seeds=(3, 8), **given)
    alone = pl.train(net, (x, y), seeds=(8,), **given)
    for a, b in zip(runs.networks[1].parameters(), alone.networks[0].parameters()):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_the_teacher_stays_as_it_was() -> None:
    teacher = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    before = {k: v.clone() for k, v in teacher.state_dict().items()}
    pl.train(network(1), flat(), loss="cross_entropy", teacher=teacher, epochs=2, progress=False)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert teacher.training and all(p.requires_grad for p in teacher.parameters())


def test_a_checkpoint_belongs_to_one_teacher_and_temperature(tmp_path: Path) -> None:
    given = {"loss": "cross_entropy", "epochs": 2, "progress": False, "checkpoints": tmp_path}
    pl.train(network(1), flat(), teacher=Teacher(network(2), 4), **given)
    pl.train(network(1), flat(), teacher=Teacher(network(2), 4.0), **given)
    with pytest.raises(CheckpointError, match="teacher"):
        pl.train(network(1), flat(), teacher=Teacher(network(3), 4), **given)
    with pytest.raises(CheckpointError, match="temperature"):
        pl.train(network(1), flat(), teacher=Teacher(network(2), 2), **given)


def test_a_run_that_was_cut_off_goes_on_with_its_teacher(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    saved = Checkpoints(tmp_path, every=1)
    given = {"loss": "cross_entropy", "epochs": 4, "seeds": (0, 1), "teacher": network(2)}
    whole = pl.train(network(1), flat(), progress=False, **given)
    with pytest.raises(KeyboardInterrupt):
        pl.train(network(1), flat(), progress=stop, checkpoints=saved, **given)
    again = pl.train(network(1), flat(), progress=False, checkpoints=saved, **given)
    for a, b in zip(whole.networks, again.networks):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_rows_that_stay_as_they_are_are_asked_once() -> None:
    class Counting(nn.Linear):
        rows = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.rows += len(x)
            return super().forward(x)

    pl.train(
        network(1),
        flat(),
        loss="cross_entropy",
        teacher=Counting(4, 3).double(),
        seeds=range(3),
        epochs=5,
        progress=False,
    )
    assert Counting.rows == 40 + 1  # and one to see what it gives


def test_a_row_of_weight_two_is_a_row_that_is_there_twice() -> None:
    (x, y), teacher = flat(10), network(2)
    given = {
        "loss": "cross_entropy",
        "teacher": Teacher(teacher, temperature=2.0),
        "batch_size": None,
        "epochs": 5,
        "progress": False,
    }
    weights = torch.ones(10)
    weights[3] = 2
    pl.train(a := network(1), (x, y, weights), **given)
    twice = torch.tensor([*range(10), 3])
    pl.train(b := network(1), (x[twice], y[twice]), **given)
    assert all(torch.allclose(p, q, atol=1e-12) for p, q in zip(a.parameters(), b.parameters()))


class _Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :3], x


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"teacher": nn.Linear(4, 2).double()}, ShapeError, "the teacher gives"),
        ({"teacher": nn.Linear(5, 3).double()}, ShapeError, "does not accept"),
        ({"teacher": lambda x: x}, OptionError, "trained network"),
        ({"teacher": Teacher(network(2), 4.0), "loss": "mse"}, OptionError, "probabilities"),
        ({"teacher": pl.models.frg(4, (4,), 3, examples=40)}, OptionError, "table of gates"),
        ({"teacher": network(2), "loss": F.cross_entropy}, OptionError, "not labels"),
        ({"teacher": _Pair()}, ShapeError, "gives tuple"),
    ],
)
def test_what_cannot_teach_is_refused(given: dict, error: type[Exception], match: str) -> None:
    x, y = flat()
    target = F.one_hot(y, 3).double() if given.get("loss") == "mse" else y
    with pytest.raises(error, match=match):
        pl.train(network(1), (x, target), epochs=1, progress=False, **{"loss": "cross_entropy"} | given)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), "4", True])
def test_temperatures_are_positive(temperature: object) -> None:
    with pytest.raises(OptionError, match="temperature must be a positive number"):
        Teacher(network(2), temperature)  # type: ignore[arg-type]
