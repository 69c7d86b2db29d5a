"""Section 5: wide networks with fixed gates, kernel regression with their kernels, and the CNTK."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.image_runs import each_seed, own_folder, remembered
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from torch import Tensor

    from pathlens.data import DataSet

POOLS = {"pooling": "gap", "no_pooling": "flatten"}  # as `relu_cntk` calls them

THEOREM = Deviation(
    paper="Theorem 5.1: K → d·σ^(2(d−1))·H as w → ∞",
    ours="the relative distance, with σ² = 2/w; and the limit itself for random ReLU gates, d·Σ∘∏Σ̂⁽ˡ⁾",
    why="H grows without bound in w; and that limit is not the K⁽ᵈ⁾ of appendix A, which belongs to dependent gates",
)
APPENDIX = Deviation(
    paper="K⁽ᵈ⁾ = (K̃⁽ᵈ⁾ + Σ⁽ᵈ⁾)/2 (appendix A)",
    ours="K̃⁽ᵈ⁾",
    why="K̃ is the limit where all layers have variance 2/w; the printed one needs 1/w in the last layer",
)
SUBSAMPLE = Deviation(
    paper="networks on all of MNIST and CIFAR-10; CNTK's 77.43 is quoted",
    authors_code="Keras; 5 runs, best epoch",
    ours="one subsample for kernels and networks alike; quick: scikit-learn's digits, 8 × 8",
    why="kernel regression and networks are comparable only on the same rows",
)
_CONVERGES = Claim(
    "K of a network with fixed gates approaches d·σ^(2(d−1))·H like 1/√w",
    at_most=0.1,
    null=0.5,
    null_text="no convergence",
    paper="Theorem 5.1",
    unit="|fitted exponent of the width + ½|",
)
_EXACT = Claim(
    "the distance at every width is the one that the exact variance predicts",
    at_most=2.0,
    null=10.0,
    null_text="another rate",
    paper="–",
    unit="× (worst of measured/predicted and its inverse)",
)
_OWN_LIMIT = Claim(
    "independent gates go to d·Σ∘∏Σ̂, not to the NTK of a ReLU network",
    below=0.5,
    null=1.0,
    null_text="as near to either",
    paper="section 5: 'K⁽ᵈ⁾ essentially becomes K⁽ᵈ⁾_FNPF'",
    unit="× (distance to d·Σ∘∏Σ̂ / distance to K̃⁽ᵈ⁾, at the largest width)",
)
_DEPENDENT = Claim(
    "gates copied from the values (DI) go to the NTK of a ReLU network",
    below=0.5,
    null=1.0,
    null_text="as near to either",
    paper="'FRNPF (DI) and ReLU start with the same NTK matrix'",
    unit="× (distance to K̃⁽ᵈ⁾ / distance to d·Σ∘∏Σ̂, at the largest width)",
)
_AGREE = Claim(
    "kernel regression with H of the gates and a network trained behind them are equally good",
    at_most=0.05,
    null=0.2,
    null_text="the kernel says nothing about the network",
    paper="Theorem 5.1",
    unit="|difference of test accuracies|",
)
_LEARNED = Claim(
    "H of learned gates generalises better than H of random ones",
    above=0.0,
    null=0.0,
    null_text="no better",
    paper="Claim II",
    unit="test accuracy, last stage − random gates",
)
_CNTK = Claim(
    "random gates of finite width are worse than the exact CNTK",
    above=0.0,
    null=0.0,
    null_text="no worse",
    paper="67 against 77.43 % on CIFAR-10",
    unit="test accuracy, CNTK − H of random gates",
)


def _folder(run: Run, part: str, keys: Sequence[str], **more: Any) -> Path | None:
    """Folder for the results of a part, named by the sizes that it depends on."""
    return own_folder(run, "limits", part, **{key: run.sizes[key] for key in keys}, **more)


def _distances(run: Run, X: Tensor) -> dict[str, np.ndarray]:
    """Measured and predicted distance to d·σ^(2(d−1))·H per seed and width (root mean square of a few networks);
    and distances of independent and dependent gates to both limits at the largest width."""
    import torch

    from pathlens import kernels
    from pathlens.models import galu
    from pathlens.theory.deep_gated import width_sweep

    size = run.sizes
    L, w, draws = size["hidden_layers"], size["widths"][-1], size["draws"]
    x = X[: size["inputs"]].double()
    x = x / x.norm(dim=1, keepdim=True)
    # the distance of one network varies with a factor common to all entries: average over several
    network_seeds = [1000 * seed + k for seed in run.seeds for k in range(draws)]
    sweep = width_sweep(x, hidden_layers=L, widths=size["widths"], seeds=network_seeds)
    shape = (len(size["widths"]), len(run.seeds), draws)
    errors, predicted = (np.sqrt(np.square(e).reshape(shape).mean(2)).T for e in (sweep.errors, sweep.predicted))
    run.progress("widths", 1, 1)
    limits = [K.dense() for K in (kernels.random_gate_limit(x, hidden_layers=L), kernels.relu_ntk(x, hidden_layers=L))]
    found = {"errors": errors, "predicted": predicted}
    for name in ("independent", "dependent"):
        found[name] = np.empty((len(run.seeds), 2))  # to d·Σ∘∏Σ̂, to K̃
        for j, seed in enumerate(run.seeds):
            net = galu(x.shape[1], (w,) * L, dependent=name == "dependent", init="he", seed=seed).double()
            K = kernels.ntk(net, x).dense()
            for k, M in enumerate(limits):  # by direction: He's first layer has variance 2/d_in, which scales K
                M = M * (K.trace() / M.trace())
                found[name][j, k] = float(torch.linalg.norm(K - M) / torch.linalg.norm(M))
    return found


def _stage_accuracies(run: Run, data: DataSet) -> dict[str, np.ndarray]:
    """Test accuracy of kernel regression with H and of networks, (seeds, stages), the first stage with random gates."""
    from pathlens import models
    from pathlens.kernels import gate_information
    from pathlens.training import Keep, train

    assert data.x_test is not None and data.y_test is not None
    size = run.sizes
    shape: dict[str, Any] = {"hidden": (size["width"],) * size["hidden_layers"], "outputs": 10, "init": "he"}
    stages = [0, *size["stages"]]
    options: dict[str, Any] = {"epochs": size["epochs"], "loss": "cross_entropy", "device": run.device}
    inputs = data.x.shape[1]
    first: Any = train(
        models.relu(inputs, **shape),
        data,
        seeds=run.seeds,
        keep=Keep(stages, evaluate="running"),
        progress=partial(run.progress, "ReLU"),
        **options,
    )
    kernel, network = np.empty((2, len(run.seeds), len(stages)))
    for i, stage in enumerate(stages):
        nets = []
        for j, seed in enumerate(run.seeds):
            state = first[j].at_epoch(stage).snapshot.state
            gates = {key.removeprefix("values."): value.cpu() for key, value in state.items()}
            # the ReLU network's own first weights came from `seed`: others for the values
            nets.append(models.flnpf(inputs, **shape, checkpoint=gates, seed=1000 + seed))
            # H of few gates is nearly singular: a small ridge
            fit = gate_information(nets[-1], (data.x, data.y), (data.x_test, data.y_test), ridge=1e-3, classes=10)
            kernel[j, i] = fit.accuracy
        progress = partial(run.progress, f"gates of epoch {stage}")
        runs: Any = train(nets, data, seed=run.seeds[0], keep=Keep(evaluate="running"), progress=progress, **options)
        network[:, i] = runs.history("test_accuracy")[:, -1]
    return {"kernel": kernel, "network": network, "relu": first.history("test_accuracy")[:, -1]}


def _convolutional(run: Run) -> dict[str, np.ndarray]:
    """Test accuracy of the CNTK and of H of random convolutional gates, with and without global average pooling.

    Missing if the size ``images`` is 0: kernels of all pairs of positions of all pairs of images take hours on a CPU.
    """
    from pathlens import kernels
    from pathlens.data import cifar10, digits
    from pathlens.models import gated_twin, gconv, vconv

    size = run.sizes
    if not size["images"]:
        missing = np.full(len(run.seeds), np.nan)
        return {f"{stem}_{pool}": missing for pool in POOLS for stem in ("cntk", "random")}
    full = cifar10(standardise=True) if run.scale == "paper" else digits()
    data: Any = full.subsample(size["images"], n_test=size["images_test"])
    X, X_test = data.x.to(run.device), data.x_test.to(run.device)
    channels, dense = size["channels"], size["dense"]

    def accuracy(K: Any, K_test: Any) -> dict[str, float]:
        labels = kernels.kernel_classification(K, data.y, K_test, ridge=1e-3, classes=10).labels
        return {"accuracy": float(np.mean(labels.cpu().numpy() == data.y_test.numpy()))}

    def exact(pool: str) -> dict[str, float]:
        shape: dict[str, Any] = {"hidden_layers": len(channels) - 1, "pool": pool, "dense_layers": len(dense)}
        return accuracy(kernels.relu_cntk(X, **shape), kernels.relu_cntk(X_test, X, **shape))

    def random(pool: str, seed: int) -> dict[str, float]:
        if pool == "gap":
            template: Any = gconv(10, channels=channels, dense=dense)
        else:
            template = vconv(10, channels=channels, dense=dense, size=X.shape[-1])
        net = gated_twin(template, "galu", example=data.x[:2], init="he", seed=seed).to(run.device)
        return accuracy(kernels.npk(net, X), kernels.npk(net, X_test, Y=X))

    def stored(part: str, compute: Callable[[], dict[str, float]], **more: Any) -> float:
        folder = _folder(run, part, ("image_data", "images", "images_test", "channels", "dense"), **more)
        return float(remembered(None if folder is None else folder / "found.json", compute)["accuracy"])

    found: dict[str, np.ndarray] = {}
    for k, (name, pool) in enumerate(POOLS.items()):
        found[f"cntk_{name}"] = np.full(len(run.seeds), stored(f"cntk-{pool}", partial(exact, pool)))
        scores = [stored(f"random-{pool}", partial(random, pool, seed), seed=seed) for seed in run.seeds]
        found[f"random_{name}"] = np.array(scores)
        run.progress("convolutions", k + 1, len(POOLS))
    return found


def _flops(size: dict[str, Any]) -> float:
    """Kernels over widths, networks and regressions per stage, kernels of convolutions."""
    L, stages, rows = size["hidden_layers"], 1 + len(size["stages"]), size["rows"]
    sweep = sum(6.0 * L * w**2 * size["inputs"] * size["draws"] for w in size["widths"])
    weights = 784 * size["width"] + (L - 1) * size["width"] ** 2
    networks = (6 + 8 * stages) * weights * rows * size["epochs"]
    regressions = stages * (rows**3 / 3 + 2.0 * rows * (rows + size["rows_test"]) * (784 + L * size["width"]))
    pairs, positions = size["images"] * (size["images"] + size["images_test"]), 32 * 32
    exact = 2 * 30.0 * pairs * positions**2 * (len(size["channels"]) - 1)
    gates = 2 * 2.0 * pairs * positions**2 * sum(size["channels"])
    return size["seeds"] * (sweep + networks + regressions + gates) + exact


@experiment(
    "npk.limits",
    title="Wide networks with fixed gates",
    what="Theorem 5.1 over widths; kernel regression with H against networks behind the same gates, and CNTK",
    claims=[_CONVERGES, _EXACT, _OWN_LIMIT, _DEPENDENT, _AGREE, _LEARNED, _CNTK],
    deviations=[THEOREM, APPENDIX, SUBSAMPLE],
    sizes={
        "widths": ([25, 50, 100, 200, 400], [25, 50, 100, 200, 400, 800, 1600]),
        "draws": 8,
        "hidden_layers": 4,
        "inputs": 20,
        "data": ("digits", "MNIST"),
        "rows": (500, 5000),
        "rows_test": (360, 10000),
        "width": 100,
        "epochs": (30, 60),
        "stages": ([1, 5, 30], [10, 20, 30, 40, 50, 60]),
        "image_data": ("digits", "CIFAR-10"),
        "images": (60, 1000),
        "images_test": (120, 1000),
        "channels": ([1, 16, 16, 16], [3, 64, 64, 128, 128]),
        "dense": ([32], [256, 256]),
    },
    data=("mnist", "cifar10"),
    minutes=(1.5, 120),
    flops=_flops,
)
def limits(run: Run) -> Artifact:
    """Section 5 and appendix A, on one subsample."""
    from pathlens.data import digits, mnist

    size = run.sizes
    full = (mnist if run.scale == "paper" else digits)(flatten=True)
    data = full.subsample(size["rows"], n_test=size["rows_test"])
    folder = _folder(run, "widths", ("data", "rows", "widths", "draws", "hidden_layers", "inputs"))
    wide = each_seed(run, folder, lambda part: _distances(part, data.x))
    folder = _folder(run, "stages", ("data", "rows", "rows_test", "width", "hidden_layers", "epochs", "stages"))
    found = each_seed(run, folder, lambda part: _stage_accuracies(part, data))
    images = _convolutional(run)
    errors, predicted = wide["errors"].T, wide["predicted"].T  # (widths, seeds)
    kernel, network, relu = found["kernel"].T, found["network"].T, found["relu"]  # (stages, seeds)
    stages = [0, *size["stages"]]
    rates = np.polyfit(np.log(size["widths"]), np.log(errors), 1)[0]
    ratio = errors / predicted
    names = ["random gates", *(f"gates of epoch {stage}" for stage in size["stages"])]
    claims = [
        _CONVERGES.measure(abs(rates + 0.5)),
        _EXACT.measure(np.maximum(ratio, 1 / ratio).max(0)),
        _OWN_LIMIT.measure(wide["independent"][:, 0] / wide["independent"][:, 1]),
        _DEPENDENT.measure(wide["dependent"][:, 1] / wide["dependent"][:, 0]),
        *(_AGREE.measure(abs(kernel[i] - network[i]), row=name) for i, name in enumerate(names)),
        _LEARNED.measure(kernel[-1] - kernel[0]),
        *(
            _CNTK.measure(images[f"cntk_{pool}"] - images[f"random_{pool}"], row=pool.replace("_", " "))
            for pool in POOLS
        ),
    ]
    accuracy: dict[str, Any] = {"stages": stages, "kernel": kernel, "network": network, "ReLU": relu}
    if size["images"]:
        accuracy["images"] = images
    return run.artifact(
        claims=claims,
        metrics={
            "distance at each width": errors,
            "predicted": predicted,
            "distance to d·Σ∘∏Σ̂ and to K̃": {name: wide[name] for name in ("independent", "dependent")},
            "test accuracy": accuracy,
        },
        paper_numbers={"FRNPF, GCONV": "67 %", "CNTK": "77.43 %", "FLNPF": "79.68 %", "ReLU": "80.43 %"},
        gates={"all gates": "hard"},
        arrays=float32(
            {
                "widths": size["widths"],
                **wide,
                "errors": errors,
                "predicted": predicted,
                "stages": stages,
                "kernel": kernel,
                "network": network,
                "relu": relu,
                **images,
            }
        ),
        panels=_panels(float(np.median(relu)), bool(size["images"])),
    )


def _panels(relu: float, convolutional: bool) -> list[Panel]:
    """``relu`` is the median test accuracy of the ReLU networks."""
    distances = [
        Series(f"{gates}[:, {k}]", f"{gates} gates, from {name}")
        for gates in ("independent", "dependent")
        for k, name in enumerate(("d·Σ∘∏Σ̂", "the ReLU NTK"))
    ]
    images = [
        Series(f"{stem}_{pool}", f"{name}, {pool.replace('_', ' ')}")
        for pool in POOLS
        for stem, name in (("cntk", "CNTK"), ("random", "random gates"))
    ]
    panels = [
        Panel(
            "lines",
            "Distance from the limit of Theorem 5.1",
            [Series("errors.T", "measured"), Series("predicted.T", "predicted", style="dashed")],
            "widths",
            "width",
            "relative distance",
            "log",
            "log",
            slope=-0.5,
        ),
        Panel("strips", "Which limit, at the largest width", distances, x_label="relative distance", x_scale="log"),
        Panel(
            "lines",
            "Gates of each stage",
            [Series("kernel.T", "regression with H"), Series("network.T", "network")],
            "stages",
            "epoch at which the gates were taken",
            "test accuracy",
            "log",
            marks=[(relu, "ReLU")],
        ),
    ]
    if convolutional:
        panels.append(Panel("strips", "Convolutional gates", images, x_label="test accuracy"))
    return panels
