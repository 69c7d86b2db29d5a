"""Counts and shapes of path regions, against definitions given here."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull

import pathlens as pl
from pathlens.papers.half_space.fig1 import two_bumps
from pathlens.papers.half_space.region_shapes import borders, path_masks, shapes
from pathlens.regions import path_region, slice2d


def all_masks(cells):
    """Where each path is active, path by path."""
    sizes = [bits.shape[1] for bits in cells.patterns.values()]
    return {path: cells.active(path).numpy() for path in itertools.product(*map(range, sizes))}


@pytest.mark.parametrize("kind", [pl.models.relu, pl.models.dlgn])
def test_path_regions_are_counted_as_by_enumeration(kind):
    cells = slice2d(kind(2, (4, 3, 4), bias=True, seed=1), box=3.0)
    active = [mask.tobytes() for mask in all_masks(cells).values() if mask.any()]
    found = path_masks({site: bits.numpy() for site, bits in cells.patterns.items()})
    assert sum(found.values()) == len(active)
    assert len(found) == len(set(active)) < len(active)


def test_faces_of_a_dlgn_are_the_facets_of_its_polyhedra():
    net = pl.models.dlgn(2, (3, 3, 3), bias=True, seed=2).double()
    cells = slice2d(net, box=100.0)  # every corner is inside
    lines, numbers = borders(cells)
    pairs = cells.neighbours.numpy()
    centres = cells.centres.numpy()
    inner, outer = ((lines[:, :2] * centres[pairs[:, k]]).sum(1) + lines[:, 2] for k in (0, 1))
    assert (inner > 0).all() and (outer < 0).all()
    assert numbers.max() + 1 == 9  # one line per gate
    for path, mask in all_masks(cells).items():
        if mask.any():
            border = mask[pairs[:, 0]] != mask[pairs[:, 1]]
            assert len(np.unique(numbers[border])) == len(path_region(net, path).facets)


@pytest.mark.parametrize("kind", [pl.models.relu, pl.models.dlgn])
def test_convex_means_as_large_as_the_hull(kind):
    cells = slice2d(kind(2, (4, 3, 4), bias=True, seed=1), box=3.0)
    expected, pieces = [], []
    for mask in {mask.tobytes(): (path, mask) for path, mask in all_masks(cells).items() if mask.any()}.values():
        hull = ConvexHull(cells.corners.numpy()[mask[1]].reshape(-1, 2)).volume
        expected.append(hull < cells.areas.numpy()[mask[1]].sum() * (1 + 1e-9))
        pieces.append(cells.path_region(mask[0]).n_components == 1)
    found = shapes(cells, most=10**6)
    assert (found.convex, found.connected) == (np.mean(expected), np.mean(pieces))
    assert found.looked_at == len(expected) and found.activation_regions == len(cells)
    assert (found.convex == 1) == (kind is pl.models.dlgn)


def test_a_dead_network_has_no_path_regions():
    net = pl.models.relu(2, (2, 2), bias=True)
    with torch.no_grad():
        net.values.linear2.bias.fill_(-100.0)
    found = shapes(slice2d(net, box=1.0), most=10)
    assert (found.path_regions, found.active_paths) == (0, 0) and math.isnan(found.convex)


def test_two_strips_are_neither_connected_nor_convex():
    cells = slice2d(two_bumps("relu", 2), box=((0.0, 4.0), (-1.0, 1.0)))
    found = shapes(cells, most=10)
    assert found.path_regions == 4 and found.convex < 1 and found.connected < 1
