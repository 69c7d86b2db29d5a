"""Which gates are best: the least loss that a gating allows, in closed form, and searches for gatings that lower it.

For fixed gates the best weights are a regression of y on x̃ = g(x) ⊗ x, so each gating has one least loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pathlens.errors import LabelError, OptionError, ShapeError, unknown_name
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar
from pathlens.theory.flow import CUTOFF, Moments
from pathlens.theory.gates import Gates, gate_table, gated_inputs, half_spaces, random_half_spaces, single, tiling
from pathlens.theory.inputs import WeightedRows


def gating_loss(gates: Any, data: Any, *, test: Any = None) -> Any:
    """The least ⟨(y − ŷ)²⟩ over all weights, for fixed gates: ⟨y²⟩ − bᵀA⁺b (eq. 13 to 16, for any targets).

    Without the factor ½ of the flows, as in the note.

    Parameters
    ----------
    gates : Gates, function, table (n, K) or network
        Gates that never fire add nothing and are allowed. With `test`, not a table.
    data : DataSet, (X, y), (X, y, p) or SinglePulse
    test : the same, optional
        Rows to score the fitted weights on.

    Returns
    -------
    float, or (float, float) with the loss on `test`

    Notes
    -----
    Exact. O(min(n, Kd)² max(n, Kd)). Near-zero directions of A are cut at 1e-12 of the largest.

    Examples
    --------
    >>> X, y = np.array([[1.0], [-1.0]]), np.array([1.0, 1.0])          # y = |x|
    >>> gating_loss(half_spaces([[1.0], [-1.0]]), (X, y)), gating_loss(half_spaces([[0.0]]), (X, y))
    (0.0, 1.0...)
    """
    rows = WeightedRows.from_data(data)
    table = gate_table(gates, rows.x, allow_dead=True)
    root = np.sqrt(rows.p)
    features = gated_inputs(table, rows.x) * root[:, None]
    U, s, Vt = np.linalg.svd(features, full_matrices=False)
    kept = s > math.sqrt(CUTOFF) * max(float(s[0]), 1e-300)
    inside = U[:, kept].T @ (rows.y * root)
    # the residual itself, not ⟨y²⟩ minus its explained part, which would lose all digits of a good fit
    loss = float(((rows.y * root - U[:, kept] @ inside) ** 2).sum())
    if test is None:
        return loss
    other = WeightedRows.from_data(test)
    predicted = gated_inputs(gate_table(gates, other.x, allow_dead=True), other.x) @ (Vt[kept].T @ (inside / s[kept]))
    return loss, float(other.p @ (predicted - other.y) ** 2)


def class_separation(gates: Any, data: Any) -> float:
    """L* = m₁ᵀ (⟨x̃x̃ᵀ⟩₁ + ⟨x̃x̃ᵀ⟩₀)⁺ m₁ for balanced labels 0 and 1: the loss is ½ − ½L* (eq. 16; eq. 18 corrected).

    m₁ = ⟨x̃⟩ over label 1. Class means do not decide it: the second moments of the classes are needed, and the note's
    eq. 18, which has products of means in their place, is 1 for every gating whose class means are independent.

    Raises
    ------
    LabelError
        Where y holds anything but 0 and 1, or one class is absent. Both classes have weight ½, whatever their share.

    Examples
    --------
    >>> X, y = np.array([[1.0], [-2.0]]), np.array([1.0, 0.0])
    >>> round(class_separation(half_spaces([[1.0]]), (X, y)), 12)
    1.0
    """
    rows = WeightedRows.from_data(data)
    present = np.unique(rows.y)
    if not np.isin(present, (0.0, 1.0)).all() or len(present) < 2:
        raise LabelError(
            f"class_separation: targets hold {present[:5].tolist()}, expected both labels 0 and 1. For other targets "
            "use gating_loss."
        )
    one = rows.y == 1
    balanced = np.where(one, rows.p / rows.p[one].sum(), rows.p / rows.p[~one].sum()) / 2
    m = Moments.from_data(gates, WeightedRows(rows.x, rows.y, balanced), allow_dead=True)  # b = m₁/2
    return float(2 * m.b @ np.linalg.pinv(m.A, rcond=CUTOFF, hermitian=True) @ m.b)


def off_diagonal_mass(gates: Any, data: Any) -> float:
    """Share of ‖A⁺‖²_F outside its diagonal blocks: 0 for exclusive gates (the note's 'maximally diagonal' precision).

    Examples
    --------
    >>> X, y = np.random.default_rng(0).standard_normal((50, 2)), np.zeros(50)
    >>> off_diagonal_mass(tiling([1.0, 0.0], [0.0]), (X, y))
    0.0
    """
    m = Moments.from_data(gates, data, allow_dead=True)
    plus = np.linalg.pinv(m.A, rcond=1e-10, hermitian=True)
    blocks = (plus.reshape(m.K, m.d, m.K, m.d) ** 2).sum((1, 3))
    total = blocks.sum()
    return float(1 - np.trace(blocks) / total) if total > 0 else 0.0


@dataclass(frozen=True)
class Gating:
    """One result of a search: the method, the gates, and the least loss on the rows and on test rows."""

    method: str
    gates: Gates
    loss: float
    test_loss: float | None = None


@dataclass(frozen=True)
class GatingTable:
    """Gatings sorted by loss (on test rows where there are any); iterate, index, or print."""

    rows: tuple[Gating, ...]
    K: int

    @property
    def best(self) -> Gating:
        """The gating of least loss."""
        return self.rows[0]

    def by_method(self, method: str) -> list[Gating]:
        """The gatings that one method found, best first."""
        return [row for row in self.rows if row.method == method]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Gating:
        return self.rows[i]

    def __repr__(self) -> str:
        lines = [f"GatingTable: {len(self.rows)} gatings of K={self.K} units, least ⟨(y − ŷ)²⟩"]
        for method in dict.fromkeys(row.method for row in self.rows):
            group = self.by_method(method)
            test = "" if group[0].test_loss is None else f", test {group[0].test_loss:.4g}"
            lines.append(f"  {method:<10} best {group[0].loss:.4g}{test} of {len(group)}")
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Every gating as a dot, one line per method."""
        ax = get_axes(ax, "drawing gatings")
        methods = list(dict.fromkeys(row.method for row in self.rows))
        test = self.rows[0].test_loss is not None
        for i, method in enumerate(methods):
            values = [row.test_loss if test else row.loss for row in self.by_method(method)]
            ax.plot(values, np.full(len(values), len(methods) - i), "o", color="#0072b2", alpha=0.5)
        ax.set_yticks(range(len(methods), 0, -1), methods)
        ax.set(xlabel=f"least ⟨(y − ŷ)²⟩{' on test rows' if test else ''}", title=f"gatings of {self.K} units")
        return ax


METHODS = ("random", "tiling", "greedy", "soft", "network")


def search_gatings(
    data: Any,
    K: int,
    *,
    test: Any = None,
    methods: Sequence[str] = ("random", "tiling", "greedy", "soft"),
    trials: int = 20,
    networks: Sequence[Any] = (),
    steps: int = 100,
    seed: int = 0,
    progress: bool = True,
) -> GatingTable:
    """Search for gates of low `gating_loss` by several methods.

    Parameters
    ----------
    data, test : as in `gating_loss`
    K : int
        Gates.
    methods : sequence of {"random", "tiling", "greedy", "soft", "network"}
        random: `trials` draws of K half-spaces. tiling: K slabs of equal weight along `trials` directions. greedy: one
        half-space at a time, the best of `trials` draws. soft: K half-spaces by gradient through gates σ(βv·x) whose
        weights are solved for in closed form, β rising from 2 to 50 over `steps` steps of Adam. network: the hard
        gates of each of `networks` (one hidden layer of K units).
    trials, steps, seed : int
    networks : sequence of networks

    Returns
    -------
    GatingTable

    Notes
    -----
    The least loss is measured on the rows it was fitted to; with fewer than about ten rows per weight it is too
    optimistic, so pass `test`. None of the methods is guaranteed to find the best gating.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 2))
    >>> search_gatings((X, np.abs(X[:, 0])), K=2, trials=10, steps=60, progress=False)
    GatingTable: ... gatings of K=2 units, least ⟨(y − ŷ)²⟩
      ...
    """
    rows = WeightedRows.from_data(data)
    test_rows = None if test is None else WeightedRows.from_data(test)
    if K < 1 or trials < 1 or steps < 1:
        raise OptionError(f"search_gatings: K={K}, trials={trials}, steps={steps}, expected at least 1 each.")
    for method in methods:
        if method not in METHODS:
            raise unknown_name("search method", method, METHODS)
    if "network" in methods and not networks:
        raise OptionError("search_gatings: method 'network' needs networks=[…] with one hidden layer each.")
    rng = np.random.default_rng(seed)
    makers: dict[str, Callable[[], list[Gates]]] = {
        "random": lambda: [random_half_spaces(K, rows.d, seed=int(rng.integers(2**31))) for _ in range(trials)],
        "tiling": lambda: [_tiles(rows, K, rng) for _ in range(trials)],
        "greedy": lambda: [_greedy(rows, K, trials, rng)],
        "soft": lambda: [_soft(rows, K, steps, rng)],
        "network": lambda: [_of_network(net, K, rows) for net in networks],
    }
    found = []
    with ProgressBar("gatings", len(methods)) as meter:
        for method in methods:
            for gates in makers[method]():
                score = gating_loss(gates, rows, test=test_rows)
                loss, test_loss = score if test_rows is not None else (score, None)
                found.append(Gating(method, gates, loss, test_loss))
            if progress:
                meter.advance()
    return GatingTable(tuple(sorted(found, key=lambda g: g.loss if g.test_loss is None else g.test_loss)), K)


def _of_network(net: Any, K: int, rows: WeightedRows) -> Gates:
    gates = Gates(lambda X: gate_table(net, X, allow_dead=True), "gates of a network")
    width = gates(rows.x[:1]).shape[1]
    if width != K:
        raise ShapeError(f"search_gatings: a network has {width} hidden units, expected K={K}.")
    return gates


def _tiles(rows: WeightedRows, K: int, rng: np.random.Generator) -> Gates:
    v = rng.standard_normal(rows.d)
    along = rows.x @ v
    order = np.argsort(along)
    # the cut after which the cumulated weight passes k/K, halfway to the next row
    at = np.searchsorted(np.cumsum(rows.p[order]), np.arange(1, K) / K)
    at = np.minimum(at, rows.n - 2) if rows.n > 1 else at * 0
    edges = (along[order][at] + along[order][np.minimum(at + 1, rows.n - 1)]) / 2
    return tiling(v, np.unique(edges)) if K > 1 else single()


def _greedy(rows: WeightedRows, K: int, trials: int, rng: np.random.Generator) -> Gates:
    chosen = np.empty((0, rows.d))
    for _ in range(K):
        draws = rng.standard_normal((trials, rows.d))
        losses = [gating_loss(half_spaces(np.vstack([chosen, v])), rows) for v in draws]
        chosen = np.vstack([chosen, draws[int(np.argmin(losses))]])
    return half_spaces(chosen)


def _soft(rows: WeightedRows, K: int, steps: int, rng: np.random.Generator) -> Gates:
    """Adam on the normals; for soft gates the least loss is a differentiable function of them."""
    x, y, p = (torch.from_numpy(a) for a in (rows.x, rows.y, rows.p))
    v = torch.from_numpy(rng.standard_normal((K, rows.d))).requires_grad_()
    optimiser = torch.optim.Adam([v], lr=0.1)
    root = p.sqrt()
    eye = torch.eye(K * rows.d, dtype=torch.float64)
    best, kept = math.inf, v.detach().clone()
    for step in range(steps):
        beta = 2.0 * 25.0 ** (step / max(steps - 1, 1))
        scores = x @ (v / v.norm(dim=1, keepdim=True)).T
        features = (torch.sigmoid(beta * scores)[:, :, None] * x[:, None, :]).reshape(len(x), -1) * root[:, None]
        A, b = features.T @ features, features.T @ (root * y)
        ridge = 1e-6 * A.detach().diagonal().mean()
        loss = (p * y**2).sum() - b @ torch.linalg.solve(A + ridge * eye, b)
        if step % 10 == 9 or step == steps - 1:
            hard = gating_loss(half_spaces(v.detach().numpy()), rows)
            if hard < best:
                best, kept = hard, v.detach().clone()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return half_spaces(kept.numpy())
