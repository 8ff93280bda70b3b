"""What experts are predicted to be sent and to do, as a table: even, and where one rank has more than the others.

    experts of the rank with most, by how many times the mean that is (a layer, in one call)
      layers                      count    of    chosen    ranks    rows    at 2    at 4    bytes    at 2    at 4
      --------------------------  -------  ----  --------  -------  ------  ------  ------  -------  ------  ------
      model.layers.*.mlp.experts  2        16    2         4        1024    2048    4096    2.8 MB   4.8 MB  6.3 MB
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from meshc.cost.expert_traffic import Traffic, traffic
from meshc.cost.work import collapsed
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, table

IMBALANCES: Final = (2, 4)
TITLE: Final = "experts of the rank with most, by how many times the mean that is (a layer, in one call)"


def told(program: PlainProgram) -> str:
    """The table; nothing where no axis splits experts."""
    alike = Counter(replace(one, path=collapsed(one.path)) for one in traffic(program))
    if not alike:
        return ""
    at = [f"at {times}" for times in IMBALANCES]
    headers = ["layers", "count", "of", "chosen", "ranks", "rows", *at, "bytes", *at]
    return table([_row(one, count) for one, count in alike.items()], headers, TITLE)


def _row(one: Traffic, count: int) -> list[str]:
    """What no routing can come to is left out."""
    can = [times if times <= one.most else None for times in (1, *IMBALANCES)]
    rows = ["" if times is None else str(one.rows(times)) for times in can]
    sent = ["" if times is None else bytes_text(one.bytes(times)) for times in can]
    return [one.path, str(count), str(one.experts), str(one.chosen), str(one.ranks), *rows, *sent]
