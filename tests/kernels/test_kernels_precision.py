"""Whatever runs a network or makes tiles does so without TF32 and autocast, whenever it does, and restores both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_networks import ConvNet, settle
from torch import Tensor, nn

from pathlens import gated_twin, models, paths
from pathlens.kernels import LinearisedModel, npk, ntk, overlap
from pathlens.linops import CustomKernel
from pathlens.precision import exact_precision
from pathlens.recording import Trajectory, record
from pathlens.testing.tolerance import assert_kernel_close

_seen: list[tuple[bool, str, bool]] = []


def _look() -> tuple[bool, str, bool]:
    found = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
    _seen.append(found)
    return found


EXACT = (False, "highest", False)
REDUCED = (True, "high", True)


class Watch(nn.Module):
    """Two layers, with or without batch-norm; notes torch's settings whenever it runs."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        _look()
        return self.last(torch.relu(self.first(self.norm(x))))


@pytest.fixture(autouse=True)
def reduced() -> Iterator[None]:
    """A user who allows every reduced precision that there is."""
    _seen.clear()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert _look() == REDUCED
            yield
            assert _look() == REDUCED
    finally:
        torch.set_float32_matmul_precision("highest")


def check(least: int = 1) -> None:
    """Everything since the last call ran exactly, and the settings are the user's again."""
    assert len(_seen) > least and set(_seen[1:]) == {EXACT}
    del _seen[1:]
    assert _look() == REDUCED
    del _seen[1:]


def test_recordings_and_kernels() -> None:
    net, X = Watch().eval(), torch.randn(5, 3)
    record(net, X)
    check()
    Trajectory().append(net, X)
    check()
    stream: Any = record(net, X, stream=True)
    check()
    stream.rows(1, 4)
    check()
    K = ntk(net, X, outputs="full")
    check()
    K.dense()
    overlap(record(models.relu(3, (4,), seed=0), X)).dense()
    model = LinearisedModel(net)
    model.fit(X, torch.randn(5, 2), steps=2)
    check()


@pytest.mark.parametrize("what", ["dense", "diagonal", "tiles", "product", "solve", "eigsh", "entry", "tile"])
def test_tiles_that_are_made_later(what: str) -> None:
    """Streams are asked for rows, and operators for tiles, long after they were made."""
    net, X = Watch(norm=False).eval(), torch.randn(5, 3)
    one = torch.eye(5)

    def tile(rows: Tensor, cols: Tensor) -> Tensor:
        _look()
        return one[rows][:, cols]

    def diagonal() -> Tensor:
        _look()
        return torch.ones(5)

    own = CustomKernel((5, 5), tile, diagonal, symmetric=True)
    streamed = ntk(net, record(net, X, stream=True))
    check()
    for K in (own * 2.0, own, streamed):
        if what == "tiles":
            for _ in K.tiles():
                assert (torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cpu")) == (True, True)
        else:
            ways: dict[str, Any] = {
                "dense": lambda K=K: K.dense(),
                "diagonal": lambda K=K: K.diagonal(),
                "product": lambda K=K: K @ torch.ones(5),
                "solve": lambda K=K: K.solve(torch.ones(5), ridge=1.0),
                "eigsh": lambda K=K: K.eigsh(2),
                "entry": lambda K=K: K[1, 2],
                "tile": lambda K=K: K.tile(torch.arange(3), torch.arange(2)),
            }
            ways[what]()
        check()


def _noted(rows: Tensor, cols: Tensor) -> Tensor:
    _look()
    return (rows[:, None] == cols[None, :]).float()


def test_blocks_on_disk(tmp_path: Path) -> None:
    """What a worker of a cluster calls for every block."""
    K = CustomKernel((5, 5), _noted, lambda: torch.ones(5), symmetric=True)
    K.to_zarr(tmp_path / "k", block=3, client=False)
    check(3)


def test_settings_are_restored_after_an_error() -> None:
    class Fails(Watch):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        record(Fails().eval(), torch.randn(5, 3))
    check()


def test_a_user_may_ask_for_reduced_precision() -> None:
    net, X = Watch().eval(), torch.randn(5, 3)
    with exact_precision(False):
        stream: Any = record(net, X, stream=True)
        stream.rows(0, 2)
    assert set(_seen[1:]) == {(True, "high", False)}  # a kernel has one dtype: autocast is off all the same
    del _seen[1:]
    stream.rows(0, 2)
    check(0)


def test_gates_of_paths_and_of_hardening() -> None:
    net = models.gdln(3, (4,), gates=lambda x: (_look(), x @ torch.ones(3, 4))[1], seed=0)
    X = torch.randn(5, 3)
    paths.inputs(net, X)
    check()
    npk(net, X).dense()
    check()
    paths.count(net, X)
    check()


def test_autocast_does_not_change_kernels() -> None:
    net: Any = settle(ConvNet(channels=(1, 3, 3), norm=True, outputs=2)).float()
    X = torch.randn(6, 1, 6)
    twin = gated_twin(net, "relu", example=X[:2])
    with torch.autocast("cpu", enabled=False):
        want = ntk(net.double(), X.double()).dense()
        paths_want = npk(twin.double(), X.double()).dense()
    K = ntk(net.float(), X)
    assert_kernel_close(K.dense(), want, want.diagonal())
    assert_kernel_close(npk(twin.float(), X).dense(), paths_want, paths_want.diagonal())
