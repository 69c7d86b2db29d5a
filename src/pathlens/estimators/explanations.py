"""The half-spaces of a fitted model as readable rules, and its predictions as sums over half-spaces or features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from pathlens.errors import OptionError, ShapeError
from pathlens.explanations import Explanation, TabularResult, r_squared
from pathlens.indexing import as_number
from pathlens.plotting import get_axes, plot_sum
from pathlens.regions.halfspace_model import HalfSpaceModel

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
        Mean over the training rows of |change of the outputs if the gate were closed|, summed over outputs.
    open_share : float
        Share of the training rows inside the half-space.
    text : str
        The inequality as text, rounded; features in order of |coefficient| × standard deviation.
    names : tuple of str
        Column names; empty where the model was fitted to an array.
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
        """Which rows are inside, bool (n,)."""
        labels = X.columns if hasattr(X, "columns") else X.index if hasattr(X, "to_frame") else self.names  # of a row
        if self.names and tuple(map(str, labels)) != self.names:
            raise ShapeError(
                "Rule: the columns of the table differ from those of the fit, or their order does. "
                "Give X[list(rule.names)]."
            )
        rows = np.asarray(X, dtype=np.float64)
        if rows.shape[-1:] != self.normal.shape:
            raise ShapeError(f"Rule: expected rows of {len(self.normal)} features, got shape {rows.shape}.")
        return rows @ self.normal + self.offset > 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Rules(TabularResult):
    """The half-spaces of a model, most important first; ``rules[0]``, iteration and ``len`` work as for a list."""

    rules: tuple[Rule, ...]
    digits: int
    total: float  #: importance of all half-spaces of the model, including those that ``top`` left out

    def table(self) -> dict[str, list[Any]]:
        """One row per half-space: gate, share of all importance, share of the training rows inside, inequality."""
        return {
            "layer": [r.layer for r in self.rules],
            "unit": [r.unit for r in self.rules],
            "importance": [r.importance / self.total for r in self.rules],
            "open": [r.open_share for r in self.rules],
            "half-space": [r.text for r in self.rules],
        }

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
    """Every half-space that separates training rows, as a `Rule`, by importance; `named`: rules keep column names."""
    for name, value in (("digits", digits), ("terms", terms), ("top", top)):
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise OptionError(f"rules: {name} must be an integer of at least 1, got {value!r}.")
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
    """The inequality of a gate as text; layers count from 0."""
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
    """`a·x + o > 0` as text: the most influential features first, coefficients scaled by a power of ten.

    The bound compensates for the rounding of the coefficients at the mean of the features, and has enough digits to be
    as precise as they are. Otherwise a feature that varies little around a large mean would make the text wrong.

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


@dataclass(frozen=True, repr=False)
class PredictionExplanation(Explanation):
    """Predictions as exact sums over groups of a layer's half-spaces, or over features.

    f_k(x) = rest_k(x) + Σ_g contributions_{k,g}(x)

    Half-spaces that contain the same training rows form a group, named by the rule of its most important member. Only
    half-spaces that contain a row contribute to its prediction. For classes, f is the log-odds of the second class (two
    classes) or the centred logits; for regression it is the prediction. For features see
    `HalfSpaceModel.feature_contributions`.

    Attributes
    ----------
    contributions : (n, c, G)
    rest : (n, c)
        The biases after the layer; before the last layer they depend on the row, since gates switch them. For
        layer 0, f at the means of the features, the same for every row.
    outputs : (n, c)
        f, computed without the decomposition.
    labels : tuple of str
        Names of the outputs.
    chosen : (n,)
        The output explained for each row: the one given, else the predicted class, or 0.
    rules : tuple of G str
        The half-space of each group; for layer 0, the features.
    layer, layers : int
        The layer of the groups, and the number of layers.
    open_shares : (G,)
        Share of the training rows inside; 1 for features.
    cancellations : (n,)
        Σ_i |contribution_i| / |Σ_i contribution_i| of each row's chosen output; 1 without cancellation.
    """

    contributions: np.ndarray
    rest: np.ndarray
    outputs: np.ndarray
    labels: tuple[str, ...]
    chosen: np.ndarray
    rules: tuple[str, ...]
    layer: int
    layers: int
    open_shares: np.ndarray
    cancellations: np.ndarray

    @property
    def relative_error(self) -> float:
        """Largest |f − rest − Σ contributions| over all rows and outputs, relative to the largest |f|: rounding."""
        gap = np.abs(self.contributions.sum(2) + self.rest - self.outputs).max()
        return float(gap / (np.abs(self.outputs).max() or 1.0))

    def __len__(self) -> int:
        return len(self.chosen)

    def top(self, row: int = 0, k: int = 5) -> list[tuple[float, str]]:
        """The k largest contributions to a row's chosen output, with their half-spaces."""
        row = as_number(row, len(self), "rows")
        if not (isinstance(k, Integral) and k >= 0):
            raise OptionError(f"PredictionExplanation: k must be an integer of at least 0, got {k!r}.")
        values = self.contributions[row, self.chosen[row]]
        order = [int(i) for i in np.argsort(-np.abs(values), kind="stable")[:k] if values[i] != 0]
        return [(float(values[i]), self.rules[i]) for i in order]

    def terms(self, row: int, k: int) -> list[tuple[float, str]]:
        """The terms that add up to a row's chosen output: the k largest, all others as one, and the rest."""
        shown, out = self.top(row, k), int(self.chosen[row])
        values = self.contributions[row, out]
        others = values[np.argsort(-np.abs(values), kind="stable")[len(shown) :]]
        kind = "features" if self.layer == 0 else "half-spaces"
        remaining = [(float(others.sum()), f"all other {kind}")] if others.any() else []
        biases = {0: "features at their means", self.layers: "bias"}.get(self.layer, "later biases")
        return [*shown, *remaining, (float(self.rest[row, out]), biases)]

    def table(self) -> dict[str, list[Any]]:
        """One row per term of each row's chosen output, largest contributions first."""
        found = [(row, *term) for row in range(len(self)) for term in self.terms(row, len(self.rules))]
        names = ("row", "contribution", "term")
        return {name: [line[i] for line in found] for i, name in enumerate(names)}

    def _lines(self) -> list[str]:
        lines = []
        sizes = np.abs(self.contributions[np.arange(len(self)), self.chosen])
        if self.layer > 0 and sizes[:, self.open_shares == 1].sum() > 0.5 * sizes.sum():
            earlier = "layer=1 splits it by the half-spaces of the first layer, " if self.layer > 1 else ""
            lines.append(
                f"Most of it is in half-spaces that contain every training row: {earlier}layer=0 splits it by features"
            )
        for row in range(min(len(self), 3)):
            k = int(self.chosen[row])
            lines.append(
                f"row {row}: {self.labels[k]} = {self.outputs[row, k]:.4g}, cancellation {self.cancellations[row]:.2f}"
            )
            lines += [f"  {value:+.4g}  {text}" for value, text in self.terms(row, 5)]
        return lines if len(self) <= 3 else [*lines, f"… and {len(self) - 3} more rows"]

    def __repr__(self) -> str:
        kind = "features" if self.layer == 0 else "groups of half-spaces"
        head = (
            f"Explanation of {len(self)} rows by {len(self.rules)} {kind}: sums are exact (relative "
            f"error {self.relative_error:.0e}), cancellation Σ|v|/|Σv| median {self.cancellation:.2f}"
        )
        return "\n".join([head, *self._lines()])

    def plot(self, row: int = 0, k: int = 8, ax: Any = None) -> Any:
        """Bars of the k largest contributions to one row's prediction, red for and blue against; returns the axes."""
        bars = [(value, text if len(text) <= 60 else text[:59] + "…") for value, text in self.terms(row, k)]
        out = int(self.chosen[row])
        title = f"{self.labels[out]} = {self.outputs[row, out]:.4g}; cancellation {self.cancellations[row]:.2f}"
        return plot_sum(bars, ax, of=self.labels[out], title=title)


