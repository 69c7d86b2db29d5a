"""The stress tests, small, against definitions given here."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space import failures
from pathlens.papers.pages import write_page
from pathlens.training import Keep

SMALL = {
    "points": 32,
    "hidden": [8, 8],
    "steps": 4,
    "inputs": 5,
    "bits": [3],
    "frequencies": [4, 8],
    "samples": [16],
    "turns": 1,
    "turn_steps": [4],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """In seconds; either scale runs the same code."""
    run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
    return perform(find("hs.failures"), run), run


def test_smaller_sizes_are_marked(done):
    assert done[0].reduced and done[0].verdict != "reproduced"


def test_the_page_is_written(done, tmp_path):
    done[0].save(tmp_path / "artifacts")
    assert done[0].title in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()


class Known(torch.nn.Module):
    """A network that computes a given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)[:, None]


def test_skill_is_one_for_the_target_and_zero_for_a_constant():
    data = failures.parity(5, 3)
    assert len(data.x) == len(data.x_test) == 16
    assert not {tuple(r) for r in data.x.tolist()} & {tuple(r) for r in data.x_test.tolist()}
    right, wrong = Known(lambda x: x[:, 0] * x[:, 1] * x[:, 2]), Known(lambda x: torch.zeros(len(x)))
    runs = SimpleNamespace(networks=[right, wrong])
    assert failures.skills(runs, data, "parity").tolist() == [1.0, 0.0]
    data = pl.data.circle(64, bottom=6, test_points=96)
    angle = lambda x: torch.atan2(x[:, 1], x[:, 0])  # noqa: E731
    runs = SimpleNamespace(networks=[Known(lambda x: torch.sin(6 * angle(x))), Known(lambda x: 0 * x[:, 0])])
    assert failures.skills(runs, data, "frequency") == pytest.approx([1.0, 0.0], abs=1e-5)  # the fast half alone
    assert failures.skills(runs, data, "samples")[0] < 0.5


def test_turning_moves_the_target_round_the_circle():
    data = pl.data.circle(360, test_points=8)
    moved = failures.turned(data, math.pi / 3)
    assert torch.allclose(moved.x[:300], data.x[60:], atol=1e-6) and torch.equal(moved.y, data.y)


def test_the_second_task_starts_from_the_networks_of_the_first(done):
    found, run = done
    sizes = run.sizes_of("hs.failures")
    start = pl.data.circle(32, bottom=sizes["easy_frequency"], test_points=failures.TEST_POINTS)
    options = {"epochs": 4, "lr": sizes["lr"], "batch_size": 32, "keep": Keep(evaluate="running"), "progress": False}
    first = pl.train(pl.models.relu(2, (8, 8)), start, seeds=run.seeds, **options)
    second = failures.turned(start, math.pi / 3)
    both = pl.train(first.networks, second, **options)
    skill = failures.skills(both, second, "drift")
    assert np.allclose(found.arrays["drift_relu"][:, 0], skill, atol=1e-6)


def test_running_again_from_checkpoints_gives_the_same_numbers(done):
    found, run = done
    again = Run(run.scale, seeds=run.seeds, out=run.out, changes=SMALL)
    for key, value in perform(find("hs.failures"), again).arrays.items():
        assert np.array_equal(value, found.arrays[key]), key
