"""Memory budgets of computations, and the tile edges that follow from them.

Free memory is read from the operating system and from the control group (v1 and v2) of the process, because inside a
container the machine's own figure is wrong.
"""

from __future__ import annotations

import functools
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pathlens.errors import BudgetError, OptionError

if TYPE_CHECKING:
    import torch

FRACTION_OF_FREE = 0.5  # the caller's own arrays, and the allocator's slack, need the rest
TILE_EDGE = 2048  # beyond this a tile's matrix product gets no faster, and its buffers leave the cache
TRIANGLE_EDGE = 512  # where only the upper triangle of a symmetric kernel is computed
STRIP_EDGES = (256, 1024)  # the same for a matrix that is held: thin strips waste less on the diagonal
_LANES = 64  # products with edges that are multiples of it are faster, by a tenth where 256 replaced 250
DEVICE_EDGE = 8192  # on CUDA, where starting work on a tile costs more than leaving the cache
_UNKNOWN_FREE = 2 << 30  # where no system figure can be read


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _group_free(folder: Path, limit: str, usage: str, cache_key: str) -> int | None:
    top, used = _number(folder / limit), _number(folder / usage)
    if top is None or used is None:
        return None
    cache = 0  # pages of files that the kernel drops under pressure count as usage but are free to take
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == cache_key and value.strip().isdigit():
            cache = int(value)
    return max(top - used + min(cache, used), 0)


def free_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Memory that this process may still take: the least of the system's and its control groups' free memory.

    Parameters
    ----------
    root
        Folder that holds ``proc`` and ``sys``; other than ``/`` only in tests.

    Examples
    --------
    >>> free_bytes() > 0
    True
    """
    base = Path(root)
    found: list[int] = []
    for line in (_read(base / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in (_read(base / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = base / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = base / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / group.strip("/")
        # A limit may sit on any ancestor; inside a container the named folder may not exist at all, the mount does.
        for place in (folder, *folder.parents):
            if (free := _group_free(place, *names)) is not None:
                found.append(free)
            if place == mount:
                break
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=_UNKNOWN_FREE)


@functools.lru_cache(maxsize=1)
def _free_about(tenth_of_a_second: int) -> int:
    """Free memory, read at most ten times a second: reading a dozen system files takes as long as a tile."""
    return free_bytes()


def resolve_budget(max_bytes: int | None, device: torch.device) -> int:
    """The budget in bytes: as given, or half of what is free on the device.

    Examples
    --------
    >>> import torch
    >>> resolve_budget(1000, torch.device("cpu"))
    1000
    """
    if max_bytes is None:
        if device.type == "cuda":
            import torch

            return int(torch.cuda.mem_get_info(device)[0] * FRACTION_OF_FREE)
        return int(_free_about(int(time.monotonic() * 10)) * FRACTION_OF_FREE)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise OptionError(
            f"max_bytes must be a positive number of bytes or None, got {max_bytes!r}. "
            f"For a gibibyte write max_bytes=2**30."
        )
    return max_bytes


def human_bytes(count: float) -> str:
    """A byte count as text.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def require_budget(what: str, needed: float, budget: int, remedy: str = "Raise max_bytes.") -> None:
    """Raise a `BudgetError` if more bytes are needed than the budget has.

    >>> require_budget("dense: the matrix takes", 2048, 1024)
    Traceback (most recent call last):
    pathlens.errors.BudgetError: dense: the matrix takes 2.0 KiB, the budget is 1.0 KiB. Raise max_bytes.
    """
    if needed > budget:
        raise BudgetError(f"{what} {human_bytes(needed)}, the budget is {human_bytes(budget)}. {remedy}")


@dataclass(frozen=True)
class TilePlan:
    """Edges of the tiles (the last ones are ragged) and the memory of one tile.

    Attributes
    ----------
    rows, cols
        Edges of a tile.
    bytes
        Buffers of one tile plus the factor rows gathered for it.
    """

    rows: int
    cols: int
    bytes: int


def blocks(n: int, edge: int) -> list[range]:
    """Split ``range(n)`` into consecutive ranges of at most ``edge``.

    >>> blocks(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(lo, min(lo + edge, n)) for lo in range(0, n, edge)]


def _even(n: int, edge: int) -> int:
    """The edge that cuts n into as many blocks but of nearly equal size; a multiple of 64 if there is one."""
    equal = math.ceil(n / math.ceil(n / edge))
    round_ = math.ceil(equal / _LANES) * _LANES
    return round_ if round_ <= edge else equal


def plan_tiles(
    n: int,
    m: int,
    *,
    entry_bytes: int,
    row_bytes: int,
    col_bytes: int,
    budget: int,
    edge: int | tuple[int, int] | None = TILE_EDGE,
    square: bool = False,
    reserve: int = 0,
    what: str = "a tile",
) -> TilePlan:
    """The largest tiles that fit a budget: entry_bytes·a·b + row_bytes·a + col_bytes·b + reserve ≤ budget.

    Parameters
    ----------
    n, m
        Shape of the kernel.
    entry_bytes
        Bytes per entry of a tile, over all buffers alive at once.
    row_bytes, col_bytes
        Bytes of gathered factors per row and per column of a tile.
    budget, reserve
        Bytes allowed, and those taken by things other than tiles.
    edge
        Cap on either edge, or on rows and columns; None where larger is always better (streamed factors, recomputed for
        every tile).
    square
        Equal edges, as walking the upper triangle of a symmetric kernel needs.

    Examples
    --------
    >>> plan_tiles(100, 100, entry_bytes=8, row_bytes=80, col_bytes=80, budget=20_000)
    TilePlan(rows=34, cols=34, bytes=14688)
    """
    spare = budget - reserve
    least = entry_bytes + row_bytes + col_bytes
    require_budget(f"{what}: one row and one column need", least + reserve, budget)
    both = row_bytes + col_bytes
    top = max(int((math.sqrt(both * both + 4.0 * entry_bytes * spare) - both) / (2 * entry_bytes)), 1)
    most_rows, most_cols = (n, m) if edge is None else (edge, edge) if isinstance(edge, int) else edge
    a = min(n, top, most_rows)
    b = min(m, top, most_cols)
    if not square:  # a short side leaves room for a longer other one
        b = max(b, min(m, most_cols, (spare - row_bytes * a) // (entry_bytes * a + col_bytes)))
        a = max(a, min(n, most_rows, (spare - col_bytes * b) // (entry_bytes * b + row_bytes)))
    a, b = _even(n, a), _even(m, b)
    if square:
        a = b = min(a, b)
    return TilePlan(a, b, entry_bytes * a * b + row_bytes * a + col_bytes * b)
