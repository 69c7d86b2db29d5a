"""What `train` keeps, returns and refuses."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import pathlens as pl
from pathlens import errors
from pathlens.training import Keep, Runs, Stopping


@pytest.fixture
def data():
    return pl.data.circle(64)


def full_loss(net, data):
    with torch.no_grad():
        return float((net(data.x) - data.y).square().mean())


def test_history_starts_at_initialisation_and_is_the_loss_on_all_data(data):
    net = pl.models.relu(2, (8,), seed=0)
    first = full_loss(net, data)
    t = pl.train(net, data, epochs=3, progress=False)
    assert t.history["loss"][0] == pytest.approx(first, rel=1e-6)
    assert t.history["loss"][-1] == pytest.approx(full_loss(net, data), rel=1e-6)
    assert len(t.history["loss"]) == 4


def test_histories_are_drawn(data):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    net = pl.models.dlgn(2, (4,))
    runs = pl.train(net, data, epochs=2, seeds=[0, 1], settings=[{"beta": 4}, {"beta": 9}], progress=False)
    ax = runs.plot()
    assert all(tick == int(tick) for tick in ax.get_xticks())  # there is no epoch 2.5
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["beta 4", "beta 9"]
    assert len(ax.lines) == 4 + 2 and ax.get_ylabel() == "loss"
    assert torch.equal(torch.tensor(ax.lines[2].get_ydata()), torch.tensor(runs.history()[:2].mean(0)))
    some = pl.train(net, data, epochs=1, settings=[{"beta": 9}, {"lr": 0.01}], progress=False).plot()
    assert [text.get_text() for text in some.get_legend().get_texts()] == ["lr 0.001, beta 9", "lr 0.01"]
    assert runs[0].plot("loss", ax=ax) is ax and len(ax.lines) == 7
    for drawn in (runs, runs[0]):
        with pytest.raises(errors.UnknownNameError, match="Unknown history 'los'"):
            drawn.plot("los")
    plt.close("all")


@pytest.mark.parametrize("name", ["epochs", "losses"])
def test_one_epoch_instead_of_a_list_is_refused(data, name):
    with pytest.raises(errors.OptionError, match=f"{name} is a sequence, got 1. Give"):
        Keep(**{name: 1})
    with pytest.raises(errors.OptionError, match=r"epochs is a sequence, got 1\. Give"):
        pl.train(pl.models.dlgn(2, (4,)), data, epochs=1, keep=1)


def test_moments_are_kept_at_epochs_and_when_a_loss_is_first_reached(data):
    net = pl.models.relu(2, (8,), seed=0)
    keep = Keep([0, 5], losses=[0.45, 0.3], X=data.x)
    t = pl.train(net, data, epochs=40, lr=0.01, keep=keep, progress=False)
    assert [m.epoch for m in t.moments][:1] == [0]
    assert t.at_epoch(5).record is not None
    for level in (0.45, 0.3):
        (moment,) = [m for m in t.moments if f"loss < {level:g}" in m.reason]
        assert moment.epoch == t.epoch_reached(level)
        assert moment.loss < level <= t.history["loss"][moment.epoch - 1]
    other = pl.models.relu(2, (8,))
    other.load_state_dict(t.at_epoch(5).snapshot.state)
    assert torch.allclose(other(data.x), t.at_epoch(5).record.f, atol=1e-6)


def test_runs_stop_when_all_are_below(data):
    below = Stopping(loss_below=0.4)
    runs = pl.train(pl.models.relu(2, (16,)), data, epochs=500, lr=0.01, seeds=range(3), stopping=below, progress=False)
    assert isinstance(runs, Runs)
    assert max(t.history["loss"][-1] for t in runs) < 0.4
    assert runs.history().shape[1] < 501
    assert all(e is not None for e in runs.epochs_to(0.4))


def test_running_loss_is_the_mean_over_batches(data):
    running = Keep(evaluate="running")
    one_batch = pl.train(pl.models.relu(2, (8,), seed=0), data, epochs=2, batch_size=None, keep=running, progress=False)
    full = pl.train(pl.models.relu(2, (8,), seed=0), data, epochs=2, batch_size=None, progress=False)
    # with one batch, the running loss of an epoch is the full loss before its step
    assert one_batch.history["loss"][1:] == pytest.approx(full.history["loss"][:2], rel=1e-5)


def test_test_data_and_accuracy_are_followed():
    digits = pl.data.digits()
    net = pl.models.relu(digits.x[0].numel(), (32,), 10, seed=0)
    flat = pl.data.DataSet(
        digits.x.flatten(1),
        digits.y,
        digits.x_test.flatten(1),
        digits.y_test,
        name="digits",
        task="classification",
        classes=10,
    )
    t = pl.train(net, flat, epochs=8, lr=3e-3, loss="cross_entropy", progress=False)
    assert t.history["test_accuracy"][-1] > 0.85
    own = float((net(flat.x_test).argmax(1) == flat.y_test).double().mean())
    assert t.history["test_accuracy"][-1] == pytest.approx(own)


@pytest.mark.parametrize("form", ["pair", "arrays", "dataset", "part"])
def test_forms_of_data_give_the_same_training(data, form):
    given = {
        "pair": (data.x, data.y),
        "arrays": (data.x.numpy(), data.y.numpy()),
        "dataset": TensorDataset(data.x, data.y),
        "part": Subset(TensorDataset(data.x, data.y), range(64)),
    }[form]
    a, b = pl.models.relu(2, (8,), seed=0), pl.models.relu(2, (8,), seed=0)
    pl.train(a, data, epochs=2, progress=False)
    pl.train(b, given, epochs=2, progress=False)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("given", [np.asarray, torch.as_tensor], ids=["array", "tensor"])
def test_whole_numbers_are_taken_as_they_are(given):
    x = np.random.default_rng(0).integers(0, 256, (12, 4), dtype=np.uint8)
    a, b = pl.models.relu(4, (8,), seed=0), pl.models.relu(4, (8,), seed=0)
    y = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    pl.train(a, (torch.tensor(x, dtype=torch.float32), y), epochs=2, progress=False)
    pl.train(b, (given(x), y), epochs=2, progress=False)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_an_epoch_after_the_last_is_said_to_be_one(data):
    t = pl.train(pl.models.relu(2, (4,)), data, epochs=2, keep=[1], progress=False)
    with pytest.raises(errors.RecordError, match=r"kept: \[1\]\. Train with keep=\[2\]"):
        t.at_epoch(2)
    with pytest.raises(errors.RecordError, match="The training ended at epoch 2"):
        t.at_epoch(5)


@pytest.mark.parametrize("epoch", [-1, 3, 1.5])
def test_an_epoch_that_there_is_not_cannot_be_kept(data, epoch):
    with pytest.raises(errors.OptionError, match=rf"keep names epoch {epoch}, and epochs=2 has 0 .* to 2\."):
        pl.train(pl.models.relu(2, (4,)), data, epochs=2, keep=[1, epoch], progress=False)


def test_epochs_to_keep_may_come_twice_and_as_an_array(data):
    for given in ([2, 0, 2], np.array([0, 2]), range(0, 3, 2)):
        t = pl.train(pl.models.relu(2, (4,)), data, epochs=2, keep=given, progress=False)
        assert [m.epoch for m in t.moments] == [0, 2] and t.config["keep_epochs"] == [0, 2]


def test_fresh_batches_from_a_sampler():
    nlgp = pl.data.NLGP(20, xi=(3.0, 1.0), gain=3.0)
    net = pl.models.LocalisationNet(20, 8)
    runs = pl.train(net, nlgp, epochs=30, optimizer="sgd", lr=0.5, batch_size=200, seeds=[0, 1], progress=False)
    assert runs.history().shape == (2, 31)
    assert (runs.history()[:, -1] < runs.history()[:, 0]).all()


def test_the_same_seed_gives_the_same_bits_and_another_does_not(data):
    def weights(seed):
        net = pl.models.relu(2, (8,), seed=0)
        pl.train(net, data, epochs=3, seed=seed, progress=False)
        return torch.cat([p.flatten() for p in net.parameters()])

    torch.manual_seed(123)  # the global generator must not matter
    first = weights(1)
    torch.rand(7)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_progress_can_be_followed_by_a_function(data):
    seen = []
    pl.train(pl.models.relu(2, (8,)), data, epochs=3, progress=lambda *a: seen.append(a))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_deep_soft_networks_warn_and_start_with_preserve():
    data = pl.data.circle(64)
    with pytest.warns(errors.SignalWarning, match="preserve"):
        pl.train(pl.models.dlgn(2, (16,) * 20, seed=0), data, epochs=1, progress=False)
    net = pl.models.dlgn(2, (16,) * 20, init="preserve", seed=0)
    t = pl.train(net, data, epochs=40, lr=1e-3, progress=False)
    assert t.history["loss"][-1] < 0.8 * t.history["loss"][0]


# --- bad input -------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A parameter that nothing can draw anew."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(2)), nn.Linear(2, 1)

    def forward(self, x):
        return self.linear(self.scale * x)


def relu(outputs=1):
    return pl.models.relu(2, (8,), outputs, seed=0)


X, Y = torch.randn(10, 2), torch.randn(10, 1)
BAD = [
    (lambda: pl.train(relu(), (X, Y[:9]), epochs=1), errors.ShapeError, "10 inputs and 9 targets"),
    (lambda: pl.train(relu(), (torch.randn(10, 3), Y), epochs=1), errors.ShapeError, "does not accept"),
    (lambda: pl.train(relu(2), (X, Y), epochs=1), errors.ShapeError, r"\(10, 2\)"),
    (lambda: pl.train(relu(), (X * float("nan"), Y), epochs=1), errors.NotFiniteError, "row 0"),
    (lambda: pl.train(relu(), (X, Y * float("inf")), epochs=1), errors.NotFiniteError, "targets"),
    (lambda: pl.train(relu(), (X[:0], Y[:0]), epochs=1), errors.EmptyDataError, "at least one row"),
    (lambda: pl.train(relu(3), (X, torch.full((10,), 3)), epochs=1, loss="cross_entropy"), errors.LabelError, "0…2"),
    (lambda: pl.train(relu(3), (X, torch.full((10,), -1)), epochs=1, loss="cross_entropy"), errors.LabelError, "-1"),
    (lambda: pl.train(relu(3), (X, Y), epochs=1, loss="cross_entropy"), errors.LabelError, "integer labels"),
    (lambda: pl.train(relu(), (X, torch.zeros(10, dtype=torch.long)), epochs=1), errors.LabelError, "cross_entropy"),
    (lambda: pl.train(relu(), (X.double(), Y), epochs=1), errors.DTypeError, "float64"),
    (lambda: pl.train(relu(), 3, epochs=1), errors.ShapeError, "got int"),
    (lambda: pl.train(relu(), (X, Y), epochs=0), errors.OptionError, "epochs must be .* got 0"),
    (
        lambda: pl.train(relu(), (X, Y), epochs=1.5),
        errors.OptionError,
        "epochs must be an integer of at least 1, got 1.5",
    ),
    (lambda: pl.train(relu(), (X, Y), epochs=1, clip=-1.0), errors.OptionError, "clip must be positive"),
    (
        lambda: pl.train(relu(), (X, Y), epochs=1, weight_decay=-1.0),
        errors.OptionError,
        "weight_decay must be at least",
    ),
    (
        lambda: pl.train(relu(), (X, Y), epochs=1, optimizer="sgd", settings=[{"momentum": -1}]),
        errors.OptionError,
        "momentum must be at least 0",
    ),
    (lambda: pl.train(relu(), (X, Y), epochs=1, settings=[{"lr": "a"}]), errors.OptionError, "lr must be a number"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, beta=10.0), errors.OptionError, "a function of progress.*got 10.0"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, seeds=3), errors.OptionError, r"Give range\(3\)"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, device="gpu"), errors.OptionError, "device 'gpu' cannot be used"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, device="meta"), errors.OptionError, "holds no numbers"),
    (lambda: pl.train(X, (relu(), Y), epochs=1), errors.OptionError, "a network .* first, got Tensor"),
    (lambda: pl.train([relu(), 3], (X, Y), epochs=1), errors.OptionError, "first, got int"),
    (lambda: pl.train(torch.nn.ReLU(), (X, Y), epochs=1), errors.OptionError, "ReLU has no parameters"),
    (lambda: pl.train(relu(), (X, None), epochs=1), errors.DTypeError, "targets must be numbers, got NoneType"),
    (lambda: pl.train(relu(), (X, ["a"] * 10), epochs=1), errors.DTypeError, "Classes are numbered 0, 1"),
    (lambda: pl.train(relu(), (X, Y, "a"), epochs=1), errors.DTypeError, "weights must be numbers, got str"),
    (lambda: pl.train(relu(), (X, Y, Y[:, 0], Y), epochs=1), errors.ShapeError, "got 4 items"),
    (
        lambda: pl.train(relu(), ConcatDataset([TensorDataset(X, Y), TensorDataset(X[:, :1], Y)]), epochs=1),
        errors.ShapeError,
        "items of the data have different shapes",
    ),
    (
        lambda: pl.train(relu(), (X, Y), epochs=1, seeds=[0], progress=False).history("los"),
        errors.UnknownNameError,
        "Did you mean 'loss'",
    ),
    (lambda: pl.train(relu(), (X, Y), epochs=1, batch_size=0), errors.OptionError, "batch_size must be .* got 0"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, lr=0.0), errors.OptionError, "positive"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, optimizer="adma"), errors.UnknownNameError, "Did you mean 'adam'"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, loss="mes"), errors.UnknownNameError, "Did you mean 'mse'"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, scheduler="cosin"), errors.UnknownNameError, "Did you mean 'cosine'"),
    (lambda: Keep(evaluate="never"), errors.OptionError, "evaluate must be 'full' or 'running', got 'never'"),
    (
        lambda: pl.train(relu(), (X, Y), epochs=1, settings=[{"momentum": 0.9}]),
        errors.UnknownNameError,
        "setting of Adam 'momentum'",
    ),
    (lambda: pl.train(relu(), (X, Y), epochs=1, seeds=[]), errors.EmptyDataError, "no networks"),
    (lambda: pl.train([], (X, Y), epochs=1), errors.EmptyDataError, "empty"),
    (lambda: pl.train([relu(), pl.models.relu(2, (9,))], (X, Y), epochs=1), errors.ShapeError, "network 1"),
    (lambda: pl.train([relu()] * 2, (X, Y), epochs=1), errors.OptionError, "in the list twice"),
    (lambda: pl.train(Scaled(), (X, Y), epochs=1, seeds=[0]), errors.OptionError, "'scale'.*make"),
    (
        lambda: pl.train(
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), (X, Y), epochs=1, batch_size=3
        ),
        errors.OptionError,
        "10 rows in batches of 3",
    ),
    (lambda: pl.train(relu(), (X, Y), epochs=1, settings=[{"rate": 1.0}]), errors.UnknownNameError, "setting"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, settings=[{"beta": 1.0}]), errors.OptionError, "not soft"),
    (lambda: pl.train(relu(), (X, Y), epochs=1, beta=lambda p: 4.0), errors.OptionError, "no beta"),
    (lambda: pl.train(relu().requires_grad_(False), (X, Y), epochs=1), errors.OptionError, "no trainable"),
    (lambda: pl.train(relu(), (X, Y), epochs=20, lr=1e30, optimizer="sgd"), errors.DivergedError, "Lower lr"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i}-{b[1].__name__}" for i, b in enumerate(BAD)])
def test_bad_input_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numbers_of_numpy_are_numbers(data, tmp_path):
    numbers = {"epochs": 3, "seed": 1, "batch_size": 8, "lr": 0.25, "weight_decay": 0.5, "keep": [0, 2]}
    given = {k: np.array(v) if isinstance(v, list) else np.asarray(v)[()] for k, v in numbers.items()}
    runs = [
        pl.train(pl.models.relu(2, (4,), seed=0), data, checkpoints=tmp_path, progress=False, **some)
        for some in (numbers, given)
    ]
    assert runs[0].history == runs[1].history and [m.epoch for m in runs[1].moments] == [0, 2]
    runs[1].save(tmp_path / "trajectory")


@pytest.mark.parametrize("shape", [(64,), (64, 1), (64, 3)])
def test_integers_that_are_no_classes_of_the_outputs_have_no_accuracy(data, shape):
    outputs = shape[-1] if len(shape) > 1 else 1
    y = (data.x[:, :1] > 0).long().expand(64, outputs).reshape(shape)

    def logistic(f, y):
        return nn.functional.softplus(f * (1 - 2 * y.reshape(f.shape))).mean()

    t = pl.train(relu(outputs), (data.x[:64], y), loss=logistic, epochs=2, progress=False)
    assert set(t.history) == {"loss"}


def test_one_member_that_diverges_does_not_stop_the_others(data):
    settings = [{"lr": 1e-2}, {"lr": 1e30}]
    with pytest.warns(errors.PathlensWarning, match="1 of 2"):
        runs = pl.train(relu(), data, epochs=5, optimizer="sgd", settings=settings, progress=False)
    assert np.isfinite(runs.history()[0]).all()


def test_a_plain_module_with_its_own_forward_trains():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    runs = pl.train(Own(), pl.data.circle(64), epochs=20, lr=0.01, seeds=range(2), progress=False)
    assert (runs.history()[:, -1] < runs.history()[:, 0]).all()
