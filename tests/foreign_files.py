"""Makes hostile files and reads each of them, in a process whose memory is limited; prints a line of JSON per case.

Run by test_foreign_files.py. The limit is set once everything is imported; a case that never ends is ended by an alarm.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import resource
import signal
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from pathlens import Snapshot, rebuild
from pathlens.cli import _results
from pathlens.data import formats, store, tabular
from pathlens.errors import PathlensError
from pathlens.estimators import DLGNClassifier
from pathlens.files import read_document, with_checksum, write_document
from pathlens.linops import GramSum, from_zarr
from pathlens.papers.artifact import Artifact, load
from pathlens.records import Record, RecordHeader, SnapshotHeader
from pathlens.training.checkpoints import CheckpointHeader, load_checkpoint

root = Path(sys.argv[1])
os.environ["XDG_CACHE_HOME"] = str(root / "cache")

# --- the files -------------------------------------------------------------------------------------------------

memo = b"\x80\x02Nr\xff\xff\xff\x0f."  # nine bytes: a memo of 2^28 entries
endless = b"\x80\x02})" + b"2\x86" * 38 + b"Ns."  # 83 bytes: the hash of a tuple of tuples, 2^38 of them
PICKLES = {
    "memo": memo,
    "endless": endless,
    "long4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "long4 of zeros": b"\x80\x02\x8b\x00\x00\x00\x04" + bytes(1 << 16) + b".",
    "nested": b"\x80\x02" + b"(" * 100_000 + b".",
    "huge bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00.",
}
zeros = gzip.compress(bytes(1 << 24)) * 64  # 1 MB for 1 GiB


def npy(shape, dtype="<f8", body=b""):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + body


def npz(entries, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def bomb(name="k.npy", size=1 << 30):
    """A deflated entry of zeros that declares as many as it has; made of one block, repeated."""
    head = npy((size,), "|u1")
    block, flush = bytes(1 << 20), zlib.compressobj(9, zlib.DEFLATED, -15)
    start = flush.compress(head) + flush.flush(zlib.Z_FULL_FLUSH)
    one = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = one.compress(block) + one.flush(zlib.Z_FULL_FLUSH)
    packed = start + piece * (size // len(block)) + b"\x03\x00"
    whole = len(head) + size
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, len(packed), whole, len(name), 0) + name.encode()
    sizes = (len(packed), whole, len(name))
    central = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local) + len(packed), 0)
    return local + packed + central + end


NPZ = {
    "huge shape": npz({"k.npy": npy((10**13,))}),
    "huge in 64 bits": npz({"k.npy": npy((2**31, 2**31, 2**31, 8))}),
    "negative shape": npz({"k.npy": npy((-1,))}),
    "huge items": npz({"k.npy": npy((1,), "<U500000000")}),
    "no items": npz({"k.npy": npy((10**13,), "|V0")}),
    "bomb": bomb(),
    "truncated": bomb(size=1 << 20)[:-400],
    "lzma": npz({"k.npy": npy((1 << 28,), "|u1", bytes(1 << 22))}, zipfile.ZIP_LZMA),
    "not an array": npz({"k.npy": b"text"}),
    "not a zip": b"text",
    "empty": b"",
    "long header": npz({"k.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{"}),
    "nested header": npz({"k.npy": b"\x93NUMPY\x01\x00\xb8\x0b" + b"(" * 3000}),
}


def tar_bomb():
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.size = 1 << 34
    return gzip.compress(member.tobuf()) + zeros


# --- the cases: name -> what is done ---------------------------------------------------------------------------

CASES = {}


def case(name):
    def add(function):
        CASES[name] = function
        return function

    return add


def data_case(name, files, do):
    @case(name)
    def run():
        folder = root / "data" / hashlib.sha256(name.encode()).hexdigest()[:8]
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        os.environ["PATHLENS_DATA"] = str(folder)
        return do(folder)


def states(folder):
    return [one.state for one in store.status() if one.state not in ("absent", "unverified")]


batches = ("data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
for name, content in PICKLES.items():
    files = {f"cifar-10-batches-py/{file}": content for file in ("data_batch_1", *batches)}
    data_case(f"import, pickle: {name}", files, store.import_from)
    data_case(f"doctor, pickle: {name}", files, states)
    data_case(f"load, pickle: {name}", files, lambda _: store.load_split("cifar10", "train"))
    data_case(
        f"check cifar100, pickle: {name}",
        {"cifar-100-python/train": content, "cifar-100-python/test": content},
        lambda _: store.check("cifar100").state,
    )
for kind in ("python", "binary"):
    for way, do in (("import", store.import_from), ("doctor", states)):
        data_case(f"{way}, {kind} archive", {f"cifar-10-{kind}.tar.gz": tar_bomb()}, do)
idx = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
for end in ("", ".gz"):
    files = {f"mnist/{name}{end}": zeros for name in idx}
    data_case(f"import, idx{end}", files, store.import_from)
    data_case(f"import, loose idx{end}", {f"{name}{end}": zeros for name in idx}, store.import_from)
huge = b"\0\0\x08\x04" + struct.pack(">4I", *[2**32 - 1] * 4)
data_case("check, idx header", {f"mnist/{name}": huge for name in idx}, lambda _: store.check("mnist").state)
strips = {f"cifar10/{file}": zeros for file in store.facts_of("cifar10").forms[0].files()}
data_case("check, packed", {**strips, "cifar10/labels.npz": NPZ["huge shape"]}, lambda _: store.check("cifar10").state)


@case("doctor, decoded cache")
def run_cache():
    folder = root / "cache" / "pathlens" / "decoded"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        for part in ("images", "labels"):
            (folder / f"cifar10-{split}-{part}.npy").write_bytes(npy((10**13,), "|u1"))
    os.environ["PATHLENS_DATA"] = str(root / "none")
    return store.status(["cifar10"])[0].state


entry = {
    "name": "t",
    "file": "t.csv.gz",
    "sha256": hashlib.sha256(zeros).hexdigest(),
    "task": "regression",
    "rows": 1,
    "columns": 1,
}
data_case(
    "table",
    {"tabular/t.csv.gz": zeros, "tabular/manifest.json": json.dumps({"datasets": [entry]}).encode()},
    lambda _: tabular.table("t"),
)
data_case("table, manifest", {"tabular/manifest.json": b"[" * 10**6}, lambda _: tabular.table("t"))

for name, content in NPZ.items():
    CASES[f"labels: {name}"] = lambda content=content: formats.read_labels_npz(content, "labels.npz", "k")

    @case(f"artifact: {name}")
    def run_artifact(content=content):
        path = Artifact("hs.a", "t", "p", "quick").save(root / "artifacts")
        document = json.loads(path.read_text())
        del document["checksum"]
        (root / "artifacts" / "x.npz").write_bytes(content)
        document["arrays"] = {"file": "x.npz", "sha256": hashlib.sha256(content).hexdigest(), "contents": {}}
        path.write_text(json.dumps(with_checksum(document)))
        assert "unreadable" in _results([root / "artifacts"])["hs.a"]
        return load(path)


header = root / "header.json"
header.write_bytes(b'{"a":' * 100_000)
CASES["header, nested"] = lambda: read_document(header, SnapshotHeader)
CASES["snapshot, nested"] = lambda: Snapshot.load(root / "header")


@case("snapshot, not tensors")
def run_snapshot():
    data = struct.pack("<Q", 1 << 40) + b"{}"
    (root / "s.safetensors").write_bytes(data)
    write_document(root / "s.json", SnapshotHeader(sha256=hashlib.sha256(data).hexdigest(), description={}))
    return Snapshot.load(root / "s")


@case("record, huge shape")
def run_record():
    text = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(4)
    (root / "r.safetensors").write_bytes(data)
    header = RecordHeader(
        sha256=hashlib.sha256(data).hexdigest(),
        tensors=("x",),
        layers=(),
        sites=(),
        gate_label="hard",
        flops_per_row=0,
        untracked=(),
        kept=(),
        has_sensitivities=True,
        chain=False,
        ungated=(),
        learned_entry=False,
    )
    write_document(root / "r.json", header)
    return Record.load(root / "r")


@case("checkpoint, huge shape")
def run_checkpoint():
    text = json.dumps({"x": {"dtype": "F32", "shape": [1 << 31, 1 << 31, 1 << 31], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(4)
    (root / "c").mkdir()
    (root / "c" / "checkpoint-00000001.safetensors").write_bytes(data)
    header = CheckpointHeader(sha256=hashlib.sha256(data).hexdigest(), tensors=("x",), state={})
    write_document(root / "c" / "checkpoint-00000001.json", header)
    return load_checkpoint(root / "c", {})


RECIPE = {
    "kind": "dlgn",
    "sizes": {"inputs": 2, "hidden": [4], "outputs": 1, "bias": False},
    "source": {"name": "shallow"},
    "gate": "hard",
    "piecewise_constant": False,
    "trained": "both",
    "gates_from": "x",
    "init": ["default", 1.0],
    "frozen": [],
}
for name, changes in {
    "width": {"sizes": {**RECIPE["sizes"], "hidden": [10**6, 10**6]}},
    "inputs": {"sizes": {**RECIPE["sizes"], "inputs": 10**12}},
    "rank": {"source": {"name": "quadratic", "rank": 10**9}},
    "examples": {"source": {"name": "table", "examples": 10**11, "probability": 0.5}},
    "infinite": {"source": {"name": "quadratic", "rank": float("inf")}},
}.items():

    @case(f"rebuild: {name}")
    def run_rebuild(changes=changes):
        description = {"kind": "dlgn", "recipe": {**RECIPE, **changes}}
        Snapshot({"values.output.weight": torch.ones(1, 4)}, description).save(root / "n")
        return rebuild(Snapshot.load(root / "n"))


X = np.random.default_rng(0).random((20, 2))
model = DLGNClassifier(hidden=(2,), epochs=1, random_state=0).fit(X, np.where(X[:, 0] > 0.5, "a", "b"))
model.save(root / "model")


@case("model, labels")
def run_model():
    header = json.loads((root / "model.json").read_text())
    del header["checksum"]
    header["classes"]["dtype"] = "<U400000000"
    (root / "model.json").write_text(json.dumps(with_checksum(header)))
    return DLGNClassifier.load(root / "model")


GramSum.from_factors([[("x", torch.eye(4))]]).to_zarr(root / "kernel", client=False, block=2)
plain = (root / "kernel" / "zarr.json").read_text()
for name, shape, block in (
    ("blocks", [10**6, 10**6], [1, 1]),
    ("rows", [10**9, 10**9], [1, 10**9]),
    ("no block", [4, 4], [0, 0]),
    ("not square", [4, 10**9], [2, 1]),
):

    @case(f"kernel: {name}")
    def run_kernel(shape=shape, block=block):
        described = json.loads(plain)
        described["shape"] = shape
        described["chunk_grid"]["configuration"]["chunk_shape"] = block
        own = {key: value for key, value in described["attributes"]["pathlens"].items() if key != "checksum"}
        described["attributes"]["pathlens"] = with_checksum({**own, "shape": shape, "block": block})
        (root / "kernel" / "zarr.json").write_text(json.dumps(described))
        return from_zarr(root / "kernel")

# --- running them ----------------------------------------------------------------------------------------------

for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmSize"):
        used = int(line.split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
tracemalloc.start()
for name, run in CASES.items():
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
    signal.alarm(10)
    try:
        outcome, refused = repr(run())[:200], False
    except BaseException as error:
        outcome, refused = f"{type(error).__name__}: {error}"[:400], isinstance(error, PathlensError)
    signal.alarm(0)
    peak = tracemalloc.get_traced_memory()[1] - before
    print(
        json.dumps(
            {"name": name, "outcome": outcome, "refused": refused, "seconds": time.perf_counter() - start, "peak": peak}
        ),
        flush=True,
    )
