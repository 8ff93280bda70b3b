"""Run the zoo and write its table.

    python -m tests.zoo [--only llama,gpt2] [--mesh tp=2] [--limit-seconds T] [--fresh]

Rows are kept in out/zoo.json, so a run that was stopped goes on where it was; cells that are not ok run again. `--only` runs its families
again in any case. A run that is told to leave something out leaves the table alone.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from tests.coverage_page import left_alone, put
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.run import MESHES, NAMES, first_line, run
from tests.zoo.table import key, table


def is_ok(row: dict[str, Any] | None) -> bool:
    return row is not None and row["inference"] == row["training"] == "ok"


def main() -> int:
    parser = command("tests.zoo", __doc__)
    parser.add_argument("--only", default="", help="families, joined by commas")
    parser.add_argument("--mesh", default="", help="one mesh of the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    only = arguments.only.split(",") if arguments.only else []
    unknown = sorted(set(only) - set(NAMES))
    if unknown:
        parser.error(f"the zoo has no {', '.join(unknown)}; it has {', '.join(NAMES)}")
    results = Results("zoo", arguments.fresh)
    rows = results.rows
    wanted = [(name, mesh) for name in only or NAMES for mesh in MESHES if arguments.mesh in ("", mesh)]
    work = [cell for cell in wanted if only or not is_ok(rows.get(key(*cell)))]
    failures = 0
    for place, (name, mesh) in in_time(work, arguments.limit_seconds):
        before = time.process_time()
        row = rows[key(name, mesh)] = run(name, mesh)
        results.keep()
        failures += not is_ok(row)
        print(f"{place} {told(row)} ({time.process_time() - before:.1f} s)", flush=True)
    missing = [cell for cell in ((name, mesh) for name in NAMES for mesh in MESHES) if key(*cell) not in rows]
    if not left_alone(parser, arguments, len(missing)):
        put("zoo", table(rows))
        print("docs/coverage.md is written")
    print(f"{failures} cells are not ok")
    return 1 if failures else 0


def told(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{axis} splits {100 * (share or 0):.0f} %" for axis, share in row.get("share_legal", {}).items())
    kinds = ", ".join(f"{kind} {row[kind] if row[kind] == 'ok' else first_line(row[kind])}" for kind in ("inference", "training"))
    whole = f"; without a rule: {', '.join(row['whole'])}" if row.get("whole") else ""
    return f"{row['name']} {row['mesh']}: {kinds}; {shares}{whole}"


if __name__ == "__main__":
    sys.exit(main())
