"""Small runs of the experiments, each performed once for all test files."""

from functools import cache

import pytest
from image_clouds import SEEDS, SMALL, made_up_images

from pathlens.papers.experiment import Run, find, perform

SYNTHETIC = {
    "dgn.fig1": {"n": 12, "depths": [2, 4, 6], "widths": [8, 40]},
    "dgn.fig2": {"depths": [2, 4, 6], "runs": 4, "width": 40},
    "dgn.fig3": {"n": 12, "trained_depths": [2, 4, 6], "trained_widths": [8, 20], "epochs": 12},
    "dgn.fig4": {"galu_n": 10, "galu_width": 12, "galu_depths": [2, 4], "galu_epochs": 10},
    "dgn.fig9": {},
    "dgn.fig10": {"width": 20, "depths": [2, 4], "steps": 12},
    "dgn.conv": {},
    "dgn.subnetworks": {"width": 8, "hidden_layers": 3, "epochs": 3, "watched": 6},
    "dgn.unfittable": {"fit_width": 8, "fit_hidden_layers": 2, "fit_steps": 30},
}


@pytest.fixture(scope="session")
def synthetic_names():
    return tuple(SYNTHETIC)


@pytest.fixture(scope="session")
def on_synthetic():
    """A function from the name of an experiment on synthetic data to its artifact."""
    return cache(lambda name: perform(find(name), Run("quick", seeds=(0, 1, 2), changes=SYNTHETIC[name])))


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    """At paper scale, so that this is the code that runs there; all artifacts are then REDUCED."""
    return Run("paper", seeds=SEEDS, changes=SMALL, out=tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def on_images(image_run):
    """A function from the name of an experiment on images to its artifact; the images are made up."""

    @cache
    def artifact(name):
        with made_up_images():
            return perform(find(name), image_run)

    return artifact
