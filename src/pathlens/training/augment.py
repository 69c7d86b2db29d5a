"""Random shifts and flips of images, drawn per member and row, applied while a batch is fetched.

One integer per row is drawn, so that the whole step, fetching included, can be one CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 4  # the usual choice for 32 × 32 images
MOVES = (2 * PAD + 1) ** 2 * 2  # vertical shifts × horizontal shifts × flipped or not


def crop_flip(images: Tensor, rows: Tensor, moves: Tensor) -> Tensor:
    """`images[rows]`, each shifted by up to 4 pixels either way (zeros come in) and flipped or not.

    Parameters
    ----------
    images : Tensor (n, C, H, W)
    rows, moves : integer Tensors of one shape (…)
        `moves` lie in 0 … MOVES − 1: vertical shift, horizontal shift, flip, as digits of a number.

    Returns
    -------
    Tensor (…, C, H, W)

    Examples
    --------
    >>> images = torch.arange(6.0).view(1, 1, 2, 3)
    >>> still = (PAD * (2 * PAD + 1) + PAD) * 2
    >>> crop_flip(images, torch.tensor([0, 0]), torch.tensor([still, still + 1]))[:, 0, 0]
    tensor([[0., 1., 2.],
            [2., 1., 0.]])
    """
    _, channels, height, width = images.shape
    side = 2 * PAD + 1
    down, along, flip = moves // (2 * side) - PAD, moves // 2 % side - PAD, moves % 2
    y = torch.arange(height, device=images.device) + down[..., None]
    x = torch.arange(width, device=images.device) + along[..., None]
    x = torch.where(flip[..., None] == 1, width - 1 - x, x)
    inside = ((y >= 0) & (y < height))[..., :, None] & ((x >= 0) & (x < width))[..., None, :]
    index = (
        rows[..., None, None, None],
        torch.arange(channels, device=images.device)[:, None, None],
        y.clamp(0, height - 1)[..., None, :, None],
        x.clamp(0, width - 1)[..., None, None, :],
    )
    return images[index] * inside[..., None, :, :].to(images.dtype)
