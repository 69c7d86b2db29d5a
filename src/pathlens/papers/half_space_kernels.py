"""Half-Space Feature Learning: the tangent kernel on the circle while networks train, and why it is no fixed kernel.

The overlap kernel of Figure 3 is in half_space, whose training is used here; stress tests of the DLGN are in
half_space_failures. Torch is imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathlens.errors import OptionError
from pathlens.papers import half_space_circle_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Progress, Run, experiment
from pathlens.papers.half_space_circle import (
    CIRCLE,
    KERNEL_EPOCHS,
    NAMES,
    PAPER,
    SETTINGS,
    SOFT,
    Circle,
    check_epochs,
    circle_operations,
    train_circle,
)
from pathlens.papers.half_space_regions import MODELS, network_at

LATE = 200  # the paper's last picture


def _kept(c: Circle) -> list[int]:
    """The epochs at which both models were kept."""
    return sorted(set.intersection(*({int(m.epoch or 0) for m in c.runs[model][0].moments} for model in MODELS)))


def _step(name: str, sizes: dict[str, Any]) -> int:
    """Every how many-th point of the circle has an entry in the kernels."""
    step, rest = divmod(sizes["points"], sizes["kernel_points"])
    if rest or not step:
        raise OptionError(
            f"{name}: kernel_points must divide points, got {sizes['kernel_points']} and {sizes['points']}. Set both."
        )
    return int(step)


def tangent_kernels(run: Run, points: int) -> dict[str, np.ndarray]:
    """Empirical tangent kernels on evenly spaced points at all kept epochs: model → (seeds, epochs, n, n), float64."""

    def compute() -> dict[str, np.ndarray]:
        from pathlens.kernels import ntk

        c = train_circle(run)
        x, epochs = c.data.x[:: len(c.data.x) // points].double(), _kept(c)
        found = {}
        for i, m in enumerate(MODELS):
            found[m] = np.stack(
                [[ntk(network_at(c.runs[m], s, e), x).dense().numpy() for e in epochs] for s in range(len(run.seeds))]
            )
            run.progress("tangent kernels", i + 1, len(MODELS))
        return found

    return run.once(("tangent kernels of the circle", points), compute)


def _single(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v.astype(np.float32) for k, v in arrays.items()}


# --- figure 4 --------------------------------------------------------------------------------------------------

_MOVES = Claim(
    f"the tangent kernel is far from stationary: by epoch {LATE} it has moved by more than half of its size",
    threshold=0.5,
    comparison=">",
    null=0.1,
    null_text="a kernel that hardly moves, as of very wide networks",
    paper="'far from being stationary'",
    unit="‖K̂ − K̂₀‖/‖K̂₀‖, trace-normalised",
)
_SOON = Claim(
    f"most of that happens early: by epoch 3 it has moved more than half as far as by epoch {LATE}",
    threshold=0.5,
    comparison=">",
    null=3 / LATE,
    null_text="it moves at an even pace",
    paper="Figure 4, epoch 3",
    unit=f"× (drift at 3 / at {LATE})",
)
_NEARER = Claim(
    "training brings the DLGN's kernel nearer to the ReLU network's",
    threshold=0.1,
    comparison=">",
    null=0.0,
    null_text="no nearer than before training",
    paper="'similarity of overlap/NTK … dynamics (Figures 3–5)'",
    unit=f"alignment with ReLU at {LATE}: DLGN at {LATE} − DLGN at 0",
)
_ALIKE = Claim(
    f"at epoch {LATE} a DLGN's kernel is nearly as like a ReLU network's as that of another ReLU network",
    threshold=0.8,
    comparison=">=",
    null=0.5,
    null_text="half as like",
    paper="'a faithful surrogate for ReLU nets'",
    unit="× (alignment ReLU–DLGN / ReLU–ReLU of other seeds)",
)
PAIRS = Deviation(
    paper="Figures 3 and 4 are compared by eye",
    authors_code="not public",
    ours="centred alignment of every ReLU network with every DLGN, and with the ReLU networks of other seeds",
    why="two ReLU networks say how much alike kernels of the same task can be expected to be",
)


def _alignments(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Centred alignment of all pairs of kernels: (a, n, n) and (b, n, n) → (a, b)."""
    from pathlens.kernels import kernel_alignment

    return np.array([[kernel_alignment(k, l) for l in right] for k in left])  # noqa: E741 - kernels K and L


