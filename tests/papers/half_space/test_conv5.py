"""Five convolutions and their kernels, small and on made-up images: numbers against their definitions."""

import functools

import numpy as np
import pytest
import torch

from pathlens import training
from pathlens.data import DataSet
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.half_space import cifar, conv5, tab1
from pathlens.papers.pages import write_page

SMALL = {
    "side": 6,
    "rows": 60,
    "rows_test": 40,
    "epochs": 4,
    "batch_size": 20,
    "lr": 5e-3,
    "widths": [4],
    "ntk_widths": [4],
    "ntk_steps": 4,
    "flat": ["mnist"],
    "flat_width": 4,
    "flat_rows": 40,
    "flat_epochs": 2,
    "kernel_width": 4,
    "kernel_epochs": [0, 1, 3, 4],
    "per_class": 2,
}


def made_up(name, rows=None, rows_test=None, *, flatten=False):
    """Ten kinds of stripes of 12 × 12 pixels, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 12, 12, generator=generator)

    def draw(n):
        y = torch.arange(n) % 10
        x = patterns[y] + 0.5 * torch.randn(n, 3, 12, 12, generator=generator)
        return (x.flatten(1) if flatten else x), y

    (x, y), (x_test, y_test) = draw(rows or 60), draw(rows_test or 40)
    return DataSet(x, y, x_test, y_test, name=name, task="classification", classes=10)


def train_uncompiled(train, *given, **options):
    return train(*given, **options | {"execution": training.Execution(compile=False)})


@pytest.fixture(scope="module")
def pictures():
    """Made-up images; and steps are not captured, which takes longer than these trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv5, "images", made_up)
        patch.setattr(tab1, "images", made_up)
        patch.setattr(training, "train", functools.partial(train_uncompiled, training.train))
        yield


@pytest.fixture(scope="module")
def found(pictures, tmp_path_factory):
    """At paper scale, so that its branch is the one that runs; 12 × 12 pixels are averaged down to 6 × 6."""
    run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
    return {name: perform(find(name), run) for name in ("hs.tab1", "hs.cifar")}, run


def claim_of(artifact, claim, row):
    (one,) = [c for c in artifact.claims if c.text == claim.text and c.row == row]
    return one


def test_accuracies_are_those_of_the_trained_networks(found):
    artifacts, run = found
    arrays, data = artifacts["hs.tab1"].arrays, conv5.load_data(run)
    assert data.x.shape[1:] == (3, 6, 6) and artifacts["hs.tab1"].reduced
    for model in ("relu", "dlgn", "dln"):
        nets = conv5.train_conv(run, model, 4).networks
        for i, net in enumerate(nets):
            with torch.no_grad():
                right = (net.eval()(data.x_test).argmax(1) == data.y_test).double().mean()
            assert arrays[f"last_{model}_4"][i] == pytest.approx(100 * float(right), abs=1e-4)
    net = nets[0]  # a deep linear network is affine in its input
    x, y = data.x[:5], data.x[5:10]
    with torch.no_grad():
        assert torch.allclose(net(x) + net(y), net(x + y) + net(torch.zeros_like(x)), atol=1e-5)


def test_hard_gates_are_evaluated_with_bits(found):
    artifacts, run = found
    data = conv5.load_data(run)
    net = conv5.train_conv(run, "dlgn", 4).networks[1].eval()
    with torch.no_grad():
        bits = net.gates(data.x_test, hard=True)
        assert all(set(g.unique().tolist()) <= {0.0, 1.0} for g in bits.values())
        right = (net.values(data.x_test, *bits.values()).argmax(1) == data.y_test).double().mean()
    assert artifacts["hs.tab1"].arrays["hard_dlgn_4"][1] == pytest.approx(100 * float(right), abs=1e-4)


def test_claims_compare_the_rows_of_the_table(found):
    artifact = found[0]["hs.tab1"]
    a = artifact.arrays
    gap = claim_of(artifact, tab1._SIMILAR, "DLGN-PWC, 4 filters")
    assert np.allclose(gap.measured, a["last_dlgn_pwc_4"] - a["last_relu_4"], atol=1e-4)
    above = claim_of(artifact, tab1._ABOVE_NTK, "ReLU, 4 filters")
    assert np.allclose(above.measured, a["last_relu_4"] - a["last_ntk_4"], atol=1e-4)
    flat = claim_of(artifact, tab1._CONSTANT, "MNIST")
    assert np.allclose(flat.measured, abs(a["last_dlgn_pwc_mnist"] - a["last_dlgn_mnist"]), atol=1e-4)


def test_the_linear_model_is_conjugate_gradients_on_the_jacobian(found):
    """Against CGLS with the whole Jacobian in float64."""
    artifacts, run = found
    data = conv5.load_data(run)
    net = conv5.network("relu", 4, data.x, init="he").reinitialise(1).double().eval()
    parameters = {k: p.detach() for k, p in net.named_parameters()}

    def jacobian(x):
        made = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x.double(),)))(parameters)
        return torch.cat([j.flatten(2) for j in made.values()], dim=2).flatten(0, 1).numpy()

    J = jacobian(data.x)
    first = (np.eye(10)[data.y.numpy()] - 0.1).reshape(-1)
    delta, r = np.zeros(J.shape[1]), first.copy()
    g = J.T @ r
    p = g.copy()
    for _ in range(SMALL["ntk_steps"]):
        q = J @ p
        step = g @ g / (q @ q)
        delta, r = delta + step * p, r - step * q
        new = J.T @ r
        p, g = new + (new @ new) / (g @ g) * p, new
    arrays = artifacts["hs.tab1"].arrays
    assert arrays["residual_ntk_4"][1] == pytest.approx(np.linalg.norm(r) / np.linalg.norm(first), rel=1e-3)
    f = (jacobian(data.x_test) @ delta).reshape(-1, 10)
    assert arrays["last_ntk_4"][1] == pytest.approx(100 * (f.argmax(1) == data.y_test.numpy()).mean(), abs=2.6)


