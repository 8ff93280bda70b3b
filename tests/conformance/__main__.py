"""Prove the rules over torch's sample inputs and write the table.

    python -m tests.conformance [--only add,mul] [--sample N --seed S] [--limit-seconds T] [--fresh]

Rows are kept in out/conformance.json, so a run that was stopped goes on where it was; entries that are wrong run again.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter

import torch

from tests.conformance.run import SAMPLES, WRONG, Conformance
from tests.conformance.table import table
from tests.conformance.torch_samples import entries
from tests.coverage_page import left_alone, put
from tests.results import Results
from tests.table_command import command, in_time


def main() -> int:
    parser = command("tests.conformance", __doc__, "entries")
    parser.add_argument("--only", default="", help="entries, joined by commas")
    parser.add_argument("--sample", type=int, default=0, help="so many entries at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=SAMPLES, help="sample calls of an entry")
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
    conformance = Conformance()
    for number, (place, name) in enumerate(in_time(work, arguments.limit_seconds, "entries"), 1):
        row = rows[name] = conformance.run(name, everything[name], arguments.calls, arguments.seed)
        if number % 20 == 0:
            results.keep()
        why = "; ".join([*row["wrong"], *row["whole"], *row["reasons"]])
        print(f"{place} {name}: {row['status']}, {row['splits']} splits, {row['seconds']} s; {why}", flush=True)
    results.keep()
    if not left_alone(parser, arguments, len(set(everything) - set(rows))):
        put("conformance", table(rows, len(everything)))
    counts = Counter(row["status"] for row in rows.values())
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
