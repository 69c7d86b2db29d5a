"""Named constructors of every model of the papers, fully connected.

For other architectures pass a template, for example one of `templates`, to `gated_twin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.models.gates import Gate, gate_name
from pathlens.models.initialisation import Init
from pathlens.models.network import GatedNetwork
from pathlens.models.sources import (
    FunctionSource,
    GateSource,
    GraphSource,
    QuadraticSource,
    ShallowSource,
    TableSource,
)
from pathlens.models.templates import check_sizes, mlp
from pathlens.models.tracing import trace
from pathlens.models.twin import KINDS, NetworkKind, build


def _sizes(inputs: int, hidden: Sequence[int], outputs: int, bias: bool) -> dict[str, Any]:
    """The sizes of a network as plain values, checked."""
    check_sizes(inputs, hidden, outputs)
    return {"inputs": int(inputs), "hidden": [int(w) for w in hidden], "outputs": int(outputs), "bias": bool(bias)}


def _fully_connected(
    name: str,
    kind: NetworkKind,
    sizes: dict[str, Any],
    init: str | Init,
    seed: int | None,
    make_source: Callable[[], GateSource] | None = None,
) -> GatedNetwork:
    """A fully connected network of a kind; `make_source` replaces the kind's own gate source."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):  # new layers draw their weights
        if make_source is not None:
            kind = kind.override(source=make_source())
        net = build(trace(mlp(**sizes)), name, kind, init=init, seed=seed)
    if seed is None and net.init.scheme != "default":
        net.draw_values()
        net.draw_gates()
    net.sizes = sizes
    return net


