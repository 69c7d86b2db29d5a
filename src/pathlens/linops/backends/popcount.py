"""Overlap counts of 0/1 factors by AND and popcount on packed bits, all factors of a product in one pass.

Other factors are multiplied by torch. Needs numba (extra ``fast``), which caches the compiled code next to this file or
in the user's cache folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic
from torch import Tensor

from pathlens.linops.backends import Backend, Pool
from pathlens.linops.backends.torch_backend import Pair, Scratch, gram_product, multiply_gram, walk
from pathlens.linops.nodes import Gram, Hadamard, Node, Side

_STRIP = 1024  # columns that are computed together: their words are adjacent and stay in the cache for all rows
_THREAD_WORK = 1 << 22  # pairs × words; with fewer, starting a second thread does not pay off


def _compile(function: Callable[..., None]) -> Any:
    try:
        return numba.njit(function, nogil=True, cache=True)
    except RuntimeError:  # no folder for the cache can be written: compile in every process
        return numba.njit(function, nogil=True)


@intrinsic
def _count_ones(typing_context: Any, word: Any) -> Any:
    """Number of one-bits of an unsigned word, by a vector instruction if the processor has one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return word(word), generate


_ones: Any = _count_ones  # called with one argument: numba supplies the typing context


def _multiply_counts(
    rows: Any, cols: Any, starts: Any, row_scale: Any, col_scale: Any, out: Any, stride: int, low: int, high: int
) -> None:
    """out[i·stride + j] = row_scale_i · col_scale_j · ∏_f popcount(rows_i,f & cols_f,j) for rows low ≤ i < high.

    rows (b, W) and cols (strips, W, width of a strip) hold the words of all factors; factor f owns words starts_f …
    starts_{f+1}−1.
    """
    number = out.dtype.type  # float32 times int32 would be computed in float64
    count = np.empty(cols.shape[2], np.uint32)
    for strip in range(cols.shape[0]):
        words = cols[strip]
        j0 = strip * cols.shape[2]
        scale = col_scale[j0 : j0 + cols.shape[2]]
        size = scale.shape[0]
        for i in range(low, high):
            value = out[i * stride + j0 : i * stride + j0 + size]
            for j in range(size):
                value[j] = row_scale[i] * scale[j]
            f = 0
            while f < starts.shape[0] - 1:
                w, stop = starts[f], starts[f + 1]
                f += 1
                # Counts of the usual widths (32, 64, 128) stay in registers; two layers of 128 are done in one pass.
                if stop - w == 4 and f < starts.shape[0] - 1 and starts[f + 1] - stop == 4:
                    a0, a1, a2, a3 = rows[i, w], rows[i, w + 1], rows[i, w + 2], rows[i, w + 3]
                    a4, a5, a6, a7 = rows[i, w + 4], rows[i, w + 5], rows[i, w + 6], rows[i, w + 7]
                    b0, b1, b2, b3 = words[w], words[w + 1], words[w + 2], words[w + 3]
                    b4, b5, b6, b7 = words[w + 4], words[w + 5], words[w + 6], words[w + 7]
                    for j in range(size):
                        first = _ones(a0 & b0[j]) + _ones(a1 & b1[j]) + _ones(a2 & b2[j]) + _ones(a3 & b3[j])
                        second = _ones(a4 & b4[j]) + _ones(a5 & b5[j]) + _ones(a6 & b6[j]) + _ones(a7 & b7[j])
                        value[j] *= number(np.int32(first)) * number(np.int32(second))
                    f += 1
                elif stop - w == 1:
                    a0, b0 = rows[i, w], words[w]
                    for j in range(size):
                        value[j] *= number(np.int32(_ones(a0 & b0[j])))
                elif stop - w == 2:
                    a0, a1, b0, b1 = rows[i, w], rows[i, w + 1], words[w], words[w + 1]
                    for j in range(size):
                        value[j] *= number(np.int32(_ones(a0 & b0[j]) + _ones(a1 & b1[j])))
                elif stop - w == 4:
                    a0, a1, a2, a3 = rows[i, w], rows[i, w + 1], rows[i, w + 2], rows[i, w + 3]
                    b0, b1, b2, b3 = words[w], words[w + 1], words[w + 2], words[w + 3]
                    for j in range(size):
                        value[j] *= number(
                            np.int32(_ones(a0 & b0[j]) + _ones(a1 & b1[j]) + _ones(a2 & b2[j]) + _ones(a3 & b3[j]))
                        )
                else:
                    for j in range(size):
                        count[j] = np.uint32(0)
                    while w + 4 <= stop:
                        a0, a1, a2, a3 = rows[i, w], rows[i, w + 1], rows[i, w + 2], rows[i, w + 3]
                        b0, b1, b2, b3 = words[w], words[w + 1], words[w + 2], words[w + 3]
                        for j in range(size):
                            count[j] += _ones(a0 & b0[j]) + _ones(a1 & b1[j]) + _ones(a2 & b2[j]) + _ones(a3 & b3[j])
                        w += 4
                    while w < stop:
                        a0, b0 = rows[i, w], words[w]
                        for j in range(size):
                            count[j] += _ones(a0 & b0[j])
                        w += 1
                    for j in range(size):
                        value[j] *= number(np.int32(count[j]))


