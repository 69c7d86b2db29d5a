"""Active and sensitive gates of soft networks, and the sub-networks that they form (DGN, section 3.1).

An active gate is nearly open; a sensitive gate changes when a weight of the gate network does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.errors import OptionError
from pathlens.models import GatedNetwork, Soft
from pathlens.models.sources import GraphSource
from pathlens.progress import ProgressBar
from pathlens.recording import as_rows

# --- thresholds ----------------------------------------------------------------------------------------------------


def sensitive_threshold(active: float, beta: float, *, epsilon: float = 0.0, slope: float = 1.0) -> float:
    """Smallest τ_S above which no gate is both active (G > τ_A) and sensitive (max_m |∂G/∂θ(m)| > τ_S).

    |∂G/∂θ| = β |χ′(βq)| |∂q/∂θ|, and where G = (1 + ε)σ(βq) > τ_A ≥ (1 + ε)/2, |χ′| < τ_A(1 − τ_A/(1 + ε)); hence
    τ_S = β τ_A (1 − τ_A/(1 + ε)) max|∂q/∂θ|. Below τ_A = (1 + ε)/2 the slope of an active gate can be larger than at
    the threshold, so that no such bound holds.

    Parameters
    ----------
    active : float
        τ_A in [(1 + ε)/2, 1 + ε).
    beta, epsilon : float
        Of the gates.
    slope : float
        Largest |∂q/∂θ(m)| of the gates in question, as `gate_slopes` measures it.

    Examples
    --------
    >>> round(sensitive_threshold(0.9, beta=4.0), 6), round(printed_threshold(0.9), 6)
    (0.36, 0.09)
    """
    top = 1 + epsilon
    if not top / 2 - 1e-6 <= active < top:  # ε of a network is a float32
        raise OptionError(
            f"sensitive_threshold: active={active} must lie in [(1 + ε)/2, 1 + ε) = [{top / 2:g}, "
            f"{top:g}): below it, active gates can have larger slopes than gates at the threshold."
        )
    return beta * slope * active * (1 - active / top)


def printed_threshold(active: float, *, epsilon: float = 0.0) -> float:
    """|dχ_ε/dv| at χ_ε(v) = τ_A, as DGN prints it (without the modulus); the factor β |∂q/∂θ| is missing."""
    return active * (1 - active / (1 + epsilon))


# --- slopes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateSlopes:
    """Gates of a soft network and their slopes.

    Attributes
    ----------
    gates : L arrays (n, w_l)
        G.
    scores : L arrays (n, w_l)
        max_m |∂q/∂θ(m)| over all weights that make the gates.
    slopes : L arrays (n, w_l)
        max_m |∂G/∂θ(m)| = |G′(q)| max_m |∂q/∂θ(m)|.
    beta, epsilon : float
    """

    gates: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    slopes: tuple[np.ndarray, ...]
    beta: float
    epsilon: float

    @property
    def steepest(self) -> float:
        """Largest |∂q/∂θ(m)| of all gates and inputs."""
        return max(float(s.max()) for s in self.scores)


def gate_slopes(net: GatedNetwork, X: Any) -> GateSlopes:
    """How far each gate can move per unit of one weight, max_m |∂G_{l,i}(x)/∂θ(m)|, for all gates and inputs.

    In a fully connected gate network the gradient of q_{l,i} to a layer's weights is an outer product,
    ∂q_{l,i}/∂W_k = J_{l←k}[i, ·] ⊗ e_{k−1} with J_{l←k} = ∂q_l/∂q_k, so that its largest entry is max|J[i, ·]| max|e|
    and no Jacobian of all weights is formed.

    Parameters
    ----------
    net : GatedNetwork
        Fully connected with soft gates: soft_galu, soft_relu, gates_only or dlgn.
    X : (n, d)

    Returns
    -------
    GateSlopes. Exact; n·L²w³ operations. A bar shows after two seconds.

    Examples
    --------
    >>> from pathlens import models
    >>> found = gate_slopes(models.soft_galu(2, hidden=(4, 4), seed=0), torch.ones(3, 2))
    >>> [s.shape for s in found.slopes]
    [(3, 4), (3, 4)]
    """
    layers = _gate_layers(net)
    assert isinstance(net.gate, Soft)
    gate = Soft(float(net.gate.beta), float(net.gate.epsilon)).double()
    name = net.source.activation_name if isinstance(net.source, GraphSource) else "soft"
    units: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda q: q, "relu": torch.relu, "soft": gate.gated}
    x = as_rows(X, like=net).double()
    parts: list[list[list[Tensor]]] = []
    step = max(1, 2**24 // max(w.shape[0] for w, _ in layers) ** 2)
    with ProgressBar("gate slopes", len(x)) as meter:
        for lo in range(0, len(x), step):
            parts.append(_slopes(layers, gate, units[name], x[lo : lo + step]))
            meter.advance(min(step, len(x) - lo))
    gates, scores, slopes = (tuple(torch.cat(layer).numpy() for layer in zip(*chunks)) for chunks in zip(*parts))
    return GateSlopes(gates, scores, slopes, float(gate.beta), float(gate.epsilon))


def _gate_layers(net: GatedNetwork) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of the layers that make the gates, in order, in float64."""
    if not isinstance(net, GatedNetwork) or not isinstance(net.gate, Soft):
        raise OptionError(
            "gate_slopes: expected a gated network with soft gates; hard gates have no slope. "
            "Use models.soft_galu, soft_relu or dlgn."
        )
    if net.source is not None and not isinstance(net.source, GraphSource):
        raise OptionError(f"gate_slopes: gates from {type(net.source).__name__} are not a chain of layers.")
    module: nn.Module = net.values if net.source is None else net.source
    found = [m for m in module.modules() if isinstance(m, nn.Linear)][: len(net.sites)]
    chain = all(a.out_features == b.in_features for a, b in itertools.pairwise(found))
    convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
    if len(found) < len(net.sites) or not chain or convolutional:
        raise OptionError(
            "gate_slopes: the gates are not made by a chain of dense layers (widths "
            f"{[m.out_features for m in found]}, {len(net.sites)} sites). Only fully connected networks are supported."
        )
    return [
        (m.weight.detach().cpu().double(), None if m.bias is None else m.bias.detach().cpu().double()) for m in found
    ]