def relu(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """ReLU network N(Θ, ∞; Θ): each unit is gated by its own pre-activation.

    >>> relu(2, hidden=(8, 8), seed=0).describe()["gate"]
    'hard'
    """
    return _fully_connected("relu", KINDS["relu"], _sizes(inputs, hidden, outputs, bias), init, seed)


def soft_relu(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    beta: float = 4.0,
    epsilon: float = 0.1,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Soft-ReLU network N(Θ, β; Θ): units q·(1 + ε)·σ(βq) (DGN, section 3)."""
    kind = KINDS["soft_relu"].override(beta=beta, epsilon=epsilon)
    return _fully_connected("soft_relu", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def dln(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Deep linear network: all gates are open."""
    return _fully_connected("dln", KINDS["dln"], _sizes(inputs, hidden, outputs, bias), init, seed)


def galu(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    dependent: bool = False,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """GaLU with frozen gates, FRNPF: gates from a random ReLU network that is not trained.

    Parameters
    ----------
    dependent : bool
        The gate network starts as a copy of the values (FRNPF-DI) instead of independent of them (FRNPF-II).
    """
    if not isinstance(dependent, bool):
        raise OptionError(f"galu: dependent must be True (FRNPF-DI) or False (FRNPF-II), got {dependent!r}.")
    kind = KINDS["galu"].override(gates_from="dependent" if dependent else "independent")
    return _fully_connected("galu", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def flnpf(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    checkpoint: Mapping[str, Tensor] | nn.Module,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Fixed learned gates, FLNPF: hard gates of a trained ReLU network (any epoch), values trained from scratch.

    Parameters
    ----------
    checkpoint : state dict or module
        Of a ReLU network of the same sizes, from `relu` or `mlp`, or of a gated network, whose gate source is used.
    """
    kind = KINDS["flnpf"].override(gates_from=checkpoint)
    return _fully_connected("flnpf", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def soft_galu(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    beta: float = 4.0,
    epsilon: float = 0.1,
    gate_activation: str = "relu",
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Soft-GaLU, DNPFL: gates from a separate network, both trained.

    Parameters
    ----------
    gate_activation : {"relu", "soft"}
        Hidden units of the gate network: ReLU in the NPF paper, q·G(q) in the DGN paper.
    """
    kind = KINDS["soft_galu"].override(source=gate_activation, beta=beta, epsilon=epsilon)
    return _fully_connected("soft_galu", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def gates_only(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    beta: float = 4.0,
    epsilon: float = 0.0,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Random values, and gates that alone are trained (DGN Experiment 6; soft, since hard ones have no gradient)."""
    kind = KINDS["gates_only"].override(beta=beta, epsilon=epsilon)
    return _fully_connected("gates_only", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def frg(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    examples: int,
    probability: float = 0.5,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """DGN with fixed random gates: a table of Bernoulli(μ) bits per example; call it as ``net(x, rows=indices)``."""
    source = partial(TableSource, examples, hidden, probability)
    kind = NetworkKind("given", "hard", "values")
    return _fully_connected("frg", kind, _sizes(inputs, hidden, outputs, bias), init, seed, source)


def dlgn(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    gate: str | Gate = "soft",
    beta: float = 4.0,
    piecewise_constant: bool = False,
    frozen: bool = False,
    gates_from: Mapping[str, Tensor] | nn.Module | None = None,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Deep linearly gated network: q_l = W_l q_{l−1}, so that every gate is a half-space of the input space.

    Parameters
    ----------
    gate : {"soft", "hard", "straight_through"} or Gate
        Gate function; train with "soft" or "straight_through", since hard gates have no gradient.
    piecewise_constant : bool
        DLGN-PWC: the value network reads ones, so that the network is constant on each cell.
    frozen : bool
        Train the values alone.
    gates_from : state dict or module, optional
        Gate weights from any epoch of another DLGN of the same sizes.

    >>> dlgn(2, hidden=(16,) * 5, piecewise_constant=True, seed=0)
    GatedNetwork(dlgn: gates from separate linear network, soft β=4; value input ones; trains both; 5 sites;
    2128 parameters)
    """
    kind = KINDS["dlgn"].override(
        gate=gate,
        beta=beta,
        piecewise_constant=piecewise_constant,
        trained="values" if frozen else "both",
        gates_from=gates_from,
    )
    return _fully_connected("dlgn", kind, _sizes(inputs, hidden, outputs, bias), init, seed)


def dlgn_shallow(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    gate: str | Gate = "soft",
    beta: float = 4.0,
    piecewise_constant: bool = False,
    frozen: bool = False,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """DLGN-SF (shallow features): the gates of every layer are half-spaces that read x directly."""
    source = partial(ShallowSource, inputs, hidden, bias)
    trained = "values" if frozen else "both"
    kind = NetworkKind("given", gate, trained, beta=beta, piecewise_constant=piecewise_constant)
    return _fully_connected("dlgn_shallow", kind, _sizes(inputs, hidden, outputs, bias), init, seed, source)


def quadratic(
    inputs: int,
    hidden: Sequence[int] = (16,) * 5,
    outputs: int = 1,
    *,
    rank: int = 1,
    gate: str | Gate = "soft",
    beta: float = 4.0,
    piecewise_constant: bool = False,
    frozen: bool = False,
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Quadratic gates: each gate reads Σ_r s_r (v_r·x)² + u·x, with `rank` squares per unit."""
    source = partial(QuadraticSource, inputs, hidden, bias, rank)
    trained = "values" if frozen else "both"
    kind = NetworkKind("given", gate, trained, beta=beta, piecewise_constant=piecewise_constant)
    return _fully_connected("quadratic", kind, _sizes(inputs, hidden, outputs, bias), init, seed, source)


def gdln(
    inputs: int,
    hidden: Sequence[int],
    outputs: int = 1,
    *,
    gates: Callable[[Tensor], Tensor | Sequence[Tensor]],
    gate: str | Gate = "hard",
    beta: float = 4.0,
    piecewise_constant: bool = False,
    trained: str = "values",
    bias: bool = False,
    init: str | Init = "default",
    seed: int | None = None,
) -> GatedNetwork:
    """Gated deep linear network: the gates read any function of x, by default on where it is positive.

    Parameters
    ----------
    gates : function or nn.Module
        Maps x (n, d) to the pre-activations of all gates: one (n, w) tensor for each hidden layer, or a single tensor
        for one hidden layer. The parameters of a module are trained with ``trained="both"`` or ``"gates"``; then the
        gate function must have a gradient: ``gate="soft"`` or ``"straight_through"``.

    Examples
    --------
    >>> import torch
    >>> net = gdln(2, hidden=(2,), gates=lambda x: torch.stack([x[:, 0], -x[:, 0]], dim=1), seed=0)
    >>> net.gates(torch.tensor([[1.0, 0.0]]))
    {'relu1@0': tensor([[1., 0.]])}
    """
    source = partial(FunctionSource, gates, hidden)
    kind = NetworkKind("given", gate, trained, beta=beta, piecewise_constant=piecewise_constant)
    return _fully_connected("gdln", kind, _sizes(inputs, hidden, outputs, bias), init, seed, source)


# --- networks as plain values ----------------------------------------------------------------------------------


def recipe(net: GatedNetwork) -> dict[str, Any] | None:
    """How to build a network of this module again, as plain values: everything except its weights.

    None where plain values do not suffice: twins of a template, gates or gate functions written by the user.

    >>> recipe(relu(2, hidden=(4,), seed=0))["sizes"]
    {'inputs': 2, 'hidden': [4], 'outputs': 1, 'bias': False}
    """
    gate = gate_name(net.gate)
    if net.sizes is None or gate is None or isinstance(net.source, FunctionSource):
        return None
    source: dict[str, Any] = {"name": "self"}
    if isinstance(net.source, GraphSource):
        source = {"name": net.source.activation_name}
    elif isinstance(net.source, ShallowSource):
        source = {"name": "shallow"}
    elif isinstance(net.source, QuadraticSource):
        source = {"name": "quadratic", "rank": int(net.source.rank)}
    elif isinstance(net.source, TableSource):
        source = {"name": "table", "examples": net.source.examples, "probability": net.source.probability}
    return {
        "kind": net.kind,
        "sizes": net.sizes,
        "source": source,
        "gate": gate,
        "piecewise_constant": net.value_input == "ones",
        "trained": net.trained,
        "gates_from": net.gates_from,
        "init": [net.init.scheme, net.init.sigma],
        "frozen": [name for name, p in net.named_parameters() if not p.requires_grad],
    }


def from_recipe(recipe: Mapping[str, Any], state: Mapping[str, Tensor]) -> GatedNetwork:
    """The network that a recipe and its state, as ``net.state_dict()`` gives it, describe; on the CPU."""
    options = dict(recipe["source"])
    name = options.pop("name")
    sizes = _sizes(**recipe["sizes"])
    inputs, hidden, bias = sizes["inputs"], sizes["hidden"], sizes["bias"]
    # the state holds every weight and every entry of a table: a larger network is refused before it is built
    widths, held = [inputs, *hidden, sizes["outputs"]], sum(tensor.numel() for tensor in state.values())
    needed = sum(a * b for a, b in pairwise(widths))
    needed += sum(hidden) * (inputs * options.get("rank", 0) + options.get("examples", 0))
    if needed > held:
        raise ShapeError(f"a network of widths {widths} has at least {needed} numbers, and the state has {held}")
    sources: dict[str, Callable[[], GateSource]] = {
        "shallow": partial(ShallowSource, inputs, hidden, bias),
        "quadratic": partial(QuadraticSource, inputs, hidden, bias, **options),
        "table": partial(TableSource, widths=hidden, **options),
    }
    kind = NetworkKind(name, recipe["gate"], "values", piecewise_constant=recipe["piecewise_constant"])
    # the weights drawn here are overwritten; with a seed, torch's random state is not changed
    net = _fully_connected(recipe["kind"], kind, sizes, "default", 0, sources.get(name))
    net.trained, net.gates_from, net.init = recipe["trained"], recipe["gates_from"], Init(*recipe["init"])
    for parameter, p in net.named_parameters():
        p.requires_grad_(parameter not in recipe["frozen"])
    net.to(state["values.output.weight"].dtype).load_state_dict(state)
    return net
