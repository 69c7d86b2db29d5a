"""The contract that every backend keeps for every kind of node: agreement with the dense float64 twin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pathlens.linops import CustomKernel, Factor, GramSum, KernelOperator, RowStream, evaluate
from pathlens.testing.dense import dense_gram_sum, self_kernels
from pathlens.testing.tolerance import TOLERANCE, assert_kernel_close

BACKENDS = ["torch", "popcount"]
#: the fused kernel runs on a GPU where there is one, else interpreted, which is slow: float32 and two shapes
FUSED_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED_SHAPES: list[tuple[int, int | None]] = [(70, None), (37, 29)]
SHAPES = [(1, None), (37, None), (70, None), (1, 5), (37, 29), (70, 41)]  # m None: symmetric
KINDS = ["gram", "hadamard", "sum", "scale", "select", "nested", "gates", "mixed", "streamed", "custom", "bias", "wide"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32: 37 and 70 rows then make several tiles, the last ones ragged."""
    monkeypatch.setattr(evaluate, "TILE_EDGE", 32)


@dataclass
class Case:
    """An operator, its dense twin, and the scales of its rows and columns."""

    kernel: KernelOperator
    dense: Tensor
    rows: Tensor
    cols: Tensor


class Maker:
    """Draws factors and builds the same kernel lazily and densely."""

    def __init__(self, n: int, m: int | None, dtype: torch.dtype, backend: str) -> None:
        self.n, self.m, self.dtype, self.backend = n, m, dtype, backend
        self.device = FUSED_ON if backend.startswith("triton") else torch.device("cpu")
        self.generator = torch.Generator().manual_seed(n + 100 * (m or 0))

    def pair(self, r: int, binary: bool = False) -> tuple[Tensor, Tensor]:
        def draw(size: int) -> Tensor:
            if binary:
                return torch.rand(size, r, generator=self.generator) > 0.4
            return torch.randn(size, r, generator=self.generator, dtype=torch.float64).to(self.dtype)

        left = draw(self.n)
        return (left, left) if self.m is None else (left, draw(self.m))

    def lazy(self, terms: list[list[tuple[Tensor, Tensor]]]) -> GramSum:
        moved = {id(side): side.to(self.device) for term in terms for pair in term for side in pair}
        named = [
            [Factor(f"f{t}.{f}", moved[id(x)], moved[id(y)]) for f, (x, y) in enumerate(term)]
            for t, term in enumerate(terms)
        ]
        return GramSum.from_factors(named, dtype=self.dtype, backend=self.backend)

    def case(self, terms: list[list[tuple[Tensor, Tensor]]], kernel: KernelOperator | None = None) -> Case:
        return Case(kernel or self.lazy(terms), dense_gram_sum(terms), *self_kernels(terms))


def need(backend: str) -> None:
    """Skip where the machine does not have what the backend needs."""
    if backend != "torch":
        pytest.importorskip("numba" if backend == "popcount" else "triton")


class Rows:
    """A bundle that hands out blocks of stored factors."""

    def __init__(self, table: dict[str, Tensor]) -> None:
        self.table, self.n = table, len(next(iter(table.values())))

    def rows(self, lo: int, hi: int) -> dict[str, Tensor]:
        return {key: value[lo:hi].clone() for key, value in self.table.items()}


