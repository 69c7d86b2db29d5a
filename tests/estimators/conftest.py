"""Small real data and estimators fitted once."""

from __future__ import annotations

import pytest
from sklearn.datasets import load_diabetes, load_iris

from pathlens import DLGNClassifier, DLGNRegressor

QUICK = {
    "hidden": (8, 6),
    "epochs": 60,
    "batch_size": None,
    "learning_rate": 0.02,
    "weight_decay": 0.1,
    "random_state": 0,
}


@pytest.fixture(scope="session")
def iris():
    """A frame with named columns, and string labels."""
    X, y = load_iris(return_X_y=True, as_frame=True)
    return X, load_iris().target_names[y.to_numpy()]


@pytest.fixture(scope="session")
def diabetes():
    return load_diabetes(return_X_y=True, as_frame=True, scaled=False)


@pytest.fixture(scope="session")
def flowers(iris) -> DLGNClassifier:
    return DLGNClassifier(**QUICK).fit(*iris)


@pytest.fixture(scope="session")
def pair(iris) -> DLGNClassifier:
    """Two classes: one output, the log-odds."""
    X, y = iris
    return DLGNClassifier(**QUICK).fit(X[50:], y[50:])


@pytest.fixture(scope="session")
def patients(diabetes) -> DLGNRegressor:
    return DLGNRegressor(**QUICK).fit(*diabetes)


@pytest.fixture(scope="session")
def quick() -> dict:
    return dict(QUICK)


@pytest.fixture(params=["flowers", "pair", "patients"])
def fitted(request, iris, diabetes):
    """An estimator, and the frame it was fitted on."""
    X = {"flowers": iris[0], "pair": iris[0][50:], "patients": diabetes[0]}[request.param]
    return request.getfixturevalue(request.param), X