def _others(matrix: np.ndarray) -> np.ndarray:
    """Mean of each row without its diagonal entry; NaN for a single seed."""
    count = len(matrix) - 1
    return (matrix.sum(1) - matrix.diagonal()) / count if count else np.full(1, np.nan)


@experiment(
    "hs.fig4",
    title="Tangent kernels of ReLU and DLGN while training",
    what="empirical NTK of ReLU and DLGN-PWC at init, epoch 3 and 200; alignment of their kernels while training",
    claims=[_MOVES, _SOON, _NEARER, _ALIKE],
    minutes=(1.5, 13),
    flops=circle_operations,
    shares="circle",
)
def fig4(run: Run) -> Artifact:
    """Figure 4, and the surrogate claim made from it, for the tangent and the overlap kernel."""
    from pathlens.kernels import drift, overlap

    sizes = run.sizes_of("hs.fig4")
    step = _step("hs.fig4", sizes)
    check_epochs(run, "hs.fig4", MODELS)
    c = train_circle(run)
    epochs, members = _kept(c), range(len(run.seeds))
    late = epochs.index(LATE)
    top = c.top[::step]
    tangent = tangent_kernels(run, sizes["kernel_points"])
    shared = {
        m: np.stack(
            [[overlap(c.record(m, s, e))[::step, ::step].dense().double().numpy() for e in epochs] for s in members]
        )
        for m in MODELS
    }
    arrays: dict[str, np.ndarray] = {"epochs": np.array(epochs), "theta": c.data.marks["theta"].numpy()[::step]}
    for m, K in tangent.items():
        arrays[f"drift_{m}"] = np.array([[drift(k, ks[0], normalise=True) for k in ks] for ks in K])
        shown = K[c.shown(m), [epochs.index(e) for e in KERNEL_EPOCHS]]
        arrays[f"kernel_{m}"] = shown / shown.trace(axis1=1, axis2=2)[:, None, None]
        diagonal = K.diagonal(axis1=2, axis2=3)
        arrays[f"diagonal_{m}"] = diagonal[..., top].mean(2) / diagonal[..., ~top].mean(2)
    claims = [_MOVES.measure(arrays[f"drift_{m}"][:, late], row=NAMES[m]) for m in MODELS]
    claims += [
        _SOON.measure(arrays[f"drift_{m}"][:, epochs.index(3)] / arrays[f"drift_{m}"][:, late], row=NAMES[m])
        for m in MODELS
    ]
    for stem, name, both in (("ntk", "tangent kernel", tangent), ("overlap", "overlap kernel", shared)):
        relu, dlgn = both["relu"], both["dlgn_pwc"]
        between = np.stack([_alignments(relu[:, t], dlgn[:, t]).mean(1) for t in range(len(epochs))], axis=1)
        own = np.stack([_others(_alignments(relu[:, t], relu[:, t])) for t in range(len(epochs))], axis=1)
        start = _alignments(relu[:, late], dlgn[:, 0]).mean(1)
        arrays |= {
            f"alignment_{stem}_between": between,
            f"alignment_{stem}_relu": own,
            f"alignment_{stem}_start": start,
        }
        claims.append(_NEARER.measure(between[:, late] - start, row=name))
        claims.append(_ALIKE.measure(between[:, late] / own[:, late], row=name))
    said = {k: v for k, v in arrays.items() if k.split("_")[0] in ("drift", "alignment", "diagonal")}
    return Artifact(
        "hs.fig4",
        "Tangent kernels of ReLU and DLGN while training",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        {
            "epochs": epochs,
            "mean over seeds": {k: v.mean(0).tolist() for k, v in said.items()},
            "standard deviation": {k: v.std(0).tolist() for k, v in said.items()},
        },
        {},
        {},
        (PAIRS, CIRCLE, SETTINGS),
        {"tangent kernel of ReLU": "hard", "tangent kernel of DLGN-PWC": SOFT["dlgn_pwc"], "overlap kernels": "hard"},
        _single(arrays),
        figures=panels.fig4(MODELS, KERNEL_EPOCHS),
    )