def make(kind: str, n: int, m: int | None, dtype: torch.dtype, backend: str) -> Case:
    mk = Maker(n, m, dtype, backend)
    a, b, c = mk.pair(5), mk.pair(3), mk.pair(4)
    g, h = mk.pair(40, binary=True), mk.pair(130, binary=True)
    if kind == "gram":
        return mk.case([[a]])
    if kind == "hadamard":
        return mk.case([[a, b, c]])
    if kind == "sum":
        return mk.case([[a], [b, c], [c]])
    if kind == "gates":
        return mk.case([[g, h, g]])
    if kind == "wide":
        return mk.case([[mk.pair(32 * words, binary=True) for words in (1, 2, 3, 4, 5, 9)]])
    if kind == "mixed":
        return mk.case([[a, g, b, h], [g], [h, c]])
    if kind == "scale":
        case = mk.case([[a, b]])
        return Case(-3.7 * case.kernel / 11, case.dense * (-3.7 / 11), case.rows, case.cols)
    if kind == "nested":  # (A + B) ∘ (C + gates): a product of sums, multiplied out only in the twin
        kernel = mk.lazy([[a], [b]]) * mk.lazy([[c], [g]])
        return mk.case([[a, c], [a, g], [b, c], [b, g]], kernel)
    if kind == "bias":
        ones = tuple(torch.ones(len(side), 1, dtype=torch.bool) for side in a)
        ones = (ones[0], ones[0]) if m is None else ones
        kernel = mk.lazy([[a], [ones]]) * mk.lazy([[b]])
        return mk.case([[a, b], [ones, b]], kernel)
    if kind == "select":
        case = mk.case([[a, b], [g]])
        rows = torch.arange(n).flip(0)[: max(n - 2, 1)]
        cols = rows if m is None else torch.arange(m)[::2]
        return Case(case.kernel[rows, cols], case.dense[rows][:, cols], case.rows[rows], case.cols[cols])
    if kind == "streamed":
        left = RowStream(Rows({key: pair[0].to(mk.device) for key, pair in zip("abg", (a, b, g))}))
        right = left if m is None else RowStream(Rows({k: p[1].to(mk.device) for k, p in zip("abg", (a, b, g))}))
        terms = [[(k, left[k], right[k]) for k in "ab"], [("g", left["g"], right["g"])]]
        return mk.case([[a, b], [g]], GramSum.from_factors(terms, backend=backend))
    assert kind == "custom"
    whole = dense_gram_sum([[a]]).to(mk.device, dtype)
    diagonal = whole.diagonal if n == whole.shape[1] else None
    custom = CustomKernel(
        tuple(whole.shape), lambda i, j: whole[i][:, j], diagonal, dtype=dtype, symmetric=m is None, device=mk.device
    )
    return mk.case([[a, b], [c]], custom * mk.lazy([[b]]) + mk.lazy([[c]]))


SPECS = [(k, s, b, d) for k in KINDS for s in SHAPES for b in BACKENDS for d in (torch.float32, torch.float64)]
SPECS += [(k, s, "triton", torch.float32) for k in KINDS for s in FUSED_SHAPES]


