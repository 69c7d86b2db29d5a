"""Training on a Dataset or a DataLoader: every epoch reads it anew, as a loop of PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset

import pathlens as pl
from pathlens.errors import CheckpointError, EmptyDataError, LabelError, NotFiniteError, OptionError, ShapeError
from pathlens.training import Execution, Keep, cosine
from pathlens.training.batches import DatasetBatches
from pathlens.training.inputs import DataReader


def rows(n: int = 20) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    return x, torch.sin(3 * x[:, :1])


def network(seed: int = 0) -> nn.Module:
    return pl.models.relu(2, (6,), seed=seed).double()


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise that is drawn when a row is fetched, from torch's generator or one of its own."""

    def __init__(self, n: int = 20, noise: float = 0.1, generator: torch.Generator | None = None) -> None:
        (self.x, self.y), self.noise, self.generator, self.fetched = rows(n), noise, generator, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        noise = torch.randn(2, generator=self.generator, dtype=torch.float64)
        return self.x[i] + self.noise * noise, self.y[i]


class Stream(IterableDataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.x, self.y = rows(n)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x, self.y)


def plain_loop(net: nn.Module, loader: Any, epochs: int, rate: Any = lambda progress: 1.0) -> list[float]:
    """What a user of PyTorch would write; the mean loss over the rows of each epoch."""
    optimiser, history = torch.optim.Adam(net.parameters(), lr=1e-2), []
    for epoch in range(epochs):
        total = seen = 0.0
        for i, (x, y) in enumerate(loader):
            optimiser.param_groups[0]["lr"] = 1e-2 * rate((epoch + i / len(loader)) / epochs)
            loss = (net(x) - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total, seen = total + loss.item() * len(x), seen + len(x)
        history.append(total / seen)
    return history


def worst(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters()))


def train(net: Any, data: Any, epochs: int = 4, **options: Any) -> Any:
    plain = {"epochs": epochs, "lr": 1e-2, "progress": False, "execution": Execution(compile=False)}
    return pl.train(net, data, **plain | options)


def shuffled(seed: int = 3, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(seed)} | options
    return DataLoader(TensorDataset(*rows()), **options)


