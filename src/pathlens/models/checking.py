"""Numerical checks of a converted template.

The graph is run in float64, with perturbed weights so that none is zero by chance, and compared with the template; the
gate network and, for fixed gates, the value network are tested for being affine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from pathlens.errors import ConversionError
from pathlens.models.graphs import ValueInterpreter
from pathlens.models.tracing import (
    HOOKS,
    Traced,
    describe,
    gate_graph,
    graph_module,
    is_max_pool,
    linear_unit,
    value_graph,
)

_POINTS = (0.0, 1.0, 1.75, -0.5)  # on a line; values at the first two determine those at the last two
_TOLERANCE = 1e-8  # relative, in float64; errors of functions that are not affine are far larger


class Checker:
    """The checks of one traced template on one example.

    All run on a single float64 copy of the template on the CPU; torch's random state is restored.
    """

    def __init__(self, traced: Traced, template: nn.Module, example: Tensor) -> None:
        self.traced = traced
        self.name = type(template).__name__
        self.hooked = {name: m for name, m in template.named_modules() if m._forward_hooks or m._forward_pre_hooks}
        self.copy = copy.deepcopy(traced.root).cpu().double()
        first = example.detach()[:1].cpu().double()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            _perturb(self.copy)
            scale = max(1.0, float(first.std())) if first.numel() > 1 else 1.0
            # an image has many positions; of flat rows, few could leave all units of a layer off, which hides the
            # layers after it, and batch-norm in train mode maps any two rows to ±1
            others = [torch.randn_like(first) for _ in range(1 if first.ndim > 2 else 15)]
            self.rows = torch.cat([first, *(first + scale * other for other in others)])
            self.far = 100 * scale * torch.randn_like(first)

    # --- the template ------------------------------------------------------------------------------------------

    def equals_template(self) -> None:
        """The ReLU network of the graph is the template, hooks and all, in both modes, row by row."""
        expected = self._run_template()
        values = self._value_network()  # after the template has run, since building it clears in-place flags
        for training in (True, False):
            with self._buffers_kept():
                units = (nn.functional.leaky_relu,) * len(self.traced.sites)
                got = self._run(values.train(training), self.rows.clone(), *units)
            want = expected[training]
            if not isinstance(want, Tensor) or want.shape != got.shape or want.shape[:1] != self.rows.shape[:1]:
                shape = tuple(want.shape) if isinstance(want, Tensor) else type(want).__name__
                raise ConversionError(
                    f"gated_twin: {self.name}: for {len(self.rows)} inputs it returns {shape}, expected one tensor "
                    f"with {len(self.rows)} rows. Wrap it so that it returns one row per input."
                )
            if not bool(want.isfinite().all()):
                raise ConversionError(
                    f"gated_twin: {self.name}: its output is NaN or infinite on inputs like the example's. Check its "
                    "weights: has its training diverged?"
                )
            if not torch.allclose(want, got, rtol=_TOLERANCE, atol=1e-10 * float(1 + want.abs().max())):
                error = float((want - got).abs().max() / want.abs().max().clamp_min(1e-30))
                raise ConversionError(
                    f"gated_twin: {self.name}: in {'train' if training else 'eval'} mode the converted network differs "
                    f"from the template by {error:.1e} (relative). Something that cannot be followed changes its "
                    "output: a hook that rewrites activations, an in-place change through a view, or randomness; "
                    "remove it."
                )

    def _value_network(self) -> fx.GraphModule:
        return graph_module(self.copy, value_graph(self.traced), "Values")

    def _run_template(self) -> dict[bool, Any]:
        """Outputs in both modes, with the user's forward hooks on the copy while it runs."""
        try:
            for name, m in self.hooked.items():
                vars(self.copy.get_submodule(name)).update({h: vars(m)[h] for h in HOOKS if "forward" in h})
            with self._buffers_kept():
                return {training: self._run(self.copy.train(training), self.rows.clone()) for training in (False, True)}
        finally:
            for name in self.hooked:
                blank = vars(nn.Module())
                vars(self.copy.get_submodule(name)).update({h: blank[h] for h in HOOKS})

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Restore batch statistics, which change in train mode."""
        before = {name: b.clone() for name, b in self.copy.named_buffers()}
        yield
        with torch.no_grad():
            for name, b in self.copy.named_buffers():
                b.copy_(before[name])

    def _run(self, module: Callable[..., Any], *inputs: Any) -> Any:
        """Run without gradients from a fixed seed; an exception becomes a ConversionError."""
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(1)
                return module(*inputs)
        except Exception as error:  # the user's forward or hook may raise anything
            raise ConversionError(
                f"gated_twin: {self.name}: it does not run on {len(inputs[0])} rows like the example's in float64 on "
                f"the CPU ({type(error).__name__}: {error}). The template must accept `example`, any number of rows, "
                "and a change of dtype by .double()."
            ) from error

    # --- affine ------------------------------------------------------------------------------------------------

    def values_affine(self) -> None:
        """For fixed gates the value network is affine, and its rows do not depend on one another."""
        claim = "the value path is not affine for fixed gates"
        generator = torch.Generator().manual_seed(2)
        shapes: list[torch.Size] = []

        def unit(q: Tensor, slope: float) -> Tensor:
            shapes.append(q.shape)
            return q

        values = self._value_network().eval()
        self._run(values, self.rows[:1].clone(), *(unit,) * len(self.traced.sites))
        # random positive gates: a closed one would hide the layers after it
        gates = tuple(0.5 + torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes)
        alone = self._check_affine(values, gates, claim)
        others = self._run(values, self.rows.clone(), *gates)
        if not torch.allclose(alone[0], others[0], rtol=_TOLERANCE, atol=1e-10 * float(1 + others[0].abs().max())):
            raise ConversionError(
                f"gated_twin: {self.name}: the output for one input depends on the other inputs of the batch (in eval "
                "mode). Remove what mixes rows, such as a mean over the batch."
            )

    def gates_affine(self) -> None:
        """With linear units, what every site reads is affine in the input."""
        module = graph_module(self.copy, gate_graph(self.traced, with_entry=False), "Gates").eval()
        self._check_affine(module, (linear_unit,) * len(self.traced.sites), "the gate path is not affine")

    def _check_affine(self, module: fx.GraphModule, rest: tuple[Any, ...], claim: str) -> Any:
        """Compare values at four points of a line, one by one; returns the output at the first."""
        first = self.rows[:1]
        results = [self._values(module, first + t * (self.far - first), *rest) for t in _POINTS]
        bad = _first_not_affine([values for _, values in results], module)
        if bad:
            raise ConversionError(
                f"gated_twin: {describe(bad[0])}: {claim} there (relative error {bad[1]:.1e}). "
                "Replace it by an affine layer or a ReLU."
            )
        return results[0][0]

    def _values(self, module: fx.GraphModule, x: Tensor, *rest: Any) -> tuple[Any, dict[fx.Node, Tensor]]:
        """The result of a graph, and by node every floating-point tensor that depends on x."""
        interpreter = ValueInterpreter(module)
        out = self._run(interpreter.run, x, *rest)
        data = {next(n for n in module.graph.nodes if n.op == "placeholder")}
        for node in module.graph.nodes:
            if any(n in data for n in node.all_input_nodes):
                data.add(node)
        found = {n: v for n, v in interpreter.values.items() if n in data and isinstance(v, Tensor)}
        return out, {n: v for n, v in found.items() if v.dtype.is_floating_point}


def _perturb(module: nn.Module) -> None:
    """Add noise of a tenth of its size to every parameter, so that no branch is zero (a scale that starts at 0)."""
    for p in module.parameters():
        if p.dtype.is_floating_point and p.numel():
            size = float(p.square().mean().sqrt())
            p.add_(torch.randn_like(p), alpha=0.1 * (size or 1.0))


def _first_not_affine(values: list[dict[fx.Node, Tensor]], module: fx.GraphModule) -> tuple[fx.Node, float] | None:
    """The first node whose values at `_POINTS` do not lie on a line, with its relative error.

    Max-pooling and nodes that depend on it are left out.
    """
    left_out: set[fx.Node] = set()
    for node in module.graph.nodes:
        if is_max_pool(module, node) or any(n in left_out for n in node.all_input_nodes):
            left_out.add(node)
            continue
        if not all(node in seen for seen in values):
            continue
        a, b = values[0][node], values[1][node]
        if not a.numel():
            continue
        scale = float(max(a.abs().max(), b.abs().max(), (b - a).abs().max()))
        for t, seen in zip(_POINTS[2:], values[2:]):
            error = float((seen[node] - (a + t * (b - a))).abs().max())
            if not error <= _TOLERANCE * max(scale, 1e-30):
                return node, error / max(scale, 1e-30)
    return None
