"""`gated_twin`: any module with ReLUs becomes a gated network of any kind, and the result is checked.

The table of kinds is the table of the papers' models; `build` makes the network from a traced template, the checks
compare it with the template and test that it is affine where it must be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pathlens.errors import ConversionError, DTypeError, OptionError, ShapeError, unknown_name
from pathlens.models.gates import Gate, make_gate
from pathlens.models.initialisation import Init
from pathlens.models.network import GatedNetwork, load_matching
from pathlens.models.sources import GateSource, GraphSource
from pathlens.models.tracing import Traced, apply_site, average_max_pools, describe, trace


@dataclass(frozen=True)
class Kind:
    """One row of the table of models: defaults that every option of `gated_twin` may override."""

    source: str  #: "self", "none", "linear", "relu", "soft" or "given" (a GateSource)
    gate: str
    trained: str = "both"
    gates_from: str = "independent"
    beta: float = 4.0
    epsilon: float = 0.0
    piecewise_constant: bool = False


KINDS: dict[str, Kind] = {
    "dln": Kind("none", "open", trained="values"),
    "relu": Kind("self", "hard"),
    "soft_relu": Kind("self", "soft", epsilon=0.1),
    "galu": Kind("relu", "hard", trained="values"),
    "flnpf": Kind("relu", "hard", trained="values", gates_from="given"),
    "soft_galu": Kind("relu", "soft", epsilon=0.1),
    "gates_only": Kind("relu", "soft", trained="gates"),
    "dlgn": Kind("linear", "soft"),
    "dlgn_pwc": Kind("linear", "soft", piecewise_constant=True),
    "dlgn_frozen": Kind("linear", "soft", trained="values"),
    "given": Kind("given", "hard", trained="values"),
}
#: names that the papers use for the same thing
ALIASES = {
    "frnpf": "galu",
    "dnpfl": "soft_galu",
    "soft-relu": "soft_relu",
    "soft-galu": "soft_galu",
    "dlgn-pwc": "dlgn_pwc",
    "dlgn-frozen": "dlgn_frozen",
}


def find_kind(kind: str) -> tuple[str, Kind]:
    """Look a kind up by its name or the papers' name for it."""
    name = ALIASES.get(kind, kind)
    if name not in KINDS or name == "given":
        raise unknown_name("kind", kind, [k for k in (*KINDS, *ALIASES) if k != "given"])
    return name, KINDS[name]


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
    affine: tuple[Any, ...] = (),
) -> GatedNetwork:
    """The gated network of a given kind with the architecture of `template`.

    One copy of the template becomes the gate source, one the value network; every ReLU call becomes a gate site named
    ``module.path@call``. The template is not touched. The result is checked on `example`: the ReLU twin equals the
    template in train and eval mode, a linear gate source is affine, the value network is linear for fixed gates.

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
    gates_from : {"independent", "dependent"}, state dict or module, optional
        Weights of the gate source: drawn anew, copied from the value network, or given (from any checkpoint; values
        are then drawn anew). "flnpf" takes the template's weights by default.
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
        Module types and functions of yours that are affine although Pathlens does not know them; the check on
        `example` still applies.

    Examples
    --------
    >>> from torch import nn
    >>> template = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> twin = gated_twin(template, "dlgn", example=torch.randn(2, 4))
    >>> twin.site_names, twin(torch.randn(5, 4)).shape
    (('1@0',), torch.Size([5, 3]))
    """
    name, row = find_kind(kind)
    if max_pool not in ("refuse", "average"):
        raise OptionError(f"gated_twin: max_pool must be 'refuse' or 'average', got {max_pool!r}.")
    _check_example(example)
    traced = trace(template, affine)
    source = gate_activation or row.source
    if traced.max_pools and max_pool == "average":
        average_max_pools(traced.root, traced.graph, traced.max_pools)
        traced.max_pools = ()
        averaged = True
    else:
        averaged = False
    if traced.max_pools and source in ("linear", "none"):
        node = next(n for n in traced.graph.nodes if n.name == traced.max_pools[0])
        raise ConversionError(
            f"gated_twin: {describe(node)}: max-pooling is not affine, and the gates of kind {kind!r} must "
            "be. Pass max_pool='average', or replace it by average-pooling."
        )
    with _copied_state(template):
        net = build(
            traced, name, source=source, gate=make_gate(gate or row.gate, _or(beta, row.beta), _or(epsilon, row.epsilon)),
            piecewise_constant=_or(piecewise_constant, row.piecewise_constant), trained=trained or row.trained,
            gates_from=gates_from if gates_from is not None else (template if row.gates_from == "given" else row.gates_from),
            init=Init(init) if isinstance(init, str) else init, seed=seed, keep_values=row.gates_from != "given",
        )  # fmt: skip
        _check(net, traced, template, example, against_template=not averaged)
    reference = next(template.parameters(), None)
    if reference is not None:
        net.to(reference.device, reference.dtype)
    net.train(template.training)
    return net


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


