"""What a DLGN costs beside its ReLU network: a check that the summary asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.half_space.residual import NETWORKS
from pathlens.papers.image_runs import spread
from pathlens.papers.panels import Panel, Series

if TYPE_CHECKING:
    from torch import Tensor

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
    ours="plain PyTorch steps (forward, backward, Adam) of one batch in float32, the fastest of several; processor "
    "seconds on a CPU; memory is that of the tensors that autograd keeps",
    why="neither compilation nor a busy machine should decide the comparison",
)
_TWICE = Claim(
    "a DLGN costs about twice as much as the ReLU network",
    at_most=0.5,
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

    size = run.sizes
    found: dict[str, tuple[Any, tuple[int, ...]]] = {
        f"five dense layers of {size['dense_width']}": (
            models.mlp(784, (size["dense_width"],) * 5, 10, bias=True),
            (784,),
        )
    }
    found |= {
        f"five convolutions of {w}": (models.conv5(10, filters=w, bias=True), (3, 32, 32)) for w in size["filters"]
    }
    found |= {NETWORKS[name]: (getattr(models, name)(10), (3, 32, 32)) for name in size["residual"]}
    return found


@experiment(
    "hs.cost",
    title="What gates cost",
    what="time, memory, operations and parameters of a DLGN against its ReLU network",
    claims=[_TWICE],
    deviations=[TIMING],
    sizes={
        "dense_width": 128,
        "filters": ([26], [26, 128]),
        "residual": ([], ["resnet34"]),
        "batch": (64, 128),
        "steps": (5, 20),
    },
    choices={"residual": ["resnet110"]},
    seeds=(3, 5),
    minutes=(0.5, 2),
    flops=5e13,
)
def cost(run: Run) -> Artifact:
    """Training step, inference, memory, operations and parameters, as ratios to ReLU."""
    import torch

    from pathlens.models import gated_twin

    size = run.sizes
    architectures = _architectures(run)
    found = np.empty((len(architectures), 2, len(COSTS), len(run.seeds)))
    for i, (name, (template, shape)) in enumerate(architectures.items()):
        for j, seed in enumerate(run.seeds):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(size["batch"], *shape, generator=generator).to(run.device)
            y = torch.randint(10, (size["batch"],), generator=generator).to(run.device)
            for k, kind in enumerate(("relu", "dlgn")):
                net = gated_twin(template, kind, example=torch.zeros(2, *shape), seed=seed).to(run.device)
                measured = costs(net, x, y, size["steps"])
                found[i, k, :, j] = [measured[key] for key in COSTS]
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
    panels = [
        Panel(
            "strips",
            name[:1].upper() + name[1:],
            [Series(f"ratio[{i}, {c}]", what) for c, what in enumerate(COSTS.values())],
            x_label="DLGN / ReLU",
            marks=[(2.0, "twice")],
        )
        for i, name in enumerate(architectures)
    ]
    return run.artifact(
        claims=claims,
        metrics={"cost": table},
        gates={"ReLU": "hard", "DLGN": "soft β=4"},
        arrays={"ratio": ratio.astype(np.float32)},
        panels=panels,
    )
