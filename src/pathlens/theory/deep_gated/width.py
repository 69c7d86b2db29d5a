"""Wide value networks behind fixed gates: how fast their tangent kernel approaches the path kernel (NPF, Theorem 5.1).

The limits themselves are in :mod:`pathlens.kernels`; the moments that predict the distance at finite width are in
moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pathlens.data.inputs import as_numbers
from pathlens.errors import OptionError
from pathlens.kernels import npk, ntk
from pathlens.models import Init, galu
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar
from pathlens.recording import record
from pathlens.theory.deep_gated.moments import gram_moments


@dataclass(frozen=True)
class WidthSweep:
    """Distance ‖K − dσ^{2(d−1)}H‖_F/‖dσ^{2(d−1)}H‖_F at each width.

    Attributes
    ----------
    widths : (k,)
    errors : (k, seeds)
        Measured, one network per seed.
    predicted : (k, seeds)
        √E of its square over the values, exact, for the gates of that network.
    """

    widths: np.ndarray
    errors: np.ndarray
    predicted: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """Slope of log error over log width, per seed; −½ by Theorem 5.1."""
        return np.polyfit(np.log(self.widths), np.log(self.errors), 1)[0]

    def plot(self, ax: Any = None) -> Any:
        """Draw measured errors as dots over the predicted line; returns the axes."""
        ax = get_axes(ax, "drawing a sweep of widths", (5, 3.5))
        ax.loglog(self.widths, np.sqrt(np.square(self.predicted).mean(1)), color="#667085", lw=1.2, label="predicted")
        ax.loglog(
            np.repeat(self.widths, self.errors.shape[1]),
            self.errors.ravel(),
            "o",
            color="#0072b2",
            ms=4,
            alpha=0.7,
            label="measured",
        )
        ax.set(xlabel="width", ylabel="relative distance of K to its limit")
        ax.legend(frameon=False)
        return ax

    def __repr__(self) -> str:
        ends = f"{np.median(self.errors[0]):.2g} at w = {self.widths[0]} to {np.median(self.errors[-1]):.2g} at w = "
        return f"WidthSweep(error {ends}{self.widths[-1]}; ∝ w^{np.median(self.rates):.2f})"


def width_sweep(
    X: Any,
    *,
    hidden_layers: int = 4,
    widths: Sequence[int] = (25, 50, 100, 200, 400),
    seeds: Sequence[int] = (0, 1, 2),
) -> WidthSweep:
    """Theorem 5.1 by measurement: K^V of a network with fixed random ReLU gates against dσ^{2(d−1)}H, σ² = 2/w.

    Gates are drawn anew at each width, and H is the path kernel of the same network as K.

    Parameters
    ----------
    X : (n, d)
    hidden_layers : int
        L = d − 1.
    widths : sequence of int
        At least two.
    seeds : sequence of int

    Returns
    -------
    WidthSweep. Each network costs one record, n·w²·L, and two kernels. A bar shows after two seconds.

    Examples
    --------
    >>> sweep = width_sweep(torch.randn(8, 3), hidden_layers=2, widths=(16, 256), seeds=range(3))
    >>> bool((sweep.errors[1] < sweep.errors[0]).all())
    True
    """
    if len(set(widths)) < 2:
        raise OptionError(f"width_sweep: at least two widths are needed for a rate, got {list(widths)}.")
    x = as_numbers(X).double()
    d = hidden_layers + 1
    errors, predicted = np.empty((2, len(widths), len(seeds)))
    with ProgressBar("widths", len(widths) * len(seeds)) as meter:
        for i, w in enumerate(widths):
            sigma = math.sqrt(2 / w)
            for j, seed in enumerate(seeds):
                net = galu(x.shape[1], (w,) * hidden_layers, init=Init("bernoulli", sigma), seed=int(seed)).double()
                rec = record(net, x, stream=False)
                K, H = ntk(rec, part="value").dense(), d * sigma ** (2 * (d - 1)) * npk(rec).dense()
                errors[i, j] = float(torch.linalg.norm(K - H) / torch.linalg.norm(H))
                gates = [rec.gates(site) for site in rec.sites]  # type: ignore[union-attr]
                predicted[i, j] = gram_moments(x, gates, sigma).relative_error
                meter.advance()
    return WidthSweep(np.array(widths), errors, predicted)
