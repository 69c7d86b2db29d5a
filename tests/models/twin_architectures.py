"""Modules that people really write, and traps: each converts exactly. Refused ones are in the test of refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.models import CircularConvNet, LocalisationNet, ResNet, conv5, gconv, mlp, vconv


class Mlp(nn.Module):
    """A hidden layer, something to be filled in, a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)


class InplaceModuleReadBySkip(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = self.relu(h)
        return self.last(self.second(a) + h)  # h is the ReLU's output by now


class InplaceAdditionReadAgain(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kept = h
        h += torch.relu(self.second(h))
        return self.last(torch.relu(h) + kept)


class InplaceFunctional(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = F.relu(h, inplace=True)
        return self.last(self.second(a) + h)


class InplacePositional(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = F.relu(h, True)
        return self.last(self.second(a) + h)


class InplaceMethod(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.relu_()
        return self.last(F.relu(self.second(h)) - h.mul_(2))


class InplaceTorchFunction(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch.relu_(h)
        return self.last(h + F.leaky_relu_(self.second(h), 0.2))


class InplaceDropoutReadAgain(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        a = self.drop(h)
        return self.last(self.second(a) + h)


class InplaceOnAViewNobodyReads(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(x.size(0), 2, 3)
        h.relu_()
        return self.last(h.flatten(1))


class FunctionalDropout(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.first(x)), 0.4, self.training)
        h = F.dropout(input=F.relu(self.second(h)), p=0.3, training=self.training, inplace=True)
        return self.last(h)


class DropoutThatDoesNothing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.first(x)), p=0.0)
        return self.last(F.dropout(h, training=False))


class SharedRelu(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.second(self.act(self.first(x)))))


class Keywords(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(input=self.first(input=x))
        h = torch.relu(input=torch.add(input=self.second(h), other=h, alpha=2))
        return self.last(self.relu(input=h))


class UnusedDefault(Mlp):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.last(F.relu(self.first(x)))


class ConstantInForward(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x - torch.tensor([0.5, 0.1, 0.0, 0.2, 0.3]))))


class Buffers(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(5.0))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x - self.mean)) * self.mask)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.last(x)


class Reused(nn.Module):
    """One linear layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu, self.last = nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.relu(self.layer(x))
        return self.last(x)


class Tied(Mlp):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.third(F.relu(self.second(F.relu(self.first(x)))))))


class ScaledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias)


class StandardConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 3


class Subclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = StandardConv(3, 4, 3), ScaledLinear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


class DenseNetLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(7), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu(self.a(x))], 1)
        x = torch.cat((x, F.relu(self.b(self.norm(x)))), dim=1)
        return self.head(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.down(x))
        h = F.relu(self.mid(F.interpolate(F.avg_pool2d(h, 2), scale_factor=2, mode="bilinear")) + h)
        return self.out(torch.cat([F.relu(self.up(h)), x], 1))


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h * w).unflatten(2, (h, w))
        y = torch.relu(self.conv(x)).permute(0, 2, 3, 1).contiguous()
        left, right = y.chunk(2, dim=1)
        y = torch.stack([left, right], 1).mean(3)
        return self.head(y.reshape(x.shape[0], -1) / y.size(1))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(F.relu(self.norm(x), inplace=True))
        return self.head(F.relu(x).mean(dim=(2, 3)))


class ReluFirstAndLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.relu()).relu()


class RowsInTheMiddle(nn.Module):
    """The batch is the second axis for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1).repeat(1, 7, 1).transpose(0, 1)
        return self.b(F.relu(self.a(h))).mean(0)


class Example(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sites: int


FLAT, IMAGE = (5,), (3, 8, 8)


def _max_pool_net() -> nn.Module:
    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        pool,
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        pool,
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class FunctionalMaxPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv(x)), 2, stride=2)
        return self.head(F.adaptive_max_pool2d(h, 1).flatten(1))


MAX_POOLED = {
    "max-pool": Example(_max_pool_net, IMAGE, 2),
    "functional-max-pool": Example(FunctionalMaxPool, IMAGE, 1),
}

AFFINE = {
    "mlp": Example(lambda: mlp(5, (6, 4), 3, bias=True), FLAT, 2),
    "inplace-module-skip": Example(InplaceModuleReadBySkip, FLAT, 1),
    "inplace-addition": Example(InplaceAdditionReadAgain, FLAT, 2),
    "inplace-functional": Example(InplaceFunctional, FLAT, 1),
    "inplace-positional": Example(InplacePositional, FLAT, 1),
    "inplace-method": Example(InplaceMethod, FLAT, 2),
    "inplace-torch-function": Example(InplaceTorchFunction, FLAT, 2),
    "inplace-dropout": Example(InplaceDropoutReadAgain, FLAT, 1),
    "inplace-view-unread": Example(InplaceOnAViewNobodyReads, FLAT, 1),
    "functional-dropout": Example(FunctionalDropout, FLAT, 2),
    "idle-dropout": Example(DropoutThatDoesNothing, FLAT, 1),
    "shared-relu": Example(SharedRelu, FLAT, 2),
    "keywords": Example(Keywords, FLAT, 3),
    "unused-default": Example(UnusedDefault, FLAT, 1),
    "constant": Example(ConstantInForward, FLAT, 1),
    "buffers": Example(Buffers, FLAT, 1),
    "module-list": Example(Loop, FLAT, 4),
    "reused-layer": Example(Reused, FLAT, 3),
    "tied-weights": Example(Tied, FLAT, 3),
    "subclasses": Example(Subclasses, IMAGE, 1),
    "densenet": Example(DenseNetLike, IMAGE, 2),
    "unet": Example(UNet, IMAGE, 3),
    "shapes": Example(Shapes, (3, 6, 6), 1),
    "pre-activation": Example(PreActivation, IMAGE, 2),
    "relu-first-and-last": Example(ReluFirstAndLast, FLAT, 2),
    "rows-in-the-middle": Example(RowsInTheMiddle, FLAT, 1),
    "nested-sequential": Example(
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6)), nn.LeakyReLU(0.2)),
            nn.Linear(6, 3),
        ),
        FLAT,
        2,
    ),
    "batch-norm": Example(
        lambda: nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 3),
        ),
        FLAT,
        2,
    ),
    "convolutions": Example(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d((1, 2)),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        IMAGE,
        3,
    ),
    "vconv": Example(lambda: vconv(3, channels=(3, 4, 4), dense=(6,), size=8, bias=True), IMAGE, 3),
    "gconv": Example(lambda: gconv(3, channels=(3, 4, 4), dense=(6,), bias=True), IMAGE, 3),
    "conv5": Example(lambda: conv5(3, filters=4, dense=6, bias=True), IMAGE, 6),
    "resnet-projection": Example(lambda: ResNet((1, 1), (4, 8), 3), IMAGE, 5),
    "resnet-pad": Example(lambda: ResNet((1, 2), (4, 8), 3, shortcut="pad"), IMAGE, 7),
    "circular": Example(lambda: CircularConvNet(6, (2, 3, 3), 2, dense=(4,)), (2, 6), 3),
    "localisation": Example(lambda: LocalisationNet(5, 4, "relu", bias=True), FLAT, 1),
}
ALL = AFFINE | MAX_POOLED
