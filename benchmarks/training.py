"""Speed of training many networks at once, against the same networks one after another in a plain PyTorch loop.

Every line is a ratio of timings of one run on one machine. Run with ``python -m benchmarks.training [--device cuda]``;
it asserts nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import pathlens as pl
from pathlens.training.inputs import mse


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

    pl.train(net, data, epochs=8, lr=5e-4, batch_size=batch, seeds=range(members), device=device, progress=tick,
             evaluate="running", **options)  # fmt: skip
    return min(b - a for a, b in itertools.pairwise(ends)) / -(-n // batch)


def cases(device: str) -> list[tuple[str, nn.Module, Any, int, int, dict[str, Any], Any]]:
    """name, network, data, members, batch, options, loss."""
    circle = pl.data.circle(4096)
    found: list[tuple[str, nn.Module, Any, int, int, dict[str, Any], Any]] = [
        ("circle, ReLU 5×16", pl.models.relu(2), circle, 20, 32, {}, mse),
        ("circle, DLGN-PWC 5×16", pl.models.dlgn(2, piecewise_constant=True), circle, 20, 32, {}, mse),
    ]
    if device != "cpu":
        x, y = torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,))
        gconv = pl.gated_twin(pl.models.gconv(), "relu", x[:2])
        found.append(
            ("CIFAR shape, GCONV", gconv, (x, y), 5, 32, {"loss": "cross_entropy"}, nn.functional.cross_entropy)
        )
    return found


def main(device: str = "cpu") -> list[dict[str, Any]]:
    """Print and return one row per case."""
    rows = []
    for name, net, data, members, batch, options, loss in cases(device):
        x, y = data if isinstance(data, tuple) else (data.x, data.y)
        x, y = x.to(device), y.to(device)
        alone = plain_seconds_per_step(copy.deepcopy(net).to(device), x, y, batch, 100, loss)
        for compiled in (True, False):
            together = stacked_seconds_per_step(net, data, members, batch, device, compile=compiled, **options)
            rows.append({
                "case": name, "members": members, "captured": compiled, "device": device,
                "plain ms per step and network": 1e3 * alone,
                "stacked ms per step and network": 1e3 * together / members,
                "times faster per network": alone * members / together,
            })  # fmt: skip
            print(
                f"{name}: {members} networks at once{', captured step' if compiled else ''}: "
                f"{1e3 * together / members:.3f} ms a step and network, plain loop {1e3 * alone:.3f} ms: "
                f"{rows[-1]['times faster per network']:.1f}× faster per network",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
