"""DLGN estimators: what predicts is what is exported, explained and saved; weights are repetitions; errors."""

from __future__ import annotations

import json
import pickle
import re
import threading
from dataclasses import replace

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import pathlens as pl
from pathlens import DLGNClassifier, DLGNRegressor, PathKernelClassifier, paths
from pathlens.errors import DTypeError, FileFormatError, LabelError, OptionError, RowIndexError, ScaleError, ShapeError
from pathlens.estimators import predict_from_export

# --- one function in all its forms -----------------------------------------------------------------------------


def test_the_export_predicts_the_same_on_every_row(fitted):
    estimator, X = fitted
    found = predict_from_export(estimator.export(), X.to_numpy())
    wanted = estimator.predict(X)
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, wanted)


def test_the_export_reads_the_columns_of_a_table_by_name(fitted):
    estimator, X = fitted
    np.testing.assert_array_equal(
        predict_from_export(estimator.export(), X[X.columns[::-1]].assign(more=1.0)),
        predict_from_export(estimator.export(), X.to_numpy()),
    )


def test_the_network_is_the_same_function_with_hard_gates(fitted):
    estimator, X = fitted
    net = estimator.network()
    x = torch.tensor(X.to_numpy())
    f = estimator.model_.outputs(X.to_numpy())
    np.testing.assert_allclose(net(x).detach().numpy(), f, rtol=0, atol=1e-9 * np.abs(f).max())
    assert net.gate.hard and net.linear_gates
    bits = torch.cat(list(net.gates(x).values()), dim=1).numpy()
    np.testing.assert_array_equal(bits, estimator.transform(X))


def test_rules_in_the_units_of_the_data_are_the_bits_of_transform(fitted):
    estimator, X = fitted
    bits = estimator.transform(X)
    names = list(estimator.get_feature_names_out())
    rules = estimator.rules(terms=None)
    assert len(rules) > 0
    for rule in rules:
        inside = bits[:, names.index(f"gate{rule.layer}_{rule.unit}")]
        np.testing.assert_array_equal(rule(X), inside == 1)
        assert rule.open_share == pytest.approx(inside.mean()) and 0 < rule.open_share < 1
        assert any(str(column) in rule.text for column in X.columns)
    importances = [rule.importance for rule in rules]
    assert importances == sorted(importances, reverse=True)
    assert "rounded to 3 digits" in repr(rules)


def test_a_rounded_rule_is_nearly_the_rule(diabetes, quick):
    """The text, read back as an inequality of the frame's columns, cuts the rows as the half-space does."""
    for far in (0, 300):  # standard deviations: a density or a year varies little around its mean
        X = diabetes[0] + far * diabetes[0].std()
        patients = DLGNRegressor(**quick).fit(X, diabetes[1])
        for rule in patients.rules(digits=3, terms=None):
            left, bound = rule.text.replace("−", "-").replace("- ", "-").replace("+ ", "+").split(" > ")
            total = np.zeros(len(X))
            for term in left.split(" "):
                factor, name = term.split("·")
                total += float(factor) * X[name].to_numpy()
            assert ((total > float(bound)) == rule(X)).mean() > 0.99


def test_importance_is_what_closing_the_gate_changes(patients, diabetes):
    x = diabetes[0].to_numpy()
    model = patients.model_
    for layer, unit in ((0, 2), (1, 4)):
        offsets = [o.copy() for o in model.offsets]
        offsets[layer][unit] = -np.inf
        closed = type(model)(**{**vars(model), "offsets": tuple(offsets)})
        change = np.abs(model.outputs(x) - closed.outputs(x)).sum(1).mean()
        assert model.importances[layer][unit] == pytest.approx(change, rel=1e-9, abs=1e-9)


