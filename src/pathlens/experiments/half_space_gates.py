"""Linear gate sources that are not a copy of the value network: a wider one, and filters that read the image directly.

With either, every gate is still a half-space of the input space once batch-norm is in eval mode, so that the network's
geometry stays exact. Only hs.best uses them. Loads torch: imported inside functions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from pathlens.models import GatedNetwork, Init, gated_twin
from pathlens.models.gates import make_gate
from pathlens.models.sources import GateSource, GraphSource
from pathlens.models.tracing import trace
from pathlens.models.twin import build

__all__ = ["DirectGates", "ProjectedGates", "leaky", "with_source"]


def _identity(q: Tensor, slope: float) -> Tensor:
    return q


class ProjectedGates(GateSource):
    """The linear gate network of another template, with a 1 × 1 convolution and batch-norm from its sites to ours.

    A narrow linear network passes on fewer numbers than its field of view holds; a wider one is no such bottleneck.
    """

    linear = True

    def __init__(self, template: nn.Module, example: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        twin = gated_twin(template, "dlgn", example=example)
        assert isinstance(twin.source, GraphSource)
        self.inner = twin.source
        own = [q.shape[1] for q in twin.preactivations(example).values()]
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b)) for a, b in zip(own, widths, strict=True)
        )

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(head(q) for head, q in zip(self.heads, self.inner.run(x, _identity)))


class DirectGates(GateSource):
    """One large filter per gate that reads the image itself, and batch-norm: no chain of linear layers to train.

    A site that is `s` times coarser than the image has filters of 4s + 3 pixels (at most the image's size).
    """

    linear = True

    def __init__(self, channels: int, side: int, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        layers = []
        for width, edge in shapes:
            stride = side // edge
            kernel = min(4 * stride + 3, side - 1 + side % 2)  # odd, so that 'half' padding keeps the grid
            layers.append(nn.Sequential(nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False),
                                        nn.BatchNorm2d(width)))  # fmt: skip
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


def leaky(template: nn.Module, slope: float) -> nn.Module:
    """The template with gates in {slope, 1} in place of {0, 1}; slope −1 makes them signs."""
    template = copy.deepcopy(template)
    for module in list(template.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.LeakyReLU(slope))
    return template


def with_source(template: nn.Module, source: GateSource, gate: str, beta: float, seed: int = 0) -> GatedNetwork:
    """The template's value network behind gates from the given source; both are trained."""
    return build(trace(template), "dlgn", source=source, gate=make_gate(gate, beta), piecewise_constant=False,
                 trained="both", gates_from="independent", init=Init(), seed=seed)  # fmt: skip
