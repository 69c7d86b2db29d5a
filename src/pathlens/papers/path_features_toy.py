"""Neural Path Features: the toy network, limits of wide networks with fixed gates, and memorising with them.

The trainings on image sets live elsewhere. Torch is imported inside functions, so that listing the experiments stays
quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pathlens.papers import deep_gated_panels as panels
from pathlens.papers import deep_gated_synthetic as deep_gated
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.image_runs import each_seed, own_folder, remembered
from pathlens.papers.sizes import SIZES

PAPER = "Neural Path Features"


def _float32(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()}


# --- figure 1: the toy network ---------------------------------------------------------------------------------

TOY = Deviation(
    paper="hypothetical gates for three hypothetical inputs",
    authors_code="–",
    ours="a ReLU network and three inputs, drawn from seeds until paths p₃ and p₁₂ alone are active for x₁ and x₂",
    why="the picture is then of a network that exists",
)
DEFINITION = Deviation(
    paper="Definition 2.2: {p: A(x_s, p) = 1, A(x_s′, p), p ∈ [P]}, and 𝓘_l maps to [w] for l = 0 too",
    authors_code="–",
    ours="A(x_s, p) = A(x_s′, p) = 1; the first entry of a path is an input node, in [d_in]",
    why="'= 1' is missing, and there are d_in input nodes",
)
_PATHS = Claim(
    "the network has 18 paths",
    threshold=18,
    comparison=">=",
    null=9,
    null_text="input nodes not counted",
    paper="p₁, …, p₁₈",
    unit="paths",
    needs=1,
)
_SHARED = Claim(
    "Λ(1, 2) = 1: paths p₃ and p₁₂ alone are active for both inputs, divided by d_in = 2",
    threshold=1,
    comparison="<=",
    null=2,
    null_text="not divided by d_in",
    paper="Λ(1, 2) = 1",
    unit="Λ(1, 2)",
    needs=1,
)
_INNER = Claim(
    "output = ⟨NPF, NPV⟩, H = Σ∘Λ and K = ΦᵀVΦ",
    threshold=1e-10,
    comparison="<=",
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

    for seed in range(68, 10_000):  # none before it is such a network
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
    minutes=(0.1, 0.1),
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
    gates = np.stack([g.detach().numpy() for g in net.gates(x).values()], axis=1)  # (inputs, layers, units)
    return Artifact(
        "npk.fig1",
        "Eighteen paths",
        PAPER,
        run.scale,
        {"inputs": 2, "hidden": [3, 3]},
        (),
        (_PATHS.measure([len(table.units)]), _SHARED.measure([shared[0, 1]]), _INNER.measure([error])),
        {"Λ": shared.tolist(), "active paths": table.activity.sum(1).tolist(), "outputs": output.tolist()},
        {},
        {"paths": 18, "Λ(1, 2)": 1},
        (TOY, DEFINITION),
        {"ReLU": "hard"},
        {
            "units": table.units,
            "features": table.features,
            "strengths": table.strengths,
            "gates": gates,
            "x": x.numpy(),
            "overlap": shared,
            "path": np.arange(1, len(table.units) + 1),
        },
        figures=panels.toy(),
    )


# --- limits ----------------------------------------------------------------------------------------------------

THEOREM = Deviation(
    paper="Theorem 5.1: K → d·σ^(2(d−1))·H as w → ∞",
    authors_code="–",
    ours="the relative distance, with σ² = 2/w; and the limit itself for random ReLU gates, d·Σ∘∏Σ̂⁽ˡ⁾",
    why="H grows without bound in w; and that limit is not the K⁽ᵈ⁾ of appendix A, which belongs to dependent gates",
)
APPENDIX = Deviation(
    paper="K⁽ᵈ⁾ = (K̃⁽ᵈ⁾ + Σ⁽ᵈ⁾)/2 (appendix A)",
    authors_code="–",
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
    threshold=0.1,
    comparison="<=",
    null=0.5,
    null_text="no convergence",
    paper="Theorem 5.1",
    unit="|fitted exponent of the width + ½|",
)
_EXACT = Claim(
    "the distance at every width is the one that the exact variance predicts",
    threshold=2.0,
    comparison="<=",
    null=10.0,
    null_text="another rate",
    paper="–",
    unit="× (worst of measured/predicted and its inverse)",
)
_OWN_LIMIT = Claim(
    "independent gates go to d·Σ∘∏Σ̂, not to the NTK of a ReLU network",
    threshold=0.5,
    comparison="<",
    null=1.0,
    null_text="as near to either",
    paper="section 5: 'K⁽ᵈ⁾ essentially becomes K⁽ᵈ⁾_FNPF'",
    unit="× (distance to d·Σ∘∏Σ̂ / distance to K̃⁽ᵈ⁾, at the largest width)",
)
_DEPENDENT = Claim(
    "gates copied from the values (DI) go to the NTK of a ReLU network",
    threshold=0.5,
    comparison="<",
    null=1.0,
    null_text="as near to either",
    paper="'FRNPF (DI) and ReLU start with the same NTK matrix'",
    unit="× (distance to K̃⁽ᵈ⁾ / distance to d·Σ∘∏Σ̂, at the largest width)",
)
_AGREE = Claim(
    "kernel regression with H of the gates and a network trained behind them are equally good",
    threshold=0.05,
    comparison="<=",
    null=0.2,
    null_text="the kernel says nothing about the network",
    paper="Theorem 5.1",
    unit="|difference of test accuracies|",
)
_LEARNED = Claim(
    "H of learned gates generalises better than H of random ones",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="no better",
    paper="Claim II",
    unit="test accuracy, last stage − random gates",
)
_CNTK = Claim(
    "random gates of finite width are worse than the exact CNTK",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="no worse",
    paper="67 against 77.43 % on CIFAR-10",
    unit="test accuracy, CNTK − H of random gates",
)


POOLS = {"pooling": "gap", "no_pooling": "flatten"}  # as `relu_cntk` calls them


def _folder(run: Run, part: str, keys: Sequence[str], **more: Any) -> Path | None:
    """Where a part of npk.limits puts what it found, by the sizes that it depends on."""
    size = run.sizes_of("npk.limits")
    return own_folder(run, "limits", part, **{key: size[key] for key in keys}, **more)


def _rows(run: Run) -> tuple[Any, Any, Any, Any]:
    """One subsample of flat images: X, y, X_test, y_test."""
    from pathlens.data import digits, mnist

    size = run.sizes_of("npk.limits")
    full = (mnist if run.scale == "paper" else digits)(flatten=True)
    part = full.subsample(size["rows"], n_test=size["rows_test"])
    return part.x, part.y, part.x_test, part.y_test


def _limits(run: Run, X: Any) -> dict[str, np.ndarray]:
    """Distance to d·σ^(2(d−1))·H per seed and width (root mean square of a few networks), as measured and as predicted;
    and distances of independent and dependent gates to both limits at the largest width."""
    import torch

    from pathlens import kernels
    from pathlens.models import galu
    from pathlens.theory.deep_gated import width_sweep

    size = run.sizes_of("npk.limits")
    L, w, draws = size["hidden_layers"], size["widths"][-1], size["draws"]
    x = X[: size["inputs"]].double()
    x = x / x.norm(dim=1, keepdim=True)
    # one network is off mostly by a common factor, so that its distance alone says little
    network_seeds = [1000 * seed + k for seed in run.seeds for k in range(draws)]
    sweep = width_sweep(x, hidden_layers=L, widths=size["widths"], seeds=network_seeds)
    shape = (len(size["widths"]), len(run.seeds), draws)
    errors, predicted = (np.sqrt(np.square(e).reshape(shape).mean(2)).T for e in (sweep.errors, sweep.predicted))
    run.progress("widths", 1, 1)
    limits = [K.dense() for K in (kernels.random_gate_limit(x, hidden_layers=L), kernels.relu_ntk(x, hidden_layers=L))]
    distances = np.empty((2, len(run.seeds), 2))  # independent, dependent; to Σ∘∏Σ̂, to K̃
    for i, dependent in enumerate((False, True)):
        for j, seed in enumerate(run.seeds):
            net = galu(x.shape[1], (w,) * L, dependent=dependent, init="he", seed=seed).double()
            K = kernels.ntk(net, x).dense()
            for k, M in enumerate(limits):  # by direction: He's first layer has variance 2/d_in, which scales K
                M = M * (K.trace() / M.trace())
                distances[i, j, k] = float(torch.linalg.norm(K - M) / torch.linalg.norm(M))
    return {"errors": errors, "predicted": predicted, "independent": distances[0], "dependent": distances[1]}


def _gates_and_networks(run: Run, X: Any, y: Any, X_test: Any, y_test: Any) -> dict[str, np.ndarray]:
    """Test accuracy of kernel regression with H and of networks, (seeds, stages), the first stage with random gates."""
    from pathlens import models
    from pathlens.data import DataSet
    from pathlens.kernels import gate_information
    from pathlens.training import Keep, train

    size = run.sizes_of("npk.limits")
    hidden, stages = (size["width"],) * size["hidden_layers"], [0, *size["stages"]]
    data = DataSet(X, y, X_test, y_test, task="classification", classes=10)
    options: dict[str, Any] = {
        "epochs": size["epochs"],
        "loss": "cross_entropy",
        "device": run.device,
    }

    pattern = models.relu(X.shape[1], hidden, 10, init="he")
    first: Any = train(
        pattern,
        data,
        seeds=run.seeds,
        keep=Keep(stages, evaluate="running"),
        progress=partial(run.progress, "ReLU"),
        **options,
    )
    found = np.empty((2, len(stages), len(run.seeds)))
    for i, stage in enumerate(stages):
        nets = []
        for j, seed in enumerate(run.seeds):
            state = first[j].at_epoch(stage).snapshot.state
            gates = {key.removeprefix("values."): value.cpu() for key, value in state.items()}
            # the ReLU network's own first weights came from `seed`: others for the values
            nets.append(models.flnpf(X.shape[1], hidden, 10, checkpoint=gates, init="he", seed=1000 + seed))
            # a touch of ridge, since H of few gates is nearly singular
            told = gate_information(nets[-1], (X, y), (X_test, y_test), ridge=1e-3, classes=10)
            found[0, i, j] = told.accuracy
        runs: Any = train(
            nets,
            data,
            seed=run.seeds[0],
            keep=Keep(evaluate="running"),
            progress=partial(run.progress, f"gates of epoch {stage}"),
            **options,
        )
        found[1, i] = runs.history("test_accuracy")[:, -1]
    relu = first.history("test_accuracy")[:, -1]
    return {"kernel": found[0].T, "network": found[1].T, "relu": relu}


def _convolutional(run: Run) -> dict[str, np.ndarray]:
    """Test accuracy of the CNTK and of H of random convolutional gates, with and without global average pooling.

    Without images these are missing: kernels of all pairs of positions of all pairs of images take hours on a CPU.
    """
    from pathlens import kernels
    from pathlens.data import cifar10, digits
    from pathlens.models import gated_twin, gconv, vconv

    size = run.sizes_of("npk.limits")
    if not size["images"]:
        missing = np.full(len(run.seeds), np.nan)
        return {f"{stem}_{pool}": missing for pool in POOLS for stem in ("cntk", "random")}
    full = cifar10(standardise=True) if run.scale == "paper" else digits()
    part: Any = full.subsample(size["images"], n_test=size["images_test"])
    X, X_test = part.x.to(run.device), part.x_test.to(run.device)
    channels, dense, edge = size["channels"], size["dense"], X.shape[-1]

    def accuracy(K: Any, K_test: Any) -> dict[str, float]:
        labels = kernels.kernel_classification(K, part.y, K_test, ridge=1e-3, classes=10).labels
        return {"accuracy": float(np.mean(labels.cpu().numpy() == part.y_test.numpy()))}

    def exact(pool: str) -> dict[str, float]:
        shape: dict[str, Any] = {"hidden_layers": len(channels) - 1, "pool": pool, "dense_layers": len(dense)}
        return accuracy(kernels.relu_cntk(X, **shape), kernels.relu_cntk(X_test, X, **shape))

    def random(pool: str, seed: int) -> dict[str, float]:
        template = (
            gconv(10, channels=channels, dense=dense)
            if pool == "gap"
            else vconv(10, channels=channels, dense=dense, size=edge)
        )
        net = gated_twin(template, "galu", example=part.x[:2], init="he", seed=seed).to(run.device)
        return accuracy(kernels.npk(net, X), kernels.npk(net, X_test, Y=X))

    def kept(part: str, compute: Callable[[], dict[str, float]], **more: Any) -> float:
        folder = _folder(run, part, ("image_data", "images", "images_test", "channels", "dense"), **more)
        return float(remembered(None if folder is None else folder / "found.json", compute)["accuracy"])

    found: dict[str, np.ndarray] = {}
    for k, (name, pool) in enumerate(POOLS.items()):
        found[f"cntk_{name}"] = np.full(len(run.seeds), kept(f"cntk-{pool}", partial(exact, pool)))
        scores = [kept(f"random-{pool}", partial(random, pool, seed), seed=seed) for seed in run.seeds]
        found[f"random_{name}"] = np.array(scores)
        run.progress("convolutions", k + 1, len(POOLS))
    return found


def _limits_operations(size: dict[str, Any]) -> float:
    """Floating-point operations: kernels over widths, networks and regressions per stage, kernels of convolutions."""
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
    data=("mnist", "cifar10"),
    minutes=(1.5, 120),
    flops=_limits_operations,
)
def limits(run: Run) -> Artifact:
    """Section 5 and appendix A, on one subsample."""
    size = run.sizes_of("npk.limits")
    X, y, X_test, y_test = _rows(run)
    folder = _folder(run, "widths", ("data", "rows", "widths", "draws", "hidden_layers", "inputs"))
    wide = each_seed(run, folder, lambda part: _limits(part, X))
    wide |= {name: wide[name].T for name in ("errors", "predicted")}
    folder = _folder(run, "stages", ("data", "rows", "rows_test", "width", "hidden_layers", "epochs", "stages"))
    told = each_seed(run, folder, lambda part: _gates_and_networks(part, X, y, X_test, y_test))
    told |= {"stages": np.array([0, *size["stages"]]), **{name: told[name].T for name in ("kernel", "network")}}
    images = _convolutional(run)
    rates = np.polyfit(np.log(size["widths"]), np.log(wide["errors"]), 1)[0]
    ratio = wide["errors"] / wide["predicted"]
    names = ["random gates", *(f"gates of epoch {stage}" for stage in told["stages"][1:])]
    claims = [
        _CONVERGES.measure(abs(rates + 0.5)),
        _EXACT.measure(np.maximum(ratio, 1 / ratio).max(0)),
        _OWN_LIMIT.measure(wide["independent"][:, 0] / wide["independent"][:, 1]),
        _DEPENDENT.measure(wide["dependent"][:, 1] / wide["dependent"][:, 0]),
        *(_AGREE.measure(abs(told["kernel"][i] - told["network"][i]), row=name) for i, name in enumerate(names)),
        _LEARNED.measure(told["kernel"][-1] - told["kernel"][0]),
        *(
            _CNTK.measure(images[f"cntk_{pool}"] - images[f"random_{pool}"], row=pool.replace("_", " "))
            for pool in POOLS
        ),
    ]
    accuracy = {
        "stages": told["stages"].tolist(),
        "kernel": told["kernel"].tolist(),
        "network": told["network"].tolist(),
        "ReLU": told["relu"].tolist(),
    }
    if size["images"]:
        accuracy["images"] = {name: values.tolist() for name, values in images.items()}
    return Artifact(
        "npk.limits",
        "Wide networks with fixed gates",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {
            "distance at each width": wide["errors"].tolist(),
            "predicted": wide["predicted"].tolist(),
            "distance to d·Σ∘∏Σ̂ and to K̃": {name: wide[name].tolist() for name in ("independent", "dependent")},
            "test accuracy": accuracy,
        },
        SIZES["npk.limits"]["paper"],
        {"FRNPF, GCONV": "67 %", "CNTK": "77.43 %", "FLNPF": "79.68 %", "ReLU": "80.43 %"},
        (THEOREM, APPENDIX, SUBSAMPLE),
        {"all gates": "hard"},
        _float32({"widths": size["widths"], **wide, **told, **images}),
        figures=panels.limits(float(np.median(told["relu"])), bool(size["images"])),
    )


# --- memorising ------------------------------------------------------------------------------------------------

APPENDIX_GRID = Deviation(
    paper="'the role of width and depth on a pure memorisation task' is in an appendix that the text lacks",
    authors_code="not public",
    ours="Experiment 1 of the DGN paper on a grid of depths and widths",
    why="the same authors' task; fixed random gates are fixed neural path features",
)
_WIDTH = Claim(
    "width helps at every depth above 2",
    threshold=0.95,
    comparison="<",
    null=1.0,
    null_text="width does not matter",
    paper="'the role of width and depth'",
    unit="× (error after the last step, largest / smallest width)",
)
_TO_A_POINT = Claim(
    "depth helps to a point: some depth in between is better than both ends",
    threshold=0.97,
    comparison="<",
    null=1.0,
    null_text="an end is best",
    paper="'the role of width and depth'",
    unit="× (least error / that of the better end)",
)


@experiment(
    "npk.memorise",
    title="Memorising with fixed path features",
    what="identical inputs, random targets, fixed random gates: error on a grid of depths and widths",
    claims=[_WIDTH, _TO_A_POINT],
    minutes=(1, 30),
    flops=deep_gated.memorise_operations,
    shares="memorise",
)
def memorise(run: Run) -> Artifact:
    """The appendix on memorisation, with the trainings of the DGN paper's Figure 3."""
    sizes = run.sizes_of("npk.memorise")
    depths, widths = sizes["trained_depths"], sizes["trained_widths"]
    final = np.stack([deep_gated.memorise(run, w).error[:, :, -1] for w in widths])  # (widths, depths, seeds)
    ratio = final[-1] / final[0]
    claims = [_WIDTH.measure(ratio[i], row=f"d = {d}") for i, d in enumerate(depths) if d > 2]
    claims += [
        _TO_A_POINT.measure(final[i].min(0) / np.minimum(final[i][0], final[i][-1]), row=f"w = {w}")
        for i, w in enumerate(widths)
    ]
    return Artifact(
        "npk.memorise",
        "Memorising with fixed path features",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        {"error after the last step": {f"w={w}": final[i].tolist() for i, w in enumerate(widths)}},
        {},
        {},
        (APPENDIX_GRID, deep_gated.STEP),
        {"fixed random gates": "hard"},
        _float32({"depths": depths, "widths": widths, "error": final}),
        figures=panels.memorise(widths),
    )