def test_explanations_are_exact_and_agree_with_paths(fitted):
    estimator, X = fitted
    told = estimator.explain(X[:20])
    f = estimator.model_.outputs(X[:20].to_numpy())
    np.testing.assert_allclose(told.contributions.sum(2) + told.rest, f, rtol=0, atol=1e-12 * np.abs(f).max())
    assert told.relative_error < 1e-12 and (told.cancellations >= 1 - 1e-12).all()
    units = paths.groups(estimator.network(), X[:20].to_numpy(), output=f.shape[1] - 1)
    merged = units.merge(estimator.model_.groups)
    order = np.argsort([int(name) for name in merged.names])
    np.testing.assert_allclose(
        told.contributions[:, -1], merged.contributions.numpy()[:, order], rtol=0, atol=1e-9 * np.abs(f).max()
    )
    assert "cancellation" in repr(told) and "sums are exact" in repr(told)


def test_explanations_by_any_layer_add_up_and_agree_with_paths(fitted):
    estimator, X = fitted
    x, c = X[:20].to_numpy(), estimator.model_.c
    f, net = estimator.model_.outputs(x), estimator.network()
    for layer in range(1, len(estimator.hidden) + 1):
        told = estimator.explain(X[:20], layer=layer)
        assert told.relative_error < 1e-12 and told.layer == layer
        by = paths.groups(net, x, by=layer - 1, output=c - 1)
        np.testing.assert_allclose(told.rest[:, -1], by.rest, rtol=0, atol=1e-9 * np.abs(f).max())
        np.testing.assert_allclose(
            told.contributions[:, -1].sum(1), by.contributions.sum(1), rtol=0, atol=1e-9 * np.abs(f).max()
        )
    features = estimator.explain(X[:20], layer=0)
    assert features.rules == tuple(X.columns) and "  features at their means" in repr(features)
    assert features.relative_error < 1e-12 and features.layer == 0
    means = estimator.model_.outputs(X.to_numpy().mean(0)[None])[0]
    np.testing.assert_allclose(features.rest, np.broadcast_to(means, f.shape), rtol=0, atol=1e-9 * np.abs(f).max())
    for wrong in (-1, len(estimator.hidden) + 1, "gates", 1.0):
        with pytest.raises(OptionError, match="or 0 for features"):
            estimator.explain(X[:1], layer=wrong)


def test_the_class_or_target_to_explain_can_be_asked_for(flowers, pair, iris):
    X, model = iris[0], flowers
    logits = model.decision_function(X)
    for k, label in enumerate(model.classes_):
        told = model.explain(X, of=label)
        assert (told.chosen == k).all() and told.relative_error < 1e-12 and f"logit of {label} = " in repr(told)
        np.testing.assert_allclose(told.outputs[:, k], logits[:, k])
    X, model = X[50:], pair
    first, second = (model.explain(X, layer=0, of=label) for label in model.classes_)
    assert f"log-odds of {model.classes_[0]} = " in repr(first) and first.relative_error < 1e-12
    assert np.array_equal(first.contributions, -second.contributions) and np.array_equal(first.outputs, -second.outputs)
    np.testing.assert_allclose(second.outputs[:, 0], model.decision_function(X))
    with pytest.raises(LabelError, match="explain: no class 'none'; there are"):
        model.explain(X, of="none")
    x = np.random.default_rng(0).standard_normal((40, 2))
    two = DLGNRegressor(hidden=(3,), epochs=2, random_state=0).fit(x, np.stack([x[:, 0], -x[:, 1]], 1))
    assert (two.explain(x, of=1).chosen == 1).all() and "target 1 = " in repr(two.explain(x, of=1))
    with pytest.raises(RowIndexError, match="2 targets"):
        two.explain(x, of=2)


