"""On a CUDA device: compiled CUDA graphs compute what the CPU computes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import pathlens as pl
from pathlens.training import Checkpoints, Execution, Keep, Teacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # its compiler's advice on speed
]


def worst(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values())
    return max(float((p.cpu() - q.cpu()).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("compile", [True, False])
def test_cuda_equals_cpu(optimizer, compile):
    data = pl.data.circle(100, dtype=torch.float64)  # the last batch is smaller than the others
    net = pl.models.dlgn(2, (8, 8), piecewise_constant=True).double()
    # a power of two: on CUDA the rate is kept in single precision, so that a graph can read it
    options = {
        "epochs": 12,
        "lr": 2**-10,
        "batch_size": 32,
        "seeds": [0, 1, 2],
        "optimizer": optimizer,
        "clip": 1.0,
        "progress": False,
    }
    cpu = pl.train(net, data, device="cpu", **options)
    gpu = pl.train(net, data, device="cuda", execution=Execution(compile=compile), **options)
    for a, b in zip(cpu.networks, gpu.networks):
        assert worst(a, b) <= 1e-11


def test_batch_norm_and_settings_on_cuda():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1, 6, 6, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (20,), generator=g)
    template = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    net = pl.gated_twin(template.double(), "dlgn", x[:2])
    settings = [{"lr": 2**-10, "beta": 2.0}, {"lr": 2**-9, "beta": 8.0}]
    options = {
        "epochs": 8,
        "batch_size": 5,
        "seeds": [0, 1],
        "settings": settings,
        "loss": "cross_entropy",
        "progress": False,
    }
    cpu, gpu = (pl.train(net, (x, y), device=d, **options) for d in ("cpu", "cuda"))
    for a, b in zip(cpu.networks, gpu.networks):
        assert worst(a, b) <= 1e-10


def test_resume_on_cuda(tmp_path):
    data = pl.data.circle(64)
    net = pl.models.relu(2, (8, 8))

    class Stop:
        def __init__(self, at):
            self.at = at

        def __call__(self, progress):
            if progress > self.at:
                raise KeyboardInterrupt
            return 1.0

        def __repr__(self):
            return "Stop()"

    def go(folder, at):
        return pl.train(
            copy.deepcopy(net),
            data,
            epochs=10,
            batch_size=16,
            seeds=[0, 1],
            device="cuda",
            scheduler=Stop(at),
            checkpoints=Checkpoints(folder, every=2),
            progress=False,
        )

    whole = go(tmp_path / "a", 2.0)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "b", 0.5)
    resumed = go(tmp_path / "b", 2.0)
    for a, b in zip(whole.networks, resumed.networks):
        assert worst(a, b) <= 1e-6


def test_records_on_cuda_equal_those_on_the_cpu():
    net = pl.models.dlgn(3, (8, 8), 2, seed=0).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    a, b = pl.record(net, x), pl.record(copy.deepcopy(net).cuda(), x)
    for layer in a.layers:
        for k in range(2):
            assert torch.allclose(a.sensitivities(layer.name, k), b.sensitivities(layer.name, k).cpu(), atol=1e-12)


@pytest.mark.parametrize("taught", [False, True])
def test_moved_images_on_cuda(taught):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(22, 2, 6, 6, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (22,), generator=g)
    net = pl.gated_twin(pl.models.gconv(3, channels=(2, 4, 4), dense=(5,), bias=True), "dnpfl", x[:2].float()).double()
    options = {
        "epochs": 5,
        "batch_size": 5,
        "seeds": [0, 1, 2],
        "lr": 2**-8,
        "loss": "cross_entropy",
        "augment": "crop_flip",
        "progress": False,
    }
    if taught:
        teacher = pl.gated_twin(
            pl.models.gconv(3, channels=(2, 6), dense=(5,), bias=True), "relu", x[:2].float(), seed=1
        ).double()
        options |= {"teacher": Teacher(teacher, temperature=4.0)}
    cpu, gpu = (pl.train(net, (x, y), device=d, **options) for d in ("cpu", "cuda"))
    for a, b in zip(cpu.networks, gpu.networks):
        assert worst(a, b) <= 1e-10


def test_batch_norm_in_bfloat16_with_a_smaller_last_batch():
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(22, 3, 8, 8, generator=g), torch.randint(0, 3, (22,), generator=g)
    net = pl.gated_twin(pl.models.ResNet([1], [4], 3), "dlgn", x[:2])
    runs = pl.train(
        net,
        (x, y),
        epochs=3,
        batch_size=5,
        seeds=[0, 1],
        loss="cross_entropy",
        device="cuda",
        execution=Execution(autocast=torch.bfloat16),
        keep=Keep(evaluate="running"),
        progress=False,
    )
    assert bool(torch.tensor(runs.history()).isfinite().all())


def test_a_captured_step_writes_to_no_memory_but_its_own():
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(22, 3, 8, 8, generator=g), torch.randint(0, 3, (22,), generator=g)
    net = pl.gated_twin(pl.models.gconv(3, channels=(3, 16, 16), dense=(8,), bias=True), "relu", x[:2])
    size = sum(p.numel() for p in net.parameters())
    others = []

    class Occupy:
        """Takes what memory became free after the smaller last batch of the first epoch."""

        def __call__(self, progress):
            if progress > 0.5 and not others:
                others.extend(torch.full((k, size), 7.0, device="cuda") for k in (2, 2, 1, 1, 4))
            return 1.0

        def __repr__(self):
            return "Occupy()"

    pl.train(
        net,
        (x, y),
        epochs=4,
        batch_size=5,
        seeds=[0, 1],
        loss="cross_entropy",
        device="cuda",
        scheduler=Occupy(),
        progress=False,
    )
    assert others and all(bool((t == 7).all()) for t in others)


@pytest.mark.parametrize("images", [False, True], ids=["stacked", "one by one"])
@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_batches_of_a_loader_and_networks_that_change_their_input(kind, images):
    g = torch.Generator().manual_seed(1)
    x = 50 * torch.randn(21, *((1, 6, 6) if images else (36,)), generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (21,), generator=g)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            first = nn.Conv2d(1, 36, 6) if images else nn.Linear(36, 36)
            self.layers = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))

        def forward(self, x):
            x /= 50.0
            return self.layers(x)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 21

        def __getitem__(self, i):
            return x[i], y[i]

    kept, runs = x.clone(), []
    for device in ("cpu", "cuda"):
        data, options = Rows(), {"batch_size": 5}
        if kind == "loader":
            generator = torch.Generator().manual_seed(2)
            data, options = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True, generator=generator), {}
        runs.append(
            pl.train(
                Scaled().double(),
                data,
                epochs=4,
                lr=2**-10,
                seeds=[0, 1],
                loss="cross_entropy",
                device=device,
                progress=False,
                **options,
            )
        )
    assert torch.equal(x, kept)
    for a, b, one, other in zip(runs[0].networks, runs[1].networks, *runs):
        assert worst(a, b) <= 1e-11
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-10)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, momentum=0.875), torch.optim.NAdam, torch.optim.Adagrad],  # the last in no CUDA graph
)
@pytest.mark.parametrize("scheduler", ["constant", partial(StepLR, step_size=2, gamma=0.5)])
def test_factories_on_cuda_equal_those_on_the_cpu(optimizer, scheduler):
    data = pl.data.circle(64, dtype=torch.float64)
    net = pl.models.dlgn(2, (8, 8)).double()
    options = {"epochs": 6, "lr": 2**-8, "seeds": [0, 1], "optimizer": optimizer, "scheduler": scheduler}
    seen = []

    def follow(state):
        seen.append([float(p.detach().sum()) for n in state.networks for p in n.parameters()])

    cpu, gpu = (pl.train(net, data, device=d, callbacks=[follow], progress=False, **options) for d in ("cpu", "cuda"))
    for a, b in zip(cpu.networks, gpu.networks):
        assert worst(a, b) <= 1e-10
    assert len(seen) == 14
    for a, b in zip(seen[:7], seen[7:]):
        assert a == pytest.approx(b, abs=1e-9)


def test_a_graph_refuses_a_scheduler_that_changes_the_momentum():
    options = {"epochs": 3, "optimizer": partial(torch.optim.SGD, momentum=0.9), "device": "cuda", "progress": False}
    options["scheduler"] = partial(OneCycleLR, max_lr=0.1, total_steps=9)
    net, data = pl.models.relu(2, (8,)), pl.data.circle(64)
    with pytest.raises(pl.errors.OptionError, match="other than lr"):
        pl.train(net, data, **options)
    pl.train(net, data, execution=Execution(compile=False), **options)
