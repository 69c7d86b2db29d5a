"""Runs on disk: trajectories, settings and networks come back bit for bit, or an error says what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathlens as pl
from pathlens import errors
from pathlens.training import Geometric, Keep, Runs, Stopping

DATA = pl.data.circle(32)


def assert_equal(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for k in want:
            assert_equal(got[k], want[k])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert_equal(a, b)
    elif hasattr(want, "__dict__"):
        assert type(got) is type(want)
        assert_equal(vars(got), vars(want))
    else:
        assert got == want or (math.isnan(got) and math.isnan(want))


def assert_same(got: Runs, want: Runs) -> None:
    assert_equal(list(got), list(want))
    assert got.settings == want.settings and repr(got) == repr(want)
    for a, b in zip(got.networks, want.networks, strict=True):
        assert_equal(a.state_dict(), b.state_dict())
        assert torch.equal(a.eval()(DATA.x), b.eval()(DATA.x))


def trained(net: Any = None, **options: Any) -> Runs:
    net = pl.models.dlgn(2, (4, 3), bias=True) if net is None else net
    chosen = {"seeds": [0, 5], "epochs": 3, "keep": Keep([0, 2], losses=[9.0], X=DATA.x[:7])} | options
    runs = pl.train(net, DATA, progress=False, **chosen)
    assert isinstance(runs, Runs)
    return runs


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"settings": [{"beta": 4}, {"lr": 1e-2}], "beta": None},
        {"beta": Geometric(4, 100), "scheduler": "cosine"},
        {"net": [pl.models.frg(2, (3,), examples=32, seed=s) for s in (0, 1)], "seeds": None, "keep": Keep([0, 2])},
        {"validation": (DATA.x, DATA.y), "stopping": Stopping(1), "epochs": 30, "lr": 1.0},
    ],
    ids=["plain", "settings", "schedules", "tables", "stopped"],
)
def test_runs_come_back_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = trained(**options)
    runs.save(tmp_path / "a new folder")
    back = Runs.load(tmp_path / "a new folder")
    assert_same(back, runs)
    back.save(tmp_path / "again")
    assert_same(Runs.load(str(tmp_path / "again")), runs)


def test_networks_of_ones_own_come_back_in_copies_of_one_that_is_built_alike(tmp_path: Path) -> None:
    runs = trained(Own())
    runs.save(tmp_path)
    with pytest.raises(errors.RecordError, match=r"kind 'Own'.*like=net"):
        Runs.load(tmp_path)
    back = Runs.load(tmp_path, like=Own())
    assert_same(back, runs)
    assert back.networks[0] is not back.networks[1]
    with pytest.raises(errors.RecordError, match="same architecture"):
        Runs.load(tmp_path, like=nn.Linear(2, 1))


def test_what_is_loaded_goes_on(tmp_path: Path) -> None:
    runs = trained()
    runs.save(tmp_path)
    back = Runs.load(tmp_path)
    for one in (runs, back):
        pl.train(one.networks, DATA, epochs=2, progress=False)
    assert_same(back, runs)


def test_a_later_save_replaces_an_earlier_one(tmp_path: Path) -> None:
    trained(seeds=[0, 1, 2]).save(tmp_path)
    fewer = trained(seeds=[3, 4], keep=Keep([1], losses=[9.0], X=DATA.x[:7]))
    fewer.save(tmp_path)
    assert_same(Runs.load(tmp_path), fewer)


def test_files_of_two_saves_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained().save(tmp_path)
    other = trained(seeds=[3, 4], keep=None)
    with monkeypatch.context() as patch:
        patch.setattr("pathlens.training.runs.write_document", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other.save(tmp_path)
    with pytest.raises(errors.FileFormatError, match=r"run-0000: belongs to another save than .*interrupted"):
        Runs.load(tmp_path)


def test_damage_is_refused_and_named(tmp_path: Path) -> None:
    runs = trained()
    runs.save(tmp_path)
    with pytest.raises(errors.FileFormatError, match=r"runs\.json: no such file"):
        Runs.load(tmp_path / "elsewhere")
    with pytest.raises(errors.FileFormatError, match=r"trajectory\.json: no such file"):
        pl.Trajectory.load(tmp_path)
    for file in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for damaged in (b"", whole[:-7], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b"{}"):
            file.write_bytes(damaged)
            with pytest.raises(errors.FileFormatError, match=file.name.replace(".", r"\.")):
                Runs.load(tmp_path)
            assert file.read_bytes() == damaged
        file.unlink()
        with pytest.raises(errors.FileFormatError, match=r"no such file"):
            Runs.load(tmp_path)
        file.write_bytes(whole)
    header = json.loads((tmp_path / "runs.json").read_bytes())
    (tmp_path / "runs.json").write_text(json.dumps(header | {"version": 99}))
    with pytest.raises(errors.FileFormatError, match="format version 99"):
        Runs.load(tmp_path)


def test_runs_that_lack_a_network_are_not_saved(tmp_path: Path) -> None:
    runs = trained()
    runs.networks.pop()
    with pytest.raises(errors.OptionError, match="2 trajectories, 1 networks"):
        runs.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
