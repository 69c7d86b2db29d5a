"""Weights of rows, penalties, early stopping, and training one half of a gated network."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathlens as pl
from pathlens import errors
from pathlens.testing.plain_loop import train_plainly
from pathlens.training import Checkpoints, Keep, Stopping
from pathlens.training.inputs import mse


def worst(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


def sines(n=40, seed=0):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.sin(3 * x[:, :1])


def labelled(n=40):
    x, _ = sines(n)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


# --- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["mse", "half_mse", "cross_entropy"])
def test_an_integer_weight_is_that_many_copies_of_the_row(loss):
    x, y = labelled() if loss == "cross_entropy" else sines()
    w = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(2))
    nets = [pl.models.dlgn(2, (6, 5), 3 if loss == "cross_entropy" else 1, seed=1).double() for _ in range(2)]
    common = {"epochs": 100, "lr": 3e-3, "batch_size": None, "loss": loss, "progress": False}
    weighted = pl.train(nets[0], (x, y, w), **common)
    repeated = pl.train(nets[1], (x.repeat_interleave(w, 0), y.repeat_interleave(w, 0)), **common)
    assert worst(*nets) <= 1e-12
    for name in repeated.history:
        assert weighted.history[name] == pytest.approx(repeated.history[name], abs=1e-12)


def test_weighted_batches_equal_a_plain_loop():
    x, y = sines()
    w = torch.rand(40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def plain(output, both):
        rows = (output - both[:, :1]).square().mean(1)
        return (rows * both[:, 1]).mean() / w.mean()

    pattern = pl.models.relu(2, (6, 5)).double()
    runs = pl.train(pattern, (x, y, w), epochs=60, lr=1e-3, batch_size=16, seeds=[3, 4], progress=False)
    for seed, trained in zip([3, 4], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone,
            x,
            torch.cat([y, w[:, None]], 1),
            steps=180,
            loss=plain,
            optimizer=torch.optim.Adam,
            batch_size=16,
            seed=seed,
            lr=1e-3,
        )
        assert worst(trained, alone) <= 1e-12
        assert runs[seed - 3].history["loss"][-1] == pytest.approx(
            float(plain(trained(x), torch.cat([y, w[:, None]], 1)).detach()), rel=1e-12
        )


def test_a_loss_of_ones_own_takes_weights_and_equal_weights_change_nothing():
    x, y = sines()
    nets = [pl.models.relu(2, (6,), seed=0).double() for _ in range(2)]
    for net, w in zip(nets, (None, torch.full((40,), 0.3))):
        pl.train(net, (x, y, w), loss=F.smooth_l1_loss, epochs=20, batch_size=16, progress=False)
    assert worst(*nets) <= 1e-12


def test_running_loss_is_weighted_and_batches_without_weight_are_skipped():
    x, y = sines()
    w = torch.zeros(40)
    w[:3] = torch.tensor([1.0, 2.0, 3.0])
    net = pl.models.relu(2, (6,), seed=0).double()
    before = float(((net(x) - y).square()[:, 0].detach() * w).sum() / w.sum())
    t = pl.train(
        net,
        (x, y, w),
        epochs=1,
        batch_size=2,
        lr=1e-12,
        optimizer="sgd",
        keep=Keep(evaluate="running"),
        progress=False,
    )
    assert t.history["loss"][1] == pytest.approx(before, rel=1e-9)
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_steps_are_on_average_those_of_the_weighted_loss_of_all_rows():
    """One row has nearly all weight: batches without it may not count as much as the one with it."""
    x, y = sines()
    w = torch.ones(40)
    w[7] = 1000.0
    small, all_rows = (pl.models.relu(2, (6,), seed=0).double() for _ in range(2))
    before = torch.cat([p.detach().flatten() for p in small.parameters()])
    common = {"epochs": 1, "optimizer": "sgd", "progress": False}
    pl.train(small, (x, y, w), **common, batch_size=2, lr=1e-9 / 20)  # 20 steps that are too short to see each other
    pl.train(all_rows, (x, y, w), **common, batch_size=None, lr=1e-9)
    moves = [torch.cat([p.detach().flatten() for p in net.parameters()]) - before for net in (small, all_rows)]
    torch.testing.assert_close(*moves, rtol=1e-4, atol=1e-4 * float(moves[1].abs().max()))


# --- penalty ---------------------------------------------------------------------------------------------------


def path_norm(net, strength=0.05):
    """Σ over paths of the product of squared weights."""
    v = torch.ones(2, dtype=torch.float64)
    for name, weight in net.named_parameters():
        if name.startswith("values"):
            v = weight.square() @ v
    return strength * v.sum()


def test_a_penalty_equals_a_plain_loop_and_stays_out_of_the_history():
    x, y = sines()
    pattern = pl.models.dlgn(2, (6, 5)).double()
    runs = pl.train(pattern, (x, y), penalty=path_norm, epochs=60, batch_size=16, seeds=[3, 4], progress=False)
    for seed, t, trained in zip([3, 4], runs, runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone,
            x,
            y,
            steps=180,
            loss=lambda o, t, net=alone: mse(o, t) + path_norm(net),
            optimizer=torch.optim.Adam,
            batch_size=16,
            seed=seed,
            lr=1e-3,
        )
        assert worst(trained, alone) <= 1e-12
        assert t.history["loss"][-1] == pytest.approx(float(mse(trained(x), y).detach()), rel=1e-12)


def test_a_penalty_may_use_frozen_parts_and_buffers():
    x, y = sines()
    net = pl.models.dlgn(2, (6,), frozen=True, seed=0).double()
    pl.train(
        net,
        (x, y),
        epochs=2,
        progress=False,
        penalty=lambda n: n.gate.beta * sum(p.square().sum() for p in n.parameters()),
    )


# --- what is trained -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["values", "gates"])
def test_one_half_is_trained_and_the_other_stays(part):
    x, y = sines()
    net = pl.models.dlgn(2, (6, 5), seed=0).double()
    alone = copy.deepcopy(net)
    for name, p in alone.named_parameters():
        p.requires_grad_(name.startswith({"values": "values.", "gates": "source."}[part]))
    pl.train(net, (x, y), trained=part, epochs=20, batch_size=16, progress=False)
    train_plainly(alone, x, y, steps=60, loss=mse, optimizer=torch.optim.Adam, batch_size=16, seed=0, lr=1e-3)
    assert worst(net, alone) <= 1e-12
    assert net.trained == "both" and all(p.requires_grad for p in net.parameters())


def test_gates_that_are_not_trained_keep_their_batch_statistics():
    x = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    template = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    net = pl.gated_twin(template, "dlgn", x[:2])
    before = {n: t.clone() for n, t in net.state_dict().items()}
    pl.train(net, (x, torch.arange(20) % 3), loss="cross_entropy", trained="values", epochs=2, progress=False)
    for name, t in net.state_dict().items():
        moved = not torch.equal(t, before[name])
        assert moved == (name.startswith("values") and "beta" not in name), name


@pytest.mark.parametrize("inside", [False, True])
def test_hard_gates_that_are_to_learn_are_told_to_have_no_gradient(inside):
    x, y = sines()
    net = pl.models.dlgn(2, (6, 5), gate="hard", seed=0).double()
    before = copy.deepcopy(net)
    with pytest.warns(errors.SignalWarning, match=r"hard gates have no gradient.*with_gate\('soft'\)") as told:
        pl.train(nn.Sequential(net) if inside else net, (x, y), epochs=3, progress=False)
    assert len(told) == 1 and told[0].filename == __file__
    assert worst(net.source, before.source) == 0 < worst(net.values, before.values)


@pytest.mark.parametrize(
    "net",
    [
        lambda: pl.models.relu(2, (6,)),
        lambda: pl.models.dln(2, (6,)),
        lambda: pl.models.galu(2, (6,)),
        lambda: pl.models.dlgn(2, (6,), gate="hard", frozen=True),
        lambda: pl.models.dlgn(2, (6,), gate="straight_through"),
        lambda: pl.models.dlgn(2, (6,), gate="soft"),
    ],
)
def test_gates_that_learn_or_are_frozen_are_not_warned_of(net):
    pl.train(net().double(), sines(), epochs=1, progress=False)  # warnings are errors here


def test_hard_gates_may_stay_while_values_are_trained():
    pl.train(pl.models.dlgn(2, (6,), gate="hard").double(), sines(), epochs=1, trained="values", progress=False)


# --- early stopping --------------------------------------------------------------------------------------------


def noisy(n=48, seed=0):
    x, y = sines(n, seed)
    return x, y + 0.2 * torch.randn(n, 1, generator=torch.Generator().manual_seed(seed + 9), dtype=torch.float64)


def stopped_early(seeds, weights=None, **options):
    return pl.train(
        pl.models.relu(2, (16, 16)).double(),
        (*noisy(), weights),
        epochs=300,
        lr=2e-3,
        batch_size=8,
        seeds=seeds,
        validation=noisy(60, 5),
        stopping=Stopping(patience=7),
        progress=False,
        **options,
    )


def test_each_member_stops_on_its_own_with_its_best_weights():
    x, y = noisy(60, 5)
    runs = stopped_early([0, 1, 2])
    lengths = [len(t.history["validation"]) for t in runs]
    assert len(set(lengths)) > 1 and max(lengths) < 301
    for i, (t, net) in enumerate(zip(runs, runs.networks)):
        seen = t.history["validation"]
        best = min(range(len(seen)), key=seen.__getitem__)
        assert len(seen) - 1 - best == 7
        assert len(t.history["loss"]) == len(seen)
        assert float(mse(net(x), y).detach()) == pytest.approx(seen[best], rel=1e-12)
        alone = stopped_early([i])
        assert worst(net, alone.networks[0]) <= 1e-12
        assert alone[0].history["validation"] == pytest.approx(seen, rel=1e-9)


def test_best_weights_are_given_back_when_epochs_run_out_first():
    x, y = noisy(60, 5)
    net = pl.models.relu(2, (16, 16), seed=0).double()
    t = pl.train(net, noisy(), epochs=40, lr=0.02, batch_size=8, validation=(x, y), stopping=1000, progress=False)
    assert len(t.history["validation"]) == 41
    assert float(mse(net(x), y).detach()) == pytest.approx(min(t.history["validation"]), rel=1e-12)


def test_validation_without_patience_only_follows_and_takes_weights():
    x, y = labelled(30)
    w = torch.rand(30, generator=torch.Generator().manual_seed(0))
    net = pl.models.relu(2, (6,), 3, seed=0).double()
    t = pl.train(net, labelled(), loss="cross_entropy", epochs=3, validation=(x, y, w), progress=False)
    right = (net(x).argmax(1) == y).double()
    assert t.history["validation_accuracy"][-1] == pytest.approx(float((right * w).sum() / w.sum()), rel=1e-6)
    assert len(t.history["validation"]) == 4


class StopAfter:
    def __init__(self, progress):
        self.progress = progress

    def __call__(self, now):
        if self.progress is not None and now > self.progress:
            raise KeyboardInterrupt
        return 1.0

    def __repr__(self):
        return "StopAfter()"


def test_early_stopping_with_weights_and_a_penalty_resumes_to_the_same_bits(tmp_path):
    w = torch.rand(48, generator=torch.Generator().manual_seed(0))

    def go(folder, stop, **options):
        given = {"weights": w, "penalty": partial(path_norm, strength=1e-4)} | options
        saved = Checkpoints(folder, every=5)
        return stopped_early([0, 1, 2], checkpoints=saved, scheduler=StopAfter(stop), **given)

    whole = go(tmp_path / "a", None)
    # past the stop of one member, before that of another
    ends = sorted(len(t.history["loss"]) - 1 for t in whole)
    assert ends[0] + 5 < ends[-1]
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "b", (ends[0] + 5) / 300)
    for folder in ("b", "b", "a"):  # goes on; reads a finished run back
        resumed = go(tmp_path / folder, None)
        for t, u, a, b in zip(whole, resumed, whole.networks, resumed.networks):
            assert t.history == u.history
            assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    with pytest.raises(errors.CheckpointError, match="data"):
        go(tmp_path / "b", None, weights=w + 1)
    with pytest.raises(errors.CheckpointError, match="penalty"):
        go(tmp_path / "b", None, penalty=partial(path_norm, strength=2e-4))


# --- bad input -------------------------------------------------------------------------------------------------

X, Y = torch.randn(10, 2), torch.randn(10, 1)


def refused(net=None, data=(X, Y), **options):
    pl.train(net or pl.models.relu(2, (4,), seed=0), data, epochs=1, progress=False, **options)


BAD = [
    ({"data": (X, Y, torch.ones(9))}, errors.ShapeError, r"\(9,\), expected \(10,\)"),
    ({"data": (X, Y, -torch.ones(10))}, errors.NotFiniteError, "weight 0 is -1"),
    ({"data": (X, Y, torch.full((10,), torch.nan))}, errors.NotFiniteError, "weight 0 is nan"),
    ({"data": (X, Y, torch.zeros(10))}, errors.OptionError, "every weight is zero"),
    (
        {"net": pl.models.dlgn(2, (4,)), "settings": [{"beta": 4}], "beta": lambda progress: 9.0},
        errors.OptionError,
        "settings give β too",
    ),
    ({"stopping": Stopping(patience=3)}, errors.OptionError, r"validation=\(X, y\)"),
    ({"stopping": 0, "validation": (X, Y)}, errors.OptionError, "patience must be an integer of at least 1, got 0"),
    ({"validation": X}, errors.ShapeError, "got Tensor"),
    ({"validation": (X, Y[:5])}, errors.ShapeError, "5 targets"),
    ({"penalty": lambda net: 1.0}, errors.ShapeError, "got float"),
    ({"penalty": lambda net: torch.ones(2)}, errors.ShapeError, r"got shape \(2,\)"),
    ({"trained": "gates"}, errors.OptionError, "separate gate network"),
    ({"trained": "vales"}, errors.UnknownNameError, "Did you mean 'values'"),
    ({"trained": "values", "net": nn.Linear(2, 1)}, errors.OptionError, "GatedNetwork, got Linear"),
    ({"validation": (X, Y), "net": pl.models.frg(2, (4,), examples=10)}, errors.OptionError, "table of gates"),
]


@pytest.mark.parametrize("options, error, message", BAD, ids=[f"{i}-{b[1].__name__}" for i, b in enumerate(BAD)])
def test_bad_options_say_what_is_wrong(options, error, message):
    with pytest.raises(error, match=message):
        refused(**options)


# --- networks that read whole numbers, or that cannot be stacked -----------------------------------------------


class Words(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.hidden, self.output = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.output(self.dropout(torch.relu(self.hidden(self.words(x).mean(1)))))


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_tokens_train_as_in_a_plain_loop(loss):
    torch.manual_seed(0)
    net, x = Words().double(), torch.randint(0, 7, (12, 3))
    plain = copy.deepcopy(net)
    y = torch.randn(12, 2) if loss == "mse" else torch.randint(0, 2, (12,))
    w = torch.rand(12, dtype=torch.float64)
    pl.train(net, (x, y, w), epochs=20, lr=0.1, optimizer="sgd", batch_size=None, loss=loss, progress=False)
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(20):
        each = (plain(x) - y).square().mean(1) if loss == "mse" else F.cross_entropy(plain(x), y, reduction="none")
        optimiser.zero_grad()
        ((w * each).sum() / w.sum()).backward()
        optimiser.step()
    assert worst(net, plain) < 1e-12


def test_tokens_with_dropout_and_a_teacher():
    torch.manual_seed(0)
    x, y = torch.randint(0, 7, (12, 3)), torch.randint(0, 2, (12,))
    pattern = Words(dropout=0.5)
    runs = pl.train(pattern, (x, y), epochs=2, seeds=[0, 1], loss="cross_entropy", teacher=Words(), progress=False)
    assert runs.history().shape == (2, 3) and bool((runs.history() > 0).all())


def test_what_cannot_be_stacked_is_told():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.output = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.output(self.cell(x)[0][:, -1])

    with pytest.raises(errors.OptionError, match=r"cannot batch something in Recurrent.*Trajectory"):
        pl.train(Recurrent(), (torch.randn(5, 4, 3), torch.randn(5, 1)), epochs=1, progress=False)


def test_targets_and_weights_may_be_pandas_columns_with_labels_of_their_own() -> None:
    pandas = pytest.importorskip("pandas")
    x, y, w = torch.randn(6, 2).double(), torch.randn(6).double(), torch.rand(6).double()
    labels = [9, 3, 4, 0, 1, 7]
    rows = pandas.DataFrame(x.numpy(), index=labels)
    column, weights = (pandas.Series(t.numpy(), index=labels) for t in (y, w))
    runs = [
        pl.train(pl.models.relu(2, (4,), seed=0).double(), data, epochs=2, progress=False)
        for data in ((x, y, w), (rows, column, weights))
    ]
    assert runs[0].history == runs[1].history


class _Pairs(torch.utils.data.Dataset):
    def __init__(self, x: torch.Tensor, y: list[float]) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, float]:
        return self.x[i], self.y[i]


def test_numbers_of_a_dataset_are_not_rounded_to_float32() -> None:
    x, y = torch.randn(4, 2).double(), [0.1, 0.2, 0.3, 0.4]
    histories = [
        pl.train(pl.models.relu(2, (4,), seed=0).double(), data, epochs=2, progress=False).history
        for data in (_Pairs(x, y), (x, torch.tensor(y, dtype=torch.float64)))
    ]
    assert histories[0] == histories[1]
