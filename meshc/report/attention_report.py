"""Table of attention along a split sequence that is unbalanced or computes masked scores, with the cost.

    attention that is not balanced, or computes what its mask hides (one of them, in a call, forward and backward)
      attention    count    in           along    keys                why                                      does    takes    costs
      -----------  -------  -----------  -------  ------------------  ---------------------------------------  ------  -------  -------
      the model    1        model.py:15  cp       gathered, 134.2 MB  causal: the last rank looks at all keys  1.87 x  6.1 ms   2.8 ms

`does`: the busiest rank's scores over the mean of those needed. `docs/long-context.md` has remedies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from meshc.cost.devices import Device
from meshc.cost.divided_work import collapse_layers
from meshc.cost.uneven_attention import UnevenAttention, uneven_attention
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, seconds_text, table

HEADERS: Final = ["attention", "count", "in", "along", "keys", "why", "does", "takes", "costs"]
TITLE: Final = "attention that is not balanced, or computes what its mask hides (one of them, in a call, forward and backward)"


def attention_table(program: PlainProgram, device: Device) -> str:
    """The table; "" if all attention along a split sequence is balanced and computes no masked scores."""
    alike = Counter(replace(one, path=collapse_layers(one.path)) for one in uneven_attention(program, device))
    return table([_row(one, count) for one, count in alike.items()], HEADERS, TITLE) if alike else ""


def _row(one: UnevenAttention, count: int) -> list[str]:
    keys = f"gathered, {bytes_text(one.gathered)}" if one.gathered else "pass round"
    does = f"{one.most:.2f} x" if one.most else ""
    costs = f"{'' if one.most else 'at most '}{seconds_text(one.costs_s)}"
    return [one.path or "the model", str(count), one.place, ", ".join(one.axes), keys, one.why, does, seconds_text(one.takes_s), costs]
