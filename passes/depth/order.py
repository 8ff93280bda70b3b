"""Sequence with a block's copies inserted, and the positions at which they come; each block may have several pieces.

    captured   x 0a 1a 2a 3a y 3b 2b 1b 0b z          pieces a in ascending order, pieces b in descending order (backward)
    grown      x 0a 1a +1a +2a 2a 3a y 3b 2b +2b +1b 1b 0b z

Copies of block 1 come between it and block 2. A piece is a run of block 1's items without members of other blocks between; items of no
block may be inside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def order_with_copies(
    items: Sequence[Item], blocks: Mapping[Item, int | None], partner: Mapping[Item, Item], copies: int
) -> Iterator[tuple[Item, int]]:
    """The sequence with copies: (item, 0) for each original, (item of block 1, d) for its d-th copy.

    partner   item of block 1 -> its equal in block 2
    """
    before: dict[Item, list[Item]] = {}
    behind: dict[Item, list[Item]] = {}
    for up, found in _ways(items, blocks, partner):
        if up:
            behind[found[-1]] = found
        else:
            before[found[0]] = found
    for item in items:
        if item in before:
            yield from ((one, number) for number in range(copies, 0, -1) for one in before[item])
        yield item, 0
        if item in behind:
            yield from ((one, number) for number in range(1, copies + 1) for one in behind[item])


def seams(items: Sequence[Item], blocks: Mapping[Item, int | None], partner: Mapping[Item, Item]) -> dict[Item, int]:
    """By item of block 1, the position in the sequence before which its copies come."""
    at = {item: place for place, item in enumerate(items)}
    return {item: at[found[-1]] + 1 if up else at[found[0]] for up, found in _ways(items, blocks, partner) for item in found}


def _ways(
    items: Sequence[Item], blocks: Mapping[Item, int | None], partner: Mapping[Item, Item]
) -> Iterator[tuple[bool, list[Item]]]:
    """The pieces of block 1, each with whether its copies come behind it."""
    at = {item: place for place, item in enumerate(items)}
    for piece in _pieces(items, blocks):
        for up, part in groupby(piece, lambda item: at[partner[item]] > at[item]):
            yield up, list(part)


def _pieces(items: Sequence[Item], blocks: Mapping[Item, int | None]) -> list[list[Item]]:
    """Runs of block 1's items without a member of another block between."""
    found: list[list[Item]] = []
    inside = False
    for item in items:
        block = blocks.get(item)
        if block == 1:
            if not inside:
                found.append([])
            found[-1].append(item)
        inside = block == 1 or (inside and block is None)
    return found
