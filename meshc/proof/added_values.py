"""Lines that add values up, in a proof, in any order; parts of chunks and microbatches; and one number everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc.ir import record
from meshc.ir.sharding import Sharding
from meshc.ir.spmd import MICROBATCH
from meshc.proof.chunks import joined_partial
from meshc.proof.evaluate import repeat_root
from meshc.proof.facts import Fact, is_value
from meshc.proof.held import JoinedValues
from meshc.proof.regrouped import without_names
from meshc.proof.tiles import Tiles, tiles_of
from meshc.proof.uneven import counts_elements

if TYPE_CHECKING:
    from meshc.proof.erasure import Erasure


def prove_sum(walk: Erasure, node: Node, sharding: Sharding | None) -> bool:
    """Whether a line adds values that are sharded alike; then it is their sum. Or one value's parts of several chunks."""
    facts = [walk.known.get(one) for one in node.args]  # type: ignore[arg-type]
    if any(fact is None for fact in facts):
        return False
    rows = [fact for fact in facts if fact is not None]
    first = rows[0]
    if len({fact.value for fact in rows}) == 1 and (partial := joined_partial([fact.sharding.partial for fact in rows])) is not None:
        addends = [tiles_of(fact.value, replace(fact.sharding, partial=partial), walk.sizes) for fact in rows]
        made = replace(first.sharding, partial=partial) if sharding is None else sharding
        tiles = tiles_of(first.value, made, walk.sizes)
        if all(one.like(tiles) for one in addends):
            walk.held[node] = tiles
            return walk.know(node, tiles, Fact(first.value, made), "chunks")
    sharding = first.sharding if sharding is None else sharding
    shapes = {fact.value.shape for fact in rows}
    whys = {how for _, how in sharding.partial}
    if len(shapes) != 1 or whys - {"sum"} or any(without_names(fact.sharding) != without_names(sharding) for fact in rows):
        return False
    value = walk.traced.sum_of([fact.value for fact in rows], record(node).dtype, rows[0].value.shape)
    tiles = tiles_of(value, sharding, walk.sizes)
    tiles = walk.held[node] = without_new_padding(walk, node, tiles)
    return walk.know(node, tiles, Fact(value, sharding), "sum")


def without_new_padding(walk: Erasure, node: Node, tiles: Tiles) -> Tiles:
    """What a pointwise call gives of a value that is repeated has padding where an operand has."""
    there = {row for one in node.all_input_nodes if isinstance(x := walk.held[one], Tiles) for row in x.uneven}
    return replace(tiles, uneven=tuple(row for row in tiles.uneven if row in there or not counts_elements(row)))


def prove_part(walk: Erasure, node: Node, found: Tiles, sharding: Sharding, values: Sequence[Tiles]) -> bool:
    """Whether a line is one microbatch's own of a sum that the traced graph says is of all."""
    own = replace(sharding, partial=tuple(row for row in sharding.partial if row != (MICROBATCH, "sum")))
    if own == sharding:
        return False
    for value in values:
        made = walk.traced.sums_of_parts.get(value)
        if made is not None and is_value(value, own, found, walk.sizes):
            tiles = walk.held[node] = replace(tiles_of(made, sharding, walk.sizes), padding=zeros_of(found))
            return walk.know(node, tiles, Fact(made, sharding), "moved")
    return False


def prove_fill(walk: Erasure, node: Node, found: Tiles | JoinedValues, sharding: Sharding) -> bool:
    """Whether a line is one number in every place: so it is, however it is split; zeros are also what sums are added up from."""
    number = walk.evaluator.filled_with(found.root) if isinstance(found, Tiles) else None
    if number is None or isinstance(found, JoinedValues) or any(how != "sum" or number for _, how in sharding.partial):
        return False
    value = repeat_root(found.root, sharding.shape)
    tiles = tiles_of(value, sharding, walk.sizes)
    walk.held[node] = tiles
    return tiles.dims == found.dims and walk.know(node, tiles, Fact(value, sharding), "filled")


def zeros_of(x: Tiles) -> tuple[tuple[str, float], ...]:
    """What is known of padding that holds zeros, which stay zeros in a sum."""
    return tuple(row for row in x.padding if row[1] == 0.0)