@contextmanager
def _copied_state(template: nn.Module) -> Iterator[None]:
    """The checks run the template; nothing of it may change (mode, batch statistics)."""
    mode = {name: m.training for name, m in template.named_modules()}
    buffers = {name: b.detach().clone() for name, b in template.named_buffers()}
    try:
        yield
    finally:
        for name, m in template.named_modules():
            m.training = mode[name]
        with torch.no_grad():
            for name, b in template.named_buffers():
                b.copy_(buffers[name])


def _check_example(example: Any) -> None:
    if not isinstance(example, Tensor):
        raise ShapeError(f"gated_twin: example must be a tensor of a few inputs, got {type(example).__name__}.")
    if example.ndim < 2 or example.shape[0] < 1:
        raise ShapeError(
            f"gated_twin: example needs a batch dimension and at least one row, got shape {tuple(example.shape)}."
        )
    if not example.dtype.is_floating_point:
        raise DTypeError(
            f"gated_twin: example must be floating point, got {example.dtype}. Convert it: example.float()."
        )


# --- building --------------------------------------------------------------------------------------------------


def _site_graph(traced: Traced) -> tuple[fx.Graph, list[fx.Node], fx.Node | None]:
    """A copy of the traced graph with one extra input per site; returns what each site reads, and the entry node."""
    graph = fx.Graph()
    graph.owning_module = traced.root  # type: ignore[assignment]
    mapped: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(traced.graph, mapped)
    graph.output(result)
    by_name = {old.name: new for old, new in mapped.items()}
    last = next(n for n in graph.nodes if n.op == "placeholder")
    reads = []
    for i, (site, name) in enumerate(zip(traced.sites, traced.site_nodes)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"gate_{i}")
        node = by_name[name]
        q = node.args[0] if node.args else node.kwargs["input"]
        assert isinstance(q, fx.Node)
        with graph.inserting_after(node):
            new = graph.call_function(apply_site, (q, last, site.slope))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        reads.append(new)
    return graph, reads, by_name.get(traced.entry) if traced.entry else None


def _module(traced: Traced, graph: fx.Graph, name: str) -> fx.GraphModule:
    graph.eliminate_dead_code()
    module = fx.GraphModule(copy.deepcopy(traced.root), graph, class_name=name)
    module.delete_all_unused_submodules()
    return module


def _gate_network(traced: Traced, with_entry: bool) -> fx.GraphModule:
    """Copy of the template that returns what every site reads; what follows the last site is dropped."""
    graph, sites, entry = _site_graph(traced)
    reads: list[Any] = [site.args[0] for site in sites]
    if with_entry:
        assert entry is not None
        reads.append(entry)
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (tuple(reads),)
    return _module(traced, graph, "GateNetwork")


def _value_network(traced: Traced, enters_late: bool) -> fx.GraphModule:
    graph, _, entry = _site_graph(traced)
    if enters_late:
        assert entry is not None
        first = next(n for n in graph.nodes if n.op == "placeholder")
        entry.replace_all_uses_with(first)
        graph.eliminate_dead_code()
    return _module(traced, graph, "ValueNetwork")


def build(
    traced: Traced,
    kind: str,
    *,
    source: str | GateSource,
    gate: Gate,
    piecewise_constant: bool,
    trained: str,
    gates_from: str | Mapping[str, Tensor] | nn.Module,
    init: Init,
    seed: int | None,
    keep_values: bool = True,
) -> GatedNetwork:
    """Make the network; no checks."""
    late = piecewise_constant and traced.entry is not None
    if late and not (isinstance(source, str) and source in ("linear", "relu", "soft")):
        raise ConversionError(
            "gated_twin: a piecewise-constant network with batch-norm needs a separate gate network; "
            f"kind {kind!r} has none."
        )
    gate_source: GateSource | None
    if isinstance(source, GateSource):
        gate_source = source
    elif source in ("self", "none"):
        gate_source = None
    elif source in ("linear", "relu", "soft"):
        gate_source = GraphSource(_gate_network(traced, late), len(traced.sites), source, linear=source == "linear")
    else:
        raise unknown_name("gate activation", source, ("linear", "relu", "soft"))
    if isinstance(gates_from, str):
        if gates_from not in ("independent", "dependent"):
            raise unknown_name("origin of gate weights", gates_from, ("independent", "dependent"))
        origin = gates_from
    else:
        origin = "given"
    if origin == "dependent" and not isinstance(gate_source, GraphSource):
        raise OptionError(f"gated_twin: gates of kind {kind!r} cannot be a copy of the values.")
    net = GatedNetwork(
        kind,
        _value_network(traced, late),
        gate_source,
        gate,
        traced.sites,
        "ones" if piecewise_constant else "x",
        late,
        trained,
        origin,
        init,
        traced.batch_norm,
    )
    if origin == "given" and gate_source is not None:
        state = gates_from.state_dict() if isinstance(gates_from, nn.Module) else gates_from
        assert isinstance(state, Mapping)
        load_matching(gate_source, gate_weights(state), "the given checkpoint")
    if seed is not None:
        net.reinitialise(seed)
    elif not keep_values:
        net._draw()
    elif origin == "dependent" and gate_source is not None:
        load_matching(gate_source, net.values.state_dict(), "the value network")
    elif origin == "independent" and isinstance(gate_source, GraphSource):
        values = copy.deepcopy(net.values.state_dict())
        net._draw()
        net.values.load_state_dict(values)
    return net


