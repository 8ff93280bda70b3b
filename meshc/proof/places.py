"""Calls that depend on a rank's place, in a proof: its tile, masks of what is beyond it, halves in zigzag order.

    shard(x, 0, 2, coordinate("dp"))                        x, its rows split over dp
    mask(x, 0, tile_count(5, [2], [coordinate]), 0.0)       x, of whose padding over dp it is known that it is 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from meshc.ir import spmd
from meshc.ir.sharding import ZIGZAG, tile_sizes
from meshc.proof.chunks import chunks_of, is_of_chunks
from meshc.proof.exchanged_tiles import elementwise
from meshc.proof.held import Held, Integer
from meshc.proof.tile_cuts import place_tiles
from meshc.proof.tile_moves import lengthen_dim
from meshc.proof.tiles import END, Tiles, fuse_digits, major_digits, with_dim
from meshc.proof.uneven import Row, are_told_apart, in_order, row_of_axis, row_of_dim

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator


def shard(of: Evaluator, x: Tiles, dim: int, tiles: int, index: Held | int) -> Tiles:
    axes = index.axes(of.sizes) if isinstance(index, Integer) else None
    extent = x.shape[dim]
    whole = lengthen_dim(x, dim, -(-extent // tiles) * tiles - extent)
    taken, rest = major_digits(whole.dims[dim], tiles)
    if x.root in of.known and axes is not None and prod(of.sizes[axis] for axis in axes) == tiles:
        if not {*axes} & {axis for axis, _ in x.partial}:
            return place_tiles(of, whole, dim, taken, rest, axes)
    return elementwise(of, replace(whole, dims=with_dim(whole.dims, dim, rest)), "shard", taken, index)


def keep_first(of: Evaluator, x: Tiles, index: Held | int) -> Tiles:
    axes = index.axes(of.sizes) if isinstance(index, Integer) else None
    if x.root in of.known and axes is not None and not {*axes} & ({axis for axis, _ in x.axes} | {axis for axis, _ in x.partial}):
        if all(value == 0.0 for _, value in x.padding):
            return replace(x, partial=tuple(sorted([*x.partial, *((axis, "sum") for axis in axes)])))
        return replace(x, partial=tuple(sorted([*x.partial, *((axis, "sum") for axis in axes)])), padding=())
    return elementwise(of, x, "keep_first", index)


def mask(of: Evaluator, x: Tiles, dim: int, count: Held | int, value: float) -> Tiles:
    rows = _masked_rows(of, x, dim, count) if x.root in of.known else None
    if rows is not None and are_told_apart(uneven := in_order({*x.uneven, *rows})):
        padding = {**dict(x.padding), **{row[0]: float(value) for row in rows}}
        return replace(x, padding=tuple(sorted(padding.items())), uneven=uneven)
    return elementwise(of, x, "mask", x.dims[dim], count, value)


def _masked_rows(of: Evaluator, x: Tiles, dim: int, count: Held | int) -> list[Row] | None:
    """Of the axes whose uneven tiles a mask looks at the rows of `uneven`: axes that split the positions of the dim, or would if these
    were not one. None for another mask."""
    if not isinstance(count, Integer) or count.made[0] != "tile_count" or len(x.dims[dim]) > 1:
        return None
    _, size, counts, coordinates = count.made
    split, own = dict(x.axes), x.dims[dim]
    chunk = {chunks_of(axis)[0][0]: (axis,) for axis in (*split, *(row[0] for row in x.uneven)) if is_of_chunks(axis)}
    rows = [one.axes(of.sizes) if isinstance(one, Integer) else chunk.get(one) for one in coordinates]
    if any(row is None or len(row) != 1 for row in rows):
        return None
    axes = tuple(axis for row in rows if row for axis in row)
    extents = tile_sizes(size, counts)
    fits = all(is_of_chunks(axis) or of.sizes[axis] == count for axis, count in zip(axes, counts, strict=True))
    if not fits or x.shape[dim] != extents[-1]:
        return None
    pairs = zip(axes, extents, extents[1:], strict=False)
    uneven = [(axis, before) for axis, before, after in pairs if before != after * of.sizes[axis]]
    every = [*zip(axes, extents, strict=False)] if uneven else []
    beyond = [axis for axis, before in zip(axes, extents, strict=False) if before == 1]  # all tiles but the first are padding
    if any(split.get(axis) == END and axis not in beyond for axis in axes):
        return None
    if own == fuse_digits([(0, extents[-1])]) and not any(split.get(axis, END) != END for axis in axes):
        found = [row_of_axis(axis, 1) if axis in split else row_of_dim(axis, before, x.shape, dim) for axis, before in every]
        return found if all(row in found for row in x.uneven if row[0] in axes) else None
    if any(axis not in split for axis in axes):
        return None
    apart = [split[axis] // extent for axis, extent in zip(axes, extents[1:], strict=True) if split[axis] != END]
    unit = own[0][0] if own else apart[-1] if apart else END
    found = [row_of_axis(axis, 1 if split[axis] == END else unit * before) for axis, before in uneven]
    if [row for row in x.uneven if row[0] in axes] != [*in_order(found)]:
        return None
    return found if all(split[axis] in (unit * extent, END) for axis, extent in zip(axes, extents[1:], strict=True)) else None


def to_zigzag(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int, home: bool = False) -> Tiles:
    """The halves of tiles in zigzag order: an order of the axis's tiles, by name. With `home`, the other way round."""
    (axis,) = axes
    one, other = (axis, f"{axis}~{ZIGZAG}")[:: -1 if home else 1]
    split, own = dict(x.axes), x.dims[dim]
    if x.root in of.known and one in split and len(own) == 1 and split[one] == own[0][0] * own[0][1]:
        split[other] = split.pop(one)
        padding = ((other if name == one else name, value) for name, value in x.padding)
        uneven = in_order((other if row[0] == one else row[0], *row[1:]) for row in x.uneven)
        return replace(x, axes=tuple(sorted(split.items())), padding=tuple(sorted(padding)), uneven=uneven)
    what, *rest = of.terms.term(x.root)
    if what == ("to_zigzag" if home else "from_zigzag") and rest[:2] == [axis, own]:  # there and back again
        return replace(rest[2], dims=x.dims)
    is_repeated = any(stride == 0 for digits in x.dims for stride, _ in digits)  # then its dims tell it from the same in another shape
    number = of.terms.number("from_zigzag" if home else "to_zigzag", axis, own, x if is_repeated else replace(x, dims=()))
    of.numel.setdefault(number, of.numel.get(x.root, 0))
    return Tiles(number, x.dims)


def from_zigzag(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int) -> Tiles:
    return to_zigzag(of, x, axes, dim, home=True)


CALLS: Final[Mapping[Any, Callable[..., Tiles]]] = {
    spmd.shard: shard, spmd.keep_first: keep_first, spmd.mask: mask, spmd.to_zigzag: to_zigzag, spmd.from_zigzag: from_zigzag,
}  # fmt: skip
