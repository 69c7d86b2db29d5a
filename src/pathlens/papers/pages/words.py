"""Numbers, artifacts and their parts as text: values over seeds, durations, devices, sizes that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pathlens.papers.artifact import Artifact

SIGNS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}


def number(value: float | None, digits: int = 3) -> str:
    """A number as people write it: few digits, words for infinity, a dash for what is missing.

    Examples
    --------
    >>> number(0.0123456), number(2000.0), number(float("inf")), number(None), number(31.46), number(1.5e-13)
    ('0.0123', '2000', 'not reached', '–', '31.5', '1.5e-13')
    """
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "not reached" if value > 0 else "−∞"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−" if abs(value) >= 1e-4 else "-")


def read_spread(values: Sequence[float | None] | np.ndarray, beyond: str = "not reached") -> str:
    """'median (lowest–highest)' over seeds; None and infinity, what was never reached, read as ``beyond``; no NaN.

    Examples
    --------
    >>> read_spread([240, 106, 255]), read_spread([None, 2385, None], ">4000"), read_spread([5]), read_spread([-1, 2])
    ('240 (106–255)', '>4000 (2385–>4000)', '5', '0.5 (−1 to 2)')
    """
    there = np.array([np.inf if value is None else value for value in values if value is None or value == value])
    if not there.size:
        return "–"
    ends = np.median(there), there.min(), there.max()
    median, low, high = (beyond if value == np.inf else number(float(value)) for value in ends)
    return median if low == high else f"{median} ({low}{' to ' if there.min() < 0 else '–'}{high})"


def mean_sd(values: Sequence[float]) -> str:
    """'mean ± standard deviation' over seeds; one value alone has no deviation, and infinity has no mean.

    Examples
    --------
    >>> mean_sd([1.0, 2.0, 4.5]), mean_sd([8.0]), mean_sd([1.0, float("inf")]), mean_sd([]), mean_sd([1200.5, 1500])
    ('2.5 ± 1.8', '8', '–', '–', '1350 ± 212')
    >>> mean_sd([0.1 + 0.2, 0.3])
    '0.3 ± 0'
    """
    there = np.asarray(values, dtype=float)
    if not len(there) or not np.isfinite(there).all():
        return "–"

    def rounded(value: float, digits: int) -> str:  # no power of ten where whole numbers will do
        return number(float(round(value)) if 10**digits <= abs(value) < 1e6 else value, digits)

    mean, sd = float(there.mean()), float(there.std(ddof=1)) if len(there) > 1 else 0.0
    if sd < 1e-12 * abs(mean):  # rounding of equal values
        sd = 0.0
    return rounded(mean, 3) if len(there) == 1 else f"{rounded(mean, 3)} ± {rounded(sd, 2)}"


def duration(seconds: float) -> str:
    """A time as people write it.

    Examples
    --------
    >>> duration(9.46), duration(96.2), duration(5000), duration(20000), duration(0)
    ('9.5 s', '1.6 min', '83 min', '5.6 h', '–')
    """
    if seconds <= 0:
        return "–"
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


def where_it_ran(artifact: Artifact) -> str:
    """The graphics card by its name if it is known, else the device.

    Examples
    --------
    >>> where_it_ran(Artifact("hs.a", "", "", "quick", environment={"device": "cpu", "cpus": 2}))
    'cpu, 2 cores'
    """
    found = artifact.environment
    if found.get("gpu"):
        return str(found["gpu"])
    device = str(found.get("device", "–"))
    return f"{device}, {found['cpus']} cores" if device == "cpu" and found.get("cpus") else device


def environment_text(environment: Mapping[str, Any]) -> str:
    """Versions and hardware that are known.

    Examples
    --------
    >>> environment_text({"python": "3.11", "torch": None, "cpus": 2})
    'python 3.11, cpus 2'
    """
    return ", ".join(f"{key} {value}" for key, value in environment.items() if value not in (None, ""))


def deviation_rows(artifact: Artifact) -> list[tuple[str, str, str, str]]:
    """Rows of the table of deviations: the paper, the authors' code, this run, and why."""
    return [(one.paper, one.authors_code or "–", one.ours, one.why) for one in artifact.deviations]


def reductions(artifact: Artifact) -> str:
    """Every size that differs from the paper's, with both values.

    Examples
    --------
    >>> reductions(Artifact("hs.a", "", "", "paper", {"epochs": {"relu": 3, "dlgn": 9}}, (0, 1, 2),
    ...            paper_config={"epochs": {"relu": 5, "dlgn": 9}, "seeds": 5}))
    'epochs · relu 3 (paper 5), seeds 3 (paper 5)'
    >>> reductions(Artifact("hs.a", "", "", "paper", {"epochs": 3}, paper_config={"epochs": {"relu": 5, "dlgn": 9}}))
    'epochs 3 (paper relu 5, dlgn 9)'
    >>> reductions(Artifact("hs.a", "", "", "paper", {"epochs": {"relu": 5, "dlgn": 9}}, paper_config={"epochs": 9}))
    'epochs · relu 5 (paper 9)'
    >>> reductions(Artifact("hs.a", "", "", "paper", {"epochs": {"relu": 5}},
    ...            paper_config={"epochs": {"relu": 5, "dlgn": 9}}))
    'epochs · dlgn – (paper 9)'
    """
    return ", ".join(f"{size} {ours} (paper {paper})" for size, ours, paper in reduced_sizes(artifact))