def gate_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Template-named weights from the state of a template, of a ReLU network of ours, or of a gated network.

    A gated network with a gate source gives that source's weights; a ReLU network its values.
    """
    for prefix in ("source.network.", "source.", "values."):
        found = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
        if found:
            return found
    return dict(state)


# --- checking --------------------------------------------------------------------------------------------------


class _Watcher(fx.Interpreter):
    """Runs a graph and keeps every tensor, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.dtype.is_floating_point:
            self.seen[n] = result
        return result


def _first_not_affine(
    module: fx.GraphModule, points: tuple[Tensor, Tensor], rest: tuple[Any, ...], skip: Callable[[fx.Node], bool]
) -> tuple[fx.Node, float] | None:
    """The first node that is not affine in the first input, with its relative error."""
    a, b = points
    values = []
    for t in (0.0, 1.0, 1.75, -0.5):
        watcher = _Watcher(module)
        watcher.run(a + t * (b - a), *rest)
        values.append((t, watcher.seen))
    tainted: set[fx.Node] = set()
    for node in module.graph.nodes:
        if skip(node) or any(n in tainted for n in node.all_input_nodes):
            tainted.add(node)
            continue
        if not all(node in seen for _, seen in values) or node.op in ("placeholder", "get_attr"):
            continue
        va, vb = values[0][1][node], values[1][1][node]
        scale = float(max(va.abs().max(), vb.abs().max(), (vb - va).abs().max())) if va.numel() else 0.0
        for t, seen in values[2:]:
            error = float((seen[node] - (va + t * (vb - va))).abs().max()) if va.numel() else 0.0
            if not error <= 1e-9 * max(scale, 1e-30) * 10:
                return node, error / max(scale, 1e-30)
    return None


def _check(net: GatedNetwork, traced: Traced, template: nn.Module, example: Tensor, against_template: bool) -> None:
    """Raise unless the network is what it says; float64, on copies, random state untouched."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = example.detach().cpu().double()
        x = x[:2] if len(x) > 1 else torch.cat([x, x + torch.randn_like(x)])  # batch-norm in train mode needs two
        if against_template:
            _check_against_template(traced, template, x)
        twin = copy.deepcopy(net).cpu().double().eval()
        far = 100 * torch.randn_like(x)
        if isinstance(twin.source, GraphSource) and twin.source.linear:
            module = twin.source.network
            bad = _first_not_affine(module, (x, far), (twin._unit(),) * len(twin.sites), lambda n: False)
            if bad:
                raise ConversionError(
                    f"gated_twin: {describe(bad[0])}: the gate path is not affine there (relative error "
                    f"{bad[1]:.1e}). Replace it by an affine layer or a ReLU."
                )
        gates = tuple(twin.gates(x).values())
        entry = twin._scores(x, None)[1] if twin.source is not None and twin._enters_late else x
        assert entry is not None
        pools = set(traced.max_pools)
        bad = _first_not_affine(
            twin.values, (torch.randn_like(entry), 100 * torch.randn_like(entry)), gates, lambda n: n.name in pools
        )
        if bad:
            raise ConversionError(
                f"gated_twin: {describe(bad[0])}: the value path is not affine for fixed gates there (relative "
                f"error {bad[1]:.1e}). Replace it by an affine layer or a ReLU."
            )


def _check_against_template(traced: Traced, template: nn.Module, x: Tensor) -> None:
    """The ReLU network of the traced graph must equal the template, hooks and all, in both modes."""
    relu = build(
        traced,
        "relu",
        source="self",
        gate=make_gate("hard"),
        piecewise_constant=False,
        trained="both",
        gates_from="independent",
        init=Init(),
        seed=None,
    )
    for training in (False, True):
        original = copy.deepcopy(template).cpu().double().train(training)
        ours = copy.deepcopy(relu).cpu().double().train(training)
        results = []
        for module in (original, ours):
            torch.manual_seed(1)
            results.append(module(x.clone()))
        expected, got = results
        if not isinstance(expected, Tensor) or expected.shape != got.shape:
            raise ConversionError(
                f"gated_twin: {type(template).__name__}: the twin's output does not have the template's shape."
            )
        if not torch.allclose(expected, got, rtol=1e-8, atol=1e-10 * float(1 + expected.abs().max())):
            error = float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-30))
            raise ConversionError(
                f"gated_twin: {type(template).__name__}: in {'train' if training else 'eval'} mode the converted network differs "
                f"from the template by {error:.1e} (relative). Something the tracer cannot see changes its output: a hook "
                "that rewrites activations, an in-place change through a view, or randomness; remove it."
            )
