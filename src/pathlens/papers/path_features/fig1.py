"""Figure 1: the toy network with eighteen paths, as a network that exists."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

TOY = Deviation(
    paper="hypothetical gates for three hypothetical inputs",
    ours="a ReLU network and three inputs, drawn from seeds until paths p₃ and p₁₂ alone are active for x₁ and x₂",
    why="the picture is then of a network that exists",
)
DEFINITION = Deviation(
    paper="Definition 2.2: {p: A(x_s, p) = 1, A(x_s′, p), p ∈ [P]}, and 𝓘_l maps to [w] for l = 0 too",
    ours="A(x_s, p) = A(x_s′, p) = 1; the first entry of a path is an input node, in [d_in]",
    why="'= 1' is missing, and there are d_in input nodes",
)
_PATHS = Claim(
    "the network has 18 paths",
    at_least=18,
    null=9,
    null_text="input nodes not counted",
    paper="p₁, …, p₁₈",
    unit="paths",
    needs=1,
)
_SHARED = Claim(
    "Λ(1, 2) = 1: paths p₃ and p₁₂ alone are active for both inputs, divided by d_in = 2",
    at_most=1,
    null=2,
    null_text="not divided by d_in",
    paper="Λ(1, 2) = 1",
    unit="Λ(1, 2)",
    needs=1,
)
_INNER = Claim(
    "output = ⟨NPF, NPV⟩, H = Σ∘Λ and K = ΦᵀVΦ",
    at_most=1e-10,
    null=0.1,
    null_text="paths counted wrongly",
    paper="Propositions 2.1 and 3.1, Lemma 2.1",
    unit="largest |difference|",
    needs=1,
)


def _toy() -> tuple[Any, Any, Any]:
    """A 2-3-3-1 ReLU network, three inputs with at least two active paths each, and its paths."""
    import torch

    from pathlens.errors import RecordError
    from pathlens.models import relu
    from pathlens.theory.deep_gated import path_table

    for seed in range(68, 10_000):  # no smaller seed gives such a network
        net = relu(2, hidden=(3, 3), seed=seed).double()
        x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        table = path_table(net, x)
        both = np.flatnonzero(table.activity[0] * table.activity[1])
        if list(both) == [2, 11] and (table.activity.sum(1) >= 4).all():
            return net, x, table
    raise RecordError("npk.fig1: no seed below 10,000 gives the toy network of the figure.")


@experiment(
    "npk.fig1",
    title="Eighteen paths",
    what="the toy network of Figure 1 as a real one: its 18 paths, features of three inputs, Λ(1, 2) = 1",
    claims=[_PATHS, _SHARED, _INNER],
    deviations=[TOY, DEFINITION],
    sizes={"inputs": 2, "hidden": [3, 3]},
    seeds=None,
    minutes=0.1,
    flops=1e5,
)
def fig1(run: Run) -> Artifact:
    """Figure 1: two inputs, two hidden layers of three units, one output."""
    import torch

    from pathlens import kernels

    net, x, table = _toy()
    with torch.no_grad():
        output = net(x)[:, 0].numpy()
    shared = table.activity @ table.activity.T / 2
    pairs = (
        (table.outputs, output),
        (table.kernel, (x @ x.T).numpy() * shared),
        (shared, kernels.overlap(net, x).dense().numpy()),
        (table.gram, kernels.ntk(net, x).dense().numpy()),
    )
    error = max(float(abs(a - b).max()) for a, b in pairs)
    return run.artifact(
        claims=[_PATHS.measure([len(table.units)]), _SHARED.measure([shared[0, 1]]), _INNER.measure([error])],
        metrics={"Λ": shared, "active paths": table.activity.sum(1), "outputs": output},
        paper_numbers={"paths": 18, "Λ(1, 2)": 1},
        gates={"ReLU": "hard"},
        seeds=(),
        arrays={
            "units": table.units,
            "features": table.features,
            "strengths": table.strengths,
            # (inputs, layers, units)
            "gates": np.stack([gates.detach().numpy() for gates in net.gates(x).values()], axis=1),
            "x": x.numpy(),
            "overlap": shared,
            "path": np.arange(1, len(table.units) + 1),
        },
        panels=[
            Panel("matrices", "Features of three inputs", [Series("features", "rows: inputs, columns: the 18 paths")]),
            Panel(
                "lines",
                "Strength of each path",
                [Series("strengths", style="points")],
                "path",
                "path",
                "product of its weights",
                marks=[(0.0, "")],
            ),
        ],
    )
