"""Blocks of a kernel expression for workers: its identity, its factors in files, and its restriction to a block.

Workers get the expression, row streams and custom operators once, and read the factor rows of a block from ``.npy``
files.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.indexing import Index, as_numpy, compose, same_index
from pathlens.linops.factors import FactorRows, ResidentRows, StreamedRows
from pathlens.linops.nodes import Gram, Node, OperatorNode, Scaled, Select, Sum

_CHUNK = 1 << 24  # bytes that are hashed at once


@dataclass(frozen=True)
class FileRows:
    """A resident factor in a file, which replaces it in the expression of a worker."""

    name: str
    file: str
    n: int
    device: torch.device
    streamed: bool = False

    def take(self, index: Index) -> Tensor:
        """Rows of the factor, read from the file."""
        stored = np.load(self.file, mmap_mode="r", allow_pickle=False)
        return torch.from_numpy(np.array(stored[as_numpy(index)])).to(self.device)


def distinct_rows(node: Node) -> list[Any]:
    """The factors of an expression, each object once, in order.

    >>> from pathlens.linops import GramSum
    >>> x = torch.eye(2)
    >>> [rows.name for rows in distinct_rows(GramSum.from_factors([[("x", x), ("again", x)]]).root)]
    ['x']
    """
    grams = [leaf for leaf in node.leaves() if isinstance(leaf, Gram)]
    return list({id(rows): rows for gram in grams for rows in (gram.left, gram.right)}.values())


def _distinct_operators(node: Node) -> list[Any]:
    return list({id(leaf.operator): leaf.operator for leaf in node.leaves() if isinstance(leaf, OperatorNode)}.values())


def is_opaque(node: Node) -> bool:
    """Whether some of the expression cannot be hashed: streamed factors and custom operators."""
    return any(isinstance(leaf, OperatorNode) for leaf in node.leaves()) or any(r.streamed for r in distinct_rows(node))


def restrict(node: Node, rows: Index, cols: Index) -> Node:
    """The expression on some rows and columns; it holds only the factor rows that it needs.

    >>> from pathlens.linops import GramSum
    >>> K = GramSum.from_factors([[("x", torch.arange(8.0).reshape(4, 2))]])
    >>> restrict(K.root, range(2), range(1, 3)).m
    2
    """
    return _restrict(node, rows, cols, {})


def _restrict(node: Node, rows: Index, cols: Index, taken: dict[Any, FactorRows]) -> Node:
    if isinstance(node, Gram):
        if node.left.streamed or node.right.streamed:
            left = _resident(node.left)
            return Select(Gram(node.name, left, left if node.symmetric else _resident(node.right)), rows, cols)
        same = node.symmetric and same_index(rows, cols)
        return Gram(node.name, _take(node.left, rows, taken), None if same else _take(node.right, cols, taken))
    if isinstance(node, OperatorNode):
        return Select(node, rows, cols)
    if isinstance(node, Select):
        return _restrict(node.child, compose(node.rows, rows), compose(node.cols, cols), taken)
    children = [_restrict(child, rows, cols, taken) for child in node.children]
    return node.around(children[0]) if isinstance(node, Scaled) else type(node)(children)  # type: ignore[call-arg]


def _resident(rows: FactorRows | FileRows) -> FactorRows:
    return ResidentRows(rows.name, rows.take(range(rows.n))) if isinstance(rows, FileRows) else rows


def _take(rows: FactorRows, index: Index, taken: dict[Any, FactorRows]) -> FactorRows:
    key = (id(rows), index if isinstance(index, range) else index.cpu().numpy().tobytes())
    if key not in taken:
        # A copy is aligned to 64 bytes. On some processors other alignments round differently, and a block must have
        # the same bits on every worker.
        taken[key] = ResidentRows(rows.name, rows.take(index).clone())
    return taken[key]


def in_files(node: Node, folder: Path) -> Node:
    """The same expression with its resident factors in files under ``folder``, so that it is small to send."""
    folder.mkdir(parents=True, exist_ok=True)
    replaced: dict[int, Any] = {id(operator): operator for operator in _distinct_operators(node)}
    for k, rows in enumerate(distinct_rows(node)):
        if isinstance(rows, StreamedRows):
            rows.stream.forget()
            replaced[id(rows)] = rows
        else:
            file = folder / f"{k}.npy"
            np.save(file, rows.tensor.cpu().numpy(), allow_pickle=False)
            replaced[id(rows)] = FileRows(rows.name, str(file), rows.n, rows.device)
    return copy.deepcopy(node, replaced)  # copies the nodes, and takes rows and operators from `replaced`


def digest(node: Node) -> str:
    """SHA-256 of the expression and of every resident factor. Names of factors do not count."""
    found = hashlib.sha256()
    factors, operators = distinct_rows(node), _distinct_operators(node)
    for rows in factors:
        found.update(f"{'stream' if rows.streamed else 'rows'} {rows.n} {rows.r} {rows.dtype};".encode())
        if not rows.streamed:
            step = max(_CHUNK // (rows.r * rows.dtype.itemsize), 1)
            for lo in range(0, rows.n, step):
                found.update(np.ascontiguousarray(rows.tensor[lo : lo + step].cpu().numpy()).data)
    for operator in operators:
        found.update(f"leaf {operator.name} {operator.shape} {operator.dtype} {operator.symmetric};".encode())
    numbers = {id(thing): k for among in (factors, operators) for k, thing in enumerate(among)}
    found.update(_canonical(node, numbers).encode())
    return found.hexdigest()


def _canonical(node: Node, numbers: dict[int, int]) -> str:
    """The expression as text, with numbers in place of factors and operators."""
    if isinstance(node, Gram):
        return f"('gram',{numbers[id(node.left)]},{numbers[id(node.right)]})"
    if isinstance(node, OperatorNode):
        return f"('leaf',{numbers[id(node.operator)]})"
    children = ",".join(_canonical(child, numbers) for child in node.children)
    if isinstance(node, Scaled):
        return f"('scale',{node.mantissa!r},{2 * node.half},{children})"
    if isinstance(node, Select):
        return f"('select',{_index_text(node.rows)},{_index_text(node.cols)},{children})"
    return f"({'sum' if isinstance(node, Sum) else 'hadamard'!r},({children}))"


def _index_text(index: Index) -> str:
    return repr(index) if isinstance(index, range) else hashlib.sha256(index.cpu().numpy().tobytes()).hexdigest()
