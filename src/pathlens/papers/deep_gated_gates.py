"""Deep Gated Networks: path bundles of convolutions, active and sensitive gates, and what no ReLU network fits.

Imported by deep_gated, which registers the other experiments of the paper. Torch is imported inside functions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from pathlens.papers import deep_gated_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment

PAPER = "Deep Gated Networks"
ROUNDING = 1e-10


# --- figure 9: eight path strengths ----------------------------------------------------------------------------

FIGURE_9 = Deviation(
    paper="'the path strength θ¹(1)θ¹(2)θ¹(3)/d_in repeats 3 times'",
    authors_code="–",
    ours="θ⁽¹⁾(i)θ⁽²⁾(j)θ⁽³⁾(k)/d_in, one weight per convolution",
    why="a path uses one weight of each layer; the superscript is the layer",
)
_EIGHT = Claim(
    "24 paths have only 8 different strengths",
    threshold=8,
    comparison="<=",
    null=24,
    null_text="every path has its own",
    paper="'only 8 unique path strengths'",
    unit="strengths",
    needs=1,
)
_REBUILT = Claim(
    "the 8 strengths and the bundles' features give the network's output",
    threshold=ROUNDING,
    comparison="<=",
    null=0.1,
    null_text="paths counted wrongly",
    paper="x_s(L, 1) = φᵀw",
    unit="largest |difference|",
    needs=1,
)


def _circular(length: int, channels: tuple[int, ...], kernel: int, kind: str, seed: int, **options: Any) -> Any:
    """A gated circular convolutional network in float64 whose last weight is one, as the paper draws it."""
    import torch

    from pathlens.models import CircularConvNet, gated_twin

    template = CircularConvNet(length, channels, kernel, **options).double()
    net = gated_twin(template, kind, example=torch.zeros(2, channels[0], length, dtype=torch.float64), seed=seed)
    if channels[-1] == 1:
        with torch.no_grad():
            net.values.get_parameter("stack.output.weight").fill_(1.0)
    return net


def _signals(n: int, length: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, length, dtype=torch.float64, generator=generator)


@experiment(
    "dgn.fig9",
    title="Eight path strengths",
    what="circular convolution, kernel 2, three inputs, global average pooling: all paths of a real network",
    claims=[_EIGHT, _REBUILT],
    minutes=(0.1, 0.1),
    flops=1e5,
)
def fig9(run: Run) -> Artifact:
    """Figure 9: three convolutions of kernel 2 on three inputs."""
    import torch

    from pathlens.theory.deep_gated import path_bundles

    strengths, errors, counts = [], [], []
    for seed in run.seeds:
        net, x = _circular(3, (1, 1, 1, 1), 2, "relu", seed), _signals(16, 3, seed)
        found = path_bundles(net, x)
        each = np.repeat(found.strengths / 3, 3)  # one per path
        strengths.append(each.reshape(8, 3))
        counts.append(len(np.unique(each.round(14))))
        with torch.no_grad():
            errors.append(float(abs(found.outputs - net(x)[:, 0].numpy()).max()))
    return Artifact(
        "dgn.fig9",
        "Eight path strengths",
        PAPER,
        run.scale,
        {"inputs": 3, "kernel": 2, "convolutions": 3},
        run.seeds,
        (_EIGHT.measure(counts), _REBUILT.measure(errors)),
        {"paths": 24, "strengths": counts},
        {},
        {"unique path strengths": 8},
        (FIGURE_9,),
        {"ReLU": "hard"},
        {"strengths": np.array(strengths), "offsets": found.offsets},
        figures=panels.strengths(),
    )


# --- section 4: convolution and pooling ------------------------------------------------------------------------

LEMMA_41 = Deviation(
    paper="the text before Lemma 4.1 studies one site, E[x_s(L, 1) x_s′(L, 1)], 'without loss of generality'",
    authors_code="–",
    ours="the pooled output, as the lemma itself",
    why="one site without pooling has only the terms of paths that end at the same place",
)
CONV_GATES = Deviation(
    paper="'convolutional layers with global average pooling at the end causes translational invariance'",
    authors_code="–",
    ours="measured for gates from a convolutional network and for gates that do not follow the input",
    why="the features x(p(0))A(x, p) rotate with x only if the gates do",
)
_LEMMA = Claim(
    "Lemma 4.1 holds: E[f f′] over all signs of the weights is the sum over bundles",
    threshold=ROUNDING,
    comparison="<=",
    null=0.1,
    null_text="paths of one end position alone (a site without pooling)",
    paper="Lemma 4.1",
    unit="relative error",
)
_INVARIANT = Claim(
    "with pooling and convolutional gates, the path kernel does not see a rotation of one input",
    threshold=ROUNDING,
    comparison="<=",
    null=0.1,
    null_text="an ordinary kernel",
    paper="'translation invariant'",
    unit="relative change of H(s, t) when t rotates",
)
_NOT_INVARIANT = Claim(
    "without pooling, or with gates that do not rotate, it does",
    threshold=0.01,
    comparison=">",
    null=0.0,
    null_text="invariant all the same",
    paper="–",
    unit="relative change of H(s, t) when t rotates",
)


def _change(kernel: np.ndarray, turned: np.ndarray) -> float:
    return float(np.linalg.norm(turned - kernel) / np.linalg.norm(kernel))


def _lemma_error(net: Any, x: Any, sigma: float = 0.7) -> tuple[float, float]:
    """Relative error of Lemma 4.1 over every sign of the kernels' weights: with all pairs of a bundle, and with pairs
    that end at the same position alone."""
    import itertools

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
    minutes=(0.1, 0.1),
    flops=1e7,
)
def conv(run: Run) -> Artifact:
    """Section 4: eight positions, two circular convolutions of kernel 3."""
    import torch

    from pathlens.kernels import npk
    from pathlens.theory.deep_gated import path_bundles

    n, length = run.sizes_of("dgn.conv")["inputs"], 8
    lemma, site, changes = [], [], {"pooling": [], "no pooling": [], "gates that stay": []}  # type: ignore[var-annotated]
    split = []
    for seed in run.seeds:
        exact = _lemma_error(_circular(4, (1, 1, 1, 1), 2, "soft_galu", seed), _signals(4, 4, seed))
        lemma.append(exact[0])
        site.append(exact[1])
        x = _signals(n, length, 100 + seed)
        turned = torch.roll(x, 3, dims=2)
        pooled = _circular(length, (1, 3, 3), 3, "galu", seed)
        flat = _circular(length, (1, 3, 3), 3, "galu", seed, pool="flatten")
        for name, net in (("pooling", pooled), ("no pooling", flat)):
            K = npk(net, x).dense().numpy()
            changes[name].append(_change(K, npk(net, x, Y=turned).dense().numpy()))
        stays = [g.detach().numpy() for g in pooled.gates(x).values()]
        before, after = path_bundles(pooled, x), path_bundles(pooled, turned, gates=stays)
        changes["gates that stay"].append(_change(before.kernel, before.features @ after.features.T))
        split.append(before.rotations.trace(axis1=1, axis2=2) / np.trace(before.kernel))
    claims = (
        _LEMMA.measure(lemma),
        _INVARIANT.measure(changes["pooling"]),
        _NOT_INVARIANT.measure(changes["no pooling"], row="no pooling"),
        _NOT_INVARIANT.measure(changes["gates that stay"], row="gates that stay"),
    )
    return Artifact(
        "dgn.conv",
        "Convolution and pooling as bundles of paths",
        PAPER,
        run.scale,
        {"positions": length, "kernel": 3, "inputs": n},
        run.seeds,
        claims,
        {"relative change when one input rotates": changes, "error of one site in place of pooling": site},
        {},
        {},
        (LEMMA_41, CONV_GATES),
        {"Lemma 4.1": "soft β=4", "invariance": "hard"},
        {"split": np.array(split), "change": np.array(list(changes.values()))},
        figures=panels.conv(list(changes)),
    )


# --- section 3.1: active and sensitive gates -------------------------------------------------------------------

THRESHOLD = Deviation(
    paper="active and sensitive gates are disjoint for τ_S > dχ_ε/dv at χ_ε⁻¹(τ_A), for any τ_A in (0, 1 + ε)",
    authors_code="–",
    ours="τ_S = β·|dχ_ε/dv|·max|∂q/∂θ|, and τ_A ≥ (1 + ε)/2",
    why="∂G/∂θ has the factors β and ∂q/∂θ, and below (1 + ε)/2 an active gate can be steeper than at the threshold",
)
SUB_DATA = Deviation(
    paper="binary MNIST (4 against 7); section 3.1 itself shows no numbers",
    authors_code="not public",
    ours="soft-GaLU of Experiment 3 (β = 4, ε = .1); quick: digits of scikit-learn, narrower",
    why="always on the machine, and seconds in place of minutes",
)
_DISJOINT = Claim(
    "no gate is active and sensitive at once, with the corrected threshold",
    threshold=0,
    comparison="<=",
    null=1,
    null_text="some gate is both",
    paper="section 3.1",
    unit="gates, over all epochs, inputs and τ_A",
)
_PRINTED = Claim(
    "with the printed threshold some gates are both",
    threshold=0.01,
    comparison=">",
    null=0.0,
    null_text="the printed threshold suffices",
    paper="'∅ for all τ_S > dχ/dv'",
    unit="share of active gates",
)
_FLOOR = Claim(
    "on every sensitive path the sensitive gate's term of equation 6 exceeds τ_S τ_A^(d−2)",
    threshold=1.0,
    comparison=">=",
    null=0.5,
    null_text="other gates pull it below",
    paper="section 3.1",
    unit="× (weakest term / τ_S τ_A^(d−2))",
)
TAUS = (0.6, 0.8, 1.0)
BETA, EPSILON = 4.0, 0.1


def _two_digits(run: Run) -> Any:
    """4 against 7 with targets ±1: MNIST at paper scale, scikit-learn's digits otherwise."""
    import torch

    from pathlens.data import DataSet, binary_mnist, digits

    if run.scale == "paper":
        return binary_mnist(flatten=True)
    full = digits(flatten=True)
    keep = (full.y == 4) | (full.y == 7)
    targets = torch.where(full.y[keep] == 7, 1.0, -1.0)[:, None]
    return DataSet(full.x[keep], targets, name="digits, 4 against 7")


