"""The four paths of a small DLGN."""

import numpy as np
import torch

import pathlens as pl
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space.fig8 import PATHS
from pathlens.papers.half_space.region_shapes import pixels


def test_paths_of_the_toy_add_up_to_its_output():
    arrays = perform(find("hs.fig8"), Run("paper", seeds=(0, 1))).arrays
    x = torch.from_numpy(pixels(1.0))
    for stem, constant in (("dlgn", False), ("pwc", True)):
        net = pl.models.dlgn(2, (2, 2), gate="hard", piecewise_constant=constant, seed=0).double()
        with torch.no_grad():
            assert np.allclose(arrays[f"sum_{stem}"].ravel(), net(x)[:, 0], atol=1e-6)
        each = pl.paths.values(net, x, list(PATHS)).T
        assert np.allclose(arrays[f"path_{stem}"].reshape(4, -1), each, atol=1e-6)
