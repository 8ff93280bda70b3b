"""Print how many of the valid placements on one axis our rules know, and how many DTensor's do, operator by operator.

    python -m tests.conformance.placements [--only add,mul] [--show dtensor] [--limit-seconds T] [--fresh]

What is valid, and what DTensor knows of it, is kept in out/placements.json, so a run that was stopped goes on where it was; what our rules
know is asked anew when the table is written or shown, in a minute or two.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from tests.conformance import dtensor
from tests.conformance.ours import placements
from tests.conformance.placements_table import table
from tests.conformance.refuted import REFUTED
from tests.conformance.torch_samples import entries
from tests.coverage_page import left_alone, put
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.operators import used

CALLS = 1
"""Calls of an entry whose placements are enumerated."""


def operators(entry: Any) -> list[dtensor.Operator]:
    """The entry's calls, the same ones each time."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return list(dtensor.operators(entry, CALLS))


def run(name: str, entry: Any) -> list[dict[str, Any]]:
    """A row for each call: the valid combinations, and those of them that DTensor knows. Neither depends on our rules."""
    found = []
    for operator in operators(entry):
        valid, theirs = dtensor.compare(operator)
        row = {"entry": name, "operator": str(operator.sample.op), "ranks": operator.ranks}
        found.append({**row, "valid": sorted(map(said, valid)), "dtensor": sorted(map(said, theirs))})
    return found


def ours(row: Mapping[str, Any], entry: Any) -> dict[str, Any]:
    """The row with the valid combinations that our rules know today, and without those that are refuted."""
    (operator,) = operators(entry)
    assert (str(operator.sample.op), operator.ranks) == (row["operator"], row["ranks"]), row["entry"]
    valid, theirs = ({found for found in row[key] if (row["operator"], found) not in REFUTED} for key in ("valid", "dtensor"))
    mine = valid & set(map(said, placements(operator.sample)))
    return {**row, "valid": sorted(valid), "dtensor": sorted(theirs), "meshc": sorted(mine)}


def said(combination: dtensor.Combination) -> str:
    """`P(sum), R -> P(sum)`."""
    given, made = combination
    return f"{', '.join(given)} -> {', '.join(made)}"


def main() -> int:
    parser = command("tests.conformance.placements", __doc__, "entries")
    parser.add_argument("--only", default="", help="entries, joined by commas")
    parser.add_argument("--show", choices=("valid", "dtensor"), help="print what our rules do not know of these")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtensor.start()
    everything = entries()
    results = Results("placements", arguments.fresh)
    rows: dict[str, list[dict[str, Any]]] = results.rows
    work = arguments.only.split(",") if arguments.only else [name for name in everything if name not in rows]
    for place, name in in_time(work, arguments.limit_seconds, "entries"):
        before = time.process_time()
        try:
            rows[name] = run(name, everything[name])
        except Exception as error:
            rows[name] = []
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        results.keep()
        for row in rows[name]:
            print(
                f"{place} {name}, {row['operator']}: {len(row['valid'])} valid, DTensor {len(row['dtensor'])}, "
                f"{time.process_time() - before:.1f} s",
                flush=True,
            )
    written = not left_alone(parser, arguments, len(set(everything) - set(rows)))
    if not written and not arguments.show:
        return 0
    known = [ours(row, everything[name]) for name, found in rows.items() for row in found]
    for row in known:
        if arguments.show and (missing := sorted(set(row[arguments.show]) - set(row["meshc"]))):
            print(f"{row['entry']}, {row['operator']}: {'; '.join(missing)}")
    if written:
        put("placements", table(known, used()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
