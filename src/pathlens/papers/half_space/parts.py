"""The ReLU network and the DLGN-PWC, and measurements on the simple and the complex part of their data.

Shared by the experiments on the circle and on modified Fashion-MNIST. Torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Run
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from torch import nn

    from pathlens.models import GatedNetwork
    from pathlens.recording import Trajectory
    from pathlens.training import Runs

NAMES = {"relu": "ReLU", "dlgn_pwc": "DLGN-PWC"}
PARTS = ("simple", "complex")
BETA = 4.0

MORE_PATHS = Claim(
    "more paths are active on the simple part",
    above=1.25,
    null=1.0,
    null_text="as many on either part",
    paper="section 5",
    unit="× (mean active paths at the end, simple / complex)",
)


def network(
    model: str,
    inputs: int,
    hidden: Sequence[int],
    outputs: int = 1,
    *,
    bias: bool = False,
    beta: float = BETA,
    frozen: bool = False,
    gates: GatedNetwork | None = None,
    seed: int | None = None,
) -> GatedNetwork:
    """A ReLU network, or a DLGN-PWC with soft gates; `gates` are those of another DLGN, which are then frozen."""
    from pathlens import models

    if model == "relu":
        return models.relu(inputs, hidden, outputs, bias=bias, seed=seed)
    return models.dlgn(
        inputs,
        hidden,
        outputs,
        piecewise_constant=True,
        beta=beta,
        frozen=frozen or gates is not None,
        gates_from=gates,
        bias=bias,
        seed=seed,
    )


def network_at(trajectory: Trajectory, epoch: int, *, like: nn.Module | None = None) -> Any:
    """The network with the weights that it had after an epoch, in eval mode; a wrapped one is rebuilt `like` itself."""
    from pathlens.recording import rebuild

    kept = trajectory.at_epoch(epoch).snapshot
    assert kept is not None  # every moment has the weights
    return rebuild(kept, like=like).eval()


def measure_at(
    run: Run, runs: Runs, epochs: Sequence[int], measure: Callable[[Any], Any], label: str = "paths"
) -> np.ndarray:
    """``measure(net)`` of every network, on the run's device, with its weights after each epoch: (seeds, epochs, …)."""
    found = []
    for trajectory, net in zip(runs, runs.networks):
        found.append([measure(network_at(trajectory, epoch, like=net).to(run.device)) for epoch in epochs])
        run.progress(label, len(found), len(runs))
    return np.array(found, dtype=float)


def part_means(values: np.ndarray, simple: np.ndarray) -> list[float]:
    """Means over the simple and over the complex rows."""
    return [float(values[simple].mean()), float(values[~simple].mean())]


def mean_paths(net: Any, x: Any, simple: np.ndarray) -> list[float]:
    """Mean number of active paths on simple and on complex rows, from exact counts of hard gates.

    `net` is a gated network or a module that contains one.
    """
    from pathlens.models import GatedNetwork
    from pathlens.paths import count

    gated = next(module for module in net.modules() if isinstance(module, GatedNetwork))
    return part_means(np.array(count(gated, x), dtype=object), simple)  # counts may exceed 64 bits


def path_ratios(run: Run, runs: Runs, epochs: Sequence[int], x: Any, simple: np.ndarray) -> np.ndarray:
    """Mean active paths on simple rows over those on complex rows, (seeds, epochs); x is on the run's device."""
    paths = measure_at(run, runs, epochs, lambda net: mean_paths(net, x, simple))
    with np.errstate(divide="ignore", invalid="ignore"):  # there may be no active path at all
        return paths[..., 0] / paths[..., 1]


def ratio_panel(title: str, series: Sequence[Series], *, x_label: str, note: str = "") -> Panel:
    """Ratios of active paths, simple over complex, as one row of dots for each series."""
    return Panel(
        "strips",
        title,
        series,
        x_label=x_label,
        x_scale="log",
        marks=[(1.0, "as many on either part")],
        note=note,
    )
