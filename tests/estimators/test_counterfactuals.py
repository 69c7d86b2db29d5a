"""The nearest row with another prediction: against all cells one by one, and against random rows."""

import re
import time
from dataclasses import replace
from html import unescape
from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.exceptions import NotFittedError

from pathlens import DLGNClassifier, DLGNRegressor
from pathlens.errors import LabelError, OptionError, RegionError, ShapeError, UnknownNameError
from pathlens.estimators.report import NearestChange
from pathlens.regions import HalfSpaceModel, counterfactuals
from pathlens.regions.counterfactuals import Counterfactual, FeasibleSet, Goal, Search, counterfactual, find_nearest


def random_model(seed, d, hidden, c=1, spread=1.0, constant=False):
    rng = np.random.default_rng(seed)
    widths = [d, *hidden, c]
    normals = [rng.normal(size=(w, d)) for w in hidden]
    offsets = [rng.normal(size=w) for w in hidden]
    weights = [rng.normal(size=(b, a)) for a, b in pairwise(widths)]
    biases = [rng.normal(size=w) for w in widths[1:]]
    if constant:
        weights[0] *= 0
    zero = tuple(np.zeros(w) for w in hidden)
    return HalfSpaceModel(
        tuple(normals),
        tuple(offsets),
        tuple(weights),
        tuple(biases),
        zero,
        zero,
        np.arange(hidden[-1]),
        np.full(d, spread) * rng.uniform(0.5, 2, d),
        np.zeros(d),
    )


def flip(model, row):
    """The other sign of a model's one output."""
    return Goal(-np.sign(model.outputs(row[None])), np.zeros(1))


def by_all_cells(model, row, signs, lowest, highest, whole=(), group=()):
    """The least distance over every pattern of gates, each a linear program of its own; inf where there is none."""
    integers = np.isin(np.arange(2 * model.d), whole).astype(int)
    sums = np.isin(np.arange(2 * model.d), group)[None].astype(float)
    best, d = np.inf, model.d
    for flat in product([False, True], repeat=sum(model.hidden)):
        bits = np.split(np.array(flat), np.cumsum(model.hidden)[:-1])
        slope, value, left, right = np.eye(d), np.zeros(d), [], []
        for b, normal, offset, weight, bias in zip(bits, model.normals, model.offsets, model.weights, model.biases):
            slope, value = weight @ slope * b[:, None], (weight @ value + bias) * b
            side = np.where(b, -1.0, 1.0)
            left.append(side[:, None] * normal)
            right.append(-side * offset - 1e-7)
        slope, value = model.weights[-1] @ slope, model.weights[-1] @ value + model.biases[-1]
        left.append(-np.atleast_2d(signs) @ slope)
        right.append(np.atleast_2d(signs) @ value - 1e-7)
        A, b = np.concatenate(left), np.concatenate(right)
        # variables: x, and the sizes of its changes
        sizes = np.diag(1 / model.spread)
        A = np.block([[A, np.zeros_like(A)], [sizes, -np.eye(d)], [-sizes, -np.eye(d)]])
        b = np.concatenate([b, row / model.spread, -row / model.spread])
        bounds = [*zip(lowest, highest), *[(0, None)] * d]
        solved = linprog(np.repeat([0.0, 1.0], d), A, b, sums, [row[list(group)].sum()], bounds, integrality=integers)
        if solved.status == 0:
            best = min(best, solved.fun)
    return best


def found_and_proved(search, wanted):
    """The least distance is found and proved to be that, or that there is none; whether there is a point."""
    if np.isinf(wanted):
        assert search.found is None and search.at_least >= search.farthest
        return False
    assert search.distance == pytest.approx(wanted, rel=2e-4, abs=1e-5)
    assert search.at_least <= wanted + 1e-5
    assert search.at_least == pytest.approx(search.distance, rel=2e-4, abs=1e-5)
    return True


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([(3,), (2, 3), (2, 2, 2)]), st.booleans(), st.booleans()
)
def test_it_is_the_nearest_of_all_cells(seed, d, hidden, constant, starts):
    model = random_model(seed, d, hidden, constant=constant)
    rng = np.random.default_rng(seed + 1)
    row, rows = rng.normal(size=d), rng.normal(size=(30, d)) * 2
    sign = -np.sign(model.outputs(row[None])[0, 0])
    lowest, highest = np.minimum(rows.min(0), row), np.maximum(rows.max(0), row)
    wanted = by_all_cells(model, row, sign, lowest, highest)
    search = Search(
        model, row, Goal(np.array([[sign]]), np.zeros(1)), FeasibleSet.of(row, model.spread, rows, [], None)
    )
    find_nearest(search, rows if starts else None, 60.0)
    if not found_and_proved(search, wanted):
        return
    point = search.point(search.found)
    assert sign * model.outputs(point[None])[0, 0] > 0
    assert (point >= lowest).all() and (point <= highest).all()
    assert np.abs((point - row) / model.spread).sum() == pytest.approx(search.distance, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(3,), (2, 3)]), st.booleans())