def _slopes(
    layers: list[tuple[Tensor, Tensor | None]], gate: Soft, unit: Callable[[Tensor], Tensor], e: Tensor
) -> list[list[Tensor]]:
    """[gates, score slopes, gate slopes], each per layer, of a few rows e."""
    jacobians: list[Tensor] = []  # (w_l, w_k), or one per row from the second layer on
    sizes: list[Tensor] = []
    gates, scores, slopes = [], [], []
    for weight, bias in layers:
        # J_{l←k} of the layers before, through this layer's weights; a layer's own is the identity
        jacobians = [weight @ j for j in jacobians] + [torch.eye(len(weight), dtype=e.dtype)]
        sizes.append(e.abs().amax(1).clamp(min=0.0 if bias is None else 1.0))
        q = nn.functional.linear(e, weight, bias)
        largest = [j.abs().amax(-1) * size[:, None] for j, size in zip(jacobians, sizes)]
        with torch.enable_grad():
            leaf = q.clone().requires_grad_(True)
            (turn,) = torch.autograd.grad(gate(leaf).sum(), leaf, retain_graph=True)
            (through,) = torch.autograd.grad(unit(leaf).sum(), leaf)
        gates.append(gate(q))
        scores.append(torch.stack(largest).amax(0))
        slopes.append(turn.abs() * scores[-1])
        e = unit(q)
        jacobians = [through[:, :, None] * j for j in jacobians]
    return [gates, scores, slopes]


# --- sub-networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubNetworks:
    """Sizes of the active and the sensitive sub-network of each input.

    Attributes
    ----------
    active_gates, sensitive_gates, both : (n, L)
        Gates per layer with G > τ_A, with slope > τ_S, and with both (empty above `sensitive_threshold`).
    active_paths : (n,)
        Paths all of whose gates are active: they represent what was learned for this input.
    sensitive_paths : (n,)
        Paths with one sensitive gate and the others active: they learn.
    floor : float
        τ_S τ_A^(L−1), which the sensitive gate's term of equation 6 exceeds for some weight on every sensitive path.
    active, sensitive : float
        τ_A and τ_S.
    """

    active_gates: np.ndarray
    sensitive_gates: np.ndarray
    both: np.ndarray
    active_paths: np.ndarray
    sensitive_paths: np.ndarray
    floor: float
    active: float
    sensitive: float

    def __repr__(self) -> str:
        n, L = self.active_gates.shape
        return (
            f"SubNetworks({n} inputs, {L} layers; τ_A = {self.active:g}: {self.active_gates.sum(1).mean():.1f} "
            f"active gates, τ_S = {self.sensitive:.3g}: {self.sensitive_gates.sum(1).mean():.1f} sensitive, "
            f"{int(self.both.sum())} both)"
        )


def subnetworks(
    net: GatedNetwork | GateSlopes, X: Any = None, *, active: float = 0.9, sensitive: float | None = None
) -> SubNetworks:
    """Active and sensitive gates of every input, and the paths that they make (DGN, section 3.1).

    Parameters
    ----------
    net : GatedNetwork or GateSlopes
        A network together with ``X``, or its slopes, to compare several thresholds.
    X : (n, d), optional
    active : float
        τ_A.
    sensitive : float, optional
        τ_S; by default `sensitive_threshold` with the steepest score of these inputs, above which no gate is both.

    Examples
    --------
    >>> from pathlens import models
    >>> found = subnetworks(models.soft_galu(2, hidden=(8, 8), beta=8, epsilon=0, seed=0), torch.randn(5, 2))
    >>> int(found.both.sum())
    0
    """
    at = gate_slopes(net, X) if isinstance(net, GatedNetwork) else net
    if sensitive is None:
        sensitive = sensitive_threshold(active, at.beta, epsilon=at.epsilon, slope=at.steepest)
    on = [g > active for g in at.gates]
    moving = [s > sensitive for s in at.slopes]
    counts, sensitives, both = (
        np.stack([mask.sum(1) for mask in masks], axis=1) for masks in (on, moving, [a & m for a, m in zip(on, moving)])
    )
    paths = counts.astype(float)
    learning = [sensitives[:, k] * np.prod(np.delete(paths, k, axis=1), axis=1) for k in range(len(on))]
    return SubNetworks(
        counts,
        sensitives,
        both,
        paths.prod(1),
        np.sum(learning, axis=0),
        sensitive * active ** (len(on) - 1),
        active,
        sensitive,
    )
