"""Figures 6, 7 and 8, small and on made-up images, against definitions written out here."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pathlens.papers.deep_gated import binary_mnist


@pytest.fixture(scope="module")
def trained(on_images, image_run):
    on_images("dgn.fig6")
    return binary_mnist.train_all(image_run)


def rows_of(trained):
    negative, positive = ((trained.data.y[:, 0] == s).nonzero()[:6, 0] for s in (-1, 1))
    rows = torch.cat([negative, positive])
    return trained.data.x[rows].double(), trained.data.y[rows, 0].double().numpy()


def jacobian(net, x, parameters):
    rows = [torch.autograd.grad(f, parameters, retain_graph=True) for f in net(x)[:, 0]]
    return np.stack([np.concatenate([g.numpy().ravel() for g in row]) for row in rows])


def test_nu_is_that_of_the_jacobian(on_images, trained):
    x, y = rows_of(trained)
    arrays = on_images("dgn.fig8").arrays
    assert arrays["epochs"].tolist() == trained.epochs == [0, 1, 2, 3]
    soft = trained.networks("soft-GaLU")[1][2]
    everything = jacobian(soft, x, list(soft.parameters()))
    gates = jacobian(soft, x, list(soft.source.parameters()))
    for name, J in (("nu", everything), ("nu_gates", gates)):
        K = J @ J.T
        value = y @ np.linalg.solve(K, y)
        measured = arrays["nu"][0, :, 1, 2] if name == "nu" else arrays["nu_gates"][:, 1, 2]
        assert measured == pytest.approx([value, value * np.trace(K)], rel=1e-5)


def test_nu_of_the_path_kernel_counts_paths(on_images, trained):
    x, y = rows_of(trained)
    net = trained.networks("soft-ReLU")[0][-1]
    z, shared = x, x @ x.T
    for k in (1, 2, 3):
        q = F.linear(z, net.values.get_parameter(f"linear{k}.weight"))
        g = 1.1 * torch.sigmoid(4 * q)
        z, shared = q * g, shared * (g @ g.T)
    M = shared.detach().numpy()
    value = y @ np.linalg.solve(M, y)
    i = binary_mnist.NETWORKS.index("soft-ReLU")
    assert on_images("dgn.fig6").arrays["nu"][i, :, 0, -1] == pytest.approx([value, value * np.trace(M)], rel=1e-5)


def test_singular_kernels_are_missing_values():
    assert all(math.isnan(v) for v in binary_mnist.nu_pair(torch.ones(3, 3).double(), torch.ones(3)))


def test_gates_come_from_where_they_should(trained):
    x, _ = rows_of(trained)
    relu, learned, copied = (trained.networks(name)[1] for name in ("ReLU", binary_mnist.LEARNED, binary_mnist.COPIED))
    for mine, theirs in ((learned[0], relu[-1]), (learned[-1], relu[-1]), (copied[-1], relu[0])):
        for a, b in zip(mine.gates(x).values(), theirs.gates(x).values()):
            assert torch.equal(a, b)
    start, end, other = (dict(net.values.named_parameters()) for net in (learned[0], learned[-1], relu[0]))
    assert all(not torch.equal(start[k], end[k]) and not torch.equal(start[k], other[k]) for k in start)


def test_signs_and_losses_on_the_test_set(on_images, trained):
    arrays = on_images("dgn.fig7").arrays
    data = trained.data
    for i, name in enumerate(binary_mnist.NETWORKS):
        # in float32, as trained: with ±σ weights some gates of so small a network are ties that rounding breaks
        f = trained.networks(name)[0][-1].float()(data.x_test).detach()
        assert arrays["right"][i, 0] == pytest.approx(100 * float((f.sign() == data.y_test).double().mean()))
        assert arrays["test"][i, 0, -1] == pytest.approx(float((f - data.y_test).square().mean()), rel=1e-4)
