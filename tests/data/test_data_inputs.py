"""`as_inputs` and `as_pair`: every accepted form of data gives the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from pathlens.data import DataSet, as_inputs, as_pair
from pathlens.errors import EmptyDataError, PathlensError, ShapeError

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 2

FORMS: dict[str, Any] = {
    "DataSet": DataSet(X, Y, task="classification", classes=2),
    "tuple": (X, Y),
    "tuple of arrays": (X.numpy(), Y.numpy()),
    "Dataset": TensorDataset(X, Y),
    "Subset": Subset(TensorDataset(X, Y), range(7)),
    "DataLoader": DataLoader(TensorDataset(X, Y), batch_size=3),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(form: str) -> None:
    before = torch.get_rng_state()
    x, y = as_pair(FORMS[form])
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(as_inputs(FORMS[form]), X)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_list_is_a_pair_only_where_targets_are_needed() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    assert as_inputs(rows) is rows
    assert as_pair(rows) == ([1.0, 2.0], [3.0, 4.0])


def test_weights_come_third() -> None:
    weighted = (X, Y, torch.ones(7))
    assert as_inputs(weighted) is X
    with pytest.raises(ShapeError, match=r"harden: data must be a DataSet.*got 3 items"):
        as_pair(weighted, where="harden")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (X, ShapeError, "data must be a DataSet.*got Tensor"),
        (TensorDataset(X), ShapeError, "item 0 of the TensorDataset is 1 items"),
        (DataLoader(TensorDataset(X, Y, Y)), ShapeError, "batch 0 of the DataLoader is 3 items"),
        (TensorDataset(X[:0], Y[:0]), EmptyDataError, "the TensorDataset has no items"),
    ],
)
def test_data_without_targets_is_refused(value: Any, error: type[PathlensError], message: str) -> None:
    with pytest.raises(error, match=message):
        as_pair(value)
