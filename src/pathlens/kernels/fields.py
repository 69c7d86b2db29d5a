"""Fields: what a tensor of a value network with fixed gates is made of, and the kernels between them.

Every tensor is a sum of fields, one per weight layer, each masked by the gates it has passed since. Here is what masks,
maps of positions and convolution windows do to the kernel between position p of one example and q of another. How a
network is wired is `wiring`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pathlens.records import Convolution

_GATHER = 16  # with more entries in a row of a spatial map, a matrix product is faster than gathering


# --- spatial maps ----------------------------------------------------------------------------------------------


class SpatialMap:
    """A fixed linear map between positions, equal for all channels: pooling, padding, slicing; P → P′."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix  # (P′, P)
        most = int((matrix != 0).sum(1).max()) if matrix.numel() else 0
        self.selects = most <= 1
        width = max(most, 1)
        self.weight, self.index = matrix.abs().topk(width, dim=1)
        self.weight = matrix.gather(1, self.index)  # the sign is lost by abs
        self.dense = width > _GATHER

    def along(self, t: Tensor, axis: int) -> Tensor:
        """Apply to one axis of positions, −1 or −2."""
        if self.dense:
            return t @ self.matrix.T if axis == -1 else self.matrix @ t
        parts = None
        for k in range(self.index.shape[1]):
            weight = self.weight[:, k]
            part = t.index_select(axis, self.index[:, k]) * (weight if axis == -1 else weight[:, None])
            parts = part if parts is None else parts.add_(part)
        assert parts is not None
        return parts

    def along_diagonal(self, t: Tensor, count: bool) -> Tensor:
        """Apply to the diagonal p = q: squared weights, or, where paths are counted, one for each connection."""
        return t @ ((self.matrix != 0).to(t.dtype) if count else self.matrix.square()).T

    def mask(self, m: Tensor) -> Tensor:
        """A mask after this map, where it selects; weights, zero ones too, stay with the map."""
        return m[..., self.index[:, 0]]