# --- spectral bias ---------------------------------------------------------------------------------------------

FAST = 12  # waves around the circle that the fast half has
_SINES = Claim(
    "eigenvectors of the infinite-width kernel on the circle are sinusoids of one frequency",
    threshold=0.99,
    comparison=">=",
    null=0.5,
    null_text="mixtures of frequencies",
    paper="'low frequency sinusoids as eigen vectors'",
    unit="share of the leading 25 eigenvectors' energy at one frequency, least",
    needs=1,
)
_ORDER = Claim(
    f"low frequencies have the larger eigenvalues: one wave against {FAST}",
    threshold=5.0,
    comparison=">",
    null=1.0,
    null_text="all frequencies alike",
    paper="'with larger eigen values'",
    unit="× (eigenvalue)",
    needs=1,
)
_LAZY = Claim(
    "when the network's loss is under .01, the linearised network with the same optimiser is still above .1",
    threshold=0.1,
    comparison=">",
    null=0.01,
    null_text="training is descent with the kernel of the start",
    paper="'distinct from the phenomenon of spectral bias'",
    unit="loss of the linearised network",
)
_LONGER = Claim(
    "with a fixed kernel the fast half takes several times longer, relative to the slow one",
    threshold=3.0,
    comparison=">",
    null=1.0,
    null_text="spectral bias of that kernel explains the times",
    paper="'distinct from the phenomenon of spectral bias'",
    unit="× (t(.01)/t(.25), flow / training)",
)
_DRIFTS = Claim(
    "the kernel drifts by more than half of its size until the loss is under .01",
    threshold=0.5,
    comparison=">",
    null=0.1,
    null_text="a kernel that hardly moves",
    paper="'far from being stationary'",
    unit="‖K_t − K₀‖/‖K₀‖",
)
TIME = Deviation(
    paper="no fixed kernel is tried",
    authors_code="–",
    ours="gradient flow with K⁽ᵈ⁾ and with each network's K₀, its times relative to when the loss passes .25; and the "
    "linearised network f₀ + ∇f₀·(θ − θ₀) trained by the same Adam, rate and batch size",
    why="flow has no epochs, and Adam alone could speed up slow directions: the linearised network has both",
)
ADAM = Deviation(
    paper="'spectral bias' speaks of gradient descent",
    authors_code="–",
    ours="training is by Adam, as everywhere here",
    why="these settings give the paper's curves",
)