LOADERS = {
    "shuffled": shuffled,
    "drop_last": lambda: shuffled(drop_last=True),
    "in order": lambda: DataLoader(TensorDataset(*rows()), batch_size=7),
    "sampler": lambda: DataLoader(
        TensorDataset(*rows()),
        batch_size=5,
        sampler=RandomSampler(range(20), True, 13, generator=torch.Generator().manual_seed(1)),
    ),
    "batches of the dataset": lambda: DataLoader(list(zip(*(t.split(6) for t in rows()))), batch_size=None),
    "collate": lambda: shuffled(collate_fn=lambda items: [np.stack([p[i].numpy() for p in items]) for i in (0, 1)]),
    "augmented": lambda: DataLoader(Augmented(generator=torch.Generator().manual_seed(7)), batch_size=8, shuffle=True),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("members", [1, 3])
def test_training_with_a_loader_is_the_plain_loop(name: str, members: int) -> None:
    nets = [network(seed) for seed in range(members)]
    torch.manual_seed(5)
    runs = train(nets if members > 1 else nets[0], LOADERS[name](), scheduler="cosine", execution=Execution())
    for i, net in enumerate(nets):
        torch.manual_seed(5)
        own = network(i)
        history = plain_loop(own, shuffled() if name == "collate" else LOADERS[name](), 4, cosine)
        assert worst(net, own) <= 1e-12
        found = (runs[i] if members > 1 else runs).history["loss"]
        assert found[1:] == pytest.approx(history, rel=1e-12)


def test_a_loader_is_read_once_in_every_epoch() -> None:
    data = Augmented()
    train(network(), DataLoader(data, batch_size=8), epochs=5)
    assert data.fetched == 5 * 20
    train([network(), network(1)], data, epochs=5, batch_size=8)
    assert data.fetched == 10 * 20


def test_batch_sizes_of_a_loader_matter() -> None:
    nets = [network(), network()]
    for net, size in zip(nets, (8, 20)):
        train(net, DataLoader(TensorDataset(*rows()), batch_size=size))
    assert worst(*nets) > 1e-3


def test_workers_give_their_batches() -> None:
    net, own = network(), network()
    train(net, shuffled(num_workers=2, persistent_workers=True), epochs=3)
    plain_loop(own, shuffled(num_workers=2, persistent_workers=True), 3)
    assert worst(net, own) <= 1e-12


def test_the_first_loss_is_that_of_the_first_batch_and_there_is_no_accuracy() -> None:
    (x, _), net = rows(), pl.models.relu(2, (6,), 3, seed=0).double()
    y = torch.arange(20) % 3
    first = float(nn.functional.cross_entropy(net(x[:8]), y[:8]).detach())
    t = train(net, DataLoader(TensorDataset(x, y), batch_size=8), loss="cross_entropy")
    assert t.history["loss"][0] == pytest.approx(first, rel=1e-12)
    assert t.history.keys() == {"loss"} and len(t.history["loss"]) == 5
    assert t.config["evaluate"] == "running" and t.config["batch_size"] == 8


def test_full_evaluation_is_one_more_pass_after_each_epoch() -> None:
    (x, _), y = rows(), torch.arange(20) % 3
    nets = [pl.models.relu(2, (6,), 3, seed=0).double() for _ in range(2)]
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    kept = (Keep(evaluate="full"), None)
    histories = [train(net, loader, loss="cross_entropy", keep=k).history for net, k in zip(nets, kept)]
    assert worst(*nets) == 0
    out = nets[0](x)
    assert histories[0]["loss"][-1] == pytest.approx(float(nn.functional.cross_entropy(out, y).detach()), rel=1e-12)
    assert histories[0]["accuracy"][-1] == pytest.approx(float((out.argmax(1) == y).double().mean()))
    assert len(histories[0]["accuracy"]) == 5
    data = Augmented()
    train(network(), DataLoader(data, batch_size=8), epochs=2, keep=Keep(evaluate="full"))
    assert data.fetched == 5 * 20  # before the first epoch too


# --- Datasets --------------------------------------------------------------------------------------------------


def test_rows_of_a_dataset_are_fetched_anew_for_every_epoch() -> None:
    data = Augmented()
    source = DatasetBatches(data, 8, DataReader(network(), "mse", torch.device("cpu")))
    assert source.steps == 3 and not source.fixed
    found = [source.data.x.clone()]
    for _ in range(3):
        batches = list(source.batches([torch.Generator()]))
        assert sorted(i for _, index in batches for i in index[0].tolist()) == list(range(20))
        found.append(source.data.x.clone())
    assert data.fetched == 60 and torch.equal(found[0], found[1])  # networks are tried on the rows of the first epoch
    assert len({float(x.sum()) for x in found}) == 3
    assert all(float((x - data.x).abs().max()) < 1 for x in found)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("size", [8, None])
def test_a_dataset_without_randomness_is_trained_on_as_its_rows(members: int, size: int | None) -> None:
    x, y = rows()
    datasets = [(x, y), Augmented(noise=0.0), TensorDataset(x, y), Subset(TensorDataset(x, y), range(20))]
    found = []
    for data in datasets:
        nets = [network(seed) for seed in range(members)]
        runs = train(nets, data, batch_size=size, execution=Execution(compile=members > 1))
        found.append((nets, [t.history for t in runs]))
    for nets, histories in found[1:]:
        assert histories == found[0][1]
        assert all(worst(a, b) == 0 for a, b in zip(nets, found[0][0]))


def test_tensors_of_a_dataset_are_not_fetched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("fetched"))
    x, y = rows()
    part = Subset(TensorDataset(x, y), [3, 1, 2])
    t, own = train(network(), part), train(network(), (x[[3, 1, 2]], y[[3, 1, 2]]))
    assert t.history == own.history


def test_weights_and_a_teacher_go_with_a_dataset() -> None:
    (x, y), weights = rows(), torch.linspace(0, 1, 20)
    nets = [network(), network(), network()]
    triples = (Items(*zip(x, y, weights)), TensorDataset(x, y, weights), (x, y, weights))
    for net, given in zip(nets, triples):
        train(net, given, batch_size=8, teacher=network(9))
    assert worst(*nets[:2]) == 0 and worst(*nets[1:]) == 0
    train(other := network(), (x, y), batch_size=8, teacher=network(9))
    assert worst(other, nets[0]) > 1e-6


def test_a_teacher_is_asked_about_the_rows_of_each_epoch() -> None:
    net, own, teacher = network(), network(), network(9)
    train(net, Augmented(generator=torch.Generator().manual_seed(1)), epochs=3, batch_size=None, teacher=teacher)
    data = Augmented(generator=torch.Generator().manual_seed(1))
    loader = ([(x, teacher(x).detach())] for x in (torch.stack([data[i][0] for i in range(20)]) for _ in range(3)))
    optimiser = torch.optim.Adam(own.parameters(), lr=1e-2)
    for ((x, y),) in loader:
        optimiser.zero_grad()
        (own(x) - y).square().mean().backward()
        optimiser.step()
    assert worst(net, own) <= 1e-12


