"""The fixed encoding of images: components of patches, split by sign, from which the image can be read back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import nn

from pathlens import train
from pathlens.errors import ConversionError, DTypeError, EmptyDataError, NotFiniteError, OptionError, ShapeError
from pathlens.models import PatchParts, ResNet, dlgn, gated_twin


def images(n=50, channels=3, side=8, seed=0):
    """Not centred, as images are not."""
    drawn = torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 0.2 * drawn + torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64)[:channels, None, None]


@given(st.integers(1, 3), st.sampled_from([1, 3, 5]), st.integers(0, 5))
def test_an_image_is_read_back_from_its_code(channels, size, seed):
    x = images(30, channels, 6, seed)
    parts = PatchParts.fit(x, size=size)
    code = parts(x)
    assert code.shape == (30, 2 * channels * size**2, 6, 6) and bool((code >= 0).all())
    assert torch.allclose(parts.decode(code), x, atol=1e-9)


def test_components_are_those_of_scikit_learn():
    x = images(130)  # more than one part
    x = x + 2 * x.roll(1, -1) + x.roll(1, -2)  # neighbours agree
    parts = PatchParts.fit(x, floor=1e-9)
    patches = nn.functional.unfold(x, 3).transpose(1, 2).reshape(-1, 27).numpy()
    peer = PCA(whiten=True).fit(patches)
    own = parts.filters.reshape(27, 27).numpy()
    wanted = peer.components_ / np.sqrt(peer.explained_variance_)[:, None]
    assert np.allclose(np.abs(own), np.abs(wanted), rtol=1e-4, atol=1e-4)
    inner = (parts(x)[:, :27] - parts(x)[:, 27:])[:, :, 1:-1, 1:-1]  # q, where patches do not cross the border
    q = inner.permute(1, 0, 2, 3).flatten(1)
    assert np.allclose(np.cov(q.numpy()), np.eye(27), atol=1e-3)
    assert float(q.mean(1).abs().max()) < 0.05


def test_the_code_does_not_depend_on_brightness_and_says_nothing_at_the_border_of_a_plain_image():
    x = images(60)
    dark, bright = PatchParts.fit(x), PatchParts.fit(x + 3)
    assert torch.allclose(dark(x), bright(x + 3), atol=1e-8)
    assert float(dark(dark.mean.expand(1, 3, 8, 8)).abs().max()) < 1e-9


def test_the_negative_of_an_image_has_its_parts_swapped():
    x = images(20)
    parts = PatchParts.fit(x)
    up, down = parts(x), parts(2 * parts.mean - x)
    m = len(parts.filters)
    assert torch.allclose(up[:, :m], down[:, m:]) and torch.allclose(up[:, m:], down[:, :m])


def test_what_is_given_may_be_numpy_or_part_of_a_graph():
    x = images(20)
    for same in (x.numpy(), x.clone().requires_grad_()):
        assert torch.equal(PatchParts.fit(same).filters, PatchParts.fit(x).filters)
    assert torch.equal(PatchParts.fit(x, most=10).filters, PatchParts.fit(x[torch.linspace(0, 19, 10).long()]).filters)


def test_seeds_draw_the_gated_network_behind_it_and_leave_the_code():
    x = images(12).float()
    parts = PatchParts.fit(x)
    inner = gated_twin(ResNet([1], [4], channels=54), "dlgn", example=parts(x[:2]), gate="straight_through", seed=7)
    runs = train(
        nn.Sequential(parts, inner),
        (x, torch.arange(12) % 10),
        loss="cross_entropy",
        epochs=1,
        lr=1e-9,
        seeds=[3, 4],
        progress=False,
    )
    for seed, net in zip((3, 4), runs.networks):
        assert torch.equal(net[0].filters, parts.filters)
        alone = inner.reinitialise(seed).state_dict()
        assert torch.allclose(net[1].state_dict()["values.conv1.weight"], alone["values.conv1.weight"], atol=1e-6)


def test_a_code_inside_a_template_is_refused_and_flat_images_are_no_images():
    x = images(12).float()
    parts = PatchParts.fit(x)
    assert parts.channels == 54
    with pytest.raises(ConversionError, match="Put it before"):
        gated_twin(nn.Sequential(parts, ResNet([1], [4], channels=54)), "dlgn", example=x[:2])
    for wrong in (x.flatten(1), x[0], x[:, :1]):
        with pytest.raises(ShapeError, match="needs images of shape"):
            parts(wrong)


def test_two_gated_parts_are_drawn_apart():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (dlgn(2, hidden=(3,)) for _ in range(2))

        def forward(self, x):
            return self.a(x) + self.b(x)

    runs = train(Sum(), (torch.zeros(4, 2), torch.zeros(4, 1)), epochs=1, seeds=[5], progress=False, lr=1e-9)
    a, b = runs.networks[0].a, runs.networks[0].b
    assert not torch.allclose(a.values.linear1.weight, b.values.linear1.weight, atol=1e-3)


def test_settings_and_parts_are_found_behind_the_code():
    x = images(12).float()
    parts = PatchParts.fit(x)
    soft = gated_twin(ResNet([1], [4], channels=54), "dlgn", example=parts(x[:2]), seed=0)
    options = {"loss": "cross_entropy", "epochs": 1, "progress": False, "lr": 0.1}
    data = (x, torch.arange(12) % 10)
    runs = train(nn.Sequential(parts, soft), data, settings=[{"beta": 2.0}, {"beta": 8.0}], **options)
    assert [float(net[1].gate.beta) for net in runs.networks] == [2.0, 8.0]
    net = nn.Sequential(parts, soft)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    train(net, data, trained="values", **options)
    moved = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert moved and all(k.startswith("1.values.") for k in moved)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"images": torch.zeros(5, 8, 8)}, ShapeError),
        ({"images": torch.zeros(5, 3, 8, 8, dtype=torch.uint8)}, DTypeError),
        ({"images": torch.rand(5, 8, 8, 3)}, ShapeError),
        ({"images": torch.zeros(5, 3, 8, 8)}, NotFiniteError),
        ({"images": torch.full((5, 3, 8, 8), torch.nan)}, NotFiniteError),
        ({"images": torch.zeros(0, 3, 8, 8)}, EmptyDataError),
        ({"size": 2}, OptionError),
        ({"size": 9}, OptionError),
        ({"floor": 0.0}, OptionError),
    ],
)
def test_what_cannot_be_encoded_is_refused(change, error):
    with pytest.raises(ShapeError, match="odd k"):
        PatchParts(torch.zeros(12, 3, 2, 2), torch.zeros(3, 1, 1))
    with pytest.raises(error, match="PatchParts"):
        PatchParts.fit(**({"images": images(5)} | change))
