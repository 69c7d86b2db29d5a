"""weight_decay="auto": chosen on training rows that are held out, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from pathlens import DLGNClassifier, DLGNRegressor
from pathlens.estimators.fitting import _folds, fit
from pathlens.estimators.recipes import DECAY_FACTORS, FOLDS, HELD_OUT_ROWS, TUNED_FROM, resolve_recipe

QUICK = {"hidden": (16, 16), "epochs": 10, "batch_size": 500, "learning_rate": 0.03, "random_state": 0}
RULE = 1.5 * 16 / 64
ENOUGH = FOLDS * HELD_OUT_ROWS  # rows from which on one fold is held out


def rows(n: int = ENOUGH) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (n, 8))


def noisy(X: np.ndarray) -> np.ndarray:
    """Labels that a line tells in three of four cases: what else can be learned is noise."""
    return (X[:, 0] > 0) ^ (np.random.default_rng(1).random(len(X)) < 0.25)


def stripes(X: np.ndarray) -> np.ndarray:
    """Labels without noise that take many half-spaces."""
    return np.sin(4 * X[:, 0]) > 0


@pytest.fixture(scope="module")
def chosen() -> dict[str, DLGNClassifier]:
    X = rows()
    return {f.__name__: DLGNClassifier(**QUICK).fit(X, f(X)) for f in (noisy, stripes)}


def test_the_data_decide(chosen):
    assert chosen["noisy"].weight_decay_ in [RULE * share for share in DECAY_FACTORS if share >= 1]
    assert chosen["stripes"].weight_decay_ in [RULE * share for share in DECAY_FACTORS if share < 1]


@pytest.mark.parametrize("kind", ["noisy", "stripes"])
def test_the_fit_is_that_of_the_chosen_value_on_all_rows(chosen, kind):
    X = rows()
    decay = chosen[kind].weight_decay_
    for given in (decay, "auto"):  # "auto" again: a seed decides everything
        again = DLGNClassifier(**QUICK, weight_decay=given).fit(X, globals()[kind](X))
        assert again.weight_decay_ == decay
        np.testing.assert_array_equal(again.predict_proba(X), chosen[kind].predict_proba(X))


@pytest.mark.parametrize("kind", [DLGNClassifier, DLGNRegressor])
def test_fewer_rows_have_the_rule(kind):
    X, rule = rows(TUNED_FROM - 1), 10 * 16 / 64
    auto, fixed = (kind(**QUICK, weight_decay=w).fit(X, stripes(X)) for w in ("auto", rule))
    assert auto.weight_decay_ == fixed.weight_decay_ == rule
    np.testing.assert_array_equal(auto.predict(X), fixed.predict(X))


@pytest.mark.parametrize("kind", [DLGNClassifier, DLGNRegressor])
def test_few_rows_get_less_or_more_than_the_rule(kind):
    """The rule is far too strong for stripes, and too weak where nothing can be learned."""
    X, unseen = rows(2200)[:200], rows(2200)[200:]
    own, rule = {"hidden": (16,), "epochs": 30, "batch_size": None, "learning_rate": 0.1, "random_state": 0}, 2.5
    found, given = (kind(**own, weight_decay=w).fit(X[:, :2], stripes(X)) for w in ("auto", rule))
    assert found.weight_decay_ < rule
    score, before = (model.score(unseen[:, :2], stripes(unseen)) for model in (found, given))
    assert score > before + 0.1
    coin = np.random.default_rng(2).random(len(X)) < 0.5
    assert kind(**own).fit(X, coin).weight_decay_ == 3 * rule


def test_no_number_of_rows_changes_much():
    """The same values are tried at all sizes, on all five folds at first and on fewer as these hold more rows."""
    for kind in (DLGNClassifier, DLGNRegressor):
        found = {n: resolve_recipe(kind(), n, n, 0) for n in (TUNED_FROM, 300, 833, 1000, 2400, ENOUGH, 2600, 10**5)}
        assert [recipe.splits for recipe in found.values()] == [5, 5, 4, 3, 2, 1, 1, 1]
        for recipe in found.values():
            assert recipe.decays == tuple(recipe.weight_decay * share for share in DECAY_FACTORS)
    assert min(DECAY_FACTORS) < 1 < max(DECAY_FACTORS)


@pytest.mark.parametrize("counts", [(7, 1, 92), (20, 30, 50), (100,), (33, 33, 34, 1)])
def test_folds_have_equal_shares_of_the_classes(counts):
    Y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    fold = _folds(Y, len(counts), 0)
    assert np.ptp(np.bincount(fold, minlength=FOLDS)) <= 1
    for k in range(len(counts)):
        assert np.ptp(np.bincount(fold[k == Y], minlength=FOLDS)) <= 1
    assert (fold != _folds(Y, len(counts), 1)).any()


def test_rows_of_early_stopping_have_no_say():
    X = rows(3000)
    Y = stripes(X).astype(int)
    recipe = resolve_recipe(DLGNClassifier(**QUICK, early_stopping=True), ENOUGH, ENOUGH, 0)
    train, seen = (X[:ENOUGH], Y[:ENOUGH], np.ones(ENOUGH)), (X[ENOUGH:], Y[ENOUGH:], np.ones(500))
    turned = (seen[0], 1 - seen[1], seen[2])
    first, second = (fit(*train, 2, recipe, validation) for validation in (seen, turned))
    assert first.weight_decay == second.weight_decay < RULE
    assert first.hard_loss != second.hard_loss


def test_weights_count_in_the_choice():
    X = rows(2 * ENOUGH)
    y = np.where(np.arange(len(X)) % 2, noisy(X), stripes(X))
    of = {
        parity: DLGNClassifier(**QUICK).fit(X, y, np.where(np.arange(len(X)) % 2 == parity, 1.0, 1e-6))
        for parity in (0, 1)
    }
    assert of[1].weight_decay_ >= RULE > of[0].weight_decay_


def test_rows_of_weight_zero_are_absent_and_equal_weights_are_none(chosen):
    X = rows()
    more = np.concatenate([X, X[:100]])
    weights = np.repeat([3.0, 0.0], [len(X), 100])
    weighted = DLGNClassifier(**QUICK).fit(more, np.concatenate([stripes(X), noisy(X[:100])]), weights)
    assert weighted.weight_decay_ == chosen["stripes"].weight_decay_
    np.testing.assert_array_equal(weighted.predict_proba(X), chosen["stripes"].predict_proba(X))


def test_large_batches_and_steps_leave_a_choice():
    X = rows()
    for batch in (None, 2300):  # more than the rows that are trained on, fewer than all
        wild = DLGNRegressor(**QUICK | {"epochs": 2, "learning_rate": 1e2, "batch_size": batch}).fit(X, X[:, 0])
        assert wild.weight_decay_ in [RULE * share for share in DECAY_FACTORS]


def test_files_keep_it(chosen, tmp_path):
    chosen["stripes"].save(tmp_path / "model")
    assert DLGNClassifier.load(tmp_path / "model").weight_decay_ == chosen["stripes"].weight_decay_


def test_a_constant_model_of_pure_noise_is_no_warning():
    """The decay shrinks the network to a constant; warnings are errors here."""
    random = np.random.RandomState(0)
    X, y = random.normal(size=(100, 4)), random.normal(size=100)
    model = DLGNRegressor(random_state=0).fit(X, y)
    assert model.predict(X).std() < 0.1
