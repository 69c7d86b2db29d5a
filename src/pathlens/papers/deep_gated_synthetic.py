"""Deep Gated Networks, Experiments 1 and 2: what depth and width do to the Gram matrix and to convergence.

Path bundles, sub-networks and what cannot be fitted are in deep_gated_gates, the deep linear network of Experiment 8 in
deep_gated_linear. Torch is imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pathlens.papers import deep_gated_gates, deep_gated_linear
from pathlens.papers import deep_gated_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment

# the imports register the rest
__all__ = ["deep_gated_gates", "deep_gated_linear", "fig1", "fig2", "fig3", "fig4", "memorise"]

PAPER = "Deep Gated Networks"
MU = 0.5

STEP = Deviation(
    paper="α = 0.1/ρ_max, and ρ_i are the eigenvalues of E[K₀]/d; loss Σ(ŷ − y)²",
    authors_code="not public",
    ours="α = 0.1/ρ_max(K₀) of the network itself, loss ½Σ(ŷ − y)²",
    why="equation 1, e′ = e − αKe, is gradient descent on ½Σ, and 'after this rescaling the maximum eigenvalue is 1' "
    "holds for K₀ alone",
)
LENGTH = Deviation(
    paper="the number of steps is not stated",
    authors_code="not public",
    ours="60 steps (quick), 200 (paper)",
    why="the error of the best depth has then fallen tenfold or more",
)
WIDTHS = Deviation(
    paper="the text fits with w = 100, Figure 3 shows w = 25 and 500",
    authors_code="not public",
    ours="25 and 100 (quick); 25, 100 and 500 (paper)",
    why="both are in the paper; 500 takes minutes on a CPU",
)
VARIANCE = Deviation(
    paper="Var[K₀] ≤ O(max{d²/w, d³/w²}) (Theorem 2.3)",
    authors_code="–",
    ours="the exact variance, which is Θ(d³/w): (2/(3w))(d − 1)(d − 2)(2d − 3) to leading order",
    why="two paths can be spliced at every unit that they share, not only at shared weights",
)
OVERLAP = Deviation(
    paper="the introduction has λ(s, s′)/λ(s, s) ≤ μ^d",
    authors_code="–",
    ours="μ^(d−1)",
    why="d − 1 layers have gates, as in Lemma 2.4",
)


def _float32(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()}


def _frg(width: int, depth: int, examples: int) -> Any:
    from pathlens.models import Init, frg

    init = Init("bernoulli", math.sqrt(1 / (MU * width)))
    return frg(1, (width,) * (depth - 1), examples=examples, probability=MU, init=init)


# --- figure 1: spectra -----------------------------------------------------------------------------------------

_NEARER = Claim(
    "the e.c.d.f. of w = 500 is nearer to the ideal one than that of w = 25",
    threshold=2.0,
    comparison=">",
    null=1.0,
    null_text="width does not matter",
    paper="Figure 1",
    unit="× (largest distance, w = 25 / w = 500, mean over depths)",
)
_WHITER = Claim(
    "depth whitens: at w = 500 and d = 20 the largest eigenvalue has little of the trace",
    threshold=0.05,
    comparison="<",
    null=0.5,
    null_text="as at d = 2",
    paper="Figure 1, ideal (1 + (n − 1)μ^(d−1))/n = .005",
    unit="share of the trace",
)
_DEGRADES = Claim(
    "at w = 25, depth beyond a point degrades the spectrum",
    threshold=1.1,
    comparison=">",
    null=1.0,
    null_text="deeper is never worse",
    paper="'leading to smaller eigenvalues'",
    unit="× (distance to the ideal e.c.d.f., d = 20 / best depth)",
)


@experiment(
    "dgn.fig1",
    title="Depth whitens, until it does not",
    what="e.c.d.f. of K₀/d of fixed random gates over depths 2 to 20, widths 25 and 500, against the ideal",
    claims=[_NEARER, _WHITER, _DEGRADES],
    minutes=(0.3, 0.3),
    flops=lambda size: sum(
        6.0 * d * w * size["n"] * (w + size["n"]) * size["seeds"] for d in size["depths"] for w in size["widths"]
    ),
)
def fig1(run: Run) -> Artifact:
    """Figure 1: cumulative eigenvalues, ascending, of the Gram matrix of Experiment 1 at initialisation."""
    from pathlens import kernels
    from pathlens.data import identical_inputs
    from pathlens.theory import deep_gated

    size = run.sizes_of("dgn.fig1")
    n, depths, widths = size["n"], size["depths"], size["widths"]
    x = identical_inputs(n).x
    ideal = np.stack([np.cumsum(deep_gated.ideal_spectrum(n, d - 1, probability=MU)) for d in depths])
    found = np.empty((len(widths), len(depths), len(run.seeds), n))
    for i, w in enumerate(widths):
        for j, d in enumerate(depths):
            net = _frg(w, d, n)
            for k, seed in enumerate(run.seeds):
                found[i, j, k] = kernels.cumulative_spectrum(kernels.ntk(net.reinitialise(seed), x)).numpy() / d
            run.progress(f"spectra, w = {w}", j + 1, len(depths))
    distance = abs(found - ideal[:, None]).max(-1) / n  # (widths, depths, seeds)
    top = (found[-1, -1, :, -1] - found[-1, -1, :, -2]) / found[-1, -1, :, -1]
    claims = (
        _NEARER.measure((distance[0] / distance[-1]).mean(0)),
        _WHITER.measure(top),
        _DEGRADES.measure(distance[0, -1] / distance[0].min(0)),
    )
    return Artifact(
        "dgn.fig1",
        "Depth whitens, until it does not",
        PAPER,
        run.scale,
        size,
        run.seeds,
        claims,
        {"distance to the ideal": {f"w={w}": distance[i].tolist() for i, w in enumerate(widths)}},
        {},
        {},
        (VARIANCE, OVERLAP),
        {"fixed random gates": "hard"},
        _float32({"depths": depths, "widths": widths, "ideal": ideal, "ecdf": found.mean(2), "distance": distance}),
        figures=panels.spectra(depths, widths),
    )


# --- figure 2: entries -----------------------------------------------------------------------------------------

_FOLLOW = Claim(
    "diagonal and off-diagonal entries follow 1 and μ^(d−1) within chance",
    threshold=4.0,
    comparison="<=",
    null=29.0,
    null_text="μ^d in place of μ^(d−1), at d = 2",
    paper="Figure 2",
    unit="standard errors (exact ones), the worst of all depths and both entries",
)
_RATE = Claim(
    "each hidden layer shrinks the overlap by μ = ½",
    threshold=0.05,
    comparison="<=",
    null=0.5,
    null_text="depth does not whiten",
    paper="μ^(d−1)",
    unit="|fitted μ − ½|",
)
_SPREAD = Claim(
    "the spread of K₀(s, s) grows like d³/w, not like max{d²/w, d³/w²}",
    threshold=2.0,
    comparison=">",
    null=0.5,
    null_text="the printed bound",
    paper="Theorem 2.3 prints d²/w for d < w",
    unit="measured variance / printed order, at the largest depth",
)


@experiment(
    "dgn.fig2",
    title="The entries of the Gram matrix",
    what="one diagonal and one off-diagonal entry of K₀ over depth, 20 runs, w = 500, against their exact moments",
    claims=[_FOLLOW, _RATE, _SPREAD],
    minutes=(0.7, 0.7),
    flops=lambda size: sum(12.0 * d * size["width"] ** 2 * size["runs"] * size["seeds"] for d in size["depths"]),
)
def fig2(run: Run) -> Artifact:
    """Figure 2, and Theorem 2.3's variance: K₀/d of two of the inputs of Experiment 1."""
    from pathlens import kernels
    from pathlens.data import identical_inputs
    from pathlens.theory import deep_gated

    size = run.sizes_of("dgn.fig2")
    depths, runs, w = size["depths"], size["runs"], size["width"]
    x = identical_inputs(2).x  # entries of two inputs do not depend on how many others there are
    found = np.empty((len(depths), len(run.seeds), runs, 2))
    mean, deviation = np.empty((2, len(depths), 2))
    for i, d in enumerate(depths):
        net = _frg(w, d, 2)
        for j, seed in enumerate(run.seeds):
            for k in range(runs):
                found[i, j, k] = kernels.ntk(net.reinitialise(10_000 * seed + k), x).dense()[0].numpy() / d
        exact = deep_gated.frg_moments(x, (w,) * (d - 1), probability=MU)
        mean[i], deviation[i] = exact.mean[0] / d, np.sqrt(exact.variance[0]) / d
        run.progress("entries", i + 1, len(depths))
    average = found.mean(2)
    score = abs(average - mean[:, None]) / (deviation[:, None] / math.sqrt(runs))
    shallow = [i for i, d in enumerate(depths) if d <= 8]  # beyond, the mean is below its standard error
    fitted = [
        np.exp(np.polyfit([depths[i] for i in shallow], np.log(abs(average[shallow, j, 1])), 1)[0])
        for j in range(len(run.seeds))
    ]
    variance = found[-1, :, :, 0].var(1, ddof=1) * depths[-1] ** 2
    printed = deep_gated.printed_variance_bound(MU * w, depths[-1] - 1)
    claims = (
        _FOLLOW.measure(score.max((0, 2))),
        _RATE.measure([abs(m - MU) for m in fitted]),
        _SPREAD.measure(variance / printed),
    )
    law = [deep_gated.variance_law(MU * w, d - 1) / d**2 for d in depths]
    order = [deep_gated.printed_variance_bound(MU * w, d - 1) / d**2 for d in depths]
    return Artifact(
        "dgn.fig2",
        "The entries of the Gram matrix",
        PAPER,
        run.scale,
        size,
        run.seeds,
        claims,
        {
            "fitted μ": fitted,
            "variance of K₀(s, s) at the largest depth": {
                "measured": variance.tolist(),
                "exact": float(deviation[-1, 0] * depths[-1]) ** 2,
                "leading order": law[-1] * depths[-1] ** 2,
                "printed order": printed,
            },
        },
        {},
        {"diagonal of K₀/d": 1, "off-diagonal": "μ^(d−1)"},
        (VARIANCE, OVERLAP),
        {"fixed random gates": "hard"},
        _float32(
            {
                "depths": depths,
                "average": average,
                "spread": found.std(2),
                "mean": mean,
                "deviation": deviation,
                "variance": found[..., 0].var(2, ddof=1),
                "law": law,
                "printed": order,
            }
        ),
        figures=panels.entries(),
    )


