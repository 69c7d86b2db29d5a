"""Half-space summary: quadratic gates against linear ones with as many parameters, and what a DLGN costs beside ReLU.

Both are questions that the summary raises and the paper does not answer. Torch is imported inside functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_quadratic_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space_cifar import PAPER
from pathlens.papers.half_space_residual import NETWORKS
from pathlens.papers.image_runs import accuracies, hard_accuracies, images, options, spread
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from torch import Tensor

    from pathlens.records import Record
    from pathlens.training import Runs

KINDS = {"linear": "linear gates, layer by layer", "shallow": "linear gates of x", "quadratic": "quadratic gates of x"}
SETS = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
BETA = 4.0
EARLY = 3
CIRCLE_EPOCHS = (0, 1, EARLY, 10, 30, 100)

QUESTION = Deviation(
    paper="proposed as an experiment (summary, experiment 3), with neither sizes nor results",
    authors_code="–",
    ours="piecewise constant networks of five hidden layers, soft gates β = 4; widths chosen so that all three have "
    "the parameters of the linearly gated network",
    why="a wider gate function should not win by its size",
)
RANK = Deviation(
    paper="'a quadratic function of the input'",
    authors_code="–",
    ours="Σ_r s_r (v_r·x)² + u·x, one square per unit (rank 1)",
    why="a full quadratic form has d² numbers per gate: 9.4 million on CIFAR-10",
)


# --- quadratic gates -------------------------------------------------------------------------------------------

_FITS = Claim(
    "on the circle, quadratic gates fit better with as many parameters",
    threshold=0.5,
    comparison="<",
    null=1.0,
    null_text="no better",
    paper="proposed",
    unit="× (loss after the last epoch, quadratic / linear)",
)
_ACCURATE = Claim(
    "on images, quadratic gates are more accurate with as many parameters",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="no better",
    paper="proposed",
    unit="points of test accuracy, quadratic − linear",
)
_SLOW_HALF = Claim(
    f"on the circle, paths concentrate on the slow half by epoch {EARLY}",
    threshold=2.0,
    comparison=">",
    null=1.0,
    null_text="as many paths on either half",
    paper="Figure 3, for linear gates",
    unit="× (mean diagonal of the overlap kernel, top / bottom)",
)


def build(kind: str, inputs: int, width: int, outputs: int, rank: int) -> Any:
    """A piecewise constant network of five hidden layers with the given kind of gates."""
    from pathlens import models

    given: dict[str, Any] = {"piecewise_constant": True, "beta": BETA}
    hidden = (width,) * 5
    if kind == "quadratic":
        return models.quadratic(inputs, hidden, outputs, rank=rank, **given)
    return (models.dlgn if kind == "linear" else models.dlgn_shallow)(inputs, hidden, outputs, **given)


def matched_width(kind: str, inputs: int, width: int, outputs: int, rank: int) -> int:
    """The width at which a kind of gates has nearest to the parameters of the linearly gated network of `width`."""

    def parameters(kind: str, w: int) -> int:
        return sum(p.numel() for p in build(kind, inputs, w, outputs, rank).parameters())

    wanted, w = parameters("linear", width), 1
    while parameters(kind, w) < wanted:
        w += 1
    return w if w == 1 or parameters(kind, w) - wanted <= wanted - parameters(kind, w - 1) else w - 1


def _path_ratio(record: Record, top: np.ndarray) -> float:
    """Active paths on the slow half of the circle over those on the fast half."""
    from pathlens.kernels import overlap

    diagonal = overlap(record).diagonal().double().numpy()
    return float(diagonal[top].mean() / diagonal[~top].mean())


def _circle(run: Run) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    from pathlens.data import circle
    from pathlens.training import train

    size = run.sizes_of("hs.quadratic")
    data, epochs = circle(size["points"]), size["circle_epochs"]
    top = data.marks["top"].numpy()
    kept = sorted({e for e in CIRCLE_EPOCHS if e < epochs} | {epochs})
    arrays: dict[str, Any] = {"circle_epochs": np.array(kept)}
    widths = {}
    for kind in KINDS:
        widths[kind] = matched_width(kind, 2, size["circle_width"], 1, size["rank"])
        given = options(run, f"circle, {KINDS[kind]}", "quadratic", "circle", kind)
        given |= {"loss": "mse", "autocast": None, "checkpoint_every": 50, "evaluate": "full"}
        runs: Any = train(
            build(kind, 2, widths[kind], 1, size["rank"]),
            data,
            epochs=epochs,
            lr=size["circle_lr"],
            batch_size=size["circle_batch"],
            keep_at=kept,
            watch=data.x,
            sensitivities=False,
            **given,
        )
        arrays[f"loss_{kind}"] = runs.history()
        arrays[f"paths_{kind}"] = np.array([[_path_ratio(t.at_epoch(e).record, top) for e in kept] for t in runs])
    return arrays, widths


def _images(run: Run, name: str) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    from pathlens.training import train

    size = run.sizes_of("hs.quadratic")
    data = images(name, size["rows"], size["rows_test"], flatten=True)
    arrays: dict[str, np.ndarray] = {}
    widths = {}
    for kind in KINDS:
        widths[kind] = matched_width(kind, data.d, size["width"], data.c, size["rank"])
        runs: Runs = train(  # type: ignore[assignment]  # seeds are given
            build(kind, data.d, widths[kind], data.c, size["rank"]),
            data,
            epochs=size["epochs"],
            lr=size["lr"],
            batch_size=size["batch_size"],
            **options(run, f"{SETS[name]}, {KINDS[kind]}", "quadratic", name, kind),
        )
        told = {
            **accuracies(runs),
            "hard": hard_accuracies(runs, data, run.device),
            "history": 100 * runs.history("test_accuracy"),
        }
        arrays |= {f"{what}_{name}_{kind}": values for what, values in told.items()}
    return arrays, widths


@experiment(
    "hs.quadratic",
    title="Quadratic gates against linear ones",
    what="circle, Fashion-MNIST, CIFAR-10: gates of rank 1 in place of half-spaces, equal parameters",
    claims=[_FITS, _ACCURATE, _SLOW_HALF],
    data=("fashion_mnist", "cifar10"),
    minutes=(1.5, 15),
    # gates and values of both kinds; flat images of up to 3072 numbers
    flops=lambda size: (
        24.0 * len(size["images"]) * 3072 * size["width"] * (size["rows"] or 60_000) * size["epochs"] * size["seeds"]
    ),
)
def quadratic(run: Run) -> Artifact:
    """Accuracy and dynamics of gates that are quadratic functions of the input."""
    size = run.sizes_of("hs.quadratic")
    arrays, widths = _circle(run)
    all_widths = {"circle": widths}
    at = list(arrays["circle_epochs"]).index(EARLY) if EARLY in arrays["circle_epochs"] else -1
    final = {kind: arrays[f"loss_{kind}"][:, -1] for kind in KINDS}
    claims = [
        _FITS.measure(final["quadratic"] / final[kind], row=f"against {KINDS[kind]}") for kind in ("linear", "shallow")
    ]
    claims += [_SLOW_HALF.measure(arrays[f"paths_{kind}"][:, at], row=KINDS[kind]) for kind in KINDS]
    table = {}
    for name in size["images"]:
        found, all_widths[name] = _images(run, name)
        arrays |= found
        last = {kind: found[f"last_{name}_{kind}"] for kind in KINDS}
        claims += [
            _ACCURATE.measure(last["quadratic"] - last[kind], row=f"{SETS[name]}, against {KINDS[kind]}")
            for kind in ("linear", "shallow")
        ]
        table[SETS[name]] = {
            KINDS[kind]: {
                told: spread(found[f"{what}_{name}_{kind}"])
                for what, told in (
                    ("last", "test, last epoch"),
                    ("best", "test, best epoch (chosen on the test set)"),
                    ("hard", "test, hard gates"),
                )
            }
            for kind in KINDS
        }
    if not size["images"]:
        claims.append(_ACCURATE.measure([]))
    return Artifact(
        "hs.quadratic",
        "Quadratic gates against linear ones",
        PAPER,
        run.scale,
        {**size, "beta": BETA},
        run.seeds,
        tuple(claims),
        {"accuracy": table, "loss on the circle": {k: spread(v) for k, v in final.items()}, "widths": all_widths},
        SIZES["hs.quadratic"]["paper"],
        {},
        (QUESTION, RANK),
        {"training and test": f"soft β={BETA:g}", "active paths, 'hard gates'": "hard"},
        {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()},
        figures=panels.quadratic(KINDS, {name: SETS[name] for name in size["images"]}),
    )


# --- cost ------------------------------------------------------------------------------------------------------

COSTS = {
    "training": "time of a training step",
    "inference": "time of a forward pass",
    "kept": "memory kept for the backward pass",
    "flops": "operations of a forward pass",
    "parameters": "parameters",
}
UNITS = {"training": ", s", "inference": ", s", "kept": ", bytes"}
TIMING = Deviation(
    paper="asked for (summary, check 3); no numbers",
    authors_code="–",
    ours="plain PyTorch steps (forward, backward, Adam) of one batch in float32, the fastest of several; processor "
    "seconds on a CPU; memory is that of the tensors that autograd keeps",
    why="neither compilation nor a busy machine should decide the comparison",
)
_TWICE = Claim(
    "a DLGN costs about twice as much as the ReLU network",
    threshold=0.5,
    comparison="<=",
    null=1.0,
    null_text="as much as ReLU, or three times",
    paper="two networks in place of one",
    unit="|DLGN / ReLU − 2|",
)


def _seconds(work: Callable[[], Any], steps: int, device: str) -> float:
    """The fastest of several calls, in seconds of the GPU or of the processor, whatever else the machine does."""
    import torch

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    found = []
    for _ in range(steps):
        calls, took, start = 0, 0.0, now()
        while took <= 0:  # the processor's clock of some systems moves a hundred times a second only
            work()
            calls, took = calls + 1, now() - start
        found.append(took / calls)
    return min(found)


def kept_bytes(net: Any, x: Tensor) -> int:
    """Memory of the tensors that autograd keeps for the backward pass, parameters and input not counted."""
    import torch

    known = {p.untyped_storage().data_ptr() for p in (*net.parameters(), *net.buffers(), x)}
    kept: dict[int, int] = {}
    alive = []  # a freed tensor's address would be used again

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x)
    return sum(kept.values())


def costs(net: Any, x: Tensor, y: Tensor, steps: int) -> dict[str, float]:
    """What one step of a network takes, by the names of `COSTS`."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    device = str(x.device)
    optimiser = torch.optim.Adam(net.parameters())

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()

    def infer() -> None:
        with torch.no_grad():
            net(x)

    net.train()
    step()  # the first one also allocates
    found = {"training": _seconds(step, steps, device), "kept": float(kept_bytes(net, x))}
    net.eval()
    infer()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(x)
    return found | {
        "inference": _seconds(infer, steps, device),
        "flops": float(counter.get_total_flops()),
        "parameters": float(sum(p.numel() for p in net.parameters())),
    }


