"""Finding, checking, importing and caching, on tiny sets in every published form."""

from __future__ import annotations

import gzip
import os
import pickle
import re

import numpy as np
import pytest
from tiny_sets import planar, tar_gz

from pathlens.data import checksums, cifar10, cifar100, fashion_mnist, formats, mnist, store
from pathlens.errors import DataCorruptError, DataMissingError, PathlensWarning, StoreError, UnknownNameError


def flip_byte(path, at=-20):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_loads(tiny):
    for split in ("train", "test"):
        loaded = store.load_split(tiny.name, split)
        for key, array in loaded.arrays.items():
            assert np.array_equal(array, tiny.arrays[f"{split}_{key}"])
    return loaded


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    root = tmp_path / "mine"
    root.mkdir()
    monkeypatch.setenv("PATHLENS_DATA", str(root))
    return root


CIFAR10_FORMS = [("packed", False), ("python", False), ("python", True), ("binary", False), ("binary", True)]
CIFAR100_FORMS = [("python", False), ("python", True), ("binary", False), ("binary", True)]


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["idx.gz", "idx"])
def test_idx_sets_load(data_root, tiny_mnist, tiny_fashion, form):
    tiny_mnist.write(data_root, form)
    tiny_fashion.write(data_root, form)
    assert_loads(tiny_mnist)
    assert assert_loads(tiny_fashion).verified
    assert mnist().x.shape == (60, 1, 28, 28)
    assert not np.array_equal(mnist().y, fashion_mnist().y)


@pytest.mark.parametrize(("form", "archive"), CIFAR10_FORMS)
def test_cifar10_loads_in_every_form(data_root, tiny_cifar10, form, archive):
    tiny_cifar10.write(data_root, form, archive=archive)
    assert assert_loads(tiny_cifar10).verified
    data = cifar10()
    expected = tiny_cifar10.arrays["train_images"][3, 5, 7] / np.float32(255)
    assert np.allclose(data.x[3, :, 5, 7], expected, rtol=1e-6, atol=0), "channels first"


@pytest.mark.parametrize(("form", "archive"), CIFAR100_FORMS)
def test_cifar100_loads_in_every_form(data_root, tiny_cifar100, form, archive):
    tiny_cifar100.write(data_root, form, archive=archive)
    loaded = assert_loads(tiny_cifar100)
    assert loaded.verified is not (form == "binary" and not archive), "unpacked binary batches have no checksum"
    assert store.check("cifar100").state == ("ok" if loaded.verified else "unverified")
    assert cifar100(split="test").classes == 100
    coarse = cifar100(coarse=True)
    assert coarse.classes == 20 and np.array_equal(coarse.y, tiny_cifar100.arrays["train_coarse"])
    assert "label_names" not in coarse.info


def test_torchvision_layout_is_found(data_root, tiny_mnist, tiny_cifar10):
    written = tiny_mnist.write(data_root, "idx")
    (data_root / "MNIST").mkdir()
    written.rename(data_root / "MNIST" / "raw")
    batches = tiny_cifar10.write(data_root, "python")
    batches.rename(data_root / "cifar-10-batches-py")
    assert_loads(tiny_mnist)
    assert_loads(tiny_cifar10)


def test_only_the_needed_split_is_read(data_root, tiny_mnist, tiny_cifar10):
    folder = tiny_mnist.write(data_root, "idx.gz")
    (folder / "train-images-idx3-ubyte.gz").unlink()
    assert len(mnist(split="test")) == 20 and mnist(split="test").x_test is None
    with pytest.raises(DataMissingError, match=r"has 1 of 2 files; missing: train-images-idx3-ubyte\.gz"):
        mnist(split="train")
    parts = tiny_cifar10.write(data_root, "packed")
    (parts / "train_04.webps").unlink()
    assert len(cifar10(split="test")) == 10


