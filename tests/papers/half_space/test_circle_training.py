"""The experiments on the circle, small: what they write, what they claim, and that they share one training."""

import math

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space import circle_training, fig2, fig3, fig6, spectral
from pathlens.papers.pages import write_page

FIGURES = ("hs.fig2", "hs.fig3", "hs.fig5", "hs.fig6")
ANALYSES = ("hs.fig8", "hs.regions", "hs.fig4", "hs.spectral")
SMALL = {
    "points": 32,
    "epochs": {"relu": 200, "dlgn_pwc": 200, "frozen": 1},
    "kernel_points": 32,
    "regions": 25,
    "biased_hidden": [6, 6],
    "biased_epochs": 2,
    "hidden": [8, 8],
}


@pytest.fixture(scope="module")
def small():
    """64 points and 200 epochs: seconds, and the same code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fig3, "KERNEL_POINTS", 32)
        yield {"points": 64, "epochs": {"relu": 200, "dlgn_pwc": 200, "frozen": 210}}


@pytest.fixture(scope="module")
def figures(small, tmp_path_factory):
    run = Run("quick", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=small)
    return {name: perform(find(name), run) for name in FIGURES}, run


@pytest.fixture(scope="module")
def analyses(tmp_path_factory):
    """In seconds; either scale runs the same code."""
    run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
    return {name: perform(find(name), run) for name in ANALYSES}, run


def test_one_training_serves_all_four(figures):
    _, run = figures
    assert list(run._results) == ["circle"]


def test_the_training_and_the_kernels_are_shared(analyses):
    assert len(analyses[1]._results) == 2


def test_what_is_smaller_than_the_paper_says_so(analyses):
    found, _ = analyses
    assert all(found[name].reduced and found[name].verdict != "reproduced" for name in ANALYSES)


def test_the_arrays_are_those_that_the_page_draws(figures):
    found, _ = figures
    shapes = {name: {k: v.shape for k, v in a.arrays.items()} for name, a in found.items()}
    assert shapes["hs.fig2"]["loss_frozen"] == (2, 211)
    assert shapes["hs.fig3"]["kernel_relu"] == (3, 32, 32)
    assert shapes["hs.fig3"]["diag_ratio_dlgn_pwc"] == (2, len(fig3.RATIO_EPOCHS))
    assert shapes["hs.fig5"]["outputs_frozen"] == (3, 64)
    assert shapes["hs.fig6"]["normals_end"] == (2, 5, 16, 2)


def test_kernels_are_trace_normalised_counts_of_shared_paths(figures):
    found, run = figures
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
    for normals, rows in zip(fig6.gate_normals(net), jacobian.values()):
        rows = rows[0].detach().numpy()
        assert np.allclose(normals, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-12)


def test_a_run_shorter_than_the_claim_cannot_say_never():
    assert fig2._never_or_unknown([300, None], 600, 2000) == [300.0, None]
    assert fig2._never_or_unknown([3000, None], 8000, 2000) == [3000.0, math.inf]


def test_lines_through_the_origin_give_two_sectors_each(analyses):
    counts = analyses[0]["hs.regions"].arrays["activation_regions"]
    assert (counts[1, 0] == 2 * 16).all()  # DLGN-PWC at initialisation, 16 gates without biases


def test_tangent_kernels_are_those_of_autograd(analyses):
    _, run = analyses
    circle, found = circle_training.train_circle(run), circle_training.tangent_kernels(run)
    for model in circle_training.LEARNED:
        net = circle_training.network_at(circle.runs[model][1], 200)
        weights = list(net.parameters())
        rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in net(circle.data.x.double())[:, 0]]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        assert np.allclose(found[model][1, circle.kept_epochs.index(200)], (J @ J.T).numpy(), atol=1e-10)
        f, ours = spectral.linearisation(net, circle.data.x.double())
        assert torch.allclose(ours, J) and torch.allclose(f, net(circle.data.x.double())[:, 0])


def test_alignments_leave_out_the_network_itself(analyses):
    found, run = analyses
    K = circle_training.tangent_kernels(run)["relu"]
    H = np.eye(32) - 1 / 32
    a, b = (H @ K[s, -1] @ H for s in (0, 1))
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert np.allclose(found["hs.fig4"].arrays["alignment_ntk_relu"][:, -1], cosine, rtol=1e-5)


def test_the_page_is_written_from_saved_artifacts(figures, analyses, tmp_path):
    found = {**figures[0], **analyses[0]}
    for a in found.values():
        a.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(title in page for title in (a.title for a in found.values()))
    assert "soft gates β=4" in page and "hard gates" in page


def test_running_again_from_checkpoints_gives_the_same_numbers(figures, analyses):
    for (found, run), names in ((figures, FIGURES), (analyses, ("hs.regions",))):
        again = Run(run.scale, seeds=run.seeds, out=run.out, changes=run.changes)  # finished checkpoints: read back
        for name in names:
            for key, value in perform(find(name), again).arrays.items():
                assert np.array_equal(value, found[name].arrays[key]), (name, key)
