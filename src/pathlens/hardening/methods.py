"""`harden`: turn a trained network with soft gates into one with hard gates, and report the cost."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pathlens.data import as_pair
from pathlens.data.inputs import as_numbers
from pathlens.errors import ConversionError, OptionError, unknown_name
from pathlens.hardening.report import HardeningReport, Score, agreement, cell_bound, near_boundary, outputs_of, score
from pathlens.hardening.training import sharpening
from pathlens.hardening.values import can_solve, has_batch_norm, least_squares, recalibrate
from pathlens.models import GatedNetwork
from pathlens.models.tracing import unwrapped
from pathlens.plotting import get_axes, use_integer_ticks
from pathlens.recording import Trajectory
from pathlens.recording.taking import check_finite
from pathlens.training import LOSSES, Checkpoints, Execution, Keep, Stopping, train
from pathlens.training.inputs import Data, DataReader
from pathlens.training.optimizers import OptimizerFactory
from pathlens.training.options import as_option

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("recipe", "anneal", "straight_through", "refit", "direct")


@dataclass(frozen=True)
class Hardened:
    """A network with hard gates, and the cost of hardening.

    Attributes
    ----------
    network : GatedNetwork
        With hard gates, in eval mode.
    report : HardeningReport
    phases : dict name → Trajectory
        History of each phase that trained by gradient.
    """

    network: GatedNetwork
    report: HardeningReport
    phases: dict[str, Trajectory] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.network!r}\n{self.report!r}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Training loss over the epochs of hardening, with the soft network, the direct switch and the bound."""
        ax = get_axes(ax, "drawing a hardening", (6, 3.5))
        start, shown = 0, [self.report.hard.loss]
        for name, t in self.phases.items():
            losses = t.history["loss"]
            shown += losses
            ax.plot(range(start, start + len(losses)), losses, label=name)
            start += len(losses) - 1
        report = self.report
        levels = [("soft", report.soft.loss, "C2"), ("switched directly", report.direct.loss, "C3")]
        if report.bound.loss:
            levels.append((report.bound.what, report.bound.loss, "0.6"))
        for label, value, color in levels:
            ax.axhline(value, color=color, linestyle="--", linewidth=1, label=label)
            shown.append(value)
        ax.plot(start, report.hard.loss, "ko", label="hard")  # a point: it often lies on the line of the bound
        ax.set(xlabel="epoch of hardening", ylabel="training loss")
        use_integer_ticks(ax)
        if max(shown) > 10 * min(shown) > 0:  # within a decade a logarithmic axis has ticks such as 2.2 × 10⁰
            ax.set_yscale("log")
        ax.legend(fontsize="small")
        return ax


