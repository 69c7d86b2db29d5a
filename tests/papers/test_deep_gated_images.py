"""Deep gated networks on image sets, small and on made-up images, against definitions written out here."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pathlens as pl
from pathlens.data import DataSet
from pathlens.papers import deep_gated_images, deep_gated_training
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page
from pathlens.testing.plain_loop import train_plainly

NAMES = ("dgn.exp6", "dgn.tab4", "dgn.fig5", "dgn.fig6", "dgn.fig7", "dgn.fig8")
SMALL = {
    "rows": 60,
    "rows_test": 40,
    "side": 4,
    "channels": [4, 4, 4, 4],
    "dense": [6, 6],
    "epochs": 3,
    "batch_size": 20,
    "lr": 5e-3,
    "betas": [1, 8],
    "epsilons": [0.1, 0.4],
    "tasks": ["mnist", "mnist_random_labels"],
    "hidden": [12, 8],
    "width": 10,
    "hidden_layers": 3,
    "examples": 12,
}
SEEDS = (0, 1)


def pictures(shape, *, flatten=False, standardise=False):
    """Ten clouds of images: rows 0 to 79, and 50 to test."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(10, *shape, generator=generator)

    def rows(n):
        y = torch.arange(n) % 10
        x = centres[y] + torch.randn(n, *shape, generator=generator)
        return (x.flatten(1) if flatten else x), y

    return DataSet(*rows(80), *rows(50), task="classification", classes=10)


def two_digits(*, flatten=True):
    full = pictures((1, 3, 3), flatten=flatten)
    sign = [torch.where(y % 2 == 0, 1.0, -1.0)[:, None] for y in (full.y, full.y_test)]
    return DataSet(full.x, sign[0], full.x_test, sign[1])


@pytest.fixture(scope="module")
def made_up():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.data, "cifar10", partial(pictures, (3, 8, 8)))
        for name in ("mnist", "mnist_random_labels"):
            patch.setattr(pl.data, name, partial(pictures, (1, 3, 3)))
        patch.setattr(pl.data, "binary_mnist", two_digits)
        yield


@pytest.fixture(scope="module")
def found(made_up, tmp_path_factory):
    """At paper scale, so that this is the code that runs there; all of it is then REDUCED."""
    run = Run("paper", seeds=SEEDS, changes=SMALL, out=tmp_path_factory.mktemp("run"))
    return {name: perform(find(name), run) for name in NAMES}, run


def test_small_runs_are_marked_and_the_page_is_written(found, tmp_path):
    for artifact in found[0].values():
        assert artifact.reduced and artifact.verdict != "reproduced" and "seeds" in artifact.reductions
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    size = {"channels": [4, 6], "dense": [5], "side": 4, "rows": 1, "epochs": 1, "seeds": 1}
    with FlopCounterMode(display=False) as counter:
        pl.models.vconv(10, channels=(3, 4, 6), dense=(5,), size=4, bias=True)(torch.zeros(1, 3, 4, 4))
    assert deep_gated_images._passes(size, 1) == counter.get_total_flops()


# --- CIFAR-10 --------------------------------------------------------------------------------------------------


def by_hand(state, x, beta=None, epsilon=0.0, gates=None):
    """The network of Experiments 6 and 7 from its weights; without β its units are ReLUs, or read `gates`."""
    scores = []
    for k in range(1, 7):
        kind = "conv" if k < 5 else "linear"
        x = x.flatten(1) if k == 5 else x
        weight, bias = state[f"{kind}{k}.weight"], state[f"{kind}{k}.bias"]
        q = F.conv2d(x, weight, bias, padding=1) if k < 5 else F.linear(x, weight, bias)
        scores.append((1 + epsilon) * torch.sigmoid(beta * q) if beta is not None else (q > 0).to(q.dtype))
        x = q * (scores[-1] if gates is None else gates[k - 1])
    return (F.linear(x, state["output.weight"], state["output.bias"]) if "output.weight" in state else None), scores


def shrunk():
    data = pictures((3, 8, 8)).subsample(SMALL["rows"], n_test=SMALL["rows_test"], seed=0)
    x, x_test = (t.unflatten(-1, (4, 2)).unflatten(-3, (4, 2)).mean((-1, -3)) for t in (data.x, data.x_test))
    return x, data.y, x_test, data.y_test


