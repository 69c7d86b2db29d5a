"""Experiments on modified Fashion-MNIST, small and on made-up images, against definitions written out here."""

import functools
import math

import numpy as np
import pytest
import torch

import pathlens as pl
from pathlens.data import DataSet
from pathlens.papers.artifact import load_folder
from pathlens.papers.beyond import remedies
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space.circle_training import train_target
from pathlens.papers.half_space.fashion_training import load_data, middle_epochs, part_accuracies, train_fashion
from pathlens.papers.half_space.fig13 import FIGURE_16A, FIGURE_16B, block_contrast
from pathlens.papers.half_space.parts import network_at
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
    """The data, and the training that Figure 7 uses."""
    run.current = find("hs.fig7")
    return load_data(run), train_fashion(run, model)


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
    (data, runs), arrays = trained(run, model), artifacts["hs.fig7"].arrays
    x, y, simple = data.x_test, data.y_test, data.marks_test["simple"]
    for i, net in enumerate(runs.networks):
        with torch.no_grad():
            right = (net(x).argmax(1) == y).double()
            on = [g.sum(1).long() for g in net.gates(x[:40], hard=True).values()]
        for k, part in enumerate((simple, ~simple)):
            assert arrays[f"accuracy_{model}"][i, -1, k] == pytest.approx(100 * float(right[part].mean()), abs=1e-4)
            counts = math.prod(on)[part[:40]]
            assert arrays[f"paths_{model}"][i, -1, k] == pytest.approx(float(counts.double().mean()), rel=1e-6)


def test_the_diagonal_is_the_squared_gradient_of_all_outputs(found):
    artifacts, run = found
    data, runs = trained(run, "dlgn_pwc")
    x, simple = data.x_test[:40], data.marks_test["simple"][:40].numpy()
    net = network_at(runs[1], 0)
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(parameters)
    diagonal = sum(j.square().flatten(2).sum((1, 2)) for j in jacobian.values()).numpy()
    wanted = [diagonal[simple].mean(), diagonal[~simple].mean()]
    assert np.allclose(artifacts["hs.fig7"].arrays["ntk_dlgn_pwc"][1, 0], wanted, rtol=1e-4)


def test_blocks_average_over_new_classes_and_have_trace_100(found):
    artifacts, run = found
    data, runs = trained(run, "relu")
    rows = torch.cat([(data.y_test == label).nonzero()[:4, 0] for label in range(10)])
    with torch.no_grad():
        gates = [g.double() for g in network_at(runs[0], 3).gates(data.x_test[rows], hard=True).values()]
    kernel = math.prod(g @ g.T for g in gates).numpy()
    blocks = kernel.reshape(10, 4, 10, 4).mean((1, 3))
    assert np.allclose(artifacts["hs.fig13"].arrays["overlap_relu"][0, 2], 100 * blocks / np.trace(blocks), rtol=1e-4)


def test_the_middle_is_the_first_epoch_with_72_per_cent_on_the_easy_part(found):
    data, runs = trained(found[1], "dlgn_pwc")
    accuracy = part_accuracies(runs, data)
    for row, epoch in zip(accuracy[..., 0], middle_epochs(accuracy)):
        assert (row < 72).all() if epoch is None else row[epoch] >= 72 and (row[:epoch] < 72).all()


def test_block_contrast_is_zero_for_flat_kernels_and_one_for_two_parts():
    assert block_contrast(np.full((10, 10), 7.0)) == 0
    assert block_contrast(np.kron(np.eye(2), np.ones((5, 5)))) == 1


def test_figure_16_is_symmetric_and_has_the_printed_trace():
    a, b = FIGURE_16A, FIGURE_16B
    assert np.array_equal(a, a.T) and np.array_equal(b, b.T)
    assert np.trace(b) + 15.65 == pytest.approx(100, abs=0.05)  # 15.65 is printed for class 1


# --- controls, remedies -------------------------------------------------------------------------------------------


def test_ratios_are_of_the_simple_half(found):
    artifacts, run = found
    data = pl.data.circle_control("swapped", points=32)
    runs = train_target(run, "relu", data, 4, [0, 3, 4])
    with torch.no_grad():
        counts = math.prod(g.sum(1) for g in runs.networks[1].gates(data.x, hard=True).values())
    slow = ~data.marks["top"]
    wanted = float(counts[slow].mean() / counts[~slow].mean())
    assert artifacts["hs.controls"].arrays["ratio_swapped"][0, 1, -1] == pytest.approx(wanted, rel=1e-5)


def test_remedies_start_alike_and_plain_training_is_plain(found):
    artifacts, run = found
    arrays = artifacts["hs.remedies"].arrays
    for key in ("circle", "images"):
        starts = [arrays[f"{key}_errors_{remedy}"][:, 0] for remedy in remedies.REMEDIES]
        assert all(np.array_equal(start, starts[0]) for start in starts)
    data, runs = trained(run, "dlgn_pwc")
    usual = part_accuracies(runs, data)
    assert np.allclose(arrays["images_errors_plain"], 100 - usual, atol=1e-4)
