"""Cost of uneven attention along a split sequence: imbalance between ranks, and scores computed that a mask hides.

    a causal mask, four ranks in natural order, tiles of t     1/2 t t, 3/2 t t, 5/2 t t, 7/2 t t: of n ranks the last has (2 n - 1) / n
    positions (a kernel with b keys at once computes a         of the mean; at each step of a ring some ranks have a tile to compute
    triangle as t (t + b) / 2)                                 and the others wait, with the same total

    a window of w in blocks of w rows                                       2 w keys for each row, of which a query sees w
    a mask that is given as a tensor                                        at most all scores; hidden ones are not known in advance, and
                                                                         are skipped at run time on a CPU (`attention_masked_blocks.py`)

Seconds are those of the clock, which prices each call by the busiest rank (`roofline.py`), compared with an even division without hidden
scores. In zigzag order the two are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Final, cast

import torch
from torch.fx import Node

from meshc.cost.devices import Device
from meshc.cost.flops import flops, is_attention
from meshc.cost.peak_memory import runs
from meshc.cost.roofline import Price, price, scores_computed
from meshc.ir import has_record, local_bytes, record, records, spmd, value_of
from meshc.ir.keys import is_a
from meshc.ir.schemas import named_arguments
from meshc.ir.sharding import Sharding
from meshc.ops.attention import rows_that_see
from meshc.program.program import PlainProgram, Stage, sizes

LEARNED: Final = ("parameter", "state")
"""Kinds of inputs from which a bias that hides nothing may be computed."""


@dataclass(frozen=True)
class UnevenAttention:
    """One attention of the model, in one call: forward and backward.

    path, place   path of its module; the line of the model that calls it (`model.py:31`)
    axes          axes that split its queries
    gathered      bytes of gathered keys and values that a rank holds at a time; 0 for a ring, which passes blocks
    why           reasons for imbalance, or for computing hidden scores
    most          arithmetic of the busiest rank over an even share of that needed; 0 if it is not known what a mask hides
    takes_s       predicted seconds on the busiest rank, for which the others wait
    even_s        predicted seconds with an even division and no hidden scores; if a mask is not known, as if it hid everything
    """

    path: str
    place: str
    axes: tuple[str, ...]
    gathered: int
    why: str
    most: float
    takes_s: float
    even_s: float

    @property
    def costs_s(self) -> float:
        """Seconds lost to imbalance and hidden scores; an upper bound if it is not known what a mask hides."""
        return self.takes_s - self.even_s


@dataclass
class _Sum:
    """Sum over all calls that one attention was lowered to. Work is in seconds of multiplications and additions alone."""

    axes: tuple[str, ...] = ()
    gathered: int = 0
    whys: dict[str, None] = field(default_factory=dict)
    work_s: float = 0.0
    even_work_s: float = 0.0
    takes_s: float = 0.0
    even_s: float = 0.0


def uneven_attention(program: PlainProgram, device: Device) -> list[UnevenAttention]:
    """Attentions that are unbalanced or compute hidden scores, in the program's order."""
    often, found = runs(program), dict[tuple[str, str], _Sum]()
    for stage in program.stages.values():
        for node in stage.graph.nodes:
            if node.op != "call_function" or not is_attention(node):
                continue
            call = _Call(node, stage, sizes(program))
            if call.axes:
                source = records(node)[0].source
                place = str(replace(source, module=""))
                call.add_to(found.setdefault((source.module, place), _Sum()), device, often[stage.name])
    return [_row(*where, one) for where, one in found.items() if one.whys]


def _row(path: str, place: str, one: _Sum) -> UnevenAttention:
    most = one.work_s / one.even_work_s if one.whys.keys().isdisjoint((MASK, MASK_LOOKED_UP)) and one.even_work_s else 0.0
    return UnevenAttention(path, place, one.axes, one.gathered, ", ".join(one.whys), most, one.takes_s, one.even_s)


GATHERED: Final = "causal: the last rank looks at all keys"
IN_ORDER: Final = "causal, in natural order: each step is as long as the last rank's"
STAYING: Final = "causal: keys stay where they are, and later ones are seen less"
MASK: Final = "its mask is a tensor, and what that hides is computed"
MASK_LOOKED_UP: Final = "its mask is a tensor: how much a rank has to do is known when it is there"
"""Reason on a CPU, where kernels skip hidden blocks at run time."""


