"""What a fitted model says about itself: its half-spaces as readable rules, and predictions as sums over half-spaces.

Results are data first; `plot` draws them (matplotlib is loaded then). Fitting and scikit-learn's interface live
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from pathlens.errors import OptionError, ShapeError
from pathlens.estimators.halfspaces import HalfSpaceModel
from pathlens.indexing import as_number
from pathlens.plotting import get_axes, plot_sum

# --- rules -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One half-space: the gate is open where ``normal·x + offset > 0``, in the units of the data.

    Attributes
    ----------
    layer, unit : int
        Which gate: layers count from 1, units from 0.
    normal : (d,), offset : float
        Not rounded.
    importance : float
        Mean over the training rows of |what closing the gate would change|, summed over outputs.
    open_share : float
        Share of the training rows inside.
    text : str
        Features in order of their influence |coefficient| × standard deviation; rounded, with a bound to match.
    names : tuple of str
        The columns that it reads; empty where the model was fitted to an array.
    """

    layer: int
    unit: int
    normal: np.ndarray
    offset: float
    importance: float
    open_share: float
    text: str
    names: tuple[str, ...] = ()

    def __call__(self, X: Any) -> np.ndarray:
        """Which rows lie inside, bool (n,)."""
        labels = X.columns if hasattr(X, "columns") else X.index if hasattr(X, "to_frame") else self.names  # of a row
        if self.names and tuple(map(str, labels)) != self.names:
            raise ShapeError(
                "Rule: the columns of the table are not those of the fit in their order. Give X[list(rule.names)]."
            )
        rows = np.asarray(X, dtype=np.float64)
        if rows.shape[-1:] != self.normal.shape:
            raise ShapeError(f"Rule: expected rows of {len(self.normal)} features, got shape {rows.shape}.")
        return rows @ self.normal + self.offset > 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Rules:
    """The half-spaces of a model, most important first; ``rules[0]``, iteration and ``len`` work as for a list."""

    rules: tuple[Rule, ...]
    digits: int
    total: float  #: importance of all half-spaces of the model, those left out by ``top`` too

    def __len__(self) -> int:
        return len(self.rules)

    def __getitem__(self, index: int) -> Rule:
        return self.rules[index]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __repr__(self) -> str:
        lines = [
            f"{len(self)} half-spaces, most important first; coefficients rounded to {self.digits} digits "
            "(rule.normal and rule.offset are exact)",
            " importance   open  gate   half-space",
        ]
        for r in self.rules:
            share = f"{100 * r.importance / self.total:.1f} %"
            lines.append(f"{share:>11} {100 * r.open_share:>4.0f} %  {r.layer}.{r.unit:<4} {r.text}")
        return "\n".join(lines)


def rules_of(
    model: HalfSpaceModel, names: Sequence[str], digits: int, terms: int | None, top: int | None, named: bool
) -> Rules:
    """Every half-space that cuts the training rows in two, as a `Rule`, by importance; `named` are those of a table."""
    for name, value in (("digits", digits), ("terms", terms), ("top", top)):
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise OptionError(f"rules: {name} must be a whole number of at least 1, got {value!r}.")
    found = [
        Rule(
            layer + 1,
            unit,
            model.normals[layer][unit],
            float(model.offsets[layer][unit]),
            float(model.importances[layer][unit]),
            float(model.open_shares[layer][unit]),
            rule_text(model, layer, unit, names, digits, terms),
            tuple(names) if named else (),
        )
        for layer, width in enumerate(model.hidden)
        for unit in range(width)
        if 0 < model.open_shares[layer][unit] < 1
    ]
    found.sort(key=lambda r: (-r.importance, r.layer, r.unit))
    return Rules(tuple(found[:top]), digits, sum(r.importance for r in found) or 1.0)


def rule_text(
    model: HalfSpaceModel, layer: int, unit: int, names: Sequence[str], digits: int, terms: int | None
) -> str:
    """`a·x + o > 0` of a gate, layers counted from 0, as text: see `inequality`."""
    normal, offset = model.normals[layer][unit], float(model.offsets[layer][unit])
    return inequality(normal, offset, model.centre, model.spread, names, digits, terms)


