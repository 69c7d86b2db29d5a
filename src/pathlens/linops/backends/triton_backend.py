"""One fused kernel for sums of products of Gram matrices on CUDA: every entry of a tile is written once.

Here alone an expression is multiplied out, to terms Σ_t c_t ∘_f X_f Y_fᵀ. The columns of all factors are packed side by
side into one matrix, rows scaled by powers of two, and the kernel walks over blocks of its columns: a block adds to the
running Gram matrix, the end of a factor multiplies it into the running product, the end of a term adds that to the
result. A symmetric matrix takes the tiles of its upper triangle, each written twice. Needs Triton; with
``TRITON_INTERPRET=1`` it runs on the CPU, for tests. May import only linops.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from pathlens.linops.backends import Pool
from pathlens.linops.backends.torch_backend import Pair, gram_product, walk
from pathlens.linops.indexing import same_index
from pathlens.linops.nodes import Gram, Hadamard, Leaf, Node, Scale, Side, Sum, strip

_LIFT = 7  # rows are packed with norms up to 2^7, so that the low halves of fp16 pairs stay clear of subnormals
_MOST_TERMS = 64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Factor: TypeAlias = list[Pair]  # Gram nodes whose sum is one factor: their columns stand side by side


@dataclass(frozen=True)
class Config:
    """Sizes that one precision runs with; `benchmarks/gpu.py` measures them."""

    rows: int
    cols: int
    block: int
    warps: int
    stages: int
    group: int = 8


@dataclass(frozen=True)
class Precision:
    """How float32 factors enter the tensor cores.

    Attributes
    ----------
    dtype
        Of the packed columns.
    pieces
        1, or 2 where a number is split into a high and a low part and three products are added.
    config
        Sizes for the kernel.
    """

    name: str
    dtype: torch.dtype
    pieces: int
    config: Config


#: tuned on an H200 (benchmarks/gpu.py)
PRECISIONS = {
    "triton": Precision("3xfp16", torch.float16, 2, Config(64, 64, 64, 4, 3, 16)),
    "triton-3xtf32": Precision("3xtf32", torch.float32, 2, Config(128, 64, 32, 8, 3, 16)),
    "triton-tf32": Precision("tf32", torch.float32, 1, Config(128, 128, 32, 8, 4, 16)),
    # the interpreter multiplies no bfloat16: numbers rounded to it go in as float32
    "triton-bf16": Precision("bf16", torch.float32 if INTERPRETED else torch.bfloat16, 1,
                             Config(128, 128, 128, 8, 3, 16)),
}  # fmt: skip
BITS = Precision("bits", torch.float16 if INTERPRETED else torch.float8_e4m3fn, 1, Config(128, 128, 128, 8, 4, 32))


# --- the kernel --------------------------------------------------------------------------------------------------


@triton.jit
def _fused(
    left, right, left_scale, right_scale, ends, tiles, out,
    n, m, blocks, left_piece, right_piece, left_stride, right_stride, out_stride, scale_left_stride, scale_right_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, ONE_TERM: tl.constexpr,
    ONE_BLOCK: tl.constexpr, SCALED: tl.constexpr, MIRROR: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.load(tiles + 2 * tile)
    col = tl.load(tiles + 2 * tile + 1)
    i = row * ROWS + tl.arange(0, ROWS)
    j = col * COLS + tl.arange(0, COLS)
    k = tl.arange(0, BLOCK)
    a_at = left + i.to(tl.int64)[:, None] * left_stride + k[None, :]
    b_at = right + j.to(tl.int64)[:, None] * right_stride + k[None, :]
    if SCALED:
        product = tl.load(left_scale + i)[:, None] * tl.load(right_scale + j)[None, :]
    else:
        product = tl.full((ROWS, COLS), 1.0, tl.float32)
    gram = tl.zeros((ROWS, COLS), tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    term = 0
    for at in range(blocks):
        a = tl.load(a_at)
        b = tl.load(b_at)
        if PIECES == 2:
            # Tensor cores cut off what they add up, which over a long sum of positive numbers costs two digits: the
            # sum over a block starts from zero, and blocks are added in true float32.
            a_low = tl.load(a_at + left_piece)
            b_low = tl.load(b_at + right_piece)
            part = tl.dot(a, tl.trans(b_low), input_precision="tf32")
            part = tl.dot(a_low, tl.trans(b), part, input_precision="tf32")
            if ONE_BLOCK:
                gram = tl.dot(a, tl.trans(b), part, input_precision="tf32")
            else:
                gram += tl.dot(a, tl.trans(b), part, input_precision="tf32")
        elif ONE_BLOCK:
            gram = tl.dot(a, tl.trans(b), input_precision="tf32")
        else:
            gram = tl.dot(a, tl.trans(b), gram, input_precision="tf32")
        a_at += BLOCK
        b_at += BLOCK
        if ONE_BLOCK:
            product *= gram * UNIT
        else:
            end = tl.load(ends + at)
            if end == 1:
                product *= gram * UNIT
                gram = tl.zeros((ROWS, COLS), tl.float32)
            elif end == 2:
                if ONE_TERM:
                    product *= gram * UNIT
                else:
                    total += product * (gram * UNIT)
                    gram = tl.zeros((ROWS, COLS), tl.float32)
                    term += 1
                    if SCALED:
                        scale_i = tl.load(left_scale + term * scale_left_stride + i)
                        scale_j = tl.load(right_scale + term * scale_right_stride + j)
                        product = scale_i[:, None] * scale_j[None, :]
                    else:
                        product = tl.full((ROWS, COLS), 1.0, tl.float32)
    if ONE_TERM:
        total = product
    i_out = i.to(tl.int64)
    j_out = j.to(tl.int64)
    here = out + i_out[:, None] * out_stride + j_out[None, :]
    inside = (i[:, None] < n) & (j[None, :] < m)
    if MIRROR:
        there = out + j_out[:, None] * out_stride + i_out[None, :]
        flipped = (j[:, None] < m) & (i[None, :] < n)
        if col * COLS < (row + 1) * ROWS:
            # on the diagonal: rounding may tell (i, j) from (j, i), so both are written from one of them
            tl.store(here, total, mask=inside & (i[:, None] <= j[None, :]))
            tl.store(there, tl.trans(total), mask=flipped & (i[None, :] <= j[:, None]))
        else:
            tl.store(here, total, mask=inside)
            tl.store(there, tl.trans(total), mask=flipped)
    else:
        tl.store(here, total, mask=inside)


# --- preparing ---------------------------------------------------------------------------------------------------


class Unsuited(Exception):
    """The expression does not multiply out to a short sum of products of Gram matrices."""


def flatten(node: Node, left: Side, right: Side) -> list[tuple[float, list[Factor]]]:
    """Terms (c_t, factors) whose sum is the node."""
    node, left = strip(node, left)
    right = strip(right.node, right)[1]
    if isinstance(node, Gram):
        return [(1.0, [[(left, right)]])]
    if isinstance(node, Leaf):
        raise Unsuited
    parts = [flatten(c, x, y) for c, x, y in zip(node.children(), left.parts, right.parts)]
    if isinstance(node, Scale):
        return [(c * node.mantissa, factors) for c, factors in parts[0]]
    if isinstance(node, Sum):
        return [term for part in parts for term in part]
    assert isinstance(node, Hadamard)
    terms: list[tuple[float, list[Factor]]] = [(1.0, [])]
    for part in parts:
        if len(part) > 1 and all(c == 1.0 and len(factors) == 1 for c, factors in part):
            part = [(1.0, [[pair for _, factors in part for pair in factors[0]]])]  # a sum of Grams is one Gram
        if len(terms) * len(part) > _MOST_TERMS:
            raise Unsuited
        terms = [(c * d, [*factors, *more]) for c, factors in terms for d, more in part]
    return terms


def _countable(factor: Factor) -> bool:
    """Whether it is bits as they are, few enough that the tensor cores add them up exactly."""
    left, right = factor[0]
    bits = len(factor) == 1 and isinstance(left.node, Gram) and left.node.binary and left.node.r <= 8192
    return bits and left.unshifted and right.unshifted


def _width(factor: Factor) -> int:
    return sum(pair[0].node.r for pair in factor if isinstance(pair[0].node, Gram))


@dataclass
class Packed:
    """One side of all terms: columns (pieces, rows, width), and the scale of each term's rows (terms + 1, rows)."""

    columns: Tensor
    scales: Tensor | None


