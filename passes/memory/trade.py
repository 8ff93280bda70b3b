"""Trade-off between kept bytes and seconds of recomputing, or of copies to the host and back, value by value.

    seconds |  . least           A byte is given a price in seconds; what is cheapest then, keeping or recomputing, is one minimum
            |    . .             cut (`kept_values.py`), and lies on the lower hull of all choices. The price between two of the hull leads
            |      .      .      to one between them, until there is none. The line through both is below what any choice takes that keeps
            |__________.____ all  no more.
               bytes kept

A value that may lie on the host is kept there where its copies take less than its bytes are worth: in the cut the cheaper of the two is the
price of keeping it, so that it stays exact.

Everett, Operations Research 11(3), 1963. Equal layers would all change at one price: what is early in forward counts up to a fiftieth more,
so that they change one after another, the first of them first. The bound knows nothing of that.
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
"""How much more a byte of the first value of forward counts than one of the last."""

PRICES: Final = 40
"""Of which a byte is given one after another, at most."""


DEAR: Final = 1000.0
"""Times what all of it may take, at which bytes are all that counts, and seconds where they are alike."""


@dataclass(frozen=True)
class KeptValues:
    """
    nodes    what is kept;  there  those of them that lie on the host in between
    bytes    of what lies on the device;  weighed  the same, of which early ones count more
    again    what is recomputed for it
    seconds  of recomputing that, and of copies that nothing hides
    """

    nodes: frozenset[Node]
    there: frozenset[Node]
    bytes: int
    weighed: float
    again: tuple[Node, ...]
    seconds: float


class Trade:
    """Of what may be recomputed. `takes`: seconds of recomputing each value, of those that take any. `times`: how often a value is kept
    at once, where not once. `copies`: of what may lie on the host, the seconds of that."""

    def __init__(
        self,
        can: Recomputable,
        takes: Mapping[Node, float],
        times: Mapping[Node, int] | None = None,
        copies: Mapping[Node, float] | None = None,
    ) -> None:
        self.can, self.takes, self.copies = can, takes, copies or {}
        self._sizes = {node: _multiply(can.bytes_of(node), (times or {}).get(node, 1)) for node in can.forward}
        count = max(1, len(can.forward))
        self._weight = {node: 1 + EARLIER * (1 - turn / count) for turn, node in enumerate(can.forward)}

    @cached_property
    def keep_all(self) -> KeptValues:
        """Nothing is recomputed but what is never kept."""
        return self._kept_values(all_kept(self.can.operands, self._sizes.__getitem__, self.can.wanted))

    @cached_property
    def keep_least(self) -> KeptValues:
        """The fewest bytes."""
        here = {node: 0 if size is not None and node in self.copies else size for node, size in self._sizes.items()}
        return self._kept_values(least_kept(self.can.forward, self.can.operands, here.__getitem__, self.can.wanted), inf)

    def within(self, most: int) -> tuple[KeptValues, float]:
        """What takes fewest seconds of what was found to keep at most so many bytes, and the seconds below which nothing does. What keeps
        least, where nothing keeps so few."""
        low, high, price = self.keep_least, self.keep_all, 0.0
        if high.bytes <= most or low.bytes > most:
            return (high, high.seconds) if high.bytes <= most else (low, low.seconds)
        if self.copies and (dear := self._cheapest_at(DEAR * low.seconds / high.bytes)).bytes <= most:
            low = dear  # of what keeps least what takes least
        for _ in range(PRICES):
            price = max(0.0, low.seconds - high.seconds) / (high.weighed - low.weighed)
            between = self._cheapest_at(price)
            if between.bytes in (low.bytes, high.bytes):
                break
            low, high = (between, high) if between.bytes <= most else (low, between)
        even = self._cheapest_at(price, even=True)
        return low, max(0.0, even.seconds + price * (even.bytes - most))

    def worth(self, price: float) -> KeptValues:
        """What is cheapest where a byte is worth `price` seconds; equal layers alike."""
        return self._cheapest_at(price, even=True)

    def _cheapest_at(self, price: float, even: bool = False) -> KeptValues:
        """The cheapest at a price of a byte. `even`: an early one counts no more than a late one."""
        cost = {node: None if size is None else self._cost(node, size, price, even) for node, size in self._sizes.items()}
        return self._kept_values(cheapest_kept(self.can.forward, self.can.operands, cost, self.takes, self.can.wanted), price, even)

    def _cost(self, node: Node, size: int, price: float, even: bool) -> float:
        return min(price * size * (1 if even else self._weight[node]), self.copies.get(node, inf))

    def _kept_values(self, nodes: set[Node], price: float = 0.0, even: bool = False) -> KeptValues:
        """`price`: of a byte, by which what may lie on the host does."""
        asked = [node for node in self.can.wanted if node not in nodes]
        made = ancestors_of(asked, through=lambda node: node in self.can.operands and node not in nodes)
        again = tuple(node for node in self.can.forward if node in made and node not in nodes and node in self.can.operands)
        kept = [node for node in self.can.forward if node in nodes]  # sums of floats are those of one order
        there = {node: None for node in kept if self.copies.get(node) == self._cost(node, self._sizes[node] or 0, price, even)}
        sizes = {node: self._sizes[node] or 0 for node in kept if node not in there}
        weighed = sum(size * self._weight[node] for node, size in sizes.items())
        takes = sum(self.takes.get(node, 0.0) for node in again) + sum(self.copies[node] for node in there)
        return KeptValues(frozenset(nodes), frozenset(there), sum(sizes.values()), weighed, again, takes)


def _multiply(size: int | None, count: int) -> int | None:
    return None if size is None else size * count