def inequality(
    normal: np.ndarray,
    offset: float,
    centre: np.ndarray,
    spread: np.ndarray,
    names: Sequence[str],
    digits: int,
    terms: int | None,
) -> str:
    """`a·x + o > 0` as text: the most influential features first, the largest coefficient scaled to a power of ten.

    What rounding the coefficients adds at the mean of the features, the bound takes back, and it has as many digits as
    it needs to be as fine as they are: else a feature that varies little around a large mean would make the text wrong.

    Examples
    --------
    >>> inequality(np.array([0.8, -1.2]), -3.1, np.zeros(2), np.array([10.0, 1.0]), ["age", "income"], 3, None)
    '0.8·age − 1.2·income > 3.1'
    >>> inequality(np.array([0.9876]), -0.9876 * 2020.5, np.array([2020.0]), np.array([3.0]), ["year"], 3, None)
    '0.988·year > 1996.25'
    """
    influence = np.abs(normal) * spread
    order = [int(j) for j in np.argsort(-influence, kind="stable") if influence[j] > 0]
    if not order:
        return "always open" if offset > 0 else "never open"
    # half-spaces do not change under a positive factor: take one that keeps the numbers near one
    factor = 10.0 ** -np.floor(np.log10(np.abs(normal[order]).max()) + 1e-12)
    factor = 1.0 if 0.1 <= np.abs(normal[order]).max() < 10 else factor
    shown = order if terms is None else order[:terms]
    text, bound = "", -offset * factor
    for j in shown:
        value = float(f"{normal[j] * factor:.{digits}g}")
        bound += (value - normal[j] * factor) * centre[j]
        sign = "−" if value < 0 else "+"
        text += (f" {sign} " if text else ("−" if value < 0 else "")) + f"{abs(value):.{digits}g}·{names[j]}"
    if len(shown) < len(order):
        text += f" + {len(order) - len(shown)} smaller terms"
    finer = np.log10(abs(bound)) - np.log10(influence.max() * factor) if bound else 0.0
    return f"{text} > {'−' if bound < 0 else ''}{abs(bound):.{digits + max(0, int(np.ceil(finer)))}g}"


# --- explanations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Predictions as exact sums: f_k(x) = bias_k + Σ_g contributions_{k,g}(x) over groups of a layer's half-spaces.

    Or over features: see `HalfSpaceModel.feature_contributions`.

    Half-spaces that hold the same training rows form a group; it bears the rule of its most important member. A row
    gets a contribution from a half-space only if it lies inside. For classes, f is the log-odds of the second class
    (two classes) or the centred logits; for regression it is the prediction.

    Attributes
    ----------
    contributions : (n, c, G)
    bias : (n, c)
        The biases after the layer; before the last layer they depend on the row, since gates switch them. Of layer 0,
        f at the means of the features, the same for every row.
    outputs : (n, c)
        f, computed without the decomposition.
    labels : tuple of str
        The outputs' names.
    chosen : (n,)
        The output that each row is explained by: the one asked for, else the predicted class, or 0.
    rules : tuple of G str
        The half-space of each group; of layer 0, the features.
    layer, layers : int
        The layer that the groups are of, and how many there are.
    open_shares : (G,)
        Share of the training rows inside; 1 for features.
    """

    contributions: np.ndarray
    bias: np.ndarray
    outputs: np.ndarray
    labels: tuple[str, ...]
    chosen: np.ndarray
    rules: tuple[str, ...]
    layer: int
    layers: int
    open_shares: np.ndarray

    @property
    def fidelity(self) -> float:
        """Largest |f − bias − Σ contributions| over all rows and outputs, relative to the largest |f|: rounding."""
        gap = np.abs(self.contributions.sum(2) + self.bias - self.outputs).max()
        return float(gap / (np.abs(self.outputs).max() or 1.0))

    @property
    def cancellation(self) -> np.ndarray:
        """Σ_i |contribution_i| / |Σ_i contribution_i| per row, of its chosen output (n,); 1 where nothing cancels."""
        rows = self.contributions[np.arange(len(self.chosen)), self.chosen]
        total, net = np.abs(rows).sum(1), np.abs(rows.sum(1))
        return np.divide(total, net, out=np.where(total > 0, np.inf, 1.0), where=net > 0)

    def __len__(self) -> int:
        return len(self.chosen)

    def top(self, row: int = 0, k: int = 5) -> list[tuple[float, str]]:
        """The k largest contributions to a row's chosen output, with their half-spaces."""
        row = as_number(row, len(self), "rows")
        if not (isinstance(k, Integral) and k >= 0):
            raise OptionError(f"Explanation: k must be a whole number of at least 0, got {k!r}.")
        values = self.contributions[row, self.chosen[row]]
        order = [int(i) for i in np.argsort(-np.abs(values), kind="stable")[:k] if values[i] != 0]
        return [(float(values[i]), self.rules[i]) for i in order]

    def _bars(self, row: int, k: int) -> list[tuple[float, str]]:
        """What the output of a row is the sum of: the k largest contributions, the others as one, the biases."""
        shown, out = self.top(row, k), int(self.chosen[row])
        values = self.contributions[row, out]
        others = values[np.argsort(-np.abs(values), kind="stable")[len(shown) :]]
        kind = "features" if self.layer == 0 else "half-spaces"
        rest = [(float(others.sum()), f"all other {kind}")] if others.any() else []
        biases = {0: "features at their means", self.layers: "bias"}.get(self.layer, "later biases")
        return [*shown, *rest, (float(self.bias[row, out]), biases)]

    @property
    def _unconditional(self) -> float:
        """Share of Σ|contributions| in half-spaces that hold every training row: nothing is said about it."""
        rows = np.abs(self.contributions[np.arange(len(self.chosen)), self.chosen])
        return float(rows[:, self.open_shares == 1].sum() / (rows.sum() or 1.0))

    def __repr__(self) -> str:
        kind = "features" if self.layer == 0 else "groups of half-spaces"
        lines = [
            f"Explanation of {len(self)} rows by {len(self.rules)} {kind}: sums are exact (relative "
            f"error {self.fidelity:.0e}), cancellation Σ|v|/|Σv| median {np.median(self.cancellation):.2f}"
        ]
        if self.layer > 0 and self._unconditional > 0.5:
            earlier = "layer=1 splits it by the half-spaces of the first layer, " if self.layer > 1 else ""
            lines.append(
                f"Most of it lies in half-spaces that hold every training row: {earlier}layer=0 splits it by features"
            )
        for row in range(min(len(self), 3)):
            k = int(self.chosen[row])
            lines.append(
                f"row {row}: {self.labels[k]} = {self.outputs[row, k]:.4g}, cancellation {self.cancellation[row]:.2f}"
            )
            lines += [f"  {value:+.4g}  {text}" for value, text in self._bars(row, 5)]
        if len(self) > 3:
            lines.append(f"… and {len(self) - 3} more rows")
        return "\n".join(lines)

    def plot(self, row: int = 0, k: int = 8, ax: Any = None) -> Any:
        """Bars of the k largest contributions to one row's prediction, red for and blue against; returns the axes."""
        bars = [(value, _short(text)) for value, text in self._bars(row, k)]
        out = int(self.chosen[row])
        title = f"{self.labels[out]} = {self.outputs[row, out]:.4g}; cancellation {self.cancellation[row]:.2f}"
        return plot_sum(bars, ax, of=self.labels[out], title=title)


