"""A kernel expression taken apart: what it is made of, its fingerprint, and any block of it rebuilt elsewhere.

Workers get the shape of the expression, row streams and custom operators once, and read the rows of resident factors
that a block needs from plain ``.npy`` files. Where blocks are written is not known here. May import only linops.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pathlens.indexing import Index, as_tensor, compose, same_index
from pathlens.linops.factors import FactorRows, ResidentRows, StreamedRows
from pathlens.linops.nodes import Gram, Hadamard, Node, OperatorNode, Scaled, Select, Sum

if TYPE_CHECKING:
    from pathlens.linops.operator import KernelOperator

Spec: TypeAlias = tuple[Any, ...]  # ("gram", name, left, right), ("sum", children), …: see `take_apart`
_CHUNK = 1 << 24  # bytes hashed together


@dataclass(frozen=True)
class FileRows:
    """A resident factor that lies in a file; stands for it in a worker."""

    name: str
    file: str
    n: int
    device: torch.device
    streamed: bool = False

    def take(self, index: Index) -> Tensor:
        """The rows asked for, read from the file."""
        stored = np.load(self.file, mmap_mode="r", allow_pickle=False)
        chosen = (
            slice(index.start, index.stop)
            if isinstance(index, range) and index.step == 1
            else (as_tensor(index, torch.device("cpu")).numpy())
        )
        return torch.from_numpy(np.array(stored[chosen])).to(self.device)


@dataclass
class Parts:
    """The pieces of an expression.

    Attributes
    ----------
    spec
        Its shape: nested tuples with numbers of rows and leaves in place of the objects.
    rows
        Distinct factor matrices: resident, streamed, or in files.
    leaves
        Operators that make their own tiles.

    Examples
    --------
    >>> from pathlens.linops import GramSum
    >>> K = GramSum.from_factors([[("x", torch.arange(8.0).reshape(4, 2))]])
    >>> take_apart(K.root).block(range(2), range(1, 3))
    <pathlens.linops.nodes.Gram object at ...>
    """

    spec: Spec
    rows: list[Any]
    leaves: list[KernelOperator]
    _nodes: dict[int, OperatorNode] = field(default_factory=dict, repr=False)

    @property
    def opaque(self) -> bool:
        """Whether some of it is known only by what it returns."""
        return bool(self.leaves) or any(rows.streamed for rows in self.rows)

    def block(self, rows: Index, cols: Index) -> Node:
        """The expression on some rows and columns, holding only the factor rows that it needs."""
        return self._build(self.spec, rows, cols, {})

    def _build(self, spec: Spec, rows: Index, cols: Index, taken: dict[Any, FactorRows]) -> Node:
        kind = spec[0]
        if kind == "gram":
            _, name, left, right = spec
            if self.rows[left].streamed or self.rows[right].streamed:
                return Select(Gram(name, self._whole(left), self._whole(right)), rows, cols)
            here = self._taken(left, rows, taken)
            same = left == right and same_index(rows, cols)
            return Gram(name, here, None if same else self._taken(right, cols, taken))
        if kind == "leaf":
            # one node per process: it keeps the diagonal, which may be as dear as a block
            node = self._nodes.setdefault(spec[1], OperatorNode(self.leaves[spec[1]]))
            return Select(node, rows, cols)
        if kind == "select":
            return self._build(spec[3], compose(spec[1], rows), compose(spec[2], cols), taken)
        if kind == "scale":
            return Scaled(spec[1], spec[2], self._build(spec[3], rows, cols, taken))
        children = [self._build(child, rows, cols, taken) for child in spec[1]]
        return Sum(children) if kind == "sum" else Hadamard(children)

    def _taken(self, k: int, index: Index, taken: dict[Any, FactorRows]) -> FactorRows:
        key = (k, index) if isinstance(index, range) else (k, index.cpu().numpy().tobytes())
        if key not in taken:
            # in memory of torch's own, which begins at a multiple of 64: on some processors rows that lie otherwise
            # round otherwise, and a block is to have the same bits whoever computes it
            taken[key] = ResidentRows(self.rows[k].name, self.rows[k].take(index).clone())
        return taken[key]

    def _whole(self, k: int) -> FactorRows:
        rows = self.rows[k]
        return rows if isinstance(rows, FactorRows) else ResidentRows(rows.name, rows.take(range(rows.n)))

    def in_files(self, folder: Path) -> Parts:
        """The same with resident factors in files under ``folder``, so that little has to be sent to workers."""
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[Any] = []
        for k, one in enumerate(self.rows):
            if one.streamed:
                one.stream.forget()
                rows.append(one)
            else:
                file = folder / f"{k}.npy"
                np.save(file, one.tensor.cpu().numpy(), allow_pickle=False)
                rows.append(FileRows(one.name, str(file), one.n, one.device))
        return replace(self, rows=rows, _nodes={})

    def digest(self) -> str:
        """SHA-256 of the expression and of every resident factor. Names of factors do not count."""
        found = hashlib.sha256()
        for rows in self.rows:
            found.update(f"{'stream' if rows.streamed else 'rows'} {rows.n} {rows.r} {rows.dtype};".encode())
            if not rows.streamed:
                step = max(_CHUNK // (rows.r * rows.dtype.itemsize), 1)
                for lo in range(0, rows.n, step):
                    found.update(np.ascontiguousarray(rows.tensor[lo : lo + step].cpu().numpy()).data)
        for leaf in self.leaves:
            found.update(f"leaf {leaf.name} {leaf.shape} {leaf.dtype} {leaf.symmetric};".encode())
        found.update(_canonical(self.spec).encode())
        return found.hexdigest()


def _canonical(spec: Any) -> str:
    if isinstance(spec, Tensor):
        return hashlib.sha256(spec.cpu().numpy().tobytes()).hexdigest()
    if isinstance(spec, tuple):
        inner = spec[:1] + spec[2:] if spec[:1] == ("gram",) else spec
        return "(" + ",".join(_canonical(part) for part in inner) + ")"
    return repr(spec)


def take_apart(node: Node) -> Parts:
    """The pieces of an expression; nothing is copied.

    >>> from pathlens.linops import GramSum
    >>> x = torch.eye(2)
    >>> take_apart((2 * GramSum.from_factors([[("x", x), ("y", x)]])).root).spec
    ('scale', 0.5, 2, ('hadamard', (('gram', 'x', 0, 0), ('gram', 'y', 0, 0))))
    """
    rows: list[Any] = []
    leaves: list[KernelOperator] = []
    seen: dict[int, int] = {}

    def number(thing: Any, among: list[Any]) -> int:
        if id(thing) not in seen:
            seen[id(thing)] = len(among)
            among.append(thing)
        return seen[id(thing)]

    def visit(node: Node) -> Spec:
        if isinstance(node, Gram):
            return ("gram", node.name, number(node.left, rows), number(node.right, rows))
        if isinstance(node, OperatorNode):
            return ("leaf", number(node.operator, leaves))
        if isinstance(node, Scaled):
            return ("scale", node.mantissa, 2 * node.half, visit(node.child))
        if isinstance(node, Select):
            return ("select", node.rows, node.cols, visit(node.child))
        assert isinstance(node, (Sum, Hadamard))
        return ("sum" if isinstance(node, Sum) else "hadamard", tuple(visit(child) for child in node.children()))

    spec = visit(node)
    assert all(isinstance(one, (ResidentRows, StreamedRows)) for one in rows)
    return Parts(spec, rows, leaves)
