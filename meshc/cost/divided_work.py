"""Division of the arithmetic of a program: the share of products, convolutions and attention that each mesh axis splits.

A program has its rows in `info["work"]` as JSON data, so that a program loaded from disk has them too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from meshc.program.program import PlainProgram, WorkRow

SPLIT: Final = "split"
COULD: Final = "could be split"
CANNOT: Final = "no legal split"


@dataclass(frozen=True)
class Work:
    """Equal operators of modules whose paths differ in the layer's number only.

    module    path, as `model.layers.*.mlp.up_proj`
    flops     flops of a call, of all ranks together if nothing is repeated
    by_axis   mesh axis -> SPLIT, COULD or CANNOT
    """

    module: str
    operator: str
    phase: str
    flops: float
    by_axis: dict[str, str]

    def __str__(self) -> str:
        return f"{self.operator} {self.phase} in {self.module or 'the model'}"

    def plain(self) -> WorkRow:
        """The row as JSON data."""
        return [self.module, self.operator, self.phase, self.flops, self.by_axis]


def work_rows(program: PlainProgram) -> list[Work] | None:
    """The rows of a program; None if it has none, as a program compiled by an earlier meshc."""
    rows = program.info.get("work")
    return None if rows is None else [Work(*cast(tuple[str, str, str, float, dict[str, str]], row)) for row in rows]


def share(rows: Sequence[Work], axis: str, *, legal: bool = False) -> float | None:
    """The share of the arithmetic that the axis splits; with `legal`, of the arithmetic with a legal split. None if there is none."""
    counted = [row for row in rows if not (legal and row.by_axis[axis] == CANNOT)]
    total = sum(row.flops for row in counted)
    return sum(row.flops for row in counted if row.by_axis[axis] == SPLIT) / total if total else None


def largest_whole(rows: Sequence[Work], axis: str, count: int = 3) -> list[Work]:
    """The `count` operators with most arithmetic that the axis does not split, largest first."""
    return sorted((row for row in rows if row.by_axis[axis] != SPLIT), key=lambda row: (-row.flops, row.module))[:count]


def collapse_layers(name: str) -> str:
    """`model.layers.*.mlp.0.weight`: one name for all members of the outermost list of modules."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1)