def test_missing_says_everything(data_root, empty_cache):
    with pytest.raises(DataMissingError) as caught:
        cifar10()
    text = str(caught.value)
    for part in (
        str(data_root),
        str(empty_cache / "data"),
        "cifar-10-python.tar.gz",
        "cifar-10-binary.tar.gz",
        "train_00.webps",
        "data_batch_1",
        "pathlens data import",
    ):
        assert part in text
    with pytest.raises(UnknownNameError, match="fashion_mnist"):
        store.check("fashion")


def test_repacked_files_are_refused_unopened_and_pass_unpacked(data_root, tiny_mnist, tiny_cifar10, monkeypatch):
    """A checksum that is known decides before anything is decoded; what the files hold has checksums of its own."""
    folder = tiny_mnist.write(data_root, "idx.gz")
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    archive = tar_gz({f"./cifar-10-batches-py/{k}": v for k, v in reversed(tiny_cifar10.files["python"].items())})
    (data_root / "cifar-10-python.tar.gz").write_bytes(archive)
    with monkeypatch.context() as patch:
        for module, name in ((formats, "gunzip"), (store.tarfile, "open"), (formats, "read_cifar_python")):
            patch.setattr(module, name, None)
        assert [s.state for s in store.status(["mnist", "cifar10"])] == ["corrupt", "corrupt"]
        for load in (lambda: mnist(split="test"), cifar10, lambda: store.import_from(data_root, ["cifar10"])):
            with pytest.raises(DataCorruptError, match="unpack it and import the files"):
                load()
    for name, data in tiny_mnist.files["idx"].items():
        (folder / f"{name}.gz").unlink()
        (folder / name).write_bytes(data)
    (data_root / "cifar-10-python.tar.gz").unlink()
    tiny_cifar10.write(data_root, "python")
    assert assert_loads(tiny_mnist).verified and assert_loads(tiny_cifar10).verified


def test_gzipped_files_without_their_ending_are_read(data_root, tiny_mnist):
    """No checksum is known of them, so what they hold decides."""
    folder = tiny_mnist.write(data_root, "idx")
    for name, data in tiny_mnist.files["idx"].items():
        (folder / name).write_bytes(gzip.compress(data))
    assert assert_loads(tiny_mnist).verified


# --- corruption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-30]),
        lambda p: flip_byte(p, 12),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(gzip.compress(gzip.decompress(p.read_bytes())[:-1])),
    ],
)
def test_damaged_idx_is_named(data_root, tiny_mnist, damage):
    folder = tiny_mnist.write(data_root, "idx.gz")
    path = folder / "train-images-idx3-ubyte.gz"
    damage(path)
    before = snapshot(data_root)
    with pytest.raises(DataCorruptError, match="sha256 is") as caught:
        mnist()
    text = str(caught.value)
    assert str(path) in text and tiny_mnist.form("idx.gz").digests[path.name] in text
    assert snapshot(data_root) == before
    assert store.status(["mnist"])[0].state == store.check("mnist").state == "corrupt"
    assert len(mnist(split="test")) == 20, "the other split is intact"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda data: gzip.compress(data)[:-30], "gzip stream is broken"),
        (lambda data: b"", "magic"),
        (lambda data: data[:-1], "promises"),
        (lambda data: data + bytes(10**6), "expected at most"),
        (lambda data: gzip.compress(data + bytes(10**6)), "more than 47056 bytes"),
    ],
)
def test_damaged_unpacked_idx_is_named(data_root, tiny_mnist, damage, part):
    path = tiny_mnist.write(data_root, "idx") / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataCorruptError, match=part) as caught:
        mnist()
    assert str(path) in str(caught.value)
    assert store.check("mnist").state == "corrupt"
    assert len(mnist(split="test")) == 20, "the other split is intact"