# --- figure 3: convergence -------------------------------------------------------------------------------------


@dataclass
class Descent:
    """Gradient descent of one architecture at several depths: per depth and seed, the error over steps and K₀'s
    eigenvalues."""

    error: np.ndarray  # (depths, seeds, steps + 1), ‖e_t‖/‖e_0‖
    eigenvalues: np.ndarray  # (depths, seeds, n), ascending

    @property
    def linear(self) -> np.ndarray:
        """What equation 1 says for a kernel that stays K₀ and targets in no particular direction."""
        rate = 1 - 0.1 * self.eigenvalues / self.eigenvalues[..., -1:]
        steps = np.arange(self.error.shape[-1])
        return np.sqrt(np.mean(rate[..., None] ** (2 * steps), axis=-2))


def descend(run: Run, networks: list[Any], data: Any, steps: int, label: str) -> Descent:
    """Full-batch descent on ½Σ(ŷ − y)² with α = 0.1/ρ_max(K₀), each network with its own ρ_max."""
    from pathlens import kernels
    from pathlens.training import Execution, train

    n = len(data)
    error = np.empty((len(networks), len(run.seeds), steps + 1))
    eigenvalues = np.empty((len(networks), len(run.seeds), n))
    for i, net in enumerate(networks):
        for j, seed in enumerate(run.seeds):
            net.reinitialise(seed)
            eigenvalues[i, j] = kernels.spectrum(kernels.ntk(net, data.x)).numpy()
            # the loss of `train` is a mean over rows; a hundred steps do not repay capturing one
            found: Any = train(
                net,
                data,
                epochs=steps,
                loss="half_mse",
                optimizer="sgd",
                batch_size=None,
                execution=Execution(compile=False),
                lr=n * 0.1 / eigenvalues[i, j, -1],
                device=run.device,
                progress=False,
            )
            loss = np.array(found.history["loss"])
            error[i, j] = np.sqrt(loss / loss[0])
            run.progress(label, i * len(run.seeds) + j + 1, len(networks) * len(run.seeds))
    return Descent(error, eigenvalues)


