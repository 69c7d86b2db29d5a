"""Hard networks from soft ones: what each method gives, what the report says, what is refused."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import pathlens as pl
from pathlens import errors
from pathlens.hardening import METHODS, cell_bound
from pathlens.hardening.methods import _best
from pathlens.hardening.report import score
from pathlens.models.gates import Hard
from pathlens.training.inputs import Data, DataReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def circle():
    return pl.data.circle(256, bottom=6, test_points=100)


@pytest.fixture(scope="module")
def soft(circle):
    net = pl.models.dlgn(2, (16,) * 3, piecewise_constant=True, bias=True, seed=0)
    pl.train(net, circle, epochs=400, lr=5e-3, stopping=pl.training.Stopping(loss_below=0.01), progress=False)
    return net


@pytest.fixture(scope="module")
def hardened(soft, circle):
    held = (circle.x_test, circle.y_test)
    epochs = dict.fromkeys(METHODS, 10) | {"recipe": 80}
    return {
        m: pl.harden(soft, (circle.x, circle.y), method=m, epochs=epochs[m], lr=5e-3, validation=held, progress=False)
        for m in METHODS
    }


def loss(net, x, y):
    with torch.no_grad():
        return float((net(x) - y).square().double().mean())


def test_every_method_gives_hard_gates_and_leaves_the_network_alone(soft, circle, hardened):
    before = copy.deepcopy(soft.state_dict())
    soft.train()
    again = pl.harden(soft, (circle.x, circle.y), method="anneal", epochs=2, progress=False)
    assert soft.training and soft.gate.label == "soft β=4"
    assert all(torch.equal(t, before[n]) for n, t in soft.state_dict().items())
    for made in [again, *hardened.values()]:
        assert isinstance(made.network.gate, Hard) and not made.network.training
        gates = torch.cat([g.flatten() for g in made.network.gates(circle.x).values()])
        assert set(gates.unique().tolist()) <= {0.0, 1.0}


def test_the_recipe_brings_a_hundredfold_cost_under_twofold(soft, circle, hardened):
    """The circle's soft network is trained to .01; switched directly it loses nearly all."""
    r = hardened["recipe"].report
    assert r.soft.loss < 0.01
    assert r.direct.loss > 10 * r.soft.loss
    assert r.hard.loss < 2 * r.soft.loss
    assert hardened["refit"].report.hard.loss < 0.5 * hardened["direct"].report.hard.loss


def test_the_numbers_of_the_report(soft, circle, hardened):
    for method, made in hardened.items():
        r, net = made.report, made.network
        assert r.method == method
        assert r.soft.loss == pytest.approx(loss(soft, circle.x, circle.y), rel=1e-5)
        assert r.direct.loss == pytest.approx(loss(soft.with_gate("hard"), circle.x, circle.y), rel=1e-5)
        assert r.hard.loss == pytest.approx(loss(net, circle.x, circle.y), rel=1e-5)
        assert r.validation["hard"].loss == pytest.approx(loss(net, circle.x_test, circle.y_test), rel=1e-5)
        f, g = net(circle.x).detach().double(), soft(circle.x).detach().double()
        assert r.agreement == pytest.approx(1 - float((f - g).square().sum() / (g - g.mean()).square().sum()), rel=1e-6)
        assert r.margin == 0.25
        for n, shares in ((soft, r.near), (net, r.near_after)):
            for site, q in n.preactivations(circle.x).items():
                assert shares[site] == pytest.approx(float((q.abs() < 0.25).double().mean()))
        assert r.bound.loss <= r.hard.loss * (1 + 1e-6)
    direct = hardened["direct"]
    assert direct.report.direct.loss == direct.report.hard.loss
    assert all(torch.equal(a, b) for a, b in zip(direct.network.parameters(), soft.parameters()))
    text = repr(hardened["recipe"].report)
    for word in ("soft", "direct", "hard", "bound", "agreement", "held out", "relu3@0", "best constant on each cell"):
        assert word in text


def test_the_figure_shows_every_level(hardened):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = hardened["recipe"].plot()
    heights = [y for line in ax.lines for y in line.get_ydata()]
    assert ax.get_yscale() == ("log" if max(heights) > 10 * min(heights) else "linear")
    assert {"annealing", "soft", "hard", "switched directly"} <= set(ax.get_legend_handles_labels()[1])
    plt.close(ax.figure)


# --- what the cells allow --------------------------------------------------------------------------------------


