"""`GatedNetwork`, the class of every model: a value network whose units are switched by a gate source.

A model is a choice of gate source, gate function, value input and what is trained. Networks are built by `gated_twin`
and by the named constructors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pathlens.errors import CheckpointError, OptionError, ShapeError, unknown_name
from pathlens.models.gates import Gate, Hard, Open, leak, make_gate
from pathlens.models.initialisation import Init
from pathlens.models.sources import FunctionSource, GateSource, GraphSource, TableSource
from pathlens.models.tracing import Site, apply_site

_TRAINED = ("values", "gates", "both")


class GatedNetwork(nn.Module):
    """A value network whose hidden units are multiplied by gates.

    h_l = g_l ⊙ (U_l h_{l−1}),  g_l = G(q_l),  f = U_L h_{L−1}, with q from the gate source (or from the unit itself).

    Attributes
    ----------
    values : torch.fx.GraphModule
        The value network; its parameters have the template's names.
    source : GateSource or None
        Where gates come from; None if each unit reads its own pre-activation (ReLU) or all gates are open (DLN).
    gate : Gate
        The gate function.
    sites : tuple of Site
        Every ReLU of the template, in order of execution.
    value_input : {"x", "ones"}
        "ones" makes the network piecewise constant on the cells of its gates.
    sizes : dict or None
        Widths and biases of a network from a named constructor, whose layers follow from them; None for a twin.
    """

    sizes: dict[str, Any] | None = None

    def __init__(
        self,
        kind: str,
        values: fx.GraphModule,
        source: GateSource | None,
        gate: Gate,
        sites: tuple[Site, ...],
        *,
        value_input: str = "x",
        enters_late: bool = False,
        trained: str = "both",
        gates_from: str = "independent",
        init: Init | None = None,
    ) -> None:
        super().__init__()
        if trained not in _TRAINED:
            raise unknown_name("choice of what is trained", trained, _TRAINED)
        if value_input not in ("x", "ones"):
            raise unknown_name("value input", value_input, ("x", "ones"))
        if trained == "gates" and (source is None or (gate.hard and not hasattr(gate, "beta"))):
            raise OptionError(
                "Only the gates are to be trained, but hard gates have no gradient. "
                "Use a separate gate network with gate='soft' or 'straight_through'."
            )
        self.kind = kind
        self.values = values
        self.source = source
        self.gate = gate
        self.sites = sites
        self.value_input = value_input
        self.trained = trained
        self.gates_from = gates_from
        self.init = init or Init()
        self._enters_late = enters_late
        values.requires_grad_(trained != "gates")
        if source is not None:
            source.requires_grad_(trained != "values")

    def train(self, mode: bool = True) -> GatedNetwork:
        """Train or eval mode; frozen gates stay in eval mode, so that their batch statistics do not change."""
        super().train(mode)
        if self.source is not None and self.trained == "values":
            self.source.eval()
        return self

    # --- computing ---------------------------------------------------------------------------------------------

    @property
    def _inner_gate(self) -> Gate:
        """The gate of the hidden units inside the gate source."""
        assert isinstance(self.source, GraphSource)
        return {"linear": _OPEN, "relu": _HARD, "soft": self.gate}[self.source.activation_name]

    def _scores(self, x: Tensor, rows: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Pre-activations of the gates, and the tensor whose shape the constant value input takes."""
        assert self.source is not None
        if isinstance(self.source, GraphSource):
            out = self.source.run(x, self._inner_gate.gated)
            return (out[:-1], out[-1]) if self._enters_late else (out, None)
        return self.source(x, rows), None

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Output f(x), shape (n, c). `rows` are example numbers, needed only where gates come from a table."""
        if self.source is None:
            return self.values(self._value_input(x), *(self.gate.gated,) * len(self.sites))
        scores, entry = self._scores(x, rows)
        gates = [leak(self.gate(q), site.slope) for q, site in zip(scores, self.sites)]
        return self.values(self._value_input(x, entry), *gates)

    def _value_input(self, x: Tensor, entry: Tensor | None = None) -> Tensor:
        return x if self.value_input == "x" else torch.ones_like(x if entry is None else entry)

    def value_reads(self, x: Tensor) -> Tensor:
        """The input of the value network: x itself, or ones of that shape for a piecewise-constant network."""
        return self._value_input(x, self._scores(x, None)[1] if self._enters_late else None)

    def preactivations(self, x: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        """The pre-activation of each gate, by site; the gate is on where it is positive."""
        if self.source is None:
            found: list[Tensor] = []

            def unit(q: Tensor, slope: float) -> Tensor:
                found.append(q)
                return self.gate.gated(q, slope)

            self.values(self._value_input(x), *(unit,) * len(self.sites))
            scores = tuple(found)
        else:
            scores, _ = self._scores(x, rows)
        return {site.name: q for site, q in zip(self.sites, scores)}

    def unit_shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Shape of the units of every site, for rows like the first of x; rows must stay the first dimension."""
        with torch.no_grad():
            one, two = (self.preactivations(x[:1].expand(n, *x.shape[1:])) for n in (1, 2))
        for site, q in one.items():
            if (len(q), len(two[site])) != (1, 2):
                raise ShapeError(
                    f"The gates at '{site}' have shape {tuple(two[site].shape)} for two inputs. Rows must stay the "
                    "first dimension inside the network."
                )
        return {site: tuple(q.shape[1:]) for site, q in one.items()}

    def gates(self, x: Tensor, rows: Tensor | None = None, *, hard: bool = False) -> dict[str, Tensor]:
        """Gate values by site.

        Parameters
        ----------
        hard : bool
            q > 0 instead of the network's gate function; open gates remain open.
        """
        function = _HARD if hard and not isinstance(self.gate, Open) else self.gate
        scores = self.preactivations(x, rows)
        return {site.name: leak(function(scores[site.name]), site.slope) for site in self.sites}

    # --- changing ----------------------------------------------------------------------------------------------

    def with_gate(self, gate: str | Gate, *, beta: float = 4.0, epsilon: float = 0.0) -> GatedNetwork:
        """A copy with another gate function and the same weights: `net.with_gate("hard")`."""
        clone = copy.deepcopy(self)
        like = next(itertools.chain(self.parameters(), self.gate.buffers()), torch.empty(0))
        clone.gate = make_gate(gate, beta, epsilon).to(like.device, like.dtype)
        return clone

    def reinitialise(self, seed: int) -> GatedNetwork:
        """Draw the weights anew from `seed`, in place; given gates (FLNPF, untrained gates of a GDLN) stay the same.

        Weights are drawn on the CPU, so that they are the same on every device; torch's random state is not changed.
        """
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self.cpu()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.draw_values()
            self.draw_gates()
        self.to(device)
        return self

    def draw_values(self) -> None:
        """Draw the value network's weights from torch's global generator."""
        square = self._square(self.gate, own=self.source is None)
        self.init.apply(self.values, square, ungated=ungated_layers(self.values))

    def _square(self, gate: Gate, own: bool) -> float:
        """`mean_square`; the mean over the slopes where units leak differently."""
        slopes = sorted({site.slope for site in self.sites})
        return sum(mean_square(gate, own, slope) for slope in slopes) / len(slopes)

    def draw_gates(self) -> None:
        """Draw the gate source's weights from torch's global generator, or copy them, depending on `gates_from`."""
        given = isinstance(self.source, FunctionSource) and self.trained == "values"
        if self.source is None or self.gates_from == "given" or given:
            return
        if self.gates_from == "dependent":
            load_matching(self.source, self.values.state_dict(), "the value network")
        elif isinstance(self.source, GraphSource):
            inner = self._square(self._inner_gate, own=True)
            self.init.apply(self.source, inner, ungated=ungated_layers(self.source.network, "network."))
        else:
            self.init.apply(self.source)

    # --- describing -----------------------------------------------------------------------------------------------

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def gate_label(self) -> str:
        """The gate function as results print it, and whether closed gates leak."""
        return self.gate.label + (", leaky" if any(site.slope for site in self.sites) else "")

    @property
    def needs_rows(self) -> bool:
        """Gates come from a table, so `forward` needs the numbers of the examples in a batch."""
        return isinstance(self.source, TableSource)

    @property
    def linear_gates(self) -> bool:
        """Every gate is a half-space of the input space."""
        return self.source is not None and self.source.linear

    def describe(self) -> dict[str, Any]:
        """The network's point in the space of models, as plain values."""
        source = "itself" if self.source is None else type(self.source).__name__
        if isinstance(self.source, GraphSource):
            source = f"separate {self.source.activation_name} network"
        return {
            "kind": self.kind,
            "source": source,
            "gate": self.gate.label,
            "value_input": self.value_input,
            "trained": self.trained,
            "gates_from": self.gates_from,
            "init": self.init.scheme,
            "sites": list(self.site_names),
            "parameters": sum(p.numel() for p in self.parameters()),
        }

    def __repr__(self) -> str:
        d = self.describe()
        return (
            f"GatedNetwork({d['kind']}: gates from {d['source']}, {d['gate']}; value input {d['value_input']}; "
            f"trains {d['trained']}; {len(self.sites)} sites; {d['parameters']} parameters)"
        )


