"""The forms in which data is accepted everywhere: `as_inputs` and `as_pair` read any of them.

Conversion to a network's dtype and device is `pathlens.recording.as_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pathlens.data.dataset import DataSet
from pathlens.errors import DTypeError, EmptyDataError, ShapeError


def as_inputs(data: Any) -> Any:
    """The inputs X of data in any accepted form; targets are ignored.

    Parameters
    ----------
    data : DataSet, tuple (X, y) or (X, y, weights), Dataset, DataLoader, tensor, array or nested list
        A Dataset or DataLoader is read once to its end; the random state of torch is left as it was. A list is an
        array of rows, not a pair.

    Returns
    -------
    Tensor or what was given
        Arrays are not converted: `pathlens.recording.as_rows` does.

    Examples
    --------
    >>> from pathlens import data
    >>> tuple(as_inputs(data.circle(8)).shape)
    (8, 2)
    >>> as_inputs(([[1.0, 2.0]], [0.0]))
    [[1.0, 2.0]]
    """
    if isinstance(data, DataSet):
        return data.x
    if isinstance(data, (DataLoader, Dataset)):
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed for its workers
            return read_columns(data, 1)[0]
    return data[0] if isinstance(data, tuple) and len(data) in (2, 3) else data


def as_pair(data: Any, *, where: str = "data") -> tuple[Any, Any]:
    """Inputs X and targets y of data in any accepted form that has targets.

    Parameters
    ----------
    data : DataSet, pair (X, y), Dataset or DataLoader
        A Dataset or DataLoader of pairs is read once to its end; the random state of torch is left as it was.
    where : str
        The name of the calling function, for messages.

    Returns
    -------
    tuple (X, y)
        As they were given, or stacked.

    Examples
    --------
    >>> from torch.utils.data import TensorDataset
    >>> X, y = as_pair(TensorDataset(torch.zeros(5, 3), torch.arange(5)))
    >>> tuple(X.shape), y
    ((5, 3), tensor([0, 1, 2, 3, 4]))
    """
    if isinstance(data, DataSet):
        return data.x, data.y
    if isinstance(data, (DataLoader, Dataset)):
        with torch.random.fork_rng(devices=[]):
            X, y = read_columns(data, 2, where)
        return X, y
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return data[0], data[1]
    raise ShapeError(f"{where}: data must be a DataSet, an (X, y) pair, a Dataset or a DataLoader, got {_kind(data)}.")


def as_numbers(value: Any) -> Tensor:
    """Targets, weights, labels or a matrix as a detached tensor, in the precision and order they were given in.

    torch alone would round the numbers of a list to float32, look up a pandas column by its labels, and refuse an array
    with negative strides. Tensors and arrays are not copied unless that is necessary.

    Examples
    --------
    >>> as_numbers([0.1, 0.2])
    tensor([0.1000, 0.2000], dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value, order="C")
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def read_columns(source: Any, count: int, where: str = "Inputs") -> list[Tensor]:
    """The first `count` entries of all items of a Dataset, or of all batches of a DataLoader, one tensor for each."""
    loader = isinstance(source, DataLoader)
    kind = type(source).__name__
    items = source if loader or isinstance(source, IterableDataset) else (source[i] for i in range(len(source)))
    rows = [
        _entries(item, count, f"{'batch' if loader else 'item'} {i} of the {kind}", where)
        for i, item in enumerate(items)
    ]
    if not rows:
        raise EmptyDataError(f"{where}: the {kind} has no items.")
    columns = []
    for entries in zip(*rows):
        try:
            tensors = [as_numbers(entry) for entry in entries]
        except (TypeError, ValueError, RuntimeError) as error:
            raise DTypeError(
                f"{where}: an item of the {kind} is a {type(entries[0]).__name__}, expected a tensor or a tuple that "
                "starts with one."
            ) from error
        shapes = {tuple(t.shape[1:] if loader else t.shape) for t in tensors}
        if len(shapes) > 1:
            raise ShapeError(
                f"{where}: rows of the {kind} have different shapes: {sorted(shapes)[:3]}. Make them equal."
            )
        columns.append(torch.cat(tensors) if loader else torch.stack(tensors))
    return columns


def pair_of(item: Any, name: str, where: str) -> tuple[Any, Any]:
    """An item of a Dataset, or a batch of a DataLoader, as (input, target)."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    got = f"a dict with {', '.join(map(repr, item))}" if isinstance(item, dict) else _kind(item)
    raise ShapeError(
        f"{where}: expected (input, target), {name} is {got}. Return pairs from the Dataset, or from the collate_fn of "
        "a DataLoader."
    )


def _kind(item: Any) -> str:
    return f"{len(item)} items" if isinstance(item, (tuple, list)) else type(item).__name__


def _entries(item: Any, count: int, name: str, where: str) -> tuple[Any, ...]:
    if count == 2:
        return pair_of(item, name, where)
    return (item[0] if isinstance(item, (tuple, list)) and len(item) else item,)
