"""Residual networks with gates, small and on made-up images: gates stay half-spaces, and tuning leaves them alone."""

import numpy as np
import pytest
import torch

from pathlens.artifacts import load_folder
from pathlens.data import DataSet
from pathlens.errors import DataMissingError
from pathlens.experiments import half_space_residual
from pathlens.experiments.registry import Run, find, perform
from pathlens.models import resnet34, resnet110
from pathlens.report import write_page

SMALL = {
    "side": 8, "rows": 40, "rows_test": 30, "epochs": 2, "tuned_epochs": 1, "batch_size": 20, "networks": ["tiny"],
    "models": ["relu", "dlgn_pwc"], "blocks": [1, 1], "widths": [3, 4],
    "variants": ["relu", "soft", "straight_through", "tuned", "direct_gates"],
}  # fmt: skip


def made_up(name, rows=None, rows_test=None, *, flatten=False):
    if name == "cifar100":
        raise DataMissingError("CIFAR-100 is not here.")
    generator = torch.Generator().manual_seed(0)
    x, x_test = (torch.randn(n, 3, 8, 8, generator=generator) for n in (40, 30))
    return DataSet(x, torch.arange(40) % 10, x_test, torch.arange(30) % 10, task="classification", classes=10)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_space_residual, "images", made_up)
        run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
        yield {name: perform(find(name), run) for name in ("hs.tab2", "hs.best")}, run


def test_data_sets_that_are_not_there_leave_their_rows_open(found):
    artifact = found[0]["hs.tab2"]
    by_set = {name: [c for c in artifact.claims if name in c.row] for name in ("CIFAR-100", "CIFAR-10")}
    assert all(c.measured == (None, None) for c in by_set["CIFAR-100"])
    assert artifact.metrics["data sets that are not on this machine"] == ["cifar100"]
    gaps = [c for c in artifact.claims if c.row == "two blocks, DLGN-PWC, CIFAR-10"]
    a = artifact.arrays
    expected = a["last_cifar10_tiny_relu"] - a["last_cifar10_tiny_dlgn_pwc"]
    assert np.allclose(gaps[0].measured, expected, atol=1e-4)


def test_every_row_is_judged_with_hard_gates(found):
    artifacts, run = found
    data = half_space_residual._data(run, "hs.best", "cifar10")
    arrays = artifacts["hs.best"].arrays
    for name in ("soft", "straight_through", "direct_gates"):
        net = half_space_residual._train_variant(run, name).networks[0].eval()
        with torch.no_grad():
            bits = net.gates(data.x_test, hard=True).values()
            right = (net.values(data.x_test, *bits).argmax(1) == data.y_test).double().mean()
        assert arrays[f"hard_{name}"][0] == pytest.approx(100 * float(right), abs=1e-4)
    assert np.array_equal(arrays["hard_straight_through"], arrays["last_straight_through"])
    first = next(c for c in artifacts["hs.best"].claims if c.row == half_space_residual.VARIANTS["soft"])
    assert np.allclose(first.measured, arrays["hard_relu"] - arrays["hard_soft"], atol=1e-4)


def test_tuning_moves_the_values_and_leaves_the_gates(found):
    _, run = found
    start = half_space_residual._train_variant(run, "straight_through").networks[0].state_dict()
    end = half_space_residual._train_variant(run, "tuned").networks[0].state_dict()
    assert all(torch.equal(v, end[k]) for k, v in start.items() if k.startswith("source."))
    assert not torch.equal(start["values.conv1.weight"], end["values.conv1.weight"])


@pytest.mark.parametrize("name", ["leaky", "two_sided", "wide_gates", "direct_gates"])
def test_gates_of_every_variant_are_half_spaces(name):
    """Pre-activations are affine in the image once batch-norm is in eval mode, and all sites have their gates."""
    x, y = torch.randn(2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net = half_space_residual.variant(name, SMALL, x.float()).double()
    net(x)  # batch statistics other than those of the start
    net.eval()
    with torch.no_grad():
        left, right, mixed = (net.preactivations(z) for z in (x, y, 0.3 * x + 0.7 * y))
        gates = net.gates(x)
    template = half_space_residual.variant("straight_through", SMALL, x.float()).double().preactivations(x)
    assert {k: q.shape for k, q in left.items()} == {k: q.shape for k, q in template.items()}
    for site, q in mixed.items():
        assert torch.allclose(q, 0.3 * left[site] + 0.7 * right[site], atol=1e-10)
    values = {"leaky": {0.1, 1.0}, "two_sided": {-1.0, 1.0}}.get(name, {0.0, 1.0})
    assert {round(v, 6) for g in gates.values() for v in g.unique().tolist()} == values


def test_the_shapes_are_those_of_the_named_networks():
    with torch.device("meta"):  # shapes alone
        for name, build in (("resnet34", resnet34), ("resnet110", resnet110)):
            made, named = half_space_residual._template(name, 10), build(10)
            assert [p.shape for p in made.parameters()] == [p.shape for p in named.parameters()]


def test_operations_of_a_residual_network():
    from torch.utils.flop_counter import FlopCounterMode

    net = half_space_residual._template("resnet110", 10).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 32, 32))
    blocks, widths, _ = half_space_residual.SHAPES["resnet110"]
    head = 2 * 64 * 10
    assert half_space_residual.residual_flops(blocks, widths, 32) + head == counter.get_total_flops()


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())