class _Call:
    """One call on a rank's tiles: attention to gathered keys, or to a block of them.

    axes   axes that split its queries; none if they are whole, or in zigzag order
    """

    def __init__(self, node: Node, stage: Stage, extents: Mapping[str, int]) -> None:
        self.node, self.stage, self.extents = node, stage, extents
        self.given = given = named_arguments(node)
        numbers = [given.get(name) for name in ("start", "first", "real")]
        self.ring = any(isinstance(number, Node) for number in numbers[1:])
        axes = dict.fromkeys(axis for number in numbers for axis in _axes_of(number))
        self.axes = () if "keys_of" in given else tuple(axes) or _query_axes(given["q"])

    def add_to(self, total: _Sum, device: Device, times: int) -> None:
        priced = price(self.node, device)
        takes_s, work_s, even_s, even_work_s = priced.seconds(), priced.work_s, priced.seconds(), priced.work_s
        if self.given["causal"]:
            computed, needed = self._scores(device.attention_keys)
            shares = [one / max(computed) for one in needed] if any(computed) else []
            if shares:
                even_work_s = work_s * sum(shares) / len(shares)
                even_s = sum(_at(priced, share) for share in shares) / len(shares)
            if even_work_s < work_s:
                total.whys[self._why()] = None
        elif isinstance(self.given["bias"], Node) and _hides(self.given["bias"], self.stage):
            total.whys[MASK_LOOKED_UP if device.host is None else MASK] = None
            even_s = _at(priced, 0.0)
        total.axes = total.axes or self.axes
        if not self.ring:
            total.gathered = max(total.gathered, sum(_bytes(self.given[name]) for name in ("k", "v")))
        total.work_s += times * work_s
        total.even_work_s += times * even_work_s
        total.takes_s += times * takes_s
        total.even_s += times * even_s

    def _why(self) -> str:
        if self.given["window"]:
            return f"a window of {self.given['window']:,}: its blocks are computed whole"
        if not self.ring:
            return GATHERED
        return IN_ORDER if any(_axes_of(self.given["start"])) else STAYING

    def _scores(self, block: int) -> tuple[list[float], list[float]]:
        """Scores of each rank along the axes, for one row and head: (computed, needed). Under a causal mask all computed scores count as
        needed, also those that a kernel computes in the blocks at the mask's edge."""
        queries, keys, window = record(self.given["q"]).shape[2], record(self.given["k"]).shape[2], self.given["window"]
        found = []
        for places in product(*(range(self.extents[axis]) for axis in self.axes)):
            at = dict(zip(self.axes, places, strict=True))
            start, first, real = (_number(self.given.get(name), at) for name in ("start", "first", "real"))
            begin = (start or 0) + self.given["offset"] - (first or 0)
            found.append(_scores(queries, window, block, begin, keys if real is None else real))
        return [one for one, _ in found], [one for _, one in found]


@cache
def _scores(queries: int, window: int, block: int, begin: int, real: int) -> tuple[float, float]:
    """(computed, needed) scores, with `real` keys that are not padding and the first query at key `begin`."""
    rows = rows_that_see(queries, real, window, begin)
    computed = scores_computed(rows.stop - rows.start, real, window, begin + rows.start, block)
    return computed, _visible_pairs(queries, real, window, begin) if window else computed


def _at(priced: Price, share: float) -> float:
    return replace(priced, work_s=priced.work_s * share).seconds()


def _visible_pairs(queries: int, keys: int, window: int, begin: int) -> int:
    """Number of pairs of a query at `begin`, `begin + 1`, ... and a key among the last `window` up to the query."""

    def up_to(end: int) -> int:
        """Sum over positions before `end` of the number of keys up to each."""
        inside = max(0, min(end, keys))
        return inside * (inside + 1) // 2 + max(0, end - keys) * keys

    return up_to(begin + queries) - up_to(begin) - up_to(begin + queries - window) + up_to(begin - window)


def _query_axes(queries: Node) -> tuple[str, ...]:
    """The axes that split the positions of queries [batch, heads, positions, head]."""
    producer, index = value_of(queries)
    lies: Sharding | None = records(producer)[index].sharding if has_record(producer) else None
    if lies is None or len(lies.dims) != 4:
        return ()
    return tuple(axis for part in lies.dims[2] if not part.order for axis in part.axes)


def _axes_of(number: object) -> Iterator[str]:
    if isinstance(number, Node) and number.target is spmd.coordinate:
        yield str(number.args[0])
    elif isinstance(number, Node):
        yield from (axis for one in number.all_input_nodes for axis in _axes_of(one))


def _number(number: object, at: Mapping[str, int]) -> int | None:
    """The value of a tile's number on the rank at coordinates `at`; None if the operator has none."""
    if not isinstance(number, Node):
        return cast(int | None, number)
    if number.target is spmd.coordinate:
        return at[str(number.args[0])]

    def evaluate(item: object) -> Any:
        return [evaluate(one) for one in item] if isinstance(item, list | tuple) else _number(item, at)

    return cast(int, number.target(*map(evaluate, number.args)))  # type: ignore[operator]


def _bytes(value: Node) -> int:
    producer, index = value_of(value)
    return local_bytes(records(producer)[index])


def _hides(bias: Node, stage: Stage) -> bool:
    """Whether a bias may hide keys: it is computed from booleans, or its origin is unknown. A bias by position alone, or a learned one,
    hides none."""
    keys, left, seen = stage.keys(), [bias], set[Node]()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and not is_a(keys[node], *LEARNED):
            return True
        if node.op != "call_function" or flops(node):
            continue
        kinds = [(one, _dtype(one)) for one in node.all_input_nodes]
        if any(dtype == torch.bool for _, dtype in kinds):
            return True
        left += [one for one, dtype in kinds if dtype is not None and dtype.is_floating_point]
    return False


def _dtype(value: Node) -> torch.dtype | None:
    producer, index = value_of(value)
    return records(producer)[index].dtype if has_record(producer) else None
