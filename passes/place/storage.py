"""Shardings of stored parameters, gradients and optimizer state between steps: split further by the axes that store them.

    dp: batch; store params, grads, state
    tp: ffn                                          [ffn 64/tp, hidden 32]    stored as  [ffn 64/tp, hidden 32/dp]

    dp: batch; store params, grads, state
    dp_shard: batch; store params, grads, state      [ffn 64, hidden 32]       stored as  [ffn 64/dp/dp_shard, hidden 32]

Several axes split one dim, so that a parameter is gathered by one collective over all of them, and its gradient, which is partial over all
of them, is reduce-scattered by one: over two dims there would be two each, the first of them on the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final, TypeAlias

from meshc.errors import PlanError
from meshc.ir.sharding import Part, Sharding, local_size
from meshc.passes.phases.placed_model import Slots
from meshc.plan.entries import STORES

Place: TypeAlias = tuple[int, int]
"""(dim, position of the part)."""

CLAUSE: Final = {"parameter": "params", "gradient": "grads", "state": "state"}
"""Kind of storage -> its word in plans."""


def in_names_of(own: Sharding, name: str, base: Sharding, sizes: Mapping[str, int]) -> Sharding:
    """The storage `base` of the parameter `name` in another program of the model, in this program's factors: `own` is the unsharded type.

        [ffn 16/tp, hidden 8]                 a layer that this program does not call has named ffn: [up.weight.0 16/tp, hidden 8]
        [heads 4/tp * head 8, hidden 8]       nothing here cuts the dim into heads: [q.weight.0 32/tp, hidden 8]

    Raises PlanError where that is not possible.
    """
    dims = [_rename_parts(mine, theirs, sizes) for mine, theirs in zip(own.dims, base.dims, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    if len(found) < len(dims):
        raise PlanError(
            f"{name} lies as {base}, by the program of this model that was compiled first, and this program has it as {own}, which cannot "
            "lie so\n"
            "  why: the programs of a model share its parameters, and an inner factor of a dim is split, or tiles do not divide\n"
            "  what to do: a plan that keeps it whole between the calls, or splits another dim of it, for the program that is compiled "
            "first:\n"
            f"  `store {name} [params]: ...`, or an axis without its `store` clause (docs/plans.md)"
        )
    return Sharding(found)


def _rename_parts(mine: tuple[Part, ...], theirs: tuple[Part, ...], sizes: Mapping[str, int]) -> tuple[Part, ...] | None:
    if not any(part.axes for part in theirs):
        return mine
    if [part.size for part in mine] == [part.size for part in theirs]:
        return tuple(replace(one, axes=other.axes, order=other.order) for one, other in zip(mine, theirs, strict=True))
    first, count = theirs[0], prod(sizes[axis] for axis in theirs[0].axes)
    inner = any(part.axes for part in theirs[1:]) or bool(first.order)
    if inner or first.size % count or mine[0].size % count:
        return None
    return (replace(mine[0], axes=first.axes), *mine[1:])


def with_slots(base: Sharding, slots: Slots) -> Sharding:
    """`base` with the parts of `slots` split by these axes, which then split nothing else."""
    moved = {axis for axes in slots.values() for axis in axes}
    for dim, position, part in base.parts():
        kept = tuple(axis for axis in part.axes if axis not in moved)
        base = base.with_axes(dim, position, slots.get((dim, position), kept))
    return base


def stored_split(
    base: Sharding, kind: str, stores: Mapping[str, Sequence[str]], sizes: Mapping[str, int], held: Collection[Place] = ()
) -> Sharding:
    """`base` split along the axes that store this kind; axes that split `base` already stay.

    stores  axis -> kinds that are stored split along it, in mesh order
    held    parts that are split no further

    Where only some kinds are stored along an axis, that axis comes last and all kinds are split at the same place: a reduce-scattered
    gradient is then a slice away from the state, and a new parameter one gather from the state.
    """
    free = [axis for axis in stores if axis not in base.split_axes()]
    order = sorted(free, key=lambda axis: [name not in stores[axis] for name in STORES])
    mine = [axis for axis in order if CLAUSE[kind] in stores[axis]]
    together = _place(base, order, sizes, held)
    if together is not None and local_size(_part(base, together), sizes) >= prod(sizes[axis] for axis in order):
        return base.with_axes(*together, (*_part(base, together).axes, *mine))
    for axis in mine:  # no part is large enough for all
        place = _place(base, [axis], sizes, held)
        if place is not None:
            base = base.with_axes(*place, (*_part(base, place).axes, axis))
    return base


def _place(base: Sharding, axes: Sequence[str], sizes: Mapping[str, int], held: Collection[Place]) -> Place | None:
    """The part to split: a dim's major factor if its size divides, else one with padding, else an inner one; None if nothing is left to
    split."""
    count = prod(sizes[axis] for axis in axes)
    choices = [
        (bool(part.axes), size % count != 0, position != 0, size < count, dim, position) for dim, position, part in base.parts()
        if (size := local_size(part, sizes)) >= 2 and (dim, position) not in held
    ]  # fmt: skip
    return min(choices)[-2:] if choices else None


def _part(base: Sharding, place: Place) -> Part:
    return base.dims[place[0]][place[1]]
