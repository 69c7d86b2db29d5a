"""Tiny made-up sets in every published form, and the bytes they are made of.

They replace the package's checksum table, so that every check runs as it does on the real files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pathlens.data import checksums
from pathlens.data.checksums import Form


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def tar_gz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def webp_strip(images: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(images.reshape(-1, 32, 3)).save(buffer, "WEBP", lossless=True, quality=0, method=0)
    return buffer.getvalue()


def planar(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)


@dataclass
class Tiny:
    """A made-up set: its arrays, and the bytes of its files in every published form."""

    name: str
    arrays: dict[str, np.ndarray]  # "train_images", …
    files: dict[str, dict[str, bytes]]  # form -> file -> bytes
    archives: dict[str, bytes]  # form -> archive bytes

    def form(self, name: str) -> Form:
        return next(form for form in checksums.SETS[self.name].forms if form.name == name)

    def write(self, root: Path, form_name: str, *, archive: bool = False) -> Path:
        form = self.form(form_name)
        if archive:
            path = (root / form.folders[-1]).parent / form.archive
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.archives[form_name])
            return path
        folder = root / form.folders[0]
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files[form_name].items():
            (folder / name).write_bytes(data)
        return folder


def _register(monkeypatch, name, arrays, files, archives) -> Tiny:
    facts = checksums.SETS[name]
    forms = []
    for form in facts.forms:
        digests = {
            file: hashlib.new({32: "md5", 64: "sha256"}[len(digest)], files[form.name][file]).hexdigest()
            for file, digest in form.digests.items()
        }
        archive = form.archive_digest and hashlib.md5(archives[form.name]).hexdigest()
        forms.append(replace(form, digests=digests, archive_digest=archive))
    known = {key: sha256(value.tobytes()) for key, value in arrays.items()} if facts.arrays else {}
    rows = {split: len(arrays[f"{split}_labels"]) for split in ("train", "test")}
    monkeypatch.setitem(checksums.SETS, name, replace(facts, rows=rows, arrays=known, forms=tuple(forms)))
    return Tiny(name, arrays, files, archives)


def make_idx(monkeypatch, name: str, seed: int) -> Tiny:
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, n in (("train", 60), ("test", 20)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.permutation(np.arange(n) % 10).astype(np.uint8)
    raw = {
        "train-images-idx3-ubyte": arrays["train_images"],
        "train-labels-idx1-ubyte": arrays["train_labels"],
        "t10k-images-idx3-ubyte": arrays["test_images"],
        "t10k-labels-idx1-ubyte": arrays["test_labels"],
    }
    files = {"idx": {file: idx_bytes(array) for file, array in raw.items()}}
    files["idx.gz"] = {f"{file}.gz": gzip.compress(data, mtime=0) for file, data in files["idx"].items()}
    return _register(monkeypatch, name, arrays, files, {})


def make_cifar10(monkeypatch) -> Tiny:
    rng = np.random.default_rng(3)
    arrays = {}
    for split, n in (("train", 20), ("test", 10)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.integers(0, 10, n, dtype=np.uint8)
    parts = zip(np.split(arrays["train_images"], 5), np.split(arrays["train_labels"], 5))
    batches = {f"data_batch_{k}": part for k, part in enumerate(parts, 1)}
    batches["test_batch"] = (arrays["test_images"], arrays["test_labels"])
    files = {
        "python": {
            file: pickle.dumps(
                {
                    b"batch_label": b"made up",
                    b"data": planar(images),
                    b"labels": labels.tolist(),
                    b"filenames": [b"a.png"] * len(labels),
                },
                protocol=2,
            )
            for file, (images, labels) in batches.items()
        },
        "binary": {
            f"{file}.bin": np.hstack((labels[:, None], planar(images))).tobytes()
            for file, (images, labels) in batches.items()
        },
    }
    labels_npz = io.BytesIO()
    np.savez_compressed(labels_npz, train_labels=arrays["train_labels"], test_labels=arrays["test_labels"])
    packed = {
        f"train_{k:02d}.webps": webp_strip(arrays["train_images"][2 * k : 2 * k + 1])
        + webp_strip(arrays["train_images"][2 * k + 1 : 2 * k + 2])
        for k in range(10)
    }
    packed |= {f"test_{k:02d}.webps": webp_strip(arrays["test_images"][5 * k : 5 * k + 5]) for k in range(2)}
    files["packed"] = packed | {"labels.npz": labels_npz.getvalue()}
    archives = {
        "python": tar_gz({f"cifar-10-batches-py/{file}": data for file, data in files["python"].items()}),
        "binary": tar_gz({f"cifar-10-batches-bin/{file}": data for file, data in files["binary"].items()}),
    }
    return _register(monkeypatch, "cifar10", arrays, files, archives)


def make_cifar100(monkeypatch) -> Tiny:
    rng = np.random.default_rng(4)
    arrays, python, binary = {}, {}, {}
    for split, n in (("train", 200), ("test", 100)):
        images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        fine = rng.permutation(np.arange(n) % 100).astype(np.uint8)
        coarse = (fine % 20).astype(np.uint8)
        arrays |= {f"{split}_images": images, f"{split}_labels": fine, f"{split}_coarse": coarse}
        python[split] = pickle.dumps(
            {b"data": planar(images), b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}, protocol=2
        )
        binary[f"{split}.bin"] = np.hstack((coarse[:, None], fine[:, None], planar(images))).tobytes()
    archives = {
        "python": tar_gz({f"cifar-100-python/{file}": data for file, data in python.items()}),
        "binary": tar_gz({f"cifar-100-binary/{file}": data for file, data in binary.items()}),
    }
    return _register(monkeypatch, "cifar100", arrays, {"python": python, "binary": binary}, archives)