def memorise(run: Run, width: int) -> Descent:
    """Fixed random gates of one width fit Experiment 1 at every depth; Figure 3 and the NPF appendix share it."""
    from pathlens.data import identical_inputs

    size = run.sizes_of("dgn.fig3")

    def compute() -> Descent:
        networks = [_frg(width, d, size["n"]) for d in size["trained_depths"]]
        return descend(run, networks, identical_inputs(size["n"]), size["epochs"], f"descent, w = {width}")

    return run.once(("memorise", width), compute)


def memorise_operations(size: dict[str, Any]) -> float:
    """Floating-point operations of all descents: forward, and twice that backward."""
    weights = sum((d - 2) * w**2 + 2 * w for d in size["trained_depths"] for w in size["trained_widths"])
    return 6.0 * weights * size["n"] * size["epochs"] * size["seeds"]


_HELPS = Claim(
    "depth helps: the best depth leaves much less error than d = 2",
    threshold=0.8,
    comparison="<",
    null=1.0,
    null_text="depth does not matter",
    paper="'the convergence rate gets better with depth'",
    unit="× (error after the last step, best depth / d = 2)",
)
_HURTS = Claim(
    "at w = 25, depth beyond a point hurts",
    threshold=1.05,
    comparison=">",
    null=1.0,
    null_text="deeper is never worse",
    paper="Figure 3, w = 25",
    unit="× (error after the last step, d = 20 / best depth)",
)
_EARLIER = Claim(
    "w = 25 turns worse at a smaller depth than d = 20",
    threshold=16,
    comparison="<=",
    null=20,
    null_text="it never turns",
    paper="Figure 3",
    unit="best depth at w = 25",
)


