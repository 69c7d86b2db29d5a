"""Killing a run at any moment and starting it again gives the same bits; broken files give clear errors."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

import pathlens as pl
from pathlens import errors
from pathlens.training import Checkpoints, Keep, Stopping, checkpoints
from pathlens.training.checkpoints import saved_epochs

SCRIPT = """
import os, signal, sys, torch
import pathlens as pl
from pathlens.training import Checkpoints, Keep
torch.set_num_threads(1)
folder, out, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def cut(event, arguments):
    # killed when a file in the folder is to be renamed or removed: what lies on the disk changes at no other moment
    global left
    if event in ("os.rename", "os.remove") and str(arguments[0]).startswith(folder):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(cut)
data = pl.data.circle(256)
net = pl.models.dlgn(2, (8, 8), piecewise_constant=True)
runs = pl.train(net, data, epochs=160, lr=2e-3, seeds=[0, 1], keep=Keep([0, 40, 120], X=data.x),
                checkpoints=Checkpoints(folder, every=3), progress=False)
if out != "-":
    torch.save([[n.state_dict() for n in runs.networks], [t.history for t in runs],
                [[m.record.f for m in t.moments] for t in runs]], out)
"""


def start(folder, out, moment=0):
    """Run it whole, or until a moment counted in changes of the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(out), str(moment)]
    return subprocess.run(command, env=environment, check=False).returncode


def test_a_run_killed_twice_resumes_to_the_same_bits(tmp_path):
    assert start(tmp_path / "whole", tmp_path / "whole.pt") == 0
    folder = tmp_path / "cut"
    for moment in (15, 80):  # the first: the first checkpoint is announced, but not in its place
        assert start(folder, "-", moment) == -signal.SIGKILL and saved_epochs(folder)
    assert start(folder, tmp_path / "cut.pt") == 0
    whole, cut = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("whole", "cut"))
    for a, b in zip(whole[0], cut[0]):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert whole[1] == cut[1]
    assert all(torch.equal(p, q) for a, b in zip(whole[2], cut[2]) for p, q in zip(a, b))
    assert len(saved_epochs(folder)) == 2  # the last one and the one before


def run(folder, epochs=8, resume=True, lr=1e-3, seeds=(0,), data=None, **options):
    return pl.train(
        pl.models.relu(2, (6,)),
        data or pl.data.circle(64),
        epochs=epochs,
        lr=lr,
        seeds=list(seeds),
        checkpoints=Checkpoints(folder, every=2, resume=resume),
        progress=False,
        **options,
    )


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_finished_run_is_read_back_without_training(tmp_path):
    first = run(tmp_path)
    before = files(tmp_path)
    again = run(tmp_path)
    assert again.history().tolist() == first.history().tolist()
    assert all(torch.equal(p, q) for p, q in zip(first.networks[0].parameters(), again.networks[0].parameters()))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "adam",
        "rmsprop",
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.RMSprop, momentum=0.9),
        torch.optim.NAdam,
    ],
)
def test_every_optimizer_resumes(tmp_path, optimizer):
    data = pl.data.circle(64)

    def go(folder, stop):
        return pl.train(
            pl.models.relu(2, (6,)),
            data,
            epochs=12,
            optimizer=optimizer,
            lr=0.01,
            seeds=[0, 1],
            scheduler=_stop_after(stop),
            checkpoints=Checkpoints(folder, every=2),
            progress=False,
        )

    whole = go(tmp_path / "a", None)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "b", 0.5)
    resumed = go(tmp_path / "b", None)
    for x, y in zip(whole.networks, resumed.networks):
        assert all(torch.equal(p, q) for p, q in zip(x.parameters(), y.parameters()))


def test_what_a_kill_leaves_of_a_removed_checkpoint_is_none(tmp_path, monkeypatch):
    run(tmp_path)
    before = saved_epochs(tmp_path)

    def cut(path, missing_ok=False):
        os.unlink(path)
        raise KeyboardInterrupt

    for order in (False, True):  # a folder lists its files in any order
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            real = checkpoints.Path.glob
            patch.setattr(checkpoints.Path, "glob", lambda p, name, f=real, o=order: sorted(f(p, name), reverse=o))
            patch.setattr(checkpoints.Path, "unlink", cut)
            checkpoints.forget_checkpoints(tmp_path)
        assert saved_epochs(tmp_path) == (before := before[1:])


