"""Windows: the elements of one dim that each tile of another reads, and the overlaps that ranks have to exchange.

A convolution of kernel 3, stride 2, padding 1 over 7 elements gives 4: output t reads inputs 2t - 1 .. 2t + 1. Split over two ranks,

    outputs   | 0   1 | 2   3 |         tiles of 2
    inputs    | 0 1 2 3 | 4 5 6 |       tiles of 4
    windows   -1 .. 3   3 .. 7          of 5 elements: stride 2, offset -1

so rank 1 needs input 3 of rank 0. Windows have the same length on all ranks; they may overlap, leave gaps, reach beyond the ends and over
more than one neighbour. Their first elements follow from the other dim's tiles, whatever their sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshc.ir.sharding import tile_count, tile_sizes, tile_start


@dataclass(frozen=True)
class Window:
    """Positions [t, t + T) of one dim go with [t * stride + offset, (t + T - 1) * stride + offset + span) of another."""

    stride: int = 1
    offset: int = 0
    span: int = 1

    def length(self, tile: int) -> int:
        """How many elements go with `tile` positions."""
        return (tile - 1) * self.stride + self.span


@dataclass(frozen=True)
class Overlap:
    """`length` elements, from the global index `start` on, in the tile of one rank and in the window of another (or the same).

    Ranks are row-major indices over the axes that split both dims.
    """

    owner: int
    reader: int
    start: int
    length: int


def tile_bounds(size: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """(first index, number of real elements) of every rank's tile."""
    places = itertools.product(*(range(count) for count in counts))
    return [(tile_start(size, counts, place), tile_count(size, counts, place)) for place in places]


def window_starts(window: Sequence[int], counts: Sequence[int]) -> list[int]:
    """First index of every rank's window. `window` is (size of the other dim, stride, offset, length); it may be outside the dim."""
    size, stride, offset, _ = window
    return [start * stride + offset for start, _ in tile_bounds(size, counts)]


def overlaps(size: int, counts: Sequence[int], window: Sequence[int]) -> list[Overlap]:
    """Every part of a dim of `size` that a rank holds and a rank's window covers, by owner, then by reader."""
    found = []
    starts = window_starts(window, counts)
    for owner, (first, count) in enumerate(tile_bounds(size, counts)):
        for reader, start in enumerate(starts):
            low, high = max(first, start), min(first + count, start + window[3])
            if low < high:
                found.append(Overlap(owner, reader, low, high - low))
    return found


def received_elements(size: int, counts: Sequence[int], window: Sequence[int]) -> int:
    """Elements along the dim that a rank receives from others, for the rank that receives most."""
    totals: dict[int, int] = {}
    for part in overlaps(size, counts, window):
        if part.owner != part.reader:
            totals[part.reader] = totals.get(part.reader, 0) + part.length
    return max(totals.values(), default=0)


def tile_length(size: int, counts: Sequence[int]) -> int:
    """Padded length of every rank's tile."""
    return tile_sizes(size, counts)[-1]
