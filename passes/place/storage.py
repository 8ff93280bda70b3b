"""How parameters, gradients and optimizer state lie between steps: split further than operators split them, along the axes that store them.

    dp: batch; store params, grads, state
    tp: ffn                                          [ffn 64/tp, hidden 32]    lies as    [ffn 64/tp, hidden 32/dp]

    dp: batch; store params, grads, state
    dp_shard: batch; store params, grads, state      [ffn 64, hidden 32]       lies as    [ffn 64/dp/dp_shard, hidden 32]

Several axes split one dim, so that what they hold is gathered by one collective over all of them, and its gradient, which is pending over
all of them, is reduce-scattered by one: over two dims each would be two, the first of them of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final, TypeAlias

from meshc.ir.sharding import Part, Sharding, local_size
from meshc.passes.phases.placed import Slots
from meshc.plan.entries import STORES

Place: TypeAlias = tuple[int, int]
"""A dim, and which of its parts."""

CLAUSE: Final = {"parameter": "params", "gradient": "grads", "state": "state"}
"""What lies between steps -> what plans call it."""


def held_to(base: Sharding, slots: Slots) -> Sharding:
    """`base` with these parts split so, and what splits them split nothing else."""
    moved = {axis for axes in slots.values() for axis in axes}
    for dim, position, part in base.parts():
        kept = tuple(axis for axis in part.axes if axis not in moved)
        base = base.with_axes(dim, position, slots.get((dim, position), kept))
    return base


def stored_split(
    base: Sharding, kind: str, stores: Mapping[str, Sequence[str]], sizes: Mapping[str, int], held: Collection[Place] = ()
) -> Sharding:
    """`base` split along the axes that store this kind; axes that split it already stay where they are.

    stores  axis -> what is stored split along it, in mesh order
    held    parts that are split no further

    Where only some kinds are stored along an axis, that axis comes last and all kinds are split at the same place: what a gradient is
    reduce-scattered to is then a slice away from the state, and a new parameter one gather from the state.
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
    """The part to split: a dim's major factor if it divides, else one that pads, else an inner one; None if nothing is left to split."""
    choices = []
    count = prod(sizes[axis] for axis in axes)
    for dim, position, part in base.parts():
        size = local_size(part, sizes)
        if size >= 2 and (dim, position) not in held:
            choices.append((bool(part.axes), size % count != 0, position != 0, size < count, dim, position))
    return min(choices)[-2:] if choices else None


def _part(base: Sharding, place: Place) -> Part:
    return base.dims[place[0]][place[1]]
