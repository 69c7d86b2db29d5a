"""Colours and type sizes of all figures, and conversion of a matplotlib figure to inline SVG.

The colours are those of Okabe and Ito, which people with any kind of colour vision can distinguish. Matplotlib is
loaded inside functions.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from pathlens.errors import import_extra

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Name -> the colour in light mode. In a page each becomes the CSS variable of that name, which dark mode redefines.
COLOURS = {
    "ink": "#1c2431",
    "muted": "#667085",
    "rule": "#d6dbe3",
    "relu": "#0072b2",
    "dlgn": "#d55e00",
    "frozen": "#00866a",
    "top": "#e6a100",
    "tint": "#fdf3dc",
    "off": "#b4becb",
    "violet": "#8a4fae",
    "sky": "#3f9fc9",
}
# colours of series, in this order
SERIES = ("relu", "dlgn", "frozen", "violet", "top", "sky", "ink")

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.labelpad": 6,
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["rule"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": COLOURS["rule"],
    "ytick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
    "text.color": COLOURS["ink"],
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and set in the page's own font
    "text.parse_math": False,  # a label may hold a dollar sign
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Within it matplotlib draws in the house style; the user's own settings are untouched afterwards."""
    with import_extra("matplotlib", "Drawing figures").rc_context(_STYLE):
        yield


HALF, THIRD = 470, 304  # widths of a panel in a row of two and of three, in CSS pixels of a wide page


def panel(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of its own, measured in CSS pixels, and its axes: one, or an array of them; no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03)  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(rows, columns, **options)


def inline_svg(figure: Figure, key: str, label: str) -> Markup:
    """The figure as an ``<svg>`` element to put into a page: transparent, themed by CSS, free of outside references.

    Parameters
    ----------
    key : str
        Distinguishes the ids of this figure from those of others on the page; equal input gives equal output.
    label : str
        Text for screen readers.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # "axes_1" in every figure; only paths and clips are referred to
    text = re.sub(r"'DejaVu Sans'[^;\"<]*", "var(--font)", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would apply to the whole page; see page.css
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    opening = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box.group(1), label)
    return Markup(re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1))  # a label may hold a backslash


def wave_map() -> Colormap:
    """Diverging map for targets in [−1, 1]: violet through grey to amber, visible on white and on black."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("wave", ["#5b3fa0", "#8f7fc4", "#a9adb5", "#e0ac48", "#d08700"])


def heat_map() -> Colormap:
    """Sequential map for kernels, dark to light with even steps of lightness."""
    import matplotlib

    return matplotlib.colormaps["cividis"]


def order_map() -> Colormap:
    """Map for series that have an order: indigo through rose to ochre, each to be seen on white and on black."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("order", ["#5a6fd8", "#a55fc0", "#d9577f", "#e0803a", "#b79a1f"])


def heat_png(level: np.ndarray, colours: Colormap) -> str:
    """A matrix of levels in [0, 1] as a data URI of a PNG; NaN is transparent; small because it has a palette."""
    from PIL import Image

    known = np.isfinite(level)
    index = np.where(known, 1 + np.round(254 * np.clip(np.where(known, level, 0), 0, 1)), 0)
    image = Image.fromarray(index.astype(np.uint8)).convert("P")
    palette = colours(np.linspace(0, 1, 255))[:, :3]
    image.putpalette((np.vstack([np.zeros(3), palette]) * 255).round().astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True, transparency=0)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
