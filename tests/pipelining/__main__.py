"""Run the pipelines' table: every schedule with every model on every mesh, simulated, against the model on one device.

    python -m tests.pipelining [--only llama,gpt2] [--schedule 1f1b] [--limit-seconds T] [--fresh]
    python -m tests.pipelining --torchrun [--fresh]                 ten of the cells on processes, with a table of their own

Cells are kept in out/pipelines.json (out/pipelines-processes.json), so a run that was stopped goes on where it was; cells that are not ok
run again. The table is written to docs/pipelines.md once there is a row for every cell.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from tests.coverage_page import PAGE, left_alone, put
from tests.pipelining import processes
from tests.pipelining.cells import FAMILIES, MESHES, MICROBATCHES, SCHEDULES, STEPS, verify
from tests.results import Results
from tests.table_command import command, in_time


def key(family: str, schedule: str, mesh: str) -> str:
    return f"{family} {schedule} {mesh}"


def run(family: str, schedule: str, mesh: str) -> dict[str, Any]:
    """A row: the largest error, or what went wrong."""
    try:
        return {"ok": True, "worst": verify(family, schedule, mesh).worst}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The section of docs/pipelines.md."""
    good = sum(row["ok"] for row in rows.values())
    lines = [
        "## What was compared",
        "",
        "Written by `make pipelines` (`python -m tests.pipelining`): a training step with AdamW, clipping and",
        f"{MICROBATCHES} microbatches, on simulated ranks in float64, against the model on one device: loss, every gradient, then losses",
        f"and all parameters over {STEPS} steps. {good} of {len(rows)} cells agree. A cell is the largest error over all schedules",
        f"({', '.join(SCHEDULES)}).",
        "",
        f"| model | {' | '.join(f'`{mesh}`' for mesh in MESHES)} |",
        "|---|" + "---|" * len(MESHES),
    ]
    for family in FAMILIES:
        cells = []
        for mesh in MESHES:
            found = [rows[key(family, schedule, mesh)] for schedule in SCHEDULES]
            wrong = [schedule for schedule, row in zip(SCHEDULES, found, strict=True) if not row["ok"]]
            cells.append(f"not ok: {', '.join(wrong)}" if wrong else f"{max(row['worst'] for row in found):.0e}")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    faults = [f"- {name}: {row['error']}" for name, row in rows.items() if not row["ok"]]
    return "\n".join([*lines, *(["", *faults] if faults else [])]) + "\n"


def main() -> int:
    parser = command("tests.pipelining", __doc__)
    parser.add_argument("--only", default="", help="models, joined by commas")
    parser.add_argument("--schedule", default="", help="one schedule")
    parser.add_argument("--torchrun", action="store_true", help="ten cells on processes")
    arguments = parser.parse_args()
    if arguments.torchrun:
        return processes.run(arguments.fresh)
    warnings.simplefilter("ignore")
    results = Results("pipelines", arguments.fresh)
    rows = results.rows
    every = list(itertools.product(FAMILIES, SCHEDULES, MESHES))
    chosen = [
        cell
        for cell in every
        if (not arguments.only or cell[0] in arguments.only.split(",")) and arguments.schedule in ("", cell[1])
    ]
    work = [cell for cell in chosen if not rows.get(key(*cell), {}).get("ok")]
    for place, cell in in_time(work, arguments.limit_seconds):
        before = time.process_time()
        row = rows[key(*cell)] = run(*cell)
        results.keep()
        said = f"{row['worst']:.1e}" if row["ok"] else row["error"]
        print(f"{place} {key(*cell)}: {said} ({time.process_time() - before:.1f} s)", flush=True)
    missing = [cell for cell in every if key(*cell) not in rows]
    page = PAGE.with_name("pipelines.md")
    if not left_alone(parser, arguments, len(missing), page):
        put("pipelines", table(rows), page)
    return int(any(not rows[key(*cell)]["ok"] for cell in chosen if key(*cell) in rows))


if __name__ == "__main__":
    sys.exit(main())
