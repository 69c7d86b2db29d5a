"""The axes that every picture of the package is drawn on, and the pictures of a kernel and of a sum.

Needs matplotlib (extra ``plot``), imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.errors import OptionError, need_extra

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator


def axes(ax: Any, purpose: str, size: tuple[float, float] | None = None) -> Any:
    """The axes given, or those of a new figure; says what needs matplotlib where it is not installed."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise need_extra("plot", "matplotlib", purpose) from error
    return plt.figure(figsize=size, layout="constrained").add_subplot()


def whole_numbers(ax: Any) -> None:
    """Epochs are counted: no ticks between them, where the horizontal axis chooses its ticks itself."""
    from matplotlib.ticker import MaxNLocator

    locator = ax.xaxis.get_major_locator()  # not of this kind on a logarithmic axis, or where ticks were set
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)


def plot_sum(parts: Sequence[tuple[float, str]], ax: Any, *, of: str, title: str) -> Any:
    """What a number is the sum of, as bars with their names: red for it and blue against it, as maps of images are."""
    ax = axes(ax, "drawing contributions", (8.0, 0.45 * len(parts) + 1.5))
    values = [value for value, _ in parts]
    ax.barh(range(len(parts)), values, color=["#2166ac" if value < 0 else "#b2182b" for value in values])
    ax.set_yticks(range(len(parts)), [name for _, name in parts], fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel(f"contribution to {of}")
    ax.set_title(title, fontsize=10)
    return ax


def plot_kernel(kernel: KernelOperator, ax: Any, max_pixels: int, **style: Any) -> Any:
    """Draw a kernel as an image; above ``max_pixels`` an evenly spaced selection of rows and columns, which is said."""
    if max_pixels < 1:
        raise OptionError(f"plot: max_pixels must be at least 1, got {max_pixels}.")
    n, m = kernel.shape
    rows, cols = (np.unique(np.linspace(0, size - 1, min(size, max_pixels)).round().astype(int)) for size in (n, m))
    shown = kernel if (len(rows), len(cols)) == (n, m) else kernel[rows, cols]
    ax = axes(ax, "drawing a kernel")
    style = {"cmap": "viridis", "interpolation": "nearest", "aspect": "auto" if n != m else "equal", **style}
    image = ax.imshow(shown.dense().cpu().numpy(), **style, extent=(-0.5, m - 0.5, n - 0.5, -0.5))
    ax.figure.colorbar(image, ax=ax, label="K")
    note = "" if shown is kernel else f", every {n // len(rows)}th row"
    ax.set(xlabel="column", ylabel="row", title=f"{kernel.name}, {n} × {m}{note}")
    return ax
