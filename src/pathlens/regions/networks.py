"""Which networks have exact regions, and the float64 copy on which they are computed.

A network qualifies if its gates switch on piecewise affine functions of the input: DLGNs, ReLU networks, gates from a
separate ReLU network, and plain modules with ReLUs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pathlens.errors import RegionError, ShapeError
from pathlens.models import GatedNetwork, Hard, Open, gated_twin
from pathlens.models.sources import FunctionSource, GraphSource, QuadraticSource, TableSource
from pathlens.models.tracing import apply_site, chain_of, describe, max_pools, unwrapped
from pathlens.recording import rebuild
from pathlens.recording.inputs import first_layer
from pathlens.recording.taking import check_net
from pathlens.records import Snapshot

_PASS = (nn.Flatten, nn.Identity, nn.BatchNorm1d, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class HardNetwork:
    """A float64 copy in eval mode with hard gates, on the CPU, and what it is a copy of.

    Attributes
    ----------
    net : GatedNetwork
    input_shape : tuple of int
    label : str
        The gates, for texts; names the soft gates of the original.
    shapes : dict site → tuple of int
        Units of every gate site.
    chain : bool
        Fully connected, each layer reading the gated layer before it, so that paths are sequences of hidden units.
    """

    net: GatedNetwork
    input_shape: tuple[int, ...]
    label: str
    shapes: dict[str, tuple[int, ...]]
    chain: bool

    @property
    def sites(self) -> tuple[str, ...]:
        return self.net.site_names

    def unit_numbers(self, path: Sequence[Any], where: str) -> list[tuple[int, int]]:
        """(site, flat unit) of every unit on a path.

        None skips a site (paths through shortcuts), and so does −1 before the first unit (paths that start at a bias).
        """
        units = path.tolist() if hasattr(path, "tolist") else path
        if not isinstance(units, Sequence) or isinstance(units, str) or len(units) != len(self.sites):
            got = f"{len(units)} of them" if isinstance(units, Sequence) else repr(path)
            raise RegionError(
                f"{where}: a path is one hidden unit for each of the {len(self.sites)} gate sites "
                f"{', '.join(self.sites[:6])}{', …' if len(self.sites) > 6 else ''}; got {got}. "
                "Give one unit per site, in order."
            )
        found: list[tuple[int, int]] = []
        for number, (site, unit) in enumerate(zip(self.sites, units)):
            if (unit is None and not self.chain) or (unit == -1 and self.chain and not found):
                continue
            found.append((number, self.unit_number(site, unit, where)))
        if not found:
            raise RegionError(
                f"{where}: the path passes no gate site, so that it is active everywhere. Name at least one unit."
            )
        return found

    def unit_number(self, site: str, unit: Any, where: str) -> int:
        """A unit's number at its site, from a number or from (channel, position…)."""
        shape = self.shapes[site]
        index = unit if isinstance(unit, (tuple, list)) else (unit,)
        sizes = shape if len(index) == len(shape) else (math.prod(shape),)
        whole = all(isinstance(i, Integral) and not isinstance(i, bool) for i in index)
        if len(index) != len(sizes) or not whole or any(not 0 <= i < size for i, size in zip(index, sizes)):
            raise RegionError(
                f"{where}: site '{site}' has units of shape {shape}, numbered from 0; got {unit!r}. Give a number "
                f"below {math.prod(shape)}" + (f", or a tuple of {len(shape)} indices." if len(shape) > 1 else ".")
            )
        flat = 0
        for i, size in zip(index, sizes):
            flat = flat * size + int(i)
        return flat


