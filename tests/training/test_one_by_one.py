"""Members one by one, as images are trained on a GPU, against members stacked: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pathlens as pl
from pathlens.training import Execution
from pathlens.training.steps import StepRunner


def _network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(22, 1, 6, 6, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (22,), generator=g)
    template = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    return pl.gated_twin(template.double(), "dlgn", x[:2]), (x, y)


@pytest.mark.parametrize("compile", [True, False])
def test_one_by_one_is_all_at_once(monkeypatch: pytest.MonkeyPatch, compile: bool) -> None:
    net, data = _network()

    def decay(net: Any) -> torch.Tensor:
        return 1e-2 * sum(p.square().sum() for p in net.values.parameters())

    options: dict[str, Any] = {
        "epochs": 4,
        "batch_size": 5,
        "seeds": [0, 1, 2],
        "loss": "cross_entropy",
        "augment": "crop_flip",
        "penalty": decay,
        "progress": False,
        "execution": Execution(compile=compile),
    }
    data = (*data, torch.rand(22, dtype=torch.float64))
    together = pl.train(net, data, **options)
    step, used = StepRunner._step, []

    def alone(self: StepRunner, index: torch.Tensor) -> torch.Tensor:
        self._one_by_one = True
        used.append(index.shape[-1])
        return step(self, index)

    monkeypatch.setattr(StepRunner, "_step", alone)
    apart = pl.train(net, data, **options)
    assert set(used) == {5, 2}
    for a, b in zip(together.networks, apart.networks):
        for p, q in zip(a.state_dict().values(), b.state_dict().values()):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)
