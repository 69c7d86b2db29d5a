"""Where the batches of an epoch come from: rows in memory, a Dataset, a DataLoader or a sampler.

A source gives, for each step, some rows and which of them each member takes. Steps themselves live in `run`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pathlens.data.inputs import as_numbers
from pathlens.errors import EmptyDataError, OptionError, PathlensError, ShapeError
from pathlens.training.inputs import Data, checked, prepare
from pathlens.training.stack import Loss

_CANNOT_STACK = (
    "each tensor to be equal size",
    "resize storage that is not resizable",
)  # torch's, here and in a worker


class Rows:
    """Rows in memory: every member takes all of them in each epoch, in an order of its own.

    Attributes
    ----------
    data : Data
        What networks are tried on before training, and evaluated on.
    batch : int
        Rows of a batch; the last of an epoch may have fewer.
    steps : int or None
        Batches of an epoch; None where the number is not known before its end.
    fixed : bool
        Whether every epoch has the same rows.
    at_hand : bool
        Whether `data` holds all rows of an epoch, so that evaluating them reads nothing more.
    """

    fixed = at_hand = True
    steps: int | None

    def __init__(self, data: Data, batch_size: int | None) -> None:
        n = len(data.x)
        self.data, self.batch = data, min(batch_size or n, n)
        self.steps = math.ceil(n / self.batch)

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        """For each step of one epoch some rows, and which of them each member takes: integers of shape (k, B).

        `shuffles` has the generator of each of the k members.
        """
        n = len(self.data.x)
        if self.batch == n:
            order = torch.arange(n).repeat(len(shuffles), 1)
        else:
            order = torch.stack([torch.randperm(n, generator=g) for g in shuffles])
        for index in order.to(self.data.x.device).split(self.batch, dim=-1):
            yield self.data, index

    def evaluated(self) -> Iterator[Data]:
        """All rows of one epoch, in one or more parts."""
        yield self.data

    def fingerprint(self) -> str:
        """What a checkpoint knows the data by."""
        return self.data.fingerprint()

    def one_row_left(self) -> str:
        """How a batch of one row comes about, and how to avoid it."""
        return (
            f"{len(self.data.x)} rows in batches of {self.batch} leave one over. Choose another batch_size, or leave "
            "out a row."
        )

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold, so that the epochs to come have the same rows."""
        return {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that a checkpoint holds."""


class Sampled(Rows):
    """A fresh batch for each member in every step, from the member's own generator; an epoch is one step."""

    fixed = False

    def __init__(self, data: Data, sampler: Any) -> None:
        super().__init__(data, None)
        self.sampler = sampler

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        drawn = [self.sampler.sample(self.batch, g) for g in shuffles]
        x = torch.cat([d[0] for d in drawn]).to(self.data.x)
        y = torch.cat([d[1] for d in drawn]).to(self.data.y).view(len(x), *self.data.y.shape[1:])
        yield Data(x, y), torch.arange(len(x), device=x.device).view(len(drawn), self.batch)


class Fetched(Rows):
    """Rows of a Dataset, all fetched anew for every epoch, so that random augmentation is drawn anew.

    An epoch's rows are in memory together and shared by all members; the rows that networks are tried on first are
    those of the first epoch.
    """

    fixed = False

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        net: nn.Module,
        loss: str | Loss,
        device: torch.device,
        weights: Any = None,
    ) -> None:
        self._dataset, self._arguments = dataset, (net, loss, device)
        self._generators = _generators(dataset)
        super().__init__(prepare(_items(dataset), *self._arguments, weights), batch_size)
        self._unused = True

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        if not self._unused:
            new = prepare(_items(self._dataset), *self._arguments)
            for own, fetched in ((self.data.x, new.x), (self.data.y, new.y)):
                if own.shape != fetched.shape:
                    raise ShapeError(
                        f"train: the {type(self._dataset).__name__} gave rows of shape {tuple(fetched.shape)}, and "
                        f"{tuple(own.shape)} in the first epoch. Every epoch must have as many rows of one shape; give "
                        "a DataLoader where they differ."
                    )
                own.copy_(fetched)  # a CUDA graph holds on to these very tensors
        self._unused = False
        yield from super().batches(shuffles)

    def fingerprint(self) -> str:
        return _described(self._dataset, self.data)

    def state(self) -> dict[str, Tensor]:
        return _random_state(self._generators)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._unused = False
        _set_random_state(self._generators, tensors)


