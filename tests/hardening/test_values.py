"""Values on gates that stay: exact least squares, and batch statistics."""

import copy
import itertools

import pytest
import torch
from torch import nn

import pathlens as pl
from pathlens.hardening import cell_bound
from pathlens.hardening.values import _solve_layer, can_solve, least_squares, recalibrate


def loss(net, x, y):
    with torch.no_grad():
        return float((net(x) - y).square().mean())


def rows(n=60, d=3, c=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    return x, torch.stack([torch.sin((k + 2) * x[:, 0]) + 0.3 * x[:, 1].abs() for k in range(c)], dim=1)


def plain_solution(net, name, x, y, damping):
    """The loss after damped least squares over one layer's weights, by the Jacobian of the outputs to them."""
    parts = [p for n, p in net.named_parameters() if n.startswith(name + ".")]
    f = net(x)
    jacobian = torch.stack(
        [torch.cat([g.reshape(-1) for g in torch.autograd.grad(v, parts, retain_graph=True)]) for v in f.reshape(-1)]
    )
    residual = (y - f).detach().reshape(-1, 1)
    size = jacobian.shape[1]
    damped = torch.cat([jacobian, (damping * jacobian.square().sum()).sqrt() * torch.eye(size, dtype=torch.float64)])
    best = torch.linalg.lstsq(damped, torch.cat([residual, residual.new_zeros(size, 1)]), driver="gelsd").solution
    return float((residual - jacobian @ best).square().mean())


@pytest.mark.parametrize("name", ["values.linear1", "values.linear2", "values.output"])
@pytest.mark.parametrize(
    "bias, constant, gate", list(itertools.product([False, True], [False, True], ["hard", "soft"]))
)
def test_each_layer_is_fitted_to_its_exact_optimum(name, bias, constant, gate):
    x, y = rows(n=25)
    net = pl.models.dlgn(3, (5, 4), 2, gate=gate, bias=bias, piecewise_constant=constant, seed=1).double()
    expected = plain_solution(net, name, x, y, 1e-4)
    _solve_layer(net, name, x, y, 1e-4)
    assert loss(net, x, y) == pytest.approx(expected, rel=1e-8)


class OwnParameters(nn.Module):
    """Weights that are no module's, as layers or in products of matrices."""

    def __init__(self, products):
        super().__init__()
        self.products = products
        self.first, self.shift = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5))
        self.last = nn.Parameter(torch.randn(2, 5))

    def forward(self, x):
        if self.products:
            return torch.relu(x @ self.first.T + self.shift) @ self.last.T
        return nn.functional.linear(torch.relu(nn.functional.linear(x, self.first, self.shift)), self.last)


@pytest.mark.parametrize("products", [False, True])
def test_weights_that_are_no_modules_are_fitted_too(products):
    x, y = rows(n=25)
    torch.manual_seed(0)
    net = pl.gated_twin(OwnParameters(products).double(), "dlgn", x[:2], gates_from="dependent")
    assert can_solve(net, x) is not products
    hard = net.with_gate("hard")
    found = pl.harden(net, (x, y), method="refit", epochs=3, progress=False)
    assert loss(found.network, x, y) < loss(hard, x, y)


def test_a_small_convolution_is_fitted_too():
    x = torch.randn(30, 1, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.flatten(1).max(1, keepdim=True).values
    template = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)
    )
    net = pl.gated_twin(template.double(), "dlgn", x[:2], gate="hard", seed=0)
    for name in ("values.2", "values.0"):
        expected = plain_solution(net, name, x, y, 1e-6)
        _solve_layer(net, name, x, y, 1e-6)
        assert loss(net, x, y) == pytest.approx(expected, rel=1e-8)


def test_sweeps_never_raise_the_loss_and_reach_what_the_cells_allow():
    data = pl.data.circle(200, dtype=torch.float64)
    net = pl.models.dlgn(2, (12, 12, 12), gate="hard", piecewise_constant=True, seed=0).double()
    gates = copy.deepcopy(net.source.state_dict())
    losses = least_squares(net, data.x, data.y, progress=False)
    assert all(b <= a for a, b in itertools.pairwise(losses))
    assert loss(net, data.x, data.y) == pytest.approx(losses[-1], rel=1e-12)
    assert losses[-1] == pytest.approx(cell_bound(net, data.x, data.y).loss, rel=1e-3)
    assert all(torch.equal(v, gates[k]) for k, v in net.source.state_dict().items())


def test_held_out_rows_choose_between_passes():
    x, y = rows(n=40, d=8, c=1)
    noise = torch.randn(40, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net = pl.models.dlgn(8, (10, 10), gate="hard", seed=0).double()
    held = rows(n=300, d=8, c=1, seed=5)
    free, careful = copy.deepcopy(net), copy.deepcopy(net)
    least_squares(free, x, y + noise, progress=False)
    least_squares(careful, x, y + noise, validation=held, progress=False)
    assert loss(free, x, y + noise) < 0.05  # more weights than rows: it learns the noise by heart
    assert loss(careful, *held) <= min(loss(net, *held), loss(free, *held))
    assert loss(careful, *held) < loss(free, *held)


def batch_norm_twin(x):
    template = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return pl.gated_twin(template, "dlgn", x[:2], seed=0)


def test_what_cannot_be_solved_is_known():
    x = torch.randn(8, 1, 6, 6)
    assert not can_solve(batch_norm_twin(x), x)
    assert not can_solve(pl.models.dlgn(64, (128,), 2), torch.randn(3, 64))  # 8320 unknowns
    assert can_solve(pl.models.dlgn(4, (8, 8), 2), torch.randn(3, 4))


def test_statistics_are_taken_anew_for_the_values_alone():
    x = 2 + 3 * torch.randn(50, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    net = batch_norm_twin(x)
    net.train()(5 * x)  # statistics of something else
    net.eval()
    before = copy.deepcopy(net.state_dict())
    recalibrate(net, x, 50)
    assert not net.training and all(not m.training for m in net.modules())
    first, momentum = net.values.get_submodule("1"), net.values.get_submodule("1").momentum
    assert momentum == 0.1
    seen = net.values.get_submodule("0")(x)
    assert torch.allclose(first.running_mean, seen.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(first.running_var, seen.var((0, 2, 3)), rtol=1e-4)
    for name, t in net.state_dict().items():
        if name.startswith("source") or ("running" not in name and "num_batches" not in name):
            assert torch.equal(t, before[name]), name
