"""Moves of tiles: the same positions in other dims. Each raises Unfit where digits cannot say it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from meshc.proof.tiles import END, Digit, Dim, Dims, Tiles, Unfit, dims_of_shape, extent_of, fuse_digits, major_digits, with_dim
from meshc.proof.uneven import ADDED, LOST, REPEATED, added_to, counts_elements, in_order, rows_in_shape, rows_of_longer, rows_without


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


def substitute_root(x: Tiles, local: Tiles, whole: Tiles) -> Tiles:
    """The tiles `x` of a root as tiles of another, where `local` of the one are `whole` of the other, element by element. Raises Unfit."""
    if x.uneven != whole.uneven or any(map(counts_elements, x.uneven)):
        raise Unfit("places that are none of the value's")
    pieces = [(one, step, other) for mine, own in zip(local.dims, whole.dims, strict=True) for one, step, other in _common(mine, own)]
    dims: list[Dim] = []
    for dim in x.dims:
        found: list[Digit] = []
        for stride, extent in reversed(dim):
            while extent > 1:
                at = next(((one, step, other) for one, step, other in pieces if one <= stride < one * step), None)
                if at is None or stride % at[0] or at[1] % (count := stride // at[0]) or extent % min(extent, at[1] // count):
                    raise Unfit(f"{extent} positions {stride} apart")
                taken = min(extent, at[1] // count)
                found.insert(0, (at[2] * count, taken))
                extent, stride = extent // taken, at[0] * at[1]
        dims.append(fuse_digits(found))
    return replace(whole, dims=tuple(dims))


def _common(one: Dim, other: Dim) -> Iterator[tuple[int, int, int]]:
    """The digits of a dim in two roots, (stride in the one, extent, stride in the other), in pieces that both have."""
    rest, left = list(one), list(other)
    while rest and left:
        (stride, extent), (step, count) = rest.pop(), left.pop()
        small = min(extent, count)
        if not small or extent % small or count % small:
            raise Unfit(f"{one} and {other}")
        yield stride, small, step
        rest += [(stride * small, extent // small)] if extent > small else []
        left += [(step * small, count // small)] if count > small else []
    if rest or left:
        raise Unfit(f"{one} and {other}")


def permute_dims(x: Tiles, order: Sequence[int]) -> Tiles:
    made = replace(x, dims=tuple(x.dims[dim] for dim in order))
    return made if not x.uneven else replace(made, uneven=rows_in_shape(x.uneven, x.shape, made.shape, list(order).index))


def reshape_dims(x: Tiles, shape: Sequence[int]) -> Tiles:
    return replace(x, dims=regroup_digits(x.dims, shape))


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
    rest = rows_without(x.uneven, added)
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
    padding = tuple(sorted([*made.padding, (f"{ADDED}{stride}", 0.0)]))
    before = added_to(x.uneven, x.dims, x.shape, dim)
    rest = rows_of_longer(rows_without(x.uneven, before), x.shape, made.shape, dim)
    if stride == END:
        return replace(made, padding=padding, uneven=rest)
    good = before[1] if before is not None else extent * (stride or prod(x.shape[dim + 1 :]))
    row = (ADDED, good, stride, stride * (extent + extra)) if stride else (REPEATED, good, prod(made.shape[dim:]), prod(made.shape))
    return replace(made, padding=padding, uneven=in_order([*rest, row]))
