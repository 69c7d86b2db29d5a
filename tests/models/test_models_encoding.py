"""The fixed encoding of images: components of patches, split by sign, from which the image can be read back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import nn

from pathlens import train
from pathlens.errors import NotFiniteError, OptionError, ShapeError
from pathlens.models import PatchParts, ResNet, gated_twin


def images(n=50, channels=3, side=8, seed=0):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 3), st.sampled_from([1, 3, 5]), st.integers(0, 5))
def test_an_image_is_read_back_from_its_code(channels, size, seed):
    x = images(30, channels, 6, seed)
    parts = PatchParts.fit(x, size)
    code = parts(x)
    assert code.shape == (30, 2 * channels * size**2, 6, 6) and bool((code >= 0).all())
    assert torch.allclose(parts.decode(code), x, atol=1e-9)


def test_components_are_those_of_scikit_learn():
    x = images()
    x = x + 2 * x.roll(1, -1) + x.roll(1, -2)  # neighbours agree
    parts = PatchParts.fit(x, floor=1e-9)
    patches = nn.functional.unfold(x, 3).transpose(1, 2).reshape(-1, 27).numpy()
    peer = PCA(whiten=True).fit(patches)
    own = parts.filters.reshape(27, 27).numpy()
    wanted = peer.components_ / np.sqrt(peer.explained_variance_)[:, None]
    assert np.allclose(np.abs(own), np.abs(wanted), rtol=1e-4, atol=1e-6)
    q = patches @ own.T
    assert np.allclose(np.cov(q.T), np.eye(27), atol=1e-6)


def test_an_edge_and_its_negative_have_the_same_code_but_for_the_order_of_parts():
    x = images(20)
    parts = PatchParts.fit(x)
    up, down = parts(x), parts(-x)
    m = len(parts.filters)
    assert torch.equal(up[:, :m], down[:, m:]) and torch.equal(up[:, m:], down[:, :m])


def test_seeds_draw_the_gated_network_behind_it_and_leave_the_code():
    x = images(12).float()
    parts = PatchParts.fit(x)
    inner = gated_twin(ResNet([1], [4], channels=54), "dlgn", example=parts(x[:2]), gate="straight_through", seed=7)
    runs = train(nn.Sequential(parts, inner), (x, torch.arange(12) % 10), loss="cross_entropy", epochs=1, lr=1e-9,
                 seeds=[3, 4], progress=False)  # fmt: skip
    for seed, net in zip((3, 4), runs.networks):
        assert torch.equal(net[0].filters, parts.filters)
        alone = inner.reinitialise(seed).state_dict()
        assert torch.allclose(net[1].state_dict()["values.conv1.weight"], alone["values.conv1.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"images": torch.zeros(5, 8, 8)}, ShapeError),
        ({"images": torch.zeros(5, 3, 8, 8, dtype=torch.uint8)}, ShapeError),
        ({"images": torch.zeros(5, 3, 8, 8)}, NotFiniteError),
        ({"images": torch.full((5, 3, 8, 8), torch.nan)}, NotFiniteError),
        ({"size": 2}, OptionError),
        ({"size": 9}, OptionError),
        ({"floor": 0.0}, OptionError),
    ],
)
def test_what_cannot_be_encoded_is_refused(change, error):
    with pytest.raises(error, match="PatchParts"):
        PatchParts.fit(**({"images": images(5)} | change))
