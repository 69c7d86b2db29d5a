"""Try random networks: a table of what was right, refused and wrong, by function. `make fuzz-networks SEED=1 N=5000`.

Networks have the seeds SEED·10⁶, SEED·10⁶ + 1, …; `--seed K --n 1` with a K that a failure printed repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from network_checks import CHECKS, Outcome, describe, try_network


def _one(seed: int, only: str | None) -> tuple[list[Outcome], list[str], float]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = try_network(seed, only=only)
    wrong = [describe(drawn, o) for drawn, o in found if o.kind == "wrong"]
    return [o for _, o in found], wrong, time.perf_counter() - start


def _shape_of(message: str) -> str:
    """A message without names and numbers, so that equal refusals are counted together."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", re.sub(r"'[^']*'|\([^()]*node [^()]*\)", "…", message))[:160]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--only", choices=list(CHECKS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", type=int, default=20, help="failures that are printed in full")
    args = parser.parse_args()
    first = args.seed if args.n == 1 else args.seed * 1_000_000
    counts: Counter[tuple[str, str]] = Counter()
    refusals: Counter[str] = Counter()
    failures, seconds = 0, 0.0
    with multiprocessing.get_context("fork").Pool(args.processes if args.n > 1 else 1) as pool:
        for done, (outcomes, wrong, took) in enumerate(
            pool.imap_unordered(partial(_one, only=args.only), range(first, first + args.n), chunksize=4), start=1
        ):
            seconds += took
            failures += len(wrong)
            if failures <= args.show:
                print("\n".join(wrong), end="", flush=True)
            for o in outcomes:
                counts[o.check, o.kind] += 1
                if o.kind == "refused":
                    refusals[f"{o.check}: {_shape_of(o.message)}"] += 1
            if sys.stderr.isatty() or done % 250 == 0:
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"{done} of {args.n} networks, {failures} wrong", end=end, file=sys.stderr, flush=True)
    print("\nrefusals")
    for message, count in refusals.most_common(60):
        print(f"{count:6d}  {message}")
    kinds = ("right", "refused", "wrong", "skipped")
    print(f"\n{'':26}" + "".join(f"{kind:>9}" for kind in kinds))
    for check in CHECKS:
        print(f"{check:26}" + "".join(f"{counts[check, kind]:9d}" for kind in kinds))
    print(f"\n{args.n} networks, {1000 * seconds / args.n:.0f} ms each, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
