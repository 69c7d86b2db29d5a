"""`PatchParts`: a fixed encoding of images by the principal components of small patches, split by sign.

A linear gate on pixels cannot detect an edge at an unknown place, since bright and dark sides cancel; split by sign
they do not. The encoding has no trained weights and can be inverted (`decode`).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.errors import DTypeError, EmptyDataError, NotFiniteError, OptionError, ShapeError

_AT_ONCE = 100  # images whose patches are in memory at the same time


class PatchParts(nn.Module):
    """Whitened principal components of every k × k patch of an image, their positive and negative parts apart.

    q = W (p − mean) for the patch p around each pixel, where the mean colour continues beyond the border, and the code
    is (max(q, 0), max(−q, 0)). Made by `PatchParts.fit`; put it before a network with ``nn.Sequential(parts, net)``,
    so that augmentation moves pixels: the code of a flipped image is not the flipped code.

    Attributes
    ----------
    filters : Tensor (m, C, k, k)
        W, the component with the largest variance first; m = C k².
    mean : Tensor (C, 1, 1)
        The mean colour.
    """

    filters: Tensor
    mean: Tensor

    def __init__(self, filters: Tensor, mean: Tensor) -> None:
        super().__init__()
        square = filters.ndim == 4 and filters.shape[2] == filters.shape[3] and filters.shape[3] % 2 == 1
        if not square or filters.shape[0] != filters[0].numel() or mean.shape != (filters.shape[1], 1, 1):
            raise ShapeError(
                "PatchParts: filters must have shape (C·k·k, C, k, k) with odd k and mean (C, 1, 1), got "
                f"{tuple(filters.shape)} and {tuple(mean.shape)}."
            )
        self.register_buffer("filters", filters)
        self.register_buffer("mean", mean)

    @classmethod
    def fit(cls, images: Tensor | np.ndarray, *, size: int = 3, floor: float = 1e-3, most: int = 2000) -> PatchParts:
        """Learn the components from images, shape (n, C, H, W), without labels.

        Parameters
        ----------
        size : int
            Edge of a patch, odd.
        floor : float
            Added to every variance, as a fraction of the largest, so that whitening does not blow up noise.
        most : int
            Largest number of images that are used; of more, evenly spaced ones.

        Examples
        --------
        >>> x = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> parts = PatchParts.fit(x)
        >>> parts
        PatchParts(3 → 54 channels, patches of 3 × 3)
        >>> parts(x).shape, torch.allclose(parts.decode(parts(x)), x, atol=1e-5)
        (torch.Size([20, 54, 8, 8]), True)
        """
        images = torch.as_tensor(images).detach()
        if not images.dtype.is_floating_point:
            raise DTypeError(
                f"PatchParts.fit: needs real images, got {images.dtype}. Convert bytes by images.float() / 255, and do "
                "so for the network."
            )
        last = images.ndim == 4 and images.shape[1] > 4 and images.shape[1] == images.shape[2] and images.shape[3] <= 4
        if images.ndim != 4 or last:
            remedy = " Channels come first: images.permute(0, 3, 1, 2)." if last else ""
            raise ShapeError(
                "PatchParts.fit: needs images of shape (n, channels, height, width), got "
                f"{tuple(images.shape)}.{remedy}"
            )
        if len(images) == 0 or most < 1:
            raise EmptyDataError("PatchParts.fit: there are no images to look at.")
        if size % 2 == 0 or not 1 <= size <= min(images.shape[-2:]):
            raise OptionError(f"PatchParts.fit: size must be odd and at most the images' size, got {size}.")
        if not floor > 0:
            raise OptionError(f"PatchParts.fit: floor must be positive, got {floor}.")
        chosen = images[torch.linspace(0, len(images) - 1, min(len(images), most)).long()]
        mean = chosen.double().mean((0, 2, 3))[:, None, None]
        m = images.shape[1] * size**2
        total, squares, count = mean.new_zeros(m), mean.new_zeros(m, m), 0
        for part in chosen.split(_AT_ONCE):
            patches = F.unfold(part.double() - mean, size).transpose(1, 2).flatten(0, 1)
            total, squares, count = total + patches.sum(0), squares + patches.T @ patches, count + len(patches)
        covariance = squares / count - torch.outer(total, total) / count**2
        if not bool(torch.isfinite(covariance).all()) or not bool(covariance.trace() > 0):
            raise NotFiniteError("PatchParts.fit: the images contain NaN or infinity, or are all of one colour.")
        variance, axes = torch.linalg.eigh(covariance)
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # signs depend on the machine
        filters = (axes / (variance.clamp_min(0) + floor * variance[-1]).sqrt()).T.flip(0)
        return cls(filters.reshape(m, -1, size, size).to(images), mean.to(images))

    @property
    def channels(self) -> int:
        """Channels of the code, 2 C k²: what the network behind it takes."""
        return 2 * len(self.filters)

    def forward(self, x: Tensor) -> Tensor:
        """The code of images: (n, C, H, W) → (n, 2m, H, W), positive parts first."""
        if x.ndim != 4 or x.shape[1] != self.filters.shape[1]:
            raise ShapeError(
                f"PatchParts: needs images of shape (n, {self.filters.shape[1]}, height, width), got {tuple(x.shape)}."
            )
        q = F.conv2d(x - self.mean, self.filters, padding=self.filters.shape[-1] // 2)
        return torch.cat([q.relu(), (-q).relu()], 1)

    def decode(self, code: Tensor) -> Tensor:
        """The images that a code came from."""
        m, channels, size, _ = self.filters.shape
        back = torch.linalg.inv(self.filters.reshape(m, m).double()).reshape(channels, size, size, m)
        centre = back[:, size // 2, size // 2].to(code)
        return torch.einsum("cm,nmhw->nchw", centre, code[:, :m] - code[:, m:]) + self.mean

    def __repr__(self) -> str:
        _, channels, size, _ = self.filters.shape
        return f"PatchParts({channels} → {self.channels} channels, patches of {size} × {size})"