@torch.inference_mode(False)
def harden(
    net: nn.Module,
    data: Any,
    *,
    method: str = "recipe",
    validation: Any = None,
    loss: str | None = None,
    epochs: int = 100,
    value_epochs: int | None = None,
    lr: float = 2e-3,
    beta: float = 1000.0,
    batch_size: int | None = 32,
    seed: int = 0,
    optimizer: str | OptimizerFactory = "adam",
    weight_decay: float = 0.0,
    augment: str | None = None,
    keep: Keep | Sequence[int] | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    device: str | torch.device | None = None,
    execution: Execution | None = None,
    progress: bool = True,
) -> Hardened:
    """Turn a network with soft gates σ(βq) into one with hard gates q > 0, and report the cost.

    Parameters
    ----------
    net : GatedNetwork
        Trained, with soft gates from a separate gate source (DLGN and its relatives); it is not changed.
    data : DataSet, (X, y), Dataset or DataLoader
        What the network was trained on: inputs (n, …), and targets (n, c), (n,) or labels (n,).
    method : {"recipe", "anneal", "straight_through", "refit", "direct"}
        * "direct": hard gates, same weights.
        * "refit": "direct", then the values are fitted alone.
        * "anneal": train while β grows geometrically from the network's β to `beta` over 90 % of the epochs, with a
          learning rate that falls along a cosine; then hard gates.
        * "straight_through": train with gates that are hard in the forward and soft in the backward pass.
        * "recipe": "anneal" for squared losses without batch-norm, else "straight_through"; then the values are fitted
          alone. The best of direct switch, trained gates and fitted values is returned: by accuracy for labels (ties
          by loss), by loss for real targets, on the validation rows if there are any.

        For squared losses values are fitted exactly, layer by layer (`values.least_squares`), if no layer has more than
        4096 weights and there is no batch-norm; else by gradient descent for `value_epochs`.
    validation : optional
        Held-out data in the forms of `data`. They are reported on, and each phase keeps the epoch (or pass) with the
        lowest loss on them. Give them where targets are noisy: without them the training rows decide.
    loss : {"mse", "half_mse", "cross_entropy"}, optional
        Default: cross-entropy for integer targets, mean squared error for real ones.
    epochs, value_epochs : int
        Of the training of gates ("refit": of the values), and of the values alone after it (by default a tenth).
    lr, batch_size, seed, optimizer, weight_decay, augment, keep, checkpoints, device, execution, progress
        As in `train`, for every phase that trains; each has a separate folder for its checkpoints.
    beta : float
        The β at which annealing ends.

    Returns
    -------
    Hardened
        `.network` with hard gates, `.report`, `.phases`, `.plot()`.

    Examples
    --------
    >>> import pathlens as pl
    >>> data = pl.data.circle(128, bottom=4)
    >>> net = pl.models.dlgn(2, hidden=(16, 16, 16), piecewise_constant=True, seed=0)
    >>> t = pl.train(net, data, epochs=100, lr=5e-3, progress=False)
    >>> hardened = pl.harden(net, data, epochs=40, progress=False)
    >>> report = hardened.report
    >>> report.bound.loss <= report.hard.loss * (1 + 1e-6) < report.direct.loss  # reached up to rounding in float32
    True
    """
    start = time.perf_counter()
    soft = _checked(net)
    if method not in METHODS:
        raise unknown_name("hardening method", method, METHODS)
    for name, value in (("epochs", epochs), ("value_epochs", value_epochs)):
        if value is not None and value < 1:
            raise OptionError(f"harden: {name} must be at least 1, got {value}.")
    own_beta = float(soft.gate.beta)  # type: ignore[arg-type]
    place = torch.device(device or next(soft.parameters()).device)
    soft.to(place)
    X, y = as_pair(data, where="harden")
    chosen = loss or ("mse" if as_numbers(y).dtype.is_floating_point else "cross_entropy")
    if chosen not in LOSSES:
        raise unknown_name("loss", chosen, LOSSES)
    reader = DataReader(soft, chosen, place)
    rows = reader.read((X, y))
    held = None if validation is None else reader.read_validation(validation)
    if held is not None and held.weights is not None:
        raise OptionError("harden: validation rows have equal weights. Give validation=(X, y), without weights.")
    held_pair = None if held is None else (held.x, held.y)
    batch = min(batch_size or len(rows.x), len(rows.x))
    common: dict[str, Any] = {
        "loss": chosen,
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "scheduler": "cosine",
        "batch_size": batch_size,
        "augment": augment,
        "seed": seed,
        "keep": keep,
        "checkpoints": checkpoints,
        "device": place,
        "execution": execution,
        "progress": progress,
    }

    def watched(count: int) -> dict[str, Any]:
        """With hard gates the best epoch is kept, including epoch 0, before any change."""
        return {} if held_pair is None else {"validation": held_pair, "stopping": Stopping(count)}

    # --- gates -------------------------------------------------------------------------------------------------
    phases: dict[str, Trajectory] = {}
    work = soft
    anneals = method == "anneal" or (method == "recipe" and chosen != "cross_entropy" and not has_batch_norm(soft))
    if anneals:
        work = soft.with_gate("soft", beta=own_beta)  # without ε: hard gates have none
        phases["annealing"] = _train(
            "annealing gates", work, rows, common, epochs=epochs, beta=sharpening((own_beta, max(beta, own_beta)))
        )
    elif method in ("recipe", "straight_through"):
        work = soft.with_gate("straight_through", beta=own_beta)
        recalibrate(work, rows.x, batch)
        phases["straight-through"] = _train("straight-through", work, rows, common, epochs=epochs, **watched(epochs))
    hard = work.with_gate("hard").eval()
    candidates = {"direct switch": soft.with_gate("hard")}

    # --- values ------------------------------------------------------------------------------------------------
    if method != "direct":
        recalibrate(hard, rows.x, batch)
        candidates["trained gates" if phases else "direct switch"] = copy.deepcopy(hard)
    if method in ("recipe", "refit") and soft.trained != "gates":
        count = value_epochs or (epochs if method == "refit" else max(1, epochs // 10))
        if chosen != "cross_entropy" and can_solve(hard, rows.x):
            least_squares(hard, rows.x, rows.y, validation=held_pair, progress=progress)
        else:
            phases["values alone"] = _train(
                "values", hard, rows, common, epochs=count, trained="values", **watched(count)
            )
            recalibrate(hard, rows.x, batch)
        candidates["fitted values"] = hard
    kept = _best(candidates, held or rows, chosen) if method == "recipe" else list(candidates)[-1]
    hard = candidates[kept].eval()
    return Hardened(hard, _report(method, soft, hard, rows, held, chosen, own_beta, start, kept), phases)


def _checked(net: nn.Module) -> GatedNetwork:
    """A copy of the network in eval mode; networks that cannot be hardened are refused."""
    net = unwrapped(net)
    if not isinstance(net, GatedNetwork):
        raise ConversionError(
            f"harden: expected a GatedNetwork with soft gates, got {type(net).__name__}. "
            "Make one with pl.models.dlgn or pl.gated_twin, and train it."
        )
    if net.source is None:
        raise ConversionError(
            f"harden: the units of this network ({net.kind}) read their own pre-activations; there is no gate source "
            "to harden. net.with_gate('hard') is the ReLU network of the same weights."
        )
    if net.gate.hard:
        raise OptionError(f"harden: the gates are hard already ({net.gate.label}). Use net.with_gate('hard').")
    if not hasattr(net.gate, "beta"):
        raise OptionError(
            f"harden: the gate function {type(net.gate).__name__} has no β to start from. Register a buffer 'beta', or "
            "switch the gates with net.with_gate('hard')."
        )
    check_finite(net)
    return copy.deepcopy(net).eval()


def _train(label: str, net: GatedNetwork, rows: Data, common: dict[str, Any], **options: Any) -> Trajectory:
    if (saved := as_option(Checkpoints, common.get("checkpoints"))) is not None:  # a folder for each phase
        options["checkpoints"] = replace(saved, folder=Path(saved.folder) / label.replace(" ", "-"))
    if common["progress"] is True:
        options["progress"] = label
    trajectory = train(net, (rows.x, rows.y), **(common | options))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def _best(candidates: dict[str, GatedNetwork], rows: Data, loss: str) -> str:
    """The name of the network with the highest accuracy, then the lowest loss; the earliest of equals.

    Cross-entropy alone would prefer a less confident network that is wrong more often.
    """

    def rank(name: str) -> tuple[float, float]:
        found = score(outputs_of(candidates[name].eval(), rows.x), rows.y, loss)
        return -(found.accuracy or 0.0), found.loss

    return min(candidates, key=rank)


def _report(
    method: str,
    soft: GatedNetwork,
    hard: GatedNetwork,
    rows: Data,
    held: Data | None,
    loss: str,
    beta: float,
    start: float,
    kept: str,
) -> HardeningReport:
    networks = {"soft": soft, "direct": soft.with_gate("hard"), "hard": hard}

    def measure(data: Data) -> tuple[dict[str, Score], float]:
        outputs = {name: outputs_of(n, data.x) for name, n in networks.items()}
        scores = {name: score(f, data.y, loss) for name, f in outputs.items()}
        return scores, agreement(outputs["hard"], outputs["soft"], loss)

    scores, agrees = measure(rows)
    validation, validation_agreement = ({}, None) if held is None else measure(held)
    return HardeningReport(
        method=method,
        kept=kept,
        **scores,
        agreement=agrees,
        margin=1 / beta,
        near=near_boundary(soft, rows.x, 1 / beta),
        near_after=near_boundary(hard, rows.x, 1 / beta),
        bound=cell_bound(hard, rows.x, rows.y, loss=loss),
        seconds=time.perf_counter() - start,
        validation=validation,
        validation_agreement=validation_agreement,
    )
