"""`harden`: the methods that make a soft-trained network hard, and the one function that runs and reports them."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pathlens.data.inputs import as_numbers
from pathlens.errors import ConversionError, NotFiniteError, OptionError, unknown_name
from pathlens.hardening.report import (
    HardeningReport,
    agreement,
    cell_bound,
    near_boundary,
    outputs_of,
    score,
)
from pathlens.hardening.values import can_solve, has_batch_norm, least_squares, recalibrate
from pathlens.models import GatedNetwork
from pathlens.models.tracing import unwrapped
from pathlens.plotting import get_axes, use_integer_ticks
from pathlens.recording import Trajectory
from pathlens.training import LOSSES, Geometric, train
from pathlens.training.inputs import Data, prepare, prepare_validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("recipe", "anneal", "straight_through", "refit", "direct")
_OWN = {"beta", "trained", "validation", "patience", "seeds", "settings", "loss", "weights", "keep_at", "keep_when"}


@dataclass(frozen=True)
class Hardened:
    """A hard network, and what it cost to get there.

    Attributes
    ----------
    network : GatedNetwork
        With hard gates, in eval mode; the network that was given is as it was.
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
    X: Any,
    y: Any,
    method: str = "recipe",
    *,
    validation: tuple[Any, Any] | None = None,
    loss: str | None = None,
    epochs: int = 100,
    value_epochs: int | None = None,
    lr: float = 2e-3,
    beta: float = 1000.0,
    batch_size: int | None = 32,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> Hardened:
    """Turn a network with soft gates σ(βq) into one with hard gates q > 0, and report what it cost.

    Parameters
    ----------
    net : GatedNetwork
        With soft gates from a source of their own (DLGN and its relatives), trained; it is left as it is.
    X, y : inputs (n, ...) and targets (n, c), (n,) or labels (n,)
        What the network was trained on.
    method : {"recipe", "anneal", "straight_through", "refit", "direct"}
        * "direct": hard gates, same weights.
        * "refit": "direct", then the values alone.
        * "anneal": train on while β grows geometrically from the network's own to `beta` over 90 % of the epochs, at a
          rate that falls by a cosine; then hard gates.
        * "straight_through": train on with gates that are hard going forward and soft (the network's β) going back.
        * "recipe": "anneal" for squared losses without batch-norm, else "straight_through"; then the values alone. Of
          the direct switch, the trained gates and the fitted values the best is kept, on held-out rows where there are
          some: by accuracy for labels (ties by loss), by loss for real targets.

        Values alone are fitted exactly for squared losses, layer by layer (`values.least_squares`), where no layer has
        more than 4096 weights and there is no batch-norm; else by gradient for `value_epochs`.
    validation : (X, y), optional
        Held-out rows: they are reported on, and in each phase the epoch (or pass) with the lowest loss there is kept.
        Without it the fit is judged by the training rows alone: give it where targets are noisy.
    loss : {"mse", "half_mse", "cross_entropy"}, optional
        Default: cross-entropy for integer targets, mean squared error for real ones.
    epochs, value_epochs : int
        Of the training with gates ("refit": of the values), and of the values alone after it (a tenth by default).
    lr, batch_size, seed, progress, **options
        As in `train`.
    beta : float
        Last β of the annealing.

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
    >>> hardened = pl.harden(net, data.x, data.y, epochs=40, progress=False)
    >>> report = hardened.report
    >>> report.bound.loss <= report.hard.loss * (1 + 1e-6) < report.direct.loss  # it is reached, to float32's rounding
    True
    """
    start = time.perf_counter()
    soft = _checked(net)
    if method not in METHODS:
        raise unknown_name("hardening method", method, METHODS)
    taken = sorted(_OWN & options.keys())
    if taken:
        raise OptionError(f"harden: {taken[0]} is not an option here. Call train for a recipe of your own.")
    for name, value in (("epochs", epochs), ("value_epochs", value_epochs)):
        if value is not None and value < 1:
            raise OptionError(f"harden: {name} must be at least 1, got {value}.")
    own_beta = float(soft.gate.beta)  # type: ignore[arg-type]
    place = torch.device(options.get("device") or next(soft.parameters()).device)
    soft.to(place)
    chosen = loss or ("mse" if as_numbers(y).dtype.is_floating_point else "cross_entropy")
    if chosen not in LOSSES:
        raise unknown_name("loss", chosen, LOSSES)
    rows = prepare((X, y), soft, chosen, place)
    held = None if validation is None else prepare_validation(validation, soft, chosen, place)
    if held is not None and held.weights is not None:
        raise OptionError("harden: held-out rows count alike here. Give validation=(X, y), without weights.")
    held_pair = None if held is None else (held.x, held.y)
    batch = min(batch_size or len(rows.x), len(rows.x))
    common: dict[str, Any] = {"loss": chosen, "lr": lr, "batch_size": batch_size, "seed": seed, "progress": progress}
    common |= {"schedule": "cosine"} | options

    def watched(count: int) -> dict[str, Any]:
        """With hard gates every epoch is a candidate, the first (nothing changed yet) included."""
        return {} if held_pair is None else {"validation": held_pair, "patience": count}

    # --- gates -------------------------------------------------------------------------------------------------
    phases: dict[str, Trajectory] = {}
    work = soft
    anneals = method == "anneal" or (method == "recipe" and chosen != "cross_entropy" and not has_batch_norm(soft))
    if anneals:
        work = soft.with_gate("soft", beta=own_beta)  # without ε: hard gates have none
        schedule = Geometric(own_beta, max(beta, own_beta), until=0.9)
        phases["annealing"] = _train(work, rows, common, epochs=epochs, beta=schedule, label="annealing gates")
    elif method in ("recipe", "straight_through"):
        work = soft.with_gate("straight_through", beta=own_beta)
        recalibrate(work, rows.x, batch)
        phases["straight-through"] = _train(
            work, rows, common, epochs=epochs, label="straight-through", **watched(epochs)
        )
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
                hard, rows, common, epochs=count, trained="values", label="values", **watched(count)
            )
            recalibrate(hard, rows.x, batch)
        candidates["fitted values"] = hard
    kept = _best(candidates, held or rows, chosen) if method == "recipe" else list(candidates)[-1]
    hard = candidates[kept].eval()
    return Hardened(hard, _report(method, soft, hard, rows, held, chosen, own_beta, start, kept), phases)


