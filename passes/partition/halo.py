"""Halo exchange: the window of a split dim that each rank's tile reads, and its transpose for backward.

    y = convolution(x, w), kernel 3, padding 1, rows over cp = 2      x_window = halo(x, ["cp"], 2, 16, [16, 1, -1, 10], 0.0)
                                                                      y = convolution(x_window, w), its padding 0 along rows

Where every rank holds its window at one offset in its tile (kernel 2, stride 2, sizes that divide), nothing is sent: a slice, and padding
for the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshc.ir.sizes import Size
from meshc.ir.window import overlaps, tile_bounds, tile_length, window_starts


@dataclass(frozen=True)
class HaloWindow:
    """Windows of a letter's tiles in a dim of `size`, both split over `axes` of sizes `counts`. `window`: (size of the letter, stride,
    offset, length)."""

    axes: tuple[str, ...]
    counts: tuple[int, ...]
    size: int
    window: tuple[int, int, int, int]

    @property
    def tile(self) -> int:
        return tile_length(self.size, self.counts)

    def window_offset(self) -> int | None:
        """Offset of the window in a rank's tile, if it is the same for all and no rank reads another's tile; else None.

        With dynamic sizes the offset is unknown: None.
        """
        if any(isinstance(number, Size) for number in (self.size, *self.window)):
            return None
        starts = window_starts(self.window, self.counts)
        places = {start - first for start, (first, _) in zip(starts, tile_bounds(self.size, self.counts), strict=True)}
        here = places.pop()
        fits = not places and here >= 0 and here + self.window[3] <= self.tile
        return here if fits and all(part.owner == part.reader for part in overlaps(self.size, self.counts, self.window)) else None
