"""The cost of hardening: scores before and after, agreement, gates near their boundary, and the bound of the cells."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathlens.models import GatedNetwork, Open
from pathlens.models.tracing import max_pools
from pathlens.precision import exact_precision
from pathlens.recording.taking import check_net
from pathlens.training.inputs import LOSSES

_AT_ONCE = 1 << 20  # input numbers in one forward pass: some hundred megabytes of activations for images


@dataclass(frozen=True)
class Score:
    """Loss of a network on some rows, with the accuracy for labels or R² for real targets."""

    loss: float
    accuracy: float | None = None
    r2: float | None = None

    def __str__(self) -> str:
        if self.accuracy is not None:
            return f"loss {self.loss:.4g}, accuracy {self.accuracy:.2%}"
        return f"loss {self.loss:.4g}" + ("" if self.r2 is None else f", R² {self.r2:.4f}")


@dataclass(frozen=True)
class CellBound:
    """The smallest training loss that any values can reach on the cells of hard gates.

    Attributes
    ----------
    loss : float or None
        None where it has no closed form.
    cells : int
        Distinct activation patterns (all sites together) among the rows.
    what : str
        Which functions the bound is taken over.
    """

    loss: float | None
    cells: int
    what: str


@dataclass(frozen=True)
class HardeningReport:
    """The cost of hardening.

    Attributes
    ----------
    method : str
    kept : {"direct switch", "trained gates", "fitted values"}
        Which network the result is.
    soft, direct, hard : Score
        On the training rows: the soft network, the same weights with hard gates, and the result.
    validation : dict "soft" | "direct" | "hard" → Score
        The same on held-out rows; empty if none were given.
    agreement, validation_agreement : float or None
        Between soft network and result: share of rows with equal predicted class; for real targets R² of the hard
        outputs as a prediction of the soft ones.
    margin : float
        1/β of the soft network. A gate with |q| below it has a soft value between .27 and .73, far from 0 and 1.
    near, near_after : dict site → float
        Share of (row, unit) pairs with |q| < margin, in the soft network and in the result.
    bound : CellBound
        On the cells of the result.
    seconds : float
    """

    method: str
    kept: str
    soft: Score
    direct: Score
    hard: Score
    agreement: float
    margin: float
    near: dict[str, float]
    near_after: dict[str, float]
    bound: CellBound
    seconds: float
    validation: dict[str, Score] = field(default_factory=dict)
    validation_agreement: float | None = None

    def __repr__(self) -> str:
        agree = "share of equal predictions" if self.soft.accuracy is not None else "R² of hard on soft outputs"
        lines = [f"Hardening by {self.method!r} in {self.seconds:.1f} s: {self.kept}"]
        lines += [f"  {name:<7}{getattr(self, name)}" for name in ("soft", "direct", "hard")]
        bound = "none" if self.bound.loss is None else f"loss {self.bound.loss:.4g}"
        lines.append(f"  bound  {bound}: {self.bound.what}, {self.bound.cells} cells")
        lines.append(f"  agreement {self.agreement:.4f} ({agree})")
        if self.validation:
            lines.append("  held out:")
            lines += [f"    {name:<7}{score}" for name, score in self.validation.items()]
            lines.append(f"    agreement {self.validation_agreement:.4f}")
        lines.append(f"  gates with |q| < {self.margin:.3g} (before → after):")
        width = max(map(len, self.near), default=0)
        lines += [f"    {s:<{width}}  {share:.2%} → {self.near_after[s]:.2%}" for s, share in self.near.items()]
        return "\n".join(lines)


def blocks(x: Tensor, rows: int | None = None) -> Iterator[Tensor]:
    """Copies of blocks of rows, since a network may change its input; by default as many as fit a forward pass."""
    for part in x.split(rows or max(1, _AT_ONCE // x[0].numel())):
        yield part.clone()


@exact_precision()
def outputs_of(net: nn.Module, x: Tensor, rows: int | None = None) -> Tensor:
    """f(x) without gradient, shape (n, c), computed in blocks of rows."""
    with torch.no_grad():
        return torch.cat([net(part) for part in blocks(x, rows)])


def score(f: Tensor, y: Tensor, loss: str) -> Score:
    """Loss of outputs f (n, c) on targets y, in float64."""
    f = f.double()
    y = y.double() if y.dtype.is_floating_point else y
    value = float(LOSSES[loss](f, y))
    if loss == "cross_entropy":
        return Score(value, accuracy=float((f.argmax(1) == y).double().mean()))
    return Score(value, r2=_r2(f, y))


def _r2(f: Tensor, y: Tensor) -> float:
    """1 − Σ(f − y)²/Σ(y − ȳ)² over all outputs; where y varies by rounding alone, 1 if f is as near, else 0."""
    error, total = float((f - y).square().sum()), float((y - y.mean(0)).square().sum())
    rounding = y.numel() * (1e-12 * float(y.abs().max())) ** 2
    return 1 - error / total if total > rounding else float(error <= rounding)


def agreement(hard: Tensor, soft: Tensor, loss: str) -> float:
    """Share of equal classes, or R² of the hard outputs as a prediction of the soft ones."""
    if loss == "cross_entropy":
        return float((hard.argmax(1) == soft.argmax(1)).double().mean())
    return _r2(hard.double(), soft.double())


@exact_precision()
def near_boundary(net: GatedNetwork, x: Tensor, margin: float) -> dict[str, float]:
    """Per site, the share of (row, unit) pairs whose pre-activation is smaller than the margin in size."""
    close: dict[str, float] = dict.fromkeys(net.site_names, 0.0)
    count: dict[str, int] = dict.fromkeys(net.site_names, 0)
    with torch.no_grad():
        for part in blocks(x):
            for site, q in net.preactivations(part).items():
                close[site] += float((q.abs() < margin).double().sum())
                count[site] += q.numel()
    return {site: close[site] / count[site] for site in close}


# --- bound of the cells ----------------------------------------------------------------------------------------


@exact_precision()
def cells_of(net: GatedNetwork, x: Tensor) -> tuple[Tensor, int]:
    """The index of each row's cell, shape (n,), and the number of cells.

    Rows share a cell if all their hard gates are equal; patterns are compared by 128-bit digests, since those of a
    convolutional network have 10⁵ bits.
    """
    if isinstance(net.gate, Open):
        return torch.zeros(len(x), dtype=torch.long, device=x.device), 1
    numbers: dict[bytes, int] = {}
    found: list[int] = []
    with torch.no_grad():
        for part in blocks(x):
            bits = torch.cat([q.flatten(1) > 0 for q in net.preactivations(part).values()], dim=1)
            for row in np.packbits(bits.cpu().numpy(), axis=1):
                found.append(numbers.setdefault(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), len(numbers)))
    return torch.tensor(found, device=x.device), len(numbers)


def cell_bound(net: GatedNetwork, X: Tensor, y: Tensor, *, loss: str = "mse") -> CellBound:
    """The smallest loss on these rows that values can reach on the cells of the network's hard gates.

    A network whose values read ones is constant on each cell: the best constant is the mean of y there, or for labels
    their frequencies. One whose values read x is affine on each cell, and without biases linear: for squared losses the
    best such function of each cell is found by least squares. Networks with these gates are such functions, hence a
    lower bound; it is exact if the value network is wide enough to be any of them on each cell. With max-pooling,
    values that read x are not affine on a cell, and there is no bound.

    Parameters
    ----------
    net : GatedNetwork
        With any gate function; cells are those of its hard gates.
    X : Tensor (n, ...)
    y : Tensor (n, c) or (n,)
    loss : {"mse", "half_mse", "cross_entropy"}

    Returns
    -------
    CellBound
        O(n·s) for s gates, and O(n d²) for least squares.

    Examples
    --------
    >>> import pathlens as pl
    >>> data = pl.data.circle(256)
    >>> net = pl.models.dlgn(2, hidden=(16, 16), piecewise_constant=True, seed=0)
    >>> cell_bound(net, data.x, data.y)
    CellBound(loss=0.11..., cells=54, what='best constant on each cell')
    """
    check_net(net)
    x, y = X.detach(), y.detach()
    if not net.needs_rows:
        net.unit_shapes(x)
    cell, count = cells_of(net, x)
    if loss != "cross_entropy":
        y = y.reshape(len(y), -1)
    if net.value_input == "ones":
        return CellBound(_best_constants(cell, count, y, loss), count, "best constant on each cell")
    if max_pools(net.values):
        return CellBound(None, count, "with max-pooling the network is not affine on a cell")
    if loss == "cross_entropy":
        return CellBound(None, count, "cross-entropy of affine functions has no closed form")
    total, design, shape = 0.0, x.flatten(1).double(), "linear"
    if _adds_constants(net, x):
        design, shape = torch.cat([design, torch.ones_like(design[:, :1])], dim=1), "affine"
    # scaled columns: least squares treats 1e-16 of the largest as rounding, and inputs may be in any unit
    sizes = design.abs().amax(0)
    design = design / torch.where(sizes == 0, 1.0, sizes)
    order = cell.argsort()
    for rows in order.split(torch.bincount(cell, minlength=count).tolist()):
        a, b = design[rows].cpu(), y[rows].double().cpu()
        if len(rows) > 1 or not bool(a.any()):  # one row is fitted exactly, but for x = 0 without biases
            total += float((a @ torch.linalg.lstsq(a, b, driver="gelsd").solution - b).square().sum())
    mean = total / y.numel()
    return CellBound(mean / 2 if loss == "half_mse" else mean, count, f"best {shape} function on each cell")


def _adds_constants(net: GatedNetwork, x: Tensor) -> bool:
    """Whether the value network adds constants: biases, or means of batch-norm.

    Weights are redrawn, so that biases that are zero now count too, and f(0) is computed with all gates open.
    """
    values, generator = copy.deepcopy(net.values).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in (*values.parameters(), *values.buffers()):
            if t.is_floating_point():
                t.copy_(0.5 + torch.rand(t.shape, generator=generator))
        return bool((values(torch.zeros_like(x[:2]), *(x.new_ones(()),) * len(net.sites)) != 0).any())


def _best_constants(cell: Tensor, count: int, y: Tensor, loss: str) -> float:
    sizes = torch.bincount(cell, minlength=count).double()[:, None]
    targets = F.one_hot(y).double() if loss == "cross_entropy" else y.double()
    means = torch.zeros(count, targets.shape[1], dtype=torch.float64, device=y.device)
    means.index_add_(0, cell, targets)
    means /= sizes
    if loss == "cross_entropy":
        return float((sizes * torch.special.entr(means)).sum() / len(y))
    mse = float((targets - means[cell]).square().mean())
    return mse / 2 if loss == "half_mse" else mse
