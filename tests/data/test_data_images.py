"""The image sets as tensors: on tiny made-up files, and on the real ones where they are at hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from pathlens.data import (
    binary_mnist,
    checksums,
    cifar10,
    digits,
    fashion_mnist,
    load,
    mnist,
    mnist_random_labels,
    mnist_random_pixels,
    modified_fashion_mnist,
    store,
)
from pathlens.errors import EmptyDataError, LabelError, OptionError

# --- tiny -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path, monkeypatch, tiny_mnist, tiny_fashion, tiny_cifar10):
    monkeypatch.setenv("PATHLENS_DATA", str(tmp_path / "mine"))
    for tiny, form in ((tiny_mnist, "idx"), (tiny_fashion, "idx"), (tiny_cifar10, "binary")):
        tiny.write(tmp_path / "mine", form)
    return {"mnist": tiny_mnist.arrays, "fashion": tiny_fashion.arrays, "cifar10": tiny_cifar10.arrays}


def test_shapes_scale_and_order(made):
    data = mnist()
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert np.array_equal((data.x * 255).round().numpy()[:, 0], made["mnist"]["train_images"])
    assert float(data.x.min()) == 0 and float(data.x.max()) == 1
    assert mnist(flatten=True).x.shape == (60, 784)
    planes = (cifar10().x * 255).round().numpy()
    assert np.array_equal(planes.transpose(0, 2, 3, 1), made["cifar10"]["train_images"])
    assert cifar10(flatten=True).x_test.shape == (10, 3072)
    with pytest.raises(OptionError, match="'both', 'train' or 'test'"):
        mnist(split="validation")


def test_standardise_uses_train_statistics(made):
    """Against the plain float64 computation, for the test rows as well, and for the test split by itself."""
    pixels = made["cifar10"]["train_images"].astype(np.float64) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    expected = ((made["cifar10"]["test_images"] / 255 - mean) / std).transpose(0, 3, 1, 2)
    both, alone = cifar10(standardise=True), cifar10(standardise=True, split="test")
    for x in (both.x_test, alone.x):
        np.testing.assert_allclose(x, expected, rtol=0, atol=2e-6)
    assert both.info["mean"] == pytest.approx(mean, abs=1e-14) and both.info["std"] == pytest.approx(std, abs=1e-14)
    assert float(both.x.mean()) == pytest.approx(0, abs=1e-6) and alone.x_test is None


def test_binary_mnist(made):
    data, full = binary_mnist(flatten=True), mnist(flatten=True)
    keep = (full.y == 4) | (full.y == 7)
    assert torch.equal(data.x, full.x[keep]) and data.task == "regression"
    assert torch.equal(data.y[:, 0], torch.where(full.y[keep] == 4, -1.0, 1.0))
    assert len(data.x_test) == 4
    swapped = binary_mnist((7, 4), labels=(0.0, 2.0))
    assert torch.equal(swapped.y[:, 0], torch.where(full.y[keep] == 7, 0.0, 2.0))
    classes = binary_mnist(labels=None)
    assert classes.classes == 2 and torch.equal(classes.y, (full.y[keep] == 7).long())
    for wrong in ((4, 4), (4, 10), (-1, 3)):
        with pytest.raises(LabelError):
            binary_mnist(wrong)


def test_random_labels(made):
    data, full = mnist_random_labels(seed=1), mnist()
    assert torch.equal(data.x, full.x) and torch.equal(data.marks["original"], full.y)
    assert 0.5 < float((data.y != full.y).float().mean()) < 1 and torch.equal(data.y_test, full.y_test)
    assert torch.equal(data.y, mnist_random_labels(seed=1).y)
    assert not torch.equal(data.y, mnist_random_labels(seed=2).y)
    assert torch.equal(mnist_random_labels(split="test").y, full.y_test)


def test_random_pixels(made):
    data, full = mnist_random_pixels(seed=1, flatten=True), mnist(flatten=True)
    for mixed, plain in ((data.x, full.x), (data.x_test, full.x_test)):
        assert torch.equal(mixed.sort(1).values, plain.sort(1).values), "the same pixels"
        assert float((mixed == plain).float().mean()) < 0.05, "elsewhere"
    assert torch.equal(data.y, full.y) and torch.equal(mnist(flatten=True).x, full.x)


def test_random_pixels_are_the_same_whichever_split_is_read(made):
    both = mnist_random_pixels(seed=1)
    assert torch.equal(mnist_random_pixels(seed=1, split="train").x, both.x)
    assert torch.equal(mnist_random_pixels(seed=1, split="test").x, both.x_test)


def test_random_pixels_permute_each_image_by_itself(made, monkeypatch):
    """On equal images, so that only the permutations can differ."""
    full = mnist(flatten=True)
    ramp = torch.arange(784.0).expand(60, -1).clone()
    monkeypatch.setattr(
        "pathlens.data.images.mnist", lambda **_: type(full)(ramp, full.y, task="classification", classes=10)
    )
    assert len(mnist_random_pixels().x.unique(dim=0)) == 60


def test_modified_fashion_refuses(made):
    for wrong in ((5, 5), (), (3, 11)):
        with pytest.raises(LabelError):
            modified_fashion_mnist(wrong)
    with pytest.raises(OptionError):
        modified_fashion_mnist(clusters=0)
    with pytest.raises(EmptyDataError, match="6 training rows, too few for 7"):
        modified_fashion_mnist(clusters=7)


def test_modified_fashion_empty_cluster(made, monkeypatch):
    """Five equal images cannot fill two clusters; k-means warns and leaves one empty."""
    full = fashion_mnist()
    x = full.x.clone()
    x[full.y == 9] = 0.5
    monkeypatch.setattr(
        "pathlens.data.images.fashion_mnist",
        lambda **_: type(full)(x, full.y, full.x_test, full.y_test, task="classification", classes=10, info=full.info),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's ConvergenceWarning is the case under test
        with pytest.raises(EmptyDataError, match="of class 9 has no training row"):
            modified_fashion_mnist(clusters=2)


def test_modified_fashion_structure(made):
    data = modified_fashion_mnist((0, 1, 2, 3, 4), clusters=2, seed=4)
    simple, original, cluster = (data.marks[key] for key in ("simple", "original", "cluster"))
    assert torch.equal(simple, original >= 5) and torch.equal(cluster < 0, simple)
    assert torch.equal(data.y[simple], original[simple] - 5), "simple classes are renumbered in their order"
    labels = torch.tensor(data.info["cluster_labels"])
    assert torch.equal(labels.bincount(minlength=10), torch.tensor([0] * 5 + [2] * 5)), "each label equally often"
    assert torch.equal(data.y[~simple], labels[cluster[~simple]])
    assert torch.equal(cluster[~simple] // 2, original[~simple]), "clusters stay within a class"
    train, test = (modified_fashion_mnist((0, 1, 2, 3, 4), clusters=2, seed=4, split=s) for s in ("train", "test"))
    assert torch.equal(train.y, data.y) and torch.equal(test.y, data.y_test) and train.x_test is None
    assert torch.equal(test.marks["cluster"], data.marks_test["cluster"])


def test_digits():
    data = digits(flatten=True)
    assert data.x.shape == (1437, 64) and data.x_test.shape == (360, 64)
    assert float(data.x.max()) == 1 and float(data.x.min()) == 0
    assert int(data.y.bincount().min()) > 100 and int(data.y_test.bincount().min()) > 25
    assert torch.equal(load("digits").x, digits().x)
    assert len(digits(split="test")) == 360
    flat = digits(standardise=True).x
    assert float(flat.mean()) == pytest.approx(0, abs=1e-5) and float(flat.std()) == pytest.approx(1, abs=1e-4)


# --- real -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_idx_sets(real, name):
    real(name)
    data = load(name, standardise=True)
    assert data.x.shape == (60000, 1, 28, 28) and data.x_test.shape == (10000, 1, 28, 28)
    known = {"mnist": ([5, 0, 4, 1, 9], 0.1307, 0.3081), "fashion_mnist": ([9, 0, 0, 3, 0], 0.2860, 0.3530)}
    first, mean, std = known[name]
    assert data.y[:5].tolist() == first and data.info["verified"]
    assert data.info["mean"] == pytest.approx([mean], abs=5e-5) and data.info["std"] == pytest.approx([std], abs=5e-5)


def test_real_binary_mnist_counts(real):
    real("mnist")
    data = binary_mnist()
    assert (len(data), len(data.x_test)) == (5842 + 6265, 982 + 1028)


def test_real_cifar10_test_split(real, empty_cache):
    real("cifar10")
    data = cifar10(split="test")
    assert data.x.shape == (10000, 3, 32, 32) and data.y[:8].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    assert torch.equal(data.y.bincount(), torch.full((10,), 1000))
    again = cifar10(split="test")
    assert again.info["source"] == "decoded cache" and torch.equal(again.x, data.x)
    assert store.status(["cifar10"])[0].state == "ok"


@pytest.mark.slow
def test_real_cifar10_complete(real):
    real("cifar10")
    assert store.check("cifar10").state == "ok"
    data = cifar10(split="train", standardise=True)
    assert data.info["mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert data.info["std"] == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)


def test_real_modified_fashion(real):
    real("fashion_mnist")
    data = modified_fashion_mnist(flatten=True)
    simple = data.marks["simple"]
    assert int(simple.sum()) == 30000 and int(data.marks_test["simple"].sum()) == 5000
    assert len(data.info["cluster_sizes"]) == 25 and min(data.info["cluster_sizes"]) > 0
    assert torch.equal(data.y[simple], data.marks["original"][simple]), "the first five classes keep their labels"
    norms = (data.x**2).sum(1)
    assert float(norms[simple].mean()) == pytest.approx(180, abs=1)
    assert float(norms[~simple].mean()) == pytest.approx(143, abs=1)
    # a test row goes to the centre that the training rows define: nearest of the five of its class
    number = data.marks["cluster"]
    centres = torch.stack([data.x[number == k].mean(0) for k in range(25)])
    rows = (~data.marks_test["simple"]).nonzero().squeeze(1)
    original = data.marks_test["original"][rows]
    distance = torch.cdist(data.x_test[rows], centres).reshape(len(rows), 5, 5)
    nearest = distance[torch.arange(len(rows)), original - 5].argmin(1) + 5 * (original - 5)
    assert float((nearest == data.marks_test["cluster"][rows]).float().mean()) > 0.99


def test_real_truncated_file_is_noticed(real, tmp_path, monkeypatch):
    folder = real("mnist") / "mnist"
    if not (folder / "t10k-labels-idx1-ubyte.gz").is_file():
        pytest.skip("MNIST is here in another form")
    broken = tmp_path / "broken" / "mnist"
    broken.mkdir(parents=True)
    for name in checksums.MNIST.forms[0].splits["test"]:
        (broken / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setenv("PATHLENS_DATA", str(tmp_path / "broken"))
    assert len(mnist(split="test")) == 10000
    path = broken / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(store.DataCorruptError, match="t10k-labels"):
        mnist(split="test")
