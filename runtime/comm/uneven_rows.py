"""Redistribution of an unevenly split batch into equal padded tiles, and back.

    parts     rank 0 [a b c]   rank 1 [d]    rank 2 []     rank 3 [e f]      3, 1, 0 and 2 rows
    tiles     rank 0 [a b]     rank 1 [c d]  rank 2 [e f]  rank 3 [. .]      of 6 rows over 4 ranks; padding is zero

The batch is the rows of all ranks in order. The rows to send follow from the counts, which every rank knows, so nothing is exchanged but
rows that change ranks, in one uneven all-to-all; where parts are tiles already, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.errors import InputError
from meshc.ir.sharding import Part, Sharding
from meshc.ir.window import tile_bounds, tile_length
from meshc.runtime.comm.collectives import all_to_all_pieces, split_pieces
from meshc.runtime.comm.halo_exchange import resized_shape

Bounds = Sequence[tuple[int, int]]
"""First element and number of elements that each rank has."""


class UnevenBatch:
    """The uneven split of one call's batch.

    counts   rows of each rank's part, by its place in the group
    axes     that split the batch, major to minor
    sizes    of these axes
    group    the ranks along the axes, in this order; None if this rank is alone
    guarded  a context in which a failure reaches the other ranks
    """

    def __init__(
        self,
        counts: Sequence[int],
        axes: Sequence[str],
        sizes: Sequence[int],
        group: ProcessGroup | None,
        guarded: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.counts, self.axes, self.sizes, self.guarded = tuple(counts), tuple(axes), tuple(sizes), guarded
        self.rows = sum(counts)
        self._group, self._place = group, 0 if group is None else group.rank()
        starts = accumulate(counts, initial=0)
        self._parts = [(start, count) for start, count in zip(starts, counts, strict=False)]

    @property
    def mine(self) -> int:
        """Rows that this rank has passed."""
        return self.counts[self._place]

    def shape_of_part(self, tile: Sequence[int], sharding: Sharding | None) -> tuple[int, ...]:
        """The shape of this rank's part of a value with this sharding, whose tiles have the shape `tile`."""
        rows = {dim for dim, _, part in ([] if sharding is None else sharding.parts()) if part.axes == self.axes}
        return tuple(self.mine if dim in rows else size for dim, size in enumerate(tile))

    def tile(self, x: Tensor, sharding: Sharding | None, name: str) -> Tensor:
        """This rank's tile of a value, from its part `x`; `x` itself if the batch's axes do not split the value. Differentiable."""
        found = self._batch_dim(sharding, name)
        return x if found is None else _ExchangeRows.apply(x, self, found, True)

    def part(self, x: Tensor, sharding: Sharding | None, name: str) -> Tensor:
        """This rank's part of a value, from its tile `x`: the inverse of `tile`. Differentiable."""
        found = self._batch_dim(sharding, name)
        return x if found is None else _ExchangeRows.apply(x, self, found, False)

    def _batch_dim(self, sharding: Sharding | None, name: str) -> tuple[int, int, int] | None:
        """(dim of the batch, elements of the dim per unit of the split, number of units); None if the axes do not split the value. Raises
        InputError if a rank's rows are not contiguous in the dim."""
        if sharding is None:
            return None
        for dim, position, part in sharding.parts():
            if part.axes != self.axes:
                continue
            parts: Sequence[Part] = sharding.dims[dim]
            unit = prod(one.size for one in parts[position + 1 :])
            if position or any(start * part.size * unit % self.rows for start, _ in self._parts):
                raise InputError(
                    f"{name} has the batch inside a dim of {prod(one.size for one in parts)}, in which the rows of a rank are no rows\n"
                    "  what to do: leave batch in a dim of its own, outermost, or pass parts of equal numbers of rows"
                ).mark_everywhere()
            return dim, unit, part.size
        return None

    def exchange_rows(self, x: Tensor, dim: int, unit: int, size: int, to_tiles: bool) -> Tensor:
        """x: [.., rows of the part, ..] -> [.., elements of the tile, ..], or back."""
        each = size * unit
        parts = [(start * each // self.rows, count * each // self.rows) for start, count in self._parts]
        tiles = [(start * unit, count * unit) for start, count in tile_bounds(size, self.sizes)]
        length = tile_length(size, self.sizes) * unit
        if to_tiles:
            return self._exchange_ranges(x, dim, parts, tiles, length)
        return self._exchange_ranges(x, dim, tiles, parts, parts[self._place][1])

    def _exchange_ranges(self, x: Tensor, dim: int, have: Bounds, want: Bounds, length: int) -> Tensor:
        me, ranks = self._place, range(len(have))
        sends = [_common(have[me], want[other]) for other in ranks]
        comes = [_common(have[other], want[me]) for other in ranks]
        if all(_common(have[one], want[other])[1] == 0 for one in ranks for other in ranks if one != other):
            return x if x.shape[dim] == length else _assemble_rows(x, dim, length, [(0, x.narrow(dim, 0, have[me][1]))])
        pieces = [x.narrow(dim, start - have[me][0], count) if count else x.narrow(dim, 0, 0) for start, count in sends]
        shapes = [resized_shape(x, dim, count) for _, count in comes]
        assert self._group is not None
        came = split_pieces(all_to_all_pieces(pieces, shapes, self._group).wait(), shapes)
        placed = [(start - want[me][0], one) for (start, _), one in zip(comes, came, strict=True)]
        return _assemble_rows(x, dim, length, placed)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """First element and number of elements that both have."""
    low, high = max(one[0], other[0]), min(sum(one), sum(other))
    return (low, high - low) if low < high else (0, 0)


def _assemble_rows(x: Tensor, dim: int, length: int, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    result = x.new_zeros(resized_shape(x, dim, length))
    for start, piece in pieces:
        if piece.shape[dim]:
            result.narrow(dim, start, piece.shape[dim]).copy_(piece)
    return result


class _ExchangeRows(torch.autograd.Function):
    """`UnevenBatch.exchange_rows` as a differentiable function; its backward is the inverse exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dealt: UnevenBatch, found: tuple[int, int, int], to_tiles: bool) -> Tensor:
        ctx.dealt, ctx.found, ctx.to_tiles = dealt, found, to_tiles
        result = dealt.exchange_rows(x, *found, to_tiles)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        with torch.no_grad(), ctx.dealt.guarded():
            return ctx.dealt.exchange_rows(grads[0].contiguous(), *ctx.found, not ctx.to_tiles), None, None, None
