"""The section of docs/coverage.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.conformance.run import EXACT, MOST_PAIRS, REFUSED, REPLICATED, SAMPLES, UNCAPTURABLE, WRONG

MEANING = {
    EXACT: "every node of the call and of its gradient has a rule, and every split that the rules allow gives what the operator gives",
    REPLICATED: "some node has no rule and runs whole on every rank; the others are exact",
    REFUSED: "some node is of an operator that saved programs do not hold; the others are exact",
    UNCAPTURABLE: "the call has no graph of fixed shapes, or draws",
    WRONG: "a split changes the result",
}


def table(rows: Mapping[str, Mapping[str, Any]], entries: int) -> str:
    """Totals, then whatever is not exact, with its reason."""
    splits, nodes = (sum(row[key] for row in rows.values()) for key in ("splits", "nodes"))
    lines = [
        "## Conformance",
        "",
        "Written by `make conformance` (`python -m tests.conformance`): for each entry of torch's own table of operators with sample",
        f"inputs (`op_db`) its first {SAMPLES} sample calls (those in float64 where it has that) are traced with their gradients, as a",
        "model's step is; for every ATen node, on the values that it gets there, each factor that its rule lets an axis split is split on",
        f"axes of 2 and of 3, and two of them on both ({MOST_PAIRS} such pairs at most); the ranks run, padding holds NaN, and what they",
        "give together is compared with what the operator gives. Nodes that differ in nothing but values are proved once.",
        "",
        f"{len(rows)} of {entries} entries were tried: {nodes:,} nodes, {splits:,} splits.",
        "",
        "| | entries | |",
        "|---|---|---|",
        *(f"| {status} | {sum(row['status'] == status for row in rows.values())} | {why} |" for status, why in MEANING.items()),
    ]
    by_operator: dict[str, list[str]] = {}
    for row in rows.values():
        for operator in row["whole"]:
            by_operator.setdefault(operator, []).append(row["name"])
    found = [f"- `{operator}`: {_some(names)}" for operator, names in sorted(by_operator.items())]
    lines += ["", "Operators without a rule, and entries that lead to them:", "", *found] if found else []
    for status, title in ((REFUSED, "Refused"), (UNCAPTURABLE, "Not capturable")):
        by_reason: dict[str, list[str]] = {}
        for row in rows.values():
            if row["status"] == status:
                by_reason.setdefault(row["reasons"][0], []).append(row["name"])
        found = [f"- {_some(names)}: {reason}" for reason, names in sorted(by_reason.items())]
        lines += ["", f"{title}:", "", *found] if found else []
    found = [f"- {row['name']}: {reason}" for row in rows.values() for reason in row["wrong"]]
    lines += ["", "Wrong:", "", *found] if found else []
    return "\n".join(lines) + "\n"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
