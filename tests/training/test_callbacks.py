"""Callbacks of `train`, its progress, and the checks of its options."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pathlens as pl
from pathlens.errors import OptionError
from pathlens.training import Checkpoints, Execution, Keep, Stopping, Teacher, TrainingState

DATA = pl.data.circle(64)


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().flatten().clone() for t in net.state_dict().values()])


class Follow:
    """Stores what a callback receives, and stops at an epoch."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.epochs, self.losses, self.weights = stop, [], [], []

    def __call__(self, state: TrainingState) -> bool:
        assert state.epochs == 6 and [t.history["loss"][-1] for t in state.trajectories] == list(state.losses)
        self.epochs.append(state.epoch)
        self.losses.append(state.losses)
        self.weights.append([weights(net) for net in state.networks])
        return state.epoch == self.stop


@pytest.mark.parametrize("members", [1, 3])
def test_a_callback_sees_every_epoch_with_its_weights(members: int) -> None:
    nets = [pl.models.dlgn(2, (4,), seed=s) for s in range(members)]
    follow = Follow()
    result: Any = pl.train(
        nets if members > 1 else nets[0],
        DATA,
        epochs=6,
        beta=pl.training.Geometric(4, 100),
        keep=range(7),
        callbacks=[follow],
        progress=False,
    )
    assert follow.epochs == list(range(7))
    for i, t in enumerate(result if members > 1 else [result]):
        assert [losses[i] for losses in follow.losses] == t.history["loss"]
        for seen, moment in zip(follow.weights, t.moments, strict=True):
            assert torch.equal(seen[i], torch.cat([v.flatten() for v in moment.snapshot.state.values()]))
        assert torch.equal(weights(nets[i]), follow.weights[-1][i])


def test_callbacks_do_not_change_the_training() -> None:
    def spoil(state: TrainingState) -> None:
        with torch.no_grad():
            for net in state.networks:
                for p in net.parameters():
                    p.zero_()

    plain, spoilt = (
        pl.train(pl.models.relu(2, (4,)), DATA, epochs=3, seeds=[0, 1], callbacks=some, progress=False)
        for some in ([], [spoil])
    )
    assert (plain.history() == spoilt.history()).all()
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(plain.networks, spoilt.networks))


@pytest.mark.parametrize("stop", [0, 2, 6])
def test_a_callback_stops_after_its_epoch_and_all_are_called(stop: int) -> None:
    first, second = Follow(stop), Follow()
    runs = pl.train(pl.models.relu(2, (4,)), DATA, epochs=6, seeds=[0, 1], callbacks=[first, second], progress=False)
    assert first.epochs == second.epochs == list(range(stop + 1))
    assert runs.history().shape == (2, stop + 1)
    assert all(torch.equal(weights(net), seen) for net, seen in zip(runs.networks, first.weights[-1]))
    truth = np.bool_(True)
    short = pl.train(pl.models.relu(2, (4,)), DATA, epochs=6, callbacks=[lambda state: truth], progress=False)
    assert len(short.history["loss"]) == 1


def test_callbacks_on_resume(tmp_path: Path) -> None:
    def go(folder: str, *callbacks: Any) -> Any:
        saved = Checkpoints(tmp_path / folder, every=1)
        net = pl.models.relu(2, (4,))
        return pl.train(net, DATA, epochs=6, seeds=[0, 1], checkpoints=saved, callbacks=callbacks, progress=False)

    def interrupt(state: TrainingState) -> None:
        if state.epoch == 4:
            raise KeyboardInterrupt

    whole, stopped, again, rest, finished = Follow(), Follow(3), Follow(3), Follow(), Follow()
    want = go("whole", whole)
    go("cut", stopped)
    assert go("cut", again).history().shape == (2, 4)  # the same training has stopped there
    assert stopped.epochs == [0, 1, 2, 3] and again.epochs == [3]
    with pytest.raises(KeyboardInterrupt):
        go("cut", interrupt)
    got = go("cut", rest)
    go("cut", finished)
    assert rest.epochs == [3, 4, 5, 6] and finished.epochs == [6]
    assert (got.history() == want.history()).all() and rest.losses == whole.losses[3:]
    for seen, expected in zip(rest.weights, whole.weights[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen, expected))