def circle_spectrum(points: int, hidden_layers: int) -> tuple[np.ndarray, float, np.ndarray]:
    """The infinite-width kernel on evenly spaced points: eigenvalue per frequency / n, purity, the kernel itself.

    The kernel is a function of the angle between two points, so its rows are shifts of each other and the discrete
    Fourier transform of one row gives its eigenvalues; purity is measured on eigenvectors found without knowing that.
    """
    from pathlens.data import circle
    from pathlens.kernels import relu_ntk

    K = relu_ntk(circle(points).x.double(), hidden_layers=hidden_layers).dense().numpy()
    values = np.fft.rfft(K[0]).real / points
    vectors = np.linalg.eigh(K)[1][:, ::-1][:, : min(2 * FAST + 1, points)]
    energy = np.abs(np.fft.rfft(vectors, axis=0)) ** 2
    energy[1 : (points + 1) // 2] *= 2  # a real vector has each frequency twice, but not 0 and points/2
    return values, float((energy.max(0) / energy.sum(0)).min()), K


class Flow:
    """Gradient flow of Σ(f − y)²/2n in function space with a fixed kernel: the error e(t) = exp(−Kt/n) e(0)."""

    def __init__(self, K: np.ndarray, error: np.ndarray) -> None:
        values, self.vectors = np.linalg.eigh(K / len(K))
        self.rates = np.maximum(values, 0.0)  # rounding
        self.start = self.vectors.T @ error

    def error(self, time: float) -> np.ndarray:
        """e(t) at every point."""
        return self.vectors @ (np.exp(-self.rates * time) * self.start)

    def loss(self, times: Any) -> np.ndarray:
        """Mean squared error at times (T,)."""
        decay = np.exp(-2 * np.multiply.outer(np.asarray(times, dtype=np.float64), self.rates))
        return decay @ self.start**2 / len(self.start)

    def time_to(self, loss: float) -> float:
        """When the loss falls to a value; infinity if it does not within 10¹² times the fastest mode's."""
        low, high = -12.0 - math.log10(self.rates.max()), 12.0 - math.log10(self.rates.max())
        if self.loss([10**high])[0] > loss:
            return math.inf
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.loss([10**middle])[0] > loss else (low, middle)
        return 10**high


def linearisation(net: Any, x: Any) -> tuple[Any, Any]:
    """Outputs (n,) and their gradients by all trained parameters (n, P) of a network with one output."""
    import torch
    from torch.func import functional_call, grad, vmap

    weights = {k: p.detach() for k, p in net.named_parameters() if p.requires_grad}
    gradients = vmap(grad(lambda w, row: functional_call(net, w, (row[None],))[0, 0]), (None, 0))(weights, x)
    with torch.no_grad():
        return net(x)[:, 0], torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


def train_linearised(
    starts: list[tuple[Any, Any]],
    y: Any,
    seeds: Sequence[int],
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    progress: Progress,
    label: str,
) -> np.ndarray:
    """Loss per seed and epoch of f₀ + ∇f₀·w from w = 0, with the optimiser, rate and batch size of the circle."""
    import torch

    f0, J = torch.stack([f for f, _ in starts]), torch.stack([j for _, j in starts])
    w = torch.zeros(len(J), J.shape[2], dtype=J.dtype)
    optimiser = torch.optim.Adam([w], lr=lr, fused=True)
    shuffles = [torch.Generator().manual_seed(seed) for seed in seeds]
    member = torch.arange(len(J))[:, None]
    losses = [(f0 - y).square().mean(1)]
    for epoch in range(epochs):
        order = torch.stack([torch.randperm(len(y), generator=g) for g in shuffles])
        for rows in order.split(batch_size, dim=1):
            picked = J[member, rows]
            error = f0[member, rows] + (picked @ w[:, :, None])[:, :, 0] - y[rows]
            w.grad = 2 / rows.shape[1] * (error[:, None] @ picked)[:, 0]
            optimiser.step()
        losses.append((f0 + (J @ w[:, :, None])[:, :, 0] - y).square().mean(1))
        progress(label, epoch + 1, epochs)
    return torch.stack(losses, dim=1).numpy()


def _halves(flow: Flow, top: np.ndarray) -> float | None:
    """Mean squared error on the bottom over that on top, when the loss is .25."""
    time = flow.time_to(0.25)
    if not math.isfinite(time):
        return None
    square = flow.error(time) ** 2
    return float(square[~top].mean() / square[top].mean())


@experiment(
    "hs.spectral",
    title="Not the spectral bias of a fixed kernel",
    what="infinite-width NTK on the circle; descent with it, and with each network's first kernel, against training",
    claims=[_SINES, _ORDER, _LAZY, _LONGER, _DRIFTS],
    minutes=(1.5, 14),
    flops=circle_operations,
    shares="circle",
)
def spectral(run: Run) -> Artifact:
    """Section 4: 'Note that this is distinct from the phenomenon of spectral bias'."""
    from pathlens.kernels import drift

    sizes = run.sizes_of("hs.spectral")
    step = _step("hs.spectral", sizes)
    c = train_circle(run)
    kept = _kept(c)
    y, top = c.data.y[::step, 0].double().numpy(), c.top[::step]
    values, purity, infinite = circle_spectrum(sizes["kernel_points"], len(sizes["hidden"]))
    tangent = tangent_kernels(run, sizes["kernel_points"])
    flow = Flow(infinite, -y)
    times = np.geomspace(0.1, 1e3, 121)
    arrays: dict[str, np.ndarray] = {
        "eigenvalues": values,
        "frequencies": np.arange(len(values)),
        "times": times,
        "drift_epochs": np.array(kept),
        "flow_infinite": flow.loss(times * flow.time_to(0.25)),
    }
    metrics: dict[str, Any] = {"error bottom / top at loss .25": {"flow with K⁽ᵈ⁾": _halves(flow, top)}}
    lazy, longer, drifts = [], [], []
    for m, name in MODELS.items():
        starts = [linearisation(network_at(c.runs[m], s, 0).float(), c.data.x) for s in range(len(run.seeds))]
        arrays[f"lazy_{m}"] = train_linearised(
            starts,
            c.data.y[:, 0],
            run.seeds,
            epochs=sizes["epochs"][m],
            lr=sizes["lr"],
            batch_size=sizes["batch_size"],
            progress=run.progress,
            label=f"{name}, linearised",
        )
        loss = arrays[f"loss_{m}"] = c.runs[m].history()
        arrays["epochs"] = np.arange(loss.shape[1])
        first, last = (c.runs[m].epochs_to(level) for level in (0.25, 0.01))
        known = [e for e in first if e]
        arrays[f"time_{m}"] = arrays["epochs"] / (np.median(known) if known else 1)
        flows = [Flow(K[0], f.double().numpy()[::step] - y) for K, (f, _) in zip(tangent[m], starts)]
        scales = [one.time_to(0.25) for one in flows]
        arrays[f"flow_{m}"] = np.stack(
            [one.loss(times * t) if math.isfinite(t) else np.full(len(times), np.nan) for one, t in zip(flows, scales)]
        )
        arrays[f"drift_{m}"] = np.array([[drift(k, ks[0]) for k in ks] for ks in tangent[m]])
        training = np.array([b / a if a and b else np.nan for a, b in zip(first, last)])
        ratios = np.array([one.time_to(0.01) / t for one, t in zip(flows, scales)])
        lazy.append(_LAZY.measure([arrays[f"lazy_{m}"][s, e] if e else None for s, e in enumerate(last)], row=name))
        if m == "relu":
            wide = flow.time_to(0.01) / flow.time_to(0.25)
            longer.append(_LONGER.measure(wide / training, row=f"K⁽ᵈ⁾ against {name}"))
            metrics["t(.01)/t(.25), flow with K⁽ᵈ⁾"] = wide
        longer.append(_LONGER.measure(ratios / training, row=f"K₀ against {name}"))
        moved = [
            np.nan if e is None else arrays[f"drift_{m}"][s, np.searchsorted(kept, e, "right") - 1]
            for s, e in enumerate(last)
        ]
        drifts.append(_DRIFTS.measure(moved, row=name))
        metrics[name] = {
            "epochs to .25": first,
            "epochs to .01": last,
            "t(.01)/t(.25), training": training.tolist(),
            "t(.01)/t(.25), flow with K₀": [float(r) if math.isfinite(r) else "never" for r in ratios],
            "last loss": loss[:, -1].tolist(),
            "last loss, linearised": arrays[f"lazy_{m}"][:, -1].tolist(),
            "drift at the end": [float(arrays[f"drift_{m}"][:, -1].mean()), float(arrays[f"drift_{m}"][:, -1].std())],
        }
        metrics["error bottom / top at loss .25"][f"flow with K₀ of {name}"] = [_halves(one, top) for one in flows]
    slow = float(values[1] / values[FAST])
    return Artifact(
        "hs.spectral",
        "Not the spectral bias of a fixed kernel",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        (_SINES.measure([purity]), _ORDER.measure([slow]), *lazy, *longer, *drifts),
        metrics,
        {},
        {},
        (TIME, ADAM, CIRCLE, SETTINGS),
        {"tangent kernel of ReLU": "hard", "tangent kernel of DLGN-PWC": SOFT["dlgn_pwc"]},
        _single(arrays),
        figures=panels.spectral(MODELS),
    )
