"""Row and column selections, ``K[rows, cols]``, as ranges where possible (they cost nothing), else as int64 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pathlens.errors import RowIndexError

Index: TypeAlias = range | Tensor


def as_index(key: Any, n: int, axis: str) -> Index:
    """Turn a slice, an integer, or an integer or boolean array into an index into ``n`` rows.

    Examples
    --------
    >>> as_index(slice(None, None, 2), 5, "rows")
    range(0, 5, 2)
    >>> as_index([True, False, True], 3, "rows")
    tensor([0, 2])
    >>> as_index(-1, 5, "rows")
    range(4, 5)
    """
    if isinstance(key, slice):
        chosen = range(n)[key]
        if len(chosen) == 0:
            raise RowIndexError(f"{axis} {key} select nothing out of {n}. Select at least one.")
        return chosen
    if isinstance(key, range):
        key = list(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
        at = as_number(key, n, axis)
        return range(at, at + 1)
    if not isinstance(key, (Tensor, np.ndarray, Sequence)) or isinstance(key, (str, bytes)):
        raise RowIndexError(
            f"{axis} cannot be indexed by {type(key).__name__} {key!r}. "
            f"Use a slice, an integer, or an integer or boolean array."
        )
    array = key.detach().cpu() if isinstance(key, Tensor) else torch.as_tensor(np.asarray(key))
    if array.dtype == torch.bool:
        if array.shape != (n,):
            raise RowIndexError(f"a boolean index over {n} {axis} must have shape ({n},), got {tuple(array.shape)}.")
        array = array.nonzero()[:, 0]
    elif array.is_floating_point() or array.is_complex() or array.ndim != 1:
        raise RowIndexError(
            f"{axis} must be indexed by a one-dimensional integer or boolean array, got {array.dtype} "
            f"of shape {tuple(array.shape)}."
        )
    array = array.long()
    if array.numel() == 0:
        raise RowIndexError(f"the index selects no {axis} out of {n}. Select at least one.")
    low, high = int(array.min()), int(array.max())
    if low < -n or high >= n:
        raise _outside(low if low < -n else high, n, axis)
    return torch.where(array < 0, array + n, array)


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 1.

    >>> is_count(3), is_count(0), is_count(True), is_count(2.0)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def as_number(key: Any, n: int, axis: str) -> int:
    """One of ``n`` rows as its number from 0; negative ones count from the end.

    >>> as_number(-1, 5, "rows")
    4
    """
    if not isinstance(key, (int, np.integer)) or isinstance(key, (bool, np.bool_)):
        raise RowIndexError(f"one of {n} {axis} is chosen by an integer, got {type(key).__name__} {key!r}.")
    if not -n <= key < n:
        raise _outside(int(key), n, axis)
    return int(key) % n


def _outside(at: int, n: int, axis: str) -> RowIndexError:
    return RowIndexError(f"{axis} index {at} is out of range for {n} {axis}. Use 0 to {n - 1}, or -1 for the last.")


def as_tensor(index: Index, device: torch.device) -> Tensor:
    """The index as an int64 tensor.

    >>> as_tensor(range(1, 4), torch.device("cpu"))
    tensor([1, 2, 3])
    """
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step, device=device)
    return index.to(device)


def compose(outer: Index, inner: Index) -> Index:
    """The index that first selects by ``outer`` and then, among those, by ``inner``.

    >>> compose(range(10, 20, 2), range(1, 3))
    range(12, 15, 2)
    """
    if isinstance(outer, range) and isinstance(inner, range):
        first, last = outer[inner[0]], outer[inner[-1]]
        step = outer.step * inner.step
        return range(first, last + (1 if step > 0 else -1), step) if len(inner) > 1 else range(first, first + 1)
    if isinstance(outer, range):
        assert isinstance(inner, Tensor)
        return inner * outer.step + outer.start
    if isinstance(inner, range) and inner.step == 1:
        return outer[inner.start : inner.stop]
    return outer[as_tensor(inner, outer.device)]


def same_index(a: Index, b: Index) -> bool:
    """Whether two indices select the same rows in the same order.

    >>> same_index(range(3), torch.tensor([0, 1, 2]))
    True
    """
    if isinstance(a, range) and isinstance(b, range):
        return a == b
    cpu = torch.device("cpu")
    return torch.equal(as_tensor(a, cpu), as_tensor(b, cpu))


def take_rows(matrix: Tensor, index: Index) -> Tensor:
    """Rows of a matrix: a view for a range of step 1, else a copy.

    >>> take_rows(torch.eye(3), range(1, 2))
    tensor([[0., 1., 0.]])
    """
    if isinstance(index, range) and index.step == 1:
        return matrix[index.start : index.stop]
    return matrix.index_select(0, as_tensor(index, matrix.device))


def as_numpy(index: Index) -> slice | np.ndarray:
    """The index for NumPy arrays: a slice for a range of step 1, else an int64 array.

    >>> as_numpy(range(1, 4))
    slice(1, 4, None)
    """
    if isinstance(index, range) and index.step == 1:
        return slice(index.start, index.stop)
    values: np.ndarray = as_tensor(index, torch.device("cpu")).numpy()
    return values


def runs(index: Tensor) -> list[tuple[int, int]]:
    """An index as half-open ranges of consecutive rows, in the order of the index.

    >>> runs(torch.tensor([3, 4, 5, 1, 1, 2]))
    [(3, 6), (1, 2), (1, 3)]
    """
    values = index.cpu()
    cuts = ((values.diff() != 1).nonzero()[:, 0] + 1).tolist()
    return [(int(part[0]), int(part[-1]) + 1) for part in torch.tensor_split(values, cuts)]
