"""Section 4: training is 'distinct from the phenomenon of spectral bias' of a fixed kernel.

The infinite-width tangent kernel on the circle, gradient flow with it and with each network's first kernel, and the
linearised network, against training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run
from pathlens.papers.half_space import circle_training as circle
from pathlens.papers.panels import Panel, Series

FAST = 12  # waves around the circle that the fast half has

_SINES = Claim(
    "eigenvectors of the infinite-width kernel on the circle are sinusoids of one frequency",
    at_least=0.99,
    null=0.5,
    null_text="mixtures of frequencies",
    paper="'low frequency sinusoids as eigen vectors'",
    unit="share of the leading 25 eigenvectors' energy at one frequency, least",
    needs=1,
)
_ORDER = Claim(
    f"low frequencies have the larger eigenvalues: one wave against {FAST}",
    above=5.0,
    null=1.0,
    null_text="all frequencies alike",
    paper="'with larger eigen values'",
    unit="× (eigenvalue)",
    needs=1,
)
_LAZY = Claim(
    "when the network's loss is under .01, the linearised network with the same optimiser is still above .1",
    above=0.1,
    null=0.01,
    null_text="training is descent with the kernel of the start",
    paper="'distinct from the phenomenon of spectral bias'",
    unit="loss of the linearised network",
)
_LONGER = Claim(
    "with a fixed kernel the fast half takes several times longer, relative to the slow one",
    above=3.0,
    null=1.0,
    null_text="spectral bias of that kernel explains the times",
    paper="'distinct from the phenomenon of spectral bias'",
    unit="× (t(.01)/t(.25), flow / training)",
)
_DRIFTS = Claim(
    "the kernel drifts by more than half of its size until the loss is under .01",
    above=0.5,
    null=0.1,
    null_text="a kernel that hardly moves",
    paper="'far from being stationary'",
    unit="‖K_t − K₀‖/‖K₀‖",
)
TIME = Deviation(
    paper="no fixed kernel is tried",
    ours="gradient flow with K⁽ᵈ⁾ and with each network's K₀, its times relative to when the loss passes .25; and the "
    "linearised network f₀ + ∇f₀·(θ − θ₀) trained by the same Adam, rate and batch size",
    why="flow has no epochs, and Adam alone could speed up slow directions: the linearised network has both",
)
ADAM = Deviation(
    paper="'spectral bias' is about gradient descent",
    ours="training is by Adam, as everywhere here",
    why="these settings give the paper's curves",
)


def circle_spectrum(points: int, hidden_layers: int) -> tuple[np.ndarray, float, np.ndarray]:
    """The infinite-width kernel on evenly spaced points: eigenvalue per frequency / n, purity, the kernel itself.

    The kernel is a function of the angle between two points, so its rows are shifts of each other and the discrete
    Fourier transform of one row gives its eigenvalues; purity is measured on eigenvectors found without knowing that.
    """
    from pathlens import data
    from pathlens.kernels import relu_ntk

    K = relu_ntk(data.circle(points).x.double(), hidden_layers=hidden_layers).dense().numpy()
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
        """Mean squared error at finite times (T,)."""
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

    def error_ratio(self, top: np.ndarray) -> float | None:
        """Mean squared error on the bottom over that on top, when the loss is .25; None if it never is."""
        time = self.time_to(0.25)
        if not math.isfinite(time):
            return None
        square = self.error(time) ** 2
        return float(square[~top].mean() / square[top].mean())


def linearisation(net: Any, x: Any) -> tuple[Any, Any]:
    """Outputs (n,) and their gradients by all trained parameters (n, P) of a network with one output."""
    import torch
    from torch.func import functional_call, grad, vmap

    weights = {k: p.detach() for k, p in net.named_parameters() if p.requires_grad}
    gradients = vmap(grad(lambda w, row: functional_call(net, w, (row[None],))[0, 0]), (None, 0))(weights, x)
    with torch.no_grad():
        return net(x)[:, 0], torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


def train_linearised(run: Run, starts: list[tuple[Any, Any]], y: Any, epochs: int, label: str) -> np.ndarray:
    """Loss per seed and epoch of f₀ + ∇f₀·w from w = 0, with the optimiser, rate and batch size of the networks.

    `starts` has f₀ (n,) and ∇f₀ (n, P) of each seed.
    """
    import torch

    f0, J = torch.stack([f for f, _ in starts]), torch.stack([j for _, j in starts])
    w = torch.zeros(len(J), J.shape[2], dtype=J.dtype)
    optimizer = torch.optim.Adam([w], lr=run.sizes["lr"], fused=True)
    shuffles = [torch.Generator().manual_seed(seed) for seed in run.seeds]
    member = torch.arange(len(J))[:, None]
    losses = [(f0 - y).square().mean(1)]
    for epoch in range(epochs):
        order = torch.stack([torch.randperm(len(y), generator=g) for g in shuffles])
        for rows in order.split(run.sizes["batch_size"], dim=1):
            picked = J[member, rows]
            error = f0[member, rows] + (picked @ w[:, :, None])[:, :, 0] - y[rows]
            w.grad = 2 / rows.shape[1] * (error[:, None] @ picked)[:, 0]
            optimizer.step()
        losses.append((f0 + (J @ w[:, :, None])[:, :, 0] - y).square().mean(1))
        run.progress(label, epoch + 1, epochs)
    return torch.stack(losses, dim=1).numpy()


@circle.circle_experiment(
    "hs.spectral",
    title="Not the spectral bias of a fixed kernel",
    what="infinite-width NTK on the circle; descent with it, and with each network's first kernel, against training",
    claims=[_SINES, _ORDER, _LAZY, _LONGER, _DRIFTS],
    deviations=[TIME, ADAM, circle.CIRCLE, circle.SETTINGS],
    sizes={**circle.SIZES, "kernel_points": (128, 256)},
    minutes=(1.5, 14),
)
def spectral(run: Run) -> Artifact:
    """Section 4: 'Note that this is distinct from the phenomenon of spectral bias'."""
    from pathlens.kernels import drift

    sizes = run.sizes
    step = circle.kernel_step(run)
    c = circle.train_circle(run)
    kept, y, top = c.kept_epochs, c.y[::step].astype(np.float64), c.top[::step]
    values, purity, infinite = circle_spectrum(sizes["kernel_points"], len(sizes["hidden"]))
    flow = Flow(infinite, -y)
    wide = flow.time_to(0.01) / flow.time_to(0.25)
    times = np.geomspace(0.1, 1e3, 121)
    arrays = {
        "eigenvalues": values,
        "frequencies": np.arange(len(values)),
        "times": times,
        "drift_epochs": np.array(kept),
        "flow_infinite": flow.loss(times * flow.time_to(0.25)),
    }
    error_ratios: dict[str, Any] = {"flow with K⁽ᵈ⁾": flow.error_ratio(top)}
    metrics: dict[str, Any] = {"error bottom / top at loss .25": error_ratios, "t(.01)/t(.25), flow with K⁽ᵈ⁾": wide}
    lazy, longer, drifts = [], [], []
    for m, kernels in circle.tangent_kernels(run).items():
        name = circle.LEARNED[m]
        starts = [linearisation(circle.network_at(t, 0).float(), c.data.x) for t in c.runs[m]]
        linearised = arrays[f"lazy_{m}"] = train_linearised(
            run, starts, c.data.y[:, 0], sizes["epochs"][m], f"{name}, linearised"
        )
        loss = arrays[f"loss_{m}"] = c.runs[m].history()
        arrays["epochs"] = np.arange(loss.shape[1])
        first, last = (c.runs[m].epochs_to(level) for level in (0.25, 0.01))
        arrays[f"time_{m}"] = arrays["epochs"] / np.median([e for e in first if e] or [1])
        flows = [Flow(K[0], f.double().numpy()[::step] - y) for K, (f, _) in zip(kernels, starts)]
        scales = [one.time_to(0.25) for one in flows]
        arrays[f"flow_{m}"] = np.stack(
            [one.loss(times * t) if math.isfinite(t) else np.full(len(times), np.nan) for one, t in zip(flows, scales)]
        )
        moved = arrays[f"drift_{m}"] = np.array([[drift(k, ks[0]) for k in ks] for ks in kernels])
        training = np.array([b / a if a and b else np.nan for a, b in zip(first, last)])
        ratios = np.array([one.time_to(0.01) / t for one, t in zip(flows, scales)])
        lazy.append(_LAZY.measure([linearised[s, e] if e else None for s, e in enumerate(last)], row=name))
        if m == "relu":
            longer.append(_LONGER.measure(wide / training, row=f"K⁽ᵈ⁾ against {name}"))
        longer.append(_LONGER.measure(ratios / training, row=f"K₀ against {name}"))
        arrived = [None if e is None else moved[s, np.searchsorted(kept, e, "right") - 1] for s, e in enumerate(last)]
        drifts.append(_DRIFTS.measure(arrived, row=name))
        metrics[name] = {
            "epochs to .25": first,
            "epochs to .01": last,
            "t(.01)/t(.25), training": training.tolist(),
            "t(.01)/t(.25), flow with K₀": [float(r) if math.isfinite(r) else "never" for r in ratios],
            "last loss": loss[:, -1].tolist(),
            "last loss, linearised": linearised[:, -1].tolist(),
            "drift at the end": [float(moved[:, -1].mean()), float(moved[:, -1].std())],
        }
        error_ratios[f"flow with K₀ of {name}"] = [one.error_ratio(top) for one in flows]
    return run.artifact(
        claims=[_SINES.measure([purity]), _ORDER.measure([values[1] / values[FAST]]), *lazy, *longer, *drifts],
        metrics=metrics,
        gates=circle.TANGENT_GATES,
        arrays=float32(arrays),
        panels=_panels(),
    )


def _panels() -> list[Panel]:
    linearised = [Series(f"lazy_{m}", f"{name}, linearised", style="dashed") for m, name in circle.LEARNED.items()]
    flows = [
        Series("flow_infinite", "flow with K⁽ᵈ⁾", style="dashed"),
        *(Series(f"flow_{m}", f"flow with K₀ of {name}", style="dashed") for m, name in circle.LEARNED.items()),
    ]
    trainings = [Series(f"loss_{m}", name, x=f"time_{m}") for m, name in circle.LEARNED.items()]
    return [
        Panel(
            "lines",
            "Infinite width: eigenvalue of each frequency",
            [Series("eigenvalues", "K⁽ᵈ⁾")],
            "frequencies",
            "waves around the circle",
            "eigenvalue / n",
            y_scale="log",
        ),
        circle.epoch_panel(
            "The same optimiser, with and without moving kernels",
            [*circle.model_series("loss"), *linearised],
            "loss",
            y_scale="log",
            marks=[(0.01, "")],
        ),
        Panel(
            "lines",
            "Time in units of the first (loss .25)",
            [*trainings, *flows],
            "times",
            "t / t(.25)",
            "loss",
            "log",
            "log",
            marks=[(0.01, ""), (0.25, "")],
        ),
        circle.epoch_panel(
            "How far the kernel has moved",
            circle.model_series("drift"),
            "‖K(t) − K(0)‖ / ‖K(0)‖",
            "drift_epochs",
            y_scale="log",
            note="Growth counts; hs.fig4 shows the drift of the trace-normalised kernel.",
        ),
    ]
