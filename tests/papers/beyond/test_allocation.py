"""Remedies for the allocation of paths, against definitions written out here."""

import copy

import pytest
import torch

import pathlens as pl
from pathlens.papers.beyond._allocation import BalancedPaths, GatesApart, Reweighted


@pytest.mark.parametrize("labels", [False, True])
def test_gates_alone_feel_the_weights(labels):
    net = pl.models.dlgn(3, (4, 4), outputs=3, piecewise_constant=True, seed=0).double()
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7) % 3 if labels else torch.randn(7, 3, dtype=torch.float64)

    def rows():
        out = net(x)
        return -out.log_softmax(1)[torch.arange(7), y] if labels else ((out - y) ** 2).sum(1) / 3

    made = torch.autograd.grad(Reweighted(3, labels)(GatesApart(net)(x), y), list(net.parameters()))
    share = (rows() / rows().mean()).detach()
    plain = torch.autograd.grad(rows().mean(), list(net.parameters()))
    weighted = torch.autograd.grad((share * rows()).mean(), list(net.parameters()))
    for (name, _), got, a, b in zip(net.named_parameters(), made, plain, weighted):
        assert torch.allclose(got, a if name.startswith("values.") else b, atol=1e-12), name
    assert torch.allclose(Reweighted(3, labels)(net(x), y), (share * rows()).mean())


def test_training_apart_with_equal_weights_is_plain_training():
    def both(output, target):
        return (output[:, :1] - target).square().mean() + (output[:, -1:] - target).square().mean()

    data = pl.data.circle(32, dtype=torch.float64)
    plain = pl.models.dlgn(2, (4, 4), piecewise_constant=True, seed=0).double()
    apart = GatesApart(copy.deepcopy(plain))
    pl.train(plain, data, epochs=3, batch_size=8, progress=False)
    pl.train(apart, data, epochs=3, batch_size=8, loss=both, progress=False)
    for name, value in plain.state_dict().items():
        assert torch.allclose(apart.net.state_dict()[name], value, atol=1e-12), name


def test_the_penalty_is_the_variance_of_the_log_of_soft_counts():
    net, x = pl.models.dlgn(2, (3, 3), seed=0), torch.randn(5, 2)
    first, second = net.gates(x).values()
    counts = torch.einsum("ni,nj->n", first, second)  # a sum over all nine paths
    assert torch.allclose(BalancedPaths(x, 0.5)(net), 0.5 * counts.log().var(correction=0), rtol=1e-4)
