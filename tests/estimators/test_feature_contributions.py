"""Contributions of features are the exact path integral from the means to the row, jumps at half-spaces included."""

from itertools import pairwise

import numpy as np
import pytest

from pathlens import DLGNClassifier, DLGNRegressor, regions
from pathlens.regions import HalfSpaceModel


def model_of(normals, offsets, weights, biases, centre):
    arrays = [[np.asarray(a, dtype=float) for a in part] for part in (normals, offsets, weights, biases)]
    zero = tuple(np.zeros(len(o)) for o in arrays[1])
    d, last = arrays[0][0].shape[1], len(arrays[1][-1])
    return HalfSpaceModel(
        *(tuple(part) for part in arrays), zero, zero, np.arange(last), np.ones(d), np.asarray(centre, dtype=float)
    )


def random_model(seed, d, hidden, c=1, constant=False):
    rng = np.random.default_rng(seed)
    widths = [d, *hidden, c]
    weights = [rng.normal(size=(b, a)) for a, b in pairwise(widths)]
    if constant:
        weights[0] *= 0
    return model_of(
        [rng.normal(size=(w, d)) for w in hidden],
        [rng.normal(size=w) for w in hidden],
        weights,
        [rng.normal(size=w) for w in widths[1:]],
        rng.normal(size=d),
    )


def step_and_slope(centre=(0.0, 0.0)):
    """f = 2·1(a > 0) + b / 2: the first unit is the jump, the second is open everywhere that matters."""
    return model_of([[[1, 0], [0, 0]]], [[0, 1]], [[[0, 0], [0, 0.5]], [[1, 1]]], [[2, 0], [0]], centre)


def sums(model, X):
    contributions, base = model.feature_contributions(X)
    return base + contributions.sum(2)


def test_jumps_count_as_much_as_slopes():
    X = np.random.default_rng(0).uniform(-1, 1, (4000, 2))
    model = step_and_slope(X.mean(0))
    parts, base = model.feature_contributions(X)
    a, b = np.abs(parts[:, 0]).mean(0)
    assert a == pytest.approx(1.0, abs=0.03) and b == pytest.approx(0.25, abs=0.01)
    np.testing.assert_allclose(parts[:, 0, 1], 0.5 * (X[:, 1] - X[:, 1].mean()), atol=1e-14)
    np.testing.assert_allclose(base, model.outputs(X.mean(0)[None])[0], atol=1e-14)


def test_a_fitted_model_that_is_constant_on_cells_has_jumps():
    X = np.random.default_rng(0).uniform(-1, 1, (300, 2))
    step, slope = 2.0 * (X[:, 0] > 0), 0.5 * X[:, 1]
    options = {"hidden": (16,), "epochs": 60, "weight_decay": 0.5, "hardening": "anneal", "random_state": 0}
    model = DLGNRegressor(piecewise_constant=True, **options)
    explained = model.fit(X, step + slope).explain(X, layer=0)
    a, b = np.abs(explained.contributions[:, 0]).mean(0)
    assert a == pytest.approx(np.abs(step - 2.0 * (X[:, 0].mean() > 0)).mean(), abs=0.1)
    assert b == pytest.approx(np.abs(slope - slope.mean()).mean(), abs=0.05)
    assert explained.relative_error < 1e-10 and explained.contributions.shape == (300, 1, 2)
    np.testing.assert_allclose(explained.rest[:, 0], model.predict(X.mean(0)[None])[0])


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("d, hidden, c", [(1, (3,), 1), (2, (4, 3), 1), (3, (4, 3, 4), 3), (5, (8, 8, 6, 5), 2)])
def test_they_add_up(d, hidden, c, constant):
    model = random_model(d, d, hidden, c, constant)
    X = np.random.default_rng(9).normal(size=(700, d)) * 3
    f = model.outputs(X)
    np.testing.assert_allclose(sums(model, X), f, rtol=0, atol=1e-10 * max(1.0, np.abs(f).max()))
    if d == 1:  # one feature has all of it
        parts, base = model.feature_contributions(X)
        np.testing.assert_allclose(parts[:, :, 0], f - base, atol=1e-10)


def softened(model, X, sharpness, steps):
    """∫ ∂f/∂x_j (x_j − r_j) dt by the midpoint rule, with gates σ(sharpness · q) instead of hard ones."""
    out = []
    for x in X:
        away, grid = x - model.centre, (np.arange(steps) + 0.5) / steps
        at, h = model.centre + grid[:, None] * away, None
        slope = np.broadcast_to(np.eye(model.d), (steps, model.d, model.d))
        for normal, offset, weight, bias in zip(model.normals, model.offsets, model.weights, model.biases):
            z = (at if h is None else h) @ weight.T + bias
            gate = 1 / (1 + np.exp(-np.clip(sharpness * (at @ normal.T + offset), -500, 500)))
            into = (sharpness * gate * (1 - gate) * z)[:, :, None] * normal
            slope = gate[:, :, None] * np.einsum("ij,njk->nik", weight, slope) + into
            h = gate * z
        out.append((model.weights[-1] @ slope).mean(0) * away)
    return np.array(out)


@pytest.mark.parametrize("hidden, constant", [((3,), False), ((3, 2), False), ((3, 2), True), ((2, 2, 2), False)])
def test_they_are_the_limit_of_the_path_integral_of_soft_gates(hidden, constant):
    model = random_model(1, 3, hidden, 2, constant)
    X = np.random.default_rng(2).normal(size=(4, 3)) * 2
    parts, _ = model.feature_contributions(X)
    coarse, fine = (softened(model, X, sharpness, 40_000) for sharpness in (500.0, 1000.0))
    assert np.abs(parts - fine).max() < 0.02 * np.abs(parts).max()
    np.testing.assert_allclose(parts, 2 * fine - coarse, rtol=0, atol=2e-4 * np.abs(parts).max())


