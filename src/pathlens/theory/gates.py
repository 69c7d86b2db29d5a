"""Gates of a gated linear network: K functions of x that switch K units, and constructors for common choices.

A gate is on where its score is positive, as everywhere in the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pathlens.errors import OptionError, ShapeError
from pathlens.recording import record
from pathlens.theory.inputs import check_finite, float_array


@dataclass(frozen=True)
class Gates:
    """K gates as one function: ``gates(X)`` is their table of zeros and ones, shape (n, K).

    Parameters
    ----------
    function : callable
        X (n, d) → scores (n, K), arrays; a gate is on where its score is > 0.
    name : str
        Shown in tables.

    Examples
    --------
    >>> halves = Gates(lambda X: np.stack([X[:, 0], -X[:, 0]], axis=1), "left and right")
    >>> halves(np.array([[2.0], [-1.0]]))
    array([[1., 0.],
           [0., 1.]])
    """

    function: Callable[[np.ndarray], Any]
    name: str = "gates"

    def __call__(self, X: Any) -> np.ndarray:
        x = float_array(X)
        scores = np.asarray(self.function(x))
        if scores.ndim != 2 or len(scores) != len(x):
            raise ShapeError(
                f"{self.name}: the gate function returned shape {scores.shape} for {len(x)} rows, "
                f"expected ({len(x)}, K)."
            )
        return (scores > 0).astype(np.float64)

    def __repr__(self) -> str:
        return f"Gates({self.name})"


def half_spaces(normals: Any, *, offsets: Any = 0.0) -> Gates:
    """Gates g_k(x) = 1[v_k·x > θ_k], in general position: the gates of one ReLU layer.

    Parameters
    ----------
    normals : array (K, d)
        v_k.
    offsets : float or array (K,)
        θ_k.

    Examples
    --------
    >>> half_spaces([[1.0, 0.0], [1.0, 1.0]])([[0.5, -1.0]])
    array([[1., 0.]])
    """
    v, theta = float_array(normals), float_array(offsets)
    if v.ndim != 2:
        raise ShapeError(f"half_spaces: normals have shape {v.shape}, expected (K, d).")

    def scores(X: np.ndarray) -> np.ndarray:
        if X.shape[1:] != v.shape[1:]:
            raise ShapeError(f"half_spaces: rows have shape {X.shape}, expected (n, {v.shape[1]}) as the normals.")
        return X @ v.T - theta

    return Gates(scores, f"{len(v)} half-spaces")


def random_half_spaces(K: int, d: int, *, seed: int = 0) -> Gates:
    """K half-spaces through the origin with Gaussian normals: the gates of a ReLU layer at initialisation.

    Examples
    --------
    >>> random_half_spaces(3, 2, seed=0)(np.eye(2)).shape
    (2, 3)
    """
    if K < 1 or d < 1 or seed < 0:
        raise OptionError(f"random_half_spaces: K and d must be at least 1 and seed at least 0, got {K}, {d}, {seed}.")
    return half_spaces(np.random.default_rng(seed).standard_normal((K, d)))


def single(normal: Any = None) -> Gates:
    """One gate: a half-space, or open everywhere (a linear network) where no normal is given.

    Examples
    --------
    >>> single()(np.zeros((2, 3))).tolist(), single([1.0, 0.0])([[-1.0, 0.0]]).tolist()
    ([[1.0], [1.0]], [[0.0]])
    """
    if normal is None:
        return Gates(lambda X: np.ones((len(X), 1)), "one open gate")
    return half_spaces(float_array(normal)[None])


def exclusive(normals: Any) -> Gates:
    """Exactly one gate is on for every x: the one with the largest v_k·x (ties: the first). K ≥ 2 cones.

    Examples
    --------
    >>> exclusive([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])([[2.0, 1.0], [-3.0, 0.0]])
    array([[1., 0., 0.],
           [0., 0., 1.]])
    """
    v = float_array(normals)
    if v.ndim != 2 or len(v) < 2:
        raise ShapeError(f"exclusive: normals have shape {v.shape}, expected (K, d) with K ≥ 2.")
    return Gates(lambda X: np.eye(len(v))[(X @ v.T).argmax(1)], f"{len(v)} exclusive cones")


def tiling(direction: Any, edges: Any) -> Gates:
    """Exclusive slabs along one direction: gate k is on where edges[k−1] < v·x ≤ edges[k]; outer slabs are unbounded.

    Parameters
    ----------
    direction : array (d,)
    edges : increasing array (K − 1,)

    Examples
    --------
    >>> tiling([1.0, 0.0], [-1.0, 1.0])([[0.0, 9.0], [2.0, 0.0]])
    array([[0., 1., 0.],
           [0., 0., 1.]])
    """
    v, cuts = float_array(direction), np.atleast_1d(float_array(edges))
    if not (np.diff(cuts) > 0).all():
        raise OptionError(f"tiling: edges must increase, got {cuts.tolist()}.")
    return Gates(lambda X: np.eye(len(cuts) + 1)[np.searchsorted(cuts, X @ v)], f"{len(cuts) + 1} slabs")


def redundant(gates: Gates, *, copies: int = 2) -> Gates:
    """Every gate ``copies`` times, copies side by side: g_1, g_1, …, g_2, g_2, …

    Examples
    --------
    >>> redundant(single([1.0]), copies=3)([[1.0]])
    array([[1., 1., 1.]])
    """
    if copies < 1:
        raise OptionError(f"redundant: copies={copies}, expected at least 1.")
    return Gates(lambda X: np.repeat(gates(X), copies, axis=1), f"{gates.name}, each {copies} times")


def gate_table(gates: Any, X: np.ndarray, *, allow_dead: bool = False) -> np.ndarray:
    """The values g_k(x_s) on rows X, float64 (n, K), from any description of gates.

    Parameters
    ----------
    gates : Gates, function, array or network
        A function of X returns scores; a gate is on where its score is positive. An array (n, K) is used unchanged, so
        gates between 0 and 1 are possible. A network with one hidden layer of K units gives its hard gates.
    X : array (n, d)
    allow_dead : bool
        Accept gates that are off on every row.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.relu(2, hidden=(3,), seed=0)
    >>> gate_table(net, np.array([[1.0, 0.5]]), allow_dead=True).shape
    (1, 3)
    """
    if isinstance(gates, nn.Module):
        table = _of_network(gates, X)
    elif callable(gates):
        table = (gates if isinstance(gates, Gates) else Gates(gates))(X)
    else:
        table = float_array(gates)
    if table.ndim != 2 or len(table) != len(X) or table.shape[1] == 0:
        raise ShapeError(f"theory: the gate table has shape {table.shape}, expected ({len(X)}, K): one row per input.")
    check_finite("theory: the gate table", table)
    dead = np.flatnonzero(~table.any(0))
    if len(dead) and not allow_dead:
        raise OptionError(
            f"theory: gate {dead[0]} is off on all {len(X)} rows ({len(dead)} of {table.shape[1]} such "
            "gates), so its weights never move. Drop it, or pass allow_dead=True."
        )
    return table


def gated_inputs(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x̃ = g(x) ⊗ x of every row, (n, Kd), from gates (n, K) and inputs (n, d)."""
    return (table[:, :, None] * x[:, None, :]).reshape(len(x), -1)


def _of_network(net: nn.Module, X: np.ndarray) -> np.ndarray:
    dtype = next(net.parameters()).dtype
    bits = record(net, torch.as_tensor(X, dtype=dtype), sensitivities=False, stream=False).rows(0, len(X)).bits
    if len(bits) != 1 or next(iter(bits.values())).ndim != 2:
        raise OptionError(
            f"theory: gates are taken from a network with one hidden layer; this one has {len(bits)} "
            f"gate sites {list(bits)}. Pass one layer's table, record(net, X).bits[site]."
        )
    return float_array(next(iter(bits.values())))
