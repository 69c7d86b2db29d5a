"""Shifted and flipped images: against padding and slicing by hand, and in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import pathlens as pl
from pathlens.errors import OptionError, UnknownNameError
from pathlens.training import Checkpoints
from pathlens.training.augment import MOVES, PAD, crop_flip


@given(st.integers(1, 7), st.integers(1, 7), st.lists(st.integers(0, MOVES - 1), min_size=1, max_size=6), st.data())
def test_it_is_padding_cutting_and_flipping(height: int, width: int, moves: list[int], data: st.DataObject) -> None:
    images = torch.randn(4, 2, height, width, generator=torch.Generator().manual_seed(0))
    rows = data.draw(st.lists(st.integers(0, 3), min_size=len(moves), max_size=len(moves)))
    got = crop_flip(images, torch.tensor(rows), torch.tensor(moves))
    padded = F.pad(images, (PAD, PAD, PAD, PAD))
    for image, row, move in zip(got, rows, moves):
        down, rest = divmod(move, 2 * (2 * PAD + 1))
        along, flip = divmod(rest, 2)
        whole = padded[row].flip(-1) if flip else padded[row]
        want = whole[:, down : down + height, along : along + width]
        assert torch.equal(image, want)


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


def _net() -> torch.nn.Module:
    return pl.gated_twin(
        pl.models.gconv(3, channels=(1, 2, 2), dense=(3,), bias=True), "relu", example=torch.zeros(1, 1, 6, 6)
    ).double()


def _options() -> dict[str, object]:
    return {"loss": "cross_entropy", "epochs": 4, "batch_size": 5, "progress": False, "augment": "crop_flip"}


def test_members_of_a_stack_move_as_they_do_alone() -> None:
    runs = pl.train(_net(), _data(), seeds=(3, 8), **_options())
    alone = pl.train(_net(), _data(), seeds=(8,), **_options())
    for a, b in zip(runs.networks[1].parameters(), alone.networks[0].parameters()):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)
    still = pl.train(_net(), _data(), seeds=(8,), **_options() | {"augment": None})
    assert abs(runs.history()[1, -1] - still.history()[0, -1]) > 1e-6


def test_a_run_that_was_cut_off_goes_on_with_the_same_moves(tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Cut

    whole = pl.train(_net(), _data(), seeds=(0,), **_options())
    options = _options() | {"checkpoints": Checkpoints(tmp_path, every=1)}
    with pytest.raises(Cut):
        pl.train(_net(), _data(), seeds=(0,), **options | {"progress": stop})
    rest = pl.train(_net(), _data(), seeds=(0,), **options)
    for a, b in zip(whole.networks[0].parameters(), rest.networks[0].parameters()):
        assert torch.equal(a, b)


def test_bad_input() -> None:
    with pytest.raises(UnknownNameError, match="crop_flip"):
        pl.train(_net(), _data(), **_options() | {"augment": "crop"})
    with pytest.raises(OptionError, match="needs images of shape"):
        pl.train(pl.models.relu(2, (4,)), pl.data.circle(16), epochs=1, augment="crop_flip", progress=False)
