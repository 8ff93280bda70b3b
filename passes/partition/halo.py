"""Halo exchange: the window of a split dim that each rank's tile reads, and its transpose for backward.

    y = convolution(x, w), kernel 3, padding 1, rows over cp = 2      x_window = halo(x, ["cp"], 2, 16, [16, 1, -1, 10], 0.0)
                                                                      y = convolution(x_window, w), its padding 0 along rows

Where every rank holds its window at one offset in its tile (kernel 2, stride 2, sizes that divide), nothing is sent: a slice, and padding
for the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir import spmd
from meshc.ir.sizes import Size
from meshc.ir.window import overlaps, tile_bounds, tile_length, window_starts
from meshc.passes.partition.reasons import plan_lines, value_text

if TYPE_CHECKING:
    from meshc.passes.partition.operator_lowering import Lowering

aten = torch.ops.aten


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


def window(local: Lowering, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
    """The window of `x` along `dim` that the rank's tile of `letter` reads; `fill` beyond the ends.

    `x` itself if the letter is not split. The padding of `x` may hold any value.
    """
    place = _halo_window(local, letter)
    if place is None:
        return x
    here = place.window_offset()
    if here is None:
        where = [place.size, list(place.window), float(fill)]
        return local.emit(spmd.halo, x, list(place.axes), dim, *where, reason=_reason(local, x, place.axes, "halo of"))
    if place.size != place.tile * len(tile_bounds(place.size, place.counts)):
        x = local.emit(spmd.mask, x, dim, local.count(local.rule.windows[letter][0]), float(fill))
    length = place.window[3]
    return x if length == place.tile else local.emit(aten.slice.Tensor, x, dim, here, here + length)


def sum_of_windows(local: Lowering, x: Node, dim: int, letter: str) -> Node:
    """The transpose of `window`: values for the window of the rank's tile -> the tile of the other letter, summed over all windows.

    `x` itself if the letter is not split.
    """
    place = _halo_window(local, letter)
    if place is None:
        return x
    here = place.window_offset()
    if here is None:
        where = [place.size, list(place.window)]
        return local.emit(spmd.halo_sum, x, list(place.axes), dim, *where, reason=_reason(local, x, place.axes, "sums at the edges of"))
    after = place.tile - here - place.window[3]
    if not here and not after:
        return x
    rank = len(local.shape(x))
    return local.emit(aten.constant_pad_nd.default, x, [0, 0] * (rank - 1 - dim) + [here, after], 0)


def window_start(local: Lowering, letter: str) -> Node | int:
    """First position of the rank's tile of `letter`, times the stride."""
    start = local.start(letter)
    stride = local.rule.windows[letter][1].stride
    return start if stride == 1 or start == 0 else local.emit(spmd.tile_start, stride * 2, [2], [start])


def _halo_window(local: Lowering, letter: str) -> HaloWindow | None:
    axes = local.axes(letter)
    if not axes:
        return None
    other, found = local.rule.windows[letter]
    counts = tuple(local.build.sizes[axis] for axis in axes)
    over = local.global_size(letter)
    length = found.length(tile_length(over, counts))
    return HaloWindow(axes, counts, local.global_size(other), (over, found.stride, found.offset, length))


def _reason(local: Lowering, x: Node, axes: tuple[str, ...], what: str) -> str:
    return f"{what} {value_text(local.node, {})}{plan_lines(axes, local.build.entries)}"
