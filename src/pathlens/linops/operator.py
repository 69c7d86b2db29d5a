"""Lazy kernel operators: the base class `KernelOperator`, `GramSum` for sums of products of Grams, and `nystrom`.

Networks are not known here; `pathlens.kernels` builds operators from them.
"""

from __future__ import annotations

import math
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
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
    SolverError,
)
from pathlens.indexing import as_index
from pathlens.linops import backends, counts, solvers
from pathlens.linops.backends import new_tile
from pathlens.linops.evaluate import Evaluator, overflow_error, true_number
from pathlens.linops.factors import FLOATS, Factor, ResidentRows, RowTable, require_alike
from pathlens.linops.matmul import matmul, plan_matmul
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Select, Sum, first_name
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar

if TYPE_CHECKING:
    from pathlens.stores import StoreReport


class KernelOperator(ABC):
    """A lazy n × m kernel matrix whose tiles are computed on demand. Not differentiable.

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
        Memory that may be allocated in addition to the factors; None is half of the free memory.
    backend
        ``"auto"``, ``"torch"``, ``"popcount"``, or ``"triton"`` and its other precisions.
    tile_buffers
        Tile-sized arrays that `tile` holds at once, including its result.
    scaled
        Whether a symmetric operator is scaled by its diagonal in expressions, which keeps products in range. False if
        the diagonal costs as much as all entries.

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
    __array_ufunc__ = None  # so that NumPy numbers leave `number * K` to __rmul__
    __iter__ = None  # Python would otherwise iterate over K[0], K[1], …

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
        """Name in messages and in ``repr``."""
        return getattr(self, "_name", type(self).__name__)

    def _evaluator(self, max_bytes: int | None = None) -> Evaluator:
        budget = resolve_budget(self.max_bytes if max_bytes is None else max_bytes, self.device)
        node = expression(self)
        backend = backends.load(backends.choose(self.backend, node, self.device, self.dtype))
        return Evaluator(node, self.dtype, self.device, backend, budget)

    def dense(self, *, max_bytes: int | None = None) -> Tensor:
        """The whole matrix, (n, m), exact up to rounding; exactly symmetric if the kernel is.

        Parameters
        ----------
        max_bytes
            Budget for the result and its scratch space; a `BudgetError` is raised if they do not fit.

        Notes
        -----
        Costs n·m·Σ 2r operations, half of that if symmetric. Entries that overflow the dtype raise a `ScaleError`; for
        path counts of any size use `exact_counts`.

        Examples
        --------
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> GramSum.from_factors([[("x", x), ("x", x)]]).dense()
        tensor([[25.,  4.],
                [ 4.,  1.]])
        """
        return self._evaluator(max_bytes).dense()

    exact_counts = counts.exact_counts

    def tiles(self, *, upper: bool = False, max_bytes: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Iterate over the tiles of the matrix as (rows, columns, tile of shape (a, b)); each tile is a new tensor.

        Parameters
        ----------
        upper
            Only tiles on and above the diagonal; symmetric kernels only.

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
        """(t, e) with trace = t · 2^e and t moderate or zero."""
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
        return true_number(*self._scaled_trace(), "the trace")

    def matmul(self, v: Tensor, *, max_bytes: int | None = None) -> Tensor:
        """K @ V for V of shape (m,) or (m, k), by tiles or by factors, whichever takes fewer operations.

        A term A Aᵀ ∘ B Bᵀ costs 2(n+m)·k·r₁r₂ by factors and n·m·(2r₁ + 2r₂ + 2k) by tiles.
        """
        return matmul(self._evaluator(max_bytes), v)

    __matmul__ = matmul

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`dense` for functions that take NumPy arrays, such as ``plt.imshow(K)``."""
        if copy is False:
            raise ValueError("a kernel has no array to share without a copy. Call np.asarray(K).")
        return np.asarray(self.dense().cpu().numpy(), dtype=dtype)

    def __getitem__(self, key: Any) -> Any:
        """K[rows, cols] is lazy; K[i, j] with two integers is a number. A single integer keeps its axis."""
        n, m = self.shape
        pair = key if isinstance(key, tuple) else (key, slice(None))
        if len(pair) != 2 or any(part is Ellipsis or part is None for part in pair):
            raise RowIndexError(f"K[...] takes rows and columns, got {key!r}. Write K[rows, cols].")
        rows = as_index(pair[0], n, "rows")
        cols = rows if pair[0] is pair[1] and n == m else as_index(pair[1], m, "columns")
        if all(isinstance(part, (int, np.integer)) for part in pair):
            evaluator = self._evaluator()
            left, right = evaluator.side(rows, False, False), evaluator.side(cols, True, False)
            unit = float(evaluator.unit_tile(left, right))
            return true_number(unit, int(left.exponent + right.exponent), f"entry {pair}")
        return self._derive(Select(expression(self), rows, cols))

    # --- algebra -----------------------------------------------------------------------------------------------

    def _derive(self, node: Node, *others: KernelOperator) -> GramSum:
        operators = (self, *others)
        budgets = [op.max_bytes for op in operators if op.max_bytes is not None]
        chosen = sorted({op.backend for op in operators} - {"auto"})
        if len(chosen) > 1:
            raise OptionError(
                f"the operators have different backends, {' and '.join(chosen)}. Set one: K.with_options(backend=…)."
            )
        return GramSum(
            node, self.dtype, self.device, max_bytes=min(budgets, default=None), backend=chosen[0] if chosen else "auto"
        )

    def _combine(self, kind: type[Sum] | type[Hadamard], other: KernelOperator, what: str) -> GramSum:
        nodes = expression(self), expression(other)
        remedy = "Convert the factors of one; nothing is promoted silently."
        require_alike(what, (first_name(nodes[0]), first_name(nodes[1])), self, other, remedy)
        return self._derive(kind(nodes), other)

    def __add__(self, other: Any) -> GramSum:
        if isinstance(other, numbers.Number) and other == 0:  # so that sum([K1, K2]) works
            return self._derive(expression(self))
        if not isinstance(other, KernelOperator):
            return NotImplemented
        return self._combine(Sum, other, "K + K")

    __radd__ = __add__

    def __sub__(self, other: Any) -> GramSum:
        return self + (-1.0) * other if isinstance(other, KernelOperator) else NotImplemented

    def __neg__(self) -> GramSum:
        return self * -1.0

    def __mul__(self, other: Any) -> GramSum:
        """Entrywise (Hadamard) product with another kernel, or scaling by a number."""
        if isinstance(other, KernelOperator):
            return self._combine(Hadamard, other, "K * K")
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
        """The kernel scaled to a fixed trace or diagonal; works for numbers of any size.

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
                f"normalised: the trace is {trace:g}·2^{exponent}, expected a positive one. Kernels of zero rows and "
                "differences of kernels cannot be normalised."
            )
        n = self.shape[0]
        scaled = self._derive(Scaled((1 if to == "trace" else n) / trace, -exponent, expression(self)))
        if to != "diagonal":
            return scaled
        unit, exponent_i = scaled._evaluator().log_diagonal()
        if bool((unit < 0).any()):
            raise ScaleError(
                "normalised: the diagonal has negative entries. Cosines are defined for diagonals ≥ 0 only."
            )
        column = torch.where(unit > 0, 1 / unit.sqrt(), 0.0)
        rest = -exponent_i / 2
        factors: list[Node] = [expression(scaled)]
        # Rows may differ by more than the range of the dtype: further powers of two become more rank-one factors.
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

    solve = solvers.solve
    eigsh = solvers.eigsh

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

        Every finished block is recorded with its checksum. If interrupted, call it again with the same kernel and path:
        finished blocks are not computed again. Read the array with `pathlens.linops.from_zarr` or any Zarr library.

        Parameters
        ----------
        path
            Folder of the array. A folder with another kernel raises a `StoreError`.
        client
            ``"local"``: processes on this machine, which are started and stopped here and connected by pipes.
            ``"tcp://host:8786"``: a running Dask cluster; its workers must see the folder under the same path. A
            ``distributed.Client``: that client. False: no cluster, this process only.
        workers
            Processes of ``"local"``; default: one per processor.
        block
            Edge of a block, which is one chunk of the array. Default: chosen by timing a tile, so that a block takes
            about three seconds, fits the budget, and every worker gets several blocks. An existing array keeps its
            block size.
        verify
            Verify the checksums of finished blocks; damaged blocks are computed again, with a `StoreWarning`.
        overwrite
            Delete an existing array at the path.
        max_bytes
            Memory for each worker. Default: half of the free memory, divided by the number of workers.
        timeout
            Seconds without a heartbeat after which a local process is replaced, and seconds to wait for workers of a
            Dask cluster. The time of a block is not limited.

        Returns
        -------
        StoreReport

        Raises
        ------
        ClusterError
            Workers died repeatedly, or no worker responded in time. The finished blocks are kept.
        StoreError
            The disk is full or not writable, another process is writing the array, or it holds another kernel.

        Notes
        -----
        Costs as much as `dense`, and n·m numbers on disk; blocks below the diagonal of a symmetric kernel are
        transposed copies. A kernel is identified by the SHA-256 of its expression and factors; streamed factors and
        custom tiles cannot be hashed and are identified by 24 × 24 sampled entries.

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
        from pathlens.linops.stored import prepare
        from pathlens.stores import write_store

        count = 1 if client is False else workers
        return write_store(
            Path(path),
            *prepare(self, block, count, max_bytes),
            client=client,
            workers=workers,
            verify=verify,
            overwrite=overwrite,
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
            With more rows or columns than this, evenly spaced ones are shown, which the title states.
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
    """The expression of an operator: that of a `GramSum`, or one node with the operator."""
    return operator.root if isinstance(operator, GramSum) else OperatorNode(operator)


class GramSum(KernelOperator):
    """A lazy sum K = Σ_t ∘_f F_{t,f} G_{t,f}ᵀ, as built by `from_factors` and by algebra on operators.

    Entries are K_ij = sᵢ·K̂_ij·sⱼ with factor rows of moderate norm and log₂ s in float64 per row, so that products of
    any number of factors neither overflow nor underflow; s is a power of two, which makes this exact. Factors are
    detached and kept by reference; they must not be modified while the operator is in use.

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
            resolve_budget(max_bytes, device)  # raises if it is not a number of bytes
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
            ``left`` is (n, r), ``right`` (m, r); without ``right``, or with the same object, the factor is symmetric.
            Either may be recomputed in row blocks: an object with ``n`` and ``rows(lo, hi)``, or
            ``RowStream(source)[key]``.
        dtype
            Only if all factors are bool (default: torch's default dtype). Bool factors are converted to the dtype of
            the others; all float factors must have the same dtype.
        name
            For ``repr``.
        max_bytes
            Memory that may be allocated in addition to the factors; None is half of the free memory.
        backend
            ``"auto"``, ``"torch"``, ``"popcount"`` (0/1 factors on a CPU, needs numba), or ``"triton"`` and its other
            precisions (float32 on CUDA): `pathlens.linops.backends.known` lists them.

        Notes
        -----
        Checking a factor costs one pass, n·r; a tensor that is given several times is checked once.

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
                raise EmptyDataError(f"GramSum: term {t} has no factors. Remove it, or give Factor.ones(n).")
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
        if found is not None and dtype is not None and found != dtype:
            raise DTypeError(f"GramSum: dtype={dtype} was given, the factors are {found}. Convert the factors.")
        Sum(grams)  # checks the shapes of all Grams, so that the message names the two factors that differ
        final = found or dtype or torch.get_default_dtype()
        if final not in FLOATS:
            raise DTypeError(f"GramSum: dtype must be torch.float32 or torch.float64, got {final}. Pass dtype=….")
        root = Sum(summands) if len(summands) > 1 else summands[0]
        return cls(root, final, grams[0].left.device, name=name, max_bytes=max_bytes, backend=backend)

    def tile(self, rows: Any, cols: Any) -> Tensor:
        """K on rows and columns given as slices or arrays, (a, b), in a new tensor; not limited by the budget."""
        evaluator = self._evaluator()
        left = evaluator.side(as_index(rows, self.shape[0], "rows"), False, True)
        right = evaluator.side(as_index(cols, self.shape[1], "columns"), True, True)
        return evaluator.tile(left, right, new_tile(len(left), len(right), self.dtype, self.device))

    def diagonal(self) -> Tensor:
        """K_ii, (n,), at a cost of n·Σ 2r."""
        self._square("diagonal")
        unit, exponent = self._evaluator().log_diagonal()
        # 2^exponent may overflow although the entry does not; its square root does not
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
    """The dtype of the float factors, None if all are bool; raises if dtypes or devices differ."""
    typed = [gram for gram in grams if gram.left.dtype != torch.bool]
    for gram in typed[1:]:
        names = f"factor {gram.name!r}", f"factor {typed[0].name!r}"
        require_alike("GramSum", names, gram.left, typed[0].left, "Convert one; nothing is promoted silently.")
    for gram in grams[1:]:
        if gram.left.device != grams[0].left.device:
            raise DTypeError(
                f"GramSum: factor {gram.name!r} is on {gram.left.device}, factor {grams[0].name!r} on "
                f"{grams[0].left.device}. Move one with `.to(device)`."
            )
    return typed[0].left.dtype if typed else None


def nystrom(kernel: KernelOperator, rank: int, *, seed: int = 0) -> GramSum:
    """Nyström approximation of a positive semi-definite kernel: one Gram matrix of the given rank.

    K ≈ KΩ (ΩᵀKΩ)⁻¹ ΩᵀK for `rank` random directions Ω. It is never above K, and exact if K has this rank.

    Parameters
    ----------
    kernel
        Symmetric.
    rank
        1 … n. Costs one product K @ V with so many columns.
    seed
        Of the random directions.

    Examples
    --------
    >>> K = GramSum.from_factors([[("x", torch.randn(50, 3, dtype=torch.float64))]])
    >>> torch.allclose(nystrom(K, 3).dense(), K.dense())
    True
    """
    n = kernel._square("nystrom")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= n:
        raise OptionError(f"nystrom: rank must be an integer from 1 to n = {n}, got {rank!r}.")
    if not kernel.symmetric:
        raise SolverError("nystrom needs a symmetric kernel; this one has different factors on its two sides.")
    try:
        vectors, values = solvers.sketch(kernel._evaluator(), rank, seed)
    except torch.linalg.LinAlgError:
        raise SolverError(f"nystrom: the {n} × {n} kernel is not positive semi-definite. Add a ridge to it.") from None
    factor = Factor(f"nystrom[{rank}]", (vectors * values.sqrt()).to(kernel.dtype))
    return GramSum.from_factors([[factor]], max_bytes=kernel.max_bytes)
