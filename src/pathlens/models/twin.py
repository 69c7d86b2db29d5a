"""`gated_twin`: any module with ReLUs becomes a gated network of any kind, and the result is checked.

The table of kinds is the table of the papers' models; `build` makes the network from a traced template. What the
result must satisfy is tested in `checking.py`; how a template is followed is in `tracing.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pathlens.errors import (
    CheckpointError,
    ConversionError,
    DTypeError,
    NotFiniteError,
    OptionError,
    ShapeError,
    unknown_name,
)
from pathlens.models.checking import Checker
from pathlens.models.encoding import PatchParts
from pathlens.models.gates import Gate, make_gate
from pathlens.models.initialisation import Init
from pathlens.models.network import GatedNetwork, load_matching
from pathlens.models.sources import GateSource, GraphSource
from pathlens.models.tensors import require_dense
from pathlens.models.tracing import (
    Traced,
    average_max_pools,
    describe,
    gate_graph,
    graph_module,
    trace,
    unwrapped,
    value_graph,
)


@dataclass(frozen=True)
class NetworkKind:
    """One row of the table of models.

    Attributes
    ----------
    source : {"self", "none", "linear", "relu", "soft"} or GateSource
        Where gates come from: the unit itself, nowhere (all open), a copy of the template with such units, or a source
        that is given.
    gate, trained, gates_from, beta, epsilon, piecewise_constant
        As in `gated_twin`.
    """

    source: str | GateSource
    gate: str | Gate
    trained: str = "both"
    gates_from: str | Mapping[str, Tensor] | nn.Module = "independent"
    beta: float = 4.0
    epsilon: float = 0.0
    piecewise_constant: bool = False

    def override(self, **options: Any) -> NetworkKind:
        """The same kind with other options; those that are None are kept."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    def make_gate(self) -> Gate:
        """The gate function."""
        return make_gate(self.gate, self.beta, self.epsilon)


KINDS = {
    "dln": NetworkKind("none", "open", trained="values"),
    "relu": NetworkKind("self", "hard"),
    "soft_relu": NetworkKind("self", "soft", epsilon=0.1),
    "galu": NetworkKind("relu", "hard", trained="values"),
    "flnpf": NetworkKind("relu", "hard", trained="values", gates_from="given"),
    "soft_galu": NetworkKind("relu", "soft", epsilon=0.1),
    "gates_only": NetworkKind("relu", "soft", trained="gates"),
    "dlgn": NetworkKind("linear", "soft"),
    "dlgn_pwc": NetworkKind("linear", "soft", piecewise_constant=True),
    "dlgn_frozen": NetworkKind("linear", "soft", trained="values"),
}
#: names that the papers use for the same kind
ALIASES = {"frnpf": "galu", "dnpfl": "soft_galu"}


