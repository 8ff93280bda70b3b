"""Shardings and values in other shapes, in a proof: before a move, with the parts of a dim regrouped, as a local shape may have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from meshc.ir.sharding import Part, Sharding
from meshc.proof.tile_moves import expand_dims, reshape_dims
from meshc.proof.tiles import Digit, Dim, Tiles, Unfit, extent_of, fuse_digits, stride_within
from meshc.proof.uneven import counts_elements

Parts = tuple[Part, ...]


def sharding_before_move(value: Tiles, moved: Tiles, sharding: Sharding) -> Sharding | None:
    """The sharding of a value that is so sharded once its dims are in another order, or its elements in another shape."""
    if len(moved.dims) == len(value.dims) and all(dim in moved.dims for dim in value.dims):
        return replace(sharding, dims=tuple(sharding.dims[moved.dims.index(dim)] for dim in value.dims), zero=frozenset())
    dims = regroup_parts([part for parts in sharding.dims for part in parts], value.shape)
    return None if dims is None else Sharding(dims, sharding.partial)


def shardings_of_shape(shape: Sequence[int], local: Sequence[int], sizes: Mapping[str, int]) -> list[Sharding]:
    """Shardings in which a value may have a local shape, each dim split by one axis at most; the whole value, where an axis fits no dim."""
    rows: list[list[tuple[str, ...]]] = []
    for size, mine in zip(shape, local, strict=True):
        rows.append([(axis,) for axis, count in sizes.items() if size != mine == -(-size // count)] or [()])
    found = []
    for axes in itertools.islice(itertools.product(*rows), 8):
        found.append(Sharding(tuple((Part(f"dim {at}", size, own),) for at, (size, own) in enumerate(zip(shape, axes, strict=True)))))
    return found


def units_of_parts(value: Tiles, dim: int, parts: Parts) -> Iterator[tuple[int, Part, int]]:
    """(place, part, how far apart its positions are) for the parts of a dim."""
    unit = extent_of(value.dims[dim])
    for place, part in enumerate(parts) if unit else ():
        unit //= part.size
        try:
            yield place, part, stride_within(value.dims[dim], unit)
        except Unfit:
            continue


def regroup_parts(parts: Sequence[Part], shape: Sequence[int]) -> tuple[Parts, ...] | None:
    """The same parts, in order, as those of other dims; None if they do not fit."""
    rest, found = list(parts), []
    for size in shape:
        dim: list[Part] = []
        while rest and prod(part.size for part in dim) < size:
            dim.append(rest.pop(0))
        if prod(part.size for part in dim) != size:
            return None
        found.append(tuple(dim))
    return tuple(found) if all(part.size == 1 for part in rest) else None


def in_shape(value: Tiles, shape: Sequence[int]) -> Tiles | None:
    """The value in another shape; None if it has no such."""
    try:
        if len(shape) > 1 and prod(shape) != prod(value.shape) == prod(shape[1:]):  # the same for each group of the first dim
            own = reshape_dims(value, (1, *shape[1:]))
            return expand_dims(own, shape)
        return reshape_dims(value, shape)
    except Unfit:
        return None


def without_names(sharding: Sharding) -> object:
    """A sharding but for the names of factors and the order of what it is partial over."""
    dims = tuple(tuple((part.size, part.cuts) for part in parts if part.size != 1 or part.axes) for parts in sharding.dims)
    return dims, frozenset(sharding.partial)


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
