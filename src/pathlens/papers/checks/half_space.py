"""Checks of 'Half-space feature learning in neural networks': paths, their regions, and the overlap kernel."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens import kernels, paths, regions
from pathlens.models import GatedNetwork
from pathlens.papers.checks.networks import build, first_output, gate_layers, values
from pathlens.papers.checks.registry import Comparisons, Formula, check
from pathlens.recording import record
from pathlens.records import Record
from pathlens.testing import reference as ref

ORDER = 1
X = ref.draw(6, 3, seed=1)
HIDDEN = (3, 4, 3)


def _relu_gates(net: GatedNetwork) -> list[Tensor]:
    return ref.hard_gates(values(net)[:-1], X)


def _dlgn_gates(net: GatedNetwork) -> list[Tensor]:
    return ref.hard_gates(gate_layers(net), X, ref.linear)


@check(
    "hs.theorem1",
    formula=first_output,
    mutants={"every gate open": lambda net, X: first_output(net.with_gate("open"), X)},
)
def theorem1(formula: Formula) -> Comparisons:
    """Theorem 1: a ReLU network is a mixture of experts: ŷ(x) = Σ_π f_π(x) g_π(x)"""
    net = build("relu", 3, HIDDEN)
    yield formula(net, X), ref.path_sum(values(net), _relu_gates(net), X)[:, 0]


@check(
    "hs.theorem2",
    formula=first_output,
    mutants={"soft gates": lambda net, X: first_output(net.with_gate("soft"), X)},
)
def theorem2(formula: Formula) -> Comparisons:
    """Theorem 2: a DLGN with hard gates is Σ_π f_π(x) g_π(x) with gates from the linear network"""
    net = build("dlgn", 3, HIDDEN, gate="hard")
    yield formula(net, X), ref.path_sum(values(net), _dlgn_gates(net), X)[:, 0]


def _reading_x(net: GatedNetwork, X: Tensor) -> Tensor:
    other = build("dlgn", 3, HIDDEN, gate="hard")
    other.load_state_dict(net.state_dict())
    return first_output(other, X)


@check("hs.pwc", formula=first_output, mutants={"the values read x": _reading_x})
def piecewise_constant(formula: Formula) -> Comparisons:
    """section 2.3: with ones in place of x the experts are constants: ŷ(x) = Σ_π f_π(x) g_π(𝟙)"""
    net = build("dlgn", 3, HIDDEN, gate="hard", piecewise_constant=True)
    yield formula(net, X), ref.path_sum(values(net), _dlgn_gates(net), torch.ones_like(X))[:, 0]


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


def _hidden_units(net: GatedNetwork) -> list[Tensor]:
    """h_l of every hidden layer, as the package records them."""
    recorded = record(net, X, stream=False)
    assert isinstance(recorded, Record)
    return [recorded.layer_inputs[layer.name][0] for layer in recorded.layers if layer.part != "gate"][1:]


@check("hs.lemma3", formula=_beginnings, printed=_beginnings_as_printed)
def lemma3(formula: Formula) -> Comparisons:
    """Lemma 3: h_{l,i} of a DLGN is the sum over beginnings of paths, all of i_1, …, i_{l−1} from 1

    Erratum: the second sum is printed as Σ_{i_1=2}, which leaves out the first unit of layer 2
    """
    net = build("dlgn", 3, HIDDEN, gate="hard")
    yield from zip(formula(values(net), _dlgn_gates(net), X), _hidden_units(net), strict=True)


@check("hs.lemma4", formula=_beginnings, printed=_beginnings_as_printed)
def lemma4(formula: Formula) -> Comparisons:
    """Lemma 4: h_{l,i} of a ReLU network is the sum over beginnings of paths, all indices from 1

    Erratum: the second sum is printed as Σ_{i_1=2}, which leaves out the first unit of layer 2
    """
    net = build("relu", 3, HIDDEN)
    yield from zip(formula(values(net), _relu_gates(net), X), _hidden_units(net), strict=True)


# --- the overlap kernel ------------------------------------------------------------------------------------------


def _overlap(net: GatedNetwork, X: Tensor) -> Any:
    K = kernels.overlap(net, X).exact_counts()
    # the package computes the diagonal separately
    return K + np.diag(np.array(paths.count(net, X)) - np.diag(K))


@check(
    "hs.overlap",
    tolerance=0.0,
    formula=_overlap,
    mutants={"input nodes counted": lambda net, X: kernels.overlap(net, X, include_inputs=True).dense()},
)
def overlap(formula: Formula) -> Comparisons:
    """section 3.2: Λ(x, x′) = |A(x) ∩ A(x′)| = Π_l Σ_i 1(h_{l,i}(x) > 0)·1(h_{l,i}(x′) > 0)"""
    relu, dlgn = build("relu", 3, HIDDEN, seed=4), build("dlgn", 3, HIDDEN)
    yield formula(relu, X), ref.shared_paths(_relu_gates(relu))
    yield formula(dlgn, X), ref.shared_paths(_dlgn_gates(dlgn))


def _not_strict(net: GatedNetwork, X: Tensor) -> Tensor:
    return ref.shared_paths([(q >= 0).double() for q in ref.preactivations(values(net)[:-1], X)])


@check(
    "hs.gates",
    tolerance=0.0,
    formula=lambda net, X: kernels.overlap(net, X).exact_counts(),
    printed=_not_strict,
)
def strict_gates(formula: Formula) -> Comparisons:
    """equations 2 and 4: a gate is on where its pre-activation is > 0, as Λ and A_b have it

    Erratum: f_π is printed with ≥ 0: where a pre-activation is zero, Σ_π f_π f_π is not the printed Λ
    """
    # x = 0 lies on every boundary, and the last row on that of one unit
    net = build("relu", 3, HIDDEN, seed=4)
    normal = values(net)[0][0]
    rows = torch.stack([torch.zeros(3).double(), X[0], X[1], torch.stack([normal[1], -normal[0], 0 * normal[0]])])
    strict = ref.shared_paths([(torch.relu(q) > 0).double() for q in ref.preactivations(values(net)[:-1], rows)])
    yield formula(net, rows), strict
    loose = _not_strict(net, rows)
    yield f"at x = 0: {int(strict[0, 0])} active paths with >, {int(loose[0, 0])} with ≥"


# --- regions -----------------------------------------------------------------------------------------------------

_PLANE = (4, 4, 4)
_PATHS = list(itertools.islice(itertools.product(*(range(w) for w in _PLANE)), 0, None, 5))


def _plane_networks() -> list[tuple[GatedNetwork, list[ref.Sector]]]:
    """A DLGN and a ReLU network on the plane, and all cells of each."""
    dlgn, relu = build("dlgn", 2, _PLANE, gate="hard", seed=1), build("relu", 2, _PLANE, seed=4)
    return [(dlgn, ref.sectors(gate_layers(dlgn), False)), (relu, ref.sectors(values(relu)[:-1], True))]


def _cells_of(path: tuple[int, ...], cells: list[ref.Sector]) -> list[ref.Sector]:
    return [cell for cell in cells if all(bits[i] for bits, i in zip(cell.bits, path))]


def _region_areas(net: GatedNetwork, path: tuple[int, ...]) -> list[float]:
    """Area of a path region in the box: as cells of the slice, and as a polyhedron where it is one."""
    areas = [regions.slice2d(net).path_region(path).area]
    return areas + ([regions.path_region(net, path).volume(1.0)] if net.linear_gates else [])


def _one_gate_short(net: GatedNetwork, path: tuple[int, ...]) -> list[float]:
    cells = regions.slice2d(net)
    mask = torch.ones(len(cells), dtype=torch.bool)
    for bits, unit in list(zip(cells.patterns.values(), path))[:-1]:
        mask &= bits[:, unit]
    return [float(cells.areas[mask].sum())]


@check("hs.union", tolerance=1e-10, formula=_region_areas, mutants={"the last gate forgotten": _one_gate_short})
def union(formula: Formula) -> Comparisons:
    """section 3.1: the region of a path is the union of the activation regions whose gates include its"""
    networks = _plane_networks()
    for net, cells in networks:
        for path in _PATHS:
            area = sum(cell.area() for cell in _cells_of(path, cells))
            yield from (abs(found - area) / 4 for found in formula(net, path))
    dlgn, relu = (len(cells) for _, cells in networks)
    yield f"{2 * len(_PATHS)} paths; {dlgn} cells of the plane for the DLGN, {relu} for the ReLU network"


_FORMAL = 2 ** sum(w - 1 for w in _PLANE)  # patterns of gates that include a given path


@check(
    "hs.patterns",
    tolerance=0.0,
    formula=lambda net, path: len(regions.slice2d(net).path_region(path).cells),
    printed=lambda net, path: _FORMAL,
)
def patterns(formula: Formula) -> Comparisons:
    """section 3.1: a path region is a union of at most 2^((m−1)(L−1)) activation regions, in the plane of those few
    that are not empty

    Erratum: 'precisely 2^((m−1)(L−1))' counts patterns on paper; almost all of their regions are empty
    """
    most = []
    for net, cells in _plane_networks():
        counts = {path: len(_cells_of(path, cells)) for path in _PATHS}
        yield from (abs(formula(net, path) - count) for path, count in counts.items())
        most.append(max(counts.values()))
    yield f"not empty, of {_FORMAL} patterns per path: at most {most[0]} (DLGN), {most[1]} (ReLU)"


def _count_of_layers(m: int, L: int) -> tuple[int, int, int, int]:
    """Paths, activation patterns, faces of a path region, faces of an activation region; L − 1 hidden layers of m."""
    return m ** (L - 1), 2 ** (m * (L - 1)), L - 1, m * (L - 1)


@check(
    "hs.counts",
    tolerance=0.0,
    formula=_count_of_layers,
    printed=lambda m, L: (m**L, 2 ** (m * L), L, m * L),
)
def counts(formula: Formula) -> Comparisons:
    """section 3.1: m^(L−1) paths and 2^(m(L−1)) patterns; regions with L−1 and m(L−1) faces

    Erratum: printed with L where the L − 1 hidden layers belong: m^L, 2^(mL), L and mL
    """
    m, L = 2, 4  # six half-spaces in general position in R^6: every pattern occurs and every half-space is a face
    shallow = build("dlgn_shallow", 6, (m,) * (L - 1), gate="hard", seed=2)
    free = np.concatenate([W.numpy() for W in gate_layers(shallow)])
    assert np.linalg.matrix_rank(free) == len(free)
    listed = len(list(itertools.product(range(m), repeat=L - 1)))
    patterns = {
        tuple(free @ np.linalg.solve(free, np.array(s, dtype=float)) > 0)
        for s in itertools.product((-1, 1), repeat=len(free))
    }
    faces = len(regions.path_region(shallow, (0,) * (L - 1)).facets)
    cell = len(regions.PathRegion(free, np.zeros(len(free))).facets)
    yield from (abs(a - b) for a, b in zip(formula(m, L), (listed, len(patterns), faces, cell), strict=True))


@check(
    "hs.halfspaces",
    formula=lambda net, site: regions.halfspaces(net).normals(site),
    mutants={"the layer's own weights": lambda net, site: gate_layers(net)[site]},
)
def half_spaces(formula: Formula) -> Comparisons:
    """section 2.2: gate (l, i) of a DLGN is the half-space with normal row i of W_l ⋯ W_1"""
    net = build("dlgn", 3, (3, 3, 3), gate="hard")
    for site, layers in enumerate(itertools.accumulate([W] for W in gate_layers(net))):
        yield formula(net, site), torch.func.jacrev(lambda x, W=layers: ref.preactivations(W, x, ref.linear)[-1])(X[0])