def test_whole_numbers_and_categories_stay_what_they_are(seed, hidden, starts):
    model = random_model(seed, 5, hidden)
    rng = np.random.default_rng(seed + 1)
    rows = np.column_stack([rng.normal(size=40) * 2, rng.integers(-3, 4, 40), np.eye(3)[rng.integers(0, 3, 40)]])
    row = rows[0]
    sign = -np.sign(model.outputs(row[None])[0, 0])
    allowed = FeasibleSet.of(row, model.spread, rows, [], None)
    assert allowed.whole.tolist() == [False, True, True, True, True]
    assert [group.tolist() for group in allowed.groups] == [[2, 3, 4]]
    wanted = by_all_cells(model, row, sign, rows.min(0), rows.max(0), whole=(1, 2, 3, 4), group=(2, 3, 4))
    search = Search(model, row, Goal(np.array([[sign]]), np.zeros(1)), allowed)
    find_nearest(search, rows if starts else None, 60.0)
    if not found_and_proved(search, wanted):
        return
    point = search.point(search.found)
    assert sign * model.outputs(point[None])[0, 0] > 0
    assert np.array_equal(point[1:], np.round(point[1:])) and sorted(point[2:]) == [0, 0, 1]


def test_categories_stay_what_they_are_whatever_else_is_whole_and_where_x_has_none():
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(-3, 4, 40), np.eye(3)[rng.integers(0, 3, 40)]]).astype(float)
    unknown = np.array([1.0, 0, 0, 0])
    for row, whole in ((rows[0], [0]), (rows[0], []), (unknown, None)):
        allowed = FeasibleSet.of(row, np.ones(4), rows, [], whole)
        assert [group.tolist() for group in allowed.groups] == [[1, 2, 3]]
        assert allowed.whole.tolist() == [whole != [], True, True, True]
        model = random_model(2, 4, (3,))
        sign = -np.sign(model.outputs(row[None])[0, 0])
        search = Search(model, row, Goal(np.array([[sign]]), np.zeros(1)), allowed)
        find_nearest(search, rows, 20.0)
        wanted = by_all_cells(
            model, row, sign, allowed.lowest, allowed.highest, np.flatnonzero(allowed.whole), (1, 2, 3)
        )
        assert found_and_proved(search, wanted)
        assert sorted(search.point(search.found)[1:]) == sorted(row[1:])


def test_a_rare_category_is_as_far_as_it_is():
    """Its column's standard deviation is tiny: all that `within` allows is looked at, however many of them it takes."""
    rows = np.zeros((40_000, 2))
    rows[:, 0], rows[7, 1] = np.linspace(-1, 1, 40_000), 1
    one, zero = np.ones((1, 1)), (np.zeros(1),)
    model = HalfSpaceModel(
        (np.array([[0.0, 1.0]]),),
        (np.array([-0.5]),),
        (np.array([[0.1, 2.0]]), one),
        zero * 2,
        zero,
        zero,
        np.zeros(1, int),
        rows.std(0),
        rows.mean(0),
    )
    goal, far = Goal(one, np.array([1.5])), 1 / rows[:, 1].std()
    point, distance, at_least, _ = counterfactual(model, rows[0], goal, "high", rows, [], None, 20.0)
    assert point.tolist() == [-1, 1]  # nothing else changes
    assert distance == pytest.approx(far) and at_least == pytest.approx(far, rel=2e-4)
    with pytest.raises(RegionError, match="within the ranges of `within` no row"):
        counterfactual(model, rows[0], Goal(one, np.array([2.5])), "high", rows, [], None, 20.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(3,), (2, 3)]), st.booleans(), st.booleans())