def test_they_agree_with_the_exact_cells_of_the_segment():
    """Without ties: slopes of the cells that `segment1d` finds, and each jump to the gate that switches there."""
    model = random_model(4, 3, (5, 4), 1)
    net = model.network()
    for x in np.random.default_rng(5).normal(size=(5, 3)) * 2:
        away, way = x - model.centre, regions.segment1d(net, model.centre, x)
        wanted, before = np.zeros(3), None
        for lo, hi in pairwise(way.breaks.tolist()):
            at = model.centre + (lo + hi) / 2 * away
            bits = model.bits(at[None])
            slope, value = model.weights[-1], model.biases[-1]
            for gate, weight, bias in zip(bits[::-1], model.weights[-2::-1], model.biases[-2::-1]):
                slope = slope * gate
                value, slope = value + slope @ bias, slope @ weight
            wanted += slope[0] * away * (hi - lo)
            if before is not None:
                point = model.centre + lo * away
                jump = (slope @ point + value - before[0] @ point - before[1])[0]
                ((layer, unit),) = [
                    (k, i) for k, (a, b) in enumerate(zip(bits, before[2])) for i in np.flatnonzero(a[0] != b[0])
                ]
                normal = model.normals[layer][unit] * away
                wanted += jump * normal / normal.sum()
            before = slope, value, bits
        np.testing.assert_allclose(model.feature_contributions(x[None])[0][0, 0], wanted, rtol=0, atol=1e-10)


def test_gates_that_switch_together_share_alike():
    """f = 1(a > 0) · 1(b > 0): on the diagonal both gates switch at once, in whichever layer they are."""
    one_layer_each = model_of([[[1, 0]], [[0, 1]]], [[0], [0]], [[[0, 0]], [[1]], [[1]]], [[1], [0], [0]], [-1, -1])
    swapped = model_of([[[0, 1]], [[1, 0]]], [[0], [0]], [[[0, 0]], [[1]], [[1]]], [[1], [0], [0]], [-1, -1])
    for model in (one_layer_each, swapped):
        parts, base = model.feature_contributions(np.array([[1.0, 1.0], [1.0, 1.0 + 1e-13], [3.0, 1.0], [1.0, 3.0]]))
        assert base.tolist() == [0]
        np.testing.assert_allclose(parts[:, 0], [[0.5, 0.5], [0.5, 0.5], [0, 1], [1, 0]], atol=1e-9)
    three = [[[1, 0, 0]], [[0, 1, 0]], [[0, 0, 1]]]
    cube = model_of(three, [[0]] * 3, [[[0, 0, 0]], [[1]], [[1]], [[1]]], [[1], [0], [0], [0]], [-1, -1, -1])
    np.testing.assert_allclose(cube.feature_contributions(np.ones((1, 3)))[0][0, 0], np.full(3, 1 / 3), atol=1e-14)


def test_a_reference_on_the_boundary_and_a_row_that_is_the_reference():
    model = step_and_slope()  # closed at the reference: a > 0 switches at once
    parts, base = model.feature_contributions(np.array([[1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], [1e-300, 0.0]]))
    np.testing.assert_allclose(parts[:, 0], [[2, 0.5], [0, 0.5], [0, 0], [2, 0]], atol=1e-14)
    assert base.tolist() == [0]


def test_a_gate_that_only_rounding_switches_is_shared_out_too():
    """Changes that cancel: what switches the gate is too small to divide by."""
    model = model_of([[[1, 1]]], [[-0.3]], [[[0, 0]], [[1]]], [[1], [0]], [0.1, 0.2])
    X = np.array([[0.1 - 2.0**-3, 0.2 + 2.0**-3], [0.1 + 2.0**-3, 0.2 - 2.0**-3], [0.1, 0.2], [0.3, 0.0], [0.0, 0.3]])
    parts, _ = model.feature_contributions(X)
    assert np.isfinite(parts).all() and np.abs(parts).max() <= 1
    np.testing.assert_allclose(sums(model, X), model.outputs(X), rtol=0, atol=1e-10)


def test_each_class_that_is_asked_for_adds_up(flowers, pair, iris):
    X, _ = iris
    for model, rows in ((flowers, X), (pair, X[50:])):
        f = model.decision_function(rows).reshape(len(rows), -1)
        for k, label in enumerate(model.classes_):
            explained = model.explain(rows, layer=0, of=label)
            wanted = f[:, k] if f.shape[1] > 1 else (2 * k - 1) * f[:, 0]
            out = explained.chosen[0]
            total = explained.rest[:, out] + explained.contributions[:, out].sum(1)
            np.testing.assert_allclose(total, wanted, atol=1e-10)
            assert np.ptp(explained.rest[:, out]) == 0  # the model's output at the means: the same for every row


def test_a_page_of_a_constant_model_shows_what_it_looks_at(iris, tmp_path):
    X, y = iris
    model = DLGNClassifier(hidden=(8,), epochs=50, piecewise_constant=True, random_state=0).fit(X, y)
    explained = model.explain(X, layer=0)
    assert np.abs(explained.contributions).max() > 0.1
    text = model.report(X, y, tmp_path, within=X, seconds=0.2).read_text(encoding="utf-8")
    looks = text.partition("Influence of each feature")[2].partition("</section>")[0]
    assert "petal" in looks and "slope" not in looks