def test_an_explanation_without_conditions_says_where_to_look():
    X = np.random.default_rng(0).standard_normal((40, 2))
    model = DLGNRegressor(hidden=(3, 3), epochs=2, random_state=0).fit(X, X[:, 0])
    everywhere = replace(model.model_, offsets=(model.model_.offsets[0], np.full(3, 1e3)))
    model.model_ = everywhere.measured(X, np.full(40, 1 / 40))
    told = repr(model.explain(X[:2]))
    assert "layer=1 splits it by the half-spaces of the first layer, layer=0 splits it by features" in told
    assert "all other" not in told  # there are none, and rounding is no contribution
    assert "layer=0" not in repr(model.explain(X[:2], layer=0))


def test_the_decision_function_is_what_is_explained(fitted):
    estimator, X = fitted
    if not hasattr(estimator, "classes_"):
        assert not hasattr(estimator, "decision_function")
        return
    f, told = estimator.decision_function(X), estimator.explain(X)
    np.testing.assert_array_equal(f.reshape(len(X), -1), told.outputs)
    assert f.ndim == (1 if len(estimator.classes_) == 2 else 2)


def test_shares_of_importance_do_not_depend_on_how_many_are_shown(flowers):
    few, all_of_them = repr(flowers.rules(top=2)).splitlines(), repr(flowers.rules()).splitlines()
    assert few[2:] == all_of_them[2:4]
    assert sum(r.importance for r in flowers.rules()) == pytest.approx(flowers.rules(top=1).total)


def test_one_group_holds_the_same_training_rows(flowers, iris):
    last = flowers.model_.bits(iris[0].to_numpy())[-1]
    for i, leader in enumerate(flowers.model_.groups):
        np.testing.assert_array_equal(last[:, i], last[:, leader])
    distinct = {column.tobytes() for column in last.T}
    assert len(np.unique(flowers.model_.groups)) == len(distinct)


def test_units_of_the_data_do_not_matter(iris, quick):
    X, y = iris[0].to_numpy(), iris[1]
    a = DLGNClassifier(**quick).fit(X, y)
    b = DLGNClassifier(**quick).fit(X * [1e6, 1e-6, 1, 100] + [0, 5, -1e3, 7], y)
    np.testing.assert_allclose(
        a.predict_proba(X), b.predict_proba(X * [1e6, 1e-6, 1, 100] + [0, 5, -1e3, 7]), atol=1e-6
    )


def test_a_constant_column_has_no_say(iris, quick):
    X, y = iris[0].to_numpy(), iris[1]
    with_constant = np.column_stack([X, np.full(len(X), 0.1)])
    model = DLGNClassifier(**quick).fit(with_constant, y)
    with_constant[:, -1] = 1e6
    np.testing.assert_array_equal(
        model.predict(with_constant), model.predict(np.column_stack([X, np.full(len(X), 0.1)]))
    )


# --- training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [False, True])
def test_weights_are_repetitions(iris, quick, constant):
    X, y = iris[0].to_numpy()[::3], iris[1][::3]
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    weighted = DLGNClassifier(**quick, piecewise_constant=constant).fit(X, y, weights)
    repeated = DLGNClassifier(**quick, piecewise_constant=constant).fit(X.repeat(weights, axis=0), y.repeat(weights))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-8)
    np.testing.assert_array_equal(weighted.transform(X), repeated.transform(X))
    unweighted = DLGNClassifier(**quick, piecewise_constant=constant).fit(X, y)
    assert np.abs(unweighted.predict_proba(X) - weighted.predict_proba(X)).max() > 1e-3


def test_piecewise_constant_networks_are_constant_on_their_cells(diabetes, quick):
    X, y = diabetes[0].to_numpy(), diabetes[1]
    model = DLGNRegressor(**quick, piecewise_constant=True).fit(X, y)
    patterns = model.transform(X)
    _, cell = np.unique(patterns, axis=0, return_inverse=True)
    f = model.predict(X)
    assert max(np.ptp(f[cell == k]) for k in np.unique(cell)) < 1e-9 < np.ptp(f)


