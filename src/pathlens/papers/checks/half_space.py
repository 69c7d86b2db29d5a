"""Checks of 'Half-space feature learning in neural networks': paths, their regions, and the overlap kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths, regions
from pathlens.models import GatedNetwork
from pathlens.papers.checks import reference as ref
from pathlens.papers.checks.registry import Measured, check
from pathlens.papers.checks.subjects import build, first_output, gate_layers, values
from pathlens.recording import record
from pathlens.records import Record

X = ref.draw(6, 3, seed=1)
HIDDEN = (3, 4, 3)


def _sum_over_experts(net: GatedNetwork, gates: list[Tensor], inputs: Tensor) -> Tensor:
    """Σ_π f_π g_π, path by path."""
    U = values(net)
    return ref.path_features(U, gates, inputs) @ ref.path_values(U)


def _relu_gates(net: GatedNetwork) -> list[Tensor]:
    return ref.hard_gates(values(net)[:-1], X)


def _dlgn_gates(net: GatedNetwork) -> list[Tensor]:
    return ref.hard_gates(gate_layers(net), X, unit=lambda q: q)


@check(
    "hs.theorem1",
    "Theorem 1",
    "a ReLU network is a mixture of experts: ŷ(x) = Σ_π f_π(x) g_π(x)",
    tolerance=1e-12,
    formula=first_output,
    mutants={"every gate open": lambda net, X: first_output(net.with_gate("open"), X)},
)
def theorem1(formula: Callable[..., Tensor]) -> float:
    net = build("relu", 3, HIDDEN)
    return ref.distance(formula(net, X), _sum_over_experts(net, _relu_gates(net), X))


@check(
    "hs.theorem2",
    "Theorem 2",
    "a DLGN with hard gates is Σ_π f_π(x) g_π(x) with gates from the linear network",
    tolerance=1e-12,
    formula=first_output,
    mutants={"soft gates": lambda net, X: first_output(net.with_gate("soft"), X)},
)
def theorem2(formula: Callable[..., Tensor]) -> float:
    net = build("dlgn", 3, HIDDEN, gate="hard")
    return ref.distance(formula(net, X), _sum_over_experts(net, _dlgn_gates(net), X))


def _reading_x(net: GatedNetwork, X: Tensor) -> Tensor:
    other = build("dlgn", 3, HIDDEN, gate="hard")
    other.load_state_dict(net.state_dict())
    return first_output(other, X)


@check(
    "hs.pwc",
    "section 2.3",
    "with ones in place of x the experts are constants: ŷ(x) = Σ_π f_π(x) g_π(𝟙)",
    tolerance=1e-12,
    formula=first_output,
    mutants={"the values read x": _reading_x},
)
def piecewise_constant(formula: Callable[..., Tensor]) -> float:
    net = build("dlgn", 3, HIDDEN, gate="hard", piecewise_constant=True)
    return ref.distance(formula(net, X), _sum_over_experts(net, _dlgn_gates(net), torch.ones_like(X)))


# --- Lemmas 3 and 4: hidden units as sums over beginnings of paths ------------------------------------------------


def _beginnings(U: list[Tensor], gates: list[Tensor], X: Tensor, first_of_second: int = 0) -> list[Tensor]:
    """h_l of every layer as the sum over i_0, …, i_{l−1}; the second hidden index starts at `first_of_second`."""
    found = []
    for depth in range(1, len(U)):
        h = torch.zeros(len(X), U[depth - 1].shape[0], dtype=torch.float64)
        for p in ref.all_paths([X.shape[1], *(W.shape[0] for W in U[:depth])]).tolist():
            if len(p) > 3 and p[2] < first_of_second:  # i_2 is summed over: it is not the unit itself
                continue
            term = X[:, p[0]]
            for k in range(depth):
                term = term * U[k][p[k + 1], p[k]] * gates[k][:, p[k + 1]]
            h[:, p[-1]] += term
        found.append(h)
    return found


def _beginnings_as_printed(U: list[Tensor], gates: list[Tensor], X: Tensor) -> list[Tensor]:
    return _beginnings(U, gates, X, first_of_second=1)


def _lemma(net: GatedNetwork, gates: list[Tensor], formula: Callable[..., list[Tensor]]) -> float:
    heard = record(net, X, stream=False)
    assert isinstance(heard, Record)
    inner = [heard.layer_inputs[layer.name][0] for layer in heard.layers if layer.part != "gate"][1:]
    return max(ref.distance(a, b) for a, b in zip(formula(values(net), gates, X), inner, strict=True))


_ERRATUM_INDEX = "the second sum is printed as Σ_{i_1=2}, which leaves out the first unit of layer 2"


@check(
    "hs.lemma3",
    "Lemma 3",
    "h_{l,i} of a DLGN is the sum over beginnings of paths, all of i_1, …, i_{l−1} from 1",
    tolerance=1e-12,
    formula=_beginnings,
    printed=_beginnings_as_printed,
    erratum=_ERRATUM_INDEX,
)
def lemma3(formula: Callable[..., list[Tensor]]) -> float:
    net = build("dlgn", 3, HIDDEN, gate="hard")
    return _lemma(net, _dlgn_gates(net), formula)


@check(
    "hs.lemma4",
    "Lemma 4",
    "h_{l,i} of a ReLU network is the sum over beginnings of paths, all indices from 1",
    tolerance=1e-12,
    formula=_beginnings,
    printed=_beginnings_as_printed,
    erratum=_ERRATUM_INDEX,
)
def lemma4(formula: Callable[..., list[Tensor]]) -> float:
    net = build("relu", 3, HIDDEN)
    return _lemma(net, _relu_gates(net), formula)


# --- the overlap kernel ------------------------------------------------------------------------------------------


def _shared_paths(gates: list[Tensor]) -> Tensor:
    """|A(x) ∩ A(x′)| by walking all paths of hidden units."""
    p = ref.all_paths([1, *(g.shape[1] for g in gates)])
    A = ref.path_activity(gates, p)
    return A @ A.T


def _overlap(net: GatedNetwork, X: Tensor) -> Any:
    K = kernels.overlap(net, X).exact_counts()
    # the diagonal has a route of its own in the package
    return K + np.diag(paths.count(net, X).astype(np.int64) - np.diag(K))


@check(
    "hs.overlap",
    "section 3.2",
    "Λ(x, x′) = |A(x) ∩ A(x′)| = Π_l Σ_i 1(h_{l,i}(x) > 0)·1(h_{l,i}(x′) > 0)",
    tolerance=0.0,
    formula=_overlap,
    mutants={"input nodes counted": lambda net, X: kernels.overlap(net, X, include_inputs=True).dense()},
)
def overlap(formula: Callable[..., Any]) -> float:
    relu, dlgn = build("relu", 3, HIDDEN, seed=4), build("dlgn", 3, HIDDEN)
    return max(
        ref.distance(formula(relu, X), _shared_paths(_relu_gates(relu))),
        ref.distance(formula(dlgn, X), _shared_paths(_dlgn_gates(dlgn))),
    )


def _not_strict(net: GatedNetwork, X: Tensor) -> Tensor:
    return _shared_paths([(q >= 0).double() for q in ref.scores(values(net)[:-1], X)])


@check(
    "hs.gates",
    "equations 2 and 4",
    "a gate is on where its pre-activation is > 0, as Λ and A_b have it",
    tolerance=0.0,
    formula=lambda net, X: kernels.overlap(net, X).exact_counts(),
    printed=_not_strict,
    erratum="f_π is printed with ≥ 0: where a pre-activation is zero, Σ_π f_π f_π is not the printed Λ",
)
def strict_gates(formula: Callable[..., Any]) -> Measured:
    # x = 0 lies on every boundary, and the last row on that of one unit
    net = build("relu", 3, HIDDEN, seed=4)
    normal = values(net)[0][0]
    rows = torch.stack([torch.zeros(3).double(), X[0], X[1], torch.stack([normal[1], -normal[0], 0 * normal[0]])])
    strict = _shared_paths([(torch.relu(q) > 0).double() for q in ref.scores(values(net)[:-1], rows)])
    loose = _shared_paths([(q >= 0).double() for q in ref.scores(values(net)[:-1], rows)])
    return Measured(
        ref.distance(formula(net, rows), strict),
        f"at x = 0: {int(strict[0, 0])} active paths with >, {int(loose[0, 0])} with ≥",
    )


# --- regions -----------------------------------------------------------------------------------------------------

_PLANE = (4, 4, 4)


def _plane_networks() -> list[tuple[GatedNetwork, list[Tensor], bool]]:
    dlgn, relu = build("dlgn", 2, _PLANE, gate="hard", seed=1), build("relu", 2, _PLANE, seed=4)
    return [(dlgn, gate_layers(dlgn), False), (relu, values(relu)[:-1], True)]


def _region_areas(net: GatedNetwork, path: tuple[int, ...]) -> list[float]:
    """Area of a path region in the box: as cells of the slice, and as a polyhedron where it is one."""
    areas = [regions.slice2d(net).path_region(path).area]
    return areas + ([regions.path_region(net, path).volume(1.0)] if net.linear_gates else [])


def _one_gate_short(net: GatedNetwork, path: tuple[int, ...]) -> list[float]:
    cells = regions.slice2d(net)
    mask = np.ones(len(cells), dtype=bool)
    for bits, unit in list(zip(cells.patterns.values(), path))[:-1]:
        mask &= bits[:, unit]
    return [float(cells.areas[mask].sum())]


@check(
    "hs.union",
    "section 3.1",
    "the region of a path is the union of the activation regions whose gates include its",
    tolerance=1e-10,
    formula=_region_areas,
    mutants={"the last gate forgotten": _one_gate_short},
)
def union(formula: Callable[..., list[float]]) -> Measured:
    worst, looked, cells = 0.0, 0, []
    for net, layers, relu in _plane_networks():
        known = ref.sectors(layers, relu)
        cells.append(len(known))
        for path in itertools.islice(itertools.product(*(range(w) for w in _PLANE)), 0, None, 5):
            area = sum(s.area() for s in known if all(bits[i] for bits, i in zip(s.bits, path)))
            worst = max(worst, *(abs(a - area) / 4 for a in formula(net, path)))
            looked += 1
    return Measured(
        worst, f"{looked} paths; {cells[0]} cells of the plane for the DLGN, {cells[1]} for the ReLU network"
    )


def _cells_found(net: GatedNetwork, path: tuple[int, ...]) -> int:
    return len(regions.slice2d(net).path_region(path).cells)


@check(
    "hs.patterns",
    "section 3.1",
    "a path region is a union of at most 2^((m−1)(L−1)) activation regions, "
    "in the plane of those few that are not empty",
    tolerance=0.0,
    formula=_cells_found,
    printed=lambda net, path: 2 ** sum(w - 1 for w in _PLANE),
    erratum="'precisely 2^((m−1)(L−1))' counts patterns on paper; almost all of their regions are empty",
)
def patterns(formula: Callable[..., int]) -> Measured:
    worst, most = 0.0, []
    for net, layers, relu in _plane_networks():
        known = ref.sectors(layers, relu)
        counts = {
            p: sum(all(bits[i] for bits, i in zip(s.bits, p)) for s in known)
            for p in itertools.islice(itertools.product(*(range(w) for w in _PLANE)), 0, None, 5)
        }
        worst = max(worst, *(abs(formula(net, p) - c) for p, c in counts.items()))
        most.append(max(counts.values()))
    formal = 2 ** sum(w - 1 for w in _PLANE)
    return Measured(worst, f"not empty, of {formal} patterns per path: at most {most[0]} (DLGN), {most[1]} (ReLU)")


def _count_of_layers(m: int, L: int) -> tuple[int, int, int, int]:
    """Paths, activation patterns, faces of a path region, faces of an activation region; L − 1 hidden layers of m."""
    return m ** (L - 1), 2 ** (m * (L - 1)), L - 1, m * (L - 1)


@check(
    "hs.counts",
    "section 3.1",
    "m^(L−1) paths and 2^(m(L−1)) patterns; regions with L−1 and m(L−1) faces",
    tolerance=0.0,
    formula=_count_of_layers,
    printed=lambda m, L: (m**L, 2 ** (m * L), L, m * L),
    erratum="printed with L where the L − 1 hidden layers belong: m^L, 2^(mL), L and mL",
)
def counts(formula: Callable[..., tuple[int, ...]]) -> float:
    m, L = 2, 4  # six half-spaces in general position in R^6: every pattern occurs and every half-space is a face
    shallow = build("dlgn_shallow", 6, (m,) * (L - 1), gate="hard", seed=2)
    free = np.concatenate([W.numpy() for W in gate_layers(shallow)])
    assert np.linalg.matrix_rank(free) == len(free)
    walked = len(list(itertools.product(range(m), repeat=L - 1)))
    patterns = {
        tuple(free @ np.linalg.solve(free, np.array(s, dtype=float)) > 0)
        for s in itertools.product((-1, 1), repeat=len(free))
    }
    faces = len(regions.path_region(shallow, (0,) * (L - 1)).facets)
    cell = len(regions.PathRegion(free, np.zeros(len(free))).facets)
    found = np.array([walked, len(patterns), faces, cell], dtype=float)
    return float(np.abs(np.array(formula(m, L)) - found).max())


@check(
    "hs.halfspaces",
    "section 2.2",
    "gate (l, i) of a DLGN is the half-space with normal row i of W_l ⋯ W_1",
    tolerance=1e-12,
    formula=lambda net, site: regions.halfspaces(net).normals(site),
    mutants={"the layer's own weights": lambda net, site: gate_layers(net)[site]},
)
def half_spaces(formula: Callable[..., Any]) -> float:
    net = build("dlgn", 3, (3, 3, 3), gate="hard")
    layers = gate_layers(net)

    def score(x: Tensor, site: int) -> Tensor:
        return ref.scores(layers, x[None], unit=lambda q: q)[site][0]

    normals = [torch.func.jacrev(lambda x, site=site: score(x, site))(X[0]) for site in range(3)]
    return max(ref.distance(formula(net, site), normals[site]) for site in range(3))
