"""Print how many of the valid placements on one axis our rules know, and how many DTensor's do, operator by operator.

    python -m tests.conformance.placements [--only add,mul] [--limit-seconds T] [--fresh]

Rows are kept in out/placements.json, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tests.conformance import dtensor
from tests.conformance.ours import placements
from tests.conformance.torch_samples import entries
from tests.coverage_page import put
from tests.results import Results

CALLS = 1
"""Calls of an entry whose placements are enumerated."""

Rows = Mapping[str, list[dict[str, Any]]]


def run(name: str, entry: Any) -> list[dict[str, Any]]:
    """A row for each call: counts of valid combinations, those known to DTensor and to us, with and without averages."""
    found = []
    torch.manual_seed(0)
    for operator in dtensor.operators(entry, CALLS):
        valid, theirs = dtensor.compare(operator)
        mine = valid & placements(operator.sample)
        row: dict[str, Any] = {"entry": name, "operator": str(operator.sample.op), "ranks": operator.ranks}
        for key, combinations in (("valid", valid), ("dtensor", theirs), ("meshc", mine)):
            row[key] = len(combinations)
            row[f"{key}_without_averages"] = sum("P(avg)" not in given + made for given, made in combinations)
        row["only_dtensor"] = [f"{', '.join(given)} -> {', '.join(made)}" for given, made in sorted(theirs - mine)]
        found.append(row)
    return found


def table(rows: Rows) -> str:
    """The section of docs/coverage.md."""
    every = [row for found in rows.values() for row in found]
    totals = {key: sum(row[key] for row in every) for key in every[0] if isinstance(every[0][key], int)} if every else {}
    ahead = sum(row["meshc"] > row["dtensor"] for row in every)
    behind = sum(row["meshc"] < row["dtensor"] for row in every)
    lines = [
        "## Placements, beside DTensor",
        "",
        "Written by `make placements` (`python -m tests.conformance.placements`).",
        "`torch.distributed.tensor._ops.strategy_validation` finds by trying which combinations of operands' and results' placements on",
        "one axis are valid: every rank runs the operator itself on its piece, with no communication. It is asked for one call in float32",
        "of each entry of torch's table: the first that has a dim to split and not more than",
        f"{dtensor.MOST_COMBINATIONS} combinations, on an axis of 2, 3 or 5, which divides most dims. A letter that a rule of ours lets",
        "an axis split is one combination, and so is each way in which operands may come in pending (`passes/rules/riding.py`). What our",
        "rules know and a rank cannot do alone (an argmax or a log-softmax over a split dim, or any other `lower` with a collective in it,",
        "a dim that the axis does not divide, an inner factor of a dim) is not valid here and counts nothing. `P(avg)` has no word in",
        "meshc, which divides a sum at once; the second row leaves it out.",
        "",
        f"{len(every)} calls; ours know more in {ahead}, DTensor's in {behind}.",
        "",
        "| | valid | meshc knows | DTensor knows |",
        "|---|---|---|---|",
    ]
    for name, suffix in (("all", ""), ("without `P(avg)`", "_without_averages")):
        lines.append(f"| {name} | {' | '.join(f'{totals.get(key + suffix, 0):,}' for key in ('valid', 'meshc', 'dtensor'))} |")
    lines += ["", "| operator | valid | meshc | DTensor |", "|---|---|---|---|"]
    by_operator: dict[str, list[int]] = {}
    for row in every:
        counts = by_operator.setdefault(row["operator"].removesuffix(".default"), [0, 0, 0])
        for place, key in enumerate(("valid", "meshc", "dtensor")):
            counts[place] += row[key]
    lines += [f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} |" for name, counts in sorted(by_operator.items()) if counts[0]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.placements", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="entries, joined by commas")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no entry after so many seconds")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtensor.start()
    everything = entries()
    results = Results("placements", arguments.fresh)
    rows: dict[str, list[dict[str, Any]]] = results.rows
    work = arguments.only.split(",") if arguments.only else [name for name in everything if name not in rows]
    begin = time.monotonic()
    for number, name in enumerate(work, 1):
        if time.monotonic() - begin > arguments.limit_seconds:
            print(f"time is up: {len(work) - number + 1} entries left")
            break
        before = time.process_time()
        try:
            rows[name] = run(name, everything[name])
        except Exception as error:
            rows[name] = []
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        results.keep()
        for row in rows[name]:
            print(
                f"[{number}/{len(work)}] {name}, {row['operator']}: {row['valid']} valid, meshc {row['meshc']}, DTensor {row['dtensor']}, "
                f"{time.process_time() - before:.1f} s; only DTensor: {'; '.join(row['only_dtensor'])}",
                flush=True,
            )
    put("placements", table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
