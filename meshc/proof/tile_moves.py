"""Moves of tiles: the same positions in other dims. Each raises Unfit where digits cannot say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

from meshc.proof.tiles import END, Digit, Dim, Dims, Tiles, Unfit, dims_of_shape, extent_of, major_digits, with_dim
from meshc.proof.uneven import (
    ADDED,
    LOST,
    REPEATED,
    Rows,
    added_to,
    are_added,
    digit_of,
    in_order,
    is_told_apart,
    name_of_zeros,
    rows_beside,
    rows_in_shape,
    rows_of_longer,
    rows_without,
)

ZEROS_BEHIND_ONE: Final = f"{ADDED}{END}"
"""The name under which is kept that zeros are behind dims of one position."""


def regroup_digits(dims: Dims, shape: Sequence[int]) -> Dims:
    """The same elements, in their order, in another shape. Raises Unfit."""
    rest = [digit for dim in dims for digit in dim]
    if (numel := prod(shape)) != prod(extent for _, extent in rest):
        raise Unfit(f"{shape} for {[*map(extent_of, dims)]}")
    if not numel:
        return dims_of_shape(shape)
    found: list[Dim] = []
    for size in shape:
        taken, kept = major_digits(rest, size)
        found.append(taken)
        rest = list(kept)
    return tuple(found)


def permute_dims(x: Tiles, order: Sequence[int]) -> Tiles:
    made = replace(x, dims=tuple(x.dims[dim] for dim in order))
    return made if not x.uneven else replace(made, uneven=rows_in_shape(x.uneven, x.shape, made.shape, list(order).index))


def reshape_dims(x: Tiles, shape: Sequence[int]) -> Tiles:
    dims = regroup_digits(x.dims, shape)
    own = [digit_of(row, x.dims) for row in x.uneven if not is_told_apart(row, x.dims, dims)]
    if own and not {one for one in _digits_in_place(x.dims) if one[0] in own} <= _digits_in_place(dims):
        raise Unfit("places that were added to one of several digits")
    return replace(x, dims=dims, uneven=kept_rows(x.uneven, x.dims, dims))


def _digits_in_place(dims: Dims) -> set[tuple[Digit, int]]:
    """Digits, each with the number of elements behind one step of it."""
    digits = [digit for dim in dims for digit in dim]
    return {(digit, prod(extent for _, extent in digits[at + 1 :])) for at, digit in enumerate(digits)}


def kept_rows(rows: Rows, before: Dims, after: Dims) -> Rows:
    """Rows of digits that are not changed, where others are. Raises Unfit."""
    found = rows_beside(rows, before, after)
    if found is None:
        raise Unfit("places that were added to one of several digits")
    return found


def expand_dims(x: Tiles, shape: Sequence[int]) -> Tiles:
    """A value that is repeated along dims of size 1: positions 0 apart."""
    new = len(shape) - len(x.dims)
    dims: list[Dim] = []
    for at, size in enumerate(shape):
        own = x.dims[at - new] if at >= new else ()
        if extent_of(own) == 1 and size not in (1, -1):
            own = ((0, size),)
        elif size not in (-1, extent_of(own)):
            raise Unfit(f"{x.shape} expand_dims to {tuple(shape)}")
        dims.append(own)
    made = replace(x, dims=tuple(dims))
    kept = {at - new: at for at, own in enumerate(dims) if at >= new and x.dims[at - new] == own}
    return replace(made, uneven=rows_in_shape(x.uneven, x.shape, made.shape, kept.get))


def narrow_dim(x: Tiles, dim: int, length: int) -> Tiles:
    """The first `length` positions of a dim."""
    own = x.dims[dim]
    if extent_of(own) == length:
        return x
    if len(own) != 1:
        raise Unfit("a slice of several digits")
    made = replace(x, dims=with_dim(x.dims, dim, [(own[0][0], length)]))
    if not x.uneven:
        return made
    added = added_to(x.uneven, x.dims, x.shape, dim)
    if added is None:
        return replace(made, uneven=rows_in_shape(x.uneven, x.shape, made.shape, lambda at: at if at != dim else None))
    reach = length * (own[0][0] or prod(x.shape[dim + 1 :]))
    rest = kept_rows(rows_without(x.uneven, added), x.dims, made.dims)
    if reach == added[1]:  # a tile of whatever splits it further out is whole again
        return replace(made, uneven=rows_of_longer(rest, x.shape, made.shape, dim))
    lost = () if reach < added[1] else ((f"{LOST}{added[0]}", *added[1:]),)
    return replace(made, uneven=in_order([*rows_in_shape(rest, x.shape, made.shape, lambda at: at if at != dim else None), *lost]))


def lengthen_dim(x: Tiles, dim: int, extra: int) -> Tiles:
    """A dim with zeros added behind its own positions. Raises Unfit."""
    own = x.dims[dim]
    if not extra:
        return x
    if len(own) > 1:
        raise Unfit("positions behind several digits")
    stride, extent = own[0] if own else (END, 1)
    made = replace(x, dims=with_dim(x.dims, dim, [(stride, extent + extra)]))
    if not made.dims[dim]:
        raise Unfit("one position where there was none")
    before = added_to(x.uneven, x.dims, x.shape, dim)
    others = kept_rows(rows_without(x.uneven, before), x.dims, made.dims)
    rest = rows_of_longer(others, x.shape, made.shape, dim)
    zeros = {name for name, _ in x.padding}
    if stride == END:
        is_zero = ZEROS_BEHIND_ONE in zeros or not any(one[0] == END for own in x.dims for one in own)
        return replace(made, padding=_with_zeros(x, ZEROS_BEHIND_ONE, is_zero), uneven=rest)
    good = before[1] if before is not None else extent * (stride or prod(x.shape[dim + 1 :]))
    row = (ADDED, good, stride, stride * (extent + extra)) if stride else (REPEATED, good, prod(made.shape[dim:]), prod(made.shape))
    name = name_of_zeros(row)
    known = [name_of_zeros(one) in zeros for one in x.uneven if one is before or are_added(one) and name_of_zeros(one) == name]
    return replace(made, padding=_with_zeros(x, name, all(known)), uneven=in_order([*rest, row]))


def _with_zeros(x: Tiles, name: str, is_zero: bool) -> tuple[tuple[str, float], ...]:
    return tuple(sorted({**dict(x.padding), name: 0.0}.items())) if is_zero else tuple(row for row in x.padding if row[0] != name)
