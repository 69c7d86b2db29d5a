"""One fused kernel for sums of products of Gram matrices on CUDA: every entry of a tile is written once.

The expression is multiplied out to terms Σ_t c_t ∘_f X_f Y_fᵀ, and the columns of all factors are packed into one
matrix. Needs Triton; with ``TRITON_INTERPRET=1`` it runs on the CPU, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pathlens.indexing import same_index
from pathlens.linops.backends import Backend, Pool
from pathlens.linops.backends.torch_backend import Pair, gram_product, walk
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Side, Sum, strip

_LIFT = 7  # rows are packed with norms up to 2^7, so that the low parts of float16 pairs are not subnormal
_MOST_TERMS = 64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GramGroup: TypeAlias = list[Pair]  # Gram nodes whose sum is one factor of a term: their columns are adjacent
Term: TypeAlias = tuple[float, list[GramGroup]]  # coefficient and factors


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel for one precision, chosen by `benchmarks/gpu.py`."""

    rows: int
    cols: int
    block: int
    warps: int
    stages: int
    group: int = 8
    registers: int | None = None  # limit per thread; with fewer registers more tiles run at once


@dataclass(frozen=True)
class Precision:
    """Representation of float32 factors for the tensor cores.

    Attributes
    ----------
    dtype
        Of the packed columns.
    pieces
        1: the number. 2: its high and its low part, with three products. 3: both parts and the number itself; the left
        side is then split in registers, which takes less shared memory.
    config
        Sizes of the kernel.
    rounding
        "tf32" or "bf16": rounds the packed numbers to less than the precision of their dtype.
    bits
        For 0/1 factors, which are packed without scales.
    """

    dtype: torch.dtype
    pieces: int
    config: Config
    rounding: str = ""
    bits: bool = False


#: tuned on an H200 (benchmarks/gpu.py)
PRECISIONS = {
    "triton": Precision(torch.float16, 2, Config(128, 128, 64, 8, 3, 16)),
    "triton-3xtf32": Precision(torch.float32, 3, Config(64, 64, 32, 4, 3, 16, 168), "tf32"),
    "triton-tf32": Precision(torch.float32, 1, Config(128, 128, 32, 8, 4, 16), "tf32"),
    # the interpreter cannot multiply bfloat16: it gets float32 numbers rounded to bfloat16
    "triton-bf16": Precision(
        torch.float32 if INTERPRETED else torch.bfloat16, 1, Config(128, 128, 64, 8, 4, 32), "bf16"
    ),
}
BITS = Precision(torch.float16 if INTERPRETED else torch.float8_e4m3fn, 1, Config(128, 128, 128, 8, 4, 32), bits=True)