def reduced_sizes(artifact: Artifact) -> list[tuple[str, str, str]]:
    """Every size that differs from the paper's: its name, ours, the paper's; '–' for a part that one of them lacks."""
    ours = flat({key: pair[0] for key, pair in artifact.reductions.items()})
    paper = dict(flat({key: pair[1] for key, pair in artifact.reductions.items()}))
    there = dict(ours)
    in_parts = {key.rpartition(" · ")[0] for key in there} - {""}
    ours += [(key, "–") for key in paper if key not in there and key.rpartition(" · ")[0] in in_parts]

    def printed(key: str) -> str:
        """The paper's value: of this size, of its parts, or of the one that it is a part of."""
        parts = [
            f"{name.removeprefix(f'{key} · ')} {value}" for name, value in paper.items() if name.startswith(f"{key} · ")
        ]
        whole = key.rpartition(" · ")[0]
        return paper.get(key) or ", ".join(parts) or (printed(whole) if whole else "–")

    return [(key, value, text) for key, value in ours if (text := printed(key)) != value]


def tally(artifact: Artifact, noun: str = "") -> str:
    """How many claims are reproduced; of a REDUCED run, which reproduces nothing, how many of those measured are met.

    Examples
    --------
    >>> from pathlens.papers.artifact import Claim
    >>> claim = Claim("more", above=2, null=1)
    >>> claims = (claim.measure([3.0, 4.0, 5.0]), claim.measure([1.0, 1.0, 1.0]), claim.measure([None] * 3))
    >>> tally(Artifact("hs.a", "", "", "paper", claims=claims), "claims ")
    '1 of 3 claims reproduced'
    >>> tally(Artifact("hs.a", "", "", "paper", {"epochs": 3}, claims=claims, paper_config={"epochs": 9}))
    '1 of 2 met, 1 not measured'
    """
    if artifact.scale != "paper" or not artifact.reduced:
        good = sum(artifact.verdict_of(claim) == "reproduced" for claim in artifact.claims)
        return f"{good} of {len(artifact.claims)} {noun}reproduced"
    measured = [claim for claim in artifact.claims if claim.spread.count]
    good = sum(claim.met.count(True) >= claim.agree * claim.spread.count - 1e-9 for claim in measured)
    left = len(artifact.claims) - len(measured)
    return f"{good} of {len(measured)} {noun}met" + (f", {left} not measured" if left else "")


Table = tuple[list[str], list[list[str]]]  # head, which begins with the table's name, and rows


def summaries(metrics: Mapping[str, Any]) -> list[Table]:
    """Tables of what was measured over seeds, as 'mean ± sd'.

    A mean is a mapping with ``mean`` and ``seeds`` or with ``mean ± sd``, or a text with ``±``; the rest is left out.

    Examples
    --------
    >>> def mean(*seeds): return {"mean": sum(seeds) / len(seeds), "sd": None, "seeds": list(seeds)}
    >>> summaries({"accuracy": {"ReLU": {"train": mean(99.0), "test": mean(70.0, 74.0)}, "DLN": {"test": "40 ± 1"}}})
    [(['accuracy', 'train', 'test'], [['ReLU', '99', '72 ± 2.8'], ['DLN', '–', '40 ± 1']])]
    >>> summaries({"ν": {"epoch 0": "3 ± 1"}, "epochs": [1, 2]})
    [(['ν', 'mean ± sd'], [['epoch 0', '3 ± 1']])]
    """
    return _tables(metrics, _mean, "mean ± sd")


def paper_tables(artifact: Artifact) -> list[Table]:
    """The paper's own numbers.

    Examples
    --------
    >>> printed = {"Table 1": {"ReLU": {"train": 96.3, "test": 72.17}, "DLN": {"train": 42.3, "test": 40.79}}}
    >>> paper_tables(Artifact("hs.a", "", "", "quick", paper_numbers=printed))
    [(['Table 1', 'train', 'test'], [['ReLU', '96.3', '72.17'], ['DLN', '42.3', '40.79']])]
    """
    return _tables(artifact.paper_numbers, lambda value: "" if isinstance(value, dict) else cell(value), "paper")


def _tables(values: Mapping[str, Any], text: Callable[[Any], str], column: str, name: str = "") -> list[Table]:
    """Mappings of mappings of entries as tables, at any depth; ``text`` is empty for what is no entry."""
    entries = {key: entry for key, value in values.items() if (entry := text(value))}
    inner = {key: value for key, value in values.items() if key not in entries and isinstance(value, dict) and value}
    found: list[Table] = []
    if entries:
        found.append(([name, column], [list(pair) for pair in entries.items()]))
    if not entries and len(inner) > 1 and all(text(cell) for row in inner.values() for cell in row.values()):
        columns = list(dict.fromkeys(key for row in inner.values() for key in row))
        rows = [[key, *(text(row[c]) if c in row else "–" for c in columns)] for key, row in inner.items()]
        return [([name, *columns], rows)]
    for key, value in inner.items():
        found += _tables(value, text, column, f"{name} · {key}" if name else key)
    return found


def _mean(value: Any) -> str:
    """'mean ± sd' of a value that is one, else nothing."""
    if isinstance(value, str):
        return value if " ± " in value else ""
    if not isinstance(value, dict):
        return ""
    if isinstance(value.get("seeds"), list) and isinstance(value.get("mean"), (int, float)):
        return mean_sd(value["seeds"])
    return _mean(value.get("mean ± sd"))


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings or numbers as pairs of a name and a text.

    Examples
    --------
    >>> flat({"a": {"b": 1.5, "c": [1, True]}, "d": None})
    [('a · b', '1.5'), ('a · c', '1, yes'), ('d', '–')]
    """
    lines = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        lines += flat(value, f"{name} · ") if isinstance(value, dict) else [(name, cell(value))]
    return lines


def cell(value: Any) -> str:
    """One setting, number or list of them as text."""
    if isinstance(value, list):
        return ", ".join(str(item) if isinstance(item, list) else cell(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, (int, float)):
        return number(value, 4)
    return str(value)
