"""What a run of `run.py` or `pipeline.py` has found out: kept case by case, a model and a plan each, and shown as one table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import beyond, machine, page, table

RESULTS = Path(__file__).resolve().parent / "results"

Case = tuple[str, str]


def run(
    cases: Sequence[Case], chosen: Sequence[Case], measure: Callable[[str, str], list[dict[str, Any]]], pairs: int, name: str | None,
    command: str, anew: bool,
) -> int:  # fmt: skip
    """Measures the `chosen` cases that are not in results/NAME.json yet, all of them if `anew`; `cases` says in what order the table has
    them. Without a name nothing is read or kept. 1 if a meshc row failed, was wrong, or is beyond a bar."""
    path = RESULTS / name if name else None
    kept = _read(path.with_suffix(".json")) if path is not None else {}
    for model, plan in chosen:
        if (model, plan) in kept and not anew:
            continue
        print(f"measuring {model}, {plan} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        rows = measure(model, plan)
        minutes = round((time.monotonic() - start) / 60, 1)
        kept[model, plan] = {"model": model, "plan": plan, "pairs": pairs, "minutes": minutes, "rows": rows}
        print(table([kept[model, plan]]), file=sys.stderr, flush=True)
        if path is not None:
            _write(path, [kept[case] for case in cases if case in kept], {"command": command, "machine": machine()})
    results = [kept[case] for case in cases if case in kept]
    print(table(results))
    judged = [(row, result["rows"]) for result in results for row in result["rows"] if row["system"] == "meshc"]
    return int(any(row.get("problem") or beyond(row, rows) for row, rows in judged))


def _read(path: Path) -> dict[Case, dict[str, Any]]:
    """What has been kept; of runs from before cases were kept one by one nothing."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())["results"]
    return {(result["model"], result["plan"]): result for result in found if "minutes" in result}


def _write(path: Path, results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(results, about))