@pytest.mark.parametrize(
    ("kind", "shape", "backend", "dtype"),
    SPECS,
    ids=[f"{k}-{s[0]}x{s[1] or 'sym'}-{b}-f{8 * d.itemsize}" for k, s, b, d in SPECS],
)
def test_backend_keeps_the_contract(kind: str, shape: tuple[int, int | None], backend: str, dtype: torch.dtype) -> None:
    need(backend)
    n, m = shape
    case = make(kind, n, m, dtype, backend)
    kernel, want = case.kernel, case.dense
    assert kernel.shape == want.shape and kernel.dtype == dtype
    assert kernel.device.type == (FUSED_ON.type if backend == "triton" else "cpu")
    assert kernel.symmetric == (m is None)

    dense = kernel.dense().cpu()
    assert dense.dtype == dtype
    assert_kernel_close(dense, want, case.rows, case.cols)
    if m is None:
        assert torch.equal(dense, dense.T)

    covered = torch.zeros_like(want)
    for rows, cols, tile in kernel.tiles(max_bytes=200_000):
        assert_kernel_close(tile.cpu(), want[rows, cols], case.rows[rows], case.cols[cols])
        covered[rows, cols] += 1
    assert bool((covered == 1).all())

    some = torch.arange(0, kernel.shape[0], 3)
    tile = kernel.tile(some, slice(None)).cpu()
    assert_kernel_close(tile, want[some], case.rows[some], case.cols)
    i, j = kernel.shape[0] - 1, kernel.shape[1] // 2
    assert abs(kernel[i, j] - float(want[i, j])) <= TOLERANCE[dtype] * float((case.rows[i] * case.cols[j]).sqrt())

    if kernel.shape[0] == kernel.shape[1]:
        size = (case.rows * case.cols).sqrt()
        assert bool(((kernel.diagonal().cpu().double() - want.diagonal()).abs() <= TOLERANCE[dtype] * size).all())
        assert abs(kernel.trace() - float(want.trace())) <= TOLERANCE[dtype] * float(size.sum())

    generator = torch.Generator().manual_seed(1)
    for k in (None, 3):
        v = torch.randn(kernel.shape[1], *([] if k is None else [k]), generator=generator, dtype=dtype)
        got = (kernel @ v.to(kernel.device)).cpu()
        assert got.dtype == dtype and got.shape == (kernel.shape[0], *v.shape[1:])
        reach = torch.outer(case.rows.sqrt(), case.cols.sqrt()) @ v.double().abs()
        assert bool(((got.double() - want @ v.double()).abs() <= TOLERANCE[dtype] * reach).all())


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in BACKENDS for d in (torch.float32, torch.float64)] + [("triton", torch.float32)],
)
def test_counts_are_equal_not_close(backend: str, dtype: torch.dtype) -> None:
    need(backend)
    device = FUSED_ON if backend == "triton" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    for r in (1, 31, 32, 33, 64, 100, 128, 200):
        gates = [torch.rand(53, r, generator=generator) > 0.3 for _ in range(2)]
        terms = [[(f"g{i}", g.to(device)) for i, g in enumerate(gates)]]
        kernel = GramSum.from_factors(terms, dtype=dtype, backend=backend)
        want = dense_gram_sum([[(g, g) for g in gates]])
        assert torch.equal(kernel.dense().cpu().double(), want)
        assert torch.equal(kernel.diagonal().cpu().double(), want.diagonal())


def test_both_backends_agree_bit_for_bit_on_float_gates() -> None:
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    gates = [(torch.rand(61, 90, generator=generator) > 0.5).float() for _ in range(3)]  # 3 layers: below 2^24
    terms = [[(f"g{i}", g) for i, g in enumerate(gates)]]
    one, two = (GramSum.from_factors(terms, backend=b).dense() for b in BACKENDS)
    assert torch.equal(one, two)


def test_popcount_falls_back_where_counts_leave_the_range() -> None:
    pytest.importorskip("numba")
    gates = torch.ones(20, 300, dtype=torch.bool)
    gates[::3, ::2] = False
    terms = [[(f"g{i}", gates) for i in range(40)]]  # 300^40 = 2^329: beyond float32, and so are its scales
    kernels = [GramSum.from_factors(terms, backend=b, dtype=torch.float32).normalised() for b in BACKENDS]
    one, two = (k.dense() for k in kernels)
    assert_kernel_close(two, one.double(), one.diagonal())


def test_popcount_uses_two_threads_safely_from_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from concurrent.futures import ThreadPoolExecutor

    from pathlens.linops.backends import popcount

    monkeypatch.setattr(evaluate, "TILE_EDGE", 2048)
    monkeypatch.setattr(popcount, "_THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    gates = torch.rand(301, 128, generator=torch.Generator().manual_seed(0)) > 0.5
    kernel = GramSum.from_factors([[("g", gates)]], backend="popcount")
    want = gates.float() @ gates.float().T
    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(lambda _: kernel.dense(), range(4)):
            assert torch.equal(got, want)


def test_popcount_compiles_without_a_cache_where_none_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from pathlens.linops.backends import popcount

    asked = []

    def njit(function: object, **options: bool) -> str:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return "compiled"

    monkeypatch.setattr(numba, "njit", njit)
    assert popcount._compile(lambda: None) == "compiled"
    assert asked == [{"nogil": True, "cache": True}, {"nogil": True}]
