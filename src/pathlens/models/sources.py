"""Gate sources: where the pre-activations of the gates come from.

Each maps a batch to one pre-activation per site; the network applies the gate function.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.indexing import is_count


class GateSource(nn.Module, ABC):
    """Pre-activations of all sites: `forward(x, rows) -> (q_1, …, q_L)`."""

    linear: bool = False  #: every pre-activation is affine in x (in eval mode), so every gate is a half-space

    @abstractmethod
    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]: ...


class GraphSource(GateSource):
    """A copy of the template up to its last site.

    `activation` is the unit at its inner sites: "linear", "relu" or "soft"; with "linear" the source is linear.
    """

    def __init__(self, network: fx.GraphModule, sites: int, activation: str) -> None:
        super().__init__()
        self.network = network
        self.count = sites
        self.activation_name = activation
        self.linear = activation == "linear"

    def run(self, x: Tensor, activation: Callable[[Tensor, float], Tensor]) -> tuple[Tensor, ...]:
        """Pre-activations, and after them the tensor at the value network's entry where there is one."""
        return self.network(x, *(activation,) * self.count)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        raise OptionError("GraphSource: the network chooses its hidden units. Call run(x, activation).")


class ShallowSource(GateSource):
    """Each gate reads x directly: q_l = V_l x + b_l (DLGN-SF)."""

    linear = True

    def __init__(self, inputs: int, widths: Sequence[int], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, w, bias=bias) for w in widths)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


class QuadraticSource(GateSource):
    """Each gate is a quadratic function of x: q = Σ_r s_r (v_r·x)² + u·x + b, with `rank` squares a unit."""

    def __init__(self, inputs: int, widths: Sequence[int], bias: bool, rank: int) -> None:
        super().__init__()
        if not is_count(rank):
            raise OptionError(f"Quadratic gates: rank must be a positive integer, got {rank!r}. Try rank=1.")
        self.rank = rank
        self.linear_part = nn.ModuleList(nn.Linear(inputs, w, bias=bias) for w in widths)
        self.squares = nn.ModuleList(nn.Linear(inputs, w * rank, bias=False) for w in widths)
        self.signs = nn.ModuleList(_Signs(w, rank) for w in widths)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        out = []
        for u, v, s in zip(self.linear_part, self.squares, self.signs):
            squares = v(x).unflatten(-1, (-1, self.rank)).square()
            out.append(u(x) + s(squares))
        return tuple(out)


class _Signs(nn.Module):
    """Σ_r s_r z_r per unit, s drawn from U(±1)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every coefficient from U(−1, 1)."""
        nn.init.uniform_(self.weight, -1.0, 1.0)

    def forward(self, z: Tensor) -> Tensor:
        return (z * self.weight).sum(-1)


class TableSource(GateSource):
    """A table of Bernoulli(μ) bits per example and unit: fixed random gates (DGN-FRG).

    `net(x, rows=idx)` passes the numbers of the examples in a batch; without it the batch is the whole table in order.
    """

    def __init__(self, examples: int, widths: Sequence[int], probability: float) -> None:
        super().__init__()
        if not 0 < probability <= 1:
            raise OptionError(
                f"Gate table: the probability of an open gate must be in (0, 1], got {probability}. Try 0.5."
            )
        if not is_count(examples):
            raise ShapeError(f"Gate table: examples must be a positive integer, got {examples!r}. Pass len(X).")
        self.examples, self.probability = int(examples), float(probability)
        self.tables = nn.ModuleList(_Bits(examples, w, probability) for w in widths)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        tables = [layer.bits for layer in self.tables if isinstance(layer, _Bits)]
        if rows is None:
            if x.shape[0] != tables[0].shape[0]:
                raise ShapeError(
                    f"Gate table: it holds {tables[0].shape[0]} examples and the batch has {x.shape[0]}. "
                    "Pass their numbers: net(x, rows=indices)."
                )
            return tuple(t.to(x.dtype) for t in tables)
        rows = torch.as_tensor(rows, device=tables[0].device)
        if rows.dtype in (torch.bool, torch.uint8) or rows.is_floating_point() or rows.shape != x.shape[:1]:
            raise ShapeError(
                f"Gate table: rows must hold one integer for each of the {x.shape[0]} inputs, got shape "
                f"{tuple(rows.shape)} of {rows.dtype}. Pass the example numbers of this batch."
            )
        return tuple(t[rows].to(x.dtype) for t in tables)


class _Bits(nn.Module):
    """One layer's table of gate bits; `reset_parameters` redraws them, as for weights."""

    bits: Tensor

    def __init__(self, examples: int, width: int, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.register_buffer("bits", torch.empty(examples, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every bit from Bernoulli(μ)."""
        self.bits.bernoulli_(self.probability)


class FunctionSource(GateSource):
    """Gates given by the user as a function of x (GDLN): `function(x)` returns one score per unit and site.

    A function that is a module is copied, so that the user's own keeps its mode and its gradients.
    """

    def __init__(self, function: Callable[[Tensor], Tensor | Sequence[Tensor]], widths: Sequence[int]) -> None:
        super().__init__()
        if not callable(function):
            raise OptionError(f"Gates must be a function of x that returns scores, got {type(function).__name__}.")
        self.function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
        self.widths = tuple(widths)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        out = self.function(x.clone())  # a user's function may edit what it reads; the values read x too
        scores = (out,) if isinstance(out, Tensor) else tuple(out)
        expected = [(x.shape[0], w) for w in self.widths]
        if [tuple(s.shape) for s in scores] != expected:
            raise ShapeError(
                f"Gate function: expected scores of shapes {expected}, got {[tuple(s.shape) for s in scores]}. "
                "Return one (n, width) tensor per hidden layer."
            )
        return tuple(s.to(x.dtype) for s in scores)