def gated_twin(
    template: nn.Module,
    kind: str,
    example: Tensor,
    *,
    gate: str | Gate | None = None,
    beta: float | None = None,
    epsilon: float | None = None,
    piecewise_constant: bool | None = None,
    trained: str | None = None,
    gates_from: str | Mapping[str, Tensor] | nn.Module | None = None,
    gate_activation: str | None = None,
    max_pool: str = "refuse",
    init: str | Init = "default",
    seed: int | None = None,
    affine: type[nn.Module] | Callable[..., Tensor] | tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
) -> GatedNetwork:
    """The gated network of a given kind with the architecture of `template`.

    One copy of the template becomes the gate source, one the value network; every ReLU call becomes a gate site named
    ``module.path@call``. The template is not changed and the copies have none of its hooks. The result is checked on
    `example`: the ReLU twin equals the template in train and eval mode (its forward hooks run once in each, on a copy,
    to detect one that changes activations), a linear gate source is affine, the value network is affine for fixed
    gates, rows do not mix. Cost: six to nine forward passes in float64, of two to sixteen rows.

    Parameters
    ----------
    template : nn.Module
        Any module of one tensor input whose nonlinearities are ReLUs or LeakyReLUs.
    kind : str
        "relu", "soft_relu", "galu" (FRNPF), "flnpf", "soft_galu" (DNPFL), "gates_only", "dln", "dlgn", "dlgn_pwc",
        "dlgn_frozen".
    example : Tensor, shape (n, ...)
        A few inputs; n = 2 is enough.
    gate : {"hard", "soft", "straight_through"} or Gate, optional
        Gate function; the kind's own otherwise.
    beta, epsilon : float, optional
        Of the soft gate (1 + ε)·σ(βq).
    piecewise_constant : bool, optional
        Feed the value network ones instead of x. With batch-norm the ones enter after the first linear layer and its
        batch-norm, since a constant does not survive the normalisation.
    trained : {"both", "values", "gates"}, optional
        What is trained. `requires_grad` flags and `torch.no_grad` blocks of the template are ignored.
    gates_from : {"independent", "dependent"}, state dict or module, optional
        Weights of the gate source: drawn anew, copied from the value network, or given (from any checkpoint).
        "flnpf" takes the template's weights by default and draws the values anew.
    gate_activation : {"linear", "relu", "soft"}, optional
        Hidden units of the gate source.
    max_pool : {"refuse", "average"}
        A linear gate source cannot contain max-pooling; "average" replaces it by average-pooling in both copies.
    init : str or Init
        How new weights are drawn: "default", "he", "preserve", "bernoulli".
    seed : int, optional
        Draw all weights anew from this seed. Without it the value network keeps the template's weights (except for
        "flnpf") and gate sources are drawn from torch's global generator.
    affine : tuple
        Your own module types, and functions wrapped with `torch.fx.wrap`, that are affine; the check on `example`
        still applies.

    Raises
    ------
    ConversionError
        If the template cannot be converted; the message names the node and a remedy. `NoGateError` without a ReLU.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> template = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> twin = gated_twin(template, "dlgn", example=torch.randn(2, 4))
    >>> twin.site_names, twin(torch.randn(5, 4)).shape
    (('1@0',), torch.Size([5, 3]))
    """
    name = ALIASES.get(kind, kind.replace("-", "_") if isinstance(kind, str) else kind)
    if name not in KINDS:
        raise unknown_name("kind", kind, (*KINDS, *ALIASES))
    template = unwrapped(template)
    if isinstance(template, nn.Module) and any(isinstance(m, PatchParts) for m in template.modules()):
        raise ConversionError(
            "gated_twin: the template has a PatchParts in it, whose own rectifiers would become gates of the pixels. "
            "Put it before the result: nn.Sequential(parts, gated_twin(template, kind, example=parts(x[:2])))."
        )
    if isinstance(template, GatedNetwork) and template.kind != "relu":
        raise ConversionError(
            f"gated_twin: the template is a gated network already, of kind {template.kind!r}. Give the plain module "
            "that it was made from, or models.relu of the same widths; net.with_gate('hard') changes the gates alone."
        )
    if max_pool not in ("refuse", "average"):
        raise OptionError(f"gated_twin: max_pool must be 'refuse' or 'average', got {max_pool!r}.")
    if gate_activation is not None and KINDS[name].source in ("self", "none"):
        raise OptionError(f"gated_twin: kind {kind!r} has no gate network, so gate_activation has no meaning there.")
    chosen = KINDS[name].override(
        gate=gate,
        beta=beta,
        epsilon=epsilon,
        piecewise_constant=piecewise_constant,
        trained=trained,
        source=gate_activation,
        gates_from=template if name == "flnpf" and gates_from is None else gates_from,
    )
    _refuse_unused(kind, chosen.make_gate(), gate, beta=beta, epsilon=epsilon)
    _check_example(example)
    traced = trace(template, affine if isinstance(affine, tuple) else (affine,))
    checker = Checker(traced, template, example)
    checker.equals_template()
    if traced.max_pools and max_pool == "average":
        average_max_pools(traced)
        checker = Checker(traced, template, example)
    elif traced.max_pools and chosen.source in ("linear", "none"):
        raise ConversionError(
            f"gated_twin: {describe(traced.max_pools[0])}: max-pooling is not affine, and the gates of kind {kind!r} "
            "must be. Pass max_pool='average', or replace it by average-pooling."
        )
    checker.values_affine()
    if chosen.source == "linear":
        checker.gates_affine()
    net = build(traced, name, chosen, init=init, seed=seed, keep_values=name != "flnpf")
    reference = next(template.parameters(), None)
    if reference is not None:
        net.to(reference.device, reference.dtype)
    net.train(template.training)
    _copy_modes(template, net)
    return net


def _refuse_unused(kind: str, function: Gate, given: str | Gate | None, **options: float | None) -> None:
    """Refuse a β or ε that the gate function would ignore."""
    for name, value in options.items():
        if value is not None and (isinstance(given, Gate) or not hasattr(function, name)):
            raise OptionError(
                f"gated_twin: {name}={value} has no effect: the gate of this network of kind {kind!r} is "
                f"{'given' if isinstance(given, Gate) else function.label}. Drop {name}, or pass another gate."
            )


def _copy_modes(template: nn.Module, net: GatedNetwork) -> None:
    """Copy the mode of each layer, such as a frozen batch-norm in eval mode."""
    modes = {name: m.training for name, m in template.named_modules()}
    parts: list[nn.Module] = [net.values]
    if isinstance(net.source, GraphSource) and net.trained != "values":
        parts.append(net.source.network)
    for part in parts:
        for name, m in part.named_modules():
            m.training = modes.get(name, m.training)


