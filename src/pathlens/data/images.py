"""The published image sets as tensors, and the variants that the papers make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pathlens.data import store
from pathlens.data.dataset import DataSet
from pathlens.data.formats import Bytes
from pathlens.errors import EmptyDataError, LabelError, OptionError
from pathlens.progress import track

SplitChoice = Literal["both", "train", "test"]


def mnist(*, split: SplitChoice = "both", flatten: bool = False, standardise: bool = False) -> DataSet:
    """MNIST: 60,000 + 10,000 handwritten digits, 28 × 28, ten classes, checked against the published checksums.

    Parameters
    ----------
    split : {"both", "train", "test"}
        Which rows to read. With "test", the test rows are `x` and `y`.
    flatten : bool
        x of shape (n, d) instead of (n, channels, height, width).
    standardise : bool
        Per channel, (x - mean) / std with the mean and standard deviation of the *training* pixels, whatever the split.
        Otherwise pixels are v / 255, in [0, 1].

    Returns
    -------
    DataSet
        x float32, y int64. `info` names the form that was read, and whether a checksum confirms it.

    Raises
    ------
    DataMissingError, DataCorruptError
        See `pathlens.data.store`.

    Examples
    --------
    >>> mnist(flatten=True)  # doctest: +SKIP
    DataSet 'MNIST': classification, 10 classes
      train x (60000, 784) float32, y (60000,) int64
      test  x (10000, 784) float32, y (10000,) int64
      info  source=idx.gz, verified=True, pixels=[0, 1]
    """
    return _load("mnist", split, flatten, standardise)


def fashion_mnist(*, split: SplitChoice = "both", flatten: bool = False, standardise: bool = False) -> DataSet:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28 × 28, ten classes; options as for `mnist`."""
    return _load("fashion_mnist", split, flatten, standardise)


def cifar10(*, split: SplitChoice = "both", flatten: bool = False, standardise: bool = False) -> DataSet:
    """CIFAR-10: 50,000 + 10,000 colour photographs, 3 × 32 × 32, ten classes; options as for `mnist`.

    The first load decodes (about five seconds for the packed form) and keeps the arrays in the user's cache.
    """
    return _load("cifar10", split, flatten, standardise)


def cifar100(
    *, split: SplitChoice = "both", flatten: bool = False, standardise: bool = False, coarse: bool = False
) -> DataSet:
    """CIFAR-100: as `cifar10`, with 100 classes, or the 20 superclasses with ``coarse=True``.

    Checked by the published MD5 of the archives or of the Python batches. Unpacked binary batches have no published
    checksum: they are checked for shape, label range and balance only, and ``info["verified"]`` is then False.
    """
    return _load("cifar100", split, flatten, standardise, coarse)


def binary_mnist(
    classes: tuple[int, int] = (4, 7),
    *,
    labels: tuple[float, float] | None = (-1.0, 1.0),
    split: SplitChoice = "both",
    flatten: bool = False,
    standardise: bool = False,
) -> DataSet:
    """Two digits of MNIST with targets ±1 for the squared loss, as in the DGN and NPF papers (4 against 7).

    Parameters
    ----------
    classes : (int, int)
        The two digits.
    labels : (float, float) or None
        Their targets, as regression; None gives classification with labels 0 and 1.
    split, flatten, standardise
        As for `mnist`; standardising uses all training digits.
    """
    a, b = classes
    if a == b or not {a, b} <= set(range(10)):
        raise LabelError(f"binary_mnist: classes={classes}, expected two different digits from 0 to 9.")
    two = mnist(split=split, flatten=flatten, standardise=standardise).only(a, b)
    info = {**two.info, "labels": str(labels)}
    if labels is None:
        return replace(two, info=info)
    values = torch.tensor(labels, dtype=two.x.dtype)[:, None]
    y_test = None if two.y_test is None else values[two.y_test]
    return replace(two, y=values[two.y], y_test=y_test, task="regression", classes=None, info=info)


def mnist_random_labels(seed: int = 0, **options: Any) -> DataSet:
    """MNIST with training labels drawn uniformly and independently from the ten classes; the test labels stay true.

    Mark ``original``: the true labels. Further options as for `mnist`.
    """
    full = mnist(**options)
    if options.get("split") == "test":
        return full
    y = torch.randint(10, full.y.shape, generator=torch.Generator().manual_seed(seed))
    return replace(full, y=y, name="MNIST, random labels", info={**full.info, "seed": seed}, marks={"original": full.y})


def mnist_random_pixels(seed: int = 0, **options: Any) -> DataSet:
    """MNIST with the pixels of each image, train and test, permuted: another permutation for each image.

    Further options as for `mnist`. O(n d).
    """
    full = mnist(**options)
    rng = np.random.default_rng(seed)
    if options.get("split") == "test":  # their orders are drawn after those of the training rows
        rng.permuted(np.zeros((store.facts_of("mnist").rows["train"], full.d), np.uint8), axis=1)

    def shuffle(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1).numpy()
        return torch.from_numpy(rng.permuted(flat, axis=1)).reshape(x.shape)

    return replace(
        full,
        x=shuffle(full.x),
        x_test=None if full.x_test is None else shuffle(full.x_test),
        name="MNIST, random pixels",
        info={**full.info, "seed": seed},
    )


