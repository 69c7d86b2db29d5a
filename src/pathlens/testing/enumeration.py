"""Fully connected gated networks as explicit sums over their paths: the slow twin of `pathlens.models`.

Everything is written out from weights and gates in float64, one path at a time. It shares no code with the models and
imports nothing of the package; for networks of a few hundred paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def all_paths(widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of one unit per layer, the last layer's unit running fastest.

    >>> list(all_paths((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return itertools.product(*(range(w) for w in widths))


def path_sum(
    weights: Sequence[Tensor],
    gates: Sequence[Tensor],
    inputs: Tensor,
    biases: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Output of a gated network, path by path.

    ŷ_c(x) = Σ_{i_0,…,i_L} x_{i_0} · Π_l g_l(x)_{i_l} U_l[i_l, i_{l−1}] · U_{L+1}[c, i_L]
           + Σ_{s=1}^{L+1} Σ_{i_s,…,i_L} b_s[i_s] · (the factors from layer s on).

    Without biases this is Theorem 1 (gates of the units' own pre-activations) and Theorem 2 (gates of a separate
    network) of the half-space paper; with `inputs` all ones it is the piecewise-constant network. A bias b_s starts a
    path at layer s.

    Parameters
    ----------
    weights : L + 1 tensors, shapes (w_l, w_{l−1})
        Value weights U_1, …, U_{L+1}; w_0 = d and w_{L+1} = c.
    gates : L tensors, shapes (n, w_l)
        Gate values, of any function of anything.
    inputs : Tensor, shape (n, d)
        What the value network reads.
    biases : L + 1 tensors or None, shapes (w_l,), optional

    Returns
    -------
    Tensor, shape (n, c), float64
        Exact up to rounding. Cost n·d·c·Π_l w_l products of 2L + 2 factors.

    Examples
    --------
    >>> u = [torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0, 10.0]])]
    >>> path_sum(u, [torch.tensor([[1.0, 0.0]])], torch.tensor([[5.0]]))
    tensor([[10.]], dtype=torch.float64)
    """
    values = [w.detach().double() for w in weights]
    switches = [g.detach().double() for g in gates]
    x = inputs.detach().double()
    outputs = torch.zeros(len(x), values[-1].shape[0], dtype=torch.float64)
    widths = [values[0].shape[1], *(w.shape[0] for w in values)]
    for start in range(len(widths)):  # 0: at an input node; s: at the bias of layer s
        bias = None if start == 0 or biases is None else biases[start - 1]
        if start and bias is None:
            continue
        for path in all_paths(widths[start:]):
            term = x[:, path[0]].clone() if bias is None else bias.detach().double()[path[0]].expand(len(x)).clone()
            if start and start <= len(switches):
                term = term * switches[start - 1][:, path[0]]
            for step, (source, target) in enumerate(itertools.pairwise(path)):
                layer = start + step  # the weights between layers `layer` and `layer` + 1
                term = term * values[layer][target, source]
                if layer < len(switches):
                    term = term * switches[layer][:, target]
            outputs[:, path[-1]] += term
    return outputs


def unit_scores(
    weights: Sequence[Tensor],
    inputs: Tensor,
    biases: Sequence[Tensor | None] | None = None,
    unit: Callable[[Tensor], Tensor] = lambda q: q,
) -> list[Tensor]:
    """Pre-activations of every layer of a plain network, unit by unit: q_l = W_l a(q_{l−1}) + b_l, q_0 read as x.

    Parameters
    ----------
    weights : tensors of shapes (w_l, w_{l−1})
    inputs : Tensor, shape (n, d)
    biases : tensors of shapes (w_l,) or None, optional
    unit : function
        The activation a; the identity gives the linear gate network of a DLGN.

    >>> unit_scores([torch.tensor([[1.0], [-1.0]])], torch.tensor([[3.0]]))
    [tensor([[ 3., -3.]], dtype=torch.float64)]
    """
    h = inputs.detach().double()
    scores = []
    for layer, weight in enumerate(weights):
        w = weight.detach().double()
        q = torch.zeros(len(h), w.shape[0], dtype=torch.float64)
        bias = None if biases is None else biases[layer]
        for i, j in all_paths(w.shape):
            q[:, i] += w[i, j] * h[:, j]
        if bias is not None:
            q = q + bias.detach().double()
        scores.append(q)
        h = unit(q)
    return scores
