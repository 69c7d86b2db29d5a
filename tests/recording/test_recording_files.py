"""Files of snapshots, records and trajectories: round trips, damage of every kind, crashes between two writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pathlens import Record, Snapshot, Trajectory, models, record, records, snapshot
from pathlens.errors import CheckpointError, FileFormatError, NotFiniteError, RecordError, UnknownNameError
from pathlens.files import write_atomically
from pathlens.records import TensorHeader, load_tensors, save_tensors
from pathlens.training.checkpoints import CheckpointHeader


def net_and_rows(seed: int = 0) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return models.soft_galu(3, (5, 4), 2, bias=True, seed=seed), torch.randn(4, 3, generator=generator)


def convolutional() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3, padding="same", stride=1, groups=2)
    return nn.Sequential(conv, nn.LeakyReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)).eval(), torch.randn(
        3, 2, 3, 3
    )


def assert_equal(got: Any, want: Any) -> None:
    """Equality of records and what they hold, tensors included, bit for bit."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for k in want:
            assert_equal(got[k], want[k])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert_equal(a, b)
    elif isinstance(want, (Record, Snapshot)) or type(want).__name__ == "Moment":
        assert_equal(vars(got), vars(want))
    else:
        assert got == want


# --- round trips -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [net_and_rows, convolutional])
def test_round_trip_of_a_record(make: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path) -> None:
    net, x = make()
    for i, rec in enumerate(
        [record(net, x), record(net, x, outputs=[1]), record(net, x, sensitivities=False), record(net, x).rows(1, 3)]
    ):
        rec.save(tmp_path / f"new folder/{i}")
        loaded = Record.load(tmp_path / f"new folder/{i}")
        assert_equal(loaded, rec)
    assert sorted(p.suffix for p in (tmp_path / "new folder").iterdir()) == [".json"] * 4 + [".safetensors"] * 4


def test_round_trip_of_a_snapshot(tmp_path: Path) -> None:
    net, _ = convolutional()
    taken = snapshot(net)
    taken.save(tmp_path / "weights")
    loaded = Snapshot.load(tmp_path / "weights")
    assert_equal(loaded.state, taken.state)  # in the same order: that of the layers is information
    net.load_state_dict(loaded.state)
    assert loaded.description == {"kind": "Sequential"}
    gated = snapshot(net_and_rows()[0])
    gated.save(tmp_path / "gated")
    assert Snapshot.load(tmp_path / "gated").description == gated.description


def test_a_snapshot_is_a_copy() -> None:
    net, _ = net_and_rows()
    taken = snapshot(net)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert all(v.any() for k, v in taken.state.items() if "weight" in k)


def test_tied_and_transposed_tensors_are_stored(tmp_path: Path) -> None:
    t = torch.randn(3, 4)
    Snapshot({"a": t, "b": t, "c": t.T, "d": t[1]}).save(tmp_path / "tied")
    loaded = Snapshot.load(tmp_path / "tied").state
    assert torch.equal(loaded["b"], t) and torch.equal(loaded["c"], t.T) and torch.equal(loaded["d"], t[1])


def test_names_with_dots_do_not_collide(tmp_path: Path) -> None:
    for name in ("run-0.5", "run-0.25"):
        Snapshot({"w": torch.tensor(float(name[4:]))}).save(tmp_path / name)
    assert Snapshot.load(tmp_path / "run-0.5").state["w"] == 0.5
    assert Snapshot.load(str(tmp_path / "run-0.25.json")).state["w"] == 0.25
    assert Snapshot.load(tmp_path / "run-0.25.safetensors").state["w"] == 0.25


def make_trajectory(moments: int = 3, seed: int = 0) -> Trajectory:
    net, x = net_and_rows(seed)
    trajectory = Trajectory({"loss": [1.0, float("inf"), 0.25]}, config={"rate": 0.1, "seeds": [1, 2]})
    for step in range(moments):
        trajectory.append(net, x if step != 1 else None, step, epoch=step / 2, loss=1.0 / (step + 1), reason="test")
        with torch.no_grad():
            next(net.parameters()).add_(1)
    return trajectory


def test_round_trip_of_a_trajectory(tmp_path: Path) -> None:
    trajectory = make_trajectory()
    trajectory.save(tmp_path / "run")
    loaded = Trajectory.load(tmp_path / "run")
    assert loaded.history == trajectory.history and loaded.config == trajectory.config
    assert [(m.step, m.epoch, m.loss, m.reason) for m in loaded.moments] == [
        (0, 0.0, 1.0, "test"),
        (1, 0.5, 0.5, "test"),
        (2, 1.0, 1 / 3, "test"),
    ]
    for got, want in zip(loaded.moments, trajectory.moments):
        assert (got.record is None) == (want.record is None)
        if want.record is not None and got.record is not None:
            assert torch.equal(got.record.f, want.record.f)
        assert all(torch.equal(got.snapshot.state[k], v) for k, v in want.snapshot.state.items())
    assert repr(loaded) == "Trajectory(2 epochs, 3 moments, loss 0.25)"


