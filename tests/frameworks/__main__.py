"""Run every row on two processes and write docs/ecosystem.md.

    python -m tests.frameworks [--only accelerate,peft] [--limit-seconds T] [--fresh]

Rows are kept in out/ecosystem.json, so a run that was stopped goes on where it was; those that have failed run again. `--only` runs its
libraries again in any case, and leaves the page alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.coverage_page import left_alone
from tests.frameworks.libraries import LIBRARIES
from tests.frameworks.rows import Row
from tests.frameworks.table import PAGE, import_rows, table
from tests.results import Results
from tests.runtime.launch import launch
from tests.table_command import command, in_time
from tests.zoo.libraries.stubs import put_stubs


def main() -> int:
    put_stubs()  # transformers, which rows import, looks for torchvision
    parser = command("tests.frameworks", __doc__, "rows")
    parser.add_argument("--only", default="", help="libraries, joined by commas")
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else []
    if unknown := sorted(set(only) - set(LIBRARIES)):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    results = Results("ecosystem", arguments.fresh)
    every = [(library, row) for library in LIBRARIES for row in import_rows(library)]
    wanted = [
        (library, row)
        for library, row in every
        if library in only or (not only and not results.rows.get(f"{library}.{row.name}", {}).get("ok"))
    ]
    work = list(dict.fromkeys((library, row.mesh) for library, row in wanted))
    for place, (library, mesh) in in_time(work, arguments.limit_seconds, "launches"):
        begin = time.monotonic()
        rows = [row for one, row in wanted if (one, row.mesh) == (library, mesh)]
        said = tried(library, rows)
        results.rows |= {f"{library}.{name}": {"ok": not text, "said": text} for name, text in said.items()}
        results.keep()
        print(f"{place} {library} on {mesh}, {len(rows)} rows ({time.monotonic() - begin:.1f} s)", flush=True)
        for row in rows:
            print(f"    {row.what}: {said[row.name] or row.outcome}", flush=True)
    missing = [1 for library, row in every if f"{library}.{row.name}" not in results.rows]
    missing += [1 for library in LIBRARIES if not import_rows(library)]
    if not left_alone(parser, arguments, len(missing), PAGE):
        PAGE.write_text(table(results.rows))
        print("docs/ecosystem.md is written")
    wrong = [row for row in results.rows.values() if not row["ok"]]
    print(f"{len(wrong)} rows are not as they say")
    return 1 if wrong else 0


def tried(library: str, rows: Sequence[Row]) -> dict[str, str]:
    """By row what went wrong with it on two ranks, in a line; "" if nothing did. All in one launch; those that fail there by themselves."""
    ended = launch(f"{LIBRARIES[library].module}:run", rows[0].mesh, *(row.name for row in rows), ranks=2, timeout_s=600)
    good = [row.name for row in rows if all(row.name in rank.out.splitlines() for rank in ended.ranks)]
    if len(rows) > 1:
        return {row.name: "" if row.name in good else tried(library, [row])[row.name] for row in rows}
    said = [line for rank in ended.ranks for line in rank.err.splitlines() if line and not line.startswith(" ")]
    wrong = "it hangs" if ended.timed_out else said[-1][:200] if said else f"exit code {ended.code}"
    return {rows[0].name: "" if ended.ok and good else wrong}


if __name__ == "__main__":
    sys.exit(main())
