"""Sources of the batches of an epoch: rows in memory, a Dataset, a DataLoader or a sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pathlens.data.inputs import as_numbers, pair_of
from pathlens.errors import EmptyDataError, OptionError, PathlensError, ShapeError
from pathlens.training.fingerprints import digest
from pathlens.training.inputs import Data, DataReader

# messages of torch for rows of different shapes, in this process and in a worker
_DIFFERENT_SHAPES = ("each tensor to be equal size", "resize storage that is not resizable")


class _Default(int):
    """A number that the caller did not give."""


DEFAULT_BATCH_SIZE = _Default(32)


class RowBatches:
    """Batches of rows in memory: every member reads all rows in each epoch, in its own order.

    Attributes
    ----------
    data : Data
        The rows on which networks are checked and evaluated.
    batch : int
        Rows of a batch; the last batch of an epoch may have fewer.
    batch_size : int or None
        The option of `train`, or of the DataLoader.
    steps : int or None
        Batches of an epoch; None if their number is not known before its end.
    fixed : bool
        Whether every epoch has the same rows.
    complete : bool
        Whether `data` holds all rows of an epoch.
    """

    fixed = complete = True
    steps: int | None
    _generators: Sequence[torch.Generator] | None = None  # of random data; None if reading it draws no random numbers
    _fresh = True  # whether the data of the first epoch, which was read early, is still to be used

    def __init__(self, data: Data, batch_size: int | None) -> None:
        n = len(data.x)
        self.data, self.batch_size, self.batch = data, batch_size, min(batch_size or n, n)
        self.steps = math.ceil(n / self.batch)

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        """For each step of one epoch some rows, and the indices of those that each member reads, (k, B).

        `shuffles` holds the generator of each of the k members.
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
        """A text that identifies the data in a checkpoint."""
        return self.data.fingerprint()

    def explain_single_row(self) -> str:
        """Why there is a batch of one row, and how to avoid it."""
        return (
            f"{len(self.data.x)} rows in batches of {self.batch} leave one over. Choose another batch_size, or leave "
            "out a row."
        )

    def state(self) -> dict[str, Tensor]:
        """The random state that decides the rows of the next epochs, for a checkpoint."""
        if self._generators is None:
            return {}
        states = {f"rows/{i}": g.get_state() for i, g in enumerate(self._generators)}
        return {"rows/torch": torch.get_rng_state()} | states

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that a checkpoint holds."""
        self._fresh = False
        if self._generators is not None:
            torch.set_rng_state(tensors["rows/torch"])
            for i, g in enumerate(self._generators):
                g.set_state(tensors[f"rows/{i}"])


class SamplerBatches(RowBatches):
    """A fresh batch for each member in every step, from the member's own generator; an epoch is one step."""

    fixed = False

    def __init__(self, sampler: Any, batch_size: int | None, reader: DataReader, seed: int) -> None:
        drawn = sampler.sample(batch_size or 1000, torch.Generator().manual_seed(seed))
        super().__init__(reader.read(drawn), batch_size or 1000)
        self.sampler = sampler

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        drawn = [self.sampler.sample(self.batch, g) for g in shuffles]
        x = torch.cat([d[0] for d in drawn]).to(self.data.x)
        y = torch.cat([d[1] for d in drawn]).to(self.data.y).view(len(x), *self.data.y.shape[1:])
        yield Data(x, y), torch.arange(len(x), device=x.device).view(len(drawn), self.batch)


class DatasetBatches(RowBatches):
    """Rows of a Dataset, all read again in every epoch, so that random augmentation is drawn again.

    The rows of an epoch are in memory together and shared by all members. `data` holds those of the first epoch at
    first.
    """

    fixed = False

    def __init__(self, dataset: Dataset[Any], batch_size: int | None, reader: DataReader) -> None:
        self._dataset, self._reader = dataset, reader
        self._generators = _generators(dataset)
        super().__init__(reader.read(_items(dataset)), batch_size)

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        if not self._fresh:
            new = self._reader.read(_items(self._dataset))
            for own, fetched in ((self.data.x, new.x), (self.data.y, new.y), (self.data.weights, new.weights)):
                if own is None or fetched is None:
                    continue
                if own.shape != fetched.shape:
                    raise ShapeError(
                        f"train: the {type(self._dataset).__name__} gave rows of shape {tuple(fetched.shape)}, and "
                        f"{tuple(own.shape)} in the first epoch. Every epoch must have as many rows of one shape; give "
                        "a DataLoader where they differ."
                    )
                own.copy_(fetched)  # in place: a CUDA graph reads these tensors
        self._fresh = False
        yield from super().batches(shuffles)

    def fingerprint(self) -> str:
        return _dataset_digest(self._dataset, self.data)


