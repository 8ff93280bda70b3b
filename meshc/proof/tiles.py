"""Tiles: what a rank has of a value, as positions. Reshapes, transposes, slices and collectives only move positions.

A position of a value is a number: of a value of shape [4, 6] the element [i, j] has the position 6 i + j. A *digit* (stride, extent)
runs through positions in steps of `stride`. A dim of a local tensor is a product of digits, major to minor; a mesh axis has a stride:

    "f32[batch 4/dp, ffn 6/tp]"       dims ((6, 2)), ((1, 3))       axes dp 12, tp 3        the element [i, j] of rank (d, t) has the
                                                                                          position 12 d + 3 t + 6 i + j
    all_gather(x, ["dp"], 0)          dims ((6, 4)), ((1, 3))       axes tp 3              (12, 2) (6, 2) is (6, 4)
    reshape(x, [12])                  dims ((6, 4), (1, 3))         axes tp 3
    129 over 2 ranks                  dims ((1, 65))                axes dp 65             one position of the second rank is padding

Positions that an uneven split adds are beyond the end of a tile of an axis, which `uneven` tells; what they hold is said by `padding`, or
not known. Two locals of one root with equal tiles are equal but for padding that neither knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, TypeVar

from meshc.ir.sharding import Part, Sharding, local_size, tile_sizes
from meshc.proof.uneven import Rows, are_told_apart, counts_elements, in_order, row_of_axis, row_of_dim

Digit = tuple[int, int]
"""(stride, extent) of positions."""
Dim = tuple[Digit, ...]
"""Digits of a dim, major to minor; () for a dim of size 1."""
Dims = tuple[Dim, ...]
_Number = TypeVar("_Number", int, float)
END: Final = -1
"""The stride of what is beyond a dim of size 1, which is padding."""


class Unfit(Exception):
    """A change of tiles that digits cannot say."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """
    root     number of the term whose elements these are (`terms.py`)
    dims     digits of each local dim
    axes     (axis, stride) of each axis that splits the value, by name; along others all ranks have the same
    partial  (axis, reduction), by name
    padding  (axis, what the padding that its uneven tiles add holds), by name; axes missing: not known
    uneven   which places are none of the value's, by axis (`uneven.py`)
    """

    root: int
    dims: Dims
    axes: tuple[tuple[str, int], ...] = ()
    partial: tuple[tuple[str, str], ...] = ()
    padding: tuple[tuple[str, float], ...] = ()
    uneven: Rows = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        return tuple(map(extent_of, self.dims))

    def like(self, other: Tiles) -> bool:
        """Whether two are the same but for what their padding holds."""
        return self.uneven == other.uneven and self._has_positions_of(other)

    def serves(self, wanted: Tiles) -> bool:
        """Whether they are the wanted ones, but for what their padding holds; where a value is repeated, they may have no padding."""
        if not self._has_positions_of(wanted) or any(row not in wanted.uneven for row in self.uneven):
            return False
        return all(row in self.uneven or counts_elements(row) for row in wanted.uneven)

    def _has_positions_of(self, other: Tiles) -> bool:
        return self.root == other.root and self.dims == other.dims and self.axes == other.axes and self.partial == other.partial


def in_home_order(x: Tiles) -> Tiles:
    """Tiles of axes in another order (`cp~zigzag`) as those in the axes' own."""
    uneven = in_order((row[0].partition("~")[0], *row[1:]) for row in x.uneven)
    return replace(x, axes=_home(x.axes), padding=_home(x.padding), uneven=uneven)


def _home(rows: tuple[tuple[str, _Number], ...]) -> tuple[tuple[str, _Number], ...]:
    return tuple(sorted((axis.partition("~")[0], value) for axis, value in rows))


def extent_of(dim: Dim) -> int:
    return prod(extent for _, extent in dim)


def fuse_digits(digits: Iterable[Digit]) -> Dim:
    """The same positions in fewest digits."""
    found: list[Digit] = []
    for stride, extent in digits:
        if extent == 1:
            continue
        if found and found[-1][0] == stride * extent:
            found[-1] = (stride, found[-1][1] * extent)
        else:
            found.append((stride, extent))
    return tuple(found)


