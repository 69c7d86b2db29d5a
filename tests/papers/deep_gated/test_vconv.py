"""Experiments 6 and 7 on CIFAR-10, small and on made-up images, against definitions written out here."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_clouds import SEEDS, SMALL, made_up_images, percent, pictures
from torch.utils.flop_counter import FlopCounterMode

import pathlens as pl
from pathlens.papers.deep_gated.exp6 import gates_only
from pathlens.papers.deep_gated.vconv import conv_flops
from pathlens.papers.experiment import Run, find, perform
from pathlens.testing.plain_loop import train_plainly


def test_operations_are_those_that_torch_counts():
    size = {"channels": [4, 6], "dense": [5], "side": 4, "rows": 1, "epochs": 1, "seeds": 1}
    with FlopCounterMode(display=False) as counter:
        pl.models.vconv(10, channels=(3, 4, 6), dense=(5,), size=4, bias=True)(torch.zeros(1, 3, 4, 4))
    assert conv_flops(size, 1) == counter.get_total_flops()


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


def test_a_row_of_the_table_is_a_plain_training(on_images):
    arrays = on_images("dgn.tab4").arrays
    template = pl.models.vconv(10, channels=(3, 4, 4, 4, 4), dense=(6, 6), size=4, bias=True)
    net = pl.models.gated_twin(template, "soft_relu", example=shrunk()[0][:2], beta=8.0, epsilon=0.4)
    net, x_test, y_test = plainly(net, 1)
    state = net.values.state_dict()
    soft, _ = by_hand(state, x_test, beta=8.0, epsilon=0.4)
    hard, _ = by_hand(state, x_test)
    names = list(on_images("dgn.tab4").metrics)
    assert arrays["test"][names.index("β = 8, ε = 0.4"), 1, -1] == pytest.approx(percent(soft, y_test))
    assert arrays["hard"][1, 1, 1] == pytest.approx(percent(hard, y_test))
    best_epoch = on_images("dgn.tab4").metrics["β = 8, ε = 0.4"]["test, best epoch"]["seeds"]
    assert best_epoch == pytest.approx(arrays["test"][names.index("β = 8, ε = 0.4"), :, 1:].max(1))


def test_only_the_gates_learn(on_images):
    arrays = on_images("dgn.exp6").arrays
    row = gates_only("soft")
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


def test_both_experiments_share_the_linear_network(on_images):
    assert np.array_equal(on_images("dgn.exp6").arrays["test"][-1], on_images("dgn.tab4").arrays["test"][0])


def test_a_run_that_was_cut_off_ends_the_same_and_keeps_numbers_only(on_images, tmp_path):
    class Cut(Exception):
        pass

    calls = []

    def stop(what, done, total):
        calls.append(what)
        if len(calls) == 8:  # in the middle of the second row
            raise Cut

    changes = SMALL | {"gates": ["soft"]}
    with made_up_images():
        with pytest.raises(Cut):
            perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path, progress=stop))
        again = perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path))
    whole = on_images("dgn.exp6").arrays["test"]
    assert np.array_equal(again.arrays["test"], whole[[0, -1]])
    third = perform(find("dgn.exp6"), Run("paper", seeds=SEEDS, changes=changes, out=tmp_path))
    assert np.array_equal(third.arrays["test"], again.arrays["test"])
    assert len(list(tmp_path.rglob("accuracies.json"))) == 2 * len(SEEDS) and not list(tmp_path.rglob("*.safetensors"))
