"""Fewer paths: a path-norm penalty for training, and pruning of the value network's edges."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from pathlens.errors import OptionError, RecordError
from pathlens.explanations import Explanation, r_squared, ratio
from pathlens.models import GatedNetwork
from pathlens.models.tracing import chain_of, unwrapped
from pathlens.paths.trellis import Trellis, take_record, take_trellis
from pathlens.plotting import get_axes
from pathlens.recording import Record

# functions and methods between dense layers that change no path
_PASSING = {"apply_site", "relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"}
_PASSING |= {"flatten", "view", "reshape", "contiguous"}


def _dense_layers(what: str, net: nn.Module, rec: Record | None = None) -> list[nn.Linear]:
    """The layers of the value network in order, from a record or else from its graph; other parameters are refused."""
    net = unwrapped(net)
    values = net.values if isinstance(net, GatedNetwork) else net
    known = {id(p) for m in values.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    other = [name for name, p in values.named_parameters() if id(p) not in known]
    why = f"'{other[0]}' belongs to no dense layer" if other else ""
    layers: list[nn.Linear] = []
    if not why and rec is not None:
        acting = [net.get_submodule(layer.name) for layer in rec.layers if layer.part != "gate"]
        layers = [m for m in acting if isinstance(m, nn.Linear)]
    elif not why:
        layers, why = _followed(values)
    if not why and (not layers or any(a.out_features != b.in_features for a, b in pairwise(layers))):
        why = "its dense layers do not follow each other"
    if why:
        raise RecordError(
            f"{what}: the value network is not a chain of dense layers: {why}. Give a fully connected network."
        )
    return layers


def _followed(values: nn.Module) -> tuple[list[nn.Linear], str]:
    """The dense layers between input and output, and the reason if they do not form a chain.

    The order in which modules are registered shows neither shortcuts nor second calls, so the graph is followed.
    """
    try:
        graph = values.graph if isinstance(values, fx.GraphModule) else fx.Tracer().trace(values)
    except Exception as error:  # a forward may raise anything on a proxy
        return [], f"its forward cannot be followed ({type(error).__name__}: {error})"
    modules = dict(values.named_modules(remove_duplicate=False))
    steps, joined = chain_of(graph)
    calls = [step for step in steps if step.op != "call_module"]
    joined = joined or next((s.name for s in calls if getattr(s.target, "__name__", s.target) not in _PASSING), None)
    if joined is not None:
        return [], f"'{joined}' joins or rescales the outputs of its layers"
    called = [str(step.target) for step in steps if step.op == "call_module"]
    layers = {name: m for name in called if isinstance(m := modules[name], nn.Linear)}
    twice = next((name for name in layers if sum(modules[other] is layers[name] for other in called) > 1), None)
    return list(layers.values()), "" if twice is None else f"'{twice}' is called twice"


def path_norm(net: nn.Module) -> Tensor:
    """Σ over all paths of |product of value weights|, differentiable: a penalty against contributions that cancel.

    ‖net‖ = 1ᵀ|U_{L+1}| ⋯ |U_2||U_1| 1, all outputs, all inputs, all gates open; a bias adds the paths that start at it.
    Add it to a loss, for instance ``pl.train(net, data, penalty=lambda net: 3e-3 * path_norm(net), …)``.

    Parameters
    ----------
    net : GatedNetwork or nn.Module
        Fully connected: dense layers and gates in turn. Others are refused.

    Returns
    -------
    Tensor, shape ()
        Σ|v| is no larger for any input in [−1, 1]ᵈ and gates of at most 1. Cost Σ_l w_l w_{l−1}.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(1, hidden=(1,), seed=0)
    >>> u1, u2 = net.values.linear1.weight, net.values.output.weight
    >>> bool(path_norm(net) == (u1 * u2).abs().sum())
    True
    """
    layers = _dense_layers("paths.path_norm", net)
    reached = layers[0].weight.new_ones(layers[0].in_features)
    for layer in layers:
        reached = layer.weight.abs() @ reached
        if layer.bias is not None:
            reached = reached + layer.bias.abs()
    return reached.sum()


@dataclass(frozen=True, repr=False)
class Pruned(Explanation):
    """A network with most of its value edges set to zero, and the cost.

    Attributes
    ----------
    net : nn.Module
        The pruned copy: same shapes, zeros where edges were cut.
    before : float
        Cancellation of the network that was pruned; ``cancellation`` is that of the copy.
    edges : (kept, of)
        Value weights and biases, of all layers.
    paths : int
        Remaining paths of hidden units to any output, including those that start at later biases.
    total : int
        The same with all edges.
    """

    net: nn.Module
    before: float
    edges: tuple[int, int]
    paths: int
    total: int

    def table(self) -> dict[str, list[Any]]:
        """Edges and paths: how many are left, and how many there were."""
        kept, of = self.edges
        return {"count of": ["edges", "paths"], "left": [kept, self.paths], "before": [of, self.total]}

    def plot(self, ax: Any = None) -> Any:
        """Shares of edges and paths that are left; needs matplotlib."""
        ax = get_axes(ax, "drawing a pruned network")
        ax.bar(["edges", "paths"], [self.edges[0] / self.edges[1], self.paths / self.total])
        ax.set(ylabel="share left", title=f"{self._score}, cancellation {self.before:.3g} → {self.cancellation:.3g}")
        return ax

    def _lines(self) -> list[str]:
        kept, of = self.edges
        return [
            f"{kept} of {of} edges ({100 * kept / of:.0f} %), {self.paths} of {self.total} paths; R² to the unpruned",
            f"cancellation was {self.before:.3g}",
        ]


@torch.inference_mode(False)  # the copy may be trained further
def prune(net: nn.Module, X: Any, *, keep: float = 0.25, validation: Any = None) -> Pruned:
    """Set the least important value edges to zero, and report the loss in R².

    The importance of an edge j → i of layer l is the mean over X of Σ|v| of all paths through it, to all outputs:
    |prefix of j|·|U_l[i, j]|·|suffix of i| with sums of absolute values. The share `keep` of all edges is kept; biases
    are edges too. A separate gate network is not changed; units that gate themselves (ReLU) read the pruned values.

    Parameters
    ----------
    net : GatedNetwork or nn.Module
        Fully connected.
    X : (n, d)
    keep : float
        Share of edges, in (0, 1].
    validation : inputs, optional
        Other inputs, on which `r2_held_out` is computed.

    Returns
    -------
    Pruned
        ``.net`` is the copy.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(8, 8), gate="hard", piecewise_constant=True, seed=0)
    >>> X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> smaller = prune(net, X, keep=0.5)
    >>> smaller.paths < smaller.total, smaller.net.values.linear2.weight.shape
    (True, torch.Size([8, 8]))
    """
    if not isinstance(keep, (int, float)) or isinstance(keep, bool) or not 0 < keep <= 1:
        raise OptionError(f"paths.prune: keep={keep!r}, expected a share of the edges in (0, 1].")
    X = take_record(net, X) if isinstance(net, nn.Module) else X
    trellis = take_trellis("paths.prune", net, X, include_inputs=True, as_read=True)
    copied = copy.deepcopy(unwrapped(net))
    layers = _dense_layers("paths.prune", copied, X)
    flows: list[tuple[Tensor, Tensor]] = []  # a parameter of the copy, and the importance of its entries
    for layer, flow in zip(layers, _flows(trellis.absolute())):
        flow = flow[-layer.out_features :]  # bias nodes come first; edges between them are not weights
        flows.append((layer.weight, flow[:, -layer.in_features :]))
        if layer.bias is not None:
            flows.append((layer.bias, flow[:, 0]))
    scores = torch.cat([flow.flatten() for _, flow in flows])
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[scores.sort(descending=True, stable=True).indices[: max(1, round(keep * len(scores)))]] = True
    with torch.no_grad():
        for (parameter, _), stays in zip(flows, chosen.split([flow.numel() for _, flow in flows])):
            parameter.mul_(stays.view_as(parameter))
    old, new = take_trellis("paths.prune", net, X), take_trellis("paths.prune", copied, X.x)
    before, after = (float(ratio(t.absolute().total(), t.f).median()) for t in (old, new))
    judged = None
    if validation is not None:
        others = [take_trellis("paths.prune", each, validation).f for each in (copied, net)]
        judged = r_squared(others[0].flatten(), others[1].flatten())
    return Pruned(
        r_squared(new.f.flatten(), old.f.flatten()),
        judged,
        after,
        old.label,
        copied,
        before,
        (int(chosen.sum()), len(chosen)),
        _paths_left(layers),
        old.number_of_paths,
    )


def _flows(sizes: Trellis) -> list[Tensor]:
    """Mean over rows of Σ|v| through every edge, all outputs together: a matrix for each layer of weights.

    `sizes` is the trellis of absolute values.
    """
    weights, prefixes = [*sizes.weights, sizes.readout], sizes.prefixes()
    ahead = torch.ones_like(sizes.f)
    found = []
    for t in range(len(weights) - 1, -1, -1):
        found.append(ahead.T @ prefixes[t] / sizes.n * weights[t])
        if t:
            ahead = ahead @ weights[t] * sizes.gates[t - 1]
    return found[::-1]


def _paths_left(layers: list[nn.Linear]) -> int:
    """Sequences of hidden units that nonzero weights connect from an input or a bias to an output."""
    first, *rest = [(layer.weight != 0).cpu().numpy().astype(object) for layer in layers]
    biases = [0 if layer.bias is None else (layer.bias != 0).cpu().numpy().astype(object) for layer in layers]
    counts = np.minimum(first.sum(1) + biases[0], 1)  # a path starts once at a unit, for any number of inputs
    for edges, bias in zip(rest[:-1], biases[1:-1]):
        counts = edges @ counts + bias
    return int((np.minimum(rest[-1].sum(0), 1) * counts).sum()) + int(np.any(biases[-1]))