_kernel = _compile(_multiply_counts)


def _words(sides: Sequence[Side]) -> np.ndarray:
    parts = [side.rows.bits(side.index) for side in sides]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _strips(words: np.ndarray) -> np.ndarray:
    """Words of m columns, (m, W), as (strips, W, width), the last strip padded with zeros."""
    m, total = words.shape
    width = min(m, _STRIP)
    strips = -(-m // width)
    padded = np.zeros((strips * width, total), np.uint32)
    padded[:m] = words
    return np.ascontiguousarray(padded.reshape(strips, width, total).transpose(0, 2, 1))


def _scale(sides: Sequence[Side]) -> Tensor:
    """Σ of the shifts: log₂ of the ratio between a row's unit product and its product of counts."""
    return torch.stack([side.shift for side in sides if side.shift is not None]).sum(0)


def count_product(pairs: Sequence[Pair], out: Tensor) -> bool:
    """Write ∘_f X_f Y_fᵀ of 0/1 factors to ``out``; False if the scales leave the range of the dtype."""
    lefts, rights = [x for x, _ in pairs], [y for _, y in pairs]
    row_log, col_log = _scale(lefts), _scale(rights)
    # Scales are multiplied by counts: the scales must not underflow, and the products must not overflow.
    reach = 100.0 if out.dtype == torch.float32 else 900.0
    ranks = [left.rows.r for left in lefts]
    counts = sum(math.log2(r) for r in ranks)
    low, high = float(row_log.min() + col_log.min()), float(row_log.max() + col_log.max())
    if low < -reach or high + counts > reach:
        return False
    words, columns = _words(lefts), _strips(_words(rights))
    starts = np.concatenate([[0], np.cumsum([-(-r // 32) for r in ranks])])
    row_scale, col_scale = (torch.exp2(log).to(out.dtype).numpy() for log in (row_log, col_log))
    n, m = out.shape
    stride = out.stride(0) if n > 1 else m
    flat = out.as_strided(((n - 1) * stride + m,), (1,)).numpy()

    def run(lo: int, hi: int) -> None:
        _kernel(words, columns, starts, row_scale, col_scale, flat, stride, lo, hi)

    workers = min(torch.get_num_threads(), n)
    if workers == 1 or n * m * words.shape[1] < _THREAD_WORK:
        run(0, n)
    else:
        # Python threads: numba's default threading layer aborts the process if two threads use it at once.
        cuts = [n * k // workers for k in range(workers + 1)]
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(run, cuts[:-1], cuts[1:]))
    return True


def _grams(pairs: Sequence[Pair], out: Tensor, scratch: Scratch, add: bool) -> None:
    binary = [pair for pair in pairs if pair[0].rows.binary and pair[1].rows.binary]
    product = scratch(0) if add else out
    if binary and count_product(binary, product):
        for pair in pairs:
            if pair not in binary:
                multiply_gram(pair, product, lambda: scratch(1 if add else 0))
        if add:
            out.add_(product)
    else:
        gram_product(pairs, out, scratch, add)


class PopcountBackend(Backend):
    """Popcounts for 0/1 factors, matrix products for others."""

    name = "popcount"

    def exactly_symmetric(self, node: Node) -> bool:
        return all(isinstance(leaf, Gram) and leaf.binary for leaf in node.leaves())

    def writes_whole(self, node: Node) -> bool:
        return isinstance(node, (Gram, Hadamard)) and self.exactly_symmetric(node)

    def gram_flops(self, gram: Gram) -> float:
        return 0.25 * gram.r if gram.binary else 2.0 * gram.r  # measured: a tile of bits costs about an eighth

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        walk(node, left, right, out, pool, 0, _grams)


BACKENDS = {"popcount": PopcountBackend()}
