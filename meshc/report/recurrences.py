"""Table of recurrences and running sums along a split sequence: how steps run, and traffic by program and formula.

    steps along a split sequence, bytes of a rank forward and backward (a layer, in one call)
      layers    count    steps of    along    ranks    taken               forward    by formula    backward    by formula
      --------  -------  ----------  -------  -------  ------------------  ---------  ------------  ----------  ------------
      layer     1        rnn         cp       2        in 2 turns, 1 part  512 B      512 B         512 B       512 B

In a turn each rank that has a part of the rows runs one part. `docs/recurrences.md` has the formulas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from meshc.cost.divided_work import collapse_layers
from meshc.cost.recurrence_traffic import Recurrence, traffic
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, table

HEADERS: Final = ["layers", "count", "steps of", "along", "ranks", "taken", "forward", "by formula", "backward", "by formula"]
TITLE: Final = "steps along a split sequence, bytes of a rank forward and backward (a layer, in one call)"


def recurrence_table(program: PlainProgram) -> str:
    """The table; "" if no axis splits steps."""
    alike = Counter(replace(one, path=collapse_layers(one.path)) for one in traffic(program))
    return table([_row(one, count) for one, count in alike.items()], HEADERS, TITLE) if alike else ""


def _row(one: Recurrence, count: int) -> list[str]:
    taken = f"in {one.turns} turns, {one.parts} part{'s' * (one.parts > 1)}" if one.parts else "at once, joined"
    bytes = [bytes_text(size) for pair in zip(one.sent, one.formula, strict=True) for size in pair]
    return [one.path or "the model", str(count), one.kind, ", ".join(one.axes), str(one.ranks), taken, *bytes]
