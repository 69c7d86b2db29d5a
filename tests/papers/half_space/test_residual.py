"""Residual networks with gates, small and on made-up images: gates stay half-spaces, and who teaches whom."""

import dataclasses

import numpy as np
import pytest
import torch

from pathlens.data import DataSet
from pathlens.errors import DataMissingError, OptionError
from pathlens.models import resnet34, resnet110
from pathlens.papers.artifact import load_folder
from pathlens.papers.beyond import best as best_network
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space import residual, tab2
from pathlens.papers.pages import write_page
from pathlens.training import Teacher

SMALL = {
    "side": 8,
    "rows": 40,
    "rows_test": 30,
    "epochs": 3,
    "held_out": 12,
    "batch_size": 20,
    "networks": ["tiny"],
    "models": ["relu", "dlgn_pwc"],
    "blocks": [1, 1],
    "widths": [3, 4],
    "relus": list(best_network.RELUS),
    "candidates": ["straight_through", "encoded", "encoded_taught"],
}


def made_up(name, rows=None, rows_test=None, *, flatten=False):
    if name == "cifar100":
        raise DataMissingError("CIFAR-100 is not here.")
    generator = torch.Generator().manual_seed(0)
    x, x_test = (torch.randn(n, 3, 8, 8, generator=generator) for n in (40, 30))
    return DataSet(x, torch.arange(40) % 10, x_test, torch.arange(30) % 10, task="classification", classes=10)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "images", made_up)
        run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
        yield {name: perform(find(name), run) for name in ("hs.tab2", "hs.best")}, run


def trained(run, name):
    data = residual.load_data(run, "cifar10")
    return best_network._train_variant(run, name, data, run.seeds)


def test_data_sets_that_are_not_there_leave_their_rows_open(found):
    artifact = found[0]["hs.tab2"]
    by_set = {name: [c for c in artifact.claims if name in c.row] for name in ("CIFAR-100", "CIFAR-10")}
    assert all(c.measured == (None, None) for c in by_set["CIFAR-100"])
    assert artifact.metrics["data sets that are not on this machine"] == ["cifar100"]
    gaps = [c for c in artifact.claims if c.row == "two blocks, DLGN-PWC, CIFAR-10"]
    a = artifact.arrays
    expected = a["last_cifar10_tiny_relu"] - a["last_cifar10_tiny_dlgn_pwc"]
    assert np.allclose(gaps[0].measured, expected, atol=1e-4)


@pytest.mark.parametrize("name", SMALL["candidates"])
def test_every_candidate_is_judged_with_hard_gates(found, name):
    run = found[1]
    data, runs = residual.load_data(run, "cifar10"), trained(run, name)
    scores = residual.scores(runs, data, "cpu", gated=True)
    net, x = runs.networks[0].eval(), data.x_test
    with torch.no_grad():
        if name.startswith("encoded"):
            parts, net = net
            x = parts(x)
        right = (net.values(x, *net.gates(x, hard=True).values()).argmax(1) == data.y_test).double().mean()
    assert scores["hard"][0] == pytest.approx(100 * float(right), abs=1e-4)
    assert np.array_equal(scores["hard"], scores["last"])


def test_a_dlgn_is_chosen_without_test_images(found, monkeypatch):
    best = found[0]["hs.best"]
    labels = best_network.VARIANTS
    chosen = next(name for name in labels if labels[name] == best.metrics["chosen on held-out training images"])
    held = best.metrics["accuracy on held-out training images"]
    assert held[labels[chosen]] == max(held.values())
    gaps = [c.measured for c in best.claims[:3]]
    expected = [best.arrays[f"hard_{relu}"] - best.arrays[f"hard_{chosen}"] for relu in best_network.RELUS]
    assert np.allclose(gaps, expected, atol=1e-4)

    def without_tests(*args, **options):
        return dataclasses.replace(made_up(*args, **options), x_test=None, y_test=None)

    monkeypatch.setattr(residual, "images", without_tests)
    again = Run("paper", seeds=(0, 1), changes=SMALL, current=find("hs.best"))
    data = residual.load_data(again, "cifar10")
    for name, values in best_network._held_out(again, data).items():
        assert values == pytest.approx(held[labels[name]])
    # by hand: trained on the first 28 images, judged on the other 12
    first = dataclasses.replace(data, x=data.x[:28], y=data.y[:28])
    net = (
        residual.train_network(
            again,
            best_network.variant("straight_through", SMALL, data.x),
            first,
            "by hand",
            "test",
            seeds=(0,),
        )
        .networks[0]
        .eval()
    )
    right = (net(data.x[28:]).argmax(1) == data.y[28:]).double().mean()
    assert held["DLGN"] == pytest.approx(100 * float(right), abs=1e-4)


@pytest.mark.parametrize("held_out", [0, 40, 100])
def test_a_choice_without_images_on_either_side_is_refused(held_out):
    run = Run("paper", seeds=(0, 1), changes=SMALL | {"held_out": held_out}, current=find("hs.best"))
    with pytest.raises(OptionError, match=f"held_out must be between 1 and 39 of 40 training images, got {held_out}"):
        best_network._held_out(run, made_up("cifar10"))


def test_taught_rows_learn_from_the_relu_network_of_the_first_seed(found):
    run = found[1]
    data, size = residual.load_data(run, "cifar10"), run.sizes_of("hs.best")
    teacher, taught = trained(run, "relu").networks[0].eval(), trained(run, "taught_relu")
    assert len(taught[0].history["loss"]) == SMALL["epochs"] + 1
    again = residual.train_network(
        run,
        best_network.variant("taught_relu", size, data.x),
        data,
        "by hand",
        "test",
        teacher=Teacher(teacher, temperature=4.0),
    )
    assert np.array_equal(again.history("loss"), taught.history("loss"))
    other = Run(
        "paper", seeds=(1, 0), out=run.out, changes=SMALL, current=find("hs.best")
    )  # the same folder, another teacher
    assert not np.array_equal(trained(other, "taught_relu")[1].history["loss"], taught[0].history["loss"])


def test_gates_are_half_spaces_of_the_encoded_images():
    """Pre-activations are affine in the code once batch-norm is in eval mode, and the code gives the image back."""
    x, y = torch.randn(2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts, net = best_network.variant("encoded", SMALL, x.float()).double()
    net(parts(x))  # batch statistics other than those of the start
    net.eval()
    left, right = parts(x), parts(y)
    with torch.no_grad():
        a, b, mixed = (net.preactivations(z) for z in (left, right, 0.3 * left + 0.7 * right))
    for site, q in mixed.items():
        assert torch.allclose(q, 0.3 * a[site] + 0.7 * b[site], atol=1e-10)
    assert torch.allclose(parts.decode(left), x, atol=1e-6)


def test_the_shapes_are_those_of_the_named_networks():
    with torch.device("meta"):  # shapes alone
        for name, build in (("resnet34", resnet34), ("resnet110", resnet110)):
            made, named = tab2._template(name, 10), build(10)
            assert [p.shape for p in made.parameters()] == [p.shape for p in named.parameters()]


def test_operations_of_a_residual_network():
    from torch.utils.flop_counter import FlopCounterMode

    net = tab2._template("resnet110", 10).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 32, 32))
    blocks, widths, _ = residual.SHAPES["resnet110"]
    head = 2 * 64 * 10
    assert residual.residual_flops(blocks, widths, 32) + head == counter.get_total_flops()


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())
