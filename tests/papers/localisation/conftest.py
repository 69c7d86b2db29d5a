"""One small run that all tests of the localisation experiments share."""

import functools
from collections.abc import Callable

import pytest

from pathlens.papers.artifact import Artifact
from pathlens.papers.experiment import Run, find, perform

SMALL = {
    "steps": 30,
    "batch": 60,
    "rows": 150,
    "descent": 40,
    "flow_rows": 60,
    "time": 5.0,
    "units": 10,
    "draws": 4,
    "gate_rows": 200,
}


@pytest.fixture(scope="session")
def small_run() -> Run:
    return Run("quick", seeds=(0, 1), changes=SMALL)


@pytest.fixture(scope="session")
def artifact(small_run: Run) -> Callable[[str], Artifact]:
    """A function from an experiment's name to its artifact; each experiment runs once."""
    return functools.cache(lambda name: perform(find(name), small_run))
