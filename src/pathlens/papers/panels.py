"""What a page is to draw of an artifact's arrays: :class:`Panel` and its :class:`Series`, as data and nothing else.

Experiments describe their panels, artifacts store and check the descriptions, and the report turns each kind into a
drawing. No drawing lives here, and no numbers: a series refers to an array by name. May import errors only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from pathlens.errors import OptionError

__all__ = ["KINDS", "Panel", "Series", "array_at"]

# kind -> fewest and most dimensions of what a series refers to
KINDS: dict[str, tuple[int, int]] = {
    "lines": (1, 8),
    "points": (1, 8),
    "strips": (1, 8),
    "matrices": (2, 2),
    "fields": (2, 2),
}
_STYLES = ("line", "dashed", "points")
_SCALES = ("linear", "log")
_REFERENCE = re.compile(r"([A-Za-z_]\w*)(?:\[((?::|-?\d+)(?:,\s*(?::|-?\d+))*)\])?(\.T)?")


@dataclass(frozen=True)
class Series:
    """One line, cloud, row of dots or matrix of a panel.

    Parameters
    ----------
    values : str
        The array, or a part of it with integers and colons: ``"loss"``, ``"error[0, 3]"``, ``"kernel[:, :, -1]"``; a
        final ``.T`` turns its axes round.
    label : str
        What people read in the legend, beside the row, or under the matrix.
    x : str
        As ``values``, in place of the panel's own ``x``.
    style : {"line", "dashed", "points"}
        For lines: theory is best dashed, single measurements are points.
    """

    values: str
    label: str = ""
    x: str = ""
    style: str = "line"

    def __post_init__(self) -> None:
        for reference in (self.values, *([self.x] if self.x else [])):
            if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
                raise OptionError(
                    f"Series {self.label!r}: {reference!r} does not name an array. Write 'loss', or a "
                    "part with integers and colons: 'error[0, :, 3]'."
                )
        if not isinstance(self.label, str):
            raise OptionError(f"Series {self.values!r}: the label must be a string, got {self.label!r}.")
        if self.style not in _STYLES:
            raise OptionError(f"Series {self.label!r}: style must be one of {', '.join(_STYLES)}, got {self.style!r}.")


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    ========  ==================  =====================================================================================
    kind      a series refers to  drawn as
    ========  ==================  =====================================================================================
    lines     (…, m)              median over all leading axes (seeds) against ``x`` (m,), with the whole range shaded
    points    any shape           a cloud; ``x`` has the same shape
    strips    any shape           one row: a dot per value and the median; a bar for more values than can be told apart
    matrices  (n, m)              a heat map; all of a panel share one scale of colours
    fields    (K, d)              small multiples: a column per series, a row for each of the first few units
    ========  ==================  =====================================================================================

    Parameters
    ----------
    kind : str
        As above.
    title : str
        What is shown, in a few words.
    series : sequence of Series
    x : str
        The array along x, for lines and points; without it, positions are counted from 0.
    x_label, y_label : str
        Names of the axes with their units. For strips y is the rows' own; for matrices they name columns and rows.
    x_scale, y_scale : {"linear", "log"}
        On a logarithmic axis what is not above zero stands at the edge, and the caption says so; an x-axis begins at
        zero if there are zeros. For matrices ``y_scale`` is the scale of the colours.
    marks : sequence of (float, str)
        Reference lines across the values (of y; of x for strips), with a word each.
    diagonal : bool
        For points: draw y = x.
    slope : float or None
        For lines on two logarithmic axes: draw y ∝ x^slope through the first series.
    ordered : bool
        Colours follow an order (depth, time) rather than telling kinds apart.
    note : str
        A sentence under the panel: what to see.

    Examples
    --------
    >>> panel = Panel("lines", "training loss", [Series("loss", "ReLU")], x="epochs", x_label="epoch", y_label="loss")
    >>> panel.check({"loss": np.ones((5, 3)), "epochs": np.arange(3)}, "Artifact 'x.y'")
    >>> panel.check({"loss": np.ones((5, 3))}, "Artifact 'x.y'")
    Traceback (most recent call last):
        ...
    pathlens.errors.OptionError: Artifact 'x.y', panel 'training loss': there is no array 'epochs', only loss.
    """

    kind: str
    title: str
    series: Sequence[Series]
    x: str = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: str = "linear"
    y_scale: str = "linear"
    marks: Sequence[tuple[float, str]] = ()
    diagonal: bool = False
    slope: float | None = None
    ordered: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        where = f"Panel {self.title!r}"
        for name in ("title", "x", "x_label", "y_label", "note"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{where}: {name} must be a string, got {getattr(self, name)!r}.")
        object.__setattr__(self, "series", tuple(self.series))
        try:
            object.__setattr__(self, "marks", tuple((float(value), str(text)) for value, text in self.marks))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{where}: marks are pairs of a number and a word, got {self.marks!r}.") from error
        if self.kind not in KINDS:
            raise OptionError(f"{where}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if not self.series or not all(isinstance(one, Series) for one in self.series):
            raise OptionError(f"{where} needs at least one Series, and nothing else, got {self.series!r}.")
        for name in ("x_scale", "y_scale"):
            if getattr(self, name) not in _SCALES:
                raise OptionError(f"{where}: {name} must be 'linear' or 'log', got {getattr(self, name)!r}.")
        if not all(math.isfinite(value) for value, _ in self.marks):
            raise OptionError(f"{where}: marks must be finite, got {self.marks!r}.")
        if self.x and not _REFERENCE.fullmatch(self.x):
            raise OptionError(f"{where}: x = {self.x!r} does not name an array.")
        if self.slope is not None and (self.kind, self.x_scale, self.y_scale) != ("lines", "log", "log"):
            raise OptionError(f"{where}: a slope needs lines on two logarithmic axes.")

    def check(self, arrays: Mapping[str, np.ndarray], where: str) -> None:
        """Refuse the panel unless all that it refers to is among ``arrays`` with a shape that its kind can draw."""
        where = f"{where}, panel {self.title!r}"
        low, high = KINDS[self.kind]
        for one in self.series:
            values = array_at(arrays, one.values, where)
            if not low <= values.ndim <= high or values.size == 0 or values.dtype.kind not in "biuf":
                wanted = f"{low} dimensions" if low == high else f"at least {low} dimension{'s' * (low > 1)}"
                raise OptionError(
                    f"{where}: {one.values!r} has shape {values.shape} and dtype {values.dtype}; "
                    f"{self.kind} need numbers in {wanted}."
                )
            name = one.x or self.x
            if not name:
                if self.kind == "points":
                    raise OptionError(f"{where}: points need an x. Give one to the panel or to its series.")
                continue
            x = array_at(arrays, name, where)
            fits = x.shape == values.shape if self.kind == "points" else x.shape == values.shape[-1:]
            if self.kind in ("lines", "points") and not fits:
                raise OptionError(
                    f"{where}: {name!r} has shape {x.shape}, which does not fit {one.values!r} of shape {values.shape}."
                )

    def document(self) -> dict[str, Any]:
        """The panel as plain values, without those that are at their default."""
        return {key: value for key, value in asdict(self).items() if value != _DEFAULTS.get(key, ...)}

    @classmethod
    def from_document(cls, entry: Mapping[str, Any]) -> Panel:
        """The panel that :meth:`document` described."""
        return cls(**{**entry, "series": tuple(Series(**one) for one in entry["series"])})


_DEFAULTS = {field.name: field.default for field in fields(Panel)}


def array_at(arrays: Mapping[str, np.ndarray], reference: str, where: str) -> np.ndarray:
    """The array, or the part of it, that a reference names.

    Examples
    --------
    >>> array_at({"a": np.arange(6).reshape(2, 3)}, "a[:, 1]", "here").tolist()
    [1, 4]
    """
    match = _REFERENCE.fullmatch(reference)
    assert match is not None  # checked when the series was made
    name, part, turned = match.groups()
    if name not in arrays:
        raise OptionError(f"{where}: there is no array {name!r}, only {_listed(arrays)}.")
    items = part.split(",") if part else []
    try:
        found = np.asarray(arrays[name][tuple(slice(None) if item.strip() == ":" else int(item) for item in items)])
        return found.T if turned else found
    except IndexError as error:
        raise OptionError(f"{where}: {reference!r} is outside of an array of shape {arrays[name].shape}.") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none at all"
