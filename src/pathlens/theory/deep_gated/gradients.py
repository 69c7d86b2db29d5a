"""Parts of the gradient of a gated network: signal and wire, strengths and gates.

Kernels come from :mod:`pathlens.kernels`; this module splits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.data.inputs import as_numbers
from pathlens.errors import OptionError, RecordError
from pathlens.kernels import ntk
from pathlens.kernels.overlap import check_chain
from pathlens.models import GatedNetwork
from pathlens.recording import record
from pathlens.theory.inputs import float_array

# --- signal and wire -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignalWire:
    """The kernel of the values as signal times wire: K(s, t) = Σ_ij x_s(i) x_t(j) κ(s, t, i, j).

    Attributes
    ----------
    x : (n, d)
        The signal.
    kappa : (n, n, d, d)
        The wire, κ(s, t, i, j): inner products of the gradients of the coefficients that s and t give to inputs i, j.
    """

    x: np.ndarray
    kappa: np.ndarray

    @property
    def gram(self) -> np.ndarray:
        """K(s, t), all terms; (n, n)."""
        return np.einsum("si,tj,stij->st", self.x, self.x, self.kappa)

    @property
    def printed(self) -> np.ndarray:
        """Σ_i x_s(i) x_t(i) κ(s, t, i, i) alone, as Lemma 2.1 of the DGN paper prints it.

        Two paths that start at different inputs share weights from the second layer on, so that their gradients are
        orthogonal in the mean over random values only; for given values the terms i ≠ j are missing.
        """
        return np.einsum("si,ti,stii->st", self.x, self.x, self.kappa)

    def __repr__(self) -> str:
        n, d = self.x.shape
        gram = self.gram
        missing = np.linalg.norm(gram - self.printed) / np.linalg.norm(gram)
        return f"SignalWire(K = Σ_ij x_i x_j κ_ij, {n} × {n}, d = {d}; terms i ≠ j are {missing:.1%} of its norm)"


def signal_wire(net: GatedNetwork, X: Any, *, output: int = 0) -> SignalWire:
    """Split the kernel of the values into signal and wire (DGN, Lemma 2.1, with the terms that it omits).

    With the gates of s fixed, f(s) = Σ_i x_s(i) η_s(i), and κ(s, t, i, j) = ⟨∂η_s(i)/∂Θ, ∂η_t(j)/∂Θ⟩
    = Σ_l (H_{s,l−1} H_{t,l−1}ᵀ)_ij (δ_{s,l}·δ_{t,l}), H_{s,l} the layer's response to the unit vectors behind the gates
    of s.

    Parameters
    ----------
    net : GatedNetwork
        Fully connected, without biases. Soft gates are held fixed: K is then the part of the strengths.
    X : (n, d)
    output : int

    Returns
    -------
    SignalWire. Exact; n²d² numbers per layer.

    Examples
    --------
    >>> from pathlens import models
    >>> net, X = models.relu(3, hidden=(5, 5), seed=0).double(), torch.randn(4, 3, dtype=torch.float64)
    >>> parts = signal_wire(net, X)
    >>> np.allclose(parts.gram, ntk(net, X).dense()), np.allclose(parts.gram, parts.printed)
    (True, False)
    """
    x, weights, gates = read_chain("signal_wire", net, X, output)
    n, d = x.shape
    responses = [np.broadcast_to(np.eye(d), (n, d, d))]
    for w, g in zip(weights, gates):
        responses.append(g[:, None, :] * (responses[-1] @ w.T))
    behind = np.ones((n, 1))
    kappa = np.zeros((n, n, d, d))
    weights[-1] = weights[-1][output : output + 1]
    for H, w, g in zip(reversed(responses), reversed(weights), [*reversed(gates), None]):
        kappa += np.einsum("siw,tjw->stij", H, H) * (behind @ behind.T)[:, :, None, None]
        if g is not None:
            behind = g * (behind @ w)
    return SignalWire(x, kappa)


def check_gated(what: str, net: Any) -> None:
    """Raise OptionError unless `net` is a GatedNetwork."""
    if not isinstance(net, GatedNetwork):
        raise OptionError(f"{what}: expected a GatedNetwork, got {type(net).__name__}. Convert it with gated_twin.")


def check_output(what: str, output: int, outputs: int) -> None:
    """Raise OptionError unless `output` is the number of an output."""
    if not 0 <= output < outputs:
        raise OptionError(f"{what}: output={output}, but the network has {outputs} outputs, numbered from 0.")


def read_chain(
    what: str, net: GatedNetwork, X: Any, output: int
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Inputs of the value network, its weights (w_l, w_{l−1}) and the gates (n, w_l) of a fully connected network."""
    check_gated(what, net)
    rec = record(net, X, sensitivities=False, stream=False)
    check_output(what, output, rec.outputs)
    check_chain(what, rec)  # type: ignore[arg-type]
    layers = [layer for layer in rec.layers if layer.part != "gate"]
    parameters = dict(net.named_parameters())
    if any(f"{layer.name}.bias" in parameters for layer in layers):
        raise RecordError(f"{what}: the value network has biases, which start further paths. Build it with bias=False.")
    read = rec.layer_inputs[layers[0].name][0]  # type: ignore[union-attr]
    gates = [rec.gates(site) for site in rec.sites]  # type: ignore[union-attr]
    weights = [parameters[f"{layer.name}.weight"] for layer in layers]
    return float_array(read), [float_array(w) for w in weights], [float_array(g) for g in gates]


