"""Speed of training many networks at once, against the same networks one after another in a plain PyTorch loop.

Every line is a ratio of timings of one run on one machine. Run with ``python -m benchmarks.training [--device cuda]
[--json FILE]``; it asserts nothing. On a GPU, convolutional networks are also timed in the other ways that there are,
which is how the one in use was chosen.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import machine
from torch import nn

import pathlens as pl
from pathlens.training import Execution, Keep
from pathlens.training.inputs import mse
from pathlens.training.steps import StepRunner


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def plain_seconds_per_step(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int, steps: int, loss: Any
) -> float:
    """Eager PyTorch, one network: the loop that most people write."""
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-4)

    def go(count: int) -> None:
        for _ in range(count):
            index = torch.randint(0, len(x), (batch,), device=x.device)
            optimiser.zero_grad()
            loss(net(x[index]), y[index]).backward()
            optimiser.step()

    best = float("inf")
    for threads in {1, torch.get_num_threads()}:  # one thread is often faster for small networks: take the better
        with torch_threads(threads):
            go(10)
            for _ in range(3):
                _wait(x)
                start = time.perf_counter()
                go(steps)
                _wait(x)
                best = min(best, (time.perf_counter() - start) / steps)
    return best


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def stacked_seconds_per_step(net: nn.Module, data: Any, members: int, batch: int, device: str, **options: Any) -> float:
    """`pathlens.train`, all members at once: the fastest epoch, so that what happens once is left out."""
    n = len(data[0]) if isinstance(data, tuple) else len(data.x)
    ends: list[float] = []

    def tick(*_: Any) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    pl.train(
        net,
        data,
        epochs=8,
        lr=5e-4,
        batch_size=batch,
        seeds=range(members),
        device=device,
        progress=tick,
        keep=Keep(evaluate="running"),
        **options,
    )
    return min(b - a for a, b in itertools.pairwise(ends)) / -(-n // batch)


def cases(device: str) -> list[tuple[str, nn.Module, Any, int, int, dict[str, Any], Any]]:
    """name, network, data, members, batch, options, loss."""
    circle = pl.data.circle(4096)
    found: list[tuple[str, nn.Module, Any, int, int, dict[str, Any], Any]] = [
        ("circle, ReLU 5×16", pl.models.relu(2), circle, 20, 32, {}, mse),
        ("circle, DLGN-PWC 5×16", pl.models.dlgn(2, piecewise_constant=True), circle, 20, 32, {}, mse),
    ]
    if device != "cpu":
        x, y = torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
        for kind, title in (("relu", "GCONV"), ("dnpfl", "GCONV, learned gates (DNPFL)")):
            net = pl.gated_twin(pl.models.gconv(bias=True), kind, x[:2])
            options = {"loss": "cross_entropy", "execution": Execution(autocast=torch.bfloat16)}
            found.append((f"CIFAR shape, {title}", net, (x, y), 5, 32, options, nn.functional.cross_entropy))
    return found


@contextmanager
def batched_convolutions() -> Iterator[None]:
    """The step batched over members by vmap, which makes one grouped convolution of theirs, as for dense networks."""
    one_by_one = StepRunner._compiled_one_by_one
    StepRunner._compiled_one_by_one = StepRunner._compiled  # type: ignore[method-assign]
    yield
    StepRunner._compiled_one_by_one = one_by_one  # type: ignore[method-assign]


def main(device: str = "cpu", file: str | None = None) -> list[dict[str, Any]]:
    """Print and return one row per case and way."""
    rows = []
    for name, net, data, members, batch, options, loss in cases(device):
        x, y = data if isinstance(data, tuple) else (data.x, data.y)
        x, y = x.to(device), y.to(device)
        alone = plain_seconds_per_step(copy.deepcopy(net).to(device), x, y, batch, 100, loss)
        convolutional = x.ndim == 4
        ways: list[tuple[str, dict[str, Any], Any]] = [("captured step", {}, nullcontext)]
        if convolutional:
            ways[0] = ("captured step of one, on a stream each, bfloat16", {}, nullcontext)
            ways.append(("the same in float32", {"execution": Execution()}, nullcontext))
            ways.append(("captured step, grouped convolutions, bfloat16", {}, batched_convolutions))
        uncaptured = replace(options.get("execution", Execution()), compile=False)
        ways.append(("vmap, not captured", {"execution": uncaptured}, nullcontext))
        for way, more, setting in ways:
            with setting():
                together = stacked_seconds_per_step(net, data, members, batch, device, **{**options, **more})
            rows.append(
                {
                    "case": name,
                    "members": members,
                    "batch": batch,
                    "way": way,
                    "device": device,
                    "plain ms per step and network": 1e3 * alone,
                    "stacked ms per step and network": 1e3 * together / members,
                    "times faster per network": alone * members / together,
                }
            )
            print(
                f"{name}: {members} networks at once, {way}: {1e3 * together / members:.3f} ms a step and network, "
                f"plain loop {1e3 * alone:.3f} ms: {rows[-1]['times faster per network']:.1f}× faster per network",
                flush=True,
            )
    if file is not None:
        found = {"machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": rows}
        Path(file).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", default=None)
    chosen = parser.parse_args()
    main(chosen.device, chosen.json)
