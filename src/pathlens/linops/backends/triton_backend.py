"""One fused kernel for sums of products of Gram matrices on CUDA: every entry of a tile is written once.

Here alone an expression is multiplied out, to terms Σ_t c_t ∘_f X_f Y_fᵀ. A first kernel packs the columns of all
factors side by side into one matrix, rows scaled by powers of two; the second walks over blocks of its columns: a block
adds to the running Gram matrix, the end of a factor multiplies it into the running product, the end of a term adds that
to the result. A symmetric matrix takes the tiles of its upper triangle, each written twice. Needs Triton; with
``TRITON_INTERPRET=1`` it runs on the CPU, for tests. May import only linops.
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
from pathlens.linops.backends import Pool
from pathlens.linops.backends.torch_backend import Pair, gram_product, walk
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Side, Sum, strip

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
    registers: int | None = None  # most a thread may use; fewer let more tiles run at once


@dataclass(frozen=True)
class Precision:
    """How float32 factors enter the tensor cores.

    Attributes
    ----------
    dtype
        Of the packed columns.
    pieces
        1; 2 where a number is split into a high and a low part and three products are added; 3 where the number itself
        is packed too, and the left side is split in registers, which takes less shared memory.
    config
        Sizes for the kernel.
    rounding
        What a packed number is rounded to where its dtype could hold more.
    """

    dtype: torch.dtype
    pieces: int
    config: Config
    rounding: str = ""


#: tuned on an H200 (benchmarks/gpu.py)
PRECISIONS = {
    "triton": Precision(torch.float16, 2, Config(128, 128, 64, 8, 3, 16)),
    "triton-3xtf32": Precision(torch.float32, 3, Config(64, 64, 32, 4, 3, 16, 168), "tf32"),
    "triton-tf32": Precision(torch.float32, 1, Config(128, 128, 32, 8, 4, 16), "tf32"),
    # the interpreter multiplies no bfloat16: numbers rounded to it go in as float32
    "triton-bf16": Precision(
        torch.float32 if INTERPRETED else torch.bfloat16, 1, Config(128, 128, 64, 8, 4, 32), "bf16"
    ),
}
BITS = Precision(torch.float16 if INTERPRETED else torch.float8_e4m3fn, 1, Config(128, 128, 128, 8, 4, 32))


# --- the kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _rounded(x, to: tl.constexpr):
    """float32 numbers to the nearest that tf32 or bf16 can hold; others as they are."""
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
    """Rows of one Gram's columns, scaled and rounded, with what rounding left; zero where there are none."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = (i[:, None] < count) & (k[None, :] < width)
    at = i.to(tl.int64)
    x = tl.load(raw + at[:, None] * row_stride + k[None, :] * column_stride, mask=there, other=0).to(tl.float32)
    if SCALED:  # one power of two may leave float32, two halves do not
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
    """Tiles of the result; `left` and the like describe packed columns, and with three pieces `left` is whole."""
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
        end = 0 if ONE_BLOCK else tl.load(ends + at)  # asked for early, needed late
        a = left.load([row * ROWS, at * BLOCK])
        b = right.load([col * COLS, at * BLOCK])
        if PIECES > 1:
            # Tensor cores cut off what they add up, which over a long sum of positive numbers costs two digits: the
            # sum over a block starts from zero, and blocks are added in true float32.
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
    if isinstance(node, OperatorNode):
        raise Unsuited
    parts = [flatten(c, x, y) for c, x, y in zip(node.children(), left.parts, right.parts)]
    if isinstance(node, Scaled):
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


