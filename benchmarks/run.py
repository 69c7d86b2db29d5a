"""All benchmarks in one run: a table, a JSON file named after the machine, and the page of the docs made from it.

``python -m benchmarks.run`` takes about half an hour on two cores, ``--quick`` a minute (tiny sizes, for checking that
everything runs; written to a separate file and never to the docs). ``--page`` only makes the page, from the JSON files.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import kernels, linops, measure, training

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
VERSION = 1


# --- running -------------------------------------------------------------------------------------------------------


def operator_rows(quick: bool) -> list[dict[str, Any]]:
    """The kernel operators on factors alone, without networks (`benchmarks.linops`)."""
    n, small = (500, 300) if quick else (20_000, 4096)
    fast, slow = linops.matvec(n=n)
    popcount, walk, bare = linops.overlap(n=small)
    tiles, floor = linops.tile_rate(n=small)
    work = 2.0 * small * small * 512
    rows = [
        kernels.Row("operators", f"K @ v, 5 × (128 ∘ 128), n = {n:,}: factors", fast, {"tiles": slow}),
        kernels.Row("operators", f"Λ of 5 × 128 bits, n = {small}: popcount", popcount, {"float32 products": bare}),
        kernels.Row("operators", f"Λ of 5 × 128 bits, n = {small}: torch", walk, {"float32 products": bare}),
        kernels.Row("operators", f"one Gram, n = {small}, r = 512: tiles", work / tiles, {"one product": work / floor}),
    ]
    return [row.as_dict() for row in rows]


def training_rows(quick: bool) -> list[dict[str, Any]]:
    """Many networks at once against one after another (`benchmarks.training`)."""
    if quick:
        return []
    out = []
    for row in training.main("cpu"):
        ours, alone = row["stacked ms per step and network"] / 1e3, row["plain ms per step and network"] / 1e3
        how = f", {row['way']}"
        case = f"{row['case']}, {row['members']} networks at once{how}: one step of one network"
        out.append(kernels.Row("training", case, ours, {"plain PyTorch loop, one network": alone}).as_dict())
    return out


def run(quick: bool, peers: bool) -> dict[str, Any]:
    """Everything, in order; floors before and after, so that a busy machine shows."""
    start = time.time()
    found: dict[str, Any] = {
        "format": "pathlens.benchmarks",
        "version": VERSION,
        "quick": quick,
        "complete": False,
        "date": time.strftime("%Y-%m-%d", time.gmtime(start)),
        "machine": measure.machine(),
        "floors at the start": measure.floors(),
        "rows": [],
    }
    print(measure.describe(found["machine"]), flush=True)
    suites: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
        ("kernels", lambda: kernels.main(quick, peers)),
        ("operators", lambda: operator_rows(quick)),
        ("training", lambda: training_rows(quick)),
    ]
    for name, suite in suites:
        print(f"• {name}", flush=True)
        found["rows"] += suite()
        found["minutes"] = round((time.time() - start) / 60, 1)
        save(found)  # half an hour of work should survive a crash of the next suite
    found["floors at the end"] = measure.floors()
    found["complete"] = True
    save(found)
    return found


def save(found: dict[str, Any]) -> Path:
    """Write the results under the machine's name."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file_name(found["machine"], found["quick"])
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


# --- writing -------------------------------------------------------------------------------------------------------


def file_name(machine: dict[str, Any], quick: bool) -> str:
    """A name for the machine's results.

    >>> file_name({"processor": "Intel(R) Xeon(R) CPU", "cores": 2, "gpu": None}, False)
    'intel-r-xeon-r-cpu-2-cores.json'
    """
    text = f"{machine['processor']} {machine['cores']} cores {machine['gpu'] or ''}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") + ("-quick" if quick else "") + ".json"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows as a Markdown table."""
    lines = ["| case | Pathlens | best peer | ratio | floor |", "|---|---|---|---|---|"]
    for row in rows:
        best = min(row["peers"].items(), key=lambda item: item[1]) if row["peers"] else None
        peer = f"{kernels.seconds(best[1])} ({best[0]})" if best else "–"
        factor = kernels.ratio(best[1] / row["pathlens"]) if best else "–"
        floor = "; ".join(
            f"{name} {kernels.seconds(took)}: {row['pathlens'] / took:.2f}×" for name, took in row["floor"].items()
        )
        lines.append(f"| {row['case']} | {kernels.seconds(row['pathlens'])} | {peer} | {factor} | {floor or '–'} |")
    return lines


def details(rows: Iterable[dict[str, Any]]) -> list[str]:
    """All peers, facts, goals and notes of every row that has some."""
    lines = []
    for row in rows:
        parts = [f"{name}: {kernels.seconds(took)}" for name, took in sorted(row["peers"].items(), key=lambda p: p[1])]
        parts += [f"{k}: {v if isinstance(v, str) else format(v, '.3g')}" for k, v in row["facts"].items()]
        parts += [f"goal '{g['goal']}': {g['value']:.3g}, {'met' if g['met'] else 'not met'}" for g in row["goals"]]
        parts += row["notes"]
        if len(parts) > 1:
            lines += [f"- **{row['case']}**", *(f"  - {part}" for part in parts)]
    return lines


def page(results: list[dict[str, Any]]) -> str:
    """The page of the docs: one section per machine."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` from the JSON files in `benchmarks/results`; not written by hand. Every ratio compares "
        "runs on the same network, the same inputs and the same machine within one run, in which tasks alternate; "
        "times are the shortest of several. Compilation of JAX is left out of its times, recording is included in "
        "ours. *Floor* is the time of the bare matrix products that the case needs, and our time as a multiple of it.",
    ]
    for found in results:
        rows = found["rows"]
        lines += [
            "",
            f"## {measure.describe(found['machine'])}",
            "",
            f"{found['date']}, {found['minutes']} minutes, "
            f"load average at the start {found['machine']['load average at the start']}.",
        ]
        lines += ["", "| rate of this machine | at the start | at the end |", "|---|---|---|"]
        for name, rate in found["floors at the start"].items():
            lines.append(f"| {name} | {rate:.0f} | {found['floors at the end'][name]:.0f} |")
        for group in dict.fromkeys(row["group"] for row in rows):
            lines += ["", f"### {group.capitalize()}", "", *table(row for row in rows if row["group"] == group)]
        lines += ["", "### Details", "", *details(rows)]
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Make the page from all full results on disk."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    results = [found for found in results if found.get("format") == "pathlens.benchmarks"]  # others lie there too
    results = [
        found for found in results if found.get("version") == VERSION and found["complete"] and not found["quick"]
    ]
    if results:
        PAGE.write_text(page(results))
        print(f"• wrote {PAGE.relative_to(HERE.parent)}")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--no-peers", action="store_true", help="leave neural-tangents out")
    parser.add_argument("--page", action="store_true", help="only make the page from the results on disk")
    chosen = parser.parse_args()
    if not chosen.page:
        found = run(chosen.quick, not chosen.no_peers)
        print("\n".join(table(found["rows"])))
        print(f"• wrote {save(found).relative_to(HERE.parent)}")
    if not chosen.quick:
        write_page()


if __name__ == "__main__":
    main()
