"""Fields of a value network with fixed gates, and the kernels between them.

Every tensor of the network is a sum of fields, one per weight layer, each multiplied by the gates after that layer. The
kernel between position p of one example and q of another follows the masks, maps of positions and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pathlens.records import Convolution

_GATHER = 16  # with more entries per row of a spatial map, a matrix product is faster than gathering


# --- spatial maps ----------------------------------------------------------------------------------------------


class SpatialMap:
    """A fixed linear map from P to P′ positions, equal for all channels: pooling, padding, slicing."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix  # (P′, P)
        most = int((matrix != 0).sum(1).max()) if matrix.numel() else 0
        self.selects = most <= 1
        width = max(most, 1)
        self.weight, self.index = matrix.abs().topk(width, dim=1)
        self.weight = matrix.gather(1, self.index)  # with signs
        self.dense = width > _GATHER

    def along(self, t: Tensor, axis: int) -> Tensor:
        """Apply to one axis of positions, −1 or −2."""
        if self.dense:
            return t @ self.matrix.T if axis == -1 else self.matrix @ t
        terms = (
            t.index_select(axis, index) * (weight if axis == -1 else weight[:, None])
            for index, weight in zip(self.index.T, self.weight.T)
        )
        return reduce(Tensor.add_, terms)

    def along_diagonal(self, t: Tensor, count: bool) -> Tensor:
        """Apply to the diagonal p = q: squared weights, or 1 for each connection if paths are counted."""
        return t @ ((self.matrix != 0).to(t.dtype) if count else self.matrix.square()).T

    def mask(self, m: Tensor) -> Tensor:
        """A mask after this map, if it selects positions; the weights of the map are not applied."""
        return m[..., self.index[:, 0]]


# --- fields ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """Gates (or inputs) that multiply a field: (a, C, P) of rows, (b, C, P) of columns."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Term:
    """One field of a tensor of the network.

    Attributes
    ----------
    key : tuple of str
        The weight layer of the field and the batch-norms after it; fields with different keys share no path.
    channels : (C,)
        For each channel, a number of the channel of that layer and of the batch-norms; channels with different numbers
        share no path. −1 if the field is absent in a channel.
    positions : int
        Positions of the output of that layer.
    stages : tuple of Mask or SpatialMap
        Operations after that layer, first to last.
    kernel : Callable
        Group of channels → kernel between positions, (a, b, P, P), or its diagonal, (a, b, P); None for ones.
    group : (C,), optional
        Group of each channel in that layer; None if all channels have the same kernel, that of group 0.
    factor : float
        A fixed number times the field.
    """

    key: tuple[str, ...]
    channels: Tensor
    positions: int
    stages: tuple[Mask | SpatialMap, ...]
    kernel: Callable[[int], Tensor | None]
    group: Tensor | None = None
    factor: float = 1.0

    def masked(self, mask: Mask) -> Term:
        """The field times a mask; masks are moved past maps that only select positions, and multiplied."""
        stages = self.stages
        if stages and isinstance(stages[-1], Mask):
            old = stages[-1]
            return replace(self, stages=(*stages[:-1], Mask(old.left * mask.left, old.right * mask.right)))
        if len(stages) > 1 and isinstance(stages[-1], SpatialMap) and stages[-1].selects:
            inner, last = stages[-2], stages[-1]
            if isinstance(inner, Mask):
                joint = Mask(last.mask(inner.left) * mask.left, last.mask(inner.right) * mask.right)
                return replace(self, stages=(*stages[:-2], last, joint))
        return replace(self, stages=(*stages, mask))

    def weighed(self, name: str) -> Term:
        """The field after a batch-norm, which has one weight per channel."""
        width = len(self.channels)
        own = self.channels * width + torch.arange(width, device=self.channels.device)
        return replace(self, key=(*self.key, name), channels=torch.where(self.channels >= 0, own, -1))

    def mapped(self, spatial: SpatialMap | None, channels: Tensor | None) -> Term:
        """The field after a map of positions and channels; −1 in `channels` means a channel of zeros."""
        term = self
        if channels is not None:
            pick, present = channels.clamp(min=0), channels >= 0

            def move(m: Tensor) -> Tensor:
                return m[:, pick] * present[:, None]

            stages = tuple(Mask(move(s.left), move(s.right)) if isinstance(s, Mask) else s for s in self.stages)
            moved = torch.where(present, self.channels[pick], -1)
            term = replace(self, channels=moved, stages=stages, group=None if self.group is None else self.group[pick])
        return term if spatial is None else replace(term, stages=(*term.stages, spatial))


