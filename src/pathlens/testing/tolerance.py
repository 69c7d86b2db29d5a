"""The table of tolerances for kernels, by dtype, and the comparison that uses it.

Errors are relative to √(k_ii·k_jj), not to each entry: sums of Hadamard products cancel near zero, where the relative
error of an entry is meaningless. Counts must be equal and are not compared here.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def scaled_error(got: Tensor, want: Tensor, rows: Tensor, cols: Tensor | None = None) -> float:
    """max_ij |got_ij − want_ij| / √(k_ii·k_jj), in float64; if the scale is zero, both must be zero.

    Parameters
    ----------
    got, want
        (n, m).
    rows, cols
        k_ii (n,) and k_jj (m,), the kernel of each row (column) with itself; pass only `rows` if both are the same.

    Examples
    --------
    >>> scaled_error(torch.tensor([[1.1]]), torch.tensor([[1.0]]), torch.tensor([4.0]))  # doctest: +ELLIPSIS
    0.025...
    """
    columns = rows if cols is None else cols
    if got.shape != want.shape or want.shape != (len(rows), len(columns)):
        raise AssertionError(
            f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}, scales {len(rows)} × {len(columns)}"
        )
    gap = (got.double() - want.double()).abs()
    if not bool(torch.isfinite(gap).all()):
        return float("inf")
    scale = rows.double().sqrt()[:, None] * columns.double().sqrt()[None, :]
    return float(torch.where(scale > 0, gap / scale.clamp(min=1e-300), torch.where(gap > 0, float("inf"), 0.0)).max())


def assert_kernel_close(got: Tensor, want: Tensor, rows: Tensor, cols: Tensor | None = None) -> None:
    """Fail unless ``got`` agrees with ``want`` to the tolerance of ``got``'s dtype.

    >>> assert_kernel_close(torch.eye(2), torch.eye(2), torch.ones(2))
    """
    limit = TOLERANCE[got.dtype]
    error = scaled_error(got, want, rows, cols)
    if not error <= limit:
        raise AssertionError(f"scaled error {error:.2e} exceeds {limit:.0e} for {got.dtype}")
