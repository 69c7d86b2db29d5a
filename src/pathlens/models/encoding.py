"""A fixed encoding of images that gives linear gates something to work with: principal parts of small patches.

A linear gate that reads pixels cannot tell 'an edge somewhere around here' from no edge: bright and dark sides cancel.
Split by sign first, they do not. The encoding has no trained weights, loses nothing (`decode`), and a gated network
behind it is a gated network as any other, whose half-spaces lie in the space of the encoded images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.errors import NotFiniteError, OptionError, ShapeError

_IMAGES = 2000  # at most this many are looked at: their patches outnumber the unknowns thousands of times


class PatchParts(nn.Module):
    """Whitened principal components of every k × k patch of an image, their positive and negative parts apart.

    q = W p for the patch p around each pixel (zeros beyond the border), and the code is (max(q, 0), max(−q, 0)).
    Made by `PatchParts.fit`; put it before a network with ``nn.Sequential(parts, net)``.

    Attributes
    ----------
    filters : Tensor (m, C, k, k)
        W, the component with the largest variance first; m = C k².
    """

    filters: Tensor

    def __init__(self, filters: Tensor) -> None:
        super().__init__()
        if filters.ndim != 4 or filters.shape[0] != filters[0].numel() or filters.shape[2] != filters.shape[3]:
            raise ShapeError(f"PatchParts: filters must have shape (C·k·k, C, k, k), got {tuple(filters.shape)}.")
        self.register_buffer("filters", filters)

    @classmethod
    def fit(cls, images: Tensor, size: int = 3, floor: float = 1e-3) -> PatchParts:
        """Learn the components from images, shape (n, C, H, W), without labels.

        Parameters
        ----------
        size : int
            Edge of a patch, odd.
        floor : float
            Added to every variance, as a fraction of the largest, so that whitening does not blow up noise.

        Examples
        --------
        >>> x = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> parts = PatchParts.fit(x)
        >>> parts(x).shape, torch.allclose(parts.decode(parts(x)), x, atol=1e-5)
        (torch.Size([20, 54, 8, 8]), True)
        """
        if images.ndim != 4 or not images.dtype.is_floating_point:
            raise ShapeError(
                f"PatchParts.fit: needs real images of shape (n, channels, height, width), got {images.dtype} of shape "
                f"{tuple(images.shape)}."
            )
        if size % 2 == 0 or not 1 <= size <= min(images.shape[-2:]):
            raise OptionError(f"PatchParts.fit: size must be odd and at most the images' size, got {size}.")
        if not floor > 0:
            raise OptionError(f"PatchParts.fit: floor must be positive, got {floor}.")
        chosen = images[torch.linspace(0, len(images) - 1, min(len(images), _IMAGES)).long()].double()
        if not bool(torch.isfinite(chosen).all()) or not bool(chosen.std() > 0):
            raise NotFiniteError("PatchParts.fit: the images contain NaN or infinity, or are all of one colour.")
        patches = F.unfold(chosen, size).transpose(1, 2).flatten(0, 1)
        variance, axes = torch.linalg.eigh(torch.cov(patches.T).reshape(patches.shape[1], -1))
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # else each machine has its own signs
        filters = (axes / (variance.clamp_min(0) + floor * variance[-1]).sqrt()).T.flip(0)
        return cls(filters.reshape(-1, images.shape[1], size, size).to(images))

    def forward(self, x: Tensor) -> Tensor:
        """The code of images: (n, C, H, W) → (n, 2m, H, W), positive parts first."""
        q = F.conv2d(x, self.filters, padding=self.filters.shape[-1] // 2)
        return torch.cat([q.relu(), (-q).relu()], 1)

    def decode(self, code: Tensor) -> Tensor:
        """The images that a code came from."""
        m, channels, size, _ = self.filters.shape
        back = torch.linalg.inv(self.filters.reshape(m, m).double()).reshape(channels, size, size, m)
        centre = back[:, size // 2, size // 2].to(code)
        return torch.einsum("cm,nmhw->nchw", centre, code[:, :m] - code[:, m:])
