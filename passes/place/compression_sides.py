"""Placement of gradients that travel in fewer bits: which factor of the batch the axis takes, and where values are split along it.

    batch 12 = parts 4 * 3        the axis splits the parts, every other axis what is left of the batch
    on parts  [parts 4/dp, ...]   as the state is stored, but for the axis
    at home   [... /dp]           as the state is stored, and split along the axis too, if it is not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Factors, Instance, Token
from meshc.passes.phases.traced_model import CompressionSide, Joint
from meshc.passes.place.interests import Interest
from meshc.passes.place.storage import stored_split
from meshc.passes.place.stored_updates import where_stored


def parts_factors(joint: Joint, factors: Factors) -> dict[int, str]:
    """Factors that number the parts of a batch -> the axis over which their gradients travel."""
    sides = [(node, side.axis) for node, side in joint.compressed.items() if not side.home and not any(factors.instances[node].sums)]
    return {factor: axis for node, axis in sides for factor in factors.dims[node, 0][0]}


def with_parts(interest: Mapping[str, Interest], parts: Mapping[int, str], factors: Factors) -> dict[str, Interest]:
    """Interests where the axis of compressed gradients takes the parts and nothing else of a batch that has parts, and other axes none."""
    beside = {factor for dims in factors.dims.values() for dim in dims if any(one in parts for one in dim) for factor in dim} - parts.keys()
    found = {}
    for name, one in interest.items():
        gone = beside if name in parts.values() else parts.keys()
        found[name] = replace(one, ranks={factor: rows for factor, rows in one.ranks.items() if factor not in gone})
    return found


def rows_of_ranks(
    whole: Sharding, place: tuple[int, int], axes: Sequence[str], row: Sequence[int], parts: Mapping[int, str]
) -> Sharding:
    """A value whose ranks along `axes` have consecutive rows each. place: of its first batch factor; row: the factors of that dim. Where
    these are parts, and what is left of the batch, the axis of the parts takes these, and the other axes the rest."""
    dim, position = place
    axis = parts.get(row[position])
    rest = tuple(one for one in axes if one != axis)
    if axis is None or axis not in axes or not rest or position + 1 == len(row):
        return whole.with_axes(dim, position, tuple(axes))
    return whole.with_axes(dim, position, (axis,)).with_axes(dim, position + 1, rest)


def where_compressed(
    instance: Instance, side: CompressionSide, storage: Sharding, classes: tuple[tuple[int, ...], ...], sizes: Mapping[str, int],
    parts: Mapping[int, str],
) -> dict[Token, tuple[str, ...]]:  # fmt: skip
    """The axes of an operator's letters. storage: of the parameter's state; classes: the factors of the parameter's dims."""
    chosen = where_stored(instance, home_storage(storage, side.axis, sizes) if side.home else without_axis(storage, side.axis), classes)
    if not side.home and sizes[side.axis] > 1:
        token = next((token for token in instance.size if instance.factor[token] in parts), None)
        if token is not None:
            chosen[token] = (side.axis,)
    return chosen


def without_axis(storage: Sharding, axis: str) -> Sharding:
    for dim, position, part in storage.parts():
        storage = storage.with_axes(dim, position, tuple(one for one in part.axes if one != axis))
    return storage


def home_storage(storage: Sharding, axis: str, sizes: Mapping[str, int]) -> Sharding:
    """The storage of a state, split along the axis too where it is not and can be."""
    if axis in storage.split_axes() or sizes[axis] == 1:
        return storage
    return stored_split(storage, "state", {axis: ("state",)}, sizes)


def error_storage(whole: Sharding, storage: Sharding, side: CompressionSide, sizes: Mapping[str, int]) -> Sharding:
    """The storage of errors, whose unsharded type is `whole`."""
    if side.home:
        return home_storage(storage, side.axis, sizes)
    kept = without_axis(storage, side.axis)
    for dim, position, part in kept.parts():
        whole = whole.with_axes(dim + 1, position, part.axes)
    first = whole.dims[0]
    return whole.with_axes(0, 0, (side.axis,)) if first and sizes[side.axis] > 1 else whole
