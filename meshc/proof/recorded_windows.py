"""Windows of split dims in a lowering that is recorded for a proof: halos, or slices of a tile that has them.

    x = halo(x, ["cp"], 2, 8, [8, 1, -1, 6], 0.0)        tiles of 4 rows with one of each neighbour's
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from meshc.ir import spmd
from meshc.ir.sizes import Size
from meshc.ir.window import overlaps, tile_bounds, tile_length
from meshc.proof.recorded_letters import RecordedLetters

aten = torch.ops.aten


class RecordedWindows(RecordedLetters):
    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        if (found := self._windows(letter)) is None:
            return x
        axes, size, tile, counts, window, here = found
        if here is None:
            return self.emit(spmd.halo, x, list(axes), dim, size, list(window), float(fill))
        if size != tile * len(tile_bounds(size, counts)):
            x = self.emit(spmd.mask, x, dim, self.count(self.rule.windows[letter][0]), float(fill))
        return x if window[3] == tile else self.emit(aten.slice.Tensor, x, dim, here, here + window[3])

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        if (found := self._windows(letter)) is None:
            return x
        axes, size, tile, _, window, here = found
        if here is None:
            return self.emit(spmd.halo_sum, x, list(axes), dim, size, list(window))
        after = tile - here - window[3]
        if not here and not after:
            return x
        return self.emit(aten.constant_pad_nd.default, x, [0, 0] * (len(self.shape(x)) - 1 - dim) + [here, after], 0)

    def window_start(self, letter: str) -> Node | int:
        start, stride = self.start(letter), self.rule.windows[letter][1].stride
        return start if stride == 1 or start == 0 else self.emit(spmd.tile_start, stride * 2, [2], [start])

    def _windows(self, letter: str) -> tuple[tuple[str, ...], int, int, tuple[int, ...], tuple[int, int, int, int], int | None] | None:
        """(axes, size, tile, counts, window, where a rank's window starts in its own tile if it is inside); None if nothing is split."""
        axes = self.axes(letter)
        if not axes:
            return None
        other, found = self.rule.windows[letter]
        counts, over = tuple(self.sizes[axis] for axis in axes), self.global_size(letter)
        window = (over, found.stride, found.offset, found.length(tile_length(over, counts)))
        size = self.global_size(other)
        return axes, size, tile_length(size, counts), counts, window, start_inside(window, size, counts)


def start_inside(window: tuple[int, int, int, int], size: int, counts: Sequence[int]) -> int | None:
    """Where every rank's window starts in its own tile, if all are inside at one place, and nobody reads what is beyond; else None. Of open
    sizes nobody knows."""
    if any(isinstance(number, Size) for number in (size, *window)):
        return None
    over, stride, offset, length = window
    tile = tile_length(size, counts)
    rows = list(zip(tile_bounds(over, counts), tile_bounds(size, counts), strict=False))
    found = {start * stride + offset - own for (start, _), (own, _) in rows}
    place = found.pop() if len(found) == 1 else None
    if place is None or place < 0 or place + length > tile:
        return None
    return place if all(part.owner == part.reader for part in overlaps(size, counts, window)) else None