def by_cell(net, x, y):
    """Rows of each cell, by plain comparison."""
    bits = torch.cat([g.flatten(1) for g in net.gates(x, hard=True).values()], 1).int().tolist()
    groups = {}
    for row, key in enumerate(map(tuple, bits)):
        groups.setdefault(key, []).append(row)
    return [(x[i].double().numpy(), y[i].double().numpy()) for i in groups.values()]


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_by_hand(seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(120, 2, generator=g), torch.randn(120, 2, generator=g)
    labels = torch.randint(0, 3, (120,), generator=g)
    constant = pl.models.dlgn(2, (3, 2), 2, piecewise_constant=True, seed=seed)
    groups = by_cell(constant, x, y)
    expected = sum(((t - t.mean(0)) ** 2).sum() for _, t in groups) / 240
    bound = cell_bound(constant, x, y)
    assert bound.loss == pytest.approx(expected, rel=1e-10) and bound.cells == len(groups)
    assert cell_bound(constant, x, y, loss="half_mse").loss == pytest.approx(expected / 2, rel=1e-10)
    entropy = 0.0
    for _, t in by_cell(constant, x, labels):
        for k in np.unique(t):
            share = (t == k).mean()
            entropy -= len(t) * share * math.log(share) / 120
    assert cell_bound(constant, x, labels, loss="cross_entropy").loss == pytest.approx(entropy, rel=1e-10)
    for bias, what in ((False, "linear"), (True, "affine")):
        net = pl.models.dlgn(2, (3, 2), 2, bias=bias, seed=seed)
        error = 0.0
        for a, t in by_cell(net, x, y):
            a = np.hstack([a, np.ones((len(a), 1))]) if bias else a
            error += ((a @ np.linalg.lstsq(a, t, rcond=None)[0] - t) ** 2).sum()
        bound = cell_bound(net, x, y)
        assert bound.loss == pytest.approx(error / 240, rel=1e-9) and bound.what == f"best {what} function on each cell"
        assert cell_bound(net, x, labels, loss="cross_entropy").loss is None


def test_values_without_biases_reach_the_bound_of_linear_functions():
    """Two cells, and values as wide as they need to be: a constant on each would fit the targets, and cannot be had."""
    net = pl.models.dlgn(1, (2,), gate="hard", seed=0).double()
    with torch.no_grad():
        net.source.network.get_parameter("linear1.weight").copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[1.0], [2.0], [-1.0], [-2.0], [0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0], [1.0], [3.0], [3.0], [2.0]])
    bound = cell_bound(net, x, y)
    assert bound.loss == pytest.approx((0.2 + 9 * 0.2 + 4) / 5)
    with torch.no_grad():
        net.values.get_parameter("linear1.weight").copy_(torch.tensor([[1.0], [-1.0]]))
        net.values.get_parameter("output.weight").copy_(torch.tensor([[0.6, 1.8]]))
        assert float((net(x) - y).square().mean()) == pytest.approx(bound.loss)


@pytest.mark.parametrize("norm, what", [(nn.BatchNorm1d, "affine"), (nn.Identity, "linear")])
def test_a_batch_norm_adds_constants_too(norm, what):
    template = nn.Sequential(nn.Linear(2, 4, bias=False), norm(4), nn.ReLU(), nn.Linear(4, 1, bias=False))
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    net = pl.gated_twin(template, "dlgn", example=x[:4]).eval()
    assert cell_bound(net, x, x[:, :1]).what == f"best {what} function on each cell"


def test_bounds_are_of_networks_in_eval_mode_with_rows_first():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    net = pl.gated_twin(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), "dlgn", x[:2])
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(errors.RecordError, match=r"train mode.*net\.eval"):
        cell_bound(net, x, y)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())

    class PlacesFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 4), nn.Linear(12, 1)

        def forward(self, x):
            return self.b(torch.relu(self.a(x.permute(1, 0, 2))).permute(1, 0, 2).flatten(1))

    with pytest.raises(errors.ShapeError, match="Rows must stay the first dimension"):
        cell_bound(pl.gated_twin(PlacesFirst(), "dlgn", x[:2, :, None]), x[..., None], y)


def test_open_gates_have_one_cell():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x[:, :1].abs()
    best = x @ torch.linalg.lstsq(x, y).solution
    bound = cell_bound(pl.models.dln(3, (4, 4), seed=0).double(), x, y)
    assert bound.cells == 1 and bound.loss == pytest.approx(float((best - y).square().mean()))