def test_of_several_classes_it_is_the_nearest_of_one_or_of_any(seed, hidden, any_of, starts):
    model = random_model(seed, 3, hidden, c=4)
    rng = np.random.default_rng(seed + 1)
    row, rows = rng.normal(size=3), rng.normal(size=(30, 3)) * 2
    now, eye = int(model.outputs(row[None])[0].argmax()), np.eye(4)
    box = np.minimum(rows.min(0), row), np.maximum(rows.max(0), row)
    each = [by_all_cells(model, row, np.delete(eye[k] - eye, k, axis=0), *box) for k in range(4) if k != now]
    other = (now + 1) % 4
    goal = Goal(np.delete(eye - eye[now], now, axis=0), np.zeros(3), any_of=True)
    if not any_of:
        goal = Goal(np.delete(eye[other] - eye, other, axis=0), np.zeros(3))
    wanted = min(each) if any_of else each[[k for k in range(4) if k != now].index(other)]
    search = Search(model, row, goal, FeasibleSet.of(row, model.spread, rows, [], None))
    find_nearest(search, rows if starts else None, 60.0)
    if not found_and_proved(search, wanted):
        return
    answer = model.outputs(search.point(search.found)[None])[0].argmax()
    assert answer != now and (any_of or answer == other)


@pytest.fixture(scope="module")
def cancer():
    table = load_breast_cancer(as_frame=True)
    X, y = table.data, table.target_names[table.target]
    return X, DLGNClassifier(hidden=(16, 16), epochs=20, random_state=0).fit(X, y)


@pytest.fixture(scope="module")
def flowers():
    iris = load_iris(as_frame=True)
    return iris.data, DLGNClassifier(hidden=(8,), epochs=100, random_state=0).fit(iris.data, iris.target)


def test_nothing_nearer_than_proved_has_the_other_class(cancer):
    X, model = cancer
    row = X.iloc[[20]]
    told = model.counterfactual(row, within=X, seconds=20)
    assert told.before == model.predict(row)[0] != told.after
    assert model.predict(pd.DataFrame([told.point], columns=X.columns))[0] == told.after
    assert 0 < told.at_least <= told.distance
    rng = np.random.default_rng(0)
    change = rng.exponential(size=(100_000, X.shape[1])) * rng.choice([-1, 0, 0, 0, 1], (100_000, X.shape[1]))
    change[:50_000] *= (told.point - row.to_numpy()[0]) != 0  # along the features that matter
    change *= (told.at_least * rng.uniform(0, 1, 100_000) / np.maximum(np.abs(change).sum(1), 1e-9))[:, None]
    points = row.to_numpy() + change * model.model_.spread
    inside = ((points >= X.min().to_numpy()) & (points <= X.max().to_numpy())).all(1)
    assert inside.sum() > 1000
    assert (model.predict(pd.DataFrame(points[inside], columns=X.columns)) == told.before).all()


def test_features_that_are_kept_or_at_the_end_of_their_range_stay(cancer):
    X, model = cancer
    row = X.iloc[[20]]
    free = model.counterfactual(row, within=X)
    first = next(iter(free.changes))
    other = model.counterfactual(row, within=X, keep=[first, 0])
    assert not {first, X.columns[0]} & set(other.changes)
    same = [j for j, name in enumerate(X.columns) if name not in other.changes]
    assert np.array_equal(other.point[same], row.to_numpy()[0][same])
    assert other.distance >= free.at_least - 1e-6
    assert (other.point >= X.min().to_numpy()).all() and (other.point <= X.max().to_numpy()).all()


def test_any_other_class_is_the_nearest_of_the_others(flowers):
    X, model = flowers
    one = [model.counterfactual(X[50:51], k, within=X) for k in (0, 2)]
    assert [told.after for told in one] == [0, 2] and all(told.nearest for told in one)
    either = model.counterfactual(X[50:51], within=X)
    assert either.nearest and either.distance == pytest.approx(min(told.distance for told in one), rel=2e-4)


def test_rows_are_taken_as_lists_and_as_rows_of_a_table(flowers):
    X, model = flowers
    told = model.counterfactual(X.iloc[50], 2, within=X)
    assert told.distance == model.counterfactual(X[50:51], 2, within=X).distance
    plain = DLGNClassifier(hidden=(8,), epochs=100, random_state=0).fit(X.to_numpy(), [0] * 50 + [1] * 50 + [2] * 50)
    assert plain.counterfactual(X.to_numpy()[50].tolist(), 2, within=X.to_numpy()).after == 2
    with pytest.raises(ShapeError, match="expected one row, got 2"):
        plain.counterfactual(X.to_numpy()[:2])
    assert model.plot_explanation(X.iloc[50]).get_title()


