"""Shardings and values in other shapes, in a proof: before a move, with the parts of a dim regrouped, as a local shape may have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from meshc.ir.sharding import Part, Sharding
from meshc.proof.tile_moves import expand_dims, reshape_dims
from meshc.proof.tiles import Tiles, Unfit, extent_of, stride_within

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
