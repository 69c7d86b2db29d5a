"""Figure 6 (with 9 and 10): where the half-space of every gate points, before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pathlens.errors import OptionError
from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.pages.words import read_spread
from pathlens.papers.panels import Panel, Series

TOP_ANGLE = math.radians(30)
WHEN = {"init": "at initialisation", "end": "after training"}

_PREFER = Claim(
    "after training, many last-layer half-spaces point to the slow half (within 30°)",
    above=1 / 3,
    null=1 / 6,
    null_text="random directions: 60° of 360°",
    paper="3 of 4 shown",
    unit="share of layer 5",
)
_DEPTH = Claim(
    "the last layer prefers the slow half more than the first",
    above=0.1,
    null=0.0,
    null_text="no difference between layers",
    paper="'especially in the last layer'",
    unit="share, layer 5 − layer 1",
)


def gate_normals(net: Any) -> np.ndarray:
    """Unit normals of every gate of a DLGN whose layers are of one width: (L, w, d)."""
    from pathlens.regions import halfspaces

    gates = halfspaces(net)
    normals = np.stack([gates.normals(site).numpy() for site in gates.sites])
    return normals / np.linalg.norm(normals, axis=2, keepdims=True)


@circle.circle_experiment(
    "hs.fig6",
    title="The half-spaces of every neuron",
    what="half-spaces of a DLGN-PWC at initialisation and at the end, per layer",
    claims=[_PREFER, _DEPTH],
    deviations=[circle.CIRCLE, circle.SETTINGS],
)
def fig6(run: Run) -> Artifact:
    """Figure 6: normals of all gates, and how many of them point to the top."""
    hidden = run.sizes["hidden"]
    if len(set(hidden)) > 1:
        raise OptionError(f"hs.fig6 compares layers of one width, got hidden={hidden}. Set equal ones.")
    runs = circle.train_circle(run).runs["dlgn_pwc"]
    arrays = {}
    for when, epoch in (("init", 0), ("end", run.sizes["epochs"]["dlgn_pwc"])):
        normals = arrays[f"normals_{when}"] = np.stack([gate_normals(circle.network_at(t, epoch)) for t in runs])
        arrays[f"share_top_{when}"] = (normals[..., 1] > math.cos(TOP_ANGLE)).mean(axis=2)
    end = arrays["share_top_end"]
    return run.artifact(
        claims=[_PREFER.measure(end[:, -1]), _DEPTH.measure(end[:, -1] - end[:, 0])],
        metrics={"share within 30° of the top": {when: arrays[f"share_top_{when}"].tolist() for when in WHEN}},
        paper_numbers={"last layer at the end": "3 of the 4 neurons shown"},
        gates={"half-spaces": "hard", "trained with": circle.SOFT["dlgn_pwc"]},
        arrays=float32(arrays),
        config=circle.BETAS,
        panels=fig6_panels(arrays),
    )


def fig6_panels(arrays: Mapping[str, np.ndarray]) -> list[Panel]:
    """Every neuron's half-space before and after training, and the share that points to the top."""
    first, last = (read_spread((100 * arrays[f"share_top_{when}"][:, -1]).round(1)) for when in WHEN)
    layers = arrays["share_top_end"].shape[1]
    return [
        Panel(
            "half_spaces",
            "the half-space of every neuron, one seed",
            [Series(f"normals_{when}[0]", label) for when, label in WHEN.items()],
        ),
        Panel(
            "lines",
            "share of normals within 30° of the top",
            [
                Series("share_top_init", WHEN["init"], colour="muted"),
                Series("share_top_end", WHEN["end"], colour="top"),
            ],
            x_label="layer",
            x_ticks=[(k, str(k + 1)) for k in range(layers)],
            marks=[(1 / 6, "random directions")],
            note=f"In the last layer {first} % at initialisation and {last} % after training, median (range); random "
            "directions would give 16.7 %.",
        ),
    ]
