"""Lazy kernel operators: the small contract, what is derived from it, and `GramSum`, the sum of products of Grams.

An operator writes ``shape, dtype, device, symmetric, tile, diagonal`` and gets dense matrices, products, slices,
algebra, solvers and pictures from here. Nothing knows of networks. May import only the errors and the rest of linops.
"""

from __future__ import annotations

import math
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import (
    DTypeError,
    EmptyDataError,
    NotFiniteError,
    OptionError,
    RowIndexError,
    ScaleError,
    ShapeError,
)
from pathlens.indexing import as_index
from pathlens.linops import backends, counts, solvers
from pathlens.linops.evaluate import Evaluator, overflow_error
from pathlens.linops.factors import FLOATS, Factor, ResidentRows, RowTable
from pathlens.linops.matmul import matmul, plan_matmul
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Select, Sum, first_name
from pathlens.linops.solvers import Eigenpairs, Solution
from pathlens.plotting import get_axes
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar

if TYPE_CHECKING:
    from pathlens.stores import StoreReport


class KernelOperator(ABC):
    """A lazy n × m matrix of kernel values, known by its tiles. Not differentiable.

    A subclass sets `shape`, `dtype`, `device` and `symmetric` and defines `tile` and `diagonal`; the rest is derived.

    Attributes
    ----------
    shape
        (n, m).
    dtype, device
        Of every result; float32 or float64.
    symmetric
        Whether K_ij = K_ji by construction: both sides are the same object.
    max_bytes
        Memory that may be allocated beyond the factors; None is half of what is free when asked.
    backend
        ``"auto"``, ``"torch"``, ``"popcount"``, or one of the fused kernels, ``"triton"`` in several precisions.
    tile_buffers
        Tile-sized arrays that the operator's own `tile` holds at once, its result included.
    scaled
        Products with other operators are kept in range by the diagonal of a symmetric one. False where the diagonal
        costs as much as the entries: it is then asked for only when you ask.

    Examples
    --------
    >>> class Minimum(KernelOperator):
    ...     shape, dtype, device, symmetric = (4, 4), torch.float64, torch.device("cpu"), True
    ...     def tile(self, rows, cols):
    ...         return torch.minimum(rows[:, None], cols[None, :]).double() + 1
    ...     def diagonal(self):
    ...         return torch.arange(4).double() + 1
    >>> K = Minimum()
    >>> K.trace(), K[1, 3]
    (10.0, 2.0)
    >>> (K + 0.5 * K)[::2, ::2].dense()
    tensor([[1.5000, 1.5000],
            [1.5000, 4.5000]], dtype=torch.float64)
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool
    max_bytes: int | None = None
    backend: str = "auto"
    tile_buffers: int = 1
    scaled: bool = True
    # numpy scalars would otherwise take `2.0 * K` apart before this class is asked
    __array_ufunc__ = None
    __iter__ = None  # Python would index 0, 1, 2 … and evaluate row by row

    # --- the contract ------------------------------------------------------------------------------------------

    @abstractmethod
    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows (a,) and columns (b,), given as int64 tensors: a tensor of shape (a, b)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """K_ii, shape (n,); square kernels only."""

    # --- derived -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What messages and ``repr`` call the operator."""
        return getattr(self, "_name", type(self).__name__)

    def _evaluator(self, max_bytes: int | None = None) -> Evaluator:
        budget = resolve_budget(self.max_bytes if max_bytes is None else max_bytes, self.device)
        return Evaluator.make(expression(self), self.dtype, self.device, self.backend, budget)

    def dense(self, *, max_bytes: int | None = None, exact: bool = False) -> Any:
        """The whole matrix, exact to rounding; exactly symmetric where the kernel is.

        Parameters
        ----------
        max_bytes
            Budget for the result and its scratch space; beyond it a `BudgetError` is raised.
        exact
            Integers for 0/1 factors, as `exact_counts`.

        Returns
        -------
        Tensor of shape (n, m); with ``exact`` a numpy array.

        Notes
        -----
        Costs n·m·Σ 2r operations, half of it where symmetric. Numbers beyond the dtype raise a `ScaleError`.

        Examples
        --------
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> GramSum.from_factors([[("x", x), ("x", x)]]).dense()
        tensor([[25.,  4.],
                [ 4.,  1.]])
        """
        return self.exact_counts(max_bytes=max_bytes) if exact else self._evaluator(max_bytes).dense()

    def exact_counts(self, *, max_bytes: int | None = None) -> np.ndarray:
        """The kernel of 0/1 factors in exact integers: int64 where every entry must fit, else Python integers.

        Examples
        --------
        >>> gates = torch.ones(2, 500, dtype=torch.bool)
        >>> K = GramSum.from_factors([[("gate", gates)] * 20])
        >>> K.exact_counts()[0, 1] == 500**20
        True
        """
        with exact_precision():
            return counts.exact_counts(self._evaluator(max_bytes))

    def tiles(self, *, upper: bool = False, max_bytes: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Go through the matrix tile by tile: (rows, columns, tile of shape (a, b)), each tile a tensor of its own.

        Parameters
        ----------
        upper
            For a symmetric kernel, only tiles on and above the diagonal.

        Examples
        --------
        >>> K = GramSum.from_factors([[("x", torch.ones(3, 1))]])
        >>> sum(float(tile.sum()) for _, _, tile in K.tiles())
        9.0
        """
        if upper and not self.symmetric:
            raise OptionError("tiles(upper=True) needs a symmetric kernel; this one has different sides.")
        evaluator = self._evaluator(max_bytes)
        plan = evaluator.plan(square=upper, extra_buffers=1)
        total = -(-self.shape[0] // plan.rows) * -(-self.shape[1] // plan.cols)
        with ProgressBar("kernel tiles", total) as bar:
            for rows, cols, left, right in evaluator.pairs(plan, upper=upper, fold=True):
                yield slice(rows.start, rows.stop), slice(cols.start, cols.stop), evaluator.tile(left, right).clone()
                bar.advance()

    def _square(self, what: str) -> int:
        n, m = self.shape
        if n != m:
            raise ShapeError(f"{what} needs a square kernel, this one is {n} × {m}.")
        return n

    def _scaled_trace(self) -> tuple[float, int]:
        """(t, e) with trace = t · 2^e, t of moderate size or zero."""
        self._square("trace")
        unit, exponent = self._evaluator().log_diagonal()
        top = float(torch.where(unit != 0, exponent, float("-inf")).max())
        if math.isinf(top):
            return 0.0, 0
        return float((unit * torch.exp2(exponent - top)).sum()), int(top)

    def trace(self) -> float:
        """Σ_i K_ii, summed in float64 at a cost of n·Σ 2r.

        Examples
        --------
        >>> GramSum.from_factors([[("x", torch.eye(3))]]).trace()
        3.0
        """
        value, exponent = self._scaled_trace()
        try:
            return math.ldexp(value, exponent)
        except OverflowError:
            raise overflow_error("the trace", torch.float64, exponent) from None

    def matmul(self, v: Tensor, *, max_bytes: int | None = None) -> Tensor:
        """K @ V with a budget of its own; see ``@``."""
        return matmul(self._evaluator(max_bytes), v)

    def __matmul__(self, v: Tensor) -> Tensor:
        """K @ V for V of shape (m,) or (m, k), by tiles or by factors, whichever needs fewer operations.

        A term A Aᵀ ∘ B Bᵀ costs 2(n+m)·k·r₁r₂ by factors and n·m·(2r₁ + 2r₂ + 2k) by tiles.
        """
        return self.matmul(v)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole matrix for numpy and what is built on it, as `dense` forms it: ``plt.imshow(K)``."""
        if copy is False:
            raise ValueError("a kernel has no memory to share: np.asarray(K) forms the matrix.")
        return np.asarray(self.dense().cpu().numpy(), dtype=dtype)

    def __getitem__(self, key: Any) -> Any:
        """K[rows, cols] stays lazy; two integers give a number. One integer alone keeps its axis."""
        n, m = self.shape
        pair = key if isinstance(key, tuple) else (key, slice(None))
        if len(pair) != 2 or any(part is Ellipsis or part is None for part in pair):
            raise RowIndexError(f"K[...] takes rows and columns, got {key!r}. Write K[rows, cols].")
        rows = as_index(pair[0], n, "rows")
        cols = rows if pair[0] is pair[1] and n == m else as_index(pair[1], m, "columns")
        if all(isinstance(part, (int, np.integer)) for part in pair):
            evaluator = self._evaluator()
            left, right = evaluator.side(rows, False, False), evaluator.side(cols, True, False)
            unit, exponent = float(evaluator.unit_tile(left, right)), int(left.exponent + right.exponent)
            try:
                return math.ldexp(unit, exponent)
            except OverflowError:
                raise overflow_error(f"entry {pair}", torch.float64, exponent) from None
        return self._derive(Select(expression(self), rows, cols))

    # --- algebra -----------------------------------------------------------------------------------------------

    def _derive(self, node: Node, *others: KernelOperator) -> GramSum:
        operators = (self, *others)
        budgets = [op.max_bytes for op in operators if op.max_bytes is not None]
        chosen = sorted({op.backend for op in operators} - {"auto"})
        if len(chosen) > 1:
            raise OptionError(
                f"operators ask for different backends, {' and '.join(chosen)}. Set one with K.with_options(backend=…)."
            )
        return GramSum(
            node, self.dtype, self.device, max_bytes=min(budgets, default=None), backend=chosen[0] if chosen else "auto"
        )

    def _together(self, other: KernelOperator, what: str) -> None:
        if self.dtype != other.dtype or self.device != other.device:
            mine, theirs = (first_name(expression(operator)) for operator in (self, other))
            raise DTypeError(
                f"{what}: {mine} is {self.dtype} on {self.device}, {theirs} is {other.dtype} on "
                f"{other.device}. Convert the factors of one; nothing is promoted silently."
            )

    def __add__(self, other: Any) -> GramSum:
        if isinstance(other, numbers.Number) and other == 0:  # so that sum([K1, K2]) works
            return self._derive(expression(self))
        if not isinstance(other, KernelOperator):
            return NotImplemented
        self._together(other, "K + K")
        return self._derive(Sum([expression(self), expression(other)]), other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> GramSum:
        return self + (-1.0) * other if isinstance(other, KernelOperator) else NotImplemented

    def __neg__(self) -> GramSum:
        return self * -1.0

    def __mul__(self, other: Any) -> GramSum:
        """Entrywise (Hadamard) product with another kernel, or scaling by a number."""
        if isinstance(other, KernelOperator):
            self._together(other, "K * K")
            return self._derive(Hadamard([expression(self), expression(other)]), other)
        if isinstance(other, Tensor) and other.ndim == 0:
            other = other.item()
        if not isinstance(other, numbers.Real):
            return NotImplemented
        factor = float(other)
        if not math.isfinite(factor):
            raise NotFiniteError(f"a kernel cannot be scaled by {factor}.")
        return self._derive(Scaled(factor, 0, expression(self)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> GramSum:
        if not isinstance(other, numbers.Real):
            return NotImplemented
        if other == 0:
            raise ScaleError("a kernel cannot be divided by zero.")
        return self * (1.0 / float(other))

    def normalised(self, to: str = "trace") -> GramSum:
        """The kernel scaled so that its size no longer matters; works however large or small its numbers are.

        Parameters
        ----------
        to
            ``"trace"``: K / tr K, trace 1. ``"n"``: n·K / tr K, mean diagonal 1.
            ``"diagonal"``: K_ij / √(K_ii K_jj), every diagonal entry 1 (zero rows stay zero).

        Examples
        --------
        >>> K = GramSum.from_factors([[("x", torch.tensor([[1.0], [3.0]]))]])
        >>> K.normalised().dense()
        tensor([[0.1000, 0.3000],
                [0.3000, 0.9000]])
        """
        if to not in ("trace", "n", "diagonal"):
            raise OptionError(f"normalised: `to` must be 'trace', 'n' or 'diagonal', got {to!r}.")
        trace, exponent = self._scaled_trace()
        if trace <= 0:
            raise ScaleError(
                f"normalised: the trace is {trace:g}·2^{exponent}, so that no scale makes it positive. "
                f"A kernel of zero rows, or a difference of kernels, cannot be normalised."
            )
        n = self.shape[0]
        scaled = self._derive(Scaled((1 if to == "trace" else n) / trace, -exponent, expression(self)))
        if to != "diagonal":
            return scaled
        unit, exponent_i = scaled._evaluator().log_diagonal()
        if bool((unit < 0).any()):
            raise ScaleError(
                "normalised: the diagonal has negative entries. Only kernels with a diagonal ≥ 0 have cosines."
            )
        column = torch.where(unit > 0, 1 / unit.sqrt(), 0.0)
        rest = -exponent_i / 2
        factors: list[Node] = [expression(scaled)]
        # Rows may differ by more than the dtype spans: powers of two beyond it go to rank-one factors of their own.
        while True:
            step = rest.clamp(-100.0, 100.0)
            rows = ResidentRows("diag(K)^-½", (column * torch.exp2(step)).to(self.dtype)[:, None])
            factors.append(Gram(rows.name, rows))
            column, rest = torch.ones_like(column), rest - step
            if bool((rest == 0).all()):
                return self._derive(Hadamard(factors))

    def with_options(self, *, max_bytes: int | None = None, backend: str | None = None) -> GramSum:
        """The same kernel with another budget or backend.

        Examples
        --------
        >>> K = GramSum.from_factors([[("x", torch.eye(2))]])
        >>> K.with_options(max_bytes=2**30).max_bytes == 2**30
        True
        """
        return GramSum(
            expression(self),
            self.dtype,
            self.device,
            name=self.name,
            max_bytes=self.max_bytes if max_bytes is None else max_bytes,
            backend=self.backend if backend is None else backend,
        )

    # --- solvers -----------------------------------------------------------------------------------------------

    def solve(
        self,
        y: Tensor,
        *,
        ridge: float = 0.0,
        method: str = "auto",
        tol: float | None = None,
        max_iter: int | None = None,
        preconditioner: int | None = None,
        max_bytes: int | None = None,
    ) -> Solution:
        """Solve (K + ridge·I) x = y for a symmetric kernel.

        Parameters
        ----------
        y
            (n,) or (n, c), of the kernel's dtype.
        ridge
            Added to the diagonal; nothing is added unasked.
        method
            ``"cholesky"``, ``"cg"``, or ``"auto"``: Cholesky where 2n² numbers fit the budget, else CG.
        tol, max_iter
            Of conjugate gradients: relative residual (default 1e-10, float32 1e-5) and number of products.
        preconditioner
            Rank of a Nyström sketch that speeds up conjugate gradients and does not change their answer; 0 for none,
            None for one that suits n and the budget.

        Returns
        -------
        `Solution` with ``solution``, ``residual``, ``iterations``, ``method``, ``preconditioner``.

        Notes
        -----
        Cholesky costs n³/3 + 2n²c. A `SolverError` says when the matrix is not positive definite, or when conjugate
        gradients do not converge.

        Examples
        --------
        >>> K = GramSum.from_factors([[("x", torch.eye(2))]])
        >>> K.solve(torch.tensor([2.0, 4.0]), ridge=1.0).solution
        tensor([1., 2.])
        """
        with exact_precision():
            return solvers.solve(
                self._evaluator(max_bytes),
                y,
                ridge=ridge,
                method=method,
                tol=tol,
                max_iter=max_iter,
                preconditioner=preconditioner,
            )

    def eigsh(
        self,
        k: int = 6,
        *,
        method: str = "auto",
        tol: float | None = None,
        max_iter: int | None = None,
        max_bytes: int | None = None,
    ) -> Eigenpairs:
        """The k largest eigenvalues of a symmetric kernel, descending, with orthonormal eigenvectors.

        Parameters
        ----------
        k
            1 … n.
        method
            ``"dense"`` (all eigenpairs, 9n³ operations, 4n² numbers), ``"lanczos"`` (products K @ v alone, ARPACK from
            a fixed start vector), or ``"auto"``: dense where it fits the budget and costs less than Lanczos or about
            half a minute. Lanczos may miss copies of a repeated eigenvalue; dense never does.
        tol, max_iter
            Of Lanczos: relative accuracy of the eigenvalues (default 1e-12, float32 1e-5) and restarts.

        Examples
        --------
        >>> K = GramSum.from_factors([[("x", torch.diag(torch.tensor([1.0, 3.0, 2.0])))]])
        >>> K.eigsh(2).values
        tensor([9., 4.])
        """
        with exact_precision():
            return solvers.eigsh(self._evaluator(max_bytes), k, method=method, tol=tol, max_iter=max_iter)

    # --- disk --------------------------------------------------------------------------------------------------

    def to_zarr(
        self,
        path: str | os.PathLike[str],
        *,
        client: Any = "local",
        workers: int | None = None,
        block: int | None = None,
        verify: bool = True,
        overwrite: bool = False,
        max_bytes: int | None = None,
        timeout: float = 300.0,
    ) -> StoreReport:
        """Write the whole matrix to disk as a Zarr array, block by block, on all processors or on a cluster.

        Every finished block is recorded with its checksum. After a crash, a killed worker or a full disk call again
        with the same kernel and path: what is recorded is not computed again. Read it with
        `pathlens.linops.from_zarr`, or with any Zarr library.

        Parameters
        ----------
        path
            Folder of the array. One that holds another kernel is refused.
        client
            ``"local"``: processes on this machine, started and stopped here, connected by pipes. ``"tcp://host:8786"``:
            a Dask cluster that is there; its workers must see the folder under the same path. A
            ``distributed.Client``: used as it is. False: no cluster, this process.
        workers
            Processes of ``"local"``; default: one per processor.
        block
            Edge of a block, which is one chunk of the array. Default: chosen from a measured tile so that a block takes
            about three seconds, fits the budget and leaves several for each worker. A store keeps its block size.
        verify
            Check the checksums of blocks found finished; damaged ones are computed again, with a `StoreWarning`.
        overwrite
            Discard what lies at the path.
        max_bytes
            Memory for each worker. Default: half of what is free here, shared by the workers.
        timeout
            Seconds without a sign of life after which a local process is replaced, and seconds that a Dask cluster
            without workers is given to get some. A block itself may take any time.

        Returns
        -------
        StoreReport

        Raises
        ------
        ClusterError
            Workers died repeatedly, or none came back in time. The store is unlocked and keeps its finished blocks.
        StoreError
            The disk is full or not writable, another process writes there, or the store holds another kernel.

        Notes
        -----
        Costs what `dense` costs, and n·m numbers on disk; blocks below the diagonal of a symmetric kernel are mirror
        images. A kernel is known by the SHA-256 of its expression and factors; where rows are recomputed or tiles come
        from a function, by 24 × 24 of its entries instead.

        Examples
        --------
        >>> import tempfile
        >>> K = GramSum.from_factors([[("x", torch.randn(10, 3))]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = K.to_zarr(f"{folder}/k.zarr", block=4, client=False)
        ...     again = K.to_zarr(f"{folder}/k.zarr")
        >>> first.blocks, first.computed, again.computed, again.kept
        (6, 6, 0, 6)
        """
        from pathlens.linops.stored import write_kernel

        return write_kernel(
            self,
            path,
            client=client,
            workers=workers,
            block=block,
            verify=verify,
            overwrite=overwrite,
            max_bytes=max_bytes,
            timeout=timeout,
        )

    # --- views -------------------------------------------------------------------------------------------------

    def plot(self, ax: Any = None, *, max_pixels: int = 800, **style: Any) -> Any:
        """Draw the kernel as an image and return the matplotlib axes.

        Parameters
        ----------
        ax
            Axes to draw on; None makes a new figure.
        max_pixels
            Above this many rows or columns, evenly spaced ones are shown, and the title says so.
        style
            Passed to ``imshow``.
        """
        if max_pixels < 1:
            raise OptionError(f"plot: max_pixels must be at least 1, got {max_pixels}.")
        n, m = self.shape
        rows, cols = (np.unique(np.linspace(0, size - 1, min(size, max_pixels)).round().astype(int)) for size in (n, m))
        drawn = self if (len(rows), len(cols)) == (n, m) else self[rows, cols]
        ax = get_axes(ax, "drawing a kernel")
        style = {"cmap": "viridis", "interpolation": "nearest", "aspect": "auto" if n != m else "equal", **style}
        image = ax.imshow(drawn.dense().cpu().numpy(), **style, extent=(-0.5, m - 0.5, n - 0.5, -0.5))
        ax.figure.colorbar(image, ax=ax, label="K")
        note = "" if drawn is self else f", every {n // len(rows)}th row"
        ax.set(xlabel="column", ylabel="row", title=f"{self.name}, {n} × {m}{note}")
        return ax

    def __repr__(self) -> str:
        n, m = self.shape
        node = expression(self)
        kind = "symmetric" if self.symmetric else "cross"
        lines = [
            f"{type(self).__name__} {self.name!r}: {n} × {m}, {self.dtype}, {self.device}, {kind}",
            f"  K     = {node.formula()}",
        ]
        grams = [leaf for leaf in node.leaves() if isinstance(leaf, Gram)]
        if grams:
            sides = {id(rows): rows for gram in grams for rows in (gram.left, gram.right)}.values()
            held = sum(rows.n * rows.r * rows.dtype.itemsize for rows in sides if not rows.streamed)
            streamed = sum(rows.streamed for rows in sides)
            lines.append(f"  ranks : {_ranks(node)}")
            lines.append(
                f"  held  : {human_bytes(held)} of factors"
                + (f"; {streamed} streamed, recomputed for every tile" if streamed else "")
            )
        try:
            evaluator = self._evaluator()
            plan = evaluator.plan()
            lines.append(
                f"  tiles : {plan.rows} × {plan.cols}, {human_bytes(plan.bytes)} of a budget of "
                f"{human_bytes(evaluator.budget)}, backend {evaluator.backend.name}; "
                f"dense is {human_bytes(n * m * self.dtype.itemsize)}"
            )
            lines.append(f"  K @ v : {plan_matmul(evaluator, 1)}")
        except (MemoryError, ImportError) as error:  # a repr must not raise
            lines.append(f"  tiles : {error}")
        return "\n".join(lines)


def _ranks(node: Node) -> str:
    seen: dict[str, int] = {}
    for term in node.summands():
        text = "∘".join(str(leaf.r) if isinstance(leaf, Gram) else "?" for leaf in term.leaves())
        seen[text] = seen.get(text, 0) + 1
    shown = [text if times == 1 else f"{text} (×{times})" for text, times in list(seen.items())[:4]]
    return " + ".join(shown) + (" + …" if len(seen) > 4 else "")


def expression(operator: KernelOperator) -> Node:
    """The expression of an operator: a `GramSum`'s own, or one leaf that asks the operator for tiles."""
    return operator.root if isinstance(operator, GramSum) else OperatorNode(operator)


class GramSum(KernelOperator):
    """K = Σ_t ∘_f F_{t,f} G_{t,f}ᵀ, lazily: what `from_factors` builds and what algebra on operators returns.

    Entries are K_ij = sᵢ·K̂_ij·sⱼ with factor rows of moderate norm and log₂ s in float64 per row, so that products of
    any number of factors neither overflow nor underflow; s is a power of two, which makes this exact. Factors are kept
    by reference, detached, and must not be changed while the operator lives.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    >>> gate = x > 0
    >>> K = GramSum.from_factors([[("x", x), ("gate", gate)], [Factor.ones(3)]])
    >>> K.dense()
    tensor([[2., 2., 1.],
            [2., 5., 3.],
            [1., 3., 5.]])
    >>> K @ torch.ones(3)
    tensor([ 5., 10.,  9.])
    >>> K[[0, 2], :1].dense()
    tensor([[2.],
            [1.]])
    """

    def __init__(
        self,
        root: Node,
        dtype: torch.dtype,
        device: torch.device,
        *,
        name: str = "K",
        max_bytes: int | None = None,
        backend: str = "auto",
    ) -> None:
        if max_bytes is not None:
            resolve_budget(max_bytes, device)  # refuses what is not a number of bytes
        self.root, self._name = root, name
        self.shape, self.symmetric = (root.n, root.m), root.symmetric
        self.dtype, self.device = dtype, device
        self.max_bytes = max_bytes
        self.backend = backends.check_name(backend)

    @classmethod
    def from_factors(
        cls,
        terms: Sequence[Sequence[Factor | tuple[Any, ...]]],
        *,
        dtype: torch.dtype | None = None,
        name: str = "K",
        max_bytes: int | None = None,
        backend: str = "auto",
    ) -> GramSum:
        """Build K = Σ_t ∘_f F_{t,f} G_{t,f}ᵀ.

        Parameters
        ----------
        terms
            One list of factors per term; a factor is a `Factor` or a tuple (name, left) or (name, left, right).
            ``left`` is (n, r), ``right`` (m, r); left out, or the same object, makes the factor symmetric. Either may
            be recomputed in row blocks: an object with ``n`` and ``rows(lo, hi)``, or ``RowStream(source)[key]``.
        dtype
            Needed only where all factors are bool (default: torch's default dtype). Bool factors take on the dtype of
            the others; float factors must all have the same.
        name
            For ``repr``.
        max_bytes
            Memory that may be allocated beyond the factors; None is half of what is free.
        backend
            ``"auto"``, ``"torch"``, ``"popcount"`` (0/1 factors on a CPU, needs numba), or ``"triton"`` and its other
            precisions (float32 on CUDA): `pathlens.linops.backends.known` lists them.

        Notes
        -----
        Checking the factors costs one pass over them, n·r each; a tensor given several times is checked once.

        Examples
        --------
        >>> h, delta = torch.randn(5, 3), torch.randn(5, 2)
        >>> K = GramSum.from_factors([[("h", h), ("delta", delta)]])
        >>> torch.allclose(K.dense(), (h @ h.T) * (delta @ delta.T), atol=1e-5)
        True
        """
        table = RowTable()
        summands: list[Node] = []
        grams: list[Gram] = []
        for t, term in enumerate(terms):
            factors = [item if isinstance(item, Factor) else _factor(item, t) for item in term]
            if not factors:
                raise EmptyDataError(f"GramSum: term {t} has no factors. Leave it out, or give Factor.ones(n).")
            row = [
                Gram(
                    f.name,
                    table.rows(f.left, f.name),
                    None if f.right is None or f.right is f.left else table.rows(f.right, f"{f.name} (right)"),
                )
                for f in factors
            ]
            grams.extend(row)
            summands.append(Hadamard(row) if len(row) > 1 else row[0])
        if not grams:
            raise EmptyDataError("GramSum: no terms. Give at least one list of factors.")
        found = _one_dtype(grams)
        if dtype is not None and dtype not in FLOATS:
            raise DTypeError(f"GramSum: dtype must be torch.float32 or torch.float64, got {dtype}.")
        if found is not None and dtype is not None and found != dtype:
            raise DTypeError(f"GramSum: dtype={dtype} was asked for, the factors are {found}. Convert the factors.")
        # one shape check over all Grams, so that the message names the two factors that disagree
        Sum(grams)
        final = found or dtype or torch.get_default_dtype()
        if final not in FLOATS:
            raise DTypeError(f"GramSum: torch's default dtype is {final}; pass dtype=torch.float32 or torch.float64.")
        root = Sum(summands) if len(summands) > 1 else summands[0]
        return cls(root, final, grams[0].left.device, name=name, max_bytes=max_bytes, backend=backend)

    @staticmethod
    def from_zarr(
        path: str | os.PathLike[str], *, verify: bool = False, max_bytes: int | None = None
    ) -> KernelOperator:
        """The operator on a store that `to_zarr` wrote; see `pathlens.linops.from_zarr`."""
        from pathlens.linops.stored import from_zarr

        return from_zarr(path, verify=verify, max_bytes=max_bytes)

    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows and columns given as slices or arrays, freshly computed, (a, b); not bounded by the budget."""
        n, m = self.shape
        return self._evaluator().index_tile(as_index(rows, n, "rows"), as_index(cols, m, "columns"))

    def diagonal(self) -> Tensor:
        """K_ii, (n,), at a cost of n·Σ 2r."""
        self._square("diagonal")
        unit, exponent = self._evaluator().log_diagonal()
        # |exponent| may exceed what one power of two holds; two halves cannot, for anything that fits float64
        half = torch.trunc(exponent / 2)
        out = (unit * torch.exp2(half) * torch.exp2(exponent - half)).to(self.dtype)
        if not bool(torch.isfinite(out).all()):
            raise overflow_error("the diagonal", self.dtype, float((exponent + unit.abs().log2()).max()))
        return out


def _factor(item: Any, term: int) -> Factor:
    if isinstance(item, tuple) and len(item) in (2, 3) and isinstance(item[0], str):
        return Factor(*item)
    raise OptionError(
        f"GramSum: term {term} contains a {type(item).__name__}, expected Factor(name, left) or "
        f"Factor(name, left, right), or such a tuple."
    )


def _one_dtype(grams: Sequence[Gram]) -> torch.dtype | None:
    """The dtype of the float factors, None if all are bool; mixtures of dtypes or devices raise."""
    typed = [gram for gram in grams if gram.left.dtype != torch.bool]
    for gram in typed[1:]:
        if gram.left.dtype != typed[0].left.dtype:
            raise DTypeError(
                f"GramSum: factor {gram.name!r} is {gram.left.dtype}, factor {typed[0].name!r} is "
                f"{typed[0].left.dtype}. Convert one; nothing is promoted silently."
            )
    for gram in grams[1:]:
        if gram.left.device != grams[0].left.device:
            raise DTypeError(
                f"GramSum: factor {gram.name!r} is on {gram.left.device}, factor {grams[0].name!r} on "
                f"{grams[0].left.device}. Move one with `.to(device)`."
            )
    return typed[0].left.dtype if typed else None
