"""The base classes of results and explanations: how well one describes a network (R²), how much its terms cancel.

Results are data first: a dict, a table, then text, HTML and a plot made from these. The explanations themselves live in
`paths` and `estimators`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.errors import import_extra
from pathlens.pages import render

#: Σ|terms|/|f| above which a list of some terms is printed with a warning: more cancels than is left
MISLEADING = 2.0

_ROWS_SHOWN = 20  # rows of a table in HTML


def r_squared(predicted: Tensor, f: Tensor) -> float:
    """1 − Σ(f − predicted)² / Σ(f − mean f)²; NaN where f varies by rounding alone.

    >>> r_squared(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    spread = (f - f.mean()).square().sum()
    rounding = len(f) * (1e-12 * f.abs().max()).square()
    return math.nan if len(f) < 2 or bool(spread <= rounding) else float(1 - (f - predicted).square().sum() / spread)


def ratio(size: Tensor, f: Tensor) -> Tensor:
    """Σ|terms|/|f| per row: 1 without cancellation, infinite where f is 0; 1 where there are no terms."""
    return torch.where(size > 0, size / f.abs(), torch.ones_like(size))


def to_plain(value: Any) -> Any:
    """Tensors, arrays and dataclasses as lists, dicts and numbers of Python."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    return [to_plain(each) for each in value] if isinstance(value, list | tuple) else value


class TabularResult(ABC):
    """Base of results that are dataclasses: a dict, a table, and HTML."""

    @abstractmethod
    def table(self) -> dict[str, list[Any]]:
        """Columns of the table, by name, all of one length."""

    def to_dict(self) -> dict[str, Any]:
        """Every field as lists, dicts and numbers; networks are left out."""
        found = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: to_plain(value) for name, value in found if not isinstance(value, nn.Module)}

    def to_frame(self) -> Any:
        """The table as a pandas DataFrame; needs pandas."""
        return import_extra("pandas", "a DataFrame").DataFrame(self.table())

    def _repr_html_(self) -> str:
        """First line of the text, and the first rows of the table, for notebooks."""
        table = self.table()
        texts = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in column] for column in table.values()]
        rows = list(zip(*texts))
        return render(
            "result.html",
            heading=repr(self).splitlines()[0],
            columns=list(table),
            rows=rows[:_ROWS_SHOWN],
            more=max(0, len(rows) - _ROWS_SHOWN),
        )


@dataclass(frozen=True, repr=False)
class Explanation(TabularResult):
    """Base of all explanations.

    Attributes
    ----------
    r2 : float
        R² of the explanation to the network's output f, on the rows that it was made from. NaN where f does not vary
        over them.
    r2_held_out : float or None
        The same on held-out rows; None where nothing is fitted and no rows were held out.
    cancellation : float
        Median over rows of Σ|terms|/|their sum|: 1 means none; 10 means that nine tenths of the terms cancel.
    gates : str
        The network's gate function. Contributions use it as it is; paths, regions and counts are of hard gates.
    """

    r2: float
    r2_held_out: float | None
    cancellation: float
    gates: str

    @abstractmethod
    def plot(self, *, ax: Any = None) -> Any:
        """Draw it on the axes given, or on new ones; returns them. Needs matplotlib."""

    def _lines(self) -> list[str]:
        """Lines of the text after the first."""
        return []

    @property
    def _score(self) -> str:
        held = "" if self.r2_held_out is None else f" (held out {self.r2_held_out:.3f})"
        return "R² undefined, f does not vary here" if math.isnan(self.r2) else f"R² {self.r2:.3f}{held}"

    def __repr__(self) -> str:
        head = f"{type(self).__name__}: {self._score}, cancellation {self.cancellation:.3g}, gates {self.gates}"
        return "\n".join([head, *("  " + line for line in self._lines())])
