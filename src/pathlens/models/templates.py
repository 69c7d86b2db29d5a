"""Templates: plain ReLU networks that `gated_twin` turns into gated ones.

Every architecture of the four papers, for 32×32 images or flat inputs. A template is an ordinary `nn.Module`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.errors import OptionError, ShapeError
from pathlens.indexing import is_count


def check_sizes(inputs: int, hidden: Sequence[int], outputs: int) -> None:
    """Refuse widths that are not positive integers, and networks without a hidden layer."""
    if isinstance(hidden, Integral) or not isinstance(hidden, Sequence):
        raise ShapeError(f"hidden must be a sequence of widths, got {hidden!r}. Try hidden=(16,) * 5.")
    check_positive(inputs=(inputs,), hidden=hidden, outputs=(outputs,))
    if len(hidden) == 0:
        raise ShapeError("A gated network needs at least one hidden layer, got hidden=(). Try hidden=(16,).")


def check_positive(**sizes: Sequence[int]) -> None:
    """Refuse sizes that are not positive integers; the keyword is what the message calls them."""
    for name, values in sizes.items():
        if not all(map(is_count, values)):
            shown = values[0] if len(values) == 1 else tuple(values)
            raise ShapeError(f"Network sizes must be positive integers, got {name}={shown!r}. Try 16.")


def mlp(inputs: int, hidden: Sequence[int], outputs: int = 1, *, bias: bool = False) -> nn.Sequential:
    """Fully connected ReLU network; layers are named ``linear1, relu1, …, output``.

    >>> [name for name, _ in mlp(2, (16, 16)).named_children()]
    ['linear1', 'relu1', 'linear2', 'relu2', 'output']
    """
    check_sizes(inputs, hidden, outputs)
    return _stack({}, inputs, hidden, outputs, bias)


def _convolutions(channels: Sequence[int], make: Callable[[int, int], nn.Module]) -> dict[str, nn.Module]:
    """Layers ``conv1, relu1, …``; `make` takes the channels in and out of one."""
    check_positive(channels=channels)
    layers: dict[str, nn.Module] = {}
    for i, (a, b) in enumerate(pairwise(channels), start=1):
        layers |= {f"conv{i}": make(a, b), f"relu{i}": nn.ReLU()}
    return layers


def _stack(layers: dict[str, nn.Module], width: int, hidden: Sequence[int], outputs: int, bias: bool) -> nn.Sequential:
    """The given layers, then dense ones that read `width` numbers."""
    check_positive(dense=hidden, outputs=(outputs,))
    first = sum(1 for name in layers if name.startswith("relu")) + 1
    for i, (a, b) in enumerate(pairwise((width, *hidden)), start=first):
        layers |= {f"linear{i}": nn.Linear(a, b, bias=bias), f"relu{i}": nn.ReLU()}
    layers["output"] = nn.Linear((width, *hidden)[-1], outputs, bias=bias)
    return nn.Sequential(OrderedDict(layers))


def vconv(
    outputs: int = 10,
    *,
    channels: Sequence[int] = (3, 64, 64, 128, 128),
    dense: Sequence[int] = (256, 256),
    size: int = 32,
    bias: bool = False,
) -> nn.Sequential:
    """VCONV of the NPF paper: four 3×3 convolutions, flatten, two dense layers.

    >>> vconv(channels=(3, 4), dense=(8,), size=4)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 10])
    """
    layers = _convolutions(channels, partial(nn.Conv2d, kernel_size=3, padding="same", bias=bias))
    return _stack(layers | {"flatten": nn.Flatten()}, channels[-1] * size * size, dense, outputs, bias)


def gconv(
    outputs: int = 10,
    *,
    channels: Sequence[int] = (3, 64, 64, 128, 128),
    dense: Sequence[int] = (256, 256),
    bias: bool = False,
) -> nn.Sequential:
    """GCONV of the NPF paper: VCONV with global average pooling in place of the flattening.

    >>> gconv(channels=(3, 8, 8), dense=(16,))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    layers = _convolutions(channels, partial(nn.Conv2d, kernel_size=3, padding="same", bias=bias))
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return _stack(layers, channels[-1], dense, outputs, bias)


def conv5(
    outputs: int = 10,
    *,
    filters: int = 26,
    layers: int = 5,
    dense: int | None = 64,
    channels: int = 3,
    bias: bool = False,
) -> nn.Sequential:
    """The half-space paper's CIFAR network: five 3×3 convolutions, global average pooling, one dense layer, a head.

    The paper's '1 dense layer with 64 neurons' needs a 10-way head; ``dense=None`` drops the dense layer. Kernel size
    and the ReLU after the dense layer are not stated there.
    """
    check_positive(layers=(layers,))
    return gconv(
        outputs, channels=(channels,) + (filters,) * layers, dense=() if dense is None else (dense,), bias=bias
    )


class _Block(nn.Module):
    """Two 3×3 convolutions with batch-norm, a shortcut, and a ReLU after the addition."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "projection":
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        else:
            self.shortcut = _PadShortcut(outputs - inputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return self.relu(h + self.shortcut(x))


class _PadShortcut(nn.Module):
    """Every `stride`-th pixel, new channels filled with zeros: the parameter-free shortcut of CIFAR ResNets."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2)
        )