def plainly(net, seed):
    """Train one network from a seed with nothing but autograd."""
    x, y, x_test, y_test = shrunk()
    train_plainly(
        net.reinitialise(seed),
        x,
        y,
        steps=9,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=20,
        seed=seed,
        lr=5e-3,
    )
    return net.eval(), x_test, y_test


def percent(output, y):
    return 100 * float((output.argmax(1) == y).double().mean())


def test_a_row_of_the_table_is_a_plain_training(found):
    arrays = found[0]["dgn.tab4"].arrays
    template = pl.models.vconv(10, channels=(3, 4, 4, 4, 4), dense=(6, 6), size=4, bias=True)
    net = pl.models.gated_twin(template, "soft_relu", example=shrunk()[0][:2], beta=8.0, epsilon=0.4)
    net, x_test, y_test = plainly(net, 1)
    state = net.values.state_dict()
    soft, _ = by_hand(state, x_test, beta=8.0, epsilon=0.4)
    hard, _ = by_hand(state, x_test)
    names = list(found[0]["dgn.tab4"].metrics)
    assert arrays["test"][names.index("β = 8, ε = 0.4"), 1, -1] == pytest.approx(percent(soft, y_test))
    assert arrays["hard"][1, 1, 1] == pytest.approx(percent(hard, y_test))
    told = found[0]["dgn.tab4"].metrics["β = 8, ε = 0.4"]["test, best epoch"]["seeds"]
    assert told == pytest.approx(arrays["test"][names.index("β = 8, ε = 0.4"), :, 1:].max(1))


def test_only_the_gates_learn(found):
    arrays = found[0]["dgn.exp6"].arrays
    row = deep_gated_images._gates_only("soft")
    template = pl.models.vconv(10, channels=(3, 4, 4, 4, 4), dense=(6, 6), size=4, bias=True)
    net = pl.models.gated_twin(template, row.kind, example=shrunk()[0][:2], **row.options)
    drawn = {k: v.clone() for k, v in net.reinitialise(1).values.state_dict().items()}
    first = {k: v.clone() for k, v in net.source.network.state_dict().items()}
    net, x_test, y_test = plainly(net, 1)
    assert all(torch.equal(v, drawn[k]) for k, v in net.values.state_dict().items())
    learned = net.source.network.state_dict()
    assert all(not torch.equal(v, first[k]) for k, v in learned.items())
    _, gates = by_hand(learned, x_test, beta=4.0, epsilon=0.1)
    output, _ = by_hand(drawn, x_test, gates=gates)
    assert arrays["test"][0, 1, -1] == pytest.approx(percent(output, y_test))


def test_both_experiments_share_the_linear_network(found):
    assert np.array_equal(found[0]["dgn.exp6"].arrays["test"][-1], found[0]["dgn.tab4"].arrays["test"][0])


def test_a_run_that_was_cut_off_ends_the_same_and_keeps_numbers_only(found, tmp_path):
    class Cut(Exception):
        pass

    calls = []

    def stop(what, done, total):
        calls.append(what)
        if len(calls) == 8:  # in the middle of the second row
            raise Cut

    changes = SMALL | {"gates": ["soft"]}
    with pytest.raises(Cut):
        perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path, progress=stop))
    again = perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path))
    whole = found[0]["dgn.exp6"].arrays["test"]
    assert np.array_equal(again.arrays["test"], whole[[0, -1]])
    third = perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path))
    assert np.array_equal(third.arrays["test"], again.arrays["test"])
    assert len(list(tmp_path.rglob("accuracies.json"))) == 2 * len(SEEDS) and not list(tmp_path.rglob("*.safetensors"))


# --- figure 5 --------------------------------------------------------------------------------------------------


def test_losses_on_mnist_are_those_of_plain_trainings(found):
    arrays = found[0]["dgn.fig5"].arrays
    data = pictures((1, 3, 3), flatten=True).subsample(60, n_test=40, seed=0)
    final = []
    for build in (pl.models.galu, pl.models.relu):
        net = build(9, (12, 8), 10, init="he").reinitialise(1)
        train_plainly(
            net,
            data.x,
            data.y,
            steps=9,
            loss=F.cross_entropy,
            optimizer=torch.optim.Adam,
            batch_size=20,
            seed=1,
            lr=5e-3,
        )
        final.append(float(F.cross_entropy(net(data.x), data.y).detach()))
        index = len(final) - 1
        assert arrays["test"][0, index, 1, -1] == pytest.approx(percent(net(data.x_test), data.y_test))
    assert arrays["loss"][0, :, 1, -1] == pytest.approx(final, rel=1e-4)
    faster = found[0]["dgn.fig5"].claims[0].measured[1]
    assert faster == pytest.approx(arrays["loss"][0, 0, 1, 1:].mean() / arrays["loss"][0, 1, 1, 1:].mean(), rel=1e-5)


