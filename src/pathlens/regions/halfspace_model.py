"""`HalfSpaceModel`: a hard-gated network as plain arrays, half-spaces of the input space and the values they switch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pathlens.errors import ShapeError
from pathlens.models import GatedNetwork, dlgn_shallow

_ROWS = 4096  # rows per block
_SEGMENTS = 128  # segments per block
_TOGETHER = 1e-9  # gates that switch within this share of a segment switch together: their order could be rounding
_LOST = 1e-6  # a sum of changes below this share of their sizes is rounding

# building a network traces it, and training sets torch's thread count and global generator: one at a time per process
ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class HalfSpaceModel:
    """A gated network whose gate (l, i) is open where ``normals[l][i]·x + offsets[l][i] > 0``.

    h_0 = x,  h_l = 1(N_l x + o_l > 0) ⊙ (U_l h_{l−1} + b_l),  f = U_{L+1} h_L + b_{L+1}

    Attributes
    ----------
    normals : tuple of (w_l, d), offsets : tuple of (w_l,)
        The half-spaces of each of the L hidden layers.
    weights : tuple of (w_l, w_{l−1}) and (c, w_L), biases : tuple of (w_l,) and (c,)
        The value network; a piecewise constant network has a zero first weight.
    importances : tuple of (w_l,)
        Mean over the training rows of |change of the outputs if the gate were closed|, summed over outputs.
    open_shares : tuple of (w_l,)
        Share of the training rows inside the half-space.
    groups : (w_L,) of int
        For each last-layer half-space, the most important one that contains the same training rows.
    spread, centre : (d,)
        Standard deviation of each feature in training, 0 where it was constant, and its mean.
    """

    normals: tuple[np.ndarray, ...]
    offsets: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    importances: tuple[np.ndarray, ...]
    open_shares: tuple[np.ndarray, ...]
    groups: np.ndarray
    spread: np.ndarray
    centre: np.ndarray

    @property
    def d(self) -> int:
        """Input features."""
        return int(self.normals[0].shape[1])

    @property
    def c(self) -> int:
        """Outputs."""
        return len(self.biases[-1])

    @property
    def hidden(self) -> tuple[int, ...]:
        """Half-spaces per layer."""
        return tuple(len(o) for o in self.offsets)

    @property
    def in_use(self) -> int:
        """Number of half-spaces that separate training rows and whose gate changes some output."""
        return sum(int(((s > 0) & (s < 1) & (i > 0)).sum()) for s, i in zip(self.open_shares, self.importances))

    def sides(self, X: np.ndarray) -> list[np.ndarray]:
        """Per layer, N_l x + o_l: positive inside, (n, w_l)."""
        return [X @ normal.T + offset for normal, offset in zip(self.normals, self.offsets)]

    def bits(self, X: np.ndarray) -> list[np.ndarray]:
        """Per layer, which rows lie in which half-space: bool (n, w_l)."""
        return [side > 0 for side in self.sides(X)]

    def units(self, X: np.ndarray) -> list[np.ndarray]:
        """h_1, …, h_L: gated units of each layer, (n, w_l) each."""
        out, h = [], X
        for gate, weight, bias in zip(self.bits(X), self.weights, self.biases):
            h = gate * (h @ weight.T + bias)
            out.append(h)
        return out

    def outputs(self, X: np.ndarray) -> np.ndarray:
        """f(X), (n, c)."""
        parts = [X[lo : lo + _ROWS] for lo in range(0, len(X), _ROWS)]
        return np.concatenate([self.units(x)[-1] @ self.weights[-1].T + self.biases[-1] for x in parts])

    def split(self, X: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Contributions h_{l,i} · ∂f_k/∂h_{l,i} of a layer's units, (n, c, w_l), and those of later biases, (n, c).

        f is linear in each h_l, so their sum is f: a contribution is what closing the gate would remove. Layers count
        from 1. The same as `paths.groups` of `network()`, for all outputs at once.
        """
        gates = self.bits(X)
        slope = np.broadcast_to(self.weights[-1], (len(X), *self.weights[-1].shape))
        biases = np.broadcast_to(self.biases[-1], (len(X), self.c))
        for upper in range(len(gates) - 1, layer - 1, -1):
            slope = slope * gates[upper][:, None, :]
            biases = biases + slope @ self.biases[upper]
            slope = slope @ self.weights[upper]
        return slope * self.units(X)[layer - 1][:, None, :], biases

    # --- features ----------------------------------------------------------------------------------------------

    def feature_contributions(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Contribution of each feature along the segment from the means r to a row, (n, c, d), and f(r), (c,).

        f(x) − f(r) = Σ_j (x_j − r_j) · [∫_0^1 ∂f/∂x_j dt + Σ_g jump_g · n_{g,j} / n_g·(x − r)]

        The integral is over r + t(x − r), the sum over gates g that switch on the segment, each of them once. The jump
        of f is divided among the features in proportion to their contribution to crossing the boundary. For gates that
        switch together, jump_g = ∫_0^1 ∂f/∂s_g ds along the diagonal of their states s. This is the limit of integrated
        gradients for gates that become sharp. O(n·c·w²) for each gate that switches.
        """
        start, out = self.sides(self.centre[None]), np.zeros((len(X), self.c, self.d))
        for lo in range(0, len(X), _ROWS):  # blocks as in `outputs`: rounding puts each row on the same sides
            sides = self.sides(X[lo : lo + _ROWS])
            switches = sum(((a > 0) != (b > 0)).sum(1) for a, b in zip(start, sides))
            rows = np.argsort(switches, kind="stable")  # rows with equal numbers of switches together
            for some in (rows[at : at + _SEGMENTS] for at in range(0, len(rows), _SEGMENTS)):
                out[lo + some] = self._along_segments(X[lo + some], start, [side[some] for side in sides])
        return out, self.outputs(self.centre[None])[0]

    def _along_segments(self, X: np.ndarray, start: list[np.ndarray], end: list[np.ndarray]) -> np.ndarray:
        """`feature_contributions` of one block of rows, given `sides` of the means and of the rows."""
        away = X - self.centre
        times, stages = _switches(np.concatenate(start, axis=1), np.concatenate(end, axis=1))
        by_layer = np.split(stages, np.cumsum(self.hidden)[:-1], axis=1)
        gates = [np.repeat(side > 0, len(X), axis=0).astype(np.float64) for side in start]
        jumps = [np.zeros((len(X), self.c, w)) for w in self.hidden]
        through = np.zeros_like(jumps[0])  # ∫ ∂f/∂h_1 over the time that each gate of the first layer is open
        value, growth = self.centre @ self.weights[0].T + self.biases[0], away @ self.weights[0].T
        nodes, shares = np.polynomial.legendre.leggauss((len(gates) + 1) // 2)  # exact: f has degree L in s
        for stage, (since, now) in enumerate(zip(np.pad(times, ((0, 0), (1, 0))).T, times.T)):
            through += self._slopes(gates)[0] * (gates[0] * (now - since)[:, None])[:, None]
            turns = [np.where(own == stage, 1 - 2 * gate, 0) for own, gate in zip(by_layer, gates)]
            for node, share in zip((nodes + 1) / 2, shares / 2):
                between = [gate + node * turn for gate, turn in zip(gates, turns)]
                z = value + now[:, None] * growth
                for i, slope in enumerate(self._slopes(between)):
                    z = z if i == 0 else (between[i - 1] * z) @ self.weights[i].T + self.biases[i]
                    jumps[i] += slope * (share * turns[i] * z)[:, None]
            gates = [gate + turn for gate, turn in zip(gates, turns)]
        rates, shared = np.tensordot(through, self.weights[0], 1), np.zeros((len(X), self.c, self.d))
        sizes = np.abs(away) + np.finfo(float).eps * (np.abs(X) + np.abs(self.centre))  # including rounding
        for jump, normal in zip(jumps, self.normals):
            across, size = away @ normal.T, sizes @ np.abs(normal).T
            lost = np.abs(across) <= _LOST * size  # divided by the sizes of the changes instead
            rates += np.tensordot(jump / np.where(lost, np.inf, across)[:, None], normal, 1)
            shared += np.tensordot(jump / np.where(lost & (size > 0), size, np.inf)[:, None], np.abs(normal), 1)
        return rates * away[:, None] + shared * sizes[:, None]

    def _slopes(self, gates: Sequence[np.ndarray]) -> list[np.ndarray]:
        """∂f/∂h_1, …, ∂f/∂h_L for the given gates, (n, c, w_l) each."""
        out = [np.broadcast_to(self.weights[-1], (len(gates[0]), *self.weights[-1].shape))]
        for gate, weight in zip(gates[:0:-1], self.weights[-2:0:-1]):
            out.append(np.tensordot(out[-1] * gate[:, None], weight, 1))
        return out[::-1]

    def measured(self, X: np.ndarray, share: np.ndarray) -> HalfSpaceModel:
        """A copy with importances, open shares and groups measured on rows with these weights, which sum to one."""
        importances, shares = ([np.zeros(w) for w in self.hidden] for _ in range(2))
        columns = [b""] * self.hidden[-1]
        for lo in range(0, len(X), _ROWS):
            x, s = X[lo : lo + _ROWS], share[lo : lo + _ROWS]
            gates = self.bits(x)
            for layer, gate in enumerate(gates):
                importances[layer] += s @ np.abs(self.split(x, layer + 1)[0]).sum(1)
                shares[layer] += np.where(gate.all(0), s.sum(), s @ gate)
            columns = [c + np.packbits(bits).tobytes() for c, bits in zip(columns, gates[-1].T)]
        clipped = tuple(np.where(s > 1 - 1e-12, 1.0, s) for s in shares)  # the weights' sum carries rounding
        leaders: dict[bytes, int] = {}
        for unit in np.argsort(-importances[-1], kind="stable"):
            leaders.setdefault(columns[unit], int(unit))
        groups = np.array([leaders[c] for c in columns])
        return replace(self, importances=tuple(importances), open_shares=clipped, groups=groups)

    def network(self) -> GatedNetwork:
        """The same function as a hard-gated float64 network whose gates read x directly."""
        with ONE_AT_A_TIME:
            net = dlgn_shallow(self.d, self.hidden, self.c, gate="hard", bias=True, seed=0).double()
        assert net.source is not None
        pairs = [*zip(self.normals, self.offsets), *zip(self.weights, self.biases)]
        layers = [m for part in (net.source, net.values) for m in part.modules() if isinstance(m, torch.nn.Linear)]
        with torch.no_grad():
            for layer, (weight, bias) in zip(layers, pairs, strict=True):
                layer.weight.copy_(torch.tensor(weight))  # a copy: arrays that joblib maps from disk are read-only
                layer.bias.copy_(torch.tensor(bias))
        return net.eval()

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by name, layers numbered from 1; the inverse of `from_arrays`."""
        out = {"spread": self.spread, "centre": self.centre, "groups": self.groups}
        for name in _PER_LAYER:
            out |= {f"{name}.{i}": a for i, a in enumerate(getattr(self, name), start=1)}
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> HalfSpaceModel:
        """The inverse of `arrays`; refuses shapes that do not fit together."""
        lists = {}
        for name in _PER_LAYER:
            count = sum(key.startswith(f"{name}.") for key in arrays)
            lists[name] = tuple(np.asarray(arrays[f"{name}.{i}"], dtype=np.float64) for i in range(1, count + 1))
        spread, centre = (np.asarray(arrays[name], dtype=np.float64) for name in ("spread", "centre"))
        model = cls(**lists, groups=np.asarray(arrays["groups"]), spread=spread, centre=centre)
        d, hidden, widths = model.d, model.hidden, (*model.hidden, model.c)
        per_unit = [(w,) for w in hidden]
        shapes = {
            "normals": [(w, d) for w in hidden],
            "offsets": per_unit,
            "weights": list(zip(widths, (d, *hidden))),
            "biases": [(w,) for w in widths],
            "importances": per_unit,
            "open_shares": per_unit,
        }
        fit = all([a.shape for a in lists[name]] == wanted for name, wanted in shapes.items())
        if not fit or (spread.shape, centre.shape, model.groups.shape) != ((d,), (d,), hidden[-1:]):
            raise ShapeError(f"HalfSpaceModel: {len(hidden)} layers of arrays whose shapes do not fit together.")
        return model


def _switches(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times in [0, 1] at which gates switch on segments, from their sides at both ends, (1, w) and (n, w).

    Returns
    -------
    times : (n, k)
        In ascending order and without repetition; where there are fewer than k the others are 1, as is the last.
    stages : (n, w) of int
        The index of each gate's time, or −1 where it does not switch.
    """
    switch = (start > 0) != (end > 0)
    when = np.divide(start, start - end, out=np.full(end.shape, 2.0), where=switch)
    order = when.argsort(axis=1, kind="stable")
    ascending = np.take_along_axis(when, order, axis=1)
    ranks = np.pad((np.diff(ascending, axis=1) > _TOGETHER).cumsum(axis=1), ((0, 0), (1, 0)))
    times = np.ones((len(end), ranks.max(initial=0) + 2))
    np.put_along_axis(times, ranks[:, ::-1], np.minimum(ascending, 1.0)[:, ::-1], axis=1)  # the first of each stage
    stages = np.empty_like(ranks)
    np.put_along_axis(stages, order, ranks, axis=1)
    return times, np.where(switch, stages, -1)


_PER_LAYER = ("normals", "offsets", "weights", "biases", "importances", "open_shares")
