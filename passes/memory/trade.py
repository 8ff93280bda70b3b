"""Choice of values to keep, recompute or copy to the host: the fastest within given bytes, and a lower bound of its seconds.

    seconds |  . least           A byte is given a price in seconds; the cheapest choice of keeping or recomputing at that price is one
            |    . .             minimum cut (`kept_values.py`), and is on the lower hull of all choices. The price between two choices of
            |      .      .      the hull leads to one between them, until there is none. The line through both is a lower bound of the
            |__________.____ all seconds of any choice that keeps no more.
               bytes kept

A value that may be on the host is kept there if its copies take less than its bytes are worth: in the cut the smaller of both is the price
of keeping it, so that the cut stays exact.

Everett, Operations Research 11(3), 1963. Equal layers would all change at one price: bytes early in forward count up to a fiftieth more, so
that layers change one after another, the first of them first. The bound does not count them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

from torch.fx import Node

from meshc.ir.graph import ancestors_of
from meshc.passes.memory.kept_values import all_kept, cheapest_kept, least_kept
from meshc.passes.memory.recomputable import Recomputable

EARLIER: Final = 0.02
"""How much more a byte of the first value of forward counts than one of the last, so that equal layers change one after another.
(In 0.6 of their bytes Llama of 6 layers is 7 % slower without it, T5 of 3 layers 2 %; with 0.04 Llama as fast, T5 0.2 % slower.)"""


@dataclass(frozen=True)
class KeptValues:
    """
    nodes    kept values;  there  those of them that are on the host in between
    bytes    of those on the device;  weighed  the same, of which early ones count more
    again    values that are recomputed
    seconds  of recompute, and of copies that nothing hides
    """

    nodes: frozenset[Node]
    there: frozenset[Node]
    bytes: int
    weighed: float
    again: tuple[Node, ...]
    seconds: float


class Trade:
    """Trade of recomputable values. `takes`: seconds of recomputing each value, if any; `times`: how many times a value is kept at once, if
    not once; `copies`: seconds of the copies of values that may be on the host."""

    def __init__(
        self,
        can: Recomputable,
        takes: Mapping[Node, float],
        times: Mapping[Node, int] | None = None,
        copies: Mapping[Node, float] | None = None,
    ) -> None:
        self.can, self.takes, self.copies = can, takes, copies or {}
        several = times or {}
        self._sizes = {
            node: None if (size := can.bytes_of(node)) is None else size * several.get(node, 1) for node in can.forward
        }
        count = max(1, len(can.forward))
        self._weight = {node: 1 + EARLIER * (1 - turn / count) for turn, node in enumerate(can.forward)}

    @cached_property
    def keep_all(self) -> KeptValues:
        """The choice that recomputes only values that are never kept."""
        return self._kept_values(all_kept(self.can.operands, self._sizes.__getitem__, self.can.wanted))

    @cached_property
    def keep_least(self) -> KeptValues:
        """The choice of the fewest bytes."""
        here = {node: 0 if size is not None and node in self.copies else size for node, size in self._sizes.items()}
        return self._kept_values(least_kept(self.can.forward, self.can.operands, here.__getitem__, self.can.wanted), inf)

    def within(self, most: int) -> tuple[KeptValues, float]:
        """The fastest found choice that keeps at most `most` bytes, and a lower bound of the seconds of any; the choice that keeps least,
        if none keeps so few."""
        low, high, price = self.keep_least, self.keep_all, 0.0
        if high.bytes <= most or low.bytes > most:
            return (high, high.seconds) if high.bytes <= most else (low, low.seconds)
        while True:
            price = max(0.0, low.seconds - high.seconds) / (high.weighed - low.weighed)
            between = self.cheapest_at(price)
            if between.bytes <= most and between.seconds < low.seconds:
                low = between
            elif most < between.bytes < high.bytes:
                high = between
            else:
                break
        even = self.cheapest_at(price, even=True)
        return low, max(0.0, even.seconds + price * (even.bytes - most))

    def cheapest_at(self, price: float, even: bool = False) -> KeptValues:
        """The cheapest choice where a byte is worth `price` seconds. `even`: early bytes count no more than late ones."""
        cost = {node: None if size is None else self._cost(node, size, price, even) for node, size in self._sizes.items()}
        return self._kept_values(cheapest_kept(self.can.forward, self.can.operands, cost, self.takes, self.can.wanted), price, even)

    def _cost(self, node: Node, size: int, price: float, even: bool) -> float:
        return min(price * size * (1 if even else self._weight[node]), self.copies.get(node, inf))

    def _kept_values(self, nodes: set[Node], price: float = 0.0, even: bool = False) -> KeptValues:
        """The choice that keeps `nodes`. `price`: of a byte, which decides what is kept on the host."""
        asked = [node for node in self.can.wanted if node not in nodes]
        made = ancestors_of(asked, through=lambda node: node in self.can.operands and node not in nodes)
        again = tuple(node for node in self.can.forward if node in made and node not in nodes and node in self.can.operands)
        kept = [node for node in self.can.forward if node in nodes]  # floats are added in one order
        there = {node: None for node in kept if self.copies.get(node) == self._cost(node, self._sizes[node] or 0, price, even)}
        sizes = {node: self._sizes[node] or 0 for node in kept if node not in there}
        weighed = sum(size * self._weight[node] for node, size in sizes.items())
        takes = sum(self.takes.get(node, 0.0) for node in again) + sum(self.copies[node] for node in there)
        return KeptValues(frozenset(nodes), frozenset(there), sum(sizes.values()), weighed, again, takes)