def _architectures(run: Run) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Template and shape of an input, by name."""
    from pathlens import models

    size = run.sizes_of("hs.cost")
    found: dict[str, tuple[Any, tuple[int, ...]]] = {
        f"five dense layers of {size['dense_width']}": (
            models.mlp(784, (size["dense_width"],) * 5, 10, bias=True),
            (784,),
        )
    }
    found |= {f"five convolutions of {w}": (models.conv5(10, w, bias=True), (3, 32, 32)) for w in size["filters"]}
    found |= {NETWORKS[name]: (getattr(models, name)(10), (3, 32, 32)) for name in size["residual"]}
    return found


@experiment(
    "hs.cost",
    choices={"residual": ["resnet110"]},
    title="What gates cost",
    what="time, memory, operations and parameters of a DLGN against its ReLU network",
    claims=[_TWICE],
    minutes=(0.5, 2),
    flops=5e13,
)
def cost(run: Run) -> Artifact:
    """Training step, inference, memory, operations and parameters, as ratios to ReLU."""
    import torch

    from pathlens.models import gated_twin

    size = run.sizes_of("hs.cost")
    architectures = _architectures(run)
    found = np.empty((len(architectures), 2, len(COSTS), len(run.seeds)))
    for i, (name, (template, shape)) in enumerate(architectures.items()):
        for j, seed in enumerate(run.seeds):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(size["batch"], *shape, generator=generator).to(run.device)
            y = torch.randint(10, (size["batch"],), generator=generator).to(run.device)
            for k, kind in enumerate(("relu", "dlgn")):
                net = gated_twin(template, kind, example=torch.zeros(2, *shape), seed=seed).to(run.device)
                told = costs(net, x, y, size["steps"])
                found[i, k, :, j] = [told[key] for key in COSTS]
            run.progress(name, j + 1, len(run.seeds))
    ratio = found[:, 1] / found[:, 0]
    claims = [
        _TWICE.measure(abs(ratio[i, c] - 2), row=f"{name}, {what}")
        for i, name in enumerate(architectures)
        for c, what in enumerate(COSTS.values())
    ]
    table = {
        name: {
            COSTS[key] + UNITS.get(key, ""): {
                "DLGN / ReLU": spread(ratio[i, c]),
                "ReLU": spread(found[i, 0, c]),
                "DLGN": spread(found[i, 1, c]),
            }
            for c, key in enumerate(COSTS)
        }
        for i, name in enumerate(architectures)
    }
    return Artifact(
        "hs.cost",
        "What gates cost",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {"cost": table},
        SIZES["hs.cost"]["paper"],
        {},
        (TIMING,),
        {"ReLU": "hard", "DLGN": "soft β=4"},
        {"ratio": ratio.astype(np.float32)},
        figures=panels.cost(list(architectures), list(COSTS.values())),
    )
