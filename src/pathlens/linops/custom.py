"""`CustomKernel`: a kernel given by a function that computes its tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathlens.errors import DTypeError, EmptyDataError, OptionError, ShapeError
from pathlens.linops.factors import FLOATS
from pathlens.linops.operator import KernelOperator
from pathlens.precision import exact_precision


class CustomKernel(KernelOperator):
    """A kernel given by a function that computes its tiles.

    Parameters
    ----------
    shape, dtype, device
        Of the kernel.
    tile
        ``tile(rows, cols)`` for int64 index tensors (a,), (b,) → (a, b) tensor of the dtype on the device.
    diagonal
        ``diagonal()`` → (n,); needed if and only if the kernel is square.
    symmetric
        Whether K_ij = K_ji; not checked.
    name
        For messages and ``repr``.
    tile_buffers, max_bytes, scaled
        See `KernelOperator`.

    Examples
    --------
    >>> K = CustomKernel((3, 3), lambda i, j: (i[:, None] == j[None, :]).float(), lambda: torch.ones(3), symmetric=True)
    >>> (2 * K).dense()
    tensor([[2., 0., 0.],
            [0., 2., 0.],
            [0., 0., 2.]])
    """

    def __init__(
        self,
        shape: tuple[int, int],
        tile: Callable[[Tensor, Tensor], Tensor],
        diagonal: Callable[[], Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
        name: str = "custom",
        tile_buffers: int = 1,
        max_bytes: int | None = None,
        scaled: bool = True,
    ) -> None:
        n, m = shape
        if n < 1 or m < 1:
            raise EmptyDataError(f"CustomKernel {name!r}: shape {shape} has no entries.")
        if symmetric and n != m:
            raise ShapeError(f"CustomKernel {name!r}: a symmetric kernel is square, shape is {shape}.")
        if n == m and diagonal is None:
            raise OptionError(f"CustomKernel {name!r}: a square kernel needs `diagonal`.")
        if dtype not in FLOATS:
            raise DTypeError(f"CustomKernel {name!r}: dtype must be float32 or float64, got {dtype}.")
        self.shape, self.dtype, self.symmetric = (int(n), int(m)), dtype, symmetric
        self.device = torch.empty(0, device=device).device  # 'cuda' becomes 'cuda:0'
        self._tile, self._diagonal, self._name = tile, diagonal, name
        self.tile_buffers, self.max_bytes, self.scaled = tile_buffers, max_bytes, scaled

    def _checked(self, got: Tensor, want: tuple[int, ...], what: str) -> Tensor:
        if not isinstance(got, Tensor) or tuple(got.shape) != want:
            came = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ShapeError(f"CustomKernel {self.name!r}: `{what}` returned {came}, expected a tensor of {want}.")
        if got.dtype != self.dtype or got.device != self.device:
            raise DTypeError(
                f"CustomKernel {self.name!r}: `{what}` returned {got.dtype} on {got.device}, expected "
                f"{self.dtype} on {self.device}."
            )
        return got.detach()

    @exact_precision()
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors; raises if the function returns another shape."""
        return self._checked(self._tile(rows, cols), (len(rows), len(cols)), "tile")

    @exact_precision()
    def diagonal(self) -> Tensor:
        """K_ii, (n,)."""
        n = self._square("diagonal")
        assert self._diagonal is not None
        return self._checked(self._diagonal(), (n,), "diagonal")
