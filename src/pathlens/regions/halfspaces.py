"""`halfspaces`: the gates of a DLGN as half-spaces of the input space.

Every pre-activation of a linear gate source is affine in the input, q(x) = n·x + b. `HalfSpaces` computes n and b, site
by site, and groups those that are nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import BudgetError, OptionError, RegionError, ShapeError, unknown_name
from pathlens.models.tensors import require_dense
from pathlens.progress import ProgressBar
from pathlens.recording import Snapshot, as_rows
from pathlens.regions.networks import HardNetwork, hard_network

FLAT = 1e-12  # a normal this much shorter than the site's longest one is zero


@dataclass(frozen=True)
class Member:
    """A half-space in a group: its gate, whether it is the opposite side, and its angle to the representative."""

    site: str
    unit: int
    flipped: bool
    degrees: float


@dataclass(frozen=True)
class Group:
    """Half-spaces with nearly the same boundary.

    Attributes
    ----------
    members : tuple of Member
        In order of sites and units; the first is the representative, the others lie within the tolerances of it.
    normal : Tensor (d,)
        Of the representative, of length one.
    offset : float
        Of the representative.
    """

    members: tuple[Member, ...]
    normal: Tensor
    offset: float

    @property
    def representative(self) -> Member:
        return self.members[0]

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class HalfSpaceGroups:
    """All half-spaces of some sites, sorted into groups, largest first, and those that are constant.

    Attributes
    ----------
    groups : tuple of Group
    always_on, always_off : tuple of (site, unit)
        Gates whose normal is zero: they do not depend on the input.
    """

    groups: tuple[Group, ...]
    always_on: tuple[tuple[str, int], ...]
    always_off: tuple[tuple[str, int], ...]
    degrees: float
    offset: float

    def labels(self, site: str, units: int) -> Tensor:
        """The group of each unit of a site, −1 for constant gates: (units,), int64."""
        known = {m.site for group in self.groups for m in group.members}
        known |= {constant for constant, _ in (*self.always_on, *self.always_off)}
        if site not in known:
            raise unknown_name("gate site", site, known)
        found = torch.full((units,), -1)
        for number, group in enumerate(self.groups):
            found[[m.unit for m in group.members if m.site == site]] = number
        return found

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        members = [m for g in self.groups for m in g.members]
        return (
            f"HalfSpaceGroups({len(members)} half-spaces in {len(self.groups)} groups within {self.degrees:g}° and "
            f"offset {self.offset:g}, largest {max(map(len, self.groups), default=0)}; "
            f"{sum(m.flipped for m in members)} flipped; {len(self.always_on)} always on, "
            f"{len(self.always_off)} always off)"
        )


class HalfSpaces:
    """Normals and offsets of every gate: gate (site, unit) is on exactly where normal·x + offset > 0.

    Computed site by site when needed, in float64. Made by `halfspaces`.

    Attributes
    ----------
    sites : tuple of str
    shapes : dict site → tuple of int
        Units of each site; those of a convolution are (channel, position…), numbered in that order.
    input_shape : tuple of int
    label : str
        Whose gates these are.
    """

    def __init__(self, hard: HardNetwork, max_bytes: int | None) -> None:
        self._hard = hard
        self._budget = resolve_budget(max_bytes, torch.device("cpu"))
        self.sites, self.shapes = hard.sites, hard.shapes
        self.input_shape, self.label = hard.input_shape, hard.label

    @property
    def dim(self) -> int:
        """d, the number of inputs."""
        return math.prod(self.input_shape)

    def _site(self, site: str | int) -> str:
        if isinstance(site, int) and not isinstance(site, bool) and -len(self.sites) <= site < len(self.sites):
            return self.sites[site]
        if site not in self.shapes:
            raise unknown_name("gate site", site, self.sites)
        return str(site)

    def units(self, site: str | int) -> int:
        """Number of gates of a site."""
        return math.prod(self.shapes[self._site(site)])

    def offsets(self, site: str | int) -> Tensor:
        """q(0) of every gate of a site: (units,)."""
        return self._offsets[self._site(site)].clone()

    @cached_property
    def _offsets(self) -> dict[str, Tensor]:
        zero = torch.zeros(1, *self.input_shape, dtype=torch.float64)
        with torch.no_grad():
            return {k: q.flatten() for k, q in self._hard.net.preactivations(zero).items()}

    def longest(self, site: str | int) -> float:
        """Estimate of the length of a site's longest normal, from pre-activations at a few random inputs."""
        return self._longest[self._site(site)]

    @cached_property
    def _longest(self) -> dict[str, float]:
        x = torch.randn(8, *self.input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with torch.no_grad():
            changes = {k: q.flatten(1) - self._offsets[k] for k, q in self._hard.net.preactivations(x).items()}
        return {k: float(change.square().mean(0).sqrt().max()) for k, change in changes.items()}

    def normals(self, site: str | int, units: Sequence[int] | None = None) -> Tensor:
        """Normals (units, d) of a site, or of the chosen units, in their order.

        By derivatives along the d unit vectors or by backward passes from the units, whichever are fewer, in batches
        that fit the memory budget.
        """
        name = self._site(site)
        chosen = list(range(self.units(name))) if units is None else [int(u) for u in units]
        if any(not 0 <= u < self.units(name) for u in chosen):
            raise RegionError(f"normals: site '{name}' has {self.units(name)} units, numbered from 0; got {units!r}.")
        need = 8 * len(chosen) * self.dim
        if need > self._budget:
            raise BudgetError(
                f"normals: {len(chosen)} normals of site '{name}' take {human_bytes(need)}, the budget is "
                f"{human_bytes(self._budget)}. Ask for fewer units=…, or raise max_bytes."
            )
        return self._forward(name, chosen) if self.dim <= len(chosen) else self._backward(name, chosen)

    def _batch(self) -> int:
        """Rows in one pass; each holds the values of every site, some of them several times."""
        row = 8 * 4 * (self.dim + sum(map(math.prod, self.shapes.values())))
        return max(1, min(4096, self._budget // (4 * row)))

    def _forward(self, site: str, units: list[int]) -> Tensor:
        step = self._batch()

        def chosen(x: Tensor) -> Tensor:
            return self._hard.net.preactivations(x)[site].reshape(len(x), -1)[:, units]

        with torch.inference_mode(False), torch.no_grad(), ProgressBar("normals", self.dim) as meter:
            found = torch.empty(len(units), self.dim, dtype=torch.float64)
            for lo in range(0, self.dim, step):
                rows = min(step, self.dim - lo)
                basis = torch.zeros(rows, self.dim, dtype=torch.float64)
                basis[torch.arange(rows), lo + torch.arange(rows)] = 1.0
                basis = basis.reshape(rows, *self.input_shape)
                # not q(e_j) − q(0): a normal much shorter than its offset would be lost in rounding
                slopes: Tensor = torch.func.jvp(chosen, (torch.zeros_like(basis),), (basis,))[1]
                found[:, lo : lo + rows] = slopes.T
                meter.advance(rows)
        return found

    def _backward(self, site: str, units: list[int]) -> Tensor:
        step = min(self._batch(), 256)
        with torch.inference_mode(False), torch.enable_grad(), ProgressBar("normals", len(units)) as meter:
            found = torch.empty(len(units), self.dim, dtype=torch.float64)
            for lo in range(0, len(units), step):
                some = units[lo : lo + step]
                # row i of the batch depends on unit i alone, so one backward pass gives a normal per row
                x = torch.zeros(len(some), *self.input_shape, dtype=torch.float64, requires_grad=True)
                q = self._hard.net.preactivations(x)[site].reshape(len(some), -1)
                (g,) = torch.autograd.grad(q[torch.arange(len(some)), some].sum(), x)
                found[lo : lo + len(some)] = g.reshape(len(some), -1)
                meter.advance(len(some))
        return found

    def normal(self, site: str | int, unit: int | Sequence[int]) -> Tensor:
        """One normal, in the shape of an input; a unit is a number or (channel, position…)."""
        name = self._site(site)
        number = self._hard.unit_number(name, unit, "halfspaces")
        return self.normals(name, [number])[0].reshape(self.input_shape)

    def images(self, site: str | int, units: Sequence[int] | None = None) -> Tensor:
        """Normals in the shape of an input: (units, *input_shape)."""
        found = self.normals(site, units)
        return found.reshape(len(found), *self.input_shape)

    def constant(self, site: str | int) -> Tensor:
        """Gates that do not depend on the input (zero normal): 1 always on, −1 always off, 0 a half-space."""
        return _constant(self.normals(site).norm(dim=1), self.offsets(site))

    def contains(self, site: str | int, X: Any) -> Tensor:
        """Which gates of a site are on, from normals and offsets: (n, d) or (n, *input shape) → (n, units)."""
        return as_points(X, self.dim) @ self.normals(site).T + self.offsets(site) > 0

    def groups(
        self, angle: float = 1.0, *, offset: float = 1e-6, sites: Sequence[str | int] | None = None
    ) -> HalfSpaceGroups:
        """Half-spaces whose boundaries nearly coincide.

        In order of sites and units, a half-space joins the first group whose representative is within `angle` degrees
        (or 180° minus that: the same boundary, flipped) and whose boundary is within `offset` of its own, measured
        from the origin; otherwise it starts a new group.

        Parameters
        ----------
        angle : float
            Degrees; 0 finds equal directions up to rounding.
        offset : float
            Largest difference of b/|n|, in units of the input.
        sites : sequence, optional
            All of them by default.

        Notes
        -----
        N half-spaces in G groups cost N·G·d operations; the normals of all sites are held at once.
        """
        if not (0 <= angle <= 90) or not offset >= 0:
            raise OptionError(f"groups: angle must be 0…90 degrees and offset at least 0, got {angle!r}, {offset!r}.")
        names = self.sites if sites is None else tuple(self._site(s) for s in sites)
        units = sum(self.units(n) for n in names)
        need = 8 * self.dim * units * 2
        if need > self._budget:
            raise BudgetError(
                f"groups: the normals of {len(names)} sites take {human_bytes(need)}, the budget is "
                f"{human_bytes(self._budget)}. Name fewer sites=…, or raise max_bytes."
            )
        chord = max(2 * math.sin(math.radians(angle) / 2), 1e-9)  # |u − v| resolves small angles, their cosine does not
        slack = max(offset, 1e-12)
        heads, head_offsets = np.empty((units, self.dim)), np.empty(units)
        members: list[list[Member]] = []
        fixed: dict[int, list[tuple[str, int]]] = {1: [], -1: []}
        for name in names:
            normals, offsets = self.normals(name), self.offsets(name)
            size = normals.norm(dim=1)
            flat = _constant(size, offsets).tolist()
            rows = zip(flat, normals.numpy(), offsets.numpy(), size.numpy())
            for unit, (constant, n, b, length) in enumerate(rows):
                if constant:
                    fixed[constant].append((name, unit))
                    continue
                n, b = n / length, b / length
                g = len(members)
                # cosines select candidates by one product, with a margin for rounding; differences decide
                few = np.nonzero(np.abs(heads[:g] @ n) >= 1 - chord**2 / 2 - 1e-9)[0]
                near = np.linalg.norm(heads[few] - n, axis=1), np.linalg.norm(heads[few] + n, axis=1)
                same = (near[0] <= chord) & (np.abs(head_offsets[few] - b) <= slack)
                opposite = (near[1] <= chord) & (np.abs(head_offsets[few] + b) <= slack)
                hits = np.nonzero(same | opposite)[0]
                if len(hits):
                    k, hit = int(few[hits[0]]), int(hits[0])
                    flipped = not same[hit]
                    degrees = math.degrees(2 * math.asin(min(near[int(flipped)][hit] / 2, 1.0)))
                    members[k].append(Member(name, unit, flipped, degrees))
                    continue
                heads[g], head_offsets[g] = n, b
                members.append([Member(name, unit, False, 0.0)])
        order = sorted(range(len(members)), key=lambda k: -len(members[k]))
        made = tuple(Group(tuple(members[k]), torch.from_numpy(heads[k].copy()), float(head_offsets[k])) for k in order)
        return HalfSpaceGroups(made, tuple(fixed[1]), tuple(fixed[-1]), angle, offset)

    def plot(self, site: str | int = 0, ax: Any = None, **style: Any) -> Any:
        """For two inputs the boundary lines of a site, else its normals as tiles; see `pictures.plot_halfspaces`."""
        from pathlens.regions.pictures import plot_halfspaces

        return plot_halfspaces(self, self._site(site), ax, **style)

    def __repr__(self) -> str:
        units = ", ".join(f"{n}: {'×'.join(map(str, self.shapes[n]))}" for n in self.sites[:4])
        more = f", … {len(self.sites)} sites" if len(self.sites) > 4 else ""
        return (
            f"HalfSpaces({sum(self.units(n) for n in self.sites)} gates, on where n·x + b > 0, x of shape "
            f"{self.input_shape}; {units}{more}; {self.label})"
        )


def as_points(X: Any, d: int) -> Tensor:
    """Inputs as float64 rows on the CPU: (n, d) or (n, *input shape) → (n, d)."""
    x = as_rows(require_dense(X, "Points").double() if isinstance(X, Tensor) else X, like=torch.float64)
    if x[0].numel() != d:
        raise ShapeError(
            f"contains: expected points of shape (n, {d}), or n of them in the shape of an input, got "
            f"{tuple(x.shape)}. For one point use X[None]."
        )
    return x.flatten(1).cpu()


def _constant(sizes: Tensor, offsets: Tensor) -> Tensor:
    return torch.where(sizes <= FLAT * sizes.max(), torch.where(offsets > 0, 1, -1), 0)


def halfspaces(
    net: nn.Module | Snapshot, *, input_shape: Sequence[int] | None = None, max_bytes: int | None = None
) -> HalfSpaces:
    """The half-spaces of a network with linear gates: gate (l, i) is on iff n·x + b > 0.

    For a DLGN q_l = W_l q_{l−1} + b_l, so n = row i of W_l…W_1; the same for shallow gates, piecewise constant and
    frozen networks, batch-norm in eval mode, shortcuts, and convolutions, where each channel and position has a
    separate half-space. Exact, in float64, computed site by site when needed.

    Parameters
    ----------
    net : GatedNetwork or Snapshot
        With a linear gate source; a snapshot of a named constructor's.
    input_shape : sequence of int, optional
        Of one input, where the network begins with a convolution.
    max_bytes : int, optional
        Memory that normals may take.

    Raises
    ------
    RegionError
        If gates are not half-spaces: ReLU networks, networks gated by them, quadratic and given gates.

    Examples
    --------
    >>> from pathlens import models
    >>> H = halfspaces(models.dlgn(2, hidden=(3, 3), seed=0))
    >>> H.normals("relu2@0").shape, H.offsets(1)
    (torch.Size([3, 2]), tensor([0., 0., 0.], dtype=torch.float64))
    >>> H.groups(angle=30, sites=[1])
    HalfSpaceGroups(3 half-spaces in ... groups within 30° and offset 1e-06, ...)
    """
    return HalfSpaces(hard_network(net, "halfspaces", input_shape, linear_only=True), max_bytes)
