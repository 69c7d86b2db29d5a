"""Matplotlib axes, integer ticks and a bar chart of contributions, shared by every plot of the package.

Needs matplotlib (extra ``plot``), which is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathlens.errors import import_extra


def get_axes(ax: Any, purpose: str, size: tuple[float, float] | None = None) -> Any:
    """Return ``ax``, or the axes of a new figure; the error without matplotlib names the ``purpose``."""
    if ax is not None:
        return ax
    return import_extra("matplotlib.pyplot", purpose).figure(figsize=size, layout="constrained").add_subplot()


def use_integer_ticks(ax: Any) -> None:
    """Place automatic ticks of the horizontal axis at integers only, as for epochs."""
    from matplotlib.ticker import MaxNLocator

    locator = ax.xaxis.get_major_locator()  # another class on a logarithmic axis, or where ticks were set
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)


def plot_sum(parts: Sequence[tuple[float, str]], ax: Any, *, of: str, title: str) -> Any:
    """Draw the named summands of a number as bars: red where positive, blue where negative."""
    ax = get_axes(ax, "drawing contributions", (8.0, 0.45 * len(parts) + 1.5))
    values = [value for value, _ in parts]
    ax.barh(range(len(parts)), values, color=["#2166ac" if value < 0 else "#b2182b" for value in values])
    ax.set_yticks(range(len(parts)), [name for _, name in parts], fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel(f"contribution to {of}")
    ax.set_title(title, fontsize=10)
    return ax
