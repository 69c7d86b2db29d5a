"""Figure 6: ν = yᵀM⁻¹y of the path kernel M = (xᵀx)∘λ while networks train on binary MNIST."""

from __future__ import annotations

from functools import partial

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated import binary_mnist
from pathlens.papers.experiment import Run, experiment

_FALLS = Claim(
    "ν of the normalised path kernel M falls while the gates adapt",
    below=0.8,
    null=1.0,
    null_text="it stays",
    paper="Figure 6: 'ν_t reduces as training proceeds'",
    unit="× (last epoch / start)",
)
_BELOW = Claim(
    "at the end it is smaller than with gates that stay",
    below=0.9,
    null=1.0,
    null_text="both alike",
    paper="'always upper bounded by ν_t when gates are non-adaptive'",
    unit="× (ν of M after the last epoch, adaptable or learned / frozen)",
)


@experiment(
    "dgn.fig6",
    title="The right sub-networks are learned",
    what="binary MNIST: ν = yᵀM⁻¹y of the path kernel M = (xᵀx)∘λ while training, normalised and not",
    claims=[_FALLS, _BELOW],
    deviations=[binary_mnist.DEPTH, binary_mnist.MATRIX, binary_mnist.COPY],
    sizes=binary_mnist.SIZES,
    data=("mnist",),
    minutes=(1, 8),
    flops=binary_mnist.training_flops,
    shares="binary-mnist",
)
def fig6(run: Run) -> Artifact:
    """ν of M over epochs; M changes only through the gates."""
    from pathlens.kernels import npk

    trained = binary_mnist.train_all(run)
    nus = binary_mnist.nu_over_time(run, trained, "ν of M", partial(npk, soft=True))
    return run.artifact(
        claims=[
            *(_FALLS.measure(binary_mnist.fall(nus[name]), row=name) for name in binary_mnist.ADAPTABLE),
            *(_BELOW.measure(nus[a][1, :, -1] / nus[b][1, :, -1], row=f"{a} / {b}") for a, b in binary_mnist.PAIRS),
        ],
        metrics={"ν of M": binary_mnist.nu_metrics(trained, nus)},
        gates=binary_mnist.GATES,
        arrays=float32({"epochs": trained.epochs, "nu": list(nus.values())}),
        panels=[
            binary_mnist.nu_panel("Normalised path kernel", "M", 1),
            binary_mnist.nu_panel("Path kernel as it is", "M", 0),
        ],
    )
