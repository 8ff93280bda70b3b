"""Bytes against seconds: against all choices, on drawn graphs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain, combinations

import pytest
from torch.fx import Node

from meshc.passes.memory.recomputable import Recomputable
from meshc.passes.memory.trade import Trade
from tests.passes.memory.test_kept_values import drawn, serves


@dataclass(frozen=True)
class Drawn(Recomputable):
    sizes: dict[Node, int | None] = field(default_factory=dict)

    def bytes_of(self, node: Node) -> int | None:
        return self.sizes[node]


def trade(seed: int) -> tuple[Trade, list[tuple[int, float]]]:
    """And bytes and seconds of every choice that serves."""
    values, operands, sizes, wanted = drawn(seed)
    rng = random.Random(seed)
    takes = {node: rng.random() for node in operands if rng.random() < 0.8}
    found = Trade(Drawn(values, [], wanted, operands, set(), sizes), takes)
    can = [node for node in values if sizes[node] is not None]
    every = [set(some) for some in chain.from_iterable(combinations(can, count) for count in range(len(can) + 1))]
    all_of = [found._kept_values(some) for some in every if serves(some, operands, wanted)]
    return found, [(one.bytes, one.seconds) for one in all_of]


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_of_so_few_bytes_takes_less_than_the_bound(seed: int) -> None:
    found, every = trade(seed)
    least, whole = found.keep_least, found.keep_all
    assert least.bytes == min(size for size, _ in every)
    assert whole.seconds == pytest.approx(min(seconds for _, seconds in every))
    for most in range(least.bytes, whole.bytes + 1):
        kept, bound = found.within(most)
        best = min(seconds for size, seconds in every if size <= most)
        assert kept.bytes <= most and bound <= best * (1 + 1e-6) + 1e-9 and best <= kept.seconds * (1 + 1e-6) + 1e-9
    assert found.within(least.bytes - 1)[0].bytes == least.bytes


def test_a_choice_of_the_hull_is_found_and_is_the_best() -> None:
    """Of so many bytes as the choice itself keeps, nothing takes less: the gap is nothing."""
    met = 0
    for seed in range(25):
        found, every = trade(seed)
        for price in (0.01, 0.1, 1.0):
            on = found.cheapest_at(price, even=True)
            kept, bound = found.within(on.bytes)
            best = min(seconds for size, seconds in every if size <= on.bytes)
            assert best == pytest.approx(on.seconds, rel=1e-6, abs=1e-9)
            met += kept.seconds == pytest.approx(best, rel=1e-6, abs=1e-9) and bound == pytest.approx(best, rel=1e-3, abs=1e-6)
    assert met > 60


@pytest.mark.parametrize("seed", range(12))
def test_what_may_lie_on_the_host_is_weighed_with_the_rest(seed: int) -> None:
    """Against all choices of what is kept, and of what of that lies there."""
    found, _ = trade(seed)
    can, rng = found.can, random.Random(100 + seed)
    sizes = {node: can.bytes_of(node) or 0 for node in can.forward}
    copies = {node: 0.5 * rng.random() for node in can.forward if sizes[node] and rng.random() < 0.6}
    with_host = Trade(can, found.takes, copies=copies)
    every = []
    for some in (one for count in range(len(sizes) + 1) for one in combinations([n for n in can.forward if sizes[n]], count)):
        if serves(set(some), can.operands, can.wanted):
            plain = found._kept_values(set(some))
            may = [node for node in some if node in copies]
            for there in chain.from_iterable(combinations(may, count) for count in range(len(may) + 1)):
                every.append((plain.bytes - sum(sizes[n] for n in there), plain.seconds + sum(copies[n] for n in there)))
    least, whole = with_host.keep_least, with_host.keep_all
    assert least.bytes == min(size for size, _ in every) and not whole.there
    gained = False
    for most in range(least.bytes, whole.bytes + 1):
        kept, bound = with_host.within(most)
        best = min(seconds for size, seconds in every if size <= most)
        assert kept.bytes <= most and bound <= best * (1 + 1e-6) + 1e-9 and best <= kept.seconds * (1 + 1e-6) + 1e-9
        assert kept.there <= kept.nodes & copies.keys()
        gained = gained or bool(kept.there)
    assert gained or not copies
