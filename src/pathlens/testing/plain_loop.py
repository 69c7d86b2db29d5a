"""The reference of `pathlens.train`: one network, one batch after another, autograd and torch.optim.

It shares with the fast loop only the rule that derives generators from seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.training.members import derive_seed


def train_plainly(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    batch_size: int | None,
    seed: int,
    clip: float | None = None,
    rate: Callable[[float], float] = lambda progress: 1.0,
    rows: bool = False,
    **options: Any,
) -> None:
    """Train `net` in place for a number of steps; `rate` scales the learning rate, `rows` also passes row numbers."""
    n = len(x)
    batch = batch_size or n
    shuffle = torch.Generator().manual_seed(derive_seed(seed, "shuffle"))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimiser = optimizer(trained, **options)
    net.train()
    order = torch.arange(n)
    per_epoch = math.ceil(n / batch)
    for step in range(steps):
        at = step % per_epoch
        if at == 0 and batch < n:
            order = torch.randperm(n, generator=shuffle)
        index = order[at * batch : (at + 1) * batch]
        for group in optimiser.param_groups:
            group["lr"] = options["lr"] * rate(step / steps)
        optimiser.zero_grad()
        loss(net(x[index], index) if rows else net(x[index]), y[index]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimiser.step()