def _check_example(example: Any) -> None:
    if not isinstance(example, Tensor):
        raise ShapeError(
            f"gated_twin: example must be a tensor of a few inputs, got {type(example).__name__}. "
            "Pass a batch of them: example=X[:2]."
        )
    require_dense(example, "gated_twin: the rows of `example`")
    if example.ndim < 2 or example.shape[0] < 1:
        raise ShapeError(
            f"gated_twin: example needs a batch dimension and at least one row, got shape {tuple(example.shape)}. "
            "Pass a batch: example=X[:2]."
        )
    if not example.dtype.is_floating_point:
        raise DTypeError(
            f"gated_twin: example must be floating point, got {example.dtype}. Convert it: example.float()."
        )
    if not bool(example.isfinite().all()):
        raise NotFiniteError("gated_twin: example holds NaN or infinity. Pass finite inputs.")


# --- building --------------------------------------------------------------------------------------------------


def build(
    traced: Traced, name: str, kind: NetworkKind, *, init: str | Init, seed: int | None, keep_values: bool = True
) -> GatedNetwork:
    """Make the network without checks of the template; its value network takes over the modules of `traced`."""
    source, gates_from, piecewise_constant = kind.source, kind.gates_from, kind.piecewise_constant
    if piecewise_constant and source in ("self", "none"):
        raise OptionError(
            f"gated_twin: kind {name!r} has no gate network, so that its output would not depend on the input at all "
            "with piecewise_constant=True. Use a kind with separate gates, such as 'dlgn'."
        )
    late = piecewise_constant and traced.entry is not None
    gate_source: GateSource | None
    if isinstance(source, GateSource):
        gate_source = source
    elif source in ("self", "none"):
        gate_source = None
    elif source in ("linear", "relu", "soft"):
        network = graph_module(copy.deepcopy(traced.root), gate_graph(traced, late), "GateNetwork")
        gate_source = GraphSource(network, len(traced.sites), source)
    else:
        raise unknown_name("gate activation", source, ("linear", "relu", "soft"))
    origin = gates_from if isinstance(gates_from, str) else "given"
    if origin not in ("independent", "dependent", "given") or gates_from == "given":
        raise unknown_name("origin of gate weights", gates_from, ("independent", "dependent"))
    if origin != "independent" and not isinstance(gate_source, GraphSource):
        raise OptionError(
            f"gated_twin: gates of kind {name!r} have no network of their own whose weights could be "
            f"{'a copy of the values' if origin == 'dependent' else 'given'}. Drop gates_from."
        )
    if origin == "dependent" and late:
        raise OptionError(
            "gated_twin: the ones of a piecewise-constant network enter after its first batch-norm, so that its values "
            "lack the first layer and the gates cannot be a copy of them. Use gates_from='independent'."
        )
    known = set(traced.root.state_dict())
    values = graph_module(traced.root, value_graph(traced, late, piecewise_constant), "ValueNetwork")
    net = GatedNetwork(
        name,
        values,
        gate_source,
        kind.make_gate(),
        traced.sites,
        value_input="ones" if piecewise_constant else "x",
        enters_late=late,
        trained=kind.trained,
        gates_from=origin,
        init=Init(init) if isinstance(init, str) else init,
    )
    if origin == "given":
        assert isinstance(gate_source, GraphSource)
        state = gates_from.state_dict() if isinstance(gates_from, nn.Module) else gates_from
        _load_given(gate_source, state, known)
    if seed is not None:
        net.reinitialise(seed)
    elif not keep_values:
        net.draw_values()
    elif isinstance(gate_source, GraphSource):
        net.draw_gates()
    return net


def _load_given(source: GraphSource, state: Any, known: set[str]) -> None:
    """Load gate weights from a checkpoint of this template."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"Gate weights: expected a module or a state dict, got {type(state).__name__}. Pass net.state_dict()."
        )
    weights = gate_weights(state, set(source.network.state_dict()))
    foreign = sorted(set(weights) - known)
    if foreign and set(source.network.state_dict()) <= set(weights):
        raise CheckpointError(
            f"Gate weights from the given checkpoint: it also holds '{foreign[0]}', which the template does not have. "
            "The checkpoint must come from the same template."
        )
    load_matching(source, weights, "the given checkpoint")


def gate_weights(state: Mapping[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Weights by their names in the template, from the state of a template or of a gated network.

    Of a gated network with a gate source these are the weights of the source, else those of the values.
    """
    if not wanted <= set(state):
        for prefix in ("source.network.", "source.", "values."):
            found = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            if found:
                return found
    return dict(state)