def _pack(terms: list[tuple[float, list[Factor]]], right: bool, precision: Precision, bits: bool, rows: int) -> Packed:
    block = precision.config.block
    factors = [[pair[right] for pair in factor] for _, own in terms for factor in own]
    count, device = len(factors[0][0]), factors[0][0].log_norm.device
    widths = [-(-sum(side.node.r for side in factor) // block) * block for factor in factors]  # type: ignore[attr-defined]
    columns = torch.empty(precision.pieces, rows, sum(widths), dtype=precision.dtype, device=device)
    coefficients = [c if right else 1.0 for c, _ in terms]
    powers, scales = None, None
    if not bits:
        powers, halves = _powers(factors)
    if not bits or any(c != 1.0 for c in coefficients):
        logs = torch.zeros(len(terms) + 1, rows, dtype=torch.float64, device=device)  # the kernel reads one term ahead
        if powers is not None:
            term_of = [t for t, (_, own) in enumerate(terms) for _ in own]
            logs[:, :count].index_add_(0, torch.tensor(term_of, device=device), powers)
        scales = torch.exp2(logs)
        if any(c != 1.0 for c in coefficients):
            scales *= torch.tensor([*coefficients, 1.0], device=device, dtype=torch.float64)[:, None]
        scales = scales.float()
    at, gram = 0, 0
    for factor, width in zip(factors, widths):
        end = at + width
        for side in factor:
            assert isinstance(side.node, Gram)
            upto = end if side is factor[-1] else at + side.node.r  # the last one fills the block with zeros
            raw = side.node.side_rows(right).take(side.index)
            _write(raw, None if bits else (halves[0][gram], halves[1][gram]), precision, columns[:, :, at:upto])
            at, gram = upto, gram + 1
    return Packed(columns, scales)


def _powers(factors: list[list[Side]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Powers of two that bring the rows of each factor to norms in [2^(lift − 1), 2^lift), all factors at once.

    Returns the exponents that the result must be given back, (factors, n), and what each Gram is multiplied with as two
    factors, (grams, n): one power of two may leave float32, two halves do not. A zero row stays as it is.
    """
    sides = [side for factor in factors for side in factor]
    norms = torch.stack([side.log_norm for side in sides])
    shifts = torch.stack([side.shift for side in sides])  # type: ignore[misc]
    if len(factors) < len(sides):
        own = torch.tensor([f for f, factor in enumerate(factors) for _ in factor], device=norms.device)
        squares = norms.new_zeros(len(factors), norms.shape[1]).index_add_(0, own, torch.exp2(2 * norms))
        norms = 0.5 * torch.log2(squares)
    powers = torch.where(torch.isfinite(norms), torch.floor(norms) + 1, 0.0)
    lifts = shifts + (_LIFT - (powers if len(factors) == len(sides) else powers[own]))
    half = torch.trunc(lifts / 2)
    return powers, (torch.exp2(half).float(), torch.exp2(lifts - half).float())


def _write(raw: Tensor, halves: tuple[Tensor, Tensor] | None, precision: Precision, out: Tensor) -> None:
    """Fill (pieces, rows, columns) with the scaled rows of `raw`, and with zeros where it has none."""
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
            if scaled
            else one
            for side in (left, right)
        ]
        tiles = _order(n, m, mirror, config, out.device)
        # where the left side is whole, it is the third piece; a low part that is not there is not read
        own, other = {1: ((0, 0), (0, 0)), 2: ((0, 1), (0, 1)), 3: ((2, 2), (0, 1))}[precision.pieces]
        a = [TensorDescriptor.from_tensor(left.columns[piece], [config.rows, block]) for piece in own]
        b = [TensorDescriptor.from_tensor(right.columns[piece], [config.cols, block]) for piece in other]
        _fused[(len(tiles),)](
            *a,
            *b,
            scales[0],
            scales[1],
            torch.tensor(ends, dtype=torch.int32, device=out.device),
            tiles,
            out,
            n,
            m,
            len(ends),
            out.stride(0),
            scales[0].stride(0),
            scales[1].stride(0),
            ROWS=config.rows,
            COLS=config.cols,
            BLOCK=block,
            PIECES=precision.pieces,
            ONE_TERM=len(terms) == 1,
            ONE_BLOCK=len(terms) == 1 and 0 not in ends,
            SCALED=scaled,
            MIRROR=mirror,
            UNIT=1.0 if bits else 2.0 ** (-2 * _LIFT),
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers,
        )


BACKENDS = {name: TritonBackend(name) for name in PRECISIONS}
