"""Tiny sets that a network can only memorise, from the deep gated networks (DGN) paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathlens.data.dataset import DataSet
from pathlens.errors import OptionError, ShapeError


def identical_inputs(n: int = 200, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> DataSet:
    """n equal inputs with random targets: x_s = 1, y_s ~ U[-1, 1] (DGN, Experiment 1).

    The input Gram matrix is all ones, rank 1: only gates can distinguish the rows. No function of x fits the targets;
    gates that are a table per example do.

    Examples
    --------
    >>> data = identical_inputs()
    >>> tuple(data.x.shape), float(data.x.std())
    ((200, 1), 0.0)
    """
    y = _uniform("identical_inputs", n, 1, seed)
    return DataSet(
        torch.ones(n, 1, dtype=dtype),
        y.to(dtype),
        name="identical inputs",
        info={"paper": "DGN, Experiment 1", "seed": seed},
    )


def random_targets(n: int = 100, *, seed: int = 0, d: int = 2, dtype: torch.dtype = torch.float32) -> DataSet:
    """n random points with random targets: x_s ~ U[-1, 1]^d, y_s ~ U[-1, 1] (DGN, Experiment 2, d = 2).

    Examples
    --------
    >>> random_targets().x.abs().max() <= 1
    tensor(True)
    """
    if d < 1:
        raise OptionError(f"random_targets: d={d}, expected at least 1.")
    xy = _uniform("random_targets", n, d + 1, seed)
    return DataSet(
        xy[:, :d].to(dtype),
        xy[:, d:].to(dtype),
        name="random targets",
        info={"paper": "DGN, Experiment 2", "seed": seed},
    )


def single_point(dtype: torch.dtype = torch.float32) -> DataSet:
    """The one example (x, y) = (1, 1) (DGN, Experiment 8).

    Examples
    --------
    >>> single_point().y
    tensor([[1.]])
    """
    return DataSet(
        torch.ones(1, 1, dtype=dtype),
        torch.ones(1, 1, dtype=dtype),
        name="single point",
        info={"paper": "DGN, Experiment 8"},
    )


def unfittable(x: Tensor | Sequence[float] = (1.0, 1.0), *, dtype: torch.dtype = torch.float32) -> DataSet:
    """Two examples that no ReLU network without biases can fit: (x, 1) and (2x, -1) (DGN, section 1).

    Such a network is positively homogeneous, f(2x) = 2 f(x), so its loss Σ(f - y)² is at least
    min_f (f - 1)² + (2f + 1)² = 9/5, at f = -1/5.

    Parameters
    ----------
    x : Tensor or sequence, shape (d,)
        Any vector but zero.

    Examples
    --------
    >>> unfittable([1.0, -2.0]).x
    tensor([[ 1., -2.],
            [ 2., -4.]])
    """
    point = torch.as_tensor(x, dtype=torch.float64).detach()
    if point.ndim != 1:
        raise ShapeError(f"unfittable: x has shape {tuple(point.shape)}, expected one vector (d,). Pass x.flatten().")
    if not bool(point.any()):
        raise OptionError("unfittable: x is zero, so x and 2x are the same point. Pass a vector with a nonzero entry.")
    y = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    return DataSet(torch.stack((point, 2 * point)).to(dtype), y, name="unfittable", info={"paper": "DGN, section 1"})


def _uniform(where: str, n: int, columns: int, seed: int) -> Tensor:
    if n < 1:
        raise OptionError(f"{where}: n={n}, expected at least 1.")
    return 2 * torch.rand(n, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1