def test_swapped_sets_are_noticed(data_root, tiny_mnist, tiny_fashion):
    """Fashion-MNIST files in MNIST's folder: every file is valid, and the wrong one."""
    tiny_fashion.write(data_root, "idx").rename(data_root / "mnist")
    with pytest.raises(DataCorruptError, match="decoded train images have sha256"):
        mnist()


@pytest.mark.parametrize("file", ["train_03.webps", "labels.npz"])
def test_damaged_packed_part_is_named(data_root, tiny_cifar10, file):
    folder = tiny_cifar10.write(data_root, "packed")
    flip_byte(folder / file)
    with pytest.raises(DataCorruptError, match=file) as caught:
        cifar10(split="train")
    assert tiny_cifar10.form("packed").digests[file] in str(caught.value)
    assert store.status(["cifar10"])[0].state == store.check("cifar10").state == "corrupt"


@pytest.mark.parametrize("tiny_name", ["tiny_cifar10", "tiny_cifar100"])
@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_archives_are_named(request, data_root, tiny_name, form, damage):
    tiny = request.getfixturevalue(tiny_name)
    path = tiny.write(data_root, form, archive=True)
    path.write_bytes(path.read_bytes()[:3000]) if damage == "cut" else flip_byte(path, 5000)
    with pytest.raises(DataCorruptError, match=path.name):
        store.load_split(tiny.name, "train")
    assert store.status([tiny.name])[0].state == "corrupt"


