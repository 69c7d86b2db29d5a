"""`refit`: a network's output approximated by few path regions with newly fitted heights.

scikit-learn is loaded for a lasso path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.data.inputs import as_numbers
from pathlens.errors import NotFiniteError, OptionError, ShapeError, unknown_name
from pathlens.explanations import Explanation, r_squared, ratio
from pathlens.paths.ranking import best
from pathlens.paths.trellis import Trellis, check_positive, path_text, reads_ones, split, take_trellis
from pathlens.plotting import get_axes
from pathlens.progress import ProgressBar

_SHOWN = 8
_BEAM = 256  # partial paths that the greedy search keeps
_PER_ROW = 20  # largest paths of each row that are candidates for the lasso path
_CANDIDATES = 1000  # most different regions among them


@dataclass(frozen=True, repr=False)
class Refit(Explanation):
    """f̂(x) = a_0 + Σ_p 1(all gates of path p are on)·(a_p + b_p·x), over few paths.

    Attributes
    ----------
    paths : Tensor (p, L), int64
        The paths kept, in the order in which they were chosen.
    constants : Tensor (p,), float64
        a_p.
    slopes : Tensor (p, d) or None
        b_p; None where the refit is constant on each region.
    intercept : float
        a_0.
    target : str
        What was fitted: "f" or "y"; r2 is R² to that.
    """

    paths: Tensor
    constants: Tensor
    slopes: Tensor | None
    intercept: float
    target: str

    def predict(self, net: nn.Module, X: Any) -> Tensor:
        """Predictions of the refit for other inputs of the same network, (n,), float64."""
        return self._terms(take_trellis("Refit.predict", net, X)).sum(1)

    def _terms(self, trellis: Trellis) -> Tensor:
        """Intercept and one term per path, (n, p + 1)."""
        inside = _inside(trellis, self.paths)
        heights = self.constants.expand(trellis.n, -1)
        if self.slopes is not None:
            heights = heights + trellis.x.double().flatten(1) @ self.slopes.T
        first = torch.full((trellis.n, 1), self.intercept, dtype=torch.float64, device=inside.device)
        return torch.cat([first, inside * heights], dim=1)

    def table(self) -> dict[str, list[Any]]:
        """One row per path region: its path, constant and slopes."""
        slopes = {} if self.slopes is None else {f"slope {j}": s.tolist() for j, s in enumerate(self.slopes.T)}
        return {"path": [path_text(p) for p in self.paths.tolist()], "constant": self.constants.tolist(), **slopes}

    def _lines(self) -> list[str]:
        kind = "constant" if self.slopes is None else "affine"
        lines = [f"{len(self.paths)} path regions, {kind} on each, fitted to {self.target}; R² is to {self.target}"]
        lines.append(f"{self.intercept:+.4g} everywhere")
        for path, height in list(zip(self.paths.tolist(), self.constants.tolist()))[:_SHOWN]:
            lines.append(f"{height:+.4g}{'' if self.slopes is None else ' + b·x'} where {path_text(path)} is active")
        return lines if len(self.paths) <= _SHOWN else [*lines, f"… and {len(self.paths) - _SHOWN} more regions"]

    def plot(self, ax: Any = None) -> Any:
        """Heights of the regions, in the order in which they were chosen; needs matplotlib.

        Of a refit that is affine on its regions the bars are the constants a_p alone, as the axis label states.
        """
        ax = get_axes(ax, "drawing a refit")
        ax.bar(range(len(self.paths)), self.constants.cpu().numpy())
        ax.set_xticks(
            range(len(self.paths)), [path_text(p) for p in self.paths.tolist()], rotation=90, fontsize="small"
        )
        title = f"{self._score}, cancellation {self.cancellation:.3g}"
        height = "height of the region" if self.slopes is None else "constant part of the region, without b·x"
        ax.set(ylabel=height, title=title)
        return ax


def _inside(trellis: Trellis, paths: Tensor) -> Tensor:
    """Indicators of path regions, (n, p), float64: the product of the hard gates."""
    inside = torch.ones(trellis.n, len(paths), dtype=torch.bool, device=trellis.f.device)
    for layer, bits in enumerate(trellis.bits):
        inside &= bits[:, paths[:, layer]]
    return inside.double()


def refit(
    net: nn.Module,
    X: Any,
    y: Any = None,
    *,
    paths: int = 20,
    method: str = "greedy",
    affine: bool | None = None,
    output: int = 0,
    validation: Any = 0.2,
    seed: int = 0,
) -> Refit:
    """Few path regions, with new heights, that approximate the network's output or given targets.

    Contributions of the network's paths cancel, so that a few of them do not approximate f, but the regions of a few
    paths with newly fitted heights can. A region is where all gates of a path are on: for linear gates, an intersection
    of half-spaces.

    Parameters
    ----------
    net, X, output
        As for `pathlens.paths.top`.
    y : (n,) or (n, 1), optional
        Fit these instead of f; then `validation` is a share of the rows of X, since other inputs have no targets.
    paths : int
        Largest number of regions.
    method : {"greedy", "l1"}
        "greedy": add the region that explains most of the residual, then fit all heights again. "l1": least
        squares on the first regions that enter a lasso path, among the largest paths of the rows.
    affine : bool, optional
        Heights a + b·x instead of constants; by default where the network reads x and is not piecewise constant.
    validation, seed
        As for `tree`.

    Returns
    -------
    Refit

    Notes
    -----
    The greedy search keeps the 256 best partial paths per layer, so that the regions found need not be the best. A step
    costs n·256·Σ_l w_l (times d + 1 if affine). Affine heights have p(d + 1) coefficients: compare the held-out R².

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(8, 8), gate="hard", piecewise_constant=True, seed=0)
    >>> angles = torch.linspace(0, 6.28, 200)
    >>> few = refit(net, torch.stack([angles.cos(), angles.sin()], dim=1), paths=12)
    >>> few.r2 > 0.9, few.paths.shape[1]
    (True, 2)
    """
    check_positive("paths.refit", paths=paths)
    choose: dict[str, Callable[..., list[tuple[int, ...]]]] = {"greedy": _greedy, "l1": _lasso}
    if method not in choose:
        raise unknown_name("method of refit", method, choose)
    whole, column = take_trellis("paths.refit", net, X, output=output), output
    if y is not None:
        if not isinstance(validation, float):
            raise OptionError("paths.refit: inputs for validation have no targets y. Give a share of the rows.")
        whole, column = replace(whole, f=_targets(y, whole)), 0
    seen, unseen = split("paths.refit", net, whole, validation, seed)
    target, unseen_target = seen.f[:, column], unseen.f[:, column]
    if affine is None:
        affine = not reads_ones(net)
    columns = _columns(seen, affine)
    chosen = choose[method](seen, target, columns, paths, output)
    found = torch.tensor(chosen, dtype=torch.long, device=target.device).view(-1, len(seen.bits))
    intercept, heights = _heights(_inside(seen, found), target, columns)
    slopes = heights[:, 1:] if affine else None
    made = Refit(0, 0, 0, seen.label, found, heights[:, 0], slopes, intercept, "f" if y is None else "y")
    terms = made._terms(seen)
    ratios = ratio(terms.abs().sum(1), terms.sum(1))
    return replace(
        made,
        r2=r_squared(terms.sum(1), target),
        r2_held_out=r_squared(made._terms(unseen).sum(1), unseen_target),
        cancellation=float(ratios.median()),
    )


def _targets(y: Any, trellis: Trellis) -> Tensor:
    target = as_numbers(y).to(trellis.f.device, torch.float64)
    if target.shape not in ((trellis.n,), (trellis.n, 1)):
        raise ShapeError(f"paths.refit: y has shape {tuple(target.shape)}, expected ({trellis.n},), one per row of X.")
    if not bool(torch.isfinite(target).all()):
        raise NotFiniteError("paths.refit: y contains NaN or infinity. Remove such rows.")
    return target.view(-1, 1)


def _columns(trellis: Trellis, affine: bool) -> Tensor:
    """What multiplies an indicator: 1, and x if affine; (n, 1) or (n, 1 + d)."""
    one = trellis.f.new_ones(trellis.n, 1)
    return torch.cat([one, trellis.x.double().flatten(1)], dim=1) if affine else one


def _heights(inside: Tensor, target: Tensor, columns: Tensor) -> tuple[float, Tensor]:
    """Least squares: intercept, and a row of coefficients per region; the smallest where regions coincide.

    Columns are scaled first, since least squares treats 1e-16 of the largest as rounding.
    """
    sizes = columns.abs().amax(0)
    sizes = torch.where(sizes == 0, 1.0, sizes)
    design = (inside[:, :, None] * (columns / sizes)[:, None, :]).flatten(1)
    design = torch.cat([torch.ones_like(target)[:, None], design], dim=1).cpu()
    solved = torch.linalg.lstsq(design, target[:, None].cpu(), driver="gelsd").solution[:, 0].to(target.device)
    return float(solved[0]), solved[1:].view(inside.shape[1], columns.shape[1]) / sizes


def _greedy(seen: Trellis, target: Tensor, columns: Tensor, paths: int, output: int) -> list[tuple[int, ...]]:
    """Orthogonal matching pursuit over path regions; the best region of each step by a beam over layers."""
    bits = [b.double() for b in seen.bits]
    chosen: list[tuple[int, ...]] = []
    left = target - target.mean()
    floor = 1e-20 * float(left.square().sum())
    with ProgressBar("choosing regions", paths) as meter:
        for _ in range(paths):
            path, gain = _region(bits, left, columns)
            if not gain > floor:
                break
            chosen.append(path)
            inside = _inside(seen, torch.tensor(chosen, device=target.device))
            intercept, heights = _heights(inside, target, columns)
            left = target - intercept - (inside[:, :, None] * columns[:, None, :] * heights).sum((1, 2))
            meter.advance()
    return chosen


def _region(bits: list[Tensor], left: Tensor, columns: Tensor) -> tuple[tuple[int, ...], float]:
    """The path whose region, with one height per column, reduces Σ left² most, and about how much."""
    weighted, squares = left[:, None] * columns, columns.square()
    inside, paths = torch.ones_like(left)[:, None], torch.zeros(1, 0, dtype=torch.long, device=left.device)
    gain = 0.0
    for on in bits:
        scores = torch.zeros(inside.shape[1], on.shape[1], dtype=torch.float64, device=left.device)
        for z, zz in zip(weighted.T, squares.T):
            dot, size = (inside * z[:, None]).T @ on, (inside * zz[:, None]).T @ on
            scores += torch.where(size > 0, dot.square() / size, 0.0)
        values, order = scores.flatten().sort(descending=True, stable=True)
        # gates often coincide on the rows: of regions with equal scores one is kept
        fresh = torch.cat([values.new_ones(1, dtype=torch.bool), values[1:] < values[:-1] * (1 - 1e-12)])
        keep = order[fresh][:_BEAM]
        before, unit = keep // on.shape[1], keep % on.shape[1]
        inside, paths = inside[:, before] * on[:, unit], torch.cat([paths[before], unit[:, None]], dim=1)
        gain = float(values[0])
    return tuple(paths[0].tolist()), gain


def _lasso(seen: Trellis, target: Tensor, columns: Tensor, paths: int, output: int) -> list[tuple[int, ...]]:
    """The first regions that enter a lasso path, among the largest paths of the rows."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import lars_path

    listed, sizes = best(seen, output, _PER_ROW)
    whole = (listed >= 0).all(2)
    unique, place = listed[whole].unique(dim=0, return_inverse=True)
    weight = torch.zeros(len(unique), dtype=torch.float64, device=target.device)
    weight.index_add_(0, place, sizes[whole].abs())
    unique = unique[weight.sort(descending=True, stable=True).indices]
    inside = _inside(seen, unique)
    # of paths with the same region on these rows the largest is kept; a region of all rows is the intercept
    regions: dict[bytes, int] = {}
    for i, column in enumerate(inside.T.bool().cpu().numpy()):
        if not column.all() and column.any():
            regions.setdefault(column.tobytes(), i)
    keep = list(regions.values())[:_CANDIDATES]
    if not keep:
        return []
    design = (inside[:, keep, None] * columns[:, None, :]).flatten(1)
    design = design - design.mean(0)
    design = design / design.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # regions that are sums of others are dropped, as intended
        _, order, _ = lars_path(
            design.cpu().numpy(),
            (target - target.mean()).cpu().numpy(),
            method="lasso",
            max_iter=2 * paths * columns.shape[1],
        )
    taken = dict.fromkeys(int(j) // columns.shape[1] for j in order)
    return [tuple(unique[keep[j]].tolist()) for j in list(taken)[:paths]]