_HARD, _OPEN = Hard(), Open()


def mean_square(gate: Gate, own: bool, slope: float = 0.0) -> float:
    """E[g²] of the gate g = α + (1 − α)·G(q) of a unit of slope α for q ~ N(0, 1), or E[q²g²] where it reads its own.

    This is the mean square of a gated signal of size one, for pre-activations of size one, which initialisation by
    "preserve" gives. By quadrature on |q| ≤ 8; hard gates have (1 + α²)/2, open ones 1.
    """
    if isinstance(gate, Open):
        return 1.0
    if gate.hard:
        return 0.5 * (1 + slope**2)
    q = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    with torch.no_grad():
        g = leak(copy.deepcopy(gate).cpu().double()(q), slope)
    density = torch.exp(-q.square() / 2)
    return float((density * (q * g if own else g).square()).sum() / density.sum())


def ungated_layers(module: fx.GraphModule, prefix: str = "") -> frozenset[str]:
    """Names of the layers that read the input itself, before any gate."""
    after_site: set[fx.Node] = set()
    early = set()
    for node in module.graph.nodes:
        if any(n in after_site for n in node.all_input_nodes) or node.target is apply_site:
            after_site.add(node)
        elif node.op == "call_module":
            early.add(prefix + str(node.target))
        elif node.op == "call_function":  # F.linear(x, self.layer.weight)
            weights = [n for n in node.all_input_nodes if n.op == "get_attr"]
            early.update(prefix + str(n.target).rpartition(".")[0] for n in weights)
    return frozenset(early)


def load_matching(source: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Load a gate source's weights from a state that may hold more (the layers after the last gate)."""
    inner = source.network if isinstance(source, GraphSource) else source
    own = inner.state_dict()
    missing = [k for k in own if k not in state]
    if missing:
        raise CheckpointError(
            f"Gate weights from {what}: {len(missing)} of {len(own)} tensors are missing, first "
            f"'{missing[0]}'. The checkpoint must come from the same template."
        )
    wrong = [k for k in own if own[k].shape != state[k].shape]
    if wrong:
        k = wrong[0]
        raise ShapeError(
            f"Gate weights from {what}: '{k}' has shape {tuple(state[k].shape)}, expected "
            f"{tuple(own[k].shape)}. The checkpoint must come from the same template."
        )
    inner.load_state_dict({k: state[k].detach().clone() for k in own})
