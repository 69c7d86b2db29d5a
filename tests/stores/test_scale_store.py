"""Kernels on disk: the operator contract, equality, resuming, damage, and every way in which a disk can fail."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens import files
from pathlens.errors import FileFormatError, MissingExtraError, OptionError, StoreError, StoreWarning
from pathlens.linops import CustomKernel, Factor, GramSum, RowStream, StoredKernel, evaluate, from_zarr, stored
from pathlens.linops.parts import distinct_rows, restrict
from pathlens.stores import open_store, writing
from pathlens.testing.tolerance import assert_kernel_close

zarr = pytest.importorskip("zarr")


def load_contract() -> ModuleType:
    """The suite that every operator must pass, from the tests of linops."""
    file = Path(__file__).parents[1] / "linops" / "test_linops_contract.py"
    spec = importlib.util.spec_from_file_location("linops_contract", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


contract = load_contract()


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here pulls the plug of the machine: forcing files to disk would only cost time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def kernel(n: int = 37, seed: int = 0, dtype: torch.dtype = torch.float32) -> GramSum:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, r, generator=generator, dtype=dtype) for r in (3, 5))
    return GramSum.from_factors([[("x", x), ("y", y)], [Factor.ones(n)]], name="k")


def write(K: Any, path: Path, block: int = 10, **options: Any) -> Any:
    return K.to_zarr(path, client=False, block=block, **options)


def content(path: Path) -> dict[str, str]:
    """Checksum of every chunk."""
    return {
        f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((path / "c").glob("*/*"))
    }


def stamps(path: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written anew, even with the same content."""
    return {
        f"{file.parent.name}/{file.name}": (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in sorted((path / "c").glob("*/*"))
    }


def fail_after(monkeypatch: pytest.MonkeyPatch, blocks: int, error: BaseException) -> list[tuple[int, int]]:
    """Let some blocks through, then fail; returns the list of blocks asked for."""
    real, asked = writing.write_block, []

    def limited(job: Any, i: int, j: int) -> tuple[str, ...]:
        asked.append((i, j))
        if len(asked) > blocks:
            raise error
        return real(job, i, j)

    monkeypatch.setattr(writing, "write_block", limited)
    return asked


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("shape", [(1, None), (70, None), (37, 29)], ids=str)
@pytest.mark.parametrize("kind", contract.KINDS)
def test_a_stored_kernel_keeps_the_contract(
    kind: str, shape: tuple[int, int | None], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "TILE_EDGE", 32)
    make = contract.make

    def stored(*args: Any) -> Any:
        case = make(*args)
        write(case.kernel, tmp_path / "k", block=24)
        return dataclasses.replace(case, kernel=from_zarr(tmp_path / "k"))

    monkeypatch.setattr(contract, "make", stored)
    contract.test_backend_keeps_the_contract(kind, shape, "torch", dtype)


def test_any_zarr_reader_sees_the_same_numbers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    gates = [torch.rand(53, 40, generator=generator) > 0.4 for _ in range(3)]
    K = GramSum.from_factors([[(f"g{i}", g) for i, g in enumerate(gates)]])
    write(K, tmp_path / "k", block=20)
    array = zarr.open_array(str(tmp_path / "k"), mode="r")
    assert array.metadata.zarr_format == 3 and array.shape == (53, 53) and array.dtype == np.float32
    assert np.array_equal(array[:], K.dense().numpy())  # counts: equal, not close
    x = kernel(53)
    write(x, tmp_path / "x", block=20)
    values = torch.from_numpy(zarr.open_array(str(tmp_path / "x"), mode="r")[:])
    assert torch.equal(values, values.T)
    assert_kernel_close(values, x.dense().double(), x.diagonal())


def test_solvers_slices_and_algebra_work_from_disk(tmp_path: Path) -> None:
    K = kernel(60, dtype=torch.float64)
    write(K, tmp_path / "k", block=16)
    S = from_zarr(tmp_path / "k", max_bytes=60_000)  # the matrix itself takes 28,800: several tiles
    y = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for method in ("cholesky", "cg"):
        budget = 2**20 if method == "cholesky" else None
        got = S.solve(y, ridge=1.0, method=method, max_bytes=budget).solution
        assert torch.allclose(got, K.solve(y, ridge=1.0).solution, atol=1e-8)
    for method in ("dense", "lanczos"):
        got = S.eigsh(4, method=method, max_bytes=2**20).values
        assert torch.allclose(got, K.eigsh(4).values, rtol=1e-9)
    some = torch.tensor([59, 3, 3, 17, 44])
    assert torch.allclose(S[some, 5:40:3].dense(), K[some, 5:40:3].dense())
    assert torch.allclose((2 * S + K * S).dense(), 2 * K.dense() + K.dense() ** 2)
    text = repr(S)
    assert "4 × 4 blocks of 15 × 15" in text and str(tmp_path) in text and "x·xᵀ ∘ y·yᵀ" in text


@settings(max_examples=25)
@given(data=st.data())
def test_any_block_is_rebuilt_from_the_parts(data: st.DataObject) -> None:
    """Every kind of node, any rows and columns, selections with repetitions included."""
    n = 23
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))
    a, b = (torch.randn(n, r, generator=generator, dtype=torch.float64) for r in (2, 4))
    K: Any = GramSum.from_factors([[("a", a), ("b", b)]])
    for _ in range(data.draw(st.integers(0, 4))):
        step = data.draw(st.sampled_from(["scale", "sum", "product", "select", "custom"]))
        other = GramSum.from_factors([[("b", b)]])
        if K.shape != other.shape:
            other = other[: K.shape[0], : K.shape[1]]
        if step == "scale":
            K = K * data.draw(st.floats(-3, 3))
        elif step == "select":
            rows, cols = (data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=n)) for size in K.shape)
            K = K[rows, cols]
        elif step == "custom":
            whole = other.dense()
            diagonal = whole.diagonal if whole.shape[0] == whole.shape[1] else None
            K = K + CustomKernel(tuple(whole.shape), lambda i, j, w=whole: w[i][:, j], diagonal, dtype=torch.float64)
        else:
            K = K + other if step == "sum" else K * other
    lo, hi = sorted(data.draw(st.lists(st.integers(0, K.shape[0]), min_size=2, max_size=2, unique=True)))
    low, high = sorted(data.draw(st.lists(st.integers(0, K.shape[1]), min_size=2, max_size=2, unique=True)))
    node = restrict(stored.expression(K), range(lo, hi), range(low, high))
    got = GramSum(node, K.dtype, K.device).dense()
    assert torch.allclose(got, K.dense()[lo:hi, low:high], rtol=1e-10, atol=1e-10)