class ResNet(nn.Module):
    """Residual network for 32×32 images: a 3×3 stem, stages of basic blocks, average pooling, one linear layer.

    Parameters
    ----------
    blocks, widths : sequences of int, one entry per stage
        The first stage keeps the resolution, each later one halves it.
    shortcut : {"projection", "pad"}
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        outputs: int = 10,
        shortcut: str = "projection",
        channels: int = 3,
    ) -> None:
        super().__init__()
        if shortcut not in ("projection", "pad"):
            raise OptionError(f"ResNet: shortcut must be 'projection' or 'pad', got {shortcut!r}.")
        check_positive(blocks=blocks, widths=widths, outputs=(outputs,), channels=(channels,))
        if len(blocks) != len(widths) or not widths:
            raise ShapeError(
                f"ResNet: needs one width per stage, got {len(blocks)} numbers of blocks and {len(widths)} widths."
            )
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        width = widths[0]
        stages: list[nn.Module] = []
        for s, (count, w) in enumerate(zip(blocks, widths)):
            stage = []
            for b in range(count):
                stage.append(_Block(width, w, 2 if s > 0 and b == 0 else 1, shortcut))
                width = w
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.output = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stages(self.relu(self.bn1(self.conv1(x))))
        return self.output(torch.flatten(self.pool(h), 1))


def resnet34(outputs: int = 10) -> ResNet:
    """ResNet-34 with a 3×3 stem and no max-pooling: 33 gate sites."""
    return ResNet((3, 4, 6, 3), (64, 128, 256, 512), outputs)


def resnet110(outputs: int = 10) -> ResNet:
    """ResNet-110 of the CIFAR family (3 × 18 blocks of widths 16, 32, 64, zero-padded shortcuts): 109 gate sites."""
    return ResNet((18, 18, 18), (16, 32, 64), outputs, shortcut="pad")


class _CircularConv1d(nn.Module):
    """h(p) = Σ_k W_k x(p + k), indices modulo the length: DGN section 4."""

    def __init__(self, inputs: int, outputs: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.conv = nn.Conv1d(inputs, outputs, kernel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, self.kernel - 1), mode="circular"))


class CircularConvNet(nn.Module):
    """Circular 1-D convolutions with ReLUs, then pooling or flattening, then dense layers.

    Parameters
    ----------
    length : int
        Number of positions of the input, which has shape (n, channels[0], length).
    channels : sequence of int
        Channels of the input and of each convolution.
    kernel : int
    pool : {"average", "flatten"}
        Global average pooling (invariant to rotation), or none.
    dense : sequence of int
        Hidden dense layers after it.
    """

    def __init__(
        self,
        length: int,
        channels: Sequence[int] = (1, 1, 1),
        kernel: int = 2,
        pool: str = "average",
        dense: Sequence[int] = (),
        outputs: int = 1,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if pool not in ("average", "flatten"):
            raise OptionError(f"CircularConvNet: pool must be 'average' or 'flatten', got {pool!r}.")
        check_positive(length=(length,), kernel=(kernel,))
        if kernel > length:
            raise ShapeError(f"CircularConvNet: kernel {kernel} does not fit length {length}.")
        layers = _convolutions(channels, partial(_CircularConv1d, kernel=kernel, bias=bias))
        if pool == "average":
            layers["pool"] = nn.AdaptiveAvgPool1d(1)
        layers["flatten"] = nn.Flatten()
        self.stack = _stack(layers, channels[-1] * (1 if pool == "average" else length), dense, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda h: torch.erf(h / 2**0.5),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
}


class LocalisationNet(nn.Module):
    """One hidden layer: ŷ = mean_k σ(w_k·x + b_k), or a trainable second layer (equation 1 of the GDLN note).

    Parameters
    ----------
    inputs, units : int
    activation : {"erf", "sigmoid", "relu"}
        erf(h/√2), 1/(1 + e^−h) or max(h, 0).
    second_layer : {"mean", "trainable"}
    bias : bool
        Trainable biases of the hidden layer (and of a trainable second layer).
    init_scale : float
        Weight variance is init_scale·2/(inputs + units), as in the public code.

    >>> LocalisationNet(40, 10, "relu")(torch.zeros(5, 40)).shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        activation: str = "relu",
        second_layer: str = "mean",
        *,
        bias: bool = False,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(inputs, (units,), 1)
        if activation not in _ACTIVATIONS:
            raise OptionError(f"LocalisationNet: activation must be 'erf', 'sigmoid' or 'relu', got {activation!r}.")
        if second_layer not in ("mean", "trainable"):
            raise OptionError(f"LocalisationNet: second_layer must be 'mean' or 'trainable', got {second_layer!r}.")
        if not init_scale > 0:
            raise OptionError(f"LocalisationNet: init_scale must be positive, got {init_scale}.")
        self.activation, self.init_scale = activation, init_scale
        self.hidden = nn.Linear(inputs, units, bias=bias)
        self.readout = nn.Linear(units, 1, bias=bias) if second_layer == "trainable" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w ~ N(0, init_scale·2/(inputs + units)), biases 0, and a trainable readout around the mean."""
        units, inputs = self.hidden.weight.shape
        with torch.no_grad():
            self.hidden.weight.normal_(0.0, (self.init_scale * 2 / (inputs + units)) ** 0.5)
            if self.hidden.bias is not None:
                self.hidden.bias.zero_()
            if self.readout is not None:
                self.readout.weight.fill_(1 / units)
                if self.readout.bias is not None:
                    self.readout.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        a = _ACTIVATIONS[self.activation](self.hidden(x))
        return a.mean(dim=1, keepdim=True) if self.readout is None else self.readout(a)