def _weakest(slopes: Any, active: float, sensitive: float) -> float:
    """Smallest (slope of the sensitive gate)·∏(other gates) over all sensitive paths of all inputs; ∞ if none."""
    layers = len(slopes.gates)
    on = [np.where(g > active, g, np.inf).min(1) for g in slopes.gates]  # the weakest active gate per layer
    moving = [np.where(s > sensitive, s, np.inf).min(1) for s in slopes.slopes]
    terms = [moving[k] * np.prod([on[j] for j in range(layers) if j != k], axis=0) for k in range(layers)]
    return float(np.min(terms))


@experiment(
    "dgn.subnetworks",
    title="Active and sensitive gates while training",
    what="soft-GaLU on 4 against 7: sizes of the active and the sensitive sub-networks over training",
    claims=[_DISJOINT, _PRINTED, _FLOOR],
    data=("mnist",),
    minutes=(0.6, 20),
    # 12,107 images of a 4 or a 7; gates and values are a network each
    flops=lambda size: (
        12.0
        * (784 * size["width"] + (size["hidden_layers"] - 1) * size["width"] ** 2)
        * 12_107
        * size["epochs"]
        * size["seeds"]
    ),
)
def subnetworks(run: Run) -> Artifact:
    """Section 3.1, measured on the network of Experiment 3."""
    from pathlens import models
    from pathlens.theory import deep_gated
    from pathlens.training import train

    size = run.sizes_of("dgn.subnetworks")
    data = _two_digits(run)
    hidden = (size["width"],) * size["hidden_layers"]
    epochs = sorted({0, 1, 3, 10, 30, size["epochs"]} & set(range(size["epochs"] + 1)))
    pattern = models.soft_galu(data.d, hidden, beta=BETA, epsilon=EPSILON, init="preserve", gate_activation="soft")
    runs: Any = train(
        pattern,
        data,
        epochs=size["epochs"],
        optimizer="rmsprop",
        lr=size["lr"],
        seeds=run.seeds,
        keep=epochs,
        device=run.device,
        progress=functools.partial(run.progress, "soft-GaLU"),
    )
    shape = (len(run.seeds), len(epochs), len(TAUS))
    active, moving, both, printed, floor, paths, learning = np.zeros((7, *shape))
    x = data.x[: size["watched"]]
    for i, trajectory in enumerate(runs):
        net = runs.networks[i].cpu()
        for j, epoch in enumerate(epochs):
            net.load_state_dict(trajectory.at_epoch(epoch).snapshot.state)
            slopes = deep_gated.gate_slopes(net, x)
            for k, tau in enumerate(TAUS):
                found = deep_gated.subnetworks(slopes, active=tau)
                loose = deep_gated.subnetworks(
                    slopes, active=tau, sensitive=deep_gated.printed_threshold(tau, epsilon=EPSILON)
                )
                active[i, j, k] = found.active_gates.sum(1).mean()
                moving[i, j, k] = found.sensitive_gates.sum(1).mean()
                both[i, j, k] = found.both.sum()
                printed[i, j, k] = loose.both.sum() / max(loose.active_gates.sum(), 1)
                paths[i, j, k], learning[i, j, k] = found.active_paths.mean(), found.sensitive_paths.mean()
                floor[i, j, k] = _weakest(slopes, tau, found.sensitive) / found.floor
        run.progress("gate slopes", i + 1, len(run.seeds))
    weakest = floor.reshape(len(run.seeds), -1).min(1)
    claims = (
        _DISJOINT.measure(both.sum((1, 2))),
        _PRINTED.measure(printed.max((1, 2))),
        _FLOOR.measure([v if math.isfinite(v) else None for v in weakest]),
    )
    return Artifact(
        "dgn.subnetworks",
        "Active and sensitive gates while training",
        PAPER,
        run.scale,
        size,
        run.seeds,
        claims,
        {
            "τ_A": list(TAUS),
            "gates in all": sum(hidden),
            "loss": runs.history()[:, -1].tolist(),
            "share both with the printed threshold": printed.max((1, 2)).tolist(),
        },
        {},
        {},
        (THRESHOLD, SUB_DATA),
        {"soft-GaLU": f"soft β={BETA:g}, ε={EPSILON:g}"},
        {
            "epochs": np.array(epochs),
            "taus": np.array(TAUS),
            "active_gates": active,
            "sensitive_gates": moving,
            "printed_both": printed,
            "active_paths": paths,
            "sensitive_paths": learning,
        },
        figures=panels.subnetworks(TAUS),
    )