def test_random_state_decides_everything(iris, quick):
    first, again, other = (DLGNClassifier(**quick | {"random_state": s}).fit(*iris) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.predict_proba(iris[0]), again.predict_proba(iris[0]))
    assert np.abs(first.predict_proba(iris[0]) - other.predict_proba(iris[0])).max() > 0


def test_random_numbers_of_ones_own_stay(iris, quick):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    model = DLGNClassifier(**quick | {"epochs": 2}).fit(*iris)
    model.network()
    PathKernelClassifier(epochs=2, random_state=0).fit(*iris).predict(iris[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def test_the_best_restart_is_kept(diabetes, quick):
    options = quick | {"random_state": 3, "hardening": "anneal"}
    losses = [DLGNRegressor(**options, n_restarts=k).fit(*diabetes).loss_ for k in (1, 4)]
    assert losses[1] <= losses[0] + 1e-9


def test_early_stopping_holds_rows_out(iris, quick):
    model = DLGNClassifier(**quick | {"epochs": 400}, early_stopping=True, patience=5).fit(*iris)
    assert model.n_iter_ < 440 and model.score(*iris) > 0.8


def test_several_targets(diabetes, quick):
    X, y = diabetes
    two = np.column_stack([y, -2 * y])
    model = DLGNRegressor(**quick).fit(X, two)
    assert model.predict(X).shape == two.shape and model.score(X, two) > 0.3
    np.testing.assert_allclose(predict_from_export(model.export(), X), model.predict(X), atol=1e-6)


def test_gates_that_follow_do_not_learn_noise_by_heart(quick):
    random = np.random.default_rng(0)
    X = random.standard_normal((1200, 4))
    truth = X[:, 0] + X[:, 1] > 0
    noisy = truth ^ (random.random(1200) < 0.25)
    options = quick | {"hidden": (16, 16), "epochs": 100, "weight_decay": 3.0}
    by_kind = {k: DLGNClassifier(**options, hardening=k).fit(X[:200], noisy[:200]) for k in ("follow", "anneal")}
    learned = {k: m.score(X[:200], noisy[:200]) for k, m in by_kind.items()}
    right = {k: m.score(X[200:], truth[200:]) for k, m in by_kind.items()}
    assert learned["follow"] < learned["anneal"] - 0.1 and right["follow"] > right["anneal"] + 0.05


def test_noisy_targets_are_followed_and_all_others_annealed(iris, diabetes, quick):
    X, y = iris
    noisy = np.where(np.random.default_rng(0).random(150) < 0.4, np.roll(y, 50), y)
    slopes = X.to_numpy() @ np.array([1.0, -2.0, 3.0, 0.5])
    cases = [
        (DLGNClassifier, X, y, "anneal"),
        (DLGNClassifier, X, noisy, "follow"),
        (DLGNRegressor, X, slopes, "anneal"),
        (DLGNRegressor, *diabetes, "follow"),
    ]
    for kind, rows, targets, wanted in cases:
        auto, same = (kind(**quick, hardening=h).fit(rows, targets) for h in ("auto", wanted))
        assert auto.hardening_ == same.hardening_ == wanted
        np.testing.assert_array_equal(auto.predict(rows), same.predict(rows))


def test_hard_gates_agree_with_the_soft_network_they_follow(iris, quick):
    X, y = iris[0].to_numpy(), iris[1]
    hard = DLGNClassifier(**quick, hardening="follow").fit(X, y)
    seed = int(np.random.RandomState(quick["random_state"]).randint(2**31 - 1))
    x, labels = torch.tensor((X - X.mean(0)) / X.std(0)), torch.tensor(np.unique(y, return_inverse=True)[1])
    runs = pl.train(
        pl.models.dlgn(4, quick["hidden"], 3, bias=True).double(),
        (x, labels),
        seeds=[seed],
        loss="cross_entropy",
        optimizer="adamw",
        lr=quick["learning_rate"],
        scheduler="cosine",
        weight_decay=quick["weight_decay"],
        epochs=quick["epochs"],
        batch_size=None,
        progress=False,
    )
    p = runs.networks[0](x).softmax(1).detach().numpy()
    assert np.abs(hard.predict_proba(X) - p).mean() < 0.05
    assert hard.soft_loss_ == pytest.approx(-np.log(p[np.arange(150), labels]).mean(), rel=1e-9)
    found = hard.predict_proba(X)[np.arange(150), labels]
    assert hard.loss_ == pytest.approx(-np.log(found).mean(), rel=1e-9)


def test_hard_gates_lose_little_on_the_training_rows(flowers, patients):
    assert flowers.loss_ <= flowers.soft_loss_ + 0.1 and patients.loss_ <= patients.soft_loss_ + 0.1


# --- scikit-learn around it ------------------------------------------------------------------------------------


def test_frames_names_and_strings(flowers, iris):
    X, y = iris
    assert list(flowers.feature_names_in_) == list(X.columns) and flowers.score(X, y) > 0.9
    assert flowers.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    out = clone(flowers).set_output(transform="pandas").fit(X, y).transform(X)
    assert (
        list(out.columns)
        == list(flowers.get_feature_names_out())
        == [f"gate1_{i}" for i in range(8)] + [f"gate2_{i}" for i in range(6)]
    )
    with pytest.raises(ValueError, match="feature names should match"):
        flowers.predict(X[X.columns[::-1]])


def test_bits_feed_another_model(flowers, iris):
    from sklearn.linear_model import LogisticRegression

    assert make_pipeline(clone(flowers), LogisticRegression()).fit(*iris).score(*iris) > 0.8


def test_copies(fitted):
    estimator, X = fitted
    assert clone(estimator).get_params() == estimator.get_params() and not hasattr(clone(estimator), "model_")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).predict(X), estimator.predict(X))


