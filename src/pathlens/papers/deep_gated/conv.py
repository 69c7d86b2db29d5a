"""Section 4: convolution and pooling as bundles of paths, Lemma 4.1 and invariance under rotations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.deep_gated.circular import ROUNDING, circular_network, signals
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Panel, Series

LEMMA_41 = Deviation(
    paper="the text before Lemma 4.1 studies one site, E[x_s(L, 1) x_s′(L, 1)], 'without loss of generality'",
    ours="the pooled output, as the lemma itself",
    why="one site without pooling has only the terms of paths that end at the same place",
)
CONV_GATES = Deviation(
    paper="'convolutional layers with global average pooling at the end causes translational invariance'",
    ours="measured for gates from a convolutional network and for gates that do not follow the input",
    why="the features x(p(0))A(x, p) rotate with x only if the gates do",
)
_LEMMA = Claim(
    "Lemma 4.1 holds: E[f f′] over all signs of the weights is the sum over bundles",
    at_most=ROUNDING,
    null=0.1,
    null_text="paths of one end position alone (a site without pooling)",
    paper="Lemma 4.1",
    unit="relative error",
)
_INVARIANT = Claim(
    "with pooling and convolutional gates, the path kernel does not see a rotation of one input",
    at_most=ROUNDING,
    null=0.1,
    null_text="an ordinary kernel",
    paper="'translation invariant'",
    unit="relative change of H(s, t) when t rotates",
)
_NOT_INVARIANT = Claim(
    "without pooling, or with gates that do not rotate, it does",
    above=0.01,
    null=0.0,
    null_text="invariant all the same",
    paper="–",
    unit="relative change of H(s, t) when t rotates",
)


def _change(kernel: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(other - kernel) / np.linalg.norm(kernel))


def _lemma_errors(net: Any, x: Any, sigma: float = 0.7) -> tuple[float, float]:
    """Relative error of Lemma 4.1 over all signs of the weights: with all pairs of paths of a bundle, and only with
    pairs that end at the same position."""
    import torch

    from pathlens.theory.deep_gated import path_bundles

    weights = [p for name, p in net.values.named_parameters() if "conv" in name]
    count = sum(p.numel() for p in weights)
    mean = np.zeros((len(x),) * 2)
    with torch.no_grad():
        for signs in itertools.product((-sigma, sigma), repeat=count):
            torch.nn.utils.vector_to_parameters(torch.tensor(signs, dtype=torch.float64), weights)
            f = net(x)[:, 0].numpy()
            mean += np.outer(f, f) / 2**count
    bundles = path_bundles(net, x)
    scale = sigma ** (2 * len(weights))
    return _change(mean, scale * bundles.kernel), _change(mean, scale * len(bundles.rotations) * bundles.rotations[0])


@experiment(
    "dgn.conv",
    title="Convolution and pooling as bundles of paths",
    what="Lemma 4.1 over all signs of the weights; invariance of the path kernel with and without pooling",
    claims=[_LEMMA, _INVARIANT, _NOT_INVARIANT],
    deviations=[LEMMA_41, CONV_GATES],
    sizes={"positions": 8, "kernel": 3, "inputs": 8},
    minutes=0.1,
    flops=1e7,
)
def conv(run: Run) -> Artifact:
    """Eight positions, two circular convolutions of kernel 3."""
    import torch

    from pathlens.kernels import npk
    from pathlens.theory.deep_gated import path_bundles

    length = 8
    lemma, split = [], []
    changes: dict[str, list[float]] = {"pooling": [], "no pooling": [], "gates that stay": []}
    for seed in run.seeds:
        lemma.append(_lemma_errors(circular_network(4, (1, 1, 1, 1), 2, "soft_galu", seed), signals(4, 4, seed)))
        x = signals(run.sizes["inputs"], length, 100 + seed)
        turned = torch.roll(x, 3, dims=2)
        pooled = circular_network(length, (1, 3, 3), 3, "galu", seed)
        flat = circular_network(length, (1, 3, 3), 3, "galu", seed, pool="flatten")
        for name, net in (("pooling", pooled), ("no pooling", flat)):
            K = npk(net, x).dense().numpy()
            changes[name].append(_change(K, npk(net, x, Y=turned).dense().numpy()))
        fixed_gates = [g.detach().numpy() for g in pooled.gates(x).values()]
        before, after = path_bundles(pooled, x), path_bundles(pooled, turned, gates=fixed_gates)
        changes["gates that stay"].append(_change(before.kernel, before.features @ after.features.T))
        split.append(before.rotations.trace(axis1=1, axis2=2) / np.trace(before.kernel))
    bundle_error, site_error = zip(*lemma)
    return run.artifact(
        claims=[
            _LEMMA.measure(bundle_error),
            _INVARIANT.measure(changes["pooling"]),
            *(_NOT_INVARIANT.measure(changes[name], row=name) for name in ("no pooling", "gates that stay")),
        ],
        metrics={
            "relative change when one input rotates": changes,
            "error of one site in place of pooling": list(site_error),
        },
        gates={"Lemma 4.1": "soft β=4", "invariance": "hard"},
        arrays=float32({"split": split, "change": list(changes.values())}),
        panels=[
            Panel(
                "strips",
                "When one input rotates",
                [Series(f"change[{i}]", name) for i, name in enumerate(changes)],
                x_label="relative change of the path kernel",
                x_scale="log",
            ),
            Panel(
                "lines",
                "Pairs of paths, by the rotation between them",
                [Series("split")],
                x_label="rotation",
                y_label="share of the kernel's trace",
            ),
        ],
    )