def explain_rows(
    model: HalfSpaceModel,
    X: np.ndarray,
    outputs: np.ndarray,
    names: Sequence[str],
    labels: tuple[str, ...],
    chosen: np.ndarray,
    sign: float = 1.0,
    layer: int | None = None,
) -> PredictionExplanation:
    """The outputs of a model on rows X, times a sign, split by groups of a layer's half-spaces, or by features."""
    layers = len(model.hidden)
    layer = layers if layer is None else layer
    if not isinstance(layer, Integral) or layer not in range(layers + 1):
        raise OptionError(f"explain: layer must be an integer from 1 to {layers}, or 0 for features, got {layer!r}.")
    if layer == 0:
        parts, base = model.feature_contributions(X)
        rest, texts, shares = np.broadcast_to(base, outputs.shape), tuple(names), np.ones(model.d)
    else:
        parts, rest, texts, shares = _by_half_spaces(model, X, names, layer)
    parts, rest, outputs = sign * parts, sign * rest, sign * outputs
    rows = np.arange(len(X))
    terms = parts[rows, chosen]
    total, net = np.abs(terms).sum(1), np.abs(terms.sum(1))
    cancellations = np.divide(total, net, out=np.where(total > 0, np.inf, 1.0), where=net > 0)
    sums, f = (torch.from_numpy(a[rows, chosen]) for a in (parts.sum(2) + rest, outputs))
    return PredictionExplanation(
        r2=r_squared(sums, f),
        r2_held_out=None,
        cancellation=float(np.median(cancellations)),
        gates="hard",
        contributions=parts,
        rest=rest,
        outputs=outputs,
        labels=labels,
        chosen=chosen,
        rules=texts,
        layer=int(layer),
        layers=layers,
        open_shares=shares,
        cancellations=cancellations,
    )


def _by_half_spaces(
    model: HalfSpaceModel, X: np.ndarray, names: Sequence[str], layer: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], np.ndarray]:
    """Contributions of groups of a layer's half-spaces, the rest, the groups' texts and open shares."""
    parts, rest = model.split(X, layer)
    shares = model.open_shares[layer - 1]
    groups = model.groups
    if layer < len(model.hidden):  # only the last layer's groups are stored: here, gates always open or always closed
        first = {share: int(np.argmax(shares == share)) for share in (0.0, 1.0)}
        groups = np.array([first.get(float(share), unit) for unit, share in enumerate(shares)])
    leaders, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    texts = []
    for unit, size in zip(leaders, sizes):
        text = rule_text(model, layer - 1, int(unit), names, 3, 6)
        everywhere = {0.0: "contains no training row", 1.0: "contains every training row"}.get(float(shares[unit]))
        texts.append((everywhere or text) + (f" ({size} half-spaces)" if size > 1 else ""))
    return parts @ np.eye(len(leaders))[member_of], rest, tuple(texts), shares[leaders]


def plot_rules(rules: Rules, spread: np.ndarray, names: Sequence[str], ax: Any = None) -> Any:
    """Half-spaces as rows, features as columns: direction of each normal in standard deviations of the features."""
    if not len(rules):
        axes = get_axes(ax, "drawing a model", (5.0, 1.6))
        axes.set_axis_off()
        axes.set_title("no half-space separates training rows", fontsize=10)
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