class LoaderBatches(RowBatches):
    """The batches of a DataLoader, made anew in every epoch and shared by all members.

    The first batch is read at once, to check networks on it, and is used in the first epoch: nothing is read twice.
    """

    fixed = complete = False

    def __init__(self, loader: DataLoader[Any], kind: str, reader: DataReader) -> None:
        if getattr(reader.net, "needs_rows", False):
            raise OptionError(
                f"train: a table of gates knows examples by their numbers, and the batches of a {kind} do not have "
                "them. Give the rows as (X, y) or a Dataset."
            )
        self.loader, self._kind, self._reader = loader, kind, reader
        samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        self._generators = _generators(loader, *samplers, loader.dataset)
        rest = self._read()
        first = next(rest)
        super().__init__(Data(first.x.clone(), first.y.clone()), None)
        self.batch_size = loader.batch_size
        self._first_pass: Iterator[Data] = chain([self.data], rest)
        self.steps = _length(loader)

    def _read(self) -> Iterator[Data]:
        """One pass over the loader; its batches checked and on the training device."""
        number = -1
        try:
            for number, item in enumerate(self.loader):
                where = f"batch {number} of the {self._kind}"
                pair = pair_of(item, where, "train")
                try:
                    found = self._reader.pair(*pair)
                except PathlensError as error:
                    raise type(error)(f"{error} This is {where}.") from error
                yield Data(*found)
        except RuntimeError as error:
            if not any(reason in str(error) for reason in _DIFFERENT_SHAPES):
                raise
            reason = str(error).strip().splitlines()[-1]  # the traceback of a worker comes before it
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
        batches = self._first_pass if self._fresh else self._read()
        self._first_pass, self._fresh = iter(()), False
        yield from batches

    def batches(self, shuffles: Sequence[torch.Generator]) -> Iterator[tuple[Data, Tensor]]:
        for data in self.evaluated():
            yield data, torch.arange(len(data.x), device=data.x.device).expand(len(shuffles), -1)

    def fingerprint(self) -> str:
        return _dataset_digest(self.loader.dataset, self.data)

    def explain_single_row(self) -> str:
        return f"the {self._kind} gave one. Give it drop_last=True, or another batch_size."


def make_source(data: Any, batch_size: int | None, reader: DataReader, seed: int) -> RowBatches:
    """The source of batches for the data of `train`; the seed is that of the evaluation rows of a sampler."""
    kind = type(data).__name__
    if hasattr(data, "sample"):
        return SamplerBatches(data, batch_size, reader, seed)
    if isinstance(data, DataLoader):
        if batch_size is not DEFAULT_BATCH_SIZE:
            raise OptionError(
                f"train: batch_size={batch_size} was given with a DataLoader, which makes its own batches "
                f"(batch_size={data.batch_size}). Leave it out, or give the data alone: "
                f"train(net, loader.dataset, batch_size={batch_size})."
            )
        return LoaderBatches(data, kind, reader)
    if isinstance(data, IterableDataset):
        if batch_size is None:
            raise OptionError(
                "train: batch_size=None takes all rows at once, and an IterableDataset gives them one by one. Give a "
                "number, or its rows as (X, y)."
            )
        return LoaderBatches(DataLoader(data, batch_size=batch_size), kind, reader)
    if isinstance(data, Dataset):
        tensors = _tensors(data)
        if tensors is None:
            return DatasetBatches(data, batch_size, reader)
        data = tensors if len(tensors) == 3 else pair_of(tensors, f"an item of the {kind}", "train")
    return RowBatches(reader.read(data), batch_size)


def _length(loader: DataLoader[Any]) -> int | None:
    """Batches of one pass; None of a stream, whose length is a guess, and of a sampler that has none."""
    try:
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    except TypeError:
        return None


def _items(dataset: Any) -> list[Tensor]:
    """All rows of a Dataset of (input, target) or (input, target, weight), stacked."""
    kind = type(dataset).__name__
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        raise EmptyDataError(f"train: the {kind} has no items.")
    if not all(isinstance(item, (tuple, list)) and len(item) == 3 for item in items):
        items = [pair_of(item, f"item {i} of the {kind}", "train") for i, item in enumerate(items)]
    try:
        return [torch.stack([as_numbers(entry) for entry in column]) for column in zip(*items)]
    except RuntimeError as error:
        raise ShapeError(f"train: items of the data have different shapes: {error}. Make them equal.") from error


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The rows of a Dataset that has them as tensors and returns them as they are; None of others."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
        return tuple(t[chosen.to(t.device)] for t in whole)
    return None


def _dataset_digest(dataset: Any, data: Data) -> str:
    """Changes with the rows of a Dataset if they are tensors, else with its class, size and shapes."""
    size = len(dataset) if hasattr(dataset, "__len__") else None
    shapes = [(t.shape[1:], t.dtype) for t in (data.x, data.y)]
    return digest([f"{type(dataset).__name__} {size} {shapes}", *(_tensors(dataset) or ())])


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators that these objects hold, and the Datasets that they are made of, each once."""
    found: dict[int, torch.Generator] = {}
    for owner in owners:
        while owner is not None:
            values = vars(owner).values() if hasattr(owner, "__dict__") else ()
            found |= {id(v): v for v in values if isinstance(v, torch.Generator)}
            owner = getattr(owner, "dataset", None) if isinstance(owner, Dataset) else None
    return list(found.values())
