"""Made-up image sets, and the sizes of small experiments on them."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

import pathlens as pl
from pathlens.data import DataSet

SMALL = {
    "rows": 60,
    "rows_test": 40,
    "side": 4,
    "channels": [4, 4, 4, 4],
    "dense": [6, 6],
    "epochs": 3,
    "batch_size": 20,
    "lr": 5e-3,
    "betas": [1, 8],
    "epsilons": [0.1, 0.4],
    "tasks": ["mnist", "mnist_random_labels"],
    "hidden": [12, 8],
    "width": 10,
    "hidden_layers": 3,
    "examples": 12,
}
SEEDS = (0, 1)


def pictures(shape, *, flatten=False, standardise=False):
    """Ten clouds of images: rows 0 to 79, and 50 to test."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(10, *shape, generator=generator)

    def rows(n):
        y = torch.arange(n) % 10
        x = centres[y] + torch.randn(n, *shape, generator=generator)
        return (x.flatten(1) if flatten else x), y

    return DataSet(*rows(80), *rows(50), task="classification", classes=10)


def two_digits(*, flatten=True):
    full = pictures((1, 3, 3), flatten=flatten)
    sign = [torch.where(y % 2 == 0, 1.0, -1.0)[:, None] for y in (full.y, full.y_test)]
    return DataSet(full.x, sign[0], full.x_test, sign[1])


@contextmanager
def made_up_images():
    """Replace the image sets of `pathlens.data`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.data, "cifar10", partial(pictures, (3, 8, 8)))
        for name in ("mnist", "mnist_random_labels"):
            patch.setattr(pl.data, name, partial(pictures, (1, 3, 3)))
        patch.setattr(pl.data, "binary_mnist", two_digits)
        yield


def percent(output, y):
    return 100 * float((output.argmax(1) == y).double().mean())
