"""Multiplicity of decisions and values: how many of the whole model each stands for, where only a few layers were captured.

    forward    0 -> 1 -> 2 -> 3      what goes from one layer inside to the next: what 1 makes for 2
    backward   3 -> 2 -> 1 -> 0      what 2 makes for 1

A decision of block 1 stands for those of all layers that were left out, and block 2 decides as it does: between the two come their copies.
What block 0 hands to block 1 must then lie as what block 1 hands to block 2, and what block 3 wants of block 2 as what block 2 wants of
block 1; likewise in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch.fx import Node

from meshc.passes.depth.multiplicity import LayerMultiplicity
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.factors import Value
from meshc.passes.planner.search_space import DecidedValue, Key, Reading


def count_values(made: Mapping[Value, DecidedValue], standing: LayerMultiplicity) -> None:
    """Notes of each value how many it stands for."""
    back = {
        (standing.twin[node], index)
        for (node, index), value in made.items()
        if node in standing.twin and any(reading.node in standing.count for reading in value.readings)
    }
    for (node, index), value in made.items():
        one = standing.one(node)
        if one in standing.count and (node is not one) == ((one, index) in back):
            value.count = standing.count[one]


def twin_decisions(decisions: Collection[Key], standing: LayerMultiplicity, parameters: Mapping[str, Node]) -> dict[Key, Key]:
    """The decisions of each block 2, with those of block 1 that they must be like. Raises Unequal where there is none."""
    names = {node: name for name, node in parameters.items()}
    found: dict[Key, Key] = {}
    for key in decisions:
        other = parameters[key[1]] if isinstance(key, tuple) else key
        one = standing.twin.get(other)
        if one is not None:
            found[key] = (key[0], names[one]) if isinstance(key, tuple) else one
            if found[key] not in decisions:
                raise Unequal(f"{other.name} may be split, and what is equal to it in another layer may not")
    return found


def neighbours(
    made: Mapping[Value, DecidedValue], standing: LayerMultiplicity, twins: Mapping[Key, Key], stored: Mapping[Key, Key]
) -> dict[Key, Key]:
    """Decisions of blocks 0 and 3 with those of block 1 that they should be like, where the two can be decided alike. `stored`: what the
    two store."""
    if not standing.twin:
        return {}
    other = {one: node for node, one in standing.twin.items()}
    read = {(reading.node, reading.operand): value for value in made.values() for reading in value.readings}
    found: dict[Key, Key] = {}
    for (node, index), value in made.items():
        for reading in value.readings:
            reader, twin = reading.node, None
            if reader is not None and _is_of_block(standing, node, 0) and reader in other:
                twin = read.get((other[reader], reading.operand))
            elif reader is not None and _is_of_block(standing, node, 3) and reader in standing.twin:
                twin = read.get((standing.twin[reader], reading.operand))
            if twin is not None:
                found.setdefault(value.decision, twins.get(twin.decision, twin.decision))
        inner = made.get((other[node], index)) if node in other else None
        pairs = [(value, 0, inner, 1), (inner, 3, value, 2)] if inner is not None else []
        if node not in standing.block:
            pairs = [(value, 0, value, 1), (value, 3, value, 1)]
        for one, block, like, inside in pairs:
            for mine, theirs in _pairs(_readings_of_block(one, block, standing), _readings_of_block(like, inside, standing), standing):
                found.setdefault(mine.reader, twins.get(theirs.reader, theirs.reader))
    found.update(stored)  # the norm of all gradients adds up what they leave partial, layer by layer
    return {key: twin for key, twin in found.items() if key not in twins and key != twin}


def storage_neighbours(decisions: Collection[Key], standing: LayerMultiplicity, parameters: Mapping[str, Node]) -> dict[Key, Key]:
    """How the layers of blocks 0 and 3 store their parameters and states, with how those of block 1 do it. Equal layers have theirs in
    one order."""
    names: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for name, node in parameters.items():
        if node in standing.block:
            names[(*standing.block[node], standing.place[node])].append(name)
    return {
        (kind, name): (kind, one)
        for (stretch, block, place), mine in names.items() if block in (0, 3) and len(mine) == len(names.get((stretch, 1, place), ()))
        for name, one in zip(mine, names[stretch, 1, place], strict=True)
        for kind in ("parameter", "state") if (kind, name) in decisions and (kind, one) in decisions
    }  # fmt: skip


def _is_of_block(standing: LayerMultiplicity, node: Node, block: int) -> bool:
    return node in standing.block and standing.block[node][1] == block


def _pairs(mine: Iterable[Reading], theirs: Iterable[Reading], standing: LayerMultiplicity) -> Iterator[tuple[Reading, Reading]]:
    """Readings of two blocks that the same layers of them make, in order. Block 0 and block 3 may have less layers."""
    rows: dict[int, list[Reading]] = defaultdict(list)
    for one in theirs:
        rows[_place(one, standing)].append(one)
    left = {place: iter(row) for place, row in rows.items()}
    for one in mine:
        other = next(left.get(_place(one, standing), iter(())), None)
        if other is not None:
            yield one, other


def _place(reading: Reading, standing: LayerMultiplicity) -> int:
    assert reading.node is not None
    return standing.place[reading.node]


def _readings_of_block(value: DecidedValue, block: int, standing: LayerMultiplicity) -> Iterator[Reading]:
    """What a block reads of a value, in order."""
    return (reading for reading in value.readings if reading.node is not None and _is_of_block(standing, reading.node, block))