def modified_fashion_mnist(
    scrambled: Sequence[int] = (5, 6, 7, 8, 9),
    *,
    clusters: int = 5,
    seed: int = 0,
    split: SplitChoice = "both",
    flatten: bool = False,
    standardise: bool = False,
    restarts: int = 1,
) -> DataSet:
    """Fashion-MNIST with a simple and a complex part: some classes are cut into clusters whose labels are shuffled.

    Half-space paper, section 5. The classes not in `scrambled` keep one label each, 0, 1, … in their order. Each
    scrambled class is cut into `clusters` clusters by k-means on its *training* pixels, and test rows go to the
    nearest centre of their class. The clusters of all scrambled classes (25 by default) then get the remaining labels
    at random, each label equally often. The paper does not name its clustering; k-means is our choice.

    Parameters
    ----------
    scrambled : sequence of int
        The classes to cut up; the paper's are 5 to 9. Swapping them for (0, 1, 2, 3, 4) is the control.
    clusters : int
        Clusters in each of them.
    seed : int
        Seeds k-means and the labels.
    split, flatten, standardise
        As for `mnist`. The training rows are read in any case: the clusters are fitted on them.
    restarts : int
        k-means runs per class, best kept.

    Returns
    -------
    DataSet
        Ten classes. Marks: ``simple`` (n,) bool, ``original`` (n,) the published label, ``cluster`` (n,) number of the
        cluster among all, -1 for simple rows. ``info["cluster_labels"]``: label of each cluster.

    Raises
    ------
    EmptyDataError
        A cluster has no training row.

    Notes
    -----
    About two seconds on one core. The same seed gives the same clusters on one machine; another scikit-learn version
    or thread count may move a few rows, which ``info["cluster_sizes"]`` shows.
    """
    cut = sorted(set(scrambled))
    if len(cut) != len(scrambled) or not cut or not set(cut) <= set(range(10)):
        raise LabelError(f"modified_fashion_mnist: scrambled={tuple(scrambled)}, expected distinct classes, 0 to 9.")
    if clusters < 1 or restarts < 1:
        raise OptionError(f"modified_fashion_mnist: clusters={clusters}, restarts={restarts}, expected 1 or more.")
    full = fashion_mnist(split="both", flatten=flatten, standardise=standardise)
    assert full.x_test is not None and full.y_test is not None
    cluster, cluster_test = _cluster(full.x, full.y, full.x_test, full.y_test, cut, clusters, seed, restarts)
    kept = [k for k in range(10) if k not in cut]
    # each of the remaining labels, `clusters` times, in random order over the clusters of all scrambled classes
    pool = torch.arange(len(kept), 10).repeat_interleave(clusters)
    cluster_labels = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))]
    simple_labels = torch.zeros(10, dtype=torch.int64)
    simple_labels[kept] = torch.arange(len(kept))

    def relabel(y: Tensor, number: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        simple = number < 0
        new = torch.where(simple, simple_labels[y], cluster_labels[number.clamp(min=0)])
        return new, {"simple": simple, "original": y, "cluster": number}

    y, marks = relabel(full.y, cluster)
    y_test, marks_test = relabel(full.y_test, cluster_test)
    info = {
        **full.info,
        "scrambled": str(tuple(cut)),
        "clusters": clusters,
        "seed": seed,
        "cluster_labels": cluster_labels.tolist(),
        "cluster_sizes": torch.bincount(cluster[cluster >= 0]).tolist(),
    }
    info.pop("label_names")  # the new labels are not the published classes
    name = "modified Fashion-MNIST"
    if split == "test":
        return replace(full, x=full.x_test, y=y_test, x_test=None, y_test=None, name=name, info=info, marks=marks_test)
    if split == "train":
        return replace(full, y=y, x_test=None, y_test=None, name=name, info=info, marks=marks)
    return replace(full, y=y, y_test=y_test, name=name, info=info, marks=marks, marks_test=marks_test)


def _cluster(
    x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, cut: list[int], clusters: int, seed: int, restarts: int
) -> tuple[Tensor, Tensor]:
    """The cluster number of each row, -1 outside `cut`; class j of `cut` has j·clusters … (j+1)·clusters - 1."""
    from sklearn.cluster import KMeans

    found, found_test = torch.full_like(y, -1), torch.full_like(y_test, -1)
    for j, k in enumerate(track(cut, "clustering Fashion-MNIST")):
        rows, rows_test = (y == k).nonzero().squeeze(1), (y_test == k).nonzero().squeeze(1)
        if len(rows) < clusters:
            raise EmptyDataError(
                f"modified_fashion_mnist: class {k} has {len(rows)} training rows, too few for "
                f"{clusters} clusters. Ask for fewer."
            )
        model = KMeans(clusters, n_init=restarts, random_state=seed).fit(x[rows].flatten(1).numpy())
        sizes = np.bincount(model.labels_, minlength=clusters)
        if sizes.min() == 0:
            raise EmptyDataError(
                f"modified_fashion_mnist: cluster {int(sizes.argmin())} of class {k} has no training "
                f"row. Ask for fewer than {clusters} clusters, or another seed."
            )
        found[rows] = torch.from_numpy(model.labels_).long() + j * clusters
        if len(rows_test):
            nearest = model.predict(x_test[rows_test].flatten(1).numpy())
            found_test[rows_test] = torch.from_numpy(nearest).long() + j * clusters
    return found, found_test


def digits(*, split: SplitChoice = "both", flatten: bool = False, standardise: bool = False) -> DataSet:
    """scikit-learn's handwritten digits: 1,437 + 360 images, 8 × 8, ten classes. Always available.

    The split is fixed: the last 360 rows are the test set. Rows are ordered by writer, so those are largely of other
    writers, which is harder and more realistic than a shuffled split. Pixels are v / 16, in [0, 1]; options as for
    `mnist`.

    Examples
    --------
    >>> digits()
    DataSet 'digits': classification, 10 classes
      train x (1437, 1, 8, 8) float32, y (1437,) int64
      test  x (360, 1, 8, 8) float32, y (360,) int64
      info  source=scikit-learn, verified=True, pixels=[0, 1]
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    cuts = {"train": slice(0, 1437), "test": slice(1437, None)}
    parts = {
        key: store.Loaded({"images": images[cut], "labels": labels[cut]}, "scikit-learn", True)
        for key, cut in cuts.items()
    }
    names = tuple("0123456789")
    return _assemble("digits", parts, split, flatten, standardise, label_names=names, classes=10, top=16)


def _load(name: str, split: SplitChoice, flatten: bool, standardise: bool, coarse: bool = False) -> DataSet:
    facts = store.facts_of(name)
    # standardising the test rows needs the training rows' statistics
    needed = [part for part in store.BOTH if split in ("both", part) or (standardise and part == "train")]
    parts = {part: store.load_split(name, part) for part in needed}
    if coarse:
        parts = {
            part: replace(found, arrays=found.arrays | {"labels": found.arrays["coarse"]})
            for part, found in parts.items()
        }
    names, classes = ((), facts.coarse_classes) if coarse else (facts.label_names, facts.classes)
    return _assemble(facts.title, parts, split, flatten, standardise, label_names=names, classes=classes)


def _assemble(
    name: str,
    parts: Mapping[Any, store.Loaded],
    split: SplitChoice,
    flatten: bool,
    standardise: bool,
    *,
    label_names: tuple[str, ...],
    classes: int,
    top: int = 255,
) -> DataSet:
    """The rows of the splits as a DataSet; `top` is the largest value of a pixel."""
    if split not in ("both", "train", "test"):
        raise OptionError(f"{name}: split={split!r}, expected 'both', 'train' or 'test'.")
    shown = [part for part in ("train", "test") if split in ("both", part)]
    first = parts[shown[0]]
    info: dict[str, Any] = {
        "source": first.source,
        "verified": all(parts[part].verified for part in shown),
        "pixels": "standardised" if standardise else "[0, 1]",
    }
    if label_names:
        info["label_names"] = label_names
    if standardise:
        mean, std = _statistics(parts["train"].arrays["images"], top)
        info |= {"mean": mean.tolist(), "std": std.tolist()}

    def rows(part: str) -> tuple[Tensor, Tensor]:
        x = _to_tensor(parts[part].arrays["images"]).div_(top)
        if standardise:
            x.sub_(mean.float()[:, None, None]).div_(std.float()[:, None, None])
        return x.flatten(1) if flatten else x, torch.from_numpy(parts[part].arrays["labels"].astype(np.int64))

    x, y = rows(shown[0])
    x_test, y_test = rows("test") if split == "both" else (None, None)
    return DataSet(x, y, x_test, y_test, name=name, task="classification", classes=classes, info=info)


def _to_tensor(images: Bytes) -> Tensor:
    """(n, h, w) or (n, h, w, channels) bytes as float32 (n, channels, h, w)."""
    planes = images[:, None] if images.ndim == 3 else np.moveaxis(images, 3, 1)
    # the axes are moved on the bytes, a quarter of the memory traffic of moving floats; the copy is always writable
    return torch.from_numpy(np.array(planes, order="C")).float()


def _statistics(images: Bytes, top: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel of v / top, exact from the histogram of byte values."""
    channels = images[..., None] if images.ndim == 3 else images
    planes = [torch.from_numpy(channels[..., k].flatten()) for k in range(channels.shape[-1])]
    # torch counts bytes as they are, NumPy would make 64-bit integers of them first
    counts = torch.stack([torch.bincount(plane, minlength=256) for plane in planes]).numpy()
    value = np.arange(256)
    total = counts.sum(1)
    mean = counts @ value / total
    std = np.sqrt(np.maximum(counts @ value**2 / total - mean**2, 0))
    if std.min() == 0:
        raise OptionError("standardise=True: a channel of the training images is constant. Leave standardise out.")
    return torch.from_numpy(mean / top), torch.from_numpy(std / top)