def test_saving_a_shorter_trajectory_leaves_nothing_behind(tmp_path: Path) -> None:
    make_trajectory(3).save(tmp_path)
    (tmp_path / "record-0002.png").write_text("the user's own")
    make_trajectory(1).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "record-0000.json",
        "record-0000.safetensors",
        "record-0002.png",
        "snapshot-0000.json",
        "snapshot-0000.safetensors",
        "trajectory.json",
    ]
    assert len(Trajectory.load(tmp_path).moments) == 1


def test_an_interrupted_save_of_another_trajectory_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trajectory(2, seed=0).save(tmp_path)
    longer = make_trajectory(3, seed=0)
    with pytest.raises(KeyboardInterrupt):
        crash_at(monkeypatch, "trajectory.json", lambda: longer.save(tmp_path))
    assert len(Trajectory.load(tmp_path).moments) == 2  # the moments that both share are the same
    with pytest.raises(KeyboardInterrupt):
        crash_at(monkeypatch, "trajectory.json", lambda: make_trajectory(2, seed=1).save(tmp_path))
    with pytest.raises(FileFormatError, match=r"snapshot-0000\.json: belongs to another save than .*trajectory\.json"):
        Trajectory.load(tmp_path)


def test_questions_to_a_trajectory() -> None:
    trajectory = make_trajectory()
    assert trajectory.at_epoch(0.5).step == 1
    with pytest.raises(RecordError, match=r"nothing was kept at epoch 7; kept: \[0.0, 0.5, 1.0\]"):
        trajectory.at_epoch(7)
    assert trajectory.epoch_reached(0.5) == 2 and trajectory.epoch_reached(0.1) is None
    with pytest.raises(UnknownNameError, match="Did you mean 'loss'"):
        trajectory.epoch_reached(0.5, "lose")


def test_append_from_a_loop_with_batch_norm_in_train_mode() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
    net[1].eval()  # a user who froze the statistics of one layer
    x, trajectory = torch.randn(8, 3), Trajectory()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()
        mode = [m.training for m in net.modules()]
        statistics = net[1].running_mean.clone()
        trajectory.append(net, x, step)
        assert [m.training for m in net.modules()] == mode == [True, True, False, True, True, True]
        assert torch.equal(net[1].running_mean, statistics)
    assert [m.record.sites for m in trajectory.moments] == [("2@0",)] * 3
    first, last = trajectory.moments[0], trajectory.moments[-1]
    assert not torch.equal(first.snapshot.state["0.weight"], last.snapshot.state["0.weight"])
    assert not torch.equal(first.record.f, last.record.f)
    with pytest.raises(NotFiniteError):
        trajectory.append(net, torch.full((8, 3), torch.nan), 9)
    assert [m.training for m in net.modules()] == mode and len(trajectory.moments) == 3


