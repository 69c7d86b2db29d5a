"""Tables: found where image sets are, checked against their manifest, read as they are."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from pathlens import data
from pathlens.errors import DataCorruptError, DataMissingError, FileFormatError, OptionError, UnknownNameError

CSV = 'age,town,code,target\n20,Oslo,1,yes\n,"Bergen, west",2,no\n41.5,,1,yes\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one table of three rows."""
    place = tmp_path / "data" / "tabular"
    place.mkdir(parents=True)
    write(place, CSV)
    monkeypatch.setenv("PATHLENS_DATA", str(place.parent))
    return place


def write(place: Path, text: str, **changes: object) -> None:
    packed = gzip.compress(text.encode())
    (place / "towns.csv.gz").write_bytes(packed)
    entry = {
        "name": "towns",
        "file": "towns.csv.gz",
        "task": "classification",
        "rows": 3,
        "columns": 3,
        "categorical_columns": ["town"],
        "integer_coded_categoricals": ["code"],
        "sha256": hashlib.sha256(packed).hexdigest(),
    } | changes
    (place / "manifest.json").write_text(json.dumps({"datasets": [entry]}))


def test_a_table_is_read_as_it_is(folder: Path) -> None:
    table = data.table("towns")
    assert data.table_names() == ("towns",)
    assert (len(table), table.task, table.categorical, table.missing) == (3, "classification", ("town", "code"), 2)
    np.testing.assert_array_equal(table.columns["age"], [20.0, np.nan, 41.5])
    assert table.columns["town"].tolist() == ["Oslo", "Bergen, west", None]
    assert table.target.tolist() == ["yes", "no", "yes"]
    assert "3 rows, 3 columns (2 categorical), 2 missing cells" in repr(table)
    assert list(table.frame().columns) == ["age", "town", "code"]


def test_labels_that_are_whole_numbers_are_integers(folder: Path) -> None:
    write(folder, CSV.replace("yes", "1").replace("no", "0"))
    assert data.table("towns").target.dtype == np.int64


def test_targets_of_regression_are_numbers(folder: Path) -> None:
    write(folder, CSV.replace("yes", "1").replace("no", "0.5"), task="regression")
    np.testing.assert_array_equal(data.table("towns").target, [1, 0.5, 1])


def test_a_subsample_keeps_order_and_says_so(folder: Path) -> None:
    table = data.table("towns")
    assert table.subsample(7) is table
    part = table.subsample(2, seed=1)
    assert len(part) == len(part.columns["age"]) == 2 and part.info["subsample_of"] == 3
    assert part.target.tolist() == table.subsample(2, seed=1).target.tolist()
    with pytest.raises(OptionError, match="at least 1 row"):
        table.subsample(0)


def test_a_changed_file_is_refused(folder: Path) -> None:
    (folder / "towns.csv.gz").write_bytes(gzip.compress(CSV.replace("20", "21").encode()))
    with pytest.raises(DataCorruptError, match="SHA-256"):
        data.table("towns")


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (CSV, {"rows": 4}, "3 rows of 4 columns"),
        (CSV.replace("target", "income"), {}, "expected 3 rows"),
        (CSV, {"categorical_columns": []}, "'town' is listed as numeric"),
    ],
)
def test_a_file_that_is_not_as_described_is_refused(folder: Path, text: str, changes: dict, said: str) -> None:
    write(folder, text, **changes)
    with pytest.raises(FileFormatError, match=said):
        data.table("towns")


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'towns'"):
        data.table("town")
    (folder / "towns.csv.gz").unlink()
    with pytest.raises(DataMissingError, match=r"towns\.csv\.gz"):
        data.table("towns")
    (folder / "manifest.json").write_text('{"datasets": [{"name": "towns"}]}')
    with pytest.raises(FileFormatError, match="not a manifest"):
        data.table_names()
    (folder / "manifest.json").unlink()
    assert data.table_names() == ()
    with pytest.raises(DataMissingError, match="PATHLENS_DATA"):
        data.table("towns")


def test_a_manifest_cannot_point_outside_its_folder(folder: Path) -> None:
    write(folder, CSV, file="../towns.csv.gz")
    with pytest.raises(FileFormatError, match="plain file name"):
        data.table("towns")


def test_real_tables_have_their_rows(real_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (real_folder / "tabular").is_dir():
        pytest.skip("no tables in the data folder")
    monkeypatch.setenv("PATHLENS_DATA", str(real_folder))
    table = data.table("churn")
    assert (len(table), len(table.columns), len(table.categorical), table.missing) == (5000, 19, 4, 0)
    assert set(table.target) == {"yes", "no"}
