"""Draws docs/images/evidence.png: a small DLGN is trained on part of CIFAR-10, and shows what it sees in test images.

`make evidence` takes about ten minutes on two cores and needs CIFAR-10.
"""

from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import pathlens as pl
from pathlens.data import DataSet
from pathlens.training import Execution, Keep, Teacher

CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BLOCKS, WIDTHS = (1, 1, 1), (16, 32, 64)
SHOWN = 8


def taught_network(data: DataSet, epochs: int) -> nn.Sequential:
    """A DLGN on encoded images that learned from a ReLU network of its shape, with hard gates."""
    recipe = {
        "loss": "cross_entropy",
        "optimizer": partial(torch.optim.SGD, momentum=0.9),
        "lr": 0.1,
        "weight_decay": 5e-4,
        "scheduler": "one_cycle",
        "batch_size": 64,
        "augment": "crop_flip",
        "keep": Keep(evaluate="running"),
        "execution": Execution(compile=False),
        "epochs": epochs,
    }
    relu = pl.gated_twin(pl.models.ResNet(BLOCKS, WIDTHS), "relu", example=data.x[:2], seed=0)
    pl.train(relu, data, progress="ReLU", **recipe)
    parts = pl.models.PatchParts.fit(data.x)
    template = pl.models.ResNet(BLOCKS, WIDTHS, channels=parts.channels)
    gated = pl.gated_twin(template, "dlgn", example=parts(data.x[:2]), gate="straight_through", seed=0)
    student = nn.Sequential(parts, gated)
    run = pl.train(student, data, teacher=Teacher(relu, temperature=4), progress="DLGN", **recipe)
    print(f"test accuracy {run.history['test_accuracy'][-1]:.1%}")
    return nn.Sequential(parts, gated.with_gate("hard")).eval()


def draw(net: nn.Sequential, images: Tensor, labels: Tensor, out: str) -> None:
    """The images, and below each where the output of the class that the network says comes from."""
    parts, gated = net
    said = net(images).argmax(1)
    why = pl.paths.inputs(gated, parts(images), output=said)
    figure, axes = plt.subplots(2, len(images), figsize=(12, 3.4), layout="constrained")
    for image, label, answer, found, rest, (above, below) in zip(
        images, labels.tolist(), said.tolist(), why.maps(), why.rest.tolist(), axes.T
    ):
        shown = image.permute(1, 2, 0)
        above.imshow((shown - shown.min()) / (shown.max() - shown.min()))
        above.set_title(CLASSES[label], fontsize=10)
        top = float(found.abs().max())
        below.imshow(found, cmap="RdBu_r", vmin=-top, vmax=top)
        sums = f"{float(found.sum()):.1f} + {rest:.1f}".replace("+ -", "− ")
        below.set_title(f"{CLASSES[answer]}: {sums}", fontsize=10)
        above.axis("off")
        below.set(xticks=[], yticks=[])
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    cifar = pl.data.cifar10(standardise=True).subsample(10_000, n_test=1_000, seed=0)
    assert cifar.x_test is not None and cifar.y_test is not None
    draw(taught_network(cifar, epochs=8), cifar.x_test[:SHOWN], cifar.y_test[:SHOWN], "docs/images/evidence.png")
