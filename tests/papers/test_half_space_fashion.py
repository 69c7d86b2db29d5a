"""Allocation of paths on modified Fashion-MNIST, small and on made-up images, against definitions written out here."""

import copy
import functools
import math

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.data import DataSet
from pathlens.papers import half_space_early, half_space_fashion, half_space_remedies
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space_allocation import BalancedPaths, GatesApart, Reweighted
from pathlens.papers.pages import write_page

NAMES = ("hs.fig7", "hs.fig13", "hs.early", "hs.controls", "hs.remedies")
SMALL = {
    "rows": 160,
    "rows_test": 120,
    "width": 6,
    "hidden_layers": 2,
    "epochs": 3,
    "batch_size": 40,
    "lr": 0.02,
    "measured": 40,
    "per_class": 4,
    "points": 32,
    "circle_epochs": 4,
    "circle_stages": [0, 1, 4],
    "stages": [0, 1, 3],
    "kernel_rows": 50,
    "probe": 8,
}


def made_up(scrambled=(5, 6, 7, 8, 9), flatten=True):
    """Ten clouds in eight dimensions; labels of the scrambled five are permuted by the sign of one coordinate."""
    generator = torch.Generator().manual_seed(len(scrambled) + scrambled[0])
    centres = torch.randn(10, 8, generator=generator)

    def rows(n):
        original = torch.arange(n) % 10
        x = centres[original] + 0.7 * torch.randn(n, 8, generator=generator)
        simple = ~torch.isin(original, torch.tensor(scrambled))
        y = torch.where(simple, original % 5, 5 + (original + 2 * (x[:, 0] > 0)) % 5)
        return x, y, {"simple": simple, "original": original}

    x, y, marks = rows(200)
    x_test, y_test, marks_test = rows(150)
    return DataSet(x, y, x_test, y_test, task="classification", classes=10, marks=marks, marks_test=marks_test)


def train_uncompiled(train, *given, **options):
    return train(*given, **options | {"execution": pl.training.Execution(compile=False)})


