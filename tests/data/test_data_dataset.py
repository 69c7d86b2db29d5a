"""The DataSet container: what it refuses, and what it keeps together."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens.data import DataSet, load, names
from pathlens.errors import (
    DTypeError,
    EmptyDataError,
    LabelError,
    NotFiniteError,
    OptionError,
    ShapeError,
    UnknownNameError,
)

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6.0)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
BAD = X.clone()
BAD[3, 1] = float("nan")
INFINITE = Y.clone()
INFINITE[0] = float("-inf")


@pytest.mark.parametrize(
    ("error", "part", "arguments"),
    [
        (ShapeError, "6 rows, y has 5", {"x": X, "y": Y[:5]}),
        (ShapeError, "expected \\(n, d\\)", {"x": Y, "y": Y}),
        (ShapeError, "\\(n,\\) or \\(n, c\\)", {"x": X, "y": Y[:, None, None]}),
        (EmptyDataError, "at least one row", {"x": X[:0], "y": Y[:0]}),
        (EmptyDataError, "at least one row", {"x": X[:, :0], "y": Y}),
        (NotFiniteError, "x of shape \\(6, 2\\) holds 1 NaN", {"x": BAD, "y": Y}),
        (NotFiniteError, "y of shape", {"x": X, "y": INFINITE}),
        (DTypeError, "floating dtype", {"x": X.long(), "y": Y}),
        (DTypeError, "task='classification'", {"x": X, "y": LABELS}),
        (DTypeError, "is a list", {"x": [[1.0]], "y": Y}),
        (LabelError, "labels 0 to 2, expected 0 to 1", {"x": X, "y": LABELS, "task": "classification", "classes": 2}),
        (LabelError, "labels -1 to", {"x": X, "y": LABELS - 1, "task": "classification", "classes": 3}),
        (LabelError, "integer labels", {"x": X, "y": Y, "task": "classification", "classes": 6}),
        (ShapeError, "argmax", {"x": X, "y": LABELS[:, None], "task": "classification", "classes": 3}),
        (OptionError, "positive integer", {"x": X, "y": LABELS, "task": "classification"}),
        (OptionError, "for regression", {"x": X, "y": Y, "classes": 2}),
        (OptionError, "'ranking'", {"x": X, "y": Y, "task": "ranking"}),
        (ShapeError, "both x_test and y_test or neither", {"x": X, "y": Y, "x_test": X}),
        (ShapeError, "as in the training rows", {"x": X, "y": Y, "x_test": torch.ones(3, 5), "y_test": torch.ones(3)}),
        (ShapeError, "y_test has 5", {"x": X, "y": Y, "x_test": X, "y_test": Y[:5]}),
        (ShapeError, "marks\\['top'\\]", {"x": X, "y": Y, "marks": {"top": torch.ones(5)}}),
        (ShapeError, "without test rows", {"x": X, "y": Y, "marks_test": {"top": torch.ones(5)}}),
    ],
)
def test_refuses(error, part, arguments):
    with pytest.raises(error, match=part) as caught:
        DataSet(**arguments, name="mine")
    assert "mine" in str(caught.value)


def test_is_immutable_and_travels():
    data = DataSet(X, Y, X, Y, info={"a": 1}, marks={"k": LABELS})
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.x = X  # type: ignore[misc]
    for copied in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert torch.equal(copied.x, X) and copied.info == {"a": 1} and torch.equal(copied.marks["k"], LABELS)


def test_regression_targets_are_columns():
    assert DataSet(X, Y).y.shape == (6, 1)
    assert DataSet(X, torch.ones(6, 3)).c == 3
    assert DataSet(X.reshape(6, 1, 2), Y).d == 2


def test_numpy_arrays_are_copied():
    x = np.ones((3, 2))
    data = DataSet(x, np.zeros(3))
    x[:] = 7
    assert data.x.max() == 1 and data.x.dtype == torch.float64


def test_to_moves_floats_only():
    data = DataSet(X, LABELS, X, LABELS, task="classification", classes=3, marks={"theta": X[:, 0].double()})
    moved = data.to(dtype=torch.float16, device="cpu")
    assert moved.x.dtype == moved.x_test.dtype == torch.float16
    assert moved.y.dtype == torch.int64 and moved.marks["theta"].dtype == torch.float64
    with pytest.raises(DTypeError, match="floating"):
        data.to(dtype=torch.int64)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.data())
def test_subsample_keeps_proportions_and_rows(sizes, draw):
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.arange(len(y), dtype=torch.float64)[:, None]
    data = DataSet(x, y, x, y, task="classification", classes=len(sizes), marks={"row": x[:, 0]})
    n = draw.draw(st.integers(1, len(y)))
    part = data.subsample(n, seed=3, n_test=n)
    assert len(part) == n == len(part.x_test)
    counts = part.y.bincount(minlength=len(sizes))
    assert all(abs(int(count) - n * size / len(y)) < 1 for count, size in zip(counts, sizes))
    rows = part.marks["row"].long()
    assert torch.equal(part.x[:, 0], part.marks["row"]) and torch.equal(y[rows], part.y)
    assert torch.equal(rows, rows.unique()), "rows keep their order and occur once"
    assert torch.equal(data.subsample(n, seed=3).x, part.x)


def test_subsample_depends_on_seed_and_refuses():
    data = DataSet(torch.arange(100.0)[:, None], torch.zeros(100))
    assert not torch.equal(data.subsample(10, seed=0).x, data.subsample(10, seed=1).x)
    for wrong in ({}, {"n": 3, "per_class": 2}, {"per_class": 2}, {"n": 0}, {"n": 101}, {"n": 5, "n_test": 2}):
        with pytest.raises(OptionError):
            data.subsample(**wrong)
    labels = DataSet(X, LABELS, task="classification", classes=3)
    with pytest.raises(OptionError, match="3 rows per class wanted, expected 1 to 2"):
        labels.subsample(per_class=3)


def animals(**more):
    y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    x = torch.arange(14.0).reshape(7, 2)
    return DataSet(
        x,
        y,
        x[:4] + 100,
        y[:4],
        name="animals",
        task="classification",
        classes=3,
        marks={"row": x[:, 0]},
        marks_test={"row": x[:4, 0]},
        **more,
    )


@pytest.mark.parametrize("named", [False, True])
def test_only_keeps_the_rows_of_some_classes_with_labels_in_their_order(named):
    data = animals(info={"label_names": ("ant", "bee", "cat"), "source": "here"} if named else {"source": "here"})
    two = data.only("cat", "ant") if named else data.only(2, 0)
    rows = torch.tensor([0, 2, 3, 5, 6])
    assert torch.equal(two.x, data.x[rows]) and torch.equal(two.marks["row"], data.marks["row"][rows])
    assert two.y.tolist() == [1, 0, 1, 0, 0] and two.c == 2
    assert two.y_test.tolist() == [1, 0, 1] and two.marks_test["row"].tolist() == [0, 4, 6]
    assert two.info == {"source": "here", "label_names": ("cat", "ant") if named else ("2", "0")}
    assert data.c == 3 and len(data) == 7
    assert two.name == ("animals, cat against ant" if named else "animals, 2 against 0")
    assert two.only(1).y.tolist() == [0, 0] and two.only(1).info["label_names"] == two.info["label_names"][1:]
    assert data.only(np.int64(1)).y_test.tolist() == [0]


def test_only_refuses_what_is_no_class():
    data = animals(info={"label_names": ("ant", "bee", "cat")})
    for error, match, classes in (
        (LabelError, "no class 3; labels are 0 to 2", (0, 3)),
        (LabelError, "no class -1", (-1,)),
        (LabelError, "no class 0.5", (0.5,)),
        (UnknownNameError, "Unknown class 'car'. Did you mean 'cat'", ("car",)),
        (OptionError, "different classes", (0, 1, "ant")),
        (OptionError, "different classes", ()),
    ):
        with pytest.raises(error, match=match):
            data.only(*classes)
    with pytest.raises(LabelError, match="no class 'cat'; labels are 0 to 2"):
        animals().only("cat")
    with pytest.raises(OptionError, match="this is regression"):
        DataSet(torch.ones(2, 1), torch.ones(2)).only(0, 1)


def test_registry():
    assert set(names()) >= {"circle", "nlgp", "mnist", "cifar100", "modified_fashion_mnist", "digits"}
    with pytest.raises(UnknownNameError, match="Did you mean 'cifar10'"):
        load("cifar-1o")
    assert len(load("random-targets", n=7)) == 7


def test_classes_may_be_a_numpy_integer() -> None:
    y = np.array([0, 1, 2])
    data = DataSet(torch.randn(3, 2), y, task="classification", classes=y.max() + 1)
    assert data.c == 3 and type(data.classes) is int
