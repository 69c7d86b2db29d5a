"""Figure 9: the 24 paths of three circular convolutions of kernel 2 on three inputs have eight strengths."""

from __future__ import annotations

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.circular import ROUNDING, circular_network, signals
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

NOTATION = Deviation(
    paper="'the path strength θ¹(1)θ¹(2)θ¹(3)/d_in repeats 3 times'",
    ours="θ⁽¹⁾(i)θ⁽²⁾(j)θ⁽³⁾(k)/d_in, one weight per convolution",
    why="a path uses one weight of each layer; the superscript is the layer",
)
_EIGHT = Claim(
    "24 paths have only 8 different strengths",
    at_most=8,
    null=24,
    null_text="every path has its own",
    paper="'only 8 unique path strengths'",
    unit="strengths",
    needs=1,
)
_REBUILT = Claim(
    "the 8 strengths and the bundles' features give the network's output",
    at_most=ROUNDING,
    null=0.1,
    null_text="paths counted wrongly",
    paper="x_s(L, 1) = φᵀw",
    unit="largest |difference|",
    needs=1,
)


@experiment(
    "dgn.fig9",
    title="Eight path strengths",
    what="circular convolution, kernel 2, three inputs, global average pooling: all paths of a real network",
    claims=[_EIGHT, _REBUILT],
    deviations=[NOTATION],
    sizes={"inputs": 3, "kernel": 2, "convolutions": 3},
    minutes=0.1,
    flops=1e5,
)
def fig9(run: Run) -> Artifact:
    """All paths of a network, and its output from their bundles."""
    import torch

    from pathlens.theory.deep_gated import path_bundles

    strengths, errors, counts = [], [], []
    for seed in run.seeds:
        net, x = circular_network(3, (1, 1, 1, 1), 2, "relu", seed), signals(16, 3, seed)
        found = path_bundles(net, x)
        each = np.repeat(found.strengths / 3, 3)  # one per path
        strengths.append(each.reshape(8, 3))
        counts.append(len(np.unique(each.round(14))))
        with torch.no_grad():
            errors.append(float(abs(found.outputs - net(x)[:, 0].numpy()).max()))
    return run.artifact(
        claims=[_EIGHT.measure(counts), _REBUILT.measure(errors)],
        metrics={"paths": 24, "strengths": counts},
        paper_numbers={"unique path strengths": 8},
        gates={"ReLU": "hard"},
        arrays=float32({"strengths": strengths, "offsets": found.offsets}),
        panels=[
            Panel(
                "strips",
                "24 paths, eight strengths",
                [Series(f"strengths[0, {k}]", f"bundle {k + 1}") for k in range(8)],
                x_label="product of the weights on a path",
                note="One seed. The three paths of a bundle are rotations of each other: their dots agree.",
            )
        ],
    )
