"""Figure 8: a DLGN with two hidden layers of two units: its four paths, their regions and values."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space.region_shapes import picture, pixels
from pathlens.papers.panels import Panel, Series

PATHS = tuple(itertools.product(range(2), repeat=2))
NETWORKS = {"dlgn": "DLGN", "pwc": "DLGN-PWC"}

WEIGHTS = Deviation(
    paper="a drawn DLGN with two hidden layers of two units; its weights are letters",
    ours="networks with the default initialisation, one per seed",
    why="the statement of the figure holds for any weights",
)
_SUM = Claim(
    "each path's value on its region, added up over the four paths, is the network's output",
    at_most=1e-9,
    null=0.1,
    null_text="some path counted wrongly",
    paper="Theorem 2, Figure 8",
    unit="largest |difference| / largest |output|",
)
_FOUR = Claim(
    "the four paths are active in four different regions",
    at_least=4,
    null=3,
    null_text="two paths share a region",
    paper="'each active in a different region'",
    unit="regions",
)
_SIDES = Claim(
    "each region is the intersection of two half-spaces, one per layer",
    at_most=2,
    null=4,
    null_text="bounded by all four gates",
    paper="'the intersection of the appropriately coloured half-spaces'",
    unit="most faces of a region",
)
_AREAS = Claim(
    "the polyhedra of the weights and the polygons of the plane agree",
    at_most=1e-9,
    null=0.1,
    null_text="different regions",
    paper="–",
    unit="largest |difference| of areas in [−1, 1]²",
)


def path_functions(net: Any) -> np.ndarray:
    """The experts of a DLGN with two hidden layers without biases: g_π(x) = row · x, or row · (1, …, 1) for PWC."""
    u1, u2, u3 = (p.detach().numpy() for p in net.values.parameters())
    return np.stack([u3[0, i2] * u2[i2, i1] * u1[i1] for i1, i2 in PATHS])


def path_values(net: Any, regions: list[Any], x: np.ndarray) -> np.ndarray:
    """f_π(x)·g_π(x) of every path, where f_π is 1 on the path's region and 0 elsewhere: (4, n)."""
    inputs = np.ones_like(x) if net.value_input == "ones" else x
    return np.stack([region.contains(x) for region in regions]) * (path_functions(net) @ inputs.T)


@experiment(
    "hs.fig8",
    title="A toy DLGN: four paths, their regions and values",
    what="DLGN and DLGN-PWC with two hidden layers of two units: regions and values of all paths",
    claims=[_SUM, _FOUR, _SIDES, _AREAS],
    deviations=[WEIGHTS],
    sizes={"points": 400},
    minutes=0.1,
    flops=1e7,
)
def fig8(run: Run) -> Artifact:
    """Figure 8: every path of a small network, from its weights."""
    import torch

    from pathlens import models
    from pathlens.regions import path_region, slice2d

    points = np.random.default_rng(0).uniform(-1, 1, (run.sizes["points"], 2))
    errors: dict[str, list[float]] = {stem: [] for stem in NETWORKS}
    different, sides, apart = [], [], []
    arrays: dict[str, np.ndarray] = {}
    formulas: dict[str, Any] = {}
    for seed in run.seeds:
        for stem, name in NETWORKS.items():
            net = models.dlgn(2, (2, 2), gate="hard", piecewise_constant=stem == "pwc", seed=seed).double()
            regions = [path_region(net, path) for path in PATHS]
            with torch.no_grad():
                f = net(torch.from_numpy(points))[:, 0].numpy()
            errors[stem].append(float(np.abs(path_values(net, regions, points).sum(0) - f).max() / np.abs(f).max()))
            if seed == run.seeds[0]:
                arrays["region"] = picture(np.stack([region.contains(pixels(1.0)) for region in regions]))
                arrays[f"path_{stem}"] = picture(path_values(net, regions, pixels(1.0)))
                arrays[f"sum_{stem}"] = arrays[f"path_{stem}"].sum(0)
                formulas[name] = {
                    f"path {i1 + 1}, {i2 + 1}": {
                        "half-spaces": [f"{a:+.3f} x₁ {b:+.3f} x₂ > 0" for a, b in region.normals.tolist()],
                        "value": f"{g.sum():+.4f}" if stem == "pwc" else f"{g[0]:+.4f} x₁ {g[1]:+.4f} x₂",
                    }
                    for (i1, i2), region, g in zip(PATHS, regions, path_functions(net))
                }
        cells = slice2d(net, box=1.0)
        polygons = [cells.path_region(path) for path in PATHS]
        different.append(len({tuple(found.cells.tolist()) for found in polygons}))
        sides.append(max(len(region.facets) for region in regions))
        apart.append(max(abs(a.area - b.volume(1.0)) for a, b in zip(polygons, regions)))
    return run.artifact(
        claims=[
            *(_SUM.measure(errors[stem], row=name) for stem, name in NETWORKS.items()),
            _FOUR.measure(different),
            _SIDES.measure(sides),
            _AREAS.measure(apart),
        ],
        metrics={f"seed {run.seeds[0]}": formulas},
        gates={"regions and values": "hard"},
        arrays=arrays,
        panels=_panels(),
    )


def _panels() -> list[Panel]:
    def each(stem: str) -> list[Series]:
        return [Series(f"{stem}[{k}]", f"path {i1 + 1}, {i2 + 1}") for k, (i1, i2) in enumerate(PATHS)]

    values = {
        f"{name}: each path's value there, and their sum": [*each(f"path_{stem}"), Series(f"sum_{stem}", "the network")]
        for stem, name in NETWORKS.items()
    }
    return [
        Panel("matrices", title, series, x_label="x₁", y_label="x₂")
        for title, series in {"Where each path is active": each("region"), **values}.items()
    ]
