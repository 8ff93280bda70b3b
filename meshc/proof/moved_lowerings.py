"""Lines that are a lowering's result in other places, in a proof: moved, or a row for each rank that adds to a sum."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.proof.facts import Fact, is_value
from meshc.proof.lowered_lines import prove_lowering
from meshc.proof.regrouped import in_shape, sharding_before_move
from meshc.proof.tiles import Tiles

if TYPE_CHECKING:
    from meshc.proof.erasure import Erasure


def prove_moved(walk: Erasure, node: Node, found: Tiles, sharding: Sharding, hint: tuple[Node, int]) -> bool:
    """Whether a line whose traced value only moves another is a lowering of that one, moved likewise."""
    value = walk.traced.values[hint]
    made = walk.traced.makers.get(value.root, hint)
    if made == hint:
        return False
    own = sharding_before_move(walk.traced.values[made], value, sharding)
    return not prove_lowering(walk, node, found, own, *made, moved=Fact(value, sharding))


def prove_stacked(walk: Erasure, node: Node, found: Tiles, sharding: Sharding, hint: tuple[Node, int]) -> bool:
    """Whether a line is what ranks add to a sum, each as a row of its own: partial over the axes that split the rows."""
    first = sharding.dims[0] if sharding.dims else ()
    axes = [axis for part in first for axis in part.axes]
    if len(first) != 1 or not axes or first[0].size != prod(walk.sizes[axis] for axis in axes) or found.dims[0]:
        return False
    apart = Sharding(sharding.dims[1:], (*sharding.partial, *((axis, "sum") for axis in axes)))
    value = in_shape(walk.traced.values[hint], apart.shape)
    if value is None:
        return False
    own, row = sharding_before_move(walk.traced.values[hint], value, apart), replace(found, dims=found.dims[1:])
    if is_value(value, apart, row, walk.sizes):
        return walk.know(node, found, Fact(value, apart), "moved")
    if prove_lowering(walk, node, row, own, *hint, moved=Fact(value, apart)):
        return False
    made = walk.held[node]
    assert isinstance(made, Tiles)
    walk.held[node] = replace(made, dims=((), *made.dims))
    return True
