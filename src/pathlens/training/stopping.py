"""Early stopping: each member of a stack keeps its best weights and stops on its own.

A stopped member is still computed with the others, but gets its best weights back after every epoch.
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

    def update(self, epoch: int, losses: Tensor) -> None:
        """Record the validation losses (k,) of an epoch."""
        better = (losses < self.best) & ~self.stopped
        self.best[better] = losses[better]
        self.best_epoch[better] = epoch
        chosen = better.to(self.stack.device)
        for kept, live in zip(self._kept, self._live()):
            kept[chosen] = live[chosen]
        self.stopped |= epoch - self.best_epoch >= self.patience
        self.restore_best(self.stopped)

    def restore_best(self, members: Tensor) -> None:
        """Give these members, a mask (k,), the weights of their best epoch."""
        chosen = members.to(self.stack.device)
        for kept, live in zip(self._kept, self._live()):
            live[chosen] = kept[chosen]

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        own = {"best": self.best, "best_epoch": self.best_epoch, "stopped": self.stopped}
        return {f"stopping/{k}": v for k, v in own.items()} | {f"kept/{i}": t for i, t in enumerate(self._kept)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for name, own in (("best", self.best), ("best_epoch", self.best_epoch), ("stopped", self.stopped)):
            own.copy_(tensors[f"stopping/{name}"])
        for i, kept in enumerate(self._kept):
            kept.copy_(tensors[f"kept/{i}"])
