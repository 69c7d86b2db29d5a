"""Section 3.1: counts and shapes of activation-pattern regions and path regions, with and without biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.half_space.parts import network
from pathlens.papers.half_space.region_shapes import Shapes, picture, pixels, shapes
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from pathlens.training import Runs

WHEN = ("init", "end")

FORMAL = Deviation(
    paper="path regions are 'lesser in number (m^L vs 2^(mL))' with L − 1 hidden layers",
    ours="exponents m^(L−1) and 2^(m(L−1)); and both counted where they are not empty: different path regions against "
    "activation regions",
    why="almost all of the 2^(m(L−1)) patterns are empty in the plane, so the formal numbers compare nothing",
)
FACES = Deviation(
    paper="'DLGN active path regions have L faces as opposed to activation pattern regions having mL faces'",
    ours="at most L − 1 and m(L − 1); counted on the polygons inside the box",
    why="one half-space per hidden layer; most of them are redundant",
)
BIASED = Deviation(
    paper="networks without biases",
    ours="also networks with biases, narrower, so that all different path regions can be counted",
    why="without biases every region of the plane is a sector with two faces, so that numbers of faces cannot differ",
)
_CONVEX = Claim(
    "all path regions of a DLGN are convex and in one piece",
    at_least=1.0,
    null=0.9,
    null_text="some are not, as of ReLU networks",
    paper="'convex polyhedra'",
    unit="share of regions, the smaller of init and end",
)
_BENT = Claim(
    "path regions of a trained ReLU network are not all convex",
    above=0.0,
    null=0.0,
    null_text="as simple as a DLGN's",
    paper="'can represent complex shapes'",
    unit="share of regions not convex",
)
_FEW_FACES = Claim(
    "a DLGN's path region has at most one face per hidden layer",
    at_most=5,
    null=80,
    null_text="one for every gate",
    paper="L faces",
    unit="most faces of a path region",
)
_SIMPLER = Claim(
    "path regions have fewer faces than activation regions (networks with biases)",
    below=1.0,
    null=1.0,
    null_text="as many",
    paper="'simpler structures'",
    unit="× (mean faces, path / activation region)",
)
_FEWER = replace(
    _SIMPLER,
    text="there are fewer different path regions than activation regions",
    paper="'lesser in number'",
    unit="× (not empty and different, path / activation)",
)
_STEADY = Claim(
    "training does not change the number of activation regions drastically",
    at_most=2.0,
    null=10.0,
    null_text="tenfold",
    paper="'observed … to not change drastically'",
    unit="× (larger / smaller of init and end)",
)


def _train_biased(run: Run) -> dict[str, Runs]:
    """ReLU and DLGN-PWC with biases on the circle, kept at the start and at the end."""
    from pathlens import data

    size = run.sizes
    hidden, epochs, points = size["biased_hidden"], size["biased_epochs"], data.circle(size["points"])
    options = {"epochs": epochs, "lr": size["biased_lr"], "batch_size": size["batch_size"], "keep": [0, epochs]}
    return {
        m: circle.train_on_circle(
            run, network(m, 2, hidden, bias=True), points, f"{name} with biases", "biases", m, **options
        )
        for m, name in circle.LEARNED.items()
    }


@circle.circle_experiment(
    "hs.regions",
    title="Activation-pattern regions and path regions",
    what="counts, faces, connectedness and convexity of regions in the plane: ReLU and DLGN-PWC, init and end",
    claims=[_CONVEX, _BENT, _FEW_FACES, _SIMPLER, _FEWER, _STEADY],
    deviations=[FORMAL, FACES, BIASED, circle.CIRCLE, circle.SETTINGS],
    sizes={
        **circle.SIZES,
        "box": 1.5,
        "regions": (150, 1000),
        "biased_hidden": [8] * 5,
        "biased_epochs": (60, 300),
        "biased_lr": 2e-3,
    },
    minutes=(2, 14),
)
def regions(run: Run) -> Artifact:
    """Section 3.1, counted on the networks of the circle, and on networks with biases."""
    from pathlens.regions import slice2d

    size = run.sizes
    trained = {"": circle.train_circle(run).runs, " with biases": _train_biased(run)}
    kinds = {f"{name}{biases}": runs[m] for biases, runs in trained.items() for m, name in circle.LEARNED.items()}
    found: list[list[list[Shapes]]] = []  # kinds, init and end, seeds
    arrays: dict[str, Any] = {}
    for i, runs in enumerate(kinds.values()):
        found.append([])
        for j, epoch in enumerate((0, int(runs[0].moments[-1].epoch or 0))):
            cells = [slice2d(circle.network_at(t, epoch), box=size["box"]) for t in runs]
            found[i].append([shapes(one, size["regions"], seed=seed) for one, seed in zip(cells, run.seeds)])
            paths = np.array([float(n) for n in cells[0].counts])
            arrays[f"paths_{i}_{WHEN[j]}"] = picture(paths[cells[0].locate(pixels(size["box"]))])
            run.progress("regions", 2 * i + j + 1, 2 * len(kinds))
    table = {
        field.name: np.array([[[getattr(one, field.name) for one in seeds] for seeds in kind] for kind in found], float)
        for field in fields(Shapes)
    }
    arrays |= {key: v for key, v in table.items() if key not in ("most_path_faces", "path_polygons", "looked_at")}

    def measured(claim: Claim, values: np.ndarray, chosen: str = "") -> list[Claim]:
        """The claim for every kind of network whose name has the chosen word; `values` has one row per kind."""
        return [claim.measure(row, row=name) for name, row in zip(kinds, values) if chosen in name]

    counts = table["activation_regions"]
    formal = {
        f"networks{biases}": {"paths": int(np.prod(h)), "log₁₀ of patterns": float(sum(h) * np.log10(2))}
        for biases, h in zip(trained, (size["hidden"], size["biased_hidden"]))
    }
    return run.artifact(
        claims=[
            *measured(_CONVEX, np.minimum(table["convex"], table["connected"]).min(1), "DLGN"),
            *measured(_BENT, 1 - table["convex"][:, 1], "ReLU"),
            *measured(_FEW_FACES, table["most_path_faces"].max(1), "DLGN"),
            *measured(_SIMPLER, (table["path_faces"] / table["activation_faces"])[:, 1], "biases"),
            *measured(_FEWER, (table["path_regions"] / counts)[:, 1]),
            *measured(_STEADY, counts.max(1) / counts.min(1)),
        ],
        metrics={
            "formal": formal,
            "mean and standard deviation": {
                name: {
                    when: {key: [float(v[i, j].mean()), float(v[i, j].std())] for key, v in table.items()}
                    for j, when in enumerate(WHEN)
                }
                for i, name in enumerate(kinds)
            },
        },
        paper_numbers={"number": "m^L against 2^(mL)", "faces": "L against mL"},
        gates={"regions": "hard", "DLGN-PWC was trained with": circle.SOFT["dlgn_pwc"]},
        arrays=arrays,
        panels=_panels(kinds),
    )


def _panels(kinds: Iterable[str]) -> list[Panel]:
    kinds = list(kinds)

    def rows(*arrays: tuple[str, str]) -> list[Series]:
        return [
            Series(f"{key}[{i}, {j}]", f"{kind}, {when}{word}")
            for i, kind in enumerate(kinds)
            for j, when in enumerate(WHEN)
            for key, word in arrays
        ]

    return [
        Panel(
            "strips",
            "How many regions are not empty",
            rows(("activation_regions", ": activation"), ("path_regions", ": path, different")),
            x_label="regions in the box",
            x_scale="log",
        ),
        Panel(
            "strips",
            "Faces",
            rows(("activation_faces", ": activation"), ("path_faces", ": path")),
            x_label="mean number of faces of a region",
        ),
        Panel("strips", "Convex path regions", rows(("convex", "")), x_label="share of path regions"),
        *(
            Panel(
                "matrices",
                f"Active paths: {kind}",
                [Series(f"paths_{i}_{when}", when) for when in WHEN],
                x_label="x₁",
                y_label="x₂",
                y_scale="log",
            )
            for i, kind in enumerate(kinds)
        ),
    ]