def test_grid_search_in_two_processes_leaves_threads_alone(iris, quick):
    before = torch.get_num_threads()
    search = GridSearchCV(DLGNClassifier(**quick | {"epochs": 10}), {"weight_decay": [0.0, 1.0]}, cv=2, n_jobs=2)
    assert search.fit(*iris).best_score_ > 0.5
    assert torch.get_num_threads() == before


def test_fits_in_threads_equal_fits_alone(iris, quick):
    before, results = torch.get_num_threads(), {}

    def work(seed: int) -> None:
        results[seed] = DLGNClassifier(**quick | {"random_state": seed, "epochs": 20}).fit(*iris).predict_proba(iris[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    together = dict(results)
    for seed in (1, 2):
        work(seed)
        np.testing.assert_array_equal(together[seed], results[seed])
    assert torch.get_num_threads() == before


# --- files -----------------------------------------------------------------------------------------------------


def test_files_give_the_same_estimator_back(fitted, tmp_path):
    estimator, X = fitted
    estimator.save(tmp_path / "model")
    back = type(estimator).load(tmp_path / "model")
    np.testing.assert_array_equal(back.predict(X), estimator.predict(X))
    assert back.get_params() == estimator.get_params() and repr(back.rules()) == repr(estimator.rules())
    assert list(back.feature_names_in_) == list(X.columns)
    if hasattr(estimator, "classes_"):
        assert back.classes_.dtype == estimator.classes_.dtype


def test_arrays_that_joblib_maps_from_disk_serve_as_well(flowers, iris, tmp_path):
    joblib.dump(flowers, tmp_path / "model.joblib")
    mapped = joblib.load(tmp_path / "model.joblib", mmap_mode="r")
    assert not mapped.model_.normals[0].flags.writeable
    mapped.save(tmp_path / "model")
    f = mapped.network()(torch.tensor(iris[0].to_numpy())).detach().numpy()
    np.testing.assert_allclose(f, flowers.decision_function(iris[0]), atol=1e-9)


def test_numbers_of_numpy_are_saved_as_numbers(iris, quick, tmp_path):
    DLGNClassifier(**quick | {"epochs": np.int64(2), "random_state": np.int64(3)}).fit(*iris).save(tmp_path / "m")
    assert DLGNClassifier.load(tmp_path / "m").random_state == 3


@pytest.mark.parametrize("labels", [np.array([0, 1, 2]), np.array([0.5, 1.5, 2.5]), np.array(["a", "b", "c"], object)])
def test_labels_come_back_as_they_were(tmp_path, quick, labels):
    X, y = load_iris(return_X_y=True)
    kinds = labels[y] if labels.dtype.kind != "f" else np.array(["low", "mid", "high"])[y]
    DLGNClassifier(**quick | {"epochs": 3}).fit(X, kinds).save(tmp_path / "m")
    back = DLGNClassifier.load(tmp_path / "m")
    assert back.classes_.dtype == np.unique(kinds).dtype and set(back.predict(X)) <= set(kinds)


def test_changed_files_are_refused(flowers, tmp_path):
    flowers.save(tmp_path / "model")
    with pytest.raises(FileFormatError, match="holds a DLGNClassifier"):
        DLGNRegressor.load(tmp_path / "model")
    header = tmp_path / "model.json"
    text = header.read_text()
    header.write_text(text.replace("setosa", "sunflower"))
    with pytest.raises(FileFormatError, match="edited or damaged"):
        DLGNClassifier.load(tmp_path / "model")
    header.write_text(text)
    tensors = tmp_path / "model.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-3] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(FileFormatError, match="checksum"):
        DLGNClassifier.load(tmp_path / "model")
    assert json.loads(text)["format"] == "pathlens.estimator"


def test_what_a_file_cannot_hold_is_said(iris, tmp_path, quick):
    model = DLGNClassifier(**quick | {"random_state": np.random.RandomState(0), "epochs": 2}).fit(*iris)
    with pytest.raises(OptionError, match="Use an int"):
        model.save(tmp_path / "model")


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": ()}, "hidden must be"),
        ({"hidden": 8}, "hidden must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"batch_size": "big"}, "batch_size must be"),
        ({"learning_rate": -1}, "learning_rate must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"beta": (1000, 4)}, "beta must be"),
        ({"hardening": "slowly"}, "hardening must be"),
        ({"n_restarts": 1.5}, "n_restarts must be"),
        ({"patience": 0}, "patience must be"),
        ({"early_stopping": True, "validation_fraction": 1}, "validation_fraction must be"),
    ],
)
def test_wrong_parameters_are_named_in_fit(iris, change, said):
    with pytest.raises(OptionError, match=said):
        DLGNClassifier(**change).fit(*iris)


def test_errors_that_users_expect(flowers, iris, quick):
    X, y = iris[0].to_numpy(), iris[1]
    spoilt = X.copy()
    spoilt[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        DLGNClassifier(**quick).fit(spoilt, y)
    with pytest.raises(ValueError, match="3 features, but DLGNClassifier is expecting 4"), pytest.warns(UserWarning):
        flowers.predict(X[:, :3])
    with pytest.raises(LabelError, match="one class, 'rose'"):
        DLGNClassifier(**quick).fit(X, np.full(len(X), "rose"))
    with pytest.raises(ValueError, match=r"(?i)negative"):
        DLGNClassifier(**quick).fit(X, y, -np.ones(len(y)))
    with pytest.raises(ShapeError, match=r"Rule: expected rows of 4 features, got shape \(150, 3\)"):
        flowers.rules()[0](X[:, :3])
    # as predict: it would read them in the wrong order
    with pytest.raises(ShapeError, match="differ from those of the fit"):
        flowers.rules()[0](iris[0][iris[0].columns[::-1]])
    with pytest.raises(ShapeError, match="differ from those of the fit"):
        flowers.rules()[0](iris[0].iloc[0][iris[0].columns[::-1]])
    assert flowers.rules()[0](iris[0].iloc[0]) == flowers.rules()[0](iris[0])[0]
    for option in ("digits", "terms", "top"):
        for wrong in (0, 2.5):
            with pytest.raises(OptionError, match=f"rules: {option} must be an integer of at least 1, got {wrong}"):
                flowers.rules(**{option: wrong})
    with pytest.raises(OptionError, match="k must be an integer"):
        flowers.explain(iris[0][:1]).top(0, -1)
    for use in (DLGNClassifier().transform, DLGNClassifier().predict, DLGNClassifier().explain):
        with pytest.raises(NotFittedError):
            use(X)


@pytest.mark.parametrize("kind", [DLGNClassifier, DLGNRegressor, PathKernelClassifier])
def test_tables_that_must_be_encoded_are_told_how(kind):
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame({"age": range(8), "city": ["Oslo", "Rome"] * 4, "seen": pandas.date_range("2020", periods=8)})
    for columns, named in ((["age", "city"], ": 'city'\\."), (["seen", "age", "city"], ": 'city', 'seen'\\.")):
        with pytest.raises(DTypeError, match=f"{kind.__name__}: columns .* not numeric{named} Encode them"):
            kind().fit(X[sorted(columns)], [0, 1] * 4)
    model = kind(hidden=(3,), epochs=2).fit(X[["age"]], [0, 1] * 4)
    with pytest.raises(DTypeError, match=r"X is a sparse matrix, .* OneHotEncoder\(sparse_output=False\)"):
        make_pipeline(OneHotEncoder(), kind()).fit(X[["city"]], [0, 1] * 4)
    with pytest.raises(DTypeError, match=": 'age'"):
        model.predict(X[["city"]].rename(columns={"city": "age"}))
    with pytest.raises(ValueError, match="Input X contains NaN"):  # numbers that are missing are said to be
        kind().fit(X[["age"]].astype(float).replace(3.0, np.nan), [0, 1] * 4)


@pytest.mark.parametrize("kind", [DLGNClassifier, DLGNRegressor, PathKernelClassifier])
def test_text_and_categories_are_not_read_as_numbers(kind):
    pandas = pytest.importorskip("pandas")
    codes = pandas.Series(["1", "2", "3", "4"] * 3)
    y = [0, 1] * 6
    model = kind(hidden=(3,), epochs=2, random_state=0)
    for column in (codes, codes.astype(object), codes.astype("string"), codes.astype(int).astype("category")):
        X = pandas.DataFrame({"age": np.arange(12.0), "code": column})
        with pytest.raises(DTypeError, match=r"not numeric: 'code'\. Encode .* If 'code' .* astype\(float\)"):
            model.fit(X, y)
        model.fit(X.astype(float), y)
        with pytest.raises(DTypeError, match="not numeric: 'code'"):
            model.predict(X)
    text = X.astype(str).to_numpy(dtype=object)
    for rows in (text, text.astype(str), text.tolist()):
        with pytest.raises(DTypeError, match="X holds text, expected numbers"):
            model.fit(rows, y)
    model.fit(X.astype(float).astype(object), y)  # objects may be numbers
    if kind is DLGNRegressor:
        with pytest.raises(DTypeError, match="y holds text, expected numbers"):
            model.fit(np.eye(12), codes)


@pytest.mark.parametrize("name", ["flowers", "pair", "patients"])
@pytest.mark.parametrize("value", [1e308, -1e308, 1e150])
def test_numbers_that_overflow_are_named(request, iris, diabetes, name, value):
    X = (diabetes if name == "patients" else iris)[0].astype(float).copy()
    model, column = request.getfixturevalue(name), X.columns[2]
    X.iloc[3, 2] = value
    answer = model.predict if name == "patients" else model.predict_proba
    for use in (answer, model.predict, model.transform, model.explain):
        with pytest.raises(ScaleError, match=rf"column {re.escape(repr(column))} holds .* in row 3 \(counted from 0\)"):
            use(X)
    X.iloc[3, 2] = model.model_.centre[2] + np.copysign(1e99, value) * model.model_.spread[2]
    assert np.isfinite(answer(X)).all()  # what is nearer is answered


def test_numbers_that_cannot_be_fitted_are_named(iris, quick):
    X, y = iris[0].copy(), iris[1]
    target = X.iloc[:, 0].to_numpy() * 1e200
    X.iloc[5, 1] = 1e308
    with pytest.raises(ScaleError, match=r"column 'sepal width \(cm\)' holds 1e\+308 in row 5"):
        DLGNClassifier(**quick).fit(X, y)
    with pytest.raises(ScaleError, match="y: column 0 holds"):
        DLGNRegressor(**quick).fit(iris[0], target)
    X.iloc[:, 1] = np.arange(150) * 5e-324  # too small to be divided by
    assert np.isfinite(DLGNClassifier(**quick).fit(X, y).predict_proba(X)).all()


# --- pictures --------------------------------------------------------------------------------------------------


def test_pictures(fitted, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    estimator, X = fitted
    axes = estimator.plot_halfspaces(top=6)
    assert len(axes.get_yticklabels()) == min(6, len(estimator.rules()))
    bars = estimator.plot_explanation(X[:1])
    told = estimator.explain(X[:1])
    drawn = sum(bar.get_width() for bar in bars.patches)
    assert drawn == pytest.approx(float(told.outputs[0, told.chosen[0]]), rel=1e-9, abs=1e-9)
    plt.close("all")
    for look in (told.plot, told.top):
        with pytest.raises(RowIndexError, match="index 99 is out of range for 1 rows"):
            look(99)
    assert not plt.get_fignums()  # nothing was begun


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 2)])
def test_the_export_predicts_in_the_shape_of_the_targets(shape):
    X, y = np.random.default_rng(0).standard_normal((20, 2)), np.random.default_rng(1).standard_normal(shape)
    model = DLGNRegressor(hidden=(3,), epochs=2, random_state=0).fit(X, y)
    assert predict_from_export(model.export(), X).shape == model.predict(X).shape == shape


def test_a_model_without_rules_is_drawn():
    pytest.importorskip("matplotlib").use("Agg")
    model = DLGNClassifier(hidden=(3,), epochs=2, random_state=0).fit(np.ones((6, 2)), [0, 1] * 3)
    assert len(model.rules()) == 0
    assert "no half-space" in model.plot_halfspaces().get_title()


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])
def test_columns_of_any_size_tell_the_same(iris, quick, scale):
    X, y = iris
    model = DLGNClassifier(**quick).fit(X, y)
    np.testing.assert_array_equal(DLGNClassifier(**quick).fit(X * scale, y).predict(X * scale), model.predict(X))
    target = X.iloc[:, 0].to_numpy()
    sized = DLGNRegressor(**quick).fit(X, target * scale).predict(X)
    np.testing.assert_allclose(sized, DLGNRegressor(**quick).fit(X, target).predict(X) * scale, rtol=1e-12)


def test_refactoring_does_not_change_fits():
    """Outputs of two short fits, stored."""
    X, y = load_iris(return_X_y=True)
    options = {"hidden": (4, 3), "epochs": 4, "weight_decay": 1.0, "random_state": 0}
    classifier = DLGNClassifier(**options, hardening="follow", n_restarts=2).fit(X, y)
    wanted = [
        [0.047711554, -0.172913937, 0.125202382],
        [0.082804331, -0.127750084, 0.044945753],
        [-0.052613777, -0.130612221, 0.183225998],
    ]
    np.testing.assert_allclose(classifier.decision_function(X[::60]), wanted, rtol=1e-6)
    regressor = DLGNRegressor(**options).fit(X[:, :3], X[:, 3])
    np.testing.assert_allclose(regressor.predict(X[::60, :3]), [1.183421988, 1.253200169, 1.253200169], rtol=1e-6)