# --- figures 6, 7 and 8 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(found):
    return deep_gated_training.train_all(found[1], found[1].sizes_of("dgn.fig6"))


def rows_of(trained):
    negative, positive = ((trained.data.y[:, 0] == s).nonzero()[:6, 0] for s in (-1, 1))
    rows = torch.cat([negative, positive])
    return trained.data.x[rows].double(), trained.data.y[rows, 0].double().numpy()


def jacobian(net, x, parameters):
    rows = [torch.autograd.grad(f, parameters, retain_graph=True) for f in net(x)[:, 0]]
    return np.stack([np.concatenate([g.numpy().ravel() for g in row]) for row in rows])


def test_nu_is_that_of_the_jacobian(found, trained):
    x, y = rows_of(trained)
    arrays = found[0]["dgn.fig8"].arrays
    assert arrays["epochs"].tolist() == trained.epochs == [0, 1, 2, 3]
    soft = trained.networks("soft-GaLU")[1][2]
    everything = jacobian(soft, x, list(soft.parameters()))
    gates = jacobian(soft, x, list(soft.source.parameters()))
    for name, J in (("nu", everything), ("nu_gates", gates)):
        K = J @ J.T
        value = y @ np.linalg.solve(K, y)
        measured = arrays["nu"][0, :, 1, 2] if name == "nu" else arrays["nu_gates"][:, 1, 2]
        assert measured == pytest.approx([value, value * np.trace(K)], rel=1e-5)


def test_nu_of_the_path_kernel_counts_paths(found, trained):
    x, y = rows_of(trained)
    net = trained.networks("soft-ReLU")[0][-1]
    z, shared = x, x @ x.T
    for k in (1, 2, 3):
        q = F.linear(z, net.values.get_parameter(f"linear{k}.weight"))
        g = 1.1 * torch.sigmoid(4 * q)
        z, shared = q * g, shared * (g @ g.T)
    M = shared.detach().numpy()
    value = y @ np.linalg.solve(M, y)
    i = deep_gated_training.NETWORKS.index("soft-ReLU")
    assert found[0]["dgn.fig6"].arrays["nu"][i, :, 0, -1] == pytest.approx([value, value * np.trace(M)], rel=1e-5)


def test_singular_kernels_are_missing_values():
    assert all(math.isnan(v) for v in deep_gated_training._nu(torch.ones(3, 3).double(), torch.ones(3)))


def test_gates_come_from_where_they_should(trained):
    x, _ = rows_of(trained)
    relu, learned, copied = (
        trained.networks(name)[1] for name in ("ReLU", deep_gated_training.LEARNED, deep_gated_training.COPIED)
    )
    for mine, theirs in ((learned[0], relu[-1]), (learned[-1], relu[-1]), (copied[-1], relu[0])):
        for a, b in zip(mine.gates(x).values(), theirs.gates(x).values()):
            assert torch.equal(a, b)
    start, end, other = (dict(net.values.named_parameters()) for net in (learned[0], learned[-1], relu[0]))
    assert all(not torch.equal(start[k], end[k]) and not torch.equal(start[k], other[k]) for k in start)


def test_signs_and_losses_on_the_test_set(found, trained):
    arrays = found[0]["dgn.fig7"].arrays
    data = trained.data
    for i, name in enumerate(deep_gated_training.NETWORKS):
        # in float32, as trained: with ±σ weights some gates of so small a network are ties that rounding breaks
        f = trained.networks(name)[0][-1].float()(data.x_test).detach()
        assert arrays["right"][i, 0] == pytest.approx(100 * float((f.sign() == data.y_test).double().mean()))
        assert arrays["test"][i, 0, -1] == pytest.approx(float((f - data.y_test).square().mean()), rel=1e-4)