@experiment(
    "dgn.fig3",
    title="Convergence over depth",
    what="Experiment 1: error of fixed random gates under gradient descent over depths 2 to 20, several widths",
    claims=[_HELPS, _HURTS, _EARLIER],
    minutes=(1, 30),
    flops=memorise_operations,
    shares="memorise",
)
def fig3(run: Run) -> Artifact:
    """Figure 3: ‖e_t‖/‖e_0‖, and the e.c.d.f. of K₀/ρ_max."""
    size = run.sizes_of("dgn.fig3")
    depths, widths = size["trained_depths"], size["trained_widths"]
    found = {w: memorise(run, w) for w in widths}
    final = {w: d.error[:, :, -1] for w, d in found.items()}
    best = {w: np.array(depths)[f.argmin(0)] for w, f in final.items()}
    claims = [_HELPS.measure(final[w].min(0) / final[w][0], row=f"w = {w}") for w in widths]
    claims += [_HURTS.measure(final[widths[0]][-1] / final[widths[0]].min(0)), _EARLIER.measure(best[widths[0]])]
    arrays: dict[str, Any] = {"depths": depths, "widths": widths}
    arrays["error"] = np.stack([found[w].error for w in widths])
    arrays["linear"] = np.stack([found[w].linear for w in widths])
    scaled = [np.cumsum(f.eigenvalues / f.eigenvalues[..., -1:], axis=-1).mean(1) for f in found.values()]
    arrays["ecdf"] = np.stack(scaled)
    return Artifact(
        "dgn.fig3",
        "Convergence over depth",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {
            "error after the last step": {f"w={w}": f.tolist() for w, f in final.items()},
            "best depth": {f"w={w}": b.tolist() for w, b in best.items()},
        },
        {},
        {},
        (STEP, LENGTH, WIDTHS),
        {"fixed random gates": "hard"},
        _float32(arrays),
        figures=panels.descent(depths, widths),
    )