def test_it_prints_what_changes_and_what_is_proved(flowers):
    X, model = flowers
    told = model.counterfactual(X[50:51], 2, within=X)
    lines = repr(told).splitlines()
    assert lines[0].startswith(f"1 becomes 2 with {len(told.changes)} of 4 features changed; distance ")
    assert lines[0].endswith("standard deviations, none is nearer")
    name, (old, new) = next(iter(told.changes.items()))
    assert lines[1].split() == [*name.split(), f"{old:.6g}", "→", f"{new:.6g}"]
    ax = told.plot()
    assert ax.get_title() == "1 becomes 2" and len(ax.patches) == len(told.changes)
    top = ax.patches[-1].get_width()
    assert abs(top) == max(abs(bar.get_width()) for bar in ax.patches)
    assert sum(abs(bar.get_width()) for bar in ax.patches) == pytest.approx(told.distance)


# --- values that are typed in as printed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wine():
    table = load_wine(as_frame=True)
    X, y = table.data, table.target_names[table.target]
    return X, DLGNClassifier(hidden=(8,), epochs=30, weight_decay=1.0, random_state=0).fit(X, y)


def typed_in(row, values):
    """The row with values that were read as text."""
    return row.assign(**{name: float(text) for name, text in values.items()})


def from_repr(text):
    lines = (re.fullmatch(r"  (.*?) +(\S+) → (\S+)", line) for line in text.splitlines()[1:])
    return {line[1]: line[3] for line in lines}


def from_page(html):
    return {
        unescape(name): new
        for name, _, new in re.findall("<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", html)
    }


@pytest.mark.parametrize("table", ["cancer", "wine"])
def test_what_is_printed_has_the_other_class(table, request, tmp_path):
    X, model = request.getfixturevalue(table)
    rows = np.linspace(0, len(X) - 1, 20).astype(int)
    for row in (X.iloc[[i]] for i in rows):
        other = model.counterfactual(row, within=X, seconds=0.1)
        reported = {name: new for name, _, new in NearestChange.of(other).rows}
        for texts in (from_repr(repr(other)), reported):
            assert list(texts) == list(other.changes)
            assert model.predict(typed_in(row, texts))[0] == other.after != other.before
            np.testing.assert_array_equal(typed_in(row, texts).to_numpy()[0], other.point)
        assert other.at_least <= other.unrounded <= other.distance <= other.unrounded * 1.001
        assert other.distance == pytest.approx(np.abs((other.point - row.to_numpy()[0]) / model.model_.spread).sum())
    several = X.iloc[rows]
    path = model.report(several, model.predict(several), tmp_path, within=X, seconds=0.1)
    articles = path.read_text(encoding="utf-8").split("<article>")[1:]
    assert len(articles) > 1
    for article in articles:
        row = several.loc[[int(re.search(r"Row (\d+): predicted <b>", article)[1])]]
        changed = typed_in(row, from_page(article.partition("Smallest change that gives another prediction")[2]))
        assert model.predict(changed)[0] != model.predict(row)[0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(3,), (2, 3)]), st.booleans())
def test_rounded_rows_stay_what_rows_may_be(seed, hidden, constant):
    """In their ranges, whole, of one category; features that were not changed keep their bits."""
    model = random_model(seed, 6, hidden, constant=constant)
    rng = np.random.default_rng(seed + 1)
    rows = np.column_stack([rng.normal(size=(40, 2)) * 2, rng.integers(-3, 4, 40), np.eye(3)[rng.integers(0, 3, 40)]])
    row, kept = rows[0], int(rng.integers(0, 3))
    allowed = FeasibleSet.of(row, model.spread, rows, [kept], None)
    search = Search(model, row, flip(model, row), allowed)
    find_nearest(search, rows, 60.0)
    if search.found is None:
        return
    point, distance = search.rounded(np.inf)
    assert search.goal.margin(model.outputs(point[None]))[0] > 0
    assert (point >= rows.min(0)).all() and (point <= rows.max(0)).all()
    assert point[kept] == row[kept] and point[2] == np.round(point[2]) and sorted(point[3:]) == [0, 0, 1]
    same = search.point(search.found) == row
    assert np.array_equal(point[same], row[same])
    assert search.at_least - 1e-5 <= distance <= search.distance * 1.001
    ends = (point == rows.min(0)) | (point == rows.max(0))  # as long as they are in the data
    assert all(len(str(value)) <= 9 for value in point[:2][~(same | ends)[:2]])


