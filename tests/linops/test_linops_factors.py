"""What goes in: checks of factors, one dtype, one device, symmetry by identity; and what `repr` and pictures show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pathlens.errors import (
    BudgetError,
    DTypeError,
    EmptyDataError,
    MissingExtraError,
    NotFiniteError,
    OptionError,
    RecordError,
    ShapeError,
    UnknownNameError,
)
from pathlens.linops import CustomKernel, Factor, GramSum, RowStream, backends


def test_mismatched_rows_name_both_factors() -> None:
    with pytest.raises(ShapeError) as error:
        GramSum.from_factors([[("input", torch.ones(512, 3))], [("layer.2.gate", torch.ones(500, 3))]])
    assert str(error.value) == (
        "GramSum: factor 'layer.2.gate' has 500 rows, expected 512 as in factor 'input'. Record both on the same batch."
    )
    with pytest.raises(ShapeError, match="factor 'b' has 4 columns, expected 3 as in factor 'a'"):
        GramSum.from_factors([[("a", torch.ones(2, 1), torch.ones(3, 1)), ("b", torch.ones(2, 1), torch.ones(4, 1))]])
    with pytest.raises(ShapeError, match="'a' has 1 columns on the left and 2 on the right"):
        GramSum.from_factors([[("a", torch.ones(2, 1), torch.ones(2, 2))]])
    small, large = (GramSum.from_factors([[(str(n), torch.ones(n, 1))]]) for n in (2, 3))
    for join in (lambda: small + large, lambda: small * large):
        with pytest.raises(ShapeError, match="factor '3' has 3 rows, expected 2 as in factor '2'"):
            join()


def test_mixed_dtypes_name_both_factors() -> None:
    x, y = torch.ones(3, 1), torch.ones(3, 1, dtype=torch.float64)
    with pytest.raises(DTypeError, match=r"factor 'y' is torch.float64 on cpu, factor 'x' is torch.float32"):
        GramSum.from_factors([[("x", x), ("y", y)]])
    with pytest.raises(DTypeError, match=r"factor 'x' is torch.float32 .* factor 'y' is torch.float64"):
        GramSum.from_factors([[("x", x)]]) + GramSum.from_factors([[("y", y)]])
    with pytest.raises(DTypeError, match="left"):
        GramSum.from_factors([[("x", x, y)]])
    with pytest.raises(DTypeError, match="was given"):
        GramSum.from_factors([[("x", x)]], dtype=torch.float64)
    with pytest.raises(DTypeError, match="meta"):
        GramSum.from_factors([[("x", x), ("y", torch.ones(3, 1, device="meta", dtype=torch.bool))]])


def test_bool_factors_take_the_dtype_of_the_others() -> None:
    gate = torch.ones(3, 2, dtype=torch.bool)
    assert GramSum.from_factors([[("g", gate)]]).dtype == torch.get_default_dtype()
    assert GramSum.from_factors([[("g", gate)]], dtype=torch.float64).dtype == torch.float64
    kernel = GramSum.from_factors([[("g", gate), ("x", torch.ones(3, 1, dtype=torch.float64))]])
    assert kernel.dtype == torch.float64 and kernel[0, 0] == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_factors_are_named(value: float) -> None:
    x = torch.ones(5, 2)
    x[3, 1] = value
    with pytest.raises(NotFiniteError, match=r"factor 'h.2' has .* at row 3, column 1"):
        GramSum.from_factors([[("h.1", torch.ones(5, 2)), ("h.2", x)]])


def test_other_bad_factors() -> None:
    for bad, error in [
        (torch.ones(3), ShapeError),
        (torch.ones(3, 0), ShapeError),
        (torch.ones(0, 3), EmptyDataError),
        (torch.ones(3, 2, dtype=torch.int64), DTypeError),
        (torch.ones(3, 2).half(), DTypeError),
        ([[1.0]], DTypeError),
        (None, DTypeError),
    ]:
        with pytest.raises(error, match="'bad'"):
            GramSum.from_factors([[("bad", bad)]])
    for terms in ([], [[]]):
        with pytest.raises(EmptyDataError):
            GramSum.from_factors(terms)
    with pytest.raises(OptionError, match="Factor"):
        GramSum.from_factors([[torch.ones(2, 2)]])
    assert GramSum.from_factors([[("x", np.ones((3, 2)))]]).dtype == torch.float64


def test_bad_streams() -> None:
    class Bundle:
        n = 2

        def rows(self, lo: int, hi: int) -> dict[str, torch.Tensor]:
            return {"h": torch.ones(hi - lo, 1), "g": torch.ones(hi - lo, 1)}

    with pytest.raises(RecordError, match=r"RowStream\(source\)\['h'\]"):
        GramSum.from_factors([[("x", Bundle())]])
    with pytest.raises(UnknownNameError, match="'k'"):
        RowStream(Bundle())["k"]
    with pytest.raises(RecordError, match="rows"):
        RowStream(object())


def test_symmetric_only_if_both_sides_are_the_same_object() -> None:
    x = torch.randn(4, 2)
    assert GramSum.from_factors([[("x", x)]]).symmetric
    assert GramSum.from_factors([[("x", x, x)]]).symmetric
    assert not GramSum.from_factors([[("x", x, x.clone())]]).symmetric
    assert not GramSum.from_factors([[("x", x), ("y", x, x.clone())]]).symmetric


def test_factors_are_detached_and_not_copied() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    kernel = GramSum.from_factors([[("x", x)]])
    assert not kernel.dense().requires_grad and not (kernel @ torch.ones(3)).requires_grad
    leaf = next(kernel.root.leaves())
    assert leaf.left.tensor.data_ptr() == x.data_ptr()


def test_results_do_not_change_the_factors() -> None:
    x = torch.randn(30, 4) * 1e3
    before = x.clone()
    kernel = GramSum.from_factors([[("x", x), ("x", x)], [("x", x)]])
    kernel.dense(), kernel @ torch.ones(30), kernel.diagonal(), kernel.normalised("diagonal").dense()
    assert torch.equal(x, before)


def test_results_are_not_overwritten_by_later_tiles() -> None:
    kernel = GramSum.from_factors([[("x", torch.arange(6.0)[:, None])]])
    tiles = [tile for _, _, tile in kernel.tiles(max_bytes=600)]
    assert len(tiles) > 1
    assert torch.equal(torch.cat([t.ravel() for t in tiles]).sort().values, kernel.dense().ravel().sort().values)


# --- options and views -----------------------------------------------------------------------------------------


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(UnknownNameError, match="Did you mean 'torch'"):
        GramSum.from_factors([[("x", x)]], backend="toch")
    one, two = (GramSum.from_factors([[("x", x)]], backend=b) for b in ("torch", "popcount"))
    with pytest.raises(OptionError, match="popcount and torch"):
        one + two
    assert (one + two.with_options(backend="torch")).backend == "torch"
    monkeypatch.setattr(backends, "_has", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pathlens\[fast\]"):
        two.dense()
    assert "pathlens[fast]" in repr(two)
    assert torch.equal(GramSum.from_factors([[("x", x)]]).dense(), torch.full((3, 3), 2.0))


def test_auto_takes_popcount_for_large_gate_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    gates = GramSum.from_factors([[("g", torch.ones(300, 64, dtype=torch.bool))]])
    assert gates._evaluator().backend.name == "torch"
    monkeypatch.setattr(backends, "_WORTH_COMPILING", 1e6)
    assert gates._evaluator().backend.name == "popcount"
    assert GramSum.from_factors([[("x", torch.randn(300, 64))]])._evaluator().backend.name == "torch"
    monkeypatch.setattr(backends, "_has", lambda package: False)
    assert gates._evaluator().backend.name == "torch"


def test_max_bytes_is_checked_and_inherited() -> None:
    x = torch.ones(3, 2)
    for bad in (0, -5, 1.5, True, "1 GiB"):
        with pytest.raises(OptionError, match="max_bytes"):
            GramSum.from_factors([[("x", x)]], max_bytes=bad)
    small, large = (GramSum.from_factors([[("x", x)]], max_bytes=b) for b in (10**5, 10**6))
    assert (small + large).max_bytes == 10**5 and (2 * large[:2]).max_bytes == 10**6
    with pytest.raises(BudgetError, match=r"one row and one column need .* the budget is 100 B\. Raise max_bytes"):
        next(small.tiles(max_bytes=100))
    with pytest.raises(BudgetError, match=r"K\.tiles\(\)"):
        small.dense(max_bytes=20)
    assert "budget is 50 B" in repr(small.with_options(max_bytes=50))


def test_repr_explains() -> None:
    h, d = torch.ones(6, 3), torch.ones(6, 5)
    terms = [[("h", h), ("d", d)], [Factor.ones(6), ("d", d)]]
    text = repr(GramSum.from_factors(terms, name="ntk", max_bytes=10**6))
    for part in (
        "GramSum 'ntk': 6 × 6, torch.float32, cpu, symmetric",
        "K     = h·hᵀ ∘ d·dᵀ + 1·1ᵀ ∘ d·dᵀ",
        "3∘5 + 1∘5",
        "198 B of factors",
        "tiles : 6 × 6",
        "backend torch",
        "976.6 KiB",
        "K @ v : ",
    ):
        assert part in text, (part, text)
    many = GramSum.from_factors([[(f"f{i}", h) for i in range(20)]] * 9)
    assert "more factors" in repr(many) and "more terms" in repr(many) and "(×9)" in repr(many)
    custom = CustomKernel((6, 4), lambda i, j: torch.ones(len(i), len(j)), name="recursion")
    assert "CustomKernel 'recursion': 6 × 4" in repr(custom) and "no factors to use" in repr(custom)


def test_custom_kernel_checks_itself() -> None:
    def tile(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(i), len(j))

    for shape, options, error in [
        ((2, 3), {"symmetric": True}, ShapeError),
        ((2, 2), {}, OptionError),
        ((0, 2), {}, EmptyDataError),
        ((2, 3), {"dtype": torch.half}, DTypeError),
    ]:
        with pytest.raises(error, match="custom"):
            CustomKernel(shape, tile, **options)
    with pytest.raises(ShapeError, match=r"`tile` returned \(1, 1\)"):
        CustomKernel((2, 3), lambda i, j: torch.ones(1, 1)).dense()
    with pytest.raises(DTypeError, match="`tile` returned"):
        CustomKernel((2, 3), lambda i, j: tile(i, j).double()).dense()
    with pytest.raises(ShapeError, match="square"):
        CustomKernel((2, 3), tile).trace()
    with pytest.raises(OptionError, match="upper"):
        next(CustomKernel((2, 3), tile).tiles(upper=True))


def test_plot_shows_evenly_spaced_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kernel = GramSum.from_factors([[("x", torch.arange(50.0)[:, None])]], name="line")
    axes = kernel.plot()
    assert np.array_equal(axes.images[0].get_array(), kernel.dense().numpy()) and axes.get_title() == "line, 50 × 50"
    axes = kernel.plot(max_pixels=10, cmap="gray")
    assert axes.images[0].get_array().shape == (10, 10) and "every 5th row" in axes.get_title()
    with pytest.raises(OptionError):
        kernel.plot(max_pixels=0)
    plt.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match="plot"):
        kernel.plot()


def test_import_loads_no_optional_package() -> None:
    code = (
        "import sys, torch; import pathlens.linops as l; l.GramSum.from_factors([[('x', torch.ones(3, 2).bool())]])"
        ".dense(); print([m for m in ('numba', 'matplotlib', 'rich', 'scipy.sparse', 'triton', 'dask', 'sklearn') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.strip() == "[]"