def dims_of_shape(shape: Sequence[int]) -> Dims:
    """The digits of a value's dims over its own positions."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tuple(fuse_digits([(stride, size)]) for stride, size in zip(strides, shape, strict=True))


def major_digits(dim: Sequence[Digit], count: int) -> tuple[Dim, Dim]:
    """The digits of a dim as those that run through `count` equal tiles, and those of a tile. Raises Unfit."""
    taken: list[Digit] = []
    rest = list(dim)
    left = count
    while left not in (0, 1):  # of open sizes it may be 1
        if not rest:
            raise Unfit(f"{count} tiles of {extent_of(tuple(dim))} positions")
        stride, extent = rest.pop(0)
        if not extent:
            raise Unfit("no positions")
        if left % extent == 0:
            taken.append((stride, extent))
            left //= extent
        elif extent % left == 0:
            taken.append((stride * (extent // left), left))
            rest.insert(0, (stride, extent // left))
            left = 1
        else:
            raise Unfit(f"{count} tiles of {extent_of(tuple(dim))} positions")
    return fuse_digits(taken), fuse_digits(rest)


# ------------------------------------------------------------------------------------------------------------- what a sharding says


def tiles_of_part(part: Part, unit: int, sizes: Mapping[str, int]) -> tuple[Digit, list[tuple[str, Digit, int]]]:
    """The local digit of a part whose positions are `unit` apart, and of each of its axes the digit, and how many positions it splits."""
    counts = [sizes[axis] for axis in part.axes]
    extents = tile_sizes(part.size, counts)
    axes = [
        # of one position all tiles but the first are padding
        (axis, (END if before == 1 else unit * extent, count), before)
        for axis, before, extent, count in zip(part.cuts, extents, extents[1:], counts, strict=False)
    ]
    return (unit, extents[-1]), axes


def tiles_of(value: Tiles, sharding: Sharding, sizes: Mapping[str, int]) -> Tiles:
    """The tiles that a rank has of a whole value, by a sharding of it. Raises Unfit."""
    if len(sharding.dims) != len(value.dims):
        raise Unfit(f"a sharding of {len(sharding.dims)} dims for {len(value.dims)}")
    if 0 in value.shape:
        if sharding.shape != value.shape:
            raise Unfit(f"{sharding} for {value.shape}")
        shape = [prod(tiles_of_part(part, 1, sizes)[0][1] for part in parts) for parts in sharding.dims]
        return Tiles(value.root, dims_of_shape(shape), partial=tuple(sorted(sharding.partial)))
    dims: list[Dim] = []
    axes, uneven = dict(value.axes), list(value.uneven)
    local = [local_size(part, sizes) for parts in sharding.dims for part in parts]
    place = 0
    for parts, own in zip(sharding.dims, value.dims, strict=True):
        if prod(part.size for part in parts) != extent_of(own):
            raise Unfit(f"{extent_of(own)} positions as {' * '.join(map(str, parts))}")
        if not any(part.axes for part in parts):
            dims.append(own)
            place += len(parts)
            continue
        found: list[Digit] = []
        unit = extent_of(own)
        for part in parts:
            unit //= part.size
            mine, split = tiles_of_part(part, unit, sizes)
            found += _digits_within(own, mine)
            tiles = [*(before for _, _, before in split[1:]), mine[1]]
            are_uneven = [before != tile * count for (_, (_, count), before), tile in zip(split, tiles, strict=False)]
            for (axis, (apart, count), before), is_uneven in zip(split, are_uneven, strict=True):
                stride = END if apart == END else stride_within(own, apart)
                if count > 1 and stride:
                    axes[axis] = stride
                if count > 1 and is_uneven and stride:
                    uneven.append(row_of_axis(axis, _positions(stride, before, count)))
                elif count > 1 and any(are_uneven) and not stride:  # ranks along even ones differ in padding, too
                    uneven.append(row_of_dim(axis, before, local, place))
            place += 1
        dims.append(fuse_digits(found))
    if not are_told_apart(in_order(uneven)):
        raise Unfit("tiles of equal positions, split by several axes alike")
    partial = tuple(sorted(sharding.partial))
    return Tiles(value.root, tuple(dims), tuple(sorted(axes.items())), partial, uneven=in_order(uneven))


def _positions(stride: int, size: int, count: int) -> int:
    """How far all positions reach that tiles split which are `stride` apart."""
    return 1 if stride == END else stride // -(-size // count) * size


def stride_within(own: Dim, stride: int) -> int:
    """How far apart positions are that are `stride` apart in a dim whose own digits are `own`."""
    unit = 1
    for base, count in reversed(own):
        if stride < unit * count:
            if stride % unit:
                raise Unfit(f"positions {stride} apart in {own}")
            return base * (stride // unit)
        unit *= count
    return END


def _digits_within(own: Dim, digit: Digit) -> list[Digit]:
    """The same for a digit of a dim's positions."""
    stride, extent = digit
    found: list[Digit] = []
    unit, goes_on = 1, extent not in (0, 1)
    for base, count in reversed(own):
        if goes_on and stride < unit * count:
            step = stride // unit
            room = count // step
            if stride % unit or count % step and extent > room or extent > room and extent % room:
                raise Unfit(f"{extent} positions {stride} apart in {own}")
            found.insert(0, (base * step, min(extent, room)))
            extent, stride = -(-extent // room), unit * count
            goes_on = extent > 1
        unit *= count
    if goes_on:
        raise Unfit(f"{extent} positions {stride} apart in {own}")
    return found


def with_dim(dims: Dims, dim: int, digits: Iterable[Digit]) -> Dims:
    return (*dims[:dim], fuse_digits(digits), *dims[dim + 1 :])


def digits_of_axes(digits: Dim, axes: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, Digit]]:
    """The digit of each axis, major to minor, where together they run through `digits`. Raises Unfit."""
    rest: Dim = digits
    found = []
    for axis in axes:
        taken, rest = major_digits(rest, sizes[axis])
        if len(taken) > 1:
            raise Unfit(f"the tiles of {axis} are not evenly apart")
        found.append((axis, taken[0] if taken else (0, 1)))
    return found