# --- resuming --------------------------------------------------------------------------------------------------


def test_a_second_call_computes_only_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K = kernel()
    write(K, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fail_after(patch, 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write(K, tmp_path / "k")
    before = stamps(tmp_path / "k")
    assert len(before) == 7  # (0,0), and (0,1) … (0,3) with their mirror images
    with pytest.raises(FileFormatError, match=r"4 of 10 blocks are finished.*to_zarr"):
        from_zarr(tmp_path / "k")
    asked = fail_after(monkeypatch, 100, AssertionError())
    report = write(K, tmp_path / "k")
    assert (report.blocks, report.computed, report.kept, report.repaired) == (10, 6, 4, ())
    assert sorted(asked) == [(i, j) for i in range(1, 4) for j in range(i, 4)]  # each once, upper half only
    assert stamps(tmp_path / "k").items() >= before.items()
    assert content(tmp_path / "k") == content(tmp_path / "whole")
    assert write(K, tmp_path / "k").computed == 0 and "10 found finished" in repr(write(K, tmp_path / "k"))


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_block_is_computed_again_and_said_so(harm: str, tmp_path: Path) -> None:
    K = kernel()
    write(K, tmp_path / "k")
    sound, before = content(tmp_path / "k"), stamps(tmp_path / "k")
    file = tmp_path / "k" / "c" / "2" / "1"  # the mirror image of (1, 2)
    data = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    else:
        data[100] ^= 1
        file.write_bytes(data if harm == "flip" else data[:-1])
    if harm == "flip":
        from_zarr(tmp_path / "k")  # sizes alone do not tell
        assert write(K, tmp_path / "k", verify=False).computed == 0
    else:
        with pytest.raises(FileFormatError, match=r"block \(1, 2\).*missing or truncated"):
            from_zarr(tmp_path / "k")
    with pytest.raises(FileFormatError, match=r"1 of 10 blocks are damaged: \(1, 2\)"):
        StoredKernel(open_store(tmp_path / "k")).verify()
    with pytest.warns(StoreWarning, match=r"1 finished blocks .* such as \(1, 2\); they are computed again"):
        report = write(K, tmp_path / "k")
    assert report.repaired == ((1, 2),) and report.computed == 1 and report.kept == 9
    assert content(tmp_path / "k") == sound
    after = stamps(tmp_path / "k")
    assert {key for key in after if after[key] != before[key]} == {"1/2", "2/1"}
    from_zarr(tmp_path / "k", verify=True)


def test_a_truncated_block_met_while_reading_is_named(tmp_path: Path) -> None:
    write(kernel(), tmp_path / "k")
    S = from_zarr(tmp_path / "k")
    (tmp_path / "k" / "c" / "0" / "3").write_bytes(b"short")
    with pytest.raises(FileFormatError, match=r"c/0/3: block \(0, 3\) is missing or truncated"):
        S.dense()


def test_a_damaged_record_is_computed_again_and_said_so(tmp_path: Path) -> None:
    K = kernel()
    write(K, tmp_path / "k")
    record = tmp_path / "k" / "pathlens" / "finished" / "2.json"
    record.write_text(record.read_text().replace('"row": 2', '"row": 1'))
    with pytest.raises(FileFormatError, match=r"2\.json: the record of finished blocks is damaged"):
        from_zarr(tmp_path / "k")
    with pytest.warns(StoreWarning, match=r"2\.json is damaged"):
        assert write(K, tmp_path / "k").computed == 2
    from_zarr(tmp_path / "k", verify=True)


def test_leftovers_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    K = kernel()
    write(K, tmp_path / "k")
    for name in ("c/0/.1.abc.part", "pathlens/arrays-dead/0.npy"):
        (tmp_path / "k" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "k" / name).write_bytes(b"half")
    write(K, tmp_path / "k")
    assert not list((tmp_path / "k").rglob("*.part")) and not list((tmp_path / "k").rglob("arrays-*"))


def test_a_worker_of_a_run_that_was_given_up_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K, real = kernel(), writing.write_block

    def overtaken(job: Any, i: int, j: int) -> tuple[str, ...]:
        if (i, j) == (1, 1):
            job.store.own("run").write_text("another")
        return real(job, i, j)

    monkeypatch.setattr(writing, "write_block", overtaken)
    with pytest.raises(StoreError, match=r"another run has taken over.*4 of 10 blocks are finished"):
        write(K, tmp_path / "k")
    assert not (tmp_path / "k" / "c" / "1" / "1").exists()


# --- identity --------------------------------------------------------------------------------------------------


def changed_entry(K: GramSum) -> GramSum:
    first, second, _ = distinct_rows(K.root)
    x = first.tensor.clone()
    x[17, 1] += 1e-6
    return GramSum.from_factors([[("x", x), ("y", second.tensor)], [Factor.ones(len(x))]])


@pytest.mark.parametrize(
    "other",
    [
        lambda: kernel(36),
        lambda: kernel(seed=1),
        lambda: kernel(dtype=torch.float64),
        lambda: kernel() * 2,
        lambda: kernel()[:, torch.arange(37).flip(0)],
        lambda: changed_entry(kernel()),
    ],
    ids=["shape", "factors", "dtype", "scale", "selection", "one entry"],
)
def test_another_kernel_is_refused_and_nothing_lost(other: Callable[[], GramSum], tmp_path: Path) -> None:
    write(kernel(), tmp_path / "k")
    before = stamps(tmp_path / "k")
    with pytest.raises(StoreError, match=r"holds another matrix, 'k': .*overwrite=True"):
        write(other(), tmp_path / "k")
    assert stamps(tmp_path / "k") == before
    write(other(), tmp_path / "k", overwrite=True)
    got, want = from_zarr(tmp_path / "k").dense(), other().dense()
    assert torch.allclose(got, want, atol=1e-4)


def test_names_of_factors_do_not_make_another_kernel(tmp_path: Path) -> None:
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    write(GramSum.from_factors([[("x", x)]]), tmp_path / "k")
    assert write(GramSum.from_factors([[("renamed", x.clone())]]), tmp_path / "k").computed == 0


def test_what_cannot_be_hashed_is_known_by_its_entries(tmp_path: Path) -> None:
    whole = kernel().dense()

    def custom(factor: float) -> CustomKernel:
        return CustomKernel(
            (37, 37), lambda i, j: whole[i][:, j] * factor, lambda: whole.diagonal() * factor, symmetric=True, name="c"
        )

    write(custom(1.0), tmp_path / "k")
    assert write(custom(1.0 + 1e-6), tmp_path / "k").computed == 0  # another thread count may round otherwise
    with pytest.raises(StoreError, match="sampled entries differ"):
        write(custom(1.01), tmp_path / "k")
    assert torch.allclose(from_zarr(tmp_path / "k").dense(), whole)


def test_streams_are_written_and_known_by_their_entries(tmp_path: Path) -> None:
    x = torch.randn(31, 4, generator=torch.Generator().manual_seed(0))

    def stream(scale: float) -> GramSum:
        rows = RowStream(contract.Rows({"x": x * scale, "gate": x > 0}))
        return GramSum.from_factors([[("x", rows["x"]), ("gate", rows["gate"])]])

    write(stream(1.0), tmp_path / "k")
    assert torch.allclose(from_zarr(tmp_path / "k").dense(), stream(1.0).dense(), atol=1e-5)
    with pytest.raises(StoreError, match="another matrix"):
        write(stream(1.1), tmp_path / "k")


# --- failing disks, folders and files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_a_full_or_failing_disk_loses_nothing(
    number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes from the write itself, after part of the file is written."""
    K, real, chunks = kernel(), open, []

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, data: Any) -> None:
            self.stream.write(bytes(data)[:50])
            raise OSError(number, os.strerror(number))

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: Any) -> None:
            self.stream.close()

    def failing(file: Any, mode: str = "r") -> Any:
        if mode == "xb" and Path(file).parent.parent.name == "c":
            chunks.append(file)
            if len(chunks) > 5:
                return Full(real(file, mode))
        return real(file, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", failing, raising=False)
        with pytest.raises(StoreError, match=rf"c/0/3 cannot be written.*{text}.*3 of 10 blocks are finished and stay"):
            write(K, tmp_path / "k")
    assert not list((tmp_path / "k").rglob("*.part"))
    report = write(K, tmp_path / "k")
    assert report.kept == 3 and report.computed == 7
    from_zarr(tmp_path / "k", verify=True)


def test_too_small_a_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match=r"10 blocks still to be written take 6\.2 KiB, the disk has 1000 B left"):
        write(kernel(), tmp_path / "k")
    assert content(tmp_path / "k") == {}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        write(kernel(), tmp_path / "file" / "k")
    with pytest.raises(FileFormatError, match="there is no Zarr array at this path"):
        write(kernel(), tmp_path)
    with pytest.raises(StoreError, match="is not a Zarr array, so that it is not overwritten"):
        write(kernel(), tmp_path, overwrite=True)
    assert (tmp_path / "file").read_text() == "in the way"


def test_two_writers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    K = kernel()
    write(K, tmp_path / "k")
    with writing.write_lock(open_store(tmp_path / "k")):
        with pytest.raises(StoreError, match=rf"is being written by another process \(process {os.getpid()} on "):
            write(K, tmp_path / "k")
        with pytest.raises(StoreError, match="is being written by another process"):
            write(K, tmp_path / "k", overwrite=True)
    assert write(K, tmp_path / "k").computed == 0


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "zarr.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["attributes"]["pathlens"].update(version=99), "version 99, this Pathlens reads version 1"),
        (lambda d: d["attributes"]["pathlens"].update(symmetric=False), "edited or damaged"),
        (lambda d: d["attributes"]["pathlens"].update(format="pathlens.record"), "expected a pathlens.matrix file"),
        (lambda d: d["attributes"].clear(), "a Zarr array that Pathlens did not write"),
        (lambda d: d.update(shape=[36, 37]), "edited or damaged"),
        (lambda d: d.pop("data_type"), "not readable as a Zarr array"),
    ],
    ids=["version", "flag", "kind", "foreign", "shape", "metadata"],
)
def test_what_cannot_be_trusted_is_refused(
    change: Callable[[dict[str, Any]], None], match: str, tmp_path: Path
) -> None:
    K = kernel()
    write(K, tmp_path / "k")
    edit(tmp_path / "k", change)
    before = stamps(tmp_path / "k")
    for act in (lambda: from_zarr(tmp_path / "k"), lambda: write(K, tmp_path / "k")):
        with pytest.raises(FileFormatError, match=match):
            act()
    assert stamps(tmp_path / "k") == before
    write(K, tmp_path / "k", overwrite=True)
    from_zarr(tmp_path / "k", verify=True)


def test_broken_json_and_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="there is no Zarr array at this path"):
        from_zarr(tmp_path / "nothing")
    write(kernel(), tmp_path / "k")
    (tmp_path / "k" / "zarr.json").write_text("{")
    with pytest.raises(FileFormatError, match="not readable as a Zarr array"):
        from_zarr(tmp_path / "k")


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pathlens.stores

    monkeypatch.delitem(sys.modules, "pathlens.stores.dask_cluster", raising=False)
    monkeypatch.delattr(pathlens.stores, "dask_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"dask\.distributed.*pathlens\[scale\]"):
        kernel().to_zarr(tmp_path / "k", block=10, client="tcp://127.0.0.1:1")
    assert write(kernel(), tmp_path / "k").computed == 10  # nothing was lost, and this process needs no dask
    assert kernel().to_zarr(tmp_path / "local", block=20, workers=1).computed == 3  # nor do processes of this machine
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtraError, match=r"zarr.*pathlens\[scale\]"):
        write(kernel(), tmp_path / "z")
    with pytest.raises(MissingExtraError, match=r"zarr.*pathlens\[scale\]"):
        from_zarr(tmp_path / "k")


@pytest.mark.parametrize(
    "options",
    [
        {"client": None},
        {"client": True},
        {"client": False, "workers": 2},
        {"workers": 0},
        {"block": 0},
        {"block": 2.5},
        {"max_bytes": -1},
        {"max_bytes": 0},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        kernel().to_zarr(tmp_path / "k", **options)


# --- the size of blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "workers", "budget", "edge"),
    [
        (3e-6, 1, 2**40, 1000),  # three seconds
        (1e-9, 1, 2**40, 8192),  # never more than that
        (3e-6, 1, 16 * 400**2, 400),  # four copies in float32
        (5e-8, 4, 2**40, 5773),  # six for each worker, twice for the triangle
    ],
    ids=["time", "most", "memory", "balance"],
)
def test_blocks_take_seconds_fit_and_suffice(
    cost: float, workers: int, budget: int, edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_seconds_per_entry", lambda kernel: cost)
    n = 40_000 if workers == 4 else 2_000_000
    K = GramSum.from_factors([[("x", torch.ones(n, 1))]])
    assert stored._choose_edge(K, workers, budget)[0] == edge


def test_the_block_size_is_chosen_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K = kernel(200)
    monkeypatch.setattr(stored, "_seconds_per_entry", lambda _: 3e-9)  # of a fast machine: 0 says that the user chose
    report = K.to_zarr(tmp_path / "k", client=False)
    described = from_zarr(tmp_path / "k").description
    assert described.block == report.block == (200, 200) and described.seconds_per_block == 1.2e-4
    again = K.to_zarr(tmp_path / "k", client=False, block=7)  # a store keeps its blocks
    assert again.block == report.block and again.computed == 0
