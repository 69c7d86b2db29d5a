""":class:`Panel` and its :class:`Series`: descriptions of what a page draws from an artifact's arrays.

Experiments describe their panels, artifacts store and check the descriptions, and pages draw them. A series contains no
numbers: it refers to an array by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np

from pathlens.errors import OptionError

# kind -> fewest and most dimensions of what a series refers to
KINDS: dict[str, tuple[int, int]] = {
    "lines": (1, 8),
    "points": (1, 8),
    "strips": (1, 8),
    "matrices": (2, 2),
    "fields": (2, 2),
    "stacks": (1, 1),
    "half_spaces": (3, 3),
}
_Style = Annotated[str, msgspec.Meta(pattern="^(line|dashed|points)$")]
_Colour = Annotated[str, msgspec.Meta(pattern="^(|ink|muted|relu|dlgn|frozen|top|violet|sky)$")]
_Kind = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(KINDS)})$")]
_Scale = Annotated[str, msgspec.Meta(pattern="^(linear|log)$")]
_ColourScale = Annotated[str, msgspec.Meta(pattern="^(linear|log|sqrt)$")]
_REFERENCE = re.compile(r"([A-Za-z_]\w*)(?:\[((?::|-?\d+)(?:,\s*(?::|-?\d+))*)\])?(\.T)?")


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line, cloud, row of dots, matrix or small chart of a panel.

    Parameters
    ----------
    values : str
        The array, or a part of it with integers and colons: ``"loss"``, ``"error[0, 3]"``, ``"kernel[:, :, -1]"``; a
        final ``.T`` reverses its axes.
    label : str
        The text in the legend, beside the row, or under the matrix.
    x : str
        As ``values``; replaces the ``x`` of the panel.
    style : {"line", "dashed", "points"}
        For lines. Use dashed lines for theory and points for single measurements.
    colour : {"", "ink", "muted", "relu", "dlgn", "frozen", "top", "violet", "sky"}
        By default chosen by label and position. If all series of a panel have the same colour, the title of the panel
        shows it.
    colour_by : str
        For points: an array of the shape of ``values`` whose numbers give the colours; the panel becomes a map of the
        plane without axes.
    """

    values: str
    label: str = ""
    x: str = ""
    style: _Style = "line"
    colour: _Colour = ""
    colour_by: str = ""

    def __post_init__(self) -> None:
        where = f"Series {self.label or self.values!r}"
        _convert(self, where)
        for reference in (self.values, self.x, self.colour_by):
            if not _REFERENCE.fullmatch(reference or "none"):
                raise OptionError(
                    f"{where}: {reference!r} does not name an array. Write 'loss', or a part with integers and "
                    "colons: 'error[0, :, 3]'."
                )
        if not self.values:
            raise OptionError(f"{where}: '' does not name an array.")


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One panel of a figure.

    ===========  ==================  ==================================================================================
    kind         a series refers to  drawn as
    ===========  ==================  ==================================================================================
    lines        (…, m)              median over all leading axes (seeds) against ``x`` (m,), with the range shaded
    points       any shape           a cloud; ``x`` has the same shape
    strips       any shape           one row: a dot per value and the median; a bar for too many values
    matrices     (n, m)              a heat map; all of a panel share one scale of colours
    fields       (K, d)              small charts: a column per series, a row for each of the first few units
    stacks       (m,)                small charts above one another, one per series, against ``x`` (m,)
    half_spaces  (L, w, 2)           half discs, layers down, normals sorted by their angle to the top across
    ===========  ==================  ==================================================================================

    Parameters
    ----------
    kind : str
        As above.
    title : str
        What is shown, in a few words.
    series : sequence of Series
    x : str
        The array along x, for lines, points, stacks and the columns of matrices; without it, positions count from 0.
    x_label, y_label : str
        Names of the axes with their units. Strips have no y_label; for matrices they name columns and rows.
    x_scale, y_scale : {"linear", "log", "sqrt"}
        On a logarithmic axis values that are not above zero are drawn at the edge, which the caption mentions; an
        x-axis begins at zero if there are zeros. For matrices ``y_scale`` is the scale of the colours. Only matrices
        may use ``"sqrt"``, which also clips the largest .2 % of the entries.
    marks : sequence of (float, str)
        Reference lines at values of y (of x for strips; of rows and columns for matrices), each with a label.
    diagonal : bool
        For points: draw y = x.
    slope : float or None
        For lines on two logarithmic axes: draw y ∝ x^slope through the first series.
    ordered : bool
        Colours follow an order (depth, time) instead of distinguishing kinds.
    note : str
        A few sentences under the panel that explain it.
    x_ticks : sequence of (float, str)
        For lines and stacks: the ticks of the x-axis and their labels.
    shade : (float, float) or None
        For lines and stacks: a range of x that is shaded.
    y_limits : (float, float) or None
        For stacks: the y-axis; values outside are drawn at its ends.
    background : str
        For stacks: an array (m,) that is drawn in grey behind each series.

    Examples
    --------
    >>> panel = Panel("lines", "training loss", [Series("loss", "ReLU")], x="epochs", x_label="epoch", y_label="loss")
    >>> panel.check({"loss": np.ones((5, 3)), "epochs": np.arange(3)}, "Artifact 'x.y'")
    >>> panel.check({"loss": np.ones((5, 3))}, "Artifact 'x.y'")
    Traceback (most recent call last):
        ...
    pathlens.errors.OptionError: Artifact 'x.y', panel 'training loss': there is no array 'epochs', only loss.
    """

    kind: _Kind
    title: str
    series: Sequence[Series]
    x: str = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: _Scale = "linear"
    y_scale: _ColourScale = "linear"
    marks: Sequence[tuple[float, str]] = ()
    diagonal: bool = False
    slope: float | None = None
    ordered: bool = False
    note: str = ""
    x_ticks: Sequence[tuple[float, str]] = ()
    shade: tuple[float, float] | None = None
    y_limits: tuple[float, float] | None = None
    background: str = ""

    def __post_init__(self) -> None:
        where = f"Panel {self.title!r}"
        _convert(self, where)
        if not self.series:
            raise OptionError(f"{where} needs at least one Series.")
        if not all(math.isfinite(value) for value, _ in self.marks):
            raise OptionError(f"{where}: marks must be finite, got {self.marks!r}.")
        for name in ("x", "background"):
            if not _REFERENCE.fullmatch(getattr(self, name) or "none"):
                raise OptionError(f"{where}: {name} = {getattr(self, name)!r} does not name an array.")
        if self.slope is not None and (self.kind, self.x_scale, self.y_scale) != ("lines", "log", "log"):
            raise OptionError(f"{where}: a slope needs lines on two logarithmic axes.")
        if self.y_scale == "sqrt" and self.kind != "matrices":
            raise OptionError(f"{where}: y_scale='sqrt' is for matrices.")

    def check(self, arrays: Mapping[str, np.ndarray], where: str) -> None:
        """Raise an error unless all arrays it refers to are in ``arrays``, with shapes that its kind can draw."""
        where = f"{where}, panel {self.title!r}"
        low, high = KINDS[self.kind]
        for one in self.series:
            values = array_at(arrays, one.values, where)
            pairs = self.kind != "half_spaces" or values.shape[-1] == 2
            if not low <= values.ndim <= high or values.size == 0 or values.dtype.kind not in "biuf" or not pairs:
                wanted = f"{low} dimensions" if low == high else f"at least {low} dimension{'s' * (low > 1)}"
                raise OptionError(
                    f"{where}: {one.values!r} has shape {values.shape} and dtype {values.dtype}; "
                    f"{self.kind} need numbers in {wanted}{', the last of size 2' * (self.kind == 'half_spaces')}."
                )
            x = one.x or self.x
            if self.kind == "points" and not x:
                raise OptionError(f"{where}: points need an x. Give one to the panel or to its series.")
            beside = {"lines": [x], "stacks": [x, self.background], "matrices": [x], "points": [x, one.colour_by]}
            for name in filter(None, beside.get(self.kind, [])):
                shape = array_at(arrays, name, where).shape
                if shape != (values.shape if self.kind == "points" else values.shape[-1:]):
                    raise OptionError(
                        f"{where}: {name!r} has shape {shape}, which does not fit {one.values!r} of shape "
                        f"{values.shape}."
                    )


def _convert(described: Series | Panel, where: str) -> None:
    """Convert each attribute to its annotated type, sequences to tuples, or raise an error that names it."""
    for name, kind in _type_hints(type(described)).items():
        value = getattr(described, name)
        try:
            found = msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError as error:
            wanted = "must be a string" if kind is str else f"is wrong ({error})"
            raise OptionError(f"{where}: {name} {wanted}, got {value!r}.") from None
        msgspec.structs.force_setattr(described, name, tuple(found) if isinstance(found, list) else found)


@lru_cache
def _type_hints(described: type) -> dict[str, Any]:
    return get_type_hints(described, include_extras=True)


def _plain(value: Any) -> Any:
    """The value with numpy numbers converted to Python numbers."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def array_at(arrays: Mapping[str, np.ndarray], reference: str, where: str) -> np.ndarray:
    """The array, or the part of it, that a reference names.

    Examples
    --------
    >>> array_at({"a": np.arange(6).reshape(2, 3)}, "a[:, 1]", "here").tolist()
    [1, 4]
    """
    match = _REFERENCE.fullmatch(reference)
    assert match is not None  # checked when the series was made
    name, part, reversed_axes = match.groups()
    if name not in arrays:
        raise OptionError(f"{where}: there is no array {name!r}, only {', '.join(arrays) or 'none at all'}.")
    items = part.split(",") if part else []
    try:
        found = np.asarray(arrays[name][tuple(slice(None) if item.strip() == ":" else int(item) for item in items)])
        return found.T if reversed_axes else found
    except IndexError as error:
        raise OptionError(f"{where}: {reference!r} is outside of an array of shape {arrays[name].shape}.") from error