def _checked(net: nn.Module) -> GatedNetwork:
    """A copy of the network in eval mode, or the reason why there is nothing to harden."""
    net = unwrapped(net)
    if not isinstance(net, GatedNetwork):
        raise ConversionError(
            f"harden: expected a GatedNetwork with soft gates, got {type(net).__name__}. "
            "Make one with pl.models.dlgn or pl.gated_twin, and train it."
        )
    if net.source is None:
        raise ConversionError(
            f"harden: the units of this network ({net.kind}) read their own pre-activations, there is no gate source "
            "whose gates could be made hard. net.with_gate('hard') is the ReLU network of the same weights."
        )
    if net.gate.hard:
        raise OptionError(
            f"harden: the gates are hard already ({net.gate.label}). net.with_gate('hard') has the same outputs."
        )
    bad = [n for n, t in net.state_dict().items() if t.dtype.is_floating_point and not torch.isfinite(t).all()]
    if bad:
        raise NotFiniteError(f"harden: '{bad[0]}' of the network holds NaN or infinity. Did its training diverge?")
    return copy.deepcopy(net).eval()


def _train(net: GatedNetwork, rows: Data, common: dict[str, Any], **options: Any) -> Trajectory:
    if common.get("checkpoint") is not None:  # every phase is a training of its own
        options["checkpoint"] = Path(common["checkpoint"]) / options["label"].replace(" ", "-")
    trajectory = train(net, (rows.x, rows.y), **(common | options))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def _best(candidates: dict[str, GatedNetwork], rows: Data, loss: str) -> str:
    """The name of the network with the highest accuracy, then the lowest loss; the earliest of equals.

    Cross-entropy alone would reward a network for being less sure of itself, and miss that it is wrong more often.
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
    outputs = {name: outputs_of(n, rows.x) for name, n in networks.items()}
    scores = {name: score(f, rows.y, loss) for name, f in outputs.items()}
    validation, validation_agreement = {}, None
    if held is not None:
        unseen = {name: outputs_of(n, held.x) for name, n in networks.items()}
        validation = {name: score(f, held.y, loss) for name, f in unseen.items()}
        validation_agreement = agreement(unseen["hard"], unseen["soft"], loss)
    return HardeningReport(
        method=method,
        kept=kept,
        **scores,
        agreement=agreement(outputs["hard"], outputs["soft"], loss),
        margin=1 / beta,
        near=near_boundary(soft, rows.x, 1 / beta),
        near_after=near_boundary(hard, rows.x, 1 / beta),
        bound=cell_bound(hard, rows.x, rows.y, loss),
        seconds=time.perf_counter() - start,
        validation=validation,
        validation_agreement=validation_agreement,
    )