# --- the kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _rounded(x, to: tl.constexpr):
    """float32 numbers rounded to tf32 or bf16, or unchanged."""
    if to == "":
        return x
    bits = x.to(tl.int32, bitcast=True)
    if to == "tf32":
        bits = (bits + 0x1000) & -0x2000
    else:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pack_columns(
    raw,
    factor,
    again,
    out,
    count,
    width,
    rows,
    columns,
    row_stride,
    column_stride,
    out_stride,
    piece,
    PIECES: tl.constexpr,
    ROUNDING: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write the scaled and rounded rows of one factor, their rounding errors, and zeros as padding."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = (i[:, None] < count) & (k[None, :] < width)
    at = i.to(tl.int64)
    x = tl.load(raw + at[:, None] * row_stride + k[None, :] * column_stride, mask=there, other=0).to(tl.float32)
    if SCALED:  # a power of two may leave the range of float32, its two halves do not
        x = x * tl.load(factor + i, mask=i < count, other=0.0)[:, None]
        x = x * tl.load(again + i, mask=i < count, other=0.0)[:, None]
    to = out + at[:, None] * out_stride + k[None, :]
    inside = (i[:, None] < rows) & (k[None, :] < columns)
    high = _rounded(x, ROUNDING).to(out.dtype.element_ty)
    tl.store(to, high, mask=inside)
    if PIECES > 1:
        tl.store(to + piece, (x - high.to(tl.float32)).to(out.dtype.element_ty), mask=inside)
    if PIECES > 2:
        tl.store(to + 2 * piece, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fused(
    left,
    left_low,
    right,
    right_low,
    left_scale,
    right_scale,
    ends,
    tiles,
    out,
    n,
    m,
    blocks,
    out_stride,
    scale_left_stride,
    scale_right_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    ONE_TERM: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    MIRROR: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One tile of the result per program, in one pass over blocks of the packed columns.

    A block adds to the running Gram matrix, the end of a factor multiplies it into the running product, and the end of
    a term adds that to the result. For a symmetric matrix each tile of the upper triangle is written twice. `left`,
    `right` and their low parts describe packed columns; with three pieces `left` has the numbers themselves.
    """
    tile = tl.program_id(0)
    row = tl.load(tiles + 2 * tile)
    col = tl.load(tiles + 2 * tile + 1)
    i = row * ROWS + tl.arange(0, ROWS)
    j = col * COLS + tl.arange(0, COLS)
    if SCALED:
        product = tl.load(left_scale + i)[:, None] * tl.load(right_scale + j)[None, :]
    else:
        product = tl.full((ROWS, COLS), 1.0, tl.float32)
    gram = tl.zeros((ROWS, COLS), tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    term = 0
    for at in range(blocks):
        end = 0 if ONE_BLOCK else tl.load(ends + at)  # loaded early, needed late
        a = left.load([row * ROWS, at * BLOCK])
        b = right.load([col * COLS, at * BLOCK])
        if PIECES > 1:
            # Tensor cores truncate their sums, which loses two digits in a long sum of positive numbers: the sum over
            # a block starts from zero, and blocks are added in float32.
            b_low = right_low.load([col * COLS, at * BLOCK])
            if PIECES == 3:
                whole = a
                a = _rounded(whole, "tf32")
                a_low = whole - a
            else:
                a_low = left_low.load([row * ROWS, at * BLOCK])
            part = tl.dot(a_low, tl.trans(b), input_precision="tf32")
            part = tl.dot(a, tl.trans(b_low), part, input_precision="tf32")
            if ONE_BLOCK:
                gram = tl.dot(a, tl.trans(b), part, input_precision="tf32")
            else:
                gram += tl.dot(a, tl.trans(b), part, input_precision="tf32")
        elif ONE_BLOCK:
            gram = tl.dot(a, tl.trans(b), input_precision="tf32")
        else:
            gram = tl.dot(a, tl.trans(b), gram, input_precision="tf32")
        if ONE_BLOCK:
            product *= gram * UNIT
        elif end == 1:
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
            # on the diagonal: (i, j) and (j, i) may differ by rounding, so both are written from one of them
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


def flatten(node: Node, left: Side, right: Side) -> list[Term]:
    """Terms whose sum is the node; raises `Unsuited` if there would be too many."""
    node, left = strip(node, left)
    right = strip(right.node, right)[1]
    if isinstance(node, Gram):
        return [(1.0, [[(left, right)]])]
    if isinstance(node, OperatorNode):
        raise Unsuited
    parts = [flatten(c, x, y) for c, x, y in zip(node.children, left.parts, right.parts)]
    if isinstance(node, Scaled):
        return [(c * node.mantissa, factors) for c, factors in parts[0]]
    if isinstance(node, Sum):
        return [term for part in parts for term in part]
    assert isinstance(node, Hadamard)
    terms: list[Term] = [(1.0, [])]
    for part in parts:
        if len(part) > 1 and all(c == 1.0 and len(factors) == 1 for c, factors in part):
            part = [(1.0, [[pair for _, factors in part for pair in factors[0]]])]  # a sum of Grams is one Gram
        if len(terms) * len(part) > _MOST_TERMS:
            raise Unsuited
        terms = [(c * d, [*factors, *more]) for c, factors in terms for d, more in part]
    return terms


def _countable(group: GramGroup) -> bool:
    """Whether it is a 0/1 factor without scales, and narrow enough that the tensor cores sum it exactly."""
    left, right = group[0]
    binary = left.rows.binary and right.rows.binary and left.rows.r <= 8192
    return len(group) == 1 and binary and left.unshifted and right.unshifted


def _pack(terms: list[Term], right: bool, precision: Precision, rows: int, scaled: bool) -> tuple[Tensor, Tensor]:
    """One side of all terms: packed columns (pieces, rows, width), and scales of rows (terms + 1, rows) if scaled."""
    block = precision.config.block
    groups = [[pair[right] for pair in group] for _, own in terms for group in own]
    count, device = len(groups[0][0]), groups[0][0].log_norm.device
    widths = [-(-sum(side.rows.r for side in group) // block) * block for group in groups]
    columns = torch.empty(precision.pieces, rows, sum(widths), dtype=precision.dtype, device=device)
    powers, halves = (None, None) if precision.bits else _powers(groups)
    scales = torch.ones(1, 1, device=device)
    if scaled:
        logs = torch.zeros(len(terms) + 1, rows, dtype=torch.float64, device=device)  # the kernel reads one term ahead
        if powers is not None:
            term_of = [t for t, (_, own) in enumerate(terms) for _ in own]
            logs[:, :count].index_add_(0, torch.tensor(term_of, device=device), powers)
        coefficients = [c if right else 1.0 for c, _ in terms]
        scales = torch.exp2(logs) * torch.tensor([*coefficients, 1.0], device=device, dtype=torch.float64)[:, None]
    at, gram = 0, 0
    for group, width in zip(groups, widths):
        end = at + width
        for side in group:
            upto = end if side is group[-1] else at + side.rows.r  # the last one is padded with zeros to full blocks
            own = None if halves is None else (halves[0][gram], halves[1][gram])
            _write(side.rows.take(side.index), own, precision, columns[:, :, at:upto])
            at, gram = upto, gram + 1
    return columns, scales.float()


def _powers(groups: list[list[Side]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Powers of two that scale the rows of each group to norms in [2^(lift − 1), 2^lift), for all groups at once.

    Returns the exponents to restore in the result, (groups, n), and two factors to multiply each Gram by, (grams, n):
    one power of two may leave the range of float32, its two halves do not. Zero rows are not scaled.
    """
    sides = [side for group in groups for side in group]
    norms = torch.stack([side.log_norm for side in sides])
    shifts = torch.stack([side.shift for side in sides])  # type: ignore[misc]
    if len(groups) < len(sides):
        own = torch.tensor([g for g, group in enumerate(groups) for _ in group], device=norms.device)
        squares = norms.new_zeros(len(groups), norms.shape[1]).index_add_(0, own, torch.exp2(2 * norms))
        norms = 0.5 * torch.log2(squares)
    powers = torch.where(torch.isfinite(norms), torch.floor(norms) + 1, 0.0)
    lifts = shifts + (_LIFT - (powers if len(groups) == len(sides) else powers[own]))
    half = torch.trunc(lifts / 2)
    return powers, (torch.exp2(half).float(), torch.exp2(lifts - half).float())


def _write(raw: Tensor, halves: tuple[Tensor, Tensor] | None, precision: Precision, out: Tensor) -> None:
    """Fill (pieces, rows, columns) with the scaled rows of `raw`, padded with zeros."""
    raw = raw.view(torch.uint8) if raw.dtype == torch.bool else raw
    if raw.shape[1] == 1:  # Triton 3.6 compiles a single column of bytes wrongly
        raw = torch.nn.functional.pad(raw, (0, 1))
    _, rows, columns = out.shape
    tall, wide = 32, min(128, triton.next_power_of_2(columns))
    _pack_columns[(-(-rows // tall), -(-columns // wide))](
        raw,
        *(halves or (raw, raw)),
        out,
        len(raw),
        raw.shape[1],
        rows,
        columns,
        *raw.stride(),
        out.stride(1),
        out.stride(0),
        PIECES=precision.pieces,
        ROUNDING=precision.rounding,
        SCALED=halves is not None,
        ROWS=tall,
        COLS=wide,
    )


_TILES: dict[tuple[Any, ...], Tensor] = {}


def _order(n: int, m: int, upper: bool, config: Config, device: torch.device) -> Tensor:
    """Tiles in an order in which consecutive ones share rows or columns, (count, 2) int32."""
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


class TritonBackend(Backend):
    """The fused kernel, in one precision; 0/1 factors are counted exactly whatever the precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.precision = PRECISIONS[name]

    def writes_whole(self, node: Node) -> bool:
        return not any(isinstance(leaf, OperatorNode) for leaf in node.leaves())

    def gram_flops(self, gram: Gram) -> float:
        return (0.25 if gram.binary else 1.0) * gram.r

    def unit_tile(self, node: Node, left: Side, right: Side, out: Tensor, pool: Pool) -> None:
        try:
            terms = flatten(node, left, right)
        except Unsuited:
            walk(node, left, right, out, pool, 0, gram_product)
            return
        mirror = node.symmetric and left.right == right.right and same_index(left.index, right.index)
        exact = all(_countable(group) for _, groups in terms for group in groups)
        self.launch(terms, BITS if exact else self.precision, out, mirror)

    def launch(self, terms: list[Term], precision: Precision, out: Tensor, mirror: bool) -> None:
        """Pack both sides and run the kernel."""
        config, block = precision.config, precision.config.block
        n, m = out.shape
        height, width = -(-n // config.rows) * config.rows, -(-m // config.cols) * config.cols
        plain = all(c == 1.0 for c, _ in terms)
        scaled = not (plain and precision.bits)
        left, left_scales = _pack(terms, False, precision, height, scaled)
        right, right_scales = left, left_scales
        if not (mirror and plain and height == width):
            right, right_scales = _pack(terms, True, precision, width, scaled)
        ends: list[int] = []  # for each block of columns: 0 inside a factor, 1 at its end, 2 at the end of a term
        for _, groups in terms:
            for g, group in enumerate(groups):
                blocks = -(-sum(side.rows.r for side, _ in group) // block)
                ends += [0] * (blocks - 1) + [2 if g == len(groups) - 1 else 1]
        tiles = _order(n, m, mirror, config, out.device)
        # (left, its low part), (right, its low part): with one piece no low part is read
        own, other = {1: ((0, 0), (0, 0)), 2: ((0, 1), (0, 1)), 3: ((2, 2), (0, 1))}[precision.pieces]
        a = [TensorDescriptor.from_tensor(left[piece], [config.rows, block]) for piece in own]
        b = [TensorDescriptor.from_tensor(right[piece], [config.cols, block]) for piece in other]
        _fused[(len(tiles),)](
            *a,
            *b,
            left_scales,
            right_scales,
            torch.tensor(ends, dtype=torch.int32, device=out.device),
            tiles,
            out,
            n,
            m,
            len(ends),
            out.stride(0),
            left_scales.stride(0),
            right_scales.stride(0),
            ROWS=config.rows,
            COLS=config.cols,
            BLOCK=block,
            PIECES=precision.pieces,
            ONE_TERM=len(terms) == 1,
            ONE_BLOCK=len(terms) == 1 and 0 not in ends,
            SCALED=scaled,
            MIRROR=mirror,
            UNIT=1.0 if precision.bits else 2.0 ** (-2 * _LIFT),
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers,
        )


BACKENDS = {name: TritonBackend(name) for name in PRECISIONS}
