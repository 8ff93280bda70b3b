"""The zoo's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.zoo.run import MESHES, NAMES, first_line

Rows = Mapping[str, Mapping[str, Any]]


def table(rows: Rows) -> str:
    """The section: what was run, a row a family, then what failed, fell back or stayed whole."""
    known = [rows[key(name, mesh)] for name in NAMES for mesh in MESHES if key(name, mesh) in rows]
    good = [row for row in known if row["inference"] == row["training"] == "ok"]
    lines = [
        "## The zoo",
        "",
        "Written by `make zoo` (`python -m tests.zoo`): stock, unmodified `transformers` models from small random configurations, and",
        "plain torch ones, compiled for simulated meshes with no plan but the axes' roles, and compared in float64 with the model on one",
        "device: all outputs of an inference program; then of a training step with AdamW (eps 1e-6) its loss, every gradient, and all",
        "parameters after two steps. A cell that agrees in both is ok.",
        f"{len(good)} of {len(known)} cells that were run are ok.",
        "",
        "Shares are parts of the arithmetic (matrix products, convolutions, attention; forward and backward) of the training step whose",
        "operator `tp` splits on `tp=2`, of all and of that which has a legal split. Seconds are of one processor, for capture and all",
        "passes of the training step on `tp=2`.",
        "",
        f"| model | {' | '.join(MESHES)} | tp splits | of what it can | seconds |",
        f"|---|{'---|' * len(MESHES)}---|---|---|",
    ]
    for name in NAMES:
        cells = [rows.get(key(name, mesh)) for mesh in MESHES]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(map(_cell, cells))} | {_figures(cells[0])} |")
    return "\n".join([*lines, *_failures(known), *_whole(known), *_unsplit(rows)]) + "\n"


def key(name: str, mesh: str) -> str:
    return f"{name} {mesh}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    failed = [kind for kind in ("inference", "training") if row[kind] != "ok"]
    if failed and all(row[kind].startswith("CaptureError") for kind in failed):
        return f"{' and '.join(failed)} not traced"
    return f"{' and '.join(failed)} FAILED" if failed else "ok"


def _figures(row: Mapping[str, Any] | None) -> str:
    if row is None or "share" not in row:
        return " | ".join(["", "", ""])
    return f"{_percent(row['share']['tp'])} | {_percent(row['share_legal']['tp'])} | {row['seconds']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [
        f"- {row['name']} on `{row['mesh']}`, {kind}: {first_line(row[kind])}"
        for row in rows
        for kind in ("inference", "training")
        if row[kind] != "ok"
    ]
    return ["", "Cells that are not ok:", "", *found] if found else []


def _whole(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by_operator: dict[str, dict[str, None]] = {}
    for row in rows:
        for operator in row.get("whole", ()):
            by_operator.setdefault(operator, {})[row["name"]] = None
    found = [f"- `{operator}`: {', '.join(names)}" for operator, names in sorted(by_operator.items())]
    title = "Operators without a rule, which run whole on every rank:"
    return ["", title, "", *found] if found else ["", "No operator ran whole for want of a rule."]


def _unsplit(rows: Rows) -> list[str]:
    """What `tp` leaves whole in the families of which it splits less than 95 % of what it can."""
    found = []
    for name in NAMES:
        row = rows.get(key(name, MESHES[0]), {})
        share = row.get("share_legal", {}).get("tp")
        if share is not None and share < 0.95:
            found.append(f"- {name}: {'; '.join(row['largest_whole']['tp'])}")
    return ["", "Below 95 % on `tp=2`, and the largest that stay whole:", "", *found] if found else []