def test_a_network_that_a_callback_updated_resumes_without_a_warning(tmp_path: Path) -> None:
    def interrupt(state: TrainingState) -> None:
        if state.epoch == 4:
            raise KeyboardInterrupt
        assert state.networks

    net, saved = pl.models.relu(2, (4,), seed=0), Checkpoints(tmp_path, every=1)
    with pytest.raises(KeyboardInterrupt):
        pl.train(net, DATA, epochs=6, checkpoints=saved, callbacks=[interrupt], progress=False)
    t = pl.train(net, DATA, epochs=6, checkpoints=saved, progress=False)  # warnings are errors
    assert len(t.history["loss"]) == 7


def test_a_stopped_network_has_its_best_weights() -> None:
    follow, held = Follow(), pl.data.circle(40, bottom=3)
    runs = pl.train(
        pl.models.relu(2, (16,)),
        DATA,
        epochs=6,
        lr=0.3,
        seeds=range(4),
        validation=held,
        stopping=Stopping(patience=1),
        keep=range(7),
        callbacks=[follow],
        progress=False,
    )
    ends = [len(t.history["validation"]) for t in runs]
    assert len(set(ends)) > 1
    for i, t in enumerate(runs):
        best = int(np.argmin(t.history["validation"]))
        expected = torch.cat([v.flatten() for v in t.moments[best].snapshot.state.values()])
        for seen in follow.weights[ends[i] :]:
            assert torch.equal(seen[i], expected)
        assert torch.equal(weights(runs.networks[i]), expected)


def test_the_state_is_frozen() -> None:
    def change(state: TrainingState) -> None:
        state.epoch = 3  # type: ignore[misc]

    with pytest.raises(FrozenInstanceError):
        pl.train(pl.models.relu(2, (4,)), DATA, epochs=1, callbacks=[change], progress=False)


def test_the_validation_data_may_have_any_form() -> None:
    held = pl.data.circle(40)
    pairs = torch.utils.data.TensorDataset(held.x, held.y)
    histories = [
        pl.train(pl.models.relu(2, (4,), seed=0), DATA, epochs=2, validation=data, progress=False).history
        for data in (held, (held.x, held.y), pairs, torch.utils.data.DataLoader(pairs, batch_size=16))
    ]
    assert all(history == histories[0] for history in histories) and len(histories[0]["validation"]) == 3


def test_a_text_is_the_label_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, label: str, total: int) -> None:
            shown.append((label, total))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def advance(self, steps: int = 1, note: str = "") -> None:
            shown.append((steps, note))

    monkeypatch.setattr("pathlens.progress.ProgressBar", Bar)
    runs = pl.train(pl.models.relu(2, (4,)), DATA, epochs=2, seeds=range(3), progress="three")
    losses = [f"loss {np.median(column):.4f}" for column in runs.history()[:, 1:].T]
    assert shown == [("three (3 networks at once)", 2), (1, losses[0]), (1, losses[1])]
    shown.clear()
    pl.train(pl.models.relu(2, (4,)), DATA, epochs=2, progress=False)
    pl.train(pl.models.relu(2, (4,)), DATA, epochs=2)
    assert [entry for entry in shown if entry[1] == 2] == [("training", 2)] * 2 and len(shown) == 4


REFUSED: list[tuple[Any, str]] = [
    (lambda: Checkpoints("a", every=0), "Checkpoints: every must be an integer of at least 1, got 0"),
    (lambda: Checkpoints(3), "folder must be a path, got int"),
    (lambda: Execution(compile="cuda"), "compile must be True or False, got 'cuda'"),
    (lambda: Execution(autocast="bfloat16"), "autocast must be a dtype such as torch.bfloat16"),
    (lambda: Execution(threads=0), "threads must be an integer"),
    (lambda: Stopping(patience=1.5), "patience must be an integer of at least 1, got 1.5"),
    (lambda: Stopping(loss_below="low"), "loss_below must be a number"),
    (lambda: Teacher(3), "expected a trained network, got int"),
    (lambda: Keep("first"), "epochs is a sequence"),
    (lambda: pl.train(pl.models.relu(2, (4,)), DATA, epochs=1, callbacks=Follow()), "callbacks is a sequence"),
    (lambda: pl.train(pl.models.relu(2, (4,)), DATA, epochs=1, callbacks=[3]), "callbacks is a sequence"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_options_are_refused(call: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