def test_max_pooled_values_bend_inside_a_cell_and_have_no_bound():
    x = torch.randn(300, 1, 2, generator=torch.Generator().manual_seed(0))
    y = x.amax((1, 2))[:, None]
    template = nn.Sequential(
        nn.Conv1d(1, 1, 1), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    )
    net = pl.gated_twin(template, "soft_galu", example=x[:2], gate="hard", seed=0)
    with torch.no_grad():
        for p in net.values.parameters():
            p.copy_(torch.ones_like(p) if p.ndim > 1 else torch.zeros_like(p))
        net.source.network.get_parameter("3.bias").fill_(100.0)  # one cell, in which the network is max(x1, x2)
    assert torch.allclose(net(x), y, atol=1e-6)
    bound = cell_bound(net, x, y)
    assert bound.cells == 1 and bound.loss is None and "max-pooling" in bound.what


def test_cells_of_one_class_each_have_a_bound_of_zero_and_not_of_minus_zero():
    net = pl.models.dlgn(2, hidden=(4,), piecewise_constant=True, seed=0)
    bound = cell_bound(net, torch.eye(2), torch.zeros(2, dtype=torch.long), loss="cross_entropy")
    assert str(bound.loss) == "0.0"


# --- labels, images, frozen halves -----------------------------------------------------------------------------


def test_labels_never_end_worse_on_held_out_rows_than_switched_directly():
    data = pl.data.digits(flatten=True, standardise=True)
    x, y, held = data.x[:500], data.y[:500], (data.x_test, data.y_test)
    net = pl.models.dlgn(64, (24, 24), 10, bias=True, seed=0)
    pl.train(net, (x, y), epochs=8, lr=3e-3, loss="cross_entropy", progress=False)
    made = pl.harden(net, (x, y), epochs=5, validation=held, progress=False)
    r = made.report
    assert r.kept in ("trained gates", "fitted values")
    assert r.validation["hard"].accuracy >= r.validation["direct"].accuracy
    assert r.validation["hard"].accuracy > r.validation["soft"].accuracy - 0.02
    assert r.validation["hard"].accuracy == pytest.approx(
        float((made.network(held[0]).argmax(1) == held[1]).double().mean())
    )
    same = made.network(held[0]).argmax(1) == net(held[0]).argmax(1)
    assert r.validation_agreement == pytest.approx(float(same.double().mean()))
    assert set(made.phases) == {"straight-through", "values alone"}


