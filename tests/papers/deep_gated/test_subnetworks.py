"""Active and sensitive gates, small, against paths that are listed one by one."""

import itertools
import math

import pytest
import torch

import pathlens as pl
from pathlens.papers.deep_gated.subnetworks import weakest_term


def test_gates_are_disjoint_and_terms_above_the_floor_at_any_size(on_synthetic):
    disjoint, _, floor = on_synthetic("dgn.subnetworks").claims
    assert all(disjoint.met) and all(value is not False for value in floor.met)


def test_the_weakest_sensitive_path_is_the_weakest_of_all():
    net = pl.models.soft_galu(2, hidden=(3, 3), beta=8.0, epsilon=0.0, seed=1).double()
    slopes = pl.theory.deep_gated.gate_slopes(
        net, 2 * torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
    )
    terms = []
    for s, (i, j) in itertools.product(range(4), itertools.product(range(3), repeat=2)):
        for a, b, g, h in ((0, 1, i, j), (1, 0, j, i)):
            if slopes.slopes[a][s, g] > 0.3 and slopes.gates[b][s, h] > 0.6:
                terms.append(slopes.slopes[a][s, g] * slopes.gates[b][s, h])
    assert terms and weakest_term(slopes, 0.6, 0.3) == pytest.approx(min(terms))
    assert weakest_term(slopes, 0.6, 1e9) == math.inf
