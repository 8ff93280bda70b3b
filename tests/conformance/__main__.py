"""Prove the rules over torch's sample inputs and write the table.

    python -m tests.conformance [--only add,mul] [--sample N --seed S] [--limit-seconds T] [--fresh]

Rows are kept in out/conformance.json, so a run that was stopped goes on where it was; entries that are wrong run again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter

import torch

from tests.conformance.run import SAMPLES, WRONG, Conformance
from tests.conformance.table import table
from tests.conformance.torch_samples import entries
from tests.coverage_page import left_alone, put
from tests.results import Results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="entries, joined by commas")
    parser.add_argument("--sample", type=int, default=0, help="so many entries at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=SAMPLES, help="sample calls of an entry")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no entry after so many seconds")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    everything = entries()
    only = arguments.only.split(",") if arguments.only else []
    unknown = sorted(set(only) - set(everything))
    if unknown:
        parser.error(f"torch's table has no {', '.join(unknown)}")
    results = Results("conformance", arguments.fresh)
    rows = results.rows
    work = only or [name for name in everything if rows.get(name, {}).get("status", WRONG) == WRONG]
    if arguments.sample:
        work = random.Random(arguments.seed).sample(work, min(arguments.sample, len(work)))
    begin, conformance = time.monotonic(), Conformance()
    for number, name in enumerate(work, 1):
        if time.monotonic() - begin > arguments.limit_seconds:
            print(f"time is up: {len(work) - number + 1} entries left")
            break
        row = rows[name] = conformance.run(name, everything[name], arguments.calls, arguments.seed)
        if number % 20 == 0 or number == len(work):
            results.keep()
        why = "; ".join([*row["wrong"], *row["whole"], *row["reasons"]])
        print(f"[{number}/{len(work)}] {name}: {row['status']}, {row['splits']} splits, {row['seconds']} s; {why}", flush=True)
    results.keep()
    if not left_alone(parser, arguments, len(set(everything) - set(rows))):
        put("conformance", table(rows, len(everything)))
    counts = Counter(row["status"] for row in rows.values())
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
