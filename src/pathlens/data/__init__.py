"""Data sets, each a checked `DataSet`: synthetic and memorisation sets, published image sets; and tables as a `Table`.

`load(name)` and `names()` find them by name; `pathlens.data.store` finds, checks and imports files.

>>> from pathlens import data
>>> data.load("circle", points=64)
DataSet 'circle': regression
  train x (64, 2) float32, y (64, 1) float32
  marks theta, top
  info  top=sin(1θ), bottom=sin(12θ), top_amplitude=1.0, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathlens.data import store
from pathlens.data.circles import CIRCLE_CONTROLS, circle, circle_control
from pathlens.data.dataset import DataSet
from pathlens.data.images import (
    binary_mnist,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    mnist,
    mnist_random_labels,
    mnist_random_pixels,
    modified_fashion_mnist,
)
from pathlens.data.inputs import as_inputs, as_pair
from pathlens.data.memorisation import identical_inputs, random_targets, single_point, unfittable
from pathlens.data.tabular import Table, table, table_names
from pathlens.data.translation import NLGP, SinglePulse, nlgp, nlgp_covariance, ring_covariance, single_pulse
from pathlens.errors import unknown_name

__all__ = [
    "CIRCLE_CONTROLS",
    "NLGP",
    "DataSet",
    "SinglePulse",
    "Table",
    "as_inputs",
    "as_pair",
    "binary_mnist",
    "cifar10",
    "cifar100",
    "circle",
    "circle_control",
    "digits",
    "fashion_mnist",
    "identical_inputs",
    "load",
    "mnist",
    "mnist_random_labels",
    "mnist_random_pixels",
    "modified_fashion_mnist",
    "names",
    "nlgp",
    "nlgp_covariance",
    "random_targets",
    "ring_covariance",
    "single_point",
    "single_pulse",
    "store",
    "table",
    "table_names",
    "unfittable",
]

_SETS: dict[str, Callable[..., DataSet]] = {
    make.__name__: make
    for make in (
        circle,
        circle_control,
        nlgp,
        single_pulse,
        identical_inputs,
        random_targets,
        single_point,
        unfittable,
        digits,
        mnist,
        fashion_mnist,
        cifar10,
        cifar100,
        binary_mnist,
        mnist_random_labels,
        mnist_random_pixels,
        modified_fashion_mnist,
    )
}


def names() -> tuple[str, ...]:
    """Names of the data sets that `load` returns, sorted.

    Examples
    --------
    >>> "circle" in names() and "cifar10" in names()
    True
    """
    return tuple(sorted(_SETS))


def load(name: str, /, **options: Any) -> DataSet:
    """A data set by name; the options are those of the function of that name. Hyphens count as underscores.

    Examples
    --------
    >>> load("circle-control", name="swapped", points=32).name
    'circle (swapped)'
    """
    make = _SETS.get(name.replace("-", "_"))
    if make is None:
        raise unknown_name("data set", name, _SETS)
    return make(**options)
