"""The table: what the ranks measured, with meshc's ratios to the peer of the same plan and mode, and what is beyond a bar."""

from __future__ import annotations

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
    if base is None or row.get("problem") or base.get("problem") or not row[figure]:
        return None
    return statistics.median(a / b for a, b in zip(row[figure], base[figure], strict=True))


def find(rows: list[Row], system: str, mode: str) -> Row | None:
    """Of peers by hand the faster one."""
    usual = [row for row in rows if row.get("fused", True) and row.get("remat") is None and (system == "peer" or row.get("way") is None)]
    found = [row for row in usual if (row["system"], row["mode"]) == (system, mode)]
    timed = [row for row in found if row.get("step_s") and not row.get("problem")]
    return min(timed, key=lambda row: statistics.median(row["step_s"])) if timed else next(iter(found), None)


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
                1e3 * statistics.median(row["step_s"]) if row["step_s"] else None,
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
    """In what a meshc row is beyond the bars: step and bytes sent of the eager peer of the same plan, memory of that of the same mode."""
    eager, alike = find(rows, "peer", "eager"), find(rows, "peer", row["mode"])
    if row["system"] != "meshc":
        return []
    found = []
    if eager is not None and not eager.get("problem"):
        of_peer = ratio(row, eager)
        if of_peer is not None and of_peer > BAR:
            found.append(f"slower than {BAR} of the eager peer")
        if row["wire_bytes_per_rank"] > 1.001 * eager["wire_bytes_per_rank"] + 4096:  # the store's keys and heartbeats go over TCP too
            found.append("sends more bytes than the peer")
    if alike is not None and not alike.get("problem") and row["peak_bytes_per_rank"] > alike["peak_bytes_per_rank"]:
        found.append("holds more than the peer")
    return found


def page(results: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table with what it was measured on; `about` has the command and the machine."""
    machine_text = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    minutes = sum(result["minutes"] for result in results)
    pairs = " or ".join(str(pairs) for pairs in sorted({result["pairs"] for result in results}))
    head = f"`{about['command']}`: {minutes:.0f} minutes, {pairs} interleaved pairs a row\n\n{machine_text}\n\n"
    return f"{head}{table(results, 'github')}\n"
