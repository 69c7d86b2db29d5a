"""A stack of networks must end where each network ends on its own in a plain loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathlens as pl
from pathlens.data import DataSet
from pathlens.errors import ShapeError
from pathlens.testing.plain_loop import train_plainly
from pathlens.training import Execution, Geometric, cosine, initialise
from pathlens.training.inputs import mse

STEPS = 200
OPTIMISERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


def worst(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


def regression(n=40, d=2):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    return DataSet(x, torch.sin(3 * x[:, :1]), name="sines", task="regression")


NETWORKS = {
    "relu": lambda: pl.models.relu(2, (6, 5)),
    "relu with biases": lambda: pl.models.relu(2, (6, 5), bias=True),
    "soft_relu": lambda: pl.models.soft_relu(2, (6, 5)),
    "dln": lambda: pl.models.dln(2, (6, 5)),
    "dlgn_pwc": lambda: pl.models.dlgn(2, (6, 5), piecewise_constant=True),
    "dlgn frozen": lambda: pl.models.dlgn(2, (6, 5), frozen=True),
    "straight-through": lambda: pl.models.dlgn(2, (6, 5), gate="straight_through"),
    "galu": lambda: pl.models.galu(2, (6, 5)),
    "gates only": lambda: pl.models.gates_only(2, (6, 5)),
    "quadratic": lambda: pl.models.quadratic(2, (6, 5)),
    "plain module": lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_size", [16, None])
def test_a_stack_equals_plain_loops(name, batch_size):
    data, seeds, lr = regression(), [3, 4, 5], 1e-3
    per_epoch = 3 if batch_size else 1
    pattern = NETWORKS[name]().double()
    runs = pl.train(pattern, data, epochs=STEPS // per_epoch, lr=lr, batch_size=batch_size, seeds=seeds, progress=False)
    for seed, trained in zip(seeds, runs.networks):
        alone = copy.deepcopy(pattern)
        initialise(alone, seed)
        train_plainly(
            alone,
            data.x,
            data.y,
            steps=STEPS // per_epoch * per_epoch,
            loss=mse,
            optimizer=torch.optim.Adam,
            batch_size=batch_size,
            seed=seed,
            lr=lr,
        )
        assert worst(trained, alone) <= 1e-12


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_every_optimizer_with_its_options(optimizer):
    data = regression()
    pattern = pl.models.relu(2, (6, 5)).double()
    momentum = {"momentum": 0.9} if optimizer in ("sgd", "rmsprop") else {}
    runs = pl.train(
        pattern,
        data,
        epochs=50,
        lr=0.003,
        batch_size=16,
        seeds=[0, 1],
        optimizer=optimizer,
        weight_decay=0.01,
        settings=[momentum],
        clip=0.5,
        scheduler="cosine",
        progress=False,
    )
    for seed, trained in zip([0, 1], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone,
            data.x,
            data.y,
            steps=150,
            loss=mse,
            optimizer=OPTIMISERS[optimizer],
            batch_size=16,
            seed=seed,
            clip=0.5,
            rate=cosine,
            lr=0.003,
            weight_decay=0.01,
            **momentum,
        )
        assert worst(trained, alone) <= 1e-12


def test_members_may_differ_in_rate_and_beta():
    data = regression()
    pattern = pl.models.dlgn(2, (6, 5)).double()
    settings = [{"lr": 0.01, "beta": 2.0}, {"lr": 0.002, "beta": 8.0}]
    runs = pl.train(pattern, data, epochs=60, batch_size=16, seeds=[1, 2], settings=settings, progress=False)
    assert [(s["lr"], s["seed"]) for s in runs.settings] == [(0.01, 1), (0.01, 2), (0.002, 1), (0.002, 2)]
    for s, trained in zip(runs.settings, runs.networks):
        alone = pl.models.dlgn(2, (6, 5), beta=s["beta"]).double().reinitialise(s["seed"])
        train_plainly(
            alone,
            data.x,
            data.y,
            steps=180,
            loss=mse,
            optimizer=torch.optim.Adam,
            batch_size=16,
            seed=s["seed"],
            lr=s["lr"],
        )
        assert float(trained.gate.beta) == s["beta"]
        assert worst(trained, alone) <= 1e-12


def conv_net():
    # no bias before batch-norm: its true gradient is zero, and Adam would turn rounding noise into full steps
    convolution = nn.Conv2d(1, 4, 3, padding=1, bias=False)
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), pool, nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("kind", ["relu", "dlgn", "dlgn_pwc", "soft_galu"])
def test_convolutions_with_batch_norm_and_cross_entropy(kind):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1, 6, 6, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (20,), generator=g)
    pattern = pl.gated_twin(conv_net().double(), kind, x[:2])
    runs = pl.train(
        pattern, (x, y), epochs=20, lr=0.01, batch_size=5, seeds=[7, 8], loss="cross_entropy", progress=False
    )
    for seed, trained in zip([7, 8], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone, x, y, steps=80, loss=F.cross_entropy, optimizer=torch.optim.Adam, batch_size=5, seed=seed, lr=0.01
        )
        assert worst(trained, alone) <= 1e-12  # batch statistics and their counters too


@pytest.mark.parametrize(("batch_size", "steps", "compiled"), [(16, 60, False), (40, 20, True)])
def test_fixed_random_gates_get_their_rows(batch_size: int, steps: int, compiled: bool):
    data = regression()
    pattern = pl.models.frg(2, (6, 5), examples=40).double()
    execution = Execution(compile=compiled)
    runs = pl.train(
        pattern, data, epochs=20, lr=0.01, batch_size=batch_size, seeds=[0, 1], execution=execution, progress=False
    )
    for seed, trained in zip([0, 1], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone,
            data.x,
            data.y,
            steps=steps,
            loss=mse,
            optimizer=torch.optim.Adam,
            batch_size=batch_size,
            seed=seed,
            lr=0.01,
            rows=True,
        )
        assert worst(trained, alone) <= 1e-12


def test_dropout_has_a_generator_per_member():
    """A member of a stack drops the same units as the same network trained alone."""
    data = regression()
    pattern = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 1)).double()
    together = pl.train(pattern, data, epochs=30, lr=0.01, batch_size=16, seeds=[5, 6], progress=False)
    for i, seed in enumerate([5, 6]):
        alone = pl.train(pattern, data, epochs=30, lr=0.01, batch_size=16, seeds=[seed], progress=False)
        assert worst(together.networks[i], alone.networks[0]) <= 1e-12
    without = copy.deepcopy(pattern)
    without[2].p = 0.0
    dry = pl.train(without, data, epochs=30, lr=0.01, batch_size=16, seeds=[5], progress=False)
    assert worst(together.networks[0], dry.networks[0]) > 1e-3


def test_dropout_by_function_is_that_of_the_module():
    class Dropped(nn.Sequential):
        def forward(self, x):
            return self[2](F.dropout(self[1](self[0](x)), 0.4, self.training))

    layers = [nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 1)]
    nets = [Dropped(*layers).double(), nn.Sequential(*layers[:2], nn.Dropout(0.4), layers[2]).double()]
    runs = [pl.train(net, regression(), epochs=3, batch_size=16, seeds=[5, 6], progress=False) for net in nets]
    assert all(worst(a, b) == 0 for a, b in zip(runs[0].networks, runs[1].networks))


def test_attention_is_drawn_from_the_seed():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.output = nn.MultiheadAttention(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.output(x)

    nets = pl.train(Attention(), pl.data.circle(8), epochs=1, seeds=[0, 1], progress=False).networks
    assert not torch.equal(nets[0].inner.in_proj_weight, nets[1].inner.in_proj_weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(2, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.c.weight = self.b.weight

    def forward(self, x):
        for layer in (self.a, self.b, self.c):
            x = torch.relu(layer(x))
        return self.d(x)


@pytest.mark.parametrize("twin", [False, True])
def test_tied_weights_stay_tied(twin, tmp_path):
    data = regression()
    x, y = data.x, data.y
    net = Tied().double()
    net = pl.gated_twin(net, "relu", example=x[:2]) if twin else net
    alone = copy.deepcopy(net)
    options = {"keep": [0], "checkpoints": tmp_path, "progress": False}
    pl.train(net, (x, y), epochs=30, lr=0.01, batch_size=16, seed=3, **options)
    train_plainly(alone, x, y, steps=90, loss=F.mse_loss, optimizer=torch.optim.Adam, batch_size=16, seed=3, lr=0.01)
    assert worst(net, alone) <= 1e-12
    part = net.values if twin else net
    assert part.b.weight is part.c.weight


def test_dropout_drops_the_right_share_and_keeps_the_mean():
    from pathlens.training.stack import _DropoutFromDraws

    x = torch.ones(1000, 200)
    draws = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    with _DropoutFromDraws([draws]):
        out = F.dropout(x, 0.3, training=True)
    assert abs(float((out == 0).double().mean()) - 0.3) < 0.005
    assert abs(float(out.mean()) - 1) < 0.01


class UnreadNorm(nn.Module):
    """A batch-norm whose output nobody reads: it still keeps statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.output = nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, x):
        self.norm(x)
        return self.output(torch.relu(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_norm_that_nobody_reads_keeps_its_statistics(compiled: bool):
    net, x, y = UnreadNorm().double(), torch.randn(5, 2).double(), torch.randn(5, 1).double()
    pl.train(net, (x, y), epochs=3, batch_size=None, execution=Execution(compile=compiled), progress=False)
    torch.testing.assert_close(net.norm.running_mean, (1 - 0.9**3) * x.mean(0))


def test_replaying_the_captured_step_gives_the_same_bits():
    data = regression()
    pattern = pl.models.dlgn(2, (6, 5)).double()
    a, b = (
        pl.train(pattern, data, epochs=20, batch_size=16, seeds=[0, 1], execution=Execution(compile=c), progress=False)
        for c in (True, False)
    )
    for x, y in zip(a.networks, b.networks):
        assert worst(x, y) == 0.0


def test_float32_agrees_for_fifty_steps():
    data = pl.data.circle(64)
    pattern = pl.models.relu(2, (8, 8))
    runs = pl.train(pattern, data, epochs=25, batch_size=32, seeds=[0, 1, 2], progress=False)
    for seed, trained in zip([0, 1, 2], runs.networks):
        alone = copy.deepcopy(pattern).reinitialise(seed)
        train_plainly(
            alone, data.x, data.y, steps=50, loss=mse, optimizer=torch.optim.Adam, batch_size=32, seed=seed, lr=1e-3
        )
        assert worst(trained, alone) <= 1e-5


def test_a_list_of_networks_is_trained_in_place():
    data = regression()
    nets = [pl.models.relu(2, (6,), seed=s).double() for s in (0, 1)]
    before = [copy.deepcopy(n) for n in nets]
    runs = pl.train(nets, data, epochs=2, progress=False)
    assert all(a is b for a, b in zip(runs.networks, nets))
    assert all(worst(a, b) > 0 for a, b in zip(nets, before))


class Scaled(nn.Module):
    """Multiplies by something that is no parameter: a number, a tensor or a buffer that no state holds."""

    def __init__(self, by, buffer=False):
        super().__init__()
        if buffer:
            self.register_buffer("by", torch.tensor(by), persistent=False)
        else:
            self.by = by
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        return self.fc(x * self.by)


class Above(pl.models.Gate):
    """A gate function of a user's own."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, q):
        return (q > self.threshold).to(q.dtype)


SAME_SHAPES = {
    "number": lambda: (Scaled(1.0), Scaled(2.0)),
    "tensor": lambda: (Scaled(torch.ones(2)), Scaled(torch.arange(2.0))),
    "function": lambda: [pl.models.gdln(2, (2,), gates=lambda x, sign=sign: sign * x) for sign in (1, -1)],
    "own gate function": lambda: [pl.models.dlgn(2, (4,), gate=Above(t), frozen=True) for t in (0.0, 0.5)],
    "value input": lambda: (pl.models.dlgn(2, (4,)), pl.models.dlgn(2, (4,), piecewise_constant=True)),
    "what is trained": lambda: (pl.models.dlgn(2, (4,)), pl.models.dlgn(2, (4,), frozen=True)),
    "gate function": lambda: (pl.models.relu(2, (4,)), pl.models.dln(2, (4,))),
    "gate network": lambda: (pl.models.dlgn(2, (4, 4)), pl.models.soft_galu(2, (4, 4), epsilon=0.0)),
    "epsilon": lambda: (pl.models.soft_relu(2, (4,), epsilon=0.0), pl.models.soft_relu(2, (4,), epsilon=0.5)),
    "activation": lambda: [nn.Sequential(nn.Linear(2, 4), unit, nn.Linear(4, 1)) for unit in (nn.ReLU(), nn.Tanh())],
    "slope": lambda: [nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(a), nn.Linear(4, 1)) for a in (0.1, 0.2)],
    "frozen layer": lambda: [
        nn.Sequential(nn.Linear(2, 4).requires_grad_(on), nn.Linear(4, 1)) for on in (True, False)
    ],
}


@pytest.mark.parametrize("name", SAME_SHAPES)
def test_networks_that_compute_otherwise_are_not_trained_as_the_first(name):
    with pytest.raises(ShapeError, match="network 1"):
        pl.train(list(SAME_SHAPES[name]()), pl.data.circle(16), epochs=1, progress=False)


def test_networks_of_different_beta_are_trained_together():
    nets = [pl.models.dlgn(2, (4,), beta=beta, seed=1).double() for beta in (4, 10)]
    alone = copy.deepcopy(nets[1])
    pl.train(nets, regression(), epochs=3, seed=0, progress=False)
    pl.train(alone, regression(), epochs=3, seed=1, progress=False)
    assert worst(nets[1], alone) <= 1e-12


def test_buffers_that_no_state_holds_are_each_network_s_own():
    nets = [Scaled(by, buffer=True).double() for by in (1.0, 3.0)]
    alone = copy.deepcopy(nets[1])
    pl.train(nets, regression(), epochs=3, seed=0, progress=False)
    pl.train(alone, regression(), epochs=3, seed=1, progress=False)
    assert worst(nets[1], alone) <= 1e-12 and nets[1].by == 3.0


def test_what_is_written_alike_is_trained_together():
    """Copies, and networks whose functions and numbers are the same though they are not the same objects."""
    for make in (lambda: Scaled(torch.ones(2).double()), lambda: pl.models.gdln(2, (2,), gates=lambda x: x)):
        assert len(pl.train([make().double(), make().double()], regression(), epochs=1, progress=False)) == 2
        assert len(pl.train(make().double(), regression(), epochs=1, seeds=[0, 1], progress=False)) == 2


def test_dropout_of_everything_leaves_nothing():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(1.0), nn.Linear(4, 1)).double()
    before = copy.deepcopy(net)
    pl.train(net, regression(), epochs=1, progress=False)
    assert torch.equal(net[0].weight, before[0].weight) and net[2].bias.isfinite().all()


def test_beta_schedule_reaches_its_end():
    data = regression()
    net = pl.models.dlgn(2, (6, 5), seed=0).double()
    pl.train(net, data, epochs=10, beta=Geometric(4, 1000, until=0.5), progress=False)
    assert float(net.gate.beta) == pytest.approx(1000)