class Told(nn.Module):
    """Outputs that were written down beforehand, whatever the inputs are."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = torch.tensor(outputs)

    def forward(self, x):
        return self.outputs[: len(x)]


def test_the_choice_is_by_accuracy_then_loss_then_the_earlier_phase():
    reader = DataReader(pl.models.dlgn(2, (3,), 2), "cross_entropy", CPU)
    rows = reader.read((torch.zeros(4, 2), torch.tensor([0, 0, 1, 1])))
    sure = Told([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0], [0.0, 9.0]])  # three of four right, dear loss
    unsure = Told([[0.1, 0.0], [0.0, 0.1], [0.1, 0.0], [0.0, 0.1]])  # two of four, cheap loss
    assert _best({"direct switch": sure, "fitted values": unsure}, rows, "cross_entropy") == "direct switch"
    surer = Told([[9.0, 0.0], [8.0, 9.0], [0.0, 9.0], [0.0, 9.0]])
    assert _best({"trained gates": sure, "fitted values": surer}, rows, "cross_entropy") == "fitted values"
    assert _best({"trained gates": surer, "fitted values": sure}, rows, "cross_entropy") == "trained gates"
    assert _best({"trained gates": sure, "fitted values": sure}, rows, "cross_entropy") == "trained gates"
    real = Data(rows.x, torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
    near, far = Told([[0.0], [1.0], [2.0], [3.5]]), Told([[0.0], [1.0], [2.0], [4.0]])
    assert _best({"direct switch": near, "fitted values": far}, real, "mse") == "direct switch"


@pytest.mark.parametrize("held", [False, True])
def test_a_recipe_that_only_disturbs_leaves_the_direct_switch(held):
    """At a rate of 10 training destroys what it is given; the recipe notices, with held-out rows and without."""
    data = pl.data.digits(flatten=True, standardise=True)
    x, y, validation = data.x[:300], data.y[:300], (data.x_test, data.y_test) if held else None
    net = pl.models.dlgn(64, (16, 16), 10, bias=True, seed=0)
    pl.train(net, (x, y), epochs=8, lr=5e-3, loss="cross_entropy", progress=False)
    options = {"epochs": 2, "lr": 10.0, "validation": validation, "progress": False}
    made = pl.harden(net, (x, y), **options)
    assert made.report.kept == "direct switch" and "direct switch" in repr(made.report)
    assert made.report.hard == made.report.direct
    assert all(torch.equal(a, b) for a, b in zip(made.network.parameters(), net.parameters()))
    if not held:
        assert (
            pl.harden(net, (x, y), method="straight_through", **options).report.hard.accuracy
            < made.report.hard.accuracy
        )


@pytest.mark.parametrize("method", METHODS)
def test_convolutions_with_batch_norm(method):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (60,), generator=g)
    x = torch.randn(60, 1, 6, 6, generator=g) + y[:, None, None, None] * torch.linspace(-1, 1, 6)
    template = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )
    net = pl.gated_twin(template, "dlgn", x[:2], seed=0)
    pl.train(net, (x, y), loss="cross_entropy", epochs=15, lr=1e-2, batch_size=20, progress=False)
    made = pl.harden(net, (x, y), method=method, epochs=5, lr=5e-3, batch_size=20, progress=False)
    assert made.report.hard.accuracy >= (made.report.direct.accuracy if method != "direct" else 0.0) - 0.02
    assert made.report.bound.loss is None
    made.report.near["blocks.12.relu@0"] = made.report.near_after["blocks.12.relu@0"] = 0.5
    assert "    blocks.12.relu@0  50.00% → 50.00%" in repr(made.report)  # long names do not run into numbers
    if method == "refit":  # gates keep their batch statistics
        for a, b in zip(made.network.source.state_dict().values(), net.source.state_dict().values()):
            assert torch.equal(a, b)


def test_halves_that_are_frozen_stay_frozen(circle):
    frozen = pl.models.dlgn(2, (8, 8), frozen=True, seed=0)
    made = pl.harden(frozen, (circle.x, circle.y), epochs=3, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(made.network.source.parameters(), frozen.source.parameters()))
    gates = pl.models.gates_only(2, (8, 8), seed=0)
    made = pl.harden(gates, (circle.x, circle.y), epochs=3, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(made.network.values.parameters(), gates.values.parameters()))


def test_double_precision_and_the_same_seed_give_the_same_network(circle):
    x, y = circle.x.double(), circle.y.double()
    net = pl.models.dlgn(2, (8, 8), seed=0).double()
    a, b = (pl.harden(net, (x, y), epochs=3, seed=4, progress=False).network for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert next(a.parameters()).dtype == torch.float64


# --- bad input -------------------------------------------------------------------------------------------------


class NoBeta(pl.models.Gate):
    """A soft gate without a buffer beta."""

    def forward(self, q):
        return torch.sigmoid(q)


def dlgn(**options):
    return pl.models.dlgn(2, (4,), seed=0, **options)


def broken():
    net = dlgn()
    with torch.no_grad():
        next(net.parameters()).fill_(math.nan)
    return net


X, Y = torch.randn(10, 2), torch.randn(10, 1)
BAD = [
    (lambda: pl.harden(dlgn(gate="hard"), (X, Y)), errors.OptionError, "hard already"),
    (lambda: pl.harden(dlgn(gate="straight_through"), (X, Y)), errors.OptionError, "hard already"),
    (lambda: pl.harden(pl.models.relu(2, (4,)), (X, Y)), errors.ConversionError, "own pre-activations"),
    (lambda: pl.harden(pl.models.soft_relu(2, (4,)), (X, Y)), errors.ConversionError, "own pre-activations"),
    (lambda: pl.harden(nn.Linear(2, 1), (X, Y)), errors.ConversionError, "got Linear"),
    (lambda: pl.harden(dlgn(), (X, Y), method="recpe"), errors.UnknownNameError, "Did you mean 'recipe'"),
    (lambda: pl.harden(dlgn(), (X, Y), loss="mes"), errors.UnknownNameError, "Did you mean 'mse'"),
    (lambda: pl.harden(dlgn(), (X, Y[:9])), errors.ShapeError, "10 inputs and 9 targets"),
    (lambda: pl.harden(dlgn(), (X[:, :1], Y)), errors.ShapeError, "does not accept"),
    (lambda: pl.harden(dlgn(), (X * math.nan, Y)), errors.NotFiniteError, "row 0"),
    (lambda: pl.harden(broken(), (X, Y)), errors.NotFiniteError, "diverge"),
    (lambda: pl.harden(dlgn(), (X, Y), validation=(X, Y[:3])), errors.ShapeError, "3 targets"),
    (lambda: pl.harden(dlgn(), (X, Y), validation=(X, Y, torch.ones(10))), errors.OptionError, "without weights"),
    (lambda: pl.harden(dlgn(), (X, torch.full((10,), 3))), errors.LabelError, "labels run"),
    (lambda: pl.harden(dlgn(), (X, Y), epochs=0), errors.OptionError, "epochs must be at least 1"),
    (lambda: pl.harden(dlgn(), (X, Y), trained="values"), TypeError, "unexpected keyword argument 'trained'"),
    (lambda: pl.harden(dlgn(gate=NoBeta()), (X, Y)), errors.OptionError, "NoBeta has no β.*with_gate"),
]


def test_constant_targets_have_no_share_that_is_explained():
    """They differ from their mean by rounding, which was divided by."""
    y = torch.full((101, 1), 0.1, dtype=torch.float64)
    assert score(y + 0.01, y, "mse").r2 == 0 and score(y, y, "mse").r2 == 1


@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i}-{b[1].__name__}" for i, b in enumerate(BAD)])
def test_bad_input_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_bounds_do_not_depend_on_the_units_of_the_inputs():
    net = pl.models.dlgn(2, hidden=(4,), gate="hard", bias=True, seed=0).double()
    x = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1e8, 1e-9], dtype=torch.float64)
    y = x[:, :1] * 1e-8 + x[:, 1:] * 1e9  # affine: any cells allow no loss at all
    assert cell_bound(net, x, y).loss < 1e-20


@pytest.mark.parametrize("piecewise_constant", [False, True])
def test_bounds_take_targets_without_a_second_dimension(piecewise_constant):
    net = pl.models.dlgn(2, hidden=(4,), piecewise_constant=piecewise_constant, seed=0)
    x, y = torch.randn(20, 2), torch.randn(20)
    assert cell_bound(net, x, y) == cell_bound(net, x, y[:, None])


def test_every_phase_has_a_checkpoint_of_its_own(circle, tmp_path):
    net = pl.models.dlgn(2, (4,), 2, seed=0)
    rows = {"data": (circle.x, (circle.y[:, 0] > 0).long()), "epochs": 2, "progress": False}
    plain, saved, again = (pl.harden(net, **rows, **more) for more in ({}, *({"checkpoints": tmp_path},) * 2))
    assert plain.report.hard == saved.report.hard == again.report.hard
    assert {path.name for path in tmp_path.iterdir()} == {"straight-through", "values"}


def test_inference_mode_changes_nothing():
    x, y = (torch.randn(30, k, generator=torch.Generator().manual_seed(k)) for k in (3, 1))
    net = pl.models.dlgn(3, (6,), bias=True, seed=0)
    want = pl.harden(net, (x, y), epochs=3, progress=False).report
    with torch.inference_mode():
        report = pl.harden(net, (x, y), epochs=3, progress=False).report
        t = pl.train(net, (x, y), epochs=2, lr=0.01, progress=False)
    assert report.hard == want.hard and report.bound == want.bound
    assert t.history["loss"][-1] < t.history["loss"][0]
    x.requires_grad_()
    assert cell_bound(net, x, y) == cell_bound(net, x.detach(), y)


@pytest.mark.parametrize("form", ["DataSet", "Dataset", "DataLoader"])
def test_data_are_taken_in_every_form(circle, form):
    net = pl.models.dlgn(2, (4,), seed=0)
    pairs = torch.utils.data.TensorDataset(circle.x, circle.y)
    data = {"DataSet": circle, "Dataset": pairs, "DataLoader": torch.utils.data.DataLoader(pairs, 50)}[form]
    want, found = (pl.harden(net, each, epochs=1, progress=False).report for each in ((circle.x, circle.y), data))
    assert found.hard == want.hard and found.bound == want.bound


def test_phases_keep_what_is_asked_for():
    made = pl.harden(dlgn(), (X, Y), method="straight_through", epochs=3, keep=[0, 3], progress=False)
    assert [moment.epoch for moment in made.phases["straight-through"].moments] == [0, 3]