def test_malicious_batch_is_refused(data_root, tiny_cifar10, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = tiny_cifar10.write(data_root, "python")
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": Attack(), "labels": []}))
    with pytest.raises(DataCorruptError, match=r"data_batch_2: md5 is .*, expected "):
        cifar10()
    assert not (tmp_path / "pwned").exists()


def test_another_archive_is_refused(data_root, tiny_cifar10):
    (data_root / "cifar-10-binary.tar.gz").write_bytes(tar_gz({"../cifar-10-batches-bin/data_batch_1.bin": b"x"}))
    with pytest.raises(DataCorruptError, match=r"cifar-10-binary\.tar\.gz: md5 is .*, expected "):
        cifar10()


def test_cifar100_with_another_pixel_is_refused(data_root, tiny_cifar100):
    """The batch must be the published one: no array checksum stands behind it."""
    folder = tiny_cifar100.write(data_root, "python")
    batch = pickle.loads(tiny_cifar100.files["python"]["train"])
    batch[b"data"][0, 0] ^= 1
    (folder / "train").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(DataCorruptError, match=r"cifar-100-python/train: md5") as caught:
        cifar100(split="train")
    assert tiny_cifar100.form("python").digests["train"] in str(caught.value)
    assert len(cifar100(split="test")) == 100, "the other batch is the published one"


def test_unbalanced_cifar100_is_refused(data_root, tiny_cifar100):
    folder = tiny_cifar100.write(data_root, "binary")
    images, n = tiny_cifar100.arrays["train_images"], 200
    (folder / "train.bin").write_bytes(np.hstack((np.zeros((n, 2), np.uint8), planar(images))).tobytes())
    with pytest.raises(DataCorruptError, match="occur 0 to 200 times, expected 2 each"):
        cifar100()


# --- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny_name", ["tiny_cifar10", "tiny_cifar100"])
def test_cache_is_used_checked_and_rebuilt(request, data_root, empty_cache, tiny_name):
    tiny = request.getfixturevalue(tiny_name)
    path = tiny.write(data_root, "python", archive=True)
    store.load_split(tiny.name, "train")
    cached = empty_cache / "decoded" / f"{tiny.name}-train-images.npy"
    good = cached.read_bytes()
    assert store.load_split(tiny.name, "train").source == "decoded cache"
    for damage in (lambda: flip_byte(cached), lambda: cached.write_bytes(good[:100]), lambda: cached.write_bytes(b"")):
        damage()
        loaded = store.load_split(tiny.name, "train")
        assert loaded.source == "python (archive)", "a damaged cache is not trusted"
        assert np.array_equal(loaded.arrays["images"], tiny.arrays["train_images"])
        assert cached.read_bytes() == good, "and is rebuilt"
    store.load_split(tiny.name, "test")
    path.unlink()
    assert_loads(tiny)
    assert store.status([tiny.name])[0].form == "decoded"
    flip_byte(cached)
    assert store.status([tiny.name])[0].state == "absent"
    assert not list(empty_cache.rglob("*.part")), "no temporary file is left"


def test_unverified_arrays_are_not_cached(data_root, empty_cache, tiny_cifar100):
    tiny_cifar100.write(data_root, "binary")
    store.load_split("cifar100", "train")
    assert not (empty_cache / "decoded").exists()


def test_unwritable_cache_warns(data_root, empty_cache, tiny_cifar10):
    tiny_cifar10.write(data_root, "binary")
    empty_cache.parent.mkdir()
    empty_cache.write_text("a file where the folder should be")
    with pytest.warns(PathlensWarning, match="XDG_CACHE_HOME"):
        loaded = store.load_split("cifar10", "test")
    assert np.array_equal(loaded.arrays["images"], tiny_cifar10.arrays["test_images"])


# --- status and import ------------------------------------------------------------------------------------------


def test_status_of_nothing():
    states = store.status()
    assert [s.name for s in states] == ["mnist", "fashion_mnist", "cifar10", "cifar100"]
    assert {s.state for s in states} == {"absent"} and all("wanted" in s.detail for s in states)


def test_status_without_checksums_points_to_check(data_root, tiny_mnist):
    tiny_mnist.write(data_root, "idx")
    quick = store.status(["mnist"])[0]
    assert quick.state == "unverified" and "pathlens data check mnist" in quick.detail
    assert store.check("mnist").state == "ok"


@pytest.mark.parametrize(("form", "archive"), CIFAR10_FORMS)
def test_import_round_trip_cifar10(tmp_path, empty_cache, tiny_cifar10, form, archive):
    origin = tmp_path / "downloads"
    place = tiny_cifar10.write(origin, form, archive=archive)
    for given in (origin, place):  # the folder above, and the folder or archive itself
        (done,) = store.import_from(given)
        assert done.name == "cifar10" and done.verified and done.folder.is_relative_to(empty_cache / "data")
        assert sum(p.stat().st_size for p in done.folder.iterdir() if p.is_file()) == done.bytes
    assert_loads(tiny_cifar10)
    assert store.check("cifar10").state == "ok"
    assert not list(empty_cache.rglob("*.part"))


def test_import_into_a_folder_that_cannot_be_written(tmp_path, empty_cache, tiny_mnist):
    tiny_mnist.write(tmp_path / "downloads", "idx")
    empty_cache.mkdir(parents=True, exist_ok=True)
    (empty_cache / "data").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=r"data cannot be written: .* Set XDG_CACHE_HOME"):
        store.import_from(tmp_path / "downloads")


@pytest.mark.parametrize(("form", "archive"), CIFAR100_FORMS)
def test_import_round_trip_cifar100(tmp_path, tiny_cifar100, form, archive):
    place = tiny_cifar100.write(tmp_path / "downloads", form, archive=archive)
    (done,) = store.import_from(str(place), names=["cifar100"])
    assert done.verified is not (form == "binary" and not archive)
    assert_loads(tiny_cifar100)


@pytest.mark.parametrize("form", ["idx", "idx.gz"])
def test_import_tells_mnist_from_fashion(tmp_path, tiny_mnist, tiny_fashion, form):
    """Both have the same file names; a folder that does not say which is told by checksum."""
    for tiny, folder in ((tiny_fashion, tmp_path / "a"), (tiny_mnist, tmp_path / "b")):
        folder.mkdir()
        for name, data in tiny.files[form].items():
            (folder / name).write_bytes(data)
        (done,) = store.import_from(folder)
        assert done.name == tiny.name
        assert_loads(tiny)
    with pytest.raises(DataCorruptError, match="names of Fashion-MNIST"):
        store.import_from(tmp_path / "b", names=["fashion-mnist"])