@pytest.fixture(scope="module")
def images():
    """Made-up images; and steps are not captured, which takes longer than these trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.data, "modified_fashion_mnist", made_up)
        patch.setattr(pl.training, "train", functools.partial(train_uncompiled, pl.training.train))
        yield


@pytest.fixture(scope="module")
def found(images, tmp_path_factory):
    """At paper scale, so that this is the code that runs there; all of it is then REDUCED."""
    run = Run("paper", seeds=(0, 1), changes=SMALL, out=tmp_path_factory.mktemp("run"))
    return {name: perform(find(name), run) for name in NAMES}, run


def trained(run, model):
    return half_space_fashion.train_fashion(run, model, half_space_fashion.Setting.of(run.sizes_of("hs.fig7")))


# --- what is written -------------------------------------------------------------------------------------------


def test_smaller_sizes_are_marked(found):
    for artifact in found[0].values():
        assert artifact.reduced and artifact.verdict != "reproduced"
        assert artifact.reductions["width"] == (6, 128) and artifact.figures


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())


def test_running_again_from_checkpoints_gives_the_same_numbers(found):
    artifacts, run = found
    again = Run("paper", seeds=run.seeds, changes=SMALL, out=run.out)
    for name in NAMES:
        for key, value in perform(find(name), again).arrays.items():
            assert np.array_equal(value, artifacts[name].arrays[key], equal_nan=True), (name, key)


# --- figures 7 and 13 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["relu", "dlgn_pwc"])
def test_accuracy_and_paths_of_each_part(found, model):
    artifacts, run = found
    t, arrays = trained(run, model), artifacts["hs.fig7"].arrays
    x, y, simple = t.data.x_test, t.data.y_test, t.data.marks_test["simple"]
    for i, net in enumerate(t.runs.networks):
        with torch.no_grad():
            right = (net(x).argmax(1) == y).double()
            on = [g.sum(1).long() for g in net.gates(x[:40], hard=True).values()]
        for k, part in enumerate((simple, ~simple)):
            assert arrays[f"accuracy_{model}"][i, -1, k] == pytest.approx(100 * float(right[part].mean()), abs=1e-4)
            counts = math.prod(on)[part[:40]]
            assert arrays[f"paths_{model}"][i, -1, k] == pytest.approx(float(counts.double().mean()), rel=1e-6)


def test_the_diagonal_is_the_squared_gradient_of_all_outputs(found):
    artifacts, run = found
    t = trained(run, "dlgn_pwc")
    x, simple = t.data.x_test[:40], t.data.marks_test["simple"][:40].numpy()
    net = t.network(1, 0)
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(parameters)
    diagonal = sum(j.square().flatten(2).sum((1, 2)) for j in jacobian.values()).numpy()
    wanted = [diagonal[simple].mean(), diagonal[~simple].mean()]
    assert np.allclose(artifacts["hs.fig7"].arrays["ntk_dlgn_pwc"][1, 0], wanted, rtol=1e-4)


def test_blocks_average_over_new_classes_and_have_trace_100(found):
    artifacts, run = found
    t = trained(run, "relu")
    rows = torch.cat([(t.data.y_test == label).nonzero()[:4, 0] for label in range(10)])
    with torch.no_grad():
        gates = [g.double() for g in t.network(0, 3).gates(t.data.x_test[rows], hard=True).values()]
    kernel = math.prod(g @ g.T for g in gates).numpy()
    blocks = kernel.reshape(10, 4, 10, 4).mean((1, 3))
    assert np.allclose(artifacts["hs.fig13"].arrays["overlap_relu"][0, 2], 100 * blocks / np.trace(blocks), rtol=1e-4)


def test_the_middle_is_the_first_epoch_with_72_per_cent_on_the_easy_part(found):
    t = trained(found[1], "dlgn_pwc")
    easy = t.part_accuracies()[..., 0]
    for row, epoch in zip(easy, t.middle()):
        assert (row < 72).all() if epoch is None else row[epoch] >= 72 and (row[:epoch] < 72).all()


def test_block_contrast_is_zero_for_flat_kernels_and_one_for_two_parts():
    assert half_space_fashion.block_contrast(np.full((10, 10), 7.0)) == 0
    assert half_space_fashion.block_contrast(np.kron(np.eye(2), np.ones((5, 5)))) == 1


def test_what_is_left_of_figure_16_is_symmetric_and_of_the_printed_trace():
    a, b = half_space_fashion.FIGURE_16A, half_space_fashion.FIGURE_16B
    assert np.array_equal(a, a.T) and np.array_equal(b, b.T)
    assert np.trace(b) + 15.65 == pytest.approx(100, abs=0.05)  # 15.65 is printed for class 1


# --- early, controls -------------------------------------------------------------------------------------------


def test_early_is_before_the_loss_halves():
    loss = np.array([[2.0, 1.5, 0.1], [2.0, 0.5, 1.1], [2.0, 1.9, 1.8]])
    assert half_space_early.early_stage(loss).tolist() == [1, 0, 2]


def test_shares_of_a_gain_are_told_between_the_first_and_the_last_stage_alone():
    worth = np.array([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0], [1.0, 2.0, 5.0], [5.0, 3.0, 1.0]])
    share = half_space_early.share_gained(worth, np.array([1, 0, 2, 1]))
    assert share[0] == 0.25 and np.isnan(share[1:]).all()


def test_frozen_gates_are_those_of_the_stage_and_values_are_new():
    gates, pattern = pl.models.dlgn(2, (4, 4), seed=5), pl.models.dlgn(2, (4, 4), frozen=True)
    net = half_space_early._frozen(pattern, gates, seed=5)
    x = torch.randn(6, 2)
    assert all(torch.equal(a, b) for a, b in zip(net.gates(x).values(), gates.gates(x).values()))
    values, old = (dict(n.values.named_parameters()) for n in (net, gates))
    assert not any(torch.equal(values[k], old[k]) for k in old)
    assert {k.split(".")[0] for k, p in net.named_parameters() if p.requires_grad} == {"values"}


def test_regression_with_counts_is_ridge_regression():
    data, net = pl.data.circle(24, test_points=24), pl.models.dlgn(2, (5, 5), seed=1)
    error, _ = half_space_early._regression(net, data, 24, "cpu", soft=False)

    def bits(x):
        return [g.detach().double() for g in net.gates(x, hard=True).values()]

    train, test = bits(data.x), bits(data.x_test)
    K, K_test = (math.prod(g @ h.T for g, h in zip(side, train)) for side in (train, test))
    s = K.trace() / 24
    predicted = K_test / s @ torch.linalg.solve(K / s + half_space_early.RIDGE * torch.eye(24), data.y.double())
    assert error == pytest.approx(float((predicted - data.y_test).square().mean()), rel=1e-3)


def test_ratios_are_of_the_simple_half(found):
    artifacts, run = found
    data = pl.data.circle_control("swapped", 32)
    runs = half_space_early.train_on_circle(run, "relu", data, 4, [0, 3, 4])
    with torch.no_grad():
        counts = math.prod(g.sum(1) for g in runs.networks[1].gates(data.x, hard=True).values())
    slow = ~data.marks["top"]
    wanted = float(counts[slow].mean() / counts[~slow].mean())
    assert artifacts["hs.controls"].arrays["ratio_swapped"][0, 1, -1] == pytest.approx(wanted, rel=1e-5)


# --- remedies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [False, True])
def test_gates_alone_feel_the_weights(labels):
    net = pl.models.dlgn(3, (4, 4), outputs=3, piecewise_constant=True, seed=0).double()
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7) % 3 if labels else torch.randn(7, 3, dtype=torch.float64)

    def rows():
        out = net(x)
        return -out.log_softmax(1)[torch.arange(7), y] if labels else ((out - y) ** 2).sum(1) / 3

    made = torch.autograd.grad(Reweighted(3, labels)(GatesApart(net)(x), y), list(net.parameters()))
    share = (rows() / rows().mean()).detach()
    plain = torch.autograd.grad(rows().mean(), list(net.parameters()))
    weighted = torch.autograd.grad((share * rows()).mean(), list(net.parameters()))
    for (name, _), got, a, b in zip(net.named_parameters(), made, plain, weighted):
        assert torch.allclose(got, a if name.startswith("values.") else b, atol=1e-12), name
    assert torch.allclose(Reweighted(3, labels)(net(x), y), (share * rows()).mean())


def test_training_apart_with_equal_weights_is_plain_training():
    def both(output, target):
        return (output[:, :1] - target).square().mean() + (output[:, -1:] - target).square().mean()

    data = pl.data.circle(32, dtype=torch.float64)
    plain = pl.models.dlgn(2, (4, 4), piecewise_constant=True, seed=0).double()
    apart = GatesApart(copy.deepcopy(plain))
    pl.train(plain, data, epochs=3, batch_size=8, progress=False)
    pl.train(apart, data, epochs=3, batch_size=8, loss=both, progress=False)
    for name, value in plain.state_dict().items():
        assert torch.allclose(apart.net.state_dict()[name], value, atol=1e-12), name


def test_the_penalty_is_the_variance_of_the_log_of_soft_counts():
    net, x = pl.models.dlgn(2, (3, 3), seed=0), torch.randn(5, 2)
    first, second = net.gates(x).values()
    counts = torch.einsum("ni,nj->n", first, second)  # a sum over all nine paths
    assert torch.allclose(BalancedPaths(x, 0.5)(net), 0.5 * counts.log().var(correction=0), rtol=1e-4)


def test_remedies_start_alike_and_plain_training_is_plain(found):
    artifacts, run = found
    arrays = artifacts["hs.remedies"].arrays
    for key in ("circle", "images"):
        starts = [arrays[f"{key}_errors_{remedy}"][:, 0] for remedy in half_space_remedies.REMEDIES]
        assert all(np.array_equal(start, starts[0]) for start in starts)
    usual = trained(run, "dlgn_pwc").part_accuracies()
    assert np.allclose(arrays["images_errors_plain"], 100 - usual, atol=1e-4)
