"""Scikit-learn's own checks, with few epochs so that they are quick; with the defaults where marked slow."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pathlens import DLGNClassifier, DLGNRegressor, PathKernelClassifier, PathKernelRegressor

QUICK = {"hidden": (8,), "epochs": 16, "learning_rate": 0.08, "weight_decay": 0.1}

# the only check that scikit-learn itself skips: it needs an environment variable that is read before scipy loads
pytestmark = pytest.mark.filterwarnings("ignore:Skipping check check_array_api_input")


@parametrize_with_checks([DLGNClassifier(**QUICK), DLGNRegressor(**QUICK)])
def test_dlgn(estimator, check):
    check(estimator)


WIDE = QUICK | {"hidden": (32,)}  # the overlap kernel sees nothing but the gates: it needs more of them


@parametrize_with_checks([PathKernelClassifier(**WIDE), PathKernelRegressor(**WIDE)])
def test_path_kernels(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([DLGNClassifier(), DLGNRegressor(), PathKernelClassifier(), PathKernelRegressor()])
def test_defaults(estimator, check):
    check(estimator)
