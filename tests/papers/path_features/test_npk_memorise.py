"""Memorising on a small grid of depths and widths."""

import numpy as np

from pathlens.papers import deep_gated_synthetic as deep_gated
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page


def test_memorising_shares_the_trainings_of_figure_3(tmp_path):
    changes = {"n": 10, "trained_depths": [2, 4, 6], "trained_widths": [6, 12], "epochs": 5}
    run = Run("quick", seeds=(0, 1, 2), changes=changes)
    assert run.sizes_of("npk.memorise") == run.sizes_of("dgn.fig3")
    artifact = perform(find("npk.memorise"), run)
    error = artifact.arrays["error"]
    assert error.shape == (2, 3, 3) and {key for key in run._results if key[0] == "memorise"} == {
        ("memorise", 6),
        ("memorise", 12),
    }
    assert np.allclose(error[1], deep_gated.memorise(run, 12).error[:, :, -1], atol=1e-6)
    artifact.save(tmp_path / "artifacts")
    assert artifact.title in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    for scale in ("quick", "paper"):
        assert find("npk.memorise").sizes_at(scale) == find("dgn.fig3").sizes_at(scale)