def test_kernels_drift_from_their_start_and_fall_into_class_blocks(found):
    arrays = found[0]["hs.cifar"].arrays
    assert list(arrays["epochs"]) == [0, 1, 3, 4]
    for kind in ("overlap", "ntk"):
        for model in ("relu", "dlgn"):
            moved, blocks = arrays[f"drift_{kind}_{model}"], arrays[f"blocks_{kind}_{model}"]
            assert moved.shape == (2, 4) and (moved[:, 0] == 0).all() and (moved[:, 1:] > 0).all()
            assert blocks.shape == (2, 10, 10) and np.trace(blocks[1]) == pytest.approx(100, rel=1e-4)


def test_the_drift_of_the_tangent_kernel_is_that_of_the_jacobians(found):
    artifacts, run = found
    data = conv5.load_data(run)
    chosen = torch.cat([(data.y == c).nonzero()[:2, 0] for c in range(10)])
    runs = conv5.train_conv(run, "dlgn", 4)
    kernels = []
    for epoch in (0, 4):
        net = conv5.network("dlgn", 4, data.x)
        net.load_state_dict(runs[0].at_epoch(epoch).snapshot.state)
        parameters = {k: p.detach() for k, p in net.named_parameters()}
        made = torch.func.jacrev(lambda p, net=net: torch.func.functional_call(net, p, (data.x[chosen],)))(parameters)
        J = torch.cat([j.flatten(2) for j in made.values()], dim=2).double()
        K = torch.einsum("sop,top->st", J, J)
        kernels.append(K / K.trace())
    expected = float((kernels[1] - kernels[0]).norm() / kernels[0].norm())
    assert artifacts["hs.cifar"].arrays["drift_ntk_dlgn"][0, -1] == pytest.approx(expected, rel=1e-3)


def test_class_ratio_leaves_the_diagonal_out():
    K = np.array([[9.0, 4.0, 1.0], [4.0, 9.0, 2.0], [1.0, 2.0, 9.0]])
    assert cifar.class_ratio(K, np.array([0, 0, 1])) == pytest.approx(4 / 1.5)


def test_pieces_share_checkpoints_and_rows_not_trained_are_missing(found):
    artifacts, run = found
    before = {p.name for p in run.out.glob("checkpoints/*conv5*")}
    changes = {**SMALL, "models": ["relu", "ntk"], "flat": []}
    piece = perform(find("hs.tab1"), Run("paper", seeds=(0,), out=run.out, changes=changes))
    assert {p.name for p in run.out.glob("checkpoints/*conv5*")} == before
    for key in ("last_relu_4", "last_ntk_4"):
        assert piece.arrays[key][0] == artifacts["hs.tab1"].arrays[key][0]
    missing = claim_of(piece, tab1._SIMILAR, "DLGN, 4 filters")
    assert missing.measured == (None,) and missing.verdict == "cannot tell"


def test_a_seed_that_is_added_later_is_the_only_one_that_is_trained(found, tmp_path, monkeypatch):
    one, both = (Run("paper", seeds=seeds, out=tmp_path, changes=SMALL) for seeds in ((0,), (0, 1)))
    first = {name: perform(find(name), one) for name in found[0]}
    trained, train = [], training.train

    def watched(*given, seeds, **more):
        trained.extend(seeds)
        return train(*given, seeds=seeds, **more)

    monkeypatch.setattr(training, "train", watched)
    for name, at_once in found[0].items():
        artifact = perform(find(name), both)
        for key, values in at_once.arrays.items():
            # fully connected networks of other stacks round otherwise: one of 40 images may change its class
            assert np.allclose(artifact.arrays[key], values, atol=2.6 if "mnist" in key else 1e-5), key
            if key != "epochs" and "blocks" not in key:  # which are means over seeds
                assert np.array_equal(artifact.arrays[key][0], first[name].arrays[key][0])  # as it was
    assert set(trained) == {1}


def test_operations_are_counted_for_changed_sizes():
    entry = find("hs.tab1")
    full, minutes = entry.estimate(Run("paper"))
    half, fewer = entry.estimate(Run("paper", changes={"models": ["relu"], "widths": [128]}))
    images, forward = 5 * 50_000, 18 * 1024 * (3 * 128 + 4 * 128**2)
    assert half == pytest.approx(images * 32 * 3 * forward)
    assert full > half and fewer < minutes


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())


def test_a_later_call_needs_the_rows_numbers_and_not_their_weights(found, monkeypatch):
    artifacts, run = found
    monkeypatch.setattr(tab1, "train_conv", None)
    monkeypatch.setattr(training, "train", None)
    again = perform(find("hs.tab1"), Run("paper", seeds=(0, 1), out=run.out, changes=SMALL))
    assert again.claims == artifacts["hs.tab1"].claims
    for name, values in artifacts["hs.tab1"].arrays.items():
        assert np.array_equal(again.arrays[name], values), name