def _stop_after(progress):
    class Rate:
        def __call__(self, now):
            if progress is not None and now > progress:
                raise KeyboardInterrupt
            return 1.0

        def __repr__(self):
            return "Rate()"

    return Rate()


def test_another_run_in_the_same_folder_is_refused_and_nothing_is_touched(tmp_path):
    run(tmp_path)
    before = files(tmp_path)
    with pytest.raises(errors.CheckpointError, match="members"):
        run(tmp_path, lr=5e-3)
    with pytest.raises(errors.CheckpointError, match="data"):
        run(tmp_path, data=pl.data.circle(64, top=2.0))
    assert files(tmp_path) == before
    assert run(tmp_path, lr=5e-3, resume=False).settings[0]["lr"] == 5e-3


@pytest.mark.parametrize(
    "first, other",
    [
        (lambda: pl.models.relu(2, (4, 6)), lambda: pl.models.relu(2, (3, 8))),  # 38 numbers each
        (lambda: pl.models.dlgn(2, (4,), beta=4), lambda: pl.models.dlgn(2, (4,), beta=10)),
        (lambda: pl.models.dlgn(2, (4,)), lambda: pl.models.dlgn(2, (4,), piecewise_constant=True)),
        (lambda: pl.models.dlgn(2, (4,)), lambda: pl.models.dlgn(2, (4,), gate="straight_through")),
        (lambda: pl.models.galu(2, (4,), seed=0), lambda: pl.models.galu(2, (4,), seed=1)),
        (lambda: pl.models.frg(2, (4,), examples=64, seed=0), lambda: pl.models.frg(2, (4,), examples=64, seed=1)),
    ],
    ids=["layers", "beta", "input", "gate", "frozen gates", "table"],
)
def test_a_checkpoint_of_another_network_is_refused(tmp_path, first, other):
    data, options = pl.data.circle(64), {"epochs": 2, "checkpoints": tmp_path, "progress": False}
    net = first()
    whole = pl.train(net, data, **options)
    assert pl.train(net, data, **options).history == whole.history  # trained in place, it is still the same
    with pytest.raises(errors.CheckpointError, match="a network with other layers, other frozen weights"):
        pl.train(other(), data, **options)


def test_a_moving_beta_is_no_other_network(tmp_path):
    net, beta = pl.models.dlgn(2, (4,)), pl.training.Geometric(4, 100)
    runs = [pl.train(net, pl.data.circle(64), epochs=2, beta=beta, checkpoints=tmp_path, progress=False) for _ in "ab"]
    assert runs[0].history == runs[1].history


def test_a_finished_run_goes_on_for_longer_to_the_same_bits(tmp_path):
    data, keep = pl.data.circle(64), {"seeds": [0, 1], "progress": False}
    net = pl.models.dlgn(2, (4, 4))
    whole = pl.train(net, data, epochs=7, checkpoints=tmp_path / "whole", **keep)
    pl.train(net, data, epochs=3, checkpoints=tmp_path / "cut", **keep)
    longer = pl.train(net, data, epochs=7, checkpoints=tmp_path / "cut", **keep)
    assert (longer.history() == whole.history()).all()
    for a, b in zip(longer.networks, whole.networks):
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    with pytest.raises(errors.CheckpointError, match="epochs=7, this one has epochs=5"):
        pl.train(net, data, epochs=5, checkpoints=tmp_path / "cut", **keep)
    pl.train(net, data, epochs=3, scheduler="cosine", checkpoints=tmp_path / "cosine", **keep)
    with pytest.raises(errors.CheckpointError, match="epochs=3, this one has epochs=7"):
        pl.train(net, data, epochs=7, scheduler="cosine", checkpoints=tmp_path / "cosine", **keep)


def test_a_longer_run_may_keep_more_of_the_epochs_to_come(tmp_path):
    net, data = pl.models.dlgn(2, (4, 4)), pl.data.circle(64)

    def train(epochs, keep):
        t = pl.train(net, data, epochs=epochs, seeds=[0], keep=keep, checkpoints=tmp_path, progress=False)
        return [m.epoch for m in t[0].moments]

    assert train(2, [0, 2]) == [0, 2]
    assert train(4, [0, 2, 3]) == [0, 2, 3]
    with pytest.raises(errors.CheckpointError, match=r"keep_epochs=\[0, 2, 3\], this one has keep_epochs=\[0, 1, 6\]"):
        train(6, [0, 1, 6])  # epoch 1 is over


