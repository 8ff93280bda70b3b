"""Decisions and values of captured layers: multiplicity of each in the whole model, and decisions that must equal another layer's.

    forward    0 -> 1 -> 2 -> 3      repeated from layer to layer: values that block 1 makes for block 2
    backward   3 -> 2 -> 1 -> 0      values that block 2 makes for block 1

A decision of block 1 stands for those of all omitted layers, and block 2 decides as block 1: the omitted layers come between the two.
Values of block 0 for block 1 must then be sharded as those of block 1 for block 2, and block 3 must want of block 2 what block 2 wants of
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
    """Sets `count` of each value: the number of values of the whole model that it stands for."""
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
    """Decision of block 2 -> decision of block 1 that it must equal. Raises Unequal where there is none."""
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
    """Decision of block 0 or 3 -> decision of block 1 that it should equal. `stored`: result of `storage_neighbours`."""
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
    found.update(stored)  # the norm of all gradients adds up partial sums layer by layer
    return {key: twin for key, twin in found.items() if key not in twins and key != twin}


def storage_neighbours(decisions: Collection[Key], standing: LayerMultiplicity, parameters: Mapping[str, Node]) -> dict[Key, Key]:
    """Storage decision of block 0 or 3 -> that of block 1 for the same parameter. Parameters of equal layers come in one order."""
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
    """Readings of two blocks by equal layers, paired in order. Blocks 0 and 3 may have fewer layers."""
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
    """Readings of a value by a block, in order."""
    return (reading for reading in value.readings if reading.node is not None and _is_of_block(standing, reading.node, block))