def test_a_corner_that_rounding_away_from_the_row_would_leave():
    """a + b > 1 and a < b + 0.20000037: more of both crosses the wall, so that a point deeper inside is rounded."""
    one, zero = np.ones((1, 1)), (np.zeros(1),)
    model = HalfSpaceModel(
        (np.array([[-1.0, 1.0]]),),
        (np.array([0.20000037]),),
        (np.ones((1, 2)), one),
        (np.zeros(1), -np.ones(1)),
        zero,
        zero,
        np.zeros(1, int),
        np.array([1.5, 1.0]),
        np.zeros(2),
    )
    goal, box = Goal(one, np.zeros(1)), np.array([[-2.0, -2.0], [2.5, 2.5], [0.25, -0.75]])
    row = np.zeros(2)
    point, distance, at_least, unrounded = counterfactual(model, row, goal, "high", box, [], None, 20.0)
    a, b = 0.600000185, 0.399999815
    assert unrounded == pytest.approx(a / 1.5 + b, abs=1e-5) and at_least == pytest.approx(unrounded, rel=2e-4)
    assert unrounded < distance <= unrounded * 1.001
    assert point.sum() > 1 and point[0] - point[1] < 0.20000037
    assert all(len(str(value)) <= 6 for value in point)


def test_values_are_printed_in_full_and_differ_from_those_before():
    before, after = np.array([2020.3712, 1 / 3, 1e6]), np.array([2020.37, -0.125, 1234567.5])
    plain = Counterfactual(before, after, 0, 1, 2.0, 1.0, 2.0, ("year", "share", "count"), np.ones(3))
    assert plain.printed == {
        "count": ("1e+06", "1234567.5"),
        "share": ("0.333333", "-0.125"),
        "year": ("2020.371", "2020.37"),
    }
    assert "(" not in repr(plain) and "none is nearer than 1\n" in repr(plain)
    rounded = replace(plain, distance=2.001, at_least=2.0)
    assert rounded.nearest and "distance 2 (0.001 by rounding) standard deviations, none is nearer\n" in repr(rounded)


def test_a_margin_is_how_far_beyond_the_boundary(cancer, flowers):
    X, model = cancer
    row = X.iloc[[20]]
    near, far = (model.counterfactual(row, within=X, seconds=2, margin=margin) for margin in (0, 2.2))
    sure = model.predict_proba(pd.DataFrame([near.point, far.point], columns=X.columns)).max(1)
    assert sure[0] < 0.6 and 1 / (1 + np.exp(-2.2)) <= sure[1] < 0.93
    assert far.distance > near.distance and far.at_least >= near.at_least - 1e-6
    X, model = flowers
    asked = model.counterfactual(X[50:51], 2, within=X, margin=1.5)
    f = np.sort(model.decision_function(pd.DataFrame([asked.point], columns=X.columns))[0])
    assert asked.after == 2 and f[-1] - f[-2] >= 1.5
    either = model.counterfactual(X[50:51], within=X, margin=1.5)
    f = model.decision_function(pd.DataFrame([either.point], columns=X.columns))[0]
    assert either.after != 1 and f.max() - f[1] >= 1.5 and either.distance <= asked.distance * 1.001
    with pytest.raises(RegionError, match="no row is predicted 2 with a margin of 1000"):
        model.counterfactual(X[50:51], 2, within=X, margin=1000)
    for wrong in (-1, np.nan, np.inf, "1"):
        with pytest.raises(OptionError, match="margin must be a finite number of at least 0"):
            model.counterfactual(X[50:51], margin=wrong)


def test_out_of_time_it_tells_what_it_has_and_what_is_proved():
    model = random_model(3, 12, (60, 60))
    row = np.zeros(12)
    sign = -np.sign(model.outputs(row[None])[0, 0])
    rows = np.random.default_rng(0).normal(size=(200, 12)) * 3
    point, distance, at_least, unrounded = counterfactual(
        model, row, Goal(np.array([[sign]]), np.zeros(1)), "other", rows, [], None, 0.2
    )
    assert sign * model.outputs(point[None])[0, 0] > 0
    assert 0 <= at_least <= unrounded <= distance


@pytest.mark.parametrize("d, hidden, whole", [(64, (64,), True), (784, (128,) * 4, False)], ids=["whole", "wide"])
def test_it_stops_in_time_whatever_takes_long(d, hidden, whole):
    """One cell of whole numbers is a program that takes minutes, and many features have many points to start from."""
    model = random_model(0, d, hidden, spread=4.0)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 17, (300, d)).astype(float) if whole else 4 * rng.normal(size=(300, d))
    search = Search(model, rows[0], flip(model, rows[0]), FeasibleSet.of(rows[0], model.spread, rows, [], None))
    assert len(search.whole) == (d if whole else 0)
    begun = time.monotonic()
    find_nearest(search, rows, 0.4)
    assert time.monotonic() - begun < 2.0  # seconds more are left to a busy machine
    assert search.found is not None and 0 <= search.at_least <= search.distance