def explanation_of(
    model: HalfSpaceModel,
    X: np.ndarray,
    outputs: np.ndarray,
    names: Sequence[str],
    labels: tuple[str, ...],
    chosen: np.ndarray,
    layer: int | None = None,
) -> Explanation:
    """The outputs of a model on rows X, split up by groups of a layer's half-spaces, or by features."""
    layers = len(model.hidden)
    layer = layers if layer is None else layer
    if not isinstance(layer, Integral) or layer not in range(layers + 1):
        raise OptionError(f"explain: layer must be a number from 1 to {layers}, or 0 for features, got {layer!r}.")
    if layer == 0:
        parts, base = model.feature_contributions(X)
        bias = np.broadcast_to(base, outputs.shape)
        return Explanation(parts, bias, outputs, labels, chosen, tuple(names), 0, layers, np.ones(model.d))
    parts, bias = model.split(X, layer)
    shares = model.open_shares[layer - 1]
    groups = model.groups
    if layer < layers:  # which rows the others hold is not kept: all, none, or some of its own
        first = {share: int(np.argmax(shares == share)) for share in (0.0, 1.0)}
        groups = np.array([first.get(float(share), unit) for unit, share in enumerate(shares)])
    leaders, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums, texts = parts @ np.eye(len(leaders))[member_of], []
    for unit, size in zip(leaders, sizes):
        text = rule_text(model, layer - 1, int(unit), names, 3, 6)
        everywhere = {0.0: "holds no training row", 1.0: "holds every training row"}.get(float(shares[unit]))
        texts.append((everywhere or text) + (f" ({size} half-spaces)" if size > 1 else ""))
    return Explanation(sums, bias, outputs, labels, chosen, tuple(texts), layer, layers, shares[leaders])


def plot_rules(rules: Rules, spread: np.ndarray, names: Sequence[str], ax: Any = None) -> Any:
    """Half-spaces as rows, features as columns: direction of each normal in standard deviations of the features."""
    if not len(rules):
        axes = get_axes(ax, "drawing a model", (5.0, 1.6))
        axes.set_axis_off()
        axes.set_title("no half-space cuts the training rows in two", fontsize=10)
        return axes
    columns = [j for j in range(len(names)) if spread[j] > 0]
    influence = np.array([r.normal[columns] * spread[columns] for r in rules])
    influence /= np.abs(influence).max(axis=1, keepdims=True)
    axes = get_axes(ax, "drawing a model", (min(2.5 + 0.35 * len(columns), 14.0), 1.6 + 0.28 * len(rules)))
    image = axes.imshow(influence, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    few = len(columns) <= 40
    axes.set_xticks(
        range(len(columns)) if few else [],
        [names[j] for j in columns] if few else [],
        rotation=60,
        ha="right",
        fontsize=8,
    )
    axes.set_yticks(
        range(len(rules)), [f"{r.layer}.{r.unit}  {100 * r.importance / rules.total:.0f} %" for r in rules], fontsize=8
    )
    axes.set_ylabel("gate and its share of all importance")
    axes.set_title("half-spaces: normal × spread of the feature, largest = 1", fontsize=10)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    return axes


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
