"""The table: what the ranks measured, with meshc's ratios to the peer of the same plan and mode."""

from __future__ import annotations

import json
import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

BAR = 1.03
"""meshc's step may take this much of its eager peer's."""

Row = dict[str, Any]

HEADERS = (
    *("model", "plan", "system", "mode", "step ms", "of peer", "cpu of peer", "of single", "peak MiB", "sent MiB", "loss error"),
    "note",
)
FORMATS = ("", "", "", "", ".1f", ".3f", ".3f", ".3f", ".1f", ".2f")


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def ratio(row: Row, base: Row | None, figure: str = "step_s") -> float | None:
    """The median over the interleaved rounds of row's figure over base's."""
    if base is None or row.get("problem") or base.get("problem"):
        return None
    return statistics.median(a / b for a, b in zip(row[figure], base[figure], strict=True))


def find(rows: list[Row], system: str, mode: str) -> Row | None:
    usual = (row for row in rows if row.get("fused", True) and row.get("remat") is None)
    return next((row for row in usual if (row["system"], row["mode"]) == (system, mode)), None)


def lines(results: list[dict[str, Any]]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for result in results:
        rows = result["rows"]
        for row in rows:
            line = [result["model"], result["plan"], row["title"], row["mode"]]
            if row.get("problem"):
                found.append([*line, *[None] * 7, row["problem"]])
                continue
            peer = find(rows, "peer", row["mode"]) if row["system"] == "meshc" else None
            line += [
                1e3 * statistics.median(row["step_s"]),
                ratio(row, peer),
                ratio(row, peer, "cpu_s"),
                ratio(row, rows[0]),
                row["peak_bytes_per_rank"] / 2**20,
                row["wire_bytes_per_rank"] / 2**20,
                f"{row['loss_error']:.0e}",
                ", ".join(beyond(row, rows)),
            ]
            found.append(line)
    return found


def table(results: list[dict[str, Any]], form: str = "simple") -> str:
    return tabulate(lines(results), HEADERS, tablefmt=form, floatfmt=FORMATS)


def beyond(row: Row, rows: list[Row]) -> list[str]:
    """In what a meshc row is beyond the bar, which is set by the eager peer of the same plan."""
    peer = find(rows, "peer", "eager")
    if row["system"] != "meshc" or peer is None or peer.get("problem"):
        return []
    found = []
    of_peer = ratio(row, peer)
    if of_peer is not None and of_peer > BAR:
        found.append(f"slower than {BAR} of the eager peer")
    if row["wire_bytes_per_rank"] > 1.001 * peer["wire_bytes_per_rank"] + 4096:  # the store's keys and heartbeats go over TCP too
        found.append("sends more bytes than the peer")
    return found


def write(results: list[dict[str, Any]], about: dict[str, Any], path: Path | None) -> int:
    """Keeps the table as `path`.md and `path`.json; 1 if a meshc row failed, was wrong, or is beyond the bar."""
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        text = table(results, "github")
        machine_text = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
        head = f"`{about['command']}`: {about['minutes']} minutes, {about['pairs']} interleaved pairs\n\n{machine_text}\n\n"
        path.with_suffix(".md").write_text(f"{head}{text}\n")
        path.with_suffix(".json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    judged = [(row, result["rows"]) for result in results for row in result["rows"] if row["system"] == "meshc"]
    return 1 if any(row.get("problem") or beyond(row, rows) for row, rows in judged) else 0