def test_starting_over_does_not_trust_old_moments(tmp_path):
    old = run(tmp_path, seeds=(0,), keep=Keep([0], X=pl.data.circle(8).x))
    new = run(tmp_path, seeds=(1,), keep=Keep([0], X=pl.data.circle(8).x), resume=False)
    again = run(tmp_path, seeds=(1,), keep=Keep([0], X=pl.data.circle(8).x))
    assert torch.equal(again[0].moments[0].record.f, new[0].moments[0].record.f)
    assert not torch.equal(again[0].moments[0].record.f, old[0].moments[0].record.f)


@pytest.mark.parametrize("damage", ["truncate", "flip", "json", "version"])
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, damage):
    run(tmp_path)
    newest = max(tmp_path.glob("checkpoint-*.safetensors"))
    header = newest.with_suffix(".json")
    if damage == "truncate":
        newest.write_bytes(newest.read_bytes()[:-100])
    elif damage == "flip":
        data = bytearray(newest.read_bytes())
        data[-5] ^= 1
        newest.write_bytes(bytes(data))
    elif damage == "json":
        header.write_text(header.read_text()[:-20])
    else:
        header.write_text(json.dumps(json.loads(header.read_text()) | {"version": 99}))
    before = files(tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"epoch 6.*delete"):
        run(tmp_path)
    assert files(tmp_path) == before
    for path in tmp_path.glob(newest.stem + ".*"):  # the remedy that the message gives
        path.unlink()
    assert len(run(tmp_path)[0].history["loss"]) == 9


def test_the_only_checkpoint_is_named_where_it_has_to_go(tmp_path):
    run(tmp_path)
    oldest, newest = (f"checkpoint-{epoch:08d}" for epoch in saved_epochs(tmp_path))
    for path in tmp_path.glob(f"{oldest}.*"):
        path.unlink()
    (tmp_path / f"{newest}.safetensors").unlink()
    with pytest.raises(errors.CheckpointError, match=rf"To start again, delete {newest}\.\*"):
        run(tmp_path)
    for path in tmp_path.glob(f"{newest}.*"):
        path.unlink()
    assert len(run(tmp_path)[0].history["loss"]) == 9


def test_another_thread_count_warns(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr(checkpoints, "environment", lambda: {"torch": torch.__version__, "threads": 99})
    with pytest.warns(errors.ResumeWarning, match="last bits"):
        run(tmp_path)


def test_a_network_that_began_with_other_weights_is_told(tmp_path):
    data = pl.data.circle(64)

    def go(net, epochs=4, folder=tmp_path / "a", resume=True):
        saved = Checkpoints(folder, every=1, resume=resume)
        return pl.train(net, data, epochs=epochs, checkpoints=saved, progress=False)

    net = pl.models.relu(2, (4,), seed=0)
    whole = go(net)
    go(net, 5)  # trained in place
    go(pl.models.relu(2, (4,), seed=0), 5)
    with pytest.warns(errors.ResumeWarning, match="the network has other initial weights.*separate folder"):
        other = go(pl.models.relu(2, (4,), seed=1), 5)
    assert other.history["loss"][:5] == whole.history["loss"]
    for resume in (False, True):
        assert go(pl.models.relu(2, (4,), seed=1), resume=resume).history != whole.history
    both = [pl.models.relu(2, (4,), seed=s) for s in (0, 1)]
    go(both, folder=tmp_path / "b")
    with pytest.warns(errors.ResumeWarning, match="1 of 2 networks have"):
        go([both[0], pl.models.relu(2, (4,), seed=2)], folder=tmp_path / "b")


@pytest.mark.parametrize("stop", [0.3, 0.6, 0.9])
def test_a_network_that_was_cut_off_is_still_the_same(tmp_path, stop):
    """Kept moments put weights into it, patience the best ones: it may go on with each of them."""
    data = pl.data.circle(64)
    options = {
        "epochs": 10,
        "keep": Keep([0, 2, 5], X=data.x),
        "lr": 0.3,
        "validation": (data.x, data.y),
        "stopping": Stopping(4),
        "checkpoints": Checkpoints(tmp_path, every=1),
        "progress": False,
    }
    net = pl.models.relu(2, (4,), seed=0)
    with pytest.raises(KeyboardInterrupt):
        pl.train(net, data, scheduler=_stop_after(stop), **options)
    first = pl.train(net, data, scheduler=_stop_after(None), **options)
    assert pl.train(net, data, scheduler=_stop_after(None), **options).history == first.history