def test_import_of_a_renamed_archive(tmp_path, tiny_cifar10):
    path = tmp_path / "cifar-10-python (1).tar.gz"
    path.write_bytes(tiny_cifar10.archives["python"])
    (done,) = store.import_from(path)
    assert done.files == ("cifar-10-python.tar.gz",)
    assert_loads(tiny_cifar10)


def test_import_checks_before_it_copies(tmp_path, empty_cache, tiny_mnist, tiny_cifar10):
    origin = tmp_path / "downloads"
    tiny_mnist.write(origin, "idx.gz")
    folder = tiny_cifar10.write(origin, "packed")
    flip_byte(folder / "test_01.webps")
    with pytest.raises(DataCorruptError, match=r"test_01\.webps"):
        store.import_from(origin)
    assert not empty_cache.exists(), "not even the intact set is copied"
    assert [done.name for done in store.import_from(origin, names=["mnist"])] == ["mnist"]


def test_import_refuses_what_it_does_not_know(tmp_path, empty_cache):
    (tmp_path / "empty").mkdir()
    (tmp_path / "some.tar.gz").write_bytes(b"text")
    for path in ("empty", "some.tar.gz", "nowhere"):
        with pytest.raises(DataMissingError):
            store.import_from(tmp_path / path)
    with pytest.raises(UnknownNameError):
        store.import_from(tmp_path / "empty", names=["imagenet"])
    assert not empty_cache.exists()


def test_import_replaces_a_damaged_copy(tmp_path, tiny_mnist):
    origin = tmp_path / "downloads"
    tiny_mnist.write(origin, "idx.gz")
    (done,) = store.import_from(origin)
    flip_byte(done.folder / "train-images-idx3-ubyte.gz")
    assert store.check("mnist").state == "corrupt"
    store.import_from(origin)
    assert store.check("mnist").state == "ok"


@pytest.mark.parametrize("failure", ["disk full", "wrong copy"])
def test_failed_import_leaves_the_old_copy(tmp_path, empty_cache, monkeypatch, tiny_mnist, failure):
    origin = tmp_path / "downloads"
    tiny_mnist.write(origin, "idx.gz")
    store.import_from(origin)
    before = snapshot(empty_cache)

    def copyfile(_, target):
        target.write_bytes(b"half")
        if failure == "disk full":
            raise OSError("No space left on device")

    monkeypatch.setattr(store.shutil, "copyfile", copyfile)
    with pytest.raises(OSError if failure == "disk full" else DataCorruptError):
        store.import_from(origin)
    assert snapshot(empty_cache) == before, "no file changed, and no temporary one is left"


def test_import_replaces_by_renaming(tmp_path, tiny_mnist):
    """Whoever reads the old copy while it is replaced goes on reading the old copy."""
    origin = tmp_path / "downloads"
    tiny_mnist.write(origin, "idx.gz")
    (done,) = store.import_from(origin)
    path = done.folder / "train-images-idx3-ubyte.gz"
    flip_byte(path)
    old = path.read_bytes()
    with path.open("rb") as reader:
        store.import_from(origin)
        assert reader.read() == old != path.read_bytes()


def test_published_checksums_are_well_formed():
    for facts in checksums.SETS.values():
        for form in facts.forms:
            digests = [*form.digests.values(), *([form.archive_digest] if form.archive_digest else [])]
            assert all(re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}", digest) for digest in digests)
            assert set(form.digests) <= set(form.files())
            assert bool(form.archive) == bool(form.archive_digest)
            assert form.name != "python" or set(form.digests) == set(form.files()), "a pickle needs a checksum"
        assert all(len(value) == 64 for value in facts.arrays.values())
        assert len(set(facts.label_names)) == facts.classes
