"""Parts of the gradient of a gated network: signal and wire, strengths and gates, paths and their values.

Kernels come from :mod:`pathlens.kernels`; this module splits them, or rebuilds them from every path of a tiny network.
Initialisation lives in moments, active and sensitive gates in sensitive_gates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathlens.data.inputs import as_numbers
from pathlens.errors import OptionError, RecordError
from pathlens.kernels import npk, ntk
from pathlens.kernels.overlap import check_chain
from pathlens.models import GatedNetwork
from pathlens.paths.trellis import take_trellis
from pathlens.recording import record
from pathlens.theory.inputs import float_array

__all__ = [
    "Adaptation",
    "PathTable",
    "RhoBound",
    "SignalWire",
    "adaptation",
    "gate_gradient_overlap",
    "path_table",
    "rho_bound",
    "signal_wire",
]

MOST_PATHS = 20_000  #: largest number of paths that `path_table` lists; a P × P kernel of them takes 3 GB


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
    x, weights, gates = _chain("signal_wire", net, X, output)
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


def _chain(what: str, net: GatedNetwork, X: Any, output: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Inputs of the value network, its weights (w_l, w_{l−1}) and the gates (n, w_l) of a fully connected network."""
    check_gated(what, net)
    rec = record(net, X, sensitivities=False, stream=False)
    if not 0 <= output < rec.outputs:
        raise OptionError(f"{what}: output={output}, but the network has {rec.outputs} outputs, numbered from 0.")
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
        return torch.func.functional_call(
            GateOutputs(net), {f"net.{k}": p for k, p in parameters.items()}, (row[None],)
        )

    values = [float_array(g) for g in GateOutputs(net)(x)]
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


# --- every path ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathTable:
    """Every path of a tiny network: its units, its value, and its feature for each input.

    Attributes
    ----------
    units : (P, L + 1)
        Input node and one unit per hidden layer, counted from 0; the last layer's unit runs fastest.
    strengths : (P,)
        v(p), the product of the d = L + 1 weights (neural path value).
    activity : (n, P)
        A(x, p), the product of the gates.
    features : (n, P)
        φ_x(p) = x(p₀) A(x, p) (neural path feature), so that f = φ·v.
    weights : (d, P)
        The weights along each path.
    """

    units: np.ndarray
    strengths: np.ndarray
    activity: np.ndarray
    features: np.ndarray
    weights: np.ndarray

    @property
    def outputs(self) -> np.ndarray:
        """f(x) = Σ_p φ_x(p) v(p), (n,) (NPF, Proposition 2.1)."""
        return self.features @ self.strengths

    @property
    def kernel(self) -> np.ndarray:
        """Neural path kernel H = ΦᵀΦ, (n, n)."""
        return self.features @ self.features.T

    @property
    def value_tangent_kernel(self) -> np.ndarray:
        """V(p, q) = ⟨∂v(p)/∂Θ, ∂v(q)/∂Θ⟩, (P, P): for each weight that both paths use, the products of the others.

        It depends on the weights alone, not on gates or inputs (NPF, Definition 3.2), and K = Φᵀ V Φ.
        """
        ends = np.concatenate([self.units, np.zeros((len(self.units), 1), dtype=int)], axis=1)
        V = np.zeros((len(self.units),) * 2)
        for k in range(len(self.weights)):
            others = np.prod(np.delete(self.weights, k, axis=0), axis=0)
            edge = ends[:, k] * (1 + ends.max()) + ends[:, k + 1]
            V += (edge[:, None] == edge) * np.outer(others, others)
        return V

    @property
    def gram(self) -> np.ndarray:
        """K = Φᵀ V Φ, the tangent kernel of the values from paths alone, (n, n) (NPF, Proposition 3.1)."""
        return self.features @ self.value_tangent_kernel @ self.features.T

    def __repr__(self) -> str:
        active = ", ".join(str(int(k)) for k in (self.activity > 0).sum(1)[:8])
        more = ", …" if len(self.activity) > 8 else ""
        return f"PathTable({len(self.units)} paths, {len(self.activity)} inputs; active: {active}{more})"


def path_table(net: GatedNetwork, X: Any, *, output: int = 0) -> PathTable:
    """List every path of a tiny fully connected network without biases, inputs counted as nodes (NPF, Definition 2.1).

    Examples
    --------
    >>> from pathlens import models
    >>> path_table(models.relu(2, hidden=(3, 3), seed=0), torch.ones(1, 2)).units.shape
    (18, 3)
    """
    x, weights, gates = _chain("path_table", net, X, output)
    if not take_trellis("path_table", net, X, include_inputs=True).direct:
        raise RecordError(
            "path_table: the first layer reads transformed inputs, so its columns do not correspond to input nodes. "
            "Apply the transformation before the network: path_table(net, transform(X))."
        )
    sizes = [x.shape[1], *(g.shape[1] for g in gates)]
    total = math.prod(sizes)
    if total > MOST_PATHS:
        raise OptionError(
            f"path_table: the network has {total} paths, at most {MOST_PATHS} are listed. "
            "For larger networks use pathlens.kernels.npk and ntk, which need no list of paths."
        )
    units = np.stack([k.ravel() for k in np.meshgrid(*map(np.arange, sizes), indexing="ij")], axis=1)
    ends = [*units.T, np.full(total, output)]
    along = np.stack([w[ends[k + 1], ends[k]] for k, w in enumerate(weights)])
    activity = np.prod([g[:, units[:, k + 1]] for k, g in enumerate(gates)], axis=0)
    return PathTable(units, along.prod(0), activity, x[:, units[:, 0]] * activity, along)


@dataclass(frozen=True)
class RhoBound:
    """ρ_min(K) ≤ ρ_min(H) ρ_max(V): a tangent kernel is well conditioned only if the path kernel is (NPF, Prop. 3.3).

    Attributes
    ----------
    ntk_smallest, npk_smallest, vtk_largest
        ρ_min(K), ρ_min(H), ρ_max(V).
    """

    ntk_smallest: float
    npk_smallest: float
    vtk_largest: float

    @property
    def bound(self) -> float:
        """ρ_min(H) ρ_max(V)."""
        return self.npk_smallest * self.vtk_largest


def rho_bound(net: GatedNetwork, X: Any, *, output: int = 0) -> RhoBound:
    """Smallest eigenvalues of the tangent and the path kernel, and the largest of the value tangent kernel.

    For networks small enough for `path_table`; the two n × n kernels come from :mod:`pathlens.kernels`. K is that of
    one output and of the values alone; soft gates are held fixed, and are soft in H too.

    Examples
    --------
    >>> from pathlens import models
    >>> found = rho_bound(models.relu(3, hidden=(4, 4), seed=0).double(), torch.eye(3, dtype=torch.float64))
    >>> found.ntk_smallest <= found.bound + 1e-12
    True
    """
    table = path_table(net, X, output=output)
    kernels = ntk(net, X, part="value", outputs=output, frozen=True), npk(net, X, soft=True)
    K, H = (np.linalg.eigvalsh(float_array(kernel.dense())) for kernel in kernels)
    return RhoBound(float(K[0]), float(H[0]), float(np.linalg.eigvalsh(table.value_tangent_kernel)[-1]))
