"""Between stages, in a proof: collectives of several of them, and parts of each microbatch as what all of them come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc.ir import record, spmd
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.spmd import MICROBATCH
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage
from meshc.proof.added_values import zeros_of
from meshc.proof.exchanged_tiles import all_gather, all_reduce
from meshc.proof.facts import Fact
from meshc.proof.held import Held, JoinedValues
from meshc.proof.joined_values import each
from meshc.proof.regrouped import without_names
from meshc.proof.tiles import Tiles, tiles_of

if TYPE_CHECKING:
    from meshc.proof.erasure import Erasure


def walk_joint_collective(walk: Erasure, met: Mapping[str, tuple[Stage, Node]], count: int) -> None:
    """A collective of several stages: each of them has its own part."""
    rows = list(met.values())
    _, first = rows[0]
    facts = [walk.known.get(node.args[0]) for _, node in rows]  # type: ignore[arg-type]
    alike = all(node.target is first.target and node.args[1:] == first.args[1:] for _, node in rows)
    known = [fact for fact in facts if fact is not None]
    fact: Fact | None = None
    tiles: Tiles | None = None
    why = "stages meet here, and what they make of it is not known"
    if not alike or len(met) != count or len(first.args[1]) != 1:  # type: ignore[arg-type]
        why = "stages have other collectives in its place"
    elif len(known) == len(rows) and first.target is spmd.all_reduce and first.args[2] == "sum":
        if len({without_names(one.sharding) for one in known}) == len({one.value.shape for one in known}) == 1:
            value = walk.traced.sum_of([one.value for one in known], record(first).dtype, known[0].value.shape)
            fact = Fact(value, known[0].sharding)
            tiles = tiles_of(value, fact.sharding, walk.sizes)
    elif first.target is spmd.broadcast:
        fact, source = facts[first.args[2]], walk.held[rows[first.args[2]][1].args[0]]  # type: ignore[index]
        tiles = source if isinstance(source, Tiles) and source.root in walk.traced.known else None
    for stage, node in rows:
        if tiles is None:
            walk.held[node] = walk.evaluator.root(record(node).shape, "met", node.name)
            walk.fail(stage, node, why)
            continue
        walk.held[node] = tiles
        if fact is not None:
            walk.know(node, tiles, fact)
        walk.proof.kinds["over stages"] += 1


def give(walk: Erasure, key: str, held: Held) -> None:
    """A stage's result under its key; a part of each microbatch as what all of them come to."""
    whole = whole_of(key)
    walk.keyed[key] = held
    if whole is None:
        return
    if walk.program.microbatches == 1:
        walk.keyed[whole[1]] = held
        return
    how = {one.instruction: name for name, one in REDUCTIONS.items()}.get(whole[0])
    if how is not None and isinstance(held, JoinedValues):
        walk.keyed[whole[1]] = each(held, lambda piece: over_microbatches(walk, piece, how))
    elif how is not None and isinstance(held, Tiles):
        walk.keyed[whole[1]] = over_microbatches(walk, held, how)
    elif isinstance(held, Tiles):
        walk.keyed[whole[1]] = all_gather(walk.evaluator, held, (MICROBATCH,), 0)


def over_microbatches(walk: Erasure, x: Tiles, how: str) -> Tiles:
    """What all microbatches' own come to: what was partial over them, or of a step that is their mean the sum that the traced graph
    says is of all."""
    for value in walk.facts.values_of(x.root):
        made = walk.traced.sums_of_parts.get(value)
        if made is not None and how == "sum" and all(one == "sum" for _, one in x.partial):
            for fact in walk.facts.of(x, value):
                tiles = replace(tiles_of(made, fact.sharding, walk.sizes), padding=zeros_of(x))
                walk.facts.add(tiles, Fact(made, fact.sharding))
                return tiles
    return all_reduce(walk.evaluator, x, (MICROBATCH,), how)