# --- what no ReLU network fits ---------------------------------------------------------------------------------

DECOUPLED = Deviation(
    paper="standard ReLU networks cannot memorise (x, 1), (2x, −1); nothing is said of GaLU",
    authors_code="–",
    ours="GaLU with frozen hard gates from a bias-free ReLU network is tried too, and table and soft gates",
    why="hard gates of a bias-free network are the same for x and 2x whoever makes them: decoupling alone is no help",
)
FLOOR = 9 / 5  # min over f of (f − 1)² + (2f + 1)²
_STUCK = Claim(
    "networks with hard gates and no biases do not get below Σ(ŷ − y)² = 9/5",
    threshold=FLOOR - 1e-3,
    comparison=">=",
    null=0.0,
    null_text="it is fitted",
    paper="'cannot be memorised'",
    unit="Σ(ŷ − y)² at the end",
)
_FITS = Claim(
    "gates that tell x from 2x fit it",
    threshold=1e-2,
    comparison="<",
    null=FLOOR,
    null_text="as ReLU",
    paper="–",
    unit="Σ(ŷ − y)² at the end",
)


@experiment(
    "dgn.unfittable",
    title="Two points that no ReLU network fits",
    what="(x, 1) and (2x, −1) without biases: ReLU, GaLU, fixed random gates, soft gates, ReLU with biases",
    claims=[_STUCK, _FITS],
    minutes=(0.5, 2),
    flops=lambda size: (
        6 * 12.0 * (size["fit_hidden_layers"] - 1) * size["fit_width"] ** 2 * size["fit_steps"] * size["seeds"]
    ),
)
def unfittable(run: Run) -> Artifact:
    """The hard data set of the introduction."""
    from pathlens import data, models
    from pathlens.training import Execution, train

    size = run.sizes_of("dgn.unfittable")
    hidden = (size["fit_width"],) * size["fit_hidden_layers"]
    points = data.unfittable()
    networks = {
        "ReLU": models.relu(2, hidden),
        "GaLU, frozen gates": models.galu(2, hidden),
        "fixed random gates": models.frg(2, hidden, examples=2),
        "soft-ReLU": models.soft_relu(2, hidden),
        "soft-GaLU": models.soft_galu(2, hidden, gate_activation="soft", init="preserve"),
        "ReLU with biases": models.relu(2, hidden, bias=True),
    }
    losses = {}
    for name, net in networks.items():
        runs: Any = train(
            net,
            points,
            epochs=size["fit_steps"],
            batch_size=None,
            lr=3e-3,
            seeds=run.seeds,
            device=run.device,
            execution=Execution(compile=not net.needs_rows),
            progress=functools.partial(run.progress, name),
        )
        losses[name] = 2 * runs.history()
    # descent passes the minimum of a step or two by rounding: what counts is the end
    claims = [
        (_STUCK if name in ("ReLU", "GaLU, frozen gates") else _FITS).measure(loss[:, -1], row=name)
        for name, loss in losses.items()
    ]
    return Artifact(
        "dgn.unfittable",
        "Two points that no ReLU network fits",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {"Σ(ŷ − y)² at the end": {name: loss[:, -1].tolist() for name, loss in losses.items()}},
        {},
        {"least Σ(ŷ − y)² of a ReLU network": FLOOR},
        (DECOUPLED,),
        {"ReLU": "hard", "GaLU": "hard", "fixed random gates": "hard", "soft-ReLU and soft-GaLU": "soft β=4, ε=0.1"},
        {"names": np.array(list(losses)), "loss": np.stack(list(losses.values())).astype(np.float32)},
        figures=panels.unfittable(list(losses), FLOOR),
    )
