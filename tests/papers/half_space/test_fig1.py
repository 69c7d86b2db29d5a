"""Path regions of the two small networks of Figure 1."""

import numpy as np
import pytest
import torch

from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space.fig1 import jumping
from pathlens.papers.half_space.region_shapes import pixels


@pytest.fixture(scope="module")
def artifact():
    return perform(find("hs.fig1"), Run("paper", seeds=(0, 1)))


def test_there_is_nothing_to_reduce(artifact):
    assert artifact.verdict == "reproduced" and not artifact.reduced


def test_areas_of_the_jumping_region(artifact):
    arrays = artifact.arrays
    e = arrays["epsilons"]
    assert np.allclose(arrays["areas_relu"], [np.full(9, 2.0), 1 - e], atol=1e-12)  # right half; x₁ > 0, x₂ > ε
    assert np.allclose(arrays["areas_dlgn"], [1 + e, 1 - e], atol=1e-12)


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_pictures_show_where_both_gates_are_on(artifact, kind):
    at = pixels(1.0)
    net = jumping(kind, -0.1)
    with torch.no_grad():
        first, second = net.gates(torch.from_numpy(at), hard=True).values()
    assert np.array_equal(artifact.arrays[f"region_{kind}_below"].ravel() > 0, (first[:, 0] * second[:, 0] > 0).numpy())
    assert (at[0] == [-1 + 1 / 80, 1 - 1 / 80]).all()  # the first pixel is top left