def _pack(
    terms: list[tuple[float, list[Factor]]], right: bool, precision: Precision, bits: bool, rows: int
) -> Packed:
    block = precision.config.block
    sides = [[[pair[right] for pair in factor] for factor in factors] for _, factors in terms]
    first = sides[0][0][0]
    count, device = len(first), first.log_norm.device
    width = sum(-(-_width(factor) // block) * block for _, factors in terms for factor in factors)
    columns = torch.zeros(precision.pieces, rows, width, dtype=precision.dtype, device=device)
    logs = torch.zeros(len(terms) + 1, rows, dtype=torch.float64, device=device)  # the kernel reads one term ahead
    at = 0
    for t, ((coefficient, factors), own) in enumerate(zip(terms, sides)):
        if right and coefficient != 1.0:
            logs[t] = math.log2(abs(coefficient)) if coefficient else -math.inf
        for factor, grams in zip(factors, own):
            end = at
            if not bits:  # norms in [2^(lift − 1), 2^lift); a zero row stays as it is
                square = torch.stack([torch.exp2(2 * side.log_norm) for side in grams]).sum(0)
                power = torch.where(square > 0, torch.floor(0.5 * torch.log2(square)) + 1, 0.0)
                logs[t, :count] += power
            for side in grams:
                assert isinstance(side.node, Gram) and side.shift is not None
                raw = side.node.side_rows(right).take(side.index)
                place = slice(end, end + side.node.r)
                if bits:
                    columns[0, :count, place] = raw
                else:
                    lift = side.shift + (_LIFT - power)
                    half = torch.trunc(lift / 2)  # one power of two may leave float32, two halves do not
                    unit = raw * torch.exp2(half).float()[:, None] * torch.exp2(lift - half).float()[:, None]
                    _split(unit.bfloat16().float() if precision.name == "bf16" else unit, columns[:, :count, place])
                end += side.node.r
            at += -(-_width(factor) // block) * block
    if bits and all(c == 1.0 for c, _ in terms):
        return Packed(columns, None)
    scales = torch.exp2(logs).float()
    if right:
        scales[:-1] *= torch.tensor([math.copysign(1.0, c) for c, _ in terms], device=device)[:, None]
    return Packed(columns, scales.contiguous())


def _split(value: Tensor, out: Tensor) -> None:
    """Write float32 numbers to (pieces, …): rounded, and the rest."""
    high = value
    if out.dtype == torch.float32:  # to the 10 bits of tf32, to nearest
        high = ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    out[0] = high
    if len(out) > 1:
        out[1] = value - out[0].float()


_TILES: dict[tuple[Any, ...], Tensor] = {}


def _order(n: int, m: int, upper: bool, config: Config, device: torch.device) -> Tensor:
    """Tiles in an order in which neighbours share rows and columns, (count, 2) int32."""
    key = (n, m, upper, config, device)
    if key not in _TILES:
        if len(_TILES) > 8:
            _TILES.clear()
        rows, cols, group = -(-n // config.rows), -(-m // config.cols), config.group
        i, j = torch.meshgrid(torch.arange(rows, device=device), torch.arange(cols, device=device), indexing="ij")
        pairs = torch.stack([i.flatten(), j.flatten()], 1)
        if upper:  # the last column of a tile at or beyond its first row
            pairs = pairs[(pairs[:, 1] + 1) * config.cols > pairs[:, 0] * config.rows]
        band = pairs[:, 0] // group
        rank = (band * cols + pairs[:, 1]) * group + pairs[:, 0] % group
        _TILES[key] = pairs[rank.argsort()].int().contiguous()
    return _TILES[key]


# --- the backend -------------------------------------------------------------------------------------------------


class TritonBackend:
    """The fused kernel, in one precision; 0/1 factors are counted exactly whatever the precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.precision = PRECISIONS[name]

    def exactly_symmetric(self, node: Node) -> bool:
        return False

    def writes_whole(self, node: Node) -> bool:
        return not any(isinstance(leaf, Leaf) for leaf in node.leaves())

    def gram_flops(self, gram: Gram) -> float:
        return (0.25 if gram.binary else 1.0) * gram.r

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        try:
            terms = flatten(node, left, right)
        except Unsuited:
            walk(node, left, right, out, pool, 0, gram_product)
            return
        mirror = node.symmetric and left.right == right.right and same_index(left.index, right.index)
        exact = all(_countable(factor) for _, factors in terms for factor in factors)
        self.launch(terms, BITS if exact else self.precision, out, mirror, exact)

    def launch(
        self, terms: list[tuple[float, list[Factor]]], precision: Precision, out: Tensor, mirror: bool, bits: bool
    ) -> None:
        """Pack both sides and run the kernel."""
        config = precision.config
        n, m = out.shape
        height, width = -(-n // config.rows), -(-m // config.cols)
        block = config.block
        left = _pack(terms, False, precision, bits, height * config.rows)
        reuse = mirror and height * config.rows == width * config.cols and all(c == 1.0 for c, _ in terms)
        right = left if reuse else _pack(terms, True, precision, bits, width * config.cols)
        ends: list[int] = []
        for _, factors in terms:
            for f, factor in enumerate(factors):
                ends += [0] * (-(-_width(factor) // block) - 1) + [2 if f == len(factors) - 1 else 1]
        scaled = left.scales is not None or right.scales is not None
        one = torch.ones(1, 1, device=out.device)
        scales = [
            (side.scales if side.scales is not None else one.expand(len(terms) + 1, side.columns.shape[1]).contiguous())
            if scaled else one
            for side in (left, right)
        ]  # fmt: skip
        tiles = _order(n, m, mirror, config, out.device)
        _fused[(len(tiles),)](
            left.columns, right.columns, scales[0], scales[1],
            torch.tensor(ends, dtype=torch.int32, device=out.device), tiles, out,
            n, m, len(ends), left.columns.stride(0), right.columns.stride(0), left.columns.stride(1),
            right.columns.stride(1), out.stride(0), scales[0].stride(0), scales[1].stride(0),
            ROWS=config.rows, COLS=config.cols, BLOCK=block, PIECES=precision.pieces, ONE_TERM=len(terms) == 1,
            ONE_BLOCK=len(terms) == 1 and 0 not in ends, SCALED=scaled, MIRROR=mirror,
            UNIT=1.0 if bits else 2.0 ** (-2 * _LIFT),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


BACKENDS = {name: TritonBackend(name) for name in PRECISIONS}