class Loaded(Rows):
    """The batches of a DataLoader, as it makes them, in every epoch anew; all members share them.

    The first batch is read at once, to try networks on, and is that of the first epoch: nothing is read twice.
    """

    fixed = at_hand = False

    def __init__(
        self, loader: DataLoader[Any], kind: str, net: nn.Module, loss: str | Loss, device: torch.device
    ) -> None:
        self.loader, self._kind, self._arguments = loader, kind, (net, loss, device)
        samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        self._generators = _generators(loader, *samplers, loader.dataset)
        self._outputs: dict[tuple[int, ...], int] = {}
        begun = self._read()
        first = next(begun)
        super().__init__(Data(first.x.clone(), first.y.clone()), None)
        self._begun: Iterator[Data] | None = chain([self.data], begun)
        self.steps = _length(loader)

    def _read(self) -> Iterator[Data]:
        """One pass over the loader; its batches checked and on the training device."""
        number = -1
        try:
            for number, item in enumerate(self.loader):
                where = f"batch {number} of the {self._kind}"
                x, y = _pair(item, where)
                try:
                    found = checked(x, y, *self._arguments, self._outputs)
                except PathlensError as error:
                    raise type(error)(f"{error} This is {where}.") from error
                yield Data(*found)
        except RuntimeError as error:
            if not any(reason in str(error) for reason in _CANNOT_STACK):
                raise
            reason = str(error).strip().splitlines()[-1]  # before it stands where a worker was
            raise ShapeError(
                f"train: rows of batch {number + 1} of the {self._kind} have different shapes: {reason}. Make them "
                "equal, or give the DataLoader a collate_fn."
            ) from error
        if number < 0:
            raise EmptyDataError(
                f"train: the {self._kind} gave no batches in this epoch. With drop_last=True the data must have at "
                "least batch_size rows; an IterableDataset must start over in each call of __iter__."
            )

    def evaluated(self) -> Iterator[Data]:
        begun, self._begun = self._begun, None
        yield from self._read() if begun is None else begun

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        for data in self.evaluated():
            yield data, torch.arange(len(data.x), device=data.x.device).expand(len(shuffles), -1)

    def fingerprint(self) -> str:
        return _described(self.loader.dataset, self.data)

    def one_row_left(self) -> str:
        return f"the {self._kind} gave one. Give it drop_last=True, or another batch_size."

    def state(self) -> dict[str, Tensor]:
        return _random_state(self._generators)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._begun = None
        _set_random_state(self._generators, tensors)


def source_of(
    data: Any,
    batch_size: int | None,
    chosen: bool,
    net: nn.Module,
    loss: str | Loss,
    device: torch.device,
    weights: Any,
) -> Rows:
    """Where the batches of `train` come from; `chosen` says whether the caller gave the batch size."""
    if isinstance(data, DataLoader):
        if chosen:
            raise OptionError(
                f"train: batch_size={batch_size} was given with a DataLoader, which makes batches of its own "
                f"(batch_size={data.batch_size}). Leave it out, or give the data alone: "
                f"train(net, loader.dataset, batch_size={batch_size})."
            )
        return _loaded(data, type(data).__name__, net, loss, device, weights)
    if isinstance(data, IterableDataset):
        if batch_size is None:
            raise OptionError(
                "train: batch_size=None takes all rows at once, and an IterableDataset gives them one by one. Give a "
                "number, or its rows as (X, y)."
            )
        return _loaded(DataLoader(data, batch_size=batch_size), type(data).__name__, net, loss, device, weights)
    if isinstance(data, Dataset):
        tensors = _tensors(data)
        if tensors is None:
            return Fetched(data, batch_size, net, loss, device, weights)
        data = _pair(tensors, f"an item of the {type(data).__name__}")
    return Rows(prepare(data, net, loss, device, weights), batch_size)


