"""Figure 5, small and on made-up images, against plain trainings."""

import pytest
import torch
import torch.nn.functional as F
from image_clouds import percent, pictures

import pathlens as pl
from pathlens.testing.plain_loop import train_plainly


def test_losses_on_mnist_are_those_of_plain_trainings(on_images):
    arrays = on_images("dgn.fig5").arrays
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
    faster = on_images("dgn.fig5").claims[0].measured[1]
    assert faster == pytest.approx(arrays["loss"][0, 0, 1, 1:].mean() / arrays["loss"][0, 1, 1, 1:].mean(), rel=1e-5)