def test_images_of_a_loader_are_augmented_for_each_member() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, 6, 6, generator=g, dtype=torch.float64), torch.arange(12) % 3

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()

    options = {"loss": "cross_entropy", "augment": "crop_flip", "keep": Keep(evaluate="running")}
    together, apart, whole = [make(0), make(1)], [make(0), make(1)], make(0)
    train(together, DataLoader(TensorDataset(x, y), batch_size=12), **options)
    for seed, net in enumerate(apart):
        train(net, DataLoader(TensorDataset(x, y), batch_size=12), seed=seed, **options)
    train(whole, (x, y), batch_size=None, **options)
    assert all(worst(a, b) <= 1e-12 for a, b in zip(together, apart)) and worst(together[0], whole) <= 1e-12


# --- streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 3])
def test_an_epoch_of_a_stream_is_one_pass_over_it(members: int) -> None:
    for data, size in ((Stream(), {"batch_size": 8}), (DataLoader(Stream(), batch_size=8), {})):
        nets, own = [network(seed) for seed in range(members)], network(members - 1)
        train(nets, data, **size)
        plain_loop(own, DataLoader(TensorDataset(*rows()), batch_size=8), 4)
        assert worst(nets[-1], own) <= 1e-12


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize("sampler", [None, Unsized()])
def test_epochs_of_unknown_length_have_one_learning_rate(sampler: Unsized | None) -> None:
    data = Stream() if sampler is None else TensorDataset(*rows())
    rates: list[float] = []
    train(network(), DataLoader(data, batch_size=8, sampler=sampler), scheduler=lambda p: rates.append(p) or 1.0)
    assert rates == [0.0] * 3 + [0.25] * 3 + [0.5] * 3 + [0.75] * 3


# --- checkpoints -----------------------------------------------------------------------------------------------