# --- damage ----------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any], new_checksum: bool = False) -> None:
    meta = json.loads(path.read_text())
    change(meta)
    if new_checksum:  # as another program that writes this format would
        meta.pop("checksum")
        meta["checksum"] = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(meta))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated tensors": (
        lambda f: (f / "r.safetensors").write_bytes((f / "r.safetensors").read_bytes()[:-9]),
        r"r\.safetensors: checksum .* truncated or corrupt",
    ),
    "empty tensors": (lambda f: (f / "r.safetensors").write_bytes(b""), r"r\.safetensors: checksum"),
    "truncated json": (
        lambda f: (f / "r.json").write_bytes((f / "r.json").read_bytes()[:-5]),
        r"r\.json: not valid JSON .* left untouched",
    ),
    "binary json": (lambda f: (f / "r.json").write_bytes(b"\x80\xff"), r"r\.json: not valid JSON"),
    "json list": (lambda f: (f / "r.json").write_text("[1]"), r"r\.json: expected a pathlens.record .* found 'list'"),
    "edited json": (
        lambda f: edit_json(f / "r.json", lambda m: m.update(gate_label="soft")),
        r"r\.json: .* edited or damaged",
    ),
    "edited number": (
        lambda f: edit_json(f / "r.json", lambda m: m["layers"][0].update(outputs=7)),
        r"r\.json: .* edited or damaged",
    ),
    "no checksum": (lambda f: edit_json(f / "r.json", lambda m: m.pop("checksum")), r"r\.json: .* edited or damaged"),
    "newer version": (
        lambda f: edit_json(f / "r.json", lambda m: m.update(version=2)),
        r"r\.json: format version 2, expected version 1",
    ),
    "no json": (lambda f: (f / "r.json").unlink(), r"r\.json: no such file"),
    "no tensors": (lambda f: (f / "r.safetensors").unlink(), r"r\.safetensors: no such file"),
    "foreign, incomplete": (
        lambda f: edit_json(f / "r.json", lambda m: m.pop("sites"), new_checksum=True),
        r"r\.json: a field of the record is missing .*`sites`",
    ),
    "foreign, other layers": (
        lambda f: edit_json(f / "r.json", lambda m: m["layers"][0].update(name="none"), new_checksum=True),
        r"r\.json: the record lacks .*'input/0/none'",
    ),
    "foreign, other tensors": (
        lambda f: edit_json(f / "r.json", lambda m: m["tensors"].pop(), new_checksum=True),
        r"r\.safetensors: its tensors are not those that r\.json lists",
    ),
    "foreign, not safetensors": (
        lambda f: (
            (f / "r.safetensors").write_bytes(b"nonsense"),
            edit_json(
                f / "r.json", lambda m: m.update(sha256=hashlib.sha256(b"nonsense").hexdigest()), new_checksum=True
            ),
        ),
        r"r\.safetensors: not a safetensors file",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_and_left_untouched(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    record(*net_and_rows()).save(tmp_path / "r")
    damage(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FileFormatError, match=message) as caught:
        Record.load(tmp_path / "r")
    assert str(tmp_path) in str(caught.value)
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("saved")
    Snapshot({"w": torch.arange(12.0)}, {"kind": "toy"}).save(folder / "s")
    return folder, contents(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(saved: tuple[Path, dict[str, bytes]], data: st.DataObject) -> None:
    folder, good = saved
    name = data.draw(st.sampled_from(sorted(good)))
    bit = data.draw(st.integers(0, 8 * len(good[name]) - 1))
    damaged = bytearray(good[name])
    damaged[bit // 8] ^= 1 << bit % 8
    for k, v in good.items():
        (folder / k).write_bytes(v)
    (folder / name).write_bytes(damaged)
    try:
        loaded = Snapshot.load(folder / "s")
    except FileFormatError as e:
        assert str(folder) in str(e)
    else:  # white space between tokens carries nothing
        assert name == "s.json" and json.loads(damaged) == json.loads(good[name])
        assert torch.equal(loaded.state["w"], torch.arange(12.0))


def test_files_of_another_kind(tmp_path: Path) -> None:
    snapshot(net_and_rows()[0]).save(tmp_path / "s")
    with pytest.raises(FileFormatError, match=r"s\.json: expected a pathlens.record file, found 'pathlens.snapshot'"):
        Record.load(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"expected a pathlens.checkpoint file"):
        load_tensors(tmp_path / "s", CheckpointHeader, CheckpointError)
    with pytest.raises(FileFormatError, match=r"trajectory\.json: no such file"):
        Trajectory.load(tmp_path)
    (tmp_path / "trajectory.json").write_bytes((tmp_path / "s.json").read_bytes())
    with pytest.raises(FileFormatError, match=r"expected a pathlens.trajectory file, found 'pathlens.snapshot'"):
        Trajectory.load(tmp_path)


def test_halves_of_two_pairs(tmp_path: Path) -> None:
    for i in range(2):
        Snapshot({"w": torch.full((3,), float(i))}).save(tmp_path / f"s{i}")
    (tmp_path / "s0.safetensors").write_bytes((tmp_path / "s1.safetensors").read_bytes())
    with pytest.raises(FileFormatError, match=r"s0\.safetensors: .* belongs to another \.json file"):
        Snapshot.load(tmp_path / "s0")


# --- crashes ---------------------------------------------------------------------------------------------------


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str, work: Callable[[], Any]) -> None:
    """Run until the file of that name would be put in place, and be killed there."""
    real = records.os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "replace", replace)
        work()


@pytest.mark.parametrize(
    ("killed_before", "survivor"), [("s.new.safetensors", 1.0), ("s.json", 1.0), ("s.safetensors", 2.0)]
)
def test_a_crash_leaves_one_complete_pair(
    killed_before: str, survivor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(value: float) -> None:
        Snapshot({"w": torch.full((3,), value)}).save(tmp_path / "s")

    def stored() -> float:
        return float(Snapshot.load(tmp_path / "s").state["w"][0])

    save(1.0)
    with pytest.raises(KeyboardInterrupt):
        crash_at(monkeypatch, killed_before, lambda: save(2.0))
    before = contents(tmp_path)
    assert stored() == survivor and contents(tmp_path) == before
    for second in ("s.new.safetensors", "s.json"):  # and a second crash on top of it changes nothing
        with pytest.raises(KeyboardInterrupt):
            crash_at(monkeypatch, second, lambda: save(3.0))
        assert stored() == survivor
    save(4.0)
    assert stored() == 4.0
    assert sorted(contents(tmp_path)) == ["s.json", "s.safetensors"]


def test_a_first_save_that_crashes_leaves_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        crash_at(monkeypatch, "s.json", lambda: Snapshot({"w": torch.ones(1)}).save(tmp_path / "s"))
    with pytest.raises(FileFormatError, match=r"s\.json: no such file"):
        Snapshot.load(tmp_path / "s")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, b"new")
    assert contents(tmp_path) == {"a.json": b"old"}


def test_files_have_ordinary_permissions(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_the_checksum_is_that_of_the_tensor_file(tmp_path: Path) -> None:
    checksum = save_tensors(tmp_path / "t", {"w": torch.ones(2)}, TensorHeader())
    assert checksum == hashlib.sha256((tmp_path / "t.safetensors").read_bytes()).hexdigest()