# --- figure 4: GaLU against ReLU -------------------------------------------------------------------------------

_GALU = Claim(
    "GaLU optimises better than ReLU",
    threshold=0.98,
    comparison="<",
    null=1.0,
    null_text="both alike",
    paper="Figure 4",
    unit="× (error after the last step, GaLU / ReLU)",
)
_GALU_SPECTRUM = Claim(
    "GaLU's spectrum is better conditioned than ReLU's",
    threshold=1.05,
    comparison=">",
    null=1.0,
    null_text="both alike",
    paper="Figure 4",
    unit="× (tr K₀/ρ_max, GaLU / ReLU)",
)
_GALU_DEPTH = Claim(
    "depth helps GaLU",
    threshold=0.95,
    comparison="<",
    null=1.0,
    null_text="depth does not matter",
    paper="'both e.c.d.f as well as convergence get better with increasing depth'",
    unit="× (error after the last step, largest depth / d = 2)",
)


@experiment(
    "dgn.fig4",
    title="GaLU against ReLU on random targets",
    what="Experiment 2: e.c.d.f. and convergence of GaLU with frozen gates and of ReLU, w = 100, several depths",
    claims=[_GALU, _GALU_SPECTRUM, _GALU_DEPTH],
    minutes=(0.6, 2),
    flops=lambda size: (
        14.0
        * sum((d - 2) * size["galu_width"] ** 2 + 3 * size["galu_width"] for d in size["galu_depths"])
        * size["galu_n"]
        * size["galu_epochs"]
        * size["seeds"]
    ),
)
def fig4(run: Run) -> Artifact:
    """Figure 4: 100 random points of the square with random targets."""
    from pathlens.data import random_targets
    from pathlens.models import Init, galu, relu

    size = run.sizes_of("dgn.fig4")
    depths, w = size["galu_depths"], size["galu_width"]
    data, init = random_targets(size["galu_n"]), Init("bernoulli", math.sqrt(2 / w))
    found = {}
    for name, build in (("GaLU", galu), ("ReLU", relu)):
        networks = [build(2, (w,) * (d - 1), init=init) for d in depths]
        found[name] = descend(run, networks, data, size["galu_epochs"], name)
    final = {name: d.error[:, :, -1] for name, d in found.items()}
    width_of = {name: d.eigenvalues.sum(-1) / d.eigenvalues[..., -1] for name, d in found.items()}
    rows = [f"d = {d}" for d in depths]
    claims = [_GALU.measure(final["GaLU"][i] / final["ReLU"][i], row=row) for i, row in enumerate(rows) if i]
    claims += [
        _GALU_SPECTRUM.measure(width_of["GaLU"][i] / width_of["ReLU"][i], row=row) for i, row in enumerate(rows) if i
    ]
    claims.append(_GALU_DEPTH.measure(final["GaLU"][-1] / final["GaLU"][0]))
    arrays: dict[str, Any] = {"depths": depths}
    for key, name in (("galu", "GaLU"), ("relu", "ReLU")):
        arrays[f"error_{key}"] = found[name].error
        scaled = found[name].eigenvalues / found[name].eigenvalues[..., -1:]
        arrays[f"ecdf_{key}"] = np.cumsum(scaled, axis=-1).mean(1)
    return Artifact(
        "dgn.fig4",
        "GaLU against ReLU on random targets",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {
            "error after the last step": {name: f.tolist() for name, f in final.items()},
            "tr K₀/ρ_max": {name: v.tolist() for name, v in width_of.items()},
        },
        {},
        {},
        (STEP, LENGTH),
        {"GaLU": "hard", "ReLU": "hard"},
        _float32(arrays),
        figures=panels.galu(depths),
    )
