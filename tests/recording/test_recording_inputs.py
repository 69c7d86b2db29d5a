"""What `record` takes as inputs, what it refuses, and rows of networks whose gates come from a table."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pathlens import Record, data, gated_twin, kernels, models, paths, record, regions
from pathlens.data.inputs import as_numbers
from pathlens.errors import (
    DTypeError,
    EmptyDataError,
    NotFiniteError,
    PathlensError,
    RowIndexError,
    ShapeError,
)
from pathlens.recording import as_rows

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


GOOD: dict[str, Any] = {
    "tensor": X,
    "tensor with a graph": (X.clone().requires_grad_() * 1),
    "float32 array": X.numpy(),
    "float64 array": X.double().numpy(),
    "list": X.tolist(),
    "DataSet": data.DataSet(X, torch.zeros(6)),
    "pair": (X, torch.zeros(6)),
    "pair and weights": (X.numpy(), torch.zeros(6), torch.ones(6)),
    "Dataset of tuples": TensorDataset(X, torch.zeros(6)),
    "Dataset of float64": TensorDataset(X.double()),
    "Dataset of rows": X.unbind(),
    "IterableDataset": Stream(),
    "DataLoader": DataLoader(TensorDataset(X, torch.zeros(6)), batch_size=4),
    "DataLoader of arrays": DataLoader(
        TensorDataset(X), batch_size=4, collate_fn=lambda b: np.stack([r[0] for r in b])
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_inputs_of_every_kind(name: str) -> None:
    net = models.relu(3, (4,), seed=0)
    random = torch.get_rng_state()
    rec = record(net, GOOD[name])
    assert torch.equal(torch.get_rng_state(), random)
    assert rec.x.dtype == torch.float32 and not rec.x.requires_grad
    assert torch.equal(rec.x, X)


@pytest.mark.parametrize(
    "values", [np.array([[1, 2], [3, 4]]), np.array([[True, False]]), np.arange(4, dtype=np.uint8)[None]]
)
def test_whole_numbers_take_the_dtype_of_the_network(values: np.ndarray) -> None:
    net = models.relu(values.shape[1], (4,), seed=0)
    for given in (values, torch.from_numpy(values)):
        assert torch.equal(record(net.float(), given).x, torch.tensor(values, dtype=torch.float32))
        assert torch.equal(record(net.double(), given).x, torch.tensor(values, dtype=torch.float64))
        assert torch.equal(as_rows(given), torch.tensor(values, dtype=torch.float32))


def test_arrays_that_torch_itself_would_not_take() -> None:
    array = X.numpy().copy()
    array.flags.writeable = False
    net = models.relu(3, (4,), seed=0)
    assert torch.equal(record(net, array).x, X)
    assert torch.equal(record(net, array[::-2]).x, X.flip(0)[::2])
    assert torch.equal(record(net, array.astype(">f4")).x, X)
    assert torch.equal(record(net, array.astype(np.longdouble)).x, X)


def test_a_tensor_is_not_copied_but_an_array_is() -> None:
    assert as_rows(X).data_ptr() == X.data_ptr()
    array = X.numpy().copy()
    rows = as_rows(array)
    array[:] = 0
    assert torch.equal(rows, X)


def with_nan(row: int) -> Tensor:
    x = X.clone()
    x[row, 1] = torch.nan
    return x


def _compressed() -> Tensor:
    with warnings.catch_warnings():  # torch calls it beta
        warnings.simplefilter("ignore")
        return X.to_sparse_csr()


BAD: list[tuple[str, Any, type[PathlensError], str]] = [
    ("float64 tensor", X.double(), DTypeError, r"Inputs are torch.float64, the network is torch.float32\. Convert"),
    ("complex tensor", X + 1j, DTypeError, r"are torch.complex64, expected real.*view_as_real"),
    ("sparse", X.to_sparse(), DTypeError, r"torch.sparse_coo, expected a dense one\. Convert it: X\.to_dense\(\)"),
    ("compressed", _compressed(), DTypeError, r"layout torch.sparse_csr, .* X\.to_dense\(\)"),
    ("SciPy's sparse", scipy.sparse.eye(3).tocsr(), DTypeError, r"csr_matrix\)\. Convert it: X\.toarray\(\)"),
    ("nested", torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), DTypeError, r"nested.*to_padded_tensor"),
    ("meta", X.to("meta"), DTypeError, "device 'meta', which holds shapes and no numbers.*on the CPU"),
    ("sparse Dataset", DataLoader(X.to_sparse(), batch_size=None), DTypeError, "sparse_coo"),
    ("columns", X[:, :2], ShapeError, r"record: .* not accept inputs of shape \(6, 2\): .* reads \(n, 3\)\. Give rows"),
    ("images", X[:, None], PathlensError, r"shape \(6, 1, 1\) for inputs of shape \(6, 1, 3\).* reads \(n, 3\)"),
    ("NaN", with_nan(4), NotFiniteError, "first in row 4"),
    ("infinity", np.array([[1.0, 2.0, np.inf]]), NotFiniteError, "first in row 0"),
    ("too large for float32", np.full((2, 3), 1e300), NotFiniteError, "infinity"),
    ("no rows", torch.empty(0, 3), EmptyDataError, r"empty: shape \(0, 3\)"),
    ("no columns", torch.empty(3, 0), EmptyDataError, r"empty: shape \(3, 0\)"),
    ("empty list", [], ShapeError, r"expected shape \(n, ...\), got \(0,\)"),
    ("empty Dataset", TensorDataset(torch.empty(0, 3)), EmptyDataError, "the TensorDataset has no items"),
    ("empty DataLoader", DataLoader(TensorDataset(torch.empty(0, 3))), EmptyDataError, "the DataLoader has no items"),
    ("one row", X[0], ShapeError, r"batch dimension: expected shape \(n, ...\), got \(3,\)"),
    ("a number", 3.0, ShapeError, r"got \(\)"),
    ("ragged", [[1.0, 2.0], [3.0]], ShapeError, "do not have one shape"),
    ("strings", np.array([["a", "b"]]), DTypeError, "Inputs must be real numbers, got an array of <U1"),
    ("complex", np.ones((2, 3), dtype=complex), DTypeError, "complex128"),
    ("objects", [[object()]], DTypeError, "array of object"),
    ("None", None, DTypeError, "NoneType"),
    ("items of text", DataLoader(["a", "b"]), DTypeError, "an item of the DataLoader is a"),
    ("uneven batches", DataLoader([X[0], X[0, :2]], batch_size=1), ShapeError, "rows of the DataLoader have different"),
]


@pytest.mark.parametrize(("value", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_inputs(value: Any, error: type[PathlensError], message: str) -> None:
    with pytest.raises(error, match=message):
        record(models.relu(3, (4,), seed=0), value)


TAKERS: list[Any] = [
    paths.inputs,
    paths.count,
    kernels.overlap,
    lambda net, X: kernels.relu_ntk(X),
    lambda net, X: kernels.LinearisedModel(net)(X),
    lambda net, X: gated_twin(nn.Linear(3, 1), "relu", example=X),
    lambda net, X: regions.path_region(net, (0,)).contains(X),
]


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("value", [X.to_sparse(), X.to("meta"), X + 1j], ids=["sparse", "meta", "complex"])
def test_inputs_that_are_no_dense_real_numbers_are_refused_everywhere(value: Tensor, take: Any) -> None:
    with pytest.raises(DTypeError, match=r"are .*expected .*\. [A-Z]|holds shapes and no numbers\. Give"):
        take(models.dlgn(3, (4,), seed=0), value)


def test_networks_whose_weights_are_no_real_numbers() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with pytest.raises(DTypeError, match=r"device 'meta'.*net.to_empty"):
        record(copy.deepcopy(net).to("meta"), X)
    with warnings.catch_warnings():  # torch warns that complex modules are new
        warnings.simplefilter("ignore")
        net.to(torch.complex64)
    with pytest.raises(DTypeError, match=r"weights are torch.complex64, expected real"):
        record(net, X)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", [(5, 192), (5, 1, 8, 8), (5, 3, 2, 2), (5, 3, 9, 9)])
def test_shapes_that_a_network_of_images_does_not_take(shape: tuple[int, ...], stream: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)
    ).eval()
    assert record(net, torch.randn(5, 3, 8, 8), stream=stream).n == 5
    with pytest.raises(ShapeError, match=r"record: the network does not accept .* reads \(n, 3, height, width\)"):
        record(net, torch.randn(shape), stream=stream)


def test_a_network_that_says_itself_what_is_wrong() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("too many\nrows")

    with pytest.raises(ShapeError, match=r"shape \(6, 3\): too many\. Give rows"):
        record(Picky(), X)


def test_networks_without_parameters() -> None:
    rec = record(nn.ReLU(), [[1, -2]])
    assert rec.layers == () and torch.equal(rec.f, torch.tensor([[1.0, 0.0]]))
    rec = record(nn.Flatten(), X[:, None])
    assert rec.sites == () and rec.untracked == ()


# --- gates from a table ----------------------------------------------------------------------------------------


def table() -> models.GatedNetwork:
    return models.frg(3, (5, 4), 2, examples=10, seed=0)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_table(stream: bool) -> None:
    net = table()
    first, some = record(net, X, stream=stream), record(net, X, rows=[9, 0, 9, 3, 4, 5], stream=stream)
    bits = net.source.tables[0].bits
    assert torch.equal(first.rows(0, 6).gates("relu1@0"), bits[:6])
    assert torch.equal(some.rows(0, 6).gates("relu1@0"), bits[[9, 0, 9, 3, 4, 5]])
    assert torch.allclose(some.rows(1, 3).f, net(X[1:3], torch.tensor([0, 9])))
    for kind in (torch.int32, torch.uint8):
        again = record(net, X, rows=torch.tensor([9, 0, 9, 3, 4, 5], dtype=kind), stream=stream)
        assert torch.equal(again.rows(0, 6).f, some.rows(0, 6).f)


def test_rows_of_a_table_in_batches() -> None:
    net, numbers = table(), [9, 0, 9, 3, 4, 5]
    whole = record(net, X, rows=numbers)
    parts = record(net, X, rows=numbers, max_bytes=8 * whole.bytes_per_row, stream=False)
    assert torch.allclose(parts.f, whole.f) and all(torch.equal(parts.bits[s], whole.bits[s]) for s in whole.sites)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 1], ShapeError, r"rows has shape \(2,\), expected \(6,\)"),
        ([0.0] * 6, DTypeError, "rows are torch.float32, expected integers"),
        ([True] * 6, DTypeError, "rows are torch.bool"),
        ([0, 1, 2, 3, 4, 10], RowIndexError, r"no rows 0…10; the table of gates has 10 examples"),
        ([0, 1, 2, 3, 4, -1], RowIndexError, r"no rows -1…4"),
    ],
)
def test_bad_rows_of_a_table(rows: Any, error: type[PathlensError], message: str) -> None:
    with pytest.raises(error, match=message):
        record(table(), X, rows=rows)


def test_more_inputs_than_the_table_has_examples() -> None:
    with pytest.raises(RowIndexError, match=r"no rows 0…10.*record\(net, X, rows=…\)"):
        record(table(), torch.randn(11, 3))


def test_rows_mean_nothing_without_a_table() -> None:
    net = models.relu(3, (4,), seed=0)
    assert torch.equal(record(net, X, rows=[7] * 6).f, record(net, X).f)


@pytest.mark.parametrize("kind", [Tensor, np.ndarray, list, TensorDataset])
def test_what_an_embedding_looks_up_stays_whole(kind: type, tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden, self.output = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(nn.functional.leaky_relu(self.hidden(self.words(x).mean(1)), 0.3))

    net, tokens = Words().double(), torch.randint(0, 7, (6, 3), generator=torch.Generator().manual_seed(0))
    given = {Tensor: tokens, np.ndarray: tokens.numpy(), list: tokens.tolist(), TensorDataset: TensorDataset(tokens)}
    rec = record(net, given[kind])
    assert torch.equal(rec.f, net(tokens).detach()) and torch.equal(as_rows(given[kind], like=net), tokens)
    (site,) = rec.sites
    leaks = rec.gates(site)
    assert set(leaks.unique().tolist()) == {0.3, 1.0}  # a leak is no whole number
    rec.save(tmp_path / "words")
    assert torch.equal(Record.load(tmp_path / "words").x, tokens)
    with pytest.raises(ShapeError, match="does not accept"):
        record(net, tokens.double())  # numbers that are not whole are none of an embedding's


def test_numbers_keep_their_precision_and_their_order() -> None:
    pandas = pytest.importorskip("pandas")
    exact = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    column = pandas.Series([0.1, 0.2, 0.3], index=[5, 7, 0])
    backwards = np.array([0.3, 0.2, 0.1])[::-1]
    for given in ([0.1, 0.2, 0.3], column, backwards, exact, exact.clone().requires_grad_()):
        assert torch.equal(as_numbers(given), exact)
    assert as_numbers(torch.tensor([0.1])).dtype == torch.float32 and as_numbers(2.0).shape == ()


def test_numbers_in_the_items_of_a_dataset_are_not_rounded() -> None:
    items = [([0.1, 0.2, 0.3], 0), ([0.4, 0.5, 0.7], 1)]  # a Dataset whose rows are lists, with labels
    rows = as_rows(DataLoader(items, batch_size=None, collate_fn=lambda item: ([item[0]], item[1])), like=torch.float64)
    assert torch.equal(rows, torch.tensor([row for row, _ in items], dtype=torch.float64))
