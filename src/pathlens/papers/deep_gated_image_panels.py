"""What pages draw of the experiments on deep gated networks and image sets: one function per experiment.

Each takes what the labels need and refers to arrays by the names under which its experiment stores them. May import
panels only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathlens.papers.panels import Panel, Series

__all__ = ["adaptable", "galu_mnist", "gates_only", "path_kernel", "soft_relu", "tangent_kernels"]

_TEST = "test accuracy, %"


def gates_only(names: Sequence[str]) -> list[Panel]:
    """dgn.exp6; the last name is the deep linear network."""
    curves = [Series(f"test[{i}]", name) for i, name in enumerate(names)]
    ends = [Series(f"test[{i}, :, -1]", name) for i, name in enumerate(names)]
    switched = [
        Series(f"hard[{i}]", f"{name}, switched to hard") for i, name in enumerate(names) if name.endswith("soft")
    ]
    marks = [(56.0, "paper"), (10.0, "chance")]
    return [
        Panel("lines", "Random values, learned gates", curves, x_label="epoch", y_label=_TEST, marks=marks),
        Panel("strips", "After the last epoch", [*ends, *switched], x_label=_TEST, marks=marks),
    ]


def soft_relu(names: Sequence[str], epsilons: Sequence[float], relu: float, linear: float) -> list[Panel]:
    """dgn.tab4; ``relu`` and ``linear`` are median test accuracies."""
    marks = [(relu, "ReLU"), (linear, "deep linear")]
    over = [Series(f"soft[{i}].T", f"ε = {epsilon:g}") for i, epsilon in enumerate(epsilons)]
    hard = [Series(f"hard[{i}].T", f"ε = {epsilon:g}") for i, epsilon in enumerate(epsilons)]
    rows = [Series(f"best[{i}]", name) for i, name in enumerate(names)]
    return [
        Panel("lines", "Soft-ReLU over β, best epoch", over, "betas", "β", _TEST, "log", marks=marks),
        Panel("strips", "Table 4, best epoch", rows, x_label=_TEST),
        Panel(
            "lines",
            "The same networks with hard gates at test",
            hard,
            "betas",
            "β",
            f"{_TEST}, last epoch",
            "log",
            marks=marks,
        ),
    ]


def galu_mnist(tasks: Sequence[str]) -> list[Panel]:
    """dgn.fig5."""

    def both(array: str, k: int) -> list[Series]:
        return [Series(f"{array}[{k}, {i}]", name) for i, name in enumerate(("GaLU", "ReLU"))]

    training = [
        Panel(
            "lines", f"Training loss, {task}", both("loss", k), x_label="epoch", y_label="cross-entropy", y_scale="log"
        )
        for k, task in enumerate(tasks)
    ]
    marks = [(98.5, ""), (96.5, "paper: GaLU 96.5, ReLU 98.5")]
    test = [
        Panel("lines", f"Test accuracy, {task}", both("test", k), x_label="epoch", y_label=_TEST, marks=marks)
        for k, task in enumerate(tasks)
        if task == "MNIST"
    ]
    return [*training, *test]


def _nu(title: str, names: Sequence[str], kernel: str, normalised: bool) -> Panel:
    """ν of every network over epochs; the array's second axis is raw, normalised."""
    series = [Series(f"nu[{i}, {int(normalised)}]", name) for i, name in enumerate(names)]
    what = f"yᵀ({kernel}/tr {kernel})⁻¹y" if normalised else f"yᵀ{kernel}⁻¹y"
    return Panel("lines", title, series, "epochs", "epoch", what, "log", "log")


def path_kernel(names: Sequence[str]) -> list[Panel]:
    """dgn.fig6."""
    return [_nu("Normalised path kernel", names, "M", True), _nu("Path kernel as it is", names, "M", False)]


def adaptable(names: Sequence[str]) -> list[Panel]:
    """dgn.fig7."""

    def curves(array: str, title: str) -> Panel:
        series = [Series(f"{array}[{i}]", name) for i, name in enumerate(names)]
        return Panel("lines", title, series, x_label="epoch", y_label="squared loss", y_scale="log")

    right = [Series(f"right[{i}]", name) for i, name in enumerate(names)]
    return [
        curves("loss", "Training loss"),
        curves("test", "Test loss"),
        Panel("strips", "After the last epoch", right, x_label="test accuracy, %"),
    ]


def tangent_kernels(names: Sequence[str]) -> list[Panel]:
    """dgn.fig8."""
    gates = [
        Panel(
            "lines",
            f"Gradients to the gates, soft-GaLU{', normalised' if k else ''}",
            [Series(f"nu_gates[{k}]", "soft-GaLU")],
            "epochs",
            "epoch",
            "yᵀ(Kᵃ/tr Kᵃ)⁻¹y" if k else "yᵀ(Kᵃ)⁻¹y",
            "log",
            "log",
        )
        for k in (0, 1)
    ]
    return [_nu("Tangent kernel", names, "K", False), _nu("Normalised tangent kernel", names, "K", True), *gates]
