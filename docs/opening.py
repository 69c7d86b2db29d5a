"""Draws docs/images/opening.png from artifacts: the curve, every half-space of a DLGN, the overlap kernel.

`make picture` runs it on the artifacts of the demo.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.errors import ArtifactError, OptionError
from pathlens.papers.artifact import Artifact
from pathlens.papers.pages.axes import half_spaces
from pathlens.papers.pages.palette import COLOURS, drawing, heat_map, wave_map

_WIDTH, _HEIGHT = 1200, 420


def opening_picture(artifacts: Iterable[Artifact], path: str | os.PathLike[str]) -> Path:
    """Draw the opening picture, 1200 × 420 (twice that in pixels for PNG), and return its path.

    Parameters
    ----------
    artifacts : iterable of Artifact
        Must contain ``hs.fig2``, ``hs.fig3`` and ``hs.fig6``; if both scales are present, the paper scale is drawn.
    path : path
        Ends in ``.png`` or ``.svg``.

    Raises
    ------
    ArtifactError
        If one of the three is missing or lacks an array.
    """
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise OptionError(f"The opening picture must be a .png or .svg file, got {target.name!r}.")
    found = {artifact.name: artifact for artifact in sorted(artifacts, key=lambda a: a.scale == "paper")}
    missing = [name for name in ("hs.fig2", "hs.fig3", "hs.fig6") if name not in found]
    if missing:
        raise ArtifactError(
            f"The opening picture needs the artifacts {', '.join(missing)}, found "
            f"{', '.join(sorted(found)) or 'none'}. Run `pathlens demo` first."
        )
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH / 100, _HEIGHT / 100), dpi=200, facecolor="white")
        _draw_circle(_axes(figure, 20, 48, 330, 330), found["hs.fig2"])
        normals = [_array(found["hs.fig6"], f"normals_{when}")[0] for when in ("init", "end")]
        kernels = _array(found["hs.fig3"], "kernel_dlgn_pwc")[[0, -1]]
        top = float(np.quantile(kernels, 0.998)) or 1.0
        for row, (y, when) in enumerate(((62, "before training"), (240, "after training"))):
            _draw_half_spaces(_axes(figure, 440, y, 480, 150), normals[row])
            axes = _axes(figure, 1008, y, 150, 150)
            axes.imshow(
                np.sqrt(np.clip(kernels[row] / top, 0, 1)), cmap=heat_map(), vmin=0, vmax=1, interpolation="nearest"
            )
            figure.text(
                418 / _WIDTH,
                1 - (y + 75) / _HEIGHT,
                when,
                rotation=90,
                ha="center",
                va="center",
                color=COLOURS["muted"],
                fontsize=9,
            )
        # a point is 1/72 inch and the picture has 100 pixels per inch: 9 points are 12.5 pixels
        for x, text in (
            (20, "a curve on the circle"),
            (440, "every neuron is a half-space (rows: layers)"),
            (1008, "paths two points share"),
        ):
            figure.text(x / _WIDTH, 1 - 34 / _HEIGHT, text, color=COLOURS["ink"], fontsize=10, fontweight="bold")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target, metadata={"Date": None} if target.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ArtifactError(
                f"The picture {target} cannot be written: {error.strerror or error}. Choose another folder."
            ) from error
    return target


def _array(artifact: Artifact, name: str) -> np.ndarray:
    if name not in artifact.arrays:
        raise ArtifactError(f"Artifact {artifact.name!r} ({artifact.scale}) has no array {name!r}. Run it again.")
    return artifact.arrays[name]


def _axes(figure: Any, x: float, y: float, width: float, height: float) -> Any:
    """Axes without frame at a place given in pixels from the upper left corner."""
    axes = figure.add_axes((x / _WIDTH, 1 - (y + height) / _HEIGHT, width / _WIDTH, height / _HEIGHT))
    axes.set_axis_off()
    return axes


def _draw_circle(axes: Any, artifact: Artifact) -> None:
    """The target as a wave around the unit circle: radius 1 + y/5, coloured by y."""
    from matplotlib.collections import LineCollection

    theta, y = _array(artifact, "theta"), _array(artifact, "y")
    angle, value = np.append(theta, theta[0]), np.append(y, y[0])
    points = (1 + value / 5)[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    pieces = list(np.stack([points[:-1], points[1:]], 1))
    axes.add_collection(
        LineCollection(
            pieces, array=(value[:-1] + value[1:]) / 2, cmap=wave_map(), clim=(-1, 1), lw=3, capstyle="round"
        )
    )
    around = np.linspace(0, 2 * np.pi, 361)
    axes.plot(np.cos(around), np.sin(around), color=COLOURS["rule"], lw=1)
    axes.text(0, 0.3, "slow on top", ha="center", color=COLOURS["muted"], fontsize=10)
    axes.text(0, -0.4, "fast below", ha="center", color=COLOURS["muted"], fontsize=10)
    axes.set(xlim=(-1.22, 1.22), ylim=(-1.22, 1.22), aspect="equal")


def _draw_half_spaces(axes: Any, normals: np.ndarray) -> None:
    """Half discs, layers down and neurons across, sorted by their angle to the top; amber within 30° of it."""
    from matplotlib.patches import Circle, Wedge

    for layer, column, angle, colour in half_spaces(normals):
        place, degrees = (column, -layer), np.degrees(angle)
        axes.add_patch(Wedge(place, 0.41, degrees - 90, degrees + 90, color=COLOURS[colour], lw=0))
        axes.add_patch(Circle(place, 0.41, fill=False, ec=COLOURS["rule"], lw=0.7))
    layers, width, _ = normals.shape
    axes.set(xlim=(-0.5, width - 0.5), ylim=(-layers + 0.5, 0.5), aspect="equal")


if __name__ == "__main__":
    import sys

    from pathlens.papers.artifact import load_folder

    print(opening_picture(load_folder(sys.argv[1]), sys.argv[2]))