def _loaded(
    loader: DataLoader[Any], kind: str, net: nn.Module, loss: str | Loss, device: torch.device, weights: Any
) -> Loaded:
    if weights is not None:
        raise OptionError(
            f"train: weights belong to the rows of a data set, and a {kind} does not say which rows "
            "its batches have. Give the rows as (X, y) or a Dataset."
        )
    if getattr(net, "needs_rows", False):
        raise OptionError(
            f"train: a table of gates knows examples by their numbers, and a {kind} does not say "
            "which rows its batches have. Give the rows as (X, y) or a Dataset."
        )
    return Loaded(loader, kind, net, loss, device)


def _length(loader: DataLoader[Any]) -> int | None:
    """Batches of one pass; None of a stream, whose length is a guess, and of a sampler that has none."""
    try:
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    except TypeError:
        return None


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    got = f"{len(item)} items" if isinstance(item, (tuple, list)) else type(item).__name__
    if isinstance(item, dict):
        got = f"a dict with {', '.join(map(repr, item))}"
    raise ShapeError(
        f"train: expected (input, target), {where} is {got}. Return pairs from the Dataset, or from the collate_fn of "
        "a DataLoader."
    )


def _items(dataset: Any) -> tuple[Tensor, Tensor]:
    """All rows of a Dataset, stacked."""
    kind = type(dataset).__name__
    pairs = [_pair(dataset[i], f"item {i} of the {kind}") for i in range(len(dataset))]
    if not pairs:
        raise EmptyDataError(f"train: the {kind} has no items.")
    try:
        x, y = (torch.stack([as_numbers(p[i]) for p in pairs]) for i in (0, 1))
    except RuntimeError as error:
        raise ShapeError(f"train: items of the data have different shapes: {error}. Make them equal.") from error
    return x, y


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The rows of a Dataset that has them as tensors and returns them as they are; None of others."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
        return tuple(t[chosen.to(t.device)] for t in whole)
    return None


def _described(dataset: Any, data: Data) -> str:
    """A number that changes with the rows of a Dataset where they are known, else with its kind, size and shapes."""
    digest = hashlib.sha256()
    for t in _tensors(dataset) or ():
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    size = len(dataset) if hasattr(dataset, "__len__") else None
    shapes = [(t.shape[1:], t.dtype) for t in (data.x, data.y)]
    digest.update(f"{type(dataset).__name__} {size} {shapes}".encode())
    return digest.hexdigest()[:16]


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators that these objects hold, and the Datasets that they are made of, each once."""
    found: dict[int, torch.Generator] = {}
    for owner in owners:
        while owner is not None:
            values = vars(owner).values() if hasattr(owner, "__dict__") else ()
            found |= {id(v): v for v in values if isinstance(v, torch.Generator)}
            owner = getattr(owner, "dataset", None) if isinstance(owner, Dataset) else None
    return list(found.values())


def _random_state(generators: Sequence[torch.Generator]) -> dict[str, Tensor]:
    return {"rows/torch": torch.get_rng_state()} | {f"rows/{i}": g.get_state() for i, g in enumerate(generators)}


def _set_random_state(generators: Sequence[torch.Generator], tensors: dict[str, Tensor]) -> None:
    if "rows/torch" not in tensors:  # checkpoints of earlier versions do not have it
        return
    torch.set_rng_state(tensors["rows/torch"])
    for i, g in enumerate(generators):
        if f"rows/{i}" in tensors:
            g.set_state(tensors[f"rows/{i}"])
