"""Candidate cuts between the operators of a microbatch: the bytes each cut sends, and the seconds of the stages between cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from torch.fx import Node

from meshc.cost.links import link_of, send_seconds
from meshc.ir import KEY, is_getitem, local_bytes, record
from meshc.ir.used_rows_dims import dim_of
from meshc.passes.stages.balance import Numbers
from meshc.passes.stages.operator_prices import HALVES, Prices
from meshc.passes.stages.stage_assignment import Kinds
from meshc.pipelining.schedule import chain
from meshc.pipelining.timing import Costs

MOST_PLACES: Final = 400
"""Candidate places of cuts at most: those where least would be sent. On pp=4 T5 of 4 layers (490) is 31 % slower with 200; Llama of 16 with
all its 1,055 is 1.6 % faster, for 0.4 CPU seconds more a search, which grow with their square."""

WHOLE: Final = "B"
"""A backward in one piece."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the stages between any two positions in one half.

    before  seconds of the operators before each position
    twice   of nodes that each reading stage computes: (first reader, next reader, seconds), which a stage with both saves once
    _known  seconds by both ends, as cuts are moved one by one
    """

    before: Numbers
    twice: tuple[Numbers, Numbers, Numbers]
    _known: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)

    def between(self, first: int, last: int) -> float:
        if (first, last) not in self._known:
            one, other, seconds = self.twice
            inside = seconds[(one >= first) & (other < last)].sum()
            self._known[first, last] = float(self.before[last] - self.before[first] - inside)
        return self._known[first, last]

    def table(self, points: Numbers) -> Numbers:
        """Seconds of the stage between any two of `points`, which ascend, as a table."""
        one, other, seconds = self.twice
        inside = np.zeros((len(points) + 1, len(points) + 1))
        # a stage from point i to point j has both readers if i is no later than the first and j is behind the second
        np.add.at(inside, (np.searchsorted(points, one, "right") - 1, np.searchsorted(points, other, "right")), seconds)
        paid = inside[::-1].cumsum(0)[::-1].cumsum(1)[:-1, :-1]
        at = self.before[points.astype(int)]
        return at[None, :] - at[:, None] - paid


@dataclass(frozen=True)
class StageWork:
    """Seconds of stages and messages, for one number of microbatches.

    points  positions: the beginning, those of candidate cuts, the end
    halves  seconds of F, I and W; of B, a backward in one piece
    send_s  seconds of the messages of a cut before each position, one way
    """

    points: tuple[int, ...]
    halves: Mapping[str, StageSeconds]
    send_s: Sequence[float]

    def costs(self, cuts: Sequence[int]) -> Costs:
        """Seconds of each stage's halves, and of the messages between stages, as if stages were a chain."""
        stages = list(pairwise([0, *cuts, self.points[-1]]))
        table = {(op, stage): half.between(*ends) for op, half in self.halves.items() for stage, ends in enumerate(stages)}
        return Costs(table, {link: self.send_s[cuts[min(link.source, link.target)]] for link in chain(len(stages))})

    @cached_property
    def sends(self) -> Numbers:
        """`send_s` at each point; 0 at both ends."""
        return np.array([0.0, *(self.send_s[point] for point in self.points[1:-1]), 0.0])

    def messages_s(self, cuts: Sequence[int]) -> float:
        """Seconds of the messages of a microbatch, one way."""
        return sum(self.send_s[cut] for cut in cuts)

    def seconds(self, halved: bool) -> Numbers:
        """Seconds of the stage between any two points, as a table. `halved`: with backward in two halves."""
        ops, points = HALVES if halved else ("F", WHOLE), np.array(self.points)
        tables = (self.halves[op].table(points) for op in ops if op in self.halves)
        return sum(tables, np.zeros((len(points), len(points))))


class CutPlaces:
    """Candidate cuts of a microbatch, and the seconds of stages for any number of microbatches."""

    def __init__(self, prices: Prices, found: Kinds) -> None:
        self.prices, self.order = prices, found.forward
        self.trains = bool(found.backward)
        # (bytes, number) of the values that are sent
        sent = (_sent_bytes, lambda node: _sent_bytes(node) > 0)
        self._crossing = list(zip(*(_crossing(self.order, weight_of) for weight_of in sent), strict=True))
        inside = _crossing(self.order, lambda node: dim_of(node) is not None)  # used rows are not sent to another rank
        places = [i for i in range(1, len(self.order)) if not is_getitem(self.order[i]) and not inside[i]]
        if len(places) > MOST_PLACES:
            places = sorted(sorted(places, key=lambda i: (*self._crossing[i], i))[:MOST_PLACES])
        self.points = (0, *places, len(self.order))

    def work(self, microbatches: int, times: float = 1.0) -> StageWork:
        """The seconds of stages. `times`: rows of a microbatch, relative to the microbatch of this graph."""
        prices = self.prices
        plain, halved = prices.played_seconds(times, False), prices.played_seconds(times, True)
        into = prices.accumulation_seconds(microbatches, times)
        parts: dict[str, tuple[Sequence[str], Mapping[Node, float]]] = {"F": (("F",), plain)}
        if self.trains:
            parts = {op: ((op,), halved) for op in HALVES} | parts | {WHOLE: (HALVES[1:], plain)}
        halves = {op: self._stage_seconds(ops, takes, into) for op, (ops, takes) in parts.items()}
        wire = link_of(prices.mesh, [prices.axis], prices.device)
        send_s = [
            max(0, count - 1) * wire.latency_s + send_seconds(times * size, wire) if count else 0.0 for size, count in self._crossing
        ]
        return StageWork(self.points, halves, send_s)

    def _stage_seconds(self, ops: Sequence[str], takes: Mapping[Node, float], into: Sequence[tuple[Node, float]]) -> StageSeconds:
        prices = self.prices
        own = np.zeros(len(self.order))
        pairs: list[tuple[int, int, float]] = []
        for node, seconds in (*((node, takes.get(node, 0.0)) for node in prices.half), *into):
            if prices.half[node] in ops:
                own[prices.at[node]] += seconds
        for shared in prices.shared:
            readers = sorted({place for op in ops for place in shared.readers.get(op, ())})
            for place in readers:
                own[place] += takes[shared.node]
            pairs += [(a, b, takes[shared.node]) for a, b in pairwise(readers)]
        columns = np.array(pairs, dtype=float).reshape(-1, 3)
        return StageSeconds(np.array([0.0, *np.cumsum(own)]), (columns[:, 0], columns[:, 1], columns[:, 2]))


def _sent_bytes(node: Node) -> int:
    """Bytes of a value that a cut sends; of several results each is sent by itself."""
    return 0 if isinstance(node.meta[KEY], tuple) else local_bytes(record(node))


def _crossing(order: Sequence[Node], weight_of: Callable[[Node], int]) -> list[int]:
    """Weight of the values that a cut before each position sends forward: computed before the cut and read behind it."""
    position = {node: i for i, node in enumerate(order)}
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        weight = weight_of(node)
        change[i + 1] += weight
        change[max((position[user] for user in node.users if user in position), default=i) + 1] -= weight
    return list(accumulate(change))