RESUMED = {
    "generator": (shuffled, {}),
    "torch's generator": (lambda: DataLoader(Augmented(), batch_size=8, shuffle=True), {}),
    "of a sampler": (LOADERS["sampler"], {}),
    "of the dataset": (lambda: DataLoader(Augmented(generator=torch.Generator().manual_seed(2)), batch_size=8), {}),
    "full evaluation": (shuffled, {"keep": Keep(evaluate="full")}),
    "workers": (lambda: DataLoader(Augmented(), batch_size=8, num_workers=1, generator=torch.Generator()), {}),
    "a Dataset": (Augmented, {"batch_size": 8}),
    "a part of a Dataset": (
        lambda: Subset(Augmented(generator=torch.Generator().manual_seed(2)), range(11)),
        {"batch_size": 8},
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_has_the_batches_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    make, options = RESUMED[name]
    torch.manual_seed(4)
    whole, through = network(), train(net := network(), make(), epochs=5, **options)
    whole.load_state_dict(net.state_dict())
    torch.manual_seed(4)
    train(network(), make(), epochs=2, checkpoints=tmp_path, **options)
    torch.manual_seed(99)
    resumed = train(net := network(), make(), epochs=5, checkpoints=tmp_path, **options)
    assert resumed.history == through.history and worst(net, whole) == 0


def test_a_checkpoint_belongs_to_one_loader(tmp_path: Path) -> None:
    x, y = rows()
    train(network(), DataLoader(TensorDataset(x, y), batch_size=8), checkpoints=tmp_path)
    for other in (DataLoader(TensorDataset(x, y), batch_size=9), DataLoader(TensorDataset(x, y + 1), batch_size=8)):
        with pytest.raises(CheckpointError):
            train(network(), other, checkpoints=tmp_path)


# --- what is refused -------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.left = iter(Stream())

    def __iter__(self) -> Iterator[Any]:
        return self.left


class Growing(Augmented):
    def __len__(self) -> int:
        return 10 if self.fetched < 10 else 11


X, Y = rows(6)
GAP = torch.cat([X[:5], torch.full((1, 2), torch.nan)])
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "batch size": (
        DataLoader(TensorDataset(X, Y), batch_size=4),
        {"batch_size": 32},
        OptionError,
        r"batch_size=32 was given with a DataLoader, .* \(batch_size=4\)",
    ),
    "no batch size": (DataLoader(TensorDataset(X, Y)), {"batch_size": None}, OptionError, "batch_size=None was given"),
    "whole stream": (Stream(), {"batch_size": None}, OptionError, "IterableDataset gives them one by one"),
    "dict": (
        DataLoader(Items({"x": X[0], "y": Y[0]})),
        {},
        ShapeError,
        r"expected \(input, target\), batch 0 of the DataLoader is a dict with 'x', 'y'.*collate_fn",
    ),
    "dict of a dataset": (Items({"x": X[0]}), {}, ShapeError, "item 0 of the Items is a dict with 'x'"),
    "three": (DataLoader(TensorDataset(X, Y, Y)), {}, ShapeError, "batch 0 of the DataLoader is 3 items"),
    "three of a dataset": (TensorDataset(X, Y, Y), {}, ShapeError, r"weights have shape \(6, 1\), expected \(6,\)"),
    "four of a dataset": (TensorDataset(X, Y, Y, Y), {}, ShapeError, "item of the TensorDataset is 4 items"),
    "some weights": (Items((X[0], Y[0], 1.0), (X[1], Y[1])), {}, ShapeError, "item 0 of the Items is 3 items"),
    "inputs alone": (DataLoader(Items(*X)), {}, ShapeError, "is Tensor"),
    "empty": (DataLoader(Items()), {}, EmptyDataError, "the DataLoader gave no batches"),
    "too few": (DataLoader(TensorDataset(X, Y), batch_size=9, drop_last=True), {}, EmptyDataError, "drop_last"),
    "empty dataset": (Items(), {}, EmptyDataError, "the Items has no items"),
    "empty stream": (Stream(0), {}, EmptyDataError, "the Stream gave no batches"),
    "read once": (Once(), {}, EmptyDataError, "must start over in each call of __iter__"),
    "ragged": (
        DataLoader(Items((X[0], Y[0]), (X[0, :1], Y[0])), batch_size=2),
        {},
        ShapeError,
        "rows of batch 0 of the DataLoader have different shapes",
    ),
    "ragged in a worker": (
        DataLoader(Items((X[0], Y[0]), (X[0, :1], Y[0])), batch_size=2, num_workers=1),
        {},
        ShapeError,
        "^train: rows of batch 0 of the DataLoader have .* shapes: [^\n]*collate_fn",
    ),
    "another shape": (
        DataLoader(Items((X, Y), (X[:, :1], Y)), batch_size=None),
        {},
        ShapeError,
        r"does not accept inputs of shape \(6, 1\).*This is batch 1 of the DataLoader",
    ),
    "NaN": (DataLoader(TensorDataset(GAP, Y), batch_size=4), {}, NotFiniteError, "batch 1 of the DataLoader"),
    "label": (
        DataLoader(TensorDataset(X, torch.tensor([0] * 5 + [1])), batch_size=2),
        {"loss": "cross_entropy"},
        LabelError,
        r"0 to 1, the network has 1 outputs.*This is batch 2 of",
    ),
    "another length": (Growing(), {}, ShapeError, r"Growing gave rows of shape \(11, 2\), and \(10, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_on_is_refused(name: str) -> None:
    data, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        train(network(), data, **options)


def test_a_table_of_gates_needs_the_numbers_of_rows() -> None:
    net = pl.models.frg(2, (6,), examples=6).double()
    with pytest.raises(OptionError, match="a table of gates"):
        train(net, DataLoader(TensorDataset(X, Y)))
    data = Augmented(6, noise=0.0)
    other = copy.deepcopy(net)
    train(net, data, batch_size=4)
    train(other, rows(6), batch_size=4)
    assert worst(net, other) == 0


def test_a_batch_of_one_row_cannot_be_normalised() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    with pytest.raises(OptionError, match=r"the DataLoader gave one\. Give it drop_last=True"):
        train(net, DataLoader(TensorDataset(X, Y), batch_size=5))


def test_networks_that_change_their_input_leave_the_batches() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x *= 0.5
            return super().forward(x)

    items = [(x.clone(), y) for x, y in zip(*(t.split(6) for t in rows()))]
    net = Scaled(network())
    own = Scaled(network())
    kept = [x.clone() for x, _ in items]
    train(net, DataLoader(items, batch_size=None), keep=Keep(evaluate="full"))
    assert all(torch.equal(x, k) for (x, _), k in zip(items, kept))
    optimiser = torch.optim.Adam(own.parameters(), lr=1e-2)
    for _ in range(4):
        for x, y in items:
            optimiser.zero_grad()
            (own(x.clone()) - y).square().mean().backward()
            optimiser.step()
    assert worst(net, own) <= 1e-12