# --- strengths and gates -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adaptation:
    """The Gram matrix of the gradient in its parts: K = K^w + K^a + cross (DGN, section 3).

    Attributes
    ----------
    total, strength, gate : (n, n)
        K; K^w, the gradient of the path strengths with the gates fixed; K^a, that of the gates with strengths fixed.
    """

    total: np.ndarray
    strength: np.ndarray
    gate: np.ndarray

    @property
    def cross(self) -> np.ndarray:
        """K − K^w − K^a = Ψ^wᵀΨ^a + Ψ^aᵀΨ^w: zero (to rounding) where the gates come from a separate network."""
        return self.total - self.strength - self.gate

    @property
    def gate_share(self) -> float:
        """tr K^a / (tr K^w + tr K^a): how much of the gradient moves gates."""
        gate, strength = np.trace(self.gate), np.trace(self.strength)
        return float(gate / (gate + strength))

    def __repr__(self) -> str:
        cross = np.linalg.norm(self.cross) / np.linalg.norm(self.total)
        return (
            f"Adaptation(K = K^w + K^a + cross, {len(self.total)} rows; gates have {self.gate_share:.1%} of the "
            f"trace, cross terms {cross:.1%} of the norm)"
        )


def adaptation(net: GatedNetwork, X: Any) -> Adaptation:
    """Strength and gate adaptation: Ψ(m, s) = φ_sᵀ ∂w/∂θ(m) + (∂φ_s/∂θ(m))ᵀ w, as Gram matrices.

    Soft-GaLU has K = K^w + K^a; soft-ReLU, whose weights make both, has cross terms besides; hard gates have K^a = 0.
    DGN, section 3; NPF, Proposition 4.1 (K^V and K^F).

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.randn(6, 3, dtype=torch.float64)
    >>> own = adaptation(models.soft_relu(3, hidden=(8, 8), seed=0).double(), X)
    >>> apart = adaptation(models.soft_galu(3, hidden=(8, 8), seed=0).double(), X)
    >>> bool(abs(own.cross).max() > 1e-3), bool(abs(apart.cross).max() < 1e-12)
    (True, True)
    """
    check_gated("adaptation", net)
    total = float_array(ntk(net, X).dense())
    if net.gate.hard or net.trained == "values":
        return Adaptation(total, total, np.zeros_like(total))
    strength, gate = (float_array(ntk(net, X, part=part, frozen=True).dense()) for part in ("value", "feature"))
    if net.trained == "gates":
        strength = np.zeros_like(total)
    return Adaptation(total, strength, gate)


def gate_gradient_overlap(net: GatedNetwork, X: Any) -> np.ndarray:
    """δ(s, t) = Σ_{p from one input} Σ_m ∂A(x_s, p)/∂θ(m) ∂A(x_t, p)/∂θ(m), θ the gates' weights (DGN, Definition 3.1).

    Then E[K^a] = σ^{2d} (XXᵀ ∘ δ) over random values of variance σ² (Lemma 3.1). By the product rule (equation 6) a
    path contributes one term per layer; the sum over paths is taken layer by layer, from the gates' Jacobian.

    Returns
    -------
    (n, n). Exact; the Jacobian of one input has Σw_l rows and as many columns as the gates have weights.

    Examples
    --------
    >>> from pathlens import models
    >>> gate_gradient_overlap(models.soft_galu(2, hidden=(3, 3), seed=0).double(), torch.ones(1, 2)).shape
    (1, 1)
    """
    check_gated("gate_gradient_overlap", net)
    if net.source is None or net.gate.hard:
        raise OptionError("gate_gradient_overlap: expected soft gates from a separate network. Use models.soft_galu.")
    source: dict[str, Tensor] = {k: p.detach() for k, p in net.named_parameters() if k.startswith("source.")}
    x = as_numbers(X).to(next(iter(source.values())))

    def gates(parameters: dict[str, Tensor], row: Tensor) -> tuple[Tensor, ...]:
        named = {f"net.{k}": p for k, p in parameters.items()}
        return torch.func.functional_call(GateOutputs(net), named, (row[None],))

    values = [float_array(g) for g in net.gates(x).values()]
    slopes = []  # per input, per layer: (w_l, all weights of the gates)
    for row in x:
        found = torch.func.jacrev(gates)(source, row)
        slopes.append([float_array(torch.cat([j[0].flatten(1) for j in layer.values()], 1)) for layer in found])
    n, L = len(x), len(values)
    both = np.stack([g @ g.T for g in values])
    delta = np.zeros((n, n))
    for s in range(n):
        for t in range(n):
            for j in range(L):
                delta[s, t] += np.prod(np.delete(both[:, s, t], j)) * np.sum(slopes[s][j] * slopes[t][j])
                left = values[j][t] @ slopes[s][j]  # Σ_i G_{j,i}(t) ∂G_{j,i}(s)
                for k in range(L):
                    if k != j:
                        right = values[k][s] @ slopes[t][k]
                        delta[s, t] += np.prod(np.delete(both[:, s, t], [j, k])) * float(left @ right)
    return delta


class GateOutputs(torch.nn.Module):
    """A module whose outputs are the gates of a network, in the order of its sites."""

    def __init__(self, net: GatedNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net.gates(x).values())
