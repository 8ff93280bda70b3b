"""The section of docs/coverage.md on placements, beside DTensor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from tests.conformance import dtensor
from tests.conformance.refuted import REFUTED

Row = dict[str, Any]


def table(rows: Sequence[Row], used: Set[str]) -> str:
    """Totals, where we are behind, counts by operator. Rows hold `valid`, `dtensor`, `meshc`: lists of combinations; `used`: by the zoo."""
    return "\n".join([*_text(), *_totals(rows), *_behind(rows, used), *_operators(rows, used)]) + "\n"


def _text() -> list[str]:
    return [
        "## Placements, beside DTensor",
        "",
        "Written by `make placements` (`python -m tests.conformance.placements`).",
        "`torch.distributed.tensor._ops.strategy_validation` finds by trying which combinations of operands' and results' placements on",
        "one axis are valid: every rank runs the operator itself on its piece, with no communication. It is asked for one call in float32",
        "of each entry of torch's table: the first that has a dim to split and not more than",
        f"{dtensor.MOST_COMBINATIONS} combinations, on an axis of 2, 3 or 5, which divides most dims. A letter that a rule of ours lets",
        "an axis split is one combination, and so is each way in which operands may come in partial (`meshc/rules/partial.py`). What our",
        "rules know and a rank cannot do alone (an argmax or a log-softmax over a split dim, or any other `lower` with a collective in it,",
        "a dim that the axis does not divide, an inner factor of a dim) is not valid here and counts nothing.",
        "",
        "`P(avg)` has no word in a program of ours, which divides a sum at once. Of averages is counted what follows from what the rules",
        "state: that an operator which lets sums through in some operands together lets averages through in any of them, also beside a",
        "constant (`x + 1`); and that a mean over a split dim, each rank's sum divided by the global size, is the average of the ranks'",
        "means. What comes out whole on every rank is its own average, maximum and minimum: of `ones_like(x)`, whatever x is partial over,",
        "that is four combinations. The second row leaves out averages, the third what is so said again.",
        "",
        f"{len(REFUTED)} combinations that the trial finds valid are not, and count for nobody: `tests/conformance/refuted.py` has numbers",
        "for each.",
        "",
    ]


def _totals(rows: Sequence[Row]) -> list[str]:
    ahead = sum(len(row["meshc"]) > len(row["dtensor"]) for row in rows)
    behind = sum(len(row["meshc"]) < len(row["dtensor"]) for row in rows)
    lines = [
        f"{len(rows)} calls; ours know more in {ahead}, DTensor's in {behind}.", "",
        "| | valid | meshc knows | DTensor knows |", "|---|---|---|---|",
    ]  # fmt: skip
    kinds: tuple[tuple[str, Callable[[Row, str], bool]], ...] = (
        ("all", lambda row, said: True),
        ("without `P(avg)`", lambda row, said: "P(avg)" not in said),
        ("without what is said again of a whole result", lambda row, said: not _again(row, said)),
    )
    for name, counts in kinds:
        found = [sum(counts(row, said) for row in rows for said in row[key]) for key in ("valid", "meshc", "dtensor")]
        lines.append(f"| {name} | {' | '.join(f'{count:,}' for count in found)} |")
    return lines


def _again(row: Row, said: str) -> bool:
    """Whether the same operands are also known to give a result that is whole on every rank."""
    given, _, made = said.partition(" -> ")
    return "P" in made and f"{given} -> {', '.join('R' for _ in made.split(', '))}" in row["valid"]


def _name(row: Row) -> str:
    return str(row["operator"]).removesuffix(".default")


def _behind(rows: Sequence[Row], used: Set[str]) -> list[str]:
    """Operators of which DTensor knows a combination that we do not, whatever the counts; those that the zoo uses apart."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if missing := set(row["dtensor"]) - set(row["meshc"]):
            found.setdefault(_name(row), set()).update(missing)
    zoo = {name: missing for name, missing in found.items() if name in used}
    tried = {_name(row) for row in rows}
    lines = [
        "",
        f"Behind DTensor, by a combination that it knows and ours do not, on {len(found)} of {len(tried)} operators, of which the zoo uses "
        f"{len(zoo)}.",
        f"Of the {len(used)} operators of the zoo's graphs (`tests/zoo/operators.txt`, by `python -m tests.zoo.operators`)",
        f"{len(used & tried)} are among those tried.",
    ]
    lines += ["", *(f"- `{name}`: {'; '.join(sorted(missing))}" for name, missing in sorted(found.items()))] if found else []
    return lines


def _operators(rows: Sequence[Row], used: Set[str]) -> list[str]:
    counts: dict[str, list[int]] = {}
    for row in rows:
        entry = counts.setdefault(_name(row), [0, 0, 0])
        for place, key in enumerate(("valid", "meshc", "dtensor")):
            entry[place] += len(row[key])
    lines = ["", "| operator | in the zoo | valid | meshc | DTensor |", "|---|---|---|---|---|"]
    for name, entry in sorted(counts.items()):
        if entry[0]:
            lines.append(f"| {name} | {'yes' if name in used else ''} | {' | '.join(map(str, entry))} |")
    return lines