class Sums:
    """Σ over channels of the kernel between two terms, for one block of pairs."""

    def __init__(self, a: int, b: int, diagonal: bool, count: bool) -> None:
        self.a, self.b, self.diagonal, self.count = a, b, diagonal, count

    def _apply(self, t: Tensor, stages: Sequence[Any], right: bool) -> Tensor:
        """Apply maps of one side; on the diagonal the maps of the left side apply to both."""
        for stage in stages:
            if not self.diagonal:
                t = stage.along(t, -1 if right else -2)
            elif not right:
                t = stage.along_diagonal(t, self.count)
        return t

    def pair(self, first: Term, second: Term, among: Tensor | None = None) -> Tensor | None:
        """Σ_c of the kernel of `first` at p and `second` at q: (a, b, P, P), or (a, b, P) on the diagonal.

        `among` (C,) are the channels c of the sum, by default all. None if the terms share none of these channels.
        """
        match = (first.channels == second.channels) & (first.channels >= 0)
        if among is not None:
            match = match & among
        if not bool(match.any()):
            return None
        if first.group is None:
            return self._alike(first, second, first.kernel(0), match)
        total: Tensor | None = None
        group = first.group
        for g in group[match].unique().tolist():
            part = self._alike(first, second, first.kernel(g), match & (group == g))
            total = part if total is None else total.add_(part)
            del part  # before the next one is computed
        return total

    def _alike(self, first: Term, second: Term, kernel: Tensor | None, match: Tensor) -> Tensor:
        """`pair` for channels that have the same kernel before their masks."""
        lefts = [s.left if isinstance(s, Mask) else s for s in first.stages]
        rights = [s.right if isinstance(s, Mask) else s for s in second.stages]
        if kernel is None:
            one = torch.ones((), dtype=torch.float64, device=match.device)
            kernel = one.expand(self.a, self.b, *(first.positions,) * (1 if self.diagonal else 2))
        left_at, right_at = ([i for i, s in enumerate(side) if isinstance(s, Tensor)] for side in (lefts, rights))
        if max(len(left_at), len(right_at)) > 1:
            return self._by_channel(kernel, (lefts, rights), match)
        # at most one mask on each side: maps before it, the sum over channels, maps after it
        i, j = left_at[0] if left_at else -1, right_at[0] if right_at else -1
        total = self._apply(self._apply(kernel, lefts[: max(i, 0)], False), rights[: max(j, 0)], True)
        total = total * self._gram(lefts[i] if left_at else None, rights[j] if right_at else None, match)
        return self._apply(self._apply(total, lefts[i + 1 :], False), rights[j + 1 :], True)

    def _gram(self, left: Any, right: Any, match: Tensor) -> Tensor:
        """Σ_c of the product of both masks, over channels that match."""
        if left is None and right is None:
            return match.sum().double()
        if right is None:
            summed = left[:, match].sum(1)  # (a, P)
            return summed[:, None, :] if self.diagonal else summed[:, None, :, None]
        if left is None:
            summed = right[:, match].sum(1)
            return summed[None, :, :] if self.diagonal else summed[None, :, None, :]
        if not bool(match.all()):
            left, right = left[:, match], right[:, match]
        if not self.diagonal:
            return torch.einsum("acp,bcq->abpq", left, right)
        if min(self.a, self.b) == 1:
            return (left * right).sum(1).reshape(self.a, self.b, -1)
        # positions first: einsum would have them last, which is slow on a CPU
        first, second = (side.permute(2, 0, 1).contiguous() for side in (left, right))  # (P, rows, C)
        return (first @ second.mT).permute(1, 2, 0)

    def _by_channel(self, kernel: Tensor, sides: Any, match: Tensor) -> Tensor:
        """`_alike` if maps that mix positions are between two masks: one channel after the other."""

        def one(c: int) -> Tensor:
            t = kernel
            if self.diagonal:
                for left, right in zip(*sides):
                    if isinstance(left, SpatialMap):
                        t = left.along_diagonal(t, self.count)
                    else:
                        t = t * left[:, None, c] * right[None, :, c]
                return t
            for right, side in enumerate(sides):
                for stage in side:
                    if isinstance(stage, SpatialMap):
                        t = stage.along(t, -1 if right else -2)
                    else:
                        t = t * (stage[None, :, c, None, :] if right else stage[:, None, c, :, None])
            return t

        return reduce(torch.add, (one(c) for c in match.nonzero()[:, 0].tolist()))


# --- convolutions ------------------------------------------------------------------------------------------------


def sum_windows(call: Convolution, t: Tensor, copies: int) -> Tensor:
    """Σ_k t(p·s + k·d, …) with the same offset k in each of one or two copies of the positions; zero padding."""
    t = F.pad(t, [v for pair in reversed(call.padding * copies) for v in pair])
    sizes = t.shape[-len(call.kernel) :]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, call.dilation, call.kernel, call.stride)]

    def window(offset: tuple[int, ...]) -> Tensor:
        cut = [slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in zip(offset, call.dilation, out, call.stride)]
        index: Any = (..., *cut * copies)
        return t[index]

    first, *offsets = product(*(range(k) for k in call.kernel))
    return reduce(Tensor.add_, map(window, offsets), window(first).clone())