def test_a_cell_that_the_solver_gives_up_is_not_taken_for_empty(monkeypatch):
    model = random_model(5, 3, (3,))
    row, rows = np.zeros(3), np.random.default_rng(0).normal(size=(30, 3)) * 2
    sign = -np.sign(model.outputs(row[None])[0, 0])
    wanted = by_all_cells(model, row, sign, rows.min(0), rows.max(0))
    assert np.isfinite(wanted)
    gave_up = type("Solved", (), {"status": 4, "x": None})
    monkeypatch.setattr(counterfactuals, "linprog", lambda *a, **k: gave_up)
    search = Search(
        model, row, Goal(np.array([[sign]]), np.zeros(1)), FeasibleSet.of(row, model.spread, rows, [], None)
    )
    find_nearest(search, None, 20.0)
    assert search.at_least <= wanted + 1e-5


def test_a_regression_reaches_a_value_from_either_side():
    X = np.random.default_rng(0).uniform(-1, 1, (300, 3))
    y = 3 * np.abs(X[:, 0]) + X[:, 1]
    hat = DLGNRegressor(hidden=(8, 8), epochs=60, random_state=0).fit(X, y)
    at = hat.predict(X[:1])[0]
    up = hat.counterfactual(X[0], at_least=at + 0.5, within=X)
    down = hat.counterfactual(X[0], at_most=at - 0.5, within=X)
    assert up.nearest and up.after >= at + 0.5 and up.before == at == down.before
    assert down.nearest and down.after <= at - 0.5
    with pytest.raises(OptionError, match="which is already at most"):
        hat.counterfactual(X[0], at_most=at + 1)
    farther = hat.counterfactual(X[0], at_least=at + 0.25, within=X, margin=0.25)
    assert farther.after >= at + 0.5 and farther.distance == pytest.approx(up.distance)
    assert hat.counterfactual(X[0], at_most=at - 0.25, within=X, margin=0.25).after <= at - 0.5
    typed = X[:1].copy()
    for name, text in from_repr(repr(up)).items():
        typed[0, int(name[1:])] = float(text)
    assert hat.predict(typed)[0] == up.after
    assert repr(up).startswith(f"{up.before:.6g} becomes {up.after:.6g} with")
    with pytest.raises(RegionError, match=r"within the ranges of `within` no row is predicted at least 1e\+06"):
        hat.counterfactual(X[0], at_least=1e6, within=X)
    for wrong in ({}, {"at_least": 1, "at_most": 2}, {"at_least": np.nan}, {"at_most": "3"}):
        with pytest.raises(OptionError, match="at_least"):
            hat.counterfactual(X[0], **wrong)
    two = DLGNRegressor(hidden=(4,), epochs=5, random_state=0).fit(X, np.stack([y, -y], 1))
    with pytest.raises(OptionError, match="2 targets"):
        two.counterfactual(X[0], at_least=1.0)


def test_what_cannot_be_asked_is_said(flowers):
    X, model = flowers
    row = X[50:51]
    for error, match, given_ in (
        (LabelError, "no class 7; there are 0, 1, 2", {"target": 7}),
        (OptionError, "is already 1", {"target": 1}),
        (UnknownNameError, "sepal width", {"keep": "sepal widht (cm)"}),
        (OptionError, "no feature 4; they are 0 to 3", {"keep": 4}),
        (UnknownNameError, "petal", {"whole": ["petal"]}),
        (OptionError, r"feature 'sepal width \(cm\)' must be an integer, but is 3.2 in x", {"whole": 1}),
        (OptionError, "no feature may change", {"keep": range(4)}),
        (OptionError, "seconds must be positive", {"seconds": 0}),
    ):
        with pytest.raises(error, match=match):
            model.counterfactual(row, **given_)
    with pytest.raises(NotFittedError):
        DLGNClassifier().counterfactual(row)
    with pytest.raises(ShapeError, match="expected one row, got 2"):
        model.counterfactual(X[50:52])
    with pytest.raises(RegionError, match="no row is predicted"):
        model.counterfactual(row, 0, within=pd.concat([row - 0.01, row + 0.01]))
