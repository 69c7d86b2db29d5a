"""The toy network of eighteen paths."""

import numpy as np

from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page


def test_the_toy_network_shares_the_path_of_the_figure(tmp_path):
    artifact = perform(find("npk.fig1"), Run("quick"))
    units, gates, x = (artifact.arrays[key] for key in ("units", "gates", "x"))
    assert units.shape == (18, 3) and artifact.verdict == "reproduced"
    features = np.array([[x[s, a] * gates[s, 0, b] * gates[s, 1, c] for a, b, c in units] for s in range(3)])
    assert np.array_equal(artifact.arrays["features"], features)
    both = np.flatnonzero((features[0] != 0) & (features[1] != 0))
    assert list(both + 1) == [3, 12] and artifact.metrics["Λ"][0][1] == 1
    artifact.save(tmp_path / "artifacts")
    assert artifact.title in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