@torch.inference_mode(False)  # a copy made in inference mode would have no derivatives
def hard_network(
    net: Any, where: str, input_shape: Sequence[int] | None = None, linear_only: bool = False
) -> HardNetwork:
    """The copy on which regions are computed; refuses networks without exact regions, with the reason.

    Parameters
    ----------
    net : nn.Module or Snapshot
    where : str
        The public function, for messages.
    input_shape : sequence of int, optional
        Of one input; not needed for fully connected networks.
    linear_only : bool
        Every gate must be a half-space of the input space.
    """
    if isinstance(net, Snapshot):
        net = rebuild(net)
    if not isinstance(net, nn.Module):
        raise RegionError(f"{where}: expected a network or a Snapshot, got {type(net).__name__}. Give the network.")
    net = unwrapped(net)
    check_net(net)
    shape = _input_shape(net, input_shape, where)
    if not isinstance(net, GatedNetwork):
        if linear_only:
            raise RegionError(f"{where}: {type(net).__name__} is a plain module. {_NO_HALFSPACES['self']}")
        dtype = next((p.dtype for p in net.parameters()), torch.float32)
        net = gated_twin(net, "relu", torch.zeros(2, *shape, dtype=dtype))
    _refuse(net, where, linear_only)
    label = "hard gates" if net.gate.hard else f"hard gates of a network with {net.gate.label}"
    clone = copy.deepcopy(net).cpu().double().eval().requires_grad_(False)
    if not isinstance(net.gate, Open):
        clone.gate = Hard()
    try:
        with torch.no_grad():
            shapes = clone.unit_shapes(torch.zeros(1, *shape, dtype=torch.float64))
    except RuntimeError as error:
        raise ShapeError(
            f"{where}: the network does not run on an input of shape {shape} ({str(error).splitlines()[0]}). "
            "Give the shape of one input, without the batch dimension."
        ) from error
    flat = all(len(units) == 1 for units in shapes.values())  # a dense layer on positions does not connect them
    return HardNetwork(clone, shape, label, shapes, flat and _is_chain(clone))


_NO_HALFSPACES = {
    "self": "Each gate reads the pre-activation of its unit, which is only piecewise affine in the input, so that path "
    "regions are unions of polyhedra. Use slice2d or segment1d, or a DLGN.",
    "relu": "Its gates come from a ReLU network, which is only piecewise affine in the input. Use slice2d or "
    "segment1d, or a DLGN.",
    "open": "All its gates are open, so there are no half-spaces; its one region is the whole space.",
}


def _refuse(net: GatedNetwork, where: str, linear_only: bool) -> None:
    """Refuse a network without exact regions or, with `linear_only`, without half-spaces."""
    source = net.source
    curved = None
    if isinstance(source, QuadraticSource):
        curved = "each gate is a quadratic function of the input, so that its boundary is a quadric"
    elif isinstance(source, FunctionSource):
        curved = "its gates are a function given by the user (GDLN), which may be curved"
    elif isinstance(source, TableSource):
        curved = "its gates come from a table of examples and do not depend on the input"
    elif not net.gate.hard and (source is None or getattr(source, "activation_name", "") == "soft"):
        curved = "its gates read soft units, so that their boundaries are curved; use net.with_gate('hard')"
    if curved:
        raise RegionError(f"{where}: a network of kind '{net.kind}' has no such regions: {curved}. {_REMEDY}")
    if linear_only and not net.linear_gates:
        reason = "open" if isinstance(net.gate, Open) else "self" if source is None else "relu"
        raise RegionError(f"{where}: the gates of kind '{net.kind}' are not half-spaces. {_NO_HALFSPACES[reason]}")
    graphs = [source.network] if isinstance(source, GraphSource) else []
    for module in graphs if linear_only else [*graphs, net.values]:
        for node in max_pools(module):
            raise RegionError(
                f"{where}: {describe(node)}: max-pooling compares units, which gates do not describe. Use "
                "average-pooling: gated_twin(…, max_pool='average')."
            )


_REMEDY = "Regions are computed for DLGNs, ReLU networks and networks gated by a ReLU network."


def _input_shape(net: nn.Module, given: Sequence[int] | None, where: str) -> tuple[int, ...]:
    """As given, or the input size of the first layer where that is fully connected."""
    if given is not None:
        return tuple(int(s) for s in given)
    first = first_layer(net)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise ShapeError(
        f"{where}: the network begins with {type(first).__name__}, which does not determine the shape of an input. "
        "Give input_shape, such as (3, 32, 32), or a plane whose origin has that shape."
    )


def _is_chain(net: GatedNetwork) -> bool:
    """Whether the values are linear layer, gates, linear layer, gates, …, linear layer."""
    steps, joined = chain_of(net.values.graph)
    kinds = [kind for step in steps if (kind := _chain_kind(net.values, step)) != "pass"]
    return joined is None and kinds == ["linear", "site"] * len(net.sites) + ["linear"]


def _chain_kind(module: fx.GraphModule, node: fx.Node) -> str | None:
    if node.target is apply_site:
        return "site"
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return "linear" if isinstance(layer, nn.Linear) else "pass" if isinstance(layer, _PASS) else None
    return "linear" if node.target is F.linear else "pass" if node.target in (torch.flatten, "flatten") else None
