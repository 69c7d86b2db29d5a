"""Weights of classes: those of scikit-learn, and a fit with them is the fit with the weights of rows that they make."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import recall_score
from sklearn.utils.class_weight import compute_class_weight

from pathlens import DLGNClassifier, PathKernelClassifier, PathKernelRegressor
from pathlens.errors import LabelError, OptionError
from pathlens.estimators.weights import with_class_weight

WIDE = {"hidden": (16, 8), "epochs": 30, "learning_rate": 0.02, "weight_decay": 0.1, "random_state": 0}


@pytest.fixture(scope="module")
def rare():
    """Two thirds of the rows are of one class, a twentieth of another."""
    random = np.random.default_rng(0)
    X = random.standard_normal((60, 3))
    labels = np.repeat(["common", "rare", "some"], [40, 3, 17])
    return X + 1.5 * (labels == "rare")[:, None] - 1.5 * (labels == "some")[:, None], labels


@pytest.mark.parametrize("labels", [["no", "yes", "may be"], [3, 5, 1], [-1.0, 1.0, 2.0], [False, True]])
@pytest.mark.parametrize("kind", ["balanced", "some", "all", "more"])
def test_they_are_those_of_scikit_learn(labels, kind):
    y = np.repeat(labels, [5, 2, 9][: len(labels)])
    weights = {"balanced": "balanced", "some": {labels[1]: 3}, "all": {label: 2 + i for i, label in enumerate(labels)}}
    weights["more"] = weights["all"] | {"other" if isinstance(labels[0], str) else 99: 7}
    classes, index = np.unique(y, return_inverse=True)
    wanted = compute_class_weight(weights[kind], classes=classes, y=y)[index]
    np.testing.assert_allclose(with_class_weight("test", np.ones(len(y)), y, weights[kind]), wanted, rtol=1e-12)


def test_balanced_counts_weights_and_leaves_their_sum():
    y, given = np.array(list("aaabbc")), np.array([1.0, 2, 3, 4, 0, 0])
    found = with_class_weight("test", given, y, "balanced")
    np.testing.assert_allclose([found[y == k].sum() for k in "abc"], [5, 5, 0])
    np.testing.assert_allclose(found[:3] / given[:3], 5 / 6)


@pytest.mark.parametrize("kind", [DLGNClassifier, PathKernelClassifier])
def test_a_class_of_weight_two_is_there_twice(rare, kind):
    X, y = rare
    own = {**WIDE, "batch_size": None} if kind is DLGNClassifier else WIDE  # 63 rows are one batch anyway
    weighted = kind(**own, class_weight={"rare": 2}).fit(X, y)
    twice = np.where(y == "rare", 2, 1)
    repeated = kind(**own).fit(X.repeat(twice, axis=0), y.repeat(twice))
    np.testing.assert_allclose(weighted.decision_function(X), repeated.decision_function(X), atol=1e-6)
    assert np.abs(kind(**own).fit(X, y).decision_function(X) - weighted.decision_function(X)).max() > 1e-3


@pytest.mark.parametrize("change", [{}, {"early_stopping": True, "n_restarts": 2}, {"weight_decay": "auto"}])
def test_a_fit_is_that_of_the_weights_of_the_rows(rare, change):
    """In all that counts weights: `balanced` of the weights of rows, the rule of the weight decay, held-out losses."""
    X, y = (np.concatenate([part] * (50 if change.get("weight_decay") else 2)) for part in rare)  # 3000 rows: a choice
    given = np.random.default_rng(1).uniform(0.5, 2, len(y))
    options = WIDE | {"epochs": 3, "batch_size": 500} | change
    by_class = DLGNClassifier(**options, class_weight="balanced").fit(X, y, given)
    by_row = DLGNClassifier(**options).fit(X, y, with_class_weight("test", given, y, "balanced"))
    assert by_class.weight_decay_ == by_row.weight_decay_ and by_class.loss_ == by_row.loss_
    np.testing.assert_array_equal(by_class.predict_proba(X), by_row.predict_proba(X))
    np.testing.assert_array_equal(by_class.model_.open_shares[0], by_row.model_.open_shares[0])


def test_balanced_finds_more_of_a_rare_class():
    X, y = load_breast_cancer(return_X_y=True)
    kept = np.flatnonzero((y == 1) | (np.cumsum(y == 0) <= 30))  # 30 malignant ones, 357 benign
    others = np.setdiff1d(np.arange(len(y)), kept)  # malignant ones alone
    found = {}
    for weight in (None, "balanced"):
        model = DLGNClassifier(hidden=(8,), random_state=0, class_weight=weight).fit(X[kept], y[kept])
        found[weight] = recall_score(y[others], model.predict(X[others]), pos_label=0)
        assert model.score(X[kept], y[kept]) > 0.95
    assert found["balanced"] > found[None] + 0.02


def test_a_class_of_weight_zero_is_absent(rare):
    X, y = rare
    without = DLGNClassifier(**WIDE, class_weight={"rare": 0}).fit(X, y)
    assert without.classes_.tolist() == ["common", "some"]
    removed = DLGNClassifier(**WIDE).fit(X[y != "rare"], y[y != "rare"])
    np.testing.assert_array_equal(without.predict_proba(X), removed.predict_proba(X))


def test_parameters_and_files_keep_them(rare, tmp_path):
    X, y = rare[0], np.unique(rare[1], return_inverse=True)[1]
    for weight in ({0: 1, 1: np.float64(2.5)}, {np.int64(2): 3}, "balanced", None):
        model = DLGNClassifier(**WIDE | {"epochs": 2}, class_weight=weight).fit(X, y)
        assert clone(model).get_params()["class_weight"] == model.class_weight == weight
        model.save(tmp_path / "model")
        assert DLGNClassifier.load(tmp_path / "model").class_weight == weight
    assert model.set_params(class_weight={1: 2}).class_weight == {1: 2}


@pytest.mark.parametrize("kind", [DLGNClassifier, PathKernelClassifier])
@pytest.mark.parametrize(
    ("weight", "error", "said"),
    [
        ({"Rare": 2}, LabelError, "has 'Rare', which are not in y, and leaves out 'common', 'rare', 'some'"),
        ({0: 2, 1: 3}, LabelError, "has 0, 1, which are not in y"),
        ({"rare": -1}, OptionError, "class_weight of 'rare' must be a finite number of at least 0, got -1"),
        ({"rare": float("nan")}, OptionError, "must be a finite number of at least 0, got nan"),
        ({"rare": "2"}, OptionError, "must be a finite number of at least 0, got '2'"),
        ({"rare": 0, "common": 0}, OptionError, "leaves fewer than two classes of y a positive weight"),
        ("balance", OptionError, "class_weight must be None, 'balanced' or a dict of .*, got 'balance'"),
        ([1, 2, 3], OptionError, r"class_weight must be None, 'balanced' or a dict"),
    ],
)
def test_wrong_ones_are_named(rare, kind, weight, error, said):
    with pytest.raises(error, match=said):
        kind(class_weight=weight).fit(*rare)


def test_one_class_that_weighs_is_not_enough(rare):
    X, y = rare
    with pytest.raises(LabelError, match="rows of positive weight hold one class, 'some'; a classifier needs"):
        DLGNClassifier().fit(X, y, y == "some")


# --- weights of kernel machines --------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["overlap", "ntk"])
def test_kernel_machines_take_weights_for_repetitions(rare, kernel):
    X = rare[0]
    y = np.stack([X[:, 0] ** 2, X[:, 1]], axis=1)
    weights = np.random.default_rng(2).integers(0, 4, len(X))[:24]  # 64 copies at most are one batch
    X, y = X[:24], y[:24]
    assert weights.sum() <= 64 and weights.min() == 0
    for given in (weights, np.full(24, 2)):
        weighted = PathKernelRegressor(kernel, **WIDE).fit(X, y, given)
        repeated = PathKernelRegressor(kernel, **WIDE).fit(X.repeat(given, axis=0), y.repeat(given, axis=0))
        np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), atol=1e-6)
        assert weighted.ridge_ == pytest.approx(repeated.ridge_)
    assert np.abs(PathKernelRegressor(kernel, **WIDE).fit(X, y).predict(X) - weighted.predict(X)).max() > 1e-3


def test_a_ridge_is_chosen_for_the_rows_that_weigh():
    import pathlens as pl

    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (120, 2))
    noisy = np.arange(120) % 2 == 1
    y = np.sin(3 * X[:, 0]) + noisy * random.normal(size=120)
    net = pl.models.relu(2, (32, 32), seed=0).double()
    clean, noise = (
        PathKernelRegressor("ntk", network=net, ridge="auto").fit(X, y, np.where(side, 1.0, 1e-3))
        for side in (~noisy, noisy)
    )
    assert clean.ridge_ < noise.ridge_
