"""Figure 8: ν = yᵀH⁻¹y of the tangent kernels H = K and Kᵃ while networks train on binary MNIST."""

from __future__ import annotations

from functools import partial

from pathlens.papers.artifact import Artifact, float32
from pathlens.papers.claim import Claim
from pathlens.papers.deep_gated import binary_mnist
from pathlens.papers.experiment import Run, experiment
from pathlens.papers.panels import Series

_BELOW = Claim(
    "ν of the tangent kernel K is smaller where gates adapt or were learned",
    below=0.9,
    null=1.0,
    null_text="both alike",
    paper="Figure 8",
    unit="× (ν after the last epoch, adaptable or learned / frozen)",
)
_FALLS = Claim(
    "ν of the normalised kernel falls while the gates adapt",
    below=0.8,
    null=1.0,
    null_text="it stays",
    paper="Figure 8",
    unit="× (last epoch / start)",
)


@experiment(
    "dgn.fig8",
    title="Kernels align with the labels where gates adapt",
    what="binary MNIST: ν = yᵀH⁻¹y for H = K and Kᵃ, normalised and not, while training",
    claims=[_BELOW, _FALLS],
    deviations=[binary_mnist.DEPTH, binary_mnist.MATRIX, binary_mnist.COPY],
    sizes=binary_mnist.SIZES,
    data=("mnist",),
    minutes=(1, 8),
    flops=binary_mnist.training_flops,
    shares="binary-mnist",
)
def fig8(run: Run) -> Artifact:
    """ν of K for every network, of Kᵃ for soft-GaLU (the part of K that moves the gates)."""
    from pathlens.kernels import ntk

    trained = binary_mnist.train_all(run)
    nus = binary_mnist.nu_over_time(run, trained, "ν of K", ntk)
    gates = binary_mnist.nu_over_time(run, trained, "ν of Ka", partial(ntk, part="feature"), ["soft-GaLU"])
    return run.artifact(
        claims=[
            *(
                _BELOW.measure(nus[a][normalised, :, -1] / nus[b][normalised, :, -1], row=f"{kernel}: {a} / {b}")
                for normalised, kernel in enumerate(("K", "K/tr K"))
                for a, b in binary_mnist.PAIRS
            ),
            *(_FALLS.measure(binary_mnist.fall(nus[name]), row=f"K: {name}") for name in binary_mnist.ADAPTABLE),
            _FALLS.measure(binary_mnist.fall(gates["soft-GaLU"]), row="Kᵃ: soft-GaLU"),
        ],
        metrics={"ν of K": binary_mnist.nu_metrics(trained, nus), "ν of Kᵃ": binary_mnist.nu_metrics(trained, gates)},
        gates=binary_mnist.GATES,
        arrays=float32({"epochs": trained.epochs, "nu": list(nus.values()), "nu_gates": gates["soft-GaLU"]}),
        panels=[
            binary_mnist.nu_panel("Tangent kernel", "K", 0),
            binary_mnist.nu_panel("Normalised tangent kernel", "K", 1),
            binary_mnist.nu_panel("Gradients to the gates, soft-GaLU", "(Kᵃ)", 0, [Series("nu_gates[0]", "soft-GaLU")]),
            binary_mnist.nu_panel(
                "Gradients to the gates, soft-GaLU, normalised", "Kᵃ", 1, [Series("nu_gates[1]", "soft-GaLU")]
            ),
        ],
    )
