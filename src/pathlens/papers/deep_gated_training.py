"""Deep Gated Networks on binary MNIST: gates that adapt against gates that stay (Figures 6, 7 and 8).

One set of trainings, Experiments 3, 4 and 5, serves all three figures. Torch is imported inside functions, so that
listing the experiments stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import deep_gated_image_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.image_runs import options, spread
from pathlens.papers.sizes import SIZES

if TYPE_CHECKING:
    from torch import Tensor

    from pathlens.data import DataSet
    from pathlens.training import Runs

__all__ = ["ADAPTABLE", "Trained", "fig6", "fig7", "fig8", "train_all"]

PAPER = "Deep Gated Networks"
BETA, EPSILON = 4.0, 0.1
ADAPTABLE = ("soft-GaLU", "soft-ReLU", "ReLU")
FROZEN = "GaLU, random gates"
COPIED = "GaLU, gates of ReLU at the start"
LEARNED = "GaLU, learned gates"
NETWORKS = (*ADAPTABLE, FROZEN, COPIED, LEARNED)
SOFT = {"soft-GaLU and soft-ReLU": f"soft β={BETA:g}, ε={EPSILON:g}", "ReLU and GaLU": "hard"}
_KEPT = (0, 1, 2, 5, 10, 20, 50, 100)
# who is to be better than whom: Experiments 3, 4 and 5
PAIRS = (*((name, FROZEN) for name in ADAPTABLE), ("ReLU", COPIED), (LEARNED, FROZEN))

DEPTH = Deviation(
    paper="d = 5 (Figure 6), d = 6 (Experiments 3 to 5), both w = 100",
    authors_code="depth 6, w = 100, no biases, ±√(2/w), RMSprop 1e-4, batches of 64, 50 epochs",
    ours="d = 6 (five hidden layers) everywhere, the code's other settings, 100 epochs (quick: narrower, fewer rows, a "
    "larger rate)",
    why="one set of trainings serves all figures, and Experiment 5 trains for T = 100 epochs",
)
COPY = Deviation(
    paper="Experiment 4: Θᵍ = Θʷ at the start, 'weights chosen according to Assumption 2'",
    authors_code="–",
    ours="±σ weights (Assumption 1), gates from a copy of the first values",
    why="Assumption 2 is independence, which a copy contradicts",
)
SCORE = Deviation(
    paper="'generalisation' of Figure 7 is not defined",
    authors_code="–",
    ours="squared loss on the test set, and the share of right signs; both after the last epoch",
    why="squared loss is what is trained",
)
MATRIX = Deviation(
    paper="M = (xᵀx)∘λ is shown for ReLU",
    authors_code="20 examples per class",
    ours="also for the other networks, soft gates as they are; n′ examples in equal shares, kernels in float64",
    why="K and M of the same networks can then be compared",
)


# --- trainings ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """Every network of Experiments 3 to 5, all seeds, with its weights at the kept epochs."""

    data: DataSet
    runs: dict[str, Runs]
    epochs: list[int]

    def networks(self, name: str) -> list[list[Any]]:
        """Copies in float64 on the CPU, per seed and kept epoch."""
        import copy

        found = []
        for net, trajectory in zip(self.runs[name].networks, self.runs[name]):
            states = [trajectory.at_epoch(epoch).snapshot.state for epoch in self.epochs]  # type: ignore[union-attr]
            clones = [copy.deepcopy(net).cpu() for _ in states]
            for clone, state in zip(clones, states):
                clone.load_state_dict(state)
            found.append([clone.double() for clone in clones])
        return found

    def examples(self, count: int) -> tuple[Tensor, Tensor]:
        """The first training rows of both digits in equal shares, float64."""
        import torch

        rows = torch.cat([(self.data.y[:, 0] == sign).nonzero()[: count // 2, 0] for sign in (-1, 1)])
        return self.data.x[rows].double(), self.data.y[rows, 0].double()


def train_all(run: Run, size: Mapping[str, Any]) -> Trained:
    """Experiments 3, 4 and 5: ReLU, soft-ReLU, soft-GaLU; GaLU with random gates, with those of ReLU's first weights,
    and with those that ReLU had learned at the end."""

    def compute() -> Trained:
        from pathlens import models
        from pathlens.data import binary_mnist
        from pathlens.training import train

        data = binary_mnist(flatten=True)
        if size["rows"] is not None:
            data = data.subsample(size["rows"], n_test=size["rows_test"])
        hidden, d = (size["width"],) * size["hidden_layers"], data.d
        init: dict[str, Any] = {"init": models.Init("bernoulli", math.sqrt(2 / size["width"]))}
        soft: dict[str, Any] = {"beta": BETA, "epsilon": EPSILON, **init}
        epochs = [epoch for epoch in _KEPT if epoch < size["epochs"]] + [size["epochs"]]
        runs: dict[str, Any] = {}

        def fit(name: str, net: Any, **more: Any) -> None:
            folder = run.checkpoint("binary-mnist", str(NETWORKS.index(name)))
            given = options(run, name) | {"loss": "mse", "keep": epochs, "execution": None}
            given |= {"checkpoints": checkpoints_in(folder, every=10), **more}
            runs[name] = train(
                net,
                data,
                epochs=size["epochs"],
                optimizer="rmsprop",
                lr=size["lr"],
                batch_size=size["batch_size"],
                **given,
            )

        fit("soft-GaLU", models.soft_galu(d, hidden, gate_activation="soft", **soft))
        fit("soft-ReLU", models.soft_relu(d, hidden, **soft))
        fit("ReLU", models.relu(d, hidden, **init))
        fit(FROZEN, models.galu(d, hidden, **init))
        fit(COPIED, models.galu(d, hidden, dependent=True, **init))
        # the values must be independent of those that ReLU began with: other seeds
        learned = [
            models.flnpf(d, hidden, checkpoint=net, seed=1000 + seed, **init)
            for net, seed in zip(runs["ReLU"].networks, run.seeds)
        ]
        fit(LEARNED, learned, seeds=None, seed=run.seeds[0])
        return Trained(data, runs, epochs)

    return run.once(("binary-mnist", *(str(item) for item in sorted(size.items()))), compute)


def _operations(size: Mapping[str, Any]) -> float:
    """Floating-point operations of the trainings: 3 forward passes' worth for each network that makes its own gates, 6
    for soft-GaLU, 4 for gates that stay."""
    w, passes = size["width"], 2 * 3 + 6 + 3 * 4
    weights = 784 * w + (size["hidden_layers"] - 1) * w * w + w
    return 2.0 * weights * passes * (size["rows"] or 12_107) * size["epochs"] * size["seeds"]


def _nu(kernel: Any, y: Any) -> tuple[float, float]:
    """ν of a kernel, raw and trace-normalised; not a number where the kernel is singular in float64."""
    from pathlens.errors import SolverError
    from pathlens.kernels import nu

    try:
        found = nu(kernel, y)
    except SolverError:
        return math.nan, math.nan
    return found.raw, found.normalised


def _over_time(run: Run, trained: Trained, size: Mapping[str, Any], names: Sequence[str], which: str) -> np.ndarray:
    """ν of one kernel of several networks: (networks, raw or normalised, seeds, epochs)."""
    from pathlens.kernels import npk, ntk

    x, y = trained.examples(size["examples"])
    kernels: dict[str, Any] = {
        "M": lambda net: npk(net, x, soft=True),
        "K": lambda net: ntk(net, x),
        "Ka": lambda net: ntk(net, x, part="feature"),
    }
    found = np.empty((len(names), 2, len(run.seeds), len(trained.epochs)))
    for i, name in enumerate(names):
        for j, nets in enumerate(trained.networks(name)):
            for k, net in enumerate(nets):
                found[i, :, j, k] = _nu(kernels[which](net), y)
        run.progress(f"ν of {which}", i + 1, len(names))
    return found


def _ratio(nus: np.ndarray, names: Sequence[str], better: str, worse: str, normalised: int) -> np.ndarray:
    """ν after the last epoch of one network over that of another, per seed."""
    return nus[names.index(better), normalised, :, -1] / nus[names.index(worse), normalised, :, -1]


def _told(nus: np.ndarray, names: Sequence[str], epochs: Sequence[int]) -> dict[str, Any]:
    return {name: {"raw": nus[i, 0].tolist(), "normalised": nus[i, 1].tolist()} for i, name in enumerate(names)} | {
        "epochs": list(epochs)
    }


# --- figure 6: ν of the path kernel ------------------------------------------------------------------------------

_FALLS_M = Claim(
    "ν of the normalised path kernel M falls while the gates adapt",
    threshold=0.8,
    comparison="<",
    null=1.0,
    null_text="it stays",
    paper="Figure 6: 'ν_t reduces as training proceeds'",
    unit="× (last epoch / start)",
)
_BELOW_M = Claim(
    "at the end it is smaller than with gates that stay",
    threshold=0.9,
    comparison="<",
    null=1.0,
    null_text="both alike",
    paper="'always upper bounded by ν_t when gates are non-adaptive'",
    unit="× (ν of M after the last epoch, adaptable or learned / frozen)",
)


@experiment(
    "dgn.fig6",
    title="The right sub-networks are learned",
    what="binary MNIST: ν = yᵀM⁻¹y of the path kernel M = (xᵀx)∘λ while training, normalised and not",
    claims=[_FALLS_M, _BELOW_M],
    data=("mnist",),
    minutes=(1, 8),
    flops=_operations,
)
def fig6(run: Run) -> Artifact:
    """Figure 6: ν of M over epochs; M changes only through the gates."""
    size = run.sizes_of("dgn.fig6")
    trained = train_all(run, size)
    nus = _over_time(run, trained, size, NETWORKS, "M")
    claims = [
        _FALLS_M.measure(nus[NETWORKS.index(name), 1, :, -1] / nus[NETWORKS.index(name), 1, :, 0], row=name)
        for name in ADAPTABLE
    ]
    claims += [_BELOW_M.measure(_ratio(nus, NETWORKS, a, b, 1), row=f"{a} / {b}") for a, b in PAIRS]
    return Artifact(
        "dgn.fig6",
        "The right sub-networks are learned",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {"ν of M": _told(nus, NETWORKS, trained.epochs)},
        SIZES["dgn.fig6"]["paper"],
        {},
        (DEPTH, MATRIX, COPY),
        SOFT,
        {"epochs": np.array(trained.epochs), "nu": nus},
        figures=panels.path_kernel(NETWORKS),
    )


# --- figure 7: adaptable and learned gates generalise better -----------------------------------------------------

_LOWER = Claim(
    "adaptable and learned gates generalise better",
    threshold=0.9,
    comparison="<",
    null=1.0,
    null_text="both alike",
    paper="Figure 7",
    unit="× (squared test loss after the last epoch, adaptable or learned / frozen)",
)
_FEWER = Claim(
    "and put fewer test images on the wrong side",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="as many",
    paper="Figure 7",
    unit="points of test accuracy after the last epoch",
)


@experiment(
    "dgn.fig7",
    title="Gates that adapt, gates that were learned",
    what="binary MNIST, Experiments 3, 4, 5: adaptable against frozen gates, learned against random ones",
    claims=[_LOWER, _FEWER],
    data=("mnist",),
    minutes=(1, 8),
    flops=_operations,
)
def fig7(run: Run) -> Artifact:
    """Figure 7: training and test loss of six networks."""
    size = run.sizes_of("dgn.fig7")
    trained = train_all(run, size)
    assert trained.data.x_test is not None and trained.data.y_test is not None
    loss = {name: runs.history() for name, runs in trained.runs.items()}
    test = {name: runs.history("test_loss") for name, runs in trained.runs.items()}
    right = {
        name: np.array([_signs(net, trained.data.x_test, trained.data.y_test) for net in runs.networks])
        for name, runs in trained.runs.items()
    }
    claims = [_LOWER.measure(test[a][:, -1] / test[b][:, -1], row=f"{a} / {b}") for a, b in PAIRS]
    claims += [_FEWER.measure(right[a] - right[b], row=f"{a} / {b}") for a, b in PAIRS]
    metrics = {
        name: {
            key: spread(values)
            for key, values in (
                ("test accuracy, last epoch, %", right[name]),
                ("test loss, last epoch", test[name][:, -1]),
                ("test loss, best epoch", test[name][:, 1:].min(1)),
                ("training loss, last epoch", loss[name][:, -1]),
            )
        }
        for name in NETWORKS
    }
    return Artifact(
        "dgn.fig7",
        "Gates that adapt, gates that were learned",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        metrics,
        SIZES["dgn.fig7"]["paper"],
        {},
        (DEPTH, COPY, SCORE),
        SOFT,
        {
            "loss": np.stack([loss[name] for name in NETWORKS]).astype(np.float32),
            "test": np.stack([test[name] for name in NETWORKS]).astype(np.float32),
            "right": np.stack([right[name] for name in NETWORKS]),
        },
        figures=panels.adaptable(NETWORKS),
    )


def _signs(net: Any, x: Tensor, y: Tensor) -> float:
    """Share of rows, in %, whose output has the sign of the target."""
    import torch

    with torch.no_grad():
        return 100 * float((net.cpu()(x) * y > 0).double().mean())


# --- figure 8: ν of the tangent kernels --------------------------------------------------------------------------

_BELOW_K = Claim(
    "ν of the tangent kernel K is smaller where gates adapt or were learned",
    threshold=0.9,
    comparison="<",
    null=1.0,
    null_text="both alike",
    paper="Figure 8",
    unit="× (ν after the last epoch, adaptable or learned / frozen)",
)
_FALLS_K = Claim(
    "ν of the normalised kernel falls while the gates adapt",
    threshold=0.8,
    comparison="<",
    null=1.0,
    null_text="it stays",
    paper="Figure 8",
    unit="× (last epoch / start)",
)


@experiment(
    "dgn.fig8",
    title="Kernels align with the labels where gates adapt",
    what="binary MNIST: ν = yᵀH⁻¹y for H = K and Kᵃ, normalised and not, while training",
    claims=[_BELOW_K, _FALLS_K],
    data=("mnist",),
    minutes=(1, 8),
    flops=_operations,
)
def fig8(run: Run) -> Artifact:
    """Figure 8: ν of K for every network, of Kᵃ for soft-GaLU (the part of K that moves the gates)."""
    size = run.sizes_of("dgn.fig8")
    trained = train_all(run, size)
    nus = _over_time(run, trained, size, NETWORKS, "K")
    gates = _over_time(run, trained, size, ("soft-GaLU",), "Ka")[0]
    claims = [
        _BELOW_K.measure(_ratio(nus, NETWORKS, a, b, normalised), row=f"{kernel}: {a} / {b}")
        for normalised, kernel in enumerate(("K", "K/tr K"))
        for a, b in PAIRS
    ]
    claims += [
        _FALLS_K.measure(nus[NETWORKS.index(name), 1, :, -1] / nus[NETWORKS.index(name), 1, :, 0], row=f"K: {name}")
        for name in ADAPTABLE
    ]
    claims.append(_FALLS_K.measure(gates[1, :, -1] / gates[1, :, 0], row="Kᵃ: soft-GaLU"))
    return Artifact(
        "dgn.fig8",
        "Kernels align with the labels where gates adapt",
        PAPER,
        run.scale,
        size,
        run.seeds,
        tuple(claims),
        {"ν of K": _told(nus, NETWORKS, trained.epochs), "ν of Kᵃ": _told(gates[None], ["soft-GaLU"], trained.epochs)},
        SIZES["dgn.fig8"]["paper"],
        {},
        (DEPTH, MATRIX, COPY),
        SOFT,
        {"epochs": np.array(trained.epochs), "nu": nus, "nu_gates": gates},
        figures=panels.tangent_kernels(NETWORKS),
    )
