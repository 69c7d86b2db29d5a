"""Memorising on a small grid of depths and widths."""

import numpy as np

from pathlens.papers.artifact import load_folder
from pathlens.papers.deep_gated import depths
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page


def test_memorising_shares_the_trainings_of_figure_3(tmp_path):
    changes = {"n": 10, "trained_depths": [2, 4, 6], "trained_widths": [6, 12], "epochs": 5}
    run = Run("quick", seeds=(0, 1, 2), changes=changes)
    artifact = perform(find("npk.memorise"), run)
    error = artifact.arrays["error"]
    assert error.shape == (2, 3, 3) and {key for key in run._results if key[0] == "memorise"} == {
        ("memorise", 6),
        ("memorise", 12),
    }
    assert np.allclose(error[1], depths.memorise(run, 12).final, atol=1e-6)
    artifact.save(tmp_path / "artifacts")
    assert artifact.title in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert find("npk.memorise").sizes == find("dgn.fig3").sizes
