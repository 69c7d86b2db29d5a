"""The circle experiments, small: what they write, what they claim, and that they share one training."""

import math

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.papers import half_space_circle as half_space
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page

NAMES = ("hs.fig2", "hs.fig3", "hs.fig5", "hs.fig6")


@pytest.fixture(scope="module")
def small():
    """64 points and 200 epochs: seconds, and the same code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_space, "KERNEL_POINTS", 32)
        yield {"points": 64, "epochs": {"relu": 200, "dlgn_pwc": 200, "frozen": 210}}


@pytest.fixture(scope="module")
def artifacts(small, tmp_path_factory):
    run = Run("quick", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=small)
    return {name: perform(find(name), run) for name in NAMES}, run


def test_one_training_serves_all_four(artifacts):
    _, run = artifacts
    assert list(run._results) == ["circle"]


def test_the_arrays_are_those_that_the_page_draws(artifacts):
    found, _ = artifacts
    shapes = {name: {k: v.shape for k, v in a.arrays.items()} for name, a in found.items()}
    assert shapes["hs.fig2"]["loss_frozen"] == (2, 211)
    assert shapes["hs.fig3"]["kernel_relu"] == (3, 32, 32)
    assert shapes["hs.fig3"]["diag_ratio_dlgn_pwc"] == (2, len(half_space.RATIO_EPOCHS))
    assert shapes["hs.fig5"]["outputs_frozen"] == (3, 64)
    assert shapes["hs.fig6"]["normals_end"] == (2, 5, 16, 2)


def test_kernels_are_trace_normalised_counts_of_shared_paths(artifacts):
    found, run = artifacts
    kernel = found["hs.fig3"].arrays["kernel_dlgn_pwc"][0]
    assert np.trace(kernel) == pytest.approx(1, rel=1e-4)
    circle = run.once("circle", lambda: None)
    net = circle.runs["dlgn_pwc"].networks[circle.shown("dlgn_pwc")]
    net.load_state_dict(circle.runs["dlgn_pwc"][circle.shown("dlgn_pwc")].at_epoch(0).snapshot.state)
    with torch.no_grad():
        gates = [g.double() for g in net.gates(circle.data.x[::2], hard=True).values()]
    counts = math.prod(g @ g.T for g in gates)
    assert np.allclose(kernel, (counts / counts.trace()).numpy(), atol=1e-6)


def test_normals_are_the_gradients_of_the_gates_preactivations():
    net = pl.models.dlgn(2, (4, 4), seed=0).double()
    jacobian = torch.func.jacrev(lambda x: net.preactivations(x[None]))(torch.zeros(2, dtype=torch.float64))
    for normals, rows in zip(half_space.gate_normals(net.state_dict()), jacobian.values()):
        rows = rows[0].detach().numpy()
        assert np.allclose(normals, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-12)


def test_a_run_shorter_than_the_claim_cannot_say_never():
    assert half_space._never_or_unknown([300, None], 600, 2000) == [300.0, None]
    assert half_space._never_or_unknown([3000, None], 8000, 2000) == [3000.0, math.inf]


def test_the_page_is_written_from_saved_artifacts(artifacts, tmp_path):
    found, _ = artifacts
    for a in found.values():
        a.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(title in page for title in (a.title for a in found.values()))
    assert "soft gates β=4" in page and "hard gates" in page


def test_running_again_from_checkpoints_gives_the_same_numbers(small, artifacts, tmp_path):
    found, run = artifacts
    again = Run("quick", seeds=run.seeds, out=run.out, changes=small)  # finished checkpoints: read back
    for name in NAMES:
        for key, value in perform(find(name), again).arrays.items():
            assert np.array_equal(value, found[name].arrays[key]), (name, key)
