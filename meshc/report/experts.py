"""Table of predicted expert traffic and work, for even routing and for routing that favours one rank.

    experts of the rank with most, by how many times the mean that is (a layer, in one call)
      layers                      count    of    chosen    ranks    rows    at 2    at 4    bytes    at 2    at 4
      --------------------------  -------  ----  --------  -------  ------  ------  ------  -------  ------  ------
      model.layers.*.mlp.experts  2        16    2         4        1024    2048    4096    2.8 MB   4.8 MB  6.3 MB

and, if the experts are on several nodes, bytes of rows on each link, by the program's exchanges and by the formula (`docs/experts.md`):

    rows of experts, bytes of a rank on each link: by the program, and by formula both ways (a layer, in one call)
      layers                      count    nodes    rows go      within   between  at once: within  between  two hops: within  between
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from meshc.cost.divided_work import collapse_layers
from meshc.cost.expert_traffic import Traffic, traffic
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, table

IMBALANCES: Final = (2, 4)
BY_LINK: Final = ["layers", "count", "nodes", "rows go", "within", "between", "at once: within", "between", "two hops: within",
                  "between"]  # fmt: skip
LINKS: Final = "rows of experts, bytes of a rank on each link: by the program, and by formula both ways (a layer, in one call)"
TITLE: Final = "experts of the rank with most, by how many times the mean that is (a layer, in one call)"


def expert_table(program: PlainProgram) -> str:
    """The table; "" if no axis splits experts."""
    alike = Counter(replace(one, path=collapse_layers(one.path)) for one in traffic(program))
    if not alike:
        return ""
    at = [f"at {times}" for times in IMBALANCES]
    headers = ["layers", "count", "of", "chosen", "ranks", "rows", *at, "bytes", *at]
    rows = table([_row(one, count) for one, count in alike.items()], headers, TITLE)
    by_link = [_links(one, count) for one, count in alike.items() if one.together and one.row]
    return rows if not by_link else rows + "\n\n" + table(by_link, BY_LINK, LINKS)


def _links(one: Traffic, count: int) -> list[str]:
    """Cells of bytes per link: by the program, then by the formulas."""
    way = "in two hops" if one.by_node else "at once"
    sent = [*one.links, *one.by_formula(False), *one.by_formula(True)]
    return [one.path, str(count), str(one.ranks // one.together), way, *map(bytes_text, sent)]


def _row(one: Traffic, count: int) -> list[str]:
    """Cells of a layer; imbalances that no routing can reach stay empty."""
    can = [times if times <= one.most else None for times in (1, *IMBALANCES)]
    rows = ["" if times is None else str(one.rows(times)) for times in can]
    sent = ["" if times is None else bytes_text(one.bytes(times)) for times in can]
    return [one.path, str(count), str(one.experts), str(one.chosen), str(one.ranks), *rows, *sent]
