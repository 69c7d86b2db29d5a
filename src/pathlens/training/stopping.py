"""Early stopping: each member of a stack keeps its best weights and stops on its own.

A member that has stopped is still computed with the others, but nothing of it is looked at any more, so that it ends
where it would have ended alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathlens.training.stack import Stack


class EarlyStopping:
    """The best validation loss of each member, its epoch and its weights."""

    def __init__(self, stack: Stack, patience: int) -> None:
        self.stack, self.patience = stack, patience
        self.best = torch.full((stack.k,), torch.inf, dtype=torch.float64)
        self.best_epoch = torch.zeros(stack.k, dtype=torch.long)
        self.stopped = torch.zeros(stack.k, dtype=torch.bool)
        self._kept = [t.clone() for t in self._live()]

    def _live(self) -> list[Tensor]:
        return [self.stack.flat, *self.stack.buffers.values()]

    def see(self, epoch: int, losses: Tensor) -> None:
        """Take in the validation losses (k,) of an epoch."""
        better = (losses < self.best) & ~self.stopped
        self.best[better] = losses[better]
        self.best_epoch[better] = epoch
        chosen = better.to(self.stack.device)
        for kept, live in zip(self._kept, self._live()):
            kept[chosen] = live[chosen]
        self.stopped |= epoch - self.best_epoch >= self.patience

    def put_back(self) -> None:
        """Give every member the weights of its best epoch."""
        for kept, live in zip(self._kept, self._live()):
            live.copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of this."""
        own = {"best": self.best, "best_epoch": self.best_epoch, "stopped": self.stopped}
        return {f"stopping/{k}": v for k, v in own.items()} | {f"kept/{i}": t for i, t in enumerate(self._kept)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        for name, own in (("best", self.best), ("best_epoch", self.best_epoch), ("stopped", self.stopped)):
            own.copy_(tensors[f"stopping/{name}"])
        for i, kept in enumerate(self._kept):
            kept.copy_(tensors[f"kept/{i}"])