# --- fields ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """Gates (or inputs) that multiply a field: (a, C, P) for rows, (b, C, P) for columns."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Term:
    """One field inside a tensor of the network.

    Attributes
    ----------
    key : tuple of str
        The weight layer that made it and the batch-norm scales passed since; fields of other keys share no path.
    channels : (C,)
        Which channel of that layer stands in each channel now, and which scales it met: fields of other numbers share
        no path. −1 where the field is absent.
    positions : int
        How many there were when the field was made.
    stages : tuple of Mask or SpatialMap
        What happened to it since, first to last.
    kernel : Callable
        Group of channels → kernel between positions, (a, b, P, P), or on their diagonal, (a, b, P); None is all ones.
    group : (C,), optional
        Group of each channel in the layer that made it; None where all channels have one kernel, that of group 0.
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
        """The field times a mask; a mask is moved past maps that only select, so that masks meet."""
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
        """The field behind one weight per channel, those of batch-norm."""
        width = len(self.channels)
        own = self.channels * width + torch.arange(width, device=self.channels.device)
        return replace(self, key=(*self.key, name), channels=torch.where(self.channels >= 0, own, -1))

    def mapped(self, spatial: SpatialMap | None, channels: Tensor | None) -> Term:
        """The field after a map of positions and channels; −1 in `channels` is a channel of zeros."""
        term = self
        if channels is not None:
            pick, present = channels.clamp(min=0), channels >= 0

            def move(m: Tensor) -> Tensor:
                return m[:, pick] * present[:, None]

            stages = tuple(Mask(move(s.left), move(s.right)) if isinstance(s, Mask) else s for s in self.stages)
            moved = torch.where(present, self.channels[pick], -1)
            term = replace(self, channels=moved, stages=stages, group=None if self.group is None else self.group[pick])
        return term if spatial is None else replace(term, stages=(*term.stages, spatial))


def _side(stages: Sequence[Mask | SpatialMap], right: bool) -> list[Tensor | SpatialMap]:
    return [(s.right if right else s.left) if isinstance(s, Mask) else s for s in stages]


class Sums:
    """Σ over channels of the kernel between two terms, for one block of pairs."""

    def __init__(self, a: int, b: int, diagonal: bool, count: bool) -> None:
        self.a, self.b, self.diagonal, self.count = a, b, diagonal, count

    def _expanded(self, kernel: Tensor | None, size: int, like: Tensor) -> Tensor:
        if kernel is not None:
            return kernel
        return like.new_ones(()).expand(self.a, self.b, *(size,) * (1 if self.diagonal else 2))

    def _apply(self, t: Tensor, stage: SpatialMap, right: bool) -> Tensor:
        if self.diagonal:  # both sides at once, when the left side comes by
            return t if right else stage.along_diagonal(t, self.count)
        return stage.along(t, -1 if right else -2)

    def pair(self, first: Term, second: Term, among: Tensor | None = None) -> Tensor | None:
        """Σ_c of the kernel of `first` at p and `second` at q: (a, b, P, P), or (a, b, P) on the diagonal.

        `among` are the channels c to sum over, (C,), if not all. None if there the terms share no channel.
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
            del part  # before the next one is made
        return total

    def _alike(self, first: Term, second: Term, kernel: Tensor | None, match: Tensor) -> Tensor:
        """The same over channels that have one kernel before their masks."""
        like = torch.zeros((), dtype=torch.float64, device=match.device)
        sides = _side(first.stages, False), _side(second.stages, True)
        masks = [[i for i, s in enumerate(side) if isinstance(s, Tensor)] for side in sides]
        total = self._expanded(kernel, first.positions, like)
        if max(len(m) for m in masks) > 1:
            return self._by_channel(total, sides, match)
        for right, side in enumerate(sides):
            end = masks[right][0] if masks[right] else 0
            for stage in side[:end]:
                assert isinstance(stage, SpatialMap)
                total = self._apply(total, stage, bool(right))
        total = total * self._gram(sides, masks, match, like)
        for right, side in enumerate(sides):
            start = masks[right][0] + 1 if masks[right] else 0
            for stage in side[start:]:
                assert isinstance(stage, SpatialMap)
                total = self._apply(total, stage, bool(right))
        return total

    def _gram(self, sides: Any, masks: list[list[int]], match: Tensor, like: Tensor) -> Tensor:
        """Σ_c of the product of both masks, over channels that match."""
        left: Any = sides[0][masks[0][0]] if masks[0] else None
        right: Any = sides[1][masks[1][0]] if masks[1] else None
        if left is None and right is None:
            return match.sum().to(like.dtype)
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
        # positions first: einsum leaves them last, where products of matrices are slow on a CPU
        first, second = (side.permute(2, 0, 1).contiguous() for side in (left, right))  # (P, rows, C)
        return (first @ second.mT).permute(1, 2, 0)

    def _by_channel(self, kernel: Tensor, sides: Any, match: Tensor) -> Tensor:
        """The same where a map that mixes positions stands between two masks: one channel after the other."""
        total: Tensor | None = None
        for c in match.nonzero()[:, 0].tolist():
            t = kernel
            if self.diagonal:
                for left, right in zip(*sides):
                    if isinstance(left, SpatialMap):
                        t = left.along_diagonal(t, self.count)
                    else:
                        t = t * left[:, None, c] * right[None, :, c]
            else:
                for right, side in enumerate(sides):
                    for stage in side:
                        if isinstance(stage, SpatialMap):
                            t = stage.along(t, -1 if right else -2)
                        else:
                            t = t * (stage[None, :, c, None, :] if right else stage[:, None, c, :, None])
            total = t if total is None else total + t
        assert total is not None
        return total


# --- convolutions ------------------------------------------------------------------------------------------------


def sum_windows(call: Convolution, t: Tensor, copies: int) -> Tensor:
    """Σ_k t(p·s + k·d, …) with the same offset k in each of one or two copies of the positions; zero padding."""
    t = F.pad(t, [v for pair in reversed(call.padding * copies) for v in pair])
    sizes = t.shape[-len(call.kernel) :]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, call.dilation, call.kernel, call.stride)]
    total: Tensor | None = None
    for offset in product(*(range(k) for k in call.kernel)):
        cut = [slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in zip(offset, call.dilation, out, call.stride)]
        index: Any = (..., *cut * copies)
        part = t[index]
        total = part.clone() if total is None else total.add_(part)
    assert total is not None
    return total
