"""The neural tangent kernel and its parts: value, feature, single layers, one output, all outputs.

Dense layers are products of two Gram matrices. Layers with many positions are in `convolution`, parameters outside
layers in `parameters`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.budgets import resolve_budget
from pathlens.errors import OptionError, RecordError, unknown_name
from pathlens.kernels.convolution import BlockTangent, LayerPlan, chosen_outputs, plan_layer, write_gradients
from pathlens.kernels.parameters import ParameterGradients
from pathlens.kernels.sources import Sides, Source, factors, probe, resolve
from pathlens.linops import Factor, GramSum, KernelOperator
from pathlens.models.gates import leak
from pathlens.models.tracing import unwrapped
from pathlens.precision import exact_precision
from pathlens.progress import ProgressBar
from pathlens.recording import GatedNetwork
from pathlens.records import Record

_PARTS = ("all", "value", "feature")
HELD_SHARE = 0.5  #: of the budget for the gradients of all examples; if they take more, they are computed in blocks


@exact_precision()
def ntk(
    source: Source | nn.Module,
    X: Any = None,
    Y: Any = None,
    *,
    part: str = "all",
    layer: str | Sequence[str] | None = None,
    outputs: str | int = "trace",
    frozen: bool = False,
    max_bytes: int | None = None,
) -> GramSum:
    """Neural tangent kernel: inner products of the gradients of the outputs by the parameters.

    K(s, t) = Σ_k ⟨∂f_k(s)/∂θ, ∂f_k(t)/∂θ⟩. A dense layer that reads h and whose pre-activation has sensitivities
    δ = ∂f/∂q adds (h hᵀ + 1_bias) ∘ (δ δᵀ); a convolution with patches A and sensitivities D at its positions adds
    ⟨D_sA_sᵀ, D_tA_tᵀ⟩.

    Parameters
    ----------
    source : Record, RecordStream or nn.Module
        A record with sensitivities, or any module together with ``X``: batch-norm scales, embeddings and other
        parameters outside linear and convolutional layers are differentiated example by example, which needs the
        module.
    X : (n, ...), optional
        Inputs, where ``source`` is a module. Batch-norm must be in eval mode.
    Y : (m, ...), Record or RecordStream, optional
        A second set of inputs: the result is the n × m kernel between both.
    part : {"all", "value", "feature"}
        "value" is the gradient by the weights of the value network (K^V), "feature" that by the weights of the gate
        network (K^F); if these are separate they add up to "all". If the same weights make values and gates: with hard
        gates K^F = 0; with soft gates "value" holds the gates fixed and "feature" the values (both need the network,
        not a record), and "all" includes the cross terms.
    layer : str or sequence of str, optional
        Only these layers (or parameters outside layers), frozen or not.
    outputs : "trace", "full" or int
        Sum over outputs, (n, n); all pairs, (nc, nc) with row order (example, output), i = s·c + k; or one output.
    frozen : bool
        Include parameters with ``requires_grad=False``. By default the kernel is that of gradient descent.
    max_bytes : int, optional
        Memory budget; records and gradients that do not fit are recomputed block by block.

    Returns
    -------
    GramSum of shape (n, n), (n, m), or c times that for ``outputs="full"``.

    Notes
    -----
    Exact. Dense layers: n·m·Σ_l 2(w_{l−1} + c·w_l) operations for the trace. Convolutions with P positions, patches of
    I numbers and m channels, per output: the smaller of 2nPIm + 2n²Im (gradients of each example) and 2n²P²(I + m)
    (pairs of positions). Straight-through gates count as hard. DGN paper, equations 5–6; NPF paper, Proposition 4.1.

    Examples
    --------
    >>> from pathlens import models
    >>> net, X = models.dlgn(2, hidden=(8, 8), seed=0), torch.randn(5, 2)
    >>> K, V, F = (ntk(net, X, part=part) for part in ("all", "value", "feature"))
    >>> torch.allclose(K.dense(), (V + F).dense(), atol=1e-6)
    True
    >>> ntk(nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2)), X, outputs="full").shape
    (10, 10)
    """
    if part not in _PARTS:
        raise unknown_name("part of the tangent kernel", part, _PARTS)
    if isinstance(outputs, Integral) and not isinstance(outputs, bool):
        outputs = int(outputs)  # NumPy's integers too
    source = unwrapped(source) if isinstance(source, nn.Module) else source
    if isinstance(source, GatedNetwork) and part != "all" and source.source is None and not source.gate.hard:
        source, part = _Held(source, part), "all"
    if isinstance(source, nn.Module) and (frozen or layer is not None):
        source = copy.deepcopy(source).requires_grad_(True)  # the record then contains every parameter
    budget = None if max_bytes is None else resolve_budget(max_bytes, torch.device("cpu"))
    sides = resolve("ntk", source, X, Y, sensitivities=True, max_bytes=None if budget is None else budget // 2)
    first = probe(sides.rows)
    _check_outputs(outputs, first)
    if not first.has_sensitivities:
        raise RecordError("ntk: the record was taken without a backward pass. Record with sensitivities=True.")
    plans, names = _choose(sides, first, part, layer, frozen)
    others = ParameterGradients(sides.net, names) if names and sides.net is not None else None
    terms, held = _build(sides, first, plans, others, outputs, max_bytes)
    K: Any = sum(terms)
    return GramSum(K.root, K.dtype, K.device, name="ntk", max_bytes=None if max_bytes is None else max_bytes - held)


def _check_outputs(outputs: str | int, first: Record) -> None:
    if isinstance(outputs, bool) or not (outputs in ("trace", "full") or isinstance(outputs, int)):
        raise OptionError(f"ntk: outputs must be 'trace', 'full' or the number of an output, got {outputs!r}.")
    if isinstance(outputs, int) and not 0 <= outputs < first.outputs:
        raise OptionError(f"ntk: outputs={outputs}, but the network has outputs 0 to {first.outputs - 1}.")


# --- which parameters --------------------------------------------------------------------------------------------


class _Held(nn.Module):
    """A self-gated soft network with its gates (part="value") or its values (part="feature") held fixed."""

    def __init__(self, net: GatedNetwork, part: str) -> None:
        super().__init__()
        self.values = net.values
        self._part = part
        # in a list, so that its parameters are not parameters of this module
        self._fixed = [copy.deepcopy(net).requires_grad_(False)]
        self.train(net.training)

    def forward(self, x: Tensor) -> Tensor:
        net = self._fixed[0]
        inputs = torch.ones_like(x) if net.value_input == "ones" else x
        if self._part == "value":
            gates = net.gates(x)
            return self.values(inputs, *(gates[name] for name in net.site_names))
        scores: list[Tensor] = []

        def unit(q: Tensor, slope: float) -> Tensor:
            scores.append(q)
            return net.gate.gated(q, slope)

        self.values(inputs, *(unit,) * len(net.sites))
        return net.values(inputs, *(leak(net.gate(q), s.slope) for q, s in zip(scores, net.sites)))


def _part_of(name: str, first: Record) -> str:
    """The network that a parameter outside layers belongs to: "value", "gate" or "shared"."""
    if any(layer.part == "shared" for layer in first.layers):
        return "shared"
    return "gate" if name.startswith("source.") else "value"


def _check_part(part: str, first: Record) -> None:
    shared = any(layer.part == "shared" for layer in first.layers)
    if part == "all" or not shared:
        return
    if first.gate_label.startswith("soft"):
        raise RecordError(
            f"ntk: a record does not contain part={part!r} of a soft network whose weights make both values and gates, "
            f"because its sensitivities are sums of both parts. Call ntk(net, X, part={part!r})."
        )
    if not first.sites:
        raise RecordError(f"ntk: part={part!r} was given, but the network has no gates. Use part='all'.")
    if part == "feature":
        raise RecordError(
            "ntk: part='feature' is zero: the same weights make values and gates, and hard gates have no gradient. "
            "Use part='all'."
        )


def _choose(
    sides: Sides, first: Record, part: str, layer: str | Sequence[str] | None, frozen: bool
) -> tuple[list[LayerPlan], list[str]]:
    """The layers with a gradient, and the parameters outside layers, of the kernel."""
    _check_part(part, first)
    named = None if layer is None else [layer] if isinstance(layer, str) else list(layer)
    if named is not None:
        known = [a.name for a in first.layers] + list(first.untracked)
        for name in named:
            if name not in known:
                raise unknown_name("layer of the record", name, known)

    def wanted(name: str, network: str, trained: bool = True) -> bool:
        if named is not None:
            return name in named
        return trained and (part == "all" or (part == "feature") == (network == "gate"))

    layers = [a for a in first.layers if wanted(a.name, a.part, frozen or a.trainable)]
    names = [name for name in first.untracked if wanted(name, _part_of(name, first))]
    if names and sides.net is None:
        raise RecordError(
            f"ntk: the parameters {', '.join(names[:4])}{' …' if len(names) > 4 else ''} are in no linear or "
            "convolutional layer, so that a record does not contain their gradient. Call ntk(net, X), or pass layer=…."
        )
    if not layers and not names:
        raise RecordError(
            f"ntk: part={part!r} has no trainable parameters. Pass frozen=True to include frozen ones. Layers: "
            f"{', '.join(f'{a.name} ({a.part})' for a in first.layers)}."
        )
    n = max(side.n for side in sides.both())
    # layers of hard gates have no sensitivities, since f does not depend on them
    plans = [plan_layer(a, first, n) for a in layers if a.identity or a.name in first.sensitivity]
    return plans, names


# --- the kernel --------------------------------------------------------------------------------------------------


def _build(
    sides: Sides,
    first: Record,
    plans: list[LayerPlan],
    others: ParameterGradients | None,
    outputs: str | int,
    max_bytes: int | None,
) -> tuple[list[KernelOperator], int]:
    """Terms whose sum is the kernel, and the bytes of the budget that they hold."""
    budget = resolve_budget(max_bytes, first.f.device)
    made: list[KernelOperator] = []
    rest, kept = plans, 0
    in_memory = all(isinstance(side, Record) for side in sides.both())
    if in_memory or (others is None and all(p.flat for p in plans)):  # else one pass over the stream for all layers
        made.extend(_dense_terms(sides, first, [p for p in plans if p.flat], outputs, budget))
        rest = [p for p in plans if not p.flat]
    if rest or others is not None:
        held = [p for p in rest if p.explicit or p.flat]
        count = len(chosen_outputs(outputs, first.outputs))
        numbers = sum(sum(p.gradient_sizes) for p in held) + (others.size if others else 0)
        needed = numbers * first.f.dtype.itemsize * count * sum(side.n for side in sides.both())
        step = _rows_at_once(first, held, others, count, budget // 4)
        if needed <= HELD_SHARE * budget and step > 0:
            made.extend(_gradient_terms(sides, first, held, others, outputs, step))
            rest, others, kept = [p for p in rest if p not in held], None, needed
    if rest or others is not None:
        spare = budget - budget // 8 - kept
        made.append(BlockTangent(sides, rest, others, outputs, spare, max_bytes=max_bytes))
    return made or [_zero(sides, first, outputs)], kept  # hard gates: f does not depend on their layers


def _zero(sides: Sides, first: Record, outputs: str | int) -> GramSum:
    times = first.outputs if outputs == "full" else 1
    left = first.f.new_zeros(sides.rows.n * times, 1)
    right = None if sides.cols is None else first.f.new_zeros(sides.cols.n * times, 1)
    return GramSum.from_factors([[Factor("0", left, right)]])


def _dense_matrices(rec: Record, plans: list[LayerPlan], outputs: str | int) -> dict[str, Tensor]:
    """Factors of dense layers: the input of each, and its sensitivities unless they are the identity."""
    found: dict[str, Tensor] = {}
    n, c = rec.n, rec.outputs
    for a in (plan.layer for plan in plans):
        h = rec.inputs(a.name).reshape(n, -1)  # a convolution at one position may read a part of its image
        found[f"{a.name}.in"] = h.repeat_interleave(c, 0) if outputs == "full" else h
        if not a.identity:
            d = rec.sensitivity[a.name]
            rows = n * c if outputs == "full" else n
            found[f"{a.name}.out"] = (d[:, outputs] if isinstance(outputs, int) else d).reshape(rows, -1)
        elif outputs == "full":
            found[f"{a.name}.out"] = torch.eye(c, dtype=torch.bool, device=h.device).repeat(n, 1)
    return found


def _dense_terms(sides: Sides, first: Record, plans: list[LayerPlan], outputs: str | int, budget: int) -> list[GramSum]:
    """(h hᵀ + 1_bias) ∘ (δ δᵀ) for every dense layer."""
    if not plans:
        return []
    times = first.outputs if outputs == "full" else 1
    found = factors(sides, partial(_dense_matrices, plans=plans, outputs=outputs), times, budget)
    n, m = sides.rows.n * times, None if sides.cols is None else sides.cols.n * times
    made = []
    for plan in plans:
        name = plan.layer.name
        inner = [[Factor(f"{name}.in", *found[f"{name}.in"])]]
        if plan.layer.bias:
            inner.append([Factor.ones(n, m, device=first.f.device)])
        K = GramSum.from_factors(inner)
        out = f"{name}.out"
        if out in found:
            dtype = first.f.dtype if found[out][0].dtype == torch.bool else None
            K = K * GramSum.from_factors([[Factor(out, *found[out])]], dtype=dtype)
        elif outputs == "trace" and first.outputs > 1:
            K = K * float(first.outputs)
        made.append(K)
    return made


def _rows_at_once(
    first: Record, plans: list[LayerPlan], others: ParameterGradients | None, count: int, budget: int
) -> int:
    """Rows that can be recorded and differentiated at once for `count` outputs; 0 if not even one."""
    patches = max((p.positions * (p.layer.inputs + count * p.layer.outputs) for p in plans), default=0)
    # a row takes its record, as much again for the backward pass, the patches of one layer, gradients outside layers
    row = 4 * first.nbytes + 2 * first.f.dtype.itemsize * (patches + (others.size if others else 0))
    return budget // max(row, 1)


def _gradient_terms(
    sides: Sides,
    first: Record,
    plans: list[LayerPlan],
    others: ParameterGradients | None,
    outputs: str | int,
    step: int,
) -> list[GramSum]:
    """G Gᵀ with the gradients of every example in memory, computed for all layers in one pass over the rows."""
    wanted = chosen_outputs(outputs, first.outputs)
    names = [f"{p.layer.name}.{what}" for p in plans for what in ("weight", "bias")[: len(p.gradient_sizes)]]
    sizes = [size for p in plans for size in p.gradient_sizes]
    if others is not None:
        names, sizes = [*names, "other parameters"], [*sizes, others.size]

    def matrices(source: Source) -> list[Tensor]:
        made = [first.f.new_empty(source.n, len(wanted), size) for size in sizes]
        with ProgressBar("gradients of the ntk", source.n) as meter:
            for lo in range(0, source.n, step):
                hi = min(lo + step, source.n)
                cut, left = source.rows(lo, hi), iter(made)
                for plan in plans:
                    write_gradients(cut, plan, wanted, [next(left)[lo:hi] for _ in plan.gradient_sizes])
                if others is not None:
                    for at, k in enumerate(wanted):
                        made[-1][lo:hi, at] = others(cut.x, cut.kept[k] if cut.kept else k)
                meter.advance(hi - lo)
        return [m.flatten(0, 1) if outputs == "full" else m.flatten(1) for m in made]

    both = [matrices(side) for side in sides.both()]
    return [GramSum.from_factors([[Factor(name, *pair)]]) for name, *pair in zip(names, *both)]
