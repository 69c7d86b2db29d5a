"""The fused kernel beyond the contract: precisions, ragged edges, mirrored halves, scales, what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pathlens.errors import OptionError
from pathlens.linops import Factor, GramSum
from pathlens.testing.dense import dense_gram_sum

pytest.importorskip("triton")

from pathlens.linops.backends import triton_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def scaled(got: torch.Tensor, want: torch.Tensor) -> float:
    size = want.diagonal().sqrt()
    return float(((got.cpu().double() - want).abs() / (size[:, None] * size)).max())


def factors(n: int, *ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, r, generator=generator) for r in ranks]


@pytest.mark.parametrize(
    ("backend", "most", "least"),
    [("triton", 1.5e-6, 0.0), ("triton-3xtf32", 1.5e-6, 0.0), ("triton-tf32", 2e-3, 2e-6), ("triton-bf16", 2e-2, 2e-4)],
)
def test_precisions_are_what_they_say(backend: str, most: float, least: float) -> None:
    h, d, x = factors(130, 200, 70, 33)
    kernel = GramSum.from_factors([[("h", h.to(DEVICE)), ("d", d.to(DEVICE))], [("x", x.to(DEVICE))]], backend=backend)
    error = scaled(kernel.dense(), dense_gram_sum([[(h, h), (d, d)], [(x, x)]]))
    assert least <= error <= most


def test_symmetric_matrices_are_exactly_symmetric_and_every_entry_is_written() -> None:
    for n in (1, 63, 64, 65, 150):
        (h,) = factors(n, 20)
        kernel = GramSum.from_factors([[("h", h.to(DEVICE))]], backend="triton")
        out = torch.full((n, n), float("nan"), device=DEVICE)
        evaluator = kernel._evaluator()
        side = evaluator.side(range(n), False, True)
        evaluator.tile(side, side, out)
        assert bool(torch.isfinite(out).all()) and torch.equal(out, out.T)


def test_writes_into_a_part_of_a_larger_matrix_and_nowhere_else() -> None:
    (h,) = factors(70, 20)
    whole = torch.full((90, 101), -1.0, device=DEVICE)
    kernel = GramSum.from_factors([[("h", h.to(DEVICE))]], backend="triton")
    evaluator = kernel._evaluator()
    part = whole[10:80, 5:45]
    evaluator.tile(evaluator.side(range(70), False, True), evaluator.side(range(40), True, True), part)
    torch.testing.assert_close(part.cpu(), h @ h[:40].T, rtol=0, atol=1e-4)
    part.fill_(-1.0)
    assert bool((whole == -1.0).all())


def test_rows_of_any_size_keep_their_digits() -> None:
    (h,) = factors(66, 40)
    h *= torch.logspace(-15, 12, 66)[:, None]  # float16 alone would lose most rows
    h[7] = 0.0
    want = dense_gram_sum([[(h, h)]])
    got = GramSum.from_factors([[("h", h.to(DEVICE))]], backend="triton").dense().cpu().double()
    size = want.diagonal().sqrt().clamp(min=1e-30)
    assert float(((got - want).abs() / (size[:, None] * size)).max()) < 2e-6
    assert bool((got[7] == 0).all())


def test_negative_and_tiny_coefficients() -> None:
    a, b = factors(40, 8, 9)
    first, second = (GramSum.from_factors([[("f", f.to(DEVICE))]], backend="triton") for f in (a, b))
    got = (2.0 * first - 3e-6 * second).dense().cpu().double()
    want = 2.0 * dense_gram_sum([[(a, a)]]) - 3e-6 * dense_gram_sum([[(b, b)]])
    assert float((got - want).abs().max() / want.abs().max()) < 2e-6


def test_many_layers_of_gates_neither_overflow_nor_lose_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    gates = [torch.rand(30, 500, generator=generator) > 0.5 for _ in range(20)]
    kernel = GramSum.from_factors(
        [[(f"g{i}", g.to(DEVICE)) for i, g in enumerate(gates)]], dtype=torch.float32, backend="triton"
    ).normalised()
    want = dense_gram_sum([[(g, g) for g in gates]])
    assert scaled(kernel.dense(), want / want.trace()) < 1e-5


def test_a_product_of_sums_becomes_one_factor_where_it_can() -> None:
    a, b, c = (f.to(DEVICE) for f in factors(20, 3, 4, 5))
    kernel = GramSum.from_factors([[("a", a)], [Factor.ones(20, device=DEVICE)]]) * GramSum.from_factors([[("c", c)]])
    side = kernel._evaluator().side(range(20), False, True)
    assert len(triton_backend.flatten(kernel.root, side, side)) == 1
    sums = [GramSum.from_factors([[("a", a), ("b", b)], [("c", c)]]) for _ in range(7)]
    product = sums[0]
    for other in sums[1:]:
        product = product * other
    side = product._evaluator().side(range(20), False, True)
    with pytest.raises(triton_backend.Unsuited):  # 2^7 terms
        triton_backend.flatten(product.root, side, side)
    got = product.with_options(backend="triton").dense()  # falls back to torch's products
    torch.testing.assert_close(got, product.with_options(backend="torch").dense())


def test_refusals_name_the_remedy() -> None:
    x = torch.ones(3, 2, dtype=torch.float64, device=DEVICE)
    with pytest.raises(OptionError, match="float32"):
        GramSum.from_factors([[("x", x)]], backend="triton").dense()
    script = (
        "import torch; from pathlens.linops import GramSum; "
        "GramSum.from_factors([[('x', torch.ones(3, 2))]], backend='triton').dense()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "works on CUDA tensors" in done.stderr
